"""FEATHERS: a bandit over hyper-parameters alternates with federated DARTS."""

from dataclasses import dataclass

from fednas_flwr.algorithms.fed_darts import RULES
from fednas_flwr.settings import AlgorithmSettings, names, registry
from fednas_flwr.settings import optimizers as opt


@dataclass(frozen=True)
class FEATHERSSettings(opt.ConfigurationChoice, AlgorithmSettings):
    """FEATHERS: local epochs whose hyper-parameters a bandit chooses.

    Attributes:
        rule: Rule of the alphas' gradient, as in federated DARTS.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        clip_norm: Largest norm of a batch's mean gradient; null does not clip.
        nas_rounds: Rounds of search from one exploration to the next.
        annealed: True if the weights' learning rates fall along a cosine to 0 over a stage.
        beta_decay: Weight of beta-DARTS' regulariser in the last round of the search, reached in a
            linear rise.
        loss_bound: Bound on the decrease of a record's loss.
        bandit: The bandit's constants.
    """

    rule: opt.Rule
    local_epochs: opt.Steps
    batch_size: opt.Count
    clip_norm: opt.ClipNorm | None
    nas_rounds: opt.Count
    annealed: bool
    beta_decay: opt.RateOrZero
    loss_bound: opt.LossBound
    bandit: opt.BanditSettings


_UNUSED = (
    registry.Rule(
        "algorithm.rule algorithm.local_epochs algorithm.batch_size algorithm.clip_norm "
        "algorithm.beta_decay",
        lambda c: not c.searches,
        "stages={c.stages}, which lack search",
    ),
)
registry.register(
    "algorithm",
    "feathers",
    registry.Algorithm(
        FEATHERSSettings,
        search=f"{__name__}.strategy:FEATHERS",
        retraining=f"{__name__}.strategy:FEATHERS",
        units=names.UNITS,
        asks_rewards=True,
        unused=_UNUSED,
        clashes=RULES,
    ),
)

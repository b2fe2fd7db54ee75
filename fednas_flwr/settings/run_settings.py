"""All settings of one run, and their JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.algorithm_settings import AlgorithmSettings
from fednas_flwr.settings.data_settings import Dataset
from fednas_flwr.settings.names import PRECISIONS
from fednas_flwr.settings.network_settings import Retrain, SearchSpaceSettings
from fednas_flwr.settings.optimizers import MOMENTA, Count, CountOrZero, ShareAbove0
from fednas_flwr.settings.parser import Between, Checked, Length, OneOf, Text, check_distinct
from fednas_flwr.settings.partitions import Partition
from fednas_flwr.settings.privacy_settings import DifferentialPrivacy, NoPrivacy
from fednas_flwr.settings.rounds import (
    AggregateSettings,
    SamplingSettings,
    SecureSumSettings,
    ServerOptimizer,
)
from fednas_flwr.settings.runtimes import Runtime

STAGES = ("search", "retrain", "evaluate", "export")
TRACKERS = ("tensorboard", "mlflow", "wandb")


@dataclass(frozen=True)
class TrainingSettings(Checked):
    """What all local training shares, of supernets and of networks.

    Attributes:
        precision: Number format of gradients without privacy: ``bfloat16`` is faster on GPUs that
            have it (torch's autocast). Weights, steps, second-order gradients and evaluation stay
            float32; not with privacy.
        momentum: The momentum between requests: dropped (``reset``), ``averaged`` like the model,
            or kept at the ``server`` (FedAvgM). Null is ``averaged`` in private retraining by
            ``privacy.retrain.noise_walk``, else ``reset``.
        class_factors: Public factors of the losses of classes, by name; with privacy they multiply
            what is clipped already.
        oversample: If true, training repeats the records of rarer classes; not with privacy.
    """

    precision: Annotated[str, OneOf(PRECISIONS)]
    momentum: Annotated[str, OneOf(MOMENTA)] | None
    class_factors: dict[str, ShareAbove0]
    oversample: bool


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """What is measured, and what a found network is compared with.

    Attributes:
        positive: The positive class of F1, AUROC, average precision, sensitivity and specificity;
            null takes the mean over classes, or the last of two.
        personalised: If true, clients test the trained network again after local epochs of their
            own; not with privacy.
        baselines: Random networks of the search space that are trained like the found one and
            shown beside it, with the data-free choice, a linear model and, for images, a ResNet-8;
            0 for none of these. Null is 2 where the run has taken over a minute and they add less
            than half of that, else 0.
    """

    positive: Text | None
    personalised: bool
    baselines: CountOrZero | None


@dataclass(frozen=True)
class Config(Checked):
    """One run.

    Attributes:
        run_dir: The run folder; null makes ``runs/<time>_<algorithm>_<data set>``.
        seed: Seed of everything that is drawn, except the division of records and the noise of
            privacy.
        clients: Number of clients.
        rounds: Rounds of the search: iterations of FNAS, candidates of random search.
        stages: Stages to run; ``search`` derives a genotype, the others need one.
        genotype: Architecture to retrain instead of searching: a file, or a name of
            ``conf/genotypes``.
        sampling: Rounds that ask some of the clients only: any of these settings, such as
            ``sampling.per_round=50``; null asks all.
        secure_sum: Replies of which the server sees totals only
            (:mod:`fednas_flwr.protocol.secure_sum`): ``true``, or any of these settings.
        training: What all local training shares.
        evaluation: What is measured, and what a found network is compared with.
        trackers: Experiment trackers that get the numbers of the rounds, beside TensorBoard each an
            extra of its name; what is sent leaves the server.
    """

    algorithm: AlgorithmSettings
    dataset: Dataset
    partition: Partition
    search_space: SearchSpaceSettings
    privacy: NoPrivacy | DifferentialPrivacy
    aggregate: AggregateSettings
    server_optimizer: ServerOptimizer
    runtime: Runtime
    retrain: Retrain
    run_dir: Text | None
    seed: CountOrZero
    clients: Count
    rounds: Count
    stages: Annotated[list[Annotated[str, OneOf(STAGES)]], Length(Between(1))]
    genotype: Text | None
    sampling: SamplingSettings | None
    secure_sum: SecureSumSettings | None
    training: TrainingSettings
    evaluation: EvaluationSettings
    trackers: list[Annotated[str, OneOf(TRACKERS)]]

    def __post_init__(self) -> None:
        """Check single values; ``configuration.check_combinations`` knows what excludes what."""
        super().__post_init__()
        check_distinct("stages", self.stages)
        check_distinct("trackers", self.trackers)
        number = self.sampling.per_round if self.sampling else 0.0
        if number >= 1 and not (number.is_integer() and number <= self.clients):
            raise ConfigError(
                f"sampling.per_round={number:g} with clients={self.clients}: expected a whole "
                "number of them, or a share below 1; set sampling=null for all."
            )

    @property
    def asked(self) -> int:
        """Number of clients that a round asks."""
        return self.clients if self.sampling is None else self.sampling.asked(self.clients)

    @property
    def samples(self) -> bool:
        """True if a round asks some clients only."""
        return self.asked < self.clients


def with_runtime(config: Config, **changed: object) -> Config:
    """The configuration with other settings of its runtime."""
    runtime: Any = config.runtime
    return replace(config, runtime=replace(runtime, **changed))


def dump_config(config: Config) -> str:
    """The configuration as one line of JSON that ``load_config`` reads back."""
    return json.dumps(asdict(config), sort_keys=True)

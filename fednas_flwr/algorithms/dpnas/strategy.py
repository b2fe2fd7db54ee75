"""DPNAS: candidates with shared weights, trained with DP-SGD's steps and chosen by a controller."""

from collections.abc import Sequence
from typing import Any

from fednas_flwr.algorithms.base import Metrics, PrivateRound, RoundStrategy
from fednas_flwr.algorithms.dpnas import DPNASSettings
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.requests import RewardCandidates, TrainCandidates
from fednas_flwr.search.optimizer_step import path_states
from fednas_flwr.search.samplers import Controller, Path, Sampler
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.space import SearchSpace, Supernet


class DPNAS(RoundStrategy[DPNASSettings]):
    """Cheng et al. (2022), DPNAS, arXiv 2110.08557, Alg. 1; one client is the paper's central case.

    A round samples candidates, which every client trains one after the other on the shared weights
    (``train.candidate``, lines 4 to 8), and averages the weights by N_k / N. After the warm-up it
    then samples other candidates and asks for their accuracy on validation records
    (``evaluate.candidates``), from which the controller learns (lines 9 to 13). After the last
    round the result is the best of ``final_candidates`` samples by the same measurement. Messages
    carry only the weights of the sampled paths; all others stay as they are.

    Deviations: one step of the controller has several candidates, since an exchange costs seconds.
    Each is measured on all validation records instead of a batch of 64. The authors' code ranks on
    test records, which are never used here.

    ``dp_aware`` is DP-SGD's clipping and noise as a regulariser, without any claim of privacy. With
    ``privacy=dp`` the noise of the releases takes its place. A round's samples come from (seed,
    round).
    """

    def __init__(self, network: Supernet, *args: Any, **parts: Any) -> None:
        """Keep the supernet, from which the tensors of each path are read."""
        self.supernet = network
        super().__init__(network, *args, **parts)

    def set_up(self) -> None:
        """Make the sampler; paths are sampled without alphas."""
        for states in (self.states, self.layouts):
            del states["alphas"]  # paths are sampled without them
        self.keeper = self.sampler = make_sampler(self.config.seed, self.settings, self.space)

    def run_round(self, server_round: int, num_rounds: int) -> Metrics:
        """Train candidates, then teach the controller; after the last round choose."""
        settings, final = self.settings, self.settings.final_candidates
        generator = make_generator(self.config.seed, "dpnas", server_round)
        request = TrainCandidates(
            candidates=self.sampler.sample(settings.trained_candidates, generator),
            step=server_round - 1,
            local_steps=settings.local_steps,
            batch_size=None if self.is_private else settings.batch_size,
            weights=settings.weights.at_round(server_round, num_rounds),
            dp_aware=None if self.is_private else settings.dp_aware,
            sparse=True,
        )
        only = path_states(self.supernet, request.candidates)
        metrics = self.train("train.candidate", request, only=only)
        if server_round > settings.warm_up_rounds:
            paths = self.sampler.sample(settings.rewarded_candidates, generator)
            rewards, measured = self._measure(paths)
            metrics |= measured | self.sampler.learn(paths, rewards)
        if server_round == num_rounds:
            paths = self.sampler.sample(final, generator)
            rewards, _ = self._measure(paths)
            best = max(range(final), key=rewards.__getitem__)
            self.values = {"path": paths[best], "reward": rewards[best]}
            metrics |= {"validation_best": rewards[best]}
        return metrics

    def _measure(self, paths: Sequence[Path]) -> tuple[list[float], Metrics]:
        """Each candidate's accuracy over all clients' validation records, and metrics."""
        request = RewardCandidates(candidates=[list(path) for path in paths], sparse=True)
        rewards, metrics = self.reward(request, only=path_states(self.supernet, paths), paths=paths)
        return rewards, {"validation_accuracy": sum(rewards) / len(rewards), **metrics}

    def derive(self) -> Genotype:
        """The best of the final candidates.

        Raises:
            ValueError: The last round is not over.
        """
        if "path" not in self.values:
            raise ValueError("the candidate is chosen after the last round")
        return self.space.genotype(self.values["path"])

    @classmethod
    def releases(cls, settings: DPNASSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of candidates' steps and of rewards; the last round measures once more."""
        steps = settings.trained_candidates * settings.local_steps
        planned = private.gradients({"weights": "train.candidate"}, steps=steps)
        learns = private.number > settings.warm_up_rounds
        measured = [learns, private.number == private.num_rounds].count(True)
        if measured:
            planned += [private.rewards("evaluate.candidates", measured)]
        return planned


def make_sampler(seed: int, settings: DPNASSettings, space: SearchSpace) -> Sampler:
    """A sampler of candidates that are not degenerate, initialised from the run's seed."""
    choices = tuple(map(len, space.offered))
    with seeded(seed, "sampler"):
        sampler = Sampler(choices)
        if settings.sampler == "controller":
            sampler = Controller(choices, settings.controller)
    sampler.rejects = lambda path: space.is_degenerate(space.genotype(path))
    return sampler

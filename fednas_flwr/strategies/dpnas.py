"""DPNAS: candidates with shared weights, trained with DP-SGD's steps and chosen by a controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.requests import RewardCandidates, TrainCandidates
from fednas_flwr.exchange.states import Tensors
from fednas_flwr.privacy.plan import PlannedRelease, gradient_releases, rewards_release
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.candidate import path_states
from fednas_flwr.search.samplers import Path, Sampler
from fednas_flwr.search.settings import SGD, DPAware
from fednas_flwr.search_spaces.dp_cells import DPCellSpace
from fednas_flwr.search_spaces.genotype import Genotype
from fednas_flwr.search_spaces.space import Supernet
from fednas_flwr.strategies.base import RoundStrategy, Shared


class DPNAS(RoundStrategy):
    """Cheng et al. (2022), DPNAS, arXiv 2110.08557, Alg. 1; its central case is one client.

    A round samples candidates, which every client trains one after the other on the shared weights
    (``train.candidate``, lines 4 to 8), and averages the weights by N_k / N. Then it samples others
    and asks for their accuracy on validation records (``evaluate.candidates``), of which the
    controller learns (lines 9 to 13); in the warm-up rounds it does not. After the last round the
    best of ``final_candidates`` samples, by the same measurement, is what is found. Messages carry
    the weights of the paths that they are about; all others stay as they are.

    Deviations: one step of the controller has several candidates, since an exchange costs seconds,
    each measured on all validation records instead of a batch of 64; the authors' code ranks on
    test records, which are never used here.

    Args:
        supernet: Of the space; the initial shared weights. It is only read.
        courier: Reaches the clients.
        space: The search space.
        sampler: The controller, or what takes its place.
        trained_candidates: Sampled and trained per round, all in one message.
        rewarded_candidates: Sampled and measured per round, likewise.
        final_candidates: Sampled and measured after the last round.
        warm_up_rounds: First rounds, which only train.
        local_steps: Steps of a client on each candidate.
        batch_size: Records per step.
        weights: SGD, annealed over the rounds.
        dp_aware: DP-SGD's clipping and noise as a regulariser, with no claim; None trains plainly.
            With ``private`` the noise of the releases takes its place.
        seed: The run's seed; the samples of a round come from (seed, round).
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: DPCellSpace,
        sampler: Sampler,
        trained_candidates: int,
        rewarded_candidates: int,
        final_candidates: int,
        warm_up_rounds: int,
        local_steps: int,
        batch_size: int,
        weights: SGD,
        seed: int,
        dp_aware: DPAware | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, **shared)
        for states in (self.states, self.layouts):
            del states["alphas"]  # paths are sampled without
        self.supernet, self.cells, self.sampler, self.seed = supernet, space, sampler, seed
        self.counts = (trained_candidates, rewarded_candidates, final_candidates)
        self.warm_up_rounds, self.weights = warm_up_rounds, weights
        self.local_steps, self.batch_size, self.dp_aware = local_steps, batch_size, dp_aware

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Train candidates, then teach the controller; after the last round choose."""
        trained, rewarded, final = self.counts
        generator = make_generator(self.seed, "dpnas", server_round)
        is_private = self.private is not None
        request = TrainCandidates(
            self.sampler.sample(trained, generator),
            step=server_round - 1,
            local_steps=self.local_steps,
            batch_size=None if is_private else self.batch_size,
            weights=self.client_weights(self.weights.at_round(server_round, num_rounds)),
            dp_aware=None if is_private else self.dp_aware,
            site=self.site,
            sparse=True,
        )
        own = path_states(self.supernet, request.candidates)
        metrics = self.train("train.candidate", request, self.weights.momentum, only=own)
        if server_round > self.warm_up_rounds:
            paths = self.sampler.sample(rewarded, generator)
            rewards, measured = self._measure(paths, server_round)
            metrics |= measured | self.sampler.learn(paths, rewards)
        if server_round == num_rounds:
            paths = self.sampler.sample(final, generator)
            rewards, _ = self._measure(paths, server_round)
            best = max(range(final), key=rewards.__getitem__)
            self.values = {"path": paths[best], "reward": rewards[best]}
            metrics |= {"validation_best": rewards[best]}
        return metrics

    def _measure(
        self, paths: Sequence[Path], server_round: int
    ) -> tuple[list[float], dict[str, float]]:
        """Return each candidate's accuracy over all clients' validation records, and metrics."""
        request = RewardCandidates([list(path) for path in paths], site=self.site, sparse=True)
        own = path_states(self.supernet, paths)
        rewards, noise, metrics = self.reward(request, only=own)
        self.courier.emit(
            "rewarded", stage=self.stage, round=server_round, paths=paths, rewards=rewards,
            noise=noise,
        )  # fmt: skip
        return rewards, {"validation_accuracy": sum(rewards) / len(rewards), **metrics}

    def derive(self) -> Genotype:
        """Return the best of the final candidates.

        Raises:
            ValueError: The last round is not over.
        """
        if "path" not in self.values:
            raise ValueError("the candidate is chosen after the last round")
        return self.cells.genotype(self.values["path"])

    def server_tensors(self) -> Tensors:
        """Return what the controller has learnt."""
        return self.sampler.tensors()

    def load_server_tensors(self, tensors: Tensors) -> None:
        """Take back what the controller has learnt."""
        self.sampler.load(tensors)


def releases(
    server_round: int,
    num_rounds: int,
    *,
    trained_candidates: int,
    warm_up_rounds: int,
    local_steps: int,
    batch_size: float | None,
    norms: Mapping[str, float],
) -> list[PlannedRelease]:
    """Return what a round releases of each client; the last one measures twice."""
    steps = trained_candidates * local_steps
    weights = {"weights": "train.candidate"}
    planned = gradient_releases(weights, batch_size=batch_size, steps=steps, norms=norms)
    measured = (server_round > warm_up_rounds) + (server_round == num_rounds)
    if measured:
        planned += [rewards_release("search", "evaluate.candidates", measured, norms["rewards"])]
    return planned

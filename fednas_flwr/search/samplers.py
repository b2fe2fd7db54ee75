"""Samplers of a search's candidates: :class:`RandomSampler` and :class:`Evolution`.

A third :class:`Sampler` is the controller of ``search.controller``; :class:`RejectionSampler` keeps
any of them from proposing what must not be a result. A candidate is a path: for each
edge the column of its op. Samplers know numbers only, no networks and no clients. In a search with
shared weights rewards grow while these are trained, so that what has been sampled long ago should
not be compared with what is new.

Tensor suffixes: N candidates, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fednas_flwr.settings.optimizers import EvolutionSettings

Path = list[int]

MOST_DRAWS = 1000  # times that a sampler is asked again for what was rejected


class Sampler(Protocol):
    """Proposes candidates and learns from their rewards."""

    def sample(self, count: int, generator: torch.Generator) -> list[Path]:
        """Return ``count`` paths; they may be equal."""

    def learn(self, paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, float]:
        """Learn from paths of the last call of :meth:`sample`; return what to report.

        Args:
            paths: At least one.
            rewards: One finite number for each; more is better.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that sampling and learning depend on, for a checkpoint."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`tensors` returned."""


class RandomSampler:
    """Draws every path with the same probability and learns nothing."""

    def __init__(self, choices: Sequence[int]) -> None:
        """Take the number of ops of each edge."""
        self.choices = tuple(choices)

    def sample(self, count: int, generator: torch.Generator) -> list[Path]:
        """Return independent draws."""
        return [
            [int(torch.randint(size, (), generator=generator)) for size in self.choices]
            for _ in range(count)
        ]

    def learn(self, paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, float]:
        """Learn nothing."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take nothing."""


class Evolution:
    """Regularised evolution (Real et al. 2019, arXiv 1802.01548, Alg. 1).

    Until as many candidates as the population holds are rewarded, and while none is, paths are
    drawn at random. Then each is a mutated copy of a parent, the best of a tournament drawn with
    replacement from the population; a mutation changes the op of one edge. The oldest candidates
    die, the best included. The paper's other mutation moves an edge, of which this space has all:
    its ``none`` takes the place. Deviation: several children are born at a time, from the same
    population.
    """

    def __init__(self, choices: Sequence[int], settings: EvolutionSettings) -> None:
        """Start without a population.

        Raises:
            ValueError: No edge has two ops.
        """
        if max(choices, default=1) < 2:
            raise ValueError(f"nothing can mutate: the edges have {tuple(choices)} ops")
        self.choices, self.settings = tuple(choices), settings
        self.paths_NE = torch.empty(0, len(self.choices), dtype=torch.int64)  # the oldest first
        self.rewards_N = torch.empty(0, dtype=torch.float64)

    def sample(self, count: int, generator: torch.Generator) -> list[Path]:
        """Return random paths, or children."""
        alive = len(self.paths_NE)
        missing = max(0, self.settings.population - alive) if alive else count
        random = RandomSampler(self.choices).sample(min(count, missing), generator)
        return random + [self._child(generator) for _ in range(count - len(random))]

    def learn(self, paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, float]:
        """Let the candidates join the population, and its oldest die."""
        new_NE, new_N = torch.tensor(paths), torch.tensor(rewards, dtype=torch.float64)
        self.paths_NE = torch.cat([self.paths_NE, new_NE])[-self.settings.population :]
        self.rewards_N = torch.cat([self.rewards_N, new_N])[-self.settings.population :]
        return {"population_reward": float(self.rewards_N.mean())}

    def tensors(self) -> dict[str, Tensor]:
        """Return the population."""
        return {"paths": self.paths_NE, "rewards": self.rewards_N}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a population."""
        self.paths_NE, self.rewards_N = tensors["paths"], tensors["rewards"]

    def _child(self, generator: torch.Generator) -> Path:
        """Return a mutated copy of the tournament's best; of equals the first drawn is taken."""
        size = (self.settings.tournament,)
        drawn = torch.randint(len(self.paths_NE), size, generator=generator).tolist()
        parent = max(drawn, key=self.rewards_N.__getitem__)
        child: Path = self.paths_NE[parent].tolist()
        mutable = [edge for edge, ops in enumerate(self.choices) if ops > 1]
        edge = mutable[int(torch.randint(len(mutable), (), generator=generator))]
        step = 1 + int(torch.randint(self.choices[edge] - 1, (), generator=generator))
        child[edge] = (child[edge] + step) % self.choices[edge]
        return child


class RejectionSampler:
    """Another sampler whose draws are conditioned on not being rejected: what is, is drawn anew.

    A controller goes on to learn by its own ``log pi``. Its expected step is still that of the
    conditioned policy ``pi / Z``, since the difference, ``grad log Z`` times the mean advantage, is
    zero where the baseline is the mean reward. If all of ``MOST_DRAWS`` repeated draws of a path
    are rejected, as where a policy has collapsed, a uniform one that is not takes its place.
    """

    def __init__(
        self, sampler: Sampler, choices: Sequence[int], rejects: Callable[[Path], bool]
    ) -> None:
        """Wrap a sampler.

        Args:
            sampler: What proposes and learns.
            choices: Number of ops of each edge.
            rejects: Whether a path must not be proposed; at least one path must be left. It must
                not depend on records.
        """
        self.sampler, self.rejects = sampler, rejects
        self._uniform = RandomSampler(choices)

    def sample(self, count: int, generator: torch.Generator) -> list[Path]:
        """Draw ``count`` paths, leaving out rejected ones."""
        paths: list[Path] = []
        draws = 0
        while len(paths) < count:
            sampler = self.sampler if draws < MOST_DRAWS else self._uniform
            drawn = sampler.sample(count - len(paths), generator)
            paths += [path for path in drawn if not self.rejects(path)]
            draws += 1
        return paths

    def learn(self, paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, float]:
        """Let the sampler learn."""
        return self.sampler.learn(paths, rewards)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sampler's."""
        return self.sampler.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the sampler its own back."""
        self.sampler.load(tensors)

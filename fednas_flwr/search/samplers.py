"""Samplers of a search's candidates: random draws, and DPNAS' controller.

A candidate is a path: the column of the op of each edge. No sampler proposes a path that must not
be a result. Samplers work on numbers only, without networks and clients. In a search with shared
weights rewards grow while the weights are trained, so old samples should not be compared with new
ones.

The controller is an LSTM that chooses the op of one edge after the other and learns by REINFORCE
(Cheng et al. 2022, DPNAS, arXiv 2110.08557, section 3.4 and Alg. 1); it is that of ENAS (Pham et
al. 2018, arXiv 1802.03268).

Tensor suffixes: N candidates, E edges, O ops of an edge, H hidden units.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from fednas_flwr.search.optimizer_step import Named, PlainAdam, after_prefix
from fednas_flwr.settings.optimizers import ControllerSettings

Path = list[int]

MOST_DRAWS = 1000  # number of repeated draws in place of a rejected path
HIDDEN = 100
INITIAL_RANGE = 0.1  # of all parameters, as in ENAS: at first all paths are about equally likely


class Sampler:
    """A sampler that draws all paths with equal probability and learns nothing; base of others.

    No sampler proposes a rejected path; it draws another one instead. A controller still learns
    with its own ``log pi``. Its expected step is nevertheless that of the conditioned policy ``pi /
    Z``, since the difference, ``grad log Z`` times the mean advantage, is zero if the baseline is
    the mean reward. If all of ``MOST_DRAWS`` repeated draws of a path are rejected, for instance
    because a policy has collapsed, a uniformly drawn path that is not rejected takes its place.

    Attributes:
        choices: Number of ops of each edge.
        rejects: Function that returns True for a path that must not be proposed; at least one path
            must be left. It must not depend on records. At first it rejects no path.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        """Store the number of ops of each edge."""
        self.choices = tuple(choices)
        self.rejects: Callable[[Path], bool] = lambda path: False

    def sample(self, count: int, generator: torch.Generator) -> list[Path]:
        """Draw ``count`` paths without rejected ones; they may be equal."""
        paths: list[Path] = []
        draws = 0
        while len(paths) < count:
            draw = self.draw if draws < MOST_DRAWS else self.uniform
            paths += [p for p in draw(count - len(paths), generator) if not self.rejects(p)]
            draws += 1
        return paths

    def uniform(self, count: int, generator: torch.Generator) -> list[Path]:
        """Draw paths independently, each with the same probability."""
        return [
            [int(torch.randint(size, (), generator=generator)) for size in self.choices]
            for _ in range(count)
        ]

    draw = uniform  # may include rejected paths

    def learn(self, paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, float]:
        """Learn from paths of the last call of :meth:`sample`; return metrics for the report.

        Args:
            paths: One or more paths.
            rewards: One finite number per path; more is better.
        """
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Everything on which sampling and learning depend, for a checkpoint."""
        return {}

    def load(self, tensors: Named) -> None:
        """Restore the result of :meth:`tensors`."""


class Policy(nn.Module):
    """A distribution over paths, ``pi(a) = prod_e pi(a_e | a_1 ... a_{e-1})``.

    Each edge has its own softmax; the chosen op is the LSTM's next input.
    """

    def __init__(self, choices: Sequence[int], *, temperature: float) -> None:
        """Draw the parameters from torch's global generator.

        Args:
            choices: Number of ops of each edge.
            temperature: Divisor of the logits.
        """
        super().__init__()
        self.temperature = temperature
        self.start_H = nn.Parameter(torch.empty(HIDDEN))
        self.lstm = nn.LSTMCell(HIDDEN, HIDDEN)
        self.embeddings = nn.ModuleList(nn.Embedding(ops, HIDDEN) for ops in choices[:-1])
        self.decoders = nn.ModuleList(nn.Linear(HIDDEN, ops) for ops in choices)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)

    def forward(self, paths_NE: Tensor) -> Tensor:
        """``log pi`` [N] of the paths, int64 [N, E]."""
        log_probs = [torch.zeros(len(paths_NE))]
        for ops_N, logits_NO in self._walk(len(paths_NE), lambda edge, _: paths_NE[:, edge]):
            log_probs.append(logits_NO.log_softmax(dim=-1).gather(1, ops_N[:, None])[:, 0])
        return torch.stack(log_probs).sum(0)

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw independent paths, int64 [N, E]."""

        def draw(_: int, logits_NO: Tensor) -> Tensor:
            return torch.multinomial(logits_NO.softmax(dim=-1), 1, generator=generator)[:, 0]

        return torch.stack([ops_N for ops_N, _ in self._walk(count, draw)], dim=1)

    def _walk(
        self, count: int, choose: Callable[[int, Tensor], Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Choose the ops [N] of one edge after the other; yields them with their logits [N, O]."""
        inputs, state = self.start_H.expand(count, -1), None
        for edge, decoder in enumerate(self.decoders):
            state = self.lstm(inputs, state)
            logits_NO = decoder(state[0]) / self.temperature
            ops_N = choose(edge, logits_NO)
            yield ops_N, logits_NO
            if edge < len(self.embeddings):
                inputs = self.embeddings[edge](ops_N)


def reinforce_loss(log_probs_N: Tensor, regularised_N: Tensor, *, baseline: float) -> Tensor:
    """A loss whose gradient, in expectation over paths from pi, is that of ``-(E[R] + w H)``.

    ``-1/N sum_i (R_i - w log pi(a_i) - b) log pi(a_i)`` with everything in brackets held fixed
    (Williams 1992). The entropy is ``H = E[-log pi]``, so ``-w log pi`` is a reward like R. The
    baseline b does not change the expectation as long as it does not depend on these paths.

    Args:
        log_probs_N: ``log pi`` of each path, with a graph.
        regularised_N: Each reward plus its share of the entropy, ``R - w log pi``.
        baseline: b.
    """
    return -((regularised_N - baseline).detach() * log_probs_N).mean()


@dataclass(frozen=True)
class Moments:
    """Moving mean and variance of rewards, with weights that add up to 1 over all rewards seen.

    Attributes:
        mean: Mean of the rewards.
        variance: Variance about this mean, >= 0.
    """

    mean: float
    variance: float

    @classmethod
    def of(cls, rewards: Sequence[float]) -> "Moments":
        """Mean and variance of at least one reward; equal rewards have variance exactly 0."""
        deviations_N = torch.tensor(rewards, dtype=torch.float64) - rewards[0]
        return cls(rewards[0] + float(deviations_N.mean()), float(deviations_N.var(correction=0)))

    def moved(self, newest: "Moments", *, decay: float) -> "Moments":
        """The moments of the mixture in which earlier rewards keep the share ``decay``."""
        shift = newest.mean - self.mean
        within = decay * self.variance + (1 - decay) * newest.variance
        return Moments(self.mean + (1 - decay) * shift, within + decay * (1 - decay) * shift**2)

    def standardised(self, rewards: Sequence[float]) -> list[float]:
        """Distances from the mean in standard deviations; undivided if the deviation is 0."""
        deviation = math.sqrt(self.variance) or 1.0
        return [(reward - self.mean) / deviation for reward in rewards]


class Controller(Sampler):
    """A sampler with a policy, Adam, and a moving average of rewards as baseline.

    One call of :meth:`learn` is one step. The paper does not say if entropy is summed or averaged
    over edges. Here it is the mean: 15 edges of 10 ops have 34.5 nats in all, next to which .05 of
    an accuracy would be negligible. The first baseline is the mean of the first rewards; ENAS
    begins at 0 and so rewards every path at first.

    With ``scaled``, which is not in the paper, rewards are given in standard deviations of the
    rewards so far, including the newest. If accuracies differ by little, the entropy would
    otherwise outweigh them. Mean and variance forget like the baseline, since rewards grow while
    shared weights are trained.
    """

    def __init__(self, choices: Sequence[int], settings: ControllerSettings) -> None:
        """Initialise from torch's global generator.

        Args:
            choices: Number of ops of each edge.
            settings: The constants.
        """
        super().__init__(choices)
        self.settings = settings
        self.policy = Policy(choices, temperature=settings.temperature)
        self.entropy_weight = settings.entropy_weight / len(choices)
        self.baseline = math.nan
        self.seen: Moments | None = None  # moments of the rewards, with scaled
        self._optimizer = PlainAdam(self.policy.parameters(), lr=settings.lr)

    def draw(self, count: int, generator: torch.Generator) -> list[Path]:
        """Draw independent paths from the policy."""
        return self.policy.sample(count, generator).tolist()

    def learn(self, paths: Sequence[Path], rewards: Sequence[float]) -> dict[str, float]:
        """Take one step; return the baseline and an estimate of the entropy in nats per edge."""
        decay = self.settings.baseline_decay
        if self.settings.scaled:
            newest = Moments.of(rewards)
            self.seen = newest if self.seen is None else self.seen.moved(newest, decay=decay)
            rewards = self.seen.standardised(rewards)
        paths_NE, rewards_N = torch.tensor(paths), torch.tensor(rewards)
        log_probs_N = self.policy(paths_NE)
        regularised_N = rewards_N - self.entropy_weight * log_probs_N.detach()
        mean = float(regularised_N.mean())
        if math.isnan(self.baseline):
            self.baseline = mean
        loss = reinforce_loss(log_probs_N, regularised_N, baseline=self.baseline)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.baseline = decay * self.baseline + (1 - decay) * mean
        entropy = float(-log_probs_N.detach().mean()) / paths_NE.shape[1]
        return {"controller_baseline": self.baseline, "controller_entropy": entropy}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, Adam's moments, the baseline and, with ``scaled``, the rewards' moments."""
        moments = self._optimizer.state_dict()["state"]
        tensors = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        for index, state in moments.items():
            tensors |= {f"adam.{index}.{name}": tensor for name, tensor in state.items()}
        tensors["baseline"] = torch.tensor(self.baseline, dtype=torch.float64)
        if self.seen is not None:
            tensors["seen"] = torch.tensor(astuple(self.seen), dtype=torch.float64)
        return tensors

    def load(self, tensors: Named) -> None:
        """Restore everything that learning has changed."""
        self.baseline = float(tensors["baseline"])
        self.seen = Moments(*tensors["seen"].tolist()) if "seen" in tensors else None
        self.policy.load_state_dict(after_prefix(tensors, "policy."))
        self._optimizer.state.clear()  # without moments before the first step
        for index, parameter in enumerate(self.policy.parameters()):
            if moments := after_prefix(tensors, f"adam.{index}."):
                self._optimizer.state[parameter] = moments

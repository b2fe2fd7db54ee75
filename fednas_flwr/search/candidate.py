"""One candidate of a search as a network of its own, and the training of candidates.

Pham et al. (2018), ENAS, arXiv 1802.03268: a candidate is a path through a supernet and inherits
the weights that others have trained. :func:`train_candidates` is lines 4 to 8 of DPNAS' Alg. 1
(Cheng et al. 2022, arXiv 2110.08557).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from fednas_flwr.privacy.mechanism.clipping import clipped_gradient_sum
from fednas_flwr.search.exact_gradients import ExactGradients, Passes
from fednas_flwr.search.objective import CLASSIFICATION, Objective
from fednas_flwr.search.optimizer_step import MOMENTS, Descent, Gradients, trainable_weights
from fednas_flwr.settings.optimizers import DPAware
from fednas_flwr.spaces.dp_cells import DPCellNetwork
from fednas_flwr.spaces.space import Supernet

MICRO_BATCH = 128  # records whose gradients are in memory at a time


class Candidate(nn.Module):
    """A supernet restricted to one path; it shares the supernet's parameters."""

    def __init__(self, supernet: Supernet, path: Sequence[int]) -> None:
        """Take the path.

        Args:
            supernet: Of the space ``dp_cells`` or ``dp_cells_darts``.
            path: For every edge the column of its op.

        Raises:
            ValueError: The supernet is of another space, or the path does not fit it.
        """
        super().__init__()
        if not isinstance(supernet.body, DPCellNetwork):
            raise ValueError("candidates are paths of search_space=dp_cells: set it")
        self.supernet, self.body = supernet, supernet.body
        self.path = supernet.body.checked_path(path)
        self.training = supernet.training

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights that the path computes with, under their names in the supernet."""
        return self.supernet.path_weights(self.path)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        logits: Tensor = self.body(x, path=self.path)
        return logits


def path_states(supernet: Supernet, paths: Iterable[Sequence[int]]) -> dict[str, set[str]]:
    """Return the names of tensors that training any of these paths reads or moves, by state.

    Server and clients compute it alike from the paths: messages about them carry nothing else.
    """
    weights = {name for path in paths for name in Candidate(supernet, path).weights()}
    moments = {f"weights.{moment}.{name}" for moment in MOMENTS["weights"] for name in weights}
    return {"weights": weights, "moments": moments}


def all_alike(supernet: Supernet) -> list[list[int]]:
    """Return for every op the path with that op on all edges.

    No path computes or keeps more than one of these: the ops of an edge have one shape.
    """
    edges, ops = next(iter(supernet.alphas().values())).shape
    return [[op] * edges for op in range(ops)]


def train_candidates(
    supernet: Supernet,
    paths: Sequence[Sequence[int]],
    gradients: Gradients,
    weights: Descent,
    *,
    steps: int,
) -> None:
    """Train the shared weights in place on one path after the other.

    Weights beside a path neither move nor decay in its steps; momentum goes from one to the next.

    Args:
        supernet: Its weights are those of ``weights``.
        paths: The candidates.
        gradients: Exact, clipped (:class:`ClippedGradients`) or noised; they yield ``steps`` times
            for each candidate.
        weights: The step.
        steps: Of each candidate.
    """
    supernet.train()
    chosen = (candidate for path in paths for candidate in repeat(Candidate(supernet, path), steps))
    for candidate, _ in zip(chosen, gradients.steps(), strict=True):
        weights.step(gradients.weights(candidate))


class ClippedGradients(ExactGradients):
    """DP-SGD's gradient, ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``, as a regulariser.

    It protects nobody: batches are not drawn by Poisson sampling, the noise follows from the run's
    seed, and nothing is booked.

    Args:
        train: See :class:`ExactGradients`, as those not named here.
        dp_aware: Clipping norm and noise.
        generator: Of the noise; on the CPU.
    """

    def __init__(
        self,
        train: Passes,
        *,
        steps: int,
        dp_aware: DPAware,
        generator: torch.Generator,
        objective: Objective = CLASSIFICATION,
    ) -> None:
        """See the class."""
        super().__init__(train, epochs=None, steps=steps, objective=objective)
        self.dp_aware, self.generator = dp_aware, generator

    def weights(self, network: nn.Module) -> dict[str, Tensor | None]:
        """Return the gradient on the step's train batch."""
        x, y = self.train_batch
        objective, clipping = self.objective, self.dp_aware

        def losses(logits: Tensor, labels: Tensor) -> Tensor:
            losses_B = objective.plain_losses(logits, labels)
            self.train_tally.add(losses_B, objective.hits(logits, labels))
            return losses_B

        parts = -(-len(x) // MICRO_BATCH)
        sums = clipped_gradient_sum(
            network,
            x,
            y,
            loss=losses,
            parameters=trainable_weights(network),
            max_norm=clipping.max_grad_norm,
            micro_batch_size=-(-len(x) // parts),
            class_factors=objective.class_factors,
        )
        std = clipping.noise_multiplier * clipping.max_grad_norm
        return {
            name: (
                total + std * torch.randn(total.shape, generator=self.generator).to(total.device)
            )
            / len(y)
            for name, total in sums.items()
        }

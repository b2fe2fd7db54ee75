"""One candidate of a search as a network of its own, and the training of candidates.

Pham et al. (2018), ENAS, arXiv 1802.03268: a candidate is a path through a supernet and inherits
the weights that others have trained. :func:`train_candidates` is lines 4 to 8 of DPNAS' Alg. 1
(Cheng et al. 2022, arXiv 2110.08557).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fednas_flwr.privacy.clipping import clipped_gradient_sum
from fednas_flwr.search.settings import DPAware
from fednas_flwr.search.training import Batch, Tally, clip_gradients, record_losses
from fednas_flwr.search_spaces.dp_cells_network import DPCellNetwork
from fednas_flwr.search_spaces.space import Supernet

MICRO_BATCH = 128  # records whose gradients are in memory at a time


class Candidate(nn.Module):
    """A supernet of which one path is computed; parameters are shared with it."""

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
        own = {id(weight) for weight in self.body.path_parameters(self.path)}
        return {n: w for n, w in self.supernet.weights().items() if id(w) in own}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        logits: Tensor = self.body(x, path=self.path)
        return logits


def all_alike(supernet: Supernet) -> list[list[int]]:
    """Return for every op the path with that op on all edges.

    No path computes or keeps more than one of these: the ops of an edge have one shape.
    """
    edges, ops = next(iter(supernet.alphas().values())).shape
    return [[op] * edges for op in range(ops)]


def train_candidates(
    supernet: Supernet,
    paths: Sequence[Sequence[int]],
    batches: Iterator[Batch],
    *,
    steps: int,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    dp_aware: DPAware | None = None,
    generator: torch.Generator | None = None,
    class_factors: Tensor | None = None,
) -> Tally:
    """Train the shared weights on one path after the other; return the tally of what was seen.

    Weights beside a path neither move nor decay in its steps.

    Args:
        supernet: In training mode; stepped in place.
        paths: The candidates.
        batches: Of which each step takes the next.
        steps: Of each candidate.
        optimizer: Of all weights: its momentum goes from candidate to candidate.
        clip_norm: Bounds a batch's mean gradient; None does not.
        dp_aware: Clips the gradient of every record and adds noise (section 3.3); None does
            neither.
        generator: Of that noise; on the CPU.
        class_factors: See :func:`fednas_flwr.search.training.record_losses`.
    """
    tally = Tally()
    for path in paths:
        candidate = Candidate(supernet, path)
        for _ in range(steps):
            optimizer.zero_grad()  # to None
            batch = next(batches)
            if dp_aware is None:
                logits = candidate(batch[0])
                losses = record_losses(logits, batch[1], class_factors)
                tally.add(losses, logits, batch[1])
                losses.mean().backward()  # type: ignore[no-untyped-call]
            else:
                weights = candidate.weights()
                noised = noised_mean(candidate, batch, dp_aware, tally, generator, class_factors)
                for name, gradient in noised.items():
                    weights[name].grad = gradient.to(weights[name])
            clip_gradients(optimizer, clip_norm)
            optimizer.step()
    optimizer.zero_grad()
    return tally


def noised_mean(
    candidate: Candidate,
    batch: Batch,
    settings: DPAware,
    tally: Tally,
    generator: torch.Generator | None,
    class_factors: Tensor | None = None,
) -> Mapping[str, Tensor]:
    """Return DP-SGD's gradient, ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``, of a path's weights.

    It protects nobody: batches are not drawn by Poisson sampling, the noise follows from the run's
    seed, and nothing is booked. The batch is added to ``tally``.
    """

    def losses(logits: Tensor, labels: Tensor) -> Tensor:
        losses_B = record_losses(logits, labels)
        tally.add(losses_B, logits, labels)
        return losses_B

    sums = clipped_gradient_sum(
        candidate,
        *batch,
        loss=losses,
        parameters=candidate.weights(),
        max_norm=settings.max_grad_norm,
        micro_batch_size=MICRO_BATCH,
        class_factors=class_factors,
    )
    std = settings.noise_multiplier * settings.max_grad_norm
    return {
        name: (total + std * torch.randn(total.shape, generator=generator).to(total.device))
        / len(batch[1])
        for name, total in sums.items()
    }

"""Crafted gradient canaries: records whose gradient is the auditor's, on a client's real path.

Whoever chooses the network chooses the gradients. :class:`CanaryBody` adds to a supernet's logits a
linear layer that reads nothing but marked records, and all other layers see a marked record as
zeros. So a canary's clipped gradient is the clipping norm times a direction in one column of that
layer, where other records have none (the Dirac canary of Nasr et al. 2023, arXiv 2302.07956), and
it gets there through the reading, the gradients, the clipping, the sum and the noise of every other
record. Main functions: :func:`with_canaries` and :func:`beside`.

Tensor suffixes: B batch, C classes, M marks, K columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fednas_flwr.data.loaders import Split
from fednas_flwr.layers import linear
from fednas_flwr.search_spaces.space import Supernet
from fednas_flwr.search_spaces.wide_operations import Stack

LAYER = "body.layer.weight"  # [C, K], in the supernet's states
MARK = 2.0**20  # above any value of a record; float32 is exact up to 2^24


@dataclass(frozen=True)
class Canaries:
    """Values that marked records put into the added layer.

    Attributes:
        columns: Column of the layer that each mark reads, from 0, [M].
        values: What it finds there, [M]: its gradient before clipping is as large, and a negative
            one turns it round.
    """

    columns: Sequence[int]
    values: Sequence[float]


class CanaryBody(nn.Module):
    """A supernet's body, and beside it the layer of the canaries, whose weights are 0."""

    def __init__(self, body: nn.Module, canaries: Canaries, *, num_classes: int) -> None:
        """Keep the body's own weights."""
        super().__init__()
        self.body = body
        self.layer = nn.Linear(max(canaries.columns) + 1, num_classes, bias=False)
        nn.init.zeros_(self.layer.weight)
        self._columns = torch.tensor(canaries.columns)
        self._values = torch.tensor(canaries.values, dtype=torch.float32)

    @property
    def takes_stack(self) -> bool:
        """As of the body."""
        return getattr(self.body, "takes_stack", False)

    def forward(
        self, x: Tensor, op_weights: Mapping[str, Tensor], stack: Stack | None = None
    ) -> Tensor:
        """Return logits [B, C]; arguments as of :class:`Supernet`.

        A crop or a hole that augmentation makes into a marked record leaves its mark.
        """
        marks_B = x.flatten(1).amax(dim=1) - MARK
        is_marked_B = (marks_B >= 0) & (marks_B < len(self._values))  # made-up records are wild
        marks_B = marks_B.where(is_marked_B, 0).long()
        values_B = self._values.to(x.device)[marks_B] * is_marked_B
        columns_B = self._columns.to(x.device)[marks_B]
        inputs_BK = one_hot(columns_B, self.layer.in_features) * values_B[:, None]
        others = x.masked_fill(is_marked_B.view(-1, *[1] * (x.dim() - 1)), 0.0)
        logits: Tensor = self.body(others, op_weights, *([] if stack is None else [stack]))
        if stack is None:
            added: Tensor = self.layer(inputs_BK)
        else:
            added = linear(inputs_BK, stack([self.layer.weight]))
        return logits + added


def with_canaries(supernet: nn.Module, canaries: Canaries, *, num_classes: int) -> Supernet:
    """Return the supernet, its body now inside a :class:`CanaryBody`."""
    assert isinstance(supernet, Supernet)
    supernet.body = CanaryBody(supernet.body, canaries, num_classes=num_classes)
    return supernet


def beside(split: Split, *, num_records: int, num_marks: int, label: int) -> Split:
    """Return the first records of a split, normalised, and after them one record of each mark.

    Args:
        split: Of a client.
        num_records: How many of its records to keep, if there are as many.
        num_marks: M.
        label: Of the marked records.

    Returns:
        A split in memory of its own; its last M rows are the marked records.
    """
    x, y = split.batch(torch.arange(min(num_records, len(split))), "cpu")
    marks_M = MARK + torch.arange(num_marks, dtype=torch.float32)
    marked = marks_M.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:])
    features = torch.cat([x.clamp(-MARK / 2, MARK / 2), marked])
    labels = torch.cat([y, torch.full((num_marks,), label)])
    return Split(features, labels, torch.arange(len(labels)), mean=(0.0,), std=(1.0,))


def direction(supernet: Supernet, x: Tensor, *, factors: Sequence[float]) -> tuple[int, Tensor]:
    """Return the label to give marked records, and their gradients' direction in a column [C].

    The gradient by the logits is ``softmax(logits) - onehot(label)``. Chosen is a label whose class
    has the largest factor, and among such ones the least likely.

    Args:
        supernet: With canaries.
        x: Zeros in the shape of one record, [1, ...].
        factors: Of the classes' losses.
    """
    with torch.no_grad():
        likely_C = supernet(x)[0].double().softmax(dim=0).cpu()
    label = max(range(len(likely_C)), key=lambda c: (factors[c], -float(likely_C[c])))
    gradient_C = likely_C - one_hot(torch.tensor(label), len(likely_C))
    return label, gradient_C / gradient_C.norm()

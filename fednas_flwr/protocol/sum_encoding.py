"""Summands of a reply as integer vectors on fixed grids, and the reply made from their total.

The sum covers a reply's number of examples n, n times each metric, gradient sums unchanged, and all
other states times n; for a trained model, n times its difference from the model that was sent.
Shares of noise are integers already. The reply made from the total is the one that a single client
with all records would have given: its average over one reply is the average over all. Main class:
:class:`Summands`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fednas_flwr.base.errors import ReplyError
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.secure_sum.masks import WIDE_CELL, Cells, Grid
from fednas_flwr.protocol.states import Layout, Packed, States
from fednas_flwr.protocol.sum_requests import Summed

MASKED = "masked"  # the only state of a masked reply
NOT_TOLD = 1.0  # number of examples in a masked reply

# Number of values by state name, then by dtype.
Sizes = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Summands:
    """The plan of one exchange's vectors, computed alike by server and clients.

    Attributes:
        action: The action that is requested.
        sizes: Sizes of the reply's states.
        summed: Terms of the sum, from the request.
        base: The states of the request, from which trained ones are differences.
    """

    action: str
    sizes: Sizes
    summed: Summed
    base: States

    @cached_property
    def wide(self) -> Grid:
        """The grid of values without a known range."""
        return Grid(WIDE_CELL, 64, len(self.summed.participants))

    def grid(self, state: str) -> Grid:
        """Return the grid of a state."""
        return self.summed.grids.get(state, self.wide)

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that the action may return."""
        return sorted(ACTIONS[self.action].metrics)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Length of each vector by dtype; a vector without values does not travel."""
        lengths = {"int64": 1 + 2 * len(self.metrics), "int32": 0}
        for state, _, size in self._parts():
            lengths["int32" if state in self.summed.ranges else "int64"] += size
        return {dtype: length for dtype, length in lengths.items() if length}

    def encode(self, reply: Reply) -> dict[str, np.ndarray]:
        """Return a reply as integers, by dtype.

        Args:
            reply: Reply with states of these sizes; those with a range are shares.

        Raises:
            ValueError: A value of a state without a range is not finite, or too large.
        """
        n, metrics = reply.num_examples, reply.metrics
        head = [n]
        for name in self.metrics:
            head += [n, n * metrics[name]] if name in metrics else [0.0, 0.0]
        vectors = {"int64": [self.wide.encode(head)], "int32": []}
        for state, dtype, _ in self._parts():
            if state in self.summed.ranges:
                vectors["int32"].append(self.grid(state).wrap(reply.shares[state]))
                continue
            vector = reply.states[state][dtype].double()
            if (sent := self._sent(state, dtype)) is not None:
                vector = vector - sent.double()
            vectors["int64"].append(self.wide.encode(vector.numpy() * self._weight(state, n)))
        return {dtype: np.concatenate(vectors[dtype]) for dtype in self.lengths}

    def decode(self, vectors: Mapping[str, np.ndarray], *, sites: int) -> Reply:
        """Return the reply made from a total.

        Args:
            vectors: The unmasked total, by dtype.
            sites: Number of clients in the total.

        Raises:
            ValueError: The total is beyond what they can have sent.
        """
        head = 1 + 2 * len(self.metrics)
        n, *pairs = self.wide.decode(vectors["int64"][:head], sites=sites).tolist()
        if not n > 0:
            raise ValueError(f"the total stands for {n} examples: expected more than 0.")
        totals = zip(self.metrics, pairs[::2], pairs[1::2], strict=True)
        metrics = {name: total / weight for name, weight, total in totals if weight > 0}
        states: dict[str, Packed] = {}
        places = {"int64": head, "int32": 0}
        for state, dtype, size in self._parts():
            kind = "int32" if state in self.summed.ranges else "int64"
            part = vectors[kind][places[kind] : places[kind] + size]
            places[kind] += size
            values = self.grid(state).decode(part, sites=sites) / self._weight(state, n)
            vector, target = torch.from_numpy(values), getattr(torch, dtype)
            if (sent := self._sent(state, dtype)) is not None:
                vector = vector + sent.double()
            rounded = vector if target.is_floating_point else vector.round()
            states.setdefault(state, {})[dtype] = rounded.to(target)
        return Reply(num_examples=n, metrics=metrics, states=states, sites=sites)

    def _parts(self) -> Iterator[tuple[str, str, int]]:
        """Yield state, dtype and size of every vector, in the order that all clients use."""
        for state in sorted(self.sizes):
            yield from ((state, dtype, n) for dtype, n in sorted(self.sizes[state].items()))

    def _weight(self, state: str, n: float) -> float:
        """Return the factor of a state; it is 1 for gradients, which are already sums."""
        return 1.0 if state in ACTIONS[self.action].gradients_of else n

    def _sent(self, state: str, dtype: str) -> torch.Tensor | None:
        """Return the vector from which a trained one's difference is sent."""
        return self.base.get(state, {}).get(dtype) if ACTIONS[self.action].trains else None


def sizes_of(states: States, shares: Mapping[str, Cells] | None = None) -> Sizes:
    """Return the sizes of a reply's states and shares."""
    cells = {name: {"float32": len(share.values)} for name, share in (shares or {}).items()}
    packed = states.items()
    return cells | {name: {d: v.numel() for d, v in state.items()} for name, state in packed}


def check_masked(reply: Reply, summands: Summands, layouts: Mapping[str, Layout]) -> None:
    """Refuse a masked reply with another form, or with other tensors than were asked for.

    Raises:
        ReplyError: It differs; the message says in what.
    """
    sizes = {dtype: v.numel() for dtype, v in reply.states.get(MASKED, {}).items()}
    if set(reply.states) != {MASKED} or sizes != summands.lengths:
        raise ReplyError(f"masked vectors of {summands.lengths} were expected, got {sizes}")
    for name, layout in layouts.items():
        if reply.digests.get(name) != layout.digest:
            raise ReplyError(f"the tensors of {name} have other names, shapes or dtypes than ours")
    if reply.metrics or reply.num_examples != NOT_TOLD:
        raise ReplyError("a masked reply tells no metric and no number of examples")

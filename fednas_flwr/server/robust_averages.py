"""Averages of packed states that a minority of hostile clients cannot move far.

The weighted mean of :class:`~fednas_flwr.protocol.states.WeightedAverage` follows one client
anywhere. :class:`TrimmedMean` sorts every coordinate over the clients and cuts off its ends.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fednas_flwr.protocol.states import Packed

CHUNK = 2**16  # elements that are sorted at a time, of every client


class TrimmedMean:
    """The coordinate-wise trimmed mean, or median, of packed states (Yin et al., 2018).

    arXiv 1803.01498, Definitions 1 and 2: of the N values of a coordinate the largest and smallest
    ``trim`` are left out, the others averaged; the median leaves out all but the middle one or
    two. While at most ``trim`` clients are hostile (of the median: fewer than N / 2), every
    coordinate lies between two values of honest clients.

    Deviation: the number that is cut off at each end is given, not its share of the clients, so
    that a client that is missing does not weaken it. Clients count alike whatever their number of
    examples: a weight is what a client says.

    Memory is that of all replies and of ``CHUNK * N`` elements.

    Args:
        trim: Values left out at each end, 0 or more; None is the median.
    """

    def __init__(self, trim: int | None) -> None:
        """See the class."""
        self.trim = trim
        self._states: list[Mapping[str, Packed]] = []

    def add(self, states: Mapping[str, Packed], *, weight: float) -> None:
        """Add one client's states; ``weight`` does not count."""
        self._states.append(states)

    def result(self) -> dict[str, Packed]:
        """Return the mean of what is left of every coordinate and give up the states.

        Integer vectors are averaged in float64, rounded, and keep their dtype.

        Raises:
            ValueError: There are not more than ``2 * trim`` states.
        """
        states, self._states = self._states, []
        trim = (len(states) - 1) // 2 if self.trim is None else self.trim
        if len(states) <= max(0, 2 * trim):
            raise ValueError(f"{len(states)} states are too few to leave out {trim} at each end")
        return {
            name: {
                dtype: _trimmed([state[name][dtype] for state in states], trim) for dtype in packed
            }
            for name, packed in states[0].items()
        }


def _trimmed(vectors: list[Tensor], trim: int) -> Tensor:
    """Return the trimmed mean of every coordinate of equally long vectors."""
    result = torch.empty_like(vectors[0])
    for start in range(0, len(result), CHUNK):
        chunk = slice(start, start + CHUNK)
        values_NP = torch.stack([vector[chunk] for vector in vectors])
        if not values_NP.dtype.is_floating_point:
            values_NP = values_NP.double()
        mean = values_NP.sort(dim=0).values[trim : len(vectors) - trim].mean(dim=0)
        result[chunk] = mean if result.dtype.is_floating_point else mean.round()
    return result


def median_rewards(rewards_NC: Tensor) -> Tensor:
    """Return rewards [C] of candidates that no minority of the clients decides.

    ``median_k(r_kc - mean_c r_kc)``, added to the median client's mean reward: a client's level,
    which differs with its records, says nothing of a candidate, and a median of raw rewards would
    follow whoever is in the middle. Clients count alike.

    Args:
        rewards_NC: Of each client, one for each candidate.
    """
    levels_N1 = rewards_NC.mean(dim=1, keepdim=True)
    return levels_N1.quantile(0.5) + (rewards_NC - levels_N1).quantile(0.5, dim=0)

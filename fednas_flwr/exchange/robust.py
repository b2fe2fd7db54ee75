"""Averages of packed states that a minority of hostile clients cannot move far.

The weighted mean of :class:`~fednas_flwr.exchange.states.WeightedAverage` follows one client
anywhere. :class:`TrimmedMean` sorts every coordinate over the clients and cuts off its ends;
:class:`Selection` leaves out whole clients, by Flower's Krum and Bulyan.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fednas_flwr.errors import unknown_choice
from fednas_flwr.exchange.states import Packed, WeightedAverage
from fednas_flwr.names import SELECTIONS

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


class Selection:
    """The states of those clients that lie closest together, by Flower's own functions.

    A client's score is the sum of its squared distances to its N - f - 2 nearest, f being the
    hostile ones. ``krum`` takes the state of the lowest score, ``multi_krum`` the mean of the
    N - f lowest, weighted by examples (Blanchard et al., 2017, arXiv 1703.02757, Sections 3 and
    5); ``bulyan``, of the N - 2 f lowest, at every coordinate the mean of the N - 4 f values
    closest to the median (El Mhamdi et al., 2018, arXiv 1802.07927, Section 4).

    Deviations: distances are of all floating values of a reply, not of counters of batches, which
    differ with the number of records; they are computed in float64 of the differences from the
    first client, since Flower's formula subtracts squared norms.

    Memory is that of all replies, and of one more of them in float64.

    Args:
        name: A name of ``SELECTIONS``.
        malicious: f, at least 0.

    Raises:
        ConfigError: The name is unknown.
    """

    def __init__(self, name: str, malicious: int) -> None:
        """See the class."""
        if name not in SELECTIONS:
            raise unknown_choice("aggregate", name, SELECTIONS)
        self.name, self.malicious = name, malicious
        self._states: list[Mapping[str, Packed]] = []
        self._weights: list[float] = []

    def add(self, states: Mapping[str, Packed], *, weight: float) -> None:
        """Add one client's states; ``weight`` counts in ``multi_krum`` only."""
        self._states.append(states)
        self._weights.append(weight)

    def result(self) -> dict[str, Packed]:
        """Return the state that the selected ones give, and give up all of them.

        Raises:
            ValueError: There are too few states, by ``SELECTIONS``.
        """
        states, weights, self._states, self._weights = self._states, self._weights, [], []
        if len(states) < (fewest := SELECTIONS[self.name] * self.malicious + 3):
            raise ValueError(
                f"aggregate={self.name} with malicious={self.malicious} needs {fewest} replies, "
                f"got {len(states)}"
            )
        most = len(states) - self.malicious
        kept = {"krum": 1, "multi_krum": most, "bulyan": most - self.malicious}[self.name]
        chosen = _closest(states, self.malicious, kept)
        if self.name == "krum":
            return {name: dict(packed) for name, packed in states[chosen[0]].items()}
        if self.name == "bulyan":
            beta = len(states) - 4 * self.malicious
            return _near_median([states[index] for index in chosen], beta)
        average = WeightedAverage()
        for index in chosen:
            average.add(states[index], weight=weights[index])
        return average.result()


def _closest(states: list[Mapping[str, Packed]], malicious: int, number: int) -> list[int]:
    """Return the places of as many states as are to be selected, the lowest score first."""
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.serverapp.strategy.multikrum import select_multikrum

    first = _floats(states[0])
    contents = [
        RecordDict({"arrays": ArrayRecord({"floats": Array(_floats(own) - first)})})
        for own in states
    ]
    with np.errstate(over="ignore", invalid="ignore"):  # a huge value is far away, too
        selected = select_multikrum(contents, malicious, number)
    places = {id(content): index for index, content in enumerate(contents)}
    return [places[id(content)] for content in selected]


def _floats(states: Mapping[str, Packed]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return all floating values of a client's states, float64."""
    vectors = (v for _, packed in sorted(states.items()) for _, v in sorted(packed.items()))
    floats = [v.detach().cpu().double().numpy() for v in vectors if v.dtype.is_floating_point]
    return np.concatenate(floats)


def _near_median(states: list[Mapping[str, Packed]], beta: int) -> dict[str, Packed]:
    """Return at every coordinate the mean of the ``beta`` values closest to the median."""
    from flwr.serverapp.strategy.bulyan import aggregate_n_closest_weights

    result: dict[str, Packed] = {}
    for name, packed in states[0].items():
        result[name] = {}
        for dtype, like in packed.items():
            values = [own[name][dtype].detach().cpu().numpy() for own in states]
            if not like.dtype.is_floating_point:
                values = [own.astype(np.float64) for own in values]
            median = np.median(values, axis=0)
            (mean,) = aggregate_n_closest_weights([median], [[own] for own in values], beta)
            mean = mean if like.dtype.is_floating_point else np.rint(mean)
            result[name][dtype] = torch.from_numpy(mean).to(like.dtype)
    return result

"""A network's tensors as a few flat vectors, which messages carry and the server averages.

A supernet has a thousand small tensors; sending, checking and adding them one by one costs far
more than the arithmetic. A :class:`Layout` lists the tensors in a vector, in their order. It is
computed on both sides from the same network and never sent: only its digest is.

A single client can move the weighted mean of :class:`WeightedAverage` anywhere; a minority of
hostile clients cannot move :class:`TrimmedMean` and :func:`median_rewards` far.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

MOMENTS = "moments"  # state of the optimisers' moments, if they travel with a model
CHUNK = 2**16  # elements of every client that a trimmed mean sorts at a time
Tensors = dict[str, Tensor]  # name -> tensor
Packed = dict[str, Tensor]  # dtype name, e.g. "float32" -> all tensors of that dtype, [numel]
States = Mapping[str, Packed]  # a network's states by name: weights, alphas, buffers, moments


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of the tensors of one state, in the order of packing."""

    entries: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Return the layout of ``tensors``."""
        entries = ((name, tuple(t.shape), _dtype_name(t.dtype)) for name, t in tensors.items())
        return cls(tuple(entries))

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal characters that differ if a name, shape, dtype or the order differs."""
        return hashlib.blake2b(repr(self.entries).encode(), digest_size=8).hexdigest()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of elements per dtype."""
        sizes: dict[str, int] = {}
        for _, shape, dtype in self.entries:
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return sizes

    def part(self, names: Collection[str]) -> "Layout":
        """Return the layout of the tensors with these names."""
        return Layout(tuple(entry for entry in self.entries if entry[0] in names))


@dataclass(frozen=True)
class Part:
    """Some tensors of a model's states, which travel instead of all of them.

    Attributes:
        whole: The states' layouts.
        only: The names of the part's tensors by state; a state that is not named is whole.
    """

    whole: Mapping[str, Layout]
    only: Mapping[str, Collection[str]]

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the part's states."""
        return {
            name: layout.part(self.only[name]) if name in self.only else layout
            for name, layout in self.whole.items()
        }

    def of(self, states: States) -> dict[str, Packed]:
        """Return the part of whole states."""
        part = dict(states)
        for state, names in self.only.items():
            if state in part:
                tensors = unpack(states[state], self.whole[state])
                part[state] = pack({n: tensor for n, tensor in tensors.items() if n in names})
        return part

    def filled(self, part: States, states: States) -> dict[str, Packed]:
        """Return whole states: the part's tensors, and the others as in ``states``."""
        whole = dict(part)
        for state in self.only.keys() & part.keys():
            whole[state] = {dtype: vector.clone() for dtype, vector in states[state].items()}
            tensors = unpack(whole[state], self.whole[state])
            for name, tensor in unpack(part[state], self.layouts[state]).items():
                tensors[name].copy_(tensor)
        return whole


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Return one contiguous CPU vector per dtype; a copy, in the order of ``tensors``."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors.values():
        groups.setdefault(_dtype_name(tensor.dtype), []).append(tensor.detach().reshape(-1))
    return {dtype: torch.cat(parts).cpu() for dtype, parts in groups.items()}


def unpack(packed: Packed, layout: Layout) -> Tensors:
    """Return the named tensors of ``packed`` as views of its vectors.

    Raises:
        ValueError: The vectors do not have the layout's sizes.
    """
    sizes = {dtype: vector.numel() for dtype, vector in packed.items()}
    if sizes != layout.sizes:
        raise ValueError(f"vectors of sizes {sizes} do not fit a layout of sizes {layout.sizes}")
    offsets = dict.fromkeys(packed, 0)
    tensors = {}
    for name, shape, dtype in layout.entries:
        start = offsets[dtype]
        offsets[dtype] = start + math.prod(shape)
        tensors[name] = packed[dtype][start : offsets[dtype]].view(shape)
    return tensors


def network_states(network: nn.Module) -> dict[str, Tensors]:
    """Return a network's tensors, by the states in which messages carry them.

    ``alphas`` are the architecture parameters of a supernet (empty for other networks),
    ``weights`` all other parameters, ``buffers`` the statistics of batch norm. The tensors are the
    network's own, not copies.
    """
    alphas: dict[str, nn.Parameter] = getattr(network, "alphas", dict)()
    architecture = {id(parameter) for parameter in alphas.values()}
    return {
        "weights": {n: p.data for n, p in network.named_parameters() if id(p) not in architecture},
        "alphas": {name: parameter.data for name, parameter in alphas.items()},
        "buffers": dict(network.named_buffers()),
    }


def load_states(
    network: nn.Module, states: States, *, only: Mapping[str, Collection[str]] = {}
) -> None:
    """Copy packed states into the network's own tensors, in place.

    Args:
        network: The network to change.
        states: States of this network, whole or in part.
        only: For states in part, the names of the tensors that they hold.

    Raises:
        ValueError: A state is not one of this network's, or has other sizes.
    """
    present = network_states(network)
    for name, packed in states.items():
        if name not in present:
            raise ValueError(f"a network has the states {sorted(present)}, got {name!r}")
        layout = Layout.of(present[name])
        if name in only:
            layout = layout.part(only[name])
        for key, tensor in unpack(packed, layout).items():
            present[name][key].copy_(tensor)


class WeightedAverage:
    """The weighted mean of packed states, ``sum_k n_k x_k / sum_k n_k``, one reply at a time.

    It holds one running sum, however many replies are added (McMahan et al., 2017, arXiv
    1602.05629, Alg. 1; FDNAS, Alg. 1, for weights and alphas alike). Integer vectors, such as batch
    norm's counters, are summed in float64, rounded, and keep their dtype.
    """

    def __init__(self) -> None:
        """Start without any states."""
        self.total_weight = 0.0
        self._sums: dict[str, Packed] = {}

    def add(self, states: States, *, weight: float) -> None:
        """Add one client's states, weighted by ``weight`` > 0 (a number of examples)."""
        for name, packed in states.items():
            sums = self._sums.setdefault(name, {})
            for dtype, vector in packed.items():
                source = vector if vector.dtype.is_floating_point else vector.double()
                if dtype in sums:
                    sums[dtype].add_(source, alpha=weight)
                else:
                    sums[dtype] = source * weight
        self.total_weight += weight

    def result(self) -> dict[str, Packed]:
        """Return the mean of the added states, at least one, and discard the sums."""
        means, self._sums = self._sums, {}
        for sums in means.values():
            for dtype, vector in sums.items():
                vector.div_(self.total_weight)
                if not getattr(torch, dtype).is_floating_point:
                    sums[dtype] = vector.round().to(getattr(torch, dtype))
        return means


class TrimmedMean:
    """The coordinate-wise trimmed mean, or median, of packed states (Yin et al., 2018).

    arXiv 1803.01498, Definitions 1 and 2: of a coordinate's N values the largest and smallest
    ``trim`` are omitted and the others averaged; the median omits all but the middle one or two. As
    long as at most ``trim`` clients are hostile (for the median, fewer than N / 2), every
    coordinate lies between two values of honest clients.

    Deviation: the number omitted at each end is given, not its share of the clients, so that a
    missing client does not weaken the protection. Clients count alike, whatever their numbers of
    examples, since a weight is only a client's claim.

    It needs the memory of all replies and of ``CHUNK * N`` elements.

    Args:
        trim: Number of values omitted at each end, 0 or more; None gives the median.
    """

    def __init__(self, trim: int | None) -> None:
        self.trim = trim
        self._states: list[States] = []

    def add(self, states: States, *, weight: float) -> None:
        """Add one client's states; ``weight`` is ignored."""
        self._states.append(states)

    def result(self) -> dict[str, Packed]:
        """Return the mean of every coordinate's remaining values and discard the states.

        Integer vectors are averaged in float64, rounded, and keep their dtype.

        Raises:
            ValueError: There are not more than ``2 * trim`` states.
        """
        states, self._states = self._states, []
        trim = (len(states) - 1) // 2 if self.trim is None else self.trim
        if len(states) <= max(0, 2 * trim):
            raise ValueError(f"{len(states)} states are too few to leave out {trim} at each end")
        return {
            name: {dtype: _trimmed([of[name][dtype] for of in states], trim) for dtype in packed}
            for name, packed in states[0].items()
        }


Average = WeightedAverage | TrimmedMean  # aggregation of many clients' states into one


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
    """Return rewards [C] of candidates such that no minority of the clients decides them.

    ``median_k(r_kc - mean_c r_kc)``, added to the median client's mean reward: a client's level,
    which depends on its records, says nothing about a candidate, and a median of raw rewards would
    follow the client in the middle. Clients count alike.

    Args:
        rewards_NC: Rewards by client and candidate.
    """
    levels_N1 = rewards_NC.mean(dim=1, keepdim=True)
    return levels_N1.quantile(0.5) + (rewards_NC - levels_N1).quantile(0.5, dim=0)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

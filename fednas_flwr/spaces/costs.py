"""Costs of networks: parameters, multiply-adds or milliseconds, and losses that limit them.

:func:`count_multiply_adds` counts as papers do. For a supernet's ops, :class:`Costs` are
milliseconds (``latency_tables.py``) or multiply-adds, summed over layers. :class:`HardwareLoss`
keeps the expected cost near a target (Cai et al. 2019, ProxylessNAS, arXiv 1812.00332, section
3.3). :func:`measure_space` makes the latency table of a machine and compares sums over it with
whole networks.

Tensor suffixes: E blocks, O ops.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.base.layers import evaluating, hooked
from fednas_flwr.settings import Hardware, expanded
from fednas_flwr.spaces import latency_tables as lt
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.mbconv import Layer, MBConvSpace, make_layer
from fednas_flwr.spaces.space import SearchSpace

LOSSES = ("multiplicative", "additive")
NETWORK_PASSES = 21


@dataclass(frozen=True)
class Costs:
    """Cost of every op of a supernet.

    Attributes:
        unit: ``ms`` or ``multiply_adds``.
        fixed: Cost of the layers that all networks share.
        per_op: Cost of every op of every block; None if a block does not offer it.
    """

    unit: str
    fixed: float
    per_op: list[list[float | None]]

    @functools.cached_property
    def per_op_EO(self) -> Tensor:
        """Cost of every op, float64; NaN if a block does not offer it."""
        rows = [[math.nan if cost is None else cost for cost in row] for row in self.per_op]
        return torch.tensor(rows, dtype=torch.float64)

    @property
    def lowest(self) -> float:
        """Cost of the cheapest network."""
        return self.fixed + self.per_op_EO.nan_to_num(math.inf).amin(dim=-1).sum().item()

    @property
    def highest(self) -> float:
        """Cost of the most expensive network."""
        return self.fixed + self.per_op_EO.nan_to_num(-math.inf).amax(dim=-1).sum().item()

    def expected(self, probabilities_EO: Tensor) -> Tensor:
        """Return ``fixed + sum p * cost`` (section 3.3), differentiable in the probabilities.

        Probabilities of B records, [B, E, O], give [B].
        """
        per_op_EO = self.per_op_EO.nan_to_num(0.0).to(probabilities_EO)
        return self.fixed + (probabilities_EO * per_op_EO).sum((-2, -1))

    def of_path(self, path: Sequence[int]) -> float:
        """Return the cost of the network with one op per block, given by column."""
        rows = self.per_op_EO.tolist()
        return math.fsum([self.fixed, *(row[op] for row, op in zip(rows, path, strict=True))])


@dataclass(frozen=True)
class HardwareLoss:
    """A loss that combines a network's task loss CE and its expected cost E, with a target T.

    ``multiplicative``: ``CE * scale * (log E / log T) ** exponent`` (MnasNet's form as in
    ProxylessNAS' public code). ``additive``: ``CE + scale * (E - T) / T`` (divided by T so that
    ``scale`` has no unit). It holds plain values, as they travel to clients.

    Attributes:
        terms: Target T, its unit, the form and its constants, without the file of a table.
        costs: Costs of the supernet.
    """

    terms: Hardware
    costs: Costs

    @classmethod
    def of(cls, costs: Costs, terms: Hardware) -> "HardwareLoss":
        """Build the loss for a supernet's costs.

        Raises:
            ConfigError: The unit differs from that of the costs, or :meth:`check` refuses the loss.
        """
        if terms.unit != costs.unit:
            raise ConfigError(
                f"hardware.unit={terms.unit}, but the costs are in {costs.unit}: give the target "
                f"in {costs.unit}, from {costs.lowest:.4g} to {costs.highest:.4g}."
            )
        loss = cls(replace(terms, table=None), costs)
        loss.check()
        return loss

    @property
    def form(self) -> str:
        """One of ``LOSSES``."""
        return self.terms.loss

    def check(self) -> None:
        """Raise ConfigError if no network reaches the target, or a logarithm is not positive."""
        costs, target, unit = self.costs, self.terms.target, self.terms.unit
        check_choice("hardware.loss", self.form, LOSSES)
        if not costs.lowest <= target <= costs.highest:
            raise ConfigError(
                f"hardware.target={target:g} {unit} cannot be reached: networks of this space cost "
                f"{costs.lowest:.4g} to {costs.highest:.4g} {unit}."
            )
        if self.form == "multiplicative" and costs.lowest <= 1:
            raise ConfigError(
                f"hardware.loss=multiplicative needs costs above 1 {unit}, of which it takes "
                f"logarithms, but networks cost {costs.lowest:.4g} {unit} on: set "
                "hardware.loss=additive, or measure larger batches."
            )

    def __call__(self, task_loss: Tensor, cost: Tensor) -> Tensor:
        """Return the loss."""
        target, scale = self.terms.target, self.terms.scale
        if self.form == "multiplicative":
            ratio = cost.log() / math.log(target)
            return task_loss * scale * ratio**self.terms.exponent
        return task_loss + scale * (cost - target) / target


def count_parameters(network: nn.Module) -> int:
    """Return the number of elements of all parameters; buffers are not parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def count_multiply_adds(network: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of one example of ``input_shape`` in evaluation mode.

    torch counts 2 operations per multiply-add and none for pooling, norms and activations; the
    papers count multiply-adds of convolutions and dense layers, which is half of torch's number.
    """
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    counting: Any = _Operations()  # type: ignore[no-untyped-call]
    with torch.no_grad(), evaluating(network), counting as operations:
        network(torch.zeros(1, *input_shape, device=device))
    return operations.number // 2


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts operations by torch's formulas.

    torch's ``FlopCounterMode`` does the same, but it imports torch's compiler, which takes 1 s.
    """

    number = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if count := flop_registry.get(func.overloadpacket):
            self.number += count(*args, **kwargs, out_val=out)
        return out


@torch.no_grad()
def layers_of(
    network: nn.Module, input_shape: tuple[int, ...], genotype: Genotype | None
) -> list[dict[str, Any]]:
    """The parts of a network in the order of computation: name, kind of cell, shape, parameters."""
    layers: list[dict[str, Any]] = []
    cells = {} if genotype is None else genotype.cells

    def note(module: nn.Module, _: Any, output: Any) -> None:
        name = names[module]
        wiring = getattr(module, "wiring", None)
        kind = next((k for k, edges in cells.items() if wiring and [*edges] == [*wiring]), "")
        kind = kind or (next(iter(cells), "") if len(cells) == 1 and "stage" in name else "")
        if isinstance(output, Tensor):
            size = {"shape": list(output.shape[1:]), "parameters": count_parameters(module)}
            layers.append({"name": name, "kind": kind, **size})

    def parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        inside = dict(module.named_children())
        if isinstance(module, nn.ModuleList) or name in ("", "skeleton"):
            for label, part in inside.items():
                if label.isdigit():  # named by its kind, else by its place
                    kind = type(part).__name__.lower()
                    label = f"{name.removesuffix('s')} {int(label) + 1}" if name else kind
                yield from parts(label, part)
        elif not isinstance(module, nn.Identity):
            yield name.replace("_", " "), module

    names = {module: name for name, module in parts("", network)}
    with hooked(names, note), evaluating(network):
        network(torch.zeros(1, *input_shape))
    return layers


def timed_space(space: SearchSpace) -> MBConvSpace:
    """Return the space if latency tables can be made for it; raise ConfigError otherwise."""
    if not isinstance(space, MBConvSpace):
        raise ConfigError(f"search_space={space.name} has no latency table: choose mbconv.")
    return space


def measure_space(
    space: MBConvSpace, under: lt.Conditions, genotypes: Sequence[Genotype] = ()
) -> tuple[lt.LatencyTable, list[tuple[float, lt.Timing]]]:
    """Measure the latency of every distinct layer of a space; see ``latency_tables``.

    The result also has, for the derived networks of ``genotypes``, the latency in ms that the table
    predicts and the one measured in the same passes.
    """
    plan = space.plan
    candidates = (layer for row in plan.blocks for layer in row if layer is not None)
    table, measured = lt.measure_latency(
        [*plan.before, *candidates, *plan.after],
        functools.partial(make_layer, norm=space.norm),
        under,
        norm=space.norm,
        networks=[(space.network(genotype), space.input_shape) for genotype in genotypes],
    )
    costs = space_costs(space, table)
    predicted = (costs.of_path(space.path(genotype)) for genotype in genotypes)
    return table, list(zip(predicted, measured, strict=True))


def measure_network(
    space: MBConvSpace, table: lt.LatencyTable, genotype: Genotype, *, device: torch.device
) -> float | None:
    """Return the median time of a derived network in ms, measured here in the way of the table.

    The result is None if the table is from another kind of machine.
    """
    if (table.machine, table.device) != (lt.machine_name(device), device.type):
        return None
    under = lt.Conditions(device, table.threads, table.batch_size, NETWORK_PASSES)
    (timing,) = lt.time_modules([(space.network(genotype), space.input_shape)], under)
    return timing.median_ms


def space_costs(space: MBConvSpace, table: lt.LatencyTable | None) -> Costs:
    """Return the cost of every op of the space: ms from the table, or else multiply-adds.

    Raises:
        ConfigError: The table lacks a layer, or was measured with another norm.
    """
    plan = space.plan
    if table is not None and table.norm != space.norm:
        raise ConfigError(
            f"the latency table of {table.machine} was measured with norm={table.norm}, but "
            f"search_space.norm={space.norm}: measure it anew."
        )

    @functools.cache
    def multiply_adds(layer: Layer) -> float:
        with torch.device("meta"):
            return count_multiply_adds(make_layer(layer, norm=space.norm), layer.input_shape)

    unit, cost_of = ("multiply_adds", multiply_adds) if table is None else ("ms", table.latency_ms)
    rows = [[None if one is None else cost_of(one) for one in row] for row in plan.blocks]
    return Costs(unit, math.fsum(map(cost_of, (*plan.before, *plan.after))), rows)


def load_table(hardware: Hardware) -> lt.LatencyTable | None:
    """Return the latency table of a cost; None if costs are multiply-adds.

    Raises:
        ConfigError: The file cannot be read or is no table.
    """
    return None if hardware.table is None else read_table(Path(hardware.table))


def read_table(path: Path) -> lt.LatencyTable:
    """Return the latency table in a file.

    Raises:
        ConfigError: The file cannot be read or is no table.
    """
    try:
        text = expanded("algorithm.hardware.table", str(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the latency table {path} cannot be read: {error}.") from error
    return lt.from_json(text, origin=str(path))


def check_hardware(losses: Iterable[Hardware], space: SearchSpace) -> None:
    """Refuse a hardware loss that does not exist, or a target that no network reaches.

    For targets in ms without a table, the latter is known only once clients have measured.
    """
    for hardware in losses:
        check_choice("algorithm.hardware.loss", hardware.loss, LOSSES)
        if hardware.table is not None or hardware.unit != "ms":
            hardware_loss(hardware, space)


def hardware_loss(hardware: Hardware | None, space: SearchSpace) -> HardwareLoss | None:
    """Build the hardware loss from settings; refuse targets that the space cannot reach."""
    if hardware is None:
        return None
    return HardwareLoss.of(space_costs(timed_space(space), load_table(hardware)), hardware)


def ranges_of_cost(
    genotypes: Sequence[Genotype], space: SearchSpace, table: str | None, *, count: int
) -> list[list[int]]:
    """The positions of genotypes in at most ``count`` ranges of cost with equally many each.

    Their cost is the latency from a table in a file, or else the number of multiply-adds.
    """

    def multiply_adds(genotype: Genotype) -> float:
        with torch.device("meta"):
            return count_multiply_adds(space.network(genotype), space.input_shape)

    cost = multiply_adds if table is None else latency_of(space, table)
    by_cost = sorted(range(len(genotypes)), key=lambda place: cost(genotypes[place]))
    return [part.tolist() for part in np.array_split(by_cost, count) if len(part)]


def latency_of(space: SearchSpace, table: str) -> Callable[[Genotype], float]:
    """Build a predictor of the latency in ms of a genotype's network, from a table in a file.

    Raises:
        ConfigError: The file is no table, or the space has no latency tables.
    """
    if not isinstance(space, MBConvSpace):
        raise ConfigError(
            f"limits.table={table} with search_space={space.name}: a latency table is for mbconv "
            "only; set limits of parameters or multiply_adds."
        )
    costs = space_costs(space, read_table(Path(table)))
    return lambda genotype: costs.of_path(space.path(genotype))

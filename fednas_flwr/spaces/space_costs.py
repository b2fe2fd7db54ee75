"""Hardware cost of the ops and networks of the MBConv space, and what clients make of it.

:func:`measure_space` makes the latency table of a machine and compares sums over it with whole
networks, :func:`space_costs` makes the costs that a search takes, :func:`hardware_terms` the terms
of the loss that clients are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.settings import Hardware, expanded
from fednas_flwr.spaces.costs import (
    LOSSES,
    Costs,
    HardwareLoss,
    HardwareTerms,
    count_multiply_adds,
    sum_costs,
)
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.latency_tables import (
    LatencyTable,
    Timing,
    machine_name,
    measure_latency,
    time_modules,
)
from fednas_flwr.spaces.latency_tables import from_json as latency_from_json
from fednas_flwr.spaces.mbconv import Layer, MBConvSpace, make_layer
from fednas_flwr.spaces.space import SearchSpace

NETWORK_PASSES = 21


class Prediction(NamedTuple):
    """A derived network's latency: the sum over a table, and as it was measured."""

    predicted_ms: float
    measured: Timing


def measure_space(
    space: MBConvSpace,
    *,
    device: torch.device,
    threads: int,
    batch_size: int,
    passes: int,
    genotypes: Sequence[Genotype] = (),
) -> tuple[LatencyTable, list[Prediction]]:
    """Return the latency of every different layer of a space; see ``latency_tables``.

    And how well it predicts the derived networks of ``genotypes``, measured in the same passes.
    """
    plan = space.plan
    candidates = (layer for row in plan.blocks for layer in row if layer is not None)
    table, measured = measure_latency(
        [*plan.before, *candidates, *plan.after],
        lambda layer: make_layer(Layer(*layer), norm=space.norm),
        device=device,
        threads=threads,
        batch_size=batch_size,
        norm=space.norm,
        passes=passes,
        networks=[(space.network(genotype), space.input_shape) for genotype in genotypes],
    )
    costs = space_costs(space, table)
    predicted = (costs.of_path(space.path(genotype)) for genotype in genotypes)
    return table, [Prediction(*pair) for pair in zip(predicted, measured, strict=True)]


def measure_network(
    space: MBConvSpace, table: LatencyTable, genotype: Genotype, *, device: torch.device
) -> float | None:
    """Return the median time of a derived network in ms, measured here as the table was.

    None if the table is of another kind of machine.
    """
    if (table.machine, table.device) != (machine_name(device), device.type):
        return None
    (timing,) = time_modules(
        [(space.network(genotype), space.input_shape)],
        batch_size=table.batch_size,
        device=device,
        threads=table.threads,
        passes=NETWORK_PASSES,
    )
    return timing.median_ms


def space_costs(space: MBConvSpace, table: LatencyTable | None) -> Costs:
    """Return the cost of every op of the space: ms by the table, else multiply-adds.

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

    return sum_costs(
        unit="multiply_adds" if table is None else "ms",
        fixed=[*plan.before, *plan.after],
        blocks=plan.blocks,
        cost_of=multiply_adds if table is None else table.latency_ms,
    )


def load_table(hardware: Hardware) -> LatencyTable | None:
    """Return the latency table of a cost, None where costs are multiply-adds.

    Raises:
        ConfigError: The file cannot be read or is no table.
    """
    return None if hardware.table is None else read_table(Path(hardware.table))


def read_table(path: Path) -> LatencyTable:
    """Return the latency table in a file.

    Raises:
        ConfigError: The file cannot be read or is no table.
    """
    try:
        text = expanded("algorithm.hardware.table", str(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the latency table {path} cannot be read: {error}.") from error
    return latency_from_json(text, origin=str(path))


def check_hardware(losses: Iterable[Hardware], space: SearchSpace) -> None:
    """Refuse a hardware loss that does not exist, or a target that no network reaches.

    For targets in ms without a table the latter is known when clients have measured.
    """
    for hardware in losses:
        if hardware.loss not in LOSSES:
            raise unknown_choice("algorithm.hardware.loss", hardware.loss, LOSSES)
        if hardware.table is not None or hardware.unit != "ms":
            hardware_terms(hardware, space)


def hardware_terms(hardware: Hardware | None, space: SearchSpace) -> HardwareTerms | None:
    """Return the terms of the hardware loss; refuse targets that the space cannot reach."""
    if hardware is None:
        return None
    assert isinstance(space, MBConvSpace)  # as the configuration has it
    return HardwareTerms.of(
        HardwareLoss(
            costs=space_costs(space, load_table(hardware)),
            target=hardware.target,
            unit=hardware.unit,
            form=hardware.loss,
            scale=hardware.scale,
            exponent=hardware.exponent,
        )
    )


def latency_of(space: SearchSpace, table: str) -> Callable[[Genotype], float]:
    """Build a predictor of the latency in ms of a genotype's network, by a table in a file.

    Raises:
        ConfigError: The file is no table, or the space has no latency.
    """
    if not isinstance(space, MBConvSpace):
        raise ConfigError(
            f"algorithm.limits.table={table} with search_space={space.name}: a latency table is "
            "for mbconv only; set limits of parameters or multiply_adds."
        )
    costs = space_costs(space, read_table(Path(table)))
    return lambda genotype: costs.of_path(space.path(genotype))

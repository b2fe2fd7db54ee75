"""Latency tables and what clients make the hardware loss from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.settings import Hardware, expanded
from fednas_flwr.spaces.costs import LOSSES, HardwareLoss, HardwareTerms
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.latency_tables import LatencyTable
from fednas_flwr.spaces.latency_tables import from_json as latency_from_json
from fednas_flwr.spaces.mbconv import MBConvSpace
from fednas_flwr.spaces.space import SearchSpace
from fednas_flwr.spaces.space_costs import space_costs


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

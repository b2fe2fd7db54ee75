"""Search spaces: the choices, their relaxation, their discrete networks, and genotypes.

A space is a frozen dataclass of its sizes (``darts.DARTSSpace``, ``nasbench201.NASBench201Space``,
``mbconv.MBConvSpace``, ``dp_cells.DPCellSpace``, for tables ``mlp.MLPSpace``), a
``space.SearchSpace``. The package is plain torch; nothing here depends on training, privacy or
clients.

This module has one entry per search space: its settings and its constructor, which imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fednas_flwr.base.errors import check_choice
from fednas_flwr.settings import BlockSpace, CellSpace, DPCells, SearchSpaceSettings, registry
from fednas_flwr.settings.run_settings import AdapterSettings

if TYPE_CHECKING:
    from torch import nn

    from fednas_flwr.spaces.space import SearchSpace


class SpaceEntry(NamedTuple):
    """Entry behind the ``name`` in a file of ``conf/search_space``.

    Attributes:
        settings: The dataclass of its settings.
        make: Function that returns the space, called with ``input_shape``, ``num_classes``,
            ``norm`` and the other settings except the name.
    """

    settings: type[SearchSpaceSettings]
    make: Callable[..., SearchSpace]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The settings that a network's description holds besides the norm."""
        return tuple(f.name for f in fields(self.settings) if f.name not in ("name", "norm"))


class OpEntry(NamedTuple):
    """Entry behind the name of an op that a user has registered.

    Attributes:
        make: Function that returns the module, called with a number of channels and a stride.
        has_weights: True if the module has parameters.
    """

    make: Callable[[int, int], nn.Module]
    has_weights: bool


def _make(place: str, **settings: Any) -> SearchSpace:
    """Return a space, given the place of its class or function, ``<module>:<name>``."""
    return registry.imported(f"fednas_flwr.spaces.{place}")(**settings)


_SPACES: dict[str, tuple[type[SearchSpaceSettings], str]] = {
    "adapters": (AdapterSettings, "adapters:AdapterSpace"),
    "darts": (CellSpace, "darts:DARTSSpace"),
    "dp_cells": (DPCells, "dp_cells:DPCellSpace"),
    "dp_cells_darts": (DPCells, "dp_cells:DARTSOpsSpace"),
    "mbconv": (BlockSpace, "mbconv:named_space"),
    "mlp": (CellSpace, "mlp:MLPSpace"),
    "nasbench201": (CellSpace, "nasbench201:NASBench201Space"),
}
for _name, (_settings, _place) in _SPACES.items():
    registry.register("search_space", _name, SpaceEntry(_settings, partial(_make, _place)))
SEARCH_SPACES: dict[str, SpaceEntry] = registry.TABLES["search_space"]


def space_entry(name: str) -> SpaceEntry:
    """Return the entry of a search space.

    Raises:
        ConfigError: There is no space with this name.
    """
    check_choice("search_space.name", name, SEARCH_SPACES)
    return SEARCH_SPACES[name]

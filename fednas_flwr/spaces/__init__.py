"""Search spaces: what can be searched, its relaxation, its discrete networks, and genotypes.

A space is a frozen dataclass of its sizes (``darts.DARTSSpace``, ``nasbench201.NASBench201Space``,
``mbconv.MBConvSpace``, ``dp_cells.DPCellSpace``, for tables ``mlp.MLPSpace``), a
``space.SearchSpace``. Plain torch: nothing here knows of training, privacy or clients.

Here is one entry per search space: its settings, and how it is made; torch is imported then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fednas_flwr.base.errors import check_choice
from fednas_flwr.settings import BlockSpace, CellSpace, DPCells, SearchSpaceSettings
from fednas_flwr.settings.registry import TABLES, imported, register
from fednas_flwr.settings.run_settings import AdapterSettings

if TYPE_CHECKING:
    from torch import nn

    from fednas_flwr.spaces.space import SearchSpace


class SpaceEntry(NamedTuple):
    """Entry behind the ``name`` in a file of ``conf/search_space``.

    Attributes:
        settings: The dataclass of its settings.
        make: Called with ``input_shape``, ``num_classes``, ``norm`` and the other settings
            but the name, returns the space.
    """

    settings: type[SearchSpaceSettings]
    make: Callable[..., SearchSpace]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The settings that a network's description holds, beside the norm."""
        return tuple(f.name for f in fields(self.settings) if f.name not in ("name", "norm"))


class OpEntry(NamedTuple):
    """Entry behind the name of an op that a user has registered.

    Attributes:
        make: Called with a number of channels and a stride, returns the module.
        has_weights: True if that has parameters.
    """

    make: Callable[[int, int], nn.Module]
    has_weights: bool


def _imported(place: str, **settings: Any) -> SearchSpace:
    """Return the space of a class ``<module>:<class>``."""
    space: SearchSpace = imported(f"fednas_flwr.spaces.{place}")(**settings)
    return space


def _mbconv(*, skeleton: str, candidates: str, **settings: Any) -> SearchSpace:
    """Return the MBConv space with the named skeleton and candidates."""
    from fednas_flwr.spaces.mbconv import CANDIDATES, SKELETONS, MBConvSpace

    check_choice("search_space.skeleton", skeleton, SKELETONS)
    check_choice("search_space.candidates", candidates, CANDIDATES)
    return MBConvSpace(skeleton=SKELETONS[skeleton], candidates=CANDIDATES[candidates], **settings)


def _dp_cells(name: str, *, widths: Sequence[int], **settings: Any) -> SearchSpace:
    """Return a space of DPNAS' cells; JSON knows no tuples."""
    from fednas_flwr.spaces.dp_cells import DP_CELL_SPACES

    return DP_CELL_SPACES[name](widths=tuple(widths), **settings)


register(
    "search_space",
    "adapters",
    SpaceEntry(AdapterSettings, partial(_imported, "adapters:AdapterSpace")),
)
register("search_space", "darts", SpaceEntry(CellSpace, partial(_imported, "darts:DARTSSpace")))
register("search_space", "dp_cells", SpaceEntry(DPCells, partial(_dp_cells, "dp_cells")))
register(
    "search_space", "dp_cells_darts", SpaceEntry(DPCells, partial(_dp_cells, "dp_cells_darts"))
)
register("search_space", "mbconv", SpaceEntry(BlockSpace, _mbconv))
register("search_space", "mlp", SpaceEntry(CellSpace, partial(_imported, "mlp:MLPSpace")))
register(
    "search_space",
    "nasbench201",
    SpaceEntry(CellSpace, partial(_imported, "nasbench201:NASBench201Space")),
)
SEARCH_SPACES: dict[str, SpaceEntry] = TABLES["search_space"]


def space_entry(name: str) -> SpaceEntry:
    """Return the entry of a search space.

    Raises:
        ConfigError: There is no space of this name.
    """
    check_choice("search_space.name", name, SEARCH_SPACES)
    return SEARCH_SPACES[name]

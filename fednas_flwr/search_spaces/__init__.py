"""Search spaces: what can be searched, its relaxation, its discrete networks, and genotypes.

A space is a frozen dataclass of its sizes (:class:`~fednas_flwr.search_spaces.darts.DARTSSpace`,
:class:`~fednas_flwr.search_spaces.nasbench201.NASBench201Space`,
:class:`~fednas_flwr.search_spaces.mbconv.MBConvSpace`,
:class:`~fednas_flwr.search_spaces.dp_cells.DPCellSpace`, for tables
:class:`~fednas_flwr.search_spaces.mlp.MLPSpace`) that fulfils :class:`SearchSpace`.
Plain torch: nothing here knows of training, privacy or clients.
"""

from fednas_flwr.search_spaces.darts import DARTSSpace
from fednas_flwr.search_spaces.dp_cells import DPCellSpace
from fednas_flwr.search_spaces.genotype import Edge, Genotype
from fednas_flwr.search_spaces.mbconv import MBConvSpace
from fednas_flwr.search_spaces.mlp import MLPSpace
from fednas_flwr.search_spaces.nasbench201 import NASBench201Space
from fednas_flwr.search_spaces.space import SearchSpace, Supernet

__all__ = [
    "DARTSSpace",
    "DPCellSpace",
    "Edge",
    "Genotype",
    "MBConvSpace",
    "MLPSpace",
    "NASBench201Space",
    "SearchSpace",
    "Supernet",
]

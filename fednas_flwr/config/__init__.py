"""The settings of a run as frozen dataclasses, each checked when it is made.

Hydra composes ``conf/``; :func:`parse_config` turns the result into one :class:`Config` at once, so
that a wrong value ends the run before any client starts. Every default stands in ``conf/``, none
here. The same tree as JSON (:func:`dump_config`) is what travels to other processes.
"""

from fednas_flwr.config.algorithms import (
    ALGORITHMS,
    FixedNetwork,
    GivenNetwork,
    GradientSearch,
    HyperparameterSearch,
    LocalSearch,
    RandomSearch,
    TunedTraining,
)
from fednas_flwr.config.data import Dataset, site_dataset
from fednas_flwr.config.networks import SEARCH_SPACES, BlockSpace, CellSpace, DPCells
from fednas_flwr.config.parsing import conf_folder
from fednas_flwr.config.path_searches import CandidateSearch, ClusterSearch, Hardware, PathSearch
from fednas_flwr.config.privacy import DifferentialPrivacy, Noise, NoPrivacy, PrivateRetrain
from fednas_flwr.config.run import Config, dump_config, load_config, parse_config

__all__ = [
    "ALGORITHMS",
    "SEARCH_SPACES",
    "BlockSpace",
    "CandidateSearch",
    "CellSpace",
    "ClusterSearch",
    "Config",
    "DPCells",
    "Dataset",
    "DifferentialPrivacy",
    "FixedNetwork",
    "GivenNetwork",
    "GradientSearch",
    "Hardware",
    "HyperparameterSearch",
    "LocalSearch",
    "NoPrivacy",
    "Noise",
    "PathSearch",
    "PrivateRetrain",
    "RandomSearch",
    "TunedTraining",
    "conf_folder",
    "dump_config",
    "load_config",
    "parse_config",
    "site_dataset",
]

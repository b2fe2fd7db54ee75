"""The settings of a run as frozen dataclasses, each checked when it is made.

Hydra composes ``conf/``; ``builders.parse_config`` turns the result into one :class:`Config` at
once, so that a wrong value ends the run before any client starts. Every default stands in
``conf/``, none here. The same tree as JSON (:func:`dump_config`) is what travels to other
processes.
"""

from fednas_flwr.config.algorithms import (
    AlgorithmSettings,
    FEATHERSSettings,
    FedAvgSettings,
    FedDARTSSettings,
    FedExSettings,
    FNASSettings,
    GivenNetwork,
    NetworkLimits,
    RandomSearchSettings,
    SuccessiveHalvingSettings,
    ZeroCostSettings,
)
from fednas_flwr.config.data import Dataset, site_dataset
from fednas_flwr.config.networks import BlockSpace, CellSpace, DPCells, SearchSpaceSettings
from fednas_flwr.config.parsing import conf_folder, expanded
from fednas_flwr.config.path_searches import CFDNASSettings, DPNASSettings, FDNASSettings, Hardware
from fednas_flwr.config.privacy import DifferentialPrivacy, Noise, NoPrivacy, PrivateRetrain
from fednas_flwr.config.run import Config, SimulatedTerms, dump_config
from fednas_flwr.config.server_optimizers import ServerOptimizer

__all__ = [
    "AlgorithmSettings",
    "BlockSpace",
    "CFDNASSettings",
    "CellSpace",
    "Config",
    "DPCells",
    "DPNASSettings",
    "Dataset",
    "DifferentialPrivacy",
    "FDNASSettings",
    "FEATHERSSettings",
    "FNASSettings",
    "FedAvgSettings",
    "FedDARTSSettings",
    "FedExSettings",
    "GivenNetwork",
    "Hardware",
    "NetworkLimits",
    "NoPrivacy",
    "Noise",
    "PrivateRetrain",
    "RandomSearchSettings",
    "SearchSpaceSettings",
    "ServerOptimizer",
    "SimulatedTerms",
    "SuccessiveHalvingSettings",
    "conf_folder",
    "dump_config",
    "expanded",
    "ZeroCostSettings",
    "site_dataset",
]

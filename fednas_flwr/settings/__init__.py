"""The settings of a run as frozen dataclasses, each checked when it is made.

Hydra composes ``conf/``; ``configuration.parse_config`` turns the result into one :class:`Config`
at once, so that a wrong value ends the run before any client starts. Every default stands in
``conf/``, but for those of mappings that are null there. The same tree as JSON
(:func:`dump_config`) is what travels to other processes.
"""

from fednas_flwr.settings.data_settings import Dataset
from fednas_flwr.settings.parser import conf_folder, expanded
from fednas_flwr.settings.run_settings import (
    AlgorithmSettings,
    BlockSpace,
    CellSpace,
    Config,
    DifferentialPrivacy,
    DPCells,
    GivenNetwork,
    Hardware,
    NetworkLimits,
    Noise,
    NoPrivacy,
    PrivateRetrain,
    SearchSpaceSettings,
    dump_config,
    with_runtime,
)

__all__ = [
    "AlgorithmSettings",
    "BlockSpace",
    "CellSpace",
    "Config",
    "DPCells",
    "Dataset",
    "DifferentialPrivacy",
    "GivenNetwork",
    "Hardware",
    "NetworkLimits",
    "NoPrivacy",
    "Noise",
    "PrivateRetrain",
    "SearchSpaceSettings",
    "conf_folder",
    "dump_config",
    "expanded",
    "with_runtime",
]

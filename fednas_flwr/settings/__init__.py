"""The settings of a run as frozen dataclasses, each checked when it is made.

Hydra composes ``conf/``. ``configuration.parse_config`` turns the result into one :class:`Config`
at once, so that a wrong value ends the run before any client starts. Every default is in
``conf/``, except those of mappings that are null there. The same tree travels to other processes
as JSON (:func:`dump_config`).
"""

from fednas_flwr.settings.data_settings import Dataset as Dataset
from fednas_flwr.settings.parser import conf_folder as conf_folder
from fednas_flwr.settings.parser import expanded as expanded
from fednas_flwr.settings.run_settings import AlgorithmSettings as AlgorithmSettings
from fednas_flwr.settings.run_settings import BlockSpace as BlockSpace
from fednas_flwr.settings.run_settings import CellSpace as CellSpace
from fednas_flwr.settings.run_settings import Config as Config
from fednas_flwr.settings.run_settings import DifferentialPrivacy as DifferentialPrivacy
from fednas_flwr.settings.run_settings import DPCells as DPCells
from fednas_flwr.settings.run_settings import GivenNetwork as GivenNetwork
from fednas_flwr.settings.run_settings import Hardware as Hardware
from fednas_flwr.settings.run_settings import LocalEpochs as LocalEpochs
from fednas_flwr.settings.run_settings import NetworkLimits as NetworkLimits
from fednas_flwr.settings.run_settings import NoPrivacy as NoPrivacy
from fednas_flwr.settings.run_settings import SearchSpaceSettings as SearchSpaceSettings
from fednas_flwr.settings.run_settings import dump_config as dump_config
from fednas_flwr.settings.run_settings import with_runtime as with_runtime

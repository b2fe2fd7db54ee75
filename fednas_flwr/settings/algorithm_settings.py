"""Base of the settings of algorithms; each algorithm's own stand in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fednas_flwr.settings.parser import Checked


@dataclass(frozen=True)
class AlgorithmSettings(Checked):
    """Base of all, and the settings of an algorithm that has none."""

    name: str

    @property
    def trains_models(self) -> bool:
        """Whether clients of the search answer with models that they have trained."""
        return True

    def check(self, config: Any) -> None:
        """Raise ConfigError for settings that exclude each other with this algorithm only.

        Args:
            config: The run's :class:`~fednas_flwr.settings.Config`, whose algorithm this is.
        """


@dataclass(frozen=True)
class GivenNetwork(AlgorithmSettings):
    """Base of those that do not search: they train a network that is given by name.

    Attributes:
        network: A name of ``evaluation.fixed_networks.FIXED_NETWORKS``, where no genotype is given.
    """

    network: str

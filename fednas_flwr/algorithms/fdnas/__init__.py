"""FDNAS and CFDNAS: federated ProxylessNAS by weighted averaging, over all clients or groups."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from fednas_flwr.base.errors import ConfigError, check_choice, show
from fednas_flwr.settings import AlgorithmSettings, BlockSpace, Config, Hardware, LocalEpochs, names
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.parser import Between, Conflicts, OneOf, within
from fednas_flwr.settings.registry import Algorithm, Rule, register

GROUPINGS = ("tag", "hardware", "alphas")


@dataclass(frozen=True)
class FDNASSettings(LocalEpochs):
    """FDNAS: local epochs of ProxylessNAS on sampled paths, then averaging.

    Attributes:
        warm_up_rounds: Number of first rounds, in which weights are trained on uniformly drawn
            paths and alphas stay fixed.
        alphas: The alphas' optimiser.
        hardware: Hardware loss of the alphas; null adds none.
    """

    warm_up_rounds: opt.CountOrZero
    alphas: opt.Adam
    hardware: Hardware | None

    def conflicts(self) -> Conflicts:
        """Refuse weight decay of the alphas."""
        decay = self.alphas.weight_decay
        reason = "0: ops that are not sampled must keep their probabilities"
        yield within(decay == 0, "alphas.weight_decay", decay, reason)

    def check(self, config: Config) -> None:
        """Refuse search spaces other than that of blocks."""
        if config.searches and not isinstance(config.search_space, BlockSpace):
            raise ConfigError(
                f"algorithm={config.algorithm.name} with search_space={config.search_space.name}: "
                "it samples paths of blocks; set search_space=mbconv retrain=mbconv."
            )


@dataclass(frozen=True)
class CFDNASSettings(AlgorithmSettings):
    """CFDNAS: FDNAS over all clients, then in each group of clients with its own hardware loss.

    Attributes:
        group_by: ``tag`` or ``hardware``, which each client states about itself, or ``alphas``,
            which puts clients with similar updates of the alphas together, see ``pipeline.groups``.
        num_groups: Number of groups, for ``alphas``; else null.
        inherit: If true, groups start from the supernet that all clients have searched together;
            false is naive-CFDNAS, which omits that search.
        group_rounds: Rounds of search in each group.
        client_tags: Tags of simulated clients, by index, to group them by ``tag``; real nodes state
            their own.
        group_hardware: Hardware loss of each named group; other groups have none.
        search: The clients' search.
    """

    group_by: Annotated[str, OneOf(GROUPINGS)]
    num_groups: Annotated[int, Between(2)] | None
    inherit: bool
    group_rounds: opt.Count
    client_tags: list[str]
    group_hardware: dict[str, Hardware]
    search: FDNASSettings

    def check(self, config: Config) -> None:
        """Refuse what FDNAS refuses, and groups by alphas that never move."""
        warm_up = self.search.warm_up_rounds
        if self.num_groups is not None:
            groups = [str(number) for number in range(1, self.num_groups + 1)]
            for name in self.group_hardware:
                check_choice("algorithm.group_hardware", name, groups)
        if len(self.client_tags) not in (0, config.clients):
            raise ConfigError(
                f"algorithm.client_tags={show(self.client_tags)} for clients={config.clients}: "
                "give one for each client, or none."
            )
        if self.group_by == "alphas" and config.rounds <= warm_up:
            raise ConfigError(
                f"algorithm.group_by=alphas with rounds={config.rounds}: alphas rest in the first "
                f"algorithm.search.warm_up_rounds={warm_up}, so that no update groups the clients; "
                f"raise rounds to {warm_up + 1} or more."
            )
        self.search.check(config)

    def whole_search(self, config: Config) -> Config:
        """The configuration of an FDNAS run with the rounds of all clients and those of a group."""
        rounds = self.group_rounds + (config.rounds if self.inherit else 0)
        return replace(config, algorithm=self.search, rounds=rounds)

    def check_groups(self, config: Config) -> None:
        """Refuse groups that cannot be formed; real nodes state their own tags."""
        if self.num_groups is not None and self.num_groups > config.clients:
            raise ConfigError(
                f"algorithm.num_groups={self.num_groups} with clients={config.clients}: expected "
                "at most one group per client; lower it."
            )
        tags = self.client_tags
        if self.group_by != "tag" or config.runtime.name == "deployment":
            return
        if not tags or "" in tags:
            raise ConfigError(
                f"algorithm.group_by=tag with algorithm.client_tags={show(tags)}: every simulated "
                f"client needs a tag; give one for each of clients={config.clients}."
            )
        for client, tag in enumerate(tags):
            group_name({"tag": tag}, client, "tag")
        for name in self.group_hardware:
            check_choice("algorithm.group_hardware", name, set(tags))


def all_hardware(settings: AlgorithmSettings) -> list[Hardware]:
    """The hardware losses of an algorithm, including those of all groups."""
    if isinstance(settings, CFDNASSettings):
        return [*all_hardware(settings.search), *settings.group_hardware.values()]
    if isinstance(settings, FDNASSettings) and settings.hardware is not None:
        return [settings.hardware]
    return []


def group_name(properties: Mapping[str, object], client: int, name: str) -> str:
    """The group that a client states; it also names a folder.

    Raises:
        ConfigError: The client states no group, or one that cannot name a folder.
    """
    label = properties.get(name)
    if not isinstance(label, str) or not label:
        raise ConfigError(
            f"algorithm.group_by={name}, but client {client} has no {name}: give the node a "
            "tag in its --node-config, or simulated clients algorithm.client_tags=[...]."
        )
    # up to 240 bytes in UTF-8; file systems allow 255
    if not re.fullmatch(r"[\w .-]{1,60}", label) or label.startswith("."):
        raise ConfigError(
            f"group {show(label)!r} cannot name a folder: expected up to 60 letters, digits, "
            "spaces, dots, hyphens and underscores."
        )
    return label


_ASKED_APART = "clients are asked different things, which have no sum; choose another algorithm"
_entry = partial(Algorithm, search=f"{__name__}.strategy:FDNAS", units=(names.RECORD, names.PERSON))
register(
    "algorithm",
    "fdnas",
    _entry(FDNASSettings, clashes={"secure_sum!=null algorithm=fdnas stages=search": _ASKED_APART}),
)
register(
    "algorithm",
    "cfdnas",
    _entry(
        CFDNASSettings,
        clashes={
            "secure_sum!=null algorithm=cfdnas": _ASKED_APART,
            "sampling!=null algorithm=cfdnas": "it divides all clients into groups by what each of "
            "them answers; set sampling=null",
            "algorithm=cfdnas stages!=search": "its groups begin with a search; add search, or set "
            "algorithm=fedavg to retrain a genotype",
            "algorithm.group_by=alphas algorithm.num_groups=null": "a number is needed to group by "
            "alphas; set algorithm.num_groups=2",
            "algorithm.group_by!=alphas algorithm.num_groups!=null": "a number is for groups by "
            "alphas only; set algorithm.num_groups=null",
            "algorithm.group_by=alphas algorithm.inherit=false": "the groups come from the search "
            "of all clients; set algorithm.inherit=true",
            "aggregate=trimmed_mean algorithm=cfdnas": "how many clients a group has is not known "
            "before; set aggregate=median",
        },
        unused=(
            Rule(
                "evaluation.baselines", bool, "algorithm=cfdnas, whose groups each have a network"
            ),
        ),
        needs={
            "algorithm.group_by=tag": "algorithm.client_tags",
            "algorithm.inherit=true": "rounds algorithm.search.hardware",  # of the joint search
        },
    ),
)

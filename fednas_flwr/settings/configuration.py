"""From a composed tree or its JSON to one checked :class:`~fednas_flwr.settings.Config`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fednas_flwr.base.errors import ConfigError, NoEffectError, show
from fednas_flwr.settings import Config, GivenNetwork, NoPrivacy
from fednas_flwr.settings.incompatible import (
    check_algorithm,
    check_sampling,
    check_secure_sum,
    check_unit_of_privacy,
    chooses,
    retrains_by_gradients,
    searches,
)
from fednas_flwr.settings.loading import choose_kind
from fednas_flwr.settings.names import CLIENT, FLOAT32
from fednas_flwr.settings.optimizers import NORMED_NETWORKS
from fednas_flwr.settings.parser import NOT_TEXT, parse
from fednas_flwr.settings.partitions import PARTITIONS
from fednas_flwr.settings.privacy_settings import PRIVACY
from fednas_flwr.settings.registry import algorithm_of, entries
from fednas_flwr.settings.rounds import AGGREGATES, SERVER_OPTIMIZERS, TrimmedMeanSettings
from fednas_flwr.settings.runtimes import RUNTIMES
from fednas_flwr.settings.unused import Given, check_effect, check_experiment

MOST_PRIVATE_ROUNDS = 10_000
UPDATE_NORM = 1.0  # that a client's update is clipped to by default; a record's gradient is shorter
YIELDING = {  # defaults of privacy=dp that give way where the user sets what they take the place of
    "privacy.rate": ("algorithm.batch_size", "algorithm.search.batch_size"),
    "privacy.retrain.rate": ("retrain.batch_size",),
    "privacy.retrain.noise_walk": ("retrain.weights.lr",),
}
CHOICES: dict[str, dict[str, type]] = {  # by group, the class of each choice
    "partition": PARTITIONS,
    "privacy": PRIVACY,
    "aggregate": AGGREGATES,
    "server_optimizer": SERVER_OPTIMIZERS,
    "runtime": RUNTIMES,
}
UNREGISTERED = "; one of your own must be registered first, in each process and at each site"


def parse_config(tree: Mapping[str, Any], *, given: Given | None = None) -> Config:
    """Return the checked configuration of a composed tree.

    Args:
        tree: Groups of settings.
        given: The settings that the user has set, and that must have an effect.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type or is out of range,
            two settings exclude each other, or one that was given has no effect
            (:class:`~fednas_flwr.base.errors.NoEffectError`).
    """
    if given is None:
        return _parse(tree)
    config = _parse(yielded(tree, given))
    if given.alone is not None:
        alone = _parse_alone(yielded(given.alone, replace(given, typed=())))
        if alone is not None:
            check_experiment(alone, given)
    check_effect(config, given)
    return config


def yielded(tree: Mapping[str, Any], given: Given) -> Mapping[str, Any]:
    """Return the tree without the defaults in whose place the user has set something."""
    tree = _with_lower_ends(tree, given)
    privacy = tree.get("privacy")
    if not isinstance(privacy, Mapping) or privacy.get("name") != "dp":
        return tree
    known = {*given.typed, *given.experiment}
    yields: dict[str, float | None] = {}
    if privacy.get("unit") == CLIENT and "privacy.retrain.max_grad_norm" not in known:
        yields["privacy.retrain.max_grad_norm"] = UPDATE_NORM
    for default, others in YIELDING.items():
        typed = default not in given.typed and any(other in given.typed for other in others)
        if typed or (default not in known and any(other in known for other in others)):
            yields[default] = None
    for setting, value in yields.items():
        tree = _with(tree, setting.split("."), value)
    return tree


def _with_lower_ends(tree: Mapping[str, Any], given: Given, prefix: str = "") -> dict[str, Any]:
    """Return a tree in which no default of ``min_lr`` is above an ``lr`` that the user has set."""
    tree = {
        key: _with_lower_ends(value, given, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    lr, last, key = tree.get("lr"), tree.get("min_lr"), f"{prefix}min_lr"
    is_own = key in given.typed or (key in given.experiment and f"{prefix}lr" not in given.typed)
    if isinstance(lr, int | float) and isinstance(last, int | float) and last > lr and not is_own:
        tree["min_lr"] = lr
    return tree


def _with(tree: Any, path: Sequence[str], value: float | str | None) -> Any:
    """Return a tree with another value at a path, the same where there is no such path."""
    key, *rest = path
    if not isinstance(tree, Mapping) or key not in tree:
        return tree
    return {**tree, key: _with(tree[key], rest, value) if rest else value}


def _parse_alone(tree: Mapping[str, Any]) -> Config | None:
    """Return the configuration of an experiment, None if it does not run by itself."""
    try:
        return _parse(tree)
    except ConfigError:
        return None


def _parse(tree: Mapping[str, Any]) -> Config:
    kinds = {
        group: {name: entry.settings for name, entry in entries(group).items()}
        for group in ("algorithm", "dataset", "search_space")
    }
    hints = {
        **{group: choose_kind(tree, group, kinds[group], hint=UNREGISTERED) for group in kinds},
        **{group: choose_kind(tree, group, of) for group, of in CHOICES.items()},
    }
    evaluation = tree.get("evaluation")
    if isinstance(evaluation, Mapping) and type(evaluation.get("positive")) is int:
        # as Hydra reads the name of a class 0, 1, ...
        tree = _with(tree, ["evaluation", "positive"], str(evaluation["positive"]))
    try:
        config: Config = parse(Config, tree, key="", hints=hints)
    except ConfigError as error:
        if not str(error).endswith(f"{NOT_TEXT}."):
            raise
        hint = "if it is from the environment, write ${oc.decode:${oc.env:NAME}}"
        raise ConfigError(f"{str(error).removesuffix('.')}; {hint}.") from None
    check_combinations(config)
    return config


def load_config(text: str) -> Config:
    """Return the configuration that :func:`~fednas_flwr.settings.dump_config` wrote."""
    return parse_config(json.loads(text))


def check_combinations(config: Config) -> None:
    """Raise ConfigError for settings that exclude each other, the algorithm's own first."""
    check_algorithm(config)
    _check_privacy(config)
    check_secure_sum(config)
    check_sampling(config)
    _check_aggregate(config)
    _check_server_optimizer(config)
    _check_stages(config)


def _check_privacy(config: Config) -> None:
    """Refuse what cannot be private."""
    if isinstance(config.privacy, NoPrivacy):
        return
    if config.training.oversample:
        raise ConfigError(
            "training.oversample=true with privacy=dp: a record that is drawn several times costs "
            "more than "
            "is booked; set training.class_factors={<class>: <public factor>} instead."
        )
    if config.evaluation.personalised:
        raise ConfigError(
            "evaluation.personalised=true with privacy=dp: an accuracy after local training "
            "without noise is "
            "an exact function of the records; leave it out."
        )
    if config.training.precision != FLOAT32:
        raise ConfigError(
            f"training.precision={config.training.precision} with privacy=dp: gradients of "
            "records are clipped in "
            "float32, so that none is longer than is booked; set training.precision=float32."
        )
    check_unit_of_privacy(config)
    rounds = config.rounds * searches(config)
    rounds += config.retrain.rounds * ("retrain" in config.stages)
    if rounds > MOST_PRIVATE_ROUNDS:
        raise ConfigError(
            f"rounds={config.rounds} with retrain.rounds={config.retrain.rounds} and privacy=dp: "
            f"expected at most {MOST_PRIVATE_ROUNDS} in all, since clients are told of each before "
            "the first; take fewer rounds of more local steps."
        )
    wrong = [key for key, norm in _norms(config).items() if norm != "group"]
    if wrong:
        raise ConfigError(
            "privacy=dp with batch normalisation is not possible, which mixes the records of a "
            f"batch and leaks its statistics: set {' '.join(f'{key}=group' for key in wrong)}."
        )


def _norms(config: Config) -> dict[str, str]:
    """Return the settings of norms that the networks have that see records."""
    algorithm, norms = config.algorithm, {}
    without_norm = (
        isinstance(algorithm, GivenNetwork)
        and algorithm.network not in NORMED_NETWORKS
        and config.genotype is None
    )
    if "retrain" in config.stages and not without_norm:
        norms["retrain.norm"] = config.retrain.norm
    if searches(config) and algorithm_of(config).trains is not None:
        norms["search_space.norm"] = config.search_space.norm
    return norms


def _check_aggregate(config: Config) -> None:
    """Refuse robust averages of too few replies, and of gradients.

    With privacy they are allowed: they only process what has been released. The noise of a median
    has up to 1.25 times the standard deviation of the mean's.
    """
    aggregate, clients = config.aggregate, config.asked
    name = aggregate.name
    asked = f"sampling.per_round={clients}" if config.samples else f"clients={clients}"
    fewest = math.ceil(config.runtime.quorum * clients - 1e-9)
    decides = f"runtime.quorum={config.runtime.quorum:g} of {asked}"
    if name != "mean" and clients < 3:
        raise ConfigError(f"aggregate={name} with {asked}: expected 3 or more.")
    if name != "mean" and "retrain" in config.stages and retrains_by_gradients(config):
        raise ConfigError(
            f"aggregate={name} with retrain.exchange={config.retrain.exchange}: it adds up sums of "
            "gradients over batches of different sizes; set aggregate=mean or "
            "retrain.exchange=models."
        )
    if isinstance(aggregate, TrimmedMeanSettings) and fewest <= 2 * aggregate.trim:
        raise ConfigError(
            f"aggregate.trim={aggregate.trim} leaves nothing of the {fewest} replies that "
            f"{decides} "
            "lets a round go on with: expected fewer than half of them; raise runtime.quorum or "
            "lower aggregate.trim."
        )


def _check_server_optimizer(config: Config) -> None:
    """Refuse two optimisers of the server, and algorithms that have rounds of their own."""
    chosen = f"server_optimizer={config.server_optimizer.name}"
    if chosen == "server_optimizer=none":
        return
    if not isinstance(config.algorithm, GivenNetwork) or chooses(config):
        raise ConfigError(
            f"{chosen} with algorithm={config.algorithm.name}: it is for the training of a given "
            "network; set algorithm=fedavg or fedprox, with genotype=<file> for a cell that was "
            "found, or server_optimizer=none."
        )
    if retrains_by_gradients(config):
        raise ConfigError(
            f"{chosen} with retrain.exchange={config.retrain.exchange}: the server steps along "
            "gradients by SGD there; set server_optimizer=none or retrain.exchange=models."
        )
    if config.training.momentum == "server":
        raise ConfigError(
            f"{chosen} with training.momentum=server: both are optimisers of the server; leave "
            "one out."
        )


def _check_stages(config: Config) -> None:
    """Refuse stages that lack what they start from, or have it twice."""
    if config.genotype is not None and searches(config):
        raise ConfigError(
            f"genotype={show(config.genotype)} with stages={show(config.stages)}: a genotype "
            "replaces the search; set stages=[retrain,evaluate,export]."
        )
    if searches(config):
        space = config.search_space.name
        if config.dataset.table is not None and space != "nasbench201":
            raise ConfigError(
                f"dataset.table={show(config.dataset.table.file)} with search_space={space}: it "
                "holds cells of nasbench201; leave it out."
            )
    elif "retrain" in config.stages and config.genotype is None:
        if not isinstance(config.algorithm, GivenNetwork):
            raise ConfigError(
                f"stages={show(config.stages)} without search: retraining needs a network; set "
                "genotype=<file> or algorithm=fedavg."
            )
    if config.stages == ["search"] and not searches(config):
        raise NoEffectError(
            f"stages=[search] with algorithm={config.algorithm.name}, which does not search: "
            "nothing would run; set stages=[retrain,evaluate,export]."
        )
    if not {"retrain"} & set(config.stages) and {"evaluate", "export"} & set(config.stages):
        raise ConfigError(
            f"stages={show(config.stages)}: evaluate and export need the network that retrain "
            "trains; add retrain or leave them out."
        )

"""Settings that have no effect on a run: when, why, and what to do; none is silently ignored.

:data:`NEEDS` has what a setting needs another one to be, :data:`RULES` all else; the entry of an
algorithm has the rules of that algorithm alone. A default without effect is silent; one that the
user has set is refused (:func:`check_effect`). A new setting needs a row if some runs do not read
it; a test records what runs read and names the settings that lack one.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from typing import Any

from fednas_flwr.base.errors import NoEffectError, NoEffectWarning, show
from fednas_flwr.settings import Config, DPCells, GivenNetwork
from fednas_flwr.settings import incompatible as facts
from fednas_flwr.settings.data_settings import Numbers
from fednas_flwr.settings.names import FEWEST_VOTES
from fednas_flwr.settings.registry import Rule, algorithm_of, spelled


@dataclass(frozen=True)
class Given:
    """The settings that the user has set, by their dotted names; a group has its own name.

    Attributes:
        typed: Those of the overrides.
        experiment: Those of the chosen experiment file and of its bases, with their choices of
            groups.
        experiment_name: The chosen experiment; None without one.
        alone: The composed tree of the experiment without other overrides; None without one.
    """

    typed: Collection[str] = ()
    experiment: Collection[str] = ()
    experiment_name: str | None = None
    alone: Mapping[str, Any] | None = None


def _fixed(c: Config) -> bool:
    return isinstance(c.algorithm, GivenNetwork) and c.genotype is None


def _sized_by_retrain(c: Config) -> bool:
    """Return whether the network to retrain, if it is a derived one, has sizes of its own."""
    return c.retrain.channels is not None


def _averages(c: Config) -> bool:
    return facts.retrains(c) or algorithm_of(c).trains is not None


def _measures(c: Config) -> bool:
    """Return whether a private run has something to measure on clients' records."""
    tests = "evaluate" in c.stages and c.dataset.fractions.get("test", 0) > 0
    return tests or (facts.searches(c) and getattr(c.algorithm, "evaluate_every", 0) > 0)


def _rewards(c: Config) -> bool:
    """Return whether clients are asked for rewards of trials or candidates."""
    return algorithm_of(c).asks_rewards and facts.chooses(c)


def _noise_given(c: Config, *kinds: str) -> bool:
    """Return whether the noise of all kinds is given, by itself or by an epsilon of its own."""
    noises = [getattr(c.privacy, kind) for kind in kinds]
    return all(n.noise_multiplier is not None or n.epsilon is not None for n in noises)


def _shares_search(c: Config) -> bool:
    """Return whether ``privacy.search_share`` decides any noise."""
    # who asks for rewards has no alphas, or on no split of retraining
    kinds = ("weights",) if algorithm_of(c).asks_rewards else ("weights", "alphas")
    return facts.searches(c) and facts.retrains(c) and not _noise_given(c, *kinds)


def _shares_rewards(c: Config) -> bool:
    """Return whether ``privacy.rewards_share`` decides the noise of rewards."""
    if not _rewards(c) or _noise_given(c, "rewards"):
        return False
    if algorithm_of(c).retraining is not None:  # which leaves validation records out
        noise = getattr(c.privacy, "alphas")  # noqa: B009
        return facts.searches(c) and noise.noise_multiplier is None
    return facts.retrains(c)


def _declares_ranges(c: Config) -> bool:
    return isinstance(c.dataset, Numbers) and bool(c.dataset.ranges)


STAGES = "stages={c.stages}"
NO_SEARCH = "algorithm={c.algorithm.name} and stages={c.stages}, which do not search"
NETWORK = "algorithm.network={c.algorithm.network}, a network that is fixed"

RULES: tuple[Rule, ...] = (
    # Stages.
    Rule(
        "stages",
        lambda c: "search" in c.stages and isinstance(c.algorithm, GivenNetwork),
        "search and algorithm={c.algorithm.name}, which trains a given network",
        "leave search out of it",
    ),
    Rule(
        "rounds search_space.norm privacy.weights privacy.alphas privacy.local_steps privacy.rate "
        "privacy.search_share",
        lambda c: not facts.searches(c),
        NO_SEARCH,
    ),
    Rule(
        "search_space",
        lambda c: not facts.searches(c) and (_fixed(c) or _sized_by_retrain(c)),
        NO_SEARCH,
        but="search_space.skip search_space.own_ops",
    ),
    Rule(
        "algorithm.*",
        lambda c: (
            not facts.searches(c)
            and not isinstance(c.algorithm, GivenNetwork)
            and algorithm_of(c).retraining is None
        ),
        STAGES + ", which lack search",
    ),
    Rule(
        "retrain.exchange retrain.rounds retrain.evaluate_every retrain.local_epochs "
        "retrain.batch_size retrain.fixed_norm retrain.auxiliary_weight retrain.drop_path_prob "
        "retrain.weights privacy.retrain",
        lambda c: not facts.retrains(c),
        STAGES + ", which lack retrain",
    ),
    Rule(
        "evaluation.personalised dataset.linear_baseline dataset.limit_test evaluation.positive "
        "evaluation.metric",
        lambda c: "evaluate" not in c.stages,
        STAGES + ", which lack evaluate",
    ),
    Rule(
        "evaluation.baselines evaluation.deliver",
        lambda c: not facts.searches(c) or not {"retrain", "evaluate", "export"}.issubset(c.stages),
        "algorithm={c.algorithm.name} and stages={c.stages}: they are compared with a searched "
        "network that is retrained, evaluated and exported",
    ),
    Rule(
        "evaluation.baselines",
        lambda c: (
            facts.has_real_sites(c) and facts.is_private(c) and c.privacy.baseline_share is None
        ),
        "runtime=deployment privacy=dp, whose sites would pay for more networks",
        "set privacy.baseline_share to what they may cost, or remove it",
    ),
    Rule(
        "evaluation.deliver",
        lambda c: facts.has_real_sites(c) or facts.is_private(c),
        "runtime={c.runtime.name} and privacy={c.privacy.name}: networks are chosen by exact "
        "scores of simulated clients",
    ),
    Rule(
        "privacy.baseline_share",
        lambda c: not (facts.has_real_sites(c) and c.evaluation.baselines),
        "evaluation.baselines={c.evaluation.baselines}, runtime={c.runtime.name} and partition="
        "{c.partition.name}: it is for baselines at real sites, elsewhere each has its own ledger",
    ),
    Rule(
        "aggregate secure_sum sampling runtime.wire runtime.time_limit training.precision "
        "training.momentum training.class_factors training.oversample training.loss "
        "dataset.crop_padding dataset.flip dataset.cutout privacy.micro_batch_size",
        lambda c: not _averages(c),
        "algorithm=zero_cost and stages={c.stages}, in which no client trains",
    ),
    # Networks.
    Rule(
        "retrain.channels retrain.num_cells retrain.auxiliary_weight retrain.drop_path_prob "
        "search_space.skip search_space.own_ops",
        _fixed,
        NETWORK,
    ),
    Rule("retrain.norm", lambda c: _fixed(c) and not c.algorithm.has_norm, NETWORK),
    Rule(
        "retrain.fixed_norm",
        lambda c: _fixed(c) and not (c.algorithm.has_norm or facts.begins_with_weights(c)),
        NETWORK,
    ),
    Rule(
        "algorithm.image_size",
        lambda c: _fixed(c) and not facts.begins_with_weights(c),
        "algorithm.weights=null",
    ),
    Rule(
        "retrain.fixed_norm",
        facts.retrains_by_gradients,
        "retrain.exchange={c.retrain.exchange}: each step normalises its own batches",
    ),
    Rule(
        "retrain.drop_path_prob",
        lambda c: c.retrain.rounds == 1,
        "retrain.rounds=1, since it rises from 0 in the first round",
        "set retrain.rounds=2 or more, or remove it",
    ),
    Rule(
        "retrain.drop_path_prob",
        lambda c: isinstance(c.search_space, DPCells) and not _sized_by_retrain(c),
        "search_space={c.search_space.name}, whose networks have no paths to drop",
    ),
    # Algorithms.
    Rule(
        "training.momentum",
        lambda c: (
            (not facts.retrains(c) or facts.retrains_by_gradients(c))
            and not (facts.searches(c) and c.algorithm.trains_models)
        ),
        "stages={c.stages} and retrain.exchange={c.retrain.exchange}: clients send no models",
        "remove it; along gradients the server steps with the momentum of algorithm.weights and "
        "retrain.weights",
    ),
    Rule(
        "retrain.exchange retrain.evaluate_every retrain.fixed_norm retrain.weights.min_lr",
        lambda c: algorithm_of(c).retraining is not None,
        "algorithm={c.algorithm.name}, which retrains in exchanges of its own",
    ),
    Rule(
        "retrain.weights.lr retrain.weights.momentum retrain.weights.weight_decay "
        "retrain.drop_path_prob privacy.retrain.noise_walk",
        facts.chooses_rates,
        "algorithm={c.algorithm.name}, which chooses it from configurations of its own",
    ),
    Rule(
        "algorithm.ranges",
        lambda c: not getattr(c.algorithm, "needs_ranges", True),
        "algorithm.configurations, the list",
    ),
    Rule(
        "secure_sum.least_sites secure_sum.colluding privacy.sites privacy.test_seed",
        facts.has_real_sites,
        "runtime=deployment partition=sites, whose sites have terms, books and noise of their own",
    ),
    Rule(
        "sampling.by sampling.spare",
        lambda c: c.sampling is not None and not c.samples,
        "sampling.per_round={c.sampling.per_round:g} of clients={c.clients}, with which all are "
        "asked",
        "set sampling.per_round below clients, or remove it",
    ),
    Rule(
        "runtime.largest_share",
        lambda c: c.samples and c.asked < FEWEST_VOTES,
        "sampling.per_round={c.sampling.per_round:g}, of whom nobody can tell who is right",
    ),
    # Privacy.
    Rule(
        "algorithm.local_epochs algorithm.search.local_epochs retrain.local_epochs",
        facts.by_record,
        "privacy=dp, whose clients take noised steps",
        "remove it, and set privacy.local_steps, of retraining privacy.retrain.local_steps",
    ),
    Rule(
        "algorithm.evaluate_every",
        lambda c: facts.is_private(c) and c.privacy.metrics_noise_multiplier is None,
        "privacy=dp, which measures nothing on clients' records without noise",
        "remove it, or set privacy.metrics_noise_multiplier",
    ),
    Rule(
        "privacy.weights privacy.alphas privacy.local_steps privacy.rate privacy.search_share",
        lambda c: algorithm_of(c).trains is None,
        "algorithm={c.algorithm.name}, whose search asks clients nothing",
    ),
    Rule(
        "privacy.local_steps",
        lambda c: hasattr(c.algorithm, "local_steps"),
        "algorithm={c.algorithm.name}, which has steps of its own",
        "remove it, and set algorithm.local_steps",
    ),
    Rule(
        "privacy.rewards",
        lambda c: not _rewards(c),
        "algorithm={c.algorithm.name} and stages={c.stages}, which ask for no rewards",
    ),
    Rule(
        "privacy.search_share",
        lambda c: facts.is_private(c) and not _shares_search(c),
        "noise of the search that is given, or takes all of epsilon",
        "remove it, or set privacy.weights.noise_multiplier=null",
    ),
    Rule(
        "privacy.rewards_share",
        lambda c: facts.is_private(c) and not _shares_rewards(c),
        "noise of rewards that is given, or has no other beside it",
        "remove it, or set privacy.alphas.noise_multiplier=null",
    ),
    Rule(
        "privacy.metrics_noise_multiplier",
        lambda c: facts.is_private(c) and not _measures(c),
        "algorithm={c.algorithm.name}, stages={c.stages} and dataset.fractions="
        "{c.dataset.fractions}, with which nothing is measured on clients' records",
    ),
    Rule(
        "privacy.scores_error",
        lambda c: (
            facts.is_private(c)
            and (facts.by_client(c) or not {"retrain", "evaluate"} <= set(c.stages))
        ),
        "privacy.unit={c.privacy.unit} and stages={c.stages}: records are counted, by the trained "
        "network, where it is evaluated",
        "remove it",
    ),
    Rule(
        "privacy.statistics_noise_multiplier",
        lambda c: facts.is_private(c) and not facts.has_real_sites(c) and not _declares_ranges(c),
        "dataset={c.dataset.name} without dataset.ranges, within which clients would tell "
        "statistics",
        "remove it, or declare dataset.ranges={column: [low, high], ...}",
    ),
    # Data.
    Rule(
        "dataset.linear_baseline",
        lambda c: facts.is_private(c) or c.runtime.name == "deployment",
        "privacy={c.privacy.name} runtime={c.runtime.name}, under which no records are pooled",
    ),
    Rule(
        "evaluation.personalised",
        lambda c: c.dataset.fractions.get("test") == 0,
        "dataset.fractions.test=0.0, with which no client has test records",
    ),
    # Runtimes.
    Rule(
        "runtime.most_records runtime.largest_share privacy.fewest_records",
        lambda c: c.clients < FEWEST_VOTES,
        "clients={c.clients}, of whom nobody can tell which is right",
    ),
)

OF_IMAGES = (
    "dataset.crop_padding dataset.flip dataset.cutout dataset.mean dataset.std"  # not of features
)
# Settings by the value that another one needs to have, where there is such and it has an effect.
NEEDS = {
    "algorithm.rule=mixed_level": "algorithm.validation_weight",
    "algorithm.sampler=controller": "algorithm.controller",
    "algorithm.bandit.scaled=true": "algorithm.bandit.scale_retention",
    "algorithm.group_by=tag": "algorithm.client_tags",
    "algorithm.inherit=true": "rounds algorithm.search.hardware",  # of all clients together
    "retrain.norm=batch": "retrain.fixed_norm",
    "dataset.server_test=true": "dataset.linear_baseline dataset.limit_test",
    "secure_sum=null": "runtime.largest_share",  # else no weight of a client is seen
    "privacy=none": "retrain.evaluate_every",  # else the budget is for training on all records
    "privacy=dp": "runtime.approval_s",
    "privacy.unit=record": "privacy.local_steps privacy.rate privacy.retrain.local_steps "
    "privacy.retrain.rate privacy.retrain.noise_walk privacy.micro_batch_size "
    "privacy.fewest_records",  # else clients train by epochs and contribute one update
    # Those that take the place of others, where they are given.
    "genotype=null": "algorithm.network algorithm.weights algorithm.image_size",
    "algorithm.configurations=[]": "algorithm.num_configurations",
    "algorithm.ranges=null": "algorithm.weights.lr algorithm.weights.momentum "
    "algorithm.weights.weight_decay",
    "privacy.rate=null": "algorithm.batch_size algorithm.search.batch_size",
    "privacy.retrain.rate=null": "retrain.batch_size",
    "privacy.retrain.noise_walk=null": "retrain.weights.lr retrain.weights.min_lr",
    "dataset.scattering=null": OF_IMAGES,
    "dataset.backbone=null": f"{OF_IMAGES} dataset.scattering dataset.image_size",
    "partition.fractions=[]": "partition.alpha partition.min_size",
}

# What is false, zero, null or empty here asks for nothing, so that it is no finding: in that way
# what an experiment sets is taken back.
SWITCHES = (
    "secure_sum sampling genotype training.oversample training.class_factors "
    "evaluation.personalised evaluation.baselines algorithm.client_tags dataset.linear_baseline "
    "dataset.limit_test dataset.crop_padding dataset.flip dataset.cutout dataset.mean dataset.std "
    "retrain.channels retrain.num_cells retrain.exchange retrain.fixed_norm "
    "retrain.auxiliary_weight retrain.drop_path_prob algorithm.evaluate_every "
    "algorithm.configurations algorithm.ranges "
    "algorithm.search.hardware privacy.metrics_noise_multiplier "
    "privacy.statistics_noise_multiplier privacy.sites privacy.test_seed"
).split()


def without_effect(config: Config) -> dict[str, Rule]:
    """Return the settings that a run does not use, each with the first rule that says why."""
    rules: dict[str, Rule] = {}
    for rule in (*RULES, *algorithm_of(config).unused):
        if rule.when(config):
            for name in rule.settings.split():
                rules.setdefault(name, rule)
    for needed, settings in NEEDS.items():
        key, _, text = needed.partition("=")
        with suppress(AttributeError):  # there is no such setting
            value = attrgetter(key)(config)
            whole = f"{key}.name" if hasattr(value, "name") else key  # of a group its choice
            if show(getattr(value, "name", value)) != text and not _rule_for(key, rules, config):
                rule = Rule(settings, bool, f"{key}={{c.{whole}}}", f"remove it, or set {needed}")
                rules = dict.fromkeys(settings.split(), rule) | rules
    return rules


def check_effect(config: Config, given: Given, alone: Config | None) -> None:
    """Refuse settings that the user has set and that have no effect; warn where that can't help.

    What was typed is refused, and what an experiment file sets without effect even when it is run
    alone: that is a fault of the file. What an experiment sets and something typed overrules
    cannot be unset from outside of the file, so that a run of it with other settings goes on with
    one warning that names them.

    Args:
        config: Of the run.
        given: Settings that the user has given.
        alone: Of the experiment without other overrides; None if it does not run by itself.

    Raises:
        NoEffectError: Of the first that is refused.
    """
    if alone is not None:
        _check_names(alone, given.experiment, f"experiment={given.experiment_name}: ")
    _check_names(config, given.typed)
    idle = without_effect(config)
    lost: dict[Rule, list[str]] = {}
    for name in given.experiment:
        overruled = any(f"{name}.".startswith(f"{typed}.") for typed in given.typed)
        rule = None if overruled else _rule_for(name, idle, config)
        if rule is not None:
            lost.setdefault(rule, []).append(name)
    for rule, names in lost.items():
        what = f"experiment={given.experiment_name} sets {', '.join(names)}, which"
        warnings.warn(
            f"{what} {'have' if len(names) > 1 else 'has'} no effect with {_cause(rule, config)}.",
            NoEffectWarning,
            stacklevel=4,
        )


def _check_names(config: Config, names: Collection[str], place: str = "") -> None:
    """Raise NoEffectError for the first name of a setting that has no effect."""
    idle = without_effect(config)
    for name in names:
        rule = _rule_for(name, idle, config)
        if rule is not None:
            raise NoEffectError(
                f"{place}{_setting(config, name)} has no effect with {_cause(rule, config)}: "
                f"{rule.remedy}."
            )


def _cause(rule: Rule, config: Config) -> str:
    cause = spelled(rule.cause, config)
    return cause if len(cause) <= 300 else f"{cause[:300]}..."


def _rule_for(name: str, idle: Mapping[str, Rule], config: Config) -> Rule | None:
    """Return the rule of a setting, or of a mapping or group that holds it; None if it acts."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        whole = ".".join(parts[:end])
        rule = idle.get(whole) or (idle.get(f"{parts[0]}.*") if end > 1 else None)
        if rule is not None and name in rule.but.split():
            return None
        if rule is not None:
            return None if whole in SWITCHES and not _field(config, whole)[1] else rule
    return None


def _field(config: Config, name: str) -> tuple[str, Any]:
    """Return the name and value of a setting; of numbers in a mapping, those of the mapping."""
    value: Any = config
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if isinstance(value, Mapping) and is_dataclass(value.get(part)):
            value = value[part]
        elif is_dataclass(value):
            value = getattr(value, part)
        else:
            return ".".join(parts[:depth]), value
    return name, value


def _setting(config: Config, name: str) -> str:
    """Return a setting and its value as an override has them; a group's is its name."""
    name, value = _field(config, name)
    value = getattr(value, "name", "{...}") if is_dataclass(value) else value
    return f"{name}={show(value)}"

"""Settings that have no effect on a run: when, why, and what to do about it.

:data:`NEEDS` lists settings that act only with a certain value of another one, and :data:`RULES`
all other cases; those of a single algorithm are in its entry. A default without effect is silent;
a value that the user has set is refused (:func:`check_effect`). A new setting needs a row here if
some runs do not read it; a test records what runs read and names the settings that lack a row.
"""

import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import Any

from fednas_flwr.base.errors import NoEffectError, NoEffectWarning, show
from fednas_flwr.settings import Config, DPCells, GivenNetwork
from fednas_flwr.settings import incompatible as facts
from fednas_flwr.settings.names import FEWEST_VOTES
from fednas_flwr.settings.registry import Rule, algorithm_of, spelled


@dataclass(frozen=True)
class UserSettings:
    """The settings that the user has set, by their dotted names; a group has its own name.

    Attributes:
        typed: Settings in the overrides.
        experiment: Settings in the chosen experiment file and its bases, including the groups that
            they choose.
        repeats: True if all other settings are those of a finished run.
    """

    typed: Collection[str] = ()
    experiment: Collection[str] = ()
    repeats: bool = False


def _fixed(c: Config) -> bool:
    return isinstance(c.algorithm, GivenNetwork) and c.genotype is None


def _measures(c: Config) -> bool:
    """Return true if a private run has something to measure on clients' records."""
    tests = "evaluate" in c.stages and c.dataset.fractions.get("test", 0) > 0
    return tests or (c.searches and getattr(c.algorithm, "evaluate_every", 0) > 0)


def _rewards(c: Config) -> bool:
    """Return true if clients are asked for rewards of trials or candidates."""
    return algorithm_of(c).asks_rewards and facts.chooses(c)


def _has_alphas(c: Config) -> bool:
    """Return true if there is a search whose noise of alphas is calibrated."""
    return c.searches and getattr(c.privacy, "alphas").noise_multiplier is None  # noqa: B009


def _is_shared(c: Config, kind: str) -> bool:
    """Return true if the noise of a kind follows from its share of epsilon."""
    noise = getattr(c.privacy, kind)
    return noise.noise_multiplier is None and noise.epsilon is None


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
        "rounds search_space.norm evaluation.baselines evaluation.deliver",
        lambda c: not c.searches,
        "algorithm={c.algorithm.name} and stages={c.stages}, which do not search",
    ),
    Rule(
        "algorithm.*",
        lambda c: not facts.chooses(c) and not isinstance(c.algorithm, GivenNetwork),
        "stages={c.stages}, which lack search",
    ),
    Rule(
        "evaluation.baselines",
        lambda c: facts.has_real_sites(c) and c.dp,
        "runtime=deployment privacy=dp, whose sites would pay for more networks",
    ),
    Rule(
        "aggregate secure_sum sampling runtime.wire runtime.time_limit training.precision "
        "training.momentum training.class_factors training.loss "
        "dataset.crop_padding dataset.flip dataset.cutout privacy.micro_batch_size",
        lambda c: not c.retrains and algorithm_of(c).trains is None,
        "algorithm=zero_cost and stages={c.stages}, in which no client trains",
    ),
    # Networks.
    Rule(
        "retrain.channels retrain.num_cells retrain.auxiliary_weight retrain.drop_path_prob "
        "search_space",
        _fixed,
        NETWORK,
    ),
    Rule(
        "search_space= search_space.channels search_space.num_cells",
        lambda c: not (c.searches or _fixed(c)) and c.retrain.channels is not None,
        "retrain.channels={c.retrain.channels}, by which the network has sizes of its own",
    ),
    Rule("retrain.norm", lambda c: _fixed(c) and not c.algorithm.has_norm, NETWORK),
    Rule(
        "retrain.unaugmented",
        lambda c: not any(c.dataset.augmentation.values()),
        "dataset={c.dataset.name}, whose images are not augmented",
    ),
    Rule(
        "retrain.drop_path_prob",
        lambda c: isinstance(c.search_space, DPCells) and c.retrain.channels is None,
        "search_space={c.search_space.name}, whose networks have no paths to drop",
    ),
    # Algorithms.
    Rule(
        "training.momentum",
        lambda c: (
            (not c.retrains or facts.retrains_by_gradients(c))
            and not (c.searches and c.algorithm.trains_models)
        ),
        "stages={c.stages} and retrain.exchange={c.retrain.exchange}: clients send no models",
        "remove it; along gradients the server steps with the momentum of algorithm.weights and "
        "retrain.weights",
    ),
    Rule(
        "retrain.exchange retrain.evaluate_every retrain.unaugmented retrain.weights.min_lr",
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
        "secure_sum.least_sites secure_sum.colluding privacy.sites privacy.test_seed "
        "evaluation.deliver",
        facts.has_real_sites,
        "runtime=deployment partition=sites, whose sites have terms, books, noise and scores of "
        "their own",
    ),
    Rule(
        "sampling.by sampling.spare",
        lambda c: c.sampling is not None and not c.samples,
        "sampling.per_round={c.sampling.per_round:g} of clients={c.clients}, so that all are asked",
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
        lambda c: c.by_record,
        "privacy=dp, whose clients take noised steps",
        "remove it, and set privacy.local_steps, of retraining privacy.retrain.local_steps",
    ),
    Rule(
        "privacy.weights privacy.alphas privacy.local_steps privacy.rate privacy.search_share",
        lambda c: not c.searches or algorithm_of(c).trains is None,
        "algorithm={c.algorithm.name} and stages={c.stages}, whose search asks clients nothing",
    ),
    Rule(
        "privacy.local_steps",
        lambda c: hasattr(c.algorithm, "local_steps"),
        "algorithm={c.algorithm.name}, which has steps of its own",
        "remove it, and set algorithm.local_steps",
    ),
    Rule(
        "privacy.rewards privacy.rewards_share",
        lambda c: not _rewards(c),
        "algorithm={c.algorithm.name} and stages={c.stages}, which ask for no rewards",
    ),
    Rule(
        "privacy.search_share",
        # algorithms that ask for rewards have no alphas, or none on a split of retraining
        lambda c: (
            c.dp
            and not _is_shared(c, "weights")
            and (algorithm_of(c).asks_rewards or not _is_shared(c, "alphas"))
        ),
        "noise of the search that is given",
        "remove it, or set privacy.weights.noise_multiplier=null",
    ),
    Rule(
        "privacy.rewards_share",
        # with retraining of its own (FEATHERS) only the alphas share the validation records
        lambda c: (
            c.dp
            and not (
                _is_shared(c, "rewards")
                and (c.retrains if algorithm_of(c).retraining is None else _has_alphas(c))
            )
        ),
        "noise of rewards that is given, or has no other beside it",
        "remove it, or set privacy.alphas.noise_multiplier=null",
    ),
    Rule(
        "privacy.metrics_noise_multiplier",
        lambda c: c.dp and not _measures(c),
        "algorithm={c.algorithm.name}, stages={c.stages} and dataset.fractions="
        "{c.dataset.fractions}, with which nothing is measured on clients' records",
    ),
    Rule(
        "privacy.statistics_noise_multiplier",
        lambda c: not (facts.has_real_sites(c) or c.dataset.has_bounds),
        "dataset={c.dataset.name} without dataset.ranges of every column of numbers in place of "
        "dataset.statistics, or pooled features of dataset.backbone, of which clients would tell",
        "remove it, or declare dataset.ranges={column: [low, high], ...}",
    ),
    Rule(
        "privacy.statistics_share",
        lambda c: (
            not facts.has_real_sites(c)
            and not (getattr(c.dataset, "backbone", None) and c.dataset.has_bounds)
        ),
        "dataset={c.dataset.name} without pooled features of dataset.backbone, which it centres",
    ),
    # Data.
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

OF_IMAGES = "dataset.crop_padding dataset.cutout dataset.mean dataset.std"  # not for features
# Settings that act only if a condition on another setting holds (``facts.holds``).
NEEDS = {
    "stages=retrain": "retrain.exchange retrain.rounds retrain.evaluate_every retrain.local_epochs "
    "retrain.batch_size retrain.unaugmented retrain.auxiliary_weight retrain.drop_path_prob "
    "retrain.weights privacy.retrain privacy.search_share privacy.scores_error "
    "evaluation.baselines evaluation.deliver",
    "stages=evaluate": "evaluation.personalised dataset.linear_baseline dataset.limit_test "
    "evaluation.positive evaluation.metric privacy.scores_error evaluation.baselines "
    "evaluation.deliver",
    "stages=export": "evaluation.baselines evaluation.deliver",
    "retrain.rounds!=1": "retrain.drop_path_prob",  # which rises from 0 in the first round
    "dataset.server_test=true": "dataset.linear_baseline dataset.limit_test",
    "secure_sum=null": "runtime.largest_share",  # else the server sees no client's weight
    # Otherwise the budget is for training on all records, and no records are pooled.
    "privacy=none": "retrain.evaluate_every dataset.linear_baseline evaluation.deliver",
    "runtime!=deployment": "dataset.linear_baseline",
    "privacy=dp": "runtime.approval_s",
    "privacy.metrics_noise_multiplier!=null": "algorithm.evaluate_every",
    # Otherwise clients train by epochs and contribute one update.
    "privacy.unit=record": "privacy.local_steps privacy.rate privacy.retrain.local_steps "
    "privacy.retrain.rate privacy.retrain.noise_walk privacy.micro_batch_size "
    "privacy.fewest_records privacy.scores_error",
    # Settings that replace others if they are given.
    "genotype=null": "algorithm.network algorithm.weights algorithm.image_size",
    "algorithm.weights!=null": "algorithm.image_size",
    "algorithm.configurations=[]": "algorithm.num_configurations algorithm.ranges",
    "algorithm.ranges=null": "algorithm.weights.lr algorithm.weights.momentum "
    "algorithm.weights.weight_decay",
    "privacy.rate=null": "algorithm.batch_size algorithm.search.batch_size",
    "privacy.retrain.rate=null": "retrain.batch_size",
    "privacy.retrain.noise_walk=null": "retrain.weights.lr retrain.weights.min_lr",
    "dataset.scattering=null": f"{OF_IMAGES} dataset.flip",
    "dataset.backbone=null": f"{OF_IMAGES} dataset.scattering dataset.image_size",
    "partition.fractions=[]": "partition.alpha partition.min_size",
}


ZERO_IS_NONE = (
    "evaluation.baselines dataset.limit_test dataset.crop_padding dataset.cutout "
    "retrain.unaugmented retrain.auxiliary_weight retrain.drop_path_prob retrain.evaluate_every "
    "algorithm.evaluate_every"
).split()


def without_effect(config: Config) -> dict[str, Rule]:
    """Return the settings that a run does not use, each with the first rule that applies."""
    rules: dict[str, Rule] = {}
    for rule in (*RULES, *algorithm_of(config).unused):
        if rule.when(config):
            for name in rule.settings.split():
                rules.setdefault(name, rule)
    for needed, settings in (*NEEDS.items(), *algorithm_of(config).needs.items()):
        key, equal, text = facts.parts(needed)
        with suppress(AttributeError):  # there is no such setting
            value = facts.value_of(config, key)
            if not facts.holds(config, needed) and not _rule_for(key, rules, config):
                lacks = f", which lack {text}" if isinstance(value, list) and text != "[]" else ""
                cause = f"{key}={show(value)}{lacks}".replace("{", "{{").replace("}", "}}")
                remedy = "remove it" if lacks or equal == "!=" else f"remove it, or set {needed}"
                rule = Rule(settings, bool, cause, remedy)
                rules = dict.fromkeys(settings.split(), rule) | rules
    return rules


def check_effect(config: Config, user: UserSettings) -> None:
    """Refuse settings that the user has typed and that have no effect.

    Settings of an experiment, which cannot be unset outside its file, cause one warning.

    Raises:
        NoEffectError: A typed setting has no effect; the sentence names the first one.
    """
    idle = without_effect(config)
    for name in user.typed:
        if rule := _rule_for(name, idle, config):
            raise NoEffectError(
                f"{_setting(config, name)} has no effect with {spelled(rule.cause, config)}: "
                f"{rule.remedy}."
            )
    lost: dict[str, list[str]] = {}  # by the cause
    for name in user.experiment:
        typed = any(f"{name}.".startswith(f"{other}.") for other in user.typed)
        if not typed and (rule := _rule_for(name, idle, config)):
            lost.setdefault(spelled(rule.cause, config), []).append(name)
    if lost:
        causes = [f"{', '.join(of)}, without effect with {cause}" for cause, of in lost.items()]
        warnings.warn(f"the experiment sets {'; '.join(causes)}.", NoEffectWarning, stacklevel=4)


def _rule_for(name: str, idle: Mapping[str, Rule], config: Config) -> Rule | None:
    """Return the rule of a setting, or of a mapping or group around it; None if it acts."""
    parts = name.split(".")
    if rule := idle.get(f"{name}="):
        return rule
    for end in range(len(parts), 0, -1):
        rule = idle.get(".".join(parts[:end])) or (idle.get(f"{parts[0]}.*") if end > 1 else None)
        if rule is not None:
            return None if _asks_nothing(config, name) else rule
    return None


def _asks_nothing(config: Config, name: str) -> bool:
    """Return true if a setting is null, false or empty, or 0 where that means none."""
    value = _field(config, name)[1]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not value and (not is_number or name in ZERO_IS_NONE)


def _field(config: Config, name: str) -> tuple[str, Any]:
    """Return the name and value of a setting; for numbers in a mapping, those of the mapping."""
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
    """Return a setting and its value as an override; the value of a group is its name."""
    name, value = _field(config, name)
    value = getattr(value, "name", "{...}") if is_dataclass(value) else value
    return f"{name}={show(value)}"

"""Conclusions from the settings of a run, and settings that exclude each other."""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any

from fednas_flwr.base.errors import ConfigError, NoEffectError, show
from fednas_flwr.settings import Config, GivenNetwork, run_settings
from fednas_flwr.settings.names import LINEAR, MOST_SITES
from fednas_flwr.settings.registry import algorithm_of, algorithms, spelled

MOST_PRIVATE_ROUNDS = 10_000


def has_real_sites(config: Config) -> bool:
    """Return true if each client's node has data of its own, which no other machine can read."""
    return config.runtime.name == "deployment" and config.partition.name == "sites"


def follows_noise(config: Config) -> bool:
    """Return true if retraining takes its learning rate from its noise."""
    walk = config.privacy.retrain.noise_walk if config.by_record else None  # type: ignore[union-attr]
    return walk is not None and not chooses_rates(config)


def chooses_rates(config: Config) -> bool:
    """Return true if the algorithm has learning rates of its own for retraining."""
    draws = getattr(config.algorithm, "ranges", None) is not None and config.searches
    return draws or algorithm_of(config).retraining is not None


def chooses(config: Config) -> bool:
    """Return true if the algorithm has rounds of its own, beside or in place of FedAvg's."""
    return config.searches or algorithm_of(config).retraining is not None


def retrains_by_gradients(config: Config) -> bool:
    """Return true if retraining has one exchange per step (FedSGD), not one per round (FedAvg).

    With ``retrain.exchange=null`` that is so if clients share the noise of single steps.
    """
    if algorithm_of(config).retraining is not None:
        return False
    if config.retrain.exchange is None:
        return config.secure_sum is not None and config.by_record
    return config.retrain.exchange == run_settings.GRADIENTS


def averages_plainly(config: Config) -> bool:
    """Return true if all clients train one network from scratch and the server takes their mean.

    The norm of the network must be set by the run, or be absent, as in the linear model.
    """
    given, rules = config.algorithm, {config.aggregate.name, config.server_optimizer.name}
    normed = not isinstance(given, GivenNetwork) or given.has_norm
    fixed = not normed and getattr(given, "network", "") != LINEAR
    frozen = hasattr(config.search_space, "backbone")
    special = fixed or frozen or config.dp or config.samples or config.evaluation.personalised
    return not special and rules == {"mean", "none"} and not getattr(given, "proximal", 0.0)


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting: for a group its choice, for a mapping true.

    Raises:
        AttributeError: This run has no such setting.
    """
    value = attrgetter(key)(config)
    return getattr(value, "name", True) if is_dataclass(value) else value


def parts(condition: str) -> list[str]:
    """Return key, sign and value of a condition."""
    return re.split("(!?=)", condition, maxsplit=1)


def holds(config: Config, condition: str) -> bool:
    """Return true if a setting has a value (``key=value``) or another one (``key!=value``).

    A list has each of its entries as a value. Without such a setting, neither condition is true.
    """
    key, sign, text = parts(condition)
    with suppress(AttributeError):
        value = value_of(config, key)
        return (show(value) == text or (isinstance(value, list) and text in value)) == (sign == "=")
    return False


def check_algorithm(config: Config) -> None:
    """Refuse what the algorithm's entry does not support, then what its settings refuse."""
    entry, privacy = algorithm_of(config), config.dp
    if privacy and privacy.unit not in entry.units:
        able = sorted(other for other, one in algorithms().items() if privacy.unit in one.units)
        raise ConfigError(
            f"privacy=dp privacy.unit={privacy.unit} with algorithm={config.algorithm.name} is not "
            f"possible yet: choose one of {', '.join(able)}."
        )
    _check_clashes(config, entry.clashes)
    config.algorithm.check(config)


def _simulated_terms(c: Config) -> run_settings.SecureSumSettings | None:
    """Return the terms of secure sums; None at real sites, whose policies decide."""
    return None if c.runtime.name == "deployment" else c.secure_sum


NORM = "it mixes the records of a batch and leaks its statistics; set "
ROSTER = "only sites with data and a policy of their own have keys; set partition=sites privacy=dp"
# Values that exclude each other, see holds(), and why: a format string of the configuration c.
CLASHES = {
    # Privacy.
    "algorithm.weights!=null privacy=dp genotype=null algorithm.network!=null": "such networks "
    "have batch normalisation; set dataset.backbone.name={c.algorithm.network}, its frozen "
    "features, with algorithm.network=linear",
    "search_space=adapters runtime=deployment": "a server must not name files of a site, so that "
    "this is not possible yet; name the backbone in every site's dataset.yaml, for its features",
    "search_space.norm=batch privacy=dp algorithm!=zero_cost": NORM + "search_space.norm=group",
    "retrain.norm=batch privacy=dp stages=retrain": NORM + "retrain.norm=group",
    "evaluation.personalised=true privacy=dp": "an accuracy after local training without noise is "
    "an exact function of the records; leave it out",
    "training.precision=bfloat16 privacy=dp": "gradients of records are clipped in float32, so "
    "that none is longer than is booked; set training.precision=float32",
    "retrain.rounds=null privacy=dp": "clients are told of all that is released before the first "
    "round; set retrain.rounds",
    # What would reveal more of a client than one clipped update, where the client is the unit.
    "privacy.unit=client secure_sum=null": "each client would add all noise; set secure_sum=true",
    "privacy.unit=client training.momentum=averaged": "the moments would be further releases; set "
    "training.momentum=reset",
    "privacy.unit=client privacy.metrics_noise_multiplier!=null": "no metric of a whole client is "
    "defined; set it to null",
    "privacy.unit=client retrain.exchange=gradients": "updates of several steps are released; set "
    "retrain.exchange=models",
    # What a server that sees totals only cannot do.
    "secure_sum!=null aggregate!=mean": "it compares values of single clients; set aggregate=mean",
    "secure_sum!=null runtime.wire!=float32": "masked integers are not rounded; set "
    "runtime.wire=float32",
    "secure_sum!=null evaluation.personalised=true": "it is a result per client; leave it out",
    "secure_sum!=null runtime=deployment partition!=sites": ROSTER,
    "secure_sum!=null runtime=deployment privacy!=dp": ROSTER,
}
# All other conflicts: a condition, and the sentence with the reason and the remedy, as above.
CONFLICTS: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (
        lambda c: (
            c.dp is not None
            and c.rounds * c.searches + (c.retrain.rounds or 0) * c.retrains > MOST_PRIVATE_ROUNDS
        ),
        "rounds={c.rounds} with retrain.rounds={c.retrain.rounds} and privacy=dp: expected at most "
        f"{MOST_PRIVATE_ROUNDS} in all, since clients are told of each before the first; take "
        "fewer rounds of more local steps",
    ),
    (
        lambda c: c.secure_sum is not None and c.clients > MOST_SITES,
        f"secure_sum=true with clients={{c.clients}}: a sum is of at most {MOST_SITES}; take fewer",
    ),
    (
        lambda c: (terms := _simulated_terms(c)) is not None and c.clients < terms.fewest,
        "secure_sum=true with clients={c.clients} and secure_sum.colluding="
        "{c.secure_sum.colluding}: a sum must have two honest clients beside those; raise clients "
        "to {c.secure_sum.fewest} or more, or lower secure_sum.colluding",
    ),
    (
        lambda c: (
            (terms := _simulated_terms(c)) is not None
            and not terms.fewest <= terms.least(c.clients) <= c.clients
        ),
        "secure_sum.least_sites={c.secure_sum.least_sites} with secure_sum.colluding="
        "{c.secure_sum.colluding} and clients={c.clients}: a sum must have two honest clients, so "
        "that least_sites is from {c.secure_sum.fewest} to {c.clients}; raise clients or lower "
        "secure_sum.colluding",
    ),
    # Settings that need all clients in every round.
    (
        lambda c: c.samples and c.secure_sum is not None,
        "sampling.per_round={c.sampling.per_round:g} with secure_sum=true: every sum is over the "
        "whole roster; leave one of them out",
    ),
    # Robust averages of gradients, and two optimisers of the server.
    (
        lambda c: c.aggregate.name != "mean" and c.retrains and retrains_by_gradients(c),
        "aggregate={c.aggregate.name} with retrain.exchange={c.retrain.exchange}: it adds up sums "
        "of gradients over batches of different sizes; set aggregate=mean or "
        "retrain.exchange=models",
    ),
    (
        lambda c: (
            c.server_optimizer.name != "none"
            and (not isinstance(c.algorithm, GivenNetwork) or chooses(c))
        ),
        "server_optimizer={c.server_optimizer.name} with algorithm={c.algorithm.name}: it is for "
        "the training of a given network; set algorithm=fedavg or fedprox, with genotype=<file> "
        "for a cell that was found, or server_optimizer=none",
    ),
    (
        lambda c: c.server_optimizer.name != "none" and retrains_by_gradients(c),
        "server_optimizer={c.server_optimizer.name} with retrain.exchange={c.retrain.exchange}: "
        "the server steps along gradients by SGD there; set server_optimizer=none or "
        "retrain.exchange=models",
    ),
    # Robust averages of too few replies. Privacy allows them: they only process what has been
    # released. The noise of a median has up to 1.25 times the deviation of a mean's.
    (
        lambda c: c.aggregate.name != "mean" and c.asked < 3,
        "aggregate={c.aggregate.name} with a round of {c.asked} clients: expected 3 or more",
    ),
    (
        lambda c: (
            isinstance(c.aggregate, run_settings.TrimmedMeanSettings)
            and math.ceil(c.runtime.quorum * c.asked - 1e-9) <= 2 * c.aggregate.trim
        ),
        "aggregate.trim={c.aggregate.trim} leaves nothing of the replies that runtime.quorum="
        "{c.runtime.quorum:g} of {c.asked} clients lets a round go on with: expected fewer than "
        "half of them; raise runtime.quorum or lower aggregate.trim",
    ),
    # Stages that lack their starting point, or have two.
    (
        lambda c: chooses(c) and c.dataset.fractions.get("validation") == 0,
        "dataset.fractions.validation=0.0 leaves a search nothing to choose by: expected above 0",
    ),
    (
        lambda c: c.genotype is not None and c.searches,
        "genotype={c.genotype} with stages={c.stages}: a genotype replaces the search; set "
        "stages=[retrain,evaluate,export]",
    ),
    (
        lambda c: (
            c.retrains
            and not c.searches
            and c.genotype is None
            and not isinstance(c.algorithm, GivenNetwork)
        ),
        "stages={c.stages} without search: retraining needs a network; set genotype=<file> or "
        "algorithm=fedavg",
    ),
    (
        lambda c: not c.retrains and not {"evaluate", "export"}.isdisjoint(c.stages),
        "stages={c.stages}: evaluate and export need the network that retrain trains; add retrain "
        "or leave them out",
    ),
)


def _check_clashes(config: Config, clashes: Mapping[str, str]) -> None:
    for conditions, reason in clashes.items():
        if all(holds(config, condition) for condition in conditions.split()):
            keys = [parts(condition)[0] for condition in conditions.split()]
            keys = [key for key in keys if key != "stages"][:2]
            if clashes is not CLASHES and not any(key.startswith("algorithm") for key in keys):
                keys.append("algorithm")
            named = " with ".join(f"{key}={show(value_of(config, key))}" for key in keys)
            raise ConfigError(f"{named}: {spelled(reason, config)}.")


def check_combinations(config: Config) -> None:
    """Raise ConfigError for settings that exclude each other, the algorithm's own first."""
    check_algorithm(config)
    _check_clashes(config, CLASHES)
    for excluded, sentence in CONFLICTS:
        if excluded(config):
            raise ConfigError(f"{spelled(sentence, config)}.")
    if config.stages == ["search"] and not config.searches:
        raise NoEffectError(
            f"stages=[search] with algorithm={config.algorithm.name}, which does not search: "
            "nothing would run; set stages=[retrain,evaluate,export]."
        )

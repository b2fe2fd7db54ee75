"""What the settings of a run amount to, and settings that exclude each other with an algorithm."""

from __future__ import annotations

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings import Config, DifferentialPrivacy, GivenNetwork, NoPrivacy
from fednas_flwr.settings.names import BY_SIZE, CLIENT
from fednas_flwr.settings.registry import algorithm_of, algorithms
from fednas_flwr.settings.rounds import MOST_SITES


def has_real_sites(config: Config) -> bool:
    """Return whether each client's node has data of its own, which no other machine can read."""
    return config.runtime.name == "deployment" and config.partition.name == "sites"


def by_client(config: Config) -> bool:
    """Return whether the unit of a run's privacy is the client."""
    return isinstance(config.privacy, DifferentialPrivacy) and config.privacy.unit == CLIENT


def by_record(config: Config) -> bool:
    """Return whether it is the record, or the person."""
    return isinstance(config.privacy, DifferentialPrivacy) and config.privacy.unit != CLIENT


def follows_noise(config: Config) -> bool:
    """Return whether retraining takes its learning rate from its noise."""
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy) or not by_record(config):
        return False
    return privacy.retrain.noise_walk is not None and not chooses_rates(config)


def chooses_rates(config: Config) -> bool:
    """Return whether the algorithm has learning rates of its own for retraining."""
    draws = getattr(config.algorithm, "ranges", None) is not None and searches(config)
    return draws or algorithm_of(config).retraining is not None


def searches(config: Config) -> bool:
    """Return whether a run has a search stage."""
    return "search" in config.stages and not isinstance(config.algorithm, GivenNetwork)


def retrains(config: Config) -> bool:
    """Return whether a run has a retrain stage."""
    return "retrain" in config.stages


def chooses(config: Config) -> bool:
    """Return whether rounds of the algorithm's own, and not FedAvg's alone, ask clients."""
    return searches(config) or algorithm_of(config).retraining is not None


def retrains_by_gradients(config: Config) -> bool:
    """Return whether every step of retraining is an exchange, FedSGD's, and not FedAvg's many.

    Where that is left open it is where clients share the noise of such steps.
    """
    if algorithm_of(config).retraining is not None:
        return False
    if config.retrain.exchange is None:
        return config.secure_sum is not None and by_record(config)
    return config.retrain.exchange == "gradients"


def check_algorithm(config: Config) -> None:
    """Refuse what the entry of the algorithm does not support, then what it alone refuses."""
    entry, name, privacy = algorithm_of(config), config.algorithm.name, config.privacy
    if isinstance(privacy, DifferentialPrivacy):
        if not entry.units:
            private = sorted(other for other, one in algorithms().items() if one.units)
            raise ConfigError(
                f"privacy=dp with algorithm={name} is not possible yet: choose one of "
                f"{', '.join(private)}."
            )
        if privacy.unit not in entry.units:
            able = sorted(o for o, one in algorithms().items() if privacy.unit in one.units)
            raise ConfigError(
                f"privacy.unit={privacy.unit} with algorithm={name}: its clients' replies are no "
                f"updates of several local steps; choose one of {', '.join(able)}."
            )
    features = {
        "aggregate": (config.aggregate.name != "mean", config.aggregate.name),
        "secure_sum": (config.secure_sum is not None, "true"),
        "sampling": (config.sampling is not None, "on"),
    }
    for feature, (is_asked, value) in features.items():
        if is_asked and feature in entry.unsupported and chooses(config):
            reason = entry.unsupported[feature]
            raise ConfigError(f"{feature}={value} with algorithm={name}: {reason}.")
    config.algorithm.check(config)
    if chooses(config) and config.dataset.fractions.get("validation") == 0:
        raise ConfigError(
            "dataset.fractions.validation=0.0 leaves a search nothing to choose by: expected "
            "above 0."
        )


def check_secure_sum(config: Config) -> None:
    """Refuse what a server that sees totals only cannot do."""
    terms = config.secure_sum
    if terms is None:
        return
    needs = {
        f"aggregate={config.aggregate.name}": (
            config.aggregate.name != "mean",
            "it compares the values of single clients; set aggregate=mean",
        ),
        f"runtime.wire={config.runtime.wire}": (
            config.runtime.wire != "float32",
            "masked integers are not rounded; set runtime.wire=float32",
        ),
        f"clients={config.clients}": (
            config.clients > MOST_SITES,
            f"a sum is of at most {MOST_SITES}; take fewer",
        ),
        "privacy.statistics_noise_multiplier": (
            getattr(config.privacy, "statistics_noise_multiplier", None) is not None,
            "what clients standardise by is found before there is a sum; set it to null",
        ),
        "evaluation.personalised=true": (
            config.evaluation.personalised,
            "it is a result per client; leave it out",
        ),
        f"runtime={config.runtime.name}": (
            config.runtime.name == "deployment"
            and (config.partition.name != "sites" or isinstance(config.privacy, NoPrivacy)),
            "only sites with data and a policy of their own have keys and a roster; set "
            "partition=sites privacy=dp",
        ),
    }
    for setting, (refused, reason) in needs.items():
        if refused:
            raise ConfigError(f"secure_sum=true with {setting}: {reason}.")
    if config.runtime.name == "deployment":
        return  # whose sites' own policies decide
    if config.clients < terms.colluding + 2:
        raise ConfigError(
            f"secure_sum=true with clients={config.clients} and secure_sum.colluding="
            f"{terms.colluding}: a sum must have two honest clients beside those; raise clients to "
            f"{terms.colluding + 2} or more, or lower secure_sum.colluding."
        )
    if not terms.colluding + 2 <= terms.least(config.clients) <= config.clients:
        raise ConfigError(
            f"secure_sum.least_sites={show(terms.least_sites)} with secure_sum.colluding="
            f"{terms.colluding} and clients={config.clients}: a sum must have two honest clients, "
            f"so that least_sites is from {terms.colluding + 2} to {config.clients}; raise clients "
            "or lower secure_sum.colluding."
        )


def check_unit_of_privacy(config: Config) -> None:
    """Refuse what tells more of a client than one clipped update, where that is the unit."""
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy) or not by_client(config):
        return
    needs = {
        "secure_sum=false": (
            config.secure_sum is None,
            "each client would add all of the noise; set secure_sum=true",
        ),
        f"training.momentum={config.training.momentum}": (
            config.training.momentum == "averaged",
            "the moments would be further releases; set training.momentum=reset or "
            "training.momentum=server",
        ),
        "privacy.metrics_noise_multiplier": (
            privacy.metrics_noise_multiplier is not None,
            "no metric of a whole client is defined; set it to null",
        ),
        "retrain.exchange=gradients": (
            config.retrain.exchange == "gradients",
            "updates of several steps are released; set retrain.exchange=models",
        ),
    }
    for setting, (refused, reason) in needs.items():
        if refused:
            raise ConfigError(f"privacy.unit=client with {setting}: {reason}.")


def check_sampling(config: Config) -> None:
    """Refuse what needs all clients in every round, or each of them once."""
    sampling = config.sampling
    if sampling is None or not config.samples:
        return
    by_size, rewards = sampling.by == BY_SIZE, algorithm_of(config).asks_rewards
    needs = {
        "secure_sum=true": (
            config.secure_sum is not None,
            "every sum is over the whole roster; leave one of them out",
        ),
        f"sampling.by=by_size and aggregate={config.aggregate.name}": (
            by_size and config.aggregate.name != "mean",
            "a large client that is drawn twice has one value; set sampling.by=uniform",
        ),
        "sampling.by=by_size and privacy=dp": (
            by_size and rewards and not isinstance(config.privacy, NoPrivacy),
            f"the noise on rewards of algorithm={config.algorithm.name} is known for averages by "
            "records only; set sampling.by=uniform or sampling.by=round_robin",
        ),
    }
    for setting, (refused, reason) in needs.items():
        if refused:
            asked = sampling.per_round
            raise ConfigError(f"sampling.per_round={asked:g} with {setting}: {reason}.")

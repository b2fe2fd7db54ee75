"""Settings that exclude each other with one algorithm; the entries of ``ALGORITHMS`` name them."""

from __future__ import annotations

from fednas_flwr.builders.pools import chosen_scores, pool_size
from fednas_flwr.config import (
    BlockSpace,
    CFDNASSettings,
    Config,
    DifferentialPrivacy,
    DPCells,
    DPNASSettings,
    FDNASSettings,
    FEATHERSSettings,
    FedDARTSSettings,
    FedExSettings,
    FNASSettings,
    GivenNetwork,
    NoPrivacy,
    RandomSearchSettings,
    SuccessiveHalvingSettings,
    ZeroCostSettings,
)
from fednas_flwr.config.run import MOST_SITES
from fednas_flwr.errors import ConfigError, show, unknown_choice
from fednas_flwr.names import BY_SIZE, CLIENT
from fednas_flwr.typed import check_range


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
    algorithm = config.algorithm
    if isinstance(algorithm, FEATHERSSettings | FedExSettings):
        return True
    drawn = isinstance(algorithm, RandomSearchSettings) and algorithm.ranges is not None
    return drawn and searches(config)


def searches(config: Config) -> bool:
    """Return whether a run has a search stage."""
    return "search" in config.stages and not isinstance(config.algorithm, GivenNetwork)


def of_fnas(config: Config) -> None:
    """Refuse robust averages of what is not an average."""
    if config.aggregate != "mean" and searches(config):
        raise ConfigError(
            f"aggregate={config.aggregate} with algorithm={config.algorithm.name}: it adds up sums "
            "of gradients over batches of different sizes; set aggregate=mean."
        )


def of_vanilla_nas(config: Config) -> None:
    """Refuse more than one party."""
    if config.clients != 1:
        raise ConfigError(
            f"algorithm=vanilla_nas with clients={config.clients}: vanilla NAS has one party; "
            "set clients=1 or algorithm=fnas."
        )
    of_fnas(config)


def of_dp_fnas(config: Config) -> None:
    """Refuse DP-FNAS without privacy, and of second order."""
    assert isinstance(config.algorithm, FNASSettings)
    if isinstance(config.privacy, NoPrivacy):
        raise ConfigError("algorithm=dp_fnas with privacy=none: set privacy=dp, or use fnas.")
    if config.algorithm.order != 1:
        raise ConfigError(
            f"algorithm.order={config.algorithm.order} with privacy=dp: the second order mixes "
            "splits and is no sum over records; set algorithm.order=1."
        )
    of_fnas(config)


def of_mixed_splits(config: Config) -> None:
    """Refuse private rules whose gradient is of records of two splits."""
    algorithm = config.algorithm
    assert isinstance(algorithm, FedDARTSSettings | FEATHERSSettings)
    if by_record(config) and algorithm.rule != "first_order":
        raise ConfigError(
            f"algorithm.rule={algorithm.rule} with privacy=dp: it mixes splits; set "
            "algorithm.rule=first_order."
        )


def of_feathers(config: Config) -> None:
    """Refuse what :func:`of_mixed_splits` does, and private rewards of averaged models."""
    of_mixed_splits(config)
    assert isinstance(config.algorithm, FEATHERSSettings)
    if not isinstance(config.privacy, NoPrivacy) and config.algorithm.rewarded != "local":
        raise ConfigError(
            f"algorithm.rewarded={config.algorithm.rewarded} with privacy=dp is not possible yet: "
            "losses of averaged models are no planned release; set algorithm.rewarded=local."
        )


def of_fed_darts(config: Config) -> None:
    """Refuse what the functions above and below do."""
    of_mixed_splits(config)
    of_single_paths(config)


def of_single_paths(config: Config) -> None:
    """Refuse single paths where none can be drawn."""
    algorithm, space = config.algorithm, config.search_space.name
    assert isinstance(algorithm, FedDARTSSettings)
    if algorithm.temperatures is None or not searches(config):
        return
    if space != "nasbench201":
        raise ConfigError(
            f"algorithm.temperatures with search_space={space}: single paths are drawn of the "
            "NAS-Bench-201 cell only; set algorithm.temperatures=null or search_space=nasbench201."
        )
    if by_record(config):
        raise ConfigError(
            "algorithm.temperatures with privacy=dp: single paths have no private gradient yet; "
            "set algorithm.temperatures=null."
        )


def of_fdnas(config: Config) -> None:
    """Refuse other spaces than that of blocks, and two ways of sending less at once."""
    if searches(config) and not isinstance(config.search_space, BlockSpace):
        raise ConfigError(
            f"algorithm={config.algorithm.name} with search_space={config.search_space.name}: "
            "it samples paths of blocks; set search_space=mbconv retrain=mbconv."
        )
    search = config.algorithm
    if isinstance(search, CFDNASSettings):
        search = search.search
    assert isinstance(search, FDNASSettings)
    if config.wire != "float32" and search.sparse:
        raise ConfigError(
            f"wire={config.wire} with sparse=true of algorithm={config.algorithm.name}: rounding "
            "is of differences to whole states; set one of wire=float32 and sparse=false."
        )


def of_cfdnas(config: Config) -> None:
    """Refuse what FDNAS does, groups by alphas that rest, and averages that need a number."""
    assert isinstance(config.algorithm, CFDNASSettings)
    warm_up = config.algorithm.search.warm_up_rounds
    if config.algorithm.group_by == "alphas" and config.rounds <= warm_up:
        raise ConfigError(
            f"algorithm.group_by=alphas with rounds={config.rounds}: alphas rest in the first "
            f"algorithm.search.warm_up_rounds={warm_up}, so that no update groups the clients; "
            f"raise rounds to {warm_up + 1} or more."
        )
    if not searches(config):
        raise ConfigError(
            f"algorithm=cfdnas with stages={show(config.stages)}: its groups begin with a search; "
            "add search, or set algorithm=fedavg to retrain a genotype."
        )
    if config.aggregate == "trimmed_mean":
        raise ConfigError(
            "aggregate=trimmed_mean with algorithm=cfdnas: how many clients a group has is not "
            "known before; set aggregate=median."
        )
    of_fdnas(config)


def check_groups(config: Config) -> None:
    """Refuse groups that cannot come about; real nodes tell their own tags when they connect."""
    from fednas_flwr.strategies.clusters import group_name  # brings torch

    algorithm = config.algorithm
    if not isinstance(algorithm, CFDNASSettings):
        return
    if algorithm.num_groups is not None and algorithm.num_groups > config.clients:
        raise ConfigError(
            f"algorithm.num_groups={algorithm.num_groups} with clients={config.clients}: expected "
            "at most one group per client; lower it."
        )
    if algorithm.group_by != "tag" or config.runtime.name == "deployment":
        return
    if not config.client_tags or "" in config.client_tags:
        raise ConfigError(
            f"algorithm.group_by=tag with client_tags={show(config.client_tags)}: every simulated "
            f"client needs a tag; give one for each of clients={config.clients}."
        )
    for client, tag in enumerate(config.client_tags):
        group_name({"tag": tag}, client, "tag")
    for name in algorithm.group_hardware:
        if name not in config.client_tags:
            raise unknown_choice("algorithm.group_hardware", name, set(config.client_tags))


def of_dpnas(config: Config) -> None:
    """Refuse other spaces than that of DPNAS, and statistics of batches."""
    space = config.search_space
    if searches(config) and (not isinstance(space, DPCells) or space.norm != "group"):
        raise ConfigError(
            f"algorithm={config.algorithm.name} with search_space={space.name} norm={space.norm}: "
            "candidates share weights, so that statistics of batches would be other candidates'; "
            "set search_space=dp_cells search_space.norm=group retrain=dp_cells."
        )


def check_validation(config: Config) -> None:
    """Refuse clients without validation records, by which a search or FedEx chooses."""
    if config.dataset.fractions.get("validation") == 0:
        raise ConfigError(
            "dataset.fractions.validation=0.0 leaves a search nothing to choose by: expected "
            "above 0."
        )


def check_secure_sum(config: Config) -> None:
    """Refuse what a server that sees totals only cannot do."""
    if not config.secure_sum:
        return
    name, algorithm, terms = config.algorithm.name, config.algorithm, config.secure_terms
    own_paths = isinstance(algorithm, FDNASSettings | CFDNASSettings) and searches(config)
    needs = {
        f"aggregate={config.aggregate}": (
            config.aggregate != "mean",
            "it compares the values of single clients; set aggregate=mean",
        ),
        f"wire={config.wire}": (
            config.wire != "float32",
            "masked integers are not rounded; set wire=float32",
        ),
        f"clients={config.clients}": (
            config.clients > MOST_SITES,
            f"a sum is of at most {MOST_SITES}; take fewer",
        ),
        "privacy.statistics_noise_multiplier": (
            getattr(config.privacy, "statistics_noise_multiplier", None) is not None,
            "what clients standardise by is found before there is a sum; set it to null",
        ),
        "personalised=true": (config.personalised, "it is a result per client; leave it out"),
        f"algorithm={name}": (
            own_paths or name == "fedex",
            "its clients, or groups of them, are asked different things, which have no sum; choose "
            "another algorithm",
        ),
        "algorithm.reduce=sum": (
            getattr(algorithm, "reduce", "mean") == "sum" and searches(config),
            "the batch size of each client is needed; set algorithm.reduce=mean",
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
            f"secure_sum=true with clients={config.clients} and secure_terms.colluding="
            f"{terms.colluding}: a sum must have two honest clients beside those; raise clients to "
            f"{terms.colluding + 2} or more, or lower secure_terms.colluding."
        )
    if not terms.colluding + 2 <= terms.least(config.clients) <= config.clients:
        raise ConfigError(
            f"secure_terms.least_sites={show(terms.least_sites)} with secure_terms.colluding="
            f"{terms.colluding} and clients={config.clients}: a sum must have two honest clients, "
            f"so that least_sites is from {terms.colluding + 2} to {config.clients}; raise clients "
            "or lower secure_terms.colluding."
        )


def check_unit_of_privacy(config: Config) -> None:
    """Refuse what tells more of a client than one clipped update, where that is the unit."""
    privacy, algorithm = config.privacy, config.algorithm
    if not isinstance(privacy, DifferentialPrivacy) or not by_client(config):
        return
    updates = FedDARTSSettings | FEATHERSSettings | ZeroCostSettings | GivenNetwork
    needs = {
        "secure_sum=false": (
            not config.secure_sum,
            "each client would add all of the noise; set secure_sum=true",
        ),
        f"algorithm={algorithm.name}": (
            not isinstance(algorithm, updates),
            "its clients' replies are no updates of several local steps; choose fed_darts, "
            "feathers, fedavg, fedprox or zero_cost",
        ),
        f"momentum={config.momentum}": (
            config.momentum == "averaged",
            "the moments would be further releases; set momentum=reset or momentum=server",
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
    if not config.samples:
        return
    algorithm, by_size = config.algorithm, config.sampling == BY_SIZE
    of_sets = isinstance(algorithm, FEATHERSSettings | DPNASSettings | SuccessiveHalvingSettings)
    needs = {
        f"algorithm={algorithm.name}": (
            isinstance(algorithm, CFDNASSettings),
            "it divides all clients into groups by what each of them answers; leave "
            "clients_per_round out",
        ),
        "secure_sum=true": (
            config.secure_sum,
            "every sum is over the whole roster; leave one of them out",
        ),
        "algorithm.reduce=sum": (
            getattr(algorithm, "reduce", "mean") == "sum" and searches(config),
            "a sum over some clients is no estimate of that over all; set algorithm.reduce=mean",
        ),
        f"sampling=by_size and aggregate={config.aggregate}": (
            by_size and config.aggregate != "mean",
            "a large client that is drawn twice has one value; set sampling=uniform",
        ),
        "sampling=by_size and privacy=dp": (
            by_size and of_sets and not isinstance(config.privacy, NoPrivacy),
            f"the noise on rewards of algorithm={algorithm.name} is known for averages by records "
            "only; set sampling=uniform or sampling=round_robin",
        ),
    }
    for setting, (refused, reason) in needs.items():
        if refused:
            asked = config.clients_per_round
            raise ConfigError(f"clients_per_round={asked:g} with {setting}: {reason}.")


def of_fedex(config: Config) -> None:
    """Refuse the server's momentum, as every client draws its own."""
    check_validation(config)
    if config.momentum == "server":
        raise ConfigError(
            "momentum=server with algorithm=fedex: every client steps with a momentum of its own; "
            "set momentum=reset or momentum=averaged."
        )


def of_successive_halving(config: Config) -> None:
    """Refuse what :func:`of_scores` does, and shortlists or local rankings that cannot be."""
    from fednas_flwr.strategies.successive_halving import num_rungs

    of_scores(config)
    algorithm, keep = config.algorithm, pool_size(config)
    assert isinstance(algorithm, SuccessiveHalvingSettings)
    if (shortlist := algorithm.pool.shortlist) is not None:
        expected = f"{keep}, the pool's size, to draws={algorithm.pool.draws}"
        key = "algorithm.pool.shortlist.keep"
        check_range(shortlist.keep >= keep, key, shortlist.keep, expected)
    if algorithm.rewarded == "averaged":
        return
    if not isinstance(config.privacy, NoPrivacy):
        raise ConfigError(
            f"algorithm.rewarded={algorithm.rewarded} with privacy=dp: training losses are no "
            "planned release; set algorithm.rewarded=averaged, or take a search that reads no "
            "record, as experiment=search/recommended_private does."
        )
    eta = algorithm.eta
    rungs = num_rungs(keep, eta)
    if config.rounds > rungs:
        raise ConfigError(
            f"rounds={config.rounds} with algorithm.rewarded=local: at most {rungs} rounds have "
            f"something to choose with algorithm.pool.keep={keep} and algorithm.eta={eta}; set "
            f"rounds={rungs} or fewer."
        )


def of_scores(config: Config) -> None:
    """Refuse scores that do not exist."""
    from fednas_flwr.search.scores import SCORES

    algorithm = config.algorithm
    if isinstance(algorithm, SuccessiveHalvingSettings):
        named = {"algorithm.pool.by": chosen_scores(config)}
        key, shortlist = "algorithm.pool.shortlist.scores", algorithm.pool.shortlist
    else:
        assert isinstance(algorithm, ZeroCostSettings)
        named = {"algorithm.scores": chosen_scores(config)}
        key, shortlist = "algorithm.shortlist.scores", algorithm.shortlist
    if shortlist is not None:
        named[key] = shortlist.scores
    for key, names in named.items():
        for name in names:
            if name not in SCORES:
                raise unknown_choice(key, name, SCORES)

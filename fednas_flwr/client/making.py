"""Clients of real and simulated sites, with their release guards."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError, check_choice, show
from fednas_flwr.base.files import make_folder, write_atomically
from fednas_flwr.base.foreign import dump_yaml
from fednas_flwr.client.client import Client, KeptModels
from fednas_flwr.client.release_guard import ReleaseGuard
from fednas_flwr.data.datasets import Data, Prepared
from fednas_flwr.data.loaders import make_client_data
from fednas_flwr.data.npz import reads_encoded
from fednas_flwr.data.records import Records, assignment_digest
from fednas_flwr.data.statistics import column_moments
from fednas_flwr.models.networks import Description, make_device, make_network, supernet_space
from fednas_flwr.privacy.actions import PRIVATE_ACTIONS
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.mechanism.noise import SecureGenerator
from fednas_flwr.privacy.policy import AUTOMATIC, Policy, SumTerms, load_policy, parse_policy
from fednas_flwr.protocol.keys import Roster, SiteKeys
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.search.objective import Objective, Regression
from fednas_flwr.settings import Config, data_settings, dump_config, expanded, names, registry
from fednas_flwr.settings.incompatible import has_real_sites

_DATA_KEYS = ("data-path", "dataset", "cache", "data-set")  # the data, how to read it, and its id
# What a private site's node names: also its policy, ledger and secrets
PRIVATE_SITE_KEYS = (*_DATA_KEYS, "policy", "ledger", "ledger-key", "split-key")
POLICY_FILE = "policy.yaml"  # policy file of a simulated site
NO_ROSTER = "0" * 64  # a simulated guard reads only the number of honest sites


def make_client(
    config: Config,
    index: int,
    *,
    data: Data,
    networks: dict[str, torch.nn.Module],
    site: Mapping[str, str] = {},
    guard: ReleaseGuard | None = None,
    settings: str | None = None,
) -> Client:
    """Return client ``index`` of a run.

    Args:
        config: The run's configuration.
        index: Index of the client, from 0 to ``config.clients - 1``.
        data: Result of ``data.prepared.make_data``, shared by the clients of a process.
        networks: Built networks, also shared: clients of a process take turns.
        site: Settings of the node's own configuration, see ``client_app.SITE_KEYS``.
        guard: Result of :func:`make_site_guard` for a ``site`` that names a policy; guards of
            simulated clients are made here.
        settings: The run's settings as the server has sent them; None means all of ``config``.

    Raises:
        ConfigError: A setting does not fit the data, or a private run's real site has no policy.
        ValueError: ``site`` names a policy, and there is no guard.
    """
    if guard is None and "policy" in site:
        raise ValueError("a site with a policy needs its guard: pass make_site_guard(site)")
    prepared, parts = data
    device = make_device(config.runtime.device)

    def build_network(description: Description) -> torch.nn.Module:
        if site and (description.get("weights") or hasattr(config.search_space, "weights")):
            raise ConfigError("refused: a server must not name files of a site.")
        if description["name"] == "supernet":
            return supernet_space(config, prepared).supernet()
        return make_network(description)

    guard = guard or _simulated_guard(config, index, prepared.train, parts[index])
    fractions: Mapping[str, float] = config.dataset.fractions
    if guard is not None:
        check_public(config, prepared)
        check_unit(guard.allowed.unit, prepared.train)
        fractions = guard.allowed.fractions
    key = site.get("split-key", config.dataset.split_key).encode()
    division: dict[str, Any] = {"key": key, "fractions": fractions}
    tags = getattr(config.algorithm, "client_tags", [])  # CFDNAS has them
    client_data = make_client_data(prepared, parts[index], **division, trains=guard is None)
    if guard is not None:
        records = prepared.train
        ids, column = records.ids[parts[index]], records.id_column
        guard.hold(assignment_digest(ids, **division, id_column=column), column)
    sums = _site_sums(config, index, site, guard)
    sent = "" if sums is None else settings or dump_config(config)
    return Client(
        index=index,
        seed=config.seed,
        data=client_data,
        inputs=prepared.inputs,
        device=device,
        threads=config.runtime.threads if guard is None else guard.allowed.threads,
        make_network=build_network,
        make_space=lambda: supernet_space(config, prepared),
        augmentation=config.dataset.augmentation,
        networks=networks,
        tag=site.get("tag", tags[index] if tags else ""),
        moments=None if prepared.mean else column_moments(prepared.train, client_data.train.rows),
        has_bounds=config.dataset.has_bounds,
        objective=make_objective(config, prepared, device),
        precision=config.training.precision,
        guard=guard,
        wire=config.runtime.wire,
        kept_models=_kept_models(site),
        sums=sums,
        cache=Path(config.dataset.cache).expanduser(),
        settings_digest=hashlib.sha256(sent.encode()).hexdigest(),
    )


def simulated_properties(config: Config, data: Data) -> dict[int, dict[str, Any]] | None:
    """Return the properties of all simulated clients by index; None if clients must be asked.

    A server that simulates clients without privacy divides the records itself and so knows the
    properties. This saves time if rounds ask only some of the clients.

    Args:
        config: The run's configuration.
        data: Result of ``data.prepared.make_data``.
    """
    if not config.samples or config.runtime.name == "deployment" or config.dp:
        return None
    prepared, parts = data
    names = list(prepared.train.class_names)
    properties: dict[int, dict[str, Any]] = {}
    for index, rows in enumerate(parts):
        records = make_client_data(prepared, rows, **config.dataset.division)
        properties[index] = {"client": index, "class_names": names, **records.counts(len(names))}
        if prepared.uses_own_statistics:
            properties[index]["moments"] = column_moments(prepared.train, records.train.rows)
    return properties


def make_objective(config: Config, prepared: Prepared, device: torch.device) -> Objective:
    """Return the objective of training and evaluation; a class without a factor has factor 1.

    Args:
        config: The run's configuration.
        prepared: Data whose classes, labels or target are used; it may have no record.
        device: Device of the objective's tensors.

    Raises:
        ConfigError: A factor, or ``evaluation.positive``, names a class that does not exist; or a
            setting, or the algorithm, is for records with other labels.
    """
    factors, positive = config.training.class_factors, config.evaluation.positive
    loss, metric, records = config.training.loss, config.evaluation.metric, prepared.train
    class_names, is_number = records.class_names, records.is_regression
    one_class, classes, number = "of one class each", "with classes", "with a number to predict"
    have = number if is_number else "with several labels" if records.multi_label else one_class
    of_metric = number if metric in names.NUMBER_METRICS else classes
    for setting, value, form in (
        (f"training.class_factors={show(factors)}", factors, one_class),
        (f"evaluation.positive={positive}", positive, classes),
        (f"evaluation.metric={metric}", metric, of_metric),
        (f"training.loss={loss}", loss in names.NUMBER_LOSSES, number),
    ):
        if value and form != have and (is_number or form != classes):
            raise ConfigError(f"{setting} is for records {form}, not {have}: remove it.")
    if loss is not None and loss not in names.NUMBER_LOSSES:
        check_choice("training.loss", loss, [*names.NUMBER_LOSSES, *registry.TABLES["loss"]])
    own_loss = registry.TABLES["loss"].get(str(loss))
    if is_number:
        by_name = names.SQUARED if loss is None or own_loss else loss
        return Regression(own_loss=own_loss, target=prepared.target, loss=by_name)
    if positive is not None:
        check_choice("evaluation.positive", positive, class_names)
    for name in factors:
        check_choice("training.class_factors", name, class_names)
    values = [factors.get(name, 1.0) for name in class_names]
    return Objective(
        torch.tensor(values, device=device) if factors else None,
        None if positive is None else class_names.index(positive),
        records.multi_label,
        own_loss=own_loss,
    )


def make_site_guard(site: Mapping[str, str]) -> ReleaseGuard | None:
    """Return the guard of a node that names a policy, else None; no record is read.

    Raises:
        ConfigError: The policy file is wrong, or the node does not name everything else that a
            private site has.
    """
    if "policy" not in site:
        return None
    missing = [key for key in PRIVATE_SITE_KEYS if key not in site]
    if missing:
        raise ConfigError(f"the node has a policy but lacks {', '.join(missing)}: give them.")
    policy = load_policy(Path(site["policy"]))
    ledger = Ledger(Path(site["ledger"]), Path(site["ledger-key"]))
    return ReleaseGuard(policy, ledger, SecureGenerator(), data_set=site["data-set"])


def _simulated_guard(
    config: Config, index: int, records: Records, rows: np.ndarray
) -> ReleaseGuard | None:
    """Return the guard of a simulated private client; None without privacy."""
    privacy = config.dp
    if not privacy:
        return None
    if has_real_sites(config):
        raise ConfigError(
            "privacy=dp on a node without a policy: start it with "
            f"{', '.join(PRIVATE_SITE_KEYS)} in --node-config."
        )
    folder = simulated_site(config, index)
    if folder is None:
        raise ConfigError("privacy=dp without a run folder needs privacy.sites=<folder>.")
    policy = simulated_policy(config, index, records, rows)
    if not (folder / POLICY_FILE).exists():
        make_folder(folder)
        write_atomically(folder / POLICY_FILE, _policy_text(config, records, rows))
    test_seed = None if privacy.test_seed is None else f"{privacy.test_seed} {index}".encode()
    ledger = Ledger(*simulated_ledger(folder))
    guard = ReleaseGuard(policy, ledger, SecureGenerator(test_seed), data_set=privacy.data_set)
    if guard.allowed.threads != config.runtime.threads:
        raise ConfigError(
            f"runtime.threads={config.runtime.threads}, but the simulated sites' policies, which "
            f"decide, have runtime.threads={guard.allowed.threads}: set it to that, or take "
            "another privacy.sites."
        )
    return guard


def _kept_models(site: Mapping[str, str]) -> KeptModels | None:
    """Return the folder of a node's kept models; None if it names none.

    Raises:
        ConfigError: The node does not name the key that must have signed the models.
    """
    if "models" not in site:
        return None
    if "signer" not in site:
        raise ConfigError(
            "the node keeps models but lacks signer: give the file of the operator's public key, "
            "signing.pub of `fednas provision`."
        )
    return KeptModels(Path(site["models"]), Path(site["signer"]))


def _site_sums(
    config: Config, index: int, site: Mapping[str, str], guard: ReleaseGuard | None
) -> SumSite | None:
    """Return a client's part of secure sums, from its policy or from a simulated run."""
    if "policy" not in site and not has_real_sites(config):
        return make_sum_site(config, index)
    terms = None if guard is None else guard.allowed.secure_sum
    if terms is not None:
        return SumSite.of_node(index, site, terms)
    if config.secure_sum:
        raise ConfigError(
            "secure_sum=true, but this site's policy has no section secure_sum: set it in its "
            "policy.yaml; docker/README.md."
        )
    return None


def make_sum_site(config: Config, index: int) -> SumSite | None:
    """Return a simulated client's part of secure sums; None in a run without them.

    Its keys are in the run folder, next to those of all others, from which the roster follows.
    """
    if not config.secure_sum:
        return None
    if config.run_dir is None:
        raise ConfigError("secure_sum=true needs a run folder: set run_dir=<folder>.")
    folders = [config.folder / "sites" / f"client-{i}" for i in range(config.clients)]
    keys = [SiteKeys.at(folder / "sum.keys") for folder in folders]
    roster = Roster(tuple(key.public(f"client-{i}") for i, key in enumerate(keys)))
    terms = _simulated_terms(config, roster.fingerprint)
    return SumSite(index, keys[index], roster, terms, folders[index] / "sums.sqlite")


def _simulated_terms(config: Config, fingerprint: str) -> SumTerms:
    """Return the terms of secure sums in the policy of a simulated site."""
    terms = config.secure_sum
    assert terms is not None
    return SumTerms(fingerprint, terms.least(config.clients), terms.colluding)


def simulated_site(config: Config, index: int) -> Path | None:
    """Return the folder of a simulated site's policy, ledger and key; None without a run folder."""
    sites = config.private.sites
    if sites is not None:
        return expanded("privacy.sites", sites) / f"client-{index}"
    return None if config.run_dir is None else config.folder / "sites" / f"client-{index}"


def simulated_ledger(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a simulated site's ledger and its key."""
    return folder / "ledger" / "ledger.sqlite", folder / "key"


def simulated_policy(config: Config, index: int, records: Records, rows: np.ndarray) -> Policy:
    """Return the policy in a simulated site's file, or without one a policy that allows the run.

    Its terms of secure sums are those of the run.
    """
    folder = simulated_site(config, index)
    if folder is not None and (folder / POLICY_FILE).exists():
        policy = load_policy(folder / POLICY_FILE)
    else:
        policy = parse_policy(_policy_text(config, records, rows), origin="privacy")
    if not config.secure_sum:
        return policy
    terms = _simulated_terms(config, NO_ROSTER)
    sections = policy.data_sets.items()
    return Policy({name: replace(rules, secure_sum=terms) for name, rules in sections})


def num_units(records: Records, rows: np.ndarray) -> int:
    """Return the number of persons in some rows of records; without persons, that of records."""
    return len(np.unique(records.ids[rows])) if records.by_person else len(rows)


def _policy_text(config: Config, records: Records, rows: np.ndarray) -> str:
    """Return, as YAML, the policy of a simulated site that allows a run's configuration."""
    privacy = config.private
    norms = (part.max_grad_norm for part in (privacy.weights, privacy.alphas))
    unit = names.PERSON if records.by_person and privacy.unit == names.RECORD else privacy.unit
    section = {
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "least_noise_multiplier": names.LEAST_CALIBRATED,
        "largest_noise_multiplier": 1e6,  # allows whatever the run's settings ask for
        "largest_grad_norm": max(1.0, privacy.retrain.max_grad_norm, *norms),
        "largest_steps": 1_000_000,
        "actions": list(PRIVATE_ACTIONS),
        "unit": unit,
        "records": 1 if unit == names.CLIENT else num_units(records, rows),
        "fractions": config.dataset.fractions,
        "threads": config.runtime.threads,
        "micro_batch_size": privacy.micro_batch_size,
        "secure_noise": privacy.test_seed is None,
        "test_seed": privacy.test_seed is not None,
        "approve": AUTOMATIC,
    }
    return dump_yaml({"data_sets": {privacy.data_set: section}})


def check_public(config: Config, prepared: Prepared) -> None:
    """Raise ConfigError for settings with which a private client would reveal its records."""
    if prepared.uses_own_statistics:
        raise ConfigError(
            "privacy=dp needs public numbers by which a table is standardised: declare "
            "dataset.ranges={column: [low, high], ...}, as `fednas data` drafts them, or "
            "dataset.statistics={column: [mean, std], ...}."
        )
    if not has_real_sites(config):
        return
    settings = config.dataset
    declared = settings.declared
    if isinstance(settings, data_settings.Npz) and not reads_encoded(settings):
        declared = {"class_names": declared["class_names"]}  # plain arrays have their own form
    missing = [f"dataset.{name}" for name, is_given in declared.items() if not is_given]
    if missing:
        raise ConfigError(
            f"privacy=dp on real sites: the node's dataset file must give {', '.join(missing)}, "
            "since names that were found in the records would be a release."
        )


def check_unit(unit: names.Unit, records: Records) -> None:
    """Raise ConfigError unless records name persons if, and only if, the policies ask for it."""
    if unit == names.PERSON and not records.by_person:
        raise ConfigError(
            "the policy has unit: person, but the data does not say whose each record is: set "
            "id_column in the node's dataset file, or unit: record."
        )
    if unit == names.RECORD and records.by_person:
        raise ConfigError(
            "the policy has unit: record, but dataset.id_column says whose each record is: set "
            "unit: person, and records to the number of persons."
        )

"""Inputs of a site's reply in a secure sum: what all sites share, what is each site's own, secrets.

Every input is in one of the three lists. What is shared is in the context of the sum: a site that
has anything else in its place has other masks, so that no server can add another site's reply to
its. An input that is in no list fails the test."""

import hashlib
import itertools
import json
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from torch import nn

from fednas_flwr.client import rehearsal
from fednas_flwr.client.answer import agreed, answer, begin_sum
from fednas_flwr.client.client import Client
from fednas_flwr.client.making import make_client
from fednas_flwr.client.rehearsal import SELF_TESTS, machine, shown_size, structure
from fednas_flwr.client.release_guard import Commitment
from fednas_flwr.data.prepared import make_data
from fednas_flwr.data.records import Column, Inputs
from fednas_flwr.data.statistics import Moments, Statistics
from fednas_flwr.deploy import client_app
from fednas_flwr.pipeline.beginning import SITE_PROPERTIES
from fednas_flwr.privacy.mechanism import micro_batches
from fednas_flwr.privacy.mechanism.noise import SecureGenerator
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import DataSetPolicy, SumTerms
from fednas_flwr.protocol.keys import Roster, SiteKeys
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.protocol.sum_requests import Summed
from fednas_flwr.settings import dump_config, with_runtime

from ..asked import smallest
from ..refusals import refuses

SETTINGS = smallest("records")["train.weight_gradient"]
ACTION, HEADER = "train.weight_gradient", Header("run", "search", 1, 1, 0, "nonce")
PLANNED = PlannedRelease("search", ACTION, "weights", ("train",), 8.0, 20, 0.5, 1.5, shared=True)
STATES, STATISTICS = {"weights": {"float32": torch.zeros(3)}}, Statistics((0.0,), (1.0,))
SUMMED = Summed("attempt", (0, 1, 2, 3), {"weights": 8.0})
REQUEST = Request(ACTION, HEADER, SETTINGS, STATES, STATISTICS, SUMMED)


def of_header(**change):
    return {"header": replace(REQUEST.header, **change)}


def of_sum(**change):
    return {"summed": replace(REQUEST.summed, **change)}


# Changes of what a request says, by the input that they change.
SHARED_REQUEST = {
    "action": {"action": "train.gradients"},
    "settings": {"settings": replace(SETTINGS, step=1)},
    "states": {"states": {"weights": {"float32": torch.tensor([0.0, 0.0, 1e-30])}}},
    "statistics": {"statistics": Statistics((0.0,), (1.0000001,))},
    "header.run": of_header(run="other"),
    "header.stage": of_header(stage="retrain"),
    "header.round": of_header(round=2),
    "header.phase": of_header(phase=2),
    "summed.attempt": of_sum(attempt="other"),
    "summed.participants": of_sum(participants=(0, 1, 2, 3, 4)),
    "summed.ranges": of_sum(ranges={"weights": 8.000001}),
}
OWN_REQUEST = {
    "header.client": of_header(client=1),  # whom it is for
    "header.nonce": of_header(nonce="other"),  # which message it is
}
# Of the release that a site has committed to, everything.
SHARED_RELEASE = {"stage": "retrain", "action": "train.network_gradient", "kind": "alphas"}
SHARED_RELEASE |= {"splits": ("validation",), "batch_size": 9.0, "steps": 21, "shared": False}
SHARED_RELEASE |= {"noise_multiplier": 1.49, "of_client": True}
SHARED_RELEASE["max_grad_norm"] = 1e-6  # the attack: others' clipped sums and noise vanish
SHARED_COMMITMENT = {"releases"}
# assignment: which records of its own are in which split; by_split: what a release is charged to;
# data_set: a request that names another id is refused; sizes: refuses what is larger; unit: what
# the ledger books, the policy's is shared, the column of persons its own
OWN_COMMITMENT = {"assignment", "by_split", "data_set", "sizes", "unit"}
# h = 4 instead of 3: smaller shares of the noise
SHARED_POLICY = {"unit": "client", "secure_sum": SumTerms("ab" * 32, 4, 0)}
OWN_POLICY = {
    # they decide whether there is a reply, never what is in it
    *("account", "epsilon", "delta", "largest_grad_norm", "largest_steps", "approve"),
    *("least_noise_multiplier", "largest_noise_multiplier", "actions", "secure_noise"),
    # how many records its own sum is of; its noise does not depend on it
    *("records", "fractions"),
    # how its own gradients are rounded, before clipping
    *("threads", "micro_batch_size"),
    # that noise is drawn from a seed is shared, see below; that it may be is not
    "test_seed",
}
# Of a client, what the run's settings decide: changed by these settings.
BY_SETTINGS = {
    "seed": {"seed": 2},
    "make_network": {"search_space": {"channels": 6}},
    "make_space": {"search_space": {"channels": 8}},
    "augmentation": {"dataset": {"crop_padding": 2}},
    "objective": {"training": {"class_factors": {"0": 1e-30}}},
    "precision": {"training": {"precision": "bfloat16"}},
    "wire": {"runtime": {"wire": "int8"}},
}
SHARED_CLIENT = {"settings_digest": "other"}
SHARED_INPUTS = {"class_names": ("a", "b"), "schema": (Column("age", "number"),)}
SHARED_INPUTS |= {"transform": ("scattering", "2", "8"), "multi_label": True}
SHARED_INPUTS["target"] = (0.0, 1.0, -2.0, 2.0)
OWN_INPUTS = {
    # shared as those of the records, see below, and of the images before a transform
    *("shape", "mean", "std"),
    # how its files are written, and how it reads its images; the limit of all tables
    *("label", "label_separator", "id_column", "form", "intensity", "limit"),
    # of a model's file; a request's are in its settings
    *("positive", "threshold"),
}
OWN_CLIENT = {
    # its place in the roster, what it calls itself, what it keeps, and what can be computed anew
    *("index", "tag", "kept_models", "cache"),
    # how its own gradients are rounded; networks are built by make_network, kept to be used again
    *("device", "threads", "rehearsed", "networks"),
    # decides whether there is a reply, never what is in it
    "has_bounds",
}
# records, and what follows from them
SECRET_CLIENT = {"data", "moments"}
# policy, commitment, generator; roster, terms, keys; what the records are
INSIDE = {"guard", "sums", "inputs"}


@pytest.fixture
def config(compose_config, tmp_path):
    sums = ("secure_sum={least_sites: 4, colluding: 1}", "clients=4")
    return compose_config("algorithm=dp_fnas privacy=dp", *sums, f"run_dir={tmp_path / 'run'}")


@pytest.fixture
def client(config):
    return make_client(config, 0, data=make_data(config), networks={})


@pytest.fixture
def context(client, tmp_path):
    """``context(client, request, planned)``: the context in which a client would answer."""
    numbers = itertools.count()
    keys = [SiteKeys.at(tmp_path / f"{i}.keys") for i in range(5)]
    roster = Roster(tuple(own.public(f"site-{i}") for i, own in enumerate(keys)))

    def context_of(client=client, request=REQUEST, planned=PLANNED, terms=None):
        terms = terms or SumTerms(roster.fingerprint, 4, 1)
        journal = tmp_path / f"{next(numbers)}.sqlite"
        site = SumSite(0, keys[0], roster, replace(terms, roster=roster.fingerprint), journal)
        client = replace(client, sums=site)
        answer = begin_sum(client, replace(request, planned={planned.kind: planned}))
        return None if answer is None else answer.context

    return context_of


def named(of):
    return {field.name for field in fields(of)}


def test_every_input_is_in_one_list(client):
    parts = {f"header.{name}" for name in named(Header)} | {f"summed.{n}" for n in named(Summed)}
    whole = named(Request) - {"header", "summed", "planned"}
    assert {*SHARED_REQUEST, *OWN_REQUEST} == parts | whole
    assert not {*SHARED_REQUEST} & {*OWN_REQUEST}
    assert set(SHARED_RELEASE) == named(PlannedRelease)
    assert SHARED_COMMITMENT | OWN_COMMITMENT == named(Commitment)
    assert sorted([*SHARED_POLICY, *OWN_POLICY]) == sorted(named(DataSetPolicy))
    lists = (SHARED_CLIENT, BY_SETTINGS, OWN_CLIENT, SECRET_CLIENT, INSIDE)
    assert sorted(itertools.chain(*lists)) == sorted(named(Client))
    assert sorted([*SHARED_INPUTS, *OWN_INPUTS]) == sorted(named(Inputs))
    assert set(SITE_PROPERTIES) == set(client.data_form)  # which is what the server compares


@pytest.mark.parametrize("name", [*SHARED_REQUEST, *OWN_REQUEST])
def test_what_a_request_says_is_shared_but_whom_it_is_for(name, context):
    other = replace(REQUEST, **(SHARED_REQUEST | OWN_REQUEST)[name])
    assert (context(request=other) != context()) == (name in SHARED_REQUEST)


@pytest.mark.parametrize("name", SHARED_RELEASE)
def test_the_release_that_a_site_has_committed_to_is_shared(name, context):
    planned = replace(PLANNED, **{name: SHARED_RELEASE[name]})
    shared = {planned.kind: 8.0} if planned.shared else {}
    request = replace(REQUEST, summed=replace(REQUEST.summed, ranges=shared))
    assert context(request=request, planned=planned) != context()


def with_policy(client, **change):
    client.guard.allowed = replace(client.guard.allowed, **change)
    return client


def test_the_unit_and_the_honest_sites_of_a_policy_are_shared(client, context):
    before = context()
    assert context(terms=SHARED_POLICY["secure_sum"]) != before
    # more sites of which more collude: the shares of noise are the same
    assert context(terms=SumTerms("ab" * 32, 3, 0)) == before
    assert context(with_policy(client, unit=SHARED_POLICY["unit"], records=1)) != before


def test_noise_from_a_seed_is_shared_by_all_or_none(client, context):
    before = context()
    client.guard._generator = SecureGenerator(test_seed=b"known to others")
    assert context() != before


def test_settings_and_what_the_records_are_are_shared(client, context):
    before, data = context(), client.data
    others = [replace(client, **{name: value}) for name, value in SHARED_CLIENT.items()]
    for name, value in SHARED_INPUTS.items():
        others.append(replace(client, inputs=replace(client.inputs, **{name: value})))
    for part in ("mean", "std"):
        train = replace(data.train, **{part: (0.25,)})
        others.append(replace(client, data=replace(data, train=train)))
    for other in others:
        assert context(other) != before


@pytest.mark.parametrize("name", BY_SETTINGS)
def test_what_settings_decide_is_shared_by_the_hash_of_all(name, config, context):
    """A server that sends one site other settings, even those that a composition refuses."""
    change = dict(BY_SETTINGS[name])
    for group in change.keys() - {"seed"}:
        change[group] = replace(getattr(config, group), **change[group])
    changed = make_client(replace(config, **change), 0, data=make_data(config), networks={})
    assert context(changed) != context()


def test_sites_that_cache_elsewhere_agree_on_what_was_sent(compose_config, tmp_path):
    """The settings are hashed as they came, before a node puts its own in their place."""
    config = compose_config("secure_sum=true", "clients=4", f"run_dir={tmp_path / 'run'}")
    text = dump_config(config)
    caches = [(("cache", str(tmp_path / f"{index}")),) for index in range(2)]
    clients = [client_app._client(text, i, cache, None) for i, cache in enumerate(caches)]
    digests = {client.settings_digest for client in clients}
    assert digests == {hashlib.sha256(text.encode()).hexdigest()}


def test_what_is_a_sites_own_is_not(client, context):
    before = context()
    own = {"tag": "ward 7", "device": torch.device("meta"), "threads": 3, "cache": None}
    own |= {"rehearsed": {"x": 1}, "moments": None}
    assert context(replace(client, **own)) == before
    nothing = {"crop_padding": 0, "flip": False, "cutout": 0}
    assert context(replace(client, augmentation=nothing)) == before
    rules = {"epsilon": 1e3, "least_noise_multiplier": 0.1, "largest_steps": 7, "records": 15}
    assert context(with_policy(client, **rules, threads=2, micro_batch_size=3)) == before


def test_records_are_in_no_context(client, context):
    train = client.data.train
    for rows in (train.rows[:1], train.rows.flip(0)):
        data = replace(client.data, train=replace(train, rows=rows))
        assert context(replace(client, data=data)) == context()
    assert agreed(replace(client, moments=[Moments(3, 1.0, 2.0)]), REQUEST)["data"]["mean"] == []


@pytest.mark.parametrize("ranges", [{}, {"alphas": 8.0}, {"weights": 8.0, "alphas": 8.0}])
def test_ranges_are_of_states_whose_noise_is_shared(ranges, context):
    refuses("rule secure_sum: ranges=", context, request=replace(REQUEST, **of_sum(ranges=ranges)))


def test_contexts_are_of_plain_values(client):
    """Of what JSON can write, so that sites of other machines get the same bytes."""
    values = agreed(client, replace(REQUEST, planned={"weights": PLANNED}))
    assert values["releases"] == {"weights": asdict(PLANNED)}
    assert values["honest"] == 3
    assert not any(isinstance(value, np.generic) for value in values.values())


# --- What self-tests have shown is kept, and the site decides how it computes


CPU = torch.device("cpu")


def test_a_result_is_found_again_by_a_later_process_unless_its_file_is_damaged(tmp_path):
    calls, cache = [], tmp_path / "new" / "cache"

    def test():
        calls.append(1)
        return 4

    for _ in range(2):
        assert shown_size(["key", 1.5], cache, test) == 4
        assert len(calls) == 1
    assert shown_size(["other"], cache, test) == 4
    assert len(calls) == 2
    for path in (cache / SELF_TESTS).iterdir():
        path.write_text(json.dumps({"key": "another", "size": 64}))
    assert shown_size(["key", 1.5], cache, test) == 4
    assert len(calls) == 3


def test_a_server_that_asks_for_ever_new_networks_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "MOST_FILES", 3)
    for number in range(6):
        assert shown_size([number], tmp_path, lambda number=number: number + 1) == number + 1
    assert len(list((tmp_path / SELF_TESTS).iterdir())) == 3


def test_the_key_knows_structure_machine_and_settings_but_no_weights(monkeypatch):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    known = structure(network)
    with torch.no_grad():
        network[0].weight.mul_(2)
    assert structure(network.eval()) == known
    others = [
        nn.Sequential(nn.Conv2d(3, 4, 5), nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)).double(),
    ]
    assert len({known, *map(structure, others)}) == 5
    here = machine(CPU, 1)
    assert machine(CPU, 2) != here
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert machine(CPU, 1) != here


def test_the_site_tests_before_it_reads_and_computes_as_tested(make_site, monkeypatch):
    """Every part that is computed then has this size, whatever the number of records drawn."""
    monkeypatch.setattr(rehearsal, "largest_size", lambda *_, **__: 2)
    sizes, divide = [], micro_batches.micro_batches

    def watched(x, y, size):
        for part in divide(x, y, size):
            sizes.append(len(part[0]))
            yield part

    site = make_site(policy={"micro_batch_size": 8})
    monkeypatch.setattr(micro_batches, "micro_batches", watched)
    answer(replace(site.client, cache=None), site.request("train.weight_gradient"))
    rehearsed, *computed = sizes
    assert rehearsed == 8
    assert computed
    assert set(computed) == {2}


def test_threads_are_those_of_policies(make_site, site_config, prepared, tmp_path):
    assert make_site(policy={"threads": 2}).client.threads == 2
    privacy = replace(site_config.privacy, sites=str(tmp_path))

    def client(threads):
        config = replace(site_config, privacy=privacy)
        config = with_runtime(config, threads=threads)
        return make_client(config, 0, data=(prepared, [torch.arange(20).numpy()]), networks={})

    assert client(1).threads == 1
    assert client(1).guard.allowed.micro_batch_size == privacy.micro_batch_size
    refuses("runtime.threads=2, but the simulated sites' policies", client, 2)

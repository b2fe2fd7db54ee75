"""Every action on every network: a unit changes what is noised by the norm of its noise at most.

Whoever answers a request twice, with one record or person more and the same earlier releases, gets
totals before noise that differ by no more than the norm by which their noise is scaled. The actions
are those of ``VERBS``, the networks those of the registries, so that a new one is tested by itself.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torchvision.ops import StochasticDepth

from fednas_flwr.builders.clients import make_client, make_site_gate
from fednas_flwr.builders.data import make_data
from fednas_flwr.builders.networks import (
    describe_derived,
    describe_pool,
    make_network,
    supernet_sizes,
    supernet_space,
)
from fednas_flwr.builders.spaces import SEARCH_SPACES
from fednas_flwr.clients import release
from fednas_flwr.clients.admission import asked_kinds, asked_of_client
from fednas_flwr.clients.answer import answer
from fednas_flwr.data.loaders import ClientData
from fednas_flwr.errors import ConfigError
from fednas_flwr.evaluation.fixed_networks import FIXED_NETWORKS
from fednas_flwr.evaluation.space_costs import space_costs
from fednas_flwr.exchange.messages import Header, Request
from fednas_flwr.exchange.requests import (
    Amount,
    Evaluate,
    LocalSearch,
    LocalTraining,
    Probe,
    RewardCandidates,
    Search,
    Site,
    TakeGradients,
    TakeNetworkGradient,
    TellStatistics,
    Train,
    TrainCandidates,
    Trial,
)
from fednas_flwr.exchange.secure_sum.roster import Roster, SiteKeys
from fednas_flwr.exchange.secure_sum.site import SumSite
from fednas_flwr.exchange.states import network_states, pack
from fednas_flwr.exchange.sum_requests import Summed
from fednas_flwr.hardware.costs import HardwareLoss, HardwareTerms
from fednas_flwr.privacy.noise import SecureGenerator
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.shared_noise import SumTerms
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search.candidate import all_alike
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.verbs import PRIVATE_VERBS, VERBS

from ..patients import patients
from .conftest import POLICY

SITE = Site("ward")
NORM, SIGMA = 0.25, 1.5
STEP = SGD(lr=0.5, min_lr=0.0, momentum=0.9, weight_decay=0.01, clip_norm=None)
ALPHAS = Adam(lr=0.05, weight_decay=0.0)
TWO_STEPS = Amount(epochs=None, steps=2, batch_size=None)
ROWS = 20  # of each client
LARGE = 3.0  # times what a network starts with
# How a space is made small; a space that is new here must say it, too.
SPACES = {
    "darts": "darts_small",
    "dp_cells": "dp_cells_small",
    "dp_cells_darts": "dp_cells_darts",
    "mbconv": "mbconv_small",
    "mlp": "mlp_small",
    "nasbench201": "nasbench201_small",
}
SIZES = {
    "darts": ("search_space.channels=2", "search_space.num_cells=3"),
    "mlp": ("search_space.channels=8",),
}
OF_TABLES = ("mlp",)
WITH_AUXILIARY_HEADS = ("darts",)


@dataclass(frozen=True)
class Asked:
    """One request: its settings, and the states that it carries."""

    settings: Any
    states: Any


def training(described, split="train"):
    return LocalTraining(described, split, TWO_STEPS, STEP, 0.4, 0.0)


def of_network(verb, described, states):
    """Requests of a verb about a network that they describe."""
    trial = Trial(STEP, ALPHAS, 0.0)
    return {
        "train.network_gradient": lambda: TakeNetworkGradient(
            described, "train+validation", 0, None, 0.4, 0.0, SITE
        ),
        "train.weights": lambda: Train(training(described, "train+validation"), site=SITE),
        "train.probe": lambda: Probe(None, training(described), [trial] * 2, 0.3, SITE),
        "evaluate.model": lambda: Evaluate(described, "validation", SITE),
        "evaluate.candidates": lambda: RewardCandidates(network=described, site=SITE),
    }[verb]()


def of_supernet(verb, kit):
    """All requests of a verb about the supernet."""
    search = LocalSearch(TWO_STEPS, STEP, ALPHAS, Alternating("first_order"))
    gradients = TakeGradients(0, 2, {"weights": 0.1, "alphas": 0.1}, None, 1, 0.1, SITE)
    if verb in ("train.weight_gradient", "train.alpha_gradient", "train.gradients"):
        return [gradients]
    if verb == "train.search" and kit.name == "mbconv":
        costs = space_costs(kit.space, None)
        target = (costs.lowest + costs.highest) / 2
        losses = [
            HardwareTerms.of(HardwareLoss(costs, target, "multiply_adds", form, 0.5, 0.7))
            for form in ("additive", "multiplicative")
        ]
        paths = [
            SampledPaths(gates=gates, warm_up=False, hardware=loss)
            for gates, loss in itertools.product(("two", "full"), (None, *losses))
        ]
        paths.append(SampledPaths(gates="two", warm_up=True, hardware=None))
        return [Search(LocalSearch(TWO_STEPS, STEP, ALPHAS, paths=p), site=SITE) for p in paths]
    if verb == "train.search":
        return [Search(search, site=SITE)]
    if verb == "train.probe":
        return [Probe(search, None, [Trial(STEP, ALPHAS, 0.0)] * 2, 0.3, SITE)]
    if verb == "evaluate.model":
        return [Evaluate({"name": "supernet"}, "validation", SITE)]
    if verb in ("train.candidate", "evaluate.candidates"):
        if not kit.name.startswith("dp_cells"):
            return []  # a candidate is a path of these spaces
        paths = all_alike(kit.supernet)[:3]
        if verb == "evaluate.candidates":
            return [RewardCandidates(paths, SITE)]
        return [TrainCandidates(paths, 0, 2, None, STEP, None, SITE)]
    assert verb == "train.network_gradient"
    return [TakeNetworkGradient({"name": "supernet"}, "train", 0, None, 0.0, 0.0, SITE)]


NETWORK_VERBS = (
    *("train.network_gradient", "train.weights", "train.probe"),
    *("evaluate.model", "evaluate.candidates"),
)
SUPERNET_VERBS = (
    *("train.weight_gradient", "train.alpha_gradient", "train.gradients", "train.search"),
    *("train.probe", "train.candidate", "evaluate.candidates", "evaluate.model"),
    "train.network_gradient",
)


def test_every_action_that_releases_something_is_here():
    releasing = {verb for verb in PRIVATE_VERBS if not VERBS[verb].is_public}
    assert {*NETWORK_VERBS, *SUPERNET_VERBS, "query.statistics"} == releasing
    assert set(SPACES) == set(SEARCH_SPACES)


# --- sites


@pytest.fixture(scope="module")
def data_overrides(tmp_path_factory):
    """Overrides of the digits' configuration and of a table's, by kind of data."""
    folder = tmp_path_factory.mktemp("patients")
    table = patients().drop(columns=["seen"])
    table["age"] = table["age"].str.replace(",", ".")
    table.to_csv(folder / "patients.csv", index=False)
    cache = f"dataset.cache={folder / 'cache'}"
    return {
        "digits": [cache],
        "table": [
            *("dataset=csv", f"dataset.root={folder / 'patients.csv'}", cache),
            *("dataset.ranges={age: [0, 120]}", "dataset.server_test=false"),
            "dataset.categories={ward: [north, south, west]}",
        ],
    }


@pytest.fixture(scope="module")
def kits(compose_config, data_overrides):
    """``kits(name)``: configuration, data, space and supernet of a search space, made once."""
    made: dict[str, SimpleNamespace] = {}

    def make(name):
        if name not in made:
            kind = "table" if name in OF_TABLES else "digits"
            config = compose_config(
                *("algorithm=dp_fnas", "privacy=dp", "clients=1", *data_overrides[kind]),
                *(f"search_space={SPACES[name]}", "search_space.norm=group"),
                *SIZES.get(name, ()),
            )
            prepared = make_data(config)[0]
            space = supernet_space(config, prepared)
            with seeded(1, "kit"):
                supernet = space.supernet()
            classes = len(prepared.train.class_names)
            shapes = {"input_shape": list(prepared.input_shape), "num_classes": classes}
            made[name] = SimpleNamespace(
                name=name, config=config, prepared=prepared, space=space, supernet=supernet,
                shapes=shapes, networks={},
            )  # fmt: skip
        return made[name]

    return make


def descriptions(kit, *, pools):
    """Descriptions of derived networks of a space, with and without auxiliary heads, or pools."""
    settings = {"shapes": kit.shapes, "sizes": supernet_sizes(kit.config.search_space)}
    settings["norm"] = "group"
    genotypes = [kit.space.random_genotype(make_generator(1, "kit", n)) for n in range(3)]
    has_heads = kit.name in WITH_AUXILIARY_HEADS
    for auxiliary in (False, True) if has_heads and not pools else (has_heads,):
        if pools:
            yield describe_pool(genotypes, auxiliary=auxiliary, **settings)
        else:
            yield describe_derived(genotypes[0], auxiliary=auxiliary, **settings)


def packed(network, scale):
    """States of a network whose weights are so many times as large."""
    states = {name: state for name, state in network_states(network).items() if state}
    with torch.no_grad():
        large = {n: t * scale for n, t in states["weights"].items()}
    return {name: pack(state) for name, state in {**states, "weights": large}.items()}


def without(split_name):
    """Return an edit of a client's data that leaves one unit out of a split."""

    def edit(data):
        split = getattr(data, split_name)
        gone = split.rows[-1:] if split.persons is None else split.persons[-1]
        keep = torch.ones(len(split), dtype=torch.bool)
        keep[-1:] = False
        if split.persons is not None:
            keep = split.persons != gone
            return replace(
                data,
                **{split_name: replace(split, rows=split.rows[keep], persons=split.persons[keep])},
            )
        return replace(data, **{split_name: replace(split, rows=split.rows[keep])})

    return edit


def of_persons(data):
    """Give every two records to a person."""

    def held(split):
        return replace(split, persons=torch.arange(len(split)) // 2)

    return ClientData(held(data.train), held(data.validation), held(data.test))


def without_dropout(network):
    """Take out what is drawn for each record by itself, so that two answers draw alike."""
    for module in network.modules():
        if isinstance(module, nn.Dropout | StochasticDepth):
            module.p = 0.0
    return network


@dataclass
class Totals:
    """What was to be noised, and the norm of its noise; the second answer gets the first's noise.

    Attributes:
        seen: Total and norm of every release of the answer that is being given.
        released: What the first answer has released.
        repeats: Whether this is a later answer.
    """

    seen: list
    released: list
    repeats: bool = False


@pytest.fixture
def totals(monkeypatch):
    kept = Totals([], [])
    for name in ("add_noise", "add_shared_noise"):

        def noted(total, generator, real=getattr(release, name), **terms):  # noqa: B008
            kept.seen.append((total.clone(), terms["max_grad_norm"]))
            if kept.repeats:
                return kept.released[len(kept.seen) - 1].clone()
            kept.released.append(real(total, generator, **terms))
            return kept.released[-1].clone()

        monkeypatch.setattr(release, name, noted)
    return kept


@pytest.fixture
def ask(tmp_path, totals):
    """``ask(kit, verb, asked, hold=, unit=, sums=)``: totals and norms of one answer."""
    numbers = itertools.count()

    def asked_of(kit, verb, asked, *, hold=None, persons=False, unit="record", sums=False):
        folder = tmp_path / f"site-{next(numbers)}"
        folder.mkdir()
        policy = POLICY | {"secure_noise": False, "test_seed": True, "unit": unit, "epsilon": 1e6}
        policy["micro_batch_size"] = 2  # rehearsals are short
        policy |= {"records": 1} if unit == "client" else {}
        keys = [SiteKeys.at(tmp_path / f"{i}.keys") for i in range(3)]
        roster = Roster(tuple(own.public(f"site-{i}") for i, own in enumerate(keys)))
        terms = SumTerms(roster.fingerprint, 3, 0)
        policy |= {"secure_sum": asdict(terms)} if sums else {}
        (folder / "policy.yaml").write_text(yaml.safe_dump({"data_sets": {"ward": policy}}))
        node = {"policy": str(folder / "policy.yaml"), "data-set": "ward"}
        node |= {"ledger": str(folder / "l" / "rows.sqlite"), "ledger-key": str(folder / "key")}
        node |= {"data-path": "x", "dataset": "x", "cache": str(kit.config.dataset.cache)}
        gate = make_site_gate(node | {"split-key": kit.config.dataset.split_key})
        gate._generator = SecureGenerator(b"1")
        if sums:
            (folder / "roster.json").write_text(json.dumps([asdict(s) for s in roster.sites]))
            node |= {"roster": str(folder / "roster.json"), "sum-key": str(tmp_path / "0.keys")}
            node["sums"] = str(folder / "sums.sqlite")
        # the data does not say whose its records are; unit decides what a policy may say alone
        checked = replace(gate.allowed, unit="record") if unit == "person" else gate.allowed
        gate.allowed, allowed = checked, gate.allowed
        client = make_client(
            kit.config, 0, data=(kit.prepared, [np.arange(ROWS)]), networks=kit.networks,
            site={k: v for k, v in node.items() if k != "policy"} if not sums else node, gate=gate,
        )  # fmt: skip
        gate.allowed = allowed
        if sums:
            client = replace(client, sums=SumSite(0, keys[0], roster, terms, folder / "j.sqlite"))
        data = of_persons(client.data) if persons else client.data
        client = replace(
            client,
            data=data if hold is None else hold(data),
            make_network=lambda described, make=client.make_network: without_dropout(
                make(described)
            ),
        )
        header = Header("run", "search", 1, 1, 0, "nonce")
        request = Request(verb, header, asked.settings, asked.states)
        kinds = asked_of_client(request) if unit == "client" else asked_kinds(request)
        plan = [
            PlannedRelease(
                *("search", verb, kind, splits, None, 50, NORM, SIGMA),
                shared=sums and kind != "rewards",
                of_client=unit == "client",
            )
            for kind, (splits, _) in kinds.items()
        ]
        client.gate.commit("run", plan)
        if sums:
            records = gate.allowed.records
            ranges = {p.kind: 2 * p.sum_range(records) for p in plan if p.shared}
            request = replace(request, summed=Summed("a", (0, 1, 2), ranges))
        totals.seen.clear()
        answer(client, request)
        return list(totals.seen)

    return asked_of


def check(ask, totals, kit, verb, asked, **how):
    """Answer with and without one unit of each split; return the largest share of a norm moved."""
    totals.released.clear()
    totals.repeats = False
    first = ask(kit, verb, asked, **how)
    assert first, "nothing was released"
    totals.repeats = True
    largest = 0.0
    request = Request(verb, Header("run", "search", 1, 1, 0, "nonce"), asked.settings, asked.states)
    for split in sorted({split for splits, _ in asked_kinds(request).values() for split in splits}):
        second = ask(kit, verb, asked, hold=without(split), **how)
        assert len(second) == len(first)
        for (total, norm), (other, other_norm) in zip(first, second, strict=True):
            assert other_norm == norm
            moved = float((total - other).norm())
            assert moved <= norm * (1 + 1e-9)
            largest = max(largest, moved / norm)
    return largest


def least(verb):
    """Return what a unit moves at least; none of the candidates may be right about it."""
    return 0.0 if verb == "evaluate.candidates" else 1e-6


# --- the contract


@pytest.mark.parametrize("verb", SUPERNET_VERBS)
@pytest.mark.parametrize("name", sorted(SPACES))
def test_supernets(name, verb, kits, ask, totals):
    kit = kits(name)
    states = packed(kit.supernet, LARGE)
    for settings in of_supernet(verb, kit):
        sent = states
        if verb in ("train.candidate", "evaluate.candidates"):
            sent = {"weights": states["weights"]}
        assert check(ask, totals, kit, verb, Asked(settings, sent)) >= least(verb)


@pytest.mark.parametrize("verb", NETWORK_VERBS)
@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("name", sorted(SPACES))
def test_networks_of_the_search_spaces_and_pools_of_them(name, pools, verb, kits, ask, totals):
    kit = kits(name)
    if verb == "evaluate.candidates" and not pools:
        pytest.skip("of pools alone")
    for described in descriptions(kit, pools=pools):
        with seeded(2, "network"):
            states = packed(make_network(described), LARGE)
        asked = Asked(of_network(verb, described, states), states)
        if pools and verb in ("train.probe", "evaluate.model"):
            with pytest.raises(ConfigError, match="refused, the settings do not fit"):
                ask(kit, verb, asked)
            assert totals.seen == []
            continue
        assert check(ask, totals, kit, verb, asked) >= least(verb)


@pytest.mark.parametrize("verb", [verb for verb in NETWORK_VERBS if verb != "evaluate.candidates"])
@pytest.mark.parametrize("name", sorted(FIXED_NETWORKS))
def test_fixed_networks(name, verb, kits, ask, totals):
    kit = kits("nasbench201")
    described = {"name": name, **kit.shapes, "norm": "group"}
    with seeded(2, "network"):
        states = packed(make_network(described), 1.0)
    asked = Asked(of_network(verb, described, states), states)
    assert check(ask, totals, kit, verb, asked) > 1e-6


@pytest.mark.parametrize("verb", SUPERNET_VERBS)
def test_persons_with_several_records(verb, kits, ask, totals):
    kit = kits("dp_cells" if "candidate" in verb else "nasbench201")
    states = packed(kit.supernet, 1.0)
    for settings in of_supernet(verb, kit):
        sent = {"weights": states["weights"]} if "candidate" in verb else states
        asked = Asked(settings, sent)
        moved = check(ask, totals, kit, verb, asked, persons=True, unit="person")
        assert moved >= least(verb)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("verb", ["train.weight_gradient", "train.network_gradient"])
def test_secure_sums_of_gradients(verb, pool, kits, ask, totals):
    kit = kits("nasbench201")
    described = next(descriptions(kit, pools=pool))
    settings, states = replace(of_supernet("train.gradients", kit)[0], local_steps=1), None
    if verb == "train.network_gradient":
        with seeded(2, "network"):
            states = packed(make_network(described), 1.0)
        settings = of_network(verb, described, states)
    asked = Asked(settings, states or packed(kit.supernet, 1.0))
    if pool and verb == "train.network_gradient":
        with pytest.raises(ConfigError, match="rule secure_sum: norm of weights"):
            ask(kit, verb, asked, sums=True)
        return
    assert check(ask, totals, kit, verb, asked, sums=True) > 1e-6


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("verb", ["train.search", "train.probe", "train.weights"])
def test_whole_clients(verb, sums, kits, ask, totals):
    """Their updates are replaced by zeros: every total is a contribution."""
    kit = kits("nasbench201")
    states, local = packed(kit.supernet, 1.0), Amount(epochs=2, steps=None, batch_size=4)
    settings = of_supernet("train.search" if verb == "train.weights" else verb, kit)[0]
    if verb == "train.weights":
        described = next(descriptions(kit, pools=True))
        with seeded(2, "network"):
            states = packed(make_network(described), 1.0)
        settings = Train(replace(training(described), amount=local), site=SITE)
    elif verb == "train.search":
        settings = replace(settings, local=replace(settings.local, amount=local))
    else:
        settings = replace(settings, search=replace(settings.search, amount=local))
    moved = 0.0
    for total, norm in ask(kit, verb, Asked(settings, states), unit="client", sums=sums):
        assert total.norm() <= norm
        moved += float(total.norm())
    assert moved > 1e-6


def test_statistics_of_a_table(kits, ask, totals):
    asked = Asked(TellStatistics(SITE), {})
    assert check(ask, totals, kits("mlp"), "query.statistics", asked) > 1e-6

"""Every action on every network: a unit changes what is noised by the norm of its noise at most.

Whoever answers a request twice, with one record or person more and the same earlier releases, gets
totals before noise that differ by no more than the norm by which their noise is scaled. The actions
are those of ``ACTIONS``, the networks those of the registries, so that a new one is tested by
itself.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchvision.ops import StochasticDepth

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client import release_guard
from fednas_flwr.client.answer import answer, asked_kinds
from fednas_flwr.client.making import make_client, make_site_guard
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models import networks
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.mechanism.noise import SecureGenerator
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import SumTerms
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.keys import Roster, SiteKeys
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.protocol.sum_requests import Summed
from fednas_flwr.search.candidate import all_alike
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings.optimizers import RESNETS, SGD, Adam
from fednas_flwr.spaces import SEARCH_SPACES

from ..asked import SUPERNET, smallest
from ..patients import patients
from ..refusals import refuses
from ..rows import by_hand
from .conftest import POLICY, hardware_loss, node_of, of_splits, packed, without_last

DATA_SET = "ward"
HEADER = Header("run", "search", 1, 1, 0, "nonce")
NORM, SIGMA = 0.25, 1.5
STEP = SGD(lr=0.5, min_lr=0.0, momentum=0.9, weight_decay=0.01, clip_norm=None)
ALPHAS = Adam(lr=0.05, weight_decay=0.0)
TWO_STEPS = rq.Amount(epochs=None, steps=2, batch_size=None)
ROWS = 12  # of each client
LARGE = 3.0  # times what a network starts with
# How a space is made small; a space that is new here must say it, too.
SPACES = {n: f"{n}_small" for n in ("darts", "dp_cells", "mbconv", "mlp", "nasbench201")}
SPACES["dp_cells_darts"] = "dp_cells_darts"
SIZES = {"darts": ("search_space.channels=2", "search_space.num_cells=3")}
SIZES["mlp"] = ("search_space.channels=8",)
SIZES |= dict.fromkeys(("dp_cells", "dp_cells_darts"), ("search_space.widths=[4]",))


class Asked(NamedTuple):
    """One request: its settings, and the states that it carries."""

    settings: Any
    states: Any


TRIALS = [rq.Trial(STEP, ALPHAS, 0.0)] * 2
SEARCHED = rq.LocalSearch(TWO_STEPS, STEP, ALPHAS, Alternating("first_order"))


def training(described, split="train"):
    return rq.LocalTraining(described, split, TWO_STEPS, STEP, 0.4, 0.0)


def of_network(action, described):
    """The request of an action about a network that they describe."""
    split = "train+validation"
    asked = smallest(DATA_SET, network=described, split=split, weights=STEP, loss_bound=0.3)
    changes = {
        "train.network_gradient": {"auxiliary_weight": 0.4},
        "train.weights": {"local": training(described, split)},
        "train.probe": {"search": None, "training": training(described), "trials": TRIALS},
        "evaluate.model": {"network": described},
        "evaluate.candidates": {"candidates": None, "network": described},
    }
    return replace(asked[action], **changes[action])


def of_supernet(action, kit):
    """All requests of an action about the supernet."""
    asked = smallest(DATA_SET, network=SUPERNET, weights=STEP, loss_bound=0.3)[action]
    if action == "train.search" and kit.name == "mbconv":
        losses = [hardware_loss(kit.space, form) for form in ("additive", "multiplicative")]
        paths = [SampledPaths(warm_up=False, hardware=loss) for loss in losses]
        paths.append(SampledPaths(warm_up=True, hardware=None))
        searches = [replace(SEARCHED, alternating=None, paths=drawn) for drawn in paths]
        return [replace(asked, local=search) for search in searches]
    if action == "train.search":
        return [replace(asked, local=SEARCHED)]
    if action == "train.probe":
        return [replace(asked, search=SEARCHED, trials=TRIALS)]
    if "candidate" in action:
        if not kit.name.startswith("dp_cells"):
            return []  # a candidate is a path of these spaces
        steps = {"local_steps": 2} if action == "train.candidate" else {}
        return [replace(asked, candidates=all_alike(kit.supernet)[:3], **steps)]
    if action.endswith(("weight_gradient", "alpha_gradient", "gradients")):
        return [replace(asked, local_steps=2)]
    assert action in ("train.network_gradient", "evaluate.model")
    return [asked]


NETWORK_ACTIONS = ("train.network_gradient", "train.weights", "train.probe")
NETWORK_ACTIONS += ("evaluate.model", "evaluate.candidates")
SUPERNET_ACTIONS = ("train.weight_gradient", "train.alpha_gradient", "train.gradients")
SUPERNET_ACTIONS += ("train.search", "train.probe", "train.candidate", "evaluate.candidates")
SUPERNET_ACTIONS += ("evaluate.model", "train.network_gradient")
# Spaces whose steps take seconds, and what is asked of them in CI: the other actions differ in
# what is done with the same sums.
SLOW_SPACES = ("darts", "dp_cells_darts")
OWN_ACTIONS = ("train.gradients", "train.network_gradient", "train.candidate")
OWN_ACTIONS += ("evaluate.model", "evaluate.candidates")


def test_every_action_that_releases_something_is_here():
    releasing = {action for action in PRIVATE_ACTIONS if not ACTIONS[action].is_public}
    assert {*NETWORK_ACTIONS, *SUPERNET_ACTIONS, "query.statistics", "evaluate.scores"} == releasing
    assert set(SPACES) == set(SEARCH_SPACES) - {"adapters"}  # tests/spaces/test_adapters.py


# --- sites


@pytest.fixture(scope="module")
def data_overrides(tmp_path_factory):
    """Overrides of the digits' configuration and of a table's, by kind of data."""
    folder = tmp_path_factory.mktemp("patients")
    table = patients().drop(columns=["seen"])
    table["age"] = table["age"].str.replace(",", ".")
    table.to_csv(folder / "patients.csv", index=False)
    cache = f"dataset.cache={folder / 'cache'}"
    own = ["dataset=csv", f"dataset.root={folder / 'patients.csv'}", "dataset.server_test=false"]
    own += ["dataset.ranges={age: [0, 120]}", "dataset.categories={ward: [north, south, west]}"]
    return {"digits": [cache], "table": [*own, cache]}


@pytest.fixture(scope="module")
def kits(compose_config, data_overrides, one_cell):
    """``kits(name)``: configuration, data, space and supernet of a search space, made once."""
    made: dict[str, SimpleNamespace] = {}

    def make(name):
        if name not in made:
            kind = "table" if name == "mlp" else "digits"
            config = compose_config(
                *("algorithm=dp_fnas", "privacy=dp", "clients=1", *data_overrides[kind]),
                *(f"search_space={SPACES[name]}", "search_space.norm=group"),
                *SIZES.get(name, ()),
            )
            prepared = make_data(config)[0]
            space = networks.supernet_space(config, prepared)
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
    settings = {"shapes": kit.shapes, "sizes": networks.supernet_sizes(kit.config.search_space)}
    settings["norm"] = "group"
    genotypes = [kit.space.random_genotype(make_generator(1, "kit", n)) for n in range(3)]
    has_heads = kit.name == "darts"
    for auxiliary in (False, True) if has_heads and not pools else (has_heads,):
        if pools:
            yield networks.describe_pool(genotypes, auxiliary=auxiliary, **settings)
        else:
            yield networks.describe_derived(genotypes[0], auxiliary=auxiliary, **settings)


# every two records to a person
of_persons = of_splits(lambda split: replace(split, persons=torch.arange(len(split)) // 2))


def sent_with(described, scale=1.0):
    """States of a network that they describe."""
    with seeded(2, "network"):
        return packed(networks.make_network(described), scale)


def without_dropout(network):
    """Take out what is drawn for each record by itself, so that two answers draw alike."""
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout | StochasticDepth):
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

        def noted(total, generator, real=getattr(release_guard, name), **terms):  # noqa: B008
            kept.seen.append((total.clone(), terms["max_grad_norm"]))
            if kept.repeats:
                return kept.released[len(kept.seen) - 1].clone()
            kept.released.append(real(total, generator, **terms))
            return kept.released[-1].clone()

        monkeypatch.setattr(release_guard, name, noted)
    return kept


@pytest.fixture
def ask(tmp_path, totals):
    """``ask(kit, action, asked, hold=, unit=, sums=)``: totals and norms of one answer."""
    numbers = itertools.count()

    def asked_of(kit, action, asked, *, hold=None, persons=False, unit="record", sums=False):
        folder = tmp_path / f"site-{next(numbers)}"
        folder.mkdir()
        policy = POLICY | {"secure_noise": False, "test_seed": True, "unit": unit, "epsilon": 1e6}
        policy["micro_batch_size"] = 4  # rehearsals are short, and sums have several parts
        policy |= {"records": 1} if unit == "client" else {}
        keys = [SiteKeys.at(tmp_path / f"{i}.keys") for i in range(3)]
        roster = Roster(tuple(own.public(f"site-{i}") for i, own in enumerate(keys)))
        terms = SumTerms(roster.fingerprint, 3, 0)
        policy |= {"secure_sum": asdict(terms)} if sums else {}
        node = node_of(folder, kit.config, {"ward": policy})
        guard = make_site_guard(node)
        guard._generator = SecureGenerator(b"1")
        if sums:
            roster.write(folder / "roster.json")
            node |= {"roster": str(folder / "roster.json"), "sum-key": str(tmp_path / "0.keys")}
            node["sums"] = str(folder / "sums.sqlite")
        # the data does not say whose its records are; unit decides what a policy may say alone
        checked = replace(guard.allowed, unit="record") if unit == "person" else guard.allowed
        guard.allowed, allowed = checked, guard.allowed
        node = node if sums else {key: value for key, value in node.items() if key != "policy"}
        own = {"networks": kit.networks, "site": node, "guard": guard}
        client = make_client(kit.config, 0, data=(kit.prepared, [np.arange(ROWS)]), **own)
        guard.allowed = allowed
        if sums:
            client = replace(client, sums=SumSite(0, keys[0], roster, terms, folder / "j.sqlite"))
        data = of_persons(client.data) if persons else client.data
        make, data = client.make_network, data if hold is None else hold(data)
        alike = {"make_network": lambda described: without_dropout(make(described))}
        client = replace(client, data=data, **alike)
        request = Request(action, HEADER, *asked)
        kinds = asked_kinds(request, of_client=unit == "client")
        common = {"batch_size": None, "steps": 50, "max_grad_norm": NORM, "noise_multiplier": SIGMA}
        common["of_client"] = unit == "client"
        plan = [
            PlannedRelease("search", action, k, splits, shared=sums and k != "rewards", **common)
            for k, (splits, _) in kinds.items()
        ]
        client.guard.commit("run", plan)
        if sums:
            ranges = {p.kind: 2 * p.sum_range(guard.allowed.by_split) for p in plan if p.shared}
            request = replace(request, summed=Summed("a", (0, 1, 2), ranges))
        totals.seen.clear()
        answer(client, request)
        return list(totals.seen)

    return asked_of


def check(ask, totals, kit, action, asked, **how):
    """Answer with and without one unit of each split; return the largest share of a norm moved."""
    totals.released.clear()
    totals.repeats = False
    first = ask(kit, action, asked, **how)
    assert first, "nothing was released"
    totals.repeats = True
    largest = 0.0
    request = Request(action, HEADER, *asked)
    for split in sorted({split for splits, _ in asked_kinds(request).values() for split in splits}):
        second = ask(kit, action, asked, hold=without_last(split), **how)
        assert len(second) == len(first)
        for (total, norm), (other, other_norm) in zip(first, second, strict=True):
            assert other_norm == norm
            moved = float((total - other).norm())
            assert moved <= norm * (1 + 1e-9)
            largest = max(largest, moved / norm)
    return largest


def least(action):
    """Return what a unit moves at least; none of the candidates may be right about it."""
    return 0.0 if action == "evaluate.candidates" else 1e-6


# --- the contract


def of_spaces(actions, *more):
    """Return the rows of an action of each space, of which CI leaves some out."""
    every = itertools.product(sorted(SPACES), *more, actions)
    return [
        by_hand(*row) if row[0] in SLOW_SPACES and row[-1] not in OWN_ACTIONS else row
        for row in every
    ]


@pytest.mark.run
@pytest.mark.parametrize(("name", "action"), of_spaces(SUPERNET_ACTIONS))
def test_supernets(name, action, kits, ask, totals):
    kit = kits(name)
    states = packed(kit.supernet, LARGE)
    for settings in of_supernet(action, kit):
        sent = states
        if action in ("train.candidate", "evaluate.candidates"):
            sent = {"weights": states["weights"]}
        assert check(ask, totals, kit, action, Asked(settings, sent)) >= least(action)


@pytest.mark.run
@pytest.mark.parametrize(("name", "pools", "action"), of_spaces(NETWORK_ACTIONS, (False, True)))
def test_networks_of_the_search_spaces_and_pools_of_them(name, pools, action, kits, ask, totals):
    kit = kits(name)
    if action == "evaluate.candidates" and not pools:
        pytest.skip("of pools alone")
    for described in descriptions(kit, pools=pools):
        asked = Asked(of_network(action, described), sent_with(described, LARGE))
        if pools and action in ("train.probe", "evaluate.model"):
            refuses("refused, the settings do not fit", ask, kit, action, asked)
            assert totals.seen == []
            continue
        assert check(ask, totals, kit, action, asked) >= least(action)


FIXED = ["train.network_gradient", "evaluate.model", by_hand("train.weights")]
FIXED.append(by_hand("train.probe"))
WIDER = RESNETS[1:]  # than the first of them, and nothing else
NAMES = [by_hand(name) if name in WIDER else name for name in sorted(networks.FIXED_NETWORKS)]


@pytest.mark.run
@pytest.mark.parametrize("action", FIXED)
@pytest.mark.parametrize("name", NAMES)
def test_fixed_networks(name, action, kits, ask, totals):
    kit = kits("nasbench201")
    described = {"name": name, **kit.shapes, "norm": "group"}
    asked = Asked(of_network(action, described), sent_with(described))
    assert check(ask, totals, kit, action, asked) > 1e-6


@pytest.mark.run
@pytest.mark.parametrize("action", SUPERNET_ACTIONS)
def test_persons_with_several_records(action, kits, ask, totals):
    kit = kits("dp_cells" if "candidate" in action else "nasbench201")
    states = packed(kit.supernet)
    for settings in of_supernet(action, kit):
        sent = {"weights": states["weights"]} if "candidate" in action else states
        asked = Asked(settings, sent)
        assert check(ask, totals, kit, action, asked, persons=True, unit="person") >= least(action)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("action", ["train.weight_gradient", "train.network_gradient"])
def test_secure_sums_of_gradients(action, pool, kits, ask, totals):
    kit = kits("nasbench201")
    described = next(descriptions(kit, pools=pool))
    settings, states = replace(of_supernet("train.gradients", kit)[0], local_steps=1), None
    if action == "train.network_gradient":
        states = sent_with(described)
        settings = of_network(action, described)
    asked = Asked(settings, states or packed(kit.supernet))
    if pool and action == "train.network_gradient":
        refuses("rule secure_sum: norm of weights", ask, kit, action, asked, sums=True)
        return
    assert check(ask, totals, kit, action, asked, sums=True) > 1e-6


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("action", ["train.search", "train.probe", "train.weights"])
def test_whole_clients(action, sums, kits, ask, totals):
    """Their updates are replaced by zeros: every total is a contribution."""
    kit = kits("nasbench201")
    states, local = packed(kit.supernet), rq.Amount(epochs=2, steps=None, batch_size=4)
    settings = of_supernet("train.search" if action == "train.weights" else action, kit)[0]
    if action == "train.weights":
        described = next(descriptions(kit, pools=True))
        states = sent_with(described)
        settings = rq.Train(local=replace(training(described), amount=local), data_set=DATA_SET)
    elif action == "train.search":
        settings = replace(settings, local=replace(settings.local, amount=local))
    else:
        settings = replace(settings, search=replace(settings.search, amount=local))
    moved = 0.0
    for total, norm in ask(kit, action, Asked(settings, states), unit="client", sums=sums):
        assert total.norm() <= norm
        moved += float(total.norm())
    assert moved > 1e-6


def test_statistics_of_a_table(kits, ask, totals):
    asked = Asked(rq.TellStatistics(data_set=DATA_SET), {})
    assert check(ask, totals, kits("mlp"), "query.statistics", asked) > 1e-6

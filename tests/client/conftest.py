"""A private site: the real client behind its own policy, and requests as a server sends them."""

import copy
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from flwr.app import ConfigRecord, RecordDict

from fednas_flwr import compose
from fednas_flwr.base.errors import BudgetExceededError
from fednas_flwr.base.randomness import seeded
from fednas_flwr.client import release_guard
from fednas_flwr.client.answer import answer
from fednas_flwr.client.making import make_client, make_site_guard
from fednas_flwr.data.loaders import ClientData, Split
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import describe_network, make_network, supernet_space
from fednas_flwr.privacy.actions import PRIVATE_ACTIONS
from fednas_flwr.privacy.mechanism.noise import SecureGenerator
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol import messages
from fednas_flwr.protocol.messages import Header, Request, decode_request, encode_states
from fednas_flwr.protocol.requests import RewardCandidates, TrainCandidates, Trial
from fednas_flwr.protocol.states import MOMENTS, network_states, pack
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.optimizer_step import no_moments
from fednas_flwr.settings import Hardware
from fednas_flwr.settings.optimizers import SGD
from fednas_flwr.spaces.costs import HardwareLoss, space_costs

from ..asked import ALPHAS, smallest
from ..policies import policy_of
from ..refusals import raising, refuses
from ..watched import noting

RECORDS = {"train": 40, "validation": 20, "test": 12}  # declared: not what the data holds
ALL_RECORDS = sum(RECORDS.values())
FRACTIONS = {split: count / ALL_RECORDS for split, count in RECORDS.items()}
LIMITS = {"epsilon": 1e5, "least_noise_multiplier": 0.1, "largest_grad_norm": 2.0}
LIMITS |= {"largest_steps": 1000, "actions": list(PRIVATE_ACTIONS)}
POLICY = policy_of(**LIMITS, records=ALL_RECORDS, fractions=FRACTIONS)
SIZES = ("norm=group", "channels=2", "num_cells=1")
TERMS = {"noise_multiplier": 1.5, "batch_size": 8.0, "max_grad_norm": 0.5}
METRICS = {"noise_multiplier": 4.0, "batch_size": None, "max_grad_norm": 1.0}
TERMS_OF = {"weights": TERMS, "alphas": TERMS, "rewards": METRICS, "metrics": METRICS}
SEARCHED = {"weights": ("train",), "alphas": ("validation",)}
# What each action with releases is asked: stage, splits by kind of release.
ASKED = {
    "train.weight_gradient": ("search", {"weights": ("train",)}),
    "train.alpha_gradient": ("search", {"alphas": ("validation",)}),
    "train.gradients": ("search", SEARCHED),
    "train.search": ("search", SEARCHED),
    "train.candidate": ("search", {"weights": ("train",)}),
    "train.probe": ("search", SEARCHED | {"rewards": ("validation",)}),
    "train.weights": ("retrain", {"weights": ("train", "validation")}),
    "train.network_gradient": ("retrain", {"weights": ("train", "validation")}),
    "evaluate.candidates": ("search", {"rewards": ("validation",)}),
    "evaluate.model": ("search", {"metrics": ("validation",)}),
}
STEP = SGD(lr=0.1, min_lr=0.0, momentum=0.9, weight_decay=0.01, clip_norm=5.0)
TRIAL = Trial(STEP, ALPHAS, drop_path_prob=0.0)
LOSS_BOUND = 0.5
# Paths of the space dp_cells: one that a step of trains, some that are rewarded. The weights are
# set so that DIVIDED says class 0 of some records and class 1 of the others.
DIVIDED = [*range(10), 4, 4, 5, 5, 6]
CANDIDATES = {
    "train.candidate": [[*range(4, 10), 4, 3, 5, 4, 1, 2, 5, 6, 7]],
    "evaluate.candidates": [[5] * 15, DIVIDED, [4, 3, 3] * 5],
}
GONE = object()  # as the new value of a key: the key is taken out


def schedule(steps=50, **changes):
    """Return the plan of every kind of release of every action."""
    return [
        replace(PlannedRelease(stage, action, kind, of, steps=steps, **TERMS_OF[kind]), **changes)
        for action, (stage, kinds) in ASKED.items()
        for kind, of in kinds.items()
    ]


def put(values, path, value):
    """Set a key of nested settings: where its name is nearest to the top, or at a dotted path.

    A name that is nowhere becomes a new key at the top.
    """
    *outer, name = path.split(".")
    for key in outer:
        values = values[key]
    places = level = [values]
    while level and not any(name in place for place in level):
        level = [v for place in level for v in place.values() if isinstance(v, dict)]
    for place in [p for p in level if name in p] or places:
        place[name] = value
        if value is GONE:
            del place[name]


def received(action, header, values, states=None):
    """Return the request that a site decodes from a message with any JSON values as settings."""
    text = json.dumps({"header": asdict(header), "settings": values}, default=asdict)
    content = {messages.HEADER: ConfigRecord({messages.JSON: text})}
    return decode_request(action, RecordDict({**content, **encode_states(states or {})}))


def clipped_sum(split, gradients_of, norm, factors=None):
    """Return the sum of clipped gradients, one float64 record at a time, and the largest norm."""
    total, most = 0.0, 0.0
    for row in range(len(split)):
        x, y = split.batch(torch.tensor([row]), "cpu")
        gradient = torch.cat([g.reshape(-1) for g in gradients_of(x.double(), y)])
        length = gradient.norm().item()
        most = max(most, length)
        factor = 1.0 if factors is None else factors[y].item()
        total = total + gradient * (min(1.0, norm / length) * factor)
    return total, most


def step_along(optimizer, parameters, total, size):
    """Step along the mean over so many records of a sum of gradients, a flat vector."""
    optimizer.zero_grad()
    parts = (total / size).split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer.step()


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def packed(network, scale=1.0):
    """Return a network's states as they travel, its weights so many times as large."""
    states = {name: state for name, state in network_states(network).items() if state}
    with torch.no_grad():
        large = {name: tensor * scale for name, tensor in states["weights"].items()}
    return {name: pack(state) for name, state in (states | {"weights": large}).items()}


def of_splits(edit):
    """Return an edit of a client's data that does the same to every split."""
    return lambda data: ClientData(*map(edit, (data.train, data.validation, data.test)))


def without_last(name):
    """Return an edit of a client's data that leaves the last unit out of a split."""

    def edit(data):
        split = getattr(data, name)
        keep, persons = torch.arange(len(split)) < len(split) - 1, split.persons
        if persons is not None:
            keep = persons != persons[-1]
            persons = persons[keep]
        return replace(data, **{name: replace(split, rows=split.rows[keep], persons=persons)})

    return edit


def hardware_loss(space, form):
    """Return the loss of a space whose target lies in the middle of its multiply-adds."""
    costs = space_costs(space, None)
    target = (costs.lowest + costs.highest) / 2
    return HardwareLoss.of(costs, Hardware(None, "multiply_adds", target, form, 0.5, 0.7))


@pytest.fixture(scope="session")
def site_config(compose_config):
    sizes = [f"{part}.{size}" for part in ("search_space", "retrain") for size in SIZES]
    return compose_config("algorithm=dp_fnas", "privacy=dp", "clients=1", *sizes)


@pytest.fixture(scope="session")
def prepared(site_config):
    return make_data(site_config)[0]


@pytest.fixture(scope="session")
def networks(site_config, prepared):
    """What requests carry: states by network, and the description of a derived one."""
    return make_networks(site_config, prepared)


def make_networks(config, prepared):
    space = supernet_space(config, prepared)
    with seeded(1, "networks"):
        supernet = space.supernet()
        description = describe_network(config, prepared, space.derive(supernet.alphas()))
        derived = make_network(description)
    both = {"supernet": supernet, "derived": derived}
    states = {name: packed(network) for name, network in both.items()}
    moments = {name: pack(no_moments(network)) for name, network in both.items()}
    return SimpleNamespace(
        description=description, states=states, moments=moments, space=space, **both
    )


@pytest.fixture(scope="session")
def cells_config(compose_config):
    """Of the site when it is asked about candidates."""
    return compose_config(
        *("algorithm=dpnas", "privacy=dp", "clients=1", "search_space=dp_cells"),
        *("retrain=dp_cells", "search_space.widths=[2]", "search_space.head=4"),
    )


@pytest.fixture(scope="module")
def cells(cells_config, prepared, one_cell):
    """Of candidates: the supernet, its weights as they are shared, and the records' labels.

    The last bias lies in the widest gap between middle records; DIVIDED is right about all labels.
    """
    with seeded(1, "cells"):  # whose gap is wide
        supernet = supernet_space(cells_config, prepared).supernet().eval()
    bias = supernet.body.head[-1].bias
    with torch.no_grad():
        logits = Candidate(supernet, DIVIDED)(images(prepared))
        differences = (logits[:, 0] - logits[:, 1]).sort().values
        middle = differences[len(differences) // 4 : -len(differences) // 4]
        widest = int(middle.diff().argmax())
        logits[:, 1] += (shift := (middle[widest] + middle[widest + 1]) / 2)
        bias[1] += shift
        bias[2] += logits[:, :2].amax(1).min() - logits[:, 2].max() - 1  # it never says class 2
        labels = Candidate(supernet, DIVIDED)(images(prepared)).argmax(1)
    states = {"weights": pack(network_states(supernet)["weights"])}
    return SimpleNamespace(supernet=supernet, states=states, labels=labels)


def images(prepared):
    """Return all normalised images of the clients."""
    train = prepared.train
    rows = torch.arange(len(train))
    split = Split(train.features, train.labels, rows, tuple(prepared.mean), tuple(prepared.std))
    return split.batch(rows, "cpu")[0]


def node_of(folder, config, policies):
    """Return the node configuration of a site that has the data set ward, with its policy file."""
    (folder / "policy.yaml").write_text(yaml.safe_dump({"data_sets": policies}))
    books = {"ledger": str(folder / "ledger" / "rows.sqlite"), "ledger-key": str(folder / "key")}
    read = {"data-path": str(config.dataset.root), "cache": str(config.dataset.cache)}
    read |= {"dataset": "read by client_app", "split-key": config.dataset.split_key}
    return {"policy": str(folder / "policy.yaml"), "data-set": "ward"} | books | read


@pytest.fixture(scope="module")
def make_site(site_config, prepared, networks, cells_config, cells, tmp_path_factory):
    """``make_site(...)``: a site that has kept a schedule; ``site.ask(action, **changes)`` asks it.

    Every request goes through its message; a change replaces a key of its settings, see
    :func:`put`, by any value. With ``moments`` those of the optimisers travel beside the model.
    ``policy`` changes the site's policy, ``records`` are the rows it holds (40) and ``hold`` edits
    its splits, ``folder`` is an older site's, ``test_seed`` makes its draws repeatable, and
    ``committed`` is the schedule, and ``objective`` takes the place of the run's.
    """

    def make(
        *, policy=None, committed=None, records=None, hold=None, folder=None, test_seed=None,
        objective=None,
    ):  # fmt: skip
        folder = folder or tmp_path_factory.mktemp("site")
        allowed = POLICY | (policy or {})
        if test_seed is not None:
            allowed |= {"secure_noise": False, "test_seed": True}
        # "other" must never be told of
        sections = {"ward": allowed, "other": allowed | {"account": "other"}}
        node = node_of(folder, site_config, sections)
        rows = np.arange(40) if records is None else records
        data, guard = (prepared, [rows]), make_site_guard(node)
        client, of_cells = (
            make_client(config, 0, data=data, networks={}, site=node, guard=guard)
            for config in (site_config, cells_config)
        )
        if hold is not None:
            client = replace(client, data=hold(client.data))
        validation = replace(client.data.validation, labels=cells.labels)
        of_cells = replace(of_cells, data=replace(client.data, validation=validation))
        for one in (client, of_cells) if objective else ():
            one.__dict__["objective"] = objective
        if test_seed is not None:
            client.guard._generator = SecureGenerator(test_seed)
        site = SimpleNamespace(client=client, of_cells=of_cells, guard=client.guard, folder=folder)

        def asked(action):
            """Return what an action is given unless a test changes it: one step of each release."""
            trained = {"network": networks.description, "split": "train+validation"}
            every = smallest("ward", **trained, weights=STEP, loss_bound=LOSS_BOUND)
            given = every.get(action, every["train.gradients"])  # also of what is no action
            if isinstance(given, TrainCandidates | RewardCandidates):
                return replace(given, candidates=CANDIDATES[action])
            return replace(given, releases=tuple(schedule())) if action == "query.commit" else given

        def request(action, *, run="run", moments=False, **changes):
            stage, releases = ASKED.get(action, ("commit", {}))
            values = json.loads(json.dumps(asdict(asked(action))))
            for path, value in changes.items():
                put(values, path, copy.deepcopy(value))
            name = "derived" if ASKED.get(action, ("",))[0] == "retrain" else "supernet"
            states = cells.states if action in CANDIDATES else networks.states[name]
            if moments and action in CANDIDATES:
                states = states | {MOMENTS: pack(no_moments(cells.supernet))}
            elif moments:
                states = states | {MOMENTS: networks.moments[name]}
            header = Header(run, stage, 1, 1, 0, "nonce")
            return received(action, header, values, states if releases else {})

        def ask(action, **changes):
            return answers(request(action, **changes))

        def answers(request):
            return answer(of_cells if request.action in CANDIDATES else client, request)

        site.ask, site.request, site.answer = ask, request, answers
        site.rows = lambda: [row.entry for row in client.guard._ledger.entries()]
        site.commit = lambda **changes: ask("query.commit", releases=schedule(**changes))
        if committed != []:
            client.guard.commit("run", committed or schedule())
        return site

    return make


@pytest.fixture
def noised(monkeypatch):
    """What is noised from now on, in order: the total, the terms, and what is released."""

    def note(drawn, total, _, **terms):
        return total, terms, drawn

    return noting(monkeypatch, release_guard, "add_noise", note)


@pytest.fixture
def read(monkeypatch):
    """The batches that are read from now on: the split, and the places in it."""
    seen, batch = [], Split.batch

    def noted(split, places, device):
        seen.append((split, places))  # also of one that fails
        return batch(split, places, device)

    monkeypatch.setattr(Split, "batch", noted)
    return seen


@pytest.fixture
def no_record(monkeypatch):
    """Any look at a record fails."""
    monkeypatch.setattr(Split, "batch", raising(AssertionError("a record was read")))


@pytest.fixture
def totals(monkeypatch):
    """What was to be noised, in order, with its terms; noise is left out."""
    monkeypatch.setattr(release_guard, "add_noise", lambda total, _, **terms: total)
    return noting(
        monkeypatch, release_guard, "add_noise", lambda drawn, total, _, **terms: (total, terms)
    )


@pytest.fixture
def of_table(tmp_path):
    """``of_table(*overrides)``: a simulated client, a network, and how to ask about both."""

    def make(*overrides):
        config = compose(*overrides, f"run_dir={tmp_path / 'run'}")
        data = make_data(config)
        description = describe_network(config, data[0], None)
        with seeded(3, "network"):
            network = make_network(description)
        states = packed(network)

        def request(action, settings, stage="evaluate"):
            return Request(action, Header("run", stage, 1, 1, 0, "nonce"), settings, states)

        told = {"network": network.eval(), "description": description, "request": request}
        return SimpleNamespace(client=make_client(config, 0, data=data, networks={}), **told)

    return make


def check_release(client, request, noised, *, norm, exact, action, splits):
    """Answer with a noised sum; check the sum, the noise's terms, its row, and what else is said.

    Returns:
        The reply, and the float64 sum that was noised.
    """
    reply = answer(client, request)
    ((total, terms, _),) = noised
    assert terms == {"noise_multiplier": 2.0, "max_grad_norm": norm}
    assert total == pytest.approx(exact, abs=1e-9)
    ((entry, stage),) = [(row.entry, row.entry.stage) for row in client.guard._ledger.entries()]
    assert (stage, entry.action, entry.splits) == (request.header.stage, action, splits)
    assert entry.release == Release(noise_multiplier=2.0, sample_rate=1.0, steps=1)
    assert (reply.metrics, reply.properties) == ({}, {})
    assert reply.num_examples == sum(client.guard.allowed.by_split[split] for split in splits)
    return reply, total


def check_refusals(client, request, release):
    """Check that nothing is booked of what was not committed to, or is not covered."""
    other = replace(request, header=replace(request.header, run="other"))
    refuses(f"release={release}", answer, client, other)
    elsewhere = replace(request, settings=replace(request.settings, data_set=None))
    refuses("rule data_sets", answer, client, elsewhere)
    client.guard.allowed = replace(client.guard.allowed, epsilon=0.01)
    refuses("", answer, client, request, error=BudgetExceededError)
    assert client.guard._ledger.entries() == []

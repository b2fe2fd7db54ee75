"""Private candidates behind a site's guard: which sums are noised, and what the noise lies on."""

import json
import math
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.models.networks import describe_pool, make_network, supernet_space
from fednas_flwr.protocol.messages import Header
from fednas_flwr.protocol.requests import Amount, LocalTraining, RewardCandidates, Train
from fednas_flwr.protocol.states import MOMENTS, Layout, Part, load_states, network_states, unpack
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.optimizer_step import no_moments, path_states

from ..refusals import refuses
from ..rows import seldom
from . import conftest as wards
from .conftest import DIVIDED, METRICS, RECORDS, STEP, TERMS, flat, schedule, step_along

NORM, SIGMA = TERMS["max_grad_norm"], TERMS["noise_multiplier"]
EVERYTHING = schedule(batch_size=None)
PATHS = [[*range(4, 10), 4, 3, 5, 4, 1, 2, 5, 6, 7], DIVIDED, [3] * 15]
ASKED = {"weights": replace(STEP, clip_norm=None), "local_steps": 2, "candidates": PATHS}


@pytest.fixture
def site(make_site):
    return make_site(committed=EVERYTHING, records=np.arange(40), test_seed=b"7")


@pytest.fixture
def supernet(cells_config, prepared, cells):
    supernet = supernet_space(cells_config, prepared).supernet()
    load_states(supernet, cells.states)
    return supernet


def test_steps_are_clipped_sums_of_one_path_after_the_other(site, supernet, totals):
    """The same in float64, one record at a time, with torch's own optimiser."""
    reply = site.ask("train.candidate", **ASKED)
    supernet.double().train()
    start = flat(supernet.weights().values())
    constants = {"lr": STEP.lr, "momentum": STEP.momentum, "weight_decay": 0.01}
    sgd = torch.optim.SGD(supernet.weights().values(), **constants)
    train, norms = site.client.data.train, []
    for path in PATHS:
        candidate = Candidate(supernet, path)
        weights = list(candidate.weights().values())

        def by_weights(x, y, candidate=candidate, weights=weights):
            return torch.autograd.grad(torch.nn.functional.cross_entropy(candidate(x), y), weights)

        for _ in range(ASKED["local_steps"]):
            total, largest = wards.clipped_sum(train, by_weights, NORM)
            norms.append(largest)
            step_along(sgd, weights, total, RECORDS["train"])
    assert max(norms) > NORM
    expected = flat(supernet.weights().values())
    returned = reply.states["weights"]["float32"].double()
    # a pool or a kink may go the other way in float32: one record's share of one step
    assert (returned - expected).norm() < 0.01 * (expected - start).norm()
    assert len(totals) == len(PATHS) * ASKED["local_steps"] == len(site.rows())
    assert all(terms == {"noise_multiplier": SIGMA, "max_grad_norm": NORM} for _, terms in totals)
    rows = {(row.action, row.splits) for row in site.rows()}
    assert rows == {("train.candidate:weights", ("train",))}


def test_noise_lies_on_the_paths_own_weights_and_no_other_moves(site, supernet, cells):
    reply = site.ask("train.candidate", **ASKED | {"candidates": PATHS[:1]})
    layout = Layout.of(network_states(supernet)["weights"])
    sent, returned = (unpack(s["weights"], layout) for s in (cells.states, reply.states))
    moved = {name for name in sent if not torch.equal(sent[name], returned[name])}
    assert moved == set(Candidate(supernet, PATHS[0]).weights())
    assert len(moved) < len(sent)


def assert_counts(totals, reply, correct, *, norm):
    """Check that one vector of counts was to be noised, and is what the reply says."""
    ((total, terms),) = totals
    torch.testing.assert_close(total, torch.tensor(correct).double())
    assert terms == {"noise_multiplier": METRICS["noise_multiplier"], "max_grad_norm": norm}
    rewards = reply.states["rewards"]["float32"]
    torch.testing.assert_close(rewards, torch.tensor(correct) / RECORDS["validation"])


def test_rewards_are_one_vector_of_counts_over_declared_records(site, supernet, totals):
    """A record is right or wrong about each of M candidates: norm sqrt(M), as noise has it.

    The first is right about every record, by its labels; the second, without an edge, says the same
    class of all records, of which there are two.
    """
    paths = [DIVIDED, [0] * 15, PATHS[0]]
    reply = site.ask("evaluate.candidates", candidates=paths)
    split = site.of_cells.data.validation
    x, y = split.batch(torch.arange(len(split)), "cpu")
    with torch.no_grad():
        said = [Candidate(supernet.eval(), path)(x).argmax(1) for path in paths]
    correct = [int((one == y).sum()) for one in said]
    assert correct[0] == len(split)
    assert correct[1] == int((y == said[1][0]).sum()) < len(split)
    assert_counts(totals, reply, correct, norm=math.sqrt(len(paths)))
    (row,) = site.rows()
    assert (row.action, row.splits) == ("evaluate.candidates:rewards", ("validation",))
    assert (row.release.sample_rate, row.release.steps) == (1, 1)


@pytest.mark.parametrize("moments", [False, seldom(True)])
def test_a_reply_about_paths_is_a_part_of_the_whole(moments, site, make_site, supernet, totals):
    """Noise is left out: the releases' totals are those of whole states, too."""
    whole = site.request("train.candidate", moments=moments, **ASKED)
    layouts = {"weights": Layout.of(network_states(supernet)["weights"])}
    if moments:
        layouts[MOMENTS] = Layout.of(no_moments(supernet))
    part = Part(layouts, path_states(supernet, PATHS))
    taken, whole_size = (of["weights"].sizes["float32"] for of in (part.layouts, layouts))
    assert 0 < taken < 0.6 * whole_size
    other = make_site(committed=EVERYTHING, records=np.arange(40), test_seed=b"7")
    sparse = replace(whole.settings, sparse=True)
    narrow = replace(whole, settings=sparse, states=part.of(whole.states))
    expected, reply = site.answer(whole), other.answer(narrow)
    assert reply.digests == {name: layout.digest for name, layout in part.layouts.items()}
    for name, state in part.of(expected.states).items():
        assert torch.equal(reply.states[name]["float32"], state["float32"])
    (before, after) = totals[: len(totals) // 2], totals[len(totals) // 2 :]
    for (one, _), (same, _) in zip(before, after, strict=True):
        assert torch.equal(one, same)


# --- pools: every member clipped by itself, one release of all


MEMBERS = 3
JOINT_NORM = NORM * math.sqrt(MEMBERS)
DATA_SET = "ward"


@pytest.fixture(scope="module")
def pool(networks):
    drawn = [networks.space.random_genotype(make_generator(1, "pool", n)) for n in range(MEMBERS)]
    shapes = {key: networks.description[key] for key in ("input_shape", "num_classes")}
    sizes = {key: networks.description[key] for key in ("channels", "num_cells")}
    described = describe_pool(drawn, shapes=shapes, sizes=sizes, norm="group", auxiliary=False)
    with seeded(1, "pool"):
        network = make_network(described)
    return SimpleNamespace(described=described, network=network, states=wards.packed(network))


def ask_pool(pool_site, action, stage, settings, states):
    values = json.loads(json.dumps(asdict(settings)))
    request = wards.received(action, Header("run", stage, 1, 1, 0, "nonce"), values, states)
    return answer(pool_site.client, request)


def train_pool(pool_site, pool, steps=1, **changes):
    described = pool.described | changes
    local = LocalTraining(described, "train+validation", Amount(None, steps, None), STEP, 0.0, 0.0)
    asked = Train(local=local, data_set=DATA_SET)
    return ask_pool(pool_site, "train.weights", "retrain", asked, pool.states)


@pytest.fixture
def pool_site(make_site):
    return make_site(committed=schedule(batch_size=None), records=np.arange(40), test_seed=b"7")


def test_a_step_is_one_release_of_every_members_own_clipped_sum(pool_site, pool, totals):
    """In float64, one record at a time: each member clipped to R, noise for all of them jointly."""
    reply = train_pool(pool_site, pool)
    network = make_network(pool.described).double()
    network.load_state_dict(pool.network.state_dict())
    split = pool_site.client.split("train+validation")
    sums, norms = [], []
    for member in network.train().members:
        weights = list(member.parameters())

        def by_weights(x, y, member=member, weights=weights):
            return torch.autograd.grad(torch.nn.functional.cross_entropy(member(x), y), weights)

        total, largest = wards.clipped_sum(split, by_weights, NORM)
        sums.append(total)
        norms.append(largest)
    assert max(norms) > NORM
    ((total, terms),) = totals
    assert terms == {"noise_multiplier": SIGMA, "max_grad_norm": pytest.approx(JOINT_NORM)}
    expected = torch.cat(sums)
    assert (total - expected).norm() < 0.01 * expected.norm()
    (row,) = pool_site.rows()
    assert (row.action, row.release.steps) == ("train.weights:weights", 1)
    # what the server gets are the members' own steps, along the mean of their own sums
    returned = make_network(pool.described)
    load_states(returned, reply.states)
    for before, after, total in zip(pool.network.members, returned.members, sums, strict=True):
        start, moved = (flat(m.parameters()).double() for m in (before, after))
        gradient = total / (RECORDS["train"] + RECORDS["validation"])
        gradient = gradient * min(1.0, STEP.clip_norm / gradient.norm().item())
        step = -STEP.lr * (gradient + STEP.weight_decay * start)
        assert (moved - start - step).norm() < 0.01 * step.norm()


def test_rewards_of_members_are_one_vector_of_counts(pool_site, pool, totals):
    settings = RewardCandidates(network=pool.described, data_set=DATA_SET)
    reply = ask_pool(pool_site, "evaluate.candidates", "search", settings, pool.states)
    split = pool_site.client.data.validation
    x, y = split.batch(torch.arange(len(split)), "cpu")
    with torch.no_grad():
        correct = [int((m.eval()(x).argmax(1) == y).sum()) for m in pool.network.members]
    assert_counts(totals, reply, correct, norm=pytest.approx(math.sqrt(MEMBERS)))


@dataclass(frozen=True)
class Evaluated:
    """What a hostile server asks: a request that is not checked where it is made."""

    network: object
    candidates: None = None
    training: None = None
    data_set: str = DATA_SET
    sparse: bool = False


NO_POOLS = [
    ({"norm": "batch"}, "batch_norm"),
    ({"genotypes": [{}]}, "refused|genotype"),
    ({"name": "linear"}, "refused, the settings do not fit evaluate.candidates"),
]


@pytest.mark.parametrize(("changes", "sentence"), NO_POOLS)
def test_what_is_no_private_pool_is_refused_unread(changes, sentence, make_site, pool, no_record):
    pool_site = make_site()
    settings = Evaluated(pool.described | changes)
    refuses(sentence, ask_pool, pool_site, "evaluate.candidates", "search", settings, pool.states)
    refuses("", train_pool, pool_site, pool, **changes)
    assert pool_site.rows() == []


def test_members_are_not_trained_to_be_measured(pool_site, pool, no_record):
    """Of their losses no plan bounds what a record moves."""
    training = LocalTraining(pool.described, "train", Amount(1, None, 4), STEP, 0.0, 0.0)
    settings = RewardCandidates(training=training, data_set=DATA_SET)
    words = "refused, training of candidates with privacy=dp"
    refuses(words, ask_pool, pool_site, "evaluate.candidates", "search", settings, pool.states)
    assert pool_site.rows() == []


@pytest.mark.parametrize("given", [{}, {"candidates": [[0]], "network": {"genotypes": [{}]}}])
def test_paths_or_a_pool_are_measured_and_not_both(given):
    refuses("candidates or network or training must be given", RewardCandidates, **given)

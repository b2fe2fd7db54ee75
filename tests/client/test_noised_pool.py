"""A private pool of networks: every member clipped by itself, one release of all."""

import json
import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.models.networks import describe_pool, make_network
from fednas_flwr.protocol.messages import Header
from fednas_flwr.protocol.requests import Amount, LocalTraining, RewardCandidates, Train
from fednas_flwr.protocol.states import load_states

from ..refusals import refuses
from .conftest import METRICS, RECORDS, STEP, TERMS, clipped_sum, flat, packed, received, schedule

NORM, SIGMA = TERMS["max_grad_norm"], TERMS["noise_multiplier"]
MEMBERS = 3
JOINT_NORM = NORM * math.sqrt(MEMBERS)
DATA_SET = "ward"


@pytest.fixture(scope="module")
def pool(networks):
    genotypes = [
        networks.space.random_genotype(make_generator(1, "pool", n)) for n in range(MEMBERS)
    ]
    shapes = {key: networks.description[key] for key in ("input_shape", "num_classes")}
    sizes = {key: networks.description[key] for key in ("channels", "num_cells")}
    described = describe_pool(genotypes, shapes=shapes, sizes=sizes, norm="group", auxiliary=False)
    with seeded(1, "pool"):
        network = make_network(described)
    return SimpleNamespace(described=described, network=network, states=packed(network))


def ask(site, action, stage, settings, states):
    values = json.loads(json.dumps(asdict(settings)))
    request = received(action, Header("run", stage, 1, 1, 0, "nonce"), values, states)
    return answer(site.client, request)


def train(site, pool, steps=1, **changes):
    described = pool.described | changes
    amount = Amount(None, steps, None)
    local = LocalTraining(described, "train+validation", amount, STEP, 0.0, 0.0)
    return ask(site, "train.weights", "retrain", Train(local=local, data_set=DATA_SET), pool.states)


@pytest.fixture
def site(make_site):
    return make_site(committed=schedule(batch_size=None), records=np.arange(40), test_seed=b"7")


def test_a_step_is_one_release_of_every_members_own_clipped_sum(site, pool, totals):
    """In float64, one record at a time: each member clipped to R, noise for all of them jointly."""
    reply = train(site, pool)
    network = make_network(pool.described).double()
    network.load_state_dict(pool.network.state_dict())
    split = site.client.split("train+validation")
    sums, norms = [], []
    for member in network.train().members:
        weights = list(member.parameters())

        def by_weights(x, y, member=member, weights=weights):
            return torch.autograd.grad(functional.cross_entropy(member(x), y), weights)

        total, largest = clipped_sum(split, by_weights, NORM)
        sums.append(total)
        norms.append(largest)
    assert max(norms) > NORM
    ((total, terms),) = totals
    assert terms == {"noise_multiplier": SIGMA, "max_grad_norm": pytest.approx(JOINT_NORM)}
    expected = torch.cat(sums)
    assert (total - expected).norm() < 0.01 * expected.norm()
    (row,) = site.rows()
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


def test_rewards_of_members_are_one_vector_of_counts(site, pool, totals):
    settings = RewardCandidates(network=pool.described, data_set=DATA_SET)
    reply = ask(site, "evaluate.candidates", "search", settings, pool.states)
    split = site.client.data.validation
    x, y = split.batch(torch.arange(len(split)), "cpu")
    with torch.no_grad():
        correct = [int((m.eval()(x).argmax(1) == y).sum()) for m in pool.network.members]
    ((total, terms),) = totals
    torch.testing.assert_close(total, torch.tensor(correct).double())
    assert terms == {
        "noise_multiplier": METRICS["noise_multiplier"],
        "max_grad_norm": pytest.approx(math.sqrt(MEMBERS)),
    }
    rewards = reply.states["rewards"]["float32"]
    torch.testing.assert_close(rewards, torch.tensor(correct) / RECORDS["validation"])


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
    ({"genotypes": []}, "genotypes=.* is out of range"),
    ({"genotypes": 3}, "genotypes=3 is out of range"),
    ({"genotypes": [{}]}, "refused|genotype"),
    ({"name": "linear"}, "refused, the settings do not fit evaluate.candidates"),
]


@pytest.mark.parametrize(("changes", "sentence"), NO_POOLS)
def test_what_is_no_private_pool_is_refused_unread(changes, sentence, make_site, pool, no_record):
    site = make_site()
    settings = Evaluated(pool.described | changes)
    refuses(sentence, ask, site, "evaluate.candidates", "search", settings, pool.states)
    refuses("", train, site, pool, **changes)
    assert site.rows() == []


def test_members_are_not_trained_to_be_measured(site, pool, no_record):
    """Of their losses no plan bounds what a record moves."""
    training = LocalTraining(pool.described, "train", Amount(1, None, 4), STEP, 0.0, 0.0)
    settings = RewardCandidates(training=training, data_set=DATA_SET)
    with pytest.raises(ConfigError, match="refused, training of candidates with privacy=dp"):
        ask(site, "evaluate.candidates", "search", settings, pool.states)
    assert site.rows() == []


@pytest.mark.parametrize("given", [{}, {"candidates": [[0]], "network": {"genotypes": [{}]}}])
def test_paths_or_a_pool_are_measured_and_not_both(given):
    refuses("candidates or network or training must be given", RewardCandidates, **given)

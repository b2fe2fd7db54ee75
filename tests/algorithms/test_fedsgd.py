"""FedSGD against SGD on pooled batches and against DP-SGD of one client; resume; what it books."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

from fednas_flwr.algorithms.fedavg.strategy import association, planned
from fednas_flwr.algorithms.stage_strategies import make_retraining
from fednas_flwr.api import compose
from fednas_flwr.client.answer import answer
from fednas_flwr.client.client import Client
from fednas_flwr.data.loaders import step_batch
from fednas_flwr.models.networks import describe_network, make_network, seeded_network
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.settings.names import PRECISIONS

from ..asked import smallest
from ..booked import booked
from ..watched import noting
from .plain import PLAIN_CNN, make_sgd, rate_of_round, step

ROUNDS = 3
GRADIENTS = (
    *("algorithm=random_search", "retrain.exchange=gradients", "retrain.batch_size=16"),
    "retrain.weights={lr: 0.02, min_lr: 0.002, momentum: 0.9, weight_decay: 3e-4, clip_norm: 1}",
)
DARTS = ("search_space=darts_small", "retrain=darts", "retrain.exchange=gradients")
DARTS += ("retrain.channels=2", "retrain.num_cells=3", "retrain.batch_size=16")
UNEQUAL = ("clients=3", "partition=quantity", "partition.fractions=[0.88,0.07,0.05]")
DP = ("privacy=dp", "clients=1", "stages=[retrain,export]", "privacy.test_seed=3")
DP += ("algorithm=fedavg", "algorithm.network=plain_cnn", "privacy.retrain.local_steps=3")
DP += ("retrain.batch_size=16", "retrain.rounds=2", "privacy.epsilon=50")


def start(federation, description, *, rounds=ROUNDS, precision="float32"):
    training = replace(federation.config.training, precision=precision)
    config = replace(federation.config, training=training)
    strategy, network = make_retraining(config, description, federation.cohort)
    strategy.start(federation.grid, num_rounds=rounds)
    strategy.load_into(network)
    return strategy, network


def batch(config, split, size, number, client):
    """The records of a client's step."""
    purpose = ("batches", "train+validation", client)
    rows = step_batch(len(split), batch_size=size, step=number, seed=config.seed, purpose=purpose)
    return split.batch(rows, "cpu")


def test_steps_equal_sgd_on_pooled_batches_in_proportion_to_records(compose_config, federate):
    federation = federate(compose_config(*GRADIENTS, *UNEQUAL, "retrain.batch_size=2"))
    _, network = start(federation, PLAIN_CNN)
    config, sgd = federation.config, federation.config.retrain.weights
    plain = seeded_network(config, PLAIN_CNN).train()
    splits = [client.split("train+validation") for client in federation.clients]
    usual = sorted(map(len, splits))[1]
    steps = math.ceil(usual / 2)  # those of the median client's epoch
    sizes = [max(2, round(2 * min(8, len(split) / usual))) for split in splits]
    optimizer = make_sgd(plain.parameters(), sgd)
    for number in range(ROUNDS * steps):
        optimizer.param_groups[0]["lr"] = rate_of_round(sgd, 1 + number // steps, ROUNDS)
        batches = [batch(config, splits[c], size, number, c) for c, size in enumerate(sizes)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        step(optimizer, F.cross_entropy(plain(x), y), sgd.clip_norm)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=0, atol=5e-6)
    rounds = federation.named("round")
    assert [event["exchanges"] for event in rounds] == [steps] * ROUNDS
    assert rounds[-1]["metrics"]["train_loss"] < rounds[0]["metrics"]["train_loss"]


def test_steps_of_a_round_are_those_of_the_clients_that_began(compose_config, federate):
    """Of a resumed run fewer may be connected; it neither repeats batches nor leaves some out."""
    federation = federate(compose_config(*GRADIENTS, *UNEQUAL))
    federation.cohort.connect(federation.grid)
    federation.cohort.declared = dict.fromkeys(range(3), {"train": 70, "validation": 10})
    start(federation, PLAIN_CNN, rounds=1)
    assert federation.named("round")[0]["exchanges"] == 80 // 16


def test_batch_norm_and_auxiliary_heads_are_trained_as_one_would(compose_config, federate):
    own = ("clients=1", "retrain.auxiliary_weight=0.4", "retrain.batch_size=40")
    config = compose_config(*GRADIENTS, *DARTS, *own)
    federation = federate(config)
    genotype = federation.strategy.space.random_genotype(torch.Generator().manual_seed(0))
    described = describe_network(config, federation.data[0], genotype)
    assert described["auxiliary"]
    _, network = start(federation, described, rounds=1)
    plain = seeded_network(config, described).train()
    sgd, split = config.retrain.weights, federation.clients[0].split("train+validation")
    optimizer = make_sgd(plain.parameters(), sgd)
    for number in range(2):  # rounding grows through batch norm
        x, y = batch(config, split, 40, number, 0)
        logits, auxiliary = plain(x)
        loss = F.cross_entropy(logits, y) + 0.4 * F.cross_entropy(auxiliary, y)
        step(optimizer, loss, sgd.clip_norm)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-4)


def test_the_precision_that_a_run_finds_out_arrives_at_the_gradient(compose_config, federate):
    config = compose_config(*GRADIENTS, *UNEQUAL, "training.precision=auto")
    full, half = (
        start(federate(config), PLAIN_CNN, rounds=1, precision=precision)[1]
        for precision in PRECISIONS
    )
    assert not torch.equal(*(next(network.parameters()) for network in (full, half)))


def test_last_rounds_see_images_as_they_are(compose_config, federate, monkeypatch):
    own = ("clients=1", "dataset.flip=true", "retrain.unaugmented=0.5")
    federation = federate(compose_config(*GRADIENTS, *own))
    augmented = noting(monkeypatch, Client, "augmented", lambda *_: None)
    start(federation, PLAIN_CNN, rounds=2)
    assert len(augmented) == federation.named("round")[0]["exchanges"] > 0


def test_steps_of_a_round_drop_other_paths(compose_config, federate):
    federation = federate(compose_config(*GRADIENTS, *DARTS, "clients=1"))
    genotype = federation.strategy.space.random_genotype(torch.Generator().manual_seed(0))
    described = describe_network(federation.config, federation.data[0], genotype)
    states = {n: pack(s) for n, s in network_states(make_network(described)).items() if s}

    def gradient(step):
        asked = smallest(network=described)["train.network_gradient"]
        asked = replace(asked, step=step, drop_path_prob=0.5)
        header = Header("test", "retrain", 1, 1 + step, 0, f"{step}")
        request = Request("train.network_gradient", header, asked, states)
        return answer(federation.clients[0], request).states["weights"]["float32"]

    assert torch.equal(gradient(0), gradient(0))
    assert not torch.allclose(gradient(0), gradient(1), rtol=0.1)


def test_one_private_client_is_dp_sgd_with_momentum(finished_run):
    """FedAvg's local loop, whose momentum travels with the model, is DP-SGD of one client."""
    found = {}
    for exchange, momentum in (("models", "averaged"), ("gradients", "reset")):
        ran = finished_run(*DP, f"retrain.exchange={exchange}", f"training.momentum={momentum}")
        found[exchange] = load_file(ran.folder / "model.safetensors")
        rows = booked(ran.folder / "sites")
        action = {"models": "train.weights", "gradients": "train.network_gradient"}[exchange]
        assert [row.action for row in rows] == 6 * [f"{action}:weights"]
        assert len({row.release for row in rows}) == 1
    for name, tensor in found["models"].items():
        torch.testing.assert_close(found["gradients"][name], tensor, rtol=0, atol=1e-5)


@example([(0, 0), (1, 0), (1, 0), (1, 0), (1, 0), (2, 0)])  # whose shares round
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=20))
def test_association_is_the_share_of_wrong_guesses_that_knowing_the_client_saves(records):
    """Guessed is the class of a record that is drawn of all, or of the client's."""
    each = [[c == d for j, d in records if j == k] for k, c in records]
    known, chance = fmean(map(fmean, each)), fmean(c == d for _, c in records for _, d in records)
    counts = [[records.count((k, c)) for c in range(3)] for k in range(4)]
    expected = (known - chance) / (1 - chance) if chance < 1 else 0
    assert association(counts) == pytest.approx(expected, abs=1e-9)


IMAGE = (1, 16, 16)
AVERAGED = {
    "models": ("retrain.exchange=models",),
    "rounds": ("retrain.rounds=3",),
    "some clients": ("sampling.per_round=2", "clients=3"),
    "median": ("aggregate=median", "clients=3"),
    "copies": ("evaluation.personalised=true",),
    "sums": ("secure_sum=true", "clients=3"),
    "proximal": ("algorithm=fedprox",),
    "begun": ("algorithm=fedavg", "algorithm.network=resnet18", "algorithm.weights=a.pth"),
    "a norm of its own": ("algorithm=fedavg", "algorithm.network=plain_cnn"),
    "frozen": ("search_space=adapters", "search_space.backbone=a", "search_space.weights=a.pth"),
    "moments": ("training.momentum=averaged",),
    "sites of their own": ("runtime=deployment", "runtime.superlink=server"),
    "adam": ("algorithm=fedavg", "server_optimizer=adam"),
    "a retraining of its own": ("experiment=feathers/fashion_mnist", "retrain.rounds=null"),
}


def test_clients_with_other_classes_of_images_exchange_gradients():
    fixed = (("algorithm=fedavg", own) for own in ("algorithm.network=linear", "genotype=a.json"))
    for own in (("retrain.norm=none",), *fixed, ()):
        config = compose("retrain=recommended", *own)
        plan = planned(config, 100, IMAGE, 0.1)
        norm = "none" if "retrain.norm=none" in own else "group"
        assert (plan.exchange, plan.norm) == ("gradients", norm)
    for shape, unlike in (((1, 8, 8), 1.0), ((256,), 1.0), (IMAGE, 0.09)):
        plan = planned(config, 100, shape, unlike)
        assert (plan.exchange, plan.norm) == (None, "batch")


@pytest.mark.parametrize("name", AVERAGED)
def test_what_averages_otherwise_is_left_alone(name):
    config = compose("retrain=recommended", *AVERAGED[name])
    plan = planned(config, 100, IMAGE, 1.0)
    assert (plan.exchange, plan.norm) == (config.retrain.exchange, config.retrain.norm)

"""FedAvg, FedProx, FedAdam and FedSGD, against local loops, Flower's FedAdam, and pooled batches.

And DP-SGD of one client; resume; what FedSGD books."""

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

from fednas_flwr.algorithms.fedavg.strategy import LONGER, association, planned
from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.api import compose
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.client.client import Client
from fednas_flwr.client.making import make_client
from fednas_flwr.data.loaders import Split, augment, epoch_batches, step_batch
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy.flower_patches import begin_task
from fednas_flwr.models.metrics import evaluate
from fednas_flwr.models.networks import describe_network, make_network, seeded_network
from fednas_flwr.models.prediction import read_model
from fednas_flwr.protocol.messages import Header, Request, restore_sent, round_sent
from fednas_flwr.protocol.states import TrimmedMean, network_states, pack
from fednas_flwr.settings.names import PRECISIONS

from ..asked import filled, smallest
from ..booked import booked
from ..refusals import refuses
from ..rows import seldom
from ..watched import noting
from .plain import PLAIN_CNN, average, copied, make_sgd, rate_of_round, step

ROUNDS = 3


PLAIN = "algorithm=fedavg algorithm.network=plain_cnn"
PROXIMAL = "algorithm=fedprox algorithm.network=plain_cnn algorithm.proximal=2"
AUGMENTED = f"{PLAIN} retrain.unaugmented=0.4 dataset.flip=true dataset.crop_padding=1"


@pytest.fixture(scope="module", params=[PLAIN, AUGMENTED, PROXIMAL])
def trained(search, request):
    sizes = "clients=3 partition=quantity partition.fractions=[0.6,0.25,0.15]"
    steps = "retrain.batch_size=16 retrain.local_epochs=2"
    federation = search(request.param, sizes, steps, rounds=ROUNDS)
    federation.strategy.load_into(federation.network)
    return federation


LENGTHS = [
    (479, (1, 8, 8), 20, 1),  # 15 batches of 32 in a pass
    (479, (1, 16, 16), 20 * LONGER, 1),
    (479, (256,), 20, 1),  # a table, or features
    (150, (13,), 40, 1),
    (128, (13,), 38, 2),  # 8 steps in a round
    (60, (13,), 40, 3),
    (20, (13,), 40, 5),
    (60, (1, 8, 8), 40, 1),
    (60, (3, 32, 32), 40 * LONGER, 1),
    (20_000, (3, 32, 32), 10, 1),
]


@pytest.mark.parametrize(("records", "input_shape", "rounds", "passes"), LENGTHS)
def test_retraining_lasts_as_the_records_ask(compose_config, records, input_shape, rounds, passes):
    config = compose_config("retrain.batch_size=32", "retrain.rounds=7")
    assert planned(config, records, input_shape, 0.0) == config.retrain
    config = replace(config, retrain=replace(config.retrain, rounds=None))
    made = planned(config, records, input_shape, 0.0)
    assert (made.rounds, made.local_epochs) == (rounds, passes)
    config = replace(config, retrain=replace(config.retrain, exchange="gradients"))
    assert planned(config, records, input_shape, 0.0).local_epochs == 1  # their momentum stays


def test_rounds_equal_local_loops_and_a_weighted_average(trained):
    """FedProx has (mu / 2) |w - w_0|^2 beside the loss."""
    config, sgd = trained.config, trained.config.retrain.weights
    mu = config.algorithm.proximal if config.algorithm.name == "fedprox" else 0.0
    with seeded(config.seed, "network"):
        network = make_network(trained.description).train()
    state = copied(network.state_dict())
    # Retraining may use all but the test records.
    counts = [len(c.data.train) + len(c.data.validation) for c in trained.clients]
    losses = []
    for number in range(1, ROUNDS + 1):
        augmented = config.dataset.flip and number == 1  # not in the last 40 % of three rounds
        states, local_losses = [], []
        for client in trained.clients:
            network.load_state_dict(state)
            split = client.split("train+validation")
            generator = make_generator(config.seed, "retrain", number, client.index, "weights")
            optimizer = make_sgd(network.parameters(), sgd, rate_of_round(sgd, number, ROUNDS))
            for _ in range(2):
                total = 0.0
                for rows in epoch_batches(len(split), batch_size=16, generator=generator):
                    x, y = split.batch(rows, "cpu")
                    if augmented:
                        x = augment(x, generator=generator, crop_padding=1, flip=True, cutout=0)
                    loss = torch.nn.functional.cross_entropy(network(x), y)
                    total += loss.item() * len(y)
                    for name, weight in network.named_parameters():
                        loss = loss + mu / 2 * (weight - state[name].float()).square().sum()
                    step(optimizer, loss, sgd.clip_norm)
            local_losses.append(total / len(split))
            states.append(copied(network.state_dict()))
        state = average(states, counts)
        losses.append(np.average(local_losses, weights=counts))
    for name, tensor in trained.network.state_dict().items():
        expected = state[name] if tensor.is_floating_point() else state[name].round()
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-3, atol=1e-4)
    rounds = trained.named("round")
    assert [e["metrics"]["train_loss"] for e in rounds] == pytest.approx(losses, rel=1e-4)
    assert rounds[-1]["metrics"]["train_loss"] < rounds[0]["metrics"]["train_loss"]


def test_a_plain_network_has_no_alphas_to_send(trained):
    assert "alphas" not in trained.strategy.states
    states = network_states(trained.network)
    assert set(trained.strategy.states) == {name for name, own in states.items() if own}
    refuses("does not search", trained.strategy.derive, error=ValueError)
    assert "alpha_entropy" not in trained.named("round")[0]["metrics"]


# --- FedAdam of a given network, against Flower's


PAIR = ["clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]"]
ADAM = {"tau": 0.01, "beta_1": 0.8, "beta_2": 0.9}


def message_of(reply):
    """A reply as Flower's strategies take it."""
    arrays = {dtype: Array(vector.numpy()) for dtype, vector in reply.states["weights"].items()}
    metrics = MetricRecord({"num-examples": int(reply.num_examples)})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), 1, "train")


@pytest.mark.parametrize("network", ["resnet8_4", "plain_cnn"])
def test_rounds_are_those_of_flowers_strategy(network, search):
    federation = search(
        *("algorithm=fedavg", f"algorithm.network={network}", "retrain.batch_size=32", *PAIR),
        *("server_optimizer=adam", "server_optimizer.lr=0.02"),
        *(f"server_optimizer.{name}={value}" for name, value in ADAM.items()),
        rounds=2,
    )
    weights = federation.asked[0][0].states["weights"]
    begin_task(1)
    flower = FedAdam(eta=0.02, **ADAM)
    for number, (_, replies) in enumerate(federation.asked, start=1):
        flower.current_arrays = {d: v.numpy() for d, v in weights.items()}
        arrays, _ = flower.aggregate_train(number, map(message_of, replies.values()))
        weights = {d: torch.from_numpy(arrays[d].numpy()).float() for d in weights}
    torch.testing.assert_close(federation.strategy.states["weights"], weights, rtol=1e-4, atol=1e-5)
    if "buffers" not in federation.strategy.states:
        assert network == "plain_cnn"
        return
    counts = [reply.num_examples for reply in replies.values()]
    buffers = [reply.states["buffers"]["float32"].double() for reply in replies.values()]
    mean = np.average(np.stack(buffers), axis=0, weights=counts)
    found = federation.strategy.states["buffers"]["float32"]
    np.testing.assert_allclose(found, mean, rtol=1e-4, atol=1e-5)


PRIVATE = ["privacy=dp", "privacy.epsilon=30", "clients=5", "runtime.quorum=1"]


TOO = [
    ["algorithm=fedavg", "aggregate=median", "server_optimizer=adam", *PRIVATE],
    ["algorithm=fedprox", "aggregate=trimmed_mean", *PRIVATE],
    ["algorithm=fedavg", "secure_sum=true", "server_optimizer=adam", "clients=4"],
]


@pytest.mark.parametrize("chosen", TOO)
def test_private_runs_and_secure_sums_have_them_too(chosen, finished_run):
    """What the server makes of releases, and a term without records, cost nothing."""
    assert not finished_run(*chosen, "algorithm.network=linear", "retrain.rounds=2").failed


# --- ``retrain.evaluate_every``: validation records are measured on, or trained on


LINEAR = ("dataset=digits", "algorithm=fedavg", "algorithm.network=linear", "clients=2")
LINEAR += ("stages=[retrain,evaluate,export]", "retrain.rounds=3", "retrain.batch_size=64")


@pytest.mark.parametrize("exchange", ["models", seldom("gradients")])
@pytest.mark.parametrize("every", [seldom(0), 1, seldom(2)])
def test_validation_records_are_measured_on_or_trained_on(every, exchange, quick_run, monkeypatch):
    def rows(_, split, indices, device):
        """How many records the data set has, and which of them are in the batch."""
        return len(split.features), {*split.rows[indices].tolist()}

    read = noting(monkeypatch, Split, "batch", rows)
    own = (f"retrain.evaluate_every={every}", f"retrain.exchange={exchange}")
    run = quick_run(*LINEAR, *own, "dataset.linear_baseline=false")
    rounds = [e for e in run.events if e["event"] == "round" and e["stage"] == "retrain"]
    measured = ["validation_loss" in e["metrics"] for e in rounds]
    assert measured == {0: [False] * 3, 1: [True] * 3, 2: [False, True, True]}[every]
    data = make_data(run.config)
    clients = [make_client(run.config, i, data=data, networks={}).data for i in range(2)]
    train = {r for c in clients for r in c.train.rows.tolist()}
    held = {r for c in clients for r in c.validation.rows.tolist()}
    # a batch with records of both parts is one of training; the checks before look at all records
    batches = [rows for size, rows in read if size == len(data[0].train) and len(rows) <= 64]
    assert any(train & rows and held & rows for rows in batches) == (every == 0)
    assert ("overfitting is invisible" in (run.folder / "report.html").read_text()) == (every == 0)
    if every == 0:
        return
    network = read_model(run.folder / "model.safetensors", make_network).network
    parts = [evaluate(network, c.validation, torch.device("cpu")) for c in clients]
    total = sum(p.num_examples for p in parts)
    for name in ("loss", "accuracy"):
        mean = sum(p.num_examples * getattr(p, name) for p in parts) / total
        assert rounds[-1]["metrics"][f"validation_{name}"] == pytest.approx(mean, rel=1e-5)


# --- FedSGD


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


@pytest.mark.parametrize(("records", "decay"), [(10, 0.05), (100, 5 / 300), (10_000, 3e-4)])
def test_few_records_of_a_table_are_fitted_with_more_decay(records, decay):
    config = compose("retrain=recommended", "clients=3")
    assert planned(config, records, (7,), 0.0).weights.weight_decay == pytest.approx(decay)
    more = compose("retrain=recommended", "clients=3", "retrain.weights.weight_decay=.06")
    assert planned(more, records, (7,), 0.0).weights.weight_decay == 0.06
    for kept in (planned(config, records, IMAGE, 0.0), planned(compose(), records, (7,), 0.0)):
        assert kept.weights == config.retrain.weights


# --- One client that poisons every round, against the three ways to average


@pytest.mark.parametrize("aggregate", ["mean", "median", "trimmed_mean"])
def test_a_poisoned_round_stays_between_the_honest_models_but_by_the_mean(aggregate, search):
    def poison(exchange, client, reply):
        return filled(reply, 1e5, reply.states) if client == 1 else reply

    federation = search(f"aggregate={aggregate}", "runtime.quorum=1", change=poison)
    ((_, replies),) = federation.asked
    for state in ("weights", "alphas"):
        models = torch.stack([replies[client].states[state]["float32"] for client in (0, 2)])
        result = federation.strategy.states[state]["float32"]
        low, high = models.min(dim=0).values, models.max(dim=0).values
        assert bool(((low <= result) & (result <= high)).all()) == (aggregate != "mean")


def test_both_stages_average_as_the_configuration_says(compose_config, federate):
    own = ("clients=5", "runtime.quorum=1", "aggregate=trimmed_mean", "aggregate.trim=2")
    fed = federate(compose_config(*own))
    retraining, _ = make_retraining(fed.config, PLAIN_CNN, fed.cohort)
    for strategy in (make_search(fed.config, fed.data[0], fed.cohort), retraining):
        average = strategy.new_average()
        assert isinstance(average, TrimmedMean)
        assert average.trim == 2


# --- A round whose messages travel rounded, against the same round in float32


def round_with(compose_config, federate, wire, *, sent=None):
    """Return the states before and after a round, and the bytes in both directions.

    ``sent`` are weights to begin with in place of the initial ones.
    """
    own = ("rounds=1", "clients=2", "search_space.channels=8", f"runtime.wire={wire}")
    fed = federate(compose_config(*own))
    fed.cohort.wire = wire
    before = {n: p["float32"].clone() for n, p in fed.strategy.states.items()}
    if sent is not None:
        fed.strategy.states["weights"]["float32"].copy_(sent)
    fed.strategy.start(fed.grid, num_rounds=1)
    assert fed.events[-1]["event"] in ("alphas", "round")
    after = {n: p["float32"] for n, p in fed.strategy.states.items()}
    return before, after, (fed.cohort.bytes_sent, fed.cohort.bytes_received)


WIRES = [("float16", 0.52, 2e-3), ("int8", 0.28, 2e-2)]


@pytest.mark.parametrize(("wire", "bytes_share", "error"), WIRES)
def test_a_rounded_round_is_alike_but_for_noise(compose_config, federate, wire, bytes_share, error):
    """Clients train what rounding leaves; their updates are added to what it was before."""
    before, rounded, few = round_with(compose_config, federate, wire)
    packed = {"weights": {"float32": before["weights"]}}
    sent = restore_sent(round_sent(packed, action="train.search", wire=wire))["weights"]["float32"]
    assert 0 < (sent - before["weights"]).norm() < error * before["weights"].norm()
    _, exact, whole = round_with(compose_config, federate, "float32", sent=sent)
    assert all(own < bytes_share * all_ for own, all_ in zip(few, whole, strict=True))
    update = exact["weights"] - sent
    assert 0 < (rounded["weights"] - before["weights"] - update).norm() < error * update.norm()
    assert (rounded["alphas"] == exact["alphas"]).all()  # they are short


@pytest.mark.parametrize("wire", ["float16", "int8"])
def test_what_a_server_sends_is_rounded_to_the_nearest_value_and_only_to_be_trained(wire):
    weights = {"a": torch.linspace(-3, 5, 300), "b": torch.tensor([1e-9, -2.0])}
    states = {name: pack(weights) for name in ("weights", "moments", "previous_weights")}
    assert round_sent(states, action="evaluate.model", wire=wire) == states
    assert round_sent(states, action="train.weights", wire="float32") == states
    found = restore_sent(round_sent(states, action="train.weights", wire=wire))
    assert all(found[name] is states[name] for name in ("moments", "previous_weights"))
    vector = states["weights"]["float32"]
    steps = torch.stack([block.abs().max() for block in vector.split(256)])
    steps = steps.repeat_interleave(256)[:302] * (1 / 127 if wire == "int8" else 2.0**-10)
    assert bool(((found["weights"]["float32"] - vector).abs() <= steps / 2 * (1 + 1e-5)).all())
    again = round_sent({"weights": found["weights"]}, action="train.weights", wire=wire)
    assert torch.equal(restore_sent(again)["weights"]["float32"], found["weights"]["float32"])


@pytest.mark.parametrize("scales", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_client_refuses_rounded_weights_without_a_scale_for_each_block(scales):
    sent = {"rounded:int8": torch.ones(257, dtype=torch.int8)}
    if scales:
        sent["scales:float32"] = torch.tensor(scales)
    with pytest.raises(ConfigError, match="weights has 257 rounded values and .* one for each 256"):
        restore_sent({"weights": sent})


@pytest.mark.usefixtures("one_cell")
def test_weights_that_no_candidate_has_trained_travel_as_they_are(compose_config, federate):
    """DPNAS: what is rounded is the difference, which beside all paths is zero."""
    config = compose_config(
        *("algorithm=dpnas", "clients=2", "search_space=dp_cells", "retrain=dp_cells"),
        *("search_space.widths=[8]", "search_space.head=16", "algorithm.batch_size=16"),
        *("algorithm.trained_candidates=1", "algorithm.final_candidates=1", "runtime.wire=int8"),
    )
    fed = federate(config)
    fed.cohort.wire = config.runtime.wire
    before = fed.strategy.named_arrays().to_torch_state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    fed.strategy.start(fed.grid, num_rounds=1)
    after = fed.strategy.named_arrays().to_torch_state_dict()
    kept = {name for name, tensor in before.items() if torch.allclose(tensor, after[name])}
    assert 0.5 * len(before) < len(kept) < len(before)

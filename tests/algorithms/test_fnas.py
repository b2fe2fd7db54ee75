"""FNAS against plain-PyTorch loops on the pooled records, which know nothing of our strategy.

Through the real path: strategy, cohort, messages, in-process grid, ClientApp, actions.
"""

import math

import pytest
import torch

from fednas_flwr.data.loaders import step_batch
from fednas_flwr.runs.numbers import read_run

from ..booked import booked
from .plain import first_supernet, make_sgd, rate_of_round

ROUNDS = 3
UNEQUAL = ["clients=3", "partition=quantity", "partition.fractions=[0.6,0.3,0.1]"]
# Small steps: large ones blow up the rounding errors of float32 from round to round.
SGD = "{lr: 0.02, min_lr: 0.002, momentum: 0.9, weight_decay: 3.0e-4, clip_norm: 1.0}"
ADAM = "{lr: 0.03, weight_decay: 1.0e-3}"
GROUP = ["search_space.norm=group", f"algorithm.weights={SGD}", f"algorithm.alphas={ADAM}"]
FULL = [*GROUP, "algorithm.batch_size=null"]
# Rounding is of this order, and another algorithm far away, as a test below shows.
CLOSE = {"rtol": 0, "atol": 2e-6}
ALPHAS_CLOSE = {"rtol": 0, "atol": 2e-6}


class Plain:
    """Vanilla NAS as one would write it in a notebook: one process, pooled records."""

    def __init__(self, config, prepared):
        self.supernet = first_supernet(config, prepared).train()
        self.weights = list(self.supernet.weights().values())
        self.alphas = list(self.supernet.alphas().values())
        sgd, adam = config.algorithm.weights, config.algorithm.alphas
        self.sgd = sgd
        self.weight_optimizer = make_sgd(self.weights, sgd)
        own = {"lr": adam.lr, "weight_decay": adam.weight_decay}
        self.alpha_optimizer = torch.optim.Adam(self.alphas, betas=(0.5, 0.999), **own)

    def lr(self, step):
        return rate_of_round(self.sgd, 1 + step, ROUNDS)

    def step_weights(self, step, loss):
        """One step on a loss, or along gradients that are given."""
        self.weight_optimizer.param_groups[0]["lr"] = self.lr(step)
        for weight, gradient in zip(self.weights, self.gradients(loss, self.weights), strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(self.weights, self.sgd.clip_norm)
        self.weight_optimizer.step()

    def step_alphas(self, loss):
        for alpha, gradient in zip(self.alphas, self.gradients(loss, self.alphas), strict=True):
            alpha.grad = gradient
        self.alpha_optimizer.step()

    def gradients(self, loss, parameters):
        if isinstance(loss, list):
            return loss
        own = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return list(own)

    def mean_loss(self, batch):
        return torch.nn.functional.cross_entropy(self.supernet(batch[0]), batch[1])

    def assert_equals(self, strategy, *, weights=CLOSE, alphas=ALPHAS_CLOSE):
        weight_vector = torch.cat([w.detach().reshape(-1) for w in self.weights])
        alpha_vector = torch.cat([a.detach().reshape(-1) for a in self.alphas])
        torch.testing.assert_close(strategy.states["weights"]["float32"], weight_vector, **weights)
        torch.testing.assert_close(strategy.states["alphas"]["float32"], alpha_vector, **alphas)


def full(client, name):
    split = client.split(name)
    return split.batch(torch.arange(len(split)), "cpu")


def pooled(clients, name):
    batches = [full(client, name) for client in clients]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_mean_over_unequal_clients_equals_vanilla_nas_on_the_pooled_data(search):
    mean_run = search("algorithm=fnas", *FULL, *UNEQUAL, rounds=ROUNDS)
    sizes = [len(client.data.train) for client in mean_run.clients]
    assert sizes[0] > 3 * sizes[2]
    plain = Plain(mean_run.config, mean_run.data[0])
    for step in range(ROUNDS):
        plain.step_weights(step, plain.mean_loss(pooled(mean_run.clients, "train")))
        plain.step_alphas(plain.mean_loss(pooled(mean_run.clients, "validation")))
    plain.assert_equals(mean_run.strategy)


EXCHANGES = [("false", UNEQUAL, 0), ("true", ["clients=1"], 2)]


@pytest.mark.parametrize(("fused", "clients", "waits"), EXCHANGES)
def test_the_server_adds_the_regulariser_that_rises_over_the_rounds(fused, clients, waits, search):
    beta = ["algorithm.beta_decay=0.3", f"algorithm.fused={fused}"]
    beta.append(f"algorithm.warm_up_rounds={waits}")
    federation = search("algorithm=fnas", *FULL, *clients, *beta, rounds=ROUNDS)
    plain = Plain(federation.config, federation.data[0])
    for step in range(ROUNDS):
        held_out = pooled(federation.clients, "validation")
        before = plain.gradients(plain.mean_loss(held_out), plain.alphas)
        plain.step_weights(step, plain.mean_loss(pooled(federation.clients, "train")))
        decay = 0.3 * (step + 1) / ROUNDS * plain.alphas[0].logsumexp(-1).mean()
        if step < waits:
            continue
        if fused == "true":
            decays = plain.gradients(decay, plain.alphas)
            plain.step_alphas([g + d for g, d in zip(before, decays, strict=True)])
        else:
            plain.step_alphas(plain.mean_loss(held_out) + decay)
    plain.assert_equals(federation.strategy)


def test_second_order_with_one_client_equals_a_plain_loop(search):
    own = ("algorithm=vanilla_nas", "clients=1", "algorithm.order=2")
    federation = search(*FULL, *own, rounds=ROUNDS)
    plain = Plain(federation.config, federation.data[0])
    train, validation = (full(federation.clients[0], name) for name in ("train", "validation"))

    def alpha_gradients_at(weights):
        with torch.no_grad():
            for weight, value in zip(plain.weights, weights, strict=True):
                weight.copy_(value)
        return plain.gradients(plain.mean_loss(train), plain.alphas)

    largest_correction = 0.0
    for step in range(ROUNDS):
        old = [weight.detach().clone() for weight in plain.weights]
        plain.step_weights(step, plain.mean_loss(train))
        new = [weight.detach().clone() for weight in plain.weights]
        gradients = plain.gradients(plain.mean_loss(validation), plain.alphas + plain.weights)
        gradients, direction = gradients[: len(plain.alphas)], gradients[len(plain.alphas) :]
        r = 0.01 / torch.cat([d.reshape(-1) for d in direction]).norm()
        plus = alpha_gradients_at([w + r * d for w, d in zip(old, direction, strict=True)])
        minus = alpha_gradients_at([w - r * d for w, d in zip(old, direction, strict=True)])
        alpha_gradients_at(new)
        corrections = [plain.lr(step) * (p - m) / (2 * r) for p, m in zip(plus, minus, strict=True)]
        largest_correction = max(largest_correction, *(float(c.abs().max()) for c in corrections))
        plain.step_alphas([g - c for g, c in zip(gradients, corrections, strict=True)])
    assert largest_correction > 1e-5
    plain.assert_equals(federation.strategy)


def test_a_fused_exchange_halves_what_is_sent(search):
    """Its gradients are those of the plain loop above, with and without a regulariser."""
    sent = []
    for fused in ("true", "false"):
        own = ("algorithm=fnas", *FULL, "clients=1", f"algorithm.fused={fused}")
        first, *_ = search(*own, rounds=2).named("round")  # the last one measures, too
        sent.append(first["bytes_sent"])
    assert 2 * sent[0] == sent[1]


def test_local_steps_equal_a_plain_loop_of_local_descents(search):
    sizes = "clients=2 partition=quantity partition.fractions=[0.7,0.3]"
    steps = "algorithm.batch_size=16 algorithm.local_steps=2"
    federation = search("algorithm=fnas", *GROUP, sizes, steps, rounds=ROUNDS)
    config = federation.config
    plain = Plain(config, federation.data[0])

    def batches(client, name, step):
        split = client.split(name)
        for local in range(2 * step, 2 * step + 2):
            terms = {"seed": config.seed, "purpose": ("batches", name, client.index)}
            yield split.batch(step_batch(len(split), batch_size=16, step=local, **terms), "cpu")

    def exchange(name, step, parameters, lr):
        """Each client descends from the same point; their moves are averaged by batch size."""
        start = [parameter.detach().clone() for parameter in parameters]
        moves, sizes = [], []
        for client in federation.clients:
            total = [torch.zeros_like(p) for p in parameters]
            size = 0.0
            for batch in batches(client, name, step):
                gradients = plain.gradients(plain.mean_loss(batch), parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter -= lr * gradient
                total = [t + g for t, g in zip(total, gradients, strict=True)]
                size += len(batch[1]) / 2
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            moves.append(total)
            sizes.append(size)
        return [
            sum(s * m for s, m in zip(sizes, ms, strict=True)) / sum(sizes)
            for ms in zip(*moves, strict=True)
        ]

    assert len({len(c.data.train) for c in federation.clients}) == 2
    for step in range(ROUNDS):
        plain.step_weights(step, exchange("train", step, plain.weights, plain.lr(step)))
        plain.step_alphas(exchange("validation", step, plain.alphas, config.algorithm.alphas.lr))
    plain.assert_equals(federation.strategy)


def test_batch_norm_statistics_are_averaged_by_batch_and_counted_once(search):
    own = ("algorithm=fnas", *UNEQUAL, "search_space.norm=batch", "algorithm.batch_size=null")
    federation = search(*own)
    plain = Plain(federation.config, federation.data[0])
    initial = plain.supernet.state_dict()
    initial = {name: tensor.clone() for name, tensor in initial.items()}
    expected, sizes = {}, [len(client.data.train) for client in federation.clients]
    for client, size in zip(federation.clients, sizes, strict=True):
        plain.supernet.load_state_dict(initial)
        plain.supernet(full(client, "train")[0])
        for name, buffer in plain.supernet.named_buffers():
            expected[name] = expected.get(name, 0) + buffer.double() * size / sum(sizes)
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, buffer in expected.items():
        actual = arrays[f"buffers.{name}"]
        assert actual.dtype == initial[name].dtype
        torch.testing.assert_close(actual.double(), buffer, rtol=1e-5, atol=1e-6)
        if name.endswith("num_batches_tracked"):
            assert actual == 1


def test_a_deadline_is_of_one_start_alone(compose_config, federate):
    """Two stages share one cohort: what one is started with is not the other's."""
    federation = federate(compose_config("algorithm=fnas", *FULL, *UNEQUAL))
    known = []
    federation.cohort.emit = lambda event, **_: known.append(federation.cohort.deadline_s)
    federation.strategy.start(federation.grid, num_rounds=1, timeout=41.0)
    assert set(known) == {41.0}
    assert federation.cohort.deadline_s == math.inf
    federation.strategy.run_round = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        federation.strategy.start(federation.grid, num_rounds=2, timeout=41.0)
    assert federation.cohort.deadline_s == math.inf


def test_evaluation_on_validation_records_every_so_many_rounds_and_at_the_end(search):
    federation = search("algorithm=fnas", "clients=2", "algorithm.evaluate_every=2", rounds=3)
    rounds = federation.named("round")
    assert [e["round"] for e in rounds if "validation_accuracy" in e["metrics"]] == [2, 3]
    assert rounds[0]["bytes_received"] > 0
    for event in rounds:
        assert math.isfinite(event["metrics"]["train_loss"])
        assert set(event["clients"]) == {"0", "1"}


# --- beta-DARTS' regulariser with privacy: it reads no record, so it is neither clipped nor noised


PRIVATE = ["privacy=dp", "search_space.norm=group", "retrain.norm=group", "privacy.test_seed=5"]
SHORT = ["stages=[search]", "clients=2", "rounds=1", "search_space=nasbench201_small"]
HUGE = 1e4  # next to it, a clipped gradient and its noise are nothing


def moved(run):
    """Return the alphas after the only round; they begin within some thousandths of 0."""
    return torch.tensor(read_run(run.folder).alphas()[-1]["alphas"]["cell"])


@pytest.mark.parametrize("algorithm", ["fed_darts", "dp_fnas"])
def test_the_regulariser_comes_after_clipping_and_costs_nothing(algorithm, finished_run):
    """Adam's steps follow signs: all alphas go down alike, as far as the steps reach."""
    settings = [f"algorithm={algorithm}", *PRIVATE, *SHORT]
    plain = finished_run(*settings, "algorithm.beta_decay=0")
    decayed = finished_run(*settings, f"algorithm.beta_decay={HUGE}")
    down = moved(decayed)
    assert down.max() < 0
    assert down.std() < 0.05 * down.mean().abs()
    assert moved(plain).max() > 0  # noise goes both ways
    both = (booked(run.folder / "sites") for run in (decayed, plain))
    one, other = ([(row.action, row.release) for row in rows] for rows in both)
    assert one == other

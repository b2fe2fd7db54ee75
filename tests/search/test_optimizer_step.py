"""Steps and handed-over moments against torch's optimisers and one uninterrupted training."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search import optimizer_step
from fednas_flwr.search.exact_gradients import ExactGradients
from fednas_flwr.search.local_search import Alternating, alternate, train_candidates
from fednas_flwr.search.optimizer_step import Optimizer, Optimizers, make_adam, make_sgd, no_moments
from fednas_flwr.search.proxyless import SampledPaths, search_paths
from fednas_flwr.settings.optimizers import SGD, Adam
from fednas_flwr.spaces.dp_cells import DPCellSpace
from fednas_flwr.spaces.mlp import MLPSpace
from fednas_flwr.spaces.space import SearchSpace

from ..small_spaces import PATH_SPACE

ALPHAS = Adam(0.05, weight_decay=1e-3)
STEPS = 3  # of a request
MLP = MLPSpace(input_shape=(4,), num_classes=3, channels=8, num_cells=2)
CELLS = DPCellSpace(input_shape=(2, 6, 5), num_classes=3, widths=(4, 4, 8), head=8)


class Parts(nn.Module):
    """Weights and alphas of which any may lack a gradient."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterDict({n: torch.randn(3, 2) for n in "abc"})
        self.mixing = nn.ParameterDict({n: torch.randn(2, 4) for n in ("normal", "reduction")})

    def weights(self):
        return {f"parts.{name}": weight for name, weight in self.parts.items()}

    def alphas(self):
        return dict(self.mixing.items())


def drawn_gradients(network, steps):
    """Random gradients of each step by state; some are left out, some are None, some come late."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        one = {}
        for state, named in (("weights", network.weights()), ("alphas", network.alphas())):
            first, *_, last = named
            given = {n: torch.randn(p.shape, generator=generator) for n, p in named.items()}
            if step % 3 == 1:
                del given[first]
            if step < STEPS or step % 4 == 1:
                given[last] = None
            one[state] = given
        found.append(one)
    return found


def kept_moments(named, optimizer, state):
    """What an optimiser keeps, named as moments are; what it has not begun is left out."""
    return {
        f"{state}.{moment}.{name}": value
        for name, parameter in named.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def assert_moments(moments, kept):
    """Check that moments are what optimisers keep, and zeros of what they have not begun."""
    assert set(kept) <= set(moments)
    for name, value in moments.items():
        expected = kept[name].reshape(value.shape) if name in kept else torch.zeros_like(value)
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("beta", [0.5, 0.0], ids=["DARTS", "ProxylessNAS"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, True)])
def test_requests_with_moments_handed_over_are_one_training(momentum, nesterov, beta):
    """Bit by bit, with new optimisers in every request and gradients that are missing."""
    parts = Parts()
    twin = copy.deepcopy(parts)
    gradients, again = (drawn_gradients(parts, 4 * STEPS) for _ in range(2))
    settings = SGD(0.1, 0.0, momentum=momentum, weight_decay=0.01, clip_norm=0.5)
    weights, alphas = parts.weights(), parts.alphas()
    moments = no_moments(parts)
    for request in range(4):
        own = Optimizer(weights, make_sgd(weights.values(), settings, nesterov=nesterov), 0.5)
        others = Optimizer(alphas, make_adam(alphas.values(), ALPHAS, beta=beta))
        optimizers = Optimizers(own, others, moments)
        for one in gradients[request * STEPS :][:STEPS]:
            optimizers.alphas.step(one["alphas"])
            optimizers.weights.step(one["weights"])
        moments = optimizers.moments()

    weights, alphas = twin.weights(), twin.alphas()
    own = {"weight_decay": 0.01, "nesterov": nesterov and momentum > 0}
    sgd = torch.optim.SGD(weights.values(), 0.1, momentum, **own)
    adam = torch.optim.Adam(alphas.values(), 0.05, (beta, 0.999), weight_decay=1e-3)
    for one in again:
        for state, named in (("alphas", alphas), ("weights", weights)):
            for name, parameter in named.items():
                parameter.grad = one[state].get(name)
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.5)
        adam.step()
        sgd.step()
    for (name, found), expected in zip(parts.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected), name
    kept = kept_moments(weights, sgd, "weights") | kept_moments(alphas, adam, "alphas")
    assert_moments(moments, kept)
    assert len(kept) == (3 if momentum else 0) + 2 * 3


@dataclass
class Stream:
    """A local loop on endless batches, which goes on where its last steps ended.

    Attributes:
        space: Of the supernet that is trained.
        loop: Takes the stream, gradients and optimizers.
        nesterov: Of the weights' momentum.
        beta: Of Adam; None trains no alphas.
    """

    space: SearchSpace
    loop: Callable[..., None]
    nesterov: bool = False
    beta: float | None = None

    def __post_init__(self):
        with seeded(1, "supernet"):
            self.network = self.space.supernet()
        self.train, self.validation = self.batches("train"), self.batches("validation")
        self.generator = make_generator(2, "paths")

    def batches(self, name):
        generator = make_generator(0, name)
        while True:
            x = torch.randn(5, *self.space.input_shape, generator=generator)
            yield x, torch.randint(3, (5,), generator=generator)

    def optimizers(self, sent):
        """Make new optimisers that go on with what was sent."""
        weights, alphas = self.network.weights(), self.network.alphas()
        settings = SGD(0.1, 0.0, momentum=0.9, weight_decay=0.01, clip_norm=1.0)
        own = Optimizer(weights, make_sgd(weights.values(), settings, nesterov=self.nesterov), 1.0)
        if self.beta is None:
            return Optimizers(own, sent=sent)
        adam = make_adam(alphas.values(), ALPHAS, beta=self.beta)
        return Optimizers(own, Optimizer(alphas, adam), sent)

    def take(self, steps, optimizers):
        gradients = ExactGradients(lambda: self.train, lambda: self.validation, num_steps=steps)
        self.steps = steps
        self.loop(self, gradients, optimizers)


def all_ops(rule):
    def loop(stream, gradients, optimizers):
        alternate(stream.network, gradients, optimizers, Alternating(rule))

    return partial(Stream, MLP, loop, beta=0.5)


def paths(*, warm_up):
    settings = SampledPaths(warm_up, None)

    def loop(stream, gradients, optimizers):
        search_paths(stream.network, gradients, optimizers, settings, generator=stream.generator)

    return partial(Stream, PATH_SPACE, loop, nesterov=True, beta=0.0)


def candidates(stream, gradients, optimizers):
    drawn = [CELLS.path(CELLS.random_genotype(stream.generator)) for _ in range(stream.steps)]
    train_candidates(stream.network, drawn, gradients, optimizers.weights, steps=1)


def weights_alone(stream, gradients, optimizers):
    optimizer_step.train(stream.network, gradients, optimizers.weights)


STREAMS = {
    **{rule: all_ops(rule) for rule in ("first_order", "second_order", "mixed_level")},
    "paths": paths(warm_up=False),
    "warm-up": paths(warm_up=True),
    "candidates": partial(Stream, CELLS, candidates),
    "weights alone": partial(Stream, MLP, weights_alone),
}
PARTIAL = ("paths", "warm-up", "candidates")  # steps that leave weights out


@pytest.mark.parametrize("name", STREAMS)
def test_two_requests_of_every_loop_are_one_training(name):
    """Bit by bit, also where weights have no gradient in some steps, or in all of them."""
    whole, parted = STREAMS[name](), STREAMS[name]()
    before = copy.deepcopy(whole.network.state_dict())
    lone = whole.optimizers({})
    whole.take(2 * STEPS, lone)
    sent, begun = no_moments(parted.network), []
    for _ in range(2):
        given = {key: value.clone() for key, value in sent.items()}
        optimizers = parted.optimizers(sent)
        parted.take(STEPS, optimizers)
        assert all(torch.equal(value, sent[key]) for key, value in given.items())  # as it came
        sent = optimizers.moments()
        begun.append({key for key, value in sent.items() if value.any()})
    after = whole.network.state_dict()
    assert sum(not torch.equal(tensor, before[key]) for key, tensor in after.items()) > 5
    for key, tensor in parted.network.state_dict().items():
        assert torch.equal(tensor, after[key]), key
    kept = kept_moments(whole.network.weights(), lone.weights.torch_optimizer, "weights")
    if lone.alphas is not None:
        kept |= kept_moments(whole.network.alphas(), lone.alphas.torch_optimizer, "alphas")
    assert_moments(sent, kept)
    late = {key for key in begun[1] - begun[0] if key.startswith("weights.")}
    idle = {key for key in sent if key.startswith("weights.") and key not in kept}
    assert bool(late) == bool(idle) == (name in PARTIAL)


@pytest.mark.parametrize("name", STREAMS)
def test_moments_are_named_and_shaped_as_those_of_the_network(name):
    stream = STREAMS[name]()
    none = no_moments(stream.network)
    weights = stream.network.weights()
    expected = {f"weights.momentum_buffer.{n}": weight.shape for n, weight in weights.items()}
    for kind, alpha in stream.network.alphas().items():
        expected |= {f"alphas.{moment}.{kind}": alpha.shape for moment in ("exp_avg", "exp_avg_sq")}
        expected[f"alphas.step.{kind}"] = torch.Size([1])
    assert {key: value.shape for key, value in none.items()} == expected
    assert not any(value.any() for value in none.values())
    optimizers = stream.optimizers(none)
    stream.take(1, optimizers)
    found = optimizers.moments()
    assert {key: value.shape for key, value in found.items()} == expected
    assert {value.dtype for value in found.values()} == {torch.float32}
    without = stream.optimizers({})
    stream.take(1, without)
    assert without.moments() == {}
    assert without.weights.torch_optimizer.state  # there would be some


def test_a_network_without_alphas_has_moments_of_its_parameters():
    found = {key: value.shape for key, value in no_moments(nn.Linear(2, 3)).items()}
    assert found == {"weights.momentum_buffer.weight": (3, 2), "weights.momentum_buffer.bias": (3,)}


@pytest.mark.parametrize("name", ["candidates", "warm-up"])
def test_moments_of_alphas_that_stay_are_returned_as_they_were_sent(name):
    stream = STREAMS[name]()
    sent = {
        key: torch.full_like(value, 2.0) if key.startswith("alphas.") else value
        for key, value in no_moments(stream.network).items()
    }
    optimizers = stream.optimizers(sent)
    stream.take(2, optimizers)
    found = optimizers.moments()
    for key, value in found.items():
        if key.startswith("alphas."):
            assert torch.equal(value, sent[key]), key
            assert value is not sent[key]
    assert any(value.any() for key, value in found.items() if key.startswith("weights."))


PLAIN = [
    (optimizer_step.PlainSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optimizer_step.PlainAdam, torch.optim.Adam, {"betas": (0.5, 0.999)}),
]


@pytest.mark.parametrize(("ours", "torchs", "constants"), PLAIN)
def test_optimisers_step_as_torchs_own(ours, torchs, constants):
    layers = [nn.Linear(3, 2) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [
        kind(layer.parameters(), lr=0.1, weight_decay=0.01, **constants)
        for kind, layer in zip((ours, torchs), layers, strict=True)
    ]
    assert isinstance(optimizers[0], torchs)
    for step in range(3):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            layer(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
            optimizer.step()
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(one, other)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert repr(states[0]) == repr(states[1])


def test_the_learning_rate_falls_along_a_cosine():
    settings = SGD(0.1, 0.02, momentum=0.9, weight_decay=3e-4, clip_norm=5.0)
    made = [settings.at_round(number, 8) for number in (1, 5, 9)]  # the last: after all rounds
    assert [one.lr for one in made] == pytest.approx([0.1, 0.06, 0.02])
    assert {replace(one, lr=0.1) for one in made} == {settings}


def test_trainable_weights_leave_the_alphas_out(net):
    found = set(optimizer_step.trainable_weights(net))
    assert found == {n for n, _ in net.named_parameters() if n[0] != "a"}
    assert set(optimizer_step.trainable_weights(nn.Linear(1, 1))) == {"weight", "bias"}

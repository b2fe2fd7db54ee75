"""Local steps of ProxylessNAS against explicit ones of torch's optimisers on derived networks."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search import proxyless
from fednas_flwr.search.exact_gradients import ExactGradients
from fednas_flwr.search.proxyless import SampledPaths, draw_paths, gate_gradient, search_paths
from fednas_flwr.settings import Hardware
from fednas_flwr.settings.optimizers import SGD, Adam
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.mbconv import NEVER

from ..small_spaces import PATH_COSTS as COSTS
from ..small_spaces import PATH_SPACE as SPACE
from .conftest import tensors_of
from .test_local_search import optimizers_of

WEIGHTS = SGD(0.1, 0.0, momentum=0.9, weight_decay=0.01, clip_norm=1.0)
ALPHAS = Adam(0.01, weight_decay=0.0)
SEARCHED = {"beta": 0.0, "nesterov": True}  # as the paper does


@pytest.fixture
def supernet():
    with seeded(1, "supernet"):
        supernet = SPACE.supernet().double()
        torch.nn.init.normal_(supernet.body.after[1][2].weight)
    return supernet


def batches(count, start=0):
    for seed in range(start, start + count):
        yield tensors_of((2, 4, 4), 3, 5, make_generator(seed, "batch"))


class AlphasOnly(ExactGradients):
    """Those of the alphas alone, so that nothing of a weight step may be seen."""

    def weights(self, network):
        return {}


@pytest.mark.parametrize("warm_up", [False, True])
def test_weight_steps_train_the_derived_networks_of_drawn_paths(supernet, warm_up):
    """Nesterov SGD with clipping on the path's own network; all else stays as it is.

    The alphas have a learning rate of zero and so stay, too.
    """
    optimizers = optimizers_of(supernet, WEIGHTS, Adam(0.0, 0.0), **SEARCHED)
    generator, again = (make_generator(0, "paths") for _ in range(2))
    momenta = {}
    alphas = supernet.alphas()["blocks"]
    for batch in batches(5):
        before = copy.deepcopy(supernet.state_dict())
        if not warm_up:
            draw_paths(alphas, number=2, generator=again)  # of the alpha step
        drawn_from = proxyless.uniform_alphas(alphas) if warm_up else alphas
        path = draw_paths(drawn_from, number=1, generator=again)[:, 0].tolist()
        network = SPACE.network(SPACE.genotype(path)).double()
        network.load_state_dict({name: before[f"body.{name}"] for name in network.state_dict()})
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
        sgd = torch.optim.SGD(network.parameters(), **settings)
        for name, weight in network.named_parameters():
            if name in momenta:
                sgd.state[weight]["momentum_buffer"] = momenta[name]
        loss = F.cross_entropy(network(batch[0]), batch[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        sgd.step()
        for name, weight in network.named_parameters():
            momenta[name] = sgd.state[weight]["momentum_buffer"]

        gradients = ExactGradients(lambda batch=batch: iter([batch]), lambda: batches(1, start=100))
        paths = SampledPaths(warm_up, None)
        search_paths(supernet, gradients, optimizers, paths, generator=generator)
        assert gradients.train_tally.loss == pytest.approx(loss.item())
        trained = network.state_dict()
        for name, tensor in supernet.state_dict().items():
            expected = trained.get(name.removeprefix("body."), before[name])
            torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-12)


def alpha_step(supernet, batch, optimizers, generator):
    """One step of the alphas on a validation batch."""
    gradients = AlphasOnly(lambda: batches(1, start=100), lambda: iter([batch]))
    paths = SampledPaths(False, None)
    search_paths(supernet, gradients, optimizers, paths, generator=generator)
    assert gradients.validation_tally.num_examples == len(batch[1])


def test_alpha_steps_move_only_sampled_probabilities(supernet):
    optimizers = optimizers_of(supernet, WEIGHTS, ALPHAS, **SEARCHED)
    generator, again = (make_generator(0, "paths") for _ in range(2))
    weights = copy.deepcopy(supernet.weights())
    alphas = supernet.alphas()["blocks"]
    for batch in batches(20):
        before = alphas.detach().clone()
        pairs = draw_paths(alphas, number=2, generator=again)
        alpha_step(supernet, batch, optimizers, generator)
        draw_paths(alphas, number=1, generator=again)  # of the weight step
        sampled = torch.zeros(3, 4, dtype=torch.bool).scatter(1, pairs, True)
        change = alphas.softmax(-1) - before.softmax(-1)
        assert change[~sampled].abs().max() < 1e-15
        assert (alphas - before).gather(-1, pairs).abs().min() > 1e-6
        assert torch.equal(alphas[~sampled], before[~sampled])
    assert alphas[2, 3] == NEVER
    assert all(torch.equal(w, weights[name]) for name, w in supernet.weights().items())


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
def test_hardware_adds_the_gradient_of_the_expected_cost(supernet, form):
    """Of all ops, by the chain rule on CE and on E through softmax(alphas)."""
    hardware = HardwareLoss.of(COSTS, Hardware(None, "ms", 8.0, form, 0.7, 0.6))
    batch = next(batches(1))
    alphas = supernet.alphas()["blocks"].detach().requires_grad_()
    paths = draw_paths(alphas, number=4, generator=make_generator(0, "paths"))
    plain, losses = gate_gradient(supernet, batch, paths)
    found, _ = gate_gradient(supernet, batch, paths, hardware=hardware)

    task, cost = losses.mean().requires_grad_(), COSTS.expected(alphas.softmax(-1))
    by_task, by_alphas = torch.autograd.grad(hardware(task, cost), [task, alphas])
    expected = by_task * proxyless.alpha_gradient(plain, alphas, paths) + by_alphas
    found = proxyless.alpha_gradient(found, alphas, paths)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert by_alphas.abs().max() > 1e-3


def test_warm_up_trains_uniform_paths_and_no_alphas(supernet):
    alphas = supernet.alphas()["blocks"]
    with torch.no_grad():
        alphas[:, 0] = 100.0  # else the only path
    before = copy.deepcopy(supernet.state_dict())
    gradients = ExactGradients(lambda: batches(20), lambda: batches(22, start=100))
    optimizers = optimizers_of(supernet, WEIGHTS, ALPHAS, **SEARCHED)
    generator = make_generator(0, "paths")
    search_paths(supernet, gradients, optimizers, SampledPaths(True, None), generator=generator)
    seen = gradients.train_tally, gradients.validation_tally
    assert tuple(tally.num_examples for tally in seen) == (100, 0)
    after = supernet.state_dict()
    assert torch.equal(after["alphas.blocks"], before["alphas.blocks"])
    for op in SPACE.ops[:3]:
        name = f"body.blocks.2.ops.{op}.project.weight"
        assert not torch.equal(after[name], before[name])

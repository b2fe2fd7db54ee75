"""No step waits for a GPU or has a tensor on another device: each runs on the ``meta`` device.

There ``.item()`` and the like fail, as does an operation of two devices. Left out are steps of
paths that are drawn from the alphas: what is to be computed must be known before.
"""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.models.networks import FIXED_NETWORKS
from fednas_flwr.privacy.mechanism.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.exact_gradients import BatchGradients
from fednas_flwr.search.objective import CLASSIFICATION
from fednas_flwr.search.optimizer_step import Optimizer, make_adam, make_sgd
from fednas_flwr.settings.optimizers import NORMED_NETWORKS, SGD, Adam

from ..rows import seldom
from ..small_spaces import SPACES

WEIGHTS = SGD(lr=0.1, min_lr=0.1, momentum=0.9, weight_decay=1e-4, clip_norm=5.0)
ALPHAS = Adam(lr=0.1, weight_decay=1e-3)


def records(space):
    with torch.device("meta"):
        return torch.empty(4, *space.input_shape), torch.empty(4, dtype=torch.long)


def take(parameters, given, optimizer):
    """Take a step, and see that it leaves nothing elsewhere."""
    assert any(gradient is not None for gradient in given.values())
    Optimizer(parameters, optimizer, WEIGHTS.clip_norm).step(given)
    assert {parameter.device.type for parameter in parameters.values()} == {"meta"}


def step_weights(parameters, given):
    take(parameters, given, make_sgd(parameters.values(), WEIGHTS))


def step_alphas(supernet, given):
    alphas = {f"alphas.{kind}": alpha for kind, alpha in supernet.alphas().items()}
    named = {f"alphas.{kind}": gradient for kind, gradient in given.items()}
    take(alphas, named, make_adam(alphas.values(), ALPHAS))


@pytest.fixture(params=SPACES)
def space(request, one_cell):
    sizes = {"widths": (8,)} if request.param.startswith("dp_cells") else {}
    return replace(SPACES[request.param], norm="group", skip="linear", **sizes)


def on_meta(make):
    with torch.device("meta"):
        return make().train()


@pytest.mark.run
def test_plain_steps_of_a_supernet(space):
    supernet = on_meta(replace(space, norm="batch").supernet)
    batch, gradients = records(space), BatchGradients()
    step_weights(supernet.weights(), gradients.weight_gradient(supernet, batch))
    step_alphas(supernet, gradients.alpha_gradient_sum(supernet, batch)[0])
    assert gradients.train_tally.num_examples == 4


SUPERNETS = [
    seldom(name) if name in ("darts", "dp_cells_darts", "mbconv") else name for name in SPACES
]


@pytest.mark.parametrize("space", SUPERNETS, indirect=True)
def test_private_steps_of_a_supernet(space):
    supernet = on_meta(space.supernet)
    x, y = records(space)
    check_private(supernet, x, y, supernet.weights())
    alphas, terms = supernet.alphas(), {"loss": CLASSIFICATION.plain_losses, "max_norm": 1.0}
    step_alphas(supernet, clipped_alpha_gradient_sum(supernet, x, y, alphas=alphas, **terms))


def test_plain_and_private_steps_of_a_derived_network(space):
    genotype = space.random_genotype(torch.Generator())
    check_network(on_meta(lambda: space.network(genotype)), *records(space))


GIVEN_NETWORKS = [seldom("mobilenet_v2"), "resnet8_4", "plain_cnn", "linear", "mlp_64", "cnn_tanh"]


@pytest.mark.parametrize("name", GIVEN_NETWORKS)
def test_plain_and_private_steps_of_a_given_network(name):
    norm = {"norm": "group"} if name in NORMED_NETWORKS else {}
    x = torch.empty(4, 3, 16, 16, device="meta")
    network = on_meta(lambda: FIXED_NETWORKS[name]((3, 16, 16), 5, **norm))
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    check_network(network, x, torch.empty(4, dtype=torch.long, device="meta"))


def check_private(network, x, y, weights):
    terms = {"loss": CLASSIFICATION.plain_losses, "max_norm": 1.0}
    step_weights(weights, clipped_gradient_sum(network, x, y, parameters=weights, **terms))


def check_network(network, x, y):
    weights = dict(network.named_parameters())
    step_weights(weights, BatchGradients().weight_gradient(network, (x, y)))
    check_private(network, x, y, weights)


def test_steps_of_a_candidate_that_shares_weights():
    space = SPACES["dp_cells"]
    candidate = Candidate(on_meta(space.supernet), [len(space.ops) - 1] * space.cell_kinds["cell"])
    x, y = records(space)
    step_weights(candidate.weights(), BatchGradients().weight_gradient(candidate, (x, y)))
    check_private(candidate, x, y, candidate.weights())

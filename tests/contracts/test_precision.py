"""Gradients in bfloat16 are near those in float32, in every space."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.exact_gradients import ExactGradients, ExactSums
from fednas_flwr.search.objective import Objective
from fednas_flwr.search.optimizer_step import Optimizer, make_sgd
from fednas_flwr.search.proxyless import PathNetwork, draw_paths, drawable_alphas
from fednas_flwr.settings.names import BFLOAT16, FLOAT32, PRECISIONS
from fednas_flwr.settings.optimizers import SGD

from ..rows import seldom
from ..small_spaces import CLASSES, SPACES

WEIGHTS = SGD(lr=0.01, min_lr=0.01, momentum=0.9, weight_decay=1e-4, clip_norm=None)
LABELS = {False: torch.arange(16) % CLASSES, True: (torch.arange(16 * CLASSES) % 2).view(16, -1)}


@pytest.fixture(params=SPACES)
def space(request):
    return replace(SPACES[request.param], norm="group", skip="linear")


def make(space):
    with seeded(1, "supernet"):
        return space.supernet().train()


def exact(space, precision, *, several=False):
    """Return gradients of one batch, of which the only step has begun."""
    x = torch.randn(16, *space.input_shape, generator=make_generator(0, "examples"))

    def batches():
        yield x, LABELS[several]

    objective = Objective(multi_label=several)
    gradients = ExactGradients(batches, batches, precision=precision, objective=objective)
    next(gradients.steps())
    return gradients


def alphas_by(rule, gradients, supernet, weights):
    return gradients.alphas(supernet, weights, rule=rule)


def check_near(found):
    """Check that gradients differ, that all are float32, and that they point one way."""
    joined = {}
    for precision, gradient in found.items():
        own = [value for value in gradient.values() if value is not None]
        assert own
        assert {value.dtype for value in own} == {torch.float32}
        joined[precision] = torch.cat([value.flatten() for value in own])
    assert not torch.equal(joined[FLOAT32], joined[BFLOAT16])
    assert torch.cosine_similarity(*joined.values(), dim=0) > 0.9
    # Norms of a few almost equal numbers, as in these small networks, amplify what is rounded.
    assert 0.5 < joined[BFLOAT16].norm() / joined[FLOAT32].norm() < 2


NORMS = [("batch", True), seldom("group", False)]


@pytest.mark.parametrize(("norm", "several"), NORMS, ids=["several labels", "one class"])
def test_gradients_of_weights(space, norm, several):
    supernet = make(replace(space, norm=norm))
    found = {}
    for precision in PRECISIONS:
        gradients = exact(space, precision, several=several)
        found[precision] = gradients.weights(supernet)
        assert gradients.train_tally.num_examples == 16
    check_near(found)
    dtypes = {tensor.dtype for tensor in supernet.state_dict().values()}
    assert dtypes <= {torch.float32, torch.int64}


@pytest.mark.parametrize("rule", ["first_order", seldom("mixed_level")])
def test_gradients_of_alphas(space, rule):
    supernet = make(space)
    weights = Optimizer(supernet.weights(), make_sgd(supernet.weights().values(), WEIGHTS))
    check_near({p: alphas_by(rule, exact(space, p), supernet, weights) for p in PRECISIONS})


def test_finite_differences_stay_float32():
    space = SPACES["mlp"]
    supernet = make(space)
    weights = Optimizer(supernet.weights(), make_sgd(supernet.weights().values(), WEIGHTS))
    found = [alphas_by("second_order", exact(space, p), supernet, weights) for p in PRECISIONS]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_gradients_of_a_derived_network(space):
    genotype = space.random_genotype(make_generator(0, "genotype"))
    with seeded(1, "network"):
        network = space.network(genotype).train()
    check_near({p: exact(space, p).weights(network) for p in PRECISIONS})


def test_gradients_of_drawn_paths():
    space = replace(SPACES["mbconv"], norm="group")
    supernet, generator = make(space), make_generator(0, "paths")
    alphas_EO = drawable_alphas(supernet)
    path_E1 = draw_paths(alphas_EO, number=1, generator=generator)
    paths_EK = draw_paths(alphas_EO, number=2, generator=generator)
    network = PathNetwork(supernet, path_E1)
    check_near({p: exact(space, p).weights(network) for p in PRECISIONS})
    check_near({p: {"": exact(space, p).gates(supernet, paths_EK, None)} for p in PRECISIONS})


def test_sums_of_gradients(space):
    supernet = make(space)
    x = torch.randn(16, *space.input_shape, generator=make_generator(0, "examples"))
    for state in ("weights", "alphas"):
        found = {}
        for precision in PRECISIONS:
            batches = iter([(x, LABELS[False])])
            exact = ExactSums(batches, batches, precision=precision)
            found[precision], size = exact.sums(state, supernet)
            assert size == 16
        check_near(found)

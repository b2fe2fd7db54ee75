"""Gates against enumeration: of ops, of pairs of ops, and of all paths of a tiny supernet."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search import proxyless
from fednas_flwr.spaces.mbconv import NEVER, MBConvSpace, Skeleton

from .conftest import tensors_of

DRAWS = 4000
ALPHAS = torch.tensor([[0.5, -1.0, 0.2, 1.5], [0.0, 2.0, -0.5, NEVER]], dtype=torch.float64)

TINY = MBConvSpace(  # 2 blocks, 3 ops, the first op of the second block is not offered
    input_shape=(2, 4, 4),
    num_classes=3,
    skeleton=Skeleton(8, 1, 8, ((8, 1), (16, 1)), (2,), 8),
    candidates=("zero", "mbconv2_3x3", "mbconv3_5x5"),
    norm="group",
)
TINY_PATHS = list(itertools.product(*TINY.offered))


@pytest.fixture
def supernet():
    with seeded(3, "tiny"):
        supernet = TINY.supernet().double()
        alphas = supernet.alphas()["blocks"]
        alphas.data = torch.where(alphas == NEVER, NEVER, torch.randn_like(alphas))
        torch.nn.init.normal_(supernet.body.after[1][2].weight)  # so that losses differ
    return supernet


def frequencies(paths, num_ops):
    """Share of draws [E, O] in which an op is among the given columns."""
    return F.one_hot(torch.stack(paths), num_ops).double().sum(2).mean(0)


def draw_many(number, alphas=ALPHAS):
    generator = make_generator(0, f"{number} paths")
    return [proxyless.draw_paths(alphas, number=number, generator=generator) for _ in range(DRAWS)]


# Standard deviation of a share is at most .5 / sqrt(4000) = .008.
@pytest.mark.parametrize("number", [1, 4])
def test_the_active_op_is_drawn_from_the_softmax(number):
    active = [paths[:, :1] for paths in draw_many(number)]
    torch.testing.assert_close(frequencies(active, 4), ALPHAS.softmax(-1), rtol=0, atol=0.03)


def test_two_ops_are_drawn_without_replacement_and_one_by_their_softmax():
    draws = draw_many(2)
    p = ALPHAS.softmax(-1)
    for block in range(2):
        seen = {}
        for paths in draws:
            seen.setdefault(tuple(sorted(paths[block].tolist())), []).append(int(paths[block, 0]))
        for i, j in itertools.combinations(range(4), 2):
            actives = seen.get((i, j), [])
            p_i, p_j = p[block, i].item(), p[block, j].item()
            share = p_i * p_j / (1 - p_i) + p_i * p_j / (1 - p_j)
            assert len(actives) / DRAWS == pytest.approx(share, abs=0.03)
            if len(actives) > 400:
                expected = p_i / (p_i + p_j)
                assert actives.count(i) / len(actives) == pytest.approx(expected, abs=0.08)


def test_what_is_not_offered_comes_last_even_where_probabilities_underflow():
    alphas = torch.tensor([[900.0, 0.0, -900.0, NEVER]])
    for expected in ([0], [0, 1], [0, 1, 2, 3]):
        generator = make_generator(0, "underflow")
        paths = proxyless.draw_paths(alphas, number=len(expected), generator=generator)
        assert paths.tolist() == [expected]


def test_uniform_paths_ignore_the_alphas_but_not_what_is_offered():
    drawn = frequencies(draw_many(1, proxyless.uniform_alphas(ALPHAS)), 4)
    expected = torch.tensor([[1 / 4] * 4, [1 / 3] * 3 + [0]], dtype=torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("batch", [(), (5,)])
def test_full_gradient_is_autograds_through_the_softmax(batch):
    gates = torch.randn(*batch, 2, 4, dtype=torch.float64)
    paths = torch.tensor([[2, 0, 3, 1], [0, 1, 2, 3]])
    alphas = ALPHAS.clone().requires_grad_()
    probabilities = alphas.softmax(-1).gather(-1, paths)
    for index in itertools.product(*map(range, batch)):
        loss = (probabilities * gates[index]).sum()
        (expected,) = torch.autograd.grad(loss, [alphas], retain_graph=True)
        found = proxyless.alpha_gradient(gates, alphas, paths)[index]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_the_gradient_of_two_is_that_of_their_own_softmax_and_zero_elsewhere():
    gates = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
    found = proxyless.alpha_gradient(gates, ALPHAS, torch.tensor([[1, 3], [2, 0]]))
    a, b = (1 / (1 + torch.exp(d)) for d in (torch.tensor(2.5), torch.tensor(0.5)))
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0, 1], expected[1, 2] = a * (1 - a) * 3, b * (1 - b) * 2.5
    expected[0, 3], expected[1, 0] = -expected[0, 1], -expected[1, 2]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


reals = st.floats(-60, 60)


@given(old=st.tuples(*[reals] * 5), steps=st.tuples(reals, reals), pair=st.permutations(range(5)))
def test_rescaling_keeps_every_unsampled_probability(old, steps, pair):
    """Also for alphas so far apart that exp would overflow single precision."""
    old_EO = torch.tensor([old], dtype=torch.float64)
    paths = torch.tensor([pair[:2]])
    new_EO = old_EO.scatter_add(-1, paths, torch.tensor([steps], dtype=torch.float64))
    scaled = proxyless.rescale(new_EO, old_EO, paths)
    rest = list(pair[2:])
    assert torch.equal(scaled[:, rest], old_EO[:, rest])
    log_p, before = scaled.log_softmax(-1), old_EO.log_softmax(-1)
    torch.testing.assert_close(log_p[:, rest], before[:, rest], rtol=1e-9, atol=1e-9)
    difference = new_EO.gather(-1, paths).diff()
    torch.testing.assert_close(scaled.gather(-1, paths).diff(), difference, rtol=0, atol=1e-9)


@pytest.mark.parametrize("number", [2, 3])
def test_gate_gradients_of_every_path_equal_finite_differences(supernet, number):
    """All active paths and all pairs: dL/dg at one-hot gates, without and with the graph."""
    batch = tensors_of((2, 4, 4), 3, 6, make_generator(0, "batch"))

    def loss(gates_EO):  # a function of all gates, every op computed with its graph
        return F.cross_entropy(supernet(batch[0], {"blocks": gates_EO}), batch[1]).item()

    for active in TINY_PATHS:
        others = [[o for o in row if o != a] for row, a in zip(TINY.offered, active, strict=True)]
        if number == 3:
            missing = [[o for o in range(3) if o not in row] for row in TINY.offered]
            choices = [[[a, *o, *m] for a, o, m in zip(active, others, missing, strict=True)]]
        else:
            choices = [[*zip(active, other, strict=True)] for other in itertools.product(*others)]
        one_hot = F.one_hot(torch.tensor(active), 3).double()
        for paths in map(torch.tensor, choices):
            gradients, _ = proxyless.gate_gradient(supernet, batch, paths)
            for block, position in itertools.product(range(2), range(paths.shape[1])):
                moved = torch.zeros_like(one_hot)
                moved[block, paths[block, position]] = 1e-5
                expected = (loss(one_hot + moved) - loss(one_hot - moved)) / 2e-5
                assert gradients[block, position].item() == pytest.approx(expected, abs=1e-6)

"""Drawn paths as networks: clipped sums against loops over records, and draws that cannot fail."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.privacy.mechanism import clipping
from fednas_flwr.search import proxyless
from fednas_flwr.search.objective import CLASSIFICATION
from fednas_flwr.search.proxyless import (
    PathNetwork,
    alpha_gradient,
    covering_paths,
    draw_paths,
    drawable_alphas,
    gate_gradient,
    offered_ops,
)
from fednas_flwr.settings import Hardware
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.darts import DARTSSpace

from ..refusals import refuses
from ..small_spaces import PATH_COSTS as COSTS
from ..small_spaces import PATH_SPACE as SPACE
from .conftest import tensors_of

MULTIPLICATIVE, ADDITIVE = (
    HardwareLoss.of(COSTS, Hardware(None, "ms", 8.0, form, 0.7, 0.6))
    for form in ("multiplicative", "additive")
)


@pytest.fixture(scope="module")
def supernet():
    with seeded(1, "supernet"):
        supernet = SPACE.supernet().double().train()
        torch.nn.init.normal_(supernet.body.after[1][2].weight)
        alphas = supernet.alphas()["blocks"]
        alphas.data = torch.where(alphas.data > -1, 0.5 * torch.randn(3, 4).double(), alphas.data)
    return supernet


@pytest.fixture(scope="module")
def records():
    return tensors_of((2, 4, 4), 3, 6, make_generator(1, "batch"))


def paths(supernet, number, seed=0):
    generator = make_generator(seed, "paths")
    return draw_paths(drawable_alphas(supernet), number=number, generator=generator)


def clip_to(gradients, norm):
    """Return the sum over records of what is clipped, and the records' norms."""
    lengths = [torch.cat([g.reshape(-1) for g in record]).norm().item() for record in gradients]
    scales = [min(1.0, norm / length) for length in lengths]
    parts = zip(*gradients, strict=True)
    return [sum(s * g for s, g in zip(scales, part, strict=True)) for part in parts], lengths


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("seed", range(4))
def test_weights_of_a_path_are_clipped_as_those_of_its_derived_network(seed, supernet, records):
    path = paths(supernet, 1, seed)
    network = PathNetwork(supernet, path)
    derived = SPACE.network(SPACE.genotype(path[:, 0].tolist())).double()
    own, state = network.weights(), supernet.state_dict()
    derived.load_state_dict({n: state[f"body.{n}"] for n in derived.state_dict()})
    assert list(own) == [f"body.{name}" for name, _ in derived.named_parameters()]
    gradients = []
    for i in range(len(records[1])):
        loss = F.cross_entropy(derived(records[0][i : i + 1]), records[1][i : i + 1])
        gradients.append(torch.autograd.grad(loss, list(derived.parameters())))
    lengths = clip_to(gradients, 1.0)[1]
    norm = sorted(lengths)[3]  # some are clipped, some are not
    expected, _ = clip_to(gradients, norm)
    sums = clipping.clipped_gradient_sum(
        network,
        *records,
        loss=CLASSIFICATION.plain_losses,
        parameters=own,
        max_norm=norm,
        micro_batch_size=4,
    )
    assert list(sums) == list(own)
    for found, wanted in zip(sums.values(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("hardware", [None, MULTIPLICATIVE], ids=["plain", "multiplicative"])
@pytest.mark.parametrize("number", [2, 4])
def test_alphas_are_clipped_by_record_through_the_gates(number, hardware, supernet, records):
    alphas = supernet.alphas()["blocks"]
    for seed in range(3):
        drawn = paths(supernet, number, seed)
        gradients = []
        for i in range(len(records[1])):
            record = records[0][i : i + 1], records[1][i : i + 1]
            by_gates, _ = gate_gradient(supernet, record, drawn, hardware=hardware)
            gradients.append((alpha_gradient(by_gates, alphas, drawn),))
        norm = sorted(clip_to(gradients, 1.0)[1])[3]
        (expected,), _ = clip_to(gradients, norm)

        def losses(output, labels):
            if hardware is None:
                return CLASSIFICATION.plain_losses(output, labels)
            return hardware(CLASSIFICATION.plain_losses(output[0], labels), output[1])

        found = clipping.clipped_alpha_gradient_sum(
            PathNetwork(supernet, drawn, None if hardware is None else COSTS),
            *records,
            loss=losses,
            alphas=supernet.alphas(),
            relaxation=clipping.Relaxation(
                {"blocks": proxyless.active_gates(drawn, like=alphas)},
                lambda kind, g, drawn=drawn: alpha_gradient(g, alphas, drawn),
            ),
            max_norm=norm,
            micro_batch_size=4,
        )["blocks"]
        assert expected.norm() > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("number", [2, 4])
def test_the_additive_cost_is_a_part_of_its_own_that_knows_no_record(number, supernet, records):
    alphas, drawn = supernet.alphas()["blocks"], paths(supernet, number)
    plain, _ = gate_gradient(supernet, records, drawn)
    both, _ = gate_gradient(supernet, records, drawn, hardware=ADDITIVE)
    found = proxyless.cost_gradient(ADDITIVE, supernet, drawn)
    expected = alpha_gradient(both - plain, alphas, drawn)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert found.abs().max() > 1e-3


WILD = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, -1e4, -2e4, 0.0, 5.0, 1e3])


@given(st.lists(WILD, min_size=12, max_size=12), st.sampled_from([1, 2, 4]))
def test_no_alphas_that_a_server_can_send_draw_what_is_not_offered(values, number):
    supernet = SPACE.supernet()
    with torch.no_grad():
        supernet.alphas()["blocks"].copy_(torch.tensor(values).view(3, 4))
    offered = offered_ops(supernet)
    assert offered.tolist() == [[True] * 4, [True] * 4, [True, True, True, False]]
    for seed in range(5):
        alphas = drawable_alphas(supernet)
        for drawn in (alphas, proxyless.uniform_alphas(alphas)):
            found = draw_paths(drawn, number=number, generator=make_generator(seed, "paths"))
            computed = found[:, :1] if number == 4 else found
            assert bool(offered.gather(1, computed).all())


def test_alphas_of_a_search_are_drawn_from_as_they_are(supernet):
    assert torch.equal(drawable_alphas(supernet), supernet.alphas()["blocks"])


@pytest.mark.parametrize("number", [1, 2, 4])
def test_covering_paths_compute_every_op_that_is_offered_and_no_other(supernet, number):
    covering = covering_paths(supernet, number=number)
    offered_EO = offered_ops(supernet)
    computed_EO = torch.zeros_like(offered_EO)
    for paths_EK in covering:
        assert paths_EK.shape == (3, number)
        assert all(len(set(row)) == len(row) for row in paths_EK.tolist())
        assert bool(offered_EO.gather(1, paths_EK[:, :1]).all())
        computed_EO.scatter_(1, paths_EK, True)
    assert bool(computed_EO[offered_EO].all())


def test_the_first_covering_paths_have_the_most_weights(supernet):
    assert covering_paths(supernet, number=1)[0].tolist() == [[1], [1], [1]]
    assert covering_paths(supernet, number=2)[0].tolist() == [[1, 2], [1, 2], [1, 2]]
    counts = {
        sum(w.numel() for w in PathNetwork(supernet, paths(supernet, 1, s)).weights().values())
        for s in range(30)
    }
    most = PathNetwork(supernet, covering_paths(supernet, number=1)[0]).weights().values()
    assert len(counts) > 5
    assert max(counts) <= sum(w.numel() for w in most)


def test_other_supernets_have_no_paths():
    cells = DARTSSpace(input_shape=(3, 8, 8), num_classes=3, channels=4, num_cells=3).supernet()
    refuses("set search_space=mbconv", offered_ops, cells, error=ValueError)

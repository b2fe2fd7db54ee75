"""Degenerate architectures are neither derived nor drawn; all others are what they were."""

import dataclasses
import itertools
import math
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.spaces import darts, dp_cells, mlp, nasbench201
from fednas_flwr.spaces.cell_graph import WEIGHTLESS
from fednas_flwr.spaces.mbconv import MBConvSpace, Skeleton

from ..small_spaces import IMAGES, alphas_of
from ..small_spaces import SPACES as SMALL

FREE_CHAIN = MBConvSpace(  # every block may be zero
    **IMAGES,
    skeleton=Skeleton(8, 1, 8, ((8, 3),), (), 8),
    candidates=("zero", "mbconv2_3x3", "mbconv3_3x3"),
)
SPACES = SMALL | {"mbconv": FREE_CHAIN}
NB201, DARTS, MLP, DP_CELLS, DP_DARTS = (
    SPACES[name] for name in ("nasbench201", "darts", "mlp", "dp_cells", "dp_cells_darts")
)


@pytest.fixture(params=sorted(SPACES))
def space(request):
    return SPACES[request.param]


@cache
def cells_201():
    """Return all cells of NAS-Bench-201, those that are not degenerate, and their paths."""
    cells = [NB201.genotype(path) for path in itertools.product(range(5), repeat=6)]
    left = [cell for cell in cells if not NB201.is_degenerate(cell)]
    return cells, left, torch.tensor([NB201.path(cell) for cell in left])


def drawn_towards(space, seed, ops):
    """Return alphas whose largest are those of ``ops`` on every edge."""
    alphas = alphas_of(space, seed)
    columns = [column for column, op in enumerate(space.ops) if op in ops]
    for alpha in alphas.values():
        alpha[:, columns] += 20.0
    return alphas


def is_degenerate_by_hand(genotype):
    ops = {(e.source, e.target): e.op for e in genotype.cells["cell"]}
    for nodes in ((0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)):
        on_path = [ops[pair] for pair in itertools.pairwise(nodes)]
        if "none" not in on_path and any(op.startswith("nor_conv") for op in on_path):
            return False
    return True


def test_of_the_nasbench201_cells_those_are_degenerate_that_no_path_trains():
    cells, left, _ = cells_201()
    assert left == [cell for cell in cells if not is_degenerate_by_hand(cell)]
    assert 4 / 5 < len(left) / len(cells) < 1


def test_the_ops_called_weightless_have_no_weights_and_all_others_have():
    fixed = {"norm": "group", "affine": False}
    for make, spaces in (
        (partial(nasbench201.make_operation, **fixed), [NB201]),
        (partial(darts.make_operation, stride=1, **fixed), [DARTS]),
        (partial(mlp.make_operation, norm="group"), [MLP]),
        (partial(dp_cells._make_op, norm="group", groups=2), [DP_CELLS, DP_DARTS]),
    ):
        for op in {op for space in spaces for op in space.ops} - {"none"}:
            weights = sum(parameter.numel() for parameter in make(op, 4).parameters())
            assert (weights == 0) is (op in WEIGHTLESS), op


@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 30))
def test_the_derived_cell_is_the_likeliest_that_is_not_degenerate(seed, scale):
    alphas = drawn_towards(NB201, seed, ["none"]) if seed % 2 else alphas_of(NB201, seed, scale)
    if seed % 3 == 0:
        alphas["cell"][:, [2, 3]] -= 15.0  # the convolutions
    derived = NB201.derive(alphas)
    assert not NB201.is_degenerate(derived)
    logs, paths = alphas["cell"].double().log_softmax(-1), cells_201()[2]
    found, best = logs[range(6), NB201.path(derived)], logs[torch.arange(6), paths].sum(1).max()
    torch.testing.assert_close(found.sum(), best, rtol=1e-12, atol=1e-9)


def test_ties_go_to_the_first_route_edge_and_op():
    derived = NB201.derive({"cell": torch.zeros(6, 5)})
    assert [e.op for e in derived.cells["cell"]] == [*["none"] * 3, "nor_conv_1x1", *["none"] * 2]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(SPACES)))
def test_no_space_derives_or_draws_a_degenerate_genotype(seed, name):
    space = SPACES[name]
    for alphas in (drawn_towards(space, seed, WEIGHTLESS), alphas_of(space, seed)):
        derived = space.derive(alphas)
        assert not space.is_degenerate(derived)
        space.check(derived)
        assert space.derive(alphas) == derived
    generator = make_generator(seed, "draws")
    assert not any(space.is_degenerate(space.random_genotype(generator)) for _ in range(20))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(["darts", "mlp", "mbconv"]))
def test_where_all_edges_are_alive_one_op_changes_at_the_least_loss(seed, name):
    space = SPACES[name]
    alphas = drawn_towards(space, seed, WEIGHTLESS)
    if name == "mbconv":
        alphas["blocks"] = alphas["blocks"].float()
        before = {"blocks": ["zero"] * 3}
        rows = {"blocks": alphas["blocks"]}
    else:
        kept = space.likeliest(alphas).cells
        before = {kind: [e.op for e in edges] for kind, edges in kept.items()}
        rows = {
            kind: torch.stack([alphas[kind][space.edges.index(e.pair)] for e in edges])
            for kind, edges in kept.items()
        }
    after = {kind: [e.op for e in edges] for kind, edges in space.derive(alphas).cells.items()}
    assert [*map(len, after.values())] == [*map(len, before.values())]
    edges = [(kind, index) for kind in before for index in range(len(before[kind]))]
    ((kind, index),) = [(k, i) for k, i in edges if before[k][i] != after[k][i]]
    losses = {
        (k, i, op): float(row[space.ops.index(before[k][i])] - row[space.ops.index(op)])
        for k in before
        for i, row in enumerate(rows[k].double().log_softmax(-1))
        for op in {*space.ops} - {*WEIGHTLESS}
    }
    assert math.isclose(losses[kind, index, after[kind][index]], min(losses.values()), rel_tol=1e-9)


@pytest.mark.parametrize("name", ["nasbench201", "dp_cells", "dp_cells_darts"])
def test_other_whole_graphs_are_derived_and_drawn_as_ever(name):
    """The argmax of every edge, and the first draw of the same generator."""
    space, compared = SPACES[name], 0
    for seed in range(100):
        alphas = alphas_of(space, seed)
        generator, size = make_generator(seed, "draw"), (space.cell_kinds["cell"],)
        first = torch.randint(len(space.ops), size, generator=generator)
        for ops, made in (
            (alphas["cell"].argmax(-1), space.derive(alphas)),
            (first, space.random_genotype(make_generator(seed, "draw"))),
        ):
            genotype = space.genotype(ops.tolist())
            alive = not space.is_degenerate(genotype)
            assert (made == genotype) is alive
            compared += alive
    assert compared > 150


@pytest.mark.parametrize("name", ["darts", "mlp"])
def test_other_cells_of_two_edges_per_node_are_derived_and_drawn_as_ever(name):
    space = SPACES[name]
    for seed in range(30):
        alphas, generator = alphas_of(space, seed), make_generator(seed, "draw")
        derived, drawn = space.derive(alphas), space.random_genotype(generator)
        assert derived == space.likeliest(alphas)
        assert drawn == space.draw(make_generator(seed, "draw"))


def test_draws_of_nasbench201_are_uniform_over_what_is_left():
    """Each op is as frequent on every edge as among the cells that are not degenerate."""
    left, generator = cells_201()[1], make_generator(0, "uniform")
    draws = [NB201.random_genotype(generator) for _ in range(4000)]
    for edge in range(6):
        for op in NB201.ops:
            counts = [sum(c.cells["cell"][edge].op == op for c in cells) for cells in (left, draws)]
            share, drawn = counts[0] / len(left), counts[1] / len(draws)
            assert abs(share - drawn) < 5 * math.sqrt(share * (1 - share) / len(draws))


def test_an_op_behind_a_node_that_nothing_enters_does_not_count(space):
    if "cell" not in space.cell_kinds:
        pytest.skip("every node is entered")
    genotype = space.genotype([0] * space.cell_kinds["cell"])
    edges = list(genotype.cells["cell"])
    behind = next(i for i, e in enumerate(edges) if (e.source, e.target) == (1, 3))
    op = "nor_conv_3x3" if space.name == "nasbench201" else space.ops[-1]
    edges[behind] = dataclasses.replace(edges[behind], op=op)
    altered = dataclasses.replace(genotype, cells={"cell": tuple(edges)})
    assert space.is_degenerate(altered)
    edges[0] = dataclasses.replace(edges[0], op="skip_connect")  # 0 -> 1
    altered = dataclasses.replace(genotype, cells={"cell": tuple(edges)})
    assert not space.is_degenerate(altered)

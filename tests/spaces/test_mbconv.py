"""Published networks fall out of the blocks; sampled paths are the derived networks, and cheap."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.spaces import mbconv
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.mbconv import NEVER, SKELETONS, MBConvSpace, Skeleton, make_layer
from fednas_flwr.spaces.mlp import EDGES, OPS, MLPSpace, make_operation

from ..refusals import refuses


def space_of(skeleton, size, *, candidates="fdnas", classes=10):
    named = {"skeleton": SKELETONS[skeleton], "candidates": mbconv.CANDIDATES[candidates]}
    return MBConvSpace(input_shape=(3, size, size), num_classes=classes, **named)


SMALL = space_of("small", 8, candidates="proxyless", classes=5)
WITH_ZERO = [column for column, name in enumerate(SMALL.ops) if name == "zero"]


@pytest.mark.parametrize("width", [0.5, 1.0, 1.4])
def test_mobilenet_v2_is_torchvisions_to_rounding(width):
    """Another code of the same network: same tensors in the same order, same outputs."""
    space = dataclasses.replace(space_of("mobilenet_v2", 64, classes=7), width=width)
    genotype = space.genotype([space.ops.index("mbconv6_3x3")] * len(space.plan.blocks))
    with seeded(0, "network"):
        network = space.network(genotype).double()
    other = mobilenet_v2(num_classes=7, width_mult=width, dropout=0.0).double()
    other.load_state_dict(dict(zip(other.state_dict(), network.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 64, 64, generator=make_generator(0, "x"), dtype=torch.float64)
    logits = network(x)
    assert logits.abs().max() > 1e-3
    torch.testing.assert_close(logits, other(x), rtol=1e-9, atol=1e-12)


def test_a_mixed_network_has_the_size_that_fdnas_reports():
    """FDNAS, Tables 2 and 3: 3.38 M parameters, 346.6 M multiply-adds at 32x32, 388 M at 224x224.

    Its genotype is not published; all six ops in turn cost about the same.
    """
    space, large = space_of("fdnas", 32), space_of("fdnas_imagenet", 224, classes=1000)
    genotype = space.genotype([5 - block % 6 for block in range(19)])
    network, transferred = space.network(genotype), large.network(genotype)
    assert count_parameters(network) == pytest.approx(3.38e6, rel=0.03)
    assert count_multiply_adds(network, space.input_shape) == pytest.approx(346.6e6, rel=0.03)
    assert count_multiply_adds(transferred, large.input_shape) == pytest.approx(388e6, rel=0.03)


def test_the_skeleton_of_proxylessnas_has_the_published_depth():
    space = space_of("proxyless", 224)
    assert space.cell_kinds == {"blocks": 21}
    assert space.plan.blocks[-1][0].output_shape == (320, 7, 7)


def test_an_mbconv_counted_by_hand():
    """16 -> 24 channels, expansion 3, kernel 5, stride 2 on 9x9: 5x5 remains."""
    skeleton = Skeleton(16, 1, 16, ((24, 1),), (1,), 32)
    named = {"skeleton": skeleton, "candidates": ("mbconv3_5x5", "mbconv6_3x3")}
    layer = MBConvSpace(input_shape=(3, 9, 9), num_classes=2, **named).plan.blocks[0][0]
    assert layer.output_shape == (24, 5, 5)
    module = make_layer(layer, norm="batch")
    expand, depthwise, project = 16 * 48 * 81, 48 * 25 * 25, 48 * 24 * 25
    assert count_multiply_adds(module, layer.input_shape) == expand + depthwise + project
    assert count_parameters(module) == 16 * 48 + 48 * 25 + 48 * 24 + 2 * (48 + 48 + 24)


def test_zero_is_offered_where_the_block_can_be_the_identity():
    """Blocks 1, 3 change the size, 3 and 5 the channels (8-16, 16-16, 16-24, 24-24, 24-40, ...)."""
    offered = [WITH_ZERO[0] in columns for columns in SMALL.offered]
    assert offered == [False, True, False, True, False, True]
    alphas = SMALL.supernet().alphas()["blocks"]
    assert [bool(row[WITH_ZERO[0]] == NEVER) for row in alphas] == [not is_in for is_in in offered]
    favoured = torch.zeros(6, 7)
    favoured[:, WITH_ZERO] = 1.0
    ops = [edge.op for edge in SMALL.derive({"blocks": favoured}).cells["blocks"]]
    assert ops == ["mbconv3_3x3", "zero"] * 3
    refuses("block 3 cannot be zero: it changes", SMALL.check, SMALL.genotype([0, 6, 6, 6, 0, 6]))


def test_only_the_active_path_is_trained_and_only_sampled_ops_run():
    with seeded(0, "supernet"):
        supernet = SMALL.supernet()
    ran, blocks = [], enumerate(supernet.body.blocks)
    ops = {(i, name): op for i, block in blocks for name, op in block.ops.items()}
    for key, op in ops.items():
        op.register_forward_hook(lambda *seen, key=key: ran.append((key, seen[2].requires_grad)))
    paths = [[0, 3], [6, 1], [2, 4], [1, 6], [5, 0], [3, 2]]
    gates = torch.tensor([[1.0, 0.0]] * 6, requires_grad=True)
    supernet.body(torch.randn(2, 3, 8, 8), {"blocks": gates}, paths).sum().backward()
    active = {(i, SMALL.ops[a]) for i, (a, _) in enumerate(paths) if SMALL.ops[a] != "zero"}
    others = {(i, SMALL.ops[b]) for i, (_, b) in enumerate(paths) if SMALL.ops[b] != "zero"}
    assert {key for key, has_graph in ran if has_graph} == active
    assert {key for key, has_graph in ran if not has_graph} == others
    trained = (key for key, op in ops.items() if any(p.grad is not None for p in op.parameters()))
    assert {*trained} == active


# --- mlp


SPACE = MLPSpace(input_shape=(6,), num_classes=3, channels=8, num_cells=3, norm="group")


def one_hot_weights(genotype, dtype):
    """Return op weights that leave of a supernet what the genotype has."""
    weights = {}
    for kind, edges in genotype.cells.items():
        weights[kind] = torch.zeros(len(EDGES), len(OPS), dtype=dtype)
        weights[kind][:, OPS.index("none")] = 1.0
        for edge in edges:
            row = weights[kind][EDGES.index((edge.source, edge.target))]
            row[OPS.index("none")], row[OPS.index(edge.op)] = 0.0, 1.0
    return weights


def layer_of(search_cell, edge):
    """Return weight and bias of one op in the joined layers of a search cell."""
    size, activation = edge.op.split("_")
    targets = [target for source, target in EDGES if source == edge.source]
    joined = getattr(search_cell.leaving[edge.source], size).linear
    units = joined.out_features // (2 * len(targets))
    first = (["relu", "tanh"].index(activation) * len(targets) + targets.index(edge.target)) * units
    rows = slice(first, first + units)
    return joined.weight[rows], joined.bias[rows]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_supernet_with_the_weights_of_one_architecture_is_its_network(norm):
    space = replace(SPACE, norm=norm)
    for seed in range(4):
        genotype = space.random_genotype(make_generator(seed, "genotype"))
        with seeded(seed, "networks"):
            supernet = space.supernet().double()
            network = space.network(genotype).double()
        network.classifier.load_state_dict(supernet.body.classifier.state_dict())
        for cell, twin in zip(supernet.body.cells, network.cells, strict=True):
            for part in ("preprocess0", "preprocess1"):
                getattr(twin, part)[0].load_state_dict(getattr(cell, part)[0].state_dict())
            for edge, op in zip(twin.wiring, twin.edges, strict=True):
                if edge.op != "skip_connect":
                    weight, bias = layer_of(cell, edge)
                    op[0].load_state_dict({"weight": weight, "bias": bias})
        x = torch.randn(5, 6, generator=make_generator(seed, "x"), dtype=torch.float64)
        mixed = supernet(x, one_hot_weights(genotype, x.dtype))
        torch.testing.assert_close(network(x), mixed, rtol=1e-10, atol=1e-10)


UNITS = [("dense_relu", 8), ("dense_tanh", 8), ("narrow_relu", 4), ("narrow_tanh", 4)]


@pytest.mark.parametrize(("op", "units"), UNITS)
def test_a_dense_op_is_a_normalised_layer_in_the_first_units(op, units):
    module = make_operation(op, 8, norm="group").double()
    x = torch.randn(3, 8, dtype=torch.float64)
    hidden = x @ module[0].weight.T + module[0].bias
    hidden = hidden.tanh() if op.endswith("tanh") else hidden.clamp(min=0)
    centred = hidden - hidden.mean(1, keepdim=True)
    expected = centred / (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    out = module(x)
    torch.testing.assert_close(out[:, :units], expected)
    assert out.shape == (3, 8)
    assert not out[:, units:].any()


WIDTHS = [(1, [4]), (2, [8, 4]), (3, [8, 4, 4]), (4, [8, 8, 4, 4])]


@pytest.mark.parametrize(("num_cells", "widths"), WIDTHS)
def test_the_middle_cell_halves_the_width(num_cells, widths):
    genotype = SPACE.random_genotype(make_generator(0, "genotype"))
    network = replace(SPACE, num_cells=num_cells).network(genotype)
    outs = []
    for cell in network.cells:
        cell.register_forward_hook(lambda module, inputs, out: outs.append(out.shape[1]))
    network(torch.randn(2, 6))
    assert outs == [3 * width for width in widths]
    reductions = [cell.wiring == genotype.cells["reduction"] for cell in network.cells]
    assert reductions == [index == num_cells // 2 for index in range(num_cells)]


def test_a_supernet_needs_a_normal_cell():
    with pytest.raises(ConfigError, match="num_cells must be at least 2 for mlp, got 1"):
        MLPSpace(input_shape=(6,), num_classes=3, num_cells=1).supernet()


def test_norms_are_affine_in_retraining_and_not_in_search():
    network = replace(SPACE, num_cells=2).network(SPACE.random_genotype(make_generator(0, "g")))
    for module, affine in ((SPACE.supernet(), False), (network, True)):
        norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
        assert norms
        assert {m.affine for m in norms} == {affine}


def test_without_a_norm_the_scale_of_a_record_is_seen():
    """A layer norm after the first layer hides it."""
    genotype = SPACE.random_genotype(make_generator(0, "g"))
    record = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    moved = {}
    for norm in ("group", "none"):
        network = replace(SPACE, num_cells=1, norm=norm).network(genotype).eval()
        norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm | nn.BatchNorm1d)]
        assert bool(norms) == (norm == "group")
        logits = network(torch.cat([1000 * record, 2000 * record])).detach()
        moved[norm] = float((logits[1] - logits[0]).norm() / logits[0].norm())
    assert moved["group"] < 0.01 < 0.5 < moved["none"]

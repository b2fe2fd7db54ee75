from dataclasses import replace

import pytest
import torch
from torch import nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.spaces.mlp import EDGES, OPS, MLPSpace, make_operation

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

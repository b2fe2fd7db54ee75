"""Published networks fall out of the blocks; sampled paths are the derived networks, and cheap."""

import dataclasses

import pytest
import torch
from torchvision.models import mobilenet_v2

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.spaces import mbconv
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.mbconv import NEVER, SKELETONS, MBConvSpace, Skeleton, make_layer

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

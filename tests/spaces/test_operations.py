from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.spaces import darts, nasbench201, operations
from fednas_flwr.spaces.operations import MixedOp, channels_last, drop_path, make_norm, num_groups


def images(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=make_generator(0, "images"), dtype=dtype)


def test_unknown_ops_are_refused():
    with pytest.raises(ValueError, match="op=none is unknown"):
        darts.make_operation("none", 4, stride=1, norm="batch", affine=False)
    with pytest.raises(ValueError, match="op=sep_conv_3x3 is unknown"):
        nasbench201.make_operation("sep_conv_3x3", 4, norm="batch", affine=False)


def test_average_pool_counts_only_real_pixels():
    module = nasbench201.make_operation("avg_pool_3x3", 1, norm="batch", affine=True)
    assert torch.equal(module(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("size", [4, 7])
def test_factorized_reduce_reads_even_and_odd_pixels(size):
    module = operations.FactorizedReduce(3, 5, norm="group", affine=False).double()
    module.norm = torch.nn.Identity()
    x = images(2, 3, size, size)
    relu = F.pad(x.relu(), (0, size % 2, 0, size % 2))
    even, odd = relu[:, :, ::2, ::2], relu[:, :, 1::2, 1::2]
    halves = F.conv2d(even, module.conv_even.weight), F.conv2d(odd, module.conv_odd.weight)
    torch.testing.assert_close(module(x), torch.cat(halves, dim=1), rtol=0, atol=1e-12)


def test_networks_can_have_no_norm():
    assert isinstance(make_norm(6, norm="none", affine=True), torch.nn.Identity)


def test_groups_divide_the_channels_and_hold_at_least_two():
    for channels in range(1, 200):
        groups = num_groups(channels)
        assert channels % groups == 0
        assert groups <= 8
        assert channels == 1 or channels // groups >= 2
    assert [num_groups(channels) for channels in (4, 8, 12, 16, 36, 48)] == [2, 4, 6, 8, 6, 8]


def test_mixed_op_is_the_weighted_sum_without_none():
    make = partial(darts.make_operation, channels=4, stride=1, norm="group", affine=False)
    mixed = MixedOp(darts.OPS, make).double()
    assert "none" not in mixed.ops
    x = images(2, 4, 5, 5)
    weights = torch.rand(8, dtype=torch.float64, requires_grad=True)
    out = mixed(x, weights)
    expected = sum(weights[i] * mixed.ops[op](x) for i, op in enumerate(darts.OPS) if i)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    out.square().sum().backward()
    assert weights.grad[0] == 0
    assert (weights.grad[1:] != 0).all()


def test_drop_path_drops_whole_examples_and_keeps_the_mean():
    x = torch.ones(4000, 2, 3, 3)
    with seeded(0, "drop"):
        out = drop_path(x, 0.25)
    values = out.flatten(1)
    assert (values == values[:, :1]).all()
    assert sorted(set(values[:, 0].tolist())) == pytest.approx([0.0, 4 / 3])
    assert out.mean().item() == pytest.approx(1.0, abs=0.04)
    assert drop_path(x, 0.0) is x


def test_channels_last_changes_the_layout_only():
    x = images(2, 3, 4, 5)
    moved = channels_last(x)
    assert torch.equal(x, moved)
    assert moved.is_contiguous(memory_format=torch.channels_last)

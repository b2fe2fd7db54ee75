import json
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.models.networks import make_space
from fednas_flwr.spaces import darts, nasbench201, operations
from fednas_flwr.spaces import genotype as genotypes
from fednas_flwr.spaces.genotype import Edge, Genotype, from_json, skip_share, to_json
from fednas_flwr.spaces.operations import MixedOp, channels_last, drop_path, make_norm, num_groups

from ..json_trees import json_trees
from ..refusals import refuses

GENOTYPE = Genotype("toy", {"normal": (Edge("conv", 0, 1), Edge("skip_connect", 0, 2))})


def test_json_says_what_it_is_and_gives_the_genotype_back():
    edges = [{"op": "conv", "source": 0, "target": 1}]
    edges.append({"op": "skip_connect", "source": 0, "target": 2})
    head = {"format": "fednas-genotype", "version": 1, "space": "toy"}
    assert json.loads(to_json(GENOTYPE)) == head | {"cells": {"normal": edges}}
    assert from_json(to_json(GENOTYPE)) == GENOTYPE


def altered(**changes):
    document = json.loads(to_json(GENOTYPE))
    document.update(changes)
    return json.dumps(document)


def with_edge(**changes):
    edge = {"op": "conv", "source": 0, "target": 1, **changes}
    edge = {name: value for name, value in edge.items() if value is not None}
    return altered(cells={"normal": [edge]})


WRONG_TEXTS = [
    ("", "my.json is not valid JSON"),
    ("[" * 100_000, "my.json is not valid JSON"),
    ("[1]", r"my.json: format must be 'fednas-genotype', got \[1\]"),
    ("{}", "my.json: format must be 'fednas-genotype', got null"),
    (altered(format="Genotype(normal=..."), "format must be 'fednas-genotype', got Genotype"),
    (altered(version=2), "my.json: version must be 1, got 2"),
    (altered(version=True), "my.json: version must be 1, got true"),
    (altered(extra=1), "setting=my.json: genotype.extra is unknown"),
    (with_edge(op=None), r"my.json: genotype.cells.normal\[0\].op is missing\.$"),
    (with_edge(weight=1), r"genotype.cells.normal\[0\].weight is unknown"),
    (with_edge(target=True), "target=true has the wrong type: expected a whole number"),
    (with_edge(source=1), "0 <= source < target must hold, got 1 and 1"),
    (with_edge(source=-1), "0 <= source < target must hold, got -1 and 1"),
    (altered()[:-1] + ', "space": "toy"}', "the field 'space' appears twice"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TEXTS)
def test_wrong_text_is_refused_by_field_and_value(text, message):
    refuses(message, from_json, text, origin="my.json")


edge_keys = st.sampled_from(["op", "source", "target", "normal"])
json_values = json_trees(st.text(max_size=5), keys=edge_keys)


@given(field=st.sampled_from(["format", "version", "space", "cells"]), value=json_values)
def test_any_value_in_any_field_is_a_genotype_or_a_config_error(field, value):
    try:
        genotype = from_json(altered(**{field: value}))
    except ConfigError:
        return
    assert from_json(to_json(genotype)) == genotype


def test_unreadable_files_are_named(tmp_path):
    for name, content, words in (
        ("missing.json", None, "^genotype=.*missing.json cannot be read: No such file"),
        ("model.bin", b"\xff\xfe\x00", "^genotype=.*model.bin is not a UTF-8 text file"),
        ("broken.json", b"{", "broken.json is not valid JSON"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        refuses(words, genotypes.load_genotype, tmp_path / name)


def test_skip_share_counts_edges_of_all_cells():
    assert skip_share(GENOTYPE) == 0.5
    three = Genotype("toy", {**GENOTYPE.cells, "reduction": (Edge("none", 0, 1),) * 2})
    assert skip_share(three) == 0.25
    assert skip_share(Genotype("toy", {})) == 0.0


@pytest.mark.parametrize("space", ["nasbench201", "darts", "mbconv"])
@pytest.mark.parametrize("large", ["edges", "kinds", "op", "name"])
def test_a_huge_genotype_is_refused_in_a_short_sentence(space, large):
    sizes = {"channels": 4, "num_cells": 3}
    if space == "mbconv":
        sizes = {"skeleton": "small", "candidates": "proxyless", "width": 1.0}
    made = make_space(space, input_shape=(3, 8, 8), num_classes=3, norm="batch", **sizes)
    cells = {kind: (Edge(made.ops[-1], 0, 1),) * 300_000 for kind in made.cell_kinds}
    if large == "kinds":
        cells = {f"kind {i}": () for i in range(300_000)}
    if large == "op":
        cells = {kind: (Edge("x" * 300_000, 0, 1),) for kind in made.cell_kinds}
    genotype = Genotype("s" * 300_000 if large == "name" else space, cells)
    assert len(refuses("", made.check, genotype)) < 600


# --- operations


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

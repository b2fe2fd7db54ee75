"""No record changes what another contributes: the attack, the self-test, filling, exact sums."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fednas_flwr.base.layers import own_linear_layers
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.models.networks import linear, make_device, plain_cnn, torchvision_network
from fednas_flwr.privacy.mechanism import clipping, record_gradients
from fednas_flwr.privacy.mechanism.micro_batches import clipped_row_sum, filled, micro_batches
from fednas_flwr.privacy.self_test import _same_bits, largest_size, rows_are_alike, unwatched
from fednas_flwr.search.candidate import Candidate, all_alike
from fednas_flwr.search.objective import CLASSIFICATION, heads
from fednas_flwr.search.optimizer_step import trainable_weights
from fednas_flwr.search.proxyless import PathNetwork, active_gates, alpha_gradient, covering_paths
from fednas_flwr.spaces.mbconv import CELL

from ..made_networks import Made
from ..rows import seldom
from ..small_spaces import PATH_SPACE, SPACES

CLASSES, FEATURES, RECORDS = 3, 30, 44
IMAGE = (3, 8, 8)
SIZES = {"num_classes": CLASSES, "norm": "group"}
MAX_NORM = 1.0
CPU = torch.device("cpu")
WITH_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITH_GPU])]


def weight_sum(network, x, y, **changed):
    """The clipped sum of the weights' gradients."""
    common = {"loss": CLASSIFICATION.plain_losses, "max_norm": MAX_NORM}
    common["parameters"] = trainable_weights(network)
    return clipping.clipped_gradient_sum(network, x, y, **common | changed)


# The attack


def largest(computation, network, shape, size, *, num_classes=CLASSES, device="cpu"):
    sizes = {"num_classes": num_classes, "size": size, "device": make_device(device)}
    return largest_size(computation, network, shape, **sizes)


def cancelling_network():
    """A network whose output is the rounding of sums that are 0, enlarged, and records for it."""
    generator = make_generator(3, "attack")
    half = torch.randn(16, FEATURES // 2, generator=generator)
    order = torch.randperm(FEATURES // 2, generator=generator)
    network = nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.Linear(16, 2, bias=False))
    with torch.no_grad():
        network[0].weight.copy_(torch.cat([half, -half[:, order]], dim=1))
        network[1].weight.copy_(1e10 * torch.randn(2, 16, generator=generator))
    x = torch.randn(RECORDS, FEATURES // 2, generator=generator)
    return network, torch.cat([x, x[:, order]], dim=1), torch.arange(RECORDS) % 2


@pytest.mark.parametrize("asked", [2, 7, 64, *map(seldom, (1, 3, 4, 8))])
def test_weights_that_cancel_do_not_let_a_record_change_what_others_contribute(asked):
    network, x, y = cancelling_network()

    def clipped(x, y, size=None, watch=unwatched):
        sums = weight_sum(network, x, y, micro_batch_size=size, watch=watch)
        return torch.cat([total.flatten() for total in sums.values()])

    def watched(x, y, watch):
        clipped(x, y, watch=watch)

    size = largest(watched, network, (FEATURES,), asked, num_classes=2)
    assert size <= asked
    for record in range(RECORDS):
        others = torch.arange(RECORDS) != record
        moved = clipped(x, y, size=size) - clipped(x[others], y[others], size=size)
        alone = clipped(x[record : record + 1], y[record : record + 1], size=size)
        assert torch.equal(moved, alone)  # not one bit of another's contribution
        assert moved.norm() <= MAX_NORM * (1 + 1e-12)


# The self-test, of every space and layer


def derived(space, **changes):
    return replace(space, **changes).network(space.random_genotype(make_generator(3, "genotype")))


SUPERNETS = {name: replace(SPACES[name], **SIZES) for name in ("darts", "nasbench201")}
SUPERNETS["nasbench201 with a skip"] = replace(SUPERNETS["nasbench201"], skip="linear")
SUPERNETS["mlp"] = replace(SPACES["mlp"], input_shape=(29,), channels=16, **SIZES)
MBCONV = replace(PATH_SPACE, input_shape=IMAGE)
CELLS = {"num_classes": CLASSES, "widths": (4, 4, 8), "head": 8}
DP_CELLS, DARTS_CELLS = (replace(SPACES[name], **CELLS) for name in ("dp_cells", "dp_cells_darts"))
SEARCHED = SUPERNETS | {"mbconv": MBCONV, "dp_cells": DP_CELLS}
NETWORKS = {name: partial(derived, space) for name, space in SEARCHED.items()} | {
    "linear": lambda: linear(IMAGE, CLASSES),
    "linear of a table": lambda: linear((29,), CLASSES),
    "plain_cnn": lambda: plain_cnn(IMAGE, CLASSES),
    "mobilenet_v2": lambda: torchvision_network(IMAGE, CLASSES, name="mobilenet_v2", norm="group"),
}


def passes(computation, network, shape, device, size=4):
    """Return whether the self-test passes; afterwards the network is as it was."""
    before = copy.deepcopy(network.state_dict())
    found = largest(computation, network, shape, size, device=device)
    after = network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return found == size


def by_weights(network):
    return lambda x, y, watch: weight_sum(network, x, y, watch=watch)


def by_alphas(supernet, network=None, **relaxation):
    def computation(x, y, watch):
        common = {"loss": CLASSIFICATION.plain_losses, "max_norm": MAX_NORM, "watch": watch}
        common |= {"alphas": supernet.alphas()} | relaxation
        clipping.clipped_alpha_gradient_sum(network or supernet, x, y, **common)

    return computation


def by_output(network):
    @torch.no_grad()
    def computation(x, y, watch):
        with own_linear_layers(network):
            logits, _ = heads(network(x))
        watch(logits)
        watch(CLASSIFICATION.plain_losses(logits, y))

    return computation


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SUPERNETS)
def test_rows_of_supernets_are_alike(name, device):
    with seeded(0, name):
        supernet = SUPERNETS[name].supernet().to(device).train()
    shape = SUPERNETS[name].input_shape
    assert passes(by_weights(supernet), supernet, shape, device)
    assert passes(by_alphas(supernet), supernet, shape, device)
    assert passes(by_output(supernet.eval()), supernet, shape, device)


SELDOM = [seldom(name) if name == "mobilenet_v2" else name for name in NETWORKS]


@pytest.mark.parametrize("route", ["leaves", "hooks"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SELDOM)
def test_rows_of_networks_are_alike(name, device, route, monkeypatch):
    with seeded(0, name):
        network = NETWORKS[name]().to(device).train()
    if hasattr(network, "drop_path_prob"):
        network.drop_path_prob = 0.3  # drawn per record: the self-test drops none
    if route == "hooks":
        monkeypatch.setattr(record_gradients, "_is_covered", lambda layer: False)
    shape = (29,) if name in ("mlp", "linear of a table") else IMAGE
    assert passes(by_weights(network), network, shape, device)
    assert getattr(network, "drop_path_prob", 0.3) == 0.3


@pytest.mark.run
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_drawn_paths_are_alike(device):
    with seeded(0, "mbconv"):
        supernet = MBCONV.supernet().to(device).train()
    for paths_E1 in covering_paths(supernet, number=1):
        network = PathNetwork(supernet, paths_E1)
        assert passes(by_weights(network), network, IMAGE, device)
    paths_EK = covering_paths(supernet, number=2)[0]
    alphas = supernet.alphas()
    gates = clipping.Relaxation(
        {CELL: active_gates(paths_EK, like=alphas[CELL])},
        lambda kind, g: alpha_gradient(g, alphas[kind].double(), paths_EK),
    )
    network = PathNetwork(supernet, paths_EK)
    assert passes(by_alphas(supernet, network, relaxation=gates), network, IMAGE, device)
    for space in (DP_CELLS, DARTS_CELLS):
        with seeded(0, space.name):
            supernet = space.supernet().to(device).train()
        for path in all_alike(supernet):
            network = Candidate(supernet, path)
            assert passes(by_weights(network), network, IMAGE, device)


MIXES = {  # rows that depend on others, or on where they stand
    "mean": lambda x: x - x.mean(0),
    "position": lambda x: x * (1 + torch.arange(len(x))[:, None] * 2.0**-22),
    "non-finite neighbours": lambda x: x + 0 * x.sum(0),
    "nothing to see": lambda x: x * math.nan,
    "": lambda x: x,
}


@pytest.mark.parametrize("how", MIXES)
def test_rows_that_depend_on_others_or_on_their_place_take_the_size_to_one(how):
    network = Made(lambda self, x: self.layer(MIXES[how](x)), layer=nn.Linear(8, CLASSES))
    state = torch.get_rng_state()
    for size in (2, 3, 8):
        assert (largest(by_weights(network), network, (8,), size) == 1) == bool(how)
    assert torch.equal(torch.get_rng_state(), state)  # what is made up moves no other draw


def test_a_record_may_contribute_nothing_to_many_weights_of_a_layer():
    """As where units are dead: their weights then are alone in the last part that is clipped."""
    # Of all channels but a few every gradient is zero; zero gives the same scores for all records.
    few = Made(lambda self, x: x * (torch.arange(x.shape[1]) < 20)[:, None, None])
    zero = Made(lambda self, x: 0.0 * x[:, :CLASSES])
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(300, CLASSES)]
    network = nn.Sequential(nn.Conv2d(2, 300, 3), few, *pooled)
    assert passes(by_weights(network), network, (2, 6, 6), "cpu")
    nothing = nn.Sequential(nn.Conv2d(2, 300, 3), few, *pooled[:2], zero)
    assert not passes(by_weights(nothing), nothing, (2, 6, 6), "cpu")


def test_the_next_smaller_power_of_two_is_tried():
    sizes = []

    def computation(x, y, watch):
        sizes.append(len(x))
        watch(x + (len(x) > 4) * torch.arange(len(x))[:, None])

    assert largest(computation, nn.Identity(), (2,), 24) == 4
    assert sorted(set(sizes)) == [4, 8, 16, 24]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 12, 13, 64])
def test_every_kind_of_row_stands_beside_the_record(size):
    beside = set()

    def computation(x, y, watch):
        beside.update(map(repr, x[:, 0].tolist()))
        watch(x)

    assert rows_are_alike(computation, (2,), num_classes=2, size=size, device=CPU)
    assert len(beside) == 7
    assert {"0.0", "inf", "nan"} < beside


@pytest.mark.parametrize("multi_label", [False, True])
def test_labels_are_of_the_form_of_the_records(multi_label):
    seen = []

    def computation(x, y, watch):
        seen.append(y)
        watch(x)

    sizes = {"num_classes": 3, "size": 8, "device": CPU}
    assert rows_are_alike(computation, (2,), **sizes, multi_label=multi_label)
    assert {y.dtype for y in seen} == {torch.int64}
    classes = [y.argmax(1) if multi_label else y for y in seen]
    assert all(y.shape == ((8, 3) if multi_label else (8,)) for y in seen)
    assert {int(c) for own in classes for c in own} == {0, 1, 2}
    assert not multi_label or all(bool((y.sum(1) == 1).all()) for y in seen)


# Filling, and exact sums


def test_rows_that_fill_a_micro_batch_contribute_nothing_even_if_they_are_not_finite():
    # NaN for rows of zeros, which fill; float32 differs too much between machines
    network = Made(lambda self, x: self.layer(x / x), layer=nn.Linear(4, CLASSES)).double()
    x = torch.randn(5, 4, generator=make_generator(0, "filling"), dtype=torch.double)
    y = torch.tensor([0, 1, 2, 0, 1])

    def clipped(x, y, size):
        return weight_sum(network, x, y, max_norm=0.1, micro_batch_size=size)

    one_by_one = clipped(x, y, 1)
    assert all(bool(total.any()) for total in one_by_one.values())
    for size in (2, 3, 4, 64):
        for name, total in clipped(x, y, size).items():
            torch.testing.assert_close(total, one_by_one[name], rtol=1e-6, atol=1e-9)
        assert not any(bool(total.any()) for total in clipped(x[:0], y[:0], size).values())


@given(st.integers(0, 20), st.integers(1, 9))
def test_micro_batches_have_one_size_and_hold_every_record_once(num_records, size):
    x = torch.arange(2.0 * num_records).view(num_records, 2) + 1
    y = torch.arange(num_records)
    parts = list(micro_batches(x, y, size))
    assert parts
    assert all(part_x.shape == (size, 2) and part_y.shape == (size,) for part_x, part_y, _ in parts)
    assert torch.equal(torch.cat([part_x[:count] for part_x, _, count in parts]), x)
    assert torch.equal(torch.cat([part_y[:count] for _, part_y, count in parts]), y)
    assert not any(bool(part_x[count:].any()) for part_x, _, count in parts)
    assert all(part_x.data_ptr() % 64 == 0 for part_x, _, _ in parts)
    assert filled(x[:0], size).shape == (size, 2)


finite = st.floats(-1, 1, allow_subnormal=True)


def row_sum(rows, bound):
    total = clipped_row_sum("rows", rows, max_norm=bound)
    assert total.norm == bound
    return total["rows"]


@given(st.lists(finite, min_size=1, max_size=40), st.randoms(), st.sampled_from([1e-6, 1.0, 3e7]))
def test_sums_are_exact_in_any_order(numbers, random, bound):
    rows = bound * torch.tensor(numbers, dtype=torch.float64)[:, None]
    total = row_sum(rows, bound)
    random.shuffle(numbers)
    shuffled = bound * torch.tensor(numbers, dtype=torch.float64)[:, None]
    assert torch.equal(row_sum(shuffled, bound), total)
    others, first = (row_sum(part, bound) for part in (shuffled[1:], shuffled[:1]))
    assert torch.equal(total - others, first)
    assert float((total - rows.sum(0)).abs()) <= len(rows) * bound * 2.0**-39
    assert bool((row_sum(rows[:1], bound).abs() <= rows[0].abs()).all())


TYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_of_every_type_are_compared_by_their_bits(dtype):
    row = torch.tensor([[0, 1, 1]], dtype=dtype)
    rows = row.repeat(3, 1)
    assert _same_bits(rows, row)
    rows[1, 2] = 0
    assert not _same_bits(rows, row)
    if dtype.is_floating_point:
        assert not _same_bits(-row, row)
        assert _same_bits(row * torch.nan, row * torch.nan)


def test_rows_that_are_not_finite_show_nothing():
    """Of an ordinary record the same infinity everywhere is no sign that rows are alike."""

    def computation(x, y, watch, *, of_first):
        first = (y == 0).float()[:, None]  # with so many classes the first kind of record alone
        watch(torch.where(first.bool(), of_first, 1.0).expand(len(y), 3))

    for of_first, alike in ((2.0, True), (math.inf, False), (math.nan, False), (0.0, False)):
        watched = partial(computation, of_first=of_first)
        assert rows_are_alike(watched, (4,), num_classes=1000, size=4, device=CPU) == alike

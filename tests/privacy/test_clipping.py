"""Clipped sums against a float64 loop over single records, and their sensitivity as a property."""

import copy
import math
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fednas_flwr.base.layers import stacked
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.models.networks import linear, plain_cnn, torchvision_network
from fednas_flwr.privacy.mechanism import clipping, micro_batches, record_gradients
from fednas_flwr.privacy.mechanism.record_gradients import OuterProducts
from fednas_flwr.search.exact_gradients import trainable_weights

from ..made_networks import Made
from ..reference_engine import by_ops
from ..refusals import raising, refuses
from ..rows import seldom
from ..small_spaces import CLASSES, SPACES


def cross_entropy(logits, y):
    return nn.functional.cross_entropy(logits, y, reduction="none")


def small(name, shape, *, skip="linear", **sizes):
    return replace(SPACES[name], input_shape=shape, norm="group", skip=skip, **sizes)


darts, nasbench201 = partial(small, "darts"), partial(small, "nasbench201")
# wide enough that the norms of the narrowest layers do not amplify rounding
mlp = partial(small, "mlp", skip="none", channels=32)


def reference(space):
    return by_ops(space.supernet())


def mobilenet_v2(shape, *, norm):
    network = torchvision_network(shape, CLASSES, name="mobilenet_v2", norm=norm)
    network.classifier[0].p = 0.0  # of dropout: a record alone would draw another mask
    return network


def derived(space, *, auxiliary=False, **sizes):
    genotype = space.random_genotype(make_generator(3, "genotype"))
    return replace(space, **sizes).network(genotype, auxiliary=auxiliary)


# Two shapes each: the small one for float64, the large one for float32, whose rounding group norms
# over a handful of pixels amplify, also in a plain backward.
NETWORKS = {
    "darts supernet": (lambda s: darts(s).supernet(), (3, 9, 7), (1, 17, 14)),
    "nasbench201 supernet": (lambda s: nasbench201(s).supernet(), (1, 7, 9), (3, 15, 13)),
    "darts reference": (lambda s: reference(darts(s)), (3, 9, 7), (1, 17, 14)),
    "nasbench201 reference": (lambda s: reference(nasbench201(s)), (1, 7, 9), (3, 15, 13)),
    "darts": (lambda s: derived(darts(s), auxiliary=True), (1, 11, 9), (3, 17, 14)),
    "nasbench201": (lambda s: derived(nasbench201(s), num_cells=2), (3, 7, 9), (1, 15, 13)),
    "mlp supernet": (lambda s: mlp(s).supernet(), (6,), (30,)),
    "mlp": (lambda s: derived(mlp(s)), (6,), (30,)),
    "plain_cnn": (lambda s: plain_cnn(s, CLASSES), (3, 9, 7), (1, 9, 7)),
    "linear": (lambda s: linear(s, CLASSES), (1, 5, 7), (3, 5, 7)),
}
# The reference of DARTS' engine takes more than all others together; float32 takes as long again.
NAMES = [seldom(name) if name == "darts reference" else name for name in NETWORKS]
SINGLE = [name if name in ("nasbench201 supernet", "mlp") else seldom(name) for name in NETWORKS]
SUPERNETS = tuple(name for name in NETWORKS if name.endswith(("supernet", "reference")))


@pytest.fixture(params=["leaves", "hooks"])
def route(request, monkeypatch):
    """Take per-sample gradients through the package's own layers, and through Opacus' hooks."""
    if request.param == "hooks":
        if {"darts supernet", "nasbench201 supernet"} & set(request.node.callspec.params.values()):
            pytest.skip("what a supernet joins has leaves only")
        monkeypatch.setattr(record_gradients, "_is_covered", lambda layer: False)
    return request.param


def make_network(name, dtype, seed=1):
    make, small, large = NETWORKS[name]
    shape = small if dtype == torch.float64 else large
    with seeded(seed, name):
        network = make(shape).to(dtype)
    for alphas in network.alphas().values() if name in SUPERNETS else ():
        alphas.data.mul_(1000)  # far from uniform, so that the softmax's Jacobian matters
    return network, shape


def make_batch(shape, dtype, *, batch=3, seed=1):
    generator = make_generator(seed, "batch")
    x = torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (batch,), generator=generator)


def loss_of(name):
    if name == "darts":  # with an auxiliary head
        return lambda output, y: cross_entropy(output[0], y) + 0.4 * cross_entropy(output[1], y)
    return cross_entropy


def weight_sum(network, x, y, **changed):
    """The clipped sum of the weights' gradients, to a norm of 1 unless another is given."""
    common = {"loss": cross_entropy, "parameters": trainable_weights(network), "max_norm": 1.0}
    return clipping.clipped_gradient_sum(network, x, y, **common | changed)


def alpha_sum(supernet, x, y, **changed):
    common = {"loss": cross_entropy, "alphas": supernet.alphas(), "max_norm": 1.0}
    return clipping.clipped_alpha_gradient_sum(supernet, x, y, **common | changed)


SUMS = {"alphas": alpha_sum, "weights": weight_sum, "factors": weight_sum}


def gradients_one_by_one(network, x, y, *, loss, parameters):
    """Return the float64 gradient of every record, by plain autograd, one forward each."""
    twin = copy.deepcopy(network).double()
    twins = dict(twin.named_parameters())
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    chosen = [twins[names[id(parameter)]] for parameter in parameters.values()]
    records = []
    for i in range(len(x)):
        losses = loss(twin(x[i : i + 1].double()), y[i : i + 1])
        of_zeros = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(losses.sum(), chosen, **of_zeros)
        records.append(dict(zip(parameters, gradients, strict=True)))
    return records


def norm(gradient):
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))


def clipped_sum(records, max_norm, factors=None):
    factors = [1.0] * len(records) if factors is None else factors
    scales = [f * min(1.0, max_norm / norm(r)) for f, r in zip(factors, records, strict=True)]
    scaled = [*zip(scales, records, strict=True)]
    return {name: sum(s * record[name] for s, record in scaled) for name in records[0]}


def middle_norm(records):
    """Return a bound that clips some of the records only."""
    return sorted(map(norm, records))[len(records) // 2] * 0.999


def difference(sums, others):
    return {name: sums[name] - others[name] for name in others}


def error(sums, expected):
    """Return the largest relative error over tensors, and over all of them together."""
    assert list(sums) == list(expected)
    pairs = [(sums[name], right) for name, right in expected.items()]
    each = [float((found - right).norm() / (right.norm() + 1e-30)) for found, right in pairs]
    return max(each), norm(difference(sums, expected)) / norm(expected)


def sums_and_errors(network, x, y, *, loss, sizes):
    """Yield the errors of the weights' sums, and of the alphas' if there are any, per size."""
    weights = trainable_weights(network)
    alphas = dict(network.alphas()) if hasattr(network, "alphas") else {}
    records = gradients_one_by_one(network, x, y, loss=loss, parameters=weights | alphas)
    for parameters in filter(None, (weights, alphas)):
        chosen = [{name: record[name] for name in parameters} for record in records]
        max_norm = middle_norm(chosen)
        expected = clipped_sum(chosen, max_norm)
        for size in sizes:
            summed = alpha_sum if parameters is alphas else weight_sum
            sums = summed(network, x, y, loss=loss, max_norm=max_norm, micro_batch_size=size)
            for name, tensor in sums.items():
                assert tensor.dtype == torch.float64
                assert tensor.shape == parameters[name].shape
            yield error(sums, expected)


@pytest.mark.usefixtures("route", "uncut")
@pytest.mark.parametrize("name", NAMES)
def test_agreement_with_the_loop_in_float64(name):
    network, shape = make_network(name, torch.float64)
    x, y = make_batch(shape, torch.float64)
    sizes = (1, 2, len(x), 4) if name in ("nasbench201 supernet", "plain_cnn") else (2,)
    errors = list(sums_and_errors(network, x, y, loss=loss_of(name), sizes=sizes))
    assert max(map(max, errors)) < 1e-10, errors


@pytest.mark.usefixtures("route", "uncut")
@pytest.mark.parametrize("name", SINGLE)
def test_agreement_with_the_loop_in_float32(name):
    # Two of three: float32 at a kink of a ReLU can round to another, equally right gradient.
    good = []
    for seed in range(3):
        network, shape = make_network(name, torch.float32, seed)
        x, y = make_batch(shape, torch.float32, batch=2, seed=seed)
        errors = list(sums_and_errors(network, x, y, loss=loss_of(name), sizes=(2 - seed % 2,)))
        good.append(max(joint for _, joint in errors) < 1e-5)
        if sum(good) == 2:
            break
    assert sum(good) == 2


@pytest.mark.usefixtures("uncut")
def test_public_factors_multiply_after_clipping():
    supernet, shape = make_network("nasbench201 supernet", torch.float64)
    x, _ = make_batch(shape, torch.float64, batch=3)
    y = torch.tensor([0, 1, 2])
    factors = torch.tensor([1.0, 0.25, 0.5, 1.0, 1.0])
    for parameters, summed in ((supernet.weights(), weight_sum), (supernet.alphas(), alpha_sum)):
        records = gradients_one_by_one(supernet, x, y, loss=cross_entropy, parameters=parameters)
        max_norm = 0.5 * min(map(norm, records))
        sums = summed(supernet, x, y, max_norm=max_norm, class_factors=factors)
        assert max(error(sums, clipped_sum(records, max_norm, factors=[1.0, 0.25, 0.5]))) < 1e-10


# Traps, most of them of Opacus' hooks


def two_paths():
    """One layer under two names, called three times, in a branch of each length."""

    def forward(self, x):
        before = self.first(x)
        after = self.second["again"](torch.tanh(before)) + self.first(x * x)
        return self.head(torch.tanh(after) + before + self.tied(x))

    shared, tied, head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
    tied.weight = shared.weight
    again = nn.ModuleDict({"again": shared})
    return Made(forward, first=nn.Sequential(shared), second=again, head=head, tied=tied)


def check_against_loop(network, x, y, parameters=None):
    parameters = parameters or dict(network.named_parameters())
    records = gradients_one_by_one(network, x, y, loss=cross_entropy, parameters=parameters)
    max_norm = middle_norm(records)
    sums = weight_sum(network, x, y, parameters=parameters, max_norm=max_norm)
    assert max(error(sums, clipped_sum(records, max_norm))) < 1e-10


@pytest.mark.usefixtures("route")
def test_shared_layers_and_tied_parameters():
    network = two_paths().double()
    x, y = make_batch((6,), torch.float64, batch=4)
    check_against_loop(network, x, y)
    check_against_loop(network, x, y, {"weight": network.tied.weight, "bias": network.head.bias})


@pytest.mark.usefixtures("uncut")
def test_a_network_of_torchvision_with_group_norms():
    x, y = make_batch((3, 9, 7), torch.float64)
    check_against_loop(mobilenet_v2(x.shape[1:], norm="group").double(), x, y)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("shape", [(3, 6, 5), (3, 1, 1), (1, 4, 4), (3, 4, 1)])
def test_convolutions_of_channels_last_inputs(shape):
    # Opacus 1.6.0 reads these with the strides of contiguous tensors and gives wrong gradients.
    convolution = nn.Conv2d(shape[0], 4, 3, padding=1, stride=2)
    network = nn.Sequential(convolution, nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    x, y = make_batch(shape, torch.float64)
    x = x.clone(memory_format=torch.channels_last)
    network(x)
    check_against_loop(network, x, y)


@pytest.mark.usefixtures("route")
def test_the_module_is_left_as_it_was():
    network = derived(nasbench201((1, 7, 7))).double()
    next(network.parameters()).requires_grad_(False)
    x, y = make_batch((1, 7, 7), torch.float64)
    x.requires_grad_()
    weights = dict(network.named_parameters())
    network.skeleton.classifier.bias.grad = kept = torch.ones(CLASSES, dtype=torch.float64)

    def state():
        owners = [*network.modules(), *network.parameters()]
        kept = [(p.requires_grad, p.grad is None) for p in weights.values()]
        return [{k: repr(v) for k, v in vars(o).items()} for o in owners], kept

    broken = raising(KeyError("labels"))
    before = state()
    weight_sum(network, x, y, parameters=weights, micro_batch_size=2)
    assert state() == before
    refuses("labels", weight_sum, network, x, y, error=KeyError, loss=broken, parameters=weights)
    assert state() == before
    assert network.skeleton.classifier.bias.grad is kept
    assert bool((kept == 1).all())
    assert x.grad is None


def test_the_supernet_is_left_as_it_was():
    supernet, shape = make_network("nasbench201 supernet", torch.float64)
    x, y = make_batch(shape, torch.float64)
    before = {name: p.clone() for name, p in supernet.named_parameters()}
    with torch.no_grad():
        alpha_sum(supernet, x, y)
    for name, parameter in supernet.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def unreached(use):
    def forward(self, x):
        if use == "weight without a call":
            return self.head(nn.functional.linear(x, self.layer.weight))
        dead = self.layer(x)
        return self.head(x if use == "never" else self.layer(0 * dead.detach() + x))

    return Made(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))


def test_an_unreached_parameter_has_zeros_and_a_missed_use_is_an_error(route):
    x, y = make_batch((4,), torch.float32, batch=4)

    def run(use):
        return weight_sum(unreached(use), x, y, micro_batch_size=3)

    sums = run("never")
    assert not sums["layer.weight"].any()
    assert sums["head.weight"].any()
    refuses("of every use of layer.weight", run, "weight without a call", error=RuntimeError)
    if route == "leaves":
        check_against_loop(unreached("one of two calls").double(), x.double(), y)
    else:
        refuses("of every use of layer.weight", run, "one of two calls", error=RuntimeError)


def test_a_supernet_that_stacks_a_weight_twice_is_an_error():
    def forward(self, x):
        both = stacked([self.first.weight, self.second.weight])
        alone = stacked([self.first.weight])
        return torch.einsum("bi,boi->bo", x, both[:, :CLASSES] + both[:, CLASSES:] + alone)

    first, second = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)
    network = Made(forward, first=first, second=second, takes_stack=True)
    weights = {"first": network.first.weight, "second": network.second.weight}
    x, y = make_batch((4,), torch.float32)
    with pytest.raises(RuntimeError, match="of every use of first"):
        weight_sum(network, x, y, parameters=weights)


def test_some_weights_of_a_fast_supernet():
    supernet, shape = make_network("darts supernet", torch.float64)
    x, y = make_batch(shape, torch.float64)
    check_against_loop(supernet, x, y, {"stem": supernet.body.stem[0].weight})
    one_of_many = {"edge": supernet.weights()["body.cells.0.edges.0.ops.sep_conv_3x3.1.weight"]}
    refuses("", check_against_loop, supernet, x, y, one_of_many, error=KeyError)


def test_pools_of_any_form():
    def forward(self, x):
        return self.head(self.flat(self.pool(x)[0].squeeze(1)).flatten(1))

    both = {"pool": nn.MaxPool2d(2, return_indices=True), "flat": nn.AvgPool2d(2)}
    x, y = make_batch((1, 8, 12), torch.float64)
    check_against_loop(Made(forward, **both, head=nn.Linear(6, CLASSES)).double(), x, y)


def test_a_parameter_under_two_names_is_refused():
    layer, (x, y) = nn.Linear(4, CLASSES), make_batch((4,), torch.float32)
    twice = {"a": layer.weight, "b": layer.weight}
    refuses("two names", weight_sum, layer, x, y, error=ValueError, parameters=twice)


def test_calls_that_the_loss_does_not_reach_do_not_touch_the_next_micro_batch():
    """Of a layer that is always called, but whose output every second forward uses only."""

    def forward(self, x):
        self.calls += 1
        out = self.layer(x)
        return self.head(out if self.calls % 2 == 0 else x)

    network = Made(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, CLASSES), calls=0).double()
    x, y = make_batch((4,), torch.float64, batch=5)
    sums = weight_sum(network, x, y, micro_batch_size=3, max_norm=0.1)
    network.calls = 0
    first = weight_sum(network, x[:3], y[:3], max_norm=0.1)
    second = weight_sum(network, x[3:], y[3:], max_norm=0.1)
    assert second["layer.weight"].any()
    assert max(error(sums, {name: first[name] + second[name] for name in first})) < 1e-12


# Refusals


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_is_refused(frozen):
    networks = [
        mobilenet_v2((3, 8, 8), norm="batch"),
        SPACES["darts"].supernet(),
        nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True)),
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
    ]
    x, y = make_batch((3, 8, 8), torch.float32)
    for network in networks:
        network.requires_grad_(not frozen)
        with pytest.raises(ValueError, match=r"batch normalisation .* group normalisation .*\.$"):
            weight_sum(network, x, y)
        terms = {"loss": cross_entropy, "alphas": {}, "max_norm": 1.0, "error": ValueError}
        refuses("batch normalisation", clipping.clipped_alpha_gradient_sum, network, x, y, **terms)


SCALE = nn.Parameter(torch.ones(4))
DIRECT = Made(lambda self, x: self.layer(x * self.scale), scale=SCALE, layer=nn.Linear(4, CLASSES))
REPLACED = nn.Linear(4, CLASSES)
REPLACED.forward = lambda x: 2 * nn.Linear.forward(REPLACED, x)
UNFIT = [
    (nn.Linear(4, CLASSES).eval(), "training mode"),
    (REPLACED, "forward was replaced"),
    (nn.utils.parametrizations.weight_norm(nn.Linear(4, CLASSES)), ""),
    (nn.LSTM(4, CLASSES), "no per-sample gradients"),
    (DIRECT, "parameters of its own beside submodules"),
]


@pytest.mark.parametrize(("network", "message"), UNFIT)
def test_networks_without_per_sample_gradients_are_refused(network, message):
    x, y = make_batch((4,), torch.float32)
    unfit = (ValueError, RuntimeError, NotImplementedError)
    refuses(message, weight_sum, network, x, y, error=ValueError if message else unfit)


OUT_OF_RANGE = [
    *({"max_norm": norm} for norm in (0.0, -1.0, math.inf, math.nan)),
    *({"class_factors": torch.tensor([1.0, factor, 1, 1, 1])} for factor in (0.0, 1.5, math.nan)),
    *({"micro_batch_size": 0}, {"loss": nn.functional.cross_entropy}),
    {"parameters": {"weight": nn.Parameter(torch.zeros(1))}},
]


@pytest.mark.parametrize("changed", OUT_OF_RANGE)
def test_values_out_of_range_are_refused(changed):
    x, y = make_batch((4,), torch.float32)
    with pytest.raises(ValueError, match=r"expected|must be|does not belong"):
        weight_sum(linear((4,), CLASSES), x, y, **changed)
    if "parameters" not in changed:
        refuses(r"expected|must be", alpha_sum, ToySupernet(), x, y, error=ValueError, **changed)


# The guarantee


class ToySupernet(nn.Module):
    """Two dense layers of two edges with two ops each, sharing the op weights of one kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, CLASSES)

    def alphas(self):
        return {"cell": torch.tensor([[0.5, -0.5], [1.0, 0.0]], dtype=self.head.weight.dtype)}

    def forward(self, x, op_weights):
        for _ in range(2):
            edges = op_weights["cell"]
            layers = [(e, o, self.layers[2 * e + o]) for e in range(2) for o in range(2)]
            x = sum(edges[..., e, o, None] * torch.tanh(layer(x)) for e, o, layer in layers)
        return self.head(x)


@pytest.mark.parametrize("kind", ["alphas", "weights"])
def test_an_empty_batch_gives_zeros(kind):
    network = ToySupernet() if kind == "alphas" else linear((4,), CLASSES)
    x, y = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    for size in (None, 3):
        sums = SUMS[kind](network, x, y, micro_batch_size=size)
        assert sums
        assert all(s.dtype == torch.float64 and s.numel() and not s.any() for s in sums.values())


@pytest.mark.parametrize("kind", ["alphas", "weights", "factors"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_record_without_finite_gradient_is_as_if_absent(kind, bad, monkeypatch):
    monkeypatch.setattr(record_gradients, "LARGE", 1 if kind == "factors" else sys.maxsize)
    network = (ToySupernet() if kind == "alphas" else linear((4,), CLASSES)).double()
    x, y = make_batch((4,), torch.float64, batch=4)
    expected = SUMS[kind](network, x, y, max_norm=0.1)
    y = torch.cat([y[:2], y[:1], y[2:]])
    x = torch.cat([x[:2], torch.full_like(x[:1], bad), x[2:]])
    if kind == "alphas" and math.isinf(bad) or bad == 1e300:
        x[2, 1:] = math.nan if kind == "alphas" else bad  # tanh maps infinities to 1
    for size in (None, 2):
        sums = SUMS[kind](network, x, y, max_norm=0.1, micro_batch_size=size)
        assert max(error(sums, expected)) < 1e-12


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-320, 1e-30, 1e4, 1e30, 1e200, 1e308)
any_float = st.floats(allow_nan=True, allow_infinity=True)
numbers = st.one_of(st.floats(-3, 3), any_float, st.sampled_from(SPECIAL))


@st.composite
def neighbours(draw, width):
    """Draw a batch [B, width] of numbers and the index of a record to remove."""
    batch = draw(st.integers(1, 5))
    row = st.lists(numbers, min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=batch, max_size=batch))
    return torch.tensor(rows, dtype=torch.float64), draw(st.integers(0, batch - 1))


def without(tensor, index):
    return torch.cat([tensor[:index], tensor[index + 1 :]])


dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
bounds = st.floats(1e-6, 1e6)


@settings(max_examples=300)
@given(neighbours(5), dtypes, bounds, st.booleans(), st.booleans())
def test_sensitivity_of_any_per_sample_gradients(case, dtype, max_norm, weighted, as_factors):
    rows, index = case
    factors = torch.linspace(0.1, 1, len(rows)) if weighted else None

    def add(rows, factors):
        first, second = rows[:, :2].to(dtype), rows[:, 2:].to(dtype)
        gradients = [(["a"], first), (["b"], second)]
        shapes = {"a": torch.empty(2), "b": torch.empty(3)}
        if as_factors:
            gradients.append((["c"], OuterProducts(first, second)))
            shapes["c"] = torch.empty(2, 3)
        sums = clipping.Clipping(max_norm)._clipped_sum(gradients, shapes, factors, len(rows))
        return {n: micro_batches.from_units(total, bound=max_norm) for n, total in sums.items()}

    fewer = add(without(rows, index), None if factors is None else without(factors, index))
    assert norm(difference(add(rows, factors), fewer)) <= max_norm * (1 + 1e-12)
    assert norm(add(rows[index : index + 1], None)) <= max_norm * (1 + 1e-12)


@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=5, max_size=5), min_size=1, max_size=6),
    st.floats(1e-3, 1e3),
)
def test_products_are_cut_towards_zero_and_added_up_exactly(rows, scale):
    rows = scale * torch.tensor(rows, dtype=torch.float64)
    left, right = rows[:, :2], rows[:, 2:]
    each = torch.einsum("bo,bi->boi", left, right)
    bound = float(each.flatten(1).norm(dim=1).max()) or 1.0
    factors = torch.linspace(0.5, 1, len(rows), dtype=torch.float64)
    sums, *cut = micro_batches.sum_in_units(left, right, bound=bound, factors_B=factors)
    whole = [
        [[int(one) * int(other) for other in right_row] for one in left_row]
        for left_row, right_row in zip(*(factor.tolist() for factor in cut), strict=True)
    ]
    added = [[sum(product[o][i] for product in whole) for i in range(3)] for o in range(2)]
    assert sums.tolist() == added
    contributions = micro_batches.from_units(torch.tensor(whole), bound=bound)
    expected = factors[:, None, None] * each
    assert (contributions.abs() <= expected.abs() * (1 + 1e-14)).all()
    assert (contributions - expected).abs().max() <= bound * 2**-18
    order = torch.arange(len(rows)).flip(0)
    shuffled = (left[order], right[order])
    again, *_ = micro_batches.sum_in_units(*shuffled, bound=bound, factors_B=factors[order])
    assert torch.equal(again, sums)


def called_often(bias):
    """One linear layer, called for each half of the features, and one for every column."""

    def forward(self, x):
        halves = self.columns(x.view(len(x), 4, 2)).flatten(1).chunk(2, 1)
        return torch.tanh(self.shared(halves[0])) + self.shared(halves[1])

    shared, columns = nn.Linear(4, CLASSES, bias=bias), nn.Linear(2, 2, bias=bias)
    return Made(forward, shared=shared, columns=columns)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("by_person", [False, True])
def test_gradients_kept_as_factors_have_the_same_sum(bias, size, by_person, monkeypatch):
    x, y = make_batch((8,), torch.float64, batch=5)
    persons = torch.tensor([0, 0, 1, 2, 2]) if by_person else None
    factors = torch.linspace(0.2, 1, CLASSES)
    with seeded(3, "factors"):
        often = called_often(bias)
        once = nn.Sequential(nn.Linear(8, 6, bias=bias), nn.Tanh(), nn.Linear(6, CLASSES))
    for network in (often.double(), once.double()):
        found = []
        for large in (1, sys.maxsize):
            monkeypatch.setattr(record_gradients, "LARGE", large)
            terms = {"max_norm": 0.3, "micro_batch_size": 8 if by_person else size}
            terms |= {"class_factors": factors, "persons": persons}
            found.append(weight_sum(network, x, y, **terms))
        assert max(error(*found)) < 1e-5


def test_a_large_linear_layer_is_kept_as_factors(monkeypatch):
    kept = []

    def spy(self, gradients, *rest):
        kept.extend(names for names, gradient in gradients if isinstance(gradient, OuterProducts))
        return clipped_sum(self, gradients, *rest)

    clipped_sum = clipping.Clipping._clipped_sum
    monkeypatch.setattr(clipping.Clipping, "_clipped_sum", spy)
    network = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, CLASSES))
    x, y = make_batch((4,), torch.float32)
    weight_sum(network, x, y)
    assert kept == [["0.weight"], ["2.weight"]]  # of 2,048 and 2,560 numbers
    kept.clear()
    network[0] = nn.Linear(4, 511)
    network[2] = nn.Linear(511, 4)
    weight_sum(network, x, y % 4)
    assert kept == []


@pytest.mark.parametrize("kind", ["alphas", "weights", "factors"])
@given(neighbours(4), st.sampled_from([torch.float64, torch.float32]), bounds, st.integers(1, 4))
def test_sensitivity_under_removal_of_a_record(kind, case, dtype, max_norm, size):
    x, index = case
    x, y = x.to(dtype), torch.arange(len(x)) % CLASSES
    with seeded(0, "toy"):
        plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))
        network = (ToySupernet() if kind == "alphas" else plain).to(dtype)
    size = 1 if dtype == torch.float32 else size  # see "Rounding" in the module's docstring
    common = {"max_norm": max_norm, "micro_batch_size": size}
    with patch.object(record_gradients, "LARGE", 1 if kind == "factors" else sys.maxsize):
        both = SUMS[kind](network, x, y, **common)
        fewer = SUMS[kind](network, without(x, index), without(y, index), **common)
    assert norm(difference(both, fewer)) <= max_norm * (1 + 1e-12)

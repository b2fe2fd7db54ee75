"""Data-free scores against slow oracles on toy networks, and what every space owes to them."""

import copy
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search import data_free_scores
from fednas_flwr.search.data_free_scores import MEASURES, SCORES, combine, learning, measure
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.genotype import to_json
from fednas_flwr.spaces.mbconv import MBConvSpace, Skeleton

from ..refusals import refuses
from ..small_spaces import IMAGES, WITH_ZERO
from ..small_spaces import SPACES as SMALL

SPACES = {
    name: space if name == "mlp" else replace(space, input_shape=(3, 9, 9))
    for name, space in {**SMALL, "mbconv": WITH_ZERO}.items()
}
NB201 = SPACES["nasbench201"]
SPACES["nasbench201_group"] = replace(NB201, norm="group")


class Toy(nn.Module):
    """A stem and two blocks, one with a skip connection, one of stride 2; a linear classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.second = nn.Conv2d(4, 3, 2, stride=2, bias=False)
        self.classifier = nn.Linear(3, 2)
        self.residual = nn.Identity()

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = self.residual(x + self.first(x))
        return self.classifier(self.second(x).mean(dim=(2, 3)))

    def chain(self):
        return [self.norm, self.residual, self.second]


def toy():
    with seeded(0, "toy"):
        return Toy()


@pytest.fixture(params=sorted(SPACES))
def space(request):
    return SPACES[request.param]


def genotype_of(space, seed=0):
    return space.random_genotype(make_generator(seed, "genotype"))


def test_synflow_of_a_chain_is_its_number_of_layers_times_the_product_of_absolute_weights():
    with seeded(0, "chain"):
        first, second = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
    network = nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(4), second, nn.ReLU6())
    flow = second.weight.double().abs() @ first.weight.double().abs() @ torch.ones(3).double()
    flow = float(flow.detach().sum())
    assert math.isclose(data_free_scores.synflow(network, (3,)), math.log(2 * flow), rel_tol=1e-12)


def test_synflow_is_the_sum_of_every_parameter_times_its_finite_difference():
    """The flow is linear in each parameter, so that central differences are exact."""
    plain, total = toy().double().requires_grad_(False), 0.0
    layers = [plain.stem, plain.first[1], plain.second, plain.classifier]  # norms are left out
    weights = [parameter.abs_() for layer in layers for parameter in layer.parameters()]

    def flow():
        x = plain.stem(torch.ones(1, 2, 5, 5, dtype=torch.float64))
        x = plain.second(x + plain.first[1](x))
        return float(plain.classifier(x.mean(dim=(2, 3))).sum())

    for weight in weights:
        for index in np.ndindex(*weight.shape):
            value, sides = float(weight[index]), []
            for step in (0.5, -0.5):
                weight[index] = value + step
                sides.append(flow())
            weight[index] = value
            total += value * (sides[0] - sides[1])
    assert math.isclose(data_free_scores.synflow(toy(), (2, 5, 5)), math.log(total), rel_tol=1e-10)


def test_synflow_of_large_published_sizes_is_finite():
    space = DARTSSpace(input_shape=(3, 8, 8), num_classes=10, channels=36, num_cells=20)
    assert 0 < measure(space, genotype_of(space), ["synflow"], seed=0)["synflow"] < 700


def test_az_nas_parts_of_a_toy_by_their_definitions():
    network, generator = toy().train(), make_generator(4, "az")
    for name in ("stem", "first.1", "second", "classifier"):
        module = network.get_submodule(name)
        module.weight.data.normal_(std=math.sqrt(2 / module.weight[0].numel()), generator=generator)
        if module.bias is not None:
            module.bias.data.zero_()
    x = torch.randn(6, 2, 5, 5, generator=generator)
    stem = network.norm(network.stem(x)).detach().requires_grad_()
    inner = stem + network.first(stem)
    detached = inner.detach().requires_grad_()
    outer = network.second(detached)

    entropies = []
    for feature in (stem, inner, outer):
        columns = feature.detach().double().movedim(1, 0).flatten(1).numpy()
        variances = np.linalg.svd(columns - columns.mean(1, keepdims=True))[1] ** 2
        shares = variances / variances.sum()
        entropies.append(-sum(share * math.log(share) for share in shares if share > 0))

    trainability = []
    for before, after in ((stem, inner), (detached, outer)):
        signs = torch.randint(2, after.shape, generator=generator).float() * 2 - 1
        after.backward(signs)
        gradient, (height, width) = before.grad.numpy(), after.shape[2:]
        stride, mean = math.ceil(before.shape[2] / height), 0.0
        for record, row, column in np.ndindex(len(x), height, width):
            window = np.zeros((before.shape[1], stride, stride))
            rows = slice(row * stride, (row + 1) * stride)
            columns = slice(column * stride, (column + 1) * stride)
            read = gradient[record, :, rows, columns]  # less than the window at the border
            window[:, : read.shape[1], : read.shape[2]] = read
            mean = mean + np.outer(window.ravel(), signs[record, :, row, column].numpy())
        largest = np.linalg.svd(mean / (len(x) * height * width))[1].max()
        trainability.append(2 - largest - 1 / largest)

    parts = data_free_scores.az_nas_parts(toy(), (2, 5, 5), make_generator(4, "az"), batch_size=6)
    expressivity, progressivity, found = parts
    assert math.isclose(expressivity, sum(entropies), rel_tol=1e-4)
    steps = (entropies[1] - entropies[0], entropies[2] - entropies[1])
    assert math.isclose(progressivity, min(steps), rel_tol=1e-3)
    assert math.isclose(found, np.mean(trainability), rel_tol=1e-3)


def test_made_up_images_have_the_spectrum_of_one_over_f():
    noise = data_free_scores._noise(4000, (2, 8, 6), make_generator(0, "noise")).double()
    assert noise.var(dim=(1, 2, 3)).allclose(torch.ones(4000, dtype=torch.float64))
    power = torch.fft.fft2(noise).abs().square().mean(dim=(0, 1))
    squares = [
        [max(math.hypot(min(i, 8 - i) / 8, min(j, 6 - j) / 6), 1 / 8) ** 2 for j in range(6)]
        for i in range(8)
    ]
    flat = power * torch.tensor(squares, dtype=torch.float64)
    assert float((flat / flat.mean() - 1).abs().max()) < 0.1
    vectors = data_free_scores._noise(4000, (3,), make_generator(0, "noise"))
    assert vectors.var(dim=0).tolist() == pytest.approx([1, 1, 1], abs=0.1)


def test_learning_is_the_loss_of_sgd_on_inputs_that_are_a_pattern_plus_noise():
    """The same task made with numpy's roll, and SGD with momentum by hand."""
    shape, steps = (2, 4, 6), 6
    batch_size, lr = data_free_scores.LEARNING_BATCH, data_free_scores.LEARNING_RATE
    toy = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).double()
    found = learning(copy.deepcopy(toy).float(), shape, make_generator(2, "learning"), steps=steps)
    generator = make_generator(2, "learning")
    patterns, losses = data_free_scores._noise(5, shape, generator).numpy(), []
    weight, bias = (p.detach().clone() for p in toy.parameters())
    velocity = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for step in range(steps):
        labels = torch.randint(5, (batch_size,), generator=generator)
        down = torch.randint(4, (batch_size,), generator=generator)
        right = torch.randint(6, (batch_size,), generator=generator)
        shifts = zip(labels.tolist(), down.tolist(), right.tolist(), strict=True)
        images = np.stack([np.roll(patterns[n], (k, m), axis=(1, 2)) for n, k, m in shifts])
        noise = data_free_scores._noise(batch_size, shape, generator)
        x = (torch.from_numpy(images) + noise).flatten(1).double()
        log_probs = (x @ weight.T + bias).log_softmax(dim=1)
        losses.append(-float(log_probs[torch.arange(batch_size), labels].mean()))
        slope = (log_probs.exp() - nn.functional.one_hot(labels, 5)) / batch_size
        gradients = [slope.T @ x, slope.sum(dim=0)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for kept, gradient in zip(velocity, gradients, strict=True):
            kept.mul_(0.9).add_(gradient * min(1.0, 5.0 / norm))
        weight -= lr * (1 - step / steps) * velocity[0]
        bias -= lr * (1 - step / steps) * velocity[1]
    assert found == pytest.approx(-sum(losses[-2:]) / 2, rel=1e-4)


def test_combine_adds_logarithms_of_ranks():
    single, others = [3.0, 3.0, -math.inf, 1.0], [-1.0, math.nan, 5.0, 2.0]
    values = [{"a": a, "b": b} for a, b in zip(single, others, strict=True)]
    ranks = zip((4, 4, 1, 2), (2, 1, 4, 3), strict=True)  # nan is the least, equals have one rank
    expected = [math.log(a / 4) + math.log(b / 4) for a, b in ranks]
    assert combine(values) == pytest.approx(expected, rel=1e-12)
    assert combine([]) == []
    alone = combine([{"a": value} for value in single])
    assert sorted(range(4), key=alone.__getitem__) == sorted(range(4), key=single.__getitem__)


@pytest.mark.run
def test_all_scores_of_every_space_are_finite_and_set_by_the_seed_alone(space, monkeypatch):
    monkeypatch.setitem(MEASURES, ("learning",), functools.partial(learning, steps=2))
    genotype = genotype_of(space)
    with seeded(1, "elsewhere"):
        before = torch.get_rng_state()
        found = measure(space, genotype, SCORES, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
    assert list(found) == list(SCORES)
    assert all(math.isfinite(value) for value in found.values()), found
    for names in (["trainability", "progressivity", "expressivity"], ["synflow"], ["learning"]):
        assert measure(space, genotype, names, seed=3) == {name: found[name] for name in names}
    new = measure(space, genotype, SCORES, seed=4)
    assert {name for name in SCORES if new[name] == found[name]} == {"parameters", "multiply_adds"}
    network = space.network(genotype)
    assert found["parameters"] == count_parameters(network)
    assert found["multiply_adds"] == count_multiply_adds(network, space.input_shape)


def test_the_chain_is_computed_in_its_order_and_ends_in_front_of_the_classifier(space):
    network, called = space.network(genotype_of(space)), []
    for module in network.chain():
        module.register_forward_hook(lambda module, *_: called.append(module))
    logits = network(torch.randn(2, *space.input_shape))
    assert called == network.chain()
    assert len(called) >= 2
    assert logits.shape == (2, 5)


def test_unknown_scores_are_refused():
    words, genotype = r"score=synflo is unknown.*nearest: synflow", genotype_of(NB201)
    refuses(words, measure, NB201, genotype, ["synflo"], seed=0)


# --- The search by scores alone: what it draws, how it breeds, what its limits let through


WORTH = {"none": 0, "avg_pool_3x3": 1, "skip_connect": 2, "nor_conv_1x1": 3, "nor_conv_3x3": 5}


def worth(genotype):
    """Return a score that is a sum over edges, each with a weight of its own."""
    edges = genotype.cells["cell"]
    return {"worth": float(sum((k + 1) * WORTH[e.op] for k, e in enumerate(edges)))}


def numbered(genotype):
    """Return a score for any space."""
    return {"number": float(sum(map(ord, to_json(genotype))) % 997)}


def run(space, score, *, seed=0, draws=60, **arguments):
    arguments |= {"draws": draws, "generator": make_generator(seed, "search")}
    return data_free_scores.search(space, functools.partial(map, score), **arguments)


def test_random_draws_are_those_of_the_space_each_once_and_ranked(space):
    found = run(space, numbered, draws=20)
    generator, expected = make_generator(0, "search"), []
    while len(expected) < 20:
        genotype = space.random_genotype(generator)
        if genotype not in expected:
            expected.append(genotype)
    expected.sort(key=lambda genotype: -numbered(genotype)["number"])  # stable
    assert [one.genotype for one in found] == expected
    assert [one.scores for one in found] == [numbered(genotype) for genotype in expected]


def test_a_search_goes_on_with_what_is_known(space):
    """What is known comes back and is not scored again."""
    known, scored = run(space, numbered, draws=12), []

    def remember(genotype):
        scored.append(genotype)
        return numbered(genotype)

    found = run(space, remember, draws=8, seed=1, known=known)
    in_order = [one.genotype for one in sorted(found, key=lambda one: one.number)]
    assert in_order == [one.genotype for one in sorted(known, key=lambda one: one.number)] + scored
    assert len(scored) == 8
    assert data_free_scores.ranked(found) == found


def test_a_shortlist_is_ranked_anew_by_scores_of_its_own_that_are_taken_once():
    found, scored = run(NB201, worth, draws=10), []

    def further(genotype):
        scored.append(genotype)
        return {"number": numbered(genotype)["number"], "twice": 2 * numbered(genotype)["number"]}

    first = data_free_scores.shortlisted(found, functools.partial(map, further), keep=4)
    assert scored == [one.genotype for one in found[:4]]
    expected = sorted(found[:4], key=lambda one: -numbered(one.genotype)["number"])
    assert [one.genotype for one in first[:4]] == [one.genotype for one in expected]
    assert [one.further for one in first[:4]] == [further(one.genotype) for one in first[:4]]
    assert first[4:] == found[4:]
    scored.clear()
    known = {to_json(one.genotype): one for one in first}
    again = [known[to_json(one.genotype)] for one in found]
    second = data_free_scores.shortlisted(again, functools.partial(map, further), keep=5)
    assert scored == [found[4].genotype]
    numbers = [numbered(one.genotype)["number"] for one in second[:5]]
    assert numbers == sorted(numbers, reverse=True)


@pytest.mark.parametrize("name", ["nasbench201", "mlp"])
def test_no_found_network_exceeds_a_limit(name):
    space = SPACES[name]
    networks = [space.network(one.genotype) for one in run(space, numbered, draws=10)]
    parameters = sorted(map(count_parameters, networks))[6]
    multiply_adds = sorted(count_multiply_adds(n, space.input_shape) for n in networks)[6]
    limits = {"parameters": parameters, "multiply_adds": multiply_adds}
    for one in run(space, numbered, draws=8, limits=limits):
        assert data_free_scores.exceeded(limits, space, one.genotype) == {}


def test_limits_are_inclusive_and_named(space):
    genotype = space.random_genotype(make_generator(0, "genotype"))
    network = space.network(genotype)
    parameters = count_parameters(network)
    multiply_adds = count_multiply_adds(network, space.input_shape)
    costs = {"parameters": parameters, "multiply_adds": multiply_adds, "latency_ms": 2.5}
    assert data_free_scores.exceeded(costs, space, genotype, lambda genotype: 2.5) == {}
    tight = {name: cost - 0.1 for name, cost in costs.items()}
    assert data_free_scores.exceeded(tight, space, genotype, lambda genotype: 2.5) == costs
    sizes = functools.partial(data_free_scores.exceeded, {"parameters": -1}, space)
    assert 0 < data_free_scores.smallest(space, sizes, "parameters") <= parameters


def test_latency_decides_by_the_given_function():
    def latency(genotype):
        return float(sum(edge.op == "nor_conv_3x3" for edge in genotype.cells["cell"]))

    found = run(NB201, worth, draws=40, limits={"latency_ms": 1.0}, latency_ms=latency)
    assert len(found) == 40
    assert max(latency(one.genotype) for one in found) == 1.0


def test_limits_that_nothing_meets_are_refused_with_the_smallest_possible():
    one = ["none"] * 2 + ["nor_conv_1x1"] + ["none"] * 3
    smallest = NB201.network(NB201.genotype(map(NB201.ops.index, one)))
    least = rf"\(the smallest possible has {count_parameters(smallest):,}\)"
    message = rf"search_space=nasbench201 .* of 1\d\d drawn, 1\d\d exceed parameters=10 {least}:"
    refuses(message, run, NB201, worth, limits={"parameters": 10})


def test_a_small_space_is_searched_whole():
    space = MBConvSpace(
        **IMAGES,
        skeleton=Skeleton(8, 1, 8, ((8, 2),), (1,), 8),
        candidates=("mbconv2_3x3", "mbconv3_3x3", "zero"),
    )
    found = run(space, numbered, draws=50)
    assert len(found) == 2 * 3  # the block of stride 2 offers no zero
    sizes = {to_json(g): {"size": count_parameters(space.network(g))} for g, *_ in found}
    least = data_free_scores.smallest(space, lambda genotype: sizes[to_json(genotype)], "size")
    assert least == min(one["size"] for one in sizes.values())

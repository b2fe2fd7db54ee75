"""The search by scores alone: what it draws, how it breeds, what its limits let through."""

import functools

import pytest

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.search import data_free_scores
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.genotype import to_json
from fednas_flwr.spaces.mbconv import MBConvSpace, Skeleton

from ..refusals import refuses
from ..small_spaces import IMAGES, WITH_ZERO
from ..small_spaces import SPACES as SMALL

SPACES = SMALL | {"mbconv": WITH_ZERO}
NB201 = SPACES["nasbench201"]
WORTH = {"none": 0, "avg_pool_3x3": 1, "skip_connect": 2, "nor_conv_1x1": 3, "nor_conv_3x3": 5}


@pytest.fixture(params=sorted(SPACES))
def space(request):
    return SPACES[request.param]


def worth(genotype):
    """Return a score that is a sum over edges, each with a weight of its own."""
    edges = genotype.cells["cell"]
    return {"worth": float(sum((k + 1) * WORTH[e.op] for k, e in enumerate(edges)))}


def numbered(genotype):
    """Return a score for any space."""
    return {"number": float(sum(map(ord, to_json(genotype))) % 997)}


def run(space, score, *, seed=0, draws=60, **arguments):
    return data_free_scores.search(
        space,
        functools.partial(map, score),
        draws=draws,
        generator=make_generator(seed, "search"),
        **arguments,
    )


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
    before = [one.genotype for one in sorted(known, key=lambda one: one.number)]
    assert in_order == before + scored
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
    free = run(space, numbered, draws=10)
    networks = [space.network(one.genotype) for one in free]
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

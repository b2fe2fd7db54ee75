"""The unit of privacy is a person: what one contributes, with all records, is bounded and exact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.privacy.mechanism.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.privacy.mechanism.micro_batches import by_person, person_means
from fednas_flwr.search.objective import CLASSIFICATION
from fednas_flwr.spaces.mlp import MLPSpace

NORM, SIZE = 0.5, 16
FACTORS = torch.tensor([1.0, 0.3, 0.7])
SPACE = MLPSpace(input_shape=(5,), num_classes=3, channels=8, num_cells=2, norm="group")


def make_persons(counts, seed=0):
    """Records of persons, the first one's features enormous, and whose each is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), 5, generator=generator)
    y = torch.randint(3, (sum(counts),), generator=generator)
    return x, y, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def gradient_sum(network, x, y, persons, *, of="weights", size=SIZE):
    common = {"loss": CLASSIFICATION.plain_losses, "max_norm": NORM, "micro_batch_size": size}
    common |= {"persons": persons, "class_factors": FACTORS}
    if of == "alphas":
        return clipped_alpha_gradient_sum(network, x, y, alphas=network.alphas(), **common)
    return clipped_gradient_sum(network, x, y, parameters=network.weights(), **common)


def distance(a, b):
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


@pytest.mark.parametrize("of", ["weights", "alphas"])
def test_a_persons_records_are_averaged_and_clipped_together(of):
    """Against autograd, one record at a time, in float64."""
    torch.manual_seed(0)
    network = SPACE.supernet().double().train()
    x, y, persons = make_persons([1, 4, 2])
    found = gradient_sum(network, x.double(), y, persons, of=of)
    parameters = network.alphas() if of == "alphas" else network.weights()
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for person in range(3):
        rows = (persons == person).nonzero().flatten()
        loss = torch.nn.functional.cross_entropy(network(x[rows].double()), y[rows])
        of_zeros = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(loss, list(parameters.values()), **of_zeros)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        factor = float(FACTORS[y[rows]].double().mean()) * min(1.0, NORM / norm)
        for total, gradient in zip(expected.values(), gradients, strict=True):
            total.data += factor * gradient
    assert distance(found, expected) < 1e-9


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    added=st.integers(1, 5),
    broken=st.booleans(),
)
@settings(max_examples=20)
def test_one_person_more_moves_the_sum_by_the_clipping_norm_at_most(counts, added, broken):
    torch.manual_seed(1)
    network = SPACE.supernet().train()
    x, y, persons = make_persons([*counts, added], seed=added)
    x[sum(counts)] = math.nan if broken else 1e6
    with_one = gradient_sum(network, x, y, persons)
    own = sum(counts)
    without = gradient_sum(network, x[:own], y[:own], persons[:own])
    assert distance(with_one, without) <= NORM
    assert distance(with_one, without) == 0 or not broken
    alone = gradient_sum(network, x[own:], y[own:], torch.zeros(added, dtype=torch.int64))
    joined = {name: without[name] + alone[name] for name in alone}
    assert distance(joined, with_one) == 0  # not a bit of the others changes


def test_persons_must_fit_a_micro_batch():
    x, y, persons = make_persons([5, 5])
    with pytest.raises(ValueError, match="10 records of persons must be in one micro-batch"):
        gradient_sum(SPACE.supernet().train(), x, y, persons, size=8)


@given(counts=st.lists(st.integers(1, 9), max_size=12), size=st.integers(1, 8))
def test_nobody_is_in_two_micro_batches(counts, size):
    groups = list(torch.arange(sum(counts)).split(counts)) if counts else []
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    seen = []
    for rows, persons in by_person(groups, size):
        assert len(rows) == len(persons) <= size
        assert owner[rows].unique_consecutive().tolist() == owner[rows].unique().tolist()
        assert persons.tolist() == (owner[rows] - owner[rows[0]]).tolist() if len(rows) else True
        seen += rows.tolist()
    assert len(seen) == len(set(seen)) == sum(min(count, size) for count in counts)
    assert set(owner[seen].tolist()) == set(range(len(counts)))


def test_of_many_records_others_are_drawn_every_time():
    draws = (rows for _ in range(20) for rows, _ in by_person([torch.arange(50)], 4))
    assert len({tuple(rows.tolist()) for rows in draws}) > 10


def test_means_of_persons_do_not_depend_on_others():
    rows = torch.randn(10, 3) * 10.0 ** torch.arange(-4, 6)[:, None]
    persons = torch.tensor([0, 0, 0, 1, 2, 2])
    means = person_means(rows, persons)
    assert means.shape == (10, 3)
    assert means.dtype == torch.float64
    assert means[3:].count_nonzero() == 0
    assert torch.equal(means[2], (rows[4].double() + rows[5].double()) / 2)
    assert torch.equal(person_means(rows[4:], torch.zeros(2, dtype=torch.int64))[0], means[2])
    assert person_means(rows, persons[:0]).count_nonzero() == 0

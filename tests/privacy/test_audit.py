"""Limits of the audit against exact distributions: how often each is wrong, what is shown."""

import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

from fednas_flwr.privacy import audit

COUNTS = (1, 2, 30, 1000, 100_000)
MISSES = (1e-2, 1e-6, 1e-9)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("miss", MISSES)
def test_limits_of_a_variance_are_wrong_as_often_as_they_say(count, miss):
    """At the squares at which a limit is the true variance, 1, the rest of the tail is ``miss``."""
    low, high = audit.variance_limits(1.0, count, miss=miss)
    assert stats.chi2.sf(1 / low, count) == pytest.approx(miss, rel=1e-3)
    assert stats.chi2.cdf(1 / high, count) == pytest.approx(miss, rel=1e-3)
    assert low < 1 / count < high


@pytest.mark.parametrize("miss", MISSES)
def test_so_many_values_show_half_the_noise_and_fewer_do_not(miss):
    def often(count):
        """How often the upper limit of a variance of 1/4 is below 1."""
        return float(stats.chi2.cdf(stats.chi2.ppf(miss, count) * 4, count))

    count = audit.values_for_half(miss=miss)
    assert often(count) > audit.SHOWN > often(count - 1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("miss", MISSES)
def test_limits_of_a_length_are_wrong_as_seldom_as_they_say(count, length, miss):
    squares = torch.linspace(0, 1, 2001).double() ** 2
    squares = (squares * 4 * (count + length**2 + 100)).tolist()
    limits = [audit.length_limits(value, count, miss=miss) for value in squares]
    assert limits == sorted(limits)  # both rise
    too_high = [value for value, (low, _) in zip(squares, limits, strict=True) if low > length]
    too_low = [value for value, (_, high) in zip(squares, limits, strict=True) if high < length]
    tail = stats.ncx2 if length else stats.chi2
    arguments = (count, length**2) if length else (count,)
    assert tail.sf(min(too_high), *arguments) <= miss
    assert not too_low or tail.cdf(max(too_low), *arguments) <= miss


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("miss", MISSES)
def test_what_is_shown_of_lengths_is_as_often_as_it_says(count, miss):
    """Twice is told from once, and a quarter from half, from some length on, with room to spare."""
    lengths = [1.2**power for power in range(60)]
    twice = next(own for own in lengths if audit.shows_twice(own, count, miss=miss))
    quarter = next(own for own in lengths if audit.shows_quarter(own, count, miss=miss))
    assert all(audit.shows_twice(own, count, miss=miss) for own in lengths if own > twice)
    assert not audit.shows_twice(twice / 4, count, miss=miss)
    assert not audit.shows_quarter(quarter / 4, count, miss=miss)
    squares = stats.ncx2.ppf(1 - audit.SHOWN, count, 4 * twice**2)
    assert audit.length_limits(float(squares), count, miss=miss)[0] > twice
    squares = stats.ncx2.isf(1 - audit.SHOWN, count, quarter**2 / 16)
    assert audit.length_limits(float(squares), count, miss=miss)[1] < quarter / 2


@pytest.mark.parametrize(("units", "rate"), [(10, 0.5), (500, 0.125), (5000, 0.01)])
@pytest.mark.parametrize("miss", MISSES)
def test_limits_of_a_rate_are_wrong_as_seldom_as_they_say(units, rate, miss):
    limits = [audit.rate_limit(drawn, units, miss=miss) for drawn in range(units + 1)]
    assert limits == sorted(limits)
    wrong = [drawn for drawn, limit in enumerate(limits) if limit > rate]
    assert not wrong or stats.binom.sf(wrong[0] - 1, units, rate) <= miss
    assert audit.rate_limit(-3.7, units, miss=miss) == 0
    assert audit.rate_limit(2.9, units, miss=miss) == audit.rate_limit(2, units, miss=miss)
    assert audit.rate_limit(units + 9.5, units, miss=miss) == limits[-1] < 1


def test_limits_of_a_length_that_is_seen_exactly():
    low, high = audit.length_limits(1e8, 1, miss=1e-6)
    assert low == pytest.approx(1e4, rel=1e-3)
    assert high == pytest.approx(1e4, rel=1e-3)
    assert math.isfinite(high)


def test_the_precision_of_a_change_is_that_of_a_difference_of_means():
    assert audit.Amounts(replies=4, planted=12, units=1).precision == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("wrong", [0, 1, 3, 5])
def test_tensors_without_their_noise_are_named_three_at_most(wrong):
    replies, size, parts = 40, 50, 6
    replied = torch.randn(replies, parts * size, generator=torch.Generator().manual_seed(0))
    replied[:, : wrong * size] *= 0.3
    of_part = {f"t{part}": slice(part * size, part * size + size) for part in range(parts)}
    test = audit.ReleaseTest(
        key="a", sigma=1.0, rate=1.0, honest=1, parts=of_part, exact=None, is_gradient=False,
        is_probe=False, by_client=False, on_path=False, two_steps=None, miss=1e-9,
    )  # fmt: skip
    none = replied[:0]
    faults = test.finding(audit.Amounts(replies, replies, 1), replied, replied, none, none).faults
    noise = [fault for fault in faults if fault.startswith("noise of ")]
    assert len(noise) == bool(wrong)
    if wrong:
        assert noise[0].count(" in t") == min(wrong, 3)
        assert (" and 2 more where" in noise[0]) == (wrong == 5)
        assert (" more where" in noise[0]) == (wrong > 3)


UNITS, CANARIES, HONEST, RATE = 4, 50, 2, 0.25  # the first two of each of two clients
MADE_UP = [
    ("", r""),
    ("a sum is clipped", r"4 units move it by 1\.0\d norms: no sum over units"),
    ("twice the rate", r"units are drawn at a rate of 0\.(49|5).* for 0\.25"),
    ("the same batch", r"the same units are drawn in several steps"),
]


@pytest.mark.parametrize(("fault", "said"), MADE_UP)
def test_a_release_that_is_made_up_shows_its_fault_and_no_other(fault, said):
    """With an offset, as what trains without records moves by itself, which says nothing."""
    rng, size, replies, drawn = np.random.default_rng(0), 300, 400, 300
    unit = np.linspace(1, 2, size) / np.linalg.norm(np.linspace(1, 2, size))
    offset = 5 * rng.normal(size=size)

    def released(units, share, number):
        noised = share * offset + rng.normal(size=(number, size))
        return torch.from_numpy(noised + np.broadcast_to(units, number)[:, None] * unit)

    planted = HONEST * (1 if fault == "a sum is clipped" else UNITS)
    rate = 2 * RATE if fault == "twice the rate" else RATE
    batches = rng.binomial(HONEST * CANARIES, rate, drawn)
    if fault == "the same batch":
        batches[:] = HONEST * CANARIES * RATE
    test = audit.ReleaseTest(
        key="a", sigma=1.0, rate=RATE, honest=HONEST, parts={"t": slice(0, size)},
        exact=torch.from_numpy(3 * unit), is_gradient=True, is_probe=False, by_client=False,
        on_path=False, two_steps=None, miss=1e-9,
    )  # fmt: skip
    found = test.finding(
        audit.Amounts(replies, replies, UNITS, CANARIES),
        *(released(0, 1, replies), released(planted, 1, replies)),
        *(torch.empty(0, size), released(batches, RATE, drawn)),
    )
    assert re.fullmatch(said, ", ".join(found.faults))
    moved = re.search(
        r" 3 norms before it is clipped, moves it by (\S+), .* rate (\S+) for", found.seen
    )
    expected = 1 / UNITS if fault == "a sum is clipped" else 1
    assert [*map(float, moved.groups())] == pytest.approx([expected, rate], rel=0.05)

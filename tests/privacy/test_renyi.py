import itertools
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import compute_rdp

from fednas_flwr.privacy.mechanism import renyi
from fednas_flwr.settings.names import CLIENT, PERSON, RECORD

from ..refusals import refuses

GRID = [*itertools.product((0.2, 0.5, 1.0, 2.0664, 10.0, 200.0), (1e-4, 0.01, 0.3, 0.97))]


def divergence(sigma, rate, order):
    return renyi.renyi_divergence(noise_multiplier=sigma, sample_rate=rate, order=order)


def integer_order(sigma, rate, order):
    """Mironov, Talwar and Zhang (2019), section 3.3, without the terms that cancel."""
    logs = []
    for k in range(2, order + 1):
        exponent = k * (k - 1) / (2 * sigma**2)
        term = math.log(math.comb(order, k)) + (order - k) * math.log1p(-rate)
        logs.append(term + k * math.log(rate) + exponent + math.log(-math.expm1(-exponent)))
    return float(np.logaddexp.reduce([0.0, *logs])) / (order - 1)


@pytest.mark.parametrize(("sigma", "rate"), GRID)
@pytest.mark.parametrize("order", [2, 3, 7, 32, 200])
def test_integer_orders_equal_the_closed_form_and_are_never_below(sigma, rate, order):
    exact = integer_order(sigma, rate, order)
    assert exact <= divergence(sigma, rate, order) <= exact * (1 + 3e-9) + 1e-300


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.0192), (1.0, 0.01024), (2.0664, 0.041)])
@pytest.mark.parametrize("order", [1.5, 2.5, 4.7, 10.9])
def test_fractional_orders_equal_opacus_and_are_below_dp_accounting(sigma, rate, order):
    ours = 1000 * divergence(sigma, rate, order)
    series = compute_rdp(q=rate, noise_multiplier=sigma, steps=1000, orders=order)
    assert ours == pytest.approx(series, rel=1e-7)
    # dp-accounting adds the absolute values of the alternating series.
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    theirs = dp_accounting.rdp.RdpAccountant([order]).compose(event, 1000).get_epsilon(1e-5)
    ours = renyi.epsilon_at_order(order=order, divergence=ours, delta=1e-5)
    assert ours <= theirs * (1 + 1e-8)
    assert ours == pytest.approx(theirs, rel=0.03)


@pytest.mark.parametrize(("sigma", "rate"), [(0.6, 0.01), (1.0, 0.3), (3.0, 0.05)])
@pytest.mark.parametrize("order", [1.3, 2.0, 6.5])
def test_the_other_neighbour_loses_less(sigma, rate, order):
    z = np.arange(-30 * sigma - order, order + 30 * sigma, sigma / 400)
    ratio = np.log1p(rate * np.expm1((2 * z - 1) / (2 * sigma**2)))
    weights = np.exp(-0.5 * (z / sigma) ** 2) / (400 * math.sqrt(2 * math.pi))
    forward = math.log((weights * np.exp(order * ratio)).sum()) / (order - 1)
    backward = math.log((weights * np.exp((1 - order) * ratio)).sum()) / (order - 1)
    got = divergence(sigma, rate, order)
    assert got == pytest.approx(forward, rel=1e-6)
    assert got > backward


def test_tiny_rates_keep_their_digits():
    # For p -> 0 the divergence is order / 2 * p^2 * (exp(1 / s^2) - 1).
    for rate in (1e-7, 1e-9, 1e-12):
        assert divergence(1.0, rate, 4.0) == pytest.approx(2 * rate**2 * math.expm1(1.0), rel=1e-5)


def test_edges_of_rate_and_noise():
    full = divergence(2.0, 1.0, 8.0)
    assert 1 <= full == pytest.approx(8 / (2 * 4), rel=1e-8)
    assert divergence(2.0, 1 - 1e-12, 8.0) == pytest.approx(full, rel=1e-6)
    # Too little noise to integrate: the bound of the full batch, at once.
    assert 64 / 2e-6 <= divergence(1e-3, 0.01, 64.0) == pytest.approx(64 / 2e-6, rel=1e-8)


def test_conversion_is_the_maximum_of_the_hockey_stick():
    # max over losses L of (1 - e^(eps - L)) e^(-(a - 1) L), at a divergence of 0, is delta.
    for order, delta in ((1.5, 1e-5), (4.0, 1e-6), (60.0, 1e-3)):
        epsilon = renyi.epsilon_at_order(order=order, divergence=0.0, delta=delta)
        loss = epsilon + np.linspace(1e-6, 8, 400_000)
        worst = ((1 - np.exp(epsilon - loss)) * np.exp(-(order - 1) * loss)).max()
        assert worst == pytest.approx(delta, rel=1e-4)


IMPOSSIBLE = {
    "noise_multiplier": [0.0, -1.0, 9e-4, 2e6, math.inf, math.nan],
    "sample_rate": [0.0, -0.1, 1.0001, math.nan, math.inf],
    "steps": [0, -1],
}


IMPOSSIBLE_TERMS = [(term, value) for term, values in IMPOSSIBLE.items() for value in values]


@pytest.mark.parametrize(("term", "value"), IMPOSSIBLE_TERMS)
def test_a_release_of_impossible_terms_is_refused(term, value):
    terms = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 1, term: value}
    refuses(f"^{term}=.* is out of range", renyi.Release, error=ValueError, **terms)


def test_merging_adds_up_the_steps_of_equal_mechanisms():
    a, b = renyi.Release(1.0, 0.1, 2), renyi.Release(1.0, 0.2, 3)
    assert renyi.merge_releases([a, b, a]) == [renyi.Release(1.0, 0.1, 4), b]
    assert renyi.merge_releases([]) == []


@pytest.mark.parametrize(
    ("batch_size", "num_records", "rate"),
    [(8, 40, 0.2), (None, 40, 1.0), (40, 40, 1.0), (41, 40, 1.0), (10**400, 40, 1.0), (8, 0, 1.0)],
)
def test_the_rate_is_the_expected_batch_over_the_declared_records(batch_size, num_records, rate):
    assert renyi.poisson_rate(batch_size, num_records) == rate


# --- Releases that protect one unit of privacy, counted for another one


BY_A, BY_B = renyi.booked_unit(PERSON, "a column"), renyi.booked_unit(PERSON, "b")


def booked_cost(release, order):
    """Return what the ledger books of all steps; infinite of what promises nothing."""
    if release is None:
        return math.inf
    terms = {"noise_multiplier": release.noise_multiplier, "sample_rate": release.sample_rate}
    return release.steps * renyi.renyi_divergence(**terms, order=order)


def replaced(sigma, rate, order, shift):
    """Return the divergence, by summation, where one drawn contribution 1 becomes ``1 - shift``."""
    z = np.arange(-20 * sigma - 30, 20 * sigma + 30, sigma / 100)

    def noised(mean):
        """Return the log density of the noise around 0 or, where it is drawn, around the mean."""
        around = [-0.5 * ((z - m) / sigma) ** 2 for m in (0, mean)]
        drawn = around[1] + math.log(rate)
        return np.logaddexp(around[0] + math.log1p(-rate), drawn) if rate < 1 else drawn

    log_mass = order * noised(1) + (1 - order) * noised(1 - shift)
    total = float(np.exp(log_mass).sum()) / 100 / math.sqrt(2 * math.pi)
    return math.log(total) / (order - 1)


COUNTED = [
    *((unit, unit, True) for unit in (RECORD, BY_A, BY_B, CLIENT)),
    *((RECORD, unit, False) for unit in (BY_A, BY_B, CLIENT)),
    *((BY_A, RECORD, True), (BY_A, BY_B, False), (BY_B, BY_A, False), (BY_A, CLIENT, False)),
    *((CLIENT, unit, True) for unit in (RECORD, BY_A, BY_B)),
]


@pytest.mark.parametrize(("booked", "unit", "protected"), COUNTED)
def test_a_finer_unit_costs_infinitely_much_a_coarser_no_less(booked, unit, protected):
    release = renyi.Release(noise_multiplier=2.0, sample_rate=0.1, steps=3)
    assert renyi.protects(booked, unit) == protected
    assert (renyi.counted(release, booked, unit) is not None) == protected
    if booked == unit:
        assert renyi.counted(release, booked, unit) == release
    elif protected:
        assert booked_cost(renyi.counted(release, booked, unit), 4.0) > booked_cost(release, 4.0)


def test_the_kind_of_a_booked_unit_is_told_whatever_the_columns_name():
    assert [renyi.kind_of(unit) for unit in (RECORD, BY_A, CLIENT)] == [RECORD, PERSON, CLIENT]
    assert renyi.kind_of(renyi.booked_unit(PERSON, "")) == PERSON
    assert renyi.booked_unit(RECORD, "ignored") == RECORD
    assert renyi.booked_unit(CLIENT, "ignored") == CLIENT


@given(
    sigma=st.floats(0.8, 8),
    rate=st.sampled_from([1e-3, 0.05, 0.3, 0.9, 1.0]),
    order=st.floats(1.2, 12),
    shift=st.floats(0, 2),
)
def test_a_record_of_a_person_is_never_counted_below_its_change(sigma, rate, order, shift):
    """One record more moves a drawn person's clipped mean by anything up to twice the norm."""
    for coarser in (BY_A, CLIENT):
        step = renyi.Release(noise_multiplier=sigma, sample_rate=rate, steps=1)
        booked = booked_cost(renyi.counted(step, coarser, RECORD), order)
        assert replaced(sigma, rate, order, shift) <= booked * (1 + 1e-6) + 1e-9


def test_what_was_booked_for_a_person_is_too_little_for_one_of_their_records():
    for rate in (0.05, 1.0):
        step = renyi.Release(noise_multiplier=2.0, sample_rate=rate, steps=1)
        assert replaced(2.0, rate, 4.0, 2.0) > 1.5 * booked_cost(step, 4.0)
    step = renyi.Release(noise_multiplier=2.0, sample_rate=1.0, steps=1)
    exact = booked_cost(renyi.counted(step, CLIENT, RECORD), 4.0)
    assert replaced(2.0, 1.0, 4.0, 2.0) == pytest.approx(exact, rel=1e-6)


def test_noise_that_cannot_be_halved_costs_infinitely_much():
    assert renyi.counted(renyi.Release(0.0015, 1.0, 1), CLIENT, RECORD) is None
    assert renyi.counted(renyi.Release(0.0015, 1.0, 1), CLIENT, CLIENT) is not None

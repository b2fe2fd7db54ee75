"""Releases that protect one unit of privacy, counted for another one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.privacy.mechanism import renyi
from fednas_flwr.settings.names import CLIENT, PERSON, RECORD

BY_A, BY_B = renyi.booked_unit(PERSON, "a column"), renyi.booked_unit(PERSON, "b")


def divergence(release, order):
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
        assert divergence(renyi.counted(release, booked, unit), 4.0) > divergence(release, 4.0)


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
        booked = divergence(renyi.counted(step, coarser, RECORD), order)
        assert replaced(sigma, rate, order, shift) <= booked * (1 + 1e-6) + 1e-9


def test_what_was_booked_for_a_person_is_too_little_for_one_of_their_records():
    for rate in (0.05, 1.0):
        step = renyi.Release(noise_multiplier=2.0, sample_rate=rate, steps=1)
        assert replaced(2.0, rate, 4.0, 2.0) > 1.5 * divergence(step, 4.0)
    step = renyi.Release(noise_multiplier=2.0, sample_rate=1.0, steps=1)
    exact = divergence(renyi.counted(step, CLIENT, RECORD), 4.0)
    assert replaced(2.0, 1.0, 4.0, 2.0) == pytest.approx(exact, rel=1e-6)


def test_noise_that_cannot_be_halved_costs_infinitely_much():
    assert renyi.counted(renyi.Release(0.0015, 1.0, 1), CLIENT, RECORD) is None
    assert renyi.counted(renyi.Release(0.0015, 1.0, 1), CLIENT, CLIENT) is not None

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import BudgetExceededError
from fednas_flwr.privacy.books import renyi_filter
from fednas_flwr.privacy.books.renyi_filter import RenyiFilter, default_orders, filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import calibrate_noise, rdp_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release, epsilon_at_order, renyi_divergence

from ..refusals import refuses

STEP = Release(noise_multiplier=1.0, sample_rate=0.02, steps=1)
requests = st.builds(Release, st.floats(0.3, 20.0), st.floats(1e-4, 1.0), st.integers(1, 300))


def state_of(site):
    """What a filter goes on from, as JSON holds it."""
    kept = {"orders": list(site.orders), "totals": list(site.totals)}
    return {"epsilon": site.epsilon, "delta": site.delta, **kept}


def cost(release, order):
    terms = {"noise_multiplier": release.noise_multiplier, "sample_rate": release.sample_rate}
    return release.steps * renyi_divergence(**terms, order=order)


@settings(max_examples=25)
@given(st.lists(requests, max_size=8), st.floats(0.1, 10.0))
def test_whatever_is_asked_what_is_spent_converts_to_the_budget(asked, epsilon):
    site = RenyiFilter(epsilon=epsilon, delta=1e-5)
    accepted = []
    for release in asked:
        before = state_of(site)
        if site.affords(release):
            site.spend(release)
            accepted.append(release)
        else:
            refuses("", site.spend, release, error=BudgetExceededError)
            assert state_of(site) == before
    # Anew, from the definition: each order converts at its own share of delta.
    epsilons = [
        epsilon_at_order(order=a, divergence=sum(cost(r, a) for r in accepted), delta=1e-5 / 2)
        for a in site.orders
    ]
    if accepted:
        assert min(epsilons) <= epsilon * (1 + 1e-9)
        assert site.spent() == pytest.approx(max(0.0, min(epsilons)), rel=1e-6, abs=1e-9)
        assert rdp_epsilon(accepted, 1e-5) <= epsilon
    assert 0 <= site.spent() <= epsilon * (1 + 1e-9)


def test_one_order_is_the_plain_renyi_filter_to_the_step():
    site = RenyiFilter(epsilon=1.0, delta=1e-5, orders=[16.0])
    budget = 1.0 - epsilon_at_order(order=16.0, divergence=0.0, delta=1e-5)
    steps = int(budget / cost(STEP, 16.0))
    for _ in range(steps):
        site.spend(STEP)
    assert not site.affords(STEP)
    assert site.totals[0] == pytest.approx(steps * cost(STEP, 16.0))


def test_several_orders_share_delta():
    # Which order survives may depend on the outputs, so none may use the whole delta.
    one = RenyiFilter(epsilon=2.0, delta=1e-5, orders=[8.0])
    two = RenyiFilter(epsilon=2.0, delta=1e-5, orders=[8.0, 4.0])
    assert two.budgets[0] == RenyiFilter(epsilon=2.0, delta=0.5e-5, orders=[8.0]).budgets[0]
    assert one.budgets[0] - two.budgets[0] == pytest.approx(math.log(2) / 7)


def test_one_surviving_order_is_enough_and_none_is_not():
    site = RenyiFilter(epsilon=14.0, delta=1e-5, orders=[2.0, 30.0])
    coarse = Release(noise_multiplier=0.6, sample_rate=0.01, steps=500)
    site.spend(coarse)  # ruinous at order 30, cheap at order 2
    assert site.totals[1] > site.budgets[1]
    assert site.totals[0] < site.budgets[0]
    assert not site.affords(Release(noise_multiplier=0.3, sample_rate=1.0, steps=1))


def test_a_budget_too_small_for_its_orders_affords_nothing():
    site = RenyiFilter(epsilon=0.5, delta=1e-5, orders=[2.0])
    assert site.budgets[0] < 0
    assert not site.affords(Release(noise_multiplier=1e6, sample_rate=1e-9, steps=1))


def test_the_state_is_plain_and_goes_on_where_it_was():
    site = RenyiFilter(epsilon=3.0, delta=1e-6)
    site.spend(Release(1.0, 0.01, 200))
    again = RenyiFilter(**json.loads(json.dumps(state_of(site), allow_nan=False)))
    for part in (site, again):
        part.spend(STEP)
    assert state_of(again) == state_of(site)
    assert again.spent() == site.spent() > 0


def test_a_mechanism_is_analysed_once():
    renyi_divergence.cache_clear()
    site = RenyiFilter(epsilon=2.0, delta=1e-5)
    for _ in range(100):
        site.affords(STEP)
        site.spend(STEP)
    assert renyi_divergence.cache_info().misses == len(site.orders)
    for index in range(3000):  # a stranger who never repeats a request does not fill the memory
        site.affords(Release(1.0 + index, 1.0, 1))
    assert renyi_divergence.cache_info().currsize <= 4096


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0, 8.0, 50.0])
def test_default_orders_come_from_the_budget_and_suit_it(epsilon):
    orders = default_orders(epsilon=epsilon, delta=1e-5)
    assert RenyiFilter(epsilon=epsilon, delta=1e-5).orders == orders
    plan = {"target_epsilon": epsilon, "delta": 1e-5, "sample_rate": 1.0, "steps": 10}
    sigma = calibrate_noise(**plan, accountant=rdp_epsilon)
    assert epsilon * 0.99 < filter_epsilon([Release(sigma, 1.0, 10)], 1e-5) < epsilon * 1.15


def test_filter_epsilon_is_the_least_budget_that_lasts():
    schedule = [Release(1.0, 0.0205, 2450), Release(4.0, 1.0, 3)]
    epsilon = filter_epsilon(schedule, 1e-5)

    def lasts(budget):
        site = RenyiFilter(epsilon=budget, delta=1e-5)
        try:
            for release in schedule:
                site.spend(release)
        except BudgetExceededError:
            return False
        return True

    assert lasts(epsilon)
    assert not lasts(epsilon * 0.998)
    assert filter_epsilon([], 1e-5) == 0.0
    assert filter_epsilon([Release(1e-3, 1.0, 1000)], 1e-5) == math.inf


@settings(max_examples=20)
@given(
    sigma=st.floats(0.6, 3.0),
    steps=st.tuples(*(st.integers(1, 12) for _ in range(3))),
    booked=st.integers(0, 20),
)
def test_covered_steps_are_those_that_the_filters_afford_one_by_one(sigma, steps, booked):
    """Two kinds of release that step together, then a stage that reads both splits."""

    def step(rate, count=1):
        return Release(noise_multiplier=sigma, sample_rate=rate, steps=count)

    left = {split: RenyiFilter(epsilon=4.0, delta=1e-5) for split in ("train", "validation")}
    for _ in range(booked):
        if left["train"].affords(step(0.2)):
            left["train"].spend(step(0.2))
    both = ("train", "validation")
    search = [(step(0.3, steps[0]), both[:1]), (step(0.5, steps[1]), both[1:])]
    stages = {"search": search, "retrain": [(step(0.4, steps[2]), both)]}
    covered = renyi_filter.covered_steps(left, stages)

    expected = dict.fromkeys(stages, 0)
    try:
        for stage, entries in stages.items():
            longest = max(release.steps for release, _ in entries)
            for number in range(1, longest + 1):
                for release, splits in entries:
                    counts = [release.steps * n // longest for n in (number - 1, number)]
                    for _ in range(counts[1] - counts[0]):
                        for split in splits:
                            left[split].spend(step(release.sample_rate))
                expected[stage] = number
    except BudgetExceededError:
        pass
    assert covered == expected

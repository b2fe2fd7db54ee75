import math
import warnings
from dataclasses import asdict

import dp_accounting
import pytest
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis import gdp as opacus_gdp
from scipy.optimize import brentq
from scipy.stats import norm

from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism import accounting
from fednas_flwr.privacy.mechanism.accounting import gdp_epsilon, prv_epsilon, rdp_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release

from ..refusals import refuses

DELTA = 1e-5
# Add/remove, Poisson, delta 1e-5: release, GDP formula, tight numerical value, range of RDP (which
# depends on the orders), each to the digits shown; numerical accountants differ by .5 %.
REFERENCES = [
    (Release(1.0, 0.01024, 4900), 4.07, 4.27, (4.66, 4.66)),
    (Release(1.0, 0.0205, 2450), 6.11, 6.45, (7.04, 7.04)),
    (Release(2.0664, 0.041, 750), 2.34, 2.42, (2.64, 2.64)),
    (Release(1.0, 0.05, 10), 0.75, 1.66, (2.16, 2.16)),
    (Release(0.6, 0.01, 1000), 5.56, 7.43, (8.68, 8.68)),
    (Release(0.5, 0.0192, 5300), 95.2, 60.5, (65.6, 69.4)),
]


def event(release):
    gaussian = dp_accounting.GaussianDpEvent(release.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(release.sample_rate, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, release.steps)


def gaussian_epsilon(mu, delta):
    """Exact epsilon of the Gaussian mechanism (Balle and Wang 2018)."""

    def excess(e):
        second = math.exp(e + norm.logcdf(-mu / 2 - e / mu))
        return float(norm.cdf(mu / 2 - e / mu)) - second - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu**2 + 40 * mu, xtol=1e-12))


def one_step_epsilon(sigma, rate, delta):
    """Exact epsilon of one Poisson-subsampled Gaussian, the larger of adding and removing."""

    def point(ratio):  # where mixture / plain equals this ratio
        return 0.5 + sigma**2 * math.log((ratio - 1 + rate) / rate)

    def mixture(z):  # P(mixture > z)
        return (1 - rate) * norm.sf(z / sigma) + rate * norm.sf((z - 1) / sigma)

    def removing(e):
        z = point(math.exp(e))
        return mixture(z) - math.exp(e) * norm.sf(z / sigma) - delta

    def adding(e):
        if math.exp(-e) <= 1 - rate:
            return -delta
        z = point(math.exp(-e))
        return norm.cdf(z / sigma) - math.exp(e) * (1 - mixture(z)) - delta

    ends = [0.0]
    for excess in (removing, adding):
        if excess(1e-12) > 0:
            ends.append(brentq(excess, 1e-12, 60.0, xtol=1e-12))
    return float(max(ends))


@pytest.mark.parametrize(("release", "gdp", "tight", "renyi"), REFERENCES)
def test_reference_values(release, gdp, tight, renyi):
    assert gdp_epsilon([release], DELTA) == pytest.approx(gdp, abs=0.006 if gdp < 10 else 0.06)
    assert prv_epsilon([release], DELTA) == pytest.approx(tight, rel=0.005)
    assert renyi[0] * 0.998 <= rdp_epsilon([release], DELTA) <= renyi[1] * 1.002


def test_rdp_agrees_with_dp_accounting():
    for release, *_ in REFERENCES[:5]:
        accountant = dp_accounting.rdp.RdpAccountant(accounting.RDP_ORDERS)
        theirs = accountant.compose(event(release)).get_epsilon(DELTA)
        assert rdp_epsilon([release], DELTA) == pytest.approx(theirs, rel=2e-3)
        assert rdp_epsilon([release], DELTA) <= theirs * (1 + 1e-8)
    mixed = [Release(1.0, 0.02, 300), Release(3.0, 1.0, 4), Release(0.8, 0.001, 500)]
    accountant = dp_accounting.rdp.RdpAccountant(accounting.RDP_ORDERS)
    for release in mixed:
        accountant.compose(event(release))
    assert rdp_epsilon(mixed, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-4)


def test_prv_agrees_with_a_fine_grid_and_with_opacus():
    mixed = [Release(1.0, 0.05, 10), Release(2.0, 0.02, 40)]
    fine = dp_accounting.pld.PLDAccountant(value_discretization_interval=2e-4)
    for release in mixed:
        fine.compose(event(release))
    ours = prv_epsilon(mixed, DELTA)
    assert ours == pytest.approx(fine.get_epsilon(DELTA), rel=2e-3)
    assert ours >= fine.get_epsilon(DELTA) * (1 - 1e-4)
    opacus = PRVAccountant()
    opacus.history = [(r.noise_multiplier, r.sample_rate, r.steps) for r in mixed]
    with warnings.catch_warnings():  # logarithms of 0 in its tails
        warnings.simplefilter("ignore")
        theirs = opacus.get_epsilon(DELTA, eps_error=0.05)
    assert ours == pytest.approx(theirs - 0.05, abs=0.01)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_prv_bounds_the_exact_gaussian_tightly(delta):
    schedule = [Release(6.0, 1.0, 5), Release(9.0, 1.0, 7), Release(6.0, 1.0, 2)]
    exact = gaussian_epsilon(math.sqrt(7 / 36 + 7 / 81), delta)
    assert exact <= prv_epsilon(schedule, delta) <= exact * 1.005
    assert exact <= rdp_epsilon(schedule, delta) <= exact * 1.25


@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.01), (1.0, 0.05), (0.5, 0.5), (2.0, 0.9)])
def test_prv_bounds_one_exact_subsampled_step_tightly(sigma, rate):
    exact = one_step_epsilon(sigma, rate, DELTA)
    assert exact <= prv_epsilon([Release(sigma, rate, 1)], DELTA) <= exact * 1.01


def test_gdp_agrees_with_opacus_and_composes_by_squares():
    for release, *_ in REFERENCES[:3]:
        theirs = opacus_gdp.compute_eps_poisson(**asdict(release), delta=DELTA)
        assert gdp_epsilon([release], DELTA) == pytest.approx(theirs, rel=1e-6)
    pair = [Release(1.0, 0.01, 900), Release(2.0, 0.03, 400)]
    squares = 1e-4 * 900 * math.expm1(1) + 9e-4 * 400 * math.expm1(0.25)
    assert gdp_epsilon(pair, DELTA) == pytest.approx(gaussian_epsilon(math.sqrt(squares), DELTA))
    # What the paper prints, e^(1/s^2 - 1), would claim much less.
    assert gaussian_epsilon(0.01024 * math.sqrt(4900), DELTA) < 3.0


def test_gdp_at_its_ends():
    assert gdp_epsilon([Release(0.03, 0.5, 10)], DELTA) == math.inf
    assert gdp_epsilon([Release(1e6, 1e-9, 1)], DELTA) == 0.0
    large = gdp_epsilon([Release(0.2, 1.0, 1)], DELTA)  # mu = 2.7e5: nothing overflows
    assert math.isfinite(large)
    assert large > 1e9


@pytest.mark.parametrize("accountant", [prv_epsilon, rdp_epsilon, gdp_epsilon, filter_epsilon])
def test_contracts_of_every_accountant(accountant):
    def epsilon(sigma=1.0, rate=0.02, steps=200, *others, delta=DELTA):
        return accountant([Release(sigma, rate, steps), *others], delta)

    assert 0 < epsilon() < min(epsilon(steps=240), epsilon(rate=0.024), epsilon(delta=DELTA / 3))
    assert epsilon(sigma=1.1) < epsilon() < epsilon(1.0, 0.02, 200, Release(5.0, 1.0, 1))
    assert accountant([], DELTA) == 0.0
    two, three, five = (Release(1.0, 0.05, n) for n in (2, 3, 5))
    assert accountant([two, three], DELTA) == pytest.approx(accountant([five], DELTA), rel=1e-9)
    other = Release(3.0, 0.1, 4)
    forward, backward = accountant([two, other], DELTA), accountant([other, two], DELTA)
    assert forward == pytest.approx(backward, rel=1e-6)
    for bad in (0.0, 1.0, -1e-5, math.nan):
        refuses("delta must lie", accountant, [two], bad, error=ValueError)


def test_prv_gives_the_renyi_bound_where_it_cannot_compute():
    hopeless = [Release(0.02, 0.5, 100)]
    assert prv_epsilon(hopeless, DELTA) == rdp_epsilon(hopeless, DELTA) > 500
    usual = [Release(1.0, 0.02, 200)]
    assert prv_epsilon(usual, 1e-12) == rdp_epsilon(usual, 1e-12)


def test_every_release_counts_on_every_split_it_read():
    weights, alphas = Release(1.0, 0.05, 20), Release(2.0, 0.1, 20)
    both = Release(4.0, 0.1, 30)
    apart = [(weights, {"train"}), (alphas, ["validation"])]
    before = accounting.epsilon_per_split(apart, DELTA, rdp_epsilon)
    assert before == {
        "train": rdp_epsilon([weights], DELTA),
        "validation": rdp_epsilon([alphas], DELTA),
    }
    apart.append((both, ("train", "validation")))
    after = accounting.epsilon_per_split(apart, DELTA, rdp_epsilon)
    assert after["train"] == rdp_epsilon([weights, both], DELTA) > before["train"]
    assert after["validation"] == rdp_epsilon([alphas, both], DELTA) > before["validation"]
    assert accounting.epsilon_per_split([], DELTA) == {}
    # A split named twice by one release is read once.
    twice = accounting.epsilon_per_split([(both, ["test", "test"])], DELTA, rdp_epsilon)
    assert twice == {"test": rdp_epsilon([both], DELTA)}


def calibrated(target, accountant, *, sample_rate=0.02, steps=300):
    terms = {"delta": DELTA, "sample_rate": sample_rate, "steps": steps}
    return accounting.calibrate_noise(target_epsilon=target, accountant=accountant, **terms)


@pytest.mark.parametrize("accountant", [rdp_epsilon, filter_epsilon])
@pytest.mark.parametrize("target", [0.3, 3.0, 40.0])
def test_calibrated_noise_meets_its_target_and_no_less_would(accountant, target):
    sigma = calibrated(target, accountant)
    assert accountant([Release(sigma, 0.02, 300)], DELTA) <= target
    assert accountant([Release(sigma * 0.998, 0.02, 300)], DELTA) > target


def test_calibrated_noise_is_never_none():
    assert calibrated(1e5, filter_epsilon) >= 0.01


def test_calibration_with_the_tight_accountant_needs_less_noise():
    plan = {"sample_rate": 0.05, "steps": 50}
    tight = calibrated(1.0, prv_epsilon, **plan)
    assert prv_epsilon([Release(tight, **plan)], DELTA) <= 1.0
    assert tight < calibrated(1.0, rdp_epsilon, **plan)


def test_calibration_refuses_what_cannot_be_met():
    refuses("no noise_multiplier", calibrated, 1e-7, lambda r, d: 1.0, error=ValueError)

"""Sums of discrete Gaussians against their exact probabilities, in 60 digits."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from fednas_flwr.privacy.mechanism.noise import SecureGenerator, add_shared_noise, share_sigma
from fednas_flwr.privacy.policy import SumTerms

from ..refusals import refuses
from .divergences import sum_divergence


def gaussian(variance, reach):
    """Return the probabilities of the discrete Gaussian of -reach to reach."""
    weights = [(-Decimal(k * k) / (2 * variance)).exp() for k in range(-reach, reach + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def convolved(left, right, reach):
    """Return the probabilities of a sum, of -reach to reach, by adding up all pairs."""
    found = []
    for k in range(-reach, reach + 1):
        pairs = (
            left[j + reach] * right[k - j + reach]
            for j in range(max(-reach, k - reach), min(reach, k + reach) + 1)
        )
        found.append(sum(pairs, Decimal(0)))
    return found


@pytest.mark.parametrize(("sigma", "sites"), [(1, 2), (1, 3), (1, 5), (2, 2), (2, 4)])
def test_a_sum_of_shares_is_a_discrete_gaussian_up_to_the_bound(sigma, sites):
    with localcontext() as context:
        context.prec = 60
        reach, inside = 26 * sigma, 5 * sigma  # beyond 26 sigma is less than 1e-140
        one = gaussian(Decimal(sigma**2), reach)
        total = one
        for _ in range(sites - 1):
            total = convolved(total, one, reach)
        expected = gaussian(Decimal(sites * sigma**2), reach)
        worst = max(
            abs((total[k + reach] / expected[k + reach]).ln()) for k in range(-inside, inside + 1)
        )
    bound = sum_divergence(1, sigma=sigma, sites=sites)
    assert 0 < float(worst) <= bound * (1 + 1e-9)
    if sites == 2:
        assert bound < 5 * float(worst)  # it is no wild overestimate


def test_at_the_least_sigma_the_divergence_changes_nothing():
    assert sum_divergence(10**12, sigma=6, sites=1000) < 1e-130
    assert sum_divergence(10, sigma=1, sites=1) == 0.0


@pytest.mark.parametrize("honest", [1, 2, 6, 7, 99])
@pytest.mark.parametrize("sigma", [0.1, 5.0, 3e5, 1e6 + 0.5])
def test_honest_shares_carry_the_whole_noise(sigma, honest):
    share = share_sigma(sigma, honest)
    assert honest * share**2 > sigma**2
    assert share <= max(6, sigma / math.sqrt(honest) + 2)


def test_sampled_shares_have_the_variance_of_the_whole():
    share = share_sigma(1000.0, 6)
    generator = SecureGenerator(test_seed=b"shares")
    total = sum(generator.discrete_gaussian((100_000,), sigma=share).numpy() for _ in range(6))
    assert np.std(total) == pytest.approx(1000.0, rel=0.02)


def test_terms():
    terms = SumTerms("a" * 64, 7, 1)
    assert terms.honest == 6
    for wrong in ((7, 6), (1, 0), (3, -1)):
        refuses("", SumTerms, "a" * 64, *wrong)
    refuses("roster", SumTerms, "a", 7, 1)


def test_shared_noise_is_drawn_as_far_as_its_grid_reaches():
    def added(noise_multiplier, *, honest=2, norm=1.0):
        return add_shared_noise(
            torch.zeros(1),
            SecureGenerator(test_seed=b"1"),
            noise_multiplier=noise_multiplier,
            max_grad_norm=norm,
            cell=1.0,
            honest=honest,
        )

    for good in (1e-3, 1.0, 2.0**25):
        assert added(good).isfinite().all()
    for wrong in (0.0, -1.0, math.nan, 2.0**27):
        refuses(r"shared by 2 clients, is out of range", added, wrong, error=ValueError)
    refuses("shared by 1 clients", added, 1.0, error=ValueError, honest=1)
    refuses("max_grad_norm=0.0", added, 1.0, error=ValueError, norm=0.0)

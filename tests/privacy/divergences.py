"""Bounds on what noise can tell for being discrete, and for being a sum of shares, with proofs."""

import math

KERNEL_STD = 4.0  # cells, of the Gaussian that makes a discrete one of a continuous one


def continuous_divergence(num_values, *, kernel_std=KERNEL_STD):
    """Return a bound on what discrete noise can tell beyond continuous noise: an epsilon.

    Formulas for the Poisson-sampled Gaussian mechanism speak of continuous noise. They hold for
    discrete noise of sigma cells if they are evaluated at a std of ``sqrt(sigma^2 - r^2)`` cells, r
    being ``kernel_std``, up to this: every outcome of ``num_values`` noised integers is as likely,
    up to a factor of ``exp(+-divergence)``, as if they had carried continuous noise and then passed
    through a random rounding K. As that is post-processing, an (epsilon, delta) of the continuous
    mechanism becomes (epsilon + 2 divergence, delta exp(divergence)), and a Renyi divergence of
    order a grows by at most ``(2 a - 1) / (a - 1) divergence``.

    Proof. K maps x to k with probability ``exp(-(k - x)^2 / (2 r^2)) / Z(x)``, over the integers.
    By Poisson's summation ``Z(x) = r sqrt(2 pi) (1 + 2 sum_n q^(n^2) cos(2 pi n x))``, n from 1,
    with ``q = exp(-2 pi^2 r^2)``: constant up to a factor of 1 +- e, where
    ``e = 2 q / (1 - q^3)``. Were it constant, K of a Gaussian of mean mu (an integer) and variance
    ``sigma^2 - r^2`` would have probabilities in proportion to the integral of the product of two
    Gaussian densities, which is in proportion to ``exp(-(k - mu)^2 / (2 sigma^2))``: the discrete
    Gaussian (for lattices the argument is Peikert's, 2010, "An efficient and parallel Gaussian
    sampler for lattices", Theorem 3.1). So the two differ by factors of at most (1 + e) / (1 - e),
    the normalisation included. Values are noised independently, hence the factors of a vector
    multiply; mixtures of batches and releases that depend on earlier ones keep them.

    Args:
        num_values: Of all releases together, at least 0.
        kernel_std: r, in cells, at least .5.

    Returns:
        3e-137 per value at r = 4, which changes no digit of an epsilon.
    """
    q = math.exp(-2 * math.pi**2 * kernel_std**2)
    e = 2 * q / (1 - q**3)
    return num_values * (math.log1p(e) - math.log1p(-e))


def sum_divergence(num_values, *, sigma, sites):
    """Return the distance of a sum of discrete Gaussians from one: an epsilon, as a logarithm.

    Every outcome of ``num_values`` sums of ``sites`` independent discrete Gaussians of ``sigma`` is
    as likely, up to a factor of ``exp(+-divergence)``, as of one discrete Gaussian of
    ``sqrt(sites) sigma``. With :func:`continuous_divergence`, to which it adds, formulas for
    Poisson-sampled continuous noise hold for the sum.

    Proof. Of samples of a and b, ``P(a + b = k)`` is in proportion to ``sum_j exp(-j^2 / (2 s^2) -
    (k - j)^2 / (2 t^2)) = exp(-k^2 / (2 (s^2 + t^2))) sum_j exp(-(j - c)^2 / (2 r^2))``, with ``r^2
    = s^2 t^2 / (s^2 + t^2)`` and ``c = k s^2 / (s^2 + t^2)``. By Poisson's summation the last sum
    is ``r sqrt(2 pi) (1 + 2 sum_n q^(n^2) cos(2 pi n c))``, n from 1, with ``q = exp(-2 pi^2
    r^2)``: the same for every k up to a factor of 1 +- e, ``e = 2 q / (1 - q^3)``. So a + b has the
    probabilities of the discrete Gaussian of ``s^2 + t^2`` up to factors of ``(1 + e) / (1 - e)``,
    the normalisation included. Sites are added one after the other; r is least for the first two,
    ``sigma / sqrt(2)``. Shares that dishonest sites know only shift the sum; those of further
    honest sites are post-processing.

    Args:
        num_values: Of all releases together, at least 0.
        sigma: Of each site, in cells, at least 1.
        sites: Number of shares, at least 1.

    Returns:
        2e-154 per value and site at the least sigma of 6.
    """
    q = math.exp(-(math.pi**2) * sigma**2)  # r^2 = sigma^2 / 2
    e = 2 * q / (1 - q**3)
    return num_values * (sites - 1) * (math.log1p(e) - math.log1p(-e))

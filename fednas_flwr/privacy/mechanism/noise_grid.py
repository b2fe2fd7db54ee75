"""The grid that noise lies on, and the noise multipliers that it has room for; imports no torch."""

from __future__ import annotations

import math

_GRID_BITS = 24


def noise_grid(std: float) -> float:
    """Return the power of two from 2^-25 to 2^-24 of ``std`` that noise of it is a multiple of.

    Raises:
        ValueError: ``std`` is not in 1e-100 to 1e100.
    """
    if not 1e-100 <= std <= 1e100:
        raise ValueError(f"std must be in [1e-100, 1e100], got {std!r}.")
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def noise_range(*, num_values: int, num_records: int) -> tuple[float, float]:
    """Return least and largest noise multiplier with which adding noise cannot fail.

    The grid of :func:`~fednas_flwr.privacy.mechanism.noise.add_noise`, of at most ``2^-24 * s *
    R``, must be below ``R / (2 * sqrt(d))``, and a sum of norm ``N * R`` within 2^51 cells of at
    least
    ``2^-25 * s * R``. Both with a factor of 2 to spare: a site may hold more records than it
    declares.

    Args:
        num_values: d, the values of one release.
        num_records: N, the declared records.
    """
    return num_records * 2.0**-25, 2.0**22 / math.sqrt(max(1, num_values))

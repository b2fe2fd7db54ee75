"""Noise that honest sites share under a secure sum, and the grid that noise lies on; no torch.

Each site adds discrete Gaussian noise of ``1 / h`` of the variance that one release needs, h being
the number of honest survivors that its policy relies on; the server sees the sum of h such shares,
at least. Main function: :func:`share_sigma`. How near a sum of shares is to one Gaussian is
proved in ``tests/privacy/divergences.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.settings.names import MOST_SITES
from fednas_flwr.settings.parser import Between, Checked, Length

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


LEAST_HONEST = 2  # of one honest site's value and what colluding ones know, the sum hides nothing
LEAST_SIGMA = 6  # cells, with which no digit of an epsilon tells a sum of shares from its Gaussian


@dataclass(frozen=True)
class SumTerms(Checked):
    """Terms of secure sums in a site's policy.

    Attributes:
        roster: Fingerprint of the list of all sites' public keys, 64 hex digits.
        least_sites: Fewest survivors of an exchange of which the site opens its mask.
        colluding: How many of them may help the server.
    """

    roster: Annotated[str, Length(Between(64, 64))]
    least_sites: Annotated[int, Between(2, MOST_SITES)]
    colluding: Annotated[int, Between(0, MOST_SITES)]

    def conflicts(self) -> Iterable[tuple[object, str]]:
        """Exclude sums that hide no honest site among another one."""
        yield (
            self.honest < LEAST_HONEST,
            f"least_sites={self.least_sites} with colluding={self.colluding}: the sum of one "
            "honest site is its value; expected least_sites of colluding + 2 or more",
        )

    @property
    def honest(self) -> int:
        """h, the honest survivors that an opened sum has at least."""
        return self.least_sites - self.colluding


def share_sigma(sigma: float, honest: int) -> int:
    """Return the sigma of each site's noise, in cells, so that h shares carry ``sigma`` or more.

    Args:
        sigma: That the total must carry, in cells, above 0.
        honest: h, at least 1.
    """
    return max(LEAST_SIGMA, math.floor(sigma / math.sqrt(honest)) + 2)  # up by 1 at least

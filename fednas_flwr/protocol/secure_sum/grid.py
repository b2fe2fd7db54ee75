"""Values as whole numbers of cells of a fixed grid, which add up exactly modulo a power of two.

All sites of an exchange use one grid: its cell is a power of two, and each site may use so many
cells that the sum of all fits half of the modulus. The other half is headroom: a total in it was
not made by honest sites. Main class: :class:`Grid`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

WIDE_CELL = 2.0**-32  # where no range is known
BITS = {32: np.int32, 64: np.int64}


@dataclass(frozen=True)
class Cells:
    """Values with a share of noise, as whole cells of a grid: only masks may touch them.

    What rounds, clamps or branches on a site's own noised values could take its share of the noise
    out of the sum; the sum modulo a power of two cannot.

    Attributes:
        values: int64 [n].
    """

    values: np.ndarray

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.values)


@dataclass(frozen=True)
class Grid:
    """Cells of one exchange.

    Attributes:
        cell: Width of a cell, a power of two.
        bits: 32 or 64; sums are modulo ``2^bits``.
        sites: Largest number of sites in a sum.

    Example:
        >>> grid = Grid.of_range(100.0, sites=8)
        >>> grid.cell, grid.range >= 100
        (9.5367431640625e-07, True)
        >>> total = grid.encode([1.5]) + grid.encode([-0.25])
        >>> grid.decode(total, sites=2)
        array([1.25])
    """

    cell: float
    bits: int
    sites: int

    @classmethod
    def of_range(cls, most: float, *, sites: int) -> Grid:
        """Return the finest grid modulo 2^32 on which each of so many sites can have ``+-most``.

        Raises:
            ValueError: ``most`` is not a positive number that floats can divide.
        """
        if not 1e-100 <= most <= 1e100 or not 1 <= sites <= 2**20:
            raise ValueError(f"a grid needs a range of 1e-100 to 1e100, got {most!r} x {sites!r}.")
        cells = 2**30 // sites
        return cls(2.0 ** math.ceil(math.log2(most / cells)), 32, sites)

    @classmethod
    def wide(cls, *, sites: int) -> Grid:
        """Return the grid modulo 2^64 of values whose range is not known."""
        return cls(WIDE_CELL, 64, sites)

    @property
    def most_cells(self) -> int:
        """Largest magnitude of a site's value, in cells."""
        return int(2 ** (self.bits - 2) // self.sites)

    @property
    def range(self) -> float:
        """Largest magnitude of a site's value."""
        return self.most_cells * self.cell

    def wrap(self, cells: Cells) -> np.ndarray:
        """Return cells modulo two to the power of the grid's width [n].

        Sums of wrapped values are those of the values, wrapped: none is lost whose sum has room,
        which whoever adds the noise sees to (``ReleaseGuard.share``).
        """
        return cells.values.astype(BITS[self.bits])

    def encode(self, values: np.ndarray | list[float]) -> np.ndarray:
        """Return the values rounded to cells, as integers of the grid's width [n].

        Raises:
            ValueError: A value is not finite or beyond the range; its place is not told.
        """
        cells = np.rint(np.asarray(values, dtype=np.float64) / self.cell)
        if not bool((np.abs(cells) <= self.most_cells).all()):  # NaN is not
            raise ValueError(
                f"a value is not finite or beyond {self.range:.4g}, which is what the secure sum "
                f"of {self.sites} sites has room for."
            )
        return cells.astype(BITS[self.bits])

    def decode(self, total: np.ndarray, *, sites: int) -> np.ndarray:
        """Return the sum of so many sites' values, float64 [n], from its integers.

        Raises:
            ValueError: It is beyond what they can have sent.
        """
        signed = total.view(BITS[self.bits])
        low, high = (int(signed.min()), int(signed.max())) if signed.size else (0, 0)
        if max(-low, high) > sites * self.most_cells:
            raise ValueError(
                f"the total of {sites} sites is beyond {sites} times their range: a site has sent "
                "other masks than it should, or values outside of its range."
            )
        values: np.ndarray = signed.astype(np.float64) * self.cell
        return values

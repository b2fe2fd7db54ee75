"""The server's part of a secure sum: add masked vectors, then take off the masks of the survivors.

Main class: :class:`MaskedSum`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fednas_flwr.protocol.secure_sum.masks import add_mask
from fednas_flwr.protocol.secure_sum.shamir import rebuild
from fednas_flwr.protocol.secure_sum.sum_site import Opening


class MaskedSum:
    """The running sum of masked vectors.

    Args:
        participants: Indices of the sites that are asked.

    Attributes:
        survivors: The sites whose vectors are in the sum.
        vectors: The sum, modulo two to the power of each vector's width; new ones are added in
            place, so that it takes the memory of one reply.
    """

    def __init__(self, participants: Sequence[int]) -> None:
        """Start with nothing added."""
        self.participants = list(participants)
        self.survivors: list[int] = []
        self.vectors: list[np.ndarray] = []

    def add(self, site: int, vectors: Sequence[np.ndarray]) -> None:
        """Add a site's vectors; all sites send the same shapes and types."""
        if not self.survivors:
            self.vectors = [vector.copy() for vector in vectors]
        for total, vector in zip(self.vectors, vectors if self.survivors else (), strict=False):
            total += vector  # integers wrap
        self.survivors.append(site)

    def unmask(self, openings: Mapping[int, Opening]) -> list[np.ndarray]:
        """Return the sum of what the survivors have masked.

        Args:
            openings: What survivors have opened.

        Raises:
            ValueError: They do not suffice.
        """
        for i in self.survivors:
            parts = {j + 1: opened.parts[i] for j, opened in openings.items()}
            add_mask(rebuild(parts), self.vectors, sign=-1)
        for d in set(self.participants) - set(self.survivors):
            for i in self.survivors:
                if i not in openings:
                    raise ValueError(
                        f"site {i} has dropped out after site {d}, and only it could open the mask "
                        "that they share."
                    )
                add_mask(openings[i].pairs[d], self.vectors, sign=-1 if i < d else 1)
        return self.vectors

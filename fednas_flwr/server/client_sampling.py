"""Sampling of the clients of each round, from the seed and public sizes, before the run.

Main class: :class:`Sampling`. There are three kinds of draws. With the first two a round's average
is unbiased: its expectation over the draws is the average over all clients. ``uniform`` averages by
size, ``by_size`` gives every draw the same weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fednas_flwr.base.errors import unknown_choice
from fednas_flwr.base.randomness import derive_seed
from fednas_flwr.settings.names import BY_SIZE, ROUND_ROBIN, SAMPLINGS, UNIFORM

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Participants:
    """The clients of one round.

    Attributes:
        clients: Those that are asked, ascending.
        backups: Who is asked in the place of those that fail, in this order.
        weights: By client, what its reply counts for in an average; without one it is the reply's
            number of examples.
    """

    clients: tuple[int, ...]
    backups: tuple[int, ...] = ()
    weights: Mapping[int, float] = field(default_factory=dict)

    @property
    def candidates(self) -> tuple[int, ...]:
        """All that may be asked."""
        return (*self.clients, *self.backups)

    def after(self, answered: Collection[int]) -> Participants:
        """The participants of the round's next exchange: a backup that has stood in stays."""
        stood_in = [client for client in self.backups if client in answered]
        failed = [client for client in self.clients if client not in answered]
        clients = {*self.clients, *stood_in} - set(failed[: len(stood_in)])
        backups = tuple(client for client in self.backups if client not in stood_in)
        return Participants(tuple(sorted(clients)), backups, self.weights)


@dataclass(frozen=True)
class Sampling:
    """Draws the clients of every round; one that asks the same round again draws the same ones.

    Args:
        seed: The run's seed; a draw comes from (seed, stage, round).
        per_round: m, the clients that a round asks: at least 1, at most all.
        backups: Number of further clients that stand by to replace those that fail.
        by: ``uniform``: one client in proportion to its size, the others uniformly from the rest,
            so that a set of clients is drawn in proportion to the sum of its sizes, and its average
            by size is unbiased (Midzuno 1952; Lahiri 1951); of clients of equal size it is the
            uniform draw. ``by_size``: m draws in proportion to size, systematically, so that a
            client's expected number of draws is ``m n_k / sum n`` to the last bit (Madow 1949); a
            client that is drawn twice is asked once and counts twice. ``round_robin``: one after
            the other, in an order drawn once for each stage, so that all are asked equally often;
            its averages by size are unbiased for clients of equal size only.
        sizes: By stage, the weight of each client's reply in an average over all clients: int64
            ``[N]``, public numbers; a stage without them has equal ones.

    Raises:
        ConfigError: ``by`` is unknown.
    """

    seed: int
    per_round: int
    backups: int
    by: str
    sizes: Mapping[str, Ints]
    num_clients: int

    def __post_init__(self) -> None:
        """Check the name."""
        if self.by not in SAMPLINGS:
            raise unknown_choice("sampling.by", self.by, SAMPLINGS)

    def participants(self, stage: str, server_round: int) -> Participants:
        """Return who is asked in a round, from 1, of a stage."""
        sizes = self.sizes.get(stage)
        if sizes is None or not sizes.any():
            sizes = np.ones(self.num_clients, dtype=np.int64)
        once = () if self.by == ROUND_ROBIN else (server_round,)
        rng = np.random.default_rng(derive_seed(self.seed, "clients", stage, *once))
        order = rng.permutation(self.num_clients)
        record = int(rng.integers(sizes.sum()))
        if self.by == BY_SIZE:
            owners = systematic(sizes, order, start=record, draws=self.per_round)
            clients, counts = np.unique(owners, return_counts=True)
            waits = rng.exponential(size=self.num_clients) / np.maximum(sizes, 1e-9)
            drawn = np.append(clients, np.setdiff1d(order[np.argsort(waits[order])], clients))
        elif self.by == UNIFORM:
            drawn, counts = midzuno(sizes, order, record=record), None
        else:
            drawn, counts = np.roll(order, -(server_round - 1) * self.per_round), None
        end = self.per_round if counts is None else len(counts)
        asked, backups = drawn[:end].tolist(), drawn[end : end + self.backups].tolist()
        weights = {}
        if counts is not None:
            weights = dict.fromkeys(backups, 1.0) | dict(zip(asked, counts.tolist(), strict=True))
        return Participants(tuple(sorted(asked)), tuple(backups), weights)


def midzuno(sizes: Ints, order: Ints, *, record: int) -> Ints:
    """Return the order with the client first that owns a record, of ``sum(sizes)``.

    For a record drawn uniformly and an order drawn uniformly, the first m clients are a set S with
    probability ``sum_S n / (C(N - 1, m - 1) sum n)``.
    """
    owner = np.searchsorted(np.cumsum(sizes), record, side="right")
    return np.concatenate([[owner], order[order != owner]])


def systematic(sizes: Ints, order: Ints, *, start: int, draws: int) -> Ints:
    """Return the owners of records at equal distances, int64 ``[draws]``.

    Over the ``sum(sizes)`` starts every record is drawn ``draws`` times.

    Args:
        sizes: Of the clients.
        order: In which their records lie.
        start: From 0 to below the sum of the sizes.
        draws: m.
    """
    ends = np.cumsum(sizes[order])
    records = (start + ends[-1] * np.arange(draws)) // draws
    owners: Ints = order[np.searchsorted(ends, records, side="right")]
    return owners

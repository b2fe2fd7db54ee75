"""Cost of a release that protects one unit of privacy, counted for another one.

A release hides whether one unit was there: a record, a person with all records, or the client.
For a unit that is

- the same: it costs what it costs;
- **coarser**, or made of other parts (persons by another column): infinitely much. Nobody has
  bounded how many of the one lie in the other, so noise for one of them hides none of the other;
- **finer** (client > person > record): to add a record to a person who has others replaces that
  person's contribution, v by w, both of norm R. That is up to ``2 R`` apart, so the release counts
  with half its noise multiplier, and twice where it samples.

Proof of the last: let N(x) be the noise around x and p the sampling rate, with the same coin on
both sides. ``P = (1-p) N(0) + p N(v)`` and ``Q = (1-p) N(0) + p N(w)`` share a part, so by advanced
joint convexity (Balle, Barthe and Gaboardi 2018, arXiv 1807.01647, Theorem 2) each hockey-stick
divergence of order above 1, in both directions, is at most that of ``A = (1-p) N(0) + p N(2 R)``
from ``B = N(0)``. Hence the trade-off function of (P, Q) is above the largest convex one below
those of (A, B) and (B, A), and so above that of ``(A x B, B x A)``: two steps at 2 R. With p = 1
one step is enough, since (P, Q) are two Gaussians ``2 R`` apart.
"""

from __future__ import annotations

from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.settings.names import LEAST_NOISE_MULTIPLIER, PERSON, UNITS, Unit


def booked_unit(unit: Unit, id_column: str) -> str:
    """Return a unit as a ledger books it: persons with the column that tells them apart."""
    return f"{unit} by {id_column}" if unit == PERSON else unit


def kind_of(booked: str) -> str:
    """Return which of ``UNITS`` a booked unit is."""
    return booked.partition(" ")[0]


def protects(booked: str, unit: str) -> bool:
    """Whether a release that protects a booked unit also bounds leakage about another one."""
    return booked == unit or UNITS.index(kind_of(booked)) > UNITS.index(kind_of(unit))


def counted(release: Release, booked: str, unit: str) -> Release | None:
    """Return the release that costs one ``unit`` what ``release`` does; None costs infinitely much.

    Args:
        release: Of the noise and steps that were booked.
        booked: Unit that it protects, from :func:`booked_unit`.
        unit: Unit to count for, in the same form.
    """
    half = release.noise_multiplier / 2
    if booked == unit:
        return release
    if not protects(booked, unit) or half < LEAST_NOISE_MULTIPLIER:
        return None
    steps = release.steps * (1 if release.sample_rate == 1 else 2)
    return Release(noise_multiplier=half, sample_rate=release.sample_rate, steps=steps)

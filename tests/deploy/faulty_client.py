"""Faults to build into a private client, by name: what becomes of one kind of release."""

import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fednas_flwr.client.release_guard import ReleaseGuard
from fednas_flwr.deploy import audit_run
from fednas_flwr.privacy.mechanism.noise import SecureGenerator

booked_sum = ReleaseGuard._booked_sum
discrete_gaussian = SecureGenerator.discrete_gaussian
poisson_mask = SecureGenerator.poisson_mask


@dataclass
class Now:
    """The release that is being made, and what a fault remembers of earlier ones.

    Attributes:
        dice: Draws which tensor has a fault.
        norm: That every unit is clipped to.
        sizes: Of its tensors.
        place: Run and exchange.
        kept: By what the fault likes.
    """

    dice: random.Random
    norm: float = 1.0
    sizes: tuple[int, ...] = ()
    place: tuple[str, int] = ("", 0)
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def tensor(self):
        """A tensor of the release, the same one in all releases; of one with one, all of it."""
        sizes = self.sizes
        index = self.kept.setdefault("tensor", self.dice.randrange(len(sizes)))
        start = sum(sizes[:index])
        return slice(start, start + sizes[index])


def none_in_one_value(noise, now):
    noise[now.kept.setdefault("value", now.dice.randrange(len(noise)))] = 0
    return noise


def half_in_one_tensor(noise, now):
    noise[now.tensor] = (noise[now.tensor] / 2).round().long()
    return noise


def noise_of_two_releases(noise, now):
    before = now.kept.pop("noise", None)
    return now.kept.setdefault("noise", noise) if before is None else before


def clipped_after_the_sum(total, now):
    return total * min(1.0, now.norm / max(1e-30, float(total.norm())))


def clipped_by_tensor(total, now):
    units = float(total.norm()) / now.norm  # all alike, and louder than the norm in every tensor
    parts = total.split(list(now.sizes))
    return torch.cat([part * (units * now.norm / max(1e-30, float(part.norm()))) for part in parts])


def same_units(mask, probability, now):
    drawn = mask(probability)
    return now.kept.setdefault(len(drawn), drawn)


NOISES = {
    "no noise": lambda noise, now: torch.zeros_like(noise),
    "half the noise": lambda noise, now: (noise / 2).round().long(),
    "no noise in one value": none_in_one_value,
    "half the noise in one tensor": half_in_one_tensor,
    "the same noise in all releases": lambda noise, now: now.kept.setdefault("noise", noise),
    "noise used twice": noise_of_two_releases,
}
SAME_NOISE = "the same noise in the steps of a request"
REPEATED = {SAME_NOISE: lambda noise, now: now.kept.setdefault(now.place, noise)}
SUMS = {
    "twice the clipping norm": lambda total, now: 2 * total,
    # the audit's canaries have gradients of more norms than that
    "no clipping": lambda total, now: 100 * total,
}
GRADIENTS = {
    "clipped after the sum": clipped_after_the_sum,
    "clipped tensor by tensor": clipped_by_tensor,
}
MASKS = {
    "twice the rate": lambda mask, probability, now: mask(min(1.0, 2 * probability)),
    "the same batch in every step": same_units,
}
FAULTS: dict[str, Any] = {**NOISES, **REPEATED, **SUMS, **GRADIENTS, **MASKS}


@contextmanager
def broken(fault, key, *, seed=0):
    """Build a fault into one kind of release of the audited clients, inside the block.

    Those whose run is recorded before have none: a server may refuse what faulty ones send.

    Args:
        fault: Name out of ``FAULTS``.
        key: Of the planned release.
        seed: Draws the tensor.
    """
    now, change = Now(random.Random(seed)), FAULTS[fault]
    is_now = False

    def booked(guard, planned, header, *arguments):
        nonlocal is_now
        is_now, now.norm = planned.key == key, planned.max_grad_norm
        now.place = header.run, header.phase
        sums, total, sigma = booked_sum(guard, planned, header, *arguments)
        if is_now:
            now.sizes, now.norm = tuple(t.numel() for t in sums.values()), sums.norm
            if fault in SUMS | GRADIENTS:
                total = change(total, now)
        return sums, total, sigma

    def noise(generator, shape, *, sigma):
        drawn = discrete_gaussian(generator, shape, sigma=sigma)
        return change(drawn, now) if is_now and fault in NOISES | REPEATED else drawn

    def mask(generator, number, *, probability):
        def drawn(probability):
            return poisson_mask(generator, number, probability=probability)

        is_fault = is_now and fault in MASKS and probability < 1
        return change(drawn, probability, now) if is_fault else drawn(probability)

    made = audit_run._clients

    def clients(*arguments):
        patch.setattr(ReleaseGuard, "_booked_sum", booked)
        patch.setattr(SecureGenerator, "discrete_gaussian", noise)
        patch.setattr(SecureGenerator, "poisson_mask", mask)
        return made(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_run, "_clients", clients)
        yield


@contextmanager
def audited_only(key):
    """Leave out of audits all requests but those that release a kind, inside the block."""
    whole = audit_run._findings

    def findings(exchange, miss):
        if key in {own.key for own in exchange.planned.values()}:
            yield from whole(exchange, miss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_run, "_findings", findings)
        yield

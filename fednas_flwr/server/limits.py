"""Bounds on honest replies: norms of updates and of gradients, and ranges of noised means.

Reply checks refuse what is beyond. Each bound follows from what was asked for and from what is
public: an honest client keeps to it with certainty, or, where noise has a part in it, but for a
probability of ``exp(-TAIL)`` per release. A hostile client can still send anything within them:
``states.TrimmedMean`` is against that. Main function: :func:`honest_limits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.protocol.requests import Settings
from fednas_flwr.protocol.states import MOMENTS, Packed
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings.optimizers import SGD

TAIL = 40.0  # exp(-40) = 4e-18
MORE_RECORDS = 2.0  # a site may hold up to twice the records that it declares
SLACK = 1.25  # for rounding on the wire: int8 moves a block of 256 by at most 16 / 127 of its norm
ROUNDING = 1e-6  # of a weight, in a step
# Root mean square that a state without a bound of its own may have, in units of 1 and of that sent:
# training that has come so far is lost.
GROWTH = 1e6
LONGEST = 20_000  # local steps beyond which no bound is worked out
# Times lr, what a step moves an alpha by at most. By Cauchy and Schwarz Adam's is at most
# 1 / sqrt((1 - beta2) (1 - beta1^2 / beta2)) = 37; FDNAS may rescale by as much again.
ADAM = 75.0
LARGEST_LOSS = 1e30  # whose mean over clients is finite
LOSS = 28.0  # a private record's loss counts for 2 ln(classes) at most; of a million classes


@dataclass(frozen=True)
class Limits:
    """Bounds on one reply.

    Attributes:
        examples: Largest number of examples.
        norms: By state, the largest norm of a gradient, or of the difference to what was sent.
        noise: The most that noise adds to a mean of numbers from 0 to 1; 0 without noise.
    """

    examples: float
    norms: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0

    def metric_range(self, name: str) -> tuple[float, float]:
        """The least and the largest honest value of a metric.

        An exact accuracy is from 0 to 1, an exact loss to ``LARGEST_LOSS``. Noised ones may lie
        beyond by the noise, and by records that are there beside those declared.
        """
        high = MORE_RECORDS + self.noise if self.noise else 1.0
        if name.endswith("accuracy"):
            return 0.0 - self.noise, high
        return 0.0 - LOSS * self.noise, LOSS * high if self.noise else LARGEST_LOSS


def honest_limits(
    exchange: Exchange,
    settings: Settings,
    *,
    sent: Mapping[str, float],
    examples: float,
    classes: int = 1,
    records: Mapping[str, int],
) -> Limits:
    """The limits of one client's honest reply.

    Args:
        exchange: The exchange.
        settings: The client's arguments in it.
        sent: Norm of each state that it is sent.
        examples: Number of records that it has declared.
        classes: Number of classes: oversampling repeats a record at most as often.
        records: With privacy the declared records by split.
    """
    plans = exchange.planned.items() if records else ()
    planned = {kind: plan for kind, plan in plans if plan.num_records(records)}
    sizes = {name: sum(layout.sizes.values()) for name, layout in exchange.layouts.items()}
    batches = {kind: plan.expected_batch(records) for kind, plan in planned.items()}

    def total(kind: str) -> float:
        return largest_sum(planned[kind], records, num_values=sizes.get(kind, 0))

    if states := ACTIONS[exchange.action].gradients_of:
        # sums over local steps, all scaled to the first's batch
        batch_size: int | None = getattr(settings, "batch_size", None)
        if batch_size is not None:  # a last batch takes what would be one of a single record
            examples = min(examples, batch_size + 1)
        if not planned.keys() >= set(states):
            ceilings = {s: GROWTH * math.sqrt(sizes.get(s, 0)) * examples for s in states}
            return Limits(examples, ceilings)
        steps, first = settings.num_steps(records), batches[states[0]]
        norms = {s: SLACK * steps * total(s) * (first / batches[s]) for s in states}
        return Limits(first * (1 + 1e-9), norms)  # a mean of steps may be rounded up
    norms = {
        # running variances are squares of activations, whose scale every skipped sum multiplies
        name: GROWTH ** (2 if name == "buffers" else 1) * (math.sqrt(size) + sent.get(name, 0.0))
        for name, size in sizes.items()
    }
    if "rewards" in planned:  # strategies clamp what noise has moved
        norms["rewards"] = math.inf
    if STATISTICS in planned:  # of a norm of 1 per record, in units of its largest norm
        largest = math.sqrt(sizes.get(STATISTICS, 0)) * total(STATISTICS)
        norms[STATISTICS] = SLACK * largest / batches[STATISTICS]
    training = settings.trained_by(examples * classes)
    if training is None:
        noise = 0.0
        if "metrics" in planned:  # on one of two released means of numbers from 0 to 1
            noise = (planned["metrics"].noise_multiplier or 0.0) * math.sqrt(2)
            noise = noise * math.sqrt(2 * TAIL) / batches["metrics"]
        return Limits(examples, norms, noise)
    sgd, steps = training.weights, training.steps
    mean = math.inf if sgd.clip_norm is None else sgd.clip_norm
    if "weights" in planned:
        mean = min(mean, total("weights") / batches["weights"])
    mean *= math.sqrt(training.members)
    if mean < math.inf and steps <= LONGEST:
        weights, velocity = sent.get("weights", 0.0), sent.get(MOMENTS, 0.0)
        moved = largest_move(steps, sgd, mean, weights, velocity, training.proximal)
        norms["weights"] = SLACK * moved + ROUNDING * steps * (weights + moved)
    if training.alphas_lr is not None and MOMENTS not in sent:
        # of those sent, which are averages, the least second moment has no bound
        step = ADAM * training.alphas_lr * math.sqrt(sizes.get("alphas", 0))
        norms["alphas"] = steps * (step + ROUNDING * sent.get("alphas", 0.0))
    return Limits(examples, norms)


def largest_sum(planned: PlannedRelease, records: Mapping[str, int], *, num_values: int) -> float:
    """The norm that one honest release stays within.

    A release is a sum of contributions of norm R or less over a Poisson batch, plus Gaussian noise
    of std ``sigma R`` on each of d values. By Bernstein's inequality a batch of expected size b
    exceeds ``b + sqrt(2 b t) + t`` with probability ``exp(-t)`` at most; the norm of d standard
    normal values, a 1-Lipschitz function of mean ``sqrt(d)`` at most, exceeds
    ``sqrt(d) + sqrt(2 t)`` with that probability (Boucheron, Lugosi and Massart, 2013, Theorems
    2.10 and 5.6). So the norm is ``R (b + sqrt(2 b t) + t) + sigma R (sqrt(d) + sqrt(2 t))`` at
    most, with ``t = TAIL``; the noise's grid is 2^-25 of its std.

    Deviation: b is ``MORE_RECORDS`` times what is declared.

    Args:
        planned: The release.
        records: Declared, by split.
        num_values: d.
    """
    batch = MORE_RECORDS * planned.expected_batch(records)
    drawn = batch + math.sqrt(2 * batch * TAIL) + TAIL
    noise = (planned.noise_multiplier or 0.0) * (math.sqrt(num_values) + math.sqrt(2 * TAIL))
    return planned.max_grad_norm * (drawn + noise)


@lru_cache(maxsize=1024)  # clients of equal numbers of records move equally far
def largest_move(
    steps: int, sgd: SGD, mean: float, weights_norm: float, velocity: float, proximal: float = 0.0
) -> float:
    """The largest distance that steps of SGD can move the weights.

    ``g = mean + decay (|w| + moved) + mu moved; v = m v + g; moved += lr max(v, g + m v)``: the
    triangle inequality at every step, whose second term is Nesterov's.

    Args:
        steps: Number of steps.
        sgd: Constants of SGD.
        mean: Largest norm of a step's mean gradient.
        weights_norm: Norm of the weights at first.
        velocity: Norm of the velocity at first.
        proximal: mu, of a term that holds the weights where they are at first.
    """
    moved = 0.0
    for _ in range(steps):
        gradient = mean + sgd.weight_decay * (weights_norm + moved) + proximal * moved
        velocity = sgd.momentum * velocity + gradient
        moved += sgd.lr * max(velocity, gradient + sgd.momentum * velocity)
    return moved


def distance(packed: Packed, sent: Packed) -> float:
    """The norm of the floats of a state's difference to the one sent, which may have none.

    The result is not finite where a value, or its square, is not.
    """
    floats = [(dtype, v) for dtype, v in packed.items() if v.dtype.is_floating_point]
    moved = (v - sent[dtype] if dtype in sent else v for dtype, v in floats)
    return math.hypot(*(float(torch.linalg.vector_norm(v)) for v in moved))

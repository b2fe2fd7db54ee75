"""Checks of every reply before any part of it is used.

A reply that fails a check is dropped for its exchange; what was accepted before does not change.

Replies beyond the bounds on honest replies are refused, too: norms of updates and of gradients, and
ranges of noised means. Each bound follows from the request and from public values. An honest client
stays within it with certainty or, if noise is involved, except with probability ``exp(-TAIL)`` per
release. A hostile client can still send anything within the bounds; ``states.TrimmedMean`` protects
against that. Main functions: :func:`accept_reply` and :func:`honest_limits`.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from flwr.app import Message

from fednas_flwr.base.errors import ClientLeftError, ReplyError
from fednas_flwr.data.records import feature_names
from fednas_flwr.data.site_tables import difference
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.messages import BUDGET_SPENT, Header, Reply, decode_reply, restore
from fednas_flwr.protocol.states import MOMENTS, Layout, Packed, unpack
from fednas_flwr.protocol.sum_encoding import Summands, check_masked
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings.names import FEWEST_VOTES
from fednas_flwr.settings.optimizers import SGD

DIVERGED = "; if training has diverged, lower its learning rate or its weight decay"
TAIL = 40.0  # exp(-40) = 4e-18
MORE_RECORDS = 2.0  # a site may hold up to twice the records that it declares
SLACK = 1.25  # for rounding on the wire: int8 moves a block of 256 by at most 16 / 127 of its norm
ROUNDING = 1e-6  # relative rounding of a weight in a step
# Largest root mean square of a state without a bound of its own, in units of 1 plus that of the
# state sent. Training that has gone so far is lost.
GROWTH = 1e6
LONGEST = 20_000  # number of local steps beyond which no bound is computed
# Largest move of an alpha in a step, in units of lr. By Cauchy and Schwarz a step of Adam is at
# most 1 / sqrt((1 - beta2) (1 - beta1^2 / beta2)) = 37; FDNAS may rescale by as much again.
ADAM = 75.0
LARGEST_LOSS = 1e30  # its mean over clients is finite
LOSS = 28.0  # a private record's loss counts for at most 2 ln(classes), here of a million classes


@dataclass(frozen=True)
class Limits:
    """Bounds on one reply.

    Attributes:
        examples: Largest number of examples.
        norms: For each state, the largest norm of a gradient, or of the difference from what was
            sent.
        noise: Largest amount that noise adds to a mean of numbers from 0 to 1; 0 without noise.
    """

    examples: float
    norms: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0

    def metric_range(self, name: str) -> tuple[float, float]:
        """The smallest and the largest honest value of a metric.

        An exact accuracy is from 0 to 1, an exact loss from 0 to ``LARGEST_LOSS``. Noised ones may
        exceed these because of the noise, and of records that a site holds beyond those declared.
        """
        high = MORE_RECORDS + self.noise if self.noise else 1.0
        if name.endswith("accuracy"):
            return 0.0 - self.noise, high
        return 0.0 - LOSS * self.noise, LOSS * high if self.noise else LARGEST_LOSS


NO_LIMITS = Limits(rq.MAX_EXAMPLES)
# Tensors in which a negative value would make every network that uses them return NaN.
NON_NEGATIVE = {"buffers": ("running_var",), MOMENTS: ("alphas.exp_avg_sq.", "alphas.step.")}


def accept_reply(
    message: Message,
    exchange: Exchange,
    *,
    header: Header,
    limits: Limits = NO_LIMITS,
    wire: str = "float32",
    summands: Summands | None = None,
) -> Reply:
    """The reply in ``message``, if it answers the request with ``header``.

    Args:
        message: A client's reply or error.
        exchange: The exchange. The reply must have exactly the states in its layouts.
        header: The header of the request. The reply must repeat it, including the nonce, so that a
            reply from another run, round, phase or client is refused.
        limits: Limits of an honest reply. A tiny or huge weight would overflow the aggregate
            although every tensor is finite.
        wire: Format of float32 vectors, see :mod:`fednas_flwr.protocol.messages`.
        summands: Encoding of a secure sum: the reply is masked, and nothing else in it can be
            checked.

    Raises:
        ClientLeftError: The client's privacy budget has ended.
        ReplyError: The client reports an error, or the reply is malformed, replayed, not finite,
            beyond the limits of an honest one, or has other tensors than were asked for; or its
            number of examples or a metric is out of range; or the action has no such metric or
            property.
    """
    if message.has_error() and message.error.code == BUDGET_SPENT:
        raise ClientLeftError(message.error.reason or "its privacy budget has ended")
    if message.has_error():
        raise ReplyError(message.error.reason or f"Flower error code {message.error.code}")
    answered, reply = decode_reply(message.content)
    if answered != header:
        raise ReplyError(f"reply to another request: {answered} instead of {header}")
    if not 1 <= reply.num_examples <= limits.examples:
        raise ReplyError(
            f"num-examples must be from 1 to {limits.examples:g}, got {reply.num_examples}"
        )
    action, layouts, masked = exchange.action, exchange.layouts, summands is not None
    reply = replace(reply, properties=rq.decode_properties(action, reply.properties, masked=masked))
    if summands is not None:
        check_masked(reply, summands, layouts)
        return reply
    metrics = ACTIONS[action].metrics
    base = exchange.states if ACTIONS[action].trains else {}
    for name, value in reply.metrics.items():
        if not math.isfinite(value):
            cure = ": lower the learning rate" if name == "train_loss" else ""
            raise ReplyError(f"{name}={value} is not finite{cure}")
        if name not in metrics:
            raise ReplyError(f"{name} is none of the metrics asked for, {sorted(metrics)}")
        low, high = limits.metric_range(name)
        if not low <= value <= high:
            raise ReplyError(f"{name}={value} is not from {low:.3g} to {high:.3g}")
    if set(reply.states) != set(layouts):
        raise ReplyError(f"states {sorted(layouts)} were asked for, got {sorted(reply.states)}")
    states: dict[str, Packed] = {}
    for name, layout in layouts.items():
        if reply.digests.get(name) != layout.digest:
            raise ReplyError(f"the tensors of {name} have other names, shapes or dtypes than ours")
        states[name] = restore(reply.states[name], layout, wire=wire, base=base.get(name))
        sizes = {dtype: vector.numel() for dtype, vector in states[name].items()}
        if sizes != layout.sizes:
            raise ReplyError(f"{name} must have sizes {layout.sizes}, got {sizes}")
        if states[name] is not reply.states[name]:  # rounding may give values below 0
            for dtype, mask in _non_negative(name, layout).items():
                vector = states[name][dtype]
                vector[mask & (vector < 0)] = 0
    for name, packed in states.items():
        _check_values(name, packed, layouts[name], limits, base.get(name, {}))
    return replace(reply, states=states)


def _check_values(name: str, packed: Packed, layout: Layout, limits: Limits, base: Packed) -> None:
    """Refuse a state farther from the one sent than an honest one, or with a negative variance.

    One pass over the values is enough: if their norm is finite, so is every value, and no average
    overflows.
    """
    moved, most = distance(packed, base), limits.norms.get(name, math.inf)
    if not math.isfinite(moved):
        raise ReplyError(f"{name} is not finite, or so large that averages overflow{DIVERGED}")
    if not moved <= most:
        raise ReplyError(
            f"{name} has a norm of {moved:.3g}{' from those sent' if base else ''}, where an "
            f"honest client's is at most {most:.3g}{DIVERGED}"
        )
    for dtype, mask in _non_negative(name, layout).items():
        if bool((mask & (packed[dtype] < 0)).any()):
            tensors = unpack(packed, layout).items()
            key = next(k for k, t in tensors if _is_non_negative(name, k) and bool((t < 0).any()))
            raise ReplyError(f"{name} has a negative {key}")


@lru_cache(maxsize=64)
def _non_negative(name: str, layout: Layout) -> Packed:
    """The places of a state's values that must not be negative, by dtype; empty if none are."""
    masks = {dtype: torch.zeros(size, dtype=torch.bool) for dtype, size in layout.sizes.items()}
    for key, mask in unpack(masks, layout).items():
        mask.fill_(_is_non_negative(name, key))
    return {dtype: mask for dtype, mask in masks.items() if mask.any()}


def _is_non_negative(name: str, key: str) -> bool:
    return any(part in key for part in NON_NEGATIVE.get(name, ()))


def misfits(properties: Mapping[int, Mapping[str, Any]], keys: Sequence[str]) -> dict[int, str]:
    """The clients whose properties differ from those of most clients, with the difference.

    Args:
        properties: Properties of each client.
        keys: Names of properties that must be the same. Of equally frequent variants the first
            counts.
    """
    variants = {
        client: json.dumps([known[key] for key in keys], default=asdict)
        for client, known in properties.items()
    }
    if not variants:
        return {}
    (usual, _), *_ = Counter(variants.values()).most_common(1)
    like = next(client for client, variant in variants.items() if variant == usual)
    unfit = {}
    for client in (c for c, variant in variants.items() if variant != usual):
        schema, other = (properties[c].get("schema") for c in (client, like))
        if schema and other and schema != other:
            unfit[client] = f"its columns are not those of the others: {difference(schema, other)}"
            continue
        key = next(key for key in keys if properties[client][key] != properties[like][key])
        ours, theirs = properties[client][key], properties[like][key]
        if schema and key in ("mean", "std") and len(ours) == len(theirs):  # name the columns
            columns = zip(feature_names(schema), ours, theirs, strict=False)
            apart = [(name, a, b) for name, a, b in columns if a != b]
            ours, theirs = ({row[0]: row[i] for row in apart} for i in (1, 2))
        unfit[client] = (
            f"its {key}={ours} is not that of the others, {theirs}: set the dataset's class_names, "
            "labels, image_size, channels, scattering or backbone and flip, columns, mean and std, "
            "ranges, target_range or statistics to those of all sites"
        )
    return unfit


def outliers(
    declared: Mapping[int, Mapping[str, float]], *, fewest: float, most: float
) -> dict[int, str]:
    """The clients that declare far fewer or far more records than most, each with a sentence.

    Too few records raise the noise that all must add, since noise is calibrated to the client that
    needs the most; too many give a large weight in every average. With one or two clients it cannot
    be decided which is right.

    Args:
        declared: For each client, named numbers of records.
        fewest: Smallest share of the median client's number, 0 or more.
        most: Largest multiple of that number, 1 or more.
    """
    unfit: dict[int, str] = {}
    if len(declared) < FEWEST_VOTES:
        return unfit
    known: dict[str, list[float]] = {}
    for numbers in declared.values():
        for name, number in numbers.items():
            known.setdefault(name, []).append(number)
    common = {name: median(values) for name, values in known.items()}
    for client, numbers in declared.items():
        for name, number in numbers.items():
            silent = len(declared) - len(known[name])  # they count as if they declared the same
            usual = common[name] if not silent else median([*known[name], *[number] * silent])
            if not fewest * usual <= number <= most * max(1.0, usual):
                unfit[client] = (
                    f"it declares {number:g} {name}records, where the median client has {usual:g}: "
                    f"{fewest:g} to {most:g} times that are taken (privacy.fewest_records, "
                    "runtime.most_records)"
                )
    return unfit


def honest_limits(
    exchange: Exchange,
    settings: rq.Settings,
    *,
    sent: Mapping[str, float],
    examples: float,
    records: Mapping[str, int],
) -> Limits:
    """The limits of an honest reply of one client.

    Args:
        exchange: The exchange.
        settings: The client's arguments in it.
        sent: Norm of each state that is sent to it.
        examples: Number of records that it has declared.
        records: With privacy, the declared numbers of records by split.
    """
    plans = exchange.planned.items() if records else ()
    planned = {kind: plan for kind, plan in plans if plan.num_records(records)}
    sizes = {name: sum(layout.sizes.values()) for name, layout in exchange.layouts.items()}
    batches = {kind: plan.expected_batch(records) for kind, plan in planned.items()}

    def total(kind: str) -> float:
        return largest_sum(planned[kind], records, num_values=sizes.get(kind, 0))

    if states := ACTIONS[exchange.action].gradients_of:
        # sums over local steps, all scaled to the batch of the first step
        if isinstance(settings, rq.TakeNetworkGradient):
            settings = settings.at_client(examples)
        batch_size = getattr(settings, "batch_size", None)
        if batch_size is not None:  # the last batch absorbs a single remaining record
            examples = min(examples, batch_size + 1)
        if not planned.keys() >= set(states):
            ceilings = {s: GROWTH * math.sqrt(sizes.get(s, 0)) * examples for s in states}
            return Limits(examples, ceilings)
        steps, first = settings.num_steps(records), batches[states[0]]
        norms = {s: SLACK * steps * total(s) * (first / batches[s]) for s in states}
        return Limits(first * (1 + 1e-9), norms)  # a mean over steps may be rounded up
    norms = {
        # running variances are squares of activations, whose scale every skipped sum multiplies
        name: GROWTH ** (2 if name == "buffers" else 1) * (math.sqrt(size) + sent.get(name, 0.0))
        for name, size in sizes.items()
    }
    if "rewards" in planned:  # strategies clamp values that noise has moved
        norms["rewards"] = math.inf
    training = settings.trained_by(examples)
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
        # the moments sent are averages, whose smallest second moment has no lower bound
        step = ADAM * training.alphas_lr * math.sqrt(sizes.get("alphas", 0))
        norms["alphas"] = steps * (step + ROUNDING * sent.get("alphas", 0.0))
    return Limits(examples, norms)


def largest_sum(planned: PlannedRelease, records: Mapping[str, int], *, num_values: int) -> float:
    """The bound on the norm of one honest release.

    A release is a sum of contributions of norm R or less over a Poisson batch, plus Gaussian noise
    of std ``sigma R`` on each of d values. By Bernstein's inequality a batch of expected size b
    exceeds ``b + sqrt(2 b t) + t`` with probability at most ``exp(-t)``; the norm of d standard
    normal values, a 1-Lipschitz function of mean ``sqrt(d)`` at most, exceeds ``sqrt(d) + sqrt(2
    t)`` with that probability (Boucheron, Lugosi and Massart, 2013, Theorems 2.10 and 5.6). So the
    norm is at most ``R (b + sqrt(2 b t) + t) + sigma R (sqrt(d) + sqrt(2 t))``, with ``t = TAIL``;
    the noise's grid is 2^-25 of its std.

    Deviation: b is ``MORE_RECORDS`` times the declared one.

    Args:
        planned: The release.
        records: Declared numbers of records, by split.
        num_values: d, the number of values.
    """
    batch = MORE_RECORDS * planned.expected_batch(records)
    drawn = batch + math.sqrt(2 * batch * TAIL) + TAIL
    noise = (planned.noise_multiplier or 0.0) * (math.sqrt(num_values) + math.sqrt(2 * TAIL))
    return planned.max_grad_norm * (drawn + noise)


@lru_cache(maxsize=1024)  # clients with equal numbers of records have the same bound
def largest_move(
    steps: int, sgd: SGD, mean: float, weights_norm: float, velocity: float, proximal: float = 0.0
) -> float:
    """The largest distance that steps of SGD can move the weights.

    ``g = mean + decay (|w| + moved) + mu moved; v = m v + g; moved += lr max(v, g + m v)``: the
    triangle inequality at every step; ``g + m v`` is Nesterov's step.

    Args:
        steps: Number of steps.
        sgd: Constants of SGD.
        mean: Largest norm of a step's mean gradient.
        weights_norm: Norm of the initial weights.
        velocity: Norm of the initial velocity.
        proximal: mu of a term that keeps the weights close to their initial values.
    """
    moved = 0.0
    for _ in range(steps):
        gradient = mean + sgd.weight_decay * (weights_norm + moved) + proximal * moved
        velocity = sgd.momentum * velocity + gradient
        moved += sgd.lr * max(velocity, gradient + sgd.momentum * velocity)
    return moved


def distance(packed: Packed, sent: Packed) -> float:
    """The norm of a state's difference from the one sent, over floats; the latter may have none.

    The result is not finite if a value, or its square, is not.
    """
    floats = [(dtype, v) for dtype, v in packed.items() if v.dtype.is_floating_point]
    moved = (v - sent[dtype] if dtype in sent else v for dtype, v in floats)
    return math.hypot(*(float(torch.linalg.vector_norm(v)) for v in moved))

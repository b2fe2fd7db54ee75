"""Reply checks: every reply is checked before anything of it is used.

A reply that fails is dropped for its exchange, and nothing that was accepted before changes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from flwr.app import Message

from fednas_flwr.base.errors import ClientLeftError, ReplyError
from fednas_flwr.data.site_tables import difference
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol.messages import BUDGET_SPENT, Header, Reply, decode_reply, restore
from fednas_flwr.protocol.requests import MAX_EXAMPLES, decode_properties
from fednas_flwr.protocol.states import MOMENTS, Layout, Packed, unpack
from fednas_flwr.protocol.sum_encoding import Summands, check_masked
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.server.limits import Limits, distance
from fednas_flwr.settings.names import FEWEST_VOTES

DIVERGED = "; if training has diverged, lower its learning rate or its weight decay"
NO_LIMITS = Limits(MAX_EXAMPLES)
# Tensors of which a negative value would make every network that uses them NaN.
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
    """The reply in ``message`` when it answers the request with ``header``.

    Args:
        message: A client's reply or error.
        exchange: The exchange. Its layouts are the states the reply must have, no more and no
            fewer.
        header: The header of the request; the reply must repeat it, nonce included, so that a
            reply from another run, round, phase or client is refused.
        limits: Limits of an honest reply. A tiny or a huge weight would overflow the
            aggregate although every tensor is finite.
        wire: Format of float32 vectors, see :mod:`fednas_flwr.protocol.messages`.
        summands: Encoding of a secure sum: the reply is masked, and nothing else can be checked.

    Raises:
        ClientLeftError: The client's privacy budget has ended.
        ReplyError: The client reports an error, or the reply is malformed, replayed, of other
            tensors than asked for, not finite or beyond what an honest one can be, or its number
            of examples or a metric is out of range, or no metric or property of the action.
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
    reply = replace(reply, properties=decode_properties(action, reply.properties, masked=masked))
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
        if states[name] is not reply.states[name]:  # rounding may have ended below 0
            for dtype, mask in _non_negative(name, layout).items():
                vector = states[name][dtype]
                vector[mask & (vector < 0)] = 0
    for name, packed in states.items():
        _check_values(name, packed, layouts[name], limits, base.get(name, {}))
    return replace(reply, states=states)


def _check_values(name: str, packed: Packed, layout: Layout, limits: Limits, base: Packed) -> None:
    """Refuse a state farther from the one sent than an honest one, or with a negative variance.

    One pass over the values: where their norm is finite, so is every one, and no average overflows.
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
    """By dtype the places of a state's values that may not be negative, where there are any."""
    masks = {dtype: torch.zeros(size, dtype=torch.bool) for dtype, size in layout.sizes.items()}
    for key, mask in unpack(masks, layout).items():
        mask.fill_(_is_non_negative(name, key))
    return {dtype: mask for dtype, mask in masks.items() if mask.any()}


def _is_non_negative(name: str, key: str) -> bool:
    return any(part in key for part in NON_NEGATIVE.get(name, ()))


def misfits(properties: Mapping[int, Mapping[str, Any]], keys: Sequence[str]) -> dict[int, str]:
    """The clients whose properties are not those of most, with the difference.

    Args:
        properties: Properties of each client.
        keys: Names of properties that must be the same; where no variant has most, that of the
            first client counts.
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
        unfit[client] = (
            f"its {key}={properties[client][key]} is not that of the others, "
            f"{properties[like][key]}: set the dataset's class_names, labels, image_size, "
            "channels, scattering or backbone, columns, mean and std, or statistics to those of "
            "all sites"
        )
    return unfit


def outliers(
    declared: Mapping[int, Mapping[str, float]], *, fewest: float, most: float
) -> dict[int, str]:
    """The clients that declare far fewer or far more records than most, with a sentence.

    Fewer raise the noise that all must add, since noise is calibrated to the client that needs
    most; more are a weight in every average. Of one or two clients nobody can tell who is right.

    Args:
        declared: By client, numbers of records by what they are of.
        fewest: Least share of the median client's, 0 or more.
        most: Largest multiple of it, 1 or more.
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
            silent = len(declared) - len(known[name])  # who count as if they said the same
            usual = common[name] if not silent else median([*known[name], *[number] * silent])
            if not fewest * usual <= number <= most * max(1.0, usual):
                unfit[client] = (
                    f"it declares {number:g} {name}records, where the median client has {usual:g}: "
                    f"{fewest:g} to {most:g} times that are taken"
                )
    return unfit

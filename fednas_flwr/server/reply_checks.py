"""The server's gate: every reply is checked before anything of it is used.

A reply that fails is dropped for its exchange, and nothing that was accepted before changes.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any, TypeGuard

import torch
from flwr.app import Message

from fednas_flwr.base.errors import ClientLeftError, ConfigError, ReplyError, show
from fednas_flwr.data.schema import Column
from fednas_flwr.data.statistics import LARGEST_NUMBER, Moments
from fednas_flwr.models.metrics import BINS
from fednas_flwr.privacy.actions import METRICS
from fednas_flwr.protocol.messages import BUDGET_SPENT, Header, Reply, decode_reply
from fednas_flwr.protocol.secure_sum.roster import MOST_SITES
from fednas_flwr.protocol.secure_sum.shamir import PART_BYTES, SECRET_BYTES
from fednas_flwr.protocol.states import (
    MOMENTS,
    Layout,
    Packed,
    fill_unchanged,
    unpack,
)
from fednas_flwr.protocol.sum_encoding import Summands, check_masked
from fednas_flwr.protocol.wire import restore
from fednas_flwr.server.limits import Limits, distance
from fednas_flwr.settings.names import (
    ACCOUNTANTS,
    FEWEST_VOTES,
    LARGEST_NOISE_MULTIPLIER,
    LEAST_NOISE_MULTIPLIER,
    SPLITS,
    UNITS,
)
from fednas_flwr.settings.parser import parse
from fednas_flwr.spaces.latency_tables import from_json

SCORES = ("f1", "auroc", "average_precision")
LARGEST_TABLE = 2**20  # characters: some 5,000 layers
LARGEST_RECORD = 2**28  # values of its features
LONGEST_TEXT = 200  # characters of a tag or of a name
MAX_EXAMPLES = 1e9  # of a client that has not said yet how many records it has
DIVERGED = "; if training has diverged, lower its learning rate or its weight decay"
NO_LIMITS = Limits(MAX_EXAMPLES)
# Tensors of which a negative value would make every network that uses them NaN.
NON_NEGATIVE = {"buffers": ("running_var",), MOMENTS: ("alphas.exp_avg_sq.", "alphas.step.")}


def accept_reply(
    message: Message,
    *,
    header: Header,
    layouts: Mapping[str, Layout],
    limits: Limits = NO_LIMITS,
    metrics: Collection[str] = METRICS,
    sent: Mapping[str, Packed] | None = None,
    wire: str = "float32",
    base: Mapping[str, Packed] | None = None,
    summands: Summands | None = None,
) -> Reply:
    """Return the reply in ``message`` when it answers the request with ``header``.

    Args:
        message: A client's reply or error.
        header: The header of the request; the reply must repeat it, nonce included, so that a
            reply from another run, round, phase or client is refused.
        layouts: The states the reply must have, no more and no fewer, each with the tensors of
            its layout.
        limits: What an honest reply stays within. A tiny or a huge weight would overflow the
            aggregate although every tensor is finite.
        metrics: The names that the action may give.
        sent: The states of the request, where the reply may leave out the tensors that have not
            changed, and name the others (``properties["changed"]``); they are filled in.
        wire: What float32 vectors travel as, see :mod:`fednas_flwr.protocol.wire`.
        base: The states of the request, where rounded ones are differences to them.
        summands: Of a secure sum: the reply is masked, and nothing else can be checked.

    Raises:
        ClientLeftError: The client's privacy budget has ended.
        ReplyError: The client reports an error, or the reply is malformed, replayed, of other
            tensors than asked for, not finite or beyond what an honest one can be, or its number
            of examples or a metric is out of range, or no metric of the action.
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
    if summands is not None:
        check_masked(reply, summands, layouts)
        return reply
    for name, value in reply.metrics.items():
        if name == "train_loss" and not math.isfinite(value):
            raise ReplyError(f"train_loss={value} is not finite: lower the learning rate")
        if not math.isfinite(value):
            raise ReplyError(f"{name}={value} is not finite")
        if name not in metrics:
            raise ReplyError(f"{name} is none of the metrics asked for, {sorted(metrics)}")
        low, high = limits.metric_range(name)
        if not low <= value <= high:
            raise ReplyError(f"{name}={value} is not from {low:.3g} to {high:.3g}")
    if set(reply.states) != set(layouts):
        raise ReplyError(f"states {sorted(layouts)} were asked for, got {sorted(reply.states)}")
    changed = _changed(reply.properties, layouts) if sent is not None else {}
    states: dict[str, Packed] = {}
    for name, whole in layouts.items():
        layout = whole.part(changed[name]) if name in changed else whole
        if reply.digests.get(name) != layout.digest:
            raise ReplyError(f"the tensors of {name} have other names, shapes or dtypes than ours")
        own = None if base is None else base.get(name)
        states[name] = restore(reply.states[name], layout, wire=wire, base=own)
        sizes = {dtype: vector.numel() for dtype, vector in states[name].items()}
        if sizes != layout.sizes:
            raise ReplyError(f"{name} must have sizes {layout.sizes}, got {sizes}")
        if states[name] is not reply.states[name]:  # rounding may have ended below 0
            for dtype, mask in _non_negative(name, layout).items():
                vector = states[name][dtype]
                vector[mask & (vector < 0)] = 0
    filled = {
        name: fill_unchanged(states[name], sent[name], layouts[name], chosen)
        for name, chosen in changed.items()
        if sent is not None
    }
    states |= filled
    for name, packed in states.items():
        _check_values(name, packed, layouts[name], limits, {} if base is None else base)
    return replace(reply, states=states)


def _check_values(
    name: str, packed: Packed, layout: Layout, limits: Limits, base: Mapping[str, Packed]
) -> None:
    """Refuse a state farther from the one sent than an honest one, or with a negative variance.

    One pass over the values: where their norm is finite, so is every one, and no average overflows.
    """
    own = base.get(name, {})
    moved, most = distance(packed, own), limits.norms.get(name, math.inf)
    if not math.isfinite(moved):
        raise ReplyError(f"{name} is not finite, or so large that averages overflow{DIVERGED}")
    if not moved <= most:
        raise ReplyError(
            f"{name} has a norm of {moved:.3g}{' from those sent' if own else ''}, where an honest "
            f"client's is at most {most:.3g}{DIVERGED}"
        )
    for dtype, mask in _non_negative(name, layout).items():
        if bool((mask & (packed[dtype] < 0)).any()):
            tensors, own_mask = unpack(packed, layout), unpack(_whole_masks(name, layout), layout)
            key = next(k for k, t in tensors.items() if bool((own_mask[k] & (t < 0)).any()))
            raise ReplyError(f"{name} has a negative {key}")


@lru_cache(maxsize=64)
def _non_negative(name: str, layout: Layout) -> Packed:
    """Return by dtype which values of a state may not be negative, where there are any."""
    return {dtype: mask for dtype, mask in _whole_masks(name, layout).items() if mask.any()}


def _whole_masks(name: str, layout: Layout) -> Packed:
    """Return which values of a state's vectors may not be negative."""
    masks = {dtype: torch.zeros(size, dtype=torch.bool) for dtype, size in layout.sizes.items()}
    for key, mask in unpack(masks, layout).items():
        mask.fill_(any(part in key for part in NON_NEGATIVE.get(name, ())))
    return masks


def _changed(properties: Mapping[str, Any], layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Return for every state which of its tensors a reply holds, one digit for each."""
    changed = properties.get("changed")
    if not isinstance(changed, dict) or set(changed) != set(layouts):
        raise ReplyError("does not say which tensors of each state have changed")
    for name, layout in layouts.items():
        text = changed[name]
        if not isinstance(text, str) or not re.fullmatch(f"[01]{{{len(layout.entries)}}}", text):
            raise ReplyError(f"does not say of each tensor of {name} whether it has changed")
    return changed


def check_properties(properties: Mapping[str, Any], *, needed: Sequence[str] = ("client",)) -> None:
    """Refuse properties in another form than the actions ``query.*`` give them.

    Raises:
        ReplyError: A needed fact is missing, or a fact is malformed.
    """
    for name in needed:
        if name not in properties:
            raise ReplyError(f"does not say its {name}")
    for name, is_right in FORMS.items():
        if name in properties and not is_right(properties[name]):
            raise ReplyError(f"says {name}={show(properties[name])}, which is malformed")


def misfits(properties: Mapping[int, Mapping[str, Any]], keys: Sequence[str]) -> dict[int, str]:
    """Return the clients whose properties are not those of most, and how they differ.

    Args:
        properties: What each client said of itself.
        keys: What must be the same; where no variant has most, that of the first client counts.
    """
    variants = {
        client: json.dumps([known[key] for key in keys]) for client, known in properties.items()
    }
    if not variants:
        return {}
    (usual, _), *_ = Counter(variants.values()).most_common(1)
    like = next(client for client, variant in variants.items() if variant == usual)
    found = {}
    for client in (c for c, variant in variants.items() if variant != usual):
        key = next(key for key in keys if properties[client][key] != properties[like][key])
        found[client] = (
            f"its {key}={properties[client][key]} is not that of the others, "
            f"{properties[like][key]}: set the dataset's class_names, labels, image_size, "
            "channels, scattering, columns, mean and std, or statistics to those of all sites"
        )
    return found


def outliers(
    declared: Mapping[int, Mapping[str, float]], *, fewest: float, most: float
) -> dict[int, str]:
    """Return the clients that declare far fewer or far more records than most, and of what.

    Fewer raise the noise that all must add, since noise is calibrated to the client that needs
    most; more are a weight in every average. Of one or two clients nobody can tell who is right.

    Args:
        declared: By client, numbers of records by what they are of.
        fewest: Least share of the median client's, 0 or more.
        most: Largest multiple of it, 1 or more.
    """
    found: dict[int, str] = {}
    if len(declared) < FEWEST_VOTES:
        return found
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
                found[client] = (
                    f"it declares {number:g} {name}records, where the median client has {usual:g}: "
                    f"{fewest:g} to {most:g} times that are taken"
                )
    return found


def _counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(v) is int and 0 <= v <= MAX_EXAMPLES for v in values
    )


def _shape(values: object) -> bool:
    """Return whether this is the shape of a record, of a size that a computer holds."""
    return _counts(values) and len(values) <= 3 and math.prod(values) <= LARGEST_RECORD


def _numbers(values: object, *, least: float) -> bool:
    """Return whether this is a list of numbers above the least, none so large as to overflow."""
    return isinstance(values, list) and all(
        type(v) in (int, float) and least < v <= LARGEST_NUMBER for v in values
    )


def _text(value: object) -> bool:
    """Return whether this is a line of text."""
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable()


def _names(values: object) -> bool:
    return isinstance(values, list) and all(map(_text, values))


def _units(values: object) -> bool:
    """Return whether these are different units of privacy, at least one."""
    if not (isinstance(values, list) and values and _names(values)):
        return False
    return values == sorted({*values} & {*UNITS})


def _texts(values: object) -> bool:
    return isinstance(values, dict) and all(map(_text, [*values, *values.values()]))


def _all_parse(kind: type, values: object) -> bool:
    """Return whether this is a list of what a dataclass can be made of."""
    if not isinstance(values, list):
        return False
    try:
        for value in values:
            parse(kind, value, key="")
    except ConfigError:
        return False
    return True


def _scores(values: object) -> bool:
    """Return whether these are scores by name."""
    return (
        isinstance(values, dict)
        and set(values) <= set(SCORES)
        and all(type(value) is float and 0 <= value <= 1 for value in values.values())
    )


def _histogram(rows: object) -> bool:
    """Return whether this is a histogram of probabilities for each of two kinds of records."""
    if not isinstance(rows, list) or len(rows) != 2:
        return False
    return all(_counts(row) and len(row) == BINS and sum(row) <= MAX_EXAMPLES for row in rows)


def _declared(values: object) -> bool:
    """Return whether these are numbers of records by split."""
    return (
        isinstance(values, dict) and set(values) == set(SPLITS) and _counts(list(values.values()))
    )


def _epsilon(value: object) -> bool:
    """Return whether this is an epsilon; null is infinite."""
    return value is None or (type(value) is float and 0 <= value < math.inf)


def _epsilons(values: object) -> bool:
    """Return whether these are epsilons by accountant, of the same splits by each."""
    if not isinstance(values, dict) or set(values) != set(ACCOUNTANTS):
        return False
    by_split = list(values.values())
    return all(isinstance(epsilons, dict) for epsilons in by_split) and all(
        set(epsilons) == set(by_split[0]) <= set(SPLITS) and all(map(_epsilon, epsilons.values()))
        for epsilons in by_split
    )


def _budget(values: object) -> bool:
    """Return whether this is a budget that a policy can give."""
    return (
        isinstance(values, dict)
        and set(values) == {"epsilon", "delta"}
        and all(type(value) is float for value in values.values())
        and 0 < values["epsilon"] < math.inf
        and 0 < values["delta"] < 1
    )


def _latency(text: object) -> bool:
    """Return whether this is a latency table, of a size that any search space has."""
    if not isinstance(text, str) or len(text) > LARGEST_TABLE:
        return False
    try:
        from_json(text)
    except ConfigError:
        return False
    return True


def _hex(digits: int) -> Callable[[object], bool]:
    """Return a check of whether a value is a number of so many hex digits."""
    return lambda text: isinstance(text, str) and bool(re.fullmatch(f"[0-9a-f]{{{digits}}}", text))


def _hex_by_site(digits: int) -> Callable[[object], bool]:
    """Return a check of whether these are numbers of so many hex digits by the index of a site."""
    is_number = _hex(digits)
    return lambda values: (
        isinstance(values, dict)
        and len(values) <= MOST_SITES
        and all(re.fullmatch("0|[1-9][0-9]{0,3}", key) for key in values)
        and all(map(is_number, values.values()))
    )


FORMS: dict[str, Callable[[Any], bool]] = {
    "client": lambda client: type(client) is int,
    "tag": _text,
    "hardware": _text,
    "versions": _texts,
    "data_set": _text,
    "epsilon": _epsilons,
    "budget": _budget,
    "secure_noise": lambda secure: type(secure) is bool,
    "unit": lambda unit: unit in UNITS,
    "least_noise_multiplier": lambda least: (
        type(least) in (int, float) and LEAST_NOISE_MULTIPLIER <= least <= LARGEST_NOISE_MULTIPLIER
    ),
    "spent": _epsilon,
    "honest_sites": lambda number: type(number) is int and 2 <= number <= MOST_SITES,
    "keeps_model": lambda keeps: keeps is True,
    "kept": lambda kept: kept is True,
    "awaits": _hex(32),
    "context": _hex(64),
    "boxes": _hex_by_site(2 * (PART_BYTES + 16)),
    "signature": _hex(128),
    "parts": _hex_by_site(2 * PART_BYTES),
    "pairs": _hex_by_site(2 * SECRET_BYTES),
    "uncounted": _units,
    "covered_steps": lambda steps: isinstance(steps, dict) and _counts(list(steps.values())),
    "input_shape": _shape,
    "image_shape": _shape,
    "scattering": _shape,
    "class_counts": _counts,
    "class_names": _names,
    "multi_label": lambda several: type(several) is bool,
    "schema": lambda values: _all_parse(Column, values),
    "mean": lambda values: _numbers(values, least=-LARGEST_NUMBER),
    "std": lambda values: _numbers(values, least=0.0),
    "scores": _scores,
    "histogram": _histogram,
    "moments": lambda values: _all_parse(Moments, values),
    "splits": _declared,
    "latency": _latency,
}

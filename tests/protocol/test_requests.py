"""What each action is given: every request survives its message, and nothing else is decoded."""

import json
import math
from dataclasses import asdict, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError, MissingSettingError
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol import messages
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.sum_requests import REQUESTS, OpenMasks, SignSurvivors
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings.optimizers import LARGEST_NORM, LARGEST_STEP, SGD, DPAware
from fednas_flwr.settings.parser import Between, Distinct, Length, OneOf, constraints, field_types
from fednas_flwr.settings.run_settings import Hardware

from ..asked import smallest
from ..json_trees import json_trees
from ..refusals import refuses
from ..test_ranges import wrong_values

# --- all requests that there are, as strategies

names = st.text(max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


def number(kind, limit):
    """Numbers of a range, whole ones up to what a message holds."""
    if kind is int:
        return st.integers(int(limit.low), int(min(limit.high, 2**62)))
    low, high = (float(end) if math.isfinite(end) else None for end in (limit.low, limit.high))
    ends = {"exclude_min": limit.above, "exclude_max": limit.below}
    return st.floats(low, high, **ends, allow_nan=False, allow_infinity=False)


def values(hint, limits=()):
    """Values of a type, within the limits that its annotations set."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    by_type = {type(limit): limit for limit in limits}
    if kind is Annotated:
        return values(inner[0], (*limits, *inner[1:]))
    if kind in (Union, UnionType):
        return st.one_of(*(values(part, limits) for part in inner))
    if is_dataclass(kind):
        return OWN[kind] if kind in OWN else built(kind)
    if kind in (list, tuple):
        least = int(by_type[Length].size.low) if Length in by_type else 0
        entries = values(inner[0])
        return st.lists(entries, min_size=least, max_size=3, unique=Distinct in by_type).map(kind)
    if kind is dict:
        return st.dictionaries(names, values(inner[1]), max_size=3)
    if OneOf in by_type:
        return st.sampled_from(by_type[OneOf].names)
    if kind in (int, float):
        return number(kind, by_type.get(Between, Between(-(2**62) if kind is int else -math.inf)))
    return {str: names, bool: st.booleans(), NoneType: st.none(), Any: plain}[kind]


def built(kind, **given):
    """Instances of a dataclass; ``given`` are the values of some of its fields."""
    hints = field_types(kind, extras=True)
    return st.builds(kind, **{n: values(hints[n]) for n in hints.keys() - given.keys()} | given)


def one_of_two(kind, **given):
    """Instances of a dataclass, of two fields of which exactly one has a value."""
    first, second = given
    return built(kind, **given | {first: none}) | built(kind, **given | {second: none})


def hexes(size):
    return st.binary(min_size=size, max_size=size).map(bytes.hex)


def by_index(size):
    return st.dictionaries(st.integers(0, 999).map(str), hexes(size))


# Classes whose fields depend on each other, or are of signs of their own.
OWN: dict[Any, Any] = {}
rates, shares = st.floats(1e-12, LARGEST_STEP), st.floats(0, 1, exclude_max=True)
norms = st.none() | st.floats(1e-12, LARGEST_NORM)


def sgd(rate, share, decay, momentum, clip_norm):
    return SGD(rate, rate * share, momentum, min(0.9 * decay / rate, LARGEST_STEP), clip_norm)


OWN[SGD] = st.builds(sgd, rates, shares, shares, shares, norms)
steps, none = st.integers(1, 10**6), st.none()
OWN[rq.Amount] = one_of_two(rq.Amount, epochs=steps, steps=steps)
OWN[Hardware] = built(Hardware, table=none)
ways = {"alternating": values(Alternating), "paths": values(SampledPaths)}
OWN[rq.LocalSearch] = one_of_two(rq.LocalSearch, **ways)
searches, trainings = values(rq.LocalSearch), values(rq.LocalTraining)
OWN[rq.Probe] = one_of_two(rq.Probe, search=searches, training=trainings)
pools = st.builds(
    lambda described, genotypes: described | {"genotypes": genotypes},
    values(rq.Description),
    st.lists(values(rq.Description), min_size=1, max_size=3),
)
one_of_three = {"candidates": none, "network": none, "training": none, "sparse": st.just(False)}
of_three = [{"candidates": values(rq.Candidates), "sparse": st.booleans()}, {"network": pools}]
of_three.append({"training": built(rq.LocalTraining, network=pools)})
rewards = (built(rq.RewardCandidates, **one_of_three | given) for given in of_three)
OWN[rq.RewardCandidates] = st.one_of(*rewards)
local_lrs = st.dictionaries(st.sampled_from(["weights", "alphas"]), st.floats(0, 1e30))
OWN[rq.TakeGradients] = built(rq.TakeGradients, local_lrs=local_lrs)
printed = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=99)
OWN[rq.KeepModel] = built(rq.KeepModel, card=printed, signature=hexes(64))
indices = st.lists(st.integers(0, 999), max_size=4).map(tuple)
survivors = {"context": hexes(32), "survivors": indices}
OWN[SignSurvivors] = built(SignSurvivors, **survivors)
OWN[OpenMasks] = built(OpenMasks, **survivors, signatures=by_index(64), boxes=by_index(49))
ALL = {action: values(kind) for action, kind in REQUESTS.items()}
assert set(ALL) == set(ACTIONS)
ASKED = messages.Header("run", "search", 1, 2, 3, "nonce")
STATES = {"weights": {"float32": torch.arange(3.0)}, "moments": {"float32": torch.ones(2)}}


def plain_of(request):
    """Return the JSON values of a request."""
    json_values: dict[str, Any] = json.loads(json.dumps(asdict(request)))
    return json_values


@pytest.mark.parametrize("action", ALL)
@settings(max_examples=20)
@given(data=st.data())
def test_every_request_survives_its_message(action, data):
    asked = data.draw(ALL[action])
    assert rq.decode(action, plain_of(asked)) == asked
    content = messages.encode_request(ASKED, asked, messages.encode_states(STATES))
    request = messages.decode_request(action, content)
    assert (request.action, request.header, request.settings) == (action, ASKED, asked)
    for name, packed in STATES.items():
        assert torch.equal(request.states[name]["float32"], packed["float32"])


@pytest.mark.parametrize("action", ["", "train", "train.serach", "query.describe ", "x" * 1000])
def test_an_unknown_action_is_refused(action):
    assert len(refuses("^action=.* is unknown: choose one of", rq.decode, action, {})) < 480


# --- one key removed, added or retyped, of every dataclass of every action


def groups(kind, values, path=""):
    """Yield path, dataclass and values of every dataclass in JSON values, the outermost first."""
    yield path, kind, values
    for name, hint in get_type_hints(kind).items():
        yield from _inside(hint, values[name], f"{path}.{name}".lstrip("."))


def _inside(hint, value, place):
    if value is None:
        return
    if is_dataclass(hint):
        yield from groups(hint, value, place)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _inside(get_args(hint)[0], item, f"{place}[{i}]")
    else:
        for inner in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
            yield from _inside(inner, value, place)


def keys_of(path, kind):
    return [(f.name, f"{path}.{f.name}".lstrip(".")) for f in fields(kind)]


@pytest.mark.parametrize("action", ALL)
@settings(max_examples=20)
@given(data=st.data(), added=names)
def test_a_key_that_is_missing_or_too_many_is_refused_by_name(action, data, added):
    values = plain_of(data.draw(ALL[action]))
    for path, kind, group in groups(REQUESTS[action], values):
        known = dict(keys_of(path, kind))
        for name, place in known.items():
            kept = group.pop(name)
            with pytest.raises(MissingSettingError, match=r" is missing") as told:
                rq.decode(action, values)
            assert (told.value.key, str(told.value).partition(" ")[0]) == (place, place)
            group[name] = kept  # at the end: the order of keys means nothing
        for name in {added, "releases", "raw_metrics", *(f"{own}_" for own in known)} - set(known):
            group[name] = None
            place = f"{path}.{name}" if path else name
            assert refuses("", rq.decode, action, values).startswith(f"setting={place} is unknown")
            del group[name]
    assert asdict(rq.decode(action, values)) is not None


# --- ranges


AT_LEAST = smallest("a")
AT_LEAST["train.candidate"] = replace(AT_LEAST["train.candidate"], dp_aware=DPAware(0.1, 0.0))
TRIED = {"search": None, "training": AT_LEAST["train.weights"].local, "loss_bound": 1e-3}
AT_LEAST["train.probe"] = replace(AT_LEAST["train.probe"], **TRIED)


def check_refused(action, values, place):
    told = refuses(" is (out of range|unknown)| has the wrong type", rq.decode, action, values)
    assert told.startswith((place, f"number of {place}="))
    assert len(told) < 200


@pytest.mark.parametrize("action", AT_LEAST)
def test_a_value_out_of_range_is_refused_by_name(action):
    values = plain_of(AT_LEAST[action])
    for path, kind, group in groups(REQUESTS[action], values):
        for name, place in keys_of(path, kind):
            value = group[name]
            for wrong in [w for part in constraints(kind)[name] for w in wrong_values(value, part)]:
                group[name] = wrong
                check_refused(action, values, place)
            group[name] = value
    assert rq.decode(action, values) == AT_LEAST[action]


UNSEEMLY = [
    *(("query.keep_model", "card", text) for text in ("\x1b]0;clear\x07", "a\rb", "\u202e")),
    *(("query.keep_model", "signature", text) for text in ("ab", "ab" * 65)),
    ("train.gradients", "local_lrs", {"weights": -0.1}),
]


@pytest.mark.parametrize(("action", "name", "wrong"), UNSEEMLY)
def test_what_is_too_long_or_of_other_signs_is_refused_by_name(action, name, wrong):
    check_refused(action, plain_of(AT_LEAST[action]) | {name: wrong}, name)


def test_a_learning_rate_of_no_state_is_refused():
    values = plain_of(AT_LEAST["train.gradients"]) | {"local_lrs": {"weight": 0.1}}
    words = "local_lrs=.* expected rates of weights and alphas"
    refuses(words, rq.decode, "train.gradients", values)


LOCAL = plain_of(AT_LEAST["train.search"])["local"]
NO_AMOUNT = {"epochs": None, "steps": None, "batch_size": None}
DRAWN = {"warm_up": False, "hardware": None}


ALTERNATIVES = [
    ("train.search", {"local": LOCAL | {"amount": NO_AMOUNT}}, "epochs or steps"),
    ("train.search", {"local": LOCAL | {"amount": NO_AMOUNT | {"epochs": 1, "steps": 1}}}, ""),
    ("train.search", {"local": LOCAL | {"alternating": None}}, "alternating or paths"),
    ("train.search", {"local": LOCAL | {"paths": DRAWN}}, "alternating or paths"),
    ("train.probe", {"training": None}, "search or training"),
    ("train.probe", {"search": LOCAL}, "search or training"),
]


@pytest.mark.parametrize(("action", "change", "choice"), ALTERNATIVES)
def test_of_alternatives_exactly_one_is_given(action, change, choice):
    values = plain_of(AT_LEAST[action]) | change
    refuses(f"{choice} must be given, and only one", rq.decode, action, values)


# --- messages that are no requests


def content(text, **records):
    return RecordDict({messages.HEADER: ConfigRecord({messages.JSON: text}), **records})


def array(data, *, dtype="float32", kind="numpy.ndarray"):
    return ArrayRecord({dtype: Array(dtype, (3,), kind, data)})


SOUND = messages.encode_request(ASKED, rq.Describe(), messages.encode_states(STATES))
TEXT = SOUND[messages.HEADER][messages.JSON]
VECTOR = SOUND["state.weights"]["float32"].data


EDITS = [
    *(("nonce", "\\ud800"), ('"settings"', '"setting"'), ('"run":', '"ran":')),
    *(('"round": 1', f'"round": {other}') for other in ('"1"', 1.5, 2**63, '1, "further": 1')),
]
TEXTS = [5, "", "{", "[" * 10**5, '{"header": ' + "9" * 5000 + "}", "null", "[]", "{}"]
TEXTS += ['{"header": {}}', *(TEXT.replace(*edit) for edit in EDITS)]
VECTORS = [
    *(array(data) for data in (b"", VECTOR[:-1], b"\x93NUMPY\x01\x00" + b"\xff" * 100)),
    *(array(VECTOR, dtype="float64"), array(VECTOR, kind="pickle")),
]


NO_REQUESTS = [
    RecordDict(),
    RecordDict({messages.HEADER: MetricRecord({messages.JSON: 1.0})}),
    RecordDict({messages.HEADER: ConfigRecord({"text": TEXT})}),
    *map(content, TEXTS),
    *(content(TEXT, **{"state.weights": vector}) for vector in VECTORS),
]


@pytest.mark.parametrize("message", NO_REQUESTS)
def test_a_message_that_is_no_request_is_refused_in_a_sentence(message):
    refusal = refuses("", messages.decode_request, "query.describe", message)
    assert len(refusal) < 400
    refusal.encode()  # it can be sent


trees = json_trees(st.text(st.characters(), max_size=9))


@given(data=st.data(), action=st.sampled_from(sorted(REQUESTS)))
def test_any_json_is_a_request_or_refused_with_a_config_error(data, action):
    """Some of the header or of the settings is anything at all."""
    values = plain_of(data.draw(ALL[action]))
    message = {"header": dict(vars(ASKED)), "settings": values}
    inner = [group for _, _, group in groups(REQUESTS[action], values)]
    place = data.draw(st.sampled_from([message, message["header"], *inner]))
    if place:
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(trees)
    try:
        request = messages.decode_request(action, content(json.dumps(message)))
    except ConfigError as error:
        str(error).encode()
    else:
        assert isinstance(request, messages.Request)
        assert rq.decode(action, plain_of(request.settings)) == request.settings


@given(text=st.text() | trees.map(json.dumps))
def test_any_text_is_refused_with_a_config_error(text):
    for action in REQUESTS:
        refuses("", messages.decode_request, action, content(text))


def test_a_pool_has_1_to_1000_members():
    def pool(members):
        return rq.RewardCandidates(network={"name": "pool", "genotypes": members})

    assert [pool([{}] * count).count for count in (1, 1000)] == [1, 1000]
    for members in ([], [{}] * 1001, None, {"a": 1}, "x"):
        refuses(r"^genotypes=.*: expected a list of 1 to 1000", pool, members)

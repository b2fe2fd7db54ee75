"""What each action is given: every request survives its message, and nothing else is decoded."""

import json
import math
import types
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError, MissingSettingError
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.plan import KINDS, STAGES, PlannedRelease
from fednas_flwr.protocol import messages
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.sum_requests import REQUESTS, OpenMasks, SignSurvivors
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.optimizers import LARGEST_NORM, LARGEST_STEP, SGD, Adam, DPAware
from fednas_flwr.settings.parser import constraints
from fednas_flwr.settings.run_settings import Hardware
from fednas_flwr.spaces.costs import Costs, HardwareLoss

from ..asked import smallest
from ..refusals import refuses
from ..test_ranges import wrong_values

# --- all requests that there are, as strategies

rates = st.floats(1e-12, LARGEST_STEP)
from_zero = st.floats(0, LARGEST_STEP)
shares = st.floats(0, 1, exclude_max=True)
counts = st.integers(1, 1000)
names = st.text(max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
descriptions = st.dictionaries(names, plain, max_size=4)
sgds = st.builds(
    lambda rate, share, decay, **others: SGD(
        lr=rate, min_lr=rate * share, weight_decay=min(0.9 * decay / rate, LARGEST_STEP), **others
    ),
    rates,
    shares,
    shares,
    momentum=shares,
    clip_norm=st.none() | st.floats(1e-12, LARGEST_NORM),
)
adams = st.builds(Adam, lr=from_zero, weight_decay=from_zero)
sizes = st.none() | st.integers(1, 2**62)
amounts = st.builds(
    rq.Amount, epochs=st.none(), steps=st.integers(1, 10**6), batch_size=sizes
) | st.builds(rq.Amount, epochs=st.integers(1, 10**6), steps=st.none(), batch_size=sizes)
numbers = st.floats(allow_nan=False, allow_infinity=False)
hardware = st.builds(
    HardwareLoss,
    terms=st.builds(
        Hardware,
        table=st.none(),
        unit=names,
        target=st.floats(1e-6, 1e30),
        loss=names,
        scale=st.floats(1e-6, 1e6),
        exponent=st.floats(-10, 10),
    ),
    costs=st.builds(
        Costs,
        unit=names,
        fixed=numbers,
        per_op=st.lists(st.lists(st.none() | numbers, max_size=3), max_size=3),
    ),
)
alternating = st.builds(
    Alternating,
    rule=st.sampled_from(["first_order", "second_order", "mixed_level"]),
    validation_weight=from_zero,
) | st.builds(Alternating, rule=st.sampled_from(["first_order", "mixed_level"]), temperature=rates)
sampled = st.builds(
    SampledPaths,
    gates=st.sampled_from(["two", "full"]),
    warm_up=st.booleans(),
    hardware=st.none() | hardware,
)
searches = st.builds(
    rq.LocalSearch, amount=amounts, weights=sgds, alphas=adams, alternating=alternating
) | st.builds(rq.LocalSearch, amount=amounts, weights=sgds, alphas=adams, paths=sampled)
trainings = st.builds(
    rq.LocalTraining,
    network=descriptions,
    split=names,
    amount=amounts,
    weights=sgds,
    auxiliary_weight=from_zero,
    drop_path_prob=shares,
)
trials = st.builds(rq.Trial, weights=sgds, alphas=adams, drop_path_prob=shares)
releases = st.builds(
    PlannedRelease,
    stage=st.sampled_from(STAGES),
    action=st.sampled_from(PRIVATE_ACTIONS),
    kind=st.sampled_from(KINDS),
    splits=st.lists(st.sampled_from(SPLITS), min_size=1, unique=True).map(tuple),
    batch_size=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    steps=st.integers(-(2**62), 2**62),
    max_grad_norm=numbers,
    noise_multiplier=st.none() | numbers,
    shared=st.booleans(),
)
paths = st.lists(st.lists(st.integers(-3, 20), max_size=4), min_size=1, max_size=3)
pools = st.builds(
    lambda described, genotypes: described | {"genotypes": genotypes},
    descriptions,
    st.lists(descriptions, min_size=1, max_size=3),
)
pool_trainings = st.builds(
    lambda training, pool, amount: replace(training, network=pool, amount=amount),
    *(trainings, pools, amounts.filter(lambda amount: amount.epochs is not None)),
)
here = st.none() | names
gradients = st.builds(
    rq.TakeGradients,
    step=st.integers(0, 2**40),
    local_steps=counts,
    local_lrs=st.dictionaries(st.sampled_from(["weights", "alphas"]), from_zero),
    batch_size=sizes,
    order=st.sampled_from([1, 2]),
    inner_lr=rates,
    data_set=here,
)
probes = {"trials": st.lists(trials, min_size=1, max_size=3), "loss_bound": st.floats(1e-3, 1e3)}
contexts = st.binary(min_size=32, max_size=32).map(bytes.hex)
indices = st.lists(st.integers(0, 999), max_size=4).map(tuple)
signatures, boxes = (
    st.dictionaries(st.integers(0, 999).map(str), st.binary(min_size=n, max_size=n).map(bytes.hex))
    for n in (64, 49)
)
ALL = {action: st.just(request) for action, request in smallest().items()} | {
    "query.commit": st.builds(
        rq.Commit, data_set=names, releases=st.lists(releases, max_size=3).map(tuple)
    ),
    "query.latency": st.builds(
        rq.MeasureLatency,
        batch_size=st.integers(1, 1024),
        passes=st.integers(2, 1000),
        data_set=here,
    ),
    "query.statistics": st.builds(rq.TellStatistics, data_set=here),
    "query.keep_model": st.builds(
        rq.KeepModel,
        card=st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=99),
        signature=st.binary(min_size=64, max_size=64).map(bytes.hex),
        data_set=here,
    ),
    "query.sign_survivors": st.builds(SignSurvivors, context=contexts, survivors=indices),
    "query.open_masks": st.builds(
        OpenMasks, context=contexts, survivors=indices, signatures=signatures, boxes=boxes
    ),
    "train.weight_gradient": gradients,
    "train.alpha_gradient": gradients,
    "train.gradients": gradients,
    "train.network_gradient": st.builds(
        rq.TakeNetworkGradient,
        network=descriptions,
        split=names,
        step=st.integers(0, 2**40),
        batch_size=sizes,
        auxiliary_weight=from_zero,
        drop_path_prob=st.floats(0, 0.99),
        data_set=here,
    ),
    "train.search": st.builds(rq.Search, local=searches, data_set=here),
    "train.candidate": st.builds(
        rq.TrainCandidates,
        candidates=paths,
        step=st.integers(0, 2**40),
        local_steps=counts,
        batch_size=sizes,
        weights=sgds,
        dp_aware=st.none() | st.builds(DPAware, max_grad_norm=rates, noise_multiplier=from_zero),
        data_set=here,
        sparse=st.booleans(),
    ),
    "train.probe": st.builds(rq.Probe, search=searches, training=st.none(), data_set=here, **probes)
    | st.builds(rq.Probe, search=st.none(), training=trainings, data_set=here, **probes),
    "train.weights": st.builds(rq.Train, local=trainings, validates=st.booleans(), data_set=here),
    "evaluate.candidates": st.builds(
        rq.RewardCandidates, candidates=paths, data_set=here, sparse=st.booleans()
    )
    | st.builds(rq.RewardCandidates, network=pools, data_set=here)
    | st.builds(rq.RewardCandidates, training=pool_trainings, data_set=here),
    "evaluate.model": st.builds(rq.Evaluate, network=descriptions, split=names, data_set=here),
    "evaluate.scores": st.builds(rq.CountScores, network=descriptions, data_set=here),
    "evaluate.personalised": st.builds(rq.Personalise, local=trainings),
}
ASKED = messages.Header("run", "search", 1, 2, 3, "nonce")
STATES = {"weights": {"float32": torch.arange(3.0)}, "moments": {"float32": torch.ones(2)}}


def test_every_action_has_its_request():
    assert set(ALL) == set(REQUESTS) == set(ACTIONS)


@pytest.mark.parametrize("action", ALL)
@settings(max_examples=20)
@given(data=st.data())
def test_every_request_survives_its_message(action, data):
    asked = data.draw(ALL[action])
    assert rq.decode(action, json.loads(json.dumps(asdict(asked)))) == asked
    request = messages.decode_request(
        action, messages.encode_request(ASKED, asked, messages.encode_states(STATES))
    )
    assert (request.action, request.header, request.settings) == (action, ASKED, asked)
    for name, packed in STATES.items():
        assert torch.equal(request.states[name]["float32"], packed["float32"])


@pytest.mark.parametrize("action", ["", "train", "train.serach", "query.describe ", "x" * 1000])
def test_an_unknown_action_is_refused(action):
    refusal = refuses("^action=.* is unknown: choose one of", rq.decode, action, {})
    assert len(refusal) < 480


# --- one key removed, added or retyped, of every dataclass of every action


def full(action, data):
    """Return the JSON values of some request of an action."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(data.draw(ALL[action]))))
    return values


def groups(kind, values, path=""):
    """Yield path, dataclass and values of every dataclass in JSON values, the outermost first."""
    yield path, kind, values
    for name, hint in get_type_hints(kind).items():
        place = f"{path}.{name}".lstrip(".")
        yield from _inside(hint, values[name], place)


def _inside(hint, value, place):
    if value is None:
        return
    if is_dataclass(hint):
        yield from groups(hint, value, place)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _inside(get_args(hint)[0], item, f"{place}[{i}]")
    else:
        for inner in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ():
            yield from _inside(inner, value, place)


def fits(hint, value):
    """Whether a plain value is of a field's type; a field may still refuse it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(kind, value) for kind in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(fits(arguments[1], v) for v in value.values())
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(arguments[0], v) for v in value)
    if is_dataclass(hint):
        return False  # no value of OTHERS has its keys
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


OTHERS = [None, True, 5, 0.5, "5", "", [], [5], [[0.5]], ["5"], [None], {}, {"5": 5}, {"5": "5"}]
OTHERS += [math.nan, math.inf, -math.inf]


def keys_of(path, kind):
    hints = get_type_hints(kind)
    return [(f.name, f"{path}.{f.name}".lstrip("."), hints[f.name]) for f in fields(kind)]


@pytest.mark.parametrize("action", ALL)
@settings(max_examples=20)
@given(data=st.data())
def test_a_key_that_is_missing_is_refused_by_name(action, data):
    values = full(action, data)
    for path, kind, group in groups(REQUESTS[action], values):
        for name, place, _ in keys_of(path, kind):
            kept = group.pop(name)
            with pytest.raises(MissingSettingError) as refusal:
                rq.decode(action, values)
            assert refusal.value.key == place
            assert str(refusal.value).startswith(f"{place} is missing")
            # back at the end: the order of keys means nothing
            group[name] = kept
    assert asdict(rq.decode(action, values)) is not None


@pytest.mark.parametrize("action", ALL)
@settings(max_examples=20)
@given(data=st.data(), added=names)
def test_a_key_too_many_is_refused_by_name(action, data, added):
    values = full(action, data)
    for path, kind, group in groups(REQUESTS[action], values):
        known = {name for name, _, _ in keys_of(path, kind)}
        for name in {added, "releases", "raw_metrics", *(f"{known}_" for known in known)} - known:
            group[name] = None
            refusal = refuses("", rq.decode, action, values)
            place = f"{path}.{name}".lstrip(".") if path else name
            assert refusal.startswith(f"setting={place} is unknown")
            del group[name]


@pytest.mark.parametrize("action", ALL)
@settings(max_examples=20)
@given(data=st.data())
def test_a_value_of_another_type_is_refused_by_name(action, data):
    values = full(action, data)
    for path, kind, group in groups(REQUESTS[action], values):
        for name, place, hint in keys_of(path, kind):
            kept = group[name]
            wrong = [value for value in OTHERS if not fits(hint, value)]
            assert wrong
            for value in wrong:
                group[name] = value
                refusal = refuses("", rq.decode, action, values)
                sentence = refusal
                assert place in sentence.partition("=")[0] or place in sentence.partition(" is")[0]
                assert len(sentence) < 500
            group[name] = kept


def test_the_cases_above_reach_every_dataclass_and_none_is_left_out():
    found: set[Any] = set()

    def reach(hint):
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner) and inner not in found:
                found.add(inner)
                for further in get_type_hints(inner).values():
                    reach(further)
            elif inner is not hint:
                reach(inner)

    for kind in REQUESTS.values():
        reach(kind)
    names = {kind.__name__ for kind in found - set(REQUESTS.values())}
    assert names == {
        *("Amount", "LocalSearch", "LocalTraining", "Trial", "SGD", "Adam", "DPAware"),
        *("Alternating", "SampledPaths", "Hardware", "HardwareLoss", "Costs", "PlannedRelease"),
    }


# --- ranges


AT_LEAST = smallest("a")
AT_LEAST["train.candidate"] = replace(AT_LEAST["train.candidate"], dp_aware=DPAware(0.1, 0.0))
AT_LEAST["train.probe"] = replace(
    AT_LEAST["train.probe"], search=None, training=AT_LEAST["train.weights"].local, loss_bound=1e-3
)


def values_of(action):
    values: dict[str, Any] = json.loads(json.dumps(asdict(AT_LEAST[action])))
    return values


def check_refused(action, values, place):
    told = refuses(" is (out of range|unknown)| has the wrong type", rq.decode, action, values)
    assert told.startswith((place, f"number of {place}="))
    assert len(told) < 200


@pytest.mark.parametrize("action", AT_LEAST)
def test_a_value_out_of_range_is_refused_by_name(action):
    values = values_of(action)
    for path, kind, group in groups(REQUESTS[action], values):
        for name, place, _ in keys_of(path, kind):
            value = group[name]
            for wrong in [w for part in constraints(kind)[name] for w in wrong_values(value, part)]:
                group[name] = wrong
                check_refused(action, values, place)
            group[name] = value
    assert rq.decode(action, values) == AT_LEAST[action]


@pytest.mark.parametrize(
    ("action", "name", "wrong"),
    [
        *(("query.keep_model", "card", text) for text in ("\x1b]0;clear\x07", "a\rb", "\u202e")),
        *(("query.keep_model", "signature", text) for text in ("ab", "ab" * 65)),
        ("train.gradients", "local_lrs", {"weights": -0.1}),
    ],
)
def test_what_is_too_long_or_of_other_signs_is_refused_by_name(action, name, wrong):
    check_refused(action, values_of(action) | {name: wrong}, name)


def test_a_trial_is_in_the_ranges_of_what_it_changes():
    for change in ({"drop_path_prob": 1.0}, {"drop_path_prob": -0.1}):
        values = json.loads(json.dumps(asdict(AT_LEAST["train.probe"])))
        values["trials"].append(values["trials"][0] | change)
        refuses(r"^trials\[1\].drop_path_prob=.* is out of range", rq.decode, "train.probe", values)


def test_a_learning_rate_of_no_state_is_refused():
    values = asdict(AT_LEAST["train.gradients"]) | {"local_lrs": {"weight": 0.1}}
    refuses(
        "local_lrs=.* expected rates of weights and alphas", rq.decode, "train.gradients", values
    )


@pytest.mark.parametrize(
    ("action", "change", "words"),
    [
        ("train.search", {"amount": {"epochs": 1, "steps": 1, "batch_size": None}}, "only one"),
        (
            "train.search",
            {"amount": {"epochs": None, "steps": None, "batch_size": None}},
            "epochs or steps must be given, and only one",
        ),
        ("train.search", {"alternating": None}, "alternating or paths must be given, and only one"),
        (
            "train.search",
            {"paths": {"gates": "two", "warm_up": False, "hardware": None}},
            "alternating or paths must be given, and only one",
        ),
    ],
)
def test_of_alternatives_exactly_one_is_given(action, change, words):
    values = json.loads(json.dumps(asdict(AT_LEAST[action])))
    values["local"] |= change
    refuses(words, rq.decode, action, values)


def test_a_probe_is_of_a_search_or_of_a_training():
    values = asdict(AT_LEAST["train.probe"])
    searched = asdict(AT_LEAST["train.search"])["local"]
    for change in ({"training": None}, {"search": searched}):
        with pytest.raises(ConfigError, match="search or training must be given, and only one"):
            rq.decode("train.probe", json.loads(json.dumps(values | change)))


# --- messages that are no requests


def content(text, **records):
    return RecordDict({messages.HEADER: ConfigRecord({messages.JSON: text}), **records})


def array(data, *, dtype="float32", kind="numpy.ndarray"):
    return ArrayRecord({dtype: Array(dtype, (3,), kind, data)})


SOUND = messages.encode_request(ASKED, rq.Describe(), messages.encode_states(STATES))
TEXT = SOUND[messages.HEADER][messages.JSON]
VECTOR = SOUND["state.weights"]["float32"].data


@pytest.mark.parametrize(
    "message",
    [
        RecordDict(),
        RecordDict({messages.HEADER: MetricRecord({messages.JSON: 1.0})}),
        RecordDict({messages.HEADER: ConfigRecord({"text": TEXT})}),
        content(5),
        content(""),
        content("{"),
        content("[" * 10**5),
        content('{"header": ' + "9" * 5000 + "}"),
        content(TEXT.replace("nonce", "\\ud800")),
        content("null"),
        content("[]"),
        content("{}"),
        content('{"header": {}}'),
        content(TEXT.replace('"settings"', '"setting"')),
        content(TEXT.replace('"run":', '"ran":')),
        content(TEXT.replace('"round": 1', '"round": "1"')),
        content(TEXT.replace('"round": 1', '"round": 1.5')),
        content(TEXT.replace('"round": 1', f'"round": {2**63}')),
        content(TEXT.replace('"round": 1', '"round": 1, "further": 1')),
        content(TEXT, **{"state.weights": array(b"")}),
        content(TEXT, **{"state.weights": array(VECTOR[:-1])}),
        content(TEXT, **{"state.weights": array(VECTOR, dtype="float64")}),
        content(TEXT, **{"state.weights": array(VECTOR, kind="pickle")}),
        content(TEXT, **{"state.weights": array(b"\x93NUMPY\x01\x00" + b"\xff" * 100)}),
    ],
)
def test_a_message_that_is_no_request_is_refused_in_a_sentence(message):
    refusal = refuses("", messages.decode_request, "query.describe", message)
    assert len(refusal) < 400
    refusal.encode()  # it can be sent


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(data=st.data(), action=st.sampled_from(sorted(REQUESTS)))
def test_any_json_is_a_request_or_refused_with_a_config_error(data, action):
    """Some of the header or of the settings is anything at all."""
    values = full(action, data)
    message = {"header": dict(vars(ASKED)), "settings": values}
    inner = [group for _, _, group in groups(REQUESTS[action], values)]
    places = [message, message["header"], *inner]
    place = data.draw(st.sampled_from(places))
    if place:
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(trees)
    try:
        request = messages.decode_request(action, content(json.dumps(message)))
    except ConfigError as error:
        refusal = str(error)
        refusal.encode()
    else:
        assert isinstance(request, messages.Request)
        assert (
            rq.decode(action, json.loads(json.dumps(asdict(request.settings)))) == request.settings
        )


@given(text=st.text() | trees.map(json.dumps))
def test_any_text_is_refused_with_a_config_error(text):
    for action in REQUESTS:
        refuses("", messages.decode_request, action, content(text))


def test_a_pool_has_1_to_1000_members():
    for count in (1, 1000):
        assert (
            rq.RewardCandidates(network={"name": "pool", "genotypes": [{}] * count}).count == count
        )
    for members in ([], [{}] * 1001, None, {"a": 1}, "x"):
        with pytest.raises(ConfigError, match=r"^genotypes=.*: expected a list of 1 to 1000"):
            rq.RewardCandidates(network={"name": "pool", "genotypes": members})

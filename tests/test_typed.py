"""Frozen dataclasses from trees of plain values: what is taken, and what is refused how."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError, MissingSettingError, show, unknown_choice
from fednas_flwr.settings.parser import MISSING, parse

from .refusals import refuses


@dataclass(frozen=True)
class Optimizer:
    lr: float
    steps: int

    def __post_init__(self):
        if not self.lr > 0:
            raise ConfigError(f"lr={self.lr} is out of range: expected above 0.")
        if self.steps < 0:
            raise ConfigError(f"steps={self.steps} is out of range: expected 0 or more.")


@dataclass(frozen=True)
class Network:
    name: str
    deep: bool
    optimizer: Optimizer
    maybe: Optimizer | None
    limit: float | None
    paths: list[list[int]]
    costs: list[list[float | None]]
    splits: tuple[str, ...]
    stages: tuple[Optimizer, ...]
    rates: dict[str, float]
    description: dict[str, Any]


PLAIN = {"name": "cell", "deep": True, "maybe": None, "limit": None, "paths": [[1, 2], []]}
PLAIN |= {"costs": [[None, 1.5]], "description": {"shape": [3, 8, 8], "deep": None}}
CONVERTED = {"optimizer": Optimizer(0.5, 3), "stages": (Optimizer(1.0, 0),)}
CONVERTED |= {"splits": ("train", "test"), "rates": {"weights": 1.0}}
NETWORK = Network(**PLAIN, **CONVERTED)


def values(**changes):
    """Return what parses to :data:`NETWORK`, as JSON gives it, with some keys changed."""
    given = {"optimizer": {"lr": 0.5, "steps": 3}, "stages": [{"lr": 1, "steps": 0}]}
    return PLAIN | given | {"splits": ["train", "test"], "rates": {"weights": 1}} | changes


def refused(**changes):
    """Return the sentence with which changed values are refused, inside ``net`` and at the top."""
    sentences = []
    for key in ("net", ""):
        with pytest.raises(ConfigError) as refusal:
            parse(Network, values(**changes), key=key)
        sentences.append(str(refusal.value))
    inside, at_the_top = sentences
    assert inside == f"net.{at_the_top}"
    assert len(inside) < 250
    assert inside.endswith(".")
    assert "\n" not in inside
    return at_the_top


def test_a_tree_of_plain_values_becomes_the_dataclasses_that_it_means():
    assert parse(Network, values(), key="") == NETWORK
    assert parse(Network, asdict(NETWORK), key="") == NETWORK


def test_whole_numbers_become_floats_and_nothing_else_is_converted():
    parsed = parse(Network, values(limit=2**53, rates={"a": -3}, costs=[[7]]), key="")
    found = [parsed.limit, *parsed.rates.values(), parsed.costs[0][0], parsed.stages[0].lr]
    assert found == [2.0**53, -3.0, 7.0, 1.0]
    assert {type(value) for value in found} == {float}
    assert type(parse(Network, values(), key="").paths[0][0]) is int


def test_what_may_be_none_may_also_be_given():
    parsed = parse(Network, values(maybe={"lr": 2.0, "steps": 1}, limit=0.25), key="")
    assert (parsed.maybe, parsed.limit) == (Optimizer(2.0, 1), 0.25)


@pytest.mark.parametrize("key", sorted(values()))
def test_a_missing_key_is_named(key):
    given = values()
    del given[key]
    with pytest.raises(MissingSettingError, match=f"^net.{key} is missing") as refusal:
        parse(Network, given, key="net")
    assert refusal.value.key == f"net.{key}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nam": "x"}, "setting=nam is unknown: choose one of .* .nearest: name"),
        ({5: "x"}, "setting=5 is unknown"),
        ({"optimizer": {"lr": 1.0, "steps": 1, "lrr": 1}}, "setting=optimizer.lrr is unknown"),
        ({"maybe": {"lr": 1.0}}, "maybe.steps is missing"),
        ({"stages": [{"lr": 1.0, "steps": 1}, {"lr": 1.0}]}, r"stages\[1\].steps is missing"),
        ({"x" * 10**5: 1}, "setting=x{80} is unknown"),
    ],
)
def test_unknown_and_missing_keys_are_named_wherever_they_are(change, sentence):
    given = {str(key) if key == "x" else key: value for key, value in values().items()} | change
    with pytest.raises(ConfigError, match=f"^{sentence}") as refusal:
        parse(Network, given, key="")
    assert len(str(refusal.value)) < 400


HUGE = 10**400
NUMBER, WHOLE, TEXT = "expected a number", "expected a whole number", "expected text"
WRONG = [  # a setting, its wrong values, and what is expected
    ("limit", (math.nan, math.inf, -math.inf, True, "0.5", [], {}, b"1", 1 + 1j), NUMBER),
    ("name", (5, None, ["cell"]), TEXT),
    ("deep", (1, "true", None), "expected true or false"),
    ("paths", (5, "12", {"0": [1]}), "expected a list such as [a list such as"),
    ("splits", ("train", None), "expected a list"),
    ("rates", ([1],), "expected a mapping"),
    ("description", (None, []), "expected a mapping"),
]
WRONG_STEPS = (1.0, math.nan, True, "1", None, [1], 2**63, -(2**63))
WITHIN = [
    *(({"limit": n}, "limit=an integer of more than 30 digits has the") for n in (HUGE, -HUGE)),
    ({"optimizer": None}, "optimizer=null must be a group of settings"),
    ({"optimizer": [1]}, "optimizer=[1] must be a group of settings"),
    ({"maybe": 5}, "maybe=5 must be a group of settings"),
    ({"optimizer": {"lr": "x", "steps": 1}}, f"optimizer.lr=x has the wrong type: {NUMBER}"),
    *(
        ({"optimizer": {"lr": 1, "steps": bad}}, f"optimizer.steps={show(bad)} has the wrong type")
        for bad in WRONG_STEPS
    ),
    ({"optimizer": {"lr": 1, "steps": HUGE}}, "optimizer.steps=an integer of more than 30 digits"),
    ({"paths": [[1], 2]}, "paths[1]=2 has the wrong type: expected a list"),
    ({"paths": [[1, 2.0]]}, f"paths[0][1]=2.0 has the wrong type: {WHOLE}"),
    ({"paths": [[1, None]]}, f"paths[0][1]=null has the wrong type: {WHOLE}"),
    ({"costs": [[None, math.nan]]}, f"costs[0][1]=nan has the wrong type: {NUMBER}"),
    ({"costs": [None]}, "costs[0]=null has the wrong type: expected a list"),
    ({"splits": ["train", 5]}, f"splits[1]=5 has the wrong type: {TEXT}"),
    ({"stages": [{"lr": 1, "steps": 1}, None]}, "stages[1]=null must be a group of settings"),
    ({"stages": [{"lr": 1, "steps": None}]}, f"stages[0].steps=null has the wrong type: {WHOLE}"),
    ({"rates": {"a": "1"}}, f"rates.a=1 has the wrong type: {NUMBER}"),
    ({"rates": {"a" * 10**5: "1"}}, f"rates.{'a' * 80}=1 has the wrong type: {NUMBER}"),
    ({"name": ["x" * 1000] * 1000}, f"name=[{'x' * 30}..., "),
    ({"deep": "x" * 1000}, f"deep={'x' * 80} has the wrong type: expected true or false"),
]
OF_ANOTHER_TYPE = WITHIN + [
    ({name: value}, f"{name}={show(value)} has the wrong type: {expected}")
    for name, values_of, expected in WRONG
    for value in values_of
]


@pytest.mark.parametrize(("change", "sentence"), OF_ANOTHER_TYPE)
def test_a_value_of_another_type_is_refused_in_one_short_sentence(change, sentence):
    assert refused(**change).startswith(sentence)


@pytest.mark.parametrize(
    ("key", "expected"), [("limit", "a number"), ("optimizer", "a group of settings")]
)
def test_what_only_the_user_can_give_is_asked_for(key, expected):
    with pytest.raises(ConfigError, match=f"^net.{key} must be given: net.{key}=<{expected}>.$"):
        parse(Network, values(**{key: MISSING}), key="net")


@pytest.mark.parametrize("given", [None, 5, "x", [], [1], (1,), math.nan])
def test_what_is_no_mapping_at_all_is_refused(given):
    refuses("^net=.* must be a group of settings", parse, Network, given, key="net")


def test_what_a_dataclass_refuses_is_told_with_the_whole_key():
    """Its sentence begins with the name of a field."""
    low = {"lr": 0, "steps": 1}
    assert refused(optimizer=low).startswith("optimizer.lr=0.0 is out of range")
    assert refused(maybe=low).startswith("maybe.lr=0.0 is out of range")
    assert refused(stages=[low]).startswith("stages[0].lr=0.0 is out of range")
    less = {"lr": 1, "steps": -1}
    assert refused(optimizer=less).startswith("optimizer.steps=-1 is out of range")


def test_hints_overrule_a_type_of_the_dataclass():
    hints = {"description": Optimizer}
    given = values(description={"lr": 1.0, "steps": 2})
    assert parse(Network, given, key="", hints=hints).description == Optimizer(1.0, 2)
    with pytest.raises(ConfigError, match="description.lr is missing"):
        parse(Network, values(description={}), key="", hints=hints)


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(HUGE),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*values(), "lr", "steps", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(data=st.data())
def test_any_tree_is_parsed_or_refused_with_a_config_error(data):
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(values())), trees, max_size=2))
    given = data.draw(st.one_of(trees, st.just(values(**changed))))
    try:
        parsed = parse(Network, given, key="net")
    except ConfigError as error:
        sentence, parsed = str(error), None
    if parsed is None:
        assert len(sentence) < 400
    else:
        assert parse(Network, asdict(parsed), key="net") == parsed
        assert all(math.isfinite(rate) for rate in parsed.rates.values())


def test_an_unknown_name_where_there_is_none_is_a_whole_sentence():
    assert str(unknown_choice("setting", "x", [])) == "setting=x is unknown: there is none."

"""Values become settings: those that a constraint or a type does not allow are refused by name."""

import math
import re
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.algorithms.fed_darts import FedDARTSSettings
from fednas_flwr.base.errors import ConfigError, MissingSettingError, show, unknown_choice
from fednas_flwr.protocol.sum_requests import REQUESTS
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings import parser
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.optimizers import SGD, Adam, Configuration, Range
from fednas_flwr.settings.parser import Between, Checked, Length, OneOf, constraints, parse
from fednas_flwr.settings.registry import OWN, TABLES, algorithms, carry
from fednas_flwr.spaces import SEARCH_SPACES

from .refusals import refuses
from .rows import rows

MBCONV = "search_space=mbconv retrain=mbconv"
COST = "{table:null,unit:ms,target:3.0,loss:additive,scale:1.0,exponent:1.0}"
ARM = "{lr:0.1,weight_decay:0,momentum:0,alpha_lr:0,alpha_weight_decay:0,dropout:0}"
OVERRIDES = """
algorithm=feathers algorithm.configurations=[$ARM] dataset.limit_train=5
algorithm=fednas search_space=darts training.class_factors={a:0.5} dataset.std=[0.5]
algorithm=fedprox_darts partition=quantity partition.fractions=[0.5,0.5]
algorithm=dp_fnas privacy=dp privacy.metrics_noise_multiplier=1 search_space.norm=group
    retrain.norm=group
algorithm=random_search retrain.weights.clip_norm=1 retrain.channels=8 sampling.per_round=8
    aggregate=trimmed_mean clients=9
algorithm=fedex partition=label_groups partition.clients_per_group=[1,2]
algorithm=fdnas algorithm.hardware=$COST $MBCONV
algorithm=cfdnas algorithm.group_by=tag algorithm.num_groups=null
    algorithm.group_hardware={a:$COST} $MBCONV
algorithm=dpnas search_space=dp_cells retrain=dp_cells
search_space=adapters retrain=mbconv search_space.backbone=a search_space.weights=b
    dataset.backbone={name:a,weights:b}
algorithm=fedavg dataset=csv server_optimizer=adam
algorithm=zero_cost algorithm.shortlist={keep:2,scores:[synflow]} dataset=image_folder
    algorithm.limits.parameters=1000000 runtime=ray secure_sum=null
algorithm=successive_halving algorithm.pool.limits.parameters=1000000
"""  # together they have every class of settings
RUNS = [run.split() for (run,) in rows(OVERRIDES, MBCONV=MBCONV, COST=COST, ARM=ARM)]
FREE = {  # numbers of any size
    *("AdapterSettings.mean", "ImageFolder.mean", "Images.mean", "DifferentialPrivacy.test_seed"),
    *("LabelGroups.groups", "LabelGroups.seed", "QuantityPartition.seed", "RandomPartition.seed"),
}


def parts(value, key=""):
    """Return all dataclasses in a tree of settings, with their dotted keys."""
    if is_dataclass(value):
        yield key, value
        for field in fields(value):
            yield from parts(getattr(value, field.name), f"{key}.{field.name}".lstrip("."))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from parts(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from parts(item, f"{key}[{index}]")


def wrong_values(value, constraint):
    """Return values of a field that a constraint of it, or of its entries, refuses."""
    if isinstance(constraint, parser.Where):
        return []  # conditions have tests of their own
    if isinstance(constraint, parser.Distinct):
        return [[*value, *value]] if isinstance(value, list) and value else []
    if isinstance(constraint, Length):
        if isinstance(value, dict):
            return [{**value, "last": ""}]
        sizes = (0, constraint.size.high + 1) if value else (0,)
        one = "x" if isinstance(value, str) else (value or [])[:1]
        return [one * int(n) for n in sizes if n not in constraint.size and n < 10**6]
    if isinstance(constraint, OneOf):
        wrong = ["nothing", "", constraint.names[0].upper()]
    else:
        below = constraint.low if constraint.above else constraint.low - 1
        above = constraint.high if constraint.below else constraint.high * 2 + 1
        wrong = [below, above, -math.inf, math.nan]
    if isinstance(value, list):
        return [[*value, item] for item in wrong]
    return [{**value, "last": item} for item in wrong] if isinstance(value, dict) else wrong


@pytest.fixture(scope="module", params=RUNS, ids=lambda overrides: overrides[0])
def tree(request):
    return compose_tree(request.param)


def test_a_value_outside_a_constraint_is_refused_by_the_name_of_its_field(tree):
    for _, settings in parts(parse_config(tree)):
        for name, of_field in constraints(type(settings)).items():
            for constraint in of_field:
                for wrong in wrong_values(getattr(settings, name), constraint):
                    told = refuses(rf"^{name}(\.last)?=", replace, settings, **{name: wrong})
                    assert told.endswith(".")


def test_the_same_value_in_a_configuration_is_named_by_its_whole_key(tree):
    named = set()
    for key, settings in parts(parse_config(tree)):
        group = tree
        for part in filter(None, key.replace("[", ".[").split(".")):
            group = group[int(part[1:-1]) if part.startswith("[") else part]
        for name, of_field in constraints(type(settings)).items():
            value = getattr(settings, name)
            for wrong in [wrong for part in of_field for wrong in wrong_values(value, part)][:1]:
                good = group.setdefault(name, value)
                group[name] = wrong
                whole = f"{key}.{name}".lstrip(".")
                assert refuses("", parse_config, tree).startswith((f"{whole}=", f"{whole}.last="))
                group[name] = good
                named.add(whole)
    assert len(named) > 25


def test_every_number_of_a_setting_has_a_range():
    kinds = {type(part) for run in RUNS for _, part in parts(parse_config(compose_tree(run)))}
    assert {entry.settings for entry in [*algorithms().values(), *SEARCH_SPACES.values()]} <= kinds
    assert {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, hint in get_type_hints(kind).items()
        if re.search(r"\b(int|float)\b", str(hint)) and not constraints(kind)[name]
    } == FREE


def test_requests_are_checked_like_settings():
    assert [kind for kind in REQUESTS.values() if any(constraints(kind).values())]
    for kind in {*REQUESTS.values(), Alternating, SampledPaths}:
        if any(constraints(kind).values()):
            assert issubclass(kind, Checked)


HELD = [
    (Between(1), "1 or more", [1, 10**400], [0, math.inf, math.nan]),
    (Between(0, above=True), "above 0", [5e-324, 1e308], [0, -1, math.inf]),
    (Between(0, 1), "0 to 1", [0, 0.5, 1], [-5e-324, 1 + 1e-15, math.nan]),
    (Between(0, 1, above=True), "above 0, at most 1", [5e-324, 1], [0, 1.1]),
    (Between(0, 1, below=True), "0 to below 1", [0, 1 - 1e-15], [-1, 1]),
    (Between(0, 1, above=True, below=True), "above 0, below 1", [0.5], [0, 1]),
    (Between(1e-3, 1e30), "0.001 to 1e+30", [1e-3, 1e30], [9.99e-4, 1.01e30]),
    (Between(2, 10**6), "2 to 1000000", [2, 10**6], [1, 10**6 + 1]),
]


@pytest.mark.parametrize(("range_", "text", "inside", "outside"), HELD)
def test_a_range_says_what_it_holds(range_, text, inside, outside):
    assert str(range_) == text
    assert [number for number in inside if number not in range_] == []
    assert [number for number in outside if number in range_] == []


@dataclass(frozen=True)
class Every(Checked):
    """A field of each kind."""

    some: Annotated[int, Between(1)] | None
    listed: Annotated[list[Annotated[str, OneOf(("left", "right"))]], Length(Between(1, 2))]
    named: dict[str, Annotated[float, Between(0, 1)]]
    text: Annotated[str, Length(Between(0, 4))]
    nested: tuple[SGD, ...]


PLAIN = SGD(0.1, 0.0, 0.9, 0.0, None)
GOOD = {"some": None, "listed": ["left"], "named": {"a": 1.0}, "text": "é", "nested": (PLAIN,)}


WRONG_FIELDS = [
    ({"some": 0}, "some=0 is out of range: expected 1 or more, or null."),
    ({"listed": []}, "listed=[] is out of range: expected 1 to 2 entries."),
    ({"listed": ["left", "rigt"]}, "listed=rigt is unknown: choose one of left, right (neare"),
    ({"named": {"a": 0.0, "b": 2.0}}, "named.b=2.0 is out of range: expected 0 to 1."),
    ({"text": "éàü"}, "text=éàü is out of range: expected 0 to 4 bytes."),
]


@pytest.mark.parametrize(("changed", "sentence"), WRONG_FIELDS)
def test_what_fields_hold_is_checked(changed, sentence):
    assert Every(**GOOD).some is None
    told = refuses("", Every, **{**GOOD, **changed})
    assert sentence in told
    plain = {**GOOD, "nested": [vars(PLAIN)]}
    assert parse(Every, plain, key="a.b") == Every(**GOOD)
    assert refuses("", parse, Every, {**plain, **changed}, key="a.b") == f"a.b.{told}"


def test_what_holds_between_fields_is_checked_after_each():
    refuses(r"^min_lr=0.2 is out of range: expected 0 to lr=0.1\.", replace, PLAIN, min_lr=0.2)
    refuses("^low=0.0 .* above 0 where log is true", Range, 0.0, 1.0, log=True)
    assert Range(0.0, 1.0, log=False).at(0.5) == 0.5
    refuses("^lr=-1.0 is out of range: expected 0 to 10000 ", Adam, lr=-1.0, weight_decay=0.0)


DECAYS = [(0.1, 10.0, 10.01), (2.0, 0.5, 0.51), (1e-3, 1000.0, 1001.0)]


@pytest.mark.parametrize(("lr", "most", "above"), DECAYS)
def test_a_decay_that_turns_weights_round_is_refused_everywhere(lr, most, above):
    arm = {"momentum": 0.0, "alpha_lr": 0.0, "alpha_weight_decay": 0.0, "dropout": 0.0}
    sentence = rf"weight_decay={above} is out of range: expected 0 to {1 / lr:.4g}, which is 1 / lr"
    for make in (lambda **own: Configuration(**own, **arm), partial(replace, PLAIN, min_lr=0.0)):
        assert make(lr=lr, weight_decay=most).weight_decay == most
        refuses(f"^{sentence}", make, lr=lr, weight_decay=above)
    for algorithm in ("feathers", "fedex"):
        text = str({**arm, "lr": lr, "weight_decay": above}).replace("'", "")
        given = [f"algorithm={algorithm}", f"algorithm.configurations=[{text}]"]
        refuses(rf"^algorithm\.configurations\[0\]\.{sentence}", parse_config, compose_tree(given))


@dataclass(frozen=True)
class Resting(FedDARTSSettings):
    """Settings from outside the package."""

    rest: Annotated[int, Between(1, 5)]


def test_settings_that_are_registered_keep_their_ranges():
    carry("algorithm", "resting", replace(algorithms()["fed_darts"], settings=Resting))
    try:
        assert constraints(Resting)["rest"] == (Between(1, 5),)
        assert constraints(Resting) == {**constraints(FedDARTSSettings), "rest": (Between(1, 5),)}
    finally:
        del TABLES["algorithm"]["resting"], OWN["algorithm"]["resting"]


# --- trees of plain values: what is taken, and what is refused how


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


PLAIN_VALUES = {"name": "cell", "deep": True, "maybe": None, "limit": None, "paths": [[1, 2], []]}
PLAIN_VALUES |= {"costs": [[None, 1.5]], "description": {"shape": [3, 8, 8], "deep": None}}
CONVERTED = {"optimizer": Optimizer(0.5, 3), "stages": (Optimizer(1.0, 0),)}
CONVERTED |= {"splits": ("train", "test"), "rates": {"weights": 1.0}}
NETWORK = Network(**PLAIN_VALUES, **CONVERTED)


def values(**changes):
    """Return what parses to :data:`NETWORK`, as JSON gives it, with some keys changed."""
    given = {"optimizer": {"lr": 0.5, "steps": 3}, "stages": [{"lr": 1, "steps": 0}]}
    return PLAIN_VALUES | given | {"splits": ["train", "test"], "rates": {"weights": 1}} | changes


def refused(**changes):
    """Return the sentence with which changed values are refused, inside ``net`` and at the top."""
    given = values(**changes)
    inside, at_the_top = (refuses("", parse, Network, given, key=key) for key in ("net", ""))
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


WRONG_KEYS = [
    ({"nam": "x"}, "setting=nam is unknown: choose one of .* .nearest: name"),
    ({5: "x"}, "setting=5 is unknown"),
    ({"optimizer": {"lr": 1.0, "steps": 1, "lrr": 1}}, "setting=optimizer.lrr is unknown"),
    ({"maybe": {"lr": 1.0}}, "maybe.steps is missing"),
    ({"stages": [{"lr": 1.0, "steps": 1}, {"lr": 1.0}]}, r"stages\[1\].steps is missing"),
    ({"x" * 10**5: 1}, "setting=x{80} is unknown"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG_KEYS)
def test_unknown_and_missing_keys_are_named_wherever_they_are(change, sentence):
    assert len(refuses(f"^{sentence}", parse, Network, values() | change, key="")) < 400


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
WITHIN = [
    *(({"limit": n}, "limit=an integer of more than 30 digits has the") for n in (HUGE, -HUGE)),
    ({"optimizer": None}, "optimizer=null must be a group of settings"),
    ({"maybe": 5}, "maybe=5 must be a group of settings"),
    ({"optimizer": {"lr": "x", "steps": 1}}, f"optimizer.lr=x has the wrong type: {NUMBER}"),
    ({"optimizer": {"lr": 1, "steps": HUGE}}, "optimizer.steps=an integer of more than 30 digits"),
    ({"paths": [[1], 2]}, "paths[1]=2 has the wrong type: expected a list"),
    ({"paths": [[1, 2.0]]}, f"paths[0][1]=2.0 has the wrong type: {WHOLE}"),
    ({"costs": [[None, math.nan]]}, f"costs[0][1]=nan has the wrong type: {NUMBER}"),
    ({"splits": ["train", 5]}, f"splits[1]=5 has the wrong type: {TEXT}"),
    ({"stages": [{"lr": 1, "steps": 1}, None]}, "stages[1]=null must be a group of settings"),
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
OF_ANOTHER_TYPE += [
    ({"optimizer": {"lr": 1, "steps": bad}}, f"optimizer.steps={show(bad)} has the wrong type")
    for bad in (1.0, math.nan, True, "1", None, [1], 2**63, -(2**63))
]


@pytest.mark.parametrize(("change", "sentence"), OF_ANOTHER_TYPE)
def test_a_value_of_another_type_is_refused_in_one_short_sentence(change, sentence):
    assert refused(**change).startswith(sentence)


ASKED_FOR = [("limit", "a number"), ("optimizer", "a group of settings")]


@pytest.mark.parametrize(("key", "expected"), ASKED_FOR)
def test_what_only_the_user_can_give_is_asked_for(key, expected):
    given = values(**{key: parser.MISSING})
    refuses(f"^net.{key} must be given: net.{key}=<{expected}>.$", parse, Network, given, key="net")


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
    lacking = values(description={})
    refuses("description.lr is missing", parse, Network, lacking, key="", hints=hints)


keys = st.sampled_from([*values(), "lr", "steps", "x"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(HUGE)
trees = st.recursive(
    leaves,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(keys, of, max_size=4),
    max_leaves=12,
)


@given(data=st.data())
def test_any_tree_is_parsed_or_refused_with_a_config_error(data):
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(values())), trees, max_size=2))
    given = data.draw(st.one_of(trees, st.just(values(**changed))))
    try:
        parsed = parse(Network, given, key="net")
    except ConfigError as error:
        told = str(error)
    else:
        told = ""
        assert parse(Network, asdict(parsed), key="net") == parsed
        assert all(math.isfinite(rate) for rate in parsed.rates.values())
    assert len(told) < 400


def test_an_unknown_name_where_there_is_none_is_a_whole_sentence():
    assert str(unknown_choice("setting", "x", [])) == "setting=x is unknown: there is none."

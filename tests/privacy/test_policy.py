import math
import sys
from dataclasses import asdict, replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.privacy import policy
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import DataSetPolicy, Policy, SumTerms, check_action, check_planned
from fednas_flwr.settings.names import SPLITS, UNITS
from fednas_flwr.settings.parser import constraints
from fednas_flwr.settings.parser import parse as parse_typed

from ..policies import policy_of
from ..refusals import refuses
from ..test_ranges import wrong_values

parse_policy, template = policy.parse_policy, policy.template
ALLOWED = ["query.describe", "train.search"]
WARD = policy_of(largest_steps=5000, actions=ALLOWED, records=1000)
del WARD["largest_noise_multiplier"]  # which need not be named


def parse(**changes):
    sections = {"ward": {**WARD, **changes}}
    return parse_policy(yaml.safe_dump({"data_sets": sections}), origin="site.yaml")


POLICY = parse()
WARD_SET = POLICY.data_sets["ward"]
TERMS = {"batch_size": 60.0, "steps": 1000, "max_grad_norm": 0.5, "noise_multiplier": 1.0}
PLANNED = PlannedRelease("search", "train.search", "weights", ("train",), **TERMS)


def check_asked(policy, action="train.search", *, data_set="ward", is_secure=True):
    return check_action(policy, data_set, action, is_secure=is_secure)


def plan(allowed, num_values=1, **terms):
    """Check a planned release as it comes in: its JSON values are parsed first."""
    planned = parse_typed(PlannedRelease, asdict(PLANNED) | terms, key="releases[0]")
    check_planned(allowed, planned, num_values=num_values)
    return planned


def test_what_the_policy_allows_passes():
    assert check_asked(POLICY) is WARD_SET
    assert check_asked(POLICY, "query.describe") is WARD_SET
    assert plan(WARD_SET) == PLANNED
    edge = {"noise_multiplier": 0.8, "batch_size": None, "steps": 5000, "max_grad_norm": 1}
    assert plan(WARD_SET, **edge, splits=["train", "validation", "test"])
    assert plan(WARD_SET, batch_size=1e300)
    assert plan(WARD_SET, batch_size=6.1e-7)


LIMITS = {
    "noise_multiplier": ("least_noise_multiplier: noise_multiplier=", "0.8 to 1000000.0"),
    "max_grad_norm": ("largest_grad_norm: max_grad_norm=", "1e-06 to 1.0"),
    "steps": ("largest_steps: steps=", "1 to 5000"),
}
HOSTILE = [
    *((term, value) for term in LIMITS for value in (-1, 0)),
    *(("noise_multiplier", value) for value in (None, 0.0, -0.0, 0.7999999, 1e-300, 1e7, 1e300)),
    *(("max_grad_norm", value) for value in (1.0000001, 1e300, 1e-7)),
    *(("steps", value) for value in (5001, 2**62)),
]


@pytest.mark.parametrize(("term", "value"), HOSTILE)
def test_hostile_terms_are_refused_naming_rule_value_and_limit(term, value):
    rule, limit = LIMITS[term]
    refusal = refuses(f"refused by the policy, rule {rule}", plan, WARD_SET, **{term: value})
    assert limit in refusal
    assert len(refusal) < 250


@pytest.mark.parametrize("term", LIMITS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_in_no_range_is_refused_also_where_nothing_was_parsed(term, value):
    rule, limit = LIMITS[term]
    refusal = refuses(f"rule {rule}", check_planned, WARD_SET, replace(PLANNED, **{term: value}))
    assert limit in refusal


def test_a_rate_too_small_to_book_is_refused_naming_rule_value_and_limit():
    large = replace(WARD_SET, records=6 * 10**9)
    large = replace(large, largest_noise_multiplier=1000.0)
    with pytest.raises(ConfigError, match=r"rule sample_rate: sample_rate=.*, not 1e-09 to 1"):
        plan(large, batch_size=1, noise_multiplier=1000.0)
    for size in (1e-300, 5e-324, 0.5):  # one record is expected at least
        assert plan(WARD_SET, batch_size=size).expected_batch(WARD_SET.by_split) >= 1


OTHER_SPLITS = [[], ["train", "train"], ["secret"], ["train", "secret"], ["train+validation"], [""]]


@pytest.mark.parametrize("splits", OTHER_SPLITS)
def test_splits_other_than_the_sites_are_refused(splits):
    refuses(r"^releases\[0\].splits=.*(expected|choose one of)", plan, WARD_SET, splits=splits)


def test_a_split_without_declared_records_is_refused_naming_it():
    allowed = parse(fractions={"train": 0.8, "validation": 0.2, "test": 0.0}).data_sets["ward"]
    refuses("rule records: test has no declared record", plan, allowed, splits=["test"])
    assert plan(allowed, splits=["test", "train"])


def test_noise_that_its_grid_cannot_hold_is_refused_naming_value_and_limit():
    noisy = replace(WARD_SET, largest_noise_multiplier=5000.0)
    with pytest.raises(ConfigError, match=r"rule noise grid: noise_multiplier=5000.0, not .* 4.19"):
        plan(noisy, noise_multiplier=5000.0, num_values=10**6)
    assert plan(noisy, noise_multiplier=5000.0, num_values=10**5)
    crowd = parse(records=10**8).data_sets["ward"]
    refuses("rule noise grid: noise_multiplier=1.0, not 2.98 to", plan, crowd)
    assert plan(crowd, noise_multiplier=3.0)


AGAINST_RULES = [
    ({"data_set": "ward-2"}, "rule data_sets: data set=ward-2"),
    ({"data_set": "Ward"}, "rule data_sets"),
    ({"data_set": ""}, "rule data_sets: data set=, not an id"),
    ({"data_set": None}, "rule data_sets: data set=null"),
    ({"action": "train.alpha_gradient"}, "rule actions: action=train.alpha_gradient"),
    ({"action": "evaluate.personalised"}, "rule actions"),
    ({"action": "eval"}, "rule actions"),
    ({"action": 10 * "train.search "}, "rule actions"),
    ({"action": None}, "rule actions"),
    ({"is_secure": False}, "rule secure_noise: secure_noise=false"),
    ({"is_secure": False, "policy": parse(secure_noise=False)}, "rule test_seed: test_seed=true"),
]


@pytest.mark.parametrize(("change", "words"), AGAINST_RULES)
def test_every_other_rule_is_named(change, words):
    assert len(refuses(words, check_asked, **{"policy": POLICY} | change)) < 250


def test_a_refusal_does_not_tell_the_sites_other_data_sets():
    assert "ward" not in refuses("", check_asked, POLICY, data_set="war")


# --- nothing outside the policy passes

numbers = st.one_of(
    st.floats(allow_nan=True),
    st.sampled_from([0, 1, 0.5, 0.8, 1.0, 1e-6, 1e-9, 1e6, 10**400, True, None, "1"]),
    st.floats(1e-9, 2),
)
counts = st.one_of(st.integers(-2, 12), st.sampled_from([1.0, True, None, 10**30]))
hostile = {"noise_multiplier": numbers, "batch_size": numbers, "max_grad_norm": numbers}
RANDOMNESS = [{"secure_noise": a, "test_seed": b} for a, b in ((1, 0), (0, 1), (0, 0))]
FIXED = {"threads": 1, "micro_batch_size": 8, "approve": "manual", "account": "a", "epsilon": 1.0}
FIXED |= {"delta": 1e-5, "records": 1, "fractions": {"train": 1.0, "validation": 0, "test": 0}}
data_set_policies = st.builds(
    lambda randomness, **others: DataSetPolicy(**others, **randomness),
    randomness=st.sampled_from(RANDOMNESS),
    **{name: st.just(value) for name, value in FIXED.items()},
    unit=st.sampled_from(UNITS),
    least_noise_multiplier=st.sampled_from([0.001, 0.5, 0.8, 2.0]),
    largest_noise_multiplier=st.sampled_from([3.0, 100.0, 1e6]),
    largest_grad_norm=st.sampled_from([1e-6, 0.5, 1.0, 10.0]),
    largest_steps=st.integers(1, 10),
    actions=st.lists(st.sampled_from(sorted(PRIVATE_ACTIONS)), min_size=1, max_size=8).map(tuple),
)


def is_inside(allowed, terms):
    """The rules once more, as one list; of one declared record any batch of 1 or more is all."""
    size = terms["batch_size"]
    values = [terms["noise_multiplier"], terms["max_grad_norm"], *([] if size is None else [size])]
    of_records = (["train"], ["train", "test"], list(SPLITS))
    of_client = terms["splits"] == list(SPLITS) and size is None
    least, most = allowed.least_noise_multiplier, min(1e6, allowed.largest_noise_multiplier)
    return (
        all(type(v) in (int, float) and abs(v) <= sys.float_info.max for v in values)
        and type(terms["steps"]) is int
        and 1 <= terms["steps"] <= allowed.largest_steps
        and least <= terms["noise_multiplier"] <= most
        and (size is None or size > 0)
        and 1e-6 <= terms["max_grad_norm"] <= allowed.largest_grad_norm
        and terms["of_client"] == (allowed.unit == "client")
        and (of_client if terms["of_client"] else terms["splits"] in of_records)
    )


@settings(max_examples=200)
@given(data=st.data(), allowed=data_set_policies)
def test_no_plan_outside_the_policy_passes_and_none_inside_is_refused(data, allowed):
    inside = {"batch_size": st.one_of(st.floats(0.001, 2), st.none())}
    inside |= {"noise_multiplier": st.just(allowed.least_noise_multiplier * 1.5)}
    inside |= {"steps": st.integers(1, allowed.largest_steps)}
    good = st.fixed_dictionaries(inside | {"max_grad_norm": st.just(allowed.largest_grad_norm)})
    splits = [["train"], ["train", "test"], ["test"], [], ["x"], ["train", "train"], list(SPLITS)]
    terms, others = data.draw(good), data.draw(st.fixed_dictionaries(hostile | {"steps": counts}))
    for term in data.draw(st.sets(st.sampled_from(sorted(others)), max_size=2)):
        terms[term] = others[term]
    terms["splits"] = data.draw(st.sampled_from(splits))
    terms["of_client"] = data.draw(st.booleans())
    try:
        planned = plan(allowed, **terms)
    except ConfigError:
        planned = None
    assert (planned is not None) == is_inside(allowed, terms)
    if planned is not None:  # and the ledger can book it
        assert isinstance(planned.release(allowed.by_split), Release)


@given(
    allowed=data_set_policies,
    data_set=st.sampled_from(["a", "a", "a", "b", "A", ""]),
    action=st.sampled_from([*ACTIONS, "x", ""]),
    is_secure=st.booleans(),
)
def test_just_the_actions_inside_the_policy_pass(allowed, data_set, action, is_secure):
    may_draw = is_secure or (allowed.test_seed and not allowed.secure_noise)
    inside = data_set == "a" and action in allowed.actions and may_draw
    try:
        found = check_action(Policy({"a": allowed}), data_set, action, is_secure=is_secure)
    except ConfigError:
        found = None
    assert found is (allowed if inside else None)


# --- the file


def test_every_key_of_the_file_arrives():
    shared = parse(account="hospital").data_sets["ward"]
    others = {"account": "hospital", "secure_sum": None, "largest_noise_multiplier": 100.0}
    assert asdict(shared) == {**WARD, **others, "actions": tuple(ALLOWED)}
    assert shared.by_split == {"train": 600, "validation": 200, "test": 200}
    assert POLICY.data_sets["ward"].account == "ward"


def test_the_template_is_a_policy_and_explains_every_key(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(template())
    (section,) = policy.load_policy(path).data_sets.values()
    assert section.secure_noise
    assert not section.test_seed
    for key in asdict(section):
        assert f"{key}:" in template()
    assert all(len(line) <= 100 for line in template().splitlines())


def test_terms_of_secure_sums_are_read_and_checked():
    terms = {"roster": "ab" * 32, "least_sites": 7, "colluding": 1}
    assert parse(secure_sum=terms).data_sets["ward"].secure_sum == SumTerms("ab" * 32, 7, 1)
    assert SumTerms("ab" * 32, 7, 1).honest == 6
    for least, colluding in ((1, 0), (3, -1)):
        refuses("", parse, secure_sum=terms | {"least_sites": least, "colluding": colluding})
    refuses("roster", parse, secure_sum=terms | {"roster": "ab"})
    refuses("least_sites=7 with colluding=6", parse, secure_sum=terms | {"colluding": 6})
    refuses("secure_sum.least_sites", parse, secure_sum=terms | {"least_sites": "7"})
    refuses("secure_sum.least", parse, secure_sum=terms | {"least": 7})
    refuses("colluding is missing", parse, secure_sum={"roster": "ab" * 32, "least_sites": 7})


def test_noise_is_shared_in_secure_sums_of_one_gradient_alone():
    terms = SumTerms("ab" * 32, 7, 1)
    allowed = POLICY.data_sets["ward"]
    shared = replace(PLANNED, action="train.weight_gradient", shared=True)
    refuses("rule secure_sum: shared noise", check_planned, allowed, shared)
    check_planned(replace(allowed, secure_sum=terms), shared)
    for action in ("train.search", "train.gradients", "train.weights", "evaluate.model"):
        with pytest.raises(ConfigError, match="rule secure_sum: shared noise"):
            check_planned(replace(allowed, secure_sum=terms), replace(shared, action=action))


def test_noise_that_costs_nothing_is_refused():
    """Releases of sigma 5e5 once wrote rows for a day, and cost no budget."""
    cheap, noisy = replace(PLANNED, noise_multiplier=5e5), replace(PLANNED, noise_multiplier=101.0)
    for planned in (cheap, noisy):  # a file need not name the largest
        with pytest.raises(ConfigError, match="rule largest_noise_multiplier: .* not 0.8 to 100.0"):
            check_planned(WARD_SET, planned)
    check_planned(WARD_SET, replace(PLANNED, noise_multiplier=100.0))
    allowed = parse(largest_noise_multiplier=200).data_sets["ward"]
    check_planned(allowed, noisy)
    refuses("rule largest_noise_multiplier: .* not 0.8 to 200.0", check_planned, allowed, cheap)
    words = "largest_noise_multiplier=100.0 .*the least, 150, or mo"
    refuses(words, parse, least_noise_multiplier=150)
    assert parse(least_noise_multiplier=100)  # as much as the largest
    assert parse_policy(template()).data_sets["my-data"].largest_noise_multiplier == 100


def test_a_total_is_shared_out_by_public_fractions():
    fractions = {"train": 0.7, "validation": 0.2, "test": 0.1}
    records = parse(records=101, fractions=fractions).data_sets["ward"].by_split
    assert records == {"train": 70, "validation": 20, "test": 10}
    assert parse(records=1000, fractions=fractions).data_sets["ward"].by_split["train"] == 700


def test_numbers_may_be_written_without_a_point():
    text = yaml.safe_dump({"data_sets": {"ward": WARD}}).replace("1.0e-05", "1e-5")
    assert "delta: 1e-5" in text
    assert parse_policy(text) == POLICY


SHARES = "shares of train, validation and test that sum to 1"


MISTAKES = [
    ({"epsilon": "3"}, "epsilon=3 has the wrong type: expected a number, not text; if"),
    ({"largest_noise_multiplier": 0.7}, "largest_noise_multiplier=0.7 .*the least, 0.8, or mo"),
    ({"largest_steps": 1.5}, "largest_steps=1.5 .* a whole number"),
    ({"actions": ["train.serach"]}, "actions=train.serach is unknown.*nearest: train.search"),
    ({"actions": ["evaluate.personalised"]}, "actions=evaluate.personalised is unknown"),
    ({"records": {"train": 1}}, "records={train: 1} .* a whole number"),
    ({"fractions": {"train": 1}}, f"fractions={{train: 1.0}} .* {SHARES}"),
    ({"fractions": {"trian": 1}}, f"fractions={{trian: 1.0}} .* {SHARES}"),
    ({"fractions": 0.5}, "fractions=0.5 .* a mapping"),
    ({"fractions": {"train": 1, "validation": 0.5, "test": -0.5}}, "fractions.test=-0.5"),
    ({"fractions": {"train": 1.5, "validation": -0.5, "test": 0}}, "fractions.train=1.5"),
    ({"records": 9, "fractions": dict.fromkeys(SPLITS, 0.5)}, SHARES),
    ({"records": 9, "fractions": dict.fromkeys(SPLITS, "x")}, "fractions.test=x"),
    ({"records": 1, "fractions": {"train": 0, "validation": 1, "test": 0}}, "records=1 .*train"),
    ({"test_seed": True}, "secure_noise and test_seed exclude one another"),
    ({"account": ""}, "account= .* a name"),
    ({"ledger": "ward"}, "setting=data_sets.ward.ledger is unknown: choose one of .*ward.account"),
    ({"epsilom": 3}, "setting=data_sets.ward.epsilom is unknown.*nearest: .*epsilon"),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES)
def test_each_mistake_is_one_sentence(change, words):
    mistake = refuses(f"^site.yaml: .*{words}", parse, **change)
    assert mistake.endswith(".")
    assert "\n" not in mistake


def test_a_value_out_of_range_is_named_with_its_file_and_section():
    for name, of_field in constraints(DataSetPolicy).items():
        value = WARD.get(name, getattr(WARD_SET, name))
        for wrong in [wrong for part in of_field for wrong in wrong_values(value, part)]:
            refuses(f"^site.yaml: .*data_sets.ward.{name}", parse, **{name: wrong})


@pytest.mark.parametrize("key", sorted(WARD))
def test_a_missing_key_is_named(key):
    section = {name: value for name, value in WARD.items() if name != key}
    with pytest.raises(ConfigError, match=f"data_sets.ward.{key} is missing"):
        parse_policy(yaml.safe_dump({"data_sets": {"ward": section}}))


NO_POLICIES = [
    ("", "policy: it=null must be a group of settings"),
    ("data_sets:", "policy: data_sets=null has the wrong type: expected a mapping"),
    ("data_sets: {}", "policy: data_sets={}"),
    ("data_sets: {a: 5}", "data_sets.a=5 must be a group of settings"),
    ("data_sets: {5: {}}", "data_sets.5.epsilon is missing"),
    ("data_set: {}", "policy: setting=data_set is unknown.*nearest: data_sets"),
    ("data_sets: [", "policy is not valid YAML"),
    ("data_sets: {a: {5: 1}}", "setting=data_sets.a.5 is unknown"),
]


@pytest.mark.parametrize(("text", "words"), NO_POLICIES)
def test_a_file_of_another_form_is_one_sentence(text, words):
    assert "\n" not in refuses(words, parse_policy, text)


def test_an_unreadable_file_is_one_sentence(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("missing", "bytes", "."):
        refuses("cannot be read", policy.load_policy, tmp_path / name)


def test_overlapping_data_sets_share_one_budget():
    def both(**changes):
        sections = {"a": {**WARD, "account": "b"}, "b": {**WARD, **changes}, "c": WARD}
        return parse_policy(yaml.safe_dump({"data_sets": sections}))

    assert [both().data_sets[name].account for name in "abc"] == ["b", "b", "c"]
    for change in ({"epsilon": 4.0}, {"delta": 1e-6}):
        refuses("a and b share the account b and must have the same", both, **change)

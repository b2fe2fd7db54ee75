import doctest
import math
from dataclasses import asdict, replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.errors import ConfigError
from fednas_flwr.names import SPLITS
from fednas_flwr.privacy import policy_file
from fednas_flwr.privacy.policy import (
    NEVER_PRIVATE,
    PUBLIC_VERBS,
    Asked,
    Commitment,
    DataSetPolicy,
    Policy,
    check_commitment,
    check_request,
)
from fednas_flwr.privacy.policy_file import load_policy, parse_policy, template
from fednas_flwr.privacy.renyi import Release
from fednas_flwr.privacy.renyi_filter import RenyiFilter

VERBS = (
    *("query.describe", "query.commit", "query.latency", "train.weight_gradient"),
    *("train.alpha_gradient", "train.weights", "train.search", "train.probe", "evaluate.model"),
    "evaluate.personalised",
)
WARD = {
    "epsilon": 3.0,
    "delta": 1e-5,
    "least_noise_multiplier": 0.8,
    "largest_grad_norm": 1.0,
    "largest_steps": 5000,
    "verbs": ["query.describe", "train.search"],
    "records": 1000,
    "fractions": {"train": 0.6, "validation": 0.2, "test": 0.2},
    "secure_noise": True,
    "test_seed": False,
}


def parse(**changes):
    sections = {"ward": {**WARD, **changes}}
    return parse_policy(yaml.safe_dump({"data_sets": sections}), verbs=VERBS, origin="site.yaml")


POLICY = parse()
TERMS = Commitment(noise_multiplier=1.0, sample_rate=0.1, steps=1000, max_grad_norm=0.5)
STEP = replace(TERMS, steps=1)
ASKED = Asked(data_set="ward", verb="train.search", release=STEP)


def test_what_the_policy_allows_passes():
    assert check_request(POLICY, ASKED, committed=TERMS) is POLICY.data_sets["ward"]
    assert check_request(POLICY, replace(ASKED, release=TERMS), committed=TERMS)
    describe = Asked(data_set="ward", verb="query.describe", release=None)
    assert check_request(POLICY, describe, committed=None) is POLICY.data_sets["ward"]
    assert check_commitment(POLICY, "ward", TERMS) is POLICY.data_sets["ward"]
    edge = Commitment(noise_multiplier=0.8, sample_rate=1, steps=5000, max_grad_norm=1)
    assert check_request(POLICY, replace(ASKED, release=edge), committed=edge)


LIMITS = {
    "noise_multiplier": ("least_noise_multiplier", "0.8 to 1000000.0"),
    "max_grad_norm": ("largest_grad_norm", "1e-06 to 1.0"),
    "sample_rate": ("sample_rate", "1e-09 to 1"),
    "steps": ("largest_steps", "1 to 5000"),
}
HOSTILE = [
    *((term, value) for term in LIMITS for value in (math.nan, math.inf, -math.inf, -1, 0)),
    *((term, value) for term in LIMITS for value in (None, "1", True, [1], 10**400, 1 + 1j)),
    *(("noise_multiplier", value) for value in (0.0, -0.0, 0.7999999, 1e-300, 1e7)),
    *(("max_grad_norm", value) for value in (1.0000001, 1e300, 1e-7)),
    *(("sample_rate", value) for value in (1.0000001, 1e-300)),
    *(("steps", value) for value in (5001, 1.0, 2**63)),
]


@pytest.mark.parametrize(("term", "value"), HOSTILE)
def test_hostile_terms_are_refused_naming_rule_value_and_limit(term, value):
    rule, limit = LIMITS[term]
    terms = replace(TERMS, **{term: value})
    checks = (
        lambda: check_commitment(POLICY, "ward", terms),
        lambda: check_request(POLICY, replace(ASKED, release=terms), committed=terms),
        lambda: check_request(POLICY, replace(ASKED, release=terms), committed=TERMS),
        lambda: check_request(POLICY, ASKED, committed=terms),
    )
    for check in checks:
        with pytest.raises(ConfigError) as refusal:
            check()
        assert f"rule {rule}: {term}=" in str(refusal.value)
        assert limit in str(refusal.value)
        assert len(str(refusal.value)) < 250


def test_noise_that_its_grid_cannot_hold_is_refused_naming_value_and_limit():
    wide = replace(ASKED, release=replace(STEP, noise_multiplier=5000.0), num_values=10**6)
    many = replace(TERMS, noise_multiplier=5000.0)
    with pytest.raises(ConfigError, match=r"rule noise grid: noise_multiplier=5000.0, not .* 4.19"):
        check_request(POLICY, wide, committed=many)
    assert check_request(POLICY, replace(wide, num_values=10**5), committed=many)
    crowd = parse(records=10**8)
    for check in (
        lambda: check_commitment(crowd, "ward", TERMS),
        lambda: check_request(crowd, ASKED, committed=TERMS),
    ):
        with pytest.raises(ConfigError, match="rule noise grid: noise_multiplier=1.0, not 2.98 to"):
            check()
    assert check_commitment(crowd, "ward", replace(TERMS, noise_multiplier=3.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": 1.1}, "noise_multiplier=1.1, not the committed 1.0"),
        ({"noise_multiplier": 0.9}, "noise_multiplier=0.9, not the committed 1.0"),
        ({"sample_rate": 0.2}, "sample_rate=0.2, not the committed 0.1"),
        ({"sample_rate": 0.05}, "sample_rate=0.05, not the committed 0.1"),
        ({"max_grad_norm": 0.4}, "max_grad_norm=0.4, not the committed 0.5"),
        ({"steps": 1001}, "steps=1001, not at most the committed 1000"),
    ],
)
def test_other_values_than_the_committed_are_refused(change, words):
    with pytest.raises(ConfigError, match=f"rule committed values: {words}"):
        check_request(POLICY, replace(ASKED, release=replace(STEP, **change)), committed=TERMS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_set": "ward-2"}, "rule data_sets: data set=ward-2"),
        ({"data_set": None}, "rule data_sets: data set=None"),
        ({"data_set": ["ward"]}, "rule data_sets"),
        ({"verb": "train.alpha_gradient"}, "rule verbs: verb=train.alpha_gradient"),
        ({"verb": "evaluate.personalised"}, "rule verbs"),
        ({"verb": "eval"}, "rule verbs"),
        ({"verb": 10 * "train.search "}, "rule verbs"),
        ({"verb": {}}, "rule verbs"),
        ({"order": 2}, "rule first order only: order=2"),
        ({"order": True}, "rule first order only"),
        ({"order": 1.0}, "rule first order only"),
        ({"batch_norm": True}, "rule no batch_norm: batch_norm=True"),
        ({"batch_norm": 0}, "rule no batch_norm"),
        ({"oversampling": True}, "rule no oversampling: oversampling=True"),
        ({"raw_metrics": True}, "rule no raw_metrics: raw_metrics=True"),
        ({"raw_metrics": None}, "rule no raw_metrics"),
        ({"secure_noise": False}, "rule secure_noise: secure_noise=False"),
        ({"secure_noise": 1}, "rule secure_noise"),
        ({"test_seed": True}, "rule test_seed: test_seed=True"),
        ({"test_seed": 0}, "rule test_seed"),
        ({"release": None}, "rule noised releases only: release=None"),
        ({"verb": "query.describe"}, "rule noised releases only"),
    ],
)
def test_every_other_rule_is_named(change, words):
    with pytest.raises(ConfigError, match=words):
        check_request(POLICY, replace(ASKED, **change), committed=TERMS)


def test_the_first_request_needs_a_commitment():
    with pytest.raises(ConfigError, match="rule committed values: commitment=None"):
        check_request(POLICY, ASKED, committed=None)


def test_a_refusal_does_not_tell_the_sites_other_data_sets():
    with pytest.raises(ConfigError) as refusal:
        check_request(POLICY, replace(ASKED, data_set="war"), committed=TERMS)
    assert "ward" not in str(refusal.value)


def test_test_seed_and_insecure_noise_only_where_the_site_says_so():
    relaxed = parse(secure_noise=False, test_seed=True)
    for change in ({"test_seed": True}, {"secure_noise": False}):
        assert check_request(relaxed, replace(ASKED, **change), committed=TERMS)
    for change in ({"test_seed": 1}, {"secure_noise": None}):
        with pytest.raises(ConfigError):
            check_request(relaxed, replace(ASKED, **change), committed=TERMS)


# --- no request outside the policy passes

numbers = st.one_of(
    st.floats(allow_nan=True),
    st.sampled_from([0, 1, 0.5, 0.8, 1.0, 1e-6, 1e-9, 1e6, 10**400, True, None, "1"]),
    st.floats(1e-9, 2),
)
counts = st.one_of(st.integers(-2, 12), st.sampled_from([1.0, True, None, 10**30]))
terms = st.builds(
    Commitment, noise_multiplier=numbers, sample_rate=numbers, steps=counts, max_grad_norm=numbers
)
flags = st.sampled_from([False, False, False, True, 0, 1, None, "no"])
data_set_policies = st.builds(
    DataSetPolicy,
    data_set=st.just("a"),
    account=st.just("a"),
    epsilon=st.just(1.0),
    delta=st.just(1e-5),
    least_noise_multiplier=st.sampled_from([0.001, 0.5, 0.8, 2.0]),
    largest_grad_norm=st.sampled_from([1e-6, 0.5, 1.0, 10.0]),
    largest_steps=st.integers(1, 10),
    verbs=st.frozensets(st.sampled_from(sorted(set(VERBS) - set(NEVER_PRIVATE)))),
    records=st.just({"train": 1, "validation": 0, "test": 0}),
    secure_noise=st.booleans(),
    test_seed=st.booleans(),
)


def is_inside(allowed, asked, committed):
    """The rules once more, as one list."""

    def fine(terms):
        values = (terms.noise_multiplier, terms.sample_rate, terms.max_grad_norm)
        return (
            all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            and type(terms.steps) is int
            and 1 <= terms.steps <= allowed.largest_steps
            and allowed.least_noise_multiplier <= terms.noise_multiplier <= 1e6
            and 1e-9 <= terms.sample_rate <= 1
            and 1e-6 <= terms.max_grad_norm <= allowed.largest_grad_norm
        )

    release = asked.release
    return (
        asked.data_set == "a"
        and asked.verb in allowed.verbs
        and repr(asked.order) == "1"
        and [asked.batch_norm, asked.oversampling, asked.raw_metrics].count(False) == 3
        and all(repr(f) == "False" for f in (asked.batch_norm, asked.oversampling))
        and repr(asked.raw_metrics) == "False"
        and repr(asked.secure_noise) in ("True",) + ("False",) * (not allowed.secure_noise)
        and repr(asked.test_seed) in ("False",) + ("True",) * allowed.test_seed
        and (
            release is None
            if asked.verb in PUBLIC_VERBS
            else release is not None
            and committed is not None
            and fine(release)
            and fine(committed)
            and replace(release, steps=1) == replace(committed, steps=1)
            and release.steps <= committed.steps
        )
    )


@settings(max_examples=200)
@given(data=st.data(), allowed=data_set_policies)
def test_no_request_outside_the_policy_passes_and_none_inside_is_refused(data, allowed):
    good = st.builds(
        Commitment,
        noise_multiplier=st.just(allowed.least_noise_multiplier * 1.5),
        sample_rate=st.floats(0.001, 1),
        steps=st.integers(1, allowed.largest_steps),
        max_grad_norm=st.just(allowed.largest_grad_norm),
    )
    committed = data.draw(st.one_of(good, good, terms, st.none()))
    release = data.draw(
        st.one_of(st.just(committed and replace(committed, steps=1)), good, terms, st.none())
    )
    hostile = {
        "data_set": st.sampled_from(["b", "A", "", None]),
        "verb": st.sampled_from([*VERBS, "x", None]),
        "order": st.sampled_from([2, 0, True, 1.0]),
        **dict.fromkeys(["batch_norm", "oversampling", "raw_metrics"], flags),
        **dict.fromkeys(["secure_noise", "test_seed"], flags),
    }
    changed = data.draw(st.sets(st.sampled_from(sorted(hostile)), max_size=2))
    asked = Asked(
        data_set="a",
        verb=data.draw(st.sampled_from(sorted(allowed.verbs) or ["x"])),
        release=release,
    )
    asked = replace(asked, **{field: data.draw(hostile[field]) for field in sorted(changed)})
    try:
        check_request(Policy({"a": allowed}), asked, committed=committed)
        passed = True
    except ConfigError:
        passed = False
    assert passed == is_inside(allowed, asked, committed)
    if passed and release is not None:  # and the ledger can book it
        Release(release.noise_multiplier, release.sample_rate, release.steps)


# --- the file


def test_every_key_of_the_file_arrives():
    shared = parse(account="hospital").data_sets["ward"]
    assert asdict(shared) == {
        **WARD,
        "records": {"train": 600, "validation": 200, "test": 200},
        "data_set": "ward",
        "account": "hospital",
        "verbs": frozenset(WARD["verbs"]),
    }
    assert POLICY.data_sets["ward"].account == "ward"


def test_the_template_is_a_policy_and_explains_every_key(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(template())
    (section,) = load_policy(path, verbs=VERBS).data_sets.values()
    assert section.secure_noise
    assert not section.test_seed
    for key in asdict(section):
        assert key == "data_set" or f"{key}:" in template()
    assert all(len(line) <= 100 for line in template().splitlines())
    assert doctest.testmod(policy_file).failed == 0


def test_a_total_is_shared_out_by_public_fractions():
    fractions = {"train": 0.7, "validation": 0.2, "test": 0.1}
    records = parse(records=101, fractions=fractions).data_sets["ward"].records
    assert records == {"train": 70, "validation": 20, "test": 10}
    assert parse(records=1000, fractions=fractions).data_sets["ward"].records["train"] == 700


def test_numbers_may_be_written_without_a_point():
    text = yaml.safe_dump({"data_sets": {"ward": WARD}}).replace("1.0e-05", "1e-5")
    assert "delta: 1e-5" in text
    assert parse_policy(text, verbs=VERBS) == POLICY


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"epsilon": 0},
            "data_sets.ward.epsilon=0 is not usable: expected a finite number above 0",
        ),
        ({"epsilon": math.inf}, "ward.epsilon=inf"),
        ({"epsilon": math.nan}, "ward.epsilon=nan"),
        ({"epsilon": "3"}, "ward.epsilon=3 "),
        ({"epsilon": True}, "ward.epsilon=True"),
        ({"epsilon": 1e7}, "ward: epsilon must be in"),
        ({"delta": 1}, "ward.delta=1 .* below 1"),
        ({"delta": 0}, "ward.delta=0"),
        ({"least_noise_multiplier": 0}, "ward.least_noise_multiplier=0"),
        ({"least_noise_multiplier": 1e-5}, "ward: noise_multiplier must be above 0"),
        ({"largest_grad_norm": math.inf}, "ward.largest_grad_norm=inf"),
        ({"largest_steps": 1.5}, "ward.largest_steps=1.5 .* integer of at least 1"),
        ({"verbs": []}, "ward.verbs=\\[\\] .* list of verbs"),
        ({"verbs": "train.search"}, "ward.verbs=train.search"),
        ({"verbs": [["train.search"]]}, "ward.verbs="),
        ({"verbs": ["train.serach"]}, "ward.verbs=train.serach is unknown.*nearest: train.search"),
        ({"verbs": ["evaluate.personalised"]}, "evaluate.personalised cannot be private"),
        ({"records": 0}, "ward.records=0"),
        ({"records": {"train": 1}}, "ward.records={'train': 1} .* integer of at least 1"),
        ({"fractions": {"train": 1}}, "ward.fractions lacks validation, test"),
        ({"fractions": {"trian": 1}}, "ward.fractions: key=trian is unknown.*nearest: train"),
        ({"fractions": 0.5}, "ward.fractions=0.5 is not usable"),
        ({"fractions": {"train": 1.5, "validation": -0.5, "test": 0}}, "fractions.train=1.5"),
        ({"records": 9, "fractions": dict.fromkeys(SPLITS, 0.5)}, "three numbers that sum to 1"),
        ({"records": 9, "fractions": dict.fromkeys(SPLITS, "x")}, "ward.fractions.test=x"),
        ({"records": 1, "fractions": {"train": 0, "validation": 1, "test": 0}}, "of train=0"),
        ({"secure_noise": "true"}, "ward.secure_noise=true .* true or false"),
        ({"test_seed": 1}, "ward.test_seed=1 .* true or false"),
        ({"test_seed": True}, "secure_noise and test_seed exclude one another"),
        ({"account": ""}, "ward.account= .* a name"),
        ({"account": 5}, "ward.account=5"),
        ({"ledger": "ward"}, "ward.ledger is called account now: rename the key"),
        ({"epsilom": 3}, "ward: key=epsilom is unknown.*nearest: epsilon"),
        ({"5": 3}, "ward: key=5 is unknown"),
    ],
)
def test_each_mistake_is_one_sentence(change, words):
    with pytest.raises(ConfigError, match=f"^site.yaml: .*{words}") as mistake:
        parse(**change)
    assert str(mistake.value).endswith(".")
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize("key", sorted(WARD))
def test_a_missing_key_is_named(key):
    section = {name: value for name, value in WARD.items() if name != key}
    with pytest.raises(ConfigError, match=f"data_sets.ward lacks {key}"):
        parse_policy(yaml.safe_dump({"data_sets": {"ward": section}}), verbs=VERBS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "policy=None is not usable: expected a section with data_sets"),
        ("data_sets:", "policy: data_sets=None"),
        ("data_sets: {}", "policy: data_sets={}"),
        ("data_sets: {a: 5}", "data_sets.a=5"),
        ("data_sets: {5: {}}", "data_sets"),
        ("data_set: {}", "key=data_set is unknown.*nearest: data_sets"),
        ("data_sets: [", "policy is not valid YAML"),
        ("data_sets: {a: 1, a: 2}", "a is given twice"),
        ("data_sets: {a: {5: 1}}", "data_sets.a: key=5 is unknown"),
        ("data_sets: !!python/object/apply:os.getcwd []", "policy is not valid YAML"),
        ("{[a]: 1}", "policy is not valid YAML|unknown"),
        ("\x00", "policy is not valid YAML"),
    ],
)
def test_a_file_of_another_form_is_one_sentence(text, words):
    with pytest.raises(ConfigError, match=words) as mistake:
        parse_policy(text, verbs=VERBS)
    assert "\n" not in str(mistake.value)


def test_an_unreadable_file_is_one_sentence(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("missing", "bytes", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_policy(tmp_path / name, verbs=VERBS)


def test_overlapping_data_sets_share_one_budget_and_pay_on_every_split():
    def both(**changes):
        sections = {"a": {**WARD, "account": "b"}, "b": {**WARD, **changes}, "c": WARD}
        return parse_policy(yaml.safe_dump({"data_sets": sections}), verbs=VERBS)

    policy = both()
    assert [policy.data_sets[name].account for name in "abc"] == ["b", "b", "c"]
    for name in "ab":
        assert policy.charged_splits(name, ("train",)) == SPLITS
    assert policy.charged_splits("c", ("train",)) == ("train",)
    for change in ({"epsilon": 4.0}, {"delta": 1e-6}):
        with pytest.raises(ConfigError, match="a and b share the account b and must have the same"):
            both(**change)


def test_budgets_of_a_policy_are_budgets_of_the_filter():
    section = POLICY.data_sets["ward"]
    RenyiFilter(epsilon=section.epsilon, delta=section.delta)

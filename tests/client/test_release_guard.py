"""The guard of private mode: what is booked, drawn and released, and in which order."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fednas_flwr
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.release_guard import Contributions, ReleaseGuard, read_commitment
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum
from fednas_flwr.privacy.mechanism.noise import SecureGenerator
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import Policy, parse_policy, template
from fednas_flwr.protocol.messages import Header
from fednas_flwr.protocol.secure_sum.masks import Grid
from fednas_flwr.protocol.states import network_states
from fednas_flwr.settings.names import SPLITS

from ..refusals import refuses
from .conftest import ASKED, LIMITS, RECORDS, TERMS, schedule

STD = TERMS["noise_multiplier"] * TERMS["max_grad_norm"]


HEADER = Header("run", "search", 1, 1, 0, "nonce")


def admit(site, action="train.weight_gradient", kind="weights", splits=("train",), **asked):
    return site.guard.admit(HEADER, action, kind, splits=splits, **asked)


def release(guard, planned, num_records, clipped_sum):
    return guard.release(planned, HEADER, Contributions(num_records, clipped_sum))


def zeros(rows):
    sums = {"a": torch.zeros(200, 100), "b": torch.zeros(5)}
    return ClippedSum(sums, norm=TERMS["max_grad_norm"])


def test_a_release_is_the_sum_over_a_poisson_batch_plus_noise_of_std_sigma_times_norm(make_site):
    site, drawn = make_site(), []

    def total(rows):
        drawn.append(rows)
        sums = {"a": torch.full((200, 100), 3.0), "b": torch.arange(5.0)}
        return ClippedSum(sums, norm=TERMS["max_grad_norm"])

    records = 20_000
    released = release(site.guard, admit(site), records, total)
    assert {name: tuple(t.shape) for name, t in released.items()} == {"a": (200, 100), "b": (5,)}
    noise = released["a"].double() - 3.0  # 20,000 values: six standard errors
    assert abs(noise.mean()) < 6 * STD / math.sqrt(noise.numel())
    assert noise.std() == pytest.approx(STD, rel=6 / math.sqrt(2 * noise.numel()))
    assert (released["b"] - torch.arange(5.0)).abs().max() < 7 * STD
    # p comes from the declared number of records, not from those that are there
    p = TERMS["batch_size"] / RECORDS["train"]
    (rows,) = drawn
    assert len(rows.unique()) == len(rows)
    assert abs(len(rows) - p * records) < 6 * math.sqrt(records * p * (1 - p))


def test_an_empty_batch_releases_pure_noise_and_is_booked_like_any_other(make_site):
    site = make_site()
    assert release(site.guard, admit(site), 0, zeros)["a"].std() == pytest.approx(STD, rel=0.03)
    assert len(site.rows()) == 1


def test_the_batch_size_that_the_server_divides_by_is_the_expected_one_exactly(make_site):
    policy = {"records": 100, "fractions": {"train": 0.49, "validation": 0.51, "test": 0.0}}
    for size, expected in ((1, 1.0), (8, 8.0), (1000, 49.0), (None, 49.0)):
        plan = [p for p in schedule(batch_size=size) if p.action == "train.gradients"]
        site = make_site(policy=policy, committed=plan)
        assert site.guard.expected_batch(admit(site, "train.gradients")) == expected


def test_first_reserved_then_drawn_then_read_then_noised(make_site, monkeypatch):
    site, order = make_site(), []

    def noted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (order.append(name), real(*a, **k))[1])

    noted(site.guard._ledger, "reserve")
    noted(SecureGenerator, "poisson_mask")
    noted(SecureGenerator, "discrete_gaussian")
    release(site.guard, admit(site), 30, lambda rows: (order.append("read"), zeros(rows))[1])
    assert order == ["reserve", "poisson_mask", "read", "discrete_gaussian"]


def test_masks_and_noise_are_new_for_every_step_retry_and_reopened_site(make_site):
    """The same request in the same run, again, and by the same site after a restart."""
    site = make_site()
    again = make_site(folder=site.folder)
    drawn = []
    for guard in (site.guard, site.guard, again.guard):
        batches = []
        noise = release(guard, admit(site), 64, lambda r, b=batches: (b.append(r), zeros(r))[1])
        drawn.append((tuple(batches[0].tolist()), noise["a"]))
    assert len({rows for rows, _ in drawn}) == 3
    for (_, a), (_, b) in ((drawn[0], drawn[1]), (drawn[0], drawn[2])):
        assert (a == b).float().mean() < 0.01
    assert len(again.rows()) == len(site.rows()) == 3


def test_a_test_seed_repeats_the_draws_is_marked_and_needs_a_policy_that_allows_it(make_site):
    sites = [make_site(test_seed=b"1") for _ in range(2)]
    assert torch.equal(*[release(site.guard, admit(site), 64, zeros)["a"] for site in sites])
    assert [site.guard.is_secure for site in sites] == [False, False]
    strict = make_site()
    strict.guard._generator = SecureGenerator(b"1")
    refuses("rule secure_noise", admit, strict)


@pytest.mark.parametrize("action", ["train.gradients", "train.weights"])
def test_noise_that_could_not_be_added_is_refused_unbooked(make_site, no_record, action):
    """The networks have about a thousand weights."""
    policy = {"largest_noise_multiplier": 1e6}
    site = make_site(policy=policy, committed=schedule(noise_multiplier=9e5))
    refuses("rule noise grid: noise_multiplier=900000.0, not", site.ask, action)
    assert site.rows() == []


def test_two_policies_that_name_one_account_pay_on_every_split_but_for_the_first(make_site):
    """The second policy knows nothing of the first: what they share is the ledger."""
    first = make_site(policy={"account": "shared"})
    release(first.guard, admit(first), 30, zeros)
    second = Policy({"lab": first.guard.allowed})
    guard = ReleaseGuard(second, first.guard._ledger, SecureGenerator(), data_set="lab")
    guard.hold("the same")
    guard.commit("second", schedule())
    planned = admit(first)
    guard.release(planned, replace(HEADER, run="second"), Contributions(30, zeros))
    release(first.guard, planned, 30, zeros)
    booked = [(row.data_set, row.splits) for row in first.rows()]
    assert booked == [("ward", ("train",)), ("lab", SPLITS), ("ward", ("train",))]
    # and what is told beforehand is what will be booked
    told = guard.epsilons("second")["rdp"]
    assert set(told) == set(SPLITS)
    assert told["test"] > first.guard.epsilons("run")["rdp"].get("test", 0)
    assert first.guard._ledger.verify() == 3


def test_a_run_whose_account_was_used_with_other_records_meanwhile_is_refused(make_site):
    """Both committed when nothing was booked; who books first pays by split."""
    site = make_site()
    other = make_site(folder=site.folder, committed=[], records=np.arange(79))
    other.guard.commit("other", schedule())
    release(site.guard, admit(site), 30, zeros)
    with pytest.raises(ConfigError, match="used with other records or splits: start a new run"):
        other.guard.release(admit(site), replace(HEADER, run="other"), Contributions(30, zeros))
    other.guard.commit("third", schedule())
    other.guard.release(admit(site), replace(HEADER, run="third"), Contributions(30, zeros))
    assert [row.splits for row in site.rows()] == [("train",), SPLITS]


def test_a_run_is_refused_once_records_have_changed_sides(make_site, no_record):
    site = make_site()
    release(site.guard, admit(site), 30, zeros)
    fractions = {"train": 0.4, "validation": 0.4, "test": 0.2}
    for change in ({"records": np.arange(79)}, {"policy": {"fractions": fractions}}):
        changed = make_site(folder=site.folder, committed=[], **change)
        refuses("their splits have changed: start a new run", changed.ask, "train.gradients")
    assert len(site.rows()) == 1


def test_a_person_approves_a_schedule_before_anything_is_released(make_site):
    site = make_site(policy={"approve": "manual"}, committed=[])
    waits = [site.commit().properties for _ in range(2)]  # as a server that asks again
    assert waits[0] == waits[1]
    assert set(waits[0]) == {"awaits"}
    awaited = waits[0]["awaits"]
    for action in ASKED:
        refuses(f"rule approve: schedule={awaited}, not approved by", site.ask, action)
    assert site.rows() == []
    again = make_site(folder=site.folder, policy={"approve": "manual"}, committed=[])
    again.guard._ledger.approve("run")
    assert set(site.commit().properties) == {"epsilon", "covered_steps"}
    for asked in (site, again):
        asked.ask("train.weight_gradient")
    refuses("other terms", site.commit, steps=51)
    refuses("committed values: release=", site.ask, "train.weight_gradient", run="another")


def test_a_model_larger_than_the_one_that_was_approved_is_refused(make_site, networks):
    site = make_site(policy={"approve": "manual"}, committed=[])
    site.commit()
    sizes = {
        kind: sum(tensor.numel() for tensor in states.values())
        for kind, states in network_states(networks.supernet).items()
        if kind in ("weights", "alphas")
    }
    assert read_commitment(site.guard._ledger.committed("run")).sizes == sizes
    site.guard._ledger.approve("run")
    for kind, splits in (("weights", ("train",)), ("alphas", ("validation",))):
        asked = {"action": "train.gradients", "kind": kind, "splits": splits}
        admit(site, **asked, num_values=sizes[kind])
        with pytest.raises(ConfigError, match=f"number of {kind}={sizes[kind] + 1}, not at most "):
            admit(site, **asked, num_values=sizes[kind] + 1)


def test_a_gate_that_holds_no_records_commits_to_nothing(make_site):
    allowed = make_site().guard.allowed
    ledger = make_site(committed=[]).guard._ledger
    guard = ReleaseGuard(Policy({"a": allowed}), ledger, SecureGenerator(), data_set="a")
    refuses("call hold first", guard.commit, "run", schedule(), error=ValueError)


def test_a_run_keeps_to_its_first_schedule_and_to_its_steps(make_site):
    site = make_site(committed=schedule(steps=2))
    for other in (schedule(steps=3), schedule(steps=2, noise_multiplier=0.5), [], schedule()[:1]):
        refuses("has committed to other terms", site.ask, "query.commit", releases=other)
    site.commit(steps=2)  # the same again, as a retried message brings it
    for guard in (site.guard, make_site(folder=site.folder, committed=[]).guard):
        release(guard, admit(site), 30, zeros)
    refuses("committed to 2 steps", release, site.guard, admit(site), 30, zeros)
    refuses("rule committed values: steps=3", site.ask, "train.gradients", local_steps=3)
    refuses("rule committed values: steps=0, not 1 to at most the", admit, site, steps=0)
    assert len(site.rows()) == 2


def test_a_schedule_with_a_kind_twice_is_refused_and_nothing_is_kept(make_site):
    allowed = [action for action in LIMITS["actions"] if action != "evaluate.model"]
    words = "rule actions: action=evaluate.model"  # before an earlier action has cost anything
    refuses(words, make_site, policy={"actions": allowed})
    site, first = make_site(committed=[]), schedule()[0]
    for words, noise in (
        ("holds a kind of release twice", 9),
        ("rule least_noise_multiplier", 0.01),
    ):
        asked = [*schedule(), replace(first, noise_multiplier=noise)]
        refuses(words, site.ask, "query.commit", releases=asked)
    refuses("rule committed values: release=.*, not one in the run", site.ask, first.action)


HUGE = [
    ([{"stage": "x" * 10**6}], "stage=x+ is unknown: choose one of evaluate, retrain, search"),
    ([{"splits": ["train"] * 10**5}], "expected 1 to 3 entries"),
    ([{}] * 33, "releases=.* expected 0 to 32 entries"),
]


@pytest.mark.parametrize(("releases", "words"), HUGE)
def test_a_server_cannot_fill_a_sites_disk(make_site, monkeypatch, releases, words):
    """Refused before the ledger is touched."""
    site = make_site()
    monkeypatch.setattr(Ledger, "_exclusive", None)
    asked = {"run": "new", "releases": [asdict(schedule()[0]) | change for change in releases]}
    assert len(refuses(words, site.ask, "query.commit", **asked)) < 500


TIGHTER = [
    ({"least_noise_multiplier": 4.5}, "least_noise_multiplier"),
    ({"actions": ["query.describe"]}, "actions"),
    ({"secure_noise": True, "test_seed": False}, "secure_noise"),
]


@pytest.mark.parametrize(("policy", "rule"), TIGHTER)
def test_a_policy_that_was_tightened_since_refuses(make_site, no_record, policy, rule):
    tight = make_site(folder=make_site().folder, policy=policy, committed=[])
    if rule == "secure_noise":
        tight.guard._generator = SecureGenerator(b"1")
    for action in ASKED:
        refuses(f"rule {rule}", tight.ask, action)
    refuses(f"rule {rule}", tight.commit)
    assert tight.rows() == []


def test_a_sum_that_says_no_norm_is_not_released(make_site):
    """Whatever is computed of a clipped sum is one no more."""
    site = make_site()
    for computed in (lambda sums: dict(sums), lambda sums: {n: 2 * t for n, t in sums.items()}):
        with pytest.raises(TypeError, match="says no norm"):
            release(site.guard, admit(site), 30, lambda rows, f=computed: f(zeros(rows)))


def test_noise_is_scaled_by_the_norm_of_the_sum_and_not_by_a_committed_one(make_site):
    site = make_site()
    wide = ClippedSum({"a": torch.zeros(20_000)}, norm=10 * TERMS["max_grad_norm"])
    noise = release(site.guard, admit(site), 30, lambda rows: wide)["a"]
    assert noise.std() == pytest.approx(10 * STD, rel=0.03)


def test_only_what_clips_makes_clipped_sums():
    """The three modules that scale contributions down; anything else has to call them."""
    assert {
        path.stem
        for path in Path(fednas_flwr.__file__).parent.rglob("*.py")
        if re.search(r"\bClippedSum\(", path.read_text().replace("class ClippedSum(", ""))
    } == {"micro_batches", "clipping", "noised_updates"}


# --- shared noise at a site: what it releases, and what it refuses


ACTION = "train.weight_gradient"
SIGMA, NORM, HONEST = 1.5, 0.5, 4
UNREAD = Contributions(10, lambda rows: pytest.fail("read"))
SUM_TERMS = f"secure_sum: {{roster: {'ab' * 32}, least_sites: {HONEST + 1}, colluding: 1}}"
PLANNED = PlannedRelease(
    "search", ACTION, "weights", ("train",), 60.0, 50, NORM, SIGMA, shared=True
)


@pytest.fixture
def make_gate(tmp_path):
    """``make_gate(planned, sums)``: a guard that has committed to one release."""
    ledgers = []

    def make(planned=PLANNED, *, sums=True):
        folder = tmp_path / f"{len(ledgers)}"
        text = template()
        if sums:
            (line,) = [line for line in text.splitlines() if "# secure_sum:" in line]
            text = text.replace(line.strip(), SUM_TERMS)
        text = text.replace("epsilon: 3.0", "epsilon: 1000.0")
        ledgers.append(Ledger(folder / "books" / "ledger.sqlite", folder / "key"))
        guard = ReleaseGuard(parse_policy(text), ledgers[-1], SecureGenerator(), data_set="my-data")
        guard.hold("the records")
        guard.commit("run", [planned])
        return guard

    yield make
    for ledger in ledgers:
        ledger.close()


def sharing(guard):
    """Return a guard with a release that it has admitted, and the grid of the sites' sum."""
    grid = Grid.of_range(PLANNED.sum_range(guard.allowed.by_split), sites=5)
    return guard, guard.admit(HEADER, ACTION, "weights", splits=("train",)), grid


def test_a_site_releases_its_share_in_whole_cells(make_gate):
    guard, planned, grid = sharing(make_gate())
    total = ClippedSum({"a": torch.full((200, 100), 3.0), "b": torch.zeros(3)}, norm=NORM)
    cells = guard.share(planned, HEADER, Contributions(3000, lambda rows: total), grid=grid)
    assert (cells.values.dtype, cells.values.shape) == (np.int64, (20_003,))
    noise = cells.values[:-3] * grid.cell - 3.0
    assert noise.std() == pytest.approx(SIGMA * NORM / math.sqrt(HONEST), rel=0.05)
    (row,) = guard._ledger.entries()
    assert row.entry.action == "train.weight_gradient:weights (noise of 4 sites)"
    assert row.entry.release.noise_multiplier == SIGMA


def test_a_sum_beyond_the_range_is_projected_before_the_noise(make_gate):
    guard, planned, grid = sharing(make_gate())
    most = planned.clipped_range(guard.allowed.by_split)
    huge = ClippedSum({"a": torch.tensor([1e6, -1e6, most, 0.0]).repeat(1000)}, norm=NORM)
    cells = guard.share(planned, HEADER, Contributions(3000, lambda rows: huge), grid=grid)
    middle = (cells.values * grid.cell).reshape(1000, 4).mean(0)
    expected = np.array([most, -most, most, 0.0])
    assert abs(middle - expected).max() < 6 * SIGMA * NORM / math.sqrt(HONEST * 1000)


def test_shared_noise_needs_terms_room_and_single_steps(make_gate):
    guard = make_gate()
    planned = guard.admit(HEADER, ACTION, "weights", splits=("train",))
    for grid in (None, Grid.of_range(planned.sum_range(guard.allowed.by_split) / 3, sites=5)):
        with pytest.raises(ConfigError, match="rule secure_sum: range of weights"):
            guard.share(planned, HEADER, UNREAD, grid=grid)
    refuses("call share", guard.release, planned, HEADER, UNREAD, error=ValueError)
    assert guard._ledger.entries() == []
    with pytest.raises(ConfigError, match="rule secure_sum: steps of shared noise=2"):
        guard.admit(HEADER, ACTION, "weights", splits=("train",), steps=2)
    refuses("rule secure_sum: shared noise", make_gate, sums=False)

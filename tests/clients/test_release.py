"""The gate of private mode: what is booked, drawn and released, and in which order."""

from __future__ import annotations

import math

import pytest
import torch

from fednas_flwr.errors import BudgetExceededError, ConfigError
from fednas_flwr.privacy.accounting import prv_epsilon, rdp_epsilon
from fednas_flwr.privacy.gdp import gdp_epsilon
from fednas_flwr.privacy.noise import SecureGenerator
from fednas_flwr.privacy.renyi import Release

from .conftest import RECORDS, TERMS, schedule

STD = TERMS["noise_multiplier"] * TERMS["max_grad_norm"]


def admit(site, verb="train.weight_gradient", kind="weights", splits=("train",)):
    return site.gate.admit(site.request(verb), kind, splits=splits)


def zeros(rows):
    return {"a": torch.zeros(200, 100), "b": torch.zeros(5)}


def test_a_release_is_the_sum_over_a_poisson_batch_plus_noise_of_std_sigma_times_norm(make_site):
    site, drawn = make_site(), []

    def total(rows):
        drawn.append(rows)
        return {"a": torch.full((200, 100), 3.0), "b": torch.arange(5.0)}

    records = 20_000
    released = site.gate.release(admit(site), records, total)
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
    released = site.gate.release(admit(site), 0, zeros)["a"]
    assert released.std() == pytest.approx(STD, rel=0.03)
    assert len(site.rows()) == 1


def test_the_batch_size_that_the_server_divides_by_is_the_expected_one_exactly(make_site):
    fractions = {"train": 0.49, "validation": 0.51, "test": 0.0}
    policy = {"records": 100, "fractions": fractions}
    for size, expected in ((1, 1.0), (8, 8.0), (1000, 49.0), (None, 49.0)):
        items = [item for item in schedule(batch_size=size) if item["verb"] == "train.gradients"]
        site = make_site(policy=policy, committed=items)
        terms = {"weights": TERMS | {"batch_size": size}}
        request = site.request("train.gradients", releases=terms)
        assert site.gate.admit(request, "weights", splits=("train",)).batch_size == expected


def test_first_reserved_then_drawn_then_read_then_noised(make_site, monkeypatch):
    site, order = make_site(), []

    def noted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (order.append(name), real(*a, **k))[1])

    noted(site.gate._ledger, "reserve")
    noted(SecureGenerator, "poisson_mask")
    noted(SecureGenerator, "discrete_gaussian")
    site.gate.release(admit(site), 30, lambda rows: (order.append("read"), zeros(rows))[1])
    assert order == ["reserve", "poisson_mask", "read", "discrete_gaussian"]


def test_masks_and_noise_are_new_for_every_step_retry_and_reopened_site(make_site):
    """The same request in the same run, again, and by the same site after a restart."""
    site = make_site()
    again = make_site(folder=site.folder)
    drawn = []
    for gate in (site.gate, site.gate, again.gate):
        batches = []
        noise = gate.release(admit(site), 64, lambda r, b=batches: (b.append(r), zeros(r))[1])
        drawn.append((tuple(batches[0].tolist()), noise["a"]))
    assert len({rows for rows, _ in drawn}) == 3
    for (_, a), (_, b) in ((drawn[0], drawn[1]), (drawn[0], drawn[2])):
        assert (a == b).float().mean() < 0.01
    assert len(again.rows()) == len(site.rows()) == 3


def test_a_test_seed_repeats_the_draws_is_marked_and_needs_a_policy_that_allows_it(make_site):
    sites = [make_site(test_seed=b"1") for _ in range(2)]
    noise = [site.gate.release(admit(site), 64, zeros)["a"] for site in sites]
    assert torch.equal(*noise)
    assert [site.gate.is_secure for site in sites] == [False, False]
    strict = make_site()
    strict.gate._generator = SecureGenerator(b"1")
    with pytest.raises(ConfigError, match="rule secure_noise"):
        admit(strict)


def test_rows_name_what_was_read_and_both_splits_pay_for_a_release_that_reads_both(make_site):
    site = make_site()
    asked = {
        "train.weight_gradient": [("train",)],
        "train.alpha_gradient": [("validation",)],
        "train.gradients": [("train",), ("validation",)],
        "evaluate.model": [("validation",)],
        "train.weights": [("train", "validation")],
    }
    before = 0.0
    for verb, splits in asked.items():
        booked = len(site.rows())
        site.ask(verb)
        assert [row.splits for row in site.rows()[booked:]] == splits
        assert site.gate.spent() >= before
        before = site.gate.spent()
    releases = {"train": [], "validation": []}
    for row in site.rows():
        for split in row.splits:
            releases[split].append(row.release)
    assert {split: len(rows) for split, rows in releases.items()} == {"train": 3, "validation": 4}


def test_epsilon_is_what_other_runs_booked_and_this_one_promised_by_split_and_accountant(make_site):
    """By hand, from METHODS.md section 3; a second run on the same ledger adds up."""
    items = [i for i in schedule(steps=7) if i["verb"] in ("train.gradients", "train.weights")]
    site = make_site(committed=items)
    site.ask("train.gradients")
    site.ask("train.weights", local_steps=2)
    epsilon = site.ask("query.commit", run="second", schedule=items).facts["epsilon"]
    sigma = TERMS["noise_multiplier"]
    both = Release(noise_multiplier=sigma, sample_rate=8 / 60, steps=7 + 2)
    by_hand = {
        "train": [Release(noise_multiplier=sigma, sample_rate=8 / 40, steps=7 + 1), both],
        "validation": [Release(noise_multiplier=sigma, sample_rate=8 / 20, steps=7 + 1), both],
    }
    for name, accountant in (("prv", prv_epsilon), ("rdp", rdp_epsilon), ("gdp", gdp_epsilon)):
        expected = {split: accountant(releases, 1e-5) for split, releases in by_hand.items()}
        assert epsilon[name] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("verb", ["train.gradients", "train.weights"])
def test_noise_that_could_not_be_added_is_refused_before_anything_is_booked(
    make_site, no_record, verb
):
    """The networks have about a thousand weights."""
    terms = TERMS | {"noise_multiplier": 9e5}
    site = make_site(committed=schedule(noise_multiplier=9e5))
    with pytest.raises(ConfigError, match="rule noise grid: noise_multiplier=900000.0, not"):
        site.ask(verb, releases={"weights": terms, "alphas": terms})
    assert site.rows() == []


def test_data_sets_that_share_a_budget_pay_on_every_split(make_site):
    for account, splits in (("own", ("train",)), ("other", ("train", "validation", "test"))):
        site = make_site(policy={"account": account})
        site.gate.release(admit(site), 30, zeros)
        (row,) = site.rows()
        assert (row.account, row.splits) == (account, splits)


def test_a_request_that_the_ledger_refuses_reads_no_record(make_site, no_record):
    site = make_site(policy={"epsilon": 0.5})
    for verb in ("train.gradients", "train.weights"):
        with pytest.raises(BudgetExceededError, match="budget is 0.5"):
            site.ask(verb)
    assert site.rows() == []


def test_a_budget_ends_the_releases_and_is_never_overspent(make_site):
    site, released = make_site(policy={"epsilon": 4.0}), []
    with pytest.raises(BudgetExceededError):
        released.extend(site.gate.release(admit(site), 30, zeros) for _ in range(50))
    assert len(site.rows()) == len(released) > 0
    assert 3.0 < site.gate.spent() <= 4.0
    releases = [row.release for row in site.rows()]
    assert prv_epsilon(releases, 1e-5) <= 4.0


def test_a_run_keeps_to_its_first_schedule_and_to_its_steps(make_site):
    site = make_site(committed=schedule(steps=2))
    with pytest.raises(ConfigError, match="has committed to other terms"):
        site.commit(steps=3)
    site.commit(steps=2)  # the same again, as a retried message brings it
    again = make_site(folder=site.folder, committed=[])
    for gate in (site.gate, again.gate):
        gate.release(admit(site), 30, zeros)
    with pytest.raises(ConfigError, match="committed to 2 steps"):
        site.gate.release(admit(site), 30, zeros)
    with pytest.raises(ConfigError, match="rule committed values: steps=3"):
        site.ask("train.gradients", local_steps=3)
    assert len(site.rows()) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": 0}, "rule least_noise_multiplier"),
        ({"noise_multiplier": 0.05}, "rule least_noise_multiplier"),
        ({"noise_multiplier": math.nan}, "rule least_noise_multiplier"),
        ({"max_grad_norm": math.inf}, "rule largest_grad_norm"),
        ({"max_grad_norm": True}, "rule largest_grad_norm"),
        ({"batch_size": 0}, "rule sample_rate"),
        ({"batch_size": math.nan}, "rule sample_rate"),
        ({"batch_size": math.inf}, "rule sample_rate"),
        ({"batch_size": "8"}, "rule sample_rate"),
        ({"steps": 1001}, "rule largest_steps"),
        ({"steps": 1e3}, "rule largest_steps"),
        ({"splits": []}, "rule records"),
        ({"splits": ["train", "train"]}, "expected different ones"),
        ({"splits": "train"}, "do not fit query.commit"),
        ({"splits": ["secret"]}, "do not fit query.commit"),
    ],
)
def test_a_schedule_outside_the_policy_is_refused_and_nothing_is_kept(make_site, change, words):
    site = make_site(committed=[])
    with pytest.raises(ConfigError, match=words):
        site.ask("query.commit", schedule=[*schedule()[1:], schedule()[0] | change])
    with pytest.raises(ConfigError, match="rule committed values: commitment=None"):
        site.ask("train.weight_gradient")

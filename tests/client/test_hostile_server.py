"""A server that asks a private site for what it must not have, in the order of a run.

What is here needs several messages. Single requests outside the rules, in all their shapes,
are in ``test_private_actions`` ("hostile requests"), malformed ones in ``test_fuzz_actions`` and
``tests/protocol/test_requests.py``, schedules outside the policy in ``test_release``.
"""

import itertools

import pytest

from fednas_flwr.base.errors import BudgetExceededError

from ..refusals import refuses
from .conftest import ASKED, CANDIDATES, schedule

STEPS = 2


@pytest.mark.run
def test_stages_in_another_order_cost_what_they_cost_in_theirs(make_site):
    """Nothing is paid for by being asked before what it should follow."""
    plan = schedule(steps=STEPS)
    ordered, reversed_ = make_site(committed=plan), make_site(committed=plan)
    for action in ASKED:
        ordered.ask(action)
    for action in reversed(ASKED):
        reversed_.ask(action)
    costs = [
        sorted((row.action, row.splits, repr(row.release)) for row in site.rows())
        for site in (ordered, reversed_)
    ]
    assert costs[0] == costs[1]
    assert ordered.guard.spent() == pytest.approx(reversed_.guard.spent())


def test_runs_side_by_side_share_one_budget(make_site):
    """As many names as a server likes give no more than one does."""
    site = make_site(policy={"epsilon": 3.0}, committed=[])
    answered = []
    for number in range(30):
        run = f"run-{number}"
        site.guard.commit(run, schedule(steps=STEPS))
        try:
            site.ask("train.weight_gradient", run=run)
        except BudgetExceededError:
            break
        answered.append(run)
    assert 0 < len(answered) < 29
    for run in (answered[0], "run-29"):  # the first has a step left that nothing pays for
        site.guard.commit(run, schedule(steps=STEPS))
        refuses("", site.ask, "train.weight_gradient", error=BudgetExceededError, run=run)
    assert len(site.rows()) == len(answered)
    assert site.guard.spent() <= 3.0


def test_a_budget_that_has_ended_is_told_before_a_record_is_read(make_site, no_record):
    site = make_site(policy={"epsilon": 1e-3}, committed=schedule(noise_multiplier=0.2))
    for action in sorted({*ASKED} - {*CANDIDATES}):
        refuses("", site.ask, action, error=BudgetExceededError)
    assert site.rows() == []


def test_another_clients_data_set_is_never_told_of(make_site, no_record):
    site = make_site()
    names = ("other", "../ward", "ward ", "Ward", "")
    cases = [*itertools.product((*ASKED, "query.latency", "query.commit"), names)]
    for action, name in (*cases, ("train.weights", None), ("query.latency", None)):
        asked = "null" if name is None else name
        told = refuses(f"rule data_sets: data set={asked}", site.ask, action, data_set=name)
        assert "ward" not in told.replace(asked, "")
    assert site.rows() == []

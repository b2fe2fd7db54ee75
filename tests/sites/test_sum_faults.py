"""SIGKILL of a deployed site at every message of a secure sum: the run goes on, or is resumed.

At which moments exactly, and that totals are those of who is in them, is in
``tests/pipeline/test_secure_sum.py``; here Flower's own processes die, and are started again.
"""

import json
import re
import sqlite3
from collections import Counter
from contextlib import closing

import pytest

from fednas_flwr.client.audit_trail import verify_trail
from fednas_flwr.privacy.books.ledger import Ledger

from .test_faults import PRIVATE, RUN, Watched

pytestmark = pytest.mark.slow

MESSAGES = ("train.weight_gradient", "query.sign_survivors", "query.open_masks")
FAILURES = (
    r"have answered, but not signed the list of survivors"
    r"|the secure sum of .* has failed, with \d of \d survivors' openings"
    r"|\d of 3 clients answered, 2 are needed"
)


@pytest.fixture(scope="module")
def cluster(machines):
    return machines(private=True, sums="least_sites: 2, colluding: 0")


def trail(cluster, site):
    """Return the lines of a site's audit trail, but for one that is being written."""
    path = cluster.folder / site / "state" / "ledger" / "audit.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_site_killed_at_every_message(cluster, loopback, tmp_path):
    scenarios = [(event, action) for action in MESSAGES for event in ("asked", "released")]
    own = (*RUN, *PRIVATE, "secure_sum=true", f"rounds={len(scenarios) + 1}")
    own += ("runtime.quorum=0.6", "runtime.deadline_s=300", "runtime.connect_s=600")
    attempts: list[Watched] = []

    def start():
        attempts.append(Watched(cluster, loopback.until, tmp_path / "run", *own))

    def ended():
        """Return whether the run is complete; start it again where a kill has ended it."""
        if attempts[-1].process.poll() is None:
            return False
        code, finished = attempts[-1].end()
        if code == 0:
            return True
        assert re.search(FAILURES, finished["reason"]), finished["reason"]
        start()
        return False

    def seen(scenario):
        lines = trail(cluster, "south")
        return sum((line["event"], line.get("action")) == scenario for line in lines)

    start()
    for scenario in scenarios:
        before = seen(scenario)

        def comes(scenario=scenario, before=before):
            assert not ended(), "the run was over before the site was killed"
            return seen(scenario) > before

        loopback.until("the message", comes)
        for part in ("clientapp", "supernode"):
            cluster.kill(f"south-{part}")
        loopback.until("its end", lambda: "SuperNode ID" not in cluster.read("south-supernode"))
        cluster.wait_online("south")
    loopback.until("the end", ended)
    told = {event["round"] for event in attempts[-1].events("round")}
    assert told == set(range(1, len(scenarios) + 2))

    for name in cluster.sites:
        state = cluster.folder / name / "state"
        with Ledger(state / "ledger" / "ledger.sqlite", state / "ledger.key") as ledger:
            booked = ledger.verify()
        verify_trail(state / "ledger" / "audit.jsonl", state / "ledger.key")
        released = (line for line in trail(cluster, name) if line["event"] == "released")
        sent = Counter(line["action"] for line in released)
        assert sum(sent[action] for action in sent if action.startswith("train")) <= booked
        (journal,) = state.rglob("sums.sqlite")
        with closing(sqlite3.connect(journal)) as books:
            contexts, signed, opened = books.execute(
                "SELECT COUNT(*), COUNT(survivors), SUM(opened) FROM answers"
            ).fetchone()
        assert sent["query.sign_survivors"] <= signed <= contexts
        assert sent["query.open_masks"] <= opened <= signed

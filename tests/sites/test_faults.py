"""SIGKILL of every kind of process of a deployment, sites that are missing, silent or come back.

One deployment for all of it, whose fixture ends by proving that no process is left. Most of the
time goes into Flower's patience: it takes up to a minute to give up a process or a node.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
from collections import Counter

import pytest

from fednas_flwr.cli import main
from fednas_flwr.client.audit_trail import verify_trail
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.runs.events import read_events

from ..finished_runs import assert_same_files

pytestmark = pytest.mark.slow

DEPLOYMENT = ("runtime=deployment", "runtime.superlink=server")
RUN = ("partition=sites", "dataset=npz", "dataset.server_test=false", "clients=3", "rounds=2")
RUN += ("stages=[search]", "search_space.channels=2", "search_space.num_cells=1", "trackers=[]")
RUN += ("runtime.device=cpu",)
SLOW = (*RUN, "algorithm.local_epochs=60")  # so that signals come in the middle of the work
FOUND = ("genotype.json", "checkpoints/search-000002.safetensors")
PRIVATE = ("algorithm=dp_fnas", "privacy=dp", "privacy.data_set=my-data", "privacy.epsilon=1000")
PRIVATE += ("algorithm.batch_size=8", "search_space.norm=group")


@pytest.fixture(scope="module")
def cluster(machines):
    """All services of docker/compose.yaml, of sites that also answer what is not private."""
    return machines(private=False)


class Watched:
    """``fednas run resume=auto`` on a cluster, and the events that its server writes."""

    def __init__(self, cluster, until, folder, *overrides):
        self.until, self.folder = until, folder
        self.before = len(self.events())
        command = ("fednas", "run", "resume=auto", *DEPLOYMENT, *overrides, f"run_dir={folder}")
        self.process: subprocess.Popen[str] = cluster.launch(*command)

    def events(self, kind=""):
        file = self.folder / "events.jsonl"
        events = read_events(file) if file.exists() else []
        return [event for event in events if not kind or event["event"] == kind]

    def wait(self, what, found):
        """Wait for something in the run, which must not end meanwhile."""
        self.until(what, lambda: found() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[0]

    def wait_for_search(self):
        def begun():
            return any(e["event"] == "stage_started" for e in self.events()[self.before :])

        self.wait("the search", begun)

    def end(self):
        """Return the command's code and the last event, by which the run has ended."""
        output, _ = self.process.communicate()
        print(output)
        ends = [e for e in self.events() if e["event"] in ("run_started", "run_finished")]
        assert ends[-1]["event"] == "run_finished"
        return self.process.returncode, ends[-1]


@pytest.fixture
def start(cluster, loopback):
    return lambda folder, *overrides: Watched(cluster, loopback.until, folder, *overrides)


@pytest.fixture(scope="module")
def inline(cluster, tmp_path_factory):
    """Folder of the same run in this process, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["run", *SLOW, f"dataset.root={cluster.base / 'data'}", f"run_dir={folder}"]) == 0
    return folder


def send(processes, number):
    assert processes
    for process in processes:
        os.kill(process, number)


def test_a_missing_site_is_waited_for_no_longer_than_was_set(cluster, start, tmp_path):
    cluster.end(["east-supernode"])
    all_sites, two = ("runtime.connect_s=1", "runtime.quorum=1"), ("runtime.quorum=0.6",)
    code, finished = start(tmp_path / "all", *RUN, *all_sites).end()
    assert code == 1
    assert "2 of 3 clients appeared within 1 s; 3 are needed" in finished["reason"]
    run = start(tmp_path / "two", *RUN, "runtime.connect_s=1", *two)
    assert run.end()[0] == 0
    assert len(run.events("round")) == 2
    cluster.start("east-supernode")
    cluster.wait_online("east")


def test_whatever_is_killed_the_run_ends_in_the_same_bits(cluster, start, inline, tmp_path):
    run, overrides = tmp_path / "run", (*SLOW, "runtime.quorum=1", "runtime.connect_s=600")
    work, killed = "train.search: begun", {"north": signal.SIGKILL, "east": signal.SIGTERM}
    before = {site: cluster.read(f"{site}-clientapp").count(work) for site in killed}
    attempt = start(run, *overrides)
    attempt.wait("round 1", (run / "checkpoints" / "search-000001.json").exists)
    for site, number in killed.items():
        log, second = f"{site}-clientapp", before[site] + 2
        attempt.wait(
            "work on round 2", lambda log=log, n=second: cluster.read(log).count(work) >= n
        )
        send(cluster.processes("fednas-message", site), number)
    cluster.kill("south-supernode")
    send(cluster.processes("flwr-serverapp", "server"), signal.SIGKILL)
    code, finished = attempt.end()
    assert code == 1
    assert finished["status"] == "failed"
    assert "No heartbeat received" in finished["reason"]

    attempt = start(run, *overrides)
    attempt.wait_for_search()
    answered = "train.search: answered"
    before = cluster.read("east-clientapp").count(answered)
    attempt.wait("a reply", lambda: cluster.read("east-clientapp").count(answered) > before)
    cluster.kill("superlink")
    assert attempt.end()[0] == 0
    assert [event["resumed"] for event in attempt.events("run_started")] == [False, True]
    assert [event["round"] for event in attempt.events("round")] == [1, 2]
    assert_same_files(run, inline, *FOUND)


def test_a_kill_within_a_reply_or_a_checkpoint_changes_nothing(cluster, start, inline, tmp_path):
    """What receives is stopped first, so that what sends is in the middle of it when it dies."""
    run, overrides = tmp_path / "run", (*SLOW, "runtime.quorum=1", "runtime.connect_s=600")

    def begin_and_stop(site):
        """Begin an attempt; stop the site's SuperNode before it has the client's reply."""
        log = f"{site}-clientapp"
        said = len(cluster.read(log))
        attempt = start(run, *overrides)
        attempt.wait("work", lambda: "search: begun" in cluster.read(log)[said:])
        cluster.kill(f"{site}-supernode", signal.SIGSTOP)
        attempt.wait("a reply", lambda: "search: answered" in cluster.read(log)[said:])
        return attempt

    def assert_lost(attempt, client):
        code, finished = attempt.end()
        assert (code, finished["status"]) == (1, "failed")
        assert attempt.events("client_failed")[-1]["client"] == client
        assert not list((run / "checkpoints").iterdir())

    attempt = begin_and_stop("north")
    send(cluster.processes("fednas-message", "north"), signal.SIGKILL)  # on its way to the node
    cluster.kill("north-supernode", signal.SIGCONT)
    assert_lost(attempt, 0)

    attempt = begin_and_stop("east")
    cluster.kill("superlink", signal.SIGSTOP)
    cluster.kill("east-supernode", signal.SIGCONT)
    attempt.wait("its reply", lambda: not cluster.processes("fednas-message", "east"))
    cluster.kill("east-supernode")  # on its way to the SuperLink
    cluster.kill("superlink", signal.SIGCONT)
    assert_lost(attempt, 2)

    attempt = start(run, *overrides)
    attempt.wait_for_search()
    server = cluster.processes("flwr-serverapp", "server")
    pipes = []
    for process in server:
        path = run / "checkpoints" / f".search-000001.safetensors.{process}.tmp"
        os.mkfifo(path)
        pipes.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        fcntl.fcntl(pipes[-1], fcntl.F_SETPIPE_SZ, 4096)  # takes no more before it is read
    attempt.wait("a checkpoint", lambda: select.select(pipes, [], [], 0)[0])
    send(server, signal.SIGKILL)
    code, finished = attempt.end()
    assert (code, finished["status"]) == (1, "failed")
    assert [path.suffix for path in (run / "checkpoints").iterdir()] == [".tmp"] * len(pipes)
    for pipe in pipes:
        os.close(pipe)

    attempt = start(run, *overrides)
    assert attempt.end()[0] == 0
    resumed = [event["resumed"] for event in attempt.events("run_started")]
    assert resumed == [False, True, True, True]
    assert_same_files(run, inline, *FOUND)


def test_a_private_run_goes_on_without_sites_that_are_silent_or_lost(cluster, start, tmp_path):
    cluster.make_private(True)
    sites = [f"{site}-supernode" for site in cluster.sites]
    cluster.end(sites)
    for name in sites:
        cluster.start(name)
    for site in cluster.sites:
        cluster.wait_online(site)

    run = start(tmp_path / "run", *RUN, *PRIVATE, "runtime.quorum=0.3", "runtime.deadline_s=45")
    run.wait_for_search()
    cluster.kill("north-clientapp", signal.SIGSTOP)
    work = "train.weight_gradient: begun"
    run.wait("south's work", lambda: work in cluster.read("south-clientapp"))
    cluster.kill("south-clientapp")
    cluster.kill("south-supernode")
    run.wait("a failure", lambda: {e["client"] for e in run.events("client_failed")} == {0, 1})
    cluster.kill("north-clientapp", signal.SIGCONT)
    code, finished = run.end()
    assert (code, finished["status"]) == (0, "completed")
    told = ("round", "action", "client", "reason")
    failed = [tuple(event[key] for key in told) for event in run.events("client_failed")]
    assert (1, "train.weight_gradient", 0, "no reply within 45 s") in failed
    assert (1, "train.weight_gradient", 1) in [event[:3] for event in failed]
    assert (2, 0) not in [(event[0], event[2]) for event in failed]  # it has come back
    assert 2 not in [event[2] for event in failed]
    assert len(run.events("round")) == 2

    for site in cluster.sites:
        state = cluster.folder / site / "state"
        with Ledger(state / "ledger" / "ledger.sqlite", state / "ledger.key") as ledger:
            booked = ledger.verify()
        trail = state / "ledger" / "audit.jsonl"
        verify_trail(trail, state / "ledger.key")
        lines = [json.loads(line) for line in trail.read_text().splitlines()]
        trained = (line for line in lines if line.get("action", "").startswith("train"))
        sent = Counter(line["event"] for line in trained)
        least = site != "south"  # which was killed at its first work, and may be back too late
        assert least <= sent["released"] <= booked <= sent["asked"], site

"""A site that is killed (SIGKILL) before, in and after every message of a secure sum.

What it has written to its journal is all that a new process of it knows. Either the run ends in the
total of those whose answers are in it, or it fails with a reason and goes on with ``resume=``.
"""

import importlib
import multiprocessing
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message

from fednas_flwr.cli import main
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.settings import dump_config

from ..finished_runs import whole_run
from .test_secure_sum import SUMS, LossyGrid, lost_at, weights

VICTIM = 2
BASE = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain]", "retrain.rounds=1")
BASE += ("partition=quantity",)
ASKED, SIGN, OPEN = "train.weights", "query.sign_survivors", "query.open_masks"


@pytest.fixture(scope="module")
def totals(quick_run):
    """The weights that runs without secure sums end in, of all clients and without the victim."""
    found = {}
    for name, lost in (("all", lost_at(ASKED, set())), ("others", lost_at(ASKED, {VICTIM}))):
        own = ("clients=4", "runtime.largest_share=1", "runtime.quorum=0.5")
        found[name] = weights(quick_run(*BASE, *own, grid=partial(LossyGrid, lost=lost)).folder)
    assert not torch.allclose(*(next(iter(w.values())) for w in found.values()), atol=1e-3)
    return found


class KillingGrid(InProcessGrid):
    """Has one client in a process of its own, started again after its death if it ``returns``."""

    def __init__(self, config, action, moment, *, returns=True):
        super().__init__(make_client_app(dump_config(config)), config.clients)
        self._config, self._moment, self._action, self._returns = config, moment, action, returns
        self.deaths = 0
        self._start(action, moment)

    def _start(self, action="", moment=""):
        context = multiprocessing.get_context("forkserver")  # as torch does not survive a fork
        context.set_forkserver_preload(["fednas_flwr.deploy.client_app"])
        self._pipe, theirs = context.Pipe()
        site = importlib.import_module("killed_site")
        terms = (theirs, dump_config(self._config), self._config.clients, action, moment)
        self._process = context.Process(target=site.serve, args=terms, daemon=True)
        self._process.start()
        theirs.close()

    def _bury(self):
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL
        self._pipe.close()
        self.deaths += 1
        if self._returns:
            self._start()

    def answer(self, message):
        if message.metadata.dst_node_id - 2 != VICTIM:
            return super().answer(message)
        gone = Message(Error(5, "the node is gone"), reply_to=message)
        if self.deaths and not self._returns:
            return gone
        try:
            self._pipe.send(message)
            reply = self._pipe.recv()
        except (EOFError, OSError):
            self._bury()
            return gone
        if (message.metadata.message_type, self._moment) == (self._action, "sent"):
            if not self.deaths:
                self._bury()
        return reply

    def close(self):
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            self._pipe.close()


KILLED = [
    (ASKED, "answered", True, "others"),
    (ASKED, "sent", True, "all"),
    (ASKED, "recorded", False, "others"),
    (ASKED, "sent", False, None),
    *((SIGN, moment, True, None) for moment in ("asked", "recorded")),
    (SIGN, "sent", True, "all"),
    (SIGN, "sent", False, "all"),
    (OPEN, "sent", True, "all"),
    (OPEN, "asked", False, "all"),
]


@pytest.mark.run
@pytest.mark.parametrize(("action", "moment", "returns", "total"), KILLED)
def test_a_killed_site_leaves_the_total_of_the_others_or_a_clear_failure(
    action, moment, returns, total, totals, compose_config, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder = tmp_path / "run"
    own = ("runtime.quorum=0.5", f"run_dir={folder}")
    config = create_run_folder(compose_config(*BASE, *SUMS, *own))
    with closing(KillingGrid(config, action, moment, returns=returns)) as grid:
        ran = whole_run(config, grid=lambda *_: grid)
    assert grid.deaths == 1
    if total is None:
        assert "the list of survivors (client 2), so that no mask" in str(ran.error)
        assert not list((folder / "checkpoints").glob("retrain-*"))
        assert main(["run", f"resume={folder}"]) == 0
        total = "all"
    else:
        assert ran.error is None
        failed = {e["client"] for e in ran.named("client_failed")}
        assert failed == (set() if moment == "sent" and (returns or action == OPEN) else {VICTIM})
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, totals[total][name], rtol=1e-4, atol=1e-6)

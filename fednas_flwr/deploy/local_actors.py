"""Processes of this machine for the clients of a run.

The clients of a run are computed by workers, about as many as there are cores. The command line
forks its workers at once. A run from Python begins in one process, and starts workers once its
clients have taken longer than starting workers would. Replies have the same bits wherever a client
answers.

    python -m fednas_flwr.deploy.local_actors
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from importlib import import_module

import torch
from flwr.app import Message

from fednas_flwr.base.processes import LATER, Forks, at_once, cores, is_warm, serve_forks
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid, Taken, WorkerGrid
from fednas_flwr.settings import Config, dump_config, registry
from fednas_flwr.settings.configuration import load_config

PATIENCE_S = 5.0  # for a run in one process; starting others takes about as long


def main() -> None:
    """Import everything that clients need, and fork processes on request."""
    import_module("fednas_flwr.deploy.whole_run")  # imports everything that clients need
    serve_forks(sys.argv[1:])


def side_by_side(config: Config) -> int:
    """Number of clients that a run on this machine computes at a time; above 1 in processes."""
    number = min(config.clients, cores() // config.runtime.threads)
    on_cpu = config.runtime.device == "cpu" or not torch.cuda.is_available()
    repeats = getattr(config.privacy, "test_seed", None) is not None  # noise of one process
    return 1 if not on_cpu or repeats else max(1, number)


@contextmanager
def local_grid(config: Config) -> Iterator[InProcessGrid]:
    """The grid of a run on this machine, with further processes if they can help."""
    text = dump_config(config)
    app, sent = make_client_app(text), registry.packed(partial(_answer, text))
    if side_by_side(config) == 1 or sent is None:
        yield InProcessGrid(app, config.clients)
        return
    with Forks(sent) as forks:
        number = at_once(config.clients, threads=config.runtime.threads)
        grid = LocalGrid(app, config.clients, number=number, start=forks.start)
        with closing(grid):
            yield grid


def _answer(config_json: str, taken: Taken) -> list[Message]:
    return _answered(_clients(config_json), taken)


def _answered(clients: InProcessGrid, taken: Taken) -> list[Message]:
    messages, arrays = zip(*taken, strict=True)
    return clients.answer_apart(messages, *arrays)


@cache
def _clients(config_json: str) -> InProcessGrid:
    return InProcessGrid(make_client_app(config_json), load_config(config_json).clients)


class LocalGrid(WorkerGrid):
    """A grid that forks workers at once if that is quick, else answers here for a while first."""

    alone = True
    _spent_s = 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived; if there will be no workers, that of one client."""
        if not self.threads and (is_warm() or self._spent_s > PATIENCE_S):
            self.begin()
            # The other module belongs to torch, parts of which this thread may be importing.
            threading.Thread(target=import_module, args=LATER[:1], daemon=True).start()
        soon = is_warm() and not self.has_failed
        if not (self.num_workers or soon) and (taken := self._next(0.0)):
            started = time.monotonic()
            self._keep(taken, partial(_answered, self))
            self._spent_s += time.monotonic() - started
        return super().pull_messages(message_ids)


if __name__ == "__main__":
    main()

"""Networks beside a run's own, trained side by side: a process forks one for each of them.

    python -m fednas_flwr.deploy.beside

:func:`train_all` starts it where this machine has cores for it. It has imported torch and computed
nothing when it forks, and ends with all that it has forked as soon as its parent is gone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.deploy.local_actors import environment, packed, unpack
from fednas_flwr.deploy.server_app import launch
from fednas_flwr.runs.numbers import EVENTS_FILE, is_complete
from fednas_flwr.runs.run_folder import open_run_folder
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import Config, with_runtime

Limits = Mapping[Path, str | None]  # run folders, and the time that each may take


def train_all(config: Config, limits: Limits) -> Iterator[tuple[Path, str]]:
    """Train the runs of some folders; yields each folder when it is done, with why it has failed.

    Args:
        config: Of the run that they stand beside.
        limits: Their folders.
    """
    cores = len(os.sched_getaffinity(0))
    alone = config.runtime.name != "inline" or config.runtime.device == "cuda"
    if alone or cores < 2 or len(limits) < 2 or packed() is None:
        for folder, limit in limits.items():
            yield folder, train(folder, limit)
        return
    with _forking() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {str(folder): limit for folder, limit in limits.items()}
        process.stdin.write(json.dumps([packed(), asked]) + "\n")
        process.stdin.flush()
        for _ in limits:
            if not (line := process.stdout.readline()):
                raise ConfigError(
                    "a process that trains the networks to compare with has ended: the machine may "
                    "be out of memory; go on with resume=<run folder>."
                )
            folder, reason = json.loads(line)
            yield Path(folder), reason
        process.stdin.close()


def train(folder: Path, limit: str | None) -> str:
    """Begin the run in a folder or go on with it; returns why it has failed, else an empty text."""
    if is_complete(folder):
        return ""
    begun = (folder / EVENTS_FILE).exists()
    try:
        config = with_runtime(open_run_folder(str(folder)), time_limit=limit)
        launch(config, listeners=(), resumed=begun)
    except (ConfigError, QuorumError) as error:
        return str(error)
    return ""


def _forking() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fednas_flwr.deploy.beside"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment(), start_new_session=True
    )


def _train_one(asked: tuple[str, str | None]) -> tuple[str, str]:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # which carries results alone
    folder, limit = asked
    return folder, train(Path(folder), limit)


def _end_with_parent(standard_input: int) -> None:
    while os.read(
        standard_input, 1
    ):  # by no buffer, whose lock a process forked by then would keep
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Train what a line of the standard input names; tell each that is done in a line."""
    own, asked = json.loads(sys.stdin.readline())
    unpack(own)
    pool = multiprocessing.get_context("fork").Pool(
        min(len(asked), len(os.sched_getaffinity(0))), maxtasksperchild=1
    )
    threading.Thread(target=_end_with_parent, args=(0,), daemon=True).start()
    for done in pool.imap_unordered(_train_one, asked.items()):
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()

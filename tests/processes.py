"""Programs in processes of their own."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path


def until(done, what, *, within_s=120):
    """Return when something is done, which takes seconds on an idle machine."""
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.2)


def told(*arguments, env=None, **options):
    """Return what this interpreter prints, which must succeed; ``env`` is added to our own."""
    options["env"] = os.environ | (env or {})
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(*arguments, largest_file=-1, env=None):
    """Start ``fednas <arguments>``; no file that it writes may be larger than given, in bytes.

    ``env`` is added to our own.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "fednas_flwr", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))
    return process


def workers(of=None):
    """The workers that a process, by default this one, has started by its interpreter."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    children = [one for one, parent in parents.items() if parent == (of or os.getpid())]
    return [one for one, parent in parents.items() if parent in children]


def wait_for_workers(event):
    """A listener that lets no second round begin before there are workers."""
    while event["event"] == "round" and event["round"] == 1 and len(workers()) < 2:
        time.sleep(0.1)

"""Programs in processes of their own."""

import os
import resource
import subprocess
import sys
import time


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


def started(*arguments, largest_file=-1):
    """Start ``fednas <arguments>``; no file that it writes may be larger than given, in bytes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fednas_flwr", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))
    return process

"""Programs in processes of their own, which must succeed."""

import os
import subprocess
import sys


def told(*arguments, env=None, **options):
    """Return what this interpreter prints with these arguments; ``env`` is added to our own."""
    options["env"] = os.environ | (env or {})
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

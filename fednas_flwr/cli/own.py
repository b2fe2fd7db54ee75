"""``--with <file.py>``: what is one's own, registered in every process of a command."""

from __future__ import annotations

import os
import runpy
import traceback
from collections.abc import Sequence
from pathlib import Path

from fednas_flwr.errors import ConfigError

VARIABLE = "FEDNAS_WITH"  # by which the processes of a sweep's jobs learn of the files
_taken: set[str] = set()


def take_files(paths: Sequence[str] = ()) -> None:
    """Run Python files that call ``fednas_flwr.register_...``, each once in this process.

    Those that ``FEDNAS_WITH`` lists come first, as ``PATH`` lists folders; it lists all of them
    afterwards. The code runs with the rights of whoever calls, like every script that is started:
    a file is only ever named on one's own command line, never by a server.

    Raises:
        ConfigError: A file does not exist or fails.
    """
    listed = [text for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    listed += [str(Path(path).expanduser().absolute()) for path in paths]
    for path in dict.fromkeys(listed):
        if path not in _taken:
            _run(path)
            _taken.add(path)
    if listed:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(listed))


def _run(path: str) -> None:
    if not Path(path).is_file():
        raise ConfigError(f"--with {path} is no file: give one of Python that registers your own.")
    try:
        # Not kept as a module: Ray then sends its classes by value.
        runpy.run_path(path, run_name="fednas_own")
    except ConfigError as error:
        raise ConfigError(f"--with {path}: {error}") from error
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        place = f" in line {lines[-1]}" if lines else ""
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--with {path} fails{place}: {type(error).__name__}: {reason}; correct it."
        ) from error

"""The command ``fednas``.

A mistake of the user's ends in one sentence and exit code 2, a run that failed in one sentence and
exit code 1; ``--debug`` shows the full trace. torch is imported only when a run begins, so that
mistakes are told at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fednas_flwr import __version__
from fednas_flwr.base.files import OTHERS_WRITE
from fednas_flwr.cli.commands import RUN_FAILED, STOPPED, USER_ERROR, fail, take_files

__all__ = ["RUN_FAILED", "STOPPED", "USER_ERROR", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print("\nfednas: stopped.", file=sys.stderr)
        return STOPPED


def _main(arguments: Sequence[str] | None) -> int:
    from fednas_flwr.cli import machines, privacy, results, run

    os.umask(os.umask(0o077) | OTHERS_WRITE)  # no run of a command can be written by others
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in ("-sc", "--shell-completion"):  # as a shell asks for it
        arguments.insert(0, "run")
        os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(" run ", " ", 1)
    parser = argparse.ArgumentParser(
        prog="fednas", description="Federated neural architecture search on Flower."
    )
    parser.add_argument("--version", action="version", version=f"fednas {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (run, results, privacy, machines):
        module.add_commands(commands)
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        take_files(options.own)
        return int(options.handler(options, overrides))
    except Exception as error:
        return fail(error, debug=options.debug)

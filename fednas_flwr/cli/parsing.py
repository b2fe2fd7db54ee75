"""Parts that the parsers of all commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Handler = Callable[[argparse.Namespace, list[str]], int]


def add_command(
    commands: Commands,
    name: str,
    handler: Handler,
    *,
    help: str | None = None,
    epilog: str | None = None,
    takes_overrides: bool = False,
) -> argparse.ArgumentParser:
    """Add a command and return its parser, for its own arguments.

    Args:
        commands: The commands, or the actions of a command, to add to.
        name: What the user writes.
        handler: Does it, given the options and the overrides; returns the exit code.
        help: One line for the list of commands; None leaves it out of that.
        epilog: What follows the list of arguments, as it is laid out.
        takes_overrides: Whether further arguments are overrides of the configuration.
    """
    listed: dict[str, Any] = {} if help is None else {"help": help}
    parser = commands.add_parser(
        name,
        **listed,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=not takes_overrides,
    )
    parser.add_argument("--debug", action="store_true", help="show the full trace of an error")
    parser.add_argument(
        "--with",
        dest="own",
        metavar="FILE",
        action="append",
        default=[],
        help="Python file that registers a data set, search space, algorithm or score of your own",
    )
    parser.set_defaults(handler=handler, takes_overrides=takes_overrides)
    return parser

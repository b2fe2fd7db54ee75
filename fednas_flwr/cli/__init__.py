"""The command ``fednas``, and the parts that all its commands share.

A user's mistake ends in one sentence and exit code 2, a failed run in one sentence and exit code 1;
``--debug`` shows the full trace. torch is imported only when a run begins, so that mistakes are
reported at once.
"""

import argparse
import atexit
import gc
import inspect
import io
import os
import re
import runpy
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from fednas_flwr import __version__
from fednas_flwr.base.errors import ConfigError, DamagedError
from fednas_flwr.base.files import OTHERS_WRITE
from fednas_flwr.base.foreign import terminal
from fednas_flwr.base.memory import OWN, described

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Handler = Callable[..., int | None]  # returns the exit code, None for 0

DAILY = ("run", "data", "report", "compare", "predict", "export")
RUN_FAILED = 1
USER_ERROR = 2
INCONCLUSIVE = 3  # of `fednas audit`
STOPPED = 128 + signal.SIGINT
VARIABLE = "FEDNAS_WITH"  # lists the files for the processes of a sweep's jobs


class _Output(io.TextIOWrapper):
    """Standard or error output of a command that continues after its reader is gone."""

    def write(self, text: str) -> int:
        """Write text at once; discard it after the other end of the pipe was closed."""
        try:
            super().write(text)
            self.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return len(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            with suppress(OSError):  # if the file cannot be sought, which then has no reader either
                setattr(sys, name, _Output(stream.buffer, stream.encoding, stream.errors))
        atexit.register(gc.freeze)  # else garbage collection takes a second at the end
    try:
        return _main(arguments)
    except KeyboardInterrupt as stopped:
        print("", *getattr(stopped, "__notes__", ()), "fednas: stopped.", sep="\n", file=sys.stderr)
        return STOPPED


def _main(arguments: Sequence[str] | None) -> int:
    from fednas_flwr.cli import machines, privacy, results, run

    os.umask(os.umask(0o077) | OTHERS_WRITE)  # no run of a command can be written by others
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in ("-sc", "--shell-completion"):  # as shells ask for it
        arguments.insert(0, "run")
        os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(" run ", " ", 1)
    parser = argparse.ArgumentParser(
        prog="fednas",
        usage="%(prog)s [-h] [--version] command ...",
        description="Federated neural architecture search on Flower.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fednas {__version__}")
    listed_below: Any = {"required": True, "help": argparse.SUPPRESS}
    commands = parser.add_subparsers(metavar="command", prog="fednas", **listed_below)
    for module in (run, results, privacy, machines):
        for name, handler in module.COMMANDS.items():
            _add(commands, name, handler)
    for group, (description, handlers) in (privacy.GROUPS | machines.GROUPS).items():
        actions = commands.add_parser(
            group,
            usage=f"fednas {group} [-h] action ...",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        of_group = actions.add_subparsers(metavar="action", prog=f"fednas {group}", **listed_below)
        for name, handler in handlers.items():
            _add(of_group, name, handler)
        actions.epilog = _listed("actions", of_group, of_group.choices)
    daily = [name for name in commands.choices if name in DAILY]
    rest = [name for name in commands.choices if name not in DAILY]
    listed = (_listed("every day", commands, daily), _listed("for experts", commands, rest))
    parser.epilog = "\n\n".join(listed)
    options, overrides = parser.parse_known_args(arguments)
    values = vars(options)
    handler, files, debug = (values.pop(name) for name in ("handler", "own", "debug"))
    if "overrides" in signature(handler).parameters:
        values["overrides"] = overrides
    elif overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        take_files(files)
        return handler(**values) or 0
    except Exception as error:
        if _is_stopped(error):
            stopped = KeyboardInterrupt()
            stopped.__notes__ = [*getattr(error, "__notes__", ())]
            raise stopped from error
        return fail(error, debug=debug)


def _is_stopped(error: BaseException | None) -> bool:
    """True for Ctrl-C, and for what a library raised as it cleaned up after Ctrl-C."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _listed(title: str, commands: Commands, names: Iterable[str]) -> str:
    """Return the names of commands with their descriptions, one per line."""
    lines = [f"    {name:12} {commands.choices[name].description}" for name in names]
    return "\n".join([f"{title}:", *lines])


def _add(commands: Commands, name: str, handler: Handler) -> None:
    """Add a command whose arguments are the parameters of its handler.

    Keyword-only parameters are options, and ``overrides`` are further arguments, for the
    configuration. The docstring is the command's help: its first line for the list of commands, its
    text after the arguments, and its section of arguments.
    """
    summary, _, rest = (inspect.getdoc(handler) or "").partition("\n\n")
    epilog, _, listed = rest.partition("Args:\n")
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", listed, re.MULTILINE))
    parameters, hints = signature(handler).parameters, get_type_hints(handler)
    parser = commands.add_parser(
        name,
        description=summary[:1].lower() + summary[1:].removesuffix("."),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev="overrides" not in parameters,
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
    parser.set_defaults(handler=handler)
    for key in [key for key in parameters if key != "overrides"]:
        _add_argument(parser, parameters[key], hints[key], " ".join(texts[key].split()))


def _add_argument(parser: argparse.ArgumentParser, of: Parameter, hint: Any, text: str) -> None:
    """Add the argument of a parameter; a tuple takes several values, a ``Literal`` one of some."""
    is_option, is_needed = of.kind is Parameter.KEYWORD_ONLY, of.default is Parameter.empty
    settings: dict[str, Any] = {"help": text}
    if hint is bool:
        settings["action"] = "store_true"
    elif get_origin(hint) is Literal:
        settings |= {"choices": get_args(hint)}
    else:
        settings["type"], *others = get_args(hint) or [hint]
        if get_origin(hint) is tuple:
            settings["nargs"] = "+" if Ellipsis in others else 1 + len(others)
        elif not is_option and not is_needed:
            settings["nargs"] = "?"
    if not is_needed:
        settings["default"] = of.default
        settings["help"] += " (default: %(default)s)" if of.default else ""
    if is_option:
        parser.add_argument(f"--{of.name.replace('_', '-')}", required=is_needed, **settings)
    else:
        parser.add_argument(of.name, **settings)


def take_files(paths: Sequence[str] = ()) -> None:
    """Run Python files that call ``fednas_flwr.register_...``, each once in this process.

    Files listed in ``FEDNAS_WITH``, separated as in ``PATH``, come first; afterwards it lists all.
    The code runs with the rights of the caller, like any script: files are only named on the
    caller's own command line, never by a server.

    Raises:
        ConfigError: A file does not exist or fails.
    """
    listed = [text for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    listed += [str(Path(path).expanduser().absolute()) for path in paths]
    for path in dict.fromkeys(listed):
        _run(path)
    if listed:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(listed))


@cache
def _run(path: str) -> None:
    if not Path(path).is_file():
        raise ConfigError(f"--with {path} is no file: give one of Python that registers your own.")
    try:
        # It is not kept as a module, so that Ray sends its classes by value.
        runpy.run_path(path, run_name=OWN)
    except ConfigError as error:
        raise ConfigError(f"--with {path}: {error}") from error
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        place = f" in line {lines[-1]}" if lines else ""
        reason = textwrap.shorten(str(error), 200)
        raise ConfigError(
            f"--with {path} fails{place}: {type(error).__name__}: {reason}; correct it."
        ) from error


def fail(error: Exception, *, debug: bool) -> int:
    """Print one error with its notes, and return the exit code.

    Its type is printed unless the error is one of our sentences.
    """
    if debug:
        traceback.print_exception(error)
    text = str(error) if isinstance(error, ConfigError | DamagedError) else described(error)
    sentence = "; ".join([f"fednas: {text}", *getattr(error, "__notes__", ())])
    print(terminal(sentence), file=sys.stderr)
    return USER_ERROR if isinstance(error, ConfigError) else RUN_FAILED

"""Consoles on which tables are printed."""

from rich.console import Console

PIPE_WIDTH = 200  # characters of a line that goes to a file or a pipe


def table_console() -> Console:
    """Return standard output, as wide as its terminal; a file or a pipe is wide enough."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)

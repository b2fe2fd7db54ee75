"""Tables of cases: as text, where a row is a line and bars stand between cells; rare rows."""

from string import Template

import pytest


def rows(text, **names):
    """Return the cells of each row; ``$NAME`` stands for a text, and an indented line goes on."""
    lines = Template(text).safe_substitute(names).strip().replace("\n    ", " ").splitlines()
    return [tuple(cell.strip() for cell in f"{line} ".split(" | ")) for line in lines]


def seldom(*row):
    """Return a row that the quick tier leaves out: others show there what it shows."""
    return pytest.param(*row, marks=pytest.mark.run)


def by_hand(*row):
    """Return a row that CI leaves out, too: it runs no code that other rows do not run."""
    return pytest.param(*row, marks=pytest.mark.slow)


def firsts(names):
    """Return ``folder/name``s, of which the quick tier has the first of each folder alone."""
    of_folders = {name.partition("/")[0]: name for name in reversed(names)}.values()
    return [name if name in of_folders else seldom(name) for name in names]

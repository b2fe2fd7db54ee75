"""Tables of cases as text: a row is a line, its cells stand between bars."""

from string import Template


def rows(text, **names):
    """Return the cells of each row; ``$NAME`` stands for a text, and an indented line goes on."""
    lines = Template(text).safe_substitute(names).strip().replace("\n    ", " ").splitlines()
    return [tuple(cell.strip() for cell in f"{line} ".split(" | ")) for line in lines]

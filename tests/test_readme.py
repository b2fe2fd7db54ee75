"""The README's code and tables are what they claim to be."""

import re
from pathlib import Path

from fednas_flwr.reporting.tables import render_tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_result_files() -> None:
    assert render_tables(README, ROOT / "scripts" / "results") == README


def test_every_command_in_the_tree_exists() -> None:
    for name in re.findall(r"scripts/[\w.]+\.(?:sh|py)", README):
        assert (ROOT / name).is_file(), name

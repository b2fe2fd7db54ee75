"""The README's code and tables are what they claim to be."""

import re
import subprocess
import sys
from pathlib import Path

from fednas_flwr.reporting.tables import render_tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example() -> str:
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class " in b)
    return code


def test_tables_are_those_of_the_result_files() -> None:
    assert render_tables(README, ROOT / "scripts" / "results") == README


def test_own_strategy_is_short_and_runs(tmp_path: Path) -> None:
    assert len(example().splitlines()) < 40
    script = tmp_path / "median.py"
    script.write_text(example())
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "validation_loss" in done.stdout
    assert "Genotype(space='nasbench201'" in done.stdout


def test_every_command_in_the_tree_exists() -> None:
    for name in re.findall(r"scripts/[\w.]+\.(?:sh|py)", README):
        assert (ROOT / name).is_file(), name

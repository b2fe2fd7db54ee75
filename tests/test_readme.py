"""The code and tables of README.md and the pages beside the code are what they claim to be."""

import json
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet
from tables import render_tables

from fednas_flwr.cli import main
from fednas_flwr.privacy.mechanism import accounting
from fednas_flwr.settings.names import ACCOUNTANTS, NORMS, SPLITS

from .refusals import refuses

ROOT = Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
    if not page.relative_to(ROOT).parts[0].startswith((".", "runs"))
}
TEXT = "\n".join(PAGES.values())


def test_tables_are_those_of_the_result_files():
    for text in PAGES.values():
        assert render_tables(text, ROOT / "scripts" / "results") == text
    shown = set(re.findall(r"<!-- table:(\w+) -->", TEXT))
    assert shown <= {path.stem for path in (ROOT / "scripts" / "results").glob("*.json")}
    assert len(shown) > 10


def test_every_row_has_three_seeds():
    said = {"papers", "dpnas_networks_full", "pretrained_few", "fdnas_full"}  # have one, and say so
    for name in set(re.findall(r"<!-- table:(\w+) -->", TEXT)) - said:
        runs = json.loads((ROOT / "scripts" / "results" / f"{name}.json").read_text())["runs"]
        rows = {}
        for run in runs:
            rows.setdefault(json.dumps(run["group"], sort_keys=True), set()).add(run["seed"])
        assert {row: seeds for row, seeds in rows.items() if len(seeds) < 3} == {}, name


def test_accuracies_on_the_front_page_stand_in_a_table():
    link = r"\[([^]]*\d[^]]*)\]\(scripts/results/README.md#([\w-]+)\)"
    lines = re.findall(link, PAGES["README.md"])
    assert len(lines) >= 8
    sections = re.split(r"^## ", PAGES["scripts/results/README.md"], flags=re.MULTILINE)
    titles = {part.splitlines()[0].lower().replace(" ", "-"): part for part in sections}
    for text, part in lines:  # all of an algorithm's numbers in one row
        rows = re.findall(r"^\|.*\|$", titles[part], re.MULTILINE)
        numbers = map(re.escape, re.findall(r"\d+\.\d+", text))
        cells = [rf"\| {number}( ± [\d.]+)? \|" for number in numbers]
        assert any(all(re.search(cell, row) for cell in cells) for row in rows), (text, part)


def test_the_front_page_is_short_and_every_link_leads_to_a_file():
    assert len(PAGES["README.md"].splitlines()) <= 200
    assert len(PAGES) == 6
    for name, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"


def test_the_versions_of_python_are_those_that_pip_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    taken = SpecifierSet(project["requires-python"])
    assert "3.11.0" not in taken  # anybody on its machine can command its fork server
    (first, last) = re.findall(r"needs Python (\S+) to (\S+),", PAGES["README.md"])[0]
    assert first in taken
    assert f">={first}" in project["requires-python"]
    assert f"{last}.99" in taken
    major, minor = last.split(".")
    assert f"{major}.{int(minor) + 1}" not in taken


def test_every_script_that_is_named_exists():
    (line,) = re.findall(r"^scripts/ +(.*)$", TEXT, re.MULTILINE)
    in_tree = [f"scripts/{name}" for name in re.findall(r"[\w.]+\.(?:sh|py)", line)]
    named = re.findall(r"scripts/[\w.]+\.(?:sh|py)", TEXT)
    assert len(in_tree) >= 3
    assert len(named) > 10
    for name in in_tree + named:
        assert (ROOT / name).is_file(), name


def test_every_command_that_is_named_exists(capsys):
    refuses("", main, ["--help"], error=SystemExit)
    listed = set(re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE))
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", TEXT, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    named = {found[1] for line in lines if (found := re.match(r"(?:\$ )?fednas (\w+)", line))}
    named |= set(re.findall(r"`fednas (\w+)", TEXT))
    assert len(named) > 5
    assert named <= listed


# --- what code, tests and settings refer to is in the repository


FOLDERS = ("fednas_flwr", "conf", "docker", "scripts", "tests")
WRITTEN = {"MODEL_CARD.md", "compare.md"}  # by runs


def test_every_document_that_is_named_is_there():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    names = {path.name.removesuffix(".j2") for path in files} | WRITTEN
    texts = [path for path in files if path.suffix in (".py", ".yaml", ".toml", ".sh", ".md")]
    missing = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in texts
        for name in re.findall(r"\b[\w.-]+\.md\b", path.read_text(encoding="utf-8"))
        if name not in names
    }
    assert missing == set()


# --- names stand in one place


def test_every_accountant_computes():
    assert tuple(accounting.ACCOUNTANTS) == ACCOUNTANTS


def test_no_other_module_lists_the_names_again():
    quoted = [[f'"{name}"' for name in names] for names in (SPLITS, NORMS, ACCOUNTANTS)]
    lists = [re.compile(r",\s*".join(names)) for names in quoted]
    modules = [path for path in (ROOT / "fednas_flwr").rglob("*.py") if path.name != "names.py"]
    assert [path for path in modules for names in lists if names.search(path.read_text())] == []

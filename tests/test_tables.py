import importlib
import json
import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scipy.stats import ttest_rel
from tables import append_result, find_result, main, render_tables, start_results

from .refusals import refuses

SCRIPTS = Path(__file__).parents[1] / "scripts"
COLUMNS = [{"metric": "accuracy", "title": "accuracy (%)", "scale": 100, "decimals": 1}]


def test_all_scripts_can_be_imported():
    """What they take from the package and the tests is still there."""
    names = [path.stem for path in sorted(SCRIPTS.glob("*.py"))]
    assert len(names) > 30
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in ("cosmic_ray", "playwright"):  # of no extra that tests need
                raise


def _run(algorithm, seed, accuracy):
    run = {"settings": {"algorithm": algorithm, "stages": ("search",)}, "seed": seed}
    run |= {"group": {"algorithm": algorithm}, "metrics": {"accuracy": accuracy}}
    return run | {"commit": "0123456789abcdef", "machine": "2 cores", "seconds": 30.0}


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results" / "digits.json"
    start_results(path, title="Digits", command="scripts/table.sh", columns=COLUMNS)
    for seed, accuracy in ((1, 0.90), (2, 0.92)):
        append_result(path, _run("fed_darts", seed, accuracy))
    append_result(path, _run("a|b", 1, 0.5))
    return path


README = "# x\n\n<!-- table:digits -->\nold\n<!-- /table:digits -->\n\nafter\n"


def test_a_row_per_group_with_mean_and_deviation(results):
    text = render_tables(README, results.parent)
    lines = text.splitlines()
    assert lines[3:5] == ["**Digits**", ""]
    assert lines[5:7] == ["| algorithm | accuracy (%) | seeds |", "| --- | --- | --- |"]
    assert {"| fed_darts | 91.0 ± 1.4 | 2 |", "| a&#124;b | 50.0 | 1 |"} <= {*lines}
    assert "3 runs in 1:30 min on 2 cores, commit 0123456789." in text
    assert "old" not in text
    assert text.startswith("# x\n\n<!-- table:digits -->\n")
    assert text.endswith("\n<!-- /table:digits -->\n\nafter\n")
    assert render_tables(text, results.parent) == text


def test_a_metric_that_some_runs_did_not_reach_is_marked(results):
    append_result(results, _run("fed_darts", 3, None))
    assert "| fed_darts | 91.0 ± 1.4 (2 of 3) | 3 |" in render_tables(README, results.parent)


def test_a_row_is_compared_with_another_by_the_seeds_of_both(results):
    given = {"title": "Digits", "command": "x", "columns": COLUMNS}
    start_results(results, **given, against={"algorithm": "random"})
    for seed, accuracy in ((1, 0.88), (2, 0.94), (3, 0.5)):
        append_result(results, _run("random", seed, accuracy))
    lines = render_tables(README, results.parent).splitlines()
    assert lines[5] == "| algorithm | accuracy (%) | seeds | over random, 95 % interval |"
    found = ttest_rel([90.0, 92.0], [88.0, 94.0]).confidence_interval(0.95)
    interval = f"+0.0 ({found.low:+.1f} to {found.high:+.1f})"
    assert f"| fed_darts | 91.0 ± 1.4 | 2 | {interval} |" in lines
    assert "| a&#124;b | 50.0 | 1 | – |" in lines  # one seed has no interval
    assert "| random | 77.3 ± 23.9 | 3 | – |" in lines


def test_check_says_whether_the_readme_is_stale(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    arguments = [str(readme), str(results.parent)]
    assert main([*arguments, "--check"]) == 1
    assert "differ" in capsys.readouterr().out
    assert readme.read_text() == README
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    append_result(results, _run("fed_darts", 3, 0.1))
    assert main([*arguments, "--check"]) == 1


WRONG_MARKS = [
    ("<!-- table:digits -->\n", "has no partner"),
    ("<!-- table:digits -->\n<!-- /table:other -->\n", "is followed by"),
    ("<!-- table:other -->\n<!-- /table:other -->\n", "there is no"),
]


@pytest.mark.parametrize(("readme", "message"), WRONG_MARKS)
def test_marks_that_do_not_fit_are_refused(results, readme, message):
    refuses(message, render_tables, readme, results.parent, error=ValueError)


def test_a_script_continues_where_it_stopped(results):
    settings = {"stages": ("search",), "algorithm": "fed_darts"}
    found = find_result(results, settings, 1)
    assert found["commit"] == "0123456789abcdef"
    for place, own, seed in (
        (results, settings, 3),
        (results, settings | {"algorithm": "fnas"}, 1),
        (results.with_name("none.json"), settings, 1),
    ):
        assert find_result(place, own, seed) is None
    assert find_result(results, settings, 1, found["group"]) == found
    assert find_result(results, settings, 1, {"algorithm": "other data"}) is None
    start_results(results, title="New", command="c", columns=COLUMNS)
    assert find_result(results, settings, 1) == found
    assert json.loads(results.read_text())["title"] == "New"


def test_a_run_that_does_not_fit_is_refused(results):
    before = results.read_text()
    for run, words in (
        (_run("fed_darts", 1, 0.1), "already"),
        ({"seed": 1}, "fields"),
        (_run("fnas", 1, 0.1) | {"metrics": {}}, "lacks the metrics"),
        (_run("fnas", 1, float("nan")), "JSON compliant"),
    ):
        refuses(words, append_result, results, run, error=ValueError)
    assert results.read_text() == before


@pytest.mark.parametrize("changed", [{"commit": "fedcba"}, {"settings": {"algorithm": "x"}}])
def test_a_run_made_again_replaces_that_of_its_row_and_seed(results, changed):
    before = json.loads(results.read_text())["runs"]
    again = _run("fed_darts", 1, 0.1) | changed
    append_result(results, again)
    assert json.loads(results.read_text())["runs"] == [json.loads(json.dumps(again)), *before[1:]]


def test_runs_added_at_the_same_time_are_all_kept(results):
    with ThreadPoolExecutor(12) as pool:
        for seed in range(12):
            pool.submit(append_result, results, _run("fnas", seed, 0.5))
    seeds = [r["seed"] for r in json.loads(results.read_text())["runs"]]
    assert sorted(seeds[3:]) == list(range(12))


def test_runs_count_while_the_code_that_made_them_stays(tmp_path):
    """In a repository of its own: pages may change, package and settings may not."""
    names = ("fednas_flwr/code.py", "fednas_flwr/README.md", "conf/config.yaml", "tests/test.py")
    script = tmp_path / "scripts" / "table_runs.py"
    for path in (*(tmp_path / name for name in names), script):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    script.write_text((SCRIPTS / script.name).read_text())

    def git(*arguments):
        own = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        command = ["git", "-C", str(tmp_path), *own, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def counts(commit):
        found = runpy.run_path(str(script))["is_current"](commit)
        assert isinstance(found, bool)
        return found

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    first = git("describe", "--always")
    assert counts(first)
    for name in names[1::2]:
        (tmp_path / name).write_text("new")
        assert counts(first)
        assert counts(f"{first}-dirty")
    for name in names[::2]:
        (tmp_path / name).write_text("new")
        assert not counts(first)
        git("commit", "-am", "second")
        assert not counts(first)
        assert counts("HEAD")
        git("revert", "--no-edit", "HEAD")
        assert counts(first)
    assert not counts("0123456")

import csv
import json
import math
import shutil
import statistics
from pathlib import Path

import pytest

from fednas_flwr.report import comparison as tables
from fednas_flwr.report.comparison import compare_runs, print_comparison, write_comparison
from fednas_flwr.report.plots import fronts
from fednas_flwr.report.templates import DASH, sentence
from fednas_flwr.runs.numbers import Run

from ..refusals import lacking, refuses
from .conftest import emit, printed, with_config, with_events


def test_seeds_are_one_group_with_mean_and_deviation(make_run, tmp_path):
    accuracies = {1: 0.90, 2: 0.93, 10: 0.87}
    for seed, accuracy in accuracies.items():
        make_run(f"sweep/darts_{seed}", seed=seed, accuracy=accuracy)
    make_run("sweep/fnas", algorithm="fnas", accuracy=0.5)
    comparison = compare_runs([tmp_path / "sweep"])
    assert comparison.not_counted == ()
    darts, fnas = comparison.groups
    assert (darts.settings, darts.seeds) == ({"algorithm": "fed_darts"}, (1, 2, 10))
    assert darts.metrics["central_accuracy"].values == (0.90, 0.93, 0.87)
    text = f"90.0 ± {100 * statistics.stdev(accuracies.values()):.1f}"
    head, rows = comparison.table()
    assert [*rows[0][:2], *rows[0][-2:]] == ["fed_darts", text, "fed_darts", "1, 2, 10"]
    assert rows[1][:2] == ["fnas", "50.0"]  # one seed has no deviation
    assert "test F1" not in head  # it is the same in both


def test_what_analyse_trains_of_a_run_is_compared_only_where_it_is_named(make_run, tmp_path):
    make_run("variants/run")
    for seed, name in enumerate(("found", "pools-max")):
        make_run(f"variants/run/variants/{name}", seed=seed)

    def folders(given):
        groups = compare_runs([given]).groups
        return [Path(folder).name for group in groups for folder in group.folders]

    assert folders(tmp_path) == ["run"]
    assert sorted(folders(tmp_path / "variants" / "run" / "variants")) == ["found", "pools-max"]


def test_a_narrow_screen_shows_every_group_and_number(make_run):
    names = ["fed_darts", "fnas", "random_search", "vanilla", "fednas"]
    comparison = compare_runs([make_run(name, algorithm=name) for name in names])
    text = printed(print_comparison, comparison, width=70)
    assert max(len(line) for line in text.splitlines()) <= 70
    title = text.count("difference from fed_darts")  # once in each of the parts
    assert [text.count(f" {name} ") for name in names] == [2 + title, 2, 2, 2, 2]  # and as setting
    assert text.count(" 90.0 ") == len(names)
    assert "…" not in text


def test_what_is_not_counted_is_named_with_its_reason(make_run, tmp_path):
    make_run("all/a_good")
    make_run("all/b_failed", seed=2, until="search")
    make_run("all/c_killed", seed=3, until="start")
    make_run("all/d_double")
    (tmp_path / "all" / "e_stillborn").mkdir()
    (tmp_path / "all" / "e_stillborn" / "config.yaml").write_text("seed: 5\n")
    comparison = compare_runs([tmp_path / "all", tmp_path / "all" / "a_good"])
    assert [group.seeds for group in comparison.groups] == [(1,)]
    reasons = {Path(run["folder"]).name: run["reason"] for run in comparison.not_counted}
    assert list(reasons) == ["b_failed", "c_killed", "d_double", "e_stillborn"]
    assert reasons["b_failed"] == "not finished: client 2: disk full"
    assert "killed" in reasons["c_killed"]
    assert "same settings and seed" in reasons["d_double"]
    assert "no events.jsonl" in reasons["e_stillborn"]
    assert lacking(printed(print_comparison, comparison), *reasons) == []
    nothing = compare_runs([tmp_path / "all" / "b_failed"])
    assert nothing.groups == ()
    assert "disk full" in printed(print_comparison, nothing)
    assert "disk full" in write_comparison(nothing, tmp_path / "out")[1].read_text()


def test_the_files_agree(make_run, tmp_path):
    folders = [make_run(f"run{seed}", seed=seed, accuracy=0.8 + 0.05 * seed) for seed in (1, 2)]
    comparison = compare_runs([*folders, make_run("other", algorithm="fnas", until="search")])
    paths = write_comparison(comparison, tmp_path / "out")
    assert [path.name[8:] for path in paths] == ["csv", "md", "tex", "json", "html"]
    html = paths[4].read_text(encoding="utf-8")
    assert lacking(html, "87.5 ± 3.5", "disk full", "drawFigure(place, figure") == []
    assert len(html) < 100_000
    (row,) = csv.DictReader(paths[0].read_text().splitlines())
    document = json.loads(paths[3].read_text())
    (group,) = document["groups"]
    central = group["metrics"]["central_accuracy"]
    assert central["values"] == pytest.approx([0.85, 0.9])
    for name in ("mean", "deviation"):
        assert float(row[f"central_accuracy_{name}"]) == pytest.approx(central[name])
    assert row["seeds"] == "1 2"
    assert lacking(paths[1].read_text(), "| 87.5 ± 3.5 |", "disk full") == []
    assert len(document["not_counted"]) == 1


def test_the_epsilon_of_private_runs_has_a_column(make_run, tmp_path):
    folders = [make_run("private", private=True), make_run("plain")]
    folders.append(make_run("seeded", private=True, secure_noise=False, algorithm="fnas"))
    comparison = compare_runs(folders)
    head, rows = comparison.table()
    cells = [row[head.index("epsilon")] for row in rows]
    assert cells == ["5.11", "–", "5.11 (test seed: no privacy)"]
    assert comparison.against == comparison.groups[1].name  # the plain one, where all are level
    paths = write_comparison(comparison, tmp_path / "out")
    rows = csv.DictReader(paths[0].read_text().splitlines())
    told = [(row["epsilon_mean"], row["test_seed"]) for row in rows]
    assert told == [("5.1001", "0"), ("", "0"), ("5.1001", "1")]


def test_differences_are_of_runs_with_the_same_seed(make_run, tmp_path):
    ours, theirs = {1: 0.90, 2: 0.80, 3: 0.85}, {2: 0.75, 3: 0.82, 4: 0.10}
    for name, accuracies in (("fed_darts", ours), ("fnas", theirs)):
        for seed, accuracy in accuracies.items():
            make_run(f"sweep/{name}{seed}", seed=seed, algorithm=name, accuracy=accuracy)
    head, rows = compare_runs([tmp_path / "sweep"], against="fnas").table()
    assert head[2] == "difference from fnas (95 %)"
    half = 12.706 * statistics.stdev([5.0, 3.0]) / math.sqrt(2)  # Student's t of 1 degree
    assert [row[2] for row in rows] == [f"+4.0 ± {half:.1f}", "–"]
    for seed in (1, 2, 3):
        make_run(f"sweep/third{seed}", seed=seed, algorithm="fednas", accuracy=ours[seed] - 0.2)
    comparison = compare_runs([tmp_path / "sweep"])  # against the best
    assert [row[2] for row in comparison.table()[1]] == ["–", "−4.0 ± 12.7", "−20.0 ± 0.0"]
    worse, unclear = comparison.notes[1:3]
    assert worse == "Worse, by its own interval, than fed_darts: fednas."
    assert unclear == "Not shown to differ, as the interval includes 0, from fed_darts: fnas."
    refuses("--against", compare_runs, [tmp_path / "sweep"], against="feathers")
    for folder, data in (("third1", "a"), ("fnas2", "a"), ("fnas3", "")):  # "" of a private one
        emit(tmp_path / "sweep" / folder, "partition", data=data)
    assert compare_runs([tmp_path / "sweep"]).warnings == ()
    emit(tmp_path / "sweep/fnas3", "partition", data="b")
    for changed in (compare_runs([tmp_path / "sweep"], against=name) for name in (None, "fnas")):
        assert (changed.against, changed.notes) == (None, [])
        assert changed.warnings[0].startswith("the data has changed between these runs: no diff")


def test_a_name_has_what_differs_most_first(make_run, tmp_path):
    for algorithm in ("fed_darts", "fnas", "feathers"):
        for channels in (8, 16):
            folder = make_run(f"sweep/{algorithm}_{channels}", algorithm=algorithm)
            with_config(folder, search_space={"channels": channels})
    names = [group.name for group in compare_runs([tmp_path / "sweep"]).groups]
    assert sorted(names)[0] == "feathers, channels=16"
    assert len({*names}) == 6


def test_latex_has_the_table_and_escapes(make_run):
    runs = [make_run("a_1", accuracy=0.9), make_run("b_2", algorithm="fnas", accuracy=0.8)]
    lines = tables.as_latex(compare_runs(runs, against="a_1")).splitlines()
    assert lines[0] == "\\begin{tabular}{lrrrrr}"
    assert lines[2].startswith(r" & test accuracy (\%) & ")
    assert lines[4].startswith(r"a\_1 & 90.0 & ")
    assert lines[5].startswith(r"b\_2 & 80.0 & $-$10.0 (one seed) & ")
    assert lines[-1] == r"\end{tabular}"
    assert all(line.endswith(r"\\") for line in (lines[2], lines[4], lines[5]))


PICTURES = [("pdf", "rounds"), ("svg", "time"), ("png", "traffic")]


@pytest.mark.parametrize(("suffix", "over"), PICTURES)
def test_curves_are_a_picture(make_run, tmp_path, suffix, over):
    pytest.importorskip("matplotlib")
    runs = [make_run(f"run{seed}", seed=seed) for seed in (1, 2)]
    path = tmp_path / f"curves.{suffix}"
    tables.write_curves(runs, path, metric="train_loss", over=over)
    assert path.stat().st_size > 1000
    words = "no run has the metric oddity .* have alpha_entropy, "
    refuses(words, tables.write_curves, runs, path, metric="oddity", over=over)


@pytest.mark.parametrize(("sign", "front"), [(1, [1.0, 3.0]), (-1, [1.0, 2.0])])
def test_the_front_has_what_no_other_beats(sign, front):
    points = [("a", 1.0, 0.5), ("b", 2.0, 0.4), ("c", 3.0, 0.9), ("d", 3.0, 0.8), ("e", 4.0, 0.9)]
    rows = [{"network": name, "latency_ms": x, "test": y} for name, x, y in points]
    found = fronts(rows, ("latency_ms", "epsilon"), "F1", "score", sign=sign)
    (name, figure), *others = found.items()
    assert (name, others) == ("latency_ms", [])  # no epsilon differs
    dots, line = figure["data"]
    assert line["x"] == front
    assert sorted(dots["customdata"]) == ["a", "b", "c", "d", "e"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "latency (ms)"


def with_resamples(folder, values, **config):
    """Give a run's test score resamples, and its data set other settings."""

    def resampled(event):
        if event["event"] == "evaluated":
            event["central"] |= {"resamples": {"accuracy": values}}
            event["central"]["intervals"] = {"accuracy": [0.8, 0.97]}

    return with_config(with_events(folder, resampled), dataset=config)


INTERVALS = [
    ("patients.csv", "+10.0 (+8.0 to +12.0)", "test records"),
    ("others.csv", "+10.0 (one seed)", ""),
]


@pytest.mark.parametrize(("root", "shown", "of"), INTERVALS)
def test_one_seed_has_the_interval_of_its_test_records_or_none(make_run, tmp_path, root, shown, of):
    plain = with_resamples(make_run("plain"), [0.88 + 0.001 * k for k in range(41)], root=root)
    private = make_run("eps8", accuracy=0.8, algorithm="fnas")
    with_resamples(private, [0.8] * 41, root="patients.csv")
    comparison = compare_runs([plain, private], against="eps8")
    assert [row[2] for row in comparison.table()[1]] == [shown, "–"]
    assert [(group.score.low, group.score.high) for group in comparison.groups] == [(0.8, 0.97)] * 2
    (row, other) = csv.DictReader(tables.as_csv(comparison).splitlines())
    assert (row["group"], other["group"]) == ("plain", "eps8")
    assert float(row["difference_mean"]) == pytest.approx(0.1)
    assert (row["difference_of"], other["difference_of"]) == (of, "")
    assert (row["difference_low"] == "") == (not of)
    page = write_comparison(comparison, tmp_path / "out")[-1].read_text()
    for text in (printed(print_comparison, comparison), page, tables.as_markdown(comparison)):
        assert ("says nothing of other seeds" in text) == bool(of)
        assert ("One seed alone tells nothing about chance" in text) == (not of)


@pytest.mark.parametrize(("auroc", "accuracy"), [(0.98, 0.31), (0.85, 0.05), (0.85, 0.31)])
def test_accuracy_that_disagrees_with_auroc_is_a_warning(auroc, accuracy):
    central = {"auroc": auroc, "accuracy": accuracy, "majority": 0.1}
    said = sentence("disagrees", Run(Path(), {}, [{"event": "evaluated", "central": central}]))
    assert said.startswith("Attention") == ((auroc, accuracy) != (0.85, 0.31))
    assert ("most frequent class alone (10.0 %)" in said) == (accuracy < 0.1)


@pytest.mark.parametrize("other", [{}, {"place": "inline"}, {"tau": 0.09}, {"size": 8}])
def test_sites_with_other_classes_of_images_are_told_of_gradients(other):
    of = {"place": "deployment", "tau": 0.1, "size": 16, **other}
    derived = {"event": "derived", "network": {"input_shape": [1, 16, of["size"]]}}
    events = [{"event": "partition", "association": of["tau"]}, derived]
    run = Run(Path(), {"runtime": {"name": of["place"]}, "aggregate": {"name": "mean"}}, events)
    assert ("retrain.exchange=gradients" in sentence("attention", run)) == (not other)


RELEASED = [({"error": 0.0412, "auroc": None}, "tells no AUROC, as noise gives that")]
RELEASED += [({"error": 0.01, "auroc": 0.8}, ""), ({}, "its counts are hardly more than noise")]


@pytest.mark.parametrize(("released", "told"), RELEASED)
def test_a_booked_release_of_scores_that_tells_nothing_is_named(released, told):
    planned = {"event": "privacy", "schedule": [{"kind": "scores"}, {}], "clients": []}
    run = Run(Path(), {}, [planned, {"event": "evaluated", "released": released}])
    said = sentence("attention", run)
    assert (told in said, bool(said)) == (True, bool(told))


def test_what_privacy_costs_is_one_sentence(make_run):
    plain = with_resamples(make_run("plain"), [0.88 + 0.001 * k for k in range(41)])
    private = with_resamples(make_run("eps8", accuracy=0.8, private=True), [0.8] * 41)
    shutil.copytree(private, private / "baselines" / "linear")
    other = {"fractions": {"train": 0.5}, "target_range": [0, 9], "name": "csv"}  # of same records
    with_config(private, dataset=other)
    with_config(plain, dataset=dict.fromkeys(other) | {"name": "csv"})
    comparison = compare_runs([plain, private])
    assert comparison.table()[0][2] == "difference from plain (95 %)"
    linear = comparison.table()[0].index("clients' linear model, accuracy (%)")
    assert [row[linear] for row in comparison.table()[1]] == [DASH, "80.0"]
    assert sentence("costs_of_privacy", comparison) == (
        "Privacy at epsilon 5.11 costs 10.0 points of test accuracy: 80.0 % (eps8) after 90.0 % "
        "(plain), more than chance explains."
    )
    with_resamples(private, [0.7 + 0.01 * k for k in range(41)])
    text = sentence("costs_of_privacy", compare_runs([plain, private]))
    assert text.endswith("after 90.0 % (plain), a loss that chance can explain.")
    with_config(plain, algorithm={"name": "fed_darts", "beta_decay": 5.0})
    with_config(private, algorithm={"name": "fedavg", "beta_decay": 0.0})
    assert [group.name for group in compare_runs([plain.parent]).groups] == ["fedavg", "fed_darts"]
    text = sentence("costs_of_privacy", compare_runs([plain, private]))
    assert text.endswith("can explain; these runs also differ in algorithm.")
    assert (compare_runs([plain]).against, compare_runs([private]).against) == (None, None)
    assert sentence("costs_of_privacy", compare_runs([plain])) == ""
    config = plain / "config.yaml"
    config.write_text(config.read_text().replace("clients: 3", "clients: 2"))  # in other hands
    assert compare_runs([plain, private]).against is None
    assert sentence("costs_of_privacy", compare_runs([plain, private])) == ""

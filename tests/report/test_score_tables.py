"""The scores of a run in its report and its card."""

from html import unescape

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fednas_flwr import load
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.pipeline.feasible import check_buildable
from fednas_flwr.report.score_tables import score_tables
from fednas_flwr.runs.numbers import read_run

from .conftest import lacking


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    """A run on 900 patients of whom the alphabetically first class is the rare one."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(900, 3))
    ill = x[:, 0] * x[:, 1] + x[:, 2] + rng.normal(size=900) > 1.5
    table = pd.DataFrame(x.round(3), columns=["a", "b", "c"])
    table["state"] = np.where(ill, "dead", "well")
    root = tmp_path_factory.mktemp("patients")
    table[:700].to_csv(root / "train.csv", index=False)
    table[700:].to_csv(root / "test.csv", index=False)
    done = finished_run(
        *("dataset=csv", f"dataset.root={root}", "evaluation.positive=dead"),
        "search_space=mlp_small",
        *("search_space.channels=16", "retrain.channels=16", "rounds=1", "retrain.rounds=6"),
        *("clients=2", "stages=[search,retrain,evaluate,export]"),
    )
    done.test = table[700:]
    return done


def test_the_scores_are_those_of_the_positive_class(run):
    (evaluated,) = (e for e in run.events if e["event"] == "evaluated")
    central = evaluated["central"]
    found = load(run.folder).predict(run.test)
    shares, ill = found.probabilities[:, 0], (run.test["state"] == "dead").to_numpy()
    assert central["positive"] == 0
    assert central["auroc"] == pytest.approx(roc_auc_score(ill, shares), abs=1e-3)
    precision = average_precision_score(ill, shares)
    assert central["average_precision"] == pytest.approx(precision, abs=1e-2)
    called = shares >= central["threshold"]
    assert central["sensitivity"] == pytest.approx(called[ill].mean())
    assert central["specificity"] == pytest.approx((~called[~ill]).mean())
    for name, (low, high) in central["intervals"].items():
        assert low <= central[name if name != "log_loss" else "loss"] <= high
    assert {"linear", "trees"} <= evaluated.keys()
    assert evaluated["trees"]["auroc"] > 0.6
    for client in evaluated["clients"]:
        assert {"auroc", "average_precision", "sensitivity", "specificity"} <= client.keys()


def test_report_and_card_show_them(run):
    for name in ("report.html", "MODEL_CARD.md"):
        text = (run.folder / name).read_text()
        assert "<class>" not in text
        parts = ("of the class dead (set by evaluation.positive=<class>)", "95 % interval")
        assert lacking(unescape(text), *parts, "Expected calibration error") == []
        assert "boosted trees" in text.lower()
    assert len(score_tables(read_run(run.folder))) == 4
    report = (run.folder / "report.html").read_text()
    command = f"fednas predict {run.made_in.resolve().name} patients.csv"
    assert lacking(report, "Use this model", command) == []
    assert (run.folder / "model.onnx").is_file()


def test_a_class_that_does_not_exist_is_refused_before_the_run(compose_config):
    with pytest.raises(ConfigError, match=r"positive=3 is unknown: choose one of 0, 1, 2") as told:
        check_buildable(compose_config("evaluation.positive=3"))
    assert str(told.value).startswith("evaluation.positive=3")
    check_buildable(compose_config("evaluation.positive=2"))

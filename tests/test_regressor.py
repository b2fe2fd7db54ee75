"""The estimator of a numeric target."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path

import pytest
from sklearn.datasets import load_diabetes
from sklearn.utils.estimator_checks import check_estimator

from fednas_flwr import FedRegressor
from fednas_flwr.settings.data_settings import CSV

HAS_TASK = any(field.name == "task" for field in fields(CSV))
pytestmark = pytest.mark.skipif(not HAS_TASK, reason="dataset.task does not exist yet")
TINY = ["algorithm.draws=2", "retrain.rounds=4"]


def test_a_number_is_predicted_in_its_own_unit(tmp_path: Path) -> None:
    table = load_diabetes(as_frame=True).frame
    own = ["algorithm.draws=2", f"dataset.cache={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    model = FedRegressor(clients=3, preset="fast", settings=own).fit(table, label="target")
    assert model.predict(table).dtype == float
    assert model.score(table, table["target"]) > 0.2  # R2; a linear model has .5
    assert {"bmi", "s5"} & {*model.importance(table, label="target").index[:3]}


@pytest.mark.run
def test_scikit_learns_own_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNAS_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            FedRegressor(preset="fast", settings=TINY),
            expected_failed_checks={
                "check_fit2d_1feature": "ten records are too few for batch norm"
            },
            on_skip=None,
        )
    assert len([one for one in results if one["status"] == "passed"]) > 45

"""``--with <file.py>``: names of one's own on the command line."""

import numpy as np
import pytest

from fednas_flwr import register_metric
from fednas_flwr.cli import VARIABLE, _run, main

from .processes import told
from .refusals import refuses

MINE = """
import numpy as np
from fednas_flwr import register_data_set, register_metric

rng = np.random.default_rng(0)
y = rng.integers(0, 2, 90)
x = (rng.integers(0, 120, (90, 8, 8)) + 100 * y[:, None, None]).astype("uint8")
arrays = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
register_data_set("scans", arrays)
register_metric("Brier", lambda p, y: float(np.mean((p[:, 1] - y) ** 2)))
"""
RUN = (
    *("dataset=scans", "algorithm=fedavg", "algorithm.network=linear", "clients=2"),
    *("stages=[retrain,evaluate,export]", "retrain.rounds=1"),
)


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch, only_here):
    monkeypatch.setenv(VARIABLE, "")
    yield
    _run.cache_clear()


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sweep", "ray"])
def test_other_processes_learn_of_what_is_ones_own(mine, tmp_path, where):
    joblib = ("-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    own = joblib if where == "sweep" else ("runtime=ray",)
    own = (*own, f"dataset.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}")
    said = told("-m", "fednas_flwr", "run", "--with", mine, *RUN, *own)
    assert ("2 of 2 jobs completed" if where == "sweep" else "run completed") in said


@pytest.mark.run
@pytest.mark.parametrize("score", [lambda p, y: np.nan, lambda p, y: p[:, 99].mean()])
def test_a_score_that_fails_ends_the_run_in_one_sentence(score, mine, tmp_path, capsys):
    register_metric("wrong", score)
    cache, folder = f"dataset.cache={tmp_path / 'cache'}", tmp_path / "run"
    assert main(["run", "--with", str(mine), *RUN, cache, f"run_dir={folder}"]) != 0
    assert "the metric wrong of your own" in capsys.readouterr().err
    assert (folder / "model.onnx").exists()
    refuses("metric=wrong exists", register_metric, "wrong", score)
    refuses("metric=AUROC exists", register_metric, "AUROC", score)

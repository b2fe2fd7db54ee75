"""The threshold of a model is a part of it: every way to ask it gives the same labels."""

from html import unescape

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from fednas_flwr import FedClassifier, load
from fednas_flwr.runs.numbers import read_run

LINEAR = ("algorithm=fedavg", "algorithm.network=linear", "dataset=csv", "dataset.label=died")
LINEAR += ("clients=2", "retrain.rounds=6", "stages=[retrain,evaluate,export]")
PRIVATE = ("privacy=dp", "privacy.epsilon=200", "privacy.scores_error=.005")
PRIVATE += ("dataset.ranges={age: [20, 90], pressure: [60, 180]}",)
PRIVATE += ('dataset.class_names=["no","yes"]',)
NAMED = ("evaluation.positive=no",)


def patients(number, seed=0):
    """Patients, 12 % of whom die, mostly the old ones with a high pressure."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"age": rng.integers(20, 90, number).astype(float)})
    table["pressure"] = rng.normal(120, 15, number).round(1)
    risk = table["age"] / 20 + table["pressure"] / 15 + rng.normal(0, 1.2, number)
    table["died"] = np.where(risk > risk.quantile(0.88), "yes", "no")
    return table


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("patients")
    patients(900).to_csv(root / "train.csv", index=False)
    patients(300, seed=1).to_csv(root / "test.csv", index=False)
    return root


@pytest.mark.parametrize("more", [(), PRIVATE, NAMED], ids=["plain", "private", "named"])
def test_every_route_gives_the_same_labels(finished_run, data, more, tmp_path, prints):
    run = finished_run(*LINEAR, f"dataset.root={data}", *more)
    positive, other = ("no", "yes") if more == NAMED else ("yes", "no")
    file, table = data / "test.csv", pd.read_csv(data / "test.csv")
    evaluated = run.the("evaluated")
    central, threshold = evaluated["central"], evaluated["threshold"]
    shares = load(run.folder).predict(file).probabilities[:, central["positive"]]
    labels = np.where(shares >= np.float32(threshold), positive, other)
    assert more == NAMED or 0 < threshold < 0.45  # and it decides:
    assert more == NAMED or 0 < (labels != np.where(shares >= 0.5, "yes", "no")).mean()

    exported = tmp_path / "exported"
    prints("export", run.folder, "--to", exported)
    for folder in (run.folder, exported):
        output = tmp_path / "found.csv"
        printed = prints("predict", folder, file, "--output", output)
        assert (pd.read_csv(output)["label"] == labels).all()
        assert f"Scores at a threshold of {threshold:g}" in printed
        for name in ("f1", "sensitivity", "specificity"):
            assert f" {central[name]:.3f} " in printed
        assert printed.count(f" {100 * central['accuracy']:.1f} %") >= 2  # above and in the table
        assert load(folder).predict(file).labels == labels.tolist()
        assert load(folder).predict(table.drop(columns="died")).labels == labels.tolist()
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        fed = {name: table[[name]].to_numpy(np.float32) for name in ("age", "pressure")}
        assert (session.run(["label"], fed)[0] == labels).all()
        halves = load(folder).predict(table, threshold=0.5).labels
        assert halves == np.where(shares >= 0.5, positive, other).tolist()

    died, called = (table["died"] == positive).to_numpy(), labels == positive
    assert central["accuracy"] == (labels == table["died"]).mean()
    assert central["sensitivity"] == called[died].mean()
    assert central["specificity"] == (~called[~died]).mean()
    of_class = [int((~called[died]).sum()), int(called[died].sum())]
    assert central["confusion"][central["positive"]] == of_class[:: -1 if more == NAMED else 1]
    assert central["auroc"] == pytest.approx(roc_auc_score(died, shares), abs=1e-3)
    assert central["loss"] == pytest.approx(log_loss(died, shares), abs=1e-5)
    assert central["loss"] < log_loss(died, np.full(len(died), died.mean()))
    precision = average_precision_score(died, shares)
    assert central["average_precision"] == pytest.approx(precision, abs=1e-2)
    for name, (low, high) in central["intervals"].items():
        assert low <= central[name if name != "log_loss" else "loss"] <= high
    said = [f"The label is {positive} from a probability of {threshold:.3g} on", "95 % interval"]
    said.append("Expected calibration error")
    said += ["of the class no (set by evaluation.positive=<class>)"] * (more == NAMED)
    for name in ("report.html", "MODEL_CARD.md"):
        text = unescape((run.folder / name).read_text())
        assert [words for words in said if words not in text] == []
        assert more == PRIVATE or "boosted trees" in text.lower()
    for client in evaluated["clients"] if more != PRIVATE else ():
        assert {"auroc", "average_precision", "sensitivity", "specificity"} <= client.keys()
    command = f"fednas predict {run.made_in.resolve().name} patients.csv"
    assert command in (run.folder / "report.html").read_text()


def test_the_estimator_decides_by_the_threshold(tmp_path):
    settings = ["algorithm.draws=2", "retrain.rounds=4", f"dataset.cache={tmp_path / 'cache'}"]
    settings += ["search_space.skip=linear"]
    model = FedClassifier(clients=2, preset="fast", settings=[*settings, f"run_dir={tmp_path}/r"])
    table = patients(600)
    model.fit(table, label="died")
    evaluated = read_run(model.run_folder).last("evaluated")
    threshold, central = evaluated["threshold"], evaluated["central"]
    assert not {"without_skip", "without_cells"} & {*central}  # which no threshold was chosen for
    shares = model.predict_proba(table)[:, 1].astype(np.float32)
    labels = np.where(shares >= np.float32(threshold), "yes", "no")
    assert (model.predict(table) == labels).all()
    assert (labels != np.where(shares >= 0.5, "yes", "no")).any()
    assert load(model.run_folder).predict(table).labels == labels.tolist()


def test_compared_by_accuracy_the_most_probable_class_is_the_label(finished_run, data):
    run = finished_run(*LINEAR, f"dataset.root={data}", "evaluation.metric=accuracy")
    evaluated = run.the("evaluated")
    assert evaluated["threshold"] is None
    found = load(run.folder).predict(data / "test.csv")
    assert found.accuracy == evaluated["central"]["accuracy"]
    is_second = found.probabilities.argmax(1) == 1
    assert (np.array(found.labels) == "yes").tolist() == is_second.tolist()
    assert "The label is the most probable class" in (run.folder / "MODEL_CARD.md").read_text()


def test_pooled_models_are_scored_by_their_own_most_probable_class(finished_run, data):
    simpler = (*LINEAR, f"dataset.root={data}", "dataset.linear_baseline=true")
    at_threshold = finished_run(*simpler, "evaluation.metric=auroc")
    most_probable = finished_run(*simpler, "evaluation.metric=accuracy")
    first, second = (run.named("evaluated")[0] for run in (at_threshold, most_probable))
    assert first["threshold"] is not None
    assert first["central"]["accuracy"] != second["central"]["accuracy"]
    assert (first["linear"], first["trees"]) == (second["linear"], second["trees"])


def test_a_large_site_takes_part_in_the_choice_with_half_of_the_weight(run_inline, tmp_path):
    """The model predicts its class, which nobody else has."""
    sites = np.repeat(["large", "small", "other"], [80, 20, 20])
    table = pd.DataFrame({"x": np.arange(120) % 2, "site": sites, "y": sites == "large"})
    table.to_csv(tmp_path / "t.csv", index=False)
    data = f"dataset=csv dataset.root={tmp_path / 't.csv'} dataset.label=y partition=column"
    model = "algorithm=fedavg algorithm.network=linear stages=[retrain,evaluate] clients=3"
    split = "dataset.fractions={train:.3,validation:.5,test:.2} dataset.server_test=false"
    rounds = "retrain.rounds=5 retrain.evaluate_every=5 partition.column=site"
    run = run_inline(*f"{data} {model} {split} {rounds} evaluation.metric=accuracy".split())
    splits, evaluated = run.the("partition")["splits"], run.the("evaluated")
    large, *others = (split["validation"] for split in splits)
    # It weighs half as much as its records: all others together have 40 where it has 80.
    assert evaluated["validation"][0] == pytest.approx(large / (large + 2 * sum(others)))
    assert [one["num_examples"] for one in evaluated["clients"]] == [one["test"] for one in splits]
    (warning,) = (event["message"] for event in run.named("warning"))
    assert "held to 0.5 of an average (runtime.largest_share)" in warning

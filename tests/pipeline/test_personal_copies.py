"""Copies that sites keep for themselves: the shrinkage of gains, and whole runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr import load
from fednas_flwr.data.loaders import assign_splits
from fednas_flwr.data.prepared import make_data
from fednas_flwr.pipeline.evaluation import compared, shrunken
from fednas_flwr.report import score_tables
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.numbers import Run, read_run

GAIN = st.lists(st.floats(-1, 1).map(lambda gain: round(gain, 3)), min_size=1, max_size=20)


def told(records):
    return {
        site: (sum(gains), sum(gain**2 for gain in gains), len(gains))
        for site, gains in enumerate(records)
    }


@given(st.lists(GAIN, min_size=1, max_size=6))
def test_shrunken_gains_are_those_of_the_equations(records):
    """DerSimonian and Laird, record by record; each between a site's own gain and the mean's."""
    own = [sum(gains) / len(gains) for gains in records]
    residuals = [(g - mean) ** 2 for gains, mean in zip(records, own, strict=True) for g in gains]
    variance = max(sum(residuals) / max(1, len(residuals) - len(records)), 1e-12)
    weights = [len(gains) / variance for gains in records]

    def mean(weights):
        return sum(w * m for w, m in zip(weights, own, strict=True)) / sum(weights)

    q = sum(w * (m - mean(weights)) ** 2 for w, m in zip(weights, own, strict=True))
    scale = sum(weights) - sum(w**2 for w in weights) / sum(weights)
    between = max(0, (q - len(own) + 1) / scale) if len(own) > 1 else 0
    common = mean([1 / (1 / w + between) for w in weights])
    pairs = zip(weights, own, strict=True)
    expected = [(between * m + common / w) / (between + 1 / w) for w, m in pairs]
    found = shrunken(told(records))
    assert list(found) == list(range(len(records)))
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)


def test_a_site_of_few_records_follows_the_others_and_one_of_many_itself():
    rng = np.random.default_rng(0)
    records = [rng.normal(mean, 1, 2000) for mean in (0.5, 0.6, 0.4, -0.5)]
    found = shrunken(told([*records, np.array([-0.3, -0.1])]))
    assert [gain > 0 for gain in found.values()] == [True, True, True, False, True]
    assert shrunken({}) == {}


def test_what_was_found_without_validation_records_holds_for_the_network_with_them():
    answers = [{"client": 0, "gain": [1.0, 1.0, 2]}, {"client": 1}]
    assert [one["keeps"] for one in compared(answers, [])] == [True, False]
    known = [{"client": 0, "gain": -0.1}, {"client": 1, "gain": 0.2}]
    assert [one["keeps"] for one in compared(answers, known)] == [False, True]


PERSONAL = ("algorithm=fedavg", "algorithm.network=linear", "partition=dirichlet")
PERSONAL += ("partition.alpha=.3", "evaluation.personalised=true")
PERSONAL += ("stages=[retrain,evaluate,export]", "retrain.rounds=1")
PERSONAL += ("dataset.fractions={train: 0.4, validation: 0.3, test: 0.3}",)


def test_gains_are_of_records_that_neither_network_nor_copy_was_trained_on(run_inline, answers):
    asked = []

    def recording(honest, client, request, settings):
        asked.append(settings)
        return honest(client, request, settings)

    for action in ("evaluate.personalised", "train.weights"):
        answers(action, recording)
    done = run_inline(*PERSONAL, "retrain.evaluate_every=1")
    compared_by = [one.local for one in asked if getattr(one, "compares", False)]
    kept = [one.local for one in asked if not hasattr(one, "compares")]
    assert {(one.split, one.amount.epochs) for one in compared_by} == {("train", 5)}
    lr = done.config.retrain.weights.lr / 10
    assert [one.weights.lr for one in compared_by] == pytest.approx([lr] * len(compared_by))
    assert kept[-1] == compared_by[0]
    assert {one.split for one in kept} == {"train"}


def test_a_copy_that_is_kept_has_the_accuracy_that_is_told(quick_run):
    done = quick_run(*PERSONAL, "retrain.evaluate_every=1")
    copies = done.the("evaluated")["copies"]
    keeping = [one["client"] for one in copies if one["keeps"]]
    assert keeping == done.the("personalised")["clients"] != []
    assert all((one["gain"] > 0) == one["keeps"] for one in copies)
    prepared, parts = make_data(done.config)
    splits = assign_splits(prepared.train.ids, **done.config.dataset.division)
    for client in keeping:
        rows = parts[client][splits[parts[client]] == 2]
        model = load(done.folder / "copies" / f"client_{client}")
        images = prepared.train.features[torch.as_tensor(rows)].numpy()
        labels = np.array(model.predict(images).labels)
        names = np.array(model.class_names)[prepared.train.labels[torch.as_tensor(rows)].numpy()]
        assert (labels == names).mean() == pytest.approx(copies[client]["accuracy"])
    page, card = (done.folder / name for name in ("report.html", "MODEL_CARD.md"))
    assert "keep a copy that they have fine-tuned" in card.read_text()
    assert "fine-tuned copy" in page.read_text()


def test_a_site_that_fails_has_no_copy_and_the_run_its_model(run_inline, answers):
    failed = []

    def failing(honest, client, request, asked):
        if request.header.stage == "evaluate" and not failed:
            failed.append(client.index)
            raise ValueError("the disk is full")
        return honest(client, request, asked)

    answers("train.weights", failing)
    done = run_inline(*PERSONAL, "retrain.evaluate_every=1", "runtime.quorum=1")
    assert "the disk is full" in done.the("warning")["message"]
    keeping = {one["client"] for one in done.the("evaluated")["copies"] if one["keeps"]}
    having = keeping - {*failed}
    assert {*done.the("personalised")["clients"]} == having
    *_, rows = score_tables.client_table(read_run(done.folder))
    assert {int(row[0]) for row in rows if row[-1].endswith(", kept")} == having
    said = sentence("copies", read_run(done.folder))
    assert said.startswith(f"{len(having)} of 3 clients keep a copy")
    assert done.the("run_finished")["status"] == "completed"


def test_a_gain_over_more_records_than_a_client_has_is_not_counted(run_inline, lies):
    def boasting(answer):
        if "gain" in answer.properties:
            answer.properties["gain"] = [1e4, 1e4, 10**6]
        return answer

    lies("evaluate.personalised", boasting)
    first, *others = run_inline(*PERSONAL, "retrain.evaluate_every=1").the("evaluated")["copies"]
    assert (first["client"], first["gain"], first["keeps"]) == (0, None, False)
    assert all(one["gain"] is not None for one in others)


def test_copies_of_numbers_have_their_error_and_those_that_no_run_keeps_no_folder():
    told = {"client": 0, "rmse": 4.0, "loss": 1.0, "num_examples": 9}
    copies = [{**told, "rmse": 3.0, "gain": 0.1, "keeps": True}]
    partition = {"event": "partition", "number": True}
    evaluated = {"event": "evaluated", "clients": [{**told, "r2": 0.5}], "copies": copies}
    run = Run(folder=Path(), config={}, events=[partition, evaluated])
    _, head, ((*_, error),) = score_tables.client_table(run)
    assert (head[-1], error) == ("RMSE of fine-tuned copy", "3")
    said = sentence("copies", run)
    assert said.startswith("1 of 1 clients would keep a copy that they have fine-tuned, since")
    assert "RMSE on test records is 3, with the shared network 4" in said
    assert "folder" not in said


def test_without_held_out_records_no_copy_is_kept_and_that_is_said(finished_run):
    done = finished_run(*PERSONAL)
    assert "copies" not in done.the("evaluated")
    assert "Whether a client does better" in (done.folder / "MODEL_CARD.md").read_text()
    assert not (done.folder / "copies").exists()

"""Copies that sites keep for themselves: the shrinkage of gains, and whole runs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr import load
from fednas_flwr.data.loaders import assign_splits
from fednas_flwr.pipeline import stages
from fednas_flwr.pipeline.personal_copies import compared, shrunken

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
    expected = [
        (between * m + common / w) / (between + 1 / w) for w, m in zip(weights, own, strict=True)
    ]
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


PERSONAL = (
    *("algorithm=fedavg", "algorithm.network=linear", "partition=dirichlet", "partition.alpha=.3"),
    *("evaluation.personalised=true", "stages=[retrain,evaluate,export]", "retrain.rounds=1"),
    "dataset.fractions={train: 0.4, validation: 0.3, test: 0.3}",
)


def test_a_copy_that_is_kept_has_the_accuracy_that_is_told(finished_run):
    done = finished_run(*PERSONAL, "retrain.evaluate_every=1")
    copies = done.the("evaluated")["copies"]
    keeping = [one["client"] for one in copies if one["keeps"]]
    assert keeping == done.the("personalised")["clients"] != []
    assert all((one["gain"] > 0) == one["keeps"] for one in copies)
    prepared, parts = stages.make_data(done.config)
    key, fractions = done.config.dataset.division.values()
    for client in keeping:
        rows = parts[client]
        rows = rows[assign_splits(prepared.train.ids[rows], key=key, fractions=fractions) == 2]
        model = load(done.folder / "copies" / f"client_{client}")
        images = prepared.train.features[torch.as_tensor(rows)].numpy()
        labels = np.array(model.predict(images).labels)
        names = np.array(model.class_names)[prepared.train.labels[torch.as_tensor(rows)].numpy()]
        assert (labels == names).mean() == pytest.approx(copies[client]["accuracy"])
    page, card = (done.folder / name for name in ("report.html", "MODEL_CARD.md"))
    assert "keep a copy that they have fine-tuned" in card.read_text()
    assert "fine-tuned copy" in page.read_text()


def test_without_held_out_records_no_copy_is_kept_and_that_is_said(finished_run):
    done = finished_run(*PERSONAL)
    copies = done.the("evaluated")["copies"]
    assert {(one["gain"], one["keeps"]) for one in copies} == {(None, False)}
    assert "Whether a client does better" in (done.folder / "MODEL_CARD.md").read_text()
    assert not (done.folder / "copies").exists()

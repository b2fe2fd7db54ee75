"""What a network relies on, of networks that are known."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fednas_flwr.data.loaders import Split
from fednas_flwr.data.records import Column, Records
from fednas_flwr.models.explanation import FEWEST, PERMUTATIONS, importance, mistakes
from fednas_flwr.search.objective import Objective, Regression
from fednas_flwr.settings.names import NUMBER_METRICS

NUMBER = 600
KIND = Column("kind", "category", ("a", "b", "c"))
SCHEMA = (Column("used"), Column("twin"), Column("idle", indicator=True), KIND)
MEAN, STD = (10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


class Known(torch.nn.Module):
    """Class 1 where ``used`` is above its mean, surer for the kind c."""

    asked = 0

    def forward(self, x):
        self.asked += len(x) // NUMBER
        return torch.stack([torch.zeros(len(x)), 3 * x[:, 0] + 2 * x[:, 6]], 1)


def table():
    x = torch.randn(NUMBER, 7, generator=torch.Generator().manual_seed(0))
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]  # goes with what is used, and is not used
    x[:, 3] = 0
    x[:, 4:] = torch.nn.functional.one_hot(torch.arange(NUMBER) % 3, 3).float()
    labels = (x[:, 0] > 0).long()
    x[:, 0] = 2 * x[:, 0] + 10
    return Split(x, labels, torch.arange(NUMBER), MEAN, STD), labels


def explained(metric="accuracy", sites=None, network=None):
    split, _ = table()
    given = np.empty(0) if sites is None else sites
    how = {"objective": Objective(), "metric": metric, "sites": given, "seed": 0}
    return importance((network or Known()).eval(), split, SCHEMA, **how)


@pytest.mark.parametrize(("most", "times"), [(4000, PERMUTATIONS), (28, 7), (3, FEWEST)])
def test_the_unshuffled_table_is_computed_once(most, times, monkeypatch):
    """And others so often that a wide table takes no hour."""
    monkeypatch.setattr("fednas_flwr.models.explanation.MOST_PASSES", most)
    network = Known()
    effects = sum(len(effect["x"]) for effect in explained(network=network)["effects"])
    assert network.asked == 1 + times * len(SCHEMA) + effects
    at_once = explained()
    monkeypatch.setattr("fednas_flwr.models.explanation.MOST_VALUES", 2 * 7 * NUMBER)
    assert explained() == at_once


def test_a_table_of_categories_alone_is_explained():
    split, _ = table()
    only = replace(split, features=split.features[:, 4:], mean=(0.0,) * 3, std=(1.0,) * 3)
    how = {"objective": Objective(), "metric": "accuracy", "sites": np.empty(0), "seed": 0}
    found = importance(torch.nn.Linear(3, 2).eval(), only, (KIND,), **how)
    assert ([row["name"] for row in found["columns"]], found["correlated"]) == (["kind"], [])


@pytest.mark.parametrize("metric", ["accuracy", "auroc", "average_precision", "f1", "log_loss"])
def test_only_what_the_network_reads_is_important(metric):
    by_name = {column["name"]: column for column in explained(metric)["columns"]}
    assert set(by_name) == {"used", "twin", "idle", "kind"}
    assert by_name["used"]["drop"] > 0.2
    low, high = by_name["used"]["interval"]
    assert 0 < low < by_name["used"]["drop"] < high
    assert by_name["twin"] == {"name": "twin", "drop": 0.0, "interval": [0.0, 0.0]}
    assert by_name["idle"]["interval"] == [0.0, 0.0]


@pytest.mark.parametrize("metric", NUMBER_METRICS)
def test_of_numbers_too_what_the_network_reads_matters_most(metric):
    x = torch.randn(NUMBER, 2, generator=torch.Generator().manual_seed(0))
    split = Split(x, 10 * x[:, 0], torch.arange(NUMBER), (0.0, 0.0), (1.0, 1.0))
    network = torch.nn.Linear(2, 1, bias=False)
    network.weight.data = torch.tensor([[10.0, 0.0]])
    how = {"objective": Regression(target=(0.0, 1.0)), "sites": np.empty(0), "seed": 0}
    found = importance(network.eval(), split, (Column("a"), Column("b")), metric=metric, **how)
    first, last = found["columns"]
    assert (first["name"], last["drop"]) == ("a", 0.0)
    assert first["drop"] > 1


def test_scores_are_those_of_the_resampled_records(monkeypatch):
    """Of no record at all there is no score, and so no drop."""
    none = torch.zeros(PERMUTATIONS, NUMBER).double()
    monkeypatch.setattr("fednas_flwr.models.explanation.resampled", lambda *_: none)
    assert explained()["columns"] == []


def test_columns_that_go_together_are_named():
    ((a, b, correlation),) = explained()["correlated"]
    assert {a, b} == {"used", "twin"}
    assert correlation > 0.9


def test_values_are_shuffled_within_a_site():
    """Where the column tells nothing within each site, shuffling there changes nothing."""
    split, labels = table()
    constant = Split(split.features.clone(), labels, split.rows, MEAN, STD)
    constant.features[:, 0] = 10 + 4 * labels - 2
    known = {"objective": Objective(), "metric": "accuracy", "seed": 0}
    within, across = (
        importance(Known().eval(), constant, SCHEMA, sites=sites, **known)["columns"]
        for sites in (labels.numpy().astype(str), np.empty(0))
    )
    (inside,) = (c for c in within if c["name"] == "used")
    (outside,) = (c for c in across if c["name"] == "used")
    assert inside["drop"] == 0.0
    assert outside["drop"] > 0.3


def test_effects_are_in_the_units_of_the_column():
    split, _ = table()
    effects = {effect["name"]: effect for effect in explained()["effects"]}
    used = effects["used"]
    assert used["x"] == sorted(used["x"])
    assert 6 < used["x"][0] < 8  # 1.6 deviations of 2 below the mean of 10
    assert used["y"] == sorted(used["y"])
    changed = split.features.clone()
    changed[:, 0] = used["x"][3]
    x = (changed - torch.tensor(MEAN)) / torch.tensor(STD)
    assert used["y"][3] == pytest.approx(float(Known()(x).softmax(1)[:, 1].mean()), abs=1e-3)
    assert effects["kind"]["x"] == ["a", "b", "c"]
    assert effects["kind"]["y"][0] == effects["kind"]["y"][1] < effects["kind"]["y"][2]
    assert effects["idle"]["y"] == pytest.approx([effects["idle"]["y"][0]] * 11)


def test_the_surest_mistakes_come_first_and_are_the_images():
    images = torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8)
    labels = torch.zeros(20, dtype=torch.int64)
    logits = torch.zeros(20, 3)
    logits[:, 0] = 5  # right
    for row, sure in ((4, 6.0), (7, 9.0), (11, 7.0)):
        logits[row, 2] = sure
    ids = np.array([str(i) for i in range(20)])
    found = mistakes(Records(images, labels, ids, ("cat", "dog", "owl")), logits, labels)
    assert [one["predicted"] for one in found] == ["owl"] * 3
    assert {one["true"] for one in found} == {"cat"}
    sure = [one["probability"] for one in found]
    assert sure == sorted(sure, reverse=True)
    first = np.asarray(Image.open(io.BytesIO(base64.b64decode(found[0]["png"]))))
    assert (first == images[7, 0].numpy()).all()


def test_large_and_many_mistakes_are_cut():
    images = torch.zeros(30, 3, 100, 60, dtype=torch.uint8)
    labels, logits = torch.zeros(30, dtype=torch.int64), torch.tensor([[0.0, 1.0]] * 30)
    records = Records(images, labels, np.array([str(i) for i in range(30)]), ("a", "b"))
    found = mistakes(records, logits, labels)
    assert len(found) == 12
    assert Image.open(io.BytesIO(base64.b64decode(found[0]["png"]))).size == (29, 48)

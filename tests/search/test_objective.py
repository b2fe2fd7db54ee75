"""Losses against log-softmax by hand, scores against counts of records and of pairs."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

import fednas_flwr
from fednas_flwr.search.objective import CLASSIFICATION, Objective, Regression, heads

FACTORS = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)


@pytest.fixture
def outputs():
    """Logits [7, 3], those of an auxiliary head, and labels."""
    generator = torch.Generator().manual_seed(0)
    logits, auxiliary = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)
    return logits, auxiliary, torch.tensor([0, 1, 2, 2, 1, 0, 1])


def by_hand(logits, labels):
    """Each record's cross-entropy [B]."""
    pairs = zip(logits, labels, strict=True)
    return torch.stack([-row.log_softmax(0)[label] for row, label in pairs])


@pytest.mark.parametrize("factors", [None, FACTORS], ids=["plain", "factors"])
def test_losses_carry_their_classes_factors_and_plain_ones_do_not(factors, outputs):
    """The mean counts the auxiliary head, too; the losses beside it are of the logits."""
    logits, auxiliary, labels = outputs
    objective, plain, further = Objective(factors), *(by_hand(o, labels) for o in outputs[:2])
    own = torch.ones(7).double() if factors is None else factors[labels]
    torch.testing.assert_close(objective.losses(logits, labels), own * plain)
    torch.testing.assert_close(objective.plain_losses(logits, labels), plain)
    torch.testing.assert_close(objective.plain_losses((logits, auxiliary), labels), plain)
    both = objective.plain_losses((logits, auxiliary), labels, 0.4)
    torch.testing.assert_close(both, plain + 0.4 * further)
    for output, weight, total in (
        (logits, 0.4, plain),
        ((logits, auxiliary), 0.4, plain + 0.4 * further),
        ((logits, auxiliary), 0.0, plain),
    ):
        mean, losses = objective.batch_loss(output, labels, weight)
        torch.testing.assert_close(mean, (own * total).sum() / 7)  # not over the factors' sum
        torch.testing.assert_close(losses, own * plain)


def test_record_factors_are_those_of_the_labels():
    labels = torch.tensor([2, 0, 1, 1])
    assert Objective(FACTORS).record_factors(labels).tolist() == [0.5, 1.0, 0.25, 0.25]
    assert CLASSIFICATION.record_factors(labels) is None


def test_hits_and_heads(outputs):
    logits, auxiliary, _ = outputs
    best = torch.tensor([row.tolist().index(max(row.tolist())) for row in logits])
    assert CLASSIFICATION.hits(logits, best).tolist() == [True] * 7
    assert CLASSIFICATION.hits(logits, (best + 1) % 3).tolist() == [False] * 7
    first, second = heads(logits)
    assert (first is logits, second) == (True, None)
    assert heads((logits, auxiliary)) == (logits, auxiliary)


def test_scores_are_of_the_positive_class_that_is_named():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(60, 3, generator=generator), torch.arange(60) % 3
    odds = logits[:, 1].double() - logits[:, [0, 2]].double().logsumexp(1)
    found = Objective(positive=1).scores(logits, labels)
    expected = {"f1": f1_score(labels == 1, logits.argmax(1) == 1)}
    expected |= {"auroc": roc_auc_score(labels == 1, odds)}
    expected |= {"average_precision": average_precision_score(labels == 1, odds)}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    objectives = (CLASSIFICATION, Objective(positive=0))
    other, two = (one.scores(logits[:, :2], labels % 2) for one in objectives)
    assert two["auroc"] == pytest.approx(other["auroc"])
    assert two["f1"] != other["f1"]


@pytest.fixture
def several():
    """Logits [40, 3], those of an auxiliary head, and labels [40, 3], of which all occur."""
    generator = torch.Generator().manual_seed(1)
    logits, auxiliary = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    return logits, auxiliary, (logits + 2 * auxiliary > 0.5).long()


def test_the_loss_of_several_labels_is_torchs(several):
    logits, auxiliary, labels = several
    objective = Objective(multi_label=True)
    own, further = (
        torch.nn.functional.multilabel_soft_margin_loss(of, labels.double(), reduction="none")
        for of in (logits, auxiliary)
    )
    torch.testing.assert_close(objective.losses(logits, labels), own)
    both = objective.plain_losses((logits, auxiliary), labels, 0.4)
    torch.testing.assert_close(both, own + 0.4 * further)
    mean, losses = objective.batch_loss((logits, auxiliary), labels, 0.4)
    torch.testing.assert_close(mean, (own + 0.4 * further).mean())
    torch.testing.assert_close(losses, own)
    guessed = objective.losses(torch.zeros(40, 3).double(), labels)
    torch.testing.assert_close(guessed, torch.full_like(guessed, objective.guessing_loss(3)))
    assert CLASSIFICATION.guessing_loss(3) == pytest.approx(math.log(3))


def test_several_labels_are_predicted_each_from_a_half_on(several):
    logits, _, labels = several
    objective = Objective(multi_label=True)
    probabilities = objective.probabilities(logits)
    torch.testing.assert_close(probabilities, 1 / (1 + (-logits).exp()))
    called = objective.predictions(logits)
    assert torch.equal(called, (probabilities >= 0.5).long())
    assert 0 < called.sum(1).min() + 1 <= called.sum(1).max() <= 3  # none, one or several
    right = (called.numpy() == labels.numpy()).mean(1)
    assert objective.hits(logits, labels).tolist() == pytest.approx(right)
    assert objective.record_factors(labels) is None


@pytest.mark.parametrize(("positive", "number"), [(None, 3), (1, 3), (None, 2)])
def test_scores_of_several_labels_are_means_or_of_the_one_named(positive, number, several):
    logits, _, labels = (of[:, :number] for of in several)
    columns = slice(None) if positive is None else positive
    found = Objective(multi_label=True, positive=positive).scores(logits, labels)
    kinds = {"average": "macro"} if positive is None else {}
    of_one = {name: found.pop(name) for name in DECIDED if name in found}
    assert of_one.keys() == (set() if positive is None else DECIDED)
    y, ranks = labels[:, columns].numpy(), logits[:, columns].numpy()
    expected = {"f1": f1_score(y, ranks >= 0, **kinds), "auroc": roc_auc_score(y, ranks, **kinds)}
    expected["average_precision"] = average_precision_score(y, ranks, **kinds)
    assert found == pytest.approx(expected)


def test_a_weight_of_two_counts_a_record_twice():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 3, generator=generator).round(), torch.arange(40) % 3
    rows = torch.randint(40, (4, 40), generator=generator)
    weights = torch.stack([torch.bincount(own, minlength=40).double() for own in rows])
    found = CLASSIFICATION.weighted_scores(logits, labels, weights)
    for i, own in enumerate(rows):
        alone = CLASSIFICATION.scores(logits[own], labels[own])
        assert {name: float(values[i]) for name, values in found.items()} == pytest.approx(alone)


DECIDED = {"sensitivity", "specificity"}  # of the positive class, where there is one


def expected_scores(logits, labels):
    """F1 and AUROC of scikit-learn; of three classes and more the means over those it knows."""
    y, called, classes = np.array(labels), logits.argmax(1), range(logits.shape[1])
    shares = logits.double().softmax(1).numpy()
    known = [c for c in classes if 0 < labels.count(c) < len(labels)]
    areas = {c: roc_auc_score(y == c, shares[:, c]) for c in known}
    if len(classes) == 2:
        return {"f1": f1_score(y, called, zero_division=0), "auroc": areas.get(1)}
    auroc = np.mean([*areas.values()]) if areas else None
    return {"f1": f1_score(y, called, average="macro"), "auroc": auroc}


@given(st.data())
def test_scores_equal_scikit_learns(data):
    """Records repeat few rows of logits, wherever they stand, so that there are ties."""
    num_classes, size = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    kinds = torch.randn(5, num_classes, generator=generator)
    logits = kinds[data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))]
    labels = data.draw(st.lists(st.integers(0, num_classes - 1), min_size=size, max_size=size))
    found = CLASSIFICATION.scores(logits, torch.tensor(labels))
    told = {"f1": found["f1"], "auroc": found.get("auroc")}
    assert told == pytest.approx(expected_scores(logits, labels))
    areas = {"auroc", "average_precision"} if "auroc" in found else set()
    assert set(found) - DECIDED == {"f1"} | areas
    if num_classes == 2:
        for c, name in enumerate(("specificity", "sensitivity")):
            called = logits[torch.tensor(labels) == c].argmax(1) == c
            expected = pytest.approx(float(called.double().mean())) if len(called) else None
            assert found.get(name) == expected


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_area(wild):
    logits, labels = torch.tensor([[0.0, 1.0], [2.0, wild], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    scores = CLASSIFICATION.scores(logits, labels)
    assert scores.keys() - DECIDED == {"f1"}
    assert 0 <= scores["f1"] <= 1
    found = CLASSIFICATION.scores(logits.nan_to_num(3.0, 3.0, -3.0), labels).keys()
    assert found - DECIDED == {"f1", "auroc", "average_precision"}


@pytest.mark.parametrize("num_classes", [2, 3])
def test_confident_records_are_ranked_where_probabilities_round_to_one(num_classes):
    """Logits 40 and more apart have a probability of 1.0 in float64; their order still counts."""
    logits = torch.full((4, num_classes), -1e3)
    logits[:, 0], logits[:, 1] = 0.0, torch.tensor([40.0, 50.0, 60.0, 70.0])
    assert len(logits.double().softmax(1)[:, 1].unique()) == 1
    for labels, area in (([0, 0, 1, 1], 1.0), ([1, 1, 0, 0], 0.0), ([0, 1, 0, 1], 0.75)):
        assert CLASSIFICATION.scores(logits, torch.tensor(labels))["auroc"] == area


def test_losses_and_predictions_are_computed_here_alone():
    """No other module of the package calls a classification loss, or argmax over classes."""
    losses = {"cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "CrossEntropyLoss"}
    package = Path(fednas_flwr.__file__).parent
    found = {}
    for path in sorted(package.rglob("*.py")):
        for call in [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]:
            name = ast.unparse(call.func)
            over_classes = name.endswith("argmax") and any(
                ast.unparse(dim) in ("1", "-1")
                for dim in (*call.args, *(k.value for k in call.keywords))
            )
            if name.split(".")[-1] in losses or over_classes:
                found.setdefault(path.relative_to(package).as_posix(), []).append(ast.unparse(call))
    assert len(found.pop("search/objective.py")) == 4  # of a class, of several labels; 2 argmax
    assert len(found.pop("search/data_free_scores.py")) == 1  # of a made-up task
    assert found == {}


FOUND, GIVEN = (3.0, 2.0), (5.0, 10 / 12**0.5, 0.0, 10.0)
LABELS = st.sampled_from([-1e6, -3.0, 0.0, 1.5, 4.0, 11.0, math.nan])


def held(value, target):
    """A number within the range, if there is one."""
    return min(max(value, target[2]), target[3]) if len(target) > 2 else value


@pytest.mark.parametrize("target", [FOUND, GIVEN], ids=["found", "given"])
@pytest.mark.parametrize("loss", ["squared", "absolute", "huber"])
def test_losses_of_numbers_are_of_standardised_differences(loss, target):
    mean, std, *_ = target
    logits, numbers = torch.tensor([[-4.0], [0.2], [9.0]]).double(), torch.tensor([-2.0, 4.0, 12.0])
    pairs = zip(logits[:, 0].tolist(), numbers.tolist(), strict=True)
    far = [out - (held(y, target) - mean) / std for out, y in pairs]
    by_name = {
        "squared": [f * f for f in far],
        "absolute": [abs(f) for f in far],
        "huber": [f * f / 2 if abs(f) < 1 else abs(f) - 0.5 for f in far],
    }
    objective = Regression(target=target, loss=loss)
    expected = torch.tensor(by_name[loss], dtype=torch.float64)
    torch.testing.assert_close(objective.losses(logits, numbers), expected)
    both = objective.plain_losses((logits, logits), numbers, 0.5)
    torch.testing.assert_close(both, 1.5 * expected)


@pytest.mark.parametrize("target", [FOUND, GIVEN], ids=["found", "given"])
def test_scores_of_numbers_are_scikit_learns(target):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 1, generator=generator).double()
    numbers = (4 + 3 * torch.randn(40, generator=generator)).float()
    objective = Regression(target=target)
    mean, std, *_ = target
    y = [held(out * std + mean, target) for (out,) in logits.tolist()]
    assert objective.predictions(logits).tolist() == pytest.approx(y)
    expected = {
        "r2": metrics.r2_score(numbers, y),
        "rmse": metrics.root_mean_squared_error(numbers, y),
        "mae": metrics.mean_absolute_error(numbers, y),
    }
    assert objective.scores(logits, numbers) == pytest.approx(expected)
    twice = torch.ones(1, 40).double()
    twice[0, 7] = 3
    rows = [*range(40), 7, 7]
    weighted = objective.weighted_scores(logits, numbers, twice)
    repeated = objective.scores(logits[rows], numbers[rows])
    assert {n: float(v) for n, v in weighted.items()} == pytest.approx(repeated)
    alike = objective.scores(logits, torch.full((40,), 2.0))
    assert alike.keys() == {"rmse", "mae"}  # nothing varies that could be predicted


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), LABELS), min_size=2, max_size=12))
def test_what_is_released_of_a_number_is_within_its_range(pairs):
    """Whatever a network or a file says: squared errors in range^2, closeness in [0, 1]."""
    objective = Regression(target=GIVEN)
    labels = torch.tensor([y for _, y in pairs])
    logits = torch.tensor([[out] for out, _ in pairs])
    bound = 2 * objective.guessing_loss(1)
    losses, hits = objective.tested_losses(logits, labels), objective.hits(logits, labels)
    for (out, y), loss, hit in zip(pairs, losses.tolist(), hits.tolist(), strict=True):
        error = held(out * GIVEN[1] + GIVEN[0], GIVEN) - held(y, GIVEN)
        if math.isnan(y):
            assert hit == 0
            continue
        assert loss * GIVEN[1] ** 2 == pytest.approx(error**2, rel=1e-5, abs=1e-5)
        assert 0 <= loss <= bound * (1 + 1e-9)
        assert hit == pytest.approx(1 - abs(error) / 10, abs=1e-6)
    known = ~labels.isnan()
    if known.any():
        means = {"loss": float(losses[known].mean()), "accuracy": float(hits[known].mean())}
        told = objective.reported(means)
        errors = (losses[known] * GIVEN[1] ** 2).sqrt()
        assert told["rmse"] == pytest.approx(float((errors**2).mean().sqrt()), abs=1e-6)
        assert "accuracy" not in told
        assert objective.reported({"loss": 1.0, "rmse": 3.0}) == {"loss": 1.0, "rmse": 3.0}


def test_a_declared_range_is_not_replaced_by_what_clients_find():
    assert Regression(target=GIVEN).standardised(FOUND).target == GIVEN
    assert Regression().standardised(FOUND).target == FOUND
    assert Regression(target=FOUND).standardised(()).target == FOUND
    assert CLASSIFICATION.standardised(FOUND) is CLASSIFICATION

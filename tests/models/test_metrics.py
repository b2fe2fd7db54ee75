import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score
from torch import nn

from fednas_flwr.base.shares import wilson
from fednas_flwr.data.loaders import Split
from fednas_flwr.models import metrics, networks, noised_scores
from fednas_flwr.models.noised_scores import BINS, one_hot, planned_noise, scores_of_counts
from fednas_flwr.protocol.messages import LONGEST_HEADER
from fednas_flwr.protocol.requests import MOST_SUMS
from fednas_flwr.runs.numbers import paired_interval
from fednas_flwr.search.objective import CLASSIFICATION, Objective, Regression
from fednas_flwr.settings.names import CLASS_METRICS, NUMBER_METRICS
from fednas_flwr.spaces.operations import SkipNetwork

from ..refusals import refuses
from ..search.test_objective import expected_scores

CPU = torch.device("cpu")
DECIDED = ("sensitivity", "specificity")
SEEDS = st.integers(0, 2**31 - 1)


def make_split(rows, *, seed=0):
    """Rows of 600 made 2x4x4 images whose brightness tells the class, of 3."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 600)
    images = rng.integers(0, 160, (600, 2, 4, 4)) + 40 * labels[:, None, None, None]
    features = torch.from_numpy(images.clip(0, 255).astype(np.uint8))
    rows, labels = torch.tensor(rows), torch.from_numpy(labels)
    return Split(features, labels, rows, mean=(0.4, 0.5), std=(0.2, 0.3))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def test_evaluate_equals_a_loop_over_single_examples(network):
    split = make_split(list(range(599, 0, -2)))  # more than one batch, the last one smaller
    network.eval()
    losses, hits = [], 0
    for row in split.rows.tolist():
        mean, std = torch.tensor(split.mean)[:, None, None], torch.tensor(split.std)[:, None, None]
        with torch.no_grad():
            (logits,) = network(((split.features[row].float() / 255 - mean) / std)[None])
        losses.append(-float(logits.double().log_softmax(0)[split.labels[row]]))
        hits += int(logits.argmax()) == int(split.labels[row])
    result = metrics.evaluate(network, split, CPU)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.accuracy == hits / 300
    assert result.num_examples == 300
    assert result.as_dict() == {"loss": result.loss, "accuracy": result.accuracy}
    assert asdict(result) == {**result.as_dict(), "num_examples": 300}


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_network_as_it_was(network, training):
    network.train(training)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    metrics.evaluate(network, make_split(list(range(100))), CPU)
    assert network.training is training
    assert all(module.training is training for module in network.modules())
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def scored(network, split):
    return metrics.CLASSIFICATION.scores(*metrics.predicted(network, split, CPU))


def test_evaluate_does_not_depend_on_batches_or_order(network, monkeypatch):
    rows = list(range(50))
    whole = metrics.evaluate(network.train(), make_split(rows), CPU)
    scores = scored(network, make_split(rows))
    monkeypatch.setattr(metrics, "BATCH_SIZE", 7)
    for order in (rows, rows[::-1]):
        parts = metrics.evaluate(network, make_split(order), CPU)
        found = scored(network, make_split(order))
        assert (parts.accuracy, found["f1"]) == (whole.accuracy, scores["f1"])
        assert found == pytest.approx(scores)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_evaluate_refuses_an_empty_split(network):
    refuses("the split is empty", metrics.evaluate, network, make_split([]), CPU, error=ValueError)


def arrays(split):
    """Features and labels of a split's records, as scikit-learn takes them."""
    x, y = split.batch(torch.arange(len(split)), CPU)
    return x.flatten(1).numpy(), y.numpy()


@pytest.mark.parametrize("classes", [(0, 1, 2), (1, 2), (1,)])
def test_scores_are_those_of_the_networks_logits(network, classes):
    """Against counts of records and of pairs; a class alone has no area."""
    made = make_split(list(range(300)))
    rows = torch.tensor([row for row in made.rows.tolist() if made.labels[row] in classes])
    split = replace(made, rows=rows, labels=made.labels - min(classes))
    network[3] = nn.Linear(16, 3 - min(classes))
    x, y = split.batch(torch.arange(len(rows)), CPU)
    with torch.no_grad():
        expected = expected_scores(network.eval()(x), y.tolist())
    found = scored(network, split)
    assert {"f1": found["f1"], "auroc": found.get("auroc")} == pytest.approx(expected)
    assert ("auroc" in found) == (len(classes) > 1)
    outputs = metrics.predicted(network, split, CPU)
    detailed = metrics.detailed(*outputs, objective=metrics.CLASSIFICATION)
    plain = asdict(metrics.evaluate(network, split, CPU))
    assert detailed.items() >= {**plain, **dict.fromkeys(metrics.SCORES), **found}.items()


def test_measured_losses_are_without_class_factors(network):
    split, weighed = make_split(list(range(60))), Objective(torch.tensor([1.0, 0.1, 0.2]))
    found = metrics.evaluate(network, split, CPU, objective=weighed)
    assert found == metrics.evaluate(network, split, CPU)
    losses = metrics.record_losses(network, split, CPU)
    assert (losses.dtype, losses.shape) == (torch.float64, (60,))
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-6)


def test_the_linear_baseline_is_scikit_learns_and_scores_unseen_classes_as_ties():
    """Class 1 is in no record of two clients: every record of it has the same score for it."""
    made = make_split(list(range(300)))
    train = replace(made, rows=made.rows[made.labels[made.rows] != 1])
    clients = [replace(made, rows=rows) for rows in train.rows.split(120)]
    test = make_split(list(range(300, 600)))
    model = LogisticRegression(max_iter=1000).fit(*arrays(train))
    x_test, y_test = arrays(test)
    p = model.predict_proba(x_test)
    scores = metrics.pooled_baselines(clients, test, 3, CLASSIFICATION)["linear"]
    area = {c: roc_auc_score(y_test == c, p[:, column]) for column, c in enumerate((0, 2))}
    assert min(area.values()) > 0.6
    assert scores["auroc"] == pytest.approx((area[0] + 0.5 + area[2]) / 3, rel=1e-12)
    assert scores["accuracy"] == model.score(x_test, y_test)
    assert scores["f1"] == pytest.approx(f1_score(y_test, model.predict(x_test), average="macro"))
    assert not {"loss", "log_loss"} & {*scores, *scores["intervals"], *scores["resamples"]}


def test_the_linear_baseline_ranks_records_whose_probabilities_are_zero_and_one():
    """Features so far apart that the probabilities underflow."""
    features = torch.tensor([[-1.0], [1.0]] * 20 + [[-1e4], [1e4], [2e4], [-2e4]])
    labels = torch.tensor([0, 1] * 20 + [0, 1, 0, 1])
    train = Split(features, labels, torch.arange(40), (0.0,), (1.0,))
    test = Split(features, labels, torch.arange(40, 44), (0.0,), (1.0,))
    scores = metrics.pooled_baselines([train], test, 2, CLASSIFICATION)["linear"]
    assert scores["auroc"] == 0.25  # of four pairs of a 1 and a 0 only (1e4, -1e4) is right
    assert scores["accuracy"] == 0.5


def test_boosted_trees_are_a_baseline_of_tables_alone():
    x = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
    labels = torch.from_numpy((x[:, 0] * x[:, 1] > 0).astype(np.int64))  # no line parts these
    held = torch.arange(600).split([250, 150, 200])
    parts = [Split(torch.from_numpy(x), labels, rows, (0.0,) * 3, (1.0,) * 3) for rows in held]
    found = metrics.pooled_baselines(parts[:2], parts[2], 2, CLASSIFICATION)
    assert found["trees"]["accuracy"] > 0.85 > 0.6 > found["linear"]["accuracy"]
    assert found["trees"]["auroc"] > found["linear"]["auroc"] + 0.2
    assert found["trees"]["loss"] < 0.6 < found["linear"]["loss"]
    low, high = found["trees"]["intervals"]["auroc"]
    assert low < found["trees"]["auroc"] < high
    assert found["trees"]["intervals"]["accuracy"] == [*wilson(found["trees"]["accuracy"], 200)]
    low, high = paired_interval(found["trees"], found["linear"], "auroc")  # same resamples
    assert 0 < low < found["trees"]["auroc"] - found["linear"]["auroc"] < high
    images = [make_split(list(range(150)))]
    test = make_split(list(range(150, 200)))
    assert {*metrics.pooled_baselines(images, test, 3, CLASSIFICATION)} == {"linear"}


class Bright(SkipNetwork):
    """Calls every record class 1."""

    def forward(self, x):
        return self.joined(torch.tensor([0.0, 1.0, 0.0]).expand(len(x), 3), x)


def test_parts_of_a_network_with_a_skip_are_measured_alone():
    split, network = make_split(list(range(200))), Bright()
    network.skip = nn.Linear(32, 3)
    nn.init.zeros_(network.skip.weight)
    with torch.no_grad():
        network.skip.bias.copy_(torch.tensor([0.0, 0.0, 5.0]))  # always class 2, and stronger
    shares = [float((split.labels[:200] == label).float().mean()) for label in range(3)]
    assert len(set(shares)) == 3
    skip = network.skip
    found = metrics.accuracies_of_parts(network, split, CPU, objective=CLASSIFICATION)
    assert found["without_skip"] == pytest.approx(shares[1])
    assert found["without_cells"] == pytest.approx(shares[2])
    assert network.skip is skip
    assert metrics.evaluate(network, split, CPU).accuracy == pytest.approx(shares[2])


@given(st.lists(st.integers(0, 999), min_size=2, max_size=40), st.integers(0, 2**32 - 1))
def test_the_threshold_is_the_best_of_all(thousandths, seed):
    shares = torch.tensor(thousandths, dtype=torch.float64) / 1000 + 5e-4
    positive = torch.from_numpy(np.random.default_rng(seed).random(len(shares)) < 0.5)
    parts = [metrics.histogram(shares[i::2], positive[i::2]) for i in (0, 1)]  # of two clients
    threshold = metrics.best_threshold(parts, [len(shares[i::2]) for i in (0, 1)])
    if positive.all() or not positive.any():
        assert threshold is None
        return

    def youden(at):
        sensitivity = (shares[positive] >= at).double().mean()
        return float(sensitivity + (shares[~positive] < at).double().mean() - 1)

    assert threshold is not None
    everyone = [youden(k / metrics.BINS) for k in range(1, metrics.BINS)]
    assert youden(threshold) == pytest.approx(max(everyone))
    logits = torch.stack([-shares.logit(), torch.zeros_like(shares)], 1)
    found = Objective(threshold=threshold).scores(logits, positive.long())
    assert found["sensitivity"] + found["specificity"] - 1 == pytest.approx(youden(threshold))


def test_calibration_of_records_counted_by_hand():
    probabilities = torch.tensor([[0.95, 0.05], [0.91, 0.09], [0.35, 0.65], [0.62, 0.38]])
    found = metrics.calibration(probabilities, torch.tensor([0, 1, 1, 0]))
    assert [n for _, _, n in found["bins"]] == [2, 2]
    # two at .635 of which both are right, two at .93 of which one is
    assert found["expected_error"] == pytest.approx(0.5 * 0.365 + 0.5 * 0.43)


def test_intervals_cover_the_mean_as_often_as_they_say():
    """Of 200 samples about 95 % of the intervals hold the true share."""
    covered = 0
    for seed in range(200):
        hits = torch.rand(80, generator=torch.Generator().manual_seed(seed)).le(0.7).double()

        def measure(weights, hits=hits):
            return {"share": weights @ hits / weights.sum(1)}

        low, high = metrics.intervals(measure, 80, seed=seed)["intervals"]["share"]
        covered += low <= 0.7 <= high
    assert 175 <= covered <= 200  # expected 190, deviation 3


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_report_has_all_scores_as_json(num_classes):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % num_classes
    logits = torch.randn(200, num_classes, generator=generator)
    logits[torch.arange(200), labels] += 1
    threshold = 0.4 if num_classes == 2 else None
    objective = Objective(threshold=threshold, own_loss=lambda one, label: 99 + one[:, 0])
    found = metrics.detailed(logits, labels, objective=objective)
    json.dumps(found, allow_nan=False)
    low, high = found["intervals"]["log_loss"]  # which no loss of a user's own changes
    assert low < found["loss"] < high
    called = logits.argmax(1)
    if num_classes == 2:
        called = (logits.softmax(1)[:, 1] >= 0.4).long()
        assert (called != logits.argmax(1)).any()
    assert found["confusion"] == confusion_matrix(labels, called).tolist()
    assert [row["count"] for row in found["per_class"]] == [200 / num_classes] * num_classes
    accuracy = float((called == labels).double().mean())
    assert found["accuracy"] == pytest.approx(accuracy)
    low, high = found["intervals"]["accuracy"]
    assert low < accuracy < high
    assert (found["sensitivity"] is not None) == (num_classes == 2)
    if num_classes == 2:
        assert found["f1"] == pytest.approx(f1_score(labels, called))


def score_of_parts(parts, metric, objective):
    """Return the score of clients' added sums, as they travel, and their logits and labels."""
    how = {"metric": metric, "objective": objective, "seed": 3}
    told = [metrics.sums(logits, labels, **how) for logits, labels in parts]
    assert all(bool((of >= 0).all()) for of in told)  # as a reply's must be
    assert metrics.summed(told[0].flatten().tolist()[:-1], metric, 1, 40) is None
    numbers = [len(labels) for _, labels in parts]
    values = [of.flatten().tolist() for of in told]
    # Sums over more records than the client has; F1 counts some of them.
    assert metric == "f1" or metrics.summed(values[0], metric, 1, numbers[0] - 1) is None
    again = [metrics.summed(of, metric, 1, n) for of, n in zip(values, numbers, strict=True)]
    score = metrics.score_of_sums(torch.stack(again).sum(0), metric)
    assert len(score) == 1 + metrics.RESAMPLED
    return score, *(torch.cat(side) for side in zip(*parts, strict=True))


@pytest.mark.parametrize(("classes", "far"), [(10, 1e-3), (26, 2e-3), (100, 0.01)])
def test_sums_of_many_classes_fit_into_a_reply(classes, far):
    labels = torch.arange(20 * classes) % classes
    logits = torch.randn(len(labels), classes, generator=torch.Generator().manual_seed(1))
    logits[torch.arange(len(labels)), labels] += 1
    objective = Objective()
    told = metrics.sums(logits, labels, metric="auroc", objective=objective, seed=3).flatten()
    assert len(told) <= MOST_SUMS
    assert len(json.dumps(told.tolist())) < LONGEST_HEADER
    added = metrics.summed(told.tolist(), "auroc", classes, len(labels))
    score = metrics.score_of_sums(added, "auroc")
    assert float(score[0]) == pytest.approx(objective.scores(logits, labels)["auroc"], abs=far)


@settings(max_examples=30)
@given(st.sampled_from(CLASS_METRICS), st.sampled_from([2, 3]), st.integers(1, 3), SEEDS)
def test_added_sums_of_clients_give_the_score_of_all_their_records(metric, classes, clients, seed):
    drawn = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(clients):
        number = int(torch.randint(1, 40, (), generator=drawn))
        # On the grid of ranks, so that none are rounded together.
        logits = torch.randint(-90, 90, (number, classes), generator=drawn).double() / 20
        logits[:, 0], logits[:, 1] = 0.0, logits[:, 1] + 1 / 40
        logits[:, 2:] = -1e4  # so that log odds are differences of two logits
        parts.append((logits, torch.randint(2, (number,), generator=drawn)))
    objective = Objective(positive=1)
    score, logits, labels = score_of_parts(parts, metric, objective)
    expected = objective.scores(logits, labels) | {
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
        "log_loss": float(nn.functional.cross_entropy(logits, labels)),
    }
    if metric not in expected:  # of records of one kind
        assert math.isnan(score[0])
    else:
        assert float(score[0]) == pytest.approx(expected[metric], abs=1e-9)


@settings(max_examples=30)
@given(st.sampled_from(NUMBER_METRICS), st.integers(1, 3), SEEDS)
def test_added_sums_of_numbers_give_the_score_of_all_records(metric, clients, seed):
    drawn = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(2, 40, (), generator=drawn)) for _ in range(clients)]
    parts = [
        (torch.randn(n, 1, generator=drawn).double(), 50 + 9 * torch.randn(n, generator=drawn))
        for n in sizes
    ]
    objective = Regression(target=(50.0, 9.0))
    score, logits, labels = score_of_parts(parts, metric, objective)
    assert float(score[0]) == pytest.approx(objective.scores(logits, labels)[metric], rel=1e-6)
    assert score[1:].isfinite().any()


def test_resamples_of_two_networks_are_of_the_same_records():
    logits = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
    labels = (torch.arange(50) % 3 == 0).long()
    one, same, other = (
        metrics.sums(of, labels, metric="accuracy", objective=CLASSIFICATION, seed=seed)
        for of, seed in ((logits, 1), (2 * logits, 1), (logits, 2))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    spread = metrics.score_of_sums(one, "accuracy")[1:].std()
    accuracy = float(metrics.score_of_sums(one, "accuracy")[0])
    assert float(spread) == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 50), rel=0.5)


# --- AUROC and a threshold from noised counts, against scikit-learn and many draws of noise


def records(count, share, spread):
    """Log odds of records, and which of them are positive."""
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(count, generator=generator) < share
    odds = spread * torch.randn(count, generator=generator) + 1.2 * spread * positive - 2
    return odds, positive


@given(st.lists(st.tuples(st.floats(width=32) | st.just(float("nan")), st.booleans()), min_size=1))
def test_a_record_is_in_exactly_one_count(rows):
    odds, positive = (torch.tensor(column) for column in zip(*rows, strict=True))
    counts = one_hot(odds, positive)
    assert counts.shape == (len(rows), 2 * BINS)
    assert bool((counts.sum(1) == 1).all())
    assert torch.equal(counts[:, BINS:].sum(1).bool(), positive)


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_without_noise_they_are_those_of_the_binned_scores(spread):
    odds, positive = records(2000, 0.3, spread)
    told = scores_of_counts(one_hot(odds, positive).sum(0), noise=0.0)
    assert isinstance(told, noised_scores.NoisedScores)
    scale = BINS / 2 / np.arcsinh(noised_scores.LARGEST)
    binned = np.floor(np.arcsinh(odds.numpy()) * scale)
    assert told.auroc == pytest.approx(roc_auc_score(positive, binned), abs=1e-9)
    assert told.auroc == pytest.approx(roc_auc_score(positive, odds), abs=0.02)
    assert told.error == 0
    assert told.prevalence == pytest.approx(positive.double().mean().item())
    edges = [float(np.sinh(k / scale)) for k in range(1 - BINS // 2, BINS // 2)]
    ill, well = odds[positive], odds[~positive]
    youden = [(ill >= edge).double().mean() + (well < edge).double().mean() for edge in edges]
    assert told.edge == pytest.approx(edges[int(np.argmax(youden))])
    line = LogisticRegression(C=1e6).fit(odds[:, None], positive)
    assert [told.slope, told.offset] == pytest.approx(
        [line.coef_[0, 0], line.intercept_[0]], rel=0.1
    )
    best = torch.tensor(told.edge * told.slope + told.offset).double().sigmoid().item()
    assert told.threshold == pytest.approx(best)


def test_scores_that_are_wrong_way_round_or_wholly_apart_have_a_line():
    odds, positive = records(2000, 0.3, 1.0)
    useless = scores_of_counts(one_hot(-odds, positive).sum(0), noise=0.0)
    share = torch.tensor(useless.offset).sigmoid().item()
    assert (useless.slope, share) == (1e-3, pytest.approx(useless.prevalence, rel=1e-2))
    centres = noised_scores._log_odds(torch.tensor([15.5, 48.5]) / BINS)
    apart = scores_of_counts(one_hot(centres[positive.long()], positive).sum(0), noise=0.0)
    surest, count = (apart.slope * centres + apart.offset).sigmoid(), int(positive.sum())
    assert surest.tolist() == pytest.approx([1 / (2002 - count), 1 - 1 / (count + 2)], rel=2e-2)


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "mlp_64", "bent"])
def test_a_network_is_corrected_in_its_last_layers_or_stays(kind, positive):
    torch.manual_seed(0)
    x, line = torch.randn(9, 5), noised_scores.NoisedScores(None, 1.0, 0.1, 0.0, 0.4, 1.5)
    network = nn.Sequential(nn.Linear(5, 2), nn.Softplus())
    if kind != "bent":
        network = networks.OneLayer((5,), 2, width=64) if kind == "mlp_64" else nn.Linear(5, 2)
    before = network(x)
    made = noised_scores.corrected(network, line, positive=positive, x=torch.rand(8, 5))
    assert torch.equal(network(x), before)
    assert (made is network) == (kind == "bent")
    if kind != "bent":
        odds, old = (y[:, positive] - y[:, 1 - positive] for y in (made(x), before))
        torch.testing.assert_close(odds, 0.4 * old + 1.5)


def test_the_error_that_is_told_is_that_of_many_draws():
    odds, positive = records(1500, 0.15, 1.0)
    counts, noise = one_hot(odds, positive).sum(0), 2.0
    generator = torch.Generator().manual_seed(1)
    draws = [counts + noise * torch.randn(2 * BINS, generator=generator) for _ in range(400)]
    told = [scores_of_counts(draw, noise=noise) for draw in draws]
    areas = [one.auroc for one in told if one.auroc is not None]
    assert len(areas) > 350
    assert np.std(areas) == pytest.approx(np.mean([one.error for one in told]), rel=0.2)
    assert np.mean(areas) == pytest.approx(roc_auc_score(positive, odds), abs=0.015)
    assert noise / 2 < planned_noise(np.std(areas), records=1500, rarer=0.15) < noise * 2


def test_an_auroc_that_noise_could_have_made_is_not_told():
    odds, positive = records(1500, 0.15, 1.0)
    generator = torch.Generator().manual_seed(2)
    counts = one_hot(odds, positive).sum(0)
    noisy = scores_of_counts(counts + 8 * torch.randn(2 * BINS, generator=generator), noise=8.0)
    assert noisy is None or noisy.auroc is None
    draws = (counts + 5 * torch.randn(2 * BINS, generator=generator) for _ in range(200))
    told = [one.prevalence for draw in draws if (one := scores_of_counts(draw, noise=5.0))]
    assert np.mean(told) == pytest.approx(positive.double().mean().item(), abs=0.01)
    for _ in range(50):
        assert scores_of_counts(8 * torch.randn(2 * BINS, generator=generator), noise=8.0) is None

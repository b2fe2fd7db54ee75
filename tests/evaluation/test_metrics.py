from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from fednas_flwr.data.loaders import Split
from fednas_flwr.evaluation import metrics
from fednas_flwr.evaluation.metrics import evaluate, f1, linear_baseline

CPU = torch.device("cpu")


def make_split(rows: list[int], *, seed: int = 0) -> Split:
    """Rows of 600 made 2x4x4 images whose brightness tells the class, of 3."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 600)
    images = rng.integers(0, 160, (600, 2, 4, 4)) + 40 * labels[:, None, None, None]
    return Split(
        features=torch.from_numpy(images.clip(0, 255).astype(np.uint8)),
        labels=torch.from_numpy(labels),
        rows=torch.tensor(rows),
        mean=(0.4, 0.5),
        std=(0.2, 0.3),
    )


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def test_evaluate_equals_a_loop_over_single_examples(network: nn.Module) -> None:
    split = make_split(list(range(599, 0, -2)))  # more than one batch, the last one smaller
    network.eval()
    losses, hits = [], 0
    for row in split.rows.tolist():
        mean, std = torch.tensor(split.mean)[:, None, None], torch.tensor(split.std)[:, None, None]
        image = (split.features[row].float() / 255 - mean) / std
        with torch.no_grad():
            (logits,) = network(image[None])
        losses.append(-float(logits.double().log_softmax(0)[split.labels[row]]))
        hits += int(logits.argmax()) == int(split.labels[row])
    result = evaluate(network, split, CPU)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.accuracy == hits / 300
    assert result.num_examples == 300
    assert result.as_dict() == {"loss": result.loss, "accuracy": result.accuracy}
    assert result.as_json() == {**result.as_dict(), "num_examples": 300, "f1": None}


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_network_as_it_was(network: nn.Module, training: bool) -> None:
    network.train(training)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    evaluate(network, make_split(list(range(100))), CPU)
    assert network.training is training
    assert all(module.training is training for module in network.modules())
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_evaluate_does_not_depend_on_batches_or_order(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(range(50))
    whole = evaluate(network.train(), make_split(rows), CPU)
    monkeypatch.setattr(metrics, "BATCH_SIZE", 7)
    for order in (rows, rows[::-1]):
        parts = evaluate(network, make_split(order), CPU)
        assert parts.accuracy == whole.accuracy
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_evaluate_refuses_an_empty_split(network: nn.Module) -> None:
    with pytest.raises(ValueError, match="the split is empty"):
        evaluate(network, make_split([]), CPU)


def test_the_linear_baseline_is_that_of_sklearn_on_the_pooled_records() -> None:
    clients = [make_split(list(range(0, 150))), make_split(list(range(150, 400)))]
    test = make_split(list(range(400, 600)))

    def arrays(split: Split) -> tuple[np.ndarray, np.ndarray]:
        x, y = split.batch(torch.arange(len(split)), CPU)
        return x.flatten(1).numpy(), y.numpy()

    x = np.concatenate([arrays(split)[0] for split in clients])
    y = np.concatenate([arrays(split)[1] for split in clients])
    model = LogisticRegression(max_iter=1000).fit(x, y)
    scores = linear_baseline(clients, test, num_classes=3)
    assert scores["accuracy"] == pytest.approx(model.score(*arrays(test)))
    predictions = torch.from_numpy(model.predict(arrays(test)[0]))
    assert scores["f1"] == f1(torch.from_numpy(arrays(test)[1]), predictions, num_classes=3)
    assert scores["accuracy"] > 0.6


def test_f1_is_counted_from_the_networks_predictions(network: nn.Module) -> None:
    split = make_split(list(range(300)))
    x, y = split.batch(torch.arange(300), CPU)
    with torch.no_grad():
        predictions = network.eval()(x).argmax(1)
    per_class = []
    for c in range(3):
        hits = int(((predictions == c) & (y == c)).sum())
        said, there = int((predictions == c).sum()), int((y == c).sum())
        per_class.append(2 * hits / (said + there))
    assert evaluate(network, split, CPU, with_f1=True).f1 == pytest.approx(np.mean(per_class))


@pytest.mark.parametrize(
    ("num_classes", "labels", "predictions", "expected"),
    [
        (2, [0, 0, 0, 1, 1], [0, 0, 1, 1, 0], 0.5),  # of class 1 alone: 2 TP / (2 TP + FP + FN)
        (2, [0, 0, 1], [0, 0, 0], 0.0),
        (2, [0, 1, 1], [0, 1, 1], 1.0),
        (3, [0, 0, 1, 2], [0, 0, 2, 2], (1 + 0 + 2 / 3) / 3),
    ],
)
def test_f1_of_cases_counted_by_hand(num_classes, labels, predictions, expected) -> None:
    found = f1(torch.tensor(labels), torch.tensor(predictions), num_classes=num_classes)
    assert found == pytest.approx(expected)

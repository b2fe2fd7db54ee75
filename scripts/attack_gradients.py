"""Table and picture: what a curious server learns about records, with and without privacy=dp.

    scripts/attack_gradients.sh

Two attacks on clients' replies (``train.weights`` of a convolutional network, scikit-learn's
digits), each on an exact and on a private client with the same settings:

- Gradient inversion (Geiping et al. 2020, arXiv 2003.14053): images are fitted until their gradient
  points in the direction of the client's only step. The attacker is given the labels. The private
  client makes one release at the whole epsilon, with less noise than in any longer run.
- Membership (LiRA, online: Carlini et al. 2022, arXiv 2112.03570): was a record among those on
  which a network was trained? Each network is trained on a random half of the records; each is the
  target once, with the others as its shadows. A threshold on the loss is given for comparison.

The script adds missing results to scripts/results/attacks.json, and draws attacks.svg from the
first seed. It takes a quarter of an hour per seed on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from table_runs import RESULTS, add_missing, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from fednas_flwr import api
from fednas_flwr.base.randomness import seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.client.client import Client
from fednas_flwr.client.making import make_client
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.loaders import server_split
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.metrics import evaluate
from fednas_flwr.models.networks import make_network
from fednas_flwr.pipeline.later_settings import learning_rate, noise_per_step
from fednas_flwr.pipeline.schedule import Schedule, make_schedules
from fednas_flwr.protocol.messages import Header, Reply, Request
from fednas_flwr.protocol.requests import Amount, Describe, LocalTraining, Train
from fednas_flwr.protocol.states import load_states, network_states, pack
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.optimizers import SGD

CPU, SEEDS = torch.device("cpu"), (1, 2, 3)
SHADOWS = 24  # networks of a seed's membership attack
EPSILON = 8.0
WALK = 0.2  # privacy.retrain.noise_walk
RECORDS = 400  # each network is trained on half of them
BATCHES = (1, 1, 1, 4)  # records of the clients whose only step is inverted
EPOCHS, STEPS, BATCH = 40, 80, 32  # for membership: exact epochs, private steps
NETWORK = {"name": "plain_cnn", "input_shape": [1, 8, 8], "num_classes": 10}
RATES = SGD(lr=0.05, min_lr=0.05, momentum=0.9, weight_decay=0.0, clip_norm=None)
COLUMNS = [
    {"metric": "psnr", "title": "inversion: PSNR (dB)", "decimals": 1},
    {"metric": "found", "title": "records recognised (%)", "scale": 100, "decimals": 0},
    {"metric": "lira", "title": "membership: LiRA, AUC", "decimals": 3},
    {"metric": "lira_rate", "title": "found at 1 % false alarms (%)", "scale": 100, "decimals": 1},
    {"metric": "loss", "title": "loss threshold, AUC", "decimals": 3},
    {"metric": "accuracy", "title": "test accuracy (%)", "scale": 100, "decimals": 1},
]


def compose(private: bool, steps: int, batch: int, folder: Path, seed: int) -> Config:
    """Return the configuration of one kind of client."""
    dp = ["privacy=dp", f"privacy.epsilon={EPSILON}", f"privacy.retrain.local_steps={steps}"]
    return api.compose(
        *("algorithm=fedavg", "algorithm.network=plain_cnn", "dataset=digits", "clients=1"),
        *("stages=[retrain]", "retrain.rounds=1", f"retrain.batch_size={batch}", f"seed={seed}"),
        f"dataset.limit_train={RECORDS}",
        "dataset.fractions={train: 1.0, validation: 0.0, test: 0.0}",
        *([*dp, f"privacy.sites={folder}"] if private else []),
    )


def trained(
    config: Config, prepared: Prepared, rows: np.ndarray, local: LocalTraining, folder: Path
) -> tuple[nn.Module, nn.Module]:
    """Return the network that is sent to a client with these records, and the one in its reply."""
    privacy = config.privacy
    if isinstance(privacy, DifferentialPrivacy):  # a site with its own budget
        config = replace(config, privacy=replace(privacy, sites=str(folder)))
    client = make_client(config, 0, data=(prepared, [rows]), networks={})
    with seeded(config.seed, "attacked"):
        before, after = make_network(NETWORK), make_network(NETWORK)
    after.load_state_dict(before.state_dict())
    states = {kind: pack(state) for kind, state in network_states(before).items() if state}
    asked = Train(local=local)
    if isinstance(privacy, DifferentialPrivacy):
        splits = ask(client, "query.describe", Describe()).properties["splits"]
        assert client.guard is not None
        schedule = schedule_of(
            privacy.retrain.local_steps, config.retrain.batch_size, json.dumps(splits)
        )
        client.guard.commit("attack", schedule)
        asked = Train(local=rated(local, schedule, splits), data_set=privacy.data_set)
    load_states(after, ask(client, "train.weights", asked, states).states)
    return before, after


def rated(local: LocalTraining, schedule: Schedule, splits: dict[str, int]) -> LocalTraining:
    """Return the same training with the learning rate that follows from its noise."""
    (release,) = schedule
    noise = noise_per_step(release, [release.expected_batch(splits)], asked=1)
    lr = learning_rate(WALK, noise, steps=release.steps, momentum=RATES.momentum)
    return replace(local, weights=replace(local.weights, lr=lr, min_lr=lr))


@cache  # calibrating noise takes a second
def schedule_of(steps: int, batch: int, records: str) -> Schedule:
    """Return the schedule of a private client; ``records`` has its numbers by split as JSON."""
    config = compose(True, steps, batch, Path("sites"), 0)
    return make_schedules(config, [json.loads(records)], done={})[0]


def ask(client: Client, action: str, settings: object, states: object = None) -> Reply:
    """Return a client's reply to the server."""
    request = Request(action, Header("attack", "retrain", 1, 1, 0, ""), settings, states or {})
    return answer(client, request)


def one_step(private: bool, epochs: int, steps: int, batch: int | None) -> LocalTraining:
    """Return the training that is requested of a client."""
    amount = Amount(None, steps, None) if private else Amount(epochs, None, batch)
    return LocalTraining(NETWORK, "train+validation", amount, RATES, 0.0, 0.0)


def invert(
    before: nn.Module, after: nn.Module, labels: Tensor, *, seed: int, steps: int = 500
) -> Tensor:
    """Return images [B, 1, 8, 8] from -1 to 1 whose gradient points along the client's step."""
    step = parameters_to_vector(before.parameters()) - parameters_to_vector(after.parameters())
    step = step.detach()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), 1, 8, 8, generator=generator).mul_(0.3).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = functional.cross_entropy(before(x), labels)
        found = torch.autograd.grad(loss, list(before.parameters()), create_graph=True)
        misfit = (
            1
            - functional.cosine_similarity(parameters_to_vector(found), step, dim=0)
            + 1e-3 * (x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean())
        )
        optimizer.zero_grad()
        misfit.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
    return x.detach()


def inversion(private: bool, prepared: Prepared, folder: Path, seed: int) -> dict[str, Any]:
    """Return the images of clients' records, their reconstructions from replies, and the scores."""
    order = np.random.default_rng(seed).permutation(RECORDS)
    split = server_split(prepared.train, prepared.mean, prepared.std)
    everything = split.batch(torch.arange(RECORDS), CPU)[0].flatten(1)
    pairs, squares, found, start = [], [], [], 0
    for number, batch in enumerate(BATCHES):
        rows = np.sort(order[start : start + batch])
        start += batch
        config = compose(private, 1, batch, folder, seed)
        place = folder / f"inverted-{number}"
        before, after = trained(config, prepared, rows, one_step(private, 1, 1, None), place)
        x, labels = split.batch(torch.from_numpy(rows), CPU)
        guessed = invert(before, after, labels, seed=seed)
        errors = torch.cdist(x.flatten(1), guessed.flatten(1)).square() / x[0].numel()
        errors[labels[:, None] != labels] = math.inf
        true, guess = linear_sum_assignment(errors)  # among equal labels the order is unknown
        squares += errors[true, guess].tolist()
        nearest = torch.cdist(guessed.flatten(1), everything).argmin(1)[guess]
        found += (nearest == torch.from_numpy(rows)[true]).tolist()
        pairs += [(batch, x[i, 0], guessed[j, 0]) for i, j in zip(true, guess, strict=True)]
    return {
        "pairs": pairs,
        "psnr": float(np.mean([10 * math.log10(4 / max(square, 1e-10)) for square in squares])),
        "found": float(np.mean(found)),
    }


def membership(private: bool, prepared: Prepared, folder: Path, seed: int) -> dict[str, Any]:
    """Return the scores of LiRA and of the loss threshold."""
    rng = np.random.default_rng(seed)
    config = compose(private, STEPS, BATCH, folder, seed)
    split = server_split(prepared.train, prepared.mean, prepared.std)
    x, y = split.batch(torch.arange(RECORDS), CPU)
    assert prepared.server_test is not None
    test = server_split(prepared.server_test, prepared.mean, prepared.std)
    seen = np.zeros((SHADOWS, RECORDS), dtype=bool)
    odds = np.zeros((SHADOWS, RECORDS))  # log p / (1 - p) of the label
    losses, accuracies = np.zeros((SHADOWS, RECORDS)), []
    for number in range(SHADOWS):
        rows = np.sort(rng.permutation(RECORDS)[: RECORDS // 2])
        seen[number, rows] = True
        local = one_step(private, EPOCHS, STEPS, BATCH)
        _, network = trained(config, prepared, rows, local, folder / f"shadow-{number}")
        accuracies.append(evaluate(network, test, CPU).accuracy)
        with torch.no_grad():
            logits = network.eval()(x).double()
        rest = logits.scatter(1, y[:, None], -math.inf).logsumexp(1)
        odds[number] = (logits.gather(1, y[:, None])[:, 0] - rest).numpy()
        losses[number] = functional.cross_entropy(logits, y, reduction="none").numpy()
    ratios = np.stack([likelihood_ratios(odds, seen, target) for target in range(SHADOWS)])
    return {
        "lira": float(roc_auc_score(seen.ravel(), ratios.ravel())),
        "lira_rate": rate_at(seen.ravel(), ratios.ravel(), 0.01),
        "loss": float(roc_auc_score(seen.ravel(), -losses.ravel())),
        "accuracy": float(np.mean(accuracies)),
    }


def likelihood_ratios(odds: np.ndarray, seen: np.ndarray, target: int) -> np.ndarray:
    """Return each record's log ratio of the normal densities of networks with and without it."""
    others = np.arange(len(odds)) != target
    held, given = odds[others], seen[others]
    means = [np.where(mask, held, 0).sum(0) / mask.sum(0) for mask in (given, ~given)]
    spreads = [(held - mean)[mask].std() for mean, mask in zip(means, (given, ~given), strict=True)]
    inside, outside = norm.logpdf(odds[target], means, np.array(spreads)[:, None])
    return np.asarray(inside - outside)


def rate_at(truth: np.ndarray, scores: np.ndarray, false_alarms: float) -> float:
    """Return the share of members above the threshold that this share of non-members exceeds."""
    threshold = np.quantile(scores[~truth], 1 - false_alarms, method="higher")
    return float((scores[truth] > threshold).mean())


def draw(pairs: dict[str, list[tuple[int, Tensor, Tensor]]], path: Path) -> None:
    """Draw the clients' images, and the reconstructions from exact and from private replies."""
    exact, private = pairs["exact"], pairs["private"]
    rows = {
        "client's record": [x for _, x, _ in exact],
        "from exact answers": [guess for _, _, guess in exact],
        "from private answers": [guess for _, _, guess in private],
    }
    picture = Figure(figsize=(len(exact) + 2, 3.5), layout="constrained")
    grid = picture.subplots(len(rows), len(exact))
    for of_row, (title, images) in zip(grid, rows.items(), strict=True):
        of_row[0].set_ylabel(title, rotation=0, ha="right", va="center")
        for axes, image in zip(of_row, images, strict=True):
            axes.imshow(image, cmap="gray_r", vmin=-1, vmax=1)
            axes.set(xticks=[], yticks=[])
    for axes, (batch, *_) in zip(grid[0], exact, strict=True):
        axes.set_title(f"of {batch}", fontsize="medium")
    picture.savefig(path, metadata={"Date": None})


def main() -> None:
    """Attack, print, and write the table and the picture."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    results = start(
        "attacks",
        title=f"What a server learns of digits: inverted gradients of {sum(BATCHES)} records, "
        f"membership of {RECORDS} records in {SHADOWS} networks",
        command="scripts/attack_gradients.sh",
        columns=COLUMNS,
        against={"clients": "exact"},
    )
    pairs: dict[str, Any] = {}
    for seed, private in itertools.product(SEEDS, (False, True)):
        name = f"privacy=dp, epsilon {EPSILON:g}" if private else "exact"
        add_missing(
            results,
            partial(attack, private, seed, pairs if seed == SEEDS[0] else {}),
            settings={"private": private, "shadows": SHADOWS},
            group={"clients": name},
            seed=seed,
        )
    if len(pairs) == 2:
        draw(pairs, RESULTS / "attacks.svg")


def attack(private: bool, seed: int, pairs: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of both attacks; put images and their reconstructions into ``pairs``."""
    name = "private" if private else "exact"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepared, _ = make_data(compose(private, 1, 1, folder, seed))
        found = inversion(private, prepared, folder, seed)
        pairs[name] = found.pop("pairs")
        found |= membership(private, prepared, folder, seed)
    print(json.dumps({"clients": name, "seed": seed, **found}), flush=True)
    return found


if __name__ == "__main__":
    main()

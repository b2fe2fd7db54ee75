"""Tables: networks under DP-SGD on Fashion-MNIST, activations of a CNN, DPNAS' search.

    python scripts/table_dpnas.py --root <folder with FashionMNIST> [--table networks] [--jobs 2]

networks: CNN-Tanh and the published cell, from scratch at epsilon 1, 2 and 3: here that is the PRV
epsilon of the steps that are committed to, and clients' budgets are what their filters need for it.
--networks chooses some: CNN-Tanh also with larger batches over ten epochs, the published cell at
its full size, a quarter of an hour each, and the cell that the first search of the search's table
has found. networks_full: the same as long as the paper's, 40 epochs in batches of 2,048, for a GPU;
the rate was chosen from two on 10,000 held-out training images, for CNN-Tanh alone.
activations: of the CNN, at epsilon 3, as in the paper's Table 4. search: DP-aware and
plain search, by the controller and at random with the same budget of candidates, and with DARTS'
ops (Figure 3a), as long and with the controller's constants as experiment=dpnas/fashion_mnist has
them; what they find is trained privately at epsilon 3 with fewer steps. Small form,
3 seeds. Continues where it was stopped; every finished run is added to scripts/results/.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from table_runs import PERCENT, TEST_ACCURACY, arguments, make_all, make_run, measure, start

from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import calibrate_noise, prv_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.runs.numbers import Run, read_run
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

RUNS = Path("runs/table_dpnas")
SEEDS = (1, 2, 3)
EPSILONS = (1.0, 2.0, 3.0)
RECORDS = 60_000  # of Fashion-MNIST's train part, all of one client
TRAINING = ["experiment=dpnas/train_fashion_mnist"]  # 400 steps of 256 images
FORTY_EPOCHS = ["retrain.rounds=59", "retrain.batch_size=2048"]  # 1,180 steps
TEN_EPOCHS = ["retrain.rounds=30", "retrain.batch_size=1024"]  # 600 steps
CNN_TANH = ["genotype=null", "algorithm.network=cnn_tanh"]
FEW_STEPS = ["retrain.rounds=3"]  # 60, to compare what searches have found
SEARCH = ["experiment=dpnas/fashion_mnist", "stages=[search]"]
SEARCH_ROUNDS = compose_tree(SEARCH)["rounds"]
SEARCHED = RUNS / f"search_dp-aware_controller_{SEARCH_ROUNDS}_rounds_s1" / "genotype.json"
NETWORKS = {
    "cnn_tanh": CNN_TANH,
    "cnn_tanh_10_epochs": [*CNN_TANH, *TEN_EPOCHS],
    "small": [],
    "full": ["search_space=dp_cells"],
    "searched": [f"genotype={SEARCHED}"],
}
PAPER = {  # its Table 1 (%), by epsilon
    "cnn_tanh": {1.0: 73.9, 2.0: 82.0, 3.0: 86.3},
    "small": {1.0: 78.7, 2.0: 84.8, 3.0: 86.7},
    "full": {1.0: 82.1, 2.0: 86.2, 3.0: 88.1},
}
ACTIVATIONS = ("relu", "relu6", "elu", "selu", "tanh", "hardtanh", "leaky_relu")
SIZES = ["search_space.widths=[8,8,16]", "search_space.head=32"]  # of candidates, for speed
DARTS_OPS = "DP-aware, DARTS' ops"
AWARE = {
    "DP-aware": [],
    "plain": ["algorithm.dp_aware=null"],
    DARTS_OPS: ["search_space=dp_cells_darts"],
}
SEARCHES = [
    *itertools.product(("DP-aware", "plain"), ("controller", "random")),
    (DARTS_OPS, "controller"),
]
EPSILON = {"metric": "epsilon", "title": "PRV epsilon (delta 1e-5)", "decimals": 2}
SECONDS = {"metric": "retrain_seconds", "title": "training (s)", "decimals": 0}
REWARD_TITLE = "sampled cells, last 5 rounds (%)"
REWARD = {"metric": "sampled_accuracy", "title": REWARD_TITLE, **PERCENT}

TABLES = {  # title, columns, and what rows are compared with
    "networks": (
        "DP-SGD from scratch on Fashion-MNIST, small form",
        [TEST_ACCURACY, EPSILON, SECONDS],
        {"network": "cnn_tanh"},
    ),
    "networks_full": (
        "DP-SGD from scratch on Fashion-MNIST, 40 epochs",
        [
            TEST_ACCURACY,
            {"metric": "paper", "title": "paper's (%)", "decimals": 1},
            EPSILON,
            SECONDS,
        ],
        {"network": "cnn_tanh"},
    ),
    "activations": (
        "Activations of a CNN under DP-SGD on Fashion-MNIST, small form, epsilon 3",
        [TEST_ACCURACY, EPSILON],
        {"activation": "tanh"},
    ),
    "search": (
        "DPNAS' search on Fashion-MNIST, small form; found cells at epsilon 3",
        [REWARD, TEST_ACCURACY, EPSILON],
        {"sampler": "random"},
    ),
}


def main() -> None:
    """Run what is missing of one of the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--table", choices=TABLES, default="networks")
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=["cnn_tanh", "small"])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    title, columns, against = TABLES[options.table]
    command = f"python scripts/table_dpnas.py --root <folder> --table {options.table}"
    head = {"title": title, "command": command, "columns": columns, "against": against}
    results = start(f"dpnas_{options.table}", **head)
    make, jobs = {
        "networks": (make_training, itertools.product(options.seeds, options.networks, EPSILONS)),
        "networks_full": (make_long_training, itertools.product(options.seeds, PAPER, EPSILONS)),
        "activations": (make_activation, itertools.product(options.seeds, ACTIVATIONS)),
        "search": (make_search, itertools.product(options.seeds, SEARCHES)),
    }[options.table]
    root = options.root.resolve()
    make_all(lambda job: make(*job, results=results, root=root), jobs, at_a_time=options.jobs)


def make_long_training(seed: int, network: str, epsilon: float, **row: Path) -> None:
    """Train one given network privately for as long as the paper does."""
    number = PAPER[network][epsilon]
    more = [*FORTY_EPOCHS, "privacy.micro_batch_size=512"]
    make_training(seed, network, epsilon, of=more, more=lambda run: {"paper": number}, **row)


def make_training(
    seed: int, network: str, epsilon: float, *, of: Sequence[str] = (), **row: Any
) -> None:
    """Train one given network privately, by settings ``of`` its length."""
    training = [*TRAINING, *NETWORKS[network], *of]
    steps, batch = schedule(training)[:2]
    train(
        f"{network}_{steps}_steps_eps{epsilon:g}_s{seed}",
        training,
        epsilon,
        group={"network": network, "steps": steps, "batch": batch, "epsilon": f"{epsilon:g}"},
        seed=seed,
        **row,
    )


def make_activation(seed: int, activation: str, *, results: Path, root: Path) -> None:
    """Train the CNN with one kind of activation privately."""
    training = [*TRAINING, "genotype=null", f"algorithm.network=cnn_{activation}"]
    name, group = f"cnn_{activation}_eps3_s{seed}", {"activation": activation}
    train(name, training, results=results, group=group, seed=seed, root=root)


def make_search(seed: int, search: tuple[str, str], *, results: Path, root: Path) -> None:
    """Search without a claim, then train what was found privately."""
    aware, sampler = search
    short = "darts_ops" if aware == DARTS_OPS else aware.lower()
    name = f"{short}_{sampler}_{SEARCH_ROUNDS}_rounds_s{seed}"
    searched = RUNS / f"search_{name}"
    overrides = [*SEARCH, *SIZES, *AWARE[aware], f"algorithm.sampler={sampler}"]
    if make_run(searched, overrides=overrides, seed=seed, root=root) is None:
        return
    ops = AWARE[DARTS_OPS] if aware == DARTS_OPS else []
    train(
        f"found_{name}",
        [*TRAINING, *FEW_STEPS, *ops, f"genotype={searched / 'genotype.json'}"],
        results=results,
        group={"search": aware, "sampler": sampler, "rounds": SEARCH_ROUNDS},
        seed=seed,
        root=root,
        more=lambda run: {"sampled_accuracy": sampled_accuracy(read_run(searched))},
    )


def train(
    name: str, training: list[str], epsilon: float = 3.0, *, results: Path, **row: Any
) -> None:
    """Make one private training and add it to a table; ``row`` is for ``measure``."""
    overrides = [*training, *noise(training, epsilon)]
    measure(results, RUNS / name, overrides=overrides, **row)


def sampled_accuracy(run: Run) -> float:
    """Return the mean validation accuracy of the cells sampled in a search's last five rounds."""
    return fmean(event["metrics"]["validation_accuracy"] for event in run.rounds("search")[-5:])


def schedule(training: list[str]) -> tuple[int, int, Config]:
    """Return the steps, the expected batch and the configuration of a training."""
    config = parse_config(compose_tree(training), user=user_settings(training))
    assert isinstance(config.privacy, DifferentialPrivacy)
    steps = config.retrain.rounds * config.privacy.retrain.local_steps
    return steps, config.retrain.batch_size, config


def noise(training: list[str], epsilon: float) -> list[str]:
    """Return the noise that keeps a PRV epsilon, and the budget that a client's filter needs."""
    steps, batch, config = schedule(training)
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    least = calibrate_noise(
        target_epsilon=epsilon,
        delta=privacy.delta,
        sample_rate=batch / RECORDS,
        steps=steps,
        accountant=prv_epsilon,
    )
    sigma = math.ceil(1e4 * least) / 1e4
    again = steps + privacy.retrain.local_steps  # a round that is interrupted is released twice
    budget = filter_epsilon([Release(sigma, batch / RECORDS, again)], privacy.delta)
    return [
        f"privacy.retrain.noise_multiplier={sigma:g}",
        f"privacy.epsilon={math.ceil(10 * budget + 1) / 10:g}",
    ]


if __name__ == "__main__":
    main()

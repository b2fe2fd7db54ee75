"""Tables: networks under DP-SGD on Fashion-MNIST, activations of a CNN, and DPNAS' search.

    python scripts/table_dpnas.py --root <folder with FashionMNIST> [--table networks] [--jobs 2]

networks: CNN-Tanh and the published cell, from scratch at epsilon 1, 2 and 3. Here this is the PRV
epsilon of the committed steps, and clients' budgets are those that their filters need for it.
networks_full: the same, and the published cell at its full size, trained as long as in the paper,
40 epochs in batches of 2,048, for a GPU; the rate was chosen from two on 10,000 held-out training
images, for CNN-Tanh alone. activations: those of the CNN, at epsilon 3, as in the paper's Table 4.
search: DP-aware and plain search, by the controller and at random with the same budget of
candidates, and with DARTS' ops (Figure 3a), with the length and the controller's constants of
experiment=dpnas/fashion_mnist; the found networks are trained privately at epsilon 3 with fewer
steps. Small form, 3 seeds. The script continues where it was stopped; every finished run is added
to scripts/results/.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import fmean

from table_runs import PERCENT, Job, Metrics, arguments, make_runs, start

from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import calibrate_noise, prv_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.runs.numbers import Run
from fednas_flwr.settings import DifferentialPrivacy
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

RUNS = "runs/table_dpnas/"
SEEDS = (1, 2, 3)
EPSILONS = (1.0, 2.0, 3.0)
RECORDS = 60_000  # of Fashion-MNIST's train part, all at one client
TRAINING = ["experiment=dpnas/train_fashion_mnist"]  # 400 steps of 256 images
FORTY_EPOCHS = ["retrain.rounds=59", "retrain.batch_size=2048", "privacy.micro_batch_size=512"]
CNN_TANH = ["genotype=null", "algorithm.network=cnn_tanh"]
FEW_STEPS = ["retrain.rounds=3"]  # 60, to compare the networks that searches have found
SEARCH = ["experiment=dpnas/fashion_mnist", "stages=[search]"]
SEARCH_ROUNDS = compose_tree(SEARCH)["rounds"]
NETWORKS = {"cnn_tanh": CNN_TANH, "small": [], "full": ["search_space=dp_cells"]}
PAPER = {  # its Table 1 (%), by epsilon
    "cnn_tanh": {1.0: 73.9, 2.0: 82.0, 3.0: 86.3},
    "small": {1.0: 78.7, 2.0: 84.8, 3.0: 86.7},
    "full": {1.0: 82.1, 2.0: 86.2, 3.0: 88.1},
}
ACTIVATIONS = ("relu", "relu6", "elu", "selu", "tanh", "hardtanh", "leaky_relu")
SIZES = ["search_space.widths=[8,8,16]", "search_space.head=32"]  # sizes of candidates, for speed
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
SECONDS = {"metric": "retrain_seconds", "title": "training (s)", "decimals": 0}
OF_PAPER = {"metric": "paper", "title": "paper's (%)", "decimals": 1}
REWARD = {"metric": "sampled_accuracy", "title": "sampled cells, last 5 rounds (%)", **PERCENT}

TABLES = {  # title, and the row for comparison
    "networks": (
        "DP-SGD from scratch on Fashion-MNIST, small form",
        ["central_accuracy", "epsilon", SECONDS],
        {"network": "cnn_tanh"},
    ),
    "networks_full": (
        "DP-SGD from scratch on Fashion-MNIST, 40 epochs",
        ["central_accuracy", OF_PAPER, "epsilon", SECONDS],
        {"network": "cnn_tanh"},
    ),
    "activations": (
        "Activations of a CNN under DP-SGD on Fashion-MNIST, small form, epsilon 3",
        ["central_accuracy", "epsilon"],
        {"activation": "tanh"},
    ),
    "search": (
        "DPNAS' search on Fashion-MNIST, small form; found cells at epsilon 3",
        [REWARD, "central_accuracy", "epsilon"],
        {"sampler": "random"},
    ),
}


def main() -> None:
    """Run the missing runs of one of the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--table", choices=TABLES, default="networks")
    options = parser.parse_args()
    title, columns, against = TABLES[options.table]
    command = f"python scripts/table_dpnas.py --root <folder> --table {options.table}"
    head = {"title": title, "command": command, "columns": columns, "against": against}
    results = start(f"dpnas_{options.table}", **head)
    jobs = {
        "networks": lambda seed: networks(seed, ["cnn_tanh", "small"]),
        "networks_full": lambda seed: networks(seed, PAPER, as_paper=True),
        "activations": activations,
        "search": searches,
    }[options.table]
    made = [job for seed in SEEDS for job in jobs(seed)]
    make_runs(results, made, root=options.root, at_a_time=options.jobs, runs=RUNS)


def networks(seed: int, names: Iterable[str], *, as_paper: bool = False) -> Iterator[Job]:
    """Yield private trainings of given networks, short or as long as in the paper."""
    for network, epsilon in itertools.product(names, EPSILONS):
        training = [*TRAINING, *NETWORKS[network], *(FORTY_EPOCHS if as_paper else [])]
        steps, batch = schedule(training)[:2]
        group = {"network": network, "steps": steps, "batch": batch, "epsilon": f"{epsilon:g}"}
        name = f"{network}_{steps}_steps_eps{epsilon:g}_s{seed}"
        job = Job(group, [*training, *noise(training, epsilon)], seed, name)
        yield job._replace(more=partial(of_paper, network, epsilon)) if as_paper else job


def of_paper(network: str, epsilon: float, run: Run) -> Metrics:
    """Return the paper's number for a row."""
    return {"paper": PAPER[network][epsilon]}


def activations(seed: int) -> Iterator[Job]:
    """Yield private trainings of the CNN with each kind of activation."""
    for activation in ACTIVATIONS:
        training = [*TRAINING, "genotype=null", f"algorithm.network=cnn_{activation}"]
        name = f"cnn_{activation}_eps3_s{seed}"
        yield Job({"activation": activation}, [*training, *noise(training)], seed, name)


def searches(seed: int) -> Iterator[Job]:
    """Yield private trainings of networks found by searches without a claim of privacy."""
    for aware, sampler in SEARCHES:
        short = "darts_ops" if aware == DARTS_OPS else aware.lower()
        name = f"{short}_{sampler}_{SEARCH_ROUNDS}_rounds_s{seed}"
        overrides = [*SEARCH, *SIZES, *AWARE[aware], f"algorithm.sampler={sampler}"]
        search = Job({}, overrides, seed, f"search_{name}")
        ops = AWARE[DARTS_OPS] if aware == DARTS_OPS else []
        training = [*TRAINING, *FEW_STEPS, *ops, f"genotype={RUNS}search_{name}/genotype.json"]
        group = {"search": aware, "sampler": sampler, "rounds": SEARCH_ROUNDS}
        private = [*training, *noise(training)]
        yield Job(group, private, seed, f"found_{name}", search, sampled_accuracy)


def sampled_accuracy(run: Run, of: Run) -> Metrics:
    """Return the mean validation accuracy of the cells sampled in a search's last five rounds."""
    last = of.rounds("search")[-5:]
    return {"sampled_accuracy": fmean(e["metrics"]["validation_accuracy"] for e in last)}


def schedule(training: list[str]) -> tuple[int, int, DifferentialPrivacy]:
    """Return the steps, the expected batch and the privacy of a training."""
    config = parse_config(compose_tree(training), user=user_settings(training))
    assert isinstance(config.privacy, DifferentialPrivacy)
    steps = config.retrain.rounds * config.privacy.retrain.local_steps
    return steps, config.retrain.batch_size, config.privacy


def noise(training: list[str], epsilon: float = 3.0) -> list[str]:
    """Return the noise for a PRV epsilon, and the budget that a client's filter needs."""
    steps, batch, privacy = schedule(training)
    least = calibrate_noise(
        target_epsilon=epsilon,
        delta=privacy.delta,
        sample_rate=batch / RECORDS,
        steps=steps,
        accountant=prv_epsilon,
    )
    sigma = math.ceil(1e4 * least) / 1e4
    again = steps + privacy.retrain.local_steps  # an interrupted round is released twice
    budget = filter_epsilon([Release(sigma, batch / RECORDS, again)], privacy.delta)
    return [
        f"privacy.retrain.noise_multiplier={sigma:g}",
        f"privacy.epsilon={math.ceil(10 * budget + 1) / 10:g}",
    ]


if __name__ == "__main__":
    main()

"""Table: the recommended search against random networks, in other search spaces.

    python scripts/table_spaces.py --root <folder with FashionMNIST> [--jobs 2]

The spaces are DARTS' cell and MBConv blocks, on Fashion-MNIST with 2,000 images, 5 clients, 5 seeds
and equal retraining. Every found network is compared with two random ones of its space, one with
multiply-adds within 5 % of its own and the first one drawn, and with the best of 250 by AZ-NAS. The
script continues where it was stopped; every finished run is added to scripts/results/spaces.json.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from table_runs import Job, arguments, is_made, make_run, make_runs, start

from fednas_flwr import compose
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import described_space, load_description, supernet_space
from fednas_flwr.search.data_free_scores import AZ_NAS
from fednas_flwr.spaces.costs import count_multiply_adds
from fednas_flwr.spaces.genotype import Genotype, to_json

RUNS = Path("runs/table_spaces")
SPACES = {  # settings of search and retraining, settings of the search alone
    "DARTS": (("retrain.channels=8", "retrain.num_cells=3"), ("search_space=darts_small",)),
    "MBConv": (
        ("search_space=mbconv_small", "retrain.channels=null", "retrain.num_cells=null"),
        (),
    ),
}
PARTITIONS = ("iid", "dirichlet")
SEEDS = (1, 2, 3, 4, 5)
DATA = ("dataset=fashion_mnist", "dataset.limit_train=2000", "clients=5")
RECOMMENDED = ("experiment=search/recommended",)
SCORED = (
    *("algorithm=zero_cost", "algorithm.draws=250", "rounds=1", "retrain=small"),
    f"algorithm.scores=[{','.join(AZ_NAS)}]",
)
GIVEN = ("algorithm=fedavg", "retrain=small", "stages=[retrain,evaluate,export]")
LIKE = 0.05  # tolerance of multiply-adds, as a share of the found network's
DRAWS = 2000


def main() -> None:
    """Run what is missing."""
    options = arguments(__doc__).parse_args()
    root = options.root.resolve()
    RUNS.mkdir(parents=True, exist_ok=True)
    results = start(
        "spaces",
        title="Other search spaces on Fashion-MNIST, small form: 2,000 images, 5 clients, 5 seeds",
        columns=[
            "central_accuracy",
            "client_accuracy",
            "num_parameters",
            "multiply_adds",
            "search_seconds",
        ],
        against={"network": "random"},
    )
    for seed, space in itertools.product(SEEDS, SPACES):
        write_atomically(any_file(seed, space), to_json(draw_any(seed, space, root)))
    settings = list(itertools.product(PARTITIONS, SEEDS, SPACES))
    searches = [job("recommended", own, *RECOMMENDED, *SPACES[own[2]][1]) for own in settings]
    make_runs(results, searches, root=root, at_a_time=options.jobs)
    others = []
    for own, search in zip(settings, searches, strict=True):
        partition, seed, space = own
        any_size = job("random_any_size", own, *GIVEN, f"genotype={any_file(seed, space)}")
        others += [any_size, job("AZ-NAS", own, *SCORED, *SPACES[space][1])]
        like = RUNS / f"{space}_{partition}_s{seed}.json"
        random = job("random", own, *GIVEN, f"genotype={like}")
        if not is_made(results, random.overrides, seed):
            folder = RUNS / search.name
            if make_run(folder, search.overrides, seed=seed, root=root) is None:
                continue
            write_atomically(like, to_json(draw_like(folder, seed)))
        others.append(random)
    make_runs(results, others, root=root, at_a_time=options.jobs)


def job(network: str, setting: tuple[str, int, str], *own: str) -> Job:
    """Return one run of the table, for a partition, seed and space."""
    partition, seed, space = setting
    overrides = [*own, *SPACES[space][0], *DATA, f"partition={partition}"]
    group = {"space": space, "partition": partition, "network": network}
    return Job(group, overrides, seed, f"{space}_{network}_{partition}_s{seed}")


def any_file(seed: int, space: str) -> Path:
    """Return the file of a seed's first random network of a space."""
    return RUNS / f"{space}_any_s{seed}.json"


def draw_any(seed: int, space: str, root: Path) -> Genotype:
    """Return the first random network of a space."""
    config = compose(*RECOMMENDED, *itertools.chain(*SPACES[space]), *DATA, f"dataset.root={root}")
    own = supernet_space(config, make_data(config)[0])
    return own.random_genotype(make_generator(seed, "random network"))


def draw_like(found: Path, seed: int) -> Genotype:
    """Return the first random network whose multiply-adds are close to a found network's."""
    description = load_description(found)
    space, genotype = described_space(description)
    generator = make_generator(seed, "random network of like cost")

    def cost(one: Genotype) -> int:
        network = space.network(one, auxiliary=False)
        return count_multiply_adds(network, tuple(description["input_shape"]))

    wanted = cost(genotype)
    for _ in range(DRAWS):
        drawn = space.random_genotype(generator)
        if abs(cost(drawn) / wanted - 1) <= LIKE:
            return drawn
    raise RuntimeError(f"none of {DRAWS} random networks is within {LIKE:.0%} of {wanted} in cost")


if __name__ == "__main__":
    main()

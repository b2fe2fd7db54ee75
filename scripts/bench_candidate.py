"""Cost of a private client's steps on candidates over a plain client's: whole steps in one run.

    python scripts/bench_candidate.py [--repeats 7]

Both answer the same `train.candidate` request for six random candidates of the space dp_cells on
made-up images of 28x28, on one thread. The private client draws a Poisson batch, clips every
record's gradient, adds noise, books the step in a ledger on disk and then steps its optimiser.
Steps are interleaved; the ratio is the median over pairs. The aim is 1.3; DPNAS (Cheng et al. 2022,
appendix) reports 2.4 for its search.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from bench import arguments, compare, is_met

from fednas_flwr.algorithms.dpnas import DPNASSettings
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.client.making import make_client
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.pipeline.schedule import make_schedules
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.requests import TrainCandidates
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.names import SPLITS

LIMIT = 1.3
NUM_CANDIDATES, LOCAL_STEPS, BATCH_SIZE, NUM_RECORDS = 6, 2, 64, 2000
SETTINGS = [
    *("algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "dataset=npz", "clients=1"),
    *("stages=[search]", "rounds=1000", "runtime.device=cpu", f"algorithm.batch_size={BATCH_SIZE}"),
    *(f"algorithm.trained_candidates={NUM_CANDIDATES}", f"algorithm.local_steps={LOCAL_STEPS}"),
]
PLAIN = ["algorithm.dp_aware=null"]
PRIVATE = ["privacy=dp", "privacy.epsilon=100000", "privacy.rewards.noise_multiplier=1"]


def main() -> int:
    """Print the ratio; exit code 1 when it is above the limit."""
    repeats = arguments(__doc__, repeats=7).parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *SETTINGS,
            f"dataset.root={made_images(Path(folder))}",
            f"dataset.cache={folder}/cache",
        ]
        steps = {
            "private": make_steps([*settings, *PRIVATE, f"privacy.sites={folder}/sites"]),
            "plain": make_steps([*settings, *PLAIN]),
        }
        print(f"{NUM_CANDIDATES * LOCAL_STEPS} steps of batch {BATCH_SIZE}")
        ratio = compare(steps, repeats)
    return 0 if is_met("private / plain step", ratio, LIMIT) else 1


def made_images(folder: Path) -> Path:
    """Return an npz file of random images in ten classes."""
    rng = np.random.default_rng(0)
    path = folder / "made.npz"
    np.savez(
        path,
        x_train=rng.integers(256, size=(NUM_RECORDS, 28, 28), dtype=np.uint8),
        y_train=np.arange(NUM_RECORDS) % 10,
    )
    return path


def make_steps(overrides: list[str]) -> partial[object]:
    """Return a function with which a client answers one message that asks for all steps."""
    config = parse_config(compose_tree(overrides))
    data = make_data(config)
    client = make_client(config, 0, data=data, networks={})
    space = supernet_space(config, data[0])
    with seeded(0, "supernet"):
        states = {n: pack(s) for n, s in network_states(space.supernet()).items() if n == "weights"}
    generator = make_generator(0, "paths")
    algorithm = config.algorithm
    assert isinstance(algorithm, DPNASSettings)
    header, data_set = Header("bench", "search", 1, 1, 0, "nonce"), config.private_data_set
    if client.guard is not None:
        records = {split: client.guard.num_records([split]) for split in SPLITS}
        client.guard.commit(header.run, make_schedules(config, [records], done={})[0])
    settings = TrainCandidates(
        candidates=[space.path(space.random_genotype(generator)) for _ in range(NUM_CANDIDATES)],
        step=0,
        local_steps=LOCAL_STEPS,
        batch_size=algorithm.batch_size if data_set is None else None,
        weights=algorithm.weights,
        dp_aware=None,
        data_set=data_set,
    )
    return partial(answer, client, Request("train.candidate", header, settings, states))


if __name__ == "__main__":
    sys.exit(main())

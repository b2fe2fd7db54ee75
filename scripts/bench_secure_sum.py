"""CPU seconds of one secure sum, for each site and for the server, without network or training.

    python scripts/bench_secure_sum.py [--values 2000000] [--repeats 3]

The script prints the smallest of the repeats. "float32 sum" is a plain sum by the server.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from bench import arguments

from fednas_flwr.privacy.mechanism.noise import SecureGenerator, share_sigma
from fednas_flwr.privacy.policy import SumTerms
from fednas_flwr.protocol.keys import Roster, SiteKeys
from fednas_flwr.protocol.secure_sum.masks import Grid
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.server.secure_sums import MaskedSum

NUM_SITES = 8


def main() -> None:
    """Print one line per part."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--values", type=int, default=2_000_000)
    options = parser.parse_args()
    rounds = [measure(options.values, number) for number in range(options.repeats)]
    for name in rounds[0]:
        print(f"{name:<44}{min(found[name] for found in rounds):8.3f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'peak memory of all in one process':<44}{peak:8.0f} MiB")


def measure(num_values: int, number: int) -> dict[str, float]:
    """Return CPU seconds by part of one exchange in which all sites answer."""
    with tempfile.TemporaryDirectory() as folder:
        sites = make_sites(Path(folder))
        participants = list(range(NUM_SITES))
        grid = Grid.of_range(64 + 6 * 8 + 8.0, sites=NUM_SITES)
        rng = np.random.default_rng(number)
        values = [rng.normal(size=num_values) for _ in sites]
        seconds: dict[str, float] = {}
        total = MaskedSum(participants)
        plain = np.zeros(num_values, dtype=np.float32)
        boxes = []
        for site, own in zip(sites, values, strict=True):
            with timed(seconds, "a site: encode, mask, seal", NUM_SITES):
                answer = site.begin(
                    **{"run": "bench", "attempt": str(number), "stage": "search"},
                    **{"round": 1, "phase": 1, "participants": participants, "agreed": {}},
                )
                vectors = [grid.encode(own)]
                boxes.append(answer.mask(vectors))
            with timed(seconds, "the server: add and unmask", 1):
                total.add(site.index, vectors)
            single = own.astype(np.float32)
            with timed(seconds, "the server: float32 sum", 1):
                plain += single
        context = answer.context
        openings = {}
        with timed(seconds, "a site: sign and open", NUM_SITES):
            signatures = {site.index: site.sign(context, participants) for site in sites}
            for site in sites:
                own_boxes = {i: boxes[i][site.index] for i in participants if i != site.index}
                openings[site.index] = site.open(context, participants, signatures, own_boxes)
        with timed(seconds, "the server: add and unmask", 1):
            (cells,) = total.unmask(openings)
            found = grid.decode(cells, sites=NUM_SITES)
        np.testing.assert_array_equal(
            found, sum(np.rint(own / grid.cell) for own in values) * grid.cell
        )
        sigma = share_sigma(1.0 / grid.cell, NUM_SITES - 2)
        with timed(seconds, "a site: its discrete noise", 1):
            SecureGenerator().discrete_gaussian((num_values,), sigma=sigma)
    return seconds


@contextmanager
def timed(seconds: dict[str, float], name: str, share: int) -> Iterator[None]:
    """Add the CPU seconds of a block, divided by ``share`` sites."""
    begun = time.process_time()
    yield
    seconds[name] = seconds.get(name, 0.0) + (time.process_time() - begun) / share


def make_sites(folder: Path) -> list[SumSite]:
    """Return sites with new keys."""
    keys = [SiteKeys.at(folder / f"{i}" / "keys") for i in range(NUM_SITES)]
    roster = Roster(tuple(own.public(f"site-{i}") for i, own in enumerate(keys)))
    terms = SumTerms(roster.fingerprint, NUM_SITES - 1, 1)
    return [
        SumSite(i, own, roster, terms, folder / f"{i}" / "journal.sqlite")
        for i, own in enumerate(keys)
    ]


if __name__ == "__main__":
    main()

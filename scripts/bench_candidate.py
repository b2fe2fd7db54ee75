"""Cost of a candidate's private step over its non-private step, in process CPU time.

    python scripts/bench_candidate.py [--batch-size 64 --repeats 5 --widths 32 32 64 --size 28]

Both are gradients of the same path of a dp_cells supernet on one thread: the mean loss's by torch,
and the clipped sum over records. Interleaved; the ratio is the median over pairs of neighbours.
DPNAS (Cheng et al. 2022, appendix) reports 2.4 for its search; the aim is 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fednas_flwr.privacy.clipping import clipped_gradient_sum
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.training import record_losses
from fednas_flwr.search_spaces.dp_cells import DPCellSpace

NUM_CANDIDATES = 6


def main() -> None:
    """Print medians in ms and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs=3, default=[32, 32, 64])
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--size", type=int, default=28)
    given = parser.parse_args()
    torch.set_num_threads(1)
    space = DPCellSpace(
        input_shape=(given.channels, given.size, given.size),
        num_classes=10,
        widths=tuple(given.widths),
        head=given.head,
    )
    with seeded(0, "bench"):
        supernet = space.supernet().train()
        x = torch.randn(given.batch_size, *space.input_shape)
        y = torch.randint(10, (given.batch_size,))
    generator, pairs = make_generator(0, "paths"), []
    for _ in range(NUM_CANDIDATES):
        candidate = Candidate(supernet, space.path(space.random_genotype(generator)))
        weights = candidate.weights()

        def plain(candidate: Candidate = candidate, weights: dict = weights) -> None:
            loss = record_losses(candidate(x), y).mean()
            torch.autograd.grad(loss, list(weights.values()))

        def private(candidate: Candidate = candidate, weights: dict = weights) -> None:
            clipped_gradient_sum(
                candidate, x, y, loss=record_losses, parameters=weights, max_norm=0.1
            )

        pairs += [(cpu_ms(plain), cpu_ms(private)) for _ in range(1 + given.repeats)][1:]
    plain_ms, private_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(private / plain for plain, private in pairs)
    print(f"non-private {plain_ms:.1f} ms, private {private_ms:.1f} ms, ratio {ratio:.2f}")


def cpu_ms(step: Callable[[], None]) -> float:
    """Return the process CPU time of one step."""
    started = time.process_time()
    step()
    return 1000 * (time.process_time() - started)


if __name__ == "__main__":
    main()

"""Cost of ProxylessNAS' steps on the MBConv supernet against training the derived network.

    python scripts/bench_mbconv.py [--skeleton fdnas --size 32 --batch-size 4 --repeats 5]

The steps of a repeat have the same path and alternate, so that a slow minute of the machine hits
all of them; printed are medians with quartiles, and medians of the paired ratios, which are what
counts. Times are process CPU time of one thread. Memory is what autograd keeps for the backward,
counted by its own hooks, each storage once and without the weights: the same on every machine. But
for mode full, the ratios may not grow with the number of candidates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.exact_gradients import ExactGradients, Passes
from fednas_flwr.search.optimizer_step import (
    Descent,
    Descents,
    Gradient,
    Gradients,
    make_adam,
    make_sgd,
)
from fednas_flwr.search.proxyless import (
    SampledPaths,
    draw_paths,
    search_paths,
)
from fednas_flwr.settings.optimizers import SGD, Adam
from fednas_flwr.spaces.mbconv import MBConvSpace
from fednas_flwr.spaces.mbconv_network import SKELETONS

CANDIDATES = {
    3: ("mbconv3_3x3", "mbconv3_5x5", "mbconv3_7x7"),
    6: ("mbconv3_3x3", "mbconv3_5x5", "mbconv3_7x7", "mbconv6_3x3", "mbconv6_5x5", "mbconv6_7x7"),
    7: (
        *("mbconv3_3x3", "mbconv3_5x5", "mbconv3_7x7"),
        *("mbconv6_3x3", "mbconv6_5x5", "mbconv6_7x7", "zero"),
    ),
}
LIMITS = {  # of time, of memory
    "weight step": (1.15, 1.1),
    "alpha step, two": (2.3, 2.2),
}
WEIGHTS = SGD(0.05, 0.0, momentum=0.9, weight_decay=3e-4, clip_norm=None)
Step = Callable[[], object]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skeleton", choices=sorted(SKELETONS), default="fdnas")
    parser.add_argument("--size", type=int, default=32, help="side of an image")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.batch_size, 3, options.size, options.size)
    batch = x, torch.randint(10, (options.batch_size,))
    print(
        f"{options.skeleton}, {options.size}x{options.size}, batch {options.batch_size}; "
        f"median [quartiles] of {options.repeats}"
    )
    for number, candidates in CANDIDATES.items():
        space = MBConvSpace(
            input_shape=(3, options.size, options.size),
            num_classes=10,
            skeleton=SKELETONS[options.skeleton],
            candidates=candidates,
        )
        print_ratios(number, make_steps(space, batch), options.repeats)


def make_steps(
    space: MBConvSpace, batch: tuple[Tensor, Tensor]
) -> dict[str, Callable[[int], Step]]:
    """Return the steps; each is given a seed, by which all of a repeat draw the same paths."""
    with seeded(0, "bench"):
        supernet = space.supernet().train()
    descents = Descents(
        Descent(supernet.weights(), make_sgd(supernet.weights().values(), WEIGHTS, nesterov=True)),
        Descent(
            supernet.alphas(), make_adam(supernet.alphas().values(), Adam(1e-3, 0.0), beta=0.0)
        ),
    )
    alphas = supernet.alphas()["blocks"].detach().clone()

    def derived(seed: int) -> Step:
        """The network of the path that the weight step of this seed draws, with its weights."""
        path = draw_paths(alphas, mode="one", generator=make_generator(seed, "bench"))
        network = space.network(space.genotype(path[:, 0].tolist())).train()
        optimizer = torch.optim.SGD(
            network.parameters(), lr=0.05, momentum=0.9, weight_decay=3e-4, nesterov=True
        )

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(network(batch[0]), batch[1]).backward()
            optimizer.step()

        step()  # the optimiser's state is made once
        return step

    def weights(seed: int) -> Step:
        step = one_step(ExactGradients, SampledPaths("two", True, None), seed)
        step()
        return step

    def by_gates(mode: str) -> Callable[[int], Step]:
        return lambda seed: one_step(AlphasOnly, SampledPaths(mode, False, None), seed)

    def one_step(
        source: Callable[[Passes, Passes], Gradients], paths: SampledPaths, seed: int
    ) -> Step:
        return lambda: search_paths(
            supernet,
            source(lambda: iter([batch]), lambda: iter([batch])),
            descents,
            paths,
            hardware=None,
            generator=make_generator(seed, "bench"),
        )

    return {
        "derived network": derived,
        "weight step": weights,
        "alpha step, two": by_gates("two"),
        "alpha step, full": by_gates("full"),
    }


class AlphasOnly(ExactGradients):
    """Those of the alphas: weights have none, so that nothing is computed for their step."""

    def weights(self, network: nn.Module) -> Gradient:
        """Return none."""
        return {}


def print_ratios(number: int, steps: dict[str, Callable[[int], Step]], repeats: int) -> None:
    """Print times and memory of one set of candidates, and the paired ratios with their limits."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, list[float]] = {name: [] for name in steps}
    for seed in range(repeats + 1):
        for name, make in steps.items():
            step = make(seed)
            start = time.process_time()
            step()
            seconds = time.process_time() - start
            if seed > 0:  # the first repeat warms up
                times[name].append(seconds)
                memory[name].append(saved_bytes(step))
    print(f"{number} candidates")
    for name in steps:
        lines = []
        for values, unit, scale in ((times, "ms", 1e3), (memory, "MiB", 2**-20)):
            paired = [a / b for a, b in zip(values[name], values["derived network"], strict=True)]
            text = f"{summary([scale * value for value in values[name]], 1)} {unit}"
            limit = LIMITS.get(name, (0, 0))[values is memory]
            lines.append(f"{text}, ratio {summary(paired, 2)}" + f" (limit {limit})" * (limit > 0))
        print(f"  {name:<18}" + "; ".join(lines))


def saved_bytes(step: Step) -> float:
    """Return the bytes of all tensors that autograd saves during a step, but for parameters."""
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not is_parameter_view(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor  # holds it: no address twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return float(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))


def is_parameter_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf's view, e.g. the transpose of a weight."""
    return tensor._base is not None and isinstance(tensor._base, nn.Parameter)


def summary(values: list[float], digits: int) -> str:
    """Return median and quartiles."""
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.{digits}f} [{first:.{digits}f}, {third:.{digits}f}]"


if __name__ == "__main__":
    main()

"""FDNAS against local loops and a weighted average."""

import numpy as np
import pytest
import torch

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.search import proxyless

from .plain import average, copied, first_supernet, make_sgd, step

SMALL = ["algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "clients=2"]
SMALL += ["search_space.width=0.25", "search_space.norm=group", "search_space.candidates=fdnas"]
SMALL += ["partition=quantity", "partition.fractions=[0.75,0.25]", "algorithm.batch_size=16"]
SMALL += ["algorithm.local_epochs=2", "algorithm.warm_up_rounds=1", "algorithm.alphas.lr=0.1"]


def local_epochs(supernet, client, generator, algorithm, *, warm_up):
    """Two passes of ProxylessNAS, written out with torch's own backward."""
    weights, alphas = list(supernet.weights().values()), supernet.alphas()["blocks"]
    sgd = make_sgd(weights, algorithm.weights, nesterov=True)
    adam = torch.optim.Adam([alphas], lr=algorithm.alphas.lr, betas=(0.0, 0.999))
    supernet.train()

    def batches(split):
        while True:
            yield from client.epoch(split, batch_size=16, generator=generator)

    for _ in range(2):
        validation = batches(client.data.validation)
        for x, y in client.epoch(client.data.train, batch_size=16, generator=generator):
            if not warm_up:
                batch = next(validation)
                paths = proxyless.draw_paths(alphas, number=2, generator=generator)
                gates, _ = proxyless.gate_gradient(supernet, batch, paths)
                alphas.grad = proxyless.alpha_gradient(gates, alphas, paths)
                old = alphas.detach().clone()
                adam.step()
                with torch.no_grad():
                    alphas.copy_(proxyless.rescale(alphas, old, paths))
            drawn = proxyless.uniform_alphas(alphas.detach()) if warm_up else alphas
            path = proxyless.draw_paths(drawn, number=1, generator=generator).tolist()
            step(sgd, torch.nn.functional.cross_entropy(supernet.body(x, paths=path), y))


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_round_is_local_epochs_and_a_weighted_average(warm_up, search):
    """One round: a second one would start from other last digits, which group norm amplifies."""
    federation = search(*SMALL, f"algorithm.warm_up_rounds={int(warm_up)}")
    config, algorithm = federation.config, federation.config.algorithm
    supernet = first_supernet(config, federation.data[0])
    state = copied(supernet.state_dict())
    counts = [len(client.data.train) for client in federation.clients]
    assert counts[0] > 2 * counts[1]
    states = []
    for client in federation.clients:
        supernet.load_state_dict(state)
        generator = make_generator(config.seed, "search", 1, client.index, "search")
        local_epochs(supernet, client, generator, algorithm, warm_up=warm_up)
        states.append(copied(supernet.state_dict()))
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, mean in average(states, counts).items():
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual.double(), mean, rtol=1e-5, atol=1e-6)


def test_alphas_move_after_the_warm_up_only(search):
    dense = search(*SMALL, rounds=3)
    assert not dense.failed
    first, second, third = (event["metrics"] for event in dense.named("round"))
    assert "validation_loss" not in first
    assert "validation_loss" in second
    assert first["alpha_entropy"] > second["alpha_entropy"] > third["alpha_entropy"]
    assert first["alpha_entropy"] == pytest.approx(np.log(6), abs=1e-4)  # 1e-3 * randn

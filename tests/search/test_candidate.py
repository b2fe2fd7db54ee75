"""Candidates: paths of a supernet, and pools."""

import pytest
import torch

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.exact_gradients import ClippedGradients, ExactGradients
from fednas_flwr.search.local_search import train_candidates
from fednas_flwr.search.optimizer_step import Optimizer
from fednas_flwr.settings.optimizers import DPAware
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.dp_cells import DPCellSpace

from ..refusals import refuses
from .conftest import tensors_of

SPACE = DPCellSpace(input_shape=(2, 6, 5), num_classes=3, widths=(4, 4, 8), head=8)
# of every op, and of convolutions
PATHS = [[*range(10), *range(4, 9)], [*range(4, 10), *range(4, 10), *range(4, 7)]]


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("dp_aware", [None, DPAware(0.05, 0.0), DPAware(0.05, 2.0)])
def test_candidates_are_trained_one_after_the_other(dp_aware):
    """Batch by batch, momentum kept; DP-aware ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``."""
    with seeded(0, "supernet"):
        supernet, twin = (SPACE.supernet().double().train() for _ in range(2))
    twin.load_state_dict(supernet.state_dict())
    generator, noise, again = (make_generator(0, name) for name in ("records", "noise", "noise"))
    batches = [tensors_of(SPACE.input_shape, 3, 3, generator) for _ in range(4)]
    constants = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    own = {} if dp_aware is None else {"dp_aware": dp_aware, "generator": noise}
    kind = ExactGradients if dp_aware is None else ClippedGradients
    gradients = kind(lambda: iter(batches), num_steps=4, **own)
    weights = supernet.weights()
    optimizer = Optimizer(weights, torch.optim.SGD(weights.values(), **constants))
    train_candidates(supernet, PATHS, gradients, optimizer, steps=2)
    sgd, norms = torch.optim.SGD(twin.weights().values(), **constants), []
    for position, (x, y) in enumerate(batches):
        candidate = Candidate(twin, PATHS[position // 2])
        weights = list(candidate.weights().values())
        total = [torch.zeros_like(weight) for weight in weights]
        for i in range(3):
            loss = torch.nn.functional.cross_entropy(candidate(x[i, None]), y[i, None])
            record = torch.autograd.grad(loss, weights)
            norms.append(torch.cat([g.reshape(-1) for g in record]).norm().item())
            scale = 1.0 if dp_aware is None else min(1.0, dp_aware.max_grad_norm / norms[-1])
            total = [t + scale * g for t, g in zip(total, record, strict=True)]
        sgd.zero_grad()
        for weight, gradient in zip(weights, total, strict=True):
            if dp_aware is not None:
                std = dp_aware.noise_multiplier * dp_aware.max_grad_norm
                gradient = gradient + std * torch.randn(gradient.shape, generator=again)
            weight.grad = gradient / 3
        sgd.step()
    assert max(norms) > 0.05
    assert gradients.train_tally.num_examples == 12
    for name, weight in supernet.weights().items():
        torch.testing.assert_close(weight, twin.weights()[name], rtol=1e-9, atol=1e-12, msg=name)


def test_other_spaces_have_no_candidates():
    darts = DARTSSpace(input_shape=(3, 8, 8), num_classes=3, channels=2, num_cells=3).supernet()
    refuses("set it", Candidate, darts, [0] * 15, error=ValueError)

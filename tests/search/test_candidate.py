"""A candidate's private step: its clipped sum against a loop over records, beside nothing else."""

from __future__ import annotations

import pytest
import torch

from fednas_flwr.privacy.clipping import clipped_gradient_sum
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.training import record_losses
from fednas_flwr.search_spaces import DARTSSpace, DPCellSpace

SPACE = DPCellSpace(input_shape=(2, 6, 5), num_classes=3, widths=(4, 4, 8), head=8)
PATHS = {
    "every op": [*range(10), *range(4, 9)],
    "convolutions": [4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9, 4, 5, 6],
}


@pytest.mark.parametrize("name", PATHS)
def test_clipped_sum_equals_a_loop_over_records(name):
    with seeded(0, "supernet"):
        supernet = SPACE.supernet().double().train()
    candidate = Candidate(supernet, PATHS[name])
    weights = candidate.weights()
    generator = make_generator(0, "records")
    x = torch.randn(5, *SPACE.input_shape, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (5,), generator=generator)
    gradients = [
        torch.autograd.grad(
            record_losses(candidate(x[i, None]), y[i, None]).sum(), weights.values()
        )
        for i in range(5)
    ]
    norms = [torch.cat([g.reshape(-1) for g in record]).norm() for record in gradients]
    max_norm = float(torch.stack(norms).median())  # some are clipped, some are not
    sums = clipped_gradient_sum(
        candidate, x, y, loss=record_losses, parameters=weights, max_norm=max_norm
    )
    scales = [min(1.0, max_norm / float(norm)) for norm in norms]
    assert min(scales) < 1 == max(scales)
    for position, (key, total) in enumerate(sums.items()):
        expected = sum(s * g[position] for s, g in zip(scales, gradients, strict=True))
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12, msg=key)
    assert list(sums) == list(weights)
    assert all(weight.grad is None for weight in supernet.parameters())


def test_other_spaces_have_no_candidates():
    darts = DARTSSpace(input_shape=(3, 8, 8), num_classes=3, channels=2, num_cells=3).supernet()
    with pytest.raises(ValueError, match="set it"):
        Candidate(darts, [0] * 15)

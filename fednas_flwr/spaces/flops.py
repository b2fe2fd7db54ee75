"""Parameters and multiply-adds of a network, as papers count them."""

from __future__ import annotations

import torch
from torch import nn


def count_parameters(network: nn.Module) -> int:
    """Return the number of elements of all parameters; buffers are not parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def count_multiply_adds(network: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of one example of ``input_shape`` in evaluation mode.

    torch counts 2 operations per multiply-add and none for pooling, norms and activations; the
    papers count multiply-adds of convolutions and dense layers, which is half of torch's number.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton: a second

    was_training = network.training
    network.eval()
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *input_shape, device=device))
    network.train(was_training)
    flops: int = counter.get_total_flops()
    return flops // 2

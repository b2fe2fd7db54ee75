"""Training as one would write it in a notebook, which strategies are held against."""

import math

import numpy as np
import torch

from fednas_flwr.base.randomness import seeded
from fednas_flwr.models.networks import supernet_space

PLAIN_CNN = {"name": "plain_cnn", "input_shape": [3, 8, 8], "num_classes": 3}


def first_supernet(config, prepared):
    """The supernet as a search begins with it."""
    with seeded(config.seed, "supernet"):
        return supernet_space(config, prepared).supernet()


def make_sgd(parameters, settings, lr=None, **options):
    """SGD of torch's with the constants of settings, and another learning rate if one is given."""
    constants = {"momentum": settings.momentum, "weight_decay": settings.weight_decay}
    return torch.optim.SGD(parameters, settings.lr if lr is None else lr, **constants, **options)


def rate_of_round(settings, number, rounds):
    """The learning rate of a round, from 1 on, along a cosine."""
    cosine = (1 + math.cos(math.pi * (number - 1) / rounds)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * cosine


def step(optimizer, loss, clip_norm=None):
    """Take a step down a loss, its gradient clipped to a norm if one is given."""
    optimizer.zero_grad()
    loss.backward()
    if clip_norm is not None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()


def copied(named):
    """Named tensors in double precision, as they are now."""
    return {name: tensor.detach().clone().double() for name, tensor in named.items()}


def accuracy_of(network, clients):
    """Return of which share of all clients' validation records a network is right."""
    splits = [client.data.validation for client in clients]
    batches = [split.batch(torch.arange(len(split)), "cpu") for split in splits]
    return torch.cat([network(x).argmax(1) == y for x, y in batches]).double().mean().item()


def average(states, weights):
    """The weighted average of named tensors, in double precision."""
    return {
        name: torch.as_tensor(np.average([s[name] for s in states], axis=0, weights=weights))
        for name in states[0]
    }

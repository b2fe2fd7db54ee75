"""Training for local epochs, which several verbs share, and what it did to validation losses.

:func:`search_locally` trains a supernet, :func:`train_locally` any other network, both in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, repeat

import torch
from torch.optim.swa_utils import update_bn

from fednas_flwr.clients.client import Client
from fednas_flwr.evaluation.metrics import record_losses
from fednas_flwr.exchange.messages import Request
from fednas_flwr.hardware.costs import hardware_loss
from fednas_flwr.search.local_search import search_epoch
from fednas_flwr.search.proxyless import (
    make_alpha_optimizer,
    make_weight_optimizer,
    proxyless_epoch,
)
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search.training import Tally, make_adam, make_sgd, train_epoch
from fednas_flwr.search_spaces.space import Supernet


def search_locally(client: Client, request: Request, supernet: Supernet) -> dict[str, float]:
    """Search for local epochs, in place; return the metrics of the last one."""
    settings, data = request.settings, client.data
    generator = client.generator(request.header, "search")
    one_epoch = _search_epoch(client, request, supernet, generator)
    batches = partial(client.epoch, batch_size=settings["batch_size"], generator=generator)
    for _ in range(settings["local_epochs"]):
        # validation batches: as many passes as the training batches need
        endless = chain.from_iterable(map(batches, repeat(data.validation)))
        train_tally, validation_tally = one_epoch(supernet, batches(data.train), endless)
    metrics = {"train_loss": train_tally.loss, "train_accuracy": train_tally.accuracy}
    if validation_tally.num_examples:  # none in a warm-up
        metrics["validation_loss"] = validation_tally.loss
    return metrics


def _search_epoch(
    client: Client, request: Request, supernet: Supernet, generator: torch.Generator
) -> Callable[..., tuple[Tally, Tally]]:
    """Return one epoch of the search that is asked for, on all ops or on paths, with optimisers.

    It takes the supernet, train batches and validation batches.
    """
    settings = request.settings
    sgd, adam = SGD(**settings["weights"]), Adam(**settings["alphas"])
    if "gates" not in settings:
        return partial(
            search_epoch,
            rule=settings["rule"],
            validation_weight=settings["validation_weight"],
            weight_settings=sgd,
            weight_optimizer=make_sgd(supernet.weights().values(), sgd),
            alpha_optimizer=make_adam(supernet.alphas().values(), adam),
            class_factors=client.class_factors,
        )
    hardware = settings["hardware"]
    return partial(
        proxyless_epoch,
        mode=settings["gates"],
        warm_up=settings["warm_up"],
        hardware=None if hardware is None else hardware_loss(hardware),
        clip_norm=sgd.clip_norm,
        weight_optimizer=make_weight_optimizer(supernet, sgd),
        alpha_optimizer=make_alpha_optimizer(supernet, adam),
        generator=generator,
        class_factors=client.class_factors,
    )


def train_locally(client: Client, request: Request, network: torch.nn.Module) -> dict[str, float]:
    """Train the weights for local epochs, in place; return the metrics of the last one."""
    settings = request.settings
    network.drop_path_prob = settings["drop_path_prob"]
    split = client.split(settings["split"])
    sgd = SGD(**settings["weights"])
    optimizer = make_sgd(network.parameters(), sgd)
    generator = client.generator(request.header, "weights")
    for _ in range(settings["local_epochs"]):
        tally = train_epoch(
            network,
            client.epoch(split, batch_size=settings["batch_size"], generator=generator),
            optimizer=optimizer,
            clip_norm=sgd.clip_norm,
            auxiliary_weight=settings["auxiliary_weight"],
            class_factors=client.class_factors,
        )
    return {"train_loss": tally.loss, "train_accuracy": tally.accuracy}


def refresh_statistics(client: Client, request: Request, network: torch.nn.Module) -> None:
    """Estimate batch norm's statistics anew, on one pass over the client's train records.

    Running statistics are far behind the weights after few steps: a loss with them would tell how
    far, and speak against every configuration that learns fast.
    """
    if not isinstance(network, Supernet):
        network.drop_path_prob = 0.0  # type: ignore[assignment]
    generator = client.generator(request.header, "statistics")
    batches = client.epoch(
        client.data.train, batch_size=request.settings["batch_size"], generator=generator
    )
    update_bn(batches, network, client.device)


def validation_losses(client: Client, network: torch.nn.Module) -> torch.Tensor:
    """Return the loss of every validation record, float64 [records] on the CPU.

    Of the same objective as training: rarer classes repeated where the client oversamples.
    """
    split = client.for_training(client.data.validation)
    losses = record_losses(network, split, client.device)
    if client.class_factors is None:
        return losses
    return losses * client.class_factors.double().cpu()[split.labels[split.rows]]


def clipped_decreases(decreases: torch.Tensor, bound: float) -> torch.Tensor:
    """Return each record's decrease within the bound; one that is not a number counts -bound."""
    return decreases.nan_to_num(nan=-bound).clamp(-bound, bound)

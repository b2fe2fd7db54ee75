"""Local training of supernets and of other networks, on exact or noised gradients.

:func:`prepare` reads no record: it checks, rehearses with a private client, and returns a function
that then trains the network in place.
"""

from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from fednas_flwr.client.client import Client
from fednas_flwr.client.noised_gradients import NoisedGradients
from fednas_flwr.models.metrics import record_losses
from fednas_flwr.protocol.messages import Request
from fednas_flwr.protocol.requests import LocalSearch, LocalTraining
from fednas_flwr.protocol.states import MOMENTS, Layout, Tensors, network_states, unpack
from fednas_flwr.search import candidate, exact_gradients, local_search
from fednas_flwr.search import optimizer_step as opt
from fednas_flwr.search.proxyless import PathNetwork, covering_paths, search_paths
from fednas_flwr.spaces.space import Supernet

Training = Callable[[], tuple[opt.Optimizers, dict[str, float]]]  # trains and returns metrics


def prepare(
    client: Client,
    request: Request,
    local: LocalSearch | LocalTraining,
    network: nn.Module,
    *,
    generator: torch.Generator | None = None,
) -> Training:
    """Return a function that trains a network in place: a supernet's search, or its weights alone.

    A search is FEATHERS, Alg. 4, or its private form. The private form omits the look-ahead of line
    2, whose weights would carry no noise. In private mode training is DP-SGD (Abadi et al. 2016,
    arXiv 1607.00133, Alg. 1) with momentum on the noised gradients: every step is a release of its
    own, from which the weights follow. ``clip_norm`` bounds the noised mean, in addition to the
    clipping of each record.

    Args:
        client: The client whose records are read.
        request: The request; for a private client, with the plans of the states that are trained.
        local: The search or training to carry out.
        network: The network, which is trained in place.
        generator: Generator of exact batches; None uses the request's.
    """
    purpose = "search" if isinstance(local, LocalSearch) else "weights"
    generator = generator or client.generator(request.header, purpose)
    gradients = _gradients(client, request, local, generator)
    if isinstance(local, LocalTraining):
        network.drop_path_prob = local.drop_path_prob  # type: ignore[assignment]
        if isinstance(gradients, NoisedGradients):
            gradients.rehearse("weights", network, local.network, local.drop_path_prob > 0)
    else:
        assert isinstance(network, Supernet)
        if local.paths is not None and local.paths.hardware is not None:
            local.paths.hardware.check()
        if isinstance(gradients, NoisedGradients):
            _rehearse_search(gradients, local, network)
    sent = sent_moments(request, network)

    def train() -> tuple[opt.Optimizers, dict[str, float]]:
        members = network.members if isinstance(network, candidate.Pool) else [network]
        groups = [{"params": list(opt.trainable_weights(member).values())} for member in members]
        by_paths = isinstance(local, LocalSearch) and local.paths is not None
        sgd = opt.make_sgd(groups, local.weights, nesterov=by_paths)
        weights = opt.Optimizer(opt.trainable_weights(network), sgd, local.weights.clip_norm)
        if isinstance(local, LocalTraining):
            network.drop_path_prob = local.drop_path_prob  # type: ignore[assignment]
            optimizers = opt.Optimizers(weights, sent=sent)
            opt.train(network, gradients, weights, local.proximal)
            return optimizers, gradients.metrics()
        assert isinstance(network, Supernet)
        alphas = network.alphas()
        adam = opt.make_adam(alphas.values(), local.alphas, beta=0.0 if by_paths else 0.5)
        optimizers = opt.Optimizers(weights, opt.Optimizer(alphas, adam), sent)
        if local.alternating is not None:
            local_search.alternate(network, gradients, optimizers, local.alternating)
        elif local.paths is not None:
            search_paths(network, gradients, optimizers, local.paths, generator=generator)
        return optimizers, gradients.metrics()

    return train


def _rehearse_search(gradients: NoisedGradients, local: LocalSearch, supernet: Supernet) -> None:
    """Try a private search's gradients on made-up records."""
    if (paths := local.paths) is not None:
        for active_E1 in covering_paths(supernet, number=1):
            network = PathNetwork(supernet.train(), active_E1)
            gradients.rehearse("weights", network, "path", active_E1.tolist())
        for paths_EK in () if paths.warm_up else covering_paths(supernet, number=2):
            chosen = (asdict(paths), paths_EK.tolist())
            gradients.rehearse_gates(supernet, paths_EK, paths.hardware, *chosen)
        return
    for state in local.states:
        gradients.rehearse(state, supernet)


def _gradients(
    client: Client, request: Request, local: LocalSearch | LocalTraining, generator: torch.Generator
) -> opt.Gradients:
    """Return the source of a local loop's gradients; reads no record.

    Args:
        client: The client whose records are read.
        request: The request to answer.
        local: The local search or training.
        generator: Generator of exact batches and their augmentation.
    """
    amount, auxiliary_weight = local.amount, local.auxiliary_weight
    augmented = isinstance(local, LocalSearch) or local.augmented
    if client.guard is not None:
        return NoisedGradients(
            client,
            request,
            steps=amount.steps or 0,
            auxiliary_weight=auxiliary_weight,
            augmented=augmented,
        )
    size = amount.batch_size
    batches = partial(client.epoch, batch_size=size, generator=generator, augmented=augmented)
    return exact_gradients.ExactGradients(
        partial(batches, client.split(local.split)),
        partial(batches, client.data.validation) if "alphas" in local.states else None,
        epochs=amount.epochs,
        num_steps=amount.steps,
        objective=client.objective,
        auxiliary_weight=auxiliary_weight,
        precision=getattr(local, "precision", None) or client.precision,
    )


def sent_moments(
    request: Request, network: nn.Module, *, only: Collection[str] | None = None
) -> Tensors:
    """Return the optimisers' moments that a request carries, by name; empty if it has none.

    Args:
        request: Request whose ``moments`` are read.
        network: The network to which the moments belong.
        only: The names of the moments that the request carries; None means all.

    Raises:
        ValueError: They do not belong to this network, or Adam cannot continue from their numbers
            of steps.
    """
    if MOMENTS not in request.states:
        return {}
    layout = Layout.of(opt.no_moments(network))
    if only is not None:
        layout = layout.part(only)
    moments = unpack(request.states[MOMENTS], layout)
    for name, tensor in moments.items():
        if name.startswith("alphas.step.") and not tensor.item() >= 0:
            raise ValueError(f"{name}={tensor.item()}: a number of steps is 0 or more")
    return moments


def trained_states(
    network: nn.Module, optimizers: opt.Optimizers, *, without: tuple[str, ...] = ()
) -> dict[str, Tensors]:
    """Return the nonempty states of a trained network, and its moments if they travel.

    Args:
        network: The trained network.
        optimizers: The optimisers that have trained it.
        without: States to omit.
    """
    states = {**network_states(network), MOMENTS: optimizers.moments()}
    return {name: state for name, state in states.items() if state and name not in without}


def refresh_statistics(
    client: Client, request: Request, network: nn.Module, batch_size: int | None
) -> None:
    """Estimate batch norm's statistics anew, on one pass over the client's train records.

    After few steps running statistics lag far behind the weights. A loss computed with them would
    measure this lag, to the disadvantage of every configuration that learns fast.
    """
    if not isinstance(network, Supernet):
        network.drop_path_prob = 0.0  # type: ignore[assignment]
    generator = client.generator(request.header, "statistics")
    batches = client.epoch(client.data.train, batch_size=batch_size, generator=generator)
    update_bn(batches, network, client.device)


def validation_losses(client: Client, network: nn.Module) -> torch.Tensor:
    """Return the loss of every validation record, float64 [records] on the CPU, as in training."""
    split = client.data.validation
    losses = record_losses(network, split, client.device, objective=client.objective)
    factors = client.objective.record_factors(split.labels[split.rows])
    return losses if factors is None else losses * factors.double().cpu()


def clipped_decreases(decreases: torch.Tensor, bound: float) -> torch.Tensor:
    """Return each record's decrease, clipped to the bound; NaN counts as -bound."""
    return decreases.nan_to_num(nan=-bound).clamp(-bound, bound)

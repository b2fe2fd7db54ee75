"""Steps along gradients, of which every local loop consists, whatever the gradients' source.

A loop (``local_search``, ``proxyless``, :func:`train`) asks a :class:`Gradients` object for the
next gradients and lets an :class:`Optimizer` step along them. Exact gradients are those of the next
batches (``exact_gradients``); private ones are noised releases. A loop never sees a record.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fednas_flwr.search.candidate import Candidate
from fednas_flwr.settings.optimizers import SGD, Adam
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.space import Supernet

Tensors = dict[str, Tensor]  # name -> tensor
Named = Mapping[str, Tensor]  # the same, read-only
Gradient = Mapping[str, Tensor | None]  # name -> gradient; None or no entry: not stepped
Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
MOMENTS = {"weights": ("momentum_buffer",), "alphas": ("exp_avg", "exp_avg_sq", "step")}


def without_compiler(optimizer: type[Kind]) -> type[Kind]:
    """A torch optimiser whose methods don't import ``torch.compile``: unused here, takes 1 s."""
    names = ("add_param_group", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


PlainSGD, PlainAdam = without_compiler(torch.optim.SGD), without_compiler(torch.optim.Adam)


class Gradients(Protocol):
    """A source of mean gradients."""

    def steps(self) -> Iterator[None]:
        """Yield once for every step to take, with new records each time."""

    def weights(self, network: nn.Module) -> Gradient:
        """The gradient of a network's weights, on train records.

        Within a step, draws and results are the same however often it is called.
        """

    def alphas(self, supernet: Supernet, weights: "Optimizer", *, rule: str) -> Gradient:
        """The gradient of a supernet's alphas, on validation records.

        Args:
            supernet: The supernet before the weights' step.
            weights: The weights' optimiser, whose step the second order anticipates.
            rule: Rule of the gradient, one of ``settings.optimizers.RULES``.
        """

    def gates(self, supernet: Supernet, paths_EK: Tensor, hardware: HardwareLoss | None) -> Tensor:
        """The gradient [E, O] of the alphas of drawn paths, on validation records."""

    def metrics(self) -> dict[str, float]:
        """The metrics of the batches so far; empty if they must not leave the client."""


@dataclass
class Optimizer:
    """An optimiser of some parameters.

    Attributes:
        parameters: Parameters by name; stepped in place.
        torch_optimizer: Torch's optimiser of exactly these parameters.
        clip_norm: Largest norm of a mean gradient; None does not clip.
    """

    parameters: Mapping[str, nn.Parameter]
    torch_optimizer: torch.optim.Optimizer
    clip_norm: float | None = None

    def step(self, gradient: Gradient) -> None:
        """Take one step along ``gradient``; parameters without one neither move nor decay.

        The optimiser then owns its tensors: clipping scales them in place.
        """
        for name, parameter in self.parameters.items():
            value = gradient.get(name)
            parameter.grad = None if value is None else value.to(parameter).contiguous()
        clip_gradients(self.torch_optimizer, self.clip_norm)
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()  # sets them to None


@dataclass
class Optimizers:
    """The optimisers of one local training.

    Attributes:
        weights: Optimiser of the weights.
        alphas: Optimiser of the alphas; None if they stay fixed.
        sent: The optimisers' moments with which the training began; empty if there were none.
    """

    weights: Optimizer
    alphas: Optimizer | None = None
    sent: Named = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let the optimisers continue with the moments that were sent."""
        for key, moment, parameter, state in self._places():
            if key in self.sent:
                sent = self.sent[key].clone()
                state[parameter][moment] = (
                    sent.reshape(()) if moment == "step" else sent.to(parameter)
                )

    def moments(self) -> Tensors:
        """The optimisers' current moments, named like those that were sent."""
        moments = {name: value.clone() for name, value in self.sent.items()}
        for key, moment, parameter, state in self._places():
            value = state.get(parameter, {}).get(moment)
            if value is not None and key in moments:
                moments[key].copy_(value.detach().reshape(moments[key].shape))
        return moments

    def _places(self) -> Iterator[tuple[str, str, nn.Parameter, dict[Tensor, Any]]]:
        """Name, moment, parameter and optimiser state of everything that can be sent."""
        for part, optimizer in (("weights", self.weights), ("alphas", self.alphas)):
            if optimizer is not None:
                for name, parameter in optimizer.parameters.items():
                    for moment in MOMENTS[part]:
                        state = optimizer.torch_optimizer.state
                        yield f"{part}.{moment}.{name}", moment, parameter, state


def no_moments(network: nn.Module) -> Tensors:
    """The moments of optimisers that have not stepped: zeros, by state, moment and name."""
    alphas: Named = getattr(network, "alphas", dict)()
    parameters = {"weights": trainable_weights(network), "alphas": alphas}
    return {
        f"{state}.{moment}.{name}": torch.zeros(1 if moment == "step" else parameter.shape)
        for state, named in parameters.items()
        for moment in MOMENTS[state]
        for name, parameter in named.items()
    }


def path_states(supernet: Supernet, paths: Iterable[Sequence[int]]) -> dict[str, set[str]]:
    """The names, by state, of tensors that training on any of these paths reads or moves.

    Server and clients compute them alike from the paths; messages carry no other tensors.
    """
    weights = {name for path in paths for name in Candidate(supernet, path).weights()}
    moments = {f"weights.{moment}.{name}" for moment in MOMENTS["weights"] for name in weights}
    return {"weights": weights, "moments": moments}


def train(
    network: nn.Module, gradients: Gradients, weights: Optimizer, proximal: float = 0.0
) -> None:
    """Train the weights of a network, in place.

    Args:
        network: Network to train.
        gradients: Gradients of its weights.
        weights: Optimiser that steps along them.
        proximal: mu of :class:`Proximal`.
    """
    network.train()
    pull = Proximal(proximal, weights.parameters)
    for _ in gradients.steps():
        weights.step(pull.added_to(gradients.weights(network)))


class Proximal:
    """The gradient of ``(mu / 2) ||w - w_0||^2``.

    FedProx: Li et al. (2020), arXiv 1812.06127, Eq. 2. It reads no record and so costs no privacy.

    Args:
        mu: At least 0.
        weights: w, which others move; their present values are w_0.
    """

    def __init__(self, mu: float, weights: Named) -> None:
        """Store the present weights if mu is not 0."""
        self.mu, self._weights = mu, weights if mu else {}
        self._start = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def added_to(self, gradient: Gradient) -> Gradient:
        """A gradient of the weights plus this one."""
        if not self._start:
            return gradient
        weights, start = self._weights, self._start
        pulls = {name: self.mu * (weights[name].detach() - start[name]) for name in gradient}
        return add_gradients(gradient, pulls)


def add_gradients(gradient: Gradient, further: Named) -> Gradient:
    """The sum of two gradients by name; the first may lack some names."""
    addends = {name: gradient.get(name) for name in further}
    return {n: further[n] if g is None else g + further[n] for n, g in addends.items()}


def after_prefix(tensors: Named, prefix: str) -> Tensors:
    """The tensors whose names begin with a prefix, named without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def make_sgd(
    parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
    settings: SGD,
    *,
    nesterov: bool = False,
) -> torch.optim.SGD:
    """Make torch's SGD with the constants of ``settings``, at ``settings.lr``.

    Args:
        parameters: Parameters to step, or torch's groups of them, each clipped on its own.
        settings: The constants.
        nesterov: True if momentum, if there is any, is Nesterov's.
    """
    lr, momentum, decay = settings.lr, settings.momentum, settings.weight_decay
    nesterov = nesterov and momentum > 0
    return PlainSGD(parameters, lr, momentum, weight_decay=decay, nesterov=nesterov)


def make_adam(
    parameters: Iterable[Tensor], settings: Adam, *, beta: float = 0.5
) -> torch.optim.Adam:
    """Make torch's Adam with the constants of ``settings``; ``beta`` is the first, as in DARTS."""
    return PlainAdam(
        parameters, lr=settings.lr, betas=(beta, 0.999), weight_decay=settings.weight_decay
    )


def clip_gradients(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    """Scale the gradients of each group of an optimiser to a norm of at most ``clip_norm``."""
    if clip_norm is not None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], clip_norm)


def trainable_weights(network: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters but the alphas, by name."""
    weights = getattr(network, "weights", None)
    return dict(weights() if weights is not None else network.named_parameters())

"""Private ProxylessNAS on one client: noised steps of the alphas and weights of drawn paths.

Not in the texts: Zhang et al. (2020), FDNAS, name privacy as open. :func:`path_training` takes the
place of ``noised_training.local_training`` where a request samples paths.

Guarantee: every step is one release of a clipped sum over a Poisson batch, plus noise, as booked.
A path is drawn from the run's seed and what was released before, so given the path a step is DP-SGD
on one network. What lies beside the path has no gradient whatever the records are:

* Weights: noise is on the path's own, by which a record's gradient is clipped; no other moves.
* Alphas: a record's gradient by the gates of the computed ops becomes one by the alphas, is clipped
  over all blocks and noised. Noise on other ops' alphas is set to zero: post-processing.
* Cost: the gradient of an additive loss's part knows no record and is added after the noise. The
  multiplicative form is a factor of every record's loss and so is clipped with it.

Tensor suffixes: B records, E blocks, O ops, K ops that are computed in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.noised_training import (
    SPLIT_OF,
    noised_sum,
    numbers,
    rehearse,
    whole_number,
)
from fednas_flwr.clients.release import Admission
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.exchange.messages import Request
from fednas_flwr.exchange.states import Tensors
from fednas_flwr.hardware.costs import HardwareLoss, hardware_loss
from fednas_flwr.names import LARGEST_MICRO_BATCH
from fednas_flwr.privacy.clipping import (
    Relaxation,
    clipped_alpha_gradient_sum,
    clipped_gradient_sum,
)
from fednas_flwr.search.gates import active_gates, alpha_gradient, draw_paths
from fednas_flwr.search.path_network import (
    PathNetwork,
    cost_gradient,
    drawable_alphas,
    largest_paths,
    offered_ops,
)
from fednas_flwr.search.proxyless import (
    make_alpha_optimizer,
    make_weight_optimizer,
    move_alphas,
    uniform_alphas,
)
from fednas_flwr.search.settings import GATES, SGD, Adam
from fednas_flwr.search.training import clip_gradients, record_losses
from fednas_flwr.search_spaces.mbconv_plan import CELL
from fednas_flwr.search_spaces.space import Supernet


def path_training(
    client: Client, request: Request, supernet: Supernet, admissions: Mapping[str, Admission]
) -> Callable[[], None]:
    """Return what trains a supernet in place by ``local_steps`` noised steps; reads no record.

    Each is a step of the alphas, then one of the weights; a warm-up is of the weights alone.

    Args:
        client: With a gate.
        request: Of ``train.search`` with ``gates``.
        supernet: Of the MBConv space.
        admissions: Of ``weights`` and, but in a warm-up, of ``alphas``.
    """
    settings, warm_up = request.settings, "alphas" not in admissions
    if settings["gates"] not in GATES:
        raise unknown_choice("gates", settings["gates"], GATES)
    sgd, adam = SGD(**numbers(settings["weights"])), Adam(**numbers(settings["alphas"]))  # type: ignore[arg-type]
    given = settings["hardware"]
    hardware = None if given is None else hardware_loss(given)
    if hardware is not None and hardware.costs.per_op_EO.shape != supernet.alphas()[CELL].shape:
        raise ConfigError("refused, the costs of hardware are not of this supernet's ops.")
    steps = PathSteps(
        client,
        supernet.train(),
        admissions,
        mode=settings["gates"],
        hardware=hardware,
        micro_batch_size=whole_number(settings, "micro_batch_size", largest=LARGEST_MICRO_BATCH),
        generator=client.generator(request.header, "search"),
    )
    steps.rehearse(given, warm_up=warm_up)

    def train() -> None:
        weight_optimizer = make_weight_optimizer(supernet, sgd)
        alpha_optimizer = make_alpha_optimizer(supernet, adam)
        for _ in range(settings["local_steps"]):
            if not warm_up:
                steps.alpha_step(alpha_optimizer)
            steps.weight_step(weight_optimizer, warm_up=warm_up, clip_norm=sgd.clip_norm)

    return train


@dataclass(frozen=True)
class PathSteps:
    """The two steps of a private path search, each of which is one release.

    Attributes:
        client: With a gate.
        supernet: In training mode; stepped in place.
        admissions: By state.
        mode: ``two`` or ``full``.
        hardware: What cost does to the loss of the alphas; None leaves it out.
        micro_batch_size: Records whose gradients are in memory at a time.
        generator: Draws the paths; on the CPU.
    """

    client: Client
    supernet: Supernet
    admissions: Mapping[str, Admission]
    _: KW_ONLY
    mode: str
    hardware: HardwareLoss | None
    micro_batch_size: int
    generator: torch.Generator

    def rehearse(self, *chosen: object, warm_up: bool) -> None:
        """Try both steps' computation on made-up records, on paths that no drawn one exceeds."""
        paths_EK, size = largest_paths(self.supernet, mode=self.mode), self.micro_batch_size
        rehearse(self.client, partial(self._weight_sum, paths_EK), size, "path")
        if not warm_up:
            alpha_sum = partial(self._alpha_sum, paths_EK)
            rehearse(self.client, alpha_sum, size, "gates", self.mode, *chosen)
            self._cost_gradient(paths_EK)

    def alpha_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the alphas of drawn paths."""
        alphas_EO, drawn_EO = self.supernet.alphas()[CELL], drawable_alphas(self.supernet)
        paths_EK = draw_paths(drawn_EO, mode=self.mode, generator=self.generator)
        noised_EO = self._mean("alphas", partial(self._alpha_sum, paths_EK))[CELL].to(alphas_EO)
        computed_EO = torch.zeros(alphas_EO.shape, dtype=torch.bool).scatter(-1, paths_EK, True)
        moved_EO = (computed_EO & offered_ops(self.supernet)).to(alphas_EO.device)
        alphas_EO.grad = noised_EO.where(moved_EO, 0.0) + self._cost_gradient(paths_EK)
        move_alphas(alphas_EO, paths_EK, mode=self.mode, optimizer=optimizer)

    def weight_step(
        self, optimizer: torch.optim.Optimizer, *, warm_up: bool, clip_norm: float | None
    ) -> None:
        """Move the weights of one drawn path; ``clip_norm`` bounds the noised mean."""
        drawn_EO, weights = drawable_alphas(self.supernet), self.supernet.weights()
        drawn_EO = uniform_alphas(drawn_EO) if warm_up else drawn_EO
        path_E1 = draw_paths(drawn_EO, mode="one", generator=self.generator)
        optimizer.zero_grad()  # to None: weights beside the path neither decay nor move
        for name, mean in self._mean("weights", partial(self._weight_sum, path_E1)).items():
            weights[name].grad = mean.to(weights[name])
        clip_gradients(optimizer, clip_norm)
        optimizer.step()

    def _mean(self, state: str, clipped_sum: Callable[[Tensor, Tensor], Tensors]) -> Tensors:
        """Return the noised sum over a Poisson batch, over the batch's expected size."""
        admission, split = self.admissions[state], self.client.split(SPLIT_OF[state])
        sums = noised_sum(self.client, admission, split, self.micro_batch_size, clipped_sum)
        return {name: total / admission.batch_size for name, total in sums.items()}

    def _weight_sum(self, paths_EK: Tensor, x: Tensor, y: Tensor) -> Tensors:
        """Return the clipped sum of gradients by the weights of the active path."""
        network = PathNetwork(self.supernet, paths_EK[:, :1])
        return clipped_gradient_sum(
            network,
            x,
            y,
            loss=record_losses,
            parameters=network.weights(),
            max_norm=self.admissions["weights"].terms.max_grad_norm,
            class_factors=self.client.class_factors,
        )

    def _alpha_sum(self, paths_EK: Tensor, x: Tensor, y: Tensor) -> Tensors:
        """Return the clipped sum of gradients by the alphas, through the paths' gates."""
        alphas, factor = self.supernet.alphas(), None
        if self.hardware is not None and self.hardware.form == "multiplicative":
            factor = self.hardware
        gates_EK = active_gates(paths_EK, like=alphas[CELL])

        def losses(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
            if isinstance(output, Tensor):
                return record_losses(output, labels)
            assert factor is not None  # whose costs the network returns
            logits, cost_B = output
            return factor(record_losses(logits, labels), cost_B)

        return clipped_alpha_gradient_sum(
            PathNetwork(self.supernet, paths_EK, None if factor is None else factor.costs),
            x,
            y,
            loss=losses,
            alphas=alphas,
            relaxation=Relaxation(
                {CELL: gates_EK}, lambda kind, g: alpha_gradient(g, alphas[kind].double(), paths_EK)
            ),
            max_norm=self.admissions["alphas"].terms.max_grad_norm,
            class_factors=self.client.class_factors,
        )

    def _cost_gradient(self, paths_EK: Tensor) -> Tensor:
        """Return the gradient [E, O] of an additive loss's cost, zeros without one."""
        if self.hardware is None or self.hardware.form != "additive":
            return torch.zeros_like(self.supernet.alphas()[CELL])
        return cost_gradient(self.hardware, self.supernet, paths_EK)

"""Differentiable search on one client: an alpha step, then a weight step, again and again.

Three rules for the alpha step: ``first_order`` and ``second_order`` (DARTS, Liu et al., 2019,
arXiv 1806.09055, Alg. 1) and ``mixed_level`` (MiLeNAS, the rule of FedNAS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fednas_flwr.errors import ConfigError
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.architect import (
    alpha_gradient_sum,
    mixed_level_gradient,
    second_order_gradient,
    virtual_step,
)
from fednas_flwr.search.auxiliary_skip import AuxiliarySkip
from fednas_flwr.search.descent import MOMENTS, Descent, Descents, Gradient, Gradients, Proximal
from fednas_flwr.search.gumbel import GumbelPath, Relaxed, draw_path, path_tensors
from fednas_flwr.search.objective import Objective
from fednas_flwr.search.regularisation import beta_gradient
from fednas_flwr.search.settings import NonNegative, PathSeed, Positive, Rule
from fednas_flwr.search.training import Batch
from fednas_flwr.search_spaces.genotype import SKIP
from fednas_flwr.search_spaces.space import Supernet
from fednas_flwr.typed import Checked


@dataclass(frozen=True)
class Alternating(Checked):
    """The steps of a client's local search on all ops.

    Attributes:
        rule: Of the alphas' gradient, one of ``RULES``.
        validation_weight: Weight of the validation loss under ``mixed_level``, at least 0.
        proximal: mu, at least 0, of :class:`~fednas_flwr.search.descent.Proximal`, w_0 being the
            weights that the search began with.
        beta_decay: Weight of beta-DARTS' regulariser of the alphas, at least 0; see
            ``regularisation.beta_gradient``.
        temperature: Of GDAS, above 0: both gradients are of single paths, each drawn anew
            (``gumbel.GumbelPath``). None computes all ops.
        path_seed: Of the noise of one path that all gradients are of, 0 or more; with a
            ``temperature``. See :func:`gumbel_states`.
        auxiliary_skip: beta of DARTS-minus, at least 0: both gradients are of the supernet with a
            further skip connection beside every edge (``auxiliary_skip.AuxiliarySkip``).
    """

    rule: Rule
    validation_weight: NonNegative = 1.0
    proximal: NonNegative = 0.0
    beta_decay: NonNegative = 0.0
    temperature: Positive | None = None
    path_seed: PathSeed | None = None
    auxiliary_skip: NonNegative = 0.0

    def __post_init__(self) -> None:
        """Check the ranges, and that rule and path fit."""
        super().__post_init__()
        if self.path_seed is not None and self.temperature is None:
            raise ConfigError(
                f"path_seed={self.path_seed} without a temperature: only single paths are drawn."
            )
        if self.temperature is not None and self.rule == "second_order":
            raise ConfigError(
                "rule=second_order with single paths is not defined: the look-ahead is of another "
                "path; set rule=first_order."
            )
        if self.auxiliary_skip and (self.temperature is not None or self.rule == "second_order"):
            raise ConfigError(
                f"auxiliary_skip={self.auxiliary_skip:g} with single paths or rule=second_order is "
                "not built: set auxiliary_skip=0."
            )


def alternate(
    supernet: Supernet,
    gradients: Gradients,
    descents: Descents,
    alternating: Alternating,
    *,
    generator: torch.Generator | None = None,
    ops: Sequence[str] = (),
) -> None:
    """Search in place: each step moves the alphas, then the weights.

    Args:
        supernet: Its weights and alphas are those of ``descents``.
        gradients: Exact or noised.
        descents: Of weights and alphas.
        alternating: The constants.
        generator: Of single paths, where each gradient has its own; on the CPU.
        ops: The space's, where there is an auxiliary skip.
    """
    assert descents.alphas is not None
    supernet.train()
    held = Proximal(alternating.proximal, supernet.weights())
    temperature, kept = alternating.temperature, None
    if temperature is not None and alternating.path_seed is not None:
        noise = _noise_of(alternating.path_seed)
        kept = GumbelPath(supernet, temperature=temperature, generator=noise)

    def network() -> Relaxed:
        """Return what the next gradient is of."""
        if alternating.auxiliary_skip:
            column = ops.index(SKIP)
            return AuxiliarySkip(supernet, column=column, beta=alternating.auxiliary_skip)
        if temperature is None or kept is not None:
            return kept or supernet
        assert generator is not None
        return GumbelPath(supernet, temperature=temperature, generator=generator)

    for _ in gradients.steps():
        gradient = gradients.alphas(
            network(),
            descents.weights,
            rule=alternating.rule,
            validation_weight=alternating.validation_weight,
        )
        if alternating.beta_decay:
            gradient = _with_beta(gradient, supernet, alternating.beta_decay)
        descents.alphas.step(gradient)
        descents.weights.step(held.added_to(gradients.weights(network())))


def gumbel_states(
    supernet: Supernet, alphas: Mapping[str, Tensor], path_seed: int
) -> dict[str, set[str]]:
    """Return the names of what a search on one path reads or moves, by state; of others all.

    The path is drawn by the alphas that the search begins with, and stays as they move. Server and
    clients compute it alike from these and the seed: messages carry nothing else.

    Args:
        supernet: Gives the names.
        alphas: By kind of cell.
        path_seed: See :class:`Alternating`.

    Raises:
        ValueError: No path can be drawn in the supernet's space.
    """
    _, columns = draw_path(supernet, alphas, _noise_of(path_seed))
    weights, buffers = path_tensors(supernet, columns)
    named = {"weights": weights, "alphas": set(alphas)}
    moments = {
        f"{s}.{m}.{name}" for s, names in named.items() for m in MOMENTS[s] for name in names
    }
    return {"weights": weights, "buffers": buffers, "moments": moments}


def _noise_of(path_seed: int) -> torch.Generator:
    return make_generator(path_seed, "gumbel")


def _with_beta(gradient: Gradient, supernet: Supernet, weight: float) -> Gradient:
    """Return the alphas' gradient with that of beta-DARTS' regulariser."""
    further = beta_gradient(supernet.alphas(), weight=weight)
    return {
        kind: added if (own := gradient.get(kind)) is None else own + added
        for kind, added in further.items()
    }


def exact_alpha_gradient(
    supernet: Relaxed,
    train_batch: Batch,
    validation_batch: Batch,
    *,
    rule: str,
    validation_weight: float,
    weights: Descent,
    objective: Objective,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the alphas' gradient by the chosen rule, of batch means, and validation losses [B].

    Args:
        supernet: At the point before the weights' step.
        train_batch: What the weights step on next.
        validation_batch: What the alphas step on.
        rule: One of ``RULES``.
        validation_weight: Weight of the validation loss under ``mixed_level``.
        weights: Gives the virtual step of ``second_order`` its constants and its momentum.
        objective: Gives the losses.
    """
    if rule == "first_order":
        sums, losses = alpha_gradient_sum(supernet, validation_batch, objective=objective)
        return {kind: g / len(validation_batch[1]) for kind, g in sums.items()}, losses
    if rule == "mixed_level":
        return mixed_level_gradient(
            supernet,
            train_batch=train_batch,
            validation_batch=validation_batch,
            validation_weight=validation_weight,
            objective=objective,
        )
    (constants,) = weights.optimizer.param_groups
    virtual_weights = virtual_step(
        supernet,
        train_batch,
        inner_lr=constants["lr"],
        momentum=constants["momentum"],
        weight_decay=constants["weight_decay"],
        optimizer=weights.optimizer,
        objective=objective,
    )
    return second_order_gradient(
        supernet,
        weights=supernet.weights(),
        virtual_weights=virtual_weights,
        train_batch=train_batch,
        validation_batch=validation_batch,
        inner_lr=constants["lr"],
        objective=objective,
    )

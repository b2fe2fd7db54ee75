"""Exact gradients of the next batches, with which clients without privacy train.

The weights are those of a supernet or of a derived network. For the alphas the rules are first
order, second order and mixed level.

All functions leave the weights, the alphas and their ``.grad`` unchanged. Batch norm's running
statistics move, as with any forward in training mode.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, count, islice, repeat
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fednas_flwr.privacy.mechanism.clipping import clipped_gradient_sum
from fednas_flwr.search.candidate import PREFIX, Pool
from fednas_flwr.search.objective import CLASSIFICATION, Batch, Objective, heads
from fednas_flwr.search.optimizer_step import Gradient, Named, Optimizer, Tensors, trainable_weights
from fednas_flwr.search.proxyless import alpha_gradient, gate_gradient
from fednas_flwr.settings.names import BFLOAT16, FLOAT32
from fednas_flwr.settings.optimizers import DPAware
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.mbconv import CELL
from fednas_flwr.spaces.space import Supernet

MICRO_BATCH = 128  # records whose gradients are in memory at a time
Passes = Callable[[], Iterator[Batch]]  # begins another pass over some records


@dataclass
class Tally:
    """Running sums over batches; ``loss`` and ``accuracy`` are means over examples.

    The sums stay on the batches' device until they are requested, so that no step waits for a GPU.
    """

    loss_sum: Tensor | float = 0.0
    correct: Tensor | float = 0.0
    num_examples: int = 0

    def add(self, losses: Tensor, hits: Tensor | None = None) -> None:
        """Add a batch: losses [B], and the correctness of predictions [B] (None adds none)."""
        self.loss_sum = self.loss_sum + losses.detach().sum().double()
        self.num_examples += len(losses)
        if hits is not None:
            self.correct = self.correct + hits.detach().sum()

    @property
    def loss(self) -> float:
        """Mean loss of the batches."""
        return float(self.loss_sum) / self.num_examples

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return float(self.correct) / self.num_examples


@dataclass(kw_only=True)
class BatchGradients:
    """Gradients of batches by an objective, with tallies of their losses and hits.

    Attributes:
        objective: The objective that gives losses and hits.
        auxiliary_weight: Weight of an auxiliary head's loss.
        precision: Number format, see :func:`computed_in`.
        train_tally: Tally of train batches, taken before the steps on them.
        validation_tally: Tally of validation batches.
    """

    objective: Objective = CLASSIFICATION
    auxiliary_weight: float = 0.0
    precision: str = FLOAT32
    train_tally: Tally = field(default_factory=Tally, init=False)
    validation_tally: Tally = field(default_factory=Tally, init=False)

    def metrics(self) -> dict[str, float]:
        """Loss and accuracy on train batches, and loss on validation batches, if there are any."""
        train, validation, metrics = self.train_tally, self.validation_tally, dict[str, float]()
        if train.num_examples:
            metrics |= {"train_loss": train.loss, "train_accuracy": train.accuracy}
        if validation.num_examples:
            metrics["validation_loss"] = validation.loss
        return metrics

    def weight_gradient(
        self, network: nn.Module, batch: Batch, reduce: Callable[[Tensor], Tensor] = torch.mean
    ) -> dict[str, Tensor | None]:
        """The gradient of a batch's mean loss by a network's weights; None for weights without one.

        Args:
            network: Network in training mode; may return auxiliary logits along with its logits.
            batch: The records; they are tallied.
            reduce: Reduction of the records' losses to one number, the mean or the sum.
        """
        weights, output = trainable_weights(network), network(batch[0])
        loss, losses = self.objective.batch_loss(output, batch[1], self.auxiliary_weight, reduce)
        self.train_tally.add(losses, self.objective.hits(heads(output)[0], batch[1]))
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        return dict(zip(weights, gradients, strict=True))

    def weight_gradient_sum(self, network: nn.Module, batch: Batch) -> Tensors:
        """The sum over a batch of per-sample gradients of the weights, by parameter name.

        ``sum_i grad_W L(x_i, y_i, A, W)`` (DP-FNAS, arXiv 2110.11025, Eq. 3 before averaging).
        Parameters on which the loss does not depend get zeros. Alphas are omitted.
        """
        weights, sums = trainable_weights(network), self.weight_gradient(network, batch, torch.sum)
        return {n: torch.zeros_like(weights[n]) if g is None else g for n, g in sums.items()}

    def alpha_gradient_sum(self, supernet: Supernet, batch: Batch) -> tuple[Tensors, Tensor]:
        """The sum over a batch of per-sample gradients of the alphas, and the batch's losses.

        ``sum_i grad_A L(x_i, y_i, A, W)`` (DP-FNAS, arXiv 2110.11025, Eq. 4 before averaging).
        It is of first order: the weights are held fixed.

        Returns:
            Gradients by cell kind, shaped like the alphas; per-sample losses [B], detached.
        """
        alphas = supernet.alphas()
        losses = self._losses(supernet, {}, batch)
        return _gradients(losses.sum(), alphas), losses.detach()

    def virtual_step(
        self, supernet: Supernet, batch: Batch, *, optimizer: torch.optim.Optimizer
    ) -> Tensors:
        """Compute ``W' = W - lr (momentum v + grad_W L_train + weight_decay W)``.

        DARTS (Liu et al., 2019, arXiv 1806.09055, Eq. 7) with the constants and the momentum v of
        the weights' SGD, as in its authors' experiments. The weights themselves do not move.
        """
        (constants,) = optimizer.param_groups
        weights = supernet.weights()
        gradients = _gradients(self._losses(supernet, {}, batch).mean(), weights)
        moved = {}
        for name, weight in weights.items():
            velocity = optimizer.state.get(weight, {}).get("momentum_buffer")
            direction = gradients[name] + constants["weight_decay"] * weight.detach()
            if velocity is not None:
                direction = direction + constants["momentum"] * velocity
            moved[name] = weight.detach() - constants["lr"] * direction
        return moved

    def second_order_gradient(
        self,
        supernet: Supernet,
        *,
        weights: Named,
        virtual_weights: Named,
        train_batch: Batch,
        validation_batch: Batch,
        inner_lr: float,
    ) -> tuple[Tensors, Tensor]:
        """The second-order gradient of the alphas, for mean losses over batches.

        ``H = grad_A L_val(A, W') - inner_lr (grad_A L_tr(A, W+) - grad_A L_tr(A, W-)) / (2 r)``
        with ``W+- = W +- r grad_W' L_val(A, W')`` and ``r = .01 / ||grad_W' L_val||`` (DP-FNAS,
        Eq. 5; DARTS, Eq. 8). The finite difference is divided by 2 r; two public codes multiply
        instead. It is exact when the training loss is quadratic in W.

        Args:
            supernet: The function, with the alphas A.
            weights: W by parameter name.
            virtual_weights: W', the weights after one step on the training loss.
            train_batch: Batch of L_tr.
            validation_batch: Batch of L_val.
            inner_lr: Learning rate of the step from W to W'.

        Returns:
            Gradients by cell kind, shaped like the alphas; losses [B] of the validation batch.
        """
        alphas: Tensors = dict(supernet.alphas())
        leaves = {name: w.detach().requires_grad_() for name, w in virtual_weights.items()}
        losses = self._losses(supernet, leaves, validation_batch)
        gradients = _gradients(losses.mean(), alphas | leaves)
        direction = {name: gradients[name] for name in leaves}
        norm = math.sqrt(sum(float(g.square().sum()) for g in direction.values()))
        if norm == 0:  # W' is a stationary point of the validation loss: no correction
            return {kind: gradients[kind] for kind in alphas}, losses.detach()
        r = 0.01 / norm

        def train_gradient(sign: float) -> Tensors:
            shifted = {name: w.detach() + sign * r * direction[name] for name, w in weights.items()}
            return _gradients(self._losses(supernet, shifted, train_batch).mean(), alphas)

        plus, minus = train_gradient(1), train_gradient(-1)
        changes = {kind: inner_lr * (plus[kind] - minus[kind]) / (2 * r) for kind in alphas}
        return {kind: gradients[kind] - changes[kind] for kind in alphas}, losses.detach()

    def mixed_level_gradient(
        self, supernet: Supernet, *, train_batch: Batch, validation_batch: Batch
    ) -> tuple[Tensors, Tensor]:
        """Compute ``grad_A L_tr(A, W) + grad_A L_val(A, W)`` for batch means.

        MiLeNAS (He et al., 2020, arXiv 2003.12238, Eq. 4, with lambda 1), the local rule of FedNAS
        (arXiv 2004.08546). The losses [B] of the validation batch are also returned.
        """
        alphas = supernet.alphas()
        train_loss = self._losses(supernet, {}, train_batch).mean()
        losses = self._losses(supernet, {}, validation_batch)
        return _gradients(train_loss + losses.mean(), alphas), losses.detach()

    def _losses(self, network: nn.Module, weights: Named, batch: Batch) -> Tensor:
        x, y = batch
        logits = functional_call(network, dict(weights), (x,)) if weights else network(x)
        return self.objective.losses(logits, y)


@dataclass
class ExactGradients(BatchGradients):
    """Mean gradients of batches, with new batches in every step; tallies are of the last pass.

    Attributes:
        train: Function that begins a pass over train records.
        validation: Function that begins a pass over validation records; it is called as often as a
            pass over the train records needs. None if alphas stay fixed.
        epochs: Passes over the train records, if no number of steps is given.
        num_steps: Number of steps, in as many passes as they need; None takes ``epochs``.
        train_batch: The train batch of the step.
        validation_batch: Its validation batch, if there are validation records.
    """

    train: Passes
    validation: Passes | None = None
    _: KW_ONLY
    epochs: int | None = 1
    num_steps: int | None = None
    train_batch: Batch = field(init=False)
    validation_batch: Batch = field(init=False)
    _validation_batches: Iterator[Batch] = field(default=iter(()), init=False)

    def steps(self) -> Iterator[None]:
        """Yield once for every train batch."""
        for batch in islice(chain.from_iterable(self._passes()), self.num_steps):
            self.train_batch = batch
            if self.validation is not None:
                self.validation_batch = next(self._validation_batches)
            yield

    def _passes(self) -> Iterator[Iterator[Batch]]:
        """All passes over the train records."""
        for _ in range(self.epochs or 0) if self.num_steps is None else count():
            self.train_tally, self.validation_tally = Tally(), Tally()
            if self.validation is not None:
                self._validation_batches = chain.from_iterable(p() for p in repeat(self.validation))
            yield self.train()

    def weights(self, network: nn.Module) -> Gradient:
        """The gradient on the step's train batch; for a pool, each member's own."""
        if isinstance(network, Pool):
            return {
                f"{PREFIX}.{index}.{name}": value
                for index, member in enumerate(network.members)
                for name, value in self.weights(member).items()
            }
        with computed_in(self.precision, self.train_batch):
            return self.weight_gradient(network, self.train_batch)

    def alphas(self, supernet: Supernet, weights: Optimizer, *, rule: str) -> Gradient:
        """The gradient of the alphas by any rule."""
        precision = FLOAT32 if rule == "second_order" else self.precision
        with computed_in(precision, self.validation_batch):
            gradient, losses = self._alphas(supernet, weights, rule)
        self.validation_tally.add(losses)
        return gradient

    def _alphas(self, supernet: Supernet, weights: Optimizer, rule: str) -> tuple[Tensors, Tensor]:
        """The gradient, and the losses [B] of the validation batch."""
        batches = {"train_batch": self.train_batch, "validation_batch": self.validation_batch}
        if rule == "first_order":
            sums, losses = self.alpha_gradient_sum(supernet, self.validation_batch)
            return {kind: g / len(losses) for kind, g in sums.items()}, losses
        if rule == "mixed_level":
            return self.mixed_level_gradient(supernet, **batches)
        optimizer = weights.torch_optimizer
        return self.second_order_gradient(
            supernet,
            **batches,
            weights=supernet.weights(),
            virtual_weights=self.virtual_step(supernet, self.train_batch, optimizer=optimizer),
            inner_lr=optimizer.param_groups[0]["lr"],
        )

    def gates(self, supernet: Supernet, paths_EK: Tensor, hardware: HardwareLoss | None) -> Tensor:
        """The gradient [E, O] of the alphas on the step's validation batch."""
        batch = self.validation_batch
        with computed_in(self.precision, batch):
            gradients_EK, losses = gate_gradient(
                supernet, batch, paths_EK, hardware=hardware, objective=self.objective
            )
        self.validation_tally.add(losses)
        return alpha_gradient(gradients_EK, supernet.alphas()[CELL], paths_EK)


@dataclass(kw_only=True)
class ClippedGradients(ExactGradients):
    """DP-SGD's gradient, ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``, as a regulariser.

    It protects nobody: batches are not drawn by Poisson sampling, the noise follows from the run's
    seed, and nothing is booked.

    Attributes:
        dp_aware: Clipping norm and noise.
        generator: Source of the noise; on the CPU.
    """

    dp_aware: DPAware
    generator: torch.Generator

    def weights(self, network: nn.Module) -> dict[str, Tensor | None]:
        """The gradient on the step's train batch."""
        x, y = self.train_batch
        objective, clipping = self.objective, self.dp_aware

        def losses(logits: Tensor, labels: Tensor) -> Tensor:
            losses_B = objective.plain_losses(logits, labels)
            self.train_tally.add(losses_B, objective.hits(logits, labels))
            return losses_B

        parts = -(-len(x) // MICRO_BATCH)
        sums = clipped_gradient_sum(
            network,
            x,
            y,
            loss=losses,
            parameters=trainable_weights(network),
            max_norm=clipping.max_grad_norm,
            micro_batch_size=-(-len(x) // parts),
            class_factors=objective.class_factors,
        )
        std = clipping.noise_multiplier * clipping.max_grad_norm

        def noised(total: Tensor) -> Tensor:
            noise = torch.randn(total.shape, generator=self.generator).to(total.device)
            return (total + std * noise) / len(y)

        return {name: noised(total) for name, total in sums.items()}


@dataclass
class ExactSums(BatchGradients):
    """Sums of gradients over the next batches, which the clients of FNAS and FedSGD return.

    Attributes:
        train: The next train batches.
        validation: The next validation batches; None if alphas are not requested.
        previous_weights: W before the weights' last step, by name, for alphas of second order
            (DP-FNAS, arXiv 2110.11025, Eq. 5); their gradients are those of batch means, times the
            batch size. None means first order.
        inner_lr: Learning rate of that step, above 0.
    """

    train: Iterator[Batch]
    validation: Iterator[Batch] | None = None
    previous_weights: Named | None = None
    inner_lr: float = 0.0

    def sums(self, state: str, network: nn.Module) -> tuple[Tensors, float]:
        """The sum of the gradients of ``weights`` or ``alphas`` and the batch size."""
        batches = self.train if state == "weights" else self.validation
        assert batches is not None
        batch = next(batches)
        second_order = state == "alphas" and self.previous_weights is not None
        with computed_in(FLOAT32 if second_order else self.precision, batch):
            return self._sums(state, network, batch), len(batch[1])

    def _sums(self, state: str, network: nn.Module, batch: Batch) -> Tensors:
        """The sum over a batch."""
        if state == "weights":
            return self.weight_gradient_sum(network, batch)
        supernet = cast(Supernet, network)  # only supernets have alphas
        if self.previous_weights is None:
            sums, losses = self.alpha_gradient_sum(supernet, batch)
        else:
            means, losses = self.second_order_gradient(
                supernet,
                weights=self.previous_weights,
                virtual_weights=supernet.weights(),
                train_batch=next(self.train),
                validation_batch=batch,
                inner_lr=self.inner_lr,
            )
            sums = {kind: gradient * len(batch[1]) for kind, gradient in means.items()}
        self.validation_tally.add(losses)
        return sums


def periodic_gradients(
    gradient_sums: Callable[[], Mapping[str, tuple[Tensors, float]]],
    parameters: Mapping[str, Named],
    *,
    steps: int,
    local_lrs: Mapping[str, float],
) -> tuple[dict[str, Tensors], float]:
    """The gradients of states (weights, alphas, or both) accumulated over local steps.

    After each step but the last, every state moves by ``-local_lr`` times its batch's mean
    gradient, and the next gradients are taken there. These are the periodic updates that DP-FNAS
    leaves as future work. With one step and one state the result is that of ``gradient_sums``.

    Args:
        gradient_sums: Takes the next batches; returns, for each state, the sum of its gradients by
            name and the batch size B by which to divide the sum.
        parameters: The parameters of each state by name; moved in place.
        steps: Number of steps, at least 1.
        local_lrs: The learning rate of the local steps for each state.

    Returns:
        For each state the sum over steps of mean gradients, times B, so that division by B gives
        the sum of the mean gradients; and B, the first state's mean batch size.
    """
    totals: dict[str, Tensors] = {}
    sizes = []
    for step in range(1, steps + 1):
        sums = gradient_sums()
        sizes.append(next(iter(sums.values()))[1])
        if steps == 1 == len(sums):
            return {state: gradients for state, (gradients, _) in sums.items()}, sizes[0]
        for state, (gradients, batch_size) in sums.items():
            means = {name: gradient / batch_size for name, gradient in gradients.items()}
            before = totals.get(state)
            totals[state] = {n: before[n] + g for n, g in means.items()} if before else means
            if step < steps:
                with torch.no_grad():
                    for name, mean in means.items():
                        parameters[state][name].sub_(mean, alpha=local_lrs[state])
    size = sum(sizes) / len(sizes)
    return {s: {n: g * size for n, g in total.items()} for s, total in totals.items()}, size


def _gradients(loss: Tensor, parameters: Named) -> Tensors:
    """The gradients by name; zeros for parameters on which the loss does not depend.

    For example, a network of two reduction cells does not depend on the alphas of normal cells.
    """
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


@contextmanager
def computed_in(precision: str, batch: Batch) -> Iterator[None]:
    """Compute a batch's gradients in a precision, on its device, within this context.

    With ``bfloat16`` torch's autocast computes convolutions and matrix products in it. Parameters,
    their gradients, losses and group norms stay float32, and so does the second order of alphas,
    whose finite difference would be lost in rounding.
    """
    if precision != BFLOAT16:
        yield
        return
    with torch.autocast(batch[0].device.type, torch.bfloat16), _Float32Norms():
        yield


class _Float32Norms(TorchFunctionMode):
    """A mode that computes group norms in float32, as autocast does only on GPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func is nn.functional.group_norm:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))

"""FedAvg and FedSGD: retraining of derived networks, and fixed networks as baselines.

FedProx is FedAvg with a proximal term in the clients' steps; FedAdam is FedAvg with an optimiser on
the server.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor

from fednas_flwr.algorithms import base, fedavg
from fednas_flwr.algorithms.base import PrivateRound
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Settings, TakeNetworkGradient, Train
from fednas_flwr.protocol.states import Packed, Tensors, WeightedAverage
from fednas_flwr.search.optimizer_step import after_prefix, clip_gradients, make_sgd
from fednas_flwr.settings import AlgorithmSettings, Config
from fednas_flwr.settings.incompatible import averages_plainly, retrains_by_gradients
from fednas_flwr.settings.names import BATCH, GROUP
from fednas_flwr.settings.optimizers import SGD, Configuration
from fednas_flwr.settings.registry import algorithm_of
from fednas_flwr.settings.run_settings import GRADIENTS, Retrain, ServerAdam

SPLITS = ("train", "validation")  # the splits that are trained on if nothing is held out
LOCAL_STEPS = 300  # of retraining if the number of rounds is not set
STEPS_OF_A_ROUND = 5  # the fewest, as momentum begins anew in each round
FEWEST_ROUNDS, MOST_ROUNDS = 10, 40
DECAYED, MOST_DECAY = 5, 0.05  # weight decay times records of a table; largest weight decay
LONGER, PIXELS = 3, 256  # 3 times as long for images of 256 pixels or more
UNLIKE = 0.1  # from this association of clients and classes on, models of images drift apart
FLOWERS_MOMENTS = ("m_t", "v_t")  # Flower's names of the first and second moments


def trained_on(evaluate_every: int) -> tuple[str, ...]:
    """The splits to train on; validation records are held out if they are measured."""
    return SPLITS[:1] if evaluate_every else SPLITS


def association(counts: Sequence[Sequence[float]]) -> float:
    """Association of a record's client with its class: Goodman and Kruskal's tau (1954), in [0, 1].

    It is 0 for clients with equal shares of all classes, and 1 if each has a single class. For ten
    classes and five clients it is about .06 with a division by Dirichlet 1, .16 by Dirichlet .3,
    and .44 with two classes per client.

    Args:
        counts: Records by class, for each of one or more clients. With a single class the result is
            0.
    """
    table_KC = torch.tensor(counts, dtype=torch.float64)
    table_KC = table_KC[table_KC.sum(1) > 0] / table_KC.sum()
    chance = float(table_KC.sum(0).square().sum())
    known = float((table_KC.square().sum(1) / table_KC.sum(1)).sum())
    return (known - chance) / (1 - chance) if chance < 1 - 1e-9 else 0.0


def planned(config: Config, records: float, input_shape: Sequence[int], unlike: float) -> Retrain:
    """Retraining with its number of rounds: as set, or from the median client's number of records.

    If a pass over a table's records has fewer than 5 steps, a round has several passes: 40 rounds
    of two steps, each of which begins without momentum, leave a linear model half trained. In an
    exchange of gradients momentum is kept, and one pass is enough.

    The weight decay for a table is 5 over the number of all records, but at least as set and at
    most .05: as that of a Gaussian prior, it weighs less the more records there are. Without it
    networks learn small tables by heart (``scripts/results/README.md``).

    Args:
        config: Settings of the run.
        records: Number of records that the median client trains on.
        input_shape: Shape of a record. Images of at least 16 by 16 pixels get three times the
            steps. On held-out training images, 2,000 images of Fashion-MNIST gained 7 points by
            that and 8,000 of CIFAR-10 gained 15; tables and digits of 8 by 8 pixels have finished
            learning earlier.
        unlike: :func:`association` of clients and classes; 0 if it is not known. If clients have
            different classes of such images, their models and batch norms drift apart. From .1 on
            they exchange gradients of networks with group norm instead, unless exchange or momentum
            are set. On 20,000 held-out images of Fashion-MNIST a ResNet-8 gained 37 points by that
            with two classes per client, and 7 by Dirichlet .3. By Dirichlet 1, where models are
            still exchanged, it would gain 1.3. ``runtime=deployment`` keeps exchanging models:
            there an exchange takes seconds and a round would have hundreds.
    """
    if (retrain := config.retrain).rounds is not None:
        return retrain
    steps, image = retrain.local_steps(records), input_shape[1:]
    longer = LONGER if math.prod(image) >= PIXELS else 1
    kept = retrain.exchange or config.secure_sum or config.training.momentum == "averaged"
    unsuited = config.runtime.name == "deployment" or algorithm_of(config).retraining is not None
    if longer > 1 and unlike >= UNLIKE and averages_plainly(config) and not (kept or unsuited):
        norm = GROUP if retrain.norm == BATCH else retrain.norm
        retrain = replace(retrain, exchange=GRADIENTS, norm=norm)
    if not image:
        decay = min(DECAYED / max(1, records * config.clients), MOST_DECAY)
        decay = max(decay, retrain.weights.weight_decay)
        retrain = replace(retrain, weights=replace(retrain.weights, weight_decay=decay))
    passes = 1 if image or retrains_by_gradients(config) else math.ceil(STEPS_OF_A_ROUND / steps)
    rounds = max(FEWEST_ROUNDS, round(longer * LOCAL_STEPS / (passes * steps)))
    epochs = passes * retrain.local_epochs
    return replace(retrain, rounds=min(longer * MOST_ROUNDS, rounds), local_epochs=epochs)


def retrained_on(retrain: Retrain, declared: Mapping[str, int]) -> int:
    """The number of records that a client retrains on, given the numbers it declares by split."""
    return sum(declared.get(name, 0) for name in trained_on(retrain.evaluate_every))


def training_settings(config: Config, configuration: Configuration | None) -> tuple[SGD, float]:
    """The optimiser of retraining and the drop-path probability of its last round.

    Args:
        config: Settings of the run, which apply unless the search has found others.
        configuration: The hyper-parameters that the search has found; None if it found none.
    """
    weights = config.retrain.weights
    if configuration is None:
        return weights, config.retrain.drop_path_prob
    return configuration.annealed(weights), configuration.dropout


def _terms(retrain: Retrain, drop_path_prob: float, number: int, num_rounds: int) -> dict[str, Any]:
    """The records of a round's steps, and how they are computed; rounds count from 1."""
    return {
        "split": "+".join(trained_on(retrain.evaluate_every)),
        "drop_path_prob": drop_path_prob * (number - 1) / num_rounds,
        "augmented": number <= (1 - retrain.unaugmented) * num_rounds,
    }


class _Averaged(FlowerFedAvg):
    """Stand-in that gives Flower's optimiser the already computed average of the replies."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The only reply, which is the average."""
        (average,) = replies
        return cast(ArrayRecord, average), None


class _Adam(FedAdam, _Averaged):
    """FedAdam for replies that are already averaged."""


class ServerOptimizer:
    """The server's optimiser of packed weights: Flower's FedAdam.

    Reddi et al. (2021), arXiv 2003.00295, Alg. 2: the server treats the difference between the
    clients' average and the model that it sent them as a gradient, and takes a step of Adam along
    it.

    Deviation from Flower: batch norm's statistics and counters are averaged and take no step.

    Args:
        settings: Flower's constants.
    """

    def __init__(self, settings: ServerAdam) -> None:
        self._steps = _Adam(
            eta=settings.lr, tau=settings.tau, beta_1=settings.beta_1, beta_2=settings.beta_2
        )

    def step(self, average: Packed, before: Packed, server_round: int) -> Packed:
        """The new weights.

        Args:
            average: Average of the clients' weights.
            before: States that the clients were sent.
            server_round: Number of the round, from 1.
        """
        self._steps.current_arrays = {dtype: v.numpy() for dtype, v in before.items()}
        arrays = ArrayRecord({dtype: Array(v.numpy()) for dtype, v in average.items()})
        moved, _ = self._steps.aggregate_train(server_round, [cast(Message, arrays)])
        assert moved is not None
        return {d: torch.from_numpy(moved[d].numpy()).to(v.dtype) for d, v in before.items()}

    def tensors(self) -> Tensors:
        """The moments; empty before the first step."""
        return {
            f"{moments}.{dtype}": torch.from_numpy(array)
            for moments in FLOWERS_MOMENTS
            for dtype, array in (getattr(self._steps, moments) or {}).items()
        }

    def load(self, tensors: Tensors) -> None:
        """Restore what :meth:`tensors` returned."""
        for moments in FLOWERS_MOMENTS:
            named = after_prefix(tensors, f"{moments}.").items()
            setattr(self._steps, moments, {dtype: tensor.numpy() for dtype, tensor in named})


class FedAvg(base.RoundStrategy[AlgorithmSettings]):
    """McMahan et al. (2017), arXiv 1602.05629, Alg. 1; C is ``sampling.per_round``.

    The settings of ``retrain`` define the training; ``drop_path_prob`` rises linearly from 0 until
    the last round. If the server has an optimiser, it steps towards the clients' average.
    """

    def set_up(self) -> None:
        """Create the optimisers of clients and server."""
        self.weights, self.drop_path_prob = training_settings(self.config, self.found_configuration)
        stepping, settings = self.config.server_optimizer, self.config.algorithm
        self.optimizer = ServerOptimizer(stepping) if isinstance(stepping, ServerAdam) else None
        self.keeper = self.optimizer
        self.proximal = settings.proximal if isinstance(settings, fedavg.FedAvgSettings) else 0.0

    def run_round(self, server_round: int, num_rounds: int) -> base.Metrics:
        """Train at all clients, average the weights, and measure them if an evaluation is due."""
        weights, every = self.weights, self.config.retrain.evaluate_every
        terms = _terms(self.config.retrain, self.drop_path_prob, server_round, num_rounds)
        sgd = weights.at_round(server_round, num_rounds)
        local = self.local_training(sgd, proximal=self.proximal, **terms)
        metrics = self.train("train.weights", Train(local=local))
        return metrics | self.validation_metrics(every, server_round, num_rounds)

    def move(self, average: dict[str, Packed]) -> None:
        """Step towards the clients' average with the server's optimiser, or adopt the average."""
        if self.optimizer is not None:
            before = self.states["weights"]
            average["weights"] = self.optimizer.step(average["weights"], before, self._round)
        super().move(average)

    @classmethod
    def releases(cls, settings: AlgorithmSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of every local step's gradient."""
        return private.gradients({"weights": "train.weights"}, splits=SPLITS)


class GradientStrategy(base.RoundStrategy[base.S]):
    """Base of strategies whose server steps, with its own momentum, along the clients' gradients.

    Attributes:
        optimizers: The optimiser of each state's single vector; a subclass makes them. Their
            moments are saved in checkpoints.
    """

    optimizers: dict[str, torch.optim.Optimizer]

    def _momentum(self) -> str:
        return "reset"

    def take_step(
        self,
        action: str,
        request: Settings,
        states: Sequence[str],
        *,
        clip_norm: float | None,
        added: Mapping[str, Tensor | float] = {},
        further: Mapping[str, Packed] = {},
    ) -> list[Reply]:
        """Ask for gradients, and step along their mean ``sum_k G_k / sum_k B_k``.

        With the weights, the clients' buffers are replaced by their average, weighted by batch
        size.

        Args:
            action: Action whose replies have sums of gradients over a batch, and the batch's size
                B_k. The sums are added in the order of the replies.
            request: The request.
            states: The states with sums G_k, which step in this order.
            clip_norm: Largest norm of the gradient of the weights; None does not clip.
            added: For each state, what is added to its gradient.
            further: States that are sent along with the model.

        Returns:
            The replies without their states.
        """
        names = [*states, "buffers"] if "weights" in states else states
        layouts = {name: self.layouts[name] for name in names if name in self.layouts}
        replies = self.ask(action, request, states={**self.states, **further}, layouts=layouts)
        totals: dict[str, Tensor] = {}
        buffers, stripped = WeightedAverage(), list[Reply]()
        for _, reply in replies:
            for state in states:
                (gradient,) = reply.states[state].values()
                totals[state] = totals[state] + gradient if state in totals else gradient
            if "buffers" in reply.states:
                buffers.add({"buffers": reply.states["buffers"]}, weight=reply.num_examples)
            stripped.append(replace(reply, states={}))
        divisor = sum(reply.num_examples for reply in stripped)
        for state, total in totals.items():
            (vector,) = self.states[state].values()
            vector.grad = total / divisor
            if state in added:
                vector.grad = vector.grad + added[state]
            optimizer = self.optimizers[state]
            clip_gradients(optimizer, clip_norm if state == "weights" else None)
            optimizer.step()
        if buffers.total_weight:
            self.states["buffers"] = buffers.result()["buffers"]
        return stripped

    def server_tensors(self) -> Tensors:
        """The optimisers' moments, as ``<state>.<moment>``."""
        return {
            f"{state}.{name}": value
            for state, optimizer in self.optimizers.items()
            for moments in optimizer.state_dict()["state"].values()
            for name, value in moments.items()
            if isinstance(value, Tensor)
        }

    def load_server_tensors(self, tensors: Tensors) -> None:
        """Restore the optimisers' moments and bind them to the restored vectors."""
        for state, optimizer in self.optimizers.items():
            (vector,) = self.states[state].values()
            optimizer.param_groups[0]["params"] = [vector]
            optimizer.state.clear()
            if moments := after_prefix(tensors, f"{state}."):
                optimizer.state[vector] = moments


class FedSGD(GradientStrategy[AlgorithmSettings]):
    """McMahan et al. (2017), arXiv 1602.05629, section 2; all of a round's clients join every step.

    Clients return sums of gradients over their batches, and the server steps along ``sum_k G_k /
    sum_k B_k`` by SGD. Its momentum never begins anew, so that training with one client is plain
    SGD. With privacy it is DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Alg. 1); with secure sums
    the clients share the noise.

    A round has as many steps as in :class:`FedAvg`: without privacy, as many as the median client
    takes for its epochs.

    Deviations: batches in place of all records, with ``batch_size`` records at the median client
    and in proportion at others; momentum and weight decay.
    """

    def set_up(self) -> None:
        """Create the server's optimiser."""
        self.weights, self.drop_path_prob = training_settings(self.config, self.found_configuration)
        self.optimizers = {"weights": make_sgd(self.states["weights"].values(), self.weights)}

    def run_round(self, server_round: int, num_rounds: int) -> base.Metrics:
        """Take the steps of a round, one exchange per step."""
        sgd, retrain = self.weights.at_round(server_round, num_rounds), self.config.retrain
        declared = self.cohort.declared.values()
        usual = median(retrained_on(retrain, splits) for splits in declared if splits)
        steps = base.local_steps(self.config, self.stage) or retrain.local_steps(usual)
        self.optimizers["weights"].param_groups[0]["lr"] = sgd.lr
        replies: list[Reply] = []
        terms = _terms(retrain, self.drop_path_prob, server_round, num_rounds)
        for step in range((server_round - 1) * steps, server_round * steps):
            request = TakeNetworkGradient(
                network=self.description,
                step=step,
                batch_size=None if self.is_private else retrain.batch_size,
                auxiliary_weight=retrain.auxiliary_weight,
                precision=self.config.training.precision,
                usual=max(1.0, usual),
                **terms,
            )
            action = "train.network_gradient"
            replies += self.take_step(action, request, ("weights",), clip_norm=sgd.clip_norm)
        every = retrain.evaluate_every
        return base.mean_metrics(replies) | self.validation_metrics(every, server_round, num_rounds)

    @classmethod
    def releases(cls, settings: AlgorithmSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of every step's gradient.

        With secure sums clients share the noise of a step, as each reply is a clipped sum at
        weights that all clients were sent.
        """
        shared = private.config.secure_sum is not None
        actions = {"weights": "train.network_gradient"}
        return private.gradients(actions, splits=SPLITS, shared=shared)

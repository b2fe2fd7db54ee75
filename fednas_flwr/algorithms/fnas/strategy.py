"""FNAS and DP-FNAS; vanilla NAS is FNAS with one party (DP-FNAS, arXiv 2110.11025, Alg. 1).

The server holds weights W and architecture variables A. One round is one iteration: exchange 1
returns the gradients of W, and the server steps; exchange 2 returns the gradients of A at the new
W, and the server steps. DP-FNAS is the same schedule with clients that clip and noise what they
return.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from fednas_flwr.algorithms import fnas
from fednas_flwr.algorithms.base import Metrics, PrivateRound, evaluates, mean_metrics
from fednas_flwr.algorithms.fedavg.strategy import GradientStrategy
from fednas_flwr.privacy.plan import PlannedRelease, metrics_release
from fednas_flwr.protocol.requests import TakeGradients
from fednas_flwr.protocol.states import pack
from fednas_flwr.search.local_search import beta_gradient, rising
from fednas_flwr.search.optimizer_step import make_adam, make_sgd


class FNAS(GradientStrategy[fnas.FNASSettings]):
    """Federated NAS by exchange of gradients.

    Clients return sums of per-sample gradients over their batches and the batch sizes B_k; the
    server steps along ``sum_k G_k / sum_k B_k``. Deviation: with equal batches the paper's ``sum_k
    G_k / B_k`` is K times that, and the learning rate would depend on the number of clients. The
    server's optimisers are SGD with momentum for W and Adam for A, as in the public code. ``fused``
    asks for both gradients in one exchange, at the same W, which halves the number of exchanges.
    That is a deviation from Algorithm 1, as is a warm-up, in which A stays fixed. Local steps are
    plain gradient descent at the learning rates of ``weights`` and ``alphas``; a client returns the
    sum of their gradients. The server adds the gradient of ``beta_decay``, which reads no record.
    With ``privacy=dp`` this is DP-FNAS, of first order only; then the supernet is evaluated only if
    metrics are to be released.
    """

    def set_up(self) -> None:
        """Create the server's optimisers."""
        self.optimizers = {
            "weights": make_sgd(self.states["weights"].values(), self.settings.weights),
            "alphas": make_adam(self.states["alphas"].values(), self.settings.alphas),
        }

    def run_round(self, server_round: int, num_rounds: int) -> Metrics:
        """Run one iteration: gradients of W, step; gradients of A at the new W, step."""
        settings = self.settings
        sgd = settings.weights.at_round(server_round, num_rounds)
        request = TakeGradients(
            step=server_round - 1,
            local_steps=settings.local_steps,
            local_lrs={"weights": sgd.lr, "alphas": settings.alphas.lr},
            batch_size=None if self.is_private else settings.batch_size,
            order=settings.order,
            inner_lr=sgd.lr,
        )
        self.optimizers["weights"].param_groups[0]["lr"] = sgd.lr
        beta: Tensor | float = 0.0
        if weight := rising(settings.beta_decay, server_round, num_rounds) * settings.local_steps:
            (beta,) = pack(beta_gradient(self.alphas(), weight=weight)).values()
        step = partial(self.take_step, clip_norm=sgd.clip_norm, added={"alphas": beta})
        waits = server_round <= settings.warm_up_rounds
        if settings.fused and not waits:
            metrics = mean_metrics(step("train.gradients", request, ("weights", "alphas")))
        else:
            before = {n: v.clone() for n, v in self.states["weights"].items()}
            first_order = replace(request, order=1)
            metrics = mean_metrics(step("train.weight_gradient", first_order, ("weights",)))
            if not waits:
                further = {"previous_weights": before} if settings.order == 2 else {}
                replies = step("train.alpha_gradient", request, ("alphas",), further=further)
                metrics |= mean_metrics(replies)
        every = settings.evaluate_every or num_rounds
        return metrics | self.validation_metrics(every, server_round, num_rounds)

    @classmethod
    def releases(cls, settings: fnas.FNASSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of gradients of weights and alphas, and of metrics if they are measured.

        With secure sums clients share the noise of a single step, since their replies are clipped
        sums at weights that all clients were sent. This does not hold for several local steps: a
        record influences its client's later steps through weights that carry that client's noise
        alone. It does not hold for fused sums either: the sums of the alphas are scaled by each
        client's batch sizes.
        """
        actions = {"weights": "train.weight_gradient", "alphas": "train.alpha_gradient"}
        if private.number <= settings.warm_up_rounds:
            del actions["alphas"]
        elif settings.fused:
            actions = dict.fromkeys(actions, "train.gradients")
        summed = private.config.secure_sum is not None
        shared = summed and settings.local_steps == 1 and not settings.fused
        planned = private.gradients(actions, steps=settings.local_steps, shared=shared)
        every = settings.evaluate_every or private.num_rounds
        measured = evaluates(every, private.number, private.num_rounds)
        if measured and private.config.private.metrics_noise_multiplier is not None:
            planned += [metrics_release("search", "validation")]
        return planned

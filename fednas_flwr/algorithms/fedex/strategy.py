"""FedEx: FedAvg of one network whose clients draw their hyper-parameters from a distribution."""

import math
from collections.abc import Iterator
from functools import partial

from fednas_flwr.algorithms import base, fedex
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Train
from fednas_flwr.search.bandit import Theta, Trial, make_configurations
from fednas_flwr.settings.optimizers import Configuration


class FedEx(base.RoundStrategy[fedex.FedExSettings]):
    """Khodak et al. (2021), arXiv 2106.04502, Alg. 2, over FedAvg.

    Deviations: the server draws for the clients, which need to know nothing of theta. A client's
    loss is weighted by its number of training records, not of validation records, which are the
    same share of every client's records; a client without validation records does not move theta.
    Learning rates are not annealed. Validation records are not trained on.

    A client's draw comes from (seed, round, client).
    """

    def set_up(self) -> None:
        """Create the distribution over configurations."""
        self.configurations = make_configurations(self.settings, self.config.seed)
        self.theta = Theta.of(len(self.configurations))
        self.values = {"theta": self.theta.to_json()}

    def run_round(self, server_round: int, num_rounds: int) -> base.Metrics:
        """Draw a configuration for every client, train, average the weights, and move theta."""
        self.theta = self.theta.with_json(self.values["theta"])
        make = partial(make_generator, self.config.seed, "theta", server_round)
        drawn = {client: self.theta.draw(make(client)) for client in self.candidates()}
        trials, bound = list[Trial](), self.settings.loss_bound

        def observed() -> Iterator[tuple[int, Reply]]:
            for client, reply in self.ask(
                "train.weights",
                self._training(self.configurations[0]),
                settings_of={c: self._training(self.configurations[i]) for c, i in drawn.items()},
                states=self.states,
                layouts=self.layouts,
            ):
                if (loss := reply.metrics.get("validation_loss")) is not None:
                    # clamped to the bound, so that no client's invalid value decides
                    loss = min(max(loss, 0.0), bound) if math.isfinite(loss) else bound
                    trials.append(Trial(drawn[client], loss, reply.num_examples))
                yield client, reply

        self.states, metrics = self.average(observed())
        self.theta = self.theta.updated(trials)
        self.values = {"theta": self.theta.to_json()}
        best = self.configurations[self.theta.best()]
        return metrics | {"lr": best.lr, "theta_entropy": self.theta.entropy()}

    def _training(self, configuration: Configuration) -> Train:
        """Request to a client that has drawn a configuration."""
        weights = configuration.sgd(self.settings.clip_norm)
        return Train(local=self.local_training(weights, configuration.dropout), validates=True)

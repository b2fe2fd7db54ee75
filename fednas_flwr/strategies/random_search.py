"""Random search, the baseline that every architecture search owes (Li and Talwalkar, 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Unpack

from torch import nn

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.requests import Evaluate, LocalTraining, Train
from fednas_flwr.exchange.states import MOMENTS, Packed
from fednas_flwr.names import FEWEST_VOTES
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.bandit import draw_configurations
from fednas_flwr.search.settings import SGD, Configuration, Range
from fednas_flwr.search_spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.search_spaces.space import SearchSpace
from fednas_flwr.strategies.base import RoundStrategy, Shared, mean_metrics


class RandomSearch(RoundStrategy):
    """Each round draws one network, trains it by FedAvg and ranks it on validation records.

    A candidate takes the place of the best so far where the median client, of three or more that
    have measured both, gains by it, so that no single one decides; else by mean accuracy.

    With ``ranges`` each candidate also draws its hyper-parameters, those of the best one being
    what it is retrained with.

    Args:
        network: One without tensors: no supernet is trained.
        courier: Reaches the clients.
        space: Where architectures are drawn from, uniformly.
        describe: Returns what a network of the search's size is built from, see ``builders``.
        make_network: Builds a network from that description, newly initialised.
        seed: The run's seed; the draw of a round comes from (seed, round).
        trial_rounds: FedAvg rounds per candidate; 0 takes the first candidate untried.
        local_epochs: Passes over each client's training records per FedAvg round.
        batch_size: Records per step.
        weights: SGD, annealed over the trial rounds.
        ranges: Of the hyper-parameters; None trains all candidates with ``weights``.
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        space: SearchSpace,
        describe: Callable[[Genotype], dict[str, Any]],
        make_network: Callable[[Mapping[str, Any]], nn.Module],
        seed: int,
        trial_rounds: int,
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        ranges: Mapping[str, Range] | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(network, courier, space=space, **shared)
        self.describe, self.make_network, self.seed = describe, make_network, seed
        self.trial_rounds = trial_rounds
        self.weights, self.ranges = weights, ranges
        self.local_epochs, self.batch_size = local_epochs, batch_size

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Draw, train and rank one candidate; keep it if it is the best so far."""
        if self.space is None:
            raise ValueError("random search needs a search space")
        generator = make_generator(self.seed, "random_search", server_round)
        genotype = self.space.random_genotype(generator)
        configuration = None
        if self.ranges is not None:
            (configuration,) = draw_configurations(1, self.ranges, generator)
        metrics, own = self._try(genotype, configuration)
        accuracy = metrics.get("validation_accuracy", 0.0)
        if "genotype" not in self.values or self._is_better(accuracy, own):
            self.values = {
                "genotype": to_json(genotype),
                "accuracy": accuracy,
                "accuracies": own,
                "configuration": asdict(configuration) if configuration else None,
            }
        self.tell_best(self.derive(), server_round)
        return metrics | ({"lr": configuration.lr} if configuration else {})

    def _is_better(self, accuracy: float, own: Mapping[str, float]) -> bool:
        """Return whether a candidate is better than the best so far; of a tie, by the mean.

        Args:
            accuracy: Its mean accuracy.
            own: By client, as text, its accuracy there.
        """
        best = self.values.get("accuracies", {})
        gains = [value - best[client] for client, value in own.items() if client in best]
        gain = median(gains) if len(gains) >= FEWEST_VOTES else 0.0
        return gain > 0 or (gain == 0 and accuracy > self.values["accuracy"])

    def _try(
        self, genotype: Genotype, configuration: Configuration | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return training and validation metrics of one candidate, and its accuracy by client.

        Both are empty without trial rounds.
        """
        description = self.describe(genotype)
        layouts, states = self._initial(self.make_network(description))
        sgd = configuration.annealed(self.weights) if configuration else self.weights
        drop_path_prob = configuration.dropout if configuration else 0.0
        metrics: dict[str, float] = {}
        own: dict[str, float] = {}
        velocity: Packed = {}
        for trial in range(1, self.trial_rounds + 1):
            local = LocalTraining(
                description,
                "train",
                self.amount(self.local_epochs, self.batch_size),
                self.client_weights(sgd.at_round(trial, self.trial_rounds)),
                0.0,
                drop_path_prob * (trial - 1) / self.trial_rounds,
            )
            replies = self.ask("train.weights", Train(local), states=states, layouts=layouts)
            average, metrics = self.average(replies)
            self.push(average["weights"], states["weights"], velocity, sgd.momentum)
            states = average
        if self.trial_rounds:
            states.pop(MOMENTS, None)
            replies = self.ask("evaluate.model", Evaluate(description, "validation"), states=states)
            held = {str(client): _held(reply) for client, reply in replies}
            own = {client: reply.metrics["accuracy"] for client, reply in held.items()}
            validation = mean_metrics(held.values())
            metrics |= {f"validation_{name}": value for name, value in validation.items()}
        return metrics, own

    def derive(self) -> Genotype:
        """Return the candidate with the best validation accuracy."""
        return from_json(self.values["genotype"])

    def configuration(self) -> Configuration | None:
        """Return that candidate's hyper-parameters, None if none were drawn."""
        found = self.values["configuration"]
        return Configuration(**found) if found else None


def _held(reply: Reply) -> Reply:
    """Return a reply whose accuracy is from 0 to 1: a client has one vote, whatever it claims."""
    accuracy = min(1.0, max(0.0, reply.metrics.get("accuracy", 0.0)))
    return replace(reply, metrics={**reply.metrics, "accuracy": accuracy})

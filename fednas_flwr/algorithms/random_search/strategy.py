"""Random search, the baseline for every architecture search (Li and Talwalkar, 2019)."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import median

from fednas_flwr.algorithms import base, random_search
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.models.networks import candidate_settings, describe_derived, seeded_network
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Evaluate, LocalTraining, Train
from fednas_flwr.search.bandit import draw_configurations
from fednas_flwr.settings.names import FEWEST_VOTES
from fednas_flwr.settings.optimizers import Configuration
from fednas_flwr.spaces.genotype import Genotype, from_json, to_json


class RandomSearch(base.RoundStrategy[random_search.RandomSearchSettings]):
    """Each round draws one network, trains it by FedAvg and ranks it on validation records.

    If three or more clients have measured a candidate and the best so far, the candidate replaces
    it if the median client gains by it, so that no single client decides. Otherwise, and if the
    median gain is 0, mean accuracy decides.

    With ``ranges`` each candidate also draws its hyper-parameters; those of the best candidate are
    used for its retraining.

    A round's draw comes from (seed, round). The learning rate is annealed over the trial rounds.
    """

    def run_round(self, server_round: int, num_rounds: int) -> base.Metrics:
        """Draw, train and rank one candidate; keep it if it is the best so far."""
        generator = make_generator(self.config.seed, "random_search", server_round)
        genotype = self.space.random_genotype(generator)
        configuration = None
        if self.settings.ranges is not None:
            (configuration,) = draw_configurations(1, self.settings.ranges, generator)
        metrics, accuracies = self._try(genotype, configuration)
        accuracy = metrics.get("validation_accuracy", 0.0)
        if "genotype" not in self.values or self._is_better(accuracy, accuracies):
            self.values = {
                "genotype": to_json(genotype),
                "accuracy": accuracy,
                "accuracies": accuracies,
                "configuration": asdict(configuration) if configuration else None,
            }
        return metrics | ({"lr": configuration.lr} if configuration else {})

    def _is_better(self, accuracy: float, accuracies: Mapping[str, float]) -> bool:
        """True if a candidate beats the best so far; the mean breaks ties.

        Args:
            accuracy: Mean accuracy of the candidate.
            accuracies: The candidate's accuracy by client, whose number is a string.
        """
        best = self.values.get("accuracies", {})
        gains = [value - best[client] for client, value in accuracies.items() if client in best]
        gain = median(gains) if len(gains) >= FEWEST_VOTES else 0.0
        return gain > 0 or (gain == 0 and accuracy > self.values["accuracy"])

    def _try(
        self, genotype: Genotype, configuration: Configuration | None
    ) -> tuple[base.Metrics, base.Metrics]:
        """Training and validation metrics of one candidate, and its accuracy by client.

        Both are empty without trial rounds.
        """
        settings = self.settings
        description = describe_derived(genotype, **candidate_settings(self.config, self.prepared))
        self.layouts, self.states = self._initial(seeded_network(self.config, description))
        sgd = configuration.annealed(settings.weights) if configuration else settings.weights
        drop_path_prob = configuration.dropout if configuration else 0.0
        metrics: base.Metrics = {}
        accuracies: base.Metrics = {}
        for trial in range(1, settings.trial_rounds + 1):
            local = LocalTraining(
                description,
                "train",
                self.amount(settings.local_epochs, settings.batch_size),
                sgd.at_round(trial, settings.trial_rounds),
                0.0,
                drop_path_prob * (trial - 1) / settings.trial_rounds,
            )
            metrics = self.train("train.weights", Train(local=local))
        if settings.trial_rounds:
            request = Evaluate(network=description, split="validation")
            replies = self.ask("evaluate.model", request, states=self.model)
            votes = {str(client): _bounded(reply) for client, reply in replies}
            accuracies = {client: reply.metrics["accuracy"] for client, reply in votes.items()}
            validation = base.mean_metrics(votes.values())
            metrics |= {f"validation_{name}": value for name, value in validation.items()}
        self.layouts, self.states = {}, {}  # a candidate's states are not kept
        return metrics, accuracies

    def derive(self) -> Genotype:
        """The candidate with the best validation accuracy."""
        return from_json(self.values["genotype"])

    def configuration(self) -> Configuration | None:
        """The best candidate's hyper-parameters; None if none were drawn."""
        values = self.values["configuration"]
        return Configuration(**values) if values else None


def _bounded(reply: Reply) -> Reply:
    """A reply with its accuracy clamped to [0, 1], so that no client has more than one vote."""
    accuracy = min(1.0, max(0.0, reply.metrics.get("accuracy", 0.0)))
    return replace(reply, metrics={**reply.metrics, "accuracy": accuracy})

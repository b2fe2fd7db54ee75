"""Successive halving: a pool of networks is trained side by side and halved by their rewards."""

import json
import math
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from fednas_flwr.algorithms import base, successive_halving
from fednas_flwr.algorithms.zero_cost.strategy import ScoredDraws
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import candidate_settings, describe_pool, seeded_network
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.requests import Amount, LocalTraining, RewardCandidates, Train
from fednas_flwr.protocol.states import Packed, pack, unpack
from fednas_flwr.search.candidate import name_before
from fednas_flwr.settings import Config
from fednas_flwr.spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.spaces.space import SearchSpace

ENOUGH_STEPS = 150  # of training that show how fast a network learns


class SuccessiveHalving(base.RoundStrategy[successive_halving.SuccessiveHalvingSettings]):
    """Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943, Fig. 3), by FedAvg.

    The server chooses a pool without reading a record. In every round all clients train all
    networks that are left, in one exchange (``train.weights``), and each network is averaged. After
    the last round of a rung one more exchange (``evaluate.candidates``) measures them on validation
    records, and the best ``1 / eta`` of them stay and train on. The one left after the last round
    is the result. If there are three or more clients without privacy, no single one decides: see
    ``states.median_rewards``.

    Deviations: rungs have equal numbers of rounds, as nearly as their number allows, so that the
    first rung costs most. In the paper all rungs cost the same, and survivors train longer. The
    learning rate is annealed over all rounds, since training is continued.

    With ``rewarded="local"`` no network is averaged. Each round is one exchange: all clients train
    all networks that are left, from their initial weights, and return how fast each of them trains,
    see ``client.handlers.trained_rewards``. Large clients train for fewer epochs, see
    :func:`shortened`. For deep networks, averages of a few local epochs are poor models and rank
    the networks by chance. This mode does not run with privacy.

    With privacy each step is one release of all networks' gradients, see ``NoisedGradients``, and
    each measurement is one release of all accuracies.

    In the first round the pool replaces the initial network, which has no tensors. The learning
    rate is annealed over the rounds, or with ``local`` over the local epochs.
    """

    def run_round(self, server_round: int, num_rounds: int) -> base.Metrics:
        """Train the networks that are left; at the end of a rung keep the best."""
        if "pool" not in self.values:
            pool = self._choose()[: self._size()]
            self.values = {"pool": [json.loads(to_json(genotype)) for genotype in pool]}
            self.fit_states()
        settings, described = self.settings, self._describe()
        amount = self.amount(settings.local_epochs, settings.batch_size)
        local = LocalTraining(described, "train", amount, settings.weights, 0.0, 0.0)
        metrics = {"candidates": float(len(self.pool()))}
        if settings.rewarded == "local":
            records = [splits.get("train", 0) for splits in self.cohort.declared.values()]
            amount = shortened(amount, median(records))
            measured = RewardCandidates(training=replace(local, amount=amount))
            metrics["local_epochs"] = float(amount.epochs or 1)
        else:
            local = replace(local, weights=settings.weights.at_round(server_round, num_rounds))
            metrics |= self.train("train.weights", Train(local=local))
            measured = RewardCandidates(network=described)
        left = num_left(server_round, num_rounds, keep=self._size(), eta=settings.eta)
        if left < len(self.pool()):
            metrics |= self._halve(left, measured)
        return metrics

    def pool(self) -> list[Genotype]:
        """The networks that are left, best first once they are measured."""
        return [from_json(json.dumps(genotype)) for genotype in self.values["pool"]]

    def derive(self) -> Genotype:
        """The best of the networks that are left.

        Raises:
            ValueError: The first round is not over.
        """
        if "pool" not in self.values:
            raise ValueError("the pool is chosen in the first round")
        return self.pool()[0]

    def fit_states(self) -> None:
        """Shape the states as the pool in the restored ``values`` requires."""
        self.layouts, self.states = self._initial(seeded_network(self.config, self._describe()))

    def _describe(self) -> dict[str, Any]:
        """The description of the pool's networks, from which clients build them."""
        return describe_pool(self.pool(), **candidate_settings(self.config, self.prepared))

    def _choose(self) -> list[Genotype]:
        """The networks from which the pool is taken, best first."""
        choice = self.settings.pool
        generator = make_generator(self.config.seed, "successive_halving")
        drawn = ScoredDraws(self.config, self.prepared, self.space, choice)
        ranking = drawn.ranked(draws=choice.draws, generator=generator)
        if choice.front:
            return drawn.spread(ranking, self._size())
        return [one.genotype for one in ranking]

    def _size(self) -> int:
        """Size of the pool."""
        return self.settings.pool.size(self.config.search_space.name)

    def _halve(self, left: int, request: RewardCandidates) -> base.Metrics:
        """Measure all networks, keep the ``left`` best and return metrics; on ties the earlier."""
        pool = self.values["pool"]
        rewards, metrics = self.reward(request, by_median=True, genotypes=pool)
        indices = sorted(range(len(pool)), key=lambda index: -rewards[index])[:left]
        self.values = {"pool": [pool[index] for index in indices]}
        layouts, states = self.layouts, self.states
        self.fit_states()

        def left_of(packed: Packed, state: str) -> Packed:
            tensors = unpack(packed, layouts[state])
            names = (name for name, _, _ in self.layouts[state].entries)
            return pack({name: tensors[name_before(name, indices)] for name in names})

        self.states = {state: left_of(packed, state) for state, packed in states.items()}
        mean, best = sum(rewards) / len(rewards), max(rewards)
        if self.settings.rewarded == "local":
            return {"train_loss": -math.log(max(mean, 1e-30)), **metrics}
        return {"validation_accuracy": mean, "validation_best": best, **metrics}

    @classmethod
    def releases(
        cls, settings: successive_halving.SuccessiveHalvingSettings, private: base.PrivateRound
    ) -> list[PlannedRelease]:
        """The releases of every step, and of rewards in a round that ends a rung."""
        planned = private.gradients({"weights": "train.weights"})
        keep = settings.pool.size(private.config.search_space.name)
        left = partial(num_left, num_rounds=private.num_rounds, keep=keep, eta=settings.eta)
        if left(private.number) < left(private.number - 1):
            planned += [private.rewards("evaluate.candidates")]
        return planned

    @classmethod
    def check(cls, config: Config, prepared: Prepared, space: SearchSpace) -> None:
        """Refuse limits within which no pool is drawn."""
        generator = make_generator(config.seed, "successive_halving")
        assert isinstance(config.algorithm, successive_halving.SuccessiveHalvingSettings)
        ScoredDraws(config, prepared, space, config.algorithm.pool).check(generator)


def shortened(amount: Amount, records: float) -> Amount:
    """An amount of local training with fewer epochs if they would have more than 150 steps.

    Args:
        amount: Amount of local training, in epochs.
        records: Number of records that the median client trains on.

    Example:
        >>> [shortened(Amount(3, None, 32), records).epochs for records in (1400, 2000, 8000)]
        [3, 2, 1]
    """
    enough = max(1, ENOUGH_STEPS // replace(amount, epochs=1).most_steps(records))
    return replace(amount, epochs=min(amount.epochs or 1, enough))


def num_left(server_round: int, num_rounds: int, *, keep: int, eta: int) -> int:
    """The number of networks of a pool of ``keep`` networks that are left after a round.

    Example:
        >>> [num_left(r, 8, keep=12, eta=2) for r in range(9)]
        [12, 12, 6, 6, 3, 3, 2, 2, 1]
    """
    divisor: int = eta ** (successive_halving.num_rungs(keep, eta) * server_round // num_rounds)
    return -(-keep // divisor)

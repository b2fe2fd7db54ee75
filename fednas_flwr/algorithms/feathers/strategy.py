"""FEATHERS: a bandit over hyper-parameters, in the search and again in retraining."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from fednas_flwr.algorithms.base import Metrics, PrivateRound, RoundStrategy
from fednas_flwr.algorithms.feathers import FEATHERSSettings
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.states import Layout, unpack
from fednas_flwr.search import bandit, local_search
from fednas_flwr.settings.optimizers import LEAST_LOSS_BOUND, SGD, Configuration

BOUND_PER_SCALE = 4.0


class FEATHERS(RoundStrategy[FEATHERSSettings]):
    """Seng et al. (2023), Alg. 1: explore configurations, then train with the best one.

    Before every ``nas_rounds``-th round the bandit draws kappa configurations, all clients try each
    from the same states (``train.probe``), and the bandit learns their rewards. In the search stage
    the rounds are those of federated DARTS; in retraining they train the weights of a derived
    network on the clients' train records (the paper's evaluation stage, Alg. 3).

    Known weaknesses: losses fall most in the first phase, so that its best configuration often has
    the largest estimate to the end. A reward is the gain of each client's own trained model on its
    own records. With skewed labels that gain is largest where a client forgets the other clients'
    classes. High learning rates then win, whose models average well only if they are annealed.

    Deviations: in the paper the bandit alone lowers learning rates, which here it seldom does;
    ``annealed`` lets each configuration's rate, also in trials, fall over the stage. One message
    asks a client for all trials of a phase, so that no client waits for another between trials and
    the states travel once. With privacy, M shrinks with the rewards, as noise proportional to M
    would otherwise drown them: after the first phase it is 4 times their running scale, kept
    between ``LEAST_LOSS_BOUND`` and ``loss_bound``.

    The draw before a round comes from (seed, stage, round). In trials ``beta_decay`` has the value
    of the round that follows them; the paper has no such regulariser.
    """

    def set_up(self) -> None:
        """Make the bandit."""
        settings = self.settings
        self.configurations = bandit.make_configurations(settings, self.config.seed)
        self.bandit = bandit.Bandit.of(len(self.configurations), settings.bandit)
        self.values = {"bandit": self.bandit.to_json()}
        self._when = (1, 1)
        of_stage = self.config.retrain.weights if self.stage == "retrain" else settings
        self.clip_norm = of_stage.clip_norm

    def run_round(self, server_round: int, num_rounds: int) -> Metrics:
        """Explore if an exploration is due, then train with the best configuration."""
        self.bandit = self.bandit.with_json(self.values["bandit"])
        self._when = (server_round, num_rounds)
        if explores(server_round, self.settings.nas_rounds):
            self._explore(server_round)
        best = self.configurations[self.bandit.best()]
        local = self._local(best)
        if isinstance(local, rq.LocalTraining):
            metrics = self.train("train.weights", rq.Train(local=local))
        else:
            metrics = self.train("train.search", rq.Search(local=local))
        self.values = {"bandit": self.bandit.to_json()}
        return metrics | {"lr": self._sgd(best).lr, "alpha_lr": best.alpha_lr}

    def _explore(self, server_round: int) -> None:
        """Try the configurations that the bandit draws, and update the bandit."""
        started = time.monotonic()
        sent, received = self.cohort.bytes_sent, self.cohort.bytes_received
        generator = make_generator(self.config.seed, "bandit", self.stage, server_round)
        before, bound = self.bandit, self._bound()
        arms = before.draw(before.num_trials(), generator)
        rewards, noise = self._rewards([self.configurations[arm] for arm in arms], bound)
        rewarded = dict(zip(arms, rewards, strict=True))
        self.bandit = before.updated(rewarded, noise=noise)
        self.cohort.emit(
            "explored",
            stage=self.stage,
            round=server_round,
            entropy=before.entropy(),
            kappa=len(arms),
            loss_bound=bound,
            rewards={str(arm): reward for arm, reward in rewarded.items()},
            noise=noise,
            estimates=self.bandit.estimates_N.tolist(),
            best=self.bandit.best(),
            configuration=asdict(self.configurations[self.bandit.best()]),
            seconds=time.monotonic() - started,
            bytes_sent=self.cohort.bytes_sent - sent,
            bytes_received=self.cohort.bytes_received - received,
        )

    def _bound(self) -> float:
        """M of the next phase."""
        scale = self.bandit.scale
        if not self.is_private or scale == 0:
            return self.settings.loss_bound
        return min(self.settings.loss_bound, max(LEAST_LOSS_BOUND, BOUND_PER_SCALE * scale))

    def _rewards(
        self, configurations: Sequence[Configuration], bound: float
    ) -> tuple[list[float], float]:
        """Each configuration's reward (Eq. 5), and the std of the noise on it.

        The mean of the clients' decreases, weighted by validation size. The server clamps each
        client's values to the bound once more, so that no client's invalid value decides.
        """
        layouts = {"rewards": Layout.of({"rewards": torch.zeros(len(configurations))})}
        local = self._local(configurations[0])
        request = rq.Probe(
            search=local if isinstance(local, rq.LocalSearch) else None,
            training=local if isinstance(local, rq.LocalTraining) else None,
            trials=[rq.Trial(self._sgd(c), c.adam(), c.dropout) for c in configurations],
            loss_bound=bound,
        )
        total = torch.zeros(len(configurations), dtype=torch.float64)
        weight, num_clients = 0.0, 0
        for _, reply in self.ask("train.probe", request, states=self.states, layouts=layouts):
            decreases = unpack(reply.states["rewards"], layouts["rewards"])["rewards"].double()
            total += reply.num_examples * decreases.clamp(-bound, bound)
            weight += reply.num_examples
            num_clients += reply.sites
        sigma = self.noise_multiplier("rewards") or 0.0
        return (total / weight).tolist(), bound * sigma * math.sqrt(num_clients) / weight

    def _local(self, configuration: Configuration) -> rq.LocalSearch | rq.LocalTraining:
        """Local search or training with a configuration."""
        sgd = self._sgd(configuration)
        if self.stage == "retrain":
            return self.local_training(sgd, configuration.dropout)
        amount = self.amount(self.settings.local_epochs, self.settings.batch_size)
        beta_decay = local_search.rising(self.settings.beta_decay, *self._when)
        alternating = local_search.Alternating(self.settings.rule, beta_decay=beta_decay)
        return rq.LocalSearch(amount, sgd, configuration.adam(), alternating=alternating)

    def _sgd(self, configuration: Configuration) -> SGD:
        """The constants of the weights' optimiser in this round."""
        sgd = configuration.sgd(self.clip_norm, annealed=self.settings.annealed)
        return sgd.at_round(*self._when)

    @classmethod
    def releases(cls, settings: FEATHERSSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of training, trials and rewards; kappa is largest at first."""
        training, states = "train.search", ["weights", "alphas"]
        if private.stage == "retrain":
            training, states = "train.weights", ["weights"]
        planned = private.gradients(dict.fromkeys(states, training))
        if explores(private.number, settings.nas_rounds):
            arms = len(settings.configurations) or settings.num_configurations
            trials = bandit.Bandit.of(arms, settings.bandit).num_trials()
            steps = trials * private.local_steps
            planned += private.gradients(dict.fromkeys(states, "train.probe"), steps=steps)
            planned += [private.rewards("train.probe", trials)]
        return planned


def explores(server_round: int, nas_rounds: int) -> bool:
    """True if a round, numbered from 1, begins with an exploration."""
    return (server_round - 1) % nas_rounds == 0

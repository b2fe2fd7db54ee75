"""The round loop, written once: connect, rounds, events, checkpoint, resume.

An algorithm is a subclass that defines what happens in one round. It requests actions of the
clients through the :class:`~fednas_flwr.server.cohort.Cohort`. It is a Flower ``Strategy``:
``start(grid)`` runs it on any Grid.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Generic, Protocol, TypeVar, cast, get_args

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import Description
from fednas_flwr.privacy.actions import SPLIT_OF, SUPERNET
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol import states as st
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.runs.checkpoints import Checkpoint, CheckpointFolder
from fednas_flwr.search.local_search import alpha_entropy
from fednas_flwr.search.optimizer_step import after_prefix, no_moments
from fednas_flwr.server.cohort import TOTAL, Cohort
from fednas_flwr.server.exchange import Exchange, Participants
from fednas_flwr.settings import AlgorithmSettings, Config, incompatible
from fednas_flwr.settings.names import ACCURACY, CLOSENESS, FEWEST_VOTES
from fednas_flwr.settings.optimizers import SGD, Configuration
from fednas_flwr.settings.run_settings import TrimmedMeanSettings
from fednas_flwr.spaces.genotype import Genotype, skip_share
from fednas_flwr.spaces.space import SearchSpace

SERVER = "server."  # prefix of the server's own tensors in a checkpoint
EXACT_REWARDS, NOISY_REWARDS = (0.0, 1.0), (-1.0, 2.0)  # a client's accuracy is clamped to these
FARTHEST = 100.0  # nats: a loss per record that only a diverged model has
Metrics = dict[str, float]
Replies = Iterable[tuple[int, Reply]]  # by client, or the total of all clients
Evaluation = Callable[[int, ArrayRecord], MetricRecord | None]  # by round and named tensors
ALPHA_EVENTS = 50  # at most about this many alpha snapshots in a run's events


def evaluates(evaluate_every: int, server_round: int, num_rounds: int) -> bool:
    """True if the model is evaluated after a round: every so many rounds and the last; 0: never."""
    return evaluate_every > 0 and (server_round == num_rounds or server_round % evaluate_every == 0)


def local_steps(config: Config, stage: str) -> int | None:
    """Number of noised steps of a local training, which take the place of epochs.

    None without privacy, and where the unit of privacy is the client, which trains by epochs.
    """
    if not config.by_record:
        return None
    return (config.private.retrain if stage == "retrain" else config.private).local_steps


def expected_batch(config: Config, stage: str) -> float | None:
    """Batch size of a step of ``search`` or ``retrain`` at a client; with privacy its expectation.

    A value below 1 is the rate at which each record is drawn; None takes all records.
    """
    terms: object = config.privacy
    batch_size = getattr(config.algorithm, "batch_size", None)
    if stage == "retrain":
        terms, batch_size = getattr(terms, "retrain", None), config.retrain.batch_size
    rate = getattr(terms, "rate", None)
    if rate is None:
        return batch_size
    return rate if rate < 1 else None


@dataclass(frozen=True)
class PrivateRound:
    """A round of a stage of a private run; its releases follow from the run's configuration.

    Attributes:
        config: Settings of the run.
        stage: ``search`` or ``retrain``.
        number: Number of the round, from 1.
        num_rounds: Rounds of the stage.
    """

    config: Config
    stage: str
    number: int
    num_rounds: int

    @property
    def local_steps(self) -> int:
        """Noised steps of a local training, also if the client then trains by epochs."""
        privacy = self.config.private
        return (privacy.retrain if self.stage == "retrain" else privacy).local_steps

    def gradients(
        self,
        actions: Mapping[str, str],
        *,
        steps: int | None = None,
        splits: Sequence[str] = (),
        shared: bool = False,
    ) -> list[PlannedRelease]:
        """The releases of gradients; every step releases every named state.

        Args:
            actions: The action for each state, ``weights`` or ``alphas``.
            steps: Steps of each state; None takes those of a local training.
            splits: The splits that are read; if empty, the split that a search reads for the state.
            shared: True if clients share the noise, see
                :class:`~fednas_flwr.privacy.plan.PlannedRelease`.
        """
        privacy = self.config.private
        retrain = privacy.retrain if self.stage == "retrain" else None
        return [
            PlannedRelease(
                self.stage,
                action,
                state,
                tuple(splits) or (SPLIT_OF[state],),
                expected_batch(self.config, self.stage),
                self.local_steps if steps is None else steps,
                (retrain or getattr(privacy, state)).max_grad_norm,
                shared=shared,
            )
            for state, action in actions.items()
        ]

    def rewards(self, action: str, steps: int = 1) -> PlannedRelease:
        """Releases of rewards over all validation records."""
        return PlannedRelease(self.stage, action, "rewards", ("validation",), None, steps, 1.0)


class Keeper(Protocol):
    """A part of the server whose own tensors are saved in checkpoints."""

    def tensors(self) -> st.Tensors:
        """The tensors by name."""

    def load(self, tensors: st.Tensors) -> None:
        """Restore what :meth:`tensors` returned."""


S = TypeVar("S", bound=AlgorithmSettings)


def settings_of(strategy: "type[RoundStrategy[Any]]") -> type[AlgorithmSettings]:
    """The settings class that a strategy names, or else that of the class it derives from."""
    for kind in strategy.__mro__:
        for base in vars(kind).get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, AlgorithmSettings):
                    return argument
    return AlgorithmSettings


class RoundStrategy(Strategy, Generic[S]):
    """Base of all algorithms; ``S`` is the class of an algorithm's settings.

    The run's ``momentum`` applies to local training. With ``reset``, optimisers begin anew with
    every request. With ``averaged``, their moments travel with the model and are averaged and
    checkpointed like it; clients keep nothing.

    Args:
        network: Supernet or network whose tensors are the initial global state. It is not changed.
        cohort: Reaches the clients.
        config: The settings of the run.
        space: Search space of the supernet; None for plain networks.
        prepared: The run's data; None if no network is built from its shapes.
        description: Description of the network to retrain; clients build the network from it, see
            ``client.client.Client.network``. None in a search.
        configuration: Hyper-parameters that the search has found for retraining; they replace those
            of the settings. None if the search found none.
        checkpoints: Folder for the state after every round; None saves no state.
        schedule: Everything that a private run releases.

    Attributes:
        settings: The algorithm's settings.
        stage: Name of the stage in events and checkpoints.
        is_private: True if clients release noised sums.
        description: Description from which clients build the network; in a search, the supernet's.
        states: The global model: packed ``weights``, ``alphas`` and ``buffers``, and ``moments`` if
            they travel.
        layouts: The tensors of each state.
        values: JSON values that belong to the state and go into checkpoints.
        keeper: Part of the server with tensors of its own, such as its optimiser; None if there is
            none.
        ends_at: Deadline on the clock ``time.monotonic()``. A round that would end later is not
            begun, unless it is the first; None is no limit.
        rounds_done: Number of rounds that the state has been through.
    """

    def __init__(
        self,
        network: nn.Module,
        cohort: Cohort,
        config: Config,
        *,
        space: SearchSpace | None = None,
        prepared: Prepared | None = None,
        description: Description | None = None,
        configuration: Configuration | None = None,
        checkpoints: CheckpointFolder | None = None,
        schedule: Sequence[PlannedRelease] = (),
    ) -> None:
        self.config, self.settings = config, cast(S, config.algorithm)
        self.stage = "search" if description is None else "retrain"
        self.space, self.prepared = cast(SearchSpace, space), cast(Prepared, prepared)
        self.description = dict(description or {"name": SUPERNET})
        self.found_configuration = configuration
        self.is_private = config.dp is not None
        self.schedule, self.momentum = schedule, self._momentum()
        self.layouts, self.states = self._initial(network)
        self.values: dict[str, Any] = {}
        self.cohort, self.checkpoints = cohort, checkpoints
        self.keeper: Keeper | None = None
        self.ends_at: float | None = None
        self.rounds_done = 0
        self._round = 0
        self._phase = 0
        self._client_metrics: dict[int, Metrics] = {}
        self._participants: Participants | None = None
        self._asked: set[int] = set()
        self.set_up()

    def set_up(self) -> None:
        """Create the strategy's further attributes; the constructor calls this last."""

    @abstractmethod
    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Run one round and return its metrics.

        Ask clients with :meth:`ask`, and assign the new global model to ``self.states``.

        Args:
            server_round: Number of the round, from 1.
            num_rounds: Rounds of the stage.
        """

    @classmethod
    def releases(cls, settings: S, private: PrivateRound) -> list[PlannedRelease]:
        """Everything that a round of a private run releases, at most, about each client.

        This follows from the configuration alone and needs neither a network nor a client.

        Args:
            settings: The algorithm's settings.
            private: The round.
        """
        raise NotImplementedError(f"{cls.__name__} does not run with privacy")

    @classmethod
    def check(cls, config: Config, prepared: Prepared, space: SearchSpace) -> None:
        """Refuse a search that is impossible with the run's data and search space."""

    @property
    def model(self) -> dict[str, st.Packed]:
        """The states of the global model that belong to a network, without the moments."""
        return {name: state for name, state in self.states.items() if name != st.MOMENTS}

    def new_average(self) -> st.Average:
        """An empty average of the clients' states: weighted, or robust if ``aggregate`` says so."""
        aggregate = self.config.aggregate
        if isinstance(aggregate, TrimmedMeanSettings):
            return st.TrimmedMean(aggregate.trim)
        return st.TrimmedMean(None) if aggregate.name == "median" else st.WeightedAverage()

    def _momentum(self) -> str:
        """Treatment of local training's momentum between requests, as in ``training.momentum``."""
        averages = self.stage == "retrain" and incompatible.follows_noise(self.config)
        return self.config.training.momentum or ("averaged" if averages else "reset")

    def amount(self, local_epochs: int, batch_size: int | None) -> rq.Amount:
        """The amount of local training: epochs of batches or, with privacy, steps."""
        steps = local_steps(self.config, self.stage)
        if steps is None:
            return rq.Amount(local_epochs, None, batch_size)
        return rq.Amount(None, steps, None)

    def search_locally(self, server_round: int, num_rounds: int, **rule: Any) -> Metrics:
        """Have all clients search for local epochs, and average weights, alphas and buffers.

        Args:
            server_round: Number of the round, from 1.
            num_rounds: Rounds of the stage.
            rule: Fields of :class:`~fednas_flwr.protocol.requests.LocalSearch` that say how alphas
                are learnt.
        """
        settings: Any = self.settings  # those of an algorithm that searches for local epochs
        amount = self.amount(settings.local_epochs, settings.batch_size)
        weights = settings.weights.at_round(server_round, num_rounds)
        local = rq.LocalSearch(amount, weights, settings.alphas, **rule)
        return self.train("train.search", rq.Search(local=local))

    def local_training(
        self, weights: SGD, drop_path_prob: float, *, split: str = "train", **more: Any
    ) -> rq.LocalTraining:
        """The local training that ``retrain`` sets, with these constants.

        Args:
            weights: The weights' optimiser.
            drop_path_prob: Probability of drop-path.
            split: Records to train on.
            **more: Further fields of the training, in place of their defaults.
        """
        retrain = self.config.retrain
        return rq.LocalTraining(
            self.description,
            split,
            self.amount(retrain.local_epochs, retrain.batch_size),
            weights,
            retrain.auxiliary_weight,
            drop_path_prob,
            precision=self.config.training.precision,
            **more,
        )

    def noise_multiplier(self, kind: str) -> float | None:
        """Sigma of a kind of release in this stage; None if the stage has no such release."""
        plans = [p for p in self.schedule if (p.stage, p.kind) == (self.stage, kind)]
        return plans[0].noise_multiplier if plans else None

    def server_tensors(self) -> st.Tensors:
        """Further tensors of the server's state for the checkpoint, such as an optimiser's."""
        return {} if self.keeper is None else self.keeper.tensors()

    def load_server_tensors(self, tensors: st.Tensors) -> None:
        """Restore what :meth:`server_tensors` returned."""
        if self.keeper is not None:
            self.keeper.load(tensors)

    def fit_states(self) -> None:
        """Shape the states as the restored ``values`` require; most models keep their shape."""

    def ask(
        self,
        action: str,
        settings: rq.Settings,
        *,
        settings_of: Mapping[int, rq.Settings] = {},
        states: Mapping[str, st.Packed] = {},
        layouts: Mapping[str, st.Layout] = {},
    ) -> Iterator[tuple[int, Reply]]:
        """Request an action of clients; yields ``(client, reply)``, see :meth:`Cohort.ask`.

        Requests to private clients carry the id of their data set.
        """
        self._phase += 1
        answered = set()
        exchange = Exchange(
            action,
            self.stage,
            self._at_site(settings),
            server_round=self._round,
            phase=self._phase,
            settings_of={client: self._at_site(of) for client, of in settings_of.items()},
            states=states,
            layouts=layouts,
            releases=self.schedule,
            participants=self._participants,
        )
        for client, reply in self.cohort.ask(exchange):
            answered.add(client)
            if client != TOTAL:
                self._client_metrics.setdefault(client, {}).update(reply.metrics)
            yield client, reply
        if self._participants is not None:
            self._asked |= {*self._participants.clients, *answered}
            self._participants = self._participants.after(answered)

    def _at_site(self, settings: rq.Settings) -> rq.Settings:
        if isinstance(settings, rq.AtSite):
            return replace(settings, data_set=self.config.private_data_set)
        return settings

    def candidates(self) -> Sequence[int]:
        """The clients that the round may ask."""
        return self.cohort.clients if self._participants is None else self._participants.candidates

    def train(
        self, action: str, settings: rq.Settings, *, only: Mapping[str, Collection[str]] = {}
    ) -> Metrics:
        """Have all clients train the global model, and make their average the new one.

        Args:
            action: Action whose replies are the model's states.
            settings: The request.
            only: For each state, the names of the tensors that are sent and come back; all others
                stay as they are. A state that is not named travels whole.

        Returns:
            The clients' metrics, averaged.
        """
        part = st.Part(self.layouts, only)
        replies = self.ask(action, settings, states=part.of(self.states), layouts=part.layouts)
        average, metrics = self.average(replies)
        self.move(part.filled(average, self.states))
        return metrics

    def reward(
        self,
        request: rq.RewardCandidates,
        *,
        only: Mapping[str, Collection[str]] = {},
        by_median: bool = False,
        **names: Any,
    ) -> tuple[list[float], Metrics]:
        """Each candidate's accuracy over all clients' validation records, also written to an event.

        The event has the standard deviation of the noise on each accuracy. It is null where it
        depends on how the clients' values are distributed.

        Args:
            request: Names the candidates.
            only: For each state, the names of the tensors that are sent.
            by_median: If true, the rewards of three or more clients without privacy are combined by
                :func:`~fednas_flwr.protocol.states.median_rewards` instead of the mean, so that no
                single client decides which candidate is best.
            **names: Further fields of the event, which say what the candidates are.

        Returns:
            The accuracies, and the clients' metrics, averaged.
        """
        layout = st.Layout.of({"rewards": torch.zeros(request.count)})
        bounds = NOISY_REWARDS if self.is_private else EXACT_REWARDS
        average, replies, votes = self.new_average(), list[Reply](), list[Tensor]()
        states = st.Part({n: self.layouts[n] for n in self.model}, only).of(self.model)
        layouts = {"rewards": layout}
        for _, reply in self.ask("evaluate.candidates", request, states=states, layouts=layouts):
            vote = {d: vector.clamp(*bounds) for d, vector in reply.states["rewards"].items()}
            average.add({"rewards": vote}, weight=reply.num_examples)
            votes.append(st.unpack(vote, layout)["rewards"])
            replies.append(replace(reply, states={}))
        rewards = st.unpack(average.result()["rewards"], layout)["rewards"].tolist()
        if by_median and not self.is_private and len(votes) >= FEWEST_VOTES:
            rewards = st.median_rewards(torch.stack(votes).double()).tolist()
        noise: float | None = None
        if not self.is_private or isinstance(average, st.WeightedAverage):
            sigma = self.noise_multiplier("rewards") or 0.0
            sites = sum(reply.sites for reply in replies)
            weight = sum(reply.num_examples for reply in replies)
            noise = sigma * math.sqrt(request.count * sites) / weight
        place = {"stage": self.stage, "round": self._round}
        self.cohort.emit("rewarded", **place, **names, rewards=rewards, noise=noise)
        return rewards, mean_metrics(replies)

    def validation_metrics(self, every: int, server_round: int, num_rounds: int) -> Metrics:
        """Mean loss and accuracy on the clients' validation records, in rounds that are evaluated.

        Empty in other rounds, and with privacy unless noised metrics are planned.

        Args:
            every: Rounds between evaluations, see :func:`evaluates`.
            server_round: Number of the round, from 1.
            num_rounds: Rounds of the stage.
        """
        hidden = self.is_private and self.noise_multiplier("metrics") is None
        if hidden or not evaluates(every, server_round, num_rounds):
            return {}
        request = rq.Evaluate(network=self.description, split="validation")
        replies = self.ask("evaluate.model", request, states=self.states)
        metrics = mean_metrics(reply for _, reply in replies)
        return {f"validation_{name}": value for name, value in metrics.items()}

    def average(self, replies: Replies) -> tuple[dict[str, st.Packed], Metrics]:
        """The average of the replies' states, and of their metrics weighted by examples.

        A reply's states are dropped once they are added.
        """
        average, metrics = self.new_average(), []
        for _, reply in replies:
            average.add(reply.states, weight=reply.num_examples)
            metrics.append(replace(reply, states={}))
        return average.result(), mean_metrics(metrics)

    def move(self, average: dict[str, st.Packed]) -> None:
        """Make the clients' average the global model."""
        self.states = average

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluation | None = None,
    ) -> Result:
        """Run all rounds that no checkpoint covers yet.

        Args:
            grid: Flower's connection to the clients.
            initial_arrays: Named tensors to start from, such as ``Result.arrays`` of an earlier
                start; None starts from the network given to the constructor.
            num_rounds: Rounds of the stage, including those before a resume.
            timeout: Seconds per exchange of these rounds; None keeps the cohort's.
            train_config: Not used: the constructor takes the settings.
            evaluate_config: Not used, likewise.
            evaluate_fn: Called with the round and the named tensors before the first and after
                every round; its metrics join the round's.

        Returns:
            Flower's result: the final named tensors, and metrics by round.

        Raises:
            QuorumError: Too few clients answered an exchange.
        """
        usual = self.cohort.deadline_s  # the cohort serves other stages, too
        self.cohort.deadline_s = usual if timeout is None else timeout
        try:
            self.cohort.connect(grid)
            if initial_arrays is not None:
                tensors = initial_arrays.to_torch_state_dict()
                for state, layout in self.layouts.items():  # in place: optimisers hold the vectors
                    named = {name: tensors[f"{state}.{name}"] for name, _, _ in layout.entries}
                    self.inherit({state: st.pack(named)})
            return self._run_rounds(num_rounds, evaluate_fn)
        finally:
            self.cohort.deadline_s = usual

    def _run_rounds(self, num_rounds: int, evaluate_fn: Evaluation | None) -> Result:
        result = Result()
        self.rounds_done = self._restore()
        first, longest_s = self.rounds_done + 1, 0.0

        def centrally(server_round: int) -> Metrics:
            central = evaluate_fn(server_round, self.named_arrays()) if evaluate_fn else None
            if central is not None:
                result.evaluate_metrics_serverapp[server_round] = central
            return {f"central_{name}": float(v) for name, v in (central or {}).items()}  # type: ignore[arg-type]

        if first == 1:
            centrally(0)
        for server_round in range(first, num_rounds + 1):
            started = time.monotonic()
            late = self.ends_at is not None and started + longest_s > self.ends_at
            if late and server_round > first:
                break
            sent, received = self.cohort.bytes_sent, self.cohort.bytes_received
            self._round, self._phase, self._client_metrics = server_round, 0, {}
            self.cohort.seconds.clear()
            self._participants = self.cohort.participants(self.stage, server_round)
            self._asked = set()
            planned = self._affordable(server_round, num_rounds, longest_s)
            metrics = dict(self.run_round(server_round, planned) or {}) | self._alpha_metrics()
            metrics |= centrally(server_round)
            if self.cohort.predicts_numbers:
                metrics = {n.replace(ACCURACY, CLOSENESS): value for n, value in metrics.items()}
            result.train_metrics_clientapp[server_round] = MetricRecord(metrics)  # type: ignore[arg-type]
            self.cohort.emit(
                "round",
                stage=self.stage,
                round=server_round,
                rounds=num_rounds,
                seconds=time.monotonic() - started,
                metrics=metrics,
                exchanges=self._phase,
                bytes_sent=self.cohort.bytes_sent - sent,
                bytes_received=self.cohort.bytes_received - received,
                clients={str(c): m for c, m in sorted(self._client_metrics.items())},
                client_seconds={} if self.is_private else dict(self.cohort.seconds),
                **({} if self._participants is None else {"asked": sorted(self._asked)}),
            )
            self._emit_alphas(server_round, num_rounds)
            self._save(server_round)
            self.rounds_done = server_round
            longest_s = max(longest_s, time.monotonic() - started)
        result.arrays = self.named_arrays()
        return result

    def _affordable(self, server_round: int, num_rounds: int, round_s: float) -> int:
        """The number of retraining rounds that time allows; learning rates are annealed over them.

        A training that is cut off while its rate is still high is worth little.
        """
        if self.ends_at is None or self.stage != "retrain" or not round_s:
            return num_rounds
        left = math.floor((self.ends_at - time.monotonic()) / round_s)
        return min(num_rounds, max(server_round, server_round - 1 + left))

    def inherit(self, states: st.States) -> None:
        """Start from the global model of another search in the same space."""
        for state, packed in states.items():
            for dtype, vector in packed.items():
                self.states[state][dtype].copy_(vector)

    def derive(self) -> Genotype:
        """The architecture that the search has found.

        Raises:
            ValueError: The strategy has no search space.
        """
        if self.space is None:
            raise ValueError(f"{type(self).__name__} does not search: there is nothing to derive")
        return self.space.derive(self.alphas())

    def configuration(self) -> Configuration | None:
        """The hyper-parameters that the search has found for retraining; None if it found none."""
        return None

    def alphas(self) -> st.Tensors:
        """The architecture parameters by cell kind, views of the global state."""
        return st.unpack(self.states["alphas"], self.layouts["alphas"])

    def load_into(self, network: nn.Module) -> None:
        """Copy the global model into ``network``, which must have the same tensors."""
        st.load_states(network, self.model)

    def named_arrays(self) -> ArrayRecord:
        """The global model as named tensors, ``<state>.<tensor>``."""
        return ArrayRecord(
            {
                f"{state}.{name}": tensor
                for state, packed in self.states.items()
                for name, tensor in st.unpack(packed, self.layouts[state]).items()
            }
        )

    def summary(self) -> None:
        """Log nothing; events record what runs."""

    def _unused(self, *_: Any, **__: Any) -> Any:
        """Refuse: a round has several exchanges, and :meth:`run_round` makes them."""
        raise NotImplementedError("run_round takes the place of Flower's four round methods")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _unused

    def _initial(self, network: nn.Module) -> tuple[dict[str, st.Layout], dict[str, st.Packed]]:
        """Layouts and packed states of a network, including its moments if they travel."""
        tensors = {name: state for name, state in st.network_states(network).items() if state}
        if self.momentum == "averaged":
            tensors[st.MOMENTS] = no_moments(network)
        layouts = {name: st.Layout.of(state) for name, state in tensors.items()}
        return layouts, {name: st.pack(state) for name, state in tensors.items()}

    def _alpha_metrics(self) -> Metrics:
        if "alphas" not in self.states:
            return {}
        alphas, derived = self.alphas(), self.space.derive(self.alphas())
        return {"alpha_entropy": alpha_entropy(alphas), "skip_share": skip_share(derived)}

    def _emit_alphas(self, server_round: int, num_rounds: int) -> None:
        every = max(1, num_rounds // ALPHA_EVENTS)
        if "alphas" not in self.states or (server_round % every and server_round != num_rounds):
            return
        alphas = {kind: alpha.tolist() for kind, alpha in self.alphas().items()}
        derived = self.space.derive(self.alphas()).cells
        cells = {kind: [asdict(edge) for edge in edges] for kind, edges in derived.items()}
        self.cohort.emit(
            "alphas", round=server_round, ops=list(self.space.ops), alphas=alphas, cells=cells
        )

    def _save(self, server_round: int) -> None:
        if self.checkpoints is None:
            return
        packed = self.states.items()
        tensors = {f"{n}.{dtype}": v for n, state in packed for dtype, v in state.items()}
        tensors |= {f"{SERVER}{name}": tensor for name, tensor in self.server_tensors().items()}
        self.checkpoints.save(Checkpoint(self.stage, server_round, tensors, self.values))

    def _restore(self) -> int:
        """Take the newest checkpoint's state; return its round, 0 without one."""
        checkpoint = self.checkpoints.latest(self.stage) if self.checkpoints else None
        if checkpoint is None:
            return 0
        self.values = dict(checkpoint.values)
        self.fit_states()
        for state, packed in self.states.items():
            for dtype in packed:
                packed[dtype] = checkpoint.tensors[f"{state}.{dtype}"]
        self.load_server_tensors(server_state(checkpoint))
        return checkpoint.round


def server_state(checkpoint: Checkpoint) -> st.Tensors:
    """The :meth:`RoundStrategy.server_tensors` that a checkpoint holds."""
    return after_prefix(checkpoint.tensors, SERVER)


def mean_metrics(replies: Iterable[Reply]) -> Metrics:
    """The mean of every metric over the replies that have it, weighted by examples.

    A value is capped at ``FARTHEST`` times the median or at ``FARTHEST``, whichever is more.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for reply in replies:
        for name, value in reply.metrics.items():
            values.setdefault(name, []).append((reply.num_examples, value))
    means = {}
    for name, pairs in values.items():
        most = FARTHEST * max(1.0, median(value for _, value in pairs))
        means[name] = sum(n * min(value, most) for n, value in pairs) / sum(n for n, _ in pairs)
    return means

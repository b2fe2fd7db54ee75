"""A run, read from its folder: configuration and events, and the numbers that follow from them.

`read_run` opens a folder, finished or not. Report, comparison, model card and final table share the
methods of `Run`, so that they cannot disagree. A number that the run did not reach is None.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Literal

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import read_yaml
from fednas_flwr.runs import events as ev
from fednas_flwr.runs.events import Event
from fednas_flwr.settings import names

CONFIG_FILE = "config.yaml"
BESIDE = ("baselines", "finalists", "variants")  # folders of runs below a run
BASELINES_FOLDER, FINALISTS_FOLDER, VARIANTS_FOLDER = BESIDE
EVENTS_FILE = "events.jsonl"
CLIENTS_LINEAR = "the clients' linear model"
GUESSES = MAJORITY, CHANCE, MEAN = "the most frequent class", "chance", "always the mean"
POOLED = {"the pooled linear model": "linear", "pooled boosted trees": "trees"}  # keys of events
FEDERATED = "federated"  # the linear model that clients train beside a network
SIMPLER = {**POOLED, CLIENTS_LINEAR: FEDERATED}
STAGES_AFTER = ("retrain", "evaluate", "export")  # stages of a run besides the search
SEARCH_LOSS = "validation_loss"  # in the search's last round
NOT_PRIVATE = ("local_epochs", "dp_aware")  # settings that private clients do not follow


Unit = Literal["share", "score", "error", "count", "seconds", "milliseconds", "megabytes", "number"]


@dataclass(frozen=True)
class Score:
    """A score of a model on test records.

    Attributes:
        name: Its key in an ``evaluated`` event, unless ``key`` is set.
        label: Its name on pages.
        unit: Its unit.
        hub: Its name on the Hugging Face Hub, in the metadata of a model card.
        models: The models for which this score is among the results of a run; the report's tables
            of scores have all scores of each model.
        key: Its key in an ``evaluated`` event if that is not its name.
        chance: Score of a model that knows nothing; None if that depends on the classes.
    """

    name: str
    label: str
    unit: Unit = "score"
    hub: str = ""
    models: tuple[str, ...] = ("central", *SIMPLER.values())
    key: str = ""
    chance: float | None = None

    @property
    def sign(self) -> int:
        """-1 if less is better, else 1."""
        return -1 if self.name in names.LOSSES else 1

    def of(self, measured: Mapping[str, Any]) -> float | None:
        """Return its value in an evaluation; None if it was not measured.

        The loss of predicted numbers, which have no accuracy, is no log loss.
        """
        if self.name == names.LOG_LOSS and names.ACCURACY not in measured:
            return None
        return measured.get(self.key or self.name)


SCORES = (
    Score("accuracy", "accuracy", "share", hub="accuracy"),
    Score("f1", "F1", hub="f1"),
    Score("auroc", "AUROC", hub="roc_auc", chance=0.5),
    Score("average_precision", "average precision", models=("central",)),
    Score("majority", "share of the most frequent class", "share", models=()),
    Score("sensitivity", "sensitivity", models=()),
    Score("specificity", "specificity", models=()),
    Score(names.LOG_LOSS, "log loss", "error", models=("central",), key="loss"),
    Score(names.R2, "R²", hub="r_squared", chance=0.0),
    Score(names.RMSE, "RMSE", "error", hub="rmse"),
    Score(names.MAE, "MAE", "error", hub="mae"),
)


@dataclass(frozen=True)
class Metric:
    """A result of a run: on the terminal, the page and the card, in comparisons and sweeps.

    Attributes:
        name: Its key in :meth:`Run.numbers`, JSON and CSV files, and ``sweep.metric``.
        label: Its name for readers, the same everywhere.
        unit: Its unit; larger shares and scores are better, and lower values in all other units.
        read: Function that returns its value for a run.
    """

    name: str
    label: str
    unit: Unit
    read: Callable[["Run"], float | None]

    @property
    def is_score(self) -> bool:
        """True if it measures the quality of a model."""
        return self.unit in ("share", "score")


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        folder: Path of the folder.
        config: The resolved configuration; empty if config.yaml is missing.
        events: All events, oldest first.
    """

    folder: Path
    config: dict[str, Any]
    events: list[Event]

    def of_kind(self, kind: str) -> list[Event]:
        """Return all events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def last(self, kind: str) -> Event:
        """Return the latest event of a kind; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})

    def group(self, name: str) -> dict[str, Any]:
        """Return a group of the settings; empty if the configuration has no such mapping."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def scores(self, model: str) -> dict[str, Any]:
        """Return the last evaluation of a model; empty if there was none."""
        run, place = (self.clients_linear(), "central") if model == FEDERATED else (self, model)
        return (run and run.last("evaluated").get(place)) or {}

    @property
    def score(self) -> Score:
        """The score by which networks are compared."""
        name = self.last("evaluated").get("metric") or names.ACCURACY
        return next(score for score in SCORES if score.name == name)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, or labels."""
        return [str(name) for name in self.last("partition").get("class_names") or []]

    def rounds(self, *stages: str) -> list[Event]:
        """Return the rounds of some stages, each once."""
        return [event for stage in stages for event in ev.latest_rounds(self.events, stage)]

    @property
    def status(self) -> str:
        """The outcome: ``completed``, ``failed``, ``cut short`` by time, or ``unfinished``.

        An ``unfinished`` run still goes on, or was killed.
        """
        kinds = ("run_started", "run_finished", "out_of_time")
        ends = [e for e in self.events if e["event"] in kinds]
        if not ends or ends[-1]["event"] == "run_started":
            return "unfinished"
        status = str(ends[-1]["status"])
        if status == "completed" and ends[-2:][0]["event"] == "out_of_time":
            return "cut short"
        if status == "completed" and self.group("evaluation").get("deliver") == names.BEST:
            waits = self.last("derived") and not self.last("exported")
            if waits and {*STAGES_AFTER} <= {*(self.config.get("stages") or ())}:
                return "unfinished"  # candidates must still be compared
        return status

    @property
    def reason(self) -> str:
        """Reason why the run failed; empty if it did not."""
        failed = self.status == "failed"
        return str(self.last("run_finished").get("reason") or "no reason given") if failed else ""

    @property
    def is_private(self) -> bool:
        """True if clients add noise to all that they send (a privacy other than ``none``)."""
        return self.group("privacy").get("name") not in (None, "none") or self.privacy is not None

    @property
    def holds_out(self) -> bool:
        """True if retraining left out validation records, for measurements."""
        delivers = self.group("evaluation").get("deliver") == names.BEST
        return delivers or bool(self.group("retrain").get("evaluate_every"))

    @property
    def multi_label(self) -> bool:
        """True if a record can have several labels."""
        return bool(self.last("partition").get("multi_label"))

    @property
    def is_regression(self) -> bool:
        """True if the target is a number."""
        is_number = self.last("partition").get("number")  # missing in runs of groups of clients
        return bool(is_number) or self.score.name in names.NUMBER_METRICS

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that took effect.

        Settings that only missing stages read are left out. Training that protects records has
        noised steps, with a share of the records or an expected batch, in place of epochs.
        Hyper-parameters that were searched for, or followed from the noise, are not those of the
        configuration. Rounds and clients are those in the events.
        """
        config, algorithm = dict(self.config), self.group("algorithm")
        stages = config.get("stages") or ["search", *STAGES_AFTER]
        searches = "search" in stages and "network" not in algorithm
        for key in () if searches else ("search_space", "rounds"):
            config.pop(key, None)
        if "network" in algorithm and config.get("genotype"):
            config["algorithm"] = {k: v for k, v in algorithm.items() if k != "network"}
        elif not searches and "network" not in algorithm:
            config.pop("algorithm", None)
        network = self.last("derived").get("network") or {}
        if "skip" in network and isinstance(config.get("search_space"), dict):  # as delivered
            config["search_space"] = config["search_space"] | {"skip": network["skip"]}
        training = dict(self.training)
        config |= {key: training.pop(key) for key in ("server_optimizer",) if key in training}
        if "retrain" not in stages:
            config.pop("retrain", None)
        elif retrain := _chosen(self.group("retrain") | training, algorithm, self.last("derived")):
            if "rounds" in retrain:
                retrain["rounds"] = self._done("retrain", retrain["rounds"])
            chosen = self.last("learning_rate")
            if rates := {key: chosen[key] for key in ("lr", "min_lr") if key in chosen}:
                retrain["weights"] = retrain["weights"] | rates
            config["retrain"] = retrain
        if "rounds" in config:
            config["rounds"] = self._done("search", config["rounds"])
            made = [event["metrics"].get("local_epochs") for event in self.rounds("search")]
            if any(made):
                config["algorithm"] = algorithm | {"local_epochs": int(made[-1])}
        if "clients" in config:
            config["clients"] = self._clients_text(config["clients"])
        privacy = self.group("privacy")
        if self.is_private and privacy.get("unit") != names.CLIENT:
            terms = {"algorithm": privacy, "retrain": privacy.get("retrain") or {}}
            for group, of_group in terms.items():
                if isinstance(config.get(group), dict):
                    config[group] = _in_steps(config[group], of_group)
        return config

    @property
    def training(self) -> dict[str, Any]:
        """Settings with which retraining began; empty before it, and with noised steps."""
        begun = [e for e in self.of_kind("stage_started") if e["stage"] == "retrain"]
        return begun[-1].get("training", {}) if begun else {}

    def _done(self, stage: str, planned: int | None) -> int | str:
        """Return a stage's number of rounds: ``2 of 5`` if the run has not reached all."""
        done = len(self.rounds(stage))
        if planned is None:
            started = (e["rounds"] for e in self.of_kind("stage_started") if e["stage"] == stage)
            planned = max(started, default=done)
        return done if done == planned else f"{done} of {planned}"

    def _clients_text(self, planned: int) -> int | str:
        """Return the numbers of clients that took part, and of those that left."""
        seen = {client for event in self._all_rounds() for client in event.get("clients") or {}}
        number = len(seen) or ev.records_of(self.last("partition"))[0]
        left = len(self.departures())
        text = f"{number} of {planned}" if number != planned else str(planned)
        return f"{text}, {left} left before the end" if left else text

    @property
    def privacy(self) -> Event | None:
        """The newest ``privacy`` event; None before clients have accepted a schedule.

        Its epsilons are those at the end of the run, if clients have reported them: other runs may
        have released something meanwhile.
        """
        promised = self.last("privacy")
        at_end = {c["client"]: c.get("epsilon", {}) for c in self._spending()}
        clients = [
            c | {"epsilon": _larger(c["epsilon"], at_end.get(c["client"], {}))}
            for c in promised.get("clients", ())
        ]
        return promised | {"clients": clients} if promised else None

    def privacy_spent(self) -> dict[int, float | None]:
        """Return the epsilon that filters of clients have counted since the ``privacy`` event."""
        return {client["client"]: client["spent"] for client in self._spending()}

    def _spending(self) -> list[Event]:
        """Return what clients have reported of their budgets since the ``privacy`` event."""
        later = takewhile(lambda event: event["event"] != "privacy", reversed(self.events))
        return next((event["clients"] for event in later if event["event"] == "privacy_spent"), [])

    def attempts(self) -> list[list[Event]]:
        """Return the events of each process that worked on the run, oldest first."""
        attempts: list[list[Event]] = []
        for event in self.events:
            if event["event"] == "run_started" or not attempts:
                attempts.append([])
            attempts[-1].append(event)
        return attempts

    def stage_seconds(self) -> dict[str, float]:
        """Return the time spent per stage in order of first start, over all attempts.

        A stage that never finished counts up to the last event of its process.
        """
        seconds: Counter[str] = Counter()
        for attempt in self.attempts():
            open_stages: dict[str, float] = {}
            for event in attempt:
                if event["event"] == "stage_started":
                    seconds[event["stage"]] += 0
                    open_stages[event["stage"]] = event["elapsed"]
                elif event["event"] == "stage_finished":
                    seconds[event["stage"]] += event["seconds"]
                    open_stages.pop(event["stage"], None)
            for stage, start in open_stages.items():
                seconds[stage] += attempt[-1]["elapsed"] - start
        return dict(seconds)

    def total_seconds(self) -> float:
        """Return the wall time over all attempts."""
        return float(sum(attempt[-1]["elapsed"] for attempt in self.attempts()))

    def failures(self) -> list[Event]:
        """Return the ``client_failed`` events, without those of rounds that a resume repeated."""
        return self._of_final_rounds("client_failed")

    def departures(self) -> list[Event]:
        """Return each client's last ``client_left`` event, without those that a resume undid."""
        return list({e["client"]: e for e in self._of_final_rounds("client_left")}.values())

    @property
    def released_all(self) -> bool:
        """True if the run has reached all rounds of its private stages, with all clients."""
        rounds = {event["stage"]: event["rounds"] for event in self.of_kind("stage_started")}
        committed = {release["stage"] for release in (self.privacy or {}).get("schedule", [])}
        trained = committed & {"search", "retrain"}
        ended = all(len(self.rounds(stage)) == rounds.get(stage) for stage in trained)
        return self.status == "completed" and ended and not self.departures()

    def client_results(self) -> list[Event]:
        """Return the clients' results on their test parts, those that sent a score."""
        clients = self.last("evaluated").get("clients") or []
        return [c for c in clients if {c.get(names.ACCURACY), c.get(names.RMSE)} != {None}]

    def alphas(self) -> list[Event]:
        """Return the ``alphas`` events by ascending round, one per round."""
        return ev.latest_rounds(self.events, None, "alphas")

    def explored(self, stage: str) -> list[Event]:
        """Return a stage's ``explored`` events by ascending round, one per round."""
        return ev.latest_rounds(self.events, stage, "explored")

    def traffic_stages(self) -> list[str]:
        """Return the stages in whose rounds the server sent or received bytes."""
        return [stage for stage in self._stages() if any(self.traffic(stage))]

    def traffic(self, *stages: str) -> tuple[int, int]:
        """Return the bytes that the server sent and received in the rounds of some stages."""
        rounds = self.rounds(*stages)
        return sum(e["bytes_sent"] for e in rounds), sum(e["bytes_received"] for e in rounds)

    def answers(self, *stages: str) -> int:
        """Return the number of clients' answers in the rounds of some stages, one per round."""
        return sum(len(event.get("clients") or {}) for event in self.rounds(*stages))

    def accuracy(self) -> float | None:
        """Return the server's test accuracy, or the clients' if the server does not test."""
        central = self.scores("central").get("accuracy")
        return self.client_accuracy() if central is None else float(central)

    def groups(self) -> dict[str, Event]:
        """The ``group_finished`` event of every finished group of clients, by its name."""
        return {event["group"]: event for event in self.of_kind("group_finished")}

    def baselines(self) -> list["Run"]:
        """Return the runs of networks with which this run's is compared, by name."""
        folders = sorted(self.folder.glob(f"{BASELINES_FOLDER}/*/{EVENTS_FILE}"))
        return [read_run(file.parent) for file in folders]

    def clients_linear(self) -> "Run | None":
        """The run of the linear model that clients trained beside the network, or None."""
        places = FINALISTS_FOLDER, BASELINES_FOLDER  # trained for all rounds in the first
        folders = (self.folder / place / names.LINEAR for place in places)
        return next((read_run(one) for one in folders if (one / EVENTS_FILE).exists()), None)

    def left_out(self) -> list[str]:
        """The names of networks that were to be compared, but for which no time remained."""
        files = sorted(self.folder.glob(f"{BASELINES_FOLDER}/*/{CONFIG_FILE}"))
        return [file.parent.name for file in files if not (file.parent / EVENTS_FILE).exists()]

    def beside_seconds(self) -> float:
        """The total time of all networks that were trained beside this run's."""
        places = (BASELINES_FOLDER, FINALISTS_FOLDER)
        files = (file for place in places for file in self.folder.glob(f"{place}/*/{EVENTS_FILE}"))
        return sum(read_run(file.parent).total_seconds() for file in files)

    def test_score(self, model: str = "central") -> float | None:
        """Return a model's :attr:`score` on the server's test set; else the clients' accuracy."""
        value, score = self.score.of(self.scores(model)), self.score
        return self.accuracy() if (model, value, score) == ("central", None, SCORES[0]) else value

    def interval(self, model: str = "central") -> list[float] | None:
        """Return the 95 % interval of :meth:`test_score`, or None if it is unknown."""
        ends: dict[str, list[float]] = self.scores(model).get("intervals") or {}
        return ends.get(self.score.name)

    def simpler(self) -> dict[str, float]:
        """The :attr:`score` of each model that a searched network has to beat, best first."""
        central = self.scores("central") if self.score == SCORES[0] else {}
        others = {
            MAJORITY: central.get("majority"),
            **{name: self.test_score(model) for name, model in SIMPLER.items()},
            "its linear skip alone": central.get("without_cells"),
        }
        if self.delivers_linear:
            del others[CLIENTS_LINEAR]
        if self.score.chance is not None:
            others[MEAN if self.is_regression else CHANCE] = self.score.chance
        measured = [(name, value) for name, value in others.items() if value is not None]
        return dict(sorted(measured, key=lambda pair: -self.score.sign * pair[1]))

    def lead(self, rival: str) -> list[float] | None:
        """Return the 95 % interval of the network's lead over one of :meth:`simpler`.

        It is the interval of differences on resamples of the same test records, if both models have
        these; else that of the network's own score, as if the other's were certain; else None.
        """
        ours, name, sign = self.scores("central"), self.score.name, self.score.sign
        if paired := paired_interval(ours, self.scores(SIMPLER.get(rival, "")), name):
            return sorted(sign * end for end in paired)
        ends = self.interval()
        return ends and sorted(sign * (end - self.simpler()[rival]) for end in ends)

    @property
    def delivers_linear(self) -> bool:
        """True if the network is itself a linear model, so that it beats none."""
        return bool((self.last("derived").get("network") or {}).get("name") == names.LINEAR)

    def metric(self, name: str) -> float | None:
        """Return one of :data:`METRICS`, or the search's loss; None if it was not measured."""
        if name != SEARCH_LOSS:
            return self.numbers()[name]
        rounds = self.rounds("search")
        return rounds[-1]["metrics"].get(name) if rounds else None

    def numbers(self) -> dict[str, float | None]:
        """Return the run's results by name.

        Accuracies are shares of 1; F1 and the like are those of the positive class, else means.
        """
        return {metric.name: metric.read(self) for metric in METRICS}

    def client_accuracy(self) -> float | None:
        """Return the mean accuracy over clients, or with a secure sum that of all their records."""
        total = self.scores("total")
        if "accuracy" in total:
            return float(total["accuracy"])
        return _mean_accuracy(self.client_results())

    def personalised_accuracy(self) -> float | None:
        """Return the mean accuracy after each client has trained the network on its own records."""
        return _mean_accuracy(self.last("evaluated").get("personalised") or [])

    def epsilon(self) -> float | None:
        """Return the largest epsilon of all clients and splits, by the names.PRV accountant."""
        return overall(self.privacy)[0] if self.privacy else None

    def latency_ms(self) -> float | None:
        """Return the network's measured latency, or else the predicted one."""
        cost = self.last("derived").get("cost") or {}
        latency: float | None = cost.get("measured") or cost.get("predicted")
        return latency if cost.get("unit") == "ms" else None

    def client_seconds(self) -> dict[int, list[float]]:
        """Return each client's time for its answers in each round; empty for older runs."""
        seconds: dict[int, list[float]] = {}
        named = {int(client): client for client in self.last("partition").get("clients") or []}
        for event in self._all_rounds():
            for key, used in (event.get("client_seconds") or {}).items():
                seconds.setdefault(named.get(int(key), int(key)), []).append(used)
        return seconds

    def exchanges(self) -> int | None:
        """Return the number of exchanges with clients in all rounds."""
        exchanges = [e["exchanges"] for e in self._all_rounds() if "exchanges" in e]
        return sum(exchanges) if exchanges else None

    def traffic_mb(self) -> float | None:
        """Return the megabytes of all rounds, in both directions."""
        stages = self._stages()
        return sum(self.traffic(*stages)) / 1e6 if stages else None

    def clients_lost(self) -> int:
        """Return the number of clients that failed to answer at least once, or left."""
        return len({event["client"] for event in self.failures() + self.departures()})

    def _stages(self) -> list[str]:
        """Return the stages that have rounds, in their order."""
        return list(dict.fromkeys(event["stage"] for event in self.of_kind("round")))

    def _all_rounds(self) -> list[Event]:
        """Return the rounds of all stages, each once."""
        return self.rounds(*self._stages())

    def _of_final_rounds(self, kind: str) -> list[Event]:
        """Return events, of a kind that has rounds, without those of rounds repeated later."""
        events: list[Event] = []
        for attempt in self.attempts():
            redone = {(e["stage"], e["round"]) for e in attempt if e["event"] == "round"}
            events = [e for e in events if (e["stage"], e["round"]) not in redone]
            events += [e for e in attempt if e["event"] == kind]
        return events


def _of(place: str, key: str) -> Callable[[Run], float | None]:
    """Return a reader of a number in a model's scores, the derived network, or stages' times."""

    def read(run: Run) -> float | None:
        places = {"derived": run.last("derived"), "seconds": run.stage_seconds()}
        return places.get(place, run.scores(place)).get(key)

    return read


def _scores(model: str, prefix: str) -> list[Metric]:
    """Return the scores of one model as metrics."""

    def reader(score: Score) -> Callable[[Run], float | None]:
        return lambda run: score.of(run.scores(model))

    return [
        Metric(f"{model}_{score.name}", f"{prefix} {score.label}", score.unit, reader(score))
        for score in SCORES
        if model in score.models
    ]


PARTS = {
    "without_skip": "accuracy without its linear skip",
    "without_cells": "accuracy of its linear skip alone",
}
METRICS = [
    *_scores("central", "test"),
    *(Metric(f"accuracy_{n}", label, "share", _of("central", n)) for n, label in PARTS.items()),
    Metric(
        "released_auroc", "AUROC on training records, noised", "score", _of("released", "auroc")
    ),
    Metric("client_accuracy", "mean accuracy over clients", "share", Run.client_accuracy),
    Metric(
        "personalised_accuracy", "accuracy after local training", "share", Run.personalised_accuracy
    ),
    *_scores("linear", "linear model,"),
    *_scores("trees", "boosted trees,"),
    *_scores(FEDERATED, "clients' linear model,"),
    Metric("num_parameters", "parameters", "count", _of("derived", "num_parameters")),
    Metric("multiply_adds", "multiply-adds", "count", _of("derived", "multiply_adds")),
    Metric("latency_ms", "latency", "milliseconds", Run.latency_ms),
    Metric("search_seconds", "time of search", "seconds", _of("seconds", "search")),
    Metric("retrain_seconds", "time of retrain", "seconds", _of("seconds", "retrain")),
    Metric("exchanges", "exchanges", "number", Run.exchanges),
    Metric("traffic_mb", "traffic", "megabytes", Run.traffic_mb),
    Metric("epsilon", "epsilon", "number", Run.epsilon),
    Metric("clients_lost", "clients lost", "number", Run.clients_lost),
]


def paired_interval(
    ours: Mapping[str, Any], other: Mapping[str, Any], score: str
) -> list[float] | None:
    """Return the 95 % interval of the difference of two models' scores, by the paired bootstrap.

    Both have resamples of the same test records; None if one has none.
    """
    pair = [(scores.get("resamples") or {}).get(score) for scores in (ours, other)]
    if not all(pair):
        return None
    cuts = quantiles([a - b for a, b in zip(*pair, strict=True)], n=40)
    return [cuts[0], cuts[-1]]  # 2.5 % lie beyond each end


def _mean_accuracy(clients: list[Event]) -> float | None:
    accuracies = [c["accuracy"] for c in clients if c.get("accuracy") is not None]
    return fmean(accuracies) if accuracies else None


def _in_steps(group: dict[str, Any], terms: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's settings with the steps that private clients take in place of epochs."""
    taken = {key: value for key, value in group.items() if key not in NOT_PRIVATE}
    if "local_epochs" in group:
        taken["local_steps"] = terms.get("local_steps")
    if "batch_size" in group:
        batch_size, rate = taken.pop("batch_size"), terms.get("rate")
        taken |= {"expected_batch_size": batch_size} if rate is None else {"sampling_rate": rate}
    if isinstance(group.get("search"), dict):  # in CFDNAS
        taken["search"] = _in_steps(group["search"], terms)
    return taken


def _chosen(retrain: dict[str, Any], algorithm: dict[str, Any], derived: Event) -> dict[str, Any]:
    """Return retraining's settings without those that searched hyper-parameters replaced."""
    if "num_configurations" in algorithm:  # these change from round to round
        left = {k: v for k, v in retrain.items() if k not in ("weights", "drop_path_prob")}
        return left | {"hyperparameters": f"chosen by {algorithm.get('name')} in every round"}
    found = derived.get("configuration")
    if not found:
        return dict(retrain)
    weights = retrain.get("weights") or {}
    taken = {key: found[key] for key in ("lr", "momentum", "weight_decay") if key in found}
    return retrain | {"weights": weights | taken, "drop_path_prob": found.get("dropout")}


def flat_settings(tree: Any, name: str = "") -> dict[str, Any]:
    """Return settings by their dotted names."""
    if not isinstance(tree, Mapping):
        return {name: tree}
    below = (flat_settings(value, f"{name}.{key}".lstrip(".")) for key, value in tree.items())
    return {key: value for part in below for key, value in part.items()}


def is_noised(metric: str) -> bool:
    """Return true if clients measured a round's metric, and so noise it in a private run."""
    return metric.startswith(("train_", "validation_"))


def is_complete(run_folder: Path) -> bool:
    """Return true if a folder holds a run whose latest attempt has finished."""
    return (run_folder / EVENTS_FILE).exists() and read_run(run_folder).status == "completed"


def is_beside(run_folder: Path) -> bool:
    """Return true if a folder is that of a network compared with the run around it."""
    above = run_folder.parent
    return above.name in BESIDE and (above.parent / CONFIG_FILE).is_file()


def is_whole(run_folder: Path) -> bool:
    """Return true if a folder holds a completed run without a failed group of clients."""
    groups = read_run(run_folder).groups().values() if is_complete(run_folder) else [{}]
    return all(event.get("status") == "completed" for event in groups)


def read_run(run_folder: Path) -> Run:
    """Return the run that a folder holds.

    Raises:
        ConfigError: The folder holds no events.jsonl, and so is no run folder; its configuration is
            no YAML or too large; or an older version has written its events.
    """
    path = run_folder / EVENTS_FILE
    if not path.exists():
        raise ConfigError(f"{run_folder} holds no {EVENTS_FILE}: give the folder of a run.")
    file = run_folder / CONFIG_FILE
    loaded = read_yaml(file, str(file)) if file.exists() else None
    events = ev.read_events(path)
    run = Run(run_folder, loaded if isinstance(loaded, dict) else {}, events)
    if names := ev.names_by_client(run.last("partition")):
        return replace(run, events=[ev.with_names(event, names) for event in events])
    return run


def largest(epsilons: Iterable[float | None] | None) -> float | None:
    """Return the largest of some epsilons, 0 where nothing is released.

    None stands for infinity, and for an accountant whose epsilons are not recorded.
    """
    given = [None] if epsilons is None else list(epsilons)
    known = [epsilon for epsilon in given if epsilon is not None]
    return max(known, default=0.0) if len(known) == len(given) else None


def _larger(promised: Mapping[str, Any], at_end: Mapping[str, Any]) -> dict[str, Any]:
    """Return the larger one of two epsilons by accountant and split; a site's ledger only grows."""
    return {
        name: {s: largest([e, at_end.get(name, {}).get(s, 0.0)]) for s, e in of.items()}
        for name, of in promised.items()
        if of is not None
    }


def of_splits(client: Event, accountant: str) -> float | None:
    """Return a client's largest epsilon over its splits by an accountant; see :func:`largest`."""
    epsilons = client["epsilon"].get(accountant)
    return largest(None if epsilons is None else epsilons.values())


def overall(event: Event, accountant: str = names.PRV) -> tuple[float | None, float]:
    """Return an (epsilon, delta) that holds for every client: the maximum of each.

    Example:
        >>> client = {"epsilon": {"prv": {"train": 3.1}}, "budget": {"epsilon": 8, "delta": 1e-5}}
        >>> overall({"clients": [client]})
        (3.1, 1e-05)
    """
    clients = event["clients"]
    epsilons = [of_splits(client, accountant) for client in clients]
    delta = max((client["budget"]["delta"] for client in clients), default=0.0)
    return (largest(epsilons) if epsilons else None), delta

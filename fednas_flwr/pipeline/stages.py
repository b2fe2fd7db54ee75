"""The stages of a run, in order: search, derive, retrain, export, evaluate, report.

They run on the server, over any Grid. Each round leaves a checkpoint. A run that was killed goes
through the same stages again and skips the rounds that are done.
"""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import flwr
import torch
from flwr.serverapp import Grid
from torch import nn

import fednas_flwr
from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.fdnas import CFDNASSettings
from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.making import make_objective
from fednas_flwr.data.loaders import concat_splits, make_client_data, server_split
from fednas_flwr.data.prepared import make_data, sites_of
from fednas_flwr.models import metrics, networks
from fednas_flwr.models.explanation import importance, mistakes
from fednas_flwr.models.export import export_onnx, export_safetensors
from fednas_flwr.models.noised_scores import BINS, NoisedScores, scores_of_counts
from fednas_flwr.models.prediction import MODEL_FILE, Model
from fednas_flwr.pipeline import later_settings as later
from fednas_flwr.pipeline import personal_copies
from fednas_flwr.pipeline.beginning import OutOfTimeError, Run, begin
from fednas_flwr.pipeline.feasible import pools_records
from fednas_flwr.pipeline.groups import run_groups
from fednas_flwr.pipeline.pooled_statistics import noised_sum
from fednas_flwr.privacy.plan import metrics_release
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.keys import SIGNING_KEY, sign_model
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.states import Layout, Packed
from fednas_flwr.report.model_card import card_of
from fednas_flwr.runs.events import EventLog, read_events
from fednas_flwr.runs.leaderboard import chosen
from fednas_flwr.runs.numbers import EVENTS_FILE, is_beside
from fednas_flwr.runs.run_folder import GENOTYPE_FILE
from fednas_flwr.search.objective import Objective
from fednas_flwr.server.cohort import TOTAL, QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config, GivenNetwork
from fednas_flwr.settings.incompatible import has_real_sites
from fednas_flwr.settings.names import ACCURACY, AUROC, DECIDED, R2
from fednas_flwr.settings.optimizers import Configuration
from fednas_flwr.settings.registry import own_parts
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters, layers_of
from fednas_flwr.spaces.genotype import Genotype, save_genotype, to_json
from fednas_flwr.spaces.operations import SkipNetwork

RARE = 0.3  # below this share of records, accuracy says little about the rarer of two classes


class Trained(NamedTuple):
    """A retrained network.

    Attributes:
        description: Description from which it is built.
        network: Its module.
        states: Its packed states, in the form in which clients receive them.
    """

    description: dict[str, Any]
    network: nn.Module
    states: dict[str, Packed]


def run_stages(config: Config, grid: Grid, log: EventLog, *, resumed: bool) -> None:
    """Run all stages that ``config.stages`` names and write their results into the run folder.

    Args:
        config: Configuration with ``run_dir`` set to an existing folder.
        grid: Flower's connection to the clients.
        log: Receives every event.
        resumed: True if the folder holds a run that is to be continued.

    Raises:
        QuorumError: Too few clients answered.
        ConfigError: A setting does not fit the data.
    """
    torch.set_num_threads(config.runtime.threads)
    circumstances = _circumstances() | {"own": own_parts(config)}
    if config.runtime.name == "inline":  # elsewhere every client's process chooses its own device
        circumstances["device"] = str(networks.make_device(config.runtime.device))
    with log.attempt(resumed=resumed, circumstances=circumstances):
        # A resumed run books under another name, since what it repeats is released again. A run
        # that people have approved meanwhile keeps the name that they approved.
        earlier = read_events(config.folder / EVENTS_FILE) if resumed else []
        run = begin(config, grid, log, circumstances, earlier=earlier)
        with suppress(OutOfTimeError):
            _run_and_report_spending(run)


def _run_from_search(run: Run) -> None:
    """Search, retrain, export and evaluate, whichever of these the configuration names.

    A trained network is exported before its test, in which something may go wrong.
    """
    config = run.config
    if isinstance(config.algorithm, CFDNASSettings):
        run_groups(run, search=start_search, run_group=_run_and_report_spending)
        return
    genotype, configuration = _search(run)
    if genotype is None and not isinstance(config.algorithm, GivenNetwork):
        return
    description = describe(run, genotype, configuration)
    if not config.retrains:
        return
    trained = Trained(description, *retrain(run, description, configuration))
    if "export" in config.stages:
        with run.stage("export"):
            _export(run, trained)
    threshold = _evaluate(run, trained) if "evaluate" in config.stages else None
    if "export" in config.stages:
        if threshold is not None:
            _export(run, trained, threshold)
        _hand_over(run, _keep_copies(run, trained, threshold))


def _run_and_report_spending(run: Run) -> None:
    """Run all stages of a run, or of one of its groups, and report its spending."""
    try:
        _run_from_search(run)
    finally:
        if run.config.dp:
            _report_spending(run)


def _search(run: Run) -> tuple[Genotype | None, Configuration | None]:
    """Return the genotype and the hyper-parameters of retraining.

    The genotype is None for a network by name; the hyper-parameters are None if those of the
    settings apply.
    """
    config, configuration = run.config, None
    if config.searches:
        strategy = start_search(run)
        genotype, configuration = strategy.derive(), strategy.configuration()
    else:
        found = networks.given_genotype(config)
        if found is None:
            (run.folder / GENOTYPE_FILE).unlink(missing_ok=True)  # that of a network found before
            return None, None
        genotype = found
    save_genotype(run.folder / GENOTYPE_FILE, genotype)
    return genotype, configuration


def start_search(
    run: Run, *, prepare: Callable[[RoundStrategy[Any]], None] = lambda _: None
) -> RoundStrategy[Any]:
    """Return the strategy of the search stage after its last round.

    Args:
        run: The run.
        prepare: Called with the strategy before the first round.

    Raises:
        OutOfTimeError: The run's time has ended before that round.
    """
    run.config = config = later.with_latency(run)
    kept = {"checkpoints": run.checkpoints, "schedule": run.schedule}
    strategy = make_search(config, run.prepared, run.cohort, **kept)
    if run.inherited is not None:
        strategy.inherit(run.inherited)
    prepare(strategy)
    run.start(strategy, config.rounds)
    if strategy.rounds_done < config.rounds:
        raise OutOfTimeError
    return strategy


def describe(
    run: Run, genotype: Genotype | None, configuration: Configuration | None
) -> dict[str, Any]:
    """Describe the network to retrain, and report its cost."""
    with run.stage("derive"):
        description = networks.describe_network(run.config, run.prepared, genotype)
        network = networks.make_network(description | {"auxiliary": False})
        run.log.emit(
            "derived",
            network=description,
            genotype=json.loads(to_json(genotype)) if genotype else None,
            configuration=asdict(configuration) if configuration else None,
            num_parameters=count_parameters(network),
            multiply_adds=count_multiply_adds(network, run.prepared.input_shape),
            cost=later.cost_of(run.config, run.prepared, genotype),
            layers=layers_of(network, run.prepared.input_shape, genotype),
        )
    return description


def retrain(
    run: Run, description: dict[str, Any], configuration: Configuration | None
) -> tuple[nn.Module, dict[str, Packed]]:
    """Return the trained network and its packed states."""
    config = later.with_precision(run, later.with_learning_rate(run), description)
    kept = {"checkpoints": run.checkpoints, "schedule": run.schedule}
    kept["configuration"] = configuration
    strategy, network = make_retraining(config, description, run.cohort, **kept)
    run.start(strategy, run.config.retrain.planned)
    strategy.load_into(network)
    return network, strategy.model


def _export(run: Run, trained: Trained, threshold: float | None = None) -> None:
    """Write the model's files, including the threshold of its labels once it is known."""
    model = _model(run, trained, threshold)
    export_safetensors(model, run.folder)
    path, difference = export_onnx(model, run.folder)
    files, inputs = ["model.safetensors", path.name], asdict(model.inputs)
    run.log.emit("exported", files=files, onnx_max_difference=difference, inputs=inputs)


def _model(run: Run, trained: Trained, threshold: float | None) -> Model:
    """Return the network with all that is needed to apply it to raw records."""
    made = trained.description | ({"weights": None} if "weights" in trained.description else {})
    positive = make_objective(run.config, run.prepared, torch.device("cpu")).positive
    inputs = replace(run.prepared.inputs, positive=positive, threshold=threshold)
    return Model(trained.network, inputs, made, run.config.dataset.transform)


def _keep_copies(run: Run, trained: Trained, threshold: float | None) -> dict[int, Path]:
    """Write the models of the sites that keep their own copies; return their folders."""
    sites = personal_copies.keeping(run)
    if not sites or is_beside(run.folder):
        return {}

    def save(folder: Path) -> None:
        export_safetensors(_model(run, trained, threshold), folder)

    with run.stage("personalise"):
        local = _copys_training(run, trained.description)
        folders = personal_copies.keep(
            run, trained.network, trained.states, local, among=sites, save=save
        )
        if folders:
            run.log.emit("personalised", clients=[*folders])
    return folders


def _evaluate(run: Run, trained: Trained) -> float | None:
    """Measure the network on the server's test set and on every client's own test records.

    Returns the threshold that was used; None if the most probable class is predicted.
    """
    config, prepared, (description, network, states) = run.config, run.prepared, trained
    device = networks.make_device(config.runtime.device)
    with run.stage("evaluate"):
        shows_clients = not (config.secure_sum or config.dp)
        central, validation = None, None
        released = _released_scores(run, trained)
        objective = make_objective(config, prepared, torch.device("cpu"))
        metric = _metric(run, released)
        holds_out = config.retrain.evaluate_every > 0
        positive = objective.positive_class(prepared.num_classes)
        thresholded = metric not in DECIDED and positive is not None and not objective.multi_label
        threshold = released.threshold if released and thresholded else None
        choice = chosen(run.folder)
        if shows_clients and (thresholded or holds_out):
            replies = _validated(run, trained, summed=metric if holds_out else None)
            counted = [reply for reply in replies if "histogram" in reply.properties]
            if choice:  # chosen on records that were not trained on
                threshold = choice.run.last("evaluated").get("threshold")
            elif thresholded and counted:
                threshold = metrics.best_threshold(
                    [reply.properties["histogram"] for reply in counted],
                    [reply.num_examples for reply in counted],  # instead of the client's own count
                )
            if holds_out and replies:
                classes = len(objective.scored_classes(prepared.num_classes))
                totals = [
                    metrics.summed(r.properties.get("sums", ()), metric, classes, r.num_examples)
                    for r in replies
                ]
                fitting = [total for total in totals if total is not None]
                if missing := len(totals) - len(fitting):
                    message = f"malformed validation scores are left out (clients: {missing})"
                    run.log.emit("warning", message=message)
                if fitting:
                    total = torch.stack(fitting).sum(0)
                    validation = metrics.score_of_sums(total, metric).tolist()
        objective = replace(objective, threshold=threshold)
        if prepared.server_test is not None:
            test = server_split(prepared.server_test, prepared.mean, prepared.std)
            logits, labels = metrics.predicted(network.to(device), test, device)
            central = metrics.detailed(logits, labels, objective=objective, seed=config.seed)
            has_accuracy = not objective.predicts_numbers
            if isinstance(network, SkipNetwork) and has_accuracy and threshold is None:
                central |= metrics.accuracies_of_parts(network, test, device, objective=objective)
            network.cpu()
            if (schema := prepared.server_test.schema) and not is_beside(run.folder):
                central["importance"] = importance(
                    network.eval(),
                    test,
                    schema,
                    objective=objective,
                    metric=metric,
                    sites=sites_of(prepared.server_test, config.partition),
                    seed=config.seed,
                )
            elif test.features.dtype == torch.uint8 and has_accuracy and not objective.multi_label:
                central["mistakes"] = mistakes(prepared.server_test, logits, labels)
        plain = replace(objective, threshold=None)  # the threshold is the network's alone
        baselines = _baselines(run, plain) if pools_records(config) else {}
        data_set = config.private_data_set
        results: dict[str, Any] = {"clients": [], "personalised": []}
        if config.dataset.fractions["test"] > 0:
            tested = metrics_release("evaluate", "test").key
            noises = [p.noise_multiplier for p in run.schedule if p.key == tested]
            if data_set is None or noises not in ([], [None]):
                request = rq.Evaluate(
                    network=description,
                    split="test",
                    data_set=data_set,
                    with_scores=shows_clients,
                    threshold=threshold,
                )
                answers = _ask_tests(run, "evaluate.model", request, states)
                if config.secure_sum:
                    results["total"] = answers[0] if answers else None
                else:
                    results["clients"] = answers
            if config.evaluation.personalised:
                local = _last_round(later.with_precision(run, config, description), description)
                last = rq.Personalise(local=local, threshold=threshold)
                results["personalised"] = _ask_tests(run, "evaluate.personalised", last, states)
            if config.evaluation.personalised and (holds_out or choice):
                local = _copys_training(run, description)
                last = rq.Personalise(local=local, threshold=threshold, compares=holds_out)
                copies = _ask_tests(run, "evaluate.personalised", last, states)
                known = choice.run.last("evaluated").get("copies", ()) if choice else ()
                results["copies"] = personal_copies.compared(copies, known)
        simpler = {name: baselines.get(name) for name in ("linear", "trees")}
        scored: dict[str, Any] = {"metric": metric, "validation": validation}
        scored |= {"threshold": threshold, "positive": positive}
        if released:
            scored["released"] = asdict(released)
        run.log.emit("evaluated", central=central, **scored, **simpler, **results)
    return threshold


def _metric(run: Run, released: NoisedScores | None) -> str:
    """The score by which networks are compared: as set, or chosen by the clients' classes."""
    settings = run.config.evaluation
    if settings.metric is not None:
        return settings.metric
    if run.prepared.train.is_regression:
        return R2
    counts = [of.get("class_counts", []) for of in run.cohort.properties.values()]
    of_classes = [sum(column) for column in zip(*counts, strict=False)]
    if released:
        of_classes = [1 - released.prevalence, released.prevalence]
    two = len(of_classes) == 2 and not run.prepared.train.multi_label
    rare = two and min(of_classes) < RARE * sum(of_classes)
    return AUROC if settings.positive is not None or rare else ACCURACY


def _validated(run: Run, trained: Trained, *, summed: str | None) -> list[Reply]:
    """The replies of clients that measure the network on validation records; empty if too few."""
    cohort, (description, _, states) = run.cohort, trained
    having = [c for c in _testers(run) if cohort.properties[c]["splits"]["validation"]]
    request = rq.Evaluate(network=description, split="validation", with_scores=True, summed=summed)
    exchange = Exchange(
        "evaluate.model", stage="evaluate", settings=request, states=states, among=having
    )
    with suppress(QuorumError):
        return [reply for _, reply in cohort.ask(exchange)]
    return []


def _released_scores(run: Run, trained: Trained) -> NoisedScores | None:
    """Scores from private clients' noised counts; None if none are planned or too few answer.

    Counts are summed over the clients that answer.
    """
    planned = next((release for release in run.schedule if release.kind == "scores"), None)
    if planned is None:
        return None
    exchange = Exchange(
        planned.action,
        stage=planned.stage,
        settings=rq.CountScores(network=trained.description, data_set=run.config.private_data_set),
        states=trained.states,
        layouts={"scores": Layout.of({"scores": torch.zeros(2 * BINS)})},
        releases=run.schedule,
        among=_testers(run),
    )
    with suppress(QuorumError):
        counts, _, noise = noised_sum(run.cohort, exchange)
        return scores_of_counts(counts, noise=noise)
    return None


def _testers(run: Run) -> list[int]:
    """Return the clients that test the network: as many as a round asks."""
    clients, asked = run.cohort.clients, run.cohort.participants("evaluate", 1)
    return clients if asked is None else sorted(set(clients) & set(asked.clients))


def _ask_tests(
    run: Run, action: str, settings: rq.Settings, states: dict[str, Packed]
) -> list[dict[str, Any]]:
    """Collect the results of all clients that have test records; warn if they are few."""
    results: list[dict[str, Any]] = []
    cohort, objective = run.cohort, make_objective(run.config, run.prepared, torch.device("cpu"))
    having = [c for c in _testers(run) if cohort.properties[c]["splits"]["test"]]
    if not having:
        return results
    if len(having) < len(cohort.clients):
        cohort = cohort.part(having, run=cohort.run, emit=cohort.emit)
    exchange = Exchange(
        action, stage="evaluate", settings=settings, states=states, releases=run.schedule
    )
    try:
        for client, reply in cohort.ask(exchange):
            whose = {"sites": reply.sites} if client == TOTAL else {"client": client}
            fields: dict[str, Any] = {**whose, "num_examples": reply.num_examples}
            fields |= reply.properties.get("scores", {})
            if gain := reply.properties.get("gain"):
                most = cohort.properties[client]["splits"]["validation"]
                fields |= {"gain": gain} if gain[2] <= most else {}
            results.append(objective.reported(reply.metrics) | fields)
    except QuorumError as error:  # a failed test must not lose the trained network
        run.log.emit("warning", message=f"few clients could test the network: {error}")
    return results


def _last_round(config: Config, description: dict[str, Any]) -> rq.LocalTraining:
    """Return the local training of the last round of retraining."""
    retrain = config.retrain
    return rq.LocalTraining(
        description,
        "train+validation",
        rq.Amount(retrain.local_epochs, None, retrain.batch_size),
        retrain.weights.at_round(retrain.planned, retrain.planned),
        retrain.auxiliary_weight,
        retrain.drop_path_prob,
        augmented=retrain.unaugmented == 0,
        precision=config.training.precision,
    )


def _copys_training(run: Run, description: dict[str, Any]) -> rq.LocalTraining:
    """Return the fine-tuning of a site's copy, on the same records as retraining."""
    retrain = run.config.retrain
    split = "train" if retrain.evaluate_every else "train+validation"
    local = _last_round(later.with_precision(run, run.config, description), description)
    return personal_copies.fine_tuning(local, retrain.weights.lr, split=split)


def _hand_over(run: Run, copies: Mapping[int, Path]) -> None:
    """Send the exported model, or a site's copy, to real sites that keep models; emit who has it.

    File, card and signature go in one message to each site. Simulated clients are not asked: their
    model is in the run folder. Any failure is only a warning, as the run already has its model.
    """
    keeping = [c for c in run.cohort.clients if run.cohort.properties[c].get("keeps_model")]
    if not has_real_sites(run.config) or not keeping or is_beside(run.folder):
        return
    shared = [client for client in keeping if client not in copies]
    sent = [(run.folder, shared)] if shared else []
    sent += [(folder, [client]) for client, folder in copies.items() if client in keeping]
    with run.stage("hand over"):
        receivers = []
        for folder, clients in sent:
            model = (folder / MODEL_FILE).read_bytes()
            try:
                request = _keep_request(run, model)
            except ConfigError as error:
                run.log.emit("warning", message=f"the model does not return to the sites: {error}")
                return
            exchange = Exchange(
                "query.keep_model",
                stage="hand over",
                settings=request,
                states={"model": {"uint8": torch.frombuffer(bytearray(model), dtype=torch.uint8)}},
                among=clients,
            )
            try:
                receivers += [client for client, _ in run.cohort.ask(exchange)]
            except QuorumError as error:
                run.log.emit("warning", message=f"few sites have the model: {error}")
        run.log.emit("handed_over", clients=sorted(receivers), asked=keeping)


def _keep_request(run: Run, model: bytes) -> rq.KeepModel:
    """Build the request that goes to every site along with the file's bytes.

    Raises:
        ConfigError: There is no key to sign with, or the model or its card is too large.
    """
    key = os.environ.get(SIGNING_KEY)
    if not key:
        raise ConfigError(
            f"{SIGNING_KEY} is not set where the server's app runs: start it by start.sh of "
            "`fednas provision`, or name a key that sites know."
        )
    card = card_of(run.folder)
    if len(model) > rq.LARGEST_MODEL or len(card.encode()) > rq.LONGEST_CARD:
        raise ConfigError(
            f"its file has {len(model):,} bytes and its card {len(card.encode()):,}, where sites "
            f"take {rq.LARGEST_MODEL:,} and {rq.LONGEST_CARD:,}."
        )
    signature = sign_model(Path(key), run=run.cohort.run, model=model, card=card)
    return rq.KeepModel(card=card, signature=signature, data_set=run.config.private_data_set)


def _report_spending(run: Run) -> None:
    """Ask clients what the run has cost by now; after a failure they may not answer."""
    spent, request = [], rq.Describe(with_epsilon=True)
    with suppress(QuorumError):
        for client, reply in run.cohort.ask(
            Exchange("query.describe", stage="evaluate", settings=request, also_left=True)
        ):
            if "spent" in reply.properties:
                known = {"spent", "epsilon"} & set(reply.properties)
                spent.append({"client": client, **{n: reply.properties[n] for n in sorted(known)}})
    run.log.emit("privacy_spent", clients=spent)


def _baselines(run: Run, objective: Objective) -> dict[str, dict[str, Any]]:
    """Return the test scores of models fitted to the pooled records that the network trains on."""
    prepared = run.prepared
    if prepared.server_test is None:
        return {}
    division, held_out = run.config.dataset.division, run.config.retrain.evaluate_every > 0
    clients = (make_client_data(prepared, part, **division) for part in make_data(run.config)[1])
    train = [
        client.train if held_out else concat_splits(client.train, client.validation)
        for client in clients
    ]
    test = server_split(prepared.server_test, prepared.mean, prepared.std)
    return metrics.pooled_baselines(train, test, prepared.num_classes, objective, run.config.seed)


def _circumstances() -> dict[str, Any]:
    """Describe the machine and the software of a run, for those who read its results."""
    return {
        "versions": {
            "fednas_flwr": fednas_flwr.__version__,
            "flwr": flwr.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
    }


def _commit() -> str | None:
    """Return the git commit of the package's folder; None if it is not a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    command += ["--abbrev=12"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    return None

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
from tempfile import TemporaryDirectory
from typing import Any

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
from fednas_flwr.models import networks
from fednas_flwr.models.export import export_onnx, export_safetensors
from fednas_flwr.models.prediction import MODEL_FILE, Model
from fednas_flwr.pipeline import evaluation
from fednas_flwr.pipeline import later_settings as later
from fednas_flwr.pipeline.beginning import OutOfTimeError, Run, begin
from fednas_flwr.pipeline.evaluation import Trained
from fednas_flwr.pipeline.groups import run_groups
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.keys import SIGNING_KEY, sign_model
from fednas_flwr.protocol.states import Packed
from fednas_flwr.report.model_card import card_of
from fednas_flwr.runs.events import EventLog, read_events
from fednas_flwr.runs.numbers import EVENTS_FILE, is_beside
from fednas_flwr.runs.run_folder import GENOTYPE_FILE
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config, GivenNetwork
from fednas_flwr.settings.incompatible import has_real_sites
from fednas_flwr.settings.optimizers import Configuration
from fednas_flwr.settings.registry import TABLES, own_parts
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters, layers_of
from fednas_flwr.spaces.genotype import Genotype, save_genotype, to_json


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
    exported, threshold = trained, None
    if "evaluate" in config.stages:
        trained, threshold = evaluation.evaluate(run, trained)
    if "export" in config.stages:
        if threshold is not None or trained is not exported:
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
    if description["name"] in TABLES["network"]:  # a layer of one's own may have no form in ONNX
        with TemporaryDirectory() as folder:
            export_onnx(_model(run, Trained(description, network, {}), None), Path(folder))
    run.start(strategy, run.config.retrain.planned)
    strategy.load_into(network)
    return network, strategy.model


def _export(run: Run, trained: Trained, threshold: float | None = None) -> None:
    """Write the model's files, with threshold and corrected probabilities once they are known."""
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
    sites = evaluation.keeping(run)
    if not sites or is_beside(run.folder):
        return {}

    def save(folder: Path) -> None:
        export_safetensors(_model(run, trained, threshold), folder)

    with run.stage("personalise"):
        folders = evaluation.keep(run, trained, among=sites, save=save)
        if folders:
            run.log.emit("personalised", clients=[*folders])
    return folders


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
                "hand over",
                request,
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
    exchange = Exchange("query.describe", "evaluate", request, also_left=True)
    with suppress(QuorumError):
        for client, reply in run.cohort.ask(exchange):
            if "spent" in reply.properties:
                known = {"spent", "epsilon"} & set(reply.properties)
                spent.append({"client": client, **{n: reply.properties[n] for n in sorted(known)}})
    run.log.emit("privacy_spent", clients=spent)


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

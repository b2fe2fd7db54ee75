"""``fednas analyse``: what a finished run's search prefers, and what its cell owes to its ops.

:func:`prepare_variants` makes a run folder for every changed cell, :func:`analyse` reads all there
is and writes ``analysis.json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fednas_flwr.builders.algorithms import make_sampler
from fednas_flwr.builders.networks import load, make_device
from fednas_flwr.config import Config, DPNASSettings
from fednas_flwr.errors import ConfigError
from fednas_flwr.evaluation.cell_analysis import op_shares, variants
from fednas_flwr.evaluation.model import MODEL_FILE
from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.files import write_atomically
from fednas_flwr.hardware.latency import machine_name, time_modules
from fednas_flwr.randomness import make_generator
from fednas_flwr.reporting.runs import CONFIG_FILE, VARIANTS_FOLDER, Run, is_complete, read_run
from fednas_flwr.search_spaces.dp_cells import DP_CELL_SPACES
from fednas_flwr.search_spaces.dp_cells_network import EDGES
from fednas_flwr.search_spaces.genotype import load_genotype, save_genotype
from fednas_flwr.stages.run_folder import GENOTYPE_FILE, create_run_folder
from fednas_flwr.strategies.base import server_state

ANALYSIS_FILE = "analysis.json"
SAMPLES = 1000
PASSES = 51  # of a network's inference
STAGES = ["retrain", "evaluate", "export"]  # of a variant


def finished_run(folder: Path) -> Run:
    """Return the run that a folder holds.

    Raises:
        ConfigError: There is none, or it has not come to its end.
    """
    try:
        run = read_run(folder)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if run.status != "completed":
        raise ConfigError(
            f"{folder} holds a run that is {run.status}: finish it by `fednas run resume={folder}`."
        )
    return run


def prepare_variants(config: Config) -> list[Path]:
    """Return a run folder for every variant of a run's cell, made where it is missing.

    Each has its genotype.json and the run's settings, so that ``fednas run resume=<folder>`` trains
    it. The found cell is among them: with privacy a run's search has taken a part of its epsilon,
    which here all goes into training. Simulated sites have new budgets in every folder; real ones
    pay each training from the same.

    Args:
        config: Of a finished run.
    """
    folder = Path(str(config.run_dir))
    if not (folder / GENOTYPE_FILE).is_file():
        return []
    folders = []
    for name, genotype in variants(load_genotype(folder / GENOTYPE_FILE)).items():
        own = folder / VARIANTS_FOLDER / name
        if not (own / CONFIG_FILE).is_file():
            own.mkdir(parents=True, exist_ok=True)
            save_genotype(own / GENOTYPE_FILE, genotype)
            genotype_file = str((own / GENOTYPE_FILE).resolve())
            create_run_folder(
                replace(config, stages=STAGES, genotype=genotype_file, run_dir=str(own))
            )
        folders.append(own)
    return folders


def analyse(
    config: Config, *, runs: Sequence[Run], variant_folders: Sequence[Path], batch_size: int
) -> dict[str, Any]:
    """Return all that can be told of a run, and write it to its ``analysis.json``.

    Args:
        config: Of the run.
        runs: The run, then those to compare its search with.
        variant_folders: From :func:`prepare_variants`.
        batch_size: Images of one inference.
    """
    analysis = {
        "samples": _samples(config),
        "rewards": [_rewards(run) for run in runs],
        "variants": [_variant(folder) for folder in variant_folders],
        "inference": _inference(config, batch_size),
    }
    folder = Path(str(config.run_dir))
    write_atomically(
        folder / ANALYSIS_FILE, json.dumps(analysis, indent=1, ensure_ascii=False) + "\n"
    )
    return analysis


def _samples(config: Config) -> dict[str, Any] | None:
    """Return how often each op is on each edge of paths drawn as the search would draw next."""
    if not isinstance(config.algorithm, DPNASSettings):
        return None
    checkpoints = CheckpointFolder(Path(str(config.run_dir)) / "checkpoints", warn=print)
    checkpoint = checkpoints.latest("search")
    if checkpoint is None:
        return None
    space = DP_CELL_SPACES[config.search_space.name]
    sampler = make_sampler(config.seed, config.algorithm, space)
    sampler.load(server_state(checkpoint))
    paths = sampler.sample(SAMPLES, make_generator(config.seed, "analysis"))
    shares_EO = op_shares(torch.tensor(paths), len(space.ops))
    return {
        "sampler": config.algorithm.sampler,
        "round": checkpoint.round,
        "count": SAMPLES,
        "ops": list(space.ops),
        "edges": [f"{source} → {target}" for source, target in EDGES],
        "shares": shares_EO.tolist(),
        "mean_shares": shares_EO.mean(0).tolist(),
    }


def _rewards(run: Run) -> dict[str, Any]:
    """Return the mean validation accuracy of each round's candidates; none in warm-up rounds."""
    rounds = [e for e in run.rounds("search") if "validation_accuracy" in e["metrics"]]
    return {
        "run": run.folder.name,
        "sampler": run.config.get("algorithm", {}).get("sampler"),
        "rounds": [event["round"] for event in rounds],
        "accuracies": [event["metrics"]["validation_accuracy"] for event in rounds],
    }


def _variant(folder: Path) -> dict[str, Any]:
    """Return a variant's command, and its results if it has been trained."""
    numbers = read_run(folder).numbers() if is_complete(folder) else {}
    return {
        "name": folder.name,
        "command": f"fednas run resume={folder}",
        "accuracy": numbers.get("central_accuracy"),
        "epsilon": numbers.get("epsilon"),
    }


def _inference(config: Config, batch_size: int) -> dict[str, Any] | None:
    """Return the time of the exported network on this machine, None where there is none."""
    folder = Path(str(config.run_dir))
    if not (folder / MODEL_FILE).is_file():
        return None
    model = load(folder)
    device = make_device(config.device)
    (timing,) = time_modules(
        [(model.network, model.input_shape)],
        batch_size=batch_size,
        device=device,
        threads=config.threads,
        passes=PASSES,
    )
    machine = {"machine": machine_name(device), "device": device.type, "threads": config.threads}
    return {**timing._asdict(), "batch_size": batch_size, **machine}

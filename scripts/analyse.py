"""Analyse the ops that DPNAS' search prefers, and the effect of activations and pools in its cell.

    python scripts/analyse.py <run folder> [--against <run folder> ...] [--retrain]

For a finished run the script reports how often each op is on each edge of 1,000 cells, drawn as the
search would draw next; the mean validation accuracy of each round's cells, beside those of other
runs; and variants of the cell with all activations or all pools of one kind (Cheng et al. 2022,
arXiv 2110.08557, Tables 6 and 7). Each variant is a run folder in ``variants/`` that ``--retrain``
trains with the run's own settings. The found cell is one of them: with privacy, the run's search
has taken a part of its epsilon, while here all of it goes into training. All numbers are also
written to the run's ``analysis.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fednas_flwr
from fednas_flwr.algorithms.base import server_state
from fednas_flwr.algorithms.dpnas import DPNASSettings
from fednas_flwr.algorithms.dpnas.strategy import make_sampler
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.models.networks import make_space
from fednas_flwr.report.comparison import markdown_table
from fednas_flwr.report.templates import percent
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.numbers import CONFIG_FILE, VARIANTS_FOLDER, Run, is_complete, read_run
from fednas_flwr.runs.run_folder import GENOTYPE_FILE, create_run_folder, open_run_folder
from fednas_flwr.settings import Config
from fednas_flwr.spaces.dp_cells import ACTIVATIONS, EDGES, POOLS, DPCellSpace
from fednas_flwr.spaces.genotype import Genotype, load_genotype, save_genotype

SAMPLES = 1000
FAMILIES = {  # ops that can replace one another, by their short names
    "activations": {f"conv_3x3_{name}": name for name in ACTIVATIONS},
    "pools": {op: op.removesuffix("_pool_3x3") for op in POOLS},
}


def main(arguments: list[str]) -> int:
    """Analyse a finished run; with ``--retrain``, first train each variant of its cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--against", type=Path, nargs="+", default=[])
    parser.add_argument("--retrain", action="store_true")
    options = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in (options.run_folder, *options.against)]
    for run in runs:
        if run.status != "completed":
            sys.exit(f"{run.folder} holds a run that is {run.status}: resume={run.folder} ends it.")
    config = open_run_folder(str(options.run_folder))
    folders = prepare_variants(config)
    for folder in folders if options.retrain else ():
        if not is_complete(folder):
            fednas_flwr.run(folder, quiet=False)
    analysis = {
        "samples": samples(config),
        "rewards": [rewards(run) for run in runs],
        "variants": [variant(folder) for folder in folders],
    }
    show(analysis)
    text = json.dumps(analysis, indent=1, ensure_ascii=False)
    write_atomically(options.run_folder / "analysis.json", text + "\n")
    return 0


def variants(genotype: Genotype) -> dict[str, Genotype]:
    """Return the genotype and, by name, its variants with all activations or pools of one kind.

    A variant that changes nothing is omitted, and so are all variants of a genotype of another
    space.
    """
    made = {"found": genotype}
    for family, ops in FAMILIES.items() if genotype.space == DPCellSpace.name else ():
        for op, short in ops.items():
            cells = {
                kind: tuple(replace(edge, op=op) if edge.op in ops else edge for edge in edges)
                for kind, edges in genotype.cells.items()
            }
            if cells != genotype.cells:
                made[f"{family}-{short}"] = replace(genotype, cells=cells)
    return made


def prepare_variants(config: Config) -> list[Path]:
    """Return a run folder for every variant of a run's cell; missing ones are created."""
    folder = Path(str(config.run_dir))
    if not (folder / GENOTYPE_FILE).is_file():
        return []
    folders = []
    for name, genotype in variants(load_genotype(folder / GENOTYPE_FILE)).items():
        own = folder / VARIANTS_FOLDER / name
        if not (own / CONFIG_FILE).is_file():
            own.mkdir(parents=True, exist_ok=True)
            save_genotype(own / GENOTYPE_FILE, genotype)
            given = {"genotype": str((own / GENOTYPE_FILE).resolve()), "run_dir": str(own)}
            create_run_folder(replace(config, stages=["retrain", "evaluate", "export"], **given))
        folders.append(own)
    return folders


def samples(config: Config) -> dict[str, Any] | None:
    """Return the frequency of each op on each edge of paths drawn as the search would draw next."""
    checkpoint = CheckpointFolder(Path(str(config.run_dir)) / "checkpoints", print).latest("search")
    if not isinstance(config.algorithm, DPNASSettings) or checkpoint is None:
        return None
    space = make_space(config.search_space.name, input_shape=(1, 1, 1), num_classes=1)
    assert isinstance(space, DPCellSpace)
    sampler = make_sampler(config.seed, config.algorithm, space)
    sampler.load(server_state(checkpoint))
    paths_NE = torch.tensor(sampler.sample(SAMPLES, make_generator(config.seed, "analysis")))
    shares_EO = torch.nn.functional.one_hot(paths_NE, len(space.ops)).double().mean(0)
    return {
        "sampler": config.algorithm.sampler,
        "round": checkpoint.round,
        "count": SAMPLES,
        "ops": list(space.ops),
        "edges": [f"{source} → {target}" for source, target in EDGES],
        "shares": shares_EO.tolist(),
        "mean_shares": shares_EO.mean(0).tolist(),
    }


def rewards(run: Run) -> dict[str, Any]:
    """Return the mean validation accuracy of each round's candidates; warm-up rounds have none."""
    rounds = [e for e in run.rounds("search") if "validation_accuracy" in e["metrics"]]
    return {
        "run": run.folder.name,
        "sampler": run.config.get("algorithm", {}).get("sampler"),
        "rounds": [event["round"] for event in rounds],
        "accuracies": [event["metrics"]["validation_accuracy"] for event in rounds],
    }


def variant(folder: Path) -> dict[str, Any]:
    """Return a variant's command, and its results if it has been trained."""
    found = read_run(folder).numbers() if is_complete(folder) else {}
    own = {"name": folder.name, "command": f"fednas run resume={folder}"}
    return own | {"accuracy": found.get("central_accuracy"), "epsilon": found.get("epsilon")}


def show(analysis: dict[str, Any]) -> None:
    """Print a table of every part that the run has."""
    drawn = analysis["samples"]
    if drawn is not None:
        shares = dict(zip(drawn["edges"], drawn["shares"], strict=True))
        shares["all"] = drawn["mean_shares"]
        rows = [[edge, *(f"{100 * share:.1f}" for share in own)] for edge, own in shares.items()]
        print(
            f"ops of {SAMPLES} cells drawn by {drawn['sampler']} after round {drawn['round']} (%)"
        )
        print(*markdown_table(["edge", *drawn["ops"]], rows), sep="\n")
    print("mean validation accuracy of sampled cells")
    for search in analysis["rewards"]:
        pairs = zip(search["rounds"], search["accuracies"], strict=True)
        print(search["run"], *(f"{number}: {percent(value)}" for number, value in pairs), sep="  ")
    for own in analysis["variants"]:
        epsilon = "" if own["epsilon"] is None else f"  epsilon {own['epsilon']:.3g}"
        untrained = own["accuracy"] is None
        print(own["name"], own["command"] if untrained else percent(own["accuracy"]) + epsilon)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

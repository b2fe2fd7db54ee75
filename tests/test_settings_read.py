"""Every setting of a run is read by it, or is refused when it is given.

A recorder notes which settings the configuration is asked for, in the server and its clients. What
was not asked for must have a row in :data:`fednas_flwr.settings.unused.RULES`.
"""

import sys
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from fednas_flwr.pipeline.feasible import check_buildable
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.settings import NoPrivacy, dump_config
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.parser import Checked
from fednas_flwr.settings.registry import algorithms
from fednas_flwr.settings.unused import without_effect

from .finished_runs import whole_run
from .rows import rows, seldom

GROUPS = {  # the groups of a configuration, by what their classes derive from
    "AlgorithmSettings": "algorithm",
    "SearchSpaceSettings": "search_space",
    "Dataset": "dataset",
    "Partition": "partition",
    "Runtime": "runtime",
    "Retrain": "retrain",
    "NoPrivacy": "privacy",
    "ServerOptimizer": "server_optimizer",
    "DifferentialPrivacy": "privacy",
    "AggregateSettings": "aggregate",
    "SamplingSettings": "sampling",
    "SecureSumSettings": "secure_sum",
    "TrainingSettings": "training",
    "EvaluationSettings": "evaluation",
    "Config": "",
}
QUICK = ("dp_fnas", "feathers", "cfdnas", "dpnas", "successive_halving", "fedavg")
# Who reads a setting to copy, check, compare or print all of them does not use it.
COPIES = ("dataclasses.py", "parser.py", "copy.py")
COPIES += ("configuration.py", "incompatible.py", "unused.py")
DECISIONS = ("retrains_by_gradients",)  # beside the checks: what it decides, rounds follow


@contextmanager
def recorded():
    """Yield the dotted names of the settings that are read meanwhile."""
    read = set()

    def noting(instance, name):
        value = object.__getattribute__(instance, name)
        if not name.startswith("_"):
            code = sys._getframe(1).f_code
            copies = code.co_filename.endswith(COPIES) and code.co_name not in DECISIONS
            for kind in type(instance).__mro__:
                group = GROUPS.get(kind.__name__)
                own = group is not None and name in type(instance).__dataclass_fields__
                if own and not copies:
                    read.add(f"{group}.{name}".lstrip("."))
        return value

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Checked, NoPrivacy):
            patch.setattr(kind, "__getattribute__", noting, raising=False)
        yield read


def settings_of(config):
    """Return the dotted names of all settings, those of a nested group by the group's."""
    names = set()
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            names |= {f"{field.name}.{own.name}" for own in fields(value)}
        else:
            names.add(field.name)
    return names


SHORT = ["rounds=1", "retrain.rounds=1", "clients=2", "runtime.device=cpu", "trackers=[]"]
CHOSEN = ("algorithm", "search_space", "privacy", "server_optimizer", "partition", "runtime")
SIZES = {
    "IMAGES": "search_space=nasbench201_small search_space.channels=2 retrain.channels=2",
    "MBCONV": "search_space=mbconv_small search_space.width=0.1 retrain=mbconv",
    "CELLS": "search_space=dp_cells_small search_space.widths=[2] retrain=dp_cells",
    "TABLE": "search_space=mlp_small search_space.channels=8 retrain.channels=8",
    "DP": "privacy=dp privacy.epsilon=30 search_space.norm=group retrain.norm=group",
    "GIVEN": "algorithm.network=linear",
}
OWN = """
fed_darts of a table | $TABLE dataset=csv
fed_darts, sampled | $IMAGES clients=3 sampling.per_round=2 sampling.by=round_robin
fed_darts, searched only | $IMAGES stages=[search]
fed_darts with privacy | $IMAGES $DP
fed_darts with privacy of clients
    | $IMAGES $DP privacy.unit=client secure_sum=true secure_sum.colluding=0
fednas | $IMAGES aggregate=mean
fednas by secure sums | $IMAGES secure_sum=true secure_sum.colluding=0
fedprox_darts | $IMAGES partition=dirichlet
fnas | $IMAGES partition=quantity
vanilla_nas | $IMAGES clients=1
dp_fnas | $IMAGES $DP
feathers | $IMAGES algorithm.num_configurations=3
feathers, its retraining only | $IMAGES stages=[retrain] genotype
successive_halving | $IMAGES algorithm.pool={draws:2,keep:2}
successive_halving with privacy | $IMAGES $DP algorithm.pool={draws:2,keep:2}
random_search untried | $IMAGES algorithm.trial_rounds=0
zero_cost | $IMAGES algorithm.draws=2
zero_cost, searched only | $IMAGES algorithm.draws=2 stages=[search]
fdnas | $MBCONV partition=label_groups partition.groups=[[0,1],[2]]
cfdnas | $MBCONV algorithm.group_by=tag algorithm.num_groups=null algorithm.client_tags=[a,b]
    algorithm.group_rounds=1
dpnas | $CELLS algorithm.trained_candidates=2 algorithm.rewarded_candidates=2
    algorithm.final_candidates=3
fedavg | $GIVEN
fedprox | $GIVEN server_optimizer=adam
fedavg of a genotype | $IMAGES stages=[retrain,evaluate,export] genotype
fedavg with privacy | $GIVEN privacy=dp privacy.epsilon=30
fedex | $GIVEN algorithm.num_configurations=3
"""
RUNS = {name: SIZES["IMAGES"] for name in algorithms()} | dict(rows(OWN, **SIZES))


def data_of(overrides, made_data, folder):
    """Return overrides that give the made images, or a made table."""
    if "dataset=csv" not in overrides:
        return ["dataset=npz", f"dataset.root={made_data}"]
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in rng.normal(size=(80, 2))]
    (folder / "table.csv").write_text("\n".join(["a,b,label", *rows]))
    return [f"dataset.root={folder / 'table.csv'}"]


@pytest.fixture(scope="module")
def genotype(made_data, tmp_path_factory):
    """A file that holds a cell of NAS-Bench-201."""
    import torch

    from fednas_flwr.spaces.genotype import save_genotype
    from fednas_flwr.spaces.nasbench201 import NASBench201Space

    space = NASBench201Space(input_shape=(3, 8, 8), num_classes=3, channels=2, num_cells=1)
    path = tmp_path_factory.mktemp("genotype") / "cell.json"
    save_genotype(path, space.random_genotype(torch.Generator().manual_seed(1)))
    return f"genotype={path}"


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("run", [run if run in QUICK else seldom(run) for run in RUNS])
def test_a_setting_is_read_or_refused(run, made_data, genotype, tmp_path):
    overrides = [genotype if text == "genotype" else text for text in RUNS[run].split()]
    overrides += data_of(overrides, made_data, tmp_path)
    overrides += [f"dataset.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    algorithm = f"algorithm={run.split()[0].rstrip(',')}"
    given = {text.partition("=")[0] for text in overrides}
    searching = algorithms()[algorithm.partition("=")[2]].search is not None
    stages = "stages=[search,retrain,evaluate]" if searching else "stages=[retrain,evaluate]"
    short = [text for text in [*SHORT, stages] if text.partition("=")[0] not in given]
    config = parse_config(compose_tree([algorithm, *overrides, *short]))
    with recorded() as read:
        check_buildable(config)
        config = create_run_folder(config)
        done = whole_run(config)
    assert done.error is None
    assert done.events[-1]["status"] == "completed"
    idle = without_effect(config)
    unread = settings_of(config) - read - {f"{group}.name" for group in CHOSEN}
    # by the rules a setting is idle, or the group that holds it
    assert [name for name in unread if not {name, name.partition(".")[0]} & {*idle}] == []


def test_the_recorder_sees_what_is_read(compose_config):
    config = compose_config()
    with recorded() as read:
        assert config.retrain.rounds == 2
        dump_config(config)
    assert read == {"retrain", "retrain.rounds"}

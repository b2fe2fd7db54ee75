"""The same configuration gives bit-equal results in every runtime.

The deployment on real SuperNodes compares itself with inline in ``scripts/deploy_local.sh``.
"""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from fednas_flwr.cli import main
from fednas_flwr.runs.numbers import read_run

from ..finished_runs import assert_same_files

pytestmark = pytest.mark.ray
TIMEOUT_S = 600  # Ray starts slowly on a busy machine
NOBODY = "127.0.0.1:9"  # where no Ray is: a run that is to start its own must not look there


# Two machines as Ray sees them, until standard input is closed.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def two_raylets():
    """The address of a cluster of two nodes, with one CPU each."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    env = os.environ | {"RAY_worker_niceness": "0"}  # 15 gets no time beside other programs
    with subprocess.Popen([sys.executable, "-c", CLUSTER], env=env, text=True, **pipes) as own:
        yield own.stdout.readline().strip()
        own.communicate()


def test_ray_on_two_machines_equals_inline(tiny_overrides, two_raylets, tmp_path):
    overrides = [
        *(*tiny_overrides, "clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]"),
        "training.momentum=averaged",  # the moments travel as the weights do
        # randomness on the client
        *("retrain.drop_path_prob=0.2", "dataset.crop_padding=1", "dataset.flip=true"),
    ]
    folders = run_both(overrides, tmp_path, f"runtime.ray_address='{two_raylets}'")
    assert_equal_results(*folders)
    for name in ("search-000002", "retrain-000002"):
        left, right = (load_file(f / "checkpoints" / f"{name}.safetensors") for f in folders)
        assert set(left) == set(right)
        assert ("alphas.float32" in left) == name.startswith("search")
        assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())


@pytest.mark.slow
def test_groups_side_by_side_on_ray_equal_those_in_turn_inline(tmp_path):
    overrides = ["experiment=cfdnas/digits", "search_space.candidates=fdnas"]
    overrides += ["search_space.width=0.25", "rounds=1", "algorithm.group_rounds=1"]
    overrides += ["retrain.rounds=1", "retrain.local_epochs=1", "algorithm.search.warm_up_rounds=0"]
    overrides += ["retrain.exchange=gradients", "dataset.limit_train=300"]
    folders = run_both(overrides, tmp_path)
    for name in ("phone", "server"):
        assert_equal_results(*(folder / "groups" / name for folder in folders))


def run_both(overrides, tmp_path, *on_ray):
    """Run inline and on Ray at the same time; return the run folders."""
    command = [sys.executable, "-m", "fednas_flwr", "run", *overrides, "runtime=ray", *on_ray]
    command.append(f"run_dir={tmp_path / 'ray'}")
    own = {"env": os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": NOBODY}, "text": True}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **own, **output) as ray:
        try:
            inline = ["run", *overrides, "runtime=inline", f"run_dir={tmp_path / 'inline'}"]
            assert main(inline) == 0
            output, _ = ray.communicate(timeout=TIMEOUT_S)
            assert ray.returncode == 0, output
        finally:
            ray.kill()
    return tmp_path / "inline", tmp_path / "ray"


def assert_equal_results(inline, ray):
    """Genotypes, models, rounds and accuracies of the runs are the same, and no client failed."""
    assert_same_files(inline, ray)
    runs = read_run(inline), read_run(ray)
    for stage in ("search", "retrain"):
        rounds = (run.rounds(stage) for run in runs)
        one, other = ([(e["round"], e["metrics"], e["clients"]) for e in of] for of in rounds)
        assert one == other
    one, other = ([(e["central"], e["clients"]) for e in run.of_kind("evaluated")] for run in runs)
    assert one == other
    assert not runs[1].of_kind("client_failed")

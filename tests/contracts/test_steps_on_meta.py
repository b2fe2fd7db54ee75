"""No step waits for a GPU or has a tensor on another device: each runs on the ``meta`` device.

There ``.item()`` and the like fail, as does an operation of two devices. Left out are steps of
paths that are drawn from the alphas: what is to be computed must be known before."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fednas_flwr.cli import main
from fednas_flwr.models.networks import FIXED_NETWORKS
from fednas_flwr.privacy.mechanism.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.exact_gradients import BatchGradients
from fednas_flwr.search.objective import CLASSIFICATION
from fednas_flwr.search.optimizer_step import Optimizer, make_adam, make_sgd
from fednas_flwr.settings.optimizers import NORMED_NETWORKS, SGD, Adam

from ..finished_runs import assert_same_files
from ..rows import seldom
from ..small_spaces import SPACES

WEIGHTS = SGD(lr=0.1, min_lr=0.1, momentum=0.9, weight_decay=1e-4, clip_norm=5.0)
ALPHAS = Adam(lr=0.1, weight_decay=1e-3)


def records(space):
    with torch.device("meta"):
        return torch.empty(4, *space.input_shape), torch.empty(4, dtype=torch.long)


def take(parameters, given, optimizer):
    """Take a step, and see that it leaves nothing elsewhere."""
    assert any(gradient is not None for gradient in given.values())
    Optimizer(parameters, optimizer, WEIGHTS.clip_norm).step(given)
    assert {parameter.device.type for parameter in parameters.values()} == {"meta"}


def step_weights(parameters, given):
    take(parameters, given, make_sgd(parameters.values(), WEIGHTS))


def step_alphas(supernet, given):
    alphas = {f"alphas.{kind}": alpha for kind, alpha in supernet.alphas().items()}
    named = {f"alphas.{kind}": gradient for kind, gradient in given.items()}
    take(alphas, named, make_adam(alphas.values(), ALPHAS))


@pytest.fixture(params=SPACES)
def space(request, one_cell):
    sizes = {"widths": (8,)} if request.param.startswith("dp_cells") else {}
    return replace(SPACES[request.param], norm="group", skip="linear", **sizes)


def on_meta(make):
    with torch.device("meta"):
        return make().train()


@pytest.mark.run
def test_plain_steps_of_a_supernet(space):
    supernet = on_meta(replace(space, norm="batch").supernet)
    batch, gradients = records(space), BatchGradients()
    step_weights(supernet.weights(), gradients.weight_gradient(supernet, batch))
    step_alphas(supernet, gradients.alpha_gradient_sum(supernet, batch)[0])
    assert gradients.train_tally.num_examples == 4


SUPERNETS = [
    seldom(name) if name in ("darts", "dp_cells_darts", "mbconv") else name for name in SPACES
]


@pytest.mark.parametrize("space", SUPERNETS, indirect=True)
def test_private_steps_of_a_supernet(space):
    supernet = on_meta(space.supernet)
    x, y = records(space)
    check_private(supernet, x, y, supernet.weights())
    alphas, terms = supernet.alphas(), {"loss": CLASSIFICATION.plain_losses, "max_norm": 1.0}
    step_alphas(supernet, clipped_alpha_gradient_sum(supernet, x, y, alphas=alphas, **terms))


def test_plain_and_private_steps_of_a_derived_network(space):
    genotype = space.random_genotype(torch.Generator())
    check_network(on_meta(lambda: space.network(genotype)), *records(space))


GIVEN_NETWORKS = [seldom("mobilenet_v2"), "resnet8_4", "plain_cnn", "linear", "mlp_64", "cnn_tanh"]


@pytest.mark.parametrize("name", GIVEN_NETWORKS)
def test_plain_and_private_steps_of_a_given_network(name):
    norm = {"norm": "group"} if name in NORMED_NETWORKS else {}
    x = torch.empty(4, 3, 16, 16, device="meta")
    network = on_meta(lambda: FIXED_NETWORKS[name]((3, 16, 16), 5, **norm))
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    check_network(network, x, torch.empty(4, dtype=torch.long, device="meta"))


def check_private(network, x, y, weights):
    terms = {"loss": CLASSIFICATION.plain_losses, "max_norm": 1.0}
    step_weights(weights, clipped_gradient_sum(network, x, y, parameters=weights, **terms))


def check_network(network, x, y):
    weights = dict(network.named_parameters())
    step_weights(weights, BatchGradients().weight_gradient(network, (x, y)))
    check_private(network, x, y, weights)


def test_steps_of_a_candidate_that_shares_weights():
    space = SPACES["dp_cells"]
    candidate = Candidate(on_meta(space.supernet), [len(space.ops) - 1] * space.cell_kinds["cell"])
    x, y = records(space)
    step_weights(candidate.weights(), BatchGradients().weight_gradient(candidate, (x, y)))
    check_private(candidate, x, y, candidate.weights())


# --- The same configuration gives bit-equal results in every runtime


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

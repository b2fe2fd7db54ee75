"""Made data, the composed configuration, and an in-process federation on both."""

import gc
import math
import os
import random
import signal
import sys
from functools import partial

import absl.logging
import numpy as np
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hypothesis import settings
from safetensors.torch import save_file

from fednas_flwr.algorithms.stage_strategies import algorithm_of, make_retraining, make_search
from fednas_flwr.base import processes
from fednas_flwr.base.pretrained import Pretrained
from fednas_flwr.base.randomness import seed_all
from fednas_flwr.cli import main
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.client.making import make_client
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import describe_network
from fednas_flwr.pipeline import baselines
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.run_folder import create_run_folder, open_run_folder
from fednas_flwr.server.cohort import Cohort
from fednas_flwr.settings import hydra_config
from fednas_flwr.settings.configuration import parse_config, yielded
from fednas_flwr.settings.hydra_config import compose_tree, user_settings
from fednas_flwr.settings.registry import OWN, TABLES

from .composing import remembering, split
from .finished_runs import FinishedRuns, Told, in_process, whole_run

# Where it is ignored, as in a background job, it would be ignored by the processes of tests, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # results must not depend on the number of cores
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
# When logging is configured anew, as by Hydra's sweeps, absl (which dp-accounting imports) closes
# what was sys.stderr when it was imported: here that would be the file of pytest's capture.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
compose_by_hydra = hydra_config.compose
hydra_config.compose = remembering(compose_by_hydra)
LONGEST = "walkthroughs baselines sensitivity estimators private_actions several_labels audit_run"
LONGEST += " features api own_parts private_clients secure_sum stopped local_actors ledger"


WHOLE_RUNS = {"run_inline", "finished_run", "machines"}  # tests with such a fixture are `run`
OTHER_RUNS = ("ray", "browser")  # and those with such a marker


@pytest.fixture(scope="session", autouse=True)
def one_core():
    """Let runs stay in this process: other cores have other tests. Some patch it for several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0})
        yield


@pytest.fixture(autouse=True)
def no_processes_of_earlier_tests():
    """Let what a test has started end with it."""
    yield
    while processes._started:
        interpreter, _ = processes._started.pop()
        interpreter.kill()
        interpreter.wait()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(items):
    """Mark whole runs; begin with the files that take longest, so that workers end together."""
    for item in items:
        whole = WHOLE_RUNS & set(getattr(item, "fixturenames", ()))
        if whole or any(map(item.get_closest_marker, OTHER_RUNS)):
            item.add_marker(pytest.mark.run)
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish():
    """Spare garbage collection what lives as long as the process: modules and tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup():
    """Let what a test draws depend on nothing that ran before it."""
    seed_all(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def prints(capsys):
    """``prints(*arguments, code=0)``: what the command prints here, as errors if it fails."""

    def printed(*arguments, code=0):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return printed


@pytest.fixture
def uncut(monkeypatch):
    """Contributions as they are, for a close look: that they are cut to a unit is tested apart."""
    monkeypatch.setattr("fednas_flwr.privacy.mechanism.micro_batches.UNIT_BITS", 56)
    monkeypatch.setattr("fednas_flwr.privacy.mechanism.record_gradients.LARGE", sys.maxsize)


@pytest.fixture(scope="session")
def made_data(tmp_path_factory):
    """An npz file of 80 + 30 noisy 3x8x8 images whose brightest channel is the class, of 3."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 110)
    images = rng.integers(0, 120, (110, 3, 8, 8))
    images[np.arange(110), labels] += 100
    images = images.astype(np.uint8)
    path = tmp_path_factory.mktemp("made") / "made.npz"
    arrays = {"x_train": images[:80], "y_train": labels[:80]}
    np.savez(path, **arrays, x_test=images[80:], y_test=labels[80:])
    return path


@pytest.fixture(scope="session")
def tiny_overrides(made_data):
    """Hydra overrides of a run on the made data that takes seconds; the cache lies beside it."""
    data = ["dataset=npz", f"dataset.root={made_data}"]
    data.append(f"dataset.cache={made_data.parent / 'cache'}")
    sizes = ["search_space.channels=4", "retrain.channels=4", "retrain.rounds=2", "rounds=2"]
    return [*data, *sizes, "runtime.device=cpu", "trackers=[]"]


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A file of weights of a tiny network, whose batch norms are not those of a new one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Pretrained("test_efficientnet", num_classes=1000)
        network.train()(torch.rand(16, 3, 32, 32))
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(network.network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def one_cell():
    """The space ``dp_cells`` has one cell in place of three, as in ``search_space.widths=[4]``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fednas_flwr.spaces.dp_cells.BLOCKS", 1)
        yield


@pytest.fixture(scope="session")
def compose_config(tiny_overrides):
    """``compose_config(*overrides)``: the checked configuration, tiny unless overridden.

    A text can hold several overrides.
    """

    def composed(*texts):
        overrides, tiny = split(*texts), tiny_overrides
        if "dataset=digits" in overrides:
            tiny = [o for o in tiny if not o.startswith("dataset.root=")]
        own_size = ("search_space=mbconv", "search_space=dp_cells")
        if any(override.startswith(own_size) for override in overrides):
            tiny = [o for o in tiny if not o.startswith(("search_space.", "retrain.channels"))]
        given = [*tiny, *overrides]
        return parse_config(yielded(compose_tree(given), user_settings(given)))

    return composed


@pytest.fixture(scope="session")
def federate():
    """``federate(config)``: data, grid, cohort, events and the strategy of a config.

    It is that of the search, or of the training of a given network.
    """

    def federation(config, *, checkpoints=None):
        events = []

        def emit(event, **fields):
            events.append({"event": event, **fields})

        data = make_data(config)
        cohort = Cohort(
            run="test", num_clients=config.clients, quorum_share=1.0, deadline_s=math.inf, emit=emit
        )
        folder = None
        if checkpoints is not None:
            folder = CheckpointFolder(checkpoints, lambda message: emit("warning", message=message))
        made = {}
        if algorithm_of(config).search is None:
            described = describe_network(config, data[0], None)
            made["strategy"], made["network"] = make_retraining(
                config, described, cohort, checkpoints=folder
            )
            made["description"] = described
        else:
            made["strategy"] = make_search(config, data[0], cohort, checkpoints=folder)
        numbers = range(config.clients)
        made["clients"] = [make_client(config, i, data=data, networks={}) for i in numbers]
        made["grid"] = in_process(config)
        made |= {"config": config, "data": data, "cohort": cohort}
        return Told(checkpoints=folder, events=events, **made)

    return federation


def sound(run, fails=False):
    """Return a run that has ended as it should: with an error if it ``fails``, else without."""
    if run.error is not None and not fails:
        raise run.error
    assert not fails or run.error is not None
    return run


@pytest.fixture(scope="session")
def quick_run(compose_config, tmp_path_factory):
    """As ``run_inline``, for tests of the quick tier."""

    def ran(*overrides, resume=None, fails=False, **how):
        if resume is None:
            folder = tmp_path_factory.mktemp("run") / "run"
            config = create_run_folder(compose_config(*overrides, f"run_dir={folder}"))
        else:
            config = open_run_folder(str(resume))
        return sound(whole_run(config, resumed=resume is not None, **how), fails)

    return ran


@pytest.fixture(scope="session")
def run_inline(quick_run):
    """``run_inline(*overrides)``: a whole run in this process; its folder, events and error.

    With ``resume=<run folder>`` the run there goes on; ``sites`` are the files of real sites, or
    what their nodes are told; ``grid`` is made of app and clients. An error is raised unless the
    run ``fails``.
    """
    return quick_run


@pytest.fixture(scope="session")
def finished_run(compose_config, tmp_path_factory):
    """``finished_run(*overrides)``: as ``run_inline``, a copy of one that was made before.

    For tests that look at what a run has left. It must not be called where anything is patched.
    An error of the run is raised.
    """
    place = tmp_path_factory.getbasetemp()  # of this worker
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    runs = FinishedRuns(place / "finished_runs", tmp_path_factory.mktemp("finished"))
    return lambda *overrides: sound(runs.get(compose_config(*overrides)))


@pytest.fixture
def answers(monkeypatch):
    """``answers(action, made)``: clients answer by ``made(honest, client, request, asked)``.

    ``honest(client, request, asked)`` is what they would answer otherwise.
    """

    def by(action, made):
        monkeypatch.setitem(ANSWERS, action, partial(made, ANSWERS[action]))

    return by


@pytest.fixture
def lies(answers):
    """``lies(action, change, client=0)``: one client's replies are ``change(reply)``."""

    def by(action, change, client=0):
        def made(honest, answering, request, asked):
            reply = honest(answering, request, asked)
            return change(reply) if answering.index == client else reply

        answers(action, made)

    return by


@pytest.fixture
def few_draws(monkeypatch):
    """Take fewer networks for the data-free choice, for time alone."""
    shipped = baselines.read_yaml

    def fewer(path, file):
        settings = shipped(path, file)
        if file == baselines.DATA_FREE_FILE:
            settings["algorithm"]["draws"] = 4
            settings["algorithm"]["shortlist"]["keep"] = 2
        return settings

    monkeypatch.setattr(baselines, "read_yaml", fewer)


@pytest.fixture
def only_here():
    """Forget what a test has registered."""
    before = {group: set(table) for group, table in TABLES.items()}
    yield
    for group, table in TABLES.items():
        for name in set(table) - before[group]:
            del table[name], OWN[group][name]
            ConfigStore.instance().repo.get(group, {}).pop(f"{name}.yaml", None)

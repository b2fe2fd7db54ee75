"""``runtime=inline`` on several cores: the same bits, whatever process answers, and no orphans."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fednas_flwr.algorithms.zero_cost import strategy
from fednas_flwr.api import run
from fednas_flwr.base import processes
from fednas_flwr.deploy import local_actors
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.deploy.local_actors import LocalGrid, local_grid
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.search.data_free_scores import AZ_NAS
from fednas_flwr.settings import with_runtime
from fednas_flwr.settings.registry import packed

from ..finished_runs import assert_same_files
from ..processes import wait_for_workers, workers
from ..refusals import raising, refuses
from ..small_spaces import SPACES as SMALL

SHORT = ("rounds=3", "retrain.rounds=3", "dataset.linear_baseline=false")


def test_one_core_one_client_or_a_process_among_others_stays_alone(compose_config, monkeypatch):
    config = compose_config("clients=3", "runtime.device=cpu")
    for cores, changed, alone in (
        (2, config, False),
        (1, config, True),
        (2, replace(config, clients=1), True),
        (2, with_runtime(config, threads=2), True),
        (2, compose_config("privacy=dp", "privacy.test_seed=1", "runtime.device=cpu"), True),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda p, n=cores: set(range(n)))
        with local_grid(changed) as grid:
            assert (type(grid) is InProcessGrid) == alone
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv(processes.ALONE, "1")
    with local_grid(config) as grid:
        assert type(grid) is InProcessGrid


def test_tasks_that_cores_do_not_divide_evenly_share_them(monkeypatch):
    cases = [(2, 3, 1, 3), (2, 4, 1, 2), (2, 5, 1, 3), (2, 3, 2, 1), (1, 3, 1, 1), (1, 3, 2, 0)]
    cases += [(4, 3, 1, 3), (8, 10, 1, 10), (8, 27, 1, 11), (2, 1, 1, 1)]
    for cores, tasks, threads, number in cases:
        monkeypatch.setattr(os, "sched_getaffinity", lambda p, n=cores: set(range(n)))
        assert processes.at_once(tasks, threads=threads) == number
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes.at_once(3) == 1


@pytest.mark.run
def test_scores_are_those_of_one_process(compose_config, two_cores, monkeypatch):
    config = compose_config("algorithm=zero_cost")
    space, generator = SMALL["nasbench201"], torch.Generator().manual_seed(0)
    genotypes = [space.random_genotype(generator) for _ in range(9)]
    here = strategy._scores(config, space, AZ_NAS, genotypes)
    processes.warm_up()
    monkeypatch.setattr(strategy, "LostError", ZeroDivisionError)  # nothing is then computed here
    assert strategy._scores(config, space, AZ_NAS, genotypes) == here


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(local_actors, "PATIENCE_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


@pytest.mark.parametrize("warm", [False, True])
def test_a_run_without_processes_goes_on(warm, compose_config, tmp_path, two_cores, monkeypatch):
    monkeypatch.setattr(local_actors, "is_warm", lambda: warm)
    monkeypatch.setattr(processes.Forks, "start", raising(processes.LostError))
    short = (*SHORT, "runtime.device=cpu", "stages=[search]", f"run_dir={tmp_path / 'run'}")
    assert read_run(run(compose_config(*short)).folder).failures() == []


@pytest.mark.run
def test_workers_give_the_bits_of_one_process(compose_config, tmp_path, two_cores, monkeypatch):
    config, runs = compose_config(*SHORT, "runtime.device=cpu"), []
    answered: list[int] = []
    real = LocalGrid.answer
    monkeypatch.setattr(LocalGrid, "answer", lambda s, m: answered.append(1) or real(s, m))
    for name, alone, listeners in (("alone", "1", ()), ("workers", "", (wait_for_workers,))):
        if alone:
            monkeypatch.setenv(processes.ALONE, alone)
        else:
            monkeypatch.delenv(processes.ALONE)
        runs.append(run(replace(config, run_dir=str(tmp_path / name)), listeners=listeners))
        assert not read_run(runs[-1].folder).failures()
    assert_same_files(*(done.folder for done in runs), "model.safetensors")
    exchanges = sum(e["exchanges"] for e in read_run(tmp_path / "workers").of_kind("round"))
    assert 0 < len(answered) < config.clients * exchanges  # here at first, then by workers


@pytest.mark.run
def test_a_worker_that_dies_costs_its_reply_and_is_replaced(compose_config, tmp_path, two_cores):
    killed: list[int] = []
    config = compose_config("rounds=20", "stages=[search]", "runtime.device=cpu")

    def kill_one(event):
        wait_for_workers(event)
        if event["event"] == "round" and event["round"] == 3:
            killed.append(workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    config = replace(config, run_dir=str(tmp_path / "run"))
    run(config, listeners=[kill_one])
    record = read_run(tmp_path / "run")
    assert record.status == "completed"
    assert killed
    assert all("process has died" in str(event["reason"]) for event in record.failures())


@pytest.mark.run
def test_a_process_that_forks_others_is_replaced_when_it_has_died():
    sent = packed(len)
    assert sent is not None
    with processes.Forks(sent) as forks:
        first = forks.start()
        assert first("abc") == 3
        (interpreter, _) = processes._started[-1]
        interpreter.kill()
        interpreter.wait()
        assert first("abcd") == 4  # which lives
        other = forks.start()
        assert other("ab") == 2
    for call in (other, forks.start):
        refuses("", call, error=processes.LostError)


@pytest.mark.run
def test_what_is_needed_later_is_imported_once_the_first_are_forked(two_cores, monkeypatch):
    monkeypatch.setattr(processes, "_started", [])
    monkeypatch.delenv(processes.ALONE, raising=False)
    processes.warm_up(["this"])
    (interpreter, _) = processes._started[-1]
    with processes.Forks(packed(_has_imported)) as forks:
        assert forks.start()("this") is False
        ends_at = time.monotonic() + 60
        while not forks.start()("this"):
            assert time.monotonic() < ends_at
            time.sleep(0.1)
    interpreter.kill()


def _has_imported(name):
    return name in sys.modules


@pytest.mark.run
def test_what_a_function_raises_is_raised_here_and_its_process_lives():
    with processes.Forks(packed(len)) as forks:
        measure = forks.start()
        with pytest.raises(TypeError, match="has no len") as raised:
            measure(1)
        assert "in _serve" in str(raised.value.__cause__)  # where it was
        assert measure("abc") == 3


def test_an_interpreter_that_always_dies_is_started_a_few_times(monkeypatch):
    monkeypatch.setattr(processes, "ENTRY", "no_such_module")
    with processes.Forks(packed(len)) as forks:
        for _ in range(processes.STARTS + 2):
            refuses("", forks.start, error=processes.LostError)
            processes._started[-1][0].wait()
    assert len(processes._started) == processes.STARTS


@pytest.mark.run
def test_no_worker_outlives_the_run(compose_config, tmp_path):
    script = (
        "import os, sys; from fednas_flwr import compose, run;"
        "from fednas_flwr.deploy import local_actors; local_actors.PATIENCE_S = 0.0;"
        "os.sched_getaffinity = lambda process: {0, 1};"
        "run(compose('rounds=100000', 'stages=[search]', 'runtime.device=cpu',"
        "            f'run_dir={sys.argv[1]}'))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")])
    while not (mine := workers(parent.pid)):
        assert parent.poll() is None
        time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(Path(f"/proc/{process}").exists() for process in mine):
        time.sleep(0.1)


@pytest.mark.run
def test_no_file_of_the_working_folder_is_a_module_there(tmp_path, monkeypatch):
    monkeypatch.delenv(processes.ALONE, raising=False)
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of somebody')")
    monkeypatch.chdir(tmp_path)
    with processes.Forks(packed(len)) as forks:
        assert forks.start()([1, 2]) == 2

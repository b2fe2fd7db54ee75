"""A site's executor runs client apps alone, each in a process that has nothing left to import."""

import math
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus

from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.sites.executor import IMPORTED, NAME


def spec(task):
    where = {"runtime_api_address": "127.0.0.1:1", "insecure": True, "root_certificates_path": None}
    how = {"runtime_dependency_install": False, "suppress_output": False}
    own = {"task_type": task, "token": "secret", "parent_pid": os.getpid()}
    return ExecutionSpec(**own, **where, **how, task_id=1)


@pytest.mark.parametrize("task", TaskType)
def test_client_apps_are_started_and_no_other_task_is(task, monkeypatch):
    started: list[ExecutionSpec] = []
    monkeypatch.setattr(SubprocessExecutor, "launch", SubprocessExecutor.launch)
    flower_patches.start_clients_by(started.append)
    result = SubprocessExecutor().launch(spec(task))
    ours = task == TaskType.CLIENT_APP
    assert started == [spec(task)] * ours
    assert result.status == (LaunchResultStatus.ACCEPTED if ours else LaunchResultStatus.FAILED)


def test_the_process_of_a_message_can_be_told_from_the_one_that_it_is_forked_from():
    """Whose arguments name the modules that it has imported."""
    assert len(NAME) < 16  # all that Linux keeps
    assert not any(NAME in module for module in IMPORTED)


def _train(connection):
    """Send what the process had imported, and the sum of weights after a step on two threads."""
    imported = [name for name in IMPORTED if name in sys.modules]
    torch.set_num_threads(2)
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.ones(64, 3, 32, 32)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    connection.send((imported, layer.weight.sum().item()))


def fork_twice():
    """Fork as a site's executor does, in an interpreter whose forkserver has not begun."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    for _ in range(2):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(sender,), daemon=True)
        process.start()
        sender.close()
        imported, total = receiver.recv()
        process.join()
        assert process.exitcode == 0
        assert imported == IMPORTED
        assert math.isfinite(total)


@pytest.mark.run
def test_forked_processes_have_imported_all_and_train_on_several_threads():
    """In an interpreter of its own, as other tests start this one's forkserver."""
    run = f"from {__name__} import fork_twice; fork_twice()"
    subprocess.run([sys.executable, "-c", run], check=True, cwd=Path(__file__).parents[2])

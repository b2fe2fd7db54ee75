import platform

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fednas_flwr.base.memory import described, keep_freed_memory
from fednas_flwr.cli import fail
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid

from .processes import told
from .refusals import raising

PROCESS = """
import resource, sys
import torch
from fednas_flwr.base.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()


def step():
    for _ in range(20):
        torch.ones(10 * 2**20)  # 40 MiB: glibc itself never keeps more than 32 MiB


step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(argument):
    """Return how many pages a process faults in for 20 tensors after 20 others."""
    return int(told("-c", PROCESS, argument))


@pytest.mark.run
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is set")
def test_freed_memory_stays_with_the_process():
    assert 10 * faults("keep") < faults("leave")


def test_every_process_that_answers_keeps_it():
    keep_freed_memory.cache_clear()
    grid = InProcessGrid(make_client_app(), 1)
    list(grid.send_and_receive([grid.create_message(RecordDict(), "train.search", 2, "")]))
    assert keep_freed_memory.cache_info().misses == 1


TOO_LARGE = [(torch.empty, "4000000000000000 bytes"), (np.empty, "7.11 PiB")]


@pytest.mark.parametrize(("make", "amount"), TOO_LARGE)
def test_who_runs_out_of_memory_is_told_what_to_lower(make, amount):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        make(10**15)
    assert described(error.value).startswith(f"out of memory when {amount} more were needed: lower")
    assert described(ValueError("lr must be above 0")) == "ValueError: lr must be above 0"


def test_client_and_command_tell_it(monkeypatch, capsys):
    decode = "fednas_flwr.deploy.client_app.messages.decode_request"
    monkeypatch.setattr(decode, raising(MemoryError))
    grid = InProcessGrid(make_client_app(), 1)
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(), "train.search", 2, "")])
    assert reply.error.reason.startswith("out of memory: lower")
    fail(MemoryError(), debug=False)
    assert capsys.readouterr().err.startswith("fednas: out of memory: lower")

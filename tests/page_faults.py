"""Tell how many pages 20 tensors fault in after 20 others."""

import resource
import sys

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

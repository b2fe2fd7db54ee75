"""Checks that a run's Ray cluster or SuperLink is there, with room for one of its clients."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.settings import Config
from fednas_flwr.settings.run_settings import Deployment, RayRuntime

FLOWERS_OWN = {"local", "supergrid"}  # in the file that Flower writes where there is none
CONNECTS_S, ANSWERS_S = 4.0, 12.0

Nodes = tuple[tuple[float, float], ...]  # CPUs and GPUs of each machine


def places(runtime: RayRuntime, nodes: Nodes) -> int:
    """Return the number of clients that a cluster's machines hold at a time by ``runtime``."""

    def fits(cpus: float, gpus: float) -> int:
        by_gpus = gpus / runtime.client_gpus if runtime.client_gpus else math.inf
        return math.floor(min(cpus / runtime.client_cpus, by_gpus) + 1e-9)

    return sum(fits(cpus, gpus) for cpus, gpus in nodes)


# In a process of its own: Ray waits for a silent cluster for ever.
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="critical")
nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print(json.dumps([[node.get("CPU", 0), node.get("GPU", 0)] for node in nodes]))
"""


def check_cluster(config: Config) -> None:
    """Raise ConfigError for an unknown SuperLink, or a Ray that has no place for a client."""
    runtime = config.runtime
    if isinstance(runtime, Deployment):
        _check_superlink(str(runtime.superlink))
    if not isinstance(runtime, RayRuntime):
        return
    cpus, gpus = runtime.client_cpus, runtime.client_gpus
    address = runtime.ray_address
    nodes = _own_node() if address is None else _nodes(address)
    if not places(runtime, nodes):
        there = "; ".join(f"{c:g} CPUs and {g:g} GPUs" for c, g in nodes[:4])
        raise ConfigError(
            f"runtime.client_cpus={cpus:g} with runtime.client_gpus={gpus:g}: no machine of the "
            f"cluster holds such a client (there are {there}); lower what one client takes."
        )


def _check_superlink(name: str) -> None:
    """Refuse a SuperLink that Flower's configuration does not name, or would not when made."""
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"].items()
        known = {one for one, entry in entries if isinstance(entry, dict)}
    except FileNotFoundError:
        known = FLOWERS_OWN
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"runtime.superlink={show(name)}: {path} has no table of SuperLinks that can be read "
            f"({error}): correct it."
        ) from error
    if name not in known:
        told = str(unknown_choice("runtime.superlink", name, known)).removesuffix(".")
        raise ConfigError(f"{told}, or add [superlink.{show(name)}] with its address to {path}.")


def _own_node() -> Nodes:
    import torch

    return ((os.cpu_count() or 1, torch.cuda.device_count()),)


@cache
def _nodes(address: str) -> Nodes:
    """Return CPUs and GPUs of every node of the cluster at an address."""
    silent = ConfigError(
        f"runtime.ray_address={show(address)}: no Ray cluster answers there; start it, correct the "
        "address, or set runtime.ray_address=null for one on this machine."
    )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), timeout=CONNECTS_S).close()
        done = subprocess.run(
            [sys.executable, "-c", _ASK, address],
            capture_output=True,
            text=True,
            timeout=ANSWERS_S,
            check=True,
        )
    except (OSError, ValueError, OverflowError, subprocess.SubprocessError) as error:
        raise silent from error
    return tuple((float(cpus), float(gpus)) for cpus, gpus in json.loads(done.stdout))

"""Rehearsals of private computations on made-up records, and the micro-batch sizes they find.

A result is kept by the client and, as a small file, in the site's cache. It holds for one machine,
its libraries and threads, and one network structure; all of these form its key. Main function:
:func:`rehearse`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.files import make_folder, write_atomically
from fednas_flwr.client.client import Client
from fednas_flwr.privacy.self_test import Computation, largest_size, made_up_labels, unwatched
from fednas_flwr.spaces.latency_tables import machine_name

SELF_TESTS = "self-tests"
# Prefixes of the names of settings that decide which kernels are used.
KERNEL_SETTINGS = ("ATEN_", "CUBLAS_", "CUDNN_", "DNNL_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_")
MOST_FILES = 1000  # so that a server that sends ever new networks fills no disk
PASSING = ("drop_path_prob", "training")  # attributes that change between messages


def rehearse(
    client: Client, computation: Computation, network: nn.Module, kind: str, *chosen: Any
) -> int:
    """Compute on made-up records, shaped like the client's; return the micro-batch size to use.

    The first step is a micro-batch of the site's size, made of zeros of the last class. It runs
    once for everything that the server has chosen and on which success could depend, including
    memory; no computation on records takes more. The second step is the self-test. It reduces the
    size to one at which no record changes what is computed for another.

    Args:
        client: A client with a guard.
        computation: Computation on a micro-batch of any size.
        network: The network with which it computes.
        kind: Kind of the computation; with the network it decides which kernels are used.
        chosen: Everything else that the server has chosen.
    """
    key = json.dumps([kind, *chosen])
    if key in client.rehearsed:
        return client.rehearsed[key]
    size = client.private_guard.allowed.micro_batch_size
    shape, device = tuple(client.data.train.features.shape[1:]), client.device
    classes = len(client.inputs.class_names)
    labels: dict[str, Any] = {"num_classes": classes, "multi_label": client.objective.multi_label}
    x = torch.zeros(size, *shape, device=device)
    y = made_up_labels([classes - 1] * size, **labels).to(device)
    known_by = [kind, size, shape, *labels.values()]
    known_by += [*machine(device, client.threads), structure(network)]

    def test() -> int:
        return largest_size(computation, network, shape, size=size, device=device, **labels)

    try:
        computation(x, y, watch=unwatched)
        client.rehearsed[key] = shown_size(known_by, client.cache, test)
    except RuntimeError as error:  # from torch
        raise ValueError(error) from error
    return client.rehearsed[key]


def shown_size(key: list[Any], cache: Path | None, test: Callable[[], int]) -> int:
    """Return the result of a test for this key, from the cache if it has run before.

    Args:
        key: JSON values of everything on which the result depends.
        cache: The site's cache, whose folder ``self-tests`` holds one file per key; None keeps no
            results.
        test: Returns the size.
    """
    text = json.dumps(key)
    if cache is None:
        return test()
    path = cache / SELF_TESTS / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    size = _read(path, text)
    if size is None:
        size = test()
        make_folder(path.parent)
        if len(list(path.parent.iterdir())) < MOST_FILES:
            write_atomically(path, json.dumps({"key": text, "size": size}))
    return size


def machine(device: torch.device, threads: int) -> list[Any]:
    """Return everything besides the network that decides which kernels torch uses."""
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith(KERNEL_SETTINGS)}
    return [
        machine_name(device),
        threads,
        chosen,
        version("fednas_flwr"),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
    ]


def structure(network: nn.Module) -> str:
    """Return a hash of a network's modules, their settings and the shapes of their parameters."""
    modules = [
        [
            name,
            type(module).__module__,
            type(module).__qualname__,
            sorted(_settings(module)),
            [
                (key, list(p.shape), str(p.dtype))
                for key, p in module.named_parameters(recurse=False)
            ],
        ]
        for name, module in network.named_modules()
    ]
    return hashlib.sha256(json.dumps(modules).encode()).hexdigest()


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a module's attributes that JSON can represent, and its tensors of whole numbers."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in PASSING:
            whole = isinstance(value, Tensor) and not value.is_floating_point()
            with suppress(TypeError, ValueError):
                yield name, json.dumps(value.tolist() if whole else value)


def _read(path: Path, text: str) -> int | None:
    """Return the size in a file for the key; None if there is no readable one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return int(document["size"]) if document["key"] == text else None
    except (OSError, ValueError, TypeError, KeyError):
        return None

"""What tests of whole runs and of real processes share."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from fednas_flwr.deploy.sites.provision import Server, load_sites

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def loopback():
    """``scripts/loopback.py``."""
    path = ROOT / "scripts" / "loopback.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def machines(tmp_path_factory, loopback):
    """``machines(private=True)``: a server and three sites that run what docker/compose.yaml says.

    Each host name in the file is replaced by 127.0.0.1; ``sums`` are terms of secure sums.
    """
    base = tmp_path_factory.mktemp("machines")
    (base / "data").mkdir()
    listed = load_sites(ROOT / "docker" / "sites.yaml")
    rng = np.random.default_rng(0)
    data = {}
    for index, site in enumerate(listed.sites):
        labels = rng.integers(0, 3, 50)
        images = rng.integers(0, 120, (50, 3, 8, 8)).astype(np.uint8)
        images[np.arange(50), labels] += 100
        data[site] = base / "data" / f"{index}-{site}.npz"
        np.savez(data[site], x_train=images, y_train=labels)
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    parts = {}
    for name, service in services.items():
        own = {
            key: re.sub(r"^[a-z-]+$|^0\.0\.0\.0$", "127.0.0.1", value)
            for key, value in service.get("environment", {}).items()
        }
        machine = Path(service["volumes"][0].split(":")[0]).name
        parts[name] = loopback.Part(machine, service["command"], own)
    (port,) = loopback.free_ports(1)
    here = replace(listed, server=Server(("127.0.0.1",), port))
    made = loopback.Machines(base, here, data, records=50, class_names="012", parts=parts)

    def begin(*, private, sums=None):
        made.make_private(private)
        made.begin(sums=sums)
        return made

    yield begin
    assert made.stop() == []  # no process has outlived what it belonged to

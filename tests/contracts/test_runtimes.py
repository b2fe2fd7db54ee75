"""The same configuration gives bit-equal results in every runtime.

The deployment on real SuperNodes compares itself with inline in ``scripts/deploy_local.sh``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from fednas_flwr.cli import main
from fednas_flwr.reporting.events import latest_rounds, read_events

TIMEOUT_S = 600  # Ray starts slowly on a busy machine


@pytest.mark.ray
def test_ray_equals_inline(tiny_overrides, tmp_path):
    overrides = [
        *tiny_overrides,
        "clients=2",
        "partition=quantity",
        "partition.fractions=[0.65,0.35]",
        "rounds=2",
        "retrain.rounds=1",
        "retrain.drop_path_prob=0.2",
        "dataset.crop_padding=1",  # randomness on the client
        "dataset.flip=true",
    ]
    command = [sys.executable, "-m", "fednas_flwr.cli", "run", *overrides, "runtime=ray"]
    with subprocess.Popen(
        [*command, f"run_dir={tmp_path / 'ray'}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as ray:
        try:
            inline = ["run", *overrides, "runtime=inline", f"run_dir={tmp_path / 'inline'}"]
            assert main(inline) == 0
            output, _ = ray.communicate(timeout=TIMEOUT_S)
            assert ray.returncode == 0, output
        finally:
            ray.kill()
    folders = [tmp_path / "inline", tmp_path / "ray"]
    for name in ("genotype.json", "model.safetensors"):
        inline_bytes, ray_bytes = ((folder / name).read_bytes() for folder in folders)
        assert inline_bytes == ray_bytes
    for name in ("search-000002", "retrain-000001"):
        left, right = (load_file(f / "checkpoints" / f"{name}.safetensors") for f in folders)
        assert set(left) == set(right)
        assert ("alphas.float32" in left) == name.startswith("search")
        assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())
    inline_events, ray_events = (read_events(folder / "events.jsonl") for folder in folders)
    for stage in ("search", "retrain"):
        rounds = [
            [(e["round"], e["metrics"], e["clients"]) for e in latest_rounds(events, stage)]
            for events in (inline_events, ray_events)
        ]
        assert rounds[0] == rounds[1]
    evaluated = [
        [(e["central"], e["clients"]) for e in events if e["event"] == "evaluated"]
        for events in (inline_events, ray_events)
    ]
    assert evaluated[0] == evaluated[1]
    assert not [e for e in ray_events if e["event"] == "client_failed"]

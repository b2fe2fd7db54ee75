"""Small run folders, written through EventLog as a real run writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednas_flwr.reporting.events import EventLog

OPS = ["none", "max_pool_3x3", "skip_connect", "sep_conv_3x3"]
DARTS_CELL = [
    {"op": "sep_conv_3x3", "source": 0, "target": 2},
    {"op": "sep_conv_3x3", "source": 1, "target": 2},
    {"op": "skip_connect", "source": 0, "target": 3},
    {"op": "max_pool_3x3", "source": 2, "target": 3},
    {"op": "skip_connect", "source": 0, "target": 4},
    {"op": "sep_conv_3x3", "source": 3, "target": 4},
    {"op": "max_pool_3x3", "source": 1, "target": 5},
    {"op": "dil_conv_5x5", "source": 4, "target": 5},
]
NASBENCH_CELL = [
    {"op": op, "source": source, "target": target}
    for op, source, target in [
        ("nor_conv_3x3", 0, 1),
        ("skip_connect", 0, 2),
        ("avg_pool_3x3", 1, 2),
        ("none", 0, 3),
        ("nor_conv_1x1", 1, 3),
        ("nor_conv_3x3", 2, 3),
    ]
]
GENOTYPE = {
    "format": "fednas-genotype",
    "version": 1,
    "space": "darts",
    "cells": {"normal": DARTS_CELL, "reduction": DARTS_CELL},
}
CONFIG = """\
run_dir: {folder}
seed: {seed}
device: cpu
clients: 3
rounds: 3
algorithm: {{name: {algorithm}, alpha_lr: 3e-4}}
dataset: {{name: digits}}
partition: {{name: iid}}
search_space: {{name: darts, channels: 8}}
privacy: {{name: none}}
runtime: {{name: inline}}
retrain: {{rounds: 2}}
"""


def emit_rounds(log: EventLog, stage: str, numbers: range, rounds: int) -> None:
    for number in numbers:
        metrics = {"train_loss": 2.0 / number, "train_accuracy": 0.2 * number}
        if stage == "search":
            metrics |= {"alpha_entropy": 1.3, "skip_share": 0.25}
            alphas = [[0.0, 0.1, 0.2, 0.1 * number]] * 14
            alphas_by_kind = {"normal": alphas, "reduction": alphas}
            log.emit("alphas", round=number, ops=OPS, alphas=alphas_by_kind)
        log.emit(
            "round",
            stage=stage,
            round=number,
            rounds=rounds,
            seconds=1.5,
            metrics=metrics,
            bytes_sent=2_000_000,
            bytes_received=1_000_000,
            clients={},
        )


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run folder and returns its path."""

    def make(
        name: str,
        *,
        seed: int = 1,
        algorithm: str = "fed_darts",
        accuracy: float = 0.9,
        until: str = "end",
        reason: str = "client 2: disk full",
        class_name: str = "zero",
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = CONFIG.format(folder=folder, seed=seed, algorithm=algorithm)
        (folder / "config.yaml").write_text(config)
        with EventLog(folder / "events.jsonl") as log:
            log.emit(
                "run_started",
                resumed=False,
                versions={"python": "3.11", "torch": "2.15"},
                commit="abc1234",
                machine="test",
            )
            if until == "start":
                return folder
            log.emit(
                "partition",
                class_names=[class_name, "one"],
                counts=[[10, 20], [30, 0], [5, 5]],
                splits=[{"train": 20, "validation": 5, "test": 5}] * 3,
                server_test=100,
            )
            log.emit("stage_started", stage="search", rounds=3)
            emit_rounds(log, "search", range(1, 4), 3)
            log.emit(
                "client_failed",
                stage="search",
                round=3,
                verb="train.search",
                client=2,
                reason=reason,
            )
            log.emit("warning", message="no accelerator: the run uses the CPU")
            if until == "search":
                log.emit("run_finished", status="failed", reason=reason, seconds=5.0)
                return folder
            log.emit("stage_finished", stage="search", seconds=4.5)
            log.emit("derived", genotype=GENOTYPE, num_parameters=12_345, multiply_adds=6.7e6)
            log.emit("stage_started", stage="retrain", rounds=2)
            emit_rounds(log, "retrain", range(1, 3), 2)
            log.emit("stage_finished", stage="retrain", seconds=3.0)
            clients: list[dict[str, Any]] = [
                {"client": c, "accuracy": accuracy - 0.1 * c, "loss": 0.3, "num_examples": 5}
                for c in range(3)
            ]
            log.emit(
                "evaluated",
                central={"accuracy": accuracy, "loss": 0.3, "num_examples": 100},
                clients=clients,
                linear={"accuracy": 0.75},
            )
            log.emit(
                "exported", files=["model.safetensors", "model.onnx"], onnx_max_difference=1e-6
            )
            log.emit("run_finished", status="completed", reason="", seconds=9.0)
        return folder

    return make

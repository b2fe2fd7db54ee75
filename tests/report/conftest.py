"""Small run folders, written through EventLog as a real run writes them."""

import pytest
import yaml

from fednas_flwr.runs.events import EventLog

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
privacy: {{name: {privacy}}}
runtime: {{name: inline}}
retrain: {{rounds: 2}}
"""
SCHEDULE = [
    {
        "stage": "search",
        "action": "train.weight_gradient",
        "splits": ["train"],
        "noise_multiplier": 1.25,
        "batch_size": 16,
        "steps": 1200,
        "max_grad_norm": 0.5,
    },
    {
        "stage": "search",
        "action": "evaluate.model",
        "splits": ["validation"],
        "noise_multiplier": 20.0,
        "batch_size": None,
        "steps": 3,
        "max_grad_norm": 1.0,
    },
]


def private_client(client, *, train, secure_noise=True):
    """Return a client's part of a ``privacy`` event; its PRV epsilon is 3.1 + client."""
    return {
        "client": client,
        "records": {"train": train, "validation": 200, "test": 100},
        "budget": {"epsilon": 8.0, "delta": 1e-5},
        "rates": [16 / train, 1.0],
        "secure_noise": secure_noise,
        "covers": [{"stage": "search", "rounds": 3 - client, "of": 3}],
        "epsilon": {
            "prv": {"train": 3.1001 + client, "validation": 2.2},
            "rdp": {"train": 3.5 + client, "validation": 2.5},
            "gdp": {"train": None, "validation": 2.0},
        },
    }


def emit_rounds(log, stage, numbers, rounds, *, private=False):
    for number in numbers:
        metrics = {"train_loss": 2.0 / number, "train_accuracy": 0.2 * number}
        if private:  # noise has carried both out of their ranges
            metrics = {"validation_loss": 1.0 - number, "validation_accuracy": 0.4 * number}
        if stage == "search":
            metrics |= {"alpha_entropy": 1.3, "skip_share": 0.25}
            alphas = [[0.0, 0.1, 0.2, 0.1 * number]] * 14
            alphas_by_kind = {"normal": alphas, "reduction": alphas}
            log.emit("alphas", round=number, ops=OPS, alphas=alphas_by_kind, cells={})
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
def make_run(tmp_path):
    """Return a function that writes a run folder and returns its path."""

    def make(
        name,
        *,
        seed=1,
        algorithm="fed_darts",
        accuracy=0.9,
        until="end",
        reason="client 2: disk full",
        class_name="zero",
        private=False,
        secure_noise=True,
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        privacy = "dp" if private else "none"
        config = CONFIG.format(folder=folder, seed=seed, algorithm=algorithm, privacy=privacy)
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
                counts=None if private else [[10, 20], [30, 0], [5, 5]],
                splits=[{"train": 20, "validation": 5, "test": 5}] * 3,
                clients=[0, 1, 2],
                server_test=100,
            )
            if private:
                sites = [private_client(c, train=300 + 100 * c) for c in range(3)]
                sites[2]["secure_noise"] = secure_noise
                log.emit("privacy", data_set="records", schedule=SCHEDULE, clients=sites)
            log.emit("stage_started", stage="search", rounds=3)
            emit_rounds(log, "search", range(1, 4), 3, private=private)
            if private:
                place = {"stage": "search", "round": 2, "action": "train.weight_gradient"}
                log.emit("client_left", **place, client=1, reason="its budget has ended")
            log.emit(
                "client_failed",
                stage="search",
                round=3,
                action="train.search",
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
            emit_rounds(log, "retrain", range(1, 3), 2, private=private)
            log.emit("stage_finished", stage="retrain", seconds=3.0)
            clients = [
                {"client": c, "accuracy": accuracy - 0.1 * c, "loss": 0.3, "num_examples": 5}
                for c in range(3)
            ]
            if private:
                clients[0] |= {"accuracy": 1.03, "loss": -0.2}
                clients[1] |= {"accuracy": -0.05}
                clients[2] = {"client": 2}
                spent = [{"client": c, "spent": 2.9} for c in range(2)]
                log.emit("privacy_spent", clients=spent)
            log.emit(
                "evaluated",
                central={"accuracy": accuracy, "f1": 0.625, "loss": 0.3, "num_examples": 100},
                clients=clients,
                linear=None if private else {"accuracy": 0.75, "f1": 0.5},
            )
            log.emit(
                "exported", files=["model.safetensors", "model.onnx"], onnx_max_difference=1e-6
            )
            log.emit("run_finished", status="completed", reason="", seconds=9.0)
        return folder

    return make


# Texts that break out of a heading, a cell, an attribute, a script or a terminal's line.
EVIL = [
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "a|b\n\n# Heading\n\n| c | d |\n|---|---|\n| e | f |",
    "[free](https://evil.example) ![](https://evil.example/a.png) <https://evil.example>",
    "**bold** __bold__ *thin* _thin_ ~~gone~~ `code` \\| \\",
    "www.evil.example http://evil.example mailto:a@evil.example a@evil.example",
    "x\n---\ntags: [evil]\n---\n- a: b",
    "\x1b]0;title\x07\x1b[31m[red]red[/red]\r\x9b2J\u202e",
    "javascript:alert(1)//",
    "\" onclick=alert(1) x='",
]


def make_hostile(folder, evil):
    """Put a text wherever a run's files hold words that a client or the run's owner has chosen."""
    with EventLog(folder / "events.jsonl") as log:
        log.emit(
            "partition",
            class_names=[evil, f"{evil}2"],
            splits=[{"train": 20, "validation": 5, "test": 5}] * 3,
            clients=[0, 1, 2],
            counts=[[10, 20], [30, 0], [5, 5]],
            server_test=100,
        )
        log.emit("data", found=[evil])
        place = {"stage": "search", "round": 2, "action": evil}
        log.emit("client_failed", **place, client=2, reason=evil)
        log.emit("client_left", **place, client=1, reason=evil)
        log.emit("warning", message=evil)
        cost = {"unit": "ms", "target": 1.0, "predicted": 1.0, "measured": 2.0, "machine": evil}
        log.emit("derived", genotype=GENOTYPE, num_parameters=1, multiply_adds=1, cost=cost)
        column = {"name": evil, "kind": "category", "categories": [evil], "indicator": False}
        inputs = {"shape": [1], "schema": [column], "mean": [], "std": [], "class_names": [evil]}
        log.emit("exported", files=[evil], inputs=inputs)
        own = {"central": {"accuracy": 0.5, "own": {evil: 0.5}, "positive": 0, "num_examples": 9}}
        log.emit("evaluated", **own, clients=[{"client": 0, "accuracy": 0.5, "num_examples": 5}])
        results = dict.fromkeys(
            ("central_accuracy", "client_accuracy", "personalised_accuracy", "num_parameters")
        )
        results |= {"multiply_adds": None}
        group = {"group": evil, "clients": [0], "status": evil, "reason": evil, "folder": evil}
        log.emit("group_finished", **group, results=results, seconds=1.0)
        started = {"commit": evil, "machine": evil, "device": evil, "versions": {evil: evil}}
        log.emit("run_started", resumed=True, **started)
        log.emit("run_finished", status="failed", reason=evil, seconds=1.0)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for group in ("algorithm", "dataset", "partition", "search_space", "retrain"):
        config[group] |= {"name": evil, evil: evil}
    config |= {"genotype": evil, "stages": [evil]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder

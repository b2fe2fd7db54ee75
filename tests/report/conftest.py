"""Small run folders, written through EventLog as a real run writes them."""

import io
import json

import pytest
import yaml
from rich.console import Console

from fednas_flwr.runs.events import EventLog, read_events

OPS = ["none", "max_pool_3x3", "skip_connect", "sep_conv_3x3"]


def cell_of(pairs, ops):
    """Return the edges of a cell as events and genotypes hold them."""
    return [{"op": op, "source": s, "target": t} for op, (s, t) in zip(ops, pairs, strict=True)]


DARTS_PAIRS = [(0, 2), (1, 2), (0, 3), (2, 3), (0, 4), (3, 4), (1, 5), (4, 5)]
DARTS_OPS = ["sep_conv_3x3", "sep_conv_3x3", "skip_connect", "max_pool_3x3", "skip_connect"]
DARTS_CELL = cell_of(DARTS_PAIRS, [*DARTS_OPS, "sep_conv_3x3", "max_pool_3x3", "dil_conv_5x5"])
GENOTYPE = {"format": "fednas-genotype", "version": 1, "space": "darts"}
GENOTYPE |= {"cells": {"normal": DARTS_CELL, "reduction": DARTS_CELL}}
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
SEARCH_RELEASE = {"stage": "search", "action": "train.weight_gradient", "splits": ["train"]}
SEARCH_RELEASE |= {"batch_size": 16, "steps": 1200, "noise_multiplier": 1.25, "max_grad_norm": 0.5}
MEASURED = {"action": "evaluate.model", "splits": ["validation"], "batch_size": None, "steps": 3}
MEASURED |= {"noise_multiplier": 20.0, "max_grad_norm": 1.0}
SCHEDULE = [SEARCH_RELEASE, SEARCH_RELEASE | MEASURED]
PARTITION = {
    "class_names": ["zero", "one"],
    "counts": [[10, 20], [30, 0], [5, 5]],
    "splits": [{"train": 20, "validation": 5, "test": 5}] * 3,
    "clients": [0, 1, 2],
    "server_test": 100,
}
ROUND = {"metrics": {}, "seconds": 1.5, "clients": {}}
ROUND |= {"bytes_sent": 2_000_000, "bytes_received": 1_000_000}


def emit(folder, event, **told):
    """Add an event to a run's file."""
    with EventLog(folder / "events.jsonl") as log:
        log.emit(event, **told)


def with_config(folder, **changes):
    """Change settings of a run's configuration, those of a group one by one; return its folder."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = config[key] | value if both else value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def with_events(folder, change):
    """Write a run's events anew, each after ``change(event)``; return its folder."""
    events = read_events(folder / "events.jsonl")
    for event in events:
        change(event)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def printed(show, *shown, width=200):
    """Return what ``show(*shown, console)`` prints on a console."""
    console = Console(file=io.StringIO(), width=width)
    show(*shown, console)
    return console.file.getvalue()


def private_client(client, *, train, secure_noise=True):
    """Return a client's part of a ``privacy`` event; its PRV epsilon is 3.1 + client."""
    epsilons = {"prv": (3.1001 + client, 2.2), "rdp": (3.5 + client, 2.5), "gdp": (None, 2.0)}
    return {
        "client": client,
        "records": {"train": train, "validation": 200, "test": 100},
        "budget": {"epsilon": 8.0, "delta": 1e-5},
        "rates": [16 / train, 1.0],
        "secure_noise": secure_noise,
        "covers": [{"stage": "search", "rounds": 3 - client, "of": 3}],
        "epsilon": {k: {"train": a, "validation": b} for k, (a, b) in epsilons.items()},
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
        place = {"stage": stage, "round": number, "rounds": rounds}
        log.emit("round", **ROUND | place | {"metrics": metrics})


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
        private=False,
        secure_noise=True,
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        privacy = "dp" if private else "none"
        config = CONFIG.format(folder=folder, seed=seed, algorithm=algorithm, privacy=privacy)
        (folder / "config.yaml").write_text(config)
        with EventLog(folder / "events.jsonl") as log:
            versions = {"python": "3.11", "torch": "2.15"}
            own = {"versions": versions, "commit": "abc1234", "machine": "test"}
            log.emit("run_started", resumed=False, **own)
            if until == "start":
                return folder
            log.emit("partition", **PARTITION | ({"counts": None} if private else {}))
            if private:
                sites = [private_client(c, train=300 + 100 * c) for c in range(3)]
                sites[2]["secure_noise"] = secure_noise
                log.emit("privacy", data_set="records", schedule=SCHEDULE, clients=sites)
            log.emit("stage_started", stage="search", rounds=3)
            emit_rounds(log, "search", range(1, 4), 3, private=private)
            if private:
                place = {"stage": "search", "round": 2, "action": "train.weight_gradient"}
                log.emit("client_left", **place, client=1, reason="its budget has ended")
            failed = {"stage": "search", "round": 3, "action": "train.search", "client": 2}
            log.emit("client_failed", **failed, reason=reason)
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
                log.emit("privacy_spent", clients=[{"client": c, "spent": 2.9} for c in range(2)])
            central = {"accuracy": accuracy, "f1": 0.625, "loss": 0.3, "num_examples": 100}
            linear = None if private else {"accuracy": 0.75, "f1": 0.5}
            log.emit("evaluated", central=central, clients=clients, linear=linear)
            files = ["model.safetensors", "model.onnx"]
            log.emit("exported", files=files, onnx_max_difference=1e-6)
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
        log.emit("partition", **PARTITION | {"class_names": [evil, f"{evil}2"]})
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
        names = ("central_accuracy", "client_accuracy", "personalised_accuracy", "num_parameters")
        results = dict.fromkeys((*names, "multiply_adds"))
        group = {"group": evil, "clients": [0], "status": evil, "reason": evil, "folder": evil}
        log.emit("group_finished", **group, results=results, seconds=1.0)
        started = {"commit": evil, "machine": evil, "device": evil, "versions": {evil: evil}}
        log.emit("run_started", resumed=True, **started)
        log.emit("run_finished", status="failed", reason=evil, seconds=1.0)
    groups = ("algorithm", "dataset", "partition", "search_space", "retrain")
    changes = dict.fromkeys(groups, {"name": evil, evil: evil})
    return with_config(folder, **changes, genotype=evil, stages=[evil])

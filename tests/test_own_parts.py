"""Ops, losses, networks and metrics of one's own: every space, privacy, workers, resume, export."""

import inspect
import os
import runpy
import threading
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Subset, TensorDataset

from fednas_flwr import compose, load, register_op, run
from fednas_flwr.api import register_data_set, register_loss, register_metric, register_network
from fednas_flwr.base import processes
from fednas_flwr.base.memory import OWN, described
from fednas_flwr.cli import VARIABLE, _run, main
from fednas_flwr.data.readers import DATA_SETS
from fednas_flwr.models.metrics import own_scores
from fednas_flwr.models.networks import make_network, make_space
from fednas_flwr.privacy.mechanism.record_gradients import record_gradients
from fednas_flwr.privacy.self_test import unwatched
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.search.objective import Objective, check_own_loss
from fednas_flwr.settings.registry import packed
from fednas_flwr.spaces.genotype import Edge, Genotype, save_genotype
from fednas_flwr.spaces.operations import MixedOp, OwnOp

from .finished_runs import assert_same_files, stop_at
from .processes import told, wait_for_workers
from .reference_engine import by_ops
from .refusals import refuses
from .watched import noting

IMAGES = {
    "darts": {"channels": 4, "num_cells": 3},
    "nasbench201": {"channels": 4, "num_cells": 1},
    "dp_cells": {"widths": [4, 4, 8], "head": 8, "activation": "tanh"},
    "dp_cells_darts": {"widths": [4, 4, 8], "head": 8, "activation": "tanh"},
    "mbconv": {"skeleton": "small", "candidates": "proxyless", "width": 1.0},
}
SPACES = {**IMAGES, "mlp": {"channels": 8, "num_cells": 2}}
SIZES = ("dataset.limit_train=300", "search_space.channels=4", "retrain.channels=4")
SMALL = (*SIZES, "rounds=2", "retrain.rounds=2")


def wide(channels, stride):
    return nn.Conv2d(channels, channels, 7, stride, 3, bias=False)


def focal(logits, labels):
    nats = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (1 - (-nats).exp()) ** 2 * nats


def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))


@pytest.fixture(autouse=True)
def _registered(only_here):
    """Register what the tests use, and forget it."""
    register_op("wide", wide)
    register_op("layer", lambda channels, stride: nn.Linear(channels, channels))
    register_op("blur", lambda channels, stride: nn.AvgPool2d(3, stride, 1))
    register_loss("focal", focal)
    register_network("small", small)


def space_of(name, norm="group", ops=("wide", "blur")):
    shape, own = ((6,), ("layer",)) if name == "mlp" else ((2, 9, 9), ops)
    settings = {"input_shape": shape, "num_classes": 3, "norm": norm, "own_ops": own}
    return make_space(name, **settings, **SPACES[name])


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_every_space_offers_it(name, norm):
    space = space_of(name, norm)
    added = [*space.own_ops]
    assert list(space.ops[-len(added) :]) == added
    supernet, x = space.supernet(), torch.randn(4, *space.input_shape)
    mixed = [module for module in supernet.modules() if isinstance(module, MixedOp)]
    assert all(tuple(edge.names) == space.ops for edge in mixed)
    supernet(x).sum().backward()
    for alphas in supernet.alphas().values():
        assert bool((alphas.grad[:, -len(added)] != 0).all())
    assert [n for n, p in supernet.weights().items() if "own" in n or ".wide." in n]
    alphas = torch.zeros(len(space.edges), len(space.ops))
    alphas[:, -len(added)] = 9
    genotype = space.derive(dict.fromkeys(space.kinds, alphas))
    assert {edge.op for edges in genotype.cells.values() for edge in edges} == {added[0]}
    network = space.network(genotype).eval()
    assert network(x).shape == (4, 3)
    assert sum(isinstance(module, OwnOp) for module in network.modules()) > 0


@pytest.mark.parametrize("name", ["darts", "nasbench201"])
def test_the_fast_supernet_computes_what_its_modules_do(name):
    supernet = space_of(name).supernet().double()
    x = torch.randn(3, 2, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(by_ops(supernet)(x), supernet(x))


@pytest.mark.parametrize("name", [*SPACES])
def test_private_gradients_are_those_of_each_record(name):
    torch.manual_seed(0)
    supernet = space_of(name, ops=("wide",)).supernet().double().train()
    shape = (6,) if name == "mlp" else (2, 9, 9)
    x, y = torch.randn(3, *shape, dtype=torch.float64), torch.tensor([0, 1, 2])
    for alphas in supernet.alphas().values():
        alphas.requires_grad_(False)
    weights = supernet.weights()
    objective = Objective(own_loss=focal)
    gradients = record_gradients(supernet, weights, objective.plain_losses, unwatched)
    found = {n: g for names, g in gradients(x, y) for n in names[:1] if len(names) == 1}
    own = [n for n in found if ".wide." in n or ".own." in n]
    assert own
    for record in range(3):
        loss = focal(supernet(x[record : record + 1]).float(), y[record : record + 1])
        alone = torch.autograd.grad(loss.sum(), [weights[n] for n in own])
        for n, gradient in zip(own, alone, strict=True):
            torch.testing.assert_close(found[n][record], gradient, atol=1e-6, rtol=1e-4)


def test_private_layers_without_known_gradients_are_refused():
    register_op("odd", lambda channels, stride: nn.PReLU(channels))
    supernet = space_of("nasbench201", ops=("odd",)).supernet().train()
    with pytest.raises(ValueError, match=r"build it of nn\.Conv2d, nn\.Linear and nn\.GroupNorm"):
        record_gradients(supernet, supernet.weights(), Objective().plain_losses, unwatched)


class Mixing(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Listing(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.layers = [nn.Linear(*widths)]

    def forward(self, x):
        return self.layers[0](x)


WRONG_OPS = [
    (lambda channels, stride: nn.Conv2d(channels, 3, 1), r"expected \[2, 4, 5, 5\]"),
    (lambda channels, stride: nn.Linear(7, 7), "the op wrong of your own fails: "),
    (lambda channels, stride: Mixing(), "each record computed by itself"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_OPS)
def test_an_op_that_is_wrong_is_told_in_one_sentence(make, message):
    register_op("wrong", make)
    refuses(message, space_of("nasbench201", ops=("wrong",)).supernet)


def tied(shape, classes):
    layer = nn.Linear(*shape, *shape)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(*shape, classes))


WRONG_NETWORKS = [
    (tied, "2.weight and 0.weight are one tensor"),
    (lambda _, classes: nn.Linear(9, classes).requires_grad_(False), "weight is frozen, make it a"),
    (lambda _, classes: nn.LazyLinear(classes), "weight has no shape yet, give the layer its"),
    (lambda _, classes: nn.RNN(9, classes), "it returns a tuple, expected one tensor"),
    (lambda shape, classes: small(shape, 7), r"turns \[2, 9\] into \[2, 7\]: expected \[2, 3\], a"),
    (lambda shape, classes: nn.Linear(5, classes), "the network odd of your own fails: "),
    (lambda shape, classes: None, "the network odd of your own fails: "),
    (lambda shape, classes: nn.Sequential(Mixing(), small(shape, classes)), "on no other record"),
    (lambda shape, classes: nn.Sequential(small(shape, classes), nn.Softmax(1)), "out its softmax"),
    (lambda shape, classes: Listing(9, classes), "weights unknown to torch, keep lists of layers"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_NETWORKS)
def test_a_network_that_is_wrong_is_told_in_one_sentence(make, message):
    register_network("odd", make)
    refuses(message, make_network, {"name": "odd", "input_shape": [9], "num_classes": 3})


def test_names_are_checked():
    for register, name, own, words in (
        (register_op, "wide", wide, "op=wide exists"),
        (register_network, "linear", small, "network=linear exists"),
        (register_loss, "huber", focal, "loss=huber exists"),
        (register_loss, "Null", focal, "loss='Null' is no name"),
        (register_metric, "AUROC", lambda p, y: 0.0, "metric=AUROC exists"),
    ):
        refuses(words, register, name, own)
    for op, words in (("nope", "the name of an op"), ("none", "the name .* none of none, skip")):
        refuses(f"own_ops={op} must be {words}", space_of, "nasbench201", ops=(op,))


def test_a_loss_sees_one_record_at_a_time():
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    factors = torch.tensor([1.0, 0.5, 0.1])
    objective = Objective(factors, own_loss=lambda one, label: focal(one, label).mean())
    expected = focal(logits, labels)
    torch.testing.assert_close(objective.losses(logits, labels), expected * factors[labels])
    torch.testing.assert_close(objective.plain_losses(logits, labels), expected)
    plain = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(objective.tested_losses(logits, labels), plain)
    wrong = Objective(own_loss=lambda one, label: one)
    refuses(r"returns \[1, 3\] for the logits of one record", wrong.losses, logits, labels)
    weighted = nn.CrossEntropyLoss(weight=factors, reduction="sum")
    for right in (weighted, lambda one, label: -one.log_softmax(1)[0, label[0]]):
        check_own_loss("right", right, logits, labels)


FAILS = "fails: .* use tensor operations only"
WRONG_LOSSES = [
    (lambda *_: torch.zeros(1), FAILS),
    (lambda one, _: one.max().item(), FAILS),
    (lambda one, label: focal(one, label) - 0.1, "is -0.0999 for some outputs"),
    (nn.CrossEntropyLoss(weight=torch.tensor([1.0] * 9 + [5])), "divides by its records' weights"),
]


@pytest.mark.parametrize(("loss", "words"), WRONG_LOSSES)
def test_a_loss_that_is_wrong_ends_a_run_before_it_begins(loss, words, tmp_path):
    register_loss("odd", loss)
    words = f"training.loss=odd of your own {words}"
    refuses(words, run, composed(tmp_path / "run", "training.loss=odd"))
    assert not (tmp_path / "run").exists()


def test_batch_norm_of_ones_own_ends_a_private_run_before_it_begins(tmp_path):
    register_network("odd", lambda _, classes: nn.Sequential(nn.BatchNorm2d(1), small((64,), 10)))
    own = ("privacy=dp", "algorithm=fedavg", "algorithm.network=odd", f"run_dir={tmp_path / 'run'}")
    config = compose("dataset.limit_train=300", f"dataset.cache={tmp_path}", *own)
    refuses("0 is batch normalisation or keeps running statistics", run, config)


def test_a_layer_that_onnx_lacks_ends_a_run_before_training(tmp_path):
    def make(shape, classes):
        norm = nn.InstanceNorm2d(1, affine=True, track_running_stats=True)
        return nn.Sequential(norm, nn.Flatten(), nn.Linear(64, classes))

    register_network("odd", make)
    own = ("algorithm=fedavg", "algorithm.network=odd", f"run_dir={tmp_path / 'run'}")
    config = compose("dataset.limit_train=300", f"dataset.cache={tmp_path}", *own)
    words = r"the network odd cannot be exported as ONNX \(Unsupported: .* instance_norm"
    refuses(words, run, config, error=RuntimeError)
    assert not read_run(tmp_path / "run").last("round")


def test_an_error_in_ones_own_file_has_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def fail():\n    return {}['alfas']\n")
    with pytest.raises(KeyError) as failure:
        runpy.run_path(str(tmp_path / "mine.py"), run_name=OWN)["fail"]()
    assert described(failure.value) == f"KeyError: 'alfas' (line 2 of {tmp_path / 'mine.py'})"


def composed(folder, *settings):
    return compose(*SMALL, f"run_dir={folder}", f"dataset.cache={folder.parent}", *settings)


def test_a_model_with_an_op_is_exported(tmp_path):
    edges = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    cell = tuple(Edge("wide" if s == 0 else "blur", s, t) for s, t in edges)
    save_genotype(tmp_path / "cell.json", Genotype("nasbench201", {"cell": cell}))
    settings = ("stages=[retrain,evaluate,export]", f"genotype={tmp_path / 'cell.json'}")
    own = ("dataset.limit_train=300", "retrain.rounds=2", "search_space.own_ops=[wide,blur]")
    places = (f"run_dir={tmp_path / 'run'}", f"dataset.cache={tmp_path}")
    folder = run(compose(*own, *places, *settings)).folder
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (shares,) = session.run(["probabilities"], {"images": images})
    np.testing.assert_allclose(shares, load(folder).predict(images).probabilities, atol=1e-5)
    assert "op wide, op blur" in (folder / "report.html").read_text()


@pytest.mark.run
def test_all_are_used_and_resumed_by_processes_of_this_machine_too(tmp_path, monkeypatch):
    register_metric("Brier", lambda p, y: float(np.mean((1 - p[np.arange(len(y)), y]) ** 2)))
    settings = ("search_space.own_ops=[wide]", "training.loss=focal")
    whole = run(composed(tmp_path / "whole", *settings))
    assert 0 < whole.scores["central"]["own"]["Brier"] < 1
    assert "op wide, loss focal, metric Brier" in (whole.folder / "report.html").read_text()
    plain = run(composed(tmp_path / "plain"))
    assert plain.scores["central"]["loss"] != whole.scores["central"]["loss"]
    monkeypatch.setattr("fednas_flwr.deploy.local_actors.PATIENCE_S", 0.0)
    monkeypatch.delenv(processes.ALONE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    answered = noting(monkeypatch, processes, "_call", lambda *_: 1)  # it raises if one has died
    part = composed(tmp_path / "part", *settings)
    listeners = [wait_for_workers, stop_at("round", stage="retrain")]
    refuses("", run, part, listeners=listeners, error=KeyboardInterrupt)
    assert len(answered) > 4
    resumed = run(tmp_path / "part")
    assert resumed.genotype == whole.genotype
    assert resumed.scores["central"] == whole.scores["central"]


USED = ("search_space.own_ops=[wide]", "training.loss=focal", "rounds=1")
OWN_FILE = f"""
from torch import nn
from torch.nn import functional
from fednas_flwr import register_loss, register_op

{inspect.getsource(wide)}
{inspect.getsource(focal)}
register_op("wide", wide)
register_loss("focal", focal)
"""


@pytest.mark.run
@pytest.mark.ray
def test_workers_of_ray_know_them(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FILE)
    settings = [*SMALL, *USED, f"dataset.cache={tmp_path}", f"run_dir={tmp_path / 'ray'}"]
    told("-m", "fednas_flwr", "run", "--with", tmp_path / "own.py", *settings, "runtime=ray")
    assert_same_files(tmp_path / "ray", run(composed(tmp_path / "here", *USED)).folder)


def test_data_sets_and_loaders_of_torch_are_read(tmp_path):
    x = torch.rand(90, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0.5).long()
    whole, first = TensorDataset(x.bfloat16().requires_grad_(), y), range(60)
    train, test = Subset(whole, first), Subset(whole, range(60, 90))
    batches = torch_data.BatchSampler(
        torch_data.SubsetRandomSampler(test.indices), 16, drop_last=False
    )
    chosen = DataLoader(whole, 16, sampler=torch_data.SubsetRandomSampler(first))
    register_data_set("loaders", lambda path: (chosen, DataLoader(whole, batch_sampler=batches)))
    register_data_set("three", lambda path: (train, Subset(whole, [3]), test))
    register_data_set("named", {"x_train": x, "y_train": np.array(["a", "b"], dtype=object)[y]})
    x_y = DataLoader(whole, sampler=[*first]), DataLoader(whole, batch_sampler=[[60, 61], [62, 63]])
    register_data_set("list", lambda path: {"train": x_y[0], "validation": test})
    register_data_set("batches", lambda path: x_y)
    weighted = torch_data.WeightedRandomSampler([1.0] * 90, 90)
    register_data_set("weighted", lambda path: DataLoader(whole, sampler=weighted))
    register_data_set("one", lambda path: DATA_SETS["parts"].read(None, path)[:1])
    register_data_set("wrong", lambda path: iter(train))
    items = [{"image": x[i], "label": y[i]} for i in range(90)]
    hub = type("Hub", (list,), {"features": {"label": SimpleNamespace(names=["b", "c"])}})
    register_data_set("parts", lambda path: {"train": hub(items[:60]), "test": items[60:]})
    register_data_set("table", lambda path: pd.DataFrame({"x": [1, 2]}))
    whole.labels, whole.classes = y, ["0", "1"]  # as MedMNIST's and torchvision's have
    for name in ("loaders", "three", "parts", "list"):
        parts = DATA_SETS[name].read(None, tmp_path)
        assert [of.labels.tolist() for of in parts] == [y[:60].tolist(), y[60:].tolist()]
    assert [of and len(of) for of in DATA_SETS["one"].read(None, tmp_path)] == [60, None]
    for name, classes in {"loaders": ("0", "1"), "named": ("a", "b"), "parts": ("b", "c")}.items():
        own = ("algorithm=fedavg", "algorithm.network=small", "clients=2", "retrain.rounds=1")
        places = (f"dataset.cache={tmp_path}", f"run_dir={tmp_path / name}")
        result = run(compose(f"dataset={name}", *own, *places))
        assert result.model.class_names == classes
        assert result.scores["central"]["accuracy"] >= 0
    (note, *_) = DATA_SETS["three"].read(None, tmp_path)[0].notes
    assert note == "the last part is the test set, and none between it and the first is read"
    for name in ("wrong", "table", "weighted", "batches"):
        wrong = compose(f"dataset={name}", "clients=2", f"dataset.cache={tmp_path}")
        refuses("expected Records, or torch data sets", run, wrong)


def test_what_cannot_be_sent_stays_in_this_process():
    assert packed(len) is not None
    lock = threading.Lock()
    register_metric("locked", lambda p, y: float(lock.locked()))
    assert packed(len) is None


# --- names of one's own on the command line: --with <file.py>


MINE = """
import numpy as np
from fednas_flwr import register_data_set, register_metric

rng = np.random.default_rng(0)
y = rng.integers(0, 2, 90)
x = (rng.integers(0, 120, (90, 8, 8)) + 100 * y[:, None, None]).astype("uint8")
arrays = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
register_data_set("scans", arrays)
register_metric("Brier", lambda p, y: float(np.mean((p[:, 1] - y) ** 2)))
"""
WITH = ("dataset=scans", "algorithm=fedavg", "algorithm.network=linear", "clients=2")
WITH += ("stages=[retrain,evaluate,export]", "retrain.rounds=1")


@pytest.fixture(autouse=True)
def _forgotten_files(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    yield
    _run.cache_clear()


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.run
def test_a_data_set_and_a_score_of_ones_own_are_used(mine, tmp_path):
    folder, cache = tmp_path / "run", f"dataset.cache={tmp_path / 'cache'}"
    assert main(["run", "--with", str(mine), *WITH, cache, f"run_dir={folder}"]) == 0
    assert 0 < read_run(folder).scores("central")["own"]["Brier"] < 1
    assert "Brier" in (folder / "report.html").read_text()
    assert os.environ[VARIABLE] == str(mine)
    again = ["run", "--with", str(mine), *WITH, cache, f"run_dir={tmp_path / 'again'}"]
    assert main(again) == 0  # in this process nothing is registered twice


WRONG_FILES = [
    (None, "is no file: give one of Python"),
    ("import fednas_flwr\nx = 1\nfednas_flwr.registr()\n", "fails in line 3: AttributeError"),
    ("def f(:\n", "fails: SyntaxError"),
    ("import fednas_flwr\nfednas_flwr.register_data_set('digits', {})\n", "digits exists: ch"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_a_file_that_is_wrong_is_told_in_one_sentence(text, message, tmp_path, prints):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    sentence = prints("run", "--with", path, "--dry-run", code=2)
    assert message in sentence
    assert str(path) in sentence
    assert sentence.count("\n") == 1


@pytest.mark.slow
def test_jobs_of_a_sweep_learn_of_what_is_ones_own(mine, tmp_path):
    own = ("-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    own += (f"dataset.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}")
    assert "2 of 2 jobs completed" in told("-m", "fednas_flwr", "run", "--with", mine, *WITH, *own)


def test_a_score_may_change_what_it_is_given():
    register_metric("sorts", lambda p, y: float(p.sort(axis=1) or y.sort() or 1))
    given = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double(), torch.tensor([1, 0])
    before = [one.clone() for one in given]
    assert own_scores(*given) == {"sorts": 1.0}
    assert all(map(torch.equal, given, before))


@pytest.mark.run
@pytest.mark.parametrize("score", [lambda p, y: np.nan, lambda p, y: p[:, 99].mean()])
def test_a_score_that_fails_ends_the_run_in_one_sentence(score, mine, tmp_path, capsys):
    register_metric("wrong", score)
    cache, folder = f"dataset.cache={tmp_path / 'cache'}", tmp_path / "run"
    assert main(["run", "--with", str(mine), *WITH, cache, f"run_dir={folder}"]) != 0
    assert "the metric wrong of your own" in (said := capsys.readouterr().err)
    assert "let it return one finite number, and go on by fednas run resume=" in said
    assert (folder / "model.onnx").exists()
    refuses("metric=wrong exists", register_metric, "wrong", score)
    refuses("metric=AUROC exists", register_metric, "AUROC", score)

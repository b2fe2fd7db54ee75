"""``training.precision=auto``: bfloat16 in retraining where it gains, and where it is to be had."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fednas_flwr.pipeline import later_settings
from fednas_flwr.pipeline.later_settings import with_precision
from fednas_flwr.runs.numbers import read_run

LINEAR = [
    *("algorithm=fedavg", "algorithm.network=plain_cnn", "stages=[retrain,export]", "clients=2"),
    *("retrain.rounds=1", "runtime.device=cpu"),
]


@pytest.fixture
def trained(run_inline, monkeypatch):
    """``trained(precision)``: a run's files, on a processor that has bfloat16 or not."""

    def run(precision, *more, has_it=True, least=1):
        monkeypatch.setattr(later_settings, "computes_in_bfloat16", lambda device: has_it)
        monkeypatch.setattr(later_settings, "LEAST_MULTIPLY_ADDS", least)
        return run_inline(*LINEAR, f"training.precision={precision}", *more)

    return run


def content(run):
    return (run.folder / "model.safetensors").read_bytes()


def test_auto_is_bfloat16_where_the_network_is_large_enough_and_the_processor_has_it(trained):
    single, half = content(trained("float32")), content(trained("bfloat16"))
    assert single != half
    assert content(trained("auto")) == half
    assert content(trained("auto", has_it=False)) == single
    assert content(trained("auto", least=10**9)) == single


@pytest.mark.parametrize(
    ("alike", "as_well", "other"),
    [
        (["training.precision=auto"], ["training.precision=bfloat16"], []),
        (["dataset.flip=true", "retrain.unaugmented=0.5"], [], ["dataset.flip=true"]),
    ],
)
def test_what_a_client_trains_for_itself_is_trained_as_in_the_last_round(
    alike, as_well, other, trained
):
    tested = ["stages=[retrain,evaluate,export]", "evaluation.personalised=true"]
    runs = [trained("float32", *tested, *more) for more in (alike, as_well, other)]
    first, same, differs = (read_run(r.folder).last("evaluated")["personalised"] for r in runs)
    assert first == same != differs


def test_a_resumed_run_keeps_the_format_that_it_began_with(trained, monkeypatch):
    run = trained("auto")
    assert read_run(run.folder).last("precision")["precision"] == "bfloat16"
    monkeypatch.setattr(later_settings, "computes_in_bfloat16", lambda device: False)
    gone = SimpleNamespace(folder=run.folder)
    assert with_precision(gone, run.config).training.precision == "bfloat16"


def test_auto_is_float32_on_a_gpu(trained, monkeypatch):
    run = trained("float32")
    auto = replace(run.config, training=replace(run.config.training, precision="auto"))
    begun = SimpleNamespace(folder=run.folder, log=SimpleNamespace(emit=lambda *_, **__: None))
    assert with_precision(begun, auto).training.precision == "bfloat16"
    monkeypatch.setattr(later_settings, "make_device", lambda name: torch.device("cuda"))
    assert with_precision(begun, auto).training.precision == "float32"


def test_private_training_stays_float32(trained):
    private = ["privacy=dp", "retrain.norm=group", "privacy.micro_batch_size=16"]
    run = trained("auto", *private)
    assert read_run(run.folder).last("precision")["precision"] == "float32"

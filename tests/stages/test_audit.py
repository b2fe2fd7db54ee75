"""`fednas audit` on made data: the real client passes, one with a fault in it does not."""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
import torch
from fednas_flwr.stages.audit import audit_search
from fednas_flwr.stages.canaries import LAYER, MARK, Canaries, beside, direction, with_canaries

from fednas_flwr.builders.clients import make_client
from fednas_flwr.builders.data import make_data
from fednas_flwr.cli import main
from fednas_flwr.cli.outcomes import INCONCLUSIVE, RUN_FAILED
from fednas_flwr.data.loaders import Split, augment
from fednas_flwr.errors import ConfigError
from fednas_flwr.federation.dry_run import private_terms
from fednas_flwr.privacy.clipping import clipped_gradient_sum
from fednas_flwr.privacy.noise import SecureGenerator
from fednas_flwr.search.objective import CLASSIFICATION

from .faulty_client import FAULTS

CAUGHT = ("no noise", "half the noise", "no clipping", "clipping after the sum")
SETTINGS = (
    *("algorithm=dp_fnas", "privacy=dp", "search_space.norm=group", "retrain.norm=group"),
    *("clients=1", "rounds=1", "algorithm.batch_size=null", "privacy.weights.noise_multiplier=1"),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a private search on a made table, whose steps take milliseconds."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(120, 3)).round(3)
    lines = ["a,b,c,label", *(f"{a},{b},{c},{'no' if a < b else 'yes'}" for a, b, c in rows)]
    folder = tmp_path_factory.mktemp("table")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return [
        *SETTINGS,
        *("dataset=csv", f"dataset.root={folder / 'table.csv'}", "dataset.label=label"),
        "dataset.statistics={a: [0, 1], b: [0, 1], c: [0, 1]}",
        *(f"dataset.cache={folder / 'cache'}", "search_space=mlp_small"),
        *("search_space.channels=8", "device=cpu"),
    ]


def command(fault: str, overrides: list[str]) -> tuple[int, str]:
    """Return exit code and output of `fednas audit` with a fault in it, here for so long."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        for (module, name), mutant in FAULTS[fault].items():
            patch.setattr(module, name, mutant)
        code = main(["audit", *overrides])
    return code, said.getvalue()


def test_the_command_passes_an_honest_client_and_says_what_it_could_have_shown(table):
    code, said = command("honest", table)
    assert code == 0, said
    assert "1024 canaries" in said
    assert "for any mechanism; claimed: 4.38. Without any noise this audit shows 5.07." in said
    assert "if the noise is Gaussian; claimed: 4.38. Without any noise this audit shows" in said
    assert "A client with half its noise, or twice its clipping norm, fails" in said
    assert said.endswith("The audit does not refute the claim.\n")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("no noise", marks=pytest.mark.slow),
        "half the noise",
        "no clipping",
        pytest.param("clipping after the sum", marks=pytest.mark.slow),
    ],
)
def test_the_command_fails_a_client_with_a_fault(table, fault):
    code, said = command(fault, table)
    assert code == RUN_FAILED, said
    assert "the audit refutes the claim" in said


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "least"), [("honest", 20), *((fault, 19) for fault in CAUGHT)])
def test_the_command_is_right_in_nineteen_of_twenty_runs(table, fault, least):
    """By its confidence it fails 1 of 100 honest clients at most, and really far fewer."""
    codes = [command(fault, table)[0] for _ in range(20)]
    assert codes.count(0 if fault == "honest" else RUN_FAILED) >= least, codes


def test_what_cannot_be_refuted_is_inconclusive(table):
    """At this noise no one run can show what is claimed, 10.9, not even without noise."""
    code, said = command("honest, few runs", [*table, "privacy.weights.noise_multiplier=0.5"])
    assert code == INCONCLUSIVE, said
    assert "claimed: 10." in said
    assert "inconclusive" in said
    assert "does not refute" not in said


def test_half_the_noise_that_too_few_runs_can_tell_is_inconclusive(
    table, compose_config, monkeypatch
):
    monkeypatch.setattr("fednas_flwr.stages.audit.MOST_RUNS", 200)
    one, many = audit_search(compose_config(*table)).findings
    assert one.is_conclusive
    assert many.largest > many.claim
    assert not many.shows_half
    assert not many.is_conclusive


def test_canaries_are_of_a_class_whose_loss_counts_in_full(table, compose_config, monkeypatch):
    """With canaries of the other class a fifth of the signal would be left."""
    monkeypatch.setattr("fednas_flwr.stages.audit.MOST_RUNS", 20)
    for name in ("yes", "no"):
        one, _ = audit_search(compose_config(*table, f"class_factors={{{name}: 0.2}}")).findings
        assert 0.3 < one.epsilon < one.claim


def test_images_and_poisson_batches(compose_config, monkeypatch):
    """Also with augmentation, and another clipping norm."""
    monkeypatch.setattr("fednas_flwr.stages.audit.MOST_RUNS", 200)
    config = compose_config(
        *(*SETTINGS, "algorithm.batch_size=16", "rounds=2", "privacy.weights.max_grad_norm=0.3"),
        *("dataset.crop_padding=1", "dataset.flip=true"),
    )
    audit = audit_search(config, confidence=0.95)
    one, many = audit.findings
    assert "2 steps at rate 0.4" in one.seen
    assert 0 < one.epsilon < one.claim < one.largest
    assert many.epsilon < many.claim < many.largest
    assert not one.refutes
    assert not many.refutes
    assert one.is_conclusive
    assert (audit.delta, audit.confidence) == (1e-5, 0.95)


def test_a_share_of_the_records_is_the_rate_of_audited_steps(table, compose_config, monkeypatch):
    monkeypatch.setattr("fednas_flwr.stages.audit.MOST_RUNS", 20)
    settings = [setting for setting in table if not setting.startswith("algorithm.batch_size")]
    one, many = audit_search(compose_config(*settings, "privacy.rate=0.25")).findings
    assert "1 step at rate 0.25" in one.seen
    assert "at rate 1," in many.seen


def test_what_cannot_be_audited_is_said(compose_config):
    with pytest.raises(ConfigError, match="set algorithm=dp_fnas"):
        audit_search(compose_config())
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match="expected a number between 0 and 1"):
            audit_search(compose_config(*SETTINGS), confidence=confidence)


def test_noise_that_is_calibrated_is_audited_as_a_run_would_have_it(
    table, compose_config, monkeypatch
):
    monkeypatch.setattr("fednas_flwr.stages.audit.MOST_RUNS", 20)
    null = "privacy.weights.noise_multiplier=null"
    calibrated = compose_config(*table, null)
    told = re.search(
        r"weights on train: noise multiplier ([\d.]+)", "\n".join(private_terms(calibrated))
    )
    assert told is not None
    given = compose_config(*table, f"privacy.weights.noise_multiplier={told.group(1)}")
    claims = [[found.claim for found in audit_search(c).findings] for c in (calibrated, given)]
    assert claims[0] == pytest.approx(claims[1], rel=0.05)


SUMS = ("clients=3", "secure_sum=true", "secure_terms={least_sites: 3, colluding: 1}")


def test_totals_are_audited_as_a_server_sees_them_that_a_client_helps(
    table, compose_config, monkeypatch
):
    monkeypatch.setattr("fednas_flwr.stages.audit.MOST_RUNS", 60)
    config = compose_config(*table, *SUMS)
    one, many = audit_search(config).findings
    assert "totals of 3 clients, 1 with the server, 1024 canaries" in one.seen
    assert "60 runs of 1 step at rate 1, totals of 3 clients" in many.seen
    assert not one.refutes
    assert not many.refutes
    assert one.claim == pytest.approx(4.38, abs=0.01)

    def no_share(total, *_, cell, **__):
        return (total.double() / cell).round() * cell

    monkeypatch.setattr("fednas_flwr.clients.release.add_shared_noise", no_share)
    coins = SecureGenerator(test_seed=b"1")  # as many canaries out as in, within what is guessed
    monkeypatch.setattr("fednas_flwr.stages.audit.SecureGenerator", lambda: coins)
    one, many = audit_search(config).findings
    assert one.refutes
    assert many.refutes


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["honest", "half the shares", "no clipping"])
def test_the_command_fails_clients_whose_totals_have_a_fault(table, fault):
    code, said = command(fault, [*table, *SUMS])
    assert "totals of 3 clients, 1 with the server" in said
    assert code == (0 if fault == "honest" else RUN_FAILED), said


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("space", ["darts_small", "nasbench201_small"])
def test_a_canarys_clipped_gradient_is_the_crafted_one(compose_config, space, engine):
    """In one column, of the clipping norm, either way round; other records have nothing there."""
    plain = ("algorithm=fnas", "search_space.norm=group", "clients=1")
    config = compose_config(*plain, f"search_space={space}")
    data = make_data(config)
    client = make_client(config, 0, data=data, networks={})
    canaries = Canaries([0, 1, 1], [1e5, 1e5, -1e3])
    plain_supernet = replace(client.make_space(), engine=engine).supernet()
    supernet = with_canaries(plain_supernet, canaries, num_classes=3).train()
    x = torch.zeros(1, 3, 8, 8)
    label, direction_C = direction(supernet, x, factors=[1.0, 1.0, 1.0])
    assert supernet(x).argmin() == label
    split = beside(client.data.train, num_records=10, num_marks=3, label=label)
    assert len(split) == 13
    x_real, y_real = client.data.train.batch(torch.arange(10), "cpu")
    x, y = split.batch(torch.arange(13), "cpu")
    assert torch.equal(x[:10], x_real)
    assert torch.equal(y[:10], y_real)
    assert supernet(x_real).std() > 0

    def summed(rows):
        x, y = split.batch(torch.tensor(rows), "cpu")
        return clipped_gradient_sum(
            supernet,
            x,
            y,
            loss=CLASSIFICATION.plain_losses,
            parameters=supernet.weights(),
            max_norm=0.25,
        )

    for row, column, sign in ((10, 0, 1), (11, 1, 1), (12, 1, -1)):
        sums = summed([row])
        crafted = torch.zeros(3, 2, dtype=torch.float64)
        crafted[:, column] = sign * 0.25 * direction_C
        assert torch.allclose(sums[LAYER], crafted, atol=2e-3)
        elsewhere = [total.norm() for name, total in sums.items() if name != LAYER]
        assert torch.stack(elsewhere).norm() < 0.02
    real = summed(list(range(10)))
    assert not real[LAYER].any()
    assert any(total.any() for total in real.values())


def test_a_mark_outlives_augmentation_and_values_of_records_are_no_marks():
    split = Split(
        torch.tensor([[1.0, -5.0], [3e38, 2.0**20]]),
        torch.tensor([0, 1]),
        torch.tensor([1, 0]),
        mean=(0.0, 0.0),
        std=(1.0, 1.0),
    )
    planted = beside(split, num_records=5, num_marks=2, label=1)
    x, y = planted.batch(torch.arange(len(planted)), "cpu")
    assert (x[:2].amax(dim=1) < MARK).all()
    assert x[2:].tolist() == [[MARK, MARK], [MARK + 1, MARK + 1]]
    assert y.tolist() == [1, 0, 1, 1]
    images = (MARK + torch.arange(40.0)).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    generator = torch.Generator().manual_seed(0)
    changed = augment(images, generator=generator, crop_padding=2, flip=True, cutout=4)
    assert torch.equal(changed.flatten(1).amax(dim=1), MARK + torch.arange(40.0))

"""A private run of which the unit is a person: what is drawn, declared and promised."""

import re
import shutil

import numpy as np
import pytest

from fednas_flwr import cli, compose, run
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.runs.events import read_events

from ..booked import booked

SIZES = ("search_space=mlp_small", "search_space.channels=8", "retrain.channels=8")
PERSONS = 60


@pytest.fixture
def table(tmp_path):
    """60 patients with one to four rows each."""
    rng = np.random.default_rng(0)
    rows = [
        f"p{patient},{rng.normal():.4f},{rng.normal() + patient % 2:.4f},{patient % 2}"
        for patient in range(PERSONS)
        for _ in range(1 + patient % 4)
    ]
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(["patient,a,b,ill", *rows]) + "\n")
    return path


@pytest.fixture
def overrides(table, tmp_path):
    return [
        *("algorithm=dp_fnas", "privacy=dp", *SIZES, "search_space.norm=group"),
        *("retrain.norm=group", "rounds=1", "retrain.rounds=1", "clients=2", "runtime.device=cpu"),
        *("algorithm.batch_size=6", "retrain.batch_size=6", "privacy.epsilon=100"),
        *("privacy.metrics_noise_multiplier=5", "privacy.micro_batch_size=4"),
        *("dataset=csv", f"dataset.root={table}", f"dataset.cache={tmp_path / 'cache'}"),
        *("dataset.id_column=patient", "dataset.statistics={a: [0, 1], b: [0, 1]}"),
        *("dataset.server_test=false", "trackers=[]"),
    ]


@pytest.mark.run
def test_persons_are_drawn_declared_and_promised(overrides, tmp_path):
    folder = run(compose(*overrides, f"run_dir={tmp_path / 'run'}")).folder
    events = read_events(folder / "events.jsonl")
    (private,) = [event for event in events if event["event"] == "privacy"]
    assert [client["unit"] for client in private["clients"]] == ["person", "person"]
    declared = [client["records"] for client in private["clients"]]
    # rounded down for each split, of 30 persons each
    assert [sum(records.values()) for records in declared] == [30, 30]
    rates = {row.action: row.release.sample_rate for row in booked(folder / "sites")}
    assert rates["train.weight_gradient:weights"] == pytest.approx(6 / declared[0]["train"])
    card = re.sub(r"\s+", " ", (folder / "MODEL_CARD.md").read_text())
    assert "per person, add/remove" in card
    assert "per record" not in card
    assert "One person with all records of one client" in card
    assert "A person contributes the mean of their records" in card


@pytest.mark.run
def test_the_policy_and_the_data_must_name_the_same_unit(overrides, tmp_path):
    sites = tmp_path / "sites"
    once = [*overrides, f"privacy.sites={sites}"]
    run(compose(*once, f"run_dir={tmp_path / 'run'}"))
    records = [text for text in once if not text.startswith("dataset.id_column")]
    with pytest.raises(ConfigError, match="policy has unit: person, but the data does not say"):
        run(compose(*records, "dataset.ignore=[patient]", f"run_dir={tmp_path / 'other'}"))
    for policy in sites.glob("*/policy.yaml"):
        policy.write_text(policy.read_text().replace("unit: person", "unit: record"))
    with pytest.raises(ConfigError, match="policy has unit: record, but dataset.id_column says"):
        run(compose(*once, f"run_dir={tmp_path / 'third'}"))
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "third").exists()


@pytest.mark.run
def test_another_unit_keeps_the_budget_and_a_new_one_says_its_gap(overrides, tmp_path, capsys):
    """Releases per record promise nothing to persons, whatever the policy says afterwards."""
    sites = tmp_path / "sites"
    by_person = [*overrides, f"privacy.sites={sites}"]
    by_record = [text for text in by_person if not text.startswith("dataset.id_column")]
    first = run(compose(*by_record, "dataset.ignore=[patient]", f"run_dir={tmp_path / 'run'}"))
    assert "under budgets other than" not in (first.folder / "MODEL_CARD.md").read_text()
    policies = list(sites.glob("*/policy.yaml"))
    for policy in policies:
        text = policy.read_text().replace("unit: record", "unit: person")
        policy.write_text(re.sub(r"records: \d+", f"records: {PERSONS // 2}", text))
    with pytest.raises(ConfigError, match="more than what is left of budgets covers"):
        run(compose(*by_person, f"run_dir={tmp_path / 'second'}"))
    kept = tmp_path / "kept"
    shutil.copytree(sites, kept)
    for policy in policies:
        policy.write_text(policy.read_text() + "    account: per-person\n")
    third = run(compose(*by_person, f"run_dir={tmp_path / 'third'}"))
    card = re.sub(r"\s+", " ", (third.folder / "MODEL_CARD.md").read_text())
    assert "per person, add/remove" in card
    assert (
        "have also released under budgets other than this run's, per record. Where that was of "
        "the same records, epsilon leaves it out." in card
    )
    books = [str(sites / "client-0" / "ledger" / "ledger.sqlite"), "--key"]
    books.append(str(sites / "client-0" / "key"))
    capsys.readouterr()
    assert cli.main(["ledger", "show", *books]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    left_out = "per-person does not count what was booked on records (per record), if that was of"
    assert f"{left_out} the same records." in shown
    for client in range(2):  # the refused run has booked nothing
        assert {row.unit for row in booked(kept, client)} == {"record"}
    units = {row.account: row.unit for row in booked(sites)}
    assert units["per-person"] == "person by patient"

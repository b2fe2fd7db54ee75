"""Whole private runs of which the unit is the client: what is released, shared and promised."""

import re

import numpy as np
import pytest

from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.unused import without_effect

from ..booked import booked, decoded_totals
from ..refusals import refuses_run

SIZES = ("channels=2", "num_cells=1")
CLIENTS = [
    *("privacy=dp", "privacy.unit=client", "privacy.epsilon=200", "clients=4", "secure_sum=true"),
    *("secure_sum={least_sites: 3, colluding: 1}", "retrain.batch_size=8"),
    *("privacy.weights.noise_multiplier=null", "privacy.alphas.noise_multiplier=null"),
    *("rounds=2", "retrain.rounds=2", "retrain.local_epochs=2"),
    "dataset.fractions={train: 0.4, validation: 0.3, test: 0.3}",
]
SEARCH = [
    *(f"{part}.{size}" for part in ("search_space", "retrain") for size in SIZES),
    *("algorithm.local_epochs=2", "algorithm.batch_size=8"),
]
RUNS = {
    "fed_darts": [*SEARCH, "algorithm.rule=mixed_level"],
    "feathers": [*SEARCH, "algorithm.num_configurations=3", "algorithm.nas_rounds=2"],
    "fedavg": ["algorithm.network=linear"],
}
# What two rounds release, by algorithm: action, kind, steps, whether noise is shared. The first one
# explores, by three trials at most.
SEARCHED = [("train.search", "weights", 2, True), ("train.search", "alphas", 2, True)]
RETRAINED = ("train.weights", "weights", 2, True)
PLANS = {
    "fed_darts": [*SEARCHED, RETRAINED],
    "feathers": [
        *SEARCHED,
        ("train.probe", "rewards", 3, False),
        RETRAINED,
        ("train.probe", "rewards", 3, False),
    ],
    "fedavg": [RETRAINED],
}


@pytest.mark.parametrize("algorithm", RUNS)
def test_clients_release_one_update_an_exchange(algorithm, run_inline):
    ran = run_inline(*CLIENTS, f"algorithm={algorithm}", *RUNS[algorithm])
    private = ran.the("privacy")
    schedule = private["schedule"]
    assert {tuple(planned["splits"]) for planned in schedule} == {SPLITS}
    assert {planned["batch_size"] for planned in schedule} == {None}
    terms = [(p["action"], p["kind"], p["steps"], p["shared"]) for p in schedule]
    assert terms == PLANS[algorithm]
    for client in private["clients"]:
        assert (client["unit"], client["records"]) == ("client", dict.fromkeys(SPLITS, 1))
        assert set(client["rates"]) == {1.0}
        assert len(set(client["epsilon"]["prv"].values())) == 1  # of all splits alike
    entries = booked(ran.folder / "sites")
    assert {entry.splits for entry in entries} == {SPLITS}
    assert {entry.action for entry in entries} == {
        f"{action}:{kind}{' (noise of 2 sites)' if shared else ''}"
        for action, kind, _, shared in PLANS[algorithm]
    }
    for event in ran.events:
        assert not event.get("metrics", {}).keys() & {"train_loss", "validation_loss"}
    card = re.sub(r"\s+", " ", (ran.folder / "MODEL_CARD.md").read_text())
    assert "per client, zeroed out" in card
    assert "whose updates are replaced by zeros" in card
    assert "The noise of train." in card
    assert "per record" not in card


def test_the_total_of_updates_carries_the_noise_that_is_booked(run_inline):
    """Of clients that move nothing, totals are the noise alone."""
    with decoded_totals() as totals:
        ran = run_inline(
            *CLIENTS,
            *("algorithm=fedavg", "algorithm.network=resnet8_4", "stages=[retrain]"),
            *("retrain.weights.lr=1e-30", "retrain.weights.min_lr=0", "retrain.rounds=4"),
        )
    assert len(totals) == 4
    private = ran.the("privacy")
    (planned,) = private["schedule"]
    sigma, norm = planned["noise_multiplier"], planned["max_grad_norm"]
    # 4 clients took part; each adds 1 / 2 of the variance, as only 2 honest ones are relied on.
    assert np.concatenate(totals).std() == pytest.approx(sigma * norm * np.sqrt(4 / 2), rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("secure_sum=false", "secure_sum=null: each client would add all of the noise"),
        ("algorithm=dp_fnas", "unit=client with algorithm=dp_fnas is not possible"),
        ("algorithm=dpnas search_space=dp_cells retrain=dp_cells", "algorithm=dpnas is not"),
        ("training.momentum=averaged", "averaged: the moments would be further releases"),
        ("privacy.metrics_noise_multiplier=9", "no metric of a whole client is defined"),
        ("retrain.exchange=gradients", "updates of several steps are released"),
        ("privacy.delta=.3", "privacy.delta=0.3 with 4 clients: expected below 1 / 4"),
        ("privacy.unit=person", "privacy.unit=person"),
    ],
)
def test_what_tells_more_than_an_update_is_refused(overrides, said, compose_config):
    names = {override.partition("=")[0] for override in overrides.split()}
    base = [o for o in CLIENTS if o.partition("=")[0] not in names]
    searched = SEARCH * ("algorithm" not in names)
    refuses_run(said, compose_config, *base, *searched, overrides)


def test_steps_of_records_have_no_effect(compose_config):
    idle = without_effect(compose_config(*CLIENTS, *SEARCH))
    steps = {"local_steps", "retrain.local_steps", "micro_batch_size", "fewest_records"}
    assert {f"privacy.{name}" for name in steps} <= idle.keys()
    assert not {"algorithm.local_epochs", "retrain.local_epochs"} & idle.keys()

"""What a private run takes from its records, budget and noise arrives where it acts."""

import math
from types import SimpleNamespace

import pytest

from fednas_flwr.deploy.dry_run import SteppedGrid, begun, private_terms
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.pipeline.later_settings import with_learning_rate
from fednas_flwr.protocol.messages import decode_request
from fednas_flwr.protocol.requests import Train
from fednas_flwr.protocol.states import MOMENTS
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.server.reply_checks import distance

from ..finished_runs import Told

LINEAR = (
    *("algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "stages=[retrain]"),
    *("clients=2", "retrain.rounds=3", "privacy.retrain.local_steps=2", "privacy.epsilon=20"),
)


class Listening(InProcessGrid):
    """Keeps the learning rates that clients train with, and the norms of moments they are sent."""

    def __init__(self, app, clients):
        super().__init__(app, clients)
        self.trained: list[tuple[float, float]] = []

    def answer(self, message):
        action = message.metadata.message_type
        if action == "train.weights":
            request = decode_request(action, message.content)
            assert isinstance(request.settings, Train)
            moments = distance(request.states[MOMENTS], {})
            self.trained.append((request.settings.local.weights.lr, moments))
        return super().answer(message)


@pytest.fixture(scope="module")
def trained(quick_run):
    """A private training of a linear model: its configuration, events and requests."""
    grids = []

    def grid(app, clients):
        grids.append(Listening(app, clients))
        return grids[0]

    return Told(**vars(quick_run(*LINEAR, grid=grid)), trained=grids[0].trained)


def test_clients_train_at_the_rate_that_noise_and_records_give(trained):
    """By hand: walk (1 - m) / (sigma R sqrt(K) / sum B  sqrt(T)), which falls to a tenth."""
    told = trained.the("learning_rate")
    promised = trained.the("privacy")
    (planned,) = promised["schedule"]
    records = [c["records"]["train"] + c["records"]["validation"] for c in promised["clients"]]
    noise = planned["noise_multiplier"] * 0.1 * math.sqrt(2) / sum(n / 8 for n in records)
    assert told["noise"] == pytest.approx(noise)
    assert told["lr"] == pytest.approx(0.2 * 0.1 / (noise * math.sqrt(3 * 2)))
    rates = [lr for lr, _ in trained.trained]
    assert rates[:2] == [told["lr"]] * 2
    assert 0.1 * told["lr"] < rates[-1] < 0.5 * told["lr"]


def test_a_sum_of_more_clients_than_it_needs_has_more_noise(compose_config):
    """By hand: each of 5 clients adds the noise that 2 need together."""
    sums = ("secure_sum={least_sites: 3, colluding: 1}", "clients=5")
    with begun(compose_config(*LINEAR, *sums), SteppedGrid) as (run, _):
        with_learning_rate(run)
        told = read_run(run.folder).last("learning_rate")
        (release,) = run.schedule
        known = [client["splits"] for client in run.cohort.properties.values()]
    whole = sum(release.expected_batch(splits) for splits in known)
    assert told["noise"] == pytest.approx(release.noise_multiplier * 0.1 * math.sqrt(5 / 2) / whole)


def test_report_and_card_tell_the_rates_that_were_taken(trained):
    told = trained.the("learning_rate")
    shown = read_run(trained.folder).settings["retrain"]
    assert shown["weights"]["lr"] == told["lr"] != trained.config.retrain.weights.lr
    assert shown["weights"]["min_lr"] == told["min_lr"] == pytest.approx(0.1 * told["lr"])
    assert shown["sampling_rate"] == 0.125
    assert "batch_size" not in shown


def test_momentum_goes_on_from_round_to_round_and_steps_draw_a_share_of_records(trained):
    moments = [of_moments for _, of_moments in trained.trained]
    assert moments[:2] == [0.0, 0.0]
    assert moments[2] == moments[3] > 0
    clients = trained.the("privacy")["clients"]
    assert {rate for client in clients for rate in client["rates"]} == {0.125}


def test_a_resumed_run_keeps_its_learning_rate(trained):
    """Although all of its clients are gone."""
    told = trained.the("learning_rate")
    cohort = SimpleNamespace(properties={})
    gone = SimpleNamespace(config=trained.config, folder=trained.folder, schedule=[], cohort=cohort)
    again = with_learning_rate(gone).retrain.weights
    assert (again.lr, again.min_lr) == (told["lr"], 0.1 * told["lr"])


def test_calibrate_tells_what_the_run_takes(trained, compose_config):
    told = trained.the("learning_rate")
    (planned,) = trained.the("privacy")["schedule"]
    lines = private_terms(compose_config(*LINEAR))
    text = "\n".join(lines)
    assert f"learning rate from {told['lr']:.4g} to {0.1 * told['lr']:.4g}" in text
    assert f"noise multiplier {planned['noise_multiplier']:.4g}, the least" in text
    assert "a share of 0.125 of its records (privacy.retrain.rate)" in text
    own = "\n".join(private_terms(compose_config(*LINEAR, "retrain.batch_size=5")))
    assert "retrain.batch_size, since privacy.retrain.rate is null" in own
    assert lines[-2].startswith("(epsilon, delta) at most (")
    assert lines[-1].startswith("Why ")

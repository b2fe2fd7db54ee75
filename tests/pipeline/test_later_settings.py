"""Settings that are found when a run has begun: the precision, and the learning rate."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr import load, run
from fednas_flwr.deploy.dry_run import SteppedGrid, begun, private_terms
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.models import networks
from fednas_flwr.pipeline import later_settings
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import decode_request
from fednas_flwr.protocol.requests import Train
from fednas_flwr.protocol.states import MOMENTS
from fednas_flwr.report.model_card import write_model_card
from fednas_flwr.runs.numbers import is_complete, read_run
from fednas_flwr.server.reply_checks import distance
from fednas_flwr.settings import parser
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

from ..finished_runs import Told
from ..refusals import refuses
from ..watched import noting

LINEAR = ["algorithm=fedavg", "algorithm.network=plain_cnn", "stages=[retrain,export]", "clients=2"]
LINEAR += ["retrain.rounds=1", "runtime.device=cpu"]


@pytest.fixture
def trained(run_inline, monkeypatch):
    """``trained(precision)``: a run's files, on a processor that has bfloat16 or not."""

    def run(precision, *more, has_it=True, least=1):
        monkeypatch.setattr(networks, "computes_in_bfloat16", lambda device: has_it)
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


ALIKE = [
    (["training.precision=auto"], ["training.precision=bfloat16"], []),
    (["dataset.flip=true", "retrain.unaugmented=0.5"], [], ["dataset.flip=true"]),
]


@pytest.mark.parametrize(("alike", "as_well", "other"), ALIKE)
def test_what_a_client_trains_for_itself_is_as_the_last_round(alike, as_well, other, trained):
    tested = ["stages=[retrain,evaluate,export]", "evaluation.personalised=true"]
    runs = [trained("float32", *tested, *more) for more in (alike, as_well, other)]
    first, same, differs = (read_run(r.folder).last("evaluated")["personalised"] for r in runs)
    assert first == same != differs


def test_a_resumed_run_keeps_the_format_that_it_began_with(trained, monkeypatch):
    run = trained("auto")
    assert read_run(run.folder).last("precision")["precision"] == "bfloat16"
    monkeypatch.setattr(networks, "computes_in_bfloat16", lambda device: False)
    gone = SimpleNamespace(folder=run.folder)
    assert later_settings.with_precision(gone, run.config, {}).training.precision == "bfloat16"


def test_auto_is_float32_of_grouped_convolutions_and_on_a_gpu(trained, monkeypatch):
    run = trained("float32")
    auto = replace(run.config, training=replace(run.config.training, precision="auto"))
    begun = SimpleNamespace(folder=run.folder, log=SimpleNamespace(emit=lambda *_, **__: None))

    def chosen(name):
        description = {"name": name, "input_shape": (1, 8, 8), "num_classes": 10, "norm": "batch"}
        return later_settings.with_precision(begun, auto, description).training.precision

    assert chosen("plain_cnn") == "bfloat16"
    assert chosen("mobilenet_v2") == "float32"
    monkeypatch.setattr(networks, "make_device", lambda name: torch.device("cuda"))
    assert chosen("plain_cnn") == "float32"


def test_private_training_stays_float32(trained):
    run = trained("auto", "privacy=dp", "retrain.norm=group", "privacy.micro_batch_size=16")
    assert read_run(run.folder).last("precision")["precision"] == "float32"


# --- the learning rate of a private run


PRIVATE_LINEAR = ("algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "stages=[retrain]")
PRIVATE_LINEAR += ("clients=2", "retrain.rounds=3", "privacy.retrain.local_steps=2")
PRIVATE_LINEAR += ("privacy.epsilon=20",)


@pytest.fixture(scope="module")
def private(quick_run):
    """A private training of a linear model: its configuration, events and requests.

    Of these the learning rates that clients train with, and the norms of moments they are sent.
    """

    def told(_, grid, message):
        if message.metadata.message_type != "train.weights":
            return None
        request = decode_request("train.weights", message.content)
        assert isinstance(request.settings, Train)
        return request.settings.local.weights.lr, distance(request.states[MOMENTS], {})

    with pytest.MonkeyPatch.context() as patch:
        asked = noting(patch, InProcessGrid, "answer", told)
        run = quick_run(*PRIVATE_LINEAR)
    return Told(**vars(run), trained=[one for one in asked if one is not None])


def test_clients_train_at_the_rate_that_noise_and_records_give(private):
    """By hand: walk (1 - m) / (sigma R sqrt(K) / sum B  sqrt(T)), which falls to a tenth."""
    told = private.the("learning_rate")
    promised = private.the("privacy")
    (planned,) = promised["schedule"]
    records = [c["records"]["train"] + c["records"]["validation"] for c in promised["clients"]]
    noise = planned["noise_multiplier"] * 0.1 * math.sqrt(2) / sum(n / 8 for n in records)
    assert told["noise"] == pytest.approx(noise)
    assert told["lr"] == pytest.approx(0.2 * 0.1 / (noise * math.sqrt(3 * 2)))
    rates = [lr for lr, _ in private.trained]
    assert rates[:2] == [told["lr"]] * 2
    assert 0.1 * told["lr"] < rates[-1] < 0.5 * told["lr"]


def test_a_sum_of_more_clients_than_it_needs_has_more_noise(compose_config):
    """By hand: each of 5 clients adds the noise that 2 need together."""
    sums = ("secure_sum={least_sites: 3, colluding: 1}", "clients=5")
    with begun(compose_config(*PRIVATE_LINEAR, *sums), SteppedGrid) as (run, _):
        later_settings.with_learning_rate(run)
        told = read_run(run.folder).last("learning_rate")
        (release,) = run.schedule
        known = [client["splits"] for client in run.cohort.properties.values()]
    whole = sum(release.expected_batch(splits) for splits in known)
    assert told["noise"] == pytest.approx(release.noise_multiplier * 0.1 * math.sqrt(5 / 2) / whole)


def test_report_and_card_tell_the_rates_that_were_taken(private):
    told = private.the("learning_rate")
    shown = read_run(private.folder).settings["retrain"]
    assert shown["weights"]["lr"] == told["lr"] != private.config.retrain.weights.lr
    assert shown["weights"]["min_lr"] == told["min_lr"] == pytest.approx(0.1 * told["lr"])
    assert shown["sampling_rate"] == 0.125
    assert "batch_size" not in shown


def test_momentum_goes_on_from_round_to_round_and_steps_draw_a_share_of_records(private):
    moments = [of_moments for _, of_moments in private.trained]
    assert moments[:2] == [0.0, 0.0]
    assert moments[2] == moments[3] > 0
    clients = private.the("privacy")["clients"]
    assert {rate for client in clients for rate in client["rates"]} == {0.125}


def test_a_resumed_run_keeps_its_learning_rate(private):
    """Although all of its clients are gone."""
    told = private.the("learning_rate")
    cohort = SimpleNamespace(properties={})
    gone = SimpleNamespace(config=private.config, folder=private.folder, schedule=[], cohort=cohort)
    again = later_settings.with_learning_rate(gone).retrain.weights
    assert (again.lr, again.min_lr) == (told["lr"], 0.1 * told["lr"])


def test_calibrate_tells_what_the_run_takes(private, compose_config):
    told = private.the("learning_rate")
    (planned,) = private.the("privacy")["schedule"]
    lines = private_terms(compose_config(*PRIVATE_LINEAR))
    text = "\n".join(lines)
    assert f"learning rate from {told['lr']:.4g} to {0.1 * told['lr']:.4g}" in text
    assert f"noise multiplier {planned['noise_multiplier']:.4g}, the least" in text
    assert "a share of 0.125 of its records (privacy.retrain.rate)" in text
    own = "\n".join(private_terms(compose_config(*PRIVATE_LINEAR, "retrain.batch_size=5")))
    assert "retrain.batch_size, since privacy.retrain.rate is null" in own
    assert lines[-2].startswith("(epsilon, delta) at most (")
    assert lines[-1].startswith("Why ")


# --- the rate by which noise moves every weight as far as it is to


BOTH = ("train", "validation")
RELEASE = PlannedRelease("retrain", "train.weights", "weights", BOTH, 0.125, 200, 0.1, 1.5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clients", [1, 4])
def test_steps_of_mere_noise_move_weights_as_far_as_the_rule_says(momentum, clients):
    """Plain SGD on the mean of clients' noise, each of its own, and on nothing else."""
    steps, walk = 2000, 0.2
    batches = [64.0] * clients
    noise = later_settings.noise_per_step(RELEASE, batches, asked=clients)
    lr = later_settings.learning_rate(walk, noise, steps=steps, momentum=momentum)
    weights = torch.nn.Parameter(torch.zeros(2000))
    optimizer = torch.optim.SGD([weights], lr=lr, momentum=momentum)
    std = 1.5 * 0.1
    for _ in range(steps):
        weights.grad = (std * torch.randn(clients, 2000)).sum(0) / sum(batches)
        optimizer.step()
    assert weights.detach().std().item() == pytest.approx(walk, rel=0.1)


@given(st.integers(1, 20), st.floats(1, 1e4), st.floats(0.1, 10), st.floats(0.01, 10))
def test_rates_scale_as_the_noise_does(clients, batch, sigma, norm):
    release = replace(RELEASE, noise_multiplier=sigma, max_grad_norm=norm)
    one = later_settings.noise_per_step(release, [batch], asked=1)
    many = later_settings.noise_per_step(release, [batch] * clients, asked=clients)
    assert one == pytest.approx(sigma * norm / batch)
    assert many == pytest.approx(one / math.sqrt(clients))
    release_of_sums = replace(release, shared=True)
    for honest in (clients, 1):  # as few as that have the noise of one client
        told = {"asked": clients, "honest": honest}
        shared = later_settings.noise_per_step(release_of_sums, [batch] * clients, **told)
        assert shared == pytest.approx(one / math.sqrt(clients * honest))
    some = later_settings.noise_per_step(release, [batch] * 20 * clients, asked=clients)
    assert some == pytest.approx(many)  # of those who are asked


def test_noise_that_is_not_calibrated_is_no_number():
    unknown, of = replace(RELEASE, noise_multiplier=None), later_settings.noise_per_step
    refuses("not calibrated", of, unknown, [1.0], asked=1, error=ValueError)


# --- A limit of time


SHORT = ("rounds=3", "retrain.rounds=3", "runtime.time_limit=1s")
GIVEN = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]")


def rounds(folder, stage):
    return [event["round"] for event in read_run(folder).rounds(stage)]


@pytest.fixture
def no_time(monkeypatch):
    """Let no time be left for a second round, however fast the machine is."""
    monkeypatch.setitem(parser.SECONDS, "s", 1e-9)


def test_a_search_stops_at_its_checkpoint_and_goes_on(run_inline, no_time, monkeypatch):
    done = run_inline(*SHORT)
    assert (rounds(done.folder, "search"), rounds(done.folder, "retrain")) == ([1], [])
    assert not (done.folder / "model.safetensors").exists()
    assert read_run(done.folder).status == "cut short"
    assert not is_complete(done.folder)
    (warning,) = (e["message"] for e in done.named("warning"))
    assert warning.startswith("the time limit has ended the search after round 1 of 3; resume=")
    assert read_run(done.folder).events[-1]["status"] == "completed"
    monkeypatch.setitem(parser.SECONDS, "s", 1e6)
    run_inline(resume=done.folder)
    assert (rounds(done.folder, "search"), rounds(done.folder, "retrain")) == ([1, 2, 3], [1, 2, 3])
    assert is_complete(done.folder)


@pytest.mark.run
def test_a_run_that_was_cut_short_has_no_baselines(compose_config, tmp_path, no_time):
    config = compose_config(*SHORT, "evaluation.baselines=1", f"run_dir={tmp_path / 'run'}")
    assert run(config).genotype is None
    assert not (tmp_path / "run" / "baselines").exists()


def test_what_is_trained_in_time_is_exported_and_can_go_on(run_inline, no_time, monkeypatch):
    done = run_inline(*GIVEN, "retrain.rounds=3", "runtime.time_limit=1s")
    assert rounds(done.folder, "retrain") == [1]
    assert load(done.folder).class_names
    assert "evaluated" in {event["event"] for event in done.events}
    assert read_run(done.folder).status == "cut short"
    assert "**The run is cut short**" in write_model_card(done.folder).read_text()
    monkeypatch.setitem(parser.SECONDS, "s", 1e6)
    again = run_inline(resume=done.folder)
    assert rounds(done.folder, "retrain") == [1, 2, 3]
    assert is_complete(done.folder)
    assert [e["event"] for e in again.events].count("exported") == 2


TIMES = {"45s": 45, "30min": 1800, "2h": 7200, "1h30min": 5400, "1.5d": 129600}


NO_TIMES = ["30", "0s", "min", "1h30", "-1h", "1 h", "2hours", "infs", "1e3s"]


@pytest.mark.parametrize("text", NO_TIMES)
def test_what_is_no_time_is_one_sentence(text):
    words = r"^runtime.time_limit=.* is out of range: expected a time with its unit: 45s, 30min"
    refuses(words, parse_config, compose_tree([f"runtime.time_limit='{text}'"]))
    assert {text: parser.seconds(text) for text in TIMES} == TIMES


def test_a_limit_where_no_rounds_are_is_refused():
    overrides = ["algorithm=zero_cost", "stages=[search]", "runtime.time_limit=30min"]
    words = "runtime.time_limit=30min has no effect with algorithm=zero_cost"
    refuses(words, parse_config, compose_tree(overrides), user=user_settings(overrides))

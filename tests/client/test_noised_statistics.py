"""One noised release of each client: means and deviations of its table, counts of scores; hits."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr import compose, load, run
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.pretrained import LENGTH
from fednas_flwr.cli import main
from fednas_flwr.client import noised_measures
from fednas_flwr.client.answer import answer
from fednas_flwr.data import statistics as stats
from fednas_flwr.data.prepared import make_data
from fednas_flwr.data.statistics import Statistics, are_within, bounded_powers, refined
from fednas_flwr.models.noised_scores import BINS, LARGEST
from fednas_flwr.pipeline import evaluation
from fednas_flwr.pipeline.feasible import check_run
from fednas_flwr.privacy.plan import metrics_release, scores_release, statistics_release
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.server.exchange import share_scales
from fednas_flwr.settings.optimizers import SGD

from ..booked import booked
from ..refusals import refuses
from ..watched import noting
from .conftest import check_refusals, check_release

SEARCH = ("algorithm=dp_fnas", "rounds=1", "retrain.rounds=1", "search_space=mlp_small")
SEARCH += ("search_space.channels=8", "retrain.channels=8")
SEARCH += ("search_space.norm=group", "retrain.norm=group")
RANGES = "dataset.ranges={age: [0, 120], dose: [-1, 1]}"
NOISE = "privacy.statistics_noise_multiplier=2"
UNEQUAL = ("partition=quantity", "partition.fractions=[.6,.2,.2]")
RELEASED = "query.statistics:statistics"
TOLD = {"action": RELEASED, "splits": ("train",), "norm": 1.0}
ANY = st.floats(width=32) | st.just(math.nan)
COLUMNS = [(60.0, 120 / math.sqrt(12)), (0.0, 2 / math.sqrt(12))]  # of RANGES


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """150 patients; a tenth has no dose, and one an age that nobody has."""
    rng = np.random.default_rng(0)
    ages = rng.normal(70, 5, 150)
    ages[0] = 1e6
    doses = np.where(rng.random(150) < 0.1, "", rng.uniform(0, 0.2, 150).round(4).astype(str))
    columns = zip(ages, doses, rng.choice(["f", "m"], 150), strict=True)
    rows = [f"{a:.3f},{dose},{sex},{'yes' if a > 70 else 'no'}" for a, dose, sex in columns]
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    path.write_text("\n".join(["age,dose,sex,ill", *rows]) + "\n")
    return path


@pytest.fixture
def data(table):
    return [
        *("privacy=dp", "privacy.epsilon=100", "clients=2", "runtime.device=cpu", "trackers=[]"),
        *("dataset=csv", f"dataset.root={table}", f"dataset.cache={table.parent / 'cache'}"),
        *("dataset.categories={sex: [f, m]}", RANGES, "dataset.server_test=false"),
    ]


@pytest.fixture
def overrides(data):
    return [*data, *SEARCH]


def committed(made):
    """A simulated private client that has committed to the release, and its request."""
    planned = replace(statistics_release(shared=False), noise_multiplier=2.0)
    made.client.guard.commit("run", [planned])
    asked = rq.TellStatistics(data_set="records")
    return made.client, made.request("query.statistics", asked, "statistics")


@pytest.fixture
def site(data, of_table):
    return committed(of_table(*data, "algorithm=fedavg", "algorithm.network=linear", NOISE))


@pytest.fixture
def of_images(weights):
    """Settings of a private linear model on a tiny backbone's pooled features of digits."""
    backbone = f"{{name: test_efficientnet, weights: '{weights}', image_size: 32}}"
    return [
        *("algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "privacy.epsilon=20"),
        *("dataset.limit_train=200", "retrain.rounds=1", "runtime.device=cpu", "trackers=[]"),
        *(f"dataset.backbone={backbone}", "privacy.retrain.rate=1.0"),
    ]


def exact_sum(client):
    """The sum of (1, u, u^2) of the client's train records, one number at a time."""
    split, total = client.data.train, np.zeros((3, 2))
    for row in split.rows.tolist():
        for column, (centre, std) in enumerate(COLUMNS):
            number = split.features[row, column].item()
            if not math.isnan(number):
                u = min(1.0, max(-1.0, (number - centre) / (math.sqrt(3) * std)))
                total[:, column] += (1, u, u * u)
    return torch.from_numpy(total.reshape(-1)) / math.sqrt(6)


# --- what a record contributes


@given(
    st.lists(st.tuples(ANY, ANY, ANY), min_size=1, max_size=8),
    st.tuples(*[st.floats(-1e30, 1e30)] * 3),
    st.tuples(*[st.floats(1e-30, 1e30)] * 3),
)
def test_no_record_moves_the_sum_by_more_than_the_norm(rows, mean, std):
    numbers, ranges = torch.tensor(rows, dtype=torch.float32), Statistics(mean, std)
    vectors = stats.unit_vectors(numbers, ranges, num_columns=3)
    assert vectors.shape == (len(rows), 9)
    assert bool(vectors.isfinite().all())
    assert bool((vectors.norm(dim=1) <= 1 + 1e-12).all())
    for place in range(len(rows)):  # the same, to the last bit, whoever else is there
        alone = stats.unit_vectors(numbers[place][None], ranges, num_columns=3)
        assert torch.equal(vectors[place], alone[0])


# --- what is made of it


def test_without_noise_they_are_those_of_the_numbers_with_ends_for_those_beyond():
    rng = np.random.default_rng(1)
    numbers = rng.normal([70, 0.3], [5, 2], (400, 2))
    numbers[rng.random(400) < 0.3, 1] = np.nan
    ranges = Statistics((*(c[0] for c in COLUMNS), 0.0), (*(c[1] for c in COLUMNS), 1.0))
    powers = bounded_powers(torch.from_numpy(numbers), ranges)
    found = refined(powers.mean(0), ranges, noise=0.0)
    ends = [np.clip(numbers[:, 0], 0, 120), np.clip(numbers[:, 1], -1, 1)]
    assert found.mean == pytest.approx((*(np.nanmean(column) for column in ends), 0.0))
    assert found.std == pytest.approx((*(np.nanstd(column) for column in ends), 1.0))
    twice = refined(2 * powers.mean(0), ranges, noise=0.0)  # half the records were declared
    assert twice.mean == pytest.approx(found.mean)
    assert twice.std == pytest.approx(found.std)


@given(st.lists(st.floats(-1e6, 1e6), min_size=9, max_size=9), st.floats(0, 1e6))
def test_whatever_noise_makes_of_them_features_stay_of_a_usable_size(means, noise):
    ranges = Statistics((5.0, -1e9, 0.0, 0.0), (1.0, 1e-9, 1e9, 1.0))
    found = refined(torch.tensor(means, dtype=torch.float64), ranges, noise=noise)
    assert are_within(found, ranges, num_columns=3)


def test_a_column_that_noise_drowns_keeps_its_range():
    ranges = Statistics((5.0, 7.0), (1.0, 2.0))
    found = refined(torch.tensor([0.02, 0.9, -0.01, 0.3, 0.01, 0.4]), ranges, noise=0.01)
    assert (found.mean[0], found.std[0]) == (5.0, 1.0)
    assert found.mean[1] == pytest.approx(7 + 2 * math.sqrt(3) / 3)
    tight = refined(torch.tensor([1.0, 0.5, 0.25]), Statistics((0.0,), (1.0,)), noise=0.01)
    assert tight.std[0] == pytest.approx(math.sqrt(3 * 0.01))  # of what noise hides, not of 0


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.floats(0, 10))
def test_a_mean_of_features_is_shrunk_by_its_noise_and_no_longer_than_they_are(means, noise):
    own = Statistics((0.0,), (1.0,), (0.0, 1.0, -2.0, 2.0))
    found = stats.from_release(torch.tensor(means), own, num_columns=0, noise=noise)
    square = sum(value**2 for value in means)
    if 1 >= square > 1e-6:
        kept = max(0.0, 1 - 3 * noise**2 / square)
        assert found.mean == pytest.approx([LENGTH * kept * m for m in means], abs=1e-3)
    assert math.hypot(*found.mean) <= LENGTH + 1e-3
    assert (found.std, found.target) == ((1.0,) * 3, own.target)
    assert are_within(found, own, num_columns=0)


# --- the release


def test_vectors_of_many_units_are_summed_part_by_part():
    vectors, parts = torch.rand(2500, 3, generator=torch.Generator().manual_seed(0)) / 2, []

    def values(rows):
        parts.append(len(rows))
        return vectors[rows].double()

    split = SimpleNamespace(num_units=2500, persons=None)
    units = noised_measures._contributions("scores", split, values, norm=1.0)
    assert units.total(torch.arange(2500))["scores"] == pytest.approx(vectors.double().sum(0))
    assert parts == [1024, 1024, 452]


def test_a_run_whose_mean_no_noise_hides_is_refused_before_it(of_images):
    refuses("no noise keeps stat", check_run, compose(*of_images, "privacy.epsilon=.003"))


def test_a_reply_is_the_exact_sum_and_noise_and_booked(site, noised):
    client, request = site
    # three numbers of at most 1 for each of two columns have a norm of sqrt(6)
    reply, total = check_release(client, request, noised, exact=exact_sum(client), **TOLD)
    noise = reply.states["statistics"]["float32"].double() - total
    assert bool((noise != 0).all())
    assert noise.norm().item() < 2 * (math.sqrt(6) + math.sqrt(80))  # more once in 2e17


def test_of_images_it_is_the_exact_sum_of_features_of_length_1_and_noise(
    of_images, of_table, noised
):
    client, request = committed(of_table(*of_images, "clients=2"))
    features = client.data.train.features[client.data.train.rows].double()
    assert 0.9 * LENGTH < float(features.norm(dim=1).max()) <= LENGTH * (1 + 1e-6)
    check_release(client, request, noised, exact=features.sum(0) / LENGTH, **TOLD)


def test_what_was_not_committed_to_or_is_not_covered_is_refused_unread(site, monkeypatch):
    client, request = site
    monkeypatch.setattr("fednas_flwr.client.handlers.unit_vectors", None)  # it reads the records
    refuses("within public ranges only", answer, replace(client, has_bounds=False), request)
    refuses("is for private clients", answer, replace(client, guard=None), request)
    check_refusals(client, request, "statistics/query.statistics/statistics/train")


# --- what is done with it


def asked(statistics):
    """A request that a client describes itself, with what the server would standardise by."""
    header = Header("run", "search", 1, 1, 0, "nonce")
    return Request("query.describe", header, rq.Describe(), statistics=statistics)


def test_a_private_client_takes_statistics_within_its_ranges_alone(site):
    client, _ = site
    own = Statistics(client.data.train.mean, client.data.train.std)
    good = Statistics((70.0, 0.1, 0.0, 0.0), (5.0, 0.06, 1.0, 1.0))

    assert own.mean == (60.0, 0.0, 0.0, 0.0)
    assert answer(client, asked(good)).properties["mean"] == list(good.mean)
    for wrong in (
        {"mean": (121.0, 0.1, 0.0, 0.0)},  # beyond the range
        {"std": (5.0, 1.01, 1.0, 1.0)},  # that no numbers have
        {"std": (5.0, 1e-4, 1.0, 1.0)},  # that makes features huge
        {"mean": (70.0, 0.1, 0.5, 0.0)},  # a category that is moved, and one that is scaled
        {"std": (5.0, 0.06, 1.0, 2.0)},
    ):
        refuses("beyond this site's dataset.ranges", answer, client, asked(replace(good, **wrong)))
    refuses("statistics of 2 features", answer, client, asked(Statistics((70.0, 0.1), (5.0, 0.06))))
    with pytest.raises(ConfigError, match="standardises by its own dataset.statistics"):
        answer(replace(client, has_bounds=False), asked(good))
    actions = tuple(a for a in client.guard.allowed.actions if a != "query.statistics")
    client.guard.allowed = replace(client.guard.allowed, actions=actions)
    refuses("rule actions", answer, client, asked(good))


def test_a_private_client_takes_a_mean_of_features_that_is_no_longer_than_they_are(
    of_images, of_table
):
    client = of_table(*of_images, "clients=2").client
    size = client.data.train.features.shape[1]
    good = Statistics((LENGTH, *(0.0,) * (size - 1)), (1.0,) * size)

    x, _ = client.standardised(good).data.train.batch(torch.tensor([0]), "cpu", limit=0)
    raw, _ = client.data.train.batch(torch.tensor([0]), "cpu", limit=0)
    assert torch.equal(x, raw - torch.tensor(good.mean))
    for wrong in (
        {"mean": (LENGTH + 0.1, *(0.0,) * (size - 1))},
        {"std": (0.5, *(1.0,) * (size - 1))},
        {"target": (0.0, 1.0)},
    ):
        refuses("or its features' length", answer, client, asked(replace(good, **wrong)))
    refuses("statistics of 1 features", answer, client, asked(Statistics((0.0,), (1.0,))))


@pytest.mark.run
@pytest.mark.parametrize(
    "clients",
    [
        ("clients=2",),
        ("clients=4", "secure_sum=true"),
        ("clients=4", "sampling.per_round=3"),
        ("clients=3", "runtime.largest_share=.4", *UNEQUAL),
    ],
)
def test_features_of_images_are_centred_by_one_release_in_secure_sums_too(
    of_images, tmp_path, clients
):
    config = compose(*of_images, *clients, f"run_dir={tmp_path / 'run'}")
    folder = run(config).folder
    finished = read_run(folder)
    (found,), (private,) = finished.of_kind("statistics"), finished.of_kind("privacy")
    first, last = private["schedule"]
    kinds = [(one["kind"], one["shared"]) for one in (first, last)]
    assert kinds == [("statistics", bool(config.secure_sum)), ("weights", bool(config.secure_sum))]
    known = [client["records"]["train"] for client in private["clients"]]
    told = [
        [row.action.partition(" ")[0] for row in booked(folder / "sites", c)].count(RELEASED)
        for c in range(config.clients)
    ]
    assert sorted(told) == [0] * (config.clients - config.asked) + [1] * config.asked
    asked = {c: known[c] for c in range(config.clients) if told[c]}
    scales = share_scales(asked, config.runtime.largest_share)
    sums = config.secure_sum
    noises = sum(scales.get(client, 1) ** 2 for client in asked)
    noises /= sums.least(4) - sums.colluding if sums else 1
    records = sum(n * scales.get(client, 1) for client, n in asked.items())
    noise = first["noise_multiplier"] * math.sqrt(noises) / records
    assert found["noise"] == pytest.approx(noise)
    prepared, _ = make_data(config)
    exact = prepared.train.features.double().mean(0)  # some of which are for validation and test
    mean = torch.tensor(found["mean"], dtype=torch.float64)
    cosine = float(mean @ exact / mean.norm() / exact.norm())
    assert cosine > 0.9 / math.sqrt(1 + len(mean) * (LENGTH * noise) ** 2 / float(exact @ exact))
    model = load(folder)
    assert list(model.inputs.mean) == found["mean"]
    test = prepared.server_test
    with torch.no_grad():
        logits = model.network(test.features - mean.float())
    right = (logits.argmax(1) == test.labels).double().mean().item()
    assert right == pytest.approx(finished.scores("central")["accuracy"])
    assert "mean of the" in (folder / "report.html").read_text()


@pytest.mark.run
def test_a_run_tells_books_and_exports_them_and_goes_on_with_them(overrides, tmp_path):
    folder = tmp_path / "run"
    run(compose(*overrides, "privacy.statistics_noise_multiplier=0.5", f"run_dir={folder}"))
    finished = read_run(folder)
    (found,), (private,) = finished.of_kind("statistics"), finished.of_kind("privacy")
    # of 81 records, noise on mean and variance has deviations of 1.3 and 77; 7 lie up to the bounds
    assert abs(found["mean"][0] - 70) < 10
    assert found["std"][0] < 25  # the range alone says 34.6
    assert found["mean"][2:] == [0.0, 0.0]
    first = private["schedule"][0]
    assert (first["kind"], first["noise_multiplier"], first["steps"]) == ("statistics", 0.5, 1)
    for client in range(2):
        actions = [row.action for row in booked(folder / "sites", client)]
        assert actions[0] == "query.statistics:statistics"
        assert actions.count(RELEASED) == 1
    assert list(load(folder).inputs.mean) == found["mean"]
    report = (folder / "report.html").read_text()
    assert "query.statistics" in report
    assert "means and deviations of 2 columns are noised ones" in report
    # stopped after the search, it goes on with the same numbers, and releases no others
    shutil.rmtree(folder / "checkpoints")
    for name in ("model.safetensors", "report.html"):
        (folder / name).unlink()
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = lines[: next(i for i, e in enumerate(lines) if e["event"] == "statistics") + 1]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    assert main(["run", f"resume={folder}"]) == 0
    assert [told["mean"] for told in read_run(folder).of_kind("statistics")] == [found["mean"]]
    assert list(load(folder).inputs.mean) == found["mean"]


@pytest.mark.run
@pytest.mark.parametrize("told", [{"data_set": "mine"}, {}])
def test_the_first_client_says_nothing_of_others_data(overrides, tmp_path, lies, monkeypatch, told):
    def lie(reply):
        kept = {name: fact for name, fact in reply.properties.items() if name != "data_set"}
        return replace(reply, properties=kept | told)

    lies("query.describe", lie)
    monkeypatch.setattr("fednas_flwr.client.answer.check_fields", lambda *_: None)
    finished = read_run(run(compose(*overrides, NOISE, f"run_dir={tmp_path / 'run'}")).folder)
    assert len(finished.of_kind("statistics")) == 1
    assert not finished.of_kind("client_failed") + finished.of_kind("client_left")


def test_what_cannot_be_is_refused_before_the_run(overrides, tmp_path):
    folder = f"run_dir={tmp_path / 'run'}"
    plain = [o for o in overrides if o != RANGES]
    for declared in (["dataset.ranges={age: [0, 120]}", "dataset.statistics={dose: [0, 1]}"], []):
        without = "has no effect with dataset=csv without dataset.ranges of every column"
        refuses(without, compose, *plain, *declared, NOISE)
    with pytest.raises(ConfigError, match="statistics and weights alone cost"):
        run(compose(*overrides, "privacy.statistics_noise_multiplier=.01", folder))
    assert not (tmp_path / "run").exists()


def test_calibrate_tells_of_the_release(overrides, prints):
    told = prints("calibrate", *overrides, NOISE)
    assert "statistics, statistics on train: 1 steps" in told
    assert "noise multiplier 2, privacy.statistics_noise_multiplier; clipping norm 1" in told


# --- counts of scores by class: one noised release of each client


PLAN = replace(scores_release(shared=False), noise_multiplier=2.0)


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """300 patients of two wards, 15 % of whom died, mostly the old."""
    rng = np.random.default_rng(0)
    age, dose = rng.uniform(0, 100, 300).round(1), rng.uniform(-1, 1, 300).round(3)
    died = rng.random(300) < 1 / (1 + np.exp((85 - age) / 6))
    lines = [f"{a},{d},{'yes' if y else 'no'}" for a, d, y in zip(age, dose, died, strict=True)]
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    path.write_text("\n".join(["age,dose,died", *lines]) + "\n")
    return path


@pytest.fixture
def scored(patients):
    return [
        *("algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "clients=2"),
        *("retrain.rounds=2", "runtime.device=cpu", "trackers=[]", "privacy.epsilon=100"),
        *("dataset=csv", f"dataset.root={patients}", f"dataset.cache={patients.parent / 'cache'}"),
        "dataset.ranges={age: [0, 100], dose: [-1, 1]}",
        "privacy.scores_error=0.01",
    ]


@pytest.fixture
def counting(scored, of_table):
    """A simulated private client that has committed to the release, and its request."""
    made = of_table(*scored)
    made.client.guard.commit("run", [PLAN])
    asked = rq.CountScores(network=made.description, data_set="records")
    return made.client, made.network, made.request("evaluate.scores", asked)


def exact_counts(client, network):
    """The counts of the client's records, one record at a time."""
    counts = torch.zeros(2 * BINS, dtype=torch.float64)
    for split in (client.data.train, client.data.validation):
        for row in range(len(split)):
            x, y = split.batch(torch.tensor([row]), "cpu")
            with torch.no_grad():
                no, yes = network(x)[0].double().tolist()
            place = math.floor((math.asinh(yes - no) / math.asinh(LARGEST) + 1) / 2 * BINS)
            counts[min(max(place, 0), BINS - 1) + BINS * int(y)] += 1
    return counts


def test_a_reply_is_the_exact_counts_and_noise_and_booked(counting, noised):
    client, network, request = counting
    counted = {"action": "evaluate.scores:scores", "splits": ("train", "validation")}
    exact = exact_counts(client, network)
    reply, total = check_release(client, request, noised, norm=1.0, exact=exact, **counted)
    noise = reply.states["scores"]["float32"].double() - total
    assert (noise == 0).sum() <= 1  # one of 128, by rounding: once in 1e5; two: in 1e10
    assert noise.norm().item() < 2.0 * (math.sqrt(2 * BINS) + math.sqrt(2 * 40))  # but once in 2e17


def test_a_record_moves_one_count_by_one_whatever_the_others_are(counting, totals):
    client, _, request = counting
    client.guard.allowed = replace(client.guard.allowed, epsilon=1e6)
    rows = client.data.train.rows
    for number in range(6):
        held = rows[torch.arange(len(rows)) != number] if number else rows
        train = replace(client.data.train, rows=held)
        changed = replace(client, data=replace(client.data, train=train))
        client.guard.commit(f"run{number}", [PLAN])
        answer(changed, replace(request, header=replace(request.header, run=f"run{number}")))
    (first, _), *others = totals
    for total, _ in others:
        moved = first - total
        assert moved.sum() == moved.abs().sum() == 1


def test_counts_that_are_not_committed_to_or_not_covered_are_refused_unread(counting, no_record):
    client, _, request = counting
    words = "of private clients and of two classes"
    refuses(words, answer, replace(client, guard=None), request)
    inputs = replace(client.inputs, class_names=("a", "b", "c"))
    refuses(words, answer, replace(client, inputs=inputs), request)
    for weights in (torch.zeros(0), torch.zeros(2**22)):
        states = {**request.states, "weights": pack({"w": weights})}
        refuses(r"do not fit evaluate\.scores", answer, client, replace(request, states=states))
    check_refusals(client, request, "evaluate/evaluate.scores/scores/train")


@pytest.mark.run
@pytest.mark.parametrize("summed", [(), ("secure_sum=true", "clients=4")])
def test_a_run_books_them_once_and_tells_auroc_and_threshold(scored, tmp_path, summed, monkeypatch):
    noises = noting(monkeypatch, evaluation, "scores_of_counts", lambda *_, noise: noise)
    tested = noting(monkeypatch, evaluation, "_on_clients", lambda _, __, trained, ___: trained)
    config = compose(*scored, *summed, f"run_dir={tmp_path / 'run'}")
    folder = run(config).folder
    finished = read_run(folder)
    told = finished.scores("released")
    (private,) = finished.of_kind("privacy")
    plan = private["schedule"][-1]
    assert (plan["kind"], plan["shared"]) == ("scores", bool(summed))
    sums = config.secure_sum
    honest = sums.least(4) - sums.colluding if sums else 1  # whose noise is planned
    assert noises == [pytest.approx(plan["noise_multiplier"] * math.sqrt(config.clients / honest))]
    assert abs(told["prevalence"] - 0.15) < 0.1  # some ten standard errors
    assert told["auroc"] is None or told["error"] <= 0.03
    odds = torch.tensor(told["slope"] * told["edge"] + told["offset"]).double()
    assert finished.scores("central")["threshold"] == odds.sigmoid().item()
    actions = [row.action for row in booked(folder / "sites")]
    assert sum(action.startswith("evaluate.scores") for action in actions) == 1
    report = (folder / "report.html").read_text()
    for said in ("noised counts of the clients", "on a line through the log odds"):
        assert said in report
    made_in = [folder]
    if not summed:  # clients test what is exported, also where the most probable class decides
        config = replace(config, evaluation=replace(config.evaluation, metric="accuracy"))
        made_in.append(run(replace(config, run_dir=str(tmp_path / "accuracy"))).folder)
    for trained, made in zip(tested, made_in, strict=True):
        exported = network_states(load(made).network)["weights"]
        assert torch.equal(trained.states["weights"]["float32"], pack(exported)["float32"])


@pytest.mark.run
def test_data_of_more_classes_plan_none(scored, tmp_path, patients):
    of_three = tmp_path / "three.csv"
    lines = patients.read_text().splitlines()
    lines[1::3] = [line.replace("no", "unknown") for line in lines[1::3]]
    of_three.write_text("\n".join(lines) + "\n")
    run(compose(*scored, f"dataset.root={of_three}", f"run_dir={tmp_path / 'run'}"))
    (private,) = read_run(tmp_path / "run").of_kind("privacy")
    assert {plan["kind"] for plan in private["schedule"]} == {"weights"}


# --- the threshold of a request decides what hits are


PRIVATE = ("privacy=dp", "privacy.epsilon=100", "dataset.ranges={age: [0, 100]}")


@pytest.fixture
def make(tmp_path, of_table):
    """A client of a table whose label is ``yes`` from an age of 60 on, its network, a question."""
    lines = [f"{age},{'yes' if age >= 60 else 'no'}" for age in range(100)]
    (tmp_path / "t.csv").write_text("\n".join(["age,died", *lines]) + "\n")

    def make(*scored):
        made = of_table(
            *("algorithm=fedavg", "algorithm.network=linear", "dataset=csv", "clients=1"),
            *(f"dataset.root={tmp_path / 't.csv'}", f"dataset.cache={tmp_path}", "trackers=[]"),
            *("dataset.fractions={train: 0.4, validation: 0.2, test: 0.4}", *scored),
            "runtime.device=cpu",
        )
        client = made.client
        return client, made.description, lambda *asked: answer(client, made.request(*asked))

    return make


def expected_hits(client, threshold):
    """The share of test records that are right where all are positive, or none is."""
    test = client.data.test
    _, labels = test.batch(torch.arange(len(test)), "cpu")
    yes = float((labels == 1).double().mean())
    assert 0.2 < yes < 0.45
    return pytest.approx(yes if threshold == 0 else 1 - yes)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_exact_clients_count_hits_at_it(make, threshold):
    client, network, ask = make()
    asked = rq.Evaluate(network=network, split="test", threshold=threshold)
    expected = expected_hits(client, threshold)
    assert ask("evaluate.model", asked).metrics["accuracy"] == expected
    step = SGD(0.1, 0.0, 0.0, 0.0, None)
    local = rq.LocalTraining(network, "train", rq.Amount(1, None, None), step, 0.0, 0.0)
    trained = ask("evaluate.personalised", rq.Personalise(local=local, threshold=threshold))
    assert trained.metrics["accuracy"] == expected


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_private_clients_noise_hits_at_it(make, threshold, noised):
    client, network, ask = make(*PRIVATE)
    client.guard.commit("run", [replace(metrics_release("evaluate", "test"), noise_multiplier=2.0)])
    asked = rq.Evaluate(network=network, split="test", data_set="records", threshold=threshold)
    ask("evaluate.model", asked)
    (((_, hits), _, _),) = noised
    assert float(hits) / len(client.data.test) == expected_hits(client, threshold)

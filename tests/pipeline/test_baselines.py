"""``evaluation.baselines=2``: networks that were not searched, trained beside the found one."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fednas_flwr.algorithms.zero_cost import ZeroCostSettings
from fednas_flwr.api import Result, compose, run
from fednas_flwr.base.errors import NoEffectError
from fednas_flwr.models.networks import FIXED_NETWORKS, load_description
from fednas_flwr.pipeline import baselines
from fednas_flwr.report.comparison import run_folders
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.score_tables import leaderboard_table
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.leaderboard import candidates, chosen, compared, finalists
from fednas_flwr.runs.numbers import BASELINES_FOLDER, FINALISTS_FOLDER, read_run
from fednas_flwr.runs.run_folder import open_run_folder
from fednas_flwr.settings import parser, with_runtime
from fednas_flwr.settings.data_settings import Scattering
from fednas_flwr.settings.optimizers import RESNETS
from fednas_flwr.spaces.costs import count_multiply_adds

from ..booked import booked
from ..composing import ranges_of
from ..refusals import refuses
from ..report.conftest import emit
from ..rows import by_hand, seldom
from ..watched import noting

SETTINGS = ("dataset", "partition", "retrain", "privacy", "clients", "runtime", "training")

GROUP = "search_space.norm=group retrain.norm=group"
PRIVATE = f"algorithm=dp_fnas privacy=dp privacy.epsilon=50 clients=2 rounds=1 {GROUP}"


def told(folder):
    return {own.folder.name: own.config for own in read_run(folder).baselines()}


REAL_SITES = ("runtime=deployment", "runtime.superlink=site", "partition=sites")


def test_private_real_sites_train_no_baselines():
    private, two = ("algorithm=dp_fnas", "privacy=dp", *REAL_SITES), "evaluation.baselines=2"
    refuses(f"{two} .* would pay for more", compose, *private, two, error=NoEffectError)
    assert compose(*private).evaluation.baselines is None
    assert compose(*REAL_SITES, two).evaluation.baselines == 2  # they cost time alone


@pytest.mark.run
@pytest.mark.usefixtures("few_draws")
def test_baselines_are_trained_as_the_found_network(compose_config, tmp_path):
    folder = tmp_path / "run"
    result = run(compose_config("evaluation.baselines=2", f"run_dir={folder}"))
    configs = told(folder)
    names = ["data_free", "linear", "random_1", "random_2"]
    assert [name for name in configs if not name.startswith("resnet8_")] == names
    assert len(configs) == 5
    own = read_run(folder)
    for config in configs.values():
        assert config["evaluation"]["baselines"] == 0
        assert all(config[setting] == own.config[setting] for setting in SETTINGS)
    genotypes = {b.folder.name: load_description(b.folder).get("genotype") for b in own.baselines()}
    drawn = [genotypes[name] for name in ("data_free", "random_1", "random_2")]
    assert drawn[1] != drawn[2]
    found = load_description(folder)["genotype"]
    assert len({len(genotype["cells"]) for genotype in [found, *drawn]}) == 1
    assert all(0 <= b.accuracy() <= 1 for b in own.baselines())
    shape = tuple(load_description(folder)["input_shape"])
    costs = {}
    for name in RESNETS:
        network = FIXED_NETWORKS[name](shape, 3, norm="batch")
        costs[name] = count_multiply_adds(network, shape) / own.numbers()["multiply_adds"]
    nearest = min(costs, key=lambda name: max(costs[name], 1 / costs[name]))
    assert {name for name, one in genotypes.items() if one is None} == {"linear", nearest}
    assert nearest != RESNETS[0]
    assert told(folder)["data_free"]["algorithm"]["shortlist"]["scores"][0] == "learning"
    space = told(folder)["data_free"]["search_space"]
    assert (space["channels"], space["num_cells"]) == (4, 5)
    page = (folder / "report.html").read_text()
    assert "Models that were compared" in page
    assert "random ones of the search space, the choice of scores that read no record" in page
    assert "FEATHERS also retrained" not in page
    tuned = replace(own, config={**own.config, "algorithm": {"name": "feathers"}})
    assert "FEATHERS also retrained the random ones" in sentence("baselines", tuned)
    assert "random_2" in page
    assert run_folders([tmp_path]) == [folder]

    # A run that is resumed trains what is missing, to the same, and nothing else.
    times = {b.folder.name: b.events[-1]["time"] for b in own.baselines()}
    (missing,) = (b for b in own.baselines() if b.folder.name == "random_2")
    accuracy = missing.accuracy()
    (missing.folder / "events.jsonl").unlink()
    run(result.folder)
    again = {b.folder.name: b for b in read_run(folder).baselines()}
    same = {n for n, b in again.items() if b.events[-1]["time"] == times[n]}
    assert same == {*configs} - {"random_2"}
    assert again["random_2"].accuracy() == accuracy
    assert read_run(folder).events == own.events


@pytest.mark.run
@pytest.mark.usefixtures("few_draws")
def test_private_baselines_have_a_ledger_of_their_own(compose_config, tmp_path):
    folder = tmp_path / "run"
    sites = tmp_path / "sites"  # whose budgets the run spends, and no baseline
    measured = "privacy.metrics_noise_multiplier=5"
    own = ("evaluation.baselines=1", "retrain.rounds=1", measured, f"privacy.sites={sites}")
    run(compose_config(PRIVATE, *own, f"run_dir={folder}"))
    own = read_run(folder)
    assert not (folder / "sites").exists()
    assert (sites / "client-0" / "ledger").is_dir()
    assert {b.status for b in [own, *own.baselines()]} == {"completed"}
    assert "linear" in {b.folder.name for b in own.baselines()}
    for single in [own, *own.baselines()]:
        epsilon = single.numbers()["epsilon"]
        assert epsilon is not None
        assert 0 < epsilon <= 50
    assert "a ledger of its own" in (folder / "report.html").read_text()
    assert {b.numbers()["linear_accuracy"] for b in [own, *own.baselines()]} == {None}
    before = booked(sites)
    assert before[-1].action == "evaluate.model:metrics"
    run(folder)  # complete: it releases nothing more
    assert booked(sites) == before


TIMES = [(200.0, 10.0, 1.0, 2), (40.0, 1.0, 0.0, 0), (200.0, 30.0, 0.0, 0), (200.0, 10.0, 20.0, 0)]


@pytest.mark.parametrize(("search", "retrain", "evaluate", "number"), TIMES)
def test_baselines_are_made_where_they_add_little(tmp_path, search, retrain, evaluate, number):
    """The run takes over a minute, and five times all but its search is less than half of it."""
    lines = [{"event": "run_started"}]
    for name, seconds in {"search": search, "retrain": retrain, "evaluate": evaluate}.items():
        lines.append({"event": "stage_started", "stage": name, "elapsed": 0.0})
        ended = {"stage": name, "seconds": seconds, "elapsed": seconds}
        lines.append({"event": "stage_finished", **ended})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert baselines.affordable(tmp_path) == number
    (tmp_path / "baselines").mkdir()
    assert baselines.affordable(tmp_path) == 2  # it goes on with what it has begun


def test_scores_put_the_first_of_the_largest_pool_first(compose_config, tmp_path):
    config = compose_config("algorithm=successive_halving", f"run_dir={tmp_path}")
    for pool in (["first", "second"], ["second"]):
        emit(tmp_path, "rewarded", genotypes=pool, rewards=[0.5] * len(pool))
    assert baselines._scored_first(config) == "first"


FEATURES = {  # records and shape by what has them
    "dataset=digits": [(400, [1, 16, 64]), (20_000, [3, 32, 32])],
    "": [(400, [1, 16, 15]), (400, [1, 16, 65]), (30_000, [3, 32, 32])],
    "dataset=csv dataset.root=x dataset.label=y": [(400, [9])],
    "dataset.scattering={scales:1,angles:2}": [(400, [3, 16, 16])],
}


@pytest.mark.parametrize("overrides", FEATURES)
def test_small_images_have_a_linear_model_on_features(compose_config, tmp_path, overrides):
    """Of few enough values, and where records are no features already."""
    own = ("dataset=digits", overrides, "retrain.rounds=3", f"run_dir={tmp_path}")
    config = compose_config(" ".join(own))
    for records, shape in FEATURES[overrides]:
        emit(tmp_path, "partition", splits=[{"train": records - 2, "validation": 1, "test": 1}])
        made = dict(baselines._on_features(config, shape))
        suited = {"features": Scattering(2, 8)} if overrides == "dataset=digits" else {}
        assert {name: one.dataset.scattering for name, one in made.items()} == suited
        rates = [one.retrain.weights for one in made.values()]
        assert all((sgd.lr, sgd.weight_decay) == (0.02, 0.01) for sgd in rates)
        (tmp_path / "events.jsonl").unlink()


@pytest.mark.parametrize(("space", "ranks"), [("darts_small", False), ("mlp_small", True)])
def test_the_data_free_choice_is_of_the_runs_space(compose_config, space, ranks):
    """By a shortlist where scores rank networks, else by few scores."""
    config = compose_config(f"search_space={space}")
    own = baselines._data_free(config)
    assert own.search_space == config.search_space
    assert isinstance(own.algorithm, ZeroCostSettings)
    assert (own.algorithm.draws, own.algorithm.shortlist is not None, own.rounds) == (250, ranks, 1)


def test_data_free_experiments_keep_the_space_of_tables(compose_config):
    space = compose_config("search_space=mlp_small").search_space
    for name in ("data_free", "recommended_private"):
        own = compose_config(f"experiment=search/{name}", "search_space=mlp_small").search_space
        assert (own.channels, own.num_cells) == (space.channels, space.num_cells)


@pytest.mark.run
@pytest.mark.parametrize(("low", "high"), [(0.02, 0.03), (2e-4, 3e-4)])
def test_found_hyper_parameters_are_taken_over(compose_config, tmp_path, low, high):
    """Also a learning rate below the one to which retraining's would fall."""
    own = ("algorithm=random_search", "rounds=1", f"run_dir={tmp_path / 'run'}")
    config = compose_config(*own, ranges_of(lr=(low, high)))
    folder = run(config).folder
    derived = read_run(folder).last("derived")
    found = derived["configuration"]
    assert low <= found["lr"] <= high
    own = baselines._trained_alike(open_run_folder(str(folder)), derived)
    assert own.retrain.weights.lr == found["lr"]
    assert own.retrain.weights.min_lr == min(config.retrain.weights.min_lr, found["lr"])


@pytest.mark.parametrize(("side", "rounds"), [(15, 10), seldom(16, 20)])
def test_a_run_and_what_it_is_compared_with_train_as_long(compose_config, tmp_path, side, rounds):
    """The median client has 45 batches of a record in a round."""
    pixels = np.random.default_rng(0).integers(0, 256, (100, side, side), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.arange(100) % 2)
    own = ["dataset.fractions={train:0.5,validation:0.4,test:0.1}", "retrain.batch_size=1"]
    own += ["algorithm=fedavg algorithm.network=linear clients=2 stages=[retrain] dataset=npz"]
    own += [f"dataset.root={tmp_path / 'a.npz'} dataset.server_test=false"]
    config = compose_config(*own, f"run_dir={tmp_path / 'run'}")
    config = replace(config, retrain=replace(config.retrain, rounds=None))
    assert len(read_run(run(config, quiet=True).folder).rounds("retrain")) == rounds
    assert baselines._planned_retraining(config, [1, side, side]).rounds == rounds


# --- the leaderboard: the simplest candidate that is hardly worse than the best is delivered


SPREAD = (0.0, 0.01, -0.01)  # of a candidate's own resamples


def add(folder, name, score, *, parameters=1, noise=0.0, metric="auroc"):
    """Write the run of a candidate; ``noise`` is what it alone loses in each second resample."""
    values = [score + shift - noise * (i % 2) for i, shift in enumerate(SPREAD * 4)]
    evaluated = {"event": "evaluated", "metric": metric, "validation": values, "central": {}}
    derived = {"event": "derived", "num_parameters": parameters, "multiply_adds": parameters}
    (folder / name).mkdir(parents=True)
    lines = [{**event, "elapsed": 0.0, "time": ""} for event in (derived, evaluated)]
    (folder / name / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in lines))


SIMPLEST = [
    (0.70, 0.89, "large"),  # the others are clearly worse
    (0.70, 0.8985, "small"),  # worse by less than the spread of the difference
    (0.899, 0.89, "linear"),
]


@pytest.mark.parametrize(("linear", "small", "expected"), SIMPLEST)
def test_the_simplest_within_a_standard_error_of_the_best_wins(tmp_path, linear, small, expected):
    scores = {"large": 0.9, "small": small, "linear": linear}
    sizes = {"large": 900, "small": 90, "linear": 1000}
    for place, add_to in ((BASELINES_FOLDER, -0.1), (FINALISTS_FOLDER, 0.0)):
        assert chosen(tmp_path) is None  # of no candidates, and before there are finalists
        for name, score in scores.items():
            noise = 0.0 if name == "large" else 0.003
            add(tmp_path / place, name, score + add_to, parameters=sizes[name], noise=noise)
        if place == BASELINES_FOLDER:
            add(tmp_path / place, "random_1", 0.6, parameters=5)
    assert set(finalists(tmp_path)) == {"large", "small", "linear"}
    assert chosen(tmp_path).name == expected
    assert [one.name for one in candidates(tmp_path)][-1] == "random_1"


def test_a_network_that_failed_is_the_last_of_the_compared(tmp_path):
    """Also where less is better, or scores are below 0."""
    for name, error in (("", 1.0), ("worse", 0.9), ("better", 0.5), ("failed", None)):
        folder = tmp_path / BASELINES_FOLDER / name if name else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        found = {"event": "evaluated", "metric": "rmse", "central": {"rmse": error}, "clients": []}
        event = {"event": "run_started"} if error is None else found
        (folder / "events.jsonl").write_text(json.dumps({"elapsed": 1.0} | event) + "\n")
        (folder / "config.yaml").write_text("{}")
    names = [row["network"] for row in compared(read_run(tmp_path))]
    assert names == ["found", "better", "worse", "failed"]


def test_fronts_are_trained_to_the_end_and_limits_bound_what_is_delivered(tmp_path):
    sizes = {"large": 900, "small": 90, "linear": 10, "front_1": 20, "front_2": 500, "found": 70}
    scores = dict(zip(sizes, (0.9, 0.8, 0.5, 0.6, 0.7, 0.4), strict=True))
    for place in (BASELINES_FOLDER, FINALISTS_FOLDER):
        for name, score in scores.items():
            add(tmp_path / place, name, score, parameters=sizes[name])
    assert set(finalists(tmp_path)) == set(scores)
    assert chosen(tmp_path).name == "large"
    limits = {"parameters": 100, "multiply_adds": None, "latency_ms": None, "table": None}
    config = {"algorithm": {"pool": {"limits": limits}}}
    (tmp_path / FINALISTS_FOLDER / "small" / "config.yaml").write_text(json.dumps(config))
    assert chosen(tmp_path).name == "small"


@pytest.mark.parametrize("score", [1.0, math.nan])
def test_of_candidates_with_the_same_scores_or_none_the_simplest_wins(tmp_path, score):
    """Validation records without positive ones define no AUROC."""
    for name in ("found", "linear"):
        for place in (BASELINES_FOLDER, FINALISTS_FOLDER):
            add(tmp_path / place, name, score)
    assert chosen(tmp_path).name == "linear"


def test_a_smaller_log_loss_is_better(tmp_path):
    for name, score in {"a": 0.4, "b": 0.6}.items():
        for place in (BASELINES_FOLDER, FINALISTS_FOLDER):
            add(tmp_path / place, name, score, metric="log_loss")
    choice = chosen(tmp_path)
    assert (choice.name, choice.row()["validation"]) == ("a", 0.4)


LONGER = [(2, 5, BASELINES_FOLDER), (5, 5, FINALISTS_FOLDER)]


@pytest.mark.parametrize(("long", "short", "counts"), LONGER)
def test_of_a_training_that_time_has_cut_the_longer_one_counts(tmp_path, long, short, counts):
    for place, rounds in ((BASELINES_FOLDER, short), (FINALISTS_FOLDER, long)):
        add(tmp_path / place, "linear", 0.8)
        event = {"event": "round", "stage": "retrain", "metrics": {}, "elapsed": 0.0, "time": ""}
        with (tmp_path / place / "linear" / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(event | {"round": r + 1}) + "\n" for r in range(rounds))
    (one,) = candidates(tmp_path)
    assert one.run.folder.parent.name == counts


@pytest.fixture
def recommended(compose_config, tmp_path):
    return compose_config(
        "experiment=search/recommended dataset=digits clients=2 retrain.rounds=3 rounds=1",
        "search_space.channels=4 retrain.channels=4 algorithm.local_epochs=1",
        "algorithm.pool.draws=4 algorithm.pool.keep=2 dataset.limit_train=120",
        f"evaluation.baselines=1 run_dir={tmp_path / 'run'}",
    )


@pytest.mark.run
@pytest.mark.parametrize("best", ["linear", "features", "found", "random_1", by_hand("resnet8_4")])
def test_a_run_delivers_the_candidate_that_is_chosen(best, recommended, tmp_path, monkeypatch):
    """Whichever it is: the model, its genotype and its test are of that network."""
    real = baselines.__dict__["finalists"]
    monkeypatch.setattr(baselines, "finalists", lambda folder: [best, *real(folder)][:1])
    if best == "features":
        monkeypatch.setattr(baselines, "SIDES", [8])
    evaluation = replace(recommended.evaluation, personalised=True)
    seed = 2 if best == "random_1" else 1  # the search finds what scores put first with 1
    result = run(replace(recommended, evaluation=evaluation, seed=seed))
    record = read_run(result.folder)
    assert record.status == "completed"
    names = {one.name for one in candidates(result.folder)}
    is_data_free = "the network that was found, too" in sentence("baselines", record)
    assert is_data_free == ("data_free" not in names) == (seed == 1)
    assert names - {"data_free", "features"} == {"found", "linear", "random_1", "resnet8_4"}
    assert ("features" in names) == (best == "features")
    features = "Take the linear model on scattering features of the images"
    assert (features in sentence("verdict", record)) == (best == "features")
    (choice,) = [one for one in candidates(result.folder) if one.name == best]
    assert chosen(result.folder) == choice
    if best == "features":
        card = (result.folder / "MODEL_CARD.md").read_text()
        assert "A linear classifier on scattering features of the images, which several" in card
        shapes = noting(monkeypatch, baselines, "_planned_retraining", lambda *of: of[2])
        baselines.delivered(open_run_folder(str(result.folder)), choice)
        assert shapes == [[1, 8, 8]]  # of a record as the run began with it
    copies, known = (of.last("evaluated")["copies"] for of in (record, choice.run))
    assert [one["gain"] for one in copies] == [one["gain"] for one in known]
    keeping = {one["client"] for one in copies if one["gain"] > 0}
    kept = {path.parent.name for path in result.folder.glob("copies/*/model.safetensors")}
    assert kept == {f"client_{client}" for client in keeping}
    of_model, of_choice = load_description(result.folder), load_description(choice.run.folder)
    assert of_model == of_choice
    assert (result.genotype is None) == (best in ("linear", "features", "resnet8_4"))
    assert record.last("evaluated")["validation"] is None
    assert len(choice.run.rounds("retrain")) == 3
    assert len(choice.short.rounds("retrain")) == 1
    first, *board = result.leaderboard()
    assert (first["network"], first["rounds"]) == (f"delivered ({best})", 3)
    board = [row for row in board if row["rounds"]]
    assert {row["network"] for row in board} == names
    assert all(0 <= row["validation"] <= 1 and row["rounds"] in (1, 3) for row in board)
    assert leaderboard_table(record)[2][0][0] == f"delivered ({best})"
    assert f"delivered ({best})" in write_report(result.folder).read_text()


@pytest.mark.run
def test_the_linear_model_of_unlike_sites_is_the_pooled_one(compose_config, tmp_path, monkeypatch):
    """Averages of local models lost .005."""
    drawn, site = np.random.default_rng(0), np.repeat([0, 1, 2], [400, 60, 140])
    x = drawn.normal(size=(600, 6)) + (site[:, None] - 1) * [1, 1, 0, 0, 0, 0]
    odds = x @ [1.0, -1.0, 0.5, 0, 0, 0] + 2.5 * (site - 1)
    table = pd.DataFrame(x, columns=list("abcdef")).assign(site=[f"site {s}" for s in site])
    table["died"] = np.where(drawn.random(600) < 1 / (1 + np.exp(-odds)), "yes", "no")
    table.to_csv(tmp_path / "patients.csv", index=False)
    config = compose_config(
        "experiment=search/recommended dataset=csv search_space=mlp_small algorithm.local_epochs=1",
        f"dataset.root={tmp_path / 'patients.csv'} dataset.label=died partition=column clients=3",
        "partition.column=site algorithm.pool.draws=2 algorithm.pool.keep=2 algorithm.eta=2",
        "rounds=1 search_space.channels=8 retrain.channels=8 retrain.rounds=null",
        f"retrain.batch_size=32 evaluation.baselines=1 run_dir={tmp_path / 'run'}",
    )
    real = baselines.__dict__["_candidates"]
    monkeypatch.setattr(baselines, "_candidates", lambda c: {"linear": real(c)["linear"]})
    record = read_run(run(config).folder)
    pooled = record.scores("linear")["auroc"]
    assert record.scores("central")["auroc"] == pytest.approx(pooled, abs=0.002)
    settings = record.settings  # as they took effect, which the configuration does not say
    assert settings["retrain"]["weights"]["lr"] == 1.0
    assert (settings["retrain"]["rounds"], settings["server_optimizer"]["name"]) == (120, "adam")


@pytest.mark.run
def test_a_run_that_was_stopped_goes_on_where_it_was(recommended, monkeypatch):
    """After the search, between candidates, and before what is delivered."""
    from fednas_flwr.deploy import whole_run

    launch, launched = whole_run.launch, list[str]()

    def stopping(config, **options):
        launched.append(Path(str(config.run_dir)).name)
        if len(launched) in (2, 5, 9):
            raise KeyboardInterrupt
        launch(config, **options)

    monkeypatch.setattr(whole_run, "launch", stopping)
    refuses("", run, recommended, error=KeyboardInterrupt)
    folder = Path(str(recommended.run_dir))
    statuses = []
    for _ in range(2):
        statuses.append(read_run(folder).status)
        refuses("", run, folder, error=KeyboardInterrupt)
    run(folder)
    assert statuses == ["unfinished"] * 2
    assert read_run(folder).status == "completed"
    assert launched.count("run") == 2  # its search once, and what it delivers
    before = (folder / "model.onnx").read_bytes()
    run(folder)
    assert (folder / "model.onnx").read_bytes() == before


@pytest.mark.run
def test_when_time_is_over_one_candidate_is_trained_and_the_choice_stands(recommended, monkeypatch):
    monkeypatch.setitem(parser.SECONDS, "s", 1e-9)
    folder = run(with_runtime(recommended, time_limit="1s")).folder
    assert read_run(folder).status == "cut short"
    said = "Left out, as time was over: found, random_1, resnet8_4. Of runtime.time_"
    assert f"{said}limit=1s the search took " in write_report(folder).read_text()
    assert sentence("verdict", read_run(folder)).startswith("The linear model that was trained has")
    assert "trained together. The records stayed" in (folder / "MODEL_CARD.md").read_text()
    monkeypatch.setitem(parser.SECONDS, "s", 1e6)
    run(folder)
    assert [len(read_run(folder).rounds("retrain")), read_run(folder).status] == [3, "completed"]
    board = [row["network"] for row in compared(read_run(folder))]
    assert board[:2] == ["delivered (linear)", "linear"]


@pytest.mark.run
def test_no_candidate_has_trained_on_what_chooses_it(recommended, monkeypatch):
    """Neither search nor candidates read validation records before they are measured on them."""
    from fednas_flwr.client.client import Client

    trained: list[str] = []
    real = Client.epoch

    def noted(self, split, **options):
        trained.extend(
            name
            for name in ("train", "validation", "test")
            if {*getattr(self.data, name).rows.tolist()} & {*split.rows.tolist()}
        )
        return real(self, split, **options)

    monkeypatch.setattr(Client, "epoch", noted)
    config = replace(recommended, stages=["search", "retrain", "evaluate", "export"])
    last = read_run(Path(str(run(config).folder))).rounds("retrain")
    assert {*trained[: -2 * 2 * len(last)]} == {"train"}
    assert {*trained} == {"train", "validation"}


def test_a_run_without_a_choice_shows_its_baselines_by_test_scores(tmp_path):
    add(tmp_path, "own", 0.9, parameters=3)
    add(tmp_path / "own" / BASELINES_FOLDER, "linear", 0.8)
    file = tmp_path / "own" / BASELINES_FOLDER / "linear" / "events.jsonl"
    file.write_text(file.read_text().replace('"validation": [', '"past": ['))
    rows = compared(read_run(tmp_path / "own"))
    assert [row["network"] for row in rows] == ["found", "linear", "chance"]
    assert Result(tmp_path / "own").leaderboard() == rows


def test_experiments_of_papers_deliver_what_was_found():
    assert compose("experiment=feathers/fraud").evaluation.deliver == "found"
    assert compose("experiment=search/recommended").evaluation.deliver == "best"


@pytest.mark.slow
def test_a_front_has_networks_of_five_ranges_of_cost(recommended):
    pool = replace(recommended.algorithm.pool, front=True, draws=24, keep=5)
    limits = replace(pool.limits, multiply_adds=200_000)
    algorithm = replace(recommended.algorithm, pool=replace(pool, limits=limits), eta=5)
    result = run(replace(recommended, algorithm=algorithm))
    genotypes = read_run(result.folder).of_kind("rewarded")[0]["genotypes"]
    assert len(genotypes) == 5
    fronts = sorted((result.folder / FINALISTS_FOLDER).glob("front_*"))
    assert len(fronts) == 4  # the fifth is the found one
    trained = [json.loads((folder / "genotype.json").read_text()) for folder in fronts]
    found = json.loads((result.folder / BASELINES_FOLDER / "found" / "genotype.json").read_text())
    costs = [read_run(folder).numbers()["multiply_adds"] for folder in fronts]
    assert costs == sorted(costs)
    assert costs[-1] <= 200_000
    assert all((folder / "model.onnx").exists() for folder in fronts)
    assert all(genotype in genotypes for genotype in [*trained, found])
    rows = {row["network"]: row for row in result.leaderboard()}
    assert {folder.name for folder in fronts} < rows.keys()
    assert all(rows[folder.name]["rounds"] == 3 for folder in fronts)

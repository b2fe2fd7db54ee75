"""``evaluation.baselines=2``: networks that were not searched, trained beside the found one."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fednas_flwr.algorithms.zero_cost import ZeroCostSettings
from fednas_flwr.api import compose, run
from fednas_flwr.base.errors import NoEffectError
from fednas_flwr.models.networks import FIXED_NETWORKS, load_description
from fednas_flwr.pipeline import baselines
from fednas_flwr.report.comparison import run_folders
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import open_run_folder
from fednas_flwr.settings.optimizers import RESNETS
from fednas_flwr.spaces.costs import count_multiply_adds

from ..booked import booked
from ..rows import seldom

SETTINGS = ("dataset", "partition", "retrain", "privacy", "clients", "runtime", "training")

PRIVATE = (
    "algorithm=dp_fnas privacy=dp privacy.epsilon=50 clients=2 "
    "search_space.norm=group retrain.norm=group"
)
RANGES = {
    **dict.fromkeys(("lr", "momentum", "alpha_lr", "dropout"), (0.02, 0.03)),
    **dict.fromkeys(("weight_decay", "alpha_weight_decay"), (1e-4, 2e-4)),
}


@pytest.fixture
def few_draws(monkeypatch):
    """Take fewer networks for the data-free choice, for time alone."""
    shipped = baselines.read_yaml

    def fewer(path, file):
        settings = shipped(path, file)
        if file == baselines.DATA_FREE_FILE:
            settings["algorithm"]["draws"] = 4
            settings["algorithm"]["shortlist"]["keep"] = 2
        return settings

    monkeypatch.setattr(baselines, "read_yaml", fewer)


def told(folder):
    return {own.folder.name: own.config for own in read_run(folder).baselines()}


REAL_SITES = ("runtime=deployment", "runtime.superlink=site", "partition=sites")


def test_private_real_sites_train_no_baselines():
    private = ("algorithm=dp_fnas", "privacy=dp", *REAL_SITES)
    with pytest.raises(NoEffectError, match=r"evaluation.baselines=2 .* would pay for more"):
        compose(*private, "evaluation.baselines=2")
    assert compose(*private).evaluation.baselines is None
    exact = compose(*REAL_SITES, "evaluation.baselines=2")  # they cost time alone
    assert exact.evaluation.baselines == 2


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
    own = ("evaluation.baselines=1", measured, f"privacy.sites={sites}", f"run_dir={folder}")
    run(compose_config(PRIVATE, *own))
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


@pytest.mark.parametrize(
    ("search", "retrain", "evaluate", "number"),
    [(200.0, 10.0, 1.0, 2), (40.0, 1.0, 0.0, 0), (200.0, 30.0, 0.0, 0), (200.0, 10.0, 20.0, 0)],
)
def test_baselines_are_made_where_they_add_little(tmp_path, search, retrain, evaluate, number):
    """The run takes over a minute, and five times all but its search is less than half of it."""
    stages = {"search": search, "retrain": retrain, "evaluate": evaluate}
    lines = [{"event": "run_started"}]
    for name, seconds in stages.items():
        lines.append({"event": "stage_started", "stage": name, "elapsed": 0.0})
        ended = {"stage": name, "seconds": seconds, "elapsed": seconds}
        lines.append({"event": "stage_finished", **ended})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert baselines.affordable(tmp_path) == number
    (tmp_path / "baselines").mkdir()
    assert baselines.affordable(tmp_path) == 2  # it goes on with what it has begun


def test_the_data_free_choice_goes_by_few_scores_where_none_ranks(compose_config):
    """Of DARTS' cells: in the run's own space, without a shortlist."""
    config = compose_config("search_space=darts_small")
    own = baselines._data_free(config)
    assert own.search_space == config.search_space
    assert isinstance(own.algorithm, ZeroCostSettings)
    assert (own.algorithm.draws, own.algorithm.shortlist, own.rounds) == (250, None, 1)


def test_the_data_free_choice_of_a_table_keeps_the_tables_space(compose_config):
    config = compose_config("search_space=mlp_small")
    choice = baselines._data_free(config)
    assert choice.search_space == config.search_space
    assert isinstance(choice.algorithm, ZeroCostSettings)
    assert choice.algorithm.shortlist is not None
    for name in ("data_free", "recommended_private"):
        composed = compose_config(f"experiment=search/{name}", "search_space=mlp_small")
        sizes = (composed.search_space.channels, composed.search_space.num_cells)
        assert sizes == (config.search_space.channels, config.search_space.num_cells)


@pytest.mark.run
@pytest.mark.parametrize(("low", "high"), [(0.02, 0.03), (2e-4, 3e-4)])
def test_found_hyper_parameters_are_taken_over(compose_config, tmp_path, low, high):
    """Also a learning rate below the one to which retraining's would fall."""
    folder = tmp_path / "run"
    ranges = ",".join(
        f"{name}: {{low: {least}, high: {most}, log: false}}"
        for name, (least, most) in (RANGES | {"lr": (low, high)}).items()
    )
    own = ("algorithm=random_search", "rounds=1", f"run_dir={folder}")
    config = compose_config(*own, f"algorithm.ranges={{{ranges}}}")
    run(config)
    derived = read_run(folder).last("derived")
    found = derived["configuration"]
    assert low <= found["lr"] <= high
    own = baselines._trained_alike(open_run_folder(str(folder)), derived)
    assert own.retrain.weights.lr == found["lr"]
    assert own.retrain.weights.min_lr == min(config.retrain.weights.min_lr, found["lr"])


@pytest.mark.parametrize(("side", "rounds"), [(15, 10), seldom(16, 20)])
def test_a_run_and_what_it_is_compared_with_train_images_as_long(
    compose_config, tmp_path, side, rounds
):
    """The median client has 45 batches of a record in a round."""
    pixels = np.random.default_rng(0).integers(0, 256, (100, side, side), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.arange(100) % 2)
    config = compose_config(
        *("algorithm=fedavg", "algorithm.network=linear", "clients=2", "dataset=npz"),
        *(f"dataset.root={tmp_path / 'a.npz'}", "dataset.server_test=false", "stages=[retrain]"),
        *("dataset.fractions={train:0.5,validation:0.4,test:0.1}", "retrain.batch_size=1"),
    )
    config = replace(config, retrain=replace(config.retrain, rounds=None))
    config = replace(config, run_dir=str(tmp_path / "run"))
    assert len(read_run(run(config, quiet=True).folder).rounds("retrain")) == rounds
    assert baselines._planned_retraining(config).rounds == rounds

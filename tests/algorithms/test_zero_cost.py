"""The data-free search: nobody is asked, nothing is booked, the best of all is derived."""

import shutil
from dataclasses import replace
from functools import partial

import pytest

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import describe_network, make_network, supernet_space
from fednas_flwr.search.data_free_scores import AZ_NAS, SYNFLOW, combine, measure
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.genotype import load_genotype, to_json

SEARCH = ["algorithm=zero_cost", "algorithm.draws=4", "algorithm.scores=[synflow,parameters]"]
ROUNDS = 3


@pytest.fixture(scope="module")
def searched(search, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero_cost")
    federation = search(*SEARCH, rounds=ROUNDS, checkpoints=folder)
    federation.folder = folder
    return federation


def test_the_best_ranked_of_all_drawn_architectures_is_derived(searched):
    """Every round's draws again, scored and ranked by hand."""
    config, space = searched.config, searched.strategy.space
    score = partial(measure, space, scores=["synflow", "parameters"], seed=config.seed)
    drawn = {}
    for number in range(1, ROUNDS + 1):
        generator, of_round = make_generator(config.seed, "zero_cost", number), {}
        while len(of_round) < 4:
            genotype = space.random_genotype(generator)
            of_round[to_json(genotype)] = genotype
        drawn |= of_round
    combined = combine([score(genotype) for genotype in drawn.values()])
    best = list(drawn.values())[max(range(len(combined)), key=combined.__getitem__)]
    assert searched.strategy.derive() == best
    assert searched.named("round")[-1]["metrics"]["scored"] == len(drawn) > 4


RANKED_BY = [("nasbench201", AZ_NAS), ("darts", SYNFLOW), ("mbconv", SYNFLOW)]


@pytest.mark.parametrize(("space", "scores"), RANKED_BY)
def test_scores_that_are_not_set_are_those_that_rank_the_space(space, scores, search):
    settings = ["algorithm.scores=null", "algorithm.draws=2", f"search_space={space}_small"]
    federation = search(*SEARCH, *settings)
    assert [set(one.scores) for one in federation.strategy.pool()] == [set(scores)] * 2


def test_no_client_is_asked_anything(searched):
    assert searched.asked == []
    rounds = searched.named("round")
    assert [event["exchanges"] for event in rounds] == [0] * ROUNDS
    assert {event["bytes_sent"] + event["bytes_received"] for event in rounds} == {0}


def test_the_best_of_the_shortlist_is_derived(searched, search):
    """The first three of the same ranking, in the order of synflow."""
    federation = search(*SEARCH, "algorithm.shortlist={keep: 3, scores: [synflow]}", rounds=ROUNDS)
    space, seed = federation.strategy.space, federation.config.seed
    plain = [one.genotype for one in searched.strategy.pool()]
    values = [measure(space, genotype, ["synflow"], seed=seed)["synflow"] for genotype in plain]
    best = sorted(range(3), key=lambda index: -values[index])
    pool = federation.strategy.pool()
    assert [one.genotype for one in pool] == [plain[index] for index in best] + plain[3:]
    assert federation.strategy.derive() == plain[best[0]]
    assert federation.events[-1]["metrics"]["synflow"] == values[best[0]]
    rehearsed, _ = replace(federation.config.algorithm, draws=9).rehearsed(space.name)
    assert (rehearsed.draws, rehearsed.shortlist) == (4, None)


def test_resume_gives_the_same_ranking(searched, federate, tmp_path):
    last = shutil.ignore_patterns(f"search-00000{ROUNDS}.*")
    half = shutil.copytree(searched.folder, tmp_path / "half", ignore=last)
    resumed = federate(searched.config, checkpoints=half)
    resumed.strategy.start(resumed.grid, num_rounds=ROUNDS)
    assert resumed.strategy.values == searched.strategy.values


def test_a_private_run_books_retraining_only(run_inline, tmp_path):
    """The search's epsilon is 0, the event says so, and no ledger has a row of it.

    Its networks see no record, so that they may have batch norm.
    """
    run = run_inline(
        *SEARCH,
        *("privacy=dp", "clients=2", "rounds=1", "retrain.rounds=1", "retrain.norm=group"),
        *("search_space.norm=batch", "privacy.retrain.local_steps=2", "stages=[search,retrain]"),
        f"privacy.sites={tmp_path}",
    )
    told = run.the("privacy")
    assert {planned["stage"] for planned in told["schedule"]} == {"retrain"}
    assert [client["search_epsilon"] for client in told["clients"]] == [0.0, 0.0]
    assert load_genotype(run.folder / "genotype.json")


def test_limits_hold(searched, search):
    """Of a search alone they are for networks of its own size."""
    space = searched.strategy.space
    free = sorted(count_parameters(space.network(s.genotype)) for s in searched.strategy.pool())
    most = free[len(free) // 2]
    limits = f"parameters: {most}, multiply_adds: null, latency_ms: null, table: null"
    federation = search(*SEARCH, "stages=[search]", f"algorithm.limits={{{limits}}}", rounds=2)
    found = [count_parameters(space.network(s.genotype)) for s in federation.strategy.pool()]
    assert max(found) <= most < max(free)


DIGITS = ["dataset=digits", "dataset.limit_train=60"]
DIGITS += ["search_space.num_cells=1", "retrain.channels=8"]
POOL = ["algorithm.pool.draws=6", "algorithm.pool.keep=2", "algorithm.pool.by=[parameters]"]


LIMITED = [
    ([*SEARCH, "rounds=2"], "algorithm.limits", "multiply_adds"),
    ([*SEARCH, "rounds=2"], "algorithm.limits", "parameters"),
    (["algorithm=successive_halving", *POOL], "algorithm.pool.limits", "parameters"),
]


@pytest.mark.parametrize(("own", "limits", "cost"), LIMITED)
def test_limits_are_those_of_what_is_retrained(own, limits, cost, compose_config, finished_run):
    """Real runs, whose networks would all be within the limit at the size of the search."""
    own = [*own, *DIGITS, "clients=2", "retrain.rounds=1"]
    config = compose_config(*own)
    prepared, _ = make_data(config)
    space, generator = supernet_space(config, prepared), make_generator(0, "networks")

    def count(network):
        if cost == "parameters":
            return count_parameters(network)
        return count_multiply_adds(network, prepared.input_shape)

    drawn = [space.random_genotype(generator) for _ in range(9)]
    most = sorted(count(make_network(describe_network(config, prepared, g))) for g in drawn)[4]
    assert most > max(count(space.network(genotype)) for genotype in drawn)
    found = []
    for limit, stages in ((most, "search,retrain"), ("null", "search")):
        run = finished_run(*own, f"{limits}.{cost}={limit}", f"stages=[{stages}]")
        found.append(run.the("derived")["num_parameters" if cost == "parameters" else cost])
    assert found[0] <= most < found[1]

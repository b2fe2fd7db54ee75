"""The data-free search: nobody is asked, nothing is booked, the best of all is derived."""

from __future__ import annotations

import shutil
from functools import partial

import pytest

from fednas_flwr.errors import ConfigError
from fednas_flwr.hardware.flops import count_parameters
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.scores import AZ_NAS, SYNFLOW, combine, measure
from fednas_flwr.search_spaces.genotype import load_genotype, to_json

SEARCH = ["algorithm=zero_cost", "algorithm.draws=4", "algorithm.scores=[synflow,parameters]"]
ROUNDS = 3


@pytest.fixture(scope="module")
def searched(compose_config, federate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero_cost")
    federation = federate(compose_config(*SEARCH), checkpoints=folder)
    federation.folder, federation.asked = folder, []
    ask = federation.courier.ask

    def recording(verb, **arguments):
        federation.asked.append(verb)
        return ask(verb, **arguments)

    federation.courier.ask = recording
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
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
    scores = [score(genotype) for genotype in drawn.values()]
    combined = combine(scores)
    best = list(drawn.values())[max(range(len(combined)), key=combined.__getitem__)]
    assert searched.strategy.derive() == best
    rounds = [event["metrics"] for event in searched.events if event["event"] == "round"]
    assert rounds[-1]["scored"] == len(drawn) > 4


@pytest.mark.parametrize(
    ("space", "scores"), [("nasbench201", AZ_NAS), ("darts", SYNFLOW), ("mbconv", SYNFLOW)]
)
def test_scores_that_are_not_set_are_those_that_rank_the_space(
    space, scores, compose_config, federate
):
    settings = ["algorithm.scores=null", "algorithm.draws=2", f"search_space={space}_small"]
    federation = federate(compose_config(*SEARCH, *settings))
    federation.strategy.start(federation.grid, num_rounds=1)
    assert [set(one.scores) for one in federation.strategy.pool()] == [set(scores)] * 2


def test_no_client_is_asked_anything(searched):
    assert searched.asked == []
    rounds = [event for event in searched.events if event["event"] == "round"]
    assert [event["exchanges"] for event in rounds] == [0] * ROUNDS
    assert {event["bytes_sent"] + event["bytes_received"] for event in rounds} == {0}


def test_the_best_of_the_shortlist_is_derived(searched, compose_config, federate):
    """The first three of the same ranking, in the order of naswot."""
    shortlist = "algorithm.shortlist={keep: 3, scores: [naswot]}"
    federation = federate(compose_config(*SEARCH, shortlist))
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    space, seed = federation.strategy.space, federation.config.seed
    plain = [one.genotype for one in searched.strategy.pool()]
    values = [measure(space, genotype, ["naswot"], seed=seed)["naswot"] for genotype in plain]
    best = sorted(range(3), key=lambda index: -values[index])
    pool = federation.strategy.pool()
    assert [one.genotype for one in pool] == [plain[index] for index in best] + plain[3:]
    assert federation.strategy.derive() == plain[best[0]]
    metrics = federation.events[-1]["metrics"]
    assert metrics["naswot"] == values[best[0]]


def test_resume_gives_the_same_ranking(searched, federate, tmp_path):
    shutil.copytree(searched.folder, tmp_path / "half")
    for path in (tmp_path / "half").glob(f"search-00000{ROUNDS}.*"):
        path.unlink()
    resumed = federate(searched.config, checkpoints=tmp_path / "half")
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
    assert run.error is None
    (told,) = [event for event in run.events if event["event"] == "privacy"]
    assert {planned["stage"] for planned in told["schedule"]} == {"retrain"}
    assert [client["search_epsilon"] for client in told["clients"]] == [0.0, 0.0]
    assert load_genotype(run.folder / "genotype.json")


def test_limits_hold(searched, compose_config, federate):
    space = searched.strategy.space
    free = sorted(count_parameters(space.network(s.genotype)) for s in searched.strategy.pool())
    most = free[len(free) // 2]
    limits = f"parameters: {most}, multiply_adds: null, latency_ms: null, table: null"
    federation = federate(compose_config(*SEARCH, f"algorithm.limits={{{limits}}}"))
    federation.strategy.start(federation.grid, num_rounds=2)
    found = [count_parameters(space.network(s.genotype)) for s in federation.strategy.pool()]
    assert max(found) <= most < max(free)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithm.scores=[synflo]", r"algorithm.scores=synflo is unknown.*\(nearest: synflow\)"),
        ("algorithm.scores=[]", "algorithm.scores=.* expected 1 or more entries"),
        ("algorithm.draws=0", "algorithm.draws=0 is out of range"),
        (
            "algorithm.shortlist={keep: 5, scores: [zen]}",
            r"shortlist.keep=5 .* 2 to draws=4",
        ),
        (
            "algorithm.shortlist={keep: 2, scores: [zenn]}",
            r"algorithm.shortlist.scores=zenn is unknown.*nearest: zen",
        ),
        ("algorithm.shortlist={keep: 2, scores: [zen, zen]}", "shortlist.scores"),
        ("algorithm.limits.parameters=0", "limits.parameters=0 is out of range"),
        ("algorithm.limits.latency_ms=3", "a limit of latency needs a table"),
    ],
)
def test_mistakes_are_told(compose_config, override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compose_config(*SEARCH, override)

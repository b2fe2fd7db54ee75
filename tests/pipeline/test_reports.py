"""Report and model card of real runs state what the clients did, whatever the settings say."""

from collections import Counter

import pytest

from fednas_flwr.report.score_tables import setting_rows
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.numbers import read_run

from ..booked import booked
from ..composing import ranges_of

PRIVATE = ["privacy=dp", "privacy.epsilon=100", "clients=2", "algorithm.batch_size=8"]
PRIVATE += ["retrain.batch_size=16", "retrain.local_epochs=9", "search_space.norm=group"]
PRIVATE += ["retrain.norm=group", "privacy.local_steps=2", "privacy.retrain.local_steps=3"]


def card(run):
    return (run.folder / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_private_training_is_told_in_the_steps_that_the_ledgers_hold(run_inline):
    run = run_inline(*PRIVATE, "algorithm.local_epochs=7", "stages=[search,retrain]")
    rows = [row for row in booked(run.folder / "sites") if row.action.endswith(":weights")]
    assert Counter(row.stage for row in rows) == {"search": 2 * 2, "retrain": 2 * 3}
    assert {row.release.steps for row in rows} == {1}
    shown = dict(setting_rows(read_run(run.folder)))
    expected = {
        "algorithm.name": "fed_darts",
        "algorithm.local_steps": "2",
        "algorithm.expected_batch_size": "8",
        "retrain.local_steps": "3",
        "retrain.expected_batch_size": "16",
        "rounds": "2",
    }
    assert shown.items() >= expected.items()
    assert "algorithm.local_epochs" not in shown
    text = card(run)
    assert "epochs" not in text
    assert "| algorithm.local_steps | 2 |" in text
    assert "| algorithm.expected_batch_size | 8 |" in text
    assert "- It was not evaluated." in text
    assert "Not all of it was released" not in text


def test_a_given_genotype_was_not_searched_for(finished_run):
    searched = finished_run("stages=[search]", "clients=2", "rounds=1")
    assert "; its weights were not trained." in card(searched)
    assert "Nothing was searched" not in card(searched)
    given = ("stages=[retrain,evaluate]", f"genotype={searched.folder / 'genotype.json'}")
    run = finished_run(*given, "clients=2", "retrain.rounds=1", "algorithm.local_epochs=7")
    assert run.error is None
    shown, text = dict(setting_rows(read_run(run.folder))), card(run)
    assert sentence("title", read_run(run.folder)) == "npz, 2 clients"
    assert not {"algorithm.name", "search_space.name", "rounds"} & set(shown)
    assert shown["genotype"].endswith("genotype.json")
    assert "A classifier of a given architecture, whose weights several clients trained" in text
    assert "algorithm" not in text
    assert "another seed gives another accuracy." in text
    report = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "The network that was given" in report
    assert "The network that was found" not in report


def test_hyper_parameters_that_were_chosen_are_not_those_of_the_settings(finished_run):
    feathers = ("algorithm=feathers", "algorithm.num_configurations=3", "algorithm.nas_rounds=2")
    text = card(finished_run(*feathers, "clients=2", "stages=[search,retrain]"))
    assert "retrain.weights.lr" not in text
    assert "| retrain.hyperparameters | chosen by feathers in every round |" in text
    own = ("algorithm=random_search", "rounds=1", "clients=2", "retrain.rounds=1")
    found = finished_run(*own, ranges_of(lr=(0.001, 0.002), dropout=(0.0, 0.1)))
    derived = found.the("derived")
    assert f"| retrain.weights.lr | {derived['configuration']['lr']} |" in card(found)
    assert f"| retrain.drop_path_prob | {derived['configuration']['dropout']} |" in card(found)


@pytest.mark.parametrize("private", [False, True])
def test_the_time_of_each_client_is_told_unless_it_is_private(finished_run, private):
    linear = ("algorithm=fedavg", "algorithm.network=linear", "clients=2", "retrain.rounds=2")
    terms = ("privacy=dp", "privacy.epsilon=30") if private else ()
    run = finished_run(*linear, "stages=[retrain]", *terms)
    seconds = [event["client_seconds"] for event in run.named("round")]
    assert [{*of} for of in seconds] == [set() if private else {"0", "1"}] * 2
    assert all(used > 0 for of in seconds for used in of.values())

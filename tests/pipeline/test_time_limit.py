"""A run with a time limit ends in time, keeps what it has, and goes on when it is resumed."""

import pytest

from fednas_flwr import load, run
from fednas_flwr.report.model_card import write_model_card
from fednas_flwr.runs.numbers import is_complete, read_run
from fednas_flwr.settings import parser
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

from ..refusals import refuses

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

import re

import pytest
import yaml
from markdown_it import MarkdownIt

from fednas_flwr.base.foreign import terminal
from fednas_flwr.report.comparison import compare_runs, write_comparison
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.model_card import export_model, write_model_card
from fednas_flwr.report.score_tables import setting_rows
from fednas_flwr.runs.numbers import read_run

from ..refusals import lacking
from .conftest import EVIL, emit, make_hostile, with_config


def card_of(folder):
    """Return the words of the card that is written of a run."""
    return write_model_card(folder).read_text(encoding="utf-8")


def test_the_card_of_a_finished_run(make_run):
    folder = make_run("run")
    path = write_model_card(folder)
    assert path == folder / "MODEL_CARD.md"
    parts = (
        "# digits, 3 clients",
        "12.3 k parameters, 6.7 M multiply-adds",
        "3 clients, split by iid, with together 60 train, 15 validation, 15 test records",
        *("| algorithm.alpha_lr | 0.0003 |", "| test accuracy | 90.0 % |", "| test F1 | 0.625 |"),
        *("| dropped replies | 1 |", f'model = load("{folder.name}")', "from 70.0 % to 90.0 %"),
        "none: this run makes no differential-privacy claim",
    )
    text = path.read_text(encoding="utf-8")
    assert lacking(text, *parts, "10, 20") == ["10, 20"]  # no counts per class and client


def test_a_private_run_states_one_epsilon_and_delta_per_client(make_run):
    parts = (
        "| 0 | (3.11, 1e-05) | per record, add/remove | 2.90 of 8 |",
        "| 1 | (4.11, 1e-05) | per record, add/remove | 2.90 of 8 |",
        "| 2 | (5.11, 1e-05) | per record, add/remove | – of 8 |",
        "| search | train.weight_gradient | train | 1.25 | 0.5 | 16 | 0.032 to 0.0533 | 1,200 |",
        *("The clients were simulated on one machine", "a Renyi filter", "Poisson sampling"),
        *("one record of one client, added or removed", "PRV accountant of dp-accounting"),
        "15 test records, as they declare",
        "- Clients that took part: 3, 1 left before the end.",
        "| mean accuracy over clients, noised | 49.0 % |",
        "| client 1 left the run | its budget has ended |",
        "from -5.0 % to 103.0 % with the noise that they added",
    )
    others = ["no differential-privacy claim", "Test seed", "linear model", "was resumed"]
    others.append("genotype was given")
    assert lacking(card_of(make_run("run", private=True)), *parts, *others) == others


def test_the_card_tells_what_the_statement_does_not_hold(make_run):
    given = {"genotype": "g.json", "runtime": {"name": "deployment"}}
    folder = with_config(make_run("run", private=True), **given)
    events = (folder / "events.jsonl").read_text()
    again = [line for line in events.splitlines(True) if '"event": "privacy"' in line]
    (folder / "events.jsonl").write_text(events + "".join(again))
    parts = (
        "The run was resumed: the table of releases",
        "that search's privacy is not part of this statement",
    )
    assert lacking(card_of(folder), *parts, "simulated") == ["simulated"]


OWN_LEDGERS = [
    ({}, True),
    ({"privacy": {"name": "dp", "sites": "kept"}}, False),
    ({"runtime": {"name": "deployment"}}, False),
]


@pytest.mark.parametrize(("changes", "told"), OWN_LEDGERS)
def test_a_run_that_made_its_ledgers_says_that_earlier_uses_do_not_count(make_run, changes, told):
    folder = with_config(make_run("run", private=True), **changes)
    for text in (card_of(folder), write_report(folder).read_text()):
        assert ("Earlier uses of the same data are not counted" in text) == told


PRIVATE_TRAINING = {  # the terms of retraining, and what they are shown as
    "expected": ({"local_steps": 5}, "local_steps 5, expected_batch_size 64"),
    "rate": ({"local_steps": 5, "rate": 0.125}, "local_steps 5, sampling_rate 0.125"),
}


@pytest.mark.parametrize("private", [None, *PRIVATE_TRAINING])
def test_card_and_report_list_what_retraining_used(make_run, private):
    folder = make_run("run", private=private is not None)
    with_config(folder, retrain={"local_epochs": 9, "batch_size": 64})
    if private:
        with_config(folder, privacy={"retrain": PRIVATE_TRAINING[private][0]})
    card = card_of(folder)
    page = write_report(folder).read_text(encoding="utf-8")
    shown = PRIVATE_TRAINING[private][1] if private else "local_epochs 9, batch_size 64"
    for name, value in (setting.split() for setting in shown.split(", ")):
        assert f"| retrain.{name} | {value} |" in card
        assert re.search(rf"<td>retrain.{name}</td>\s*<td>{value}</td>", page)
    assert (private is None) == ("local_epochs" in card) == ("retrain.local_epochs" in page)
    assert (private is None) == ("retrain.batch_size" in card) == ("retrain.batch_size" in page)


def test_clients_that_are_the_unit_train_by_epochs(make_run):
    retrain, unit = {"local_epochs": 9, "batch_size": 64}, {"unit": "client"}
    folder = make_run("run", private=True)
    with_config(folder, retrain=retrain, privacy=unit | {"retrain": {"local_steps": 5}})
    shown = dict(setting_rows(read_run(folder)))
    settings = ("rounds", "local_epochs", "batch_size")
    assert [shown[f"retrain.{name}"] for name in settings] == ["2", "9", "64"]


def test_a_client_with_a_test_seed_is_promised_nothing(make_run):
    parts = (
        "**Test seed: no privacy. Noise and sampling of client 2 come from",
        *("| 0 | (3.11, 1e-05) |", "| 2 | none (test seed: no privacy) |"),
    )
    assert lacking(card_of(make_run("run", private=True, secure_noise=False)), *parts) == []


def test_a_private_run_without_an_accepted_schedule_claims_nothing(make_run):
    text = card_of(make_run("run", private=True, until="start"))
    claim = "no differential-privacy claim"
    assert lacking(text, "no epsilon is known", claim) == [claim]


def test_a_failed_run_says_so_and_offers_no_model(make_run):
    text = card_of(make_run("run", until="search"))
    assert lacking(text, "**The run is failed**: client 2: disk full", "load") == ["load"]


def elements(text):
    """Return the elements that Markdown makes of a text, and the text that a reader sees."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    flat = [inner for token in tokens for inner in (token, *(token.children or ()))]
    shown = "".join(token.content for token in flat if token.type in ("text", "code_inline"))
    return [token.type for token in flat if token.type not in ("text", "text_special")], shown


@pytest.mark.parametrize("evil", EVIL)
def test_strangers_words_are_no_markup(make_run, evil):
    """A card has the same elements whatever clients and others have written, and shows it."""
    words = ("plain words", evil)
    _, card = cards = [card_of(make_hostile(make_run(f"run{n}"), w)) for n, w in enumerate(words)]
    (kinds, plain), (hostile_kinds, hostile) = map(elements, cards)
    assert hostile_kinds == kinds
    assert min(plain.count("plain words"), hostile.count(terminal(evil))) >= 15
    bad = ["<script", "<img", "https://", "http://", "www.", "@evil", "\x1b", "\u202e"]
    assert lacking(card, *bad) == bad


@pytest.mark.parametrize("evil", EVIL)
def test_strangers_words_are_no_markup_of_a_comparison(make_run, evil):
    texts = {}
    for name, words in (("plain", "plain words"), ("evil", evil)):
        runs = [make_run(f"{name}/{n}", algorithm=f"a{n}") for n in range(2)]
        for folder, word in zip(runs, ("w", words), strict=True):
            with_config(folder, dataset={"name": word, word: word})
        files = write_comparison(compare_runs(runs), folder.parent)
        texts[name] = {path.suffix: path.read_text(encoding="utf-8") for path in files}
    assert elements(texts["evil"][".md"])[0] == elements(texts["plain"][".md"])[0]
    assert lacking(texts["evil"][".html"], "<script>alert", "<img") == ["<script>alert", "<img"]


def test_a_published_card_has_the_metadata_of_the_run_alone(make_run, tmp_path):
    for number, evil in enumerate(EVIL):
        folder = with_config(make_run(f"run{number}"), dataset={"name": evil})
        (folder / "model.safetensors").write_bytes(b"x")
        *_, card = export_model(folder, tmp_path / f"to{number}")
        _, head, _ = card.read_text(encoding="utf-8").split("---\n", 2)  # as a naive reader does
        told = yaml.safe_load(head)
        assert set(told) == {"library_name", "model-index", "pipeline_tag", "tags"}
        assert told["model-index"][0]["results"][0]["dataset"]["name"] == terminal(evil)


def test_only_files_of_the_run_are_exported_and_only_into_the_folder(make_run, tmp_path):
    """A run of somebody else's names its files: not any that are outside."""
    folder, target = make_run("run"), tmp_path / "profile"
    target.write_text("mine")
    (folder / "profile").write_text("theirs")
    emit(folder, "exported", files=[str(target), "../profile"])
    assert target.read_text() == "mine"
    assert {path.parent for path in export_model(folder, tmp_path / "to")} == {tmp_path / "to"}

from collections.abc import Callable
from pathlib import Path

from fednas_flwr.reporting.model_card import write_model_card


def test_the_card_of_a_finished_run(make_run: Callable[..., Path]) -> None:
    folder = make_run("run")
    path = write_model_card(folder)
    assert path == folder / "MODEL_CARD.md"
    text = path.read_text(encoding="utf-8")
    for part in (
        "# fed_darts on digits",
        "12.3 k parameters, 6.7 M multiply-adds",
        "3 clients, split by iid, with together 60 train, 15 validation, 15 test records",
        "| algorithm.alpha_lr | 0.0003 |",
        "| accuracy on the server's test set | 90.0 % |",
        "| dropped replies | 1 |",
        f'network = load_network("{folder}")',
        "from 70.0 % to 90.0 %",
        "none: this run makes no differential-privacy claim",
    ):
        assert part in text
    assert "10, 20" not in text  # no counts per class and client


def test_a_run_with_privacy_claims_no_none(make_run: Callable[..., Path]) -> None:
    folder = make_run("run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("privacy: {name: none}", "privacy: {name: dp}"))
    text = write_model_card(folder).read_text(encoding="utf-8")
    assert "no differential-privacy claim" not in text
    assert "dp; the settings are in config.yaml" in text


def test_a_failed_run_says_so_and_offers_no_model(make_run: Callable[..., Path]) -> None:
    text = write_model_card(make_run("run", until="search")).read_text(encoding="utf-8")
    assert "**The run is failed**: client 2: disk full" in text
    assert "load_network" not in text

"""What the report says of FEATHERS' phases, from made events."""

from __future__ import annotations

import re

import pytest

from fednas_flwr.report import score_tables
from fednas_flwr.report.html_report import write_report
from fednas_flwr.runs.events import EventLog
from fednas_flwr.runs.numbers import read_run

CONFIGURATION = {"lr": 0.0123, "weight_decay": 1e-4, "momentum": 0.9, "dropout": 0.1}


def phase(stage, number, **changes):
    told = {"stage": stage, "round": number, "entropy": 1.5 / number, "kappa": 6 - number}
    told |= {"loss_bound": 5.0, "rewards": {"0": 0.25, "2": None, "1": -0.5}, "noise": 0.0}
    told |= {"estimates": [0.125, -0.25, None], "best": 0, "configuration": CONFIGURATION}
    return told | {"seconds": 3.0, "bytes_sent": 300, "bytes_received": 0} | changes


def round_event(stage, number, rounds):
    told = {"bytes_sent": 1300, "bytes_received": 500, "exchanges": 2, "seconds": 4.0}
    told |= {"metrics": {"lr": 0.0123, "train_loss": 1.0}}
    return told | {"stage": stage, "round": number, "rounds": rounds}


@pytest.fixture
def folder(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("run_started", resumed=False)
        log.emit("explored", **phase("search", 1, best=1))  # this process was killed
        log.emit("run_started", resumed=True)
        for stage, rounds in (("search", (1, 2, 3)), ("retrain", (1,))):
            for number in rounds:
                if number != 2:
                    log.emit("explored", **phase(stage, number))
                log.emit("round", **round_event(stage, number, len(rounds)))
    return tmp_path


def test_phases_are_told_once_in_order(folder):
    run = read_run(folder)
    phases = run.explored("search")
    assert [event["round"] for event in phases] == [1, 3]
    assert phases[0]["best"] == 0  # the repeated phase counts
    head, rows = score_tables.phase_table(phases)
    assert head[-4:] == ["lr", "weight decay", "momentum", "dropout"]
    assert rows[1] == ["3", "3", "0.25", "0", "0.125", "0.0123", "0.0001", "0.9", "0.1"]
    assert all(len(row) == len(head) for row in rows)
    assert run.numbers()["exchanges"] == 8


def test_noise_of_rewards_and_their_bound_are_told_where_there_is_noise():
    exact, noised = (phase("search", 1, noise=noise) for noise in (0.0, 0.0123))
    (head, rows), (plain, _) = map(score_tables.phase_table, ([noised], [exact]))
    assert (head[3:5], rows[0][3:5]) == (["its noise (std)", "loss bound M"], ["0.0123", "5"])
    assert head[:3] + head[5:] == plain
    assert len(rows[0]) == len(head)


def test_costs_divide_each_stage_that_explores(folder):
    text = write_report(folder).read_text().partition("Exploring against training")[2]
    rows = re.findall(r"<td>(\w+, \w+)</td>(.*?)</tr>", text.partition("</table>")[0], re.DOTALL)
    assert [[name, *re.findall(r'class="num">([^<]*)<', row)] for name, row in rows] == [
        ["Search, exploring", "6.0 s", "50.0 %", "600 B", "0 B"],
        ["Search, training", "6.0 s", "50.0 %", "3.3 kB", "1.5 kB"],
        ["Retraining, exploring", "3.0 s", "75.0 %", "300 B", "0 B"],
        ["Retraining, training", "1.0 s", "25.0 %", "1 kB", "500 B"],
    ]


def test_the_page_shows_it_for_both_stages(folder):
    page = write_report(folder).read_text()
    for stage in ("search", "retrain"):
        section = re.search(rf'<section id="{stage}">.*?</section>', page, re.DOTALL)[0]
        assert "Configurations chosen" in section
        assert "0.0123" in section
        for name in ("lr", "entropy_of_pi", "kappa") if stage == "search" else ():
            assert f'data-figure="{stage}_{name}"' in section
    assert "Exploring against training" in page

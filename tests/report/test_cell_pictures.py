import random
import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from fednas_flwr.report import plots, score_tables
from fednas_flwr.report.html_report import write_report
from fednas_flwr.runs.events import EventLog
from fednas_flwr.runs.numbers import read_run

from ..refusals import refuses
from .conftest import cell_of


def cell_svg(edges, *, title):
    """Return the picture of a cell, whose width is the one that is told."""
    picture, width = plots.cell_svg(edges, title=title)
    assert f' width="{width:.0f}"' in picture
    return str(picture)


SVG = "{http://www.w3.org/2000/svg}"


def _parse(svg):
    return ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def _boxes(root):
    return [
        (x, y, x + float(rect.get("width", "")), y + float(rect.get("height", "")))
        for rect in root.iter(f"{SVG}rect")
        for x, y in [(float(rect.get("x", "")), float(rect.get("y", "")))]
    ]


def _random_cell(seed, nodes):
    draw = random.Random(seed)
    ops = ["sep_conv_3x3", "max_pool_3x3", "skip_connect", "dil_conv_5x5"]
    pairs = [(s, t) for t in range(2, nodes + 2) for s in sorted(draw.sample(range(t), 2))]
    return cell_of(pairs, draw.choices(ops, k=len(pairs)))


@pytest.mark.parametrize("seed", range(12))
def test_nothing_overlaps_and_all_lies_inside(seed):
    root = _parse(cell_svg(_random_cell(seed, nodes=4 + seed % 3), title="cell"))
    width, height = (float(root.get(name, "")) for name in ("width", "height"))
    boxes = _boxes(root)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


@pytest.mark.parametrize("seed", range(12))
def test_straight_pieces_of_lines_run_through_no_label(seed):
    root = _parse(cell_svg(_random_cell(seed, nodes=5), title="cell"))
    boxes = _boxes(root)
    for path in root.iter(f"{SVG}path"):
        for piece in path.get("d", "").split("C")[1:]:
            end, _, after = piece.partition("H")  # a bend, then perhaps a straight piece
            if after:
                x, y = (float(value) for value in end.split()[-1].split(","))
                for left, top, right, bottom in boxes:
                    assert float(after) <= left or right <= x or not top < y < bottom


def test_a_darts_cell_shows_inputs_nodes_ops_and_the_joined_output():
    pairs = [(source, target) for source in (0, 1) for target in range(2, 6)]
    edges = cell_of(pairs, ["skip_connect"] * 4 + ["sep_conv_3x3"] * 4)
    root = _parse(cell_svg(edges, title="normal cell"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:7] == ["c(k−2)", "c(k−1)", "0", "1", "2", "3", "c(k)"]
    assert texts[7:] == ["skip_connect"] * 4 + ["sep_conv_3x3"] * 4
    assert root.get("aria-label") == "normal cell"
    assert len(list(root.iter(f"{SVG}g"))) == 8 + 4  # the edges, and the four joined nodes


def test_an_unused_input_is_drawn():
    edges = [{"op": "skip_connect", "source": 1, "target": 2}]
    texts = [text.text for text in _parse(cell_svg(edges, title="x")).iter(f"{SVG}text")]
    assert texts == ["c(k−2)", "c(k−1)", "0", "c(k)", "skip_connect"]


def test_a_nasbench_cell_ends_in_its_last_node_and_none_is_dashed():
    ops = {(0, 1): "nor_conv_3x3", (0, 2): "none", (1, 2): "avg_pool_3x3"}
    ops |= {(0, 3): "skip_connect", (1, 3): "none", (2, 3): "nor_conv_1x1"}
    svg = cell_svg(cell_of(ops, ops.values()), title="cell")
    texts = [text.text for text in _parse(svg).iter(f"{SVG}text")]
    assert texts == ["input", "1", "2", "output", *ops.values()]
    assert svg.count("stroke-dasharray") == 2


def test_names_are_escaped():
    root = _parse(cell_svg([{"op": "<op>&", "source": 0, "target": 1}], title='"<cell>"'))
    assert "<op>&" in [text.text for text in root.iter(f"{SVG}text")]
    assert root.get("aria-label") == '"<cell>"'


def test_a_cell_without_edges_is_refused():
    refuses("without edges", cell_svg, [], error=ValueError, title="empty")


def test_edges_that_a_cell_keeps_are_named_by_their_nodes():
    """All of NAS-Bench-201's cell; of DARTS' four of five candidates."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    names = ["input → 1", "input → output", "1 → output"]
    assert plots.kept_labels(cell_of(pairs, ["conv", "conv", "none"]), 3) == names
    kept = cell_of([(0, 2), (1, 2), (0, 3), (2, 3)], ["conv"] * 4)
    names = ["c(k−2) → 0", "c(k−1) → 0", "c(k−2) → 1", "0 → 1"]
    assert plots.kept_labels(kept, 5) == names
    assert plots.kept_labels([], 3) == []


# --- phases of FEATHERS, from made events


CONFIGURATION = {"lr": 0.0123, "weight_decay": 1e-4, "momentum": 0.9, "dropout": 0.1}


def phase(stage, number, **changes):
    told = {"stage": stage, "round": number, "entropy": 1.5 / number, "kappa": 6 - number}
    told |= {"loss_bound": 5.0, "rewards": {"0": 0.25, "2": None, "1": -0.5}, "noise": 0.0}
    told |= {"estimates": [0.125, -0.25, None], "best": 0, "configuration": CONFIGURATION}
    return told | {"seconds": 3.0, "bytes_sent": 300, "bytes_received": 0} | changes


@pytest.fixture
def folder(tmp_path):
    told = {"bytes_sent": 1300, "bytes_received": 500, "exchanges": 2, "seconds": 4.0}
    told |= {"metrics": {"lr": 0.0123, "train_loss": 1.0}}
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("run_started", resumed=False)
        log.emit("explored", **phase("search", 1, best=1))  # this process was killed
        log.emit("run_started", resumed=True)
        for stage, rounds in (("search", (1, 2, 3)), ("retrain", (1,))):
            for number in rounds:
                if number != 2:
                    log.emit("explored", **phase(stage, number))
                log.emit("round", stage=stage, round=number, rounds=len(rounds), **told)
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

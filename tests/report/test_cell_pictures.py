import random
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from fednas_flwr.report import cell_pictures

from .conftest import cell_of


def cell_svg(edges, *, title):
    """Return the picture of a cell, whose width is the one that is told."""
    picture, width = cell_pictures.cell_svg(edges, title=title)
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
                stop = float(after)
                for left, top, right, bottom in boxes:
                    assert stop <= left or right <= x or not top < y < bottom


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
    with pytest.raises(ValueError, match="without edges"):
        cell_svg([], title="empty")

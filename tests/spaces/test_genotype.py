import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.models.networks import make_space
from fednas_flwr.spaces import genotype as genotypes
from fednas_flwr.spaces.genotype import Edge, Genotype, from_json, skip_share, to_json

from ..json_trees import json_trees
from ..refusals import refuses

GENOTYPE = Genotype("toy", {"normal": (Edge("conv", 0, 1), Edge("skip_connect", 0, 2))})


def test_json_says_what_it_is_and_gives_the_genotype_back():
    edges = [{"op": "conv", "source": 0, "target": 1}]
    edges.append({"op": "skip_connect", "source": 0, "target": 2})
    head = {"format": "fednas-genotype", "version": 1, "space": "toy"}
    assert json.loads(to_json(GENOTYPE)) == head | {"cells": {"normal": edges}}
    assert from_json(to_json(GENOTYPE)) == GENOTYPE


def altered(**changes):
    document = json.loads(to_json(GENOTYPE))
    document.update(changes)
    return json.dumps(document)


def with_edge(**changes):
    edge = {"op": "conv", "source": 0, "target": 1, **changes}
    edge = {name: value for name, value in edge.items() if value is not None}
    return altered(cells={"normal": [edge]})


WRONG_TEXTS = [
    ("", "my.json is not valid JSON"),
    ("[" * 100_000, "my.json is not valid JSON"),
    ("[1]", r"my.json: format must be 'fednas-genotype', got \[1\]"),
    ("{}", "my.json: format must be 'fednas-genotype', got null"),
    (altered(format="Genotype(normal=..."), "format must be 'fednas-genotype', got Genotype"),
    (altered(version=2), "my.json: version must be 1, got 2"),
    (altered(version=True), "my.json: version must be 1, got true"),
    (altered(extra=1), "setting=my.json: genotype.extra is unknown"),
    (with_edge(op=None), r"my.json: genotype.cells.normal\[0\].op is missing\.$"),
    (with_edge(weight=1), r"genotype.cells.normal\[0\].weight is unknown"),
    (with_edge(target=True), "target=true has the wrong type: expected a whole number"),
    (with_edge(source=1), "0 <= source < target must hold, got 1 and 1"),
    (with_edge(source=-1), "0 <= source < target must hold, got -1 and 1"),
    (altered()[:-1] + ', "space": "toy"}', "the field 'space' appears twice"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TEXTS)
def test_wrong_text_is_refused_by_field_and_value(text, message):
    refuses(message, from_json, text, origin="my.json")


edge_keys = st.sampled_from(["op", "source", "target", "normal"])
json_values = json_trees(st.text(max_size=5), keys=edge_keys)


@given(field=st.sampled_from(["format", "version", "space", "cells"]), value=json_values)
def test_any_value_in_any_field_is_a_genotype_or_a_config_error(field, value):
    try:
        genotype = from_json(altered(**{field: value}))
    except ConfigError:
        return
    assert from_json(to_json(genotype)) == genotype


def test_unreadable_files_are_named(tmp_path):
    for name, content, words in (
        ("missing.json", None, "^genotype=.*missing.json cannot be read: No such file"),
        ("model.bin", b"\xff\xfe\x00", "^genotype=.*model.bin is not a UTF-8 text file"),
        ("broken.json", b"{", "broken.json is not valid JSON"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        refuses(words, genotypes.load_genotype, tmp_path / name)


def test_skip_share_counts_edges_of_all_cells():
    assert skip_share(GENOTYPE) == 0.5
    three = Genotype("toy", {**GENOTYPE.cells, "reduction": (Edge("none", 0, 1),) * 2})
    assert skip_share(three) == 0.25
    assert skip_share(Genotype("toy", {})) == 0.0


@pytest.mark.parametrize("space", ["nasbench201", "darts", "mbconv"])
@pytest.mark.parametrize("large", ["edges", "kinds", "op", "name"])
def test_a_huge_genotype_is_refused_in_a_short_sentence(space, large):
    sizes = {"channels": 4, "num_cells": 3}
    if space == "mbconv":
        sizes = {"skeleton": "small", "candidates": "proxyless", "width": 1.0}
    made = make_space(space, input_shape=(3, 8, 8), num_classes=3, norm="batch", **sizes)
    cells = {kind: (Edge(made.ops[-1], 0, 1),) * 300_000 for kind in made.cell_kinds}
    if large == "kinds":
        cells = {f"kind {i}": () for i in range(300_000)}
    if large == "op":
        cells = {kind: (Edge("x" * 300_000, 0, 1),) for kind in made.cell_kinds}
    genotype = Genotype("s" * 300_000 if large == "name" else space, cells)
    assert len(refuses("", made.check, genotype)) < 600

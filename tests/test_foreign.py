"""Words and files of strangers: one function per format, one reader of YAML and JSON."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from safetensors.torch import save_file

from fednas_flwr import load
from fednas_flwr.base import foreign
from fednas_flwr.data.prepared import load_partition
from fednas_flwr.data.readers import site_dataset
from fednas_flwr.data.records import Column, Inputs
from fednas_flwr.deploy.sites.provision import load_sites
from fednas_flwr.models.export import export_safetensors
from fednas_flwr.models.networks import make_network
from fednas_flwr.models.prediction import METADATA_KEY, Model, read_metadata
from fednas_flwr.privacy.policy import load_policy
from fednas_flwr.protocol.keys import Roster
from fednas_flwr.report.comparison import compare_runs
from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import open_run_folder
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.spaces.genotype import load_genotype
from fednas_flwr.spaces.latency_tables import from_json as table_from_json

from .refusals import refuses

COLUMNS = (Column("a"), Column("b"))
PACKAGE = Path(__file__).parents[1] / "fednas_flwr"
ALIASES = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
MERGES = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60))]
CHAIN = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 60))]
BAD_YAML = {
    "\n".join(ALIASES): "its aliases and values make more than 50,000 nodes",
    "\n".join(MERGES): "<< is not read: write the keys themselves",
    "\n".join(CHAIN): "it is more than 50 levels deep",
    "a: &a [*a]": "it is more than 50 levels deep",
    "[" * 50_000: "it is more than 50 levels deep",
    "{a: " * 50_000: "it is more than 50 levels deep",
    "#" * (foreign.LARGEST_BYTES + 1): "it has more than 2,097,152 characters",
    "a: 1\na: 2": "a is given twice",
    "a: " + "1" * 5000: "4300 digits",
    "a: 2024-13-45": "month must be in 1..12",
    "!!python/object/apply:os.getcwd []": "could not determine a constructor",
}
READERS = {
    "policy.yaml": load_policy,
    "sites.yaml": load_sites,
    "dataset.yaml": lambda path: site_dataset(path, cache="cache"),
    "config.yaml": lambda path: read_run(path.parent),
    "resume/config.yaml": lambda path: open_run_folder(str(path.parent)),
    "typed/config.yaml": lambda path: compose_tree([f"config={path}"]),
    "optimization_results.yaml": lambda path: compare_runs([path.parent]),
}


def written(folder, name, text):
    """Return the path of a file in a folder that also holds a run's events."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    (path.parent / "events.jsonl").write_text("")
    path.write_text(text)
    return path


@pytest.mark.parametrize("words", BAD_YAML.values(), ids=range(len(BAD_YAML)))
@pytest.mark.parametrize("name", READERS)
def test_yaml_that_is_too_much_or_none_is_one_sentence(tmp_path, name, words):
    text = next(text for text, told in BAD_YAML.items() if told == words)
    assert "\n" not in refuses(re.escape(words), READERS[name], written(tmp_path, name, text))


def test_the_package_has_no_other_reader_of_yaml():
    reads = re.compile(r"\b(safe_load|full_load|unsafe_load|yaml\.load|OmegaConf\.load)\b")
    found = [p for p in PACKAGE.rglob("*.py") if reads.search(p.read_text(encoding="utf-8"))]
    assert found == [PACKAGE / "base" / "foreign.py"]


def test_a_few_aliases_are_read():
    assert foreign.load_yaml("a: &a {x: 1}\nb: *a", "text") == {"a": {"x": 1}, "b": {"x": 1}}
    assert foreign.load_yaml("a: [&b 1, *b, *b]", "text") == {"a": [1, 1, 1]}


def test_words_and_codes_are_texts():
    codes = ["yes", "No", "on", "OFF", "010", "12:30", "12:30.5", "1_0", "1_0.5", "0x1F"]
    assert foreign.load_yaml(f"a: [{', '.join(codes)}]", "text") == {"a": codes}
    values = foreign.load_yaml("a: [true, FALSE, 0, 10, -3, 1e5, .5]", "text")
    assert str(values["a"]) == "[True, False, 0, 10, -3, 100000.0, 0.5]"


texts = st.text(max_size=8) | st.sampled_from(["1e5", "-1E-5", "null", "yes", "${x}", "1_0", "="])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


@given(values)
def test_what_is_written_is_read(value):
    assert foreign.load_yaml(foreign.dump_yaml(value), "text") == value


@pytest.mark.parametrize("deep", ["[" * 50_000, "[" * 200 + "]" * 200])
def test_json_that_is_nested_too_deeply_is_one_sentence(tmp_path, deep):
    for read in (load_partition, load_genotype, Roster.read, lambda _: table_from_json(deep)):
        refuses("levels deep", read, written(tmp_path, "file.json", deep))
    (tmp_path / "events.jsonl").write_text(f'{{"event": "a", "b": {deep}}}\n{{"event": "c"}}\n')
    assert read_events(tmp_path / "events.jsonl") == [{"event": "c"}]


def test_metadata_of_a_model_that_are_none_are_one_sentence(tmp_path):
    for text in ("[" * 50_000, "[]", "{}", '{"network": 1, "inputs": 5}'):
        path = tmp_path / "model.safetensors"
        save_file({"a": torch.zeros(1)}, path, metadata={METADATA_KEY: text})
        refuses("", read_metadata, path)


# --- settings of somebody else


def test_no_interpolation_of_somebodys_configuration_is_resolved(tmp_path, monkeypatch):
    """It would put this user's environment into the run's files, which are given away."""
    monkeypatch.setenv("SECRET", "hunter2")
    for key, hostile in {
        "dataset.root": "dataset: {root: '${oc.env:SECRET}'}",
        "client_tags.1": "client_tags: [a, 'b ${seed}']",
        "positive": "positive: ${oc.decode:${oc.env:SECRET}}",
    }.items():
        path = written(tmp_path, "config.yaml", f"seed: 1\n{hostile}\n")
        for use in (lambda p: compose_tree([f"config={p}"]), lambda p: open_run_folder(p.parent)):
            assert "hunter2" not in refuses(rf"{key}=.* is not resolved", use, path)
        assert "hunter2" not in str(read_run(tmp_path).config)
    path = written(tmp_path, "dataset.yaml", "{name: npz, root: '${oc.env:SECRET}'}")
    refuses(r"root=.* is not resolved", site_dataset, path, cache="cache")


def test_what_the_user_types_is_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHE", "mine")
    path = written(tmp_path, "config.yaml", foreign.dump_yaml(compose_tree([])))
    for first in ([], [f"config={path}"]):
        tree = compose_tree([*first, "dataset.cache=${oc.env:CACHE}", "clients=${seed}"])
        assert tree["dataset"]["cache"] == "mine"
        assert tree["clients"] == tree["seed"]


# --- text in files

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text(
    st.sampled_from("\\`*_[]()<>|~$@#&;:!-+.=/ aw1x\n\t\r\x1b{}'\""), max_size=30
)


@given(TEXT, TEXT)
def test_a_cell_of_markdown_is_one_cell_of_text(first, second):
    table = f"| x{foreign.markdown(first)} | x{foreign.markdown(second)} |\n| --- | --- |\n"
    dialect = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    cells = [token.children or [] for token in dialect.parse(table) if token.type == "inline"]
    assert len(cells) == 2
    assert {child.type for cell in cells for child in cell} <= {"text", "text_special"}
    shown = ["".join(child.content for child in cell) for cell in cells]
    assert shown == [f"x{foreign.terminal(text)}".rstrip() for text in (first, second)]


@given(TEXT)
def test_markdown_and_terminal_can_be_applied_twice(text):
    assert foreign.markdown(foreign.markdown(text)) == foreign.markdown(text)
    assert foreign.terminal(foreign.terminal(text)) == foreign.terminal(text)
    assert foreign.terminal(text).isprintable()


@pytest.mark.parametrize("text", ["www.a.b", "WWW.a", "http://a", "mailto:a", "xmpp:a", "a@b.c"])
def test_no_dialect_makes_a_link_of_a_bare_address(text):
    for before in ("", "see ", "("):
        assert not re.search(r"www\.|://|mailto:|xmpp:|@", foreign.markdown(before + text).lower())


@pytest.mark.parametrize("name", ["fed_darts", "cuda:0", "2024-05-31T10:00:00+00:00", "1e-05, x"])
def test_ordinary_words_stay_as_they_are(name):
    assert foreign.markdown(name) == foreign.terminal(name) == foreign.csv_cell(name) == name


@pytest.mark.parametrize("start", list("=+-@\t\r\n") + ["＝", "＋", "－", "＠"])
def test_no_cell_is_a_formula(start):
    text = f'{start}HYPERLINK("https://evil.example")'
    assert foreign.csv_cell(text) == f"'{text}"
    assert foreign.csv_cell(f"a;{text}") == f"a;'{text}"


@pytest.mark.parametrize("number", [-1, -0.5, "-1", "+1.5", "-1e-5", "-1;+2", None, "a-b", "", "+"])
def test_numbers_and_other_words_are_no_formula(number):
    assert foreign.csv_cell(number) is number or foreign.csv_cell(number) == number


@pytest.mark.parametrize("several", [False, True])
def test_predictions_hold_no_formula(tmp_path, prints, several):
    """Names of classes and of files may be anybody's; labels are still those of the model."""
    names = ('=HYPERLINK("https://evil.example")', "-1", "@SUM(1)")
    inputs = Inputs((2,), COLUMNS, (0.0,) * 2, (1.0,) * 2, names, "label", several)
    inputs = replace(inputs, label_separator=";" * several)
    description = {"name": "linear", "input_shape": [2], "num_classes": 3}
    network = make_network(description)
    rates = torch.tensor([[9.0, 0], [0, 9], [-9, -9]])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(rates if parameter.ndim > 1 else torch.full((3,), -1.0))
    export_safetensors(Model(network, inputs, description), tmp_path)
    with (tmp_path / "data.csv").open("w") as file:
        rows = [[9, -9, names[0]], [-9, 9, names[1]], [-9, -9, names[2]]]
        csv.writer(file).writerows([["a", "b", "label"], *rows])
    output = tmp_path / "predictions.csv"
    assert "accuracy" in prints("predict", tmp_path, tmp_path / "data.csv", "--output", output)
    with output.open() as file:
        head, *found = csv.reader(file)
    label = head.index("labels" if several else "label")
    for column in (label, head.index("truth")):
        assert [row[column] for row in found] == [f"'{names[0]}", "-1", f"'{names[2]}"]
    assert [cell for row in (head, *found) for cell in row if cell != foreign.csv_cell(cell)] == []
    # The names themselves are as they were: read again, the table's labels are those of the model.
    model = load(tmp_path)
    assert model.predict(tmp_path / "data.csv").table()[head[label]].tolist() == list(names)

"""``scripts/analyse.py`` on a real run: its controller, its rewards, its cell trained again."""

import json
import shutil
from dataclasses import replace
from statistics import fmean

import analyse
import pytest
import torch

from fednas_flwr.cli import main
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.dp_cells import DPCellSpace
from fednas_flwr.spaces.genotype import load_genotype, save_genotype

from .refusals import refuses

TINY = ["algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "clients=2", "rounds=3"]
TINY += ["search_space.widths=[2,2,4]", "search_space.head=4", "algorithm.warm_up_rounds=1"]
TINY += ["algorithm.trained_candidates=2", "algorithm.rewarded_candidates=3", "retrain.rounds=1"]
TINY += ["algorithm.final_candidates=4", "algorithm.batch_size=16", "retrain.batch_size=16"]


@pytest.fixture(scope="module")
def folder(tiny_overrides, tmp_path_factory):
    path = tmp_path_factory.mktemp("analysis") / "run"
    own_size = ("search_space.", "retrain.channels", "rounds")
    tiny = [o for o in tiny_overrides if not o.startswith(own_size)]
    assert main(["run", *tiny, *TINY, f"run_dir={path}"]) == 0
    return path


def analysed(folder, *arguments):
    assert analyse.main([str(folder), *arguments]) == 0
    return json.loads((folder / "analysis.json").read_text())


@pytest.mark.run
def test_samples_come_from_the_newest_checkpoints_controller(folder, tmp_path):
    """A controller that is sure of one path is written behind the run's own."""
    path = [*range(10), 4, 1, 1, 5, 9]
    copy = shutil.copytree(folder, tmp_path / "run")
    checkpoints = CheckpointFolder(copy / "checkpoints", warn=pytest.fail)
    newest = checkpoints.latest("search")
    tensors = dict(newest.tensors)
    for edge, op in enumerate(path):
        tensors[f"server.policy.decoders.{edge}.bias"][op] = 100.0
    checkpoints.save(replace(newest, round=newest.round + 1, tensors=tensors))
    own, sure = (analysed(f)["samples"] for f in (folder, copy))
    expected = [[float(op == own) for op in range(10)] for own in path]
    assert (sure["round"], sure["shares"]) == (4, expected)
    assert (own["round"], own["sampler"], own["count"]) == (3, "controller", 1000)
    for shares in own["shares"]:
        assert sum(shares) == pytest.approx(1)
        assert max(shares) < 0.3  # hardly taught: a tenth each, give or take
    assert own["edges"][:3] == ["0 → 1", "0 → 2", "1 → 2"]
    assert sum(own["mean_shares"]) == pytest.approx(1)


@pytest.mark.run
def test_rewards_are_the_means_of_each_round_beside_another_runs(folder, capsys):
    rewarded = read_run(folder).of_kind("rewarded")
    means = [fmean(event["rewards"]) for event in rewarded[:2]]  # the third chooses
    own, other = analysed(folder, "--against", str(folder))["rewards"]
    assert own["rounds"] == [2, 3]
    assert own["accuracies"] == pytest.approx(means)
    assert other == own
    out = capsys.readouterr().out
    assert "mean validation accuracy" in out
    assert out.count(f"run  2: {100 * means[0]:.1f} %") == 2


@pytest.mark.run
def test_the_printed_command_trains_the_found_cell_to_the_runs_own_bits(folder, capsys):
    found = analysed(folder)["variants"][0]
    assert (found["name"], found["accuracy"]) == ("found", None)
    assert found["command"] in capsys.readouterr().out
    assert main(found["command"].split()[1:]) == 0
    own, again = (f / "model.safetensors" for f in (folder, folder / "variants" / "found"))
    assert own.read_bytes() == again.read_bytes()
    accuracy = read_run(folder).numbers()["central_accuracy"]
    assert analysed(folder)["variants"][0]["accuracy"] == accuracy


@pytest.mark.run
def test_every_variant_can_be_trained_at_once(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("variants"))
    space = DPCellSpace(input_shape=(3, 8, 8), num_classes=3)
    save_genotype(copy / "genotype.json", space.genotype([1] + [3] * 14))
    variants = analysed(copy, "--retrain")["variants"]
    assert [variant["name"] for variant in variants] == ["found", "pools-avg"]
    assert all(0 <= variant["accuracy"] <= 1 for variant in variants)
    for name, op in (("found", 1), ("pools-avg", 2)):
        trained = read_run(copy / "variants" / name)
        genotype = load_genotype(copy / "variants" / name / "genotype.json")
        assert space.path(genotype) == [op] + [3] * 14
        assert trained.last("derived")["genotype"]["cells"]["cell"][0]["op"] == space.ops[op]
        assert trained.rounds("search") == []
    capsys.readouterr()
    assert analysed(copy, "--retrain")["variants"] == variants  # which trains none again
    output = capsys.readouterr().out
    told = [words in output for words in ("pools-avg", "run folder", "fednas run resume")]
    assert told == [True, False, False]


@pytest.mark.run
def test_a_folder_without_a_finished_run_is_refused(folder, tmp_path):
    refuses("give the folder of a run", analyse.main, [str(tmp_path)])
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(lines[:-1]))
    refuses(f"resume={tmp_path}", analyse.main, [str(tmp_path)], error=SystemExit)


def test_a_variant_changes_the_ops_of_one_family_and_no_other():
    path = [*range(10), 4, 1, 1, 5, 9]
    space = DPCellSpace(input_shape=(1, 8, 8), num_classes=2)
    made = analyse.variants(space.genotype(path))
    kinds = ("relu", "selu", "tanh", "linear", "hardtanh", "sigmoid")
    expected = {"found": path}
    for column, kind in enumerate(kinds, start=4):
        expected[f"activations-{kind}"] = [column if op >= 4 else op for op in path]
    for column, kind in ((1, "max"), (2, "avg")):
        expected[f"pools-{kind}"] = [column if op in (1, 2) else op for op in path]
    assert list(made) == list(expected)
    assert {name: space.path(genotype) for name, genotype in made.items()} == expected
    assert list(analyse.variants(space.genotype([0, 3, 1] * 5))) == ["found", "pools-avg"]
    darts = DARTSSpace(input_shape=(3, 8, 8), num_classes=2, channels=2, num_cells=3)
    assert list(analyse.variants(darts.random_genotype(torch.Generator()))) == ["found"]

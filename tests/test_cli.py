"""What the command promises: every mistake is one sentence, and no run folder is left behind."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from fednas_flwr import api, cli
from fednas_flwr.base.processes import LATER
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.client import handlers
from fednas_flwr.data.records import Inputs
from fednas_flwr.models.export import export_safetensors
from fednas_flwr.models.networks import describe_derived, make_network, make_space, supernet_sizes
from fednas_flwr.models.prediction import Model
from fednas_flwr.privacy.books.ledger import Entry, Ledger
from fednas_flwr.privacy.mechanism.accounting import prv_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, expand_sweep, user_settings

from .processes import told
from .refusals import lacking, refuses
from .rows import rows

DP = ["privacy=dp", "search_space.norm=group", "retrain.norm=group"]
FEDNAS = [sys.executable, "-m", "fednas_flwr"]


@pytest.mark.parametrize(("baselines", "later"), [(1, LATER), (0, ())])
def test_processes_import_early_what_baselines_need(baselines, later, tiny_overrides, monkeypatch):
    asked = []
    monkeypatch.setattr("fednas_flwr.cli.run.warm_up", asked.append)
    monkeypatch.setattr(api, "run", lambda *_, **__: None)
    assert cli.main(["run", *tiny_overrides, f"evaluation.baselines={baselines}"]) == 0
    assert asked == [later]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Runs go to ``runs`` in the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys):
    """``refused(*arguments)``: the one sentence of a command that fails and has left nothing."""

    def told(*arguments, code=cli.USER_ERROR):
        before = set(Path().rglob("*"))
        assert cli.main([*arguments]) == code
        assert set(Path().rglob("*")) == before
        output = capsys.readouterr()
        (sentence,) = re.findall(r"\Afednas: (.*\.)\n\Z", output.err)
        assert output.out == ""
        return sentence

    return told


MISTAKES = """
roundz=3 | setting=roundz is unknown: choose one of aggregate, | (nearest: rounds)
alphas.lr=1 | alphas is no setting: write algorithm.alphas or
lr=1 | write algorithm.weights.lr or algorithm.alphas.lr or retrain.weights.lr.
algorithm.weights.lrr=1 | choose one of algorithm.weights.clip_norm, algorithm.weights.lr,
    | (nearest: algorithm.weights.lr)
algorithm=fnas algorithm.rulez=2 | algorithm.rulez | algorithm.order
seed.first=1 | seed={first: 1} has the wrong type: expected a whole number
dataset=mnst | dataset=mnst | (nearest: mnist)
retrain=null | retrain=null is unknown: choose one of darts,
rounds=$NINES | rounds=99 | holds a number that is too long
experiment=small_fashion_mnist | experiment=small_fashion_mnist is | /fashion_mnist).
algorithm.name=fnas | algorithm.name=fnas | write algorithm=<name>
stages=search | stages=search | a list such as [text, ...]
runtime.device=cuda:1 | runtime.device=cuda:1 is out of range: expected cuda,
    | CUDA_VISIBLE_DEVICES.
+seed=2 | An item is already at 'seed'
+sead=2 | setting=sead is unknown | (nearest: seed)
~seed | seed is missing
algorithm@here=fnas | algorithm@here
--seed=2 | '--seed=2' is no option | key=value, as in clients=5
--config-dir=nowhere | '--config-dir=nowhere' is no option | hydra.searchpath=
hydra.searchpath=[file://nowhere] | hydra.searchpath=[file://nowhere]: that is no folder
--resolve | add that
--cfg job -m | --multirun only runs
hydra.sweep.dir=foo | hydra.sweep.dir=foo has no effect on a single run | add -m
config=nowhere.yaml | config=nowhere.yaml cannot be read
-m seed=1,2 sweep.metric=epsilon | sweep.metric=epsilon has no effect | optuna
-m hydra/launcher=none seed=1,2 | hydra/launcher=none is unknown: choose one of basic | [sweeps]
-m seed=interval(1,2) | does not support sweep type | hydra/sweeper=optuna
-m hydra/sweeper=optuna sweep.metric=loss seed=range(1,3) | sweep.metric=loss is unknown
-m hydra/sweeper=optuna algorithm=fedavg seed=range(1,3) | validation_loss is of a search
garbage | 'garbage' | key=value
stages=[search | 'stages=[search' | key=value
seed=1,2 | seed=1,2 | add -m
seed=${nothing} | seed | 'nothing'
algorithm=vanilla_nas clients=3 | clients=3 | clients=1 or algorithm=fnas
algorithm=fnas algorithm.order=2 algorithm.local_steps=2 | set one of the two to 1
algorithm=fnas algorithm.order=2 algorithm.fused=true | the weights after the step
algorithm=cfdnas algorithm.group_by=alphas algorithm.num_groups=2 algorithm.inherit=false
    | set algorithm.inherit=true
genotype=a.json | genotype=a.json | stages=[retrain,evaluate,export]
stages=[retrain] | genotype=<file> or algorithm=fedavg
stages=[search,export] | add retrain
runtime=deployment | runtime.superlink must be given | Flower's configuration
resume=nowhere | resume=nowhere | give the folder of a run
-m resume=nowhere | resume=nowhere takes no other setting
-m seed=1,2 rounds=5,0 | rounds=0 | 1 or more
-m algorithm=glob(*) | algorithm=_base
"""


@pytest.mark.parametrize("row", rows(MISTAKES, NINES="9" * 5000), ids=lambda row: row[0][:60])
def test_mistake_is_one_sentence_that_says_what_is_allowed(row, refused):
    overrides, *parts = row
    assert lacking(refused("run", *overrides.split()), *parts) == []


# These need the data: they are found before a folder is made, too.
LATE_MISTAKES = """
dataset.root=none.npz | dataset.root=none.npz is not a file
search_space=darts search_space.channels=3 clients=500 | clients=500
partition=column partition.column=ward | ward
dataset.fractions={train:1,validation:1,test:0} | sum to 1
algorithm=fedavg algorithm.network=resnet | algorithm.network=resnet | plain_cnn
-m clients=2,500 | clients=500
"""


@pytest.mark.parametrize("row", rows(LATE_MISTAKES), ids=lambda row: row[0])
def test_mistake_about_files_or_data_leaves_no_folder(row, tiny_overrides, refused):
    overrides, *parts = row
    keys = {text.partition("=")[0] for text in overrides.split()}
    kept = [text for text in tiny_overrides if text.partition("=")[0] not in keys]
    if "stages=[retrain]" in overrides or "algorithm=fedavg" in overrides:
        kept = without(kept, "rounds", "search_space", "retrain.channels")
    assert lacking(refused("run", *kept, *overrides.split()), *parts) == []


def test_debug_shows_the_trace(prints):
    output = prints("run", "roundz=3", "--debug", code=cli.USER_ERROR)
    assert "Traceback" in output
    assert output.endswith("(nearest: rounds).\n")


def test_mistakes_are_told_without_torch():
    code = "import sys; from fednas_flwr.cli import main\n"
    code += "codes = [main(['run', *o.split()]) for o in sys.argv[1:]]\n"
    code += "print(codes, sorted({'torch', 'flwr', 'sklearn', 'ray'} & set(sys.modules)))"
    mistakes = "roundz=1 seed=x resume=nowhere algorithm=fed_dart runtime=deployment".split()
    command = [sys.executable, "-c", code, *mistakes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[2, 2, 2, 2, 2] []\n"
    assert len(done.stderr.splitlines()) == 5


def test_what_fails_on_the_way_out_of_ctrl_c_is_ctrl_c(tiny_overrides, monkeypatch, capsys):
    def stopped(*_, **__):
        try:
            raise KeyboardInterrupt
        finally:
            error = OSError("closed")
            error.add_note("to go on: ...")
            raise error

    monkeypatch.setattr(api, "run", stopped)
    assert cli.main(["run", *tiny_overrides]) == cli.STOPPED
    assert capsys.readouterr().err.endswith("to go on: ...\nfednas: stopped.\n")


def test_other_commands_take_no_overrides(capsys):
    refuses("2", cli.main, ["report", "somewhere", "seed=1"], error=SystemExit)
    assert "unrecognized arguments: seed=1" in capsys.readouterr().err
    assert cli.main(["report", "somewhere"]) == cli.USER_ERROR
    assert cli.main(["compare", "somewhere"]) == cli.USER_ERROR
    assert capsys.readouterr().err.count("fednas: ") == 2


def test_cfg_prints_the_composed_configuration(prints):
    tree = yaml.safe_load(prints("run", "--cfg", "job", "algorithm=fnas", "seed=7"))
    assert (tree["algorithm"]["name"], tree["seed"]) == ("fnas", 7)
    weights = prints("run", "--cfg", "job", "--resolve", "--package", "algorithm.weights")
    assert yaml.safe_load(weights)["lr"] == 0.1
    own = "hydra.run.dir=foo"
    assert prints("run", own, "--cfg", "job")
    assert api.compose(own).run_dir == api.compose(f"++{own}").run_dir == "foo"
    assert api.compose(own, "run_dir=bar").run_dir == "bar"
    assert not Path("runs").exists()


def folders_in(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def without(overrides, *keys):
    """Return the overrides of other settings."""
    return [text for text in overrides if not text.startswith(keys)]


@pytest.fixture
def finished(tiny_overrides, prints):
    """The folder of a short run that searched and nothing else."""
    brief = without(tiny_overrides, "retrain.rounds")
    printed = prints("run", *brief, "stages=[search]", "clients=1", "rounds=1")
    (folder,) = Path("runs").iterdir()
    assert f"run folder: {folder.resolve()}\n" in printed
    return folder


@pytest.mark.run
def test_run_folder_name_is_short_and_holds_one_run(finished, tiny_overrides, refused, prints):
    assert finished.name.endswith("_fed_darts_npz")
    assert len(finished.name) < 40
    sentence = refused("run", *tiny_overrides, f"run_dir={finished}")
    assert f"run_dir={finished} already holds a run" in sentence
    assert f"resume={finished}" in sentence
    Path("new").mkdir()
    folder = finished.rename(Path("new") / "0_seed-1")
    errors = prints("run", *tiny_overrides, "-m", "seed=1,2", "run_dir=new", code=cli.RUN_FAILED)
    assert f"{folder.resolve()} already holds a run" in errors
    assert [path.name for path in folder.parent.glob("*/model.onnx")] == ["model.onnx"]


@pytest.mark.parametrize("key", ["runtime.wire", "privacy.search_share"])
def test_a_run_of_a_version_without_a_setting_is_not_resumed(key, refused):
    tree = compose_tree(["algorithm=dp_fnas", *DP])
    group, _, last = key.partition(".")
    del tree[group][last]
    Path("old").mkdir()
    Path("old/config.yaml").write_text(yaml.safe_dump(tree))
    told = f"it was started by another version, which had no setting `{key}`; it cannot be "
    assert refused("run", "resume=old") == f"resume=old: {told}continued."


def test_resume_of_a_finished_run_adds_nothing(finished):
    events = read_run(finished).events
    assert cli.main(["run", f"resume={finished}"]) == 0
    assert read_run(finished).events == events


def test_first_clients_error_is_on_top(tiny_overrides, capsys, monkeypatch):
    def broken(client, request, asked):
        raise ZeroDivisionError(f"disk {client.index} is full")

    monkeypatch.setitem(handlers.ANSWERS, "train.search", broken)
    assert cli.main(["run", *tiny_overrides]) == cli.RUN_FAILED
    output = capsys.readouterr()
    assert output.err.startswith("fednas: QuorumError: client 0: ZeroDivisionError: disk 0 is full")
    assert "0 of 3 clients answered, 2 are needed" in output.err
    assert "Traceback" not in output.out + output.err
    (folder,) = Path("runs").iterdir()
    assert (folder / "report.html").exists()


@pytest.mark.run
def test_sweep_goes_on_after_a_failing_job_and_says_so(tiny_overrides, capsys, prints, monkeypatch):
    search = handlers.train

    def broken_for_seed_2(client, request, asked):
        if client.seed == 2:
            raise ZeroDivisionError("disk is full")
        return search(client, request, asked)

    monkeypatch.setitem(handlers.ANSWERS, "train.search", broken_for_seed_2)
    Path("own/experiment").mkdir(parents=True)
    Path("own/experiment/mine.yaml").write_text("# @package _global_\nclients: 2\nrounds: 1\n")
    sweep = ["-m", f"hydra.searchpath=[file://{Path('own').resolve()}]", "experiment=mine"]
    sweep += ["seed=1,2,3", "stages=[search]", "run_dir=sweep"]
    assert cli.main(["run", *without(tiny_overrides, "retrain.rounds"), *sweep]) == cli.RUN_FAILED
    output = capsys.readouterr()
    jobs = folders_in("sweep")
    assert jobs == ["0_seed-1", "1_seed-2", "2_seed-3"]
    parts = ("job 1 of 3: 0_seed-1", "2 of 3 jobs completed; sweep folder: ")
    assert lacking(output.out, *parts) == []
    assert re.search(r"job 3 of 3, [\d.:]+ \w+ left: 2_seed-3", output.out)
    assert "ZeroDivisionError: disk is full" in output.err
    assert output.err.endswith("fednas: 1 job failed: 1_seed-2.\n")
    assert "1, 3" in Path("sweep/compare.html").read_text(encoding="utf-8")
    assert "1, 3" in prints("compare", "sweep", "--output", "table")
    assert "1_seed-2" in Path("table/compare.json").read_text()

    # What is missing is done where the sweep is continued, and nothing else is touched.
    monkeypatch.setitem(handlers.ANSWERS, "train.search", search)

    def times():
        return [Path("sweep", job, "events.jsonl").stat().st_mtime_ns for job in jobs[::2]]

    before = times()
    shutil.rmtree(Path("sweep") / jobs[1])
    parts = ("job 2 of 3: ", "3 of 3 jobs completed; sweep folder: sweep", "job 1 of 3")
    assert lacking(prints("run", "resume=sweep"), *parts) == ["job 1 of 3"]
    assert times() == before
    _, second, _ = folders_in("sweep")
    assert read_run(Path("sweep") / second).config["seed"] == 2


def test_the_name_of_a_jobs_folder_has_no_slash():
    text = OmegaConf.create({"name": "${without_slash:experiment-search/halving}"})
    assert text.name == "experiment-search_halving"


def test_commands_of_every_day_come_first(capsys):
    refuses("", cli.main, ["--help"], error=SystemExit)
    text = capsys.readouterr().out
    daily, _, expert = text.partition("for experts:")
    assert all(f"    {name} " in daily for name in cli.DAILY)
    assert "  audit " in expert
    assert "None" not in text


@pytest.mark.run
def test_a_setting_without_effect_refuses_that_job_of_a_sweep_only(tiny_overrides, capsys):
    kept = without(tiny_overrides, "retrain", "search", "rounds")
    sweep = ["-m", "algorithm=fedavg,fed_darts", "rounds=1", "stages=[search]", "clients=1"]
    assert cli.main(["run", *kept, *sweep]) == cli.RUN_FAILED
    output = capsys.readouterr()
    (parent,) = Path("runs").iterdir()  # one, which is named by the time
    time.strptime(parent.name, "%Y%m%d-%H%M%S_sweep")
    assert folders_in(parent) == ["0_algorithm-fedavg", "1_algorithm-fed_darts"]
    assert [path.name for path in (parent / "0_algorithm-fedavg").iterdir()] == ["error.txt"]
    assert "fednas: stages=[search] with algorithm=fedavg, which does not search" in output.err
    assert "1 of 2 jobs completed; sweep folder: " in output.out
    assert output.err.endswith("fednas: 1 job failed: 0_algorithm-fedavg.\n")


def test_what_typing_takes_from_an_experiment_is_told_in_one_line(capsys):
    command = ["run", "--cfg", "job", "experiment=fdnas/fashion_mnist"]
    assert cli.main([*command, *DP, "evaluation.personalised=false"]) == 0
    told = "the experiment sets retrain.local_epochs, algorithm.local_epochs, without effect with "
    told += "privacy=dp, whose clients take noised steps."
    assert capsys.readouterr().err == f"fednas: warning: {told}\n"
    assert cli.main(command) == 0
    assert capsys.readouterr().err == ""


@pytest.fixture
def ledger():
    """Return the arguments that name a ledger in which two accounts have booked."""
    release = Release(noise_multiplier=2.0, sample_rate=0.05, steps=1200)
    entry = Entry("ward", "a", "the run", "search", 1, "train.search", ("train",), release, 5000)
    with Ledger(Path("site/ledger"), Path("key")) as ledger:
        ledger._clock = lambda: 86400.0
        for one in (entry, entry, replace(entry, account="lab", run="\x1b[2J")):
            ledger.reserve(one, epsilon=50.0, delta=1e-5, assignment="a")
    return ["site/ledger", "--key", "key"]


def cells(output):
    """Return the rows of the tables in an output, in whatever lines rich draws."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_calibrate_explains_a_private_run(prints, refused):
    run = "algorithm=fedavg algorithm.network=linear privacy=dp stages=[retrain]"
    parts = ("records of 3 clients", "noise multiplier", "learning rate", "(epsilon, delta)")
    assert lacking(prints("calibrate", *run.split()), *parts) == []
    assert "nothing is to be calibrated" in refused("calibrate", "privacy=none")


def test_ledger_show_has_a_row_per_kind_and_an_epsilon_per_split(ledger, prints, refused):
    output = prints("ledger", "show", *ledger)
    ward, lab, ward_costs, lab_costs = cells(output)
    when = "1970-01-02 00:00"
    terms = ["2,400", "5,000", "2", "0.05", when, when]
    assert ward == ["ward", "the run", "search", "train.search", "train", *terms]
    assert lab[:2] == ["lab", "\\x1b[2J"]  # what a server chose does not command the terminal
    both = prv_epsilon([Release(noise_multiplier=2.0, sample_rate=0.05, steps=2400)], 1e-5)
    assert ward_costs[:2] == ["ward", "train"]
    assert both <= float(ward_costs[2]) < both + 0.01
    assert lab_costs[0] == "lab"
    assert "all together, at delta 1e-05" in output
    assert "at delta 0.001" in prints("ledger", "show", *ledger, "--delta", "1e-3")
    assert prints("ledger", "verify", *ledger) == "3 rows, all intact.\n"
    for delta, shown in (("1", "1.0"), ("nan", "nan")):
        words = f"--delta={shown} is out of range: expected above 0, below 1."
        assert refused("ledger", "show", *ledger, "--delta", delta).endswith(words)
    Ledger(Path("empty/ledger"), Path("other")).close()
    assert prints("ledger", "show", "empty/ledger", "--key", "other") == "no rows.\n"


@pytest.mark.parametrize("action", ["show", "verify"])
def test_ledger_that_was_edited_is_one_sentence_and_a_failure(ledger, refused, action):
    with closing(sqlite3.connect("site/ledger")) as file, file:
        file.execute("UPDATE entries SET steps = 1 WHERE sequence = 1")
    sentence = refused("ledger", action, *ledger, code=cli.RUN_FAILED)
    assert re.search("^row 1 of .*the ledger is damaged", sentence)


NO_LEDGER = """
none/ledger --key key | there is no ledger none/ledger
site/ledger --key other/key | there is no key other/key
site --key key | there is no ledger site
"""


@pytest.mark.parametrize("action", ["show", "verify"])
@pytest.mark.parametrize(("given", "part"), rows(NO_LEDGER))
def test_looking_for_a_missing_ledger_creates_nothing(ledger, refused, action, given, part):
    assert refused("ledger", action, *given.split()) == f"{part}; give the file of a site."


def exported(folder, *overrides):
    """Export a network of the smallest genotype for 8x8 images, as a run does."""
    config = parse_config(compose_tree([*overrides, "algorithm=fdnas", "retrain=mbconv"]))
    shapes = {"input_shape": (1, 8, 8), "num_classes": 10}
    space = make_space(**asdict(config.search_space), **shapes)
    description = describe_derived(
        space.random_genotype(make_generator(0, "genotype")),
        shapes,
        sizes=supernet_sizes(config.search_space),
        norm=config.search_space.norm,
        auxiliary=False,
    )
    folder.mkdir()
    names = tuple("0123456789")
    inputs = Inputs(shape=(1, 8, 8), schema=(), mean=(0.5,), std=(0.5,), class_names=names)
    export_safetensors(Model(make_network(description), inputs, description), folder)


def test_latency_measure_writes_a_table_of_the_composed_space(prints):
    space = "search_space=mbconv_small search_space.width=.5 runtime.device=cpu"
    measure = "latency measure --passes 2 --shape 1 8 8 --output table.json"
    measured = prints(*f"{measure} {space}".split())
    table = json.loads(Path("table.json").read_text())
    assert measured.startswith(f"{len(table['layers'])} layers on ")
    assert measured.count("a random network: predicted ") == 3
    exported(Path("run"), *space.split())
    predicted = prints("latency", "predict", "run", "table.json")
    assert f" ms on {table['machine']}, cpu, " in predicted
    assert predicted.endswith("batch 1 (table.json)\n")
    for command, words in (
        ("latency predict run none.json", "the latency table none.json cannot be read"),
        (f"{measure} search_space=darts", "search_space=darts has no latency table"),
        (f"{measure} --batch-size 0 {space}", "--batch-size=0 is out of range: expected 1 or"),
        (f"{measure} --passes 1 {space}", "--passes=1 is out of range: expected 2 or more."),
    ):
        assert words in prints(*command.split(), code=cli.USER_ERROR)


def test_output_that_nobody_reads_any_more_ends_no_command():
    read, write = os.pipe()
    with cli._Output(os.fdopen(write, "wb"), "utf-8") as output:
        print("a line", file=output)
        assert os.read(read, 100) == b"a line\n"
        os.close(read)
        for _ in range(3):
            print("another", file=output)
            output.flush()


# --- sweeps of Hydra's own launchers and sweepers, and files of the user's own


ENOUGH_S = 900.0


@pytest.fixture
def brief(tiny_overrides):
    """Overrides of a run that takes a second."""
    return [*tiny_overrides, "clients=2", "rounds=1", "retrain.rounds=1"]


def sweep(folder, *arguments):
    """Run ``fednas run -m`` in a process of its own, as joblib needs it; return its output."""
    command = ("-m", "fednas_flwr", "run", "-m", *arguments, f"hydra.sweep.dir={folder}")
    return told(*command, env={"OMP_NUM_THREADS": "1"}, timeout=ENOUGH_S)


def test_groups_and_baselines_are_no_jobs(compose_config, tmp_path, capsys):
    folder, run = tmp_path / "sweep", tmp_path / "run"
    api.run(compose_config("stages=[search]", "rounds=1", f"run_dir={run}"))
    for inside in (".", "groups/phone", "baselines/random_1"):
        shutil.copytree(run, folder / "0_seed-1" / inside, dirs_exist_ok=True)
    assert cli.run._tell_end(folder) == 0
    assert f"1 of 1 job completed; sweep folder: {folder}" in capsys.readouterr().out


LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local"],
    "ray": ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_runs_two_jobs_at_once(name, brief, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher")
    folder = tmp_path / "sweep"
    assert "2 of 2 jobs completed" in sweep(folder, *brief, "seed=1,2", *LAUNCHERS[name])
    runs = [read_run(folder / job).events for job in ("0_seed-1", "1_seed-2")]
    assert [events[-1]["status"] for events in runs] == ["completed"] * 2
    assert max(events[0]["time"] for events in runs) < min(events[-1]["time"] for events in runs)


@pytest.mark.slow
def test_the_best_trial_of_optuna_is_the_first_line(brief, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "sweep"
    trials = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=8", "hydra.sweeper.n_jobs=1"]
    trials += ["hydra.sweeper.sampler.seed=1", "algorithm.weights.lr=interval(.01,.5)"]
    trials += ["rounds=2"]  # the first validation loss is of weights that have not stepped yet
    output = sweep(folder, *brief, *trials, "stages=[search,retrain,evaluate,export]")
    assert "8 of 8 jobs completed" in output
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    losses = {}
    for path in folder.glob("*/events.jsonl"):
        run = read_run(path.parent)
        lr = run.config["algorithm"]["weights"]["lr"]
        losses[lr] = run.rounds("search")[-1]["metrics"]["validation_loss"]
    best = min(losses, key=lambda lr: losses[lr])
    assert found["best_params"] == {"algorithm.weights.lr": best}
    assert found["best_value"] == pytest.approx(losses[best])
    document = json.loads((folder / "compare.json").read_text())
    assert document["best"][0].startswith(f"best trial: algorithm.weights.lr={best} (")
    assert document["groups"][0]["settings"] == {"algorithm.weights.lr": str(best)}
    html = (folder / "compare.html").read_text(encoding="utf-8")
    assert f"<h1>{document['best'][0]}</h1>" in html


def test_experiments_in_a_folder_of_ones_own(tmp_path, prints):
    own = tmp_path / "own"
    (own / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /algorithm: fnas\nrounds: 3\n"
    (own / "experiment" / "mine.yaml").write_text(text)
    where = f"hydra.searchpath=[file://{own}]"
    tree = yaml.safe_load(prints("run", where, "experiment=mine", "--cfg", "job"))
    assert (tree["algorithm"]["name"], tree["rounds"]) == ("fnas", 3)
    assert "rounds" in user_settings([where, "experiment=mine"]).experiment
    (own / "haste").mkdir()
    (own / "haste" / "great.yaml").write_text("# @package _global_\nrounds: 2\n")
    hasty = compose_tree(["+haste=great", where])
    given = user_settings(["+haste=great", "clients=2", where])
    assert (hasty["rounds"], given.typed) == (2, ["clients"])
    _, second = expand_sweep(["experiment=mine", where, "seed=1,2"])
    assert second == ["experiment=mine", where, "seed=2"]
    assert "(nearest: mine)" in prints("run", where, "experiment=mime", code=cli.USER_ERROR)


def test_hydras_grammar():
    assert compose_tree(["++seed=7"])["seed"] == 7
    assert compose_tree(["seed=${clients}", "clients=4"])["seed"] == 4
    jobs = expand_sweep(["algorithm=glob(*,exclude=[_*,fe*,c*,s*])", "seed=range(1,3)"])
    algorithms = {job[0].removeprefix("algorithm=") for job in jobs}
    assert {"fnas", "zero_cost", "dpnas"} <= algorithms
    assert "fed_darts" not in algorithms
    assert len(jobs) == 2 * len(algorithms)
    assert user_settings(["seed=2", "hydra.sweep.dir=x", "sweep.metric=epsilon"]).typed == ["seed"]


@pytest.mark.run
def test_hydra_informs(prints):
    shortlist = ["algorithm.shortlist.keep=5", "algorithm.shortlist.scores=[synflow]"]  # was null
    tree = yaml.safe_load(prints("run", "algorithm=zero_cost", *shortlist, "--cfg", "job"))
    assert tree["algorithm"]["shortlist"] == {"keep": 5, "scores": ["synflow"]}
    assert "file://" in told("-m", "fednas_flwr", "run", "--info", "searchpath")
    typed = {"COMP_LINE": "fednas run algorithm=fed_"}
    completed = told("-m", "fednas_flwr", "-sc", "query=bash", env=typed)
    assert "algorithm=fed_darts" in completed.split()


def test_a_runs_configuration_repeats_it(brief, tmp_path, prints):
    assert cli.main(["run", *brief, "seed=5", f"run_dir={tmp_path / 'first'}"]) == 0
    config = f"config={tmp_path / 'first' / 'config.yaml'}"
    assert cli.main(["run", config, f"run_dir={tmp_path / 'second'}"]) == 0
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    wrong = {"seeed=2": "(nearest: seed)", "algorithm=fnas": "only single values are"}
    for more, words in wrong.items():
        assert words in prints("run", config, more, code=cli.USER_ERROR)


@pytest.mark.slow
def test_two_metrics_give_a_front_and_a_failing_trial_does_not_stop_the_others(brief, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "sweep"
    command = [*FEDNAS, "run", "-m", *brief, f"hydra.sweep.dir={folder}", "hydra/sweeper=optuna"]
    command += ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    command += ["hydra.sweeper.sampler.seed=3", "sweep.metric=[central_accuracy,num_parameters]"]
    command += ["algorithm.weights.lr=choice(.1,.2,1e30)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH_S)
    failed = list(folder.rglob("error.txt"))
    assert done.returncode == (cli.RUN_FAILED if failed else 0), done.stderr
    assert f"{3 - len(failed)} of 3 jobs completed" in done.stdout, done.stderr
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert all(len(trial["values"]) == 2 for trial in found["solutions"])

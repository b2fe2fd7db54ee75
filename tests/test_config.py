"""The configuration is checked at once, travels as JSON, and every file of conf/ composes."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from fednas_flwr import api, compose
from fednas_flwr.base.errors import ConfigError, NoEffectError, NoEffectWarning
from fednas_flwr.base.foreign import dump_yaml
from fednas_flwr.data.readers import site_dataset
from fednas_flwr.data.table_files import read_texts
from fednas_flwr.settings import (
    DifferentialPrivacy,
    GivenNetwork,
    conf_folder,
    dump_config,
    hydra_config,
)
from fednas_flwr.settings.configuration import load_config, parse_config, yielded
from fednas_flwr.settings.hydra_config import compose_tree, user_settings
from fednas_flwr.settings.incompatible import check_combinations
from fednas_flwr.settings.names import RECORD
from fednas_flwr.settings.optimizers import Configuration
from fednas_flwr.settings.registry import algorithms
from fednas_flwr.settings.run_settings import AggregateSettings, SamplingSettings, SecureSumSettings
from fednas_flwr.settings.unused import NEEDS as NEEDS_OF_ALL
from fednas_flwr.settings.unused import UserSettings, check_effect, without_effect

from .conftest import compose_by_hydra
from .refusals import refuses
from .rows import firsts, rows

GROUP = ["search_space.norm=group", "retrain.norm=group"]
DP = "privacy=dp search_space.norm=group retrain.norm=group"
SITES = f"runtime=deployment runtime.superlink=a partition=sites algorithm=dp_fnas {DP}"
ARM = "{lr:.1,weight_decay:0,momentum:0,alpha_lr:0,alpha_weight_decay:0,dropout:0}"
LOCAL = "algorithm=successive_halving algorithm.rewarded=local rounds=3"
BACKBONE = ["search_space.backbone=resnet18", "search_space.weights=weights.pth"]
MBCONV = ["search_space=mbconv", "retrain=mbconv"]
NEEDS = {  # what a file needs beside itself
    **dict.fromkeys(("algorithm=fdnas", "algorithm=cfdnas"), MBCONV),
    "algorithm=dpnas": ["search_space=dp_cells", "retrain=dp_cells"],
    "algorithm=vanilla_nas": ["clients=1"],
    "algorithm=dp_fnas": ["privacy=dp", *GROUP],
    "privacy=dp": ["algorithm=dp_fnas", *GROUP],
    "runtime=deployment": ["runtime.superlink=site"],
    "partition=saved": ["partition.file=partition.json"],
    "search_space=adapters": [*BACKBONE, "retrain=mbconv_small"],
    "aggregate=trimmed_mean": ["runtime.quorum=1"],
    "server_optimizer=adam": ["algorithm=fedavg"],
}


def all_choices():
    """Return ``group=name`` for every file of every group."""
    paths = (path.relative_to(conf_folder()) for path in conf_folder().rglob("[!_]*.yaml"))
    names = (path.with_suffix("").as_posix() for path in paths if len(path.parts) > 1)
    return sorted(name.replace("/", "=", 1) for name in names)


def test_a_base_is_no_choice_and_every_base_has_one():
    """A file whose name begins with an underscore is refused, and is a default of another one."""
    folder = conf_folder()
    bases = [path for path in folder.rglob("_*.yaml")]
    assert len(bases) == 14
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.yaml")]
    for path in bases:
        group, *rest = path.relative_to(folder).with_suffix("").parts
        name = "/".join(rest)
        named = (f"[{name}]", f"[{name}, ", f", {name}]", f"- {name}\n", f"- /{group}/{name}\n")
        named = (*named, f"{name}@_global_")
        assert any(part in text for text in texts for part in named)
        words = f"^{group}={name} is unknown: choose one of "
        assert " _" not in refuses(words, compose_tree, [f"{group}={name}"])


@pytest.fixture(scope="module")
def tree():
    return compose_tree([])


def changed(tree, key, value):
    """Return a copy of the tree with ``value`` at the dotted ``key``."""
    copy = json.loads(json.dumps(tree))
    *parents, last = key.split(".")
    node = copy
    for part in parents:
        node = node[part]
    node[last] = value
    return copy


@pytest.mark.parametrize("choice", firsts(all_choices()))
def test_every_file_composes_and_parses(choice):
    config = parse_config(compose_tree([choice, *NEEDS.get(choice, [])]))
    assert load_config(dump_config(config)) == config
    group, _, name = choice.partition("=")
    if hasattr(getattr(config, group, None), "name"):
        assert name.startswith(getattr(config, group).name)


@pytest.mark.parametrize("algorithm", sorted(algorithms()))
def test_an_algorithm_alone_is_a_whole_run(algorithm):
    """With all that it needs of the other groups; what is typed wins."""
    config = compose(f"algorithm={algorithm}")
    api.check(config)
    assert config.dataset.name == "digits"
    assert config.clients == (1 if algorithm == "vanilla_nas" else 3)
    assert (config.privacy.name == "dp") == (algorithm == "dp_fnas")
    assert compose(f"algorithm={algorithm}", "retrain=small", "seed=7").retrain.batch_size == 32


def test_privacy_brings_its_norms_and_a_typed_one_is_a_contradiction():
    assert compose("privacy=dp").search_space.norm == "group"
    assert compose("privacy=dp", "search_space=darts_small").retrain.norm == "group"
    typed = ("search_space.norm=batch", "retrain.norm=batch")
    refuses("leaks its statistics; set search_space.norm=group", compose, "privacy=dp", *typed)


def test_the_page_of_settings_is_that_of_the_code(monkeypatch):
    """After a change: python scripts/settings_page.py."""
    monkeypatch.delenv("FEDNAS_CACHE", raising=False)
    import settings_page

    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()


LIST = {f.name: {"low": 0.1, "high": 0.2, "log": False} for f in fields(Configuration)}


@pytest.mark.parametrize("algorithm", ["feathers", "fedex", "random_search"])
def test_ranges_are_checked_before_anything_is_drawn(algorithm):
    tree = compose_tree([f"algorithm={algorithm}"])
    for wrong, words in (
        ({"learning_rate": LIST["lr"]}, "algorithm.ranges=learning_rate is unknown: choose one"),
        ({"momentum": {"low": 0.5, "high": 3.0, "log": False}}, "algorithm.ranges.momentum=2.99"),
        ({"lr": {"low": 0.0, "high": 3.0, "log": False}}, "algorithm.ranges.lr=0.0 is out of"),
    ):
        given = changed(tree, "algorithm.ranges", {**LIST, **wrong})
        refuses("^" + re.escape(words), parse_config, given)
    lacking = {name: given for name, given in LIST.items() if name != "lr"}
    given = changed(tree, "algorithm.ranges", lacking)
    refuses(r"^algorithm\.ranges=.* has no value for lr: give", parse_config, given)
    assert parse_config(changed(tree, "algorithm.ranges", LIST)).algorithm.name == algorithm
    if algorithm != "random_search":
        with pytest.raises(ConfigError, match=r"num_configurations=1000000000 .* 1 to 100000"):
            parse_config(changed(tree, "algorithm.num_configurations", 10**9))


def test_at_most_300_characters_of_a_value_are_echoed(tree):
    long = "x" * 5000
    values = dict.fromkeys(("rounds", "device", "dataset.root", "runtime.device"), long)
    values |= {"dataset.class_names": [long, long], "stages": [long]}
    for key, value in (values | {"runtime.superlink": {"a": long}}).items():
        told = refuses("", parse_config, changed(tree, key, value))
        assert len(told) < 600
        assert told.count("x") <= 301  # one is that of "expected"


@pytest.mark.parametrize("text", ["rounds={}", "{}", "{}=1", "seed=[{}", "+{}=1", "dataset={}"])
def test_a_long_override_is_not_echoed_whole(text):
    assert refuses("", compose, text.format("x" * 5000)).count("x") <= 301


def test_missing_and_unknown_keys_are_named(tree):
    lacking = changed(tree, "retrain", {**tree["retrain"]})
    del lacking["retrain"]["norm"]
    refuses(r"retrain\.norm is missing", parse_config, lacking)
    for group in ("privacy", "runtime"):
        refuses(f"^{group}", parse_config, changed(tree, f"{group}.name", "slurm"))
    with pytest.raises(ConfigError, match=r"retrain\.nom .*nearest: retrain\.norm"):
        parse_config(changed(tree, "retrain.nom", "batch"))
    with pytest.raises(ConfigError, match="dataset.root must be given: dataset.root=<text>"):
        parse_config(changed(compose_tree(["dataset=mnist"]), "dataset.root", "???"))


def test_cache_folder_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("FEDNAS_CACHE", "/tmp/elsewhere")
    assert compose_tree([])["dataset"]["cache"] == "/tmp/elsewhere"
    monkeypatch.delenv("FEDNAS_CACHE")
    monkeypatch.delenv("HOME")
    assert Path(compose_tree([])["dataset"]["cache"]).name == "fednas_flwr"


DATASET_FILES = [
    ("name: npz\nlimit_train: 5\n", "limit_train=5"),
    ("name: npz\nclass_nmaes: [a]\n", "dataset.class_nmaes is unknown"),
    ("- npz\n", "must be a mapping"),
    ("name: csv\nlabel: ill\n", "lacks id_column: name the column .* null if there is none"),
    (None, "cannot be read"),
]


@pytest.mark.parametrize(("text", "words"), DATASET_FILES)
def test_a_sites_dataset_file_is_checked(tmp_path, text, words):
    path = tmp_path / "dataset.yaml"
    if text is not None:
        path.write_text(text)
    refuses(words, site_dataset, path, cache="/cache")
    path.write_text("name: npz\nclass_names: [a, b]\n")
    dataset = site_dataset(path, cache="/cache")
    assert (dataset.name, dataset.class_names, dataset.cache) == ("npz", ["a", "b"], "/cache")
    for given, column in (("patient", "patient"), ("null", None)):
        path.write_text(f"name: csv\nid_column: {given}\n")
        assert site_dataset(path, cache="/cache").id_column == column


def test_no_record_decides_how_a_site_reads_the_others(tmp_path):
    """A decimal sign or an encoding that is found in a table is found in all of its records."""
    settings = tmp_path / "dataset.yaml"
    settings.write_text("name: csv\nid_column: null\n")
    dataset = site_dataset(settings, cache="/cache")
    cells = []
    for number, more in enumerate(("4;y", "4.5;y", "4;caf\u00e9")):
        table = tmp_path / f"{number}.csv"
        table.write_text(f"age;note\n1;2,5\n2;3,5\n{more}\n", encoding="utf-8")
        form = replace(dataset, corrupt="refuse")
        cells.append([column[:2].tolist() for column in read_texts(table, form)[0].values()])
    assert cells == [[["1", "2"], ["2,5", "3,5"]]] * 3
    table.write_bytes("age;note\n1;caf\u00e9\n".encode("cp1252"))
    refuses("cannot be read", read_texts, table, form)
    settings.write_text("name: csv\nid_column: null\nencoding: cp1252\ndecimal: comma\n")
    dataset = site_dataset(settings, cache="/cache")
    assert (dataset.encoding, dataset.decimal) == ("cp1252", "comma")


COST = "{table:null,unit:multiply_adds,target:2e5,loss:multiplicative,scale:%s,exponent:%s}"
IMPOSSIBLE = """
algorithm=dpnas algorithm.controller.temperature=1e-40 | ^algorithm.controller.temperature=$RANGE
algorithm=feathers algorithm.bandit.temperature=1e-40 | ^algorithm.bandit.temperature=$RANGE
algorithm=fdnas algorithm.hardware=$STEEP | ^algorithm.hardware.exponent=$RANGE
algorithm=fdnas algorithm.hardware=$FALLING | ^algorithm.hardware.exponent=$RANGE
algorithm=fdnas algorithm.hardware=$HIGH | ^algorithm.hardware.scale=$RANGE
dataset=image_folder dataset.root=a search_space=mlp_small dataset.channels=4
    | ^dataset\\.channels=.*\\.$$
$DP rounds=1000000000 | ^rounds=.*expected at most 10000 in all
$DP retrain.rounds=100000 | ^rounds=.*fewer rounds of more local steps
aggregate=median algorithm=fnas clients=2 | sums of gradients
aggregate=median clients=2 | expected 3 or more
aggregate=median retrain.exchange=gradients | set aggregate=mean or retrain.exch
aggregate=trimmed_mean | aggregate.trim=1 leaves nothing of the replies
aggregate=trimmed_mean clients=9 aggregate.trim=3 | of 9 clients lets
aggregate=trimmed_mean algorithm=cfdnas search_space=mbconv retrain=mbconv | =median
"""


OF_FLOAT32 = {"STEEP": COST % (1, 1e6), "FALLING": COST % (1, -1e6), "HIGH": COST % (1e30, 1)}
RANGE = ".* is out of range: expected"


@pytest.mark.parametrize(("overrides", "words"), rows(IMPOSSIBLE, DP=DP, RANGE=RANGE, **OF_FLOAT32))
def test_what_cannot_be_is_refused_by_its_whole_key(overrides, words):
    """Also what float32 turns infinite, and robust averages of nothing."""
    refuses(words, compose, *overrides.split())


@pytest.mark.parametrize("algorithm", ["fed_darts", "feathers", "fedavg", "fedex", "random_search"])
def test_robust_averages_are_for_all_that_average(algorithm):
    trimmed = "aggregate=trimmed_mean aggregate.trim=2 runtime.quorum=1 clients=5".split()
    assert parse_config(compose_tree([f"algorithm={algorithm}", *trimmed])).aggregate.trim == 2


def test_every_algorithm_has_one_entry_and_a_file():
    files = {path.stem for path in (conf_folder() / "algorithm").glob("[!_]*.yaml")}
    assert files == set(algorithms())
    for name, entry in algorithms().items():
        assert (entry.search is None) == issubclass(entry.settings, GivenNetwork), name


def test_the_algorithms_own_refusals_come_before_the_general_ones():
    both = {"fed_darts": "aggregate=median with a round of 2 clients", "fnas": "sums of gradients"}
    for algorithm, words in both.items():
        config = compose(f"algorithm={algorithm}", "clients=2")
        refuses(words, check_combinations, replace(config, aggregate=AggregateSettings("median")))


def test_fednas_with_privacy_is_told_which_algorithms_there_are():
    private = ", ".join(sorted(n for n, entry in algorithms().items() if RECORD in entry.units))
    assert "dp_fnas" in private
    with pytest.raises(ConfigError, match=f"algorithm=fednas is not possible yet: .* {private}."):
        parse_config(compose_tree(["algorithm=fednas", "privacy=dp", *GROUP]))


CELLS = "algorithm=dpnas search_space=dp_cells retrain=dp_cells"


EXPERIMENTS = [c.partition("=")[2] for c in all_choices() if c.startswith("experiment=")]


@pytest.mark.parametrize("name", firsts(EXPERIMENTS))
def test_no_shipped_experiment_sets_anything_without_effect(name):
    chosen = [f"experiment={name}"]
    given = user_settings(chosen)
    assert given.experiment
    config = parse_config(yielded(compose_tree(chosen), given))
    check_effect(config, UserSettings(typed=given.experiment))


@pytest.fixture
def own_experiment():
    """``own_experiment(tree)``: stores an experiment of the user's own; returns its override."""
    stored = ConfigStore.instance().repo

    def store(tree):
        ConfigStore.instance().store(group="experiment", name="mine", node=tree, package="_global_")
        return "experiment=mine"

    yield store
    stored.pop("experiment", None)


PRIVATE = {"defaults": [{"override /privacy": "dp"}]}
PRIVATE |= dict.fromkeys(("search_space", "retrain"), {"norm": "group"})
OF_FIXED = {"defaults": [{"override /search_space": "darts"}, {"override /algorithm": "fedavg"}]}
RETRAINING = {"algorithm": {"weights": {"lr": 0.3}, "batch_size": 9}, "stages": ["retrain"]}
RETRAINING["genotype"] = "a.json"
UNSEARCHED = "stages=[retrain], which lack search."
EXPERIMENTS_WITHOUT_EFFECT = [
    ({**PRIVATE, "algorithm": {"local_epochs": 7}}, "algorithm.local_epochs", "privacy=dp, whose"),
    (OF_FIXED, "search_space", "algorithm.network=mobilenet_v2, a network that is fixed."),
    (RETRAINING, "algorithm.weights.lr, algorithm.batch_size", UNSEARCHED),
]


@pytest.mark.parametrize(("tree", "settings", "cause"), EXPERIMENTS_WITHOUT_EFFECT)
def test_what_an_experiment_sets_idly_is_in_one_warning(own_experiment, tree, settings, cause):
    with pytest.warns(NoEffectWarning) as told:
        compose(own_experiment(tree), "seed=2")
    (one,) = told
    sentence = f"the experiment sets {settings}, without effect with {cause}"
    assert str(one.message).startswith(sentence)
    assert one.filename == __file__  # that of who composes


def test_what_an_experiment_sets_and_typing_overrules(own_experiment):
    mine = own_experiment({**PRIVATE, "defaults": [], "algorithm": {"local_epochs": 7}})
    assert compose(mine).algorithm.local_epochs == 7
    with pytest.warns(NoEffectWarning, match=r"sets algorithm\.local_epochs, without effect"):
        assert compose(mine, "privacy=dp").privacy.name == "dp"
    with pytest.raises(NoEffectError, match="^algorithm.local_epochs=7 has no effect"):
        compose(mine, "privacy=dp", "algorithm.local_epochs=7")


def test_an_experiments_setting_that_is_typed_over_is_no_finding():
    config = compose("experiment=fed_darts/fashion_mnist", "algorithm.batch_size=8")
    assert config.algorithm.batch_size == 8
    plain = compose("experiment=dpnas/train_mnist", "privacy=none")
    assert plain.privacy.name == "none"  # its budget went with privacy=dp
    changed = ("experiment=feathers/fashion_mnist", "algorithm=fed_darts")
    assert not hasattr(compose(*changed, "retrain=small").algorithm, "nas_rounds")
    words = "algorithm.nas_rounds is a setting of algorithm=feat"
    refuses(words, compose, *changed, "algorithm.nas_rounds=2")
    brief = compose("experiment=fdnas/fashion_mnist", "evaluation.personalised=false", "clients=3")
    assert not brief.evaluation.personalised


def test_defaults_of_privacy_give_way_to_what_is_set_in_their_place():
    """By an override or an experiment; a typed default holds against an experiment's setting."""
    terms = compose("privacy=dp").privacy
    assert isinstance(terms, DifferentialPrivacy)
    assert None not in (terms.rate, terms.retrain.rate, terms.retrain.noise_walk)
    typed = compose("privacy=dp", "algorithm.batch_size=8", "retrain.weights={lr: 0.1}").privacy
    assert isinstance(typed, DifferentialPrivacy)
    assert (typed.rate, typed.retrain) == (None, replace(terms.retrain, noise_walk=None))
    unit = ["privacy=dp", "privacy.unit=client", "secure_sum=true", "clients=5"]
    for norm, more in ((1.0, []), (0.3, ["privacy.retrain.max_grad_norm=.3"])):
        assert compose(*unit, *more).privacy.retrain.max_grad_norm == norm
    for hostile in ("~privacy.retrain", "privacy.retrain=5", "privacy.retrain=null"):
        refuses(r"privacy\.retrain", compose, "privacy=dp", "retrain.batch_size=8", hostile)
    experiment = "experiment=dpnas/train_fashion_mnist"
    given = compose(experiment).privacy
    assert isinstance(given, DifferentialPrivacy)
    assert (given.retrain.rate, given.retrain.noise_walk) == (None, None)
    with pytest.warns(NoEffectWarning, match=r"retrain\.batch_size, without effect"):
        over = compose(experiment, "privacy.retrain.rate=.25").privacy
    assert isinstance(over, DifferentialPrivacy)
    assert over.retrain.rate == 0.25


WITHOUT_EFFECT = """
algorithm=fedavg rounds=3 | rounds=3 has no effect with algorithm=fedavg and stages=
algorithm=fedavg search_space=darts | search_space=darts has no effect with algorithm.net
algorithm=fedavg stages=[search,retrain] | leave search out of it
algorithm=fedavg algorithm.network=plain_cnn retrain.norm=group | retrain.norm=group
algorithm=fedavg retrain.channels=3 | network that is fixed: remove it
algorithm=fedavg genotype=a.json algorithm.network=linear stages=[retrain] | genotype=null
algorithm=fedavg retrain.drop_path_prob=.1 | retrain.drop_path_prob=0.1 has no effect
algorithm=cfdnas algorithm.inherit=false algorithm.group_by=hardware algorithm.num_groups=null
    rounds=3 | set algorithm.inherit=true
$CELLS algorithm.sampler=random algorithm.controller.lr=.1 | set algorithm.sampler=controller
algorithm=cfdnas algorithm.client_tags=[a,b,c]
    | algorithm.client_tags=[a, b, c] has no effect with algorithm.group_by=alphas
algorithm=random_search algorithm.trial_rounds=0 algorithm.batch_size=3 | tries no net
algorithm=fnas stages=[search] training.momentum=averaged | clients send no models
$LOCAL stages=[search] training.momentum=averaged | clients send no models
$LOCAL stages=[search] runtime.wire=int8 | no trained model is sent
$LOCAL retrain.exchange=gradients training.momentum=averaged | the server steps with the momentum
algorithm=zero_cost stages=[search] runtime.wire=int8 | in which no client trains
algorithm=dpnas stages=[search] training.precision=bfloat16 | with algorithm.dp_aware
algorithm=zero_cost stages=[search] training.class_factors={a:.5} | training.class_factors={a: 0.5}
algorithm=feathers retrain.weights.lr=.3 | configurations of its own
algorithm=feathers algorithm.configurations=[$ARM] algorithm.num_configurations=3 |
algorithm=fedex algorithm.configurations=[$ARM] algorithm.ranges={lr:{low:.1}} |
algorithm=fedex retrain.weights.clip_norm=1 | retrain.weights.clip_norm=1.0 has no
stages=[search] retrain.rounds=3 | retrain.rounds=3 has no effect with stages=[search
stages=[search] evaluation.personalised=true | which lack evaluate: remove it
stages=[retrain] genotype=a.json algorithm.rule=first_order | which lack search
evaluation.personalised=true dataset.fractions={test:0,validation:.5} | no client has test records
dataset.server_test=false dataset.limit_test=5 | dataset.server_test=false
partition=quantity partition.fractions=[.1,.9] partition.alpha=.2 | set partition.fractions=[]
algorithm=fnas retrain.exchange=gradients training.momentum=averaged
    | the momentum of algorithm.weights and
algorithm=fedprox algorithm.proximal=.1 retrain.exchange=gradients | in which clients take no steps
algorithm=fedex retrain.exchange=models | retrains in exchanges of its own
algorithm=fedex algorithm.ranges.alpha_lr={low:1e-4,high:1e-3,log:true}
    | algorithm.ranges.alpha_lr.low=0.0001 has no effect with algorithm=fedex, which choos
algorithm=fedex algorithm.ranges.alpha_weight_decay.low=1e-4 | has no alphas
algorithm=dpnas rounds=2 algorithm.warm_up_rounds=2 algorithm.rewarded_candidates=3
    | rounds=2, all of which warm up
algorithm=fedex retrain.evaluate_every=1 | retrains in exchanges of its own
$DP retrain.evaluate_every=1 | no effect with privacy=dp: remove it, or set privacy=none
stages=[search] retrain.evaluate_every=1 | which lack retrain
$SITES secure_sum=true secure_sum.colluding=2 | sites have terms, books, noise
$SITES privacy.test_seed=3 | noise and scores of their own
clients=2 runtime.largest_share=.3 | clients=2, of whom nobody can tell which is right
clients=1 runtime.most_records=3 | clients=1, of whom nobody can tell
clients=3 sampling.per_round=3 sampling.spare=.5 | per_round=3 of clients=3, so that all are
clients=4 sampling.per_round=.5 runtime.largest_share=.3 | per_round=0.5, of whom
$DP clients=2 privacy.fewest_records=.3 | clients=2, of whom nobody can tell
retrain.rounds=1 retrain.drop_path_prob=.3 | with retrain.rounds=1: remove it
algorithm=fnas $DP |
$DP privacy.search_share=.3 privacy.weights.noise_multiplier=1 privacy.alphas.noise_multiplier=1
    | noise of the search that is given
$DP algorithm.local_epochs=7 | algorithm.local_epochs=7 has no effect with privacy=dp
$DP retrain.local_epochs=1 | of retraining privacy.retrain.local_steps
$DP $CELLS algorithm.dp_aware.max_grad_norm=.2
    | algorithm.dp_aware.max_grad_norm=0.2 has no effect
$DP privacy.rate=.1 algorithm.batch_size=8 | set privacy.rate=null
$DP privacy.retrain.rate=.1 retrain.batch_size=8 | set privacy.retrain.rate=null
$DP privacy.retrain.noise_walk=.1 retrain.weights.lr=.1 | set privacy.retrain.noise_walk=null
algorithm=feathers $DP privacy.retrain.noise_walk=.1 | which chooses it from
algorithm=zero_cost $DP privacy.rate=.1 | asks clients nothing
$DP privacy.rewards_share=.3 | which ask for no rewards
algorithm=feathers $DP privacy.rewards_share=.3 privacy.rewards.noise_multiplier=3
    | noise of rewards that is given
$DP privacy.statistics_share=.1 | without pooled features of dataset.backbone
$DP dataset.linear_baseline=true | set privacy=none
algorithm=dp_fnas $DP algorithm.evaluate_every=3 | privacy.metrics_noise_multiplier
algorithm=dp_fnas $DP privacy.local_steps=3 | which has steps of its own
$DP stages=[search] privacy.retrain.local_steps=3 | which lack retrain
$DP stages=[search] privacy.metrics_noise_multiplier=3 | nothing is measured
$DP stages=[search] privacy.scores_error=.01 | which lack retrain
$DP privacy.unit=client secure_sum=true clients=4 privacy.scores_error=.01 | set privacy.unit=record
"""


TABLE = ("dataset=csv", "dataset.label=died", "search_space=mlp_small")
PRIVATE_TABLE = ("experiment=search/recommended_private", *TABLE)


BY_CLIENT = ("privacy=dp", "privacy.unit=client", "privacy.retrain.max_grad_norm=2")
HEAD = ("dataset.backbone={name: resnet18, weights: resnet18.pth}", "search_space=mlp_small")
OF_TABLES = [
    (PRIVATE_TABLE, (32, "none", 1.0, 0.5, 1024)),
    ((*PRIVATE_TABLE, "retrain.channels=16"), (16, "none", 1.0, 0.5, 1024)),
    ((*PRIVATE_TABLE, "retrain.norm=group"), (32, "group", 1.0, 0.5, 1024)),
    ((*PRIVATE_TABLE, "retrain.batch_size=8"), (32, "none", None, 0.5, 1024)),
    ((*TABLE, "privacy=dp", "privacy.micro_batch_size=4"), (32, "none", 1.0, 0.5, 4)),
    (("experiment=fedavg/private_table", *TABLE[:-1]), (32, "none", 1.0, 0.5, 1024)),
    (("experiment=fedavg/private_numbers", *TABLE[:-1]), (32, "none", 1.0, 0.2, 1024)),
    (("experiment=search/recommended_private",), (8, "group", 0.125, 0.2, 64)),
    (("experiment=feathers/fraud_private", *TABLE), (48, "group", None, 0.5, 48)),
    ((*PRIVATE_TABLE, "retrain=darts"), (32, "none", 1.0, 0.5, 1024)),
    ((*TABLE, *BY_CLIENT), (16, "group", 0.125, 0.2, 8)),
    ((*HEAD, "privacy=dp"), (16, "group", 1.0, 0.2, 1024)),  # of pooled features of images
    ((*HEAD, "privacy=dp", "retrain.batch_size=8"), (16, "group", None, 0.2, 1024)),
    ((*HEAD, "privacy=dp", "dataset.backbone.output=map"), (16, "group", 0.125, 0.2, 8)),
    ((*HEAD, *BY_CLIENT), (16, "group", 0.125, 0.2, 8)),
]


@pytest.mark.parametrize(("overrides", "expected"), OF_TABLES)
def test_private_training_of_a_table_is_of_all_its_records(overrides, expected, tmp_path):
    more = ("secure_sum=true",) if "privacy.unit=client" in overrides else ()
    config = parse_config(compose_tree((*overrides, *more)), user=user_settings(overrides))
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    again = f"config={file}"
    assert parse_config(compose_tree([again]), user=user_settings([again])) == config
    retrain, privacy = config.retrain, config.dp
    terms = (privacy.retrain.rate, privacy.retrain.noise_walk, privacy.micro_batch_size)
    assert (retrain.channels, retrain.norm, *terms) == expected


NO_EFFECT = rows(WITHOUT_EFFECT, DP=DP, SITES=SITES, ARM=ARM, LOCAL=LOCAL, CELLS=CELLS)


@pytest.mark.parametrize(("overrides", "sentence"), NO_EFFECT)
def test_a_setting_without_effect_is_refused_by_name(overrides, sentence):
    error = NoEffectError if sentence else ConfigError
    told = refuses("", compose, *overrides.split(), error=error)
    assert sentence in told
    assert not sentence or re.search(r" has no effect with .*: .*(remove it|leave|set ).*\.$", told)


OF_OTHERS = """
partition.alpha=.1 | partition=dirichlet, partition=quantity, and partition=iid
partition=column partition.seed=3 | partition=quantity, and partition=column
$SITES partition.file=a.json | partition=saved, and partition=sites
runtime=ray runtime.superlink=here | runtime=deployment, and runtime=ray
aggregate=median aggregate.trim=2 | aggregate=trimmed_mean, and aggregate=median
algorithm.client_tags=[a,b] | algorithm=cfdnas, and algorithm=fed_darts
"""


@pytest.mark.parametrize(("overrides", "choices"), rows(OF_OTHERS, SITES=SITES))
def test_a_setting_of_another_choice_is_refused_by_its_name(overrides, choices):
    told = refuses("", compose, *overrides.split())
    assert "is a setting of " in told
    assert f"{choices} has none of that name: choose the former, or remove it." in told


def test_a_mapping_that_is_null_is_set_by_true_by_its_keys_or_as_a_whole():
    terms = SecureSumSettings(least_sites=3, colluding=1)
    assert compose("clients=4").secure_sum is None
    assert compose("clients=4", "secure_sum=true").secure_sum == SecureSumSettings()
    assert compose("clients=4", "secure_sum={least_sites: 3, colluding: 1}").secure_sum == terms
    assert compose("clients=4", "secure_sum.least_sites=3").secure_sum == terms
    assert compose("clients=4", "secure_sum=true", "secure_sum.least_sites=3").secure_sum == terms
    assert compose("secure_sum=false").secure_sum is None
    sampling = compose("clients=9", "sampling.per_round=.3", "sampling.by=round_robin").sampling
    assert sampling == SamplingSettings(per_round=0.3, by="round_robin", spare=0)
    refuses(r"^sampling\.per_round is missing: give it, too\.$", compose, "sampling.by=round_robin")
    refuses("^sampling=true must be a group of settings", compose, "sampling=true")
    for last in ("true", "null"):
        lost = f"secure_sum.colluding=0 is lost with secure_sum={last}: leave one out."
        refuses(lost, compose, "clients=4", "secure_sum.colluding=0", f"secure_sum={last}")


def test_a_long_cause_of_no_effect_is_cut():
    own = ("algorithm=fedavg", "algorithm.network=linear")
    told = refuses("", compose, *own, f"genotype={'x' * 4000}", error=NoEffectError)
    assert told.count("x") == 80
    words = r"genotype=a\{b\}\.json: remove it, or set genotype=null"
    refuses(words, compose, *own, "genotype='a{b}.json'", error=NoEffectError)


def test_needs_of_an_algorithm_come_beside_those_of_all(monkeypatch):
    config, needed = compose("algorithm=fedavg"), "privacy=dp"
    entry = replace(algorithms()["fedavg"], needs={needed: "seed"})
    monkeypatch.setitem(algorithms(), "fedavg", entry)
    for name in ("seed", *NEEDS_OF_ALL[needed].split()):
        assert f"set {needed}" in without_effect(config)[name].remedy


def test_defaults_without_effect_are_silent_and_taking_back_is_no_finding():
    compose("algorithm=fedavg", "retrain.channels=null", "evaluation.personalised=false")
    compose("algorithm=fedavg", "algorithm.network=linear", "retrain.auxiliary_weight=0")
    compose("stages=[search]")
    compose("algorithm=zero_cost", "stages=[search]", "training.class_factors={}")


SIZED = ("stages=[retrain]", "genotype=a.json", "retrain.channels=8", "retrain.num_cells=1")


def test_of_the_search_space_only_the_skip_acts_on_a_network_sized_by_retrain():
    assert compose(*SIZED, "search_space.skip=linear").search_space.skip == "linear"
    assert compose(*SIZED, "search_space.skip=none").search_space.skip == "none"
    for other in ("search_space.channels=4", "search_space.norm=group", "search_space=darts"):
        words = f"^{other} has no effect with .*(do not s|has sizes)"
        refuses(words, compose, *SIZED, other, "search_space.skip=linear", error=NoEffectError)
    taken = [text for text in SIZED if not text.startswith("retrain.")]
    taken.append("retrain.channels=null")
    assert compose(*taken, "search_space.channels=4").search_space.channels == 4


def test_noise_of_metrics_acts_where_test_records_are_measured():
    own = ("algorithm=fedavg", "algorithm.network=linear", "privacy=dp")
    own = (*own, "privacy.metrics_noise_multiplier=3")
    assert compose(*own).privacy.metrics_noise_multiplier == 3
    words = "with which nothing is measured on clients' rec"
    for without in ("dataset.fractions={train:.6,validation:.4,test:0}", "stages=[retrain,export]"):
        refuses(words, compose, *own, without, error=NoEffectError)


def test_an_empty_mapping_empties(own_experiment):
    mine = own_experiment({"training": {"class_factors": {"1": 0.5}}})
    assert compose(mine).training.class_factors == {"1": 0.5}
    assert compose(mine, "training.class_factors={}").training.class_factors == {}
    empty = ("algorithm=feathers", "algorithm.ranges={}")
    assert compose(*empty, f"algorithm.configurations=[{ARM}]").algorithm.ranges == {}
    refuses("^algorithm.ranges=.* has no value for lr", compose, *empty)
    refuses("^algorithm.weights.lr is missing", compose, "algorithm.weights={}")
    table = compose("dataset=csv", "dataset.root=a.csv", "dataset.categories.smoker=[a,b]").dataset
    assert table.categories == {"smoker": ["a", "b"]}


# --- mappings that are null


def test_a_mapping_that_was_null_is_checked_as_a_whole(tmp_path):
    zero_cost = ["algorithm=zero_cost", "algorithm.shortlist.keep=20"]
    whole = compose(*zero_cost, "algorithm.shortlist.scores=[synflow]")
    given = compose("algorithm=zero_cost", "algorithm.shortlist={keep: 20, scores: [synflow]}")
    assert whole.algorithm == given.algorithm
    refuses(r"^algorithm.shortlist.scores is missing: give it", compose, *zero_cost)
    misspelt = ("algorithm=zero_cost", "algorithm.shortlist.kepe=20")
    refuses(r"\.kepe is unknown.*nearest: .*\.keep\)", compose, *misspelt)
    refuses(r"is a setting of algorithm=zero_cost, and", compose, "algorithm.shortlist.keep=20")
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(compose_tree(["algorithm=zero_cost"])))
    again = [f"config={path}", *zero_cost[1:], "algorithm.shortlist.scores=[synflow]"]
    assert compose_tree(again)["algorithm"]["shortlist"] == {"keep": 20, "scores": ["synflow"]}


# --- the last learning rate


LAST_RATES = [
    ("", (0.1, 0.01)),
    ("algorithm.weights.lr=.2", (0.2, 0.01)),
    ("algorithm.weights.lr=.01", (0.01, 0.01)),
    ("algorithm.weights.lr=.005", (0.005, 0.005)),
    ("algorithm.weights={lr:.005}", (0.005, 0.005)),
    ("algorithm.weights.lr=.005 algorithm.weights.min_lr=.001", (0.005, 0.001)),
    ("experiment=fed_darts/published", (0.025, 0.001)),
    ("experiment=fed_darts/published algorithm.weights.lr=.0005", (0.0005, 0.0005)),
]


@pytest.mark.parametrize(("overrides", "rates"), LAST_RATES)
def test_a_default_of_the_last_learning_rate_follows_a_lower_first_one(overrides, rates):
    weights = compose(*overrides.split()).algorithm.weights
    assert (weights.lr, weights.min_lr) == rates


def test_a_last_learning_rate_that_was_typed_does_not_follow():
    with pytest.raises(ConfigError, match=r"^algorithm.weights.min_lr=0.01 is out of range"):
        compose("algorithm.weights.lr=.005", "algorithm.weights.min_lr=.01")
    assert compose("retrain.weights.lr=.0005").retrain.weights.min_lr == 0.0005


# --- values in sentences


SPELT = """
stages=[evaluate] | stages=[evaluate]
seed='5' | seed=5 has the wrong type: expected a whole number, not text; if it
seed='5' | from the environment, write ${oc.decode:${oc.env:NAME}}.
genotype={a:null} | genotype={a: null} has the wrong type
algorithm=cfdnas algorithm.client_tags=[a,1] | client_tags[1]=1 has the wrong type
"""


@pytest.mark.parametrize(("overrides", "words"), rows(SPELT))
def test_sentences_spell_values_as_overrides_do(overrides, words):
    refuses(re.escape(words), compose, *overrides.split())


def test_ranges_of_dates_are_dates():
    table = ("dataset=csv", "search_space=mlp_small")
    config = compose(*table, "dataset.ranges={seen: [2020-01-01, 2024-12-31], age: [0, 100]}")
    assert config.dataset.ranges == {"seen": [18262, 20088], "age": [0, 100]}
    with pytest.raises(ConfigError, match="expected a number, or a date such as 2024-12-31"):
        compose(*table, "dataset.ranges={seen: [2020-13-01, 2024-12-31]}")


# --- What an algorithm cannot do is refused, by its settings


HALVING = "algorithm=successive_halving"
BY_ALGORITHMS = r"""
algorithm=fdnas search_space=nasbench201_small | paths of blocks; set search_space=mbconv
$FDNAS algorithm.alphas.weight_decay=1e-3 | ops that are not sampled must keep
$FDNAS privacy=dp search_space.norm=batch | set search_space.norm=group
algorithm=feathers algorithm.ranges.momentum={low:2.0,high:1.0,log:false} | high=1.0 .* 2.0 or more
algorithm=fedex privacy=dp | record with algorithm=fedex is not possible
algorithm=fedex dataset.fractions={train:.8,validation:0,test:.2} | fractions.validation=0\.0
server_optimizer=adam | server_optimizer=adam with algorithm=fed_darts: it is for the training of a
    given network; set algorithm=fedavg or fedprox
algorithm=fedavg server_optimizer.lr=1 | server_optimizer\.lr
algorithm=fedavg aggregate=median clients=20 secure_sum=true | secure_sum=true with
    aggregate=median: it compares values of single clients
$LOCAL rounds=3 | rounds=3 with algorithm.rewarded=local: at most 2 rounds .* rounds=2
$LOCAL privacy=dp rounds=2 | algorithm.rewarded=local with privacy=dp: .* set
    algorithm.rewarded=averaged
$HALVING algorithm.pool={draws:1,keep:null} | pool.draws=1 is out of range: expected 2 or more
$HALVING algorithm.pool={draws:9,keep:10} | pool.keep=10 is out of range.*draws=9
$LOCAL algorithm.pool.shortlist={keep:3,scores:[synflow]} | shortlist.keep=3 .* 4 to draws=9
$DATA_FREE algorithm.shortlist={keep:5,scores:[synflow]} | shortlist.keep=5 .* 2 to draws=4
$DATA_FREE algorithm.limits.latency_ms=3 | a limit of latency needs a table
"""
SHORTER = {
    "FDNAS": "algorithm=fdnas search_space=mbconv_small retrain=mbconv",
    "HALVING": HALVING,
    "LOCAL": f"{HALVING} algorithm.pool={{draws:9,keep:4}} algorithm.rewarded=local",
    "DATA_FREE": "algorithm=zero_cost algorithm.draws=4",
}


@pytest.mark.parametrize(("overrides", "words"), rows(BY_ALGORITHMS, **SHORTER))
def test_what_cannot_be_is_refused_in_a_sentence(overrides, words, compose_config):
    refuses(words, compose_config, *overrides.split())


# --- Compositions that are remembered are Hydra's, to the last value and the last sentence


COMPOSED = [
    "",
    "algorithm=feathers seed=3 rounds=2 algorithm.ranges.lr={low:.1,high:1,log:true}",
    "experiment=dp_fnas/fashion_mnist privacy.weights.noise_multiplier=2 trackers=[]",
    "privacy=dp secure_sum={least_sites:3} dataset.cache=${oc.env:HOME} nothing.like=it",
    "dataset.class_names={} hydra.run.dir=here",
    "seed=1,2",
    "algorithm=fedavgg",
    "++algorithm=fedavg",
    "~trackers",
]


@pytest.mark.parametrize("overrides", COMPOSED)
def test_what_is_remembered_is_what_hydra_composes(overrides, monkeypatch):
    def composed():
        try:
            return hydra_config.compose_tree(overrides.split())
        except ConfigError as error:
            return str(error)

    found = [composed() for _ in range(2)]
    found[0].clear() if isinstance(found[0], dict) else None
    again = composed()  # whatever is done to what was handed out
    monkeypatch.setattr(hydra_config, "compose", compose_by_hydra)
    assert found[1] == again == composed()

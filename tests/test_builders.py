"""From a configuration to objects: every combination on embedded or made data builds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_search
from fednas_flwr.base.errors import ConfigError, NoEffectError
from fednas_flwr.client.making import make_client
from fednas_flwr.data.prepared import make_data, save_partition
from fednas_flwr.models import networks
from fednas_flwr.pipeline.beginning import make_cohort
from fednas_flwr.pipeline.feasible import check_buildable
from fednas_flwr.settings import conf_folder
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.spaces.genotype import load_genotype, save_genotype
from fednas_flwr.spaces.mbconv import CANDIDATES, SKELETONS, MBConvSpace

from .refusals import refuses, refuses_run
from .rows import rows

# Files that need nothing but the installation, beside those of the made data set.
BUILDS = {
    "algorithm=fedavg algorithm.network={}": "efficientnet_b0 plain_cnn linear",
    "search_space=darts retrain={}": "darts",
    "search_space={} retrain.num_cells=3": "darts_small",
    "search_space={}": "nasbench201 nasbench201_small",
    "search_space={} retrain=mbconv": "mbconv mbconv_small",
    "search_space={} retrain=dp_cells": "dp_cells dp_cells_small",
    "retrain={} retrain.auxiliary_weight=0": "darts quickstart small",
    "runtime={}": "inline ray",
}


@pytest.mark.parametrize(
    "overrides", [form.format(name) for form, names in BUILDS.items() for name in names.split()]
)
def test_files_build_on_embedded_data(overrides):
    check_buildable(composed(*overrides.split()))


FOLDER = conf_folder() / "experiment"
PATHS = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("[!_]*.yaml"))
EXPERIMENTS = [path.with_suffix("").as_posix() for path in PATHS]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_build_with_another_data_set(experiment, made_data):
    """The settings of an experiment, on made images or a made table instead of real ones."""
    config = parse_config(compose_tree([f"experiment={experiment}"]))
    if config.partition.name == "label_groups":  # of ten classes
        made_data = made_digits(made_data.parent)
    dataset = parse_config(compose_tree(["dataset=npz", f"dataset.root={made_data}"])).dataset
    if config.dataset.name == "csv":
        dataset = replace(config.dataset, root=str(made_table(config.dataset, made_data.parent)))
    cache = str(made_data.parent / "cache")
    check_buildable(replace(config, dataset=replace(dataset, cache=cache)))


def made_digits(folder):
    """Write 600 noise images of Fashion-MNIST's shape and number of classes."""
    rng, labels = np.random.default_rng(0), np.arange(600) % 10
    images = rng.integers(0, 256, (600, 1, 28, 28)).astype(np.uint8)
    np.savez(folder / "digits.npz", x_train=images, y_train=labels)
    return folder / "digits.npz"


def made_table(dataset, folder):
    """Write 3000 rows of the columns that a data set's statistics name."""
    rng = np.random.default_rng(0)
    lines = [",".join([*dataset.statistics, "label"])]
    for row in rng.normal(size=(3000, len(dataset.statistics))).round(3):
        lines.append(",".join([*map(str, row), str(rng.choice(dataset.class_names))]))
    (folder / "table.csv").write_text("\n".join(lines))
    return folder / "table.csv"


def test_check_builds_no_tensors_and_draws_nothing(compose_config):
    config = compose_config("search_space.channels=256")  # a gigabyte of weights
    state = torch.random.get_rng_state()
    check_buildable(config)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("group", ["search_space", "retrain"])
def test_memory_is_estimated_before_it_is_allocated(compose_config, group):
    words = f"^{group}: .* takes at least .* GiB .*{group}.channels=1000000"
    refuses_run(words, compose_config, f"{group}.channels=1000000")


def composed(*overrides):
    return parse_config(compose_tree(overrides))


PRIVATE = "privacy=dp search_space.norm=group retrain.norm=group"
RULED_OUT = """
dataset.cutout=1000 | dataset.cutout=1000 is out of range: expected 0 to below 8
dataset.crop_padding=8 | dataset.crop_padding=8 is out of range
$PRIVATE privacy.delta=.9 | privacy.delta=0.9 with .* lower it, or set privacy.large
$PRIVATE clients=1 privacy.delta=.0125 | expected below 1 / 80 = 0.0125
search_space=mbconv_small stages=[search] | set both to null
stages=[search] retrain.num_cells=null | set both to numbers
"""


@pytest.mark.parametrize(("overrides", "sentence"), rows(RULED_OUT, PRIVATE=PRIVATE))
def test_what_the_data_rules_out_is_refused_before_a_run(compose_config, overrides, sentence):
    refuses_run(sentence, compose_config, *overrides.split())


@pytest.mark.parametrize(
    "given", ["privacy.delta=.9 privacy.large_delta=true", "privacy.delta=.0124 clients=1"]
)
def test_a_delta_of_one_over_records_is_asked_for_by_name(compose_config, given):
    check_buildable(compose_config(*PRIVATE.split(), *given.split()))


def test_tables_are_not_augmented_and_need_a_column(compose_config, tmp_path):
    rng = np.random.default_rng(0)
    table = ["search_space=mlp_small", "search_space.channels=8", "retrain.channels=8"]
    for columns in (0, 2):
        values = rng.normal(size=(60, columns)).astype(np.float32)
        np.savez(tmp_path / f"{columns}.npz", x_train=values, y_train=np.arange(60) % 2)
    refuses_run(".+", compose_config, *table, f"dataset.root={tmp_path / '0.npz'}")
    given = [*table, f"dataset.root={tmp_path / '2.npz'}"]
    check_buildable(compose_config(*given))
    for setting in ("flip=true", "cutout=1", "crop_padding=1"):
        with pytest.raises(NoEffectError, match="has no effect with a table: remove it"):
            check_buildable(compose_config(*given, f"dataset.{setting}"))


@pytest.mark.parametrize("network", ["mobilenet_v2", "plain_cnn"])
def test_networks_for_images_refuse_tables(network):
    description = {"name": network, "input_shape": [7], "num_classes": 2, "norm": "group"}
    refuses(f"{network}.*images", networks.make_network, description)
    linear = networks.make_network({"name": "linear", "input_shape": [7], "num_classes": 2})
    assert linear(torch.zeros(3, 7)).shape == (3, 2)


def test_unknown_names_are_told_with_those_there_are(compose_config):
    with pytest.raises(ConfigError, match="network=resnet is unknown.*derived"):
        networks.make_network({"name": "resnet", "input_shape": [3, 8, 8], "num_classes": 2})
    with pytest.raises(ConfigError, match=r"search_space\.name=dart.*nearest: darts"):
        networks.make_space("dart", input_shape=(3, 8, 8), num_classes=2, norm="batch")
    for key in ("skeleton", "candidates"):
        words = rf"search_space\.{key}=fdna is unknown.*nearest: fdnas"
        refuses_run(words, composed, "search_space=mbconv", f"search_space.{key}=fdna")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none():
    assert networks.make_device("auto") == torch.device("cpu")
    refuses("runtime.device=cuda.*runtime.device=cpu", networks.make_device, "cuda")


def test_initial_networks_depend_on_the_seed_alone(compose_config):
    def states(seed):
        config = compose_config(f"seed={seed}")
        prepared, _ = make_data(config)
        cohort = make_cohort(config, run="r", emit=lambda event, **fields: None)
        torch.manual_seed(torch.seed() % 1000)
        strategy = make_search(config, prepared, cohort, None)
        return [vector for packed in strategy.states.values() for vector in packed.values()]

    first, again, other = states(1), states(1), states(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_partition_file_is_used_and_checked(compose_config, tmp_path):
    _, parts = make_data(compose_config("clients=2"))
    path = tmp_path / "partition.json"
    save_partition(path, parts[::-1])
    config = compose_config("clients=2", "partition=saved", f"partition.file={path}")
    _, loaded = make_data(config)
    assert [p.tolist() for p in loaded] == [p.tolist() for p in parts[::-1]]
    refuses("over 2 clients, but clients=3", make_data, replace(config, clients=3))
    with pytest.raises(ConfigError, match="another data set"):
        make_data(replace(config, dataset=replace(config.dataset, limit_train=50)))


def test_genotype_that_does_not_fit_is_refused(compose_config, tmp_path):
    config = compose_config("search_space=darts_small", "search_space.channels=4")
    space = networks.supernet_space(config, make_data(config)[0])
    path = tmp_path / "genotype.json"
    save_genotype(path, space.random_genotype(torch.Generator().manual_seed(0)))
    given = ["stages=[retrain]", f"genotype={path}"]
    refuses_run(r"retrain\.num_cells", compose_config, *given)
    given.append("retrain.num_cells=3")
    check_buildable(compose_config(*given))
    path.write_text(path.read_text().replace('"space": "darts"', '"space": "nasbench201"'))
    refuses_run("nasbench201", compose_config, *given)


def test_shipped_genotypes_are_given_by_name(compose_config):
    given = ["search_space=dp_cells", "retrain=dp_cells", "stages=[retrain]"]
    config = compose_config(*given, "genotype=dpnas_mnist")
    path = conf_folder() / "genotypes" / "dpnas_mnist.json"
    assert networks.given_genotype(config) == load_genotype(path)
    words = r"genotype=dpnas_mnst is .*nearest: dpnas_mnist"
    refuses_run(words, compose_config, *given, "genotype=dpnas_mnst")


def test_mbconv_networks_have_the_size_of_the_search_space(compose_config, tmp_path):
    """Also where a genotype is transferred: there ``search_space`` is what gives the size."""
    path, retrain = tmp_path / "genotype.json", ["stages=[retrain]", "retrain=mbconv"]
    space = MBConvSpace(
        input_shape=(3, 32, 32),
        num_classes=10,
        skeleton=SKELETONS["fdnas"],
        candidates=CANDIDATES["fdnas"],
    )
    genotype = space.random_genotype(torch.Generator().manual_seed(0))
    save_genotype(path, genotype)
    sizes = ["search_space.skeleton=fdnas_imagenet", "search_space.width=.5", f"genotype={path}"]
    config = parse_config(compose_tree([*retrain, "search_space=mbconv", *sizes]))
    check_buildable(config)
    description = networks.describe_network(config, make_data(config)[0], genotype)
    network = networks.make_network(description)
    stem = network.before[0][0]
    assert (stem.stride, stem.out_channels) == ((2, 2), 16)
    for overrides, message in {
        "search_space=mbconv": "retrain.channels=16 .* supernet's size; set both to null",
        "retrain=mbconv": "search_space=nasbench201.*: set search_space=mbconv",
        "search_space=mbconv_small retrain=mbconv": "unknown op|up to 6 are needed",
    }.items():
        given = ["stages=[retrain]", f"genotype={path}", *overrides.split()]
        refuses_run(message, composed, *given)


def test_a_client_of_a_site_with_a_policy_needs_its_gate(compose_config):
    config = compose_config("algorithm=fnas")
    with pytest.raises(ValueError, match="a site with a policy needs its guard"):
        make_client(config, 0, data=make_data(config), networks={}, site={"policy": "policy.yaml"})


def test_class_factors_are_in_0_to_1_and_of_classes_that_exist(compose_config):
    with pytest.raises(ConfigError, match=r"class_factors.blue=0.0 is out of range: .*at most 1"):
        compose_config("training.class_factors={blue: 0.0}")
    named = "dataset.class_names=[red,green,blue]"
    config = compose_config(named, "training.class_factors={blue: 0.25, red: 0.5}")
    client = make_client(config, 0, data=make_data(config), networks={})
    assert client.objective.class_factors.tolist() == [0.5, 1.0, 0.25]
    words = "training.class_factors=purple is unknown: choose one of 0, 1, 2"
    refuses_run(words, compose_config, "training.class_factors={purple: 0.5}")

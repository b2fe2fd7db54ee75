"""From a configuration to objects: every combination on embedded or made data builds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from fednas_flwr.algorithms.base import mean_metrics
from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.base.errors import ConfigError, NoEffectError
from fednas_flwr.base.randomness import derive_seed, make_generator, seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.client.making import PRIVATE_SITE_KEYS, make_client, make_site_guard
from fednas_flwr.client.rehearsal import machine
from fednas_flwr.data.loaders import augment, epoch_batches, server_split
from fednas_flwr.data.prepared import make_data, make_server_data, save_partition
from fednas_flwr.data.records import assign_splits, record_ids
from fednas_flwr.models import networks
from fednas_flwr.models.networks import describe_network, load, make_network, supernet_space
from fednas_flwr.pipeline.beginning import make_cohort
from fednas_flwr.pipeline.feasible import check_buildable
from fednas_flwr.protocol.messages import Header, Reply, Request
from fednas_flwr.protocol.requests import Amount, LocalTraining, Personalise
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.settings import conf_folder
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.run_settings import SecureSumSettings
from fednas_flwr.spaces.genotype import load_genotype, save_genotype
from fednas_flwr.spaces.mbconv import CANDIDATES, SKELETONS, MBConvSpace

from .asked import PLAIN, smallest
from .client.conftest import flat, packed
from .policies import policy_of
from .refusals import refuses, refuses_run
from .rows import firsts, rows

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


OF_FILES = [form.format(name) for form, names in BUILDS.items() for name in names.split()]


@pytest.mark.parametrize("overrides", OF_FILES)
def test_files_build_on_embedded_data(overrides):
    check_buildable(composed(*overrides.split()))


FOLDER = conf_folder() / "experiment"
PATHS = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("[!_]*.yaml"))


@pytest.mark.parametrize("experiment", firsts([path.with_suffix("").as_posix() for path in PATHS]))
def test_experiments_build_with_another_data_set(experiment, made_data):
    """The settings of an experiment, on made images or a made table instead of real ones."""
    config = parse_config(compose_tree([f"experiment={experiment}"]))
    if config.partition.name == "label_groups":  # of ten classes, as Fashion-MNIST has
        made_data = made_data.parent / "digits.npz"
        rng, labels = np.random.default_rng(0), np.arange(600) % 10
        images = rng.integers(0, 256, (600, 1, 28, 28)).astype(np.uint8)
        np.savez(made_data, x_train=images, y_train=labels)
    dataset = parse_config(compose_tree(["dataset=npz", f"dataset.root={made_data}"])).dataset
    if config.dataset.name == "csv":
        dataset = replace(config.dataset, root=str(made_table(config.dataset, made_data.parent)))
    cache = str(made_data.parent / "cache")
    check_buildable(replace(config, dataset=replace(dataset, cache=cache)))


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
$PRIVATE privacy.delta=.9 | privacy.delta=0.9 with .* lower it
$PRIVATE clients=1 privacy.delta=.0125 | expected below 1 / 80 = 0.0125
search_space=mbconv_small stages=[search] | set both to null
stages=[search] retrain.num_cells=null | set both to numbers
"""


@pytest.mark.parametrize(("overrides", "sentence"), rows(RULED_OUT, PRIVATE=PRIVATE))
def test_what_the_data_rules_out_is_refused_before_a_run(compose_config, overrides, sentence):
    refuses_run(sentence, compose_config, *overrides.split())


def test_a_delta_of_less_than_one_over_records_is_taken(compose_config):
    check_buildable(compose_config(*PRIVATE.split(), "privacy.delta=.0124", "clients=1"))


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


def test_on_a_gpu_kernels_repeat_their_bits_in_float32_and_the_self_test_knows(monkeypatch):
    cudnn = torch.backends.cudnn
    before, key = (cudnn.deterministic, cudnn.allow_tf32), machine(torch.device("cpu"), 1)
    assert before == (False, True)  # torch's own, which a processor leaves
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        assert networks.make_device("auto") == torch.device("cuda")
        assert (cudnn.deterministic, cudnn.allow_tf32) == (True, False)
        assert machine(torch.device("cpu"), 1) != key
    finally:
        cudnn.deterministic, cudnn.allow_tf32 = before


def test_initial_networks_depend_on_the_seed_alone(compose_config):
    def states(seed):
        config = compose_config(f"seed={seed}")
        prepared, _ = make_data(config)
        cohort = make_cohort(config, run="r", emit=lambda event, **fields: None)
        torch.manual_seed(torch.seed() % 1000)
        strategy = make_search(config, prepared, cohort)
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
    sizes = {"skeleton": SKELETONS["fdnas"], "candidates": CANDIDATES["fdnas"]}
    space = MBConvSpace(input_shape=(3, 32, 32), num_classes=10, **sizes)
    genotype = space.random_genotype(torch.Generator().manual_seed(0))
    save_genotype(path, genotype)
    sizes = ["search_space.skeleton=fdnas_imagenet", "search_space.width=.5", f"genotype={path}"]
    config = parse_config(compose_tree([*retrain, "search_space=mbconv", *sizes]))
    check_buildable(config)
    description = networks.describe_network(config, make_data(config)[0], genotype)
    stem = networks.make_network(description).before[0][0]
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


# --- settings and data arrive where they act


NORMALISED = ["dataset.mean=[0.2,0.3,0.4]", "dataset.std=[0.3,0.2,0.1]"]
SITES = ("runtime=deployment", "runtime.superlink=site", "partition=sites")
DP = ("algorithm=dp_fnas", "privacy=dp", "search_space.norm=group", "retrain.norm=group")
AUGMENTED = ["dataset.crop_padding=3", "dataset.flip=true", "dataset.cutout=3"]
MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ([0.2, 0.3, 0.4], [0.3, 0.2, 0.1]))
STEP = PLAIN
DP_CELLS = ("algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "clients=1")
DP_CELLS += ("search_space.widths=[4,4,8]", "search_space.head=8")


def ask(client, action, settings, states=None):
    """Return the client's reply in the first search round."""
    return answer(client, Request(action, Header("run", "search", 1, 1, 0, ""), settings, states))


def all_of(split):
    """Return all inputs and labels of a split."""
    return split.batch(torch.arange(len(split)), "cpu")


def augmented(split, rows, generator):
    """Return a batch as the settings ``AUGMENTED`` say."""
    x, y = split.batch(rows, "cpu")
    return augment(x, generator=generator, crop_padding=3, flip=True, cutout=3), y


def test_retraining_is_the_loop_with_all_that_may_be_switched_on(compose_config, federate):
    """Class factors, auxiliary head, drop path, crops, flips, cutout, normalisation."""
    own = ["clients=1", "search_space=darts_small", "search_space.channels=4", "retrain=small"]
    own += ["retrain.channels=4", "retrain.num_cells=3", "retrain.norm=group"]
    own += ["retrain.auxiliary_weight=0.7", "retrain.drop_path_prob=0.6"]
    own += ["dataset.class_names=[red,green,blue]", "training.class_factors={blue: 0.25, red: 0.5}"]
    config = compose_config(*own, *NORMALISED, *AUGMENTED, "retrain.weights.lr=0.005")
    fed = federate(config)
    space = supernet_space(config, fed.data[0])
    with seeded(5, "alphas"):
        alphas = {kind: torch.randn_like(a) for kind, a in space.supernet().alphas().items()}
    description = describe_network(config, fed.data[0], space.derive(alphas))
    strategy, network = make_retraining(config, description, fed.cohort)
    twin = make_network(description).train()
    strategy.load_into(twin)
    start = flat(twin.parameters())
    strategy.start(fed.grid, num_rounds=2)
    strategy.load_into(network)

    split, factors = fed.clients[0].split("train+validation"), torch.tensor([0.5, 1.0, 0.25])
    assert (split.mean, split.std) == ((0.2, 0.3, 0.4), (0.3, 0.2, 0.1))
    for number in (1, 2):
        sgd = config.retrain.weights.at_round(number, 2)
        own = {"momentum": sgd.momentum, "weight_decay": sgd.weight_decay}
        optimizer = torch.optim.SGD(twin.parameters(), sgd.lr, **own)
        generator = make_generator(config.seed, "retrain", number, 0, "weights")
        twin.drop_path_prob = 0.6 * (number - 1) / 2
        torch.manual_seed(derive_seed(config.seed, "retrain", number, 0, "train.weights"))
        size = config.retrain.batch_size
        for places in epoch_batches(len(split), batch_size=size, generator=generator):
            x, y = augmented(split, places, generator)
            logits, auxiliary = twin(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            losses = losses + 0.7 * F.cross_entropy(auxiliary, y, reduction="none")
            optimizer.zero_grad()
            (factors[y] * losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), sgd.clip_norm)
            optimizer.step()
    moved, expected = (flat(n.parameters()) - start for n in (network, twin))
    # group norm over few pixels amplifies rounding
    assert (moved - expected).norm() < 1e-3 * expected.norm()


def test_fnas_and_dpnas_augment_their_batches(compose_config, federate):
    config = compose_config("algorithm=fnas", "clients=1", "search_space.norm=group", *AUGMENTED)
    fnas = federate(config)
    client, supernet = fnas.clients[0], supernet_space(fnas.config, fnas.data[0]).supernet().train()
    reply = ask(client, "train.gradients", smallest()["train.gradients"], packed(supernet))
    for state, name in (("weights", "train"), ("alphas", "validation")):
        tensors = getattr(supernet, state)()
        split = getattr(client.data, name)
        generator = make_generator(config.seed, "search", 1, 0, name)
        x, y = augmented(split, torch.arange(len(split)), generator)
        loss = F.cross_entropy(supernet(x), y, reduction="sum") / len(split)
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        expected = torch.cat([g.flatten() for g in gradients]) * len(client.data.train)
        torch.testing.assert_close(reply.states[state]["float32"], expected, rtol=1e-3, atol=1e-3)

    config = compose_config(*DP_CELLS, *AUGMENTED)
    client = federate(config).clients[0]
    supernet = client.make_space().supernet().train()
    path = [5] * 15
    asked = replace(smallest(weights=STEP)["train.candidate"], candidates=[path])
    reply = ask(client, "train.candidate", asked, {"weights": packed(supernet)["weights"]})
    split, generator = client.data.train, make_generator(config.seed, "search", 1, 0, "train")
    x, y = augmented(split, torch.arange(len(split)), generator)
    F.cross_entropy(Candidate(supernet, path)(x), y).backward()
    weights = supernet.weights().values()
    moved = [w.detach() - (0.0 if w.grad is None else 0.1 * w.grad) for w in weights]
    expected = torch.cat([w.flatten() for w in moved])
    torch.testing.assert_close(reply.states["weights"]["float32"], expected, rtol=1e-4, atol=1e-5)


def test_class_factors_weigh_the_steps_of_candidates(compose_config, federate):
    """Halved losses are half a step, to the bit."""
    config = compose_config(*DP_CELLS)
    factors = dict.fromkeys(("0", "1", "2"), 0.5)
    halved = replace(config, training=replace(config.training, class_factors=factors))
    supernet = federate(config).clients[0].make_space().supernet().train()
    start, found = {"weights": packed(supernet)["weights"]}, []
    for own, lr in ((config, 0.0625), (halved, 0.125)):
        step = smallest(weights=replace(STEP, lr=lr))["train.candidate"]
        asked = replace(step, candidates=[[5] * 15])
        reply = ask(federate(own).clients[0], "train.candidate", asked, start)
        found.append(reply.states["weights"]["float32"])
    assert torch.equal(*found)
    assert not torch.equal(found[0], start["weights"]["float32"])


def site_of(folder, **changes):
    """Return a node's settings with a policy of 80 records."""
    policy = policy_of(records=80, **changes)
    (folder / "policy.yaml").write_text(yaml.safe_dump({"data_sets": {"my-data": policy}}))
    own = {"policy": folder / "policy.yaml", "ledger": folder / "ledger" / "rows"}
    own |= {"ledger-key": folder / "key", "data-set": "my-data"}
    return dict.fromkeys(PRIVATE_SITE_KEYS, "read elsewhere") | {k: str(v) for k, v in own.items()}


def test_a_policy_says_whether_its_node_has_a_part_in_sums(compose_config, tmp_path):
    """The policy of a site says whether it has a part in sums, not the run."""
    site = site_of(tmp_path)
    config = compose_config(*SITES, "clients=1", *DP, "dataset.class_names=['0','1','2']")
    data = make_data(compose_config("clients=1"))

    def client_of(config):
        guard = make_site_guard(site)
        return make_client(config, 0, data=data, networks={}, site=site, guard=guard)

    assert client_of(config).sums is None
    with pytest.raises(ConfigError, match="this site's policy has no section secure_sum"):
        client_of(replace(config, secure_sum=SecureSumSettings()))
    site_of(tmp_path, secure_sum={"roster": "ab" * 32, "least_sites": 2, "colluding": 0})
    refuses("the policy has secure_sum but the node lacks roster", client_of, config)


def test_personalised_metrics_are_of_test_records_after_local_training(compose_config, federate):
    fractions = "dataset.fractions={train: 0.4, validation: 0.3, test: 0.3}"
    client = federate(compose_config("clients=1", fractions)).clients[0]
    description = {"name": "linear", "input_shape": [3, 8, 8], "num_classes": 3}
    network = make_network(description)
    states = packed(network)
    local = LocalTraining(description, "train", Amount(1, None, None), STEP, 0.0, 0.0)
    reply = ask(client, "evaluate.personalised", Personalise(local=local, compares=True), states)
    x, y = all_of(client.split("train"))
    validation = all_of(client.data.validation)
    before = F.cross_entropy(network(validation[0]), validation[1], reduction="none")
    F.cross_entropy(network(x), y).backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    gains = before - F.cross_entropy(network(validation[0]), validation[1], reduction="none")
    told = [gains.sum().item(), gains.square().sum().item(), len(gains)]
    assert reply.properties["gain"] == pytest.approx(told, rel=1e-4)
    x, y = all_of(client.data.test)
    expected = F.cross_entropy(network(x), y).item()
    assert len({len(s) for s in vars(client.data).values()}) == 3
    assert reply.num_examples == len(y)
    assert reply.metrics["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """A file of images that say little of their labels: no two models of them are alike."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (160, 3, 8, 8), dtype=np.uint8), rng.integers(0, 3, 160)
    path = tmp_path_factory.mktemp("noise") / "noise.npz"
    np.savez(path, x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    return path


@pytest.fixture(scope="module")
def linear_run(finished_run, noise):
    """A retrained linear network of clients half of whose records are for tests."""
    own = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]")
    own += ("dataset.fractions={train: 0.3, validation: 0.2, test: 0.5}", "clients=2")
    own += ("dataset.linear_baseline=true", "retrain.weights.lr=0.01", f"dataset.root={noise}")
    return finished_run(*own, *NORMALISED)


def test_the_servers_test_set_is_normalised_as_the_training_is(linear_run, noise):
    data, central = np.load(noise), linear_run.the("evaluated")["central"]
    x = (torch.from_numpy(data["x_test"]) / 255 - MEAN) / STD
    y = torch.from_numpy(data["y_test"])
    with torch.no_grad():
        logits = load(linear_run.folder).network(x)
    expected = {"num_examples": len(y), "loss": F.cross_entropy(logits, y).item()}
    expected["accuracy"] = int((logits.argmax(1) == y).sum()) / len(y)
    assert {name: central[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_linear_baseline_never_sees_test_records(linear_run, noise):
    data, settings = np.load(noise), linear_run.config.dataset
    ids = record_ids(image.tobytes() for image in data["x_train"])
    parts = assign_splits(ids, key=settings.split_key.encode(), fractions=settings.fractions)
    assert 30 < (parts == 2).sum() < 70

    def area(rows):
        def inputs(images):
            return ((torch.from_numpy(images) / 255 - MEAN) / STD).flatten(1).numpy()

        model = LogisticRegression(max_iter=1000)
        model.fit(inputs(data["x_train"][rows]), data["y_train"][rows])
        by_class = model.decision_function(inputs(data["x_test"])).T
        odds = by_class - [np.logaddexp.reduce(np.delete(by_class, c, 0)) for c in range(3)]
        return np.mean([roc_auc_score(data["y_test"] == c, odds[c]) for c in range(3)])

    found = linear_run.the("evaluated")["linear"]["auroc"]
    assert found == pytest.approx(area(parts < 2), rel=1e-4)
    assert abs(area(parts < 2) - area(parts < 3)) > 1e-3  # else the test could not tell


def test_the_servers_own_test_set_of_real_sites_is_normalised_as_the_training_is(compose_config):
    properties = {"input_shape": [3, 8, 8], "schema": [], "class_names": ["0", "1", "2"]}
    properties |= {"image_shape": [], "transform": [], "multi_label": False, "target": []}
    properties |= {"mean": [0.2, 0.3, 0.4], "std": [0.3, 0.2, 0.1]}
    # what the sites say, not the run
    assert make_server_data(compose_config(*SITES), properties).mean == (0.2, 0.3, 0.4)
    prepared = make_server_data(compose_config(*SITES, *NORMALISED), properties)
    assert (prepared.mean, prepared.std) == ((0.2, 0.3, 0.4), (0.3, 0.2, 0.1))
    x, _ = all_of(server_split(prepared.server_test, prepared.mean, prepared.std))
    pixels = prepared.server_test.features
    torch.testing.assert_close(x, (pixels / 255 - MEAN) / STD, rtol=1e-5, atol=1e-5)


def test_a_sites_own_key_and_its_policys_fractions_decide_its_splits(compose_config, tmp_path):
    fractions = {"train": 0.2, "validation": 0.7, "test": 0.1}
    site = site_of(tmp_path, fractions=fractions) | {"split-key": "of the site"}
    runs = compose_config("clients=1", "dataset.split_key=the run")
    private = compose_config("clients=1", *DP, "dataset.split_key=the run")
    prepared, _ = data = make_data(runs)
    alone = make_client(runs, 0, data=data, networks={}, site={"split-key": "of the site"})
    gated = make_client(private, 0, data=data, networks={}, site=site, guard=make_site_guard(site))
    assert gated.data_form["mean"] == list(prepared.mean) == [0.5, 0.5, 0.5]
    for client, own in ((alone, runs.dataset.fractions), (gated, fractions)):
        parts = assign_splits(prepared.train.ids, key=b"of the site", fractions=own)
        for number, split in enumerate(vars(client.data).values()):
            assert split.rows.tolist() == np.flatnonzero(parts == number).tolist()


def test_a_metric_that_one_client_lacks_is_averaged_over_those_that_have_it():
    told = [(10, {"train_loss": 1.0}), (30, {"train_loss": 3.0, "validation_loss": 2.0})]
    replies = [Reply(*one) for one in (*told, (10, {"validation_loss": 4.0}))]
    assert mean_metrics(replies) == {"train_loss": 2.5, "validation_loss": 2.5}

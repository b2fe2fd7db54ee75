"""Baselines (``evaluation.baselines``): other networks that are trained like the found one.

Each is a run in ``baselines/<name>/`` of the run's folder, with the same clients, records,
retraining and privacy. With privacy, simulated sites keep a separate ledger for each baseline, so
that the whole epsilon goes into its training. Real sites cannot spend their epsilon again and train
no baselines with privacy.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fednas_flwr.algorithms.fedavg.strategy import planned, training_settings
from fednas_flwr.base.foreign import read_yaml
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.features import transform_of
from fednas_flwr.data.npz import reads_encoded
from fednas_flwr.models.networks import FINE_TUNED, FIXED_NETWORKS, described_space
from fednas_flwr.pipeline.feasible import pools_records
from fednas_flwr.runs.events import Event, records_of
from fednas_flwr.runs.leaderboard import FINALISTS, FRONT, Candidate, finalists
from fednas_flwr.runs.numbers import BASELINES_FOLDER, CONFIG_FILE, FINALISTS_FOLDER, read_run
from fednas_flwr.runs.run_folder import GENOTYPE_FILE, create_run_folder
from fednas_flwr.search.data_free_scores import trusted_scores
from fednas_flwr.settings import AlgorithmSettings, Config, conf_folder, with_runtime
from fednas_flwr.settings.data_settings import EncodedImages, Images, Scattering
from fednas_flwr.settings.incompatible import averages_plainly, has_real_sites
from fednas_flwr.settings.names import BATCH, BEST, FOUND, LINEAR, NO_SKIP
from fednas_flwr.settings.optimizers import RESNETS, SGD, Configuration
from fednas_flwr.settings.parser import parse
from fednas_flwr.settings.registry import algorithm_of, algorithms
from fednas_flwr.settings.run_settings import CellSpace, Retrain, ServerAdam
from fednas_flwr.settings.unused import without_effect
from fednas_flwr.spaces.costs import count_multiply_adds, ranges_of_cost
from fednas_flwr.spaces.genotype import Genotype, from_json, save_genotype

AFFORDED = 2  # random networks, if their number is not set
COSTS = 5  # ranges of cost; a front has a network from each of them
EXACT, ADAM_RATE = 120, 0.05  # rounds and learning rate of a linear model that is fitted exactly
FAR, LARGEST_BATCH = 100.0, 10**8  # a norm that no mean gradient has; values in a client's batch
SHARE = 3  # at first, candidates are trained for 1 / SHARE of the rounds
FURTHER = 3  # largest number of baselines besides the random ones
ADDED = 0.5  # share of a run's time that baselines may add by default
WORTH_S = 60.0  # a shorter run is a trial, which baselines would only delay
STAGES = ["retrain", "evaluate", "export"]  # the stages of a run with a given network
FEATURES = "features"  # name of the linear model on fixed features of images
SIDES = range(16, 65)  # sides in pixels of images that get such features
MOST_FEATURES = 4e8  # bound on the values of all records' features
DATA_FREE = "data_free"  # name of the choice by scores that read no record
DATA_FREE_FILE = "experiment/search/data_free.yaml"  # settings of the data-free choice, in conf/
THIN = "search_space/nasbench201_thin.yaml"  # its networks, for the space in its ``defaults``


def prepare_baselines(config: Config) -> list[Path]:
    """Return a run folder for every baseline; missing ones are created.

    ``random_1`` and so on are drawn uniformly from the search space. ``data_free`` is the network
    that scores ranked first in the search's own pool, unless the search has found the same one.
    Without such a ranking it is the choice of ``experiment=search/data_free``, unless the run's
    algorithm is ``zero_cost``. ``linear`` is a linear model, omitted if the run fits one to pooled
    records. For images, ``resnet8_<width>`` has the width whose multiply-adds are nearest. All use
    the hyper-parameters that the search has found.

    Args:
        config: Configuration of a finished run that has exported a searched network.
    """
    if not (number := num_random(config)):
        return []
    derived = read_run(config.folder).of_kind("derived")[0]
    alike = _trained_alike(config, derived)
    chosen = dict(_baselines(alike, number, derived))
    if not pools_records(config):
        chosen[LINEAR] = _linear(config, alike, derived["network"]["input_shape"])
    return _folders(config, BASELINES_FOLDER, chosen)


def prepare_candidates(config: Config, *, last: bool) -> list[Path]:
    """Return a run folder for every candidate; missing ones are created.

    Candidates are the found network, ``found``; for a table or features, also the found network
    with a linear skip; the baselines; for small images, ``features``, a linear model on their
    scattering features; and the backbone that is named, trained as a whole. Each is trained without
    validation records and then measured on them.

    Args:
        config: Configuration of a run that has searched, with ``deliver=best``.
        last: If false, all candidates are trained for a third of the rounds, the linear model
            first; if true, the best ones are trained for all rounds.
    """
    candidates = _candidates(config)
    first, trained = sorted(candidates, key=lambda name: name != LINEAR), {}
    for name in finalists(config.folder) if last else first:
        retrain = candidates[name].retrain
        rounds = retrain.planned if last else -(-retrain.planned // SHARE)
        retrain = replace(retrain, rounds=rounds, evaluate_every=rounds)
        trained[name] = replace(candidates[name], retrain=retrain)
    return _folders(config, FINALISTS_FOLDER if last else BASELINES_FOLDER, trained)


def delivered(config: Config, candidate: Candidate) -> Config:
    """Return the configuration with which a run trains the candidate that it delivers."""
    alike = _candidates(config)[candidate.name]
    dataset = replace(alike.dataset, linear_baseline=config.dataset.linear_baseline)
    return replace(alike, dataset=dataset, run_dir=config.run_dir)


def _candidates(config: Config) -> dict[str, Config]:
    """Return the configuration of each candidate by its name."""
    derived = read_run(config.folder).of_kind("derived")[0]
    alike = _trained_alike(config, derived)
    shape = derived["network"]["input_shape"]
    alike = replace(alike, retrain=_planned_retraining(alike, shape))
    found = partial(from_json, json.dumps(derived["network"]["genotype"]))
    candidates = dict([_given(alike, "found", found)])
    if len(shape) == 1 and config.search_space.skip == NO_SKIP:
        skipping = replace(alike, search_space=replace(config.search_space, skip=LINEAR))
        candidates |= dict([_given(skipping, "found_skip", found)])
    candidates |= dict(_baselines(alike, num_random(config), derived))
    candidates |= {LINEAR: _linear(config, alike, shape), **dict(_on_features(alike, shape))}
    candidates |= dict(_fine_tuned(alike))
    file = config.folder / BASELINES_FOLDER / DATA_FREE / GENOTYPE_FILE
    if file.is_file():  # the search for it is done
        space = candidates[DATA_FREE].search_space
        retrained = replace(alike, stages=STAGES, genotype=str(file.resolve()))
        candidates[DATA_FREE] = replace(retrained, search_space=space)
    return candidates


def _on_features(config: Config, shape: Sequence[int]) -> Iterator[tuple[str, Config]]:
    """Yield the training of a linear model on scattering features of small images.

    From few images it learns more than networks do. Learning rate and weight decay were chosen on
    held-out images.
    """
    partition, dataset = read_run(config.folder).of_kind("partition")[0], config.dataset
    number = 5 * math.prod(shape) * sum(records_of(partition)[1].values())  # 5 features per value
    suited = {*shape[1:]} <= {*SIDES} and number <= MOST_FEATURES
    if not isinstance(dataset, Images) or dataset.transform or not suited:
        return
    dataset = replace(dataset, scattering=Scattering(scales=2, angles=8))
    weights = replace(config.retrain.weights, lr=0.02, weight_decay=0.01)
    retrain, linear = replace(config.retrain, weights=weights), _shipped("fedavg", network=LINEAR)
    config = replace(config, algorithm=linear, stages=STAGES)
    yield FEATURES, replace(config, retrain=retrain, dataset=dataset)


def _fine_tuned(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the training of the whole backbone on images, if its weights are in a file."""
    dataset = config.dataset
    if not isinstance(dataset, Images) or dataset.backbone is None or not dataset.backbone.weights:
        return
    size, backbone = int(transform_of(dataset)[2]), dataset.backbone
    network = {"network": backbone.name, "weights": backbone.weights, "image_size": size}
    dataset = replace(dataset, backbone=None, scattering=None)
    if isinstance(dataset, EncodedImages) and reads_encoded(dataset):
        dataset = replace(dataset, image_size=size)
    algorithm = _shipped("fedavg", **network)
    yield FINE_TUNED, replace(config, algorithm=algorithm, dataset=dataset, stages=STAGES)


def _planned_retraining(config: Config, shape: Sequence[int]) -> Retrain:
    """Return the retraining of the delivered network, with rounds that suit a record's shape."""
    run, (sizes, share) = read_run(config.folder), _records(config)
    unlike = run.of_kind("partition")[0].get("association", 0.0)
    return planned(config, share * median(sizes), shape, unlike)


def _linear(config: Config, alike: Config, shape: Sequence[int]) -> Config:
    """Return the configuration of the linear model.

    Where clients differ, an average of local models is inaccurate. For a table with classes the
    linear model is therefore fitted exactly: it is the logistic regression of the pooled records,
    with an L2 penalty. In each round clients take one step along the gradient of all their records,
    and the server takes one step of Adam along their mean (FedAdam; Reddi et al. 2021, arXiv
    2003.00295).

    Args:
        config: Configuration of the run. If it sets rounds or an exchange, they apply to the linear
            model, too. With privacy, drawn clients, other rules or personal copies the linear model
            is trained like networks.
        alike: Configuration of the networks that are compared with it.
        shape: Shape of a record.
    """
    run, asked = read_run(config.folder), config.retrain
    alike = replace(alike, algorithm=_shipped("fedavg", network=LINEAR), stages=STAGES)
    partition = run.of_kind("partition")[0]
    other = partition.get("multi_label") or partition.get("number") or len(shape) > 1
    records = records_of(partition)[1]
    trained, largest = records["train"] + records["validation"], max(_records(config)[0])
    large = largest * shape[0] > LARGEST_BATCH
    if not averages_plainly(config) or other or large or asked.rounds or asked.exchange:
        return alike
    weights = SGD(lr=1.0, min_lr=1.0, momentum=0.0, weight_decay=1 / trained, clip_norm=FAR)
    steps = replace(alike.retrain, rounds=EXACT, local_epochs=1, batch_size=largest)
    file = "server_optimizer/adam.yaml"
    adam = ServerAdam(**read_yaml(conf_folder() / file, file) | {"lr": ADAM_RATE})
    return replace(alike, retrain=replace(steps, weights=weights), server_optimizer=adam)


def _records(config: Config) -> tuple[list[int], float]:
    """Return the clients' numbers of records, or their quantiles, and the share trained on."""
    partition = read_run(config.folder).of_kind("partition")[0]
    share = sum(config.dataset.fractions[name] for name in ("train", "validation"))
    if "splits" in partition:
        return sorted(sum(splits.values()) for splits in partition["splits"]), share
    return partition["summary"]["sizes"], share


def _folders(config: Config, place: str, runs: Mapping[str, Config]) -> list[Path]:
    """Return a run folder for each configuration; missing ones are created."""
    folders = []
    for name, one in runs.items():
        folder = config.folder / place / name
        if not (folder / CONFIG_FILE).is_file():
            create_run_folder(replace(one, run_dir=str(folder)))
        folders.append(folder)
    return folders


def compared_rounds(config: Config) -> int:
    """Return an upper bound of the retraining rounds of all networks compared with a run's."""
    unused, rounds = without_effect(config), config.retrain.planned
    number = config.evaluation.baselines
    if not number or "evaluation.baselines" in unused:
        return 0
    if config.evaluation.deliver == BEST and "evaluation.deliver" not in unused:
        return (number + FURTHER + 1) * -(-rounds // SHARE) + (FINALISTS + 1) * rounds
    return (number + FURTHER) * rounds


def num_random(config: Config) -> int:
    """Return the number of random networks to compare a finished run with; 0 for no baselines."""
    if config.evaluation.baselines is not None:
        return config.evaluation.baselines
    return 0 if has_real_sites(config) else affordable(config.folder)


def affordable(folder: Path) -> int:
    """Return the number of random networks to compare a finished run with by default.

    It is 2 if the run took over a minute and all baselines together add less than half of that
    time, else 0. Each baseline takes about as long as the run without its search; the data-free
    choice adds the time of its scores. A run that has begun with baselines continues with them.
    """
    if (folder / BASELINES_FOLDER).is_dir():
        return AFFORDED
    seconds = read_run(folder).stage_seconds()
    whole, each = sum(seconds.values()), sum(seconds.get(stage, 0.0) for stage in STAGES)
    return AFFORDED if (AFFORDED + FURTHER) * each < ADDED * whole and whole > WORTH_S else 0


def _trained_alike(config: Config, derived: Event) -> Config:
    """Return the configuration of a further network that is trained like the run's own."""
    privacy = config.privacy
    if config.dp:  # no baseline is charged to the run's own ledgers
        privacy = replace(config.dp, sites=None)
    evaluation = replace(config.evaluation, baselines=0, deliver=FOUND)
    found = _with_found(config, derived)
    dataset = replace(config.dataset, linear_baseline=False)  # already fitted for the run
    config = replace(config, evaluation=evaluation, retrain=found, privacy=privacy, dataset=dataset)
    return with_runtime(config, time_limit=None)


def _baselines(config: Config, number: int, derived: Event) -> Iterator[tuple[str, Config]]:
    """Yield names and configurations of all but the linear model; genotypes are in the folders.

    Args:
        config: Result of :func:`_trained_alike`.
        number: Number of random networks.
        derived: Event of the found network.
    """
    description = derived["network"]
    space, _ = described_space(description)
    for index in range(1, number + 1):
        draw = partial(space.random_genotype, make_generator(config.seed, "baselines", index))
        yield _given(config, f"random_{index}", draw)
    for place, genotype in enumerate(_front(config, derived), 1):
        yield _given(config, f"{FRONT}{place}", partial(replace, genotype))
    scored = _scored_first(config)
    if scored and scored != description["genotype"]:
        yield _given(config, DATA_FREE, partial(from_json, json.dumps(scored)))
    elif not scored and algorithm_of(config).trains is not None:
        yield DATA_FREE, _data_free(config)
    shape = tuple(description["input_shape"])
    if len(shape) == 3:
        name = _nearest_resnet(shape, description["num_classes"], derived["multiply_adds"])
        yield name, replace(config, algorithm=_shipped("fedavg", network=name), stages=STAGES)


def _given(config: Config, name: str, make: Callable[[], Genotype]) -> tuple[str, Config]:
    """Name and configuration of a baseline; a missing genotype is made and saved in its folder."""
    file = config.folder / BASELINES_FOLDER / name / GENOTYPE_FILE
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        save_genotype(file, make())
    return name, replace(config, stages=STAGES, genotype=str(file.resolve()))


def _front(config: Config, derived: Event) -> list[Genotype]:
    """The pool's best network by reward in each of five ranges of cost, without the found one."""
    pool, space = getattr(config.algorithm, "pool", None), described_space(derived["network"])[0]
    if pool is None or not pool.front:
        return []
    event = read_run(config.folder).of_kind("rewarded")[0]
    genotypes = [from_json(json.dumps(genotype)) for genotype in event["genotypes"]]
    parts = ranges_of_cost(genotypes, space, pool.limits.table, count=COSTS)
    best = [genotypes[max(part, key=event["rewards"].__getitem__)] for part in parts]
    found = from_json(json.dumps(derived["network"]["genotype"]))
    return [genotype for genotype in best if genotype != found]


def _scored_first(config: Config) -> dict[str, Any] | None:
    """Return the network that scores ranked first in the pool of the run's search, if they did."""
    pool = getattr(config.algorithm, "pool", None)
    if pool is None or not pool.chosen_scores(config.search_space.name):
        return None
    rewarded = read_run(config.folder).of_kind("rewarded")
    return rewarded[0]["genotypes"][0] if rewarded else None


def _data_free(config: Config) -> Config:
    """Return the configuration of the data-free choice.

    In spaces of cells whose networks the scores rank well it is that of
    ``experiment=search/data_free``, including its small networks; in other spaces it is
    ``zero_cost`` alone.
    """
    settings, thin = (read_yaml(conf_folder() / name, name) for name in (DATA_FREE_FILE, THIN))
    space = config.search_space
    scored = {"draws": settings["algorithm"]["draws"]}
    if isinstance(space, CellSpace) and trusted_scores(space.name):
        scored = settings["algorithm"]
    changed = thin if [space.name] == thin.pop("defaults") else {}
    return replace(
        config,
        algorithm=_shipped("zero_cost", **scored),
        search_space=replace(space, **changed),
        rounds=settings["rounds"],
    )


def _with_found(config: Config, derived: Event) -> Retrain:
    """Return retraining's settings with the hyper-parameters that the search has found."""
    known = derived.get("configuration")
    found = parse(Configuration, known, key="configuration") if known else None
    weights, drop_path_prob = training_settings(config, found)
    return replace(config.retrain, weights=weights, drop_path_prob=drop_path_prob)


def _shipped(name: str, **changed: object) -> AlgorithmSettings:
    """Return the default settings of ``algorithm=<name>`` with some of them changed."""
    file = f"algorithm/{name}.yaml"
    settings = {**read_yaml(conf_folder() / file, file), **changed}
    return parse(algorithms()[name].settings, settings, key="algorithm", defaults=True)


def _nearest_resnet(shape: tuple[int, ...], num_classes: int, wanted: int) -> str:
    """Return the name of the ResNet-8 whose multiply-adds are nearest in ratio."""

    def distance(name: str) -> float:
        with torch.random.fork_rng(devices=[]):  # not on meta, where norms import a compiler: 1 s
            other = FIXED_NETWORKS[name](shape, num_classes, norm=BATCH)
        return abs(math.log(count_multiply_adds(other, shape) / max(wanted, 1)))

    return min(RESNETS, key=distance)

"""The settings of a run as frozen dataclasses, each checked when it is made.

Hydra composes ``conf/``; :func:`parse_config` turns the result into one :class:`Config` at once, so
that a wrong value ends the run before any client starts. Every default stands in ``conf/``, none
here. The same tree as JSON (:func:`dump_config`) is what travels to other processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from fednas_flwr.errors import ConfigError, MissingSettingError, unknown_choice
from fednas_flwr.search.settings import (
    LEAST_LOSS_BOUND,
    RULES,
    SGD,
    Adam,
    BanditSettings,
    Configuration,
    Range,
    ThetaSettings,
    check_range,
)

STAGES = ("search", "retrain", "evaluate", "export")
DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("fast", "reference")
RUNTIMES = ("inline", "ray", "deployment")
NORMS = ("batch", "group")
GATES = ("two", "full")
GROUPINGS = ("tag", "hardware", "alphas")
MISSING = "???"  # Hydra's value for what the user must give


def conf_folder() -> Path:
    """Return the folder of Hydra's groups: in the wheel, else beside the package."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"


@dataclass(frozen=True)
class LocalSearch:
    """Federated DARTS and FedNAS: local epochs, then averaging."""

    name: str
    rule: str
    local_epochs: int
    batch_size: int
    validation_weight: float
    weights: SGD
    alphas: Adam

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.rule not in RULES:
            raise unknown_choice("algorithm.rule", self.rule, RULES)
        check_range(
            self.local_epochs >= 1, "algorithm.local_epochs", self.local_epochs, "1 or more"
        )
        check_range(self.batch_size >= 1, "algorithm.batch_size", self.batch_size, "1 or more")


@dataclass(frozen=True)
class GradientSearch:
    """Vanilla NAS, FNAS and DP-FNAS: gradient exchanges, two per iteration or one."""

    name: str
    order: int
    reduce: str
    fused: bool
    local_steps: int
    batch_size: int | None
    evaluate_every: int
    weights: SGD
    alphas: Adam

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.order in (1, 2), "algorithm.order", self.order, "1 or 2")
        if self.reduce not in ("mean", "sum"):
            raise unknown_choice("algorithm.reduce", self.reduce, ("mean", "sum"))
        check_range(self.local_steps >= 1, "algorithm.local_steps", self.local_steps, "1 or more")
        check_range(
            self.batch_size is None or self.batch_size >= 1,
            "algorithm.batch_size",
            self.batch_size,
            "1 or more, or null for all of a client's records",
        )
        check_range(
            self.evaluate_every >= 0, "algorithm.evaluate_every", self.evaluate_every, "0 or more"
        )
        if self.order == 2 and self.local_steps > 1:
            raise ConfigError(
                f"algorithm.order=2 with algorithm.local_steps={self.local_steps} is not defined: "
                "the second-order correction is for one step; set one of the two to 1."
            )
        if self.order == 2 and self.fused:
            raise ConfigError(
                "algorithm.order=2 with algorithm.fused=true is not defined: the second order "
                "needs the weights after the step; set order=1 or fused=false."
            )


@dataclass(frozen=True)
class RandomSearch:
    """Random search: each round trains one random network a little and ranks it.

    With ``ranges`` each network is trained with hyper-parameters drawn from them.
    """

    name: str
    trial_rounds: int
    local_epochs: int
    batch_size: int
    weights: SGD
    ranges: dict[str, Range] | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(
            self.trial_rounds >= 0, "algorithm.trial_rounds", self.trial_rounds, "0 or more"
        )
        check_range(
            self.local_epochs >= 1, "algorithm.local_epochs", self.local_epochs, "1 or more"
        )
        check_range(self.batch_size >= 1, "algorithm.batch_size", self.batch_size, "1 or more")


@dataclass(frozen=True)
class HyperparameterSearch:
    """FEATHERS: local epochs whose hyper-parameters a bandit chooses."""

    name: str
    rule: str
    local_epochs: int
    batch_size: int
    clip_norm: float | None
    nas_rounds: int
    loss_bound: float
    num_configurations: int
    configurations: list[Configuration]
    ranges: dict[str, Range]
    bandit: BanditSettings

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.rule not in RULES:
            raise unknown_choice("algorithm.rule", self.rule, RULES)
        for key in ("local_epochs", "batch_size", "nas_rounds", "num_configurations"):
            value = getattr(self, key)
            check_range(value >= 1, f"algorithm.{key}", value, "1 or more")
        check_range(
            self.loss_bound >= LEAST_LOSS_BOUND,
            "algorithm.loss_bound",
            self.loss_bound,
            f"{LEAST_LOSS_BOUND} or more",
        )


@dataclass(frozen=True)
class Hardware:
    """What a network's cost does to the loss of the alphas; see ``hardware.costs.HardwareLoss``.

    Attributes:
        table: File of ``fednas latency measure``, for targets in ms; null has the clients measure
            before the search, each group's its own.
    """

    table: str | None
    unit: str
    target: float
    loss: str
    scale: float
    exponent: float

    def __post_init__(self) -> None:
        """Check the ranges; what the space can reach is known once the costs are."""
        check_range(self.target > 0, "algorithm.hardware.target", self.target, "above 0")
        check_range(self.scale > 0, "algorithm.hardware.scale", self.scale, "above 0")
        if self.unit != "ms" and self.table is not None:
            raise ConfigError(
                f"algorithm.hardware.unit={self.unit} with table={self.table}: a table is for ms "
                "only; set table=null."
            )


@dataclass(frozen=True)
class PathSearch:
    """FDNAS: local epochs of ProxylessNAS on sampled paths, then averaging."""

    name: str
    gates: str
    warm_up_rounds: int
    local_epochs: int
    batch_size: int
    sparse: bool
    weights: SGD
    alphas: Adam
    hardware: Hardware | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.gates not in GATES:
            raise unknown_choice("algorithm.gates", self.gates, GATES)
        for key, least in (("warm_up_rounds", 0), ("local_epochs", 1), ("batch_size", 1)):
            value = getattr(self, key)
            check_range(value >= least, f"algorithm.{key}", value, f"{least} or more")


@dataclass(frozen=True)
class ClusterSearch:
    """CFDNAS: FDNAS of all clients, then in each group of clients, with its own hardware loss.

    Attributes:
        group_by: ``tag`` or ``hardware``, which each client tells of itself, or ``alphas``: similar
            updates of the alphas, see ``strategies.clusters``.
        num_groups: How many, for ``alphas``; else null.
        inherit: Whether groups go on from the supernet of all; false is naive-CFDNAS, which leaves
            that search out.
        group_rounds: Rounds of search in each group.
        group_hardware: What cost does in a group, by its name; other groups have no cost.
        search: How clients search.
    """

    name: str
    group_by: str
    num_groups: int | None
    inherit: bool
    group_rounds: int
    group_hardware: dict[str, Hardware]
    search: PathSearch

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.group_by not in GROUPINGS:
            raise unknown_choice("algorithm.group_by", self.group_by, GROUPINGS)
        check_range(
            self.group_rounds >= 1, "algorithm.group_rounds", self.group_rounds, "1 or more"
        )
        if (self.group_by == "alphas") != (self.num_groups is not None):
            raise ConfigError(
                f"algorithm.group_by={self.group_by} with num_groups={self.num_groups}: a number "
                "is needed to group by alphas, and for that only."
            )
        check_range(
            self.num_groups is None or self.num_groups >= 2,
            "algorithm.num_groups",
            self.num_groups,
            "2 or more",
        )
        if self.group_by == "alphas" and not self.inherit:
            raise ConfigError(
                "algorithm.group_by=alphas with algorithm.inherit=false: the groups come from the "
                "search of all clients; set algorithm.inherit=true."
            )


@dataclass(frozen=True)
class FixedNetwork:
    """No search: FedAvg trains a network that is given by name."""

    name: str
    network: str


@dataclass(frozen=True)
class TunedTraining:
    """FedEx: no search; FedAvg of a given network whose clients draw their hyper-parameters."""

    name: str
    network: str
    clip_norm: float | None
    loss_bound: float
    theta: ThetaSettings
    num_configurations: int
    configurations: list[Configuration]
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        """Check the ranges."""
        number = self.num_configurations
        check_range(number >= 1, "algorithm.num_configurations", number, "1 or more")
        check_range(self.loss_bound > 0, "algorithm.loss_bound", self.loss_bound, "above 0")


@dataclass(frozen=True)
class Dataset:
    """Which records there are, how they are read, and how each client splits its own.

    The keys from ``image_size`` on are for some readers only; ``data.datasets.prepare`` explains
    all that it takes and refuses what has no effect.

    Attributes:
        cache: Folder of prepared tensors.
        fractions: Shares of train, validation and test of each client's records.
        split_key: The site's secret text that fixes which record goes where.
        crop_padding: Training images are shifted by up to so many pixels.
        flip: Training images are mirrored at random.
        cutout: Side of the square that is blanked in training images, in pixels.
        linear_baseline: Whether a simulation also reports pooled logistic regression.
    """

    name: str
    root: str | None
    download: bool
    cache: str
    server_test: bool
    limit_train: int | None
    limit_test: int | None
    fractions: dict[str, float]
    split_key: str
    mean: list[float]
    std: list[float]
    crop_padding: int
    flip: bool
    cutout: int
    linear_baseline: bool
    image_size: int | None
    channels: int | None
    class_names: list[str]
    label: str
    id_column: str | None
    numeric: list[str]
    categorical: list[str]
    categories: dict[str, list[str]]
    ignore: list[str]
    statistics: dict[str, list[float]]

    def __post_init__(self) -> None:
        """Check the ranges that no reader checks."""
        for key in ("limit_train", "limit_test"):
            value = getattr(self, key)
            check_range(value is None or value >= 1, f"dataset.{key}", value, "1 or more, or null")
        for key in ("crop_padding", "cutout"):
            value = getattr(self, key)
            check_range(value >= 0, f"dataset.{key}", value, "0 or more")
        key_bytes = len(self.split_key.encode())
        check_range(1 <= key_bytes <= 64, "dataset.split_key", self.split_key, "1 to 64 bytes")


@dataclass(frozen=True)
class Partition:
    """Which client holds which records; see ``data.partitioners.partition``.

    Attributes:
        seed: Of the random divisions. Not the run's seed: parties keep their records over runs.
        file: A saved partition.json to use instead.
    """

    name: str
    seed: int
    file: str | None
    alpha: float
    min_size: int
    groups: list[list[int]]
    clients_per_group: list[int]
    fractions: list[float]
    column: str | None


@dataclass(frozen=True)
class CellSpace:
    """A search space of repeated cells and the sizes of its supernet."""

    name: str
    channels: int
    num_cells: int
    norm: str

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.channels >= 1, "search_space.channels", self.channels, "1 or more")
        check_range(self.num_cells >= 1, "search_space.num_cells", self.num_cells, "1 or more")
        if self.norm not in NORMS:
            raise unknown_choice("search_space.norm", self.norm, NORMS)


@dataclass(frozen=True)
class BlockSpace:
    """The MBConv space and the sizes of its supernet, which are also those of derived networks.

    Attributes:
        skeleton: Depth, widths and strides, by name; see ``search_spaces.mbconv_plan.SKELETONS``.
        candidates: The ops of a block, by the name of their set; see ``CANDIDATES`` there.
        width: Width multiplier.
    """

    name: str
    skeleton: str
    candidates: str
    width: float
    norm: str

    def __post_init__(self) -> None:
        """Check the ranges; ``build`` knows the names."""
        check_range(0 < self.width <= 16, "search_space.width", self.width, "above 0, to 16")
        if self.norm not in NORMS:
            raise unknown_choice("search_space.norm", self.norm, NORMS)


@dataclass(frozen=True)
class NoPrivacy:
    """``none``: clients return exact gradients, weights and metrics."""

    name: str


@dataclass(frozen=True)
class Noise:
    """Noise on clipped sums of one kind: std ``noise_multiplier * max_grad_norm``, per release.

    Attributes:
        noise_multiplier: Null calibrates it.
        epsilon: What all releases of this kind may cost alone, from which the noise multiplier
            follows; null leaves it to the run's epsilon.
        max_grad_norm: What one record contributes at most.
    """

    noise_multiplier: float | None
    epsilon: float | None
    max_grad_norm: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_noise(self)


@dataclass(frozen=True)
class PrivateRetrain:
    """DP-SGD of the derived network: its noise, see :class:`Noise`, and its steps per round."""

    noise_multiplier: float | None
    epsilon: float | None
    max_grad_norm: float
    local_steps: int

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_noise(self)
        check_range(self.local_steps >= 1, "local_steps", self.local_steps, "1 or more")


def _check_noise(noise: Noise | PrivateRetrain) -> None:
    """Raise ConfigError for a value out of range, or noise that is given in two ways."""
    for key in ("noise_multiplier", "epsilon", "max_grad_norm"):
        value = getattr(noise, key)
        check_range(value is None or value > 0, key, value, "a number above 0")
    if None not in (noise.noise_multiplier, noise.epsilon):
        raise ConfigError(
            f"noise_multiplier={noise.noise_multiplier} with epsilon={noise.epsilon}: the one "
            "follows from the other; set one of them to null."
        )


@dataclass(frozen=True)
class DifferentialPrivacy:
    """``dp``: clients return noised sums of clipped contributions, each booked in its ledger.

    Noise is calibrated as if each release were charged to the splits that it reads only. Where a
    site's data sets share an ``account``, every release is charged to all splits: the client then
    leaves before the end, unless its budget is larger or the noise is given.

    Attributes:
        data_set: The id that the sites' policies give the data.
        epsilon: What the whole run may cost a record, at ``delta``; retraining's noise is
            calibrated to what search and metrics leave of it. Simulated sites get it as budget.
        delta: Above 0, below 1.
        search_share: Share of ``epsilon`` that the noise of weights and alphas is calibrated to
            where it is not given and retraining reads the same split; else all of it.
        rewards_share: Share of ``epsilon`` that the noise of rewards, search and retraining
            together, is calibrated to where that of alphas follows from the rest; else all of it.
        weights: Of the supernet's weights, in the search.
        alphas: Of the architecture variables.
        rewards: Of FEATHERS' trials; a record's decrease of loss is in units of its bound, so that
            the norm is 1.
        retrain: Of the derived network's weights.
        local_steps: Noised steps per round of a local search, and per trial.
        metrics_noise_multiplier: Of losses and accuracies on clients' records, over a norm of 1 per
            record and measurement; null measures none.
        micro_batch_size: Records whose gradients are held at a time, 1 to 1024.
        sites: Folder of the simulated sites' policies, ledgers and keys; null is ``sites`` in the
            run folder, which gives every run budgets of its own.
        test_seed: For tests of simulations: noise that everybody can repeat. No privacy.
    """

    name: str
    data_set: str
    epsilon: float
    delta: float
    search_share: float
    rewards_share: float
    weights: Noise
    alphas: Noise
    rewards: Noise
    retrain: PrivateRetrain
    local_steps: int
    metrics_noise_multiplier: float | None
    micro_batch_size: int
    sites: str | None
    test_seed: int | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(
            1e-3 <= self.epsilon <= 1e6,
            "privacy.epsilon",
            self.epsilon,
            "a number from .001 to 1e6",
        )
        check_range(0 < self.delta < 1, "privacy.delta", self.delta, "above 0, below 1")
        for key in ("search_share", "rewards_share"):
            share = getattr(self, key)
            check_range(0 < share < 1, f"privacy.{key}", share, "above 0, below 1")
        check_range(self.local_steps >= 1, "privacy.local_steps", self.local_steps, "1 or more")
        check_range(
            self.rewards.max_grad_norm == 1,
            "privacy.rewards.max_grad_norm",
            self.rewards.max_grad_norm,
            "1: rewards are bounded by algorithm.loss_bound",
        )
        sigma, size = self.metrics_noise_multiplier, self.micro_batch_size
        check_range(
            sigma is None or sigma > 0,
            "privacy.metrics_noise_multiplier",
            sigma,
            "above 0, or null",
        )
        check_range(
            1 <= size <= 1024, "privacy.micro_batch_size", size, "a whole number from 1 to 1024"
        )


@dataclass(frozen=True)
class Runtime:
    """Where the clients run, and how long the server waits for them.

    Attributes:
        name: inline, ray or deployment.
        quorum: Share of the clients that must answer every exchange.
        deadline_s: Seconds the server waits for the replies of one exchange.
        connect_s: Seconds the server waits for clients to appear.
        ray_address: Address of a Ray cluster that runs already; null starts one.
        client_cpus: CPUs of one Ray actor.
        client_gpus: GPUs of one Ray actor, may be a fraction.
        superlink: Name of the SuperLink in Flower's configuration.
    """

    name: str
    quorum: float
    deadline_s: float
    connect_s: float
    ray_address: str | None
    client_cpus: float
    client_gpus: float
    superlink: str | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.name not in RUNTIMES:
            raise unknown_choice("runtime", self.name, RUNTIMES)
        if self.name == "deployment" and self.superlink is None:
            raise ConfigError(
                "runtime.superlink must be given with runtime=deployment: the name of a SuperLink "
                "in Flower's configuration (config.toml in $FLWR_HOME or ~/.flwr)."
            )
        check_range(0 < self.quorum <= 1, "runtime.quorum", self.quorum, "above 0, at most 1")
        check_range(self.deadline_s > 0, "runtime.deadline_s", self.deadline_s, "seconds above 0")
        check_range(self.connect_s > 0, "runtime.connect_s", self.connect_s, "seconds above 0")
        check_range(
            self.client_cpus > 0, "runtime.client_cpus", self.client_cpus, "a number above 0"
        )
        check_range(self.client_gpus >= 0, "runtime.client_gpus", self.client_gpus, "0 or more")


@dataclass(frozen=True)
class Retrain:
    """FedAvg training of the derived or given network from scratch.

    ``channels`` and ``num_cells`` are null where the derived network has the supernet's size.
    """

    rounds: int
    local_epochs: int
    batch_size: int
    channels: int | None
    num_cells: int | None
    norm: str
    auxiliary_weight: float
    drop_path_prob: float
    weights: SGD

    def __post_init__(self) -> None:
        """Check the ranges."""
        for key in ("rounds", "local_epochs", "batch_size"):
            value = getattr(self, key)
            check_range(value >= 1, f"retrain.{key}", value, "1 or more")
        for key in ("channels", "num_cells"):
            value = getattr(self, key)
            check_range(value is None or value >= 1, f"retrain.{key}", value, "1 or more, or null")
        check_range(
            0 <= self.drop_path_prob < 1,
            "retrain.drop_path_prob",
            self.drop_path_prob,
            "0 to below 1",
        )
        check_range(
            self.auxiliary_weight >= 0,
            "retrain.auxiliary_weight",
            self.auxiliary_weight,
            "0 or more",
        )
        if self.norm not in NORMS:
            raise unknown_choice("retrain.norm", self.norm, NORMS)


ALGORITHMS: dict[str, type] = {
    "fed_darts": LocalSearch,
    "fednas": LocalSearch,
    "fnas": GradientSearch,
    "vanilla_nas": GradientSearch,
    "dp_fnas": GradientSearch,
    "feathers": HyperparameterSearch,
    "fdnas": PathSearch,
    "cfdnas": ClusterSearch,
    "random_search": RandomSearch,
    "fedavg": FixedNetwork,
    "fedex": TunedTraining,
}
SEARCH_SPACES: dict[str, type] = {
    **dict.fromkeys(("darts", "mlp", "nasbench201"), CellSpace),
    "mbconv": BlockSpace,
}
PRIVACY: dict[str, type] = {"none": NoPrivacy, "dp": DifferentialPrivacy}
GivenNetwork = FixedNetwork | TunedTraining  # these do not search
Algorithm = (
    LocalSearch
    | GradientSearch
    | HyperparameterSearch
    | PathSearch
    | ClusterSearch
    | RandomSearch
    | GivenNetwork
)


@dataclass(frozen=True)
class Config:
    """One run.

    ``run_dir`` is the run folder; ``threads`` are torch's threads per client; ``engine`` says how
    supernets are computed (:mod:`fednas_flwr.search_spaces`). ``class_factors`` are public factors
    of the losses of classes, by name; with privacy they multiply what is clipped already.
    ``client_tags`` are what simulated clients call themselves, by index, or empty.
    ``oversample`` has training repeat the records of rarer classes. ``personalised`` has clients
    test the trained network again after local epochs of their own.
    """

    algorithm: Algorithm
    dataset: Dataset
    partition: Partition
    search_space: CellSpace | BlockSpace
    engine: str
    privacy: NoPrivacy | DifferentialPrivacy
    runtime: Runtime
    retrain: Retrain
    run_dir: str | None
    seed: int
    device: str
    threads: int
    clients: int
    rounds: int
    stages: list[str]
    genotype: str | None
    client_tags: list[str]
    class_factors: dict[str, float]
    oversample: bool
    personalised: bool
    tensorboard: bool

    def __post_init__(self) -> None:
        """Check single values, then combinations that make no sense together."""
        check_range(self.seed >= 0, "seed", self.seed, "0 or more")
        check_range(self.threads >= 1, "threads", self.threads, "1 or more")
        check_range(self.clients >= 1, "clients", self.clients, "1 or more")
        check_range(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        if self.device not in DEVICES:
            raise unknown_choice("device", self.device, DEVICES)
        if self.engine not in ENGINES:
            raise unknown_choice("engine", self.engine, ENGINES)
        for stage in self.stages:
            if stage not in STAGES:
                raise unknown_choice("stages", stage, STAGES)
        check_range(
            bool(self.stages), "stages", self.stages, f"at least one of {', '.join(STAGES)}"
        )
        if len(self.client_tags) not in (0, self.clients):
            raise ConfigError(
                f"client_tags={self.client_tags} for clients={self.clients}: give one for each "
                "client, or none."
            )
        for name, factor in self.class_factors.items():
            check_range(0 < factor <= 1, f"class_factors.{name}", factor, "above 0, at most 1")
        _check_privacy(self)
        if self.algorithm.name == "vanilla_nas" and self.clients != 1:
            raise ConfigError(
                f"algorithm=vanilla_nas with clients={self.clients}: vanilla NAS has one party; "
                "set clients=1 or algorithm=fnas."
            )
        searches = "search" in self.stages and not isinstance(self.algorithm, GivenNetwork)
        if searches and isinstance(self.algorithm, PathSearch | ClusterSearch):
            if not isinstance(self.search_space, BlockSpace):
                raise ConfigError(
                    f"algorithm={self.algorithm.name} with search_space={self.search_space.name}: "
                    "it samples paths of blocks; set search_space=mbconv retrain=mbconv."
                )
        if self.genotype is not None and searches:
            raise ConfigError(
                f"genotype={self.genotype} with stages={self.stages}: a genotype replaces the "
                "search; set stages=[retrain,evaluate,export]."
            )
        chooses = searches or isinstance(self.algorithm, TunedTraining)
        if chooses and self.dataset.fractions.get("validation") == 0:
            raise ConfigError(
                "dataset.fractions.validation=0.0 leaves a search nothing to choose by: expected "
                "above 0."
            )
        if "retrain" in self.stages and not searches and self.genotype is None:
            if not isinstance(self.algorithm, GivenNetwork):
                raise ConfigError(
                    f"stages={self.stages} without search: retraining needs a network; set "
                    "genotype=<file> or algorithm=fedavg."
                )
        if not {"retrain"} & set(self.stages) and {"evaluate", "export"} & set(self.stages):
            raise ConfigError(
                f"stages={self.stages}: evaluate and export need the network that retrain trains; "
                "add retrain or leave them out."
            )


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Return the checked configuration of a composed tree.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type or is out of range,
            or two settings exclude each other.
    """
    hints = {
        "algorithm": _choice(tree, "algorithm", ALGORITHMS),
        "search_space": _choice(tree, "search_space", SEARCH_SPACES),
        "privacy": _choice(tree, "privacy", PRIVACY),
    }
    config: Config = _parse(Config, tree, key="", hints=hints)
    return config


def site_dataset(path: Path, *, cache: str) -> Dataset:
    """Return how a private site reads its own data: whatever the run says, the site's file counts.

    A setting that the server could choose would be a question to the records: whether they can be
    read, augmented or cached with it.

    Args:
        path: A YAML file of ``dataset`` settings; what it leaves out is as in
            ``conf/dataset/base.yaml``.
        cache: Where prepared records go.

    Raises:
        ConfigError: The file cannot be read, or a setting is wrong.
    """
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the site's dataset settings {path} cannot be read: {error}.") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"the site's dataset settings {path} must be a mapping: name: npz, ...")
    base = yaml.safe_load((conf_folder() / "dataset" / "base.yaml").read_text(encoding="utf-8"))
    dataset: Dataset = _parse(Dataset, {**base, "cache": cache, **given}, key="dataset", hints={})
    if dataset.limit_train is not None:
        raise ConfigError(
            f"dataset.limit_train={dataset.limit_train} in {path}: leave it out, since one record "
            "more would put another one out, and two would count."
        )
    return dataset


def _choice(tree: Mapping[str, Any], group: str, kinds: Mapping[str, type]) -> type:
    """Return the dataclass that a group's name stands for."""
    settings = tree.get(group)
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or name not in kinds:
        raise unknown_choice(group, name, kinds)
    return kinds[name]


def _check_privacy(config: Config) -> None:
    """Refuse what cannot be private, and DP-FNAS without privacy."""
    algorithm, privacy = config.algorithm, config.privacy
    if isinstance(privacy, NoPrivacy):
        if algorithm.name == "dp_fnas":
            raise ConfigError("algorithm=dp_fnas with privacy=none: set privacy=dp, or use fnas.")
        return
    private = ("dp_fnas", "fed_darts", "feathers", "fdnas", "fedavg")
    if config.oversample:
        raise ConfigError(
            "oversample=true with privacy=dp: a record that is drawn several times costs more than "
            "is booked; set class_factors={<class>: <public factor>} instead."
        )
    if config.personalised:
        raise ConfigError(
            "personalised=true with privacy=dp: an accuracy after local training without noise is "
            "an exact function of the records; leave it out."
        )
    if isinstance(algorithm, ClusterSearch):
        raise ConfigError(
            "privacy=dp with algorithm=cfdnas is not possible yet: a client keeps one schedule of "
            "releases per run, and each group is a run that begins when its group is known; set "
            "algorithm=fdnas."
        )
    if algorithm.name not in private:
        raise ConfigError(
            f"privacy=dp with algorithm={algorithm.name} is not possible yet: choose one of "
            f"{', '.join(private)}."
        )
    norms = {"retrain.norm": config.retrain.norm} if "retrain" in config.stages else {}
    if "search" in config.stages and not isinstance(algorithm, GivenNetwork):
        norms["search_space.norm"] = config.search_space.norm
    if isinstance(algorithm, GradientSearch) and algorithm.order != 1:
        raise ConfigError(
            f"algorithm.order={algorithm.order} with privacy=dp: the second order mixes splits "
            "and is no sum over records; set algorithm.order=1."
        )
    if isinstance(algorithm, LocalSearch | HyperparameterSearch):
        if algorithm.rule != "first_order":
            raise ConfigError(
                f"algorithm.rule={algorithm.rule} with privacy=dp: it mixes splits; set "
                "algorithm.rule=first_order."
            )
    if isinstance(algorithm, FixedNetwork) and config.genotype is None:
        norms = {}
        if algorithm.network == "mobilenet_v2":
            raise ConfigError(
                "algorithm.network=mobilenet_v2 with privacy=dp: it normalises over batches; set "
                "algorithm.network=plain_cnn."
            )
    wrong = [key for key, norm in norms.items() if norm != "group"]
    if wrong:
        raise ConfigError(
            "privacy=dp with batch normalisation is not possible, which mixes the records of a "
            f"batch and leaks its statistics: set {' '.join(f'{key}=group' for key in wrong)}."
        )


def dump_config(config: Config) -> str:
    """Return the configuration as one line of JSON that :func:`load_config` reads back."""
    return json.dumps(asdict(config), sort_keys=True)


def load_config(text: str) -> Config:
    """Return the configuration that :func:`dump_config` wrote."""
    return parse_config(json.loads(text))


def _parse(kind: Any, values: Any, *, key: str, hints: Mapping[str, Any]) -> Any:
    """Return the dataclass ``kind`` of a mapping; ``hints`` overrule its fields' types."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values} must be a group of settings.")
    prefix = f"{key}." if key else ""
    types = {**get_type_hints(kind), **hints}
    for name in values:
        if name not in types:
            raise unknown_choice("setting", f"{prefix}{name}", [f"{prefix}{n}" for n in types])
    parsed = {}
    for name, hint in types.items():
        if name not in values:
            raise MissingSettingError(f"{prefix}{name}")
        parsed[name] = _convert(f"{prefix}{name}", hint, values[name])
    try:
        return kind(**parsed)
    except ConfigError as error:  # its sentence begins with a field, or the last part of ``key``
        if str(error).partition("=")[0] in types:
            raise ConfigError(f"{prefix}{error}") from None
        parent, dot, _ = key.rpartition(".")
        raise ConfigError(f"{parent}{dot}{error}") from None


def _convert(key: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as the type ``hint``; the only conversion is from whole numbers to float."""
    if value == MISSING:
        raise ConfigError(f"{key} must be given: {key}=<{_type_name(hint)}>.")
    if is_dataclass(hint):
        return _parse(hint, value, key=key, hints={})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (hint,) = [kind for kind in arguments if kind is not type(None)]
        return _convert(key, hint, value)
    if origin is list and isinstance(value, Sequence) and not isinstance(value, str):
        return [_convert(f"{key}[{i}]", arguments[0], item) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _convert(f"{key}.{k}", arguments[1], item) for k, item in value.items()}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number and math.isfinite(value):
        return float(value)
    if (
        hint is not float
        and origin is None
        and isinstance(value, hint)
        and (number or hint is not int)
    ):
        return value
    raise ConfigError(f"{key}={value} has the wrong type: expected {_type_name(hint)}.")


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(hint) in (Union, UnionType):
        return _type_name(get_args(hint)[0])
    if get_origin(hint) is list:
        return f"a list such as [{_type_name(get_args(hint)[0])}, ...]"
    if get_origin(hint) is dict:
        return "a mapping such as {name: value}"
    return names[hint]

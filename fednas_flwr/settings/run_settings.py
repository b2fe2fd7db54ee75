"""All settings of one run but for those of its data, networks and privacy, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.data_settings import Dataset, Partition
from fednas_flwr.settings.names import PRECISIONS, SAMPLINGS, UNIFORM
from fednas_flwr.settings.network_settings import Retrain, SearchSpaceSettings
from fednas_flwr.settings.parser import Between, Checked, Distinct, Length, OneOf, Text, seconds
from fednas_flwr.settings.privacy_settings import DifferentialPrivacy, NoPrivacy

STAGES = ("search", "retrain", "evaluate", "export")
TRACKERS = ("tensorboard", "mlflow", "wandb")
MOST_SITES = 1000  # of a secure sum
MOST_CLIENTS = 2**31
DEVICES = ("auto", "cpu", "cuda")
WIRES = ("float32", "float16", "int8")
MOST_THREADS = 1024
LEAST_PART = Between(1e-4, reason="Ray counts no smaller part of a processor")


@dataclass(frozen=True)
class TrainingSettings(Checked):
    """Settings of all local training, of supernets and of networks.

    Attributes:
        precision: Number format of gradients without privacy: ``bfloat16`` is faster on GPUs that
            have it (torch's autocast). Weights, steps, second-order gradients and evaluation stay
            float32; not with privacy.
        momentum: The momentum between requests: dropped (``reset``), ``averaged`` like the model,
            or kept at the ``server`` (FedAvgM). Null is ``averaged`` in private retraining by
            ``privacy.retrain.noise_walk``, else ``reset``.
        class_factors: Public factors of the losses of classes, by name; with privacy they multiply
            what is clipped already.
        oversample: If true, training repeats the records of rarer classes; not with privacy.
    """

    precision: Annotated[str, OneOf(PRECISIONS)]
    momentum: Annotated[str, OneOf(opt.MOMENTA)] | None
    class_factors: dict[str, opt.ShareAbove0]
    oversample: bool


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """Settings of measures, and of the networks that a found one is compared with.

    Attributes:
        positive: The positive class of F1, AUROC, average precision, sensitivity and specificity;
            null takes the mean over classes, or the last of two.
        personalised: If true, clients test the trained network again after local epochs of their
            own; not with privacy.
        baselines: Random networks of the search space that are trained like the found one and
            shown beside it, with the data-free choice, a linear model and, for images, a ResNet-8;
            0 for none of these. Null is 2 where the run has taken over a minute and they add less
            than half of that, else 0.
    """

    positive: Text | None
    personalised: bool
    baselines: opt.CountOrZero | None


@dataclass(frozen=True)
class AlgorithmSettings(Checked):
    """Base of all, and the settings of an algorithm that has none."""

    name: str

    @property
    def trains_models(self) -> bool:
        """True if clients of the search reply with models that they have trained."""
        return True

    def check(self, config: Any) -> None:
        """Raise ConfigError for settings that exclude each other with this algorithm only.

        Args:
            config: The run's :class:`~fednas_flwr.settings.Config`, whose algorithm this is.
        """


@dataclass(frozen=True)
class GivenNetwork(AlgorithmSettings):
    """Base of those that do not search: they train a network that is given by name.

    Attributes:
        network: A name of ``models.networks.FIXED_NETWORKS``, where no genotype is given.
    """

    network: str


@dataclass(frozen=True)
class SamplingSettings(Checked):
    """Rounds that ask some of the clients only, as the seed decides.

    No privacy is claimed for it, since the server knows whom it asks.

    Attributes:
        per_round: Number of clients that a round asks, or below 1 their share.
        by: The way they are drawn (:mod:`fednas_flwr.server.client_sampling`): ``uniform`` and
            ``by_size`` keep averages unbiased, ``round_robin`` asks all clients equally often.
        spare: Share of ``per_round`` that stands by in every round, to be asked in the place of
            clients that fail.
    """

    per_round: Annotated[float, Between(0, MOST_CLIENTS, above=True)]
    by: Annotated[str, OneOf(SAMPLINGS)] = UNIFORM
    spare: Annotated[float, Between(0, 1)] = 0.0

    def asked(self, clients: int) -> int:
        """Number of clients that a round asks, of so many."""
        number = self.per_round
        return int(number) if number >= 1 else math.ceil(number * clients - 1e-9)


@dataclass(frozen=True)
class SecureSumSettings(Checked):
    """Replies of which the server sees totals only (:mod:`fednas_flwr.protocol.secure_sum`).

    The terms are those of simulated sites; a real site's own policy has them.

    Attributes:
        least_sites: Fewest clients of which a sum is opened; null is all but one, or ``colluding``
            + 2 if that is more.
        colluding: Clients of which each expects that they may help the server.
    """

    least_sites: Annotated[int, Between(2, MOST_SITES)] | None = None
    colluding: Annotated[int, Between(0, MOST_SITES)] = 1

    @property
    def fewest(self) -> int:
        """Fewest clients of which two are honest."""
        return self.colluding + 2

    def least(self, clients: int) -> int:
        """Fewest clients of a sum in a run of so many."""
        return self.least_sites or max(self.fewest, clients - 1)


@dataclass(frozen=True)
class AggregateSettings(Checked):
    """``mean``: the average by examples; ``median``, of coordinates (Yin et al., 2018)."""

    name: str


@dataclass(frozen=True)
class TrimmedMeanSettings(AggregateSettings):
    """``trimmed_mean``: the mean of every coordinate without its largest and smallest values.

    Attributes:
        trim: Clients that are left out at each end of every coordinate.
    """

    trim: opt.Count


AGGREGATES: dict[str, type] = {
    "mean": AggregateSettings,
    "median": AggregateSettings,
    "trimmed_mean": TrimmedMeanSettings,
}


@dataclass(frozen=True)
class ServerOptimizer(Checked):
    """``none``: the average is the new model."""

    name: str


@dataclass(frozen=True)
class ServerAdagrad(ServerOptimizer):
    """``adagrad``, after Flower's FedAdagrad.

    Attributes:
        lr: About how far a weight moves in a round, > 0.
        tau: Added to the root of the second moments, > 0: more adapts less.
    """

    lr: opt.LearningRate
    tau: opt.Positive


@dataclass(frozen=True)
class ServerAdam(ServerAdagrad):
    """``adam`` and ``yogi``, after Flower's FedAdam and FedYogi (Reddi et al., 2021).

    Attributes:
        beta_1: Decay of the first moments, from 0 to below 1.
        beta_2: Decay of the second moments, from 0 to below 1.
    """

    beta_1: opt.ShareBelow1
    beta_2: opt.ShareBelow1


SERVER_OPTIMIZERS: dict[str, type] = {
    "none": ServerOptimizer,
    "adam": ServerAdam,
    "yogi": ServerAdam,
    "adagrad": ServerAdagrad,
}


@dataclass(frozen=True)
class Runtime(Checked):
    """``inline``: all clients in this process, one after the other.

    Attributes:
        device: Device for training; ``auto`` takes CUDA if there is a GPU.
        threads: torch's threads per client, the same in every runtime.
        wire: Number format of tensors in messages, both ways (:mod:`fednas_flwr.protocol.wire`).
        time_limit: Time, as 45s, 30min, 2h or 1h30min, after which no further round is begun that
            would not end in time; the network is then exported as trained so far, or a search is
            left at its checkpoint, and ``resume`` goes on. Baselines come after it, and need a run
            that it has not cut short. Null is none.
        quorum: Share of the clients that must answer every exchange.
        deadline_s: Seconds the server waits for the replies of one exchange.
        approval_s: Seconds the server waits for people at private sites to approve the run.
        most_records: Largest multiple of the median client's records that one of three or more
            clients may declare; one that declares more is left out.
        largest_share: Share of an average of three or more clients that one may have; 1 is no
            limit.
    """

    name: str
    device: Annotated[str, OneOf(DEVICES)]
    threads: Annotated[int, Between(1, MOST_THREADS, reason="no machine has more cores")]
    wire: Annotated[str, OneOf(WIRES)]
    time_limit: Text | None
    quorum: opt.ShareAbove0
    deadline_s: opt.Positive
    approval_s: opt.NonNegative
    most_records: Annotated[float, Between(1)]
    largest_share: opt.ShareAbove0

    def __post_init__(self) -> None:
        """Check the ranges, the device's name and the time."""
        if self.device.startswith("cuda:"):
            number = self.device.removeprefix("cuda:")
            raise ConfigError(
                f"runtime.device={show(self.device)} is unknown: set runtime.device=cuda, and "
                f"choose the GPU by the environment variable CUDA_VISIBLE_DEVICES={show(number)}."
            )
        super().__post_init__()
        if self.time_limit is not None:
            seconds("time_limit", self.time_limit)


@dataclass(frozen=True)
class RayRuntime(Runtime):
    """``ray``: Flower's simulation, clients in parallel processes.

    Attributes:
        ray_address: ``host:port`` of a Ray cluster that runs already; null starts one.
        client_cpus: CPUs of one Ray actor; as many run at a time as there are CPUs for.
        client_gpus: GPUs of one Ray actor, may be a fraction.
    """

    ray_address: Text | None
    client_cpus: Annotated[float, LEAST_PART]
    client_gpus: opt.NonNegative

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if self.client_gpus:
            LEAST_PART.check("client_gpus", self.client_gpus, ", or 0")


@dataclass(frozen=True)
class Deployment(Runtime):
    """``deployment``: real SuperNodes, by ``flwr run``.

    Attributes:
        connect_s: Seconds the server waits for clients to appear.
        superlink: Name of the SuperLink in Flower's configuration.
    """

    connect_s: opt.Positive
    superlink: Text | None

    def __post_init__(self) -> None:
        """Check the ranges, and that there is a SuperLink."""
        super().__post_init__()
        if self.superlink is None:
            raise ConfigError(
                "superlink must be given with runtime=deployment: the name of a SuperLink in "
                "Flower's configuration (config.toml in $FLWR_HOME or ~/.flwr)."
            )


RUNTIMES: dict[str, type] = {"inline": Runtime, "ray": RayRuntime, "deployment": Deployment}


@dataclass(frozen=True)
class Config(Checked):
    """One run.

    Attributes:
        run_dir: The run folder; null makes ``runs/<time>_<algorithm>_<data set>``.
        seed: Seed of everything that is drawn, except the division of records and the noise of
            privacy.
        clients: Number of clients.
        rounds: Rounds of the search: iterations of FNAS, candidates of random search.
        stages: Stages to run; ``search`` derives a genotype, the others need one.
        genotype: Architecture to retrain instead of searching: a file, or a name of
            ``conf/genotypes``.
        sampling: Rounds that ask some of the clients only: any of these settings, such as
            ``sampling.per_round=50``; null asks all.
        secure_sum: Replies of which the server sees totals only
            (:mod:`fednas_flwr.protocol.secure_sum`): ``true``, or any of these settings.
        training: Settings of all local training.
        evaluation: Measures, and networks that a found one is compared with.
        trackers: Experiment trackers that get the numbers of the rounds, beside TensorBoard each an
            extra of its name; what is sent leaves the server.
    """

    algorithm: AlgorithmSettings
    dataset: Dataset
    partition: Partition
    search_space: SearchSpaceSettings
    privacy: NoPrivacy | DifferentialPrivacy
    aggregate: AggregateSettings
    server_optimizer: ServerOptimizer
    runtime: Runtime
    retrain: Retrain
    run_dir: Text | None
    seed: opt.CountOrZero
    clients: opt.Count
    rounds: opt.Count
    stages: Annotated[list[Annotated[str, OneOf(STAGES)]], Length(Between(1)), Distinct()]
    genotype: Text | None
    sampling: SamplingSettings | None
    secure_sum: SecureSumSettings | None
    training: TrainingSettings
    evaluation: EvaluationSettings
    trackers: Annotated[list[Annotated[str, OneOf(TRACKERS)]], Distinct()]

    def __post_init__(self) -> None:
        """Check single values; ``configuration.check_combinations`` knows what excludes what."""
        super().__post_init__()
        number = self.sampling.per_round if self.sampling else 0.0
        if number >= 1 and not (number.is_integer() and number <= self.clients):
            raise ConfigError(
                f"sampling.per_round={number:g} with clients={self.clients}: expected a whole "
                "number of them, or a share below 1; set sampling=null for all."
            )

    @property
    def asked(self) -> int:
        """Number of clients that a round asks."""
        return self.clients if self.sampling is None else self.sampling.asked(self.clients)

    @property
    def samples(self) -> bool:
        """True if a round asks some clients only."""
        return self.asked < self.clients


def with_runtime(config: Config, **changed: object) -> Config:
    """The configuration with other settings of its runtime."""
    runtime: Any = config.runtime
    return replace(config, runtime=replace(runtime, **changed))


def dump_config(config: Config) -> str:
    """The configuration as one line of JSON that ``load_config`` reads back."""
    return json.dumps(asdict(config), sort_keys=True)

"""All settings of one run, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated

from fednas_flwr.config.algorithms import AlgorithmSettings
from fednas_flwr.config.data import Dataset, Partition
from fednas_flwr.config.networks import Retrain, SearchSpaceSettings
from fednas_flwr.config.privacy import DifferentialPrivacy, NoPrivacy
from fednas_flwr.config.runtime import Runtime
from fednas_flwr.config.server_optimizers import ServerOptimizer
from fednas_flwr.errors import ConfigError, show
from fednas_flwr.names import PRECISIONS, SAMPLINGS
from fednas_flwr.search.settings import MOMENTA, Count, CountOrZero, ShareAbove0
from fednas_flwr.typed import Between, Checked, Length, OneOf, Text, check_distinct, seconds

STAGES = ("search", "retrain", "evaluate", "export")
DEVICES = ("auto", "cpu", "cuda")
WIRES = ("float32", "float16", "int8")
MOST_THREADS = 1024
MOST_SITES = 1000  # of a secure sum
MOST_CLIENTS = 2**31
TRACKERS = ("mlflow", "wandb")
AGGREGATES = ("mean", "median", "trimmed_mean")


@dataclass(frozen=True)
class SimulatedTerms(Checked):
    """Terms of secure sums in the policies of simulated sites; a real site's own policy says it.

    Attributes:
        least_sites: Fewest clients of which a sum is opened; null is all but one, or ``colluding``
            + 2 if that is more.
        colluding: Clients of which each expects that they may help the server.
    """

    least_sites: Annotated[int, Between(2, MOST_SITES)] | None
    colluding: Annotated[int, Between(0, MOST_SITES)]

    def least(self, clients: int) -> int:
        """Return the fewest clients of a sum in a run of so many."""
        return self.least_sites or max(self.colluding + 2, clients - 1)


@dataclass(frozen=True)
class Config(Checked):
    """One run.

    Attributes:
        run_dir: The run folder; null makes ``runs/<time>_<algorithm>_<data set>``.
        seed: Seed of everything that is drawn, except the division of records and the noise of
            privacy.
        device: Device for training; ``auto`` takes CUDA if there is a GPU.
        precision: Number format of gradients without privacy: ``bfloat16`` is faster on GPUs that
            have it (torch's autocast). Weights, steps, second-order gradients and evaluation stay
            float32; not with privacy.
        threads: torch's threads per client, the same in every runtime.
        clients: Number of clients.
        clients_per_round: Number of clients that a round asks, or below 1 their share; null asks
            all. The seed decides which ones. No privacy is claimed for it, since the server knows
            it.
        sampling: The way they are drawn (:mod:`fednas_flwr.exchange.sampling`): ``uniform`` and
            ``by_size`` keep averages unbiased, ``round_robin`` asks all clients equally often.
        over_selection: Share of ``clients_per_round`` that stands by in every round, to be asked in
            the place of clients that fail.
        rounds: Rounds of the search: iterations of FNAS, candidates of random search.
        stages: Stages to run; ``search`` derives a genotype, the others need one.
        genotype: Architecture to retrain instead of searching: a file, or a name of
            ``conf/genotypes``.
        aggregate: The average of the clients' models: by examples (``mean``), or coordinate by
            coordinate (:mod:`fednas_flwr.exchange.robust`).
        trim: Clients that ``trimmed_mean`` leaves out at each end of every coordinate.
        wire: Number format of tensors in messages, both ways (:mod:`fednas_flwr.exchange.wire`).
        secure_sum: If true, the server sees only totals of replies
            (:mod:`fednas_flwr.exchange.secure_sum`).
        secure_terms: Of simulated sites, for secure sums.
        momentum: The momentum of local training between requests: dropped (``reset``), ``averaged``
            like the model, or kept at the ``server`` (FedAvgM).
        client_tags: Tags of simulated clients, by index, for the groups of ``cfdnas``.
        class_factors: Public factors of the losses of classes, by name; with privacy they multiply
            what is clipped already.
        oversample: If true, training repeats the records of rarer classes; not with privacy.
        positive: The positive class of F1, AUROC, average precision, sensitivity and specificity;
            null takes the mean over classes, or the last of two.
        personalised: If true, clients test the trained network again after local epochs of their
            own; not with privacy.
        time_limit: Time, as 45s, 30min, 2h or 1h30min, after which no further round is begun that
            would not end in time; the network is then exported as trained so far, or a search is
            left at its checkpoint, and ``resume`` goes on. Baselines come after it, and need a run
            that it has not cut short. Null is none.
        baselines: Random networks of the search space that are trained like the found one and
            shown beside it, with the data-free choice, a linear model and, for images, a ResNet-8;
            0 for none of these. Null is 2 where the run has taken over a minute and they add less
            than half of that, else 0.
        tensorboard: If true, curves are also written for TensorBoard.
        trackers: Experiment trackers that get the numbers of the rounds, each an extra of its name;
            what is sent leaves the server.
    """

    algorithm: AlgorithmSettings
    dataset: Dataset
    partition: Partition
    search_space: SearchSpaceSettings
    privacy: NoPrivacy | DifferentialPrivacy
    server_optimizer: ServerOptimizer
    runtime: Runtime
    retrain: Retrain
    run_dir: Text | None
    seed: CountOrZero
    device: Annotated[str, OneOf(DEVICES)]
    precision: Annotated[str, OneOf(PRECISIONS)]
    threads: Annotated[int, Between(1, MOST_THREADS, reason="no machine has more cores")]
    clients: Count
    clients_per_round: Annotated[float, Between(0, MOST_CLIENTS, above=True)] | None
    sampling: Annotated[str, OneOf(SAMPLINGS)]
    over_selection: Annotated[float, Between(0, 1)]
    rounds: Count
    stages: Annotated[list[Annotated[str, OneOf(STAGES)]], Length(Between(1))]
    genotype: Text | None
    aggregate: Annotated[str, OneOf(AGGREGATES)]
    trim: Count
    wire: Annotated[str, OneOf(WIRES)]
    secure_sum: bool
    secure_terms: SimulatedTerms
    momentum: Annotated[str, OneOf(MOMENTA)] | None
    client_tags: list[str]
    class_factors: dict[str, ShareAbove0]
    positive: Text | None
    oversample: bool
    personalised: bool
    time_limit: Text | None
    baselines: CountOrZero | None
    tensorboard: bool
    trackers: list[Annotated[str, OneOf(TRACKERS)]]

    def __post_init__(self) -> None:
        """Check single values; ``builders.check_combinations`` knows what excludes what."""
        if self.device.startswith("cuda:"):
            number = self.device.removeprefix("cuda:")
            raise ConfigError(
                f"device={show(self.device)} is unknown: set device=cuda, and choose the GPU by "
                f"the environment variable CUDA_VISIBLE_DEVICES={show(number)}."
            )
        super().__post_init__()
        check_distinct("stages", self.stages)
        check_distinct("trackers", self.trackers)
        if self.time_limit is not None:
            seconds("time_limit", self.time_limit)
        asked = self.clients_per_round
        if asked is not None and asked >= 1 and not (asked.is_integer() and asked <= self.clients):
            raise ConfigError(
                f"clients_per_round={asked:g} with clients={self.clients}: expected a whole number "
                "of them, a share below 1, or null for all."
            )
        if len(self.client_tags) not in (0, self.clients):
            raise ConfigError(
                f"client_tags={show(self.client_tags)} for clients={self.clients}: give one for "
                "each client, or none."
            )

    @property
    def asked(self) -> int:
        """Number of clients that a round asks."""
        number = self.clients_per_round
        if number is None:
            return self.clients
        return int(number) if number >= 1 else math.ceil(number * self.clients - 1e-9)

    @property
    def samples(self) -> bool:
        """True if a round asks some clients only."""
        return self.asked < self.clients


def dump_config(config: Config) -> str:
    """Return the configuration as one line of JSON that ``load_config`` reads back."""
    return json.dumps(asdict(config), sort_keys=True)

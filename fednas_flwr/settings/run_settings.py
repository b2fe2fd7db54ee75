"""All settings of one run except those of its data, and their JSON."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fednas_flwr.settings import names
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings import parser as ps
from fednas_flwr.settings.data_settings import Dataset, ImageSize, Partition

STAGES = ("search", "retrain", "evaluate", "export")
TRACKERS = ("tensorboard", "mlflow", "wandb")
DEVICES = ("auto", "cpu", "cuda")
CUDA = "cuda, and the number of the GPU in the environment variable CUDA_VISIBLE_DEVICES"
WIRES = ("float32", "float16", "int8")
LEAST_PART = ps.Between(1e-4, reason="Ray counts no smaller part of a processor")
PartOrZero = Annotated[float, ps.Where(lambda n: n == 0 or n in LEAST_PART, f"0, or {LEAST_PART}")]
MODELS, GRADIENTS = EXCHANGES = ("models", "gradients")

Norm = Annotated[str, ps.OneOf(names.NORMS)]
SupernetNorm = Annotated[str, ps.OneOf((names.BATCH, names.GROUP))]
Width = Annotated[int, ps.Between(1, 10**6)]
Cells = Annotated[int, ps.Between(1, 1000, reason="no deeper network has been trained")]
GradNorm = Annotated[
    float,
    ps.Between(0, opt.LARGEST_NORM, above=True, reason="the noise grows with it, and hides less"),
]
Walk = Annotated[float, ps.Between(0, 1e3, above=True)]


@dataclass(frozen=True)
class SearchSpaceSettings(ps.Checked):
    """Base of all search spaces; derived networks have the supernet's sizes, but in a CellSpace.

    Attributes:
        norm: Normalisation of the supernet: ``batch``, or ``group``, which privacy needs.
        skip: Term added to the logits of supernet and network: ``none``, or the logits of a
            ``linear`` classifier on the input.
        own_ops: Further ops to choose from, by the names given to ``register_op``.
    """

    name: str
    norm: SupernetNorm
    skip: Annotated[str, ps.OneOf(names.SKIPS)]
    own_ops: Annotated[list[str], ps.Distinct()]


@dataclass(frozen=True)
class CellSpace(SearchSpaceSettings):
    """A search space of repeated cells, with its supernet's sizes; ``retrain`` has the network's.

    Attributes:
        channels: Channels of the first cells.
        num_cells: Number of cells; see the space.
    """

    channels: Width
    num_cells: Cells


@dataclass(frozen=True)
class BlockSpace(SearchSpaceSettings):
    """The MBConv space; derived networks have the sizes of its supernet.

    Attributes:
        skeleton: Name of the depth, widths and strides; see ``spaces.mbconv.SKELETONS``.
        candidates: Name of the set of ops of a block; see ``CANDIDATES`` there.
        width: Width multiplier.
    """

    skeleton: str
    candidates: str
    width: Annotated[float, ps.Between(0, 16, above=True)]


@dataclass(frozen=True)
class AdapterSettings(SearchSpaceSettings):
    """The adapters of a frozen network that was trained on public images (``spaces.adapters``).

    Attributes:
        backbone: Name of the network in timm or torchvision.
        weights: Its file, of safetensors or a state dict; exported models hold it.
        image_size: Side in pixels to which images are resized; null is that of its training.
        mean: The mean of ``dataset``; that standardisation is undone and the network's applied.
        std: The standard deviation, used like ``mean``.
    """

    backbone: ps.Text
    weights: ps.Text
    image_size: ImageSize | None
    mean: list[float]
    std: list[opt.Positive]


@dataclass(frozen=True)
class DPCells(SearchSpaceSettings):
    """The DP-friendly space; derived networks have the sizes of its supernet.

    Attributes:
        widths: Channels of each of the three cells' nodes.
        head: Width of the head.
        activation: Name of the head's activation; see ``spaces.dp_cells.ACTIVATIONS``.
    """

    widths: list[Width]
    head: Width
    activation: str


@dataclass(frozen=True)
class Retrain(ps.Checked):
    """Federated training of the derived or given network from scratch.

    Attributes:
        exchange: What clients return: ``models`` after all local steps of a round (FedAvg), or
            ``gradients``, one exchange per step (FedSGD). Null is ``gradients`` in two cases: with
            privacy of records and secure sums, which share the noise of single steps only; and,
            with null ``rounds``, if simulated clients hold different classes of images of 16 by 16
            pixels or more, where averages of models lose much. Batch norm then becomes group norm
            (``algorithms.fedavg.strategy.planned``). Otherwise null is ``models``. In a deployment
            an exchange takes seconds: there, set ``gradients`` yourself, with ``norm=group``.
        rounds: Rounds of retraining; each ends with a checkpoint. Null, without privacy, gives the
            median client about 300 local steps in 10 to 40 rounds; for images of 16 by 16 pixels
            or more, 900 steps in 10 to 120 rounds. If a round on a table has fewer than 5 steps,
            ``local_epochs`` is multiplied.
        evaluate_every: Rounds between evaluations of the network on the clients' validation
            records, which are then not trained on; 0 never evaluates, and trains on them, too.
        local_epochs: Passes over a client's records per round; with ``gradients``, over those of
            the median client.
        batch_size: Records per step of a client. With ``gradients`` this is the median client's
            number; others have more or fewer in proportion to their records, up to 8 times. With
            privacy it is the expected number at each client, unless ``privacy.retrain.rate`` sets
            the share of the records.
        channels: Channels of the first cells; null takes the supernet's size. The default for a
            table with privacy is 32.
        num_cells: Cells of the network; null takes the supernet's number.
        norm: Normalisation of the network: ``batch``, ``group`` or ``none``. Privacy allows only
            the last two; its default for a table is ``none``, but deep networks of images need
            ``group``. See ``exchange`` for where ``batch`` becomes ``group``.
        unaugmented: Share of the rounds, at the end, in which training images are not augmented,
            like the images in later use (He et al. 2019, arXiv 1909.09148).
        auxiliary_weight: Weight of the loss of DARTS' auxiliary head; 0 leaves the head out.
        drop_path_prob: Probability of drop-path in the last round; it rises linearly from 0.
        weights: The optimiser's constants. With null ``rounds``, the weight decay for a table is 5
            over the number of all records, but at least as set and at most .05.
    """

    exchange: Annotated[str, ps.OneOf(EXCHANGES)] | None
    rounds: opt.Count | None
    evaluate_every: opt.CountOrZero
    local_epochs: opt.Steps
    batch_size: opt.Count
    channels: Width | None
    num_cells: Cells | None
    norm: Norm
    unaugmented: opt.ShareBelow1
    auxiliary_weight: opt.RateOrZero
    drop_path_prob: opt.ShareBelow1
    weights: opt.SGD

    def local_steps(self, records: float) -> int:
        """Number of local steps per round of a client with so many records."""
        return self.local_epochs * max(1, math.ceil(records / self.batch_size))

    @property
    def planned(self) -> int:
        """Number of rounds, once it is known; ValueError before that."""
        if self.rounds is None:
            raise ValueError("the rounds follow from the clients' records, which are not known yet")
        return self.rounds


@dataclass(frozen=True)
class NetworkLimits(ps.Checked):
    """Limits on the cost of a found network, at the size at which it is trained; null is no limit.

    Attributes:
        parameters: Largest number of parameters.
        multiply_adds: Largest number of multiply-adds for one example.
        latency_ms: Highest latency according to ``table``.
        table: File of latencies, written by ``fednas latency measure``.
    """

    parameters: opt.Count | None
    multiply_adds: opt.Count | None
    latency_ms: opt.Positive | None
    table: ps.Text | None

    def conflicts(self) -> ps.Conflicts:
        """Exclude a limit of latency without a table, and a table without the limit."""
        yield (
            (self.latency_ms is None) != (self.table is None),
            f"limits.latency_ms={self.latency_ms} with limits.table={self.table}: a limit of "
            "latency needs a table, and a table is for that only",
        )

    @property
    def by_name(self) -> dict[str, float]:
        """The limits that are set."""
        limits = {name: most for name, most in vars(self).items() if name != "table"}
        return {name: most for name, most in limits.items() if most is not None}


@dataclass(frozen=True)
class Hardware(ps.Checked):
    """Effect of a network's cost on the loss of the alphas; see ``spaces.costs.HardwareLoss``.

    Attributes:
        table: File of ``fednas latency measure``, for targets in ms; null lets the clients measure
            before the search, in each group its own.
        unit: Unit of cost: ``ms``, ``multiply_adds`` or ``parameters``.
        target: Target cost T in this unit, by which the loss is scaled; a cost below T still
            lowers the loss.
        loss: Form of the loss, a name of ``spaces.costs.LOSSES``.
        scale: Factor of the additive term, or of the multiplicative loss.
        exponent: Exponent of the ratio log cost / log target in the multiplicative loss.
    """

    table: ps.Text | None
    unit: str
    target: opt.Positive
    loss: str
    scale: Annotated[float, ps.Between(0, 1e6, above=True)]
    exponent: Annotated[float, ps.Between(-10, 10)]

    def conflicts(self) -> ps.Conflicts:
        """Exclude a table of another unit."""
        yield (
            self.unit != "ms" and self.table is not None,
            f"unit={self.unit} with table={self.table}: a table is for ms only; set table=null",
        )


@dataclass(frozen=True)
class NoPrivacy:
    """``none``: clients return exact gradients, weights and metrics."""

    name: str


@dataclass(frozen=True)
class Noise(ps.Checked):
    """Noise per release on sums of one kind, whose terms have norms up to 1, such as rewards.

    Attributes:
        noise_multiplier: Standard deviation of the noise divided by the largest norm; null
            calibrates it.
        epsilon: Privacy bound of all releases of this kind alone, from which the noise multiplier
            follows; null calibrates by the run's epsilon.
    """

    noise_multiplier: opt.NoiseMultiplier | None
    epsilon: opt.Epsilon | None

    def conflicts(self) -> ps.Conflicts:
        """Exclude noise that is given in two ways."""
        yield (
            None not in (self.noise_multiplier, self.epsilon),
            f"noise_multiplier={self.noise_multiplier} with epsilon={self.epsilon}: the one "
            "follows from the other; set one of them to null",
        )


@dataclass(frozen=True)
class ClippedNoise(Noise):
    """Noise on clipped sums: std ``noise_multiplier * max_grad_norm``.

    Attributes:
        max_grad_norm: Largest norm of one record's contribution.
    """

    max_grad_norm: GradNorm


@dataclass(frozen=True)
class PrivateRetrain(ClippedNoise):
    """DP-SGD of the derived network: its noise, and its steps per round.

    Attributes:
        local_steps: Noised steps of a client per round.
        rate: Probability with which a step draws each record, by default 1 for a table and for
            pooled features; null gives expected batches of ``retrain.batch_size``.
        noise_walk: Standard deviation that the noise of all steps together gives a weight, by
            default .5 for a table; the learning rate follows from it. Null takes the learning rate
            of ``retrain.weights``.
    """

    local_steps: opt.Steps
    rate: opt.ShareAbove0 | None
    noise_walk: Walk | None


@dataclass(frozen=True)
class DifferentialPrivacy(ps.Checked):
    """``dp``: clients return noised sums of clipped contributions and book each in their ledgers.

    Noise is calibrated as if each release were charged only to the splits that it reads. Where a
    site's data sets share an ``account``, every release is charged to all splits. The client then
    leaves before the end, unless its budget is larger or the noise is given.

    Attributes:
        data_set: Id of the data in the sites' policies.
        unit: What is protected. ``record``: one record, or one person with all their records if the
            data names the person of each record. ``client``: all records of a client; it trains by
            epochs without noise, its whole update is clipped to ``max_grad_norm``, and secure sums
            share the noise. No privacy amplification by client sampling is claimed.
        epsilon: Privacy bound of the whole run for a record, at ``delta``. Retraining's noise is
            calibrated to what search and metrics leave of it. It is the simulated sites' budget.
        delta: Probability with which ``epsilon`` need not hold; below 1 / records.
        search_share: Part of ``epsilon`` that the search may spend. Ignored if you set the noise
            yourself, or if retraining uses other records.
        rewards_share: Part of ``epsilon`` that rewards, of search and retraining together, may
            spend if other noise on the same records, such as that of alphas, is calibrated to the
            rest. Otherwise they may spend all of it.
        weights: Noise on gradients of the supernet's weights in the search.
        alphas: Noise on gradients of the architecture variables.
        rewards: Noise on rewards of trials and candidates, whose norm is 1; FEATHERS measures a
            record's decrease of loss in units of its bound for that.
        retrain: Noise on gradients of the derived network's weights.
        local_steps: Noised steps per round of a local search, and per trial.
        rate: Probability with which a step of the search draws each record; null gives expected
            batches of ``algorithm.batch_size``.
        metrics_noise_multiplier: Noise on losses and accuracies of clients' records, divided by the
            norm of 1 per record and measurement; null measures nothing.
        scores_error: Standard error that noise may give the network's AUROC if one of two classes
            has 10 % of the records. It is larger where it would cost more than a quarter of
            ``epsilon``. One release has the counts of scores by class, of train and validation
            records; a threshold also follows from it, and probabilities as often right as they
            say. Null releases no scores.
        statistics_noise_multiplier: Noise on the means and deviations by which clients standardise
            a table: one release per client, within ``dataset.ranges``, for a norm of 1 per record.
            Null standardises by the ranges alone. For pooled features of a backbone, the noise is
            on their mean.
        statistics_share: Largest part of ``epsilon`` that the noised mean of a backbone's pooled
            features, by which they are centred, would cost alone; 0 leaves them as they are.
            Ignored where the noise of statistics or retraining is given.
        fewest_records: Least share of the median client's records that each of three or more
            clients must declare of each split; one that declares fewer is left out. Noise is
            calibrated to the client that needs most.
        micro_batch_size: Records that a simulated site computes at a time, 1 to 1024; by default
            1024 for a table and for pooled features. A real site's own policy sets it.
        sites: Folder of the simulated sites' policies, ledgers and keys. Null is ``sites`` in the
            run folder, so that every run has budgets of its own.
        test_seed: Seed of noise that everybody can repeat, for tests of simulations. No privacy.
    """

    name: str
    data_set: ps.Text
    unit: Annotated[str, ps.OneOf((names.RECORD, names.CLIENT))]
    epsilon: opt.Epsilon
    delta: opt.InnerShare
    search_share: opt.InnerShare
    rewards_share: opt.InnerShare
    weights: ClippedNoise
    alphas: ClippedNoise
    rewards: Noise
    retrain: PrivateRetrain
    local_steps: opt.Steps
    rate: opt.ShareAbove0 | None
    metrics_noise_multiplier: opt.NoiseMultiplier | None
    scores_error: Annotated[float, ps.Between(0.001, 0.1)] | None
    statistics_noise_multiplier: opt.NoiseMultiplier | None
    statistics_share: opt.Share
    fewest_records: Annotated[float, ps.Between(0, 1)]
    micro_batch_size: Annotated[int, ps.Between(1, names.LARGEST_MICRO_BATCH)]
    sites: ps.Text | None
    test_seed: int | None


PRIVACY: dict[str, type] = {"none": NoPrivacy, "dp": DifferentialPrivacy}


@dataclass(frozen=True)
class TrainingSettings(ps.Checked):
    """Settings of all local training, of supernets and of networks.

    Attributes:
        precision: Number format of gradients, without privacy. ``bfloat16`` is faster on processors
            that have it (torch's autocast). ``auto`` is ``bfloat16`` in retraining if this
            processor has it and the network is large enough to gain, otherwise ``float32``.
            Weights, steps, second-order gradients and evaluation stay float32.
        momentum: What becomes of momentum between requests: it is dropped (``reset``), or
            ``averaged`` like the model. Null is ``averaged`` in private retraining with
            ``privacy.retrain.noise_walk``, otherwise ``reset``.
        class_factors: Public factors of the classes' losses, by class name; with privacy they
            multiply what is already clipped.
        loss: Training loss. For a target that is a number: ``squared``, ``absolute`` or ``huber``
            (squared up to a standard deviation, then absolute) of the standardised difference. Or
            a name given to ``register_loss``. Null is ``squared`` for numbers, and cross-entropy
            for classes. All networks are tested by the loss that null stands for.
    """

    precision: Annotated[str, ps.OneOf((*names.PRECISIONS, names.AUTO))]
    momentum: Annotated[str, ps.OneOf(opt.MOMENTA)] | None
    class_factors: dict[str, opt.ShareAbove0]
    loss: ps.Text | None


@dataclass(frozen=True)
class EvaluationSettings(ps.Checked):
    """Settings of measures, and of the networks that the found one is compared with.

    Attributes:
        positive: The positive class of F1, AUROC, average precision, sensitivity and specificity;
            null takes the mean over classes, or the last of two classes.
        metric: Score by which networks are compared and one is delivered. Null is ``r2`` for a
            target that is a number. For classes it is ``auroc`` if ``positive`` is set or the rarer
            of two classes has less than 30 % of the clients' records, otherwise ``accuracy``. With
            ``accuracy`` and ``f1`` a label is the most probable class. With the others the exported
            model has a threshold for the positive class, if one can be found: the one of largest
            sensitivity + specificity on validation records, or with privacy on the counts of
            ``privacy.scores_error``. All scores of labels use this threshold.
        deliver: The network that a run delivers: the ``found`` one, or the ``best`` on validation
            records that no training has used. ``best`` chooses among the found one, those of
            ``baselines`` and, for small images, a linear model on scattering features; the others
            are then trained before it. It is not possible with privacy or on real sites.
        personalised: If true, clients test the trained network again after local epochs of their
            own. A client keeps its fine-tuned copy if that is better on validation records that no
            training has used (``pipeline.evaluation``; needs ``deliver=best`` or
            ``retrain.evaluate_every``). Not possible with privacy.
        baselines: Number of random networks of the search space that are trained like the found one
            and shown beside it, with the data-free choice, a linear model and, for images, a
            ResNet-8; 0 trains none of these. Default: 2 if the run took over a minute and they add
            less than half of that time, otherwise 0.
    """

    positive: ps.Word | None  # a Word, as Hydra reads class names such as 0 and 1 as numbers
    metric: Annotated[str, ps.OneOf(names.METRICS)] | None
    deliver: Annotated[str, ps.OneOf(names.DELIVERIES)]
    personalised: bool
    baselines: opt.CountOrZero | None


@dataclass(frozen=True)
class AlgorithmSettings(ps.Checked):
    """Base of all algorithms' settings, and the settings of an algorithm that has none."""

    name: str

    @property
    def trains_models(self) -> bool:
        """True if clients of the search reply with models that they have trained."""
        return True

    def check(self, config: Any) -> None:
        """Raise ConfigError for settings that exclude each other with this algorithm only.

        Args:
            config: The :class:`~fednas_flwr.settings.Config` that has these settings.
        """

    def whole_search(self, config: Any) -> Any:
        """The configuration with all rounds of search in which a client is asked.

        It is the run's own unless groups of clients continue the search.
        """
        return config

    def rehearsed(self, space: str) -> "tuple[AlgorithmSettings, float]":
        """Settings with the same requests to clients and little work at the server, for a dry run.

        Args:
            space: Name of the search space.

        Returns:
            The settings, and the factor by which the server's work in a real search is larger.
        """
        return self, 1.0


@dataclass(frozen=True)
class LocalEpochs(AlgorithmSettings):
    """Base of the algorithms whose clients train for local epochs.

    Attributes:
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        weights: The weights' optimiser.
    """

    local_epochs: opt.Steps
    batch_size: opt.Count
    weights: opt.SGD


@dataclass(frozen=True)
class GivenNetwork(AlgorithmSettings):
    """Base of the algorithms that do not search but train a network given by name.

    Attributes:
        network: A name of ``models.networks.FIXED_NETWORKS``, unless a genotype is given; with
            ``weights``, a network of timm or torchvision.
        weights: File at the server with public weights to begin from, as safetensors or a state
            dict; null begins from random ones. To train a head alone, set ``dataset.backbone`` and
            the network ``linear``.
        image_size: Side in pixels to which images are resized for that network; null is that of
            its public training.
    """

    network: str
    weights: ps.Text | None
    image_size: ImageSize | None

    @property
    def has_norm(self) -> bool:
        """True if ``retrain.norm`` sets the norm of the named network."""
        return self.weights is None and self.network in opt.NORMED_NETWORKS


@dataclass(frozen=True)
class SamplingSettings(ps.Checked):
    """Rounds that ask only some of the clients, drawn by the run's seed.

    No privacy is claimed for sampling, since the server knows whom it asks.

    Attributes:
        per_round: Number of clients that a round asks; below 1, their share.
        by: The way they are drawn (:class:`~fednas_flwr.server.exchange.Sampling`): ``uniform``
            keeps averages unbiased, ``round_robin`` asks all clients equally often.
        spare: Share of ``per_round`` that stands by in every round, to be asked in place of
            clients that fail.
    """

    per_round: Annotated[float, ps.Between(0, 2**31, above=True)]
    by: Annotated[str, ps.OneOf(names.SAMPLINGS)] = names.UNIFORM
    spare: Annotated[float, ps.Between(0, 1)] = 0.0

    def asked(self, clients: int) -> int:
        """Number of clients that a round asks, out of ``clients``."""
        number = self.per_round
        return int(number) if number >= 1 else math.ceil(number * clients - 1e-9)


@dataclass(frozen=True)
class SecureSumSettings(ps.Checked):
    """Secure sums: the server sees totals of replies only (:mod:`fednas_flwr.protocol.secure_sum`).

    These are the terms of simulated sites; a real site's own policy has its terms.

    Attributes:
        least_sites: Fewest clients whose sum is opened; null is all but one, or ``colluding`` + 2
            if that is more.
        colluding: Number of clients that each client expects might collude with the server.
    """

    least_sites: Annotated[int, ps.Between(2, names.MOST_SITES)] | None = None
    colluding: Annotated[int, ps.Between(0, names.MOST_SITES)] = 1

    @property
    def fewest(self) -> int:
        """Fewest clients among which two are honest."""
        return self.colluding + 2

    def least(self, clients: int) -> int:
        """Fewest clients of a sum in a run of ``clients``."""
        return self.least_sites or max(self.fewest, clients - 1)


@dataclass(frozen=True)
class AggregateSettings(ps.Checked):
    """``mean``, weighted by examples, or ``median`` of each coordinate (Yin et al., 2018)."""

    name: str


@dataclass(frozen=True)
class TrimmedMeanSettings(AggregateSettings):
    """``trimmed_mean``: the mean of every coordinate without its largest and smallest values.

    Attributes:
        trim: Number of clients left out at each end of every coordinate.
    """

    trim: opt.Count


AGGREGATES: dict[str, type] = {
    "mean": AggregateSettings,
    "median": AggregateSettings,
    "trimmed_mean": TrimmedMeanSettings,
}


@dataclass(frozen=True)
class ServerOptimizer(ps.Checked):
    """``none``: the average is the new model."""

    name: str


@dataclass(frozen=True)
class ServerAdam(ServerOptimizer):
    """``adam``, after Flower's FedAdam (Reddi et al., 2021).

    Attributes:
        lr: Learning rate, > 0: about the distance that a weight moves in a round.
        tau: Term added to the root of the second moments, > 0; a larger one adapts less.
        beta_1: Decay of the first moments, from 0 to below 1.
        beta_2: Decay of the second moments, from 0 to below 1.
    """

    lr: opt.LearningRate
    tau: opt.Positive
    beta_1: opt.ShareBelow1
    beta_2: opt.ShareBelow1


SERVER_OPTIMIZERS: dict[str, type] = {"none": ServerOptimizer, "adam": ServerAdam}


@dataclass(frozen=True)
class Runtime(ps.Checked):
    """``inline``: all clients in this process, one after the other.

    Attributes:
        device: Device for training; ``auto`` takes CUDA if there is a GPU.
        threads: torch's threads per client, the same in every runtime.
        wire: Number format of tensors in messages, both ways.
        time_limit: Time, as 45s, 30min, 2h or 1h30min; null is no limit. No new round starts if it
            would end after the limit. The network is then exported as trained so far, or a search
            stays at its checkpoint and ``resume`` goes on. With ``evaluation.deliver=best``,
            candidates for which no time remains are left out, except one. Other baselines come
            after the limit, and need a run that it has not cut short.
        quorum: Share of the clients that must answer every exchange.
        deadline_s: Seconds that the server waits for the replies of one exchange.
        approval_s: Seconds that the server waits for people at private sites to approve the run.
        most_records: Largest multiple of the median client's records that each of three or more
            clients may declare; one that declares more is left out.
        largest_share: Largest share that one client may have of an average of three or more; 1 is
            no limit.
    """

    name: str
    device: Annotated[
        str, ps.Where(lambda name: not name.startswith("cuda:"), CUDA), ps.OneOf(DEVICES)
    ]
    threads: Annotated[int, ps.Between(1, 1024, reason="no machine has more cores")]
    wire: Annotated[str, ps.OneOf(WIRES)]
    time_limit: ps.Time | None
    quorum: opt.ShareAbove0
    deadline_s: opt.Positive
    approval_s: opt.NonNegative
    most_records: Annotated[float, ps.Between(1)]
    largest_share: opt.ShareAbove0


@dataclass(frozen=True)
class RayRuntime(Runtime):
    """``ray``: Flower's simulation, clients in parallel processes.

    Attributes:
        ray_address: ``host:port`` of a running Ray cluster; null starts one.
        client_cpus: CPUs of one Ray actor; as many actors run at a time as there are CPUs for.
        client_gpus: GPUs of one Ray actor, possibly a fraction.
    """

    ray_address: ps.Text | None
    client_cpus: Annotated[float, LEAST_PART]
    client_gpus: PartOrZero


@dataclass(frozen=True)
class Deployment(Runtime):
    """``deployment``: real SuperNodes, by ``flwr run``.

    Attributes:
        connect_s: Seconds the server waits for clients to appear.
        superlink: Name of the SuperLink in Flower's configuration.
    """

    connect_s: opt.Positive
    superlink: ps.Text | None

    def conflicts(self) -> ps.Conflicts:
        """Exclude a deployment without a SuperLink."""
        yield (
            self.superlink is None,
            "superlink must be given with runtime=deployment: the name of a SuperLink in Flower's "
            "configuration (config.toml in $FLWR_HOME or ~/.flwr)",
        )


RUNTIMES: dict[str, type] = {"inline": Runtime, "ray": RayRuntime, "deployment": Deployment}


@dataclass(frozen=True)
class Config(ps.Checked):
    """One run.

    Attributes:
        run_dir: The run folder; null makes ``runs/<time>_<algorithm>_<data set>``.
        seed: Seed of everything that is drawn, except the division of records and the noise of
            privacy.
        clients: Number of clients; if not set, with ``partition=sites`` and ``column`` as many as
            there are.
        rounds: Rounds of the search: for FNAS iterations, for random search candidates.
        stages: Stages to run; ``search`` derives a genotype, the others need one.
        genotype: Architecture to retrain instead of searching: a file, or a name of
            ``conf/genotypes``.
        sampling: Rounds that ask only some of the clients: any of these settings, such as
            ``sampling.per_round=50``; null asks all.
        secure_sum: Secure sums, so that the server sees totals of replies only
            (:mod:`fednas_flwr.protocol.secure_sum`): ``true``, or any of these settings.
        training: Settings of all local training.
        evaluation: Measures, and the networks that the found one is compared with.
        trackers: Experiment trackers that receive the numbers of the rounds. Each but TensorBoard
            needs the extra of its name, and what it receives leaves the server.
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
    run_dir: ps.Text | None
    seed: opt.CountOrZero
    clients: opt.Count
    rounds: opt.Count
    stages: Annotated[
        list[Annotated[str, ps.OneOf(STAGES)]], ps.Length(ps.Between(1)), ps.Distinct()
    ]
    genotype: ps.Text | None
    sampling: SamplingSettings | None
    secure_sum: SecureSumSettings | None
    training: TrainingSettings
    evaluation: EvaluationSettings
    trackers: Annotated[list[Annotated[str, ps.OneOf(TRACKERS)]], ps.Distinct()]

    def conflicts(self) -> ps.Conflicts:
        """Exclude impossible numbers of clients per round; see also ``settings.incompatible``."""
        number = self.sampling.per_round if self.sampling else 0.0
        yield (
            number >= 1 and not (number.is_integer() and number <= self.clients),
            f"sampling.per_round={number:g} with clients={self.clients}: expected a whole number "
            "of them, or a share below 1; set sampling=null for all",
        )

    @property
    def folder(self) -> Path:
        """The run folder; ``run_dir`` must be set."""
        return Path(str(self.run_dir))

    @property
    def dp(self) -> DifferentialPrivacy | None:
        """Settings of differential privacy; None in a run without it."""
        return self.privacy if isinstance(self.privacy, DifferentialPrivacy) else None

    @property
    def private(self) -> DifferentialPrivacy:
        """Settings of differential privacy, for code that only private runs reach."""
        assert isinstance(self.privacy, DifferentialPrivacy)
        return self.privacy

    @property
    def private_data_set(self) -> str | None:
        """Id of the data set in the private sites' policies; None without privacy."""
        return self.dp.data_set if self.dp else None

    @property
    def by_client(self) -> bool:
        """True if the unit of privacy is the client."""
        return self.dp is not None and self.dp.unit == names.CLIENT

    @property
    def by_record(self) -> bool:
        """True if the unit of privacy is the record or the person."""
        return self.dp is not None and self.dp.unit != names.CLIENT

    @property
    def searches(self) -> bool:
        """True if there is a search stage."""
        return "search" in self.stages and not isinstance(self.algorithm, GivenNetwork)

    @property
    def retrains(self) -> bool:
        """True if there is a retrain stage."""
        return "retrain" in self.stages

    @property
    def asked(self) -> int:
        """Number of clients that a round asks."""
        return self.clients if self.sampling is None else self.sampling.asked(self.clients)

    @property
    def samples(self) -> bool:
        """True if a round asks only some of the clients."""
        return self.asked < self.clients


def with_runtime(config: Config, **changed: object) -> Config:
    """Return the configuration with other settings of its runtime."""
    runtime: Any = config.runtime
    return replace(config, runtime=replace(runtime, **changed))


def dump_config(config: Config) -> str:
    """Return the configuration as one line of JSON that ``load_config`` reads back."""
    return json.dumps(asdict(config), sort_keys=True)

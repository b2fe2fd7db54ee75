"""Requests and the properties of replies: a frozen dataclass and a TypedDict for each action.

On the wire both are JSON, and tensors travel alongside. :func:`decode` is the only way from a
message to a request, and :func:`decode_properties` the only way to the properties that a client
states. An unknown or missing key, or a value of another type or out of range, is refused before
anything else is done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Self, TypedDict

from fednas_flwr.base.errors import ConfigError, MissingSettingError, ReplyError, check_choice
from fednas_flwr.data.records import Column
from fednas_flwr.data.statistics import LARGEST_NUMBER, Moments
from fednas_flwr.models.metrics import BINS, SCORES
from fednas_flwr.privacy.actions import ACTIONS, SPLIT_OF
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.privacy.policy import refused
from fednas_flwr.protocol import sum_requests as sr
from fednas_flwr.protocol.keys import is_hex
from fednas_flwr.protocol.sum_requests import Settings as Settings
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings import names
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings import parser as ps
from fednas_flwr.spaces.latency_tables import from_json

MOST_TRIALS = 1000
LARGEST_MODEL = 2**27  # bytes of the model file that a site keeps
LONGEST_CARD = 2**17  # characters
MOST_RELEASES = 32  # kinds of releases in a schedule; a site keeps each schedule permanently
MAX_EXAMPLES = 1e9  # for a client that has not yet stated its number of records
LARGEST_TABLE = 2**20  # characters of a table of latencies, about 5,000 layers
LARGER = 8  # largest multiple of a batch in proportion to records, as it is held in memory
LARGEST_RECORD = 2**28  # values of a record's features
MOST_SUMS = 10**6


Number = Annotated[int, ps.Between(0, MAX_EXAMPLES)]
Precision = Annotated[str, ps.OneOf((*names.PRECISIONS, names.AUTO))]
Shape = Annotated[
    list[Number],
    ps.Where(
        lambda shape: len(shape) <= 3 and math.prod(shape) <= LARGEST_RECORD,
        "the shape of a record that a computer holds",
    ),
]
Declared = Annotated[
    dict[str, Number],
    ps.Where(lambda splits: set(splits) == set(names.SPLITS), "a number of each split"),
]
Rates = Annotated[
    dict[str, opt.NonNegative],
    ps.Where(lambda rates: rates.keys() <= SPLIT_OF.keys(), "rates of weights and alphas"),
]
Epsilon = Annotated[float, ps.Between(0)]
Candidates = Annotated[list[list[int]], ps.Length(ps.Between(1, opt.MOST_CANDIDATES))]
Description = dict[str, Any]  # a network is built from it, see ``models.networks.make_network``


def check_private_batch(batch_size: int | None) -> None:
    """Raise ConfigError for a batch size other than the one committed to."""
    if batch_size is not None:
        raise ConfigError(
            f"refused: batch_size={batch_size}: a private client's batches are those committed to."
        )


def splits_of(text: str) -> tuple[str, ...]:
    """Splits that a request names, e.g. ``train+validation``."""
    return tuple(text.split("+"))


@dataclass(frozen=True)
class Amount(ps.Checked):
    """Amount of a client's training.

    Attributes:
        epochs: Passes over its records, at least 1; None makes ``steps`` steps.
        steps: Number of steps, 1 to 1e6; None makes ``epochs`` passes.
        batch_size: Records per step; None takes all or, in private mode, Poisson batches of the
            expected size that was committed to.
    """

    epochs: opt.Steps | None
    steps: opt.Steps | None
    batch_size: opt.Count | None

    def conflicts(self) -> ps.Conflicts:
        """Refuse anything but exactly one of the two."""
        yield ps.one_of(epochs=self.epochs, steps=self.steps)

    def most_steps(self, rows: float) -> int:
        """Largest number of steps over this many rows."""
        if self.steps is not None:
            return self.steps
        batches = 1 if self.batch_size is None else math.ceil(rows / self.batch_size)
        return (self.epochs or 1) * max(1, batches)

    @property
    def private_steps(self) -> int:
        """Number of releases.

        Raises:
            ConfigError: It has no steps that a private client can book.
        """
        if self.steps is None:
            raise ConfigError(
                f"refused: epochs={self.epochs}: a private client takes steps, each of them booked."
            )
        check_private_batch(self.batch_size)
        return self.steps


@dataclass(frozen=True)
class LocalSearch(ps.Checked):
    """A local search of a supernet: by ``alternating`` steps, or on sampled ``paths``."""

    amount: Amount
    weights: opt.SGD
    alphas: opt.Adam
    alternating: Alternating | None = None
    paths: SampledPaths | None = None

    def conflicts(self) -> ps.Conflicts:
        """Refuse anything but exactly one of the two."""
        yield ps.one_of(alternating=self.alternating, paths=self.paths)

    network = None
    split = "train"
    auxiliary_weight = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """The states that the search trains."""
        return ("weights",) if self.paths is not None and self.paths.warm_up else tuple(SPLIT_OF)

    @property
    def releases(self) -> sr.Kinds:
        """Releases of a private client, by kind.

        Raises:
            ConfigError: The search mixes splits, or its steps cannot be booked.
        """
        rule = "first_order" if self.alternating is None else self.alternating.rule
        if rule != "first_order":
            raise refused("first order only", "rule", rule, "first_order: others mix splits")
        return {state: ((SPLIT_OF[state],), self.amount.private_steps) for state in self.states}


@dataclass(frozen=True)
class LocalTraining(ps.Checked):
    """Training of a network.

    Attributes:
        network: Description of the network.
        split: Records to train on, ``train`` or ``train+validation``.
        amount: Amount of training.
        weights: SGD.
        auxiliary_weight: Weight of an auxiliary head's loss, at least 0.
        drop_path_prob: Probability of drop-path, from 0 to below 1.
        proximal: mu, at least 0, of :class:`~fednas_flwr.search.optimizer_step.Proximal`; w_0 are
            the weights that were sent.
        augmented: True if images are augmented.
        precision: Precision of exact gradients; ``auto`` means ``float32``, null the run's setting.
    """

    network: Description
    split: str
    amount: Amount
    weights: opt.SGD
    auxiliary_weight: opt.NonNegative
    drop_path_prob: opt.ShareBelow1
    proximal: opt.NonNegative = 0.0
    augmented: bool = True
    precision: Precision | None = None

    states = ("weights",)

    @property
    def releases(self) -> sr.Kinds:
        """Releases of a private client, by kind."""
        return {"weights": (splits_of(self.split), self.amount.private_steps)}


Local = LocalSearch | LocalTraining


@dataclass(frozen=True)
class Trial(ps.Checked):
    """Hyper-parameters of one trial of a probe, in place of those in the probe."""

    weights: opt.SGD
    alphas: opt.Adam
    drop_path_prob: opt.ShareBelow1


@dataclass(frozen=True, kw_only=True)
class AtSite(Settings):
    """Arguments of an action that reads a data set.

    Attributes:
        data_set: Id of the data set in a private site's policy; such a site answers no request
            without it.
    """

    data_set: str | None = None

    @property
    def loop(self) -> Local | None:
        """The local training that the request asks for; None if there is none."""
        return next((value for value in vars(self).values() if isinstance(value, Local)), None)

    @property
    def described(self) -> Description | None:
        """Description of the network that the request names or trains; None means the supernet."""
        return getattr(self.loop or self, "network", None)

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps of the local training, or ``local_steps``; for each candidate or trial."""
        if self.loop is None:
            return getattr(self, "local_steps", 1)
        return self.loop.amount.most_steps(sum(records[p] for p in splits_of(self.loop.split)))

    def with_steps(self, steps: int) -> Self:
        """The same request with this number of steps."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Local):
                changed[name] = replace(value, amount=Amount(None, steps, value.amount.batch_size))
            elif name == "local_steps":
                changed[name] = steps
        return replace(self, **changed)


class Budget(TypedDict):
    """The budget in a policy."""

    epsilon: opt.Positive
    delta: opt.InnerShare


def _are_complete(epsilons: Mapping[str, Mapping[str, float | None]]) -> bool:
    splits = [set(of) for of in epsilons.values()]
    alike = all(of == splits[0] <= set(names.SPLITS) for of in splits)
    return set(epsilons) == set(names.ACCOUNTANTS) and alike


# by accountant and split; None means infinite
Epsilons = Annotated[
    dict[str, dict[str, Epsilon | None]],
    ps.Where(_are_complete, "an epsilon of the same splits by each accountant"),
]
Coordinate = Annotated[float, ps.Between(-LARGEST_NUMBER, LARGEST_NUMBER, above=True)]


class Identity(TypedDict):
    """The index of a client, in properties of any client."""

    client: int


class ClientProperties(Identity, total=False):
    """Properties of a private client's reply to ``query.describe``; they depend on no record."""

    tag: ps.Line
    hardware: ps.Line
    versions: Annotated[
        dict[str, ps.Line], ps.Where(lambda of: all(map(ps.is_line, of)), "lines by name")
    ]
    keeps_model: Annotated[bool, ps.Where(bool, "true")]
    input_shape: Shape
    image_shape: Shape
    transform: list[ps.Line]
    schema: list[Column]
    mean: list[Coordinate]
    std: list[Annotated[float, ps.Between(0, LARGEST_NUMBER, above=True)]]
    class_names: list[ps.Line]
    multi_label: bool
    target: Annotated[list[Coordinate], ps.Length(ps.Between(0, 4))]
    splits: Declared
    data_set: ps.Line
    budget: Budget
    secure_noise: bool
    unit: Annotated[str, ps.OneOf(names.UNITS)]
    least_noise_multiplier: opt.NoiseMultiplier
    spent: Epsilon | None  # None means infinite
    epsilon: Epsilons
    honest_sites: Annotated[int, ps.Between(2, names.MOST_SITES)]


class ExactClientProperties(ClientProperties, total=False):
    """Properties of the reply of any client to ``query.describe``."""

    class_counts: list[Number]
    moments: list[Moments]


@sr.asks("query.describe", reply=ExactClientProperties, private=ClientProperties)
class Describe(Settings):
    """``query.describe``.

    Attributes:
        with_epsilon: True if private clients also report what the run has cost by now, with
            everything that other runs have released meanwhile.
    """

    of_any_site = True
    with_epsilon: bool = False


def _are_units(units: Sequence[str]) -> bool:
    return bool(units) and units == sorted({*units} & {*names.UNITS})


class Committed(TypedDict, total=False):
    """Properties of the reply to ``query.commit``: a hash to approve, or what the run costs."""

    awaits: Annotated[str, ps.Where(partial(is_hex, 32), "32 hex digits")]
    epsilon: Epsilons
    covered_steps: dict[str, Number]
    uncounted: Annotated[list[str], ps.Where(_are_units, "different units of privacy")]


@sr.asks("query.commit", reply=Committed)
class Commit(Settings):
    """``query.commit``: everything that the run intends to release."""

    data_set: str
    releases: Annotated[tuple[PlannedRelease, ...], ps.Length(ps.Between(0, MOST_RELEASES))]


def is_latency_table(text: str) -> bool:
    """Return True if a text is a latency table whose size fits some search space."""
    try:
        return len(text) <= LARGEST_TABLE and bool(from_json(text))
    except ConfigError:
        return False


class Latency(TypedDict):
    """Properties of the reply to ``query.latency``."""

    latency: Annotated[str, ps.Where(is_latency_table, "a latency table")]


@sr.asks("query.latency", reply=Latency)
class MeasureLatency(AtSite):
    """``query.latency``: passes of each layer on batches of made-up inputs."""

    batch_size: Annotated[int, ps.Between(1, 1024)]
    passes: Annotated[int, ps.Between(2, 1000)]


@sr.asks("query.statistics")
class TellStatistics(AtSite):
    """``query.statistics``: sums with which a table is standardised, or features are centred."""

    def released(self, action: str) -> sr.Kinds:
        """One release for all columns, or features."""
        return {STATISTICS: (("train",), 1)}


@sr.asks("query.keep_model")
class KeepModel(AtSite):
    """``query.keep_model``: the run's model; its file travels alongside as the state ``model``.

    Attributes:
        card: The model card, in Markdown.
        signature: Signature of file and card by the server's operator, see ``protocol.keys``.
    """

    is_kept = True

    card: Annotated[
        str,
        ps.Length(ps.Between(1, LONGEST_CARD)),
        ps.Where(lambda card: all(c.isprintable() or c == "\n" for c in card), "printable text"),
    ]
    signature: Annotated[str, ps.Length(ps.Between(128, 128))]


@sr.asks("train.weight_gradient", "train.alpha_gradient", "train.gradients")
class TakeGradients(AtSite):
    """``train.weight_gradient``, ``train.alpha_gradient`` and, fused, ``train.gradients``.

    Attributes:
        step: Number of the exchange, from 0; it decides which batches are taken.
        local_steps: Number of steps before the answer.
        local_lrs: Learning rates of those steps, by state; from 0.
        batch_size: See :class:`Amount`.
        order: Order of the alphas' gradient, 1 or 2.
        inner_lr: Learning rate of the weights' last step, for order 2; above 0.
    """

    step: opt.CountOrZero
    local_steps: opt.Steps
    local_lrs: Rates
    batch_size: opt.Count | None
    order: Annotated[int, ps.Between(1, 2)]
    inner_lr: opt.Positive

    def released(self, action: str) -> sr.Kinds:
        """A sum of each gradient in every step."""
        if self.order != 1:
            raise refused("first order only", "order", self.order, "1: second order mixes splits")
        check_private_batch(self.batch_size)
        states = ACTIONS[action].gradients_of
        return {state: ((SPLIT_OF[state],), self.local_steps) for state in states}


@sr.asks("train.network_gradient")
class TakeNetworkGradient(AtSite):
    """``train.network_gradient``: one step's gradient of the weights of a network.

    Attributes:
        network: Description of the network.
        split: Records of the batch, ``train`` or ``train+validation``.
        step: Number of the step, from 0; it decides which batch is taken.
        batch_size: See :class:`Amount`; it applies to a client with ``usual`` records.
        usual: Number of records for which ``batch_size`` holds. Other clients' batches are in
            proportion to their records, up to 8 times ``batch_size``, so that records are taken
            equally often.
        auxiliary_weight: Weight of an auxiliary head's loss, at least 0.
        drop_path_prob: Probability of drop-path, from 0 to below 1.
        augmented: True if images are augmented.
        precision: See :class:`LocalTraining`.
    """

    network: Description
    split: str
    step: opt.CountOrZero
    batch_size: opt.Count | None
    usual: opt.Positive
    auxiliary_weight: opt.NonNegative
    drop_path_prob: opt.ShareBelow1
    augmented: bool = True
    precision: Precision | None = None

    local_steps, local_lrs = 1, {"weights": 0.0}

    def at_client(self, records: float) -> Self:
        """The request as a client of this size answers it, with a batch of 2 or more."""
        if self.batch_size is None:
            return self
        batch_size = self.batch_size * min(records / self.usual, LARGER)
        return replace(self, batch_size=max(2, round(batch_size)))

    def released(self, action: str) -> sr.Kinds:
        """One sum of gradients."""
        check_private_batch(self.batch_size)
        return {"weights": (splits_of(self.split), 1)}


@sr.asks("train.search")
class Search(AtSite):
    """``train.search``.

    Attributes:
        local: The local training.
    """

    local: LocalSearch

    def released(self, action: str) -> sr.Kinds:
        """One release of each state in every step."""
        return self.local.releases

    def client_releases(self, action: str) -> sr.Kinds:
        """One update of each state."""
        return dict.fromkeys(self.local.states, (names.SPLITS, 1))

    def trained_by(self, rows: float) -> sr.Training:
        """The search."""
        local = self.local
        return sr.Training(
            local.weights,
            local.amount.most_steps(rows),
            proximal=0.0 if local.alternating is None else local.alternating.proximal,
            alphas_lr=local.alphas.lr,
        )


@sr.asks("train.candidate")
class TrainCandidates(AtSite):
    """``train.candidate``.

    Attributes:
        candidates: For each candidate, the column of the op on every edge; 1 to 1000 candidates.
        step: Number of the round, from 0; it decides which batches are taken.
        local_steps: Number of steps for each candidate.
        batch_size: See :class:`Amount`.
        weights: SGD.
        dp_aware: Clipping and noise as a regulariser; None for none, and in private mode.
        sparse: True if request and reply carry only the weights of these paths, and their moments.
    """

    candidates: Candidates
    step: opt.CountOrZero
    local_steps: opt.Steps
    batch_size: opt.Count | None
    weights: opt.SGD
    dp_aware: opt.DPAware | None
    sparse: bool = False

    def released(self, action: str) -> sr.Kinds:
        """One release in every step of each candidate."""
        if self.dp_aware is not None or self.batch_size is not None:
            raise ConfigError(
                "refused: a private client's noise and batches are those committed to; dp_aware "
                "and batch_size must be null."
            )
        return {"weights": (("train",), len(self.candidates) * self.local_steps)}

    def trained_by(self, rows: float) -> sr.Training:
        """The steps on all candidates."""
        return sr.Training(self.weights, len(self.candidates) * self.local_steps)


@sr.asks("evaluate.candidates")
class RewardCandidates(AtSite):
    """``evaluate.candidates``: accuracies of paths through the supernet, or of a pool's members.

    Attributes:
        candidates: Paths, see :class:`TrainCandidates`; None for a pool.
        network: Description of a pool that is measured as it was sent.
        training: Training of a pool that is measured by its training speed; the trained networks
            are not returned.
        sparse: True if the request carries only the weights of the paths.
    """

    candidates: Candidates | None = None
    network: Description | None = None
    training: LocalTraining | None = None
    sparse: bool = False

    def conflicts(self) -> ps.Conflicts:
        """Refuse all but one of the three, and pools that travel in part or have no members."""
        yield ps.one_of(candidates=self.candidates, network=self.network, training=self.training)
        if self.candidates is None:
            yield self.sparse, "sparse=True is of candidates by their paths: a pool travels whole"
            members = (self.described or {}).get("genotypes")
            count = len(members) if isinstance(members, list) else 0
            wanted = f"a list of 1 to {opt.MOST_CANDIDATES}"
            yield ps.within(1 <= count <= opt.MOST_CANDIDATES, "genotypes", members, wanted)

    @property
    def count(self) -> int:
        """Number of candidates that are measured."""
        return len(self.candidates or (self.described or {})["genotypes"])

    def released(self, action: str) -> sr.Kinds:
        """One release of all rewards."""
        return {"rewards": (("validation",), 1)}


@sr.asks("train.probe")
class Probe(AtSite):
    """``train.probe``: trials of a local search, or of the training of a network.

    Attributes:
        search: Search of a supernet; None if ``training`` is given.
        training: Training of another network; None if ``search`` is given.
        trials: Changes to it in each trial; 1 to 1000 trials.
        loss_bound: M, the most that a record's decrease in loss counts, in nats.
    """

    search: LocalSearch | None
    training: LocalTraining | None
    trials: Annotated[list[Trial], ps.Length(ps.Between(1, MOST_TRIALS))]
    loss_bound: opt.LossBound

    def conflicts(self) -> ps.Conflicts:
        """Refuse anything but exactly one of the two."""
        yield ps.one_of(search=self.search, training=self.training)

    def released(self, action: str) -> sr.Kinds:
        """One release for every step of each trial, and one for its reward."""
        trials, kinds = len(self.trials), self.trainings()[0].releases
        trained = {kind: (splits, trials * steps) for kind, (splits, steps) in kinds.items()}
        return trained | {"rewards": (("validation",), trials)}

    def client_releases(self, action: str) -> sr.Kinds:
        """The rewards."""
        return {"rewards": (names.SPLITS, len(self.trials))}

    def trainings(self) -> list[Local]:
        """Return the local search or training of each trial."""
        assert self.loop is not None  # one of the two is given
        of_loop = vars(self.loop).keys()
        changes = [{n: v for n, v in vars(t).items() if n in of_loop} for t in self.trials]
        return [replace(self.loop, **changed) for changed in changes]


@sr.asks("train.weights")
class Train(AtSite):
    """``train.weights``.

    Attributes:
        local: The local training.
        validates: True if the reply has the mean loss on validation records after training.
    """

    local: LocalTraining
    validates: bool = False

    def released(self, action: str) -> sr.Kinds:
        """A release in every step."""
        self._check_unvalidated()
        return self.local.releases

    def client_releases(self, action: str) -> sr.Kinds:
        """One update."""
        self._check_unvalidated()
        return {"weights": (names.SPLITS, 1)}

    def _check_unvalidated(self) -> None:
        if self.validates:
            raise ConfigError("refused: validates=True would tell a loss without noise.")

    def trained_by(self, rows: float) -> sr.Training:
        """The training."""
        local = self.local
        # a server may send anything, and a site that refuses it still answers
        described = local.network if isinstance(local.network, dict) else {}
        genotypes = described.get("genotypes")
        members = len(genotypes) if isinstance(genotypes, list) else 1
        steps = local.amount.most_steps(rows)
        return sr.Training(local.weights, steps, local.proximal, members=max(1, members))


Bins = Annotated[
    list[Number], ps.Where(lambda row: len(row) == BINS and sum(row) <= MAX_EXAMPLES, "a histogram")
]


class Scored(TypedDict, total=False):
    """Properties of the reply to ``evaluate.model`` from clients without privacy."""

    scores: Annotated[
        dict[str, Coordinate],
        ps.Where(
            lambda scores: (
                set(scores) <= set(SCORES)
                and all(0 <= v <= 1 for n, v in scores.items() if n not in names.NUMBER_METRICS)
            ),
            f"some of {', '.join(SCORES)}, those of classes from 0 to 1",
        ),
    ]
    # histograms of the probability of the positive class, for positive and other records
    histogram: Annotated[list[Bins], ps.Length(ps.Between(2, 2))]
    sums: Annotated[list[opt.NonNegative], ps.Length(ps.Between(1, MOST_SUMS))]  # row by row


@sr.asks("evaluate.model", reply=Scored, private=sr.NoProperties)
class Evaluate(AtSite):
    """``evaluate.model``: metrics of a network on one of the splits.

    Attributes:
        network: Description of the network.
        split: Name of the split.
        with_scores: True if clients also return scores, and a histogram of the probabilities of the
            positive class; private clients never do.
        threshold: Probability from which on a record is assigned to the positive class; None
            predicts the most probable class.
        summed: A score, one of ``names.METRICS``; clients without privacy also return its
            :func:`~fednas_flwr.models.metrics.sums`.
    """

    network: Description
    split: str
    with_scores: bool = False
    threshold: opt.Share | None = None
    summed: Annotated[str, ps.OneOf(names.METRICS)] | None = None

    def released(self, action: str) -> sr.Kinds:
        """One release of loss and accuracy."""
        return {"metrics": (splits_of(self.split), 1)}


@sr.asks("evaluate.scores")
class CountScores(AtSite):
    """``evaluate.scores``: noised counts of a network's scores on train and validation records.

    Attributes:
        network: Description of the network, which has two classes.
    """

    network: Description

    def released(self, action: str) -> sr.Kinds:
        """One release of all counts."""
        return {"scores": (("train", "validation"), 1)}


LARGEST_GAIN = 10.0  # bound on the change in a copy's loss on one record


class Personalised(TypedDict, total=False):
    """Properties of the reply to ``evaluate.personalised``."""

    # sum over validation records of the decrease in loss, sum of squares, and their number
    gain: Annotated[
        list[Coordinate],
        ps.Where(
            lambda told: (
                len(told) == 3
                and told[2] >= 1
                and abs(told[0]) <= LARGEST_GAIN * told[2]
                and 0 <= told[1] <= LARGEST_GAIN**2 * told[2]
            ),
            f"sums over 1 record or more, each of which gains {LARGEST_GAIN:g} at most",
        ),
    ]


@sr.asks("evaluate.personalised", reply=Personalised, private=sr.NoProperties)
class Personalise(AtSite):
    """``evaluate.personalised``: metrics after local training.

    Attributes:
        local: The training.
        threshold: As in :class:`Evaluate`.
        compares: True if the reply also has the training's gain on validation records.
    """

    local: LocalTraining
    threshold: opt.Share | None = None
    compares: bool = False


def decode(action: str, values: object) -> Settings:
    """Return the request of an action that a message's JSON values represent.

    Raises:
        ConfigError: There is no such action, or the values are not such a request.
    """
    check_choice("action", action, sr.REQUESTS)
    return ps.parse(sr.REQUESTS[action], values, key="")


def decode_properties(action: str, values: object, *, masked: bool = False) -> Any:
    """Return the properties of a reply to an action, in the form of its TypedDict.

    Args:
        action: The action that it answers.
        values: Any JSON values.
        masked: True if the reply is part of a secure sum.

    Raises:
        ReplyError: A property is missing, unknown or malformed.
    """
    try:
        return ps.parse(sr.Masked if masked else sr.PROPERTIES[action][0], values, key="")
    except MissingSettingError as error:
        raise ReplyError(f"does not say its {error.key}") from error
    except ConfigError as error:
        raise ReplyError(f"says {error}") from error

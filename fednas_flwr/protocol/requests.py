"""Requests: one frozen dataclass for each action; on the wire it is JSON.

:func:`decode` is the only way from a message to a request: an unknown or missing key, or a value of
another type or out of range, is refused before anything else is done. Tensors travel beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.privacy.actions import ACTIONS, SPLIT_OF
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.privacy.policy import refused
from fednas_flwr.protocol.sum_requests import REQUESTS, Kinds, Training, asks
from fednas_flwr.protocol.sum_requests import Settings as Settings
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.optimizers import (
    MOST_CANDIDATES,
    SGD,
    Adam,
    Count,
    CountOrZero,
    DPAware,
    LossBound,
    NonNegative,
    Positive,
    ShareBelow1,
    Steps,
)
from fednas_flwr.settings.parser import Between, Checked, Length, check_range, parse

MOST_TRIALS = 1000
LARGEST_MODEL = 2**27  # bytes of the file of a model that a site keeps
LONGEST_CARD = 2**17  # characters
MOST_RELEASES = 32  # kinds of them in a schedule; a site keeps each schedule for good
Candidates = Annotated[list[list[int]], Length(Between(1, MOST_CANDIDATES))]
Description = dict[str, Any]  # what a network is built from, see ``builders.make_network``


@dataclass(frozen=True)
class Site(Checked):
    """Further terms of a request to a private site; all other terms are those committed to.

    Attributes:
        data_set: Id that the site's policy gives the data.
    """

    data_set: str


def check_private_batch(batch_size: int | None) -> None:
    """Raise ConfigError for a size that is not the one committed to."""
    if batch_size is not None:
        raise ConfigError(
            f"refused: batch_size={batch_size}: a private client's batches are those committed to."
        )


def splits_of(text: str) -> tuple[str, ...]:
    """Splits that a request names, e.g. ``train+validation``."""
    return tuple(text.split("+"))


@dataclass(frozen=True)
class Amount(Checked):
    """Amount of a client's training.

    Attributes:
        epochs: Passes over its records, at least 1; None makes ``steps`` steps.
        steps: Number of steps, 1 to 1e6; None makes ``epochs`` passes.
        batch_size: Records per step; None takes all or, in private mode, Poisson batches of the
            expected size that was committed to.
    """

    epochs: Steps | None
    steps: Steps | None
    batch_size: Count | None

    def __post_init__(self) -> None:
        """Check the ranges, and that one of the two is given."""
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"epochs={self.epochs} with steps={self.steps}: exactly one must be given."
            )

    def most_steps(self, rows: float) -> int:
        """Steps over so many rows, at most."""
        if self.steps is not None:
            return self.steps
        batches = 1 if self.batch_size is None else math.ceil(rows / self.batch_size)
        return (self.epochs or 1) * max(1, batches)

    def with_steps(self, steps: int) -> Amount:
        """So many steps of the same batches."""
        return Amount(None, steps, self.batch_size)

    @property
    def private_steps(self) -> int:
        """Number of releases.

        Raises:
            ConfigError: It has none that a private client can book.
        """
        if self.steps is None:
            raise ConfigError(
                f"refused: epochs={self.epochs}: a private client takes steps, each of them booked."
            )
        check_private_batch(self.batch_size)
        return self.steps


@dataclass(frozen=True)
class LocalSearch:
    """A local search of a supernet: by ``alternating`` steps, or on sampled ``paths``."""

    amount: Amount
    weights: SGD
    alphas: Adam
    alternating: Alternating | None = None
    paths: SampledPaths | None = None

    def __post_init__(self) -> None:
        """Check that it is exactly one of the two."""
        if (self.alternating is None) == (self.paths is None):
            raise ConfigError("alternating or paths must be given, and not both.")

    split = "train"
    auxiliary_weight = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it trains."""
        warms_up = self.paths is not None and self.paths.warm_up
        return ("weights",) if warms_up else tuple(SPLIT_OF)

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps over the train records."""
        return self.amount.most_steps(records[self.split])

    def with_steps(self, steps: int) -> LocalSearch:
        """The same search for so many steps."""
        return replace(self, amount=self.amount.with_steps(steps))

    @property
    def releases(self) -> Kinds:
        """What it releases of a private client.

        Raises:
            ConfigError: It mixes splits, or its steps cannot be booked.
        """
        rule = "first_order" if self.alternating is None else self.alternating.rule
        if rule != "first_order":
            raise refused("first order only", "rule", rule, "first_order: others mix splits")
        steps = self.amount.private_steps
        return {state: ((SPLIT_OF[state],), steps) for state in self.states}


@dataclass(frozen=True)
class LocalTraining(Checked):
    """Training of a network.

    Attributes:
        network: What it is built from.
        split: What is trained on, ``train`` or ``train+validation``.
        amount: How long.
        weights: SGD.
        auxiliary_weight: Of an auxiliary head's loss, at least 0.
        drop_path_prob: From 0 to below 1.
        proximal: mu, at least 0, of :class:`~fednas_flwr.search.optimizer_step.Proximal`, w_0 being
            the weights that were sent.
    """

    network: Description
    split: str
    amount: Amount
    weights: SGD
    auxiliary_weight: NonNegative
    drop_path_prob: ShareBelow1
    proximal: NonNegative = 0.0

    states = ("weights",)

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps over the records of the split."""
        return self.amount.most_steps(sum(records[part] for part in splits_of(self.split)))

    def with_steps(self, steps: int) -> LocalTraining:
        """The same training for so many steps."""
        return replace(self, amount=self.amount.with_steps(steps))


@dataclass(frozen=True)
class Trial(Checked):
    """Hyper-parameters of one trial of a probe, in place of what the probe says."""

    weights: SGD
    alphas: Adam
    drop_path_prob: ShareBelow1


@dataclass(frozen=True, kw_only=True)
class AtSite(Settings):
    """Arguments of an action that reads a data set.

    Attributes:
        site: Its id at a private site, which answers no request without one.
    """

    site: Site | None = None

    @property
    def of_data_set(self) -> str | None:
        """Id of the data set."""
        return super().of_data_set if self.site is None else self.site.data_set


@dataclass(frozen=True, kw_only=True)
class InSteps(AtSite):
    """Arguments of an action that takes ``local_steps`` steps, 1 to 1e6, before it answers."""

    local_steps: Steps

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps before the answer, or of each candidate."""
        return self.local_steps

    def with_steps(self, steps: int) -> Self:
        """The same request for so many of them."""
        return replace(self, local_steps=steps)


@dataclass(frozen=True, kw_only=True)
class Locally(AtSite):
    """Arguments of an action that is one ``local`` training."""

    local: LocalSearch | LocalTraining

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps over the records of its split."""
        return self.local.num_steps(records)

    def with_steps(self, steps: int) -> Self:
        """The same training for so many steps."""
        return replace(self, local=self.local.with_steps(steps))


@asks("query.describe")
@dataclass(frozen=True, kw_only=True)
class Describe(Settings):
    """``query.describe``."""

    of_any_site = True


@asks("query.commit")
@dataclass(frozen=True, kw_only=True)
class Commit(Settings):
    """``query.commit``: everything that the run means to release."""

    data_set: str
    releases: Annotated[tuple[PlannedRelease, ...], Length(Between(0, MOST_RELEASES))]

    @property
    def of_data_set(self) -> str:
        """Id of the data set that the releases are of."""
        return self.data_set

    @property
    def committed(self) -> tuple[PlannedRelease, ...]:
        """All releases."""
        return self.releases


@asks("query.latency")
@dataclass(frozen=True, kw_only=True)
class MeasureLatency(AtSite):
    """``query.latency``: passes of each layer on batches of made-up inputs."""

    batch_size: Annotated[int, Between(1, 1024)]
    passes: Annotated[int, Between(2, 1000)]


@asks("query.statistics")
@dataclass(frozen=True, kw_only=True)
class TellStatistics(AtSite):
    """``query.statistics``: of a table, within the ranges that the site declares."""

    def released(self, action: str) -> Kinds:
        """One release for all columns."""
        return {STATISTICS: (("train",), 1)}


@asks("query.keep_model")
@dataclass(frozen=True, kw_only=True)
class KeepModel(AtSite):
    """``query.keep_model``: the run's model, whose file travels beside it as the state ``model``.

    Attributes:
        card: Its model card, Markdown.
        signature: Of file and card by the server's operator, see :mod:`exchange.signed_model`.
    """

    card: Annotated[str, Length(Between(1, LONGEST_CARD))]
    signature: Annotated[str, Length(Between(128, 128))]

    def __post_init__(self) -> None:
        """Check the ranges, and that the card can be shown on a terminal."""
        super().__post_init__()
        strange = [c for c in self.card if not (c.isprintable() or c == "\n")]
        check_range(not strange, "card", strange[:1], "printable text")


@asks("train.weight_gradient", "train.alpha_gradient", "train.gradients")
@dataclass(frozen=True, kw_only=True)
class TakeGradients(InSteps):
    """``train.weight_gradient``, ``train.alpha_gradient`` and, fused, ``train.gradients``.

    Attributes:
        step: Number of the exchange, from 0: which batches are taken.
        local_steps: Steps before the answer.
        local_lrs: Of those steps, by state; from 0.
        batch_size: See :class:`Amount`.
        order: Of the alphas' gradient, 1 or 2.
        inner_lr: Learning rate of the weights' last step, for order 2; above 0.
    """

    step: CountOrZero
    local_lrs: dict[str, NonNegative]
    batch_size: Count | None
    order: Annotated[int, Between(1, 2)]
    inner_lr: Positive

    def __post_init__(self) -> None:
        """Check the ranges, and the names of states."""
        super().__post_init__()
        for state in self.local_lrs:
            if state not in SPLIT_OF:
                raise unknown_choice("local_lrs", state, SPLIT_OF)

    def released(self, action: str) -> Kinds:
        """A sum of each gradient in every step."""
        if self.order != 1:
            limit = "1: second order mixes splits"
            raise refused("first order only", "order", self.order, limit)
        check_private_batch(self.batch_size)
        states = ACTIONS[action].gradients_of
        return {state: ((SPLIT_OF[state],), self.local_steps) for state in states}


@asks("train.network_gradient")
@dataclass(frozen=True, kw_only=True)
class TakeNetworkGradient(AtSite):
    """``train.network_gradient``: one step's gradient of the weights of a network.

    Attributes:
        network: What it is built from.
        split: What the batch is of, ``train`` or ``train+validation``.
        step: Number of the step, from 0: which batch is taken.
        batch_size: See :class:`Amount`.
        auxiliary_weight: Of an auxiliary head's loss, at least 0.
        drop_path_prob: From 0 to below 1.
    """

    network: Description
    split: str
    step: CountOrZero
    batch_size: Count | None
    auxiliary_weight: NonNegative
    drop_path_prob: ShareBelow1

    @property
    def described(self) -> Description:
        """Description of the network."""
        return self.network

    def released(self, action: str) -> Kinds:
        """One sum of gradients."""
        check_private_batch(self.batch_size)
        return {"weights": (splits_of(self.split), 1)}


@asks("train.search")
@dataclass(frozen=True, kw_only=True)
class Search(Locally):
    """``train.search``.

    Attributes:
        local: What is done.
        sparse: Whether the reply leaves out tensors that are as they were sent.
    """

    local: LocalSearch
    sparse: bool = False

    def released(self, action: str) -> Kinds:
        """A release of each state in every step."""
        return self.local.releases

    def client_releases(self, action: str) -> Kinds:
        """One update of each state."""
        if self.sparse:
            reason = "False: which tensors have changed would tell of the records"
            raise refused("unit", "sparse", True, reason)
        return dict.fromkeys(self.local.states, (SPLITS, 1))

    def trained_by(self, rows: float) -> Training:
        """The search."""
        local = self.local
        return Training(
            local.weights,
            local.amount.most_steps(rows),
            proximal=0.0 if local.alternating is None else local.alternating.proximal,
            alphas_lr=local.alphas.lr,
        )


@asks("train.candidate")
@dataclass(frozen=True, kw_only=True)
class TrainCandidates(InSteps):
    """``train.candidate``.

    Attributes:
        candidates: For each the column of the op on every edge; 1 to 1000.
        step: Number of the round, from 0: which batches are taken.
        local_steps: Of each candidate.
        batch_size: See :class:`Amount`.
        weights: SGD.
        dp_aware: Clipping and noise as a regulariser; None without, and in private mode.
        sparse: Whether request and reply carry the weights of these paths only, and their moments.
    """

    candidates: Candidates
    step: CountOrZero
    batch_size: Count | None
    weights: SGD
    dp_aware: DPAware | None
    sparse: bool = False

    def released(self, action: str) -> Kinds:
        """A release in every step of each candidate."""
        if self.dp_aware is not None or self.batch_size is not None:
            raise ConfigError(
                "refused: a private client's noise and batches are those committed to; dp_aware "
                "and batch_size must be null."
            )
        return {"weights": (("train",), len(self.candidates) * self.local_steps)}

    def trained_by(self, rows: float) -> Training:
        """The steps on all candidates."""
        return Training(self.weights, len(self.candidates) * self.local_steps)


@asks("evaluate.candidates")
@dataclass(frozen=True, kw_only=True)
class RewardCandidates(AtSite):
    """``evaluate.candidates``: of paths through the supernet, or of the members of a pool.

    Attributes:
        candidates: Paths, see :class:`TrainCandidates`; None for a pool.
        network: What a pool is built from, which is measured as it was sent.
        training: Of a pool, which is measured by how it trains; nothing of the result is returned.
        sparse: Whether the request carries the weights of the paths only.
    """

    candidates: Candidates | None = None
    network: Description | None = None
    training: LocalTraining | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        """Check the ranges, that one of the three is given, and how many candidates there are."""
        super().__post_init__()
        if [self.candidates, self.network, self.training].count(None) != 2:
            raise ConfigError("candidates, network or training must be given, and only one.")
        if self.candidates is None and self.sparse:
            raise ConfigError("sparse=True is of candidates by their paths: a pool travels whole.")
        if self.candidates is None:
            members = self.pool.get("genotypes")
            count = len(members) if isinstance(members, list) else 0
            wanted = f"a list of 1 to {MOST_CANDIDATES}"
            check_range(1 <= count <= MOST_CANDIDATES, "genotypes", members, wanted)

    @property
    def pool(self) -> Description:
        """Description that a pool is built from; empty for paths."""
        return self.network or (self.training.network if self.training is not None else {})

    @property
    def count(self) -> int:
        """Number of candidates that are measured."""
        return len(self.candidates or self.pool["genotypes"])

    @property
    def described(self) -> Description | None:
        """Description of a pool that is measured as it was sent."""
        return self.network

    def released(self, action: str) -> Kinds:
        """One release of all rewards."""
        return {"rewards": (("validation",), 1)}

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps of the training of each candidate, if they are trained."""
        local = self.training
        return 1 if local is None else local.num_steps(records)

    def with_steps(self, steps: int) -> RewardCandidates:
        """The same request for so many steps of training, if there is any."""
        local = self.training
        return self if local is None else replace(self, training=local.with_steps(steps))


@asks("train.probe")
@dataclass(frozen=True, kw_only=True)
class Probe(AtSite):
    """``train.probe``: trials of a local search, or of the training of a network.

    Attributes:
        search: Of a supernet; None is ``training``.
        training: Of another network; None is ``search``.
        trials: What each changes in it; 1 to 1000.
        loss_bound: M, what a record's decrease of loss counts for at most, in nats.
    """

    search: LocalSearch | None
    training: LocalTraining | None
    trials: Annotated[list[Trial], Length(Between(1, MOST_TRIALS))]
    loss_bound: LossBound

    def __post_init__(self) -> None:
        """Check the ranges, and that one of the two is given."""
        super().__post_init__()
        if (self.search is None) == (self.training is None):
            raise ConfigError("search or training must be given, and not both.")

    def released(self, action: str) -> Kinds:
        """Every step of each trial, and its reward."""
        steps = len(self.trials) * self.amount.private_steps
        if self.search is not None:
            kinds = self.search.releases
        else:
            assert self.training is not None
            kinds = {"weights": (splits_of(self.training.split), 1)}
        trained = {kind: (splits, steps) for kind, (splits, _) in kinds.items()}
        return trained | {"rewards": (("validation",), len(self.trials))}

    def client_releases(self, action: str) -> Kinds:
        """The rewards."""
        return {"rewards": (SPLITS, len(self.trials))}

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps of each trial."""
        return self.trainings()[0].num_steps(records)

    def with_steps(self, steps: int) -> Probe:
        """The same probe for so many steps of each trial."""
        if self.search is not None:
            return replace(self, search=self.search.with_steps(steps))
        assert self.training is not None
        return replace(self, training=self.training.with_steps(steps))

    @property
    def amount(self) -> Amount:
        """Amount of training of each trial."""
        return self.trainings()[0].amount

    @property
    def described(self) -> Description | None:
        """Description of a derived network; None is the supernet."""
        return None if self.training is None else self.training.network

    def trainings(self) -> list[LocalSearch] | list[LocalTraining]:
        """Return what each trial does."""
        if self.search is not None:
            return [replace(self.search, weights=t.weights, alphas=t.alphas) for t in self.trials]
        assert self.training is not None
        return [
            replace(self.training, weights=t.weights, drop_path_prob=t.drop_path_prob)
            for t in self.trials
        ]


@asks("train.weights")
@dataclass(frozen=True, kw_only=True)
class Train(Locally):
    """``train.weights``.

    Attributes:
        local: What is done.
        validates: Whether the mean loss on validation records after it is told.
    """

    local: LocalTraining
    validates: bool = False

    @property
    def described(self) -> Description:
        """Description of the network."""
        return self.local.network

    def released(self, action: str) -> Kinds:
        """A release in every step."""
        self._check_unvalidated()
        return {"weights": (splits_of(self.local.split), self.local.amount.private_steps)}

    def client_releases(self, action: str) -> Kinds:
        """One update."""
        self._check_unvalidated()
        return {"weights": (SPLITS, 1)}

    def _check_unvalidated(self) -> None:
        if self.validates:
            raise ConfigError("refused: validates=True would tell a loss without noise.")

    def trained_by(self, rows: float) -> Training:
        """The training."""
        local = self.local
        # a server may send anything, and a site that refuses it still answers
        genotypes = local.network.get("genotypes")
        members = len(genotypes) if isinstance(genotypes, list) else 1
        steps = local.amount.most_steps(rows)
        return Training(local.weights, steps, local.proximal, members=max(1, members))


@asks("evaluate.model")
@dataclass(frozen=True, kw_only=True)
class Evaluate(AtSite):
    """``evaluate.model``: of a network on one of the splits.

    Attributes:
        network: What it is built from.
        split: The split's name.
        statistics_batch_size: In batches of how many train records batch norm's statistics are
            estimated anew before; None takes those that were sent, and so do private clients.
        with_scores: Whether clients also tell scores, and a histogram of the probabilities of the
            positive class; private ones never do.
    """

    network: Description
    split: str
    statistics_batch_size: Count | None = None
    with_scores: bool = False

    @property
    def described(self) -> Description:
        """Description of the network."""
        return self.network

    def released(self, action: str) -> Kinds:
        """One release of loss and accuracy."""
        return {"metrics": (splits_of(self.split), 1)}


@asks("evaluate.personalised")
@dataclass(frozen=True, kw_only=True)
class Personalise(Locally):
    """``evaluate.personalised``: metrics after local training."""

    local: LocalTraining


def decode(action: str, values: object) -> Settings:
    """Return the request of an action that a message's JSON values say.

    Raises:
        ConfigError: There is no such action, or the values are not such a request.
    """
    if action not in REQUESTS:
        raise unknown_choice("action", action, REQUESTS)
    request: Settings = parse(REQUESTS[action], values, key="")
    return request

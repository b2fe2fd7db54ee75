"""An empirical check of a private run: does the client release what the run commits to.

A run with these settings is begun, so that its own schedule, strategies and requests are audited,
whatever the algorithm. Then the real client answers one request of each kind many times, through
the entrance of every runtime, without records and with canaries: copies of one record whose
gradient is so large, in all layers at once, that clipping decides what is left of it. Of the
replies, which are what a server sees, ``privacy/audit_bounds.py`` tells

* whether every tensor carries the noise that was committed to, anew in every step;
* by how much one unit moves a release: by the clipping norm at most, and each unit by itself;
* how often units are drawn, and whether anew in every step.

With secure sums the replies are totals of the fewest sites that are summed, of which as many help
the server, and add nothing, as policies expect.

Main function: :func:`audit_run`.
"""

from __future__ import annotations

import io
import math
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from scipy.stats import norm  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.admission import admit, asked_kinds, description_of
from fednas_flwr.client.agreement import begin_sum, sums_of
from fednas_flwr.client.answer import answer
from fednas_flwr.client.client import Augmentation, Client
from fednas_flwr.client.making import make_client
from fednas_flwr.client.noised_measures import METRICS_NORM
from fednas_flwr.data.loaders import ClientData
from fednas_flwr.data.prepared import make_data
from fednas_flwr.data.statistics import largest_norm
from fednas_flwr.deploy.dry_run import own_folder
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.models.networks import given_genotype, supernet_space
from fednas_flwr.pipeline.beginning import begin
from fednas_flwr.pipeline.schedule import Schedule
from fednas_flwr.pipeline.stages import describe, retrain, start_search
from fednas_flwr.privacy.actions import ACTIONS, SPLIT_OF
from fednas_flwr.privacy.audit_bounds import (
    length_limits,
    rate_limit,
    shows_quarter,
    shows_twice,
    values_for_half,
    variance_limits,
)
from fednas_flwr.privacy.plan import KINDS, STATISTICS, PlannedRelease, release_key
from fednas_flwr.protocol.messages import Header, Reply, Request, decode_request, encode_reply
from fednas_flwr.protocol.requests import (
    Commit,
    Evaluate,
    Probe,
    Site,
    TellStatistics,
    TrainCandidates,
)
from fednas_flwr.protocol.secure_sum.masked_sum import MaskedSum
from fednas_flwr.protocol.states import MOMENTS, Layout, Packed, network_states, pack, unpack
from fednas_flwr.protocol.sum_encoding import MASKED, Sizes, Summands, sizes_of
from fednas_flwr.protocol.sum_requests import Summed, by_index
from fednas_flwr.runs.events import EventLog
from fednas_flwr.runs.numbers import EVENTS_FILE
from fednas_flwr.search.optimizer_step import no_moments
from fednas_flwr.search.pool import Pool
from fednas_flwr.settings import Config, DifferentialPrivacy, with_runtime
from fednas_flwr.settings.incompatible import searches
from fednas_flwr.settings.names import CLIENT, LARGEST_EPSILON, SPLITS
from fednas_flwr.settings.optimizers import SGD, Adam

MOMENTUM = 0.5  # of the audited steps, as Adam's in a search of all ops: two steps are g / 2 + g'
LOUD = 30.0  # clipping norms of a canary's gradient, at least
LEAST_DRAWN, MOST_CANARIES, SAMPLES = 16, 2048, 24  # of replies by the run's own rate
LEAST_REPLIES, MOST_REPLIES = 8, 200  # without canaries, and as many with them
LEAST_CANARIES, REPEATED = 8, 500  # of each client at first; values of two steps together
ROUNDING = 1e-3
FEW = 4  # records of a client in the run that is begun
QUIET = {"sparse": False, "drop_path_prob": 0.0}  # settings of audited requests
MOMENT_OF = {"weights": ("momentum_buffer", 1.0), "alphas": ("exp_avg", 0.5)}  # over a gradient
MOST_STEPS = 2000  # that are committed to of each kind
SLACK = 1.1  # of the variance: noise of secure sums is a little more than was committed to


@dataclass(frozen=True)
class Finding:
    """Findings about one kind of release.

    Attributes:
        release: Key of the planned release: stage, action, kind, splits.
        seen: What was measured, for people.
        faults: Deviations from the commitment.
        unseen: What could not be audited, or which fault could have passed.
    """

    release: str
    seen: str
    faults: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def audit_run(config: Config, *, confidence: float = 0.9999) -> list[Finding]:
    """Audit every kind of release of a private run; one finding for each, in their order.

    Args:
        config: With ``privacy=dp``, of clients that are simulated here. Ledgers are in a temporary
            folder: nothing is booked on real budgets.
        confidence: Probability with which no honest client is found to have a fault, strictly
            between 0 and 1.

    Raises:
        ConfigError: The run is not private, its clients' data lies on other machines, or the
            confidence is out of range.
        QuorumError: Clients refuse, as they would in the run.
    """
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy):
        raise ConfigError("privacy=none: there is no release to audit; set privacy=dp.")
    if config.runtime.name == "deployment":
        raise ConfigError(
            "runtime=deployment: only the sites have records; audit runtime=inline on data like "
            "theirs."
        )
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence:g}: expected a number between 0 and 1.")
    torch.set_num_threads(config.runtime.threads)
    with tempfile.TemporaryDirectory(prefix="fednas-audit-") as folder:
        schedule, asked = _recorded(with_runtime(config, time_limit=None), Path(folder, "run"))
        privacy = replace(privacy, epsilon=LARGEST_EPSILON, sites=None)
        config = replace(config, run_dir=str(Path(folder, "audit")), privacy=privacy)
        config = replace(config, stages=["search"], genotype=None)
        config = with_runtime(config, wire="float32")
        number = config.secure_sum.least(config.clients) if config.secure_sum else 1
        clients = _clients(config, number)
        miss = (1 - confidence) / max(1, len(schedule))
        findings: dict[str, Finding] = {}
        for request in {id(request): request for request in asked.values()}.values():
            of_request = [planned for planned in schedule if asked.get(planned.key) is request]
            exchange = _Exchange(config, clients, request, of_request)
            findings |= {found.release: found for found in _findings(exchange, miss)}
    never = "no request of the run has asked for it"
    return [
        findings.get(planned.key, Finding(planned.key, "", unseen=(never,))) for planned in schedule
    ]


class _AllAskedError(Exception):
    """Every kind of release of a stage was asked for."""


class _Recorder(InProcessGrid):
    """Clients that take one step where they are asked for many; keeps what they are asked.

    Attributes:
        asked: Of each kind of release the request that asks for most kinds at once, by key.
        awaited: The keys that end a stage when all of them were asked for.
    """

    def __init__(self, config: Config) -> None:
        """Make the clients, each with a few of its records: what they tell is declared."""
        super().__init__(ClientApp(), config.clients)
        privacy = config.privacy
        assert isinstance(privacy, DifferentialPrivacy)
        self._kinds = partial(asked_kinds, of_client=privacy.unit == CLIENT)
        self._clients = _clients(config, config.clients)
        self.asked: dict[str, Request] = {}
        self.awaited: set[str] = set()

    def answer(self, message: Message) -> Message:
        """Return a client's reply.

        Raises:
            _AllAskedError: It need not be given any more.
        """
        request = decode_request(message.metadata.message_type, message.content)
        if not ACTIONS[request.action].is_public:
            self.record(request)
            if self.awaited and self.awaited <= self.asked.keys():
                raise _AllAskedError
        settings = request.settings.with_steps(1)
        client = self._clients[request.header.client]
        parts = (client.data.train, client.data.validation, client.data.test)
        few = ClientData(*(replace(part, rows=part.rows[:FEW], persons=None) for part in parts))
        reply = answer(replace(client, data=few), replace(request, settings=settings))
        return Message(encode_reply(request.header, reply), reply_to=message)

    def record(self, request: Request) -> None:
        """Keep a request unless another one has asked for more kinds."""
        keys = [
            release_key(request.header.stage, request.action, kind, splits)
            for kind, (splits, _) in self._kinds(request).items()
        ]
        for key in keys:
            before = self.asked.get(key)
            if before is None or len(self._kinds(before)) < len(keys):
                self.asked[key] = request


def _recorded(config: Config, folder: Path) -> tuple[Schedule, dict[str, Request]]:
    """Return the schedule of a run, and a request for each kind of release by its key."""
    config = own_folder(config, folder)
    grid = _Recorder(config)
    with EventLog(Path(str(config.run_dir)) / EVENTS_FILE) as log:
        run = begin(config, grid, log, {}, earlier=[])
        keys = {planned.key: planned.stage for planned in run.schedule}

        def awaits(stage: str) -> bool:
            grid.awaited = {key for key, of in keys.items() if of == stage}
            return bool(grid.awaited)

        if awaits("search"):
            with suppress(_AllAskedError):
                start_search(run)
        genotype = given_genotype(config)
        if genotype is None and searches(config):
            space = supernet_space(run.config, run.prepared)
            genotype = space.random_genotype(torch.Generator().manual_seed(config.seed))
        description: dict[str, Any] = {}
        if awaits("retrain") or awaits("evaluate"):
            description = describe(run, genotype, None)
        if awaits("retrain"):
            with suppress(_AllAskedError):
                retrain(run, description, None)
        if awaits("evaluate"):
            assert isinstance(config.privacy, DifferentialPrivacy)
            settings = Evaluate(
                network=description, split="test", site=Site(config.privacy.data_set)
            )
            header = Header("", "evaluate", 0, 1, 0, "")
            grid.record(
                Request("evaluate.model", header, settings, statistics=run.cohort.statistics)
            )
        return run.schedule, grid.asked


def _clients(config: Config, number: int) -> list[Client]:
    """Return the first clients of a run; their records are not augmented."""
    data = make_data(config)
    networks: dict[str, nn.Module] = {}  # clients take turns
    made = [make_client(config, index, data=data, networks=networks) for index in range(number)]
    return [replace(client, augmentation=Augmentation(0, False, 0)) for client in made]


class _Exchange:
    """One request, which clients answer again and again in committed runs.

    Without canaries a client has no record, so that what it releases is noise; with n of them each
    split that is read has n units: copies of one record, or persons with two copies each.

    Attributes:
        planned: Of each kind of release that the replies tell.
        hidden: Of those that they do not tell.
        honest: Number of clients that do not help the server.
        by_client: Whether a client is one unit.
        is_probe: Whether it is asked for rewards of trainings.
        exact: Of each kind the contribution of one canary before it is clipped, in units of the
            clipping norm [d]; empty where nobody tells it without noise.
        layouts: Of each kind the tensors.
    """

    def __init__(
        self, config: Config, clients: list[Client], request: Request, schedule: Schedule
    ) -> None:
        """Choose the canary, and the states that are sent with the request."""
        guard = clients[0].guard
        assert guard is not None
        self._clients, self._request, self._schedule = clients, request, schedule
        self._data_set, self._records = guard.data_set, guard.allowed.records
        self.by_client = guard.allowed.unit == CLIENT
        self.is_probe = isinstance(request.settings, Probe)
        self.honest = len(clients) - (config.secure_sum.colluding if config.secure_sum else 0)
        self.planned = {own.kind: own for own in schedule if own.kind in self._told}
        self.hidden = [own for own in schedule if own.kind not in self._told]
        self._runs: dict[bool, str] = {}
        self._count, self._pool = 0, 1.0
        self.layouts: dict[str, Layout] = {}
        self._choose_canary()

    @property
    def _told(self) -> Collection[str]:
        return ("rewards",) if self.is_probe else KINDS

    @property
    def is_trained(self) -> bool:
        """Whether replies are trained models, whose moments give the gradients."""
        return ACTIONS[self._request.action].trains and not self.by_client

    @property
    def repeats(self) -> bool:
        """Whether the run asks for several steps at once, whose noise one reply tells together."""
        return self._steps > 1 and not (self.by_client or self.is_probe or self._draws_paths)

    @property
    def _draws_paths(self) -> bool:
        """Whether each step draws other paths."""
        local = getattr(self._request.settings, "local", None)
        return getattr(local, "paths", None) is not None

    @property
    def on_path(self) -> bool:
        """Whether only the values that a path computes with are released."""
        return self._draws_paths or isinstance(self._request.settings, TrainCandidates)

    def deviation(self, kind: str) -> float:
        """Return the committed noise of a reply's values, in units of the clipping norm."""
        planned = self.planned[kind]
        assert planned.noise_multiplier is not None
        return planned.noise_multiplier * (1.0 if planned.shared else math.sqrt(self.honest))

    def parts(self, kind: str, length: int) -> dict[str, slice]:
        """Return where the tensors of a kind of release lie in its values."""
        if kind not in self.layouts:
            return {kind: slice(0, length)}
        sizes = {name: math.prod(shape) for name, shape, _ in self.layouts[kind].entries}
        ends = list(accumulate(sizes.values()))
        return {n: slice(end - sizes[n], end) for n, end in zip(sizes, ends, strict=True)}

    def rate(self, kind: str) -> float:
        """Return the committed rate at which each unit is drawn."""
        return self.planned[kind].rate(self._records)

    def release(self, units: int, *, steps: int = 1, sampled: bool = False) -> dict[str, Tensor]:
        """Read the sums out of one reply, or total, by kind, in units of the clipping norm [d].

        Args:
            units: Canaries of each honest client.
            steps: How many releases are added up.
            sampled: Whether units are drawn at the run's own rate, and not all of them.
        """
        self._count += 1
        run, settings = self._committed(sampled), _fixed(self._request.settings, self._lr(units))
        clients = [self._holding(client, units) for client in self._clients]
        asked = replace(self._request, settings=settings.with_steps(steps))
        requests = [replace(asked, header=self._header(run, i)) for i in range(len(clients))]
        with redirect_stderr(io.StringIO()):  # one without records says that it cannot train
            alone = asked.summed is None
            reply = answer(clients[0], requests[0]) if alone else self._total(clients, requests)
        return self._values(reply, {k: self.rate(k) if sampled else 1.0 for k in self.planned})

    def _choose_canary(self) -> None:
        """Take a record of the client, with a label and weights by which it moves most.

        What the last layer's weights are multiplied by, the gradients of all other layers are, too.
        """
        client, settings = self._clients[0], self._request.settings
        kinds = asked_kinds(self._request, of_client=self.by_client)
        self._steps = max(steps for _, steps in kinds.values())
        if isinstance(settings, TrainCandidates):
            settings = replace(settings, candidates=settings.candidates[:1])
        if isinstance(settings, Probe):
            settings = replace(settings, trials=settings.trials[:2])
        self._request = replace(self._request, settings=settings)
        parts = (client.data.train, client.data.validation, client.data.test)
        split = next(part for part in parts if len(part))
        split = replace(split, persons=None, features=split.features[split.rows[:1]])
        if isinstance(settings, TellStatistics):
            split = replace(split, features=split.features * 1e6)  # beyond every range
        label, classes = parts[0].labels[parts[0].rows[:1]], len(client.class_names)
        trained, best = bool(self.planned.keys() & SPLIT_OF.keys()), -1.0
        others = [(label + i) % classes for i in range(min(classes, 4 if trained else 32))]
        if client.objective.multi_label:
            others = [label, 1 - label]
        for power in range(8) if trained else (4,):
            for other in others:
                canary = replace(split, labels=other, rows=torch.zeros(1, dtype=torch.long))
                self._canary, self._states = canary, self._sent(8.0**power)
                exact = self._without_noise()
                length = min((float(e.norm()) for e in exact.values()), default=0.0)
                if length > best:
                    best, found = length, (canary, self._states, exact)
            if best >= LOUD:
                break
        self._canary, self._states, self.exact = found
        self._request = replace(self._request, states=self._states)

    def _sent(self, scale: float) -> dict[str, Packed]:
        """Return states for the request: of a new network, its last layer's weights scaled."""
        client = self._clients[0]
        if isinstance(self._request.settings, TellStatistics):
            return {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = client.make_network(description_of(self._request))
        if isinstance(network, Pool):
            self._pool = math.sqrt(len(network))
        for module in network.modules():
            if isinstance(module, nn.Linear) and module.out_features == len(client.class_names):
                module.weight.data *= scale
        states = {name: tensors for name, tensors in network_states(network).items() if tensors}
        self.layouts = {name: Layout.of(tensors) for name, tensors in states.items()}
        if self.is_trained:
            states[MOMENTS] = no_moments(network)
            self.layouts[MOMENTS] = Layout.of(states[MOMENTS])
        sent = {*self._request.states, MOMENTS}
        return {name: pack(tensors) for name, tensors in states.items() if name in sent}

    def _without_noise(self) -> dict[str, Tensor]:
        """Return of each kind what one canary contributes, before it is clipped; empty if untold.

        By the real client, without privacy.
        """
        if isinstance(self._request.settings, TellStatistics):
            self._sizes: Sizes = {STATISTICS: {"float32": 3 * self._clients[0].num_columns}}
            return {}
        client = replace(self._holding(self._clients[0], 1, exact=True), guard=None, sums=None)
        settings = _fixed(self._request.settings, self._lr(1)).with_steps(1)
        header = self._header("", 0)
        asked = replace(self._request, header=header, settings=settings, states=self._states)
        reply = answer(client, replace(asked, summed=None))
        kinds = self.planned if self.by_client else reply.states
        self._sizes = {kind: sizes_of(reply.states)[kind] for kind in kinds if kind in reply.states}
        if self.is_probe:
            return {}
        return self._values(
            replace(reply, num_examples=1.0), dict.fromkeys(self.planned, 1.0), exact=True
        )

    def _lr(self, canaries: int) -> float:
        """Return a learning rate: of updates 1, where moments are told next to none.

        A probe with canaries moves so far that its rewards reach their bounds.
        """
        if self.is_probe:
            return 1e3 if canaries else 1e-30
        return 1.0 if self.by_client else 1e-30

    def _holding(self, client: Client, units: int, *, exact: bool = False) -> Client:
        """Return a client with so many canaries in each split that is read."""
        persons, rows = None, torch.zeros(8 if self.by_client and units else units).long()
        if client.data.train.persons is not None and not (self.by_client or exact):
            persons = torch.arange(units).repeat_interleave(2)
            rows = torch.zeros(len(persons)).long()
        whole = replace(self._canary, rows=rows, persons=persons)
        none = replace(whole, rows=rows[:0], persons=None if persons is None else persons[:0])
        firsts = {own.splits[0] for own in self._schedule}  # of two that are read together
        read = SPLITS if self.by_client else firsts
        return replace(client, data=ClientData(*(whole if s in read else none for s in SPLITS)))

    def _header(self, run: str, client: int) -> Header:
        header = self._request.header  # its round decides which paths are drawn
        return replace(
            header, run=run, phase=self._count, client=client, nonce=secrets.token_hex(8)
        )

    def _committed(self, sampled: bool) -> str:
        """Return a run in which all clients have committed to the releases."""
        if sampled not in self._runs:
            self._runs[sampled] = run = secrets.token_hex(8)
            planned = tuple(
                replace(own, steps=MOST_STEPS, batch_size=own.batch_size if sampled else None)
                for own in self._schedule
            )
            for index in range(len(self._clients)):
                self._commit(run, index, planned)
        return self._runs[sampled]

    def _commit(self, run: str, client: int, planned: tuple[PlannedRelease, ...]) -> None:
        settings, header = (
            Commit(data_set=self._data_set, releases=planned),
            self._header(run, client),
        )
        answer(self._clients[client], Request("query.commit", header, settings))

    def mixes_terms(self) -> bool:
        """Return whether sites are in one secure sum that have committed to other norms."""
        if self._request.summed is None:
            return False
        run, summed, contexts = secrets.token_hex(8), self._summed(), set()
        for index, share in enumerate((1.0, 0.5)):
            steps = [replace(own, steps=MOST_STEPS, batch_size=None) for own in self._schedule]
            norms = [replace(own, max_grad_norm=own.max_grad_norm * share) for own in steps]
            self._commit(run, index, tuple(norms))
            settings = _fixed(self._request.settings, self._lr(0)).with_steps(1)
            asked = replace(self._request, settings=settings, summed=summed)
            client = self._holding(self._clients[index], 0)
            reply = answer(client, replace(asked, header=self._header(run, index)))
            contexts.add(reply.properties["context"])
        return len(contexts) == 1

    def _summed(self) -> Summed:
        """Return new terms of a secure sum with room for all units."""
        assert self._request.summed is not None
        ranges = {
            own.kind: replace(own, batch_size=None).sum_range(self._records)
            for own in self._schedule
            if own.kind in self._request.summed.ranges
        }
        return Summed(secrets.token_hex(8), tuple(range(len(self._clients))), ranges)

    def _values(
        self, reply: Reply, rates: Mapping[str, float], *, exact: bool = False
    ) -> dict[str, Tensor]:
        """Return by kind the sums that a reply is made of, in units of the clipping norm [d]."""
        n, settings, values = reply.num_examples, self._request.settings, {}
        batches = {k: own.num_records(self._records) * rates[k] for k, own in self.planned.items()}
        for kind, planned in self.planned.items():
            norm = planned.max_grad_norm * (self._pool if kind == "weights" else 1.0)
            if kind == "metrics":
                client = self._clients[0]
                loss = reply.metrics["loss"] / (
                    2 * client.objective.guessing_loss(len(client.class_names))
                )
                told = torch.tensor([min(loss, 1.0) if exact else loss, reply.metrics["accuracy"]])
                value, scale = told, n / METRICS_NORM
            elif kind == "rewards":
                value = reply.states[kind]["float32"]
                scale = n / (
                    settings.loss_bound if isinstance(settings, Probe) else math.sqrt(len(value))
                )
            elif kind == STATISTICS:
                value = reply.states[kind]["float32"]
                scale = n / largest_norm(len(value) // 3)
            elif self.by_client:
                sent = self._states[kind]["float32"]
                value, scale = reply.states[kind]["float32"].double() - sent.double(), n / norm
            elif self.is_trained:
                moments = unpack(reply.states[MOMENTS], self.layouts[MOMENTS])
                moment, left = MOMENT_OF[kind]
                if kind == "alphas" and self._draws_paths:
                    left = 1.0  # Adam without a first moment
                tensors = [
                    moments[f"{kind}.{moment}.{name}"] for name, *_ in self.layouts[kind].entries
                ]
                value = torch.cat([tensor.flatten() for tensor in tensors])
                of = (
                    1.0
                    if exact
                    else batches[kind] / self.planned["weights"].num_records(self._records)
                )
                scale = n * of / (left * norm)
            else:
                first = ACTIONS[self._request.action].gradients_of[0]
                value = reply.states[kind]["float32"]
                scale = (1.0 if exact else batches[kind] / batches[first]) / norm
            values[kind] = value.double() * scale
        return values

    def _total(self, clients: Sequence[Client], requests: Sequence[Request]) -> Reply:
        """Return the reply of a secure sum's total; clients that help the server add zeros."""
        everybody, summed = tuple(range(len(clients))), self._summed()
        summands = Summands(self._request.action, self._sizes, summed, self._states)
        total, context = MaskedSum(everybody), b""
        boxes: dict[int, dict[int, bytes]] = {}
        for i, client in enumerate(clients):
            request = replace(requests[i], summed=summed)
            if i < self.honest:
                reply = answer(client, request)
                vectors = [reply.states[MASKED][dtype].numpy() for dtype in summands.lengths]
                boxes[i] = by_index(reply.properties["boxes"])
                context = bytes.fromhex(reply.properties["context"])
            else:
                assert client.guard is not None
                part = begin_sum(client, request, admit(client.guard, request))
                assert part is not None
                vectors = [np.zeros(length, dtype) for dtype, length in summands.lengths.items()]
                boxes[i] = part.mask(vectors)
            total.add(i, vectors)
        sites = {i: sums_of(client) for i, client in enumerate(clients)}
        signatures = {i: site.sign(context, everybody) for i, site in sites.items()}
        openings = {
            i: sites[i].open(
                context, everybody, signatures, {j: boxes[j][i] for j in boxes if j != i}
            )
            for i in range(len(clients) - self.honest + 1)
        }
        named = dict(zip(summands.lengths, total.unmask(openings), strict=True))
        return summands.decode(named, sites=len(clients))


def _fixed(value: Any, lr: float) -> Any:
    """Return settings by which a reply tells noised sums: nothing decays, is left out or drawn."""
    if isinstance(value, SGD):
        return SGD(lr, lr, MOMENTUM, 0.0, None)
    if isinstance(value, Adam):
        return Adam(lr if lr >= 1 else 0.0, 0.0)
    if isinstance(value, list | tuple):
        return type(value)(_fixed(own, lr) for own in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {field.name: _fixed(getattr(value, field.name), lr) for field in fields(value)}
    changed |= {name: quiet for name, quiet in QUIET.items() if name in changed}
    if "local_lrs" in changed:
        changed["local_lrs"] = dict.fromkeys(changed["local_lrs"], 0.0)
    return type(value)(**changed)


def _findings(exchange: _Exchange, miss: float) -> Iterator[Finding]:
    """Yield the finding of each kind that an exchange releases.

    Args:
        exchange: What clients are asked, again and again.
        miss: Largest chance of each kind that a fault is found in an honest client.
    """
    for own in exchange.hidden:
        yield Finding(own.key, "", unseen=("no reply tells it: rewards follow from it",))
    one, other = exchange.release(1), exchange.release(1)
    parts = {kind: exchange.parts(kind, len(value)) for kind, value in one.items()}
    each = miss / (2 * max(map(len, parts.values())) + 8)  # tests of a kind
    counts = [
        int((one[kind] != other[kind])[part].sum()) for kind in one for part in parts[kind].values()
    ]
    needed = values_for_half(miss=each) / min((count for count in counts if count), default=1)
    replies = 2 * math.ceil(min(max(needed, LEAST_REPLIES), MOST_REPLIES) / 2)
    planted = LEAST_REPLIES if exchange.is_probe else replies
    replies *= 2 if exchange.is_probe else 1  # noise is told by those without canaries alone
    units = 1 if exchange.by_client else LEAST_CANARIES
    while True:
        sights = {kind: _Sight(exchange, kind, parts[kind], replies, planted, each) for kind in one}
        if all(sight.is_shown(units) for sight in sights.values()):
            break
        if exchange.by_client and planted < MOST_REPLIES:
            planted, replies = 2 * planted, max(replies, 2 * planted)
        elif not exchange.by_client and units < MOST_CANARIES:
            units *= 2
        else:
            break
    without = [exchange.release(0) for _ in range(replies)]
    with_canaries = [exchange.release(units) for _ in range(planted)]
    doubled: list[dict[str, Tensor]] = []
    if exchange.repeats:
        least = min(len(value) for value in one.values())
        pairs = min(MOST_REPLIES // 2, max(2, math.ceil(REPEATED / least)))
        doubled = [exchange.release(0, steps=2) for _ in range(2 * pairs)]
    drawn: list[dict[str, Tensor]] = []
    canaries = max((sight.sampled for sight in sights.values()), default=0)
    if canaries:
        drawn = [exchange.release(canaries, sampled=True) for _ in range(SAMPLES)]
    mixed = ["sites that have committed to other norms are in one sum"] * exchange.mixes_terms()
    for kind, sight in sights.items():
        taken = [
            torch.stack([reply[kind] for reply in of]) if of else torch.zeros(0, len(one[kind]))
            for of in (without, with_canaries, doubled, drawn)
        ]
        found = sight.finding(*taken, units=units, canaries=canaries)
        yield replace(found, faults=(*mixed, *found.faults))


@dataclass
class _Sight:
    """Tests of one kind of release.

    Attributes:
        exchange: That releases it.
        kind: Its kind.
        parts: Where each tensor lies in its values.
        replies: Number without canaries.
        planted: Number with canaries, where all canaries are drawn.
        miss: Largest chance of each test that it finds a fault in an honest client.
    """

    exchange: _Exchange
    kind: str
    parts: Mapping[str, slice]
    replies: int
    planted: int
    miss: float

    def __post_init__(self) -> None:
        """Take the directions in which a canary moves each tensor [T, d]."""
        self.sigma = self.exchange.deviation(self.kind)
        self.exact = self.exchange.exact.get(self.kind)
        self.is_gradient = self.kind in SPLIT_OF and self.exact is not None

    @property
    def sampled(self) -> int:
        """Number of canaries to draw batches from at the run's rate; 0 if all are drawn."""
        rate = self.exchange.rate(self.kind)
        if not self.is_gradient or rate == 1:
            return 0
        return min(MOST_CANARIES, math.ceil(max(LEAST_DRAWN, 20 * self.sigma**2) / rate))

    def is_shown(self, units: int) -> bool:
        """Return whether units are found that move a release by twice the clipping norm.

        Of gradients also whether a sum is found that is clipped in the place of its units.
        """
        size = max(part.stop for part in self.parts.values())
        count = size if self.exact is None else len(self.parts)
        if self.exchange.is_probe:
            count = size * self.planted
        most, miss = self._most(units), self.miss
        summed = self.is_gradient and not self.exchange.by_client
        shown = not summed or shows_quarter(most, count, miss=miss)
        return shown and shows_twice(most, count, miss=miss)

    @property
    def _precision(self) -> float:
        """Square root of the number of replies that a mean's change is as sure as."""
        return 1 / math.sqrt(1 / self.replies + 1 / self.planted)

    def _most(self, units: int) -> float:
        """Return the largest length by which units move a release, over its values' deviation."""
        whole = units * self.exchange.honest / self.sigma
        if self.exchange.is_probe:  # each value is a release
            return whole * math.sqrt(self.planted * max(part.stop for part in self.parts.values()))
        return whole * self._precision

    def finding(
        self,
        without: Tensor,
        planted: Tensor,
        doubled: Tensor,
        drawn: Tensor,
        *,
        units: int,
        canaries: int,
    ) -> Finding:
        """Test the replies against the commitment.

        Args:
            without: Replies without canaries [replies, d].
            planted: Replies with canaries, where all canaries are drawn [replies, d].
            doubled: Sums of two releases without canaries [n, d]; there may be none.
            drawn: Replies with canaries drawn at the run's rate [n, d]; there may be none.
            units: Canaries of each client in ``planted``.
            canaries: Of each client in ``drawn``.
        """
        faults: list[str] = []
        unseen: list[str] = []
        noise = _differences(without) / self.sigma
        if not self.exchange.is_probe:
            noise = torch.cat([noise, _differences(planted) / self.sigma])
        change = (planted.mean(dim=0) - without.mean(dim=0)) / self.sigma
        # beside a path nothing is released; of all else everything is, whatever the records are
        moved = noise.any(dim=0) | (change != 0) | (not self.exchange.on_path)
        if dead := int(((noise == 0).all(dim=0) & moved).sum()):
            faults.append(f"{dead:,} of {int(moved.sum()):,} values have no noise")
        shares = self._noise(noise, moved, faults, unseen)
        if len(doubled):
            self._repeats(_differences(doubled)[:, moved] / self.sigma, faults, unseen)
        elif self.exchange.repeats:
            unseen.append("noise of several steps of one request")
        lengths = self._contribution(change, planted, moved, units, faults, unseen)
        seen = f"noise {shares}; {lengths}"
        if len(drawn):
            seen += f"; {self._rate(drawn, without.mean(dim=0), canaries, faults, unseen)}"
        key = self.exchange.planned[self.kind].key
        return Finding(key, seen, tuple(dict.fromkeys(faults)), tuple(unseen))

    def _noise(self, noise: Tensor, moved: Tensor, faults: list[str], unseen: list[str]) -> str:
        """Test the noise of each tensor [n, d], in the values that have moved [d]."""
        tested = {name: noise[:, part][:, moved[part]] for name, part in self.parts.items()}
        if self.exchange.is_probe and noise.shape[1] == 2:  # is it the same in two trials?
            tested["the difference of two trials"] = (noise[:, :1] - noise[:, 1:]) / math.sqrt(2)
        few, pairs = 0, self.replies // 2  # without canaries, whose layers may draw of their own
        lowest, highest, wrong = math.inf, 0.0, []
        for name, values in tested.items():
            if not values.numel():
                continue
            squares = float((values**2).sum())
            high = variance_limits(squares, values.numel(), miss=self.miss)[1]
            alone = values[:pairs]
            low = variance_limits(float((alone**2).sum()), alone.numel(), miss=self.miss)[0]
            share = math.sqrt(squares / values.numel())
            lowest, highest = min(lowest, share), max(highest, share)
            few += name in self.parts and values.numel() < values_for_half(miss=self.miss)
            if high < 1 or low > SLACK:
                wrong.append(f"{share:.2f} in {name}")
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            faults.append(f"noise of {', '.join(wrong[:3])}{more} where 1 was committed to")
        if few:
            unseen.append(f"half the noise in {few} of {len(tested)} tensors")
        return f"{lowest:.2f} to {highest:.2f} of that committed to in {len(tested)} tensors"

    def _repeats(self, noise: Tensor, faults: list[str], unseen: list[str]) -> None:
        """Test the noise of sums of two releases, which more than adds up where it is the same."""
        weights = (MOMENTUM, 1.0) if self.exchange.is_trained else (1.0, 1.0)
        alone, same = math.hypot(*weights) ** 2, sum(weights) ** 2
        variance = float((noise**2).mean()) / alone
        low, high = variance_limits(variance * noise.numel(), noise.numel(), miss=self.miss)
        if high < 1 or low > SLACK:
            faults.append(f"two steps together have {variance:.2f} of the variance of two noises")
        reach = variance_limits(same / alone * noise.numel(), noise.numel(), miss=self.miss)[0]
        if reach < 1.1 * SLACK:
            unseen.append("noise that is the same in the steps of one request")

    def _contribution(
        self,
        change: Tensor,
        planted: Tensor,
        moved: Tensor,
        units: int,
        faults: list[str],
        unseen: list[str],
    ) -> str:
        """Test by how much units move a release [d], over the noise's deviation."""
        most = self._most(units)
        scaled = change[moved] * self._precision
        if self.exchange.is_probe:
            scaled = planted.flatten() / self.sigma
        squares, count = float((scaled**2).sum()), len(scaled)
        if length_limits(squares, count, miss=self.miss)[0] > most * (1 + ROUNDING):
            faults.append(self._moves(squares, count, most))
        if self.exact is None:
            length = math.sqrt(max(0.0, squares - count)) / most
            if not self.is_shown(units):
                unseen.append("twice the contribution of a unit")
            return f"a unit moves it by {length:.2f} of what was committed to"
        shares = {n: self.exact[p] for n, p in self.parts.items() if self.exact[p].any()}
        along = [
            float(change[self.parts[n]] @ exact / exact.norm()) * self._precision
            for n, exact in shares.items()
        ]
        squares, count = sum(value**2 for value in along), len(along)
        low, high = length_limits(squares, count, miss=self.miss)
        length, whole = math.sqrt(max(0.0, squares - count)) / most, float(self.exact.norm())
        if low > most * (1 + ROUNDING):
            faults.append(self._moves(squares, count, most))
        if self.is_gradient and not self.exchange.by_client and high < min(1.0, whole) * most / 2:
            faults.append(f"{units} units move it by {length * units:.2f} norms: no sum over units")
        if not whole:
            unseen.append("what a unit contributes: no canary moves it")
        if self.is_gradient and whole < 2:
            unseen.append(f"no clipping: a canary has {whole:.2g} of the norm")
        if not self.is_shown(units):
            unseen.append("twice the contribution of a unit")
        reached = int((self.exact[moved] != 0).sum())
        return (
            f"a unit, of {whole:.3g} norms before it is clipped, moves it by {length:.2f}, in "
            f"{reached:,} of {int(moved.sum()):,} values"
        )

    @staticmethod
    def _moves(squares: float, count: int, most: float) -> str:
        length = math.sqrt(max(0.0, squares - count)) / most
        return f"a unit moves it by {length:.2f} of the clipping norm"

    def _rate(
        self,
        drawn: Tensor,
        centre: Tensor,
        canaries: int,
        faults: list[str],
        unseen: list[str],
    ) -> str:
        """Test how many units the batches of some replies have [n, d]."""
        assert self.exact is not None
        rate, total = self.exchange.rate(self.kind), canaries * self.exchange.honest
        n, whole = len(drawn), float(self.exact.norm())
        numbers = (drawn - rate * centre) @ self.exact / (whole * min(1.0, whole))
        quantile = float(norm.isf(self.miss))
        noise = self.sigma / min(1.0, whole)
        doubt = quantile * noise * math.sqrt(n * (1 + n / self.replies))
        found = float(numbers.sum())
        if rate_limit(found - doubt, total * n, miss=self.miss) > rate:
            faults.append(f"units are drawn at a rate of {found / (total * n):.3g} for {rate:.3g}")
        spread = float(numbers.var()) * (n - 1)
        expected = total * rate * (1 - rate) + noise**2
        if variance_limits(spread / expected, n - 1, miss=self.miss)[1] < 1 / SLACK:
            faults.append("the same units are drawn in several steps")
        mean = total * n * rate
        if mean < 2 * (doubt + quantile * math.sqrt(mean)):
            unseen.append("twice the rate")
        return f"rate {found / (total * n):.3g} for {rate:.3g}"


def _differences(replies: Tensor) -> Tensor:
    """Subtract replies in pairs, over sqrt(2): all but noise cancels out."""
    return (replies[1::2] - replies[::2]) / math.sqrt(2)

"""An empirical check of a private run: do clients release what the run commits to?

A run with these settings is begun, so that its own schedule, strategies and requests are audited,
whatever the algorithm. Then the real client answers one request of each kind many times, through
the same entrance as in every runtime, without records and with canaries. Canaries are copies of one
record whose gradient is so large, in all layers at once, that clipping decides what is left of it.
From the replies, as a server sees them, ``privacy/audit.py`` determines

* if every tensor carries the noise that was committed to, anew in every step;
* how far one unit moves a release: at most by the clipping norm, each unit on its own;
* how often units are drawn, and if they are drawn anew in every step.

With secure sums the replies are totals of the smallest number of sites that is summed. As many of
these sites as policies expect help the server and add nothing.

Main function: :func:`audit_run`.
"""

import io
import math
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.answer import admit, answer, asked_kinds, begin_sum
from fednas_flwr.client.client import Client
from fednas_flwr.client.making import make_client
from fednas_flwr.client.noised_measures import METRICS_NORM
from fednas_flwr.data import prepared
from fednas_flwr.data.loaders import ClientData
from fednas_flwr.data.statistics import vector_size
from fednas_flwr.deploy.dry_run import SteppedGrid, begun, described_at_random
from fednas_flwr.models.noised_scores import BINS
from fednas_flwr.pipeline.schedule import Schedule
from fednas_flwr.pipeline.stages import retrain, start_search
from fednas_flwr.privacy import audit, plan
from fednas_flwr.privacy.actions import ACTIONS, SPLIT_OF
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.messages import Header, Reply, Request, decode_request
from fednas_flwr.protocol.states import MOMENTS, Layout, Packed, network_states, pack, unpack
from fednas_flwr.protocol.sum_encoding import Sizes, Summands, sizes_of
from fednas_flwr.protocol.sum_requests import Summed, answer_sum, by_text
from fednas_flwr.search.candidate import Pool
from fednas_flwr.search.optimizer_step import no_moments
from fednas_flwr.server.secure_sums import MaskedSum, PendingSum
from fednas_flwr.settings import Config, with_runtime
from fednas_flwr.settings.names import CLIENT, LARGEST_EPSILON, SPLITS
from fednas_flwr.settings.optimizers import SGD, Adam

MOMENTUM = 0.5  # of the audited steps, as of Adam in a search of all ops: two steps are g / 2 + g'
LOUD = 30.0  # least norm of a canary's gradient, in clipping norms
SAMPLES = 24  # replies at the run's own rate
LEAST_REPLIES, MOST_REPLIES = 8, 200  # replies without canaries, and as many with them
LEAST_CANARIES, REPEATED = 8, 500  # per client at first; values of two steps together
QUIET = {"sparse": False, "drop_path_prob": 0.0}  # settings of audited requests
MOMENT_OF = {"weights": ("momentum_buffer", 1.0), "alphas": ("exp_avg", 0.5)}  # over a gradient
MOST_STEPS = 2000  # committed steps of each kind


def audit_run(config: Config, *, confidence: float = 0.9999) -> list[audit.Finding]:
    """Audit every kind of release of a private run; one finding for each, in their order.

    Args:
        config: Configuration with ``privacy=dp`` and clients that are simulated here. Ledgers are
            in a temporary folder: nothing is booked on real budgets.
        confidence: Probability that no fault is found in an honest client, strictly between 0 and
            1.

    Raises:
        ConfigError: The run is not private, its clients' data is on other machines, or the
            confidence is out of range.
        QuorumError: Clients refuse, as they would in the run.
    """
    privacy = config.dp
    if not privacy:
        raise ConfigError("privacy=none: there is no release to audit; set privacy=dp.")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence:g}: expected a number between 0 and 1.")
    torch.set_num_threads(config.runtime.threads)
    with tempfile.TemporaryDirectory(prefix="fednas-audit-") as folder:
        schedule, asked = _recorded(with_runtime(config, time_limit=None))
        privacy = replace(privacy, epsilon=LARGEST_EPSILON, sites=None)
        config = replace(config, run_dir=str(Path(folder, "audit")), privacy=privacy)
        config = replace(config, stages=["search"], genotype=None)
        config = with_runtime(config, wire="float32")
        number = config.secure_sum.least(config.clients) if config.secure_sum else 1
        clients = _clients(config, number)
        miss = (1 - confidence) / max(1, len(schedule))
        findings: dict[str, audit.Finding] = {}
        for request in {id(request): request for request in asked.values()}.values():
            of_request = [planned for planned in schedule if asked.get(planned.key) is request]
            exchange = _Exchange(config, clients, request, of_request)
            findings |= {found.release: found for found in _findings(exchange, miss)}
    never = "no request of the run has asked for it"
    return [
        findings.get(planned.key, audit.Finding(planned.key, "", unseen=(never,)))
        for planned in schedule
    ]


class _AllAskedError(Exception):
    """Raised once every kind of release of a stage was requested."""


class _Recorder(SteppedGrid):
    """Clients that take one step when asked for many; the grid keeps the requests.

    Attributes:
        asked: For each kind of release, by key, the request that asks for the most kinds at once.
        awaited: The keys that end a stage when all of them were asked for.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._kinds = partial(asked_kinds, of_client=config.by_client)
        self.asked: dict[str, Request] = {}
        self.awaited: set[str] = set()

    def answer(self, message: Message) -> Message:
        """Return a client's reply.

        Raises:
            _AllAskedError: The reply is not needed any more.
        """
        request = decode_request(message.metadata.message_type, message.content)
        if not ACTIONS[request.action].is_public:
            self.record(request)
            if self.awaited and self.awaited <= self.asked.keys():
                raise _AllAskedError
        return self.after(message, request, 1)

    def record(self, request: Request) -> None:
        """Keep a request unless another one asks for more kinds."""
        keys = [
            plan.release_key(request.header.stage, request.action, kind, splits)
            for kind, (splits, _) in self._kinds(request).items()
        ]
        for key in keys:
            if key not in self.asked or len(self._kinds(self.asked[key])) < len(keys):
                self.asked[key] = request


def _recorded(config: Config) -> tuple[Schedule, dict[str, Request]]:
    """Return the schedule of a run, and a request for each kind of release by its key."""
    with begun(config, _Recorder) as (run, grid):
        keys: dict[str, set[str]] = {}
        for planned in run.schedule:
            keys.setdefault(planned.stage, set()).add(planned.key)
        if "search" in keys:
            grid.awaited = keys["search"]
            with suppress(_AllAskedError):
                start_search(run)
        if "retrain" in keys or "evaluate" in keys:
            description = described_at_random(run)
        if "retrain" in keys:
            grid.awaited = keys["retrain"]
            with suppress(_AllAskedError):
                retrain(run, description, None)
        if "evaluate" in keys:
            common: dict[str, Any] = {"network": description, "data_set": config.private_data_set}
            metrics, scores = rq.Evaluate(**common, split="test"), rq.CountScores(**common)
            header, statistics = Header("", "evaluate", 0, 1, 0, ""), run.cohort.statistics
            for planned in [of for of in run.schedule if of.stage == "evaluate"]:
                summed = Summed("any", (0,), {planned.kind: 1.0} if planned.shared else {})
                settings = scores if planned.kind == "scores" else metrics
                asked = Request(planned.action, header, settings, statistics=statistics)
                grid.record(replace(asked, summed=summed if config.secure_sum else None))
        return run.schedule, grid.asked


def _clients(config: Config, number: int) -> list[Client]:
    """Return the first clients of a run; their records are not augmented."""
    data = prepared.make_data(config)
    networks: dict[str, nn.Module] = {}  # clients take turns
    made = [make_client(config, index, data=data, networks=networks) for index in range(number)]
    unchanged = {"crop_padding": 0, "flip": False, "cutout": 0}
    return [replace(client, augmentation=unchanged) for client in made]


class _Exchange:
    """One request, which clients answer repeatedly in committed runs.

    Without canaries a client has no record, so that its releases are noise. With n canaries each
    split that is read has n units: copies of one record, or persons with two copies each.

    Attributes:
        planned: Plans of the kinds of release that replies reveal.
        hidden: Plans of the kinds that they do not reveal.
        by_client: True if a client is one unit.
        is_probe: True if it asks for rewards of trainings.
        two_steps: Weights of the releases of two steps in one reply; None if the run asks for one
            step at a time, or the reply does not reveal them.
    """

    def __init__(
        self, config: Config, clients: list[Client], request: Request, schedule: Schedule
    ) -> None:
        """Choose the canary, and the states that are sent with the request."""
        guard = clients[0].private_guard
        self._clients, self._schedule = clients, schedule
        self._data_set, self._records = guard.data_set, guard.allowed.by_split
        self.by_client = guard.allowed.unit == CLIENT
        settings = request.settings
        if isinstance(settings, rq.TrainCandidates):
            settings = replace(settings, candidates=settings.candidates[:1])
        elif isinstance(settings, rq.Probe):
            settings = replace(settings, trials=settings.trials[:2])
        self._request = replace(request, settings=settings)
        self.is_probe = isinstance(settings, rq.Probe)
        self._draws_paths = getattr(getattr(settings, "local", None), "paths", None) is not None
        # True if replies are trained models, whose moments give the gradients
        self._is_trained = ACTIONS[request.action].trains and not self.by_client
        self._honest = len(clients) - (config.secure_sum.colluding if config.secure_sum else 0)
        kinds = ("rewards",) if self.is_probe else plan.KINDS
        self.planned = {planned.kind: planned for planned in schedule if planned.kind in kinds}
        self.hidden = [planned for planned in schedule if planned.kind not in kinds]
        steps = max(steps for _, steps in asked_kinds(request, of_client=self.by_client).values())
        self.two_steps: tuple[float, float] | None = None
        if steps > 1 and not (self.by_client or self.is_probe or self._draws_paths):
            self.two_steps = (MOMENTUM, 1.0) if self._is_trained else (1.0, 1.0)
        self._runs: dict[bool, str] = {}
        self._count, self._pool = 0, 1.0
        self._layouts: dict[str, Layout] = {}
        self._choose_canary()

    def parts(self, kind: str, length: int) -> dict[str, slice]:
        """Return the places of tensors in the values of a kind of release."""
        if kind not in self._layouts:
            return {kind: slice(0, length)}
        sizes = {name: math.prod(shape) for name, shape, _ in self._layouts[kind].entries}
        ends = list(accumulate(sizes.values()))
        return {n: slice(end - sizes[n], end) for n, end in zip(sizes, ends, strict=True)}

    def test(self, kind: str, parts: Mapping[str, slice], *, miss: float) -> audit.ReleaseTest:
        """Return the tests of a kind of release; each finds a wrong fault with chance ``miss``."""
        planned, exact = self.planned[kind], self._exact.get(kind)
        assert planned.noise_multiplier is not None
        return audit.ReleaseTest(
            planned.key,
            sigma=planned.noise_multiplier * (1.0 if planned.shared else math.sqrt(self._honest)),
            rate=planned.rate(self._records),
            honest=self._honest,
            parts=parts,
            exact=exact,
            is_gradient=kind in SPLIT_OF and exact is not None,
            is_probe=self.is_probe,
            by_client=self.by_client,
            on_path=self._draws_paths or isinstance(self._request.settings, rq.TrainCandidates),
            two_steps=self.two_steps,
            miss=miss,
        )

    def release(self, units: int, *, steps: int = 1, sampled: bool = False) -> dict[str, Tensor]:
        """Return the sums in one reply, or total, by kind, in units of the clipping norm [d].

        Args:
            units: Canaries of each honest client.
            steps: Number of releases that are added up.
            sampled: True if units are drawn at the run's own rate instead of all.
        """
        self._count += 1
        run = self._committed(sampled)
        clients = [self._holding(client, units) for client in self._clients]
        requests = [self._asked(run, i, units, steps=steps) for i in range(len(clients))]
        with redirect_stderr(io.StringIO()):  # without records it reports that it cannot train
            alone = self._request.summed is None
            reply = answer(clients[0], requests[0]) if alone else self._total(clients, requests)
        rates = {k: v.rate(self._records) if sampled else 1.0 for k, v in self.planned.items()}
        return self._values(reply, rates)

    def _asked(self, run: str, client: int, units: int, *, steps: int = 1) -> Request:
        """Return the request to a client that holds ``units`` canaries.

        Its learning rate is 1 for updates and next to 0 for moments; a probe with canaries moves so
        far that its rewards reach their bounds.
        """
        lr = 1.0 if self.by_client and not self.is_probe else 1e-30
        if self.is_probe and units:
            lr = 1e3
        settings = _fixed(self._request.settings, lr).with_steps(steps)
        return replace(self._request, header=self._header(run, client), settings=settings)

    def _choose_canary(self) -> None:
        """Choose a record of the client, with the label and weights at which it moves most.

        A factor of the last layer's weights also multiplies the gradients of all other layers.
        """
        client, settings = self._clients[0], self._request.settings
        parts = (client.data.train, client.data.validation, client.data.test)
        split = next(part for part in parts if len(part))
        split = replace(split, persons=None, features=split.features[split.rows[:1]])
        if isinstance(settings, rq.TellStatistics):
            split = replace(split, features=split.features * 1e6)  # beyond every range
        label, classes = parts[0].labels[parts[0].rows[:1]], len(client.inputs.class_names)
        trained, best = bool(self.planned.keys() & SPLIT_OF.keys()), -1.0
        others = [(label + i) % classes for i in range(min(classes, 4 if trained else 32))]
        if client.objective.multi_label:
            others = [label, 1 - label]
        if ends := client.inputs.target[2:]:
            others = [torch.full_like(label, end) for end in ends]
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
        self._canary, self._states, self._exact = found
        self._request = replace(self._request, states=self._states)

    def _sent(self, scale: float) -> dict[str, Packed]:
        """Return states for the request: a new network's, with its last layer's weights scaled."""
        client = self._clients[0]
        if isinstance(self._request.settings, rq.TellStatistics):
            return {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = client.make_network(self._request.network)
        if isinstance(network, Pool):
            self._pool = math.sqrt(len(network))
        classes = len(client.inputs.class_names)
        for module in network.modules():
            if isinstance(module, nn.Linear) and module.out_features == classes:
                module.weight.data *= scale
        states = {name: tensors for name, tensors in network_states(network).items() if tensors}
        self._layouts = {name: Layout.of(tensors) for name, tensors in states.items()}
        if self._is_trained:
            states[MOMENTS] = no_moments(network)
            self._layouts[MOMENTS] = Layout.of(states[MOMENTS])
        sent = {*self._request.states, MOMENTS}
        return {name: pack(tensors) for name, tensors in states.items() if name in sent}

    def _without_noise(self) -> dict[str, Tensor]:
        """Return one canary's contribution by kind, before it is clipped; empty if replies hide it.

        It is computed by the real client, without privacy.
        """
        self._sizes: Sizes = {}
        if isinstance(self._request.settings, rq.TellStatistics):
            features, num_columns = self._canary.features, self._clients[0].num_columns
            size = vector_size(features.shape[1], num_columns=num_columns)
            self._sizes = {plan.STATISTICS: {"float32": size}}
            return {}
        if isinstance(self._request.settings, rq.CountScores):
            self._sizes = {"scores": {"float32": 2 * BINS}}
            return {}
        client = replace(self._holding(self._clients[0], 1, exact=True), guard=None, sums=None)
        reply = answer(client, replace(self._asked("", 0, 1), states=self._states, summed=None))
        kinds = self.planned if self.by_client else reply.states
        self._sizes = {kind: sizes_of(reply.states)[kind] for kind in kinds if kind in reply.states}
        if self.is_probe:
            return {}
        rates = dict.fromkeys(self.planned, 1.0)
        return self._values(replace(reply, num_examples=1.0), rates, exact=True)

    def _holding(self, client: Client, units: int, *, exact: bool = False) -> Client:
        """Return a client with ``units`` canaries in each split that is read."""
        persons, rows = None, torch.zeros(8 if self.by_client and units else units).long()
        if client.data.train.persons is not None and not (self.by_client or exact):
            persons = torch.arange(units).repeat_interleave(2)
            rows = torch.zeros(len(persons)).long()
        whole = replace(self._canary, rows=rows, persons=persons)
        none = replace(whole, rows=rows[:0], persons=None if persons is None else persons[:0])
        firsts = {planned.splits[0] for planned in self._schedule}  # of splits read together
        read = SPLITS if self.by_client else firsts
        return replace(client, data=ClientData(*(whole if s in read else none for s in SPLITS)))

    def _header(self, run: str, client: int) -> Header:
        header = self._request.header  # the round decides which paths are drawn
        nonce = secrets.token_hex(8)
        return replace(header, run=run, phase=self._count, client=client, nonce=nonce)

    def _committed(self, sampled: bool) -> str:
        """Return the name of a run in which all clients have committed to the releases."""
        if sampled not in self._runs:
            self._runs[sampled] = run = secrets.token_hex(8)
            for index in range(len(self._clients)):
                self._commit(run, index, sampled=sampled)
        return self._runs[sampled]

    def _commit(self, run: str, client: int, *, sampled: bool = False, norms: float = 1.0) -> None:
        """Have a client commit to the releases, with the clipping norm multiplied by ``norms``."""
        planned = tuple(
            replace(
                planned,
                steps=MOST_STEPS,
                batch_size=planned.batch_size if sampled else None,
                max_grad_norm=planned.max_grad_norm * norms,
            )
            for planned in self._schedule
        )
        settings = rq.Commit(data_set=self._data_set, releases=planned)
        answer(self._clients[client], Request("query.commit", self._header(run, client), settings))

    def mixes_terms(self) -> bool:
        """Return True if sites with different committed norms take part in one secure sum."""
        if self._request.summed is None:
            return False
        run, summed, contexts = secrets.token_hex(8), self._summed(), set()
        for index, norms in enumerate((1.0, 0.5)):
            self._commit(run, index, norms=norms)
            asked = replace(self._asked(run, index, 0), summed=summed)
            reply = answer(self._holding(self._clients[index], 0), asked)
            contexts.add(reply.properties["context"])
        return len(contexts) == 1

    def _summed(self) -> Summed:
        """Return new terms of a secure sum with room for all units."""
        assert self._request.summed is not None
        ranges = {
            planned.kind: replace(planned, batch_size=None).sum_range(self._records)
            for planned in self._schedule
            if planned.kind in self._request.summed.ranges
        }
        return Summed(secrets.token_hex(8), tuple(range(len(self._clients))), ranges)

    def _values(
        self, reply: Reply, rates: Mapping[str, float], *, exact: bool = False
    ) -> dict[str, Tensor]:
        """Return the sums in a reply by kind, in units of the clipping norm [d]."""
        batches = {k: v.num_records(self._records) * rates[k] for k, v in self.planned.items()}
        values = {}
        for kind, planned in self.planned.items():
            if kind in SPLIT_OF:
                value, scale = self._gradient(reply, kind, batches, exact=exact)
                norm = planned.max_grad_norm * (self._pool if kind == "weights" else 1.0)
                values[kind] = value.double() * (scale / norm)
            else:
                value, norm = self._measured(reply, kind, exact=exact)
                values[kind] = value.double() * (reply.num_examples / norm)
        return values

    def _measured(self, reply: Reply, kind: str, *, exact: bool) -> tuple[Tensor, float]:
        """Return the means of a kind of release that is no gradient, and its clipping norm."""
        if kind == "metrics":
            client, accuracy = self._clients[0], reply.metrics["accuracy"]
            guessing = client.objective.guessing_loss(len(client.inputs.class_names))
            loss = reply.metrics["loss"] / (2 * guessing)
            return torch.tensor([min(loss, 1.0) if exact else loss, accuracy]), METRICS_NORM
        value, settings = reply.states[kind]["float32"], self._request.settings
        if kind in ("scores", plan.STATISTICS):  # sums
            return value / reply.num_examples, 1.0
        return value, settings.loss_bound if isinstance(settings, rq.Probe) else math.sqrt(
            len(value)
        )

    def _gradient(
        self, reply: Reply, kind: str, batches: Mapping[str, float], *, exact: bool
    ) -> tuple[Tensor, float]:
        """Return a gradient, update or moment in a reply, and its factor to a sum of gradients."""
        if self.by_client:
            sent = self._states[kind]["float32"].double()
            return reply.states[kind]["float32"].double() - sent, reply.num_examples
        if not self._is_trained:
            first = ACTIONS[self._request.action].gradients_of[0]
            return reply.states[kind]["float32"], 1.0 if exact else batches[kind] / batches[first]
        moment, left = MOMENT_OF[kind]
        if kind == "alphas" and self._draws_paths:
            left = 1.0  # Adam without a first moment
        moments = unpack(reply.states[MOMENTS], self._layouts[MOMENTS])
        names = [f"{kind}.{moment}.{name}" for name, *_ in self._layouts[kind].entries]
        share = batches[kind] / self.planned["weights"].num_records(self._records)
        value = torch.cat([moments[name].flatten() for name in names])
        return value, reply.num_examples * (1.0 if exact else share) / left

    def _total(self, clients: Sequence[Client], requests: Sequence[Request]) -> Reply:
        """Return the reply of a secure sum's total; clients that help the server add zeros."""
        everybody, summed = tuple(range(len(clients))), self._summed()
        summands = Summands(self._request.action, self._sizes, summed, self._states)
        pending = PendingSum(summands, MaskedSum(everybody))
        for i, client in enumerate(clients):
            request = replace(requests[i], summed=summed)
            if i < self._honest:
                pending.add(i, answer(client, request))
                continue
            helper = client.standardised(request.statistics) if request.statistics else client
            part = begin_sum(helper, admit(client.private_guard, request))
            assert part is not None
            vectors = [np.zeros(length, dtype) for dtype, length in summands.lengths.items()]
            pending.boxes[i] = by_text(part.mask(vectors))
            pending.total.add(i, vectors)
        sites = [client.part_of_sums for client in clients]
        signatures = [answer_sum(site, pending.sign_request())["signature"] for site in sites]
        asked = pending.open_requests(dict(enumerate(signatures)))
        helping = len(clients) - self._honest + 1
        return pending.unmask({i: answer_sum(sites[i], asked[i]) for i in range(helping)})


def _fixed(value: Any, lr: float) -> Any:
    """Return settings with which replies reveal noised sums: no decay, no dropping, no draws."""
    if isinstance(value, SGD):
        return SGD(lr, lr, MOMENTUM, 0.0, None)
    if isinstance(value, Adam):
        return Adam(lr if lr >= 1 else 0.0, 0.0)
    if isinstance(value, list | tuple):
        return type(value)(_fixed(part, lr) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {field.name: _fixed(getattr(value, field.name), lr) for field in fields(value)}
    changed |= {name: quiet for name, quiet in QUIET.items() if name in changed}
    if "local_lrs" in changed:
        changed["local_lrs"] = dict.fromkeys(changed["local_lrs"], 0.0)
    return type(value)(**changed)


def _findings(exchange: _Exchange, miss: float) -> Iterator[audit.Finding]:
    """Yield the finding for each kind that an exchange releases.

    Args:
        exchange: The exchange, which is repeated.
        miss: Largest probability, for each kind, that a fault is found in an honest client.
    """
    for planned in exchange.hidden:
        yield audit.Finding(planned.key, "", unseen=("no reply tells it: rewards follow from it",))
    one, other = exchange.release(1), exchange.release(1)
    parts = {kind: exchange.parts(kind, len(value)) for kind, value in one.items()}
    each = miss / (2 * max(map(len, parts.values())) + 8)  # tests of a kind
    counts = [
        int((one[kind] != other[kind])[part].sum()) for kind in one for part in parts[kind].values()
    ]
    tests = {kind: exchange.test(kind, parts[kind], miss=each) for kind in one}
    amounts = _amounts(exchange, tests.values(), [count for count in counts if count], miss=each)
    drawn = SAMPLES if amounts.canaries else 0
    # sums of two steps, enough values of each kind; none if replies hide them
    pairs = min(MOST_REPLIES // 2, max(2, math.ceil(REPEATED / min(map(len, one.values())))))
    doubled = 0 if exchange.two_steps is None else 2 * pairs
    samples = [
        [exchange.release(0) for _ in range(amounts.replies)],
        [exchange.release(amounts.units) for _ in range(amounts.planted)],
        [exchange.release(0, steps=2) for _ in range(doubled)],
        [exchange.release(amounts.canaries, sampled=True) for _ in range(drawn)],
    ]
    mixed = ["sites that have committed to other norms are in one sum"] * exchange.mixes_terms()
    for kind, test in tests.items():
        test.faults += mixed
        none = torch.zeros(0, len(one[kind]))
        stacked = [torch.stack([reply[kind] for reply in of]) if of else none for of in samples]
        yield test.finding(amounts, *stacked)


def _amounts(
    exchange: _Exchange, tests: Collection[audit.ReleaseTest], counts: Sequence[int], *, miss: float
) -> audit.Amounts:
    """Return numbers of replies and canaries that reveal faults, within the limits on them.

    Args:
        exchange: The exchange.
        tests: Tests of each kind of release.
        counts: Number of values with noise in each tensor that has any.
        miss: Error probability of each test.
    """
    needed = audit.values_for_half(miss=miss) / min(counts, default=1)
    replies = 2 * math.ceil(min(max(needed, LEAST_REPLIES), MOST_REPLIES) / 2)
    amounts = audit.Amounts(replies, replies, 1 if exchange.by_client else LEAST_CANARIES)
    if exchange.is_probe:  # noise is estimated from replies without canaries alone
        amounts = replace(amounts, replies=2 * replies, planted=LEAST_REPLIES)
    while not all(test.is_shown(amounts) for test in tests):
        if exchange.by_client and amounts.planted < MOST_REPLIES:
            more = 2 * amounts.planted
            amounts = replace(amounts, planted=more, replies=max(amounts.replies, more))
        elif not exchange.by_client and amounts.units < audit.MOST_CANARIES:
            amounts = replace(amounts, units=2 * amounts.units)
        else:
            break
    return replace(amounts, canaries=max((test.sampled for test in tests), default=0))

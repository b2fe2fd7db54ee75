"""An empirical check of a private search: what its releases really tell about planted records.

The real verb of client 0 answers every request; the auditor, who sees what the server sees, plants
canaries with gradients of its making (``canaries.py``) and guesses which of them are there. Two
audits, each with the most that it could have shown:

* **one run, many canaries** (Steinke, Nasr and Jagielski 2023): the composed search's own steps and
  rate. Its bound assumes nothing about the mechanism and is low: a client without noise or without
  clipping is caught, one with half its noise is not.
* **many runs, one canary** (Nasr et al. 2023): single releases of two records that pull apart, all
  drawn. Its bound is tight for Gaussian noise, which it assumes: half the noise is caught, and
  so is a sum that is clipped in place of its records.

With secure sums the auditor sees what a server sees that as many sites help as policies expect: of
the fewest sites that are summed these add nothing, neither records nor noise, and the others answer
with real keys, masks and openings. Their total is what is audited, by the epsilon that is claimed
of it.

Main function: :func:`audit_search`.
"""

from __future__ import annotations

import math
import secrets
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fednas_flwr.builders.algorithms import search_batch
from fednas_flwr.builders.clients import make_client
from fednas_flwr.builders.data import make_data
from fednas_flwr.clients.admission import admit
from fednas_flwr.clients.answer import answer
from fednas_flwr.clients.client import Client
from fednas_flwr.clients.summed import begin_sum, sums_of
from fednas_flwr.config import Config, DifferentialPrivacy, FNASSettings
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Header, Reply, Request
from fednas_flwr.exchange.requests import Commit, Site, TakeGradients
from fednas_flwr.exchange.secure_sum.server import MaskedSum
from fednas_flwr.exchange.states import Layout, network_states, pack, unpack
from fednas_flwr.exchange.sum_requests import Summed, by_index
from fednas_flwr.exchange.summands import MASKED, Summands
from fednas_flwr.names import PRV
from fednas_flwr.privacy.accounting import prv_epsilon
from fednas_flwr.privacy.audit import (
    audit_steps,
    gaussian_epsilon_lower_bound,
    plan_many_runs,
    plan_one_run,
)
from fednas_flwr.privacy.noise import SecureGenerator
from fednas_flwr.privacy.renyi import Release, poisson_rate
from fednas_flwr.search_spaces.space import Supernet
from fednas_flwr.stages.canaries import LAYER, Canaries, beside, direction, with_canaries
from fednas_flwr.stages.schedule import make_schedule
from fednas_flwr.verbs import SUPERNET

VERB = "train.weight_gradient"
MOST_STEPS = 20  # of the one run: more take time, and claim more than can be shown
MOST_CANARIES = 4096
MOST_RUNS = 20_000
NUM_RECORDS = 64  # real ones, beside the many canaries
LARGE, SMALL = 1e5, 1e3  # gradients before clipping: both far above the network's own


@dataclass(frozen=True)
class Finding:
    """Findings of one of the two audits.

    Attributes:
        seen: What was done and guessed, for people.
        assumption: What the bound takes for granted, for people.
        epsilon: The lower bound.
        claim: The epsilon that is claimed of the same releases.
        largest: The largest bound that this setting could have given: of a client without noise.
        shows_half: Whether a client with half its noise would have failed, in 999 of 1,000 audits;
            None where it is not expected to.
    """

    seen: str
    assumption: str
    epsilon: float
    claim: float
    largest: float
    shows_half: bool | None = None

    @property
    def refutes(self) -> bool:
        """True if the claim is refuted."""
        return self.epsilon > self.claim

    @property
    def is_conclusive(self) -> bool:
        """True if a wrong claim could have been refuted."""
        return self.largest > self.claim and self.shows_half is not False


@dataclass(frozen=True)
class Audit:
    """Findings of both audits.

    Attributes:
        findings: Of the one run, and of the many runs.
        delta: Of all bounds and claims.
        confidence: With which all bounds hold together.
    """

    findings: tuple[Finding, ...]
    delta: float
    confidence: float


def audit_search(config: Config, *, confidence: float = 0.99) -> Audit:
    """Audit the weight steps of a private search on client 0.

    Numbers of steps, canaries and runs follow from what is claimed: as many as it takes to show
    more, up to the constants of this module.

    Args:
        config: With ``algorithm=dp_fnas``; the one run has at most ``rounds`` steps. Ledgers are in
            a temporary folder: nothing is booked on real budgets.
        confidence: With which all bounds hold together, strictly between 0 and 1.

    Raises:
        ConfigError: The configuration is not of DP-FNAS or gives no noise multiplier, or the
            confidence is out of range.
    """
    algorithm, privacy = config.algorithm, config.privacy
    if not isinstance(algorithm, FNASSettings) or not isinstance(privacy, DifferentialPrivacy):
        raise ConfigError(f"algorithm={algorithm.name} cannot be audited: set algorithm=dp_fnas.")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence:g}: expected a number between 0 and 1.")
    algorithm = replace(algorithm, fused=False, local_steps=1, evaluate_every=0)
    sigma = privacy.weights.noise_multiplier or _calibrated_noise(config)
    weights = replace(privacy.weights, noise_multiplier=sigma, epsilon=None)
    privacy = replace(privacy, epsilon=1e6, sites=None, metrics_noise_multiplier=None)
    privacy = replace(privacy, statistics_noise_multiplier=None)
    privacy = replace(privacy, weights=weights, alphas=weights)
    config = replace(config, stages=["search"], genotype=None, wire="float32")
    each = (1 + confidence) / 2  # of two bounds
    with tempfile.TemporaryDirectory() as folder:
        one, many = (
            replace(
                config,
                run_dir=str(Path(folder, name)),
                algorithm=replace(algorithm, batch_size=batch_size),
                privacy=replace(privacy, rate=rate, micro_batch_size=micro_batch_size),
            )
            for name, batch_size, rate, micro_batch_size in (
                ("one", algorithm.batch_size, privacy.rate, privacy.micro_batch_size),
                ("many", None, None, 2),  # all records, of which there are two at most
            )
        )
        findings = (
            _audit_one_run(one, sigma, search_batch(config), each),
            _audit_many_runs(many, sigma, each),
        )
    return Audit(findings, delta=privacy.delta, confidence=confidence)


def _audit_one_run(
    config: Config, sigma: float, batch_size: float | None, confidence: float
) -> Finding:
    """Guess about many canaries of one run, beside which there are real records."""
    clients, delta = _clients(config)
    assert clients[0].gate is not None
    rate = poisson_rate(batch_size, clients[0].gate.num_records(("train",)))
    plan = plan_one_run(
        lambda steps: prv_epsilon([Release(sigma, rate, steps)], delta),
        sample_rate=rate,
        most_steps=min(config.rounds, MOST_STEPS),
        most_canaries=MOST_CANARIES,
        delta=delta,
        confidence=confidence,
    )
    canaries = Canaries(range(plan.num_canaries), [LARGE] * plan.num_canaries)
    planted = _Planted(config, clients, canaries, num_records=NUM_RECORDS, num_steps=plan.num_steps)
    result = audit_steps(
        lambda step, included: planted.release(included),
        generator=SecureGenerator(),
        num_steps=plan.num_steps,
        num_canaries=plan.num_canaries,
        guesses_in=plan.guesses_in,
        guesses_out=plan.guesses_out,
        delta=delta,
        confidence=confidence,
    )
    return Finding(
        f"one run of {plan.num_steps} step{'s' * (plan.num_steps > 1)} at rate {rate:.3g}, "
        f"{planted.seen}{plan.num_canaries} canaries: {result.num_right} of {result.num_guesses} "
        "guesses right",
        "for any mechanism",
        epsilon=result.epsilon,
        claim=planted.claim,
        largest=plan.largest,
    )


def _audit_many_runs(config: Config, sigma: float, confidence: float) -> Finding:
    """Tell whether a canary is there, from releases in which one other record pulls against it.

    Where records are clipped the two cancel out. Where their sum is, the canary, being much larger,
    turns it round.
    """
    clients, delta = _clients(config)
    plan = plan_many_runs(
        noise_multiplier=sigma, most_runs=MOST_RUNS, delta=delta, confidence=confidence
    )
    runs, canaries = plan.runs_per_world, Canaries([0, 0], [LARGE, -SMALL])
    planted = _Planted(config, clients, canaries, num_records=0, num_steps=2 * runs)
    told = {True: 0, False: 0}
    for _ in range(runs):
        for present in told:
            score = float(planted.release(torch.tensor([present, True]))[0])
            told[present] += score > -0.5 * planted.contribution
    epsilon = gaussian_epsilon_lower_bound(
        true_positives=told[True],
        false_negatives=runs - told[True],
        false_positives=told[False],
        true_negatives=runs - told[False],
        delta=delta,
        confidence=confidence,
    )
    return Finding(
        f"{2 * runs} runs of 1 step at rate 1, {planted.seen}one canary is seen in {told[True]} of "
        f"{runs} runs that have it, and in {told[False]} of {runs} that do not",
        "if the noise is Gaussian",
        epsilon=epsilon,
        claim=prv_epsilon([Release(sigma, 1.0, 1)], delta),
        largest=plan.largest,
        shows_half=plan.shows_half,
    )


def _calibrated_noise(config: Config) -> float:
    """Return the noise multiplier of the weights that a run with these settings would calibrate."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, run_dir=folder)
        gate = make_client(config, 0, data=make_data(config), networks={}).gate
        assert gate is not None
        schedule = make_schedule(config, [gate.allowed.records], done={})
    found = [release.noise_multiplier for release in schedule if release.noise_name == "weights"]
    assert found[0] is not None
    return found[0]


def _clients(config: Config) -> tuple[list[Client], float]:
    """Return client 0, with secure sums the fewest clients of a sum, and their delta."""
    least = config.secure_terms.least(config.clients) if config.secure_sum else 1
    data = make_data(config)
    clients = [make_client(config, index, data=data, networks={}) for index in range(least)]
    if clients[0].objective.multi_label:
        raise ConfigError(
            "an audit plants records of one class each, but these can have several labels: audit "
            "the same settings on data with one class per record."
        )
    assert clients[0].gate is not None
    return clients, clients[0].gate.allowed.delta


class _Planted:
    """Clients with canaries in their network, in one committed run; the first has them as records.

    Attributes:
        claim: The epsilon of all its steps that the first client answers to the commitment.
        contribution: The norm of a canary's clipped gradient.
        seen: What the server sees, for people.
    """

    def __init__(
        self,
        config: Config,
        clients: list[Client],
        canaries: Canaries,
        *,
        num_records: int,
        num_steps: int,
    ) -> None:
        """Plant, and commit to ``num_steps``."""
        client = clients[0]
        privacy, gate, classes = config.privacy, client.gate, len(client.class_names)
        assert isinstance(privacy, DifferentialPrivacy)
        assert gate is not None
        shared: dict[str, nn.Module] = {}  # clients take turns
        self._clients = [
            replace(
                own,
                make_network=lambda described: with_canaries(
                    client.make_network(described), canaries, num_classes=classes
                ),
                networks=shared,
            )
            for own in clients
        ]
        network = self._clients[0].network({"name": SUPERNET})
        assert isinstance(network, Supernet)
        states = {name: tensors for name, tensors in network_states(network).items() if tensors}
        self._states = {name: pack(tensors) for name, tensors in states.items()}
        self._layout = Layout.of(states["weights"])

        train, factors = client.data.train, [1.0] * classes
        if client.objective.class_factors is not None:
            factors = client.objective.class_factors.tolist()
        x = torch.zeros(1, *train.features.shape[1:], device=client.device)
        label, self._direction_C = direction(network.train(), x, factors=factors)
        self.contribution = factors[label] * privacy.weights.max_grad_norm
        self._columns, self._num_records = canaries.columns, min(num_records, len(train))
        self._train = beside(
            train, num_records=num_records, num_marks=len(canaries.columns), label=label
        )

        config = replace(config, rounds=num_steps)
        schedule = make_schedule(config, [gate.allowed.records], done={})
        planned = tuple(release for release in schedule if release.kind == "weights")
        self._settings = TakeGradients(
            step=0,
            local_steps=1,
            local_lrs={"weights": 1.0},
            batch_size=None,
            order=1,
            inner_lr=1.0,
            site=Site(privacy.data_set),
        )
        self._run, self._round = secrets.token_hex(8), 0
        commitment = Commit(privacy.data_set, planned)
        answered = answer(self._clients[0], Request("query.commit", self._header(0), commitment))
        claim = answered.facts["epsilon"][PRV]["train"]
        self.claim = math.inf if claim is None else claim
        for own in self._clients[1:]:
            if own.gate is not None:
                own.gate.commit(self._run, planned)
        self._colluding = config.secure_terms.colluding if config.secure_sum else 0
        self._range = max(own.sum_range(gate.allowed.records) for own in planned)
        self.seen = ""
        if config.secure_sum:
            self.seen = f"totals of {len(clients)} clients, {self._colluding} with the server, "

    def release(self, included: Tensor) -> Tensor:
        """Return the products of one noised sum with every canary's direction [M].

        Args:
            included: Which canaries are in the train part, bool [M].
        """
        self._round += 1
        kept = torch.cat([torch.ones(self._num_records, dtype=torch.bool), included])
        rows = self._train.rows
        held = [rows[kept], *[rows[: self._num_records]] * (len(self._clients) - 1)]
        clients = [
            replace(own, data=replace(own.data, train=replace(self._train, rows=part)))
            for own, part in zip(self._clients, held, strict=True)
        ]
        reply = answer(clients[0], self._request(0)) if len(clients) == 1 else self._total(clients)
        noised_CK = unpack(reply.states["weights"], self._layout)[LAYER].double()
        return (self._direction_C @ noised_CK)[list(self._columns)]

    def _total(self, clients: list[Client]) -> Reply:
        """Return the reply of a secure sum's total; the clients that help the server add zeros."""
        everybody = tuple(range(len(clients)))
        summed = Summed(secrets.token_hex(8), everybody, {"weights": self._range})
        summands = Summands(VERB, {"weights": self._layout.sizes}, summed, self._states)
        total, context = MaskedSum(everybody), b""
        boxes: dict[int, dict[int, bytes]] = {}
        for i, client in enumerate(clients):
            request = replace(self._request(i), summed=summed)
            if i < len(clients) - self._colluding:
                reply = answer(client, request)
                vectors = [reply.states[MASKED][dtype].numpy() for dtype in summands.lengths]
                boxes[i] = by_index(reply.facts["boxes"])
                context = bytes.fromhex(reply.facts["context"])
            else:
                assert client.gate is not None
                part = begin_sum(client, request, admit(client.gate, request))
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
            for i in range(self._colluding + 1)
        }
        named = dict(zip(summands.lengths, total.unmask(openings), strict=True))
        return summands.decode(named, sites=len(clients))

    def _request(self, client: int) -> Request:
        return Request(VERB, self._header(client), self._settings, self._states)

    def _header(self, client: int) -> Header:
        return Header(self._run, "search", self._round, 1, client, secrets.token_hex(8))

"""An empirical check of a private search: what one run really tells about planted records.

Canaries, mislabelled records of client 0, are in its train part or not by the toss of a coin. The
real verb answers every step; the auditor, who sees what the server sees, guesses the coins, and the
number of right guesses bounds epsilon from below (``privacy.audit``).
"""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fednas_flwr.builders.clients import make_client
from fednas_flwr.builders.data import make_data
from fednas_flwr.builders.networks import supernet_space
from fednas_flwr.clients.answer import answer
from fednas_flwr.clients.client import Client
from fednas_flwr.config import Config, DifferentialPrivacy, FNASSettings
from fednas_flwr.data.loaders import Split
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Header, Request
from fednas_flwr.exchange.requests import Commit, Site, TakeGradients
from fednas_flwr.exchange.states import Packed, load_states, network_states, pack
from fednas_flwr.names import PRV, REFERENCE
from fednas_flwr.privacy.audit import AuditResult, audit_steps
from fednas_flwr.privacy.noise import SecureGenerator
from fednas_flwr.search.descent import make_sgd
from fednas_flwr.search.objective import CLASSIFICATION
from fednas_flwr.search_spaces.space import Supernet
from fednas_flwr.stages.schedule import make_schedule, private_stage
from fednas_flwr.verbs import SUPERNET


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        result: Guesses and the lower bound on epsilon.
        claim: The epsilon of the client's train part for the audited steps, at the same delta.
    """

    result: AuditResult
    claim: float


def audit_search(config: Config, *, num_canaries: int, confidence: float = 0.95) -> Audit:
    """Run the weight steps of a private search on client 0 and guess who was in.

    Args:
        config: With ``algorithm=dp_fnas``; ``rounds`` is the number of steps. The search runs in a
            temporary folder and books nothing on real budgets.
        num_canaries: How many train records become canaries; half of them are guessed about.
        confidence: With which the bound holds.

    Raises:
        ConfigError: The configuration is not of DP-FNAS, or client 0 has too few records.
    """
    algorithm, privacy = config.algorithm, config.privacy
    if not isinstance(algorithm, FNASSettings) or not isinstance(privacy, DifferentialPrivacy):
        raise ConfigError(f"algorithm={algorithm.name} cannot be audited: set algorithm=dp_fnas.")
    if privacy.weights.noise_multiplier is None:
        raise ConfigError("privacy.weights.noise_multiplier=null: an audit needs the number.")
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            config,
            algorithm=replace(algorithm, fused=False, local_steps=1, evaluate_every=0),
            privacy=replace(privacy, epsilon=1e5, sites=None, metrics_noise_multiplier=None),
            run_dir=folder,
            stages=["search"],
            genotype=None,
        )
        return _audit(config, num_canaries, confidence)


def _audit(config: Config, num_canaries: int, confidence: float) -> Audit:
    algorithm, privacy = config.algorithm, config.privacy
    assert isinstance(algorithm, FNASSettings)
    assert isinstance(privacy, DifferentialPrivacy)
    data = make_data(config)
    client = make_client(config, 0, data=data, networks={})
    train = client.data.train
    if not 4 <= num_canaries <= len(train):
        raise ConfigError(
            f"canaries={num_canaries}: expected 4 to {len(train)}, the train records of client 0."
        )
    assert client.gate is not None
    schedule = make_schedule(config, [client.gate.allowed.records], done={})
    run = secrets.token_hex(8)
    commit = Commit(privacy.data_set, tuple(schedule))
    committed = answer(client, Request("query.commit", _header(run, 0), commit))

    rows = train.rows[:num_canaries]
    canaries = replace(train, labels=_mislabelled(train, rows), rows=rows)
    supernet = client.network({"name": SUPERNET})
    states = {name: pack(tensors) for name, tensors in network_states(supernet).items() if tensors}
    auditor = supernet_space(replace(config, engine=REFERENCE), data[0]).supernet()
    auditor.to(client.device)
    (vector,) = states["weights"].values()
    optimizer = make_sgd([vector], algorithm.weights)
    private = private_stage(config, schedule, "search")
    assert private is not None
    asked = TakeGradients(
        step=0,
        local_steps=1,
        local_lrs={"weights": algorithm.weights.lr},
        batch_size=None,
        order=1,
        inner_lr=algorithm.weights.lr,
        site=Site(private.data_set, private.micro_batch_size),
    )

    def release(step: int, included: Tensor) -> Tensor:
        rows = torch.cat([canaries.rows[included], train.rows[num_canaries:]])
        own = replace(client.data, train=replace(canaries, rows=rows))
        request = Request("train.weight_gradient", _header(run, step + 1), asked, states)
        reply = answer(replace(client, data=own), request)
        (noised,) = reply.states["weights"].values()
        vector.grad = noised / reply.num_examples
        optimizer.step()
        return noised

    result = audit_steps(
        release,
        lambda step: _decorrelated(
            _clipped_gradients(client, auditor, states, canaries, privacy),
            ridge=0.1 * privacy.weights.max_grad_norm**2,
        ),
        generator=SecureGenerator(),
        num_steps=config.rounds,
        num_canaries=num_canaries,
        guesses_in=num_canaries // 4,
        guesses_out=num_canaries // 4,
        delta=client.gate.allowed.delta,
        confidence=confidence,
    )
    return Audit(result, claim=committed.facts["epsilon"][PRV]["train"])


def _clipped_gradients(
    client: Client,
    supernet: Supernet,
    states: dict[str, Packed],
    canaries: Split,
    privacy: DifferentialPrivacy,
) -> Tensor:
    """Return every canary's clipped gradient of the weights at the server's state, [M, D].

    By torch.func, and so without the code that is audited.
    """
    load_states(supernet, states)
    supernet.train()
    weights = {name: weight.detach() for name, weight in supernet.weights().items()}
    x, y = canaries.batch(torch.arange(len(canaries)), client.device)

    def loss(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(supernet, weights, (record[None],))
        return CLASSIFICATION.plain_losses(logits, label[None]).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=16)(weights, x, y)
    gradients_MD: Tensor = (
        torch.cat([g.flatten(1) for g in gradients.values()], dim=1).double().cpu()
    )
    scales_M1 = privacy.weights.max_grad_norm / gradients_MD.norm(dim=1, keepdim=True)
    return gradients_MD.mul_(scales_M1.clamp(max=1.0))


def _decorrelated(gradients_MD: Tensor, *, ridge: float) -> Tensor:
    """Return vectors [M, D] whose products with a sum of gradients estimate which are in it.

    Ridge regression, ``(G G' + ridge I)^-1 G``: gradients of one network are much alike, and the
    product with one of them tells little more than how many canaries are in.
    """
    gram_MM = gradients_MD @ gradients_MD.T
    gram_MM.diagonal().add_(ridge)
    vectors_MD: Tensor = torch.linalg.solve(gram_MM, gradients_MD)
    return vectors_MD


def _mislabelled(split: Split, rows: Tensor) -> Tensor:
    """Return the labels with those of some rows moved on by one class."""
    labels = split.labels.clone()
    labels[rows] = (labels[rows] + 1) % (int(labels.max()) + 1)
    return labels


def _header(run: str, server_round: int) -> Header:
    return Header(run, "search", server_round, 1, 0, secrets.token_hex(8))

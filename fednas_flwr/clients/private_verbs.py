"""The verbs of private mode: what leaves is a noised, booked release, or public (DESIGN.md, 4.4).

``PUBLIC_FACTS`` and ``RELEASES`` list every field of a reply, and :func:`check_fields` stops any
other. :func:`admit` refuses without network or records what the policy does not allow. Each verb
then builds what it needs without data, lets the gate refuse, rehearses on a made-up record, and
only then reads records, inside :meth:`ReleaseGate.release`: a request that failed on some records
and not on others would tell which are there.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.release import Admission, ReleaseGate
from fednas_flwr.clients.verbs import STATES_OF, SUPERNET, identity, make_reply, request_supernet
from fednas_flwr.data.loaders import Split
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.states import Tensors, network_states
from fednas_flwr.privacy.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.privacy.policy import show
from fednas_flwr.search.settings import SGD
from fednas_flwr.search.training import Batch, clip_gradients, make_sgd, periodic_gradients

# What may leave beside header, layout digests and num_examples, which are public: facts that do
# not depend on the records, and noised releases. What a schedule costs, and how much of it the
# budget covers, follow from ledger, policy and schedule alone.
PUBLIC_FACTS = {
    "query.describe": {
        *("client", "tag", "hardware", "versions", "input_shape", "feature_names", "class_names"),
        *("splits", "data_set", "budget", "secure_noise", "spent"),
    },
    "query.commit": {"epsilon", "covered_steps"},
}
RELEASES = {
    "train.weight_gradient": {"weights"},
    "train.alpha_gradient": {"alphas"},
    "train.gradients": {"weights", "alphas"},
    "train.weights": {"weights"},
    "evaluate.model": {"loss", "accuracy"},
}
SPLIT_OF = {"weights": "train", "alphas": "validation"}  # what each state's gradient reads
KIND_OF = {"train.weights": "weights", "evaluate.model": "metrics"}  # of what reads settings' split
METRICS_BATCH = 256
LARGEST_MICRO_BATCH = 1024
METRICS_NORM = math.sqrt(2)  # of a record's (loss / bound, correct), both from 0 to 1
LARGEST_NUMBER = 1e30  # of rates and weights that a request gives: fits float32


def admit(
    gate: ReleaseGate,
    request: Request,
    network: nn.Module | None = None,
    *,
    supernet_norm: str | None = None,
) -> dict[str, Admission]:
    """Return what each kind of release of a request is admitted as; empty if it releases nothing.

    Called before a site loads its records, before a verb, and by the verb with its network.

    Args:
        gate: The site's.
        request: The request.
        network: What it is about, once that is built.
        supernet_norm: Before that, how the run's supernet normalises.

    Raises:
        ConfigError: There is no such private verb, or the policy refuses the request.
    """
    verb, settings = request.verb, request.settings
    if verb not in PRIVATE_VERBS:
        raise unknown_choice("private verb", verb, PRIVATE_VERBS)
    with _before_reading(request):
        if verb == "query.describe":
            gate.check_public(verb, gate.data_set)
            return {}
        if verb == "query.commit":
            gate.check_public(verb, settings["data_set"])
            gate.check_schedule(settings["schedule"])
            return {}
        if verb in STATES_OF:
            kinds = {state: (SPLIT_OF[state],) for state in STATES_OF[verb]}
        else:
            kinds = {KIND_OF[verb]: tuple(settings["split"].split("+"))}
        return {
            kind: gate.admit(
                request,
                kind,
                splits=splits,
                steps=1 if kind == "metrics" else settings["local_steps"],
                num_values=_num_values(network, kind),
                batch_norm=(
                    _means_batch_norm(request, supernet_norm)
                    if network is None
                    else _has_batch_norm(network)
                ),
            )
            for kind, splits in kinds.items()
        }


def describe(client: Client, request: Request) -> Reply:
    """``query.describe``: who the client is, and what its policy declares of its data."""
    gate = _gate(client)
    allowed = gate.allowed
    facts = identity(client) | {
        "splits": dict(allowed.records),
        "data_set": gate.data_set,
        "budget": {"epsilon": allowed.epsilon, "delta": allowed.delta},
        "secure_noise": gate.is_secure,
        "spent": gate.spent(),
    }
    return Reply(num_examples=gate.num_records(tuple(allowed.records)), facts=facts)


def commit(client: Client, request: Request) -> Reply:
    """``query.commit``: keep the run's schedule of releases; tell its cost and what is covered."""
    gate = _gate(client)
    with _before_reading(request):
        schedule = request.settings["schedule"]
        covered_steps = gate.covered_steps(schedule)
        gate.commit(request.header, schedule)
        facts = {"epsilon": gate.epsilons(request.header), "covered_steps": covered_steps}
    return Reply(num_examples=gate.num_records(tuple(gate.allowed.records)), facts=facts)


def gradients(client: Client, request: Request) -> Reply:
    """``train.weight_gradient``, ``train.alpha_gradient`` and, fused, ``train.gradients``.

    Noised sums over Poisson batches of per-record gradients, each clipped (DP-FNAS, arXiv
    2110.11025, Eq. 3 and 4). ``num_examples`` is the public expected batch size; fused, the sum of
    the alphas is scaled to that of the weights.
    """
    gate, settings, states = _gate(client), request.settings, STATES_OF[request.verb]

    def clipped_sum(state: str, x: Tensor, y: Tensor) -> Tensors:
        terms: dict[str, Any] = {"loss": record_losses}
        terms["max_norm"] = admissions[state].terms.max_grad_norm
        if state == "weights":
            return clipped_gradient_sum(supernet, x, y, parameters=supernet.weights(), **terms)
        return clipped_alpha_gradient_sum(supernet, x, y, alphas=supernet.alphas(), **terms)

    with _before_reading(request):
        supernet = request_supernet(client, request).train()
        admissions = admit(gate, request, supernet)
        micro_batch_size = _micro_batch_size(settings)
        local_lrs = {state: _number(settings["local_lrs"], state) for state in states}
        for state in states:
            _rehearse(client, partial(clipped_sum, state), micro_batch_size, state)

    def noised(state: str) -> tuple[Tensors, float]:
        split, admission = client.split(SPLIT_OF[state]), admissions[state]
        sums = gate.release(
            admission,
            len(split),
            partial(_sum_over, client, split, micro_batch_size, partial(clipped_sum, state)),
        )
        return {n: total.to(client.device) for n, total in sums.items()}, admission.batch_size

    sums, batch_size = periodic_gradients(
        lambda: {state: noised(state) for state in states},
        {"weights": supernet.weights(), "alphas": supernet.alphas()},
        steps=settings["local_steps"],
        local_lrs=local_lrs,
    )
    return make_reply(batch_size, sums, {})


def weights(client: Client, request: Request) -> Reply:
    """``train.weights``: the weights of a network after local steps of DP-SGD.

    Abadi et al. (2016), arXiv 1607.00133, Alg. 1, with momentum on the noised gradients. Every
    step is a release of its own; the weights follow from the releases. ``clip_norm`` bounds the
    noised mean, beside the clipping of each record.
    """
    gate, settings = _gate(client), request.settings

    def clipped_sum(x: Tensor, y: Tensor) -> Tensors:
        return clipped_gradient_sum(
            network,
            x,
            y,
            loss=loss,
            parameters=parameters,
            max_norm=admission.terms.max_grad_norm,
        )

    with _before_reading(request):
        network = client.network(settings["network"], request.states).train()
        admission = admit(gate, request, network)["weights"]
        split = client.split(settings["split"])
        micro_batch_size = _micro_batch_size(settings)
        drop_path_prob = _number(settings, "drop_path_prob")
        network.drop_path_prob = drop_path_prob  # type: ignore[assignment]
        loss = _with_auxiliary(_number(settings, "auxiliary_weight"))
        given = settings["weights"]
        rates = {n: None if given[n] is None else _number(given, n) for n in given}
        parameters = dict(network.named_parameters())
        sgd = SGD(**rates)  # type: ignore[arg-type]
        optimizer = make_sgd(parameters.values(), sgd)
        _rehearse(client, clipped_sum, micro_batch_size, settings["network"], drop_path_prob)

    for _ in range(settings["local_steps"]):
        noised = gate.release(
            admission, len(split), partial(_sum_over, client, split, micro_batch_size, clipped_sum)
        )
        for name, parameter in parameters.items():
            parameter.grad = (noised[name] / admission.batch_size).to(parameter)
        clip_gradients(optimizer, sgd.clip_norm)
        optimizer.step()
    optimizer.zero_grad()
    states = {name: state for name, state in network_states(network).items() if state}
    return make_reply(gate.num_records(settings["split"].split("+")), states, {})


def model(client: Client, request: Request) -> Reply:
    """``evaluate.model``: noised loss and accuracy over the declared number of records.

    One release of the sum of (loss up to a public bound, correct or not) over all records.
    """
    gate, settings = _gate(client), request.settings
    bound = 2 * math.log(max(2, len(client.class_names)))
    with _before_reading(request):
        network = client.network(settings["network"], request.states).eval()
        admission = admit(gate, request, network)["metrics"]
        split = client.split(settings["split"])
        measure = partial(_metrics_sum, network, bound=bound)
        _rehearse(client, measure, METRICS_BATCH, settings["network"])
    scale = METRICS_NORM / admission.terms.max_grad_norm

    def clipped_sum(rows: Tensor) -> Tensors:
        total = torch.zeros(2, dtype=torch.float64)
        for part in torch.split(rows, METRICS_BATCH) if len(rows) else ():
            total += _metrics_sum(network, *split.batch(part, client.device), bound=bound)
        return {"metrics": total / scale}

    noised = gate.release(admission, len(split), clipped_sum)["metrics"]
    loss, accuracy = (float(value) * scale / admission.batch_size for value in noised)
    metrics = {"loss": loss * bound, "accuracy": accuracy}
    return Reply(num_examples=admission.batch_size, metrics=metrics)


PRIVATE_VERBS: dict[str, Callable[[Client, Request], Reply]] = {
    "query.describe": describe,
    "query.commit": commit,
    "train.weight_gradient": gradients,
    "train.alpha_gradient": gradients,
    "train.gradients": gradients,
    "train.weights": weights,
    "evaluate.model": model,
}


def check_fields(verb: str, reply: Reply) -> None:
    """Raise RuntimeError when a reply has a field that may not leave."""
    facts, releases = PUBLIC_FACTS.get(verb, set()), RELEASES.get(verb, set())
    leaving = set(reply.states) | set(reply.metrics)
    if not (set(reply.facts) <= facts and leaving <= releases and set(reply.digests) <= leaving):
        raise RuntimeError(f"{verb} must not return {sorted({*reply.facts, *leaving})}")


@contextmanager
def _before_reading(request: Request) -> Iterator[None]:
    """Refuse what cannot be computed; inside no record is read, so that the reason may be told.

    The ledger's RuntimeError and OSError are the site's own affair.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"refused, the settings do not fit {request.verb}: {type(error).__name__}: "
            f"{str(error)[:200]}."
        ) from error


def _rehearse(
    client: Client, computation: Callable[[Tensor, Tensor], object], size: int, *chosen: object
) -> None:
    """Compute on a full micro-batch of zeros, of the last class, shaped like the client's records.

    Once for everything that the server has chosen and on which success could depend, memory
    included: no computation on records takes more.
    """
    key = json.dumps([size, *chosen])
    if key in client.rehearsed:
        return
    x = torch.zeros(size, *client.data.train.features.shape[1:], device=client.device)
    y = torch.full((size,), len(client.class_names) - 1, device=client.device)
    try:
        computation(x, y)
    except RuntimeError as error:  # of torch
        raise ValueError(error) from error
    client.rehearsed.add(key)


def _number(settings: Mapping[str, Any], name: str) -> float:
    """Return a setting that must be a number, as float."""
    value = settings[name]
    if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
        raise ConfigError(f"refused, {name}={show(value)} is no number up to {LARGEST_NUMBER:g}.")
    return float(value)


def _micro_batch_size(settings: Mapping[str, Any]) -> int:
    size = settings["micro_batch_size"]
    if type(size) is not int or not 1 <= size <= LARGEST_MICRO_BATCH:
        limit = f"an integer from 1 to {LARGEST_MICRO_BATCH}"
        raise ConfigError(f"refused, micro_batch_size={show(size)} is not {limit}.")
    return size


@torch.no_grad()
def _metrics_sum(network: nn.Module, x: Tensor, y: Tensor, *, bound: float) -> Tensor:
    """Return the sum over records of (loss / bound, correct), each from 0 to 1; float64 [2].

    A loss that is not finite counts as the bound.
    """
    logits = network(x)
    logits = logits[0] if isinstance(logits, tuple) else logits
    losses = functional.cross_entropy(logits, y, reduction="none").double()
    losses = losses.nan_to_num(nan=bound).clamp(0, bound) / bound
    correct = (logits.argmax(1) == y).double()
    return torch.stack([losses.sum(), correct.sum()]).cpu()


def _gate(client: Client) -> ReleaseGate:
    assert client.gate is not None  # answer() chooses these verbs by it
    return client.gate


def _sum_over(
    client: Client,
    split: Split,
    micro_batch_size: int,
    clipped_sum: Callable[[Tensor, Tensor], Tensors],
    rows: Tensor,
) -> Tensors:
    """Return the clipped sum over some rows, of which one micro-batch is in memory at a time."""
    totals: Tensors = {}
    for part in torch.split(rows, micro_batch_size) if len(rows) else (rows,):
        sums = clipped_sum(*_private_batch(client, split, part))
        totals = {name: totals[name] + s for name, s in sums.items()} if totals else sums
    return totals


def _private_batch(client: Client, split: Split, rows: Tensor) -> Batch:
    """Return the augmented batch of some rows; what is drawn for a record, nobody can foresee."""
    x, y = split.batch(rows, client.device)
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    return (client.augmented(x, generator) if len(rows) else x), y


def record_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each record's cross-entropy [B]."""
    return functional.cross_entropy(logits, labels, reduction="none")


def _with_auxiliary(weight: float) -> Callable[[Tensor | tuple[Tensor, Tensor], Tensor], Tensor]:
    """Return the loss [B] of a network that may have an auxiliary head, as in ``train_epoch``."""

    def losses(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)
        total = record_losses(logits, labels)
        return total if auxiliary is None else total + weight * record_losses(auxiliary, labels)

    return losses


def _num_values(network: nn.Module | None, kind: str) -> int:
    """Return how many values a release of one kind has, 1 where that is not known yet."""
    if network is None or kind == "metrics":
        return 1 if network is None else 2
    return sum(tensor.numel() for tensor in network_states(network)[kind].values())


def _means_batch_norm(request: Request, supernet_norm: str | None) -> bool:
    """Return whether a request describes a network that normalises over a batch."""
    described = {} if request.verb in STATES_OF else request.settings["network"]
    if described.get("name", SUPERNET["name"]) == SUPERNET["name"]:
        return supernet_norm == "batch"
    return described.get("norm") == "batch" or described["name"] == "mobilenet_v2"


def _has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())

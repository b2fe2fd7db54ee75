"""The verbs of private mode: nothing leaves but noised releases, booked before, and public facts.

``PUBLIC_FACTS`` and ``RELEASES`` list every field of a reply, and :func:`check_fields` stops any
other. :func:`admit` refuses without network or records what the policy does not allow. Each verb
then builds what it needs without data, lets the gate refuse, rehearses on a made-up record, and
only then reads records, inside :meth:`ReleaseGate.release`: a request that failed on some records
and not on others would tell which are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.local_training import clipped_decreases, validation_losses
from fednas_flwr.clients.noised_candidates import (
    candidate_training,
    noised_rewards,
    num_candidates,
)
from fednas_flwr.clients.noised_paths import path_training
from fednas_flwr.clients.noised_training import (
    SPLIT_OF,
    before_reading,
    gate_of,
    local_training,
    noised_gradient,
    number,
    rehearse,
    whole_number,
)
from fednas_flwr.clients.release import Admission, ReleaseGate
from fednas_flwr.clients.replies import make_reply, only_changed
from fednas_flwr.clients.verbs import STATES_OF, SUPERNET, identity, latency, request_supernet
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.states import Tensors, network_states
from fednas_flwr.names import BATCH
from fednas_flwr.privacy.policy import show
from fednas_flwr.search.settings import LEAST_LOSS_BOUND, NORMED_NETWORKS
from fednas_flwr.search.training import periodic_gradients

# What may leave beside header, layout digests and num_examples, which are public: facts that do
# not depend on the records, and noised releases. What a schedule costs, and how much of it the
# budget covers, follow from ledger, policy and schedule alone.
PUBLIC_FACTS = {
    "query.describe": {
        *("client", "tag", "hardware", "versions", "input_shape", "feature_names", "class_names"),
        *("splits", "data_set", "budget", "secure_noise", "spent"),
    },
    "query.commit": {"epsilon", "covered_steps"},
    "query.latency": {"latency"},  # of layers on made-up inputs
    "train.search": {"changed"},  # follows from the released states
}
RELEASES = {
    "train.weight_gradient": {"weights"},
    "train.alpha_gradient": {"alphas"},
    "train.gradients": {"weights", "alphas"},
    "train.search": {"weights", "alphas"},
    "train.candidate": {"weights"},
    "train.probe": {"rewards"},
    "train.weights": {"weights"},
    "evaluate.candidates": {"rewards"},
    "evaluate.model": {"loss", "accuracy"},
}
OF_SUPERNETS = ("train.search", "train.candidate", "evaluate.candidates")
METRICS_BATCH = 256
METRICS_NORM = math.sqrt(2)  # of a record's (loss / bound, correct), both from 0 to 1
NUMBERS_OF = {"metrics": 2, "rewards": 1}  # values of a release that are no network's
LARGEST_TRIALS = 1000
TRIAL_SETTINGS = {"weights", "alphas", "drop_path_prob"}  # not what is read, booked or rehearsed


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
    with before_reading(request):
        if verb == "query.describe":
            gate.check_public(verb, gate.data_set)
            return {}
        if verb == "query.latency":
            gate.check_public(verb, settings["data_set"])
            return {}
        if verb == "query.commit":
            gate.check_public(verb, settings["data_set"])
            gate.check_schedule(settings["schedule"])
            return {}
        return {
            kind: gate.admit(
                request,
                kind,
                splits=splits,
                steps=steps,
                num_values=_num_values(request, network, kind),
                batch_norm=(
                    _means_batch_norm(request, supernet_norm)
                    if network is None
                    else _has_batch_norm(network)
                ),
            )
            for kind, (splits, steps) in _asked_kinds(request).items()
        }


def _asked_kinds(request: Request) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return what a request releases: by kind the splits that it reads, and how many times."""
    verb, settings = request.verb, request.settings
    if verb == "evaluate.model":
        return {"metrics": (tuple(settings["split"].split("+")), 1)}
    if verb == "evaluate.candidates":
        num_candidates(settings)
        return {"rewards": (("validation",), 1)}
    if verb == "train.candidate":
        local_steps = whole_number(settings, "local_steps", largest=10**6)
        return {"weights": (("train",), num_candidates(settings) * local_steps)}
    steps = settings["local_steps"]
    if verb in STATES_OF:
        return {state: ((SPLIT_OF[state],), steps) for state in STATES_OF[verb]}
    if verb == "train.weights":
        return {"weights": (tuple(settings["split"].split("+")), steps)}
    if verb == "train.search":
        states = ("weights",) if settings.get("warm_up") is True else SPLIT_OF
        return {state: ((SPLIT_OF[state],), steps) for state in states}
    trials = _num_trials(settings)
    local_steps = trials * whole_number(settings, "local_steps", largest=10**6)
    searches = settings["network"] == SUPERNET
    states = SPLIT_OF if searches else {"weights": settings["split"]}
    kinds: dict[str, tuple[tuple[str, ...], int]] = {
        state: (tuple(split.split("+")), local_steps) for state, split in states.items()
    }
    return kinds | {"rewards": (("validation",), trials)}


def _num_trials(settings: Mapping[str, Any]) -> int:
    """Return how many trials a probe asks for; they may differ in ``TRIAL_SETTINGS`` only."""
    trials = settings["trials"]
    if not isinstance(trials, list) or not 1 <= len(trials) <= LARGEST_TRIALS:
        raise ConfigError(f"refused, trials={show(trials)} are not 1 to {LARGEST_TRIALS}.")
    for trial in trials:
        if not isinstance(trial, dict) or not set(trial) <= TRIAL_SETTINGS:
            known = ", ".join(sorted(TRIAL_SETTINGS))
            raise ConfigError(f"refused, a trial={show(trial)} may set nothing but {known}.")
    return len(trials)


def describe(client: Client, request: Request) -> Reply:
    """``query.describe``: who the client is, and what its policy declares of its data."""
    gate = gate_of(client)
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
    gate = gate_of(client)
    with before_reading(request):
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
    gate, settings, states = gate_of(client), request.settings, STATES_OF[request.verb]
    with before_reading(request):
        supernet = request_supernet(client, request).train()
        admissions = admit(gate, request, supernet)
        local_lrs = {state: number(settings["local_lrs"], state) for state in states}
        noised = {
            state: noised_gradient(client, settings, supernet, state, admissions[state])
            for state in states
        }

    sums, batch_size = periodic_gradients(
        lambda: {state: take() for state, take in noised.items()},
        {"weights": supernet.weights(), "alphas": supernet.alphas()},
        steps=settings["local_steps"],
        local_lrs=local_lrs,
    )
    return make_reply(batch_size, sums, {})


def search(client: Client, request: Request) -> Reply:
    """``train.search``: weights and alphas after local steps of search, each step a release.

    DP-SGD on the weights and, first order, noised Adam on the alphas, alternating as in
    ``search.local_search``. The states follow from the releases. FEATHERS, Alg. 4, without the
    look-ahead of its line 2, whose weights would carry no noise.
    With ``gates`` the steps are those of ``noised_paths``; tensors that the reply leaves out are
    those that no release has moved.
    """
    gate, settings = gate_of(client), request.settings
    with before_reading(request):
        supernet = request_supernet(client, request)
        admissions = admit(gate, request, supernet)
        if "gates" in settings:
            train = path_training(client, request, supernet, admissions)
        else:
            train = local_training(client, settings, supernet, admissions)
    train()
    reply = make_reply(gate.num_records(("train",)), _trained(supernet), {})
    return only_changed(reply, request, supernet) if settings.get("sparse") is True else reply


def candidate(client: Client, request: Request) -> Reply:
    """``train.candidate``: the shared weights after noised steps on each candidate.

    The weights follow from the releases; those beside all paths are as they were sent.
    """
    gate = gate_of(client)
    with before_reading(request):
        supernet = request_supernet(client, request)
        admissions = admit(gate, request, supernet)
        train = candidate_training(client, request, supernet, admissions["weights"])
    train()
    states = {"weights": network_states(supernet)["weights"]}
    return make_reply(gate.num_records(("train",)), states, {})


def candidates(client: Client, request: Request) -> Reply:
    """``evaluate.candidates``: noised accuracies, over the declared number of validation records.

    One release of one vector, however many candidates there are.
    """
    gate = gate_of(client)
    with before_reading(request):
        supernet = request_supernet(client, request)
        admission = admit(gate, request, supernet)["rewards"]
        release = noised_rewards(client, supernet, request.settings["candidates"], admission)
    return make_reply(admission.batch_size, {"rewards": {"rewards": release()}}, {})


def weights(client: Client, request: Request) -> Reply:
    """``train.weights``: the weights of a network after local steps of DP-SGD.

    Abadi et al. (2016), arXiv 1607.00133, Alg. 1, with momentum on the noised gradients. Every
    step is a release of its own; the weights follow from the releases. ``clip_norm`` bounds the
    noised mean, beside the clipping of each record.
    """
    gate, settings = gate_of(client), request.settings
    with before_reading(request):
        network = client.network(settings["network"], request.states)
        admissions = admit(gate, request, network)
        train = local_training(client, settings, network, admissions)
    train()
    return make_reply(gate.num_records(settings["split"].split("+")), _trained(network), {})


def probe(client: Client, request: Request) -> Reply:
    """``train.probe``: noised decreases of the validation loss, one per trial.

    Every local step of a trial is a release, booked although its result is discarded: one train
    record moves the weights and so the loss of all validation records. Given those, the decrease is
    a sum over validation records of numbers from -M to M, released once per trial. That a record's
    loss is rounded alike whatever records are beside it is assumed, as in ``privacy.clipping``.
    """
    gate, settings = gate_of(client), request.settings
    with before_reading(request):
        network = client.network(settings["network"], request.states)
        admissions = admit(gate, request, network)
        admission, bound = admissions["rewards"], number(settings, "loss_bound")
        if bound < LEAST_LOSS_BOUND:
            least = f"{LEAST_LOSS_BOUND} or more"
            raise ConfigError(f"refused, loss_bound={show(bound)} is not {least}.")
        trainings = [
            local_training(client, {**settings, **trial}, network, admissions)
            for trial in settings["trials"]
        ]
        measure = partial(_metrics_sum, network.eval(), bound=bound)
        rehearse(client, measure, METRICS_BATCH, settings["network"])
    before: list[Tensor] = []
    unit = admission.terms.max_grad_norm / bound

    def decrease_sum(rows: Tensor) -> Tensors:
        after = validation_losses(client, network)
        if not before:
            client.network(settings["network"], request.states)
            before.append(validation_losses(client, network))
        return {"rewards": unit * clipped_decreases(before[0] - after, bound)[rows].sum()[None]}

    rewards = []
    for train in trainings:
        client.network(settings["network"], request.states)
        train()
        noised = gate.release(admission, len(client.data.validation), decrease_sum)["rewards"]
        rewards.append(noised / (unit * admission.batch_size))
    return make_reply(admission.batch_size, {"rewards": {"rewards": torch.cat(rewards)}}, {})


def model(client: Client, request: Request) -> Reply:
    """``evaluate.model``: noised loss and accuracy over the declared number of records.

    One release of the sum of (loss up to a public bound, correct or not) over all records.
    """
    gate, settings = gate_of(client), request.settings
    bound = 2 * math.log(max(2, len(client.class_names)))
    with before_reading(request):
        network = client.network(settings["network"], request.states).eval()
        admission = admit(gate, request, network)["metrics"]
        split = client.split(admission.split)
        measure = partial(_metrics_sum, network, bound=bound)
        rehearse(client, measure, METRICS_BATCH, settings["network"])
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
    "query.latency": latency,
    "train.weight_gradient": gradients,
    "train.alpha_gradient": gradients,
    "train.gradients": gradients,
    "train.search": search,
    "train.candidate": candidate,
    "train.probe": probe,
    "train.weights": weights,
    "evaluate.candidates": candidates,
    "evaluate.model": model,
}


def check_fields(verb: str, reply: Reply) -> None:
    """Raise RuntimeError when a reply has a field that may not leave."""
    facts, releases = PUBLIC_FACTS.get(verb, set()), RELEASES.get(verb, set())
    leaving = set(reply.states) | set(reply.metrics)
    if not (set(reply.facts) <= facts and leaving <= releases and set(reply.digests) <= leaving):
        raise RuntimeError(f"{verb} must not return {sorted({*reply.facts, *leaving})}")


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


def _trained(network: nn.Module) -> dict[str, Tensors]:
    return {name: state for name, state in network_states(network).items() if state}


def _num_values(request: Request, network: nn.Module | None, kind: str) -> int:
    """Return how many values a release of one kind has, 1 where that is not known yet."""
    if request.verb == "evaluate.candidates":
        return num_candidates(request.settings)
    if network is None or kind in NUMBERS_OF:
        return NUMBERS_OF.get(kind, 1)
    return sum(tensor.numel() for tensor in network_states(network)[kind].values())


def _means_batch_norm(request: Request, supernet_norm: str | None) -> bool:
    """Return whether a request describes a network that normalises over a batch."""
    searches = request.verb in (*STATES_OF, *OF_SUPERNETS)
    described = SUPERNET if searches else request.settings["network"]
    name = described.get("name", SUPERNET["name"])
    if name == SUPERNET["name"]:
        return supernet_norm == BATCH
    return described.get("norm", BATCH if name in NORMED_NETWORKS else None) == BATCH


def _has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())

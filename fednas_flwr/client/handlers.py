"""The actions: every way in which something of a client's data can leave it.

Each takes the client, the request and its settings, and returns the reply; none keeps anything
between calls. A private client answers by the same functions: its gradients are noised releases, it
measures by noised means, and it tells public properties. Such an action builds what it needs
without data, lets the guard refuse, rehearses on made-up records, and only then reads records.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import derive_seed, make_generator
from fednas_flwr.client.admission import admit, asked_kinds, before_reading, guard_of
from fednas_flwr.client.agreement import sums_of
from fednas_flwr.client.client import Client
from fednas_flwr.client.kept_models import check as check_model
from fednas_flwr.client.kept_models import keep
from fednas_flwr.client.local_training import (
    Plan,
    clipped_decreases,
    prepare,
    prepare_search,
    prepare_training,
    refresh_statistics,
    validation_losses,
)
from fednas_flwr.client.noised_gradients import NoisedGradients
from fednas_flwr.client.noised_measures import (
    noised_mean,
    prepare_losses,
    prepare_metrics,
    prepare_rewards,
)
from fednas_flwr.client.replies import (
    make_reply,
    network_states_of,
    only_changed,
    sent_moments,
    trained_states,
)
from fednas_flwr.data.loaders import step_batch
from fednas_flwr.data.records import count_labels
from fednas_flwr.data.statistics import Statistics, bounded_powers, largest_norm
from fednas_flwr.models.metrics import evaluate, histogram, measured, predicted
from fednas_flwr.privacy.actions import ACTIONS, SPLIT_OF, SUPERNET
from fednas_flwr.privacy.plan import STATISTICS
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.requests import (
    Commit,
    Describe,
    Evaluate,
    KeepModel,
    LocalTraining,
    MeasureLatency,
    Personalise,
    Probe,
    RewardCandidates,
    Search,
    TakeGradients,
    TakeNetworkGradient,
    TellStatistics,
    Train,
    TrainCandidates,
)
from fednas_flwr.protocol.states import (
    MOMENTS,
    Layout,
    Tensors,
    load_states,
    network_states,
    unpack,
)
from fednas_flwr.protocol.sum_requests import Settings, answer_sum
from fednas_flwr.search.candidate import (
    Candidate,
    ClippedGradients,
    all_alike,
    path_states,
    train_candidates,
)
from fednas_flwr.search.exact_gradients import ExactGradients, ExactSums, LookAhead
from fednas_flwr.search.gradient_sums import Batch, periodic_gradients
from fednas_flwr.search.optimizer_step import Descent, Descents, Gradients, make_sgd
from fednas_flwr.search.pool import Pool
from fednas_flwr.spaces.latency_tables import to_json
from fednas_flwr.spaces.mbconv import MBConvSpace
from fednas_flwr.spaces.space import Supernet
from fednas_flwr.spaces.space_costs import measure_space

Handler = Callable[[Client, Request, Any], Reply]
ANSWERS: dict[str, Handler] = {}  # by action


def answers(*actions: str) -> Callable[[Handler], Handler]:
    """Make a function the answer to actions; it gets the client, the request and its settings."""

    def register(handler: Handler) -> Handler:
        ANSWERS.update(dict.fromkeys(actions, handler))
        return handler

    return register


@answers("query.describe")
def describe(client: Client, request: Request, asked: Describe) -> Reply:
    """``query.describe``: who the client is and how much data it has.

    Of a private client's data, what its policy declares.
    """
    data, guard = client.data, client.guard
    properties = identity(client)
    if guard is not None:
        allowed = guard.allowed
        properties |= {
            "splits": dict(allowed.records),
            "data_set": guard.data_set,
            "budget": {"epsilon": allowed.epsilon, "delta": allowed.delta},
            "secure_noise": guard.is_secure,
            "unit": allowed.unit,
            "least_noise_multiplier": allowed.least_noise_multiplier,
            "spent": guard.spent(),
        }
        if allowed.secure_sum is not None:
            properties["honest_sites"] = allowed.secure_sum.honest
        return Reply(num_examples=guard.num_records(tuple(allowed.records)), properties=properties)
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    labels = torch.cat([split.labels[split.rows] for split in splits.values()])
    properties |= {
        "class_counts": count_labels(labels, len(client.class_names)),
        "splits": {name: len(split) for name, split in splits.items()},
    }
    if client.moments is not None:
        properties["moments"] = [asdict(of) for of in client.moments]
    return Reply(num_examples=max(1, len(labels)), properties=properties)


def identity(client: Client) -> dict[str, Any]:
    """Return what a client says of itself that does not depend on its records."""
    actions = ACTIONS if client.guard is None else client.guard.allowed.actions
    keeps = client.kept_models is not None and "query.keep_model" in actions
    return {
        **({"keeps_model": True} if keeps else {}),
        "client": client.index,
        "tag": client.tag,
        "hardware": f"{client.device.type} {platform.machine()}",
        "versions": {"fednas_flwr": version("fednas_flwr"), "torch": torch.__version__},
        **client.data_form,
    }


@answers("query.commit")
def commit(client: Client, request: Request, asked: Commit) -> Reply:
    """``query.commit``: keep the run's plan of releases; tell its cost and what is covered.

    Where a person must approve the plan first, tell by which hash; the same request again is
    answered in full once that is done.
    """
    if client.guard is None:
        raise ConfigError("query.commit is for private clients: this one has no policy.")
    guard, run = client.guard, request.header.run
    with before_reading(request):
        covered_steps = guard.covered_steps(asked.releases)
        guard.commit(run, asked.releases, sizes=_search_sizes(client, asked))
        properties: dict[str, Any] = {"awaits": guard.awaited_approval(run)}
        if properties["awaits"] is None:
            properties = {"epsilon": guard.epsilons(run), "covered_steps": covered_steps}
            properties |= guard.uncounted()
    return Reply(
        num_examples=guard.num_records(tuple(guard.allowed.records)), properties=properties
    )


def _search_sizes(client: Client, asked: Commit) -> dict[str, int]:
    """Return how many weights and alphas the search has, where a person is to approve it."""
    searches = any(planned.stage == "search" for planned in asked.releases)
    if not (searches and guard_of(client).allowed.needs_approval):
        return {}
    states = network_states(client.network({"name": SUPERNET}))
    return {
        state: sum(tensor.numel() for tensor in states[state].values())
        for state in ("weights", "alphas")
    }


@answers("query.latency")
def measure_latency(client: Client, request: Request, asked: MeasureLatency) -> Reply:
    """``query.latency``: how long every layer of the run's search space takes on this machine.

    The table is ``properties["latency"]``, as ``hardware.latency`` writes it. No record is read.
    """
    space = client.make_space()
    if not isinstance(space, MBConvSpace):
        raise ConfigError(f"search_space={space.name} has no latency table: choose mbconv.")
    table, _ = measure_space(
        space,
        device=client.device,
        threads=client.threads,
        batch_size=asked.batch_size,
        passes=asked.passes,
    )
    return Reply(num_examples=1, properties={"latency": to_json(table)})


@answers("query.statistics")
def tell_statistics(client: Client, request: Request, asked: TellStatistics) -> Reply:
    """``query.statistics``: noised means over train records of a table's bounded powers.

    By these the server finds mean and deviation of every column of numbers within the ranges that
    the site declares (:func:`~fednas_flwr.data.statistics.refined`); one release for all columns.
    """
    guard, num_columns = client.guard, client.num_columns
    if guard is None:
        raise ConfigError("query.statistics is for private clients: this one has no policy.")
    with before_reading(request):
        if not (client.from_ranges and num_columns):
            raise ConfigError(
                "refused: statistics are told within public ranges only, and this site does not "
                "declare dataset.ranges={column: [low, high], ...} of all columns of numbers."
            )
        splits, steps = asked_kinds(request)[STATISTICS]
        planned = guard.admit(
            *(request.header, request.action, STATISTICS),
            splits=splits,
            steps=steps,
            num_values=3 * num_columns,
        )
    split = client.data.train
    ranges = Statistics(split.mean, split.std)

    def values(rows: Tensor) -> Tensor:
        return bounded_powers(split.features[split.rows[rows], :num_columns], ranges)

    norm = largest_norm(num_columns)
    means = noised_mean(client, request.header, planned, split, values, norm=norm)
    return make_reply(guard.expected_batch(planned), {STATISTICS: {STATISTICS: means}})


@answers("query.keep_model")
def keep_model(client: Client, request: Request, asked: KeepModel) -> Reply:
    """``query.keep_model``: the site takes the model and tests it; what it measures stays there."""
    with before_reading(request):
        new = check_model(client, request, asked)
    folder = keep(client, new)
    print(f"kept the model of run {request.header.run!r} as {folder}", file=sys.stderr)
    return Reply(num_examples=1, properties={"kept": True})


@answers("query.sign_survivors", "query.open_masks")
def help_sum(client: Client, request: Request, asked: Settings) -> Reply:
    """``query.sign_survivors`` and ``query.open_masks``: the last two messages of a secure sum."""
    return Reply(num_examples=1, properties=answer_sum(sums_of(client), asked))


@answers("train.weight_gradient", "train.alpha_gradient", "train.gradients")
def take_gradients(client: Client, request: Request, asked: TakeGradients) -> Reply:
    """``train.weight_gradient``, ``train.alpha_gradient`` and, fused, ``train.gradients``.

    The sums over a batch of gradients of the weights (train records) or alphas (validation
    records) or both, taken at the same point. ``num_examples`` is the batch size B_k by which the
    server divides; fused, the alphas' sum is scaled to the weights' batch size. A batch in which
    oversampling repeats records stands for no more of them than the split has, and its sums are
    scaled to these. Private clients
    return noised sums over Poisson batches of per-record gradients, each clipped (DP-FNAS, arXiv
    2110.11025, Eq. 3 and 4), and the public expected batch size.
    """
    states = ACTIONS[request.action].gradients_of
    gradients: NoisedGradients | ExactSums
    with before_reading(request):
        supernet = request_supernet(client, request).train()
        lrs = {state: asked.local_lrs[state] for state in states}
        if client.guard is None:
            gradients = _exact_sums(client, request, asked)
        else:
            gradients = NoisedGradients(client, request, admit(client.guard, request, supernet))
            if "weights" in states:
                gradients.rehearse_weights(supernet)
            if "alphas" in states:
                gradients.rehearse_alphas(supernet)
    if isinstance(gradients, NoisedGradients) and request.grids:
        return _of_share(gradients, states[0], supernet)
    sums, batch_size = periodic_gradients(
        lambda: {state: gradients.sums(state, supernet) for state in states},
        {"weights": supernet.weights(), "alphas": supernet.alphas()},
        steps=asked.local_steps,
        local_lrs=lrs,
    )
    return _of_sums(client, SPLIT_OF[states[0]], supernet, sums, batch_size, gradients.metrics())


@answers("train.network_gradient")
def take_network_gradient(client: Client, request: Request, asked: TakeNetworkGradient) -> Reply:
    """``train.network_gradient``: :func:`take_gradients` of a network's weights, for one step.

    Each exchange is one step of DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Alg. 1) at weights
    that all clients were sent, so that secure sums may share its noise.
    """
    gradients: NoisedGradients | ExactSums
    with before_reading(request):
        network = client.network(asked.network, network_states_of(request)).train()
        network.drop_path_prob = asked.drop_path_prob  # type: ignore[assignment]
        if client.guard is None:
            # A round has many steps: what is drawn must differ between them.
            purpose = (request.action, client.index, asked.step)
            torch.manual_seed(derive_seed(client.seed, *purpose))
            gradients = ExactSums(
                _step_batches(
                    client,
                    asked.split,
                    batch_size=asked.batch_size,
                    first=asked.step,
                    generator=make_generator(client.seed, *purpose),
                ),
                objective=client.objective,
                auxiliary_weight=asked.auxiliary_weight,
                precision=client.precision,
            )
        else:
            planned = admit(client.guard, request, network)
            gradients = NoisedGradients(
                client, request, planned, auxiliary_weight=asked.auxiliary_weight
            )
            gradients.rehearse_weights(network, asked.network, asked.drop_path_prob > 0)
    if isinstance(gradients, NoisedGradients) and request.grids:
        return _of_share(gradients, "weights", network)
    sums, batch_size = gradients.sums("weights", network)
    return _of_sums(
        client, asked.split, network, {"weights": sums}, batch_size, gradients.metrics()
    )


def _of_share(gradients: NoisedGradients, state: str, network: nn.Module) -> Reply:
    """Return the reply of a gradient sum with a share of its noise: one state, one step."""
    cells, batch_size = gradients.share(state, network)
    digest = Layout.of(network_states(network)[state]).digest
    return Reply(batch_size, digests={state: digest}, shares={state: cells})


def _of_sums(
    client: Client,
    split: str,
    network: nn.Module,
    sums: dict[str, Tensors],
    batch_size: float,
    metrics: Mapping[str, float],
) -> Reply:
    """Return the reply of gradient sums over a batch of a split; with those of weights, buffers."""
    if client.oversample:
        records = min(batch_size, len(client.split(split)))
        sums = {s: {n: g * (records / batch_size) for n, g in v.items()} for s, v in sums.items()}
        batch_size = records
    buffers = network_states(network)["buffers"]
    if "weights" in sums and buffers:
        sums["buffers"] = buffers
    return make_reply(batch_size, sums, metrics)


@answers("train.search")
def search(client: Client, request: Request, asked: Search) -> Reply:
    """``train.search``: weights, alphas and buffers after local search.

    In private mode each step is a release, from which the states follow; tensors that a sparse
    reply leaves out are those that no release has moved.
    """
    with before_reading(request):
        supernet = request_supernet(client, request)
        own = {name for name, state in network_states(supernet).items() if state}
        if asked.sparse and not own <= set(request.states):
            raise ValueError(f"sparse=True needs the states {', '.join(sorted(own))}")
        planned = _plan(client, request, supernet)
        run = prepare_search(client, request, asked.local, supernet, planned)
    descents, metrics = run()
    states = trained_states(supernet, descents)
    reply = make_reply(_num_records(client, "train"), states, metrics)
    return only_changed(reply, request, states) if asked.sparse else reply


@answers("train.candidate")
def train_paths(client: Client, request: Request, asked: TrainCandidates) -> Reply:
    """``train.candidate``: the shared weights after ``local_steps`` steps on each candidate.

    In private mode they follow from the releases; those beside all paths are as they were sent, or
    neither sent nor returned.
    """
    sgd, paths = asked.weights, asked.candidates
    gradients: Gradients
    with before_reading(request):
        supernet, own = path_supernet(client, request, paths, sparse=asked.sparse)
        planned = _plan(client, request, supernet.train())
        if client.guard is not None:
            steps = len(paths) * asked.local_steps
            gradients = noised = NoisedGradients(client, request, planned, steps=steps)
            # Every op on all edges: no path takes more memory than that of the op that takes most.
            for path in all_alike(supernet):
                noised.rehearse_weights(Candidate(supernet, path), "candidate", path)
        else:
            gradients = _candidate_gradients(client, request, asked)
        weights = supernet.weights()
        descent = Descent(weights, make_sgd(weights.values(), sgd), sgd.clip_norm)
        moments = sent_moments(request, supernet, only=own.get(MOMENTS))
        descents = Descents(descent, sent=moments)
    train_candidates(supernet, paths, gradients, descent, steps=asked.local_steps)
    states = trained_states(supernet, descents, without=("alphas", "buffers"))
    if asked.sparse:
        states["weights"] = {n: w for n, w in states["weights"].items() if n in own["weights"]}
    return make_reply(_num_records(client, "train"), states, gradients.metrics())


@answers("evaluate.candidates")
def reward_candidates(client: Client, request: Request, asked: RewardCandidates) -> Reply:
    """``evaluate.candidates``: each candidate's accuracy on validation records, as ``rewards``.

    With ``training`` the reward is :func:`trained_rewards`.
    """
    if asked.training is not None:
        return trained_rewards(client, request, asked.training)
    split = client.data.validation
    with before_reading(request):
        described = asked.network or {"name": SUPERNET}
        network: nn.Module
        if asked.candidates is not None:
            network, _ = path_supernet(client, request, asked.candidates, sparse=asked.sparse)
            network.eval()
            candidates: list[nn.Module] = [Candidate(network, path) for path in asked.candidates]
            largest: list[nn.Module] = [Candidate(network, path) for path in all_alike(network)]
        else:
            network = request_pool(client, request, described).eval()
            candidates = largest = list(network.members)
        if client.guard is not None:
            planned = admit(client.guard, request, network)["rewards"]
            release = prepare_rewards(
                client, request.header, planned, candidates, largest, described
            )
    if client.guard is not None:
        rewards = {"rewards": {"rewards": release()}}
        return make_reply(client.guard.expected_batch(planned), rewards)
    measured = [
        evaluate(candidate, split, client.device, objective=client.objective)
        for candidate in candidates
    ]
    accuracies = torch.tensor([metrics.accuracy for metrics in measured])
    loss = sum(metrics.loss for metrics in measured) / len(measured)
    states = {"rewards": {"rewards": accuracies}}
    return make_reply(len(split), states, {"validation_loss": loss})


def trained_rewards(client: Client, request: Request, training: LocalTraining) -> Reply:
    """Return how fast the members of a pool train, each from the weights that were sent.

    A member's reward, from 0 to 1, is ``exp(-loss)`` with the mean training loss of the last local
    epoch, before each step on its batch: a training speed estimate (Ru et al. 2021,
    arXiv 2006.04492, TSE-E with E = 1). The learning rate is annealed over the local epochs, each
    of which begins with no momentum; steps in place of epochs count as one epoch. All members see
    the same batches. Exact clients only: the loss depends on every record that a step has read.
    """
    with before_reading(request):
        pool = request_pool(client, request, training.network)
        if client.guard is not None:
            raise ConfigError(
                "refused, training of candidates with privacy=dp: their losses are no planned "
                "release; set algorithm.rewarded=averaged."
            )
    amount, epochs = training.amount, training.amount.epochs or 1
    of_epoch = amount if amount.epochs is None else replace(amount, epochs=1)
    losses = []
    for member in pool.members:
        generator = client.generator(request.header, "weights")
        for epoch in range(1, epochs + 1):
            sgd = training.weights.at_round(epoch, epochs)
            local = replace(training, amount=of_epoch, weights=sgd)
            train = prepare_training(client, request, local, member, {}, generator=generator)
            _, metrics = train()
        losses.append(metrics["train_loss"])
    rewards = torch.tensor(losses).neg().exp().nan_to_num(nan=0.0)
    records = _num_records(client, training.split)
    return make_reply(records, {"rewards": {"rewards": rewards}}, {})


@answers("train.probe")
def probe(client: Client, request: Request, asked: Probe) -> Reply:
    """``train.probe``: by how much local training would reduce the loss on validation records.

    FEATHERS, Alg. 2 and 3 without their last line. Each trial trains the same network, a supernet
    or a derived one, from the same states and with the same draws; the result is discarded. Nothing
    but the mean over validation records of ``clip(l_before - l_after, -M, M)`` leaves per trial, as
    ``rewards`` [trials]. The number of validation records, ``num_examples``, is the client's weight
    in the rewards (Eq. 5).

    In private mode every local step of a trial is a release, booked although its result is
    discarded: one train record moves the weights and so the loss of all validation records. Given
    those, the decrease is a sum over validation records of numbers from -M to M, released once per
    trial.

    Deviations: the text does not clip, its clients try one configuration per message, and its
    losses are those with batch norm's running statistics, see :func:`refresh_statistics`.
    """
    bound, batch_size, guard = asked.loss_bound, asked.amount.batch_size, client.guard
    with before_reading(request):
        described = {"name": SUPERNET} if asked.training is None else asked.training.network
        restore = partial(client.network, described, network_states_of(request))
        network = restore()
        planned = _plan(client, request, network)
        trainings = [prepare(client, request, own, network, planned) for own in asked.trainings()]
        if guard is not None:
            losses = prepare_losses(client, network, described)
    if guard is None:
        refresh_statistics(client, request, network, batch_size)
        before = validation_losses(client, network)
    else:
        before = torch.zeros(0)
    rewards = []
    for train in trainings:
        with torch.random.fork_rng():
            restore()
            train()
            if guard is None:
                refresh_statistics(client, request, network, batch_size)
                decreases = before - validation_losses(client, network)
                rewards.append(clipped_decreases(decreases, bound).mean()[None])
                continue

        def decreases_of(rows: Tensor) -> Tensor:
            nonlocal before
            after = losses()
            if not len(before):
                restore()
                before = losses()
            return clipped_decreases(before - after, bound)[rows, None]

        plan, split = planned["rewards"], client.data.validation
        rewards.append(noised_mean(client, request.header, plan, split, decreases_of, norm=bound))
    records = len(client.data.validation)
    weight = records if guard is None else guard.expected_batch(planned["rewards"])
    return make_reply(weight, {"rewards": {"rewards": torch.cat(rewards).float()}})


@answers("train.weights")
def train_weights(client: Client, request: Request, asked: Train) -> Reply:
    """``train.weights``: the weights of a network after local training.

    With ``validates`` also its mean loss on validation records after it, if the client has any.
    """
    local = asked.local
    with before_reading(request):
        network = client.network(local.network, network_states_of(request))
        planned = _plan(client, request, network)
        run = prepare(client, request, local, network, planned)
    descents, metrics = run()
    reply = make_reply(
        _num_records(client, local.split), trained_states(network, descents), metrics
    )
    if not (asked.validates and len(client.data.validation)):
        return reply
    refresh_statistics(client, request, network, local.amount.batch_size)
    loss = float(validation_losses(client, network).mean())
    return replace(reply, metrics={**metrics, "validation_loss": loss})


@answers("evaluate.model")
def evaluate_model(client: Client, request: Request, asked: Evaluate) -> Reply:
    """``evaluate.model``: loss and accuracy of a network or supernet on one of the splits."""
    if client.guard is None:
        network = client.network(asked.network, network_states_of(request))
        if asked.statistics_batch_size is not None:
            refresh_statistics(client, request, network, asked.statistics_batch_size)
        objective = client.objective
        logits, labels = predicted(network, client.split(asked.split), client.device)
        metrics = measured(logits, labels, objective=objective)
        properties: dict[str, Any] = {}
        if asked.with_scores:
            properties["scores"] = objective.scores(logits, labels)
            positive = objective.positive_class(logits.shape[1])
            if positive is not None:
                shares = objective.probabilities(logits.double())[:, positive]
                properties["histogram"] = histogram(shares, objective.members(labels, positive))
        return Reply(
            num_examples=metrics.num_examples, metrics=metrics.as_dict(), properties=properties
        )
    with before_reading(request):
        network = client.network(asked.network, network_states_of(request))
        planned = admit(client.guard, request, network)["metrics"]
        release = prepare_metrics(client, request.header, planned, network, asked.network)
    return Reply(num_examples=client.guard.expected_batch(planned), metrics=release())


@answers("evaluate.personalised")
def personalise(client: Client, request: Request, asked: Personalise) -> Reply:
    """``evaluate.personalised``: test metrics of a network after local training; it is discarded.

    What FDNAS (Zhang et al., 2020, section 4) averages to its mean local accuracy.
    """
    network = client.network(asked.local.network, network_states_of(request))
    prepare(client, request, asked.local, network, {})()
    metrics = evaluate(network, client.data.test, client.device, objective=client.objective)
    return Reply(num_examples=metrics.num_examples, metrics=metrics.as_dict())


def request_pool(client: Client, request: Request, described: Mapping[str, Any]) -> Pool:
    """Return the pool that is described, with the states that the request carries."""
    pool = client.network(described, network_states_of(request))
    if not isinstance(pool, Pool):
        raise ValueError(f"network {described['name']!r} is no pool of candidates")
    return pool


def request_supernet(client: Client, request: Request) -> Supernet:
    """Return the supernet with the states that the request carries."""
    network = client.network({"name": SUPERNET}, network_states_of(request))
    assert isinstance(network, Supernet)
    return network


def path_supernet(
    client: Client, request: Request, paths: Sequence[Sequence[int]], *, sparse: bool
) -> tuple[Supernet, dict[str, set[str]]]:
    """Return the supernet with the states that the request carries.

    Where it is sparse also the names of their tensors, by state.

    Raises:
        ValueError: A path does not fit the supernet, or the states do not.
    """
    network = client.network({"name": SUPERNET})
    assert isinstance(network, Supernet)
    used = path_states(network, paths)
    own = used if sparse else {}
    load_states(network, network_states_of(request), only=own)
    return network, own


def _plan(client: Client, request: Request, network: torch.nn.Module) -> Plan:
    """Return the plan of each kind of release of a private client's request; empty without."""
    return {} if client.guard is None else admit(client.guard, request, network)


def _num_records(client: Client, split: str) -> int:
    """Return how many records a split has, of a private client those that its policy declares."""
    if client.guard is not None:
        return guard_of(client).num_records(split.split("+"))
    return len(client.split(split))


def _exact_sums(client: Client, request: Request, asked: TakeGradients) -> ExactSums:
    train, validation = (
        _step_batches(
            client,
            name,
            batch_size=asked.batch_size,
            first=asked.step * asked.local_steps,
            generator=client.generator(request.header, name),
        )
        for name in ("train", "validation")
    )
    ahead = None
    if asked.order == 2:
        layout = Layout.of(network_states(request_supernet(client, request))["weights"])
        previous = unpack(request.states["previous_weights"], layout)
        weights = {name: weight.to(client.device) for name, weight in previous.items()}
        ahead = LookAhead(weights, asked.inner_lr)
    return ExactSums(
        train,
        validation,
        look_ahead=ahead,
        objective=client.objective,
        precision=client.precision,
    )


def _candidate_gradients(
    client: Client, request: Request, asked: TrainCandidates
) -> ExactGradients:
    steps = len(asked.candidates) * asked.local_steps
    batches = partial(
        _step_batches,
        client,
        "train",
        batch_size=asked.batch_size,
        first=asked.step * steps,
        generator=client.generator(request.header, "train"),
    )
    if asked.dp_aware is None:
        return ExactGradients(
            batches,
            epochs=None,
            steps=steps,
            objective=client.objective,
            precision=client.precision,
        )
    return ClippedGradients(
        batches,
        steps=steps,
        dp_aware=asked.dp_aware,
        generator=client.generator(request.header, "noise"),
        objective=client.objective,
    )


def _step_batches(
    client: Client,
    name: str,
    *,
    batch_size: int | None,
    first: int,
    generator: torch.Generator,
) -> Iterator[Batch]:
    """Yield the batches of an exchange: an endless epoch sequence, from the ``first`` one.

    They are augmented by the generator.
    """
    split = client.for_training(client.split(name))
    for step in count(first):
        indices = step_batch(
            len(split),
            batch_size=batch_size,
            step=step,
            seed=client.seed,
            purpose=("batches", name, client.index),
        )
        x, y = split.batch(indices, client.device)
        yield client.augmented(x, generator), y

"""The actions: every way in which anything about a client's data can leave it.

Each takes the client, the request and its settings, and returns the reply; none keeps anything
between calls. A private client answers with the same functions: its gradients are noised releases,
its measurements are noised means, and its properties are public. Such an action builds what it
needs without data, gives the guard the chance to refuse, rehearses on made-up records, and only
then reads records.
"""

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import derive_seed, make_generator, seed_all
from fednas_flwr.client import kept_models, local_training
from fednas_flwr.client.client import Client
from fednas_flwr.client.noised_gradients import NoisedGradients
from fednas_flwr.client.noised_measures import NoisedMeasures
from fednas_flwr.client.release_guard import before_reading
from fednas_flwr.data.loaders import step_batch
from fednas_flwr.data.statistics import Statistics, unit_vectors, vector_size
from fednas_flwr.models.metrics import evaluate, histogram, measured, predicted, sums
from fednas_flwr.privacy.actions import ACTIONS, SPLIT_OF, SUPERNET
from fednas_flwr.privacy.plan import STATISTICS
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol import states as st
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.sum_requests import Settings, answer_sum
from fednas_flwr.search import exact_gradients as exact
from fednas_flwr.search import optimizer_step as opt
from fednas_flwr.search.candidate import Candidate, Pool, all_alike
from fednas_flwr.search.local_search import train_candidates
from fednas_flwr.search.objective import Batch
from fednas_flwr.spaces import costs, latency_tables, space

Handler = Callable[[Client, Request, Any], Reply]
ANSWERS: dict[str, Handler] = {}  # by action


def answers(*actions: str) -> Callable[[Handler], Handler]:
    """Register a function as the answer to actions; it gets client, request and its settings."""

    def register(handler: Handler) -> Handler:
        ANSWERS.update(dict.fromkeys(actions, handler))
        return handler

    return register


@answers("query.describe")
def describe(client: Client, request: Request, asked: rq.Describe) -> Reply:
    """``query.describe``: identity of the client and size of its data.

    For a private client's data the size is that declared by its policy.
    """
    guard = client.guard
    actions = ACTIONS if guard is None else guard.allowed.actions
    properties = {
        "client": client.index,
        "tag": client.tag,
        "hardware": f"{client.device.type} {platform.machine()}",
        "versions": {"fednas_flwr": version("fednas_flwr"), "torch": torch.__version__},
        **client.data_form,
    }
    if client.kept_models is not None and "query.keep_model" in actions:
        properties["keeps_model"] = True
    if guard is not None:
        properties |= guard.properties
        if asked.with_epsilon:
            properties["epsilon"] = guard.epsilons(request.header.run)
        return Reply(guard.num_records(tuple(guard.allowed.by_split)), properties=properties)
    properties |= client.data.counts(len(client.inputs.class_names))
    if client.moments is not None:
        properties["moments"] = [asdict(of) for of in client.moments]
    return Reply(max(1, sum(properties["splits"].values())), properties=properties)


@answers("query.commit")
def commit(client: Client, request: Request, asked: rq.Commit) -> Reply:
    """``query.commit``: keep the run's plan of releases; report its cost and the steps covered.

    If a person must approve the plan first, the reply has the hash to approve; the same request is
    answered in full once that is done.
    """
    guard, run, sizes = client.private_guard, request.header.run, {}
    with before_reading(request.action):
        covered_steps = guard.covered_steps(asked.releases)
        searches = any(planned.stage == "search" for planned in asked.releases)
        if searches and guard.allowed.needs_approval:  # the person is shown them
            states = st.network_states(client.network({"name": SUPERNET}))
            sizes = {state: sum(t.numel() for t in states[state].values()) for state in SPLIT_OF}
        guard.commit(run, asked.releases, sizes=sizes)
        properties: dict[str, Any] = {"awaits": guard.awaited_approval(run)}
        if properties["awaits"] is None:
            properties = {"epsilon": guard.epsilons(run), "covered_steps": covered_steps}
            properties |= guard.uncounted()
    return Reply(guard.num_records(tuple(guard.allowed.by_split)), properties=properties)


@answers("query.latency")
def measure_latency(client: Client, request: Request, asked: rq.MeasureLatency) -> Reply:
    """``query.latency``: time of every layer of the run's search space on this machine.

    The table is ``properties["latency"]``, as ``latency_tables`` writes it. No record is read.
    """
    under = latency_tables.Conditions(client.device, client.threads, asked.batch_size, asked.passes)
    table, _ = costs.measure_space(costs.timed_space(client.make_space()), under)
    return Reply(num_examples=1, properties={"latency": latency_tables.to_json(table)})


@answers("query.statistics")
def tell_statistics(client: Client, request: Request, asked: rq.TellStatistics) -> Reply:
    """``query.statistics``: a noised sum over train records of vectors of norm 1.

    From it the server computes the mean and deviation of every numeric column within the ranges
    that the site declares, or the mean of a backbone's features
    (:func:`~fednas_flwr.data.statistics.from_release`). It is one release for all columns.
    """
    guard, num_columns = client.private_guard, client.num_columns
    split = client.data.train
    with before_reading(request.action):
        if not client.has_bounds:
            raise ConfigError(
                "refused: statistics are told within public ranges only, and this site does not "
                "declare dataset.ranges={column: [low, high], ...} of all columns of numbers."
            )
        size = vector_size(split.features.shape[1], num_columns=num_columns)
        guard.check_size(request.releases[STATISTICS], request.header.run, size)
    ranges = Statistics(split.mean, split.std)

    def values(rows: Tensor) -> Tensor:
        return unit_vectors(split.features[split.rows[rows]], ranges, num_columns=num_columns)

    return NoisedMeasures(client, request).sums(STATISTICS, split, values, size=size)


@answers("query.keep_model")
def keep_model(client: Client, request: Request, asked: rq.KeepModel) -> Reply:
    """``query.keep_model``: keep the model and test it; the results stay at the site."""
    with before_reading(request.action):
        new = kept_models.check(client, request, asked)
    folder = kept_models.keep(client, new)
    print(f"kept the model of run {request.header.run!r} as {folder}", file=sys.stderr)
    return Reply(num_examples=1)


@answers("query.sign_survivors", "query.open_masks")
def help_sum(client: Client, request: Request, asked: Settings) -> Reply:
    """``query.sign_survivors`` and ``query.open_masks``: the last two messages of a secure sum."""
    return Reply(num_examples=1, properties=answer_sum(client.part_of_sums, asked))


@answers(
    "train.weight_gradient", "train.alpha_gradient", "train.gradients", "train.network_gradient"
)
def take_gradients(
    client: Client, request: Request, asked: rq.TakeGradients | rq.TakeNetworkGradient
) -> Reply:
    """``train.weight_gradient``, ``train.alpha_gradient`` and, fused, ``train.gradients``.

    The reply has sums, over a batch, of gradients of the weights (train records), of the alphas
    (validation records), or of both at the same point. ``num_examples`` is the batch size B_k by
    which the server divides; if fused, the alphas' sum is scaled to the weights' batch size.
    Private clients return noised sums over Poisson batches of per-record gradients, each clipped
    (DP-FNAS, arXiv 2110.11025, Eq. 3 and 4), and the public expected batch size. Buffers go along
    with sums of weights.

    ``train.network_gradient``: the same for a network's weights, in one step. Each exchange is one
    step of DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Alg. 1) at weights that all clients were
    sent, so that secure sums may share its noise.
    """
    states = ACTIONS[request.action].gradients_of
    further: dict[str, Any] = {}
    chosen: tuple[Any, ...] = ()
    with before_reading(request.action):
        network = client.sent_network(request).train()
        if isinstance(asked, rq.TakeNetworkGradient):
            further = {"auxiliary_weight": asked.auxiliary_weight, "augmented": asked.augmented}
            network.drop_path_prob = asked.drop_path_prob  # type: ignore[assignment]
            chosen = (asked.network, asked.drop_path_prob > 0)
        lrs = {state: asked.local_lrs[state] for state in states}
        gradients: NoisedGradients | exact.ExactSums
        if client.guard is None:
            gradients = _exact_sums(client, request, asked, network)
        else:
            gradients = NoisedGradients(client, request, **further)
            for state in states:
                gradients.rehearse(state, network, *chosen)
    parameters = st.network_states(network)
    sums, batch_size = exact.periodic_gradients(
        lambda: {state: gradients.sums(state, network) for state in states},
        parameters,
        steps=asked.local_steps,
        local_lrs=lrs,
    )
    if "weights" in sums and parameters["buffers"]:
        sums["buffers"] = parameters["buffers"]
    return Reply.of(batch_size, sums, gradients.metrics(), like=parameters)


@answers("train.search", "train.weights")
def train(client: Client, request: Request, asked: rq.Search | rq.Train) -> Reply:
    """``train.search`` and ``train.weights``: the states of a network after local training.

    In private mode each step is a release, from which the states follow. With ``validates`` the
    reply also has the mean loss on validation records after training, if the client has any.
    """
    local = asked.local
    with before_reading(request.action):
        network = client.sent_network(request)
        run = local_training.prepare(client, request, local, network)
    optimizers, metrics = run()
    states = local_training.trained_states(network, optimizers)
    reply = Reply.of(_num_records(client, local.split), states, metrics)
    if isinstance(asked, rq.Train) and asked.validates and len(client.data.validation):
        local_training.refresh_statistics(client, request, network, local.amount.batch_size)
        loss = float(local_training.validation_losses(client, network).mean())
        return replace(reply, metrics={**metrics, "validation_loss": loss})
    return reply


@answers("train.candidate")
def train_paths(client: Client, request: Request, asked: rq.TrainCandidates) -> Reply:
    """``train.candidate``: the shared weights after ``local_steps`` steps on each candidate.

    In private mode they follow from the releases. Weights on none of the paths are as they were
    sent, or neither sent nor returned.
    """
    sgd, paths = asked.weights, asked.candidates
    gradients: opt.Gradients
    with before_reading(request.action):
        supernet, named = path_supernet(client, request, paths, sparse=asked.sparse)
        client.check_network(request, supernet.train())
        steps = len(paths) * asked.local_steps
        if client.guard is not None:
            gradients = noised = NoisedGradients(client, request, steps=steps)
            # Every op on all edges: no path takes more memory than that of the most demanding op.
            for path in all_alike(supernet):
                noised.rehearse("weights", Candidate(supernet, path), "candidate", path)
        else:
            gradients = _candidate_gradients(client, request, asked, steps)
        weights = supernet.weights()
        optimizer = opt.Optimizer(weights, opt.make_sgd(weights.values(), sgd), sgd.clip_norm)
        moments = local_training.sent_moments(request, supernet, only=named.get(st.MOMENTS))
        optimizers = opt.Optimizers(optimizer, sent=moments)
    train_candidates(supernet, paths, gradients, optimizer, steps=asked.local_steps)
    states = local_training.trained_states(supernet, optimizers, without=("alphas", "buffers"))
    if asked.sparse:
        states["weights"] = {n: w for n, w in states["weights"].items() if n in named["weights"]}
    return Reply.of(_num_records(client, "train"), states, gradients.metrics())


@answers("evaluate.candidates")
def reward_candidates(client: Client, request: Request, asked: rq.RewardCandidates) -> Reply:
    """``evaluate.candidates``: each candidate's accuracy on validation records, as ``rewards``.

    With ``training`` the reward is :func:`trained_rewards`.
    """
    if asked.training is not None:
        return trained_rewards(client, request, asked.training)
    split = client.data.validation
    with before_reading(request.action):
        network: nn.Module
        if asked.candidates is not None:
            network, _ = path_supernet(client, request, asked.candidates, sparse=asked.sparse)
            candidates: list[nn.Module] = [Candidate(network, path) for path in asked.candidates]
            largest: list[nn.Module] = [Candidate(network, path) for path in all_alike(network)]
        else:
            network = request_pool(client, request)
            candidates = largest = list(network.members)
        client.check_network(request, network.eval())
        if client.guard is not None:
            release = NoisedMeasures(client, request).prepare_rewards(candidates, largest)
    if client.guard is not None:
        return release()
    measured = [
        evaluate(candidate, split, client.device, objective=client.objective)
        for candidate in candidates
    ]
    accuracies = torch.tensor([metrics.accuracy for metrics in measured])
    loss = sum(metrics.loss for metrics in measured) / len(measured)
    return Reply.of(len(split), {"rewards": {"rewards": accuracies}}, {"validation_loss": loss})


def trained_rewards(client: Client, request: Request, training: rq.LocalTraining) -> Reply:
    """Return the training speed of each member of a pool, from the weights that were sent.

    A member's reward, from 0 to 1, is ``exp(-loss)`` with the mean training loss of the last local
    epoch, where a batch's loss is taken before the step on it. This is a training speed estimate
    (Ru et al. 2021, arXiv 2006.04492, TSE-E with E = 1). The learning rate is annealed over the
    local epochs, each of which begins without momentum; steps in place of epochs count as one
    epoch. All members see the same batches. Only exact clients compute it, as the loss depends on
    every record that a step has read.
    """
    with before_reading(request.action):
        pool = request_pool(client, request)
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
            train = local_training.prepare(client, request, local, member, generator=generator)
            _, metrics = train()
        losses.append(metrics["train_loss"])
    rewards = torch.tensor(losses).neg().exp().nan_to_num(nan=0.0)
    return Reply.of(_num_records(client, training.split), {"rewards": {"rewards": rewards}})


@answers("train.probe")
def probe(client: Client, request: Request, asked: rq.Probe) -> Reply:
    """``train.probe``: the decrease of the validation loss by local training.

    FEATHERS, Alg. 2 and 3 without their last line. Each trial trains the same network, a supernet
    or a derived one, from the same states and with the same draws; the result is discarded. For
    each trial only the mean over validation records of ``clip(l_before - l_after, -M, M)`` leaves,
    as ``rewards`` [trials]. The number of validation records, ``num_examples``, is the client's
    weight in the rewards (Eq. 5).

    In private mode every local step of a trial is a release. It is booked although its result is
    discarded, since one train record moves the weights and so the loss of all validation records.
    Given the weights, the decrease is a sum over validation records of numbers from -M to M,
    released once per trial.

    Deviations: the paper does not clip, its clients try one configuration per message, and its
    losses use batch norm's running statistics, see ``refresh_statistics``.
    """
    bound, split, before = asked.loss_bound, client.data.validation, torch.zeros(0)
    with before_reading(request.action):
        network = client.sent_network(request)
        runs = [local_training.prepare(client, request, t, network) for t in asked.trainings()]
        if client.guard is not None:
            measures = NoisedMeasures(client, request)
            noised_losses = measures.prepare_losses(network)

    def exact_losses() -> Tensor:
        batch_size = asked.trainings()[0].amount.batch_size
        local_training.refresh_statistics(client, request, network, batch_size)
        return local_training.validation_losses(client, network)

    def noised_decreases() -> Tensor:
        nonlocal before
        after = noised_losses()
        if not len(before):
            client.sent_network(request)
            before = noised_losses()
        return local_training.clipped_decreases(before - after, bound)[:, None]

    def reward() -> Tensor:
        if client.guard is None:
            return local_training.clipped_decreases(before - exact_losses(), bound).mean()[None]
        decreases = cache(noised_decreases)  # once per trial: units come part by part
        return measures.mean("rewards", split, lambda rows: decreases()[rows], norm=bound)

    if client.guard is None:
        before = exact_losses()
    rewards = []
    for run in runs:
        with torch.random.fork_rng():
            client.sent_network(request)
            run()
            rewards.append(reward())
    means = torch.cat(rewards).float()
    if client.guard is None:
        return Reply.of(len(split), {"rewards": {"rewards": means}})
    return measures.reply("rewards", means)


@answers("evaluate.model")
def evaluate_model(client: Client, request: Request, asked: rq.Evaluate) -> Reply:
    """``evaluate.model``: loss and accuracy of a network or supernet on one of the splits."""
    with before_reading(request.action):
        network = client.sent_network(request)
        if client.guard is not None:
            release = NoisedMeasures(client, request).prepare_metrics(network, asked.threshold)
    if client.guard is not None:
        return release()
    objective = replace(client.objective, threshold=asked.threshold)
    logits, labels = predicted(network, client.split(asked.split), client.device)
    metrics = measured(logits, labels, objective=objective)
    properties: dict[str, Any] = {}
    if asked.with_scores:
        properties["scores"] = objective.scores(logits, labels)
        positive = objective.positive_class(logits.shape[1])
        if positive is not None:
            shares = objective.probabilities(logits.double())[:, positive]
            properties["histogram"] = histogram(shares, objective.members(labels, positive))
    if asked.summed is not None:
        seed = derive_seed(client.seed, "resamples", client.index)
        added = sums(logits, labels, metric=asked.summed, objective=objective, seed=seed)
        properties["sums"] = added.flatten().tolist()
    return Reply(metrics.num_examples, metrics.as_dict(), properties=properties)


@answers("evaluate.scores")
def count_scores(client: Client, request: Request, asked: rq.CountScores) -> Reply:
    """``evaluate.scores``: noised counts, by class, of train and validation records' scores."""
    with before_reading(request.action):
        if client.guard is None or len(client.inputs.class_names) != 2:
            raise ConfigError(
                "refused: counts of scores are of private clients and of two classes; ask for "
                "evaluate.model."
            )
        release = NoisedMeasures(client, request).prepare_counts(client.sent_network(request))
    return release()


@answers("evaluate.personalised")
def personalise(client: Client, request: Request, asked: rq.Personalise) -> Reply:
    """``evaluate.personalised``: test metrics after local training; the network is discarded.

    With ``compares`` the reply also has the gain on validation records, if the client has any. The
    mean of the accuracies is FDNAS' local accuracy (Zhang et al., 2020, section 4).
    """
    network = client.sent_network(request)
    compares = asked.compares and len(client.data.validation) > 0
    before = local_training.validation_losses(client, network) if compares else None
    local_training.prepare(client, request, asked.local, network)()
    objective = replace(client.objective, threshold=asked.threshold)
    metrics = evaluate(network, client.data.test, client.device, objective=objective)
    properties: dict[str, Any] = {}
    if before is not None:
        gains = before - local_training.validation_losses(client, network)
        gains = local_training.clipped_decreases(gains, rq.LARGEST_GAIN)
        properties["gain"] = [float(gains.sum()), float(gains.square().sum()), len(gains)]
    return Reply(metrics.num_examples, metrics.as_dict(), properties=properties)


def request_pool(client: Client, request: Request) -> Pool:
    """Return the pool that a request describes, with the states that it carries."""
    pool = client.network(request.network, request.network_states)
    if not isinstance(pool, Pool):
        raise ValueError(f"network {request.network['name']!r} is no pool of candidates")
    return pool


def path_supernet(
    client: Client, request: Request, paths: Sequence[Sequence[int]], *, sparse: bool
) -> tuple[space.Supernet, dict[str, set[str]]]:
    """Return the supernet with the states that the request carries.

    If the request is sparse, the names of their tensors are also returned, by state.

    Raises:
        ValueError: A path does not fit the supernet, or the states do not.
    """
    network = client.network({"name": SUPERNET})
    assert isinstance(network, space.Supernet)
    used = opt.path_states(network, paths)  # also refuses paths that do not fit
    named = used if sparse else {}
    st.load_states(network, request.network_states, only=named)
    return network, named


def _num_records(client: Client, split: str) -> int:
    """Return the number of records of a split; for a private client, the declared number."""
    if client.guard is not None:
        return client.guard.num_records(split.split("+"))
    return len(client.split(split))


def _exact_sums(
    client: Client,
    request: Request,
    asked: rq.TakeGradients | rq.TakeNetworkGradient,
    network: nn.Module,
) -> exact.ExactSums:
    precision = getattr(asked, "precision", None) or client.precision
    computed: dict[str, Any] = {"objective": client.objective, "precision": precision}
    if isinstance(asked, rq.TakeNetworkGradient):
        # A round has many steps, and their draws must differ.
        purpose = (request.action, client.index, asked.step)
        seed_all(derive_seed(client.seed, *purpose))
        generator = make_generator(client.seed, *purpose)
        asked = asked.at_client(_num_records(client, asked.split))
        batches = _step_batches(client, asked.split, asked, first=asked.step, generator=generator)
        return exact.ExactSums(batches, auxiliary_weight=asked.auxiliary_weight, **computed)
    first, draws = asked.step * asked.local_steps, partial(client.generator, request.header)
    train, validation = (
        _step_batches(client, name, asked, first=first, generator=draws(name))
        for name in ("train", "validation")
    )
    if asked.order == 2:
        layout = st.Layout.of(st.network_states(network)["weights"])
        previous = st.unpack(request.states["previous_weights"], layout)
        weights = {name: weight.to(client.device) for name, weight in previous.items()}
        computed |= {"previous_weights": weights, "inner_lr": asked.inner_lr}
    return exact.ExactSums(train, validation, **computed)


def _candidate_gradients(
    client: Client, request: Request, asked: rq.TrainCandidates, steps: int
) -> exact.ExactGradients:
    generator = client.generator(request.header, "train")
    terms: Any = {"num_steps": steps, "objective": client.objective}
    first = asked.step * steps
    batches = partial(_step_batches, client, "train", asked, first=first, generator=generator)
    if asked.dp_aware is None:
        return exact.ExactGradients(batches, **terms, precision=client.precision)
    noise = client.generator(request.header, "noise")
    return exact.ClippedGradients(batches, **terms, dp_aware=asked.dp_aware, generator=noise)


def _step_batches(
    client: Client,
    name: str,
    asked: rq.TakeGradients | rq.TakeNetworkGradient | rq.TrainCandidates,
    *,
    first: int,
    generator: torch.Generator,
) -> Iterator[Batch]:
    """Yield the batches of an exchange: an endless sequence of epochs from batch ``first`` on.

    They are augmented with the generator.
    """
    split = client.split(name)
    drawn: Any = {"seed": client.seed, "purpose": ("batches", name, client.index)}
    for step in count(first):
        indices = step_batch(len(split), batch_size=asked.batch_size, step=step, **drawn)
        x, y = split.batch(indices, client.device)
        yield client.augmented(x, generator) if getattr(asked, "augmented", True) else x, y

"""The evaluation of a trained network, on the server's test set and on clients' records.

Validation records choose the threshold of the labels and the network that a run delivers; test
records choose nothing. Main function: :func:`evaluate`.

Sites may fine-tune copies of the network for themselves, and keep them if they are better. A copy's
gain is measured on its site's validation records, if nothing was trained on them. Few records give
an uncertain gain, which is therefore shrunk towards the gains at all sites. Main functions:
:func:`compared` and :func:`keep`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fednas_flwr.client.making import make_objective
from fednas_flwr.data.loaders import concat_splits, make_client_data, server_split
from fednas_flwr.data.prepared import make_data, sites_of
from fednas_flwr.models import metrics
from fednas_flwr.models.explanation import importance, mistakes
from fednas_flwr.models.networks import make_device
from fednas_flwr.models.noised_scores import BINS, NoisedScores, corrected, scores_of_counts
from fednas_flwr.pipeline.beginning import Run
from fednas_flwr.pipeline.feasible import pools_records
from fednas_flwr.pipeline.later_settings import with_precision
from fednas_flwr.pipeline.pooled_statistics import noised_sum
from fednas_flwr.privacy.plan import metrics_release
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.states import Layout, Packed, load_states, network_states, pack
from fednas_flwr.runs.leaderboard import chosen
from fednas_flwr.runs.numbers import is_beside, read_run
from fednas_flwr.search.objective import Objective
from fednas_flwr.server.cohort import TOTAL, QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config
from fednas_flwr.settings.names import ACCURACY, AUROC, DECIDED, R2
from fednas_flwr.spaces.operations import SkipNetwork

RARE = 0.3  # below this share of records, accuracy says little about the rarer of two classes
EPOCHS, RATE = 5, 0.1  # of fine-tuning; the rate is a share of retraining's first rate
SMALLEST_VARIANCE = 1e-12  # of the gain per record
Result = Mapping[str, Any]  # result of one site


class Trained(NamedTuple):
    """A retrained network.

    Attributes:
        description: Description from which it is built.
        network: Its module.
        states: Its packed states, in the form in which clients receive them.
    """

    description: dict[str, Any]
    network: nn.Module
    states: dict[str, Packed]


def evaluate(run: Run, trained: Trained) -> tuple[Trained, float | None]:
    """Measure the network on the server's test set and on every client's own test records.

    Returns the network, whose probabilities noised scores may have corrected, and the threshold
    that was used; None if the most probable class is predicted.
    """
    config, prepared = run.config, run.prepared
    with run.stage("evaluate"):
        objective = make_objective(config, prepared, torch.device("cpu"))
        trained, released = _corrected(run, trained, objective)
        metric = _metric(run, released)
        threshold, validation = _validated(run, trained, objective, metric, released)
        central = _on_server(run, trained.network, replace(objective, threshold=threshold), metric)
        pooled = _pooled_models(run, objective) if pools_records(config) else {}
        run.log.emit(
            "evaluated",
            central=central,
            metric=metric,
            validation=validation,
            threshold=threshold,
            positive=objective.positive_class(prepared.num_classes),
            **({"released": asdict(released)} if released else {}),
            linear=pooled.get("linear"),
            trees=pooled.get("trees"),
            **_on_clients(run, trained, threshold),
        )
    return trained, threshold


def _corrected(
    run: Run, trained: Trained, objective: Objective
) -> tuple[Trained, NoisedScores | None]:
    """The network with probabilities corrected by noised scores, and these, if there are any."""
    released, positive = _released_scores(run, trained), objective.positive_class(2)
    if released is None or positive is None:
        return trained, released
    generator = torch.Generator().manual_seed(run.config.seed)
    x = 6 * torch.rand(8, *run.prepared.input_shape, generator=generator) - 3
    network = corrected(trained.network, released, positive=positive, x=x)
    if network is trained.network:
        run.log.emit("warning", message="probabilities stay too sure: no last layer is linear")
        return trained, replace(released, slope=1.0, offset=0.0)
    states = {n: pack(of) for n, of in network_states(network).items() if n in trained.states}
    return trained._replace(network=network, states=states), released


def _metric(run: Run, released: NoisedScores | None) -> str:
    """The score by which networks are compared: as set, or chosen by the clients' classes."""
    settings = run.config.evaluation
    if settings.metric is not None:
        return settings.metric
    if run.prepared.train.is_regression:
        return R2
    counts = [of.get("class_counts", []) for of in run.cohort.properties.values()]
    of_classes = [sum(column) for column in zip(*counts, strict=False)]
    if released:
        of_classes = [1 - released.prevalence, released.prevalence]
    two = len(of_classes) == 2 and not run.prepared.train.multi_label
    rare = two and min(of_classes) < RARE * sum(of_classes)
    return AUROC if settings.positive is not None or rare else ACCURACY


def _validated(
    run: Run, trained: Trained, objective: Objective, metric: str, released: NoisedScores | None
) -> tuple[float | None, list[float] | None]:
    """The threshold of the labels, and the score on validation records with its resamples.

    The threshold is None if the most probable class is predicted. The score is None if validation
    records were trained on or are private.

    Args:
        run: The run.
        trained: The network.
        objective: Objective without a threshold.
        metric: The score.
        released: Scores from noised counts, if there are any.
    """
    num_classes, holds_out = run.prepared.num_classes, run.config.retrain.evaluate_every > 0
    positive = objective.positive_class(num_classes)
    thresholded = metric not in DECIDED and positive is not None and not objective.multi_label
    threshold = released.threshold if released and thresholded else None
    if not _shows_clients(run.config) or not (thresholded or holds_out):
        return threshold, None
    replies = _validation_replies(run, trained, summed=metric if holds_out else None)
    counted = [reply for reply in replies.values() if "histogram" in reply.properties]
    if choice := chosen(run.folder):  # chosen on records that were not trained on
        threshold = choice.run.last("evaluated").get("threshold")
    elif thresholded and counted:
        threshold = metrics.best_threshold(
            [reply.properties["histogram"] for reply in counted],
            [reply.num_examples for reply in counted],  # instead of the client's own count
        )
    scored = len(objective.scored_classes(num_classes))
    return threshold, _summed(run, replies, metric, scored) if holds_out else None


def _summed(
    run: Run, replies: Mapping[int, Reply], metric: str, num_classes: int
) -> list[float] | None:
    """A score from the sums that clients return, and on resamples; None if all are malformed.

    They weigh as their replies do, of which none may have more than its largest share.
    """
    fitting = []
    for client, reply in replies.items():
        records = run.cohort.properties[client]["splits"]["validation"]
        sums = metrics.summed(reply.properties.get("sums", ()), metric, num_classes, records)
        if sums is not None:
            fitting.append(sums * (reply.num_examples / records))
    if missing := len(replies) - len(fitting):
        message = f"malformed validation scores are left out (clients: {missing})"
        run.log.emit("warning", message=message)
    if not fitting:
        return None
    return metrics.score_of_sums(torch.stack(fitting).sum(0), metric).tolist()


def _on_server(
    run: Run, network: nn.Module, objective: Objective, metric: str
) -> dict[str, Any] | None:
    """Scores on the server's test set, with what explains them; None without a test set."""
    config, prepared = run.config, run.prepared
    if (records := prepared.server_test) is None:
        return None
    device = make_device(config.runtime.device)
    test = server_split(records, prepared.mean, prepared.std)
    logits, labels = metrics.predicted(network.to(device), test, device)
    central = metrics.detailed(logits, labels, objective=objective, seed=config.seed)
    has_accuracy = not objective.predicts_numbers
    if isinstance(network, SkipNetwork) and has_accuracy and objective.threshold is None:
        central |= metrics.accuracies_of_parts(network, test, device, objective=objective)
    network.cpu()
    if (schema := records.schema) and not is_beside(run.folder):
        central["importance"] = importance(
            network.eval(),
            test,
            schema,
            objective=objective,
            metric=metric,
            sites=sites_of(records, config.partition),
            seed=config.seed,
        )
    elif test.features.dtype == torch.uint8 and has_accuracy and not objective.multi_label:
        central["mistakes"] = mistakes(records, logits, labels)
    return central


def _on_clients(run: Run, trained: Trained, threshold: float | None) -> dict[str, Any]:
    """Scores on clients' own test records, for the network and, if asked for, local copies.

    The keys are ``clients``, or ``total`` with secure sums; ``personalised``, for copies that have
    trained like the last round; and ``copies``, for the fine-tuned ones that sites may keep.
    """
    config, description = run.config, trained.description
    results: dict[str, Any] = {"clients": [], "personalised": []}
    if config.dataset.fractions["test"] == 0:
        return results
    data_set, tested = config.private_data_set, metrics_release("evaluate", "test").key
    noises = [planned.noise_multiplier for planned in run.schedule if planned.key == tested]
    if data_set is None or noises not in ([], [None]):
        request = rq.Evaluate(
            network=description,
            split="test",
            data_set=data_set,
            with_scores=_shows_clients(config),
            threshold=threshold,
        )
        answers = _ask_tests(run, "evaluate.model", request, trained.states)
        if config.secure_sum:
            results["total"] = answers[0] if answers else None
        else:
            results["clients"] = answers
    if not config.evaluation.personalised:
        return results
    personalised = partial(_ask_tests, run, "evaluate.personalised", states=trained.states)
    local = last_round(run, description)
    results["personalised"] = personalised(rq.Personalise(local=local, threshold=threshold))
    choice, holds_out = chosen(run.folder), config.retrain.evaluate_every > 0
    if holds_out or choice:
        local = fine_tuning(run, description)
        last = rq.Personalise(local=local, threshold=threshold, compares=holds_out)
        known = choice.run.last("evaluated").get("copies", ()) if choice else ()
        results["copies"] = compared(personalised(last), known)
    return results


def _validation_replies(run: Run, trained: Trained, *, summed: str | None) -> dict[int, Reply]:
    """The replies of clients that measure the network on validation records; none if too few."""
    cohort, (description, _, states) = run.cohort, trained
    having = [c for c in _testers(run) if cohort.properties[c]["splits"]["validation"]]
    request = rq.Evaluate(network=description, split="validation", with_scores=True, summed=summed)
    exchange = Exchange("evaluate.model", "evaluate", request, states=states, among=having)
    with suppress(QuorumError):
        return dict(cohort.ask(exchange))
    return {}


def _released_scores(run: Run, trained: Trained) -> NoisedScores | None:
    """Scores from private clients' noised counts; None if none are planned or too few answer.

    Counts are summed over the clients that answer.
    """
    planned = next((release for release in run.schedule if release.kind == "scores"), None)
    if planned is None:
        return None
    exchange = Exchange(
        planned.action,
        planned.stage,
        rq.CountScores(network=trained.description, data_set=run.config.private_data_set),
        states=trained.states,
        layouts={"scores": Layout.of({"scores": torch.zeros(2 * BINS)})},
        releases=run.schedule,
        among=_testers(run),
    )
    with suppress(QuorumError):
        counts, _, noise = noised_sum(run.cohort, exchange)
        return scores_of_counts(counts, noise=noise)
    return None


def _testers(run: Run) -> list[int]:
    """Return the clients that test the network: as many as a round asks."""
    clients, asked = run.cohort.clients, run.cohort.participants("evaluate", 1)
    return clients if asked is None else sorted(set(clients) & set(asked.clients))


def _ask_tests(
    run: Run, action: str, settings: rq.Settings, states: dict[str, Packed]
) -> list[dict[str, Any]]:
    """Collect the results of all clients that have test records; warn if they are few."""
    results: list[dict[str, Any]] = []
    cohort, objective = run.cohort, make_objective(run.config, run.prepared, torch.device("cpu"))
    having = [c for c in _testers(run) if cohort.properties[c]["splits"]["test"]]
    if not having:
        return results
    if len(having) < len(cohort.clients):
        cohort = cohort.part(having, run=cohort.run, emit=cohort.emit)
    exchange = Exchange(action, "evaluate", settings, states=states, releases=run.schedule)
    try:
        for client, reply in cohort.ask(exchange):
            whose = {"sites": reply.sites} if client == TOTAL else {"client": client}
            # A reply's own number may be held to its largest share.
            splits = cohort.properties[client]["splits"] if _shows_clients(run.config) else {}
            counted = {"num_examples": splits.get("test", reply.num_examples)}
            fields: dict[str, Any] = whose | counted | reply.properties.get("scores", {})
            if gain := reply.properties.get("gain"):
                fields |= {"gain": gain} if gain[2] <= splits["validation"] else {}
            results.append(objective.reported(reply.metrics) | fields)
    except QuorumError as error:  # a failed test must not lose the trained network
        run.log.emit("warning", message=f"few clients could test the network: {error}")
    return results


def _shows_clients(config: Config) -> bool:
    """Whether the server sees what single clients' records show."""
    return not (config.secure_sum or config.dp)


def _pooled_models(run: Run, objective: Objective) -> dict[str, dict[str, Any]]:
    """Return the test scores of models fitted to the pooled records that the network trains on."""
    prepared = run.prepared
    if prepared.server_test is None:
        return {}
    division, held_out = run.config.dataset.division, run.config.retrain.evaluate_every > 0
    clients = (make_client_data(prepared, part, **division) for part in make_data(run.config)[1])
    train = [
        client.train if held_out else concat_splits(client.train, client.validation)
        for client in clients
    ]
    test = server_split(prepared.server_test, prepared.mean, prepared.std)
    return metrics.pooled_baselines(train, test, prepared.num_classes, objective, run.config.seed)


# --- copies that sites keep


def last_round(run: Run, description: dict[str, Any]) -> rq.LocalTraining:
    """The local training of retraining's last round, for the network of a description."""
    config = with_precision(run, run.config, description)
    retrain = config.retrain
    return rq.LocalTraining(
        description,
        "train+validation",
        rq.Amount(retrain.local_epochs, None, retrain.batch_size),
        retrain.weights.at_round(retrain.planned, retrain.planned),
        retrain.auxiliary_weight,
        retrain.drop_path_prob,
        augmented=retrain.unaugmented == 0,
        precision=config.training.precision,
    )


def fine_tuning(run: Run, description: dict[str, Any]) -> rq.LocalTraining:
    """The training of a copy, on the same records as retraining.

    It is that of retraining's last round with more epochs and a share of the first round's rate.
    """
    retrain, local = run.config.retrain, last_round(run, description)
    rate = RATE * retrain.weights.lr
    return replace(
        local,
        split="train" if retrain.evaluate_every else "train+validation",
        weights=replace(local.weights, lr=rate, min_lr=rate),
        amount=replace(local.amount, epochs=EPOCHS),
    )


def shrunken(gains: Mapping[int, tuple[float, float, int]]) -> dict[int, float]:
    """Gains of sites, shrunk towards the mean over all sites; the less sites differ, the more.

    Empirical Bayes with normal distributions: the sites' true gains have the variance of
    DerSimonian and Laird (1986, doi 10.1016/0197-2456(86)90046-2). The variance of a record's gain
    is assumed equal at all sites, since a site's few records cannot show its own.

    Args:
        gains: For each site, the sum over its records of the copy's decrease in loss, the sum of
            the squares, and the number of records, at least 1.
    """
    if not gains:
        return {}
    sums, squares, numbers = map(np.array, zip(*gains.values(), strict=True))
    means, freedom = sums / numbers, numbers.sum() - len(gains)
    of_record = (squares - sums**2 / numbers).sum() / max(1, freedom)
    variances = max(of_record, SMALLEST_VARIANCE) / numbers
    weights = 1 / variances
    mean = np.average(means, weights=weights)
    excess = (weights * (means - mean) ** 2).sum() - (len(gains) - 1)
    scale = weights.sum() - (weights**2).sum() / weights.sum()
    between = max(0.0, excess / scale) if len(gains) > 1 else 0.0
    mean = np.average(means, weights=1 / (variances + between))
    found = mean + between / (between + variances) * (means - mean)
    return dict(zip(gains, found.tolist(), strict=True))


def compared(answers: Sequence[Result], known: Sequence[Result]) -> list[dict[str, Any]]:
    """Results of sites' copies with their shrunken ``gain``; ``keeps`` is True if a site keeps it.

    Args:
        answers: For each site, scores on test records and the ``gain`` that it reports. A site
            without validation records has no gain and keeps no copy.
        known: Earlier results of this function for a network like it that was trained without
            validation records; else empty.
    """
    told = {one["client"]: tuple(one["gain"]) for one in answers if one.get("gain")}
    gains = {one["client"]: one["gain"] for one in known} or shrunken(told)
    found = [{**one, "gain": gains.get(one["client"])} for one in answers]
    return [{**one, "keeps": (one["gain"] or 0.0) > 0} for one in found]


def keep(
    run: Run, trained: Trained, *, among: Collection[int], save: Callable[[Path], object]
) -> dict[int, Path]:
    """Train the copies of some sites and save them; return their folders.

    Args:
        run: The run.
        trained: The network; it holds a site's weights while that copy is saved.
        among: The sites.
        save: Writes the network into a folder.
    """
    description, network, states = trained
    own, folders = network_states(network), {}
    exchange = Exchange(
        "train.weights",
        "evaluate",
        rq.Train(local=fine_tuning(run, description)),
        states=states,
        layouts={name: Layout.of(tensors) for name, tensors in own.items() if tensors},
        among=among,
    )
    try:
        for client, reply in run.cohort.ask(exchange):
            load_states(network, reply.states)
            folders[client] = run.folder / "copies" / f"client_{client}"
            folders[client].mkdir(parents=True, exist_ok=True)
            save(folders[client])
    except QuorumError as error:  # the run already has its model
        run.log.emit("warning", message=f"few sites could fine-tune their copies: {error}")
    load_states(network, states)
    return folders


def keeping(run: Run) -> list[int]:
    """Return the sites that keep copies, as the run's evaluation has found."""
    copies = read_run(run.folder).last("evaluated").get("copies") or []
    return [one["client"] for one in copies if one["keeps"]]

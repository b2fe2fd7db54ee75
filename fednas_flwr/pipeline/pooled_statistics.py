"""Statistics by which all clients standardise a table without declared statistics.

Without privacy, clients report the moments of their columns along with their other properties
(:func:`found_statistics`). Private clients release noised means within the declared ranges
(:func:`noised_statistics`). Either happens once, and a resumed run keeps the same statistics.
"""

import math
from collections.abc import Sequence

import torch

from fednas_flwr.data import statistics as stats
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.records import feature_names
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.protocol.requests import TellStatistics
from fednas_flwr.protocol.states import Layout, unpack
from fednas_flwr.runs.events import Event
from fednas_flwr.server.cohort import CONNECT, Cohort, QuorumError
from fednas_flwr.server.exchange import Exchange


def known_statistics(earlier: Sequence[Event]) -> stats.Statistics | None:
    """Return the statistics of a resumed run; None if it has none.

    Args:
        earlier: The run's earlier events; empty for a new run.
    """
    known = [event for event in earlier if event["event"] == "statistics"]
    values = [tuple(known[-1].get(name, ())) for name in ("mean", "std", "target")] if known else []
    return stats.Statistics(*values) if known else None


def _emitted(statistics: stats.Statistics, cohort: Cohort, **more: float) -> stats.Statistics:
    cohort.emit("statistics", **{name: list(of) for name, of in vars(statistics).items()}, **more)
    return statistics


def found_statistics(prepared: Prepared, cohort: Cohort) -> stats.Statistics:
    """Pooled moments of the clients' train parts.

    A client with impossible moments is asked no more. If there are three or more clients, one whose
    moments are far from the others' is named in a warning, and its influence on the statistics is
    limited by :func:`~fednas_flwr.data.statistics.bounded`.

    Raises:
        QuorumError: Too few clients are left.
    """
    parties: dict[int, list[stats.Moments]] = {}
    data = prepared.train
    names = feature_names(data.schema)[: data.num_numeric] + data.class_names * data.is_regression
    for client in cohort.clients:
        properties = cohort.properties[client]
        moments: list[stats.Moments] = properties.get("moments", [])
        most = properties.get("splits", {}).get("train", 0)
        if len(moments) != len(names) or any(of.count > most for of in moments):
            reason = f"its moments are not of {len(names)} columns of {most} records"
            cohort.dismiss(client, reason, CONNECT, expelled=True)
        else:
            parties[client] = moments
    if len(parties) < cohort.quorum:
        raise QuorumError(
            f"{len(parties)} of {cohort.num_clients} clients tell means and deviations of their "
            f"columns, {cohort.quorum} are needed."
        )
    bounded, far = stats.bounded(parties)
    for client, column in far.items():
        said, name = parties[client][column], names[column]
        message = (
            f"client {client} says that {name} has mean {said.mean:.4g} and deviation "
            f"{said.std:.4g}, far from what most say: it is held to {stats.REACH:g} times the "
            "median client's reach. If it is right, declare dataset.statistics={column: [mean, "
            "std], ...}"
        )
        cohort.emit("warning", message=message)
    return _emitted(stats.pooled(list(bounded.values()), data), cohort)


def noised_sum(cohort: Cohort, exchange: Exchange) -> tuple[torch.Tensor, float, float]:
    """Return the total of the clients' noised sums of one release.

    Args:
        cohort: Connected to clients that have committed to the release.
        exchange: Asks for the release; its only layout has one vector.

    Returns:
        The sum, float64; the number of records in it; and the standard deviation of the noise in
        each of its values.

    Raises:
        QuorumError: Too few clients answer.
    """
    ((kind, planned),) = exchange.planned.items()
    total, records, noises = torch.zeros(()).double(), 0.0, 0.0
    honest = next(iter(cohort.properties.values())).get("honest_sites", 1)
    for client, reply in cohort.ask(exchange):
        declared = cohort.properties.get(client)  # none in a secure sum: its weights are reported
        batch = planned.expected_batch(declared["splits"]) if declared else reply.num_examples
        total = total + unpack(reply.states[kind], exchange.layouts[kind])[kind].double()
        records += reply.num_examples
        scale = reply.num_examples / batch  # not 1 if a client's weight is limited
        noises += scale**2 * reply.sites / (honest if planned.shared else 1)
    return total, records, (planned.noise_multiplier or 0.0) * math.sqrt(noises)


def noised_statistics(
    prepared: Prepared, cohort: Cohort, schedule: Sequence[PlannedRelease], *, data_set: str | None
) -> stats.Statistics:
    """Return the statistics that follow from the clients' noised releases, one per client.

    Args:
        prepared: Data standardised by the declared ranges, or data of pooled features.
        cohort: Connected to clients that have committed to the schedule. It emits the event
            ``statistics`` and the sentence for the report.
        schedule: The run's schedule.
        data_set: The id that the sites' policies give the data.

    Raises:
        QuorumError: Too few clients answer; the message says why.
    """
    num_columns = prepared.train.num_numeric
    size = stats.vector_size(prepared.input_shape[0], num_columns=num_columns)
    exchange = Exchange(
        "query.statistics",
        STATISTICS,
        TellStatistics(data_set=data_set),
        server_round=1,
        layouts={STATISTICS: Layout.of({STATISTICS: torch.zeros(size)})},
        releases=schedule,
        participants=cohort.participants(STATISTICS, 1),
    )
    total, records, noise = noised_sum(cohort, exchange)
    noise /= records
    ranges = stats.Statistics(prepared.mean, prepared.std)
    found = stats.from_release(total / records, ranges, num_columns=num_columns, noise=noise)
    _emitted(found, cohort, noise=noise)
    if num_columns:
        spread = noise * stats.largest_norm(num_columns)
        told = (
            f"means and deviations of {num_columns} columns are noised ones, of one release of "
            f"each client within the declared ranges (noise of {spread:.2g} of half a range)"
        )
    else:
        told = (
            f"the mean of the {size} features is a noised one, of one release of each client "
            f"(noise of {noise * math.sqrt(size):.2g} of the features' length)"
        )
    cohort.emit("data", found=[told])
    return found

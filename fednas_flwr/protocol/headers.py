"""The part of a message that is no tensor: its header, and JSON values; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fednas_flwr.settings.parser import Between, Checked, Length

HEADER = "header"
JSON = "json"
METRICS = "metrics"
NUM_EXAMPLES = "num-examples"
LONGEST_NAME = 300  # bytes of a run's name: a site keeps it in its ledger

Json = Any  # what json.loads returns
Name = Annotated[str, Length(Between(0, LONGEST_NAME))]
Record = TypeVar("Record", ConfigRecord, MetricRecord)


@dataclass(frozen=True)
class Header(Checked):
    """Which exchange a message belongs to; a reply repeats its request's header.

    Attributes:
        run: Name of the run, the same for all its messages; like the other texts, of at most 300
            bytes.
        stage: ``search`` or ``retrain``; rounds are counted within a stage.
        round: From 1; 0 before the first round.
        phase: Number of the exchange within its round, from 1.
        client: Index of the client that is asked.
        nonce: Random text, new for every message.
    """

    run: Name
    stage: Name
    round: int
    phase: int
    client: int
    nonce: Name


def encode_values(
    header: Header,
    properties: Mapping[str, Json],
    *,
    digests: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> dict[str, ConfigRecord | MetricRecord]:
    """Return the records of a reply that hold no tensors.

    Args:
        header: Of the request.
        properties: Of the reply.
        digests: Of its states; None of a reply without any.
        metrics: With the number of examples, which is 1 where None is given.
    """
    text = json.dumps(
        {"header": vars(header), "digests": dict(digests or {}), "properties": dict(properties)}
    )
    numbers = MetricRecord(dict(metrics or {NUM_EXAMPLES: 1.0}))
    return {HEADER: ConfigRecord({JSON: text}), METRICS: numbers}


def record(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """Return one record; Flower's views by kind copy all records, at every look."""
    record = content[name]
    if not isinstance(record, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(record).__name__}")
    return record


def read_json(content: RecordDict, *, longest: int | None = None) -> Json:
    """Return the JSON values of a message that are beside its tensors."""
    text = cast(str, record(content, HEADER, ConfigRecord)[JSON])
    if longest is not None and len(text) > longest:
        raise ValueError(f"{len(text)} characters of JSON, at most {longest} are read")
    return json.loads(text)

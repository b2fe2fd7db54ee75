"""What a server app tells of the SuperLink that it works through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from flwr.common.logger import FLOWER_LOGGER
from flwr.supercore.retry.http_retry import make_simple_http_retry_invoker

from fednas_flwr.deploy.server_app import telling_reconnections
from fednas_flwr.runs.events import EventLog, read_events


def test_a_superlink_that_is_back_is_told_of(tmp_path: Path) -> None:
    """By what Flower's own retries log, of one long absence and one short."""
    path, before = tmp_path / "events.jsonl", list(FLOWER_LOGGER.filters)
    back = make_simple_http_retry_invoker().on_success
    assert back is not None
    with EventLog(path) as log, telling_reconnections(log):
        for seconds in (21.6, 0.2):
            back(SimpleNamespace(tries=3, elapsed_time=seconds))
    (event,) = read_events(path)
    assert event["event"] == "warning"
    assert event["message"] == "the SuperLink was away for 22 s"
    assert list(FLOWER_LOGGER.filters) == before

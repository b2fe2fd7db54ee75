"""The Flower ClientApp: decodes a message, lets the verb answer, encodes the reply."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from torch import nn

from fednas_flwr.build import make_client, make_data
from fednas_flwr.clients.client import Client
from fednas_flwr.clients.verbs import VERBS, answer
from fednas_flwr.config import load_config
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.exchange.messages import decode_request, encode_reply

CLIENT_RAISED = 2  # Flower's code for an exception in a ClientApp
CONFIG_KEY = "config-json"  # of Flower's run configuration


def make_client_app(config_json: str | None = None) -> ClientApp:
    """Return the app that answers all verbs.

    Args:
        config_json: The run's configuration, for runtimes in which Flower's run configuration is
            empty; None reads it from there.
    """
    app = ClientApp()
    for verb in VERBS:
        category, action = verb.split(".")
        register = {"train": app.train, "evaluate": app.evaluate, "query": app.query}[category]
        register(action)(_handler(config_json))
    return app


def _handler(config_json: str | None) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        try:
            text = config_json or str(context.run_config[CONFIG_KEY])
            index = int(context.node_config["partition-id"])
            client = _client(text, index, str(context.node_config.get("tag", "")))
            request = decode_request(message.metadata.message_type, message.content)
            return Message(encode_reply(request.header, answer(client, request)), reply_to=message)
        except Exception as error:  # the server must learn why; it drops this client
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(CLIENT_RAISED, reason), reply_to=message)

    return handle


@lru_cache(maxsize=1)
def _data(config_json: str) -> tuple[Prepared, list[np.ndarray], dict[str, nn.Module]]:
    """Return what the clients of one process share: records, partition, built networks."""
    prepared, parts = make_data(load_config(config_json))
    return prepared, parts, {}


@lru_cache(maxsize=1024)
def _client(config_json: str, index: int, tag: str) -> Client:
    prepared, parts, networks = _data(config_json)
    return make_client(
        load_config(config_json), index, data=(prepared, parts), networks=networks, tag=tag
    )


app = make_client_app()

"""The Flower ClientApp: decodes a message, lets the action answer, encodes the reply.

A real site with a policy refuses what the policy does not allow before it opens its records. Only
the check that noise suits the size of a network follows once the network is built.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn

from fednas_flwr.base.errors import BudgetExceededError, ConfigError, DayFullError
from fednas_flwr.base.memory import keep_freed_memory
from fednas_flwr.client import audit_trail, release_guard
from fednas_flwr.client.answer import admit, answer
from fednas_flwr.client.client import Client
from fednas_flwr.client.making import PRIVATE_SITE_KEYS, make_client, make_site_guard
from fednas_flwr.data.datasets import Data
from fednas_flwr.data.prepared import make_data, make_site_data
from fednas_flwr.data.readers import site_dataset
from fednas_flwr.deploy.bundle import CONFIG_KEY
from fednas_flwr.deploy.flower_patches import CLIENT_RAISED, take_along
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol import messages
from fednas_flwr.protocol.secure_sum.sum_site import NODE_KEYS, SumSite
from fednas_flwr.protocol.sum_requests import SUM_ACTIONS, answer_sum
from fednas_flwr.settings import Config, configuration, dump_config, registry, with_runtime
from fednas_flwr.settings.incompatible import has_real_sites

DATA_PATH = "data-path"
MOST_ALIVE = 128  # clients that a process keeps from one message to the next
# Settings of a site, from `flower-supernode --node-config`; they override the server's.
SITE_KEYS = {"device", "tag", "audit", "superlink", "models", "signer"}
SITE_KEYS |= {*PRIVATE_SITE_KEYS, *NODE_KEYS}


def make_client_app(config_json: str | None = None, *, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return the app that answers all actions.

    Args:
        config_json: The run's configuration, for runtimes in which Flower's run configuration is
            empty. None reads it from there or, if it is empty, from each message.
        mods: Flower's or your own mods around every answer; the first is the outermost.
    """
    app, entries = ClientApp(mods=list(mods)), registry.registered()
    for action in ACTIONS:
        category, name = action.split(".")
        getattr(app, category)(name)(_handler(config_json, entries))
    return app


def _handler(
    config_json: str | None, entries: Mapping[str, Mapping[str, Any]]
) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        registry.restore(entries)
        keep_freed_memory()
        # Errors whose text the server may read; for a private client, only refusals.
        private = "policy" in context.node_config
        safe: tuple[type[Exception], ...] = (ConfigError,) if private else (Exception,)
        keys = sorted(SITE_KEYS & context.node_config.keys())
        site = tuple((key, str(context.node_config[key])) for key in keys)
        trail, action = audit_trail.trail_of(dict(site)), message.metadata.message_type
        along = take_along(message)
        request = None
        try:
            request = messages.decode_request(action, message.content)
            safe = (DayFullError,) if private else safe
            kept = len(str(request.summed))
            kept += messages.payload_bytes(message.content) if request.settings.is_kept else 0
            trail.asked(request, flower_run=message.metadata.run_id, kept_bytes=kept)
            safe = () if private else safe  # later errors may reveal the site's own files
            text = config_json or str(context.run_config[CONFIG_KEY] or along[CONFIG_KEY])
            if "partition-id" not in context.node_config:
                raise ConfigError("the node's configuration lacks partition-id=<0, 1, ...>.")
            index = int(context.node_config["partition-id"])
            policy = _policy_text(site)
            guard = _guard(text, site, policy)
            if guard is not None:
                safe = (ConfigError,)
                norm = None if ACTIONS[action].is_public else _config(text).search_space.norm
                request = admit(guard, request, supernet_norm=norm)
            if guard is not None and action in SUM_ACTIONS:
                if guard.allowed.secure_sum is None:  # the site's records are not loaded for this
                    raise ConfigError("refused: this site takes no part in secure sums.")
                sums = SumSite.of_node(index, dict(site), guard.allowed.secure_sum)
                reply = messages.Reply(1.0, properties=answer_sum(sums, request.settings))
            else:
                safe = () if private else safe
                client = _client(text, index, site, policy)
                if client.guard is not None:
                    safe = (ConfigError,)
                reply = answer(client, request)
            trail.released(request, reply, guard=guard)
            if "awaits" in reply.properties:
                awaited = f"fednas approve {reply.properties['awaits']}"
                print(f"{awaited}: run {request.header.run!r} waits for it", file=sys.stderr)
            return Message(messages.encode_reply(request.header, reply), reply_to=message)
        except BudgetExceededError as error:
            reason = trail.refused(action, request, error, shown=True, private=True)
            return Message(Error(messages.BUDGET_SPENT, reason), reply_to=message)
        except Exception as error:  # the server must learn the reason; it drops this client
            shown = isinstance(error, safe)  # any other text may quote a record
            reason = trail.refused(action, request, error, shown=shown, private=private)
            return Message(Error(CLIENT_RAISED, reason), reply_to=message)

    return handle


def site_config(config: Config, site: Mapping[str, str]) -> Config:
    """Return the run's configuration with the site's own settings.

    Args:
        config: The configuration from the server.
        site: ``data-path``, file or folder of the site's own data, instead of ``dataset.root``;
            ``device`` instead of the run's; ``cache`` instead of ``dataset.cache``; ``dataset``, a
            file that says how to read the data, which needs a ``cache``. The other keys are for
            ``client.making.make_client``: ``tag``; ``split-key`` instead of the server's; for
            private sites ``policy``, ``data-set``, ``ledger`` and ``ledger-key``; for secure sums
            ``roster``, ``sum-key`` and ``sums``; ``models``, the folder for models that return to
            the site, and ``signer``, the public key that must have signed them. ``audit`` and
            ``superlink`` are for the audit trail.

    Raises:
        ConfigError: The site has data of its own and the run pools data, or the other way round;
            the site's dataset settings are wrong.
    """
    if has_real_sites(config) != (DATA_PATH in site):
        raise ConfigError(
            f"partition={config.partition.name} in runtime={config.runtime.name} does not go with "
            f"{DATA_PATH}={site.get(DATA_PATH)} in the configuration of this node: a node with "
            "data of its own needs runtime=deployment partition=sites, and these need such nodes."
        )
    dataset = config.dataset
    if "dataset" in site and "cache" in site:
        dataset = site_dataset(Path(site["dataset"]), cache=site["cache"])
    if DATA_PATH in site:
        dataset = dataset.at(site[DATA_PATH])
    dataset = replace(dataset, cache=site.get("cache", dataset.cache))
    device = site.get("device", config.runtime.device)
    return with_runtime(replace(config, dataset=dataset), device=device)


@lru_cache(maxsize=1)
def _data(config_json: str) -> tuple[Data, dict[str, nn.Module]]:
    """Return the data that clients of one process share: records, partition, built networks."""
    config = configuration.load_config(config_json)
    at_site = has_real_sites(config)
    data = make_site_data(config) if at_site else make_data(config)
    for note in data[0].train.notes if at_site else ():
        print(f"{config.dataset.place}: {note}", file=sys.stderr)
    return data, {}


@lru_cache(maxsize=16)
def _config(config_json: str) -> Config:
    """Return a run's configuration; a separate function, which Ray can pickle."""
    return configuration.load_config(config_json)


Site = tuple[tuple[str, str], ...]  # the SITE_KEYS that a node sets, with their values


def _policy_text(site: Site) -> str | None:
    """Return the text of a real site's policy file, read anew so that changes take effect."""
    try:
        return Path(dict(site)["policy"]).read_text(encoding="utf-8")
    except (KeyError, OSError, UnicodeDecodeError):  # making the guard reports these
        return None


@lru_cache(maxsize=MOST_ALIVE)
def _guard(config_json: str, site: Site, policy: str | None) -> release_guard.ReleaseGuard | None:
    """Return the guard of a real site with a policy; every run and `policy` text has a new one."""
    return make_site_guard(dict(site))


@lru_cache(maxsize=MOST_ALIVE)
def _client(config_json: str, index: int, site: Site, policy: str | None) -> Client:
    node, guard = dict(site), _guard(config_json, site, policy)
    config = site_config(_config(config_json), node)
    data, networks = _data(dump_config(config))
    return make_client(
        config, index, data=data, networks=networks, site=node, guard=guard, settings=config_json
    )


def forget() -> None:
    """Let go of the clients that this process keeps, of their records and of their books."""
    for kept in (_client, _guard, _data):
        kept.cache_clear()


app = make_client_app()

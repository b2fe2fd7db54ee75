"""Replacement at a site for Flower's ``flwr-clientapp``: its own package, never a bundle's code.

Flower's process unpacks the bundle that came with a run, imports it and runs it, with the site's
data at hand. This one refuses a bundle that is not the installed package's, and answers with the
installed package in any case: nothing that came over the wire is unpacked to disk or executed.

Messages of a secure sum that compute nothing are answered here as the ClientApp would, but without
torch, in the second that it takes to import less.
"""

from __future__ import annotations

import os
import time
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.logger import log
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime import run_clientapp

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.audit_trail import trail_of
from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.bundle import check_bundle
from fednas_flwr.privacy.policy import check_action, load_policy
from fednas_flwr.protocol import sum_requests as sr
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.settings.parser import parse

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor.types import ExecutionSpec

NAME = "fednas-message"  # that ``ps -o comm`` shows


def answer_sum_message(message: Message, context: Context) -> Message:
    """Return the reply to a request for a signature or an opening, or the error of a refusal."""
    node = {key: str(value) for key, value in context.node_config.items()}
    action, request = message.metadata.message_type, None
    trail = trail_of(node)
    try:
        values = sr.read_values(message.content)
        if values.statistics is not None or values.summed is not None:
            raise ConfigError("refused: this request has a header and settings, and nothing else.")
        settings: sr.Settings = parse(sr.REQUESTS[action], values.settings, key="")
        request = sr.Asked(action, values.header, settings)
        trail.asked(request, flower_run=message.metadata.run_id)
        policy, data_set = load_policy(Path(node["policy"])), node["data-set"]
        allowed = check_action(policy, data_set, action, secure_noise=True, test_seed=False)
        if allowed.secure_sum is None:
            raise ConfigError("refused: this site takes no part in secure sums.")
        sums = SumSite.of_node(int(node["partition-id"]), node, allowed.secure_sum)
        properties = sr.answer_sum(sums, request.settings)
        trail.helped(request, properties)
        return Message(
            RecordDict({**sr.encode_values(request.header, properties)}), reply_to=message
        )
    except Exception as error:  # the server must learn why; of anything but a refusal, only that
        told = isinstance(error, ConfigError)
        reason = trail.refused(action, request, error, told=told, private=True)
        return Message(Error(flower_patches.CLIENT_RAISED, reason), reply_to=message)


def answer(spec: ExecutionSpec) -> None:
    """Answer one message, in a process that does nothing else.

    Args:
        spec: Where the SuperNode is, and by which token it hands out the message.

    Raises:
        AttributeError: This Flower has no such function to be replaced: better no answer than an
            answer by the bundle's code.
    """
    Path("/proc/self/comm").write_text(NAME, encoding="ascii")
    flower_patches.answer_with(lambda *_: _answer, check_bundle)  # whatever Flower is to load
    flower_patches.finish_only_with_a_reply()
    root, insecure = spec.root_certificates_path, spec.insecure
    run_clientapp.run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=insecure,
        certificates=validate_and_resolve_root_certificates(root, insecure),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=False,
    )


def _answer(message: Message, context: Context) -> Message:
    """Return the reply; log the seconds of start-up and of the answer.

    Without the ClientApp, which imports torch, where nothing is computed.
    """
    action, begun = message.metadata.message_type, time.monotonic()
    log(INFO, "%s: begun %.2f s after the start of its process", action, _age_s())
    if action in sr.SUM_ACTIONS and "policy" in context.node_config:
        reply = answer_sum_message(message, context)
    else:
        from fednas_flwr.deploy.client_app import app

        reply = app(message, context)
    seconds, cpu = time.monotonic() - begun, time.process_time()
    log(INFO, "%s: answered within %.2f s, after %.2f s of CPU in all", action, seconds, cpu)
    return reply


def _age_s() -> float:
    """Return the seconds since Linux has started this process."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

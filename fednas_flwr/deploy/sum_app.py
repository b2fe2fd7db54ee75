"""A real site's answers to the messages of a secure sum that compute nothing; imports no torch.

They are what the ClientApp would answer, in the second that it takes to import less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.audit_trail import trail_of
from fednas_flwr.deploy.flower_patches import CLIENT_RAISED
from fednas_flwr.privacy.policy import check_action, load_policy
from fednas_flwr.protocol.headers import Header, encode_values, read_json
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.protocol.sum_requests import REQUESTS, SUM_ACTIONS, Settings, answer_sum
from fednas_flwr.settings.parser import parse


@dataclass(frozen=True)
class SumRequest:
    """A request for a signature or an opening."""

    action: str
    header: Header
    settings: Settings


def answers(message: Message, context: Context) -> bool:
    """Return whether a message is one of these, at a site that has a policy."""
    return message.metadata.message_type in SUM_ACTIONS and "policy" in context.node_config


def answer_sum_message(message: Message, context: Context) -> Message:
    """Return the reply to a request for a signature or an opening, or the error of a refusal."""
    node = {key: str(value) for key, value in context.node_config.items()}
    action, request = message.metadata.message_type, None
    trail = trail_of(node)
    try:
        request = _read(action, message.content)
        trail.asked(request, flower_run=message.metadata.run_id)
        policy, data_set = load_policy(Path(node["policy"])), node["data-set"]
        allowed = check_action(policy, data_set, action, secure_noise=True, test_seed=False)
        if allowed.secure_sum is None:
            raise ConfigError("refused: this site takes no part in secure sums.")
        sums = SumSite.of_node(int(node["partition-id"]), node, allowed.secure_sum)
        properties = answer_sum(sums, request.settings)
        trail.helped(request, properties)
        return Message(RecordDict({**encode_values(request.header, properties)}), reply_to=message)
    except Exception as error:  # the server must learn why; of anything but a refusal, only that
        refusal = isinstance(error, ConfigError)
        reason = str(error) if refusal else type(error).__name__
        trail.refused(action, request, reason, None if refusal else error)
        reason = "an error at the site, whose own log says which"
        reason = f"{type(error).__name__}: {error}" if refusal else reason
        return Message(Error(CLIENT_RAISED, reason), reply_to=message)


def _read(action: str, content: RecordDict) -> SumRequest:
    """Return the request in a message.

    Raises:
        ConfigError: It is none.
    """
    try:
        values = read_json(content)
        header, settings = values["header"], values["settings"]
    except Exception as error:  # whatever a server can send
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"refused, a malformed request: {reason}.") from error
    if set(values) != {"header", "settings"}:
        raise ConfigError("refused: a request has a header and settings, and nothing else.")
    own: Header = parse(Header, header, key="header")
    asked: Settings = parse(REQUESTS[action], settings, key="")
    return SumRequest(action, own, asked)

"""Keys of secure sums on real sites: made there, collected by provision, used without records."""

import json
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fednas_flwr.cli import main
from fednas_flwr.client.audit_trail import verify_trail
from fednas_flwr.deploy import flower_patches
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.privacy.books.anchor import MOST_BYTES, counter_of
from fednas_flwr.privacy.policy import load_policy, template
from fednas_flwr.protocol.keys import Roster, SiteKeys, survivors_message
from fednas_flwr.protocol.messages import decode_reply
from fednas_flwr.protocol.secure_sum.sum_site import SumSite

NAMES = ("north", "south", "east")
HEADER = {"run": "r", "stage": "search", "round": 1, "phase": 1, "client": 0, "nonce": "n"}
LIST = """
federation: heart
server: {addresses: [fl.example.org], port: 8000}
sites: [north, south, east]
"""


@pytest.fixture
def deployment(tmp_path):
    (tmp_path / "sites.yaml").write_text(LIST)
    keys = tmp_path / "keys"
    for name in NAMES:
        (tmp_path / name).mkdir()
        assert main(["key", "--sum", str(tmp_path / name / "sum.key")]) == 0
        keys.mkdir(exist_ok=True)
        (keys / f"{name}.pub").write_bytes((tmp_path / name / "sum.pub").read_bytes())
    return tmp_path


def provisioned(folder):
    options = ["--output", str(folder / "out"), "--sum-keys", str(folder / "keys")]
    return main(["provision", str(folder / "sites.yaml"), *options])


def test_provision_gives_every_site_one_roster(deployment, capsys):
    assert provisioned(deployment) == 0
    said = capsys.readouterr().out
    assert len({(deployment / "out" / name / "roster.json").read_bytes() for name in NAMES}) == 1
    roster = Roster.read(deployment / "out" / "north" / "roster.json")
    assert f"roster {roster.fingerprint}: for secure_sum.roster" in said
    assert [site.site for site in roster.sites] == list(NAMES)
    assert SiteKeys.at(deployment / "south" / "sum.key").public("south") == roster.sites[1]
    assert provisioned(deployment) == 0
    assert Roster.read(deployment / "out" / "east" / "roster.json") == roster


@pytest.mark.parametrize("broken", ["missing", "[]", '{"mask": "ab", "signature": "cd"}', "twice"])
def test_keys_that_are_missing_wrong_or_the_same_are_refused(broken, deployment, capsys):
    path = deployment / "keys" / "south.pub"
    if broken == "missing":
        path.unlink()
    elif broken == "twice":
        path.write_bytes((deployment / "keys" / "north.pub").read_bytes())
    else:
        path.write_text(broken)
    assert provisioned(deployment) == 2
    said = capsys.readouterr().err
    assert "holds no public keys of south" in said or "the roster of secure sums" in said


# --- the messages that compute nothing


@pytest.fixture
def node(deployment):
    """The configuration of the node of site north, with a policy of secure sums."""
    assert provisioned(deployment) == 0
    own = deployment / "out" / "north"
    roster = Roster.read(own / "roster.json")
    terms = f"secure_sum: {{roster: {roster.fingerprint}, least_sites: 2, colluding: 0}}"
    (line,) = [text for text in template().splitlines() if "# secure_sum:" in text]
    (own / "policy.yaml").write_text(template().replace(line.strip(), terms))
    files = {"policy": own / "policy.yaml", "ledger-key": deployment / "ledger.key"}
    files |= {"ledger": deployment / "books" / "ledger.sqlite", "roster": own / "roster.json"}
    files |= {"sum-key": deployment / "north" / "sum.key", "sums": deployment / "sums.sqlite"}
    files |= dict.fromkeys(("data-path", "dataset", "cache", "split-key"), "no such file")
    named = {name: str(file) for name, file in files.items()}
    return {"partition-id": 0, "data-set": "my-data", **named}


def begun(node, attempt="a"):
    """Return the context of an exchange that the site has answered."""
    terms = load_policy(Path(str(node["policy"]))).data_sets["my-data"].secure_sum
    assert terms is not None
    site = SumSite.of_node(0, {key: str(value) for key, value in node.items()}, terms)
    own = {"run": "r", "attempt": attempt, "stage": "search", "round": 1, "phase": 1}
    return site.begin(**own, participants=[0, 1, 2], agreed={"request": "h"}).context.hex()


def asked(action, settings, node, **more):
    """Return the site's answer to a message."""
    text = json.dumps({"header": HEADER, "settings": settings, **more})
    flower_patches.begin_task(1)
    message = Message(RecordDict({"header": ConfigRecord({"json": text})}), 1, action)
    flower_patches.set_message_id(message, "1")
    return make_client_app("of no use here")(message, Context(1, 2, dict(node), RecordDict(), {}))


def test_a_site_signs_without_its_records(node, deployment):
    context = begun(node)
    request = {"context": context, "survivors": [0, 2]}
    reply = asked("query.sign_survivors", request, node)
    header, found = decode_reply(reply.content)
    assert vars(header) == HEADER
    assert (found.num_examples, found.states, found.metrics) == (1.0, {}, {})
    signature = bytes.fromhex(found.properties["signature"])
    roster = Roster.read(Path(str(node["roster"])))
    assert roster.has_signed(0, signature, survivors_message(bytes.fromhex(context), (0, 2)))
    assert isinstance(reply.content["metrics"], MetricRecord)
    assert "a site signs one" in asked("query.sign_survivors", request, node).error.reason
    books = deployment / "books" / "audit.jsonl"
    assert verify_trail(books, deployment / "ledger.key") == 4
    events = [json.loads(line)["event"] for line in books.read_text().splitlines()]
    assert events == ["asked", "released", "asked", "refused"]


def test_what_a_site_does_not_sign(node):
    request = {"context": begun(node), "survivors": [0, 2]}
    action = "query.sign_survivors"
    for settings, said in (
        (request | {"survivors": [0]}, "not 2 or more"),
        (request | {"context": "ab" * 32}, "answered no such request"),
        (request | {"context": "zz" * 32}, "64 hex digits"),
        (request | {"more": 1}, "unknown"),
        ({}, "missing"),
        ([], "wrong type"),
    ):
        assert said in asked(action, settings, node).error.reason, settings
    policy = Path(str(node["policy"]))
    whole = policy.read_text()
    policy.write_text(whole.replace("      - query.sign_survivors", "      # - none"))
    assert "rule actions" in asked(action, request, node).error.reason
    policy.write_text(whole.replace("    secure_sum:", "    # secure_sum:"))
    assert "no part in secure sums" in asked(action, request, node).error.reason
    policy.write_text(whole)
    assert asked(action, request, node).has_content()


def test_a_changed_roster_needs_the_sites_edit(node):
    request = {"context": begun(node), "survivors": [0, 2]}
    path = Path(str(node["roster"]))
    path.write_text(path.read_text().replace("south", "west"))
    assert "rule secure_sum.roster" in asked("query.sign_survivors", request, node).error.reason
    path.unlink()
    assert "there is no roster" in asked("query.sign_survivors", request, node).error.reason
    without = {key: value for key, value in node.items() if key != "sum-key"}
    assert "lacks sum-key" in asked("query.sign_survivors", request, without).error.reason


def test_a_flood_of_requests_to_sign_fills_no_disk(node, deployment, capsys):
    request = {"context": begun(node), "survivors": [0, 2]}
    assert not asked("query.sign_survivors", request, node).has_error()
    counter = counter_of(deployment / "ledger.key")
    day = counter.read_text().split()[0]
    counter.write_text(f"{day:>12} {MOST_BYTES:>20} {0:>20}\n")
    other, sizes, said = begun(node, "b"), [], set()
    capsys.readouterr()
    for _ in range(40):
        reply = asked("query.sign_survivors", {"context": other, "survivors": [0, 2]}, node)
        said.add(reply.error.reason)
        files = [path for path in deployment.rglob("*") if path.is_file()]
        sizes.append({path: path.stat().st_size for path in files})
    assert len(said) == 1
    assert "requests have made this site write as much as it writes in a day" in said.pop()
    assert sizes[-1] == sizes[10]
    assert capsys.readouterr().err == ""
    counter.write_text(f"{int(day) - 1:>12} {MOST_BYTES:>20} {0:>20}\n")
    signed = asked("query.sign_survivors", {"context": other, "survivors": [0, 2]}, node)
    assert "signature" in decode_reply(signed.content)[1].properties  # nothing was signed before

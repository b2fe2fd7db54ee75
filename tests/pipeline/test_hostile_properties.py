"""Whatever one client of several declares, the run ends well with the others, and names it.

The properties are those of the table in ``protocol.requests``: one that is new is tried by
itself, and the test says so if no run here has it.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from fednas_flwr.algorithms.base import FARTHEST
from fednas_flwr.algorithms.fdnas import group_name
from fednas_flwr.base.errors import ReplyError
from fednas_flwr.client import answer as entrance
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.models.networks import load
from fednas_flwr.pipeline.beginning import begin
from fednas_flwr.pipeline.stages import _report_spending, describe
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol.messages import decode_request, encode_reply
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.model_card import write_model_card
from fednas_flwr.runs.events import EventLog, read_events
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.reply_checks import NO_LIMITS

from ..asked import FORMS, MODEL, decoded, filled
from ..refusals import refuses
from ..rows import by_hand
from .test_groups import CFDNAS

BAD = 1
NUMBERS = [1e300, -1e300, 1e30, 1e-300, 10**400, 10**18, 10**9, -1, 0, 1, 0.5, math.nan, math.inf]
OTHERS = [None, True, "", "x" * 10**5, "../x", "\ud800", "\U00010400" * 64, [], {}, [[[[1]]]]]
LINEAR = ["algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]"]
# by clients of other runs
SAID = {"awaits": "ab" * 16, "keeps_model": True, "uncounted": ["record"]}
SUMS = {"context", "boxes", "signature", "parts", "pairs"}  # see tests/pipeline/test_secure_sum.py


def variants(honest):
    """Yield hostile values in place of an honest one, of a part of it, of all parts of a kind."""
    yield from (*NUMBERS, *OTHERS)
    if isinstance(honest, list) and honest:
        yield from (honest * 2, honest[:-1])
        yield from ([other, *honest[1:]] for other in variants(honest[0]))
        yield from ([other] * len(honest) for other in NUMBERS)
    if isinstance(honest, dict):
        for key, value in honest.items():
            yield {name: other for name, other in honest.items() if name != key}
            yield from ({**honest, key: other} for other in variants(value))


def passes(name, value):
    try:
        decoded(name, json.loads(json.dumps(value)))
    except ReplyError:
        return False
    return True


@pytest.fixture(scope="module")
def site_files(tmp_path_factory):
    """Three sites' tables of 60 records and a test table: 2 classes, columns of unlike scales."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    labels = rng.integers(0, 2, 240)
    shifts = np.array([[0.0, 30.0], [1e3, 1.2e3], [0.0, 0.02]])
    columns = [both[labels] + rng.normal(0, abs(np.diff(both)), 240) / 3 for both in shifts]
    rows = [f"{a},{b},{c},{'ny'[y]}" for a, b, c, y in zip(*columns, labels, strict=True)]
    files = [folder / f"{name}.csv" for name in ("0", "1", "2", "new")]
    for place, file in enumerate(files):
        file.write_text("\n".join(["a,b,c,y", *rows[place * 60 : place * 60 + 60]]) + "\n")
    return files


@pytest.fixture(scope="module")
def table(site_files):
    *_, new = site_files
    own = ["runtime=deployment", "runtime.superlink=site", "partition=sites", "clients=3", *LINEAR]
    own += ["dataset=csv", f"dataset.root={new}", f"dataset.cache={new.parent / 'cache'}"]
    return [*own, "dataset.label=y", "retrain.rounds=4", "retrain.weights.lr=0.05"]


PRIVATE = ["clients=4", "secure_sum={least_sites: 3, colluding: 1}", *LINEAR, "privacy=dp"]
PRIVATE += ["retrain.rounds=1", "privacy.retrain.local_steps=1", "partition=iid"]
PRIVATE += ["privacy.retrain.noise_multiplier=1"]


@pytest.fixture(scope="module")
def honest(run_inline, table, site_files):
    """By run, each client's replies by action, the last of each, and the run."""
    found, answers = {}, dict(entrance.ANSWERS)
    for name, overrides, sites in (("table", table, site_files[:3]), ("private", PRIVATE, ())):
        replies = {}

        def recording(action, replies=replies):
            def answer(client, request, asked):
                reply = answers[action](client, request, asked)
                replies.setdefault(client.index, {}).setdefault(action, reply)
                return reply

            return answer

        with pytest.MonkeyPatch.context() as patch:
            for action in answers:
                patch.setitem(entrance.ANSWERS, action, recording(action))
            found[name] = replies, run_inline(*overrides, sites=sites)
        assert found[name][1].error is None
    return found


@pytest.fixture
def begun(compose_config, tmp_path):
    """``begun(overrides, replies)``: the events of a run that begins, with these replies."""
    folders = iter(range(10**6))

    def begin_with(overrides, replies):
        folder = tmp_path / str(next(folders))
        config = create_run_folder(compose_config(*overrides, f"run_dir={folder}"))
        app = ClientApp()

        def answering(action):
            def answer(message, context):
                header = decode_request(action, message.content).header
                reply = replies[context.node_config["partition-id"]][action]
                return Message(encode_reply(header, reply), reply_to=message)

            return answer

        for action in ("describe", "commit"):
            app.query(action)(answering(f"query.{action}"))
        grid = InProcessGrid(app, config.clients)
        with EventLog(folder / "events.jsonl") as log:
            with log.attempt(resumed=False, circumstances={}):
                run = begin(config, grid, log, {}, earlier=())
                if run.schedule:
                    _report_spending(run)
                description = describe(run, None, None)
        events = read_events(folder / "events.jsonl")
        if BAD in next(event["clients"] for event in events if event["event"] == "partition"):
            write_report(folder)  # else it has nothing of what the client says
            write_model_card(folder)
        return events, description

    return begin_with


def test_every_property_is_tried(honest):
    replies = [reply for replies, _ in honest.values() for reply in replies[BAD].values()]
    told = {name for reply in replies for name in reply.properties}
    known = told | set(SAID) | SUMS | {"gain", "latency", "sums"}
    assert set(FORMS) == known, "a run that has the new property, please"
    for name, honest_value in SAID.items():
        assert passes(name, honest_value)
        others = (value for value in variants(honest_value) if value is not honest_value)
        assert not any(passes(name, value) for value in others)


@pytest.mark.run
@pytest.mark.parametrize("kind", ["table", "private"])
def test_whatever_a_client_declares_a_run_begins_with_the_others(kind, honest, table, begun):
    """With private clients, what others do not say, too."""
    replies, _ = honest[kind]
    overrides = [*(table if kind == "table" else PRIVATE), "dataset.server_test=false"]
    known = honest["table"][0][BAD]["query.describe"].properties if kind == "private" else {}
    _, usual = begun(overrides, replies)
    tried = set()
    for action in replies[BAD].keys() & {"query.describe", "query.commit"}:
        own = replies[BAD][action]
        for name, value in own.properties.items():
            seen = {json.dumps(value)}
            for hostile in () if name in known and name != "splits" else variants(value):
                key = json.dumps(hostile)
                if key in seen or not passes(name, hostile):
                    continue
                seen.add(key)
                said = replace(own, properties={**own.properties, name: hostile})
                changed = {**replies, BAD: {**replies[BAD], action: said}}
                if name == "client" and hostile in replies:  # which of two nodes is right?
                    with pytest.raises(QuorumError, match="nodes 2 and 3 say that they are the sa"):
                        begun(overrides, changed)
                    continue
                _, description = begun(overrides, changed)
                assert description == usual
                tried.add(name)
    assert len(tried) > 6


# --- what is told later, and whole runs


def hostile_numbers(value, number):
    """Return a property with a number in place of every one."""
    if isinstance(value, dict):
        return {key: hostile_numbers(item, number) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hostile_numbers(item, number) for item in value]
    return number if type(value) in (int, float) else value


BOUNDED = {"moments", "class_counts", "scores", "histogram"}  # who says so stays in the run


FEW = [1e300, 10**400, 10**9, -1, 0, math.nan, 1e29]  # the others are refused, or pass, as these
TRIED = [*FEW, *(by_hand(number) for number in (*NUMBERS, 10**29) if number not in FEW)]


@pytest.mark.parametrize("number", TRIED, ids=str)
def test_no_number_of_a_client_spoils_a_run(number, honest, table, run_inline, site_files, lie):
    """In place of all numbers of its moments, counts, scores and histogram, and of its metrics."""

    def false(reply):
        told = {
            n: hostile_numbers(reply.properties[n], number)
            for n in BOUNDED & reply.properties.keys()
        }
        kept = {name: value for name, value in told.items() if passes(name, value)}
        ranges = {name: NO_LIMITS.metric_range(name) for name in reply.metrics}
        wrong = {
            n: number
            for n, (low, high) in ranges.items()
            if isinstance(number, float) and low <= number <= high
        }
        said, measured = {**reply.properties, **kept}, {**reply.metrics, **wrong}
        return replace(reply, properties=said, metrics=measured)

    for action in dict(entrance.ANSWERS):
        lie(action, false)
    run, usual = run_inline(*table, sites=site_files[:3]), honest["table"][1]
    write_report(run.folder)
    write_model_card(run.folder)
    assert_sound(run)
    found, own = (of.named("evaluated")[0]["central"]["accuracy"] for of in (run, usual))
    assert found > own - 0.1
    assert max(event["metrics"]["train_loss"] for event in run.named("round")) <= FARTHEST


# --- one hostile client among three: it is named and left out


PRIVATE_SEARCH = ["privacy=dp", "search_space.norm=group", "retrain.norm=group", "rounds=1"]
PRIVATE_SEARCH += ["privacy.local_steps=1", "privacy.retrain.local_steps=1", "retrain.rounds=1"]
PRIVATE_SEARCH += ["retrain.weights.clip_norm=null", "retrain.batch_size=8", "privacy.epsilon=50"]
FIXED = ["algorithm=fedavg", "algorithm.network=resnet8_4", "stages=[retrain,evaluate,export]"]
EXACT = [*FIXED, "retrain.rounds=2"]
SEARCHES = {
    "train.weight_gradient": ["algorithm=dp_fnas", "algorithm.batch_size=8", *PRIVATE_SEARCH],
    "train.search": ["algorithm=fed_darts", "algorithm.weights.clip_norm=null", *PRIVATE_SEARCH],
    "train.weights": [*FIXED, *PRIVATE_SEARCH],
}


@pytest.fixture
def lie(lies, monkeypatch):
    """``lie(action, change)``: ``change`` is made to client 1's replies to ``action``."""

    def lie(action, change):
        lies(action, change, BAD)
        monkeypatch.setattr(entrance, "check_fields", lambda *_: None)

    return lie


def saying(**properties):
    return lambda reply: replace(reply, properties={**reply.properties, **properties})


def failures(run):
    """Return who failed and why, but for client 2 that has no test records."""
    return [(e["client"], e["reason"]) for e in run.failed if "split is empty" not in e["reason"]]


def assert_sound(run):
    network = load(run.folder).network
    assert all(torch.isfinite(tensor).all() for tensor in network.state_dict().values())
    assert run.the("exported")["onnx_max_difference"] < 1e-3


# --- what is sent


IMPOSSIBLE = [
    ("train.weight_gradient", 1e3, SEARCHES["train.weight_gradient"]),
    ("train.search", 1e16, SEARCHES["train.search"]),
    ("train.weights", 10, SEARCHES["train.weights"]),
    ("train.weights", 1e3, EXACT),
    ("train.weights", -1.0, EXACT),
]


@pytest.mark.parametrize(("action", "value", "overrides"), IMPOSSIBLE)
def test_values_that_no_client_can_have_spoil_nothing(action, value, overrides, lie, run_inline):
    lie(action, lambda reply: filled(reply, value, ["buffers"] if value < 0 else MODEL))
    run = run_inline(*overrides)
    assert failures(run)
    assert {client for client, _ in failures(run)} == {BAD}
    words = "running_var" if value < 0 else "where an honest client's is at most"
    assert words in failures(run)[0][1]
    assert_sound(run)


# --- what is declared


def schedule_of(run):
    event = run.the("privacy")
    return event["schedule"], [told["client"] for told in event["clients"]]


def test_a_client_that_declares_one_record_raises_nobodys_noise(lie, run_inline):
    overrides = [*SEARCHES["train.weights"], "stages=[retrain]", "privacy.epsilon=4"]
    overrides += ["retrain.batch_size=2"]
    two = run_inline(*overrides, "clients=3")
    lie("query.describe", saying(splits={"train": 1, "validation": 1, "test": 1}))
    run = run_inline(*overrides)
    (failure,) = failures(run)
    assert failure[0] == BAD
    assert f"client {BAD}: it declares 1 train records, where the median client has" in failure[1]
    schedule, clients = schedule_of(run)
    assert clients == [0, 2]
    noise = [planned["noise_multiplier"] for planned in schedule]
    assert noise == pytest.approx([p["noise_multiplier"] for p in schedule_of(two)[0]], rel=0.2)
    lenient = run_inline(*overrides, "privacy.fewest_records=0", "runtime.quorum=0.3")
    assert schedule_of(lenient)[0][0]["noise_multiplier"] > 1.5 * noise[0]


def test_a_client_that_declares_a_billion_records_is_left_out(lie, run_inline):
    lie("query.describe", lambda reply: replace(reply, num_examples=1e9))
    run = run_inline(*EXACT)
    (failure,) = failures(run)
    assert failure[0] == BAD
    assert "declares 1e+09 records" in failure[1]
    assert_sound(run)


# at the guard, and where groups are made
@pytest.mark.parametrize("tag", [["a"], "../../etc"])
def test_a_tag_that_names_no_group_leaves_a_client_out(tag, lie, run_inline):
    lie("query.describe", saying(tag=tag))
    run = run_inline(*CFDNAS, "algorithm.inherit=false stages=[search] algorithm.group_rounds=1")
    (failure,) = failures(run)
    assert failure[0] == BAD
    assert json.loads((run.folder / "groups.json").read_text()) == {"a": [3], "b": [0, 2, 4]}
    assert sorted(path.name for path in (run.folder / "groups").iterdir()) == ["a", "b"]


def test_the_metrics_of_every_action_are_its_own():
    named = {name for action in ACTIONS.values() for name in action.metrics}
    assert all(name.endswith(("loss", "accuracy")) for name in named)
    for action in ACTIONS.values():  # what is released with privacy may be told without
        assert action.releases & named <= action.metrics


NO_FOLDERS = ["../x", "", ".hidden", "a" * 65, "a/b", "a\nb", "\U00010400" * 64, ["a"], None]


@pytest.mark.parametrize("label", NO_FOLDERS)
def test_only_what_names_a_folder_names_a_group(label):
    refuses("", group_name, {"tag": label}, BAD, "tag")
    assert group_name({"tag": "ward 3.b-C_4"}, BAD, "tag") == "ward 3.b-C_4"


def test_a_client_that_declares_many_records_has_half_of_an_average(lie, run_inline):
    """As far as it may: its weight is what all others have together."""
    lie("query.describe", lambda reply: replace(reply, num_examples=2000))
    lie("train.weights", lambda reply: replace(reply, num_examples=2000))
    run = run_inline(*EXACT, "stages=[retrain]")
    assert failures(run) == []
    (warning,) = (e["message"] for e in run.named("warning"))
    assert f"client {BAD} may weigh 2000 of" in warning
    assert "runtime.largest_share" in warning


def test_validation_sums_of_more_records_than_a_client_has_do_not_choose(lie, run_inline):
    def more(reply):
        sums = [1000 * value for value in reply.properties.get("sums", ())]
        return replace(reply, properties=reply.properties | ({"sums": sums} if sums else {}))

    lie("evaluate.model", more)
    run = run_inline(*EXACT, "stages=[retrain,evaluate]", "retrain.evaluate_every=1")
    (warning,) = (event["message"] for event in run.named("warning"))
    assert warning == "malformed validation scores are left out (clients: 1)"
    assert 0 <= run.the("evaluated")["validation"][0] <= 1


@pytest.mark.parametrize("kind", ["mean", "std"])
def test_moments_that_are_far_change_few_features(kind, honest, table, run_inline, site_files, lie):
    """They are named, and make nobody's features equal; more: tests/data/test_statistics.py"""

    def far(reply):
        moments = [{**of, kind: 1e6} for of in reply.properties["moments"]]
        return replace(reply, properties={**reply.properties, "moments": moments})

    _, usual = honest["table"]
    lie("query.describe", far)
    run = run_inline(*table, sites=site_files[:3])
    (warning,) = (event["message"] for event in run.named("warning"))
    assert f"client {BAD} says that " in warning
    assert "declare dataset.statistics" in warning
    told, honest_told = (of.named("statistics")[0] for of in (run, usual))
    for column in range(3):
        assert told["std"][column] < 5 * honest_told["std"][column]
        moved = abs(told["mean"][column] - honest_told["mean"][column])
        assert moved < 5 * honest_told["std"][column]

"""Whole runs by secure sums: equal to plain ones, with dropouts, refusals, and shared noise."""

import importlib
import json
import multiprocessing
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from safetensors.torch import load_file
from scipy.stats import chisquare

from fednas_flwr.cli import main
from fednas_flwr.client.making import make_sum_site
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol.messages import decode_reply, decode_request
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.server.cohort import STRIKES
from fednas_flwr.settings import dump_config

from ..booked import booked, decoded_totals
from ..finished_runs import whole_run
from ..refusals import refuses
from ..rows import seldom

SIZES = ("norm=group", "channels=2", "num_cells=1")
SMALL = [f"{part}.{size}" for part in ("search_space", "retrain") for size in SIZES]
SHORT = [*SMALL, "rounds=1", "retrain.rounds=1", "stages=[search,retrain,evaluate]"]
SHORT += ["dataset.fractions={train: 0.4, validation: 0.3, test: 0.3}"]
SUMS = ("clients=4", "secure_sum={least_sites: 3, colluding: 1}")
DP = [*SMALL, "algorithm=dp_fnas", "privacy=dp", "privacy.epsilon=1000"]
DP += ["algorithm.batch_size=4", "retrain.batch_size=4", "privacy.retrain.local_steps=1"]
DP += [f"privacy.{kind}.noise_multiplier=1" for kind in ("weights", "alphas")]


class LossyGrid(InProcessGrid):
    """Answers with an error wherever ``lost(action, client, number of the message)`` says so."""

    def __init__(self, app, clients, lost, *, records=None):
        super().__init__(app, clients)
        self._lost, self._records, self._count = lost, records, {}

    def answer(self, message):
        action, client = message.metadata.message_type, message.metadata.dst_node_id - 2
        number = self._count[action, client] = self._count.get((action, client), 0) + 1
        if self._lost(action, client, number):
            return Message(Error(5, "the node is gone"), reply_to=message)
        reply = super().answer(message)
        if self._records is not None and reply.has_content():
            self._records.append((action, client, decode_reply(reply.content)[1]))
        return reply


@pytest.fixture
def run(quick_run):
    """``run(*overrides)``: a whole run; what ``lost`` says is lost, replies go to ``records``."""

    def ran(*overrides, lost=lambda *_: False, records=None, grid=LossyGrid, fails=False):
        return quick_run(*overrides, grid=partial(grid, lost=lost, records=records), fails=fails)

    return ran


def weights(folder):
    return load_file(folder / "checkpoints" / "retrain-000001.safetensors")


ALIKE = [
    ("algorithm=fed_darts", "training.momentum=averaged"),
    ("algorithm=fnas", "algorithm.evaluate_every=1", "retrain.exchange=gradients"),
    pytest.param(("algorithm=feathers", "algorithm.num_configurations=3"), marks=pytest.mark.slow),
    seldom(("algorithm=random_search", "search_space.norm=batch", "retrain.norm=batch")),
]


@pytest.mark.parametrize("overrides", ALIKE, ids=lambda overrides: overrides[0])
def test_runs_by_secure_sums_are_those_without(overrides, run):
    plain = (*SHORT, "clients=4", "partition=quantity", "runtime.largest_share=1", *overrides)
    runs = run(*plain), run(*(o for o in plain if o != "clients=4"), *SUMS)
    genotypes = [(ran.folder / "genotype.json").read_bytes() for ran in runs]
    assert genotypes[0] == genotypes[1]
    left, right = (weights(ran.folder) for ran in runs)
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=1e-4)
    for one, other in zip(*(ran.named("round") for ran in runs), strict=True):
        assert one["metrics"].keys() == other["metrics"].keys()
        for name, value in one["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-2, abs=1e-3)
    assert (runs[1].folder / "report.html").exists()
    evaluated = runs[1].the("evaluated")
    assert (evaluated["clients"], evaluated["total"]["sites"]) == ([], 4)


def test_the_server_holds_nothing_of_a_single_client(run):
    records = []
    run(*SHORT, *SUMS, "algorithm=fed_darts", records=records)
    masked = [(v, c, r) for v, c, r in records if not v.startswith("query.")]
    assert {v for v, _, _ in masked} == {"train.search", "train.weights", "evaluate.model"}
    for _, client, reply in masked:
        assert (set(reply.states), dict(reply.metrics), reply.num_examples) == ({"masked"}, {}, 1.0)
        assert set(reply.properties) == {"context", "boxes"}
        assert set(reply.properties["boxes"]) == {str(i) for i in range(4) if i != client}
    assert least_p_value(masked) > 1e-9


def least_p_value(masked):
    """Return the least p-value of uniformity over all byte positions of each action's vectors.

    The highest byte would tell most: of values without masks it is nearly always 0 or 255.
    """
    found = []
    for action in {action for action, _, _ in masked}:
        replies = [reply for asked, _, reply in masked if asked == action]
        for dtype in {dtype for reply in replies for dtype in reply.states["masked"]}:
            values = np.concatenate([reply.states["masked"][dtype].numpy() for reply in replies])
            for byte in values.view(np.uint8).reshape(len(values), -1).T:
                if len(byte) >= 2560:  # ten of each value or more
                    found.append(chisquare(np.bincount(byte, minlength=256)).pvalue)
    assert len(found) >= 4  # positions of the 32 bits of the largest vector, or of its 64
    return min(found)


@pytest.mark.run
@pytest.mark.parametrize("masks", [True, False])
def test_what_a_private_site_sends_is_uniform_by_its_masks_alone(masks, run, monkeypatch):
    """Real messages of an exchange with shared noise; noise alone does not make them uniform."""
    if not masks:
        monkeypatch.setattr("fednas_flwr.protocol.secure_sum.masks.add_mask", lambda *_, **__: None)
    records = []
    run(*DP, *SUMS, "rounds=1", "stages=[search]", "search_space.channels=8", records=records)
    sent = [record for record in records if record[0] == "train.weight_gradient"]
    assert len(sent) == 4
    for one in sent:  # all that there is of one site
        assert (least_p_value([one]) > 1e-9) == masks


@pytest.mark.parametrize("summed", [True, seldom(False)])
def test_clients_with_secure_sums_are_asked_for_no_scores(summed, run):
    """Scores and histograms are not sums, so that no client makes or tells them."""
    asked = []

    class Listening(LossyGrid):
        def answer(self, message):
            if message.metadata.message_type == "evaluate.model":
                asked.append(decode_request("evaluate.model", message.content).settings)
            return super().answer(message)

    sums = SUMS if summed else ("clients=4",)
    assert not run(*SHORT, *sums, "evaluation.positive=2", grid=Listening).failed
    found = [(settings.split, settings.with_scores) for settings in asked]
    scores = [("validation", True)] * 4 + [("test", True)] * 4
    assert found == ([("test", False)] * 4 if summed else scores)


def lost_at(action, clients, *, number=None):
    return lambda v, c, n: v == action and c in clients and number in (None, n)


def lost_from(action, client):
    """Return a loss of a client for good, from the first time that it is asked an action."""
    gone = set()

    def lost(asked, c, _):
        if asked == action and c == client:
            gone.add(c)
        return c in gone

    return lost


@pytest.mark.run
@pytest.mark.parametrize("action", ["train.search", "train.weights", "query.open_masks"])
def test_a_client_lost_before_its_answer_or_after_its_signature(action, run):
    ran = run(*SHORT, *SUMS, "algorithm=fed_darts", lost=lost_from(action, 1))
    assert {e["client"] for e in ran.failed} == {1}
    assert ran.the("evaluated")["total"]["sites"] == 3


@pytest.mark.run
def test_the_total_of_survivors_is_theirs_alone(run):
    lost = lost_at("train.search", {2})
    runs = [
        run(*SHORT, "algorithm=fed_darts", "stages=[search]", *own, lost=lost)
        for own in (("clients=4", "runtime.largest_share=1"), SUMS)
    ]
    name = "checkpoints/search-000001.safetensors"
    plain, summed = (load_file(ran.folder / name) for ran in runs)
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, summed[name], rtol=1e-4, atol=1e-6)


def one_after_the_other(action, client, number):
    return (action, client) in {("train.search", 0), ("query.open_masks", 1)}


FAILING_SUMS = [
    (lost_at("query.sign_survivors", {3}), "not signed the list of survivors (client 3)"),
    (lost_at("query.open_masks", {0, 1, 2}), "with 1 of 4 survivors' openings"),
    (lost_at("query.open_masks", {0, 1, 2, 3}), "with 0 of 4 survivors' openings"),
    (lost_at("train.search", {0, 1}), "rule secure_sum: survivors=[2, 3], not 3 or more"),
    (one_after_the_other, "site 1 has dropped out after site 0"),
]


@pytest.mark.run
@pytest.mark.parametrize(("lost", "said"), FAILING_SUMS)
def test_sums_that_fail_say_so_and_leave_no_trace(lost, said, run):
    ran = run(*SHORT, *SUMS, "algorithm=fed_darts", "stages=[search]", lost=lost, fails=True)
    assert said in str(ran.error) + " ".join(e["reason"] for e in ran.failed)
    assert not list((ran.folder / "checkpoints").glob("search-*"))


def damaged(change, action):
    """Return a grid class in which ``change(content, kept)`` alters client 1's replies."""
    kept = []

    class Damaging(LossyGrid):
        def answer(self, message):
            reply = super().answer(message)
            asked, client = message.metadata.message_type, message.metadata.dst_node_id - 2
            if asked == action and client == 1 and reply.has_content():
                kept.append(reply.content)
                return Message(change(reply.content, kept), reply_to=message)
            return reply

    return Damaging


def other_masks(content, kept):
    """Masked vectors of a peer whose masks are not those agreed on."""
    rng = np.random.default_rng(0)
    vectors = {}
    for dtype, array in content["state.masked"].items():
        vectors[dtype] = Array(rng.integers(-(2**62), 2**62, array.numpy().size).astype(dtype))
    return RecordDict({**content, "state.masked": ArrayRecord(vectors)})


def shorter(content, kept):
    vectors = {d: Array(a.numpy()[:-1]) for d, a in content["state.masked"].items()}
    return RecordDict({**content, "state.masked": ArrayRecord(vectors)})


def telling(**properties):
    """Return a change of a reply that says other properties."""

    def change(content, kept):
        values = json.loads(content["header"]["json"])
        values["properties"] |= properties
        return RecordDict({**content, "header": ConfigRecord({"json": json.dumps(values)})})

    return change


DAMAGES = [
    (other_masks, "the total of 4 sites is beyond 4 times their range"),
    (shorter, "masked vectors of"),
    (telling(context="ab" * 32), "answered another request than the clients before it"),
    (lambda content, kept: kept[0], None),
]


KINDS = ["other masks", "shorter", "another request", "replayed"]


@pytest.mark.run
@pytest.mark.parametrize(("change", "said"), DAMAGES, ids=KINDS)
def test_damaged_replies_fail_the_sum_or_are_left_out(change, said, run):
    rounds, fails = 1 if said else 2, change is other_masks
    own = ("algorithm=fed_darts", "stages=[search]", f"rounds={rounds}")
    ran = run(*SHORT, *SUMS, *own, grid=damaged(change, "train.search"), fails=fails)
    reason = str(ran.error) if fails else ran.failed[0]["reason"]
    # the second round gets the first one's reply once more
    assert (said or "reply to another request") in reason
    assert len(ran.named("round")) == (0 if fails else rounds)


@pytest.mark.run
def test_nobody_is_expelled_for_another_policy_than_the_first_has(run):
    grid, rounds = damaged(telling(context="ab" * 32), "train.search"), STRIKES + 1
    own = ("algorithm=fed_darts", "stages=[search]", f"rounds={rounds}")
    ran = run(*SHORT, *SUMS, *own, grid=grid)
    assert ["compare them with those of client 0" in e["reason"] for e in ran.failed] == [True] * 4
    assert not any("expelled" in event for event in ran.failed)


@pytest.mark.run
def test_the_others_open_what_one_site_keeps_back(run):
    grid = damaged(telling(parts={}), "query.open_masks")
    ran = run(*SHORT, *SUMS, "algorithm=fed_darts", "stages=[search]", "rounds=1", grid=grid)
    assert len(ran.named("round")) == 1


@pytest.mark.run
def test_a_run_that_was_killed_goes_on_with_new_masks(run):
    own, records = (*SHORT, *SUMS, "algorithm=fed_darts", "rounds=2", "stages=[search]"), []
    lost = lost_at("query.sign_survivors", {3}, number=2)
    ran = run(*own, lost=lost, records=records, fails=True)
    assert "not signed" in str(ran.error)
    before = records[-1 - [v for v, _, _ in reversed(records)].index("train.search")][2]
    assert main(["run", f"resume={ran.folder}"]) == 0
    assert [e["round"] for e in read_run(ran.folder).rounds("search")] == [1, 2]
    later = [r.properties["context"] for v, _, r in records[:-8] if v == "train.search"]
    assert before.properties["context"] not in later


MBCONV = "search_space=mbconv retrain=mbconv"
REFUSED = [
    *((f"aggregate={name}", "set aggregate=mean") for name in ("median", "trimmed_mean")),
    ("runtime.wire=int8", "set runtime.wire=float32"),
    ("evaluation.personalised=true", "leave it out"),
    ("clients=1001", "at most 1000"),
    *((f"algorithm={name} {MBCONV}", "asked different things") for name in ("fdnas", "cfdnas")),
    ("algorithm=fedex", "asked different things"),
    ("secure_sum.colluding=3", "raise clients to 5 or more, or lower secure_sum.colluding"),
    ("clients=2", "clients=2 and secure_sum.colluding=1: a sum must .* raise clients to 3 or"),
    *((f"secure_sum.least_sites={least}", "lower secure_sum.colluding") for least in (2, 9)),
    ("runtime=deployment runtime.superlink=site", "set partition=sites privacy=dp"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_has_no_sum_is_refused_at_composition(settings, said, compose_config):
    given = {o.partition("=")[0] for o in settings.split()}
    least = SUMS
    if any(name.startswith("secure_sum.") for name in given):
        least = ("clients=4", "secure_sum=true")
    refuses(said, compose_config, *least, *settings.split())


LINEAR = ["algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "privacy.epsilon=50"]
LINEAR += ["stages=[retrain]", "retrain.rounds=2", "retrain.batch_size=4", "retrain.norm=group"]
LINEAR += ["privacy.retrain.local_steps=2"]


@pytest.mark.run
@pytest.mark.parametrize("exchange", ["null", "models"])
def test_retraining_shares_noise_unless_clients_send_models(exchange, run):
    records = []
    ran = run(*LINEAR, *SUMS, f"retrain.exchange={exchange}", records=records)
    (planned,), told = (ran.the("privacy")[name] for name in ("schedule", "clients"))
    action = {"null": "train.network_gradient", "models": "train.weights"}[exchange]
    shares = exchange == "null"
    assert (planned["action"], planned["shared"], planned["steps"]) == (action, shares, 4)
    assert all(("alone_epsilon" in client) == shares for client in told)
    if shares:
        assert all(client["alone_epsilon"] > client["search_epsilon"] for client in told)
    for client in range(4):
        rows = booked(ran.folder / "sites", client)
        name = f"{action}:weights (noise of 2 sites)" if shares else f"{action}:weights"
        assert {row.action for row in rows} == {name}
        assert {row.release.noise_multiplier for row in rows} == {planned["noise_multiplier"]}
        assert [row.round for row in rows] == [1, 1, 2, 2]
    answers = [reply for asked, _, reply in records if asked == action]
    assert len(answers) == 4 * (4 if shares else 2)
    dtypes = {"int64", "int32"} if shares else {"int64"}
    assert all(set(reply.states["masked"]) == dtypes for reply in answers)


@pytest.mark.run
def test_the_total_carries_the_noise_that_is_booked(run):
    """Of gradients that are 0, exchanges give the noise alone: its std is what the total has."""
    weights = "algorithm.weights={lr: 1, min_lr: 1, momentum: 0, weight_decay: 0, clip_norm: null}"
    noise = ("privacy.weights.noise_multiplier=3", "privacy.weights.max_grad_norm=1e-3")
    own = ("stages=[search]", "rounds=8", "training.class_factors={}", "algorithm.alphas.lr=1e-9")
    with decoded_totals() as totals:
        run(*DP, *SUMS, *own, weights, *noise)
    assert len(totals) == 8
    # 4 sites took part; each adds 1 / 2 of the variance, as only 2 honest ones are relied on.
    assert np.concatenate(totals).std() == pytest.approx(3 * 1e-3 * np.sqrt(4 / 2), rel=0.05)


def test_sites_without_a_run_folder_have_no_keys(compose_config):
    refuses("needs a run folder", make_sum_site, compose_config(*SUMS), 0)


# --- Sites that are killed


VICTIM = 2
BASE = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain]", "retrain.rounds=1")
BASE += ("partition=quantity",)
ASKED, SIGN, OPEN = "train.weights", "query.sign_survivors", "query.open_masks"


@pytest.fixture(scope="module")
def totals(quick_run):
    """The weights that runs without secure sums end in, of all clients and without the victim."""
    found = {}
    for name, lost in (("all", lost_at(ASKED, set())), ("others", lost_at(ASKED, {VICTIM}))):
        own = ("clients=4", "runtime.largest_share=1", "runtime.quorum=0.5")
        found[name] = weights(quick_run(*BASE, *own, grid=partial(LossyGrid, lost=lost)).folder)
    assert not torch.allclose(*(next(iter(w.values())) for w in found.values()), atol=1e-3)
    return found


class KillingGrid(InProcessGrid):
    """Has one client in a process of its own, started again after its death if it ``returns``."""

    def __init__(self, config, action, moment, *, returns=True):
        super().__init__(make_client_app(dump_config(config)), config.clients)
        self._config, self._moment, self._action, self._returns = config, moment, action, returns
        self.deaths = 0
        self._start(action, moment)

    def _start(self, action="", moment=""):
        context = multiprocessing.get_context("forkserver")  # as torch does not survive a fork
        context.set_forkserver_preload(["fednas_flwr.deploy.client_app"])
        self._pipe, theirs = context.Pipe()
        site = importlib.import_module("killed_site")
        terms = (theirs, dump_config(self._config), self._config.clients, action, moment)
        self._process = context.Process(target=site.serve, args=terms, daemon=True)
        self._process.start()
        theirs.close()

    def _bury(self):
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL
        self._pipe.close()
        self.deaths += 1
        if self._returns:
            self._start()

    def answer(self, message):
        if message.metadata.dst_node_id - 2 != VICTIM:
            return super().answer(message)
        gone = Message(Error(5, "the node is gone"), reply_to=message)
        if self.deaths and not self._returns:
            return gone
        try:
            self._pipe.send(message)
            reply = self._pipe.recv()
        except (EOFError, OSError):
            self._bury()
            return gone
        if (message.metadata.message_type, self._moment) == (self._action, "sent"):
            if not self.deaths:
                self._bury()
        return reply

    def close(self):
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            self._pipe.close()


KILLED = [
    (ASKED, "answered", True, "others"),
    (ASKED, "sent", True, "all"),
    (ASKED, "recorded", False, "others"),
    (ASKED, "sent", False, None),
    *((SIGN, moment, True, None) for moment in ("asked", "recorded")),
    (SIGN, "sent", True, "all"),
    (SIGN, "sent", False, "all"),
    (OPEN, "sent", True, "all"),
    (OPEN, "asked", False, "all"),
]


@pytest.mark.run
@pytest.mark.parametrize(("action", "moment", "returns", "total"), KILLED)
def test_a_killed_site_leaves_the_total_of_the_others_or_a_clear_failure(
    action, moment, returns, total, totals, compose_config, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder = tmp_path / "run"
    own = ("runtime.quorum=0.5", f"run_dir={folder}")
    config = create_run_folder(compose_config(*BASE, *SUMS, *own))
    with closing(KillingGrid(config, action, moment, returns=returns)) as grid:
        ran = whole_run(config, grid=lambda *_: grid)
    assert grid.deaths == 1
    if total is None:
        assert "the list of survivors (client 2), so that no mask" in str(ran.error)
        assert not list((folder / "checkpoints").glob("retrain-*"))
        assert main(["run", f"resume={folder}"]) == 0
        total = "all"
    else:
        assert ran.error is None
        failed = {e["client"] for e in ran.named("client_failed")}
        assert failed == (set() if moment == "sent" and (returns or action == OPEN) else {VICTIM})
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, totals[total][name], rtol=1e-4, atol=1e-6)

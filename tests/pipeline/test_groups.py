"""CFDNAS: groups of clients, each a run of its own that inherits the supernet of all."""

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from fednas_flwr.cli import USER_ERROR
from fednas_flwr.models.networks import load
from fednas_flwr.pipeline.groups import group_by_alphas
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.numbers import read_run

from ..booked import booked
from ..finished_runs import assert_same_files, copy_without, named
from ..refusals import refuses, refuses_run

COST = "{table: null, unit: multiply_adds, target: 7e4, loss: additive, scale: %s, exponent: 1.0}"
CFDNAS = ["algorithm.group_by=tag", "algorithm.num_groups=null", "algorithm=cfdnas"]
CFDNAS += ["search_space=mbconv_small", "retrain=mbconv", "clients=5", "search_space.width=0.25"]
CFDNAS += ["search_space.candidates=fdnas", "retrain.local_epochs=1"]
CFDNAS += ["algorithm.search.batch_size=16", "algorithm.search.local_epochs=1"]
CFDNAS += ["retrain.batch_size=16", "algorithm.search.alphas.lr=0.3"]
CFDNAS += ["algorithm.search.warm_up_rounds=0", "rounds=2", "algorithm.group_rounds=2"]
CFDNAS += ["retrain.rounds=1", "algorithm.client_tags=[b,a,b,a,b]"]
HARDWARE = f"algorithm.group_hardware={{a: {COST % 1000.0}}}"


@pytest.fixture(scope="module")
def run(run_inline):
    """``run(*overrides)``: a whole run inline; its folder, events and error."""
    return lambda *overrides, **how: run_inline(*CFDNAS, *(overrides or [HARDWARE]), **how)


@pytest.fixture(scope="module")
def whole(run):
    return run()


def groups_of(run):
    """Return the run's groups, which have every client that answers once."""
    groups = json.loads((run.folder / "groups.json").read_text())
    grouped = sorted(client for clients in groups.values() for client in clients)
    lost = {event["client"] for event in run.named("client_failed", "client_left")}
    assert grouped == [client for client in range(5) if client not in lost]
    return groups


def test_each_group_gets_its_network_report_and_results(whole):
    groups = groups_of(whole)
    assert groups == {"a": [1, 3], "b": [0, 2, 4]}
    finished = {event["group"]: event for event in whole.named("group_finished")}
    assert {name: event["clients"] for name, event in finished.items()} == groups
    for name, event in finished.items():
        assert event["status"] == "completed"
        folder = whole.folder / event["folder"]
        assert folder == whole.folder / "groups" / name
        for file in ("report.html", "MODEL_CARD.md", "genotype.json", "model.onnx", "config.yaml"):
            assert (folder / file).stat().st_size > 0
        network = load(folder)
        assert network(torch.zeros(1, 3, 8, 8)).shape == (1, 3)
        assert event["results"]["num_parameters"] == sum(p.numel() for p in network.parameters())
        rounds = read_run(folder).of_kind("round")
        told = [(e["stage"], e["round"]) for e in rounds]
        assert told == [("search", 1), ("search", 2), ("retrain", 1)]
        assert all(set(e["clients"]) == set(map(str, event["clients"])) for e in rounds)
    assert 'href="./groups/a/report.html"' in (whole.folder / "report.html").read_text()


def test_only_the_group_with_a_hardware_loss_becomes_cheaper(whole):
    finished = whole.named("group_finished")
    costs = {event["group"]: event["results"]["multiply_adds"] for event in finished}
    assert costs["a"] < costs["b"]


def test_groups_go_on_from_the_supernet_of_all_clients(whole, run):
    assert [e["round"] for e in whole.named("round")] == [1, 2]
    shared = load_file(whole.folder / "checkpoints" / "search-000002.safetensors")
    first = "groups/b/checkpoints/search-000001.safetensors"
    of_group = load_file(whole.folder / first)
    naive = run("algorithm.inherit=false", "algorithm.group_rounds=1", "stages=[search]")
    assert not naive.named("round")
    from_scratch = load_file(naive.folder / first)
    batches = [int(s["buffers.int64"][0]) for s in (shared, of_group, from_scratch)]
    assert batches[1] == batches[0] + batches[2] > batches[2] > 0  # seen by the stem's batch norm


def test_inline_groups_run_where_ctrl_c_reaches_them(run, answers):
    def interrupted(*_):
        assert threading.current_thread() is threading.main_thread()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    answers("train.search", interrupted)
    others = signal.signal(signal.SIGINT, signal.default_int_handler)  # Flower's, after other tests
    try:
        refuses("", run, HARDWARE, "algorithm.inherit=false", error=KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGINT, others)


def test_a_group_without_its_quorum_ends_with_the_reason_and_the_other_goes_on(run, answers):
    def failing(honest, client, request, asked):
        if client.index == 3 and asked.local.paths.hardware is not None:
            raise ValueError("the disk is full")
        return honest(client, request, asked)

    answers("train.search", failing)
    short = ("rounds=1", "algorithm.group_rounds=1", "stages=[search]")
    broken = run(HARDWARE, "runtime.quorum=1.0", *short)
    finished = {event["group"]: event for event in broken.named("group_finished")}
    assert finished["b"]["status"] == "completed"
    assert finished["a"]["status"] == "failed"
    assert "the disk is full" in finished["a"]["reason"]
    failures = [e for e in broken.named("client_failed") if e["stage"] == "search"]
    assert {(failure["group"], failure["client"]) for failure in failures} == {("a", 3)}
    assert "the disk is full" in (broken.folder / "groups" / "a" / "report.html").read_text()


def test_a_resumed_run_gives_the_same_networks(whole, run, tmp_path):
    folder = copy_without(whole, tmp_path / "run")
    shutil.rmtree(folder / "groups" / "b")
    for path in (folder / "groups" / "a" / "checkpoints").glob("retrain-*"):
        path.unlink()
    (folder / "groups" / "a" / "genotype.json").unlink()
    (folder / "groups" / "a" / "checkpoints" / "search-000002.safetensors").write_bytes(b"torn")
    groups = json.loads((folder / "groups.json").read_text())
    (folder / "groups.json").write_text(json.dumps(dict(reversed(groups.items()))))
    run(resume=folder)
    assert list(read_run(folder).last("groups")["groups"]) == ["b", "a"]  # as they were saved
    warnings = read_run(folder / "groups" / "a").of_kind("warning")
    assert any("search-000002" in warning["message"] for warning in warnings)
    models = ("groups/a/model.safetensors", "groups/b/model.safetensors")
    assert_same_files(whole.folder, folder, *models)


def test_a_group_is_not_resumed_alone(whole, prints):
    """Of the run's configuration it has the number of clients."""
    told = prints("run", f"resume={whole.folder / 'groups' / 'a'}", code=USER_ERROR)
    assert f"go on with resume={whole.folder}." in told


def test_clients_with_similar_updates_of_the_alphas_form_a_group():
    directions = torch.randn(12) + 0.5 * torch.randn(2, 12)  # not far from each other
    updates = {
        client: 10.0**client * (directions[client % 2] + 0.1 * torch.randn(12)).double()
        for client in range(6)
    }
    assert group_by_alphas(updates, num_groups=2) == {"1": [0, 2, 4], "2": [1, 3, 5]}
    refuses("num_groups=7 for 6 clients", group_by_alphas, updates, num_groups=7)


BY_ALPHAS = ("algorithm.group_by=alphas", "algorithm.num_groups=2", "algorithm.client_tags=[]")
BY_ALPHAS += ("algorithm.group_hardware={}", "algorithm.group_rounds=1")


def test_groups_of_alphas_come_from_all_updates_of_the_search(run, answers):
    """Checked against what the clients were sent and answered."""
    asked_and_answered = []

    def noted(honest, client, request, asked):
        before = torch.cat(list(request.states["alphas"].values())).double()
        reply = honest(client, request, asked)
        after = torch.cat(list(reply.states["alphas"].values())).double()
        asked_and_answered.append((client.index, after - before))
        return reply

    answers("train.search", noted)
    found = run(*BY_ALPHAS, "stages=[search]")
    of_all = asked_and_answered[: 2 * 5]  # rounds, clients; the groups' own searches follow
    sums = {k: sum(moved for client, moved in of_all if client == k) for k in range(5)}
    checkpoints = CheckpointFolder(found.folder / "checkpoints", pytest.fail)
    kept = checkpoints.latest("search").values["updates"]
    for client, moved in sums.items():
        assert moved.abs().max() > 0
        torch.testing.assert_close(torch.tensor(kept[str(client)], dtype=torch.float64), moved)
    assert groups_of(found) == group_by_alphas(sums, num_groups=2)


def test_nodes_need_tags_before_the_search(run):
    failed = run("algorithm.client_tags=[]", fails=True)
    assert "client 0 has no tag: give the node a tag" in str(failed.error)
    assert not failed.named("round")


MISSPELT = HARDWARE.replace("multiply_adds", "ms").replace("additive", "additiv")
BY_NUMBER = "algorithm.group_by=alphas algorithm.num_groups=2"
RESTING = "algorithm.group_hardware={} algorithm.search.warm_up_rounds=2"
REFUSED = {
    "algorithm.client_tags=[]": r"client_tags=\[\]: every simulated client needs a tag",
    "algorithm.client_tags=[a,'',b,a,b]": "every simulated client needs a tag",
    "algorithm.client_tags=[a,b,../c,a,b]": "cannot name a folder",
    "stages=[retrain] genotype=a.json": "its groups begin with a search",
    f"{BY_NUMBER} algorithm.num_groups=6": "num_groups=6 with clients=5",
    "algorithm.client_tags=[a]": "algorithm.client_tags=.* give one for each client, or none",
    "algorithm.group_by=alphas": "num_groups=null: a number is needed",
    "algorithm.num_groups=2": "group_by=tag with algorithm.num_groups=2: a number is for groups",
    HARDWARE.replace("7e4", "7e9"): r"target=7e\+09 multiply_adds cannot be reached",
    MISSPELT: r"hardware\.loss=additiv is unknown.*nearest: additive",
    f"{BY_NUMBER} {HARDWARE}": "group_hardware=a is unknown: choose one of 1, 2",
    f"{BY_NUMBER} {RESTING}": "rounds=2: alphas rest .* raise rounds to 3 or more",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_settings_that_do_not_fit_are_refused(compose_config, overrides):
    refuses_run(REFUSED[overrides], compose_config, *CFDNAS, overrides)
    config = compose_config(*CFDNAS, BY_NUMBER, HARDWARE.replace("{a:", "{2:"))
    assert list(config.algorithm.group_hardware) == ["2"]


PRIVATE = ("privacy=dp", "privacy.epsilon=100", "privacy.local_steps=2", "rounds=1")
PRIVATE += ("privacy.retrain.local_steps=3", "algorithm.group_hardware={}")


def test_private_clients_commit_to_their_groups_rounds_and_repeat_one_that_was_lost_alone(run):
    """Before the first release, under one promise; groups are of tags, which are public."""
    whole = run(*PRIVATE)
    promised = whole.the("privacy")
    steps = {(p["stage"], p["kind"]): p["steps"] for p in promised["schedule"]}
    assert steps == {("search", "weights"): 6, ("search", "alphas"): 6, ("retrain", "weights"): 3}
    assert whole.events.index(promised) < whole.events.index(whole.named("round")[0])
    for client in range(5):
        entries = booked(whole.folder / "sites", client)
        counts = Counter((entry.stage, entry.action.rpartition(":")[2]) for entry in entries)
        assert counts == Counter(steps)
        assert {entry.run for entry in entries} == {entries[0].run}
    for name, clients in (("a", [1, 3]), ("b", [0, 2, 4])):
        events = read_run(whole.folder / "groups" / name).events
        own, spent = named(events, "privacy", "privacy_spent")
        assert [told["client"] for told in own["clients"]] == clients
        assert all(told["spent"] > 0 for told in spent["clients"])
        budget = max(told["epsilon"]["prv"]["train"] for told in own["clients"])
        assert read_run(whole.folder / "groups" / name).numbers()["epsilon"] >= budget
    for path in (whole.folder / "groups" / "b" / "checkpoints").glob("retrain-*"):
        path.unlink()
    run(resume=whole.folder)
    for client in range(5):
        stages = Counter(entry.stage for entry in booked(whole.folder / "sites", client))
        assert stages["search"] == 2 * 6
        assert stages["retrain"] == (3 if client in (1, 3) else 2 * 3)
    numbers = read_run(whole.folder).numbers()
    assert numbers["epsilon"] is not None
    assert numbers["epsilon"] <= 100


def test_private_groups_of_similar_updates_cost_no_release_more(run):
    """They come from what the search has released; a resumed run keeps them."""
    whole = run(*PRIVATE, *BY_ALPHAS, "algorithm.group_rounds=2")
    steps = {(p["stage"], p["kind"]): p["steps"] for p in whole.the("privacy")["schedule"]}
    assert steps == {("search", "weights"): 6, ("search", "alphas"): 6, ("retrain", "weights"): 3}
    for client in range(5):
        stages = Counter(entry.stage for entry in booked(whole.folder / "sites", client))
        assert stages == {"search": 12, "retrain": 3}
    groups = groups_of(whole)
    (whole.folder / "groups" / "1" / "genotype.json").unlink()
    run(resume=whole.folder)
    assert groups_of(whole) == groups


def test_groups_of_alphas_come_about_after_rounds_in_which_they_rest(run):
    assert groups_of(run(*BY_ALPHAS, "algorithm.search.warm_up_rounds=1", "stages=[search]"))


def test_a_client_that_is_no_longer_asked_is_in_no_group_of_alphas(run, answers):
    asked = Counter()

    def broken_later(honest, client, request, terms):
        asked[client.index] += 1
        reply = honest(client, request, terms)
        if client.index == 4 and asked[4] > 1:
            for vector in reply.states["weights"].values():
                vector.fill_(float("nan"))
        return reply

    answers("train.search", broken_later)
    found = run(*BY_ALPHAS, "rounds=4", "stages=[search]")
    assert asked[4] == 4
    assert groups_of(found)
    assert {event["client"] for event in found.failed} == {4}

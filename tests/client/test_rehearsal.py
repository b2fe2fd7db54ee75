"""What self-tests have shown is kept, and the site decides how it computes."""

import json
from dataclasses import replace

import torch
from torch import nn

from fednas_flwr.client import rehearsal
from fednas_flwr.client.answer import answer
from fednas_flwr.client.making import make_client
from fednas_flwr.client.rehearsal import SELF_TESTS, machine, shown_size, structure
from fednas_flwr.privacy.mechanism import micro_batches
from fednas_flwr.settings import with_runtime

from ..refusals import refuses

CPU = torch.device("cpu")


def test_a_result_is_found_again_by_a_later_process_unless_its_file_is_damaged(tmp_path):
    calls, cache = [], tmp_path / "new" / "cache"

    def test():
        calls.append(1)
        return 4

    for _ in range(2):
        assert shown_size(["key", 1.5], cache, test) == 4
        assert len(calls) == 1
    assert shown_size(["other"], cache, test) == 4
    assert len(calls) == 2
    for path in (cache / SELF_TESTS).iterdir():
        path.write_text(json.dumps({"key": "another", "size": 64}))
    assert shown_size(["key", 1.5], cache, test) == 4
    assert len(calls) == 3


def test_a_server_that_asks_for_ever_new_networks_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "MOST_FILES", 3)
    for number in range(6):
        assert shown_size([number], tmp_path, lambda number=number: number + 1) == number + 1
    assert len(list((tmp_path / SELF_TESTS).iterdir())) == 3


def test_the_key_knows_structure_machine_and_settings_but_no_weights(monkeypatch):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    known = structure(network)
    with torch.no_grad():
        network[0].weight.mul_(2)
    assert structure(network.eval()) == known
    others = [
        nn.Sequential(nn.Conv2d(3, 4, 5), nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)).double(),
    ]
    assert len({known, *map(structure, others)}) == 5
    here = machine(CPU, 1)
    assert machine(CPU, 2) != here
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert machine(CPU, 1) != here


def test_the_site_tests_before_it_reads_and_computes_as_tested(make_site, monkeypatch):
    """Every part that is computed then has this size, whatever the number of records drawn."""
    monkeypatch.setattr(rehearsal, "largest_size", lambda *_, **__: 2)
    sizes, divide = [], micro_batches.micro_batches

    def watched(x, y, size):
        for part in divide(x, y, size):
            sizes.append(len(part[0]))
            yield part

    site = make_site(policy={"micro_batch_size": 8})
    monkeypatch.setattr(micro_batches, "micro_batches", watched)
    answer(replace(site.client, cache=None), site.request("train.weight_gradient"))
    rehearsed, *computed = sizes
    assert rehearsed == 8
    assert computed
    assert set(computed) == {2}


def test_threads_are_those_of_policies(make_site, site_config, prepared, tmp_path):
    assert make_site(policy={"threads": 2}).client.threads == 2
    privacy = replace(site_config.privacy, sites=str(tmp_path))

    def client(threads):
        config = replace(site_config, privacy=privacy)
        config = with_runtime(config, threads=threads)
        return make_client(config, 0, data=(prepared, [torch.arange(20).numpy()]), networks={})

    assert client(1).threads == 1
    assert client(1).guard.allowed.micro_batch_size == privacy.micro_batch_size
    refuses("runtime.threads=2, but the simulated sites' policies", client, 2)

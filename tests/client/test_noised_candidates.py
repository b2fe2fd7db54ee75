"""Private candidates behind a site's guard: which sums are noised, and what the noise lies on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from fednas_flwr.models.networks import supernet_space
from fednas_flwr.protocol.states import MOMENTS, Layout, Part, load_states, network_states, unpack
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.optimizer_step import no_moments, path_states

from . import conftest as wards
from .conftest import DIVIDED, METRICS, RECORDS, STEP, TERMS, flat, schedule, step_along

METRICS_TERMS = {"noise_multiplier": METRICS["noise_multiplier"]}
NORM, SIGMA = TERMS["max_grad_norm"], TERMS["noise_multiplier"]
EVERYTHING = schedule(batch_size=None)
PATHS = [[*range(4, 10), 4, 3, 5, 4, 1, 2, 5, 6, 7], DIVIDED, [3] * 15]
ASKED = {"weights": replace(STEP, clip_norm=None), "local_steps": 2, "candidates": PATHS}


@pytest.fixture
def site(make_site):
    return make_site(committed=EVERYTHING, records=np.arange(40), test_seed=b"7")


@pytest.fixture
def supernet(cells_config, prepared, cells):
    supernet = supernet_space(cells_config, prepared).supernet()
    load_states(supernet, cells.states)
    return supernet


def test_steps_are_clipped_sums_of_one_path_after_the_other(site, supernet, totals):
    """The same in float64, one record at a time, with torch's own optimiser."""
    reply = site.ask("train.candidate", **ASKED)
    supernet.double().train()
    start = flat(supernet.weights().values())
    constants = {"lr": STEP.lr, "momentum": STEP.momentum, "weight_decay": 0.01}
    sgd = torch.optim.SGD(supernet.weights().values(), **constants)
    train, norms = site.client.data.train, []
    for path in PATHS:
        candidate = Candidate(supernet, path)
        weights = list(candidate.weights().values())

        def by_weights(x, y, candidate=candidate, weights=weights):
            return torch.autograd.grad(functional.cross_entropy(candidate(x), y), weights)

        for _ in range(ASKED["local_steps"]):
            total, largest = wards.clipped_sum(train, by_weights, NORM)
            norms.append(largest)
            step_along(sgd, weights, total, RECORDS["train"])
    assert max(norms) > NORM
    expected = flat(supernet.weights().values())
    returned = reply.states["weights"]["float32"].double()
    # a pool or a kink may go the other way in float32: one record's share of one step
    assert (returned - expected).norm() < 0.01 * (expected - start).norm()
    assert len(totals) == len(PATHS) * ASKED["local_steps"] == len(site.rows())
    assert all(terms == {"noise_multiplier": SIGMA, "max_grad_norm": NORM} for _, terms in totals)
    rows = {(row.action, row.splits) for row in site.rows()}
    assert rows == {("train.candidate:weights", ("train",))}


def test_noise_lies_on_the_paths_own_weights_and_no_other_moves(site, supernet, cells):
    reply = site.ask("train.candidate", **ASKED | {"candidates": PATHS[:1]})
    layout = Layout.of(network_states(supernet)["weights"])
    sent, returned = (unpack(s["weights"], layout) for s in (cells.states, reply.states))
    moved = {name for name in sent if not torch.equal(sent[name], returned[name])}
    assert moved == set(Candidate(supernet, PATHS[0]).weights())
    assert len(moved) < len(sent)


def test_rewards_are_one_vector_of_counts_over_declared_records(site, supernet, totals):
    """A record is right or wrong about each of M candidates: norm sqrt(M), as noise has it.

    The first is right about every record, by its labels; the second, without an edge, says the same
    class of all records, of which there are two.
    """
    paths = [DIVIDED, [0] * 15, PATHS[0]]
    reply = site.ask("evaluate.candidates", candidates=paths)
    split = site.of_cells.data.validation
    x, y = split.batch(torch.arange(len(split)), "cpu")
    with torch.no_grad():
        said = [Candidate(supernet.eval(), path)(x).argmax(1) for path in paths]
    correct = [int((one == y).sum()) for one in said]
    assert correct[0] == len(split)
    assert correct[1] == int((y == said[1][0]).sum()) < len(split)
    ((total, terms),) = totals
    torch.testing.assert_close(total, torch.tensor(correct).double())
    assert terms == METRICS_TERMS | {"max_grad_norm": math.sqrt(len(paths))}
    rewards = reply.states["rewards"]["float32"]
    torch.testing.assert_close(rewards, torch.tensor(correct) / RECORDS["validation"])
    (row,) = site.rows()
    assert (row.action, row.splits) == ("evaluate.candidates:rewards", ("validation",))
    assert (row.release.sample_rate, row.release.steps) == (1, 1)


@pytest.mark.parametrize("moments", [False, True])
def test_a_reply_about_paths_is_a_part_of_the_whole(moments, site, make_site, supernet, totals):
    """Noise is left out: the releases' totals are those of whole states, too."""
    whole = site.request("train.candidate", moments=moments, **ASKED)
    layouts = {"weights": Layout.of(network_states(supernet)["weights"])}
    if moments:
        layouts[MOMENTS] = Layout.of(no_moments(supernet))
    part = Part(layouts, path_states(supernet, PATHS))
    taken, whole_size = (of["weights"].sizes["float32"] for of in (part.layouts, layouts))
    assert 0 < taken < 0.6 * whole_size
    other = make_site(committed=EVERYTHING, records=np.arange(40), test_seed=b"7")
    sparse = replace(whole.settings, sparse=True)
    narrow = replace(whole, settings=sparse, states=part.of(whole.states))
    expected, reply = site.answer(whole), other.answer(narrow)
    assert reply.digests == {name: layout.digest for name, layout in part.layouts.items()}
    for name, packed in part.of(expected.states).items():
        assert torch.equal(reply.states[name]["float32"], packed["float32"])
    (before, after) = totals[: len(totals) // 2], totals[len(totals) // 2 :]
    for (one, _), (same, _) in zip(before, after, strict=True):
        assert torch.equal(one, same)

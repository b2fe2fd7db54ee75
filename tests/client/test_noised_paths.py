"""Private ProxylessNAS behind a site's guard: what is released, of which records, beside what."""

import copy
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from fednas_flwr.protocol.states import load_states
from fednas_flwr.search import proxyless
from fednas_flwr.settings.optimizers import Adam
from fednas_flwr.spaces.latency_tables import from_json

from ..refusals import refuses
from ..rows import seldom
from . import conftest as wards

NORM, SIGMA = wards.TERMS["max_grad_norm"], wards.TERMS["noise_multiplier"]
ALPHA_NORM = 0.002  # so small that it clips
WEIGHT_TERMS = {"noise_multiplier": SIGMA, "max_grad_norm": NORM}
ALPHA_TERMS = WEIGHT_TERMS | {"max_grad_norm": ALPHA_NORM}
PATHS = proxyless.SampledPaths(warm_up=False, hardware=None)
LOCAL = {"alternating": None, "paths": asdict(PATHS), "steps": 2}
LOCAL |= {"weights": replace(wards.STEP, clip_norm=None), "alphas": Adam(lr=0.05, weight_decay=0.0)}
EVERYTHING = [
    replace(p, max_grad_norm=ALPHA_NORM) if p.kind == "alphas" else p
    for p in wards.schedule(batch_size=None)
    if p.action == "train.search"
]


@pytest.fixture(scope="session")
def site_config(compose_config):
    return compose_config(
        *("algorithm=fdnas", "privacy=dp", "clients=1", "search_space=mbconv_small"),
        *("retrain=mbconv", "retrain.norm=group"),
        *("search_space.norm=group", "search_space.width=0.25"),
    )


@pytest.fixture(scope="session")
def networks(site_config, prepared):
    return wards.make_networks(site_config, prepared)


@pytest.fixture
def ask(make_site, networks):
    """``ask(hold=, **settings)``: a new site and its answer to one ``train.search``."""

    def asked(hold=None, **settings):
        site = make_site(committed=EVERYTHING, hold=hold, records=np.arange(20), test_seed=b"7")
        return site, site.ask("train.search", **(LOCAL | settings))

    return asked


def searched(site, networks, *, loss, warm_up, steps=2):
    """Return the supernet after steps without noise, in float64."""
    supernet = networks.space.supernet()
    load_states(supernet, networks.states["supernet"])
    supernet.double().train()
    alphas, weights = supernet.alphas()["blocks"], supernet.weights()
    adam = torch.optim.Adam([alphas], lr=0.05, betas=(0.0, 0.999))
    sgd = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    generator = site.client.generator(site.request("train.search").header, "search")
    for _ in range(steps):
        if not warm_up:
            paths = proxyless.draw_paths(alphas, number=2, generator=generator)
            old = alphas.detach().clone()
            in_loss = loss if loss is not None and loss.form == "multiplicative" else None

            def by_alphas(x, y, paths=paths, in_loss=in_loss):
                by_gates, _ = proxyless.gate_gradient(supernet, (x, y), paths, hardware=in_loss)
                return [proxyless.alpha_gradient(by_gates, alphas, paths)]

            total, _ = wards.clipped_sum(site.client.data.validation, by_alphas, ALPHA_NORM)
            alphas.grad = total.view_as(alphas) / wards.RECORDS["validation"]
            if loss is not None and loss.form == "additive":
                batch = site.client.data.validation.batch(torch.arange(2), "cpu")
                batch = batch[0].double(), batch[1]
                both, plain = (
                    proxyless.gate_gradient(supernet, batch, paths, hardware=h)[0]
                    for h in (loss, None)
                )
                alphas.grad += proxyless.alpha_gradient(both - plain, alphas, paths)
            adam.step()
            alphas.data = proxyless.rescale(alphas.detach(), old, paths)
        drawn = proxyless.uniform_alphas(alphas.detach()) if warm_up else alphas
        path = proxyless.draw_paths(drawn, number=1, generator=generator)[:, 0].tolist()
        chosen = proxyless.PathNetwork(supernet, torch.tensor(path)[:, None]).weights()

        def by_weights(x, y, path=path, chosen=chosen):
            loss = torch.nn.functional.cross_entropy(supernet.body(x, paths=[[p] for p in path]), y)
            return torch.autograd.grad(loss, list(chosen.values()))

        total, _ = wards.clipped_sum(site.client.data.train, by_weights, NORM)
        wards.step_along(sgd, list(chosen.values()), total, wards.RECORDS["train"])
    return supernet


SEARCHES = [(None, False), ("additive", False), seldom("multiplicative", False), (None, True)]


@pytest.mark.parametrize(("form", "warm_up"), SEARCHES)
def test_private_path_search_is_clipped_steps(form, warm_up, ask, networks, totals):
    loss = None if form is None else wards.hardware_loss(networks.space, form)
    site, reply = ask(hardware=loss, warm_up=warm_up)
    state = {"float32": networks.states["supernet"]["alphas"]["float32"]}
    twin = searched(site, networks, loss=loss, warm_up=warm_up)
    for name, tensors in (("weights", twin.weights()), ("alphas", twin.alphas())):
        if name not in reply.states:
            continue
        found = reply.states[name]["float32"].double()
        torch.testing.assert_close(found, wards.flat(tensors.values()), rtol=1e-4, atol=2e-5)
    if warm_up:
        assert torch.equal(reply.states["alphas"]["float32"], state["float32"])
    expected = [WEIGHT_TERMS] if warm_up else [ALPHA_TERMS, WEIGHT_TERMS]
    assert [terms for _, terms in totals] == expected * 2
    both = [("validation",), ("train",)]
    assert [row.splits for row in site.rows()] == ([("train",)] if warm_up else both) * 2


def test_noise_is_on_the_paths_own_weights_and_on_computed_alphas_alone(ask, networks):
    _, reply = ask(steps=1, weights=replace(wards.STEP, weight_decay=0.0))
    supernet = networks.space.supernet()
    load_states(supernet, networks.states["supernet"])
    before = copy.deepcopy(supernet.state_dict())
    load_states(supernet, reply.states)
    moved = {n for n, t in supernet.state_dict().items() if not torch.equal(t, before[n])}
    blocks = [f"body.blocks.{block}.ops." for block in range(6)]
    used = [{name.split(".")[4] for name in moved if name.startswith(block)} for block in blocks]
    assert all(len(ops) <= 1 for ops in used)
    assert sum(map(len, used)) >= 3
    assert {n for n in before if n.startswith(("body.before", "body.after"))} <= moved
    change = supernet.alphas()["blocks"].detach() - before["alphas.blocks"]
    assert (change != 0).sum(1).tolist() == [2] * 6


@pytest.fixture(scope="module")
def differing(make_site):
    """A site with records and one without."""

    def none(data):
        return replace(data, **{n: replace(s, rows=s.rows[:0]) for n, s in vars(data).items()})

    return make_site(committed=EVERYTHING), make_site(committed=EVERYTHING, hold=none)


TERMS = {"table": None, "unit": "ms", "target": 1.1, "loss": "additive", "scale": 1.0}
TERMS |= {"exponent": 1.0}


def costly(per_op, fixed=0.5, **terms):
    return {"hardware": {"terms": TERMS | terms, "fixed": fixed, "per_op": per_op}}


TRAPS = [
    costly([[0.0, 1.0]], target=1.0),
    costly([], fixed=3.0, target=3.5, loss="multiplicative"),
    costly([[1.0] * 7] * 6, target=3.0),
    costly([[1.0] * 7, [1.0]], target=3.0),
    {"paths": None},
    {"alternating": {"rule": "first_order"}},
    {"batch_size": 8},
    {"steps": None, "epochs": 1},
]


@pytest.mark.parametrize("change", TRAPS)
def test_whether_a_request_fails_does_not_depend_on_the_records(change, differing):
    """And nothing is booked before."""
    sentences = []
    for site in differing:
        error = refuses("", site.ask, "train.search", **LOCAL | change)
        assert site.rows() == []
        sentences.append(error)
    assert sentences[0] == sentences[1]


def test_everything_that_the_server_says_of_costs_is_rehearsed(make_site, networks):
    site = make_site(committed=EVERYTHING)
    loss = wards.hardware_loss(networks.space, "multiplicative")
    for scale in (0.5, 0.5, 2.0):
        given = replace(loss, terms=replace(loss.terms, scale=scale))
        site.ask("train.search", **LOCAL | {"hardware": given, "steps": 1})
    rehearsed = [json.loads(key) for key in site.client.rehearsed]
    assert len({str(chosen[0]) for kind, *chosen in rehearsed if kind.startswith("gates")}) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e30, 1e30])
def test_wild_alphas_draw_paths_and_book_as_ever(value, make_site, networks):
    site = make_site(committed=EVERYTHING, records=np.arange(12))
    for number, columns in enumerate((slice(None), slice(0, 3), slice(3, 7)), 1):
        request = site.request("train.search", **LOCAL)
        alphas = request.states["alphas"]["float32"].clone().view(6, 7)
        alphas[:, columns] = value
        states = {**request.states, "alphas": {"float32": alphas.flatten()}}
        reply = site.answer(replace(request, states=states))
        assert len(site.rows()) == 4 * number
        assert set(reply.states) == {"weights", "alphas"}


def test_a_site_tells_its_latency_and_reads_no_record(make_site, no_record):
    site = make_site()
    reply = site.ask("query.latency", batch_size=1, passes=2)
    assert set(reply.properties) == {"latency"}
    assert not reply.states
    assert not reply.metrics
    assert from_json(reply.properties["latency"]).norm == "group"
    assert site.rows() == []
    refuses("rule data_sets", site.ask, "query.latency", batch_size=1, passes=2, data_set="other")

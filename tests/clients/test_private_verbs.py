"""What the private verbs send: noised, booked releases and public facts, whatever is asked."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from fednas_flwr.clients.private_verbs import (
    METRICS_NORM,
    PRIVATE_VERBS,
    PUBLIC_FACTS,
    RELEASES,
    check_fields,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fednas_flwr.builders.clients import make_client
from fednas_flwr.builders.networks import make_network
from fednas_flwr.clients import release
from fednas_flwr.clients.verbs import VERBS
from fednas_flwr.config import FedAvgSettings, NoPrivacy
from fednas_flwr.data.loaders import Split
from fednas_flwr.errors import BudgetExceededError, ConfigError
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.states import load_states, network_states, pack

from .conftest import (
    ASKED,
    CANDIDATES,
    LOSS_BOUND,
    METRICS,
    RECORDS,
    STEP,
    TERMS,
    TERMS_OF,
    TRIAL,
    schedule,
)

RELEASING = sorted(ASKED)
NORM, SIGMA = TERMS["max_grad_norm"], TERMS["noise_multiplier"]
BOTH = RECORDS["train"] + RECORDS["validation"]


def everything(verb):
    """Return releases over all records at p = 1, so that only noise is drawn."""
    return {kind: TERMS_OF[kind] | {"batch_size": None} for kind in ASKED[verb][1]}


def sums(reply, verb):
    """Return what was released of each state, as the noised sum that it was."""
    vectors = {n: torch.cat([v.double() for v in s.values()]) for n, s in reply.states.items()}
    if verb == "train.weights":  # one step: w - lr * (sum / B + decay * w)
        return {n: vector * (BOTH / STEP["lr"]) for n, vector in vectors.items()}
    if verb == "train.search":  # likewise; Adam's first step does not tell the size of a gradient
        return {"weights": vectors["weights"] * (RECORDS["train"] / STEP["lr"])}
    if verb == "train.candidate":
        return {"weights": vectors["weights"] * (RECORDS["train"] / STEP["lr"])}
    if verb == "train.probe":
        return {"rewards": vectors["rewards"] * (RECORDS["validation"] / LOSS_BOUND)}
    if verb == "evaluate.candidates":  # one vector of three
        return {"rewards": vectors["rewards"] * (RECORDS["validation"] / math.sqrt(3))}
    if verb == "train.gradients":  # scaled to the weights' batch
        vectors["alphas"] *= RECORDS["validation"] / RECORDS["train"]
    if verb == "evaluate.model":
        pair = torch.tensor([reply.metrics["loss"] / (2 * math.log(3)), reply.metrics["accuracy"]])
        return {"metrics": pair.double() * reply.num_examples / METRICS_NORM}
    return vectors


def unreleased(reply):
    """Return all of a reply but the released numbers, and how many of these there are."""
    sizes = {n: {d: v.numel() for d, v in s.items()} for n, s in reply.states.items()}
    return asdict(replace(reply, states={}, metrics={})), sizes, sorted(reply.metrics)


def without_last(name):
    """Return an edit of a client's data that takes one record out of a split."""

    def edit(data):
        split = getattr(data, name)
        return replace(data, **{name: replace(split, rows=split.rows[:-1])})

    return edit


# --- nothing but releases and public facts


def test_every_verb_has_its_fields_listed_and_all_others_are_refused(make_site):
    assert set(PRIVATE_VERBS) == set(PUBLIC_FACTS) | set(RELEASES)
    assert set(ASKED) == set(RELEASES)
    assert all(verb.startswith("query.") for verb in {*PUBLIC_FACTS} - {"train.search"})
    site = make_site()
    for verb in {*VERBS, "evaluate.personalised", ""} - set(PRIVATE_VERBS):
        with pytest.raises(ConfigError, match="private verb"):
            site.ask(verb)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(1, metrics={"train_loss": 0.1}),
        Reply(1, states={"weights": {}, "buffers": {}}),
        Reply(1, facts={"class_counts": [1]}),
        Reply(1, states={"weights": {}}, digests={"weights": "", "rows": ""}),
    ],
)
def test_a_field_that_is_on_no_list_cannot_leave(reply):
    with pytest.raises(RuntimeError, match="must not return"):
        check_fields("train.weights", reply)


def test_unreleased_fields_do_not_move_when_a_record_is_added_removed_or_replaced(make_site):
    held = [np.arange(80), np.arange(79), np.array([0, *range(2, 80)]), np.arange(30)]
    items = schedule(steps=2)
    sites = [make_site(records=rows, committed=items) for rows in held]
    assert len({tuple(map(len, vars(site.client.data).values())) for site in sites}) >= 3
    for verb in [*(v for v in PRIVATE_VERBS if v != "query.latency"), "query.describe"]:
        asked = {"run": "second", "schedule": items[:1]} if verb == "query.commit" else {}
        replies = [unreleased(site.ask(verb, **asked)) for site in sites]
        assert all(reply == replies[0] for reply in replies), verb
        fields, states, metrics = replies[0]
        assert set(fields["facts"]) <= PUBLIC_FACTS.get(verb, set())
        assert {*states, *metrics} == RELEASES.get(verb, set())
        expected = dict.fromkeys(("train.search", "train.candidate"), RECORDS["train"])
        measured = ("train.probe", "evaluate.model", "evaluate.candidates")
        expected |= dict.fromkeys(measured, RECORDS["validation"]) | {"train.weights": BOTH}
        expected = dict.fromkeys(PUBLIC_FACTS, sum(RECORDS.values())) | expected
        assert fields["num_examples"] == expected.get(verb, TERMS["batch_size"])


@pytest.mark.parametrize("verb", RELEASING)
def test_a_record_moves_what_is_released_by_the_clipping_norm_at_most(verb, make_site):
    """The same noise on neighbouring data: the difference is what one record contributes."""
    _, kinds = ASKED[verb]
    items = [i | {"batch_size": None} for i in schedule() if i["verb"] == verb]
    for name in {split for splits in kinds.values() for split in splits}:
        made = {"committed": items, "test_seed": b"7"}
        asked = {"releases": everything(verb), "weights": STEP}
        pair = [
            sums(make_site(hold=hold, **made).ask(verb, **asked), verb)
            for hold in (None, without_last(name))
        ]
        for kind in pair[0]:
            norm = TERMS_OF[kind]["max_grad_norm"]
            moved = (pair[0][kind] - pair[1][kind]).norm().item()
            if verb == "train.probe" and name == "train":
                assert moved > 0  # through the weights, for which the local steps are booked
            elif verb == "train.search" and name == "validation":
                continue  # it moves weights through the alphas at most, after their release
            elif name in kinds[kind]:
                # of three candidates DIVIDED is right about every record
                least = norm / math.sqrt(3) if verb == "evaluate.candidates" else 1e-4 * norm
                assert least * (1 - 1e-6) < moved <= norm * (1 + 1e-3)
            else:
                assert moved == 0


@pytest.mark.parametrize("verb", RELEASING)
def test_two_answers_to_the_same_request_differ_by_new_noise_of_the_booked_scale(verb, make_site):
    site = make_site(committed=[i | {"batch_size": None} for i in schedule()])
    asked = {"releases": everything(verb), "weights": STEP}
    first, second = (sums(site.ask(verb, **asked), verb) for _ in range(2))
    for kind, one in first.items():
        noise = (one - second[kind]) / math.sqrt(2)
        if verb == "train.candidate":  # weights beside its path have none
            assert 0.2 < (noise == 0).double().mean() < 0.9
            noise = noise[noise != 0]
        if noise.numel() < 1000:  # too few for the scale, which the gate's own test measures
            assert noise.abs().min() > 0
            assert noise.abs().max() < 7 * max(SIGMA * NORM, METRICS["noise_multiplier"])
        else:
            assert noise.std() == pytest.approx(SIGMA * NORM, rel=6 / math.sqrt(2 * len(noise)))


def test_the_noise_does_not_depend_on_the_runs_seed(make_site):
    """Two sites that are equal to the last byte of their configuration draw different noise."""
    asked = {"releases": everything("train.weight_gradient")}
    items = [i | {"batch_size": None} for i in schedule()]
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        reply = make_site(committed=items).ask("train.weight_gradient", **asked)
        states.append(reply.states["weights"]["float32"])
    assert (states[0] == states[1]).float().mean() < 0.01


def test_what_a_verb_returns_is_checked_before_it_leaves(make_site, monkeypatch):
    monkeypatch.setitem(PRIVATE_VERBS, "train.weights", lambda *_: Reply(1, metrics={"loss": 1.0}))
    with pytest.raises(RuntimeError, match="must not return"):
        make_site().ask("train.weights")


@pytest.mark.parametrize("drawn", ["nothing", "drop-path", "crops"])
def test_drop_path_and_augmentation_are_drawn_anew_and_not_from_the_runs_seed(
    drawn, make_site, without_noise
):
    site = make_site(committed=[i | {"batch_size": None} for i in schedule()])
    if drawn == "crops":
        site.client.augmentation.__dict__["crop_padding"] = 2
    asked = {"drop_path_prob": 0.5} if drawn == "drop-path" else {}
    asked |= {"releases": everything("train.weights"), "weights": STEP}
    _, *replies = (site.ask("train.weights", **asked) for _ in range(3))  # the first rehearses
    vectors = [reply.states["weights"]["float32"] for reply in replies]
    assert torch.equal(*vectors) == (drawn == "nothing")


# --- the computation, against float64 loops of batch size 1


@pytest.fixture
def without_noise(monkeypatch):
    """Noise is left out; yields the noise multiplier and norm that it would have had."""
    asked = []

    def identity(total, generator, *, noise_multiplier, max_grad_norm):
        asked.append((noise_multiplier, max_grad_norm))
        return total

    monkeypatch.setattr(release, "add_noise", identity)
    return asked


def clipped(network, split, parameters, norm, factors=None):
    """Return the sum of clipped gradients, one float64 record at a time."""
    total, most = [torch.zeros_like(p) for p in parameters], 0.0
    for row in range(len(split)):
        x, y = split.batch(torch.tensor([row]), "cpu")
        loss = functional.cross_entropy(network(x.double()), y)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients = [
            torch.zeros_like(p) if g is None else g
            for g, p in zip(gradients, parameters, strict=True)
        ]
        length = torch.cat([g.reshape(-1) for g in gradients]).norm().item()
        most = max(most, length)
        scale = min(1.0, norm / length) * (1.0 if factors is None else factors[y].item())
        total = [t + scale * g for t, g in zip(total, gradients, strict=True)]
    assert most > norm or len(parameters) == 1  # of the alphas, whose gradients are small
    return total


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def close(actual, expected):
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_clipped_sums_at_the_same_point_over_local_steps(
    steps, make_site, networks, without_noise
):
    lrs = {"weights": 2.0, "alphas": 1.0}
    given = everything("train.gradients")
    given["alphas"] |= {"max_grad_norm": (small := 0.004)}
    items = [i for i in schedule(batch_size=None) if i["verb"] == "train.gradients"]
    items = [i | given[i["kind"]] for i in items]
    site = make_site(committed=items, records=np.arange(40))
    asked = {"releases": given, "local_steps": steps, "local_lrs": lrs, "micro_batch_size": 7}
    reply = site.ask("train.gradients", **asked)
    assert without_noise == [(SIGMA, NORM), (SIGMA, small)] * steps
    assert [row.splits for row in site.rows()] == [("train",), ("validation",)] * steps
    supernet = networks.space.supernet()
    load_states(supernet, networks.states["supernet"])
    supernet.double().train()
    weights, alphas = list(supernet.weights().values()), list(supernet.alphas().values())
    moves = {"weights": 0.0, "alphas": 0.0}
    for _ in range(steps):
        data = site.client.data
        new = {
            "weights": [g / 40 for g in clipped(supernet, data.train, weights, NORM)],
            "alphas": [g / 20 for g in clipped(supernet, data.validation, alphas, small)],
        }
        with torch.no_grad():
            for state, parameters in (("weights", weights), ("alphas", alphas)):
                moves[state] = moves[state] + flat(new[state])
                for parameter, gradient in zip(parameters, new[state], strict=True):
                    parameter -= lrs[state] * gradient
    assert reply.num_examples == 40
    for state, move in moves.items():
        close(reply.states[state]["float32"], move * 40)


def test_retraining_is_dp_sgd_with_momentum_over_train_and_validation(
    make_site, networks, without_noise
):
    items = [i | {"batch_size": None} for i in schedule()]
    site = make_site(committed=items, records=np.arange(40))
    asked = {"releases": everything("train.weights"), "local_steps": 3, "weights": STEP}
    reply = site.ask("train.weights", **asked)
    assert without_noise == [(SIGMA, NORM)] * 3
    assert [row.splits for row in site.rows()] == [("train", "validation")] * 3
    network = make_network(networks.description)
    load_states(network, networks.states["derived"])
    network.double().train()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        total = clipped(network, site.client.split("train+validation"), parameters, NORM)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient / BOTH
        optimizer.step()
    close(reply.states["weights"]["float32"], flat(parameters))
    assert reply.num_examples == BOTH


FACTORS = torch.tensor([0.2, 1.0, 0.6])


@pytest.mark.parametrize("factors", [None, FACTORS])
def test_private_search_alternates_clipped_steps_of_alphas_and_weights(
    factors, make_site, networks, without_noise
):
    items = [i | {"batch_size": None} for i in schedule()]
    site = make_site(committed=items, records=np.arange(40))
    site.client.__dict__["class_factors"] = factors
    asked = {"releases": everything("train.search"), "local_steps": 2}
    reply = site.ask("train.search", **asked)
    assert without_noise == [(SIGMA, NORM)] * 4
    assert [row.splits for row in site.rows()] == [("validation",), ("train",)] * 2
    assert reply.num_examples == RECORDS["train"]
    supernet = searched(site, networks, factors, steps=2)
    close(reply.states["weights"]["float32"], flat(supernet.weights().values()))
    close(reply.states["alphas"]["float32"], flat(supernet.alphas().values()))


def searched(site, networks, factors, *, steps):
    """Return the supernet after clipped steps without noise, in float64."""
    supernet = networks.space.supernet()
    load_states(supernet, networks.states["supernet"])
    supernet.double().train()
    weights, alphas = list(supernet.weights().values()), list(supernet.alphas().values())
    adam = torch.optim.Adam(alphas, lr=0.01, betas=(0.5, 0.999))
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        for optimizer, parameters, split in (
            (adam, alphas, "validation"),
            (sgd, weights, "train"),
        ):
            total = clipped(supernet, site.client.split(split), parameters, NORM, factors)
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter.grad = gradient / RECORDS[split]
            optimizer.step()
    return supernet


@pytest.mark.parametrize("factors", [None, FACTORS])
def test_a_probe_releases_the_clipped_decrease_of_each_trial(
    factors, make_site, networks, without_noise
):
    """Trials start from the same states and are booked like the search that they are."""
    items = [i | {"batch_size": None} for i in schedule()]
    site = make_site(committed=items, records=np.arange(40))
    site.client.__dict__["class_factors"] = factors
    slow = TRIAL | {"weights": STEP | {"lr": 1e-6}, "alphas": {"lr": 0.0, "weight_decay": 0.0}}
    asked = {"releases": everything("train.probe"), "local_steps": 2}
    reply = site.ask("train.probe", trials=[slow, TRIAL, slow], loss_bound=(bound := 0.01), **asked)
    trial = [(SIGMA, NORM)] * 4 + [(METRICS["noise_multiplier"], METRICS["max_grad_norm"])]
    assert without_noise == trial * 3
    splits = [*[("validation",), ("train",)] * 2, ("validation",)]
    assert [row.splits for row in site.rows()] == splits * 3
    assert reply.num_examples == RECORDS["validation"]
    first, rewarded, last = reply.states["rewards"]["float32"].tolist()
    assert first == last
    assert abs(first) < 1e-4 < abs(rewarded)
    before = networks.space.supernet()
    load_states(before, networks.states["supernet"])
    after = searched(site, networks, factors, steps=2)
    data = site.client.data.validation
    x, y = data.batch(torch.arange(len(data)), "cpu")
    factor = 1.0 if factors is None else factors[y]
    with torch.no_grad():
        decreases = factor * sum(
            sign * functional.cross_entropy(net.double().eval()(x.double()), y, reduction="none")
            for sign, net in ((1, before), (-1, after))
        )
    assert decreases.abs().max() > bound > decreases.abs().min()
    mean = decreases.clamp(-bound, bound).sum().item() / RECORDS["validation"]
    assert rewarded == pytest.approx(mean, rel=1e-4)


def derived_probe(make_site, networks, *, split):
    """Return a site that keeps to training on a split, and a request for a trial that does."""
    terms = {"stage": "retrain", "verb": "train.probe", "steps": 50}
    items = [
        terms | {"kind": "weights", "splits": split.split("+")} | TERMS,
        terms | {"kind": "rewards", "splits": ["validation"]} | METRICS,
    ]
    site = make_site(committed=items)
    releases = {"weights": TERMS, "rewards": METRICS}
    asked = {"network": networks.description, "split": split, "auxiliary_weight": 0.0}
    request = site.request("train.probe", releases=releases, local_steps=2, **asked)
    header = replace(request.header, stage="retrain")
    return site, replace(request, header=header, states=networks.states["derived"])


@pytest.mark.parametrize("split", ["train", "test", "train+validation"])
def test_trials_of_a_derived_network_read_what_is_booked_and_nothing_else(
    split, make_site, networks, monkeypatch
):
    site, request = derived_probe(make_site, networks, split=split)
    data, read, batch = vars(site.client.data), set(), Split.batch

    def noted(records, indices, device):
        read.update(records.rows[indices].tolist())
        return batch(records, indices, device)

    monkeypatch.setattr(Split, "batch", noted)
    assert set(site.answer(request).states) == {"rewards"}
    booked = {*split.split("+"), "validation"}
    assert read <= {row for name in booked for row in data[name].rows.tolist()}
    assert all(read & set(data[name].rows.tolist()) for name in booked)
    assert [row.splits for row in site.rows()] == [tuple(split.split("+"))] * 2 + [("validation",)]


@pytest.mark.parametrize("split", ["test", "validation", "train+validation", "", None])
def test_trials_that_train_on_another_split_than_the_committed_are_refused(
    split, make_site, networks, no_record
):
    site, request = derived_probe(make_site, networks, split="train")
    request = replace(request, settings=request.settings | {"split": split})
    with pytest.raises(ConfigError, match="commitment=None|do not fit train.probe"):
        site.answer(request)
    assert site.rows() == []


def test_losses_and_accuracies_are_sums_of_bounded_terms_over_declared_records(
    make_site, networks, without_noise
):
    site = make_site()
    request = site.request("evaluate.model")
    large = {"weights": {"float32": 20 * request.states["weights"]["float32"]}}
    request = replace(request, states={**request.states, **large})
    reply = site.answer(request)
    assert without_noise == [(METRICS["noise_multiplier"], METRICS["max_grad_norm"])]
    supernet = networks.space.supernet()
    load_states(supernet, request.states)
    data, bound = site.client.data.validation, 2 * math.log(3)
    x, y = data.batch(torch.arange(len(data)), "cpu")
    with torch.no_grad():
        logits = supernet.eval()(x)
    losses = functional.cross_entropy(logits, y, reduction="none")
    assert losses.max() > bound > losses.min()
    losses = losses.clamp(max=bound)
    right = (logits.argmax(1) == y).sum()
    assert len(data) != 20
    assert reply.metrics["loss"] == pytest.approx(losses.sum().item() / 20, rel=1e-5)
    assert reply.metrics["accuracy"] == pytest.approx(right.item() / 20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_weights_that_blow_up_the_loss_release_bounded_sums(bad, make_site, without_noise):
    site = make_site()
    for verb in RELEASING:
        request = site.request(verb, weights=STEP)
        states = {n: {d: v.clone() for d, v in s.items()} for n, s in request.states.items()}
        states["weights"]["float32"][::7] = bad
        reply = site.answer(replace(request, states=states))
        if verb == "evaluate.model":
            total = len(site.client.data.validation) / 20
            assert 0 <= reply.metrics["loss"] <= total * 2 * math.log(3) * (1 + 1e-6)
            assert 0 <= reply.metrics["accuracy"] <= total
        elif verb == "train.probe":
            total = len(site.client.data.validation) / 20 * LOSS_BOUND
            assert reply.states["rewards"]["float32"].abs().item() <= total * (1 + 1e-6)
        elif "gradient" in verb:  # of the others the weights stay what they were
            assert all(v.isfinite().all() for v in reply.states[next(iter(reply.states))].values())


# --- hostile requests


@pytest.mark.parametrize(
    ("verb", "change", "words"),
    [
        ("train.weights", {"data_set": "other"}, "rule data_sets: data set=other"),
        ("train.weights", {"data_set": None}, "rule data_sets"),
        ("query.commit", {"data_set": "other"}, "rule data_sets"),
        ("query.commit", {"data_set": None}, "rule data_sets"),
        ("train.gradients", {"order": 2}, "rule first order only: order=2"),
        ("train.weights", {"raw_metrics": True}, "rule no raw_metrics"),
        ("evaluate.model", {"raw_metrics": 1}, "rule no raw_metrics"),
        ("train.weights", {"oversampling": True}, "rule no oversampling"),
        ("train.weights", {"releases": {}}, "rule noised releases only: release=None"),
        ("train.weights", {"releases": {"alphas": TERMS}}, "rule noised releases only"),
        ("train.gradients", {"releases": {"weights": TERMS}}, "rule noised releases only"),
        ("train.gradients", {"local_steps": 51}, "rule committed values: steps=51"),
        ("train.gradients", {"local_steps": 0}, "rule largest_steps"),
        ("train.weights", {"local_steps": math.inf}, "rule largest_steps"),
        ("train.weights", {"split": "test"}, "rule committed values: commitment=None"),
        ("train.weights", {"split": "train"}, "rule committed values: commitment=None"),
        ("evaluate.model", {"split": "train"}, "rule committed values: commitment=None"),
        ("evaluate.model", {"split": "train+validation"}, "commitment=None"),
        ("evaluate.model", {"network": {"name": "nothing"}}, "do not fit evaluate.model"),
        ("train.weights", {"weights": STEP | {"lr": math.nan}}, "lr=nan is no number"),
        ("train.weights", {"weights": STEP | {"lr": 0}}, "weights.lr=0.0 is out of range"),
        ("train.search", {"weights": STEP | {"lr": 0}}, "weights.lr=0.0 is out of range"),
        ("train.probe", {"trials": 3 * [TRIAL], "local_steps": 17}, "committed values: steps=51"),
        ("train.probe", {"trials": 51 * [TRIAL]}, "committed values: steps=51"),
        ("train.probe", {"trials": [TRIAL, {}]}, "do not fit train.probe"),
        ("train.probe", {"trials": []}, "trials=.* are not 1 to 1000"),
        ("train.probe", {"trials": {"x": 1}}, "trials=.* are not 1 to 1000"),
        ("train.probe", {"local_steps": True}, "local_steps=True is not"),
        ("train.probe", {"loss_bound": 9e-4}, "loss_bound=0.0009 is not 0.001 or more"),
        ("train.probe", {"loss_bound": 5e-324}, "loss_bound=5e-324 is not"),
        ("train.probe", {"trials": [TRIAL | {"split": "test"}]}, "may set nothing but alphas, d"),
        ("train.probe", {"trials": [TRIAL | {"local_steps": 9}]}, "may set nothing but"),
        ("train.probe", {"trials": [TRIAL | {"network": {"name": "x"}}]}, "may set nothing but"),
        ("train.probe", {"trials": ["weights"]}, "a trial=weights may set nothing but"),
        ("train.probe", {"loss_bound": math.nan}, "loss_bound=nan is no number"),
        ("train.candidate", {"candidates": 51 * [[5] * 15]}, "committed values: steps=51"),
        ("train.candidate", {"candidates": 3 * [[5] * 15], "local_steps": 17}, "steps=51"),
        ("train.candidate", {"candidates": []}, "candidates=.* are not a list of 1 to 1000"),
        ("train.candidate", {"candidates": [[5] * 16]}, "a path must be 15 columns of ops"),
        ("evaluate.candidates", {"candidates": 1001 * [[5] * 15]}, "not a list of 1 to 1000"),
        ("evaluate.candidates", {"candidates": {"a": 1}}, "not a list of 1 to 1000"),
    ],
)
def test_requests_outside_the_rules_are_refused_before_data_is_read(
    verb, change, words, make_site, no_record
):
    site = make_site()
    with pytest.raises(ConfigError, match=words):
        site.ask(verb, **change)
    assert site.rows() == []


OTHER_TERMS = [
    ("noise_multiplier", 0, "rule least_noise_multiplier"),
    ("noise_multiplier", 0.0999, "rule least_noise_multiplier"),
    ("noise_multiplier", 1.4, "rule committed values: noise_multiplier=1.4"),
    ("noise_multiplier", 1.6, "rule committed values"),
    ("max_grad_norm", math.inf, "rule largest_grad_norm"),
    ("max_grad_norm", 0.6, "rule committed values: max_grad_norm=0.6"),
    ("batch_size", 9, "rule committed values: sample_rate"),
    ("batch_size", None, "rule committed values: sample_rate=1.0"),
    *((term, bad, f"rule .*: {name}=|do not fit") for term, name in {
        "noise_multiplier": "noise_multiplier",
        "max_grad_norm": "max_grad_norm",
        "batch_size": "sample_rate",
    }.items() for bad in (math.nan, "1", True, [1], 10**400, -1)),
]  # fmt: skip


def test_terms_other_than_the_committed_are_refused_by_every_verb(make_site, no_record):
    site = make_site()
    for verb, (_, kinds) in ASKED.items():
        for term, value, words in OTHER_TERMS:
            for kind in kinds:
                given = {k: dict(TERMS_OF[k]) for k in kinds}
                given[kind][term] = value
                all_records = TERMS_OF[kind] is METRICS and value == 10**400
                if given[kind] == TERMS_OF[kind] or all_records:
                    continue
                with pytest.raises(ConfigError, match=words) as refusal:
                    site.ask(verb, releases=given)
                assert len(str(refusal.value)) < 250
    assert site.rows() == []


def test_batch_norm_is_refused_before_data_is_read(make_site, networks, no_record):
    site = make_site()
    description = networks.description | {"norm": "batch"}
    states = {n: pack(s) for n, s in network_states(make_network(description)).items() if s}
    for verb, split in (("train.weights", "train+validation"), ("evaluate.model", "validation")):
        request = site.request(verb, network=description, split=split)
        with pytest.raises(ConfigError, match="rule no batch_norm"):
            site.answer(replace(request, states=states))
    supernet = replace(networks.space, norm="batch").supernet()
    site.client.networks['{"name": "supernet"}'] = supernet
    states = {n: pack(s) for n, s in network_states(supernet).items() if s}
    for verb in sorted({*RELEASING} - {"train.weights", "evaluate.model", *CANDIDATES}):
        with pytest.raises(ConfigError, match="rule no batch_norm"):
            site.answer(replace(site.request(verb), states=states))
    assert site.rows() == []


TRAPS = [  # requests that could fail on some records and not on others
    ("evaluate.model", {"network": {"num_classes": 2}}),
    ("train.weights", {"network": {"num_classes": 2}}),
    ("train.weights", {"network": {"input_shape": [1, 8, 8]}}),
    ("train.weights", {"network": {"input_shape": [3, 4, 4]}}),
    ("train.weights", {"drop_path_prob": "x"}),
    ("train.weights", {"drop_path_prob": 1}),
    ("train.weights", {"auxiliary_weight": "x"}),
    ("train.weights", {"micro_batch_size": "x"}),
    ("train.alpha_gradient", {"micro_batch_size": 0}),
    ("train.alpha_gradient", {"local_lrs": {"alphas": "x"}}),
    ("train.search", {"alphas": {"lr": "x", "weight_decay": 0.0}}),
    ("train.candidate", {"candidates": [[5] * 15, [10] * 15]}),
    ("train.candidate", {"weights": {}}),
    ("evaluate.candidates", {"candidates": [[5] * 14]}),
    ("train.probe", {"loss_bound": "x"}),
    ("train.probe", {"trials": [TRIAL, TRIAL | {"weights": {}}]}),
]


@pytest.mark.parametrize(("verb", "change"), TRAPS)
def test_whether_a_request_fails_does_not_depend_on_the_records(verb, change, make_site, networks):
    """An error would be a release: that there is a record of a class, or any record at all."""

    def only(choose):
        def edit(data):
            splits = vars(data)
            return replace(
                data, **{n: replace(s, rows=choose(s, s.rows)) for n, s in splits.items()}
            )

        return edit

    held = {
        "all": None,
        "none": only(lambda split, rows: rows[:0]),
        "one": only(lambda split, rows: rows[:1]),
        "no record of the last class": only(lambda split, rows: rows[split.labels[rows] < 2]),
    }
    outcomes = {}
    for name, hold in held.items():
        site = make_site(hold=hold, committed=[i | {"batch_size": None} for i in schedule()])
        asked = copy.deepcopy(change) | {"releases": everything(verb)}
        if "network" in asked:
            asked["network"] = networks.description | asked["network"]
            network = make_network(asked["network"])
        else:
            network = None
        request = site.request(verb, **asked)
        if network is not None:
            request = replace(request, states={"weights": pack(dict(network.named_parameters()))})
        try:
            outcomes[name] = unreleased(site.answer(request))
        except ConfigError as error:
            outcomes[name] = str(error), len(site.rows())
    assert all(outcome == outcomes["all"] for outcome in outcomes.values()), outcomes


JUNK = [None, True, False, "1", "", [], [1], {}, math.nan, math.inf, -math.inf, 0, -1, -0.0]
JUNK += [1e-300, 1e300, 10**400, 2**63, 0.5, 1, 1.0, 2, 8, 1.5, 4.0, "train", "validation"]
KEYS = {
    **{(term,): JUNK for term in ("data_set", "local_steps", "micro_batch_size", "order")},
    **{(term,): JUNK for term in ("releases", "local_lrs", "weights", "network", "split")},
    **{(term,): JUNK for term in ("drop_path_prob", "auxiliary_weight", "schedule")},
    **{(term,): JUNK for term in ("trials", "loss_bound", "alphas")},
    ("candidates",): [*JUNK, [[0] * 14], [[10] * 15], [[1.0] * 15], [["5"] * 15], ["5" * 15]],
    **{(flag,): [True, False, 0, 1, None, "no"] for flag in ("oversampling", "raw_metrics")},
    **{("releases", kind): JUNK for kind in ("weights", "alphas", "metrics")},
    **{
        ("releases", kind, term): JUNK
        for kind in ("weights", "alphas", "metrics")
        for term in TERMS
    },
    **{("local_lrs", state): JUNK for state in ("weights", "alphas")},
    **{("weights", term): JUNK for term in STEP},
    **{("network", term): [None, "x", 0, -1, 2.5, [], {}] for term in ("channels", "num_cells")},
    **{("network", term): JUNK for term in ("genotype", "norm", "input_shape", "num_classes")},
}
changes = st.sampled_from(sorted(KEYS)).flatmap(
    lambda path: st.tuples(st.just(path), st.sampled_from([*KEYS[path], "gone"]))
)


def changed(settings, path, value):
    """Return settings with one nested value replaced or taken out."""
    settings, place = copy.deepcopy(settings), path[-1]
    inner = settings
    for key in path[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner[place] = value
        if value == "gone":
            del inner[place]
    return settings


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_settings_lead_to_a_refusal_or_to_as_many_rows_as_releases(data, hostile):
    site, noised, read = hostile
    verb = data.draw(st.sampled_from(RELEASING))
    request = site.request(verb, weights=STEP)
    for path, value in data.draw(st.lists(changes, min_size=1, max_size=2)):
        request = replace(request, settings=changed(request.settings, path, value))
    before = len(site.rows())
    noised.clear(), read.clear()
    try:
        reply = site.answer(request)
    except (ConfigError, BudgetExceededError):
        assert (noised, read) == ([], [])
        assert len(site.rows()) == before
    else:
        steps = 1 if verb.startswith("evaluate.") else request.settings["local_steps"]
        states = [kind for kind in ASKED[verb][1] if TERMS_OF[kind] is TERMS]
        once = len(ASKED[verb][1]) - len(states)  # metrics or rewards
        assert len(noised) == steps * len(states) + once
        assert len(site.rows()) == before + len(noised)
        for term in ("noise_multiplier", "max_grad_norm"):
            expected = [TERMS[term]] * (steps * len(states)) + [METRICS[term]] * once
            assert [call[term] for call in noised] == expected
        assert {*reply.states, *reply.metrics} == RELEASES[verb]


@pytest.fixture
def hostile(make_site, monkeypatch):
    """A site, what was noised and which batches were read."""
    noised, read = [], []
    add_noise, batch = release.add_noise, Split.batch

    def noted_noise(*arguments, **terms):
        noised.append(terms)
        return add_noise(*arguments, **terms)

    def noted_batch(*arguments):
        read.append(arguments)
        return batch(*arguments)

    monkeypatch.setattr(release, "add_noise", noted_noise)
    monkeypatch.setattr(Split, "batch", noted_batch)
    return make_site(committed=schedule(steps=1000)), noised, read


def test_the_noised_mean_is_clipped_as_retraining_is_told(make_site):
    site = make_site()
    plain = {"lr": 0.1, "min_lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}
    for clip_norm, moved in ((0.01, 0.001), (0.02, 0.002)):
        request = site.request("train.weights", weights=plain | {"clip_norm": clip_norm})
        (after,) = site.answer(request).states["weights"].values()
        (before,) = request.states["weights"].values()
        assert (after - before).norm() == pytest.approx(moved, rel=1e-3)


def test_a_private_client_never_oversamples_whatever_the_run_says(site_config, prepared, make_site):
    gate = make_site().gate
    config = replace(
        site_config, privacy=NoPrivacy("none"), algorithm=FedAvgSettings("fedavg", "linear")
    )
    config = replace(config, oversample=True)
    data = (prepared, [np.arange(80)])
    assert make_client(config, 0, data=data, networks={}).oversample
    assert not make_client(config, 0, data=data, networks={}, gate=gate).oversample

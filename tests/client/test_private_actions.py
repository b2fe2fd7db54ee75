"""What the private actions send: noised, booked releases and public properties alone."""

import copy
import json
import math
from dataclasses import asdict, replace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fednas_flwr.base.errors import BudgetExceededError, ConfigError
from fednas_flwr.base.randomness import seeded
from fednas_flwr.client import noised_measures
from fednas_flwr.client.answer import check_fields
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.models.networks import describe_derived, make_network, make_space
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import LocalTraining
from fednas_flwr.protocol.states import MOMENTS, Layout, load_states, network_states, pack, unpack
from fednas_flwr.protocol.sum_requests import PROPERTIES, REQUESTS, SUM_ACTIONS
from fednas_flwr.search.objective import Objective, Regression, heads
from fednas_flwr.search.optimizer_step import no_moments
from fednas_flwr.settings.optimizers import Adam, DPAware

from ..asked import ONE_STEP
from ..refusals import refuses
from ..rows import by_hand, seldom
from . import conftest as wards
from .conftest import ASKED, METRICS, RECORDS, STEP, TERMS, TRIAL, flat, of_splits, packed, schedule

RELEASING = sorted(ASKED)
OF_NETWORKS = ("train.weights", "train.network_gradient")
MOVING = ["train.candidate", "train.search", "train.weights"]  # with their optimisers' moments
NORM, SIGMA = TERMS["max_grad_norm"], TERMS["noise_multiplier"]
IN_FILES_OF_THEIR_OWN = {"query.statistics", "evaluate.scores"}  # test_noised_*.py
BOTH = RECORDS["train"] + RECORDS["validation"]
EVERYTHING = schedule(batch_size=None)  # over all records at p = 1, so that only noise is drawn
EVERY_RECORD = {"committed": EVERYTHING, "records": np.arange(40)}


GUESSING = math.log(3)
SCALES = {  # by which what is released of a state is the noised sum that it was
    "train.weights": {"weights": BOTH / STEP.lr},  # one step: w - lr * (sum / B + decay * w)
    "train.search": {"weights": RECORDS["train"] / STEP.lr},  # likewise
    "train.candidate": {"weights": RECORDS["train"] / STEP.lr},
    "train.probe": {"rewards": RECORDS["validation"] / wards.LOSS_BOUND},
    "evaluate.candidates": {"rewards": RECORDS["validation"] / math.sqrt(3)},  # a vector of three
    "train.gradients": {"weights": 1, "alphas": RECORDS["validation"] / RECORDS["train"]},
}


def sums(reply, action, guessing=GUESSING):
    """Return what was released of each state, as the noised sum that it was.

    Alphas of a search are left out: Adam's first step does not tell the size of a gradient.
    """
    if action == "evaluate.model":
        pair = torch.tensor([reply.metrics["loss"] / (2 * guessing), reply.metrics["accuracy"]])
        return {"metrics": pair.double() * reply.num_examples / noised_measures.METRICS_NORM}
    vectors = {n: torch.cat([v.double() for v in s.values()]) for n, s in reply.states.items()}
    scales = SCALES.get(action, dict.fromkeys(vectors, 1))
    return {name: vectors[name] * scale for name, scale in scales.items()}


def unreleased(reply):
    """Return all of a reply but the released numbers, and how many of these there are."""
    sizes = {n: {d: v.numel() for d, v in s.items()} for n, s in reply.states.items()}
    return asdict(replace(reply, states={}, metrics={})), sizes, sorted(reply.metrics)


# --- nothing but releases and public properties


def private_properties(action):
    _, of_private = PROPERTIES[action]
    return set(get_type_hints(of_private))


def test_every_action_has_its_fields_listed_and_all_others_are_refused(make_site):
    assert set(ACTIONS) == set(ANSWERS) == set(REQUESTS)
    assert set(PRIVATE_ACTIONS) == set(ACTIONS) - {"evaluate.personalised"}
    releasing = {action for action in PRIVATE_ACTIONS if not ACTIONS[action].is_public}
    assert set(ASKED) == releasing - IN_FILES_OF_THEIR_OWN
    assert all(action.startswith("query.") for action in {*PRIVATE_ACTIONS} - releasing)
    assert not any(private_properties(action) for action in ASKED)
    site = make_site()
    for action in {*ACTIONS} - set(PRIVATE_ACTIONS):
        refuses("private action", site.ask, action)
    for action in ("", "train.all"):
        refuses(f"action={action} is unknown", site.ask, action)


def test_no_private_action_may_return_what_is_neither_noised_nor_follows_from_what_is():
    released = {"weights", "alphas", "moments", "rewards", "loss", "accuracy", "scores"}
    released.add("statistics")
    assert set().union(*(ACTIONS[action].releases for action in PRIVATE_ACTIONS)) == released
    told = {name for action in PRIVATE_ACTIONS for name in private_properties(action)}
    assert not told & {"class_counts", "moments", "num_examples", "records", "labels", "scores"}


UNLISTED = [
    Reply(1, metrics={"train_loss": 0.1}),
    Reply(1, states={"weights": {}, "buffers": {}}),
    Reply(1, properties={"class_counts": [1]}),
    Reply(1, states={"weights": {}}, digests={"weights": "", "rows": ""}),
]


@pytest.mark.parametrize("reply", UNLISTED)
def test_a_field_that_is_on_no_list_cannot_leave(reply):
    refuses("must not return", check_fields, "train.weights", reply, error=RuntimeError)


@pytest.mark.run
def test_unreleased_fields_do_not_move_when_a_record_is_added_removed_or_replaced(make_site):
    held = [np.arange(40), np.arange(39), np.array([0, *range(2, 40)])]
    plan = schedule(steps=2)
    sites = [make_site(records=rows, committed=plan) for rows in held]
    assert len({tuple(map(len, vars(site.client.data).values())) for site in sites}) >= 2
    left_out = {"query.latency", *SUM_ACTIONS}  # these sites take no part in secure sums
    left_out |= {"query.keep_model", *IN_FILES_OF_THEIR_OWN}
    asked = [(action, {}) for action in PRIVATE_ACTIONS if action not in left_out]
    asked.append(("query.describe", {}))  # once more, after all releases
    asked += [(action, {"moments": True}) for action in MOVING]
    for action, changes in asked:
        again = {"run": "second", "releases": plan[:1]} if action == "query.commit" else changes
        replies = [unreleased(site.ask(action, **again)) for site in sites]
        assert all(reply == replies[0] for reply in replies), action
        fields, states, metrics = replies[0]
        assert set(fields["properties"]) <= private_properties(action)
        expected = ACTIONS[action].releases - (set() if changes else {MOMENTS})
        assert {*states, *metrics} == expected
        expected = dict.fromkeys(("train.search", "train.candidate"), RECORDS["train"])
        measured = ("train.probe", "evaluate.model", "evaluate.candidates")
        expected |= dict.fromkeys(measured, RECORDS["validation"]) | {"train.weights": BOTH}
        expected |= dict.fromkeys(("query.describe", "query.commit"), sum(RECORDS.values()))
        assert fields["num_examples"] == expected.get(action, TERMS["batch_size"])


def of_persons(copies):
    """Return an edit of a client's data that gives every record, so many times, to a person."""

    def held(split):
        persons = torch.arange(len(split)).repeat_interleave(copies)
        return replace(split, rows=split.rows.repeat_interleave(copies), persons=persons)

    return of_splits(held)


OFTEN = ("evaluate.candidates", "evaluate.model", "train.search", "train.weights")
ONCE = [*OFTEN, seldom("train.gradients")]
ONCE += [by_hand(action) for action in RELEASING if action not in (*OFTEN, "train.gradients")]


@pytest.mark.parametrize("action", ONCE)
def test_a_person_counts_once_however_many_records(action, make_site):
    """The same noise and draws: a person's mean is that of each of three equal records."""
    made = {"committed": [p for p in EVERYTHING if p.action == action], "test_seed": b"7"}
    sites = [make_site(hold=of_persons(copies), **made) for copies in (1, 3)]
    once, thrice = (sums(site.ask(action), action) for site in sites)
    for kind, released in once.items():
        assert torch.equal(released, thrice[kind])


@pytest.mark.parametrize("action", RELEASING)
def test_a_request_that_is_sent_again_is_answered_by_new_noise(action, make_site):
    """Replayed to the letter, nonce included: never for nothing, and not beyond the schedule."""
    site = make_site(committed=schedule(steps=2, batch_size=None))
    request, kinds = site.request(action), ASKED[action][1]
    first, second = (sums(site.answer(request), action) for _ in range(2))
    for kind, one in first.items():
        noise = (one - second[kind]) / math.sqrt(2)
        if action == "train.candidate":  # weights beside its path have none
            assert 0.2 < (noise == 0).double().mean() < 0.9
            noise = noise[noise != 0]
        if noise.numel() < 1000:  # too few for the scale, which the guard's own test measures
            assert (noise == 0).sum() <= noise.numel() // 3  # two equal cells: once in 1e7
            assert noise.abs().max() < 7 * max(SIGMA * NORM, METRICS["noise_multiplier"])
        else:
            assert noise.std() == pytest.approx(SIGMA * NORM, rel=6 / math.sqrt(2 * len(noise)))
    refuses("committed", site.answer, request)
    assert sorted(row.splits for row in site.rows()) == sorted(2 * [*kinds.values()])


def test_what_a_action_returns_is_checked_before_it_leaves(make_site, monkeypatch):
    monkeypatch.setitem(ANSWERS, "train.weights", lambda *_: Reply(1, metrics={"loss": 1.0}))
    refuses("must not return", make_site().ask, "train.weights", error=RuntimeError)


@pytest.mark.parametrize("action", ["train.weights", "train.network_gradient"])
@pytest.mark.parametrize("drawn", ["nothing", "drop-path", "crops", "crops, unaugmented"])
def test_drop_path_and_augmentation_are_drawn_anew_whatever_the_seed(
    drawn, action, make_site, totals
):
    site = make_site(committed=EVERYTHING)
    if "crops" in drawn:
        site.client.augmentation["crop_padding"] = 2
    asked = {"drop_path_prob": 0.5} if drawn == "drop-path" else {"augmented": "un" not in drawn}
    _, *replies = (site.ask(action, **asked) for _ in range(3))  # the first rehearses
    vectors = [reply.states["weights"]["float32"] for reply in replies]
    assert torch.equal(*vectors) == (drawn in ("nothing", "crops, unaugmented"))


# --- the computation, against float64 loops of batch size 1


def scales(totals):
    """The noise multiplier and norm that each noise would have had."""
    return [(terms["noise_multiplier"], terms["max_grad_norm"]) for _, terms in totals]


def clipped(network, split, parameters, norm=NORM, factors=None, loss_of=functional.cross_entropy):
    """Return the sum of clipped gradients of single records, a flat vector."""

    def gradients_of(x, y):
        loss = loss_of(network(x), y)
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    total, most = wards.clipped_sum(split, gradients_of, norm, factors)
    assert most > norm or len(parameters) == 1  # of the alphas, whose gradients are small
    return total


def doubled(networks):
    """The supernet with the states that are sent, in float64."""
    supernet = networks.space.supernet()
    load_states(supernet, networks.states["supernet"])
    return supernet.double().train()


def close(actual, expected):
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-5 * scale)


def relabelled(change):
    """Return an edit of a client's data that changes all labels."""
    return of_splits(lambda split: replace(split, labels=change(split.labels)))


SEVERAL = Objective(multi_label=True)
NUMBERS = Regression(target=(10.0, 20 / 12**0.5, 0.0, 20.0))
# each has the labels of its class and of the next one; most are far beyond the range
several = relabelled(lambda y: functional.one_hot(y, 3) | functional.one_hot(y, 3).roll(1, 1))
numbers = relabelled(lambda y: (y.float() - 1) * 1e6)


@pytest.mark.parametrize("loss", ["several labels", "squared", "absolute", "huber"])
def test_gradients_of_other_labels_are_clipped_sums_of_records(loss, make_site, networks, totals):
    plan, is_several = [p for p in EVERYTHING if p.action == "train.gradients"], "labels" in loss
    hold = several if is_several else numbers
    objective = SEVERAL if is_several else replace(NUMBERS, loss=loss)
    site = make_site(committed=plan, records=np.arange(40), hold=hold, objective=objective)
    reply = site.ask("train.gradients")
    supernet = doubled(networks)

    def loss_of(logits, y):
        if is_several:
            return functional.multilabel_soft_margin_loss(logits, y.double())
        far = logits[:, 0] - (y.double().clamp(0, 20) - 10) / (20 / 12**0.5)
        huber = torch.where(far.abs() < 1, far**2 / 2, far.abs() - 0.5)
        return {"squared": far**2, "absolute": far.abs(), "huber": huber}[loss].mean()

    for state, split in (("weights", "train"), ("alphas", "validation"))[: 2 if is_several else 1]:
        parameters, own = list(getattr(supernet, state)().values()), site.client.split(split)
        total = clipped(supernet, own, parameters, loss_of=loss_of)
        close(reply.states[state]["float32"], total / RECORDS[split] * reply.num_examples)


OF_GRADIENTS = ("train.gradients", "train.weights")
MOVED = [
    *((action, lambda data: data, None) for action in RELEASING),
    *((action, numbers, NUMBERS) for action in ("evaluate.model", "evaluate.candidates")),
    ("evaluate.model", several, SEVERAL),
    *(seldom(action, several, SEVERAL) for action in OF_GRADIENTS),
    *(by_hand(action, numbers, NUMBERS) for action in OF_GRADIENTS),
]


@pytest.mark.parametrize(("action", "of_form", "objective"), MOVED)
def test_a_record_moves_releases_by_the_norm_at_most(action, of_form, objective, make_site):
    """The same noise on neighbouring data: the difference is what one record contributes."""
    _, kinds = ASKED[action]
    plan = [p for p in EVERYTHING if p.action == action]

    def released(hold):
        site = make_site(committed=plan, test_seed=b"7", hold=hold, objective=objective)
        return sums(site.ask(action), action, (objective or Objective()).guessing_loss(3))

    whole = released(of_form)
    for name in {split for splits in kinds.values() for split in splits}:
        fewer = released(lambda data, name=name: wards.without_last(name)(of_form(data)))
        for kind in whole:
            norm = wards.TERMS_OF[kind]["max_grad_norm"]
            moved = (whole[kind] - fewer[kind]).norm().item()
            if action == "train.probe" and name == "train":
                assert moved > 0  # through the weights, for which the local steps are booked
            elif action == "train.search" and name == "validation":
                continue  # it moves weights through the alphas at most, after their release
            elif name in kinds[kind]:
                # of three candidates DIVIDED is right about every record
                counts = action == "evaluate.candidates" and objective is None
                least = norm / math.sqrt(3) if counts else 1e-4 * norm
                assert least * (1 - 1e-5) < moved <= norm * (1 + 1e-3)
            else:
                assert moved == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_clipped_sums_at_the_same_point(steps, make_site, networks, totals):
    lrs, norms = {"weights": 2.0, "alphas": 1.0}, {"weights": NORM, "alphas": 0.004}
    plan = [p for p in EVERYTHING if p.action == "train.gradients"]
    plan = [replace(p, max_grad_norm=norms[p.kind]) for p in plan]
    site = make_site(committed=plan, records=np.arange(40), policy={"micro_batch_size": 7})
    reply = site.ask("train.gradients", local_steps=steps, local_lrs=lrs)
    assert scales(totals) == [(SIGMA, norm) for norm in norms.values()] * steps
    assert [row.splits for row in site.rows()] == [("train",), ("validation",)] * steps
    supernet, moves = doubled(networks), dict.fromkeys(lrs, 0.0)
    own = {state: list(getattr(supernet, state)().values()) for state in lrs}
    for _ in range(steps):
        means = {}
        for state, split, size in (("weights", "train", 40), ("alphas", "validation", 20)):
            total = clipped(supernet, site.client.split(split), own[state], norms[state])
            means[state] = total / size
        for state, mean in means.items():
            moves[state] = moves[state] + mean
            wards.step_along(torch.optim.SGD(own[state], lr=lrs[state]), own[state], mean, 1)
    assert reply.num_examples == 40
    for state, move in moves.items():
        close(reply.states[state]["float32"], move * 40)


def test_retraining_is_dp_sgd_with_momentum_over_train_and_validation(make_site, networks, totals):
    site = make_site(**EVERY_RECORD)
    reply = site.ask("train.weights", steps=3, clip_norm=None)
    assert scales(totals) == [(SIGMA, NORM)] * 3
    assert [row.splits for row in site.rows()] == [("train", "validation")] * 3
    network = make_network(networks.description)
    load_states(network, networks.states["derived"])
    network.double().train()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        total = clipped(network, site.client.split("train+validation"), parameters)
        wards.step_along(optimizer, parameters, total, BOTH)
    close(reply.states["weights"]["float32"], flat(parameters))
    assert reply.num_examples == BOTH


@pytest.mark.parametrize("switched_on", ["auxiliary head", "drop path", "cutout"])
def test_private_retraining_does_what_else_it_is_asked(switched_on, make_site, networks, totals):
    """Where it is drawn it is all paths that are dropped, and all pixels that are cut out."""
    site = make_site(**EVERY_RECORD)
    asked = {"drop_path_prob": 1 - 1e-12 if switched_on == "drop path" else 0.0}
    network, states = make_network(networks.description), networks.states["derived"]
    if switched_on == "auxiliary head":
        shapes = {"input_shape": (3, 8, 8), "num_classes": 3}
        sizes = {"channels": 2, "num_cells": 3, "skip": "none"}
        with seeded(3, "auxiliary"):
            space = make_space("darts", norm="group", **shapes, **sizes)
            genotype = space.derive(space.supernet().alphas())
            with_head = {"norm": "group", "auxiliary": True}
            description = describe_derived(genotype, shapes, sizes=sizes, **with_head)
            network = make_network(description)
        asked |= {"network": description, "auxiliary_weight": 0.7}
        states = packed(network)
    elif switched_on == "cutout":
        site.client.augmentation["cutout"] = 100
    request = site.request("train.weights", clip_norm=None, **asked)
    reply = site.answer(replace(request, states=states))
    load_states(network, states)
    network.double().train()
    network.drop_path_prob = asked["drop_path_prob"]
    parameters = list(network.parameters())
    visible = 0.0 if switched_on == "cutout" else 1.0

    def both_losses(outputs, y):
        losses = [functional.cross_entropy(o, y) for o in heads(outputs) if o is not None]
        return sum(weight * loss for weight, loss in zip((1.0, 0.7), losses, strict=False))

    split = site.client.split("train+validation")
    total = clipped(lambda x: network(visible * x), split, parameters, loss_of=both_losses)
    sgd = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)
    wards.step_along(sgd, parameters, total, BOTH)
    close(reply.states["weights"]["float32"], flat(parameters))


FACTORS = torch.tensor([0.2, 1.0, 0.6])


@pytest.mark.parametrize("factors", [by_hand(None), FACTORS])
def test_private_search_alternates_clipped_steps(factors, make_site, networks, totals):
    site = make_site(**EVERY_RECORD, objective=Objective(factors))
    reply = site.ask("train.search", steps=2)
    assert scales(totals) == [(SIGMA, NORM)] * 4
    assert [row.splits for row in site.rows()] == [("validation",), ("train",)] * 2
    assert reply.num_examples == RECORDS["train"]
    supernet = searched(site, networks, factors, steps=2)
    close(reply.states["weights"]["float32"], flat(supernet.weights().values()))
    close(reply.states["alphas"]["float32"], flat(supernet.alphas().values()))


def searched(site, networks, factors, *, steps):
    """Return the supernet after clipped steps without noise, in float64."""
    supernet = doubled(networks)
    weights, alphas = list(supernet.weights().values()), list(supernet.alphas().values())
    adam = torch.optim.Adam(alphas, lr=0.01, betas=(0.5, 0.999))
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        for optimizer, parameters, split in ((adam, alphas, "validation"), (sgd, weights, "train")):
            total = clipped(supernet, site.client.split(split), parameters, NORM, factors)
            wards.step_along(optimizer, parameters, total, RECORDS[split])
    return supernet


@pytest.mark.parametrize("factors", [by_hand(None), FACTORS])
def test_a_probe_releases_the_clipped_decrease_of_each_trial(
    factors, make_site, networks, totals, monkeypatch
):
    """Trials start from the same states and are booked like the search that they are."""
    monkeypatch.setattr(noised_measures, "AT_A_TIME", 8)  # so that there are several parts
    site = make_site(**EVERY_RECORD, objective=Objective(factors))
    slow = replace(TRIAL, weights=replace(STEP, lr=1e-6), alphas=Adam(0.0, 0.0))
    asked = {"trials": [TRIAL, slow, TRIAL], "loss_bound": (bound := 0.01), "steps": 2}
    reply = site.ask("train.probe", **asked)
    trial = [(SIGMA, NORM)] * 4 + [(METRICS["noise_multiplier"], bound)]
    assert scales(totals) == trial * 3
    splits = [*[("validation",), ("train",)] * 2, ("validation",)]
    assert [row.splits for row in site.rows()] == splits * 3
    assert reply.num_examples == RECORDS["validation"]
    rewarded, still, last = reply.states["rewards"]["float32"].tolist()
    assert rewarded == last
    assert abs(still) < 1e-4 < abs(rewarded)
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


def derived_probe(make_site, networks, *, committed, split):
    """Return a site that keeps to training on a split, and how to ask for a trial that does."""
    terms = {"stage": "retrain", "action": "train.probe", "steps": 50}
    plan = [
        PlannedRelease(kind="weights", splits=tuple(committed.split("+")), **terms, **TERMS),
        PlannedRelease(kind="rewards", splits=("validation",), **terms, **METRICS),
    ]
    site = make_site(committed=plan)
    steps = replace(ONE_STEP, steps=2)
    training = LocalTraining(networks.description, "train", steps, STEP, 0.0, 0.0)

    def ask():
        values = asdict(training) | {"split": split}
        request = site.request("train.probe", search=None, training=values)
        header = replace(request.header, stage="retrain")
        return site.answer(replace(request, header=header, states=networks.states["derived"]))

    return site, ask


@pytest.mark.parametrize("split", ["train", "test", "train+validation"])
def test_trials_of_a_derived_network_read_what_is_booked(split, make_site, networks, read):
    site, ask = derived_probe(make_site, networks, committed=split, split=split)
    assert set(ask().states) == {"rewards"}
    rows = {row for records, places in read for row in records.rows[places].tolist()}
    named = {*split.split("+"), "validation"}
    booked = [set(getattr(site.client.data, name).rows.tolist()) for name in named]
    assert rows <= set().union(*booked)
    assert all(rows & own for own in booked)
    assert [row.splits for row in site.rows()] == [tuple(split.split("+"))] * 2 + [("validation",)]


@pytest.mark.parametrize("split", ["test", "validation", "train+validation", "", None])
def test_trials_on_another_split_are_refused(split, make_site, networks, no_record):
    site, ask = derived_probe(make_site, networks, committed="train", split=split)
    refuses("rule committed values: release=|split=null has the wro", ask)
    assert site.rows() == []


def measured_large(site, networks):
    """Return what a site tells of a supernet with large weights; its logits, and the labels."""
    request = site.request("evaluate.model")
    large = {"weights": {"float32": 20 * request.states["weights"]["float32"]}}
    request = replace(request, states={**request.states, **large})
    supernet = networks.space.supernet()
    load_states(supernet, request.states)
    data = site.client.data.validation
    x, y = data.batch(torch.arange(len(data)), "cpu")
    with torch.no_grad():
        return site.answer(request), supernet.eval()(x), y


def losses_of_classes(logits, y):
    return functional.cross_entropy(logits, y, reduction="none"), logits.argmax(1) == y


def losses_of_labels(logits, y):
    losses = functional.multilabel_soft_margin_loss(logits, y.float(), reduction="none")
    return losses, ((logits > 0) == (y == 1)).double().mean(1)  # also parts of a record


MEASURED = [
    (None, Objective(), 2 * math.log(3), losses_of_classes),
    (several, SEVERAL, 2 * math.log(2), losses_of_labels),
]


@pytest.mark.parametrize(("hold", "objective", "bound", "measure"), MEASURED)
def test_measures_are_bounded_sums(hold, objective, bound, measure, make_site, networks, totals):
    reply, logits, y = measured_large(make_site(hold=hold, objective=objective), networks)
    assert scales(totals) == [(METRICS["noise_multiplier"], math.sqrt(2))]
    losses, right = measure(logits, y)
    assert losses.max() > bound > losses.min()
    assert len(y) != 20
    assert reply.metrics["loss"] == pytest.approx(losses.clamp(max=bound).sum().item() / 20, 1e-5)
    assert reply.metrics["accuracy"] == pytest.approx(right.sum().item() / 20)


def test_squared_errors_are_released_within_the_squared_range(make_site, networks, totals):
    """Whatever targets and predictions are, both here mostly beyond the range."""
    reply, logits, y = measured_large(make_site(hold=numbers, objective=NUMBERS), networks)
    assert scales(totals) == [(METRICS["noise_multiplier"], math.sqrt(2))]
    predicted = logits[:, 0].double() * 20 / 12**0.5 + 10
    assert not ((predicted >= 0) & (predicted <= 20)).all()
    errors = predicted.clamp(0, 20) - y.double().clamp(0, 20)
    assert errors.abs().max() > 10
    told = NUMBERS.reported(reply.metrics)
    assert told["rmse"] ** 2 == pytest.approx((errors**2).sum().item() / 20, rel=1e-4)
    closeness = (1 - errors.abs() / 20).sum().item() / 20
    assert reply.metrics["accuracy"] == pytest.approx(closeness, rel=1e-4)


WILD_WEIGHTS = [(math.nan, 7), (1e38, 1)]
WILD_WEIGHTS += [by_hand(math.inf, 7), by_hand(1e30, 7), by_hand(-math.inf, 1), seldom(1e-45, 1)]


@pytest.mark.parametrize(("bad", "every"), WILD_WEIGHTS)
def test_weights_that_blow_up_the_loss_release_bounded_sums(bad, every, make_site, totals):
    site = make_site()
    for action in RELEASING:
        request = site.request(action)
        states = {n: {d: v.clone() for d, v in s.items()} for n, s in request.states.items()}
        states["weights"]["float32"][::every] = bad
        reply = site.answer(replace(request, states=states))
        if action == "evaluate.model":
            total = len(site.client.data.validation) / 20
            assert 0 <= reply.metrics["loss"] <= total * 2 * math.log(3) * (1 + 1e-6)
            assert 0 <= reply.metrics["accuracy"] <= total
        elif action == "train.probe":
            total = len(site.client.data.validation) / 20 * wards.LOSS_BOUND
            assert reply.states["rewards"]["float32"].abs().item() <= total * (1 + 1e-6)
        elif "gradient" in action:  # of the others the weights stay what they were
            (sent,) = reply.states[next(iter(reply.states))].values()
            # that of all records at most, finite whatever they are
            assert sent.double().norm() <= 80 * NORM


# --- the optimisers' moments, which travel with a model


@pytest.mark.parametrize("action", MOVING)
def test_moments_follow_from_what_is_released(action, make_site, networks, noised):
    """After one step each is a function of the release, of the weights that were sent and of it."""
    site = make_site(committed=EVERYTHING)
    request = site.request(action, moments=True, clip_norm=None)
    reply = site.answer(request)
    own = {"train.weights": networks.derived, "train.search": networks.supernet}
    network = own.get(action) or site.of_cells.network({"name": "supernet"})
    layout = Layout.of(no_moments(network))
    sent, moments = (unpack(part.states[MOMENTS], layout) for part in (request, reply))
    assert reply.digests[MOMENTS] == layout.digest
    assert all(not tensor.any() for tensor in sent.values())
    weights = unpack(request.states["weights"], Layout.of(network_states(network)["weights"]))
    after = unpack(reply.states["weights"], Layout.of(network_states(network)["weights"]))
    moved = [n for n in weights if not torch.equal(weights[n], after[n])]
    size = BOTH if action == "train.weights" else RECORDS["train"]
    buffers = {n: moments[f"weights.momentum_buffer.{n}"] for n in weights}
    expected = noised[-1][2].float() / size + STEP.weight_decay * flat(weights[n] for n in moved)
    torch.testing.assert_close(flat(buffers[n] for n in moved), expected, rtol=1e-5, atol=1e-7)
    assert not any(buffers[n].any() for n in {*weights} - {*moved})
    if action == "train.search":
        gradient = noised[0][2].float() / RECORDS["validation"]
        for moment, expected in (("exp_avg", 0.5 * gradient), ("exp_avg_sq", 0.001 * gradient**2)):
            found = flat(v for n, v in moments.items() if n.startswith(f"alphas.{moment}."))
            torch.testing.assert_close(found, expected)
        steps = [v for n, v in moments.items() if n.startswith("alphas.step.")]
        assert {v.item() for v in steps} == {1.0}


GOING_ON = ["train.search", seldom("train.candidate"), seldom("train.weights")]


@pytest.mark.parametrize("action", GOING_ON)
def test_a_search_with_moments_goes_on_where_the_last_request_ended(action, make_site, totals):
    """Two requests of one step each are one request of two."""
    site = make_site(committed=EVERYTHING)
    steps = "local_steps" if action == "train.candidate" else "steps"
    whole = site.answer(site.request(action, moments=True, **{steps: 2}))
    request = site.request(action, moments=True)
    for _ in range(2):
        reply = site.answer(request)
        request = replace(request, states=dict(request.states) | dict(reply.states))
    assert set(reply.states) == set(whole.states)
    for name, state in whole.states.items():
        assert torch.equal(reply.states[name]["float32"], state["float32"]), name


# --- hostile requests


@pytest.fixture(scope="module")
def refusing(make_site):
    """A site that several tests ask in vain."""
    return make_site(committed=EVERYTHING)


SEARCHING = ("train.search", "train.probe")
IN_STEPS = "epochs=1: a private client takes steps"
COMMITTED = "batch_size=8: .* batches are those committed to"
UNPLANNED = "rule committed values: release="
OUTSIDE = [
    ("train.gradients", {"order": 2}, "rule first order only: order=2"),
    ("train.search", {"rule": "second_order"}, "rule first order only: rule=second_order"),
    *((a, {"rule": "mixed_level"}, "rule first order only: rule=mixed_level") for a in SEARCHING),
    ("train.weights", {"raw_metrics": True}, "setting=raw_metrics is unknown"),
    ("train.weights", {"validates": True}, "validates=True would tell a loss without noise"),
    ("train.gradients", {"local_steps": 51}, "rule committed values: steps=51"),
    ("train.weights", {"steps": 51}, "rule committed values: steps=51"),
    *((a, {"steps": None, "epochs": 1}, IN_STEPS) for a in ("train.weights", *SEARCHING)),
    *((a, {"batch_size": 8}, COMMITTED) for a in ("train.weights", "train.gradients", *SEARCHING)),
    ("train.candidate", {"batch_size": 8}, "dp_aware and batch_size must be null"),
    ("train.candidate", {"dp_aware": DPAware(1.0, 1.0)}, "dp_aware and batch_size must be"),
    ("train.weights", {"split": "test"}, "rule committed values: release=retrain/train.we"),
    *(("train.weights", {"split": split}, UNPLANNED) for split in ("train", "validation+train")),
    *(("evaluate.model", {"split": split}, UNPLANNED) for split in ("train", "train+validation")),
    ("evaluate.model", {"network": {"name": "nothing"}}, "do not fit evaluate.model"),
    ("train.probe", {"trials": 3 * [TRIAL], "steps": 17}, "committed values: steps=51"),
    ("train.probe", {"trials": 51 * [TRIAL]}, "committed values: steps=51"),
    ("train.candidate", {"candidates": 51 * [[5] * 15]}, "committed values: steps=51"),
    ("train.candidate", {"candidates": 3 * [[5] * 15], "local_steps": 17}, "steps=51"),
    ("train.candidate", {"candidates": [[5] * 16]}, "a path must be 15 columns of ops"),
]


@pytest.mark.parametrize(("action", "change", "words"), OUTSIDE)
def test_requests_outside_the_rules_are_refused_unread(action, change, words, refusing, no_record):
    assert len(refuses(words, refusing.ask, action, **change)) < 250
    assert refusing.rows() == []


TERM_KEYS = ["releases", "schedule", *(f"{key}_of" for key in TERMS), "sample_rate", "sigma"]


def test_a_request_can_name_no_terms_of_its_own(refusing, no_record):
    """Wherever in it they stand; what is noised are the terms that were committed to."""
    terms = {kind: TERMS | {"noise_multiplier": 0.1} for kind in wards.TERMS_OF}
    for action in ASKED:
        places = groups(asdict(refusing.request(action).settings))
        nested = action in ("train.search", "train.probe", "train.weights")
        assert len(places) > (2 if nested else 0)
        for place in places:
            for key in (*TERM_KEYS, "noise_multiplier", "max_grad_norm"):
                path = ".".join((*place, key))
                refuses(f"setting={path} is unknown", refusing.ask, action, **{path: terms})
    assert refusing.rows() == []


def groups(values, path=()):
    """Return the paths of all groups of settings, the free description of a network left out."""
    found = [path]
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("network", "local_lrs"):
            found += groups(value, (*path, key))
    return found


def test_every_action_refuses_what_its_run_has_not_committed_to(make_site, no_record):
    """A kind, a stage, a split, a number of steps, a run, and a plan of nothing."""
    site = make_site()
    for action, (stage, kinds) in ASKED.items():
        for kind in kinds:
            others = [p for p in schedule() if (p.action, p.kind) != (action, kind)]
            (own,) = (p for p in schedule() if (p.action, p.kind) == (action, kind))
            another = "rewards" if kind == "metrics" else "metrics"
            changes = [{"stage": "evaluate"}, {"kind": another}, {"splits": ("test",)}]
            changes.append({"splits": (*own.splits, "test")})
            plans = (others, *([*others, replace(own, **change)] for change in changes))
            for number, plan in enumerate(plans):
                site.guard.commit(run := f"{action} {kind} {number}", plan)
                key = f"release={stage}/{action}/{kind}/"
                refuses(f"rule committed values: {key}", site.ask, action, run=run)
        for header in ({"run": "another"}, {"stage": "evaluate"}):
            request = site.request(action)
            request = replace(request, header=replace(request.header, **header))
            refuses("rule committed values: release=", site.answer, request)
        assert site.rows() == []


def test_batch_norm_is_refused_before_data_is_read(make_site, networks, no_record):
    site = make_site()
    description = networks.description | {"norm": "batch"}
    states = packed(make_network(description))
    asked = {**dict.fromkeys(OF_NETWORKS, "train+validation"), "evaluate.model": "validation"}
    for action, split in asked.items():
        request = site.request(action, network=description, split=split)
        refuses("rule no batch_norm", site.answer, replace(request, states=states))
    supernet = replace(networks.space, norm="batch").supernet()
    site.client.networks['{"name": "supernet"}'] = supernet
    states = packed(supernet)
    for action in sorted({*RELEASING} - {*OF_NETWORKS, "evaluate.model", *wards.CANDIDATES}):
        refuses("rule no batch_norm", site.answer, replace(site.request(action), states=states))
    assert site.rows() == []


WRONG_RATES = [{}, {"alphas": "x"}, {"weights": 0.1}, {"alphas": 0.1, "betas": 0.1}]
TRAPS = [  # requests that could fail on some records and not on others, and sound ones
    *((action, {}) for action in RELEASING),
    *((action, {"moments": True}) for action in MOVING),
    ("train.probe", {"trials": [TRIAL, TRIAL], "steps": 2}),
    ("evaluate.model", {"network": {"num_classes": 2}}),
    ("train.weights", {"network": {"num_classes": 2}}),
    *(
        seldom("train.weights", {"network": {"input_shape": size}})
        for size in ([1, 8, 8], [3, 4, 4])
    ),
    *(seldom("train.weights", {"drop_path_prob": probability}) for probability in ("x", 1)),
    *(seldom("train.weights", {"auxiliary_weight": weight}) for weight in ("x", -1)),
    ("train.weights", {"micro_batch_size": 4}),  # the policy's
    ("train.alpha_gradient", {"threads": 1}),
    *(seldom("train.alpha_gradient", {"local_lrs": rates}) for rates in WRONG_RATES),
    ("train.alpha_gradient", {"inner_lr": -1}),
    ("train.search", {"alphas": {"lr": "x", "weight_decay": 0.0}}),
    ("train.candidate", {"candidates": [[5] * 15, [10] * 15]}),
    ("train.candidate", {"weights": {}}),
    ("evaluate.candidates", {"candidates": [[5] * 14]}),
    seldom("train.probe", {"loss_bound": "x"}),
    ("train.probe", {"trials": [TRIAL, asdict(TRIAL) | {"weights": {}}]}),
    seldom("train.probe", {"trials": [TRIAL, asdict(TRIAL) | {"drop_path_prob": 2.0}]}),
]


HELD = {
    "all": None,
    "nobody": of_splits(lambda s: replace(s, rows=s.rows[:0], persons=s.rows[:0])),
    "none": of_splits(lambda s: replace(s, rows=s.rows[:0])),
    "one": of_splits(lambda s: replace(s, rows=s.rows[:1])),
    "none of the last class": of_splits(lambda s: replace(s, rows=s.rows[s.labels[s.rows] < 2])),
}


@pytest.fixture(scope="module")
def differing(make_site):
    """Sites that differ in their records alone."""
    return {name: make_site(hold=hold, committed=EVERYTHING) for name, hold in HELD.items()}


@pytest.mark.parametrize(("action", "change"), TRAPS)
def test_whether_a_request_fails_does_not_depend_on_records(action, change, differing, networks):
    """An error would be a release: that there is a record of a class, or any record at all."""
    outcomes = {}
    for name, site in differing.items():
        asked, states = copy.deepcopy(change), None
        if "network" in asked:
            asked["network"] = networks.description | asked["network"]
            states = {"weights": pack(dict(make_network(asked["network"]).named_parameters()))}
        try:
            request = site.request(action, **asked)
            request = request if states is None else replace(request, states=states)
            outcomes[name] = unreleased(site.answer(request))
        except ConfigError as error:
            outcomes[name] = str(error), len(site.rows())
    assert all(outcome == outcomes["all"] for outcome in outcomes.values()), outcomes


def edited(name, edit):
    """Return an edit of a request's states that changes a copy of one."""

    def change(states):
        return {**states, name: edit({d: v.clone() for d, v in states[name].items()})}

    return change


def with_steps(value, supernet):
    """Return an edit of moments of a supernet that sets the number of steps of the alphas."""

    def edit(packed):
        for moment, tensor in unpack(packed, Layout.of(no_moments(supernet))).items():
            if moment.startswith("alphas.step."):
                tensor.fill_(value)
        return packed

    return edit


def misfits(name):
    """Return edits that make a state one of another network."""
    return {
        f"short {name}": edited(name, lambda s: {d: v[:-1] for d, v in s.items()}),
        f"double {name}": edited(name, lambda s: {"float64": s["float32"].double()}),
        f"empty {name}": edited(name, lambda s: {}),
    }


MISFITS = misfits("weights") | {
    "a state of no network": lambda states: {**states, "rows": states["weights"]},
    "buffers": lambda states: {**states, "buffers": {"float32": torch.zeros(3)}},
}


UNFIT = [
    *((action, edit) for action in RELEASING for edit in MISFITS),
    *((action, edit) for action in MOVING for edit in misfits(MOMENTS)),
]


@pytest.mark.parametrize(("action", "edit"), UNFIT)
def test_states_that_do_not_fit_are_refused_before_data_is_read(action, edit, refusing, no_record):
    request = refusing.request(action, moments="moments" in edit)
    states = (MISFITS | misfits(MOMENTS))[edit](request.states)
    refuses(f"do not fit {action}: ValueError", refusing.answer, replace(request, states=states))
    assert refusing.rows() == []


@pytest.mark.parametrize("steps", [-1.0, -7.0, -math.inf, math.nan])
def test_moments_that_adam_cannot_go_on_from_are_refused(steps, refusing, networks, no_record):
    request = refusing.request("train.search", moments=True)
    edit = edited(MOMENTS, with_steps(steps, networks.supernet))
    request = replace(request, states=edit(request.states))
    refuses("do not fit train.search: ValueError: .*steps", refusing.answer, request)
    assert refusing.rows() == []


@pytest.mark.parametrize("bad", [math.nan, by_hand(math.inf), 1e30, by_hand(1e-30)])
@pytest.mark.parametrize("action", MOVING)
def test_wild_moments_are_stepped_from_and_booked_as_ever(action, bad, make_site):
    site = make_site(committed=EVERYTHING)
    client = site.of_cells if action in wards.CANDIDATES else site.client
    request = site.request(action, moments=True)
    name = request.settings.local.network if action == "train.weights" else {"name": "supernet"}
    layout = Layout.of(no_moments(client.network(name)))
    for sign in (1, -1):

        def wild(packed, sign=sign):
            for moment, tensor in unpack(packed, layout).items():
                if not moment.startswith("alphas.step."):
                    tensor.fill_(sign * bad)
            return packed

        reply = site.answer(replace(request, states=edited(MOMENTS, wild)(request.states)))
        assert set(reply.states) == ACTIONS[action].releases
    assert len(site.rows()) == 2 * len(ASKED[action][1])


JUNK = [None, True, False, "1", "", [], [1], {}, math.nan, math.inf, -math.inf, 0, -1, -0.0]
JUNK += [1e-300, 1e300, 10**400, 2**63, 0.5, 1, 1.0, 2, 8, 1.5, 4.0, "train", "validation"]
JUNK += [wards.GONE]
JUNK_OF = {
    "candidates": [*JUNK, [[0] * 14], [[10] * 15], [[1.0] * 15], [["5"] * 15], ["5" * 15]],
    **dict.fromkeys(("channels", "num_cells"), [None, "x", 0, -1, 2.5, [], {}, wards.GONE]),
}
ADDED = ["oversampling", "raw_metrics", "releases", "schedule", "noise_multiplier", "terms"]


def paths_of(values, path=()):
    """Return the dotted paths of all keys of nested settings."""
    found = []
    for key, value in values.items():
        found.append((*path, key))
        if isinstance(value, dict) and key != "genotype":
            found += paths_of(value, (*path, key))
    return found


def num_releases(action, values):
    """Return how many states are noised per measure, how often, and how many measures follow."""
    states = sum(wards.TERMS_OF[kind] is TERMS for kind in ASKED[action][1])
    amount = (values.get("local") or values.get("search") or {}).get("amount")
    steps = amount["steps"] if amount else values.get("local_steps", 1)
    return states * steps * (len(values["candidates"]) if action == "train.candidate" else 1)


def norm_of_measure(action, values):
    """Return the most that a record can move what is measured of models, not trained."""
    if action == "train.probe":
        return values["loss_bound"]
    return math.sqrt(len(values["candidates"]) if action == "evaluate.candidates" else 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_settings_lead_to_a_refusal_or_to_as_many_rows_as_releases(data, hostile):
    site, noised, read = hostile
    action = data.draw(st.sampled_from(RELEASING))
    sound = site.request(action)
    values = json.loads(json.dumps(asdict(sound.settings)))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted([*paths_of(values), *((key,) for key in ADDED)])))
        value = data.draw(st.sampled_from(JUNK_OF.get(path[-1], JUNK)))
        if value is not wards.GONE or path[-1] not in ADDED:
            given = value if value is wards.GONE else copy.deepcopy(value)
            wards.put(values, ".".join(path), given)
    before = len(site.rows())
    noised.clear(), read.clear()
    try:
        reply = site.answer(wards.received(action, sound.header, values, sound.states))
    except (ConfigError, BudgetExceededError):
        assert (noised, read) == ([], [])
        assert len(site.rows()) == before
    else:
        steps = num_releases(action, values)
        once = sum(wards.TERMS_OF[kind] is METRICS for kind in ASKED[action][1])
        assert len(noised) == steps + once
        assert len(site.rows()) == before + len(noised)
        asked = [(TERMS["noise_multiplier"], TERMS["max_grad_norm"])] * steps
        asked += [(METRICS["noise_multiplier"], norm_of_measure(action, values))] * once
        assert [(of["noise_multiplier"], of["max_grad_norm"]) for _, of, _ in noised] == asked
        assert {*reply.states, *reply.metrics} == ACTIONS[action].releases - {MOMENTS}


@pytest.fixture
def hostile(make_site, noised, read):
    """A site, what was noised and which batches were read."""
    return make_site(committed=schedule(steps=1000)), noised, read


def test_the_noised_mean_is_clipped_as_retraining_is_told(make_site):
    site = make_site()
    for clip_norm, moved in ((0.01, 0.001), (0.02, 0.002)):
        plain = replace(STEP, momentum=0.0, weight_decay=0.0, clip_norm=clip_norm)
        request = site.request("train.weights", weights=plain)
        (after,) = site.answer(request).states["weights"].values()
        (before,) = request.states["weights"].values()
        assert (after - before).norm() == pytest.approx(moved, rel=1e-3)

"""REINFORCE against enumeration; samplers on known rewards, with statistics; their state."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search import local_search
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.search.exact_gradients import BatchGradients, ClippedGradients, ExactGradients
from fednas_flwr.search.local_search import (
    Alternating,
    alpha_entropy,
    alternate,
    beta_gradient,
    train_candidates,
)
from fednas_flwr.search.objective import Objective
from fednas_flwr.search.optimizer_step import Optimizer, Optimizers, make_adam, make_sgd
from fednas_flwr.search.samplers import Controller, Moments, Policy, Sampler, reinforce_loss
from fednas_flwr.settings.optimizers import SGD, Adam, ControllerSettings, DPAware
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.dp_cells import DPCellSpace

from ..refusals import refuses
from .conftest import tensors_of

OF_REWARDS = {"entropy_weight": 0.02, "baseline_decay": 0.9, "scaled": False}
SETTINGS = ControllerSettings(lr=0.01, temperature=1.0, **OF_REWARDS)
SMALL = (3,) * 4  # 81 paths


def every_path(choices):
    return torch.tensor(list(itertools.product(*map(range, choices))))


def make_sampler(name, choices, seed=0):
    with seeded(seed, "sampler"):
        return {
            "controller": lambda: Controller(choices, SETTINGS),
            "scaled controller": lambda: Controller(choices, replace(SETTINGS, scaled=True)),
            "random": lambda: Sampler(choices),
        }[name]()


@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_expected_reinforce_gradient_is_the_objectives(baseline, temperature):
    """Over all 24 paths: sum_a pi(a) grad loss(a) = -grad (E[R] + w H)."""
    choices, weight = (2, 3, 4), 0.3
    with seeded(1, "policy"):
        policy = Policy(choices, temperature=temperature).double()
        for parameter in policy.parameters():
            parameter.data.mul_(8.0)  # far from uniform
    paths, rewards = every_path(choices), torch.rand(24, dtype=torch.float64)
    log_probs = policy(paths)
    assert log_probs.exp().sum().item() == pytest.approx(1)
    assert log_probs.exp().max() > 2 / 24
    expected = (log_probs.exp() * (rewards - weight * log_probs)).sum()
    exact = torch.autograd.grad(-expected, list(policy.parameters()), retain_graph=True)
    pairs = zip(log_probs[:, None], (rewards - weight * log_probs.detach())[:, None], strict=True)
    losses = [reinforce_loss(*pair, baseline=baseline) for pair in pairs]
    mean = sum(p.item() * loss for p, loss in zip(log_probs.exp(), losses, strict=True))
    for one, other in zip(torch.autograd.grad(mean, list(policy.parameters())), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert max(gradient.abs().max() for gradient in exact) > 1e-3


def test_paths_are_drawn_as_often_as_the_policy_says():
    """Chi-square over 24 paths: 23 degrees of freedom, below 49.7 with probability .999."""
    with seeded(2, "policy"):
        policy = Policy((2, 3, 4), temperature=0.1)
    paths = every_path((2, 3, 4))
    counts = (policy.sample(5000, make_generator(2, "draws"))[:, None] == paths).all(-1).sum(0)
    expected = 5000 * policy(paths).detach().exp()
    assert expected.min() > 5
    assert expected.max() > 4 * expected.min()
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.7


def test_the_controller_finds_the_path_of_most_reward():
    """Of 81, which are rewarded by the share of their edges that agree with it."""
    for seed in range(3):
        generator, controller = make_generator(seed, "draws"), make_sampler("controller", SMALL)
        best = torch.randint(3, (4,), generator=generator)
        for _ in range(60):
            paths = controller.sample(20, generator)
            controller.learn(paths, (torch.tensor(paths) == best).double().mean(1).tolist())
        assert torch.equal(every_path(SMALL)[controller.policy(every_path(SMALL)).argmax()], best)


def test_random_paths_are_uniform():
    """Chi-square over 6 paths: 5 degrees of freedom, below 20.5 with probability .999."""
    drawn = Sampler((2, 3)).sample(600, make_generator(0, "draws"))
    counts = [drawn.count(list(path)) for path in itertools.product(range(2), range(3))]
    assert sum((count - 100) ** 2 / 100 for count in counts) < 20.5


@pytest.mark.parametrize("name", ["controller", "scaled controller", "random"])
def test_state_goes_through_tensors(name):
    """A new sampler with the tensors of an old one goes on as that does, to the last bit."""
    generator, old = make_generator(0, "draws"), make_sampler(name, SMALL)

    def step(sampler, generator):
        paths = sampler.sample(6, generator)
        return paths, sampler.learn(paths, [sum(path) / 8 for path in paths])

    for _ in range(5):
        step(old, generator)
    new = make_sampler(name, SMALL, seed=9)
    new.load({key: tensor.clone() for key, tensor in old.tensors().items()})
    for number in range(4):
        one, other = (step(s, make_generator(number, "next")) for s in (old, new))
        assert one == other
    assert set(old.tensors()) == set(new.tensors())


def test_the_baseline_is_a_moving_average_of_regularised_rewards():
    controller = make_sampler("controller", SMALL)
    controller.entropy_weight = 0.0
    paths = controller.sample(4, make_generator(0, "draws"))
    for rewards, baseline in (([0.2, 0.4, 0.6, 0.8], 0.5), ([1.0] * 4, 0.55)):
        assert controller.learn(paths, rewards)["controller_baseline"] == pytest.approx(baseline)
    entropy = controller.learn(paths, [0.0] * 4)["controller_entropy"]
    assert entropy == pytest.approx(math.log(3), abs=0.1)


def weighted_moments(batches, decay):
    """Mean and deviation of all rewards at once: batch t of T has (1 - decay) decay^(T - t),
    the first decay^T.
    """
    last = len(batches) - 1
    shares = [decay ** (last - t) * (1 - decay) ** (t > 0) for t in range(last + 1)]
    parts = zip(batches, shares, strict=True)
    weights = np.concatenate([np.full(len(b), w / len(b)) for b, w in parts])
    assert weights.sum() == pytest.approx(1)
    rewards = np.concatenate(batches)
    mean = np.average(rewards, weights=weights)
    return mean, math.sqrt(np.average((rewards - mean) ** 2, weights=weights))


def test_scaled_rewards_are_deviations_from_those_so_far():
    """As the paper's controller told the rewards that numpy standardises."""
    scaled, plain = (make_sampler(name, SMALL) for name in ("scaled controller", "controller"))
    generator, batches = np.random.default_rng(0), []
    for number in range(6):
        paths = scaled.sample(3 + number, make_generator(number, "draws"))
        rewards = generator.normal(0.6 + 0.05 * number, 0.01, len(paths))
        batches.append(rewards)
        mean, deviation = weighted_moments(batches, SETTINGS.baseline_decay)
        expected = plain.learn(paths, ((rewards - mean) / deviation).tolist())
        assert scaled.learn(paths, rewards.tolist()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert scaled.seen.mean == pytest.approx(mean)
    assert math.sqrt(scaled.seen.variance) == pytest.approx(deviation)
    for name, parameter in scaled.policy.state_dict().items():
        torch.testing.assert_close(parameter, plain.policy.state_dict()[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rewards", [[0.7] * 6, [0.1 + 0.2] * 7, [0.0]])
def test_equal_rewards_are_told_as_zero(rewards):
    """To the last bit: a deviation of rounding errors would be a unit."""
    moments = Moments.of(rewards)
    for _ in range(3):
        assert moments.variance == 0
        assert moments.standardised(rewards) == [0.0] * len(rewards)
        moments = moments.moved(Moments.of(rewards), decay=0.9)
    controller = make_sampler("scaled controller", SMALL)
    paths = controller.sample(len(rewards), make_generator(0, "draws"))
    for _ in range(3):
        assert all(map(math.isfinite, controller.learn(paths, rewards).values()))
    assert not any(tensor.isnan().any() for tensor in controller.tensors().values())


@pytest.mark.parametrize("name", ["controller", "random"])
def test_what_is_rejected_is_never_proposed(name):
    """Of 81 paths the 16 without the op 0 are left; before, nearly every draw was another."""
    sampler, generator = make_sampler(name, SMALL), make_generator(0, "draws")
    sampler.rejects = lambda path: 0 in path
    for _ in range(3):  # random draws, then children
        paths = sampler.sample(30, generator)
        assert len(paths) == 30
        assert not any(0 in path for path in paths)
        sampler.learn(paths, [float(sum(path)) for path in paths])
    assert any(0 in path for path in sampler.draw(200, generator))


def test_accepted_paths_are_drawn_as_often_as_the_conditioned_policy_says():
    sampler = make_sampler("controller", SMALL)
    with torch.no_grad():
        for decoder in sampler.policy.decoders:
            decoder.bias += torch.tensor([0.0, 0.7, -0.7])
    sampler.rejects = lambda path: path[0] == path[1]
    paths = every_path(SMALL)
    probs = sampler.policy(paths).exp().detach() * (paths[:, 0] != paths[:, 1])
    drawn = sampler.sample(4000, make_generator(1, "draws"))
    places = torch.tensor([27 * a + 9 * b + 3 * c + d for a, b, c, d in drawn])
    shares = places.bincount(minlength=81) / 4000
    torch.testing.assert_close(shares, probs / probs.sum(), rtol=0, atol=0.025)


@pytest.mark.run
def test_a_collapsed_policy_gives_way_to_uniform_draws():
    sampler = make_sampler("controller", SMALL)
    with torch.no_grad():
        for decoder in sampler.policy.decoders:
            decoder.bias[0] = 1e4
    sampler.rejects = lambda path: path == [0] * 4
    generator = make_generator(2, "draws")
    assert sampler.draw(5, generator) == [[0] * 4] * 5
    paths = sampler.sample(400, generator)
    assert [0] * 4 not in paths
    assert len({tuple(path) for path in paths}) > 60


# --- Alternating steps against explicit loops: an alpha step, then a weight step, batch by batch


WEIGHTS = SGD(0.3, 0.0, momentum=0.9, weight_decay=0.01, clip_norm=1.0)
ALPHAS = Adam(0.05, weight_decay=1e-3)
FACTORS = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
OBJECTIVE = Objective(FACTORS)


def optimizers_of(network, weights, alphas, *, beta=0.5, nesterov=False):
    """Make the optimisers of a search."""
    own, others = network.weights(), network.alphas()
    sgd = make_sgd(own.values(), weights, nesterov=nesterov)
    adam = make_adam(others.values(), alphas, beta=beta)
    return Optimizers(Optimizer(own, sgd, weights.clip_norm), Optimizer(others, adam))


def search(net, train, validation, rule, beta_decay):
    """Search for one pass over ``train``; return where the gradients came from."""
    gradients = ExactGradients(lambda: iter(train), lambda: iter(validation), objective=OBJECTIVE)
    optimizers = optimizers_of(net, WEIGHTS, ALPHAS)
    alternate(net, gradients, optimizers, Alternating(rule, beta_decay=beta_decay))
    return gradients


def loss_of(net, batch):
    return (FACTORS[batch[1]] * F.cross_entropy(net(batch[0]), batch[1], reduction="none")).mean()


def explicit(net, train, validation, rule, beta_decay):
    """The same with nothing of ours but the two gradients that have tests of their own."""
    weights, alphas = list(net.weights().values()), list(net.alphas().values())
    sgd = torch.optim.SGD(weights, lr=0.3, momentum=0.9, weight_decay=0.01)
    adam = torch.optim.Adam(alphas, lr=0.05, betas=(0.5, 0.999), weight_decay=1e-3)
    of_one_batch, losses = BatchGradients(objective=OBJECTIVE), []
    for train_batch, validation_batch in zip(train, validation, strict=False):
        both = {"train_batch": train_batch, "validation_batch": validation_batch}
        if rule == "first_order":
            gradients = torch.autograd.grad(loss_of(net, validation_batch), alphas)
        elif rule == "mixed_level":
            by_kind, _ = of_one_batch.mixed_level_gradient(net, **both)
            gradients = by_kind.values()
        else:
            twin = copy.deepcopy(net)
            step = torch.optim.SGD(twin.weights().values(), lr=0.3, momentum=0.9, weight_decay=0.01)
            for weight, own in zip(twin.weights().values(), weights, strict=True):
                if "momentum_buffer" in sgd.state[own]:
                    buffer = sgd.state[own]["momentum_buffer"].clone()
                    step.state[weight]["momentum_buffer"] = buffer
            loss_of(twin, train_batch).backward()
            step.step()
            places = {"weights": net.weights(), "virtual_weights": twin.weights()}
            by_kind, _ = of_one_batch.second_order_gradient(net, **places, **both, inner_lr=0.3)
            gradients = by_kind.values()
        decays = torch.autograd.grad(beta_decay * torch.cat(alphas).logsumexp(-1).mean(), alphas)
        for alpha, gradient, decay in zip(alphas, gradients, decays, strict=True):
            alpha.grad = gradient + decay
        adam.step()
        loss = loss_of(net, train_batch)
        losses.append(loss.item())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        sgd.step()
    return losses


@pytest.mark.parametrize("beta_decay", [0.0, 2.0])
@pytest.mark.parametrize("rule", ["first_order", "second_order", "mixed_level"])
def test_a_pass_equals_an_explicit_loop(rule, beta_decay, net, batch):
    train = [batch(6, seed) for seed in range(4)]
    validation = [batch(5, 10 + seed) for seed in range(6)]  # more than are needed
    twin, start = copy.deepcopy(net), copy.deepcopy(net)
    gradients = search(net, train, validation, rule, beta_decay)
    losses = explicit(twin, train, validation, rule, beta_decay)
    for name, mine in net.named_parameters():
        other, old = twin.get_parameter(name), start.get_parameter(name)
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
        assert (mine - old).abs().max() > 1e-3, name
    seen = gradients.train_tally, gradients.validation_tally
    assert seen[0].loss == pytest.approx(sum(losses) / 4)
    assert tuple(tally.num_examples for tally in seen) == (24, 20)


def test_entropy_of_known_distributions():
    assert alpha_entropy({"a": torch.zeros(3, 8)}) == pytest.approx(math.log(8))
    assert alpha_entropy({"a": torch.tensor([[1e4, 0.0]])}) == 0.0
    two = {"a": torch.log(torch.tensor([[0.5, 0.25, 0.25]])), "b": torch.zeros(1, 4)}
    assert alpha_entropy(two) == pytest.approx((1.5 * math.log(2) + math.log(4)) / 2, rel=1e-6)


def test_ops_that_are_never_chosen_are_left_alone():
    gradient = beta_gradient({"cell": torch.tensor([[1.0, -1e9]])}, weight=2.0)["cell"]
    assert gradient.tolist() == [[2.0, 0.0]]


def test_the_weight_rises_linearly_to_its_value_in_the_last_round():
    found = [local_search.rising(5.0, number, 4) for number in (1, 2, 3, 4)]
    assert found == pytest.approx([1.25, 2.5, 3.75, 5.0])


# --- Candidates: paths of a supernet, and pools


SPACE = DPCellSpace(input_shape=(2, 6, 5), num_classes=3, widths=(4, 4, 8), head=8)
# of every op, and of convolutions
PATHS = [[*range(10), *range(4, 9)], [*range(4, 10), *range(4, 10), *range(4, 7)]]


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("dp_aware", [None, DPAware(0.05, 0.0), DPAware(0.05, 2.0)])
def test_candidates_are_trained_one_after_the_other(dp_aware):
    """Batch by batch, momentum kept; DP-aware ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``."""
    with seeded(0, "supernet"):
        supernet, twin = (SPACE.supernet().double().train() for _ in range(2))
    twin.load_state_dict(supernet.state_dict())
    generator, noise, again = (make_generator(0, name) for name in ("records", "noise", "noise"))
    batches = [tensors_of(SPACE.input_shape, 3, 3, generator) for _ in range(4)]
    constants = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    own = {} if dp_aware is None else {"dp_aware": dp_aware, "generator": noise}
    kind = ExactGradients if dp_aware is None else ClippedGradients
    gradients = kind(lambda: iter(batches), num_steps=4, **own)
    weights = supernet.weights()
    optimizer = Optimizer(weights, torch.optim.SGD(weights.values(), **constants))
    train_candidates(supernet, PATHS, gradients, optimizer, steps=2)
    sgd, norms = torch.optim.SGD(twin.weights().values(), **constants), []
    for position, (x, y) in enumerate(batches):
        candidate = Candidate(twin, PATHS[position // 2])
        weights = list(candidate.weights().values())
        total = [torch.zeros_like(weight) for weight in weights]
        for i in range(3):
            loss = torch.nn.functional.cross_entropy(candidate(x[i, None]), y[i, None])
            record = torch.autograd.grad(loss, weights)
            norms.append(torch.cat([g.reshape(-1) for g in record]).norm().item())
            scale = 1.0 if dp_aware is None else min(1.0, dp_aware.max_grad_norm / norms[-1])
            total = [t + scale * g for t, g in zip(total, record, strict=True)]
        sgd.zero_grad()
        for weight, gradient in zip(weights, total, strict=True):
            if dp_aware is not None:
                std = dp_aware.noise_multiplier * dp_aware.max_grad_norm
                gradient = gradient + std * torch.randn(gradient.shape, generator=again)
            weight.grad = gradient / 3
        sgd.step()
    assert max(norms) > 0.05
    assert gradients.train_tally.num_examples == 12
    for name, weight in supernet.weights().items():
        torch.testing.assert_close(weight, twin.weights()[name], rtol=1e-9, atol=1e-12, msg=name)


def test_other_spaces_have_no_candidates():
    darts = DARTSSpace(input_shape=(3, 8, 8), num_classes=3, channels=2, num_cells=3).supernet()
    refuses("set it", Candidate, darts, [0] * 15, error=ValueError)

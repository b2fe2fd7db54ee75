"""Local steps of ProxylessNAS against explicit ones of torch's optimisers on derived networks."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.privacy.mechanism import clipping
from fednas_flwr.search import proxyless
from fednas_flwr.search.exact_gradients import ExactGradients
from fednas_flwr.search.objective import CLASSIFICATION
from fednas_flwr.search.proxyless import PathNetwork, alpha_gradient, draw_paths, gate_gradient
from fednas_flwr.settings import Hardware
from fednas_flwr.settings.optimizers import SGD, Adam
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.mbconv import NEVER, MBConvSpace, Skeleton

from ..refusals import refuses
from ..small_spaces import PATH_COSTS as COSTS
from ..small_spaces import PATH_SPACE as SPACE
from .conftest import tensors_of
from .test_samplers import optimizers_of

WEIGHTS = SGD(0.1, 0.0, momentum=0.9, weight_decay=0.01, clip_norm=1.0)
ALPHAS = Adam(0.01, weight_decay=0.0)
SEARCHED = {"beta": 0.0, "nesterov": True}  # as the paper does


@pytest.fixture
def supernet():
    with seeded(1, "supernet"):
        supernet = SPACE.supernet().double()
        torch.nn.init.normal_(supernet.body.after[1][2].weight)
    return supernet


def batches(count, start=0):
    for seed in range(start, start + count):
        yield tensors_of((2, 4, 4), 3, 5, make_generator(seed, "batch"))


class AlphasOnly(ExactGradients):
    """Those of the alphas alone, so that nothing of a weight step may be seen."""

    def weights(self, network):
        return {}


@pytest.mark.parametrize("warm_up", [False, True])
def test_weight_steps_train_the_derived_networks_of_drawn_paths(supernet, warm_up):
    """Nesterov SGD with clipping on the path's own network; all else stays as it is.

    The alphas have a learning rate of zero and so stay, too.
    """
    optimizers = optimizers_of(supernet, WEIGHTS, Adam(0.0, 0.0), **SEARCHED)
    generator, again = (make_generator(0, "paths") for _ in range(2))
    momenta = {}
    alphas = supernet.alphas()["blocks"]
    for batch in batches(5):
        before = copy.deepcopy(supernet.state_dict())
        if not warm_up:
            draw_paths(alphas, number=2, generator=again)  # of the alpha step
        drawn_from = proxyless.uniform_alphas(alphas) if warm_up else alphas
        path = draw_paths(drawn_from, number=1, generator=again)[:, 0].tolist()
        network = SPACE.network(SPACE.genotype(path)).double()
        network.load_state_dict({name: before[f"body.{name}"] for name in network.state_dict()})
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
        sgd = torch.optim.SGD(network.parameters(), **settings)
        for name, weight in network.named_parameters():
            if name in momenta:
                sgd.state[weight]["momentum_buffer"] = momenta[name]
        loss = F.cross_entropy(network(batch[0]), batch[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        sgd.step()
        for name, weight in network.named_parameters():
            momenta[name] = sgd.state[weight]["momentum_buffer"]

        gradients = ExactGradients(lambda batch=batch: iter([batch]), lambda: batches(1, start=100))
        paths = proxyless.SampledPaths(warm_up, None)
        proxyless.search_paths(supernet, gradients, optimizers, paths, generator=generator)
        assert gradients.train_tally.loss == pytest.approx(loss.item())
        trained = network.state_dict()
        for name, tensor in supernet.state_dict().items():
            expected = trained.get(name.removeprefix("body."), before[name])
            torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-12)


def test_alpha_steps_move_only_sampled_probabilities(supernet):
    optimizers = optimizers_of(supernet, WEIGHTS, ALPHAS, **SEARCHED)
    generator, again = (make_generator(0, "paths") for _ in range(2))
    weights = copy.deepcopy(supernet.weights())
    alphas, paths = supernet.alphas()["blocks"], proxyless.SampledPaths(False, None)
    for batch in batches(20):
        before = alphas.detach().clone()
        pairs = draw_paths(alphas, number=2, generator=again)
        gradients = AlphasOnly(lambda: batches(1, start=100), lambda batch=batch: iter([batch]))
        proxyless.search_paths(supernet, gradients, optimizers, paths, generator=generator)
        assert gradients.validation_tally.num_examples == len(batch[1])
        draw_paths(alphas, number=1, generator=again)  # of the weight step
        sampled = torch.zeros(3, 4, dtype=torch.bool).scatter(1, pairs, True)
        assert (alphas.softmax(-1) - before.softmax(-1))[~sampled].abs().max() < 1e-15
        assert (alphas - before).gather(-1, pairs).abs().min() > 1e-6
        assert torch.equal(alphas[~sampled], before[~sampled])
    assert alphas[2, 3] == NEVER
    assert all(torch.equal(w, weights[name]) for name, w in supernet.weights().items())


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
def test_hardware_adds_the_gradient_of_the_expected_cost(supernet, form):
    """Of all ops, by the chain rule on CE and on E through softmax(alphas)."""
    hardware = HardwareLoss.of(COSTS, Hardware(None, "ms", 8.0, form, 0.7, 0.6))
    batch = next(batches(1))
    alphas = supernet.alphas()["blocks"].detach().requires_grad_()
    paths = draw_paths(alphas, number=4, generator=make_generator(0, "paths"))
    plain, losses = gate_gradient(supernet, batch, paths)
    found, _ = gate_gradient(supernet, batch, paths, hardware=hardware)

    task, cost = losses.mean().requires_grad_(), COSTS.expected(alphas.softmax(-1))
    by_task, by_alphas = torch.autograd.grad(hardware(task, cost), [task, alphas])
    expected = by_task * alpha_gradient(plain, alphas, paths) + by_alphas
    found = alpha_gradient(found, alphas, paths)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert by_alphas.abs().max() > 1e-3


def test_warm_up_trains_uniform_paths_and_no_alphas(supernet):
    alphas = supernet.alphas()["blocks"]
    with torch.no_grad():
        alphas[:, 0] = 100.0  # else the only path
    before = copy.deepcopy(supernet.state_dict())
    gradients = ExactGradients(lambda: batches(20), lambda: batches(22, start=100))
    optimizers = optimizers_of(supernet, WEIGHTS, ALPHAS, **SEARCHED)
    generator = make_generator(0, "paths")
    paths = proxyless.SampledPaths(True, None)
    proxyless.search_paths(supernet, gradients, optimizers, paths, generator=generator)
    seen = gradients.train_tally, gradients.validation_tally
    assert tuple(tally.num_examples for tally in seen) == (100, 0)
    after = supernet.state_dict()
    assert torch.equal(after["alphas.blocks"], before["alphas.blocks"])
    for op in SPACE.ops[:3]:
        name = f"body.blocks.2.ops.{op}.project.weight"
        assert not torch.equal(after[name], before[name])


# --- Gates against enumeration: of ops, of pairs of ops, and of all paths of a tiny supernet


DRAWS = 4000
GATED_ALPHAS = torch.tensor([[0.5, -1.0, 0.2, 1.5], [0.0, 2.0, -0.5, NEVER]], dtype=torch.float64)

# 2 blocks, 3 ops, the first op of the second block is not offered
SKELETON = Skeleton(8, 1, 8, ((8, 1), (16, 1)), (2,), 8)
OPS = ("zero", "mbconv2_3x3", "mbconv3_5x5")
TINY = MBConvSpace(
    input_shape=(2, 4, 4), num_classes=3, skeleton=SKELETON, candidates=OPS, norm="group"
)


def frequencies(paths, num_ops):
    """Share of draws [E, O] in which an op is among the given columns."""
    return F.one_hot(torch.stack(paths), num_ops).double().sum(2).mean(0)


def draw_many(number, alphas=GATED_ALPHAS):
    generator = make_generator(0, f"{number} paths")
    return [draw_paths(alphas, number=number, generator=generator) for _ in range(DRAWS)]


# Standard deviation of a share is at most .5 / sqrt(4000) = .008.
@pytest.mark.parametrize("number", [1, 4])
def test_the_active_op_is_drawn_from_the_softmax(number):
    active = [paths[:, :1] for paths in draw_many(number)]
    torch.testing.assert_close(frequencies(active, 4), GATED_ALPHAS.softmax(-1), rtol=0, atol=0.03)


def test_two_ops_are_drawn_without_replacement_and_one_by_their_softmax():
    draws = draw_many(2)
    p = GATED_ALPHAS.softmax(-1)
    for block in range(2):
        seen = {}
        for paths in draws:
            seen.setdefault(tuple(sorted(paths[block].tolist())), []).append(int(paths[block, 0]))
        for i, j in itertools.combinations(range(4), 2):
            actives = seen.get((i, j), [])
            p_i, p_j = p[block, i].item(), p[block, j].item()
            share = p_i * p_j / (1 - p_i) + p_i * p_j / (1 - p_j)
            assert len(actives) / DRAWS == pytest.approx(share, abs=0.03)
            if len(actives) > 400:
                assert actives.count(i) / len(actives) == pytest.approx(p_i / (p_i + p_j), abs=0.08)


def test_what_is_not_offered_comes_last_even_where_probabilities_underflow():
    alphas = torch.tensor([[900.0, 0.0, -900.0, NEVER]])
    for expected in ([0], [0, 1], [0, 1, 2, 3]):
        paths = draw_paths(alphas, number=len(expected), generator=make_generator(0, "underflow"))
        assert paths.tolist() == [expected]


def test_uniform_paths_ignore_the_alphas_but_not_what_is_offered():
    drawn = frequencies(draw_many(1, proxyless.uniform_alphas(GATED_ALPHAS)), 4)
    expected = torch.tensor([[1 / 4] * 4, [1 / 3] * 3 + [0]], dtype=torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("batch", [(), (5,)])
def test_full_gradient_is_autograds_through_the_softmax(batch):
    gates = torch.randn(*batch, 2, 4, dtype=torch.float64)
    paths = torch.tensor([[2, 0, 3, 1], [0, 1, 2, 3]])
    alphas = GATED_ALPHAS.clone().requires_grad_()
    for index in itertools.product(*map(range, batch)):
        loss = (alphas.softmax(-1).gather(-1, paths) * gates[index]).sum()
        (expected,) = torch.autograd.grad(loss, [alphas], retain_graph=True)
        found = alpha_gradient(gates, alphas, paths)[index]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_the_gradient_of_two_is_that_of_their_own_softmax_and_zero_elsewhere():
    gates = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
    found = alpha_gradient(gates, GATED_ALPHAS, torch.tensor([[1, 3], [2, 0]]))
    a, b = (1 / (1 + torch.exp(d)) for d in (torch.tensor(2.5), torch.tensor(0.5)))
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0, 1], expected[1, 2] = a * (1 - a) * 3, b * (1 - b) * 2.5
    expected[0, 3], expected[1, 0] = -expected[0, 1], -expected[1, 2]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


reals = st.floats(-60, 60)


@given(old=st.tuples(*[reals] * 5), steps=st.tuples(reals, reals), pair=st.permutations(range(5)))
def test_rescaling_keeps_every_unsampled_probability(old, steps, pair):
    """Also for alphas so far apart that exp would overflow single precision."""
    old_EO = torch.tensor([old], dtype=torch.float64)
    paths = torch.tensor([pair[:2]])
    new_EO = old_EO.scatter_add(-1, paths, torch.tensor([steps], dtype=torch.float64))
    scaled = proxyless.rescale(new_EO, old_EO, paths)
    rest = list(pair[2:])
    assert torch.equal(scaled[:, rest], old_EO[:, rest])
    log_p, before = scaled.log_softmax(-1), old_EO.log_softmax(-1)
    torch.testing.assert_close(log_p[:, rest], before[:, rest], rtol=1e-9, atol=1e-9)
    difference = new_EO.gather(-1, paths).diff()
    torch.testing.assert_close(scaled.gather(-1, paths).diff(), difference, rtol=0, atol=1e-9)


@pytest.mark.parametrize("number", [2, 3])
def test_gate_gradients_of_every_path_equal_finite_differences(number):
    """All active paths and all pairs: dL/dg at one-hot gates, without and with the graph."""
    with seeded(3, "tiny"):
        supernet = TINY.supernet().double()
        alphas = supernet.alphas()["blocks"]
        alphas.data = torch.where(alphas == NEVER, NEVER, torch.randn_like(alphas))
        torch.nn.init.normal_(supernet.body.after[1][2].weight)  # so that losses differ
    batch = tensors_of((2, 4, 4), 3, 6, make_generator(0, "batch"))

    def loss(gates_EO):  # a function of all gates, every op computed with its graph
        return F.cross_entropy(supernet(batch[0], {"blocks": gates_EO}), batch[1]).item()

    for active in itertools.product(*TINY.offered):
        others = [[o for o in row if o != a] for row, a in zip(TINY.offered, active, strict=True)]
        if number == 3:
            missing = [[o for o in range(3) if o not in row] for row in TINY.offered]
            choices = [[[a, *o, *m] for a, o, m in zip(active, others, missing, strict=True)]]
        else:
            choices = [[*zip(active, other, strict=True)] for other in itertools.product(*others)]
        one_hot = F.one_hot(torch.tensor(active), 3).double()
        for paths in map(torch.tensor, choices):
            gradients, _ = gate_gradient(supernet, batch, paths)
            for block, position in itertools.product(range(2), range(paths.shape[1])):
                moved = torch.zeros_like(one_hot)
                moved[block, paths[block, position]] = 1e-5
                expected = (loss(one_hot + moved) - loss(one_hot - moved)) / 2e-5
                assert gradients[block, position].item() == pytest.approx(expected, abs=1e-6)


# --- Drawn paths as networks: clipped sums against loops over records, and draws that cannot fail


MULTIPLICATIVE, ADDITIVE = (
    HardwareLoss.of(COSTS, Hardware(None, "ms", 8.0, form, 0.7, 0.6))
    for form in ("multiplicative", "additive")
)


@pytest.fixture(scope="module")
def shared():
    with seeded(1, "supernet"):
        shared = SPACE.supernet().double().train()
        torch.nn.init.normal_(shared.body.after[1][2].weight)
        alphas = shared.alphas()["blocks"]
        alphas.data = torch.where(alphas.data > -1, 0.5 * torch.randn(3, 4).double(), alphas.data)
    return shared


@pytest.fixture(scope="module")
def records():
    return tensors_of((2, 4, 4), 3, 6, make_generator(1, "batch"))


def paths(shared, number, seed=0):
    generator = make_generator(seed, "paths")
    return draw_paths(proxyless.drawable_alphas(shared), number=number, generator=generator)


def clip_to(gradients, norm):
    """Return the sum over records of what is clipped, and the records' norms."""
    lengths = [torch.cat([g.reshape(-1) for g in record]).norm().item() for record in gradients]
    scales = [min(1.0, norm / length) for length in lengths]
    parts = zip(*gradients, strict=True)
    return [sum(s * g for s, g in zip(scales, part, strict=True)) for part in parts], lengths


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("seed", range(4))
def test_weights_of_a_path_are_clipped_as_those_of_its_derived_network(seed, shared, records):
    path = paths(shared, 1, seed)
    network = PathNetwork(shared, path)
    derived = SPACE.network(SPACE.genotype(path[:, 0].tolist())).double()
    own, state = network.weights(), shared.state_dict()
    derived.load_state_dict({n: state[f"body.{n}"] for n in derived.state_dict()})
    assert list(own) == [f"body.{name}" for name, _ in derived.named_parameters()]
    gradients = []
    for i in range(len(records[1])):
        loss = F.cross_entropy(derived(records[0][i : i + 1]), records[1][i : i + 1])
        gradients.append(torch.autograd.grad(loss, list(derived.parameters())))
    norm = sorted(clip_to(gradients, 1.0)[1])[3]  # some are clipped, some are not
    expected, _ = clip_to(gradients, norm)
    terms = {"loss": CLASSIFICATION.plain_losses, "max_norm": norm, "micro_batch_size": 4}
    sums = clipping.clipped_gradient_sum(network, *records, parameters=own, **terms)
    assert list(sums) == list(own)
    for found, wanted in zip(sums.values(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize("hardware", [None, MULTIPLICATIVE], ids=["plain", "multiplicative"])
@pytest.mark.parametrize("number", [2, 4])
def test_alphas_are_clipped_by_record_through_the_gates(number, hardware, shared, records):
    alphas = shared.alphas()["blocks"]
    for seed in range(3):
        drawn = paths(shared, number, seed)
        gradients = []
        for i in range(len(records[1])):
            record = records[0][i : i + 1], records[1][i : i + 1]
            by_gates, _ = gate_gradient(shared, record, drawn, hardware=hardware)
            gradients.append((alpha_gradient(by_gates, alphas, drawn),))
        norm = sorted(clip_to(gradients, 1.0)[1])[3]
        (expected,), _ = clip_to(gradients, norm)

        def losses(output, labels):
            if hardware is None:
                return CLASSIFICATION.plain_losses(output, labels)
            return hardware(CLASSIFICATION.plain_losses(output[0], labels), output[1])

        network = PathNetwork(shared, drawn, None if hardware is None else COSTS)
        gates = {"blocks": proxyless.active_gates(drawn, like=alphas)}
        relaxation = clipping.Relaxation(
            gates, lambda kind, g, drawn=drawn: alpha_gradient(g, alphas, drawn)
        )
        terms = {"loss": losses, "max_norm": norm, "micro_batch_size": 4}
        terms |= {"alphas": shared.alphas(), "relaxation": relaxation}
        found = clipping.clipped_alpha_gradient_sum(network, *records, **terms)["blocks"]
        assert expected.norm() > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("number", [2, 4])
def test_the_additive_cost_is_a_part_of_its_own_that_knows_no_record(number, shared, records):
    alphas, drawn = shared.alphas()["blocks"], paths(shared, number)
    plain, _ = gate_gradient(shared, records, drawn)
    both, _ = gate_gradient(shared, records, drawn, hardware=ADDITIVE)
    found = proxyless.cost_gradient(ADDITIVE, shared, drawn)
    expected = alpha_gradient(both - plain, alphas, drawn)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert found.abs().max() > 1e-3


WILD = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, -1e4, -2e4, 0.0, 5.0, 1e3])


@given(st.lists(WILD, min_size=12, max_size=12), st.sampled_from([1, 2, 4]))
def test_no_alphas_that_a_server_can_send_draw_what_is_not_offered(values, number):
    shared = SPACE.supernet()
    with torch.no_grad():
        shared.alphas()["blocks"].copy_(torch.tensor(values).view(3, 4))
    offered = proxyless.offered_ops(shared)
    assert offered.tolist() == [[True] * 4, [True] * 4, [True, True, True, False]]
    for seed in range(5):
        alphas = proxyless.drawable_alphas(shared)
        for drawn in (alphas, proxyless.uniform_alphas(alphas)):
            found = draw_paths(drawn, number=number, generator=make_generator(seed, "paths"))
            assert bool(offered.gather(1, found[:, :1] if number == 4 else found).all())


def test_alphas_of_a_search_are_drawn_from_as_they_are(shared):
    assert torch.equal(proxyless.drawable_alphas(shared), shared.alphas()["blocks"])


@pytest.mark.parametrize("number", [1, 2, 4])
def test_covering_paths_compute_every_op_that_is_offered_and_no_other(shared, number):
    offered_EO = proxyless.offered_ops(shared)
    computed_EO = torch.zeros_like(offered_EO)
    for paths_EK in proxyless.covering_paths(shared, number=number):
        assert paths_EK.shape == (3, number)
        assert all(len(set(row)) == len(row) for row in paths_EK.tolist())
        assert bool(offered_EO.gather(1, paths_EK[:, :1]).all())
        computed_EO.scatter_(1, paths_EK, True)
    assert bool(computed_EO[offered_EO].all())


def test_the_first_covering_paths_have_the_most_weights(shared):
    assert proxyless.covering_paths(shared, number=1)[0].tolist() == [[1], [1], [1]]
    assert proxyless.covering_paths(shared, number=2)[0].tolist() == [[1, 2], [1, 2], [1, 2]]
    networks = (PathNetwork(shared, paths(shared, 1, seed)) for seed in range(30))
    counts = {sum(w.numel() for w in network.weights().values()) for network in networks}
    most = PathNetwork(shared, proxyless.covering_paths(shared, number=1)[0]).weights().values()
    assert len(counts) > 5
    assert max(counts) <= sum(w.numel() for w in most)


def test_other_supernets_have_no_paths():
    cells = DARTSSpace(input_shape=(3, 8, 8), num_classes=3, channels=4, num_cells=3).supernet()
    refuses("set search_space=mbconv", proxyless.offered_ops, cells, error=ValueError)

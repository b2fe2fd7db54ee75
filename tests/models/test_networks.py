import pytest
import torch
from torch import nn

from fednas_flwr.models.networks import FIXED_NETWORKS, ResidualBlock, linear
from fednas_flwr.settings.optimizers import NORMED_NETWORKS
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters

from ..refusals import refuses


def test_mobilenet_v2_has_the_published_size():
    """Sandler et al. (2018), Table 4: 3.4 M parameters, 300 M multiply-adds at 224x224.

    torchvision's documentation gives 3,504,872 parameters.
    """
    network = FIXED_NETWORKS["mobilenet_v2"]((3, 224, 224), 1000, norm="batch")
    assert count_parameters(network) == 3_504_872
    assert count_multiply_adds(network, (3, 224, 224)) == pytest.approx(300e6, rel=0.01)


@pytest.mark.parametrize("name", ["efficientnet_b0", "mobilenet_v2"])
@pytest.mark.parametrize(("shape", "stride"), [((1, 32, 32), 1), ((3, 64, 64), 2)])
def test_networks_of_torchvision_take_small_and_grey_images(name, shape, stride):
    network = FIXED_NETWORKS[name](shape, 7, norm="group")
    assert network.features[0][0].stride == (stride, stride)
    assert network(torch.zeros(2, *shape)).shape == (2, 7)


SMALL = [(1, 8, 8), (3, 28, 28), (2, 7, 13), (1, 1, 1), (4, 5, 33)]
ODD = [(1, 14, 15), (1, 29, 33), (3, 8, 9), (4, 33, 8)]


OF_ANY_SIZE = ("plain_cnn", "linear", "mlp_64", "resnet8_4")
SMALL_NETWORKS = [(name, shape) for name in OF_ANY_SIZE for shape in SMALL]
SMALL_NETWORKS += [("cnn_elu", shape) for shape in ODD]


@pytest.mark.parametrize(("name", "shape"), SMALL_NETWORKS)
def test_small_networks_take_any_size(name, shape):
    norm = {"norm": "group"} if name in NORMED_NETWORKS else {}
    assert FIXED_NETWORKS[name](shape, 5, **norm)(torch.zeros(3, *shape)).shape == (3, 5)


def test_one_layer_adds_its_logits_to_those_of_a_linear_model():
    network, x = FIXED_NETWORKS["mlp_64"]((2, 3), 5), torch.randn(4, 2, 3)
    first, last = network.layer[1], network.layer[3]
    layer = (x.flatten(1) @ first.weight.T + first.bias).clamp(min=0) @ last.weight.T + last.bias
    torch.testing.assert_close(network(x), layer)
    with torch.no_grad():
        network.beside[1].bias.copy_(torch.arange(5.0))
    torch.testing.assert_close(network(x), layer + torch.arange(5.0))


def test_resnet8_needs_images():
    resnet = FIXED_NETWORKS["resnet8_4"]
    refuses("algorithm.network=resnet8_4 needs images", resnet, (8,), 5, norm="group")


def test_resnet8_has_the_parameters_and_multiply_adds_counted_by_hand():
    """Of width w: 9 values per 3x3 kernel, 1 per shortcut, 2 per channel of a norm."""
    network = FIXED_NETWORKS["resnet8_16"]((3, 32, 32), 10, norm="group")
    kernels = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
    shortcuts, norms = 16 * 32 + 32 * 64, 2 * (3 * 16 + 3 * 32 + 3 * 64)
    assert count_parameters(network) == kernels + shortcuts + norms + 65 * 10
    first = 9 * (3 * 16 + 2 * 16 * 16) * 32 * 32
    second = (9 * (16 * 32 + 32 * 32) + 16 * 32) * 16 * 16
    third = (9 * (32 * 64 + 64 * 64) + 32 * 64) * 8 * 8
    assert count_multiply_adds(network, (3, 32, 32)) == first + second + third + 64 * 10


def test_a_residual_block_adds_its_input():
    block = ResidualBlock(4, 4, stride=1, norm="batch").eval()
    nn.init.zeros_(block.second[0].weight)
    x = torch.rand(2, 4, 5, 5)
    torch.testing.assert_close(block(x), x)


def test_linear_is_logistic_regression_on_any_records():
    network = linear((6,), 4)
    x = torch.randn(5, 6)
    (dense,) = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert torch.equal(network(x), x @ dense.weight.T + dense.bias)


GRAY, COLOUR = (1, 28, 28), (3, 32, 32)


PARAMETERS = [
    ("linear", GRAY, 7850, nn.Linear, 1),
    ("mlp_64", (13,), 14 * 64 + 65 * 10 + 14 * 10, nn.Linear, 3),
    ("plain_cnn", GRAY, 10 * 16 + 145 * 32 + 1569 * 64 + 65 * 10, nn.Conv2d, 2),  # by hand
    ("cnn_tanh", GRAY, 26_010, nn.Tanh, 3),  # DPNAS, Table 1: .03 M
    ("cnn_selu", GRAY, 26_010, nn.SELU, 3),
    ("cnn_tanh", COLOUR, 550_570, nn.Tanh, 7),  # and .55 M
    ("cnn_selu", COLOUR, 550_570, nn.SELU, 7),
]


@pytest.mark.parametrize(("name", "shape", "parameters", "kind", "number"), PARAMETERS)
def test_networks_have_their_number_of_parameters(name, shape, parameters, kind, number):
    network = FIXED_NETWORKS[name](shape, 10)
    assert count_parameters(network) == parameters
    assert sum(isinstance(module, kind) for module in network.modules()) == number


@pytest.mark.parametrize("shape", [(1, 13, 28), (3, 32, 7)])
def test_cnn_refuses_images_that_its_strides_would_use_up(shape):
    refuses("need images of at least", FIXED_NETWORKS["cnn_tanh"], shape, 5)


@pytest.mark.parametrize("name", FIXED_NETWORKS)
def test_networks_train_and_take_drop_path(name):
    """The trainer sets ``drop_path_prob`` on every network; these have no path to drop."""
    norm = {"norm": "group"} if name in NORMED_NETWORKS else {}
    network = FIXED_NETWORKS[name]((3, 32, 32), 2, **norm)
    network.drop_path_prob = 0.5
    network.train()(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert not any("drop_path" in name for name in network.state_dict())

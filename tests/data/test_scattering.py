"""Scattering features: kymatio's coefficients, of one record each, also in ONNX."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

from fednas_flwr import load
from fednas_flwr.api import run
from fednas_flwr.base.errors import NoEffectError
from fednas_flwr.client.making import make_client
from fednas_flwr.data.loaders import server_split
from fednas_flwr.data.prepared import make_data
from fednas_flwr.data.scattering import Scattering, num_paths
from fednas_flwr.data.summary import reading_notes
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

from ..data_sets import prepared, right_of
from ..refusals import refuses

SHAPES = [((1, 28, 28), 2, 8), ((3, 32, 32), 2, 8), ((2, 9, 14), 1, 3), ((1, 20, 17), 3, 4)]


@pytest.mark.parametrize(("shape", "scales", "angles"), SHAPES)
def test_coefficients_are_kymatios(shape, scales, angles):
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    expected = ScatteringTorch2D(J=scales, shape=shape[1:], L=angles)(images)
    transform = Scattering(shape, scales=scales, angles=angles)
    found = transform.coefficients(images)
    assert found.shape[2] == num_paths(scales, angles)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert transform(images).shape[1:] == transform.output_shape


def test_features_are_normalised_in_groups():
    transform = Scattering((1, 28, 28), scales=2, angles=8)
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    groups = transform(images).view(4, 27, -1)
    torch.testing.assert_close(groups.mean(-1), torch.zeros(4, 27), rtol=0, atol=1e-4)
    assert not list(transform.parameters())
    assert not transform.state_dict()


def test_colours_become_brightness_and_differences_that_gray_lacks():
    transform = Scattering((3, 16, 16), scales=1, angles=2)
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    red, green, blue = images.unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    converted = torch.stack([luma, (blue - luma) / 1.772, (red - luma) / 1.402], 1)  # BT.601
    expected = torch.nn.functional.group_norm(transform.coefficients(converted).flatten(1, 2), 9)
    torch.testing.assert_close(transform(images), expected, rtol=1e-3, atol=1e-3)
    gray = transform(luma[:, None].expand(-1, 3, -1, -1)).unflatten(1, (3, -1))
    alone = Scattering((1, 16, 16), scales=1, angles=2)(luma[:, None])
    torch.testing.assert_close(gray[:, 0], alone, rtol=1e-3, atol=1e-3)
    assert gray[:, 1:].abs().max() < 0.1  # nothing but rounding, below the norm's epsilon


def test_onnx_computes_the_same(tmp_path):
    import onnxruntime

    transform = Scattering((3, 16, 16), scales=2, angles=4)
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "transform.onnx"
    form = {"dynamo": False, "input_names": ["images"], "dynamic_axes": {"images": {0: "batch"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, which announces its age
        torch.onnx.export(transform, (images[:2],), str(file), **form)
    (found,) = onnxruntime.InferenceSession(str(file)).run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), transform(images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 4, 28), (6,)])
def test_images_that_are_too_small_are_refused(shape):
    refuses("needs images of sides above 4", Scattering, shape, scales=2, angles=8)


SIZES = {"scales": 1, "angles": 2}


def test_prepared_features_are_those_of_the_raw_images(tmp_path):
    settings = {"cache": tmp_path, "name": "digits", "limit_train": 70, "limit_test": 5}
    plain = prepared(**settings)
    features = prepared(**settings, scattering=SIZES, mean=(0.3,), std=(0.2,))
    transform = Scattering((1, 8, 8), **SIZES)
    assert features.input_shape == transform.output_shape == (3, 4, 4)
    for made, raw in ((features.train, plain.train), (features.server_test, plain.server_test)):
        expected = transform(raw.features / 255)
        torch.testing.assert_close(made.features, expected, rtol=1e-4, atol=1e-4)
        assert made.ids.tolist() == raw.ids.tolist()
        x, y = server_split(made, features.mean, features.std).batch(torch.tensor([1, 3]), "cpu")
        assert torch.equal(x, made.features[[1, 3]])
        assert torch.equal(y, raw.labels[[1, 3]])
    (note,) = reading_notes(features)
    sizes = r"\(\d+, \d+, \d+\), \d+ MB"
    assert re.fullmatch(rf"scattering features: {sizes}, [\d.]+ s, [\d.]+ s per 1,000 images", note)
    assert prepared(**settings, scattering={"scales": 1, "angles": 3}).input_shape == (4, 4, 4)
    assert not features.uses_own_statistics


def test_features_are_not_augmented_and_what_asks_for_it_is_refused(compose_config):
    config = compose_config("dataset=fashion_mnist", "dataset.scattering={scales: 2, angles: 8}")
    assert (config.dataset.crop_padding, config.dataset.flip) == (2, True)
    assert not any(config.dataset.augmentation.values())
    made = compose_config("dataset.scattering={scales: 2, angles: 2}")
    made = replace(made, dataset=replace(made.dataset, crop_padding=2, flip=True))
    client = make_client(made, 0, data=make_data(made), networks={})
    assert client.augmentation == {"crop_padding": 0, "flip": 0, "cutout": 0}
    for setting in ("dataset.flip=true", "dataset.crop_padding=1", "dataset.mean=[0.5]"):
        overrides = ("dataset.scattering={scales: 2, angles: 8}", setting)
        with pytest.raises(NoEffectError, match="no effect with dataset.scattering="):
            parse_config(compose_tree(overrides), user=user_settings(overrides))


@pytest.mark.run
def test_an_exported_model_takes_raw_images(compose_config, made_data, tmp_path):
    overrides = ("dataset.scattering={scales: 2, angles: 2}", "search_space.skip=linear")
    result = run(compose_config(*overrides, f"run_dir={tmp_path / 'run'}"))
    central = result.scores["central"]
    model = load(result.folder)
    assert right_of(model, made_data).mean() == pytest.approx(central["accuracy"])
    assert {"without_skip", "without_cells"} < set(central)
    assert model.network.skip.weight.any()

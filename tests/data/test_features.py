"""Features of a backbone: frozen, of one record each, cached, and a part of the exported model.

And those of scattering: kymatio's coefficients, of one record each, also in ONNX.
"""

import json
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from fednas_flwr import load
from fednas_flwr.api import run
from fednas_flwr.base import pretrained
from fednas_flwr.base.errors import ConfigError, NoEffectError
from fednas_flwr.client.making import make_client
from fednas_flwr.data import features
from fednas_flwr.data.features import Scattering, load_backbone, transform_of, transformed
from fednas_flwr.data.loaders import server_split
from fednas_flwr.data.prepared import make_data, make_server_data
from fednas_flwr.data.readers import data_settings
from fednas_flwr.data.records import Records, normalised
from fednas_flwr.data.summary import reading_notes, summary
from fednas_flwr.deploy.dry_run import estimate
from fednas_flwr.pipeline.beginning import SITE_PROPERTIES
from fednas_flwr.pipeline.feasible import check_run
from fednas_flwr.server.reply_checks import misfits
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.data_settings import Backbone as Settings
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

from ..data_sets import prepared, right_of, save_pixels
from ..refusals import refuses

TINY = "test_efficientnet"
HEADS = ("search_space=mlp_small", "search_space.channels=8", "search_space.num_cells=2")
HEADS += ("retrain.channels=8", "retrain.num_cells=2")


def named(weights, **more):
    return {"name": TINY, "weights": str(weights), "image_size": 32, **more}


def overrides(weights):
    return [f"dataset.backbone={{name: {TINY}, weights: '{weights}', image_size: 32}}"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", features.KINDS)
def test_features_depend_on_no_other_record_in_any_bit(weights, kind, channels):
    images = np.random.default_rng(0).integers(0, 256, (70, channels, 28, 28), np.uint8)
    backbone = load_backbone(Settings(**named(weights)))
    transform = (
        Scattering(images.shape[1:], scales=2, angles=8) if kind == "scattering" else backbone
    )
    features = transformed(some_records(images), transform).features
    for gone in (0, 1, 33, 63, 69):
        kept = [row for row in range(70) if row != gone]
        without = transformed(some_records(images[kept]), transform).features
        assert torch.equal(without, features[kept])


def some_records(images):
    ids = np.array([f"{row:032d}" for row in range(len(images))], "S32")
    return Records(torch.from_numpy(images), torch.zeros(len(images)).long(), ids, ("a", "b"))


def test_maps_are_of_the_last_stage_kept_in_half_and_mirrored_back(weights):
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 64, 64), np.uint8)
    settings = Settings(**named(weights, image_size=64, output="map"))
    for is_mirrored in (False, True):
        backbone = load_backbone(settings, is_mirrored=is_mirrored)
        told = ("backbone", TINY, "64", *(["mirrored"] if is_mirrored else []), "map", "0" * 64)
        kept = transformed(some_records(images), backbone, features.kept_as(told))
        x = torch.from_numpy(images).float() / 255
        expected = map_of(backbone, x)
        if is_mirrored:
            expected = (expected + map_of(backbone, x.flip(-1)).flip(-1)) / 2
        assert kept.features.dtype == torch.float16
        assert kept.features.shape[1:] == backbone.output_shape
        assert min(backbone.output_shape[1:]) > 1
        torch.testing.assert_close(kept.features.float(), expected, rtol=2e-3, atol=2e-3)
        alone = torch.cat([backbone(image[None]) for image in x])
        assert torch.equal(kept.features.float(), alone)  # what is exported sees what was kept
        assert torch.equal(normalised(kept.features, (0.0,), (1.0,)), alone)


def map_of(backbone, x):
    """Stage by stage; mean 0 and variance 1 over each record."""
    x = (x.expand(-1, 3, -1, -1) - backbone.mean) / backbone.std
    network = backbone.network
    x = network.blocks(network.bn1(network.conv_stem(x)))
    mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), correction=0, keepdim=True)
    return (x - mean) / std


def test_a_backbone_stays_as_it_is_and_reads_each_record_alone(weights):
    backbone = load_backbone(Settings(**named(weights)))
    images = torch.rand(4, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    together = backbone.train()(images)
    assert not backbone.training
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    alone = torch.cat([backbone(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[n], tensor) for n, tensor in backbone.state_dict().items())
    torch.testing.assert_close(together, features_of(backbone, images))
    length = pretrained.LENGTH * (8 / 9) ** 0.5  # the last stage has one place, and no deviation
    torch.testing.assert_close(together.norm(dim=1), torch.full((4,), length))
    mirrored = load_backbone(Settings(**named(weights)), is_mirrored=True)
    features = mirrored(images)
    torch.testing.assert_close(features, (together + backbone(images.flip(3))) / 2)
    torch.testing.assert_close(features, mirrored(images.flip(3)))


def features_of(backbone, images):
    """Stage by stage: moments over the places of the last four, then what is pooled."""
    parts, x = [], (images.expand(-1, 3, -1, -1) - backbone.mean) / backbone.std
    network = backbone.network
    x = network.bn1(network.conv_stem(functional.interpolate(x, (32, 32), mode="bilinear")))
    for index, stage in enumerate(network.blocks):
        x = stage(x)
        if index >= len(network.blocks) - 4:
            parts += [x.mean((2, 3)), (x.var((2, 3), correction=0) + 1e-6).sqrt()]
    parts.append(network.global_pool(network.bn2(network.conv_head(x))))
    centred = [part - part.mean(1, keepdim=True) for part in parts]
    normed = [part / part.norm(dim=1, keepdim=True).clamp(1e-4) for part in centred]
    return torch.cat(normed, 1) * pretrained.LENGTH / 3


@pytest.mark.parametrize(
    ("name", "stages", "width"),
    [
        ("regnety_002", 5, 368 + 2 * (24 + 56 + 152 + 368)),
        ("torchvision/vit_b_16", 12, 768 + 8 * 768),
        ("swin_tiny_patch4_window7_224", 4, 768 + 2 * (96 + 192 + 384 + 768)),
        ("dla46_c", 7, 256 + 2 * (64 + 64 + 128 + 256)),
        ("caformer_s18", 4, 512 + 2 * (64 + 128 + 320 + 512)),
        ("xcit_nano_12_p16_224", 12, 128 + 8 * 128),
    ],
)
def test_networks_of_every_build_have_stages_and_moments_of_their_channels(name, stages, width):
    backbone = pretrained.Frozen(name, None)
    assert len(backbone.stages()) == stages
    assert backbone.output_shape == (width,)


def test_threads_share_a_backbone(weights):
    backbone = load_backbone(Settings(**named(weights)))
    images = torch.rand(6, 1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    alone = [backbone(image) for image in images]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(backbone, images), alone))


def test_what_a_check_without_memory_built_computes_later(weights):
    pretrained.forget_frozen()
    with torch.device("meta"):
        backbone = load_backbone(Settings(**named(weights)))
    assert backbone(torch.rand(1, 3, 9, 9)).isfinite().all()


def test_prepared_features_are_those_of_the_raw_images_and_of_the_weights(tmp_path, weights):
    settings = {"cache": tmp_path, "name": "digits", "limit_train": 70, "limit_test": 5}
    plain, made = prepared(**settings), prepared(**settings, backbone=named(weights))
    backbone = load_backbone(Settings(**named(weights)))
    assert made.input_shape == backbone.output_shape
    expected = backbone(plain.train.features / 255)
    torch.testing.assert_close(made.train.features, expected, rtol=1e-4, atol=1e-4)
    assert made.train.ids.tolist() == plain.train.ids.tolist()
    assert (made.mean, made.std, made.uses_own_statistics) == ((0.0,), (1.0,), False)
    (note,) = reading_notes(made)
    assert note.startswith("backbone features: ")
    state = load_file(weights)
    state["conv_stem.weight"] *= 2
    save_file(state, tmp_path / "other.safetensors")
    other = prepared(**settings, backbone=named(tmp_path / "other.safetensors"))
    assert other.transform[:3] == made.transform[:3] == ("backbone", TINY, "32")
    assert other.transform != made.transform
    maps = prepared(**settings, backbone=named(weights, image_size=64, output="map"))
    assert maps.transform[2:4] == ("64", "map")
    assert maps.train.features.dtype == torch.float16
    assert not torch.equal(other.train.features, made.train.features)


def test_encoded_images_are_read_at_the_backbones_size(tmp_path, weights):
    rng = np.random.default_rng(0)
    for i in range(12):
        pixels = rng.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)
        save_pixels(pixels, tmp_path / "data" / "ab"[i % 2] / f"{i}.png")
    place = {"cache": tmp_path / "cache", "root": tmp_path / "data", "server_test": False}
    made = prepared("image_folder", **place, backbone=named(weights))
    assert made.inputs.shape == (3, 32, 32)
    dataset = data_settings("image_folder", {"cache": "none", "backbone": named(weights)})
    assert dataset.declared["image_size"]
    declared = transform_of(dataset)
    assert made.transform == declared
    pretrained.forget_frozen()
    mirrored = prepared("image_folder", **place, backbone=named(weights), flip=True)
    assert pretrained._loaded.cache_info().currsize == 1  # two networks need twice the memory
    assert mirrored.transform == (*declared[:3], "mirrored", declared[3])
    assert not torch.equal(mirrored.train.features, made.train.features)


def test_sites_with_other_weights_do_not_join(weights, tmp_path):
    made = prepared("digits", cache=tmp_path, limit_train=70, backbone=named(weights))
    own = {name: [] for name in SITE_PROPERTIES} | {"transform": list(made.transform)}
    other = own | {"transform": [*made.transform[:3], "0" * 64]}
    unfit = misfits({0: own, 1: other, 2: own}, SITE_PROPERTIES)
    assert list(unfit) == [1]
    assert "scattering or backbone" in unfit[1]


def test_a_run_without_the_backbone_of_its_sites_is_refused(compose_config, weights):
    config = compose_config("dataset.server_test=false")
    names = {"class_names": ["a", "b"], "multi_label": False, "mean": [0.0], "std": [1.0]}
    names["target"] = []
    shapes = {"input_shape": [8], "image_shape": [3, 8, 8], "schema": []}
    told = ["backbone", TINY, "32", "0" * 64]
    with pytest.raises(ConfigError, match="its sites .*backbone"):
        make_server_data(config, {**names, **shapes, "transform": told})
    shared = compose_config("dataset.server_test=false", *overrides(weights))
    own = list(transform_of(shared.dataset))
    assert make_server_data(shared, {**names, **shapes, "transform": own}).inputs.shape == (3, 8, 8)
    with pytest.raises(ConfigError, match="its sites .*backbone"):
        make_server_data(shared, {**names, **shapes, "transform": told})


def test_the_servers_test_set_has_maps_as_its_sites_do(compose_config, weights):
    own = [text.replace("32}", "64, output: map}") for text in overrides(weights)]
    config = compose_config(*own, "dataset.server_test=true")
    shape = load_backbone(config.dataset.transform).output_shape
    told = {"input_shape": list(shape), "image_shape": [3, 8, 8], "schema": [], "target": []}
    told |= {"class_names": ["0", "1", "2"], "multi_label": False, "mean": [0.0], "std": [1.0]}
    made = make_server_data(config, told | {"transform": list(transform_of(config.dataset))})
    assert made.server_test.features.dtype == made.train.features.dtype == torch.float16


def test_a_named_backbone_brings_its_search_space_and_replaces_scattering(weights):
    for name in ("recommended", "recommended_private"):
        chosen = [f"experiment=search/{name}", *overrides(weights)]
        with pytest.warns(match="scattering") if "private" in name else nullcontext():
            config = parse_config(compose_tree(chosen), user=user_settings(chosen))
        assert config.search_space.name == "mlp"
        assert isinstance(config.dataset.transform, Settings)
    maps = compose_tree(["dataset.backbone.name=a", "dataset.backbone.output=map"])
    assert maps["search_space"]["name"] == "nasbench201"
    assert compose_tree([*overrides(weights), "search_space=mlp"])["search_space"]["num_cells"] == 3
    assert compose_tree(["dataset.backbone=null"])["search_space"]["name"] == "nasbench201"
    for setting in ("dataset.cutout=2", "dataset.scattering={scales: 1, angles: 2}"):
        typed = [*overrides(weights), setting]
        with pytest.raises(NoEffectError, match="no effect with dataset.backbone="):
            parse_config(compose_tree(typed), user=user_settings(typed))


def test_networks_whose_last_stage_has_no_places_have_no_map():
    with pytest.raises(ConfigError, match="vit_b_16 does not have a last stage with rows"):
        pretrained.Frozen("torchvision/vit_b_16", None, is_map=True)


def test_tables_have_no_backbone(tmp_path, weights):
    np.savez(tmp_path / "rows.npz", x_train=np.random.rand(30, 4), y_train=np.arange(30) % 2)
    place = {"cache": tmp_path, "root": tmp_path / "rows.npz", "server_test": False}
    with pytest.raises(ConfigError, match="needs images, but the records have the shape"):
        prepared("npz", **place, backbone=named(weights))


def test_few_images_are_told_that_a_backbone_would_help(tmp_path, weights):
    def lines(**given):
        data = prepared("digits", cache=tmp_path, limit_train=70, **given)
        fractions = {"train": 0.5, "validation": 0.4, "test": 0.1}
        return "\n".join(
            summary(data, [np.arange(70)], ["a"], {"key": b"k", "fractions": fractions})
        )

    assert "suggestion: dataset.backbone.name=" in lines()
    assert "suggestion: dataset.backbone" not in lines(backbone=named(weights))


@pytest.mark.run
def test_an_exported_model_takes_raw_images_and_holds_its_backbone(
    compose_config, made_data, tmp_path, weights
):
    """In ONNX, too, which the export compares with torch; and the weights' file may be gone."""
    gone = tmp_path / "gone.safetensors"
    gone.write_bytes(weights.read_bytes())
    own = (*HEADS, "search_space.skip=linear", "dataset.flip=true", *overrides(gone))
    result = run(compose_config(*own, f"run_dir={tmp_path / 'run'}"))
    gone.unlink()
    pretrained.forget_frozen()
    central = result.scores["central"]
    model = load(result.folder)
    assert right_of(model, made_data).mean() == pytest.approx(central["accuracy"])
    assert isinstance(model.transform, pretrained.Frozen)
    assert model.transform.is_mirrored
    for event in map(json.loads, (result.folder / "events.jsonl").read_text().splitlines()):
        if event["event"] == "round":
            assert event["bytes_sent"] < 1e6  # frozen weights never travel
    path = result.folder / "model.safetensors"
    state = load_file(path)
    name = "transform.network.conv_stem.weight"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({**state, name: state[name] + 1}, path, metadata=metadata)
    refuses("holds another backbone", load, result.folder)


@pytest.mark.run
def test_cells_are_searched_on_maps_and_the_exported_model_takes_raw_images(
    compose_config, made_data, tmp_path, weights
):
    own = [text.replace("32}", "64, output: map}") for text in overrides(weights)]
    cells = ("search_space.channels=4", "search_space.num_cells=1", "retrain.channels=4")
    result = run(compose_config(*own, *cells, "dataset.flip=true", f"run_dir={tmp_path / 'run'}"))
    assert result.genotype is not None
    right = right_of(load(result.folder), made_data)
    assert right.mean() == pytest.approx(result.scores["central"]["accuracy"])


@pytest.mark.run
def test_a_private_search_on_features_runs(compose_config, tmp_path, weights):
    config = compose_config(
        *("algorithm=dp_fnas", "privacy=dp", *HEADS, "search_space.norm=group"),
        *("retrain.norm=group", "privacy.epsilon=50", "search_space.skip=linear", "clients=2"),
        *(*overrides(weights), f"run_dir={tmp_path / 'run'}"),
    )
    result = run(config)
    assert result.genotype is not None
    assert load(result.folder).network.skip.weight.any()


@pytest.mark.run
def test_a_dry_run_tells_the_time_of_features(compose_config, tmp_path, weights):
    first = estimate(compose_config(*HEADS, *overrides(weights), f"run_dir={tmp_path}")).lines()[0]
    assert first.startswith("backbone features: ")
    assert "s per 1,000 images" in first


@pytest.mark.run
@pytest.mark.usefixtures("few_draws")
def test_fine_tuning_begins_with_the_weights_and_is_a_candidate(compose_config, tmp_path, weights):
    given = [f"algorithm.network={TINY}", f"algorithm.weights={weights}", "algorithm.image_size=32"]
    config = compose_config("algorithm=fedavg", *given, f"run_dir={tmp_path / 'run'}")
    check_run(config)
    result = run(replace(config, retrain=replace(config.retrain, rounds=1)))
    stem = load_file(result.folder / "model.safetensors")["network.conv_stem.weight"]
    start = load_file(weights)["conv_stem.weight"]
    assert 0 < (stem - start).norm() < start.norm() / 2
    images = np.full((2, 3, 8, 8), 200, dtype=np.uint8)
    assert load(result.folder).predict(images).probabilities.shape == (2, 3)
    best = ("evaluation.deliver=best", "evaluation.baselines=1", *HEADS)
    searched = run(compose_config(*best, *overrides(weights), f"run_dir={tmp_path / 'best'}"))
    names = {path.name for path in (searched.folder / "baselines").iterdir()}
    assert {"found", "found_skip", "linear", "fine_tuned"} <= names


def test_fine_tuning_is_not_private_and_its_file_is_read_first(compose_config, tmp_path):
    given = ["algorithm=fedavg", f"algorithm.network={TINY}", "algorithm.weights=nothing.pth"]
    with pytest.raises(ConfigError, match="have batch normalisation; set dataset.backbone.name="):
        compose_config(*given, "privacy=dp")
    with pytest.raises(ConfigError, match=r"nothing\.pth .*cannot be read"):
        check_run(compose_config(*given, f"run_dir={tmp_path}"))
    assert make_data(compose_config())[0].transform == ()


# --- scattering


SHAPES = [((1, 28, 28), 2, 8), ((3, 32, 32), 2, 8), ((2, 9, 14), 1, 3), ((1, 20, 17), 3, 4)]


@pytest.mark.parametrize(("shape", "scales", "angles"), SHAPES)
def test_coefficients_are_kymatios(shape, scales, angles):
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    expected = ScatteringTorch2D(J=scales, shape=shape[1:], L=angles)(images)
    transform = Scattering(shape, scales=scales, angles=angles)
    found = transform.coefficients(images)
    assert found.shape[2] == features.num_paths(scales, angles)
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

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fednas_flwr.data.npz import records_from_npz
from fednas_flwr.data.readers import data_settings

from ..data_sets import read
from ..refusals import refuses

ARRAYS = data_settings("npz", {"cache": "none"})
LABELS = np.array([0, 2, 1, 2])


def save(path, **arrays):
    np.savez(path / "data.npz", **arrays)
    return path / "data.npz"


def jpegs(count, *, size=(8, 8)):
    rng = np.random.default_rng(0)
    encoded, decoded = [], []
    for _ in range(count):
        smooth = np.kron(rng.integers(0, 256, (2, 2, 3), np.uint8), np.ones((4, 4, 1), np.uint8))
        buffer = io.BytesIO()
        Image.fromarray(smooth).resize(size).save(buffer, "JPEG", quality=95)
        encoded.append(buffer.getvalue())
        decoded.append(np.asarray(Image.open(buffer)))
    return encoded, np.stack(decoded)


def joined(encoded):
    offsets = np.cumsum([0, *map(len, encoded)])
    return {"bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8), "off": offsets}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_plain_images_in_every_layout(tmp_path, layout):
    channels = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 6), np.uint8)
    expected = channels[:, :1] if layout == "NHW" else channels
    x = {"NHWC": channels.transpose(0, 2, 3, 1), "NCHW": channels, "NHW": channels[:, 0]}[layout]
    path = save(tmp_path, x_train=x, y_train=LABELS, x_test=x[:2], y_test=LABELS[:2])
    train, test = read("npz", path)
    assert train.features.tolist() == expected.tolist()
    assert train.labels.tolist() == [0, 2, 1, 2]
    assert train.class_names == test.class_names == ("0", "1", "2")
    assert test.ids.tolist() == train.ids[:2].tolist()


def test_a_table_of_numbers(tmp_path):
    x = np.array([[1.5, np.nan], [2, 3], [4, 5], [6, 7]])
    train, test = read("npz", save(tmp_path, x_train=x, y_train=LABELS))
    assert (test, train.features.dtype) == (None, torch.float32)
    assert (train.feature_names, train.num_numeric) == (("x0", "x1"), 2)


@pytest.mark.parametrize("part", ["test", "val"])
def test_encoded_images(tmp_path, part):
    encoded, decoded = jpegs(4)
    arrays = {f"train_{k}": v for k, v in joined(encoded).items()}
    arrays |= {f"{part}_{k}": v for k, v in joined(encoded[:2]).items()}
    path = save(tmp_path, y_train=LABELS, **{f"y_{part}": LABELS[:2]}, **arrays)
    train, test = read("npz", path, class_names=("x", "y", "z"))
    assert train.features.numpy().tolist() == decoded.transpose(0, 3, 1, 2).tolist()
    (tmp_path / "plain").mkdir()
    plain = save(tmp_path / "plain", x_train=decoded, y_train=LABELS)
    assert train.ids.tolist() == read("npz", plain)[0].ids.tolist()
    assert test.labels.tolist() == [0, 2]
    assert train.class_names == ("x", "y", "z")
    gray, _ = read("npz", path, image_size=4, channels=1, class_names=())
    assert gray.features.shape == (4, 1, 4, 4)
    assert gray.ids.tolist() == train.ids.tolist()


GOOD = {"x_train": np.zeros((4, 5, 5), np.uint8), "y_train": LABELS}
BOTH_PARTS = {f"{k}_{part}": GOOD[f"{k}_train"] for k in "xy" for part in ("test", "val")}
ENCODED = {"train_bytes": np.zeros(9, np.uint8), "y_train": LABELS}


UNUSABLE = [
    ({"features": LABELS, "labels": LABELS}, {}, "holds features, y_train: a part needs"),
    (GOOD | {"x_test": LABELS}, {}, "x_test, x_train, y_train: .* needs x_test and y_test"),
    (GOOD | {"y_val": LABELS}, {}, "x_train, y_train, y_val: .* val_bytes, val_off and y_val"),
    (GOOD | ENCODED, {}, "holds train_bytes, x_train, y_train: a part needs"),
    (ENCODED, {}, "holds train_bytes, y_train: a part needs"),
    (GOOD, {"image_size": 4}, "dataset.image_size=4 has no effect on .* plain arrays"),
    (GOOD, {"channels": 1}, "dataset.channels=1 has no effect on .* plain arrays"),
    (GOOD | {"y_train": LABELS[:3]}, {}, "4 records and 3 labels"),
    (GOOD | {"y_train": LABELS - 1}, {}, "expected the class numbers"),
    (GOOD | {"y_train": LABELS * 0.5}, {}, "y_train .* float64 .* class numbers"),
    (GOOD, {"class_names": ("a", "b")}, "the label 2, but dataset.class_names names 2"),
    (GOOD | {"x_train": np.full((4, 5, 5), 0.5j)}, {}, "complex128 of shape .* uint8 images"),
    (GOOD | {"x_train": np.zeros((4, 3, 5, 3), np.uint8)}, {}, "expected uint8 images"),
    (GOOD | {"x_train": np.full((4, 2), np.inf)}, {}, "infinite"),
    (GOOD | {"x_train": np.array([{}] * 4)}, {}, "plain arrays"),
    (ENCODED | {"train_off": np.array([0, 5, 3, 9, 9])}, {}, "do not cut"),
    (ENCODED | {"train_off": np.array([0, 2, 4, 6, 10])}, {}, "do not cut"),
    (ENCODED | {"train_off": np.array([0, 2, 4, 6, 9])}, {}, "4 of 4 files .* image 0 of"),
]


@pytest.mark.parametrize(("arrays", "settings", "message"), UNUSABLE)
def test_files_that_cannot_be_used(tmp_path, arrays, settings, message):
    refuses(message, read, "npz", save(tmp_path, **arrays), **settings)


def test_of_two_further_parts_the_test_set_is_read(tmp_path):
    train, test = read("npz", save(tmp_path, **GOOD | BOTH_PARTS))
    assert len(test) == 4
    assert train.notes == (f"x_val, y_val of {tmp_path / 'data.npz'} are not read",)


def test_no_npz_file(tmp_path):
    (tmp_path / "data.npz").write_bytes(b"nothing of the kind")
    np.save(tmp_path / "single.npy", LABELS)
    for name, words in (
        ("data.npz", "cannot be read as an .npz"),
        ("single.npy", "single.npy holds x: a part needs x_train and y_train"),
        ("data.npz.xz", "unpack it with xz -dk"),
    ):
        refuses(words, read, "npz", tmp_path / name)


@pytest.mark.parametrize("label", [4, 3_000_000_000, 2**63 + 7])
def test_a_label_beyond_the_records_takes_no_memory(tmp_path, label):
    x = np.zeros((4, 5, 5), np.uint8)
    path = save(tmp_path, x_train=x, y_train=np.array([0, 1, 2, label], np.uint64))
    refuses("class numbers 0, 1, ...", read, "npz", path)
    names = {"class_names": tuple("abcde")}
    if label == 4:
        assert read("npz", path, **names)[0].labels.tolist() == [0, 1, 2, 4]
    else:
        refuses("names 5|class numbers", read, "npz", path, **names)


UNFIT_LABELS = [
    ([[0, 2], [1, 0]], None, "int64 of shape .2, 2. from 0 to 2: expected"),
    ([[0, 1], [1, 0]], [0, 1], "expected one class per record, or the same labels, in all"),
    ([[0, 1], [1, 0]], [[0, 1, 1], [1, 0, 0]], "or the same labels, in all parts"),
    ([[0.5, 1], [1, 0]], None, r"or \[N, L\] of 0 and 1 for several labels"),
]


@pytest.mark.parametrize(("train", "test", "message"), UNFIT_LABELS)
def test_several_labels_that_do_not_fit_are_refused(train, test, message):
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    arrays = {"x_train": x, "y_train": np.array(train)}
    if test is not None:
        arrays |= {"x_test": x, "y_test": np.array(test)}
    refuses(message, records_from_npz, ARRAYS, arrays, origin="made")


def test_marks_of_any_kind_are_several_labels():
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    for kind in (bool, np.uint8, np.int64):
        y = np.array([[1, 0, 1], [0, 0, 0]], dtype=kind)
        records, _ = records_from_npz(ARRAYS, {"x_train": x, "y_train": y}, origin="made")
        assert records.labels.tolist() == [[1, 0, 1], [0, 0, 0]]
        assert records.class_names == ("0", "1", "2")

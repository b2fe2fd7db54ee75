"""Data sets by their names and the few settings that a test is about."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fednas_flwr.data.datasets import prepare
from fednas_flwr.data.readers import DATA_SETS, data_settings
from fednas_flwr.data.records import Records, record_ids


def read(name, path, **given):
    """What the reader of a data set makes of a file or folder."""
    return DATA_SETS[name].read(data_settings(name, {"cache": "none", **given}), path)


def prepared(name, *, sites=False, **given):
    """A data set as clients and server get it."""
    texts = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    return prepare(data_settings(name, texts), sites=sites)


def colour_digits():
    """The digits in colours, [N, 8, 8, 3], and which they are."""
    records, _ = read("digits", Path())
    return records.features.numpy().transpose(0, 2, 3, 1).repeat(3, axis=3), records.labels.numpy()


def save_pixels(pixels, path):
    """Save an image, in a folder that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def digit_files():
    """Yield the digits as pixels of two sizes, some in colours, and which they are."""
    records, _ = read("digits", Path())
    for i in range(len(records)):
        image = Image.fromarray(records.features[i, 0].numpy())
        image = image.resize((12, 10)) if i % 2 else image.convert("RGB")
        yield np.asarray(image), int(records.labels[i])


def right_of(model, file):
    """Of which test images of an npz file a model's label is right."""
    with np.load(file) as images:
        names = [model.class_names[label] for label in images["y_test"]]
        return np.array(model.predict(images["x_test"]).labels) == names


def records_of(features, labels=None, *, class_names=None, **more):
    """Records of arrays, each with an id of its own; all of one class unless labels are given."""
    labels = np.zeros(len(features)) if labels is None else labels
    names = class_names or tuple(map(str, range(int(max(labels)) + 1)))
    ids = record_ids(str(row).encode() for row in range(len(features)))
    arrays = torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64))
    return Records(*arrays, ids, names, **more)

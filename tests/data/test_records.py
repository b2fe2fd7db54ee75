import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.records import (
    Column,
    Inputs,
    Records,
    check_alike,
    encode_labels,
    join_sites,
    record_ids,
    select_records,
)


def rows(*, classes=("a", "b"), width=2, names=None, count=3) -> Records:
    features = torch.arange(count * width, dtype=torch.float32).view(count, width)
    return Records(
        features=features,
        labels=torch.zeros(count, dtype=torch.int64),
        ids=record_ids(row.tobytes() for row in features.numpy()),
        class_names=tuple(classes),
        columns={"city": np.array(["x"] * count)},
        schema=tuple(Column(name) for name in names or [f"f{i}" for i in range(width)]),
    )


def test_an_id_is_the_hash_of_one_record_alone():
    ids = record_ids([b"one", b"two", b"one"])
    assert ids.dtype == np.dtype("S32")
    assert ids[0] == ids[2] != ids[1]
    assert record_ids([b"one"])[0] == ids[0]
    # blake2b with a digest of 16 bytes of the empty message, as coreutils' b2sum -l 128 prints it
    assert record_ids([b""])[0] == b"cae66941d9efbd404e4d88758ea67670"


def test_unequal_parts_are_refused():
    with pytest.raises(ValueError, match="one entry of each kind"):
        Records(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), record_ids([b"a"]), ("a",))


def test_select_keeps_every_part_in_step(images):
    chosen = np.array([5, 2, 9])
    part = select_records(images, chosen)
    assert torch.equal(part.features, images.features[[5, 2, 9]])
    assert torch.equal(part.labels, images.labels[[5, 2, 9]])
    assert part.ids.tolist() == images.ids[chosen].tolist()
    assert part.columns["hospital"].tolist() == images.columns["hospital"][chosen].tolist()
    assert part.class_names == images.class_names


def test_join_sites_adds_the_site():
    joined = join_sites({"paris": rows(count=2), "oslo": rows(count=3)})
    assert joined.columns["site"].tolist() == ["paris"] * 2 + ["oslo"] * 3
    assert joined.columns["city"].tolist() == ["x"] * 5
    assert len(joined) == 5
    assert joined.num_numeric == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            rows(classes=("a", "c")),
            "site oslo and site paris do .* same classes: a, b, and a, c",
        ),
        (rows(names=("f0", "g")), "same feature columns .* f1, g"),
        (
            rows(width=3, names=("f0", "f1")),
            r"records, torch.float32 \(2,\) and torch.float32 \(3,\)",
        ),
    ],
)
def test_join_sites_refuses_what_does_not_fit(other, message):
    with pytest.raises(ConfigError, match=message):
        join_sites({"oslo": rows(), "paris": other})


def test_encode_labels_names_the_unknown():
    assert encode_labels(np.array(["b", "a"]), ("a", "b"), where="it").tolist() == [1, 0]
    with pytest.raises(ConfigError, match="x.csv has the label c, which is not in"):
        encode_labels(np.array(["b", "c"]), ("a", "b"), where="x.csv")


@pytest.mark.parametrize("named_first", [True, False])
def test_as_many_features_without_names_are_not_the_same_columns(named_first):
    """Their order is anybody's guess."""
    pair = [rows(), replace(rows(), schema=())]
    one, other = pair if named_first else reversed(pair)
    with pytest.raises(ConfigError, match="do not have the same feature columns"):
        check_alike("the clients' records", one, "the server's test set", other)


def test_the_inputs_of_a_model_that_was_written_before_a_key_existed_are_read():
    inputs = Inputs((2,), (Column("age"), Column("size")), (0.0, 0.0), (1.0, 1.0), ("a", "b"))
    values = json.loads(inputs.to_json())
    for name in ("label", "multi_label", "label_separator", "intensity", "scattering"):
        del values[name]
    assert Inputs.from_json(json.dumps(values)) == inputs
    del values["mean"]
    with pytest.raises(ConfigError, match=r"inputs\.mean is missing"):
        Inputs.from_json(json.dumps(values))

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.datasets import find_source, fingerprint, load_sites
from fednas_flwr.data.readers import data_settings
from fednas_flwr.data.records import RecordsPair

from ..data_sets import read


def sites(name: str, root: Path) -> RecordsPair:
    settings = data_settings(name, {"cache": "none"})
    return load_sites(settings, root, read=lambda path: read(name, path))


def test_sites_are_sorted_by_name(tmp_path: Path):
    (tmp_path / "oslo.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "bern.csv").write_text("a,y\n3,0\n4,1\n5,1\n")
    (tmp_path / "readme.txt").write_text("no site")
    records, _ = sites("csv", tmp_path)
    assert records.columns["site"].tolist() == ["bern"] * 3 + ["oslo"] * 2
    assert records.features[:, 0].tolist() == [3, 4, 5, 1, 2]


def test_a_folder_of_images_per_site(tmp_path: Path):
    for i, site in enumerate(("b", "a")):
        for kind in ("cat", "dog"):
            (tmp_path / site / kind).mkdir(parents=True)
            Image.new("L", (4, 4), i).save(tmp_path / site / kind / "1.png")

    records, _ = sites("image_folder", tmp_path)
    assert records.columns["site"].tolist() == ["a", "a", "b", "b"]
    assert records.labels.tolist() == [0, 1, 0, 1]
    assert records.features[:, 0, 0, 0].tolist() == [1, 1, 0, 0]
    (tmp_path / "c" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "c" / "test" / "cat").mkdir(parents=True)
    for part in ("train", "test"):
        Image.new("L", (4, 4)).save(tmp_path / "c" / part / "cat" / "1.png")
    with pytest.raises(ConfigError, match="the site .*c has a test part of its own"):
        sites("image_folder", tmp_path)


def test_sites_that_do_not_exist_or_fit(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no tables of sites"):
        sites("csv", tmp_path)
    with pytest.raises(ConfigError, match="partition=sites does not fit dataset.name=digits"):
        sites("digits", tmp_path)
    (tmp_path / "oslo.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "oslo.tsv").write_text("a\ty\n1\t0\n2\t1\n")
    with pytest.raises(ConfigError, match="same name"):
        sites("csv", tmp_path)


def find(name: str, root: Path | None, *, sites: bool = False) -> Path:
    place = None if root is None else str(root)
    return find_source(data_settings(name, {"cache": "none", "root": place}), sites=sites)


def test_a_missing_root_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dataset=npz needs .* dataset.root="):
        find("npz", None)
    with pytest.raises(ConfigError, match="is not a file"):
        find("npz", tmp_path)
    with pytest.raises(ConfigError, match="is not a file or folder"):
        find("csv", tmp_path / "x")
    assert find("csv", tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="is not a folder"):
        find("npz", tmp_path / "x", sites=True)
    with pytest.raises(
        ConfigError, match=r"FashionMNIST/raw.*dataset.root=.*dataset.download=true"
    ):
        find("fashion_mnist", tmp_path)


def test_the_fingerprint_changes_with_the_files(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    first = fingerprint("image_folder", tmp_path)
    assert fingerprint("image_folder", tmp_path) == first
    np.save(tmp_path / "a.npy", np.zeros(4))
    assert fingerprint("image_folder", tmp_path) != first
    assert fingerprint("npz", tmp_path / "a.npy")[0][1] == (tmp_path / "a.npy").stat().st_size

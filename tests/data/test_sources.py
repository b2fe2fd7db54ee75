from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednas_flwr.data.images import load_image_folder
from fednas_flwr.data.sources import find_source, fingerprint, load_sites
from fednas_flwr.data.tables import load_csv
from fednas_flwr.errors import ConfigError


def test_sites_are_sorted_by_name(tmp_path: Path):
    (tmp_path / "oslo.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "bern.csv").write_text("a,y\n3,0\n4,1\n5,1\n")
    (tmp_path / "readme.txt").write_text("no site")
    records = load_sites(tmp_path, name="csv", read=load_csv)
    assert records.columns["site"].tolist() == ["bern"] * 3 + ["oslo"] * 2
    assert records.features[:, 0].tolist() == [3, 4, 5, 1, 2]


def test_a_folder_of_images_per_site(tmp_path: Path):
    for i, site in enumerate(("b", "a")):
        for kind in ("cat", "dog"):
            (tmp_path / site / kind).mkdir(parents=True)
            Image.new("L", (4, 4), i).save(tmp_path / site / kind / "1.png")

    def read(path: Path):
        return load_image_folder(path, image_size=None, channels=None, class_names=())

    records = load_sites(tmp_path, name="image_folder", read=read)
    assert records.columns["site"].tolist() == ["a", "a", "b", "b"]
    assert records.labels.tolist() == [0, 1, 0, 1]
    assert records.features[:, 0, 0, 0].tolist() == [1, 1, 0, 0]
    (tmp_path / "c" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "c" / "test" / "cat").mkdir(parents=True)
    for part in ("train", "test"):
        Image.new("L", (4, 4)).save(tmp_path / "c" / part / "cat" / "1.png")
    with pytest.raises(ConfigError, match="the site .*c has a test part of its own"):
        load_sites(tmp_path, name="image_folder", read=read)


def test_sites_that_do_not_exist_or_fit(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no sites"):
        load_sites(tmp_path, name="csv", read=load_csv)
    with pytest.raises(ConfigError, match="partition=sites does not fit dataset.name=digits"):
        load_sites(tmp_path, name="digits", read=load_csv)
    (tmp_path / "oslo.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "bern.csv").write_text("a,y\n1,0\n2,0\n")
    with pytest.raises(ConfigError, match="dataset.class_names"):
        load_sites(tmp_path, name="csv", read=load_csv)
    (tmp_path / "bern.csv").write_text("a,b,y\n1,0,1\n2,0,0\n")
    with pytest.raises(ConfigError, match="same feature columns .*differ in b"):
        load_sites(tmp_path, name="csv", read=load_csv)
    (tmp_path / "bern.csv").rename(tmp_path / "oslo.csv.gz")
    with pytest.raises(ConfigError, match="same name|cannot be read"):
        load_sites(tmp_path, name="csv", read=load_csv)


def test_a_missing_root_is_one_sentence(tmp_path: Path):
    choice = {"download": False, "sites": False}
    with pytest.raises(ConfigError, match=r"dataset=npz needs .* dataset.root="):
        find_source("npz", root=None, **choice)
    with pytest.raises(ConfigError, match="is not a file"):
        find_source("npz", root=tmp_path, **choice)
    with pytest.raises(ConfigError, match="is not a file or folder"):
        find_source("csv", root=tmp_path / "x", **choice)
    assert find_source("csv", root=tmp_path, **choice) == tmp_path
    with pytest.raises(ConfigError, match="is not a folder"):
        find_source("npz", root=tmp_path / "x", download=False, sites=True)
    with pytest.raises(
        ConfigError, match=r"FashionMNIST/raw.*dataset.root=.*dataset.download=true"
    ):
        find_source("fashion_mnist", root=tmp_path, **choice)


def test_the_fingerprint_changes_with_the_files(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    first = fingerprint("image_folder", tmp_path)
    assert fingerprint("image_folder", tmp_path) == first
    np.save(tmp_path / "a.npy", np.zeros(4))
    assert fingerprint("image_folder", tmp_path) != first
    assert fingerprint("npz", tmp_path / "a.npy")[0][1] == (tmp_path / "a.npy").stat().st_size

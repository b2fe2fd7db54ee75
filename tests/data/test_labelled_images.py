"""Images whose labels stand in a table, as chest X-rays come."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fednas_flwr import compose, load, run
from fednas_flwr.data.datasets import prepare
from fednas_flwr.data.raw import read_raw
from fednas_flwr.data.readers import DATA_SETS, site_dataset

from ..data_sets import prepared, read, save_pixels
from ..refusals import refuses

ROWS = {  # image -> findings, patient
    "images_1/a.png": ("Mass|Nodule", "p1"),
    "images_1/b.png": ("", "p1"),
    "images_2/c.png": ("Nodule", "p2"),
    "images_2/d.png": ("Mass", "p3"),
}


def picture(path, value):
    save_pixels(np.full((8, 8), value, np.uint8), path)


read_labelled = partial(read, "labelled_images")


def written(root, lines, *, name="labels.csv"):
    """Four images of different shades, and the table of their labels."""
    for value, image in enumerate(ROWS):
        picture(root / image, 10 * value)
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return root


def by_findings(root):
    rows = [f"{Path(image).name},{person},{found}" for image, (found, person) in ROWS.items()]
    return written(root, ["Image Index,Patient ID,Finding Labels", *rows])


FINDINGS = {"labels_file": "labels.csv", "label_separator": "|"}


MAPPED = {"labels": ["Edema", "No Finding"]}
MAPPED["map"] = {"Edema": {"-1": 0}, "No Finding": {"-1": 0, "blank": 0}}


def shades(records):
    return records.features[:, 0, 0, 0].tolist()


def test_a_separator_gives_each_image_its_labels_and_its_patient(tmp_path):
    root = by_findings(tmp_path)
    picture(root / "images_2" / "extra.png", 99)
    train, test = read_labelled(root, **FINDINGS, label="Finding Labels", id_column="Patient ID")
    assert (test, train.class_names) == (None, ("Mass", "Nodule"))
    assert shades(train) == [0, 10, 20, 30]
    assert train.labels.tolist() == [[1, 1], [0, 0], [0, 1], [1, 0]]
    assert train.by_person
    assert train.ids[0] == train.ids[1] != train.ids[2]
    assert list(train.columns) == ["Patient ID"]
    assert "1 images that labels.csv does not name are left out" in train.notes


@pytest.mark.parametrize("given", [{}, {"decimal": "comma"}, {"thousands": "point"}], ids=str)
def test_numbers_to_predict_are_in_the_notation_of_their_file(tmp_path, given):
    root = written(tmp_path, ["path;g", "a.png;1.250,5", "b.png;2,5", "c.png;3,5"])
    train, _ = read_labelled(root, labels_file="labels.csv", task="regression", **given)
    assert train.labels.tolist() == [1250.5, 2.5, 3.5]
    assert (train.form.decimal, train.form.thousands) == ("comma", "point")


def test_numbers_of_a_test_part_and_of_a_site_are_read_as_in_training(tmp_path):
    how = {"labels_file": "labels.csv", "task": "regression"}
    for part, number in (("train", "1.250,5"), ("test", "1.250")):
        written(tmp_path / part, ["g\tpath", *(f"{number}\t{name}.png" for name in "abc")])
    train, test = read_labelled(tmp_path, **how)  # the last column names the images
    assert (train.labels.tolist(), test.labels.tolist()) == ([1250.5] * 3, [1250.0] * 3)
    written(tmp_path / "test", ["path\tg", *(f"{name}.png\t1.250" for name in "abc")])
    site = tmp_path / "site.yaml"
    how |= {"target_range": [0, 2], "image_size": 8, "channels": 1, "label": "g"}
    lines = [f"{key}: {value}" for key, value in how.items()]
    site.write_text("\n".join(["name: labelled_images", f"root: {tmp_path / 'test'}", *lines]))
    at_site = prepare(site_dataset(site, cache=str(tmp_path / "cache")))
    assert {*at_site.train.labels.tolist()} == {1.25}  # nothing is looked for in its rows
    assert read_raw(tmp_path / "test" / "labels.csv", at_site.inputs).labels.tolist() == [1.25] * 3


def test_sites_may_write_numbers_in_their_own_notation(tmp_path):
    how = {"labels_file": "labels.csv", "target_range": [0, 2000], "server_test": False}
    for site, lines in (("a", "p;g a;1.250 b;2,5 c;3,5"), ("b", "p,g a,1.250 b,2.5 c,3.5")):
        written(tmp_path / "sites" / site, lines.split())
    given = {"root": tmp_path / "sites", "cache": tmp_path / "cache", **how}
    data = prepared("labelled_images", sites=True, **given)
    assert data.train.labels.tolist() == [1250, 2.5, 3.5, 1.25, 2.5, 3.5]
    again = (read_raw(tmp_path / "sites" / s / "labels.csv", data.inputs).labels for s in "ab")
    assert torch.cat([*again]).tolist() == data.train.labels.tolist()


def test_columns_of_0_and_1_are_labels_and_one_column_is_a_class(tmp_path):
    lines = ["path;sex;mass;nodule;site", "images_2/c.png;f;0;1;x", "images_1/a.png;m;1;1;y"]
    root = written(tmp_path, lines)
    train, _ = read_labelled(root, labels_file="labels.csv", labels=["nodule", "mass"])
    assert shades(train) == [20, 0]  # in the order of the table
    assert (train.class_names, train.labels.tolist()) == (("nodule", "mass"), [[1, 0], [1, 1]])
    assert train.columns["site"].tolist() == ["x", "y"]
    one, _ = read_labelled(root, labels_file="labels.csv", label="sex", class_names=["m", "f"])
    assert one.labels.tolist() == [1, 0]
    assert not one.multi_label
    last, _ = read_labelled(root, labels_file="labels.csv")
    assert last.class_names == ("x", "y")


def test_a_broken_image_takes_its_row_with_it(tmp_path):
    root = by_findings(tmp_path)
    (root / "images_1" / "a.png").write_bytes(b"none")
    own = FINDINGS | {"id_column": "Patient ID"}
    refuses("1 of 4 files cannot be read as an image", read_labelled, root, **own)
    train, _ = read_labelled(root, **own, corrupt="skip")
    assert shades(train) == [10, 20, 30]
    assert train.labels.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert train.columns["Patient ID"].tolist() == ["p1", "p2", "p3"]


UNFIT_TABLES = [
    ("gone.png,p9,Mass", {}, "names 1 of 5 images that are not in"),
    ("a.png,p9,Mass", {}, "names the image a.png in more than one row"),
    ("", {"labels_file": "other.csv"}, r"other\.csv does not exist"),
    ("", {"labels_file": "../labels.csv"}, "expected the name of a file in dataset.root"),
    ("", {"label": "Finding"}, "Finding"),
    ("", {"label": "Image Index"}, "begins with the column Image Index"),
    ("", {"class_names": ["Mass", "Mess"]}, "has the label Nodule, which is not in"),
    ("", {"labels": ["Patient ID", "Finding Labels"]}, "dataset.label_separator has no effect"),
]


@pytest.mark.parametrize(("line", "settings", "sentence"), UNFIT_TABLES)
def test_a_table_that_does_not_fit_is_one_sentence(line, settings, sentence, tmp_path):
    root = by_findings(tmp_path)
    if line:
        with (root / "labels.csv").open("a") as file:
            file.write(f"{line}\n")
    assert "\n" not in refuses(sentence, read_labelled, root, **FINDINGS | settings)


def test_names_that_two_images_share_must_be_paths(tmp_path):
    root = by_findings(tmp_path)
    picture(root / "images_2" / "a.png", 77)
    refuses("share their names with others: a.png; give paths", read_labelled, root, **FINDINGS)
    text = (root / "labels.csv").read_text().replace("\na.png", "\nimages_2/a.png")
    (root / "labels.csv").write_text(text)
    train, _ = read_labelled(root, **FINDINGS)
    assert shades(train)[0] == 77
    lines = text.removeprefix("\ufeff").splitlines()
    text = "".join(",".join(line.split(",")[::-1]) + "\n" for line in lines)
    (root / "labels.csv").write_text(text)  # the column of images last
    turned, _ = read_labelled(root, label="Finding Labels", **FINDINGS)
    assert shades(turned) == shades(train)
    assert turned.labels.tolist() == train.labels.tolist()
    assert "labels.csv: column Image Index names the images" in turned.notes


def test_labels_that_are_also_names_of_images_do_not_name_them(tmp_path):
    for number in range(6):
        picture(tmp_path / f"{number}.png", 10 * number)
    sentence = "names 6 of 6 images that are not in"
    for head, row in (
        ("file,y", "{0}.PNG,{1}"),
        ("case,file,y", "{2},{0}.jpg,{1}"),
        ("y,file", "{1},{0}.jpg"),
    ):
        rows = [row.format(number, number % 2, 5 - number) for number in range(6)]
        (tmp_path / "labels.csv").write_text("\n".join([head, *rows]))
        refuses(sentence, read_labelled, tmp_path, labels_file="labels.csv", label="y")


@pytest.mark.parametrize("head", ["image,mask,y", "mask,image,y", "person,image,y"])
def test_the_column_that_names_images_is_found_beside_others(head, tmp_path):
    for number in range(4):
        picture(tmp_path / f"p{number}.png", 10 * number)
    cells = {"image": "p{0}", "mask": "p{0}_mask.png", "person": "{1}", "y": "{1}"}
    rows = [",".join(cells[name] for name in head.split(",")).format(n, n % 2) for n in range(4)]
    (tmp_path / "labels.csv").write_text("\n".join([head, *rows]))
    train, _ = read_labelled(tmp_path, labels_file="labels.csv", label="y")
    assert shades(train) == [0, 10, 20, 30]


def test_paths_may_be_absolute_and_their_signs_composed(tmp_path):
    for number in range(4):  # as macOS writes é
        picture(tmp_path / f"e\u0301{number}.png", 10 * number)
    names = ["\u00e90.png", tmp_path / "\u00e91.png", "e\u03012", tmp_path / "e\u03013.png"]
    rows = [f"{name},{n % 2}" for n, name in enumerate(names)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,y", *rows]))
    train, _ = read_labelled(tmp_path, labels_file="labels.csv", label="y")
    assert shades(train) == [0, 10, 20, 30]


def test_a_changed_table_is_read_again(tmp_path):
    root = by_findings(tmp_path / "data")
    terms = {"cache": tmp_path / "cache", "name": "labelled_images", "root": root}
    terms |= FINDINGS | {"server_test": False}
    assert prepared(**terms).train.labels[1].tolist() == [0, 0]
    text = (root / "labels.csv").read_text().replace("b.png,p1,", "b.png,p1,Mass")
    (root / "labels.csv").write_text(text)
    assert prepared(**terms).train.labels[1].tolist() == [1, 0]


def test_images_in_a_folder_called_train_are_read_beside_other_images(tmp_path):
    for i in range(4):
        picture(tmp_path / "train" / f"{i}.png", 10 * i)
    picture(tmp_path / "unlabelled" / "x.png", 99)
    lines = ["Path,y", *(f"{i}.png,{i % 2}" for i in range(4)), ""]
    (tmp_path / "train" / "labels.csv").write_text("\n".join(lines))
    records, _ = read_labelled(tmp_path, labels_file="labels.csv")
    assert records.labels.tolist() == [0, 1, 0, 1]


def test_a_model_reads_files_without_the_label_that_it_has_renamed(tmp_path):
    lines = [f"{image},{i % 2}" for i, image in enumerate(ROWS)]
    root = written(tmp_path, ["Path,Finding", *lines])
    of = {"labels_file": "labels.csv", "label": "y", "rename": {"Finding": "y"}}
    model = prepared("labelled_images", root=root, server_test=False, cache=tmp_path, **of)
    written(root, ["Path", *ROWS], name="new.csv")
    assert len(read_raw(root / "new.csv", model.inputs).names) == len(ROWS)


def test_words_of_labels_are_to_be_pasted_as_they_are_written(tmp_path):
    for cells, asked in (
        (["Positive,0", "no,1", "yes,0", "no,0"], "{Positive: 0}"),
        (["2,0", "1,1", "2,0", "1,0"], "{2: 0, 1: 0}"),  # 1 may mean no
    ):
        lines = [f"{image},{cell}" for image, cell in zip(ROWS, cells, strict=True)]
        of = {"labels_file": "labels.csv", "labels": ["Edema", "Mass"]}
        root = written(tmp_path, ["Path,Edema,Mass", *lines])
        words = rf"is one of the labels .*dataset.map={{Edema: {asked}}}"
        refuses(words, read_labelled, root, **of)


def test_what_labels_of_x_rays_leave_open_is_asked_and_can_be_said(tmp_path):
    """As CheXpert writes them: 1 is yes, 0 no, -1 uncertain, and what is not mentioned blank."""
    rows = ["1.0,", "-1.0,1.0", "0.0,0.0", "1.0,-1.0"]
    lines = [f"{image},{cells}" for image, cells in zip(ROWS, rows, strict=True)]
    root = written(tmp_path, ["Path,Edema,No Finding", *lines])
    of = {"labels_file": "labels.csv"}
    one = refuses(r"-1.0 \(1\).*labels=\[Edema,No Finding\]", read_labelled, root, **of)
    both = {"labels": ["Edema", "No Finding"], **of}
    all_ = refuses(r"-1.0 \(1\).*dataset.map=", read_labelled, root, **both)
    for refused, given, labels in (
        (one, [], [1, 0, 0]),
        (all_, ["dataset.labels=[Edema,No Finding]"], [[1, 0], [0, 1], [0, 0], [1, 0]]),
    ):
        line = re.search(r"'(dataset.map=.*?)'", refused)[1]
        named = ("dataset=labelled_images", f"dataset.root={root}")
        config = compose(*named, "dataset.labels_file=labels.csv", line, *given)
        records, _ = DATA_SETS["labelled_images"].read(config.dataset, root)
        assert records.labels.tolist() == labels
    left, _ = read_labelled(root, label="Edema", missing_in={"Edema": ["-1.0"]}, **of)
    assert left.labels.tolist() == [1, 0, 1]
    of |= {"root": root, "server_test": False, "cache": tmp_path}
    model = prepared("labelled_images", **of, **MAPPED)
    assert read_raw(root / "labels.csv", model.inputs).labels.tolist() == labels


@pytest.mark.run
def test_a_run_on_them_exports_a_model_that_takes_them(tmp_path):
    """Digits with the labels even and large, of patients with three images each."""
    records, _ = read("digits", Path())
    for part, rows in {"train": range(600), "test": range(600, 800)}.items():
        lines = ["file,patient,findings"]
        for i in rows:
            file = tmp_path / "data" / part / "files" / f"{i}.png"
            save_pixels(records.features[i, 0].numpy(), file)
            digit = int(records.labels[i])
            found = [name for name, has in (("even", digit % 2 == 0), ("large", digit > 4)) if has]
            lines.append(f"{i}.png,p{i // 3},{';'.join(found)}")
        (tmp_path / "data" / part / "labels.csv").write_text("\n".join(lines) + "\n")
    config = compose(
        *("algorithm=fedavg", "algorithm.network=linear", "clients=2", "retrain.rounds=5"),
        *("stages=[retrain,evaluate,export]", "dataset=labelled_images", "runtime.device=cpu"),
        *(f"dataset.root={tmp_path / 'data'}", f"dataset.cache={tmp_path / 'cache'}"),
        *("dataset.labels_file=labels.csv", 'dataset.label_separator=";"'),
        *("dataset.id_column=patient", "dataset.image_size=8", "dataset.channels=1"),
        *("dataset.crop_padding=0", "dataset.flip=false", "retrain.weights.lr=0.05"),
        *("trackers=[]", f"run_dir={tmp_path / 'run'}"),
    )
    result = run(config)
    reported = result.scores["central"]["accuracy"]
    found = load(result.folder).predict(tmp_path / "data" / "test" / "labels.csv")
    assert found.accuracy == pytest.approx(reported)
    assert reported > 0.7
    assert found.table().loc[0, ["patient", "record"]].tolist() == ["p200", "600.png"]
    with pytest.warns(UserWarning, match="labels.csv is not read: give it in place of its folder"):
        again = load(result.folder).predict(tmp_path / "data" / "test")
    assert again.accuracy is None  # of files alone no labels are known
    assert sorted(again.probabilities[:, 0]) == sorted(found.probabilities[:, 0])


def test_fednas_data_shows_them(tmp_path, prints):
    own = ["dataset.labels_file=labels.csv", 'dataset.label_separator="|"', "clients=1"]
    own += ["dataset.image_size=8", f"dataset.cache={tmp_path / 'cache'}"]
    own += ["dataset.server_test=false", "dataset.id_column='Patient ID'"]
    assert "Mass 2, Nodule 2" in prints("data", by_findings(tmp_path / "data"), *own)

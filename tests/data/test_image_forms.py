"""Images as programs and people leave them: read as they are meant, told, or asked about."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.raw import read_raw
from fednas_flwr.data.records import Inputs

from ..data_sets import prepared, read
from ..refusals import refuses

PIXELS = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)


def write(root, save, suffix=".png", number=4):
    """Two classes of two images or more, all different."""
    for i in range(number):
        path = root / "ab"[i % 2] / f"{i}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(np.roll(PIXELS, i), path)
    return root


def gray(pixels, path):
    Image.fromarray(pixels).save(path)


def ink(pixels, path):
    """Black strokes on a transparent ground."""
    clear = np.zeros((*pixels.shape, 4), np.uint8)
    clear[..., 3] = pixels
    Image.fromarray(clear).save(path)


def floats(pixels, path):
    Image.fromarray((pixels / 255).astype(np.float32)).save(path)


def pages(pixels, path):
    Image.fromarray(pixels).save(path, save_all=True, append_images=[Image.fromarray(pixels)])


def bands(pixels, path, extra=1):
    """Red, green, blue and infrared, as satellites see."""
    counts = struct.pack("<4H", 8, 8, 8, 8)
    data = np.stack([pixels] * (3 + extra), 2).tobytes()
    tags = {256: 8, 257: 8, 258: 8, 259: 1, 262: 2, 273: 16, 277: 3 + extra, 278: 8}
    tags |= {279: len(data), 338: 0}
    entries = b"".join(
        struct.pack("<HHII", tag, 3, 4 if tag == 258 else 1, value) for tag, value in tags.items()
    )
    head = struct.pack("<2sHI8s", b"II", 42, 16 + len(data), counts)
    path.write_bytes(head + data + struct.pack("<H", len(tags)) + entries + bytes(4))


@pytest.mark.parametrize(
    ("save", "suffix", "seen", "note"),
    [
        (ink, ".png", 255 - PIXELS, "4 images with an alpha channel are laid on white"),
        (floats, ".tif", PIXELS, "4 float images: 0..1 become 0..255"),
        (pages, ".tif", PIXELS, "4 files have several pages, of which only the first is read"),
        (bands, ".tif", PIXELS, "4 images have more than three bands, of which the first three"),
    ],
)
def test_what_a_file_holds_is_read_and_told(tmp_path, save, suffix, seen, note):
    records, _ = read("image_folder", write(tmp_path, save, suffix), image_size=8, channels=1)
    assert records.features[0, 0].tolist() == seen.tolist()
    in_colour = ("4 colour images: all become gray",) if save in (ink, bands) else ()
    assert records.notes[:-1] == in_colour
    assert records.notes[-1].startswith(note)


@pytest.mark.parametrize("form", ["size", "kind", "suffix", "nothing"])
def test_what_of_files_alone_tells_a_label_is_told(tmp_path, form):
    def save(pixels, path):
        number = int(path.stem) % 2 if form != "nothing" else int(path.stem) % 3
        image = Image.fromarray(pixels).resize((8 + 8 * number * (form in ("size", "nothing")), 8))
        image = image.convert("RGB" if form == "kind" and number else "L")
        image.save(path.with_suffix(".bmp" if form == "suffix" and number else ".png"))

    folder = write(tmp_path, save, number=20)
    notes = " ".join(read("image_folder", folder, image_size=8, channels=1)[0].notes)
    assert (f"the {form} of files alone tells a label" in notes) is (form != "nothing")
    assert notes.count("alone") == (form != "nothing")


def test_values_beyond_a_types_range_are_asked_about(tmp_path):
    def hounsfield(pixels, path):
        Image.fromarray(pixels.astype(np.int32) * 8 - 1024).save(path)

    root = write(tmp_path, hounsfield, ".tif")
    bright = Image.fromarray(np.full((8, 8), 1016, dtype=np.int32))
    bright.save(next(root.rglob("*.tif")).with_name("bright.tif"))  # read, but for the others
    refuses(r"set dataset.intensity=\[-1024,1016\]", read, "image_folder", root, image_size=8)
    records, _ = read("image_folder", root, image_size=8, intensity=[-1024, 1016])
    assert records.features.max() == 255


def test_signed_numbers_of_8_bits_are_not_taken_for_shades(tmp_path):
    def signed(pixels, path):
        Image.fromarray(pixels).save(path, tiffinfo={339: 2})

    root = write(tmp_path, signed, ".tif")
    refuses("holds signed numbers of 8 bits", read, "image_folder", root, image_size=8)


def test_one_picture_is_refused(tmp_path):
    root = write(tmp_path, lambda pixels, path: gray(np.zeros_like(pixels), path))
    with pytest.raises(ConfigError, match="all 4 images are one picture"):
        prepared("image_folder", root=root, cache=tmp_path / "cache", image_size=8)


def test_images_that_are_left_out_are_counted(tmp_path):
    write(tmp_path / "train", gray)
    write(tmp_path / "train" / "a" / "more", gray)
    write(tmp_path / "validation", gray)
    write(tmp_path / "train" / "_c", gray)
    records, test = read("image_folder", tmp_path, image_size=8)
    assert test is None
    assert len(records) == 4
    assert records.notes == (
        "8 images in other folders are left out (_c/a: 2, _c/b: 2, a/more/a: 2, a/more/b: 2)",
        "4 images in other folders are left out (validation/a: 2, validation/b: 2)",
    )
    names = "train", "validation"
    for spelled in (("Training", "Testing"), ("TRAIN", "test_set"), ("Train images", "Test data")):
        for before, after in zip(names, spelled, strict=True):
            (tmp_path / before).rename(tmp_path / after)
        names = spelled
        records, test = read("image_folder", tmp_path, image_size=8)
        assert test is not None
        assert (len(records), len(test)) == (4, 4)


def test_masks_in_folders_of_a_class_are_told(tmp_path):
    write(tmp_path, gray)
    for name in ("images", "masks"):
        write(tmp_path / name, gray)
        for one in "ab":
            (tmp_path / name / one).rename(tmp_path / one / name)
    told = "4 images such as 0.png may be masks: remove them"
    for image in tmp_path.glob("?/*.png"):
        image.unlink()
    with pytest.raises(ConfigError, match=r"a/images: 2.*; .*dataset.id_column=patient has"):
        read("image_folder", tmp_path, image_size=8)
    records, _ = read("image_folder", tmp_path, image_size=8, id_column="patient")
    assert records.notes == (told,)
    inputs = Inputs(shape=(1, 8, 8), schema=(), mean=(0.5,), std=(1.0,), class_names=("a", "b"))
    assert read_raw(tmp_path, inputs).notes == (told,)
    gray(PIXELS, tmp_path / "0.png")
    assert read_raw(tmp_path, inputs).notes[-1].startswith("1 of 9 images are in no class's fold")
    (tmp_path / "a" / "masks" / "labels.csv").write_text("path,y\n0,c\n")
    (note,) = read_raw(tmp_path / "a" / "masks", inputs).notes
    assert note.endswith("labels.csv is not read: give it in place of its folder")
    inputs = replace(inputs, label="y")
    (note,) = read_raw(tmp_path / "a" / "masks" / "labels.csv", inputs).notes
    assert "holds c, and not only a, b: predictions are not compared" in note
    np.savez(tmp_path / "a.npz", x=PIXELS[None], y=np.array([2]))
    assert "has other labels than the model" in read_raw(tmp_path / "a.npz", inputs).notes[-1]


def test_fractions_with_channels_last_are_read_as_shades(tmp_path):
    shades = np.stack([np.roll(PIXELS, i) for i in range(4)])
    np.savez(tmp_path / "a.npz", x_train=shades[..., None] / 255.0, y_train=[0, 1, 0, 1])
    records, _ = read("npz", tmp_path / "a.npz")
    assert records.features[:, 0].tolist() == shades.tolist()
    assert len(records.notes) == 1

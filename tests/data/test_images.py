import struct
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fednas_flwr.data import decoding
from fednas_flwr.data.images import records_from_arrays
from fednas_flwr.data.raw import read_raw
from fednas_flwr.data.records import Inputs, record_ids

from ..data_sets import prepared, read, save_pixels
from ..refusals import refuses
from .conftest import save_dicom

read_folder = partial(read, "image_folder")


def save_image(path, *, value=100, size=(6, 4), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(path)


def test_digits_are_real_and_span_the_bytes():
    train, test = read("digits", Path())
    assert test is None
    assert (train.features.shape, train.features.dtype) == ((1797, 1, 8, 8), torch.uint8)
    # 0..16 times 255 / 16: 16 becomes 255, and 8 becomes 127.5, rounded to even
    assert set(train.features.unique().tolist()) == {round(i * 255 / 16) for i in range(17)}
    assert train.labels[:10].tolist() == list(range(10))
    assert len(set(train.ids.tolist())) == 1797


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.tobytes())


def test_torchvision_set_from_files_on_disk(tmp_path):
    rng = np.random.default_rng(0)
    raw = tmp_path / "FashionMNIST" / "raw"
    images = {"train": rng.integers(0, 256, (5, 28, 28), np.uint8)}
    images["t10k"] = rng.integers(0, 256, (3, 28, 28), np.uint8)
    for part, x in images.items():
        write_idx(raw / f"{part}-images-idx3-ubyte", x)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(len(x), dtype=np.uint8))
    train, test = read("fashion_mnist", tmp_path)
    assert train.features.numpy().tolist() == images["train"][:, None].tolist()
    assert test.features.shape == (3, 1, 28, 28)
    assert test.labels.tolist() == [0, 1, 2]
    assert train.class_names[9] == "Ankle boot"


def test_folder_of_classes(tmp_path):
    save_image(tmp_path / "dog" / "1.png", value=10)
    save_image(tmp_path / "cat" / "2.PNG", value=20)
    save_image(tmp_path / "cat" / "1.jpg", value=30)
    save_image(tmp_path / ".hidden" / "1.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    train, test = read_folder(tmp_path)
    assert test is None
    assert (train.class_names, train.labels.tolist()) == (("cat", "dog"), [0, 0, 1])
    assert train.features.shape == (3, 1, 4, 6)
    assert train.features[:, 0, 0, 0].tolist() == [30, 20, 10]
    pixels = [bytes([value] * 24) for value in (30, 20, 10)]
    assert train.ids.tolist() == record_ids(pixels).tolist()


def test_an_id_is_of_an_images_own_pixels_however_they_are_stored_and_used(tmp_path):
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (9, 7, 3), np.uint8)
    gray = rng.integers(0, 256, (9, 7), np.uint8)
    opaque = np.dstack([colours, np.full((9, 7), 255, np.uint8)])
    small = {"compress_level": 9, "optimize": True}
    stored = [(colours, {"compress_level": 0}), (colours, small), (opaque, {}), (gray, {})]
    stored += [(np.stack([gray] * 3, 2), {}), (gray.T, {})]
    (tmp_path / "a").mkdir()
    for number, (pixels, options) in enumerate(stored):
        Image.fromarray(pixels).save(tmp_path / "a" / f"{number}.png", **options)
    for how in ({"image_size": 5}, {"image_size": 8, "channels": 1}, {"image_size": 9}):
        ids = read_folder(tmp_path, **how)[0].ids.tolist()
        one, _, _, four, _, six = ids
        assert ids == [one, one, one, four, four, six]
        assert len({one, four, six}) == 3
    # as those of the same pixels in an array
    arrays = [colours.transpose(2, 0, 1)[None], gray[None, None]]
    assert [records_from_arrays(x, np.zeros(1), ("a",)).ids[0] for x in arrays] == [one, four]


def test_folder_of_classes_and_persons(tmp_path):
    for file in ("dog/ann/1", "cat/bob/2", "cat/ann/1"):
        save_image(tmp_path / f"{file}.png")
    train, _ = read_folder(tmp_path, id_column="patient")
    assert train.by_person
    assert train.labels.tolist() == [0, 0, 1]
    assert train.columns["patient"].tolist() == ["ann", "bob", "ann"]
    assert train.ids.tolist() == record_ids([b"ann", b"bob", b"ann"]).tolist()
    save_image(tmp_path / "dog" / "3.png")
    for root, words in (
        (tmp_path, r"dog/3.png is in no person's folder: .*<person>"),
        (tmp_path / "dog" / "ann", "ann has no images: expected <class>/<pers"),
    ):
        refuses(words, read_folder, root, id_column="patient")


def test_folder_with_train_and_test_resized_to_three_channels(tmp_path):
    save_image(tmp_path / "train" / "a" / "1.png", value=7, mode="RGB")
    save_image(tmp_path / "train" / "b" / "1.png", value=9, size=(10, 10))
    save_image(tmp_path / "test" / "b" / "1.png", value=9, size=(3, 5))
    train, test = read_folder(tmp_path, image_size=8, channels=3, class_names=())
    assert train.features.shape == (2, 3, 8, 8)
    assert train.features[:, :, 4, 4].tolist() == [[7, 0, 255], [9, 9, 9]]
    assert test.labels.tolist() == [1]


def test_class_names_given_by_the_user_fix_the_order(tmp_path):
    save_image(tmp_path / "b" / "1.png")
    train, _ = read_folder(tmp_path, class_names=("c", "b", "a"))
    assert train.class_names == ("c", "b", "a")
    assert train.labels.tolist() == [1]
    refuses("has the label b, which is not in", read_folder, tmp_path, class_names=("c", "a"))


def test_images_that_cannot_be_used(tmp_path):
    refuses("has no images: expected <class>/<image>", read_folder, tmp_path)
    save_image(tmp_path / "a" / "1.png")
    save_image(tmp_path / "a" / "2.png", size=(5, 5))
    refuses(r"2 different sizes \(6x4: 1, 5x5: 1\): set dataset.im", read_folder, tmp_path)


def test_no_image_decides_which_folders_are_read_at_private_sites(tmp_path):
    kind = {"corrupt": "skip", "class_names": ("a", "train"), "image_size": 4, "channels": 1}
    for i in range(5):
        save_image(tmp_path / "a" / f"{i}.png", value=i)
    (tmp_path / "train").mkdir()
    without = read_folder(tmp_path, **kind)[0]
    save_image(tmp_path / "train" / "x.png", value=9)
    assert len(read_folder(tmp_path, **kind)[0]) == len(without)


def test_all_corrupt_files_are_named_at_once_or_skipped(tmp_path):
    for name in ("1", "4"):
        save_image(tmp_path / "a" / f"{name}.png", value=int(name))
    (tmp_path / "a" / "2.png").write_bytes(b"no image")
    whole = (tmp_path / "a" / "1.png").read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "3.png").write_bytes(whole[:-30])  # cut within its pixels
    save_image(tmp_path / "b" / "5.png", value=5)
    refuses(r"2 of 5 files .*a/2.png .*b/3.png .*corrupt=skip", read_folder, tmp_path)
    kept, _ = read_folder(tmp_path, corrupt="skip")
    assert kept.features[:, 0, 0, 0].tolist() == [1, 4, 5]
    assert kept.labels.tolist() == [0, 0, 1]
    assert len(kept.ids) == 3
    assert "2 broken images left out: " in kept.notes[0]
    for name in ("1", "4"):
        (tmp_path / "a" / f"{name}.png").write_bytes(b"no image")
    (tmp_path / "b" / "5.png").unlink()
    refuses(r"a/1.png, \S+, \S+a/4.png \(of no .*\), .*repair them", read_folder, tmp_path)
    (tmp_path / "none" / "c").mkdir(parents=True)
    (tmp_path / "none" / "c" / "1.png").write_bytes(b"")
    refuses("1 of 1 files cannot be read", read_folder, tmp_path / "none", corrupt="skip")


@pytest.mark.parametrize("how", [{"image_size": 40}, {"image_size": 40, "channels": 1}, {}])
def test_large_images_are_opened_side_by_side_as_one_after_the_other(tmp_path, monkeypatch, how):
    rng = np.random.default_rng(0)
    for i in range(decoding._AT_ONCE + 6):
        shape = (96, 96, 3) if i % 5 == 3 else (96, 96)
        path = tmp_path / "ab"[i % 2] / f"{i:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
        if i % 7 == 2:
            path.write_bytes(path.read_bytes()[:-5000])
    assert (tmp_path / "a" / "000.png").stat().st_size > decoding._LARGE
    found, meetings, opened = [], [], decoding._open

    def noted(*of):
        if meetings:
            meetings.pop().wait(60)  # for a second thread
        return opened(*of)

    monkeypatch.setattr(decoding, "_open", noted)
    how = {**how, "corrupt": "skip", "class_names": ["a", "b"]}
    for number in (1, 3):
        monkeypatch.setattr(decoding, "cores", lambda number=number: number)
        meetings += [threading.Barrier(2)] * 2 if number > 1 else []
        found.append(read_folder(tmp_path, **how)[0])
    assert not meetings
    one, other = found
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.labels, other.labels)
    assert (one.ids == other.ids).all()
    assert one.notes == other.notes
    assert "10 broken images left out" in one.notes[0]


def test_sixteen_bits_are_brought_to_eight_by_a_stated_range(tmp_path):
    (tmp_path / "a").mkdir()
    deep = np.array([[0, 1000, 4095, 65535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "a" / "1.png")
    full, _ = read_folder(tmp_path)
    assert full.features.flatten().tolist() == [0, 4, 16, 255]  # 1000 / 65535 * 255 = 3.89
    Image.fromarray(~deep).save(tmp_path / "1.tif")
    black, white = (bytes([6, 1, 3, 0, 1, 0, 0, 0, of]) for of in (1, 0))  # the number for zero
    changed = (tmp_path / "1.tif").read_bytes().replace(black, white)
    shown = decoding.decode_like(changed, "1.tif", (1, 1, 4), None)
    assert shown.flatten().tolist() == [0, 4, 16, 255]
    (note,) = full.notes
    assert note == "1 16 bit images: 0..65535 become 0..255, of which they hold 0..65535"
    cut, _ = read_folder(tmp_path, intensity=(1000, 4095))
    assert cut.features.flatten().tolist() == [0, 0, 255, 255]
    assert cut.ids.tolist() == full.ids.tolist()


def test_images_are_turned_upright_and_keep_their_ids(tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    plain, _ = read_folder(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6  # as a camera on its side writes: turn by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png", exif=exif)
    turned, _ = read_folder(tmp_path)
    assert turned.features[0, 0].tolist() == np.rot90(pixels, -1).tolist()
    assert turned.ids.tolist() == plain.ids.tolist()
    assert turned.notes == ("1 images turned upright as their EXIF orientation says",)
    (tmp_path / "a" / "1.png").unlink()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.tif", tiffinfo={0x0112: 6})
    again, _ = read_folder(tmp_path)  # Pillow turns a TIFF itself
    assert again.features.tolist() == turned.features.tolist()
    assert again.notes == turned.notes


def test_one_image_in_colour_makes_all_of_them_so(tmp_path):
    save_image(tmp_path / "a" / "1.png", value=7)
    save_image(tmp_path / "a" / "2.png", value=9, mode="RGB")
    both, _ = read_folder(tmp_path)
    assert both.features[:, :, 0, 0].tolist() == [[7, 7, 7], [9, 0, 255]]
    assert both.notes == ("1 gray and 1 colour images: all become colour",)
    gray, _ = read_folder(tmp_path, channels=1)
    assert gray.features.shape == (2, 1, 4, 6)


def test_dicom_is_shown_by_its_own_window(tmp_path):
    root, pixels = tmp_path / "a", np.array([[0, 1000], [2000, 4000]], dtype=np.uint16)
    root.mkdir()
    window = {"WindowCenter": 2000, "WindowWidth": 2000, "RescaleSlope": 1, "RescaleIntercept": 0}
    for name, kind in (("1", "MONOCHROME2"), ("2", "MONOCHROME1")):  # 1000 to 3000
        save_dicom(root / f"{name}.dcm", pixels, PhotometricInterpretation=kind, **window)
    found, _ = read_folder(tmp_path)
    assert found.features[0, 0].tolist() == [[0, 0], [128, 255]]
    assert found.features[1, 0].tolist() == [[255, 255], [127, 0]]
    # as anonymisation leaves them
    save_dicom(root / "1.dcm", pixels, PhotometricInterpretation="MONOCHROME1", WindowCenter=None)
    found, _ = read_folder(tmp_path)
    assert found.features[0, 0].tolist() == [[255, 191], [127, 0]]
    assert found.notes[0].startswith("1 DICOM images have no window")
    (root / "3.dcm").write_bytes(b"no image")
    refuses(r"1 of 3 files .*3\.dcm", read_folder, tmp_path)
    for name in ("2.dcm", "3.dcm"):
        (root / name).unlink()
    # in colour, also of 12 bits in 16, and by a palette, whose indices are no shades
    red, green = np.array([[0, 255], [9, 7]], np.uint8), np.full((2, 2), 80, np.uint8)
    colours, bytes_ = np.stack([red, green, red], 2), {"BitsAllocated": 8, "BitsStored": 8}
    palette = {"PhotometricInterpretation": "PALETTE COLOR", "HighBit": 7}
    for name, colour in zip(("Red", "Green", "Blue"), (red, green, red), strict=True):
        palette[f"{name}PaletteColorLookupTableDescriptor"] = [4, 0, 8]
        palette[f"{name}PaletteColorLookupTableData"] = colour.tobytes()
    save_dicom(root / "1.dcm", np.arange(4, dtype=np.uint8).reshape(2, 2), **bytes_ | palette)
    rgb = {"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3, "PlanarConfiguration": 0}
    save_dicom(root / "2.IMA", colours, **rgb | bytes_ | {"HighBit": 7})
    wide = {"BitsStored": 12, "HighBit": 11}
    save_dicom(root / "4.dcm", colours.astype(np.uint16) * 16, **rgb | wide)
    Image.fromarray(colours).save(root / "3.png")
    found, _ = read_folder(tmp_path)
    assert found.features.tolist() == [[red.tolist(), green.tolist(), red.tolist()]] * 4
    assert len({*found.ids.tolist()}) == 1


# --- Images as programs and people leave them: read as they are meant, told, or asked about


PIXELS = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)


def write(root, save, suffix=".png", number=4):
    """Two classes of two images or more, all different."""
    for i in range(number):
        path = root / "ab"[i % 2] / f"{i}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(np.roll(PIXELS, i), path)
    return root


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
    data = np.stack([pixels] * (3 + extra), 2).tobytes()
    tags = {256: 8, 257: 8, 258: 8, 259: 1, 262: 2, 273: 16, 277: 3 + extra, 278: 8}
    tags |= {279: len(data), 338: 0}
    each = ((tag, 3, 4 if tag == 258 else 1, value) for tag, value in tags.items())
    entries = b"".join(struct.pack("<HHII", *entry) for entry in each)
    head = struct.pack("<2sHI8s", b"II", 42, 16 + len(data), struct.pack("<4H", 8, 8, 8, 8))
    path.write_bytes(head + data + struct.pack("<H", len(tags)) + entries + bytes(4))


FILES = [
    (ink, ".png", 255 - PIXELS, "4 images with an alpha channel are laid on white"),
    (floats, ".tif", PIXELS, "4 float images: 0..1 become 0..255"),
    (pages, ".tif", PIXELS, "4 files have several pages, of which only the first is read"),
    (bands, ".tif", PIXELS, "4 images have more than three bands, of which the first three"),
]


@pytest.mark.parametrize(("save", "suffix", "seen", "note"), FILES)
def test_what_a_file_holds_is_read_and_told(tmp_path, save, suffix, seen, note):
    records, _ = read_folder(write(tmp_path, save, suffix), image_size=8, channels=1)
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
    notes = " ".join(read_folder(folder, image_size=8, channels=1)[0].notes)
    assert (f"the {form} of files alone tells a label" in notes) is (form != "nothing")
    assert notes.count("alone") == (form != "nothing")


def test_values_beyond_a_types_range_are_asked_about(tmp_path):
    def hounsfield(pixels, path):
        Image.fromarray(pixels.astype(np.int32) * 8 - 1024).save(path)

    root = write(tmp_path, hounsfield, ".tif")
    bright = Image.fromarray(np.full((8, 8), 1016, dtype=np.int32))
    bright.save(next(root.rglob("*.tif")).with_name("bright.tif"))  # read, but for the others
    refuses(r"set dataset.intensity=\[-1024,1016\]", read_folder, root, image_size=8)
    records, _ = read_folder(root, image_size=8, intensity=[-1024, 1016])
    assert records.features.max() == 255


def test_signed_numbers_of_8_bits_are_not_taken_for_shades(tmp_path):
    def signed(pixels, path):
        Image.fromarray(pixels).save(path, tiffinfo={339: 2})

    root = write(tmp_path, signed, ".tif")
    refuses("holds signed numbers of 8 bits", read_folder, root, image_size=8)


def test_one_picture_is_refused(tmp_path):
    root = write(tmp_path, lambda pixels, path: save_pixels(np.zeros_like(pixels), path))
    own = {"root": root, "cache": tmp_path / "cache", "image_size": 8}
    refuses("all 4 images are one picture", prepared, "image_folder", **own)


def test_images_that_are_left_out_are_counted(tmp_path):
    write(tmp_path / "train", save_pixels)
    write(tmp_path / "train" / "a" / "more", save_pixels)
    write(tmp_path / "validation", save_pixels)
    write(tmp_path / "train" / "_c", save_pixels)
    records, test = read_folder(tmp_path, image_size=8)
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
        records, test = read_folder(tmp_path, image_size=8)
        assert test is not None
        assert (len(records), len(test)) == (4, 4)


def test_masks_in_folders_of_a_class_are_told(tmp_path):
    write(tmp_path, save_pixels)
    for name in ("images", "masks"):
        write(tmp_path / name, save_pixels)
        for one in "ab":
            (tmp_path / name / one).rename(tmp_path / one / name)
    told = "4 images such as 0.png may be masks: remove them"
    for image in tmp_path.glob("?/*.png"):
        image.unlink()
    refuses(r"a/images: 2.*; .*dataset.id_column=patient has", read_folder, tmp_path, image_size=8)
    records, _ = read_folder(tmp_path, image_size=8, id_column="patient")
    assert records.notes == (told,)
    inputs = Inputs(shape=(1, 8, 8), schema=(), mean=(0.5,), std=(1.0,), class_names=("a", "b"))
    assert read_raw(tmp_path, inputs).notes == (told,)
    save_pixels(PIXELS, tmp_path / "0.png")
    assert read_raw(tmp_path, inputs).notes[-1].startswith("1 of 9 images are in no class's fold")
    (tmp_path / "a" / "masks" / "labels.csv").write_text("path,y\n0,c\n")
    (note,) = read_raw(tmp_path / "a" / "masks", inputs).notes
    assert note.endswith("labels.csv is not read: give it in place of its folder")
    inputs = replace(inputs, label="y")
    (note,) = read_raw(tmp_path / "a" / "masks" / "labels.csv", inputs).notes
    assert "holds c, and not only a, b: predictions are not compared" in note
    np.savez(tmp_path / "a.npz", x=PIXELS[None], y=np.array([2]))
    for names in (("a", "b"), ("0", "10", "2")):  # 2 may be a name, or a place
        raw = read_raw(tmp_path / "a.npz", replace(inputs, class_names=names))
        assert "has other labels than the model" in raw.notes[-1]


def test_fractions_with_channels_last_are_read_as_shades(tmp_path):
    shades = np.stack([np.roll(PIXELS, i) for i in range(4)])
    np.savez(tmp_path / "a.npz", x_train=shades[..., None] / 255.0, y_train=[0, 1, 0, 1])
    records, _ = read("npz", tmp_path / "a.npz")
    assert records.features[:, 0].tolist() == shades.tolist()
    assert len(records.notes) == 1

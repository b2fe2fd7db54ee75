"""Encoded images as arrays: any size, gray or in colour, 8 or 16 bits, upright, broken ones named.

:func:`decode_images` is for data sets, :func:`decode_like` for prediction; both take the same way.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.base.memory import check_fits
from fednas_flwr.data.features import load_backbone
from fednas_flwr.data.records import record_ids
from fednas_flwr.settings.data_settings import EncodedImages

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".jfif", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".dcm"}
SUFFIXES |= {".pgm", ".ppm"}
FULL_RANGE = (0.0, 65535.0)  # of 16 bits
_MOST_NAMED = 20

T = TypeVar("T")
Source = Callable[[int], tuple[str, bytes]]  # name and content of an encoded image


def source_of(files: Sequence[Path]) -> Source:
    """Return the source of images in files; one that cannot be opened is broken, too."""

    def content(index: int) -> tuple[str, bytes]:
        try:
            return str(files[index]), files[index].read_bytes()
        except OSError as error:
            return f"{files[index]}: {error.strerror}", b""

    return content


@dataclass(frozen=True)
class Decoded:
    """Images in one form.

    Attributes:
        images: uint8 ``[N, C, H, W]``.
        ids: S32 ``[N]``: the hash of an image's own pixels, before it is turned or resized, on
            white where it is transparent: the same for a file that was compressed anew without
            loss, in any format, and for shades of gray stored as colours.
        rows: int64 ``[N]``, which of the encoded images they are.
        notes: What was done, for people.
    """

    images: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    notes: tuple[str, ...]


def decode_images(settings: EncodedImages, count: int, source: Source) -> Decoded:
    """Return ``count`` encoded images in the one form that the settings say.

    Raises:
        ConfigError: Images cannot be read and are not to be skipped, differ in size without
            ``image_size``, or do not fit into memory; or none is left, and their form not given.
    """
    broken: dict[int, str] = {}

    def whole(read: Callable[[bytes, str], T]) -> Iterator[tuple[int, T]]:
        """Yield what is read of every image, and its number; those that cannot be are broken."""
        for i in range(count):
            if i not in broken:
                name, content = source(i)
                try:
                    result = read(content, name)
                except _BrokenError as error:
                    broken[i] = f"{name} ({error})"
                else:
                    yield i, result

    size = settings.image_size
    if settings.backbone is not None:
        size = load_backbone(settings.backbone).image_size
    is_known = None not in (size, settings.channels)
    headers = [] if is_known else [header for _, header in whole(_header)]
    sizes = Counter(header.size for header in headers)
    channels = settings.channels or (3 if any(h.mode == "colour" for h in headers) else 1)
    if size is None and len(sizes) > 1:
        raise ConfigError(
            f"the images have {len(sizes)} different sizes ({_listed_sizes(sizes)}): set "
            "dataset.image_size."
        )
    images = np.empty((0, channels, 1, 1), dtype=np.uint8)
    if sizes or size is not None:
        width, height = next(iter(sizes)) if size is None else (size, size)
        check_fits(
            count * channels * width * height,
            f"{count} images of {channels}x{height}x{width} pixels",
            "set a smaller dataset.image_size",
        )
        images = np.empty((count, channels, height, width), dtype=np.uint8)
    ids: list[bytes] = []
    rows: list[int] = []
    more: list[_Header] = []
    for i, (image, pixels) in whole(partial(_open, intensity=settings.intensity, said=more)):
        images[len(rows)] = _fitted(image, channels, images.shape[2:])
        ids.append(pixels)
        rows.append(i)
    formless = not rows and None in (size, settings.channels)
    named = listed(broken.values(), _MOST_NAMED)
    if (broken and settings.corrupt != "skip") or formless:
        raise ConfigError(
            f"{len(broken)} of {count} files cannot be read as an image: "
            f"{named}: repair or remove them, or set dataset.corrupt=skip."
        )
    headers = more if is_known else headers
    sizes = Counter(header.size for header in headers)
    modes = Counter(header.mode for header in headers)
    turned, paged, clear = (
        sum(getattr(header, name) for header in headers)
        for name in ("is_turned", "has_pages", "is_clear")
    )
    notes = []
    if broken:
        share = f"{len(broken) / count:.1%} of {count:,}"
        notes = [f"{len(broken)} broken images left out: {named}; {share}"]
    if size is not None and set(sizes) - {(size, size)}:
        notes.append(f"resized to {size}x{size} (bilinear) from {_listed_sizes(sizes)}")
    for kind, usual in (("16 bit", FULL_RANGE), ("float", (0.0, 1.0))):
        if modes[kind]:
            low, high = settings.intensity or usual
            notes.append(f"{modes[kind]} {kind} images: {low:g}..{high:g} become 0..255")
    gray = modes["gray"] + modes["16 bit"] + modes["float"]
    if modes["colour"] if channels == 1 else gray:
        kinds = [f"{n} {kind}" for kind, n in (("gray", gray), ("colour", modes["colour"])) if n]
        become = "gray" if channels == 1 else "colour"
        notes.append(f"{' and '.join(kinds)} images: all become {become}")
    if turned:
        notes.append(f"{turned} images turned upright as their EXIF orientation says")
    if paged:
        notes.append(f"{paged} files have several pages, of which only the first is read")
    if clear:
        notes.append(f"{clear} images with an alpha channel are laid on white")
    chosen = np.array(rows, dtype=np.int64)
    return Decoded(images[: len(rows)], record_ids(ids), chosen, tuple(notes))


def decode_like(
    content: bytes, name: str, shape: Sequence[int], intensity: Sequence[float] = ()
) -> np.ndarray:
    """Return an encoded image as uint8 of the ``shape`` ``(C, H, W)``, resized as in training.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        image, _ = _open(content, name, intensity, [])
    except _BrokenError as error:
        raise ConfigError(f"{name} cannot be read as an image: {error}.") from error
    return _fitted(image, shape[0], tuple(shape[1:]))


class _BrokenError(Exception):
    """An image that cannot be read."""


class _Header(NamedTuple):
    """What a file says of its image.

    Attributes:
        size: Width and height, upright.
        mode: ``gray``, ``colour``, ``16 bit`` or ``float``.
        is_turned: True if it must be turned.
        has_pages: True if there are further pages.
        is_clear: True if it has an alpha channel.
    """

    size: tuple[int, int]
    mode: str
    is_turned: bool = False
    has_pages: bool = False
    is_clear: bool = False


def _header(content: bytes, name: str) -> _Header:
    from PIL import Image

    if name.lower().endswith(".dcm"):
        return _said(Image.fromarray(_dicom(content)))
    try:
        with Image.open(io.BytesIO(content)) as opened:
            return _said(opened)
    except Exception as error:  # whatever a broken file makes of a parser of many formats
        raise _BrokenError(_reason(error)) from error


def _said(opened: Image) -> _Header:
    """What an image's file says of it."""
    width, height = opened.size
    kinds = {"I": "16 bit", "F": "float"}
    orientation = opened.getexif().get(_ORIENTATION, 1)
    return _Header(
        (height, width) if orientation in range(5, 9) else (width, height),
        kinds.get(opened.mode[0], "gray" if _is_gray(opened) else "colour"),
        orientation in range(2, 9),
        getattr(opened, "n_frames", 1) > 1,
        _is_clear(opened),
    )


def _reason(error: Exception) -> str:
    """Return a parser's reason in one line, without the address of the bytes that it read."""
    text = " ".join(str(error).split())
    return "of no known image format" if "cannot identify" in text else text


_ORIENTATION = 0x0112  # EXIF's tag


def _is_clear(image: Image) -> bool:
    return image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info


def _is_gray(image: Image) -> bool:
    return image.mode in ("1", "L", "LA")


def _open(
    content: bytes, name: str, intensity: Sequence[float] | None, said: list[_Header]
) -> tuple[Image, bytes]:
    """Return an upright image of mode L or RGB, and the bytes of its own pixels; add its header."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    if name.lower().endswith(".dcm"):
        pixels = _dicom(content)
        said.append(_said(Pillow.fromarray(pixels)))
        return Pillow.fromarray(pixels), pixels.tobytes()
    try:
        with Pillow.open(io.BytesIO(content)) as opened:
            said.append(_said(opened))
            if opened.mode.startswith(("I", "F")):
                deep = np.asarray(opened).astype(np.float64)
                low, high = intensity or ((0, 1) if opened.mode[0] == "F" else FULL_RANGE)
                if not intensity and not low <= deep.min() <= deep.max() <= high:
                    raise _BrokenError(
                        f"its values are {deep.min():g} to {deep.max():g}: set "
                        "dataset.intensity=[low,high]"
                    )
                shares = np.clip((deep - low) / (high - low), 0, 1)
                pixels = np.asarray(opened)
                image = Pillow.fromarray(np.rint(shares * 255).astype(np.uint8))
            else:
                upper = opened.convert("RGBA") if _is_clear(opened) else opened
                if upper is not opened:
                    upper = Pillow.alpha_composite(Pillow.new("RGBA", upper.size, "white"), upper)
                image = upper.convert("L" if _is_gray(opened) else "RGB")
                pixels = np.asarray(image)
            if said[-1].is_turned:
                image.getexif()[_ORIENTATION] = opened.getexif()[_ORIENTATION]
                image = ImageOps.exif_transpose(image)
    except _BrokenError:
        raise
    except Exception as error:  # whatever a broken file makes of a parser of many formats
        raise _BrokenError(_reason(error)) from error
    return image, _pixel_bytes(pixels)


def _dicom(content: bytes) -> np.ndarray:
    """Return a DICOM image as its own window shows it, uint8 ``[H, W]``, black 0 and white 255."""
    try:
        import pydicom
        from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
    except ImportError as error:
        raise _BrokenError("DICOM needs pydicom: install fednas_flwr[dicom] with pip") from error
    try:
        opened = pydicom.dcmread(io.BytesIO(content))
        shown = apply_voi_lut(apply_modality_lut(opened.pixel_array, opened), opened)
    except Exception as error:  # as above
        raise _BrokenError(_reason(error)) from error
    if shown.ndim != 2:
        raise _BrokenError(f"one gray image was expected, got shape {shown.shape}")
    values = shown.astype(np.float64)
    span = values.max() - values.min()
    shares = (values - values.min()) / (span or 1.0)
    if opened.get("PhotometricInterpretation") == "MONOCHROME1":  # where 0 is white
        shares = 1 - shares
    pixels: np.ndarray = np.rint(shares * 255).astype(np.uint8)
    return pixels


def _fitted(image: Image, channels: int, size: tuple[int, ...]) -> np.ndarray:
    """Return uint8 ``[C, H, W]`` of an image, resized where it has another size."""
    from PIL import Image as Pillow

    height, width = size
    fitted = image.convert("L" if channels == 1 else "RGB")
    if fitted.size != (width, height):
        fitted = fitted.resize((width, height), Pillow.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(height, width, channels).transpose(2, 0, 1)


def _pixel_bytes(pixels: np.ndarray) -> bytes:
    """Return the bytes of an image ``[H, W]`` or ``[H, W, 3]`` channel by channel, gray as one."""
    if pixels.ndim == 3 and (pixels == pixels[:, :, :1]).all():
        pixels = pixels[:, :, 0]
    return np.moveaxis(pixels, -1, 0).tobytes() if pixels.ndim == 3 else pixels.tobytes()


def _listed_sizes(sizes: Counter[tuple[int, int]]) -> str:
    return listed((f"{w}x{h}: {number}" for (w, h), number in sizes.most_common()), 5)


def part_folders(root: Path) -> tuple[Path, Path | None]:
    """Folders of the train and the test part; a root without ``train`` is the train part.

    ``Training`` and ``Testing`` name them, too, in any case of letters.
    """
    folders = {path.name.lower().removesuffix("ing"): path for path in sorted(root.iterdir())}
    train, test = folders.get("train"), folders.get("test")
    if train is None or not train.is_dir():
        return root, None
    return train, test if test is not None and test.is_dir() else None


def is_image(path: Path) -> bool:
    """Return whether a file is an image by its name; those that a Mac hides are none."""
    return path.suffix.lower() in SUFFIXES and path.name[0] != "."


def image_files(root: Path, *, hidden: bool = False) -> list[Path]:
    """All images in a folder and its sub-folders, by path.

    Args:
        root: The folder.
        hidden: True if folders and files that begin with an underscore count.
    """
    left_out = "." if hidden else "._"
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] not in left_out]
        found += [Path(folder, name) for name in names if name[0] not in left_out]
    return sorted((p for p in found if p.suffix.lower() in SUFFIXES), key=lambda path: path.parts)

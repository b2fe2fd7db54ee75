"""Encoded images as upright arrays: any size, gray or colour, 8 or 16 bits; broken ones are named.

:func:`decode_images` is for data sets, :func:`decode_like` for prediction; both decode alike.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.base.files import walk
from fednas_flwr.base.memory import check_fits
from fednas_flwr.base.processes import cores
from fednas_flwr.data.features import load_backbone
from fednas_flwr.data.records import ID, record_id
from fednas_flwr.settings.data_settings import EncodedImages

_DICOM = (".dcm", ".dicom", ".ima")
SUFFIXES: tuple[str, ...] = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".tif", ".tiff")
SUFFIXES += (".bmp", ".gif", ".webp", ".pgm", ".ppm", ".pbm", ".pnm", *_DICOM)
# Folders that network storage and operating systems create
_OF_STORAGE = {"@eaDir", "@Recycle", "#recycle", "#snapshot", "Network Trash Folder"}
_OF_SYSTEMS = {"$RECYCLE.BIN", "RECYCLER", "System Volume Information"}
_OF_SYSTEMS |= {"lost+found", "__MACOSX", "Temporary Items"}
_BESIDE = (".txt", ".csv", ".json", ".xml", ".md", ".db", ".ini")  # may lie beside images
_GRAY, _COLOUR = "gray", "colour"
_GRAY_MODES = {"1", "L", "LA"}  # in Pillow's terms
_KINDS = {"I": "16 bit", "F": "float"}  # by the first letter of other modes
_RANGES = {"16 bit": (0.0, 65535.0), "float": (0.0, 1.0)}  # values that become 0 and 255
_TURNED = "images turned upright as their EXIF orientation says"
_PAGED = "files have several pages, of which only the first is read"
_CLEAR = "images with an alpha channel are laid on white"
_BANDS = "images have more than three bands, of which the first three are read"
_UNWINDOWED = (
    "DICOM images have no window, so that the range of each becomes 0..255: with "
    "dataset.intensity=[low,high] all are read alike"
)
_TOLD = (_TURNED, _PAGED, _CLEAR, _BANDS, _UNWINDOWED)
_BEYOND = 1e12  # above all intensities
_PART = re.compile(r"(train|test)(ing)?([ _-]?(set|data|images))?", re.I)
_VALIDATION = {"val", "valid", "validation", "eval", "dev"}
_MASK = re.compile(
    r"(?i)[ _.-]+(masks?|seg(mentation)?|gt|anno(tation)?|label|lesion|overlay)(?![^\W\d_])"
)
_MASK_FOLDERS = {"masks", "ground_truth"}
_MOST_NAMED = 20
_LARGE, _AT_ONCE = 4096, 64  # bytes of a large image, and images that are opened ahead of time
_FEWEST = 10  # files of each form, about, from which on the form may predict a label

Form = tuple[tuple[int, ...], tuple[str, ...], str]  # width and height, remarks, and suffix
Source = Callable[[int], tuple[str, bytes]]  # name and content of an encoded image


def source_of(files: Sequence[Path | str]) -> Source:
    """Return the source of images in files; a file that cannot be opened is also broken."""

    def content(index: int) -> tuple[str, bytes]:
        try:
            with open(files[index], "rb", 0) as file:  # noqa: PTH123 (Path takes longer)
                return str(files[index]), file.read()
        except OSError as error:
            return f"{files[index]}: {error.strerror}", b""

    return content


@dataclass(frozen=True)
class Decoded:
    """Images in one form.

    Attributes:
        images: uint8 ``[N, C, H, W]``.
        ids: S32 ``[N]``: the hash of each image's own pixels before it is turned or resized, on
            white where it is transparent. It is the same for a file that was recompressed without
            loss, in any format, and for shades of gray stored as colours.
        rows: int64 ``[N]``: each image's position among the encoded images.
        notes: Sentences about what was done, for people.
        forms: The form of each file.
    """

    images: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    notes: tuple[str, ...]
    forms: list[Form]

    def telling(self, labels: Sequence[int]) -> list[str]:
        """Return a sentence on a property of the files that gives a label away, if there is one."""
        found = []
        for i, what in enumerate(("size", "kind", "suffix")):
            pairs = {(form[i], label) for form, label in zip(self.forms, labels, strict=True)}
            times = Counter(form for form, _ in pairs)
            shared = {label for form, label in pairs if times[form] > 1}
            if 1 < len(times) <= len(labels) / _FEWEST and not shared.issuperset(labels):
                found.append(what)
        said = f"the {listed(found)} of files alone tells a label: save all images alike"
        return [said] if found else []


def decode_images(settings: EncodedImages, count: int, source: Source) -> Decoded:
    """Return ``count`` encoded images in the one form that the settings define.

    Raises:
        ConfigError: Images cannot be read and are not to be skipped, differ in size without
            ``image_size``, or do not fit into memory; or none is left and their form is not given.
    """
    side, channels = settings.image_size, settings.channels
    if settings.backbone is not None:
        side = load_backbone(settings.backbone, is_mirrored=settings.flip).image_size
    # if their form is given, no record decides whether images fit into memory
    images = _room(count if side and channels else 0, channels or 1, side or 1, side or 1)
    ids: list[str] = []
    rows: list[int] = []
    broken: dict[str, list[str]] = {}  # names by reason
    forms: list[Form] = []
    ends: list[float] = []  # least and largest values, of images refused for these and of others
    spans: list[float] = []

    def opened(i: int) -> tuple[str, Any]:
        """Return a name with size, image, id and remarks, or with the reason why it is broken."""
        name, content = source(i)
        try:
            image, pixels, said = _open(content, name, settings.intensity)
        except _BrokenError as error:
            return name, error
        wanted = channels or (3 if _COLOUR in said else 1)
        fitted = _fitted(image, (wanted, *((side, side) if side else image.shape[:2])))
        spans = [] if pixels.dtype == np.uint8 else [pixels.min(), pixels.max()]
        return name, (image.shape[1::-1], wanted, fitted, record_id(_own(pixels)), said, spans)

    for i, (name, found) in enumerate(_in_turn(opened, count, source)):
        if isinstance(found, _BrokenError):
            broken.setdefault(str(found), []).append(name)
            ends += found.ends
            continue
        size, wanted, fitted, own_id, said, of_pixels = found
        forms.append((size, tuple(said), os.path.splitext(name)[1].lower()))
        spans += of_pixels
        if len(images) == 0 or wanted > images.shape[1]:
            width, height = (side, side) if side else forms[0][0]
            of_one_form = _room(count, wanted, height, width)
            of_one_form[: len(rows)] = images[: len(rows)]
            images = of_one_form
        if fitted.shape[-2:] == images.shape[2:]:  # else an error lists their sizes
            images[len(rows)] = fitted
        ids.append(own_id)
        rows.append(i)
    sizes = Counter(size for size, *_ in forms)
    kinds = Counter(fact for _, facts, _ in forms for fact in facts)
    if side is None and len(sizes) > 1:
        raise ConfigError(
            f"the images have {len(sizes)} different sizes ({_listed_sizes(sizes)}): set "
            "dataset.image_size."
        )
    texts = (f"{listed(names, 5)} ({reason})" for reason, names in broken.items())
    named, number = listed(texts, _MOST_NAMED), count - len(rows)
    if (broken and settings.corrupt != "skip") or (not rows and None in (side, channels)):
        cure = "repair or remove them, or set dataset.corrupt=skip" if rows else "repair them"
        if ends:
            low, high = min(ends + spans), max(ends + spans)
            cure = f"set dataset.intensity=[{low:g},{high:g}] or a narrower range"
        raise ConfigError(f"{number} of {count} files cannot be read as an image: {named}: {cure}.")
    notes = []
    if broken:
        notes = [f"{number} broken images left out: {named}; {number / count:.1%} of {count:,}"]
    del sizes[side or 0, side or 0]  # images of this size were not resized
    if side is not None and sizes:
        notes.append(f"resized to {side}x{side} (bilinear) from {_listed_sizes(sizes)}")
    for kind, usual in _RANGES.items():
        if kinds[kind]:
            low, high = settings.intensity or usual
            held = f", of which they hold {min(spans):g}..{max(spans):g}"
            notes.append(f"{kinds[kind]} {kind} images: {low:g}..{high:g} become 0..255{held}")
    shades = {_GRAY: sum(kinds[kind] for kind in (_GRAY, *_RANGES)), _COLOUR: kinds[_COLOUR]}
    become = _GRAY if images.shape[1] == 1 else _COLOUR
    if any(number for kind, number in shades.items() if kind != become):
        words = " and ".join(f"{number} {kind}" for kind, number in shades.items() if number)
        notes.append(f"{words} images: all become {become}")
    notes += [f"{kinds[words]} {words}" for words in _TOLD if kinds[words]]
    arrays = images[: len(rows)], np.array(ids, ID), np.array(rows, np.int64)
    return Decoded(*arrays, tuple(notes), forms)


def _in_turn(opened: Callable[[int], Any], count: int, source: Source) -> Iterator[Any]:
    """Yield the result for each image, in order; large images are opened in parallel."""
    threads = cores() if count and len(source(0)[1]) > _LARGE else 1
    if threads == 1:  # small images take longer to hand over than to open
        yield from map(opened, range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, count, _AT_ONCE):
            yield from pool.map(opened, range(count)[first : first + _AT_ONCE])


def _room(count: int, channels: int, height: int, width: int) -> np.ndarray:
    """Return memory for images; ConfigError if there is too little."""
    check_fits(
        count * channels * height * width,
        f"{count} images of {channels}x{height}x{width} pixels",
        "set a smaller dataset.image_size",
    )
    return np.empty((count, channels, height, width), dtype=np.uint8)


def decode_like(
    content: bytes, name: str, shape: Sequence[int], intensity: Sequence[float] = ()
) -> np.ndarray:
    """Return an encoded image as uint8 of the ``shape`` ``(C, H, W)``, resized as in training.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        image, *_ = _open(content, name, intensity)
    except _BrokenError as error:
        raise ConfigError(f"{name} cannot be read as an image: {error}.") from error
    return np.broadcast_to(_fitted(image, shape), shape)


class _BrokenError(Exception):
    """An image that cannot be read; has its least and largest value if they are the reason."""

    ends: Sequence[float] = ()


def _open(
    content: bytes, name: str, intensity: Sequence[float] | None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return an upright image, its own pixels, and remarks about its file.

    The image is uint8 ``[H, W]`` or ``[H, W, 3]``; its own pixels are those in the file, on white
    where it is transparent.
    """
    from PIL import Image, ImageOps

    try:
        if name.lower().endswith(_DICOM) or content[128:132] == b"DICM":
            pixels, said = _dicom(content, intensity)
            return pixels, pixels, [_GRAY if pixels.ndim == 2 else _COLOUR, *said]
        with Image.open(io.BytesIO(content)) as opened:
            turned = opened.getexif().get(_ORIENTATION, 1) in range(2, 9)
            tags = getattr(opened, "tag_v2", {})  # of a TIFF
            is_clear = opened.mode in ("LA", "RGBA", "PA") or "transparency" in opened.info
            bands = opened.getbands()
            facts = {
                _TURNED: turned,
                _PAGED: getattr(opened, "n_frames", 1) > 1,
                _CLEAR: is_clear,
                _BANDS: tags.get(_SAMPLES, 1) > max(3, len(bands)),
            }
            said = [fact for fact, is_so in facts.items() if is_so]
            if opened.mode == "L" and tags.get(_FORMAT, (1,)) == (2,):
                raise _BrokenError("it holds signed numbers of 8 bits: save 16 bits")
            kind = _KINDS.get(opened.mode[0], _GRAY if opened.mode in _GRAY_MODES else _COLOUR)
            if kind in _RANGES:
                pixels = np.asarray(opened)
                if pixels.dtype == np.uint16 and tags.get(_WHITE) == 0:
                    pixels = ~pixels
                shown = _shades(pixels, intensity, _RANGES[kind])
            else:
                image: Image.Image = opened
                if is_clear:
                    image = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
                mode = "L" if kind == _GRAY else "RGB"
                shown = pixels = np.asarray(image if image.mode == mode else image.convert(mode))
            left = opened.getexif().get(_ORIENTATION, 1)  # 1 if Pillow has turned it, as TIFF
            if turned and left != 1:
                image = Image.fromarray(shown)
                image.getexif()[_ORIENTATION] = left
                shown = np.asarray(ImageOps.exif_transpose(image))
    except _BrokenError:
        raise
    except Exception as error:  # a broken file can raise anything in a parser of many formats
        reason = " ".join(str(error).split())  # without the address of the bytes that were read
        if "cannot identify" in reason:
            is_tiff = content[:4] in (b"II*\0", b"MM\0*")
            reason = f"of no {'kind of TIFF that is read' if is_tiff else 'known image format'}"
        raise _BrokenError(reason) from error
    return shown, pixels, [kind, *said]


def _own(pixels: np.ndarray) -> bytes:
    """Return an image's own pixels channel by channel, or one channel if all are equal."""
    if pixels.ndim == 2:
        return pixels.tobytes()
    first, *others = (pixels[..., channel].tobytes() for channel in range(pixels.shape[2]))
    return first if others == [first] * 2 else b"".join([first, *others])


_ORIENTATION, _SAMPLES, _FORMAT, _WHITE = 0x0112, 0x0115, 0x0153, 0x0106  # tags of EXIF and TIFF


def _shades(
    values: np.ndarray, intensity: Sequence[float] | None, usual: tuple[float, float]
) -> np.ndarray:
    """Return uint8, 0 and 255 at the ends of a range; only a given range may be exceeded."""
    low, high = intensity or usual
    least, most = values.min(), values.max()
    if np.isnan(least):
        raise _BrokenError("it holds pixels that are no numbers")
    if not intensity and not low <= least <= most <= high:
        error = _BrokenError(f"values beyond {low:g} to {high:g}")
        error.ends = least, most
        raise error
    shares = (values.astype(np.float64) - low) / ((high - low) or 1.0)
    return np.rint(np.clip(shares, 0, 1) * 255).astype(np.uint8)


def _dicom(content: bytes, intensity: Sequence[float] | None) -> tuple[np.ndarray, list[str]]:
    """Return a DICOM image as its own window shows it, and remarks about it.

    It is uint8 ``[H, W]``, with black 0 and white 255, or in colour ``[H, W, 3]``. A given range of
    intensities, such as Hounsfield units, replaces the window.
    """
    try:
        import pydicom
        from pydicom.pixels import processing
    except ImportError as error:
        raise _BrokenError("DICOM needs pydicom: install fednas_flwr[dicom] with pip") from error
    opened = pydicom.dcmread(io.BytesIO(content))
    values, kind = opened.pixel_array, opened.get("PhotometricInterpretation")
    if kind == "PALETTE COLOR":
        values = processing.apply_color_lut(values, opened)[..., :3]
    if values.ndim == 3 and (kind == "PALETTE COLOR" or opened.SamplesPerPixel == 3):
        bits = 8 * values.itemsize if kind == "PALETTE COLOR" else opened.BitsStored
        return (values >> max(0, bits - 8)).astype(np.uint8), []
    if values.ndim != 2:
        raise _BrokenError(
            f"one image was expected, got shape {values.shape}: save frames as images"
        )
    values = processing.apply_modality_lut(values, opened)
    said: list[str] = []
    ends = values
    has_table = "VOILUTSequence" in opened
    if not intensity and not has_table and not opened.get("WindowWidth"):  # nor if empty or 0
        said = [_UNWINDOWED]
    elif not intensity:
        values = ends = processing.apply_voi_lut(values, opened)
        if not has_table:
            with np.errstate(over="ignore"):  # in a sigmoid
                ends = processing.apply_windowing(np.array([-_BEYOND, _BEYOND]), opened)
    pixels = _shades(values, intensity, (ends.min(), ends.max()))
    return 255 - pixels if kind == "MONOCHROME1" else pixels, said  # where 0 is white


def _fitted(image: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return an image as uint8 ``[C, H, W]``, or ``[H, W]``, resized if its size differs."""
    channels, height, width = shape
    if image.shape == (height, width):
        return image
    if channels == 1 or image.shape != (height, width, 3):
        from PIL import Image

        fitted = Image.fromarray(image).convert("L" if channels == 1 else "RGB")
        if fitted.size != (width, height):
            fitted = fitted.resize((width, height), Image.Resampling.BILINEAR)
        image = np.asarray(fitted)
    return image.reshape(height, width, channels).transpose(2, 0, 1)


def _listed_sizes(sizes: Counter[tuple[int, ...]]) -> str:
    return listed((f"{w}x{h}: {number}" for (w, h), number in sizes.most_common()), 5)


def part_folders(root: Path, *, classes: bool = False) -> tuple[Path, Path | None]:
    """Return the folders of the train and test parts; a root without ``train`` is the train part.

    Names such as ``Training`` and ``test_set``, in any case of letters, are also found.

    Args:
        root: The folder.
        classes: True if ``train`` is a class where it has images but no folders of images, and
            there are other such folders beside it.
    """
    paths = [path for path in sorted(root.iterdir()) if path.is_dir()]
    folders = {part[1].lower(): path for path in paths if (part := _PART.fullmatch(path.name))}
    if classes and "train" in folders and "test" not in folders:
        depths = {at[0]: len(at) for at in image_folders(root) if at}  # the deepest of each
        is_class = depths.pop(folders["train"].name, 0) == 1 in depths.values()
        is_class = is_class and not {name.lower() for name in depths} <= _VALIDATION
        folders = {} if is_class else folders
    return (folders["train"], folders.get("test")) if "train" in folders else (root, None)


def is_hidden(name: str, beginnings: str = "._") -> bool:
    """Return true if a file or folder is not the user's, by its name or how the name begins."""
    return name[0] in beginnings or name in _OF_SYSTEMS | _OF_STORAGE


def sites_in(root: Path, endings: Sequence[str]) -> dict[str, Path]:
    """Return the files of sites in a folder, by the name of the site; the ending ``/`` is a folder.

    Raises:
        ConfigError: There are none, or two have the same name.
    """
    found = []
    for path in sorted(root.iterdir()):
        name = path.name + "/" * path.is_dir()
        end = next((end for end in endings if name.lower().endswith(end)), "")
        if end and not is_hidden(path.name, "._~"):
            found.append((name[: -len(end)], path))
    sites = dict(found)
    if len(sites) < max(1, len(found)):
        names = listed([path.name for _, path in found]) or "nothing of this kind"
        expected = f"{listed(endings)}, each of another name".replace("/", "folders")
        raise ConfigError(f"dataset.root={root} holds {names}: expected {expected}.")
    return sites


def beside(root: Path, read: Iterable[Path], advice: str) -> tuple[str, ...]:
    """Return a sentence on the contents of a folder that are not read, if there are any."""
    others = sorted({*root.iterdir()}.difference(read))
    names = [path.name for path in others if not is_hidden(path.name, "._~")]
    return (f"{listed(names, 5)} in {root} left out: {advice}",) if names else ()


def image_folders(root: Path, *, hidden: bool = False) -> dict[tuple[str, ...], list[str]]:
    """Return the names of images in a folder, by the path of their sub-folder, both sorted.

    Args:
        root: The folder.
        hidden: True if folders and files that begin with an underscore count.
    """
    beginnings = "." if hidden else "._"
    found: dict[tuple[str, ...], list[str]] = {}
    for folder, folders, names in walk(root):
        folders[:] = [name for name in folders if not is_hidden(name, beginnings)]
        named = [n for n in (*names, *folders) if n.lower().endswith(SUFFIXES)]
        if images := sorted(name for name in named if not is_hidden(name, beginnings)):
            found[Path(folder).relative_to(root).parts] = images
    return dict(sorted(found.items()))


def other_files(root: Path) -> list[str]:
    """Return sentences on files without an image's suffix and on hidden folders of images."""
    others: Counter[str] = Counter()
    for _, folders, names in walk(root):
        folders[:] = [name for name in folders if not is_hidden(name)]
        known = (*SUFFIXES, *_BESIDE)
        more = [n for n in names if not is_hidden(n) and not n.lower().endswith(known)]
        others.update(Path(name).suffix.lower() or "no suffix" for name in more)
    listing = listed(f"{suffix}: {number}" for suffix, number in others.most_common())
    said = [f"{others.total()} files are not read as images ({listing})"] if others else []
    for at in sorted(root.glob(".*/")):  # of a class, unlike those of tools, it has images itself
        if any(name.lower().endswith(SUFFIXES) for name in next(walk(at), ("", [], []))[2]):
            said.append(f"the folder {at.name} is left out for its dot: rename it")
    return said


def masks_in(places: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a sentence on images whose names or folders suggest masks, if there are any."""
    stems = {os.path.splitext(place[-1])[0] for place in places}
    masks = []
    for *folders, name in places:
        beside = any(name[: word.start()] in stems for word in _MASK.finditer(name))
        if beside or _MASK_FOLDERS.intersection(map(str.lower, folders)):
            masks.append(name)
    return [f"{len(masks)} images such as {masks[0]} may be masks: remove them"] if masks else []


def image_files(root: Path) -> list[Path]:
    """Return all images in a folder and its sub-folders, by path."""
    files = [root.joinpath(*at, n) for at, names in image_folders(root).items() for n in names]
    return sorted(files, key=lambda path: path.parts)

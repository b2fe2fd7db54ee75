"""Readers of image sets: scikit-learn's digits, torchvision's, folders, and labels in a table.

Images become uint8 ``[N, C, H, W]``; nothing is normalised here. In a table of labels the first
column names the files. As in any table, a record has a class or several labels, and a column may
name the person of each image.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path, PureWindowsPath
from typing import Any
from unicodedata import normalize

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.data import decoding, records, table_files, tables
from fednas_flwr.data.notation import Cells, number_of
from fednas_flwr.data.records import Column, Records, RecordsPair
from fednas_flwr.settings import data_settings as ds
from fednas_flwr.settings.names import TORCHVISION_SETS


def read_digits(settings: ds.Images, path: Path) -> RecordsPair:
    """Return scikit-learn's 1,797 real digits, ``[1, 8, 8]``, with 0..16 rescaled to 0..255."""
    of_sklearn = distribution("scikit-learn")  # read as a file: importing it takes a second
    file = of_sklearn.locate_file("sklearn/datasets/data/digits.csv.gz")
    *pixels, classes = np.loadtxt(str(file), delimiter=",").T
    images = np.rint(np.stack(pixels, 1).reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    return records_from_arrays(images, classes.astype(np.int64), tuple("0123456789")), None


def read_torchvision(
    settings: ds.Torchvision, root: Path, *, download: bool = False
) -> RecordsPair:
    """Return the official train and test parts of a data set of torchvision.

    Args:
        settings: Settings whose name is a key of ``TORCHVISION_SETS``.
        root: The folder that torchvision calls root.
        download: True if missing files may be downloaded.

    Raises:
        ConfigError: The files are not there and may not be downloaded, or the download fails.
    """
    from torchvision import datasets

    class_name, folder = TORCHVISION_SETS[settings.name]
    parts = []
    for train in (True, False):
        try:
            source = getattr(datasets, class_name)(root, train=train, download=download)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"dataset={settings.name} cannot be read from {root / folder}: give "
                f"dataset.root=<folder that holds {folder}, its files unpacked> or "
                f"dataset.download=true ({error})."
            ) from error
        images = np.asarray(source.data)
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        parts.append(records_from_arrays(images, np.asarray(source.targets), tuple(source.classes)))
    return parts[0], parts[1]


def read_image_folder(settings: ds.ImageFolder, root: Path) -> RecordsPair:
    """Return images of one folder per class.

    ``corrupt=skip`` also leaves out images that are in no class's or no person's folder.

    Args:
        settings: Settings of the images. Without ``class_names`` the classes are the sorted names
            of the train folders; ``channels`` of the test part are those of the train part.
        root: Folder with ``train/<class>/`` and optionally ``test/<class>/``, or ``<class>/``.

    Raises:
        ConfigError: There are no images, an unreadable one, a folder that is no class, different
            sizes, or an image that is not in a person's folder.
    """
    parts = decoding.part_folders(root, classes=settings.corrupt != "skip")
    if not settings.class_names:
        names = [path.name for path in parts[0].iterdir() if path.is_dir()]
        names = sorted(name for name in names if not decoding.is_hidden(name))
        settings = replace(settings, class_names=names)
    train, test = _read_parts(settings, parts, _read_classes)
    if parts[0] != root:
        inside = {part.name for part in parts if part}
        found = decoding.image_folders(root, hidden=True)
        others = {at: names for at, names in found.items() if not inside & {*at[:1]}}
        train = replace(train, notes=(*train.notes, *_left_out(others)))
    return train, test


def _left_out(images: Mapping[tuple[str, ...], Sequence[str]]) -> list[str]:
    """Return a sentence on images that are not read, by their folders, if there are any."""
    by_folder = Counter({"/".join(at) or ".": len(names) for at, names in images.items()})
    places = listed(f"{name}: {number}" for name, number in by_folder.most_common())
    left_out = f"{by_folder.total()} images in other folders are left out ({places})"
    return [left_out] if by_folder else []


def _read_parts(
    settings: Any, parts: tuple[Path, Path | None], read: Callable[[Any, Path], Records]
) -> RecordsPair:
    """Return the train and test parts in two folders; test has train's channels and classes."""
    train_root, test_root = parts
    train = read(settings, train_root)
    if test_root is None:
        return train, None
    labels = tables.known_labels(settings, train)
    settings = replace(settings, channels=train.features.shape[1], **labels)
    return train, read(settings, test_root)


def _read_classes(settings: ds.ImageFolder, folder: Path) -> Records:
    """Return the images of the classes' folders in one folder."""
    names, id_column = tuple(settings.class_names), settings.id_column
    found = decoding.image_folders(folder, hidden=True)
    visible = [at for at in found if at and not any(name[0] == "_" for name in at)]
    depth, form = 1, "<class>/<image>.png"
    if id_column is not None:
        depth, form = 2, "<class>/<person>/<image>.png"
    read = [at for at in visible if len(at) == depth]
    stray = [at for at in visible if len(at) < depth]
    if settings.corrupt == "skip":
        images = [(at, name) for at in read + stray for name in found[at]]
        of_none = [at[0] not in names or len(at) != depth for at, _ in images]
        rows, notes = records.readable(
            {"a folder of no class or no person": np.array(of_none, dtype=bool)}
        )
        images = [images[i] for i in rows]
    elif not read:
        cure = "dataset.root is the folder above the classes, or above train and test with them, "
        cure += "dataset.id_column=patient has <class>/<patient>/<image>.png, "
        cure += "and partition=sites <site>/<class>/<image>.png"
        others = [*_left_out(found), *decoding.other_files(folder), *([cure] if found else ())]
        raise ConfigError(f"{folder} has no images: {'; '.join([f'expected {form}', *others])}.")
    elif stray:
        path = folder.joinpath(*stray[0], found[stray[0]][0])
        raise ConfigError(f"{path} is in no person's folder: with id_column expected {form}.")
    else:
        images = [(at, name) for at in read for name in found[at]]
        left_out = {at: names for at, names in found.items() if at not in read}
        masks = decoding.masks_in([(*at, name) for at, name in images])
        notes = (*_left_out(left_out), *decoding.other_files(folder), *masks)
    labels = records.encode_labels(Cells(at[0] for at, _ in images), names, where=str(folder))
    persons = {}
    if id_column is not None:
        persons = {id_column: np.array([at[1] for at, _ in images], dtype=np.str_)}
    ids = [np.array([*map(records.text_id, of.tolist())], records.ID) for of in persons.values()]
    source = decoding.source_of(["/".join((str(folder), *at, name)) for at, name in images])
    decoded = decoded_fields(settings, source, labels, notes, persons, *ids)
    return Records(**decoded, class_names=names, id_column=id_column or "")


def decoded_fields(
    settings: ds.EncodedImages,
    source: decoding.Source,
    labels: torch.Tensor,
    notes: Sequence[str],
    columns: Mapping[str, np.ndarray],
    ids: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return the fields of records of encoded images, without those that cannot be decoded.

    Args:
        settings: Settings of decoding.
        source: Source of as many images as there are labels.
        labels: Labels of all images, see :class:`Records`.
        notes: Earlier notes, see :class:`Records`.
        columns: Columns of all images, see :class:`Records`.
        ids: Ids of all images; None for the hashes of their pixels.
    """
    decoded = decoding.decode_images(settings, len(labels), source)
    rows = decoded.rows
    if labels.dim() == 1 and settings.corrupt != "skip" and not labels.is_floating_point():
        notes = (*notes, *decoded.telling(labels.tolist()))
    return {
        "features": torch.from_numpy(decoded.images),
        "labels": labels[torch.from_numpy(rows)],
        "ids": decoded.ids if ids is None else ids[rows],
        "columns": {name: cells[rows] for name, cells in columns.items()},
        "notes": (*notes, *decoded.notes),
    }


def records_from_arrays(
    features: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...]
) -> Records:
    """Return records with labels [N] or [N, L]; ids are hashes of pixels or a table's numbers."""
    features = np.ascontiguousarray(features)
    is_table = features.ndim == 2
    num_features = features.shape[1] if is_table else 0
    ids = records.record_ids(
        row.tobytes() for row in (records.canonical(features) if is_table else features)
    )
    return Records(
        features=torch.from_numpy(features),
        labels=torch.from_numpy(labels.astype(np.int64)),
        ids=ids,
        class_names=class_names,
        schema=tuple(Column(f"x{i}") for i in range(num_features)),
    )


def read_labelled_images(settings: ds.LabelledImages, root: Path) -> RecordsPair:
    """Return images in a folder, labelled by a table.

    ``corrupt=skip`` also leaves out rows whose image is missing.

    Args:
        settings: Settings of the images; ``channels`` of the test part are those of the train part.
        root: Folder with the labels file and images, also in sub-folders; or with ``train`` and
            optionally ``test``, each with its own.

    Raises:
        ConfigError: The table does not fit the settings, or names a missing file or one file twice;
            or an image cannot be read.
    """
    parts, file = decoding.part_folders(root), settings.labels_file
    is_whole = (root / file).is_file() and not (parts[0] / file).is_file()
    return _read_parts(settings, (root, None) if is_whole else parts, _read_labelled)


def labels_texts(
    path: Path, form: ds.TableForm, *, whole: bool = True, target: str | None = None
) -> tuple[table_files.Texts, list[str], ds.TableForm, list[str]]:
    """Return the cells of a labels file in common form, notes, its form, and its doubtful columns.

    Its first line is the header. Doubtful columns have a word that may mean missing, see
    :func:`table_files.without_missing`.

    Args:
        path: Path of the file.
        form: Format of the file; unknown signs of numbers are found in it.
        whole: False if columns that the form renames may be missing.
        target: Column of numbers to predict, ``last`` for the last column; None if there is none.
    """
    as_set = form.header
    form = replace(form, header=as_set or not form.column_names or None)
    texts, sign, found = table_files.read_texts(path, form)
    if whole:
        table_files.check_columns(texts, [*form.rename], where=str(path))
    texts, doubtful = table_files.without_missing(texts, form)
    if target in ("", "last"):
        target = [*(texts if form.strict else with_names_first(texts, path)[0])][-1]
    numbers = [target] if target in texts else []
    dates = () if numbers and not form.strict else None
    where = str(path)
    texts, form, more = table_files.in_common_form(texts, form, numbers, dates, sign, where=where)
    return texts, found + more, replace(form, header=as_set), doubtful


def with_names_first(texts: table_files.Texts, path: Path) -> tuple[table_files.Texts, list[str]]:
    """Return the columns of a labels file, with the one that names the images first.

    A column of file names is preferred. A column that counts the rows and names no images is left
    out.
    """
    others, notes = tables.without_row_numbers(texts)
    leading = next(iter(others))
    files = [name for name, cells in others.items() if _are_files(cells)]
    named = [name for name in others if not (files and texts[name].are_plain)]  # numbers are labels
    likely = [*files, *(name for name in named if name == leading)]
    first = next((n for n in likely if _names_images({n: texts[n]}, path)), None)
    if first is None:
        names = [name for name in named if _names_images({name: texts[name]}, path)]
        once = [name for name in names if len(texts[name].different) == len(texts[name])]
        first = next(iter(once or names or files), None)
    if first is None:
        return (texts, []) if notes and _names_images(texts, path) else (others, notes)
    if first != leading:
        notes.append(f"column {first} names the images")
    return {first: texts[first], **others}, notes


def _are_files(cells: Cells) -> bool:
    suffixed = [text.lower().endswith(decoding.SUFFIXES) for text in cells.different]
    return bool(suffixed) and all(suffixed)


def _names_images(texts: table_files.Texts, path: Path) -> bool:
    with suppress(ConfigError):
        return len(files_of(texts, path)) > 0
    return False


def files_of(texts: table_files.Texts, path: Path, *, skip: bool = False) -> dict[int, Path]:
    """Return the images of a labels file by their rows, from 0.

    Args:
        texts: Its columns; the first has paths or names, with or without suffixes.
        path: Path of the file; images are searched in its folder.
        skip: True if rows may lack an image.

    Raises:
        ConfigError: Images are missing, or cannot be distinguished by their names.
    """
    column = next(iter(texts))
    files = decoding.image_files(path.parent)
    # signs such as é may be one or two characters
    paths = {Path(normalize("NFC", str(f.relative_to(path.parent)))): f for f in files}
    if len(paths) < len(files):  # which differ in this alone
        paths = {f.relative_to(path.parent): f for f in files}
    cut = {p: p if skip else p.with_suffix("") for p in paths}  # also without suffixes
    names = {file: {p.name, cut[p].name, cut[p].as_posix()} for p, file in paths.items()}
    times = Counter(name for of in names.values() for name in of)
    known = {name: file for file, of in names.items() for name in of if times[name] == 1}
    # paths may begin with the folder's own name, as in CheXpert
    known |= {f"{path.parent.name}/{p.as_posix()}": file for p, file in paths.items()}
    known |= {p.as_posix(): file for p, file in paths.items()}
    known |= {normalize("NFC", file.as_posix()): file for file in files}
    written = (normalize("NFC", text) for text in texts[column].tolist())
    cells = [text and PureWindowsPath(text).as_posix() for text in written]
    missing = [cell or "an empty cell" for cell in cells if cell not in known]
    if skip:  # the meaning of a shared name would change with one of its images
        missing = [cell for cell in cells if times[cell] > 1]
    if missing:
        raise ConfigError(
            f"{path}, column {column}, names {len(missing)} of {len(cells)} images that are not in "
            f"{path.parent}, or share their names with others: {listed(missing, 5)}; "
            "give paths from that folder on, and remove rows without an image."
        )
    return {row: known[cell] for row, cell in enumerate(cells) if cell in known}


def _check_uncertain(settings: ds.LabelledImages, texts: table_files.Texts, path: Path) -> None:
    """Refuse a class -1 beside 0 and 1 or blanks, which means "uncertain" in labels of X-rays."""
    label, cells = settings.label, texts[settings.label]
    codes = dict(zip(map(number_of, cells.different), cells.different, strict=True))
    clear = 0 not in codes and not cells.missing.any()
    said = settings.class_names or settings.is_regression
    if said or clear or -1 not in codes or not codes.keys() <= {-1, 0, 1}:
        return
    name, mark = table_files.typed(label), codes[-1]
    classes = [codes[code] for code in sorted(codes)]
    alike = [n for n, of in texts.items() if {*of.numbers[~of.missing]} <= {-1, 0, 1}]
    several = f", or, if each column is a label, dataset.labels=[{','.join(alike)}]"
    raise ConfigError(
        f"{path}, column {label}, holds {table_files.counted(cells)}: if {mark} means uncertain, "
        f"set {tables.respelling({label: [mark]})}, with 1 where it counts as yes, or leave such "
        f"rows out by 'dataset.missing_in={{{name}: [{mark}]}}'; if it is a class, set "
        f"dataset.class_names=[{','.join(classes)}]{several if len(alike) > 1 else ''}."
    )


def _read_labelled(settings: ds.LabelledImages, folder: Path) -> Records:
    """Return the images that the labels file in a folder names."""
    path = folder / settings.labels_file
    if not path.is_file():
        raise ConfigError(f"dataset.labels_file: {path} does not exist: correct its name.")
    skip, form = settings.strict, tables.form_of(settings)
    # UTF-8 at private sites: an encoding found in the rows would depend on all of them
    encoding = form.encoding or ("utf-8-sig" if skip else None)
    target = settings.label if settings.is_regression else None
    form = replace(form, encoding=encoding)
    texts, found, form, doubtful = labels_texts(path, form, target=target)
    signs = table_files.notation_of(form) if skip else form
    settings = replace(settings, decimal=signs.decimal, thousands=signs.thousands)
    if not skip:
        texts, more = with_names_first(texts, path)
        found += more
    notes = tables.found_in(path, found)
    is_said = settings.names_label or settings.labels
    settings = replace(settings, label=tables.label_column(settings, texts))
    columns, named = tables.label_columns(settings), tables.named_columns(settings)
    adapted = [*settings.missing_in, *settings.map, *settings.scale]
    table_files.check_columns(texts, [*named, *adapted], where=str(path))
    if (first := next(iter(texts))) in named:
        raise ConfigError(
            f"{path} begins with the column {first}, which is to name the images: put the column "
            "with the files' names first."
        )
    if first.lower().endswith(decoding.SUFFIXES) and not skip:
        raise ConfigError(f"{path} begins with the image {first}: give it a first line of names.")
    paths = files_of(texts, path, skip=skip)
    others = len(decoding.image_files(path.parent)) - len({*paths.values()})
    if skip:
        wrong = tables.unreadable_cells(settings, texts, ())
        wrong[first] = np.array([row not in paths for row in range(len(texts[first]))], dtype=bool)
        rows, left_out = records.readable(wrong)
        texts, notes = {name: cells[rows] for name, cells in texts.items()}, notes + left_out
        paths = {row: paths[row] for row in rows.tolist()}
    files = list(paths.values())
    if len(set(files)) < len(files) and not skip:
        twice = Counter(files).most_common(1)[0][0]
        raise ConfigError(f"{path} names the image {twice.name} in more than one row: keep one.")
    if not (skip or settings.labels or settings.label_separator):
        texts[first] = Cells(map(str, range(len(files))))  # of no further use
        _check_uncertain(settings, texts, path)
        texts, more = tables.labelled(texts, settings, path, doubtful)
        notes, files = (*notes, *more), [files[int(row)] for row in texts[first].tolist()]
    labels, classes = tables.read_labels(settings, texts, path)
    if others:
        notes = (*notes, f"{others} images that {path.name} does not name are left out")
    ids = None if settings.id_column is None else tables.person_ids(settings, texts, path)
    further = table_files.names_in(texts, [name for name in list(texts)[1:] if name not in columns])
    if further and not is_said:
        notes = (*notes, f"{path.name}: {settings.label} is the label, not {listed(further, 5)}")
    decoded = decoded_fields(settings, decoding.source_of(files), labels, notes, further, ids)
    return tables.labelled_records(settings, **decoded, class_names=classes)

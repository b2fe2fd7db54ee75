"""``fednas data``: what a data set holds, before any run."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.cli.commands import Commands, add_command
from fednas_flwr.settings.configuration import check_names, parse_config
from fednas_flwr.settings.hydra_config import compose_tree, given_settings


def add_commands(commands: Commands) -> None:
    """Add ``data``."""
    parser = add_command(
        commands,
        "data",
        data,
        help="what a data set holds, and how clients would divide it",
        epilog="DATA is a table, an npz file or a folder of images; overrides as of fednas run, "
        "such as clients=5 partition=dirichlet dataset.label=outcome",
        takes_overrides=True,
    )
    parser.add_argument("data", type=Path, help="file or folder of the data")


def data(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print what a data set holds, its division over clients, and suggested settings."""
    from fednas_flwr.data.prepared import make_data
    from fednas_flwr.data.summary import summary

    has_table = any(override.startswith("dataset.labels_file=") for override in overrides)
    name = "labelled_images" if has_table else _data_set(options.data)
    table = ["search_space=mlp_small"] if name == "csv" else []
    given = [f"dataset={name}", f"dataset.root='{options.data.resolve()}'", *table, *overrides]
    tree = compose_tree(given)
    check_names(tree, given_settings(overrides).typed)
    config = parse_config(tree)
    prepared, parts = make_data(config)
    dataset = config.dataset
    key, fractions = dataset.split_key.encode(), dataset.fractions
    for line in summary(prepared, parts, key=key, fractions=fractions):
        print(line)
    return 0


def _data_set(path: Path) -> str:
    """Return the name of the data set that reads a file or folder."""
    from fednas_flwr.data.table_files import suffix_of

    if not path.exists():
        raise ConfigError(f"{path} does not exist: give a table, an npz file or a folder.")
    if path.suffix == ".npz":
        return "npz"
    if suffix_of(path) or (path.is_dir() and any(suffix_of(file) for file in path.iterdir())):
        return "csv"
    if path.is_dir():
        return "image_folder"
    raise ConfigError(f"{path} is no table, npz file or folder of images.")

"""Write the card-fraud table as train.csv.gz and test.csv.gz, for experiment=feathers/fraud.

    python scripts/prepare_fraud.py <creditcard.csv or .csv.gz> <folder>

A public keyed hash of a row's features selects a fifth of the rows as the server's test part: the
same rows in every run and for everybody.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from fednas_flwr.data.records import hash_positions, record_ids

KEY = b"fraud test"
TEST_SHARE = 0.2


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    table = pd.read_csv(options.table, dtype=str)
    rows = table[table.columns[:-1]].to_numpy()
    is_test = hash_positions(record_ids(",".join(row).encode() for row in rows), key=KEY)
    is_test = is_test < TEST_SHARE
    options.folder.mkdir(parents=True, exist_ok=True)
    for part, chosen in (("train", ~is_test), ("test", is_test)):
        path = options.folder / f"{part}.csv.gz"
        part_of = table[chosen]
        part_of.to_csv(path, index=False)
        positives = int((part_of.iloc[:, -1] == "1").sum())
        print(f"{path}: {len(part_of)} rows, {positives} of class 1")


if __name__ == "__main__":
    main()

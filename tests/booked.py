"""What the ledgers of a run's simulated sites hold."""

from contextlib import contextmanager

import pytest

from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.protocol.secure_sum.masks import Grid


def ledger_of(sites, client):
    """Open a client's ledger; ``sites`` is the folder of all clients' books."""
    site = sites / f"client-{client}"
    return Ledger(site / "ledger" / "ledger.sqlite", site / "key")


def booked(sites, client=0):
    """Return what a client has booked, whose ledger is whole."""
    with ledger_of(sites, client) as ledger:
        entries = ledger.entries()
        assert ledger.verify() == len(entries)
    return [row.entry for row in entries]


def promised_steps(event):
    """Return the steps of a schedule that is told, by stage, action with kind, and splits."""
    return {
        (i["stage"], f"{i['action']}:{i['kind']}", tuple(i["splits"])): i["steps"]
        for i in event["schedule"]
    }


@contextmanager
def decoded_totals():
    """Keep the totals with shared noise that secure sums decode inside the block."""
    totals, decode = [], Grid.decode

    def kept(grid, total, *, sites):
        values = decode(grid, total, sites=sites)
        if grid.bits == 32 and len(values) > 1000:
            totals.append(values)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grid, "decode", kept)
        yield totals

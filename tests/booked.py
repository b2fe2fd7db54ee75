"""What the ledgers of a run's simulated sites hold."""

from fednas_flwr.privacy.books.ledger import Ledger


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

"""The promise of a private run, from its ``privacy`` event: the tables of report and model card.

Its sentences are those of ``page/sentences.j2``. An epsilon that is not finite stands as null in
the file; it is shown as infinite and never left out of a maximum. Every epsilon is rounded up.
"""

from collections.abc import Mapping

from fednas_flwr.report.quantities import DASH, epsilon_text
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.numbers import of_splits
from fednas_flwr.settings.names import GDP, PRV, RDP

TEST_SEED = "test seed: no privacy"
ACCOUNTANTS = {PRV: "PRV", RDP: "RDP", GDP: "GDP (approximation, no bound)"}


def is_secure(client: Event) -> bool:
    """Return whether a client draws its noise and samples from a secret that only it knows."""
    return client.get("secure_noise") is True


def release_table(event: Event) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of what clients committed to release, by kind."""
    head = ["stage", "action", "splits", "noise multiplier", "clipping norm"]
    head += ["expected batch", "rate p", "steps, at most"]
    rows = [
        [
            release["stage"],
            release["action"],
            ", ".join(release["splits"]),
            f"{release['noise_multiplier']:g}{' (of the sum)' if release.get('shared') else ''}",
            f"{release['max_grad_norm']:g}",
            "every record" if release["batch_size"] is None else f"{release['batch_size']:,}",
            _rates_text([c["rates"][place] for c in event["clients"] if "rates" in c]),
            f"{release['steps']:,}",
        ]
        for place, release in enumerate(event["schedule"])
    ]
    return head, rows


def client_table(
    event: Event, spent: Mapping[int, float | None]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of what each client is promised.

    Args:
        event: The ``privacy`` event.
        spent: What the clients' filters count as spent; of a client not in it nothing is known.
    """
    clients = event["clients"]
    parts = list(dict.fromkeys(part for client in clients for part in client["records"]))
    splits = [s for s in parts if any(s in (c["epsilon"].get(PRV) or {}) for c in clients)]
    head = ["client", f"{sentence('unit', event)}s: {' / '.join(parts)}"]
    head += [*(f"epsilon, {split} (PRV)" for split in splits), "epsilon (PRV)"]
    head += [f"epsilon, {ACCOUNTANTS[name]}" for name in (RDP, GDP)]
    head += ["delta", "spent of budget (filter)", "noise"]
    rows = []
    for client in clients:
        prv = client["epsilon"].get(PRV) or {}
        budget = client["budget"]
        sizes = [f"{client['records'][p]:,}" if p in client["records"] else DASH for p in parts]
        row = [str(client["client"]), " / ".join(sizes)]
        row += [epsilon_text(prv[split]) if split in prv else DASH for split in splits]
        for name in ACCOUNTANTS:
            known = client["epsilon"].get(name) is not None
            row.append(epsilon_text(of_splits(client, name)) if known else DASH)
        row += [f"{budget['delta']:g}", spent_text(client, spent)]
        row.append("secret" if is_secure(client) else "test seed")
        rows.append(row)
    return head, rows


def spent_text(client: Event, spent: Mapping[int, float | None]) -> str:
    """The part of a client's budget that its filter counts as spent: ``2.90 of 8``."""
    number = client["client"]
    used = epsilon_text(spent[number]) if number in spent else DASH
    return f"{used} of {client['budget']['epsilon']:g}"


def _rates_text(rates: list[float]) -> str:
    """Return the rate of a release, or the range of the clients' rates."""
    if not rates:
        return "not recorded"
    least, largest = (f"{rate:.3g}" for rate in (min(rates), max(rates)))
    return least if least == largest else f"{least} to {largest}"

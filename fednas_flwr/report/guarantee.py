"""The promise of a private run, from its ``privacy`` event: numbers, sentences and table rows.

Report, model card, closing table and live display all take them from here, so that they cannot
promise different things. An epsilon that is not finite stands as null in the file; it is shown as
infinite and never left out of a maximum. Every epsilon is rounded up.
"""

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fednas_flwr.report import templates
from fednas_flwr.report.quantities import DASH
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.numbers import largest, overall
from fednas_flwr.settings.names import CLIENT, GDP, PRV, RDP, RECORD

TEST_SEED = "test seed: no privacy"
ACCOUNTANTS = {PRV: "PRV", RDP: "RDP", GDP: "GDP (approximation, no bound)"}
_MEASURED_BY_CLIENTS = ("train_", "validation_")


def is_noised(metric: str) -> bool:
    """Return whether a round's metric was measured by clients, who add noise in a private run."""
    return metric.startswith(_MEASURED_BY_CLIENTS)


def unit(event: Event) -> str:
    """The unit that every client protects: ``record``, ``person`` or ``client``.

    A person is protected at every client only if each protects persons. Older runs know records.
    """
    units = {str(client.get("unit", RECORD)) for client in event["clients"]}
    return units.pop() if len(units) == 1 else RECORD


def unit_text(event: Event) -> str:
    """Return the unit of privacy in a few words."""
    protected = unit(event)
    return f"per {protected}, {'zeroed out' if protected == CLIENT else 'add/remove'}"


def sampling_text(event: Event) -> str:
    """Return how each step draws what it releases of."""
    return "none" if unit(event) == CLIENT else "Poisson"


def sentence(name: str, **values: object) -> str:
    """One of the sentences of ``page/guarantee.j2``, with its values filled in."""
    return templates.macro("guarantee.j2", name, **values)


def promise_texts(event: Event) -> list[str]:
    """What is protected, how, and how it was counted: a paragraph each."""
    protected = unit(event)
    names = ("protected", "mechanism", "accounting")
    texts = [sentence(name, unit=protected) for name in names]
    if event.get("drawn"):
        texts.append(sentence("drawn", per_round=event["drawn"]["per_round"]))
    if text := uncounted_text(event["clients"]):
        texts.append(text)
    shared = [release["action"] for release in event["schedule"] if release.get("shared")]
    clients = [client for client in event["clients"] if "alone_epsilon" in client]
    if shared and clients:
        costs = {str(place): client["alone_epsilon"] for place, client in enumerate(clients)}
        honest = sorted({client["honest_sites"] for client in clients})
        texts.append(
            sentence(
                "shared",
                actions=" and ".join(dict.fromkeys(shared)),
                honest=" or ".join(map(str, honest)),
                alone=epsilon_text(largest(costs)),
                delta=f"{overall(event)[1]:g}",
            )
        )
    return texts


def uncounted_text(clients: Sequence[Mapping[str, Any]]) -> str:
    """What epsilon leaves out, by what clients say; empty if that is nothing."""
    units = sorted({unit for client in clients for unit in client.get("uncounted", [])})
    return sentence("uncounted", units=" and per ".join(units)) if units else ""


def epsilon_text(epsilon: float | None) -> str:
    """Return an epsilon to three significant digits, rounded up; None is infinite.

    Example:
        >>> epsilon_text(3.1001)
        '3.11'
    """
    if epsilon is None:
        return "∞"
    exact = Decimal(repr(float(epsilon)))
    if not exact:
        return "0"
    step = Decimal(1).scaleb(exact.adjusted() - 2)
    return f"{exact.quantize(step, rounding=ROUND_CEILING):f}"


def overall_text(event: Event) -> str:
    """Return the pair of :func:`overall` with the unit of privacy."""
    epsilon, delta = overall(event)
    return f"({epsilon_text(epsilon)}, {delta:g}) {unit_text(event)}"


def search_text(config: Mapping[str, Any], event: Event | None) -> str:
    """Return whether the search was private and what it alone costs; empty if that is not known.

    Args:
        config: The run's settings; DPNAS' search has three kinds.
        event: The ``privacy`` event, None without privacy.
    """
    if event is not None:
        searches = any(release["stage"] == "search" for release in event["schedule"])
        clients = [client for client in event["clients"] if "search_epsilon" in client]
        if not searches or not clients:  # older runs do not tell
            return ""
        costs = {str(place): client["search_epsilon"] for place, client in enumerate(clients)}
        epsilon, delta = largest(costs), overall(event)[1]
        return (
            f"private: by itself it costs at most ({epsilon_text(epsilon)}, {delta:g}) "
            f"{unit_text(event)}, the largest of the clients; it is part of the run's epsilon"
        )
    algorithm, stages = config.get("algorithm"), config.get("stages") or ["search"]
    if not isinstance(algorithm, dict) or "dp_aware" not in algorithm or "search" not in stages:
        return ""
    aware = algorithm["dp_aware"]
    no_claim = "no claim of privacy: its epsilon is infinite"
    if aware is None:
        return f"without clipping or noise, {no_claim}"
    return (
        f"DP-aware: records' gradients were clipped to {aware['max_grad_norm']:g} and noised with "
        f"multiplier {aware['noise_multiplier']:g} as a regulariser, {no_claim}"
    )


def warning_text(event: Event) -> str:
    """Return a warning that names the clients whose noise others can compute, else nothing."""
    known = [str(client["client"]) for client in event["clients"] if not is_secure(client)]
    if not known:
        return ""
    clients = f"client{'s' if len(known) > 1 else ''} {', '.join(known)}"
    return (
        f"{TEST_SEED.capitalize()}. Noise and sampling of {clients} come from a seed that others "
        f"know, so no epsilon protects the records of {clients}."
    )


def coverage_lines(event: Event) -> list[str]:
    """Return how much of the run each client's budget covers, those that cover all in one line."""
    lines, covering = [], 0
    for client in event["clients"]:
        stages = client.get("covers") or []
        ends = next((stage for stage in stages if stage["rounds"] < stage["of"]), None)
        if ends is not None:
            lines.append(
                f"budget of client {client['client']}: covers {ends['rounds']} of {ends['of']} "
                f"rounds of {ends['stage']}, then the client leaves the run"
            )
        covering += bool(stages) and ends is None
    if covering:
        lines.append(f"budget of {covering} of {len(event['clients'])} clients: covers the run")
    return lines


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
    head = ["client", f"{unit(event)}s: {' / '.join(parts)}"]
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
            epsilons = client["epsilon"].get(name)
            row.append(DASH if epsilons is None else epsilon_text(largest(epsilons)))
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

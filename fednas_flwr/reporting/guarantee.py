"""The promise of a private run, from its ``privacy`` event: numbers, sentences and table rows.

Report, model card, closing table and live display all take them from here, so that they cannot
promise different things. An epsilon that is not finite stands as null in the file; it is shown as
infinite and never left out of a maximum. Every epsilon is rounded up.
"""

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fednas_flwr.names import CLIENT, GDP, PERSON, PRV, RDP, RECORD
from fednas_flwr.reporting.events import Event
from fednas_flwr.reporting.units import DASH

TEST_SEED = "test seed: no privacy"
_PROTECTED = (
    "One {what} of one client: epsilon and delta bound how well anyone who sees what the clients "
    "sent, the server included, can tell whether that {unit} was there. Neighbouring data sets "
    "differ by one {what} of one client, added or removed."
)
_PROTECTED_CLIENT = (
    "All records of one client: epsilon and delta bound how well anyone who sees the totals that "
    "the server sees can tell whether that client's records, or none, were behind its replies. "
    "Neighbouring federations differ in one client, whose updates are replaced by zeros. Who takes "
    "part is no secret."
)
_SEVERAL = " A person with several records is protected less."
_MECHANISM = (
    "Every step draws each {unit} with probability p on its own (Poisson sampling), clips what "
    "each {unit} contributes to a norm, sums, and adds Gaussian noise of the noise multiplier "
    "times that norm. The client does all of it before anything leaves."
)
_MEAN = (
    " A person contributes the mean of their records; of more records than a micro-batch holds, "
    "each step draws some."
)
_MECHANISM_CLIENT = (
    "A client trains without noise, and what that changes in the model is clipped to a norm, as "
    "one contribution. Gaussian noise of the noise multiplier times that norm is in every total "
    "that the server sees. That the server may ask only some of the clients is not counted in "
    "their favour."
)
_ACCOUNTING = (
    "Epsilon is what the schedule that the run committed to costs, together with everything booked "
    "on the same data before, composed per split by the PRV accountant of dp-accounting; {split}, "
    "so the client's epsilon is that of its worst split. Each client holds the "
    "server to that schedule, and a Renyi filter over the client's ledger to the client's budget, "
    "which is also the bound for runs that were chosen after seeing earlier ones."
)
_SHARED = (
    "The noise of {verbs} is shared by secure sums: each client adds 1 / h of its variance, h "
    "being the honest clients among the fewest survivors that its policy allows ({honest}), and "
    "opens no sum of fewer. Epsilon rests on that: on no more of the survivors helping the server "
    "than the policies say, on a roster of the clients' own keys, and on X25519, ChaCha20 and "
    "Ed25519. Against a server that breaks the sums each client's own share is left, with which "
    "this run alone costs at most ({alone}, {delta:g}). All other releases carry each client's "
    "whole noise."
)
_UNCOUNTED = (
    "Sites have also released under budgets other than this run's, per {units}. Where that was of "
    "the same records, epsilon leaves it out."
)
_DRAWN = (
    "A round asks {per_round} of the clients, drawn from the run's seed before its first round. A "
    "client's epsilon counts the rounds that may ask it, and no others. No amplification by this "
    "draw is claimed, since the server knows whom it asks; a client that is asked less often than "
    "another has a smaller epsilon, at the same noise."
)
RESUMED = (
    "The run was resumed: the table of releases holds what was to be released from then on. What "
    "was released before counts as booked before, and a round that was repeated counts twice."
)
NOT_ALL = (
    "Not all of it was released: the run did not reach all of its rounds, or a client left. "
    "Epsilon counts all of it."
)
SIMULATED = (
    "The clients were simulated on one machine: each had a policy and a ledger of its own, "
    "but whoever ran the simulation saw all records."
)
OWN_LEDGERS = (
    "Earlier uses of the same data are not counted: this run made its clients' ledgers. Set "
    "privacy.sites to a folder that keeps them, and every run on the data adds up."
)
GIVEN_GENOTYPE = (
    "The genotype was given: if it was searched on records of these clients, that search's privacy "
    "is not part of this statement."
)
ACCOUNTANTS = {PRV: "PRV", RDP: "RDP", GDP: "GDP (approximation, no bound)"}
_MEASURED_BY_CLIENTS = ("train_", "validation_")


def is_noised(metric: str) -> bool:
    """Return whether a round's metric was measured by clients, who add noise in a private run."""
    return metric.startswith(_MEASURED_BY_CLIENTS)


def unit(event: Event) -> str:
    """Return what every client protects at least one of: ``record``, ``person`` or ``client``.

    A person is protected at every client only if each protects persons. Older runs know records.
    """
    units = {str(client.get("unit", RECORD)) for client in event["clients"]}
    return units.pop() if len(units) == 1 else RECORD


def unit_text(event: Event) -> str:
    """Return the unit of privacy in a few words."""
    own = unit(event)
    return f"per {own}, {'zeroed out' if own == CLIENT else 'add/remove'}"


def sampling_text(event: Event) -> str:
    """Return how each step draws what it releases of."""
    return "none" if unit(event) == CLIENT else "Poisson"


def promise_texts(event: Event) -> list[str]:
    """Return what is protected, how, and how it was counted: a paragraph each."""
    own = unit(event)
    what = "person with all records" if own == PERSON else RECORD
    split = f"a {own} lies in one split"
    texts = [
        _PROTECTED.format(what=what, unit=own) + ("" if own == PERSON else _SEVERAL),
        _MECHANISM.format(unit=own) + (_MEAN if own == PERSON else ""),
    ]
    if own == CLIENT:
        texts, split = [_PROTECTED_CLIENT, _MECHANISM_CLIENT], "each release is charged to all"
    texts.append(_ACCOUNTING.format(split=split))
    if event.get("drawn"):
        texts.append(_DRAWN.format(per_round=event["drawn"]["per_round"]))
    if text := uncounted_text(event["clients"]):
        texts.append(text)
    shared = [release["verb"] for release in event["schedule"] if release.get("shared")]
    told = [client for client in event["clients"] if "alone_epsilon" in client]
    if shared and told:
        alone = largest({str(place): client["alone_epsilon"] for place, client in enumerate(told)})
        honest = sorted({client["honest_sites"] for client in told})
        texts.append(
            _SHARED.format(
                verbs=" and ".join(dict.fromkeys(shared)),
                honest=" or ".join(map(str, honest)),
                alone=epsilon_text(alone),
                delta=overall(event)[1],
            )
        )
    return texts


def uncounted_text(clients: Sequence[Mapping[str, Any]]) -> str:
    """Return what epsilon leaves out, by what clients say; empty if that is nothing."""
    units = sorted({unit for client in clients for unit in client.get("uncounted", [])})
    return _UNCOUNTED.format(units=" and per ".join(units)) if units else ""


def largest(epsilons: Mapping[str, float | None] | None) -> float | None:
    """Return the largest epsilon of a client's splits, 0 where nothing is released.

    None stands for infinite, and for an accountant whose epsilons are not recorded.
    """
    values = None if epsilons is None else list(epsilons.values())
    if values is None or None in values:
        return None
    return max((value for value in values if value is not None), default=0.0)


def overall(event: Event) -> tuple[float | None, float]:
    """Return an (epsilon, delta) that holds for every client: the largest of each, PRV.

    Example:
        >>> client = {"epsilon": {"prv": {"train": 3.1}}, "budget": {"epsilon": 8, "delta": 1e-5}}
        >>> overall({"clients": [client]})
        (3.1, 1e-05)
    """
    clients = event["clients"]
    prv = {str(place): largest(c["epsilon"].get(PRV)) for place, c in enumerate(clients)}
    delta = max((client["budget"]["delta"] for client in clients), default=0.0)
    return (largest(prv) if prv else None), delta


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
        told = [client for client in event["clients"] if "search_epsilon" in client]
        if not searches or not told:  # older runs do not tell
            return ""
        costs = {str(place): client["search_epsilon"] for place, client in enumerate(told)}
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
    head = ["stage", "verb", "splits", "noise multiplier", "clipping norm"]
    head += ["expected batch", "rate p", "steps, at most"]
    rows = [
        [
            *(release["stage"], release["verb"], ", ".join(release["splits"])),
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
    """Return what a client's filter counts as spent of its budget: ``2.90 of 8``."""
    number = client["client"]
    used = epsilon_text(spent[number]) if number in spent else DASH
    return f"{used} of {client['budget']['epsilon']:g}"


def _rates_text(rates: list[float]) -> str:
    """Return the rate of a release, or the range of the clients' rates."""
    if not rates:
        return "not recorded"
    least, largest = (f"{rate:.3g}" for rate in (min(rates), max(rates)))
    return least if least == largest else f"{least} to {largest}"

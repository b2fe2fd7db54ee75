"""The tables of ``fednas analyse``, from what stands in a run's analysis.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fednas_flwr.reporting.console import table_console
from fednas_flwr.reporting.units import DASH, percent

MOST_ROUNDS = 20


def print_analysis(analysis: Mapping[str, Any]) -> None:
    """Print a table of every part that the run has."""
    console = table_console()
    if analysis["samples"] is not None:
        console.print(_samples(analysis["samples"]))
    if any(search["rounds"] for search in analysis["rewards"]):
        console.print(_rewards(analysis["rewards"]))
    if analysis["variants"]:
        console.print(_variants(analysis["variants"]))
        for variant in analysis["variants"]:
            if variant["accuracy"] is None:
                console.print(variant["command"], markup=False, highlight=False, soft_wrap=True)
    inference = analysis["inference"]
    if inference is not None:
        console.print(
            f"inference of {inference['batch_size']}: median {inference['median_ms']:.3g} ms, "
            f"spread {inference['spread_ms']:.2g} ms on {inference['machine']}, "
            f"{inference['threads']} thread(s)",
            markup=False,
            highlight=False,
        )


def _samples(samples: Mapping[str, Any]) -> Table:
    """Return the share of each op on each edge, and on all of them."""
    title = (
        f"ops of {samples['count']:,} cells drawn by {samples['sampler']} after round "
        f"{samples['round']} (%)"
    )
    names = (op.removeprefix("conv_3x3_").removesuffix("_pool_3x3") for op in samples["ops"])
    table = Table("edge", *(name.removesuffix("_connect") for name in names), title=title)
    for edge, shares in zip(samples["edges"], samples["shares"], strict=True):
        table.add_row(edge, *(f"{100 * share:.1f}" for share in shares))
    table.add_section()
    table.add_row("all", *(f"{100 * share:.1f}" for share in samples["mean_shares"]))
    return table


def _rewards(searches: Sequence[Mapping[str, Any]]) -> Table:
    """Return the accuracies by round, at most 20 rounds with the first and the last."""
    accuracies = [
        dict(zip(search["rounds"], search["accuracies"], strict=True)) for search in searches
    ]
    rounds = sorted({number for own in accuracies for number in own})
    last = len(rounds) - 1
    shown = sorted({round(i * last / (MOST_ROUNDS - 1)) for i in range(MOST_ROUNDS)})
    names = (f"{search['run']}, {search['sampler'] or 'supernet'}" for search in searches)
    table = Table("round", *names, title="mean validation accuracy of sampled cells")
    for number in (rounds[index] for index in shown):
        values = (own.get(number) for own in accuracies)
        table.add_row(str(number), *(percent(value) for value in values))
    return table


def _variants(variants: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("cell", "test accuracy", "epsilon", title="the cell with one kind of op")
    for variant in variants:
        accuracy, epsilon = variant["accuracy"], variant["epsilon"]
        table.add_row(
            variant["name"],
            percent(accuracy),
            DASH if epsilon is None else f"{epsilon:.3g}",
        )
    return table

"""Trials and choices of FEATHERS' bandit, from ``explored`` events: figures and tables of a stage.

Each such event is one phase: the trials before a round, what they taught, and what they cost.
"""

from collections.abc import Sequence

from fednas_flwr.report import plots
from fednas_flwr.report.plots import Figure
from fednas_flwr.report.quantities import DASH, duration, num_bytes, percent
from fednas_flwr.report.texts import STAGES
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.numbers import Run


def figures(phases: Sequence[Event]) -> dict[str, tuple[str, Figure | None]]:
    """Return heading and figure of entropy, kappa, and estimates over phases, by a short name."""
    points = [
        {"round": e["round"], "metrics": {"entropy": e["entropy"], "kappa": e["kappa"]}}
        for e in phases
    ]
    entropy = plots.curves(points, {"entropy": "entropy"}, title="nats")
    kappa = plots.curves(points, {"kappa": "kappa"}, title="configurations")
    for figure in (entropy, kappa):
        if figure is not None:
            figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return {
        "entropy_of_pi": ("Entropy of the bandit's distribution", entropy),
        "kappa": ("Configurations tried per phase", kappa),
        "estimates": ("Estimated rewards; rings mark the choice", estimates(phases)),
    }


def estimates(phases: Sequence[Event]) -> Figure | None:
    """Return every arm's estimated reward after each phase as a heat map."""
    if not phases:
        return None
    rounds = [str(event["round"]) for event in phases]
    by_arm = [list(row) for row in zip(*(e["estimates"] for e in phases), strict=True)]
    shown = [[None if v is None else float(f"{v:.4g}") for v in row] for row in by_arm]
    known = [value for row in shown for value in row if value is not None]
    hover = "round %{x}, configuration %{y}: %{z}<extra></extra>"
    heat = plots.heat(rounds, None, shown, hover)
    chosen = plots.rings(rounds, [event["best"] for event in phases])
    layout = plots.axes(x="round", y="configuration")
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["showlegend"] = False
    layout["coloraxis"] = plots.colours(min(known, default=0), max(known, default=1), title="nats")
    return {"data": [heat, chosen], "layout": layout}


def phase_table(phases: Sequence[Event]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: of each phase what was tried and the configuration that was chosen.

    Where rewards are noised, also the standard deviation of their noise and M, to which the change
    of a record's loss was clipped: rewards that differ by less than the noise say little.
    """
    if not phases:
        return [], []
    names = list(phases[0]["configuration"])
    noised = any(event.get("noise") for event in phases)
    channel = {"noise": "its noise (std)", "loss_bound": "loss bound M"} if noised else {}
    head = ["before round", "tried", "best reward", *channel.values(), "chosen", "its estimate"]
    rows = []
    for event in phases:
        rewards = [reward for reward in event["rewards"].values() if reward is not None]
        best = event["best"]
        rows.append(
            [
                str(event["round"]),
                str(event["kappa"]),
                _number(max(rewards, default=None)),
                *(_number(event[name]) for name in channel),
                str(best),
                _number(event["estimates"][best]),
                *(_number(event["configuration"][name]) for name in names),
            ]
        )
    return [*head, *(name.replace("_", " ") for name in names)], rows


def cost_rows(run: Run) -> list[list[str]]:
    """Return time and bytes spent exploring and else in the rounds of each stage that explores."""
    rows = []
    for stage, title in STAGES.items():
        phases = run.explored(stage)
        if not phases:
            continue
        rounds = run.rounds(stage)
        whole = [sum(e.get(key) or 0 for e in rounds) for key in COSTS]
        trials = [sum(e.get(key) or 0 for e in phases) for key in COSTS]
        rest = [max(0, a - b) for a, b in zip(whole, trials, strict=True)]
        for name, (seconds, *sizes) in (("exploring", trials), ("training", rest)):
            share = percent(seconds / whole[0]) if whole[0] else DASH
            rows.append([f"{title}, {name}", duration(seconds), share, *map(num_bytes, sizes)])
    return rows


COSTS = ("seconds", "bytes_sent", "bytes_received")


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}"

"""Noise that is not given is calibrated to what a run may cost.

To an epsilon of its own, or the search's to its shares of the target epsilon, then retraining's to
what all others leave of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednas_flwr.config import DifferentialPrivacy
from fednas_flwr.errors import ConfigError
from fednas_flwr.privacy.accounting import calibrate_noise
from fednas_flwr.privacy.renyi import Release, poisson_rate
from fednas_flwr.privacy.renyi_filter import filter_epsilon

CALIBRATED = ("rewards", "alphas", "weights", "retrain")  # in this order
Item = dict[str, Any]  # one kind of release: its place in the run, its terms


def calibrated(
    privacy: DifferentialPrivacy,
    name: str,
    own: Sequence[Item],
    items: Sequence[Item],
    records: Sequence[Mapping[str, int]],
) -> float:
    """Return the least noise multiplier with which all clients' splits keep a target.

    Counted as enforcement does, so that the run reaches its last step on a fresh budget.

    Args:
        privacy: Gives the target.
        name: Which noise.
        own: The releases that carry it.
        items: All releases, those with noise that is known already count as others.
        records: Each client's declared number of records by split.
    """
    needed = 0.0
    splits = sorted({split for item in own for split in item["splits"]})
    given: float | None = getattr(privacy, name).epsilon
    for split in splits:
        target = given or privacy.epsilon * _share(privacy, name, split, items)
        others = [
            item
            for item in items
            if item["noise_multiplier"] is not None
            and split in item["splits"]
            and given is None
            and (name == "retrain" or noise_of(item) != "retrain")
        ]
        for declared in {tuple(sorted(c.items())): c for c in records}.values():
            before = [release_of(other, declared) for other in others]
            used = filter_epsilon(before, privacy.delta)
            if used >= target:
                named = " and ".join(dict.fromkeys(noise_of(other) for other in others))
                raise ConfigError(
                    f"privacy.epsilon={privacy.epsilon:g}: {named} alone cost {used:.3g} of "
                    f"{target:.3g} on the {split} records, which leaves nothing for {name}; raise "
                    "it or the noise multipliers, or take fewer rounds."
                )
            sigma = calibrate_noise(
                target_epsilon=target,
                delta=privacy.delta,
                sample_rate=draw_rate(own[0], declared),
                steps=sum(item["steps"] for item in own),
                others=before,
                accountant=filter_epsilon,
            )
            needed = max(needed, sigma)
    return needed


def noise_of(item: Item) -> str:
    """Return which of the privacy settings gives an item's noise."""
    retrained = item["stage"] == "retrain" and item["kind"] == "weights"
    return "retrain" if retrained else str(item["kind"])


def _share(privacy: DifferentialPrivacy, name: str, split: str, items: Sequence[Item]) -> float:
    """Return the share of epsilon up to which a kind of release may fill a split."""
    if name == "rewards":
        others = [i for i in items if noise_of(i) != name and split in i["splits"]]
        later = any(item["noise_multiplier"] is None for item in others)
        return privacy.rewards_share if later else 1.0
    later = any(noise_of(item) == "retrain" and split in item["splits"] for item in items)
    return privacy.search_share if later and name != "retrain" else 1.0


def release_of(item: Item, declared: Mapping[str, int]) -> Release:
    """Return what a client with these declared records releases."""
    return Release(
        noise_multiplier=item["noise_multiplier"],
        sample_rate=draw_rate(item, declared),
        steps=item["steps"],
    )


def draw_rate(item: Item, declared: Mapping[str, int]) -> float:
    """Return the rate at which a client with these declared records draws each of them."""
    return poisson_rate(item["batch_size"], sum(declared[split] for split in item["splits"]))

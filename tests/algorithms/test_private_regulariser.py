"""beta-DARTS' regulariser with privacy: it reads no record, so it is neither clipped nor noised."""

import pytest
import torch

from fednas_flwr.runs.numbers import read_run

from ..booked import booked

PRIVATE = ["privacy=dp", "search_space.norm=group", "retrain.norm=group", "privacy.test_seed=5"]
SHORT = ["stages=[search]", "clients=2", "rounds=1", "search_space=nasbench201_small"]
HUGE = 1e4  # next to it, a clipped gradient and its noise are nothing


def moved(run):
    """Return the alphas after the only round; they begin within some thousandths of 0."""
    return torch.tensor(read_run(run.folder).alphas()[-1]["alphas"]["cell"])


@pytest.mark.parametrize("algorithm", ["fed_darts", "dp_fnas"])
def test_the_regulariser_comes_after_clipping_and_costs_nothing(algorithm, finished_run):
    """Adam's steps follow signs: all alphas go down alike, as far as the steps reach."""
    settings = [f"algorithm={algorithm}", *PRIVATE, *SHORT]
    plain = finished_run(*settings, "algorithm.beta_decay=0")
    decayed = finished_run(*settings, f"algorithm.beta_decay={HUGE}")
    down = moved(decayed)
    assert down.max() < 0
    assert down.std() < 0.05 * down.mean().abs()
    assert moved(plain).max() > 0  # noise goes both ways
    both = (booked(run.folder / "sites") for run in (decayed, plain))
    one, other = ([(row.action, row.release) for row in rows] for rows in both)
    assert one == other

"""`fednas audit` on made data: the real client passes, one with a fault in any release does not.

An honest client fails a test with a chance of 1e-6 at most, to which the confidence is set; faults
are so large that they are found with another 1e-6 or so, but where a test says more.
"""

import io
import math
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest

from fednas_flwr.cli import INCONCLUSIVE, RUN_FAILED, main
from fednas_flwr.client import answer as entrance
from fednas_flwr.deploy import audit_run as audit
from fednas_flwr.settings import dump_config

from ..refusals import refuses
from ..rows import by_hand, seldom
from .faulty_client import FAULTS, audited_only, broken

SURE = ("--confidence", "0.999999")
STATED = ("dataset.statistics={a: [0, 1], b: [0, 1], c: [0, 1]}", "dataset.ignore=[id]")
DP_FNAS = ("algorithm=dp_fnas", *STATED, "privacy.metrics_noise_multiplier=10")
PERSONS = ("algorithm=dp_fnas", "dataset.id_column=id", "privacy.statistics_noise_multiplier=3")
PERSONS += ("dataset.ranges={a: [-4, 4], b: [-4, 4], c: [-4, 4]}",)
PERSONS += ("privacy.metrics_noise_multiplier=10",)
LOCAL = ("algorithm=fed_darts", *STATED)
POOL = ("algorithm=successive_halving", *STATED)
SUMS = ("secure_sum={least_sites: 3, colluding: 1}", "clients=3")
CLIENTS = (
    *("algorithm=fed_darts", *STATED, *SUMS, "privacy.unit=client", "privacy.epsilon=1000"),
    # so little that a few replies show a unit's norm
    *(f"privacy.{kind}.noise_multiplier=.25" for kind in ("weights", "alphas", "retrain")),
)

STATISTICS = "statistics/query.statistics/statistics/train"
WEIGHTS = "search/train.weight_gradient/weights/train"
ALPHAS = "search/train.alpha_gradient/alphas/validation"
VALIDATION = "search/evaluate.model/metrics/validation"
RETRAIN = "retrain/train.weights/weights/train+validation"
TEST = "evaluate/evaluate.model/metrics/test"
SEARCHED = "search/train.search/weights/train"
REWARDS = "search/train.probe/rewards/validation"
SCORES = "evaluate/evaluate.scores/scores/train+validation"
WHOLE = "train+validation+test"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Overrides of a private run on a made table, whose steps take milliseconds."""
    numbered = enumerate(np.random.default_rng(0).normal(size=(360, 3)).round(3))
    lines = [f"p{i // 3},{a},{b},{c},{'no' if a < b else 'yes'}" for i, (a, b, c) in numbered]
    folder = tmp_path_factory.mktemp("table")
    (folder / "table.csv").write_text("\n".join(["id,a,b,c,label", *lines]) + "\n")
    own = ["privacy=dp", "clients=1", "runtime.device=cpu", "runtime.threads=1", "rounds=1"]
    own += ["dataset=csv", f"dataset.root={folder / 'table.csv'}", "dataset.label=label"]
    own += [f"dataset.cache={folder / 'cache'}", "search_space=mlp_small"]
    return [*own, "search_space.channels=8", "retrain.rounds=1"]


@pytest.fixture(scope="module", autouse=True)
def _begun_once(tmp_path_factory):
    """Begin each run once: what it asks clients does not depend on what they answer.

    Books lie in memory where there is a disk of it: every release is synced.
    """
    tmp_path_factory.getbasetemp()  # which stays on the disk
    recorded, known = audit._recorded, {}

    def once(config):
        text = dump_config(config)
        if text not in known:
            known[text] = recorded(config)
        return known[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "_recorded", once)
        patch.setattr(tempfile, "tempdir", "/dev/shm" if os.path.isdir("/dev/shm") else None)
        yield


def command(*arguments):
    """Return exit code and output of `fednas audit`."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["audit", *arguments])
    return code, said.getvalue()


def faulty(fault, key, *overrides):
    """Return those of a client with a fault in the one kind of release that is asked for."""
    sure = ("--confidence", "0.99") if "same batch" in fault else SURE  # few replies show it
    with audited_only(key), broken(fault, key):
        return command(*sure, *overrides)


@pytest.mark.run
def test_every_kind_of_release_of_an_honest_run_is_audited_and_passes(table, tmp_path):
    """Nearly all layers are moved by canaries, and nothing is booked on budgets of the user."""
    code, said = command(*SURE, *table, *PERSONS, f"privacy.sites={tmp_path}")
    assert code == 0, said
    assert not list(tmp_path.iterdir())
    lines = said.splitlines()
    keys = [line.partition(": ")[0] for line in lines]
    assert keys[:-2] == [STATISTICS, WEIGHTS, ALPHAS, VALIDATION, RETRAIN, TEST]
    assert all("noise" in line and "a unit" in line for line in lines[:-2])
    assert all("rate" in lines[keys.index(key)] for key in (WEIGHTS, ALPHAS))
    words = lines[keys.index(WEIGHTS)].partition(" in ")[2].split()[-9:]
    reached, whole = (int(word.replace(",", "")) for word in words if "," in word)
    assert reached > 0.7 * whole
    assert lines[-2] == "An honest client passes with probability 0.999999 or more."
    assert lines[-1] == "The audit does not refute what the run commits to."


FAULTY = [
    ("no noise", ALPHAS, DP_FNAS, f"{ALPHAS}: noise 0.00"),
    seldom("no noise", VALIDATION, DP_FNAS, f"{VALIDATION}: noise 0.00"),
    *(by_hand("no noise", key, DP_FNAS, f"{key}: noise 0.00") for key in (RETRAIN, TEST)),
    *(
        seldom(fault, ALPHAS, DP_FNAS, told)
        for fault, told in {
            "half the noise in one tensor": "where 1 was committed to",
            "no noise in one value": "1 of 108 values have no noise",
            "noise used twice": "have no noise",
            "twice the clipping norm": "of the clipping norm",
            "clipped after the sum": "no sum over units",
            "twice the rate": "units are drawn at a rate of 0.2",
            "the same batch in every step": "the same units are drawn in several steps",
        }.items()
    ),
    seldom("the same noise in the steps of a request", SEARCHED, LOCAL, "two steps together"),
    *(seldom(f, STATISTICS, PERSONS, "") for f in ("half the noise", "no clipping")),
    seldom("half the noise", ALPHAS, (*DP_FNAS, *SUMS), ""),  # in totals
    by_hand("half the noise", f"search/train.search/alphas/{WHOLE}", CLIENTS, ""),
    seldom("no clipping", f"search/train.search/weights/{WHOLE}", CLIENTS, ""),
]


@pytest.mark.parametrize(("fault", "key", "overrides", "told"), FAULTY)
def test_faults_of_every_kind_of_release_are_found_and_named(
    table, fault, key, overrides, told, monkeypatch
):
    if "half" not in fault:  # which few replies do not show
        monkeypatch.setattr(audit, "MOST_REPLIES", 8)
    if "noise" in fault:  # of which replies at the run's own rate tell nothing
        monkeypatch.setattr(audit, "SAMPLES", 2)
    code, said = faulty(fault, key, *table, *overrides)
    assert code == RUN_FAILED, said
    assert told in said
    assert "REFUTED: " in said
    assert "the audit refutes what the run commits to" in said


@pytest.mark.run
def test_sites_with_other_commitments_in_one_sum_are_found(table, monkeypatch):
    agreed = entrance.agreed
    monkeypatch.setattr(entrance, "agreed", lambda *args: agreed(*args) | {"releases": None})
    with audited_only(ALPHAS):
        code, said = command(*SURE, *table, *DP_FNAS, *SUMS)
    assert code == RUN_FAILED
    assert "REFUTED: sites that have committed to other norms are in one sum" in said


@pytest.mark.run
def test_what_no_reply_tells_is_said_and_inconclusive(table, monkeypatch):
    monkeypatch.setattr(audit, "MOST_REPLIES", 8)
    with audited_only(REWARDS):
        code, said = command(*SURE, *table, "algorithm=feathers", *STATED)
    assert code == INCONCLUSIVE, said
    assert "search/train.probe/weights/train\n  not audited: no reply tells it" in said
    assert f"{REWARDS}: noise " in said
    assert f"{SEARCHED}\n  not audited: no request of the run has asked for it" in said
    assert "does not refute" not in said


@pytest.mark.run
def test_more_noise_than_canaries_can_show_is_inconclusive(table, monkeypatch):
    monkeypatch.setattr("fednas_flwr.privacy.audit.MOST_CANARIES", 256)
    alphas = "privacy.alphas.noise_multiplier=5000"
    with audited_only(ALPHAS):
        code, said = command(*SURE, *table, "algorithm=dp_fnas", *STATED, alphas)
    assert code == INCONCLUSIVE
    assert "not audited: twice the contribution of a unit" in said


NOT_AUDITED = [
    (("privacy=none",), "there is no release to audit; set privacy=dp"),
    (("runtime=deployment", "runtime.superlink=site"), "only the sites know their records"),
]


@pytest.mark.parametrize(("overrides", "reason"), NOT_AUDITED)
def test_what_cannot_be_audited_is_said(compose_config, overrides, reason):
    refuses(reason, audit.audit_run, compose_config("privacy=dp", *overrides))


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_a_confidence_out_of_range_is_refused(compose_config, confidence):
    config = compose_config("privacy=dp")
    refuses("expected a number between 0 and 1", audit.audit_run, config, confidence=confidence)


@pytest.mark.run
@pytest.mark.parametrize("sums", [by_hand(()), SUMS])
def test_counts_of_scores_are_audited(table, sums):
    linear = ("algorithm=fedavg", "algorithm.network=linear", "privacy.scores_error=.01", *STATED)
    own = [text for text in table if not text.startswith(("rounds", "search_space"))]
    code, said = command(*SURE, *own, *linear, *sums)
    assert code == 0, said
    assert f"{SCORES}: noise" in said
    code, said = faulty("half the noise", SCORES, *own, *linear, *sums)
    assert (code, "REFUTED: " in said) == (RUN_FAILED, True), said


@pytest.mark.run
@pytest.mark.parametrize("key", [STATISTICS, ALPHAS, by_hand(WEIGHTS)])
def test_statistics_in_totals_and_what_follows_them_pass(table, key):
    with audited_only(key):
        code, said = command(*SURE, *table, *PERSONS, *SUMS)
    assert (code, f"{key}: noise" in said) == (3, True), said  # the others are not asked for


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [LOCAL, POOL, (*DP_FNAS, *SUMS), CLIENTS])
def test_honest_runs_of_other_kinds_pass(table, overrides):
    code, said = command(*SURE, *table, *overrides)
    assert code == 0, said


PRIVATE_ALGORITHMS = ["dp_fnas", "fed_darts", "fdnas", "dpnas", "fedavg", "successive_halving"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", PRIVATE_ALGORITHMS)
def test_private_algorithms_pass_on_the_first_data_set(algorithm):
    code, said = command(*SURE, f"algorithm={algorithm}", "privacy=dp")
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(table, fault):
    code, said = faulty(fault, SEARCHED, *table, *LOCAL)
    assert code == RUN_FAILED, said

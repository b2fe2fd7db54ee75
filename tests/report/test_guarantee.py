import pytest

from fednas_flwr.report import score_tables
from fednas_flwr.report.templates import epsilon_text, paragraphs, sentence
from fednas_flwr.runs.numbers import overall

from ..refusals import lacking
from .conftest import SEARCH_RELEASE


def _client(client, prv, *, delta=1e-5, **more):
    told = {"client": client, "records": {"train": 300, "validation": 200, "test": 0}}
    told |= {"budget": {"epsilon": 8.0, "delta": delta}, "secure_noise": True}
    return told | {"epsilon": {} if prv is None else {"prv": prv}} | more


SHOWN = [(3.1, "3.10"), (3.1000001, "3.11"), (9.999, "10.00"), (0.00123456, "0.00124")]
SHOWN += [(12345.6, "12400"), (0.0, "0"), (8, "8.00"), (None, "∞"), (float("inf"), "∞")]


@pytest.mark.parametrize(("epsilon", "text"), SHOWN)
def test_an_epsilon_is_never_shown_smaller_than_it_is(epsilon, text):
    assert epsilon_text(epsilon) == text


def test_each_client_is_told_how_far_its_budget_reaches():
    def covers(search, retrain):
        searched = {"stage": "search", "rounds": search, "of": 40}
        return [searched, {"stage": "retrain", "rounds": retrain, "of": 8}]

    clients = [_client(c, {}, covers=covers(*n)) for c, n in enumerate([(40, 8), (40, 3), (12, 0)])]
    assert paragraphs("coverage", {"clients": clients}) == [
        "budget of client 1: covers 3 of 8 rounds of retrain, then the client leaves the run",
        "budget of client 2: covers 12 of 40 rounds of search, then the client leaves the run",
        "budget of 1 of 3 clients: covers the run",
    ]
    assert paragraphs("coverage", {"clients": [_client(0, {})]}) == []  # an older run


def test_the_overall_pair_holds_for_every_client():
    clients = [_client(0, {"train": 3.0}, delta=1e-6), _client(1, {"train": 2.0, "test": 1.0})]
    assert overall({"clients": clients}) == (3.0, 1e-5)
    assert sentence("overall_text", {"clients": clients}) == "(3.00, 1e-05) per record, add/remove"


@pytest.mark.parametrize("prv", [{"train": 3.0, "validation": None}, None])
def test_an_epsilon_that_is_not_known_is_not_left_out_of_the_maximum(prv):
    event = {"clients": [_client(0, {"train": 2.0}), _client(1, prv)]}
    assert overall(event)[0] is None
    assert sentence("overall_text", event).startswith("(∞, ")


def test_without_clients_there_is_no_epsilon_and_without_releases_it_is_0():
    assert overall({"clients": []})[0] is None
    assert overall({"clients": [_client(0, {})]})[0] == 0.0


def test_the_warning_names_every_client_whose_noise_is_known():
    safe = _client(0, {"train": 1.0})
    assert sentence("test_seed", {"clients": [safe]}) == ""
    one = _client(2, {"train": 1.0}, secure_noise=False)
    text = sentence("test_seed", {"clients": [safe, one]})
    assert text.startswith("Test seed: no privacy. Noise and sampling of client 2 come ")
    unknown = {k: v for k, v in _client(4, {"train": 1.0}).items() if k != "secure_noise"}
    assert "clients 2, 4 come" in sentence("test_seed", {"clients": [safe, one, unknown]})


RATES = [
    ({}, [0.02, 0.16], "16", "0.02 to 0.16"),
    ({}, [0.160001, 0.16], "16", "0.16"),
    ({"batch_size": None}, [1.0, 1.0], "every record", "1"),
    ({}, [], "16", "not recorded"),  # nobody has accepted
]


@pytest.mark.parametrize(("release", "rates", "batch", "rate"), RATES)
def test_the_rate_is_that_of_the_clients(release, rates, batch, rate):
    clients = [_client(client, {}, rates=[0.5, rate]) for client, rate in enumerate(rates)]
    schedule = [SEARCH_RELEASE, SEARCH_RELEASE | release]
    head, (_, row) = score_tables.release_table({"schedule": schedule, "clients": clients})
    told = {"expected batch": batch, "rate p": rate, "steps, at most": "1,200"}
    told |= {"noise multiplier": "1.25", "clipping norm": "0.5"}
    assert told.items() <= dict(zip(head, row, strict=True)).items()


def test_each_client_has_its_epsilons_and_what_its_filter_spent():
    clients = [_client(0, {"train": 3.1, "validation": 2.2}), _client(1, {"train": 1.0})]
    clients[0]["epsilon"] |= {"rdp": {"train": 3.5, "validation": 2.5}, "gdp": {"train": None}}
    clients[1]["secure_noise"] = False
    head, rows = score_tables.promise_table({"clients": clients}, {0: 2.9})
    first, second = (dict(zip(head, row, strict=True)) for row in rows)
    assert (first["epsilon"], second["epsilon"]) == ("3.10", "1.00")
    spent = "spent of its budget, by the filter"
    of_both = {spent: ("2.90 of 8", "– of 8"), "noise": ("secret", "test seed")}
    assert {name: (first[name], second[name]) for name in of_both} == of_both
    assert first["records: train / validation / test"] == "300 / 200 / 0"
    assert [name for name in head if "epsilon" in name] == ["epsilon"]  # of its worst split
    for some in (clients, clients[1:]):  # of whom one has not told
        assert sentence("checks", {"clients": some}) == ""
    checks = sentence("checks", {"clients": clients[:1]})
    assert "RDP), a looser bound, gives 3.50;" in checks
    assert "no bound, ∞." in checks


def test_the_kind_of_search_and_its_own_epsilon_are_told():
    plain = {"algorithm": {"name": "dpnas", "dp_aware": None}}
    words = "without clipping or noise, no claim of privacy: its epsilon is infinite"
    assert sentence("search_privacy", plain, None) == words
    aware = {"algorithm": {"dp_aware": {"max_grad_norm": 0.1, "noise_multiplier": 0.2}}}
    text = sentence("search_privacy", aware, None)
    assert lacking(text, "clipped to 0.1", "multiplier 0.2") == []
    assert text.endswith("no claim of privacy: its epsilon is infinite")
    epsilons = enumerate((1.2301, 0.9))
    clients = [_client(k, {"train": 3.0 + k}, search_epsilon=own) for k, own in epsilons]
    event = {"clients": clients, "schedule": [SEARCH_RELEASE]}
    told = sentence("search_privacy", aware, event)
    assert "private: by itself it costs at most (1.24, 1e-05)" in told
    clients[1]["search_epsilon"] = None  # infinite
    assert "costs at most (∞, 1e-05)" in sentence("search_privacy", aware, event)
    assert sentence("search_privacy", {"algorithm": {"name": "fedavg"}}, None) == ""
    assert sentence("search_privacy", aware | {"stages": ["retrain"]}, None) == ""
    event["schedule"] = [SEARCH_RELEASE | {"stage": "retrain"}]
    assert sentence("search_privacy", aware, event) == ""


def test_shared_noise_is_told_with_what_it_rests_on():
    own = {"honest_sites": 6, "rates": [0.5, 0.5]}
    alone = enumerate((21.34, 20.0))
    clients = [_client(k, {"train": 3.1}, alone_epsilon=epsilon, **own) for k, epsilon in alone]
    shared = SEARCH_RELEASE | {"shared": True}
    whole = SEARCH_RELEASE | {"stage": "retrain", "action": "train.weights", "shared": False}
    event = {"clients": clients, "schedule": [shared, whole]}
    text = paragraphs("promise", event)[-1]
    shared_by = "noise of train.weight_gradient is shared by secure sums"
    assert lacking(text, shared_by, "policy allows (6)", "costs at most (21.4, 1e-05)") == []
    head, rows = score_tables.release_table(event)
    column = head.index("noise multiplier")
    assert [row[column].endswith("(of the sum)") for row in rows] == [True, False]
    assert len(paragraphs("promise", {"clients": clients, "schedule": [whole]})) == 3

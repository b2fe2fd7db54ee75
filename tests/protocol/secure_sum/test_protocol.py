"""Sites and server of a secure sum, with real keys, masks and journals; Flower is not needed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.privacy.policy import SumTerms
from fednas_flwr.protocol.keys import Context, Roster, SiteKeys, survivors_message
from fednas_flwr.protocol.secure_sum.masks import Grid
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.server.secure_sums import MaskedSum

from ...refusals import refuses

ASKED = {"run": "r", "attempt": "a", "stage": "search", "round": 1, "phase": 1}
ASKED |= {"agreed": {"request": "h"}}
SITES = 5


@pytest.fixture
def sites(tmp_path):
    keys = [SiteKeys.at(tmp_path / f"{i}" / "keys") for i in range(SITES)]
    roster = Roster(tuple(own.public(f"site-{i}") for i, own in enumerate(keys)))
    terms = SumTerms(roster.fingerprint, least_sites=3, colluding=1)
    journals = [tmp_path / f"{i}" / "journal.sqlite" for i in range(SITES)]
    return [SumSite(i, keys[i], roster, terms, journals[i]) for i in range(SITES)]


def values_of(site):
    rng = np.random.default_rng(site)
    wide = rng.integers(-(2**40), 2**40, size=7)
    return [wide, rng.integers(-(2**20), 2**20, size=1001).astype(np.int32)]


class Exchange:
    """One exchange, message by message; ``asked`` overrides the request of all."""

    def __init__(self, sites, participants=None, **asked):
        self.sites = {site.index: site for site in sites}
        self.participants = sorted(self.sites) if participants is None else participants
        self.asked = {**ASKED, "participants": self.participants, **asked}
        self.sum = MaskedSum(self.participants)
        self.boxes, self.signatures, self.context = {}, {}, b""

    def answer(self, clients):
        for i in clients:
            answer = self.sites[i].begin(**self.asked)
            vectors = values_of(i)
            self.boxes[i], self.context = answer.mask(vectors), answer.context
            self.sum.add(i, vectors)
        return self

    def sign(self, clients=None, survivors=None):
        survivors = survivors or sorted(self.sum.survivors)
        for i in survivors if clients is None else clients:
            self.signatures[i] = self.sites[i].sign(self.context, survivors)
        return self

    def open_by(self, i, survivors=None):
        survivors = survivors or sorted(self.sum.survivors)
        boxes = {j: self.boxes[j][i] for j in survivors if i in self.boxes[j]}
        return self.sites[i].open(self.context, survivors, self.signatures, boxes)

    def total(self, clients=None):
        openers = self.sum.survivors if clients is None else clients
        return self.sum.unmask({i: self.open_by(i) for i in openers})


def assert_sum(total, clients):
    for index, found in enumerate(total):
        expected = sum(values_of(i)[index].astype(found.dtype) for i in clients)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("lost", [[0], [4], [2], [1, 3]])
def test_sites_lost_before_their_answer_are_left_out(sites, lost):
    left = [i for i in range(SITES) if i not in lost]
    assert_sum(Exchange(sites).answer(left).sign().total(), left)


@pytest.mark.parametrize("openers", list(itertools.combinations(range(SITES), 2)))
def test_any_two_of_the_signers_open_a_sum_that_one_colluding_site_could_not(sites, openers):
    assert_sum(Exchange(sites).answer(range(SITES)).sign().total(openers), range(SITES))


def test_one_opening_is_not_enough(sites):
    total = Exchange(sites).answer(range(SITES)).sign().total([0])
    refuses("", assert_sum, total, range(SITES), error=AssertionError)
    with pytest.raises(ValueError, match="beyond 5 times their range"):
        Grid.of_range(1.0, sites=SITES).decode(total[1], sites=SITES)


def test_a_site_lost_after_signing_beside_one_lost_before_fails_the_sum(sites):
    exchange = Exchange(sites).answer([0, 1, 2, 3]).sign()
    refuses("site 3 has dropped out after site 4", exchange.total, [0, 1, 2], error=ValueError)


def test_openings_that_lack_a_part(sites):
    exchange = Exchange(sites).answer([0, 1, 2, 3]).sign()
    openings = {i: exchange.open_by(i) for i in range(4)}
    for i in (0, 1):  # two others suffice
        openings[i] = replace(openings[i], parts={j: openings[i].parts[j] for j in (0, 1, 3)})
    without = openings | {3: replace(openings[3], pairs={})}
    vectors = [vector.copy() for vector in exchange.sum.vectors]
    refuses("or keeps back the mask", exchange.sum.unmask, without, error=ValueError)
    exchange.sum.vectors = vectors
    assert_sum(exchange.sum.unmask(openings), range(4))


def test_a_context_has_one_answer_one_list_and_one_opening(sites):
    exchange = Exchange(sites).answer(range(SITES))
    refuses("answered before", sites[0].begin, **exchange.asked)
    exchange.sign()
    refuses("a site signs one", sites[0].sign, exchange.context, [0, 1, 2])
    refuses("a site signs one", sites[0].sign, exchange.context, list(range(SITES)))
    exchange.open_by(0)
    refuses("opened before", exchange.open_by, 0)


def test_what_was_done_is_known_to_another_process(sites, tmp_path):
    exchange = Exchange(sites).answer(range(SITES)).sign()
    again = SumSite(
        0, SiteKeys.at(tmp_path / "0" / "keys"), sites[0].roster, sites[0].terms,
        tmp_path / "0" / "journal.sqlite",
    )  # fmt: skip
    refuses("answered before", again.begin, **exchange.asked)
    refuses("a site signs one", again.sign, exchange.context, [0, 1, 2])
    exchange.sites[0] = again
    assert_sum(exchange.total(), range(SITES))


def test_a_new_attempt_has_other_masks(sites):
    masked = []
    for attempt in ("a", "b"):
        vectors = values_of(0)
        sites[0].begin(**ASKED | {"attempt": attempt, "participants": [0, 1, 2]}).mask(vectors)
        masked.append(vectors[1])
    assert (masked[0] != masked[1]).mean() > 0.99


def test_messages_out_of_order_are_refused_and_do_no_harm(sites):
    exchange = Exchange(sites).answer([3, 0, 4, 1])
    refuses("answered no such request", sites[2].sign, exchange.context, list(range(SITES)))
    exchange.answer([2])
    refuses("not the list that this site has signed", exchange.open_by, 0)  # before it has signed
    exchange.sign(clients=[4, 2, 0, 3])
    refuses("site 1 has not signed", exchange.open_by, 0)  # before all have
    exchange.sign(clients=[1])
    assert_sum(exchange.total([4, 2]), range(SITES))


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_totals_at_the_edge_of_the_range_and_one_cell_beyond_it(sites, sign, beyond):
    grid = Grid.of_range(3.0, sites=SITES)
    exchange = Exchange(sites)
    for i, site in enumerate(sites):
        cells = np.full(9, sign * grid.most_cells, dtype=np.int32)
        cells[0] += sign * beyond * (i == 0)
        answer = site.begin(**exchange.asked)
        exchange.boxes[i], exchange.context = answer.mask([cells]), answer.context
        exchange.sum.add(i, [cells])
    (total,) = exchange.sign().total()
    if beyond:
        refuses("beyond 5 times their range", grid.decode, total, error=ValueError, sites=SITES)
    else:
        assert (grid.decode(total, sites=SITES) == sign * SITES * grid.range).all()


def test_two_lists_cannot_both_be_opened_with_an_honest_site_in_common(sites):
    exchange = Exchange(sites).answer(range(SITES))
    exchange.sign(survivors=[0, 1, 2])
    exchange.sign(clients=[3, 4], survivors=[2, 3, 4])
    refuses("site 2 has not signed", exchange.open_by, 3, [2, 3, 4])
    refuses("not the list that this site has signed", exchange.open_by, 0, [0, 1, 2, 3])


UNSIGNED = [([0, 1], "3 or more"), ([1, 2, 3], "with this site, 0, among them")]
UNSIGNED += [([0, 1, 1, 2], "ascending"), ([2, 1, 0], "ascending"), ([0, 1, 2, 7], "some of")]


@pytest.mark.parametrize(("survivors", "said"), UNSIGNED)
def test_lists_outside_the_policy_are_not_signed(sites, survivors, said):
    exchange = Exchange(sites).answer(range(SITES))
    refuses(said, sites[0].sign, exchange.context, survivors)
    exchange.sign()  # which is still possible


@pytest.mark.parametrize("participants", [[0, 1], [1, 2, 3], [0, 1, 9], [1, 0, 2], [0, 0, 1]])
def test_participants_outside_the_policy_get_no_answer(sites, participants):
    with pytest.raises(ConfigError, match="refused by the policy, rule secure_sum"):
        sites[0].begin(**ASKED, participants=participants)


def test_forged_signatures_open_nothing(sites):
    exchange = Exchange(sites).answer(range(SITES)).sign()
    genuine = dict(exchange.signatures)
    other = survivors_message(exchange.context, (0, 1, 2, 3))
    changed = genuine[4][:-1] + bytes([genuine[4][-1] ^ 1])
    # another site's, none, one of its own that is changed, and of another list
    for forged in (genuine[3], bytes(64), b"", changed, sites[4]._keys.sign(other)):
        exchange.signatures = genuine | {4: forged}
        refuses("site 4 has not signed", exchange.open_by, 0)


def test_parts_of_another_exchange_or_changed_ones_are_not_used(sites):
    earlier = Exchange(sites, attempt="b").answer(range(SITES))
    exchange = Exchange(sites).answer(range(SITES)).sign()
    genuine = exchange.boxes[1][0]
    for box in (earlier.boxes[1][0], exchange.boxes[2][0], genuine[:-1] + b"\0\0"):
        exchange.boxes[1][0] = box
        refuses("the part of site 1 is not usable", exchange.open_by, 0)
    del exchange.boxes[1][0]
    refuses("site 1 is not usable: a sealed part", exchange.open_by, 0)
    exchange.boxes[1][0] = genuine
    assert exchange.open_by(0)


def test_sites_that_were_asked_different_things_give_no_sum(sites):
    exchange = Exchange(sites).answer([0, 1])
    assert Exchange(sites, agreed={"request": "i"}).answer([2]).context != exchange.context
    refuses("answered no such request", sites[2].sign, exchange.context, [0, 1, 2])


def test_a_peer_with_other_masks_fails_the_total(sites):
    exchange = Exchange(sites).answer([0, 1, 2, 3])
    answer = sites[4].begin(**exchange.asked)
    vectors = values_of(4)
    exchange.boxes[4] = answer.mask(vectors)
    vectors[1] += np.random.default_rng(1).integers(-(2**31), 2**31, 1001).astype(np.int32)
    exchange.sum.add(4, vectors)
    total = exchange.sign().total()
    with pytest.raises(ValueError, match="beyond 5 times their range"):
        Grid.of_range(1.0, sites=SITES).decode(total[1], sites=SITES)


def test_rosters_and_keys_that_are_not_the_policys(sites, tmp_path):
    site = sites[0]
    stranger = SiteKeys.at(tmp_path / "stranger")
    other = Roster((stranger.public("site-0"), *site.roster.sites[1:]))
    journal = tmp_path / "j"
    refuses(r"rule secure_sum.roster", SumSite, 0, stranger, other, site.terms, journal)
    with pytest.raises(ConfigError, match="does not hold this site's keys"):
        SumSite(0, stranger, site.roster, site.terms, journal)
    terms = SumTerms(site.terms.roster, 6, 1)
    refuses("no sum could ever be opened", SumSite, 0, site._keys, site.roster, terms, journal)


@pytest.mark.parametrize(("least_sites", "colluding"), [(2, 1), (3, 2), (3, 5)])
def test_terms_under_which_a_sum_hides_nothing(least_sites, colluding):
    refuses(r"colluding \+ 2", SumTerms, "0" * 64, least_sites, colluding)


def test_keys_are_made_once_and_kept_secret(tmp_path):
    path = tmp_path / "keys"
    assert SiteKeys.at(path).public("a") == SiteKeys.at(path).public("a")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    refuses("mode 640", SiteKeys.at, path)


def test_rosters_come_back_from_their_file(sites, tmp_path):
    path = tmp_path / "roster.json"
    sites[0].roster.write(path)
    assert Roster.read(path) == sites[0].roster
    for text in ("[]", "{", '[{"site": "a"}]', path.read_text().replace("site-1", "site-0")):
        broken = tmp_path / "broken.json"
        broken.write_text(text)
        refuses("cannot be used", Roster.read, broken)


def test_contexts_differ_with_every_field(sites):
    changes = [{}, {"run": "s"}, {"attempt": "b"}, {"round": 2}, {"phase": 2}, {"stage": "retrain"}]
    changes += [{"agreed": {}}, {"participants": [0, 1, 2]}]
    contexts = {Exchange(sites, **change).answer([2]).context for change in changes}
    one = Context(**ASKED, participants=(0, 1), roster="f")
    contexts |= {replace(one, roster=roster).digest for roster in "fg"}
    assert len(contexts) == len(changes) + 2


def test_a_full_disk_sends_nothing(sites, tmp_path):
    journal = tmp_path / "folder"
    journal.mkdir()
    site = sites[0]
    broken = SumSite(0, site._keys, site.roster, site.terms, journal)
    refuses("directory", broken.begin, error=OSError, **ASKED, participants=[0, 1, 2])

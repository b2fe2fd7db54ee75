"""Malformed requests to two private sites that differ in one record: no different outcome.

``scripts/fuzz_actions.sh --requests N`` sends more of them. An outcome is the sentence of a
refusal, or all of a reply but the noised numbers, and what was booked.
"""

import copy
import json
import os
import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fednas_flwr.base.errors import BudgetExceededError, ConfigError
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.protocol.messages import HEADER, JSON, decode_request, encode_states

from .conftest import ASKED, GONE, put, schedule, without_last
from .test_private_actions import ADDED, JUNK_OF, paths_of, unreleased
from .test_private_actions import JUNK as VALUES

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "250"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
JUNK = [*VALUES, "../../etc/passwd", "\x00", "a" * 10**4, [[]], {"a": {"b": []}}, -(2**63)]
HELD = (None, without_last("train"), without_last("validation"))


def edit_settings(rng, values):
    """Return settings with a key set to anything, taken out or added."""
    paths = [".".join(path) for path in paths_of(values)]
    path = rng.choice([*paths, *ADDED])
    value = rng.choice(JUNK_OF.get(path.rpartition(".")[2], JUNK))
    if value is GONE and path not in paths:
        value = None
    put(values, path, value if value is GONE else copy.deepcopy(value))
    return values


def edit_states(rng, states):
    """Return states of which one is missing, another's, of other sizes or types, or wild."""
    states = {name: {d: v.clone() for d, v in packed.items()} for name, packed in states.items()}
    if not states:
        return {"weights": {"float32": torch.zeros(3)}}
    name = rng.choice(sorted(states))
    packed = states[name]
    dtype = rng.choice(sorted(packed))
    kind = rng.randrange(7)
    if kind == 0:
        del states[name]
    elif kind == 1:
        states[rng.choice(["rows", "buffers", "moments", "alphas"])] = packed
    elif kind == 2:
        packed[dtype] = packed[dtype][:-1]
    elif kind == 3:
        packed[rng.choice(["float64", "int64"])] = packed.pop(dtype).double()
    elif kind == 4:
        packed[dtype] = packed[dtype].repeat(2)
    else:
        wild = rng.choice([float("nan"), float("inf"), 1e30, -1e30, 1e-40, 0.0])
        packed[dtype][:: rng.choice([1, 2, 97])] = wild
    return states


def make_message(rng, site):
    """Return an action and the parts of a message that asks for it, most of them malformed."""
    action = rng.choice(sorted(PRIVATE_ACTIONS))
    sound = site.request(action)
    header, values, states = asdict(sound.header), asdict(sound.settings), sound.states
    values = json.loads(json.dumps(values))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        kind = rng.random()
        if kind < 0.6:
            values = edit_settings(rng, values)
        elif kind < 0.7:
            header[rng.choice([*header, "more"])] = rng.choice([v for v in JUNK if v is not GONE])
        elif kind < 0.95:
            states = edit_states(rng, states)
        else:
            values = rng.choice([[], None, "x", 3, {"settings": values}])
            break
    text = json.dumps({"header": header, "settings": values}, default=asdict)
    if rng.random() < 0.05:  # a torn or edited text
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "{", "]", '"', "1e999", "NaN"]) + text[at + 1 :]
    if rng.random() < 0.05:
        action = rng.choice([*ACTIONS, "train.all", "", "query.records"])
    return action, text, states


def outcome(site, action, text, states, read):
    """Return all that a server sees of an answer but noised numbers, and what was booked."""
    before, _ = len(site.rows()), read.clear()
    try:
        content = {HEADER: ConfigRecord({JSON: text}), **encode_states(states)}
        said = "answered", unreleased(site.answer(decode_request(action, RecordDict(content))))
    except (ConfigError, BudgetExceededError) as error:
        said = "refused", f"{type(error).__name__}: {error}"
        said = *said, f"{len(read)} batches were read"
    return said, [replace(entry, run="") for entry in site.rows()[before:]]


@pytest.mark.run
def test_no_malformed_request_tells_two_sites_apart(make_site, read):
    sites = [make_site(hold=hold, committed=schedule(steps=1000)) for hold in HELD]
    rng, seen = random.Random(SEED), Counter()
    for number in range(REQUESTS):
        action, text, states = make_message(rng, sites[0])
        outcomes = [outcome(site, action, text, states, read) for site in sites]
        described = f"request {number} of seed {SEED}, {action}: {text[:2000]}"
        assert all(other == outcomes[0] for other in outcomes[1:]), (described, outcomes)
        (kind, *told), booked = outcomes[0]
        if kind == "refused":
            assert (told[1], booked) == ("0 batches were read", []), described
        seen[action, kind] += 1
    asked, kinds = {action for action, _ in seen}, Counter()
    for (_, kind), times in seen.items():
        kinds[kind] += times
    print(f"{REQUESTS} requests of seed {SEED}: {dict(kinds)}, of {len(asked)} actions")
    assert set(ASKED) <= asked
    assert min(kinds["answered"], kinds["refused"]) > REQUESTS / 20

"""Alphas that begin with a lead for what an earlier search has found."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.models.networks import make_space
from fednas_flwr.pipeline.feasible import check_buildable
from fednas_flwr.spaces.genotype import from_json

from ..asked import spied

SPACES = [
    make_space("darts", input_shape=(1, 8, 8), num_classes=3),
    make_space("nasbench201", input_shape=(1, 8, 8), num_classes=3),
    make_space("mlp", input_shape=(7,), num_classes=3),
]
FEW = ("clients=2", "rounds=1")
PRIVATE = ("algorithm=dp_fnas", *FEW)


@given(st.sampled_from(SPACES), st.integers(0, 2**30), st.floats(1e-3, 10))
def test_a_space_derives_the_architecture_that_leads(space, seed, margin) -> None:
    genotype = space.random_genotype(make_generator(seed, "lead"))
    alphas = space.lead(genotype, margin)
    assert space.derive(alphas) == genotype
    for kind, edges in genotype.cells.items():
        assert alphas[kind].shape == (space.cell_kinds[kind], len(space.ops))
        assert alphas[kind].unique().tolist() == pytest.approx([0.0, margin])
        assert int(alphas[kind].count_nonzero()) == len(edges)


@pytest.fixture(scope="module")
def data_free(finished_run):
    draws = ("algorithm=zero_cost", "algorithm.scores=[parameters]", "algorithm.draws=3")
    return finished_run("stages=[search]", *draws, *FEW).folder


@pytest.fixture(scope="module")
def one_shot(finished_run):
    return finished_run("stages=[search]", *FEW).folder


def found_in(folder):
    return from_json((folder / "genotype.json").read_text())


@pytest.mark.parametrize("algorithm", ["fed_darts", "fednas", "fnas", "vanilla_nas"], ids=str)
def test_clients_are_sent_alphas_with_the_lead(
    algorithm, data_free, compose_config, federate
) -> None:
    clients = 1 if algorithm == "vanilla_nas" else 2
    plain = [f"algorithm={algorithm}", f"clients={clients}", "algorithm.beta_decay=0"]
    prior = f"algorithm.prior={{run: {data_free}, margin: 0.75}}"
    without = federate(compose_config(*plain)).strategy.alphas()["cell"]
    federation = federate(compose_config(*plain, prior))
    asked = spied(federation)
    federation.strategy.start(federation.grid, num_rounds=1)
    (first,) = asked[0][0].states["alphas"].values()
    space = federation.strategy.space
    expected = space.lead(found_in(data_free), 0.75)["cell"]
    assert torch.equal(first, (without + expected).flatten())


def test_a_lead_that_nothing_overtakes_is_what_is_found(data_free, run_inline) -> None:
    prior = f"algorithm.prior={{run: {data_free}, margin: 50}}"
    assert found_in(run_inline("stages=[search]", prior, *FEW).folder) == found_in(data_free)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm.prior.run=/nowhere"], "/nowhere has found no architecture"),
        (["search_space=darts_small"], "the genotype's space is 'nasbench201'"),
        (["algorithm=fnas", "search_space=mbconv_small"], "spaces of cells only"),
        (["privacy=dp", "search_space.norm=group", "retrain.norm=group"], "exact function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_prior_that_cannot_lead_is_refused(
    overrides, sentence, one_shot, compose_config, federate
) -> None:
    prior = f"algorithm.prior={{run: {one_shot}, margin: 1}}"
    algorithm = [one for one in overrides if one.startswith("algorithm=")]
    others = [one for one in overrides if one not in algorithm]
    config = replace(compose_config(*algorithm, prior, *others), run_dir=str(one_shot))
    with pytest.raises(ConfigError, match=sentence):
        federate(config)


def test_a_prior_is_checked_before_the_run_begins(compose_config) -> None:
    config = compose_config("algorithm.prior={run: /nowhere, margin: 1}")
    with pytest.raises(ConfigError, match="/nowhere has found no architecture"):
        check_buildable(config)


def test_a_search_that_does_not_say_whether_it_asked_clients_is_taken_to_have(
    data_free, compose_config, federate, tmp_path
) -> None:
    events = (data_free / "events.jsonl").read_text()
    assert '"exchanges": 0' in events
    copied = shutil.copytree(data_free, tmp_path / "old")
    (copied / "events.jsonl").write_text(events.replace('"exchanges": 0', '"older": 0'))
    prior = f"algorithm.prior={{run: {copied}, margin: 1}}"
    config = replace(compose_config(*PRIVATE, prior), run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="exact function of records"):
        federate(config)


@pytest.mark.parametrize("of", ["data_free", "private"])
def test_a_private_search_may_begin_with_what_read_no_record_or_noised_it(
    of, data_free, compose_config, federate, run_inline, tmp_path
) -> None:
    folder = data_free if of == "data_free" else run_inline("stages=[search]", *PRIVATE).folder
    prior = f"algorithm.prior={{run: {folder}, margin: 1}}"
    config = replace(compose_config(*PRIVATE, prior), run_dir=str(tmp_path))
    alphas = federate(config).strategy.alphas()["cell"]
    best = [max(range(5), key=row.__getitem__) for row in alphas.tolist()]
    ops = [edge.op for edge in found_in(folder).cells["cell"]]
    assert [SPACES[1].ops[index] for index in best] == ops

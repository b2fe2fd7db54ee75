"""Federated DARTS, "DARTS (f)" in FEATHERS' tables, and FedNAS, which is another local rule.

Every round each client searches for some local epochs from the global weights and alphas, and the
server averages both with weights N_k / N.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Unpack

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.requests import LocalSearch, Search
from fednas_flwr.exchange.states import Part, PartsAverage
from fednas_flwr.privacy.plan import PlannedRelease, gradient_releases
from fednas_flwr.randomness import derive_seed
from fednas_flwr.search.local_search import Alternating, gumbel_states
from fednas_flwr.search.regularisation import rising
from fednas_flwr.search.settings import PER_ROUND, PER_STEP, SGD, Adam, Temperatures
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy, Shared, mean_metrics

Names = Mapping[str, Collection[str]]  # of a path's tensors, by state


class FedDARTS(RoundStrategy):
    """FedAvg of DARTS' alternating steps (Seng et al., 2023, FEATHERS, section 4, baseline).

    With the rule ``mixed_level`` it is FedNAS (He et al., 2020, arXiv 2004.08546, Alg. 1).

    With ``temperatures`` the steps are GDAS' (``search.gumbel``). Where a round has one path, or
    one for each client, the seed of its Gumbel noise comes from (seed, round), or (seed, round,
    client), and goes into the request. Messages carry all alphas, and of weights, moments and
    buffers what that path computes with; what no client was sent stays as it is. With a path for
    each client every tensor becomes the mean over the clients that had it, by N_k: for weights this
    differs from the average of whole states, where the untouched copies of the others count.

    Args:
        supernet: Newly initialised; it is only read.
        courier: Reaches the clients.
        space: Search space of the supernet.
        alternating: The clients' steps.
        local_epochs: Passes over each client's training records per round.
        batch_size: Records per step.
        weights: SGD, annealed over the rounds.
        alphas: Adam.
        beta_decay: Weight of beta-DARTS' regulariser in the last round; it rises linearly.
        temperatures: Of GDAS' single paths; None computes all ops.
        path_per: What has one path, a name of ``PATH_PER``: every gradient, as in the paper, or a
            round of each client, or of all clients.
        auxiliary_skip: beta of DARTS-minus in the first round; it falls linearly, to 0 after the
            last.
        seed: The run's seed, of paths that the server draws.
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        alternating: Alternating,
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        alphas: Adam,
        beta_decay: float = 0.0,
        temperatures: Temperatures | None = None,
        path_per: str = PER_STEP,
        auxiliary_skip: float = 0.0,
        seed: int = 0,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, **shared)
        self.alternating, self.weights, self.alphas_settings = alternating, weights, alphas
        self.local_epochs, self.batch_size = local_epochs, batch_size
        self.beta_decay, self.auxiliary_skip = beta_decay, auxiliary_skip
        self.temperatures, self.path_per = temperatures, path_per
        self.supernet, self.seed = supernet, seed

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Search locally everywhere, average weights, alphas and buffers."""
        falling = self.temperatures
        temperature = None if falling is None else falling.at_round(server_round, num_rounds)
        local = LocalSearch(
            self.amount(self.local_epochs, self.batch_size),
            self.client_weights(self.weights.at_round(server_round, num_rounds)),
            self.alphas_settings,
            alternating=replace(
                self.alternating,
                beta_decay=rising(self.beta_decay, server_round, num_rounds),
                temperature=temperature,
                auxiliary_skip=rising(
                    self.auxiliary_skip, num_rounds - server_round + 1, num_rounds
                ),
            ),
        )
        if temperature is None or self.path_per == PER_STEP:
            return self.train("train.search", self._request(local), self.weights.momentum)
        if self.path_per == PER_ROUND:
            seed, only = self._path(server_round)
            return self.train(
                "train.search", self._request(local, seed), self.weights.momentum, only=only
            )
        return self._train_apart(local, server_round)

    def _request(self, local: LocalSearch, path_seed: int | None = None) -> Search:
        """Return the request for a local search, on a path of this seed if there is one."""
        assert local.alternating is not None
        alternating = replace(local.alternating, path_seed=path_seed)
        return Search(replace(local, alternating=alternating), site=self.site)

    def _path(self, *drawn_for: int) -> tuple[int, Names]:
        """Return the seed of a round's path, or of a client's in it, and the path's tensors."""
        seed = derive_seed(self.seed, "path", *drawn_for)
        return seed, gumbel_states(self.supernet, self.alphas(), seed)

    def _train_apart(self, local: LocalSearch, server_round: int) -> dict[str, float]:
        """Have every client search on its own path; average every tensor over those that had it."""
        paths = {client: self._path(server_round, client) for client in self.candidates()}
        parts = {client: Part(self.layouts, only) for client, (_, only) in paths.items()}
        average, replies = PartsAverage(), []
        for client, reply in self.ask(
            "train.search",
            self._request(local),
            own_settings={c: self._request(local, seed) for c, (seed, _) in paths.items()},
            states=self.states,
            layouts=self.layouts,
            parts=parts,
        ):
            average.add(reply.states, parts[client].layouts, weight=reply.num_examples)
            replies.append(replace(reply, states={}))
        self.move(average.filled(self.states, self.layouts), self.weights.momentum)
        return mean_metrics(replies)


def releases(
    server_round: int,
    num_rounds: int,
    *,
    batch_size: float | None,
    local_steps: int,
    norms: Mapping[str, float],
) -> list[PlannedRelease]:
    """Return what a round releases of each client: every local step's two gradients."""
    verbs = dict.fromkeys(("weights", "alphas"), "train.search")
    return gradient_releases(verbs, batch_size=batch_size, steps=local_steps, norms=norms)

"""Federated DARTS, "DARTS (f)" in FEATHERS' tables, and FedNAS, which has another local rule.

In every round each client searches for some local epochs from the global weights and alphas, and
the server averages both, weighted by N_k / N.
"""

from fednas_flwr.algorithms.base import Metrics, PrivateRound, RoundStrategy
from fednas_flwr.algorithms.fed_darts import FedDARTSSettings
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.local_search import Alternating, rising


class FedDARTS(RoundStrategy[FedDARTSSettings]):
    """FedAvg of DARTS' alternating steps (Seng et al., 2023, FEATHERS, section 4, baseline).

    With the rule ``mixed_level`` it is FedNAS (He et al., 2020, arXiv 2004.08546, Alg. 1).
    """

    def run_round(self, server_round: int, num_rounds: int) -> Metrics:
        """Search locally everywhere, average weights, alphas and buffers."""
        settings = self.settings
        beta_decay = rising(settings.beta_decay, server_round, num_rounds)
        alternating = Alternating(settings.rule, settings.proximal, beta_decay)
        return self.search_locally(server_round, num_rounds, alternating=alternating)

    @classmethod
    def releases(cls, settings: FedDARTSSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of every local step's two gradients."""
        return private.gradients(dict.fromkeys(("weights", "alphas"), "train.search"))

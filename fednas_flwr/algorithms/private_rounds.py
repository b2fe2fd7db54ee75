"""The rounds of a private run, planned from its configuration alone: their terms and releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fednas_flwr.privacy.actions import SPLIT_OF
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.incompatible import by_record


def data_set_of(config: Config) -> str | None:
    """Id that private sites' policies give their data; None without privacy."""
    privacy = config.privacy
    return privacy.data_set if isinstance(privacy, DifferentialPrivacy) else None


def local_steps(config: Config, stage: str) -> int | None:
    """Noised steps of a local training, in place of epochs.

    None without privacy, and where its unit is the client, which trains by epochs.
    """
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy) or not by_record(config):
        return None
    return privacy.retrain.local_steps if stage == "retrain" else privacy.local_steps


def expected_batch(config: Config, stage: str) -> float | None:
    """Size of the batch of a step of ``search`` or ``retrain`` at a client, expected with privacy.

    Below 1 it is the rate at which each record is drawn; None takes all records.
    """
    terms: object = config.privacy
    batch_size: int | None = getattr(config.algorithm, "batch_size", None)
    if stage == "retrain":
        terms, batch_size = getattr(terms, "retrain", None), config.retrain.batch_size
    rate: float | None = getattr(terms, "rate", None)
    if rate is None:
        return batch_size
    return rate if rate < 1 else None


@dataclass(frozen=True)
class PrivateRound:
    """A round of a stage of a private run, from whose configuration its releases follow.

    Attributes:
        config: The run's.
        privacy: Its privacy.
        stage: ``search`` or ``retrain``.
        number: Its number, from 1.
        num_rounds: Rounds of the stage.
    """

    config: Config
    privacy: DifferentialPrivacy
    stage: str
    number: int
    num_rounds: int

    @property
    def local_steps(self) -> int:
        """Noised steps of a local training, also where the client then takes epochs."""
        terms = self.privacy.retrain if self.stage == "retrain" else self.privacy
        return terms.local_steps

    def gradients(
        self,
        actions: Mapping[str, str],
        *,
        steps: int | None = None,
        splits: Sequence[str] = (),
        shared: bool = False,
    ) -> list[PlannedRelease]:
        """The releases of the gradients of steps, each of which releases every named state.

        Args:
            actions: By state, ``weights`` or ``alphas``, the action.
            steps: Steps of each state; None takes those of a local training.
            splits: The splits that are read; none: the one of the state in a search.
            shared: See :class:`~fednas_flwr.privacy.plan.PlannedRelease`.
        """
        norms = self.privacy.search_norms
        if self.stage == "retrain":
            norms = {"weights": self.privacy.retrain.max_grad_norm}
        return [
            PlannedRelease(
                self.stage,
                action,
                state,
                tuple(splits) or (SPLIT_OF[state],),
                expected_batch(self.config, self.stage),
                self.local_steps if steps is None else steps,
                norms[state],
                shared=shared,
            )
            for state, action in actions.items()
        ]

    def rewards(self, action: str, steps: int = 1) -> PlannedRelease:
        """Releases of rewards over all validation records."""
        norm = self.privacy.search_norms["rewards"]
        return PlannedRelease(self.stage, action, "rewards", ("validation",), None, steps, norm)

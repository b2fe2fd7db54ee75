"""The rounds of a private run, planned from its configuration alone: their terms and releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fednas_flwr.privacy.actions import SPLIT_OF
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.settings import Config, DifferentialPrivacy


def search_batch(config: Config) -> float | None:
    """Size of a search step's batch at a client, expected with privacy.

    Below 1 it is the rate at which each record is drawn; None takes all records.
    """
    return _batch(config.privacy, getattr(config.algorithm, "batch_size", None))


def retrain_batch(config: Config) -> float | None:
    """Size of a retraining step's batch at a client, likewise."""
    privacy = config.privacy
    terms = privacy.retrain if isinstance(privacy, DifferentialPrivacy) else privacy
    return _batch(terms, config.retrain.batch_size)


def _batch(terms: object, batch_size: int | None) -> float | None:
    rate: float | None = getattr(terms, "rate", None)
    if rate is None:
        return batch_size
    return rate if rate < 1 else None


@dataclass(frozen=True)
class PrivateRound:
    """A round of a private stage: the terms that its releases follow from, beside the settings.

    Attributes:
        stage: ``search`` or ``retrain``.
        number: Its number, from 1.
        num_rounds: Rounds of the stage.
        batch_size: See :class:`~fednas_flwr.privacy.plan.PlannedRelease`.
        local_steps: Noised steps of a local training.
        norms: Clipping norms by kind of release.
        measures: Whether metrics are released.
        secure_sum: Whether clients can share the noise of what a secure sum adds up.
        space: Name of the search space.
    """

    stage: str
    number: int
    num_rounds: int
    batch_size: float | None
    local_steps: int
    norms: Mapping[str, float]
    measures: bool
    secure_sum: bool
    space: str

    @classmethod
    def of(cls, config: Config, stage: str, number: int, num_rounds: int) -> PrivateRound:
        """A round of a stage of a private run."""
        privacy = config.privacy
        assert isinstance(privacy, DifferentialPrivacy)
        batch_size, local_steps, norms = search_batch(config), privacy.local_steps, {}
        if stage == "retrain":
            batch_size, local_steps = retrain_batch(config), privacy.retrain.local_steps
            norms = {"weights": privacy.retrain.max_grad_norm}
        return cls(
            stage,
            number,
            num_rounds,
            batch_size,
            local_steps,
            {**privacy.search_norms, **norms},
            privacy.metrics_noise_multiplier is not None,
            config.secure_sum is not None,
            config.search_space.name,
        )

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
        return [
            PlannedRelease(
                self.stage,
                action,
                state,
                tuple(splits) or (SPLIT_OF[state],),
                self.batch_size,
                self.local_steps if steps is None else steps,
                self.norms[state],
                shared=shared,
            )
            for state, action in actions.items()
        ]

    def rewards(self, action: str, steps: int = 1) -> PlannedRelease:
        """Releases of rewards over all validation records."""
        norm = self.norms["rewards"]
        return PlannedRelease(self.stage, action, "rewards", ("validation",), None, steps, norm)

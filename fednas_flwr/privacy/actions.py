"""All actions that can be requested of a client, and the parts of replies that depend on records.

This table is the whole surface through which data can leave a client. In private mode a reply
carries only its header, layout digests and number of examples, which are public, ``releases``, and
the properties that are listed with its request (``protocol.requests``).
"""

from dataclasses import dataclass

SUPERNET = "supernet"  # name of the network that the run's search space provides
SPLIT_OF = {"alphas": "validation", "weights": "train"}  # split read by a state's gradient


@dataclass(frozen=True)
class Action:
    """One action.

    Attributes:
        releases: States and metrics that depend on records. With privacy they are noised and
            booked, or computed from values that were.
        metrics: The only metrics that a reply may carry.
        gradients_of: States that are returned as sums over records, mostly of gradients.
        of_supernet: True if it concerns the supernet, whatever its request says.
        trains: True if it trains the model that it was sent and returns it.
        never_private: True if no noise is defined for the values that it returns.
        note: Description of the action in the template of policies.
        usual: True if that template allows it.
    """

    releases: frozenset[str] = frozenset()
    metrics: frozenset[str] = frozenset()
    gradients_of: tuple[str, ...] = ()
    of_supernet: bool = False
    trains: bool = False
    never_private: bool = False
    note: str = ""
    usual: bool = True

    @property
    def is_public(self) -> bool:
        """True if a private reply releases nothing about the records."""
        return not self.releases


_MODEL = frozenset({"weights", "alphas", "moments"})
_TRAIN, _VALIDATION = frozenset({"train_loss", "train_accuracy"}), frozenset({"validation_loss"})
_MEASURED = frozenset({"loss", "accuracy"})
METRICS = _TRAIN | _VALIDATION | _MEASURED


def _gradients(*states: str, note: str, of_supernet: bool = True, usual: bool = True) -> Action:
    """Return the action that returns the sums of the gradients of some states."""
    seen = {"weights": _TRAIN, "alphas": _VALIDATION}
    metrics = frozenset[str]().union(*(seen[state] for state in states))
    return Action(frozenset(states), metrics, states, of_supernet, note=note, usual=usual)


ACTIONS = {
    "query.describe": Action(note="tells the numbers of this file"),
    "query.commit": Action(note="keeps a run's schedule of releases"),
    "query.latency": Action(note="times the layers of a search space on this machine"),
    "query.statistics": Action(
        frozenset({"statistics"}),
        gradients_of=("statistics",),
        note="noised means and deviations of columns, or means of features",
    ),
    # the site's measurements of the model stay there
    "query.keep_model": Action(note="takes the trained model for this site, into state/models"),
    # values are noised, if at all, before they are masked
    "query.sign_survivors": Action(note="of secure sums, see the end of this file"),
    "query.open_masks": Action(note="of secure sums, too"),
    "train.weight_gradient": _gradients("weights", note="a step's noised gradient of the weights"),
    "train.alpha_gradient": _gradients("alphas", note="and of the alphas"),
    "train.gradients": _gradients(
        "weights", "alphas", note="of both at once (algorithm.fused=true)", usual=False
    ),
    "train.network_gradient": _gradients(
        "weights", note="retraining, one step per message (retrain.exchange)", of_supernet=False
    ),
    "train.search": Action(
        _MODEL, _TRAIN | _VALIDATION, of_supernet=True, trains=True, note="local steps of both"
    ),
    "train.candidate": Action(
        _MODEL - {"alphas"},
        _TRAIN,
        of_supernet=True,
        trains=True,
        note="DPNAS: steps on one network of a supernet",
        usual=False,
    ),
    "train.probe": Action(frozenset({"rewards"}), note="trials of hyper-parameters"),
    "train.weights": Action(
        _MODEL - {"alphas"}, _TRAIN | _VALIDATION, trains=True, note="retraining"
    ),
    "evaluate.candidates": Action(
        frozenset({"rewards"}), _VALIDATION, note="DPNAS: their noised accuracies", usual=False
    ),
    "evaluate.model": Action(_MEASURED, _MEASURED, note="noised loss and accuracy"),
    "evaluate.scores": Action(
        frozenset({"scores"}), gradients_of=("scores",), note="noised counts of scores by class"
    ),
    "evaluate.personalised": Action(_MEASURED, _MEASURED, never_private=True),
}
PRIVATE_ACTIONS = tuple(name for name, action in ACTIONS.items() if not action.never_private)

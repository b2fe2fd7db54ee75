"""A linear classifier on a network's input, beside the network.

With features that suit a linear model and much noise, it carries what deeper layers cannot learn.
"""

from __future__ import annotations

from torch import Tensor, nn

from fednas_flwr.base.layers import linear
from fednas_flwr.spaces.wide_operations import Stack


class SkipNetwork(nn.Module):
    """A network that can have a linear classifier on its input beside all else that it computes.

    Attributes:
        skip: The classifier, whose logits are added; None for none.
    """

    skip: nn.Linear | None

    def __init__(self) -> None:
        """Begin without one."""
        super().__init__()
        self.skip = None

    def joined(self, logits: Tensor, x: Tensor, stack: Stack | None = None) -> Tensor:
        """Return the logits [B, classes] after adding the skip's.

        Args:
            logits: Those of everything else.
            x: What the network was called with, [B, ...].
            stack: As of the fast engine; None where there is one set of weights.
        """
        if self.skip is None:
            return logits
        if stack is None:
            added: Tensor = self.skip(x.flatten(1))
            return logits + added
        return logits + linear(x.flatten(1), stack([self.skip.weight]), stack([self.skip.bias]))

"""Small networks that are said in one place: named layers, and what is done with them."""

from torch import nn


class Made(nn.Module):
    """A network whose ``forward(self, x)`` is given, with layers or other attributes by name."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self._made_forward = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *given):
        return self._made_forward(self, *given)

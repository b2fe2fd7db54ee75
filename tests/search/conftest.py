"""Tiny modules with weights and alphas, in double precision, whose gradients one can write down."""

import pytest
import torch
from torch import nn


class TwoParameters(nn.Module):
    """Logits whose cross-entropy with label 0 is ``OFFSET + q (w - a t)^2 / 2 + c a w``.

    A sample is ``(q, t, c)``. Quadratic in the weight w, so that the second-order gradient of the
    alpha a has a closed form.
    """

    OFFSET = 20.0  # keeps the loss above 0, as a cross-entropy is

    def __init__(self, w, a):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.a = nn.Parameter(torch.tensor([a], dtype=torch.float64))
        self.unused = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))

    def weights(self):
        return {"w": self.w, "unused": self.unused}

    def alphas(self):
        return {"cell": self.a}

    def forward(self, x):
        q, t, c = x.unbind(1)
        loss = self.OFFSET + q * (self.w - self.a * t) ** 2 / 2 + c * self.a * self.w
        return torch.stack([torch.zeros_like(loss), torch.expm1(loss).log()], 1)


class SmoothNet(nn.Module):
    """Two mixed edges with smooth activations; alphas by kind, logits [B, 3]."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(4, 5, dtype=dtype)
        self.second = nn.Linear(5, 3, dtype=dtype)
        kinds = ("normal", "reduction")
        self.a = nn.ParameterDict({k: 0.3 * torch.randn(1, 3, dtype=dtype) for k in kinds})

    def weights(self):
        return {n: p for n, p in self.named_parameters() if not n.startswith("a.")}

    def alphas(self):
        return dict(self.a.items())

    def forward(self, x):
        for layer, kind in ((self.first, "normal"), (self.second, "reduction")):
            x = layer(x)
            mix = self.a[kind].softmax(-1)[0]
            x = mix[0] * x + mix[1] * torch.tanh(x) + mix[2] * torch.sin(x)
        return x


@pytest.fixture
def quadratic():
    return TwoParameters(w=1.3, a=0.7)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return SmoothNet()


@pytest.fixture
def batch():
    """``batch(size, seed)``: features [B, 4] in double precision and labels [B] of 3 classes."""

    return lambda size, seed: tensors_of((4,), 3, size, torch.Generator().manual_seed(seed))


@pytest.fixture
def untouched():
    """``check = untouched(net)``; ``check()`` fails if a parameter or its ``.grad`` has changed."""

    def remember(network):
        for index, parameter in enumerate(network.parameters()):
            if index % 2:
                parameter.grad = torch.full_like(parameter, 0.25)
        before = {
            n: (p.detach().clone(), None if p.grad is None else p.grad.clone())
            for n, p in network.named_parameters()
        }

        def check():
            for name, parameter in network.named_parameters():
                value, grad = before[name]
                assert torch.equal(parameter, value), name
                assert (parameter.grad is None) == (grad is None), name
                assert grad is None or torch.equal(parameter.grad, grad), name
                assert parameter.requires_grad

        return check

    return remember


def copies(named):
    """Return copies of tensors, by their names."""
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def tensors_of(shape, classes, size, generator):
    """Return made inputs [size, *shape] in double precision, and labels."""
    x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (size,), generator=generator)

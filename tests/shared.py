"""What several test files use: models, data, and what equal means (DESIGN: bitwise, or 1e-12 in float64)."""

from functools import partial

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Odd(nn.Module):
    """Parameters that trip up flat buffers: scalar, empty, transposed, of one element, and used in another order."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.first = nn.Linear(5, 7)
        self.one = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return self.first(x * self.one @ self.transposed) * self.scale + self.empty.sum()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Mixed(nn.Module):
    """Parameters of two dtypes, in turns."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[1].to(torch.float64)
        self.layers[3].to(torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def make_model(kind, dtype=torch.float32, seed=1):
    """A model of inputs (rows, 6); the same on every rank."""
    torch.manual_seed(seed)
    if kind == "mixed":
        return Mixed()
    if kind == "odd":
        model = Odd()
    elif kind == "tied":
        model = Tied()
    elif kind == "batchnorm":
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    else:
        model = nn.Sequential(nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))
        if kind == "frozen":
            model[0].bias.requires_grad_(False)
            model[2].weight.requires_grad_(False)
    return model.to(dtype)


MODELS = ("plain", "frozen", "tied", "batchnorm", "odd", "mixed")

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


def make_batch(rank, step, dtype=torch.float32, rows=5):
    """Inputs (rows, 6) that differ on every rank and step."""
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(output):
    return output.float().square().mean() if output.dtype == torch.bfloat16 else output.square().mean()


def assert_equal(ours, theirs, exact, what=""):
    """bitwise when `exact`, else to 1e-12 of the largest element; None equals only None."""
    assert (ours is None) == (theirs is None), f"{what}: {ours} against {theirs}"
    if ours is None or torch.equal(ours, theirs):
        return
    assert ours.shape == theirs.shape, what
    difference = (ours - theirs).abs().max().item()
    bound = 0.0 if exact else 1e-12 * max(1.0, theirs.abs().max().item())
    assert difference <= bound, f"{what}: max difference {difference:.3e}, allowed {bound:.1e}"


def assert_same_parameters(ours, theirs, exact, what=""):
    """Parameters and gradients of two models."""
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert_equal(a.grad, b.grad, exact, f"{what} gradient of {name}")
        assert_equal(a.detach(), b.detach(), exact, f"{what} {name}")


class Collectives(TorchDispatchMode):
    """Records (operator, bytes of its payload) of every collective, in the order of issue."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            size = sum(tensor.nbytes for tensor in tree_leaves(args[0]))
            self.calls.append((func._schema.name.removeprefix("c10d::"), size))
        return func(*args, **(kwargs or {}))

    def bytes_of(self, name):
        return sum(size for called, size in self.calls if called == name)

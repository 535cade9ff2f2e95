"""Models, data and comparisons of several test files. Equal is bitwise, or 1e-12 in float64."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class Odd(nn.Module):
    """Parameters that trip up flat buffers: scalar, empty, transposed, used in another order."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        transposed = torch.randn(5, 6).t()
        self.transposed = nn.Parameter(transposed)
        self.first = nn.Linear(5, 7)
        self.one = nn.Parameter(torch.randn(1))

    def forward(self, x):
        hidden = x * self.one @ self.transposed
        return self.first(hidden) * self.scale + self.empty.sum()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden)


class Mixed(nn.Module):
    """Parameters of two dtypes, in turns."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[1::2].to(torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = x.to(layer.weight.dtype)
            x = torch.tanh(layer(x))
        return x


def make_plain():
    return nn.Sequential(
        nn.Linear(6, 33),
        nn.ReLU(),
        nn.Linear(33, 17),
        nn.Tanh(),
        nn.Linear(17, 3),
    )


def make_frozen():
    model = make_plain()
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def make_batchnorm():
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


MAKERS = {
    "plain": make_plain,
    "frozen": make_frozen,
    "tied": Tied,
    "batchnorm": make_batchnorm,
    "odd": Odd,
    "mixed": Mixed,
}


def make_model(kind, dtype=torch.float32, seed=1):
    """A model of inputs (rows, 6); the same on every rank."""
    torch.manual_seed(seed)
    model = MAKERS[kind]()
    return model if kind == "mixed" else model.to(dtype)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


def randn(shape, seed=0, dtype=torch.float64):
    """The same numbers on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
    return numbers.to(torch.get_default_device())


def make_batch(rank, step, dtype=torch.float32, rows=5):
    """Inputs (rows, 6) that differ on every rank and step."""
    return randn((rows, 6), seed=100 * step + rank, dtype=torch.float32).to(dtype)


def loss_of(output):
    if output.dtype == torch.bfloat16:
        output = output.float()
    squares = output.square()
    return squares.mean()


def batch_loss(model, rank, step):
    first = next(model.parameters())
    batch = make_batch(rank, step, first.dtype)
    return loss_of(model(batch))


def assert_equal(ours, theirs, exact, what=""):
    """bitwise when `exact`, else to 1e-12 of the largest element; None equals only None."""
    bound = 0.0
    if not exact and theirs is not None:
        bound = 1e-12 * max([1.0, *theirs.abs().flatten().tolist()])
    assert_close(ours, theirs, rtol=0, atol=bound, msg=lambda text: f"{what}: {text}")


def assert_same_parameters(ours, theirs, exact, what=""):
    """Parameters and gradients of two models."""
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_equal(a.grad, b.grad, exact, f"{what} gradient of {name}")
        assert_equal(a, b, exact, f"{what} {name}")


class Collectives(TorchDispatchMode):
    """Records (operator, bytes of its payload) of every collective, in the order of issue."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            size = sum(tensor.nbytes for tensor in tree_leaves(args[0]))
            self.calls.append((name, size))
        return func(*args, **(kwargs or {}))

    def bytes_of(self, name):
        return sum(size for called, size in self.calls if called == name)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 12)
        self.two = nn.Linear(12, 6)

    def forward(self, x):
        hidden = torch.tanh(self.one(x))
        return x + self.two(hidden)


HOW = {
    "plainly": lambda f, x: f(x),
    "checkpointed": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


class Blocks(nn.Sequential):
    """Blocks and a head. Calls the blocks in `which`, by `how`."""

    def __init__(self, count=4):
        super().__init__(*[Block() for _ in range(count)], nn.Linear(6, 3))

    def forward(self, x, which=None, how=HOW["plainly"]):
        every_block = range(len(self) - 1)
        for i in every_block if which is None else which:
            x = how(self[i], x)
        return self[-1](x)


class Outputs(Block):
    """Its outputs lie in containers: a view, one that is not used, the input itself."""

    def forward(self, *, x):
        hidden = self.one(x)
        view = self.two(hidden).view(2, -1, 3)
        return {"a": [self.one(x)], "b": (view, None), "x": x}


class Outer(nn.Sequential):
    """Its last two parts are in one checkpoint."""

    def __init__(self):
        blocks = nn.Sequential(Block(), Block())
        super().__init__(Outputs(), blocks, Outputs())

    def forward(self, x):
        first = self[0](x=x[:4])
        first["a"][0].mul_(2.0)  # changed in place
        inner = first["b"][0].reshape(4, 6) + first["a"][0].sum()

        def last_two(inner):
            hidden = self[1](inner)
            return self[2](x=hidden)

        last = checkpoint(last_two, inner, use_reentrant=False)
        return last["a"][0][:, :6] + last["x"]


class Reader(nn.Module):
    """Some ranks use some of its parameters, on some steps; the gradients of step 1 are -0.0."""

    def __init__(self, numels):
        super().__init__()
        shapes = [(n,) if n % 2 else (n // 2, 2) for n in numels]
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, rank, step):
        total = self.weights[0].sum() * 0
        for number, weight in enumerate(self.weights):
            if hash((len(self.weights), step, rank, number)) % 3 == 0:
                turned = weight * (1 + rank + step)
                total = total + turned.sin().sum()
        return total * (-0.0 if step == 1 else 1.0)


class Watch(TorchDispatchMode):
    """`seen`: (operator, what `see` returned after it) of each call."""

    def __init__(self, see):
        super().__init__()
        self.see = see
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append((func._schema.name, self.see()))
        return result


@contextmanager
def fake_world(N, rank):
    """The default group is of N ranks, between which no data moves."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_world_on_meta(N, rank):
    """New tensors are on the meta device too. They have no values that the host could read."""
    with fake_world(N, rank), torch.device("meta"):
        try:
            dist.all_reduce(torch.ones(1))
        except NotImplementedError:
            pytest.skip(f"torch {torch.__version__} has no collectives for the meta device")
        yield

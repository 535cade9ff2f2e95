"""An implementation of --activation-checkpoint is called as function(function, *its arguments).

It also gets use_reentrant=False, if it has such a name, and keyword arguments for the inner function.
"""

import itertools
import weakref
from functools import partial

import pool
import torch
import torch.nn as nn
import torch.nn.functional as F
from shared import loss_of
from torch.distributed.nn.functional import all_reduce as all_reduced

from claims.registry import (
    add_kind,
    call,
    check,
    claim,
    error_from,
    same,
    say,
)


def make_checkpoint(implementation, function, *args, **kwargs):
    return call(partial(implementation, **kwargs), function, *args, use_reentrant=False)


add_kind(
    "activation-checkpoint",
    called=__doc__,
    make=make_checkpoint,
    ours="activation_checkpoint:checkpoint",
    pytorchs="torch.utils.checkpoint:checkpoint",
)


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def computes_alike(make, build, **how):
    """build(how a function is called) -> loss, leaves; bitwise against calling it plainly, by backward and by grad."""
    for step in range(3):
        results = []
        for way in (make, plainly):
            torch.manual_seed(step)
            loss, leaves = build(way, **how)
            if step:
                loss.backward()
            gradients = (
                [leaf.grad for leaf in leaves]
                if step
                else torch.autograd.grad(loss, leaves, allow_unused=True)
            )
            results.append(
                {"loss": loss, "next random number": torch.rand(3), **dict(enumerate(gradients))}
            )
        for what, plain in results[1].items():
            same(
                results[0][what],
                plain,
                what if isinstance(what, str) else f"gradient {what}",
                exact=True,
            )


alike = partial(claim, "activation-checkpoint", of=computes_alike)


def layer(*more):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 6), nn.Tanh())


def layers(how, drop=0.0, autocast=False):
    x, layers = torch.randn(4, 6, requires_grad=True), [layer(nn.Dropout(drop)) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = F.dropout(how(layers[1], F.dropout(how(layers[0], x), drop)), drop)
    return loss_of(how(layers[2], y.float())), [x, *nn.ModuleList(layers).parameters()]


of_layers = partial(
    say, worlds=[1], kinds="activation-checkpoint", check=computes_alike, build=layers
)
of_layers(
    "recomputed", "Loss and gradients are bitwise those of calling the function, layer after layer."
)
of_layers(
    "random_numbers",
    "Dropout drops the same again; what is drawn afterwards is what would have been.",
    drop=0.5,
)
of_layers(
    "autocast_again",
    "What ran under autocast runs under it again, though backward does not.",
    autocast=True,
)


@alike(1)
def closures(how):
    """Gradients reach what the function uses without getting it as an argument."""
    weight, module = torch.randn(6, 6, requires_grad=True), layer()
    hidden, tokens = torch.tanh(weight), torch.randn(4, 6)  # tokens want no gradient
    return loss_of(how(lambda x: torch.tanh(module(x) @ hidden), tokens)), [
        weight,
        *module.parameters(),
    ]


@alike(1)
def any_structure(how):
    """Inputs and outputs may be nested, named, without gradient, or no tensors."""

    def function(pair, scale=1.0, *, more):
        return {
            "y": torch.tanh(pair[0] * pair[1]["b"]) * scale + more[0],
            "n": (more[1], pair[0].argmax()),
        }

    a, b, c = (torch.randn(5, requires_grad=True) for _ in range(3))
    output = how(function, (a, {"b": b}), 2.0, more=[c, "text"])
    check(output["n"][0] == "text", "an output that is no tensor is lost")
    return loss_of(output["y"]) * output["n"][1], [a, b, c]


@alike(1)
def nested(how):
    """A checkpoint may be in another, and a layer may be called twice."""
    x, first, second = torch.randn(4, 6, requires_grad=True), layer(nn.Dropout(0.5)), layer()
    inner = lambda x: how(first, torch.sin(how(second, x))) + x  # noqa: E731
    y = how(lambda x: torch.cos(how(inner, inner(x))), x)
    return loss_of(y), [x, *first.parameters(), *second.parameters()]


@alike(3)
def collectives_again(how):
    """What communicates in forward does so again, in the same order on all ranks."""
    x, weights = torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, 6) * (1 + pool.rank())

    def function(x):
        for weight in weights.requires_grad_():
            x = torch.tanh(all_reduced(x @ weight, group=pool.group()))
        return x

    return loss_of(how(function, how(function, x))), [x, weights]


@alike(1)
def again(how):
    """Backward may come twice (retain_graph), for one part of the leaves after the other, and through backward."""
    x, module = torch.randn(4, 6, requires_grad=True), layer(nn.Dropout(0.5))
    loss = loss_of(how(module, how(torch.sin, x)))
    gradients = torch.autograd.grad(loss, module[0].weight, retain_graph=True)
    gradients += torch.autograd.grad(loss, [x, module[0].weight], create_graph=True)
    return loss + sum(map(loss_of, gradients)), [x, *module.parameters()]


@claim("activation-checkpoint", 1)
def forgotten(make):
    """Nothing of the inside is in memory between forward and backward, nor after it; the function runs twice in all."""
    inside, x = [], torch.randn(4, 6, requires_grad=True)

    def function(x):
        y = torch.tanh(x)
        z = torch.sigmoid(y)
        inside.append([weakref.ref(tensor.untyped_storage()) for tensor in (y, z)])
        return torch.exp(z * y).sin()

    def check_forgotten(when):
        alive = sum(reference() is not None for tensors in inside for reference in tensors)
        check(
            not alive, f"{alive} of {2 * len(inside)} tensors of the inside are alive after {when}"
        )

    output = make(function, x)
    check_forgotten("forward")
    output.sum().backward()
    check_forgotten("backward")
    check(len(inside) == 2, f"the function ran {len(inside)} times")
    with torch.no_grad():
        make(function, x)
    check(len(inside) == 3, "under no_grad it did not run once")


@claim("activation-checkpoint", 1)
def differs(make):
    """A recomputation that saves fewer tensors, or others in shape or dtype, is an error, as is a changed input."""
    changes = {
        "number": lambda x, again: x.sin() if again else x.sin().cos().tan(),
        "shape": lambda x, again: (x if again else torch.cat([x, x])).sin().sum(),
        "dtype": lambda x, again: (x.double() if again else x).sin().sum(),
        "input": lambda x, again: x.sin(),
    }
    for what, function in changes.items():
        x, runs = torch.randn(4, requires_grad=True) * 1, itertools.count()
        y = make(lambda x, function=function, runs=runs: function(x, next(runs) > 0), x)
        if what == "input":
            x.mul_(2)
        with error_from(f"a changed {what}"):
            y.sum().backward()

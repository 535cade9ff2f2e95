"""An implementation of --activation-checkpoint is called as torch.utils.checkpoint.checkpoint.

That is function(function, *arguments, **keywords), which calls the inner function with these. It
also gets use_reentrant=False, if it has such a name. Claims go backward with loss.backward() in
float32, and compare bitwise with calling the functions without a checkpoint.
"""

import weakref
from functools import partial

import environment
import pool
import torch
import torch.nn as nn
import torch.nn.functional as F
from shared import loss_of
from torch.distributed.nn.functional import all_reduce

from claims.registry import add_kind, call, check, claim, error_from, same, say


def make_checkpoint(implementation, function, *args, **kwargs):
    return call(partial(implementation, **kwargs), function, *args, use_reentrant=False)


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


add_kind(
    "activation-checkpoint",
    called=__doc__,
    make=make_checkpoint,
    ours="activation_checkpoint:checkpoint",
    pytorchs="torch.utils.checkpoint:checkpoint",
)


def results(build, way, **how):
    """Return by name: the loss, the leaves' gradients, and the next random number after them."""
    torch.manual_seed(0)
    loss, leaves = build(way, **how)
    loss.backward()
    gradients = {f"gradient {number}": leaf.grad for number, leaf in enumerate(leaves)}
    return gradients | {"loss": loss, "next random number": torch.rand(3)}


def computes_alike(make, build, **how):
    """build(how functions are called) -> loss, leaves."""
    ours = results(build, make, **how)
    for what, expected in results(build, plainly, **how).items():
        same(ours[what], expected, what, exact=True)


alike = partial(claim, "activation-checkpoint", of=computes_alike)


def layer(drop=0.5):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 6), nn.Tanh())


def three_layers(how, drop=0.5, autocast=False):
    x = torch.randn(4, 6, requires_grad=True)
    layers = nn.ModuleList(layer(drop) for _ in range(3))
    y = x
    with torch.autocast(environment.DEVICE_TYPE, torch.bfloat16, enabled=autocast):
        for each in layers[:2]:
            y = how(each, y)
            y = F.dropout(y, drop)
    y = how(layers[2], y.float())
    return loss_of(y), [x, *layers.parameters()]


of_layers = partial(
    say,
    worlds=[1],
    kinds="activation-checkpoint",
    check=computes_alike,
    build=three_layers,
)
of_layers(
    "recomputed",
    "Loss and gradients are bitwise those of calling the layers plainly.",
    drop=0.0,
)
of_layers(
    "random_numbers",
    "The recomputation drops what forward dropped, and does not change later random numbers.",
)
of_layers(
    "autocast_again",
    "The recomputation of a layer that ran under autocast runs under autocast.",
    drop=0.0,
    autocast=True,
)


@alike(1, may_refuse=True)
def closures(how):
    """Gradients reach what the function uses without getting it as an argument."""
    module = layer()
    weight = torch.randn(6, 6, requires_grad=True)
    hidden = torch.tanh(weight)

    def function(x):
        return torch.tanh(module(x) @ hidden)

    tokens = torch.randn(4, 6)  # needs no gradient
    return loss_of(how(function, tokens)), [weight, *module.parameters()]


@alike(1, may_refuse=True)
def any_structure(how):
    """Inputs and outputs may be nested or named, need no gradient, or be no tensors."""

    def function(pair, *, more):
        y = torch.tanh(pair[0] * pair[1]["b"]) + more[0]
        return {"y": y, "n": (more[1], pair[0].argmax())}

    a, b, c = torch.randn(3, 5).unbind()
    leaves = [x.requires_grad_() for x in (a, b, c)]
    output = how(function, (a, {"b": b}), more=[c, "text"])
    text, largest = output["n"]
    check(text == "text", "an output that is no tensor is lost")
    return loss_of(output["y"]) * largest, leaves


@alike(1)
def nested(how):
    """A checkpoint may be inside another, and a layer may be called twice."""
    x = torch.randn(4, 6, requires_grad=True)
    module = layer()

    def inner(x):
        y = how(module, torch.sin(x))
        return how(module, y) + x

    def outer(x):
        return torch.cos(how(inner, inner(x)))

    return loss_of(how(outer, x)), [x, *module.parameters()]


@alike(3)
def collectives_again(how):
    """The recomputation communicates as forward did, in the same order on all ranks."""
    x = torch.randn(4, 6, requires_grad=True)
    weights = torch.randn(2, 6, 6, requires_grad=True)

    def function(x):
        for weight in weights * (1 + pool.rank()):
            total = all_reduce(x @ weight, group=pool.group())
            x = torch.tanh(total)
        return x

    y = how(function, x)
    return loss_of(how(function, y)), [x, weights]


@alike(1, may_refuse=True)
def again(how):
    """Backward may run twice with retain_graph."""
    loss, leaves = three_layers(how)
    loss.backward(retain_graph=True)
    return loss, leaves


@alike(1, about="property")
def autograd_grad(how):
    """torch.autograd.grad works, for one leaf after another and for gradients of gradients."""
    loss, leaves = three_layers(how)
    gradients = torch.autograd.grad(loss, leaves[1], retain_graph=True)
    gradients += torch.autograd.grad(loss, leaves[:2], create_graph=True)
    return loss + sum(map(loss_of, gradients)), leaves


@claim("activation-checkpoint", 1, about="property")
def forgotten(make):
    """What the function computed is freed after forward, and the function runs twice in all."""
    inside = []  # weak references to the memory of what it computed, one of each run
    x = torch.randn(4, 6, requires_grad=True)

    def function(x):
        y = torch.tanh(x)
        inside.append(weakref.ref(y.untyped_storage()))
        return torch.exp(y).sin()

    def check_forgotten(when):
        alive = sum(reference() is not None for reference in inside)
        check(not alive, f"{alive} of {len(inside)} tensors are alive after {when}")

    output = make(function, x)
    check_forgotten("forward")
    output.sum().backward()
    check_forgotten("backward")
    check(len(inside) == 2, f"the function ran {len(inside)} times")
    with torch.no_grad():
        make(function, x)
    check(len(inside) == 3, "under no_grad it did not run once")


def two_sines(x):
    return x.sin().sin()


def double(x):
    return two_sines(x.double())


def longer(x):
    return two_sines(torch.cat([x, x]))


@claim("activation-checkpoint", 1, about="property")
def differs(make):
    """A recomputation that saves other tensors than forward, or a changed input, is an error."""
    leaf = torch.randn(4, requires_grad=True)
    for function in (torch.sin, longer, double, two_sines):
        runs = [function, two_sines]  # the second run comes first
        x = leaf * 1
        y = make(lambda x, runs=runs: runs.pop()(x), x)
        if function is two_sines:
            x.mul_(2)
        with error_from(f"a recomputation by {function.__name__}"):
            y.sum().backward()

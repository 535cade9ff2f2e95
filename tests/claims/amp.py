"""An implementation of --grad-scaler is called as torch.amp.GradScaler: class(init_scale=, growth_interval=).

It also gets process_group= and device="cpu", if it has such names.
"""

from functools import partial

import pool
import torch
import torch.nn as nn

from claims.registry import (
    NotOffered,
    add_kind,
    call,
    check,
    claim,
    error_from,
    same,
    say,
)


def make_scaler(implementation, **arguments):
    return call(implementation, needed=arguments, process_group=pool.group(), device="cpu")


add_kind(
    "grad-scaler",
    called=__doc__,
    make=make_scaler,
    ours="amp:GradScaler",
    pytorchs="torch.amp:GradScaler",
)


def one_weight():
    weight = nn.Parameter(torch.ones(2))
    return weight, torch.optim.SGD([weight], lr=0.25)


def iterate(scaler, weight, optimizer, gradient):
    weight.grad = scaler.scale(torch.tensor(gradient))
    scaler.step(optimizer)
    scaler.update()


@claim("grad-scaler", 1)
def scaled_and_unscaled(make):
    """The step is that of the unscaled gradient, bitwise: a scale that is a power of two costs no bit."""
    scaler, (weight, optimizer), (plain, theirs) = (
        make(init_scale=2.0**16),
        one_weight(),
        one_weight(),
    )
    for step in range(3):
        gradient = torch.randn(2, generator=torch.Generator().manual_seed(step)).tolist()
        iterate(scaler, weight, optimizer, gradient)
        plain.grad = torch.tensor(gradient)
        theirs.step()
        same(weight, plain, f"weight after step {step + 1}", exact=True)
    check(scaler.scale(torch.ones(())).item() == 2.0**16, "scale() does not multiply by the scale")


@claim("grad-scaler", 1)
def clipped(make):
    """unscale_ leaves the true gradient in .grad, to be clipped, and step does not divide again."""
    scaler, (weight, optimizer) = make(init_scale=1024.0), one_weight()
    if not hasattr(scaler, "unscale_"):
        raise NotOffered("no unscale_")
    weight.grad = scaler.scale(torch.tensor([3.0, 4.0]))
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    check(norm.item() == 5.0, f"the norm is {norm.item()}, not 5")
    scaler.step(optimizer)
    check(
        (weight - torch.tensor([0.85, 0.8])).abs().max() < 1e-5, f"the weight is {weight.tolist()}"
    )


def overflow_on_the_last_rank(make):
    last = pool.rank() == pool.world_size() - 1
    for bad in (float("inf"), float("-inf"), float("nan")):
        scaler, (weight, optimizer) = make(init_scale=1024.0), one_weight()
        iterate(scaler, weight, optimizer, [1.0, bad if last else 1.0])
        check(
            weight.tolist() == [1.0, 1.0],
            f"rank {pool.rank()} made the step, of a gradient of {bad}",
        )
        check(
            scaler.get_scale() == 512.0,
            f"rank {pool.rank()} has a scale of {scaler.get_scale()}, not 512",
        )


overflows = partial(say, kinds="grad-scaler", check=overflow_on_the_last_rank)
overflows("skipped", "An inf or NaN in any gradient skips the step, and the scale is halved.", [1])
overflows(
    "shared_overflow",
    "One rank's overflow skips the step on all: gradients are parts of one model's.",
    [2],
)


@claim("grad-scaler", 1)
def grown(make):
    """The scale doubles after growth_interval good steps in a row; an overflow begins the count anew."""
    scaler, (weight, optimizer) = make(init_scale=1024.0, growth_interval=3), one_weight()
    scales = []
    for gradient in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0):
        iterate(scaler, weight, optimizer, [gradient, 1.0])
        scales.append(scaler.get_scale())
    check(scales == [1024, 1024, 512, 512, 512, 1024, 1024], f"scales {scales}")


@claim("grad-scaler", 1)
def refused(make):
    """unscale_ twice, step twice, and update without a step are errors."""
    for calls in (["unscale_", "unscale_"], ["step", "step"], ["update"]):
        scaler, (weight, optimizer) = make(init_scale=4.0), one_weight()
        weight.grad = scaler.scale(torch.ones(2))
        with error_from(" and ".join(calls)):
            for name in calls:
                getattr(scaler, name)(*[] if name == "update" else [optimizer])


@claim("grad-scaler", 1)
def resumed(make):
    """The state dict restores scale and count, and is PyTorch's."""
    first, (weight, optimizer) = make(init_scale=1024.0, growth_interval=3), one_weight()
    for _ in range(2):
        iterate(first, weight, optimizer, [1.0, 1.0])
    second = make(init_scale=2.0, growth_interval=7)
    second.load_state_dict(first.state_dict())
    iterate(second, weight, optimizer, [1.0, 1.0])
    check(
        second.get_scale() == 2048.0,
        f"the scale is {second.get_scale()} after the third good step, not 2048",
    )
    check(
        set(first.state_dict()) == set(torch.amp.GradScaler("cpu").state_dict()),
        f"keys {list(first.state_dict())}",
    )

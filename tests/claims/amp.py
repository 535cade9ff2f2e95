"""An implementation of --grad-scaler is called as torch.amp.GradScaler.

That is class(init_scale=, growth_interval=). It also gets process_group=group and device="cpu" or
"cuda", if it has such names. The methods are PyTorch's: scale, step, update, get_scale,
state_dict, load_state_dict, and unscale_ if it has one.
"""

import environment
import pool
import torch
import torch.nn as nn

from claims.registry import NotOffered, add_kind, call, check, claim, error_from, same, say


def make_scaler(implementation, **arguments):
    where = {"process_group": pool.group(), "device": environment.DEVICE_TYPE}
    return call(implementation, needed=arguments, **where)


add_kind(
    "grad-scaler",
    called=__doc__,
    make=make_scaler,
    ours="amp:GradScaler",
    pytorchs="torch.amp:GradScaler",
)


def one_weight():
    """Return a parameter of two ones, and SGD over it."""
    weight = nn.Parameter(torch.ones(2))
    return weight, torch.optim.SGD([weight], lr=0.25)


def iterate(scaler, weight, optimizer, gradient):
    weight.grad = scaler.scale(torch.tensor(gradient))
    scaler.step(optimizer)
    scaler.update()


@claim("grad-scaler", 1)
def scaled_and_unscaled(make):
    """The step is bitwise that of the unscaled gradient, because the scale is a power of two."""
    scaler = make(init_scale=2.0**16)
    weight, optimizer = one_weight()
    plain = weight.detach().clone()
    for step in range(3):
        gradient = torch.randn(2)
        iterate(scaler, weight, optimizer, gradient.tolist())
        plain -= 0.25 * gradient
        same(weight, plain, f"weight after step {step + 1}", exact=True)
    scaled = scaler.scale(torch.ones(()))
    check(scaled.item() == 2.0**16, "scale() does not multiply by the scale")


@claim("grad-scaler", 1)
def clipped(make):
    """unscale_ leaves the true gradient in .grad for clipping, and step does not divide again."""
    scaler = make(init_scale=1024.0)
    weight, optimizer = one_weight()
    if not hasattr(scaler, "unscale_"):
        raise NotOffered("no unscale_")
    weight.grad = scaler.scale(torch.tensor([3.0, 4.0]))
    scaler.unscale_(optimizer)
    same(weight.grad, torch.tensor([3.0, 4.0]), "gradient", exact=True)
    weight.grad /= 5.0
    scaler.step(optimizer)
    same(weight, torch.tensor([0.85, 0.8]), "weight")


def overflow_on_the_last_rank(make):
    is_last = pool.rank() == pool.world_size() - 1
    for bad in (float("inf"), float("-inf"), float("nan")):
        scaler = make(init_scale=1024.0)
        weight, optimizer = one_weight()
        iterate(scaler, weight, optimizer, [1.0, bad if is_last else 1.0])
        check(weight.tolist() == [1.0, 1.0], f"it steps although one gradient is {bad}")
        scale = scaler.get_scale()
        check(scale == 512.0, f"the scale is {scale} after a gradient of {bad}, not 512")


say(
    "skipped",
    "An inf or NaN in any gradient skips the step and halves the scale.",
    [1],
    "grad-scaler",
    overflow_on_the_last_rank,
)
say(
    "shared_overflow",
    "An overflow on one rank skips the step on all ranks.",
    [2],
    "grad-scaler",
    overflow_on_the_last_rank,
    about="property",
)


@claim("grad-scaler", 1)
def grown(make):
    """The scale doubles after growth_interval good steps. An overflow restarts the count."""
    scaler = make(init_scale=1024.0, growth_interval=3)
    weight, optimizer = one_weight()
    scales = []
    for gradient in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0):
        iterate(scaler, weight, optimizer, [gradient, 1.0])
        scales.append(scaler.get_scale())
    check(scales == [1024, 1024, 512, 512, 512, 1024, 1024], f"the scales are {scales}")


@claim("grad-scaler", 1)
def resumed(make):
    """The state dict is PyTorch's, and restores the scale and the count."""
    first = make(init_scale=1024.0, growth_interval=2)
    weight, optimizer = one_weight()
    iterate(first, weight, optimizer, [1.0, 1.0])
    state = first.state_dict()
    second = make(init_scale=2.0, growth_interval=7)
    second.load_state_dict(state)
    iterate(second, weight, optimizer, [1.0, 1.0])
    scale = second.get_scale()
    check(scale == 2048.0, f"the scale is {scale} after the second good step, not 2048")
    expected = torch.amp.GradScaler("cpu").state_dict()
    check(state.keys() == expected.keys(), f"the keys are {list(state)}")


def call_in_order(make, names):
    scaler = make(init_scale=4.0)
    weight, optimizer = one_weight()
    weight.grad = scaler.scale(torch.ones(2))
    for name in names:
        arguments = [] if name == "update" else [optimizer]
        getattr(scaler, name)(*arguments)


@claim("grad-scaler", 1, about="property")
def refused(make):
    """Calling unscale_ twice, step twice, or update without a step is an error."""
    call_in_order(make, ["unscale_", "step", "update"])  # no error
    for names in (["unscale_", "unscale_"], ["step", "step"], ["update"]):
        with error_from(" and ".join(names)):
            call_in_order(make, names)

"""Mistakes people make in activation checkpointing, and the claim that catches each."""

import itertools
from contextlib import nullcontext
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks


def plain_checkpoint(
    function, *args, grad_mode=torch.enable_grad, random=True, autocast=True, **kwargs
):
    """Right, but that it holds its inputs, runs to the end each time, and compares nothing."""
    state, again = (
        torch.get_rng_state(),
        torch.autocast("cpu", torch.bfloat16, torch.is_autocast_enabled("cpu")),
    )
    saved, numbers = [], itertools.count()

    def recompute(number):
        if not saved:
            with torch.random.fork_rng(), again if autocast else nullcontext(), grad_mode():
                if random:
                    torch.set_rng_state(state)
                with saved_tensors_hooks(
                    lambda tensor: saved.append(tensor.detach()), lambda tensor: tensor
                ):
                    function(*args, **kwargs)
        return saved[number]

    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with saved_tensors_hooks(lambda _: next(numbers), recompute):
        return function(*args, **kwargs)


def keeps_everything(function, *args, **kwargs):
    return function(*args, **kwargs)


draws_anew = partial(plain_checkpoint, random=False)
forgets_autocast = partial(plain_checkpoint, autocast=False)
recomputes_without_grad = partial(plain_checkpoint, grad_mode=torch.no_grad)


class OnlyInputs(torch.autograd.Function):
    """Asks for gradients of the inputs alone."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradient)


def without_parameters(function, *args):
    return OnlyInputs.apply(function, *args)


MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "activation-checkpoint": {
        "draws_anew": "random_numbers",
        "forgets_autocast": "autocast_again",
        "recomputes_without_grad": "recomputed",
        "without_parameters": "recomputed",
        "keeps_everything": "forgotten",
        "plain_checkpoint": "differs",
    },
}
RIGHT = {  # what the mistakes are made in, and the claims that do not hold for it
    "activation-checkpoint": {
        "plain_checkpoint": ["differs"],
    },
}

"""Mistakes in computing activations again, and the claim that catches each."""

import itertools
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks


def plain_checkpoint(function, *args, same_random=True, autocast_dtype=torch.bfloat16, **kwargs):
    """Right, but it compares nothing: neither what is saved nor the versions of its inputs."""
    random_state = torch.get_rng_state()
    had_autocast = torch.is_autocast_enabled("cpu")
    saved = []  # what the recomputation saves
    numbers = itertools.count()

    def remember(tensor):
        return next(numbers), tensor.dtype

    def save(tensor):
        saved.append(tensor.detach())

    def recompute(remembered):
        number, dtype = remembered
        if not saved:
            autocast = torch.autocast("cpu", autocast_dtype, had_autocast)
            with torch.random.fork_rng(), autocast, torch.enable_grad():
                if same_random:
                    torch.set_rng_state(random_state)
                with saved_tensors_hooks(save, lambda tensor: tensor):
                    function(*args, **kwargs)
        return saved[number].to(dtype)

    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with saved_tensors_hooks(remember, recompute):
        return function(*args, **kwargs)


def keeps_everything(function, *args, **kwargs):
    return function(*args, **kwargs)


draws_anew = partial(plain_checkpoint, same_random=False)
forgets_autocasts_dtype = partial(plain_checkpoint, autocast_dtype=torch.float16)


class OnlyInputs(torch.autograd.Function):
    """Computes gradients of the inputs alone."""

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


MISTAKES = {
    "activation-checkpoint": {
        "draws_anew": "random_numbers",
        "forgets_autocasts_dtype": "autocast_again",
        "without_parameters": "recomputed",
        "keeps_everything": "forgotten",
        "plain_checkpoint": "differs",
    },
}
CAUSES = {"activation-checkpoint": {"without_parameters": "parameters_without_gradients"}}
RIGHT = {"activation-checkpoint": {"plain_checkpoint": ["differs"]}}

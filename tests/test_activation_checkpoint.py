"""activation_checkpoint.py beyond its claims: what it keeps and what it computes."""

import gc
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from claims.activation_checkpoint import plainly
from shared import loss_of, make_batch

import activation_checkpoint as ac


class NativeDropout(nn.Module):
    def forward(self, x):
        return torch.native_dropout(x, 0.3, train=self.training)[0]


def make_layers():
    torch.manual_seed(1)
    layers = nn.ModuleList()
    for _ in range(3):
        first = nn.Linear(6, 6)
        second = nn.Linear(6, 6)
        layers.append(nn.Sequential(first, NativeDropout(), second, nn.Dropout(0.3)))
    return layers


def each(how):
    def run(layers, x):
        for layer in layers:
            x = how(layer, x)
        return x

    return run


def keep_all(operator, *args, **kwargs):
    return True


selective = partial(ac.checkpoint, policy=ac.keep_products)
offloading = ac.offload_to_cpu()
keeping_all = partial(ac.checkpoint, policy=keep_all)
HOW = {
    "full": each(ac.checkpoint),
    "one in another": partial(ac.checkpoint, each(ac.checkpoint)),
    "products": each(selective),
    "all": each(keeping_all),
    "offload around": offloading(each(ac.checkpoint)),
    "the idea": each(ac.NaiveCheckpoint.apply),
}


def results_of(run):
    """Return output, gradients, and the random numbers after backward."""
    layers = make_layers()
    x = make_batch(0, 0).requires_grad_()
    y = run(layers, x)
    loss_of(y).backward()
    gradients = [parameter.grad for parameter in layers.parameters()]
    return [y.detach(), x.grad, *gradients, torch.rand(3)]


@pytest.mark.parametrize("how", HOW)
def test_outputs_gradients_and_next_random_numbers_are_bitwise_those_without(how):
    expected = results_of(each(plainly))
    torch.testing.assert_close(results_of(HOW[how]), expected, rtol=0, atol=0)


KEPT = {"full": 3, "one in another": 1, "products": 6 + 3}  # tensors of the output's size


@pytest.mark.parametrize("how", KEPT)
def test_no_more_is_kept_from_forward_to_backward_and_nothing_after(how):
    results_of(HOW[how])  # the first in a process imports what it needs, and holds frames
    layers = make_layers()
    x = make_batch(0, 0).requires_grad_()
    gc.disable()  # freed by reference counts alone
    with ac.Alive() as alive:
        y = HOW[how](layers, x)
        kept = alive.bytes()
        assert kept == KEPT[how] * y.nbytes
        loss = y.sum()
        leaves = [x, *layers.parameters()]
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        after = kept + loss.nbytes + sum(gradient.nbytes for gradient in gradients)
        assert alive.bytes() == after
        del y, loss, gradients
        assert alive.bytes() == 0
    gc.enable()


def odd(x):
    y = x.sin().cos()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    try:
        return gradient * x.cos()
    except BaseException:
        return x.exp()


def test_a_function_may_compute_gradients_and_catch_all_errors():
    x = torch.ones(5, requires_grad=True)
    gradients = []
    for how in (plainly, ac.checkpoint):
        gradients += torch.autograd.grad(how(odd, x).sum(), x)
    assert torch.equal(*gradients)


def test_without_preserve_rng_state_the_second_run_draws_anew():
    x = torch.ones(100, requires_grad=True)
    y = ac.checkpoint(lambda x: F.dropout(x).exp(), x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(y > 1, x.grad > 0)


def test_the_second_run_ends_when_backward_has_what_it_needs():
    weight = torch.randn(6, 6, requires_grad=True)
    with ac.FlopCounterMode(display=False) as flops:
        y = ac.checkpoint(lambda x: torch.sin(x @ weight) @ weight, torch.randn(4, 6))
        y.sum().backward()
    forward = 2
    again = 1  # autograd saves the last product's input, not its output
    backward = 2 * 2 - 1  # x has no gradient
    assert flops.get_total_flops() == (forward + again + backward) * 2 * 4 * 6 * 6


def test_a_kept_output_that_changes_in_place_is_computed_again():
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight  # a view of the product, because x has three dimensions
        z = (y + 1).sin()
        y.mul_(2)
        return y, z.cos()

    gradients = []
    for how in (plainly, selective):
        y, z = how(function, torch.ones(2, 4, 6))
        y.detach()[0].mul_(2)
        gradients += torch.autograd.grad(z.sum(), weight)
    assert torch.equal(*gradients)


def test_a_policy_that_keeps_all_is_right_if_autocast_has_cast_a_weight_before():
    layer = nn.Linear(6, 6)
    gradients = []
    for how in (plainly, keeping_all):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.ones(4, 6))  # casts its weight
            z = how(nn.Sequential(layer, nn.Tanh(), layer), y)
        gradients += torch.autograd.grad(z.sum(), layer.weight)
    assert torch.equal(*gradients)


def test_3_segments_of_7_layers_keep_2_tensors_and_those_of_3_layers():
    x = torch.zeros(1, requires_grad=True)
    with ac.Alive() as alive:
        y = ac.checkpoint_sequential([torch.sin] * 7, 3, x)
    assert alive.bytes() == (2 + 3) * y.nbytes


s = 32  # tokens
h = 48  # width
a = 3  # heads
b = 3  # sequences
l = 4  # layers
INSIDE = 34 + 5 * a * s / h  # bytes that a layer keeps, in units of sbh, as all below
PRODUCTS = 12 * h * h + 2 * s * h  # operations of a layer's forward per token
COPIES = 2 + 24 * h / (s * b) * l  # offload also copies the first input and the weights
products = partial(ac.run_checkpointed, policy=ac.keep_products)
WAYS = {  # how to run, how to run attention's core, bytes kept, operations computed again
    "the core of attention": (ac.run_layers, ac.checkpoint, 34 * l, s * h * l),
    "all but linear layers": (products, plainly, 20 * l, 2 * s * h * l),
    "each layer": (ac.run_checkpointed, plainly, 2 * l, PRODUCTS * l),
    "offload": (offloading(ac.run_layers), plainly, INSIDE * l + COPIES, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_layer_keeps_the_bytes_of_the_docstring(way):
    """But for the statistics of LayerNorm, 4 numbers a token, and copies of biases and norms."""
    run, run_core, formula, again = WAYS[way]
    layers, x = ac.transformer_layers(l, h, a, s, b, "cpu", run_core)
    kept, operations, _ = ac.measure(run, layers, x)
    few = l * (16 * s * b + 8 * h)
    assert abs(kept - formula * s * b * h) <= few
    assert operations == 2 * s * b * (3 * PRODUCTS * l + again)


@pool.on(2)
def test_a_policy_keeps_no_collective_and_nothing_that_one_writes_into():
    w = torch.tensor(pool.rank() + 1.0, requires_grad=True)

    def function(w):
        total = w.detach().sin()
        dist.all_reduce(total, group=pool.group())
        return total.mul(w).sin()

    expected = torch.autograd.grad(function(w), w)
    assert torch.autograd.grad(keeping_all(function, w), w) == expected

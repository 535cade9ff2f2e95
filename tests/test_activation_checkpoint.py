"""activation_checkpoint.py beyond its claims: what it keeps and what it computes."""

import gc
import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
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
    return operator != torch.ops.aten.empty_like.default  # what dropout then changes in place


def keep_dropout(operator, *args, **kwargs):
    return operator == torch.ops.aten.native_dropout.default


selective = partial(ac.checkpoint, policy=ac.keep_products)
offloaded = ac.offload_to_cpu()(plainly)
HOW = {
    "full": each(ac.checkpoint),
    "one in another": partial(ac.checkpoint, each(ac.checkpoint)),
    "products": each(selective),
    "selective in selective": partial(selective, each(selective)),
    "native dropout": each(partial(ac.checkpoint, policy=keep_dropout)),
    "all but empty tensors": each(partial(ac.checkpoint, policy=keep_all)),
    "offload": each(offloaded),
    "offload around": ac.offload_to_cpu()(each(ac.checkpoint)),
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
        after = alive.bytes()
        assert after == kept + loss.nbytes + sum(each.nbytes for each in gradients)
        del y, loss, gradients
        assert alive.bytes() == 0
    gc.enable()


def gradient_inside(x):
    y = x.sin().cos()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return gradient * x.cos()


def catches_all(x):
    for function in (torch.cos, torch.exp):
        try:
            return function(x)
        except BaseException:
            pass
    return x


@pytest.mark.parametrize("inside", [gradient_inside, catches_all])
def test_a_function_may_call_backward_and_catch_errors(inside):
    plain = each(lambda layer, x: inside(layer(x)))
    ours = each(lambda layer, x: ac.checkpoint(inside, layer(x)))
    torch.testing.assert_close(results_of(ours), results_of(plain), rtol=0, atol=0)


def test_without_preserve_rng_state_the_second_run_draws_anew_and_then_restores():
    drop = NativeDropout()
    x = torch.ones(100, requires_grad=True)
    y = ac.checkpoint(lambda x: drop(x).exp(), x, preserve_rng_state=False)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(y > 1, x.grad > 0)


def test_the_second_run_ends_when_backward_has_what_it_needs():
    weights = torch.randn(3, 6, 6, requires_grad=True)

    def function(x):
        for weight in weights:
            x = torch.sin(x @ weight)
        return x @ weights[0]  # autograd saves its input, not its output

    x = torch.randn(4, 6)  # it has no gradient
    with ac.FlopCounterMode(display=False) as flops:
        y = ac.checkpoint(function, x)
        y.sum().backward()
    forward = 4
    again = 3
    backward = 2 * 4 - 1
    assert flops.get_total_flops() == (forward + again + backward) * 2 * 4 * 6 * 6


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)], ids=["matrix", "view"])
def test_a_kept_output_that_changes_in_place_is_an_error(shape, where):
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight
        z = (y + 1).sin()
        if where == "inside":
            y.mul_(2)
        return y, z.cos()

    y, z = selective(function, torch.randn(shape))
    if where == "outside":
        y.detach()[0].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_a_policy_that_keeps_all_is_right_if_autocast_has_cast_a_weight_before():
    layer = nn.Linear(6, 6)
    gradients = []
    for how in (plainly, partial(ac.checkpoint, policy=keep_all)):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.ones(4, 6))  # casts its weight
            z = how(lambda y: layer(layer(y).tanh()), y)
        loss = loss_of(z.float())
        gradients += torch.autograd.grad(loss, layer.weight)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("l", "k"), [(1, 1), (7, 3), (7, 7)])
def test_k_segments_keep_k_1_and_l_over_k_tensors(l, k):
    x = torch.zeros(1, requires_grad=True)
    with ac.Alive() as alive:
        y = ac.checkpoint_sequential([torch.sin] * l, k, x)
    assert alive.bytes() == (k - 1 + math.ceil(l / k)) * y.nbytes


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
    "nothing checkpointed": (ac.run_layers, plainly, INSIDE * l, 0),
    "the core of attention": (ac.run_layers, ac.checkpoint, 34 * l, s * h * l),
    "all but linear layers": (products, plainly, 20 * l, 2 * s * h * l),
    "each layer": (ac.run_checkpointed, plainly, 2 * l, PRODUCTS * l),
    "offload": (ac.offload_to_cpu()(ac.run_layers), plainly, INSIDE * l + COPIES, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_layer_keeps_the_bytes_of_the_docstring(way):
    """But for the statistics of LayerNorm, 4 numbers a token, and copies of biases and norms."""
    run, run_core, formula, again = WAYS[way]
    torch.manual_seed(1)
    layers, x = ac.transformer_layers(l, h, a, s, b, "cpu", run_core)
    kept, operations, _ = ac.measure(run, layers, x)
    few = l * (16 * s * b + 8 * h)
    assert abs(kept - formula * s * b * h) <= few
    assert operations == 2 * s * b * (3 * PRODUCTS * l + again)


def keep_all_reduce(operator, *args, **kwargs):
    return operator == torch.ops.c10d.allreduce_.default


def keep_all(operator, *args, **kwargs):
    return True


@pytest.mark.parametrize("policy", [keep_all_reduce, keep_all])
@pool.on(2)
def test_a_policy_keeps_no_collective_and_nothing_that_one_writes_into(policy):
    w = torch.tensor(pool.rank() + 1.0, requires_grad=True)

    def function(x):
        total = x.detach().sin()
        dist.all_reduce(total, group=pool.group())
        return total.mul(w).sin()

    x = torch.tensor(pool.rank() / 2, requires_grad=True)
    expected = torch.autograd.grad(function(x), w)
    output = ac.checkpoint(function, x, policy=policy)
    assert torch.autograd.grad(output, w) == expected

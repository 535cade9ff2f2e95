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
from torch.multiprocessing.reductions import StorageWeakRef

import activation_checkpoint as ac
import ddp
import fsdp


class NativeDropout(nn.Module):
    def forward(self, x):
        return torch.native_dropout(x, 0.3, train=self.training)[0]


def make_layers(number):
    torch.manual_seed(1)
    layers = nn.ModuleList()
    for _ in range(number):
        first = nn.Linear(6, 6)
        second = nn.Linear(6, 6)
        layers.append(nn.Sequential(first, nn.Tanh(), NativeDropout(), second, nn.Dropout(0.3)))
    return layers


def each(how):
    def run(layers, x):
        for layer in layers:
            x = how(layer, x)
        return x

    return run


def keep_dropout(operator, *args, **kwargs):
    return operator == torch.ops.aten.native_dropout.default


def keep_all_but_empty(operator, *args, **kwargs):
    return operator != torch.ops.aten.empty_like.default


selective = partial(ac.checkpoint, policy=ac.keep_products)
HOW = {
    "full": each(ac.checkpoint),
    "one in another": partial(ac.checkpoint, each(ac.checkpoint)),
    "products": each(selective),
    "selective in selective": partial(selective, each(selective)),
    "native dropout": each(partial(ac.checkpoint, policy=keep_dropout)),
    "all but empty tensors": each(partial(ac.checkpoint, policy=keep_all_but_empty)),
    "2 segments": partial(ac.run_in_segments, segments=2),
    "offload": each(ac.offload_to_cpu()(plainly)),
    "offload around": ac.offload_to_cpu()(each(ac.checkpoint)),
    "the idea": each(ac.NaiveCheckpoint.apply),
}


def results_of(run):
    """Return output, gradients, and the random numbers after backward."""
    layers = make_layers(3)
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
def test_no_more_is_kept_from_forward_to_the_end_of_backward(how):
    results_of(HOW[how])  # the first in a process imports what it needs, and holds frames
    layers = make_layers(3)
    x = make_batch(0, 0).requires_grad_()
    leaves = [x, *layers.parameters()]
    with ac.Alive() as alive:
        y = HOW[how](layers, x)
        kept = alive.bytes()
        assert kept == KEPT[how] * y.nbytes
        ones = torch.ones(())
        gradients = torch.autograd.grad(y.sum(), leaves, ones, retain_graph=True)
        sizes = [tensor.nbytes for tensor in (ones, *gradients)]
        assert alive.bytes() == kept + sum(sizes)


@pytest.mark.parametrize("how", HOW)
def test_weights_are_freed_without_garbage_collection(how):
    layers = make_layers(3)
    weight = StorageWeakRef(layers[0][0].weight.untyped_storage())
    gc.disable()
    x = make_batch(0, 0).requires_grad_()
    y = HOW[how](layers, x)
    loss_of(y).backward()
    del layers, y
    gc.enable()
    assert weight.expired()


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


def test_under_no_grad_a_function_may_still_compute_gradients_inside():
    function = torch.enable_grad()(gradient_inside)
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(ac.checkpoint(function, x), function(x))


@pytest.mark.parametrize("policy", [None, keep_dropout])
def test_without_preserve_rng_state_the_second_run_draws_anew_and_then_restores(policy):
    drop = NativeDropout()
    x = torch.ones(100, requires_grad=True)
    y = ac.checkpoint(lambda x: drop(x).exp(), x, preserve_rng_state=False, policy=policy)
    before = torch.get_rng_state()

    y.sum().backward()

    assert torch.equal(torch.get_rng_state(), before)
    same_mask = torch.equal(y > 1, x.grad > 0)
    assert same_mask == (policy is not None)


@pytest.mark.parametrize(
    ("policy", "again"),
    [(None, 2), (ac.keep_products, 0)],
)
def test_what_policy_keeps_or_nothing_needs_is_not_computed_again(policy, again):
    """The last product is not needed: tanh saves its output, and the linear layer its input."""
    weight = torch.randn(2, 6, 6, requires_grad=True)
    linear = nn.Linear(6, 6)

    def function(x):
        for matrix in weight:
            x = torch.tanh(x @ matrix)
        x = torch.sin(x.exp())
        return linear(x) + 1

    x = torch.randn(4, 6)  # it has no gradient
    with ac.FlopCounterMode(display=False) as flops:
        y = ac.checkpoint(function, x, policy=policy)
        y.sum().backward()
    assert flops.get_total_flops() == (3 + again + 5) * 2 * 4 * 6 * 6


CHANGES = {
    "the output": lambda y: y,
    "a detached output": torch.detach,
    "a part of a detached output": lambda y: y.detach()[0],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "shape",
    [(4, 6), (2, 4, 6)],
    ids=["matrix", "view"],
)
def test_a_kept_output_that_changes_in_place_is_an_error_not_another_number(shape, change):
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight
        z = (y + 1).sin()
        return y, z.cos()

    y, z = selective(function, torch.randn(shape))
    CHANGES[change](y).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_a_kept_output_that_the_function_changes_in_place_is_an_error():
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight
        z = (y + 1).sin()
        return y.mul_(2), z.cos()

    _, z = selective(function, torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_a_policy_that_keeps_all_is_right_if_autocast_has_cast_a_weight_before():
    layer = nn.Linear(6, 6)
    gradients = []
    for how in (plainly, partial(ac.checkpoint, policy=lambda *args, **kwargs: True)):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.ones(4, 6))  # casts its weight
            z = how(lambda y: layer(layer(y).tanh()), y)
        loss = loss_of(z.float())
        gradients += torch.autograd.grad(loss, layer.weight)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("l", "k"),
    [
        (1, 1),
        (7, 1),
        (7, 3),
        (7, 7),
        (16, 4),
    ],
)
def test_k_segments_keep_k_1_and_l_over_k_tensors_and_compute_all_but_the_last_again(l, k):
    seen = []
    x = torch.zeros(1, requires_grad=True)
    last = math.ceil(l / k)  # layers of the last segment
    layers = [lambda x, i=i: seen.append(i) or x.sin() for i in range(l)]
    with ac.Alive() as alive:
        y = ac.checkpoint_sequential(layers, k, x)
    assert alive.bytes() == (k - 1 + last) * y.nbytes
    y.backward()
    assert seen[:l] == list(range(l))
    assert sorted(seen[l:]) == list(range(l - last))


@pytest.mark.parametrize("segments", [0, 4])
def test_there_are_at_least_one_segment_and_at_most_as_many_as_layers(segments):
    with pytest.raises(ValueError, match=f"3 layers do not make {segments} segments"):
        ac.checkpoint_sequential(make_layers(3), segments, torch.ones(6))


s = 32  # tokens
h = 48  # width
a = 3  # heads
b = 3  # sequences
l = 4  # layers
INSIDE = 34 + 5 * a * s / h  # bytes that a layer keeps, in units of sbh, as all below
PRODUCTS = 12 * h * h + 2 * s * h  # operations of a layer's forward per token
COPIES = 2 + 24 * h / (s * b) * l  # offload also copies the first input and the weights
checkpointed = ac.run_checkpointed
in_2_segments = partial(ac.run_in_segments, segments=2)
WAYS = {  # how to run, how to run attention's core, bytes kept, operations computed again
    "none": (ac.run_layers, plainly, INSIDE * l, 0),
    "2 segments": (in_2_segments, plainly, 2 + INSIDE * l / 2, PRODUCTS * l / 2),
    "every layer": (checkpointed, plainly, 2 * l, PRODUCTS * l),
    "selective": (
        partial(checkpointed, policy=ac.keep_products),
        plainly,
        20 * l,
        2 * s * h * l,
    ),
    "core": (ac.run_layers, ac.checkpoint, 34 * l, s * h * l),
    "offload": (ac.offload_to_cpu()(ac.run_layers), plainly, INSIDE * l + COPIES, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_layer_keeps_the_bytes_of_the_formulas(way):
    """But for the statistics of LayerNorm, 4 numbers a token, and copies of biases and norms."""
    run, run_core, formula, again = WAYS[way]
    torch.manual_seed(1)
    layers, x = ac.transformer_layers(l, h, a, s, b, "cpu", run_core)
    kept, operations, _ = ac.measure(run, layers, x)
    few = l * (16 * s * b + 8 * h)
    assert abs(kept - formula * s * b * h) <= few
    assert operations == 2 * s * b * (3 * PRODUCTS * l + again)


@pool.on(2)
def test_a_policy_does_not_keep_collectives_because_they_write_into_their_arguments():
    w = torch.tensor(pool.rank() + 1.0, requires_grad=True)

    def function(x):
        total = x.detach().sin()
        dist.all_reduce(total, group=pool.group())
        return total.mul(w).sin()

    x = torch.tensor(pool.rank() / 2, requires_grad=True)
    keep = {torch.ops.c10d.allreduce_.default}
    expected = torch.autograd.grad(function(x), w)
    output = ac.checkpoint(function, x, policy=lambda operator, *_: operator in keep)
    assert torch.autograd.grad(output, w) == expected


def train(how, technique):
    model = nn.Sequential()
    model.layers = make_layers(3)
    model.forward = partial(each(how), model.layers)
    if technique == "fsdp":
        for module in (*model.layers, model):
            fsdp.fully_shard(module, process_group=pool.group())
    else:
        model = ddp.DDP(model, process_group=pool.group(), bucket_cap_mb=1e-4)
    for step in range(2):
        torch.manual_seed(step)
        x = make_batch(pool.rank(), step)
        loss_of(model(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
@pool.on(2)
def test_checkpointed_layers_are_bitwise_those_without_under_other_techniques(technique):
    expected = train(plainly, technique)
    for how in (ac.checkpoint, selective):
        ours = train(how, technique)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)

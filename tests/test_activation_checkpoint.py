"""activation_checkpoint.py beyond its claims: what it keeps and what it computes."""

import gc
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
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
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
HOW = {  # run(layers, x), and how many tensors like y live after it, of 3 layers
    "full": (each(ac.checkpoint), 3),
    "one in another": (partial(ac.checkpoint, each(ac.checkpoint)), 1),
    "products": (each(selective), 6 + 3),
    "selective in selective": (partial(selective, each(selective)), None),
    "native dropout": (each(partial(ac.checkpoint, policy=keep_dropout)), None),
    "all but empty tensors": (each(partial(ac.checkpoint, policy=keep_all_but_empty)), None),
    "2 segments": (partial(ac.run_in_segments, segments=2), None),
    "offload": (each(ac.offload_to_cpu()(plainly)), None),
    "offload around": (ac.offload_to_cpu()(each(ac.checkpoint)), None),
}


@pytest.mark.parametrize("how", HOW)
def test_outputs_gradients_and_next_random_numbers_are_bitwise_those_without(how):
    """Two backwards through one graph. Between them no more is kept, and afterwards nothing."""
    with ac.Alive():  # the first in a process imports what it needs, and holds frames
        make_layers(1)
    results = []
    gc.disable()
    for run, number in (HOW[how], (each(plainly), None)):
        layers = make_layers(3)
        x = make_batch(0, 0).requires_grad_()
        leaves = [x, *layers.parameters()]
        weight = StorageWeakRef(layers[0][0].weight.untyped_storage())
        with ac.Alive() as alive:
            y = run(layers, x)
            kept = alive.bytes()
            assert number in (None, kept / y.nbytes)
            first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
            assert alive.bytes() == kept + sum(gradient.nbytes for gradient in first)
        second = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
        results.append([y.detach(), torch.rand(3), *first, *second])
        del layers, leaves, y
        assert weight.expired()
    gc.enable()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def gradient_inside(x):
    return torch.autograd.grad(x.sin().cos().sum(), x, create_graph=True)[0] * x.cos()


def catches_all(x):
    for function in (torch.cos, torch.exp):
        try:
            return function(x)
        except BaseException:
            pass
    return x


@pytest.mark.parametrize(
    ("how", "inside"),
    [
        (ac.NaiveCheckpoint.apply, torch.sin),
        (ac.checkpoint, gradient_inside),
        (ac.checkpoint, catches_all),
    ],
)
def test_the_idea_is_right_without_dropout_and_a_function_may_call_backward(how, inside):
    results = []
    for run in (how, plainly):
        layer = make_layers(1)[0].eval()
        x = make_batch(0, 0).requires_grad_()
        loss_of(run(lambda x, layer=layer: inside(layer(x)), x)).backward()
        results.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_idea_has_the_gradients_and_next_random_numbers_of_no_checkpoint():
    results = []
    for how in (ac.NaiveCheckpoint.apply, plainly):
        layers = make_layers(3)
        x = make_batch(0, 0).requires_grad_()
        y = each(how)(layers, x)
        loss_of(y).backward()
        gradients = [parameter.grad for parameter in layers.parameters()]
        results.append([y.detach(), x.grad, *gradients, torch.rand(3)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


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


@pytest.mark.parametrize(("policy", "again"), [(None, 2), (ac.keep_products, 0)])
def test_what_policy_keeps_or_nothing_needs_is_not_computed_again(policy, again):
    weight = torch.randn(2, 6, 6, requires_grad=True)
    linear = nn.Linear(6, 6)

    def function(x):
        x = torch.tanh(torch.tanh(x @ weight[0]) @ weight[1]).exp()  # whose output is what it saves
        return linear(torch.sin(x)) + 1

    with ac.FlopCounterMode(display=False) as flops:
        ac.checkpoint(function, torch.randn(4, 6), policy=policy).sum().backward()
    assert flops.get_total_flops() == (3 + again + 5) * 2 * 4 * 6 * 6  # x has no gradient


@pytest.mark.parametrize("change", [None, torch.detach, lambda y: y.detach()[0]])
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)])  # a product of three dimensions is a view
def test_a_kept_output_that_changes_in_place_is_an_error_not_another_number(shape, change):
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight
        z = (y + 1).sin()
        return y if change else y.mul_(2), z.cos()

    y, z = selective(function, torch.randn(shape))
    if change:
        change(y).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_a_policy_that_keeps_all_is_right_if_autocast_has_cast_a_weight_before():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    gradients = []
    for how in (plainly, partial(ac.checkpoint, policy=lambda *args, **kwargs: True)):
        with torch.autocast("cpu", torch.bfloat16):
            y = first(torch.ones(4, 6))  # casts the weight of `first`
            z = how(lambda y: second(first(y).tanh()), y)
        gradients.append(torch.autograd.grad(z.float().square().sum(), first.weight)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("l", [1, 2, 7, 16])
def test_k_segments_keep_k_1_and_l_over_k_tensors_and_compute_all_but_the_last_again(l):
    for k in range(1, l + 1):
        seen = []
        x = torch.zeros(1, requires_grad=True)
        last = -(-l // k)  # layers of the last segment
        layers = [lambda x, i=i, seen=seen: seen.append(i) or x.sin() for i in range(l)]
        with ac.Alive() as alive:
            y = ac.checkpoint_sequential(layers, k, x)
        assert alive.bytes() == (k - 1 + last) * y.nbytes
        y.backward()
        assert seen[:l] == list(range(l))
        assert sorted(seen[l:]) == list(range(l - last))
    for k in (0, l + 1):
        with pytest.raises(ValueError, match=f"{l} layers do not make {k} segments; take 1 to {l}"):
            ac.checkpoint_sequential(layers, k, x)


s, h, a, b, l = 32, 48, 3, 3, 4  # tokens, width, heads, sequences, layers
INSIDE = 34 + 5 * a * s / h  # bytes that a layer keeps, in units of sbh, as all below
PRODUCTS = 12 * h * h + 2 * s * h  # operations of a layer's forward per token
COPIES = 2 + 24 * h / (s * b) * l  # offload also copies the first input and the weights
checkpointed = ac.run_checkpointed
in_2_segments = partial(ac.run_in_segments, segments=2)
WAYS = {  # how to run, how to run attention's core, bytes kept, operations computed again
    "none": (ac.run_layers, plainly, INSIDE * l, 0),
    "2 segments": (in_2_segments, plainly, 2 + INSIDE * l / 2, PRODUCTS * l / 2),
    "every layer": (checkpointed, plainly, 2 * l, PRODUCTS * l),
    "selective": (partial(checkpointed, policy=ac.keep_products), plainly, 20 * l, 2 * s * h * l),
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
    (expected,) = torch.autograd.grad(function(x), w)
    output = ac.checkpoint(function, x, policy=lambda operator, *_: operator in keep)
    assert torch.equal(torch.autograd.grad(output, w)[0], expected)


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
@pool.on(2)
def test_checkpointed_layers_are_bitwise_those_without_under_other_techniques(technique):
    group = pool.group()
    results = []
    for how in (ac.checkpoint, selective, plainly):
        model = nn.Sequential()
        model.layers = make_layers(3)
        model.forward = partial(each(how), model.layers)
        if technique == "fsdp":
            for module in (*model.layers, model):
                fsdp.fully_shard(module, process_group=group)
        else:
            model = ddp.DDP(model, process_group=group, bucket_cap_mb=1e-4)
        for step in range(2):
            torch.manual_seed(step)
            loss_of(model(make_batch(pool.rank(), step))).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for ours in results[:2]:
        torch.testing.assert_close(ours, results[2], rtol=0, atol=0)

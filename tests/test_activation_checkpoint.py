"""activation_checkpoint.py against no checkpoints, bitwise; and what it keeps and computes. More in claims.py."""

import functools
import gc

import pool
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, assert_equal, assert_same_parameters, loss_of, make_batch
from torch.multiprocessing.reductions import StorageWeakRef

import activation_checkpoint as ac
import ddp
import fsdp
import tensor_parallel as tp

aten = torch.ops.aten


selective = functools.partial(ac.checkpoint, policy=ac.keep_products)


def make_layers(number):
    torch.manual_seed(1)
    parts = [[nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6), nn.GELU()] for _ in range(number)]
    return nn.ModuleList(nn.Sequential(*part) for part in parts)


def train(layers, run):
    """-> losses of three steps of run(layers, x); the same random numbers in each call of train."""
    losses, optimizer = [], OPTIMIZERS["adamw"](layers.parameters())
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        losses.append(loss_of(run(layers, make_batch(0, step))))
        losses[-1].backward()
        optimizer.step()
    return losses


def each(how):
    return lambda layers, x: functools.reduce(lambda x, layer: how(layer, x), layers, x)


def plainly(layer, x):
    return layer(x)


POLICIES = [
    ac.keep_products,
    lambda operator, *args, **kwargs: operator != aten.empty_like.default,  # which random numbers are written to
    lambda operator, *args, **kwargs: operator == aten.native_dropout.default,
]
HOW = {
    "full": each(ac.checkpoint),
    **{f"policy {i}": each(functools.partial(ac.checkpoint, policy=policy)) for i, policy in enumerate(POLICIES)},
    "2 segments": lambda layers, x: ac.checkpoint_sequential(layers, 2, x),
    "offload": each(ac.offload_to_cpu()(plainly)),
    "offload around": ac.offload_to_cpu()(each(ac.checkpoint)),
}


@pytest.mark.parametrize("how", HOW)
def test_training_is_bitwise_that_without(how):
    """Dropout on, three steps: losses, gradients, parameters."""
    ours, plain = make_layers(4), make_layers(4)
    assert train(ours, HOW[how]) == train(plain, each(plainly))
    assert_same_parameters(ours, plain, exact=True)


def test_the_idea_is_right_of_one_tensor_without_dropout():
    results = []
    for how in (ac.NaiveCheckpoint.apply, plainly):
        layers, x = make_layers(2).eval(), make_batch(0, 0).requires_grad_()
        y = each(how)(layers, x)
        loss_of(y).backward()
        results.append([y, x.grad, *(parameter.grad for parameter in layers.parameters())])
    for ours, plain in zip(*results, strict=True):
        assert_equal(ours, plain, exact=True)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "products"), [(None, 2 + 2 + 3), (ac.keep_products, 2 + 3)])
def test_what_policy_keeps_or_nothing_needs_is_not_computed_again(policy, products):
    weight, x, linear = torch.randn(2, 6, 6, requires_grad=True), torch.randn(4, 6), nn.Linear(6, 6)

    def function(x):
        x = torch.tanh(torch.tanh(x @ weight[0]) @ weight[1]).exp()  # whose output is what it saves
        return linear(torch.sin(x)) + 1

    with Recorder() as recorder:
        ac.checkpoint(function, x, policy=policy).sum().backward()
    calls = [recorder.calls.count(kind) for kind in (aten.mm.default, aten.exp.default, aten.addmm.default)]
    assert calls == [products + 2, 2, 1]  # and two for the linear layer's gradients


@pytest.mark.parametrize("kept", [aten.native_dropout.default, aten.bernoulli_.float, aten.mm.default, aten.add.Tensor])
def test_dropout_after_what_is_kept_draws_what_it_drew(kept):
    """A kept operator that draws random numbers leaves the generator where it left it before."""

    def native(x):
        return torch.native_dropout(x, 0.5, True)[0]

    x, results = torch.randn(64, requires_grad=True), []
    for how in (functools.partial(ac.checkpoint, policy=lambda operator, *args, **kwargs: operator == kept), plainly):
        torch.manual_seed(0)
        y = how(lambda x: F.dropout(native(native(x.sin()).sin() + 1).sin(), 0.5).sin(), x)
        results.append([y, torch.rand(3), *torch.autograd.grad(y.sum(), x)])
    for ours, plain in zip(*results, strict=True):
        assert_equal(ours, plain, exact=True)


@pytest.mark.parametrize("where", ["inside", "outside", "by a view"])
def test_a_kept_output_that_changes_in_place_is_an_error(where):
    """It would silently be another in the recomputation."""
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight
        z = (y + 1).sin()
        if where == "inside":
            y.mul_(2)
        return y, z.cos()

    y, z = selective(function, torch.randn(4, 6))
    if where != "inside":
        with torch.no_grad():
            (y[0] if where == "by a view" else y).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_policy_with_retain_graph_and_nested():
    x, layers, results = torch.randn(4, 6, requires_grad=True), make_layers(2), []
    for how in (selective, plainly):
        torch.manual_seed(0)
        y = how(lambda x, how=how: how(layers[1], how(layers[0], x)), x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        results.append([*first, *torch.autograd.grad(y, [x, *layers.parameters()])])
    for ours, plain in zip(*results, strict=True):
        assert_equal(ours, plain, exact=True)


def test_layers_of_one_tensor_keep_fewest_at_root_l_segments():
    """k - 1 + l/k tensors (Chen et al. §4.1)."""
    layers, x, counts = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(16)], torch.randn(64, 32), {}
    for k in (1, 2, 4, 8, 16):
        with ac.Alive() as alive:
            y = ac.checkpoint_sequential(layers, k, x)
            counts[k] = alive.bytes() / y.nbytes
        assert counts[k] == k - 1 + 16 / k
    assert min(counts, key=counts.get) == 4


def test_a_transformer_layer_keeps_the_bytes_of_the_formulas():
    """sbh(34 + 5as/h), 34sbh, 20sbh, 2sbh; but for the statistics of LayerNorm, 4 numbers a token."""
    (s, h, a, b, l), per_layer = (32, 48, 3, 3, 4), 12 * 48 * 48 + 2 * 32 * 48
    for name, kept, formula, operations, _, same in ac.measure(l, h, a, s, b, "cpu"):
        few = l * (16 * s * b + 8 * h)  # statistics; what `offload` copies of biases and norms
        copied = 2 if name == "offload" else 0  # sbh: x, too; else only y is new
        assert abs(kept - formula - copied) <= few / (s * b * h), name
        again = {"every layer": per_layer * l, "not products": 2 * s * h * l, "core": s * h * l, "offload": 0}
        again |= {f"{k} segments": per_layer * (l - l // k) for k in (1, 2, 4)}
        assert operations == pytest.approx(2 * (3 * l * per_layer + again[name]) / (12 * h * h * l)), name
        assert same, name


@pytest.mark.parametrize("policy", [None, ac.keep_products])
def test_after_a_backward_that_retains_the_graph_no_more_is_kept_than_before(policy):
    """And of a checkpoint in a checkpoint, not even what is between its layers."""
    layers, x = make_layers(3), torch.randn(4, 6, requires_grad=True)
    with ac.Alive() as alive:
        y = each(selective)(layers, x) if policy else ac.checkpoint(each(ac.checkpoint), layers, x)
        kept = alive.bytes()
        assert policy or kept == y.nbytes
        for _ in range(2):
            y.backward(torch.ones_like(y), retain_graph=True)
            x.grad = None
            layers.zero_grad()
        assert alive.bytes() == kept


@pytest.mark.parametrize("how", HOW)
def test_nothing_outlives_the_graph(how):
    """No cycle through autograd, which Python's collector does not see."""
    gc.collect()
    gc.disable()
    layers, x = make_layers(3), torch.randn(4, 6, requires_grad=True)
    y, weight = HOW[how](layers, x * 1), StorageWeakRef(layers[0][0].weight.untyped_storage())
    y.sum().backward(retain_graph=True)
    del layers, y
    gc.enable()
    assert weight.expired()


@given(st.integers(1, 9), st.integers(1, 9))
def test_segments_are_about_equal_and_all_layers_run_once(l, segments):
    seen, x = [], torch.zeros(1, requires_grad=True)
    layers = [lambda x, i=i: seen.append(i) or x.sin() for i in range(l)]
    if segments > l:
        with pytest.raises(ValueError, match=f"{l} layers do not make {segments} segments; take 1 to {l}"):
            ac.checkpoint_sequential(layers, segments, x)
        return
    y = ac.checkpoint_sequential(layers, segments, x)
    assert seen == list(range(l))
    y.backward()
    assert sorted(seen[l:]) == list(range(l - -(-l // segments)))  # all but the last segment's


def test_backward_inside_function():
    """Gradients of gradients within, computed again."""

    def function(x):
        return torch.autograd.grad(x.sin().cos().sum(), x, create_graph=True)[0] * x.cos()

    x = torch.randn(5, requires_grad=True)
    ours, plain = (torch.autograd.grad(how(function, x).sum(), x)[0] for how in (ac.checkpoint, plainly))
    assert_equal(ours, plain, exact=True)


def body_parallel(technique):
    """Checkpointed layers against the same without: bitwise, collectives and all."""
    models = []
    for how in (ac.checkpoint, selective, plainly):
        layers = make_layers(3)
        if technique == "tensor parallel":
            for layer in layers:
                layer[0] = tp.ColumnParallelLinear.from_full(layer[0], process_group=pool.group())
                layer[3] = tp.RowParallelLinear.from_full(layer[3], process_group=pool.group())
        model = nn.Sequential()
        model.layers, model.forward = layers, functools.partial(each(how), layers)
        if technique == "fsdp":
            for layer in layers:
                fsdp.fully_shard(layer, process_group=pool.group())
            fsdp.fully_shard(model, process_group=pool.group())
        trained = ddp.DDP(model, process_group=pool.group(), bucket_cap_mb=1e-4) if technique == "ddp" else model
        optimizer = OPTIMIZERS["momentum"](trained.parameters())
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            rank = 0 if technique == "tensor parallel" else pool.rank()
            loss_of(trained(make_batch(rank, step))).backward()
            optimizer.step()
        models.append(list(trained.parameters()))
    for model in models[:-1]:
        for ours, plain in zip(model, models[-1], strict=True):
            assert_equal(ours.grad, plain.grad, exact=True, what="gradient")
            assert_equal(ours.detach(), plain.detach(), exact=True)


@pytest.mark.parametrize("technique", ["ddp", "fsdp", "tensor parallel"])
def test_with_the_other_techniques(technique):
    pool.run(2, body_parallel, technique)

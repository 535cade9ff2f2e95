"""activation_checkpoint.py beyond its claims: what it keeps and what it computes."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from claims.activation_checkpoint import plainly
from shared import loss_of, make_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

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


PRODUCTS_OF_LINEAR = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def keep_products(operator, *args, **kwargs):
    """A policy: keep nn.Linear's outputs. Attention's products are large but cheap."""
    return operator in PRODUCTS_OF_LINEAR


selective = partial(ac.checkpoint, policy=keep_products)
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


class Alive(TorchDispatchMode):
    """The memory of the tensors that are computed in this context and still exist."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if ac.shares_memory(func):
            return outputs
        for output in tree_leaves(outputs):
            if torch.is_tensor(output):
                self.storages.add(output.untyped_storage())
        return outputs

    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages)


KEPT = {"full": 3, "one in another": 1, "products": 6 + 3}  # tensors of the output's size


@pytest.mark.parametrize("how", KEPT)
def test_no_more_is_kept_from_forward_to_backward_and_nothing_after(how):
    results_of(HOW[how])  # the first in a process imports what it needs, and holds frames
    layers = make_layers()
    x = make_batch(0, 0).requires_grad_()
    gc.disable()  # freed by reference counts alone
    with Alive() as alive:
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


def noise_of_the_caller(x):
    return torch._C._nn.rrelu_with_noise(x, torch.empty_like(x), 0.1, 0.3, True)


class FillsWhatItSaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, noise):
        ctx.save_for_backward(noise)
        return x * noise.uniform_()

    @staticmethod
    def backward(ctx, gradient):
        (noise,) = ctx.saved_tensors
        return gradient * noise, None


FILLS = {  # a tensor that autograd has saved, or may have saved
    "rrelu in place": lambda x: F.rrelu_(x + 0, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu, then another": lambda x: F.rrelu(x, training=True).sin(),
    "noise of the caller": noise_of_the_caller,
    "a function": lambda x: FillsWhatItSaves.apply(x, torch.empty_like(x)),
    "dropout": nn.Dropout(),
    "alpha dropout": nn.AlphaDropout(),
    "batch norm": nn.BatchNorm1d(6),
}
AROUND = {
    "checkpoint": ac.checkpoint,
    "two checkpoints": partial(ac.checkpoint, ac.checkpoint),
    "policy": keeping_all,
    "offload": offloading(plainly),
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("name", FILLS)
def test_gradients_are_right_if_an_operator_fills_what_autograd_has_saved(name, how):
    layer = nn.Sequential(nn.Linear(6, 6), nn.Identity())
    layer[1].forward = FILLS[name]
    gradients = []
    for run in (plainly, AROUND[how]):
        torch.manual_seed(0)
        x = torch.ones(4, 6)
        y = run(layer, x)
        junk = [torch.full((4, 6), 7.0) for _ in range(50)]  # in memory that is free
        del junk
        loss = y.square().sum()
        gradients += torch.autograd.grad(loss, layer[0].weight)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("layer_class", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_policy_keeps_nothing_that_a_recurrent_layer_overwrites(layer_class):
    """Their gates are views of one product, and have versions of their own."""
    layer = layer_class(6, 6)
    x = torch.randn(4, 6, requires_grad=True)
    gradients = []
    for run in (plainly, keeping_all):
        output, _ = run(layer, x)
        gradients += torch.autograd.grad(output.sum(), x)
    assert torch.equal(*gradients)


def test_gradients_inside_the_context_of_offload_are_right():
    x = torch.ones(50, requires_grad=True)
    gradients = []
    for context in (nullcontext(), ac.offload_to_cpu()):
        torch.manual_seed(0)
        with context:
            y = F.rrelu(x, training=True)
            gradients += torch.autograd.grad(y.sum(), x)
    assert torch.equal(*gradients)


def test_offload_keeps_what_a_tensor_was_when_it_was_saved():
    weight = torch.ones(2, 1, 1)  # frozen, and saved beside x
    x = torch.ones(1, 1, 3, requires_grad=True)
    with ac.offload_to_cpu():
        y = F.conv1d(x, weight)
        weight.zero_()
    y.sum().backward()
    assert x.grad.tolist() == [[[2.0, 2.0, 2.0]]]


class Copies(TorchDispatchMode):
    """Of each copy: the tensor where to, the tensor where from, and whether the host goes on."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self.calls.append(args)
        return func(*args, **kwargs)


def test_the_host_does_not_wait_for_copies_of_offload():
    """Between tensors of other strides, CUDA would copy through memory that is not pinned."""
    qkv = torch.randn(2, 5, 3 * 4, requires_grad=True)
    q, k, v = qkv.unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    with Copies() as copies, ac.offload_to_cpu():
        y = F.scaled_dot_product_attention(q.exp(), k.sin(), v.cos())
    assert copies.calls
    for host, tensor, *non_blocking in copies.calls:
        assert host.stride() == tensor.stride()
        assert non_blocking == [True]
    y.sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_offload_takes_sparse_tensors(layout):
    matrix = torch.eye(3).to_sparse(layout=layout)
    x = torch.ones(3, 2, requires_grad=True)
    with ac.offload_to_cpu():
        y = torch.sparse.mm(matrix, x)
    matrix.values().zero_()  # of the copy, nothing changes
    y.sum().backward()
    assert (x.grad == 1).all()


def test_a_kept_output_that_is_changed_silently_is_computed_again():
    """_foreach_add_ returns nothing, and does not count as a change."""
    weight = torch.randn(6, 6, requires_grad=True)

    def function(x):
        y = x @ weight
        torch._foreach_add_([y.detach()], 1.0)
        return y.sin()

    gradients = []
    for how in (plainly, selective, keeping_all):
        y = how(function, torch.ones(4, 6))
        gradients += torch.autograd.grad(y.sum(), weight)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


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


class FailsInBackward:
    """A function whose second run, and no other, raises an error or saves other tensors."""

    def __init__(self, error=None):
        self.error = error
        self.runs = 0

    def __call__(self, x):
        self.runs += 1
        y = F.dropout(x).sin()
        if self.runs == 2 and self.error:
            raise self.error
        return F.dropout(y.sin() if self.runs == 2 else y.double()).sin()


FAILURES = {
    "an error": FailsInBackward(ValueError("second run")),
    "Ctrl-C": FailsInBackward(KeyboardInterrupt("second run")),
    "other tensors": FailsInBackward(),
}


@pytest.mark.parametrize("around", ["checkpoint", "two checkpoints", "policy"])
@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_second_run_that_fails_random_numbers_and_gradients_are_right(failure, around):
    """Such as one that is out of memory, after which the caller goes on."""
    function = FailsInBackward(FAILURES[failure].error)
    x = torch.ones(50, requires_grad=True)
    torch.manual_seed(0)
    expected = FailsInBackward(function.error)(x)
    torch.manual_seed(0)
    y = AROUND[around](function, x)
    following = torch.random.get_rng_state()
    with pytest.raises((ValueError, KeyboardInterrupt, RuntimeError), match="second run"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(torch.random.get_rng_state(), following)
    (gradient,) = torch.autograd.grad(y.sum(), x)  # the third run is right
    assert torch.equal(gradient, *torch.autograd.grad(expected.sum(), x))


def test_without_preserve_rng_state_the_second_run_draws_anew():
    x = torch.ones(100, requires_grad=True)
    y = ac.checkpoint(lambda x: F.dropout(x).exp(), x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(y > 1, x.grad > 0)


def test_the_second_run_ends_when_backward_has_what_it_needs():
    weight = torch.randn(6, 6, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
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
    with Alive() as alive:
        y = ac.checkpoint_sequential([torch.sin] * 7, 3, x)
    assert alive.bytes() == (2 + 3) * y.nbytes


# ---- the table of the docstring


def run_checkpointed(layers, x, policy=None):
    for each in layers:
        x = ac.checkpoint(each, x, policy=policy)
    return x


def two_segments(layers, x):
    return ac.checkpoint_sequential(layers, 2, x)


class TransformerLayer(nn.Module):
    """A Block with dropout that holds attention's weights in memory, as in Korthikanti et al.

    run_core(attention, q, k, v) may checkpoint the core of attention.
    """

    def __init__(self, block, run_core=None):
        super().__init__()
        self.block = block
        self.run_core = run_core or plainly

    def forward(self, x):
        block = self.block
        qkv = block.qkv(block.norm1(x))
        q, k, v = map(block.split_heads, qkv.chunk(3, -1))
        y = self.run_core(attention, q, k, v)
        y = block.proj(y.transpose(1, 2).flatten(2))
        x = x + dropout(y)
        hidden = block.linear1(block.norm2(x))
        y = block.linear2(F.gelu(hidden))
        return x + dropout(y)


def attention(q, k, v):  # (batch, heads, time, head_dim)
    tokens, width = q.shape[2:]
    future = q.new_full((tokens, tokens), -torch.inf).triu(1)
    scores = q @ k.mT * width**-0.5
    weights = (scores + future).softmax(-1)
    return dropout(weights) @ v


def dropout(x):
    # This mask takes a byte per element. On a CPU, F.dropout's mask has the dtype of x.
    return torch.native_dropout(x, p=0.1, train=True)[0]


s = 32  # tokens
h = 48  # width
a = 3  # heads
b = 3  # sequences
l = 4  # layers
INSIDE = 34 + 5 * a * s / h  # bytes that a layer keeps, in units of sbh, as all below
PRODUCTS = 12 * h * h + 2 * s * h  # operations of a layer's forward per token
COPIES = 2 + 24 * h / (s * b) * l  # offload also copies the first input and the weights
products = partial(run_checkpointed, policy=keep_products)
WAYS = {  # how to run, how to run attention's core, bytes kept, operations computed again
    "the core of attention": (ac.run_layers, ac.checkpoint, 34 * l, s * h * l),
    "all but linear layers": (products, plainly, 20 * l, 2 * s * h * l),
    "each layer": (run_checkpointed, plainly, 2 * l, PRODUCTS * l),
    "2 segments": (two_segments, plainly, 2 + INSIDE * l / 2, PRODUCTS * l / 2),
    "offload": (offloading(ac.run_layers), plainly, INSIDE * l + COPIES, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_layer_keeps_the_bytes_of_the_docstring(way):
    """But for the statistics of LayerNorm, 4 numbers a token, and copies of biases and norms."""
    run, run_core, formula, again = WAYS[way]
    model = ac.language_model(h, a, l).bfloat16()
    blocks = model[1:-2]  # without the embedding, the last norm and the last linear layer
    layers = nn.ModuleList(TransformerLayer(block, run_core) for block in blocks)
    x = torch.randn(b, s, h, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as flops, Alive() as alive:
        y = run(layers, x)
        kept = alive.bytes()
        y.sum().backward()
    few = l * (16 * s * b + 8 * h)
    assert abs(kept - formula * s * b * h) <= few
    assert flops.get_total_flops() == 2 * s * b * (3 * PRODUCTS * l + again)


def test_no_segments_are_an_error():
    layers = [torch.sin, torch.cos]
    with pytest.raises(ValueError, match="segments=0 of 2 layers"):
        ac.checkpoint_sequential(layers, 0, torch.ones(1))


@pool.on(2)
def test_a_policy_keeps_no_collective_and_nothing_that_one_writes_into():
    w = torch.tensor(pool.rank() + 1.0, requires_grad=True)

    def function(w):
        total = w.detach().sin()
        dist.all_reduce(total, group=pool.group())
        return total.mul(w).sin()

    expected = torch.autograd.grad(function(w), w)
    assert torch.autograd.grad(keeping_all(function, w), w) == expected

"""linear_cross_entropy.py beyond its claims: ranks, every option, 16 bits, costs, errors."""

import weakref
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import assert_equal, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import amp
import linear_cross_entropy as lce
from ddp import DistributedDataParallel

on_cpu = pytest.mark.cpu


def make_inputs(V=23, tokens=12, dtype=torch.float64):
    """Return x (tokens/2, 2, 6), weight, bias and target. Two targets are ignored."""
    shapes = [(tokens // 2, 2, 6), (V, 6), (V,)]
    numbers = [randn(shape, seed) for seed, shape in enumerate(shapes)]
    target = torch.arange(tokens).view(-1, 2) * 5 % V
    target[:2, 0] = -100
    return *(x.to(dtype) for x in numbers), target


def plain_loss(
    x,
    weight,
    target,
    *,
    linear_bias=None,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
):
    logits = F.linear(x, weight, linear_bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    flat = logits.flatten(0, -2)
    loss = F.cross_entropy(
        flat, target.flatten(), reduction="none", label_smoothing=label_smoothing
    )
    counts = target != -100
    lse = logits.logsumexp(-1)
    loss = loss.view(target.shape) + z_loss * lse.square() * counts
    if reduction == "none":
        return loss
    return loss.sum() / (counts.sum() if reduction == "mean" else 1)


def loss_and_gradients(function, x, weight, bias, target, **options):
    """If the loss is one of each token, gradients are those of a weighted sum."""
    leaves = [y.detach().clone() for y in (x, weight, bias)]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    loss = function(x, weight, target, linear_bias=bias, **options)
    factors = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype)
    weighted = loss * factors.view(loss.shape)
    weighted.sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def assert_all_equal(found, expected):
    for ours, plain in zip(found, expected, strict=True):
        assert_equal(ours, plain, exact=False)


@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_the_idea_equals_the_plain_loss(chunk_size):
    x, weight, _, target = make_inputs()
    x = x.flatten(0, 1)
    target = target.flatten().clamp(min=0)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    ours = lce.NaiveLinearCrossEntropy.apply(*leaves, target, chunk_size)
    plain = plain_loss(*leaves, target, reduction="sum")
    found = torch.autograd.grad(3 * ours, leaves)
    expected = torch.autograd.grad(3 * plain, leaves)
    assert_all_equal([ours, *found], [plain, *expected])


OPTIONS = {
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "z_loss": st.sampled_from([0.0, 0.01]),
    "softcap": st.sampled_from([None, 1.5]),
}


@given(
    chunk_size=st.integers(1, 30),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_any_options_in_chunks_of_any_size(chunk_size, options):
    ours = partial(lce.linear_cross_entropy, chunk_size=chunk_size)
    found = loss_and_gradients(ours, *make_inputs(), **options)
    expected = loss_and_gradients(plain_loss, *make_inputs(), **options)
    assert_all_equal(found, expected)


@pytest.mark.parametrize(
    "tokens",
    [0, 2],
    ids=["no token", "two tokens"],
)
def test_targets_may_be_of_another_integer_dtype(tokens):
    x, weight, _, target = make_inputs()
    x = x[-1, :tokens]
    target = target[-1, :tokens]
    found = lce.linear_cross_entropy(x, weight, target.int(), reduction="sum")
    expected = plain_loss(x, weight, target, reduction="sum")
    assert_equal(found, expected, exact=False)


@on_cpu
def test_a_chunk_may_have_only_words_of_no_probability():
    """Their bias is -inf."""
    x, weight, bias, target = make_inputs()
    bias[20:] = -torch.inf
    target = target.clamp(max=19)
    ours = partial(lce.linear_cross_entropy, chunk_size=2)
    found = loss_and_gradients(ours, x, weight, bias, target)
    assert_all_equal(found, loss_and_gradients(plain_loss, x, weight, bias, target))


def rows_of(tensor, ranks, rank, filled=7.0):
    """The rows of a rank. Padding is large, or what it is filled with."""
    rows = -(-len(tensor) // ranks)
    missing = rows * ranks - len(tensor)
    padding = tensor.new_full((missing, *tensor.shape[1:]), filled)
    padded = torch.cat([tensor, padding])
    return padded.split(rows)[rank]


SPLIT = {
    "plainly": {},
    "with every option": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 1.5},
    "summed": {"reduction": "sum", "label_smoothing": 0.1},
    "for each token": {"reduction": "none", "z_loss": 0.01},
}


@pytest.mark.parametrize("V", [24, 5], ids=["24 words", "5 words, and padding"])
@pytest.mark.parametrize("how", SPLIT)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pool.on(1, 2, 3, 4)
def test_words_split_over_ranks_are_as_on_one_device(sequence_parallel, how, V):
    """The whole gradient of the input is on every rank."""
    N = pool.world_size()
    rank = pool.rank()
    x, weight, bias, target = make_inputs(V, tokens=24)
    expected = loss_and_gradients(plain_loss, x, weight, bias, target, **SPLIT[how])
    loss, grad_x, grad_weight, grad_bias = expected
    if sequence_parallel:
        x = x.chunk(N)[rank]
        grad_x = grad_x.chunk(N)[rank]
    ours = partial(
        lce.vocab_parallel_linear_cross_entropy,
        vocab_size=V,
        chunk_size=3,
        sequence_parallel=sequence_parallel,
        process_group=pool.group(),
    )
    shards = [rows_of(y, N, rank) for y in (weight, bias)]
    found = loss_and_gradients(ours, x, *shards, target, **SPLIT[how])
    own = [rows_of(y, N, rank, 0.0) for y in (grad_weight, grad_bias)]
    assert_all_equal(found, [loss, grad_x, *own])


@pool.on(3)
def test_two_of_three_ranks_may_be_a_group():
    group = dist.new_group([1, 2])
    x, weight, _, target = make_inputs(24)
    ours = partial(lce.vocab_parallel_linear_cross_entropy, process_group=group)
    if pool.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not in process_group"):
            ours(x, weight, target)
        return
    own = weight.chunk(2)[pool.rank() - 1]
    expected = plain_loss(x, weight, target)
    assert_equal(ours(x, own, target), expected, exact=False)


@pool.on(3)
def test_with_tokens_per_rank_ddps_average_is_the_mean_over_all_tokens():
    """Ranks have 8, 1 and 0 unmasked tokens."""
    x, weight, _, target = make_inputs(24, tokens=24)
    target = torch.full_like(target, -100)
    target[:4] = 3
    target[4, 0] = 5
    expected = weight.clone().requires_grad_()
    plain_loss(x, expected, target).backward()
    model = torch.nn.Linear(6, 24, bias=False).double()
    model.weight = torch.nn.Parameter(weight)
    wrapped = DistributedDataParallel(WithLoss(model), process_group=pool.group())
    x = x.chunk(3)[pool.rank()]
    target = target.chunk(3)[pool.rank()]
    total = wrapped(x, target)
    loss = total / lce.tokens_per_rank(target, pool.group())
    loss.backward()
    assert_equal(model.weight.grad, expected.grad, exact=False)


class WithLoss(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x, target):
        return lce.linear_cross_entropy(x, self.head.weight, target, reduction="sum")


# ---- 16 bits


def errors(function, tensors, target):
    """Relative, of the gradients, in bf16."""
    wide = [y.double() for y in tensors]
    exact = loss_and_gradients(plain_loss, *wide, target)
    found = loss_and_gradients(function, *tensors, target)
    pairs = zip(found, exact, strict=True)
    ratios = [(a - b).norm() / b.norm() for a, b in pairs]
    return torch.stack(ratios)


@on_cpu
@pytest.mark.parametrize("chunk_size", [4, 1024])
def test_bf16_is_as_exact_in_chunks_of_any_size(chunk_size):
    *tensors, target = make_inputs(1000, 256, torch.bfloat16)
    ours = partial(lce.linear_cross_entropy, chunk_size=chunk_size)
    plain = errors(plain_loss, tensors, target)
    assert (errors(ours, tensors, target) <= 1.25 * plain + 1e-6).all()


def under_pytorchs(function, *args, **options):
    with torch.autocast("cpu", torch.bfloat16):
        return function(*args, **options)


def under_ours(function, *args, **options):
    with amp.autocast(torch.bfloat16):
        return function(*args, **options)


@on_cpu
@pytest.mark.parametrize("autocast", [under_pytorchs, under_ours])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_backward_computes_the_logits_of_forward_under_autocast(autocast, where):
    """Else the softmax does not add up to 1."""
    x, weight, bias, target = make_inputs(1000, 256, torch.float32)
    ours = partial(lce.linear_cross_entropy, chunk_size=64)
    leaf = (bias * 0).requires_grad_()
    call = partial(ours, 30 * x, weight, target, linear_bias=leaf)
    loss = autocast(call) if where == "forward" else call()
    autocast(loss.backward) if where == "backward" else loss.backward()
    assert leaf.grad.sum().abs() < 5e-3  # softmax - target, summed over words


@on_cpu
def test_autocast_casts_what_it_would_cast_for_a_linear_layer():
    """It leaves float64 alone."""
    *tensors, target = make_inputs(100, dtype=torch.float32)
    narrow = [y.bfloat16() for y in tensors]
    wide = [y.double() for y in tensors]
    ours = lce.linear_cross_entropy
    for inputs, cast in [(tensors, narrow), (wide, wide)]:
        x, weight, bias = inputs
        found = under_pytorchs(ours, x, weight, target, linear_bias=bias)
        x, weight, bias = cast
        expected = ours(x, weight, target, linear_bias=bias)
        assert torch.equal(found, expected)


# ---- costs


class Held(TorchDispatchMode):
    """The most elements that tensors made inside hold at a time."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.most = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = filter(torch.is_tensor, tree_leaves(args))
        before = set(map(address_of, inputs))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            address = address_of(tensor)
            is_new = address not in before | self.known
            if is_new:
                self.known.add(address)
                size = storage.nbytes() // tensor.itemsize
                self.now += size
                weakref.finalize(storage, self.free, address, size)
        self.most = max(self.most, self.now)
        return result

    def free(self, address, size):
        self.known.discard(address)
        self.now -= size


def address_of(tensor):
    return tensor.untyped_storage().data_ptr()


T = 64  # tokens
H = 8
V = 4096  # words
C = 256  # words in a chunk


def held_and_kept(function, *args):
    """Beyond input, weight and their gradients, in elements; and the operations."""
    x = randn((T, H)).requires_grad_()
    weight = randn((V, H)).requires_grad_()
    target = torch.arange(T)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with Held() as held, FlopCounterMode(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = function(x, weight, target, *args)
        loss.backward()
    saved = {address_of(y): y.numel() for y in kept if y.is_floating_point()}
    for y in (x, weight):
        saved.pop(address_of(y), None)
    outside = sum(saved.values())
    gradients = T * H + V * H
    return held.most - gradients, outside, flops.get_total_flops()


@on_cpu
def test_memory_and_operations_are_those_of_the_table():
    """Two elements of a chunk of logits are held for each, and lse is kept."""

    def ours(x, weight, target):
        return lce.linear_cross_entropy(x, weight, target, chunk_size=C, reduction="sum")

    held, kept, operations = held_and_kept(ours)
    some_vectors = 40 * T
    assert 2 * T * C <= held <= 2 * T * C + T * H + some_vectors
    assert kept == T
    assert operations == 8 * T * H * V


@on_cpu
def test_memory_and_operations_of_the_idea_are_those_of_the_table():
    tokens = 8
    held, kept, operations = held_and_kept(lce.NaiveLinearCrossEntropy.apply, tokens)
    assert held <= 4 * tokens * V + V * H + T * H + 40 * T
    assert kept == T * H + V * H
    assert operations == 6 * T * H * V


@on_cpu
def test_an_evaluation_computes_no_gradients():
    x, weight, _, target = make_inputs(24)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        lce.linear_cross_entropy(x, weight, target)
    assert flops.get_total_flops() == 2 * 12 * 6 * 24


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pool.on(3)
def test_ranks_send_the_bytes_of_the_table(sequence_parallel):
    N = pool.world_size()
    x, weight, _, target = make_inputs(24)
    x = x.chunk(N)[pool.rank()] if sequence_parallel else x
    leaf = x.clone().requires_grad_()
    own = weight.chunk(N)[pool.rank()]
    ours = partial(
        lce.vocab_parallel_linear_cross_entropy,
        sequence_parallel=sequence_parallel,
        process_group=pool.group(),
    )
    ours(leaf, own, target)  # the ranks have agreed on this call
    with lce.SentBytes() as sent:
        ours(leaf, own, target).backward()
    tokens = target.numel()
    statistics = 3 * tokens * (N - 1)
    of_input = 2 * tokens * 6 * (N - 1) / N
    assert sent.total == 8 * (statistics + of_input)


# ---- errors


@on_cpu
@pytest.mark.parametrize("token", [-1, 24])
def test_a_target_outside_is_an_index_error(token):
    x, weight, _, target = make_inputs(24)
    target[3, 1] = token
    with pytest.raises(IndexError, match=f"targets .{token}. are not in a vocabulary of 24"):
        lce.linear_cross_entropy(x, weight, target)


@on_cpu
@pytest.mark.parametrize("token", [-1, 24])
def test_on_a_gpu_a_target_outside_makes_the_loss_nan(token, monkeypatch):
    monkeypatch.setattr(lce, "check_targets", lambda words, V: None)
    x, weight, _, target = make_inputs(24)
    target[3, 1] = token
    leaf = weight.requires_grad_()
    loss = lce.linear_cross_entropy(x, leaf, target)
    loss.backward()
    assert loss.isnan()
    assert leaf.grad.isnan().all()


x, weight, bias, target = make_inputs(24)
REFUSED = {
    "input": {"input": x[..., :5]},
    "linear_bias": {"linear_bias": bias[:5]},
    "integers": {"target": target.double()},
    "use none, mean or sum": {"reduction": "batchmean"},
    "label_smoothing=1.5": {"label_smoothing": 1.5},
    "chunk_size=0": {"chunk_size": 0},
    "softcap=-1": {"softcap": -1},
}


@on_cpu
@pytest.mark.parametrize("words", REFUSED)
def test_arguments_that_make_no_sense_are_an_error(words):
    arguments = {"input": x, "linear_weight": weight, "target": target} | REFUSED[words]
    with pytest.raises(ValueError, match=words):
        lce.linear_cross_entropy(**arguments)


@on_cpu
def test_gradients_of_gradients_are_an_error():
    leaf = x.clone().requires_grad_()
    loss = lce.linear_cross_entropy(leaf, weight, target)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(loss, leaf, create_graph=True)


@pool.on(2)
def test_a_difference_between_ranks_is_an_error_on_both():
    own = weight.chunk(2)[pool.rank()]
    is_last = pool.rank() == 1
    ours = partial(lce.vocab_parallel_linear_cross_entropy, process_group=pool.group())
    refused = partial(pytest.raises, ValueError)
    with refused(match="same call"):
        ours(x, own, target, label_smoothing=0.1 * is_last)
    with refused(match="same call"):
        ours(x[is_last:], own, target[is_last:])
    with refused(match="at most 24"):
        ours(x, own, target, vocab_size=25)
    expected = plain_loss(x, weight, target)
    assert_equal(ours(x, own, target), expected, exact=False)

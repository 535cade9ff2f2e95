"""context_parallel.py beyond its claims: the ideas, the table of costs, overlap, errors, groups."""

import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
from claims.context_parallel import mine, on_ranks, one_device, whole_inputs
from shared import Collectives, assert_equal, randn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import amp
import context_parallel as cp
from context_parallel import ring_attention, ulysses_attention

BOTH = [ring_attention, ulysses_attention]


def local_inputs(H=4, K=2, tokens=6, dtype=torch.float64):
    """This rank's q, k and v, with heads of 8. They differ from other ranks'."""
    inputs = []
    for number, heads in enumerate((H, K, K)):
        x = randn((2, heads, tokens, 8), seed=10 * pool.rank() + number)
        inputs.append(x.to(dtype).requires_grad_())
    return inputs


# ---- the ideas


@pytest.mark.parametrize("causal", [False, True])
@pool.on(1, 2, 3)
def test_the_naive_ring_is_attention_over_the_whole_sequence(causal):
    inputs = whole_inputs(6, heads=4, shared=2)
    naive = partial(cp.naive_ring_attention, causal=causal, process_group=pool.group())
    found = on_ranks(naive, *inputs)
    for ours, theirs in zip(found, one_device(*inputs, causal), strict=True):
        assert_equal(ours, mine(theirs), exact=False)


@pytest.mark.parametrize("causal", [False, True])
@pool.on(1, 2)
def test_the_naive_ulysses_is_bitwise_the_other_on_contiguous_parts(causal):
    inputs = whole_inputs(6, heads=4, shared=2)
    how = {"causal": causal, "process_group": pool.group()}
    naive = on_ranks(partial(cp.naive_ulysses_attention, **how), *inputs)
    ours = on_ranks(partial(ulysses_attention, zigzag=False, **how), *inputs)
    for found, expected in zip(naive, ours, strict=True):
        assert torch.equal(found, expected)


# ---- costs


def output_and_kept(attention, inputs, **options):
    """Return the output, and the bytes that autograd keeps for backward."""
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = attention(*inputs, **options)
    return output, cp.held_bytes(saved)


def kept_beyond_the_table(H, K, tokens, dtype):
    """Return bytes. In torch 2.6, PyTorch's attention also keeps the scores on a CPU, if K < H."""
    inputs = local_inputs(H, K, tokens, dtype)
    output, kept = output_and_kept(cp.local_attention, inputs, causal=False, scale=None)
    lse_bytes = output.numel() // 8 * 4
    return kept - cp.held_bytes([*inputs, output]) - lse_bytes


def costs_of_ring(H, K, u, dtype):
    """Return bytes sent in forward, sent in backward, kept for backward."""
    size = dtype.itemsize
    block = 2 * K * u * (pool.world_size() - 1)
    kept = (2 * H + 2 * K) * u * size + H * u // 8 * 4
    return block * size, block * (size + max(4, size)), kept


def costs_of_ulysses(H, K, u, dtype):
    N = pool.world_size()
    K = math.lcm(K, N)
    H = math.ceil(H / K) * K
    size = (2 * H + 2 * K) * u * dtype.itemsize
    sent = size * (N - 1) / N
    beyond = kept_beyond_the_table(H // N, K // N, 6 * N, dtype)
    return sent, sent, size + H * u // 8 * 4 + beyond


@pytest.mark.cpu  # kernels for GPUs pad lse
@pytest.mark.parametrize("name", ["ring", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "K"), [(6, 2), (4, 1)])
@pool.on(1, 2, 3, 4)
def test_bytes_sent_and_kept_are_the_tables(name, dtype, H, K):
    attention = {"ring": ring_attention, "ulysses": ulysses_attention}[name]
    formula = {"ring": costs_of_ring, "ulysses": costs_of_ulysses}[name]
    inputs = local_inputs(H, K, dtype=dtype)
    attention(*inputs, process_group=pool.group())  # the ranks check that they agree
    with cp.SentBytes() as in_forward:
        output, kept = output_and_kept(attention, inputs, process_group=pool.group())
    with cp.SentBytes() as in_backward:
        output.sum().backward()
    costs = (in_forward.total, in_backward.total, kept)
    u = output.numel() // H
    assert costs == pytest.approx(formula(H, K, u, dtype))


@pool.on(2)
def test_only_a_new_call_is_checked():
    inputs = local_inputs(tokens=10)
    attention = partial(ring_attention, process_group=pool.group())
    with Collectives() as first:
        attention(*inputs)
    with Collectives() as second:
        attention(*inputs)
    with Collectives() as other:
        attention(*inputs, causal=True)
    counts = [len(seen.calls) for seen in (first, second, other)]
    assert counts[0] == counts[2] > counts[1] == 2


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu
@pool.on(3)
def test_the_next_block_is_on_its_way_while_the_rank_computes_with_this_one():
    inputs = local_inputs()
    attention = partial(ring_attention, process_group=pool.group())
    attention(*inputs)
    with Operators() as seen:
        attention(*inputs).sum().backward()
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    letters = {"c10d::send": "s", kernel: "f", f"{kernel}_backward": "b"}
    order = "".join(letters.get(name, "") for name in seen.names)
    assert order == "sfsff" + "sbsbsbs"


# ---- splitting, other contexts


@pytest.mark.parametrize("zigzag", [False, True])
@pool.on(1, 2, 3)
def test_a_sequence_is_split_and_joined(zigzag):
    N = pool.world_size()
    how = {"process_group": pool.group(), "zigzag": zigzag}
    x = randn((2, 6 * N, 3), seed=1)
    part = cp.split_sequence(x, **how).requires_grad_()
    whole = cp.join_sequence(part, **how)
    loss = whole * (pool.rank() + 1)
    loss.sum().backward()
    own = cp.positions(6 * N, **how)
    assert torch.equal(part, mine(x, zigzag, dim=1))
    assert torch.equal(part, x[:, own])
    assert torch.equal(whole, x)
    assert (part.grad == N * (N + 1) / 2).all()  # of all ranks' losses


@pytest.mark.parametrize("autocast", [amp.autocast, torch.autocast])
@pool.on(2)
def test_autocast_does_not_reach_inside(autocast):
    if autocast is torch.autocast:
        autocast = partial(autocast, pool.device().type)
    inputs = local_inputs(dtype=torch.float32)
    results = []
    for enabled in (False, True):
        with autocast(dtype=torch.bfloat16, enabled=enabled):
            output = ring_attention(*inputs, process_group=pool.group())
            gradients = torch.autograd.grad(output.sum(), inputs)
        results.append([output, *gradients])
    for without, within in zip(*results, strict=True):
        assert torch.equal(without, within)


def gradients_of_gradients(attention, inputs):
    output = attention(*inputs, process_group=pool.group())
    loss = output.square().sum()
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    squares = [gradient.square().sum() for gradient in gradients]
    return torch.autograd.grad(sum(squares), inputs)


@pool.on(2)
def test_a_gradient_of_a_gradient_is_an_error_and_its_advice_works():
    inputs = local_inputs(H=4, K=4)
    with pytest.raises(RuntimeError, match=r"use ulysses_.*sdpa_kernel\(.*MATH\)"):
        gradients_of_gradients(ring_attention, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        found = gradients_of_gradients(partial(ulysses_attention, zigzag=False), inputs)
        expected = gradients_of_gradients(cp.naive_ulysses_attention, inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs, exact=False)


@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_in_a_group_whose_ranks_have_other_numbers_in_the_world(attention):
    group = dist.new_group([1, 2])
    *whole, grad = [randn((1, 4, 8, 2), seed=i) for i in range(4)]
    expected = one_device(*whole, grad, causal=True)
    if pool.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not in process_group"):
            attention(*whole, process_group=group)
        return
    split = partial(cp.split_sequence, dim=2, process_group=group)
    leaves = [split(x).requires_grad_() for x in whole]
    output = attention(*leaves, causal=True, process_group=group)
    output.backward(split(grad))
    found = [output, *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, split(theirs), exact=False)


# ---- errors


@pytest.mark.parametrize("attention", BOTH)
@pool.on(2)
def test_shapes_that_do_not_fit_are_an_error(attention):
    q, k, v = local_inputs()
    attend = partial(attention, process_group=pool.group())
    with pytest.raises(ValueError, match="H a multiple of K"):
        attend(q[:, :3], k, v)
    with pytest.raises(ValueError, match=r"q \(2, 4, 6, 4\)"):
        attend(q[..., :4], k, v)
    with pytest.raises(ValueError, match=r"v \(2, 1, 6, 8\)"):
        attend(q, k, v[:, :1])
    with pytest.raises(ValueError, match="its 5 tokens are an odd"):
        attend(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])


@pytest.mark.parametrize("attention", BOTH)
@pool.on(2)
def test_dtypes_that_differ_and_integers_are_an_error(attention):
    q, k, v = local_inputs()
    attend = partial(attention, process_group=pool.group())
    with pytest.raises(ValueError, match=r"v .* of torch.float32"):
        attend(q, k, v.float())
    with pytest.raises(ValueError, match="floating-point"):
        attend(q.long(), k.long(), v.long())


@pytest.mark.parametrize("attention", BOTH)
@pool.on(2)
def test_a_mask_in_place_of_causal_is_an_error(attention):
    with pytest.raises(ValueError, match="causal must be True or False"):
        attention(*local_inputs(), None, process_group=pool.group())


@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_options_of_one_rank_alone_are_an_error_on_all(attention):
    inputs = local_inputs(tokens=8)
    is_second = pool.rank() == 1
    attend = partial(attention, *inputs, process_group=pool.group())
    with pytest.raises(ValueError, match=r"rank 1 makes .*zigzag=False"):
        attend(zigzag=not is_second)
    with torch.set_grad_enabled(not is_second), pytest.raises(ValueError, match="with gradient"):
        attend()
    attend()  # the group works on


@pool.on(3)
def test_another_function_on_one_rank_is_an_error_on_all_ranks():
    attention = [ulysses_attention, ring_attention, ulysses_attention][pool.rank()]
    with pytest.raises(ValueError, match=r"rank 1 makes ring_.*rank 2 makes ulysses_"):
        attention(*local_inputs(tokens=12), process_group=pool.group())


@pool.on(2)
def test_what_does_not_divide_is_an_error_with_the_numbers():
    group = pool.group()
    with pytest.raises(ValueError, match="of 6 does not divide into 4 chunks"):
        cp.split_sequence(torch.ones(2, 6), process_group=group)
    with pytest.raises(ValueError, match="of 5 does not divide into 2 chunks"):
        cp.positions(5, group, zigzag=False)
    with pytest.raises(ValueError, match="its 3 tokens are an odd number"):
        cp.join_sequence(torch.ones(2, 3), process_group=group)
    x = torch.ones(2, [2, 4][pool.rank()])
    with pytest.raises(ValueError, match=r"0 makes join_sequence\(\(2, 2\).*; rank 1 .*\(2, 4\)"):
        cp.join_sequence(x, process_group=group)

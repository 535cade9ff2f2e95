"""context_parallel.py beyond its claims: the ideas, costs, overlap, groups, errors."""

import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
from claims.context_parallel import mine, on_ranks, one_device, whole_inputs
from shared import Collectives, Watch, assert_equal, randn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import amp
import context_parallel as cp
from context_parallel import ring_attention, ulysses_attention

BOTH = [ring_attention, ulysses_attention]
H = 6  # heads of queries
K = 2  # heads of keys
D = 8  # size of a head


def local_inputs(heads=H, shared=K, tokens=6, dtype=torch.float64):
    """This rank's q, k and v. They differ from other ranks'."""
    inputs = []
    for number, count in enumerate([heads, shared, shared]):
        x = randn((2, count, tokens, D), seed=10 * pool.rank() + number)
        inputs.append(x.to(dtype).requires_grad_())
    return inputs


def assert_all_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs, exact=False)


# ---- the ideas


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["naive_ring_attention", "naive_ulysses_attention"])
@pool.on(1, 2)
def test_the_idea_is_attention_over_the_whole_sequence(name, causal):
    inputs = whole_inputs(6, heads=4, shared=2)
    naive = partial(getattr(cp, name), causal=causal, process_group=pool.group())
    expected = one_device(*inputs, causal)
    assert_all_equal(on_ranks(naive, *inputs), [mine(x) for x in expected])


# ---- costs


def sent_and_kept(attention, inputs):
    """Return bytes: sent in forward, sent in backward, kept for backward."""
    attend = partial(attention, *inputs, process_group=pool.group())
    attend()  # the ranks check that they agree
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with cp.SentBytes() as forward, saved_tensors_hooks(keep, lambda tensor: tensor):
        output = attend()
    with cp.SentBytes() as backward:
        output.sum().backward()
    return forward.total, backward.total, cp.held_bytes(saved)


@pytest.mark.cpu  # kernels for GPUs pad lse
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pool.on(1, 3)
def test_the_ring_sends_and_keeps_the_bytes_of_its_table(dtype):
    q, k, v = local_inputs(dtype=dtype)
    u = q.numel() // H
    size = dtype.itemsize
    block = 2 * K * u * (pool.world_size() - 1)
    lse = 4 * H * u // D
    gradients_in_fp32 = 4 * block

    sent, sent_back, kept = sent_and_kept(ring_attention, [q, k, v])

    assert sent == size * block
    assert sent_back == size * block + gradients_in_fp32
    assert kept == size * (2 * H + 2 * K) * u + lse


@pool.on(2, 3, 4)
def test_ulysses_sends_the_bytes_of_its_table_with_few_key_heads():
    N = pool.world_size()
    inputs = local_inputs()
    u = inputs[0].numel() // H
    padded_K = math.lcm(K, N)
    padded_H = math.ceil(H / padded_K) * padded_K
    formula = 8 * (2 * padded_H + 2 * padded_K) * u * (N - 1) / N

    sent, sent_back, _ = sent_and_kept(ulysses_attention, inputs)

    assert sent == sent_back == pytest.approx(formula)


@pool.on(2)
def test_ranks_compare_only_a_new_call():
    inputs = local_inputs(tokens=10)
    counts = []
    for causal in (False, False, True):
        with Collectives() as seen:
            ring_attention(*inputs, causal, process_group=pool.group())
        counts.append(len(seen.calls))
    assert counts[0] == counts[2] > counts[1] == 2


@pytest.mark.cpu
@pool.on(3)
def test_the_next_block_travels_while_the_rank_computes_with_this_one():
    attend = partial(ring_attention, *local_inputs(), process_group=pool.group())
    attend()
    with Watch(lambda: None) as operators:
        attend().sum().backward()
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    letters = {"c10d::send": "s", kernel: "f", f"{kernel}_backward": "b"}
    order = [letters.get(name, "") for name, _ in operators.seen]
    assert "".join(order) == "sfsff" + "sbsbsbs"


# ---- splitting, other contexts


@pytest.mark.parametrize("zigzag", [False, True])
@pool.on(1, 3)
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
def test_autocast_does_not_round_inside(autocast):
    options = {"dtype": torch.bfloat16}
    if autocast is torch.autocast:
        options["device_type"] = pool.device().type
    inputs = local_inputs(dtype=torch.float32)
    attend = partial(ring_attention, *inputs, process_group=pool.group())
    expected = torch.autograd.grad(attend().sum(), inputs)
    with autocast(**options):
        found = torch.autograd.grad(attend().sum(), inputs)
    for within, without in zip(found, expected, strict=True):
        assert torch.equal(within, without)


@pool.on(2)
def test_gradients_of_gradients_are_an_error_in_the_ring():
    inputs = local_inputs()
    output = ring_attention(*inputs, process_group=pool.group())
    loss = output.square().sum()
    with pytest.raises(RuntimeError, match="use ulysses_attention"):
        torch.autograd.grad(loss, inputs, create_graph=True)


@pool.on(2)
def test_ulysses_has_gradients_of_gradients_of_its_attention():
    inputs = local_inputs()
    attend = partial(ulysses_attention, *inputs, process_group=pool.group())
    with sdpa_kernel(SDPBackend.MATH):
        (gradient, *_) = torch.autograd.grad(attend().square().sum(), inputs, create_graph=True)
        torch.autograd.grad(gradient.sum(), inputs)


@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_a_group_may_have_some_of_the_ranks(attention):
    group = dist.new_group([1, 2])
    *whole, grad = [randn((1, 4, 8, 2), seed=i) for i in range(4)]
    if pool.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not in process_group"):
            attention(*whole, process_group=group)
        return
    split = partial(cp.split_sequence, dim=2, process_group=group)
    leaves = [split(x).requires_grad_() for x in whole]
    output = attention(*leaves, causal=True, process_group=group)
    output.backward(split(grad))
    expected = one_device(*whole, grad, causal=True)
    found = [output, *(leaf.grad for leaf in leaves)]
    assert_all_equal(found, [split(x) for x in expected])


# ---- errors


BAD_INPUTS = {
    "heads that do not divide": lambda q, k, v: (q[:, :3], k, v),
    "another head size": lambda q, k, v: (q[..., :4], k, v),
    "fewer value heads": lambda q, k, v: (q, k, v[:, :1]),
    "another dtype": lambda q, k, v: (q, k, v.float()),
    "integers": lambda q, k, v: (q.long(), k.long(), v.long()),
    "a mask for causal": lambda q, k, v: (q, k, v, None),
}


@pytest.mark.parametrize("change", BAD_INPUTS)
@pool.on(2)
def test_inputs_that_do_not_fit_are_an_error(change):
    inputs = BAD_INPUTS[change](*local_inputs())
    with pytest.raises(ValueError, match="H a multiple of K"):
        ring_attention(*inputs, process_group=pool.group())
    with pytest.raises(ValueError, match="H a multiple of K"):
        ulysses_attention(*inputs, process_group=pool.group())


@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_options_of_one_rank_alone_are_an_error_on_all(attention):
    attend = partial(attention, *local_inputs(tokens=8), process_group=pool.group())
    is_second = pool.rank() == 1
    with pytest.raises(ValueError, match=r"rank 1 makes .*zigzag=False"):
        attend(zigzag=not is_second)
    with torch.set_grad_enabled(not is_second), pytest.raises(ValueError, match="with gradient"):
        attend()
    attend()  # the group works on


@pool.on(3)
def test_another_function_on_one_rank_is_an_error_on_all():
    attention = ring_attention if pool.rank() == 1 else ulysses_attention
    with pytest.raises(ValueError, match=r"rank 1 makes ring_.*rank 2 makes ulysses_"):
        attention(*local_inputs(tokens=12), process_group=pool.group())


@pool.on(2)
def test_a_sequence_to_join_that_differs_between_ranks_is_an_error():
    x = torch.ones(2, 2 + 2 * pool.rank())
    with pytest.raises(ValueError, match=r"rank 1 makes join_sequence\(\(2, 4\)"):
        cp.join_sequence(x, process_group=pool.group())


@pool.on(2)
def test_a_sequence_that_does_not_divide_is_an_error():
    group = pool.group()
    with pytest.raises(ValueError, match="of 6 does not divide into 4"):
        cp.split_sequence(torch.ones(2, 6), process_group=group)
    with pytest.raises(ValueError, match="of 5 does not divide into 2"):
        cp.positions(5, group, zigzag=False)
    with pytest.raises(ValueError, match="of 6 does not divide into 4"):
        cp.join_sequence(torch.ones(2, 3), process_group=group)
    odd = local_inputs(tokens=5)
    with pytest.raises(ValueError, match="of 10 does not divide into 4"):
        ring_attention(*odd, process_group=group)

"""context_parallel.py beyond its claims: the ideas, costs, overlap, groups, errors."""

import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
from claims.attention import (
    bytes_kept,
    dense_attention,
    each_alone,
    make_inputs,
    output_and_gradients,
)
from claims.context_parallel import mine, operations_of_the_kernel, whole_inputs
from shared import Watch, assert_equal, randn
from torch.utils.flop_counter import FlopCounterMode

import context_parallel as cp
from context_parallel import ring_attention, ulysses_attention

BOTH = [ring_attention, ulysses_attention]
H = 6  # heads of queries
K = 2  # heads of keys


def own_inputs(tokens=6, dtype=torch.float64):
    """This rank's q, k and v, in contiguous parts."""
    whole = whole_inputs(tokens, heads=H, shared=K)[:3]
    return [mine(x).to(dtype).requires_grad_() for x in whole]


def assert_all_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs, exact=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("idea", [cp.naive_ring_attention, cp.naive_ulysses_attention])
@pool.on(3)
def test_the_idea_is_attention_over_the_whole_sequence(idea, causal):
    whole = whole_inputs(6, heads=6, shared=3)
    options = {"causal": True} if causal else {}
    idea = partial(idea, process_group=pool.group(), **options)
    found = output_and_gradients(idea, *map(mine, whole))
    expected = output_and_gradients(dense_attention, *whole, causal=causal)
    assert_all_equal(found, map(mine, expected))


@pytest.mark.cpu
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_any_documents_are_computed_as_alone(attention, zigzag):
    how = {"process_group": pool.group(), "zigzag": zigzag}
    whole = whole_inputs(4, heads=6, shared=2)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        causal = seed % 2 == 0
        ids = torch.randint(2, (2, 12), generator=generator)
        if seed > 5:  # longer documents
            ids, _ = ids.sort(dim=1)
        attend = partial(
            attention,
            documents=ids,
            causal=causal,
            **how,
        )
        own = [mine(x, zigzag) for x in whole]
        found = output_and_gradients(attend, *own)
        whole_results = each_alone(ids, *whole, causal=causal)
        expected = [mine(x, zigzag) for x in whole_results]
        assert_all_equal(found, expected)


@pool.on(2)
def test_a_batch_of_documents_may_be_empty():
    q = torch.ones(0, 2, 4, 8)
    ids = torch.zeros(0, 8, dtype=torch.long)
    for attention in BOTH:
        output = attention(q, q, q, process_group=pool.group(), documents=ids)
        assert output.shape == q.shape


def operations_of(call):
    """Of attention's forward on all ranks."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {forward: operations_of_the_kernel}
    with FlopCounterMode(display=False, custom_mapping=mapping) as flops:
        call()
    operations = torch.tensor(flops.get_total_flops())
    dist.all_reduce(operations, group=pool.group())
    return operations.item()


@pytest.mark.cpu
@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_a_document_costs_its_own_square(attention):
    first = [1] * 9 + [0] * 8 + [1]
    second = [0] * 18
    ids = torch.tensor([first, second])
    inputs = own_inputs()
    how = {"process_group": pool.group(), "documents": ids}
    pairs = 9**2 + 8**2 + 1 + 18**2
    D = inputs[0].shape[3]
    assert operations_of(partial(attention, *inputs, **how)) == 4 * H * D * pairs


@pytest.mark.parametrize("attention", BOTH)
@pool.on(3)
def test_two_of_three_ranks_may_be_a_group(attention):
    group = dist.new_group([1, 2])
    whole = make_inputs(8, 8, shared=2)
    attend = partial(attention, causal=True, process_group=group)
    if pool.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not in process_group"):
            attend(*whole[:3])
        return
    part = partial(cp.split_sequence, dim=2, process_group=group)
    found = output_and_gradients(attend, *map(part, whole))
    expected = output_and_gradients(dense_attention, *whole, causal=True)
    assert_all_equal(found, map(part, expected))


@pool.on(2)
def test_gloo_sends_a_gpus_block_from_the_host():
    """Over gloo, send and recv of a GPU's memory are a bad address."""
    gpu = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
        assert cp.device_to_send_from(gpu, pool.group()) == torch.device("cpu")
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        assert cp.device_to_send_from(gpu, pool.group()) == gpu


@pytest.mark.cpu
@pool.on(2)
def test_a_block_goes_to_the_host_and_comes_back():
    """With two dtypes in place of two devices."""
    block = torch.full((3,), pool.rank(), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp, "device_to_send_from", lambda *_: torch.float32)
        exchange = cp.Exchange(block, pool.group())
    assert exchange.received.dtype == torch.float32
    exchange.device = torch.float64
    assert torch.equal(exchange.wait(), 1 - block)


@pool.on(2)
def test_a_scale_that_trains_is_an_error():
    """Its gradient would be missing. One without gradient is a number."""
    inputs = own_inputs()
    scale = torch.tensor(0.7, dtype=torch.float64)
    trained = torch.tensor(0.7, requires_grad=True)
    for attention in BOTH:
        attend = partial(attention, *inputs, process_group=pool.group())
        found = attend(scale=scale)
        expected = attend(scale=0.7)
        assert_equal(found, expected, exact=True)
        for wrong in (trained, torch.ones(4, 1, 1)):
            with pytest.raises(ValueError, match="scale is a number"):
                attend(scale=wrong)


@pytest.mark.parametrize("zigzag", [False, True])
@pool.on(1, 3)
def test_a_sequence_is_split_and_joined(zigzag):
    N = pool.world_size()
    how = {"process_group": pool.group(), "zigzag": zigzag}
    x = randn((2, 6 * N, 3))

    part = cp.split_sequence(x, **how).requires_grad_()
    whole = cp.join_sequence(part, **how)
    whole.backward(x * (pool.rank() + 1))

    own = cp.positions(6 * N, **how)
    of_all_ranks = N * (N + 1) // 2
    assert torch.equal(part, mine(x, zigzag, dim=1))
    assert torch.equal(part, x[:, own])
    assert torch.equal(whole, x)
    assert_equal(part.grad, of_all_ranks * part, exact=False)


# ---- costs


def bytes_sent(attention, inputs):
    """In forward, and in backward. The ranks must have agreed on this call."""
    with cp.SentBytes() as forward:
        output = attention(*inputs, process_group=pool.group())
    with cp.SentBytes() as backward:
        output.sum().backward()
    return forward.total, backward.total


@pytest.mark.cpu  # kernels for GPUs pad lse
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=str,
)
@pool.on(3)
def test_the_ring_sends_and_keeps_the_bytes_of_its_table(dtype):
    inputs = own_inputs(dtype=dtype)
    u = inputs[0].numel() // H
    lse = inputs[0][..., 0].numel()
    block = 2 * K * u * (pool.world_size() - 1)
    fp32 = 4  # bytes
    size = dtype.itemsize

    kept = bytes_kept(ring_attention, *inputs, process_group=pool.group())
    sent, sent_back = bytes_sent(ring_attention, inputs)

    tensors = (2 * H + 2 * K) * u
    assert kept == size * tensors + fp32 * lse
    assert sent == size * block
    assert sent_back == size * block + fp32 * block


@pool.on(3, 4)
def test_ulysses_sends_the_bytes_of_its_table_with_few_key_heads():
    N = pool.world_size()
    inputs = own_inputs()
    u = inputs[0].numel() // H
    padded_K = math.lcm(K, N)
    padded_H = math.ceil(H / padded_K) * padded_K
    float64 = 8  # bytes
    each_way = (2 * padded_H + 2 * padded_K) * u
    formula = float64 * each_way * (N - 1) / N

    ulysses_attention(*inputs, process_group=pool.group())
    sent, sent_back = bytes_sent(ulysses_attention, inputs)

    assert sent == sent_back == pytest.approx(formula)


@pytest.mark.cpu
@pool.on(3)
def test_the_next_block_travels_while_the_rank_computes_with_this_one():
    attend = partial(ring_attention, *own_inputs(), process_group=pool.group())
    attend()
    with Watch(lambda: None) as operators:
        attend().sum().backward()
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    letters = {"c10d::send": "s", kernel: "f", f"{kernel}_backward": "b"}
    order = [letters.get(name, "") for name, _ in operators.seen]
    assert "".join(order) == "sfsff" + "sbsbsbs"


# ---- errors


@pool.on(2)
def test_gradients_of_gradients_are_an_error():
    inputs = own_inputs()
    output = ring_attention(*inputs, process_group=pool.group())
    with pytest.raises(RuntimeError, match="use ulysses_attention"):
        torch.autograd.grad(output.sum(), inputs, create_graph=True)


@pool.on(2)
def test_inputs_that_do_not_fit_are_an_error():
    q, k, v = own_inputs()
    misfits = [
        [q[:, :3], k, v],  # heads that do not divide
        [q[..., :4], k, v],  # another head size
        [q, k, v.float()],
        [x.long() for x in (q, k, v)],
        [q, k, v, None],  # the fourth argument of PyTorch's function is a mask
    ]
    for inputs in misfits:
        with pytest.raises(ValueError, match="H a multiple of K"):
            ring_attention(*inputs, process_group=pool.group())


@pool.on(3)
def test_a_difference_between_ranks_is_an_error_on_all():
    group = pool.group()
    is_second = pool.rank() == 1
    inputs = own_inputs(tokens=8)
    refused = partial(pytest.raises, ValueError)
    with refused(match="zigzag=False"):
        ring_attention(*inputs, process_group=group, zigzag=is_second)
    with refused(match="with gradient"), torch.set_grad_enabled(is_second):
        ring_attention(*inputs, process_group=group)
    with refused(match="rank 1 has .*join_sequence"):
        cp.join_sequence(torch.ones(1 + is_second), 0, group)
    ring_attention(*inputs, process_group=group)  # the group works on


@pool.on(2)
def test_a_sequence_that_does_not_divide_is_an_error():
    group = pool.group()
    with pytest.raises(ValueError, match="of 5 does not divide into 2"):
        cp.positions(5, group, zigzag=False)
    odd = own_inputs(tokens=5)
    with pytest.raises(ValueError, match="of 10 does not divide into 4"):
        ring_attention(*odd, process_group=group)

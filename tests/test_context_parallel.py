"""context_parallel.py: what tests/claims leaves open: the table of costs, tiles, errors, and which group."""

import math
import re

import pool
import pytest
import torch
import torch.distributed as dist
from claims.context_parallel import mine, one_device, same_as_one_device, whole_inputs
from claims.registry import _problems
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT, fork
from shared import assert_equal, randn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import context_parallel as cp
from context_parallel import gathered_attention, ring_attention, ulysses_attention

ALL = pytest.mark.parametrize(
    "attention", [gathered_attention, ring_attention, ulysses_attention], ids=lambda f: f.__name__
)


def local_inputs(H=4, K=2, tokens=6, D=8, dtype=torch.float64):
    """This rank's q, k and v, which differ from other ranks'."""
    shapes = [(2, heads, tokens, D) for heads in (H, K, K)]
    inputs = [randn(shape, seed=10 * pool.rank() + i) for i, shape in enumerate(shapes)]
    return [x.to(dtype).requires_grad_() for x in inputs]


def padded(H, K, N):
    """-> H' and K' of the table of costs"""
    keys = math.lcm(K, N)
    return next(heads for heads in range(H, N * H * K) if heads % keys == 0), keys


# ---- the table of costs


def sent_by_formula(attention, H, K, u, itemsize, N):
    """-> bytes in forward and in backward"""
    if attention is gathered_attention:
        size = 2 * K * u * (N - 1) * itemsize
        return size + 2 * 8 * (N - 1), size
    if attention is ring_attention:
        size = 2 * K * u * (N - 1)
        return size * itemsize + 8 * (N - 1), size * (itemsize + max(4, itemsize))
    queries, keys = padded(H, K, N)
    size = (2 * queries + 2 * keys) * u * (N - 1) * itemsize / N
    return size + 8 * (N - 1), size


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "K"), [(4, 2), (6, 2), (12, 12)])
@pool.on(1, 2, 3, 4)
def test_bytes_sent_are_the_tables(attention, dtype, H, K):
    q, k, v = local_inputs(H, K, dtype=dtype)
    u = q.numel() // H
    with cp.SentBytes() as in_forward:
        output = attention(q, k, v, causal=True, process_group=pool.group())
    with cp.SentBytes() as in_backward:
        output.sum().backward()
    expected = sent_by_formula(attention, H, K, u, q.itemsize, pool.world_size())
    assert (in_forward.total, in_backward.total) == pytest.approx(expected, abs=1e-6)


def kept_by_formula(attention, H, K, u, D, itemsize, lse_itemsize, N):
    if attention is gathered_attention:
        return ((2 * H * N + H) * u + H * u * (u * N // (2 * D)) // D) * itemsize
    queries, keys = padded(H, K, N) if attention is ulysses_attention else (H, K)
    return (2 * queries + 2 * keys) * u * itemsize + queries * u // D * lse_itemsize


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "K"), [(6, 2), (12, 12)])
@pool.on(1, 2, 3, 4)
def test_bytes_kept_are_the_tables(attention, dtype, H, K):
    q, k, v = local_inputs(H, K, tokens=8, dtype=dtype)
    D = q.shape[-1]
    how = {}
    if attention is ulysses_attention:  # scaled_dot_product_attention may repeat heads of keys

        def how_local(q, k, v, causal, scale):
            alone = cp.Ring(causal, scale, pool.group(), zigzag=False)
            alone.rank, alone.world_size = 0, 1
            kv = torch.stack([k, v]).unsqueeze(3)
            grouped = q.unflatten(1, (k.shape[1], -1))
            return cp.RingAttention.apply(grouped, kv, alone).flatten(1, 2)

        how = {"attention": how_local}
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(q, k, v, process_group=pool.group(), **how)

    sizes = (H, K, q.numel() // H, D, q.itemsize, 4, pool.world_size())
    assert cp.held_bytes(saved) == kept_by_formula(attention, *sizes)


class Largest(TorchDispatchMode):
    """Notes the operators, and the largest tensor that one returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.append(func._schema.name)
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pool.on(1, 2, 3)
def test_in_pieces_the_result_is_the_same_and_no_scores_exist_as_a_whole(zigzag, causal):
    inputs = whole_inputs(40, heads=2, shared=1, size=2)
    expected = one_device(*inputs, causal)
    leaves = [mine(x, zigzag).clone().requires_grad_() for x in inputs[:3]]
    with pytest.MonkeyPatch.context() as patch, Largest() as seen:
        patch.setattr(cp, "PIECE", 3)
        output = ring_attention(*leaves, causal, process_group=pool.group(), zigzag=zigzag)
        output.backward(mine(inputs[3], zigzag))
    _problems.clear()
    found = [output.detach(), *(leaf.grad for leaf in leaves)]
    same_as_one_device(found, expected, zigzag)
    assert not _problems
    assert seen.elements <= max(2 * 2 * 40 * 3, 2 * leaves[0].numel())


@pool.on(3)
def test_the_next_block_is_on_its_way_while_this_one_is_computed_with():
    q, k, v = local_inputs()
    with Largest() as seen:
        ring_attention(q, k, v, process_group=pool.group(), zigzag=False).sum().backward()
    order = [name.split("::")[1] for name in seen.operators if name in ("c10d::send", "aten::bmm")]
    forward = ["send", "bmm", "bmm"] * 2 + ["bmm", "bmm"]
    backward = ["send"] + 5 * ["bmm"] + ["send"] + 5 * ["bmm"] + ["send"] + 5 * ["bmm"] + ["send"]
    assert order == forward + backward


# ---- tiles


@given(st.integers(1, 5), st.integers(0, 9), st.booleans(), st.booleans(), st.integers(1, 4))
def test_tiles_have_each_query_meet_each_key_that_it_may_see_once(N, size, causal, zigzag, piece):
    tokens = size * (1 + zigzag)
    whole = torch.arange(tokens * N)
    met = torch.zeros(tokens * N, tokens * N, dtype=torch.long)
    work = []
    for rank in range(N):
        ring = object.__new__(cp.Ring)
        vars(ring).update(rank=rank, world_size=N, causal=causal, zigzag=zigzag)
        own = cp.part_of(whole, 0, rank, N, zigzag)
        work.append(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cp, "PIECE", piece)
            for step in range(N):
                keys = cp.part_of(whole, 0, (rank - step) % N, N, zigzag)
                for rows, columns, is_diagonal in ring.tiles(step, tokens):
                    assert keys[columns[1]].numel() <= piece
                    pairs = torch.ones(own[rows[1]].numel(), keys[columns[1]].numel())
                    pairs = pairs.tril() if is_diagonal else pairs
                    met[own[rows[1]][:, None], keys[columns[1]]] += pairs.long()
                    work[-1] += pairs.numel()
    expected = torch.ones_like(met).tril() if causal else torch.ones_like(met)
    assert torch.equal(met, expected)
    assert not zigzag or len(set(work)) == 1


# ---- splitting and joining


@pytest.mark.parametrize("zigzag", [False, True])
@pool.on(1, 2, 3)
def test_a_sequence_is_split_and_joined(zigzag):
    N = pool.world_size()
    how = {"process_group": pool.group(), "zigzag": zigzag}
    x = randn((2, 6 * N, 3), seed=1)
    part = cp.split_sequence(x, **how).requires_grad_()
    assert torch.equal(part, mine(x, zigzag, dim=1))
    assert torch.equal(part, x[:, cp.positions(6 * N, **how)])

    whole = cp.join_sequence(part, **how)
    (whole * (pool.rank() + 1)).sum().backward()

    assert torch.equal(whole, x)
    assert torch.equal(part.grad, torch.full_like(part, N * (N + 1) / 2))  # of all ranks' losses


# ---- 16 bits


def body_errors_in_bf16():
    """-> the sums of squared errors of output and gradients, of all ranks"""
    whole = [x.bfloat16() for x in whole_inputs(256 // pool.world_size(), heads=4, shared=2)]
    exact = one_device(*(x.double() for x in whole), causal=True)
    leaves = [mine(x, True).clone().requires_grad_() for x in whole[:3]]
    output = ring_attention(*leaves, True, process_group=pool.group())
    output.backward(mine(whole[3], True))
    found = [output.detach(), *(leaf.grad for leaf in leaves)]
    errors = [
        (a.double() - mine(b, True)).square().sum() for a, b in zip(found, exact, strict=True)
    ]
    total = torch.stack(errors)
    dist.all_reduce(total, group=pool.group())
    return total.tolist()


def test_bf16_on_four_ranks_is_no_worse_than_on_one():
    on_one, on_four = (pool.run(N, body_errors_in_bf16)[0] for N in (1, 4))
    for one, four in zip(on_one, on_four, strict=True):
        assert 0 < four <= 1.25**2 * one


@pool.on(2)
def test_autocast_does_not_reach_inside():
    results = []
    for enabled in (False, True):
        q, k, v = local_inputs(dtype=torch.float32)
        with torch.autocast(q.device.type, torch.bfloat16, enabled=enabled):
            output = ring_attention(q, k, v, causal=True, process_group=pool.group())
            output.sum().backward()
        results.append([output, q.grad, k.grad, v.grad])
    for with_autocast, without in zip(*results, strict=True):
        assert torch.equal(with_autocast, without)


# ---- groups and errors


@ALL
@pool.on(3)
def test_in_a_group_whose_ranks_have_other_numbers_in_the_world(attention):
    group = dist.new_group([1, 2])
    inputs = [randn((1, 4, 8, 2), seed=i) for i in range(4)]
    expected = one_device(*inputs, causal=True)
    if pool.rank() == 0:
        with pytest.raises(ValueError, match=r"rank 0 is not in process_group"):
            attention(*inputs[:3], process_group=group)
        return
    leaves = [cp.split_sequence(x, 2, group).requires_grad_() for x in inputs[:3]]
    output = attention(*leaves, causal=True, process_group=group)
    output.backward(cp.split_sequence(inputs[3], 2, group))
    found = [output.detach(), *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, cp.split_sequence(theirs, 2, group), exact=False)


WRONG = {  # what is wrong: how, and words of the error
    "dimensions": (lambda q, k, v: (q[0], k, v), r"q \(4, 6, 8\) of torch.float64 with gradient"),
    "heads": (lambda q, k, v: (q[:, :3], k, v), r"must be \(B, H, S/N, D\).* H a multiple of K"),
    "batch": (lambda q, k, v: (q[:1], k, v), r"q \(1, 4, 6, 8\)"),
    "sizes": (lambda q, k, v: (q[..., :4], k, v), r"q \(2, 4, 6, 4\)"),
    "values": (lambda q, k, v: (q, k, v[:, :1]), r"v \(2, 1, 6, 8\)"),
    "dtypes": (lambda q, k, v: (q, k, v.float()), r"v \(2, 2, 6, 8\) of torch.float32"),
    "tokens": (lambda q, k, v: [x[:, :, 1:] for x in (q, k, v)], r"5 tokens are an odd number"),
}
OPTIONS = {
    "causal": ({"causal": True}, "rank 1 has .*causal=True"),
    "scale": ({"scale": 3.0}, "rank 1 has .*scale=3.0"),
    "zigzag": ({"zigzag": False}, "rank 1 has .*zigzag=False"),
}


@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention])
@pool.on(2, 3)
def test_wrong_inputs_are_an_error_on_all_ranks(attention):
    """Whether all ranks have them, or the second one alone; and the group works afterwards."""
    own = local_inputs()
    group = pool.group()
    expected = attention(*own, process_group=group)
    for change, words in WRONG.values():
        with pytest.raises(ValueError, match=words):
            attention(*change(*own), process_group=group)
        inputs = change(*own) if pool.rank() == 1 else own
        with pytest.raises(ValueError, match=r"all ranks must pass the same .*; rank 1 has"):
            attention(*inputs, process_group=group)
    for options, words in OPTIONS.values():
        with pytest.raises(ValueError, match=words):
            attention(*own, process_group=group, **(options if pool.rank() == 1 else {}))
    with torch.set_grad_enabled(pool.rank() != 1), pytest.raises(ValueError, match="with gradient"):
        attention(*own, process_group=group)
    assert torch.equal(attention(*own, process_group=group), expected)


@pool.on(2)
def test_what_does_not_divide_is_an_error_with_the_numbers():
    group = pool.group()
    words = "a sequence of 6 does not divide into 4 chunks (2 ranks, zigzag=True); pad it to a mult"
    with pytest.raises(ValueError, match=re.escape(words)):
        cp.split_sequence(torch.ones(2, 6), process_group=group)
    with pytest.raises(ValueError, match="a sequence of 5 does not divide into 2 chunks"):
        cp.positions(5, group, zigzag=False)
    with pytest.raises(ValueError, match="its 3 tokens are an odd number"):
        cp.join_sequence(torch.ones(2, 3), process_group=group)
    with pytest.raises(ValueError, match=r"rank 0 has \(2, 2\).*; rank 1 has \(2, 4\)"):
        cp.join_sequence(torch.ones(2, 2 + 2 * pool.rank()), process_group=group)


@pool.on(3)
def test_ulysses_calls_any_attention_with_the_whole_sequence_and_its_heads():
    calls = []

    def attention(q, k, v, causal, scale):
        calls.append((q.shape, k.shape, v.shape, causal, scale))
        return q

    q, k, v = local_inputs(H=8, K=2)
    output = ulysses_attention(q, k, v, True, 0.5, pool.group(), attention=attention)

    assert calls == [((2, 4, 18, 8), (2, 2, 18, 8), (2, 2, 18, 8), True, 0.5)]
    assert torch.equal(output, q)


def test_the_demo_refuses_three_ranks():
    done = fork(ROOT / "context_parallel.py", ranks=3)
    assert done.returncode == 2
    assert "64 tokens do not divide into 2 · 3 chunks; use 1, 2, 4" in done.stderr

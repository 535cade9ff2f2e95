"""context_parallel.py beyond its claims: the table of costs, tiles, errors, and groups."""

import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
from claims.context_parallel import mine, on_ranks, one_device, whole_inputs
from shared import assert_equal, randn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import amp
import context_parallel as cp
from context_parallel import gathered_attention, ring_attention, ulysses_attention

EACH = [gathered_attention, ring_attention, ulysses_attention]


def local_inputs(H=4, K=2, tokens=6, dtype=torch.float64):
    """This rank's q, k and v, with heads of 8. They differ from other ranks'."""
    shapes = [(2, heads, tokens, 8) for heads in (H, K, K)]
    inputs = [randn(shape, seed=10 * pool.rank() + i) for i, shape in enumerate(shapes)]
    return [x.to(dtype).requires_grad_() for x in inputs]


def output_and_kept(attention, inputs, **options):
    """Return the output, and the bytes that autograd keeps for backward."""
    saved = []
    keep = saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor)
    with keep:
        output = attention(*inputs, **options)
    return output, cp.held_bytes(saved)


def kept_beyond_the_table(H, K, queries, keys, dtype):
    """Return bytes. In torch 2.6, PyTorch's attention also keeps the scores on a CPU, if K < H."""
    q = local_inputs(H, K, queries, dtype)[0]
    _, k, v = local_inputs(H, K, keys, dtype)
    output, kept = output_and_kept(cp.local_attention, (q, k, v), causal=False, scale=None)
    return kept - cp.held_bytes((q, k, v, output)) - output.numel() // 8 * 4


def costs_by_formula(attention, H, K, u, dtype):
    """Return bytes sent in forward, sent in backward, kept for backward."""
    itemsize = dtype.itemsize
    N = pool.world_size()
    block = 2 * K * u * (N - 1)
    agreement = 8 * (N - 1)
    if attention is gathered_attention:
        kept = (2 * H + 2 * K * N) * u * itemsize + H * u // 8 * 4
        kept += kept_beyond_the_table(H, K, 6, 6 * N, dtype)
        return block * itemsize + 2 * agreement, block * itemsize, kept
    if attention is ring_attention:
        kept = (2 * H + 2 * K) * u * itemsize + H * u // 8 * 4
        return block * itemsize + agreement, block * (itemsize + max(4, itemsize)), kept
    K = math.lcm(K, N)
    H = math.ceil(H / K) * K
    size = (2 * H + 2 * K) * u * itemsize
    sent = size * (N - 1) / N
    kept = size + H * u // 8 * 4 + kept_beyond_the_table(H // N, K // N, 6 * N, 6 * N, dtype)
    return sent + agreement, sent, kept


@pytest.mark.cpu  # kernels for GPUs pad lse
@pytest.mark.parametrize("attention", EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "K"), [(6, 6), (6, 2), (4, 1)])
@pool.on(1, 2, 3, 4)
def test_bytes_sent_and_kept_are_the_tables(attention, dtype, H, K):
    inputs = local_inputs(H, K, dtype=dtype)
    with cp.SentBytes() as in_forward:
        output, kept = output_and_kept(attention, inputs, process_group=pool.group())
    with cp.SentBytes() as in_backward:
        output.sum().backward()
    expected = costs_by_formula(attention, H, K, output.numel() // H, dtype)
    costs = (in_forward.total, in_backward.total, kept)
    assert costs == pytest.approx(expected, abs=1e-6)


class Operators(TorchDispatchMode):
    """`calls`: the name of each operator, and the size of the tensor that it returned, or 0."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        size = result.numel() if torch.is_tensor(result) else 0
        self.calls.append((func._schema.name, size))
        return result


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pool.on(1, 2, 3)
def test_in_tiles_the_result_is_the_same_and_the_scores_do_not_exist_at_one_time(zigzag, causal):
    inputs = whole_inputs(40, heads=2, shared=1, size=2)
    how = {"causal": causal, "process_group": pool.group(), "zigzag": zigzag}
    with pytest.MonkeyPatch.context() as patch, Operators() as seen:
        patch.setattr(cp, "TILE", 3)
        found = on_ranks(partial(ring_attention, **how), *inputs, zigzag)
    for ours, theirs in zip(found, one_device(*inputs, causal), strict=True):
        assert_equal(ours, mine(theirs, zigzag), exact=False)
    largest = max(size for _, size in seen.calls)
    assert largest <= max(2 * 2 * 40 * 3, *(x.numel() for x in inputs))


@pool.on(3)
def test_the_next_block_is_on_its_way_while_the_rank_computes_with_this_one():
    inputs = local_inputs()
    with Operators() as seen:
        ring_attention(*inputs, process_group=pool.group(), zigzag=False).sum().backward()
    letters = {"c10d::send": "s", "aten::bmm": "b"}
    order = "".join(letters.get(name, "") for name, _ in seen.calls)
    assert order == "sbb" + "sbb" + "bb" + "sbbbbb" + "sbbbbbs" + "bbbbbs"


@pytest.mark.parametrize("zigzag", [False, True])
@pool.on(1, 2, 3)
def test_a_sequence_is_split_and_joined(zigzag):
    N = pool.world_size()
    how = {"process_group": pool.group(), "zigzag": zigzag}
    x = randn((2, 6 * N, 3), seed=1)
    part = cp.split_sequence(x, **how).requires_grad_()
    whole = cp.join_sequence(part, **how)
    (whole * (pool.rank() + 1)).sum().backward()
    assert torch.equal(part, mine(x, zigzag, dim=1))
    assert torch.equal(part, x[:, cp.positions(6 * N, **how)])
    assert torch.equal(whole, x)
    assert torch.equal(part.grad, torch.full_like(part, N * (N + 1) / 2))  # of all ranks' losses


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


@pool.on(2)
def test_a_gradient_of_a_gradient_is_an_error_and_its_advice_works():
    inputs = local_inputs()

    def gradients_of_gradients(attention):
        loss = attention(*inputs, process_group=pool.group()).square().sum()
        gradients = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), inputs)

    with pytest.raises(RuntimeError, match=r"are left out; use ulysses_.*sdpa_kernel\(.*MATH\)"):
        gradients_of_gradients(ring_attention)
    with sdpa_kernel(SDPBackend.MATH):
        found = gradients_of_gradients(ulysses_attention)
        expected = gradients_of_gradients(gathered_attention)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs, exact=False)


@pytest.mark.parametrize("attention", EACH)
@pool.on(3)
def test_in_a_group_whose_ranks_have_other_numbers_in_the_world(attention):
    group = dist.new_group([1, 2])
    inputs = [randn((1, 4, 8, 2), seed=i) for i in range(4)]
    if pool.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not in process_group"):
            attention(*inputs[:3], process_group=group)
        return
    leaves = [cp.split_sequence(x, 2, group).requires_grad_() for x in inputs[:3]]
    output = attention(*leaves, causal=True, process_group=group)
    output.backward(cp.split_sequence(inputs[3], 2, group))
    found = [output, *(leaf.grad for leaf in leaves)]
    for ours, theirs in zip(found, one_device(*inputs, causal=True), strict=True):
        assert_equal(ours, cp.split_sequence(theirs, 2, group), exact=False)


WRONG = [  # what is wrong, and words of the error
    (lambda q, k, v: (q[0], k, v), r"q \(4, 6, 8\) of torch.float64 with gradient"),
    (lambda q, k, v: (q[:, :3], k, v), r"must be \(B, H, S/N, D\).* H a multiple of K"),
    (lambda q, k, v: (q[..., :4], k, v), r"q \(2, 4, 6, 4\)"),
    (lambda q, k, v: (q, k, v[:, :1]), r"v \(2, 1, 6, 8\)"),
    (lambda q, k, v: (q, k, v.float()), r"v \(2, 2, 6, 8\) of torch.float32"),
    (lambda q, k, v: [x[:, :, 1:] for x in (q, k, v)], "its 5 tokens are an odd number"),
]


@pytest.mark.parametrize("attention", EACH)
@pool.on(2, 3)
def test_wrong_inputs_are_an_error_on_all_ranks(attention):
    """Whether all ranks have them, or the second one alone. The group works afterwards."""
    own = local_inputs()
    is_second = pool.rank() == 1
    attend = partial(attention, process_group=pool.group())
    expected = attend(*own)
    for change, words in WRONG:
        with pytest.raises(ValueError, match=words):
            attend(*change(*own))
        with pytest.raises(ValueError, match=r"must make the same call, .*; rank 1 makes"):
            attend(*(change(*own) if is_second else own))
    with pytest.raises(ValueError, match="causal must be True or False"):
        attend(*own, None)  # as in F.scaled_dot_product_attention(q, k, v, None)
    for option, value in {"causal": True, "scale": 3.0, "zigzag": False}.items():
        with pytest.raises(ValueError, match=f"rank 1 makes .*{option}={value}"):
            attend(*own, **({option: value} if is_second else {}))
    with torch.set_grad_enabled(not is_second), pytest.raises(ValueError, match="with gradient"):
        attend(*own)
    assert torch.equal(attend(*own), expected)


@pool.on(3)
def test_another_function_on_one_rank_is_an_error_on_all_ranks():
    attention = EACH[pool.rank()]
    with pytest.raises(ValueError, match=r"rank 1 makes ring_.*rank 2 makes ulysses_"):
        attention(*local_inputs(), process_group=pool.group())


@pool.on(2)
def test_what_does_not_divide_is_an_error_with_the_numbers():
    group = pool.group()
    with pytest.raises(ValueError, match="of 6 does not divide into 4 chunks"):
        cp.split_sequence(torch.ones(2, 6), process_group=group)
    with pytest.raises(ValueError, match="of 5 does not divide into 2 chunks"):
        cp.positions(5, group, zigzag=False)
    with pytest.raises(ValueError, match="its 3 tokens are an odd number"):
        cp.join_sequence(torch.ones(2, 3), process_group=group)
    with pytest.raises(ValueError, match=r"0 makes join_sequence\(\(2, 2\).*; rank 1 .*\(2, 4\)"):
        cp.join_sequence(torch.ones(2, 2 + 2 * pool.rank()), process_group=group)

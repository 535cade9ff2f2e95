"""flash_attention.py: by blocks of any size what dense attention is, at a memory that grows as s.

What any attention must do is claimed in claims.py (attention); here is what only ours offers, and what it costs.
"""

import functools

import claims
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import assert_equal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_attention as flash
from flash_attention import flash_attention, flash_backward, flash_forward, merge, naive_attention


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make(B=2, H=2, heads=2, S=7, Skv=7, size=4, v_size=None, dtype=torch.float64, seed=0):
    """q, k, v, and a gradient of the output."""
    shapes = (B, H, S, size), (B, heads, Skv, size), (B, heads, Skv, v_size or size), (B, H, S, v_size or size)
    generator = seeded(seed)
    x = [torch.randn(B, S, H, size, dtype=dtype, generator=generator) for B, H, S, size in shapes]
    return [y.transpose(1, 2) for y in x]  # strided, as a projection's output is in a model


def output_and_gradients(attention, q, k, v, gradient):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def assert_all_equal(ours, theirs, exact=False):
    for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert_equal(a, b, exact, name)


@given(
    st.integers(0, 2),
    st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1)]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([(1, 1), (4, 4), (3, 5)]),
    st.integers(1, 50),
    st.booleans(),
    st.sampled_from([None, 0.3, -2.0]),
)
def test_dense_attention_of_any_sizes_in_blocks_of_any(B, heads, S, Skv, sizes, block_size, causal, scale):
    """Sizes that no block divides, more queries than keys, one of either, none; shared heads; strided tensors."""
    tensors = make(B, *heads, S, Skv, *sizes, seed=S)
    ours = functools.partial(flash_attention, causal=causal, scale=scale, block_size=block_size)
    dense = functools.partial(naive_attention, causal=causal, scale=scale)
    assert_all_equal(output_and_gradients(ours, *tensors), output_and_gradients(dense, *tensors))


@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_attention_and_the_naive_form(causal):
    tensors = make(H=6, S=200, Skv=200, size=16)
    theirs = functools.partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    expected = output_and_gradients(theirs, *tensors)
    for ours in (functools.partial(flash_attention, block_size=64), naive_attention):
        assert_all_equal(output_and_gradients(functools.partial(ours, causal=causal), *tensors), expected)


def test_the_idea():
    q, k, v, _ = make(S=5, Skv=9)
    assert_equal(flash.online_attention(q, k, v, block_size=4), naive_attention(q, k, v), exact=False)


@pytest.mark.parametrize(("S", "Skv", "causal"), [(6, 6, True), (6, 4, True), (3, 5, False)])
def test_gradcheck_with_dropout(S, Skv, causal):
    q, k, v, _ = make(B=1, H=2, heads=1, S=S, Skv=Skv, size=3)

    def attention(q, k, v):
        torch.manual_seed(5)
        return flash_attention(q, k, v, causal, dropout_p=0.3, block_size=4)

    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in (q, k, v)])


# ---- dropout


def mask_of(seed, p, B, H, S, Skv):
    ones = torch.ones(B * H, S, Skv, dtype=torch.float64)
    return flash.dropped(ones, p, torch.tensor(seed), slice(0, S), slice(0, Skv), S, Skv).view(B, H, S, Skv)


@pytest.mark.parametrize("block_size", [1, 3, 128])
def test_the_mask_is_the_same_in_backward_and_for_any_block_size(block_size):
    tensors, seed = make(H=4, heads=4, S=8, Skv=11), torch.randint(-(2**63), 2**63 - 1, (), generator=seeded(3))
    mask = mask_of(seed.item(), 0.4, 2, 4, 8, 11) / 0.6
    expected = output_and_gradients(lambda q, k, v: (claims.dense_weights(q, k, True) * mask) @ v, *tensors)
    torch.manual_seed(3)
    attention = functools.partial(flash_attention, causal=True, dropout_p=0.4, block_size=block_size)
    assert_all_equal(output_and_gradients(attention, *tensors), expected)


def test_masks_are_those_of_the_default_generator_and_nothing_is_drawn_without_dropout():
    q, k, v, _ = make(S=20, Skv=20)
    torch.manual_seed(1)
    first, _, second = (flash_attention(q, k, v, dropout_p=p) for p in (0.5, 0.0, 0.5))
    torch.manual_seed(1)
    again = [flash_attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert torch.equal(torch.stack(again), torch.stack([first, second]))
    assert not torch.equal(first, second)


def splitmix64(seed, n):
    """By the paper, in Python's integers; position n."""
    z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345, -(2**63)])
def test_the_random_numbers_are_splitmix64s(seed):
    for p in (0.001, 0.3, 0.9):
        drawn = torch.tensor([float((splitmix64(seed, n) + 2**63) % 2**64 >= p * 2**64) for n in range(2 * 9 * 7)])
        assert torch.equal(mask_of(seed, p, 1, 2, 9, 7).flatten(), drawn.double())


# ---- parts of the keys


@pytest.mark.parametrize(("S", "cut", "causal"), [(9, 5, False), (9, 10, False), (4, 6, True), (12, 0, True)])
def test_parts_of_the_keys_merge_into_the_whole_and_have_their_gradients(S, cut, causal):
    """Of 10 keys the first `cut`, which all queries see, and the others, aligned at the end."""
    q, k, v, gradient = make(S=S, Skv=10)
    whole = flash_forward(q, k, v, causal)
    parts = [(k[:, :, :cut], v[:, :, :cut], False), (k[:, :, cut:], v[:, :, cut:], causal)]
    merged = merge(*flash_forward(q, *parts[0]), *flash_forward(q, *parts[1]))
    first, second = (flash_backward(gradient, q, k, v, *merged, causal) for k, v, causal in parts)
    ours = [*merged, first[0] + second[0], *(torch.cat(pair, 2) for pair in zip(first[1:], second[1:], strict=True))]
    for a, b in zip(ours, [*whole, *flash_backward(gradient, q, k, v, *whole, causal)], strict=True):
        assert_equal(a, b, exact=False)


# ---- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_worse_than_pytorchs(dtype):
    """Errors against float64, of the same rounded inputs; log-sum-exp stays in fp32."""
    tensors = [x.to(dtype) for x in make(S=500, Skv=500, size=32, dtype=torch.float32)]
    exact = output_and_gradients(functools.partial(naive_attention, causal=True), *(x.double() for x in tensors))
    ours = output_and_gradients(functools.partial(flash_attention, causal=True), *tensors)
    theirs = output_and_gradients(functools.partial(F.scaled_dot_product_attention, is_causal=True), *tensors)
    for a, b, plain in zip(ours, theirs, exact, strict=True):
        assert a.dtype == dtype
        mine, pytorchs = ((x.double() - plain).norm() / plain.norm() for x in (a, b))
        assert mine <= 1.01 * pytorchs
        assert mine < torch.finfo(dtype).eps
    assert flash_forward(*tensors[:3])[1].dtype == torch.float32


def test_autocast_does_not_reach_inside():
    tensors = make(S=40, Skv=40, dtype=torch.float32)
    expected = output_and_gradients(flash_attention, *tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert_all_equal(output_and_gradients(flash_attention, *tensors), expected, exact=True)


# ---- what it costs


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        self.elements = max(self.elements, *(x.untyped_storage().nbytes() // x.itemsize for x in tensors), 0)
        return result


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_no_tensor_of_queries_times_keys_is_ever_made(dropout_p):
    tensors = make(B=1, H=2, S=512, Skv=512, size=8)
    with Largest() as seen:
        output_and_gradients(functools.partial(flash_attention, dropout_p=dropout_p, block_size=64), *tensors)
    assert seen.elements == max(2 * 64 * 64, 2 * 512 * 8)  # a block of both heads, or q


def test_backward_keeps_q_k_v_output_and_a_number_for_each_query():
    tensors, saved = make(H=4, heads=2, S=100, Skv=60), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash_attention(*(x.requires_grad_() for x in tensors[:3]), dropout_p=0.5)
    assert sum(x.numel() for x in saved) == sum(x.numel() for x in tensors) + 2 * 4 * 100


@pytest.mark.parametrize(("blocks", "share"), [(1, 1.0), (4, 5 / 8), (16, 17 / 32)])
def test_operations_are_4s2d_and_10s2d_and_half_of_it_where_causal(blocks, share):
    s, d, B, H = 64, 8, 2, 3
    for causal in (False, True):
        leaves = [x.requires_grad_() for x in make(B, H, H, s, s, d)[:3]]
        with FlopCounterMode(display=False) as forward:
            output = flash_attention(*leaves, causal, block_size=s // blocks)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        expected = B * H * s * s * d * (share if causal else 1)
        assert (forward.get_total_flops(), backward.get_total_flops()) == (4 * expected, 10 * expected)


# ---- in a model


def test_a_checkpointed_layer_draws_its_mask_again():
    tensors = make(S=20, Skv=20)
    attention = functools.partial(flash_attention, dropout_p=0.5)
    results = []
    for run in (attention, lambda *qkv: checkpoint(attention, *qkv, use_reentrant=False)):
        torch.manual_seed(2)
        results.append(output_and_gradients(run, *tensors))
    assert_all_equal(*results, exact=True)


ones = torch.ones
WRONG = [
    ({"q": ones(2, 3, 7, 4)}, "3 heads of queries are no multiple of 2 heads of keys"),
    ({"q": ones(2, 2, 7, 5)}, r"q \(2, 2, 7, 5\), k \(2, 2, 7, 4\)"),
    ({"q": ones(1, 2, 7, 4)}, r"q \(1, 2, 7, 4\), k \(2, 2, 7, 4\)"),
    ({"v": ones(2, 2, 6, 4)}, r"k \(2, 2, 7, 4\), v \(2, 2, 6, 4\)"),
    ({"q": ones(2, 7, 4)}, r"q \(2, 7, 4\).* must be \(B, H, S, D\)"),
    ({"v": ones(2, 2, 7, 4).double()}, r"q torch.float32, k torch.float32, v torch.float64"),
    ({"dropout_p": 1.0}, r"dropout_p=1.0.* in \[0, 1\)"),
    ({"dropout_p": -0.1}, r"dropout_p=-0.1.* in \[0, 1\)"),
    ({"block_size": 0}, "block_size=0.* at least 1"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_does_not_fit_is_an_error_with_the_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(**{**dict.fromkeys("qkv", ones(2, 2, 7, 4)), **wrong})

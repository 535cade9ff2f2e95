"""flash_attention.py: what tests/claims leaves open: blocks of any size, what only ours offers, and what it costs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from claims.attention import dense_weights
from hypothesis import example, given
from hypothesis import strategies as st
from shared import assert_equal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import flash_attention as flash


def qkv_and_gradient(B=2, H=2, heads=2, S=7, Skv=7, size=4, v_size=None, dtype=torch.float64):
    shapes = (
        (B, H, S, size),
        (B, heads, Skv, size),
        (B, heads, Skv, v_size or size),
        (B, H, S, v_size or size),
    )
    generator = torch.Generator().manual_seed(S)
    x = [torch.randn(B, S, H, size, dtype=dtype, generator=generator) for B, H, S, size in shapes]
    return [y.transpose(1, 2) for y in x]  # strided, as a projection's output is in a model


def output_and_gradients(attention, q, k, v, gradient):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def assert_all_equal(ours, theirs, exact=False):
    for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert_equal(a, b, exact, name)


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        self.elements = max(
            self.elements, *(x.untyped_storage().nbytes() // x.itemsize for x in tensors), 0
        )
        return result


def splitmix64(seed, n):  # its n-th number, by the paper, in Python's integers
    z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1)]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([(1, 1), (4, 4), (3, 5)]),
    st.integers(1, 50),
    st.booleans(),
    st.sampled_from([None, 0.3, -2.0]),
    st.sampled_from([0.0, 0.0, 0.001, 0.3, 0.9]),
)
@example(0, (2, 2), 9, 4, (4, 4), 5, True, None, 0.3)
@example(2, (6, 2), 26, 33, (3, 5), 7, True, 0.3, 0.3)
def test_dense_attention_of_any_sizes_in_blocks_of_any(
    B, heads, S, Skv, sizes, block_size, causal, scale, p
):
    """Sizes that no block divides, none, more queries than keys; strided. Dropped is what SplitMix64 says, from one
    number of the default generator. No tensor of queries times keys is made; kept are q, k, v, output and a number a
    query; 4d + 10d operations are for each query and each key up to the last that the last query of its block sees."""
    tensors, mask, saved = qkv_and_gradient(B, *heads, S, Skv, *sizes), 1.0, []
    torch.manual_seed(S)
    if p:
        seed = torch.randint(-(2**63), 2**63 - 1, ()).item()
        drawn = [
            float((splitmix64(seed, n) + 2**63) % 2**64 >= p * 2**64)
            for n in range(B * heads[0] * S * Skv)
        ]
        mask = torch.tensor(drawn, dtype=torch.float64).view(B, heads[0], S, Skv) / (1 - p)
    next_random_numbers = torch.rand(3)

    def dense(q, k, v):
        k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
        return (dense_weights(q, k, causal, scale) * mask) @ v

    expected = output_and_gradients(dense, *tensors)
    if not p:
        naive = functools.partial(flash.naive_attention, causal=causal, scale=scale)
        assert_all_equal(output_and_gradients(naive, *tensors), expected)
    ours = functools.partial(
        flash.flash_attention, causal=causal, scale=scale, dropout_p=p, block_size=block_size
    )
    torch.manual_seed(S)
    save = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with save, Largest() as seen, FlopCounterMode(display=False) as flops:
        found = output_and_gradients(ours, *tensors)
    assert_all_equal(found, expected)
    assert torch.equal(torch.rand(3), next_random_numbers)
    block = max(B, 1) * heads[0] * min(block_size, S) * min(block_size, Skv)
    assert seen.elements <= max(block, 1, *(x.numel() for x in tensors))
    assert sum(x.numel() for x in saved) == sum(x.numel() for x in tensors) + B * heads[0] * S
    ends = [
        (start, min(start + block_size, S))
        for start in range(max(0, S - Skv) if causal else 0, S, block_size)
    ]
    pairs = sum((end - start) * (Skv - S + end if causal else Skv) for start, end in ends)
    assert flops.get_total_flops() == B * heads[0] * pairs * (8 * sizes[0] + 6 * sizes[1])


def test_the_idea():
    q, k, v, _ = qkv_and_gradient(S=5, Skv=9)
    assert_equal(
        flash.online_attention(q, k, v, block_size=4), flash.naive_attention(q, k, v), exact=False
    )


@pytest.mark.parametrize(
    ("S", "cut", "causal"), [(9, 5, False), (9, 10, False), (4, 6, True), (12, 0, True)]
)
def test_parts_of_the_keys_merge_into_the_whole_and_have_their_gradients(S, cut, causal):
    """Of 10 keys the first `cut`, which all queries see, and the others, aligned at the end."""
    q, k, v, gradient = qkv_and_gradient(S=S, Skv=10)
    whole = flash.flash_forward(q, k, v, causal)
    parts = [(k[:, :, :cut], v[:, :, :cut], False), (k[:, :, cut:], v[:, :, cut:], causal)]
    merged = flash.merge(*flash.flash_forward(q, *parts[0]), *flash.flash_forward(q, *parts[1]))
    first, second = (
        flash.flash_backward(gradient, q, k, v, *merged, causal) for k, v, causal in parts
    )
    ours = [
        *merged,
        first[0] + second[0],
        *(torch.cat(pair, 2) for pair in zip(first[1:], second[1:], strict=True)),
    ]
    expected = [*whole, *flash.flash_backward(gradient, q, k, v, *whole, causal)]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_worse_than_pytorchs(dtype):
    """Errors against float64, of the same rounded inputs; log-sum-exp stays in fp32."""
    tensors = [x.to(dtype) for x in qkv_and_gradient(S=500, Skv=500, size=32, dtype=torch.float32)]
    exact = output_and_gradients(
        functools.partial(flash.naive_attention, causal=True), *(x.double() for x in tensors)
    )
    ours = output_and_gradients(functools.partial(flash.flash_attention, causal=True), *tensors)
    theirs = output_and_gradients(
        functools.partial(F.scaled_dot_product_attention, is_causal=True), *tensors
    )
    for a, b, plain in zip(ours, theirs, exact, strict=True):
        assert a.dtype == dtype
        mine, pytorchs = ((x.double() - plain).norm() / plain.norm() for x in (a, b))
        assert mine <= min(1.01 * pytorchs, torch.finfo(dtype).eps)
    assert flash.flash_forward(*tensors[:3])[1].dtype == torch.float32


def test_autocast_does_not_reach_inside_and_a_checkpoint_draws_the_mask_again():
    attention, results = functools.partial(flash.flash_attention, dropout_p=0.5), []
    for run in (
        attention,
        functools.partial(torch.utils.checkpoint.checkpoint, attention, use_reentrant=False),
    ):
        for autocast in (False, True):
            torch.manual_seed(2)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results.append(
                    output_and_gradients(run, *qkv_and_gradient(S=40, Skv=40, dtype=torch.float32))
                )
            assert_all_equal(results[-1], results[0], exact=True)


WRONG = [
    ({"q": torch.ones(2, 3, 7, 4)}, "3 heads of queries are no multiple of 2 heads of keys"),
    ({"q": torch.ones(2, 2, 7, 5)}, r"q \(2, 2, 7, 5\), k \(2, 2, 7, 4\)"),
    ({"q": torch.ones(1, 2, 7, 4)}, r"q \(1, 2, 7, 4\), k \(2, 2, 7, 4\)"),
    ({"v": torch.ones(2, 2, 6, 4)}, r"k \(2, 2, 7, 4\), v \(2, 2, 6, 4\)"),
    ({"q": torch.ones(2, 7, 4)}, r"q \(2, 7, 4\).* must be \(B, H, S, D\)"),
    ({"v": torch.ones(2, 2, 7, 4).double()}, r"q torch.float32, k torch.float32, v torch.float64"),
    ({"dropout_p": 1.0}, r"dropout_p=1.0.* in \[0, 1\)"),
    ({"dropout_p": -0.1}, r"dropout_p=-0.1.* in \[0, 1\)"),
    ({"block_size": 0}, "block_size=0.* at least 1"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_does_not_fit_is_an_error_with_the_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        flash.flash_attention(**{**dict.fromkeys("qkv", torch.ones(2, 2, 7, 4)), **wrong})

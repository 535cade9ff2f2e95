"""An implementation of --attention is called as function(q, k, v, causal=True), or with is_causal=True.

q is (batch, heads, queries, head size); k and v are (batch, heads or fewer, keys, head size); the output
has q's shape. Claims about them also pass scale= and dropout_p=. enable_gqa= is passed if it has such a
name and heads differ.
"""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from claims.registry import (
    add_kind,
    call,
    check,
    claim,
    names_of,
    same,
    say,
)


def attend(implementation, q, k, v, causal=False, **options):
    """The output, (batch, heads, queries, head size)."""
    if implementation is F.scaled_dot_product_attention:  # a builtin, which has no signature
        return implementation(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], **options
        )
    if causal:
        options["causal" if "causal" in names_of(implementation) else "is_causal"] = True
    return call(implementation, q, k, v, needed=options, enable_gqa=q.shape[1] != k.shape[1])


add_kind(
    "attention",
    called=__doc__,
    make=attend,
    ours="flash_attention:flash_attention",
    pytorchs="torch.nn.functional:scaled_dot_product_attention",
)


def queries_and_keys(S, Skv, heads=2, shared=2, size=8):
    shapes = (2, heads, S, size), (2, shared, Skv, size), (2, shared, Skv, size)
    generator = torch.Generator().manual_seed(S * Skv)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in shapes
    ]


def dense_weights(q, k, causal=False, scale=None):
    """softmax, zero where all is hidden: the last query sees all keys, the one before it all but the last."""
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    row, col = (
        torch.arange(q.shape[-2])[:, None] - q.shape[-2],
        torch.arange(k.shape[-2]) - k.shape[-2],
    )
    hidden = (col > row) & causal
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)


def gradients_equal(output, expected, q, k, v):
    same(output, expected, f"output for {q.shape[2]} queries and {k.shape[2]} keys")
    weight = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    ours, theirs = (torch.autograd.grad(x, (q, k, v), weight) for x in (output, expected))
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        same(a, b, f"gradient of {name}, for {q.shape[2]} queries and {k.shape[2]} keys")


def attends_as_dense(make, sizes, heads=2, shared=2, slopes=(0,), causal=False, **options):
    """With scores that differ by about `slope` from the first key to the last."""
    for (S, Skv), slope in itertools.product(sizes, slopes):
        q, k, v = queries_and_keys(S, Skv, heads, shared)
        k.data += torch.linspace(0, slope, Skv, dtype=torch.float64)[:, None]
        each_k, each_v = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
        weights = dense_weights(q, each_k, causal, **options)
        gradients_equal(make(q, k, v, causal, **options), weights @ each_v, q, k, v)


attention = partial(say, worlds=[1], kinds="attention", check=attends_as_dense)
sentence = "Output and gradients are those of dense attention, of any numbers of queries and keys."
attention("as_dense", sentence, sizes=[(1, 1), (7, 7), (300, 300), (5, 201), (201, 5)])
attention(
    "causal",
    "Causal, a query sees the keys up to its own.",
    sizes=[(1, 1), (7, 7), (300, 300)],
    causal=True,
)
sentence = (
    "Causal, with more keys than queries, as with a cache of keys, the last query sees all of them."
)
attention("causal_at_the_end", sentence, sizes=[(1, 7), (70, 201)], causal=True)
sentence = "Causal, with fewer keys than queries, the first queries see none: zero, and so are their gradients."
attention("sees_nothing", sentence, sizes=[(7, 1), (201, 70)], causal=True)
sentence = "Query heads 0 to G-1 share the first head of keys and values, and so on; their gradients add up there."
attention("shared_heads", sentence, sizes=[(70, 70)], heads=6, shared=2, causal=True)
attention(
    "one_shared_head",
    "All query heads may share one.",
    sizes=[(70, 70)],
    heads=6,
    shared=1,
    causal=True,
)
attention(
    "scale", "The scale is the one that is given, instead of 1/√D.", sizes=[(70, 70)], scale=0.7
)
sentence = (
    "Scores of thousands, whose exponentials no float has, are no matter, wherever the largest is."
)
attention("large_scores", sentence, sizes=[(3, 300)], slopes=(1000, -1000))


@claim("attention", 1)
def dropout(make):
    """Each weight is dropped with the probability asked for, the others grow as much; backward has forward's mask."""
    q, k, v = queries_and_keys(60, 32, size=32)
    torch.manual_seed(3)  # with v = 1 the output is the weights, and so tells the mask of this seed
    mask = make(
        q, k, torch.eye(32, dtype=torch.float64).expand_as(v), dropout_p=0.25
    ) / dense_weights(q, k)
    mask = (mask > 0.5).double() / 0.75
    share = (mask == 0).double().mean().item()  # of 7,680: a standard deviation is 0.005
    check(abs(share - 0.25) < 0.025, f"{share:.1%} are dropped, not 25%")
    torch.manual_seed(3)
    gradients_equal(make(q, k, v, dropout_p=0.25), (dense_weights(q, k) * mask) @ v, q, k, v)


@claim("attention", 1)
def no_matrix_is_kept(make):
    """What is kept for backward grows as the queries and keys, not as their product."""
    q, k, v = queries_and_keys(600, 600)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        make(q, k, v, causal=True)
    kept = (
        sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}.values())
        // 8
    )
    check(
        0 < kept < 600 * 600,
        f"{kept} elements are kept, where {4 * 600 * 600} are scores and {4 * 600 * 8} are q",
    )

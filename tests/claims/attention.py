"""An implementation of --attention is called as function(q, k, v, causal=True).

Or with is_causal=True, if it has that name. q is (batch, heads, queries, head size). k and v are
(batch, heads or fewer, keys, head size). The output has the shape of q. The head size is 64 and
the numbers of queries and keys are multiples of 64, but for the claim about any length. The claims
about them also pass scale= and dropout_p=. If k has fewer heads than q, enable_gqa=True is passed
if the function has such a name. A function that computes in float32 is right to 1e-5.
"""

import itertools

import torch
import torch.nn.functional as F
from shared import randn
from torch.autograd.graph import saved_tensors_hooks

from claims.registry import (
    add_kind,
    call,
    check,
    claim,
    names_of,
    precision,
    same,
    say,
    say_in_float64,
)


def attend(implementation, q, k, v, causal=False, **options):
    fewer_heads = q.shape[1] != k.shape[1]
    if implementation is F.scaled_dot_product_attention:  # a builtin, which has no signature
        return implementation(q, k, v, is_causal=causal, enable_gqa=fewer_heads, **options)
    if causal:
        name = "causal" if "causal" in names_of(implementation) else "is_causal"
        options[name] = True
    return call(implementation, q, k, v, needed=options, enable_gqa=fewer_heads)


add_kind(
    "attention",
    called=__doc__,
    make=attend,
    ours="flash_attention:flash_attention",
    pytorchs="torch.nn.functional:scaled_dot_product_attention",
)


def queries_and_keys(S, Skv, batch=2, heads=2, shared=2, size=8, size_v=None):
    """Return q, k, v with `heads` heads of S queries and `shared` heads of Skv keys."""
    shapes = [(heads, S, size), (shared, Skv, size), (shared, Skv, size_v or size)]
    seeds = itertools.count(S * Skv)
    numbers = [randn((batch, *shape), next(seeds)) for shape in shapes]
    dtype = precision()
    return [each.to(dtype).requires_grad_() for each in numbers]


def dense_weights(q, k, causal=False, scale=None):
    """The softmax, zero if all keys are hidden. The last query sees all keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
    scores = q @ k.mT * scale
    offset = k.shape[2] - q.shape[2]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + offset) & causal
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights.masked_fill(hidden, 0.0)


def dense_attention(q, k, v, causal=False, scale=None):
    weights = dense_weights(q, k, causal, scale)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def same_with_gradients(output, expected, q, k, v, coarser=1):
    sizes = f"for {q.shape[2]} queries and {k.shape[2]} keys"
    same(output, expected, f"output {sizes}", coarser=coarser)
    grad = randn(expected.shape, seed=9).to(expected.dtype)
    leaves = (q, k, v)
    gradients = torch.autograd.grad(expected, leaves, grad)
    output.backward(grad)  # a checkpoint inside may refuse torch.autograd.grad
    for name, leaf, gradient in zip("qkv", leaves, gradients, strict=True):
        same(leaf.grad, gradient, f"gradient of {name} {sizes}", coarser=coarser)


EVEN = [(64, 64), (192, 128), (64, 192)]  # queries, keys
SQUARE = [(64, 64), (192, 192)]


def attends_as_dense(
    make, sizes=SQUARE, heads=2, shared=2, size=64, slope=0, causal=False, **options
):
    """Scores differ by about `slope` from the first key to the last."""
    for S, Skv in sizes:
        q, k, v = queries_and_keys(S, Skv, heads=heads, shared=shared, size=size)
        k.data += torch.linspace(0, slope, Skv, dtype=k.dtype)[:, None]
        expected = dense_attention(q, k, v, causal, **options)
        output = make(q, k, v, causal, **options)
        # In float32, a score of a thousand has a rounding error of 1e-4.
        same_with_gradients(output, expected, q, k, v, coarser=100 if slope else 1)


def attention(name, sentence, **how):
    say(name, sentence, [1], "attention", attends_as_dense, **how)


attention(
    "as_dense",
    "Output and gradients are those of dense attention, also with more or fewer keys than queries.",
    sizes=EVEN,
)
say_in_float64("attention", "as_dense")
attention(
    "causal",
    "With a causal mask, a query sees the keys up to its own.",
    causal=True,
)
attention(
    "causal_at_the_end",
    "With a causal mask and more keys than queries, the last query sees all keys.",
    sizes=[(64, 192)],
    causal=True,
    about="property",
)
attention(
    "sees_nothing",
    "With a causal mask and fewer keys than queries, the first queries see no key: zero, not NaN.",
    sizes=[(192, 64)],
    causal=True,
    about="property",
)
attention(
    "shared_heads",
    "Consecutive heads of queries share a head of keys and values. Their gradients add up there.",
    heads=6,
    shared=2,
    causal=True,
    may_refuse=True,
)
attention(
    "one_shared_head",
    "All heads of queries may share one head of keys and values.",
    heads=6,
    shared=1,
    causal=True,
    may_refuse=True,
)
attention("scale", "A given scale replaces 1/√D.", scale=0.7)


@claim("attention", 1)
def large_scores(make):
    """Scores of thousands do not overflow, wherever the largest is."""
    for slope in (1000, -1000):
        attends_as_dense(make, [(64, 192)], slope=slope)


@claim("attention", 1, may_refuse=True)
def any_length(make):
    """The number of queries, of keys and the head size need not be multiples of 64."""
    same_number = [(1, 1), (7, 7), (300, 300)]
    attends_as_dense(make, [*same_number, (5, 201), (201, 5)], size=8)
    attends_as_dense(make, same_number, size=8, causal=True)


@claim("attention", 1)
def dropout(make):
    """Weights are dropped with the given probability, and backward has forward's mask."""
    q, k, v = queries_and_keys(64, 64, size=64)
    # As v, the identity makes the output the weights.
    identity = torch.eye(64, dtype=v.dtype).repeat(*v.shape[:2], 1, 1)
    weights = dense_weights(q, k)
    torch.manual_seed(3)
    kept = make(q, k, identity, dropout_p=0.25) / weights > 0.5
    mask = kept.to(v.dtype) / 0.75
    share = 1 - kept.double().mean().item()  # of 16,384: a standard deviation is 0.003
    check(abs(share - 0.25) < 0.025, f"{share:.1%} are dropped, not 25%")

    torch.manual_seed(3)
    output = make(q, k, v, dropout_p=0.25)
    same_with_gradients(output, (weights * mask) @ v, q, k, v)


def elements_kept(function):
    """How many elements `function` keeps for backward. What two tensors share counts once."""
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in saved}
    sizes = [storage.nbytes() for storage in storages.values()]
    return sum(sizes) // precision().itemsize


@claim("attention", 1, about="property")
def no_matrix_is_kept(make):
    """The memory kept for backward grows with the queries and keys, not with their product."""
    q, k, v = queries_and_keys(1280, 1280, batch=1, size=64)
    kept = elements_kept(lambda: make(q, k, v, causal=True))
    scores = 1280 * 1280  # of one head
    check(0 < kept < scores, f"{kept} elements are kept, and a head has {scores} scores")

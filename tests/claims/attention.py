"""An implementation of --attention is called as function(q, k, v, causal=True).

Or with is_causal=True, if it has that name. q is (batch, heads, queries, head size). k and v are
(batch, heads or fewer, keys, head size). The output has the shape of q. The head size is 64 and
the numbers of queries and keys are multiples of 64, but for the claim about any length. The claims
about them also pass scale=, dropout_p= and documents=, integers (batch, tokens): a document ends
where the number changes, and its tokens see no other document. If k has fewer heads than q,
enable_gqa=True is passed if the function has such a name. A function that computes in float32 is
right to 1e-5.
"""

from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from shared import randn
from torch.autograd.graph import saved_tensors_hooks

from claims.registry import (
    NotOffered,
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
        if "documents" in options:
            raise NotOffered("no argument documents")
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


def make_inputs(S, Skv, batch=2, heads=4, shared=4, size=8, size_v=None):
    """Return q, k, v and the output's gradient, for S queries and Skv keys.

    The queries have `heads` heads, and the keys have `shared` ones."""
    size_v = size_v or size
    shapes = [(heads, S, size), (shared, Skv, size), (shared, Skv, size_v), (heads, S, size_v)]
    numbers = [randn((batch, *shape), seed) for seed, shape in enumerate(shapes, S * Skv)]
    return [x.to(precision()) for x in numbers]


def output_and_gradients(attention, q, k, v, grad, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves, **options)
    output.backward(grad)  # a checkpoint inside may refuse torch.autograd.grad
    return [output.detach(), *(leaf.grad for leaf in leaves)]


RESULTS = ["output", "gradient of q", "gradient of k", "gradient of v"]


def same_results(found, expected, what="", **how):
    for name, ours, theirs in zip(RESULTS, found, expected, strict=True):
        same(ours, theirs, f"{name} {what}", **how)


def dense_attention(q, k, v, causal=False, scale=None, dropout_mask=1.0):
    """The last query sees all keys. If all keys are hidden, the output is zero."""
    G = q.shape[1] // k.shape[1]
    scale = max(1, q.shape[3]) ** -0.5 if scale is None else scale
    scores = q @ k.repeat_interleave(G, 1).mT * scale
    first_hidden = 1 + k.shape[2] - q.shape[2]  # from the first query
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(first_hidden) & causal
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    weights = weights.masked_fill(hidden, 0.0) * dropout_mask
    return weights @ v.repeat_interleave(G, 1)


def attends_as_dense(make, sizes, heads=4, shared=4, size=64, slope=0, **options):
    """Scores differ by about `slope` from the first key to the last."""
    for S, Skv in sizes:
        inputs = make_inputs(S, Skv, heads=heads, shared=shared, size=size)
        inputs[1] += torch.linspace(0, slope, Skv, dtype=inputs[1].dtype)[:, None]
        expected = output_and_gradients(dense_attention, *inputs, **options)
        found = output_and_gradients(make, *inputs, **options)
        # In float32, a score of a thousand has a rounding error of 1e-4.
        coarser = 100 if slope else 1
        same_results(found, expected, f"for {S} queries and {Skv} keys", coarser=coarser)


def attention(name, sentence, sizes=((64, 64), (192, 192)), **how):
    """`sizes`: numbers of queries and of keys."""
    say(name, sentence, [1], "attention", attends_as_dense, sizes=sizes, **how)


attention(
    "as_dense",
    "Output and gradients are those of dense attention, also with more or fewer keys than queries.",
    sizes=[(64, 64), (192, 128), (64, 192)],
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
    shared=2,
    causal=True,
    may_refuse=True,
)
attention(
    "one_shared_head",
    "All heads of queries may share one head of keys and values.",
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
    attends_as_dense(make, [(1, 1), (5, 201), (201, 5)], size=8)
    attends_as_dense(make, [(7, 7), (300, 300)], size=8, causal=True)


@claim("attention", 1)
def dropout(make):
    """Weights are dropped with the given probability, and backward has forward's mask."""
    q, k, v, grad = make_inputs(64, 64, size=64)

    def dropping(q, k, v):
        torch.manual_seed(3)
        return make(q, k, v, dropout_p=0.25)

    # As v, the identity makes the output the weights.
    identity = torch.eye(64, dtype=v.dtype).repeat(*v.shape[:2], 1, 1)
    kept = dropping(q, k, identity) / dense_attention(q, k, identity) > 0.5
    share = 1 - kept.double().mean().item()  # of 32,768: a standard deviation is 0.0024
    check(abs(share - 0.25) < 0.025, f"{share:.1%} are dropped, not 25%")
    masked = partial(dense_attention, dropout_mask=kept.to(v.dtype) / 0.75)
    expected = output_and_gradients(masked, q, k, v, grad)
    same_results(output_and_gradients(dropping, q, k, v, grad), expected)


def bytes_kept(attention, q, k, v, **options):
    """How much is kept for backward. What two tensors share counts once."""
    sizes = {}  # by address

    def keep(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*leaves, **options)
    return sum(sizes.values())


@claim("attention", 1, about="property")
def no_matrix_is_kept(make):
    """The memory kept for backward grows with the queries and keys, not with their product."""
    *inputs, _ = make_inputs(1280, 1280, batch=1, heads=1, shared=1, size=64)
    kept = bytes_kept(make, *inputs, causal=True) // precision().itemsize
    scores = 1280 * 1280  # of one head
    check(0 < kept < scores, f"{kept} elements are kept, and a head has {scores} scores")


def make_documents(S):
    """Return ids for two sequences with other borders: 1 0 1 are three documents, -1 is padding."""
    third = S // 3
    first = [1] * third + [0] + [1] * (third - 2) + [-1] * (S - 2 * third + 1)
    second = [5] + [3] * (S // 2) + [0] + [2] * (S - S // 2 - 2)
    return torch.tensor([first, second])


def parts_of(ids):
    """Return the index of each document in a tensor (batch, heads, tokens, head size)."""
    parts = []
    for b, row in enumerate(ids.tolist()):
        stop = 0
        for _, group in groupby(row):
            start = stop
            stop += len(list(group))
            parts.append((slice(b, b + 1), slice(None), slice(start, stop)))
    return parts


def each_alone(ids, q, k, v, grad, **options):
    """Output and gradients, if dense attention gets each document as a sequence of its own."""
    results = [torch.zeros_like(x) for x in (grad, q, k, v)]
    for part in parts_of(ids):
        inputs = [x[part] for x in (q, k, v, grad)]
        found = output_and_gradients(dense_attention, *inputs, **options)
        for result, of_document in zip(results, found, strict=True):
            result[part] = of_document
    return results


@claim("attention", 1)
def documents(make):
    """Documents that are packed into a sequence have the output and gradients of each alone."""
    ids = make_documents(64)
    inputs = make_inputs(64, 64, size=64)
    for causal in (False, True):
        found = output_and_gradients(make, *inputs, causal=causal, documents=ids)
        same_results(found, each_alone(ids, *inputs, causal=causal), f"with {causal=}")


def with_nan_in(part, inputs):
    """Copies of the inputs, with NaN in one document."""
    copies = [x.clone() for x in inputs]
    for x in copies:
        x[part] = torch.nan
    return copies


@claim("attention", 1, about="property")
def documents_are_independent(make):
    """What is in one document changes no bit of another, not even NaN."""
    ids = make_documents(64)
    inputs = make_inputs(64, 64, size=64)
    broken, *others = parts_of(ids)
    attend = partial(output_and_gradients, make, causal=True, documents=ids)
    before = attend(*inputs)
    after = attend(*with_nan_in(broken, inputs))
    for name, a, b in zip(RESULTS, after, before, strict=True):
        for part in others:
            same(a[part], b[part], f"{name} beside a document of NaN", exact=True)

"""An implementation of --ring-attention or --ulysses-attention is called as f(q, k, v, causal=).

Every rank calls it with its part of the sequence: q is (batch, heads, tokens, head size), k and v
are (batch, heads or fewer, tokens, head size). The output has the shape of q. Rank r holds the r-th
of N parts; with zigzag=True, it holds the chunks r and 2N-1-r of 2N. The flag may also be called
is_causal. It gets process_group= if it has such a name. The claims about them also pass scale=,
zigzag= and documents=, integers (batch, tokens of the whole sequence), the same on all ranks. A
document ends where the number changes, and its tokens see no other document. Inputs are contiguous.
"""

from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from claims.attention import (
    RESULTS,
    bytes_kept,
    dense_attention,
    each_alone,
    make_documents,
    make_inputs,
    output_and_gradients,
    parts_of,
    same_results,
    with_nan_in,
)
from claims.registry import (
    add_kind,
    call,
    check,
    claim,
    error_from,
    names_of,
    same,
    same_on_all,
    say,
    say_in_float64,
)

BOTH = "ring-attention ulysses-attention"


def attend(implementation, q, k, v, causal=False, zigzag=False, **options):
    name = "causal" if "causal" in names_of(implementation) else "is_causal"
    welcome = {name: causal, "process_group": pool.group()}
    if zigzag:
        options["zigzag"] = True
    else:
        welcome["zigzag"] = False
    return call(implementation, q, k, v, needed=options, **welcome)


for _kind in ("ring", "ulysses"):
    _ours = f"context_parallel:{_kind}_attention"
    add_kind(f"{_kind}-attention", called=__doc__, make=attend, ours=_ours)


def whole_inputs(tokens, **shapes):
    """Return q, k, v and the output's gradient for a sequence with `tokens` on each rank."""
    S = tokens * pool.world_size()
    return make_inputs(S, S, **shapes)


def mine(x, zigzag=False, dim=2):
    """This rank's part of a whole sequence, contiguous."""
    N = pool.world_size()
    rank = pool.rank()
    if not zigzag:
        return x.chunk(N, dim)[rank].contiguous()
    chunks = x.chunk(2 * N, dim)
    return torch.cat([chunks[rank], chunks[2 * N - 1 - rank]], dim)


def attends_as_one_device(
    make, tokens=8, heads=12, shared=12, slope=0, zigzag=False, causal=True, **scale
):
    """Scores differ by about `slope` from the first key to the last."""
    whole = whole_inputs(tokens, heads=heads, shared=shared)
    keys = whole[1]
    keys += torch.linspace(0, slope, keys.shape[2], dtype=keys.dtype)[:, None]
    own = [mine(x, zigzag) for x in whole]
    results = output_and_gradients(dense_attention, *whole, causal=causal, **scale)
    expected = [mine(x, zigzag) for x in results]
    found = output_and_gradients(make, *own, causal=causal, zigzag=zigzag, **scale)
    for gradients in (found, expected):
        gradients[1] /= max(1, abs(slope))  # that of q is a sum over keys, times k
    # In float32, a score of a thousand has a rounding error of 1e-4.
    coarser = 100 if slope else 1
    same_results(found, expected, f"with slope {slope}", coarser=coarser)


def attention(name, sentence, worlds=(2, 3, 4), **how):
    say(name, sentence, worlds, BOTH, attends_as_one_device, **how)


attention(
    "as_one_device",
    "Output and gradients are those of attention over the whole sequence.",
    causal=False,
)
say_in_float64(BOTH, "as_one_device")
attention("one_rank", "One rank may have the whole sequence.", [1], about="property")
attention(
    "causal",
    "With a causal mask, a query sees the keys up to its own position in the whole sequence.",
)
attention(
    "zigzag",
    "With zigzag, a rank's tokens are the chunks r and 2N-1-r of the whole sequence.",
    tokens=10,
    zigzag=True,
)
attention("odd_length", "A rank may have any number of tokens.", tokens=7, may_refuse=True)
attention(
    "shared_heads",
    "Consecutive heads of queries share a head of keys and values. Their gradients add up there.",
    shared=4,
    may_refuse=True,
)
attention(
    "any_number_of_heads",
    "The number of ranks need not divide the heads of queries, or those of keys.",
    heads=6,
    shared=2,
    about="property",
)
attention("scale", "A given scale replaces 1/√D.", scale=0.7)


def documents_as_alone(make, shared=6, zigzag=False):
    ids = make_documents(8 * pool.world_size())
    whole = whole_inputs(8, heads=6, shared=shared)
    own = [mine(x, zigzag) for x in whole]
    for causal in (False, True):
        how = {"causal": causal, "zigzag": zigzag, "documents": ids}
        found = output_and_gradients(make, *own, **how)
        expected = each_alone(ids, *whole, causal=causal)
        same_results(found, [mine(x, zigzag) for x in expected], f"with {causal=}")


def documents(name, sentence, **how):
    say(name, sentence, (1, 2, 3, 4), BOTH, documents_as_alone, **how)


documents(
    "documents",
    "Documents that are packed into a sequence have the output and gradients of each alone.",
)
documents("documents_zigzag", "So they have if a rank's tokens are two chunks.", zigzag=True)
documents(
    "documents_shared_heads",
    "So they have if heads of queries share a head of keys.",
    shared=2,
    may_refuse=True,
)


@claim(BOTH, 2, 3, about="property")
def documents_are_independent(make):
    """What is in one document changes no bit of another, not even NaN."""
    ids = make_documents(8 * pool.world_size())
    whole = whole_inputs(8)
    attend = partial(output_and_gradients, make, causal=True, zigzag=True, documents=ids)
    for broken in (parts_of(ids)[0], parts_of(ids)[-1]):
        others = torch.ones_like(whole[0], dtype=torch.bool)
        others[broken] = False
        before = attend(*(mine(x, True) for x in whole))
        after = attend(*(mine(x, True) for x in with_nan_in(broken, whole)))
        for name, a, b in zip(RESULTS, after, before, strict=True):
            kept = mine(others, True)
            same(a[kept], b[kept], f"{name} beside a document of NaN", exact=True)


@claim(BOTH, 2, 3, about="property")
def documents_disagreement(make):
    """If one rank passes no documents, or those of a part, all raise, and the group works on."""
    ids = make_documents(8 * pool.world_size())
    own = [mine(x) for x in whole_inputs(8)[:3]]
    is_last = pool.rank() == pool.world_size() - 1
    expected = make(*own, True, documents=ids)
    with error_from("documents on all ranks but one"):
        make(*own, True, scale=2.0, documents=None if is_last else ids)
    with error_from("the documents of a part"):
        make(*own, True, documents=mine(ids, dim=1))
    same(make(*own, True, documents=ids), expected, "output after an error", exact=True)


@claim(BOTH, 2, 4)
def large_scores(make):
    """Scores of thousands do not overflow, whichever rank has the largest."""
    for slope in (1000, -1000):
        attends_as_one_device(make, slope=slope, causal=False)


@claim(BOTH, 2, 4, may_refuse=True)
def twice_backward(make):
    """Backward may run twice over one graph, and both times gives the same gradients, bitwise."""
    *own, grad = map(mine, whole_inputs(6))
    leaves = [x.requires_grad_() for x in own]
    output = make(*leaves, True)
    first = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(output, leaves, grad)
    for name, ours, theirs in zip("qkv", second, first, strict=True):
        same(ours, theirs, f"gradient of {name} in the second backward", exact=True)


@claim(BOTH, 2, 4)
def two_layers(make):
    """It may follow itself. In an activation checkpoint, results are bitwise the same."""

    def layers(attention, *inputs):
        hidden = attention(*inputs, True)
        return attention(hidden, *inputs[1:], True)

    plain = partial(layers, dense_attention)
    ours = partial(layers, make)
    whole = whole_inputs(6)
    own = [mine(x) for x in whole]
    first = output_and_gradients(ours, *own)
    again = output_and_gradients(partial(checkpoint, ours, use_reentrant=False), *own)
    expected = output_and_gradients(plain, *whole)
    same_results(first, [mine(x) for x in expected])
    same_results(again, first, "of a second run", exact=True)


@claim(BOTH, 2, 4, may_refuse=True)
def bf16(make):
    """In bf16, errors of output and gradients are at most 1.25 times PyTorch's attention's."""
    whole = [x.bfloat16() for x in whole_inputs(64, size=32)]
    wide = [x.double() for x in whole]
    exact = output_and_gradients(dense_attention, *wide)
    pytorchs = output_and_gradients(F.scaled_dot_product_attention, *whole)
    found = output_and_gradients(make, *map(mine, whole))
    for name, a, b, expected in zip(RESULTS, found, pytorchs, exact, strict=True):
        ours = a - mine(expected)
        theirs = mine(b - expected)
        errors = torch.stack([ours.norm(), theirs.norm()])
        dist.all_reduce(errors, group=pool.group())
        ratio = (errors[0] / errors[1]).item()
        check(ratio <= 1.25, f"{name} has {ratio:.2f} times the error of one device")


@claim(BOTH, 2, 4, about="property")
def keeps_its_part(make):
    """The memory kept for backward is that of one device, divided by the number of ranks."""
    own = [mine(x) for x in whole_inputs(60)[:3]]
    kept = bytes_kept(make, *own, causal=True)
    least = 4 * own[0].nbytes  # q, k, v and the output
    check(0 < kept < 1.1 * least, f"{kept} bytes are kept; q, k, v and the output have {least}")


def operations_of_the_kernel(q, k, v, dropout_p=0.0, is_causal=False, **options):
    """FlopCounterMode does not know PyTorch's kernel for CPUs. q, k and v are shapes."""
    batch, heads, queries, size = q
    products = 4 * batch * heads * queries * k[2] * size
    return products // 2 if is_causal else products


@claim("ring-attention", 2, 4, about="property")
def equal_work(make):
    """With zigzag and a causal mask, all ranks compute equally much."""
    own = [mine(x) for x in whole_inputs(8)[:3]]
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {forward: operations_of_the_kernel}
    with FlopCounterMode(display=False, custom_mapping=mapping) as flops:
        make(*own, causal=True, zigzag=True)
    operations = torch.tensor(flops.get_total_flops())
    check(operations > 0, "no operations were counted")
    same_on_all(operations, "their number of operations")


@claim(BOTH, 2, 3, about="property")
def disagreement(make):
    """If one rank passes another shape, dtype, mask or scale, all raise, and the group works on."""
    whole = whole_inputs(6)[:3]
    expected = mine(dense_attention(*whole, True))
    own = [mine(x) for x in whole]
    same(make(*own, True), expected, "output")
    attend_scaled = partial(make, scale=1.0)
    changes = {
        "tokens": partial(attend_scaled, *(x[:, :, 1:] for x in own)),
        "dtype": partial(attend_scaled, *(x.bfloat16() for x in own)),
        "causal": partial(attend_scaled, *own, causal=True),
        "scale": partial(attend_scaled, *own, scale=2.0),
    }
    is_last = pool.rank() == pool.world_size() - 1
    for name, changed in changes.items():
        with error_from(f"ranks that differ in {name}"):
            changed() if is_last else attend_scaled(*own)
        same(make(*own, True), expected, f"output after another {name}")

"""An implementation of --ring-attention or --ulysses-attention is called as f(q, k, v, causal=).

Every rank calls it with its part of the sequence: q is (batch, heads, tokens, head size), k and v
are (batch, heads or fewer, tokens, head size). The output has the shape of q. Rank r holds the r-th
of N parts; with zigzag=True, it holds the chunks r and 2N-1-r of 2N. The flag may also be called
is_causal. It gets process_group= if it has such a name. The claims about them also pass scale= and
zigzag=. Inputs are contiguous.
"""

from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import randn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from claims.attention import dense_attention, elements_kept
from claims.registry import (
    add_kind,
    call,
    check,
    claim,
    error_from,
    names_of,
    precision,
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


add_kind("ring-attention", called=__doc__, make=attend, ours="context_parallel:ring_attention")
add_kind(
    "ulysses-attention", called=__doc__, make=attend, ours="context_parallel:ulysses_attention"
)


def mine(x, zigzag=False, dim=2):
    """This rank's part of a whole sequence, contiguous."""
    N = pool.world_size()
    rank = pool.rank()
    if not zigzag:
        return x.chunk(N, dim)[rank].contiguous()
    chunks = x.chunk(2 * N, dim)
    return torch.cat([chunks[rank], chunks[2 * N - 1 - rank]], dim)


def whole_inputs(tokens, heads=4, shared=4, size=8, dtype=None):
    """Return q, k, v and the output's gradient for a sequence with `tokens` on each rank."""
    S = tokens * pool.world_size()
    numbers = [heads, shared, shared, heads]
    inputs = [randn((2, each, S, size), seed=S + i) for i, each in enumerate(numbers)]
    return [x.to(dtype or precision()) for x in inputs]


def one_device(q, k, v, grad, causal=False, scale=None):
    """Return output and gradients of attention over the whole sequence."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = dense_attention(*leaves, causal, scale)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def my_leaves(inputs, zigzag=False):
    parts = [mine(x, zigzag) for x in inputs]
    return [part.clone().requires_grad_() for part in parts]


def on_ranks(attention, q, k, v, grad, zigzag=False):
    """Return this rank's part of the same, by `attention(q, k, v)`."""
    leaves = my_leaves([q, k, v], zigzag)
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, mine(grad, zigzag))]


RESULTS = ["output", "gradient of q", "gradient of k", "gradient of v"]


def same_as_one_device(found, expected, zigzag=False, what="", coarser=1):
    for name, ours, theirs in zip(RESULTS, found, expected, strict=True):
        same(ours, mine(theirs, zigzag), f"{name}{what}", coarser=coarser)


def attends_as_one_device(
    make, causals=(False, True), tokens=8, heads=12, shared=12, zigzag=False, **scale
):
    for causal in causals:
        inputs = whole_inputs(tokens, heads, shared)
        expected = one_device(*inputs, causal, **scale)
        found = on_ranks(partial(make, causal=causal, zigzag=zigzag, **scale), *inputs, zigzag)
        same_as_one_device(found, expected, zigzag, f" with causal={causal}")


def attention(name, sentence, worlds=(2, 3, 4), **how):
    say(name, sentence, worlds, BOTH, attends_as_one_device, **how)


attention(
    "as_one_device",
    "Output and gradients are those of attention over the whole sequence.",
    causals=[False],
)
say_in_float64(BOTH, "as_one_device")
attention("one_rank", "One rank may have the whole sequence.", [1], about="property")
attention(
    "causal",
    "With a causal mask, a query sees the keys up to its own position in the whole sequence.",
    causals=[True],
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
    "zigzag_shared_heads",
    "With zigzag they do so, too.",
    tokens=6,
    shared=2,
    zigzag=True,
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


@claim(BOTH, 2, 4)
def large_scores(make):
    """Scores of thousands do not overflow, whichever rank has the largest."""
    for slope in (1000, -1000):  # from the first key to the last
        q, k, v, grad = whole_inputs(6)
        k += torch.linspace(0, slope, k.shape[2], dtype=k.dtype)[:, None]
        expected = one_device(q, k, v, grad)
        found = on_ranks(make, q, k, v, grad)
        for gradients in (expected, found):
            gradients[1] /= 1000  # the gradient of q is a sum over keys, times k
        # In float32, a score of a thousand has a rounding error of 1e-4.
        what = f" with a slope of {slope}"
        same_as_one_device(found, expected, what=what, coarser=100)


@claim(BOTH, 2, 4, may_refuse=True)
def twice_backward(make):
    """Backward may run twice over one graph, and both times gives the same gradients, bitwise."""
    *whole, grad = whole_inputs(6)
    leaves = my_leaves(whole)
    output = make(*leaves, True)
    own_grad = mine(grad)
    first = torch.autograd.grad(output, leaves, own_grad, retain_graph=True)
    second = torch.autograd.grad(output, leaves, own_grad)
    expected = one_device(*whole, grad, True)
    same_as_one_device([output.detach(), *first], expected)
    for name, ours, theirs in zip("qkv", second, first, strict=True):
        same(ours, theirs, f"gradient of {name} in the second backward", exact=True)


@claim(BOTH, 2, 4)
def two_layers(make):
    """It may follow itself, in an activation checkpoint, too. Run against run is bitwise equal."""
    q, k, v, grad = whole_inputs(6)

    def layers(q, k, v):
        return make(make(q, k, v, True), k, v, True)

    def checkpointed(q, k, v):
        return checkpoint(layers, q, k, v, use_reentrant=False)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    hidden = dense_attention(*leaves, True)
    output = dense_attention(hidden, *leaves[1:], True)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, grad)]
    first = on_ranks(layers, q, k, v, grad)
    again = on_ranks(layers, q, k, v, grad)
    same_as_one_device(first, expected)
    same_as_one_device(on_ranks(checkpointed, q, k, v, grad), expected, what=", checkpointed")
    for ours, theirs in zip(again, first, strict=True):
        same(ours, theirs, "a second run", exact=True)


@claim(BOTH, 2, 4)
def without_gradients(make):
    """Under no_grad the output is the same."""
    *whole, grad = whole_inputs(6)
    output, *_ = one_device(*whole, grad, True)
    with torch.no_grad():
        same(make(*map(mine, whole), True), mine(output), "output")


@claim(BOTH, 2, 4, may_refuse=True)
def bf16(make):
    """In bf16, errors of output and gradients are at most 1.25 times PyTorch's attention's."""
    inputs = whole_inputs(64, size=32, dtype=torch.bfloat16)
    exact = one_device(*(x.double() for x in inputs))
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    output = F.scaled_dot_product_attention(*leaves)
    theirs = [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]
    ours = on_ranks(make, *inputs)
    for name, a, b, expected in zip(RESULTS, ours, theirs, exact, strict=True):
        errors = torch.stack([(x.double() - mine(expected)).norm() for x in (a, mine(b))])
        dist.all_reduce(errors, group=pool.group())
        ratio = (errors[0] / errors[1]).item()
        check(ratio <= 1.25, f"{name} has {ratio:.2f} times the error of one device")


@claim(BOTH, 2, 4, about="property")
def keeps_its_part(make):
    """The memory kept for backward is that of one device, divided by the number of ranks."""
    leaves = my_leaves(whole_inputs(60)[:3])
    kept = elements_kept(lambda: make(*leaves, True))
    own = 4 * leaves[0].numel()  # q, k, v and the output
    check(0 < kept < 1.1 * own, f"{kept} elements are kept; q, k, v and the output have {own}")


def operations_of_the_kernel(q, k, v, dropout_p=0.0, is_causal=False, **options):
    """FlopCounterMode does not know PyTorch's kernel for CPUs. q, k and v are shapes."""
    batch, heads, queries, size = q
    products = 4 * batch * heads * queries * k[2] * size
    return products // 2 if is_causal else products


@claim("ring-attention", 2, 4, about="property")
def equal_work(make):
    """With zigzag and a causal mask, all ranks compute equally much."""
    q, k, v, grad = whole_inputs(8)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {forward: operations_of_the_kernel}
    with FlopCounterMode(display=False, custom_mapping=mapping) as flops:
        on_ranks(lambda *inputs: make(*inputs, True, True), q, k, v, grad, True)
    operations = torch.tensor(flops.get_total_flops())
    check(operations > 0, "no operations were counted")
    same_on_all(operations, "their number of operations")


@claim(BOTH, 2, 3, about="property")
def disagreement(make):
    """If one rank passes another shape, dtype, mask or scale, all raise, and the group works on."""
    whole = whole_inputs(6)
    expected = mine(one_device(*whole, True)[0])
    own = [mine(x) for x in whole[:3]]
    same(make(*own, True), expected, "output")
    is_last = pool.rank() == pool.world_size() - 1
    changes = {
        "tokens": {"inputs": [x[:, :, 1:] for x in own]},
        "dtype": {"inputs": [x.bfloat16() for x in own]},
        "causal": {"causal": True},
        "scale": {"scale": 2.0},
    }
    for name, change in changes.items():
        how = {"inputs": own, "causal": False, "scale": 1.0}
        if is_last:
            how |= change
        with error_from(f"ranks that differ in {name}"):
            make(*how.pop("inputs"), **how)
        same(make(*own, True), expected, f"output after another {name}")

"""Flash attention: exact attention that never holds all s × s scores, in forward or in backward.

Each block of queries visits the blocks of keys from left to right. Each query has three running
values over the keys so far:

    m   the largest score
    l   Σ e^(score - m)
    O   Σ e^(score - m) v

When a block has a larger score, m grows, and l and O are multiplied by e^(old m - new m). After the
last block, the output is O / l.

                 keys →    block 0   block 1   block 2
    queries    block 0    │   ◣    │         │         │
       ↓       block 1    │   ■    │    ◣    │         │
               block 2    │   ■    │    ■    │    ◣    │

With a causal mask, the loop skips the blocks above the diagonal. Only the blocks ◣ need the mask.

Forward also returns L = m + log l for each query (`lse` in the code). Backward computes each block
of scores again, and e^(score - L) is this block of P, the softmax. So the s² scores are not kept.

Cost of a head of size d    elements kept for backward         operations: forward + backward
    naive                   q, k, v, P: 3sd + s² or more       4s²d +  8s²d
    loop                    q, k, v, output, L: 4sd + s        4s²d + 10s²d: the scores again
    kernels                 the same                           4s²d + 14s²d: scores and dP twice
    both, causal            the same                           half of that, if s is many blocks

Read section 1 for the idea (9 minutes), to section 2 for the technique (22), and the rest to use it
as a library (57).

Section 2 is a loop in PyTorch, for any device and dtype. Section 4 is the same loop as kernels in
Triton, for GPUs. Tests run them in Triton's interpreter, and compile them for an H100. They have
not run on a GPU.

Run:      torchrun --nproc-per-node 2 flash_attention.py          (or without torchrun)
          python docs/attention_lengths.py: memory, time and errors at growing lengths
Papers:   Milakov & Gimelshein 2018, arXiv 1805.02867: online softmax;
          Dao et al. 2022, 2205.14135; Dao 2023, 2307.08691: L, and queries in the outer loop
Mirrors:  F.scaled_dot_product_attention. With more or fewer keys than queries, the causal mask is
          flash_attn_func's: the last query sees all keys
Left out: other masks (see flex_attention); gradients of gradients; more than 65535 sequences or
          heads on a GPU. Dropout, float64 and head sizes above 128 run in the loop
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import json
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the loop runs without it
    triton = None
    constexpr = float  # a stand-in: section 4 is defined, but does not run

# --------------------------------------------------------------------------------------------------
# 1. The idea. q is (B, H, S, D), k and v are (B, H, Skv, D): B sequences, H heads of size D.


def plain_attention(q, k, v, causal=False, scale=None):
    """Return softmax(scale · q kᵀ) v, (B, H, S, D). It holds all scores at once."""
    scores = q @ k.mT * softmax_scale(q, scale)
    if not causal:
        return scores.softmax(-1) @ v
    hidden = hidden_keys(scores, k.shape[2] - q.shape[2] + 1)
    P = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return P.masked_fill(hidden, 0.0) @ v  # the softmax of a query that sees no key is NaN


def softmax_scale(q, scale):
    """Return `scale`, or 1/√D if it is None. If D = 0, any scale will do."""
    return max(1, q.shape[3]) ** -0.5 if scale is None else scale


def hidden_keys(scores, first_sees):
    """Return the mask, True for hidden keys. Query i sees the first `first_sees` + i keys."""
    return scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(first_sees)


def online_attention(q, k, v, causal=False, block_size=16):
    """As plain_attention for S = Skv, with the scores of one block of keys at a time.

    Autograd keeps all blocks for backward. Section 2 computes them again.
    """
    q = q * softmax_scale(q, None)
    m = -torch.inf  # then (B, H, S, 1), as l; O becomes (B, H, S, D)
    l = 0.0
    O = 0.0
    for first in range(0, k.shape[2], block_size):
        keys = slice(first, first + block_size)
        scores = q @ k[:, :, keys].mT
        if causal:  # query i sees i + 1 keys. In the first block, each query sees one or more
            scores = scores.masked_fill(hidden_keys(scores, 1 - first), -torch.inf)
        m_new = scores.amax(-1, keepdim=True).clamp(min=m)
        correction = (m - m_new).exp()
        exps = (scores - m_new).exp()
        l = l * correction + exps.sum(-1, keepdim=True)
        O = O * correction + exps @ v[:, :, keys]
        m = m_new
    return O / l


# --------------------------------------------------------------------------------------------------
# 2. The technique (Dao 2023): the outer loop takes a block of queries, the inner loop a block of
#    keys. Backward computes a block of the softmax from its scores and L, without other blocks.


def loop_forward(
    q,
    k,
    v,
    causal,
    scale,
    dropout,
    block_size,
):
    q = q * scale
    output = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3])  # L in the docstring: the log of Σ e^score
    for rows, key_blocks in tiles(q, k, causal, block_size):
        # After the first block of keys, m and l are (B, H, rows, 1), and O is (B, H, rows, D).
        m = q.new_full((), torch.finfo(q.dtype).min)  # not -inf, because -inf - -inf is NaN
        l = q.new_zeros(())
        O = q.new_zeros(())
        for cols in key_blocks:
            scores = masked_scores(q, k, rows, cols, causal)
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            correction = (m - m_new).exp()
            exps = scores.sub_(m_new).exp_()
            l = l * correction + exps.sum(-1, keepdim=True)
            if dropout:  # after l, because the softmax counts the dropped keys too
                exps = exps * dropout.mask(exps, rows, cols)  # backward has the same mask
            O = O * correction + exps @ v[:, :, cols]
            m = m_new
        output[:, :, rows] = O / l.clamp(min=1.0)  # l is 0 if no key is seen, else 1 or more
        lse[:, :, rows] = (m + l.log()).squeeze(-1)
    return output, lse


def loop_backward(
    dO,
    q,
    k,
    v,
    output,
    lse,
    causal,
    scale,
    dropout,
    block_size,
):
    q = q * scale
    delta = (dO * output).sum(-1)  # Σ P ∘ dP over all keys, because output = P v and dP = dO vᵀ
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for rows, key_blocks in tiles(q, k, causal, block_size):
        dO_i = dO[:, :, rows]
        L_i = lse[:, :, rows, None].clamp(min=torch.finfo(lse.dtype).min)  # or P is NaN
        delta_i = delta[:, :, rows, None]
        for cols in key_blocks:
            scores = masked_scores(q, k, rows, cols, causal)
            P = scores.sub_(L_i).exp_()
            dP = dO_i @ v[:, :, cols].mT
            P_dropped = P
            if dropout:
                mask = dropout.mask(P, rows, cols)
                P_dropped = P * mask
                dP = dP * mask
            dS = dP.sub_(delta_i).mul_(P)  # the derivative of the softmax, P ∘ (dP - Σ P ∘ dP)
            dq[:, :, rows] += dS @ k[:, :, cols]
            dk[:, :, cols] += dS.mT @ q[:, :, rows]  # q is scaled already
            dv[:, :, cols] += P_dropped.mT @ dO_i
    return dq * scale, dk, dv


def tiles(q, k, causal, block_size):
    """Yield slices: each block of queries, and a list, maybe empty, of the keys that it sees."""
    S = q.shape[2]
    Skv = k.shape[2]
    for rows in slices(S, block_size):
        last_sees = rows.stop + Skv - S if causal else Skv  # how many keys the last query sees
        yield rows, slices(last_sees, block_size)


def slices(stop, size):
    return [slice(start, min(start + size, stop)) for start in range(0, stop, size)]


def masked_scores(q, k, rows, cols, causal):
    """Return the scores of a block, -inf for hidden keys. q is scaled already."""
    scores = q[:, :, rows] @ k[:, :, cols].mT
    # How many keys of the block the first query sees.
    first_sees = rows.start + 1 + k.shape[2] - q.shape[2] - cols.start
    if causal and first_sees < scores.shape[3]:  # the diagonal cuts the block
        scores.masked_fill_(hidden_keys(scores, first_sees), -torch.inf)
    return scores


# --------------------------------------------------------------------------------------------------
# 3. The library: autograd, options, 16 bits, heads that share keys, documents, dropout, and keys in
#    parts.


class FlashAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and L for backward, which computes the scores again."""

    @staticmethod
    def forward(ctx, q, k, v, *options):  # causal, scale, dropout, block_size, kernel
        output, lse = flash_forward(q, k, v, *options)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.options = options
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # under create_graph=True
            raise RuntimeError("gradients of gradients are left out; use naive_attention")
        gradients = flash_backward(grad_output, *ctx.saved_tensors, *ctx.options)
        return *gradients, *[None] * len(ctx.options)  # options have no gradients


def flash_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    dropout_p=0.0,
    block_size=128,
    kernel=None,
    documents=None,
):
    """Return softmax(scale · q kᵀ) v for q (B, H, S, D), k and v (B, Hkv, Skv, D): (B, H, S, D).

    Each head of k and v serves H / Hkv consecutive heads of q.
    causal: query i sees the keys 0 to i + Skv - S, so the last query sees all keys. If a query sees
        no key, its output and gradients are zero.
    scale: 1/√D if None. A tensor, such as (H, 1, 1) for each head, multiplies q, and may train.
    dropout_p: the probability that a weight is dropped, in evaluation too. The seed comes from the
        CPU's default generator.
    block_size: of the loop, for queries and keys. The mask of dropout depends on it.
    kernel: "triton" runs the kernels, on a GPU, or on a CPU if TRITON_INTERPRET=1 was set before
        the import of this file. "torch" runs the loop. None runs the kernels on a GPU if they
        support the call, otherwise the loop.
    documents: integers (B, S), if documents are packed into the sequences. A document ends where
        the number changes. Each is computed as if it were alone.
    """

    def attend(q, k, v, scale):
        dropout = Dropout(dropout_p, q.device) if dropout_p else None
        return FlashAttention.apply(q, k, v, causal, scale, dropout, block_size, kernel)

    return each_document(attend, q, k, v, scale, documents)


def naive_attention(q, k, v, causal=False, scale=None, documents=None):
    """As plain_attention, with heads that share keys, and with documents."""
    k = repeat_heads(k, q)
    v = repeat_heads(v, q)
    attend = functools.partial(plain_attention, causal=causal)
    return each_document(attend, q, k, v, scale, documents)


def each_document(
    attend,
    q,
    k,
    v,
    scale,
    documents,
):
    """Call attend(q, k, v, scale=) for each document alone. Return the outputs as one tensor."""
    if torch.is_tensor(scale):  # it may train: autograd differentiates this product
        check_scale(scale)
        q = (q * scale).type_as(q)
        scale = 1.0
    if documents is None or not q.numel():
        return attend(q, k, v, scale=scale)
    if not documents.shape == q.shape[::2] == k.shape[::2]:  # (B, S)
        raise ValueError(
            f"documents {tuple(documents.shape)}: one integer for each token, (B, S), and as many "
            f"tokens in q {tuple(q.shape)} as in k {tuple(k.shape)}"
        )
    outputs = []
    # split(), because in backward each slice would write zeros for the whole sequence.
    for ids, *sequence in zip(*(x.split(1) for x in (documents, q, k, v)), strict=True):
        lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(x.split(lengths, 2) for x in sequence), strict=True)
        outputs.append(torch.cat([attend(*part, scale=scale) for part in parts], 2))
    return torch.cat(outputs)


@torch.no_grad()
def flash_forward(
    q,
    k,
    v,
    causal=False,
    scale=None,
    dropout=None,
    block_size=128,
    kernel=None,
):
    """Return the output, and lse (B, H, S): each query's log of Σ e^score, in fp32 or float64.

    lse is -inf for a query that sees no key. `dropout` is a Dropout object or None.
    """
    check_inputs(q, k, v, causal, block_size)
    scale = softmax_scale(q, scale)
    if runs_kernels(kernel, q, v, dropout):
        return triton_forward(q, k, v, causal, scale)
    output, lse = run_loop(loop_forward, (q, k, v), causal, scale, dropout, block_size)
    return output.to(q.dtype), lse


@torch.no_grad()
def flash_backward(
    grad_output,
    q,
    k,
    v,
    output,
    lse,
    causal=False,
    scale=None,
    dropout=None,
    block_size=128,
    kernel=None,
):
    """Return the gradients of q, k and v. The options must be flash_forward's, Dropout included.

    If the keys are in parts, call this for each part, with its own `causal`, and with the `output`
    and `lse` over all keys. The gradient of q is the sum over the parts.
    """
    scale = softmax_scale(q, scale)
    if runs_kernels(kernel, q, v, dropout):
        return triton_backward(grad_output, q, k, v, output, lse, causal, scale)
    dq, dk, dv = run_loop(
        loop_backward, (grad_output, q, k, v, output, lse), causal, scale, dropout, block_size
    )
    return sum_heads(dq, q), sum_heads(dk, k), sum_heads(dv, v)


def run_loop(loop, tensors, *options):
    """Call the loop with tensors in fp32 or float64, with as many heads of k and v as of q.

    PyTorch's and amp.py's autocast do not apply, because they would compute in 16 bits.
    """
    like = tensors[0]  # q, or the gradient of the output
    dtype = torch.promote_types(like.dtype, torch.float32)
    # Contiguous, because otherwise each matrix product might copy its block first.
    wide = [repeat_heads(x.to(dtype).contiguous(), like) for x in tensors]
    with torch.autocast(like.device.type, enabled=False), torch._C.DisableTorchFunction():
        return loop(*wide, *options)


def repeat_heads(x, q):
    """Return a copy of a head of keys or values for each head of q."""
    G = q.shape[1] // x.shape[1]  # heads of q that share a head of x
    return x if G == 1 else x.repeat_interleave(G, 1)


def sum_heads(gradient, x):
    """Return the gradient of x, in its dtype, from the gradient of repeat_heads(x, q)."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)


class Dropout:
    """Draws the mask of a block from a seed of its own. Backward draws the mask again."""

    def __init__(self, p, device):
        if not 0 <= p < 1 or getattr(p, "requires_grad", False):
            raise ValueError(f"dropout_p={p}: must be in [0, 1), and gets no gradient")
        self.kept_share = 1 - p
        self.seed = torch.randint(2**63 - 1, (), device="cpu").item()  # of one call
        self.generator = torch.Generator(device)

    def mask(self, weights, rows, cols):
        """Return 0 or 1 / (1 - p) for each weight of a block."""
        self.generator.manual_seed(hash((self.seed, rows.start, cols.start)))
        kept = torch.empty_like(weights).bernoulli_(self.kept_share, generator=self.generator)
        return kept / self.kept_share


def merge(output_a, lse_a, output_b, lse_b):
    """Return the output and lse over two disjoint sets of keys, from those over each set.

    For more than two sets, pass outputs in fp32, because each merge rounds them.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)  # without -inf, because -inf - -inf is NaN
    weight_a = (lse_a - finite).exp()[..., None]
    weight_b = (lse_b - finite).exp()[..., None]
    output = output_a * weight_a + output_b * weight_b
    return output.to(output_a.dtype), lse


def check_scale(scale):
    if scale.ndim and scale.shape[-1] != 1:
        raise ValueError(f"scale {tuple(scale.shape)}: the last dimension must be 1, of queries")


def check_inputs(q, k, v, causal, block_size):
    if not isinstance(causal, bool):  # the fourth argument of PyTorch's function is a mask
        raise ValueError("causal must be True or False; other masks are not supported")
    # [::3] is B and D. v may have another D.
    if not q.ndim == k.ndim == 4 or q.shape[::3] != k.shape[::3] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: must be (B, H, S, D), "
            "(B, Hkv, Skv, D) and (B, Hkv, Skv, D)"
        )
    Hkv = k.shape[1]
    if not Hkv or q.shape[1] % Hkv:
        raise ValueError(
            f"q has {q.shape[1]} heads, which is not a multiple of the {Hkv} heads of k and v"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: must be one floating-point dtype")
    if block_size < 1:
        raise ValueError(f"{block_size=}: must be at least 1")


# --------------------------------------------------------------------------------------------------
# 4. The kernels: section 2 in Triton. Each of a kernel's programs computes the output or dq for one
#    block of queries of one head, or dk and dv for one block of keys. All values in its loop stay
#    on the chip. No two programs write to the same place, so each run gives the same results.
#
#    q, k, v and the others are pointers to the first element. b and h are the program's sequence
#    and head, `bh` numbers the heads of all sequences. HEAD is D rounded up to a power of 2 of at
#    least 16, as Triton's products need it. The columns from D on are zeros. Scores and m are
#    multiplied by log2 e, because GPUs compute powers of 2.
#
#    Each loop runs to `edge` without a mask and then, with masked = 1, over the blocks that the
#    diagonal or the end of the keys cuts. In dk_dv_kernel, the masked blocks end at `edge`. After
#    the last query, q, dO, L and delta are zeros, so they add nothing.


def jit(kernel):
    return triton.jit(kernel) if triton else kernel


COMPILER = shutil.which(os.environ.get("CC", "gcc"))  # Triton compiles its launchers with it
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton.jit reads it too
LOG2E = constexpr(1.4426950408889634)  # e^x is 2^(x log2 e)
LOWEST = constexpr(-1e38)  # finite, because -inf - -inf is NaN


@jit
def block_at(
    x,  # a head
    stride,  # from row to row
    start,  # of the block
    stop,  # of the head
    SIZE,  # of the block, in rows
    D,
    HEAD,
):
    """Return pointers to a block, (SIZE, HEAD), and which of them are inside the head."""
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, HEAD)[None, :]
    inside = (start + rows < stop) & (columns < D)
    x += tl.cast(start, tl.int64) * stride  # 32 bits may be too few
    return x + rows * stride + columns, inside


@jit
def load(
    x,
    stride,
    start,
    stop,
    SIZE,
    D,
    HEAD,
):
    """Return a block, with zeros outside the head."""
    pointers, inside = block_at(x, stride, start, stop, SIZE, D, HEAD)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def store(
    x,  # a head that is contiguous
    block,
    start,
    stop,
    SIZE,
    D,
    HEAD,
):
    pointers, inside = block_at(x, D, start, stop, SIZE, D, HEAD)
    tl.store(pointers, block, mask=inside)  # casts to the dtype of x


@jit
def load_lse(lse, rows, stop):
    """Return lse times log2 e. -inf becomes LOWEST."""
    L = tl.load(lse + rows, mask=rows < stop, other=0.0)
    return tl.maximum(L * LOG2E, LOWEST)


@jit
def dot(a, b):
    """Return a @ b, summed in fp32 and without TF32. a is cast to the dtype of b."""
    return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@jit
def program_head():
    """Return b, h and bh."""
    b = tl.program_id(2).to(tl.int64)  # 32 bits may be too few
    h = tl.program_id(1).to(tl.int64)
    return b, h, b * tl.num_programs(1) + h


@jit
def keys_seen(row, S, Skv, CAUSAL):
    """Return how many keys the query `row` sees."""
    return tl.minimum(Skv, tl.maximum(0, row + 1 + Skv - S)) if CAUSAL else Skv


@jit
def query_block(
    S,
    Skv,
    CAUSAL,
    ROWS,
    COLS,
):
    """Return this program's first query, its queries, how many keys each sees, edge and stop."""
    blocks_after = tl.num_programs(0) - 1 - tl.program_id(0)
    start = blocks_after * ROWS  # the last block runs first, because it may take longest
    rows = start + tl.arange(0, ROWS)
    seen = keys_seen(rows[:, None], S, Skv, CAUSAL)
    edge = keys_seen(start, S, Skv, CAUSAL) // COLS * COLS  # of the first query, to whole blocks
    stop = keys_seen(start + ROWS - 1, S, Skv, CAUSAL)  # of the last query
    return start, rows, seen, edge, stop


@jit
def block_scores(
    a,  # q_i, or k_j for the transpose
    b,  # k_j, or q_i
    cols,  # the keys in the block
    seen,  # how many keys each query sees
    scale,
    MASKED,
):
    """Return the scores of a block times log2 e, -inf for hidden keys."""
    scores = dot(a, tl.trans(b)) * (scale * LOG2E)
    return tl.where(cols < seen, scores, -float("inf")) if MASKED else scores


@jit
def add_keys(m, l, O, scores, v_j):
    m_new = tl.maximum(m, tl.max(scores, 1))
    correction = tl.exp2(m - m_new)
    exps = tl.exp2(scores - m_new[:, None])
    l = l * correction + tl.sum(exps, 1)
    O = O * correction[:, None] + dot(exps, v_j)
    return m_new, l, O


@jit
def forward_kernel(
    q, k, v,  # q is (B, H, S, D), k and v are (B, Hkv, Skv, D). Each row is contiguous
    output, lse,  # (B, H, S, D) and (B, H, S), contiguous
    q_b, q_h, q_s,  # strides of q
    k_b, k_h, k_s,
    v_b, v_h, v_s,
    G,  # H / Hkv
    S, Skv,
    scale,
    CAUSAL: constexpr,
    D: constexpr, HEAD: constexpr,
    ROWS: constexpr, COLS: constexpr,  # queries and keys in a block
):  # fmt: skip
    b, h, bh = program_head()
    start, rows, seen, edge, stop = query_block(S, Skv, CAUSAL, ROWS, COLS)
    q_i = load(q + b * q_b + h * q_h, q_s, start, S, ROWS, D, HEAD)
    k += b * k_b + h // G * k_h
    v += b * v_b + h // G * v_h
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    O = tl.zeros([ROWS, HEAD], tl.float32)
    for masked in tl.static_range(2):
        for j in range(edge if masked else 0, stop if masked else edge, COLS):
            cols = j + tl.arange(0, COLS)
            k_j = load(k, k_s, j, Skv, COLS, D, HEAD)
            v_j = load(v, v_s, j, Skv, COLS, D, HEAD)
            scores = block_scores(q_i, k_j, cols[None, :], seen, scale, masked)
            m, l, O = add_keys(m, l, O, scores, v_j)
    O /= tl.maximum(l, 1.0)[:, None]
    store(output + bh * S * D, O, start, S, ROWS, D, HEAD)
    tl.store(lse + bh * S + rows, (m + tl.log2(l)) / LOG2E, mask=rows < S)


@jit
def dq_kernel(
    q, k, v, dO, output, lse, delta, dq,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    G, S, Skv, scale,
    CAUSAL: constexpr, D: constexpr, HEAD: constexpr, ROWS: constexpr, COLS: constexpr,
):  # fmt: skip
    """Store dq, and delta for dk_dv_kernel."""
    b, h, bh = program_head()
    start, rows, seen, edge, stop = query_block(S, Skv, CAUSAL, ROWS, COLS)
    q_i = load(q + b * q_b + h * q_h, q_s, start, S, ROWS, D, HEAD)
    dO_i = load(dO + bh * S * D, D, start, S, ROWS, D, HEAD)
    O_i = load(output + bh * S * D, D, start, S, ROWS, D, HEAD)
    L_i = load_lse(lse + bh * S, rows, S)
    delta_i = tl.sum(dO_i.to(tl.float32) * O_i, 1)
    tl.store(delta + bh * S + rows, delta_i, mask=rows < S)
    k += b * k_b + h // G * k_h
    v += b * v_b + h // G * v_h
    dq_i = tl.zeros([ROWS, HEAD], tl.float32)
    for masked in tl.static_range(2):
        for j in range(edge if masked else 0, stop if masked else edge, COLS):
            cols = j + tl.arange(0, COLS)
            k_j = load(k, k_s, j, Skv, COLS, D, HEAD)
            v_j = load(v, v_s, j, Skv, COLS, D, HEAD)
            scores = block_scores(q_i, k_j, cols[None, :], seen, scale, masked)
            P = tl.exp2(scores - L_i[:, None])
            dP = dot(dO_i, tl.trans(v_j))
            dS = P * (dP - delta_i[:, None])
            dq_i += dot(dS, k_j)
    store(dq + bh * S * D, dq_i * scale, start, S, ROWS, D, HEAD)


@jit
def dk_dv_kernel(
    q, k, v, dO, lse, delta, dk, dv,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    G, S, Skv, scale,
    CAUSAL: constexpr, D: constexpr, HEAD: constexpr, COLS: constexpr, ROWS: constexpr,
):  # fmt: skip
    """Store dk and dv. The loop runs over queries. Scores are (keys, queries). q is not scaled."""
    b, h_kv, bh_kv = program_head()
    start = tl.program_id(0) * COLS
    cols = start + tl.arange(0, COLS)
    k_j = load(k + b * k_b + h_kv * k_h, k_s, start, Skv, COLS, D, HEAD)
    v_j = load(v + b * v_b + h_kv * v_h, v_s, start, Skv, COLS, D, HEAD)
    dk_j = tl.zeros([COLS, HEAD], tl.float32)
    dv_j = tl.zeros([COLS, HEAD], tl.float32)
    begin = tl.maximum(0, start + S - Skv) if CAUSAL else 0  # first query that sees key `start`
    edge = tl.minimum(S, begin + COLS) if CAUSAL else 0  # from here on, queries see the block
    for g in range(G):
        bh = bh_kv * G + g
        q_head = q + b * q_b + (h_kv * G + g) * q_h
        for masked in tl.static_range(2):
            for i in range(begin if masked else edge, edge if masked else S, ROWS):
                rows = i + tl.arange(0, ROWS)
                seen = keys_seen(rows[None, :], S, Skv, CAUSAL)
                q_i = load(q_head, q_s, i, S, ROWS, D, HEAD)
                dO_i = load(dO + bh * S * D, D, i, S, ROWS, D, HEAD)
                L_i = load_lse(lse + bh * S, rows, S)
                delta_i = tl.load(delta + bh * S + rows, mask=rows < S, other=0.0)
                scores = block_scores(k_j, q_i, cols[:, None], seen, scale, masked)
                P = tl.exp2(scores - L_i[None, :])
                dP = dot(v_j, tl.trans(dO_i))
                dS = P * (dP - delta_i[None, :])
                dv_j += dot(P, dO_i)
                dk_j += dot(dS, q_i)
    store(dk + bh_kv * Skv * D, dk_j * scale, start, Skv, COLS, D, HEAD)
    store(dv + bh_kv * Skv * D, dv_j, start, Skv, COLS, D, HEAD)


# For each kernel, in 16 bits: {largest HEAD: (block, step, num_warps, num_stages)}. A program has
# `block` rows, and its loop loads `step` rows at a time. dk_dv_kernel needs a `block` that is a
# multiple of `step`. All programs fit into 99 KB of shared memory.
BLOCKS = {
    forward_kernel: {64: (64, 64, 4, 3), 128: (64, 64, 4, 2)},
    dq_kernel: {64: (128, 64, 8, 3), 128: (64, 64, 4, 2)},
    dk_dv_kernel: {64: (128, 64, 4, 2), 128: (128, 32, 8, 2)},
}


def launch(
    kernel,
    blocked,
    causal,
    scale,
    *tensors,
):
    """Run a program for each block of `blocked`, which is q or k."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in tensors[:3])
    H, S, D = q.shape[1:]
    Hkv, Skv = k.shape[1:3]
    head_size = max(16, triton.next_power_of_2(D))
    blocks = BLOCKS[kernel][max(64, head_size)]  # smaller heads as 64
    if q.dtype == torch.float32:
        blocks = (32, 32, 8, 2)
    block, step, num_warps, num_stages = blocks
    batch, heads, num_rows = blocked.shape[:3]
    grid = (triton.cdiv(num_rows, block), heads, batch)
    with torch.cuda.device_of(q):
        kernel[grid](
            q, k, v, *tensors[3:],
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            H // Hkv,
            S, Skv,
            float(scale),
            causal,
            D, head_size,
            block, step,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=True,  # from Triton 3.10 on, the default is False
        )  # fmt: skip


def triton_forward(q, k, v, causal, scale):
    output = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    launch(forward_kernel, q, causal, scale, q, k, v, output, lse)
    return output, lse


def triton_backward(
    grad_output,
    q,
    k,
    v,
    output,
    lse,
    causal,
    scale,
):
    dO, O, L = (x.contiguous() for x in (grad_output, output, lse))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(L)
    launch(dq_kernel, q, causal, scale, q, k, v, dO, O, L, delta, dq)
    launch(dk_dv_kernel, k, causal, scale, q, k, v, dO, L, delta, dk, dv)
    return dq, dk, dv


def runs_kernels(kernel, q, v, dropout):
    """Return whether to run the kernels."""
    if kernel == "torch":
        return False
    obstacle = obstacle_to_kernels(q, v, dropout)
    if kernel is None:
        return q.is_cuda and not obstacle
    if obstacle:
        raise ValueError(f'{kernel=}: {obstacle}, or use kernel="torch"')
    return True


def obstacle_to_kernels(q, v, dropout):
    """Return why the kernels cannot run, or None."""
    if triton is None:
        return "Triton is missing; pip install triton"
    if q.is_cuda:
        if torch.version.hip or torch.cuda.get_device_capability(q.device) < (8, 0):
            return "the kernels need an NVIDIA GPU of compute capability 8.0 or newer"
        if not COMPILER:
            return "Triton needs a C compiler; install gcc, or set CC"
    elif not INTERPRETED:
        return f"q is on {q.device}; use a GPU, or set TRITON_INTERPRET=1 before the import"
    if dropout:
        return "the kernels have no dropout; leave it out"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels have no {q.dtype}; use float32"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter gives wrong results for bfloat16; use float32"
    if not q.shape[3] == v.shape[3] <= 128:
        return f"the kernels need one head size of at most 128, not {q.shape[3]} and {v.shape[3]}"
    return None


# --------------------------------------------------------------------------------------------------
# Demo.


def use(attention, model):
    """Make `model` call `attention` instead of F.scaled_dot_product_attention."""

    def replacement(q, k, v, is_causal):
        return attention(q, k, v, causal=is_causal)

    patch = mock.patch.object(F, "scaled_dot_product_attention", replacement)
    model.forward = patch(model.forward)


def main():
    demo = Demo(__doc__)
    model = demo.start("flash_attention")  # in float64, so it runs the loop
    ours = online_attention if demo.args.idea else flash_attention
    use(functools.partial(ours, block_size=24), model)
    use(naive_attention, demo.model)
    demo.show(f"The ranks use {ours.__name__} with blocks of 24 tokens on sequences of 64.")
    demo.show("One device uses naive_attention.")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        for parameter in parameters:  # data parallelism; attention itself sends nothing
            parameter.grad /= demo.ranks
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    demo.train(step, lambda: ([parameter.grad for parameter in parameters], parameters))
    sent = 2 * held_bytes(parameters) * (demo.ranks - 1) / demo.ranks
    return demo.report(held(parameters, optimizer), "2Ψ(N-1)/N", sent)


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


class Demo:
    """Trains with a technique, trains the same model on one device, and compares the two."""

    def __init__(self, description, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dtypes = ["float64", "float32", "bfloat16"]
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.error = self.stop
        shared = {
            "--idea": {"action": "store_true", "help": "train with section 1 alone"},
            "--steps": {"type": int, "default": steps, "help": "of training"},
            "--seed": {"type": int, "default": 0, "help": "of the model and the batches"},
            "--device": {"choices": devices, "default": devices[-1]},
            "--dtype": {"choices": dtypes, "help": "(default: that of the claim)"},
            "--data": {"metavar": "FILE", "default": argparse.__file__, "help": "to train on"},
        }
        for flag, options in (shared | (flags or {})).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.steps = f"{self.args.steps} step{'s' * (self.args.steps > 1)}"
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        gpu = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        self.device = torch.device("cpu" if self.args.device == "cpu" else f"cuda:{gpu}")
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        """End with status 2. Every rank finds the same error, so one per machine prints it."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr, flush=True)
            # torchrun ends its own report with the message in this file.
            error = json.dumps({"message": f"error: {message}", "timestamp": time.time()})
            Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).write_text(error)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends
        os._exit(2)

    def show(self, line=""):
        if self.rank == 0:
            print(line, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Return a copy of the plain model. One device takes the batch in `parts`."""
        join_world(self.device)
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        dtype = "float64" if self.tolerance else "float32"
        if self.args.dtype not in (None, dtype, "float64"):
            self.tolerance = torch.inf  # claims nothing
        dtype = self.args.dtype or dtype
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        name += " idea" if self.args.idea else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        where = f"{self.device.type}/{dist.get_backend()}"
        size = sum(map(torch.numel, self.model.parameters())) / 1e6
        self.show(f"{name} · {ranks} · {where} · {size:.1f}M parameters in {dtype} · {self.steps}")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def train(self, step, whole):
        """Compare gradients and parameters, `whole()`, after each step(inputs, targets) -> loss."""
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = []  # the largest of each tensor, in each step
        for number in range(self.args.steps):
            batch = self.batch(number)
            start = self.now()
            is_last = number + 1 == self.args.steps
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            loss = torch.tensor([x for x in losses if x is not None], dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                self.differences.append((ours - theirs).abs().max().item())
            if number % -(-self.args.steps // 3) == 0:  # three lines in all
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss.item():.3f}")

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            losses.append(language_loss(self.model(x), y))
            losses[-1].backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_div_(gradients, self.parts)  # 3 parts would round differently before the sum
        self.optimizer.step()
        return [torch.stack(losses).mean().detach().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def report(self, held_here, formula, sent):
        """Print the result (docs/running.md). Return 1 if a rank differs."""
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        elif self.tolerance == torch.inf:
            verdict = f"differ by up to {largest:.0e}"
        plain = held(self.model.parameters(), self.optimizer)
        params, grads, state, *plain = (f"{size / 1e6:.1f}" for size in [*held_here, *plain])
        held_line = f"params {params} MB   grads {grads} MB   optimizer {state} MB"
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device loss, gradients and parameters {verdict} over {self.steps}")
        self.show(f"held/rank   {held_line}      (1 device: {' / '.join(plain)})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.head_dim = C // heads
        self.norm1 = nn.LayerNorm(C)
        self.norm2 = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)
        self.linear1 = nn.Linear(C, 4 * C)
        self.linear2 = nn.Linear(4 * C, C)

    def forward(self, x):  # (batch, time, C)
        q, k, v = map(self.split_heads, self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))

    def split_heads(self, x):  # (batch, time, C) to (batch, heads, time, head_dim)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def language_model(C=192, heads=6, layers=4, V=256):
    blocks = [Block(C, heads) for _ in range(layers)]
    # No position embedding: the causal mask alone tells positions apart.
    return nn.Sequential(nn.Embedding(V, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends. Collectives count as their ring algorithms send."""

    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_uneven = name == "alltoall_base_" and args[4]  # such exchanges do not count
        if name == "send":
            self.total += args[0][0].nbytes
        elif "c10d" in func.namespace and name != "recv_" and not is_uneven:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            N = dist.ProcessGroup.unbox(group).size()
            inputs = args[0] if args[1] is group else args[1]  # outputs may come first
            # How often the inputs go around the ring. An operator that is not named counts once.
            rounds = {"allreduce_": 2, "allgather_": N, "_allgather_base_": N}.get(name, 1)
            size = sum(tensor.nbytes for tensor in tree_leaves(inputs))
            self.total += rounds * size * (N - 1) / N
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def join_world(device):
    """Connect the ranks, unless they are connected: by NCCL if each has a GPU of its own."""
    if dist.is_initialized():
        return
    options = {"backend": "gloo", "timeout": timedelta(seconds=120)}
    world = dist.HashStore(), 0, 1  # without torchrun there is one rank
    if "RANK" in os.environ:
        world = next(dist.rendezvous("env://", timeout=options["timeout"]))
    store, rank, ranks = world
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A rank may see no GPU but its own, so only its UUID says whether another rank has it, too.
        store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(device).uuid))
        gpus = {store.get(f"gpu {number}") for number in range(ranks)}
        if len(gpus) == ranks or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            options |= {"backend": "nccl", "device_id": device}
            os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # torch 2.7 may hang
    dist.init_process_group(store=store, rank=rank, world_size=ranks, **options)


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

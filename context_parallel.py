"""Context parallelism: N ranks share every sequence, so that it can be N times as long.

Each rank runs all layers on its part of each sequence. Only attention needs the other ranks,
because a query attends to keys of the whole sequence. Ring attention passes keys and values around
a ring of ranks. Ulysses exchanges tensors, so that each rank has the whole sequence for 1/N of the
heads. After backward, the caller sums the gradients of the weights over the ranks.

Ring attention with N = 4, seen from rank 1. Its queries q1 stay. Blocks of keys and values, kv, go
around. While the rank computes with one, it receives the next:

    time           ───────────────────────────────────────────────────────────▶
    computes       q1 × kv1       q1 × kv0       q1 × kv3       q1 × kv2
    sends to 2     kv1            kv0            kv3
    gets from 0    kv0            kv3            kv2

Under a causal mask, queries do not see later keys. With the r-th of N parts, rank r would compute
r + 1 blocks, and all ranks would wait for the last one. Zigzag cuts the sequence into 2N chunks and
gives rank r the chunks r and 2N-1-r, so all ranks compute equally much:

    chunk    0   1   2   3   4   5   6   7
    rank     0   1   2   3   3   2   1   0

Cost per rank, layer and step, in elements, for H heads of queries and K of keys. One head of a
rank's part has u = batch · S/N · D elements (S: the length of the whole sequence, D: head size).

                 sent in forward           sent in backward       kept for backward
    one device   0                         0                      (2H + 2K)·N·u + lse
    ring         2K·u(N-1)                 4K·u(N-1)              (2H + 2K)·u + lse
    Ulysses      (2H' + 2K')·u(N-1)/N      (2H' + 2K')·u(N-1)/N   (2H' + 2K')·u + lse

lse is the log-sum-exp of a query's scores, one number in fp32 for D elements of the output. Half of
what the ring sends in backward are gradients, always in fp32. Ulysses needs equally many heads on
all ranks. So it copies key heads until there are K' = lcm(K, N), and adds query heads of zeros
until there are H', the next multiple of K'. The first call with given shapes, dtypes and options
also sends a few hundred bytes, to check that the ranks agree.

Each rank sums the loss of its part, and divides by the labels of the whole sequence. A mean over a
part would weigh tokens differently if ranks have unequal numbers of unmasked labels:

    logits = model(split_sequence(tokens))      # (batch, S/N, words), with ring_attention inside
    own = split_sequence(labels)                # shifted before, and -100 where they do not count
    total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    loss = total / (labels != -100).sum()       # the ranks' losses add up, as their gradients do

Read section 1 for the idea (14 minutes), to section 5 for the technique (48), and the rest to use
it as a library (55).

Run:      torchrun --nproc-per-node 2 context_parallel.py
Papers:   Liu et al. 2023, Ring Attention, arXiv 2310.01889; Llama 3, 2407.21783, §3.3.2 (zigzag);
          Jacobs et al. 2023, DeepSpeed-Ulysses, 2309.14509
Mirrors:  torch.distributed.tensor.experimental.context_parallel; DeepSpeed's DistributedAttention
Left out: dropout; masks other than the causal one and documents; gradients of gradients;
          float64 on a GPU, which has no such kernel: blocks are computed on the CPU; on
          a GPU, head sizes that are no multiple of 8
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import json
import math
import os
import signal
import sys
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
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
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten

# --------------------------------------------------------------------------------------------------
# 1. The idea: pass the keys around a ring. Rank r holds the r-th of N parts of the sequence. q is
#    (B, H, S/N, D), and k and v are (B, K, S/N, D).


def rank_and_size(process_group):
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in process_group; call this on its members"
        )
    return rank, dist.get_world_size(process_group)


def device_to_send_from(device, process_group):
    """Gloo sends from the host's memory, NCCL from the GPU's."""
    is_gloo = f"{device.type}:gloo" in dist.get_backend_config(process_group)
    return torch.device("cpu") if is_gloo else device


class Exchange:
    """Sends a block to the rank `step` further on the ring, and receives one from behind."""

    def __init__(self, block, process_group, step=1):
        rank, world_size = rank_and_size(process_group)
        self.device = block.device
        block = block.to(device_to_send_from(block.device, process_group))
        self.block = block.contiguous()  # must not change, or be freed, before wait()
        self.received = torch.empty_like(self.block)
        message = partial(dist.P2POp, group=process_group)
        send = message(dist.isend, self.block, group_peer=(rank + step) % world_size)
        recv = message(dist.irecv, self.received, group_peer=(rank - step) % world_size)
        self.works = dist.batch_isend_irecv([send, recv])  # one for each, or one for both

    def wait(self):
        for work in self.works:
            work.wait()
        return self.received.to(self.device)


class Shift(torch.autograd.Function):
    """Send a block to the next rank. Its gradient comes back from there."""

    @staticmethod
    def forward(ctx, block, process_group):
        ctx.process_group = process_group
        return Exchange(block, process_group).wait()

    @staticmethod
    def backward(ctx, grad):
        return Exchange(grad, ctx.process_group, step=-1).wait(), None


def naive_ring_attention(q, k, v, causal=False, process_group=None):
    """Attend to one block of keys after the other. Weight the results by Σ exp(score) of each."""
    rank, world_size = rank_and_size(process_group)
    block = torch.stack([k, v])
    outputs = []
    lses = []  # log-sum-exp: log Σ exp(score)
    for step in range(world_size):
        k, v = share_heads(block, q)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        # Query i is token rank · S/N + i of the whole sequence, and key j is owner · S/N + j.
        if causal:  # hide the keys that are later in the whole sequence than the query
            owner = (rank - step) % world_size
            later = torch.ones_like(scores).triu((rank - owner) * q.shape[2] + 1)
            scores = scores.masked_fill(later.bool(), torch.finfo(scores.dtype).min)
        outputs.append(scores.softmax(-1) @ v)
        lses.append(scores.logsumexp(-1, keepdim=True))
        if step < world_size - 1:
            block = Shift.apply(block, process_group)
    shares = torch.stack(lses).softmax(0)
    return (shares * torch.stack(outputs)).sum(0)


def share_heads(kv, q):
    """Return k and v with the heads of q: consecutive heads of queries share one of keys.

    kv is k and v in one tensor, (2, B, K, S/N, D).
    """
    copies = q.shape[1] // kv.shape[2]
    return kv if copies == 1 else kv.repeat_interleave(copies, dim=2)


# --------------------------------------------------------------------------------------------------
# 2. Which rank has which tokens.


def to_parts(whole, dim, world_size, zigzag):
    """Cut the whole sequence into the parts of rank 0, of rank 1, and so on."""
    if not zigzag:
        return whole.chunk(world_size, dim)
    chunks = whole.chunk(2 * world_size, dim)
    return [torch.cat([chunks[rank], chunks[-1 - rank]], dim) for rank in range(world_size)]


def to_sequence(parts, dim, zigzag):
    """The inverse of to_parts()."""
    if zigzag:
        chunks = [chunk for part in parts for chunk in part.chunk(2, dim)]
        # Each rank's first chunk, in order, then each rank's second chunk, from the last rank on.
        parts = chunks[::2] + chunks[::-2]
    return torch.cat(parts, dim)


def split_sequence(x, dim=1, process_group=None, zigzag=True):
    """Return this rank's part of the sequence along `dim`. Every rank passes the whole `x`.

    Shift the labels before the split: the next token may be on another rank.
    """
    rank, world_size = rank_and_size(process_group)
    check_length(x.shape[dim], world_size, zigzag)
    parts = to_parts(x, dim, world_size, zigzag)
    return parts[rank].clone()  # a view would keep the whole sequence in memory


def positions(length, process_group=None, zigzag=True):
    """Return where this rank's tokens are in the whole sequence, which has `length` tokens."""
    return split_sequence(torch.arange(length), 0, process_group, zigzag)


# --------------------------------------------------------------------------------------------------
# 3. One block of keys. A kernel of PyTorch attends to it, and merge() joins the results of blocks.


def attend(q, k, v, is_causal, scale):
    """Return the output, its log-sum-exp (B, H, S), and what else the kernel's backward takes."""
    how = {"is_causal": is_causal, "scale": scale}
    if q.is_cuda and q.element_size() == 2:
        results = aten._scaled_dot_product_flash_attention(q, k, v, **how)
        return results[0], results[1], results[6:8]
    if q.is_cuda and q.element_size() == 4:
        results = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, **how)
        lse = results[1][..., : q.shape[2]]  # the kernel pads its queries
        return results[0], lse, results[2:]
    # No kernel for GPUs takes float64. From 16 bits, results would be rounded before the merge.
    dtype = torch.promote_types(q.dtype, torch.float32)
    inputs = [x.to("cpu", dtype) for x in (q, k, v)]
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, **how)
    return output.to(q.device), lse.to(q.device), ()


def merge(output, lse, other_output, other_lse):
    """Merge the attention to other keys into `output` and `lse`, in place.

    Each output is weighted by its share of Σ exp(score) over the keys of both.
    """
    total = torch.logaddexp(lse, other_lse)
    output *= (lse - total).exp()[..., None]
    output += (other_lse - total).exp()[..., None] * other_output
    lse.copy_(total)


def attend_backward(grad_output, q, output, lse, k, v, state, is_causal, scale):
    """Return the gradients of q, k and v. `output` and `lse` are those over the keys of all ranks.

    The weight of a score is exp(score - lse). So a block's gradients need no other block.
    """
    inputs = [grad_output, q, k, v, output, lse.contiguous()]
    if q.is_cuda and q.element_size() == 2:
        sizes = (q.shape[2], k.shape[2])
        return aten._scaled_dot_product_flash_attention_backward(
            *inputs, None, None, *sizes, 0.0, is_causal, *state, scale=scale
        )
    if q.is_cuda and q.element_size() == 4:
        padding = -lse.shape[2] % 32  # as the kernel's forward pads it
        inputs[5] = F.pad(lse, (0, padding), value=math.inf)
        inputs.insert(4, None)  # a mask
        wanted = [True, True, True, False]  # no gradient of the mask
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            *inputs, *state, 0.0, wanted, is_causal, scale=scale
        )
        return gradients[:3]
    inputs = [x.to("cpu", lse.dtype) for x in inputs]
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, 0.0, is_causal, scale=scale
    )
    return [x.to(q.device) for x in gradients]


# --------------------------------------------------------------------------------------------------
# 4. The ring: which blocks come to a rank, which of their keys its queries see, and who adds up the
# gradients.


def ring_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    process_group=None,
    zigzag=True,
    documents=None,
):
    """Return the attention of this rank's queries to the keys of all ranks, in the shape of q.

    q is (B, H, S/N, D). k and v are (B, K, S/N, D), and H is a multiple of K. The tokens must be
    those that split_sequence gives this rank with the same `zigzag`. Otherwise the causal mask
    hides the wrong keys, without an error.

    documents: integers (B, S), the same on all ranks, if documents are packed into the sequences. A
    document ends where the number changes, and is computed as if it were alone. Zigzag balances one
    document only: if a sequence of 64k tokens has documents of 1k to 16k, the slowest of 8 ranks
    computes 1.6 to 1.9 times the mean, and without zigzag 1.8 to 2.3 times.

    All ranks must call this, and then backward. See check_call().
    """
    check_attention("ring_attention", q, k, v, causal, scale, process_group, zigzag, documents)
    if documents is not None:
        documents = lengths_of(documents)
    options = (process_group, causal, zigzag, documents)
    return RingAttention.apply(q, torch.stack([k, v]), scale, options)


def lengths_of(documents):
    """Return [(a sequence, its documents' lengths)]. A document ends where the number changes."""
    found = []
    for number, ids in enumerate(documents):
        _, lengths = ids.unique_consecutive(return_counts=True)
        found.append((slice(number, number + 1), lengths.tolist()))
    return found


def blocks(kv, process_group, *options):
    """Yield the keys and values of this rank, of the previous one, and so on, each with tiles()."""
    rank, world_size = rank_and_size(process_group)
    for step in range(world_size):
        owner = (rank - step) % world_size
        if step < world_size - 1:  # while the caller computes with a block, the next one arrives
            exchange = Exchange(kv, process_group)
        yield kv, tiles(kv, owner, rank, world_size, *options)
        if step < world_size - 1:
            kv = exchange.wait()


def tiles(
    kv,
    owner,
    rank,
    world_size,
    causal,
    zigzag,
    documents,
):
    """Yield (sequences, queries, keys, is_diagonal), a tile of each document that both ranks have.

    These queries see all of these keys. But in a diagonal tile, query i sees the keys 0 to i, also
    with zigzag: a rank's two chunks are in the order of the whole sequence.
    """
    num_tokens = kv.shape[3] if kv.numel() else 0
    size = num_tokens // 2 if zigzag else num_tokens  # of a chunk
    # All queries see the first chunk of an earlier part, and none sees the second. The first chunk
    # of queries sees no key of a later part, and the second sees all. Without zigzag, a part is one
    # chunk: all queries see all keys of an earlier part, and none of a later one.
    end = size if causal and owner < rank else num_tokens
    first = size if causal and owner > rank else 0
    before = partial(count_before, size, world_size, zigzag)
    one_document = [(slice(None), [num_tokens * world_size])]
    for sequences, lengths in documents or one_document:
        for start, stop in pairwise([0, *accumulate(lengths)]):
            rows = slice(max(first, before(start, rank)), before(stop, rank))
            cols = slice(before(start, owner), min(end, before(stop, owner)))
            if rows.start < rows.stop and cols.start < cols.stop:
                yield sequences, rows, cols, owner == rank and causal


def count_before(size, world_size, zigzag, position, rank):
    """Return how many tokens of the rank are before this position of the whole sequence."""
    chunks = [rank]
    if zigzag:
        chunks.append(2 * world_size - 1 - rank)
    return sum(min(max(0, position - chunk * size), size) for chunk in chunks)


class RingAttention(torch.autograd.Function):
    """Keeps only this rank's q, kv, output and lse. Backward passes the blocks around again.

    The gradient of a block follows it around the ring, one exchange later. Each rank adds its part
    to the sum that it receives. The last exchange brings the sum to the owner of the block, which
    adds its own part. For rank 0 of 4:

        step                         0       1       2        3
        computes with                kv0     kv3     kv2      kv1
        sends the gradient of                kv3     kv2      kv1
        with the parts of ranks              0       3, 0     2, 3, 0
    """

    @staticmethod
    def forward(ctx, q, kv, scale, options):
        dtype = torch.promote_types(q.dtype, torch.float32)
        output = torch.zeros_like(q, dtype=dtype)
        lse = torch.full_like(output[..., 0], -math.inf)
        for block, tiles in blocks(kv, *options):
            for sequences, rows, cols, is_diagonal in tiles:
                q_rows = q[sequences, :, rows]
                k, v = share_heads(block[:, sequences, :, cols], q)
                # state, the seeds of dropout, may be those of any tile: dropout is left out.
                tile_output, tile_lse, ctx.state = attend(q_rows, k, v, is_diagonal, scale)
                merge(output[sequences, :, rows], lse[sequences, :, rows], tile_output, tile_lse)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, kv, output, lse)
        ctx.options = (scale, options)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # under create_graph=True
            raise RuntimeError(
                "gradients of gradients are left out; use ulysses_attention with SDPBackend.MATH"
            )
        q, kv, output, lse = ctx.saved_tensors
        scale, options = ctx.options
        process_group = options[0]
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        own_grad = None
        exchange = None
        for block, tiles in blocks(kv, *options):  # again, in the same order
            grad = torch.zeros_like(kv, dtype=lse.dtype)
            for sequences, rows, cols, is_diagonal in tiles:
                of_rows = [x[sequences, :, rows] for x in (grad_output, q, output, lse)]
                k, v = share_heads(block[:, sequences, :, cols], q)
                gradients = attend_backward(*of_rows, k, v, ctx.state, is_diagonal, scale)
                grad_q[sequences, :, rows] += gradients[0]
                grad_kv = torch.stack(gradients[1:])
                of_heads = grad_kv.unflatten(2, (kv.shape[2], -1))  # those that share one of keys
                grad[:, sequences, :, cols] = of_heads.sum(3, dtype=lse.dtype)
            if own_grad is None:  # the first block is this rank's own
                own_grad = grad
                continue
            if exchange:
                grad += exchange.wait()
            exchange = Exchange(grad, process_group)
        if exchange:
            own_grad += exchange.wait()
        return grad_q, own_grad, None, None  # autograd rounds to the inputs' dtypes


# --------------------------------------------------------------------------------------------------
# 5. Ulysses: swap a part of the sequence for a part of the heads, and back.


class AllToAll(torch.autograd.Function):
    """Rank i's x[j] becomes rank j's output[i]. The gradient of output[i] goes back to rank i."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        x = x.contiguous()
        output = torch.empty_like(x)
        dist.all_to_all_single(output, x, group=process_group)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return AllToAll.apply(grad_output, ctx.process_group), None


def swap(parts, process_group):
    """Send parts[i] to rank i. Return what the ranks sent here."""
    return AllToAll.apply(torch.stack(parts), process_group).unbind()


def local_attention(q, k, v, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def naive_ulysses_attention(
    q, k, v, causal=False, process_group=None, zigzag=False, attention=local_attention
):
    """Attend over the whole sequence with 1/N of the heads. N must divide H and K."""
    _, N = rank_and_size(process_group)
    whole = []
    for x in (q, k, v):
        parts = swap(x.chunk(N, 1), process_group)
        whole.append(to_sequence(parts, 2, zigzag))
    output = attention(*whole, causal=causal)
    parts = to_parts(output, 2, N, zigzag)
    return torch.cat(swap(parts, process_group), 1)


def ulysses_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    process_group=None,
    zigzag=True,
    attention=local_attention,
    documents=None,
):
    """Return what ring_attention returns. `attention(q, k, v, causal=, scale=)` computes it.

    `attention` gets whole sequences, and 1/N of the heads. The default is PyTorch's function.
    """
    check_attention("ulysses_attention", q, k, v, causal, scale, process_group, zigzag, documents)
    N = dist.get_world_size(process_group)
    K = k.shape[1]
    G = q.shape[1] // K  # heads of queries that share a head of keys
    # N must divide the number of key heads, so each becomes `copies` heads. Each copy serves an
    # equal share of the G query heads. If `copies` does not divide G, heads of zeros are added.
    # With N = 4, K = 2 and G = 3: 2 copies, 1 head of zeros; so 4 heads of keys and 8 of queries.
    copies = N // math.gcd(N, K)
    padding = -G % copies
    grouped = q.unflatten(1, (K, G))
    q = F.pad(grouped, (0, 0, 0, 0, 0, padding)).flatten(1, 2)  # pads G, dimension 2
    k = k.repeat_interleave(copies, dim=1)
    v = v.repeat_interleave(copies, dim=1)
    attention = partial(attention, scale=scale)
    if documents is not None and q.numel():
        attention = partial(each_document, attention, lengths_of(documents))
    output = naive_ulysses_attention(q, k, v, causal, process_group, zigzag, attention)
    return output.unflatten(1, (K, -1))[:, :, :G].flatten(1, 2)


def each_document(attention, documents, *qkv, causal):
    """Call attention(q, k, v, causal=) for each document alone. Return the outputs as one tensor.

    split(), because in backward each slice would write zeros for the whole sequence.
    """
    outputs = []
    for (_, lengths), *sequence in zip(documents, *(x.split(1) for x in qkv), strict=True):
        parts = zip(*(x.split(lengths, 2) for x in sequence), strict=True)
        outputs += [torch.cat([attention(*part, causal=causal) for part in parts], 2)]
    return torch.cat(outputs)


# --------------------------------------------------------------------------------------------------
# 6. The library: join a sequence, and raise an error if ranks disagree.


def join_sequence(x, dim=1, process_group=None, zigzag=True):
    """Return the whole sequence on every rank. Its gradient is the sum of the ranks' gradients."""
    _, N = rank_and_size(process_group)
    check_call(f"join_sequence({describe(x)}, dim={dim}, zigzag={zigzag})", process_group)
    check_length(N * x.shape[dim], N, zigzag)
    copies = x.expand(N, *x.shape)  # one for each rank; backward adds up their gradients
    parts = AllToAll.apply(copies, process_group)
    return to_sequence(parts.unbind(), dim, zigzag)


def describe(x):
    text = f"{tuple(x.shape)} of {x.dtype}"
    if x.requires_grad and torch.is_grad_enabled():
        text += " with gradient"  # backward communicates: either all ranks run it, or none
    return text


agreed = weakref.WeakKeyDictionary()  # process group: the calls that all its ranks have made


def check_call(call, process_group):
    """Raise ValueError on all ranks unless all make the same call. Each call is checked once.

    So it does not find that some ranks repeat an earlier call while others make a new one. These
    wait until the timeout of the process group, or exchange the wrong tensors.
    """
    known = agreed.setdefault(process_group or dist.group.WORLD, set())
    if call not in known:
        check_same_on_all_ranks("call", [call], process_group)
        known.add(call)


def check_same_on_all_ranks(what, facts, process_group=None):
    """Raise ValueError on all ranks of the group unless they give the same `facts`, in order.

    Collectives of different sizes or dtypes abort the process or return garbage, so the ranks
    compare what they are about to communicate. What only one rank finds wrong is a fact, too.
    """
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group")
    mine = [f"{number}: {fact}" for number, fact in enumerate(facts)]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            here = sorted(set(theirs).difference(everyone[0]))
            there = sorted(set(everyone[0]).difference(theirs))
            raise ValueError(
                f"all ranks must have the same {what}: rank {rank} has {here}, rank 0 {there}"
            )


def check_attention(
    function,
    q,
    k,
    v,
    causal,
    scale,
    process_group,
    zigzag,
    documents,
):
    """Raise ValueError on all ranks if the inputs do not fit, or differ between ranks."""
    _, N = rank_and_size(process_group)
    ids = getattr(documents, "shape", documents)
    inputs = f"q {describe(q)}, k {describe(k)}, v {describe(v)}, documents {ids}"
    call = f"{function}({inputs}, causal={causal}, scale={scale}, zigzag={zigzag})"
    check_call(call, process_group)
    fits = (
        q.dim() == 4
        and k.shape == v.shape == (q.shape[0], k.shape[1], *q.shape[2:])
        and q.shape[1] % k.shape[1] == 0
        and q.dtype == k.dtype == v.dtype
        and q.is_floating_point()
        and isinstance(causal, bool)  # PyTorch's function takes a mask in its place
        and (documents is None or documents.shape == (q.shape[0], N * q.shape[2]))
    )
    if not fits:
        raise ValueError(
            "q must be (B, H, S/N, D), k and v (B, K, S/N, D), H a multiple of K, all of the same "
            "floating-point dtype, causal True or False, and documents (B, S), of the whole "
            f"sequence, but this is {call}"
        )
    check_length(N * q.shape[2], N, zigzag)
    check_scale(scale)


def check_scale(scale):
    if torch.is_tensor(scale) and (scale.requires_grad or scale.numel() > 1):
        raise ValueError(
            "scale is a number, and gets no gradient; multiply q by a tensor, and give scale=1.0"
        )


def check_length(length, world_size, zigzag):
    num_chunks = 2 * world_size if zigzag else world_size
    if length % num_chunks:
        raise ValueError(
            f"a sequence of {length} does not divide into {num_chunks} chunks ({world_size} ranks, "
            f"zigzag={zigzag}); pad it to a multiple of {num_chunks}"
        )


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo(__doc__)
    N = demo.ranks
    if 64 % (2 * N):
        demo.stop(f"64 tokens do not divide into 2 · {N} chunks; use 1, 2, 4, 8, 16 or 32 ranks")
    model = demo.start("context_parallel", parts=1)
    attention = naive_ring_attention if demo.args.idea else ring_attention
    zigzag = not demo.args.idea  # section 1 has contiguous parts
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):  # whole sequences; targets are already shifted
        optimizer.zero_grad()
        with attention_is(attention):
            logits = model(split_sequence(inputs, zigzag=zigzag))
        own_targets = split_sequence(targets, zigzag=zigzag)
        total = F.cross_entropy(logits.flatten(0, 1), own_targets.flatten(), reduction="sum")
        # Divide by the tokens of all ranks: the losses of the ranks add up to that of the batch.
        loss = total / targets.numel()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss * N  # because the demo takes the mean over ranks

    def whole():
        return [parameter.grad for parameter in model.parameters()], model.parameters()

    demo.train(step, whole)
    psi = held_bytes(model.parameters())
    layers, K, D = 4, 6, 32
    u = 8 * 64 * D  # elements: 8N sequences, and a rank has 64/N tokens of each
    factor = 4 if demo.args.idea else 6  # the idea sends gradients alone in backward, no keys
    itemsize = next(model.parameters()).element_size()
    sent = layers * factor * K * u * itemsize * (N - 1) + 2 * psi * (N - 1) / N
    formula = f"layers · {factor}K·u(N-1) + 2Ψ(N-1)/N"
    status = demo.report(held(model.parameters(), optimizer), formula, sent)
    show_costs(demo)
    return status


def attention_is(attention):
    """In this context, F.scaled_dot_product_attention calls `attention`, in all modules."""

    def replacement(q, k, v, is_causal):
        return attention(q, k, v, causal=is_causal)

    return mock.patch.object(F, "scaled_dot_product_attention", replacement)


def show_costs(demo):
    """Forward and backward of one causal layer at growing lengths, in fp32."""
    N = demo.ranks
    H, K, D = 4, 2, 32
    copies = N // math.gcd(N, K)
    K_padded = K * copies
    H_padded = K * math.ceil(H / K / copies) * copies
    ways = {  # (attention, its options, elements sent / u)
        "ring, section 1": (naive_ring_attention, {}, 4 * K * (N - 1)),
        "ring, contiguous": (ring_attention, {"zigzag": False}, 6 * K * (N - 1)),
        "ring, zigzag": (ring_attention, {"zigzag": True}, 6 * K * (N - 1)),
        "Ulysses, zigzag": (ulysses_attention, {}, 4 * (H_padded + K_padded) * (N - 1) / N),
    }
    demo.show("\nForward and backward of one causal attention layer in fp32,")
    demo.show(f"with {H} query heads and {K} key heads of size {D}")
    demo.show("kept      bytes that a rank keeps for backward")
    demo.show("sent      bytes that a rank sends; formula: as the docstring predicts them")
    demo.show("work      10⁹ operations: of rank 0, of rank 1, …")
    demo.show(f"{'tokens':>6}  {'':16} {'kept':>9} {'sent':>9} {'formula':>9}   work")
    shortest = 512 // (2 * N) * 2 * N  # 2N chunks
    for length in (shortest, 2 * shortest, 4 * shortest):
        for name, (attention, options, sent) in ways.items():
            sizes = (H, K, length, D)
            kept, measured, operations = measure(demo, partial(attention, **options), sizes)
            formula = 4 * (length // N) * D * sent
            work = " ".join(f"{count / 1e9:.2f}" for count in operations)
            megabytes = " ".join(f"{size / 1e6:6.2f} MB" for size in (kept, measured, formula))
            demo.show(f"{length:6}  {name:16} {megabytes}   {work}")


def operations_forward(q, k, v, dropout_p=0.0, is_causal=False, **options):
    """Of PyTorch's kernel for CPUs, which FlopCounterMode does not know. q, k and v are shapes."""
    B, H, S, D = q
    products = 4 * B * H * S * k[2] * D
    return products / 2 if is_causal else products


def operations_backward(grad, q, k, v, output, lse, dropout_p, is_causal, **options):
    return 2.5 * operations_forward(q, k, v, is_causal=is_causal)


def measure(demo, attention, sizes):
    """Bytes kept for backward, bytes sent, and the operations of each rank."""
    H, K, length, D = sizes
    shapes = [(1, heads, length // demo.ranks, D) for heads in (H, K, K)]
    q, k, v = (torch.randn(shape, device=demo.device, requires_grad=True) for shape in shapes)
    attention(q, k, v, causal=True)  # the ranks check that they agree
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: operations_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: operations_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as flops, SentBytes() as sent:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = attention(q, k, v, causal=True)
        output.sum().backward()
    operations = [None] * demo.ranks
    dist.all_gather_object(operations, flops.get_total_flops())
    return held_bytes(saved), sent.total, operations


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

"""Context parallelism: a sequence that is too long for one rank is split over N ranks, in every layer.

In a step each rank runs all layers on its own tokens. Only attention needs the tokens of other
ranks: a query attends to all keys before it. Ring attention sends the keys and values around a ring
of ranks; Ulysses exchanges split sequences for split heads. Gradients of the weights are then
summed over ranks, as in data parallelism.

Ring attention with N = 4, rank 0: own queries stay, blocks of keys and values (kv) pass through.
While the rank computes with one block, the next one is on its way:

    time        ──────────────────────────────────────────────────────────────────────▶
    computes    q0 × kv0          q0 × kv3          q0 × kv2          q0 × kv1
    sends to 1  kv0               kv3               kv2
    gets from 3 kv3               kv2               kv1

Causal attention does not need q × kv if all keys lie behind all queries. If ranks hold contiguous
parts, rank 0 computes 1 block and rank N-1 computes N. Zigzag cuts the sequence into 2N chunks and
gives rank r the chunks r and 2N-1-r, so that every rank computes as much:

    chunk    0   1   2   3   4   5   6   7
    rank     0   1   2   3   3   2   1   0

Cost per rank, layer and step, in elements; u = batch · (S/N) · D; H heads of queries, K of keys:

                 sent in forward              sent in backward     kept for backward
    one device   0                            0                    N·u(2H + 2K)
    idea         2K·u(N-1)                    2K·u(N-1)            N·u·2K, and u·H·(S/D) scores
    ring         2K·u(N-1)                    4K·u(N-1)            u(2H + 2K), and u·H/D of lse
    Ulysses      (2H + 2K')u(N-1)/N           the same             u(2H + 2K') and lse

Gradients travel in fp32 if the keys have 16 bits. Ulysses repeats heads of keys until N divides
their number K' = K·N/gcd(N, K), and pads the heads of queries to a multiple of K'. Each call first
sends 8(N-1) bytes with which ranks make sure that they agree; this synchronises the host.

Run:      torchrun --nproc-per-node 2 context_parallel.py
Paper:    Liu et al. 2023, Ring Attention, arXiv 2310.01889; Llama 3, 2407.21783, §3.3.2 (zigzag);
          Jacobs et al. 2023, DeepSpeed-Ulysses, 2309.14509
Mirrors:  torch.distributed.tensor.experimental.context_parallel; DeepSpeed's DistributedAttention
Left out: dropout, masks other than the causal one, documents packed into one sequence. A fast
          kernel for a block: flash_attention.py's return the same output and log-sum-exp
"""

import argparse
import copy
import math
import os
import signal
import sys
import time
import zlib
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: a later import keeps the group
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# --------------------------------------------------------------------------------------------------
# 1. The idea: gather the keys and values of all ranks, and mask by global positions.


class AllToAll(torch.autograd.Function):
    """Rank i's x[j] becomes rank j's output[i]. The gradient takes the same way back."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(output, x.contiguous(), group=process_group)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return AllToAll.apply(grad_output, ctx.process_group), None


def gather(x, process_group=None):
    """Return the `x` of all ranks, stacked. Its gradient is the sum of the gradients of all ranks."""
    copies = x.expand(dist.get_world_size(process_group), *x.shape)
    return AllToAll.apply(copies, process_group)


def gathered_attention(q, k, v, causal=False, scale=None, process_group=None, zigzag=True):
    """Attention of this rank's queries to the keys of all ranks, which it holds all at once."""
    keys = join_sequence(k, 2, process_group, zigzag)
    values = join_sequence(v, 2, process_group, zigzag)
    mask = None
    if causal:
        length = keys.shape[2]
        query_positions = positions(length, process_group, zigzag)
        mask = (torch.arange(length) <= query_positions[:, None]).to(q.device)
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)


# --------------------------------------------------------------------------------------------------
# 2. Who has which tokens.


def chunks_of(rank, world_size, zigzag):
    """The numbers of the chunks of the sequence that `rank` holds, in order."""
    return [rank, 2 * world_size - 1 - rank] if zigzag else [rank]


def order_of_tokens(length, world_size, zigzag):
    """The positions of the tokens of rank 0, then of rank 1, and so on: (world_size, length / N)."""
    num_chunks = 2 * world_size if zigzag else world_size
    if length % num_chunks:
        chunks = f"{num_chunks} chunks ({world_size} ranks, zigzag={zigzag})"
        raise ValueError(f"a sequence of {length} does not divide into {chunks}; pad or cut it")
    chunks = torch.arange(length).view(num_chunks, -1)
    return torch.stack(
        [chunks[chunks_of(rank, world_size, zigzag)].flatten() for rank in range(world_size)]
    )


def positions(length, process_group=None, zigzag=True):
    """The position in the whole sequence, of `length` tokens, of each token of this rank."""
    world_size = dist.get_world_size(process_group)
    return order_of_tokens(length, world_size, zigzag)[dist.get_rank(process_group)]


def split_sequence(x, dim=1, process_group=None, zigzag=True):
    """Return this rank's part of `x`, which all ranks have whole, along `dim`.

    Shift labels against inputs before the split: a part's neighbours are on other ranks.
    """
    return x.index_select(dim, positions(x.shape[dim], process_group, zigzag).to(x.device))


def join_sequence(x, dim=1, process_group=None, zigzag=True):
    """Return the whole sequence on every rank. Its gradient is the sum of the ranks' gradients."""
    world_size = dist.get_world_size(process_group)
    order = order_of_tokens(world_size * x.shape[dim], world_size, zigzag)
    parts = gather(x, process_group)
    return torch.cat(parts.unbind(), dim).index_select(dim, order.flatten().argsort().to(x.device))


def verify_agreement(q, k, v, causal, scale, process_group, zigzag):
    """Raise the same ValueError on all ranks if the inputs are wrong, or differ between ranks."""
    mine = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {q.dtype}, {k.dtype}, "
    mine += f"{v.dtype}, causal={causal}, scale={scale}, zigzag={zigzag}"
    checksum = torch.tensor(zlib.crc32(mine.encode()), device=q.device)
    if len(set(gather(checksum, process_group).tolist())) > 1:
        everyone = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(everyone, mine, group=process_group)
        ranks = "; ".join(f"rank {rank} has {theirs}" for rank, theirs in enumerate(everyone))
        raise ValueError(f"all ranks must call attention alike, but {ranks}")
    is_wrong = q.dim() != 4 or k.shape != v.shape or not q.dtype == k.dtype == v.dtype
    if (
        is_wrong
        or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
        or q.shape[1] % k.shape[1]
    ):
        wanted = "q (B, H, S/N, D), k and v (B, K, S/N, D) with H a multiple of K, in one dtype"
        raise ValueError(f"attention takes {wanted}; got {mine}")
    if zigzag and q.shape[2] % 2:
        raise ValueError(f"{q.shape[2]} tokens on a rank are not two chunks; use zigzag=False")


# --------------------------------------------------------------------------------------------------
# 3. Ring attention.
#
# In the code q is (B, K, H/K, S/N, D) and kv is (2, B, K, 1, S/N, D), so that the H/K heads of
# queries that share a head of keys broadcast. lse is the log-sum-exp of a row of scores.

PIECE = 512  # keys whose scores exist at one time


def tiles(my_chunks, their_chunks, tokens, causal):
    """Yield (rows, columns, is_diagonal): slices of queries and of a block's keys to attend to.

    A tile in which no query may see a key is left out. On the diagonal, query i sees keys 0 to i.
    """
    size = tokens // len(my_chunks)
    for i, query_chunk in enumerate(my_chunks):
        for j, key_chunk in enumerate(their_chunks):
            if causal and key_chunk > query_chunk:
                continue
            is_diagonal = causal and key_chunk == query_chunk
            for start in range(0, size, PIECE):
                first = start if is_diagonal else 0  # rows before it see none of these keys
                rows = slice(i * size + first, (i + 1) * size)
                columns = slice(j * size + start, j * size + min(start + PIECE, size))
                yield rows, columns, is_diagonal


def scores_of(q, k, scale, is_diagonal):
    scores = q @ k.mT * scale
    if is_diagonal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def attend(q, kv, output, lse, scale, tiles):
    """Merge attention to the keys and values of one block into `output` and `lse`, in place."""
    for rows, columns, is_diagonal in tiles:
        k, v = kv[..., columns, :].to(q.dtype)
        scores = scores_of(q[..., rows, :], k, scale, is_diagonal)
        tile_lse = scores.logsumexp(-1, keepdim=True)
        tile_output = (scores - tile_lse).exp() @ v
        # Two results over disjoint keys: each weighs as much as its share of the sum of exp(scores).
        total = torch.logaddexp(lse[..., rows, :], tile_lse)
        output[..., rows, :] *= (lse[..., rows, :] - total).exp()
        output[..., rows, :] += (tile_lse - total).exp() * tile_output
        lse[..., rows, :] = total


def attend_backward(q, kv, lse, grad_output, delta, grad_q, scale, tiles):
    """Add to `grad_q`; return the gradient of `kv` (Dao 2023, arXiv 2307.08691, algorithm 2)."""
    grad_kv = torch.zeros(kv.shape, dtype=q.dtype, device=q.device)
    for rows, columns, is_diagonal in tiles:
        k, v = kv[..., columns, :].to(q.dtype)
        scores = scores_of(q[..., rows, :], k, scale, is_diagonal)
        weights = (scores - lse[..., rows, :]).exp()
        grad_weights = grad_output[..., rows, :] @ v.mT
        grad_scores = weights * (grad_weights - delta[..., rows, :]) * scale
        grad_q[..., rows, :] += grad_scores @ k
        grad_k = grad_scores.mT @ q[..., rows, :]
        grad_v = weights.mT @ grad_output[..., rows, :]
        grad_kv[0][..., columns, :] += grad_k.sum(2, keepdim=True)  # heads that share these keys
        grad_kv[1][..., columns, :] += grad_v.sum(2, keepdim=True)
    return grad_kv


class Ring:
    """This rank's place in the ring of ranks."""

    def __init__(self, process_group, zigzag):
        self.process_group = process_group
        self.zigzag = zigzag
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

    def tiles(self, step, tokens, causal):
        """The tiles of this rank's queries with the block that it holds after `step` exchanges."""
        owner = (self.rank - step) % self.world_size
        mine = chunks_of(self.rank, self.world_size, self.zigzag)
        theirs = chunks_of(owner, self.world_size, self.zigzag)
        return tiles(mine, theirs, tokens, causal)

    def start_exchange(self, block):
        """Send `block` to the next rank. Return what wait() needs to get the previous rank's."""
        received = torch.empty_like(block)
        group = self.process_group or dist.group.WORLD
        following = dist.get_global_rank(group, (self.rank + 1) % self.world_size)
        previous = dist.get_global_rank(group, (self.rank - 1) % self.world_size)
        send = dist.P2POp(dist.isend, block, following, group)
        receive = dist.P2POp(dist.irecv, received, previous, group)
        works = dist.batch_isend_irecv([send, receive])
        return works, received, block  # the block must not change, or be freed, before it has left

    def wait(self, exchange):
        works, received, _ = exchange
        for work in works:
            work.wait()
        return received


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale, ring):
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = q.unflatten(1, (k.shape[1], -1)).to(dtype)
        kv = torch.stack([k, v]).unsqueeze(3)
        output = torch.zeros_like(queries)
        lse = torch.full_like(queries[..., :1], -math.inf)
        for step in range(ring.world_size):
            is_last = step + 1 == ring.world_size
            exchange = None if is_last else ring.start_exchange(kv)
            attend(queries, kv, output, lse, scale, ring.tiles(step, q.shape[2], causal))
            if not is_last:
                kv = ring.wait(exchange)
        output = output.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.causal = causal
        ctx.scale = scale
        ctx.ring = ring
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        """A block's gradient follows the block around the ring, one rank behind, and ends at home.

        The rank that owns the block keeps its own contribution, and adds it at the end.
        """
        q, k, v, output, lse = ctx.saved_tensors
        ring = ctx.ring
        queries = q.unflatten(1, (k.shape[1], -1)).to(lse.dtype)
        grads = grad_output.unflatten(1, (k.shape[1], -1)).to(lse.dtype)
        delta = (grads * output.view_as(grads)).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(queries)
        kv = torch.stack([k, v]).unsqueeze(3)
        gradient_exchange = None
        for step in range(ring.world_size):
            is_last = step + 1 == ring.world_size
            exchange = None if is_last else ring.start_exchange(kv)
            tiles = ring.tiles(step, q.shape[2], ctx.causal)
            grad_kv = attend_backward(queries, kv, lse, grads, delta, grad_q, ctx.scale, tiles)
            if step == 0:
                own_grad_kv = grad_kv
            else:
                if gradient_exchange:
                    grad_kv += ring.wait(gradient_exchange)
                gradient_exchange = ring.start_exchange(grad_kv)
            if not is_last:
                kv = ring.wait(exchange)
        if gradient_exchange:
            own_grad_kv += ring.wait(gradient_exchange)
        grad_k, grad_v = own_grad_kv.squeeze(3).to(k.dtype)
        return grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None, None, None


def ring_attention(q, k, v, causal=False, scale=None, process_group=None, zigzag=True):
    """Attention of this rank's queries to the keys of all ranks, whose blocks pass by.

    q is (B, H, S/N, D), k and v are (B, K, S/N, D), with H a multiple of K; the result is as q.
    ValueError on all ranks if shapes, dtypes, `causal`, `scale` or `zigzag` differ between ranks.
    """
    verify_agreement(q, k, v, causal, scale, process_group, zigzag)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return RingAttention.apply(q, k, v, causal, scale, Ring(process_group, zigzag))


# --------------------------------------------------------------------------------------------------
# 4. Ulysses: every rank attends over the whole sequence, for 1/N of the heads.


def local_attention(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def sequence_to_heads(x, order, process_group):
    """(B, heads, S/N, D), a part of the sequence, to (B, heads/N, S, D), a part of the heads."""
    world_size = dist.get_world_size(process_group)
    by_rank = x.unflatten(1, (world_size, -1)).movedim(1, 0)  # (N, B, heads/N, S/N, D)
    parts = AllToAll.apply(by_rank, process_group)
    return torch.cat(parts.unbind(), dim=2).index_select(2, order.flatten().argsort())


def heads_to_sequence(x, order, process_group):
    """(B, heads/N, S, D), a part of the heads, to (B, heads, S/N, D), a part of the sequence."""
    by_rank = x.index_select(2, order.flatten()).unflatten(2, order.shape).movedim(2, 0)
    parts = AllToAll.apply(by_rank, process_group)
    return torch.cat(parts.unbind(), dim=1)


def ulysses_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    process_group=None,
    zigzag=True,
    attention=local_attention,
):
    """As ring_attention, with `attention(q, k, v, causal=, scale=)` over the whole sequence."""
    verify_agreement(q, k, v, causal, scale, process_group, zigzag)
    world_size = dist.get_world_size(process_group)
    order = order_of_tokens(world_size * q.shape[2], world_size, zigzag).to(q.device)
    # Repeat heads of keys until the ranks divide them, and give each copy as many heads of queries.
    copies = world_size // math.gcd(world_size, k.shape[1])
    group = q.shape[1] // k.shape[1]
    padding = -group % copies
    padded = F.pad(q.unflatten(1, (k.shape[1], group)), (0, 0, 0, 0, 0, padding))
    inputs = [padded.flatten(1, 2)]
    inputs += [x.repeat_interleave(copies, dim=1) for x in (k, v)]
    whole = [sequence_to_heads(x, order, process_group) for x in inputs]
    output = heads_to_sequence(attention(*whole, causal=causal, scale=scale), order, process_group)
    return output.unflatten(1, (k.shape[1], -1))[:, :, :group].flatten(1, 2)


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    N = demo.ranks
    if 64 % (2 * N):
        demo.stop(f"64 tokens do not divide into 2 · {N} chunks; use 1, 2, 4, 8, 16 or 32 ranks")
    model = demo.start("context_parallel", parts=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):  # of all ranks; targets are shifted already
        optimizer.zero_grad()
        with attention_is(ring_attention):
            logits = model(split_sequence(inputs))
        loss = F.cross_entropy(
            logits.flatten(0, 1), split_sequence(targets).flatten(), reduction="sum"
        )
        loss = loss / targets.numel()  # all tokens, so that gradients are summed, not averaged
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss * N  # the demo takes the mean over ranks

    demo.train(step, lambda: ([p.grad for p in model.parameters()], model.parameters()))
    psi = held_bytes(model.parameters())
    layers, K, D = 4, 6, 32
    u = 8 * N * (64 // N) * D  # 8N sequences
    sent = layers * (8 * 6 * K * u + 8) * (N - 1) + 2 * psi * (N - 1) / N  # float64: 8 bytes
    formula = "l·6Ku(N-1) + 2Ψ(N-1)/N"
    status = demo.report(held(model.parameters(), optimizer), formula, sent)
    show_costs(demo)
    return status


def attention_is(attention):
    """In this context the model's F.scaled_dot_product_attention is `attention`."""
    name = "scaled_dot_product_attention"
    return mock.patch.object(
        F, name, lambda q, k, v, is_causal: attention(q, k, v, causal=is_causal)
    )


def show_costs(demo, B=1, H=8, K=2, D=64):
    """Forward and backward of one causal layer in fp32, at growing lengths."""
    N = demo.ranks
    demo.show(f"\none causal layer, {H} heads of queries and {K} of keys of {D}, fp32; per rank:")
    demo.show("kept for backward; sent in a step, measured and by formula; operations of each rank")
    copies = N // math.gcd(N, K)
    padded = K * copies * -(-H // (K * copies))
    ring = 6 * K * (N - 1)
    ulysses = 2 * (2 * padded + 2 * K * copies) * (N - 1) / N
    ways = {
        "gathered, zigzag": (gathered_attention, True, 4 * K * (N - 1)),
        "ring": (ring_attention, False, ring),
        "ring, zigzag": (ring_attention, True, ring),
        "Ulysses, zigzag": (ulysses_attention, True, ulysses),
    }
    demo.show(
        f"{'S':>6}  {'':17} {'kept':>9} {'sent':>9} {'formula':>9}   operations on ranks 0 to {N - 1}"
    )
    for S in (512, 1024, 2048):
        length = S // (2 * N) * 2 * N
        for name, (attention, zigzag, sent) in ways.items():
            kept, measured, operations = measure(demo, attention, zigzag, (B, H, K, length, D))
            formula = 4 * B * (length // N) * D * sent / 1e6
            work = " ".join(f"{n / 1e6:.0f}" for n in operations)
            line = f"{length:6}  {name:17} {kept / 1e6:6.2f} MB {measured / 1e6:6.2f} MB"
            demo.show(f"{line} {formula:6.2f} MB   {work} million")


def measure(demo, attention, zigzag, sizes):
    """Bytes kept for backward, bytes sent, and the operations of all ranks."""
    B, H, K, length, D = sizes
    tokens = length // demo.ranks
    torch.manual_seed(demo.rank)
    q = torch.randn(B, H, tokens, D, device=demo.device, requires_grad=True)
    k = torch.randn(B, K, tokens, D, device=demo.device, requires_grad=True)
    v = torch.randn(B, K, tokens, D, device=demo.device, requires_grad=True)
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with FlopCounterMode(display=False) as flops, SentBytes() as sent:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = attention(q, k, v, causal=True, zigzag=zigzag)
        output.sum().backward()
    everyone = [None] * demo.ranks
    dist.all_gather_object(everyone, flops.get_total_flops())
    return held_bytes(saved), sent.total, everyone


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


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
    """Adds up the bytes that this rank sends. A collective counts as its ring algorithm sends."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "_allgather_base_": (1, 0)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.total += self.sent_by(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent_by(self, operator, args):
        if operator in ("send", "recv_"):
            return args[0][0].nbytes if operator == "send" else 0
        rounds, payload = self.RING[operator]  # KeyError: an unknown operator is not 0 bytes
        handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(handle)
        if operator == "alltoall_base_" and args[4]:  # the rows that each rank gets
            rows = sum(args[4]) - args[4][group.rank()]
            return rows * args[payload][:1].nbytes
        size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return rounds * size * (group.size() - 1) / group.size()


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A storage that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def choose_device(name):
    """This rank's device, and the backend that it can use: NCCL wants a GPU for each local rank."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 or newer
    return device, "nccl" if enough or may_share else "gloo"


def join_world(device, backend):
    """Initialize the default group: NCCL if all ranks on all machines can use it, else gloo."""
    timeout = timedelta(seconds=120)
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    else:  # without torchrun
        store, rank, ranks = dist.HashStore(), 0, 1
    store.set(f"backend/{rank}", backend)
    backends = {store.get(f"backend/{peer}") for peer in range(ranks)}
    backend = "nccl" if backends == {b"nccl"} else "gloo"
    options = {"store": store, "rank": rank, "world_size": ranks, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, **options)


class Demo:
    """Trains with a technique and, beside it, the same model on one device, and compares the two.

    If the technique claims to be bitwise equal, they train in float32, otherwise in float64.
    """

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error = self.stop
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--device", choices=devices, default=devices[-1])
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="a text")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")
        self.device, backend = choose_device(self.args.device)
        join_world(self.device, backend)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: every rank finds the same error

    def show(self, line="", end="\n"):
        if self.rank == 0:
            print(line, end=end, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`."""
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        torch.manual_seed(self.args.seed)
        dtype = torch.float64 if self.tolerance else torch.float32
        self.model = language_model().to(self.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        world += f" · {self.device.type}/{dist.get_backend()}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in parameters:
            parameter.grad /= self.parts  # after the sum: 3 parts would round differently before it
        self.optimizer.step()
        gradients = [parameter.grad for parameter in parameters]
        return [torch.stack(losses).mean().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def train(self, step, whole):
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
        for number in range(self.args.steps):
            batch = self.batch(number)
            is_last = number + 1 == self.args.steps
            start = self.now()
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            losses = [loss for loss in losses if loss is not None]
            loss = torch.tensor(losses, dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                if not torch.equal(ours, theirs):
                    self.differences.append((ours - theirs).abs().max().item())
            self.show_progress(number + 1)

    def show_progress(self, done):
        line = f"step {done}/{self.args.steps}   loss {self.losses[-1]:.3f}"
        if sys.stdout.isatty():
            self.show(line, end="\r")
        elif (done - 1) % -(-self.args.steps // 3) == 0:  # a log gets three lines
            self.show(line)

    def report(self, held_here, formula, sent):
        """Print what the README explains. Return the exit status: 1 if a rank found a difference."""
        differences = torch.tensor(self.differences, device=self.device)
        largest = differences.nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain_held = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain_held)
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        held_line = f"params {params}   grads {grads}   optimizer {state}"
        self.show(f"held/rank   {held_line}      (1 device: {plain})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

"""Flash attention: exact attention block by block. The s × s scores never exist as a whole, in forward or in backward.

                keys →    block 0   block 1   block 2       going through its blocks of keys, a block of queries keeps
    queries   block 0    │   ◣    │         │         │       m   the largest score of each query so far
       ↓      block 1    │   ■    │    ◣    │         │       l   Σ e^(score - m)
              block 2    │   ■    │    ■    │    ◣    │       O   Σ e^(score - m) v
    causal: above the diagonal nothing is computed          and, when m grows, scales l and O to the new m

At the end O/l is the output, and L = m + log l is all that backward needs: it computes a block of scores again, and
e^(score - L) is the softmax at once. More operations, but s² numbers neither fill memory nor travel to it and back.

Cost of a head of size d     kept for backward, elements     operations, forward + backward     causal
    naive                    q, k, v, P: 3sd + s² or more    4s²d + 8s²d                        the same
    flash                    q, k, v, O, L: 4sd + s          4s²d + 10s²d: the scores again     half of it, as s grows

Run:      torchrun --nproc-per-node 2 flash_attention.py          (python flash_attention.py is a world of one)
Papers:   Milakov & Gimelshein 2018, arXiv 1805.02867, online softmax; Dao et al. 2022, 2205.14135; Dao 2023, 2307.08691
Mirrors:  F.scaled_dot_product_attention; where there are not as many keys as queries, causal is flash_attn_func's
Left out: the kernel, with blocks in on-chip memory (Triton); other masks (flex_attention); gradients of gradients
"""

import argparse
import copy
import functools
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea. q is (B, H, S, D), k and v are (B, Hkv, Skv, D): H / Hkv heads of queries share one of keys and values.


def naive_attention(q, k, v, causal=False, scale=None):
    """softmax(scale · q kᵀ) v, (B, H, S, D), from all scores at once: what section 2 equals."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    # Aligned at the end: the last query sees all keys, and the first S - Skv none, whose softmax is NaN and to be zero.
    hidden = (
        torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(
            k.shape[2] - q.shape[2] + 1
        )
        & causal
    )
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


def online_attention(q, k, v, block_size=128):
    """softmax(q kᵀ/√D) v, (…, S, D), in one pass over blocks of keys; forward only, heads alike, no mask."""
    m = q.new_full((*q.shape[:-1], 1), -torch.inf)  # of each query, the largest score so far
    l, O = torch.zeros_like(m), torch.zeros_like(q)  # Σ e^(score - m), Σ e^(score - m) v
    for k_j, v_j in zip(k.split(block_size, -2), v.split(block_size, -2), strict=True):
        scores = q @ k_j.mT * q.shape[-1] ** -0.5
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        P, correction = (
            (scores - m_new).exp(),
            (m - m_new).exp(),
        )  # what is there already is relative to the old m
        l, O, m = l * correction + P.sum(-1, keepdim=True), O * correction + P @ v_j, m_new
    return O / l


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one (Dao 2023): a loop over blocks of queries outside, and backward, from L instead of m and l.


def tiles(S, Skv, causal, block_size):
    """Yield each block of queries and the blocks of keys that it sees, as slices; no query that sees nothing."""
    offset = Skv - S  # causal: query i sees the keys up to i + offset
    for start in range(max(0, -offset) if causal or Skv == 0 else 0, S, block_size):
        stop = min(start + block_size, S)
        seen = stop + offset if causal else Skv
        yield (
            slice(start, stop),
            [slice(j, min(j + block_size, seen)) for j in range(0, seen, block_size)],
        )


def masked_scores(q_i, k_j, rows, cols, causal, offset):
    """q_i k_jᵀ, (B·Hkv, G·rows, cols): the queries of G heads below each other, so that no k is repeated."""
    scores, i = q_i @ k_j.mT, rows.start + offset  # the first query's last key
    if causal and cols.stop - 1 > i:  # the diagonal passes through
        n = rows.stop - rows.start
        hidden = torch.ones(n, cols.stop - cols.start, dtype=torch.bool, device=q_i.device).triu(
            i - cols.start + 1
        )
        scores.unflatten(1, (-1, n)).masked_fill_(hidden, -torch.inf)
    return scores


@torch.no_grad()
def flash_forward(q, k, v, causal=False, scale=None, dropout_p=0, seed=None, block_size=128):
    """-> output, (B, H, S, D), and lse, log Σ e^score, (B, H, S), -inf of a query that sees nothing; sums are in fp32.

    Makes no graph. seed: a tensor, int64, where there is dropout. ValueError: what does not fit together.
    """
    verify(q, k, v, dropout_p, block_size)
    (B, H, S, D), (_, heads, Skv, _), dtype = q.shape, k.shape, q.dtype
    scale, sums = D**-0.5 if scale is None else scale, torch.promote_types(dtype, torch.float32)
    q, k, v = (
        x.to(sums).unflatten(1, (heads, -1)).flatten(0, 1) for x in (q, k, v)
    )  # (B·Hkv, G, S, D), G 1 of k, v
    output, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full((*q.shape[:3], 1), -torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        for rows, blocks in tiles(S, Skv, causal, block_size):
            q_i = q[:, :, rows].flatten(1, 2) * scale
            m, l, O = q.new_full((), -torch.inf), 0.0, 0.0
            for cols in blocks:  # in the first, every query sees a key: m is finite from there on
                scores = masked_scores(q_i, k[:, 0, cols], rows, cols, causal, Skv - S)
                m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
                P, correction, m = scores.sub_(m_new).exp_(), (m - m_new).exp_(), m_new
                l = l * correction + P.sum(
                    -1, keepdim=True
                )  # of all weights, also where some are dropped
                O = O * correction + dropped(P, dropout_p, seed, rows, cols, S, Skv) @ v[:, 0, cols]
            output[:, :, rows] = (O / (l * (1 - dropout_p))).view_as(output[:, :, rows])
            lse[:, :, rows] = (m + l.log()).view_as(lse[:, :, rows])
    return output.view(B, H, S, v.shape[-1]).to(dtype), lse.view(B, H, S)


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
    dropout_p=0,
    seed=None,
    block_size=128,
):
    """-> the gradients of q, k and v; output and lse as flash_forward returned them, the rest as it had them.

    Where k and v are a part of the keys, and output and lse of all: the part's gradients, and its summand of q's.
    """
    (S, D), (heads, Skv), like = q.shape[2:], k.shape[1:3], (q, k, v)
    scale, tensors = (
        D**-0.5 if scale is None else scale,
        (q, k, v, output, grad_output, lse.unsqueeze(-1)),
    )
    q, k, v, O, dO, L = (x.to(lse.dtype).unflatten(1, (heads, -1)).flatten(0, 1) for x in tensors)
    dots = (dO * O).sum(
        -1, keepdim=True
    )  # D in the papers: Σ_j P_ij dP_ij of softmax's derivative, without the keys
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        for rows, blocks in tiles(S, Skv, causal, block_size):
            q_i, dO_i, L_i, dots_i = (x[:, :, rows].flatten(1, 2) for x in (q, dO, L, dots))
            q_i, dO_i, dq_i = q_i * scale, dO_i / (1 - dropout_p), 0.0
            for cols in blocks:
                P = masked_scores(q_i, k[:, 0, cols], rows, cols, causal, Skv - S).sub_(L_i).exp_()
                weights = dropped(P, dropout_p, seed, rows, cols, S, Skv)
                dv[:, 0, cols] += weights.mT @ dO_i
                dP = dO_i @ v[:, 0, cols].mT
                dS = dP.mul_(weights).addcmul_(
                    P, dots_i, value=-1
                )  # P ∘ (dP - D), where nothing is dropped
                dq_i += dS @ k[:, 0, cols]
                dk[:, 0, cols] += dS.mT @ q_i  # which has the scale already
            dq[:, :, rows] = (dq_i * scale).view_as(dq[:, :, rows])
    return tuple(
        gradient.view_as(x).to(x.dtype) for gradient, x in zip((dq, dk, dv), like, strict=True)
    )


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *arguments):
        output, lse = flash_forward(q, k, v, *arguments)
        ctx.save_for_backward(q, k, v, output, lse)  # O(s)
        ctx.arguments = arguments
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        return *flash_backward(grad_output, *ctx.saved_tensors, *ctx.arguments), *[None] * len(
            ctx.arguments
        )


def flash_attention(q, k, v, causal=False, scale=None, dropout_p=0.0, block_size=128):
    """softmax(scale · q kᵀ) v: q (B, H, S, D), k and v (B, Hkv, Skv, D), H a multiple of Hkv, to (B, H, S, D).

    causal: the last query sees all keys; one that sees none is zero, its gradients too. scale: 1/√D unless given.
    dropout_p: of the weights, always, as PyTorch's, by the default generator. block_size: of queries and of keys; it
    changes time and memory alone. 16 bits are summed in 32. ValueError: what does not fit together.
    """
    seed = torch.randint(-(2**63), 2**63 - 1, (), device=q.device) if dropout_p else None
    return FlashAttention.apply(q, k, v, causal, scale, dropout_p, seed, block_size)


def verify(q, k, v, dropout_p, block_size):
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[::3] == k.shape[::3]
        and k.shape[:3] == v.shape[:3]
    ):
        raise ValueError(f"{shapes}: must be (B, H, S, D), (B, Hkv, Skv, D) and (B, Hkv, Skv, D)")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} heads of queries are no multiple of {k.shape[1]} heads of keys and values"
        )
    if not (
        q.dtype == k.dtype == v.dtype
        and q.is_floating_point()
        and 0 <= dropout_p < 1
        and block_size >= 1
    ):
        wrong = f"q {q.dtype}, k {k.dtype}, v {v.dtype}, {dropout_p=}, {block_size=}"
        raise ValueError(f"{wrong}: must be one floating-point dtype, in [0, 1), and at least 1")


# ---------------------------------------------------------------------------------------------------------------------
# 3. Refinements: a dropout mask that is a function of where it is, computed twice and not kept; keys in several places.


def dropped(P, p, seed, rows, cols, S, Skv):
    """P, (B·Hkv, G·rows, cols), each zero with probability p, by position and seed alone: forward's mask in backward.

    SplitMix64 (Steele, Lea & Flood 2014): its n-th number is n·γ, mixed. Its last step, of lower bits, is left out.
    """
    if p == 0:
        return P
    span = functools.partial(torch.arange, device=P.device)
    heads = P.shape[0] * P.shape[1] // (rows.stop - rows.start)
    row = (span(heads)[:, None] * S + span(rows.start, rows.stop)).view(*P.shape[:2], 1)
    z = (row * Skv + span(cols.start, cols.stop)) * (
        0x9E3779B97F4A7C15 - 2**64
    ) + seed  # modulo 2^64: int64 wraps
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= (z >> shift) & (2 ** (64 - shift) - 1)  # int64 shifts copies of the sign in
        z *= factor - 2**64
    return P * (z >= int(p * 2**64) - 2**63)


def merge(output_a, lse_a, output_b, lse_b):
    """-> output and lse over two disjoint sets of keys, from flash_forward's over each (as context parallelism has)."""
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(
        lse == -torch.inf, 0.0
    )  # of a query that sees nothing in either: e^(-inf), not of NaN
    a, b = (
        x * (part - finite).exp().unsqueeze(-1)
        for x, part in ((output_a, lse_a), (output_b, lse_b))
    )
    return (a + b).to(output_a.dtype), lse


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def use(attention, model):
    """`model`, which calls F.scaled_dot_product_attention, with another in its place."""
    name, in_its_place = (
        "scaled_dot_product_attention",
        lambda *qkv, is_causal: attention(*qkv, causal=is_causal),
    )
    model.forward = mock.patch.object(F, name, in_its_place)(model.forward)
    return model


def main():
    demo = Demo()
    model = use(
        functools.partial(flash_attention, block_size=24), demo.start("flash_attention")
    )  # s = 64
    use(naive_attention, demo.model)
    demo.show(
        "Here flash_attention, in blocks of 24 of 64 queries and keys; on 1 device naive_attention"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        for (
            parameter
        ) in model.parameters():  # of data parallelism, in ddp.py: attention itself sends nothing
            parameter.grad /= demo.ranks
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    demo.train(
        step, lambda: ([parameter.grad for parameter in model.parameters()], model.parameters())
    )
    here = held(model.parameters(), optimizer)
    status = demo.report(here, "2Ψ(N-1)/N", 2 * here[1] * (demo.ranks - 1) / demo.ranks)
    if demo.rank == 0:
        show_lengths(demo)
    return status


def measure(attention, causal, inputs):
    """-> bytes kept for backward, q, k and v among them; seconds, forward and backward."""
    saved, start = [], time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        output = attention(*inputs, **{causal: True})
    torch.autograd.grad(output.sum(), inputs)[0].sum().item()  # item waits for a GPU
    return held_bytes(saved), time.perf_counter() - start


def show_lengths(demo, faster_from=None):
    """On one device: what grows as s, what as s², and from where on the longer way is the faster one."""
    demo.show(
        "kept for backward, and time of forward and backward, for a causal head of size 64; a ▇ is a factor of 2"
    )
    demo.show(f"{'s':>6}  {'naive':35} {'ours':29} PyTorch's")
    ways = (
        (naive_attention, "causal"),
        (flash_attention, "causal"),
        (F.scaled_dot_product_attention, "is_causal"),
    )
    for s in (256, 512, 1024, 2048, 4096):
        inputs = [
            torch.randn(1, 1, s, 64, device=demo.device, requires_grad=True) for _ in range(3)
        ]
        found = [min(measure(*way, inputs) for _ in range(3 if s < 2048 else 1)) for way in ways]
        cells = [
            f"{n / 1e6:5.1f} MB {1e3 * t:6.0f} ms {'▇' * (n.bit_length() - 17)}" for n, t in found
        ]
        demo.show(f"{s:6}  {cells[0]:35} {cells[1]:29} {cells[2]}")
        naive, ours, theirs = (seconds for _, seconds in found)
        faster_from = (faster_from or s) if ours < naive else None
    demo.show(
        f"ours is faster than naive from s = {faster_from} on; at {s}, {ours / theirs:.1f} of PyTorch's time"
    )


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
    """The bytes of the storages behind `tensors`. A shared storage counts once."""
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
        """Print the result (README, "What the lines mean"). Return 1 if a rank differs."""
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

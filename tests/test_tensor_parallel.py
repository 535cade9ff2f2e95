"""tensor_parallel.py against one device and against torch.distributed.tensor.parallel."""

import copy
import gc
import itertools
import math
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ddp
import tensor_parallel as tp

# Adam's eps: softmax does not see the bias of the keys, whose gradient is rounding; Adam would make it 1
OPTIMIZERS = {**OPTIMIZERS, "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-5)}
RANKS, FEW, FLAG = st.integers(1, 4), st.integers(1, 3), st.booleans()
close = partial(assert_equal, exact=False)
bitwise = partial(assert_equal, exact=True)


@pytest.fixture(autouse=True, scope="module")
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(N, body, *args):
    return pool.run(N, in_float64, body, *args)


def in_float64(body, *args):
    torch.set_default_dtype(torch.float64)
    try:
        return body(*args)
    finally:
        torch.set_default_dtype(torch.float32)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def everyone(tensor):
    shards = [torch.empty_like(tensor) for _ in range(pool.world_size())]
    dist.all_gather(shards, tensor.detach().contiguous(), group=pool.group())
    return shards


def mine(x, dim=0):
    return x.chunk(pool.world_size(), dim)[pool.rank()]


def gradients(module):
    return tp.gather_whole(module, {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)})


def check_same(ours, plain, rename=lambda name: name, what=""):
    """State and gradients of all of `ours`; what is replicated is bitwise the same on all ranks."""
    state, grads = tp.full_state_dict(ours), gradients(ours)
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    assert {rename(name) for name in state} == set(plain.state_dict())
    for name, grad in grads.items():
        close(state[name], theirs[rename(name)].detach(), what=f"{what} {name}")
        close(grad, theirs[rename(name)].grad, what=f"{what} gradient of {name}")
    for name, parameter in ours.named_parameters():
        if not hasattr(parameter, "tensor_parallel") and parameter.grad is not None:
            for tensor in (parameter.detach(), parameter.grad):
                assert all(torch.equal(tensor, other) for other in everyone(tensor)), f"{what} {name} differs by rank"


# ---- pure functions


@given(
    sizes=st.lists(FEW, min_size=1, max_size=3),
    t=st.sampled_from([1, 2, 4, 6]),
    copies=FEW,
    dim=st.integers(0, 1),
    bias=FLAG,
)
def test_slices_join_to_the_whole(sizes, t, copies, dim, bias):
    copies = math.gcd(copies, t)
    parts = tuple(tp.Part(n * t // copies, n, copies) for n in sizes)
    sharding = tp.Sharding(0 if bias else dim, parts)
    shape = [sum(part.size for part in parts)] * (1 if bias else 2)
    whole = torch.arange(float(math.prod(shape))).view(shape)
    shards = [sharding.cut(whole, rank) for rank in range(t)]
    assert torch.equal(sharding.join(torch.stack(shards)), whole)
    assert all(shard.shape[sharding.dim] == sum(sizes) for shard in shards)
    assert torch.equal(shards[0], shards[copies - 1])


@given(V=st.integers(1, 40), t=st.integers(1, 8), divisible_by=st.sampled_from([1, 3, 128]))
def test_a_vocabulary_is_padded_with_zeros_at_the_end(V, t, divisible_by):
    part = tp.divide("entries", V, t, divisible_by)
    sharding, whole = tp.Sharding(0, (part,)), torch.ones(V, 2)
    shards = [sharding.cut(whole, rank) for rank in range(t)]
    assert part.rows % divisible_by == 0
    assert V <= part.rows * t < V + t * divisible_by
    assert torch.equal(torch.cat(shards)[:V], whole)
    assert torch.cat(shards)[V:].eq(0).all()
    assert torch.equal(sharding.join(torch.stack(shards)), whole)
    assert [row for rank in range(t) for row in part.held(rank)] == list(range(V))


def test_what_does_not_divide_says_what_would():
    with pytest.raises(
        ValueError, match="12 attention heads do not divide by 5 tensor-parallel ranks; use a "
    ) as error:
        tp.check_divides("attention heads", 12, 5)
    assert str(error.value).endswith("use a world size of 1, 2, 3, 4, 6 or 12, or 10 or 15 attention heads")
    with pytest.raises(ValueError, match="use a world size of 1, or 4 heads"):
        tp.check_divides("heads", 1, 4)


# ---- the operators: forward, and a backward that is the transpose


def strided(x):
    """A copy that is not contiguous: of such, collectives change, or send, only a part."""
    return torch.stack((x, x + 1), -1)[..., 0]


def transposed(x):
    """A copy that is not contiguous, but has no gaps: clone() leaves it so."""
    return x.mT.contiguous().mT


def body_operators():
    group, t, rank = pool.group(), pool.world_size(), pool.rank()
    same, own = randn(4 * t, 3, 2 * t), [randn(t, 3, 2 * t, seed=1 + r) for r in range(t)]
    cases = [  # operator, input, expected output, whether all ranks have the same gradient
        (tp.copy_to_region, same, same, False),
        (tp.reduce_from_region, own[rank], sum(own), True),
        (tp.scatter_to_region, same, mine(same, -1), False),
        (tp.gather_from_region, own[rank], torch.cat(own, -1), True),
        (tp.scatter_to_sequence, same, mine(same), False),
        (tp.gather_from_sequence, own[rank], torch.cat(own), False),
        (partial(tp.gather_from_region, dim=0), own[rank], torch.cat(own), True),
        (tp.reduce_scatter_to_sequence, own[rank], mine(sum(own)), False),
    ]
    copies = torch.clone, strided, transposed if rank else torch.clone  # each rank may have a layout of its own
    for (operator, x, expected, same_gradient), copied in itertools.product(cases, copies):
        leaf = copied(x).requires_grad_()
        y = operator(leaf, process_group=group)
        bitwise(leaf.detach(), x)
        in_rank_order = operator is tp.reduce_scatter_to_sequence  # not in the order of gloo's ring
        (bitwise if in_rank_order else close)(y.detach(), expected.detach(), what=str(operator))
        gradient = copied(randn(*y.shape, seed=0 if same_gradient else 7 + rank))
        kept = gradient.clone()
        (grad,) = torch.autograd.grad(y, leaf, gradient)
        bitwise(gradient, kept)  # autograd may still need it
        # <y, gradient> = <x, grad>, over all ranks, with what all ranks have alike counted once
        left, right = (y * gradient).sum() / (t if same_gradient else 1), (x * grad).sum() / (t if x is same else 1)
        sides = torch.stack([left, right]).detach()
        dist.all_reduce(sides, group=group)
        close(*sides, what=str(operator))
        if x is same:
            assert all(torch.equal(grad, other) for other in everyone(grad))
        assert (y is leaf) == (t == 1)
        assert t == 1 or operator is tp.copy_to_region or not y._is_view()  # one may change it in place
    A, B = randn(2 * t, 3 * t), randn(3 * t, 2 * t, seed=1)
    close(tp.parallel_mlp(same, mine(A, 1), mine(B), group), F.gelu(same @ A) @ B)
    x = randn(2 * t, 3).requires_grad_()
    (grad,) = torch.autograd.grad(tp.copy_to_region(x, group).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)  # the conjugate of the conjugate
    close(second, torch.full_like(x, 2.0 * (t if t > 1 else 1)))


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_operators_and_their_conjugates(N):
    run(N, body_operators)


# ---- layers


def body_pair(b, s, h, f, bias, sp, gather, again):
    """A column and a row layer, alone or as a pair."""
    t, group = pool.world_size(), pool.group()
    h, f, s = h * t, f * t, s * (t if sp else 1)
    torch.manual_seed(1)
    plain = nn.ModuleList([nn.Linear(h, f, bias), nn.Linear(f, h, bias)])
    keywords = {"process_group": group, "sequence_parallel": sp}
    torch.manual_seed(1)
    drawn = nn.ModuleList([tp.ColumnParallelLinear(h, f, bias, gather_output=gather, **keywords)])
    drawn.append(tp.RowParallelLinear(f, h, bias, input_is_parallel=not gather, **keywords))
    bitwise(torch.rand(1), (torch.manual_seed(1), [nn.Linear(h, f, bias), nn.Linear(f, h, bias)], torch.rand(1))[2])
    generator = torch.get_rng_state()
    plain[0].weight.requires_grad_(False)
    assert not tp.ColumnParallelLinear.from_full(plain[0], **keywords).weight.requires_grad
    plain[0].weight.requires_grad_(True)
    assert not tp.ColumnParallelLinear.from_full(copy.deepcopy(plain[0]).eval(), **keywords).training
    taken = nn.ModuleList([tp.ColumnParallelLinear.from_full(plain[0], gather_output=gather, **keywords)])
    taken.append(tp.RowParallelLinear.from_full(plain[1], input_is_parallel=not gather, **keywords))
    assert torch.equal(generator, torch.get_rng_state())  # from_full draws nothing
    assert not bias or taken[1].bias.data_ptr() != plain[1].bias.data_ptr()  # training ours leaves the plain one alone
    for ours in (drawn, taken):
        for name, parameter in plain.state_dict().items():
            bitwise(tp.full_state_dict(ours)[name], parameter)
        ours[0].gather_again = again
        for step in range(2):  # gradients accumulate
            x = randn(s, b, h, seed=step)
            our_x, x = (mine(x) if sp else x).clone().requires_grad_(), x.requires_grad_()
            y = ours[1](torch.tanh(ours[0](our_x)))
            expected = plain[1](torch.tanh(plain[0](x)))
            close(y.detach(), (mine(expected) if sp else expected).detach())
            weight = randn(*expected.shape, seed=5)
            (y * (mine(weight) if sp else weight)).sum().backward()
            (expected * weight).sum().backward()
            close(our_x.grad, mine(x.grad) if sp else x.grad)
        check_same(ours, plain)
        plain.zero_grad()


@given(N=RANKS, b=FEW, s=FEW, h=FEW, f=FEW, bias=FLAG, sp=FLAG, gather=FLAG, again=FLAG)
def test_linear_layers_equal_one_device(N, b, s, h, f, bias, sp, gather, again):
    run(N, body_pair, b, s, h, f, bias, sp, gather and not sp, again)


def body_vocabulary(V, pad, bias, tied, smoothing, z_loss, ignore, say):
    group = pool.group()
    torch.manual_seed(2)
    plain = nn.ModuleDict({"embed": nn.Embedding(V, 6, padding_idx=V - 1), "head": nn.Linear(6, V, bias)})
    keywords = {"process_group": group, "make_vocab_size_divisible_by": pad}
    torch.manual_seed(2)
    embed = tp.VocabParallelEmbedding(V, 6, padding_idx=V - 1, **keywords)
    bitwise(tp.full_state_dict(embed)["weight"], plain["embed"].weight.detach())
    ours = nn.ModuleDict(
        {
            "embed": tp.VocabParallelEmbedding.from_full(plain["embed"], **keywords),
            "head": tp.ColumnParallelLinear.from_full(plain["head"], **keywords),
        }
    )
    if tied:
        plain["head"].weight, ours["head"].weight = plain["embed"].weight, ours["embed"].weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step, scale in enumerate((10, 100, 3000)):  # the last overflows exp()
        tokens = torch.randint(V, (5, 3), generator=torch.Generator().manual_seed(step))
        target = torch.randint(V, (5, 3), generator=torch.Generator().manual_seed(9 + step))
        target[0, 0] = ignore
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = ours["head"](scale * torch.tanh(ours["embed"](tokens)))
        expected = plain["head"](scale * torch.tanh(plain["embed"](tokens)))
        padded = torch.cat(everyone(logits), -1)
        close(padded[..., :V], expected.detach())
        assert padded[..., V:].eq(-math.inf).all()
        known = {"vocab_size": V} if say or (smoothing and padded.shape[-1] > V) else {}
        loss = tp.vocab_parallel_cross_entropy(logits, target, group, ignore, smoothing, z_loss=z_loss, **known)
        flat = expected.flatten(0, 1)
        reference = F.cross_entropy(flat, target.flatten(), None, None, ignore, None, "none", smoothing).view(5, 3)
        reference = reference + (target != ignore) * z_loss * torch.logsumexp(expected, -1).square()
        close(loss.detach(), reference.detach())
        bitwise(loss.detach(), everyone(loss)[0])
        filled = logits.detach().masked_fill(logits == -math.inf, 1e4)  # padding is no part of it whatever its logits
        known = {"vocab_size": V, "z_loss": z_loss}
        close(tp.vocab_parallel_cross_entropy(filled, target, group, ignore, smoothing, **known), loss.detach())
        assert loss[0, 0] == 0
        weight = randn(5, 3, seed=step)  # each token's loss has a gradient of its own
        (loss * weight).sum().backward()
        (reference * weight).sum().backward()
        check_same(ours, plain, what=f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
        padding = torch.cat(everyone(ours["embed"].weight))[V:]
        assert padding.eq(0).all()
    gathered = tp.ColumnParallelLinear.from_full(plain["head"], gather_output=True, **keywords)
    close(gathered(randn(2, 6)).detach(), plain["head"](randn(2, 6)).detach())


@given(
    *(RANKS, st.integers(4, 13), st.sampled_from([1, 4]), FLAG, FLAG, st.sampled_from([0.0, 0.1])),
    *(st.sampled_from([0.0, 1e-3]), st.sampled_from([-100, 2]), FLAG),
)
def test_vocabulary_and_loss_equal_one_device(N, V, pad, bias, tied, smoothing, z_loss, ignore, say):
    run(N, body_vocabulary, V, pad, bias, tied, smoothing, z_loss, ignore, say)


def body_edges():
    group, t, x = pool.group(), pool.world_size(), randn(4)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    ours = tp.parallelize(copy.deepcopy(plain), {"0": "column", "1": "row"}, group)
    for model in (ours, plain):
        model(x).square().sum().backward()  # of one vector
    check_same(ours, plain)
    for keywords in ({"eps": 0.5}, {"elementwise_affine": False}, {"bias": False}):
        plain = nn.LayerNorm(4, **keywords)
        close(tp.SequenceParallelLayerNorm.from_full(plain, process_group=group)(x).detach(), plain(x).detach())
    ours = tp.ParallelMLP(4, 6, "gelu_tanh", process_group=group)
    A, a, B, b = tp.full_state_dict(ours).values()
    close(ours(x).detach(), F.linear(F.gelu(F.linear(x, A, a), approximate="tanh"), B, b))
    whole = (1e30 * randn(3, 4 * t)).float().requires_grad_()  # finite, but not its square
    shard, target = mine(whole.detach(), -1).requires_grad_(), torch.tensor([0, 4 * t - 1, -100])
    loss = tp.vocab_parallel_cross_entropy(shard, target, group)
    expected = F.cross_entropy(whole, target, reduction="none")
    (loss.sum() / 1e30).backward(), (expected.sum() / 1e30).backward()
    assert torch.allclose(loss, expected)
    assert torch.allclose(shard.grad, mine(whole.grad, -1))
    mixed = nn.ModuleList([tp.ColumnParallelLinear(4, 6, process_group=group).bfloat16(), nn.LayerNorm(4)])
    for parameter in mixed.parameters():  # each rank sees float64, or none does
        parameter.grad = torch.ones_like(parameter)
    close(tp.clip_grad_norm_(mixed, 1.0, process_group=group), torch.tensor(24 + 6 + 4 + 4.0).sqrt())


@pytest.mark.parametrize("N", [1, 2])
def test_edges(N):
    run(N, body_edges)


class PlainLayer(nn.Module):
    """Grouped heads and SwiGLU, which PyTorch's layer does not have, written down plainly."""

    def __init__(self, h, heads, kv_heads, f, bias):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, h // heads
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        rows = h + 2 * kv_heads * self.d
        self.self_attn.in_proj_weight = nn.Parameter(randn(rows, h))
        self.self_attn.register_parameter("in_proj_bias", nn.Parameter(randn(rows)) if bias else None)
        self.self_attn.out_proj = nn.Linear(h, h, bias)
        self.mlp.linear1, self.mlp.linear2 = nn.Linear(h, 2 * f, bias), nn.Linear(f, h, bias)
        self.norm1, self.norm2 = nn.LayerNorm(h, bias=bias), nn.LayerNorm(h, bias=bias)

    def forward(self, x):
        a, (s, b, h) = self.self_attn, x.shape
        q, k, v = F.linear(self.norm1(x), a.in_proj_weight, a.in_proj_bias).split(
            [h] + 2 * [self.kv_heads * self.d], -1
        )
        q, k, v = (y.view(s, b, -1, self.d) for y in (q, k, v))
        out = []
        for head in range(self.heads):
            g = head * self.kv_heads // self.heads
            scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, g]) / self.d**0.5
            scores = scores + torch.full((s, s), -math.inf).triu(1)
            out.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1), v[:, :, g]))
        x = x + a.out_proj(torch.cat(out, -1))
        gate, up = self.mlp.linear1(self.norm2(x)).chunk(2, -1)
        return x + self.mlp.linear2(F.silu(gate) * up)


def body_grouped(kv_heads, bias, sp):
    group, h, heads, f, s = pool.group(), 24, 12, 12, 12
    torch.manual_seed(3)
    plain = PlainLayer(h, heads, kv_heads, f, bias)
    keywords = {"num_kv_heads": kv_heads, "activation": "swiglu", "bias": bias, "sequence_parallel": sp}
    ours = tp.ParallelTransformerLayer(h, heads, f, process_group=group, **keywords)
    tp.load_full_state_dict(ours, plain.state_dict())
    parameters = list(plain.parameters())
    for _ in range(2):  # clipped twice, as gradients accumulate
        x = randn(s, 2, h).requires_grad_()
        y = ours(mine(x) if sp else x)
        y = tp.gather_from_region(y, group, dim=0) if sp else y
        ours_x = torch.autograd.grad(y.square().sum(), [*ours.parameters(), x], allow_unused=True)
        for parameter, gradient in zip(ours.parameters(), ours_x[:-1], strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        expected = plain(x)
        close(y.detach(), expected.detach())
        expected.square().sum().backward()
        check_same(ours, plain)
        for norm_type in (2.0, 1.0, math.inf):
            theirs = nn.utils.clip_grad_norm_(parameters, 3.0, norm_type)
            norm = tp.clip_grad_norm_(ours if norm_type == 2.0 else ours.parameters(), 3.0, norm_type, group)
            close(norm, theirs, what=f"norm {norm_type}")
            assert all(torch.equal(norm, other) for other in everyone(norm))
        check_same(ours, plain, what="clipped")


@pytest.mark.parametrize("case", ["1 3 1 0", "2 1 1 1", "2 6 0 0", "3 1 0 1", "4 2 1 1", "4 1 1 0", "4 4 0 1"])
def test_grouped_heads_swiglu_and_the_clipped_norm(case):  # ranks, kv_heads, bias, sequence_parallel
    N, kv_heads, bias, sp = map(int, case.split())
    run(N, body_grouped, kv_heads, bool(bias), bool(sp))


def body_encoder_layer(norm_first, batch_first, activation, sp, causal):
    group = pool.group()
    torch.manual_seed(4)
    plain = nn.TransformerEncoderLayer(24, 12, 48, 0.0, activation, norm_first=norm_first, batch_first=batch_first)
    keywords = {"norm_first": norm_first, "batch_first": batch_first, "activation": activation, "sequence_parallel": sp}
    torch.manual_seed(4)
    ours = tp.ParallelTransformerLayer(24, 12, 48, causal=causal, process_group=group, **keywords)
    rename = {f"mlp.linear{i}.{kind}": f"linear{i}.{kind}" for i in "12" for kind in ("weight", "bias")}
    rename = lambda name, names=rename: names.get(name, name)  # noqa: E731
    for name, value in tp.full_state_dict(ours).items():
        bitwise(value, plain.state_dict()[rename(name)])  # the same draws
    x = randn(12, 12, 24)
    mask = nn.Transformer.generate_square_subsequent_mask(12) if causal else None
    our_x, x = (mine(x) if sp else x).clone().requires_grad_(), x.requires_grad_()
    y, expected = ours(our_x), plain(x, src_mask=mask)
    close(y.detach(), (mine(expected) if sp else expected).detach())
    y.square().sum().backward()
    expected.square().sum().backward()
    close(our_x.grad, mine(x.grad) if sp else x.grad)
    check_same(ours, plain, rename)


@given(N=RANKS, norm_first=FLAG, batch_first=FLAG, activation=st.sampled_from(["gelu", "relu"]), sp=FLAG, causal=FLAG)
def test_transformer_layer_equals_pytorchs(N, norm_first, batch_first, activation, sp, causal):
    run(N, body_encoder_layer, norm_first, batch_first, activation, sp, causal)


# ---- against PyTorch's


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Embedding(24, 12), nn.LayerNorm(12), nn.LayerNorm(12)
        self.linear1, self.linear2, self.head = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.linear2(F.gelu(self.linear1(self.norm1(x))))
        return self.head(self.norm2(x))


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def body_torch(sp):
    torch.manual_seed(5)
    plain, group = Small(), pool.group()
    mesh = DeviceMesh.from_group(group, "cpu")
    between = Shard(0) if sp else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=not sp),
        "linear1": ColwiseParallel(input_layouts=between),
        "linear2": RowwiseParallel(output_layouts=between, use_local_output=not sp),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sp:
        plan |= {"norm1": SequenceParallel(sequence_dim=0), "norm2": SequenceParallel(sequence_dim=0)}
    theirs = parallelize_module(copy.deepcopy(plain), mesh, plan)
    kinds = {"embed": "vocab", "linear1": "column", "linear2": "row", "head": "column"}
    kinds |= {"norm1": "norm", "norm2": "norm"} if sp else {}
    ours = tp.parallelize(copy.deepcopy(plain), kinds, group, sequence_parallel=sp)
    if sp:
        ours.embed.register_forward_hook(lambda module, inputs, output: tp.scatter_to_sequence(output, group))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    for step in range(3):
        tokens, target = torch.randint(24, (2, 12, 2), generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = tp.vocab_parallel_cross_entropy(ours(tokens), target, group).mean()
        loss.backward()
        with loss_parallel():
            their_loss = F.cross_entropy(theirs(tokens).flatten(0, 1), target.flatten())
            their_loss.backward()
        close(loss.detach(), whole(their_loss))
        grads = gradients(ours)
        for name, parameter in theirs.named_parameters():
            close(grads[name], whole(parameter.grad), what=name)
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in theirs.named_parameters():
        close(tp.full_state_dict(ours)[name], whole(parameter), what=name)


@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.parametrize("sp", [False, True])
def test_pytorchs_own_styles(N, sp):
    run(N, body_torch, sp)


# ---- a whole model


class GPT(nn.Module):
    def __init__(self, V=29, C=12, heads=12, layers=2, tied=True, dropout=0.0):
        super().__init__()
        self.embed = ddp.Embed(V, 8, C)
        self.blocks = nn.ModuleList(ddp.Block(C, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        if tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel_gpt(model, group, sp):
    plan = {"embed.tokens": "vocab", "blocks.[01]": "layer", "head": "vocab"} | ({"norm": "norm"} if sp else {})
    assert tp.parallelize(model, plan, group, sequence_parallel=sp) is model
    if sp:
        model.embed.register_forward_hook(lambda module, inputs, output: tp.scatter_to_sequence(output, group))
    return model


def gpt_batch(step, rows, V=29):
    window = torch.randint(V, (rows, 9), generator=torch.Generator().manual_seed(100 + step))
    return window[:, :-1], window[:, 1:]


def body_gpt(optimizer, sp, tied):
    t, group = pool.world_size(), pool.group()
    torch.manual_seed(6)
    plain = GPT(tied=tied)
    final = []
    for run_number in range(2):  # the second: bitwise as the first
        reference = copy.deepcopy(plain)
        ours = parallel_gpt(copy.deepcopy(plain), group, sp)
        assert (ours.head.weight is ours.embed.tokens.weight) == tied
        optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (ours, reference)]
        for step in range(5):
            tokens, target = gpt_batch(step, 2 * t)
            loss = tp.vocab_parallel_cross_entropy(ours(tokens), target, group).mean()
            expected = F.cross_entropy(reference(tokens).flatten(0, 1), target.flatten())
            for o, l in zip(optimizers, (loss, expected), strict=True):
                o.zero_grad()
                l.backward()
            close(loss.detach(), expected.detach())
            norm = tp.clip_grad_norm_(ours, 0.5, process_group=group)
            close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
            if run_number == 0:
                check_same(ours, reference, what=f"step {step}")
            for o in optimizers:
                o.step()
        check_same(ours, reference)
        final.append(torch.cat([p.detach().flatten() for p in ours.parameters()]))
    bitwise(*final)
    loaded = parallel_gpt(GPT(tied=tied), group, sp)
    tp.load_full_state_dict(loaded, reference.state_dict())
    state = tp.full_state_dict(loaded)
    for name, value in reference.state_dict().items():
        bitwise(state[name], value)
    assert (state["head.weight"].data_ptr() == state["embed.tokens.weight"].data_ptr()) == tied
    with torch.no_grad():
        logits = torch.cat(everyone(loaded(tokens)), -1)
    close(logits[..., :29], reference(tokens).detach())


@pytest.mark.parametrize(
    "case", ["1 sgd sp tied", "2 adamw tied", "2 momentum sp", "3 adamw sp tied", "4 sgd", "4 adamw sp"]
)
def test_five_steps_of_a_gpt_equal_one_device(case):
    N, optimizer, *words = case.split()
    run(int(N), body_gpt, optimizer, "sp" in words, "tied" in words)


def body_two_by_two(sp):
    rank = dist.get_rank()
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    along = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(7)
    plain = GPT()
    ours = ddp.DDP(parallel_gpt(copy.deepcopy(plain), across, sp), along, bucket_cap_mb=1e-3)
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (ours, plain)]
    for step in range(3):
        tokens, target = gpt_batch(step, 8)
        for optimizer in optimizers:
            optimizer.zero_grad()
        part, part_target = tokens.chunk(2)[rank // 2], target.chunk(2)[rank // 2]
        tp.vocab_parallel_cross_entropy(ours(part), part_target, across).mean().backward()
        F.cross_entropy(plain(tokens).flatten(0, 1), target.flatten()).backward()
        close(tp.clip_grad_norm_(ours, 0.5, process_group=across), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        check_same(ours.module, plain)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("sp", [False, True])
def test_data_parallel_over_an_orthogonal_group(sp):
    run(4, body_two_by_two, sp)


# ---- random numbers


def body_seeds():
    group, rank = pool.group(), pool.rank()

    def draws(seed):
        tp.model_parallel_seed(seed, group)
        before = torch.rand(4)
        with tp.parallel_region(group):
            inside = torch.rand(4)
        with tp.parallel_region(group):
            again = torch.rand(4)
        return before, inside, again, torch.rand(4)

    before, inside, again, after = first = draws(11)
    for same in (before, after):
        assert all(torch.equal(same, other) for other in everyone(same))
    for different in (inside, again):
        assert len({tuple(other.tolist()) for other in everyone(different)}) == pool.world_size()
    assert not torch.equal(inside, again)
    assert all(map(torch.equal, first, draws(11)))
    assert not any(map(torch.equal, first, draws(12)))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        tp.model_parallel_seed(rank, group)


def body_dropout(sp):
    group, t = pool.group(), pool.world_size()
    layer = tp.ParallelTransformerLayer(8, 4, dropout=0.5, sequence_parallel=sp, process_group=group)
    with torch.no_grad():  # every head the same: what differs between ranks is dropout
        layer.self_attn.in_proj_weight.copy_(randn(2, 8).repeat(12 // t, 1))
    seen = {}
    layer.self_attn.out_proj.register_forward_pre_hook(lambda m, inputs: seen.update(inside=inputs[0].detach()))
    layer.dropout1.register_forward_hook(lambda m, inputs, output: seen.update(outside=output.detach() == 0))
    results = []
    for how in ("plain", "plain", "reentrant", "not reentrant"):
        tp.model_parallel_seed(3, group)
        layer.zero_grad()
        x = randn(4 if sp else 4 * t, 2, 8).requires_grad_()
        y = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
        after = torch.rand(3)
        (y * randn(*y.shape)).sum().backward()
        results.append([y.detach(), x.grad, after, *(p.grad.clone() for p in layer.parameters())])
        inside, outside = (len({tuple(o.flatten().tolist()) for o in everyone(seen[k])}) for k in ("inside", "outside"))
        assert inside == t
        assert outside == (t if sp else 1)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            bitwise(a, b)
    assert all(torch.equal(results[0][2], other) for other in everyone(results[0][2]))
    layer.eval()
    x = randn(4, 2, 8)
    bitwise(layer(x).detach(), layer(x).detach())


def test_regions_draw_differently_and_again_the_same():
    run(2, body_seeds)


@pytest.mark.parametrize("sp", [False, True])
def test_dropout_and_checkpoints(sp):
    run(2, body_dropout, sp)


def body_inner_dropout():
    """Of an nn.TransformerEncoderLayer, between its column and its row layer."""
    plain = nn.TransformerEncoderLayer(8, 2, 8, 0.5)
    ours = tp.parallelize(plain, {"linear1": "column", "linear2": "row"}, pool.group())
    tp.model_parallel_seed(3, pool.group())
    masks = everyone(ours.dropout(torch.ones(50)))
    assert not torch.equal(*masks)
    masks = everyone(ours.dropout1(torch.ones(50)))
    assert torch.equal(*masks)
    ours = tp.parallelize(nn.TransformerEncoderLayer(8, 2, 8, 0.5), {"self_attn": "attention"}, pool.group())
    assert torch.equal(*everyone(ours.dropout(torch.ones(50))))  # linear1 is whole, so all ranks have the same features
    twice = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    twice.append(twice[0])
    before = {name: value.clone() for name, value in twice.state_dict().items()}
    tp.parallelize(twice, {"2": "column"}, pool.group())
    assert twice[2] is twice[0]
    assert isinstance(twice[0], tp.ColumnParallelLinear)
    for name, value in tp.full_state_dict(twice).items():
        bitwise(value, before[name].detach())


def test_dropout_inside_a_parallelized_layer():
    run(2, body_inner_dropout)


# ---- parallelize


def body_encoder(masked):
    """nn.TransformerEncoder, in training and in inference, where PyTorch has a fast path."""
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(12, 4, 24, 0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=masked)
    ours = tp.parallelize(
        copy.deepcopy(plain),
        {"layers.*.linear1": "column", "layers.*.linear2": "row", "layers.*.self_attn": "attention"},
        pool.group(),
    )
    x = randn(3, 5, 12)
    padding = torch.arange(5)[None] >= torch.tensor([[5], [3], [2]])
    keywords = {"src_key_padding_mask": padding} if masked else {"mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}
    real = ~padding if masked else torch.ones(3, 5, dtype=torch.bool)
    close(ours(x, **keywords)[real].detach(), plain(x, **keywords)[real].detach())
    mask = {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "need_weights": False}  # True: not to be seen
    close(*(model.layers[0].self_attn(x, x, x, **mask)[0].detach() for model in (ours, plain)))
    mask |= {"key_padding_mask": padding, "is_causal": True}
    with sdpa_kernel(SDPBackend.MATH):  # refuses a mask and is_causal, which others add up
        close(*(model.layers[0].self_attn(x, x, x, **mask)[0].detach() for model in (ours, plain)))
    plain.eval(), ours.eval()
    with torch.no_grad():
        close(ours(x, **keywords)[real], plain(x, **keywords)[real])
    ours_attention, one, y, per_head = ours.layers[0].self_attn, x[0], torch.ones_like(x), torch.zeros(12, 5, 5)
    wrong = [((x, x, x), {}), ((one, one, one), mask), ((x, y, y), mask), ((x, x, y), mask)]
    for tensors, keywords in [*wrong, ((x, x, x), {**mask, "attn_mask": per_head})]:
        with pytest.raises(ValueError, match="need_weights=False"):
            ours_attention(*tensors, **keywords)
    moved = copy.deepcopy(ours)
    for move in (lambda module: module, lambda module: module.bfloat16(), lambda module: module.to("meta")):
        for (name, a), (_, b) in zip(ours.named_parameters(), move(moved).named_parameters(), strict=True):
            assert getattr(a, "tensor_parallel", None) == getattr(b, "tensor_parallel", None), name
    alive = weakref.ref(ours)
    del ours, moved, a, b
    assert alive() is None or gc.collect() is None or alive() is None


@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_in_training_and_inference(masked):
    run(2, body_encoder, masked)


REFUSED = {
    "tp.ColumnParallelLinear(4, 7, **g)": "7 output features",
    "tp.RowParallelLinear(7, 4, **g)": "7 input features",
    "tp.VocabParallelEmbedding(7, 4, **g, make_vocab_size_divisible_by=None)": "size of 1 or 7, or 6 or 8 entries",
    "tp.ParallelSelfAttention(9, 3, **g)": "3 attention heads",
    "tp.ParallelSelfAttention(10, 4, **g)": "4 attention heads must divide",
    "tp.ParallelSelfAttention(24, 6, num_kv_heads=3, **g)": "3 key and value heads",
    "tp.ParallelSelfAttention(24, 6, num_kv_heads=4, **g)": "multiple of num_kv_heads",
    "tp.ParallelMLP(4, 7, **g)": "7 output features",
    "tp.ParallelMLP(4, 7, activation='swiglu', **g)": "7 output features",
    "tp.ParallelMLP(4, 8, activation='glu', **g)": "glu",
    "tp.reduce_scatter_to_sequence(ones(3, 2), **g)": "3 positions of the sequence",
    "tp.scatter_to_sequence(ones(3, 2), **g)": "3 positions of the sequence",
    "tp.scatter_to_region(ones(2, 3), **g)": "3 features",
    "tp.RowParallelLinear(4, 4, sequence_parallel=True, **g)(ones(3, 2))": "use a world size of 1 or 3, or 2 or 4",
    "tp.VocabParallelEmbedding(7, 4, **g)(tensor([7]))": r"outside of \[0, 7\)",
    "tp.VocabParallelEmbedding(7, 4, **g)(tensor([-1]))": r"outside of \[0, 7\)",
    "tp.vocab_parallel_cross_entropy(ones(1, 4), tensor([8]), **g)": r"outside of \[0, 8\)",
    "tp.vocab_parallel_cross_entropy(ones(1, 4), tensor([7]), **g, vocab_size=7)": r"outside of \[0, 7\)",
    "tp.vocab_parallel_cross_entropy(ones(3, 4), tensor([7]), **g)": r"target is \(1,\); logits \(3, 4\) need one",
    "tp.vocab_parallel_cross_entropy(ones(1, 4), tensor([7]), **g, vocab_size=9)": "is 9, but .* have 8 logits",
    "tp.vocab_parallel_cross_entropy(ones(1, 4), tensor([7]), **g, label_smoothing=1.5)": "label_smoothing is 1.5",
    "tp.VocabParallelEmbedding.from_full(nn.Embedding(4, 4, sparse=True), **g)": "sparse",
    "tp.VocabParallelEmbedding.from_full(nn.Embedding(4, 4, max_norm=1.0), **g)": "max_norm",
    "tp.VocabParallelEmbedding.from_full(nn.Embedding(4, 4, scale_grad_by_freq=True), **g)": "scale_grad_by_freq",
    "tp.parallelize(layer, {'nothing': 'column'}, **g)": "no layer is named 'nothing'",
    "tp.parallelize(layer, {'norm1': 'layer'}, **g)": "no layer is named 'norm1.self_attn'",
    "tp.parallelize(nn.Linear(4, 4), {'': 'column'}, **g)": "no layer is named ''",
    "tp.parallelize(layer, {'linear1': 'vertical'}, **g)": "linear1: Linear cannot be 'vertical'",
    "tp.parallelize(layer, {'norm1': 'row'}, **g)": "norm1: LayerNorm cannot be 'row'",
    "tp.parallelize(layer, {'norm1': 'norm', 'linear1': 'column'}, **g)": "linear1: 7 output features",
    "tp.parallelize(layer, {'norm1': 'norm', 'linear2': 'row'}, **g)": "linear2: 7 input features",
    "tp.parallelize(layer, {'self_attn': 'attention'}, **g)": "self_attn: 3 attention heads",
    "tp.ParallelSelfAttention.from_full(nn.MultiheadAttention(4, 2, kdim=2), **g)": "kdim",
    "tp.ParallelSelfAttention.from_full(nn.MultiheadAttention(4, 2, add_bias_kv=True), **g)": "add_bias_kv",
    "tp.ParallelSelfAttention.from_full(nn.MultiheadAttention(4, 2, add_zero_attn=True), **g)": "add_zero_attn",
    "tp.parallelize(layer, {'': 'layer'}, **g)": "self_attn: 3 attention heads",
    "tp.parallelize(gpt, {'embed.tokens': 'vocab'}, **g)": "embed.tokens.weight, head.weight are one parameter",
    "tp.parallelize(gpt, {'embed.tokens': 'vocab', 'head': 'row'}, **g)": "weight, head.weight are one parameter",
}


def body_refuse():
    names = {"tp": tp, "nn": nn, "ones": torch.ones, "tensor": torch.tensor, "g": {"process_group": pool.group()}}
    names |= {"layer": nn.TransformerEncoderLayer(6, 3, 7), "gpt": GPT(V=28)}
    before = str(names["layer"]), str(names["gpt"])
    for call, words in REFUSED.items():
        with Collectives() as seen, pytest.raises((ValueError, IndexError), match=words):
            eval(call, names)
        assert not seen.calls, call
    assert (str(names["layer"]), str(names["gpt"])) == before


def test_wrong_sizes_are_an_error_before_any_collective():
    run(2, body_refuse)


def body_assigned():
    """Parameters that load_state_dict(assign=True) puts in are known as shards, as those before."""
    group = pool.group()
    layer = tp.ColumnParallelLinear(4, 6, process_group=group)
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    assert layer.weight.tensor_parallel.dim == 0
    layer.weight.grad = torch.full_like(layer.weight, 1.0 + pool.rank())
    theirs = torch.cat([torch.full_like(layer.weight, 1.0 + rank) for rank in range(pool.world_size())])
    assert torch.allclose(tp.clip_grad_norm_(layer.weight, 1e9, process_group=group), theirs.norm())


def test_assigned_parameters_are_marked():
    run(2, body_assigned)


def body_not_a_member():
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not a member"):
            tp.ColumnParallelLinear(4, 4, process_group=group)


def test_a_rank_outside_of_the_group():
    run(4, body_not_a_member)


def body_low_precision(autocast):
    torch.manual_seed(9)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ours = tp.parallelize(copy.deepcopy(plain).float(), {"0": "column", "2": "row"}, pool.group())
    if not autocast:
        ours.bfloat16()
    x = randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = ours((x.float() if autocast else x.bfloat16()).requires_grad_())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    plain(x).sum().backward()
    for name, grad in gradients(ours).items():
        theirs = plain.get_parameter(name).grad
        assert grad.dtype == (torch.float32 if autocast else torch.bfloat16)
        assert (grad - theirs).abs().max() <= 8 * 2**-8 * theirs.abs().max(), name
    shard = mine(y, -1).detach().requires_grad_()
    loss = tp.vocab_parallel_cross_entropy(shard, torch.arange(8), pool.group())
    loss.sum().backward()
    reference = y.detach().float().requires_grad_()
    expected = F.cross_entropy(reference, torch.arange(8), reduction="none")
    expected.sum().backward()
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert shard.grad.dtype == torch.bfloat16
    assert (shard.grad - mine(reference.grad, -1)).abs().max() <= 2**-8


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit(autocast):
    run(2, body_low_precision, autocast)


# ---- cost


class Recorded:
    """A Work that records when it is waited for."""

    def __init__(self, work, events):
        self.work, self.events = work, events

    def wait(self):
        self.events.append("wait")
        return self.work.wait()


class Events(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in ("mm", "allreduce_", "_allgather_base_", "alltoall_base_"):
            self.events.append(name)
        return func(*args, **(kwargs or {}))


def body_overlap(sp):
    layer = tp.ColumnParallelLinear(4, 6, sequence_parallel=sp, process_group=pool.group())
    y, seen = layer(randn(3, 4).requires_grad_()), Events()
    with pytest.MonkeyPatch.context() as patch, seen:
        for owner, name in ((dist, "all_reduce"), (dist, "all_to_all_single"), (tp, "all_gather_single")):
            collective = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, call=collective, **k: Recorded(call(*a, **k), seen.events))
        y.sum().backward()
    # the gradient of the input leaves before that of the weight is computed, and is waited for after
    plain = ["mm", "allreduce_", "mm", "wait"]
    assert seen.events == (["_allgather_base_", "mm", "alltoall_base_", "wait", "mm", "wait"] if sp else plain)


@pytest.mark.parametrize("sp", [False, True])
def test_communication_overlaps_the_weights_gradient(sp):
    run(2, body_overlap, sp)


def body_sent(sp, again):
    group, t, (s, b, h) = pool.group(), pool.world_size(), (12, 2, 24)
    layer = tp.ParallelTransformerLayer(h, 12, sequence_parallel=sp, process_group=group)
    layer.self_attn.gather_again = layer.mlp.linear1.gather_again = again
    x = randn(s // t if sp else s, b, h).requires_grad_()
    with tp.SentBytes() as sent:
        layer(x).square().sum().backward()
    elements = (10 if sp and again else 8) * b * s * h + (8 * h if sp else 0)  # 8h: the norms' gradients
    assert round(sent.total) == round(8 * elements * (t - 1) / t)
    logits = randn(s, b, 5).requires_grad_()
    with Collectives() as seen, tp.SentBytes() as sent:
        tp.vocab_parallel_cross_entropy(logits, torch.zeros(s, b, dtype=torch.long), group).sum().backward()
    assert seen.calls == ([("allreduce_", 8 * b * s)] * 3 if t > 1 else [])
    with Collectives() as seen:
        tp.vocab_parallel_cross_entropy(logits, torch.zeros(s, b, dtype=torch.long), group, label_smoothing=0.1)
    assert len(seen.calls) == (3 if t > 1 else 0)


@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize(("sp", "again"), [(False, True), (True, True), (True, False)])
def test_a_layer_sends_what_the_formula_says(N, sp, again):
    run(N, body_sent, sp, again)


FAKE = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import tensor_parallel as tp
from shared import Collectives

t, rank = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=t)
s, b, h = 1024, 1, 1024
for sp in (False, True):
    layer = tp.ParallelTransformerLayer(h, 1024, 1024, num_kv_heads=1024, sequence_parallel=sp)
    x = torch.randn(s // t if sp else s, b, h, requires_grad=True)
    with tp.SentBytes() as sent, Collectives() as seen:
        layer(x).sum().backward()
    expected = 4 * ((10 if sp else 8) * b * s * h + (8 * h if sp else 0)) * (t - 1) / t
    assert abs(sent.total / expected - 1) < 1e-9, (sp, sent.total, expected)
    names = {name for name, _ in seen.calls}
    assert names == ({"_allgather_base_", "_reduce_scatter_base_", "allreduce_"} if sp else {"allreduce_"}), names
    held = sum(p.numel() for p in layer.parameters())
    assert held == (6 * h * h + 4 * h) // t + 6 * h, held
with Collectives() as seen:
    tp.vocab_parallel_cross_entropy(torch.randn(s, b, 8), torch.zeros(s, b, dtype=torch.long)).sum()
assert seen.calls == [("allreduce_", 4 * b * s)] * 3, seen.calls
y = tp.reduce_scatter_to_sequence(torch.ones(2 * t, 3, requires_grad=True))
y.mul_(2)  # as dropout in place: what a collective returns is no view
with torch.device("meta"):
    x = tp.VocabParallelEmbedding(50257, 4)(torch.zeros(s, b, dtype=torch.long))
    loss = tp.vocab_parallel_cross_entropy(x, torch.zeros(s, b, dtype=torch.long))
assert loss.is_meta and loss.shape == (s, b)
print("ok")
"""


@pytest.mark.parametrize(("t", "rank"), [(8, 3), (64, 63), (1024, 0)])
def test_the_same_bytes_at_scale(t, rank):
    here = Path(__file__).parent
    environment = {"PYTHONPATH": f"{here}:{here.parent}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FAKE, str(t), str(rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "ok\n", done.stderr


def body_activations(sp, again):
    t, group, (s, b, h, a) = pool.world_size(), pool.group(), (16, 2, 48, 12)
    layer = tp.ParallelTransformerLayer(h, a, sequence_parallel=sp, process_group=group)
    layer.self_attn.gather_again = layer.mlp.linear1.gather_again = again
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(randn(s // t if sp else s, b, h).requires_grad_())
    return sum(nbytes for nbytes, _ in saved.values()) / 8 / (s * b * h)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize(("sp", "again"), [(False, True), (True, True), (True, False)])
def test_activations_kept_for_backward(t, sp, again):
    """In elements per sbh. Korthikanti's 10 + 24/t bytes, or 34/t, less two masks of dropout (2 bytes), halved."""
    s, b, h, a = 16, 2, 48, 12
    whole = 4 / t if sp else 4  # inputs of the norms, which are the residuals, and of the column layers
    inside = 12 / t
    gathered = 0 if again or not sp else 2 - 2 / t
    small = 4 / h / (t if sp else 1) + a / (h * t)  # norms keep mean and deviation, attention one number per row
    small += 4 / (s * b) if sp and t > 1 else 0  # weights and biases of the norms, stacked
    for measured in run(t, body_activations, sp, again):
        assert measured == pytest.approx(whole + inside + gathered + small, rel=1e-12)

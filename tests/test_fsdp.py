"""fsdp.py against one device and against torch.distributed.fsdp.fully_shard."""

import copy
import gc
import math
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from launch import ROOT, launch
from shared import OPTIMIZERS, Collectives, assert_equal, loss_of, make_batch, make_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp


class Ours:
    """What a test body needs of an implementation; `exact`: it adds in rank order."""

    exact, Policy, Offload, clip = True, fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy, fsdp.clip_grad_norm_
    no_sync = fsdp.no_sync

    @staticmethod
    def shard(module, mesh=None, **kwargs):
        return fsdp.fully_shard(module, mesh=mesh, process_group=None if mesh else pool.group(), **kwargs)


class PyTorchs:
    exact, Policy, Offload = False, TorchPolicy, TorchOffload

    @staticmethod
    def shard(module, mesh=None, **kwargs):
        return torch_fully_shard(module, mesh=mesh or DeviceMesh.from_group(pool.group(), "cpu"), **kwargs)

    @staticmethod
    @contextmanager
    def no_sync(module):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)

    @staticmethod
    def clip(module, max_norm):
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm).full_tensor()


BOTH = pytest.mark.parametrize("impl", [Ours, PyTorchs])


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.one, self.two = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))


class Blocks(nn.Module):
    """Calls blocks[i] for i in `which`. `how` runs a block; `head` is the root's own."""

    def __init__(self, count=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(6, 3)

    def forward(self, x, which=None, how=lambda block, x: block(x)):
        for i in range(len(self.blocks)) if which is None else which:
            x = how(self.blocks[i], x)
        return self.head(x)


def shard(model, impl=Ours, **kwargs):
    """A unit of every second child (every block), and one of the rest; or one of all, where parameters are tied."""
    children = list(model.children())[::2] if not isinstance(model, Blocks) else model.blocks
    for child in children if not hasattr(model, "second") else ():
        if list(child.parameters()):
            impl.shard(child, **kwargs)
    return impl.shard(model, **kwargs)


def pair(impl=Ours, dtype=torch.float32, count=4, **kwargs):
    """A sharded model of blocks, and the plain one."""
    torch.manual_seed(3)
    plain = Blocks(count).to(dtype)
    return shard(copy.deepcopy(plain), impl, **kwargs), plain


def whole(shard, like):
    """All ranks' pieces of a parameter or gradient, laid out in memory as `like`; None where all ranks have None."""
    if isinstance(shard, dist.tensor.DTensor):
        return shard.full_tensor()
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, None if shard is None else shard.detach().clone(), group=pool.group())
    if all(piece is None or not piece.numel() for piece in everyone) and like.numel():
        return None
    stride = torch.empty_like(like, device="meta").stride()
    return torch.cat([piece for piece in everyone if piece is not None]).as_strided(like.shape, stride)


def assert_same(ours, plain, exact=True, what=""):
    """Whole parameters and gradients of a sharded model and a plain one."""
    for (name, a), (other, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert_equal(whole(a.detach(), b), b.detach(), exact, f"{what} {name}")
        if b.numel():
            assert_equal(whole(a.grad, b), b.grad, exact, f"{what} gradient of {name}")


def one_device(plain, batches, loss=lambda model, batch: loss_of(model(batch))):
    """Accumulate the ranks' gradients in rank order, then divide; batches[rank] is a list of micro-batches."""
    before, total = {n: p.grad for n, p in plain.named_parameters()}, {}
    for micro_batches in batches:
        plain.zero_grad()
        for batch in micro_batches:
            loss(plain, batch).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    for name, parameter in plain.named_parameters():
        parameter.grad = total[name] / len(batches) if name in total else None
        if before[name] is not None:
            parameter.grad = before[name] if parameter.grad is None else before[name] + parameter.grad


def everywhere(step, dtype=torch.float32):
    """[[the batch of rank 0], …]"""
    return [[make_batch(r, step, dtype)] for r in range(pool.world_size())]


def units(model):
    return [module._fsdp_unit for module in model.modules() if hasattr(module, "_fsdp_unit")]


def storages(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def gathered_bytes(model):
    return storages([unit.gathered for unit in units(model)])


def assert_at_rest(model):
    assert gathered_bytes(model) == 0
    for unit in units(model):
        assert unit.state is fsdp.State.SHARDED
        assert unit.kept is None
        assert not unit.works
        assert all(place.whole.grad is None for place in unit.places)
    assert not any(p.dim() > 1 for p in model.parameters())


# ---- Without a process: how a unit is cut.


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    N=st.integers(1, 5),
    transposed=st.booleans(),
)
@example([[], [0, 3], [5, 0]], 3, False)
def test_pieces_are_disjoint_cover_everything_and_join(shapes, N, transposed):
    wholes = [torch.randn(shape) for shape in shapes]
    if transposed:
        wholes = [w.t().contiguous().t() if w.dim() == 2 else w for w in wholes]
    offsets, chunk = fsdp.layout([w.numel() for w in wholes], 16, N)
    assert all(offset % 16 == 0 for offset in offsets)
    assert chunk == math.ceil((offsets[-1] + wholes[-1].numel()) / N)
    flat = torch.full((N * chunk,), math.nan)
    for whole, offset in zip(wholes, offsets, strict=True):
        places = [fsdp.Place(whole, "w", [], offset, r * chunk, (r + 1) * chunk) for r in range(N)]
        assert places[0].view(flat).isnan().all()  # nobody else's
        for r, place in enumerate(places):
            flat[r * chunk : (r + 1) * chunk][place.here] = place.cut(whole)
        assert torch.equal(places[0].view(flat), whole)
        assert not whole.numel() or places[0].view(flat).is_contiguous() == whole.is_contiguous()
        assert torch.equal(places[0].join([place.cut(whole) for place in places]), whole)


# ---- Equal to one device, and to PyTorch's.


def body_train(impl, kind, dtype, optimizer, reshard, micro_batches, set_to_none, sync):
    N, rank = pool.world_size(), pool.rank()
    plain = make_model(kind, dtype)
    ours = make_model(kind, dtype, seed=1 + rank * impl.exact)  # rank 0's values count
    shard(ours, impl, reshard_after_forward=reshard)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (ours, plain)]
    for step in range(3):
        batches = [[make_batch(r, 10 * step + m, dtype) for m in range(micro_batches)] for r in range(N)]
        for o in optimizers:
            o.zero_grad(set_to_none=set_to_none)
        for i, batch in enumerate(batches[rank]):
            with nullcontext() if sync or i == micro_batches - 1 else impl.no_sync(ours):
                loss_of(ours(batch)).backward()
        for each in [[[micro[i]] for micro in batches] for i in range(micro_batches)] if sync else [batches]:
            one_device(plain, each)
        for o in optimizers:
            o.step()
        assert_same(ours, plain, impl.exact, f"step {step}")


@given(
    N=st.integers(1, 4),
    kind=st.sampled_from(["plain", "frozen", "tied", "odd"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    reshard=st.booleans(),
    micro_batches=st.integers(1, 3),
    set_to_none=st.booleans(),
    sync=st.booleans(),
)
@example(3, "plain", torch.float32, "adamw", True, 1, True, True)
@example(3, "odd", torch.float32, "sgd", True, 2, True, False)
@example(4, "frozen", torch.float32, "momentum", False, 2, False, True)
def test_bitwise_equal_to_one_device_at_every_world_size(
    N, kind, dtype, optimizer, reshard, micro_batches, set_to_none, sync
):
    pool.run(N, body_train, Ours, kind, dtype, optimizer, reshard, micro_batches, set_to_none, sync)


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize(("kind", "optimizer"), [("plain", "adamw"), ("frozen", "momentum"), ("tied", "sgd")])
def test_pytorchs_holds_the_same_claim_in_float64(N, kind, optimizer):
    pool.run(N, body_train, PyTorchs, kind, torch.float64, optimizer, N == 2, 2, True, N == 3)


def body_naive():
    N, rank = pool.world_size(), pool.rank()
    plain = nn.Sequential(nn.Linear(6, 4 * N), nn.Tanh(), nn.Linear(4 * N, N))
    ours = copy.deepcopy(plain).to("meta")  # a skeleton
    pad = lambda p: nn.functional.pad(p.detach().flatten(), (0, -p.numel() % N))  # noqa: E731
    pieces = {n: pad(p).chunk(N)[rank].clone().requires_grad_() for n, p in plain.named_parameters()}
    optimizers = [torch.optim.AdamW(p, lr=0.1) for p in (pieces.values(), plain.parameters())]
    gather = lambda piece, p: whole(piece, pad(p))[: p.numel()].view(p.shape)  # noqa: E731
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        loss_of(fsdp.forward_sharded(ours, pieces, make_batch(rank, step), process_group=pool.group())).backward()
        one_device(plain, everywhere(step))
        for o in optimizers:
            o.step()
        for name, p in plain.named_parameters():
            assert torch.equal(gather(pieces[name].grad, p), p.grad)
            assert torch.equal(gather(pieces[name].detach(), p), p)


@pytest.mark.parametrize("N", [1, 2, 3])
def test_naive_form(N):
    pool.run(N, body_naive)


# ---- Units are called in any order, any number of times.


def body_calls(impl, plan, reshard):
    """plan[step] are the blocks to call."""
    ours, plain = pair(impl, torch.float32 if impl.exact else torch.float64, reshard_after_forward=reshard)
    dtype = plain.head.weight.dtype
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step, which in enumerate(plan):
        for o in optimizers:
            o.zero_grad()
        loss_of(ours(make_batch(pool.rank(), step, dtype), which)).backward()
        one_device(plain, everywhere(step, dtype), lambda model, batch, which=which: loss_of(model(batch, which)))
        for o in optimizers:
            o.step()
        assert_same(ours, plain, impl.exact, f"step {step}")
        if impl is Ours:
            assert_at_rest(ours)


CALLS = {
    "as registered": [None] * 3,
    "backwards": [[3, 2, 1, 0]] * 3,
    "changing order": [[3, 2, 1, 0], None, [1, 0, 3, 2]],
    "one is never called": [[0, 1, 3]] * 2,
    "one is not called on some steps": [None, [0, 2, 3], [1, 2], None, [], None],
    "twice": [[0, 1, 1, 2, 3]] * 3,
    "twice, with others between": [[0, 1, 2, 0, 3, 1]] * 3,
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("calls", CALLS)
def test_units_are_called_as_one_likes(calls, reshard):
    pool.run(3, body_calls, Ours, CALLS[calls], reshard)


@pytest.mark.parametrize("calls", ["changing order", "twice, with others between"])
def test_pytorchs_units_are_called_as_one_likes(calls):
    pool.run(2, body_calls, PyTorchs, CALLS[calls], True)

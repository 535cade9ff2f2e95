"""fsdp.py against one device and against torch.distributed.fsdp.fully_shard."""

import copy
import dataclasses
import gc
import math
import sys
import time
import weakref
from contextlib import nullcontext

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from launch import ROOT, launch
from shared import MODELS, OPTIMIZERS, Collectives, assert_equal, loss_of, make_batch, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ddp
import fsdp
from fsdp import State, fully_shard

# ---- one parameter's rows, without a process


@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    N=st.integers(1, 5),
    transposed=st.booleans(),
)
@example([], 3, False)
@example([5, 0], 2, False)
def test_rows_are_cut_sent_and_put_together_again(shape, N, transposed):
    whole = torch.randn(shape)
    if transposed and whole.dim() > 1:
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    module = nn.Module()
    module.w = nn.Parameter(whole.clone(memory_format=torch.preserve_format))
    ranks = [fsdp.ShardedParameter(module.w, [("w", module, "w")], N, rank, "unit") for rank in range(N)]
    chunk = ranks[0].chunk
    for p in ranks:
        p.allocate(p.cut(whole), torch.full((chunk,), 7.0), torch.empty(N * chunk))
    # the shards are those of torch.chunk
    rows = whole.reshape(shape or (1,))
    chunks = list(rows.chunk(N)) if rows.numel() else []
    chunks += [rows[:0]] * (N - len(chunks))
    for p, expected in zip(ranks, chunks, strict=True):
        assert torch.equal(p.shard, expected) or rows.numel() == 0
    # scattered gradients arrive in the same rows, padded with zeros
    section = torch.full((N, chunk), torch.nan)
    ranks[0].spread(whole, section)
    for rank, p in enumerate(ranks):
        assert torch.equal(section[rank, : p.shard.numel()].view(p.shard.shape), p.shard)
        assert not section[rank, p.shard.numel() :].any()
    # and what all ranks sent makes the whole parameter, laid out as it was
    for p in ranks:
        p.land(section[: p.rank], 0)
        p.land(section[p.rank :], p.rank)
        assert torch.equal(p.whole, whole)
        if whole.numel() and shape and shape[0] % N == 0:
            assert p.whole.stride() == whole.stride() or 1 in shape
    assert not whole.numel() or ranks[0].whole.is_contiguous() == whole.is_contiguous()


def test_a_parameter_without_gradient_sends_what_changes_no_sum():
    p = fsdp.ShardedParameter(torch.randn(3, 2), [("w", None, "w")], 2, 0, "unit")
    nothing = torch.zeros(2, p.chunk)
    p.spread(None, nothing)
    for values in (torch.tensor([0.0, -0.0, 1.5, -math.inf]), nothing[0]):
        total = values + nothing[0, : len(values)]
        assert torch.equal(total, values)
        assert torch.equal(total.signbit(), values.signbit())


# ---- equality with one device, PyTorch, DDP


def alone_from(nbytes, body, *args):
    """`body(*args)` where shards of `nbytes` and more travel alone."""
    before, fsdp.ALONE = fsdp.ALONE, nbytes
    try:
        return body(*args)
    finally:
        fsdp.ALONE = before


def run_both(N, body, *args):
    """Once with each unit's parameters packed, as small ones are, once with each alone, as large ones are."""
    return [pool.run(N, alone_from, nbytes, body, *args) for nbytes in (math.inf, 1)]


def shard(model, wrap=fully_shard, children=True, **kwargs):
    """A unit of every second child, and of the rest; or one of all, where parameters are tied."""
    if "mesh" not in kwargs and wrap is fully_shard:
        kwargs["process_group"] = pool.group()
    elif "mesh" not in kwargs:
        kwargs["mesh"] = dist.device_mesh.DeviceMesh.from_group(pool.group(), "cpu")
    for child in list(model.children())[::2] if children else ():
        if list(child.parameters()):
            wrap(child, **kwargs)
    return wrap(model, **kwargs)


def whole(shards, shape):
    """All ranks' rows; None where all ranks have None."""
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, shards, group=pool.group())
    if everyone[0] is None:
        assert all(rows is None for rows in everyone)
        return None
    return torch.cat(everyone).view(shape)


def one_device(plain, batches, loss=lambda model, batch: loss_of(model(batch))):
    """Accumulate the ranks' gradients in rank order, then divide; batches[rank] is a list of micro-batches."""
    total = {}
    kept = {n: p.grad for n, p in plain.named_parameters()}
    for micro_batches in batches:
        plain.zero_grad()
        for batch in micro_batches:
            loss(plain, batch).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    for name, parameter in plain.named_parameters():
        parameter.grad = total[name] / len(batches) if name in total else None
        if kept[name] is not None:
            parameter.grad = kept[name] if parameter.grad is None else kept[name] + parameter.grad


def assert_same(ours, plain, exact=True, what=""):
    """Whole parameters and gradients of a sharded model and a plain one."""
    for (name, a), (other, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert_equal(whole(a.detach(), b.shape), b.detach(), exact, f"{what} {name}")
        assert_equal(whole(a.grad, b.shape), b.grad, exact, f"{what} gradient of {name}")


def body_train(kind, dtype, optimizer, arguments, micro_batches, set_to_none, sync):
    N, rank = pool.world_size(), pool.rank()
    plain = make_model(kind, dtype)
    ours = shard(make_model(kind, dtype, seed=1 + rank), **arguments)  # rank 0's values count
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (ours, plain)]
    for step in range(4):
        batches = [[make_batch(r, 10 * step + m, dtype) for m in range(micro_batches)] for r in range(N)]
        for o in optimizers:
            o.zero_grad(set_to_none=set_to_none)
        for i, batch in enumerate(batches[rank]):
            with nullcontext() if sync or i == micro_batches - 1 else fsdp.no_sync(ours):
                loss_of(ours(batch)).backward()
        if sync:
            for i in range(micro_batches):
                one_device(plain, [[micro[i]] for micro in batches])
        else:
            one_device(plain, batches)
        if (
            dtype == torch.bfloat16
        ):  # torch adds bf16 with alpha= differently at the tail of a vector, so in an optimizer
            for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
                assert_equal(whole(a.grad, b.shape), b.grad, True, name)
            optimizers[0].step()
            plain.load_state_dict(fsdp.full_state_dict(ours))
        else:
            for o in optimizers:
                o.step()
            assert_same(ours, plain, what=f"step {step}")
    saved = fsdp.full_state_dict(ours)
    assert list(saved) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert "running" in name or torch.equal(saved[name], value)


@given(
    N=st.integers(1, 4),
    kind=st.sampled_from([kind for kind in MODELS if kind not in ("mixed", "batchnorm")]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    reshard=st.booleans(),
    micro_batches=st.integers(1, 3),
    set_to_none=st.booleans(),
    sync=st.booleans(),
    alone=st.sampled_from([math.inf, 40, 1]),
)
@example(3, "plain", torch.float32, "adamw", True, 1, True, True, 1)
@example(3, "odd", torch.float32, "sgd", True, 2, True, False, 1)
@example(4, "frozen", torch.float32, "momentum", False, 2, False, True, 40)
@example(3, "plain", torch.bfloat16, "adamw", True, 2, True, False, math.inf)
def test_bitwise_equal_to_one_device_at_every_world_size(
    N, kind, dtype, optimizer, reshard, micro_batches, set_to_none, sync, alone
):
    arguments = {"reshard_after_forward": reshard, "children": kind != "tied"}
    pool.run(N, alone_from, alone, body_train, kind, dtype, optimizer, arguments, micro_batches, set_to_none, sync)


def body_against_torch(kind, optimizer, reshard):
    dtype, N, rank = torch.float64, pool.world_size(), pool.rank()
    ours = shard(make_model(kind, dtype), reshard_after_forward=reshard)
    theirs = shard(make_model(kind, dtype), torch_fully_shard, reshard_after_forward=reshard)
    replica = ddp.DDP(make_model(kind, dtype), pool.group())
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (ours, theirs, replica)]
    for step in range(4):
        for o in optimizers:
            o.zero_grad()
        for m in (ours, theirs, replica):
            loss_of(m(make_batch(rank, step, dtype))).backward()
        for a, b, c in zip(ours.parameters(), theirs.parameters(), replica.parameters(), strict=True):
            assert a.shape == b.to_local().shape
            assert_equal(a.grad, None if b.grad is None else b.grad.to_local(), False, "gradient")
            assert_equal(whole(a.grad, c.shape), c.grad, N <= 2, "DDP's gradient")
        for o in optimizers:
            o.step()
        for a, b, c in zip(ours.parameters(), theirs.parameters(), replica.parameters(), strict=True):
            assert_equal(a.detach(), b.to_local().detach(), False, "parameter")
            assert_equal(whole(a.detach(), c.shape), c.detach(), N <= 2, "DDP's parameter")


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize(("kind", "optimizer"), [("plain", "adamw"), ("frozen", "momentum"), ("plain", "sgd")])
def test_equal_to_pytorch_and_to_ddp(N, kind, optimizer):
    run_both(N, body_against_torch, kind, optimizer, N == 2)


def body_naive():
    N, rank = pool.world_size(), pool.rank()
    plain = nn.Sequential(nn.Linear(6, 4 * N), nn.Tanh(), nn.Linear(4 * N, N))
    ours = copy.deepcopy(plain).to("meta")  # a skeleton
    shards = {n: p.detach().chunk(N)[rank].clone().requires_grad_() for n, p in plain.named_parameters()}
    optimizers = [torch.optim.AdamW(p, lr=0.1) for p in (shards.values(), plain.parameters())]
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        output = fsdp.forward_sharded(ours, shards, make_batch(rank, step), process_group=pool.group())
        loss_of(output).backward()
        one_device(plain, [[make_batch(r, step)] for r in range(N)])
        for o in optimizers:
            o.step()
        for name, p in plain.named_parameters():
            assert torch.equal(whole(shards[name].grad, p.shape), p.grad)
            assert torch.equal(whole(shards[name].detach(), p.shape), p)


@pytest.mark.parametrize("N", [1, 2, 3])
def test_naive_form(N):
    pool.run(N, body_naive)


# ---- a model of blocks that ranks call as they like


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


def blocks(count=4, dtype=torch.float32, group=None, sharded=True, **kwargs):
    torch.manual_seed(3)
    model = Blocks(count).to(dtype)
    if sharded:
        for block in model.blocks:
            fully_shard(block, process_group=group or pool.group(), **kwargs)
        fully_shard(model, process_group=group or pool.group(), **kwargs)
    return model


def units(model):
    return fsdp.units_in(model)


def gathered_bytes(unit):
    return storages([unit.gathered_packed, unit.gathered_alone])


def assert_at_rest(model):
    for unit in filter(lambda unit: unit.parameters, units(model)):
        assert unit.state is State.SHARDED
        assert gathered_bytes(unit) == 0
        assert all(p.whole.grad is None and p.kept is None for p in unit.parameters)
        assert unit.received is None
        assert not unit.works


def body_calls(plan, reshard=True, run=None):
    """plan[step][rank] are the blocks to call."""
    N, rank = pool.world_size(), pool.rank()
    ours, plain = blocks(reshard_after_forward=reshard), blocks(sharded=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step, which in enumerate(plan):
        for o in optimizers:
            o.zero_grad()
        loss_of(ours(make_batch(rank, step), which[rank % len(which)])).backward()
        runs = [[(make_batch(r, step), which[r % len(which)])] for r in range(N)]
        one_device(plain, runs, lambda model, batch: loss_of(model(*batch)))
        for o in optimizers:
            o.step()
        assert_same(ours, plain, what=f"step {step}")
        assert_at_rest(ours)


CALLS = {
    "as registered": [[None]] * 3,
    "backwards": [[[3, 2, 1, 0]]] * 3,
    "changing order": [[[3, 2, 1, 0]], [None], [[1, 0, 3, 2]]],
    "one is never called": [[[0, 1, 3]]] * 2,
    "one is not called on some steps": [[None], [[0, 2, 3]], [[1, 2]], [None]],
    "one rank leaves one out": [[None, [0, 2, 3]]] * 3,
    "each leaves out another, from the start": [[[1, 2, 3], [0, 1, 3]], [[3], [0]], [None], [[], None]],
    "twice": [[[0, 1, 1, 2, 3]]] * 3,
    "twice, with others between": [[[0, 1, 2, 0, 3, 1]]] * 3,
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("calls", CALLS)
def test_units_are_called_as_one_likes(calls, reshard):
    pool.run(3 if "rank" not in calls else 2, body_calls, CALLS[calls], reshard)


def body_order_is_learned():
    """From the second forward on, a model that runs otherwise than registered is gathered as it runs."""
    model = blocks()
    for step in range(3):
        with Collectives() as sent:
            output = model(make_batch(pool.rank(), step), [3, 1, 0])
            assert step == 0 or [name for name, _ in sent.calls].count("send") == len(units(model))
            loss_of(output).backward()
    assert [unit.name for unit in units(model)[0].order.forward_order] == ["Blocks"] + [
        f"blocks.{i}" for i in (3, 1, 2, 0)
    ]


def test_the_order_is_that_of_the_first_forward():
    pool.run(2, body_order_is_learned)


def body_one_block_alone():
    """After the whole model: forward and backward gather this block's unit, and no other's."""
    model = blocks()
    loss_of(model(make_batch(pool.rank(), 0))).backward()
    with Collectives() as sent:
        loss_of(model.blocks[1](make_batch(pool.rank(), 1))).backward()
    assert [name for name, _ in sent.calls].count("send") == 3  # two gathers, one reduction
    assert_at_rest(model)


def test_one_block_alone():
    pool.run(2, body_one_block_alone)


def body_reused_in_separate_backwards():
    """A unit before and after another; two forwards, each with its own backward."""
    N, rank = pool.world_size(), pool.rank()
    reentrant = lambda block, x: checkpoint(block, x, use_reentrant=True)  # noqa: E731
    for how in (None, reentrant):
        ours, plain = blocks(), blocks(sharded=False)
        arguments = ([0, 1, 0, 2], *filter(None, [how]))
        run = lambda m, r, s, a=arguments: loss_of(m(make_batch(r, s).requires_grad_(), *a))  # noqa: E731
        losses = [run(ours, rank, 0), run(ours, rank, 1)]
        losses[0].backward()
        if (
            how
        ):  # a checkpoint's first forward leaves nothing that would tell this backward: an error, not a wrong gradient
            with pytest.raises(RuntimeError, match=r"after their unit was reduced: 'one.weight' of Block"):
                losses[1].backward()
            ours.zero_grad()
            run(ours, rank, 0).backward()
        else:
            losses[1].backward()
        for s in range(len(losses) - bool(how)):
            one_device(plain, [[(r, s)] for r in range(N)], lambda m, batch, run=run: run(m, *batch))
        assert_same(ours, plain)
        assert_at_rest(ours)


def test_a_unit_around_another_in_separate_backwards():
    pool.run(2, body_reused_in_separate_backwards)


def body_several_forwards():
    N, rank = pool.world_size(), pool.rank()
    for reshard in (True, False):
        for joint in (True, False):
            ours, plain = blocks(reshard_after_forward=reshard), blocks(sharded=False)
            a, b = [loss_of(ours(make_batch(rank, s))) for s in (0, 1)]
            with torch.no_grad():
                ours(make_batch(rank, 2))
            if joint:
                (a + b).backward()
                both = lambda m, pair: loss_of(m(pair[0])) + loss_of(m(pair[1]))  # noqa: E731
                one_device(plain, [[[make_batch(r, 0), make_batch(r, 1)]] for r in range(N)], both)
            else:
                a.backward()
                b.backward()
                for s in (0, 1):
                    one_device(plain, [[make_batch(r, s)] for r in range(N)])
            assert_same(ours, plain, what=f"{reshard} {joint}")
            assert_at_rest(ours)
            ours.zero_grad()
            plain.zero_grad()
            loss = loss_of(ours(make_batch(rank, 5)))
            loss.backward(retain_graph=True)
            loss.backward()
            for _ in range(2):
                one_device(plain, [[make_batch(r, 5)] for r in range(N)])
            assert_same(ours, plain, what="retained graph")


def test_several_forwards_and_backwards():
    run_both(2, body_several_forwards)


def body_checkpoints(how, reshard):
    hows = {
        "around": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "around, reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
        "inside": lambda block, x: block(x),
    }
    N, rank = pool.world_size(), pool.rank()
    ours, plain = blocks(reshard_after_forward=reshard), blocks(sharded=False)
    if how == "inside":
        for model in (ours, plain):
            for block in model.blocks:
                inner = type(block).forward
                block.forward = lambda x, block=block, inner=inner: checkpoint(inner, block, x, use_reentrant=False)
    elif how == "segments":
        for model in (ours, plain):
            rest = nn.Sequential(*list(model.blocks)[1:])
            model.forward = lambda x, model=model, rest=rest: model.head(
                checkpoint(rest, checkpoint(model.blocks[0], x, use_reentrant=False), use_reentrant=False)
            )
    arguments = (None, hows[how]) if how in hows else ()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        with Collectives() as sent:
            loss_of(ours(make_batch(rank, step).requires_grad_(), *arguments)).backward()
        one_device(
            plain,
            [[make_batch(r, step)] for r in range(N)],
            lambda m, x: loss_of(m(x.requires_grad_(), *arguments)),
        )
        for o in optimizers:
            o.step()
        assert_same(ours, plain, what=f"step {step}")
        assert_at_rest(ours)
        names = [name for name, _ in sent.calls]
        assert step == 0 or names.count("send") == len(units(ours)) * (3 if reshard else 2)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["around", "around, reentrant", "inside", "segments"])
def test_activation_checkpoints(how, reshard):
    pool.run(2, body_checkpoints, how, reshard)


def body_checkpoints_and_reuse(calls):
    """A unit before and after another, each in a checkpoint: the second is not reduced before its turn."""
    N, rank = pool.world_size(), pool.rank()
    for reentrant in (True, False):
        ours, plain = blocks(), blocks(sharded=False)
        how = lambda block, x, reentrant=reentrant: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
        run = lambda m, x, how=how: loss_of(m(x.requires_grad_(), calls, how))  # noqa: E731
        for step in range(2):
            run(ours, make_batch(rank, step)).backward()
            one_device(plain, [[make_batch(r, step)] for r in range(N)], run)
            assert_same(ours, plain, what=f"{reentrant} {step}")
            assert_at_rest(ours)


@pytest.mark.parametrize("calls", [[0, 1, 0, 2], [0, 1, 2, 1, 0, 3], [1, 0, 1, 1]], ids=str)
def test_checkpoints_of_units_that_are_called_again(calls):
    pool.run(2, body_checkpoints_and_reuse, calls)


def body_eval_between():
    N, rank = pool.world_size(), pool.rank()
    for reshard in (True, False):
        ours, plain = blocks(reshard_after_forward=reshard), blocks(sharded=False)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]

        def look(ours=ours, plain=plain):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    assert torch.equal(ours(make_batch(0, 9)), plain(make_batch(0, 9)))
                    assert torch.equal(ours.blocks[1](make_batch(0, 9)), plain.blocks[1](make_batch(0, 9)))
            assert_at_rest(ours)

        for step in range(3):
            look()
            loss = loss_of(ours(make_batch(rank, step)))
            with torch.no_grad():
                ours(make_batch(0, 9))
            loss.backward()
            one_device(plain, [[make_batch(r, step)] for r in range(N)])
            look()
            for o in optimizers:
                o.step()
            look()
            assert_same(ours, plain, what=f"step {step}")
            for o in optimizers:
                o.zero_grad()


def test_eval_at_any_time_sees_the_present_weights():
    pool.run(2, body_eval_between)


def body_exceptions(where, reshard):
    class Broken(Exception):
        pass

    def how(block, x):
        if where == "forward" and block is ours.blocks[2]:
            raise Broken
        x = block(x)
        if where == "backward" and block is ours.blocks[1]:
            x.register_hook(raises)
        return x

    def raises(gradient):
        raise Broken

    N, rank = pool.world_size(), pool.rank()
    ours, plain = blocks(reshard_after_forward=reshard), blocks(sharded=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        if where == "inside":
            ours.blocks[2].two.forward = raises
        with pytest.raises(Broken):
            loss_of(ours(make_batch(rank, 7), None, how)).backward()
        if where == "inside":
            del ours.blocks[2].two.forward
        if where != "backward" and reshard:
            assert_at_rest(ours)
        with torch.no_grad():
            assert torch.equal(ours(make_batch(0, 9)), plain(make_batch(0, 9)))
        assert_at_rest(ours)
        for o in optimizers:
            o.zero_grad()
        loss_of(ours(make_batch(rank, step))).backward()
        one_device(plain, [[make_batch(r, step)] for r in range(N)])
        for o in optimizers:
            o.step()
        assert_same(ours, plain, what=f"step {step}")


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("where", ["forward", "inside", "backward"])
def test_usable_after_an_exception(where, reshard):
    run_both(2, body_exceptions, where, reshard)


# ---- frozen, tied, unused


class LoRA(nn.Module):
    """The frozen weight's backward comes after those of A and B."""

    def __init__(self):
        super().__init__()
        self.base, self.A, self.B = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.B(self.A(x)))


def body_lora():
    N, rank = pool.world_size(), pool.rank()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), *[LoRA() for _ in range(3)])
    ours = copy.deepcopy(plain)
    for layer in ours:
        fully_shard(layer, process_group=pool.group())
    fully_shard(ours, process_group=pool.group())
    optimizers = [OPTIMIZERS["adamw"]([p for p in m.parameters() if p.requires_grad]) for m in (ours, plain)]
    for step in range(4):
        if step == 2:  # and the other way round
            for m in (ours, plain):
                for layer in list(m)[1:]:
                    layer.A.requires_grad_(False)
                    layer.base.requires_grad_(True)
            optimizers = [OPTIMIZERS["adamw"]([p for p in m.parameters() if p.requires_grad]) for m in (ours, plain)]
        for m in (ours, plain):
            m.zero_grad()
        with Collectives() as sent:
            loss_of(ours(make_batch(rank, step))).backward()
        one_device(plain, [[make_batch(r, step)] for r in range(N)])
        for o in optimizers:
            o.step()
        assert_same(ours, plain, what=f"step {step}")
        assert_at_rest(ours)
        holders = [u for u in units(ours) if u.parameters]
        trained = [[4 * p.chunk for p in u.parameters if p.shard.requires_grad] for u in holders]
        gathers = 2 * len(holders)
        assert [name for name, _ in sent.calls].count("send") == (N - 1) * (gathers + sum(map(bool, trained)))
        gathered = 2 * sum(u.flat.nbytes for u in holders)  # frozen parameters have no gradients to send:
        assert sent.bytes_of("send") == (N - 1) * (gathered + sum(map(sum, trained)))


def test_frozen_and_trained_parameters_in_one_unit():
    pool.run(2, body_lora)
    pool.run(3, body_lora)


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(rows, 6)) for rows in (5, 6, 6))  # 6 divide by 2 and 3

    def forward(self, x, names):
        if names == "negative zero":
            return -0.0 * (self.a.sum() + self.b.sum() + self.c.sum())
        return sum((x @ getattr(self, name).t()).sum(1) for name in names)


def body_unused_parameters():
    """Inside a unit: None where no rank has a gradient, the mean with zeros where one has."""
    N, rank = pool.world_size(), pool.rank()
    torch.manual_seed(0)
    plain = Choice()
    ours = fully_shard(copy.deepcopy(plain), process_group=pool.group())
    for step, names in enumerate([["a", "ab"], ["b", "b"], ["c", "a"], ["abc", "abc"]]):
        for m in (ours, plain):
            m.zero_grad()
        loss_of(ours(make_batch(rank, step), names[rank % 2])).backward()
        runs = [[(make_batch(r, step), names[r % 2])] for r in range(N)]
        one_device(plain, runs, lambda model, batch: loss_of(model(*batch)))
        assert_same(ours, plain, what=f"step {step}")
        # zero gradients of either sign are gradients: not None
        ours.zero_grad()
        ours(make_batch(rank, step), "negative zero").backward()
        assert all(p.grad is not None for p in ours.parameters())
        ours.zero_grad()
        if rank == N - 1:
            ours(make_batch(rank, step), "negative zero").backward()
        else:
            ours(make_batch(rank, step), "a").sum().backward()
        assert all(p.grad is not None for p in ours.parameters())


def test_parameters_that_no_rank_or_one_rank_uses():
    run_both(2, body_unused_parameters)
    run_both(3, body_unused_parameters)


def body_tied_across():
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False))
    model[2].weight = model[0].weight
    fully_shard(model[0], process_group=pool.group())
    with pytest.raises(ValueError, match=r"'2.weight' of Sequential is tied to 'weight' of Embedding"):
        fully_shard(model, process_group=pool.group())
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    fully_shard(model[0], process_group=pool.group())
    with pytest.raises(ValueError, match="tied"):
        fully_shard(model[1], process_group=pool.group())
    shared = nn.Linear(6, 6)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    fully_shard(model[0], process_group=pool.group())
    with pytest.raises(ValueError, match=r"'0.weight' of Sequential is tied to '0.weight' of Sequential"):
        fully_shard(model[1], process_group=pool.group())


def test_tied_across_units_is_an_error_that_names_both():
    pool.run(2, body_tied_across)


# ---- accumulation, clipping


def body_no_sync_sends_nothing():
    N, rank = pool.world_size(), pool.rank()
    ours, plain = blocks(), blocks(sharded=False)
    for step in range(2):
        with Collectives() as sent, fsdp.no_sync(ours):
            with fsdp.no_sync(ours):
                pass  # its end is not that of the outer one
            loss_of(ours(make_batch(rank, 0))).backward()
        assert sent.bytes_of("send") == (N - 1) * 2 * sum(u.flat.nbytes for u in units(ours))  # gathers
        assert all(p.grad is None for p in ours.parameters())
        # the unit that this pass leaves out has gradients of the one before
        loss_of(ours(make_batch(rank, 1), [0, 2])).backward()
        kept = [[(make_batch(r, 0), None), (make_batch(r, 1), [0, 2])] for r in range(N)]
        one_device(plain, kept, lambda model, batch: loss_of(model(*batch)))
        assert_same(ours, plain, what=f"step {step}")
        assert_at_rest(ours)
        ours.zero_grad()
        plain.zero_grad()


def test_no_sync_sends_nothing_and_loses_nothing():
    run_both(2, body_no_sync_sends_nothing)


def body_clip(norm_type, max_norm):
    N, rank = pool.world_size(), pool.rank()
    plain, ours = make_model("odd", torch.float64), shard(make_model("odd", torch.float64))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        loss_of(ours(make_batch(rank, step, torch.float64))).backward()
        one_device(plain, [[make_batch(r, step, torch.float64)] for r in range(N)])
        norm = fsdp.clip_grad_norm_(ours, max_norm, norm_type)
        filled = [p for p in plain.parameters() if p.numel()]  # PyTorch's does not take empty ones
        expected = nn.utils.clip_grad_norm_(filled, max_norm, norm_type)
        assert_equal(norm, expected, False, "norm")
        assert_same(ours, plain, False, f"step {step}")
        everyone = [None] * N
        dist.all_gather_object(everyone, norm, group=pool.group())
        assert all(torch.equal(norm, other) for other in everyone)
        for o in optimizers:
            o.step()
    for parameter in ours.parameters():
        parameter.grad = None
    assert fsdp.clip_grad_norm_(ours, 1.0) == 0
    if rank == N - 1:
        next(p for p in ours.parameters() if p.dim() == 2 or N > 1).grad = None
    last = list(ours.parameters())[-1]
    last.grad = torch.full_like(last, math.nan if rank == 0 else 1.0)
    with pytest.raises(RuntimeError, match="nan"):
        fsdp.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


def body_clip_over_two_groups(norm_type):
    """Units of two groups, here of the same ranks: the norm is that of all of them."""
    N, rank, other = pool.world_size(), pool.rank(), dist.new_group(range(pool.world_size()))
    ours, plain = blocks(2, torch.float64, sharded=False), blocks(2, torch.float64, sharded=False)
    fully_shard(ours.blocks[0], process_group=other)
    fully_shard(ours, process_group=pool.group())
    loss_of(ours(make_batch(rank, 0, torch.float64))).backward()
    one_device(plain, [[make_batch(r, 0, torch.float64)] for r in range(N)])
    norm = fsdp.clip_grad_norm_(ours, 0.1, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    assert_equal(norm, expected, False, "norm")
    assert_same(ours, plain, False)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_grad_norm_over_two_groups(norm_type):
    pool.run(4, body_clip_over_two_groups, norm_type)


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.1), (2.0, 1e6), (1.0, 0.1), (math.inf, 0.01)])
def test_clip_grad_norm(norm_type, max_norm):
    pool.run(3, body_clip, norm_type, max_norm)


# ---- policies


def body_mixed_precision(param, reduce, output):
    N, rank = pool.world_size(), pool.rank()
    mesh = dist.device_mesh.DeviceMesh.from_group(pool.group(), "cpu")
    ours, theirs = blocks(sharded=False), blocks(sharded=False)
    for model, wrap, P in (ours, fully_shard, fsdp.MixedPrecisionPolicy), (theirs, torch_fully_shard, TorchPolicy):
        for block in model.blocks:
            wrap(block, mesh=mesh, mp_policy=P(param, reduce))
        wrap(model, mesh=mesh, mp_policy=P(param, reduce, output))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    seen = []
    ours.blocks[1].one.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, m.weight.dtype, o.dtype)))
    for step in range(3):
        outputs = []
        for m, o in zip((ours, theirs), optimizers, strict=True):
            o.zero_grad()
            outputs.append(m(make_batch(rank, step)))
            loss_of(outputs[-1].float()).backward()
        assert outputs[0].dtype == outputs[1].dtype == (output or param or torch.float32)
        assert torch.equal(*outputs)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.dtype == a.grad.dtype == torch.float32
            exact = N == 2 or reduce is None  # at 3 ranks the sum has another order
            bound = 0 if exact and N == 2 else 4 * torch.finfo(reduce or param).eps
            difference = (a.grad - b.grad.to_local()).abs()
            assert (difference <= bound * b.grad.full_tensor().abs().max()).all()
            with torch.no_grad():
                a.grad.copy_(b.grad.to_local())
        for o in optimizers:
            o.step()
    assert set(seen) == {((param or torch.float32),) * 3}


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize(
    ("param", "reduce", "output"),
    [
        (torch.bfloat16, torch.float32, None),
        (torch.bfloat16, None, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (None, torch.bfloat16, None),
    ],
    ids=str,
)
def test_mixed_precision_as_pytorchs(N, param, reduce, output):
    run_both(N, body_mixed_precision, param, reduce, output)


def body_inputs_cast_or_not():
    for cast in (True, False):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
        layer, seen = nn.Linear(6, 3), []
        plain = layer.forward
        layer.forward = lambda x, seen=seen, plain=plain: seen.append(x.dtype) or plain(x.bfloat16())
        fully_shard(layer, process_group=pool.group(), mp_policy=policy)(make_batch(pool.rank(), 0))
        assert seen == [torch.bfloat16 if cast else torch.float32]


def test_inputs_are_cast_unless_told_otherwise():
    pool.run(2, body_inputs_cast_or_not)


def body_no_sync_in_reduce_dtype():
    """Whole gradients of several backwards add up in reduce_dtype."""
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ours = blocks(mp_policy=policy)
    with fsdp.no_sync(ours):
        loss_of(ours(make_batch(pool.rank(), 0))).backward()
    first = [p.kept.clone() for u in units(ours) for p in u.parameters]
    assert {kept.dtype for kept in first} == {torch.float32}
    with fsdp.no_sync(ours):
        loss_of(ours(make_batch(pool.rank(), 0))).backward()
    for kept, p in zip(first, [p for u in units(ours) for p in u.parameters], strict=True):
        assert torch.equal(p.kept, 2 * kept)


def test_no_sync_adds_in_the_reduce_dtype():
    pool.run(2, body_no_sync_in_reduce_dtype)


def body_offload():
    rank = pool.rank()
    models = [blocks(), blocks(offload_policy=fsdp.CPUOffloadPolicy()), blocks(offload_policy=OffloadPolicy())]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
    for step in range(3):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            loss_of(m(make_batch(rank, step))).backward()
            o.step()
        for a, *others in zip(*(m.parameters() for m in models), strict=True):
            assert a.device.type == "cpu"
            assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for b in others)


def test_offload_is_bitwise_equal_to_none():
    run_both(2, body_offload)


def body_hybrid():
    """2 × 2: as PyTorch's, and as sharding over all four."""
    dtype, rank = torch.float64, pool.rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kind = lambda seed: make_model("odd", dtype, seed)  # noqa: E731
    ours, plain = shard(kind(1 + rank), mesh=mesh), kind(1)
    other, theirs = shard(make_model("plain", dtype), mesh=mesh), make_model("plain", dtype)
    theirs = shard(theirs, torch_fully_shard, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain, other, theirs)]
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        with Collectives() as sent:
            loss_of(ours(make_batch(rank, step, dtype))).backward()
        one_device(plain, [[make_batch(r, step, dtype)] for r in range(4)])
        for m in (other, theirs):
            loss_of(m(make_batch(rank, step, dtype))).backward()
        if step == 0:
            sharded = sum(8 * p.chunk for u in units(ours) for p in u.parameters)
            assert sent.bytes_of("allreduce_") == sharded  # of sharded gradients
        norm = fsdp.clip_grad_norm_(ours, 0.1)
        assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False, "norm")
        for a, b in zip(other.parameters(), theirs.parameters(), strict=True):
            assert_equal(a.grad, b.grad.to_local(), False, "PyTorch's gradient")
        for o in optimizers:
            o.step()
        for a, b in zip(other.parameters(), theirs.parameters(), strict=True):
            assert_equal(a.detach(), b.to_local().detach(), False, "PyTorch's parameter")
        for name, value in fsdp.full_state_dict(ours).items():
            assert_equal(value, plain.state_dict()[name], False, name)
        for p in ours.parameters():  # replicas are bitwise equal
            everyone = [None] * 4
            dist.all_gather_object(everyone, (p.detach(), p.grad))
            for a, b in ((0, 2), (1, 3)):
                assert torch.equal(everyone[a][0], everyone[b][0])
                assert torch.equal(everyone[a][1], everyone[b][1])
    only = fsdp.full_state_dict(ours, rank0_only=True)
    assert bool(only) == (rank == 0)
    fresh = shard(kind(9), mesh=mesh)
    fsdp.load_full_state_dict(fresh, only)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), ours.parameters(), strict=True))


def test_hybrid_sharding():
    run_both(4, body_hybrid)


# ---- saving, loading, the meta device


class Everything(nn.Module):
    """Odd parameters, a buffer, a buffer that is not saved, tied weights, a frozen one, and extra state."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), nn.BatchNorm1d(6), Block())
        self.odd = make_model("odd")
        self.tied = make_model("tied")
        self.tied.second.bias.requires_grad_(False)
        self.register_buffer("left_out", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.odd(self.tied(self.blocks(x))[:, :6])


def everything(seed=0, sharded=True):
    torch.manual_seed(seed)
    model = Everything()
    for p in model.odd.parameters():
        p.data.mul_(1.0 + seed)
    if sharded:
        for child in (*model.blocks, model.odd):
            fully_shard(child, process_group=pool.group())
        fully_shard(model, process_group=pool.group())
    return model


def train(model, optimizer, steps, rank):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(make_batch(rank, step))).backward()
        optimizer.step()


def body_save(rank0_only):
    model = everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(2), 0)  # the same batch on all ranks: the world size does not matter
    saved = fsdp.full_state_dict(model, rank0_only=rank0_only)
    state = fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=rank0_only)
    assert bool(saved) == bool(state) == (not rank0_only or pool.rank() == 0)
    assert_at_rest(model)
    train(model, optimizer, [2], 0)
    return saved, state, fsdp.full_state_dict(model)


def body_load(saved, state, after, rank0_only):
    if rank0_only and pool.rank():
        saved, state = {}, {}
    model = everything(seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    fsdp.load_full_state_dict(model, saved)
    fsdp.load_full_optimizer_state_dict(model, optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    train(model, optimizer, [2], 0)
    result = fsdp.full_state_dict(model)
    return {n: d for n, v in after.items() if v.numel() and (d := (result[n] - v).abs().max().item())}


@pytest.mark.parametrize("rank0_only", [False, True])
def test_save_at_four_ranks_and_load_at_three_at_one_and_into_the_plain_model(rank0_only):
    saved, state, after = pool.run(4, body_save, rank0_only)[0]
    plain = everything(seed=5, sharded=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.3)
    assert list(saved) == list(plain.state_dict())
    assert {n: v.shape for n, v in saved.items()} == {n: v.shape for n, v in plain.state_dict().items()}
    plain.load_state_dict(saved)
    optimizer.load_state_dict(copy.deepcopy(state))
    train(plain, optimizer, [2], 0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
    assert run_both(4, body_load, saved, state, after, rank0_only) == [[{}] * 4] * 2  # bitwise where it continues
    for N in (3, 1):
        assert all(d < 1e-6 for off in pool.run(N, body_load, saved, state, after, rank0_only) for d in off.values())
    # and what the plain model saves, the sharded one loads
    plain_saved = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))  # they are references
    train(plain, optimizer, [2], 0)
    off = pool.run(2, body_load, *plain_saved, plain.state_dict(), rank0_only)
    assert all(d < 1e-5 for off in off for d in off.values())


def body_bad_state_dicts():
    model = blocks()
    saved = fsdp.full_state_dict(model)
    for change, words in (
        (lambda d: d.pop("head.bias"), r"head.bias: missing"),
        (lambda d: d.update(more=torch.ones(1)), r"more: \(1,\), not None"),
        (lambda d: d.update({"head.bias": torch.ones(4)}), r"head.bias: \(4,\), not \(3,\)"),
        (lambda d: d.clear(), r"rank 0 has none"),
    ):
        bad = dict(saved)
        if pool.rank() == 0 or not words.startswith("head.bias: m"):
            change(bad)
        with pytest.raises(RuntimeError, match=words):
            fsdp.load_full_state_dict(model, bad)
    fsdp.load_full_state_dict(model, saved)


def test_state_dicts_that_do_not_fit_are_an_error_on_every_rank():
    pool.run(2, body_bad_state_dicts)


def body_sharded_state_dict():
    """module.state_dict() is this rank's part, for a checkpoint of one file per rank at one world size."""
    a, b = blocks(), blocks()
    with torch.no_grad():
        for p in b.parameters():
            p.zero_()
    b.load_state_dict({n: v.clone() for n, v in a.state_dict().items()})
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(a(make_batch(0, 0)), b(make_batch(0, 0)))
    # shards that others put in place of ours
    with torch.no_grad():
        for p in b.parameters():
            p.zero_()
    b.load_state_dict({n: v.clone() for n, v in a.state_dict().items()}, assign=True)
    b.requires_grad_(True)
    assert torch.equal(a(make_batch(0, 0)), b(make_batch(0, 0)))
    a.to(torch.float64)
    c = blocks(sharded=False).double()
    loss_of(a(make_batch(0, 0, torch.float64))).backward()
    loss_of(c(make_batch(0, 0, torch.float64))).backward()
    assert_same(a, c, pool.world_size() == 2)


def test_the_module_s_own_state_dict_and_to():
    pool.run(2, body_sharded_state_dict)


def init(module):
    if isinstance(module, nn.BatchNorm1d):
        module.reset_parameters()
    if isinstance(module, Block):  # after its children
        nn.init.normal_(module.two.bias)
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.1)
        nn.init.uniform_(module.bias)


def body_meta(init_fn, seed_of_rank):
    with torch.device("meta"):
        model, plain = Blocks(5), Blocks(5)
        model.blocks[1].norm, plain.blocks[1].norm = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for block in model.blocks:
        fully_shard(block, process_group=pool.group())
    fully_shard(model, process_group=pool.group())
    with pytest.raises(RuntimeError, match=r"meta device.*materialize"):
        model(make_batch(0, 0))
    assert all(p.is_meta for p in model.parameters())
    model.head.bias.requires_grad_(False)
    torch.manual_seed(seed_of_rank * pool.rank())
    live = []

    def watched(module):
        live.append(sum(map(gathered_bytes, units(model))))
        init_fn(module)

    fsdp.materialize(model, watched)
    torch.manual_seed(0)
    plain.to_empty(device="cpu").apply(init_fn)
    assert_at_rest(model)
    for name, value in fsdp.full_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name])
    whole = [u.gathered_packed.nbytes + u.gathered_alone.nbytes for u in units(model)]
    assert max(live) <= max(whole) + whole[0]  # the root, and a block at a time
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(make_batch(0, 0))).backward()
    optimizer.step()


@pytest.mark.parametrize("seed_of_rank", [0, 1])
@pytest.mark.parametrize("init_fn", [init, fsdp.reset_parameters])
def test_a_model_on_the_meta_device_is_initialised_unit_by_unit(init_fn, seed_of_rank):
    run_both(3, body_meta, init_fn, seed_of_rank)


def body_meta_load():
    saved = make_model("batchnorm").state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    shard(model)
    fsdp.load_full_state_dict(model, saved if pool.rank() == 0 else {})
    for name, value in fsdp.full_state_dict(model).items():
        assert torch.equal(value, saved[name])
    assert torch.equal(model(make_batch(0, 0)), make_model("batchnorm")(make_batch(0, 0)))


def test_a_model_on_the_meta_device_is_loaded():
    pool.run(2, body_meta_load)


# ---- what it costs


def storages(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def live_bytes():
    time.sleep(0.05)  # gloo's thread may hold what it has sent a little longer
    gc.collect()
    return storages([t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)])


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most that `measure` returns after any operator."""

    def __init__(self, measure):
        super().__init__()
        self.measure, self.peak = measure, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.measure())
        return result


def body_memory(reshard):
    N, count, width = pool.world_size(), 12, 40
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    for layer in model:
        fully_shard(layer, process_group=pool.group(), reshard_after_forward=reshard)
    fully_shard(model, process_group=pool.group(), reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(1, width)
    unit = 4 * width * width
    psi = count * unit

    def gathered():
        total = 0
        for u in units(model):
            if u.parameters:
                total += storages([u.gathered_packed, u.gathered_alone, *(u.received or ())])
        return total

    def gradients():
        flying = [r.gi_frame.f_locals for r in units(model)[0].order.reductions if r.gi_frame]
        flying = tree_leaves([v for frame in flying for v in frame.values() if isinstance(v, (torch.Tensor, list))])
        flying = storages([v for v in flying if isinstance(v, torch.Tensor)])
        return flying + storages([p.whole.grad for u in units(model) for p in u.parameters if p.whole.grad is not None])

    for _ in range(3):
        optimizer.zero_grad()
        with Peak(gathered) as peak:
            loss = model(x).square().mean()
        arriving = 0 if units(model)[1].alone else unit  # before it takes its place
        assert peak.peak == (2 * unit if reshard else psi + arriving), (peak.peak / unit, "in forward")
        with Peak(gathered) as peak, Peak(gradients) as peak_of_gradients:
            loss.backward()
        assert peak.peak == (2 * unit if reshard else psi), (peak.peak / unit, "in backward")
        assert peak_of_gradients.peak <= 3 * unit, peak_of_gradients.peak / unit
        assert gathered() == gradients() == 0
        optimizer.step()
    del loss
    parameters = list(model.parameters())
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    assert storages(parameters) == storages([p.grad for p in parameters]) == psi // N
    assert storages(state) == 2 * psi // N
    # nothing else that is large is alive: 16Ψ/N
    del parameters, state
    assert 16 * psi // 4 // N <= live_bytes() <= 16 * psi // 4 // N + 20_000


@pytest.mark.parametrize("reshard", [True, False])
def test_memory_at_rest_and_at_its_peak(reshard):
    run_both(2, body_memory, reshard)


def body_saved_by_autograd():
    """Between forward and backward nothing holds the whole parameters."""
    model = blocks()
    output = model(make_batch(0, 0))
    assert sum(map(gathered_bytes, units(model))) == 0
    assert all(p.shape[0] < 12 for p in model.parameters())
    loss_of(output).backward()


def test_autograd_keeps_nothing_alive():
    run_both(2, body_saved_by_autograd)


def body_cost(reshard):
    N, rank = pool.world_size(), pool.rank()
    model = blocks(reshard_after_forward=reshard)
    K, padded = len(units(model)), sum(4 * u.N * u.flat.numel() for u in units(model))
    loss_of(model(make_batch(rank, 0))).backward()
    with Collectives() as sent, ddp.SentBytes() as total:
        loss_of(model(make_batch(rank, 0))).backward()
    names = [name for name, _ in sent.calls]
    K += sum(len(unit.alone) for unit in units(model))
    assert (len(units(model)) == K) == (fsdp.ALONE > 1)
    for unit in units(model):
        unit.unshard()
        assert all(p.whole.data_ptr() % 64 == 0 for p in unit.parameters)  # as torch aligns what it allocates
        unit.reshard()
    gathers = 2 if reshard else 1
    assert names.count("send") == names.count("recv_") == (gathers + 1) * K * (N - 1)
    assert set(names) == {"send", "recv_"}
    assert total.total == pytest.approx((gathers + 1) * padded * (N - 1) / N, rel=1e-12)
    return padded


@pytest.mark.parametrize("reshard", [True, False])
def test_sent_bytes_and_number_of_collectives(reshard):
    psi = 4 * sum(p.numel() for p in blocks(sharded=False).parameters())
    for N in (2, 3):
        assert run_both(N, body_cost, reshard) == [[psi + padding_of(N)] * N] * 2


def padding_of(N):
    model = blocks(sharded=False)
    return 4 * sum((-p.shape[0] % N) * p[0].numel() for p in model.parameters())


def body_overlap():
    """The next gather is issued before this unit computes, and a reduce-scatter is waited for after the next one's."""
    model, order = blocks(), []
    root = units(model)[0]
    model(make_batch(0, 0))

    def note(what, unit):
        order.append((what, unit.name.removeprefix("blocks.")))

    def wrap(unit, name, before):
        method = getattr(unit, name)

        def noted(*args):
            if before:
                note(name, unit)
            result = method(*args)
            if not before:
                note(name, unit)
            return result

        setattr(unit, name, noted)

    for unit in units(model):
        wrap(unit, "gather", True)
        wrap(unit, "unshard", False)
        wrap(unit, "post_backward", False)
    for i, block in enumerate(model.blocks):
        block.one.register_forward_hook(lambda *_, i=i: order.append(("forward", str(i))))
        block.one.register_full_backward_hook(lambda *_, i=i: order.append(("backward", str(i))))
    loss = loss_of(model(make_batch(0, 0)))
    at = {event: i for i, event in enumerate(order)}
    for i in range(3):
        assert at["gather", str(i + 1)] < at["forward", str(i)] < at["unshard", str(i + 1)]
    order.clear()
    reductions = []
    proceed = root.order.proceed
    root.order.proceed = lambda: (reductions.append((len(order), len(root.order.reductions))), proceed())
    loss.backward()
    at = {event: i for i, event in enumerate(order)}
    for i in range(1, 4):
        assert at["gather", str(i - 1)] < at["backward", str(i)] < at["unshard", str(i - 1)]
        assert at["backward", str(i)] < at["post_backward", str(i)] < at["backward", str(i - 1)]
    # and nobody waits for it before the unit below has computed
    for i in range(1, 3):
        waits = [at_ for at_, flying in reductions if flying and at_ > at["post_backward", str(i)]]
        assert min(waits) > at["backward", str(i - 1)]
    assert all(flying <= 1 for _, flying in reductions)


def test_communication_is_issued_early_and_waited_for_late():
    pool.run(2, body_overlap)


def body_fake(N, rank):
    """In one process, rank `rank` of N: torch's fake process group moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
    try:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
        psi = 4 * sum(p.numel() for p in model.parameters())
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):
            with ddp.SentBytes() as sent:
                model(torch.randn(2, 1024)).sum().backward()
        held = storages(model.parameters())
        return sent.total, held, psi
    finally:
        dist.destroy_process_group()


def test_cost_at_scale():
    sizes = (1, 8, 64, 1024)
    code = f"import test_fsdp\nfor N in {sizes}: print(*test_fsdp.body_fake(N, N - 1))"
    done = launch([sys.executable, "-c", code], ROOT / "tests", env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    for N, line in zip(sizes, done.stdout.splitlines(), strict=True):
        sent, held, psi = map(float, line.split())
        assert sent == 3 * psi * (N - 1) / N
        assert held == psi / N


# ---- errors, groups, lifetimes


def body_errors():
    group = pool.group()
    model = Blocks()
    cases = [
        (model.blocks, {}, ValueError, "ModuleList has no forward"),
        (list(model.blocks), {}, ValueError, "list has no forward"),
        (model.head, {"reshard_after_forward": None}, ValueError, "is None; it must be True or False"),
        (model.head, {"reshard_after_forward": 2}, ValueError, "is 2; it must be True or False"),
        (model.head, {"mesh": dist.device_mesh.DeviceMesh.from_group(group, "cpu")}, ValueError, "not both"),
    ]
    for module, kwargs, error, words in cases:
        with pytest.raises(error, match=words):
            fully_shard(module, process_group=group, **kwargs)
    fully_shard(model.head, process_group=group)
    with pytest.raises(ValueError, match="a unit already"):
        fully_shard(model.head, process_group=group)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"float32 and torch.float64; make a unit for each dtype"):
        fully_shard(mixed, process_group=group)
    different = nn.Linear(3 + pool.rank(), 2)
    with pytest.raises(ValueError, match="rank 1 has 'weight'"):
        fully_shard(different, process_group=group)
    other = (
        dist.new_group([0], use_local_synchronization=True) if pool.rank() == 0 else dist.GroupMember.NON_GROUP_MEMBER
    )
    if pool.rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not a member"):
            fully_shard(nn.Linear(2, 2), process_group=other)
    only_here = nn.Linear(2, 2)
    if pool.rank() == 1:
        only_here.bias = nn.Parameter(only_here.bias.double())
    with pytest.raises(ValueError, match=r"float32 and torch\.float64"):
        fully_shard(only_here, process_group=group)


def test_errors_on_every_rank():
    pool.run(2, body_errors)


def body_groups():
    """Two models on two groups side by side."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, rank = pairs[pool.rank() // 2], pool.rank() % 2
    ours, plain = blocks(group=mine), blocks(sharded=False)
    for step in range(2 + pool.rank() // 2):
        loss_of(ours(make_batch(rank, step))).backward()
        one_device(plain, [[make_batch(r, step)] for r in range(2)])
    everyone = [None] * 2
    dist.all_gather_object(everyone, [p.grad for p in ours.parameters()], group=mine)
    for a, b, p in zip(*everyone, plain.parameters(), strict=True):
        assert torch.equal(torch.cat([a, b]), p.grad)
    dist.barrier()


def test_two_groups_side_by_side():
    pool.run(4, body_groups)


def body_lifetime():
    model = blocks()
    loss_of(model(make_batch(0, 0))).backward()
    gone = [weakref.ref(model), weakref.ref(units(model)[1]), weakref.ref(model.head.weight)]
    del model
    gc.collect()
    assert not any(ref() for ref in gone)


def test_a_discarded_model_is_freed():
    pool.run(2, body_lifetime)


class Outputs(nn.Module):
    """Outputs in containers, views, and the input itself."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, *, deep=None):
        a, b = self.one(x), self.two(x).view(2, -1, 3)
        return {"a": [a], "b": (b, None), "x": x}


class View(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1, 3)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.view = View(6, 6)
        self.first, self.second, self.nested = Outputs(), Outputs(), nn.Sequential(Block(), Block())

    def forward(self, x):
        view = self.view(x)
        view.mul_(2.0)  # its node in the graph is replaced
        first = self.first(view.view(x.shape))
        first["b"][0].add_(1.0)  # a view of the unit's output, changed in place
        first["a"][0].mul_(2.0)
        x = first["a"][0] + first["b"][0].reshape(x.shape)
        second = self.second(x, deep={"y": x})  # one of its outputs is not used
        return self.nested(second["a"][0] + second["x"])


def body_outputs():
    N, rank = pool.world_size(), pool.rank()
    torch.manual_seed(0)
    plain = Outer()
    ours = copy.deepcopy(plain)
    for m in (ours.view, ours.first, ours.second, ours.nested[1], ours.nested):  # nested: a unit in a unit in a unit
        fully_shard(m, process_group=pool.group())
    fully_shard(ours, process_group=pool.group())
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        x = make_batch(rank, step)[:4]
        loss_of(ours(x)).backward()
        one_device(plain, [[make_batch(r, step)[:4]] for r in range(N)])
        assert_same(ours, plain, what=f"step {step}")
        assert_at_rest(ours)


def test_outputs_of_every_kind_and_nested_units():
    pool.run(2, body_outputs)


def body_without_a_root():
    """Blocks alone are units; the rest of the model is replicated and not our business."""
    N, rank = pool.world_size(), pool.rank()
    plain, ours = blocks(sharded=False), blocks(sharded=False)
    for block in ours.blocks:
        fully_shard(block, process_group=pool.group())
    for step in range(2):
        loss_of(ours(make_batch(rank, step))).backward()
        one_device(plain, [[make_batch(r, step)] for r in range(N)])
    assert_same(ours.blocks, plain.blocks)
    # one more call of fully_shard on the whole, later
    fully_shard(ours, process_group=pool.group())
    ours.zero_grad()
    plain.zero_grad()
    loss_of(ours(make_batch(rank, 3))).backward()
    one_device(plain, [[make_batch(r, 3)] for r in range(N)])
    assert_same(ours, plain)


def test_blocks_without_a_root():
    pool.run(2, body_without_a_root)


def body_autograd_grad():
    model = blocks()
    x = make_batch(pool.rank(), 0).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model(x)), x)
    plain = blocks(sharded=False)
    (expected,) = torch.autograd.grad(loss_of(plain(x)), x)
    assert torch.equal(gradient, expected)
    assert all(p.grad is None for p in model.parameters())
    assert_at_rest(model)


def test_gradients_of_inputs_only():
    pool.run(2, body_autograd_grad)


def body_parameter_groups():
    """Groups by name, and a scheduler, as for any model."""
    models = [blocks(), blocks(sharded=False)]
    optimizers = []
    for m in models:
        decay = [p for n, p in m.named_parameters() if n.endswith("weight")]
        rest = [p for n, p in m.named_parameters() if not n.endswith("weight")]
        optimizers.append(
            torch.optim.AdamW([{"params": decay, "weight_decay": 0.5}, {"params": rest, "lr": 0.3}], lr=0.1)
        )
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    for step in range(3):
        for o in optimizers:
            o.zero_grad()
        loss_of(models[0](make_batch(pool.rank(), step))).backward()
        one_device(models[1], [[make_batch(r, step)] for r in range(pool.world_size())])
        for o, s in zip(optimizers, schedulers, strict=True):
            o.step()
            s.step()
        assert_same(*models, what=f"step {step}")


def test_parameter_groups_and_schedulers():
    pool.run(3, body_parameter_groups)


def test_timeline():
    picture = fsdp.draw_timeline([("gather", "a", 0.0, 1.0), ("forward", "a", 1.0, 2.0), ("reduce", "b", 1.0, 2.0)], 4)
    assert picture.splitlines()[2:] == ["a        ··FF", "b          --"]


# ---- what is saved, loaded, changed or left over between steps; messages


def body_three_dimensions():
    with pytest.raises(ValueError, match="the mesh has 3 dimensions"):
        fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1, 2, 2)))


def test_a_mesh_of_three_dimensions_is_an_error():
    pool.run(4, body_three_dimensions)


def body_hybrid_mismatch():
    mesh = init_device_mesh("cpu", (2, 2))
    for differs in (pool.rank() // 2, pool.rank() % 2):  # the replicas; the shards
        with pytest.raises(ValueError, match="ranks must hold the same model"):
            fully_shard(nn.Linear(3 + differs, 2), mesh=mesh)


def test_different_models_on_a_hybrid_mesh_are_an_error():
    pool.run(4, body_hybrid_mismatch)


def body_different_flags():
    late = pool.rank() == 1
    for layer, words in (
        (nn.Linear(3, 2).requires_grad_(not late), "requires_grad=False"),
        (nn.Linear(3, 2).to(torch.float64 if late else torch.float32), r"torch\.float64"),
    ):
        with pytest.raises(ValueError, match=words):
            fully_shard(layer, process_group=pool.group())


def test_dtype_and_requires_grad_must_agree():
    pool.run(2, body_different_flags)


@dataclasses.dataclass
class Result:
    value: object


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return Result({"y": [self.two(torch.tanh(self.one(x)))]})


def body_dataclass():
    torch.manual_seed(0)
    plain = nn.ModuleList([Wrapped(), Wrapped()])
    ours = copy.deepcopy(plain)
    for m in ours:
        fully_shard(m, process_group=pool.group())
    run = lambda m, x: loss_of(m[1](m[0](x).value["y"][0]).value["y"][0])  # noqa: E731
    run(ours, make_batch(pool.rank(), 0)).backward()
    one_device(plain, [[make_batch(r, 0)] for r in range(pool.world_size())], run)
    assert_same(ours, plain)


def test_outputs_in_a_dataclass():
    pool.run(2, body_dataclass)


def body_registered_twice():
    def make():
        torch.manual_seed(0)
        first, second = Block(), Block()
        return nn.Sequential(nn.Sequential(first, second), nn.Sequential(first, nn.Linear(6, 3)))

    ours, plain = make(), make()
    for m in (*ours[0], ours):
        fully_shard(m, process_group=pool.group())
    assert len(units(ours)) == 3
    for step in range(2):
        for m in (ours, plain):
            m.zero_grad()
        with Collectives() as sent:
            loss_of(ours(make_batch(pool.rank(), step))).backward()
        one_device(plain, [[make_batch(r, step)] for r in range(pool.world_size())])
        assert_same(ours, plain, what=f"step {step}")
        assert_at_rest(ours)
    assert [name for name, _ in sent.calls].count("send") == 2 * 3 + 1 + 3  # one gather more, for the second call
    fsdp.clip_grad_norm_(ours, 0.1)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(a.grad, b.shape), b.grad, rtol=1e-5)


def test_a_unit_that_is_registered_twice():
    pool.run(2, body_registered_twice)


def body_load_other_dtype():
    saved = {n: v.double() for n, v in blocks(sharded=False).state_dict().items()}
    model = blocks()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fsdp.load_full_state_dict(model, saved if pool.rank() == 0 else {})
    assert all(torch.equal(v, saved[n].float()) for n, v in fsdp.full_state_dict(model).items())


def test_rank_0_passes_another_dtype():
    pool.run(2, body_load_other_dtype)


def body_clip_where_a_rank_has_no_rows():
    N, rank = pool.world_size(), pool.rank()
    plain = nn.Linear(6, 1, bias=False).double()
    ours = fully_shard(copy.deepcopy(plain), process_group=pool.group())
    loss_of(ours(make_batch(rank, 0, torch.float64))).backward()
    one_device(plain, [[make_batch(r, 0, torch.float64)] for r in range(N)])
    norm = fsdp.clip_grad_norm_(ours, 0.1)
    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False, "norm")
    assert_same(ours, plain, False)


def test_clip_where_a_rank_has_no_rows():
    pool.run(3, body_clip_where_a_rank_has_no_rows)


def body_optimizer_state_is_a_copy():
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, [0], 0)
    state = fsdp.full_optimizer_state_dict(model, optimizer)
    before = copy.deepcopy(state)
    train(model, optimizer, [1], 0)
    fsdp.load_full_optimizer_state_dict(model, optimizer, state)
    train(model, optimizer, [2], 0)
    for a, b in zip(tree_leaves(state), tree_leaves(before), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_saved_optimizer_state_does_not_change():
    for N in (1, 2):
        pool.run(N, body_optimizer_state_is_a_copy)


def body_hooks_before():
    """A pre-hook from before fully_shard sees what forward will see."""
    layer, seen = nn.Linear(6, 3), []
    layer.register_forward_pre_hook(lambda m, args: seen.append((m.weight.shape, m.weight.dtype, args[0].dtype)))
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(layer, process_group=pool.group(), mp_policy=policy)(make_batch(0, 0))
    assert seen == [((3, 6), torch.bfloat16, torch.bfloat16)]


def test_hooks_from_before():
    pool.run(2, body_hooks_before)


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.seen = nn.Embedding(8, 6), []

    def forward(self, tokens, *, more):
        self.seen.append((tokens.dtype, more["x"].dtype))
        return self.embed(tokens) + more["x"]


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(1000, 1018, dtype=torch.int16).view(3, 6), requires_grad=False)

    def forward(self, x):
        assert self.w.dtype == torch.int16
        return x @ self.w.t().to(x.dtype)


def body_cast_what_floats():
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model, integers = Kinds(), Integers()
    for m in (model, integers):
        fully_shard(m, process_group=pool.group(), mp_policy=policy)
    with torch.no_grad():
        y = model(torch.tensor([1, 2]), more={"x": torch.zeros(2, 6)})
        z = integers(torch.ones(2, 6))
    assert model.seen == [(torch.int64, torch.bfloat16)]
    assert y.dtype == z.dtype == torch.float64
    assert torch.equal(fsdp.full_state_dict(integers)["w"], torch.arange(1000, 1018, dtype=torch.int16).view(3, 6))


def test_what_floats_is_cast_and_nothing_else():
    pool.run(2, body_cast_what_floats)


def body_replaced_over_the_same_memory():
    """New parameter objects over our memory get the gradients."""
    model, plain = blocks(), blocks(sharded=False)
    for m in model.modules():
        for name, p in list(m._parameters.items()):
            setattr(m, name, nn.Parameter(p.data))
    mine = list(model.parameters())
    loss_of(model(make_batch(pool.rank(), 0))).backward()
    assert all(p.grad is not None for p in mine)
    one_device(plain, [[make_batch(r, 0)] for r in range(pool.world_size())])
    assert_same(model, plain)


def test_new_parameters_over_the_same_memory():
    pool.run(2, body_replaced_over_the_same_memory)


class Broken(Exception):
    pass


def fail_in_backward(model, batch):
    def raises(gradient):
        raise Broken

    def how(block, x):
        x = block(x)
        if block is model.blocks[1]:
            x.register_hook(raises)
        return x

    with pytest.raises(Broken):
        loss_of(model(batch, None, how)).backward()


def body_state_dict_after_an_exception():
    plain = blocks(sharded=False).state_dict()
    others = {n: v + 1 for n, v in plain.items()}
    for what in ("save", "load"):
        ours = blocks()
        fail_in_backward(ours, make_batch(pool.rank(), 7))
        if what == "load":
            fsdp.load_full_state_dict(ours, others)
        saved = fsdp.full_state_dict(ours)
        assert all(torch.equal(v, (others if what == "load" else plain)[n]) for n, v in saved.items())


def test_state_dicts_after_an_exception_in_backward():
    pool.run(2, body_state_dict_after_an_exception)


def body_out_of_the_block():
    """Frozen parameters under the hybrid mesh, no_sync and a policy: as PyTorch's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, theirs = blocks(sharded=False), blocks(sharded=False)
    for m, wrap, P in (ours, fully_shard, fsdp.MixedPrecisionPolicy), (theirs, torch_fully_shard, TorchPolicy):
        m.blocks[2].one.requires_grad_(False)
        for part in (*m.blocks, m):
            wrap(part, mesh=mesh, mp_policy=P(torch.bfloat16, torch.float32))
    for step in range(2):
        for last in (False, True):
            batch = make_batch(pool.rank(), 2 * step + last)
            theirs.set_requires_gradient_sync(last)
            loss_of(theirs(batch).float()).backward()
            with nullcontext() if last else fsdp.no_sync(ours):
                loss_of(ours(batch).float()).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad.to_local(), rtol=1e-5, atol=1e-7)


def test_no_sync_policy_and_frozen_parameters_on_a_hybrid_mesh():
    pool.run(4, body_out_of_the_block)


def body_interrupted():
    """KeyboardInterrupt passes by the hooks: the next forward starts anew, with the present weights."""

    def how(block, x):
        if block is ours.blocks[2]:
            raise KeyboardInterrupt
        return block(x)

    ours, plain = blocks(), blocks(sharded=False)
    shards = list(ours.parameters())
    with pytest.raises(KeyboardInterrupt):
        ours(make_batch(0, 0), None, how)
    with torch.no_grad():
        for p in (*shards, *plain.parameters()):
            p.add_(1.0)
    loss_of(ours(make_batch(pool.rank(), 1))).backward()
    one_device(plain, [[make_batch(r, 1)] for r in range(pool.world_size())])
    assert_same(ours, plain)
    assert_at_rest(ours)


def test_interrupted_forward():
    pool.run(2, body_interrupted)


def body_order_after_a_block_alone():
    """A block alone, before the first forward of the whole, does not fix the order."""
    model = blocks()
    fsdp.full_state_dict(model)
    model.blocks[1](make_batch(0, 0))
    for _ in range(2):
        with Collectives() as sent:
            model(make_batch(pool.rank(), 0), [3, 1, 0])
    assert [name for name, _ in sent.calls].count("send") == len(units(model))


def test_the_order_is_that_of_the_first_forward_of_the_whole():
    pool.run(2, body_order_after_a_block_alone)


def body_saved_dtype():
    model = blocks(mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert {v.dtype for v in fsdp.full_state_dict(model).values()} == {torch.float32}


def test_what_is_saved_has_the_shards_dtype():
    pool.run(2, body_saved_dtype)


def body_kept_losses():
    """A loss that somebody keeps after its backward does not hold up the next backward's reductions."""
    model, kept = blocks(6), []
    for step in range(2):
        kept.append(loss_of(model(make_batch(0, step))))
        with Peak(lambda: sum(any(p.whole.grad is not None for p in u.parameters) for u in units(model))) as peak:
            kept[-1].backward()
        assert peak.peak <= 2


def test_a_kept_loss_holds_up_nothing():
    pool.run(2, body_kept_losses)


def body_one_rank_of_four_differs():
    with pytest.raises(ValueError, match="ranks must hold the same model"):
        fully_shard(nn.Linear(3 + (pool.rank() == 3), 2), mesh=init_device_mesh("cpu", (2, 2)))


def body_a_key_is_missing_on_one_rank():
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2)))
    state_dict = {"weight": torch.ones(4, 4)} | ({} if pool.rank() == 2 else {"bias": torch.ones(4)})
    with pytest.raises(RuntimeError, match=r"bias: missing, not \(4,\)"):
        fsdp.load_full_state_dict(model, state_dict)


@pytest.mark.parametrize("body", [body_one_rank_of_four_differs, body_a_key_is_missing_on_one_rank])
def test_a_hybrid_mesh_where_one_rank_differs(body):
    pool.run(4, body)


def body_materialize_in_the_shards_dtype():
    def init_fn(module):
        fsdp.reset_parameters(module)
        if isinstance(module, nn.Linear):  # replaces what it was given
            module.bias = nn.Parameter(torch.rand_like(module.bias))

    with torch.device("meta"):
        ours, plain = Blocks(), Blocks()
    for part in (*ours.blocks, ours):
        fully_shard(part, process_group=pool.group(), mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16))
    torch.manual_seed(0)
    fsdp.materialize(ours, init_fn)
    torch.manual_seed(0)
    plain.to_empty(device="cpu").apply(init_fn)
    for name, value in fsdp.full_state_dict(ours).items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_materialized_in_the_shards_dtype():
    pool.run(2, body_materialize_in_the_shards_dtype)


def body_after_an_exception_in_backward(how):
    """Nothing of the backward that raised is left, whatever comes next."""
    ours, plain = blocks(), blocks(sharded=False)
    batch = make_batch(pool.rank(), 1)
    earlier = loss_of(ours(batch)) if how == "another graph" else None
    fail_in_backward(ours, make_batch(pool.rank(), 7))
    for p in {p.shard for unit in units(ours) for p in unit.parameters}:
        p.grad = None
    (loss_of(ours(batch)) if earlier is None else earlier).backward()
    one_device(plain, [[make_batch(r, 1)] for r in range(pool.world_size())])
    assert_same(ours, plain)
    assert_at_rest(ours)


@pytest.mark.parametrize("how", ["another graph", "another forward"])
def test_the_step_after_an_exception_in_backward(how):
    pool.run(2, body_after_an_exception_in_backward, how)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(6, 6, bias=False).bfloat16(), nn.Linear(6, 1, bias=False)

    def forward(self, x):
        return self.high(self.low(x.bfloat16()).float())


def body_clip_two_dtypes():
    """Rank 1 has rows in bfloat16 only."""
    model = TwoDtypes()
    for layer in (model.low, model.high, model):
        fully_shard(layer, process_group=pool.group())
    loss_of(model(make_batch(pool.rank(), 0))).backward()
    norms = [
        whole(p.grad, shape).double().norm() for p, shape in zip(model.parameters(), [(6, 6), (1, 6)], strict=True)
    ]
    total = fsdp.clip_grad_norm_(model, 1e-3, norm_type="2")
    assert total.dtype == torch.float32
    assert torch.allclose(total.double(), torch.stack(norms).norm(), rtol=1e-2)
    with pytest.raises(ValueError, match=r"Linear is a part of a unit \('one.weight' of Block"):
        fsdp.clip_grad_norm_(blocks().blocks[0].one, 1.0)
    with pytest.raises(ValueError, match="has no unit"):
        fsdp.clip_grad_norm_(Blocks(), 1.0)
    without_root = Blocks()
    fully_shard(without_root.blocks[0], process_group=pool.group())
    with pytest.raises(ValueError, match=r"head\.bias: in no unit"):
        fsdp.clip_grad_norm_(without_root, 1.0)


def test_clip_two_dtypes_and_part_of_a_unit():
    pool.run(2, body_clip_two_dtypes)


def body_state_dict_while_unsharded(assign):
    """An evaluation without no_grad leaves the units unsharded; what is saved and loaded are shards all the same."""
    model = blocks(reshard_after_forward=False)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(model(make_batch(pool.rank(), 0)))
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    loss = loss_of(model(make_batch(pool.rank(), 0)))
    model.load_state_dict({name: value + 1 for name, value in saved.items()}, assign=assign)
    loss.backward()  # of what forward has used
    assert_at_rest(model)
    assert all(torch.equal(value, saved[name] + 1) for name, value in model.state_dict().items())
    assert torch.equal(fsdp.full_state_dict(model)["head.bias"], blocks(sharded=False).head.bias + 1)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_while_unsharded(assign):
    pool.run(2, body_state_dict_while_unsharded, assign)


def body_float16_sum():
    layer = fully_shard(nn.Linear(4, 4).half(), process_group=pool.group())
    (layer(torch.ones(1, 4).half()).sum() * 40000).backward()
    assert torch.equal(whole(layer.bias.grad, (4,)), torch.full((4,), 40000.0).half())


def test_a_sum_of_float16_does_not_overflow():
    for N in (2, 4):
        pool.run(N, body_float16_sum)


def body_hooks_of_shards():
    """An optimizer in backward, as PyTorch's tutorial on it has."""
    ours, plain = blocks(), blocks(sharded=False)
    for p in ours.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad()))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        loss_of(ours(make_batch(pool.rank(), step))).backward()
        optimizer.zero_grad()
        one_device(plain, [[make_batch(r, step)] for r in range(pool.world_size())])
        optimizer.step()
    saved = fsdp.full_state_dict(ours)
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())


def test_hooks_of_shards_are_called():
    pool.run(2, body_hooks_of_shards)


class Counts(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def body_extra_state(everywhere):
    model = fully_shard(nn.Sequential(Counts(4, 4), Counts(4, 4)), process_group=pool.group())
    model[1].seen = 7
    saved = fsdp.full_state_dict(model)
    model[1].seen = 0
    fsdp.load_full_state_dict(model, saved if everywhere or pool.rank() == 0 else {})
    assert (model[0].seen, model[1].seen) == (0, 7)


@pytest.mark.parametrize("everywhere", [True, False])
def test_extra_state_is_loaded(everywhere):
    pool.run(2, body_extra_state, everywhere)


def body_changes_of_the_module():
    with pytest.raises(RuntimeError, match="Blocks is sharded: copy it before fully_shard"):
        copy.deepcopy(blocks())
    model, plain = blocks().double(), blocks(sharded=False).double()
    batch = make_batch(pool.rank(), 0, torch.float64)
    with torch.inference_mode():  # the first forward in the new dtype
        assert torch.equal(model(batch), plain(batch))
    loss_of(model(batch)).backward()
    one_device(plain, [[make_batch(r, 0, torch.float64)] for r in range(pool.world_size())])
    assert_same(model, plain)
    model.blocks[0].one.half()
    with pytest.raises(ValueError, match=r"several dtypes now \(one\.weight: torch\.float16"):
        model(batch)


def test_changes_of_a_sharded_module():
    pool.run(2, body_changes_of_the_module)


def body_assigned_and_loaded():
    model, ones = blocks(), {name: torch.ones_like(value) for name, value in Blocks().state_dict().items()}
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    saved, plain = fsdp.full_state_dict(model), blocks(sharded=False).state_dict()
    assert all(torch.equal(saved[name], plain[name] + 1) for name in plain)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    fsdp.load_full_state_dict(model, ones)
    assert all(torch.equal(value, torch.ones_like(value)) for value in model.state_dict().values())


def test_assigned_shards_are_saved_and_loaded():
    pool.run(2, body_assigned_and_loaded)


def body_frozen_after_no_sync():
    """What no_sync has kept is reduced by the next backward, frozen in between or not: as .grad would be there."""
    model, plain = blocks(), blocks(sharded=False)
    with fsdp.no_sync(model):
        loss_of(model(make_batch(pool.rank(), 0))).backward()
    one_device(plain, [[make_batch(r, 0)] for r in range(pool.world_size())])
    model.head.requires_grad_(False)
    loss_of(model(make_batch(pool.rank(), 1))).backward()
    assert torch.equal(whole(model.head.weight.grad, plain.head.weight.shape), plain.head.weight.grad)
    model.zero_grad()
    model.head.requires_grad_(True)
    plain.zero_grad()
    loss_of(model(make_batch(pool.rank(), 2))).backward()
    one_device(plain, [[make_batch(r, 2)] for r in range(pool.world_size())])
    assert_same(model, plain)


def test_frozen_after_no_sync():
    pool.run(2, body_frozen_after_no_sync)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.randn(3, 6, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.used.t()).abs()


def body_complex():
    torch.manual_seed(0)
    plain = Complex()
    ours = fully_shard(copy.deepcopy(plain), process_group=pool.group())
    loss_of(ours(make_batch(pool.rank(), 0))).backward()
    one_device(plain, [[make_batch(r, 0)] for r in range(pool.world_size())])
    assert_same(ours, plain)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert torch.allclose(fsdp.clip_grad_norm_(ours, 0.1), norm)


def test_complex_parameters():
    pool.run(2, body_complex)


def body_on_meta_then_a_block():
    with torch.device("meta"):
        model = Blocks()
    for part in (*model.blocks, model):
        fully_shard(part, process_group=pool.group())
    with pytest.raises(RuntimeError, match="still on the meta device"):
        model(make_batch(0, 0))
    fsdp.load_full_state_dict(model, blocks(sharded=False).state_dict())
    with torch.no_grad():
        model.blocks[1](make_batch(pool.rank(), 0))
    assert_at_rest(model)


def test_a_block_alone_after_a_forward_that_raised():
    pool.run(2, body_on_meta_then_a_block)


class WithBuffer(nn.Module):
    """A root without parameters of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)  # rank 1 has no row
        self.register_buffer("last_extra_state", torch.ones(4))  # a name that only looks like one of extra state

    def forward(self, x):
        return self.layer(x * self.last_extra_state)

    def get_extra_state(self):
        return torch.arange(self.size) if hasattr(self, "size") else torch.zeros(0)

    def set_extra_state(self, state):
        self.size = len(state)


def body_no_rows_here():
    with torch.device("meta"):
        model = WithBuffer()
    for part in (model.layer, model):
        fully_shard(part, process_group=pool.group())
    with torch.device("meta"):
        materialized = WithBuffer()
    for part in (materialized.layer, materialized):
        fully_shard(part, process_group=pool.group())
    fsdp.materialize(materialized)
    assert not materialized.last_extra_state.is_meta
    plain = WithBuffer()
    plain.size = 3
    fsdp.load_full_state_dict(model, plain.state_dict())
    assert model.size == 3
    saved = fsdp.full_state_dict(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in saved.items())
    assert saved["layer.weight"].untyped_storage().nbytes() == saved["layer.weight"].nbytes  # without padding
    model, plain, x = model.double(), plain.double(), torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(model(x), plain(x))


def test_a_rank_without_rows_and_a_root_without_parameters():
    pool.run(2, body_no_rows_here)


class MaybeEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.empty = nn.Linear(6, 6), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x, with_empty):
        return self.layer(x) + (self.empty.sum() if with_empty else 0.0)


def body_empty_on_one_rank():
    model = fully_shard(MaybeEmpty(), process_group=pool.group())
    loss_of(model(make_batch(pool.rank(), 0), with_empty=pool.rank() == 0)).backward()
    assert model.empty.grad.shape == (0, 3)  # on both: an optimizer must not have state on one alone


def test_an_empty_parameter_used_on_one_rank():
    pool.run(2, body_empty_on_one_rank)


def body_clip_float16():
    layer = fully_shard(nn.Linear(4, 4, bias=False).half(), process_group=pool.group())
    layer(torch.full((1, 4), 512.0).half()).sum().backward()  # a norm of 2048: its square is no fp16
    assert fsdp.clip_grad_norm_(layer, 1024.0).item() == pytest.approx(2048.0)
    assert torch.equal(whole(layer.weight.grad, (4, 4)), torch.full((4, 4), 256.0).half())


def test_the_norm_of_float16_does_not_overflow():
    pool.run(2, body_clip_float16)


def body_two_outermost():
    shared = Block()
    roots = [nn.Sequential(shared, nn.Linear(6, 3)) for _ in range(2)]
    for part in (shared, *roots):
        fully_shard(part, process_group=pool.group())
    loss_of(roots[0](make_batch(pool.rank(), 0))).backward()
    with pytest.raises(RuntimeError, match="in two outermost units"):
        roots[1](make_batch(pool.rank(), 0))


def test_a_unit_in_two_outermost_units_is_an_error():
    pool.run(2, body_two_outermost)


def body_first_forward_in_a_hook():
    """As a teacher's, whose first forward is in another model's backward."""
    model, plain = blocks(), blocks(sharded=False)
    batch, outputs = make_batch(pool.rank(), 0), []
    x = torch.ones(1, requires_grad=True)
    y = x * 1.0
    y.register_hook(lambda _: outputs.append(model(batch)))
    y.sum().backward()
    assert torch.equal(outputs[0], plain(batch))
    assert_at_rest(model)
    loss_of(model(batch)).backward()
    one_device(plain, [[make_batch(r, 0)] for r in range(pool.world_size())])
    assert_same(model, plain)


def test_the_first_forward_in_a_hook_of_backward():
    pool.run(2, body_first_forward_in_a_hook)

"""ddp.py against one device and against torch.nn.parallel.DistributedDataParallel."""

import copy
import dataclasses
import gc
import io
import pickle
import subprocess
import sys
import time
import weakref
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from shared import (
    MODELS,
    OPTIMIZERS,
    Collectives,
    assert_equal,
    assert_same_parameters,
    loss_of,
    make_batch,
    make_model,
)
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint

import ddp

TorchDDP = nn.parallel.DistributedDataParallel


# ---- pure functions


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))),
    st.integers(1, 400),
)
def test_buckets_hold_every_parameter_once_in_reverse_and_close_at_the_cap(sizes, cap):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype in sizes]
    buckets = ddp.assign_buckets(tensors, cap)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(tensors)))
    assert [bucket[0] for bucket in buckets] == sorted((bucket[0] for bucket in buckets), reverse=True)
    last_of = {tensors[bucket[0]].dtype: bucket for bucket in buckets}
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({tensors[i].dtype for i in bucket}) == 1
        assert sum(tensors[i].nbytes for i in bucket[:-1]) < cap
        if bucket is not last_of[tensors[bucket[0]].dtype]:
            assert sum(tensors[i].nbytes for i in bucket) >= cap


def test_a_bucket_closes_at_the_cap_not_above_it():
    assert ddp.assign_buckets([torch.zeros(5, dtype=torch.int16)] * 5, 20) == [[4, 3], [2, 1], [0]]


def test_views_lie_side_by_side_with_the_strides_of_the_parameters():
    tensors = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(0, 4), torch.zeros(4, 5).t(), torch.zeros(3, 2)[:, :1]]
    flat = torch.arange(30.0)
    views = ddp.views_into(flat, tensors)
    assert [view.shape for view in views] == [tensor.shape for tensor in tensors]
    assert [view.stride() for view in views[:4]] == [tensor.stride() for tensor in tensors[:4]]
    assert sorted(x for view in views for x in view.flatten().tolist()) == list(range(30))


def test_tensors_in_every_kind_of_output():
    Pair = namedtuple("Pair", "a b")

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        more: dict

    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    found = list(ddp.tensors_in([a, {"x": Pair(b, None)}, Output(c, {"y": (d, "text")})]))
    assert [t.item() for t in found] == [0, 1, 2, 3]


# ---- equality with one device and with PyTorch


def one_device_step(model, ranks, batches):
    """Accumulate the ranks' mean gradients in rank order; batches[rank] is a list of micro-batches."""
    total = {}
    for rank in range(ranks):
        model.zero_grad()
        for batch in batches[rank]:
            loss_of(model(batch)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                mine = parameter.grad / ranks
                total[name] = total[name] + mine if name in total else mine
    for name, parameter in model.named_parameters():
        parameter.grad = total.get(name)


def body_train(kind, dtype, optimizer, arguments, micro_batches, set_to_none):
    N, rank, exact = pool.world_size(), pool.rank(), pool.world_size() <= 2
    plain, model = make_model(kind, dtype), make_model(kind, dtype, seed=1 + rank)  # ranks start different
    ours = ddp.DDP(copy.deepcopy(model), pool.group(), **arguments)
    theirs = TorchDDP(model, process_group=pool.group(), **arguments)
    optimizers = {m: OPTIMIZERS[optimizer](m.parameters()) for m in (ours, theirs, plain)}
    for step in range(5):
        batches = [[make_batch(r, 10 * step + m, dtype) for m in range(micro_batches)] for r in range(N)]
        for m in (ours, theirs):
            optimizers[m].zero_grad(set_to_none=set_to_none)
            for i, batch in enumerate(batches[rank]):
                with m.no_sync() if i < micro_batches - 1 else nullcontext():
                    loss = loss_of(m(batch))
                    loss.backward()
        one_device_step(plain, N, batches)
        for o in optimizers.values():
            o.step()
        assert_same_parameters(ours.module, plain, exact, f"step {step}, one device:")
        assert_same_parameters(ours.module, theirs.module, exact, f"step {step}, PyTorch:")
        for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            assert_equal(a, b, exact, what=name)
    for parameter in ours.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(N)]
        dist.all_gather(everyone, parameter.detach().contiguous(), group=pool.group())
        assert all(torch.equal(everyone[0], other) for other in everyone)


@given(
    N=st.integers(1, 4),
    kind=st.sampled_from(MODELS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    cap=st.sampled_from([25, 1e-3, 1e-4, 1e-6]),
    as_view=st.booleans(),
    find_unused=st.booleans(),
    micro_batches=st.integers(1, 3),
    set_to_none=st.booleans(),
)
def test_five_steps_equal_one_device_and_pytorch(
    N, kind, dtype, optimizer, cap, as_view, find_unused, micro_batches, set_to_none
):
    if N > 2 or kind == "mixed":
        dtype = torch.float64  # where sums have another order the claim is 1e-12
    if N > 2 and kind == "mixed":
        kind = "plain"
    arguments = {
        "bucket_cap_mb": cap,
        "gradient_as_bucket_view": as_view,
        "find_unused_parameters": find_unused,
    }
    pool.run(N, body_train, kind, dtype, optimizer, arguments, micro_batches, set_to_none)


@pytest.mark.parametrize("N", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_arguments(N, dtype):
    dtype = torch.float64 if N == 3 else dtype
    pool.run(N, body_train, "plain", dtype, "adamw", {}, 1, True)


def body_naive(kind):
    N, rank, exact = pool.world_size(), pool.rank(), pool.world_size() <= 2
    dtype = torch.float32 if exact else torch.float64
    ours, plain = make_model(kind, dtype), make_model(kind, dtype)
    unused = nn.Parameter(torch.ones(2, dtype=dtype))
    ours.register_parameter("unused", unused if rank else nn.Parameter(torch.ones(2, dtype=dtype)))
    for step in range(3):
        ours.zero_grad()
        (loss_of(ours(make_batch(rank, step, dtype))) + (ours.unused.sum() if rank == 0 else 0)).backward()
        for parameter in ours.parameters():
            if parameter.grad is not None:  # one that somebody has put there as a slice of another tensor
                parameter.grad = torch.stack([parameter.grad, torch.ones_like(parameter)], dim=-1)[..., 0]
        ddp.all_reduce_gradients(ours, pool.group())
        one_device_step(plain, N, [[make_batch(r, step, dtype)] for r in range(N)])
        assert_equal(ours.unused.grad, torch.full((2,), 1 / N, dtype=dtype), exact)
        for name, parameter in plain.named_parameters():
            assert_equal(ours.get_parameter(name).grad, parameter.grad, exact, name)


@pytest.mark.parametrize("kind", ["plain", "frozen", "odd", "tied"])
@pytest.mark.parametrize("N", [1, 2, 3])
def test_naive_form(N, kind):
    pool.run(N, body_naive, kind)


def body_subgroups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[rank % 2]
    model = ddp.DDP(make_model("plain", seed=rank), mine)
    assert_same_parameters(model.module, make_model("plain", seed=rank % 2), exact=True)  # rank 0 of [3, 1] is 1
    plain = make_model("plain", seed=rank % 2)
    loss_of(model(make_batch(rank, 0))).backward()
    one_device_step(plain, 2, [[make_batch(rank % 2, 0)], [make_batch(rank % 2 + 2, 0)]])
    assert_same_parameters(model.module, plain, exact=True)


def test_two_groups_side_by_side_never_meet():
    pool.run(4, body_subgroups)


def body_fp16_range():
    model = ddp.DDP(nn.Linear(1, 1, bias=False).half(), pool.group())
    model(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    assert model.module.weight.grad.item() == 40000.0


def test_fp16_gradients_do_not_overflow_in_the_sum():
    pool.run(2, body_fp16_range)


# ---- construction


def body_start():
    rank = pool.rank()
    model = make_model("batchnorm", seed=rank)
    model[1].running_mean.fill_(rank)
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("short", torch.tensor([7 + rank], dtype=torch.int16))
    model.register_buffer("local", torch.tensor(rank))
    model._ddp_params_and_buffers_to_ignore = ["local", "3.bias"]
    wrapped = ddp.DDP(model, pool.group())
    first, mine = make_model("batchnorm", seed=0), make_model("batchnorm", seed=rank)
    assert_equal(model[3].bias.detach(), mine[3].bias.detach(), exact=True)
    model[3].bias.data = first[3].bias.data
    assert_same_parameters(model, first, exact=True)
    assert model[1].running_mean.sum() == 0
    assert model.flags.tolist() == [True, False]
    assert model.short.item() == 7
    assert model.local.item() == rank
    assert list(wrapped.state_dict()) == ["module." + name for name in model.state_dict()]
    loss_of(wrapped(make_batch(rank, 0))).backward()
    grads = [None] * pool.world_size()
    dist.all_gather_object(grads, (model[3].bias.grad, model[3].weight.grad), group=pool.group())
    assert not torch.equal(grads[0][0], grads[1][0])  # ignored: not reduced
    assert torch.equal(grads[0][1], grads[1][1])


def test_all_ranks_start_from_rank_0():
    pool.run(2, body_start)


def body_different(change):
    model = make_model("batchnorm")
    if pool.rank() == pool.world_size() - 1:
        if change == "shape":
            model[3] = nn.Linear(8, 4)
        elif change == "count":
            model.append(nn.Linear(3, 3))
        elif change == "dtype":
            model[3].bfloat16()
        elif change == "frozen":
            model[3].bias.requires_grad_(False)
        elif change == "buffer":
            model[1].register_buffer("extra", torch.zeros(2))
        elif change == "order":
            model = nn.Sequential(*reversed(model))
    try:
        ddp.DDP(model, pool.group())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", ["'3.weight': shape (3, 8)", "rank 2 has '3.weight': shape (4, 8)"]),
        ("count", ["rank 2 has '4.weight': shape (3, 3)"]),
        ("dtype", ["rank 2 has '3.weight'", "torch.bfloat16"]),
        ("frozen", ["rank 2 has '3.bias'", "requires_grad=False"]),
        ("buffer", ["rank 2 has '1.extra'"]),
        ("order", ["rank 2 has '0.weight': shape (3, 8)"]),
    ],
)
def test_different_models_are_an_error_on_every_rank(change, words):
    errors = pool.run(3, body_different, change)
    assert len(set(errors)) == 1
    for word in words:
        assert word in errors[0]


def body_refuse(case):
    make, kwargs = {
        "nothing to train": (lambda: nn.Linear(2, 2).requires_grad_(False), {}),
        "empty": (nn.Module, {}),
        "sparse": (lambda: nn.Embedding(4, 2, sparse=True), {}),
        "cap": (lambda: nn.Linear(2, 2), {"bucket_cap_mb": 0}),
        "device_ids": (lambda: nn.Linear(2, 2), {"device_ids": [0]}),
    }[case]
    # rank 0 alone is wrong: the others must hear of it, not hang
    wrong = pool.rank() == 0
    try:
        ddp.DDP(make() if wrong else nn.Linear(2, 2), pool.group(), **(kwargs if wrong else {}))
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("nothing to train", "RuntimeError", "no parameter requires a gradient"),
        ("empty", "RuntimeError", "no parameter requires a gradient"),
        ("sparse", "ValueError", "sparse"),
        ("cap", "ValueError", "bucket_cap_mb is 0"),
        ("device_ids", "ValueError", "device_ids is [0]"),
    ],
)
def test_unusable_arguments_are_an_error_on_every_rank(case, kind, words):
    for raised, text in pool.run(2, body_refuse, case):
        assert raised == kind
        assert words in text


def body_not_a_member():
    group = dist.new_group([0])
    if pool.rank() == 0:
        ddp.DDP(nn.Linear(2, 2), group)
    else:
        with pytest.raises(ValueError, match=f"rank {pool.rank()} is not a member"):
            ddp.DDP(nn.Linear(2, 2), group)


def test_a_rank_outside_of_the_group():
    pool.run(4, body_not_a_member)


def test_without_a_world():
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        ddp.DDP(nn.Linear(2, 2))


# ---- overlap and order


class Backwards(nn.Module):
    """Layers that rank 0 uses in one order and the others in the reverse: gradients arrive in another order too."""

    def __init__(self, rank):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.order = range(4) if rank == 0 else reversed(range(4))
        self.order = list(self.order)

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


def body_order():
    rank, N = pool.rank(), pool.world_size()
    torch.manual_seed(0)
    model = ddp.DDP(Backwards(rank), pool.group(), bucket_cap_mb=1e-6)
    plain = [copy.deepcopy(model.module) for _ in range(N)]
    with Collectives() as seen:
        loss_of(model(make_batch(rank, 0, rows=4))).backward()
    for r, copied in enumerate(plain):
        copied.order = list(range(4)) if r == 0 else list(reversed(range(4)))
        loss_of(copied(make_batch(r, 0, rows=4))).backward()
    for name, parameter in model.module.named_parameters():
        mean = sum(copied.get_parameter(name).grad / N for copied in plain)
        assert_equal(parameter.grad, mean, exact=True, what=name)
    return seen.calls


def test_buckets_are_sent_in_one_order_whatever_the_order_of_gradients():
    first, second = pool.run(2, body_order)
    assert first == second
    assert len(first) == 8


def body_overlap():
    events = []
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[0].register_full_backward_pre_hook(lambda *_: events.append("backward of the first layer"))
    wrapped = ddp.DDP(model, pool.group(), bucket_cap_mb=1e-6)
    original = dist.all_reduce

    def recorded(tensor, *args, **kwargs):
        assert kwargs["async_op"]
        events.append("all-reduce")
        return original(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    try:
        losses = [loss_of(wrapped(make_batch(pool.rank(), step))) for step in (0, 1)]
        for loss in losses:
            loss.backward()
    finally:
        dist.all_reduce = original
    return events


def test_a_full_bucket_is_sent_while_backward_goes_on():
    expected = ["all-reduce", "backward of the first layer", "all-reduce"]
    assert pool.run(2, body_overlap) == [2 * expected] * 2


# ---- no_sync and accumulation


def grads_equal_on_all_ranks(model):
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    everyone = [torch.empty_like(gradient) for _ in range(pool.world_size())]
    dist.all_gather(everyone, gradient, group=pool.group())
    return all(torch.equal(everyone[0], other) for other in everyone)


def body_no_sync(as_view):
    rank = pool.rank()
    model = ddp.DDP(make_model("plain"), pool.group(), gradient_as_bucket_view=as_view)
    local = make_model("plain")
    with Collectives() as seen, model.no_sync():
        loss_of(model(make_batch(rank, 0))).backward()
    assert seen.calls == []
    loss_of(local(make_batch(rank, 0))).backward()
    assert_same_parameters(model.module, local, exact=True)
    with model.no_sync():
        inside = loss_of(model(make_batch(rank, 1)))
    inside.backward()  # the forward counts: still local
    loss_of(local(make_batch(rank, 1))).backward()
    assert_same_parameters(model.module, local, exact=True)
    outside = loss_of(model(make_batch(rank, 2)))
    with model.no_sync():
        inside = loss_of(model(make_batch(rank, 4)))  # between forward and backward of the other
        outside.backward()  # the forward counts: reduced, with what was accumulated
    assert grads_equal_on_all_ranks(model)
    kept = [p.grad.clone() for p in model.parameters()]
    inside.backward()
    assert not grads_equal_on_all_ranks(model)
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad.copy_(gradient)
    plain = make_model("plain")
    one_device_step(plain, 2, [[make_batch(r, m) for m in range(3)] for r in range(2)])
    assert_same_parameters(model.module, plain, exact=True)
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        assert model.require_backward_grad_sync
    # accumulation with a reduction each time: the means of the micro-batches add up
    loss_of(model(make_batch(rank, 3))).backward()
    last = make_model("plain")
    one_device_step(last, 2, [[make_batch(r, 3)] for r in range(2)])
    for ours, first, second in zip(model.module.parameters(), plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, first.grad + second.grad)
    assert grads_equal_on_all_ranks(model)


@pytest.mark.parametrize("as_view", [False, True])
def test_no_sync_keeps_gradients_local_until_the_next_synchronised_backward(as_view):
    pool.run(2, body_no_sync, as_view)


class Branches(nn.Module):
    """`forward(x, i)` uses layer i only, or none for None."""

    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(count))

    def forward(self, x, *which):
        return sum((self.layers[i](x) for i in which), torch.zeros(1, requires_grad=True) * 1)


def body_unsynchronised_only(find_unused):
    """Layer 0 or 1, by rank, in the unsynchronised micro-batch; layer 2 in the other."""
    rank = pool.rank()
    torch.manual_seed(0)
    model = ddp.DDP(Branches(), pool.group(), find_unused_parameters=find_unused, bucket_cap_mb=1e-6)
    with model.no_sync():
        which = (rank,) if find_unused else (0, 1)
        model(make_batch(rank, 0), *which).sum().backward()
    model(make_batch(rank, 1), 2).sum().backward()
    assert grads_equal_on_all_ranks(model)
    if find_unused:
        expected = make_batch(0, 0).sum(0) / 2
        torch.testing.assert_close(model.module.layers[0].weight.grad, expected.expand(2, 6))


@pytest.mark.parametrize("find_unused", [False, True])
def test_parameters_used_only_without_synchronisation_still_arrive(find_unused):
    pool.run(2, body_unsynchronised_only, find_unused)


def body_several_backwards():
    rank = pool.rank()
    model, plain = ddp.DDP(make_model("plain"), pool.group()), make_model("plain")
    first, second = model(make_batch(rank, 0)), model(make_batch(rank, 1))  # two forwards, one backward
    (loss_of(first) + loss_of(second)).backward()
    for r in range(2):
        ((loss_of(plain(make_batch(r, 0))) + loss_of(plain(make_batch(r, 1)))) / 2).backward()
    assert_same_parameters(model.module, plain, exact=True)
    model.zero_grad()
    plain.zero_grad()
    losses = [loss_of(model(make_batch(rank, step))) for step in (0, 1)]  # two forwards, a backward each
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    assert grads_equal_on_all_ranks(model)
    for r in range(2):
        ((2 * loss_of(plain(make_batch(r, 0))) + loss_of(plain(make_batch(r, 1)))) / 2).backward()
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_two_forwards_before_one_backward_or_two():
    pool.run(2, body_several_backwards)


# ---- unused, frozen and tied parameters


def body_unused(as_view):
    rank, N = pool.rank(), pool.world_size()
    torch.manual_seed(0)
    model = ddp.DDP(
        Branches(4), pool.group(), find_unused_parameters=True, bucket_cap_mb=1e-6, gradient_as_bucket_view=as_view
    )
    layers = model.module.layers
    for _ in range(2):
        model.zero_grad()
        # rank r uses layer r % 2 and layer 3; nobody uses layer 2
        model(make_batch(rank, 0), rank % 2, 3).sum().backward()
        assert layers[2].weight.grad is None
        even = sum(make_batch(r, 0).sum(0) * (1 / N) for r in range(0, N, 2))
        torch.testing.assert_close(layers[0].weight.grad, even.expand(2, 6))
        if not as_view:  # also where this rank had no gradient of its own
            buckets = {bucket.buffer().untyped_storage().data_ptr() for bucket in model._buckets}
            assert not any(
                p.grad is not None and p.grad.untyped_storage().data_ptr() in buckets for p in model.parameters()
            )
        everyone = sum(make_batch(r, 0).sum(0) * (1 / N) for r in range(N))
        torch.testing.assert_close(layers[3].weight.grad, everyone.expand(2, 6))
    before = [layer.weight.grad.clone() for layer in (layers[0], layers[1], layers[3])]
    model(make_batch(rank, 1), 2).sum().backward()  # without zero_grad: gradients that nobody adds to stay
    for layer, kept in zip((layers[0], layers[1], layers[3]), before, strict=True):
        assert_equal(layer.weight.grad, kept, exact=True)
    assert layers[2].weight.grad is not None
    model(make_batch(rank, 2), *([0] if rank == 0 else [])).sum().backward()  # added to on one rank only
    expected = before[0] + make_batch(0, 2).sum(0).expand(2, 6) / N
    torch.testing.assert_close(layers[0].weight.grad, expected)
    model.zero_grad()
    model(make_batch(rank, 3)).sum().backward()  # nobody uses anything
    assert all(layer.weight.grad is None for layer in layers)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("N", [2, 3])
def test_unused_parameters(N, as_view):
    pool.run(N, body_unused, as_view)


def body_unused_error():
    torch.manual_seed(0)
    model = ddp.DDP(Branches(), pool.group(), bucket_cap_mb=1e-6)
    model(make_batch(pool.rank(), 0), 0, 2).sum().backward()  # layer 1 is not reached on any rank
    with torch.no_grad():
        model(make_batch(pool.rank(), 0), 0)  # evaluation goes on working
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            model(make_batch(pool.rank(), 0), 0, 1, 2)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    return errors[0]


def test_unused_parameters_are_named_in_the_next_forward():
    for rank, message in enumerate(pool.run(2, body_unused_error)):
        assert "Expected to have finished reduction in the prior iteration" in message
        assert f"did not receive grad for rank {rank}: layers.1.weight." in message
        assert "by passing the keyword argument `find_unused_parameters=True`" in message
        assert "`forward` function outputs participate in calculating loss" in message


def body_output_not_in_loss():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model = ddp.DDP(Two(), pool.group(), find_unused_parameters=True)
    model(make_batch(pool.rank(), 0))[0].sum().backward()
    assert model.module.b.weight.grad is None
    model(make_batch(pool.rank(), 0))[pool.rank()].sum().backward()
    torch.testing.assert_close(model.module.b.weight.grad, (make_batch(1, 0).sum(0) / 2).expand(2, 6))


def test_outputs_that_are_not_in_the_loss():
    pool.run(2, body_output_not_in_loss)


def body_freeze():
    rank = pool.rank()
    model, plain = ddp.DDP(make_model("plain"), pool.group(), bucket_cap_mb=1e-4), make_model("plain")
    optimizer, plain_optimizer = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain))
    for step, frozen in enumerate([(), (0, 1), (0, 1, 5), (4,), ()]):
        for m in (model.module, plain):
            for i, parameter in enumerate(m.parameters()):
                parameter.requires_grad_(i not in frozen)
        optimizer.zero_grad()
        loss_of(model(make_batch(rank, step))).backward()
        one_device_step(plain, 2, [[make_batch(r, step)] for r in range(2)])
        optimizer.step()
        plain_optimizer.step()
        assert_same_parameters(model.module, plain, exact=True, what=f"step {step}")
    assert len(list(model.module[0].weight._post_accumulate_grad_hooks)) == 1  # rebuilding left none behind


def test_parameters_frozen_and_unfrozen_between_steps():
    pool.run(2, body_freeze)


# ---- buffers and evaluation


def body_buffers():
    rank = pool.rank()
    model = ddp.DDP(make_model("batchnorm"), pool.group())
    stats = model.module[1].running_mean
    stats.fill_(rank)
    seen = []
    model.module[1].register_forward_pre_hook(lambda *_: seen.append(stats.clone()))
    model(make_batch(rank, 0))
    assert torch.equal(seen[0], torch.zeros(8))  # rank 0's, before the forward
    stats.fill_(rank)
    model.eval()
    model(make_batch(rank, 0))
    model.train()
    with torch.no_grad():
        model(make_batch(rank, 0))
    assert torch.equal(seen[1], torch.full((8,), float(rank)))  # neither evaluation nor no_grad sends anything
    assert torch.equal(seen[2], torch.full((8,), float(rank)))
    two = model(make_batch(rank, 1)), model(make_batch(rank, 2))  # the first graph has saved the buffers
    (loss_of(two[0]) + loss_of(two[1])).backward()
    unsynchronised = ddp.DDP(make_model("batchnorm"), pool.group(), broadcast_buffers=False)
    local = make_model("batchnorm")
    for m in (unsynchronised.module, local):
        m[1].running_mean.fill_(rank)
    unsynchronised(make_batch(rank, 0))
    local(make_batch(rank, 0))
    assert torch.equal(unsynchronised.module[1].running_mean, local[1].running_mean)


def test_buffers_are_broadcast_before_each_training_forward_and_only_then():
    pool.run(2, body_buffers)


def body_one_rank_evaluates():
    model = ddp.DDP(make_model("batchnorm"), pool.group())
    loss_of(model(make_batch(pool.rank(), 0))).backward()
    if pool.rank() == 0:
        with torch.no_grad():
            model(make_batch(0, 1))
        model.eval()
        for _ in range(3):
            assert torch.equal(model(make_batch(0, 1)), model.module(make_batch(0, 1)))
        model.train()
    loss_of(model(make_batch(pool.rank(), 2))).backward()
    assert grads_equal_on_all_ranks(model)


def test_one_rank_may_evaluate_alone():
    pool.run(2, body_one_rank_evaluates)


# ---- outputs


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: dict


class Opaque:
    """An output in which nobody can find tensors."""

    def __init__(self, logits):
        self.logits = logits


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x, kind):
        a, b, data = self.a(x), self.b(x), x.detach()
        return {
            "tuple": lambda: (a, b, data),
            "list": lambda: [a, [b], None],
            "dict": lambda: {"a": a, "more": {"b": b}, "text": "x"},
            "namedtuple": lambda: Pair(a, b),
            "dataclass": lambda: Output(a, {"b": b}),
            "opaque": lambda: Opaque((a, b)),
        }[kind]()


OUTPUT_KINDS = {
    "tuple": lambda o: (o[0], o[1]),
    "list": lambda o: (o[0], o[1][0]),
    "dict": lambda o: (o["a"], o["more"]["b"]),
    "namedtuple": lambda o: (o.a, o.b),
    "dataclass": lambda o: (o.logits, o.hidden["b"]),
    "opaque": lambda o: o.logits,
}


def body_outputs(kind, find_unused):
    torch.manual_seed(0)
    model = ddp.DDP(Outputs(), pool.group(), find_unused_parameters=find_unused)
    for step in range(2):
        output = model(make_batch(pool.rank(), step), kind)
        assert type(output) is type(model.module(make_batch(pool.rank(), step), kind))
        a, b = OUTPUT_KINDS[kind](output)
        a /= 10  # in place: outputs are the module's own tensors
        (a.sum() + b.square().sum()).backward()
        assert grads_equal_on_all_ranks(model)
        model.zero_grad()


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("kind", sorted(OUTPUT_KINDS))
def test_outputs_of_every_kind(kind, find_unused):
    pool.run(2, body_outputs, kind, find_unused)


# ---- checkpoints, graphs, hooks on modules


class Checkpointed(nn.Module):
    def __init__(self, reentrant, shared=False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x):
        x = checkpoint(lambda x: torch.tanh(self.first(x)), self.last(x), use_reentrant=self.reentrant)
        again = self.first if self.shared else self.second
        return checkpoint(lambda x: torch.tanh(again(x)), x, use_reentrant=self.reentrant)


def body_checkpoint(reentrant, shared, find_unused):
    rank = pool.rank()
    torch.manual_seed(0)
    plain = Checkpointed(reentrant, shared)
    if shared:
        del plain.second
    model = ddp.DDP(copy.deepcopy(plain), pool.group(), find_unused_parameters=find_unused, bucket_cap_mb=1e-6)
    for step in range(2):
        loss_of(model(make_batch(rank, step))).backward()
        one_device_step(plain, 2, [[make_batch(r, step)] for r in range(2)])
        assert_same_parameters(model.module, plain, exact=True)
        model.zero_grad()


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize(("reentrant", "shared"), [(True, False), (False, False), (False, True)])
def test_activation_checkpoints_inside(reentrant, shared, find_unused):
    pool.run(2, body_checkpoint, reentrant, shared, find_unused)


def body_checkpoint_twice():
    torch.manual_seed(0)
    plain = Checkpointed(True, shared=True)
    del plain.second, plain.last
    plain.last = nn.Identity()
    model = ddp.DDP(plain, pool.group(), bucket_cap_mb=1e-6)
    with pytest.raises(RuntimeError, match=r"first\.\w+' got a second gradient in one backward"):
        loss_of(model(make_batch(pool.rank(), 0).requires_grad_())).backward()


def test_a_second_gradient_in_one_backward_is_an_error():
    pool.run(2, body_checkpoint_twice)


def body_checkpoint_around(reentrant):
    rank = pool.rank()
    model, plain = ddp.DDP(make_model("plain"), pool.group()), make_model("plain")
    for step in range(2):
        batch = make_batch(rank, step).requires_grad_()
        loss_of(checkpoint(model, batch, use_reentrant=reentrant)).backward()
        one_device_step(plain, 2, [[make_batch(r, step)] for r in range(2)])
        assert_same_parameters(model.module, plain, exact=True)
        model.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around(reentrant):
    pool.run(2, body_checkpoint_around, reentrant)


def body_graphs():
    rank = pool.rank()
    model = ddp.DDP(make_model("plain"), pool.group())
    x = make_batch(rank, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)  # touches no .grad
    assert all(p.grad is None for p in model.parameters())
    (slope.square().sum() + loss_of(model(x))).backward()
    assert grads_equal_on_all_ranks(model)
    plain, expected = make_model("plain"), {}
    for r in range(2):
        plain.zero_grad()
        x = make_batch(r, 0).requires_grad_()
        (slope,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
        (slope.square().sum() + loss_of(plain(x))).backward()
        for name, parameter in plain.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad / 2
    for name, parameter in model.module.named_parameters():
        assert_equal(parameter.grad, expected[name], exact=True, what=name)
    for _ in range(2):
        model(make_batch(rank, 0)).sum().backward(create_graph=True)
    replaced = {name: torch.ones_like(p, requires_grad=True) for name, p in model.named_parameters()}
    model.zero_grad()
    torch.func.functional_call(model, replaced, make_batch(rank, 0)).sum().backward()
    assert all(tensor.grad is not None for tensor in replaced.values())
    assert all(p.grad is None for p in model.parameters())


def test_second_derivatives_and_functional_calls():
    pool.run(2, body_graphs)


def body_raises():
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("broken")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, broken):
            x = self.first(x)
            return self.second(Break.apply(x) if broken else x)

    torch.manual_seed(0)
    model = ddp.DDP(Model(), pool.group(), bucket_cap_mb=1e-6)
    model(make_batch(pool.rank(), 0), broken=False).sum().backward()
    with pytest.raises(KeyError):
        model(make_batch(pool.rank(), 1), broken=True).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank \d: first.weight, first.bias"):
        model(make_batch(pool.rank(), 2), broken=False)


def test_a_backward_that_raised_is_reported_by_the_next_forward():
    pool.run(2, body_raises)


# ---- memory


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def body_held(as_view):
    model = ddp.DDP(make_model("plain"), pool.group(), bucket_cap_mb=1e-3, gradient_as_bucket_view=as_view)
    during = []  # backward, once the wrapper has seen the gradient
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: during.append(p.grad))
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        during.clear()
        loss_of(model(make_batch(pool.rank(), 0))).backward()
        gradients = [p.grad for p in model.parameters()]
        buckets = [bucket.buffer() for bucket in model._buckets]
        psi = sum(p.nbytes for p in model.parameters())
        assert len(buckets) > 1
        assert storage_bytes(buckets) == psi
        assert storage_bytes(gradients + buckets) == (psi if as_view else 2 * psi)
        assert storage_bytes(during + buckets) == (psi if as_view else 2 * psi)
        assert grads_equal_on_all_ranks(model)


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_hold_what_the_cost_table_says(as_view):
    pool.run(2, body_held, as_view)


def body_discard():
    model = make_model("plain")
    with Collectives() as seen:
        for _ in range(2):
            wrapped = ddp.DDP(model, pool.group())
            loss_of(wrapped(make_batch(pool.rank(), 0))).backward()
            reference, flat = weakref.ref(wrapped), weakref.ref(wrapped._buckets[0].buffer())
            del wrapped
            gc.collect()
            assert reference() is None
            end = time.monotonic() + 5  # gloo's thread may hold what it has reduced a little longer
            while flat() is not None and time.monotonic() < end:
                time.sleep(0.01)
            assert flat() is None
        seen.calls.clear()
        loss_of(model(make_batch(pool.rank(), 0))).backward()
        assert seen.calls == []


def test_a_discarded_wrapper_is_gone_and_sends_nothing():
    pool.run(2, body_discard)


# ---- copies


def body_copies():
    model = ddp.DDP(make_model("batchnorm"), bucket_cap_mb=1e-4, find_unused_parameters=True)
    loss_of(model(make_batch(pool.rank(), 0))).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert other.module is not model.module
        assert (other.bucket_cap_mb, other.find_unused_parameters) == (1e-4, True)
        assert list(other.state_dict()) == list(before)
        for name, value in other.state_dict().items():
            assert_equal(value, before[name], exact=True, what=name)
        for m in (model, other):
            m.zero_grad()
            loss_of(m(make_batch(pool.rank(), 1))).backward()
        assert_same_parameters(other, model, exact=True)
        assert grads_equal_on_all_ranks(other)


def test_deepcopy_and_pickle():
    pool.run(4, body_copies)


def body_copy_of_a_group():
    model = ddp.DDP(make_model("plain"), pool.group())
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="default process group"):
            make(model)


def test_no_copy_off_the_default_group():
    pool.run(2, body_copy_of_a_group)


# ---- communication hooks


def body_hook(hook, dtype):
    rank, N = pool.rank(), pool.world_size()
    ours = ddp.DDP(make_model("plain", dtype), pool.group(), bucket_cap_mb=1e-3, gradient_as_bucket_view=rank == 0)
    plain = make_model("plain", dtype)
    hook = getattr(default_hooks, hook)
    ours.register_comm_hook(pool.group(), hook)
    with pytest.raises(RuntimeError, match="once"):
        ours.register_comm_hook(pool.group(), hook)
    for step in range(3):
        loss_of(ours(make_batch(rank, step, dtype))).backward()
        compressed = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}.get(
            hook.__name__, dtype
        )
        total = {}
        for r in range(N):
            plain.zero_grad()
            loss_of(plain(make_batch(r, step, dtype))).backward()
            for name, p in plain.named_parameters():
                mine = p.grad.to(compressed) / N
                total[name] = total[name] + mine if r else mine
        for name, p in ours.module.named_parameters():
            assert_equal(p.grad, total[name].to(dtype), exact=True, what=name)
        ours.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_default_hooks(hook, dtype):
    pool.run(2, body_hook, hook, dtype)


def body_wrapped_hooks():
    rank = pool.rank()
    wrapper = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    results = []
    for hook in (wrapper, default_hooks.fp16_compress_hook):
        model = ddp.DDP(make_model("plain"), pool.group(), bucket_cap_mb=1e-3)
        model.register_comm_hook(pool.group(), hook)
        for step in range(2):
            model.zero_grad()
            loss_of(model(make_batch(rank, step))).backward()
        results.append(model.module)
    assert_same_parameters(*results, exact=True)
    silent = ddp.DDP(make_model("plain"), pool.group())
    silent.register_comm_hook(None, debugging_hooks.noop_hook)
    local = make_model("plain")
    for model in (silent, local):
        loss_of(model(make_batch(rank, 0))).backward()
    assert_same_parameters(silent.module, local, exact=True)
    with pytest.raises(TypeError, match="callable"):
        silent.register_comm_hook(None, {})


def test_hooks_that_replace_the_buffer_or_send_nothing():
    pool.run(2, body_wrapped_hooks)


def body_power_sgd(cap):
    """The same hook on our buckets, and on PyTorch's where those hold the same gradients: all of them, in one."""
    rank, results = pool.rank(), []
    for wrap in (ddp.DDP, TorchDDP) if cap == 25 else (ddp.DDP,):  # on several buckets PyTorch's hangs on gloo
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 40, bias=False), nn.Tanh(), nn.Linear(40, 30, bias=False))
        model = wrap(model, process_group=pool.group(), bucket_cap_mb=cap)
        state = powerSGD_hook.PowerSGDState(
            pool.group(), matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model(make_batch(rank, step))).backward()
            optimizer.step()
        assert grads_equal_on_all_ranks(model)
        assert state.iter == 6
        assert all(torch.linalg.matrix_rank(p.grad).item() <= 2 for p in model.parameters())
        results.append(model.module)
    if cap == 25:
        for ours, theirs in zip(*(m.parameters() for m in results), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [25, 1e-6])
@pytest.mark.parametrize("N", [2, 3])
def test_power_sgd(N, cap):
    pool.run(N, body_power_sgd, cap)


def body_hook_order():
    """A hook whose second collective runs in a callback must not meet the next bucket's first."""
    rank = pool.rank()
    model, plain = ddp.DDP(make_model("plain"), pool.group(), bucket_cap_mb=1e-6), make_model("plain")
    running, longest = [0], [0]

    def hook(group, bucket):
        running[0] += 1
        longest[0] = max(longest[0], running[0])
        future = dist.all_reduce(bucket.buffer() / 2, group=group, async_op=True).get_future()

        def decode(future):
            running[0] -= 1
            assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            return future.value()

        return future.then(decode)

    model.register_comm_hook(pool.group(), hook)
    loss_of(model(make_batch(rank, 0))).backward()
    one_device_step(plain, 2, [[make_batch(r, 0)] for r in range(2)])
    assert_same_parameters(model.module, plain, exact=True)
    assert longest == [1]
    assert [bucket.index() for bucket in model._buckets] == list(range(6))
    assert [bucket.is_last() for bucket in model._buckets] == [False] * 5 + [True]


def body_hook_before_usage():
    """With unused parameters: the ranks compare what they used after the last callback, wherever that runs."""
    model = ddp.DDP(make_model("plain"), pool.group(), bucket_cap_mb=1e-6, find_unused_parameters=True)
    events, original = [], dist.all_reduce

    def hook(group, bucket):
        future = original(bucket.buffer(), group=group, async_op=True).get_future()

        def slow(future):
            time.sleep(0.02)
            events.append("callback")
            return future.value()

        return future.then(slow)

    def recorded(tensor, **kwargs):
        events.append("usage")
        return original(tensor, **kwargs)

    model.register_comm_hook(pool.group(), hook)
    dist.all_reduce = recorded
    try:
        loss_of(model(make_batch(pool.rank(), 0))).backward()
    finally:
        dist.all_reduce = original
    assert events == ["callback"] * 6 + ["usage"]


def test_usage_is_compared_after_the_last_callback_of_a_hook():
    pool.run(2, body_hook_before_usage)


def test_hooks_run_one_bucket_after_another():
    pool.run(2, body_hook_order)


# ---- join


def join_kwargs(model_kind, iterations, **kwargs):
    return {"kind": model_kind, "iterations": iterations, **kwargs}


def body_join(wrap, kind, iterations, divide, cap, find_unused, sync_every, hooked):
    rank = pool.rank()
    wrap = {"ours": ddp.DDP, "theirs": TorchDDP}[wrap]
    model = make_model(kind, torch.float64)
    model = wrap(model, process_group=pool.group(), bucket_cap_mb=cap, find_unused_parameters=find_unused)
    if hooked:
        model.register_comm_hook(pool.group(), default_hooks.allreduce_hook)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with model.join(divide_by_initial_world_size=divide):
        for step in range(iterations[rank]):
            if step % sync_every == 0:
                optimizer.zero_grad()
            with model.no_sync() if (step + 1) % sync_every else nullcontext():
                loss_of(model(make_batch(rank, step, torch.float64))).backward()
            if (step + 1) % sync_every == 0:
                optimizer.step()
    return {name: value.tolist() for name, value in model.module.state_dict().items()}, model._authoritative_rank


@pytest.mark.parametrize(
    ("kind", "iterations", "divide", "find_unused", "sync_every", "hooked"),
    [
        ("plain", (3, 5), True, False, 1, False),
        ("plain", (5, 3), False, False, 1, False),
        ("batchnorm", (1, 4, 4), False, False, 1, False),
        ("batchnorm", (4, 0, 2, 1), True, True, 1, False),
        ("tied", (0, 3), True, False, 1, True),
        ("plain", (2, 6, 4), True, True, 2, False),
    ],
)
def test_join_equals_pytorchs(kind, iterations, divide, find_unused, sync_every, hooked):
    N = len(iterations)
    arguments = (kind, iterations, divide, 1e-4, find_unused, sync_every, hooked)
    ours = pool.run(N, body_join, "ours", *arguments)
    theirs = pool.run(N, body_join, "theirs", *arguments)
    for r in range(N):
        assert ours[r] == ours[0]  # all ranks end with one model, buffers included
        assert ours[r][1] == theirs[r][1]
        for name, value in theirs[r][0].items():
            torch.testing.assert_close(torch.tensor(ours[r][0][name]), torch.tensor(value), rtol=1e-12, atol=1e-12)


def body_join_after():
    rank = pool.rank()
    model, plain = ddp.DDP(make_model("plain"), pool.group(), gradient_as_bucket_view=True), make_model("plain")
    kept = None
    with model.join():
        for step in range(1 + rank):
            model.zero_grad()
            loss_of(model(make_batch(rank, step))).backward()
            kept = [p.grad.clone() for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        assert torch.equal(parameter.grad, gradient)  # shadowing must not write zeros into .grad
    model.zero_grad()
    with Collectives() as seen:
        loss_of(model(make_batch(rank, 5))).backward()
    assert [name for name, _ in seen.calls] == ["allreduce_"]  # nothing of join is left
    one_device_step(plain, 2, [[make_batch(r, 5)] for r in range(2)])
    assert_same_parameters(model.module, plain, exact=True)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            loss_of(model(make_batch(rank, step))).backward()
    for context in (nullcontext(), model.join(enable=False)):
        with context:
            model.zero_grad()
            loss_of(model(make_batch(rank, 5))).backward()
        assert_same_parameters(model.module, plain, exact=True)
    normed = ddp.DDP(make_model("batchnorm"), pool.group())
    with normed.join():  # the last step of rank 1 sends nothing: the next sends no buffers, from either rank
        loss_of(normed(make_batch(rank, 0))).backward()
        if rank == 1:
            with normed.no_sync():
                loss_of(normed(make_batch(rank, 1))).backward()
    with Collectives() as seen:
        loss_of(normed(make_batch(rank, 2))).backward()
    assert [name for name, _ in seen.calls] == ["allreduce_"]


def test_join_leaves_gradients_and_later_steps_alone():
    pool.run(2, body_join_after)


def body_join_throws():
    rank, done = pool.rank(), 0
    model = ddp.DDP(make_model("plain"), pool.group())

    def loop():
        nonlocal done
        with model.join(throw_on_early_termination=True):
            for step in range(3 + rank):
                loss_of(model(make_batch(rank, step))).backward()
                done += 1

    with pytest.raises(RuntimeError, match="at least one rank that exhausted" if rank else "exhausted all inputs"):
        loop()
    assert done == 3


def test_join_can_throw_instead():
    pool.run(2, body_join_throws)


# ---- cost


def body_sent():
    model = ddp.DDP(make_model("plain"), pool.group(), bucket_cap_mb=1e-3)
    psi = sum(p.nbytes for p in model.parameters())
    counts = []
    for step in range(3):
        with Collectives() as seen, ddp.SentBytes() as sent:
            loss_of(model(make_batch(pool.rank(), step))).backward()
        assert {name for name, _ in seen.calls} == {"allreduce_"}
        counts.append((seen.bytes_of("allreduce_"), round(sent.total)))
    N = pool.world_size()
    assert counts == [(psi, round(2 * psi * (N - 1) / N))] * 3


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_a_step_sends_one_all_reduce_of_the_parameters(N):
    pool.run(N, body_sent)


FAKE = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddp
from shared import Collectives

N, rank = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
model = ddp.language_model()
psi = sum(p.nbytes for p in model.parameters())
model = ddp.DDP(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
tokens = torch.randint(256, (1, 65))
for step in range(2):
    with Collectives() as seen, ddp.SentBytes() as sent:
        ddp.language_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert {name for name, _ in seen.calls} == {"allreduce_"}, seen.calls
    assert len(seen.calls) > 4
    assert seen.bytes_of("allreduce_") == psi
    assert abs(sent.total - 2 * psi * (N - 1) / N) < 1e-6 * psi
    assert ddp.held_bytes([p.grad for p in model.parameters()]) == psi
print("ok")
"""


@pytest.mark.parametrize(("N", "rank"), [(8, 3), (64, 63), (1024, 0)])
def test_the_same_bytes_at_scale(N, rank):
    here = Path(__file__).parent
    environment = {"PYTHONPATH": f"{here}:{here.parent}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FAKE, str(N), str(rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "ok\n", done.stderr


def body_ranks_that_differ():
    """Elements that lie otherwise in a bucket, or buckets that do, would be added to others."""
    late = pool.rank() == 1
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last if late else torch.contiguous_format)
    with pytest.raises(ValueError, match=r"'strides \(27, 9, 3, 1\) of weight'.*rank 1 has 'strides \(27, 1, 9, 3\)"):
        ddp.DDP(layer, pool.group())
    for name, value in {"bucket_cap_mb": 1, "find_unused_parameters": True, "broadcast_buffers": False}.items():
        with pytest.raises(ValueError, match=f"rank 1 has '.*{name} {value}"):
            ddp.DDP(nn.Linear(3, 3), pool.group(), **({name: value} if late else {}))
    with pytest.raises(ValueError, match="output_device is 1; outputs stay on None"):
        ddp.DDP(nn.Linear(3, 3), pool.group(), output_device=1)


def test_ranks_that_differ_are_an_error():
    pool.run(2, body_ranks_that_differ)


def body_part_in_no_sync(then):
    """After a backward in no_sync() through a part of the model."""
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    model = ddp.DDP(nn.ModuleList([first, second, third]), pool.group(), find_unused_parameters=then == "freeze")
    model.module.forward = lambda x, *layers: sum(layer(x) for layer in layers)
    x = torch.full((2, 4), 1.0 + pool.rank())
    with model.no_sync():
        model(x, first).sum().backward()
    if then == "freeze":  # what no_sync has left in first is reduced by the next backward all the same
        third.requires_grad_(False)
        model(x, second).sum().backward()
        assert torch.equal(first.weight.grad, torch.full((4, 4), 3.0))
    else:  # a gradient penalty touches no .grad, and is no backward that did not reach all
        output = model(x, first, second, third)
        torch.autograd.grad(output.sum(), second.weight, retain_graph=True)
        output.sum().backward()
        model(x, first, second, third).sum().backward()
        assert torch.equal(first.weight.grad, torch.full((4, 4), 9.0))


@pytest.mark.parametrize("then", ["freeze", "autograd.grad"])
def test_after_a_part_in_no_sync(then):
    pool.run(2, body_part_in_no_sync, then)


def body_two_losses():
    """A backward for each of two losses, which reach parts of the model: reduced once both have run, as PyTorch's."""

    def run(wrap):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        model.forward = lambda x: [layer(x) for layer in model]
        wrapped = wrap(model)
        for step in range(2):
            for loss in wrapped(torch.full((2, 4), 1.0 + pool.rank() + step)):
                loss.square().sum().backward()
        return [p.grad for p in model.parameters()]

    for cap in (25, 1e-6):
        ours = run(lambda m, cap=cap: ddp.DDP(m, pool.group(), bucket_cap_mb=cap))
        theirs = run(lambda m: nn.parallel.DistributedDataParallel(m, process_group=pool.group()))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_backward_for_each_of_two_losses():
    pool.run(2, body_two_losses)

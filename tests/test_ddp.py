"""ddp.py: what the claims about data parallelism leave open."""

import copy
import inspect
import weakref
from contextlib import nullcontext, suppress

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.training import one_device
from hypothesis import example, given
from hypothesis import strategies as st
from shared import (
    Watch,
    assert_equal,
    assert_same_parameters,
    batch_loss,
    fake_world,
    fake_world_on_meta,
    loss_of,
    make_batch,
    make_model,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def wrap(module, **options):
    return ddp.DDP(module, process_group=pool.group(), **options)


def all_reduce_twice(group, bucket):
    """A hook that issues a second collective when its first is done: it must not meet another's."""
    half = bucket.buffer().div_(group.size() ** 2)
    first = dist.all_reduce(half, group=group, async_op=True).get_future()

    def again(future):
        dist.all_reduce(future.value()[0], group=group)
        return bucket.buffer()

    return first.then(again)


TINY = {"bucket_cap_mb": 1e-6}
AS_VIEW = {"gradient_as_bucket_view": True}
FIND_UNUSED = {"find_unused_parameters": True}
TRAININGS = [  # a model, its dtype, micro-batches, a hook, options
    ("batchnorm", F32, 2, None, {"bucket_cap_mb": None}),
    ("mixed", F32, 1, None, AS_VIEW),
    ("odd", BF16, 3, None, TINY | AS_VIEW),
    ("frozen", F32, 2, default_hooks.allreduce_hook, {"bucket_cap_mb": 1e-4} | AS_VIEW),
    ("tied", F64, 3, all_reduce_twice, TINY | FIND_UNUSED),
]


@pytest.mark.parametrize("training", TRAININGS)
@pool.on(1, 2, 3)
def test_gradients_are_those_of_one_device_that_starts_as_rank_0(training):
    """Bitwise on 1 and 2 ranks; 3 add in another order. Buckets hold what ddp.py says."""
    kind, dtype, micro_batches, hook, options = training
    N = pool.world_size()
    plain = make_model(kind, dtype) if N < 3 else make_model(kind).double()
    module = copy.deepcopy(plain)
    module.register_buffer("short", torch.full((3,), 7, dtype=torch.int16))
    for state in module.state_dict().values():
        state.add_(pool.rank())
    model = wrap(module, **options)
    if hook:
        model.register_comm_hook(pool.group(), hook)
    assert module.short.tolist() == [7, 7, 7]

    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        numbers = range(10 * step, 10 * step + micro_batches)
        for number in numbers:
            with nullcontext() if number == numbers[-1] else model.no_sync():
                batch_loss(model, pool.rank(), number).backward()
        batches = [[(rank, number) for number in numbers] for rank in range(N)]
        one_device(plain, batches, lambda model, batch: batch_loss(model, *batch))
        assert_same_parameters(module, plain, exact=N < 3)

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    flat = [bucket.flat for bucket in model._buckets]
    copies = 1 if "gradient_as_bucket_view" in options else 2
    assert ddp.held_bytes([*gradients, *flat]) == copies * ddp.held_bytes(trained)


@pytest.mark.parametrize(
    ("cap", "lengths"), [(13, [[3, 2], [1]]), (12, [[3], [2], [1]]), (0, [[3], [2], [1]])]
)
def test_buckets_start_at_the_last_tensor_and_end_at_the_cap_or_another_dtype(cap, lengths):
    tensors = [torch.zeros(1, dtype=F64), torch.zeros(2), torch.zeros(3)]
    buckets = ddp.assign_buckets(tensors, cap)
    assert [[len(tensor) for tensor in bucket] for bucket in buckets] == lengths


@pool.on(2)
def test_a_discarded_wrapper_holds_and_sends_nothing():
    module = make_model("plain")
    model = wrap(module)
    batch_loss(model, pool.rank(), 0).backward()
    wrapper = weakref.ref(model)
    bucket = weakref.ref(model._buckets[0])

    del model
    with ddp.SentBytes() as sent:
        batch_loss(module, pool.rank(), 1).backward()

    assert wrapper() is bucket() is None
    assert sent.total == 0


class Branches(nn.Sequential):
    """Four layers. Forward uses those whose numbers it is given, in that order."""

    def __init__(self):
        super().__init__(*(nn.Linear(6, 2, bias=False, dtype=F64) for _ in range(4)))

    def forward(self, x, used, opaque=False):
        y = torch.zeros((), requires_grad=True) * 1
        for i in used:
            y = y + (i + 1) * self[i](x).sum()
        return {y} if opaque else [y]  # DDP looks for no tensors in a set


USES = st.lists(st.sampled_from(range(4)), unique=True)
ALL_LAYERS = [0, 1, 2, 3]
MICRO_BATCH = st.tuples(st.booleans(), st.booleans(), USES, USES, USES)
NONE_ON_SOME = [(0, 0, [0, 3], [1, 3], [0]), (0, 0, [], [], [2]), (1, 0, [], [], [])]


@pytest.mark.parametrize("find_unused", [False, True])
@given(st.lists(MICRO_BATCH, min_size=1, max_size=5), st.booleans())
@example([(False, False, ALL_LAYERS, [3, 2, 1, 0], [1, 3, 0, 2])] * 2, True)
@example(NONE_ON_SOME, True)
@example([(False, True, [0], [1], [0]), (False, False, [3], [3], [3])], True)
@pool.on(3)
def test_layers_used_and_their_order_may_differ_by_rank_and_micro_batch(
    find_unused, micro_batches, as_view
):
    """A micro-batch: whether zero_grad() comes before, whether it is local, each rank's layers."""
    options = TINY | {"gradient_as_bucket_view": as_view, "find_unused_parameters": find_unused}
    model = wrap(Branches(), **options)
    with suppress(KeyError), model.no_sync():
        raise KeyError  # which ends no_sync()
    expected = torch.zeros(3, 4, 2, 6, dtype=F64)  # (rank, layer, gradient); 0 stands for None
    for number, (zero_grad, local, *drawn) in enumerate(micro_batches):
        rest = [] if find_unused else ALL_LAYERS
        uses = [list(dict.fromkeys([*used, *rest])) for used in drawn]
        batches = [make_batch(rank, number, F64) for rank in range(3)]
        if zero_grad:
            model.zero_grad()
            expected.zero_()
        losses = []
        with model.no_sync() if local else nullcontext():
            for half in batches[pool.rank()].chunk(2):
                losses += model(half, uses[pool.rank()], opaque=not find_unused)
        with nullcontext() if local else model.no_sync():  # only where forward runs matters
            for loss in losses if find_unused else [sum(losses)]:
                loss.backward()
        for rank, used in enumerate(uses):
            for i in used:
                expected[rank, i] += (i + 1) * batches[rank].sum(0)
        if not local:
            expected[:] = expected.mean(0)
        for layer, gradient in zip(model.module, expected[pool.rank()], strict=True):
            assert_equal(layer.weight.grad, gradient if gradient.any() else None, exact=False)


@pool.on(3)
def test_the_naive_form_is_the_mean_also_of_what_is_unused_here_or_laid_out_in_columns():
    model = Branches()
    model[3].weight.requires_grad_(False)
    batches = [make_batch(rank, 0, F64) for rank in range(3)]
    model(batches[pool.rank()], [pool.rank() % 2]).pop().backward()
    if pool.rank() == 0:
        model[0].weight.grad = model[0].weight.grad.t().contiguous().t()  # in columns

    ddp.all_reduce_gradients(model, pool.group())

    sums = [(batches[0] + batches[2]).sum(0), 2 * batches[1].sum(0), torch.zeros(6)]
    for layer, total in zip(model, sums, strict=False):
        assert_equal(layer.weight.grad, total.expand(2, 6) / 3, exact=False)
    assert model[3].weight.grad is None


@pytest.mark.parametrize("naive", [False, True])
@pool.on(2)
def test_sparse_gradients_become_the_dense_mean(naive):
    plain = nn.Embedding(5, 3)
    module = copy.deepcopy(plain)
    module.sparse = True
    batches = [torch.tensor([[rank, 2], [2, 4 - rank]]) for rank in range(2)]
    one_device(plain, [[batch] for batch in batches])
    model = module if naive else wrap(module)
    loss_of(model(batches[pool.rank()])).backward()
    if naive:
        ddp.all_reduce_gradients(module, pool.group())
    assert_same_parameters(module, plain, exact=True)


@pool.on(2)
def test_parameters_that_backward_did_not_reach_are_named_in_the_next_forward():
    model = wrap(Branches(), **TINY)
    x = make_batch(pool.rank(), 0, F64)
    model.module(x, [1]).pop().backward()  # not through the wrapper: it does not count
    loss = model(x, [0, 2]).pop()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model(x, [0])  # evaluation is no error
    names = f"1.weight, 3.weight on rank {pool.rank()}; try find_unused_parameters"
    with pytest.raises(RuntimeError, match=f"prior iteration.* {names}"):
        model(x, ALL_LAYERS)
    with pytest.raises(RuntimeError, match="ready only once"):
        loss.backward()


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        (ddp.DDP, {}),
        (ddp.DDP, {"broadcast_buffers": False}),
        (nn.parallel.DistributedDataParallel, {}),
    ],
)
@pool.on(2)
def test_buffers_are_rank_0s_in_the_forward_after_one_that_averages(implementation, options):
    rank = pool.rank()
    first = rank if options else 0
    module = make_model("batchnorm")
    mean = module[1].running_mean.fill_(rank)
    model = implementation(module, process_group=pool.group(), **options)
    seen = [mean[0].item()]
    module[1].register_forward_pre_hook(lambda *_: seen.append(mean[0].item()))

    def forward():
        mean.data.fill_(rank)  # no new version
        return batch_loss(model, rank, 0)

    forward()
    with torch.no_grad():
        forward()
        if rank == 1:  # alone
            forward()
    model.eval()
    forward()
    model.train()
    with model.no_sync():
        forward()
    forward()
    loss = forward() + forward()
    if implementation is ddp.DDP:  # that of torch 2.6 changes buffers that a graph has saved
        loss.backward()

    assert seen == [first, first, first, *[rank] * rank, rank, first, rank, first, first]


@pytest.mark.parametrize("low_rank", [False, True])
@pool.on(2)
def test_pytorchs_hooks_find_what_they_find_in_pytorchs(low_rank):
    modules = []
    for implementation in (ddp.DDP, nn.parallel.DistributedDataParallel):
        state, hook = pool.group(), default_hooks.fp16_compress_hook
        if low_rank:
            options = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5}
            state = powerSGD_hook.PowerSGDState(pool.group(), **options)
            hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        model = implementation(make_model("plain", F64), process_group=pool.group())
        model.register_comm_hook(state, hook)
        for step in range(4):
            model.zero_grad()
            batch_loss(model, pool.rank(), step).backward()
        modules.append(model.module)
    assert_same_parameters(*modules, exact=not low_rank)


@pool.on(2)
def test_a_hooks_bucket_is_pytorchs():
    """set_buffer() changes what gradients() are views of."""
    seen = []

    def hook(_, bucket):
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        bucket.set_buffer(bucket.buffer() * 0 + bucket.index())
        gradients = [gradient.tolist() for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), shapes, gradients))
        return torch.futures.collect_all([]).then(lambda _: bucket.buffer())

    model = wrap(nn.Linear(1, 2), **TINY)
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 1)).sum().backward()
    assert seen == [(0, False, [(2,)], [[0, 0]]), (1, True, [(2, 1)], [[[1], [1]]])]
    assert model.module.weight.grad.tolist() == [[1], [1]]


@pool.on(4)  # all, because a process group cannot be copied
def test_a_copy_averages_its_own_gradients():
    model = copy.deepcopy(ddp.DDP(make_model("plain", F64)))
    batch_loss(model, pool.rank(), 0).backward()
    plain = make_model("plain", F64)
    one_device(plain, [[make_batch(rank, 0, F64)] for rank in range(4)])
    assert_same_parameters(model.module, plain, exact=False)


@pool.on(3)
def test_errors_on_every_rank():
    for words, change in [
        (r"\(3, 8\), torch.bfloat16.*float32", lambda model: model[3].bfloat16()),
        (r"3\.bias.*requires_grad=False", lambda model: model[3].bias.requires_grad_(False)),
        (r"1\.extra: \(2,\)", lambda model: model[1].register_buffer("extra", torch.zeros(2))),
    ]:
        model = make_model("batchnorm")
        if pool.rank() == 2:
            change(model)
        with pytest.raises(ValueError, match=f"same model.*{words}"):
            wrap(model)
    for name, change in [("0.bias", nn.Module.requires_grad_), ("0.weight", nn.Module.half)]:
        model = wrap(make_model("frozen"))
        change(model)
        with pytest.raises(RuntimeError, match=f"{name} was frozen, .*: wrap the module again"):
            batch_loss(model, 0, 0)


@pool.on(2)
def test_arguments_are_pytorchs_in_pytorchs_order_and_what_is_not_supported_is_an_error():
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    ours = [name for name in inspect.signature(ddp.DDP).parameters if name in theirs]
    assert ours == theirs[: len(ours)]
    model = make_model("plain")
    wrap(model, device_ids=[1], output_device=1)
    unsupported = {"dim": 1, "init_sync": False, "check_reduction": True, "static_graph": True}
    for name, value in (unsupported | {"output_device": 0}).items():
        with pytest.raises(ValueError, match=f"{name}.* is not supported"):
            wrap(model, **{name: value})
    with pytest.raises(ValueError, match="is not in process_group"):
        ddp.DDP(model, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(TypeError, match="unexpected keyword argument 'broadcast_bufers'"):
        wrap(model, broadcast_bufers=False)
    with pytest.raises(RuntimeError, match="have any parameter that requires a gradient"):
        wrap(model.requires_grad_(False))
    model[0].differ_between_ranks = True  # as expert_parallel.py marks what it splits
    with pytest.raises(ValueError, match="different experts"):
        wrap(model)


def test_a_step_neither_waits_for_the_device_nor_copies_from_the_host():
    """A tensor on the meta device has no values that the host could read."""
    with fake_world_on_meta(2, 0):
        model = ddp.DDP(make_model("batchnorm"), find_unused_parameters=True)
        with Watch(lambda: None) as watch:
            model(torch.ones(5, 6)).sum().backward()
    operators = {operator for operator, _ in watch.seen}
    assert "c10d::allreduce_" in operators
    assert not operators & {"aten::_local_scalar_dense", "aten::lift_fresh"}


def test_bytes_at_scale():
    with fake_world(1024, 5):
        model = ddp.DDP(make_model("plain"), bucket_cap_mb=1e-3)
        with ddp.SentBytes() as sent:
            batch_loss(model, 0, 0).backward()
        assert sent.total == pytest.approx(2 * ddp.held_bytes(model.parameters()) * 1023 / 1024)
        with pytest.raises(KeyError, match="barrier"), ddp.SentBytes():
            dist.barrier()

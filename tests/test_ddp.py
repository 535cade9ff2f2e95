"""ddp.py: what the claims about data parallelism in tests/claims leave open."""

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
    fake_world,
    loss_of,
    make_batch,
    make_model,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def wrap(module, **options):
    return ddp.DDP(module, process_group=pool.group(), **options)


def loss_at(step, model):
    return loss_of(model(make_batch(pool.rank(), step, next(model.parameters()).dtype)))


def all_reduce_twice(group, bucket):
    """A hook whose second collective, issued in a callback, must not meet the next bucket's first."""
    first = dist.all_reduce(
        bucket.buffer().div_(group.size() ** 2), group=group, async_op=True
    ).get_future()
    return first.then(
        lambda future: dist.all_reduce(future.value()[0], group=group) or bucket.buffer()
    )


TRAININGS = [  # a model, its dtype, micro-batches, buckets, hook, options; the first ones are as good as none
    (
        "batchnorm",
        F32,
        2,
        1,
        None,
        {"device_ids": [0], "output_device": 0, "dim": 0, "bucket_cap_mb": None},
    ),
    ("mixed", F32, 1, 4, None, {"gradient_as_bucket_view": True}),
    ("odd", BF16, 3, 5, None, {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}),
    (
        "plain",
        F32,
        1,
        3,
        None,
        {"bucket_cap_mb": (12 + 17 * 12 + 68) / 2**20, "find_unused_parameters": True},
    ),
    (
        "frozen",
        F32,
        2,
        2,
        default_hooks.allreduce_hook,
        {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
    ),
    ("tied", F64, 3, 3, all_reduce_twice, {"bucket_cap_mb": 1e-6, "find_unused_parameters": True}),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "micro_batches", "buckets", "hook", "options"), TRAININGS
)
@pool.on(1, 2, 3)
def test_gradients_are_those_of_one_device_that_starts_as_rank_0(
    kind, dtype, micro_batches, buckets, hook, options
):
    """Bitwise on 2 ranks. They and buckets hold what ddp.py says, in backward too; and a discarded wrapper nothing."""
    N, rank, during = pool.world_size(), pool.rank(), {}
    plain = make_model(kind, dtype) if N < 3 else make_model(kind).double()  # sums in another order
    module = copy.deepcopy(plain)
    for state in module.state_dict().values():
        state.add_(rank)
    module.register_buffer("short", torch.full((3,), 7 + rank, dtype=torch.int16))
    model = wrap(module, **options)
    if hook:
        model.register_comm_hook(pool.group(), hook)
    assert module.short.tolist() == [7, 7, 7]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert [id(p) for bucket in model._buckets for p in bucket.views] == [
        id(p) for p in reversed(trained)
    ]
    assert N == 3 or len(model._buckets) == buckets
    for parameter in trained:  # once the wrapper has seen the gradient
        parameter.register_post_accumulate_grad_hook(lambda p: during.update({p: p.grad}))
    psi, flat = ddp.held_bytes(trained), [bucket.flat for bucket in model._buckets]
    for step in range(4):
        steps = range(10 * step, 10 * step + micro_batches)
        model.zero_grad(set_to_none=step % 2 == 0)
        for i in steps:
            with model.no_sync() if i < steps[-1] else nullcontext():
                loss_at(i, model).backward()
        one_device(
            plain,
            [[make_batch(r, i, next(plain.parameters()).dtype) for i in steps] for r in range(N)],
        )
        assert_same_parameters(module, plain, exact=N < 3)
        for gradients in (during.values(), [parameter.grad for parameter in trained]):
            assert ddp.held_bytes([*gradients, *flat]) == psi * (
                1 if "gradient_as_bucket_view" in options else 2
            )
    references = [weakref.ref(held) for held in (model, model._buckets[0])]
    del model
    assert [reference() for reference in references] == [None, None]
    with ddp.SentBytes() as sent:
        loss_at(1, module).backward()
    assert sent.total == 0


class Branches(nn.Sequential):
    """Four layers, of which forward uses those whose numbers it is given, in that order."""

    def __init__(self):
        super().__init__(*(nn.Linear(6, 2, bias=False, dtype=F64) for _ in range(4)))

    def forward(self, x, used, opaque=False):
        y = sum(((i + 1) * self[i](x).sum() for i in used), torch.zeros((), requires_grad=True) * 1)
        return {y} if opaque else [y]  # nobody looks for tensors in a set


USES = st.lists(st.sampled_from(range(4)), unique=True)


@pytest.mark.parametrize("find_unused", [False, True])
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), USES, USES, USES), min_size=1, max_size=5),
    st.booleans(),
)
@example([(False, False, [0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])] * 2, True)
@example(
    [(False, False, [0, 3], [1, 3], [0]), (False, False, [], [], [2]), (True, False, [], [], [])],
    True,
)
@example([(False, True, [0], [1], [0]), (False, False, [3], [3], [3])], True)
@pool.on(3)
def test_layers_used_and_their_order_may_differ_by_rank_and_micro_batch(
    find_unused, micro_batches, as_view
):
    """Of a micro-batch: is there a zero_grad before, is its forward under no_sync, which layers does each rank use."""
    model = wrap(
        Branches(),
        bucket_cap_mb=1e-6,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=find_unused,
    )
    rank, expected = (
        pool.rank(),
        torch.zeros(3, 4, 2, 6, dtype=F64),
    )  # of each rank and layer; 0 where there is none
    with suppress(KeyError), model.no_sync():
        raise KeyError  # no_sync is over
    for number, (zero_grad, local, *drawn) in enumerate(micro_batches):
        if zero_grad:
            model.zero_grad()
            expected.zero_()
        uses = (
            drawn if find_unused else [dict.fromkeys([*first, 0, 1, 2, 3]) for first in drawn]
        )  # or all are used
        batches = [make_batch(r, number, F64) for r in range(3)]
        with model.no_sync() if local else nullcontext():
            losses = [
                model(half, uses[rank], opaque=not find_unused).pop()
                for half in batches[rank].chunk(2)
            ]
        with nullcontext() if local else model.no_sync():  # the forward counts
            for loss in losses if find_unused else [sum(losses)]:
                loss.backward()
        for r, i in ((r, i) for r, used in enumerate(uses) for i in used):
            expected[r, i] += (i + 1) * batches[r].sum(0)
        if not local:
            expected[:] = expected.mean(0)
        for layer, gradient in zip(model.module, expected[rank], strict=True):
            assert_equal(layer.weight.grad, gradient if gradient.any() else None, exact=False)


@pool.on(3)
def test_the_naive_form_is_the_mean_also_of_what_is_unused_here_or_strided():
    model, batches = Branches(), [make_batch(r, 0, F64) for r in range(3)]
    model[3].weight.requires_grad_(False)
    model(batches[pool.rank()], [pool.rank() % 2]).pop().backward()
    if pool.rank() == 0:
        model[0].weight.grad = torch.stack([model[0].weight.grad, torch.ones(2, 6)], dim=-1)[..., 0]
    ddp.all_reduce_gradients(model, pool.group())
    sums = (batches[0] + batches[2]).sum(0), 2 * batches[1].sum(0), torch.zeros(6)
    for layer, total in zip(model, sums, strict=False):
        assert_equal(layer.weight.grad, total.expand(2, 6) / 3, exact=False)
    assert model[3].weight.grad is None


@pool.on(2)
def test_parameters_that_backward_did_not_reach_are_named_in_the_next_forward():
    model, x = wrap(Branches(), bucket_cap_mb=1e-6), make_batch(pool.rank(), 0, F64)
    model.module(x, [1]).pop().backward()  # by itself: stays here, and is no help
    (loss := model(x, [0, 2]).pop()).backward(retain_graph=True)
    with torch.no_grad():
        model(x, [0])  # evaluation goes on working
    with pytest.raises(
        RuntimeError,
        match=f"prior iteration.* 1.weight, 3.weight on rank {pool.rank()}; try find_unu",
    ):
        model(x, [0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="ready only once"):
        loss.backward()


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pool.on(2)
def test_buffers_are_rank_0s_in_each_training_forward_and_only_then(broadcast_buffers):
    rank, seen, model = (
        pool.rank(),
        [],
        wrap(make_model("batchnorm"), broadcast_buffers=broadcast_buffers),
    )
    model.module[1].register_forward_pre_hook(
        lambda norm, _: seen.append(norm.running_mean[0].item())
    )

    def forward():
        model.module[1].running_mean.data.fill_(rank)  # no new version
        return loss_at(0, model)

    forward()
    if rank == 1:  # alone: neither evaluation nor no_grad sends anything
        with torch.no_grad():
            forward()
        model.eval()
        forward()
        model.train()
    with model.no_sync():
        forward()
    forward()  # takes nothing over: the one before was in no_sync(), as in PyTorch
    (forward() + forward()).backward()  # the first graph has saved the buffers
    first = 0 if broadcast_buffers else rank
    assert seen == [first, *[rank] * (2 * rank), first, rank, first, first]


@pytest.mark.parametrize("low_rank", [False, True])
@pool.on(2)
def test_pytorchs_hooks_find_what_they_find_in_pytorchs(low_rank):
    modules = []
    for implementation in (ddp.DDP, nn.parallel.DistributedDataParallel):
        state, hook = pool.group(), default_hooks.fp16_compress_hook
        if low_rank:  # in 16 bits
            state = powerSGD_hook.PowerSGDState(
                state, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        model = implementation(make_model("plain", F64), process_group=pool.group())
        model.register_comm_hook(state, hook)
        for step in range(4):
            model.zero_grad()
            loss_at(step, model).backward()
        modules.append(model.module)
    assert_same_parameters(*modules, exact=not low_rank)


WRONG = {  # the message: on one rank the model is changed so, or options are these
    "same model.*'3.weight'.*rank 2.*torch.bfloat16": (lambda model: model[3].bfloat16(), {}),
    "rank 2 has '3.bias'.*requires_grad=False": (
        lambda model: model[3].bias.requires_grad_(False),
        {},
    ),
    "nothing more; rank 2 has '1.extra'": (
        lambda model: model[1].register_buffer("extra", torch.zeros(2)),
        {},
    ),
    "static_graph=True is not supported": (id, {"static_graph": True}),
    "nothing=1 is not supported": (id, {"nothing": 1}),
    "rank . is not in process_group": (id, {"process_group": dist.GroupMember.NON_GROUP_MEMBER}),
    "output_device=1 is not supported": (id, {"device_ids": [0], "output_device": 1}),
    "check_reduction=True is not supported": (id, {"check_reduction": True}),
}


@pytest.mark.parametrize("words", WRONG)
@pool.on(3)
def test_another_model_on_one_rank_and_unknown_options_are_errors_on_all(words):
    (change, options), model = WRONG[words], make_model("batchnorm")
    if pool.rank() == 2:
        change(model)
    with pytest.raises(ValueError, match=words):
        ddp.DDP(model, **{"process_group": pool.group(), **options})


@pool.on(2)
def test_positional_arguments_are_in_pytorchs_order():
    ours, theirs = (
        list(inspect.signature(each).parameters)
        for each in (ddp.DDP, nn.parallel.DistributedDataParallel)
    )
    model = ddp.DDP(
        make_model("batchnorm"), [pool.rank()], pool.rank(), 0, False, True, pool.group()
    )
    assert ours[:-1] == theirs[: len(ours) - 1]
    assert (model.broadcast_buffers, model.process_group) == (False, pool.group())


@pool.on(2)
def test_a_model_that_does_not_train_is_an_error_as_pytorchs():
    model = make_model("plain").requires_grad_(False)
    for each in (ddp.DDP, nn.parallel.DistributedDataParallel):
        with pytest.raises(
            RuntimeError, match="doesn't have any parameter that requires a gradient"
        ):
            each(model, process_group=pool.group())


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_step_neither_waits_for_the_device_nor_copies_from_the_host(find_unused_parameters):
    """A tensor on the meta device has no values that the host could read."""
    with fake_world(2, 0), torch.device("meta"):
        model = ddp.DDP(make_model("batchnorm"), find_unused_parameters=find_unused_parameters)
        with Watch(lambda: None) as watch:
            loss_of(model(torch.ones(5, 6))).backward()
    operators = {operator for operator, _ in watch.seen}
    assert "c10d::allreduce_" in operators
    assert not operators & {"aten::_local_scalar_dense", "aten::lift_fresh"}


@pytest.mark.parametrize(("N", "rank"), [(8, 3), (1024, 0)])
def test_bytes_at_scale(N, rank):
    with fake_world(N, rank):
        model = ddp.DDP(make_model("plain"), bucket_cap_mb=1e-3)
        with ddp.SentBytes() as sent:
            loss_of(model(make_batch(0, 0))).backward()
        assert sent.total == pytest.approx(2 * ddp.held_bytes(model.parameters()) * (N - 1) / N)
        with pytest.raises(KeyError, match="allgather_"), ddp.SentBytes():
            dist.all_gather([torch.zeros(1)] * N, torch.zeros(1))

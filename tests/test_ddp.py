"""ddp.py: what the claims about data parallelism in claims.py leave open; what holds is in CLAIMS, at the end."""

import copy
import gc
import weakref
from contextlib import nullcontext
from itertools import product

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import one_device
from hypothesis import example, given
from hypothesis import strategies as st
from shared import OPTIMIZERS, assert_same_parameters, loss_of, make_batch, make_model
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddp
from ddp import DDP


def wrap(module, **arguments):
    return DDP(module, process_group=pool.group(), **arguments)


def loss_at(step, model, *arguments):
    dtype = next(model.parameters()).dtype
    return loss_of(model(make_batch(pool.rank(), step, dtype), *arguments))


def mean_of(plain, *steps):
    """`plain` gets the gradients of one device that accumulates what the ranks got in `steps`."""
    dtype = next(plain.parameters()).dtype
    one_device(plain, [[make_batch(r, step, dtype) for step in steps] for r in range(pool.world_size())])
    return plain


def assert_mean(model, plain, *steps):
    """Sums in another order are to be in float64, where the claim is 1e-12; all others are bitwise."""
    exact = next(plain.parameters()).dtype != torch.float64
    assert_same_parameters(model.module, mean_of(plain, *steps), exact)


def same_gradients_on_all_ranks(model):
    gathered, mine = [None] * pool.world_size(), [parameter.grad for parameter in model.parameters()]
    dist.all_gather_object(gathered, mine, group=pool.group())
    return all(torch.equal(a, b) for theirs in gathered for a, b in zip(mine, theirs, strict=True))


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.float64]))), st.integers(1, 400))
@example([(5, torch.float32)] * 5, 40)
def test_buckets_hold_every_parameter_once_in_reverse_and_close_at_the_cap(sizes, cap):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype in sizes]
    buckets = ddp.assign_buckets(tensors, cap)
    assert [id(tensor) for bucket in buckets for tensor in bucket] == [id(tensor) for tensor in reversed(tensors)]
    for bucket, after in zip(buckets, [*buckets[1:], None], strict=False):
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert sum(tensor.nbytes for tensor in bucket[:-1]) < cap
        if after and after[0].dtype == bucket[0].dtype:
            assert sum(tensor.nbytes for tensor in bucket) >= cap


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TRAININGS = [
    (1, "batchnorm", F32, 2, {}),
    (2, "mixed", F32, 1, {"bucket_cap_mb": 1e-4}),
    (2, "odd", BF16, 3, {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}),
    (2, "batchnorm", F32, 1, {"bucket_cap_mb": 1e-3, "find_unused_parameters": True}),
    (2, "frozen", F32, 2, {"bucket_cap_mb": 1e-3, "gradient_as_bucket_view": True, "find_unused_parameters": True}),
    (3, "tied", F64, 3, {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}),
    (4, "plain", F64, 2, {"bucket_cap_mb": 1e-3, "find_unused_parameters": True}),
]


def body_train(kind, dtype, micro_batches, arguments):
    plain = make_model(kind, dtype)
    model = wrap(copy.deepcopy(plain), **arguments)
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (model, plain)]
    for step in range(4):
        steps = range(10 * step, 10 * step + micro_batches)
        model.zero_grad(set_to_none=step % 2 == 0)
        for i in steps:
            with model.no_sync() if i < steps[-1] else nullcontext():
                loss_at(i, model).backward()
        assert_mean(model, plain, *steps)
        for optimizer in optimizers:
            optimizer.step()


def body_naive():
    """Where a rank does not use a parameter, and a gradient is a slice of another tensor."""
    ours, plain = make_model("frozen", F64), mean_of(make_model("frozen", F64), 0)
    ours.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=F64)))
    loss_at(0, ours).backward()
    ours.unused.grad = torch.ones(2, dtype=F64) if pool.rank() == 0 else None
    ours[4].weight.grad = torch.stack([ours[4].weight.grad, torch.ones(3, 17)], dim=-1)[..., 0]
    ddp.all_reduce_gradients(ours, pool.group())
    plain.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=F64)))
    plain.unused.grad = torch.full((2,), 1 / 3, dtype=F64)
    assert_same_parameters(ours, plain, exact=False)


def body_start():
    rank, model = pool.rank(), make_model("batchnorm")
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("short", torch.tensor([7 + rank], dtype=torch.int16))
    model.register_parameter("strided", nn.Parameter(torch.arange(6.0).view(2, 3).t() + rank, requires_grad=False))
    wrap(model)
    assert (model.flags.tolist(), model.short.item()) == ([True, False], 7)
    assert torch.equal(model.strided, torch.arange(6.0).view(2, 3).t())


CHANGES = {
    "'3.weight'.*rank 2.*torch.bfloat16": lambda model: model[3].bfloat16(),
    "rank 2 has '3.bias'.*requires_grad=False": lambda model: model[3].bias.requires_grad_(False),
    "rank 0 has nothing more; rank 2 has '1.extra'": lambda model: model[1].register_buffer("extra", torch.zeros(2)),
}


def body_different(words):
    model = make_model("batchnorm")
    if pool.rank() == 2:
        CHANGES[words](model)
    with pytest.raises(ValueError, match=f"ranks must hold the same model.*{words}"):
        wrap(model)


def body_arguments():
    linear, group = nn.Linear(2, 2), dist.new_group([0])
    if pool.rank() == 0:
        DDP(linear, None, process_group=group, output_device=None, dim=0, static_graph=False, bucket_cap_mb=None)
        DDP(linear, [0], process_group=group, output_device=0)
        for name, value in {"static_graph": True, "nothing": 1, "output_device": 1}.items():
            with pytest.raises(ValueError, match=f"{name}={value} is not supported"):
                DDP(linear, process_group=group, **{name: value})
    else:
        with pytest.raises(ValueError, match="rank 1 is not in process_group"):
            DDP(linear, process_group=group)


class Branches(nn.Sequential):
    """Uses the layers of the numbers that it is given only; nobody finds a tensor in an `opaque` output."""

    opaque = False

    def forward(self, x, *which):
        y = sum(((i + 1) * self[i](x) for i in which), torch.zeros(1, requires_grad=True) * 1)
        return (lambda: y) if self.opaque else {"y": [y], "more": (None, "x")}


def branches(**arguments):
    return wrap(Branches(*(nn.Linear(6, 2, bias=False) for _ in range(4))), bucket_cap_mb=1e-6, **arguments)


def sum_of(model, step, *which):
    output = model(make_batch(pool.rank(), step), *which)
    return output().sum() if model.module.opaque else output["y"][0].sum()


def assert_branch(model, i, *steps):
    """Branch i has the mean of its gradients on these (step, ranks that use it)."""
    total = sum(make_batch(r, step).sum(0) for step, ranks in steps for r in ranks)
    torch.testing.assert_close(model.module[i].weight.grad, (i + 1) * total.expand(2, 6) / pool.world_size())


def body_order(opaque):
    """Each rank uses the layers in an order of its own, and has their gradients in another."""
    model = branches()
    model.module.opaque = opaque
    for step in range(2):
        model.zero_grad()
        sum_of(model, step, *range(4)[:: 1 - 2 * pool.rank()]).backward()
        for i in range(4):
            assert_branch(model, i, (step, [0, 1]))


def body_no_sync():
    plain = make_model("plain", F64)
    model = wrap(copy.deepcopy(plain))
    with model.no_sync():
        inside = loss_at(0, model)
    inside.backward()  # the forward counts: still local
    assert not same_gradients_on_all_ranks(model)
    outside = [loss_at(1, model), loss_at(2, model)]
    with model.no_sync():
        for loss in outside:
            loss.backward()  # the forward counts: reduced, with what was accumulated
    assert_mean(model, plain, 0, 1, 2)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    (loss_at(3, model) + loss_at(4, model)).backward()
    assert_mean(model, plain, 0, 1, 2, 3, 4)


def body_unused(as_view):
    rank, even = pool.rank(), range(0, pool.world_size(), 2)
    model = branches(find_unused_parameters=True, gradient_as_bucket_view=as_view)
    sum_of(model, 0, rank % 2, 3).backward()  # rank r uses r % 2 and 3; nobody uses 2
    assert model.module[2].weight.grad is None
    sum_of(model, 1, 2).backward()  # without zero_grad: a gradient that nobody adds to stays
    assert_branch(model, 0, (0, even))
    sum_of(model, 2, *([0] if rank == 0 else [])).backward()  # added to on one rank, none on others
    assert_branch(model, 0, (0, even), (2, [0]))
    model.zero_grad()
    sum_of(model, 3).backward()  # nobody uses anything
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    with model.no_sync():
        sum_of(model, 4, rank % 2).backward()  # used only here: it still arrives
    sum_of(model, 5, 3).backward()
    assert_branch(model, 0, (4, even))


def body_unused_error():
    model = branches()
    with model.no_sync():
        sum_of(model, 0, 1).backward()  # is no help
    loss = sum_of(model, 0, 0, 2)
    loss.backward(retain_graph=True)  # branches 1 and 3 are not reached on any rank
    with torch.no_grad():
        sum_of(model, 0, 0)  # evaluation goes on working
    words = f"prior iteration.* did not reach 1.weight, 3.weight on rank {pool.rank()}; try find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=words):
        sum_of(model, 0, 0, 1, 2, 3)
    with pytest.raises(RuntimeError, match="ready only once"):
        loss.backward()


def body_discarded():
    model = make_model("plain")
    wrapped = wrap(model)
    loss_at(0, wrapped).backward()
    references = [weakref.ref(held) for held in (wrapped, wrapped._buckets[0])]
    del wrapped
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    loss_at(1, model).backward()
    assert not same_gradients_on_all_ranks(model)


def body_buffers():
    rank, seen = pool.rank(), []
    model, alone = wrap(make_model("batchnorm")), wrap(make_model("batchnorm"), broadcast_buffers=False)

    def forward(model=model):
        model.module[1].running_mean.data.fill_(rank)  # no new version
        return model(make_batch(rank, len(seen)))

    for each in (model, alone):
        each.module[1].register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean[0].item()))
    forward()
    if rank == 1:  # alone: neither evaluation nor no_grad sends anything
        with torch.no_grad():
            forward()
        model.eval()
        forward()
        model.train()
        assert seen == [0, 1, 1]
    with model.no_sync():
        forward()
    forward()  # nor does the forward after one in no_sync(), as in PyTorch
    assert seen[-2:] == [0, rank]
    (loss_of(forward()) + loss_of(forward())).backward()  # the first graph has saved the buffers
    forward(alone)
    assert seen[-3:] == [0, 0, rank]


HOOKS = {
    "all-reduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "fp16, in another buffer": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "powerSGD": powerSGD_hook.powerSGD_hook,
}


def body_hook(name, as_view):
    """The same hook on our buckets and on PyTorch's; of powerSGD, which approximates each, on one of all gradients."""
    modules, options = [], {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    for implementation in (DDP, nn.parallel.DistributedDataParallel):
        how = {"bucket_cap_mb": 25 if name == "powerSGD" else 1e-3, "gradient_as_bucket_view": as_view}
        model = implementation(make_model("plain", F64), process_group=pool.group(), **how)
        state = powerSGD_hook.PowerSGDState(pool.group(), **options) if name == "powerSGD" else pool.group()
        model.register_comm_hook(state, HOOKS[name])
        for step in range(4):
            model.zero_grad()
            loss_at(step, model).backward()
            assert same_gradients_on_all_ranks(model)
        modules.append(model.module)
    assert_same_parameters(*modules, exact=name != "powerSGD")


def body_hook_order():
    """A hook whose second collective runs in a callback must not meet the next bucket's first."""
    group = pool.group()

    def twice(state, bucket):
        first = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return first.then(lambda future: dist.all_reduce(future.value()[0].div_(4), group=group) or bucket.buffer())

    model = wrap(make_model("plain"), bucket_cap_mb=1e-6, find_unused_parameters=True)
    model.register_comm_hook(None, twice)
    for step in range(3):
        model.zero_grad()
        loss_at(step, model).backward()
        assert_mean(model, make_model("plain"), step)


def body_held(as_view):
    model, during = wrap(make_model("plain"), bucket_cap_mb=1e-3, gradient_as_bucket_view=as_view), []
    for parameter in model.parameters():  # in backward, once the wrapper has seen the gradient
        parameter.register_post_accumulate_grad_hook(lambda p: during.append(p.grad))
    psi, buckets = ddp.held_bytes(model.parameters()), [bucket.buffer() for bucket in model._buckets]
    assert len(buckets) > 1
    assert ddp.held_bytes(buckets) == psi
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none)
        during.clear()
        loss_at(0, model).backward()
        for gradients in (during, [parameter.grad for parameter in model.parameters()]):
            assert ddp.held_bytes(gradients + buckets) == (psi if as_view else 2 * psi)


@pytest.mark.parametrize(("N", "rank"), [(8, 3), (1024, 0)])
def test_bytes_at_scale(N, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
    try:
        model = DDP(make_model("plain"), bucket_cap_mb=1e-3)
        psi = ddp.held_bytes(model.parameters())
        for step in range(2):
            with ddp.SentBytes() as sent:
                loss_of(model(make_batch(0, step))).backward()
            assert sent.total == pytest.approx(2 * psi * (N - 1) / N)
        with pytest.raises(KeyError, match="allgather_"), ddp.SentBytes():
            dist.all_gather([torch.zeros(1)] * N, torch.zeros(1))
    finally:
        dist.destroy_process_group()


YES_NO = [False, True]
CLAIMS = {  # a body, on how many ranks, and what each of its arguments may be
    "the naive form is one device's mean": (body_naive, [3]),
    "all ranks start from rank 0, in what does not train as well": (body_start, [2]),
    "another dtype or state on one rank is an error on all": (body_different, [3], CHANGES),
    "arguments are PyTorch's, or refused by name": (body_arguments, [2]),
    "buckets are sent in one order, whatever that of gradients, and the outputs": (body_order, [2], YES_NO),
    "a backward is synchronised as its forward was": (body_no_sync, [2]),
    "unused parameters may differ by rank and by micro-batch": (body_unused, [3], YES_NO),
    "parameters that backward did not reach are named in the next": (body_unused_error, [2]),
    "a discarded wrapper is gone, its buckets too, and sends nothing": (body_discarded, [2]),
    "buffers are rank 0's in each training forward, and only then": (body_buffers, [2]),
    "PyTorch's hooks find what they find in PyTorch's": (body_hook, [2], HOOKS, YES_NO),
    "hooks run one bucket after another": (body_hook_order, [2]),
    "gradients hold what the cost table says": (body_held, [2], YES_NO),
}
TRAINED = [("buckets of any size and dtype train as one device", (body_train, *row)) for row in TRAININGS]
CASES = TRAINED + [(claim, (body, *case)) for claim, (body, *choices) in CLAIMS.items() for case in product(*choices)]


@pytest.mark.parametrize(("claim", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_that(claim, case):
    body, N, *arguments = case
    pool.run(N, body, *arguments)

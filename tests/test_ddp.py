"""ddp.py: what the claims about data parallelism in claims.py leave open; what holds is in CLAIMS, at the end."""

import copy
import gc
import weakref
from contextlib import nullcontext
from itertools import product

import pool
import pytest
import shared
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal, assert_same_parameters, loss_of, make_batch, make_model
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddp
from ddp import DDP


def wrap(module, **arguments):
    return DDP(module, process_group=pool.group(), **arguments)


def equal_on_all_ranks(tensors):
    gathered = [None] * pool.world_size()
    dist.all_gather_object(gathered, list(tensors), group=pool.group())
    first, *others = gathered
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def grads_equal_on_all_ranks(model):
    return equal_on_all_ranks(parameter.grad for parameter in model.parameters())


def backward(model, step):
    loss_of(model(make_batch(pool.rank(), step))).backward()


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


# ---- equality with one device


def one_device_step(model, ranks, batches, rounded=None):
    """Accumulate the ranks' mean gradients in rank order; batches[rank] is a list of micro-batches."""
    total = {}
    for rank in range(ranks):
        model.zero_grad()
        for batch in batches[rank]:
            loss_of(model(batch)).backward()
        for p in model.parameters():
            if p.grad is not None:
                mine = p.grad.to(rounded or p.dtype) / ranks
                total[p] = total[p] + mine if p in total else mine
    for p in model.parameters():
        p.grad = total[p].to(p.dtype) if p in total else None


def assert_mean(model, plain, *steps, rounded=None):
    """The gradients are those of one device that accumulates what the ranks got in `steps`."""
    N, dtype = pool.world_size(), next(plain.parameters()).dtype
    one_device_step(plain, N, [[make_batch(r, step, dtype) for step in steps] for r in range(N)], rounded)
    assert_same_parameters(model.module, plain, exact=N <= 2)


def body_train(kind, dtype, micro_batches, set_to_none, arguments):
    plain, rank = make_model(kind, dtype), pool.rank()
    model = wrap(copy.deepcopy(plain), **arguments)
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (model, plain)]
    for step in range(3):
        steps = range(10 * step, 10 * step + micro_batches)
        model.zero_grad(set_to_none=set_to_none)
        for i in steps:
            with model.no_sync() if i < steps[-1] else nullcontext():
                loss_of(model(make_batch(rank, i, dtype))).backward()
        assert_mean(model, plain, *steps)
        for o in optimizers:
            o.step()
    assert equal_on_all_ranks(model.parameters())


OPTIONS = {
    "bucket_cap_mb": st.sampled_from([1e-3, 1e-4, 1e-6, 25]),
    "gradient_as_bucket_view": st.booleans(),
    "find_unused_parameters": st.booleans(),
}


@settings(max_examples=15)
@given(
    st.integers(1, 4),
    st.sampled_from(shared.MODELS),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(1, 3),
    st.booleans(),
    st.fixed_dictionaries(OPTIONS),
)
def test_buckets_of_any_size_and_dtype_train_as_one_device(N, kind, dtype, micro_batches, set_to_none, options):
    if N > 2 or kind == "mixed":
        dtype = torch.float64  # where sums have another order the claim is 1e-12
    kind = "plain" if N > 2 and kind == "mixed" else kind
    pool.run(N, body_train, kind, dtype, micro_batches, set_to_none, options)


def body_naive(kind):
    N, rank, exact = pool.world_size(), pool.rank(), pool.world_size() <= 2
    dtype = torch.float32 if exact else torch.float64
    ours, plain = make_model(kind, dtype), make_model(kind, dtype)
    ours.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=dtype)))
    (loss_of(ours(make_batch(rank, 0, dtype))) + (ours.unused.sum() if rank == 0 else 0)).backward()
    for parameter in ours.parameters():
        if parameter.grad is not None:  # one that somebody has put there as a slice of another tensor
            parameter.grad = torch.stack([parameter.grad, torch.ones_like(parameter)], dim=-1)[..., 0]
    ddp.all_reduce_gradients(ours, pool.group())
    one_device_step(plain, N, [[make_batch(r, 0, dtype)] for r in range(N)])
    assert_equal(ours.unused.grad, torch.full((2,), 1 / N, dtype=dtype), exact)
    for name, parameter in plain.named_parameters():
        assert_equal(ours.get_parameter(name).grad, parameter.grad, exact, name)


# ---- construction


def body_start():
    rank, model = pool.rank(), make_model("batchnorm")
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("short", torch.tensor([7 + rank], dtype=torch.int16))
    model.register_parameter("transposed", nn.Parameter(torch.arange(6.0).view(2, 3).t() + rank, requires_grad=False))
    wrapped = wrap(model)
    assert model.flags.tolist() == [True, False]
    assert model.short.item() == 7
    assert torch.equal(model.transposed, torch.arange(6.0).view(2, 3).t())
    assert list(wrapped.state_dict()) == ["module." + name for name in model.state_dict()]


CHANGES = {
    "count": (lambda m: m.append(nn.Linear(3, 3)), "'1.running_mean'", "rank 2 has '4.weight': (3, 3)"),
    "dtype": (lambda m: m[3].bfloat16(), "'3.weight'", "torch.bfloat16"),
    "frozen": (lambda m: m[3].bias.requires_grad_(False), "rank 2 has '3.bias'", "requires_grad=False"),
    "buffer": (lambda m: m[1].register_buffer("extra", torch.zeros(2)), "nothing more", "rank 2 has '1.extra'"),
}


def body_different(change):
    model, (damage, *words) = make_model("batchnorm"), CHANGES[change]
    if pool.rank() == 2:
        damage(model)
    with pytest.raises(ValueError, match="ranks must hold the same model") as error:
        wrap(model)
    assert all(word in str(error.value) for word in words)


def body_signature():
    linear, group = nn.Linear(2, 2), pool.group()
    wrap(linear, device_ids=None, output_device=None, dim=0, static_graph=False, bucket_cap_mb=None)
    DDP(linear, [0], process_group=group, output_device=0)
    for name, value in {"static_graph": True, "nothing": 1, "output_device": 1}.items():
        with pytest.raises(ValueError, match=f"{name}={value} is not supported"):
            wrap(linear, **{name: value})


def body_outsider():
    group = dist.new_group([0])
    if pool.rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not in process_group"):
            DDP(nn.Linear(2, 2), process_group=group)


# ---- backward


class Reversible(nn.Sequential):
    def forward(self, x):
        for layer in list(self)[:: self.direction]:
            x = torch.tanh(layer(x))
        return x


def body_order():
    """Each rank uses the layers in an order of its own, and has their gradients in another."""
    plain = Reversible(*(nn.Linear(6, 6) for _ in range(4)))
    model = wrap(copy.deepcopy(plain), bucket_cap_mb=1e-6)
    model.module.direction = 1 - 2 * pool.rank()
    backward(model, 0)
    for r in range(2):
        plain.direction = 1 - 2 * r
        (loss_of(plain(make_batch(r, 0))) / 2).backward()
    assert_same_parameters(model.module, plain, exact=True)


def body_no_sync():
    model = wrap(make_model("plain"))
    with Collectives() as seen, model.no_sync():
        inside = loss_of(model(make_batch(pool.rank(), 0)))
    inside.backward()  # the forward counts: still local
    assert seen.calls == []
    assert not grads_equal_on_all_ranks(model)
    outside = loss_of(model(make_batch(pool.rank(), 1)))
    with model.no_sync():
        outside.backward()  # the forward counts: reduced, with what was accumulated
    assert_mean(model, make_model("plain"), 0, 1)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    backward(model, 2)
    assert grads_equal_on_all_ranks(model)


def body_several_forwards():
    rank, model, plain = pool.rank(), wrap(make_model("plain")), make_model("plain")
    (loss_of(model(make_batch(rank, 0))) + loss_of(model(make_batch(rank, 1)))).backward()  # two forwards, one backward
    assert_mean(model, plain, 0, 1)
    model.zero_grad()
    for loss in [loss_of(model(make_batch(rank, step))) for step in (0, 1)]:
        loss.backward()  # a backward each, a reduction each: the means add up
    assert grads_equal_on_all_ranks(model)
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Branches(nn.Sequential):
    def forward(self, x, *which):  # uses the layers of these numbers only
        return sum((self[i](x) for i in which), torch.zeros(1, requires_grad=True) * 1)


def body_unused(as_view):
    rank, N = pool.rank(), pool.world_size()
    branches = Branches(*(nn.Linear(6, 2, bias=False) for _ in range(4)))
    model = wrap(branches, find_unused_parameters=True, bucket_cap_mb=1e-6, gradient_as_bucket_view=as_view)

    def mean(step, ranks):
        return (sum(make_batch(r, step).sum(0) for r in ranks) / N).expand(2, 6)

    model(make_batch(rank, 0), rank % 2, 3).sum().backward()  # rank r uses r % 2 and 3; nobody uses 2
    before = branches[0].weight.grad.clone()
    torch.testing.assert_close(before, mean(0, range(0, N, 2)))
    model(make_batch(rank, 1), 2).sum().backward()  # without zero_grad: a gradient that nobody adds to stays
    torch.testing.assert_close(branches[0].weight.grad, before)
    model(make_batch(rank, 2), *([0] if rank == 0 else [])).sum().backward()  # added to on one rank, none on others
    torch.testing.assert_close(branches[0].weight.grad, before + mean(2, [0]))
    model.zero_grad()
    model(make_batch(rank, 3)).sum().backward()  # nobody uses anything
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    with model.no_sync():
        model(make_batch(rank, 4), rank % 2).sum().backward()  # used only here: it still arrives
    model(make_batch(rank, 5), 3).sum().backward()
    torch.testing.assert_close(branches[0].weight.grad, mean(4, range(0, N, 2)))
    assert branches[2].weight.grad is None


def body_unused_error():
    model, x = wrap(Branches(*(nn.Linear(6, 2) for _ in range(3)))), make_batch(pool.rank(), 0)
    with model.no_sync():
        model(x, 1).sum().backward()  # is no help
    model(x, 0, 2).sum().backward()  # layer 1 is not reached on any rank
    with torch.no_grad():
        model(x, 0)  # evaluation goes on working
    words = f"prior iteration.* did not reach 1.weight, 1.bias on rank {pool.rank()}; try find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=words):
        model(x, 0, 1, 2)


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x, opaque=False):
        a, b = (layer(torch.tanh(self.shared(x))) for layer in (self.a, self.b))
        return (lambda: (a, b)) if opaque else {"a": [a], "more": (b, None, "x")}  # nobody finds tensors in the first


def body_outputs(opaque, find_unused):
    model = wrap(Outputs(), find_unused_parameters=find_unused)
    for step in range(2):
        model.zero_grad()
        output = model(make_batch(pool.rank(), step), opaque)
        a, b = output() if opaque else (output["a"][0], output["more"][0])
        a /= 10  # in place: outputs are the module's own tensors
        (a.sum() + b.square().sum()).backward()
        assert grads_equal_on_all_ranks(model)


def body_two_losses(as_view, cap):
    model = wrap(Outputs(), gradient_as_bucket_view=as_view, bucket_cap_mb=cap)
    output = model(make_batch(pool.rank(), 0))
    output["a"][0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        output["more"][0].sum().backward()


def body_raises():
    def broken(gradient):
        raise KeyError("broken")

    model = wrap(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), bucket_cap_mb=1e-6)
    model.module[0].register_forward_hook(lambda module, args, output: output.register_hook(broken) and None)
    with pytest.raises(KeyError):
        backward(model, 1)
    with pytest.raises(RuntimeError, match=r"backward raised, or did not reach 0.weight, 0.bias on rank \d"):
        model(make_batch(pool.rank(), 2))


def body_discarded():
    model = make_model("plain")
    wrapped = wrap(model)
    backward(wrapped, 0)
    references = [weakref.ref(held) for held in (wrapped, wrapped._buckets[0])]
    del wrapped
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    with Collectives() as seen:
        backward(model, 0)
    assert seen.calls == []


def body_buffers():
    rank = pool.rank()
    model, seen = wrap(make_model("batchnorm")), []
    stats = model.module[1].running_mean
    model.module[1].register_forward_pre_hook(lambda *_: seen.append(stats[0].item()))

    def forward():
        stats.data.fill_(rank)  # no new version
        return model(make_batch(rank, len(seen)))

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
    assert seen[-2:] == [0, 0]
    alone = wrap(make_model("batchnorm"), broadcast_buffers=False)
    alone.module[1].running_mean.fill_(rank)
    alone(make_batch(0, 0))
    assert (alone.module[1].running_mean[0] > 0.5) == bool(rank)


# ---- communication hooks


HOOKS = {  # and what they round to
    "all-reduce": (default_hooks.allreduce_hook, torch.float32),
    "fp16": (default_hooks.fp16_compress_hook, torch.float16),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
    "fp16, in another buffer": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16),
}


def body_default_hook(name, as_view):
    model = wrap(make_model("plain"), bucket_cap_mb=1e-3, gradient_as_bucket_view=as_view)
    hook, rounded = HOOKS[name]
    model.register_comm_hook(pool.group(), hook)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        assert_mean(model, make_model("plain"), step, rounded=rounded)


def body_power_sgd():
    """The same hook on our buckets and on PyTorch's: all gradients in one."""
    results = []
    for implementation in (DDP, nn.parallel.DistributedDataParallel):
        model = implementation(make_model("plain", torch.float64), process_group=pool.group())
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
        state = powerSGD_hook.PowerSGDState(pool.group(), **options)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(4):
            model.zero_grad()
            loss_of(model(make_batch(pool.rank(), step, torch.float64))).backward()
            assert grads_equal_on_all_ranks(model)
        results.append(model.module)
    assert_same_parameters(*results, exact=False)


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
        backward(model, step)
        assert_mean(model, make_model("plain"), step)


# ---- what it costs


def body_held(as_view):
    model = wrap(make_model("plain"), bucket_cap_mb=1e-3, gradient_as_bucket_view=as_view)
    during = []  # backward, once the wrapper has seen the gradient
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: during.append(p.grad))
    psi = sum(p.nbytes for p in model.parameters())
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        during.clear()
        backward(model, 0)
        gradients, buckets = [p.grad for p in model.parameters()], [bucket.buffer() for bucket in model._buckets]
        assert len(buckets) > 1
        assert ddp.held_bytes(buckets) == psi
        assert ddp.held_bytes(gradients + buckets) == (psi if as_view else 2 * psi)
        assert ddp.held_bytes(during + buckets) == (psi if as_view else 2 * psi)


@pytest.mark.parametrize(("N", "rank"), [(8, 3), (1024, 0)])
def test_bytes_at_scale(N, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)
    try:
        model = ddp.language_model(layers=2)
        psi = sum(p.nbytes for p in model.parameters())
        model = DDP(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        tokens = torch.randint(256, (1, 65))
        for _ in range(2):
            with ddp.SentBytes() as sent:
                ddp.language_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            assert abs(sent.total - 2 * psi * (N - 1) / N) < 1e-6 * psi
            assert ddp.held_bytes([p.grad for p in model.parameters()]) == psi
        with pytest.raises(KeyError, match="allgather_"), ddp.SentBytes():
            dist.all_gather([torch.zeros(1)] * N, torch.zeros(1))
    finally:
        dist.destroy_process_group()


# ---- what holds


YES_NO = [False, True]
CLAIMS = {  # a body, on how many ranks, and what each of its arguments may be
    "the naive form is one device's mean": (body_naive, [1, 3], ["frozen", "odd", "tied"]),
    "all ranks start from rank 0, in what does not train as well": (body_start, [2]),
    "another dtype or state on one rank is an error on all": (body_different, [3], CHANGES),
    "arguments are PyTorch's, or refused by name": (body_signature, [1]),
    "who is not in the group is told": (body_outsider, [2]),
    "buckets are sent in one order, whatever the order of gradients": (body_order, [2]),
    "a backward is synchronised as its forward was": (body_no_sync, [2]),
    "each forward outside no_sync is reduced by its backward": (body_several_forwards, [2]),
    "unused parameters may differ by rank and by micro-batch": (body_unused, [3], YES_NO),
    "parameters that backward did not reach are named in the next forward": (body_unused_error, [2]),
    "a backward that raised is reported by the next forward": (body_raises, [2]),
    "a second gradient before the reduction is an error": (body_two_losses, [2], YES_NO, [25, 1e-6]),
    "a discarded wrapper is gone, its buckets too, and sends nothing": (body_discarded, [2]),
    "buffers are rank 0's in each training forward, and only then": (body_buffers, [2]),
    "outputs may be anything": (body_outputs, [2], YES_NO, YES_NO),
    "PyTorch's hooks run, with the bits that they keep": (body_default_hook, [2], HOOKS, YES_NO),
    "powerSGD is PyTorch's": (body_power_sgd, [2, 3]),
    "hooks run one bucket after another": (body_hook_order, [2]),
    "gradients hold what the cost table says": (body_held, [2], YES_NO),
}
CASES = [(claim, (body, *case)) for claim, (body, *choices) in CLAIMS.items() for case in product(*choices)]


@pytest.mark.parametrize(("claim", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_that(claim, case):
    body, N, *arguments = case
    pool.run(N, body, *arguments)

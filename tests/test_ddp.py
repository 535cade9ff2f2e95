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

TorchDDP = nn.parallel.DistributedDataParallel
TINY = 1e-6  # bucket_cap_mb: a bucket for each parameter


def wrap(module, **options):
    return ddp.DDP(module, process_group=pool.group(), **options)


def train_on_one_device(plain, numbers):
    """Give `plain` the mean gradient of all ranks' micro-batches `numbers`."""
    batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
    one_device(plain, batches, lambda model, batch: batch_loss(model, *batch))


# ---- section 1


@pool.on(3)
def test_the_idea_averages_gradients_that_are_unused_here_or_laid_out_in_columns():
    model = Branches()
    model[3].weight.requires_grad_(False)
    batches = [make_batch(rank, 0, torch.float64) for rank in range(3)]
    model(batches[pool.rank()], [pool.rank() % 2]).pop().backward()
    if pool.rank() == 0:
        model[0].weight.grad = model[0].weight.grad.t().contiguous().t()

    ddp.all_reduce_gradients(model, pool.group())

    sums = [(batches[0] + batches[2]).sum(0), 2 * batches[1].sum(0), torch.zeros(6)]
    for layer, total in zip(model, sums, strict=False):
        assert_equal(layer.weight.grad, total.expand(2, 6) / 3, exact=False)
    assert model[3].weight.grad is None


@pytest.mark.parametrize("kind", ["tied", "odd"])
@pool.on(2)
def test_the_ideas_buckets_train_bitwise_as_one_device(kind):
    plain = make_model(kind)
    model = copy.deepcopy(plain)
    parameters = list(model.parameters())
    buckets = [ddp.Bucket(parameters[:2]), ddp.Bucket(parameters[2:])]
    for bucket in buckets:
        ddp.all_reduce_when_full(bucket, pool.group())
    for step in range(3):
        model.zero_grad()
        batch_loss(model, pool.rank(), step).backward()
        for bucket in buckets:
            bucket.wait()
        train_on_one_device(plain, [step])
        assert_same_parameters(model, plain, exact=True)


# ---- section 2


def train_and_compare(kind, dtype=torch.float32, hook=None, **options):
    """Train for four steps of two micro-batches. Ranks start apart, and compare bitwise."""
    plain = make_model(kind, dtype)
    module = copy.deepcopy(plain)
    for state in module.state_dict().values():
        state.add_(pool.rank())
    model = wrap(module, **options)
    if hook:
        model.register_comm_hook(pool.group(), hook)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            batch_loss(model, pool.rank(), 2 * step).backward()
        batch_loss(model, pool.rank(), 2 * step + 1).backward()
        train_on_one_device(plain, [2 * step, 2 * step + 1])
        assert_same_parameters(module, plain, exact=True)
    return model


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("mixed", torch.float32), ("odd", torch.bfloat16)],
    ids=["two dtypes", "bf16"],
)
@pool.on(1, 2)
def test_gradients_are_bitwise_those_of_one_device(kind, dtype):
    train_and_compare(kind, dtype, bucket_cap_mb=TINY)


@pytest.mark.parametrize("as_view", [False, True])
@pool.on(2)
def test_buckets_hold_the_gradients_once_more_unless_they_are_views(as_view):
    model = train_and_compare("frozen", bucket_cap_mb=1e-4, gradient_as_bucket_view=as_view)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    flat = [bucket.flat for bucket in model._buckets]
    copies = 1 if as_view else 2
    assert len(flat) > 1
    assert ddp.held_bytes([*gradients, *flat]) == copies * ddp.held_bytes(trained)


@pytest.mark.parametrize(
    ("cap", "lengths"), [(13, [[3, 2], [1]]), (12, [[3], [2], [1]]), (0, [[3], [2], [1]])]
)
def test_buckets_start_at_the_last_tensor_and_end_at_the_cap_or_another_dtype(cap, lengths):
    tensors = [torch.zeros(1, dtype=torch.float64), torch.zeros(2), torch.zeros(3)]
    buckets = ddp.assign_buckets(tensors, cap)
    assert [[len(tensor) for tensor in bucket] for bucket in buckets] == lengths


def test_one_bucket_holds_25_mb_unless_said_otherwise():
    with fake_world(2, 0):
        model = ddp.DDP(nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(4)]))  # 9 MB each
    numels = [len(bucket.views) for bucket in model._buckets]
    assert numels == [6, 2]


@pool.on(2)
def test_buffers_of_any_dtype_start_as_rank_0s():
    module = make_model("plain")
    module.register_buffer("short", torch.full((3,), pool.rank(), dtype=torch.int16))
    wrap(module)
    assert module.short.tolist() == [0, 0, 0]


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
        layers = [nn.Linear(6, 2, bias=False, dtype=torch.float64) for _ in range(4)]
        super().__init__(*layers)

    def forward(self, x, used, opaque=False):
        y = torch.zeros((), requires_grad=True) * 1
        for i in used:
            y = y + (i + 1) * self[i](x).sum()
        return {y} if opaque else [y]  # DDP looks for no tensors in a set


ALL_LAYERS = [0, 1, 2, 3]
LAYERS = st.lists(st.sampled_from(ALL_LAYERS), unique=True)
# Whether zero_grad() comes before, whether it is local, and the layers that each rank uses.
MICRO_BATCH = st.tuples(st.booleans(), st.booleans(), LAYERS, LAYERS, LAYERS)


def expect(expected, micro_batch, number):
    """Add the gradients of a micro-batch to `expected`, (rank, layer, 2, 6). 0 stands for None."""
    zero_grad, local, *uses = micro_batch
    if zero_grad:
        expected.zero_()
    for rank, used in enumerate(uses):
        for i in used:
            expected[rank, i] += (i + 1) * make_batch(rank, number, torch.float64).sum(0)
    if not local:
        expected[:] = expected.mean(0)


def run_micro_batch(model, micro_batch, number, opaque, one_backward):
    zero_grad, local, *uses = micro_batch
    if zero_grad:
        model.zero_grad()
    losses = []
    with model.no_sync() if local else nullcontext():
        for half in make_batch(pool.rank(), number, torch.float64).chunk(2):
            losses += model(half, uses[pool.rank()], opaque)
    with nullcontext() if local else model.no_sync():  # only where forward runs matters
        for loss in [sum(losses)] if one_backward else losses:
            loss.backward()


def run_micro_batches(micro_batches, find_unused, **options):
    expected = torch.zeros(3, 4, 2, 6, dtype=torch.float64)
    model = wrap(Branches(), bucket_cap_mb=TINY, find_unused_parameters=find_unused, **options)
    with suppress(KeyError), model.no_sync():
        raise KeyError  # which ends no_sync()
    for number, micro_batch in enumerate(micro_batches):
        one_backward = not find_unused and number % 2 == 0
        run_micro_batch(model, micro_batch, number, one_backward, one_backward)
        expect(expected, micro_batch, number)
        for layer, gradient in zip(model.module, expected[pool.rank()], strict=True):
            assert_equal(layer.weight.grad, gradient if gradient.any() else None, exact=False)


@given(st.lists(MICRO_BATCH, min_size=1, max_size=5), st.booleans())
@example([(False, False, [0, 3], [1, 3], [0]), (True, False, [], [], [])], True)
@example([(False, True, [0], [1], [0]), (False, False, [3], [3], [3])], True)
@pool.on(3)
def test_layers_used_may_differ_by_rank_and_micro_batch(micro_batches, as_view):
    run_micro_batches(micro_batches, True, gradient_as_bucket_view=as_view)


@given(st.permutations(ALL_LAYERS), st.permutations(ALL_LAYERS), st.booleans())
@pool.on(3)
def test_the_order_in_which_layers_are_used_may_differ_by_rank(first, second, local):
    uses = [ALL_LAYERS, first, second]
    run_micro_batches([(False, False, *uses), (False, local, *uses), (True, False, *uses)], False)


@pytest.mark.parametrize("idea", [False, True])
@pool.on(2)
def test_sparse_gradients_become_the_dense_mean(idea):
    plain = nn.Embedding(5, 3)
    module = copy.deepcopy(plain)
    module.sparse = True
    batches = [torch.tensor([[rank, 2], [2, 4 - rank]]) for rank in range(2)]
    one_device(plain, [[batch] for batch in batches])
    model = module if idea else wrap(module)
    loss_of(model(batches[pool.rank()])).backward()
    if idea:
        ddp.all_reduce_gradients(module, pool.group())
    assert_same_parameters(module, plain, exact=True)


@pool.on(2)
def test_two_backwards_through_one_forward_are_averaged_if_they_share_no_parameter():
    model = wrap(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    model.module.forward = lambda x: (model.module["a"](x), model.module["b"](x))
    left, right = model(torch.full((1, 2), 1.0 + pool.rank()))
    left.sum().backward()
    right.sum().backward()
    for layer in model.module.values():
        assert layer.weight.grad.tolist() == [[1.5, 1.5]] * 2


@pool.on(2)
def test_parameters_that_backward_did_not_reach_are_named_in_the_next_forward():
    model = wrap(Branches(), bucket_cap_mb=TINY)
    x = make_batch(pool.rank(), 0, torch.float64)
    model.module(x, [1]).pop().backward()  # not through the wrapper: it does not count
    loss = model(x, [0, 2]).pop()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model(x, [0])  # evaluation is no error
    with pytest.raises(RuntimeError, match=rf"1\.weight, 3\.weight on rank {pool.rank()}"):
        model(x, ALL_LAYERS)
    with pytest.raises(RuntimeError, match="ready only once"):
        loss.backward()


# ---- section 3


@pytest.mark.parametrize("implementation", [ddp.DDP, TorchDDP], ids=["ours", "torch"])
@pool.on(2)
def test_functional_call_works_as_in_pytorch(implementation):
    module = nn.Linear(2, 1)
    model = implementation(module, process_group=pool.group())
    x = torch.full((1, 2), 1.0 + pool.rank())

    def call(tensors):
        names = [name for name, _ in model.named_parameters()]
        output = torch.func.functional_call(model, dict(zip(names, tensors, strict=True)), (x,))
        output.sum().backward()

    call([2 * parameter for parameter in module.parameters()])  # computed from the parameters
    assert module.weight.grad.tolist() == [[3, 3]]
    for make in (torch.Tensor.requires_grad_, nn.Parameter):
        others = [make(parameter.detach().clone()) for parameter in module.parameters()]
        call(others)
        assert others[0].grad.tolist() == x.tolist()
    model(x).sum().backward()
    assert module.weight.grad.tolist() == [[4.5, 4.5]]


@pytest.mark.parametrize(
    ("implementation", "options"),
    [(ddp.DDP, {}), (ddp.DDP, {"broadcast_buffers": False}), (TorchDDP, {})],
    ids=["ours", "ours without broadcast_buffers", "torch"],
)
@pool.on(2)
def test_buffers_are_rank_0s_in_the_forward_after_one_that_averages(implementation, options):
    rank = pool.rank()
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

    first = rank if options else 0
    assert seen == [first, first, first, *[rank] * rank, rank, first, rank, first, first]


def all_reduce_twice(group, bucket):
    """A hook that issues a second collective when its first is done: it must not meet another's."""
    half = bucket.buffer().div_(group.size() ** 2)
    first = dist.all_reduce(half, group=group, async_op=True).get_future()

    def again(future):
        dist.all_reduce(future.value()[0], group=group)
        return bucket.buffer()

    return first.then(again)


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, all_reduce_twice])
@pool.on(2)
def test_gradients_that_a_hook_averages_are_bitwise_those_of_one_device(hook):
    train_and_compare("tied", torch.float64, hook, bucket_cap_mb=TINY)


def test_a_hook_whose_future_is_done_is_not_waited_for():
    """A CUDA future is done when its work is in a stream. wait() would stop the current stream."""

    class Done:
        then = wait = None

        def done(self):
            return True

    def hook(_, bucket):
        return torch.futures.collect_all([]).then(lambda _: bucket.buffer())

    with fake_world(2, 0):
        model = ddp.DDP(nn.Linear(1, 2), bucket_cap_mb=TINY)
        model.register_comm_hook(None, hook)
        model._buckets[0].work = Done()
        model._send(model._buckets[1])


@pytest.mark.parametrize("low_rank", [False, True])
@pool.on(2)
def test_pytorchs_hooks_find_what_they_find_in_pytorchs(low_rank):
    modules = []
    for implementation in (ddp.DDP, TorchDDP):
        state = pool.group()
        hook = default_hooks.fp16_compress_hook
        if low_rank:
            options = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5}
            state = powerSGD_hook.PowerSGDState(pool.group(), **options)
            hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        model = implementation(make_model("plain", torch.float64), process_group=pool.group())
        model.register_comm_hook(state, hook)
        for step in range(4):
            model.zero_grad()
            batch_loss(model, pool.rank(), step).backward()
        modules.append(model.module)
    assert_same_parameters(*modules, exact=not low_rank)


@pool.on(2)
def test_a_hooks_bucket_has_the_methods_of_pytorchs():
    seen = []

    def hook(_, bucket):
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        bucket.set_buffer(bucket.buffer() * 0 + bucket.index())  # gradients() are views of it
        gradients = [gradient.tolist() for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), shapes, gradients))
        return torch.futures.collect_all([]).then(lambda _: bucket.buffer())

    model = wrap(nn.Linear(1, 2), bucket_cap_mb=TINY)
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 1)).sum().backward()
    assert seen == [(0, False, [(2,)], [[0, 0]]), (1, True, [(2, 1)], [[[1], [1]]])]
    assert model.module.weight.grad.tolist() == [[1], [1]]


@pool.on(4)  # all, because a process group cannot be copied
def test_a_copy_averages_its_own_gradients():
    model = copy.deepcopy(ddp.DDP(make_model("plain", torch.float64)))
    batch_loss(model, pool.rank(), 0).backward()
    plain = make_model("plain", torch.float64)
    train_on_one_device(plain, [0])
    assert_same_parameters(model.module, plain, exact=False)


def cast(model):
    model[3].bfloat16()


def freeze(model):
    model[3].bias.requires_grad_(False)


def add_a_buffer(model):
    model[1].register_buffer("extra", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cast, r"\(3, 8\), torch.bfloat16.*float32"),
        (freeze, r"3\.bias.*requires_grad=False"),
        (add_a_buffer, r"1\.extra: \(2,\)"),
    ],
)
@pool.on(3)
def test_models_that_differ_are_an_error_on_every_rank(change, words):
    model = make_model("batchnorm")
    if pool.rank() == 2:
        change(model)
    with pytest.raises(ValueError, match=words):
        wrap(model)


@pytest.mark.parametrize(
    ("name", "change"), [("0.bias", nn.Module.requires_grad_), ("0.weight", nn.Module.half)]
)
@pool.on(2)
def test_a_parameter_that_is_unfrozen_or_cast_after_construction_is_an_error(name, change):
    model = wrap(make_model("frozen"))
    change(model)
    with pytest.raises(RuntimeError, match=f"{name} .*wrap the module again"):
        batch_loss(model, 0, 0)


@pytest.mark.parametrize("ranks", [[0, 1], [1, 0, 5], True], ids=str)
@pool.on(2)
def test_ranks_that_hold_different_experts_or_slices_are_no_replicas(ranks):
    model = make_model("plain")
    model[2].differ_between_ranks = ranks
    with pytest.raises(ValueError, match=r"ranks \[0, 1\].*'2'"):
        wrap(model)


@pytest.mark.parametrize("ranks", [[0, 2, 3], [], False], ids=str)
@pool.on(2)
def test_ranks_whose_peers_in_another_group_hold_other_slices_are_replicas(ranks):
    model = make_model("plain")
    model[2].differ_between_ranks = ranks
    wrap(model)


def test_arguments_are_pytorchs_in_pytorchs_order():
    theirs = list(inspect.signature(TorchDDP).parameters)
    ours = [name for name in inspect.signature(ddp.DDP).parameters if name in theirs]
    assert ours == theirs[: len(ours)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dim", 1),
        ("init_sync", False),
        ("check_reduction", True),
        ("static_graph", True),
        ("output_device", 0),
    ],
)
@pool.on(2)
def test_an_argument_that_is_not_supported_is_an_error(name, value):
    model = make_model("plain")
    wrap(model, device_ids=[1], output_device=1, static_graph=False)
    with pytest.raises(ValueError, match=name):
        wrap(model, **{name: value})


@pool.on(2)
def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="broadcast_bufers"):
        wrap(make_model("plain"), broadcast_bufers=False)


def test_a_rank_outside_of_the_group_is_an_error():
    with fake_world(2, 0), pytest.raises(ValueError, match="rank 0 is not in process_group"):
        ddp.DDP(make_model("plain"), process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_module_that_trains_nothing_is_an_error():
    model = make_model("plain").requires_grad_(False)
    with fake_world(1, 0), pytest.raises(RuntimeError, match="any parameter that requires"):
        ddp.DDP(model)


def test_a_step_neither_waits_for_the_device_nor_copies_from_the_host():
    """A tensor on the meta device has no values that the host could read."""
    with fake_world_on_meta(2, 0):
        model = ddp.DDP(make_model("batchnorm"), [0], find_unused_parameters=True)
        with Watch(lambda: None) as watch:
            model(torch.ones(5, 6, device="cpu")).sum().backward()  # device_ids moves it
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

"""ddp.py: what the claims about data parallelism leave open."""

import copy
import inspect
import weakref
from contextlib import suppress

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.training import one_device
from hypothesis import given
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
OURS_AND_TORCHS = pytest.mark.parametrize("DDP", [ddp.DDP, TorchDDP], ids=["ours", "torch's"])
TINY = 1e-6  # bucket_cap_mb: a bucket for each parameter


def wrap(module, **options):
    return ddp.DDP(module, process_group=pool.group(), **options)


def backward(model, number=0):
    """Of this rank's micro-batch of that number."""
    loss = batch_loss(model, pool.rank(), number)
    loss.backward()


def one_input():
    """1 on rank 0, 2 on rank 1."""
    return torch.ones(1, 1) + pool.rank()


def backward_on_one_device(plain, numbers):
    """Give `plain` the mean gradient of all ranks' micro-batches `numbers`."""
    batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
    one_device(plain, batches, lambda model, batch: batch_loss(model, *batch))


# ---- section 1


@pool.on(3)
def test_the_idea_averages_a_gradient_with_zeros_of_the_ranks_without_one():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    if pool.rank() == 1:
        layer.weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    ddp.all_reduce_gradients(layer, pool.group())
    assert_equal(layer.weight.grad * 3, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), exact=False)
    assert layer.bias.grad is None


@pool.on(2)
def test_the_idea_averages_gradients_of_other_strides():
    layer = nn.Linear(2, 2, bias=False)
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    in_columns = gradient.T.contiguous().T
    layer.weight.grad = in_columns if pool.rank() == 0 else gradient
    ddp.all_reduce_gradients(layer, pool.group())
    assert torch.equal(layer.weight.grad, gradient)


@pytest.mark.parametrize("kind", ["tied", "odd"])
@pool.on(2)
def test_buckets_of_the_idea_train_bitwise_as_one_device(kind):
    plain = make_model(kind)
    model = copy.deepcopy(plain)
    parameters = list(model.parameters())
    buckets = [ddp.Bucket(parameters[:2]), ddp.Bucket(parameters[2:])]
    for bucket in buckets:
        ddp.all_reduce_when_full(bucket, pool.group())
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        for bucket in buckets:
            bucket.wait()
        backward_on_one_device(plain, [step])
        assert_same_parameters(model, plain, exact=True)


# ---- section 2


def backward_and_compare(module, model, plain):
    """Two steps of two micro-batches, the first in no_sync(). Compare bitwise."""
    for step in range(2):
        model.zero_grad(set_to_none=step == 0)
        numbers = [2 * step, 2 * step + 1]
        with model.no_sync():
            backward(model, numbers[0])
        backward(model, numbers[1])
        backward_on_one_device(plain, numbers)
        assert_same_parameters(module, plain, exact=True)


@pytest.mark.parametrize("kind", ["mixed", "odd"])
@pool.on(1, 2)
def test_gradients_of_two_dtypes_and_of_bf16_are_bitwise_those_of_one_device(kind):
    plain = make_model(kind, torch.bfloat16)
    module = copy.deepcopy(plain)
    model = wrap(module, bucket_cap_mb=TINY)
    backward_and_compare(module, model, plain)


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pool.on(2)
def test_buckets_hold_gradients_once_more_unless_they_are_views(as_view):
    plain = make_model("frozen")
    module = copy.deepcopy(plain)
    model = wrap(module, bucket_cap_mb=1e-4, gradient_as_bucket_view=as_view)
    backward_and_compare(module, model, plain)

    gradients = [parameter.grad for parameter in module.parameters()]
    gradients = [gradient for gradient in gradients if gradient is not None]
    flat = [bucket.flat for bucket in model._buckets]
    assert len(flat) > 1
    held = ddp.held_bytes(gradients + flat)
    assert held == ddp.held_bytes(flat) * (1 if as_view else 2)


@pytest.mark.parametrize(
    ("cap", "lengths"), [(13, [[3, 2], [1]]), (12, [[3], [2], [1]]), (0, [[3], [2], [1]])]
)
def test_buckets_start_at_the_last_tensor_and_end_at_the_cap_or_another_dtype(cap, lengths):
    tensors = [torch.zeros(1).double(), torch.zeros(2), torch.zeros(3)]
    buckets = ddp.assign_buckets(tensors, cap)
    assert [list(map(len, bucket)) for bucket in buckets] == lengths


def test_a_bucket_holds_25_mb_by_default():
    layers = [nn.Linear(1500, 1500, bias=False) for _ in range(4)]  # 9 MB each
    with fake_world(2, 0):
        model = ddp.DDP(nn.Sequential(*layers))
    assert [len(bucket.views) for bucket in model._buckets] == [3, 1]


@pool.on(2)
def test_buffers_of_int16_start_as_those_of_rank_0():
    module = make_model("plain")
    short = torch.ones(3, dtype=torch.int16) * pool.rank()
    module.register_buffer("short", short)
    wrap(module)
    assert short.tolist() == [0, 0, 0]


@pool.on(2)
def test_a_discarded_wrapper_holds_and_sends_nothing():
    module = make_model("plain")
    model = wrap(module)
    backward(model)
    wrapper = weakref.ref(model)
    bucket = weakref.ref(model._buckets[0])

    del model
    with ddp.SentBytes() as sent:
        backward(module)

    assert wrapper() is bucket() is None
    assert sent.total == 0


class Layers(nn.Sequential):
    """Three layers. Forward uses those whose numbers it is given, in that order."""

    def __init__(self):
        super().__init__(*[nn.Linear(6, 2, bias=False) for _ in range(3)])
        self.double()

    def forward(self, x, used):
        y = torch.zeros((), requires_grad=True) * 1
        for i in used:
            y = y + (i + 1) * self[i](x).sum()
        return y


def gradient_of_layer(i, rank, number):
    return (i + 1) * make_batch(rank, number, torch.float64).sum(0)


def assert_gradients(model, expected):
    """`expected` is (layer, 2, 6), in which 0 stands for None."""
    for layer, gradient in zip(model.module, expected, strict=True):
        assert_equal(layer.weight.grad, gradient if gradient.any() else None, exact=False)


LAYERS = st.lists(st.integers(0, 2), unique=True)
# whether it is in no_sync(), and the layers that each rank uses
MICRO_BATCH = st.tuples(st.booleans(), LAYERS, LAYERS, LAYERS)


@given(st.lists(MICRO_BATCH, max_size=4), st.booleans())
@pool.on(3)
def test_each_rank_may_use_other_layers_in_each_micro_batch(micro_batches, as_view):
    model = wrap(
        Layers(),
        bucket_cap_mb=TINY,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
    )
    expected = torch.zeros(3, 3, 2, 6).double()  # rank, layer
    for number, (local, *uses) in enumerate(micro_batches):
        model.require_backward_grad_sync = not local
        x = make_batch(pool.rank(), number, torch.float64)
        y = model(x, uses[pool.rank()])
        y.backward()
        for rank, used in enumerate(uses):
            for i in used:
                expected[rank, i] += gradient_of_layer(i, rank, number)
        if not local:
            expected[:] = expected.mean(0)
        assert_gradients(model, expected[pool.rank()])


@pool.on(3)
def test_each_rank_may_use_the_layers_in_another_order():
    orders = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    model = wrap(Layers(), bucket_cap_mb=TINY)
    x = make_batch(pool.rank(), 0, torch.float64)
    y = model(x, orders[pool.rank()])
    y.backward()
    expected = torch.zeros(3, 2, 6).double()
    for i in range(3):
        expected[i] += sum(gradient_of_layer(i, rank, 0) for rank in range(3)) / 3
    assert_gradients(model, expected)


@pool.on(2)
def test_an_error_in_no_sync_ends_it():
    model = wrap(nn.Linear(1, 1, bias=False))
    with suppress(KeyError), model.no_sync():
        raise KeyError
    y = model(one_input())
    y.backward()
    assert model.module.weight.grad.item() == 1.5


@pool.on(2)
def test_only_the_place_of_the_forward_decides_whether_gradients_are_averaged():
    model = wrap(nn.Linear(1, 1, bias=False))
    y = model(one_input())
    with model.no_sync():
        y.backward()
    assert model.module.weight.grad.item() == 1.5


@pool.on(2)
def test_two_forwards_may_come_before_their_backwards():
    model = wrap(nn.Linear(1, 1, bias=False))
    first = model(one_input())
    second = model(one_input())
    first.backward()
    second.backward()
    assert model.module.weight.grad.item() == 3


@pytest.mark.parametrize("idea", [False, True], ids=["the class", "the idea"])
@pool.on(2)
def test_sparse_gradients_become_the_dense_mean(idea):
    plain = nn.Embedding(5, 3)
    module = copy.deepcopy(plain)
    module.sparse = True
    batches = [torch.tensor([[0, 2], [2, 4]]), torch.tensor([[1, 2], [2, 3]])]
    one_device(plain, [batches[:1], batches[1:]])
    model = module if idea else wrap(module)
    loss = loss_of(model(batches[pool.rank()]))
    loss.backward()
    if idea:
        ddp.all_reduce_gradients(module, pool.group())
    assert_same_parameters(module, plain, exact=True)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(1, 1)
        self.right = nn.Linear(1, 1)

    def forward(self, x):
        return self.left(x), {"right": [self.right(x)]}


@pool.on(2)
def test_two_backwards_of_one_forward_are_averaged_if_they_share_no_parameter():
    model = wrap(TwoOutputs())
    left, nested = model(one_input())
    left.backward()
    nested["right"][0].backward()
    assert model.module.left.weight.grad.item() == 1.5
    assert model.module.right.weight.grad.item() == 1.5


@pool.on(2)
def test_parameters_that_backward_did_not_reach_are_named_in_the_next_forward():
    model = wrap(Layers(), bucket_cap_mb=TINY)
    x = make_batch(0, 0, torch.float64)
    model.module(x, [1]).backward()  # not through the wrapper: it does not count
    model(x, [0]).backward()
    with torch.no_grad():
        model(x, [0])  # evaluation is no error
    with pytest.raises(RuntimeError, match=rf"1\.weight, 2\.weight on rank {pool.rank()}"):
        model(x, [0, 1, 2])


@pool.on(2)
def test_a_second_gradient_of_a_parameter_is_an_error():
    model = wrap(Layers(), bucket_cap_mb=TINY)
    loss = model(make_batch(0, 0, torch.float64), [0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        loss.backward()


# ---- section 3


def call_with(model, x, tensors):
    """Backward through torch.func.functional_call."""
    names = [name for name, _ in model.named_parameters()]
    replaced = dict(zip(names, tensors, strict=True))
    output = torch.func.functional_call(model, replaced, x)
    output.backward()


@OURS_AND_TORCHS
@pool.on(2)
def test_gradients_through_tensors_computed_from_parameters_are_averaged(DDP):
    module = nn.Linear(1, 1)
    model = DDP(module, process_group=pool.group())
    call_with(model, one_input(), [2 * parameter for parameter in module.parameters()])
    assert module.weight.grad.item() == 3


@OURS_AND_TORCHS
@pytest.mark.parametrize("make", [torch.Tensor.requires_grad_, nn.Parameter], ids=["tensor", "p"])
@pool.on(2)
def test_gradients_of_other_tensors_stay_on_their_rank(DDP, make):
    module = nn.Linear(1, 1)
    model = DDP(module, process_group=pool.group())
    others = [make(torch.ones(1, 1)), make(torch.ones(1))]
    call_with(model, one_input(), others)
    assert others[0].grad.item() == 1 + pool.rank()
    y = model(one_input())  # trains its own again
    y.backward()
    assert module.weight.grad.item() == 1.5


class Reads(nn.Linear):
    """Notes the buffer in each forward."""

    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("buffer", torch.zeros(1))
        self.seen = []

    def forward(self, x):
        self.seen.append(self.buffer.item())
        return super().forward(x) * (1 + 0 * self.buffer)


@OURS_AND_TORCHS
@pool.on(2)
def test_rank_0s_buffers_come_in_the_forward_after_one_that_averages(DDP):
    rank = pool.rank()
    model = DDP(Reads(), process_group=pool.group())

    def forward():
        model.module.buffer.data.fill_(rank)  # no new version
        return model(torch.ones(1, 1))

    forward()  # the first
    with torch.no_grad():
        forward()
        if rank == 1:  # alone
            forward()
    forward()
    with model.no_sync():
        forward()
    forward()
    assert model.module.seen == [0, 0, *[1] * rank, rank, 0, rank]


@pool.on(2)
def test_buffers_stay_apart_without_broadcast_buffers():
    module = Reads()
    module.buffer.fill_(pool.rank())
    model = wrap(module, broadcast_buffers=False)
    model(torch.ones(1, 1))
    assert module.seen == [pool.rank()]


@pool.on(2)
def test_a_graph_may_have_saved_a_buffer_that_the_next_forward_overwrites():
    model = wrap(make_model("batchnorm"))
    model.eval()
    loss = batch_loss(model, 0, 0) + batch_loss(model, 0, 1)
    loss.backward()
    assert model.module[0].weight.grad is not None


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
    plain = make_model("tied", torch.float64)
    module = copy.deepcopy(plain)
    model = wrap(module, bucket_cap_mb=TINY)
    model.register_comm_hook(pool.group(), hook)
    backward_and_compare(module, model, plain)


@pool.on(2)
def test_powersgd_does_what_it_does_in_pytorchs_class():
    modules = []
    for implementation in (ddp.DDP, TorchDDP):
        module = make_model("plain", torch.float64)
        model = implementation(module, process_group=pool.group())
        state = powerSGD_hook.PowerSGDState(
            pool.group(), start_powerSGD_iter=2, min_compression_rate=0.5
        )
        hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        model.register_comm_hook(state, hook)
        for step in range(4):
            model.zero_grad()
            backward(model, step)
        modules.append(module)
    assert_same_parameters(*modules, exact=False)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@pool.on(2)
def test_a_hook_may_set_the_buffer_of_which_gradients_are_views():
    seen = []

    def hook(_, bucket):
        bucket.set_buffer(0 * bucket.buffer() + bucket.index() + 7)
        gradients = [gradient.tolist() for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), gradients))
        return done(bucket.buffer())

    model = wrap(nn.Linear(1, 2), bucket_cap_mb=TINY)
    model.register_comm_hook(None, hook)
    y = model(torch.ones(1, 1))
    y.sum().backward()
    assert seen == [(0, False, [[7, 7]]), (1, True, [[[8], [8]]])]
    assert model.module.weight.grad.tolist() == [[8], [8]]


@pool.on(4)  # all, because a process group cannot be copied
def test_a_copy_averages_its_own_gradients():
    plain = make_model("plain", torch.float64)
    original = ddp.DDP(make_model("plain", torch.float64))
    model = copy.deepcopy(original)
    backward(model)
    backward_on_one_device(plain, [0])
    assert_same_parameters(model.module, plain, exact=False)


# ---- errors


def cast(layer):
    layer.bfloat16()


def freeze(layer):
    layer.bias.requires_grad_(False)


def add_a_buffer(layer):
    layer.register_buffer("extra", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "words"),
    [(cast, "bfloat16"), (freeze, "bias.*grad=False"), (add_a_buffer, r"extra: \(2,\)")],
)
@pool.on(3)
def test_a_model_that_differs_on_one_rank_is_an_error_on_all(change, words):
    model = make_model("plain")
    if pool.rank() == 2:
        change(model[2])
    with pytest.raises(ValueError, match=words):
        wrap(model)


@pytest.mark.parametrize(
    ("change", "name"), [(nn.Module.requires_grad_, "0.bias"), (nn.Module.half, "0.weight")]
)
@pool.on(2)
def test_a_parameter_that_is_unfrozen_or_cast_after_construction_is_an_error(change, name):
    model = wrap(make_model("frozen"))
    change(model)
    with pytest.raises(RuntimeError, match=f"{name} .*again"):
        batch_loss(model, 0, 0)


@pytest.mark.parametrize("ranks", [[0, 1], [1, 0, 5], True], ids=str)
@pool.on(2)
def test_ranks_that_hold_different_slices_are_no_replicas(ranks):
    model = make_model("plain")
    model[2].differ_between_ranks = ranks
    with pytest.raises(ValueError, match=r"ranks \[0, 1\].*'2'"):
        wrap(model)


@pytest.mark.parametrize("ranks", [[0, 2, 3], False], ids=str)
@pool.on(2)
def test_ranks_of_other_groups_may_hold_different_slices(ranks):
    model = make_model("plain")
    model[2].differ_between_ranks = ranks
    wrap(model)


def test_arguments_are_pytorchs_in_pytorchs_order():
    theirs = list(inspect.signature(TorchDDP).parameters)
    ours = [name for name in inspect.signature(ddp.DDP).parameters if name in theirs]
    assert ours == theirs[: len(ours)]


UNSUPPORTED = {"dim": 1, "init_sync": False, "check_reduction": True}
UNSUPPORTED |= {"static_graph": True, "output_device": 0}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pool.on(2)
def test_an_argument_that_is_not_supported_is_an_error(name):
    with pytest.raises(ValueError, match=name):
        wrap(make_model("plain"), **{name: UNSUPPORTED[name]})


@pool.on(2)
def test_arguments_may_have_their_default_values():
    wrap(make_model("plain"), device_ids=[1], output_device=1, static_graph=False)


@pool.on(2)
def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="broadcast_bufers"):
        wrap(make_model("plain"), broadcast_bufers=False)


def test_a_rank_outside_of_the_group_is_an_error():
    with fake_world(2, 0), pytest.raises(ValueError, match="rank 0 is not in"):
        ddp.DDP(make_model("plain"), process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_module_that_trains_nothing_is_an_error():
    model = make_model("plain").requires_grad_(False)
    with fake_world(1, 0), pytest.raises(RuntimeError, match="any parameter"):
        ddp.DDP(model)


# ---- costs


def test_a_step_neither_waits_for_the_device_nor_copies_from_the_host():
    """A tensor on the meta device has no values that the host could read."""
    with fake_world_on_meta(2, 0):
        model = ddp.DDP(make_model("batchnorm"), [0], find_unused_parameters=True)
        with Watch(lambda: None) as watch:
            y = model(torch.ones(5, 6, device="cpu"))  # device_ids moves it
            y.sum().backward()
    operators = {operator for operator, _ in watch.seen}
    assert "c10d::allreduce_" in operators
    assert not operators & {"aten::_local_scalar_dense", "aten::lift_fresh"}


def test_bytes_at_scale():
    with fake_world(1024, 5):
        model = ddp.DDP(make_model("plain"), bucket_cap_mb=1e-3)
        with ddp.SentBytes() as sent:
            batch_loss(model, 0, 0).backward()
    held = ddp.held_bytes(model.parameters())
    assert sent.total == pytest.approx(2 * held * 1023 / 1024)

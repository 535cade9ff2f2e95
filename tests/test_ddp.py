"""ddp.py: what tests/claims/ddp.py and tests/claims/training.py leave open."""

import copy
import dataclasses
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

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
    make_batch,
    make_model,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.torch_version import TorchVersion

import ddp

F64 = torch.float64
TorchDDP = nn.parallel.DistributedDataParallel
TINY = 1e-6  # bucket_cap_mb: a bucket for each parameter


def wrap(module, **options):
    return ddp.DDP(module, process_group=pool.group(), **options)


def backward(model, number=0):
    """Of this rank's micro-batch of that number."""
    loss = batch_loss(model, pool.rank(), number)
    loss.backward()


def backward_on_one_device(plain, *numbers):
    """Give `plain` the mean gradient of all ranks' micro-batches of these numbers."""
    batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
    one_device(plain, batches, lambda model, batch: batch_loss(model, *batch))


def one_input():
    """1 on rank 0, 2 on rank 1. It is the gradient of a weight of nn.Linear(1, 1)."""
    return torch.ones(1, 1) + pool.rank()


# ---- the idea, and the technique alone


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pool.on(2)
def test_the_technique_alone_trains_as_one_device(as_view):
    plain = make_model("odd", F64)
    replica = ddp.Replica(copy.deepcopy(plain), pool.group(), TINY, True, as_view)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, replica)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_on_one_device(plain, number)
        backward(replica, number)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(replica.module, plain, exact=True)


@pool.on(3)
def test_the_idea_averages_gradients_of_any_strides_and_zeros_for_missing_ones():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    gradient = torch.tensor([[3.0, 6.0], [9.0, 12.0]])
    layer.weight.grad = [None, gradient.T.contiguous().T, gradient][pool.rank()]
    ddp.all_reduce_gradients(layer, pool.group())
    assert torch.equal(layer.weight.grad, gradient * 2 / 3)
    assert layer.bias.grad is None


# ---- buckets


def test_buckets_start_at_the_last_tensor_and_end_at_the_cap_or_another_dtype():
    tensors = [torch.zeros(1).double(), torch.zeros(2), torch.zeros(3), torch.zeros(1)]
    buckets = ddp.assign_buckets(tensors, cap_bytes=16)
    assert [list(map(len, bucket)) for bucket in buckets] == [[1, 3], [2], [1]]


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_step_sends_and_holds_what_the_docstring_says_in_buckets_of_25_mb(as_view):
    module = nn.Sequential(*[nn.Linear(1500, 1500, bias=False) for _ in range(4)])  # 9 MB each
    with fake_world(1024, 5):
        model = ddp.DDP(module, gradient_as_bucket_view=as_view)
        with ddp.SentBytes() as sent:
            y = model(torch.ones(1, 1500))
            y.sum().backward()
    assert [len(bucket.views) for bucket in model._buckets] == [3, 1]
    psi = ddp.held_bytes(model.parameters())
    assert sent.total == pytest.approx(2 * psi * 1023 / 1024)
    held = [parameter.grad for parameter in model.parameters()]
    held += [bucket.flat for bucket in model._buckets]
    assert ddp.held_bytes(held) == psi * (1 if as_view else 2)


def all_reduce_twice(group, bucket):
    """A hook that issues a second collective when its first is done: it must not meet another's."""
    half = bucket.buffer().div_(group.size() ** 2)
    first = dist.all_reduce(half, group=group, async_op=True).get_future()

    def again(future):
        dist.all_reduce(future.value()[0], group=group)
        return bucket.buffer()

    return first.then(again)


@pytest.mark.parametrize(
    ("kind", "as_view", "hook"),
    [
        ("mixed", False, None),
        ("odd", False, None),
        ("frozen", True, None),
        ("tied", True, default_hooks.allreduce_hook),
        ("plain", False, all_reduce_twice),
    ],
)
@pool.on(1, 2)
def test_gradients_of_two_micro_batches_are_bitwise_those_of_one_device(kind, as_view, hook):
    plain = make_model(kind, torch.bfloat16)
    module = copy.deepcopy(plain)
    model = wrap(module, bucket_cap_mb=TINY, gradient_as_bucket_view=as_view)
    if hook:
        model.register_comm_hook(pool.group(), hook)
    for step in range(2):
        model.zero_grad(set_to_none=step == 0)
        with model.no_sync():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
        backward_on_one_device(plain, 2 * step, 2 * step + 1)
        assert_same_parameters(module, plain, exact=True)


# ---- which parameters backward reaches, and when


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
    expected = torch.zeros(3, 3, 2, 6, dtype=F64)  # rank, layer
    for number, (local, *uses) in enumerate(micro_batches):
        model.require_backward_grad_sync = not local
        x = make_batch(pool.rank(), number, F64)
        y = model(x, uses[pool.rank()])
        y.backward()
        for rank, used in enumerate(uses):
            for i in used:
                expected[rank, i] += (i + 1) * make_batch(rank, number, F64).sum(0)
        if not local:
            expected[:] = expected.mean(0)
        for layer, gradient in zip(model.module, expected[pool.rank()], strict=True):
            is_used = gradient.any()
            assert_equal(layer.weight.grad, gradient if is_used else None, exact=False)


@pool.on(2)
def test_parameters_that_backward_did_not_reach_are_named_in_the_next_forward():
    model = wrap(Layers(), bucket_cap_mb=TINY)
    x = make_batch(0, 0, F64)
    model.module(x, [1]).backward()  # not through the wrapper: it does not count
    model(x, [0]).backward()
    with torch.no_grad():
        model(x, [0])  # evaluation is no error
    with pytest.raises(RuntimeError, match=r"1\.weight, 2\.weight;"):
        model(x, [0, 1, 2])


@pool.on(2)
def test_a_second_gradient_of_a_parameter_is_an_error():
    model = wrap(Layers(), bucket_cap_mb=TINY)
    loss = model(make_batch(0, 0, F64), [0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        loss.backward()


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return self.weight * x, {"bias": [self.bias * x]}


@dataclasses.dataclass(slots=True)
class Output:
    logits: list


class ReturnsDataclass(nn.Linear):
    def forward(self, x):
        return {"output": Output([super().forward(x)])}


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pool.on(2)
def test_outputs_may_lie_in_dataclasses(find_unused_parameters):
    model = wrap(ReturnsDataclass(1, 1), find_unused_parameters=find_unused_parameters)
    outputs = [model(one_input()), model(one_input())]
    for output in outputs:
        output["output"].logits[0].backward()
    assert model.module.weight.grad.item() == 3


class AttributeDict(dict):
    """Such as those of easydict and munch."""

    __getattr__ = dict.__getitem__


class WithSlots:
    __slots__ = ("mean",)


class ListWithAttribute(list):
    mean = None


def with_attribute(holder, output):
    holder.mean = output
    return holder


def refer_to_itself(output):
    namespace = SimpleNamespace(mean=output)
    namespace.self = namespace
    return namespace


HOLDERS = {  # of an output: (put, take)
    "dict subclass": (lambda y: AttributeDict(y=y), lambda held: held.y),
    "list subclass": (lambda y: type("Outputs", (list,), {})([y]), lambda held: held[0]),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda held: held.mean),
    "namespace": (refer_to_itself, lambda held: held.self.mean),
    "slots": (lambda y: with_attribute(WithSlots(), y), lambda held: held.mean),
    "list's attribute": (lambda y: with_attribute(ListWithAttribute(), y), lambda held: held.mean),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pool.on(2)
def test_two_forwards_may_come_before_two_backwards_whatever_holds_the_outputs(holder):
    put, take = HOLDERS[holder]
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda module, inputs, output: put(output))
    model = wrap(module)
    outputs = [model(one_input()), model(one_input())]
    for output in outputs:
        take(output).sum().backward()
    assert model.module.weight.grad.item() == 3


@pytest.mark.parametrize("with_output", [False, True])
@pool.on(2)
def test_a_penalty_on_the_gradient_of_the_input_is_averaged(with_output):
    """Its loss may miss the outputs. Then backward does not reach the last bias."""
    plain = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = wrap(copy.deepcopy(plain), find_unused_parameters=True)

    def loss(model, rank, step):
        x = make_batch(rank, step, F64).requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        penalty = gradient.square().mean()
        return penalty + output.mean() if with_output else penalty

    for step in range(2):
        model.zero_grad()
        loss(model, pool.rank(), step).backward()
        one_device(plain, [[(0, step)], [(1, step)]], lambda model, batch: loss(model, *batch))
        assert (plain[2].bias.grad is None) != with_output
        assert_same_parameters(model.module, plain, exact=False)


class KeepsLoss(nn.Linear):
    """Its output has no graph. The loss is an attribute, as an auxiliary loss is."""

    def forward(self, x):
        self.loss = (self.weight * x).sum()
        return x


@pool.on(2)
def test_a_loss_that_is_an_attribute_is_averaged():
    model = wrap(KeepsLoss(1, 1), find_unused_parameters=True)
    for _ in range(2):
        model(one_input())
        model.module.loss.backward()
    assert model.module.weight.grad.item() == 3
    assert model.module.bias.grad is None


class BackwardInForward(nn.Linear):
    def forward(self, x):
        (self.weight * x).sum().backward()
        return x


@pool.on(2)
def test_a_backward_inside_the_forward_is_averaged():
    model = wrap(BackwardInForward(1, 1), find_unused_parameters=True)
    model(one_input())
    assert model.module.weight.grad.item() == 1.5


class OwnTeacher(nn.Linear):
    """Its forward calls its wrapper without gradients, as a teacher."""

    wrappers = ()

    def forward(self, x, is_teacher=False):
        if not is_teacher:
            with torch.no_grad():
                self.wrappers[0](x, is_teacher=True)
        return super().forward(x)


@pool.on(2)
def test_a_forward_without_gradients_inside_a_forward_changes_nothing():
    model = wrap(OwnTeacher(1, 1))
    model.module.wrappers = [model]
    outputs = [model(one_input()), model(one_input())]
    for output in outputs:
        output.sum().backward()
    assert model.module.weight.grad.item() == 3


# ---- hooks of users


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pool.on(2)
def test_a_hook_that_is_registered_after_wrapping_changes_what_is_averaged(as_view):
    model = wrap(nn.Linear(2, 1, bias=False), gradient_as_bucket_view=as_view)
    weight = model.module.weight

    def clip(parameter):
        parameter.grad = parameter.grad.clamp(max=3)

    def mask(parameter):
        parameter.grad[0, 1] = 0

    output = model(torch.tensor([[2.0, 2.0]]) * (1 + pool.rank()))
    for hook in (clip, mask):  # even after forward
        weight.register_post_accumulate_grad_hook(hook)
    output.sum().backward()
    assert weight.grad.tolist() == [[2.5, 0]]


@pytest.mark.parametrize("set_to_none", [True, False])
@pool.on(2)
def test_an_optimizer_that_steps_in_a_hook_is_an_error(set_to_none):
    model = wrap(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters())

    def step(parameter):
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    model.module.weight.register_post_accumulate_grad_hook(step)
    loss = model(one_input())
    with pytest.raises(RuntimeError, match="step the optimizer after backward"):
        loss.backward()


@pool.on(2)
def test_two_forwards_may_come_before_their_backwards_of_each_output_even_in_no_sync():
    model = wrap(TwoOutputs(1, 1))
    outputs = [model(one_input()), model(one_input())]
    with model.no_sync():  # only the place of the forward decides
        for left, nested in outputs:
            left.backward()
            nested["bias"][0].backward()
    assert model.module.weight.grad.item() == 3
    assert model.module.bias.grad.item() == 3


@pool.on(2)
def test_functional_call_averages_gradients_of_the_models_parameters_only():
    model = wrap(nn.Linear(1, 1, bias=False))
    own = model.module.weight
    other = nn.Parameter(torch.ones(1, 1))
    for weight in (other, 2 * own):
        torch.func.functional_call(model, {"module.weight": weight}, one_input()).backward()
    assert other.grad.item() == 1 + pool.rank()
    assert own.grad.item() == 3


# ---- buffers


@pool.on(2)
def test_rank_0s_buffers_come_in_the_first_forward_and_in_those_after_one_that_averages():
    """As in PyTorch's class. gloo cannot send int16 as such."""
    module = nn.Linear(1, 1)
    module.register_buffer("buffer", torch.zeros(1, dtype=torch.int16))
    seen = []
    module.register_forward_pre_hook(lambda module, _: seen.append(module.buffer.item()))
    model = wrap(module)

    def forward():
        module.buffer.fill_(pool.rank())
        model(torch.ones(1, 1))

    forward()
    with torch.no_grad():
        forward()
        if pool.rank() == 1:  # alone
            forward()
    forward()
    with model.no_sync():
        forward()
    forward()
    rank = pool.rank()
    assert seen == [0, 0, *[1] * rank, rank, 0, rank]


@pool.on(2)
def test_buffers_stay_apart_without_broadcast_buffers():
    module = make_model("batchnorm")
    module[1].running_mean.fill_(pool.rank())
    model = wrap(module, broadcast_buffers=False).eval()
    backward(model)
    assert module[1].running_mean[0] == pool.rank()


# ---- communication hooks


@pytest.mark.parametrize(
    ("backends", "version", "is_refused"),
    [
        ("cpu:gloo,cuda:gloo", "2.10.0", True),
        ("cpu:gloo,cuda:gloo", "2.11.0", False),
        ("cpu:gloo,cuda:nccl", "2.6.0", False),
    ],
)
def test_a_hook_on_gpus_over_an_old_gloo_is_refused(backends, version, is_refused, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    flat = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(_buckets=[SimpleNamespace(flat=flat)], process_group=None)
    with pytest.raises(RuntimeError, match=r"2\.11") if is_refused else nullcontext():
        ddp.check_comm_hook(model)


@pool.on(2)
def test_a_hook_sees_which_bucket_it_gets():
    model = wrap(nn.Linear(3, 2), bucket_cap_mb=TINY)
    seen = []

    def hook(group, bucket):
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), shapes))
        return default_hooks.allreduce_hook(group, bucket)

    model.register_comm_hook(pool.group(), hook)
    model(torch.ones(1, 3)).sum().backward()
    assert sorted(seen) == [
        (0, False, [(2,)]),
        (1, True, [(2, 3)]),
    ]


@pool.on(2)
def test_powersgd_does_what_it_does_in_pytorchs_class():
    modules = []
    for implementation in (ddp.DDP, TorchDDP):
        module = make_model("plain", F64)
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


# ---- copies and errors


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pool.on(4)  # all, because a process group cannot be copied
def test_a_copy_averages_its_own_gradients(copied):
    plain = make_model("plain", F64)
    original = ddp.DDP(make_model("plain", F64))
    backward(original)
    original.zero_grad()
    model = copied(original)
    for step in range(2):
        backward(model, step)
    backward_on_one_device(plain, 0, 1)
    assert_same_parameters(model.module, plain, exact=False)


@pool.on(4)
def test_a_pickle_may_be_loaded_by_another_number_of_ranks():
    original = ddp.DDP(nn.Linear(1, 1))
    original._divisor = 2  # as if two ranks had made it
    model = pickled(original)
    model(one_input()).backward()
    assert model.module.weight.grad.item() == 2.5


def fill_with_seven(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer().fill_(7))
    return future


@pool.on(4)
def test_a_copy_has_the_communication_hook():
    original = ddp.DDP(nn.Linear(1, 1))
    original.register_comm_hook(None, fill_with_seven)
    model = pickled(original)
    model(one_input()).backward()
    assert model.module.weight.grad.item() == 7


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pool.on(2)
def test_rows_that_forward_shrinks_are_an_error(layer):
    with pytest.raises(ValueError, match=r"max_norm=1.*after the optimizer's step"):
        wrap(nn.Sequential(layer(3, 2, max_norm=1)))


def expanded(x):
    return x[:1].expand(2, 2)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, expanded])
@pool.on(2)
def test_a_sparse_or_expanded_buffer_is_an_error(make):
    module = nn.Linear(2, 2)
    module.register_buffer("mask", make(torch.eye(2)))
    with pytest.raises(ValueError, match="mask is sparse or expanded"):
        wrap(module)


@pool.on(2)
def test_an_error_of_one_rank_is_an_error_on_all():
    with pytest.raises(ValueError, match="dim is not supported"):
        wrap(make_model("plain"), dim=pool.rank())
    module = make_model("plain").requires_grad_(pool.rank() == 0)
    with pytest.raises(ValueError, match=r"grad=False"):
        wrap(module)


@pool.on(2)
def test_a_module_without_gradients_and_a_rank_outside_are_errors():
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
        wrap(make_model("plain").requires_grad_(False))
    group = dist.new_group([0])
    if pool.rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not in process_group"):
            ddp.DDP(make_model("plain"), process_group=group)


@pool.on(3)
def test_a_parameter_that_is_frozen_on_one_rank_is_an_error_on_all():
    model = make_model("plain")
    model[2].bias.requires_grad_(pool.rank() < 2)
    with pytest.raises(ValueError, match=r"bias.*grad=False"):
        wrap(model)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (nn.Module.requires_grad_, "0.bias"),
        (nn.Module.half, "0.weight"),
    ],
)
@pool.on(2)
def test_a_parameter_that_is_unfrozen_or_cast_after_construction_is_an_error(change, name):
    model = wrap(make_model("frozen"))
    change(model)
    with pytest.raises(RuntimeError, match=f"{name} .*again"):
        batch_loss(model, 0, 0)


@pool.on(2)
def test_a_parameter_that_moves_to_another_device_after_construction_is_an_error():
    model = wrap(make_model("plain"))
    for bucket in model._buckets:  # instead of the parameters, because there is no other device
        bucket.flat = bucket.flat.to("meta")
    with pytest.raises(RuntimeError, match=r"0.weight .*again"):
        batch_loss(model, 0, 0)


@pool.on(2)
def test_ranks_that_hold_different_slices_are_no_replicas():
    model = make_model("plain")
    model[0].differ_between_ranks = [0, 2, 3]  # one rank of this group: no error
    model[2].differ_between_ranks = [1, 0, 5]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\].*'2'"):
        wrap(model)


@pytest.mark.parametrize("name", ["bucket_cap_mb", "broadcast_buffers", "find_unused_parameters"])
@pool.on(2)
def test_an_argument_that_decides_what_is_sent_is_the_same_on_all_ranks(name):
    with pytest.raises(ValueError, match=f"rank 1 has .*{name}=.*, rank 0 .*{name}="):
        wrap(make_model("plain"), **{name: pool.rank()})
    sizes = {"bucket_cap_mb": [None, 25][pool.rank()]}  # 25 is the default
    wrap(make_model("plain"), **sizes)


@pytest.mark.parametrize("name", ["dim", "check_reduction", "static_graph", "output_device", "dmi"])
@pool.on(2)
def test_an_argument_that_is_not_supported_is_an_error(name):
    wrap(make_model("plain"), device_ids=[1], output_device=1, static_graph=False)  # defaults
    value = 0 if name == "dmi" else 2  # a misspelled name is an error, whatever its value
    with pytest.raises((ValueError, TypeError), match=name):
        wrap(make_model("plain"), **{name: value})


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


@pool.on(2)
def test_the_flags_of_unused_parameters_are_read_at_once():
    model = wrap(Layers(), find_unused_parameters=True)
    output = model(make_batch(0, 0, F64), [0])
    with Watch(lambda: None) as watch:
        output.backward()
    assert "aten::_local_scalar_dense" not in {operator for operator, _ in watch.seen}
    assert model.module[1].weight.grad is None

"""zero.py against one device, bit by bit. tests/claims has what holds for any such optimizer."""

import contextlib
import copy
import gc
import math
import pickle
from collections import defaultdict
from functools import partial

import pool
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import (
    HOW,
    Blocks,
    Collectives,
    Outer,
    Reader,
    Watch,
    batch_loss,
    fake_world,
    loss_of,
    make_batch,
    make_model,
    randn,
)
from torch.utils.checkpoint import set_checkpoint_early_stop

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)
zero2_and_3 = pytest.mark.parametrize("stage", STAGES[1:])


def assert_bitwise(ours, theirs):
    """Compare whole structures."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def whole(optimizer):
    """A context with whole parameters, which only Zero3 has not always."""
    return getattr(optimizer, "full_parameters", contextlib.nullcontext)()


def plain_model(dtype=torch.float32):
    return make_model("plain", dtype)


def sgd(stage, model, **options):
    return stage(model, torch.optim.SGD, pool.group(), lr=0.1, **options)


def backward(model, step=0, loss=batch_loss):
    here = loss(model, pool.rank(), step)
    here.backward()


def backward_on_one_device(plain, rounds, loss=batch_loss, dtype=None):
    """Leave the mean over ranks in .grad of `plain`, the masters of a model in `dtype`.

    In each round every rank adds up the gradients of these steps before they are reduced.
    """
    plain.zero_grad()
    for steps in rounds:
        for rank in range(pool.world_size()):
            model = copy.deepcopy(plain).to(dtype)
            model.zero_grad()
            for step in steps:
                loss(model, rank, step).backward()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                if q.grad is not None:
                    p.grad = q.grad.to(p.dtype) + (0 if p.grad is None else p.grad)
    for p in plain.parameters():
        if p.grad is not None:
            p.grad /= pool.world_size()


def assert_equal_to_one_device(ours, plain):
    with whole(ours):
        for p, q in zip(ours.module.parameters(), plain.parameters(), strict=True):
            assert_bitwise(p, q.to(p.dtype))


def make_pair(stage, model, name="AdamW", groups=nn.Module.parameters, offload=None, **options):
    """Return our optimizer, and that of one device over `plain`, an equal model."""
    plain = copy.deepcopy(model)
    if next(model.parameters()).itemsize == 2:
        plain.float()
    optimizer_class = getattr(torch.optim, name)
    buckets = {"bucket_cap_mb": 1e-3, "params": groups(model)}
    ours = stage(model, optimizer_class, pool.group(), offload, **buckets, **options)
    return ours, optimizer_class(groups(plain), **options), plain


def train(ours, theirs, plain, loss=batch_loss):
    """Train ours, by closures, and one device for three steps. After each they are equal."""
    dtype = next(ours.module.parameters()).dtype
    for step in range(3):
        closure = partial(backward, ours.module, step, loss)
        ours.step(closure)  # drops the gradients
        backward_on_one_device(plain, [[step]], loss, dtype if dtype.itemsize == 2 else None)
        theirs.step()
        assert_equal_to_one_device(ours, plain)


# ---- The idea


def make_idea(stage, model):
    """Return the model to train and its sharded parameters."""
    if stage is zero.Zero3:
        model = nn.Sequential(*[zero.Zero3Unit(layer, pool.group()) for layer in model])
        return model, [each for unit in model for each in unit.sharded]
    sharded = [zero.ShardedParameter(p, pool.group()) for p in model.parameters()]
    if stage is zero.Zero2:
        zero.zero2_hooks(sharded)
    return model, sharded


@each_stage
@pool.on(3)
def test_the_idea_trains_as_one_device(stage):
    plain = plain_model()
    model, sharded = make_idea(stage, plain_model())
    ours = torch.optim.AdamW([each.shard for each in sharded])
    theirs = torch.optim.AdamW(plain.parameters())
    for step in range(2):
        ours.zero_grad()
        backward(model, step)
        assert all((each.shard.grad is None) == (stage is zero.Zero1) for each in sharded)
        assert (zero.held_bytes(model.parameters()) == 0) == (stage is zero.Zero3)
        if stage is zero.Zero3:
            ours.step()
            for unit in model:
                unit.gather()
        else:
            zero.step(sharded, ours)
        backward_on_one_device(plain, [[step]])
        theirs.step()
        for each, parameter in zip(sharded, plain.parameters(), strict=True):
            assert_bitwise(each.parameter, parameter)
    ours.zero_grad()
    backward(model)
    once = sharded[0].shard.grad
    backward(model)
    assert stage is zero.Zero1 or torch.equal(sharded[0].shard.grad, 2 * once)


@each_stage
@pool.on(2)
def test_zero_grad_drops_gradients_that_backward_left(stage):
    model = plain_model()
    optimizer = sgd(stage, model)
    with whole(optimizer):
        before = copy.deepcopy(model.state_dict())
    backward(model)

    optimizer.zero_grad()
    optimizer.step()

    with whole(optimizer):
        for name, value in model.state_dict().items():
            assert_bitwise(value, before[name])


@pool.on(2)
def test_an_infinite_norm_is_not_nan():
    model = plain_model()
    optimizer = sgd(zero.Zero2, model)
    model[4].bias.register_hook(lambda gradient: gradient + torch.inf)
    backward(model)
    for _ in range(2):
        assert optimizer.clip_grad_norm_(torch.inf).isinf()


# ---- Training


def tied():
    model = Blocks(2)
    model[1].one.weight = model[0].one.weight
    return model


def shared_layer():
    model = Blocks(3)
    model[2].one = model[0].one
    return model


def shared_activation():
    act = nn.GELU()
    model = nn.Sequential(act)
    for _ in range(3):
        unit = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6), act)
        model.append(unit)
    return model


def shared_unit():
    shared = nn.Sequential(nn.Linear(6, 6))
    for _ in range(5):
        shared.append(nn.Tanh())
    model = nn.Sequential()
    for _ in range(3):
        unit = nn.Sequential(nn.Linear(6, 6), shared)
        model.append(unit)
    return model


ODD_MODELS = {
    "a weight of two units": tied,
    "a layer of two units": shared_layer,
    "an activation of all units": shared_activation,
    "a unit of all units": shared_unit,
    "a checkpoint around units": Outer,
    "two dtypes": partial(make_model, "mixed"),
}


@pytest.mark.parametrize("model", ODD_MODELS)
@pool.on(3)
def test_zero3_trains_as_one_device(model):
    train(*make_pair(zero.Zero3, ODD_MODELS[model]()))


def two_groups(model):
    """The last bias is in none."""
    first, second, *others, _ = model.parameters()
    return [{"params": [first, second]}, {"params": others, "weight_decay": 0.9, "lr": 0.05}]


@pytest.mark.parametrize("name", sorted(zero.ELEMENTWISE))
@pool.on(3)
def test_two_groups_of_any_optimizer_and_its_state_are_those_of_one_device(name):
    ours, theirs, plain = make_pair(zero.Zero1, plain_model(), name, two_groups, lr=0.01)
    train(ours, theirs, plain)
    assert_bitwise(ours.state_dict(), theirs.state_dict())


@each_stage
@pool.on(3)
def test_micro_batches_before_and_after_clipping_are_added_as_the_docstring_says(stage):
    model = plain_model()
    ours, theirs, plain = make_pair(stage, model)
    with ours.no_sync():
        with ours.no_sync():
            backward(model, 0)
        backward(model, 1)
    backward(model, 2)
    backward(model, 3)
    ours.clip_grad_norm_(math.inf)
    backward(model, 4)
    norm = ours.clip_grad_norm_(math.inf)
    assert ours.unscale_(1.0) == 0
    ours.step()
    rounds = [[0, 1, 2, 3], [4]] if stage is zero.Zero1 else [[0, 1, 2], [3], [4]]
    backward_on_one_device(plain, rounds)
    theirs.step()
    assert_equal_to_one_device(ours, plain)
    expected = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert norm.item() == pytest.approx(expected.item())


@pool.on(2)
def test_a_model_may_get_another_optimizer():
    model = plain_model()
    sgd(zero.Zero2, model)
    gc.collect()
    train(*make_pair(zero.Zero2, model))


def body_continues(stage, saved, numels):
    """Go on from `saved`, the parameters and the optimizer's state. Return what to go on from."""
    torch.manual_seed(1)
    model = Reader(numels)
    ours, theirs, plain = make_pair(stage, model)
    if saved:
        with whole(ours):
            model.load_state_dict(saved[0])
        plain.load_state_dict(saved[0])
        ours.load_state_dict(saved[1])
        theirs.load_state_dict(copy.deepcopy(saved[1]))
    train(ours, theirs, plain, Reader.__call__)
    assert_bitwise(ours.state_dict(), theirs.state_dict())
    return copy.deepcopy((plain.state_dict(), theirs.state_dict()))


@settings(max_examples=6)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(STAGES)), min_size=2, max_size=2),
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=7),
)
def test_ranks_use_any_parameters_and_other_worlds_continue(worlds, numels):
    saved = None
    for world_size, stage in worlds:
        saved = pool.run(world_size, body_continues, stage, saved, numels)[0]


# ---- What a training script does beside it


def double_in_place(parameter):
    parameter.grad.mul_(2)


def double_by_another_tensor(parameter):
    parameter.grad = parameter.grad * 2


@pytest.mark.parametrize("edit", [double_in_place, double_by_another_tensor])
@each_stage
@pool.on(2)
def test_a_gradient_that_a_later_hook_of_the_user_edits_is_the_one_that_counts(stage, edit):
    model = plain_model()
    ours, theirs, plain = make_pair(stage, model, "SGD", lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(edit)
    theirs.param_groups[0]["lr"] = 0.2  # the gradients of ours are twice as large
    train(ours, theirs, plain)


def forget_one(optimizer):
    last = optimizer.param_groups[0]["params"][-1]
    del optimizer.state[last]


def empty_entries(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {}


def zero_moments(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


RESETS = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "delete": forget_one,
    "empty entries": empty_entries,
    "another dict": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "moments": zero_moments,
}


@pytest.mark.parametrize("reset", RESETS)
@pool.on(2)
def test_state_is_reset_as_that_of_the_plain_optimizer(reset):
    ours, theirs, plain = make_pair(zero.Zero2, plain_model())
    train(ours, theirs, plain)
    for optimizer in (ours, theirs):
        RESETS[reset](optimizer)
    train(ours, theirs, plain)
    assert_bitwise(ours.state_dict(), theirs.state_dict())
    ours.load_state_dict(ours.state_dict())
    for optimizer in (ours, theirs):
        RESETS[reset](optimizer)
    train(ours, theirs, plain)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pool.on(2)
def test_a_copied_model_is_an_ordinary_one(copied):
    model = plain_model()
    ours = sgd(zero.Zero2, model)
    another = copied(model)
    backward(another)
    assert all(parameter.grad is not None for parameter in another.parameters())
    assert ours.clip_grad_norm_(1.0) == 0


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
@each_stage
@pool.on(3)
def test_any_norm_is_clipped_as_by_torch(stage, norm_type):
    model = make_model("odd", torch.float64)
    ours, theirs, plain = make_pair(stage, model, "SGD", lr=0.1)
    for step in range(2):
        backward(model, step)
        backward_on_one_device(plain, [[step]])
        norm = ours.clip_grad_norm_(0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(
            [p for p in plain.parameters() if p.numel()], 0.1, norm_type
        )
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        ours.step()
        theirs.step()
        with whole(ours):
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pool.on(2)
def test_one_ranks_nan_makes_the_norm_nan_on_all(norm_type):
    model = plain_model()
    optimizer = sgd(zero.Zero1, model)
    backward(model)
    if pool.rank() == 1:
        model[0].weight.grad[0, 0] = math.nan
    assert optimizer.clip_grad_norm_(1.0, norm_type).isnan()


def channels_last():
    """A bottleneck, and a depthwise convolution."""
    layers = [nn.Conv2d(6, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 3, 3)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def images_loss(model, rank, step):
    images = randn((2, 6, 5, 5), seed=100 * step + rank, dtype=torch.float32)
    return loss_of(model(images.to(memory_format=torch.channels_last)))


@each_stage
@pool.on(3)
def test_convolutions_in_channels_last(stage):
    torch.manual_seed(1)
    train(*make_pair(stage, channels_last()), images_loss)


LAYOUTS = {
    "every second": lambda: torch.randn(12)[::2],
    "a column": lambda: torch.randn(1, 6).T,
    "a transposed matrix": lambda: torch.randn(1, 6, 1).mT,
    "expanded": lambda: torch.ones(1).expand(6),
    "expanded matrix": lambda: torch.ones(6, 1).expand(6, 4),
    "conjugated": lambda: torch.randn(6, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(6, dtype=torch.complex64).conj().imag,
}


class Keeps(nn.Module):
    """Keeps what `take` makes of its weight, and multiplies by it."""

    def __init__(self, take):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.kept = take(self.layer.weight)


@each_stage
@pytest.mark.parametrize("how", ["transposed", "data", "in a dict"])
@pool.on(2)
def test_a_view_of_a_parameter_that_a_module_keeps_is_an_error(how, stage):
    takes = {
        "transposed": lambda weight: weight.T,
        "data": lambda weight: weight.data,
        "in a dict": lambda weight: {"first": [weight.detach()[0]]},
    }
    with pytest.raises(ValueError, match="kept is a view of a parameter"):
        sgd(stage, Keeps(takes[how]))
    sgd(stage, Keeps(lambda weight: [weight, weight.detach().clone()]))


@pool.on(2)
def test_ranks_of_different_classes_are_an_error():
    """They would issue different collectives."""
    stage = [zero.Zero1, zero.Zero2][pool.rank()]
    with pytest.raises(ValueError, match=r"same buckets.*Zero2"):
        sgd(stage, plain_model())


class AttributeDict(dict):
    """Such as those of easydict. Other attributes are a KeyError."""

    __getattr__ = dict.__getitem__


class WithSlots:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


class ListWithAttribute(list):
    def __init__(self, y):
        super().__init__()
        self.y = y


class Squares(nn.Linear):
    """Its backward first needs the weight, before it reaches the output of nn.Linear."""

    holder = None

    def forward(self, x):
        y = super().forward(x) @ self.weight
        return self.holder(y=y)


class OfSquares(nn.Module):
    def __init__(self, holder):
        super().__init__()
        self.blocks = nn.ModuleList([Squares(6, 6), Squares(6, 6)])
        for block in self.blocks:
            block.holder = holder

    def forward(self, x):
        held = self.blocks[0](x)
        return self.blocks[1](held.y)


@pytest.mark.parametrize("stage", [zero.Zero2, zero.Zero3])
@pytest.mark.parametrize("holder", [AttributeDict, WithSlots, ListWithAttribute])
@pool.on(2)
def test_units_may_return_any_object_that_holds_tensors(holder, stage):
    torch.manual_seed(0)
    model = OfSquares(holder)
    plain = copy.deepcopy(model)
    optimizer = sgd(stage, model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss(model, rank, step):
        x = make_batch(rank, step)
        return model(x).y.sum()

    train(optimizer, theirs, plain, loss)


class Lazy(nn.ModuleList):
    def forward(self, x):
        return (layer(x) for layer in self)


@pool.on(2)
def test_a_module_may_return_an_iterator_over_outputs_of_its_modules():
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    model = nn.Sequential(Lazy(layers))
    plain = copy.deepcopy(model)
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), units=[model[0]], lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss(model, rank, step):
        first, second = model(make_batch(rank, step))
        return (first * second).sum()

    train(optimizer, theirs, plain, loss)


class Holds(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.held = nn.Parameter(tensor)
        self.register_buffer("mask", tensor.detach())

    def forward(self, x):
        weight = self.held.real.reshape(6, -1)
        return x.real @ weight


@pytest.mark.parametrize("layout", LAYOUTS)
@each_stage
@pool.on(2)
def test_parameters_and_buffers_of_any_strides(stage, layout):
    torch.manual_seed(1)
    tensor = LAYOUTS[layout]()
    model = Holds(tensor)
    resolved = tensor.resolve_conj().resolve_neg()
    model_of_one_device = Holds(resolved.clone().contiguous())
    ours = stage(model, torch.optim.AdamW, pool.group(), lr=0.1)
    theirs = torch.optim.AdamW(model_of_one_device.parameters(), lr=0.1)
    train(ours, theirs, model_of_one_device)
    assert torch.equal(model.mask, tensor)


def penalty_loss(model, rank, step):
    """Of WGAN-GP: the norm of the gradient of the input."""
    x = make_batch(rank, step).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


@each_stage
@pool.on(2)
def test_gradients_of_gradients_with_whole_parameters(stage):
    model = plain_model()
    ours, theirs, plain = make_pair(stage, model)
    for step in range(2):
        with whole(ours):
            backward(model, step, penalty_loss)
            ours.step()
        backward_on_one_device(plain, [[step]], penalty_loss)
        theirs.step()
        assert_equal_to_one_device(ours, plain)


# ---- Masters


def large_loss(model, rank, step):
    """The sum of three ranks' fp16 gradients is beyond 65504."""
    output = model(make_batch(rank, step, torch.float16))
    return 16000 * output.square().sum()


def assert_masters_equal(ours, plain):
    state = ours.state_dict()["state"]
    masters = [state[number]["master"] for number in range(len(state))]
    assert_bitwise(masters, [parameter.detach() for parameter in plain.parameters()])


@pytest.mark.parametrize(("stage", "offload"), [(zero.Zero1, None), (zero.Zero3, "cpu")])
@pool.on(3)
def test_16_bit_gradients_are_added_in_fp32_and_update_fp32_masters(stage, offload):
    model = plain_model(torch.float16)
    ours, theirs, plain = make_pair(stage, model, "Adam", lr=0.01, offload=offload)
    train(ours, theirs, plain, large_loss)
    assert_masters_equal(ours, plain)


@pool.on(2)
def test_what_is_written_to_16_bit_parameters_or_loaded_reaches_masters_that_keep_their_digits():
    model = plain_model(torch.bfloat16)
    ours, theirs, plain = make_pair(zero.Zero1, model)
    train(ours, theirs, plain)
    before = ours.state_dict()
    for module in (model, plain):
        module[0].bias.data[:5] = 0.125
    ours.param_groups[0]["lr"] = 0.0
    backward(model)
    ours.step()
    assert_masters_equal(ours, plain)
    ours.load_state_dict(before)
    assert_bitwise(ours.state_dict(), before)


def test_offloaded_masters_of_a_gpu_are_pinned(monkeypatch):
    pinned = []

    def pin_memory(tensor):
        pinned.append(tensor)
        return tensor

    model = plain_model()
    parameters = list(model.parameters())
    with fake_world(2, rank=0), monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_cuda", True)
        patched.setattr(torch.Tensor, "pin_memory", pin_memory)
        zero.Bucket(parameters, None, None)
        assert not pinned
        bucket = zero.Bucket(parameters, None, "cpu")
    assert len(pinned) == 1
    assert pinned[0] is bucket.master


def test_offloaded_masters_are_on_another_device_than_the_parameters():
    model = plain_model()
    parameters = list(model.parameters())
    with fake_world(2, rank=0):
        stays = zero.Bucket(parameters, None, None)
        moves = zero.Bucket(parameters, None, "meta")  # stands for another device
    assert stays.master.device == parameters[0].device
    assert moves.master.is_meta


# ---- Costs


class Costs:
    """Eight layers of two parameters in a world of three ranks, which moves no data."""

    def __init__(self, stage, dtype=torch.float32):
        self.x = torch.randn(4, 64, dtype=dtype)
        layers = [nn.Linear(64, 64, dtype=dtype) for _ in range(8)]
        self.model = nn.Sequential(*layers)
        self.optimizer = stage(self.model, torch.optim.AdamW, bucket_cap_mb=0.01)
        self.flats = [bucket.flat for bucket in self.optimizer._buckets]
        self.psi = sum(flat.nbytes for flat in self.flats)

    def backward(self):
        loss = loss_of(self.model(self.x))
        loss.backward()


@pytest.mark.parametrize(
    ("stage", "dtype", "whole", "sharded", "sent"),  # in bytes over those of the parameters
    [
        (zero.Zero1, torch.float32, 2, 2, 2),
        (zero.Zero1, torch.bfloat16, 2, 6, 2),
        (zero.Zero2, torch.bfloat16, 1, 8, 3),
        (zero.Zero3, torch.bfloat16, 0, 8, 6),
    ],
    ids=str,
)
def test_bytes_of_two_backwards_are_those_of_the_docstring(stage, dtype, whole, sharded, sent):
    with fake_world(3, rank=1):
        costs = Costs(stage, dtype)
        with zero.SentBytes() as found:
            costs.backward()
            costs.backward()
            costs.optimizer.step()
        costs.backward()
    flags = 2 * 16  # all-reduced: a byte for each parameter
    assert found.total == pytest.approx((sent * costs.psi + flags) * 2 / 3)
    held = sum(zero.held_by(costs.optimizer))
    assert abs(held - costs.psi * (whole + sharded / 3)) <= 600


@zero2_and_3
def test_backward_holds_gradients_of_one_layer_and_zero3_parameters_of_one_unit(stage):
    with fake_world(3, rank=0):
        costs = Costs(stage)
        parameters = list(costs.model.parameters())
        gradients = Watch(lambda: sum(p.grad is not None for p in parameters))
        flats = Watch(lambda: zero.held_bytes(costs.flats))
        with gradients, flats:
            costs.backward()
    assert max(count for _, count in gradients.seen) == 2
    share = 1 / 8 if stage is zero.Zero3 else 1
    assert max(held for _, held in flats.seen) == share * costs.psi


class Notes(nn.GELU):
    """Notes how many bytes of parameters are whole while it runs, forward and backward."""

    def forward(self, x):
        x.register_hook(lambda _: self.note())
        self.note()
        return super().forward(x)

    def note(self):
        self.noted.append(zero.held_bytes(self.flats))


@pytest.mark.parametrize("wrap", [lambda act: act, nn.Sequential], ids=["alone", "in a list"])
def test_an_activation_that_all_units_share_does_not_gather_them(wrap):
    act = Notes()
    act.noted = []
    model = nn.Sequential()
    for _ in range(4):
        unit = nn.Sequential(nn.Linear(64, 64), wrap(act), nn.Linear(64, 64))
        model.append(unit)
    with fake_world(3, rank=0):
        optimizer = zero.Zero3(model, torch.optim.SGD, units=list(model), lr=0.1)
        act.flats = [bucket.flat for bucket in optimizer._buckets]
        psi = sum(bucket.flat.nbytes for bucket in optimizer._buckets)
        loss = loss_of(model(torch.randn(4, 64)))
        loss.backward()
    assert act.noted == [psi / 4] * 8


@pytest.mark.parametrize("how", ["checkpointed", "reentrant"])
@zero2_and_3
@pool.on(2)
def test_each_bucket_is_reduced_once_in_a_backward(stage, how):
    model = Blocks(4)
    optimizer = sgd(stage, model, bucket_cap_mb=1e-4)
    x = make_batch(pool.rank(), 0).requires_grad_()
    loss = loss_of(model(x, how=HOW[how]))
    with Collectives() as seen:
        loss.backward()
    names = [name for name, _ in seen.calls]
    assert names.count("alltoall_base_") == len(optimizer._buckets)


@zero2_and_3
@pool.on(2)
def test_a_checkpoint_around_units_leaves_no_gradient_whole(stage):
    model = Outer()
    _optimizer = sgd(stage, model)
    backward(model)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- Zero3


@pool.on(3)
def test_ranks_may_use_different_members_of_a_list_that_is_a_unit():
    def loss(model, rank, step):
        x = model[0](make_batch(rank, step))
        x = model[1](x.tanh(), which=range(rank + 1))
        return loss_of(model[2](x))

    model = nn.Sequential(nn.Linear(6, 6), Blocks(3), nn.Linear(3, 3))
    train(*make_pair(partial(zero.Zero3, units=list(model)), model), loss)


class Droppable(nn.Linear):
    def forward(self, x, is_dropped):
        return x * 1 if is_dropped else super().forward(x).tanh()


class Drops(nn.Sequential):
    """Four layers. One does not use its parameters, and runs nevertheless."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(*[Droppable(6, 6) for _ in range(4)])

    def forward(self, x, dropped, how):
        for number, layer in enumerate(self):
            x = how(partial(layer, is_dropped=number == dropped), x)
        return x


def drops_loss(how, model, rank, step):
    """Each rank drops another layer."""
    x = make_batch(rank, step).requires_grad_()
    return loss_of(model(x, 1 + (rank + step) % 3, how))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("how", HOW)
@zero2_and_3
@pool.on(3)
def test_ranks_may_drop_different_layers_inside_their_units(stage, how, name):
    train(*make_pair(stage, Drops(), name, lr=0.1), partial(drops_loss, HOW[how]))


@pytest.mark.parametrize("how", HOW)
@pool.on(3)
def test_ranks_drop_different_layers_in_two_backwards_of_a_step(how):
    loss = partial(drops_loss, HOW[how])
    model = Drops()
    ours, theirs, plain = make_pair(zero.Zero3, model)
    with ours.no_sync():
        backward(model, 0, loss)
    backward(model, 1, loss)
    backward(model, 2, loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    ours.step()
    backward_on_one_device(plain, [[0, 1], [2]], loss)
    theirs.step()
    assert_equal_to_one_device(ours, plain)


def drops_in_one_checkpoint(model, rank, step):
    x = make_batch(rank, step).requires_grad_()
    run = partial(model, dropped=(rank + step) % 4, how=HOW["plainly"])
    return loss_of(HOW["reentrant"](run, x))


@pool.on(3)
def test_ranks_drop_different_layers_in_a_checkpoint_around_all_units():
    train(*make_pair(zero.Zero3, Drops()), drops_in_one_checkpoint)


@pytest.mark.parametrize("how", HOW)
@pool.on(2)
def test_a_checkpoint_around_the_whole_model_may_run_to_its_end(how):
    def loss(model, rank, step):
        x = make_batch(rank, step).requires_grad_()
        with set_checkpoint_early_stop(False):
            return loss_of(HOW[how](model, x))

    train(*make_pair(zero.Zero3, Blocks(3)), loss)


def twice_loss(model, rank, step):
    x = model[0](make_batch(rank, step))
    for number in (1, 2, 1):
        x = model[number](x).tanh()
    return loss_of(model[3](x))


@pytest.mark.parametrize("frozen", [None, 1, 2])
@pool.on(3)
def test_a_unit_that_runs_twice_leaves_no_gradient_whole(frozen):
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    if frozen:
        model[frozen].requires_grad_(False)
    ours, theirs, plain = make_pair(zero.Zero3, model)
    backward(model, 0, twice_loss)
    backward(model, 1, twice_loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    ours.step()
    backward_on_one_device(plain, [[0], [1]], twice_loss)
    theirs.step()
    assert_equal_to_one_device(ours, plain)


@pool.on(2)
def test_after_no_sync_a_unit_that_ran_twice_is_added_as_the_docstring_says():
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    ours, theirs, plain = make_pair(zero.Zero3, model)
    with ours.no_sync():
        backward(model, 0, twice_loss)
    backward(model, 1, twice_loss)
    ours.step()
    backward_on_one_device(plain, [[0], [1]], twice_loss)
    gradients = [parameter.grad for parameter in plain[1].parameters()]
    backward_on_one_device(plain, [[0, 1]], twice_loss)
    for parameter, gradient in zip(plain[1].parameters(), gradients, strict=True):
        parameter.grad = gradient
    theirs.step()
    assert_equal_to_one_device(ours, plain)


class Scaled(nn.Sequential):
    """Its own parameter is smaller than those of its layers. It returns the output, changed."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, change=lambda y: y):
        return change(super().forward(x * self.scale))


CHANGES = {
    "cut": lambda y: y[:, :3],
    "times 1": lambda y: y * 1,
    "more than once": lambda y: y.tanh() + y,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("depth", [1, 3])
@pool.on(2)
def test_one_rank_changes_the_output_of_the_last_unit_and_another_returns_it(depth, change):
    def loss(model, rank, step):
        x = make_batch(rank, step)
        return loss_of(model(x, CHANGES[change]) if rank == step % 2 else model(x))

    torch.manual_seed(1)
    model = nn.Linear(6, 6)
    for number in range(depth):
        model = Scaled(*[nn.Linear(6, 6) for _ in range(number + 1)], model)
    train(*make_pair(zero.Zero3, model), loss)


@pool.on(2)
def test_a_module_inside_a_unit_runs_alone_and_a_step_updates_what_it_gathered():
    model = Blocks(3)
    ours, theirs, plain = make_pair(zero.Zero3, model)
    x = make_batch(0, 0)
    backward(model)
    backward_on_one_device(plain, [[0]])
    assert_bitwise(model[0].one(x), plain[0].one(x))  # stays whole until another unit runs
    ours.step()
    theirs.step()
    assert_bitwise(model[0].one(x), plain[0].one(x))


@pool.on(2)
def test_in_full_parameters_the_model_is_an_ordinary_one():
    model = plain_model()
    optimizer = sgd(zero.Zero3, model)
    with optimizer.full_parameters():
        backward(model)
        optimizer.step()
        nn.init.ones_(model[0].bias)
        stepped = copy.deepcopy(model.state_dict())
    assert model[0].weight.isnan().all()
    assert_bitwise(optimizer.module_state_dict(), stepped)


@pool.on(2)
def test_full_parameters_inside_full_parameters_frees_nothing():
    model = plain_model()
    optimizer = sgd(zero.Zero3, model)
    with optimizer.full_parameters():
        optimizer.module_state_dict()
        assert not model[0].weight.isnan().any()
    assert model[0].weight.isnan().all()


@pool.on(2)
def test_a_freed_model_may_be_asked_moved_to_where_it_is_and_have_a_gradient_of_nan():
    model = plain_model()
    optimizer = sgd(zero.Zero3, model)
    weight = model[0].weight
    assert weight.shape == (33, 6)
    assert torch.zeros_like(weight).sum() == weight.new_zeros(2).sum() == 0
    model.to(weight.device, torch.float32).requires_grad_(True)
    with optimizer.no_sync():
        backward(model)
    assert not weight.grad.isnan().any()
    weight.grad.fill_(math.nan)
    assert weight.grad.isnan().all()


# ---- Wrong use


@pool.on(2)
def test_split_layers_that_are_not_trained_keep_their_values():
    model = plain_model()
    model[0].differ_between_ranks = [1, 7]  # only one of them is in the group
    model[4].differ_between_ranks = [0, 1]
    model[4].bias.data.fill_(pool.rank())
    sgd(zero.Zero1, model, params=model[:4].parameters())
    assert model[4].bias.eq(pool.rank()).all()


def other_shapes():
    rows = 4 + pool.rank()
    sgd(zero.Zero1, nn.Linear(6, rows))


def ranks_differ(option, values):
    options = {option: values[pool.rank()]}
    sgd(zero.Zero1, plain_model(), **options)


def split_layers():
    model = plain_model()
    model[0].differ_between_ranks = [0, 1, 7]
    sgd(zero.Zero1, model)


def inside_ddp():
    model = nn.parallel.DistributedDataParallel(plain_model(), process_group=pool.group())
    sgd(zero.Zero1, model)


def pieces_of_permuted_parameters():
    optimizer = sgd(zero.Zero1, make_model("odd"))
    list(optimizer.shards())


def moved_parameters(stage):
    model = plain_model()
    optimizer = sgd(stage, model)
    model.double()
    optimizer.step(partial(backward, model))


def a_group_added_later():
    optimizer = sgd(zero.Zero1, plain_model())
    optimizer.add_param_group({"params": nn.Linear(6, 6).weight})


def unit_of_another_model():
    sgd(zero.Zero3, plain_model(), units=[nn.Linear(6, 6)])


def step_after_an_error():
    model = plain_model()
    optimizer = sgd(zero.Zero2, model)
    model[0].bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    optimizer.step()


def copied(stage, copy_it):
    copy_it(sgd(stage, plain_model()))


def rows_of_limited_norm(stage, kind):
    sgd(stage, nn.Sequential(kind(4, 3, max_norm=1.0)))


def sparse_buffer():
    model = plain_model()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    sgd(zero.Zero1, model)


def no_norm():
    model = plain_model()
    optimizer = sgd(zero.Zero1, model)
    backward(model)
    optimizer.clip_grad_norm_(1.0, 0)


def penalty_while_parameters_are_freed():
    model = plain_model()
    _optimizer = sgd(zero.Zero3, model)
    backward(model, loss=penalty_loss)


class Reads(nn.Sequential):
    def forward(self, x):
        return F.linear(x, self[0].weight)


def freed(use):
    model = Reads(nn.Linear(6, 6), nn.Linear(6, 1))
    _optimizer = sgd(zero.Zero3, model)
    use(model)


def initialize(model):
    nn.init.normal_(model[0].weight)


def make_identity(model):
    nn.init.eye_(model[0].weight)  # calls torch.eye(out=)


def zero_one_number(model):
    nn.init.zeros_(model[1].bias)


def norms(model):
    return torch._foreach_norm(list(model.parameters()))


def average(model):
    return model[0].weight.data.lerp(torch.ones(1), 0.1)


def hidden_output():
    """Zero3 cannot look into a function. Backward then reads a freed weight."""
    model = OfSquares(lambda y: lambda: y)
    model.forward = model.blocks[1].forward
    _optimizer = sgd(zero.Zero3, model)
    output = model(make_batch(0, 0))
    output().sum().backward()


def returns_an_iterator():
    model = nn.Linear(6, 6)
    model.register_forward_hook(lambda module, args, output: iter([output]))
    _optimizer = sgd(zero.Zero3, model)
    model(make_batch(0, 0))


REFUSED = {
    "other shapes": (other_shapes, "shape"),
    "other options": (partial(ranks_differ, "weight_decay", [0, 1]), "weight_decay"),
    "other buckets": (partial(ranks_differ, "bucket_cap_mb", [0, 1]), "buckets of"),
    "split layers": (split_layers, "different values"),
    "whole matrices": (partial(make_pair, zero.Zero1, plain_model(), "LBFGS"), "LBFGS"),
    "inside DDP": (inside_ddp, "ddp.module"),
    "pieces of permuted parameters": (pieces_of_permuted_parameters, r"transposed .*\(6, 5\)"),
    "moved": (partial(moved_parameters, zero.Zero1), "module.to"),
    "moved while freed": (partial(moved_parameters, zero.Zero3), "module.to"),
    "a group added later": (a_group_added_later, "to the constructor"),
    "a unit of another model": (unit_of_another_model, "not inside"),
    "a step after an error": (step_after_an_error, "backward"),
    "freed and saved": (partial(freed, nn.Module.state_dict), "module_state_dict"),
    "freed and copied": (partial(freed, copy.deepcopy), "full_parameters"),
    "freed and loaded": (
        partial(freed, partial(nn.Module.load_state_dict, state_dict={})),
        "full_parameters",
    ),
    "rows of limited norm": (partial(rows_of_limited_norm, zero.Zero1, nn.Embedding), "max_norm"),
    "bags of limited norm": (
        partial(rows_of_limited_norm, zero.Zero3, nn.EmbeddingBag),
        "max_norm",
    ),
    "a sparse buffer": (sparse_buffer, "adjacency.to_dense"),
    "a norm of type 0": (no_norm, "norm_type"),
    "a deep copy": (partial(copied, zero.Zero1, copy.deepcopy), "state_dict"),
    "a pickle": (partial(copied, zero.Zero3, pickle.dumps), "state_dict"),
    "gradients of gradients": (penalty_while_parameters_are_freed, "full_parameters"),
    "freed and initialized": (partial(freed, initialize), "full_parameters"),
    "freed and made the identity": (partial(freed, make_identity), "full_parameters"),
    "freed and zeroed": (partial(freed, zero_one_number), "full_parameters"),
    "freed and pickled": (partial(freed, pickle.dumps), "full_parameters"),
    "freed and measured": (partial(freed, norms), "full_parameters"),
    "freed and averaged": (partial(freed, average), "full_parameters"),
    "freed and read": (partial(freed, backward), "linear.* NaN"),
    "a hidden output": (hidden_output, "NaN"),
    "an iterator": (returns_an_iterator, "Linear returns an iterator"),
}


@pytest.mark.parametrize(("use", "word"), REFUSED.values(), ids=REFUSED)
@pool.on(2)
def test_what_would_be_wrong_silently_is_refused(use, word):
    with pytest.raises((ValueError, RuntimeError, TypeError), match=word):
        use()

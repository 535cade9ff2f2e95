"""fsdp.py against one device, bit by bit. tests/claims has what holds for any fully_shard."""

import copy
import dataclasses
import types
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.training import one_device
from shared import (
    HOW,
    Block,
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
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import checkpoint
import fsdp

assert_equal = partial(
    torch.testing.assert_close, rtol=0, atol=0, equal_nan=True, check_device=False
)


def fully_shard(module, **options):
    return fsdp.fully_shard(module, process_group=pool.group(), **options)


def make_units(model, **options):
    """Units: each layer that has parameters but the last, and the model; in a layer the same."""
    if isinstance(model, nn.Sequential):
        for layer in list(model)[:-1]:
            if list(layer.parameters()):
                make_units(layer, **options)
    return fully_shard(model, **options)


def blocks(reshard=True):
    """Return a sharded model of blocks, and the plain one."""
    plain = Blocks()
    return make_units(copy.deepcopy(plain), reshard_after_forward=reshard), plain


def groups_of(model):
    return [group for unit in fsdp.units_of(model) for group in unit.groups]


def held(tensors):
    return fsdp.held_bytes([tensor for tensor in tensors if tensor is not None])


def assert_at_rest(model):
    """The modules have shards, and nothing is left of a forward or a backward."""
    for group in groups_of(model):
        buffers = [group.unsharded, group.gradients, group.received]
        assert held(buffers) == 0
        for parameter in group.parameters:
            assert parameter.unsharded.grad is None
    for shard in model.parameters():
        assert shard.numel() == shard.shape[-1]


def shards_and_wholes(ours, plain):
    return zip(ours.parameters(), plain.parameters(), strict=True)


def assert_same_state(ours, plain):
    state = fsdp.full_state_dict(ours)
    assert_equal(state, dict(plain.state_dict()))


def assert_same_gradients(ours, plain):
    """A rank that has no element of a parameter cannot tell whether other ranks use it."""
    for shard, whole in shards_and_wholes(ours, plain):
        assert shard.dim() == max(whole.dim(), 1)  # many scripts decay what has two dimensions
        if whole.grad is None:
            assert shard.grad is None
        elif shard.numel():
            expected = fsdp.shard_of(shard._sharded_parameter, whole.grad)
            assert_equal(shard.grad, expected)


def backward(model, number=0, loss=batch_loss):
    """Of this rank's micro-batch of that number."""
    value = loss(model, pool.rank(), number)
    value.backward()


def on_one_device(plain, numbers=(0,), loss=batch_loss):
    """Leave the mean over ranks in .grad. Each rank first adds up those of its micro-batches."""
    ranks = range(pool.world_size())
    batches = [[(rank, number) for number in numbers] for rank in ranks]
    one_device(plain, batches, lambda model, batch: loss(model, *batch))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(ours, plain, loss=batch_loss, steps=3, micro_batches=1, optimizers=None):
    """Train both with AdamW, and compare gradients and weights. Return what was sent.

    All micro-batches of a step but the last run in no_sync().
    """
    optimizers = optimizers or (adamw(ours), adamw(plain))
    with Collectives() as sent:
        for step in range(steps):
            first = step * micro_batches
            numbers = range(first, first + micro_batches)
            optimizers[0].zero_grad()
            with fsdp.no_sync(ours):
                for number in numbers[:-1]:
                    backward(ours, number, loss)
            backward(ours, numbers[-1], loss)
            assert_at_rest(ours)
            on_one_device(plain, numbers, loss)
            assert_same_gradients(ours, plain)
            for optimizer in optimizers:
                optimizer.step()
    assert_same_state(ours, plain)
    return sent


def sent_by_a_rank(seen):
    """Bytes of gathers, and of reductions, in a world of two: half of each is of the other rank."""
    gathered = seen.bytes_of("_allgather_base_") / 2
    reduced = seen.bytes_of("alltoall_base_") / 2
    return gathered, reduced


@pool.on(3)
def test_the_idea_pads_shards_and_has_the_gradients_of_one_device():
    plain = make_model("plain")
    ours = copy.deepcopy(plain)
    forward = fsdp.naive_fully_shard(ours, pool.group())
    y = forward(make_batch(pool.rank(), 0))
    loss_of(y).backward()

    on_one_device(plain)
    for shard, whole in shards_and_wholes(ours, plain):
        gathered = fsdp.AllGather.apply(shard.grad, pool.group())
        assert_equal(gathered[: whole.numel()].view_as(whole), whole.grad)


# ---- How units are called. Each loss is of a rank's micro-batch n.


def calls(model, rank, n, units=(None,), how="plainly"):
    """The loss of a forward that calls the blocks in units[n]."""
    x = make_batch(rank, n).requires_grad_()
    which = units[n % len(units)]
    y = model(x, which, HOW[how])
    return loss_of(y)


def frozen_in_turns(model, rank, n):
    """The first block is always frozen. The halves of the others are frozen in turns."""
    model[0].requires_grad_(False)
    for block in list(model)[1:4]:
        block.one.requires_grad_(n < 2)
        block.two.requires_grad_(n >= 2)
    return batch_loss(model, rank, n)


LOSSES = {
    "calls other units": partial(calls, units=[[0, 2, 3], [0, 2], [3, 2, 1, 0], []]),
    "trains other parameters": frozen_in_turns,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pool.on(2)
def test_what_a_model_calls_and_trains_may_change(loss, reshard):
    ours, plain = blocks(reshard)
    train(ours, plain, LOSSES[loss], steps=2, micro_batches=2)


@pytest.mark.parametrize(
    ("how", "reshard"),
    [("plainly", False), ("checkpointed", True), ("reentrant", True)],
)
@pool.on(2)
def test_a_unit_is_gathered_once_a_pass_and_reduced_once_a_step(how, reshard):
    ours, plain = blocks(reshard)
    size = held(ours.parameters())

    loss = partial(calls, how=how)
    seen = train(ours, plain, loss, steps=1, micro_batches=2)

    passes = 2 if reshard else 1  # that gather, of each of two micro-batches
    assert sent_by_a_rank(seen) == (2 * passes * size, size)


@pool.on(2)
def test_two_forwards_before_two_backwards_gather_once_in_keep_unsharded():
    ours, plain = blocks()
    size = held(ours.parameters())
    with Collectives() as seen, fsdp.keep_unsharded(ours):
        first = batch_loss(ours, pool.rank(), 0)
        second = batch_loss(ours, pool.rank(), 1)
        with fsdp.no_sync(ours):
            first.backward()
        second.backward()

    assert sent_by_a_rank(seen) == (size, size)
    assert_at_rest(ours)
    on_one_device(plain, [0, 1])
    assert_same_gradients(ours, plain)


@pool.on(2)
def test_after_a_forward_that_raised_a_state_dict_is_loaded_and_training_goes_on():
    ours, plain = blocks()
    train(ours, plain, steps=1)
    with torch.no_grad(), pytest.raises(IndexError):
        ours(make_batch(0, 0), [0, 1, 9])  # no such block
    plain[0].one.weight.data += 1
    ours.load_state_dict(plain.state_dict())
    train(ours, plain, steps=1)


@pytest.mark.parametrize("is_model", [False, True], ids=["layers", "model"])
@pool.on(2)
def test_compiled_modules_have_the_gradients_of_one_device(is_model):
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    ours = copy.deepcopy(plain)
    for module in [ours] if is_model else ours:
        module.compile(backend="eager")
    make_units(ours)
    for number in range(2):  # not in a dispatch mode, which would end compilation
        backward(ours, number)
        on_one_device(plain, [number])
        assert_same_gradients(ours, plain)
        ours.zero_grad()
        plain.zero_grad()


# ---- Accumulation


def clear_by_hand(model, _):
    for shard in model.parameters():
        shard.grad = None


CLEAR = {
    "the optimizer, to None": lambda model, optimizer: optimizer.zero_grad(),
    "the optimizer, to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "the module": lambda model, optimizer: model.zero_grad(),
    "hand": clear_by_hand,
    "one layer": lambda model, optimizer: model[0].zero_grad(),
}


@pytest.mark.parametrize("how", CLEAR)
@pytest.mark.parametrize("is_before", [True, False], ids=["before forward", "before backward"])
@pool.on(2)
def test_gradients_of_no_sync_that_are_cleared_do_not_come_back(is_before, how):
    ours, plain = blocks()
    optimizer = adamw(ours)
    with fsdp.no_sync(ours):
        backward(ours, 0)
    if is_before:
        CLEAR[how](ours, optimizer)
    loss = batch_loss(ours, pool.rank(), 1)
    if not is_before:
        CLEAR[how](ours, optimizer)
    loss.backward()

    both = copy.deepcopy(plain)
    on_one_device(both, [0, 1])
    on_one_device(plain, [1])
    if how == "one layer":  # the others keep both
        plain = nn.Sequential(plain[0], *list(both)[1:])
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("is_cleared", [False, True])
@pool.on(2)
def test_gradients_of_no_sync_join_those_that_were_sent_before(is_cleared):
    ours, plain = blocks()
    backward(ours, 0)
    with fsdp.no_sync(ours):
        backward(ours, 1)
    if is_cleared:
        ours.zero_grad(set_to_none=False)
    backward(ours, 2)

    on_one_device(plain, [2] if is_cleared else [0, 1, 2])
    for shard, whole in shards_and_wholes(ours, plain):
        expected = fsdp.shard_of(shard._sharded_parameter, whole.grad)
        torch.testing.assert_close(shard.grad, expected)


@pool.on(2)
def test_clipping_before_the_last_backward_is_an_error():
    layer = fully_shard(nn.Linear(6, 64, bias=False))
    with fsdp.no_sync(layer):
        backward(layer)
    fsdp.clip_grad_norm_(layer, 1.0)
    with pytest.raises(RuntimeError, match=r"no_sync.* clip or unscale after"):
        backward(layer)


# ---- Autocast


def forward_without_grad_first(model, rank, n):
    """As self-conditioning does, in one autocast."""
    with torch.autocast(pool.device().type, torch.bfloat16):
        with torch.no_grad():
            batch_loss(model, rank, n)
        return batch_loss(model, rank, n)


def two_micro_batches(model, rank, n):
    with torch.autocast(pool.device().type, torch.bfloat16):
        batch_loss(model, rank, n + 1).backward()
        return batch_loss(model, rank, n)


FIRST_WITHOUT_GRAD = pytest.param(
    forward_without_grad_first,
    marks=pytest.mark.skipif(torch.__version__ < "2.7", reason="one device fails with torch 2.6"),
)


@pytest.mark.parametrize("loss", [FIRST_WITHOUT_GRAD, two_micro_batches])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pool.on(2)
def test_forwards_in_one_autocast_train_as_on_one_device(loss, reshard):
    """One device adds up the gradients of a weight that autocast has cached in 16 bits."""
    ours, plain = blocks(reshard)
    backward(ours, loss=loss)
    on_one_device(plain, loss=loss)
    for shard, whole in shards_and_wholes(ours, plain):
        expected = fsdp.shard_of(shard._sharded_parameter, whole.grad)
        torch.testing.assert_close(shard.grad, expected, rtol=0.02, atol=1e-3)


@pool.on(2)
def test_autocast_keeps_no_copies_of_weights_after_a_forward():
    ours, _ = blocks()
    with torch.autocast(pool.device().type, torch.bfloat16), torch.no_grad():
        ours(make_batch(0, 0))
        before = fsdp.full_state_dict(ours)["0.one.weight"]
        for shard in ours.parameters():
            shard.zero_()
        after = ours(make_batch(0, 0))
    assert before.any()
    assert not after.any()


# ---- Copies of shards


class Biased(nn.Linear):
    """Uses its bias on rank 0 only. The last rank of its group has the bias."""

    def forward(self, x):
        product = x @ self.weight.T
        return product if pool.rank() else product + self.bias


@pool.on(4)
def test_copies_that_do_not_use_a_parameter_get_the_gradient_of_those_that_do():
    layer = Biased(64, 1)
    nn.init.constant_(layer.bias, pool.rank() + 7)
    mesh = init_device_mesh(pool.device().type, (2, 2))
    replicate_group, process_group = mesh.get_all_groups()
    options = {"process_group": process_group, "replicate_group": replicate_group}
    fsdp.fully_shard(layer, gradient_divide_factor=2.0, **options)
    layer(torch.ones(1, 64)).backward()

    assert layer.bias.numel() == pool.rank() % 2
    if layer.bias.numel():
        assert layer.bias.item() == 7  # that of rank 0
        assert layer.bias.grad.item() == 1 / 2


# ---- Models, and checkpoints of them


def of_all_kinds():
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean.fill_(pool.world_size())
    tied = make_model("tied")
    tied.second.bias.requires_grad_(False)
    odd = make_model("odd")
    transposed = odd.transposed.detach()
    odd.transposed = nn.Parameter(transposed.contiguous())  # shards() refuses others
    return nn.Sequential(Block(), norm, tied, odd)


reader = partial(Reader, [6, 1, 40, 3, 1, 17])
MODELS = {
    "all kinds": (of_all_kinds, batch_loss),
    "two dtypes in one unit": (partial(make_model, "mixed"), batch_loss),
    "outputs of every kind, nested units": (Outer, batch_loss),
    "used by some ranks": (reader, Reader.__call__),
}


def pieces_of(model, optimizer):
    """Return this rank's part of a checkpoint."""
    shards = fsdp.shards(model, optimizer)
    return checkpoint.shard_pieces(shards) | dict(model.named_buffers())


def body_go_on(model, folder, plain_states):
    """Load the checkpoint if there are states of the plain run, train both, and save."""
    make, loss = MODELS[model]
    plain = make()
    ours = copy.deepcopy(plain)
    make_units(ours, reshard_after_forward=pool.world_size() > 3)
    optimizers = adamw(ours), adamw(plain)
    if plain_states:
        model_state, optimizer_state = copy.deepcopy(plain_states)  # the pool's workers share it
        plain.load_state_dict(model_state)
        optimizers[1].load_state_dict(optimizer_state)
        for shard, whole in shards_and_wholes(ours, plain):
            if whole in optimizers[1].state:
                shard.grad = torch.zeros_like(shard)
        optimizers[0].step()  # makes the state that is then loaded
        pieces = pieces_of(ours, optimizers[0])
        checkpoint.load(folder, pieces, process_group=pool.group())
    train(ours, plain, loss, optimizers=optimizers)
    pieces = pieces_of(ours, optimizers[0])
    checkpoint.save(folder, pieces, process_group=pool.group())
    return plain.state_dict(), optimizers[1].state_dict()


@pytest.mark.parametrize("model", MODELS)
def test_models_train_in_any_world_and_go_on_from_a_checkpoint_in_another(model, tmp_path):
    plain_states = None
    for N in (4, 3, 1):
        states = pool.run(N, body_go_on, model, tmp_path, plain_states)
        plain_states = states[0]


@pool.on(2)
def test_a_model_on_the_meta_device_starts_as_rank_0_initializes_it_one_block_after_another():
    with torch.device("meta"):
        model = Blocks(5)
    torch.manual_seed(0)
    plain = copy.deepcopy(model).to_empty(device=pool.device())
    for module in plain.modules():
        getattr(module, "reset_parameters", int)()

    def bytes_held():
        whole = [p for p in model.parameters() if not hasattr(p, "_sharded_parameter")]
        return held([parameter for parameter in whole if not parameter.is_meta])

    torch.manual_seed(pool.rank())
    with Watch(bytes_held) as watch:
        make_units(model)

    assert_same_state(model, plain)
    largest = held(Block().parameters())
    most = max(size for _, size in watch.seen)
    assert largest <= most <= 2 * largest


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


@dataclasses.dataclass(slots=True)
class Slots:
    y: torch.Tensor


HOLDERS = {
    "dict subclass": lambda y: AttributeDict(y=y),
    "slots": Slots,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pool.on(2)
def test_outputs_may_lie_in_subclasses_of_containers_and_in_dataclasses_with_slots(holder):
    class Holds(Block):
        def forward(self, x):
            return HOLDERS[holder](super().forward(x))

    def loss(model, rank, step):
        return model(make_batch(rank, step)).y.square().mean()

    plain = Holds()
    ours = copy.deepcopy(plain)
    fully_shard(ours.one)
    fully_shard(ours)
    train(ours, plain, loss)


class Hides(Block):
    """Hides a tensor whose backward reads the freed weight, and one whose backward does not."""

    def forward(self, x):
        without = x.detach() @ self.one.weight.T
        return types.SimpleNamespace(hidden=[self.one(x), without])


@pool.on(2)
def test_backward_from_a_hidden_tensor_is_an_error():
    unit = fully_shard(Hides().requires_grad_(False))
    unit.requires_grad_()  # unfrozen later, it is watched as well
    other = unit(make_batch(0, 0).requires_grad_())
    for tensor in other.hidden:
        total = tensor.sum()
        with pytest.raises(RuntimeError, match="hidden"):
            total.backward()


# ---- Dtypes


@pool.on(2)
def test_the_norm_of_fp16_gradients_does_not_overflow():
    """Neither does their sum over ranks, nor a square. Rank 1 has no elements."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.half)
    fully_shard(layer)
    x = torch.tensor([40000.0], dtype=torch.half)
    layer(x).backward()
    norm = fsdp.clip_grad_norm_(layer, 20000.0)
    assert norm == 40000.0
    if pool.rank() == 0:
        assert layer.weight.grad.item() == 20000.0


@pytest.mark.parametrize("norm_type", [1, 2.0, 3, "inf", torch.inf])
@pool.on(3)
def test_clipping_by_any_norm_of_pytorchs_needs_one_collective_for_each_process_group(norm_type):
    """Each layer is a unit, and has another dtype."""
    plain = nn.Sequential(nn.Linear(1, 3, dtype=torch.cdouble), nn.Linear(4, 4).double())
    ours = copy.deepcopy(plain)
    fully_shard(ours[0])
    fully_shard(ours[1])
    for shard, whole in shards_and_wholes(ours, plain):
        whole.grad = whole.detach().clone()
        shard.grad = shard.detach().clone()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    with Collectives() as seen:
        norm = fsdp.clip_grad_norm_(ours, 0.1, norm_type)

    assert [name for name, _ in seen.calls] == ["_allgather_base_"]
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for shard, whole in shards_and_wholes(ours, plain):
        whole_shard = fsdp.shard_of(shard._sharded_parameter, whole.grad)
        torch.testing.assert_close(shard.grad, whole_shard, rtol=1e-12, atol=0)


@pool.on(2)
def test_a_nan_on_one_rank_makes_the_norm_nan_on_every_rank():
    layer = fully_shard(nn.Linear(40, 1))
    for shard in layer.parameters():
        shard.grad = torch.ones_like(shard)
    if pool.rank():  # which has no element of the weight
        layer.bias.grad.fill_(torch.nan)
    for norm_type in (2.0, torch.inf):
        assert fsdp.clip_grad_norm_(layer, 1.0, norm_type).isnan()


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "mean"),
    [
        (BF16, None, 129.0),
        (BF16, torch.float32, 129.5),
        (None, BF16, 129.0),
    ],
    ids=str,
)
@pool.on(2)
def test_gradients_are_added_in_the_reduce_dtype_and_integers_keep_theirs(
    param_dtype, reduce_dtype, mean
):
    """In bf16, 256 + 1 is 256. The first micro-batch is in no_sync()."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    layer = nn.Linear(1, 1, bias=False)
    layer.table = nn.Parameter(torch.tensor([257]), requires_grad=False)
    tables = []
    layer.register_forward_pre_hook(lambda layer, _: tables.append(layer.table.item()))
    fully_shard(layer, mp_policy=policy, offload_policy=fsdp.CPUOffloadPolicy())
    with fsdp.no_sync(layer):
        x = 256.0 if pool.rank() == 0 else 1.0
        layer(torch.tensor([x])).backward()
    y = layer(torch.ones(1))
    y.backward()

    assert y.dtype == (param_dtype or torch.float32)
    assert tables == [257, 257]
    if pool.rank() == 0:
        assert layer.weight.grad.item() == mean


@pool.on(2)
def test_a_gradient_of_one_rank_that_rounds_to_minus_zero_is_no_missing_gradient():
    """In fp16, -1e-10 is -0.0, and ranks send -0.0 if they have no gradient."""
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.half)
    layer = fully_shard(Biased(64, 1), mp_policy=policy)
    y = layer(torch.ones(1, 64))
    y.backward(torch.full_like(y, -1e-10))
    if layer.bias.numel():  # on rank 1, which does not use it
        assert layer.bias.grad.item() == 0


@pool.on(2)
def test_a_gradient_of_minus_zero_after_a_micro_batch_without_one_is_no_missing_gradient():
    layer = fully_shard(Biased(64, 1))
    layer.bias.requires_grad_(False)
    with fsdp.no_sync(layer):
        layer(torch.ones(64)).backward()
    layer.bias.requires_grad_(True)
    y = layer(torch.ones(64))
    y.backward(torch.full_like(y, -0.0))
    if layer.bias.numel():  # on rank 1, which does not use it
        assert layer.bias.grad.item() == 0


class DtypesSent(TorchDispatchMode):
    """`seen`: (collective, dtype, whether a NaN is sent)."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = tree_leaves(args[0] if name == "broadcast_" else args[1])[0]
            self.seen.add((name, sent.dtype, bool(sent.isnan().any())))
        return func(*args, **(kwargs or {}))


@pool.on(2)
def test_parameters_are_sent_as_bytes_because_nccl_has_no_16_bit_integers():
    layer = nn.Linear(3, 3)
    table = torch.arange(5, dtype=torch.int16)
    layer.table = nn.Parameter(table + pool.rank(), requires_grad=False)
    with DtypesSent() as sent:
        fully_shard(layer)
        layer(torch.ones(1, 3))

    names = ("_allgather_base_", "broadcast_")
    dtypes = {dtype for name, dtype, _ in sent.seen if name in names}
    assert dtypes - {torch.int64} == {torch.uint8}  # torch 2.15 gathers sizes of objects like this
    assert fsdp.full_state_dict(layer)["table"].tolist() == [0, 1, 2, 3, 4]


@pool.on(2)
def test_the_padding_of_gradients_is_no_nan_which_nccl_may_look_for():
    layer = fully_shard(nn.Linear(3, 3))
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        with DtypesSent() as sent:
            layer(torch.ones(1, 3)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("alltoall_base_", torch.float32, False) in sent.seen
    assert ("alltoall_base_", torch.float32, True) not in sent.seen


# ---- Costs, in this process, which is the last of N ranks in a world that moves no data


def observed_step(copies, N, **options):
    """Return a model of three units, what it sends, and bytes held after each operator.

    [(operator, (unsharded parameters, gradients that are sent and received, new gradients)), …]
    """
    mesh = init_device_mesh("cpu", (copies, N))
    layers = [nn.Linear(40, 40, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in (*layers, model):
        fsdp.fully_shard(layer, mesh=mesh, **options)
    units = groups_of(model)

    def see():
        gathered = held(unit.unsharded for unit in units)
        reduced = held(tensor for unit in units for tensor in (unit.gradients, unit.received))
        new = held(unit.parameters[0].unsharded.grad for unit in units)
        return gathered, reduced, new

    x = torch.randn(1, 40)
    y = model(x)
    y.sum().backward()  # then the next unit is known
    model(x)  # a graph without a backward holds up nothing
    with fsdp.SentBytes() as sent, Watch(see) as watch:
        y = model(x)
        y.sum().backward()
    with torch.no_grad():
        model(x)
    assert_at_rest(model)
    return model, sent.total, watch.seen


@pytest.mark.parametrize(("copies", "N", "reshard"), [(1, 2, False), (4, 64, True)])
def test_bytes_sent_and_held(copies, N, reshard):
    with fake_world(copies * N, rank=copies * N - 1):
        model, sent, seen = observed_step(copies, N, reshard_after_forward=reshard)

    plain = 4 * 40 * 40  # bytes of a unit
    unit = plain + -plain % (4 * 8 * N)  # padded: a shard has a multiple of 8 elements
    passes = 3 if reshard else 2  # a gather in forward, one in backward, and a reduce-scatter
    by_all_reduce = 2 * 3 * unit / N * (copies - 1) / copies  # a shard, around a ring twice
    assert sent == pytest.approx(passes * 3 * unit * (N - 1) / N + by_all_reduce)
    assert held(model.parameters()) == 3 * unit / N
    assert held(shard.grad for shard in model.parameters()) == 3 * unit / N
    units_gathered = 2 if reshard else 3
    assert max(gathered for _, (gathered, _, _) in seen) == units_gathered * unit
    # One unit's gradients are computed while another's are sent and received.
    most = max(reduced + new for _, (_, reduced, new) in seen)
    assert most == 2 * unit + plain


def test_collectives_run_while_units_compute():
    """The next unit is gathered, and the gradients of the unit before are reduced."""
    with fake_world(2, rank=1):
        _, _, seen = observed_step(1, 2)

    unit = 4 * 40 * 40
    products = [held_then for name, held_then in seen if name == "aten::mm"]
    gathered = [size / unit for size, _, _ in products]
    reduced = [size / unit for _, size, _ in products]
    # One a unit in forward, and two in backward, but the first unit's input needs no gradient.
    assert gathered == [2, 2, 1] + [2, 2, 2, 2, 1]
    assert reduced == [0, 0, 0] + [0, 0, 2, 2, 2]


# ---- Errors, on every rank. Each function gets a unit, an nn.Linear(6, 2).


def other_strides(_):
    layer = nn.Linear(6, 6)
    if pool.rank():
        layer.weight.data = layer.weight.data.T
    fully_shard(layer)


def other_group(_):
    """Ranks 1 to 3 are not in it."""
    alone = dist.new_group([0])
    fsdp.fully_shard(nn.Linear(6, 6), process_group=alone)
    raise ValueError("not in process_group")


def one_rank_differs_in_a_grid(_):
    """The rank's copy of the shards and those beside it have the same error, too."""
    mesh = init_device_mesh(pool.device().type, (2, 2))
    layer = nn.Linear(6, 6, bias=pool.rank() < 3)
    fsdp.fully_shard(layer, mesh=mesh)


def copies_differ_in_a_grid(_):
    mesh = init_device_mesh(pool.device().type, (2, 2))
    layer = nn.Linear(6, 6, bias=pool.rank() < 2)
    fsdp.fully_shard(layer, mesh=mesh)


def split_parameter(_):
    layer = nn.Linear(2, 2)
    layer.weight.differ_between_ranks = list(range(4))
    fully_shard(layer)


def hook_before_sharding(_):
    layer = nn.Linear(6, 2)
    layer.bias.register_hook(torch.neg)
    fully_shard(layer)


def tied_to_another_unit(_):
    tied = make_model("tied")
    fully_shard(tied.first)
    fully_shard(tied)


def hook_on_a_shard(unit):
    unit.bias.register_post_accumulate_grad_hook(torch.neg)
    unit(make_batch(0, 0))


def hook_after_forward(unit):
    with fsdp.keep_unsharded(unit):
        y = unit(make_batch(0, 0))
        unit.bias.register_hook(torch.neg)
        y.sum().backward()


def hook_on_the_node_that_accumulates(unit):
    torch.autograd.graph.register_multi_grad_hook(list(unit.parameters()), print)


def embedding_with_max_norm(_):
    model = nn.Sequential(nn.Embedding(4, 2), nn.EmbeddingBag(4, 2, max_norm=1.0))
    fully_shard(model)


def batch_norm_in_bf16(_):
    policy = fsdp.MixedPrecisionPolicy(BF16)
    model = make_model("batchnorm")
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def initialized_after_sharding(unit):
    nn.init.xavier_normal_(unit.weight)


def random_numbers_in_a_shard(unit):
    with torch.no_grad():
        unit.weight.exponential_()


def norm_of_a_shard(unit):
    with torch.no_grad():
        unit.weight.norm()


def penalty_on_a_shard(unit):
    unit.requires_grad_(False)  # the hook is there as well when it is unfrozen later
    unit.requires_grad_()
    (unit.weight**2).sum().backward()


class Keeps(nn.Linear):
    """Also has its weight in a list."""

    def __init__(self):
        super().__init__(6, 6)
        self.kept = [self.weight]


def parameter_in_a_list(_):
    layer = fully_shard(Keeps())
    with torch.no_grad():
        layer.kept[0] + 1


def view_of_a_parameter(_):
    layer = nn.Linear(6, 6)
    view = layer.weight.T
    fully_shard(layer)
    (make_batch(0, 0) @ view).sum().backward()


def view_that_a_module_keeps(_):
    layer = nn.Linear(6, 6)
    layer.kept = {"weight": layer.weight.data}
    fully_shard(layer)


def optimizer_made_before(_):
    layer = nn.Linear(6, 6)
    optimizer = adamw(layer)
    fully_shard(layer)
    backward(layer)
    optimizer.step()


def step_between_forward_and_backward(unit):
    loss = batch_loss(unit, 0, 0)
    for shard in unit.parameters():
        shard.grad = torch.ones_like(shard)
    adamw(unit).step()
    loss.backward()


def step_before_backward_without_resharding(_):
    unit = fully_shard(nn.Linear(6, 2), reshard_after_forward=False)
    step_between_forward_and_backward(unit)


def gradient_penalty(unit):
    x = make_batch(0, 0).requires_grad_()
    (slope,) = torch.autograd.grad(unit(x).sum(), x, create_graph=True)
    slope.norm().backward()


def parameter_added_later(unit):
    unit.scale = nn.Parameter(torch.ones(()))
    unit(make_batch(0, 0))


def parameter_added_after_a_block_ran(unit):
    model = nn.Sequential(unit, nn.Linear(2, 2))
    fully_shard(model)
    unit(make_batch(0, 0))
    model.scale = nn.Parameter(torch.ones(()))
    model(make_batch(0, 0))


class Writes(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def write_in_forward(_):
    layer = fully_shard(Writes(6, 6))
    layer(make_batch(0, 0))


def norm_type_zero(unit):
    fsdp.clip_grad_norm_(unit, 1.0, 0)


def moved(unit):
    unit.double()
    unit(make_batch(0, 0))


def changed_in_keep_unsharded(unit):
    with fsdp.keep_unsharded(unit):
        backward(unit)
        adamw(unit).step()
        unit(make_batch(0, 0))


def state_dict_of_other_shapes(unit):
    state_dict = nn.Linear(6, 1).state_dict()
    fsdp.load_full_state_dict(unit, state_dict)


def checkpoint_of_other_strides(_):
    model = fully_shard(make_model("odd"))
    pieces_of(model, adamw(model))


def forward_after_a_backward_that_raised(unit):
    y = unit(make_batch(0, 0))
    y.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    unit(make_batch(0, 0))


WRONG = {
    other_strides: r"weight: \(6, 6\), stride \(1, 6\)",
    other_group: "not in process_group",
    one_rank_differs_in_a_grid: "same model.*bias|same model.*differ",
    copies_differ_in_a_grid: "same model.*bias",
    split_parameter: "part 1 of a split",
    hook_before_sharding: "bias has hooks",
    tied_to_another_unit: r"second\.weight is tied",
    fully_shard: "already",
    hook_on_a_shard: "bias has hooks",
    hook_after_forward: "bias has hooks",
    hook_on_the_node_that_accumulates: "weight is a shard",
    embedding_with_max_norm: r"1 \(EmbeddingBag\) has max_norm",
    batch_norm_in_bf16: r"1 \(BatchNorm1d\) has running statistics of torch.float32",
    initialized_after_sharding: "weight is a shard.* before fully_shard",
    random_numbers_in_a_shard: "weight is a shard",
    norm_of_a_shard: "weight is a shard",
    penalty_on_a_shard: "weight is a shard",
    parameter_in_a_list: "replaced by fully_shard",
    view_of_a_parameter: "weight is a shard",
    view_that_a_module_keeps: "kept is a view of a parameter",
    optimizer_made_before: "make the optimizer after",
    step_between_forward_and_backward: "changed between forward and backward",
    step_before_backward_without_resharding: "step after backward",
    gradient_penalty: "create_graph=True",
    parameter_added_later: "scale is in no unit",
    parameter_added_after_a_block_ran: "scale is in no unit",
    write_in_forward: "forward wrote to Writes.weight",
    norm_type_zero: "positive number, or inf",
    moved: r"Linear\.weight was moved",
    changed_in_keep_unsharded: "keep_unsharded",
    nn.Module.state_dict: "full_state_dict",
    state_dict_of_other_shapes: r"\(2, 6\), not \(1, 6\)",
    checkpoint_of_other_strides: "transposed is not contiguous",
    copy.deepcopy: "copied",
    forward_after_a_backward_that_raised: "earlier backward",
}


@pytest.mark.parametrize("act", WRONG, ids=lambda act: act.__name__)
@pool.on(4)
def test_what_would_go_wrong_silently_is_an_error_on_every_rank(act):
    unit = fully_shard(nn.Linear(6, 2))
    with pytest.raises((ValueError, RuntimeError), match=WRONG[act]):
        act(unit)

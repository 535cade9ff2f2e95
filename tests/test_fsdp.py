"""fsdp.py against one device, bit by bit. tests/claims has what holds for any fully_shard."""

import contextlib
import copy
import types
from dataclasses import dataclass
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as pytorchs
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import checkpoint
import fsdp

assert_equal = partial(
    torch.testing.assert_close, rtol=0, atol=0, equal_nan=True, check_device=False
)
IS_TORCH_2_6 = not hasattr(torch.cpu.Stream, "record_event")
pytorchs_runs = pytest.mark.skipif(
    IS_TORCH_2_6, reason="PyTorch's fully_shard does not run on a CPU in torch 2.6"
)
each_reshard = pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])


def fully_shard(module, **kwargs):
    return fsdp.fully_shard(module, process_group=pool.group(), **kwargs)


def pytorchs_fully_shard(module, **kwargs):
    mesh = DeviceMesh.from_group(pool.group(), pool.device().type)
    return pytorchs.fully_shard(module, mesh=mesh, **kwargs)


def shard(model, fully_shard=fully_shard, **kwargs):
    """Units: each layer that has parameters but the last, and the model; in a layer the same."""
    layers = list(model)[:-1] if isinstance(model, nn.Sequential) else []
    for layer in layers:
        if list(layer.parameters()):
            shard(layer, fully_shard, **kwargs)
    return fully_shard(model, **kwargs)


def pair(reshard=True):
    """A sharded model of blocks, and the plain one."""
    plain = Blocks()
    return shard(copy.deepcopy(plain), reshard_after_forward=reshard), plain


def groups(model):
    units = [module._fsdp_unit for module in model.modules() if hasattr(module, "_fsdp_unit")]
    return [group for unit in units for group in unit.groups]


def held(tensors):
    return fsdp.held_bytes([tensor for tensor in tensors if tensor is not None])


def assert_at_rest(model):
    """The parameters are shards, and nothing is left of a forward or a backward."""
    for group in groups(model):
        assert held([group.unsharded, group.gradients, group.received]) == 0
        assert not group.collected
        assert group.shard_size * group.unsharded.itemsize % 16 == 0
        for parameter in group.parameters:
            assert parameter.unsharded.grad is None
            assert parameter.start * parameter.unsharded.itemsize % 64 == 0
    assert all(parameter.numel() == parameter.shape[-1] for parameter in model.parameters())


def assert_same_state(ours, plain):
    state = fsdp.full_state_dict(ours)
    expected = plain.state_dict()
    assert_equal(state, dict(expected))


def pairs(ours, plain):
    """Each shard, and the whole parameter."""
    return zip(ours.parameters(), plain.parameters(), strict=True)


def backward(model, number=0, loss=batch_loss):
    """Of this rank's micro-batch of that number."""
    rank = pool.rank()
    loss(model, rank, number).backward()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(ours, plain, loss=batch_loss, steps=3, micro_batches=1, optimizers=None):
    """Train both with AdamW, and compare gradients and weights. Return what was sent.

    All micro-batches of a step but the last run in no_sync().
    """
    optimizers = optimizers or (adamw(ours), adamw(plain))
    with Collectives() as sent:
        for step in range(steps):
            numbers = range(step * micro_batches, (step + 1) * micro_batches)
            optimizers[0].zero_grad()
            with fsdp.no_sync(ours):
                for number in numbers[:-1]:
                    backward(ours, number, loss)
            assert all(parameter.grad is None for parameter in ours.parameters())
            backward(ours, numbers[-1], loss)
            assert_at_rest(ours)
            on_one_device(plain, numbers, loss)
            assert_same_gradients(ours, plain)
            for optimizer in optimizers:
                optimizer.step()
    assert_same_state(ours, plain)
    return sent


def on_one_device(plain, numbers=(0,), loss=batch_loss):
    """Leave the mean over ranks in .grad. Each rank first adds up those of its micro-batches."""
    batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
    one_device(plain, batches, lambda model, batch: loss(model, *batch))


def assert_same_gradients(ours, plain):
    """A rank that has no element of a parameter cannot tell whether other ranks use it."""
    for mine, whole in pairs(ours, plain):
        assert mine.dim() == max(whole.dim(), 1)  # many scripts decay what has two dimensions
        if whole.grad is None:
            assert mine.grad is None
        elif mine.numel():
            assert_equal(mine.grad, shard_of(mine, whole.grad))


def shard_of(mine, whole):
    return fsdp.shard_of(mine._sharded_parameter, whole)


def sent_by_a_rank(seen):
    """Bytes of gathers, and of reductions, in a world of two."""
    return seen.bytes_of("_allgather_base_") / 2, seen.bytes_of("alltoall_base_") / 2


def grid():
    """Process groups of this rank in a grid of (2, 2): along dimension 0, and along 1."""
    mesh = init_device_mesh(pool.device().type, (2, 2))
    return mesh.get_all_groups()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pool.on(4)
def test_the_idea_has_the_gradients_of_one_device():
    plain = make_model("plain", torch.float64)
    ours = copy.deepcopy(plain)
    forward = fsdp.naive_fully_shard(ours, pool.group())
    x = make_batch(pool.rank(), 0, torch.float64)
    loss = loss_of(forward(x))
    loss.backward()

    on_one_device(plain)
    for shard, whole in pairs(ours, plain):
        padded = nn.functional.pad(whole.grad.flatten(), (0, -whole.numel() % 4))
        assert_equal(shard.grad, padded.chunk(4)[pool.rank()])


# ---- Calls of units. Each loss is of a rank's micro-batch n.


def calls(model, rank, n, units=(None,), how="plainly"):
    """The loss of a forward that calls the blocks in units[n]."""
    x = make_batch(rank, n).requires_grad_()
    y = model(x, units[n % len(units)], HOW[how])
    return loss_of(y)


@each_reshard
@pool.on(2)
def test_each_micro_batch_may_call_other_units_in_another_order(reshard):
    ours, plain = pair(reshard)
    loss = partial(calls, units=[[0, 2, 3], [0, 2], [3, 2, 1, 0], []])
    train(ours, plain, loss, steps=2, micro_batches=2)


@pytest.mark.parametrize(
    ("how", "reshard"),
    [("plainly", True), ("plainly", False), ("checkpointed", True), ("reentrant", True)],
)
@pool.on(2)
def test_a_unit_is_gathered_once_a_pass_and_reduced_once_a_step(how, reshard):
    ours, plain = pair(reshard)
    size = sum(group.shard.nbytes for group in groups(ours))

    seen = train(ours, plain, partial(calls, how=how), steps=1, micro_batches=2)

    assert sent_by_a_rank(seen) == (2 * (1 + reshard) * size, size)


@pool.on(2)
def test_one_backward_may_go_through_two_graphs():
    def two_graphs(model, rank, n):
        return batch_loss(model, rank, n) + batch_loss(model, rank, n + 50)

    ours, plain = pair()
    train(ours, plain, two_graphs)


@each_reshard
@pool.on(2)
def test_a_second_forward_may_come_before_the_first_backward(reshard):
    ours, plain = pair(reshard)
    first = batch_loss(ours, pool.rank(), 0)
    second = batch_loss(ours, pool.rank(), 1)
    with fsdp.no_sync(ours):
        first.backward()
    second.backward()

    on_one_device(plain, [0, 1])
    assert_same_gradients(ours, plain)
    assert_at_rest(ours)


@each_reshard
@pool.on(2)
def test_an_evaluation_keeps_nothing_unsharded(reshard):
    ours, plain = pair(reshard)
    x = make_batch(0, 9)
    with torch.inference_mode():
        assert torch.equal(ours(x), plain(x))
    assert_at_rest(ours)


def frozen_in_turns(model, rank, n):
    """The first block is always frozen. The halves of the others are frozen in turns."""
    model[0].requires_grad_(False)
    for block in list(model)[1:4]:
        block.one.requires_grad_(n < 2)
        block.two.requires_grad_(n >= 2)
    return batch_loss(model, rank, n)


@pool.on(2)
def test_parameters_may_be_frozen_in_turns_and_a_frozen_unit_is_gathered_once():
    ours, plain = pair()
    sizes = [group.shard.nbytes for group in groups(ours)]  # the root's, then the first block's

    seen = train(ours, plain, frozen_in_turns, steps=2, micro_batches=2)

    gathered, reduced = sent_by_a_rank(seen)  # backward does not reach the first block
    assert gathered == 2 * (4 * sum(sizes) - 2 * sizes[1])
    assert reduced == 2 * (sum(sizes) - sizes[1])


@pool.on(2)
def test_no_sync_in_no_sync_ends_with_the_outer_one():
    layer = fully_shard(nn.Linear(6, 3))
    with fsdp.no_sync(layer):
        with fsdp.no_sync(layer):
            pass
        backward(layer)
        assert layer.weight.grad is None


# ---- keep_unsharded


@each_reshard
@pool.on(2)
def test_micro_batches_share_one_gather_in_keep_unsharded(reshard):
    ours, plain = pair(reshard)
    size = sum(group.shard.nbytes for group in groups(ours))
    for _ in range(2):
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
        for model in (ours, plain):
            adamw(model).step()
            model.zero_grad()
    assert_same_state(ours, plain)


@pool.on(2)
def test_an_optimizer_step_in_keep_unsharded_is_an_error():
    ours, _ = pair()
    with fsdp.keep_unsharded(ours):
        backward(ours)
        adamw(ours).step()
        with pytest.raises(RuntimeError, match="keep_unsharded"):
            batch_loss(ours, 0, 0)


# ---- Several groups


@pool.on(4)
def test_replicate_group_makes_copies_of_the_shards_of_rank_0():
    replicate_group, process_group = grid()
    plain = make_model("plain", torch.float64)
    ours = copy.deepcopy(plain)
    for parameter in ours.parameters():
        parameter.data += pool.rank()
    fsdp.fully_shard(ours, process_group=process_group, replicate_group=replicate_group)
    assert_same_state(ours, plain)

    backward(ours)

    on_one_device(plain)
    for mine, whole in pairs(ours, plain):
        close(mine.grad, shard_of(mine, whole.grad))


class Biased(nn.Linear):
    """Uses its bias if `use`. The last rank of its group has the bias."""

    use = True

    def forward(self, x):
        return x @ self.weight.T + (self.bias if self.use else 0)


@pool.on(4)
def test_copies_that_do_not_use_a_parameter_get_the_gradient_of_those_that_do():
    replicate_group, process_group = grid()
    layer = Biased(64, 1)
    fsdp.fully_shard(layer, process_group=process_group, replicate_group=replicate_group)
    layer.use = pool.rank() == 0
    y = layer(torch.ones(1, 64))
    y.backward()

    assert layer.bias.numel() == dist.get_rank(process_group)
    if layer.bias.numel():
        assert layer.bias.grad.item() == 1 / 4


@pool.on(4)
def test_groups_that_form_no_grid_are_refused():
    _, process_group = grid()
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    mine = pairs[pool.rank() in (1, 2)]
    with pytest.raises(ValueError, match="of 2 that have"):
        fsdp.fully_shard(nn.Linear(2, 2), process_group=process_group, replicate_group=mine)


@pool.on(4)
def test_a_model_that_differs_on_one_rank_of_a_grid_is_refused_on_all():
    mesh = init_device_mesh(pool.device().type, (2, 2))
    layer = nn.Linear(5 if pool.rank() == 2 else 3, 2)
    with pytest.raises(ValueError, match=r"\(2, 5\)"):
        fsdp.fully_shard(layer, mesh=mesh)


class Split(nn.Module):
    """Its expert differs between the two ranks of `expert_group`."""

    def __init__(self, expert_group):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.expert = nn.Linear(6, 3, dtype=torch.float64)
        self.expert.weight.data += dist.get_rank(expert_group)
        self.expert.differ_between_ranks = dist.get_process_group_ranks(expert_group)

    def forward(self, x):
        return self.expert(torch.tanh(self.first(x)))


def sharded_split():
    """Shard the expert over the ranks that have it, and the rest over all. Return both models."""
    expert_group, process_group = grid()
    plain = Split(expert_group)
    ours = copy.deepcopy(plain)
    options = {"gradient_divide_factor": 1.0}
    fsdp.fully_shard(ours.expert, process_group=process_group, **options)
    fully_shard(ours, **options)
    backward(ours)
    for rank in dist.get_process_group_ranks(process_group):
        batch_loss(plain, rank, 0).backward()
    for parameter in plain.first.parameters():
        dist.all_reduce(parameter.grad, group=expert_group)
    return ours, plain, expert_group


@pool.on(4)
def test_split_experts_are_units_over_the_ranks_that_share_them():
    ours, plain, _ = sharded_split()

    assert_same_state(ours, plain)
    for mine, whole in pairs(ours, plain):
        close(mine.grad, shard_of(mine, whole.grad))


@pool.on(4)
def test_one_norm_over_units_of_several_groups():
    ours, plain, expert_group = sharded_split()
    is_first = dist.get_rank(expert_group) == 0
    copied = set(ours.first.parameters())
    squares = [parameter.grad.square().sum() for parameter in plain.parameters()]
    experts = squares[2] + squares[3]
    dist.all_reduce(experts, group=expert_group)
    expected = (squares[0] + squares[1] + experts).sqrt()

    def counted(parameter):
        return is_first or parameter not in copied

    norm = fsdp.clip_grad_norm_(ours, 1.0, counted=counted, process_groups=[expert_group])

    close(norm, expected)
    again = fsdp.clip_grad_norm_(ours, 1.0, counted=counted, process_groups=[expert_group])
    assert again.item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("marked", ["module", "parameter", "True"])
@pool.on(2)
def test_ranks_with_different_parts_may_not_be_in_one_group(marked):
    layer = nn.Linear(2, 2)
    split = layer.weight if marked == "parameter" else layer
    split.differ_between_ranks = True if marked == "True" else [0, 1]
    with pytest.raises(ValueError, match="part 1 of a split"):
        fully_shard(layer)


# ---- Models, and checkpoints of them


def of_all_kinds():
    norm = nn.BatchNorm1d(6).eval()
    norm.running_mean.fill_(pool.world_size())
    model = nn.Sequential(Block(), norm, Block(), make_model("tied"), make_model("odd"))
    model[3].second.bias.requires_grad_(False)
    # shards() refuses another order in memory.
    model[4].transposed = nn.Parameter(model[4].transposed.detach().contiguous())
    return model


MODELS = {
    "all kinds": (of_all_kinds, batch_loss),
    "16 bits": (partial(make_model, "plain", torch.bfloat16), batch_loss),
    "two dtypes in one unit": (partial(make_model, "mixed"), batch_loss),
    "outputs of every kind, nested units": (Outer, batch_loss),
    "used by some ranks": (partial(Reader, [6, 1, 40, 3, 1, 17]), Reader.__call__),
}


def pieces(model, optimizer):
    shards = fsdp.shards(model, optimizer)
    return checkpoint.shard_pieces(shards) | dict(model.named_buffers())


def body_go_on(model, folder, plain_states):
    """Load the checkpoint if there are states of the plain run, train both, and save."""
    make, loss = MODELS[model]
    plain = make()
    ours = shard(copy.deepcopy(plain), reshard_after_forward=pool.world_size() > 3)
    optimizers = adamw(ours), adamw(plain)
    if plain_states:
        model_state, optimizer_state = copy.deepcopy(plain_states)  # the pool's workers share it
        plain.load_state_dict(model_state)
        optimizers[1].load_state_dict(optimizer_state)
        for sharded, whole in pairs(ours, plain):
            if whole in optimizers[1].state:
                sharded.grad = torch.zeros_like(sharded)
        optimizers[0].step()  # makes the state that is then loaded
        checkpoint.load(folder, pieces(ours, optimizers[0]), process_group=pool.group())
    train(ours, plain, loss, optimizers=optimizers)
    checkpoint.save(folder, pieces(ours, optimizers[0]), process_group=pool.group())
    assert_equal(checkpoint.load_whole(folder), plain_pieces(plain, optimizers[1]))
    return plain.state_dict(), optimizers[1].state_dict()


def plain_pieces(model, optimizer):
    found = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for kind, tensor in {"weight": parameter.detach(), **state}.items():
            found[f"{kind}/{name}"] = tensor
    return found


@pytest.mark.parametrize("model", MODELS)
def test_models_train_in_any_world_and_go_on_from_a_checkpoint_in_another(model, tmp_path):
    plain_states = None
    for N in (4, 3, 1):
        plain_states = pool.run(N, body_go_on, model, tmp_path, plain_states)[0]


@pool.on(2)
def test_load_state_dict_of_a_wrapper_takes_a_plain_state_dict():
    model, plain = pair()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    whole = nn.Sequential(plain).state_dict()
    nn.Sequential(model).load_state_dict(whole)
    assert_same_state(model, plain)


@pool.on(2)
def test_load_state_dict_of_a_layer_in_a_unit_takes_a_plain_state_dict():
    model, plain = pair()
    nn.init.normal_(plain[2].one.weight)
    model[2].one.load_state_dict(plain[2].one.state_dict())
    assert_same_state(model, plain)


@pool.on(2)
def test_a_state_dict_loads_into_a_module_that_is_registered_twice():
    layer = nn.Linear(6, 6)
    plain = nn.Sequential(layer, nn.ReLU(), layer)
    ours = fully_shard(copy.deepcopy(plain))
    nn.init.normal_(layer.weight)
    fsdp.load_full_state_dict(ours, plain.state_dict())
    assert_same_state(ours, plain)


def meta_model():
    with torch.device("meta"):
        model = Blocks(5)
        model[1].norm = nn.BatchNorm1d(3)
        model[2].norm = nn.BatchNorm1d(3, affine=False)  # buffers and no parameter
    model[-1].bias.requires_grad_(False)
    return model


@pool.on(2)
def test_a_model_on_the_meta_device_starts_as_rank_0_initializes_it():
    model = meta_model()
    torch.manual_seed(0)
    plain = copy.deepcopy(model).to_empty(device=pool.device())
    for module in plain.modules():
        getattr(module, "reset_parameters", int)()

    torch.manual_seed(pool.rank())
    shard(model)

    assert_at_rest(model)
    assert_same_state(model, plain)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["5.bias"]


@pool.on(2)
def test_a_model_on_the_meta_device_becomes_real_unit_by_unit():
    """No rank holds more than the largest unit, and one module more."""
    model = meta_model()

    def parameters_held():
        whole = [p for p in model.parameters() if not hasattr(p, "_sharded_parameter")]
        return held([parameter for parameter in whole if not parameter.is_meta])

    with Watch(parameters_held) as watch:
        shard(model)

    block = held(Block().parameters())
    assert max(bytes_held for _, bytes_held in watch.seen) <= 2 * block


# ---- Outputs


@dataclass
class Data:
    y: list


def returns(wrap, owner_is_called=True):
    """A unit that wraps its output. It uses the weight of its layer, or calls the layer."""
    unit = fully_shard(Block())
    call = unit.one if owner_is_called else lambda x: x @ unit.one.weight.T
    unit.forward = lambda x: wrap(call(x))
    return unit


@pool.on(2)
def test_a_dataclass_is_searched_and_another_object_is_ignored():
    unit = returns(lambda y: [Data([y]), types.SimpleNamespace(y=y.sin())])
    data, other = unit(make_batch(0, 0))
    loss = data.y[0].sum() + other.y.sum()
    loss.backward()
    assert unit.one.weight.grad is not None


@pytest.mark.parametrize("owner_is_called", [True, False])
@pool.on(2)
def test_backward_from_a_tensor_that_is_hidden_in_an_object_is_an_error(owner_is_called):
    unit = returns(lambda y: types.SimpleNamespace(y=y), owner_is_called)
    x = make_batch(0, 0).requires_grad_(owner_is_called)  # backward then reads the freed weight
    total = unit(x).y.sum()
    with pytest.raises(RuntimeError, match="hidden"):
        total.backward()


HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


def hooks_and_what_they_saw(fully_shard):
    """Return (hook, whether the weight was whole) in the order of calls, and the results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    layer = model[0]
    seen = []

    def see(hook, *_):
        is_whole = layer.weight.shape == (6, 6) and type(layer.weight) is nn.Parameter
        seen.append((hook, is_whole))

    layer.register_forward_pre_hook(partial(see, "before fully_shard"))
    layer.register_forward_hook(partial(see, "before fully_shard"))
    shard(model, fully_shard)
    layer.register_forward_hook(lambda module, inputs, output: output.tanh())
    for hook in HOOKS:
        getattr(layer, hook)(partial(see, hook))
        getattr(layer, hook)(partial(see, f"{hook} first"), prepend=True)
    x = make_batch(pool.rank(), 0).requires_grad_()
    output = model(x)
    output.sum().backward()
    return seen, output, x.grad


@pytorchs_runs
@pool.on(2)
def test_hooks_of_a_unit_run_when_pytorchs_do():
    ours = hooks_and_what_they_saw(fully_shard)
    theirs = hooks_and_what_they_saw(pytorchs_fully_shard)
    assert len(ours[0]) == 10
    assert ours[0] == theirs[0]
    assert_equal(ours[1:], theirs[1:])


# ---- Numbers: clipping, 16 bits, complex


@pytest.mark.parametrize(("max_norm", "after"), [(1e6, 40000.0), (20000.0, 20000.0)])
@pool.on(2)
def test_the_norm_of_fp16_gradients_does_not_overflow(max_norm, after):
    """Neither does their sum over ranks, nor a square. Rank 1 has no elements."""
    layer = fully_shard(nn.Linear(1, 1, bias=False, dtype=torch.half))
    y = layer(torch.full((1, 1), 40000.0, dtype=torch.half))
    y.backward()
    assert fsdp.clip_grad_norm_(layer, max_norm).item() == 40000.0
    assert layer.weight.grad.flatten().tolist() == [after] * (pool.rank() == 0)


@pytest.mark.parametrize("accumulates", [False, True])
@pool.on(2)
def test_a_gradient_that_rounds_to_minus_zero_is_a_gradient(accumulates):
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    layer = fully_shard(Biased(64, 1), mp_policy=policy)
    layer.use = pool.rank() == 0
    x = torch.ones(1, 64)
    with fsdp.no_sync(layer) if accumulates else contextlib.nullcontext():
        y = -1e-20 * layer(x)
        y.backward()
    y = -1e-20 * layer(x)
    y.backward()

    assert layer.bias.numel() == pool.rank()
    if layer.bias.numel():
        assert layer.bias.grad.item() == 0.0


class Quantized(nn.Linear):
    """A linear layer with a frozen table of integers."""

    def __init__(self):
        super().__init__(4, 4)
        self.table = nn.Parameter(torch.arange(-8, 9, dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        assert self.table.tolist() == list(range(-8, 9))
        assert self.table.dtype == torch.int8
        return super().forward(x)


@pool.on(2)
def test_integers_keep_their_values_and_dtype_whatever_the_policy():
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16)
    model = fully_shard(Quantized(), mp_policy=policy)
    model(torch.ones(2, 4)).sum().backward()
    assert fsdp.full_state_dict(model)["table"].tolist() == list(range(-8, 9))


@pytest.mark.skipif(IS_TORCH_2_6, reason="gloo sends no complex numbers in torch 2.6")
@pool.on(2)
def test_complex_gradients_are_averaged_and_clipped_where_one_rank_uses_a_parameter():
    layer = fully_shard(Biased(64, 1, dtype=torch.complex64))
    layer.use = pool.rank() == 0
    y = layer(torch.ones(1, 64, dtype=torch.complex64)).abs()
    y.backward()

    if layer.bias.numel():
        assert layer.bias.grad.abs().item() == pytest.approx(1 / 2)
    fsdp.clip_grad_norm_(layer, 0.1)
    assert fsdp.clip_grad_norm_(layer, 1.0).item() == pytest.approx(0.1)


BF16 = torch.bfloat16
POLICIES = {
    "bf16, added in fp32": ((BF16, torch.float32), None),
    "bf16, offloaded": ((BF16, None), fsdp.CPUOffloadPolicy()),
    "fp32, added in bf16": ((None, BF16), None),
}


@pytorchs_runs
@pytest.mark.parametrize("policy", POLICIES)
@pool.on(2)
def test_mixed_precision_as_pytorchs(policy):
    """Gradients of two micro-batches, the first in no_sync(), are added in the reduce dtype."""
    dtypes, offload_policy = POLICIES[policy]
    ours = Blocks()
    theirs = copy.deepcopy(ours)
    shard(theirs, pytorchs_fully_shard, mp_policy=pytorchs.MixedPrecisionPolicy(*dtypes))
    shard(ours, mp_policy=fsdp.MixedPrecisionPolicy(*dtypes), offload_policy=offload_policy)
    for step in range(2):
        theirs.set_requires_gradient_sync(False)
        with fsdp.no_sync(ours):
            backward_of_both(ours, theirs, 2 * step)
        theirs.set_requires_gradient_sync(True)
        backward_of_both(ours, theirs, 2 * step + 1)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            whole = other.grad.full_tensor()
            assert_equal(mine.grad, shard_of(mine, whole))
        for model in (ours, theirs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            model.zero_grad()


def backward_of_both(ours, theirs, number):
    x = make_batch(pool.rank(), number)
    outputs = [model(x) for model in (ours, theirs)]
    assert torch.equal(*outputs)
    for output in outputs:
        loss_of(output.float()).backward()


# ---- Devices


BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("device", "backends", "expected"),
    [
        pytest.param("cpu", BOTH, "cpu", id="a backend for it"),
        pytest.param("cuda:1", "cpu:gloo,cuda:gloo", "cuda:1", id="a backend for the GPU"),
        pytest.param("cpu", "cuda:nccl", "cuda", id="no backend for it"),
        pytest.param("meta", BOTH, "cuda", id="meta"),
        pytest.param("meta", "cpu:gloo,cuda:gloo", "cpu", id="meta, gloo alone"),
    ],
)
def test_a_unit_computes_where_its_parameters_are(device, backends, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fsdp.device_for(torch.device(device), backends) == torch.device(expected)


def test_a_unit_computes_on_the_cpu_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fsdp.device_for(torch.device("meta"), BOTH) == torch.device("cpu")


@pytest.mark.cpu
@pool.on(2)
def test_a_backend_may_have_another_name():
    group = dist.new_group(range(2), backend="cpu:gloo,cuda:gloo")
    assert fsdp.fully_shard(nn.Linear(2, 2), process_group=group).weight.is_cpu


# ---- Costs, in this process, which is the last of N ranks in a world that moves no data


def six_layers(**options):
    model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(6)])
    for layer in (*model, model):
        fsdp.fully_shard(layer, **options)
    return model


def observe(model, see):
    """Run a step that knows which unit is next. Return (operator, what see() returned), …."""
    x = torch.randn(1, 40)
    y = model(x)
    y.sum().backward()
    model(x)  # a graph without a backward holds up nothing
    model.zero_grad()
    with fsdp.SentBytes() as sent, Watch(see) as watch:
        y = model(x)
        y.sum().backward()
    assert_at_rest(model)
    return sent.total, watch.seen


@pytest.mark.parametrize(
    ("copies", "N", "reshard"), [(1, 2, True), (1, 2, False), (1, 1024, True), (4, 64, True)]
)
def test_bytes_sent_and_held(copies, N, reshard):
    with fake_world(copies * N, rank=copies * N - 1):
        mesh = init_device_mesh("cpu", (copies, N))
        model = six_layers(mesh=mesh, reshard_after_forward=reshard)
        units = groups(model)
        unit = units[0].unsharded.nbytes

        def see():
            gradients = [each.parameters[0].unsharded.grad for each in units]
            for each in units:
                gradients += [each.gradients, each.received]
            return held([each.unsharded for each in units]) / unit, held(gradients) / unit

        sent, seen = observe(model, see)

    size = 6 * unit
    by_all_reduce = 2 * size / N * (copies - 1) / copies
    assert 4 * 40 * 40 <= unit < 4 * 40 * 40 + 4 * 8 * N  # padding
    assert sent == pytest.approx((2 + reshard) * size * (N - 1) / N + by_all_reduce)
    assert max(gathered for _, (gathered, _) in seen) == (2 if reshard else 6)
    assert 2 <= max(gradients for _, (_, gradients) in seen) <= 3.01
    assert held(model.parameters()) == size / N
    assert held([parameter.grad for parameter in model.parameters()]) == size / N


def test_collectives_run_while_units_compute():
    """The next unit is gathered, and the gradients of the unit before are reduced."""
    with fake_world(2, rank=1):
        model = six_layers()
        units = groups(model)

        def see():
            early = [each.gather_handle and not is_on_modules(each) for each in units]
            return [n for n in range(6) if early[n]], [n for n in range(6) if units[n].reducing]

        _, seen = observe(model, see)

    expected = [([n + 1] if n < 5 else [], []) for n in range(6)]
    for n in reversed(range(6)):
        products = 2 if n > 0 else 1  # of a backward
        expected += [([n - 1] if n > 0 else [], [n + 1] if n < 5 else [])] * products
    assert [under_way for name, under_way in seen if name == "aten::mm"] == expected


def is_on_modules(group):
    parameter = group.parameters[0]
    module, attribute = parameter.owners[0]
    return getattr(module, attribute) is parameter.unsharded


# ---- Errors, on every rank


@pool.on(2)
def test_ranks_with_other_shapes_are_refused():
    layer = nn.Linear(3 + pool.rank(), 2)
    with pytest.raises(ValueError, match=r"weight: \(2, 3\)"):
        fully_shard(layer)


@pool.on(2)
def test_ranks_with_other_strides_are_refused():
    layer = nn.Conv2d(2, 2, 2)
    if pool.rank() == 1:
        layer.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"stride \(8, 1, 4, 2\)"):
        fully_shard(layer)


@pool.on(2)
def test_ranks_with_other_frozen_parameters_are_refused():
    layer = nn.Linear(3, 2).requires_grad_(pool.rank() == 0)
    with pytest.raises(ValueError, match="frozen"):
        fully_shard(layer)


@pool.on(2)
def test_ranks_with_different_arguments_are_refused():
    with pytest.raises(ValueError, match="arguments"):
        fully_shard(nn.Linear(3, 2), reshard_after_forward=pool.rank() == 0)


@pool.on(2)
def test_a_rank_that_is_not_in_the_group_is_refused():
    expected = contextlib.nullcontext()
    if pool.rank() == 1:
        expected = pytest.raises(ValueError, match="rank 1 is not in")
    with expected:
        fsdp.fully_shard(nn.Linear(2, 2), process_group=pool._groups[1])


@pool.on(2)
def test_a_unit_is_not_made_twice():
    unit = fully_shard(Block())
    with pytest.raises(ValueError, match="already"):
        fully_shard(unit)


@pool.on(2)
def test_a_parameter_that_is_tied_to_another_units_is_refused():
    tied = make_model("tied")
    fully_shard(tied.first)
    with pytest.raises(ValueError, match=r"second\.weight is tied"):
        fully_shard(tied)


@pool.on(2)
def test_a_module_without_a_forward_is_refused():
    with pytest.raises(ValueError, match="ModuleList"):
        fully_shard(nn.ModuleList([Block()]))


@pool.on(2)
def test_a_buffer_that_cannot_leave_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Module())
        model[1].register_buffer("frequencies", torch.ones(2))
    with pytest.raises(ValueError, match="reset_parameters"):
        fully_shard(model)


@pool.on(2)
def test_hooks_on_parameters_before_sharding_are_refused():
    layer = nn.Linear(6, 2)
    layer.bias.register_hook(torch.neg)
    with pytest.raises(ValueError, match="bias has hooks"):
        fully_shard(layer)


@pool.on(2)
def test_hooks_on_shards_are_refused():
    layer = fully_shard(nn.Linear(6, 2))
    layer.bias.register_post_accumulate_grad_hook(torch.neg)
    with pytest.raises(ValueError, match="bias has hooks"):
        layer(make_batch(0, 0))


@pool.on(2)
def test_shards_that_were_moved_are_refused():
    layer = fully_shard(nn.Linear(6, 2)).double()
    with pytest.raises(ValueError, match=r"Linear\.weight was moved"):
        layer(make_batch(0, 0))


@pool.on(2)
def test_shards_that_were_replaced_are_refused():
    layer = fully_shard(nn.Linear(6, 2))
    layer.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"Linear\.bias was moved"):
        layer(make_batch(0, 0))


@pool.on(2)
def test_parameters_outside_of_units_are_refused():
    model = nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"1\.weight is in no unit"):
        fsdp.clip_grad_norm_(model, 1.0)


@pool.on(2)
def test_state_dict_of_shards_is_refused():
    layer = fully_shard(nn.Linear(6, 2))
    with pytest.raises(RuntimeError, match="full_state_dict"):
        layer.state_dict()


@pool.on(2)
def test_a_state_dict_of_other_shapes_is_refused():
    layer = fully_shard(nn.Linear(6, 2))
    state = nn.Linear(6, 3).state_dict()
    with pytest.raises(ValueError, match=r"\(2, 6\), not \(3, 6\)"):
        fsdp.load_full_state_dict(layer, state)


@pool.on(2)
def test_checkpoints_of_other_strides_are_refused():
    model = fully_shard(make_model("odd"))
    with pytest.raises(ValueError, match="transposed is not contiguous"):
        pieces(model, adamw(model))


@pool.on(2)
def test_copies_of_a_sharded_model_are_refused():
    model = nn.Sequential(fully_shard(nn.Linear(6, 2)))
    with pytest.raises(RuntimeError, match="copied"):
        copy.deepcopy(model)


@pool.on(2)
def test_a_forward_after_a_backward_that_raised_is_refused():
    model, _ = pair()
    x = make_batch(0, 0).requires_grad_()
    x.register_hook(lambda _: 1 / 0)
    total = model(x).sum()
    with pytest.raises(ZeroDivisionError):
        total.backward()
    with pytest.raises(RuntimeError, match="earlier backward"):
        model(x)

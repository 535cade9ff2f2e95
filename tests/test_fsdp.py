"""fsdp.py: bitwise one device, PyTorch's in 16 bits, its costs and its errors."""

import copy
import functools
import types
from contextlib import nullcontext

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
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
import fsdp

assert_equal = functools.partial(
    torch.testing.assert_close, rtol=0, atol=0, equal_nan=True, check_device=False
)
IS_TORCH_2_6 = not hasattr(torch.cpu.Stream, "record_event")
pytorchs_runs = pytest.mark.skipif(
    IS_TORCH_2_6, reason="PyTorch's fully_shard does not run on a CPU in torch 2.6"
)


def fully_shard(module, **kwargs):
    return fsdp.fully_shard(module, process_group=pool.group(), **kwargs)


def pytorchs_fully_shard(module, **kwargs):
    mesh = DeviceMesh.from_group(pool.group(), pool.device().type)
    return pytorchs.fully_shard(module, mesh=mesh, **kwargs)


def shard(model, fully_shard=fully_shard, **kwargs):
    """Units: each layer that has parameters but the last, and the model; in a layer the same."""
    for layer in list(model)[:-1] if isinstance(model, nn.Sequential) else ():
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
        assert group.reducing is None
        assert group.shard_size * group.unsharded.itemsize % 16 == 0
        for parameter in group.parameters:
            assert parameter.unsharded.grad is None
            assert parameter not in group.collected
            assert parameter.start * parameter.unsharded.itemsize % 64 == 0
    assert all(parameter.numel() == parameter.shape[-1] for parameter in model.parameters())


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
            for number in numbers:
                with nullcontext() if number == numbers[-1] else fsdp.no_sync(ours):
                    assert all(p.grad is None for p in ours.parameters())
                    loss(ours, pool.rank(), number).backward()
            assert_at_rest(ours)
            batches = [[(rank, number) for number in numbers] for rank in range(pool.world_size())]
            one_device(plain, batches, lambda model, batch: loss(model, *batch))
            assert_same_gradients(ours, plain)
            for optimizer in optimizers:
                optimizer.step()
    assert_equal(fsdp.full_state_dict(ours), dict(plain.state_dict()))
    return sent


def assert_same_gradients(ours, plain):
    """A rank that has no element of a parameter cannot tell whether other ranks use it."""
    for mine, whole in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.dim() == max(whole.dim(), 1)  # many scripts decay what has two dimensions
        if whole.grad is None:
            assert mine.grad is None
        elif mine.numel():
            assert_equal(mine.grad, mine._sharded_parameter.shard_of(whole.grad))


def sent_by_a_rank(seen):
    """Bytes of gathers, and of reductions, in a world of two."""
    return seen.bytes_of("_allgather_base_") / 2, seen.bytes_of("alltoall_base_") / 2


@pool.on(3)
def test_the_idea_trains_as_one_device():
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    ours = copy.deepcopy(plain)
    forward = fsdp.naive_fully_shard(ours, [pool.group()])

    loss_of(forward(make_batch(pool.rank(), 0))).backward()

    one_device(plain, [[make_batch(rank, 0)] for rank in range(pool.world_size())])
    for shard, whole in zip(ours.parameters(), plain.parameters(), strict=True):
        padded = nn.functional.pad(whole.grad.flatten(), (0, -whole.numel() % pool.world_size()))
        assert torch.equal(shard.grad, padded.chunk(pool.world_size())[pool.rank()])


# Ways to call units. Each returns the loss of a rank's micro-batch n by `model`, `ours` or `plain`.


def calls(model, rank, n, ours, plain, plan=(None,), how="plainly"):
    return loss_of(model(make_batch(rank, n).requires_grad_(), plan[n % len(plan)], HOW[how]))


def two_graphs_in_one_backward(model, rank, n, ours, plain):
    return batch_loss(model, rank, n) + batch_loss(model, rank, n + 50)


def two_graphs_alive(model, rank, n, ours, plain):
    if model is plain or n % 2 == 0:
        now = batch_loss(model, rank, n)
        model.later = batch_loss(model, rank, n + 1)
    return model.later if model is ours and n % 2 else now


def evaluated(model, rank, n, ours, plain):
    """Evaluates between forward and backward, and after the step, with and without a graph."""
    losses = []
    x = make_batch(0, 9)
    for _ in range(2):
        for mode in (torch.inference_mode, nullcontext):
            with mode():
                assert torch.equal(ours(x), plain(x))
                assert torch.is_grad_enabled() or assert_at_rest(ours) is None
                assert torch.equal(ours[1](x), plain[1](x))
        losses.append(batch_loss(model, rank, n))
    return losses[0]


def frozen(model, rank, n, ours, plain):
    """A whole unit is frozen, and of the others one half, then the other."""
    model[0].requires_grad_(False)
    for block in list(model)[1:4]:
        block.one.requires_grad_(n < 2)
        block.two.requires_grad_(n >= 2)
    return batch_loss(model, rank, n)


SOME = [[0, 2, 3], [0, 2], [3, 2, 1, 0], []]
TWICE = [[0, 1, 1, 2, 0, 3, 1]]
# (loss, micro-batches). A unit that backward reaches twice is reduced twice, as if it were two
# would be added in another order.
WAYS = {
    **{how: (functools.partial(calls, how=how), 2) for how in HOW},
    "not all of them": (functools.partial(calls, plan=SOME), 2),
    "twice, with others between": (functools.partial(calls, plan=TWICE), 1),
    "twice, checkpointed": (functools.partial(calls, plan=TWICE, how="checkpointed"), 1),
    "two graphs, one backward": (two_graphs_in_one_backward, 1),
    "two graphs alive": (two_graphs_alive, 2),
    "evaluated": (evaluated, 1),
    "frozen": (frozen, 2),
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pool.on(2)
def test_units_are_called_as_one_likes(way, reshard):
    ours, plain = pair(reshard)
    loss, micro_batches = WAYS[way]
    sizes = [group.shard.nbytes for group in groups(ours)]  # the root's first

    seen = train(ours, plain, functools.partial(loss, ours=ours, plain=plain), 2, micro_batches)

    gathered, reduced = (size / 2 for size in sent_by_a_rank(seen))  # in a step, of two
    if way in ("plainly", "checkpointed") or (way == "reentrant" and reshard):
        assert gathered == 2 * (1 + reshard) * sum(sizes)  # two forwards, two backwards
        assert reduced == sum(sizes)
    if way == "frozen":  # backward does not reach the first block
        assert gathered == 2 * (1 + reshard) * sum(sizes) - 2 * reshard * sizes[1]
        assert reduced == sum(sizes) - sizes[1]


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
    "16 bits": (functools.partial(make_model, "plain", torch.bfloat16), batch_loss),
    "two dtypes in one unit": (functools.partial(make_model, "mixed"), batch_loss),
    "outputs of every kind, nested units": (Outer, batch_loss),
    "used by some ranks": (functools.partial(Reader, [6, 1, 40, 3, 1, 17]), Reader.__call__),
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
        for sharded, whole in zip(ours.parameters(), plain.parameters(), strict=True):
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
def test_gradients_of_parameters_that_were_frozen_at_first_are_not_sent():
    plain = Blocks()
    for block in list(plain)[:4]:
        block.one.requires_grad_(False)
    ours = shard(copy.deepcopy(plain))
    sizes = [group.shard.nbytes for group in groups(ours)]
    trained = [g.shard.nbytes for g in groups(ours) if g.parameters[0].sharded.requires_grad]

    seen = train(ours, plain, steps=1)

    assert sent_by_a_rank(seen) == (2 * sum(sizes), sum(trained))
    assert sum(trained) < 0.6 * sum(sizes)


@pool.on(2)
def test_a_plain_state_dict_loads_into_the_model_and_into_parts_of_it():
    model, plain = pair()
    for ours, whole in (
        (nn.Sequential(model), nn.Sequential(plain)),
        (model[1], plain[1]),
        (model[2].one, plain[2].one),
    ):
        for parameter in whole.parameters():
            nn.init.normal_(parameter)
        ours.load_state_dict(whole.state_dict())
        assert_equal(fsdp.full_state_dict(model), dict(plain.state_dict()))


@pool.on(2)
def test_a_state_dict_loads_into_a_module_that_is_registered_twice():
    layer = nn.Linear(6, 6)
    plain = nn.Sequential(layer, nn.ReLU(), layer)
    ours = fully_shard(copy.deepcopy(plain))
    nn.init.normal_(layer.weight)
    fsdp.load_full_state_dict(ours, plain.state_dict())
    assert_equal(fsdp.full_state_dict(ours), dict(plain.state_dict()))


@pool.on(2)
def test_no_sync_in_no_sync_ends_with_the_outer_one():
    layer = fully_shard(nn.Linear(6, 3))
    with fsdp.no_sync(layer):
        with fsdp.no_sync(layer):
            pass
        batch_loss(layer, pool.rank(), 0).backward()
        assert layer.weight.grad is None
    batch_loss(layer, pool.rank(), 1).backward()
    assert layer.weight.grad is not None


def hooks_and_what_they_saw(fully_shard):
    """Return (hook, whether the weight was whole) in the order of calls, and the results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    layer = model[0]
    seen = []

    def hook(method, **options):
        def see(module, *_):
            is_whole = layer.weight.shape == (6, 6) and type(layer.weight) is nn.Parameter
            seen.append((method, options, is_whole))

        getattr(layer, method)(see, **options)

    hook("register_forward_pre_hook")
    hook("register_forward_hook")
    shard(model, fully_shard)
    layer.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    layer.register_forward_hook(lambda module, inputs, output: output.tanh())
    for place in ({}, {"prepend": True}):
        hook("register_forward_pre_hook", **place)
        hook("register_forward_hook", **place)
        hook("register_full_backward_pre_hook", **place)
        hook("register_full_backward_hook", **place)
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


@pool.on(2)
def test_clipping_where_a_rank_has_nothing_and_a_square_or_a_sum_would_overflow():
    layer = fully_shard(nn.Linear(1, 1, bias=False).half())
    layer(torch.full((1, 1), 40000.0).half()).sum().backward()
    for max_norm, after in ((1e6, 40000.0), (20000.0, 20000.0)):
        assert fsdp.clip_grad_norm_(layer, max_norm).item() == 40000.0
        assert layer.weight.grad.flatten().tolist() == [after] * (pool.rank() == 0)


@pool.on(2)
def test_the_norm_of_16_bit_gradients_is_not_rounded_to_16_bits():
    layer = fully_shard(nn.Linear(2, 1, bias=False).bfloat16())
    layer(torch.ones(1, 2).bfloat16()).sum().backward()
    norm = fsdp.clip_grad_norm_(layer, 1.0)
    assert_equal(norm, torch.tensor(2.0, dtype=torch.float64).sqrt())


complex_numbers_are_sent = pytest.mark.skipif(
    IS_TORCH_2_6, reason="gloo sends no complex numbers in torch 2.6"
)


@complex_numbers_are_sent
@pool.on(2)
def test_a_complex_parameter_that_one_rank_does_not_use_gets_the_mean_gradient():
    layer = fully_shard(nn.Linear(6, 3, dtype=torch.complex64))
    use = 1 - pool.rank()  # rank 1, which has the shard of the bias, does not use it
    layer.forward = lambda x: x @ layer.weight.T + (layer.bias if use else 0)
    layer(torch.ones(1, 6, dtype=torch.complex64)).sum().abs().backward()
    assert (layer.bias.numel() > 0) == (not use)
    for gradient in layer.bias.grad.abs().tolist() if layer.bias.numel() else ():
        assert gradient == pytest.approx(0.5)


@complex_numbers_are_sent
@pool.on(2)
def test_complex_gradients_are_clipped_as_torchs():
    plain = nn.Linear(6, 3, dtype=torch.complex64)
    layer = fully_shard(copy.deepcopy(plain))
    plain.load_state_dict(fsdp.full_state_dict(layer))
    for model in (layer, plain):
        model(make_batch(0, 0).to(torch.complex64)).abs().sum().backward()

    norm = fsdp.clip_grad_norm_(layer, 0.1)

    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    for mine, whole in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, mine._sharded_parameter.shard_of(whole.grad))


BF16 = torch.bfloat16


@pytorchs_runs
@pytest.mark.parametrize(
    ("dtypes", "offload"), [((BF16, torch.float32), 0), ((BF16, None), 1), ((None, BF16), 0)]
)
@pool.on(2)
def test_mixed_precision_as_pytorchs(dtypes, offload):
    """Gradients of two micro-batches, the first in no_sync(), are added in the reduce dtype."""
    ours = Blocks()
    theirs = copy.deepcopy(ours)
    shard(theirs, pytorchs_fully_shard, mp_policy=pytorchs.MixedPrecisionPolicy(*dtypes))
    offload_policy = fsdp.CPUOffloadPolicy() if offload else None
    shard(ours, mp_policy=fsdp.MixedPrecisionPolicy(*dtypes), offload_policy=offload_policy)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for number in range(4):
        is_last = number % 2 == 1
        theirs.set_requires_gradient_sync(is_last)
        with nullcontext() if is_last else fsdp.no_sync(ours):
            outputs = [model(make_batch(pool.rank(), number)) for model in (ours, theirs)]
            assert torch.equal(*outputs)
            for output in outputs:
                loss_of(output.float()).backward()
        if is_last:
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert_equal(a.grad, a._sharded_parameter.shard_of(b.grad.full_tensor()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


COMPUTES_ON = [  # the parameters' device, the group's backends, whether there is a GPU, the unit's
    ("cpu", "cpu:gloo,cuda:nccl", True, "cpu"),
    ("cuda:1", "cpu:gloo,cuda:gloo", True, "cuda:1"),
    ("cpu", "cuda:nccl", True, "cuda"),
    ("meta", "cpu:gloo,cuda:nccl", True, "cuda"),
    ("meta", "cpu:gloo,cuda:nccl", False, "cpu"),
    ("meta", "cpu:gloo,cuda:gloo", True, "cpu"),
]


@pytest.mark.parametrize(("device", "backends", "has_gpu", "expected"), COMPUTES_ON)
def test_a_unit_computes_where_its_parameters_are(device, backends, has_gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert fsdp.device_for(torch.device(device), backends) == torch.device(expected)


@pytest.mark.cpu
@pool.on(2)
def test_a_backend_may_have_another_name():
    group = dist.new_group(range(2), backend="cpu:gloo,cuda:gloo")
    assert fsdp.fully_shard(nn.Linear(2, 2), process_group=group).weight.is_cpu


@pool.on(2)
def test_a_model_on_the_meta_device_becomes_real_unit_by_unit():
    """Ranks have other seeds. No rank holds more than the largest unit, and one module more."""

    def parameters_held():
        whole = [p for p in model.parameters() if not hasattr(p, "_sharded_parameter")]
        return held([parameter for parameter in whole if not parameter.is_meta])

    with torch.device("meta"):
        model = Blocks(5)
        model[1].norm = nn.BatchNorm1d(3)
        model[2].norm = nn.BatchNorm1d(3, affine=False)  # buffers and no parameter
    model[-1].bias.requires_grad_(False)
    torch.manual_seed(0)
    plain = copy.deepcopy(model).to_empty(device=pool.device())
    for module in plain.modules():
        getattr(module, "reset_parameters", int)()

    torch.manual_seed(pool.rank())
    with Watch(parameters_held) as watch:
        shard(model)

    block = 4 * sum(p.numel() for p in Block().parameters())
    assert max(bytes_held for _, bytes_held in watch.seen) <= 2 * block
    assert_at_rest(model)
    assert_equal(fsdp.full_state_dict(model), dict(plain.state_dict()))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["5.bias"]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("N", [2, 1024])
def test_costs(N, reshard):
    """In this process, which is the last of N ranks in a world that moves no data."""
    with fake_world(N, rank=N - 1):
        assert_costs(N, reshard)


def is_gathering(group):
    return (
        group.gather_handle is not None
        and group.parameters[0].current().dim() == 2
        and group.parameters[0].current() is group.parameters[0].sharded
    )


def assert_costs(N, reshard):
    model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(6)])
    x = torch.randn(1, 40)
    for layer in (*model, model):
        fsdp.fully_shard(layer, reshard_after_forward=reshard)
    layers = groups(model)
    numbers = list(range(6))
    unit = layers[0].unsharded.nbytes
    assert 4 * 40 * 40 <= unit < 4 * 40 * 40 + 4 * 8 * N

    def see():
        gathered = held([layer.unsharded for layer in layers])
        gradients = [p.unsharded.grad for layer in layers for p in layer.parameters]
        sent = [tensor for layer in layers for tensor in (layer.gradients, layer.received)]
        gathering = [n for n in numbers if is_gathering(layers[n])]
        reducing = [n for n in numbers if layers[n].reducing]
        return gathered / unit, held(gradients + sent) / unit, (gathering, reducing)

    losses = []  # graphs without a backward hold up nothing
    for _ in range(2):  # the first pass does not know which unit is next
        losses.append(model(x).sum())
        with fsdp.SentBytes() as sent, Watch(see) as watch:
            losses.append(model(x).square().mean())
            losses[-1].backward()
        assert sent.total == pytest.approx((2 + reshard) * 6 * unit * (N - 1) / N)
        gathered, gradients, _ = zip(*(seen for _, seen in watch.seen), strict=True)
        assert max(gathered) == (2 if reshard else 6)
        assert 2 <= max(gradients) <= 3.01  # a sum, of 1/N, is made before what it adds is freed
        assert_at_rest(model)
    # While a unit computes, the next is gathered. In its backward, which has two products, the
    # gradients of the unit before it are reduced.
    gradients = [p.grad for p in model.parameters()]
    assert held(model.parameters()) == held(gradients) == 6 * unit / N
    if not reshard:
        return
    expected = [([n + 1] if n < 5 else [], []) for n in numbers]
    for n in reversed(numbers):
        products = 2 if n > 0 else 1
        gathering = [n - 1] if n > 0 else []
        expected += [(gathering, [n + 1] if n < 5 else [])] * products
    assert [under_way for name, (_, _, under_way) in watch.seen if name == "aten::mm"] == expected


@pool.on(2)
def test_errors_on_every_rank():
    late = pool.rank() == 1
    batch = make_batch(0, 0)
    model, plain = pair()
    saved = fsdp.full_state_dict(model)
    moved, _ = pair()
    moved[1] = moved[1].double()
    replaced, _ = pair()
    replaced[-1].bias = nn.Parameter(torch.zeros(3))
    tied = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))
    tied[1].weight = tied[0].weight
    sharded = fully_shard(tied[0])
    opaque = fully_shard(Block())
    opaque.forward = lambda x: types.SimpleNamespace(y=opaque.two(opaque.one(x)))
    expert = nn.Linear(3, 2)
    expert.differ_between_ranks = True
    hooked = nn.Linear(3, 2)
    hooked.bias.register_hook(torch.neg)
    hooked_later = fully_shard(nn.Linear(6, 2))
    hooked_later.bias.register_post_accumulate_grad_hook(torch.neg)
    sparse = fully_shard(nn.Embedding(4, 2, sparse=True))
    in_place = shard(nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), Block()))
    with torch.device("meta"):
        buffers = nn.Sequential(nn.Linear(2, 2), nn.Module())
        buffers[1].register_buffer("frequencies", torch.ones(2))
    other_shape = nn.Linear(3 + late, 2)
    other_order = nn.Conv2d(2, 2, 2)
    if late:
        other_order.to(memory_format=torch.channels_last)
    other_frozen = nn.Linear(3, 2).requires_grad_(not late)
    transposed = fully_shard(make_model("odd"))
    short = saved | {"4.bias": torch.ones(1)}
    group_of_rank_0 = pool._groups[1]
    for error, words, do in [
        (ValueError, r"differ in .*weight: \(2, 3\)", lambda: fully_shard(other_shape)),
        (ValueError, r"weight: .* stride \(8, 1, 4, 2\)", lambda: fully_shard(other_order)),
        (ValueError, "differ in .*bias.* frozen", lambda: fully_shard(other_frozen)),
        (ValueError, "bias has hooks", lambda: fully_shard(hooked)),
        (ValueError, "split parameter", lambda: fully_shard(expert)),
        (ValueError, "bias has hooks", lambda: hooked_later(batch)),
        (RuntimeError, "parse", lambda: sparse(torch.arange(3)).sum().backward()),
        (ValueError, "1.weight of Sequential is tied to another unit's", lambda: fully_shard(tied)),
        (ValueError, "ModuleList has no forward", lambda: fully_shard(nn.ModuleList([Block()]))),
        (ValueError, "a unit already", lambda: fully_shard(sharded)),
        (ValueError, r"1 \(Module\) is on the meta device", lambda: fully_shard(buffers)),
        (RuntimeError, "hidden in other objects", lambda: opaque(batch).y.sum().backward()),
        (
            RuntimeError,
            "without create_graph",
            lambda: model(batch).sum().backward(create_graph=True),
        ),
        (RuntimeError, "PostBackward.* inplace", lambda: in_place(batch.clone().requires_grad_())),
        (ValueError, "weight is in no unit", lambda: fsdp.clip_grad_norm_(plain, 1.0)),
        (ValueError, "weight is in no unit", lambda: pieces(plain, adamw(plain))),
        (ValueError, r"is \(3,\), not \(1,\)", lambda: fsdp.load_full_state_dict(model, short)),
        (RuntimeError, "call full_state_dict", model.state_dict),
        (
            ValueError,
            "^transposed is not contiguous",
            lambda: pieces(transposed, adamw(transposed)),
        ),
        (RuntimeError, "copy it before fully_shard", lambda: copy.deepcopy(model)),
        (ValueError, r"Linear\.weight was moved or replaced", lambda: moved(batch)),
        (ValueError, r"Linear\.bias was moved or replaced", lambda: replaced(batch)),
    ]:
        with pytest.raises(error, match=words):
            do()
    with pytest.raises(ValueError, match="rank 1 is not in process_gr") if late else nullcontext():
        fsdp.fully_shard(nn.Linear(2, 2), process_group=group_of_rank_0)
    # None of these changes anything.
    fsdp.load_full_state_dict(model.float(), {name: t.double() for name, t in saved.items()})
    assert torch.equal(model(batch), plain(batch))

"""muon.py: what the claims of --muon do not say. Equal is bitwise, to torch.optim.Muon."""

import copy
import math
import pickle
from collections import defaultdict
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.training import one_device
from shared import Collectives, fake_world, loss_of, make_batch, randn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import expert_parallel
import fsdp
import muon
import tensor_parallel
from muon import Muon, ShardedMuon

needs_torch_2_9 = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is in torch 2.9 and newer"
)
OPTIONS = {"lr": 0.1, "weight_decay": 0.5}
TALL = (33, 7)
WIDE = (7, 33)
SQUARE = (19, 19)


def our_muon(parameters, **options):
    return Muon(parameters, process_group=pool.group(), **OPTIONS | options)


def matrices(*shapes, dtype=torch.float32):
    numbers = [randn(shape, seed, dtype) for seed, shape in enumerate(shapes)]
    return list(map(nn.Parameter, numbers))


def set_gradients(ours, plain, step):
    """Ours are this rank's. The plain ones are the mean of all ranks, added in rank order.

    The sum of three ranks' gradients is beyond float16.
    """
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        total = 0.0  # in 16 bits, the sum is in float32 and is rounded once
        for rank in range(pool.world_size()):
            gradient = torch.empty_like(theirs)
            gradient.copy_(15_000 * randn(theirs.shape, 1000 * step + 100 * rank + number))
            if rank == pool.rank():
                mine.grad = gradient
            total = total + gradient.to(torch.promote_types(theirs.dtype, torch.float32))
        theirs.grad = torch.empty_like(theirs).copy_(total / pool.world_size())


def assert_all_equal(ours, plain):
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def train_as_one_device(ours, optimizer, plain_optimizer, start=0):
    plain = parameters_of(plain_optimizer)
    for step in range(start, start + 3):
        set_gradients(ours, plain, step)
        optimizer.step()
        plain_optimizer.step()
        assert_all_equal(ours, plain)


# ---- the idea, and the owners


@needs_torch_2_9
@pool.on(2, 3)
def test_the_naive_step_is_bitwise_that_of_one_device():
    plain = matrices(WIDE, TALL, SQUARE, WIDE)
    ours = copy.deepcopy(plain)
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS)
    state = defaultdict(dict)
    arguments = (ours, state, plain_optimizer.param_groups[0], pool.group())
    naive = SimpleNamespace(step=partial(muon.naive_step, *arguments))
    train_as_one_device(ours, naive, plain_optimizer)
    assert set(state) == set(ours[pool.rank() :: pool.world_size()])


MODELS = {
    "gpt": 4
    * [
        (576, 192),
        (192, 192),
        (768, 192),
        (192, 768),
    ],
    "thin matrices": [(8, 2048)] * 24 + [(128, 128)] * 48,
}


@pytest.mark.parametrize("N", [2, 7, 8])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_own_even_shares_of_work_and_momentum(model, N):
    """X Xᵀ, its square, and the product with X take 2m²n + 2m³ + 2m²n operations."""
    assert muon.operations((100, 30)) == 4 * 30**2 * 100 + 2 * 30**3
    shapes = MODELS[model]
    owned = muon.assign_owners(dict(enumerate(shapes)), N)
    for size_of, most in ((muon.operations, 1.15), (math.prod, 1.25)):
        loads = [sum(size_of(shapes[i]) for i in own) for own in owned]
        assert max(loads) <= most * sum(loads) / N
    assert sorted(chain(*owned)) == [*range(len(shapes))]


# ---- equal to one device

PARAMETERS = {
    "bf16": matrices(WIDE, TALL, SQUARE, dtype=torch.bfloat16),
    "fp16": matrices(WIDE, TALL, dtype=torch.float16),
    "several dtypes and strides": [
        *matrices(WIDE, TALL),
        *matrices(WIDE, dtype=torch.float64),
        nn.Parameter(randn(WIDE, dtype=torch.float32).T),
    ],
    "fewer than ranks": matrices(WIDE),
    "groups with their own options": [
        {"params": matrices(WIDE), "lr": torch.tensor(0.3), "ns_steps": 3},
        {"params": matrices(TALL), "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    ],
}


@needs_torch_2_9
@pytest.mark.parametrize("which", PARAMETERS)
@pool.on(1, 3)
def test_matrices_train_bitwise_as_on_one_device(which):
    optimizer = our_muon(copy.deepcopy(PARAMETERS[which]))
    plain_optimizer = torch.optim.Muon(copy.deepcopy(PARAMETERS[which]), **OPTIONS)
    train_as_one_device(parameters_of(optimizer), optimizer, plain_optimizer)


@needs_torch_2_9
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [TALL, WIDE])
@pool.on(1, 3)
def test_a_stack_trains_bitwise_as_its_matrices(shape, dtype):
    plain = matrices(shape, shape, shape, dtype=dtype)
    stack = stack_of(plain)
    optimizer = our_muon([*matrices(SQUARE), stack])
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS)
    for step in range(3):
        own = copy.deepcopy(plain)
        set_gradients(own, plain, step)
        stack.grad = torch.stack([matrix.grad for matrix in own])
        optimizer.step()
        plain_optimizer.step()
        assert_all_equal(stack, plain)


def stack_of(plain):
    values = [matrix.detach() for matrix in plain]
    return nn.Parameter(torch.stack(values))


def test_a_stack_takes_the_operations_of_its_matrices():
    of_a_matrix = muon.operations((100, 30))
    assert muon.operations((7, 100, 30)) == 7 * of_a_matrix


@needs_torch_2_9
@pool.on(2, 3)
def test_experts_that_are_split_over_ranks_train_as_on_one_device():
    """Each rank has other experts, so its process group is itself alone."""
    alone = [dist.new_group([rank]) for rank in range(pool.world_size())]
    plain = expert_parallel.MoE(6, 5, 6)
    model = expert_parallel.parallelize(copy.deepcopy(plain), pool.group())
    with pytest.raises(ValueError, match="differs between ranks"):
        our_muon(model.experts.parameters())
    options = {**OPTIONS, "process_group": alone[pool.rank()]}
    optimizer = Muon(model.experts.parameters(), **options)
    plain_optimizer = Muon(plain.experts.parameters(), **options)
    for step in range(3):
        for name, parameter in plain.experts.named_parameters():
            parameter.grad = randn(parameter.shape, 10 * step + len(name), torch.float32)
            shards = parameter.grad.chunk(pool.world_size())
            own = model.experts.get_parameter(name)
            own.grad = shards[pool.rank()]
        optimizer.step()
        plain_optimizer.step()
    full = expert_parallel.full_state_dict(model)
    assert_all_equal(full.values(), plain.state_dict().values())


@needs_torch_2_9
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pool.on(1, 3)
def test_clipping_is_that_of_the_mean_gradient(norm_type):
    plain = matrices(WIDE, TALL)
    plain += matrices(SQUARE, WIDE, dtype=torch.float64)
    ours = copy.deepcopy(plain)
    optimizer = our_muon(ours)
    set_gradients(ours, plain, 0)
    expected = nn.utils.clip_grad_norm_(plain, 0.5, norm_type)
    norm = muon.clip_grad_norm_(optimizer, 0.5, norm_type)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(ours, plain, strict=True):
        dist.all_reduce(mine.grad, group=pool.group())
        mean = mine.grad / pool.world_size()
        torch.testing.assert_close(mean, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
@pool.on(1)
def test_a_norm_type_that_is_not_positive_is_an_error(norm_type):
    with pytest.raises(ValueError, match="positive"):
        muon.clip_grad_norm_(our_muon(matrices(WIDE)), 1.0, norm_type)


@pool.on(1)
def test_clipping_the_optimizer_of_the_other_parameters_names_the_function():
    with pytest.raises(ValueError, match="SGD gets mean gradients"):
        muon.clip_grad_norm_(torch.optim.SGD(matrices(WIDE), lr=0.1), 1.0)


@pool.on(3)
def test_clipping_when_only_one_rank_has_a_gradient():
    """Rank 2 has no matrix of its own."""
    ours = matrices(WIDE, TALL)
    optimizer = our_muon(ours)
    if pool.rank() == 1:
        ours[0].grad = torch.ones(WIDE)
    norm = muon.clip_grad_norm_(optimizer, 100.0)
    assert norm == pytest.approx((7 * 33) ** 0.5 / 3)
    assert ours[1].grad is None


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
@pool.on(1)
def test_a_copy_is_an_error_that_says_what_to_do(copied):
    optimizer = our_muon(matrices(WIDE))
    with pytest.raises(TypeError, match="make one for the copied parameters"):
        copied(optimizer)


@needs_torch_2_9
@pool.on(1)
def test_the_options_have_pytorchs_defaults():
    weight = nn.Parameter(torch.ones(2, 3))
    ours = Muon([weight], process_group=pool.group())
    theirs = torch.optim.Muon([weight])
    assert ours.defaults.items() <= theirs.defaults.items()


@needs_torch_2_9
@pool.on(3)
def test_our_state_and_torchs_load_into_each_other():
    plain = matrices(WIDE, TALL, WIDE)
    ours = copy.deepcopy(plain)
    optimizer = our_muon(ours)
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS)
    train_as_one_device(ours, optimizer, plain_optimizer)

    our_state = optimizer.state_dict()
    optimizer = our_muon(ours, lr=9.0)
    optimizer.load_state_dict(plain_optimizer.state_dict())
    plain_optimizer = torch.optim.Muon(plain, lr=9.0)
    plain_optimizer.load_state_dict(our_state)
    assert len(optimizer.state) == 1  # the momentum of this rank's own matrix
    train_as_one_device(ours, optimizer, plain_optimizer, start=3)


# ---- what is sent


class Sent(Collectives):
    """Also adds up the bytes that go to other ranks in exchanges of uneven parts."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base" in func.__name__:
            counts = list(args[4])
            counts[self.rank] = 0
            self.bytes += sum(counts) * args[1].element_size()
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.cpu
def test_six_bytes_are_sent_and_four_held_for_each_element():
    N = 5
    shapes = [(12, 8), (8, 8), (8, 32), (30, 8)] * 8
    psi = sum(map(math.prod, shapes))
    sent_bytes = 0
    held = []  # elements of momentum, of each rank
    for rank in range(N):
        parameters = matrices(*shapes)
        with fake_world(N, rank), Sent(rank) as sent:
            optimizer = Muon(parameters)
            for matrix in parameters:
                matrix.grad = torch.ones_like(matrix)
            sent.calls.clear()
            optimizer.step()
        assert len(sent.calls) == 3
        sent_bytes += sent.bytes
        states = optimizer.state.values()
        held.append(sum(state["momentum_buffer"].numel() for state in states))
    assert sent_bytes == 6 * psi * (N - 1)
    assert sum(held) == psi
    assert max(held) <= 1.25 * psi / N


class HeldInExchange(TorchDispatchMode):
    """The bytes of tensors other than `given` that live during each all-to-all."""

    def __init__(self, given):
        super().__init__()
        self.given = [tensor.data_ptr() for tensor in given]
        self.made = {}  # {weak reference to a storage: its bytes}
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base" in func.__name__:
            alive = [nbytes for storage, nbytes in self.made.items() if not storage.expired()]
            self.bytes.append(sum(alive))
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage() if torch.is_tensor(result) else None
        if storage and storage.data_ptr() not in self.given:
            self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result


@pytest.mark.cpu
def test_a_step_holds_copies_of_the_gradients_and_after_them_only_of_the_updates():
    N = 4
    parameters = matrices(*[(64, 16)] * 8)
    psi = 8 * 64 * 16
    with fake_world(N, 0):
        optimizer = Muon(parameters)
        for matrix in parameters:
            matrix.grad = torch.ones_like(matrix)
        optimizer.step()  # makes the momenta
        gradients = [matrix.grad for matrix in parameters]
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        with HeldInExchange(gradients + momenta) as held:
            optimizer.step()
    of_gradients, of_updates = held.bytes
    assert 8 * psi <= of_gradients <= 8.1 * psi
    assert 4 * psi <= of_updates <= (4 + 2 / N) * psi + 0.1 * psi


# ---- ShardedMuon


def shard(model):
    """Return the sharded model, and {parameter: shape of the whole matrix}."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for layer in (*model.children(), model):
        fsdp.fully_shard(layer, process_group=pool.group())
    return model, {p: shapes[name] for name, p in model.named_parameters()}


def sharded_muon(parameters, shapes, **options):
    options |= {**OPTIONS, "process_group": pool.group()}
    return ShardedMuon(parameters, shapes, **options)


@needs_torch_2_9
@pool.on(1, 2, 3)
def test_sharded_matrices_train_bitwise_as_on_one_device():
    """Each step's optimizer is a new one that loads the state of the last. A part is empty."""
    sizes = [(6, 33), (33, 2), (2, 2)]
    plain = nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes])
    model, shapes = shard(copy.deepcopy(plain))
    plain_optimizer = torch.optim.Muon(plain.parameters(), **OPTIONS)
    state = sharded_muon(shapes, shapes).state_dict()
    for step in range(3):
        batches = [[make_batch(rank, step)] for rank in range(pool.world_size())]
        one_device(plain, batches)
        plain_optimizer.step()
        optimizer = sharded_muon(shapes, shapes)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model(make_batch(pool.rank(), step))).backward()
        optimizer.step()
        state = optimizer.state_dict()
        full = fsdp.full_state_dict(model)
        assert_all_equal(full.values(), plain.state_dict().values())


@pytest.mark.cpu
def test_shards_send_four_bytes_for_each_element_of_a_part():
    """Momenta and updates in bfloat16, times (N - 1) / N."""
    with fake_world(4, 1), Sent(1) as sent:
        parts = [nn.Parameter(torch.ones(4, 16)) for _ in range(4)]
        optimizer = ShardedMuon(parts, dict.fromkeys(parts, (16, 16)))
        for part in parts:
            part.grad = torch.ones_like(part)
        optimizer.step()
    assert sent.bytes == 4 * (4 * 64) * 3 / 4


PLANS = {  # kind: shape of the weight
    "column": (34, 6),
    "row": (6, 34),
    (2, 4, 6): (12, 7),
}


@needs_torch_2_9
@pytest.mark.parametrize("kind", PLANS)
@pool.on(2)
def test_slices_of_tensor_parallel_layers_train_bitwise_as_whole_matrices(kind):
    """Of a column layer, of a row layer, and of one that stacks several matrices."""
    rows, columns = PLANS[kind]
    plain = nn.Linear(columns, rows, bias=False)
    model = nn.Sequential(copy.deepcopy(plain))
    tensor_parallel.parallelize(model, {"0": kind}, pool.group())
    weight = model[0].weight
    with pytest.raises(ValueError, match="use ShardedMuon"):
        our_muon([weight])
    places = tensor_parallel.boxes_of(model[0], "weight", weight.shape)
    boxes = {weight: [(box.shape, box.offset) for box in places]}
    shapes = {weight: places[0].whole_shape}
    optimizer = sharded_muon([weight], shapes, boxes=boxes)
    plain_optimizer = torch.optim.Muon(plain.parameters(), **OPTIONS)
    for step in range(3):
        plain.weight.grad = randn(plain.weight.shape, step, torch.float32)
        weight.grad = tensor_parallel.shard(model[0], "weight", plain.weight.grad)
        optimizer.step()
        plain_optimizer.step()
        whole = tensor_parallel.full_state_dict(model)["0.weight"]
        assert torch.equal(whole, plain.weight)


@needs_torch_2_9
@pool.on(1, 3)
def test_a_sharded_stack_trains_bitwise_as_its_matrices():
    plain = matrices(TALL, TALL)
    whole = stack_of(plain).detach()
    parts = whole.flatten().tensor_split(pool.world_size())
    own = parts[pool.rank()]
    part = nn.Parameter(own.clone())
    optimizer = sharded_muon([part], {part: whole.shape})
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS)
    for step in range(3):
        for number, matrix in enumerate(plain):
            matrix.grad = randn(TALL, 10 * step + number, torch.float32)
        gradients = torch.stack([matrix.grad for matrix in plain])
        parts = gradients.flatten().tensor_split(pool.world_size())
        part.grad = parts[pool.rank()]
        optimizer.step()
        plain_optimizer.step()
        expected = stack_of(plain).flatten()
        parts = expected.tensor_split(pool.world_size())
        assert torch.equal(part, parts[pool.rank()])


@pool.on(2)
def test_parts_that_do_not_make_up_the_matrix_are_an_error():
    part = nn.Parameter(torch.ones(2, 6))
    too_small = {part: [((1, 6), (0, 0))]}
    cases = [
        ((4, 7), None),
        ((4, 6), too_small),
    ]
    for shape, boxes in cases:
        with pytest.raises(ValueError, match="parts of"):
            sharded_muon([part], {part: shape}, boxes=boxes)


# ---- errors, on all ranks

TWO = matrices(WIDE, TALL)
OF_RANK_1 = {
    "other shapes": partial(our_muon, matrices(WIDE, SQUARE)),
    "other options": partial(our_muon, TWO, lr=0.2),
}


@pytest.mark.parametrize("what", OF_RANK_1)
@pool.on(3)
def test_a_rank_that_differs_is_an_error_on_all(what):
    make = OF_RANK_1[what] if pool.rank() == 1 else partial(our_muon, TWO)
    with pytest.raises(ValueError, match="must have the same"):
        make()


def slices():
    (matrix,) = matrices(WIDE)
    matrix.differ_between_ranks = [1, 2, 7]
    return our_muon([matrix])


def later_group():
    our_muon(TWO[:1]).add_param_group({"params": TWO[1:]})


REFUSED = {
    "an unknown adjustment": (
        partial(our_muon, TWO, adjust_lr_fn="x"),
        "not supported",
    ),
    "a vector": (
        partial(our_muon, matrices((4,))),
        "2D",
    ),
    "a convolution": (
        partial(our_muon, matrices((4, 3, 3, 3))),
        "2D",
    ),
    "a group that comes later": (later_group, "constructor"),
    "tensor-parallel slices": (slices, "differs"),
}


@pytest.mark.parametrize("what", REFUSED)
@pool.on(3)
def test_what_would_be_wrong_silently_is_refused(what):
    make, word = REFUSED[what]
    with pytest.raises(ValueError, match=word):
        make()

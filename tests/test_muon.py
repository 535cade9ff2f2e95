"""muon.py: what the claims of --muon do not say. Equal is bitwise, to torch.optim.Muon."""

import copy
import math
from collections import defaultdict

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.muon import Matrices
from claims.training import one_device
from shared import Collectives, fake_world, loss_of, make_batch, randn
from torch.utils._pytree import tree_leaves

import amp
import checkpoint
import fsdp
import muon
import tensor_parallel
import zero
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
    return [nn.Parameter(randn(shape, seed, dtype)) for seed, shape in enumerate(shapes)]


def set_gradients(ours, plain, step):
    """Ours are this rank's. The plain ones are the mean of all ranks, added in rank order."""
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        total = 0.0  # in 16 bits, the sum is in float32 and is rounded once
        for rank in range(pool.world_size()):
            seed = 1000 * step + 100 * rank + number
            gradient = torch.empty_like(theirs).copy_(randn(theirs.shape, seed))
            if rank == pool.rank():
                mine.grad = gradient
            total = total + gradient.to(torch.promote_types(theirs.dtype, torch.float32))
        theirs.grad = torch.empty_like(theirs).copy_(total / pool.world_size())


def assert_all_equal(ours, plain):
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def train_as_one_device(ours, plain, optimizer, plain_optimizer, start=0):
    for step in range(start, start + 3):
        set_gradients(ours, plain, step)
        optimizer.step()
        plain_optimizer.step()
        assert_all_equal(ours, plain)


def compare(plain, **options):
    ours = copy.deepcopy(plain)
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS | options)
    train_as_one_device(ours, plain, our_muon(ours, **options), plain_optimizer)


# ---- the idea


@needs_torch_2_9
@pool.on(2, 3)
def test_the_naive_step_is_bitwise_that_of_one_device():
    plain = matrices(WIDE, TALL, SQUARE, WIDE)
    ours = copy.deepcopy(plain)
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS)
    options = plain_optimizer.param_groups[0]
    state = defaultdict(dict)
    for step in range(3):
        set_gradients(ours, plain, step)
        muon.naive_step(ours, state, options, pool.group())
        plain_optimizer.step()
    assert_all_equal(ours, plain)
    assert set(state) == set(ours[pool.rank() :: pool.world_size()])


# ---- owners


GPT = [(576, 192), (192, 192), (768, 192), (192, 768)] * 4
LLAMA = ([(256, 256)] * 2 + [(64, 256)] * 2 + [(896, 256)] * 2 + [(256, 896)]) * 8
THIN = [(8, 2048)] * 12 + [(128, 128)] * 24


@pytest.mark.parametrize("N", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("shapes", [GPT, LLAMA, THIN], ids=["gpt", "llama", "thin"])
def test_ranks_own_even_shares_of_work_and_momentum(shapes, N):
    owned = muon.assign_owners(dict(enumerate(shapes)), N)
    work = [sum(muon.operations(shapes[i]) for i in own) for own in owned]
    sizes = [sum(math.prod(shapes[i]) for i in own) for own in owned]
    assert max(work) <= 1.15 * sum(work) / N
    assert max(sizes) <= 1.25 * sum(sizes) / N


def test_every_matrix_has_one_owner_also_if_there_are_more_ranks():
    owned = muon.assign_owners(dict(enumerate(GPT)), 100)
    assert sorted(owned) == [[]] * (100 - len(GPT)) + [[number] for number in range(len(GPT))]


def test_work_is_that_of_the_matrix_products():
    """X Xᵀ, its square, and the product with X take 2m²n + 2m³ + 2m²n operations."""
    assert muon.operations((100, 30)) == 4 * 30**2 * 100 + 2 * 30**3


# ---- equal to one device


@needs_torch_2_9
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pool.on(1, 3)
def test_other_dtypes_are_bitwise_those_of_one_device(dtype):
    compare(matrices(WIDE, TALL, SQUARE, dtype=dtype))


@needs_torch_2_9
@pool.on(3)
def test_matrices_of_several_dtypes_and_strides_share_an_optimizer():
    in_16_bits = matrices(WIDE, dtype=torch.bfloat16)
    transposed = nn.Parameter(randn(WIDE, dtype=torch.float32).T)
    compare([*matrices(WIDE, TALL), *in_16_bits, transposed])


@needs_torch_2_9
@pool.on(2)
def test_groups_have_their_own_options():
    plain = matrices(WIDE, TALL)
    ours = copy.deepcopy(plain)
    other = {"lr": 0.3, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = our_muon([{"params": ours[:1]}, {"params": ours[1:], **other}])
    groups = [{"params": plain[:1]}, {"params": plain[1:], **other}]
    train_as_one_device(ours, plain, optimizer, torch.optim.Muon(groups, **OPTIONS))


@needs_torch_2_9
@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])], ids=str)
@pool.on(2)
def test_the_learning_rate_may_be_a_tensor(lr):
    compare(matrices(WIDE, TALL), lr=lr)


@needs_torch_2_9
@pool.on(3)
def test_a_rank_that_owns_nothing_takes_part():
    compare(matrices(WIDE))


@pool.on(2)
def test_sums_of_float16_gradients_do_not_overflow():
    (ours,) = matrices(WIDE, dtype=torch.float16)
    optimizer = our_muon([ours])
    ours.grad = torch.full_like(ours, 60_000)
    optimizer.step()
    assert ours.isfinite().all()


@pool.on(2)
def test_a_sparse_gradient_counts_as_a_dense_one():
    sparse = nn.Parameter(torch.ones(4, 6))
    dense = copy.deepcopy(sparse)
    optimizer = our_muon([sparse, dense])
    dense.grad = torch.eye(4, 6)
    sparse.grad = torch.eye(4, 6).to_sparse()
    optimizer.step()
    assert torch.equal(sparse, dense)


@pool.on(2)
def test_step_leaves_gradients_as_they_are():
    (ours,) = matrices(WIDE)
    optimizer = our_muon([ours])
    ours.grad = randn(WIDE, pool.rank(), torch.float32)
    before = ours.grad.clone()
    optimizer.step(None)
    assert torch.equal(ours.grad, before)


@pool.on(2)
def test_grad_scaler_skips_the_step_on_all_ranks_if_one_overflows():
    (ours,) = matrices(WIDE)
    optimizer = our_muon([ours])
    ours.grad = torch.full_like(ours, torch.inf if pool.rank() else 1.0)
    scaler = amp.GradScaler(process_group=pool.group())
    scaler.step(optimizer)
    assert not optimizer.state


@pool.on(2)
def test_zero1_trains_the_other_parameters_as_without_muon():
    module = Matrices()
    alone = copy.deepcopy(module)
    optimizers = [our_muon([module.square.weight])]
    for each in (module, alone):
        others = [each.tall.weight, each.wide.weight]
        optimizers.append(zero.Zero1(each, torch.optim.AdamW, pool.group(), params=others))
        loss_of(each(make_batch(pool.rank(), 0))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(module.tall.weight, alone.tall.weight)
    assert not torch.equal(module.square.weight, alone.square.weight)


# ---- state


@needs_torch_2_9
@pool.on(3)
def test_our_state_and_torchs_load_into_each_other():
    """Each optimizer goes on from the other's state, which stays as it is."""
    plain = matrices(WIDE, TALL, WIDE)
    ours = copy.deepcopy(plain)
    optimizer = our_muon(ours)
    plain_optimizer = torch.optim.Muon(plain, **OPTIONS)
    train_as_one_device(ours, plain, optimizer, plain_optimizer)

    our_state = optimizer.state_dict()
    plain_state = copy.deepcopy(plain_optimizer.state_dict())
    optimizer = our_muon(ours, lr=9.0)
    optimizer.load_state_dict(plain_state)
    plain_optimizer = torch.optim.Muon(plain, lr=9.0)
    plain_optimizer.load_state_dict(our_state)
    before = copy.deepcopy(plain_state["state"])

    assert len(optimizer.state) == 1  # the momentum of this rank's own matrix
    train_as_one_device(ours, plain, optimizer, plain_optimizer, start=3)
    assert_all_equal(tree_leaves(plain_state["state"]), tree_leaves(before))


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


def step_of_a_fake_rank(N, rank, shapes):
    with fake_world(N, rank):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = Muon(parameters)
        for matrix in parameters:
            matrix.grad = torch.ones_like(matrix)
        with Sent(rank) as sent:
            optimizer.step()
        elements = sum(state["momentum_buffer"].numel() for state in optimizer.state.values())
    return sent, elements


@pytest.mark.cpu
@pytest.mark.parametrize("N", [2, 5, 16])
def test_six_bytes_are_sent_and_four_held_for_each_element(N):
    shapes = [(12, 8), (8, 8), (8, 32), (30, 8)] * 8
    psi = sum(map(math.prod, shapes))
    ranks = [step_of_a_fake_rank(N, rank, shapes) for rank in range(N)]
    assert sum(sent.bytes for sent, _ in ranks) == 6 * psi * (N - 1)
    assert sum(elements for _, elements in ranks) == psi
    assert max(elements for _, elements in ranks) <= 1.25 * psi / N
    assert {len(sent.calls) for sent, _ in ranks} == {3}


@pytest.mark.cpu
def test_one_of_1024_ranks_sends_its_update_to_all():
    size = 12 * 8
    sent, elements = step_of_a_fake_rank(1024, 7, [(12, 8)] * 10)
    assert sent.bytes == 9 * 4 * size + 1023 * 2 * size
    assert elements == size


@pool.on(2)
def test_unused_matrices_do_not_travel():
    used, unused = matrices(WIDE, WIDE)
    optimizer = our_muon([used, unused])
    used.grad = torch.ones_like(used)
    with Sent(pool.rank()) as sent:
        optimizer.step()
    assert sent.bytes <= 4 * used.numel()


# ---- ShardedMuon


def shard(model):
    """Return the sharded model, and {parameter: shape of the whole matrix}."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for layer in model.children():
        fsdp.fully_shard(layer, process_group=pool.group())
    fsdp.fully_shard(model, process_group=pool.group())
    return model, {p: shapes[name] for name, p in model.named_parameters()}


def sharded_muon(parameters, shapes):
    return ShardedMuon(parameters, shapes, process_group=pool.group(), **OPTIONS)


def train_sharded(model, optimizer, step):
    optimizer.zero_grad()
    batch = make_batch(pool.rank(), step)
    loss_of(model(batch)).backward()
    optimizer.step()


@needs_torch_2_9
@pool.on(1, 2, 3)
def test_sharded_matrices_train_bitwise_as_on_one_device():
    plain = Matrices()
    model, shapes = shard(copy.deepcopy(plain))
    optimizer = sharded_muon(model.parameters(), shapes)
    plain_optimizer = torch.optim.Muon(plain.parameters(), **OPTIONS)
    for step in range(3):
        batches = [[make_batch(rank, step)] for rank in range(pool.world_size())]
        one_device(plain, batches)
        plain_optimizer.step()
        train_sharded(model, optimizer, step)
        full = fsdp.full_state_dict(model)
        assert_all_equal(full.values(), plain.state_dict().values())


@needs_torch_2_9
@pool.on(3)
def test_parts_may_be_any_numbers_of_rows():
    """The last rank has none, and no gradient."""
    (plain,) = matrices(TALL)
    rows = [slice(20), slice(20, 33), slice(0)][pool.rank()]
    part = nn.Parameter(plain[rows].detach().clone())
    optimizer = sharded_muon([part], {part: plain.shape})
    plain_optimizer = torch.optim.Muon([plain], **OPTIONS)
    for step in range(2):
        plain.grad = randn(TALL, step).float()
        if part.numel():
            part.grad = plain.grad[rows]
        optimizer.step()
        plain_optimizer.step()
    assert torch.equal(part, plain[rows])


def train_and_checkpoint(seed, steps, function, folder):
    """Save after the steps, or load. Return the whole momenta."""
    torch.manual_seed(seed)
    model, shapes = shard(nn.Sequential(nn.Linear(6, 33, bias=False)))
    optimizer = sharded_muon(model.parameters(), shapes)
    for step in range(steps):
        train_sharded(model, optimizer, step)
    pieces = checkpoint.shard_pieces(fsdp.shards(model, optimizer))
    function(folder, pieces, process_group=pool.group())
    (parameter,) = shapes
    return fsdp.gather_full(parameter, optimizer.state[parameter]["momentum_buffer"])


def test_the_momentum_of_shards_is_saved_and_loaded_at_another_number_of_ranks(tmp_path):
    saved = pool.run(2, train_and_checkpoint, 1, 2, checkpoint.save, tmp_path)
    loaded = pool.run(3, train_and_checkpoint, 2, 1, checkpoint.load, tmp_path)
    assert_all_equal(loaded, [saved[0]] * 3)


@pool.on(4)
def test_shards_send_a_quarter_of_what_matrices_send():
    """4Ψ/N bytes from each rank, times (N - 1) / N: momenta and updates in bfloat16."""
    part = nn.Parameter(torch.ones(1, 64))
    optimizer = sharded_muon([part], {part: (16, 16)})
    part.grad = torch.ones_like(part)
    with Sent(pool.rank()) as sent:
        optimizer.step()
    everyone = [None] * 4
    dist.all_gather_object(everyone, sent.bytes, group=pool.group())
    assert sum(everyone) == 4 * 256 * 3 / 4


@pool.on(2)
def test_the_state_of_shards_is_this_ranks_part_and_loads_again():
    part = nn.Parameter(torch.ones(2, 5))
    optimizer = sharded_muon([part], {part: (4, 5)})
    part.grad = randn(part.shape, pool.rank()).float()
    optimizer.step()
    loaded = sharded_muon([part], {part: (4, 5)})
    loaded.load_state_dict(optimizer.state_dict())
    momentum = optimizer.state[part]["momentum_buffer"]
    assert momentum.shape == part.shape
    assert torch.equal(loaded.state[part]["momentum_buffer"], momentum)


# ---- errors, on all ranks


RANK_1 = {
    "shape": matrices(WIDE, SQUARE),
    "dtype": matrices(WIDE, TALL, dtype=torch.float64),
    "order": matrices(TALL, WIDE),
    "number": matrices(WIDE),
}


@pytest.mark.parametrize("what", RANK_1)
@pool.on(3)
def test_a_rank_with_other_matrices_is_an_error_on_all(what):
    ours = RANK_1[what] if pool.rank() == 1 else matrices(WIDE, TALL)
    with pytest.raises(ValueError, match="different"):
        our_muon(ours)


@pool.on(3)
def test_a_rank_with_other_options_is_an_error_on_all():
    with pytest.raises(ValueError, match="different"):
        our_muon(matrices(WIDE), lr=-1.0 if pool.rank() == 1 else 0.1)


@pool.on(2)
def test_a_rank_with_other_groups_is_an_error_on_all():
    parameters = matrices(WIDE, WIDE, WIDE)
    cut = 1 + pool.rank()
    with pytest.raises(ValueError, match="different"):
        our_muon([{"params": parameters[:cut]}, {"params": parameters[cut:]}])


BAD_OPTIONS = [{"lr": -1.0}, {"lr": torch.ones(2)}, {"momentum": -1.0}, {"weight_decay": -1.0}]
BAD_OPTIONS += [{"adjust_lr_fn": "x"}]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
@pool.on(1)
def test_options_that_torchs_class_refuses_are_a_value_error(options):
    with pytest.raises(ValueError, match=r"1-element|nvalid|not supported"):
        our_muon(matrices(WIDE), **options)


@pool.on(1)
def test_vectors_and_complex_matrices_are_refused_as_by_torchs_class():
    with pytest.raises(ValueError, match="2D"):
        our_muon(matrices((4,)))
    with pytest.raises(RuntimeError, match="complex"):
        our_muon(matrices(WIDE, dtype=torch.complex64))


@pool.on(1)
def test_a_closure_and_a_group_that_comes_later_are_an_error():
    optimizer = our_muon(matrices(WIDE))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="constructor"):
        optimizer.add_param_group({"params": matrices(TALL)})


@pool.on(2)
def test_a_rank_outside_of_the_group_gets_an_error():
    group = dist.new_group([0])
    if pool.rank() == 1:
        with pytest.raises(ValueError, match="rank 1"):
            Muon(matrices(WIDE), process_group=group)


@pool.on(3)
def test_matrices_that_differ_between_two_ranks_of_the_group_are_an_error():
    (matrix,) = matrices(WIDE)
    matrix.differ_between_ranks = [1, 2]
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        our_muon([matrix])
    matrix.differ_between_ranks = [1, 7]
    our_muon([matrix])


@pool.on(2)
def test_shapes_that_do_not_fit_the_parts_are_an_error():
    part = nn.Parameter(torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"\(6, 6\) elements"):
        sharded_muon([part], {part: (3, 5)})
    with pytest.raises(ValueError, match="2D"):
        sharded_muon([part], {})


@pool.on(2)
def test_slices_of_tensor_parallel_ranks_are_refused():
    layer = tensor_parallel.ColumnParallelLinear(4, 6, bias=False, process_group=pool.group())
    with pytest.raises(ValueError, match="ranks"):
        our_muon(layer.parameters())

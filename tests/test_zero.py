"""zero.py against one device, bit by bit, and against DistributedDataParallel with ZeroRedundancyOptimizer.

Bodies take the class under test, `stage`, and use what its users see. With SGD the parameters show the gradients.
"""

import contextlib
import copy
import gc
import itertools
import subprocess
import sys
import weakref
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import Collectives, make_batch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
each_stage = pytest.mark.parametrize("stage", STAGES)


class Odd(nn.Module):
    """Tied, frozen, unused, empty, scalar, strided and integer parameters, in nested modules, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(6, 33)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.tied = nn.Linear(33, 33, bias=False)
        self.tied.weight = self.blocks[0][0].weight
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(0.1 * torch.randn(7, 33).t())
        self.unused = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.integers = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("offset", torch.ones(33))

    def forward(self, x):
        x = self.scale * self.inputs(x) + self.offset + self.empty.sum() + self.integers[1]
        for block in self.blocks:
            x = x + block(x)
        x = self.tied(self.frozen(x)) @ self.transposed
        return self.convolution(x[:, :6].reshape(-1, 6, 1, 1).expand(-1, 6, 2, 2)[:, :3])


def mlp(dtype=torch.float32):
    torch.manual_seed(1)
    layers = (nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 3))
    return nn.Sequential(*layers).to(dtype)


def odd(dtype=torch.float32):
    torch.manual_seed(1)
    model = Odd()
    for parameter in (p for p in model.parameters() if p.is_floating_point()):
        parameter.data = parameter.data.to(dtype)
    return model


def deep(dtype=torch.float32, layers=8, size=64):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(layers))).to(dtype)


def loss_of(model, rank, step, dtype=torch.float32):
    return model(make_batch(rank, step, dtype)).square().mean()


def one_device_backward(model, N, steps, loss=loss_of, by_rank=False):
    """Leave in .grad those of all ranks' batches of `steps`, added in rank order, then divided.

    Zero2 and Zero3 add up over the ranks in every backward, Zero1 (`by_rank`) over a rank's backwards first.
    """
    sums = {}
    for rank, step in [(r, s) for r in range(N) for s in steps] if by_rank else [(r, s) for s in steps for r in range(N)]:
        loss(model, rank, step).backward()
        if by_rank and step == steps[-1]:
            for p in (p for p in model.parameters() if p.grad is not None):
                sums[p], p.grad = (sums[p] + p.grad if p in sums else p.grad), None
    for p, total in sums.items():
        p.grad = total
    for p in (p for p in model.parameters() if p.grad is not None):
        p.grad /= N


def whole(optimizer, model):
    """Copies of the whole parameters."""
    with optimizer.full_parameters() if hasattr(optimizer, "full_parameters") else contextlib.nullcontext():
        return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours, theirs, exact=True):
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), number
        if exact:
            assert torch.equal(a, b), (number, (a - b).abs().max())
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def same_state(ours, theirs):
    """Two optimizers' state dicts."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == sorted(theirs["state"])  # in the order of the parameters
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        same(ours["state"][number].values(), [state[name] for name in ours["state"][number]])


def train(stage, make, steps, name="SGD", loss=loss_of, micro_batches=1, by_rank=None, between=None, **arguments):
    """Both train from rank 0's weights and are equal, bit by bit, after each step. -> optimizer, model, plain model, theirs"""
    N, rank = pool.world_size(), pool.rank()
    cls, options = OPTIMIZERS[name] if name in OPTIMIZERS else (getattr(torch.optim, name), {"lr": 0.01})
    model, plain = make(), make()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(rank)
    optimizer, theirs = stage(model, cls, pool.group(), **arguments, **options), cls(plain.parameters(), **options)
    same(model.buffers(), plain.buffers())
    for step in range(steps):
        optimizer.zero_grad()
        theirs.zero_grad()
        batches = range(step * micro_batches, (step + 1) * micro_batches)
        one_device_backward(plain, N, batches, loss, by_rank=stage is zero.Zero1 if by_rank is None else by_rank)
        for batch in batches:
            loss(model, rank, batch).backward()
        if between:
            between(model, step)
        optimizer.step()
        theirs.step()
        same(whole(optimizer, model), plain.parameters())
    return optimizer, model, plain, theirs


# ---------------------------------------------------------------------------------------------------------------------
# Pure functions


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from("ab")), min_size=1, max_size=12), st.integers(1, 200))
def test_buckets_hold_every_tensor_once_in_the_order_of_backward(tensors, cap_bytes):
    """Tensors of one kind, in their order; closed once they hold cap_bytes; a bucket whose first comes later is earlier."""
    kinds = {torch.empty(numel): kind for numel, kind in tensors}
    order = list(kinds)
    position = {tensor: number for number, tensor in enumerate(order)}
    buckets = [[position[t] for t in bucket] for bucket in zero.assign_buckets(order, kinds, cap_bytes)]
    assert sorted(itertools.chain(*buckets)) == list(range(len(order)))
    assert all(bucket == sorted(bucket) and len({kinds[order[i]] for i in bucket}) == 1 for bucket in buckets)
    assert buckets == sorted(buckets, key=lambda bucket: -bucket[0])
    for bucket in buckets:
        assert sum(order[i].nbytes for i in bucket[1:]) < cap_bytes
        earlier = [b for b in buckets if kinds[order[b[0]]] == kinds[order[bucket[0]]] and b[0] < bucket[0]]
        assert not earlier or sum(order[i].nbytes for i in bucket) >= cap_bytes


def test_units_are_the_largest_modules_without_a_list():
    """What is left, and what several share, is gathered with the root."""
    model = odd()
    names = {module: name for name, module in model.named_modules()}
    _, owner = zero.assign_units(model)
    units = {name: names[owner[parameter]] for name, parameter in model.named_parameters()}
    for name in ("inputs", "frozen", "convolution", "unused", "blocks.1.0"):
        assert units[f"{name}.weight"] == units[f"{name}.bias"] == name
    assert units["blocks.0.0.bias"] == "blocks.0.0"
    assert units["scale"] == units["empty"] == units["transposed"] == units["blocks.0.0.weight"] == ""
    model = zero.language_model(C=12, heads=2, layers=2)
    assert len(set(zero.assign_units(model)[1].values())) == 5  # a block is one


def body_layout(numels, dtype):
    """Segments tile the parameters in rank order; parameters begin at multiples of 64 bytes, in their own strides."""
    parameters = [nn.Parameter(torch.randn(2, n // 2).t() if n % 4 == 0 else torch.randn(n)) for n in numels]
    parameters = [nn.Parameter(p.data.to(dtype)) for p in parameters]
    before = [(p.detach().clone(), p.stride()) for p in parameters]
    with torch.no_grad():
        bucket = zero.Bucket(parameters, 0, pool.group(), None, sharded=False)
    for p, (value, stride) in zip(parameters, before, strict=True):
        assert torch.equal(p, value)
        assert p.stride() == stride
        assert p.numel() == 0 or (p.data_ptr() - bucket.flat.data_ptr()) % 64 == 0
    return [segment.clone() for segment in bucket.segments], [p.as_strided([p.numel()], [1]).detach() for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numels", [[5, 0, 40, 1], [1], [0], [64, 3, 17, 16, 128]], ids=str)
def test_segments_tile_the_parameters(numels, dtype):
    for N in (1, 3):
        results = pool.run(N, body_layout, numels, dtype)
        for slot, flat in enumerate(results[0][1]):
            assert torch.equal(torch.cat([segments[slot] for segments, _ in results]).to(dtype), flat)


# ---------------------------------------------------------------------------------------------------------------------
# Training equals one device


def body_naive():
    for cls, options in OPTIMIZERS.values():
        ours, plain = mlp(), mlp()
        shard = zero.flat_shard(ours.parameters(), pool.group())
        optimizer, theirs = cls([shard], **options), cls(plain.parameters(), **options)
        for step in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            loss_of(ours, pool.rank(), step).backward()
            one_device_backward(plain, pool.world_size(), [step])
            zero.sharded_step(ours.parameters(), shard, optimizer, pool.group())
            theirs.step()
            same(ours.parameters(), plain.parameters())


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_the_naive_form(N):
    pool.run(N, body_naive)


def body_one_device(stage, make, names, steps, arguments):
    """And the state dict is the plain optimizer's."""
    for name in names:
        optimizer, _, _, theirs = train(stage, make, steps, name, **arguments)
        same_state(optimizer.state_dict(), theirs.state_dict())


@each_stage
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_one_device(N, stage):
    pool.run(N, body_one_device, stage, mlp, list(OPTIMIZERS), 3, {})
    pool.run(N, body_one_device, stage, mlp, ["momentum"], 2, {"micro_batches": 2, "bucket_cap_mb": 1e-4})


@each_stage
@pytest.mark.parametrize("N", [2, 3])
def test_odd_models(N, stage):
    for cap in (1e-3, 25):
        pool.run(N, body_one_device, stage, odd, ["momentum", "AdamW"], 3, {"bucket_cap_mb": cap})


@each_stage
def test_offload_changes_nothing(stage):
    pool.run(3, body_one_device, stage, odd, ["AdamW", "Adagrad"], 3, {"offload": "cpu"})


@pytest.mark.parametrize("name", sorted(zero.ELEMENTWISE))
def test_elementwise_optimizers(name):
    pool.run(3, body_one_device, zero.Zero2, mlp, [name], 2, {})


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "SparseAdam", "Muon"])
def test_other_optimizers_are_refused(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    pool.run(1, body_refused, name)


def body_refused(name):
    with pytest.raises(ValueError, match=f"{name} may need whole parameters.*AdamW"):
        zero.Zero1(mlp(), getattr(torch.optim, name), pool.group())


def body_transformer(stage):
    def make():
        torch.manual_seed(3)
        return zero.language_model(C=24, heads=2, layers=2)

    def loss(model, rank, step):
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(9 * step + rank))
        return zero.language_loss(model(tokens[:, :-1]), tokens[:, 1:])

    train(stage, make, 3, "AdamW", loss)


@each_stage
def test_transformer(stage):
    pool.run(3, body_transformer, stage)


class Reader(nn.Module):
    """Uses some of its parameters."""

    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, seed, used):
        generator = torch.Generator().manual_seed(seed)
        used = [weight for weight, is_used in zip(self.weights, used, strict=True) if is_used]
        return sum((p * torch.randn(p.shape, generator=generator)).sin().sum() for p in used) + self.weights[0].sum() * 0


def body_random(stage, numels, cap, name, seed):
    def make():
        torch.manual_seed(seed)
        return Reader([(n,) if n % 2 else (n // 2, 2) for n in numels])

    def loss(model, rank, step):
        return model(rank + 7 * step, [hash((seed, step, rank, n)) % 3 == 0 for n in range(len(numels))])

    optimizer, _, _, theirs = train(stage, make, 3, name, loss, bucket_cap_mb=cap)
    same_state(optimizer.state_dict(), theirs.state_dict())


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=7), st.integers(1, 4), st.sampled_from(STAGES),
    st.sampled_from([25, 1e-4]), st.sampled_from(list(OPTIMIZERS)), st.integers(0, 2**20),
)  # fmt: skip
def test_random_shapes_used_by_random_ranks(numels, N, stage, cap, name, seed):
    """What one rank uses is averaged with the others' zeros; what none uses is left alone, its state included."""
    pool.run(N, body_random, stage, numels, cap, name, seed)


def body_library(stage):
    ours, theirs = mlp(), mlp()
    ddp = nn.parallel.DistributedDataParallel(theirs, process_group=pool.group())
    optimizer = stage(ours, torch.optim.AdamW, pool.group(), lr=0.01)
    library = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, pool.group(), lr=0.01)
    for step in range(3):
        for o, model in ((optimizer, ours), (library, ddp)):
            o.zero_grad()
            loss_of(model, pool.rank(), step).backward()
            o.step()
        same(whole(optimizer, ours), theirs.parameters())


@each_stage
def test_equals_the_library_at_two_ranks(stage):
    pool.run(2, body_library, stage)


def body_other_ranks(stage):
    group = dist.new_group([1, 3], backend="cpu:gloo")
    if pool.rank() in (0, 2):
        with pytest.raises(ValueError, match=f"rank {pool.rank()} is not in process_group"):
            stage(mlp(), torch.optim.SGD, group, lr=0.1)
        return
    ours, plain = mlp(), mlp()
    optimizer, theirs = stage(ours, torch.optim.SGD, group, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(ours, group.rank(), 0).backward()
    one_device_backward(plain, 2, [0])
    optimizer.step()
    theirs.step()
    same(whole(optimizer, ours), plain.parameters())
    same_state(optimizer.state_dict(), theirs.state_dict())


@each_stage
def test_a_group_of_other_ranks(stage):
    """With a backend for each device, as init_process_group() makes it; the default group is None."""
    pool.run(4, body_other_ranks, stage)


def body_no_sync(stage, last_outside):
    """Nothing is reduced in no_sync(), and what one device adds up rank by rank is trained."""
    ours, plain, N = mlp(), mlp(), pool.world_size()
    optimizer = stage(ours, torch.optim.SGD, pool.group(), bucket_cap_mb=1e-4, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        theirs.zero_grad()
        with optimizer.no_sync(), zero.SentBytes() as sent:
            with optimizer.no_sync():
                loss_of(ours, pool.rank(), 3 * step).backward()
            loss_of(ours, pool.rank(), 3 * step + 1).backward()
        psi_bytes = sum(bucket.flat.nbytes for bucket in optimizer._buckets) if stage is zero.Zero3 else 0
        assert sent.total == 2 * 2 * psi_bytes * (N - 1) / N  # Zero3's gathers
        assert all(p.grad is not None for p in ours.parameters())
        with contextlib.nullcontext() if last_outside else optimizer.no_sync():
            loss_of(ours, pool.rank(), 3 * step + 2).backward()
        one_device_backward(plain, N, range(3 * step, 3 * step + 3), by_rank=True)
        optimizer.step()
        theirs.step()
        same(whole(optimizer, ours), plain.parameters())


@each_stage
@pytest.mark.parametrize("last_outside", [True, False])
def test_no_sync(stage, last_outside):
    pool.run(3, body_no_sync, stage, last_outside)


def body_groups(stage):
    """Groups with their own options, changed by a scheduler and by hand; parameters frozen and unfrozen on the way."""
    ours, plain, N = mlp(), mlp(), pool.world_size()

    def groups(model):
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        return [{"params": matrices}, {"params": vectors[1:], "weight_decay": 0.0, "lr": 0.05}]

    optimizer = stage(ours, torch.optim.SGD, pool.group(), params=groups(ours), bucket_cap_mb=1e-3, lr=0.1, weight_decay=0.1)
    theirs = torch.optim.SGD(groups(plain), lr=0.1, weight_decay=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in (optimizer, theirs)]
    for step in range(5):
        for o, model in ((optimizer, ours), (theirs, plain)):
            o.zero_grad()
            model.zero_grad()
            model[2].weight.requires_grad_(step != 2)
            o.param_groups[1]["weight_decay"] = 0.3 if step == 3 else 0.0
        one_device_backward(plain, N, [step])
        assert optimizer.step(lambda: loss_of(ours, pool.rank(), step).backward() or "loss") == "loss"
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
        same(whole(optimizer, ours), plain.parameters())  # the bias in no group included
    same_state(optimizer.state_dict(), theirs.state_dict())
    with pytest.raises(ValueError, match="sharded at construction"):
        optimizer.add_param_group({"params": [ours[0].bias]})


@each_stage
def test_groups_schedulers_and_closures(stage):
    pool.run(3, body_groups, stage)


def body_gradients_stay(stage):
    """Until zero_grad(), gradients are there for a second step and for a backward to add to, as a plain .grad is."""
    ours, plain = mlp(torch.float64), mlp(torch.float64)
    optimizer = stage(ours, torch.optim.SGD, pool.group(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss_of(ours, pool.rank(), step, torch.float64).backward()
        for p in plain.parameters():
            p.grad = None if p.grad is None else p.grad * pool.world_size()
        one_device_backward(plain, pool.world_size(), [step], lambda *a: loss_of(*a, torch.float64))
        for _ in range(2):
            optimizer.step()
            theirs.step()
            same(whole(optimizer, ours), plain.parameters(), exact=False)
    optimizer.zero_grad()
    before = whole(optimizer, ours)
    optimizer.step()  # nothing has a gradient, momentum rests
    same(whole(optimizer, ours), before)


@each_stage
def test_gradients_stay_until_zero_grad(stage):
    pool.run(3, body_gradients_stay, stage)


# ---------------------------------------------------------------------------------------------------------------------
# Clipping


def body_clip(stage, max_norm):
    ours, plain, N = mlp(torch.float64), mlp(torch.float64), pool.world_size()
    optimizer = stage(ours, torch.optim.SGD, pool.group(), bucket_cap_mb=1e-4, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        theirs.zero_grad()
        loss_of(ours, pool.rank(), step, torch.float64).backward()
        one_device_backward(plain, N, [step], lambda *a: loss_of(*a, torch.float64))
        with zero.SentBytes() as sent:
            total = optimizer.clip_grad_norm_(max_norm)
            optimizer.step()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        theirs.step()
        same(whole(optimizer, ours), plain.parameters(), exact=False)
        passes = {zero.Zero1: 2, zero.Zero2: 1, zero.Zero3: 0}[stage]  # each gradient is reduced once
        flats = sum(bucket.flat.nbytes for bucket in optimizer._buckets)
        assert sent.total == passes * flats * (N - 1) / N + 2 * (N - 1) / N * (2 * len(list(plain.parameters())) + 8)
    return total.item()


@each_stage
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_by_the_norm_of_all(stage, max_norm):
    assert len(set(pool.run(3, body_clip, stage, max_norm))) == 1  # the identical number


def body_clip_accumulated(stage):
    """What was clipped stays clipped under what a backward adds."""
    ours, plain = mlp(torch.float64), mlp(torch.float64)
    optimizer = stage(ours, torch.optim.SGD, pool.group(), lr=0.1)
    for batch in range(2):
        loss_of(ours, pool.rank(), batch, torch.float64).backward()
        before = [p.grad for p in plain.parameters()]
        plain.zero_grad()
        one_device_backward(plain, pool.world_size(), [batch], lambda *a: loss_of(*a, torch.float64))
        for p, gradient in zip(plain.parameters(), before, strict=True):
            p.grad += 0 if gradient is None else gradient
        ours_norm, norm = optimizer.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        torch.testing.assert_close(ours_norm, norm, rtol=1e-12, atol=0)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(whole(optimizer, ours), plain.parameters(), exact=False)


@each_stage
def test_clipping_and_accumulation(stage):
    pool.run(2, body_clip_accumulated, stage)


def body_clip_grid(stage):
    """Ranks 0, 1 hold one half of a model, 2, 3 the other, with a layer in common, which the first half counts."""
    data = [dist.new_group([0, 1]), dist.new_group([2, 3])][pool.rank() // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][pool.rank() % 2]
    half, torch_half = pool.rank() // 2, mlp(torch.float64)
    optimizer = stage(torch_half, torch.optim.SGD, data, lr=0.1)
    loss_of(torch_half, pool.rank() % 2, half, torch.float64).backward()
    counted = {id(p) for p in torch_half[0].parameters()} if half else set()
    total = optimizer.clip_grad_norm_(1e9, counted=lambda p: id(p) not in counted, process_groups=[across])
    gradients = []
    for part in range(2):
        plain = mlp(torch.float64)
        one_device_backward(plain, 2, [part], lambda *a: loss_of(*a, torch.float64))
        gradients += [p.grad for p in (plain[1:] if part else plain).parameters()]
    torch.testing.assert_close(total, nn.utils.get_total_norm(gradients), rtol=1e-12, atol=0)


@each_stage
def test_clipping_across_model_parallel_groups(stage):
    pool.run(4, body_clip_grid, stage)

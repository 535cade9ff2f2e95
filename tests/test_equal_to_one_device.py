"""Every way to split the work over ranks trains as one device does. Start here.

Each test trains a small model for three steps on 2 and on 3 ranks, and a copy on one device. After
each step it compares losses, gradients or parameters: bitwise if the same numbers are added in the
same order, otherwise within 1e-12. `@pool.on(2, 3)` runs a test in worker processes: first on two
ranks, then on three. `pool.group()` is their process group. From test_diloco on, variations follow.
"""

import copy

import pool
import pytest
import torch
import torch.nn as nn

import context_parallel
import ddp
import diloco
import expert_parallel
import flash_attention
import fsdp
import muon
import pipeline
import tensor_parallel
import zero


def make_model():
    torch.manual_seed(0)
    first = nn.Linear(6, 12)
    second = nn.Linear(12, 12)
    third = nn.Linear(12, 3)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third).double()


def make_batch(rank, step):
    """Inputs (4, 6) and targets (4, 3), different on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    numbers = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    return numbers[:, :6], numbers[:, 6:]


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward_on_one_device(plain, step):
    """Accumulate the gradients of all ranks' batches in rank order."""
    plain.zero_grad()
    for rank in range(pool.world_size()):
        loss = loss_of(plain, make_batch(rank, step))
        loss.backward()
    for parameter in plain.parameters():
        parameter.grad /= pool.world_size()


def train_beside_one_device(model, optimizer, make_plain_optimizer=make_optimizer):
    """Yield the model of one device after each step."""
    plain = make_model()
    plain_optimizer = make_plain_optimizer(plain)
    for step in range(3):
        batch = make_batch(pool.rank(), step)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        assert abs(loss - loss_of(plain, batch)) <= 1e-12
        loss.backward()
        optimizer.step()
        backward_on_one_device(plain, step)
        plain_optimizer.step()
        yield plain


def assert_equal(ours, plain, bitwise=True):
    tolerance = 0.0 if bitwise else 1e-12
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


@pool.on(2, 3)
def test_ddp():
    """Bitwise on two ranks. On three, gloo's ring adds the gradients in another order."""
    module = make_model()
    model = ddp.DistributedDataParallel(module, process_group=pool.group(), bucket_cap_mb=0.001)
    bitwise = pool.world_size() == 2
    for plain in train_beside_one_device(model, make_optimizer(model)):
        assert_equal(gradients_of(module), gradients_of(plain), bitwise)
        assert_equal(module.parameters(), plain.parameters(), bitwise)


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2, 3)
def test_zero(stage):
    """Bitwise on any number of ranks, because each rank adds the gradients in rank order."""
    model = make_model()
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.1, momentum=0.9)
    for plain in train_beside_one_device(model, optimizer):
        whole = optimizer.module_state_dict() if stage is zero.Zero3 else model.state_dict()
        assert_equal(whole.values(), plain.parameters())


@pool.on(2, 3)
def test_fsdp():
    model = make_model()
    for layer in (*model[::2], model):  # the linear layers, then the whole
        fsdp.fully_shard(layer, process_group=pool.group())
    for plain in train_beside_one_device(model, make_optimizer(model)):
        gradients = [fsdp.gather_full(shard, shard.grad) for shard in model.parameters()]
        assert_equal(gradients, gradients_of(plain))
        assert_equal(fsdp.full_state_dict(model).values(), plain.parameters())


@pool.on(2, 3)
def test_diloco_that_sends_every_step():
    """With SGD inside and outside, and without outer momentum, it is data parallelism."""
    model = make_model()
    inner = make_optimizer(model)
    options = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    worker = diloco.DiLoCo(model, inner, process_group=pool.group(), **options)
    for plain in train_beside_one_device(model, inner):
        worker.step()
        assert_equal(model.parameters(), plain.parameters(), bitwise=False)


def matrices_of(model):
    return [layer.weight for layer in model[::2]]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pool.on(2, 3)
def test_muon():
    def make_torchs(plain):
        return torch.optim.Muon(matrices_of(plain), lr=0.1)

    model = make_model()
    optimizer = muon.Muon(matrices_of(model), lr=0.1, process_group=pool.group())
    for plain in train_beside_one_device(model, optimizer, make_torchs):
        assert_equal(model.parameters(), plain.parameters())


def joined_batch(step):  # what all ranks have if the model is split, not the batch
    batches = [make_batch(rank, step) for rank in range(pool.world_size())]
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()


@pool.on(2, 3)
def test_tensor_parallel():
    plain = make_model()
    plain_optimizer = make_optimizer(plain)
    model = make_model()
    tensor_parallel.parallelize(model, {"0": "column", "2": "row"}, pool.group())
    optimizer = make_optimizer(model)
    for step in range(3):
        batch = joined_batch(step)
        train_step(model, optimizer, batch)
        train_step(plain, plain_optimizer, batch)
        assert_equal([model[4].weight.grad], [plain[4].weight.grad], bitwise=False)
        whole = tensor_parallel.full_state_dict(model).values()
        assert_equal(whole, plain.parameters(), bitwise=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pool.on(2, 3)
def test_pipeline(schedule):
    """Bitwise equal to one device that accumulates four micro-batches."""
    plain = make_model()
    stages = pool.world_size()
    own_layers = slice(pool.rank() * 5 // stages, (pool.rank() + 1) * 5 // stages)
    stage = make_model()[own_layers]
    pipe = pipeline.Pipeline(stage, schedule, 4, nn.functional.mse_loss, pool.group())
    optimizer = make_optimizer(stage)
    plain_optimizer = make_optimizer(plain)
    for step in range(3):
        inputs, targets = joined_batch(step)
        optimizer.zero_grad()
        pipe.step(inputs, targets)
        optimizer.step()
        plain_optimizer.zero_grad()
        for batch in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = loss_of(plain, batch) / 4
            loss.backward()
        plain_optimizer.step()
        own = plain[own_layers]
        assert_equal(gradients_of(stage), gradients_of(own))
        assert_equal(stage.parameters(), own.parameters())


@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
@pool.on(2, 3)
def test_context_parallel(name):
    """Causal attention over a sequence that is split: the output, and the gradients of q, k, v."""
    torch.manual_seed(0)
    group = pool.group()
    shape = (3, 2, group.size(), 12, 4)  # q, k and v, batch, heads, sequence, head size
    whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = flash_attention.naive_attention(*whole, causal=True)
    loss = expected.square().sum()
    loss.backward()
    part = context_parallel.split_sequence(whole.detach(), 3, group)
    part.requires_grad_()
    attention = getattr(context_parallel, name)

    output = attention(*part, causal=True, process_group=group)
    loss = output.square().sum()
    loss.backward()

    gradient = context_parallel.join_sequence(part.grad, 3, group)
    output = context_parallel.join_sequence(output, 2, group)
    assert_equal([output, gradient], [expected, whole.grad], bitwise=False)


@pool.on(2, 3)
def test_expert_parallel():
    """Each rank has other tokens, and one or more of six experts."""
    torch.manual_seed(0)
    plain = expert_parallel.MoE(6, 8, 6).double()
    model = expert_parallel.parallelize(copy.deepcopy(plain), pool.group())
    optimizer = make_optimizer(model)
    plain_optimizer = make_optimizer(plain)
    for step in range(3):
        optimizer.zero_grad()
        tokens, _ = make_batch(pool.rank(), step)
        loss = nn.functional.mse_loss(model(tokens), tokens)
        loss.backward()
        expert_parallel.average_gradients(model, pool.group())
        optimizer.step()
        plain_optimizer.zero_grad()
        tokens, _ = joined_batch(step)
        loss = nn.functional.mse_loss(plain(tokens), tokens)
        loss.backward()
        plain_optimizer.step()
        gradients = expert_parallel.full_state_dict(model, gradients=True)
        assert_equal(gradients.values(), gradients_of(plain), bitwise=False)
        whole = expert_parallel.full_state_dict(model)
        assert_equal(whole.values(), plain.parameters(), bitwise=False)

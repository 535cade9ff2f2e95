"""Every technique of this project trains as one device does. Start here.

Each test trains a small model for three steps on 2 and on 3 ranks. Beside it, every rank trains a
copy on one device, as plainly as possible. After each step the test compares losses, gradients and
parameters: bitwise if the same numbers are added in the same order, otherwise within 1e-12.

`@pool.on(2, 3)` runs a test in worker processes: first on two ranks, then on three.
`pool.group()` is their process group. The other files have a test of each further claim, and
test_parallel_3d.py and test_parallel_5d.py combine the techniques.
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
    linear = [nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)]
    layers = [linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2]]
    return nn.Sequential(*layers).double()


def make_batch(rank, step):
    """Inputs (4, 6) and targets (4, 3), different on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    numbers = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    return numbers[:, :6], numbers[:, 6:]


def loss_of(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


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


def train_beside_one_device(model, optimizer, plain, plain_optimizer):
    """Yield after each step."""
    for step in range(3):
        batch = make_batch(pool.rank(), step)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        plain_loss = loss_of(plain, batch)
        assert abs(loss - plain_loss) <= 1e-12
        loss.backward()
        optimizer.step()
        backward_on_one_device(plain, step)
        plain_optimizer.step()
        yield step


def assert_equal(ours, plain, bitwise):
    tolerance = 0.0 if bitwise else 1e-12
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


# ---- the batch is split


@pool.on(2, 3)
def test_ddp():
    """Bitwise on two ranks. On three, gloo's ring adds the gradients in another order."""
    plain = make_model()
    module = make_model()
    model = ddp.DistributedDataParallel(module, process_group=pool.group(), bucket_cap_mb=0.001)
    bitwise = pool.world_size() == 2
    for _ in train_beside_one_device(model, make_optimizer(model), plain, make_optimizer(plain)):
        assert_equal(gradients_of(module), gradients_of(plain), bitwise)
        assert_equal(module.parameters(), plain.parameters(), bitwise)


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2, 3)
def test_zero(stage):
    """Bitwise on any number of ranks, because each rank adds the gradients in rank order."""
    plain = make_model()
    model = make_model()
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.1, momentum=0.9)
    for _ in train_beside_one_device(model, optimizer, plain, make_optimizer(plain)):
        whole = optimizer.module_state_dict() if stage is zero.Zero3 else model.state_dict()
        assert_equal(whole.values(), plain.parameters(), bitwise=True)


@pool.on(2, 3)
def test_fsdp():
    plain = make_model()
    model = make_model()
    for layer in (*model[::2], model):  # the linear layers, then the whole
        fsdp.fully_shard(layer, process_group=pool.group())
    for _ in train_beside_one_device(model, make_optimizer(model), plain, make_optimizer(plain)):
        gradients = [fsdp.gather_full(shard, shard.grad) for shard in model.parameters()]
        assert_equal(gradients, gradients_of(plain), bitwise=True)
        whole = fsdp.full_state_dict(model)
        assert_equal(whole.values(), plain.parameters(), bitwise=True)


@pool.on(2, 3)
def test_diloco_that_sends_every_step():
    """With SGD inside and outside and no outer momentum, it is data parallelism."""
    plain = make_model()
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    worker = diloco.DiLoCo(model, inner, process_group=pool.group(), **options)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in train_beside_one_device(model, inner, plain, plain_optimizer):
        worker.step()
        assert_equal(model.parameters(), plain.parameters(), bitwise=False)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pool.on(2, 3)
def test_muon():
    plain = make_model()
    model = make_model()
    ours = [layer.weight for layer in model[::2]]
    theirs = [layer.weight for layer in plain[::2]]
    optimizer = muon.Muon(ours, lr=0.1, process_group=pool.group())
    plain_optimizer = torch.optim.Muon(theirs, lr=0.1)
    for _ in train_beside_one_device(model, optimizer, plain, plain_optimizer):
        assert_equal(ours, theirs, bitwise=True)


# ---- the model is split. All ranks have the same data


def joined_batch(step):
    batches = [make_batch(rank, step) for rank in range(pool.world_size())]
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


@pool.on(2, 3)
def test_tensor_parallel():
    plain = make_model()
    plan = {"0": "column", "2": "row"}
    model = tensor_parallel.parallelize(make_model(), plan, pool.group())
    optimizers = make_optimizer(model), make_optimizer(plain)
    for step in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(each, joined_batch(step))
            loss.backward()
            optimizer.step()
        assert_equal(model[4].weight.grad, plain[4].weight.grad, bitwise=False)
        whole = tensor_parallel.full_state_dict(model).values()
        assert_equal(whole, plain.parameters(), bitwise=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pool.on(2, 3)
def test_pipeline(schedule):
    """Bitwise equal to one device that accumulates four micro-batches."""
    plain = make_model()
    rank = pool.rank()
    cuts = [0, 2, 5] if pool.world_size() == 2 else [0, 2, 4, 5]
    stage = make_model()[cuts[rank] : cuts[rank + 1]]
    loss_fn = nn.functional.mse_loss
    pipe = pipeline.Pipeline(stage, schedule, 4, loss_fn, pool.group())
    optimizers = make_optimizer(stage), make_optimizer(plain)
    for step in range(3):
        inputs, targets = joined_batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipe.step(inputs, targets)
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = loss_fn(plain(x), y) / 4
            loss.backward()
        own = plain[cuts[rank] : cuts[rank + 1]]
        assert_equal(gradients_of(stage), gradients_of(own), bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(stage.parameters(), own.parameters(), bitwise=True)


@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
@pool.on(2, 3)
def test_context_parallel(name):
    """Causal attention over a sequence that is split: the output, and the gradients of q, k, v."""
    ranks = pool.world_size()
    torch.manual_seed(0)
    whole = torch.randn(3, 2, ranks, 12, 4, dtype=torch.float64, requires_grad=True)
    expected = flash_attention.naive_attention(*whole, causal=True)
    expected.square().sum().backward()
    part = context_parallel.split_sequence(whole.detach(), 3, pool.group())
    part.requires_grad_()
    attention = getattr(context_parallel, name)

    output = attention(*part, causal=True, process_group=pool.group())
    output.square().sum().backward()

    gradient = context_parallel.join_sequence(part.grad, 3, pool.group())
    output = context_parallel.join_sequence(output, 2, pool.group())
    assert_equal([output, gradient], [expected, whole.grad], bitwise=False)


@pool.on(2, 3)
def test_expert_parallel():
    """Each rank has other tokens, and one or more of six experts."""
    torch.manual_seed(0)
    plain = expert_parallel.MoE(6, 8, 6).double()
    model = expert_parallel.parallelize(copy.deepcopy(plain), pool.group())
    optimizers = make_optimizer(model), make_optimizer(plain)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens, _ = make_batch(pool.rank(), step)
        loss = model(tokens).square().mean()
        loss.backward()
        expert_parallel.average_gradients(model, pool.group())
        tokens, _ = joined_batch(step)
        loss = plain(tokens).square().mean()
        loss.backward()
        gradients = expert_parallel.full_state_dict(model, gradients=True)
        assert_equal(gradients.values(), gradients_of(plain), bitwise=False)
        for optimizer in optimizers:
            optimizer.step()
        whole = expert_parallel.full_state_dict(model)
        assert_equal(whole.values(), plain.parameters(), bitwise=False)

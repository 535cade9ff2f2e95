"""ddp.py against one device and against torch.nn.parallel.DistributedDataParallel."""

import copy

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import ddp

TorchDDP = nn.parallel.DistributedDataParallel


def mlp(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)


def batch_of(rank, step, dtype=torch.float32, rows=5, features=6):
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def body_five_steps(make_optimizer, dtype, arguments):
    ours, theirs, plain = mlp(dtype), mlp(dtype), mlp(dtype)
    ours = ddp.DDP(ours, pool.group(), **arguments)
    theirs = TorchDDP(theirs, process_group=pool.group())
    models = (ours, theirs, plain)
    optimizers = [make_optimizer(m.parameters()) for m in models]
    N = pool.world_size()
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for m in (ours, theirs):
            m(batch_of(pool.rank(), step, dtype)).square().mean().backward()
        for r in range(N):
            (plain(batch_of(r, step, dtype)).square().mean() / N).backward()
        for o in optimizers:
            o.step()
        for a, b, c in zip(*(m.parameters() for m in models)):
            for x, y, z in ((a, b, c), (a.grad, b.grad, c.grad)):
                if N <= 2:
                    assert torch.equal(x, y) and torch.equal(x, z)
                else:
                    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
                    torch.testing.assert_close(x, z, rtol=1e-12, atol=1e-14)
    return True


def sgd(p): return torch.optim.SGD(p, lr=0.1)


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_five(N):
    dtype = torch.float32 if N <= 2 else torch.float64
    for arguments in ({}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        pool.run(N, body_five_steps, sgd, dtype, arguments)

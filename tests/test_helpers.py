"""docs/training_loops.md: what torch's own helpers do over sharded parameters.

That our helpers are right is among the claims, and in the test files of their techniques.
"""

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import loss_of, make_batch, make_model

import amp
import expert_parallel
import fsdp
import tensor_parallel
import zero


def on_all_ranks(value):
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, value, group=pool.group())
    return everyone


def backward(model, data_rank=None):
    batch = make_batch(pool.rank() if data_rank is None else data_rank, 0)
    loss = loss_of(model(batch))
    loss.backward()


def torchs_norms(model):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return on_all_ranks(norm.item())


def make_zero(stage):
    model = make_model("plain")
    return model, stage(model, torch.optim.SGD, pool.group(), lr=0.1)


def fully_sharded():
    return fsdp.fully_shard(make_model("plain"), process_group=pool.group())


def column_and_row():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    return tensor_parallel.parallelize(model, {"0": "column", "2": "row"}, pool.group())


def experts():
    torch.manual_seed(3)
    return expert_parallel.parallelize(expert_parallel.MoE(6, 5, 4), pool.group())


SHARDED = {
    "Zero1": lambda: make_zero(zero.Zero1)[0],
    "fsdp": fully_sharded,
    "tensor_parallel": column_and_row,
    "expert_parallel": experts,
}


@pytest.mark.parametrize("technique", SHARDED)
@pool.on(2)
def test_torchs_norm_is_of_each_ranks_own_part(technique):
    model = SHARDED[technique]()
    backward(model, data_rank=0 if technique == "tensor_parallel" else None)
    first, second = torchs_norms(model)
    assert first != second


@pytest.mark.parametrize("stage", [zero.Zero2, zero.Zero3])
@pool.on(2)
def test_torchs_norm_over_zero2_and_zero3_finds_no_gradient(stage):
    model, _optimizer = make_zero(stage)
    backward(model)
    assert torchs_norms(model) == [0.0, 0.0]


@pytest.mark.parametrize("stage", [zero.Zero2, zero.Zero3])
@pool.on(2)
def test_torchs_scaler_over_zero2_and_zero3_finds_no_gradient(stage):
    model, optimizer = make_zero(stage)
    backward(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


def updated_after_an_overflow_on_rank_0(scaler):
    """Return which ranks' shards change."""
    model = fully_sharded()
    shards = list(model.parameters())
    optimizer = torch.optim.SGD(shards, lr=0.1)
    before = [shard.detach().clone() for shard in shards]
    for shard in shards:
        shard.grad = torch.full_like(shard, [torch.inf, 1.0][pool.rank()])
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return on_all_ranks(not all(map(torch.equal, before, shards)))


@pool.on(2)
def test_torchs_scaler_over_fsdp_skips_the_step_on_one_rank_only():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert updated_after_an_overflow_on_rank_0(scaler) == [False, True]


@pool.on(2)
def test_our_scaler_over_fsdp_skips_the_step_on_all_ranks():
    scaler = amp.GradScaler("cpu", 2.0, process_group=pool.group())
    assert updated_after_an_overflow_on_rank_0(scaler) == [False, False]

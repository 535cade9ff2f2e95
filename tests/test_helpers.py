"""docs/training_loops.md: what torch's own helpers silently do over sharded parameters.

That our helpers are right is among the claims, and in the test files of their techniques.
"""

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import loss_of, make_batch, make_model

import fsdp
import tensor_parallel
import zero


def on_all_ranks(value):
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, value, group=pool.group())
    return everyone


def split(technique):
    """Return (a model that the technique has split over the ranks, its optimizer)."""
    group = pool.group()
    model = make_model("plain")
    if technique == "fsdp":
        return fsdp.fully_shard(model, process_group=group), None
    if technique == "tensor_parallel":
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        plan = {"0": "column", "1": "row"}
        return tensor_parallel.parallelize(model, plan, group), None
    stage = getattr(zero, technique)
    return model, stage(model, torch.optim.SGD, group, lr=0.1)


@pytest.mark.parametrize("technique", ["Zero1", "Zero2", "Zero3", "fsdp", "tensor_parallel"])
@pool.on(2)
def test_torchs_norm_is_of_each_ranks_own_part(technique):
    """Zero2 and Zero3 leave it no gradient."""
    model, _optimizer = split(technique)
    is_replica = technique != "tensor_parallel"
    batch = make_batch(pool.rank() if is_replica else 0, 0)
    loss_of(model(batch)).backward()

    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)

    first, second = on_all_ranks(norm.item())
    has_none = technique in ("Zero2", "Zero3")
    assert (first == second == 0) if has_none else first != second


@pool.on(2)
def test_torchs_scaler_over_fsdp_skips_the_step_on_one_rank_only():
    model, _ = split("fsdp")
    shards = list(model.parameters())
    optimizer = torch.optim.SGD(shards, lr=0.1)
    before = [shard.detach().clone() for shard in shards]
    for shard in shards:
        shard.grad = torch.full_like(shard, [torch.inf, 1.0][pool.rank()])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))

    scaler.step(optimizer)

    is_skipped = all(map(torch.equal, before, shards))
    assert on_all_ranks(is_skipped) == [True, False]

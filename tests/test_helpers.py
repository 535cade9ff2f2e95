"""docs/training_loops.md: torch's own helpers over sharded parameters, and ours."""

import re
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import default_group
from shared import loss_of, make_batch, make_model

import amp
import expert_parallel
import fsdp
import tensor_parallel
import zero

SCALE = 1024.0


def backward(model, factor=1.0):
    (loss_of(model(make_batch(pool.rank(), 0))) * factor).backward()


def plain_norm():
    """The norm on one device that has the batches of all ranks."""
    model = make_model("plain")
    for rank in range(pool.world_size()):
        (loss_of(model(make_batch(rank, 0))) / pool.world_size()).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()


def norms_of_all_ranks(norm):
    norms = [None] * pool.world_size()
    dist.all_gather_object(norms, norm.item(), group=pool.group())
    return norms


def test_the_table_names_what_is_tested_here():
    page = Path(__file__).parent.parent / "docs" / "training_loops.md"
    table = page.read_text().split("## Helpers that change with the import")[1].split("## ")[0]
    rows = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert rows == [
        *("ddp", "Zero1", "Zero2", "Zero3", "fsdp", "tensor_parallel", "pipeline"),
        *("context_parallel", "expert_parallel", "amp", "muon", "diloco", "lora"),
    ]


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(2)
def test_zeros_own_norm_is_right_and_torchs_is_not(stage):
    model = make_model("plain")
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.1)
    backward(model)
    torchs = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    ours = optimizer.clip_grad_norm_(1e9)
    assert ours.item() == pytest.approx(plain_norm(), rel=1e-5)
    if stage is zero.Zero1:
        first, second = norms_of_all_ranks(torchs)
        assert first != second
    else:
        assert torchs.item() == 0.0  # there is no .grad to clip


@pytest.mark.parametrize("stage", [zero.Zero2, zero.Zero3])
@pool.on(2)
def test_torchs_scaler_finds_no_gradient_and_ours_asks_the_optimizer(stage):
    model = make_model("plain")
    optimizer = stage(model, torch.optim.SGD, pool.group(), lr=0.1)
    backward(model, SCALE)
    torchs = torch.amp.GradScaler("cpu", init_scale=SCALE)
    torchs.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        torchs.step(optimizer)
    ours = amp.GradScaler("cpu", init_scale=SCALE, process_group=pool.group())
    ours.unscale_(optimizer)
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(plain_norm(), rel=1e-5)


@pool.on(2)
def test_zero3s_and_fsdps_modules_refuse_a_state_dict():
    model = make_model("plain")
    optimizer = zero.Zero3(model, torch.optim.SGD, pool.group(), lr=0.1)
    with pytest.raises(RuntimeError, match="module_state_dict"):
        model.state_dict()
    expected = make_model("plain").state_dict()
    for state in (optimizer.module_state_dict(), fsdp.full_state_dict(sharded_model())):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    with pytest.raises(RuntimeError, match="full_state_dict"):
        sharded_model().state_dict()


def sharded_model():
    return fsdp.fully_shard(make_model("plain"), process_group=pool.group())


@pool.on(2)
def test_fsdps_own_norm_is_right_and_torchs_differs_between_ranks():
    model = sharded_model()
    backward(model)
    first, second = norms_of_all_ranks(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert first != second
    norm = fsdp.clip_grad_norm_(model, 1e9)
    assert norm.item() == pytest.approx(plain_norm(), rel=1e-5)


@pytest.mark.parametrize(
    ("scaler_class", "agree"), [(torch.amp.GradScaler, False), (amp.GradScaler, True)]
)
@pool.on(2)
def test_over_fsdp_one_ranks_overflow_parts_replicas_with_torchs_scaler_alone(scaler_class, agree):
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = {} if scaler_class is torch.amp.GradScaler else {"process_group": pool.group()}
    scaler = scaler_class("cpu", init_scale=SCALE, **group)
    scaler.scale(torch.ones(()))
    backward(model, SCALE)
    if pool.rank() == 0:
        next(p.grad for p in model.parameters() if p.grad is not None and p.numel())[0] = torch.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    everyone = [None] * 2
    dist.all_gather_object(everyone, any(changed), group=pool.group())
    assert everyone == [False, not agree]


@pool.on(2)
def test_tensor_parallels_own_norm_is_right_and_torchs_differs_between_ranks():
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    x = make_batch(0, 0, torch.float64)
    loss_of(plain(x)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    plain.zero_grad()
    with default_group(pool.group()):
        model = tensor_parallel.parallelize(plain, {"0": "column", "2": "row"})
        loss_of(model(x)).backward()
        first, second = norms_of_all_ranks(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        ours = tensor_parallel.clip_grad_norm_(model, 1e9)
    assert first != second
    assert ours.item() == pytest.approx(norm.item(), rel=1e-12)


@pool.on(2)
def test_torchs_norm_forgets_other_ranks_experts():
    torch.manual_seed(3)
    model = expert_parallel.parallelize(expert_parallel.MoE(6, 5, 4), pool.group())
    backward(model)
    expert_parallel.average_gradients(model, pool.group())
    first, second = norms_of_all_ranks(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert first != second
    ours = norms_of_all_ranks(expert_parallel.clip_grad_norm_(model, 1e9, pool.group()))
    assert ours[0] == ours[1] > max(first, second)

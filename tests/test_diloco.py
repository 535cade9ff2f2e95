"""diloco.py: what the claims of --diloco leave open."""

import copy

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.diloco import Worker, Workers, calls_of_each_step, flat_parameters, inner_step, train
from launch import fork
from shared import (
    OPTIMIZERS,
    Blocks,
    Watch,
    fake_world_on_meta,
    make_batch,
    make_model,
)

import diloco
from diloco import DiLoCo

F32 = torch.float32
F64 = torch.float64


def make_worker(module, optimizer="sgd", **options):
    return Worker(DiLoCo, module, optimizer, **options)


def assert_all_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def gathered(thing):
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, thing, pool.group())
    return everyone


# ---- bitwise equal to one process that simulates all workers


def assert_trains_as_simulated(module, optimizer, dtype, **options):
    ranks = range(pool.world_size())
    simulated = copy.deepcopy(module)
    worker = make_worker(module, optimizer, **options)
    workers = Workers(simulated, optimizer, ranks, worker.fragments(), options)
    for step in range(10):
        batches = [make_batch(rank, step, dtype) for rank in ranks]
        worker.step(batches[pool.rank()])
        workers.step(batches)
        own = workers.models[pool.rank()]
        assert_all_equal(worker.diloco.outer.values(), workers.outer.values())
        assert_all_equal(module.parameters(), own.parameters())


WAYS = {
    "bf16": {"compress": "bf16"},
    "int8 in fragments": {"compress": "int8", "num_fragments": 2},
    "late fragments in bf16": {"compress": "bf16", "num_fragments": 4, "delay": 3, "mix": 0.2},
    "late in int8": {"compress": "int8", "delay": 1, "sync_every": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pool.on(1, 2, 3, 4)
def test_compressed_messages_are_bitwise_those_of_simulated_workers(way):
    assert_trains_as_simulated(Blocks(), "adamw", F32, **WAYS[way])


@pool.on(3)
def test_a_model_of_two_dtypes_is_summed_in_both():
    module = make_model("mixed")
    assert_trains_as_simulated(module, "adamw", F32, num_fragments=2)


@pool.on(3)
def test_outer_parameters_of_a_bf16_model_are_in_fp32():
    module = make_model("plain", torch.bfloat16)
    assert_trains_as_simulated(module, "sgd", torch.bfloat16, delay=1)
    assert make_worker(module).diloco.outer["0.weight"].dtype == F32


@pytest.mark.parametrize("model", ["plain", "odd"])
@pool.on(2, 3)
def test_the_idea_is_bitwise_that_of_simulated_workers(model):
    ranks = range(pool.world_size())
    module = make_model(model)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    names = [name for name, _ in module.named_parameters()]
    workers = Workers(copy.deepcopy(module), "adamw", ranks, [names], {"sync_every": 2})
    outer = list(copy.deepcopy(module).requires_grad_(False).parameters())
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(6):
        batches = [make_batch(rank, step) for rank in ranks]
        workers.step(batches)
        inner_step(module, optimizer, batches[pool.rank()])
        if step % 2 == 1:
            diloco.outer_step(module, outer, outer_optimizer, pool.group())
        own = workers.models[pool.rank()]
        assert_all_equal(module.parameters(), own.parameters())


def test_numbers_too_small_for_a_scale_become_zero():
    flat = torch.zeros(512)
    flat[256] = 1e-40
    rows = diloco.encode(flat, "int8")
    assert diloco.decode(rows, F32, "int8").tolist() == [0.0] * 512


# ---- what is sent, and when


SHARES = {None: 1.0, "bf16": 0.5, "int8": 260 / 1024}


@pytest.mark.parametrize("compress", SHARES)
@pool.on(2, 3)
def test_bytes_on_average_and_at_once_are_those_of_the_formula(compress):
    N = pool.world_size()
    first = nn.Linear(256, 6 * N, bias=False)
    module = nn.Sequential(first, copy.deepcopy(first))
    worker = make_worker(module, num_fragments=2, compress=compress)
    sent = []
    for _ in range(4):
        with diloco.SentBytes() as counter:
            worker.diloco.step()
        sent.append(counter.total)
    psi = 2 * 256 * 6 * N
    at_once = 4 * SHARES[compress] * 2 * psi * (N - 1) / N / 2
    assert sent == [0, at_once, 0, at_once]


@pool.on(2)
def test_outer_parameters_and_their_momentum_take_8_bytes_per_parameter():
    module = make_model("plain")
    worker = make_worker(module)
    train(worker, 0, 4)
    held = diloco.held(worker.diloco.outer.values(), worker.diloco._outer_optimizer)
    assert sum(held) == 2 * diloco.held_bytes(module.parameters())
    assert worker.diloco._in_flight == []


@pytest.mark.parametrize(
    ("delay", "step"),
    [(0, 4), (1, 4), (2, 5), (3, 5)],
)
@pool.on(2)
def test_the_second_half_starts_in_the_middle_of_the_delay(delay, step):
    worker = make_worker(make_model("plain"), delay=delay)
    starts = {}
    for number, calls in enumerate(calls_of_each_step(worker, 7), 1):
        starts |= {name: number for name, _ in calls}
    assert starts == {"alltoall_base_": 4, "allgather_": step}


def test_a_step_neither_waits_for_the_device_nor_copies_from_the_host():
    """A tensor on the meta device has no values that the host could read."""
    with fake_world_on_meta(2, 0):
        module = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(module.parameters())
        synchronizer = DiLoCo(module, optimizer, sync_every=1, compress="int8")
        with Watch(lambda: None) as watch:
            synchronizer.step()
    operators = {operator for operator, _ in watch.seen}
    assert "c10d::alltoall_base_" in operators
    assert not operators & {"aten::_local_scalar_dense", "aten::lift_fresh"}


# ---- fragments


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(5))
        self.inner = nn.Module()
        self.inner.embedding = nn.Embedding(4, 4)
        self.inner.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.inner.embedding.weight
        self.frozen = nn.Linear(9, 9).requires_grad_(False)


def test_layers_are_members_of_the_outermost_list_or_else_children():
    assert diloco.layers_of(Decoder()) == [
        ["position"],
        ["inner.embedding.weight"],
        ["inner.layers.0.0.weight", "inner.layers.0.0.bias"],
        ["inner.layers.1.0.weight", "inner.layers.1.0.bias"],
        ["head.bias"],
    ]


def test_layers_are_dealt_out_the_largest_first():
    layers = [nn.Linear(1, size, bias=False) for size in (1, 4, 9, 5, 7)]
    fragments = diloco.split_layers(nn.Sequential(*layers), 2)
    assert fragments == [["2.weight", "1.weight"], ["4.weight", "3.weight", "0.weight"]]


@pool.on(2)
def test_frozen_parameters_have_no_outer_copy():
    worker = make_worker(make_model("frozen"))
    assert list(worker.diloco.outer) == ["0.weight", "2.bias", "4.weight", "4.bias"]


# ---- states


@pool.on(2)
def test_a_state_is_the_same_on_every_worker_and_taking_it_changes_nothing():
    options = {"num_fragments": 2, "delay": 3, "compress": "int8"}
    plain = make_worker(make_model("plain"), **options)
    saved = make_worker(make_model("plain"), **options)
    for step in range(10):
        train(plain, step, step + 1)
        train(saved, step, step + 1)
        state = saved.diloco.state_dict()
        assert torch.equal(flat_parameters(saved), flat_parameters(plain))
    first, second = gathered(state)
    assert len(first["in_flight"]) == 2
    for (*_, mean), (*_, other) in zip(first["in_flight"], second["in_flight"], strict=True):
        assert torch.equal(mean, other)
    assert_all_equal(first["outer"].values(), second["outer"].values())


@pool.on(2)
def test_a_state_can_be_restored_again_and_again():
    """Also while a message travels. Training changes neither the state nor what was loaded."""
    worker = make_worker(make_model("plain"), delay=2)
    train(worker, 0, 9)
    state = worker.diloco.state_dict()
    parameters = copy.deepcopy(worker.module.state_dict())
    results = []
    for _ in range(3):
        worker.module.load_state_dict(parameters)
        worker.diloco.load_state_dict(state)
        train(worker, 9, 17)
        results.append(flat_parameters(worker).clone())
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pool.on(2)
def test_a_late_worker_needs_nothing_but_the_state_of_another():
    """It loads the outer parameters into its module, too."""
    alone = [dist.new_group([rank]) for rank in range(2)]
    early = make_worker(make_model("plain"), group=alone[pool.rank()])
    train(early, 0, 6)
    state, _ = gathered(early.diloco.state_dict())
    worker = make_worker(make_model("plain", seed=2))
    worker.module.load_state_dict(state["outer"])
    worker.diloco.load_state_dict(state)
    train(worker, 6, 7)
    own = gathered(flat_parameters(worker))
    train(worker, 7, 8)
    assert not torch.equal(*own)
    assert torch.equal(*gathered(flat_parameters(worker)))


@pool.on(1)
def test_a_state_of_another_shape_is_an_error():
    state = make_worker(nn.Linear(2, 1)).diloco.state_dict()
    with pytest.raises(RuntimeError, match="shape"):
        make_worker(nn.Linear(2, 3)).diloco.load_state_dict(state)


# ---- buffers, several optimizers, NaN


@pool.on(2)
def test_buffers_are_copied_from_rank_0_at_the_start_only():
    module = make_model("batchnorm")
    mean = module[1].running_mean
    mean += pool.rank()
    worker = make_worker(module, sync_every=1)
    assert mean.tolist() == [0.0] * 8
    train(worker, 0, 1)
    assert not torch.equal(*gathered(mean))


@pool.on(2)
def test_a_worker_may_have_several_optimizers():
    module = make_model("plain")
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in (module[0], module[2])]
    synchronizer = DiLoCo(module, optimizers, sync_every=1, process_group=pool.group())
    module[4].weight.data += pool.rank()
    synchronizer.step()
    assert torch.equal(*gathered(module[4].weight))


@pytest.mark.parametrize("compress", SHARES)
@pool.on(2)
def test_a_nan_on_one_worker_is_a_nan_on_all_and_no_step_is_skipped(compress):
    """In int8 the 256 numbers that share its scale become NaN."""
    module = nn.Linear(32, 32, bias=False)
    weight = module.weight.data
    before = weight.clone()
    worker = make_worker(module, sync_every=1, compress=compress)
    weight += 1.0
    if pool.rank() == 1:
        weight[0, 0] = torch.nan
    worker.diloco.step()
    is_nan = weight.isnan()
    assert is_nan[0, 0]
    assert is_nan.sum() == (256 if compress == "int8" else 1)
    moved = weight - before
    assert (moved[~is_nan] > 1.0).all()


# ---- errors


PROBLEMS = [
    ("sync_every", 0),
    ("num_fragments", 3),  # H = 4 is not a multiple
    ("num_fragments", 4),  # there are three layers
    ("delay", 4),
    ("mix", 1.5),
    ("compress", "fp8"),
]


@pytest.mark.parametrize(("option", "value"), PROBLEMS)
@pool.on(2)
def test_a_wrong_argument_on_one_worker_is_an_error_on_all(option, value):
    options = {option: value} if pool.rank() == 1 else {}
    with pytest.raises(ValueError, match=f"worker 1: .*{option}={value!r}"):
        make_worker(make_model("plain"), **options)


@pool.on(2)
def test_an_optimizer_over_other_parameters_is_an_error():
    module = make_model("plain")
    owner = make_model("plain") if pool.rank() == 0 else module
    optimizers = [torch.optim.SGD(each.parameters()) for each in (module, owner)]
    with pytest.raises(ValueError, match="worker 0: an optimizer has parameters"):
        DiLoCo(module, optimizers, process_group=pool.group())


OTHERS = {"outer_lr": 0.8, "outer_momentum": 0.8, "mix": 0.4, "delay": 1, "compress": "bf16"}


@pytest.mark.parametrize("option", OTHERS)
@pool.on(2)
def test_another_option_on_one_worker_is_an_error_on_all(option):
    options = {option: OTHERS[option]} if pool.rank() == 1 else {}
    with pytest.raises(ValueError, match=f"differ in .*{option}={OTHERS[option]}"):
        make_worker(make_model("plain"), **options)


@pool.on(3)
def test_another_dtype_on_one_worker_is_an_error_on_all():
    module = nn.Linear(6, 3)
    if pool.rank() == 2:
        module.half()
    with pytest.raises(ValueError, match=r"weight.*float16"):
        make_worker(module)


@pool.on(2)
def test_a_parameter_that_is_frozen_on_one_worker_is_an_error_on_all():
    module = nn.Linear(6, 3)
    module.bias.requires_grad_(pool.rank() == 0)
    with pytest.raises(ValueError, match=r"bias.*requires_grad=False"):
        make_worker(module)


@pool.on(2)
def test_layers_that_are_split_over_the_groups_ranks_are_an_error():
    module = make_model("plain")
    module[0].differ_between_ranks = [0, 1]
    alone = [dist.new_group([rank]) for rank in range(2)]
    make_worker(module, group=alone[pool.rank()])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\]"):
        make_worker(module)


@pool.on(1)
def test_a_rank_outside_the_group_is_an_error():
    with pytest.raises(ValueError, match="not in process_group"):
        make_worker(make_model("plain"), group=dist.GroupMember.NON_GROUP_MEMBER)


# ---- the demo


@pytest.mark.cpu
def test_the_demo_with_all_options_is_bitwise_equal_and_shows_what_is_traded():
    flags = ["--sync-every", 4, "--fragments", 2, "--delay", 3, "--compress", "int8"]
    done = fork("diloco.py", "--steps", 8, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "parameters bitwise equal over 8 steps" in done.stdout
    assert "0.5 MB per step      formula 2Ψ(N-1)/N/H = 0.5 MB" in done.stdout
    assert "after step   8               60.1 MB" in done.stdout


@pytest.mark.cpu
def test_a_wrong_flag_of_the_demo_is_one_line():
    done = fork("diloco.py", "--fragments", 3)
    assert done.returncode == 2
    assert done.stderr == "error: sync_every=10 must be a positive multiple of num_fragments=3\n"

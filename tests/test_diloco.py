"""diloco.py: what the claims of --diloco leave open. Equal is bitwise."""

import copy
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.diloco import Worker, Workers, calls_of_each_step, flat_parameters, inner_step, train
from launch import fork
from shared import make_batch, make_model

import diloco
from diloco import DiLoCo


def make_worker(module, optimizer="sgd", **options):
    return Worker(DiLoCo, module, optimizer, **options)


def assert_all_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


# ---- equal to one process that simulates all workers


MODELS = {
    "of two dtypes": partial(make_model, "mixed"),
    "in bf16": partial(make_model, "plain", torch.bfloat16),
}


@pytest.mark.parametrize("which", MODELS)
@pool.on(3)
def test_models_in_other_dtypes_train_as_simulated_workers(which):
    """Outer parameters are in float32 or in float64."""
    module = MODELS[which]()
    simulated = copy.deepcopy(module)
    first = next(module.parameters())
    worker = make_worker(module, "adamw", num_fragments=2, delay=1)
    workers = Workers(worker, simulated, range(3))
    for step in range(10):
        batches = [make_batch(rank, step, first.dtype) for rank in range(3)]
        worker.step(batches[pool.rank()])
        workers.step(batches)
        own = workers.models[pool.rank()]
        assert_all_equal(worker.diloco.outer.values(), workers.outer.values())
        assert_all_equal(module.parameters(), own.parameters())


@pool.on(2, 3)
def test_the_idea_is_the_class_without_its_options():
    module = make_model("odd")
    worker = make_worker(copy.deepcopy(module), sync_every=2)
    optimizer = worker.make_optimizer(module.parameters())
    outer = list(copy.deepcopy(module).requires_grad_(False).parameters())
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(6):
        batch = make_batch(pool.rank(), step)
        worker.step(batch)
        inner_step(module, optimizer, batch)
        if step % 2 == 1:
            diloco.outer_step(module, outer, outer_optimizer, pool.group())
        assert_all_equal(module.parameters(), worker.module.parameters())


def test_numbers_too_small_for_a_scale_become_zero():
    flat = torch.zeros(512)
    flat[256] = 1e-40
    rows = diloco.encode(flat, "int8")
    assert diloco.decode(rows, torch.float32, "int8").tolist() == [0.0] * 512


# ---- what is sent, and when

SHARES = {None: 1.0, "bf16": 0.5, "int8": 260 / 1024}


@pytest.mark.parametrize("compress", SHARES)
@pool.on(3)
def test_bytes_on_average_and_at_once_are_those_of_the_formula(compress):
    layers = [nn.Linear(256, 18, bias=False) for _ in range(2)]
    worker = make_worker(nn.Sequential(*layers), num_fragments=2, compress=compress)
    sent = []
    for _ in range(4):
        with diloco.SentBytes() as counter:
            worker.diloco.step()
        sent.append(counter.total)
    psi = 2 * 256 * 18
    at_once = 4 * SHARES[compress] * 2 * psi * (3 - 1) / 3 / 2
    assert sent == [0, at_once, 0, at_once]


@pool.on(2)
def test_outer_parameters_and_their_momentum_take_8_bytes_per_parameter():
    module = make_model("plain")
    worker = make_worker(module)
    train(worker, 0, 4)
    held = diloco.held(worker.diloco.outer.values(), worker.diloco._outer_optimizer)
    assert sum(held) == 2 * diloco.held_bytes(module.parameters())
    assert worker.diloco._in_flight == []


@pool.on(2)
def test_the_second_half_starts_in_the_middle_of_the_delay():
    worker = make_worker(make_model("plain"), delay=3)
    starts = {}
    for number, calls in enumerate(calls_of_each_step(worker, 7), 1):
        starts |= {name: number for name, _ in calls}
    assert starts == {"alltoall_base_": 4, "allgather_": 5}


# ---- fragments


def test_layers_are_members_of_the_outermost_list_or_else_children():
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, bias=False))
    inner = nn.Module()
    inner.embedding = nn.Embedding(4, 4)
    inner.layers = nn.ModuleList([block])
    model = nn.Module()
    model.inner = inner
    model.frozen = nn.Linear(9, 9).requires_grad_(False)
    model.head = nn.Linear(4, 4, bias=False)
    assert diloco.layers_of(model) == [
        ["inner.embedding.weight"],
        ["inner.layers.0.0.weight", "inner.layers.0.0.bias", "inner.layers.0.1.weight"],
        ["head.weight"],
    ]


def test_layers_are_dealt_out_the_largest_first():
    layers = [nn.Linear(1, size, bias=False) for size in (1, 4, 9, 5, 7)]
    fragments = diloco.split_layers(nn.Sequential(*layers), 2)
    assert fragments == [["2.weight", "1.weight"], ["4.weight", "3.weight", "0.weight"]]


# ---- states and buffers


@pool.on(2)
def test_a_state_can_be_restored_again_and_again():
    """Also while messages travel. Training changes neither the state nor what was loaded."""
    worker = make_worker(make_model("plain"), num_fragments=2, delay=3)
    train(worker, 0, 9)
    state = worker.diloco.state_dict()
    parameters = copy.deepcopy(worker.module.state_dict())
    train(worker, 9, 17)
    expected = flat_parameters(worker.module)
    for _ in range(2):
        worker.module.load_state_dict(parameters)
        worker.diloco.load_state_dict(state)
        train(worker, 9, 17)
        assert torch.equal(flat_parameters(worker.module), expected)


@pool.on(2)
def test_buffers_are_copied_from_rank_0_at_the_start_only():
    module = make_model("batchnorm")
    mean = module[1].running_mean
    mean += pool.rank()
    worker = make_worker(module, sync_every=1)
    assert mean.tolist() == [0.0] * 8
    mean += pool.rank()
    worker.diloco.step()
    assert mean.tolist() == [pool.rank()] * 8


# ---- errors, on all workers if one is wrong


def other_optimizer():
    """A list of two, one of them over another model."""
    module = make_model("plain")
    owners = (module, make_model("plain") if pool.rank() == 1 else module)
    optimizers = [torch.optim.SGD(owner.parameters()) for owner in owners]
    DiLoCo(module, optimizers, process_group=pool.group())


def other_option(name, value):
    options = {name: value} if pool.rank() == 1 else {}
    make_worker(make_model("plain"), **options)


def split_layer():
    module = make_model("plain")
    module[0].differ_between_ranks = [0, 1]
    alone = [dist.new_group([rank]) for rank in range(2)]
    make_worker(module, group=alone[pool.rank()])  # is not an error
    make_worker(module)


OF_WORKER_1 = {
    "3 fragments in 4 steps": (partial(other_option, "num_fragments", 3), "worker 1: sync_every=4"),
    "a late mean": (partial(other_option, "delay", 4), "worker 1: delay=4"),
    "another mix": (partial(other_option, "mix", 0.4), "differ in .*mix=0.4"),
    "parameters of another model": (other_optimizer, "worker 1: an optimizer"),
    "a split layer": (split_layer, r"ranks \[0, 1\]"),
}


@pytest.mark.parametrize("what", OF_WORKER_1)
@pool.on(2)
def test_a_worker_that_differs_is_an_error_on_all(what):
    make, word = OF_WORKER_1[what]
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.cpu
def test_the_demo_with_all_options_is_bitwise_equal():
    flags = ["--sync-every", 4, "--fragments", 2, "--delay", 3, "--compress", "int8"]
    done = fork("diloco.py", "--steps", 8, *flags, ranks=2)
    assert "parameters bitwise equal over 8 steps" in done.stdout, done.stderr
    assert "0.5 MB per step      formula 2Ψ(N-1)/N/H = 0.5 MB" in done.stdout

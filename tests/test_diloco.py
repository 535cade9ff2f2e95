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
from shared import make_batch, make_model, randn

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


def load(module):
    other = make_model("plain", seed=7)
    module.load_state_dict(other.state_dict())


def load_a_layer(module):
    other = make_model("plain", seed=7)
    module[0].load_state_dict(other[0].state_dict())


def write_data(module):
    module[0].weight.data.fill_(0.5)


def initialize(module):
    nn.init.constant_(module[0].bias, 2.0)


@pytest.mark.parametrize("write", [load, load_a_layer, write_data, initialize])
@pool.on(2)
def test_training_starts_with_what_was_written_after_construction(write):
    """As if it had been written before. Copies of the module do not matter."""
    early = make_model("plain")
    write(early)
    module = make_model("plain")
    worker = make_worker(module)
    copy.deepcopy(module)
    write(module)
    before = make_worker(early)
    for step in range(8):
        train(worker, step, step + 1)
        train(before, step, step + 1)
        assert_all_equal(module.parameters(), early.parameters())


@pool.on(2)
def test_loaded_weights_stay_where_they_are_without_training():
    module = make_model("plain")
    worker = make_worker(module, sync_every=1)
    load(module)
    expected = flat_parameters(module)
    worker.diloco.step()
    assert torch.equal(flat_parameters(module), expected)
    worker.optimizer.step()
    load(module)  # with outer parameters from training
    assert_all_equal(worker.diloco.outer.values(), module.parameters())


@pool.on(2)
def test_a_parameter_that_trains_but_is_not_sent_is_an_error():
    frozen = make_worker(make_model("frozen"))
    frozen.module[0].bias.requires_grad_(True)
    replaced = make_worker(make_model("plain"))
    weight = torch.ones(33, 6)
    replaced.module[0].weight = nn.Parameter(weight)
    for worker, name in ((frozen, "0.bias"), (replaced, "0.weight")):
        with pytest.raises(RuntimeError, match=f"{name} was frozen or not there"):
            worker.diloco.step()


# ---- layouts and complex numbers


def in_channels_last(*shape):
    layout = torch.empty(shape, memory_format=torch.channels_last)
    return layout.copy_(randn(shape))


def conjugated():
    pairs = randn((5, 2))
    return torch.view_as_complex(pairs).conj()


LAYOUTS = {
    "1 x 1 convolution": lambda: in_channels_last(4, 8, 1, 1),
    "depthwise convolution": lambda: in_channels_last(8, 1, 3, 3),
    "every second number": lambda: randn((8,))[::2],
    "every second one of two": lambda: randn((2,))[::2],
    "a transposed row": lambda: randn((1, 5)).T,
    "conjugated": conjugated,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pool.on(2)
def test_parameters_of_any_layout_train_as_contiguous_ones(layout):
    outer = []
    values = LAYOUTS[layout]()
    contiguous = torch.empty_like(values, memory_format=torch.contiguous_format).copy_(values)
    for start in (values, contiguous):
        module = nn.ParameterList([start])
        module.register_buffer("counts", torch.arange(3).expand(2, 3))
        worker = make_worker(module, sync_every=1)
        for step in range(3):
            gone = randn(values.shape, 10 * step + pool.rank(), values.dtype)
            module[0].data -= gone
            worker.diloco.step()
        outer.append(worker.diloco.outer["0"])
        assert torch.equal(module[0], outer[-1])
    assert torch.equal(*outer)


@pytest.mark.parametrize("compress", SHARES)
@pool.on(2)
def test_complex_numbers_are_sent_as_two_real_ones(compress):
    real = nn.ParameterList([randn((70, 2), dtype=torch.float32)])
    copied = real[0].detach().clone()
    ours = nn.ParameterList([torch.view_as_complex(copied)])
    options = {"compress": compress, "sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    workers = [make_worker(each, **options) for each in (real, ours)]
    for step in range(3):
        gone = randn((70, 2), 10 * step + pool.rank(), torch.float32)
        real[0].data -= gone
        ours[0].data -= torch.view_as_complex(gone)
        for worker in workers:
            worker.diloco.step()
        assert torch.equal(torch.view_as_real(ours[0]), real[0])


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


def expanded():
    module = nn.ParameterList([torch.ones(1).expand(3)])
    make_worker(module)


def sparse():
    module = make_model("plain")
    module.register_buffer("mask", torch.eye(3).to_sparse_csr())
    make_worker(module)


OF_WORKER_1 = {
    "3 fragments in 4 steps": (
        partial(other_option, "num_fragments", 3),
        "rank 1 has .*sync_every=4",
    ),
    "a late mean": (partial(other_option, "delay", 4), "rank 1 has .*delay=4"),
    "a mix above 1": (partial(other_option, "mix", 2), "rank 1 has .*mix=2"),
    "an unknown format": (partial(other_option, "compress", "fp8"), "compress='fp8' must be"),
    "another mix": (partial(other_option, "mix", 0.4), "must have the same .*'mix': 0.4"),
    "parameters of another model": (other_optimizer, "rank 1 has .*an optimizer"),
    "an expanded parameter": (expanded, "clone"),
    "a sparse buffer": (sparse, "mask is sparse"),
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

"""The oracle: what is true of a right implementation, one claim a function, said in its docstring's first sentence.

Each claim takes `make`, which calls the implementation under test as PyTorch's own of that kind is called, and runs on
every rank of a world of so many. `same` and `check` write down what does not hold and go on: a rank that left early
would hang the others. run_all.sh tests --ddp package.module:Name, or path/to/file.py:Name, tries another class.
"""

import copy
import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import sys
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shared import OPTIMIZERS, Collectives, loss_of, make_batch, make_model
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

# What runs when no option names another. Called as: --ddp, class(module); --zero1, class(parameters, optimizer class,
# its arguments), gradients averaged before; --fsdp, function(module), on submodules first; --column-linear and
# --row-linear, class.from_full(an nn.Linear) or class(in_features, out_features, bias); --pipeline-schedule,
# function(ranks, micro-batches, stages per rank) -> a list of actions for each rank; --grad-scaler, class(init_scale=,
# growth_interval=); --lora, function(model, r=, lora_alpha=, target_modules=); --checkpoint, function(function, *its
# arguments), with use_reentrant=False where it takes that; --attention, function(q, k, v, causal= or is_causal=) and,
# where it has them, scale= and dropout_p=; --all-reduce, function(tensor), in place. And each with process_group=, if
# it takes one; an all-reduce with group=, too.
OURS = {
    "ddp": "ddp:DistributedDataParallel",
    "zero1": "zero:Zero1",
    "zero2": "zero:Zero2",
    "zero3": "zero:Zero3",
    "fsdp": "fsdp:fully_shard",
    "column-linear": "tensor_parallel:ColumnParallelLinear",
    "row-linear": "tensor_parallel:RowParallelLinear",
    "pipeline-schedule": "pipeline:build_schedule",
    "grad-scaler": "amp:GradScaler",
    "lora": "lora:inject_lora",
    "attention": "flash_attention:flash_attention",
    "checkpoint": "activation_checkpoint:checkpoint",
    "all-reduce": "collectives:ring_all_reduce",
}

PYTORCHS = {
    "ddp": "torch.nn.parallel:DistributedDataParallel",
    "zero1": "torch.distributed.optim:ZeroRedundancyOptimizer",
    "fsdp": "torch.distributed.fsdp:fully_shard",
    "column-linear": "pytorchs:Column",
    "row-linear": "pytorchs:Row",
    "pipeline-schedule": "pytorchs:build_schedule",
    "grad-scaler": "torch.amp:GradScaler",
    "lora": "pytorchs:inject_lora",  # peft's
    "attention": "torch.nn.functional:scaled_dot_product_attention",
    "checkpoint": "torch.utils.checkpoint:checkpoint",
    "all-reduce": "torch.distributed:all_reduce",
}


class Claim(NamedTuple):
    kind: str
    sentence: str
    check: callable
    worlds: tuple


CLAIMS = {}  # (kind, name): Claim


def claim(kinds, *worlds):
    def register(check):
        sentence = " ".join(check.__doc__.split("\n\n")[0].split())
        for kind in kinds.split():
            CLAIMS[kind, check.__name__] = Claim(kind, sentence, check, worlds)
        return check

    return register


class NotOffered(Exception):
    """The implementation has no such argument or method, which is not wrong."""


def resolve(spec):
    """'package.module:name' or 'path/to/file.py:name' -> the object."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        module = sys.modules[found.name] = importlib.util.module_from_spec(found)
        sys.path.append(str(Path(place).resolve().parent))
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return operator.attrgetter(name)(module)


def call(function, *args, needed=None, **welcome):
    """function(*args) with the `needed` keywords, and with those of the `welcome` ones that it has a name for."""
    names = inspect.signature(function).parameters
    if lacking := [name for name in needed or {} if name not in names]:
        raise NotOffered(f"no argument {lacking[0]}")
    return function(*args, **(needed or {}), **{name: value for name, value in welcome.items() if name in names})


def method(thing, name):
    if not hasattr(thing, name):
        raise NotOffered(f"no {name}")
    return getattr(thing, name)


@contextmanager
def default_group(group):
    """Who takes no process_group finds himself in a world of the body's ranks."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(before)


_problems = []


def check(holds, what):
    if not holds:
        _problems.append(what)


def same(ours, plain, what, exact=False):
    """Bitwise when `exact`, else to 1e-12 of the largest element."""
    ours, plain = ours.detach(), plain.detach()
    if ours.shape != plain.shape:
        return check(False, f"{what} has shape {tuple(ours.shape)}, not {tuple(plain.shape)}")
    if torch.equal(ours, plain):
        return None
    bound = 0.0 if exact else 1e-12 * max(1.0, plain.abs().max().item())
    error = (ours.double() - plain.double()).abs().max().item()
    return check(error <= bound, f"{what} is off by {error:.1e}")


def run(kind, name, spec):
    """On a worker: -> "" where the claim holds, else in a word why not; None where it is not offered."""
    _problems.clear()
    try:
        with default_group(pool.group()):
            CLAIMS[kind, name].check(functools.partial(MAKERS[kind], resolve(spec)))
    except NotOffered:
        return None
    return _problems[0] if _problems else ""


# ---- data parallel: ddp, zero 1 to 3, fsdp


class Trainer:
    """A module in training: by DDP, by a sharded optimizer, or by fully_shard. `whole()` are parameters by name."""

    def __init__(self, kind, implementation, module, optimizer="sgd", group=None, **options):
        names = inspect.signature(implementation).parameters
        ours = kind in ("zero2", "zero3") or ("module" in names and kind == "zero1")  # averages by itself
        if group and not (ours or {"process_group", "mesh"} & set(names)):
            raise NotOffered("no argument process_group")
        group, make_optimizer = group or dist.group.WORLD, OPTIMIZERS[optimizer]
        self.kind, self.module, self.model, self.implementation = kind, module, module, implementation
        if kind == "ddp":
            self.model = call(implementation, module, process_group=group, **options)
        elif kind == "fsdp":
            where = {"process_group": group} if "process_group" in names else {}
            where = where or {"mesh": DeviceMesh.from_group(group, "cpu")}
            for child in self.units():
                call(implementation, child, **where)
            self.model = call(implementation, module, **where)
        if kind in ("ddp", "fsdp"):
            self.optimizer = make_optimizer(self.model.parameters())
        elif ours:
            self.optimizer = implementation(module, make_optimizer.func, process_group=group, **make_optimizer.keywords)
        else:
            self.model = nn.parallel.DistributedDataParallel(module, process_group=group, **options)
            where = {"process_group": group} if "process_group" in names else {}
            self.optimizer = implementation(
                module.parameters(), make_optimizer.func, **where, **make_optimizer.keywords
            )

    def units(self):
        """Every second child with parameters of its own; none where they are tied, or used by name."""
        children = [] if hasattr(self.module, "one_unit") else list(self.module.children())[::2]
        return [child for child in children if next(child.parameters(), None) is not None]

    def no_sync(self):
        if hasattr(self.model, "set_requires_gradient_sync"):
            return self.pytorchs_no_sync()
        if self.kind == "fsdp":
            return method(sys.modules[self.implementation.__module__], "no_sync")(self.model)
        return method(self.model if hasattr(self.model, "no_sync") else self.optimizer, "no_sync")()

    @contextmanager
    def pytorchs_no_sync(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def backward(self, batches, loss=lambda model, batch: loss_of(model(batch)), sync="last"):
        finish = getattr(self.model, "finish_gradient_synchronization", None)
        for i, batch in enumerate(batches):
            with nullcontext() if finish or sync == "each" or i == len(batches) - 1 else self.no_sync():
                loss(self.model, batch).backward()
        if finish:
            finish()

    def step(self, batches, **how):
        self.optimizer.zero_grad()
        self.backward(batches, **how)
        self.optimizer.step()

    def whole(self):
        if self.kind == "zero3":
            with self.optimizer.full_parameters():
                return {name: p.detach().clone() for name, p in self.module.named_parameters()}
        if self.kind == "fsdp":
            found = dict(self.model.named_parameters())
            if all(hasattr(p, "full_tensor") for p in found.values()):
                return {name: p.full_tensor() for name, p in found.items()}
            state = method(sys.modules[self.implementation.__module__], "full_state_dict")(self.model)
            plain = [name.replace("parametrizations.", "").removesuffix(".original") for name in found]
            return {name: state[name] for name in plain}
        names = [name.removeprefix("module.") for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.model.parameters(), strict=True))


def one_device(plain, batches, loss=lambda model, batch: loss_of(model(batch))):
    """Accumulate the ranks' gradients in rank order, then divide; batches[rank] are its micro-batches."""
    total = {}
    for micro_batches in batches:
        plain.zero_grad()
        for batch in micro_batches:
            loss(plain, batch).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    for name, parameter in plain.named_parameters():
        parameter.grad = total[name] / len(batches) if name in total else None


def trains_as_one_device(
    make, plain=None, optimizer="sgd", exact=False, micro_batches=1, sync="last", start=0, after=None, **options
):
    """Four steps on data of its own for each rank and step; parameters compared after each."""
    N, rank, dtype = pool.world_size(), pool.rank(), torch.float32 if exact else torch.float64
    plain = (make_model("plain") if plain is None else plain).to(dtype)
    module = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(start * rank)  # rank 0's are those that count
    trainer, reference = make(module, optimizer, **options), OPTIMIZERS[optimizer](plain.parameters())
    for step in range(4):
        batches = [[make_batch(r, 10 * step + m, dtype) for m in range(micro_batches)] for r in range(N)]
        losses = [getattr(plain, "loss_of", lambda model, batch, r: loss_of(model(batch)))] * N
        mine = functools.partial(lambda model, batch, f=losses[0]: f(model, batch, rank))
        trainer.step(batches[rank], loss=mine, sync=sync)
        total = [[(r, batch) for batch in own] for r, own in enumerate(batches)]
        one_device(plain, total, lambda model, pair, f=losses[0]: f(model, pair[1], pair[0]))
        reference.step()
        if after:
            after(trainer)
        ours = trainer.whole()
        check(sorted(ours) == sorted(name for name, _ in plain.named_parameters()), f"parameters are {list(ours)}")
        for name, parameter in plain.named_parameters():
            if name in ours:
                same(ours[name], parameter, f"{name} after step {step + 1}", exact)
                if trainer.kind == "ddp" and parameter.grad is not None:
                    grad = dict(trainer.module.named_parameters())[name].grad
                    same(parameter.grad if grad is None else grad, parameter.grad, f"gradient of {name}", exact)


ALL = "ddp zero1 zero2 zero3 fsdp"


@claim(ALL, 2, 3)
def mean_gradient(make):
    """A step of SGD moves by the mean of the ranks' gradients, each from its own data (1e-12 in float64)."""
    trains_as_one_device(make)


@claim(ALL, 3)
def other_optimizers(make):
    """AdamW, and SGD with momentum, train as on one device."""
    trains_as_one_device(make, optimizer="adamw")
    trains_as_one_device(make, optimizer="momentum")


@claim(ALL, 2)
def bitwise(make):
    """At two ranks, in float32, parameters are bitwise those of one device."""
    trains_as_one_device(make, optimizer="adamw", exact=True)


@claim("zero1 zero2 zero3 fsdp", 4)
def bitwise_at_four(make):
    """At four ranks, too: gradients are added in rank order."""
    trains_as_one_device(make, exact=True)


@claim(ALL, 4)
def replicas(make):
    """All ranks hold the same bits after each step, also in float32 at four ranks."""

    def compare(trainer):
        everyone = [None] * pool.world_size()
        mine = torch.cat([p.detach().flatten() for p in trainer.whole().values()])
        dist.all_gather_object(everyone, mine, group=pool.group())
        check(all(torch.equal(mine, theirs) for theirs in everyone), "ranks differ")

    trainer = make(make_model("plain"), "adamw")
    for step in range(3):
        trainer.step([make_batch(pool.rank(), step)])
        compare(trainer)


@claim("ddp zero1 zero2 zero3", 3)
def start_of_rank_0(make):
    """Ranks that were seeded differently all start from rank 0's weights."""
    trains_as_one_device(make, start=1.0)


@claim(ALL, 2)
def tied(make):
    """A parameter that two layers share stays one."""
    plain = make_model("tied")
    plain.one_unit = True
    trains_as_one_device(make, plain)


@claim(ALL, 2)
def frozen(make):
    """Frozen parameters stay, and the others train."""
    trains_as_one_device(make, make_model("frozen"))


@claim(ALL, 3)
def odd_shapes(make):
    """Scalar, empty, strided and one-element parameters train."""
    plain = make_model("odd")
    plain.one_unit = True
    trains_as_one_device(make, plain)


class Uses(nn.Module):
    """Rank 0 uses `first` and `second`, the others `second` only; nobody uses `nobody`."""

    one_unit = True

    def __init__(self, differ):
        super().__init__()
        self.first, self.second, self.nobody = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.differ = differ

    def forward(self, x, rank=0):
        return self.second(x) + (0 if self.differ and rank else self.first(x))

    def loss_of(self, model, x, rank):
        return loss_of(model(x, rank))


@claim(ALL, 2)
def unused(make):
    """A parameter that no rank uses stays, also under AdamW's weight decay."""
    trains_as_one_device(make, Uses(False), "adamw", find_unused_parameters=True)


@claim("ddp zero1 zero2", 3)
def unused_on_one_rank(make):
    """What one rank alone uses is averaged with the others' zeros; nobody hangs."""
    trains_as_one_device(make, Uses(True), find_unused_parameters=True)


class Twice(nn.Module):
    """A layer called twice, inside a checkpoint or not."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.act, self.last, self.how = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), how

    def forward(self, x):
        run = functools.partial(checkpoint, use_reentrant=False) if self.how == "checkpoint" else lambda f, x: f(x)
        return self.last(self.act(run(self.layer, self.act(run(self.layer, x)))))


@claim(ALL, 2)
def called_twice(make):
    """A layer that forward calls twice trains."""
    trains_as_one_device(make, Twice("plain"))


@claim(ALL, 2)
def checkpointed(make):
    """A layer that is recomputed in backward, trains."""
    trains_as_one_device(make, Twice("checkpoint"))


@claim(ALL, 2, 3)
def accumulation(make):
    """The gradients of all micro-batches count, when all but the last run under no_sync."""
    trains_as_one_device(make, micro_batches=3)


@claim(ALL, 2)
def accumulation_synchronised(make):
    """And when each backward is synchronised."""
    trains_as_one_device(make, micro_batches=3, sync="each")


@claim(ALL, 2)
def evaluation(make):
    """A forward without gradients, between backward and step and after it, sees the weights of that moment."""
    plain, x = make_model("plain", torch.float64), make_batch(0, 99, torch.float64)
    trainer, reference = make(copy.deepcopy(plain), "sgd"), OPTIMIZERS["sgd"](plain.parameters())
    for step in range(3):
        batches = [[make_batch(r, step, torch.float64)] for r in range(pool.world_size())]
        one_device(plain, batches)
        trainer.optimizer.zero_grad()
        trainer.backward(batches[pool.rank()])
        with torch.no_grad():
            same(trainer.model(x), plain(x), "output before the step")
        trainer.optimizer.step()
        reference.step()
        with torch.no_grad():
            same(trainer.model(x), plain(x), "output after the step")


@claim("zero1 zero2 zero3 fsdp", 3)
def clipping(make):
    """The norm that is clipped by is that of the whole gradient, on every rank."""
    N, dtype = pool.world_size(), torch.float64
    plain = make_model("plain", dtype)
    trainer, reference = make(copy.deepcopy(plain), "sgd"), OPTIMIZERS["sgd"](plain.parameters())
    clip = getattr(trainer.optimizer, "clip_grad_norm_", None)
    if clip is None and trainer.kind == "fsdp":
        own = getattr(sys.modules[trainer.implementation.__module__], "clip_grad_norm_", None)
        clip = functools.partial(
            own or nn.utils.clip_grad_norm_, trainer.model if own else list(trainer.model.parameters())
        )
    clip = clip or functools.partial(nn.utils.clip_grad_norm_, list(trainer.module.parameters()))
    for step in range(3):
        batches = [[100 * make_batch(r, step, dtype)] for r in range(N)]
        trainer.optimizer.zero_grad()
        trainer.backward(batches[pool.rank()])
        one_device(plain, batches)
        norm = clip(0.1)
        same(
            getattr(norm, "full_tensor", lambda n=norm: n)(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm"
        )
        trainer.optimizer.step()
        reference.step()
        for (name, parameter), ours in zip(plain.named_parameters(), trainer.whole().values(), strict=True):
            same(ours, parameter, f"{name} after step {step + 1}")


@claim(ALL, 4)
def groups_apart(make):
    """Two groups side by side never meet."""
    rank, dtype = dist.get_rank(), torch.float64
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    plain = make_model("plain", dtype, seed=rank % 2)
    trainer = make(copy.deepcopy(plain), "sgd", group=groups[rank % 2])
    one_device(plain, [[make_batch(r, 0, dtype)] for r in (rank % 2, rank % 2 + 2)])
    trainer.step([make_batch(rank, 0, dtype)])
    OPTIMIZERS["sgd"](plain.parameters()).step()
    for (name, parameter), ours in zip(plain.named_parameters(), trainer.whole().values(), strict=True):
        same(ours, parameter, name)


# ---- ddp alone


@claim("ddp", 2)
def buffers(make):
    """In forward, all ranks take over rank 0's buffers."""
    model = make_model("batchnorm")
    trainer = make(model)
    for step in range(2):
        trainer.step([make_batch(pool.rank(), step)])
    everyone = [None] * pool.world_size()
    trainer.model(make_batch(0, 5))  # the same on all ranks, after rank 0's statistics have come
    dist.all_gather_object(everyone, model[1].running_mean.clone(), group=pool.group())
    same(everyone[1], everyone[0], "running mean", exact=True)


@claim("ddp", 2)
def no_sync_is_silent(make):
    """A backward under no_sync sends nothing."""
    trainer = make(make_model("plain"))
    for step in range(2):  # PyTorch's sends once how its buckets are to be
        trainer.step([make_batch(0, step)])
    with Collectives() as seen, trainer.no_sync():
        loss_of(trainer.model(make_batch(0, 1))).backward()
    check(not seen.calls, f"sent {seen.calls}")


@claim("ddp", 2)
def sent_bytes(make):
    """A step hands each gradient to an all-reduce once: 4Ψ bytes in float32."""
    model = make_model("plain")
    trainer = make(model)
    with Collectives() as seen:
        trainer.step([make_batch(pool.rank(), 0)])
    psi, sent = sum(p.nbytes for p in model.parameters()), seen.bytes_of("allreduce_")
    check(sent == psi, f"{sent} bytes for {psi} of gradients")


@claim("ddp", 2)
def overlap(make):
    """Communication begins while backward still runs."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    trainer = make(model, bucket_cap_mb=1e-6)
    trainer.step([make_batch(pool.rank(), 0)])  # PyTorch's first step has buckets of its own
    with Collectives() as seen:
        model[0].weight.register_hook(lambda _: seen.calls.append(("the first layer's gradient", 0)))
        trainer.step([make_batch(pool.rank(), 1)])
    names = [name for name, _ in seen.calls]
    check(names.index("the first layer's gradient") > 0, "everything is sent after backward")


@claim("ddp", 2)
def overflow(make):
    """The sum of two fp16 gradients whose mean is finite does not overflow."""
    model = nn.Linear(1, 1, bias=False).half()
    make(model).backward([torch.full((1, 1), 40000.0, dtype=torch.float16)], lambda model, batch: model(batch).sum())
    check(model.weight.grad.item() == 40000.0, f"{model.weight.grad.item()}, not 40000")


@claim("ddp", 2)
def different_models(make):
    """Models of other shapes on another rank are an error on all of them, at construction."""
    with default_group(dist.new_group([0, 1], timeout=timedelta(seconds=5))):  # PyTorch's notices when that is over
        try:
            make(nn.Linear(2, 2 + pool.rank()))
        except Exception:
            return
    check(False, "no error")


# ---- zero 1 alone


@claim("zero1 zero2", 3)
def state_is_sharded(make):
    """All ranks' optimizer states together are the whole one, and no rank has more than its share and one parameter."""
    model = nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(6)])
    trainer = make(model, "adamw")
    trainer.step([torch.randn(4, 20)])
    psi = sum(p.numel() for p in model.parameters())
    inner = next(
        (v for v in vars(trainer.optimizer).values() if isinstance(v, torch.optim.Optimizer)), trainer.optimizer
    )
    mine = sum(t.numel() for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.dim())
    total = [None] * pool.world_size()
    dist.all_gather_object(total, mine, group=pool.group())
    check(2 * psi <= sum(total) < 2.1 * psi + 3 * 64, f"{sum(total)} elements of state for {psi} parameters")
    check(max(total) <= 2 * psi / pool.world_size() + 800 + 64, f"a rank holds {max(total)} of {2 * psi}")


@claim("zero1 zero2 zero3", 2)
def whole_state_dict(make):
    """The state dict is what the plain optimizer's would be, and the plain optimizer goes on from it."""
    plain = make_model("plain", torch.float64)
    trainer, reference = make(copy.deepcopy(plain), "adamw"), OPTIMIZERS["adamw"](plain.parameters())
    for step in range(2):
        batches = [[make_batch(r, step, torch.float64)] for r in range(2)]
        one_device(plain, batches)
        reference.step()
        trainer.step(batches[pool.rank()])
    if hasattr(trainer.optimizer, "consolidate_state_dict"):
        trainer.optimizer.consolidate_state_dict(to=0)
        if pool.rank():
            return
    ours, theirs = trainer.optimizer.state_dict(), reference.state_dict()
    check(list(ours["state"]) == list(theirs["state"]), f"state of parameters {list(ours['state'])}")
    for index, state in theirs["state"].items():
        for key, value in state.items():
            same(torch.as_tensor(ours["state"].get(index, {}).get(key, torch.nan)), value, f"state {index} {key}")


@claim("zero1 zero2 zero3", 2)
def schedulers(make):
    """A learning rate that a scheduler changes counts in the next step."""
    plain = make_model("plain", torch.float64)
    trainer, reference = make(copy.deepcopy(plain), "sgd"), OPTIMIZERS["sgd"](plain.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (trainer.optimizer, reference)]
    for step in range(3):
        batches = [[make_batch(r, step, torch.float64)] for r in range(2)]
        one_device(plain, batches)
        reference.step()
        trainer.step(batches[pool.rank()])
        for schedule in schedules:
            schedule.step()
    for (name, parameter), ours in zip(plain.named_parameters(), trainer.whole().values(), strict=True):
        same(ours, parameter, name)


# ---- fsdp alone


@claim("fsdp", 4)
def parameters_are_shards(make):
    """A rank holds 1/N of the parameters and gradients, up to a row of each."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    trainer = make(model)
    trainer.backward([torch.randn(2, 16)])
    for what in ("parameters", "gradients"):
        held = [p if what == "parameters" else p.grad for p in trainer.model.parameters()]
        held = [getattr(tensor, "to_local", lambda t=tensor: t)() for tensor in held if tensor is not None]
        elements = sum(tensor.numel() for tensor in held)
        check(0 < elements <= 3 * 16 * 16 // 4 + 16, f"{elements} elements of {what}, of {3 * 16 * 16}")


@claim("fsdp", 2)
def nothing_whole_is_kept(make):
    """Between forward and backward no whole parameter is in memory, saved for backward or not."""
    model, saved = nn.Sequential(*[nn.Linear(50, 50, bias=False) for _ in range(5)]), []
    trainer = make(model)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = loss_of(trainer.model(torch.randn(3, 50)))
    units = [unit for i, unit in enumerate(model) if i % 2 == 0]  # the root's own may stay until backward
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    whole = sum(size >= 50 * 50 * 4 for size in storages.values())
    check(whole <= len(model) - len(units), f"{whole} of {len(model)} layers' whole weights are alive")
    loss.backward()


# ---- column and row linear


def make_linear(dim, implementation, linear, **options):
    """-> the parallel layer with this rank's slice of an nn.Linear: rows of the weight (dim 0), or columns (dim 1)."""
    group, N = pool.group(), pool.world_size()
    if hasattr(implementation, "from_full"):
        return implementation.from_full(linear, **accepted(implementation, options, group))
    sizes = (linear.in_features, linear.out_features)
    layer = implementation(*sizes, linear.bias is not None, **accepted(implementation, options, group))
    layer = layer.to(linear.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(linear.weight.chunk(N, dim)[pool.rank()])
        if linear.bias is not None:
            layer.bias.copy_(linear.bias.chunk(N)[pool.rank()] if dim == 0 else linear.bias)
    return layer


def accepted(implementation, options, group):
    parameters = inspect.signature(implementation).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if lacking := [name for name in options if not any_name and name not in parameters]:
        raise NotOffered(f"no argument {lacking[0]}")
    return {**options, **({"process_group": group} if any_name or "process_group" in parameters else {})}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part(tensor, dim):
    return tensor.chunk(pool.world_size(), dim)[pool.rank()]


def linear_equals_one_device(make, dim, bias=True, cut_input=False, cut_output=False, sequence=False, **options):
    """Output, the input's gradient and the weights', twice (they accumulate): each rank's part, or the whole."""
    torch.manual_seed(0)
    linear = nn.Linear(12, 24, bias).double()
    layer = make(copy.deepcopy(linear), **options)
    for step in range(2):
        x = torch.randn(12, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        weight = torch.randn(12, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        ours = part(x, 0) if sequence and dim == 0 else part(x, -1) if cut_input else x
        ours, x = ours.clone().requires_grad_(), x.requires_grad_()
        out, expected = local(layer(ours)), linear(x)
        cut = (lambda t: part(t, 0)) if sequence and dim == 1 else (lambda t: part(t, -1) if cut_output else t)
        same(out, cut(expected), "output")
        (out * cut(weight)).sum().backward()
        (expected * weight).sum().backward()
        expected_gradient = part(x.grad, 0) if sequence and dim == 0 else part(x.grad, -1) if cut_input else x.grad
        check(ours.grad is not None, "the input has no gradient")
        if ours.grad is not None:
            same(ours.grad, expected_gradient, "gradient of the input")
        check(layer.weight.grad is not None, "the weight has no gradient")
        if layer.weight.grad is not None:
            same(local(layer.weight.grad), part(linear.weight.grad, dim), "gradient of the weight")
        if bias and layer.bias.grad is not None:
            same(local(layer.bias.grad), part(linear.bias.grad, 0) if dim == 0 else linear.bias.grad, "bias' gradient")


@claim("column-linear", 2, 4)
def column(make):
    """Each rank computes its part of the output features; the input's gradient is summed over all ranks' parts."""
    linear_equals_one_device(make, 0, cut_output=True)


@claim("column-linear", 3)
def column_without_bias(make):
    """So it does without a bias."""
    linear_equals_one_device(make, 0, bias=False, cut_output=True)


@claim("column-linear", 3)
def column_gathered(make):
    """With gather_output every rank has the whole output, and the gradients are those of one device, not N times."""
    linear_equals_one_device(make, 0, gather_output=True)


@claim("column-linear", 2)
def column_sequence(make):
    """With sequence_parallel the input, (sequence, batch, hidden), is gathered, its gradient scattered."""
    linear_equals_one_device(make, 0, cut_output=True, sequence=True, sequence_parallel=True)


@claim("row-linear", 2, 4)
def row(make):
    """The ranks' products, of parts of the input features, are summed, and the bias is added once."""
    linear_equals_one_device(make, 1, cut_input=True)


@claim("row-linear", 3)
def row_without_bias(make):
    """So they are without a bias."""
    linear_equals_one_device(make, 1, bias=False, cut_input=True)


@claim("row-linear", 3)
def row_of_a_whole_input(make):
    """With input_is_parallel=False each rank takes its part of a whole input, whose gradient is gathered."""
    linear_equals_one_device(make, 1, input_is_parallel=False)


@claim("row-linear", 2)
def row_sequence(make):
    """With sequence_parallel the output is scattered along dimension 0, and the bias' gradient is of all of it."""
    linear_equals_one_device(make, 1, cut_input=True, sequence=True, sequence_parallel=True)


# ---- pipeline schedules


def make_schedules(implementation):
    """-> functions (ranks, micro-batches, stages per rank) -> schedule; of ours, each by name."""
    if "name" in inspect.signature(implementation).parameters:
        from pipeline import SCHEDULES

        return [functools.partial(implementation, name) for name in getattr(implementation, "names", SCHEDULES)]
    return [implementation]


def schedules_of(make, sizes=((1, 1, 1), (2, 2, 1), (2, 5, 1), (4, 8, 1), (4, 4, 2), (3, 6, 3), (4, 2, 1))):
    for schedule in make():
        for p, m, v in sizes:
            try:
                yield p, m, v, [list(map(str, actions)) for actions in schedule(p, m, v)]
            except (ValueError, AssertionError):  # it does not make such a schedule, and says so
                check((p, m, v) != (2, 2, 1), "refuses 2 ranks with 2 micro-batches")


@claim("pipeline-schedule", 1)
def complete(make):
    """Every stage takes every micro-batch forward once and backward once, on its rank."""
    for p, m, v, schedule in schedules_of(make):
        for rank, actions in enumerate(schedule):
            forwards = {f"{stage}F{i}" for stage in range(rank, p * v, p) for i in range(m)}
            done = {a for a in actions if "F" in a}
            check(done == forwards, f"{p} ranks, {m} micro-batches: rank {rank} lacks {sorted(forwards - done)[:3]}")
            wholes, halves = ({a.replace(kind, "F") for a in actions if kind in a} for kind in "BI")
            check(wholes | halves == forwards, f"rank {rank} lacks {sorted(forwards - wholes - halves)[:3]} backward")
            check(not wholes & halves, f"backward of {sorted(wholes & halves)[:3]} twice")
            check({a.replace("W", "F") for a in actions if "W" in a} == halves, "an I without its W, or a W without I")
            check(len(actions) == len(set(actions)), "an action twice")


@claim("pipeline-schedule", 1)
def no_deadlock(make):
    """No rank waits for what can only come later, and nothing goes backward before it went forward."""
    from pipeline import simulate

    for p, m, _v, schedule in schedules_of(make):
        try:
            simulate(schedule)
        except ValueError as error:
            check(False, f"{p} ranks, {m} micro-batches: {str(error)[:100]}")


@claim("pipeline-schedule", 1)
def in_order(make):
    """Micro-batches go backward in their order, so that gradients add up as in a loop on one device."""
    for _, _, _, schedule in schedules_of(make):
        for actions in schedule:
            for stage, kind in itertools.product({a.partition("F")[0] for a in actions if "F" in a}, "BIW"):
                numbers = [int(a.removeprefix(stage + kind)) for a in actions if a.startswith(stage + kind)]
                check(numbers == sorted(numbers), f"stage {stage} takes micro-batches backward in the order {numbers}")


@claim("pipeline-schedule", 1)
def bubble(make):
    """It idles no longer than GPipe, (p-1)/(m+p-1) of the time; or keeps fewer activations than all m."""
    from pipeline import simulate

    for p, m, v, schedule in schedules_of(make, ((2, 4, 1), (4, 8, 1), (4, 16, 1))):
        times = simulate(schedule)
        few = max(times.peak_activations) < m * v
        check(few or times.bubble_fraction <= (p - 1) / (m + p - 1) + 1e-9, f"idle for {times.bubble_fraction:.0%}")


@claim("pipeline-schedule", 2)
def gradients(make):
    """Run, its gradients and its loss are bitwise those of micro-batch accumulation."""
    from pipeline import Pipeline

    for p, m, v, schedule in schedules_of(make, ((2, 2, 1), (2, 5, 1), (2, 4, 2))):
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p * v)])
        mine = copy.deepcopy(plain)[pool.rank() :: p]
        inputs, targets = torch.randn(2, 2 * m, 6)
        loss = Pipeline(list(mine), schedule, m, F.mse_loss, process_group=pool.group()).step(inputs, targets)
        losses = [F.mse_loss(plain(x), y) / m for x, y in zip(inputs.chunk(m), targets.chunk(m), strict=True)]
        for each in losses:
            each.backward()
        for ours, theirs in zip(mine.parameters(), plain[pool.rank() :: p].parameters(), strict=True):
            same(ours.grad, theirs.grad, f"gradient with {m} micro-batches", exact=True)
        if loss is not None:
            check(abs(loss.item() - sum(losses).item()) < 1e-6, "the loss is not the mean")


# ---- GradScaler


def make_scaler(implementation, **arguments):
    device = {"device": "cpu"} if "device" in inspect.signature(implementation).parameters else {}
    return call(implementation, needed=arguments, process_group=pool.group(), **device)


def one_weight():
    weight = nn.Parameter(torch.ones(2))
    return weight, torch.optim.SGD([weight], lr=0.25)


def iterate(scaler, weight, optimizer, gradient):
    weight.grad = scaler.scale(torch.tensor(gradient))
    scaler.step(optimizer)
    scaler.update()


@claim("grad-scaler", 1)
def scaled_and_unscaled(make):
    """The step is that of the unscaled gradient, bitwise: a scale that is a power of two costs no bit."""
    scaler, (weight, optimizer), (plain, theirs) = make(init_scale=2.0**16), one_weight(), one_weight()
    for step in range(3):
        gradient = torch.randn(2, generator=torch.Generator().manual_seed(step)).tolist()
        iterate(scaler, weight, optimizer, gradient)
        plain.grad = torch.tensor(gradient)
        theirs.step()
        same(weight, plain, f"weight after step {step + 1}", exact=True)
    check(scaler.scale(torch.ones(())).item() == 2.0**16, "scale() does not multiply by the scale")


@claim("grad-scaler", 1)
def clipped(make):
    """unscale_ leaves the true gradient in .grad, to be clipped, and step does not divide again."""
    scaler, (weight, optimizer) = make(init_scale=1024.0), one_weight()
    weight.grad = scaler.scale(torch.tensor([3.0, 4.0]))
    method(scaler, "unscale_")(optimizer)
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    check(norm.item() == 5.0, f"the norm is {norm.item()}, not 5")
    scaler.step(optimizer)
    check((weight - torch.tensor([0.85, 0.8])).abs().max() < 1e-5, f"the weight is {weight.tolist()}")


@claim("grad-scaler", 1)
def skipped(make):
    """An inf or NaN in any gradient skips the step, and the scale is halved."""
    for bad in (float("inf"), float("-inf"), float("nan")):
        scaler, (weight, optimizer) = make(init_scale=1024.0), one_weight()
        iterate(scaler, weight, optimizer, [1.0, bad])
        check(weight.tolist() == [1.0, 1.0], f"a gradient of {bad} made a step")
        check(scaler.get_scale() == 512.0, f"the scale is {scaler.get_scale()}, not 512")


@claim("grad-scaler", 1)
def grown(make):
    """The scale doubles after growth_interval good steps in a row; an overflow begins the count anew."""
    scaler, (weight, optimizer) = make(init_scale=1024.0, growth_interval=3), one_weight()
    scales = []
    for gradient in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0):
        iterate(scaler, weight, optimizer, [gradient, 1.0])
        scales.append(scaler.get_scale())
    check(scales == [1024, 1024, 512, 512, 512, 1024, 1024], f"scales {scales}")


@claim("grad-scaler", 1)
def refused(make):
    """unscale_ twice, step twice, and update without a step are errors."""
    for calls in (["unscale_", "unscale_"], ["step", "step"], ["update"]):
        scaler, (weight, optimizer) = make(init_scale=4.0), one_weight()
        weight.grad = scaler.scale(torch.ones(2))
        try:
            for name in calls:
                getattr(scaler, name)(*[] if name == "update" else [optimizer])
        except (RuntimeError, AssertionError):
            continue
        check(False, f"no error from {' and '.join(calls)}")


@claim("grad-scaler", 1)
def resumed(make):
    """The state dict restores scale and count, and is PyTorch's."""
    first, (weight, optimizer) = make(init_scale=1024.0, growth_interval=3), one_weight()
    for _ in range(2):
        iterate(first, weight, optimizer, [1.0, 1.0])
    second = make(init_scale=2.0, growth_interval=7)
    second.load_state_dict(first.state_dict())
    iterate(second, weight, optimizer, [1.0, 1.0])
    check(second.get_scale() == 2048.0, f"the scale is {second.get_scale()} after the third good step, not 2048")
    check(set(first.state_dict()) == set(torch.amp.GradScaler("cpu").state_dict()), f"keys {list(first.state_dict())}")


@claim("grad-scaler", 2)
def shared_overflow(make):
    """An overflow on one rank skips the step on all: their gradients are parts of one model's."""
    scaler, (weight, optimizer) = make(init_scale=1024.0), one_weight()
    iterate(scaler, weight, optimizer, [1.0, float("inf") if pool.rank() == 1 else 1.0])
    check(weight.tolist() == [1.0, 1.0], f"rank {pool.rank()} made the step")
    check(scaler.get_scale() == 512.0, f"rank {pool.rank()} has a scale of {scaler.get_scale()}")


# ---- LoRA


def make_lora(implementation, model, r=4, lora_alpha=16):
    return implementation(model, r=r, lora_alpha=lora_alpha, target_modules=["0", "2"])


def trained(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


@claim("lora", 1)
def unchanged_at_first(make):
    """Before the first step the output is bitwise that of the model: B is zero."""
    model, x = make_model("plain"), make_batch(0, 0)
    expected = model(x)
    same(make(model)(x), expected, "output", exact=True)


@claim("lora", 1)
def r_times_d_plus_k(make):
    """r(d + k) parameters train for each adapted matrix, and no others."""
    found = sum(parameter.numel() for _, parameter in trained(make(make_model("plain"))))
    check(found == 4 * (6 + 33) + 4 * (33 + 17), f"{found} parameters train, not {4 * (6 + 33) + 4 * (33 + 17)}")


@claim("lora", 1)
def dense_equivalent(make):
    """Trained, the model is that of the weights W + (α/r)BA, in outputs and in the gradients of A and B."""
    plain = make_model("plain", torch.float64)
    model = make(copy.deepcopy(plain)).double()
    factors = {}
    for name, parameter in trained(model):
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
        factors.setdefault(name.partition("lora_")[0], []).append(parameter)
    check(len(factors) == 2, f"{len(factors)} layers are adapted, not 2")
    dense, leaves = dict(plain.named_parameters()), []
    for layer, (A, B) in zip(("0", "2"), factors.values(), strict=False):
        leaves += [(A, A.detach().clone().requires_grad_()), (B, B.detach().clone().requires_grad_())]
        dense[f"{layer}.weight"] = dense[f"{layer}.weight"].detach() + 16 / 4 * leaves[-1][1] @ leaves[-2][1]
    x = make_batch(0, 0, torch.float64)
    ours, expected = model(x), torch.func.functional_call(plain, dense, x)
    same(ours, expected, "output")
    loss_of(ours).backward()
    loss_of(expected).backward()
    for parameter, leaf in leaves:
        same(parameter.grad, leaf.grad, "gradient of A or B")


@claim("lora", 1)
def base_stays(make):
    """Training leaves the model's own weights bitwise as they are."""
    plain = make_model("plain")
    model = make(copy.deepcopy(plain))
    optimizer = torch.optim.AdamW([parameter for _, parameter in trained(model)], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(make_batch(0, step))).backward()
        optimizer.step()
    check(any(parameter.grad is not None and parameter.grad.any() for _, parameter in trained(model)), "nothing trains")
    kept = [parameter for _, parameter in model.named_parameters() if not parameter.requires_grad]
    for name, parameter in plain.named_parameters():
        check(any(torch.equal(parameter, other) for other in kept), f"{name} has changed")


# ---- attention


def attend(implementation, q, k, v, causal=False, **options):
    """The output, (batch, heads, queries, head size)."""
    try:
        names = inspect.signature(implementation).parameters
    except ValueError:  # a builtin, PyTorch's own
        names = {"is_causal", "dropout_p", "scale", "enable_gqa"}
    if causal:
        options["causal" if "causal" in names else "is_causal"] = True
    if lacking := [name for name in options if name not in names]:
        raise NotOffered(f"no argument {lacking[0]}")
    if "enable_gqa" in names:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return implementation(q, k, v, **options)


def queries_and_keys(S, Skv, heads=2, shared=2, size=8):
    shapes = (2, heads, S, size), (2, shared, Skv, size), (2, shared, Skv, size)
    generator = torch.Generator().manual_seed(S * Skv)
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def dense_weights(q, k, causal=False, scale=None):
    """softmax, zero where all is hidden: the last query sees all keys, the one before it all but the last."""
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    row, col = torch.arange(q.shape[-2])[:, None] - q.shape[-2], torch.arange(k.shape[-2]) - k.shape[-2]
    hidden = (col > row) & causal
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)


def attends_as_dense(make, q, k, v, causal=False, **options):
    groups = q.shape[1] // k.shape[1]
    weights = dense_weights(q, k.repeat_interleave(groups, 1), causal, **options)
    gradients_equal(make(q, k, v, causal, **options), weights @ v.repeat_interleave(groups, 1), q, k, v)


def gradients_equal(output, expected, q, k, v):
    same(output, expected, f"output for {q.shape[2]} queries and {k.shape[2]} keys")
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ours, theirs = (torch.autograd.grad(x, (q, k, v), weight) for x in (output, expected))
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        same(a, b, f"gradient of {name}, for {q.shape[2]} queries and {k.shape[2]} keys")


@claim("attention", 1)
def as_dense(make):
    """Output and gradients are those of dense attention, for any numbers of queries and keys (1e-12 in float64)."""
    for S, Skv in ((1, 1), (7, 7), (300, 300), (5, 201), (201, 5)):
        attends_as_dense(make, *queries_and_keys(S, Skv))


@claim("attention", 1)
def causal(make):
    """Causal, a query sees the keys up to its own."""
    for S in (1, 7, 300):
        attends_as_dense(make, *queries_and_keys(S, S), causal=True)


@claim("attention", 1)
def causal_at_the_end(make):
    """Causal, with more keys than queries, as with a cache of keys, the last query sees all of them."""
    for S, Skv in ((1, 7), (70, 201)):
        attends_as_dense(make, *queries_and_keys(S, Skv), causal=True)


@claim("attention", 1)
def sees_nothing(make):
    """Causal, with fewer keys than queries, the first queries see none: they are zero, and so are their gradients."""
    for S, Skv in ((7, 1), (201, 70)):
        attends_as_dense(make, *queries_and_keys(S, Skv), causal=True)


@claim("attention", 1)
def shared_heads(make):
    """Query heads 0 to G-1 share the first head of keys and values, and so on; their gradients add up there."""
    for shared in (1, 2):
        attends_as_dense(make, *queries_and_keys(70, 70, heads=6, shared=shared), causal=True)


@claim("attention", 1)
def scale(make):
    """The scale is the one that is given, instead of 1/√D."""
    attends_as_dense(make, *queries_and_keys(70, 70), scale=0.7)


@claim("attention", 1)
def large_scores(make):
    """Scores of thousands, whose exponentials no float has, are no matter, wherever the largest is."""
    for order in (1, -1):
        q, k, v = queries_and_keys(3, 300)
        size = torch.linspace(0, order * 1000, 300, dtype=torch.float64)[:, None]
        attends_as_dense(make, q, (k + size).detach().requires_grad_(), v)


@claim("attention", 1)
def dropout(make):
    """Each weight is dropped with the probability asked for, the others grow by as much; backward has forward's mask.

    With v = 1 the output is the weights, and so tells the mask, which is the same after the same seed.
    """
    q, k, v = queries_and_keys(60, 32, size=32)
    torch.manual_seed(3)
    mask = make(q, k, torch.eye(32, dtype=torch.float64).expand_as(v), dropout_p=0.25) / dense_weights(q, k)
    mask = (mask > 0.5).double() / 0.75
    share = (mask == 0).double().mean().item()  # of 7,680: a standard deviation is 0.005
    check(abs(share - 0.25) < 0.025, f"{share:.1%} are dropped, not 25%")
    torch.manual_seed(3)
    gradients_equal(make(q, k, v, dropout_p=0.25), (dense_weights(q, k) * mask) @ v, q, k, v)


@claim("attention", 1)
def no_matrix_is_kept(make):
    """What is kept for backward grows as the queries and keys, not as their product."""
    q, k, v = queries_and_keys(600, 600)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        make(q, k, v, causal=True)
    kept = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}.values()) // 8
    check(0 < kept < 600 * 600, f"{kept} elements are kept, where {4 * 600 * 600} are scores and {4 * 600 * 8} are q")


# ---- activation checkpointing


def make_checkpoint(implementation, function, *args, **kwargs):
    return call(functools.partial(implementation, **kwargs), function, *args, use_reentrant=False)


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def computes_alike(make, build, steps=3):
    """build(how a function is called) -> loss, leaves; bitwise against calling it plainly."""
    for step in range(steps):
        results = []
        for how in (make, plainly):
            torch.manual_seed(step)
            loss, leaves = build(how)
            loss.backward()
            results.append([loss, torch.rand(3), *[leaf.grad for leaf in leaves]])
        for number, (ours, plain) in enumerate(zip(*results, strict=True)):
            what = ("loss", "next random number")[number] if number < 2 else f"gradient {number - 2}"
            check((ours is None) == (plain is None), f"{what} is {ours}")
            if ours is not None and plain is not None:
                same(ours, plain, what, exact=True)


def layer(*more):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 6), nn.Tanh())


@claim("checkpoint", 1)
def recomputed(make):
    """Loss and gradients, of inputs and parameters, are bitwise those of calling the function, layer after layer."""

    def build(how):
        x, layers = torch.randn(4, 6, requires_grad=True), [layer() for _ in range(3)]
        y = functools.reduce(lambda y, each: how(each, y), layers, x)
        return loss_of(y), [x, *nn.ModuleList(layers).parameters()]

    computes_alike(make, build)


@claim("checkpoint", 1)
def random_numbers(make):
    """Dropout drops the same again, and what is drawn afterwards is what would have been."""

    def build(how):
        x, layers = torch.randn(4, 6, requires_grad=True), [layer(nn.Dropout(0.5)) for _ in range(2)]
        y = F.dropout(how(layers[1], F.dropout(how(layers[0], x))))
        return loss_of(y), [x, *nn.ModuleList(layers).parameters()]

    computes_alike(make, build)


@claim("checkpoint", 1)
def autocast_again(make):
    """What ran under autocast runs under it again, though backward does not."""

    def build(how):
        x, layers = torch.randn(4, 6, requires_grad=True), [layer() for _ in range(2)]
        with torch.autocast("cpu", torch.bfloat16):
            y = how(layers[1], how(layers[0], x))
        return loss_of(how(layers[0], y.float())), [x, *nn.ModuleList(layers).parameters()]

    computes_alike(make, build)


@claim("checkpoint", 1)
def closures(make):
    """Gradients reach what the function uses without getting it as an argument, by grad as well as by backward."""

    def build(how):
        weight, module = torch.randn(6, 6, requires_grad=True), layer()
        hidden, tokens = torch.tanh(weight), torch.randn(4, 6)  # tokens want no gradient
        return loss_of(how(lambda x: torch.tanh(module(x) @ hidden), tokens)), [weight, *module.parameters()]

    computes_alike(make, build)
    torch.manual_seed(0)
    loss, leaves = build(make)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    check(None not in found, "torch.autograd.grad does not reach the parameters")


@claim("checkpoint", 1)
def any_structure(make):
    """Inputs and outputs may be nested, named, without gradient, or no tensors."""

    def function(pair, scale=1.0, *, more):
        return {"y": torch.tanh(pair[0] * pair[1]["b"]) * scale + more[0], "n": (more[1], pair[0].argmax())}

    def build(how):
        a, b, c = (torch.randn(5, requires_grad=True) for _ in range(3))
        output = how(function, (a, {"b": b}), 2.0, more=[c, "text"])
        check(output["n"][0] == "text", "an output that is no tensor is lost")
        return loss_of(output["y"]) * output["n"][1], [a, b, c]

    computes_alike(make, build)


@claim("checkpoint", 1)
def nested(make):
    """A checkpoint may be in another, and a layer may be called twice."""

    def build(how):
        x, first, second = torch.randn(4, 6, requires_grad=True), layer(nn.Dropout(0.5)), layer()
        inner = lambda x: how(first, torch.sin(how(second, x))) + x  # noqa: E731
        return loss_of(how(lambda x: torch.cos(how(inner, inner(x))), x)), [
            x,
            *first.parameters(),
            *second.parameters(),
        ]

    computes_alike(make, build)


@claim("checkpoint", 1)
def again(make):
    """Backward may come twice (retain_graph), for one part of the leaves after the other, and through backward."""
    results = []
    for how in (make, plainly):
        torch.manual_seed(0)
        x, module = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), layer(nn.Dropout(0.5)).double()
        loss = loss_of(how(module, how(torch.sin, x)))
        first = torch.autograd.grad(loss, module[0].weight, retain_graph=True)
        second = torch.autograd.grad(loss, [x, module[0].weight], create_graph=True)
        results.append([*first, *second, *torch.autograd.grad(second[0].square().sum(), x, retain_graph=True)])
        loss.backward()
        results[-1].append(x.grad)
    for number, (ours, plain) in enumerate(zip(*results, strict=True)):
        same(ours, plain, f"gradient {number}", exact=True)


@claim("checkpoint", 1)
def forgotten(make):
    """Nothing of the inside is in memory between forward and backward, nor after it; the function runs twice in all."""
    inside, x = [], torch.randn(4, 6, requires_grad=True)

    def function(x):
        inside.append([(y := torch.tanh(x)), (z := torch.sigmoid(y))])
        inside[-1] = [weakref.ref(tensor.untyped_storage()) for tensor in inside[-1]]
        return torch.exp(z * y).sin()

    output = make(function, x)
    alive = [reference for reference in inside[0] if reference() is not None]
    check(not alive, f"{len(alive)} of 2 tensors of the inside are alive after forward")
    output.sum().backward()
    check(len(inside) == 2, f"the function ran {len(inside)} times")
    check(
        not [r for tensors in inside for r in tensors if r() is not None], "some of the inside is alive after backward"
    )
    with torch.no_grad():
        make(function, x)
    check(len(inside) == 3, "under no_grad it did not run once")


@claim("checkpoint", 1)
def differs(make):
    """A recomputation that saves fewer tensors, or others in shape or dtype, is an error, as is a changed input."""
    changes = {
        "number": lambda x, run: x.sin() if run else x.sin().cos().tan(),
        "shape": lambda x, run: (x if run else torch.cat([x, x])).sin().sum(),
        "dtype": lambda x, run: (x.double() if run else x).sin().sum(),
        "input": lambda x, run: x.sin(),
    }
    for what, function in changes.items():
        runs, x = [], torch.randn(4, requires_grad=True)

        def changed(x, function=function, runs=runs):
            runs.append(None)
            return function(x, len(runs) > 1)

        y = make(changed, (argument := x * 1))
        if what == "input":
            argument.mul_(2)
        try:
            y.sum().backward()
        except RuntimeError:
            continue
        check(False, f"no error for a changed {what}")


@claim("checkpoint", 3)
def collectives_again(make):
    """What communicates in forward does so again, in the same order on all ranks."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dist.all_reduce(total := x.clone(), group=pool.group())
            return total

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def build(how):
        x, weights = torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, 6) * (1 + pool.rank())
        weights.requires_grad_()

        def function(x):
            for weight in weights:
                x = torch.tanh(Sum.apply(x @ weight))
            return x

        return loss_of(how(function, how(function, x))), [x, weights]

    computes_alike(make, build)


# ---- all-reduce


def all_reduce(implementation, tensor, group=None):
    names = {"process_group", "group"} & set(inspect.signature(implementation).parameters)
    if group and not names:
        raise NotOffered("no argument process_group")
    implementation(tensor, **dict.fromkeys(names, group or pool.group()))
    return tensor


def numbers_of(rank, shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, dtype=dtype, generator=generator)


def total_of(ranks, *what):
    return sum(numbers_of(r, *what) for r in ranks)


@claim("all-reduce", 1, 2, 3, 4)
def summed(make):
    """Every rank ends with the sum of all ranks' tensors, of any shape: those that N does not divide, empty, scalar."""
    for shape in ((12,), (7,), (1,), (), (0,), (5, 0), (2, 3, 5), (10_007,)):
        total = total_of(range(pool.world_size()), shape)
        same(make(numbers_of(pool.rank(), shape)), total, f"the sum of shape {shape}")


@claim("all-reduce", 2, 3)
def summed_exactly(make):
    """So it is with whole numbers, exactly."""
    for dtype in (torch.int64, torch.int32):
        total = total_of(range(pool.world_size()), (101,), dtype)
        same(make(numbers_of(pool.rank(), (101,), dtype)), total, f"the sum in {dtype}", exact=True)


@claim("all-reduce", 2, 3)
def large(make):
    """And with tensors that no buffer on the way can hold."""
    shape = (2**21 + 1,)
    same(make(numbers_of(pool.rank(), shape)), total_of(range(pool.world_size()), shape), "the sum of 16 MB")


@claim("all-reduce", 2, 3)
def strided(make):
    """A tensor that is not contiguous becomes the sum, all of it, and what lies between its elements stays."""
    for view in (torch.t, lambda x: x[:, 1], lambda x: x[::2, 1::2]):
        mine, before = (numbers_of(pool.rank(), (6, 8)) for _ in range(2))
        make(view(mine))
        view(before).copy_(view(total_of(range(pool.world_size()), (6, 8))))
        same(mine, before, "a strided tensor's whole memory")


@claim("all-reduce", 3, 4)
def same_bits(make):
    """All ranks end with the same bits, in float32."""
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, make(numbers_of(pool.rank(), (1001,), torch.float32)), group=pool.group())
    check(all(torch.equal(everyone[0], theirs) for theirs in everyone), "ranks differ")


@claim("all-reduce", 2)
def two_in_rank_order(make):
    """At two ranks it is bitwise the one's plus the other's, in float32."""
    total = total_of(range(2), (1001,), torch.float32)
    same(make(numbers_of(pool.rank(), (1001,), torch.float32)), total, "the sum", exact=True)


@claim("all-reduce", 4)
def all_reduces_apart(make):
    """Two groups side by side never meet, whatever their members' order."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 2]), dist.new_group([3, 1])]
    for shape in ((5,), (10_007,)):
        same(make(numbers_of(rank, shape), groups[rank % 2]), total_of((rank % 2, rank % 2 + 2), shape), "the sum")


@claim("all-reduce", 2, 3)
def reused(make):
    """The tensor may be overwritten right after: nothing of it is still to be sent."""
    shape, ranks = (2**21 + 1,), range(pool.world_size())  # 16 MB: takes longer than the next line
    for call in range(2):
        total, mine = total_of(ranks, shape) + call * len(ranks), numbers_of(pool.rank(), shape) + call
        make(mine)
        if (pool.rank() + call) % 2 == 0:
            mine[-1] = torch.nan  # at once, and what would be sent last
        else:
            same(mine, total, f"the sum of call {call + 1}")


MAKERS = {kind: functools.partial(Trainer, kind) for kind in ALL.split()}
MAKERS |= {
    "column-linear": functools.partial(make_linear, 0),
    "row-linear": functools.partial(make_linear, 1),
    "pipeline-schedule": make_schedules,
    "grad-scaler": make_scaler,
    "lora": make_lora,
    "attention": attend,
    "checkpoint": make_checkpoint,
    "all-reduce": all_reduce,
}

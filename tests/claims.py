"""The oracle: what is true of a right implementation, one claim a function, said in its docstring's first sentence.

Each claim takes `make`, which calls the implementation under test as PyTorch's own of that kind is called, and runs on
every rank of a world of so many. `same` and `check` write down what does not hold and go on: a rank that left early
would hang the others. run_all.sh tests --ddp package.module:Name, or path/to/file.py:Name, tries another class.
"""

import copy
import importlib.util
import inspect
import itertools
import sys
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shared import HOW, OPTIMIZERS, Blocks, Collectives, loss_of, make_batch, make_model
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce as all_reduced

import pipeline

# An implementation is called as: --ddp, class(module); --zero1, class(parameters, optimizer class, its arguments),
# gradients averaged before; --fsdp, function(module), on submodules first; --column-linear and --row-linear,
# class.from_full(an nn.Linear) or class(in_features, out_features, bias); --pipeline-schedule, function(ranks,
# micro-batches, stages per rank) -> a list of actions for each rank; --grad-scaler, class(init_scale=,
# growth_interval=); --lora, function(model, r=, lora_alpha=, target_modules=); --checkpoint, function(function, *its
# arguments), with use_reentrant=False where it takes that; --attention, function(q, k, v, causal= or is_causal=) and,
# where it has them, scale= and dropout_p=; --all-reduce, function(tensor), in place. And each with process_group=, if
# it takes one; an all-reduce with group=, too.


class Claim(NamedTuple):
    kind: str
    sentence: str
    check: callable
    worlds: tuple


CLAIMS = {}  # (kind, name): Claim


def say(name, sentence, worlds, kinds, check, **how):
    """The claim that `check`, called `how`, finds nothing, in worlds of each of these numbers of ranks."""
    for kind in kinds.split():
        CLAIMS[kind, name] = Claim(kind, sentence, partial(check, **how), worlds)


def claim(kinds, *worlds, of=None):
    """The same of a function, whose docstring says it; or of what it builds for the check `of`."""

    def register(function):
        check = partial(of, build=function) if of else function
        say(function.__name__, " ".join(function.__doc__.split()), worlds, kinds, check)
        return function

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
    return getattr(module, name)


def names_of(function):
    return inspect.signature(function).parameters


def call(function, *args, needed=None, **welcome):
    """function(*args) with the `needed` keywords, and with those of the `welcome` ones that it has a name for."""
    names, needed = names_of(function), needed or {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    if lacking := [name for name in needed if not takes_any and name not in names]:
        raise NotOffered(f"no argument {lacking[0]}")
    return function(
        *args, **needed, **{name: value for name, value in welcome.items() if name in names}
    )


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


@contextmanager
def error_from(what):
    """What is done inside must be an error."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError):
        return
    check(False, f"no error from {what}")


def same(ours, plain, what, exact=False):
    """Bitwise when `exact`, else to 1e-12 of the largest element."""
    if ours is None or ours.shape != plain.shape:
        check(
            False,
            f"{what} is {ours if ours is None else tuple(ours.shape)}, not {tuple(plain.shape)}",
        )
    elif not torch.equal(ours, plain):
        error, bound = (
            (ours.double() - plain.double()).abs().max().item(),
            1e-12 * max(1.0, plain.abs().max().item()),
        )
        check(error <= bound and not exact, f"{what} is off by {error:.1e}")


def same_on_all(tensor, what):
    """Bitwise."""
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, tensor.detach(), group=pool.group())
    check(all(torch.equal(everyone[0], theirs) for theirs in everyone), f"ranks differ in {what}")


def run(kind, name, spec):
    """On a worker: -> "" where the claim holds, else in a word why not; None where it is not offered."""
    _problems.clear()
    try:
        with default_group(pool.group()):
            CLAIMS[kind, name].check(partial(KINDS[kind][0], resolve(spec)))
    except NotOffered:
        return None
    return _problems[0] if _problems else ""


# ---- data parallel: ddp, zero 1 to 3, fsdp


class Trainer:
    """A module in training: by DDP, by a sharded optimizer, or by fully_shard. `whole()` are parameters by name."""

    def __init__(self, kind, implementation, module, optimizer="sgd", group=None, **options):
        names = names_of(implementation)
        averages = kind in ("zero2", "zero3") or (
            "module" in names and kind == "zero1"
        )  # by itself: ours
        if group and not (averages or {"process_group", "mesh"} & set(names)):
            raise NotOffered("no argument process_group")
        group, make_optimizer = group or dist.group.WORLD, OPTIMIZERS[optimizer]
        where = {"process_group": group} if averages or "process_group" in names else {}
        self.kind, self.module, self.model = kind, module, module
        self.file = sys.modules[getattr(implementation, "func", implementation).__module__]
        # What fsdp wraps: every second child with parameters; none where they are tied, or used by name.
        children = list(module.children())[::2] if isinstance(module, nn.Sequential) else []
        self.units = [child for child in children if list(child.parameters())]
        if kind == "ddp":
            self.model = call(implementation, module, process_group=group, **options)
        elif kind == "fsdp":
            where = where or {"mesh": DeviceMesh.from_group(group, "cpu")}
            for unit in [*self.units, module]:
                self.model = call(implementation, unit, **where)
        elif not averages:
            self.model = nn.parallel.DistributedDataParallel(module, process_group=group, **options)
        if kind in ("ddp", "fsdp"):
            self.optimizer = make_optimizer(self.model.parameters())
        else:
            trained = module if averages else module.parameters()
            self.optimizer = implementation(
                trained, make_optimizer.func, **where, **make_optimizer.keywords
            )

    def find(self, name):
        """The implementation's method, or the function of its file that takes the module."""
        for owner in (self.optimizer, self.model):
            if hasattr(owner, name):
                return getattr(owner, name)
        if self.kind != "fsdp" or not hasattr(self.file, name):
            raise NotOffered(f"no {name}")
        return partial(getattr(self.file, name), self.model)

    @contextmanager
    def no_sync(self):
        if hasattr(self.model, "set_requires_gradient_sync"):  # PyTorch's fully_shard
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        else:
            with self.find("no_sync")():
                yield

    def backward(self, batches, loss=loss_of, sync="last"):
        finish = getattr(self.model, "finish_gradient_synchronization", None)
        for i, batch in enumerate(batches):
            with (
                nullcontext()
                if finish or sync == "each" or i == len(batches) - 1
                else self.no_sync()
            ):
                loss(self.model(batch)).backward()
        if finish:
            finish()

    def clip_grad_norm_(self, max_norm):
        try:
            return self.find("clip_grad_norm_")(max_norm)
        except NotOffered:
            norm = nn.utils.clip_grad_norm_(list(self.model.parameters()), max_norm)
            return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def step(self, batches):
        self.optimizer.zero_grad()
        self.backward(batches)
        self.optimizer.step()

    def whole(self):
        found = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        if self.kind in ("zero3", "fsdp") and not any(
            hasattr(p, "full_tensor") for p in found.values()
        ):
            state = self.find("full_state_dict" if self.kind == "fsdp" else "module_state_dict")()
            return {name: state[name] for name in found}
        return {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in found.items()
        }


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
    make,
    model="plain",
    optimizer="sgd",
    exact=False,
    micro=1,
    sync="last",
    start=0,
    before=None,
    after=None,
    **options,
):
    """Four steps on data of its own for each rank and step; parameters compared after each, DDP's gradients as well.

    The trainer, and in it what trains on one device, is shown to `before` and `after` before and after each step.
    """
    ranks, rank = dist.get_process_group_ranks(options.get("group", pool.group())), dist.get_rank()
    dtype = torch.float32 if exact else torch.float64
    plain = (make_model(model) if isinstance(model, str) else copy.deepcopy(model)).to(dtype)
    module = copy.deepcopy(plain)
    for parameter in module.parameters():
        parameter.data += start * rank  # rank 0's are those that count
    trainer = make(module, optimizer, **options)
    trainer.plain, trainer.plain_optimizer = plain, OPTIMIZERS[optimizer](plain.parameters())
    for step in range(4):
        batches = {r: [make_batch(r, 10 * step + i, dtype) for i in range(micro)] for r in ranks}
        one_device(plain, batches.values())
        trainer.optimizer.zero_grad()
        trainer.backward(batches[rank], sync=sync)
        if before:
            before(trainer)
        trainer.optimizer.step()
        trainer.plain_optimizer.step()
        if after:
            after(trainer)
        ours = trainer.whole()
        check(ours.keys() == dict(plain.named_parameters()).keys(), f"parameters are {list(ours)}")
        for name, parameter in plain.named_parameters():
            same(ours.get(name), parameter, f"{name} after step {step + 1}", exact)
            grad = module.get_parameter(name).grad if trainer.kind == "ddp" else None
            if grad is not None and parameter.grad is not None:
                same(grad, parameter.grad, f"gradient of {name}", exact)


class Uses(nn.Module):
    """Nobody uses `nobody`; `first` is used where the data say so, which differs by rank and step, or never."""

    def __init__(self, differ):
        super().__init__()
        torch.manual_seed(1)  # on every rank
        self.first, self.second, self.nobody = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.differ = differ

    def forward(self, x):
        return self.second(x) + (self.first(x) if self.differ and x[0, 0] > 0 else 0)


class Twice(Blocks):
    """Calls its block twice, `how`."""

    def __init__(self, how):
        torch.manual_seed(1)
        super().__init__(1)
        self.how = HOW[how]

    def forward(self, x):
        return super().forward(x, [0, 0], self.how)


def evaluate(trainer):
    x = make_batch(0, 99, torch.float64)
    with torch.no_grad():
        same(trainer.model(x), trainer.plain(x), "output of an evaluation")


def clip(trainer):
    norm = nn.utils.clip_grad_norm_(trainer.plain.parameters(), 0.01)
    check(norm > 0.01, "nothing to clip")
    same(trainer.clip_grad_norm_(0.01), norm, "norm")


ZERO = "zero1 zero2 zero3"
ALL, SHARDED = f"ddp {ZERO} fsdp", f"{ZERO} fsdp"
trains = partial(say, check=trains_as_one_device)
trains(
    "mean_gradient",
    "A step of SGD moves by the mean of the ranks' gradients, each from its own data.",
    [2, 3],
    ALL,
)
trains("momentum", "SGD with momentum trains as on one device.", [3], ALL, optimizer="momentum")
trains("adamw", "AdamW trains as on one device.", [3], ALL, optimizer="adamw")
trains(
    "bitwise",
    "At two ranks, in float32, it trains bitwise as on one.",
    [2],
    ALL,
    optimizer="adamw",
    exact=True,
)
trains(
    "bitwise_at_four",
    "At four ranks, too, bitwise: it adds in rank order.",
    [4],
    SHARDED,
    exact=True,
)
trains(
    "start_of_rank_0",
    "Ranks seeded differently start from rank 0's weights.",
    [3],
    f"ddp {ZERO}",
    start=1,
)
trains("tied", "A parameter that two layers share stays one.", [2], ALL, model="tied")
trains("frozen", "Frozen parameters stay, and the others train.", [2], ALL, model="frozen")
trains(
    "odd_shapes", "Scalar, empty, strided and one-element parameters train.", [3], ALL, model="odd"
)
trains("called_twice", "A layer that forward calls twice trains.", [2], ALL, model=Twice("plainly"))
trains(
    "checkpointed",
    "A layer that is recomputed in backward trains.",
    [2],
    ALL,
    model=Twice("checkpointed"),
)
trains(
    "accumulation",
    "All micro-batches count, when all but the last run under no_sync.",
    [2, 3],
    ALL,
    micro=3,
)
trains(
    "accumulation_synchronised",
    "All count, too, when each is synchronised.",
    [2],
    ALL,
    micro=3,
    sync="each",
)
UNUSED = {"optimizer": "adamw", "find_unused_parameters": True}
trains(
    "unused",
    "What nobody uses stays, under weight decay, too.",
    [2],
    ALL,
    model=Uses(False),
    **UNUSED,
)
sentence = "What some ranks use is averaged with the others' zeros, and nobody hangs."
trains("unused_on_one_rank", sentence, [3], "ddp zero1 zero2", model=Uses(True), **UNUSED)
sentence = "A forward without gradients, between backward and step and after it, sees the weights of that moment."
trains("evaluation", sentence, [2], ALL, before=evaluate, after=evaluate)
trains(
    "clipping",
    "The norm to clip by is that of the whole gradient, on every rank.",
    [3],
    SHARDED,
    before=clip,
)


@claim(ALL, 4)
def replicas(make):
    """After each step all ranks hold the same bits, in float32, too."""
    trainer = make(make_model("plain"), "adamw")
    for step in range(3):
        trainer.step([make_batch(pool.rank(), step)])
        same_on_all(
            torch.cat([p.detach().flatten() for p in trainer.whole().values()]), "parameters"
        )


@claim(ALL, 4)
def groups_apart(make):
    """Two groups side by side never meet."""
    groups, side = [dist.new_group([0, 2]), dist.new_group([1, 3])], dist.get_rank() % 2
    trains_as_one_device(make, make_model("plain", seed=side), group=groups[side])


# ---- ddp alone


@claim("ddp", 2)
def buffers(make):
    """In forward, all ranks take over rank 0's buffers."""
    model = make_model("batchnorm")
    trainer = make(model)
    for step in range(2):
        trainer.step([make_batch(pool.rank(), step)])
    trainer.model(make_batch(0, 5))  # the same on all ranks, after rank 0's statistics have come
    same_on_all(model[1].running_mean, "the running mean")


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
def overlap(make):
    """Communication begins while backward still runs. Each gradient is handed to an all-reduce once."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    trainer = make(model, bucket_cap_mb=1e-6)
    trainer.step([make_batch(pool.rank(), 0)])  # PyTorch's first step has buckets of its own
    with Collectives() as seen:
        model[0].weight.register_hook(
            lambda _: seen.calls.append(("the first layer's gradient", 0))
        )
        trainer.step([make_batch(pool.rank(), 1)])
    check(seen.calls[0] != ("the first layer's gradient", 0), "everything is sent after backward")
    gradients, sent = sum(p.nbytes for p in model.parameters()), seen.bytes_of("allreduce_")
    check(sent == gradients, f"{sent} bytes are sent for {gradients} of gradients")


@claim("ddp", 2)
def overflow(make):
    """The sum of two fp16 gradients whose mean is finite does not overflow."""
    model = nn.Linear(1, 1, bias=False).half()
    make(model).backward([torch.full((1, 1), 40000.0, dtype=torch.float16)], torch.sum)
    check(model.weight.grad.item() == 40000.0, f"{model.weight.grad.item()}, not 40000")


@claim("ddp", 2)
def different_models(make):
    """Models of other shapes on another rank are an error on all of them, at construction."""
    group = dist.new_group(
        [0, 1], timeout=timedelta(seconds=2)
    )  # PyTorch's notices when that is over
    with (
        default_group(group),
        error_from("a Linear(2, 2) on one rank and a Linear(2, 3) on the other"),
    ):
        make(nn.Linear(2, 2 + pool.rank()))


# ---- zero alone


@claim("zero1 zero2", 3)
def state_is_sharded(make):
    """All ranks' optimizer states together are the whole one, and no rank has more than its share and one parameter."""
    model = nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(6)])
    trainer = make(model, "adamw")
    trainer.step([torch.randn(4, 20)])
    psi, values = sum(p.numel() for p in model.parameters()), vars(trainer.optimizer).values()
    inner = next((v for v in values if isinstance(v, torch.optim.Optimizer)), trainer.optimizer)
    mine = sum(
        t.numel()
        for state in inner.state.values()
        for t in state.values()
        if torch.is_tensor(t) and t.dim()
    )
    total = [None] * pool.world_size()
    dist.all_gather_object(total, mine, group=pool.group())
    check(
        2 * psi <= sum(total) < 2.1 * psi + 3 * 64,
        f"{sum(total)} elements of state for {psi} parameters",
    )
    check(
        max(total) <= 2 * psi / pool.world_size() + 800 + 64,
        f"a rank holds {max(total)} of {2 * psi}",
    )


def states_agree(trainer):
    if hasattr(trainer.optimizer, "consolidate_state_dict"):
        trainer.optimizer.consolidate_state_dict(to=0)
        if pool.rank():
            return
    ours, plain = (
        trainer.optimizer.state_dict()["state"],
        trainer.plain_optimizer.state_dict()["state"],
    )
    check(list(ours) == list(plain), f"state of parameters {list(ours)}")
    for index, state in plain.items():
        for key, value in state.items():
            same(
                torch.as_tensor(ours.get(index, {}).get(key, torch.nan)),
                value,
                f"state {index} {key}",
            )


def schedule(trainer):
    if not hasattr(trainer, "schedules"):
        optimizers = trainer.optimizer, trainer.plain_optimizer
        trainer.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers
        ]
    else:
        for each in trainer.schedules:
            each.step()


trains(
    "whole_state_dict",
    "The state dict is the plain optimizer's.",
    [2],
    ZERO,
    optimizer="adamw",
    after=states_agree,
)
trains(
    "schedulers",
    "A learning rate that a scheduler changes counts in the next step.",
    [2],
    ZERO,
    after=schedule,
)


# ---- fsdp alone


@claim("fsdp", 4)
def parameters_are_shards(make):
    """A rank holds 1/N of the parameters and gradients, up to a row of each."""
    trainer = make(nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)]))
    trainer.backward([torch.randn(2, 16)])
    parameters = list(trainer.model.parameters())
    for what, held in (("parameters", parameters), ("gradients", [p.grad for p in parameters])):
        elements = sum(local(tensor).numel() for tensor in held if tensor is not None)
        check(
            0 < elements <= 3 * 16 * 16 // 4 + 16,
            f"{elements} elements of {what}, of {3 * 16 * 16}",
        )


@claim("fsdp", 2)
def nothing_whole_is_kept(make):
    """Between forward and backward no whole parameter is in memory, saved for backward or not."""
    model, saved = nn.Sequential(*[nn.Linear(50, 50, bias=False) for _ in range(5)]), []
    trainer = make(model)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = loss_of(trainer.model(torch.randn(3, 50)))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    whole, own = (
        sum(size >= 50 * 50 * 4 for size in storages.values()),
        len(model) - len(trainer.units),
    )
    check(
        whole <= own, f"{whole} layers' whole weights are alive"
    )  # the root's own may stay until backward
    loss.backward()


# ---- column and row linear


def make_linear(implementation, linear, dim, **options):
    """-> the parallel layer with this rank's slice of an nn.Linear: rows of the weight (dim 0), or columns (dim 1)."""
    if hasattr(implementation, "from_full"):
        return call(implementation.from_full, linear, needed=options, process_group=pool.group())
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    layer = call(implementation, *sizes, needed=options, process_group=pool.group()).to(
        linear.weight.dtype
    )
    with torch.no_grad():
        layer.weight.copy_(part(linear.weight, dim))
        if linear.bias is not None:
            layer.bias.copy_(part(linear.bias, 0 if dim == 0 else None))
    return layer


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part(tensor, dim):
    return tensor if dim is None else tensor.chunk(pool.world_size(), dim)[pool.rank()]


def linear_equals_one_device(make, dim, input_cut=None, output_cut=None, bias=True, **options):
    """Output, the input's gradient and the weights', twice (they accumulate): each rank's part, or the whole."""
    torch.manual_seed(0)
    linear = nn.Linear(12, 24, bias).double()
    layer = make(copy.deepcopy(linear), dim, **options)
    for _ in range(2):
        x, weight = torch.randn(12, 2, 12).double(), torch.randn(12, 2, 24).double()
        ours, x = part(x, input_cut).clone().requires_grad_(), x.requires_grad_()
        output, expected = local(layer(ours)), linear(x)
        same(output, part(expected, output_cut), "output")
        (output * part(weight, output_cut)).sum().backward()
        (expected * weight).sum().backward()
        same(ours.grad, part(x.grad, input_cut), "gradient of the input")
        same(local(layer.weight.grad), part(linear.weight.grad, dim), "gradient of the weight")
        if bias and layer.bias.grad is not None:
            same(
                local(layer.bias.grad),
                part(linear.bias.grad, 0 if dim == 0 else None),
                "gradient of the bias",
            )


column = partial(say, kinds="column-linear", check=linear_equals_one_device, dim=0)
row = partial(say, kinds="row-linear", check=linear_equals_one_device, dim=1)
column(
    "column",
    "Each rank has its part of the output; the input's gradient is all parts' sum.",
    [2, 4],
    output_cut=-1,
)
column("column_without_bias", "Without a bias it is the same.", [3], bias=False, output_cut=-1)
column(
    "column_gathered",
    "With gather_output all have all of it, and gradients not N times.",
    [3],
    gather_output=True,
)
how = {"input_cut": 0, "output_cut": -1, "sequence_parallel": True}
column(
    "column_sequence",
    "With sequence_parallel the input's rows are gathered, its gradient's scattered.",
    [2],
    **how,
)
row(
    "row",
    "The ranks' products, of parts of the input, are summed; the bias is added once.",
    [2, 4],
    input_cut=-1,
)
row("row_without_bias", "Without a bias it is the same.", [3], bias=False, input_cut=-1)
row(
    "row_of_a_whole_input",
    "With input_is_parallel=False each takes its part of it.",
    [3],
    input_is_parallel=False,
)
sentence = "With sequence_parallel the output's rows are scattered; the bias has all its gradient."
row("row_sequence", sentence, [2], input_cut=-1, output_cut=0, sequence_parallel=True)


# ---- pipeline schedules


def make_schedules(implementation):
    """-> functions (ranks, micro-batches, stages per rank) -> schedule; of ours, each by name."""
    if "name" not in names_of(implementation):
        return [implementation]
    names = getattr(implementation, "names", pipeline.SCHEDULES)
    return [partial(implementation, name) for name in names]


def schedules_of(
    make, sizes=((1, 1, 1), (2, 2, 1), (2, 5, 1), (4, 8, 1), (4, 4, 2), (3, 6, 3), (4, 2, 1))
):
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
            mine = {f"{stage}F{i}" for stage in range(rank, p * v, p) for i in range(m)}
            done = {kind: {a.replace(kind, "F") for a in actions if kind in a} for kind in "FBIW"}
            odd = (mine ^ done["F"]) | (mine ^ (done["B"] | done["I"]))
            check(
                not odd,
                f"{p} ranks, {m} micro-batches: rank {rank} has too few or too many of {sorted(odd)[:3]}",
            )
            check(
                not done["B"] & done["I"], f"backward of {sorted(done['B'] & done['I'])[:3]} twice"
            )
            check(done["W"] == done["I"], "an I without its W, or a W without I")
            check(len(actions) == len(set(actions)), "an action twice")


@claim("pipeline-schedule", 1)
def no_deadlock(make):
    """No rank waits for what can only come later, and nothing goes backward before it went forward."""
    for p, m, _v, schedule in schedules_of(make):
        try:
            pipeline.simulate(schedule)
        except ValueError as error:
            check(False, f"{p} ranks, {m} micro-batches: {str(error)[:100]}")


@claim("pipeline-schedule", 1)
def in_order(make):
    """Micro-batches go backward in their order, so that gradients add up as in a loop on one device."""
    for _, _, _, schedule in schedules_of(make):
        for actions in schedule:
            for stage, kind in itertools.product(
                {a.partition("F")[0] for a in actions if "F" in a}, "BIW"
            ):
                numbers = [
                    int(a.removeprefix(stage + kind)) for a in actions if a.startswith(stage + kind)
                ]
                check(
                    numbers == sorted(numbers),
                    f"stage {stage} takes micro-batches backward in the order {numbers}",
                )


@claim("pipeline-schedule", 1)
def bubble(make):
    """It idles no longer than GPipe, (p-1)/(m+p-1) of the time; or keeps fewer activations than all m."""
    for p, m, v, schedule in schedules_of(make, ((2, 4, 1), (4, 8, 1), (4, 16, 1))):
        times = pipeline.simulate(schedule)
        few = max(times.peak_activations) < m * v
        check(
            few or times.bubble_fraction <= (p - 1) / (m + p - 1) + 1e-9,
            f"idle for {times.bubble_fraction:.0%}",
        )


@claim("pipeline-schedule", 2)
def gradients(make):
    """Run, its gradients and its loss are bitwise those of micro-batch accumulation."""
    for p, m, v, schedule in schedules_of(make, ((2, 2, 1), (2, 5, 1), (2, 4, 2))):
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p * v)])
        mine = copy.deepcopy(plain)[pool.rank() :: p]
        inputs, targets = torch.randn(2, 2 * m, 6)
        loss = pipeline.Pipeline(
            list(mine), schedule, m, F.mse_loss, process_group=pool.group()
        ).step(inputs, targets)
        losses = [
            F.mse_loss(plain(x), y) / m
            for x, y in zip(inputs.chunk(m), targets.chunk(m), strict=True)
        ]
        for each in losses:
            each.backward()
        for ours, theirs in zip(
            mine.parameters(), plain[pool.rank() :: p].parameters(), strict=True
        ):
            same(ours.grad, theirs.grad, f"gradient with {m} micro-batches", exact=True)
        if loss is not None:
            check(abs(loss.item() - sum(losses).item()) < 1e-6, "the loss is not the mean")


# ---- GradScaler


def make_scaler(implementation, **arguments):
    return call(implementation, needed=arguments, process_group=pool.group(), device="cpu")


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
    scaler, (weight, optimizer), (plain, theirs) = (
        make(init_scale=2.0**16),
        one_weight(),
        one_weight(),
    )
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
    if not hasattr(scaler, "unscale_"):
        raise NotOffered("no unscale_")
    weight.grad = scaler.scale(torch.tensor([3.0, 4.0]))
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    check(norm.item() == 5.0, f"the norm is {norm.item()}, not 5")
    scaler.step(optimizer)
    check(
        (weight - torch.tensor([0.85, 0.8])).abs().max() < 1e-5, f"the weight is {weight.tolist()}"
    )


def overflow_on_the_last_rank(make):
    last = pool.rank() == pool.world_size() - 1
    for bad in (float("inf"), float("-inf"), float("nan")):
        scaler, (weight, optimizer) = make(init_scale=1024.0), one_weight()
        iterate(scaler, weight, optimizer, [1.0, bad if last else 1.0])
        check(
            weight.tolist() == [1.0, 1.0],
            f"rank {pool.rank()} made the step, of a gradient of {bad}",
        )
        check(
            scaler.get_scale() == 512.0,
            f"rank {pool.rank()} has a scale of {scaler.get_scale()}, not 512",
        )


overflows = partial(say, kinds="grad-scaler", check=overflow_on_the_last_rank)
overflows("skipped", "An inf or NaN in any gradient skips the step, and the scale is halved.", [1])
overflows(
    "shared_overflow",
    "One rank's overflow skips the step on all: gradients are parts of one model's.",
    [2],
)


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
        with error_from(" and ".join(calls)):
            for name in calls:
                getattr(scaler, name)(*[] if name == "update" else [optimizer])


@claim("grad-scaler", 1)
def resumed(make):
    """The state dict restores scale and count, and is PyTorch's."""
    first, (weight, optimizer) = make(init_scale=1024.0, growth_interval=3), one_weight()
    for _ in range(2):
        iterate(first, weight, optimizer, [1.0, 1.0])
    second = make(init_scale=2.0, growth_interval=7)
    second.load_state_dict(first.state_dict())
    iterate(second, weight, optimizer, [1.0, 1.0])
    check(
        second.get_scale() == 2048.0,
        f"the scale is {second.get_scale()} after the third good step, not 2048",
    )
    check(
        set(first.state_dict()) == set(torch.amp.GradScaler("cpu").state_dict()),
        f"keys {list(first.state_dict())}",
    )


# ---- LoRA


def make_lora(implementation, model):
    return implementation(model, r=4, lora_alpha=16, target_modules=["0", "2"])


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@claim("lora", 1)
def unchanged_at_first(make):
    """Before the first step the output is bitwise that of the model: B is zero."""
    model, x = make_model("plain"), make_batch(0, 0)
    expected = model(x)
    same(make(model)(x), expected, "output", exact=True)


@claim("lora", 1)
def dense_equivalent(make):
    """Trained, the model is that of the weights W + (α/r)BA, in outputs and in the gradients of A and B."""
    plain = make_model("plain", torch.float64)
    model = make(copy.deepcopy(plain)).double()
    factors = [
        torch.randn(factor.shape, dtype=torch.float64, requires_grad=True)
        for factor in trained(model)
    ]
    for ours, factor in zip(trained(model), factors, strict=True):
        ours.data = factor.detach().clone()
    dense, (A0, B0, A2, B2) = dict(plain.named_parameters()), factors
    dense["0.weight"] = dense["0.weight"].detach() + 16 / 4 * B0 @ A0
    dense["2.weight"] = dense["2.weight"].detach() + 16 / 4 * B2 @ A2
    x = make_batch(0, 0, torch.float64)
    output, expected = model(x), torch.func.functional_call(plain, dense, x)
    same(output, expected, "output")
    loss_of(output).backward()
    loss_of(expected).backward()
    for ours, factor in zip(trained(model), factors, strict=True):
        same(ours.grad, factor.grad, "gradient of A or B")


@claim("lora", 1)
def base_stays(make):
    """r(d + k) parameters train for each adapted matrix; the model's own stay, bitwise."""
    plain = make_model("plain")
    model = make(copy.deepcopy(plain))
    found, expected = (
        sum(parameter.numel() for parameter in trained(model)),
        4 * (6 + 33) + 4 * (33 + 17),
    )
    check(found == expected, f"{found} parameters train, not {expected}")
    optimizer = torch.optim.AdamW(trained(model), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(make_batch(0, step))).backward()
        optimizer.step()
    kept = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for name, parameter in plain.named_parameters():
        check(any(torch.equal(parameter, other) for other in kept), f"{name} has changed")


# ---- attention


def attend(implementation, q, k, v, causal=False, **options):
    """The output, (batch, heads, queries, head size)."""
    if implementation is F.scaled_dot_product_attention:  # a builtin, which has no signature
        return implementation(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1], **options
        )
    if causal:
        options["causal" if "causal" in names_of(implementation) else "is_causal"] = True
    return call(implementation, q, k, v, needed=options, enable_gqa=q.shape[1] != k.shape[1])


def queries_and_keys(S, Skv, heads=2, shared=2, size=8):
    shapes = (2, heads, S, size), (2, shared, Skv, size), (2, shared, Skv, size)
    generator = torch.Generator().manual_seed(S * Skv)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in shapes
    ]


def dense_weights(q, k, causal=False, scale=None):
    """softmax, zero where all is hidden: the last query sees all keys, the one before it all but the last."""
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    row, col = (
        torch.arange(q.shape[-2])[:, None] - q.shape[-2],
        torch.arange(k.shape[-2]) - k.shape[-2],
    )
    hidden = (col > row) & causal
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)


def gradients_equal(output, expected, q, k, v):
    same(output, expected, f"output for {q.shape[2]} queries and {k.shape[2]} keys")
    weight = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    ours, theirs = (torch.autograd.grad(x, (q, k, v), weight) for x in (output, expected))
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        same(a, b, f"gradient of {name}, for {q.shape[2]} queries and {k.shape[2]} keys")


def attends_as_dense(make, sizes, heads=2, shared=2, slopes=(0,), causal=False, **options):
    """With scores that differ by about `slope` from the first key to the last."""
    for (S, Skv), slope in itertools.product(sizes, slopes):
        q, k, v = queries_and_keys(S, Skv, heads, shared)
        k.data += torch.linspace(0, slope, Skv, dtype=torch.float64)[:, None]
        each_k, each_v = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
        weights = dense_weights(q, each_k, causal, **options)
        gradients_equal(make(q, k, v, causal, **options), weights @ each_v, q, k, v)


attention = partial(say, worlds=[1], kinds="attention", check=attends_as_dense)
sentence = "Output and gradients are those of dense attention, of any numbers of queries and keys."
attention("as_dense", sentence, sizes=[(1, 1), (7, 7), (300, 300), (5, 201), (201, 5)])
attention(
    "causal",
    "Causal, a query sees the keys up to its own.",
    sizes=[(1, 1), (7, 7), (300, 300)],
    causal=True,
)
sentence = (
    "Causal, with more keys than queries, as with a cache of keys, the last query sees all of them."
)
attention("causal_at_the_end", sentence, sizes=[(1, 7), (70, 201)], causal=True)
sentence = "Causal, with fewer keys than queries, the first queries see none: zero, and so are their gradients."
attention("sees_nothing", sentence, sizes=[(7, 1), (201, 70)], causal=True)
sentence = "Query heads 0 to G-1 share the first head of keys and values, and so on; their gradients add up there."
attention("shared_heads", sentence, sizes=[(70, 70)], heads=6, shared=2, causal=True)
attention(
    "one_shared_head",
    "All query heads may share one.",
    sizes=[(70, 70)],
    heads=6,
    shared=1,
    causal=True,
)
attention(
    "scale", "The scale is the one that is given, instead of 1/√D.", sizes=[(70, 70)], scale=0.7
)
sentence = (
    "Scores of thousands, whose exponentials no float has, are no matter, wherever the largest is."
)
attention("large_scores", sentence, sizes=[(3, 300)], slopes=(1000, -1000))


@claim("attention", 1)
def dropout(make):
    """Each weight is dropped with the probability asked for, the others grow as much; backward has forward's mask."""
    q, k, v = queries_and_keys(60, 32, size=32)
    torch.manual_seed(3)  # with v = 1 the output is the weights, and so tells the mask of this seed
    mask = make(
        q, k, torch.eye(32, dtype=torch.float64).expand_as(v), dropout_p=0.25
    ) / dense_weights(q, k)
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
    kept = (
        sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}.values())
        // 8
    )
    check(
        0 < kept < 600 * 600,
        f"{kept} elements are kept, where {4 * 600 * 600} are scores and {4 * 600 * 8} are q",
    )


# ---- activation checkpointing


def make_checkpoint(implementation, function, *args, **kwargs):
    return call(partial(implementation, **kwargs), function, *args, use_reentrant=False)


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def computes_alike(make, build, **how):
    """build(how a function is called) -> loss, leaves; bitwise against calling it plainly, by backward and by grad."""
    for step in range(3):
        results = []
        for way in (make, plainly):
            torch.manual_seed(step)
            loss, leaves = build(way, **how)
            if step:
                loss.backward()
            gradients = (
                [leaf.grad for leaf in leaves]
                if step
                else torch.autograd.grad(loss, leaves, allow_unused=True)
            )
            results.append(
                {"loss": loss, "next random number": torch.rand(3), **dict(enumerate(gradients))}
            )
        for what, plain in results[1].items():
            same(
                results[0][what],
                plain,
                what if isinstance(what, str) else f"gradient {what}",
                exact=True,
            )


alike = partial(claim, "checkpoint", of=computes_alike)


def layer(*more):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 6), nn.Tanh())


def layers(how, drop=0.0, autocast=False):
    x, layers = torch.randn(4, 6, requires_grad=True), [layer(nn.Dropout(drop)) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = F.dropout(how(layers[1], F.dropout(how(layers[0], x), drop)), drop)
    return loss_of(how(layers[2], y.float())), [x, *nn.ModuleList(layers).parameters()]


of_layers = partial(say, worlds=[1], kinds="checkpoint", check=computes_alike, build=layers)
of_layers(
    "recomputed", "Loss and gradients are bitwise those of calling the function, layer after layer."
)
of_layers(
    "random_numbers",
    "Dropout drops the same again; what is drawn afterwards is what would have been.",
    drop=0.5,
)
of_layers(
    "autocast_again",
    "What ran under autocast runs under it again, though backward does not.",
    autocast=True,
)


@alike(1)
def closures(how):
    """Gradients reach what the function uses without getting it as an argument."""
    weight, module = torch.randn(6, 6, requires_grad=True), layer()
    hidden, tokens = torch.tanh(weight), torch.randn(4, 6)  # tokens want no gradient
    return loss_of(how(lambda x: torch.tanh(module(x) @ hidden), tokens)), [
        weight,
        *module.parameters(),
    ]


@alike(1)
def any_structure(how):
    """Inputs and outputs may be nested, named, without gradient, or no tensors."""

    def function(pair, scale=1.0, *, more):
        return {
            "y": torch.tanh(pair[0] * pair[1]["b"]) * scale + more[0],
            "n": (more[1], pair[0].argmax()),
        }

    a, b, c = (torch.randn(5, requires_grad=True) for _ in range(3))
    output = how(function, (a, {"b": b}), 2.0, more=[c, "text"])
    check(output["n"][0] == "text", "an output that is no tensor is lost")
    return loss_of(output["y"]) * output["n"][1], [a, b, c]


@alike(1)
def nested(how):
    """A checkpoint may be in another, and a layer may be called twice."""
    x, first, second = torch.randn(4, 6, requires_grad=True), layer(nn.Dropout(0.5)), layer()
    inner = lambda x: how(first, torch.sin(how(second, x))) + x  # noqa: E731
    y = how(lambda x: torch.cos(how(inner, inner(x))), x)
    return loss_of(y), [x, *first.parameters(), *second.parameters()]


@alike(3)
def collectives_again(how):
    """What communicates in forward does so again, in the same order on all ranks."""
    x, weights = torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, 6) * (1 + pool.rank())

    def function(x):
        for weight in weights.requires_grad_():
            x = torch.tanh(all_reduced(x @ weight, group=pool.group()))
        return x

    return loss_of(how(function, how(function, x))), [x, weights]


@alike(1)
def again(how):
    """Backward may come twice (retain_graph), for one part of the leaves after the other, and through backward."""
    x, module = torch.randn(4, 6, requires_grad=True), layer(nn.Dropout(0.5))
    loss = loss_of(how(module, how(torch.sin, x)))
    gradients = torch.autograd.grad(loss, module[0].weight, retain_graph=True)
    gradients += torch.autograd.grad(loss, [x, module[0].weight], create_graph=True)
    return loss + sum(map(loss_of, gradients)), [x, *module.parameters()]


@claim("checkpoint", 1)
def forgotten(make):
    """Nothing of the inside is in memory between forward and backward, nor after it; the function runs twice in all."""
    inside, x = [], torch.randn(4, 6, requires_grad=True)

    def function(x):
        y = torch.tanh(x)
        z = torch.sigmoid(y)
        inside.append([weakref.ref(tensor.untyped_storage()) for tensor in (y, z)])
        return torch.exp(z * y).sin()

    def check_forgotten(when):
        alive = sum(reference() is not None for tensors in inside for reference in tensors)
        check(
            not alive, f"{alive} of {2 * len(inside)} tensors of the inside are alive after {when}"
        )

    output = make(function, x)
    check_forgotten("forward")
    output.sum().backward()
    check_forgotten("backward")
    check(len(inside) == 2, f"the function ran {len(inside)} times")
    with torch.no_grad():
        make(function, x)
    check(len(inside) == 3, "under no_grad it did not run once")


@claim("checkpoint", 1)
def differs(make):
    """A recomputation that saves fewer tensors, or others in shape or dtype, is an error, as is a changed input."""
    changes = {
        "number": lambda x, again: x.sin() if again else x.sin().cos().tan(),
        "shape": lambda x, again: (x if again else torch.cat([x, x])).sin().sum(),
        "dtype": lambda x, again: (x.double() if again else x).sin().sum(),
        "input": lambda x, again: x.sin(),
    }
    for what, function in changes.items():
        x, runs = torch.randn(4, requires_grad=True) * 1, itertools.count()
        y = make(lambda x, function=function, runs=runs: function(x, next(runs) > 0), x)
        if what == "input":
            x.mul_(2)
        with error_from(f"a changed {what}"):
            y.sum().backward()


# ---- all-reduce


def all_reduce(implementation, tensor, group=None):
    names = {"process_group", "group"} & set(names_of(implementation))
    if group and not names:
        raise NotOffered("no argument process_group")
    implementation(tensor, **dict.fromkeys(names, group or pool.group()))
    return tensor


def numbers_of(rank, shape, dtype=torch.float64):
    return (
        100 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    ).to(dtype)


def total_of(ranks, *what):
    return sum(numbers_of(r, *what) for r in ranks)


@claim("all-reduce", 1, 2, 3, 4)
def summed(make):
    """Every rank ends with the sum of all ranks' tensors, of any shape: those that N does not divide, empty, scalar."""
    shapes = [(12,), (7,), (1,), (), (0,), (5, 0), (2, 3, 5), (10_007,)]
    shapes += [(2**21 + 1,)] * (pool.world_size() == 2)  # in no buffer
    for shape, dtype in [
        *((shape, torch.float64) for shape in shapes),
        ((101,), torch.int64),
        ((101,), torch.int32),
    ]:
        total = total_of(range(pool.world_size()), shape, dtype)
        same(
            make(numbers_of(pool.rank(), shape, dtype)),
            total,
            f"the sum of shape {shape} in {dtype}",
        )


@claim("all-reduce", 2, 3)
def strided(make):
    """A tensor that is not contiguous becomes the sum, all of it, and what lies between its elements stays."""
    for view in (torch.t, lambda x: x[:, 1], lambda x: x[::2, 1::2]):
        mine, before = (numbers_of(pool.rank(), (6, 8)) for _ in range(2))
        make(view(mine))
        view(before).copy_(view(total_of(range(pool.world_size()), (6, 8))))
        same(mine, before, "a strided tensor's whole memory")


@claim("all-reduce", 2, 3, 4)
def same_bits(make):
    """In float32 all ranks end with the same bits; two, with those of the one's plus the other's."""
    same_on_all(ours := make(numbers_of(pool.rank(), (1001,), torch.float32)), "their sums")
    if pool.world_size() == 2:
        same(ours, total_of(range(2), (1001,), torch.float32), "the sum", exact=True)


@claim("all-reduce", 4)
def all_reduces_apart(make):
    """Two groups side by side never meet, whatever their members' order."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 2]), dist.new_group([3, 1])]
    for shape in ((5,), (10_007,)):
        same(
            make(numbers_of(rank, shape), groups[rank % 2]),
            total_of((rank % 2, rank % 2 + 2), shape),
            "the sum",
        )


@claim("all-reduce", 2, 3)
def reused(make):
    """The tensor may be overwritten right after: nothing of it is still to be sent."""
    shape, ranks = (2**21 + 1,), range(pool.world_size())  # 16 MB: takes longer than the next line
    for call in range(2):
        total, mine = (
            total_of(ranks, shape) + call * len(ranks),
            numbers_of(pool.rank(), shape) + call,
        )
        make(mine)
        if (pool.rank() + call) % 2 == 0:
            mine[-1] = torch.nan  # at once, and what would be sent last
        else:
            same(mine, total, f"the sum of call {call + 1}")


KINDS = {  # what calls an implementation; ours, which runs when no option names another; PyTorch's own (lora: peft's)
    "ddp": (
        partial(Trainer, "ddp"),
        "ddp:DistributedDataParallel",
        "torch.nn.parallel:DistributedDataParallel",
    ),
    "zero1": (
        partial(Trainer, "zero1"),
        "zero:Zero1",
        "torch.distributed.optim:ZeroRedundancyOptimizer",
    ),
    "zero2": (partial(Trainer, "zero2"), "zero:Zero2", None),
    "zero3": (partial(Trainer, "zero3"), "zero:Zero3", None),
    "fsdp": (partial(Trainer, "fsdp"), "fsdp:fully_shard", "torch.distributed.fsdp:fully_shard"),
    "column-linear": (make_linear, "tensor_parallel:ColumnParallelLinear", "pytorchs:Column"),
    "row-linear": (make_linear, "tensor_parallel:RowParallelLinear", "pytorchs:Row"),
    "pipeline-schedule": (make_schedules, "pipeline:build_schedule", "pytorchs:build_schedule"),
    "grad-scaler": (make_scaler, "amp:GradScaler", "torch.amp:GradScaler"),
    "lora": (make_lora, "lora:inject_lora", "pytorchs:inject_lora"),
    "attention": (
        attend,
        "flash_attention:flash_attention",
        "torch.nn.functional:scaled_dot_product_attention",
    ),
    "checkpoint": (
        make_checkpoint,
        "activation_checkpoint:checkpoint",
        "torch.utils.checkpoint:checkpoint",
    ),
    "all-reduce": (all_reduce, "collectives:ring_all_reduce", "torch.distributed:all_reduce"),
}
OURS = {kind: ours for kind, (_, ours, _) in KINDS.items()}
PYTORCHS = {kind: theirs for kind, (_, _, theirs) in KINDS.items() if theirs}

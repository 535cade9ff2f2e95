"""The claims that --ddp, --zero1, --zero2, --zero3 and --fsdp share: training equals one device."""

import copy
import sys
from contextlib import contextmanager, nullcontext
from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import HOW, OPTIMIZERS, Blocks, loss_of, make_batch, make_model
from torch.distributed.device_mesh import DeviceMesh

from claims.registry import (
    NotOffered,
    call,
    check,
    claim,
    names_of,
    same,
    same_on_all,
    say,
)


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

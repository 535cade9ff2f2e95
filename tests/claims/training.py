"""The claims that --ddp, --zero1, --zero2, --zero3 and --fsdp share: training equals one device."""

import copy
import sys
from contextlib import contextmanager
from functools import partial

import environment
import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import HOW, OPTIMIZERS, Blocks, loss_of, make_batch, make_model
from torch.distributed.device_mesh import DeviceMesh

from claims.registry import NotOffered, call, check, claim, names_of, same, same_on_all, say

ZERO = "zero1 zero2 zero3"
SHARDED = f"{ZERO} fsdp"
ALL = f"ddp {SHARDED}"


class Trainer:
    """A module in training, by DDP, by a sharded optimizer or by fully_shard."""

    def __init__(self, kind, implementation, module, optimizer="sgd", group=None, **options):
        names = names_of(implementation)
        # PyTorch's ZeRO-1 steps on gradients that DDP has averaged. Ours averages them itself.
        self.averages = kind in ("zero2", "zero3") or (kind == "zero1" and "module" in names)
        if group and not (self.averages or {"process_group", "mesh"} & set(names)):
            raise NotOffered("no argument process_group")
        self.kind = kind
        self.module = module
        self.model = module  # what is called in forward
        self.file = sys.modules[getattr(implementation, "func", implementation).__module__]
        self.units = []  # what fsdp wraps, but for the root

        group = group or dist.group.WORLD
        takes_group = self.averages or "process_group" in names
        where = {"process_group": group} if takes_group else {}
        make_optimizer = OPTIMIZERS[optimizer]
        if kind == "ddp":
            self.model = call(implementation, module, process_group=group, **options)
        elif kind == "fsdp":
            where = where or {"mesh": DeviceMesh.from_group(group, environment.DEVICE_TYPE)}
            if "mesh" in options:  # for hybrid sharding
                where = {"needed": {"mesh": options["mesh"]}}
            self.shard(partial(call, implementation, **where))
        elif not self.averages:
            self.model = nn.parallel.DistributedDataParallel(module, process_group=group, **options)

        if kind in ("ddp", "fsdp"):
            self.optimizer = make_optimizer(self.model.parameters())
        else:
            trained = module if self.averages else module.parameters()
            arguments = where | make_optimizer.keywords
            self.optimizer = implementation(trained, make_optimizer.func, **arguments)

    def shard(self, fully_shard):
        """Units are every second child. There are none if children are tied, or used by name."""
        if isinstance(self.module, nn.Sequential):
            children = list(self.module)[::2]
            self.units = [child for child in children if list(child.parameters())]
        for unit in self.units:
            fully_shard(unit)
        self.model = fully_shard(self.module)

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
        for batch in batches:
            if finish or sync == "each" or batch is batches[-1]:
                loss(self.model(batch)).backward()
            else:
                with self.no_sync():
                    loss(self.model(batch)).backward()
        if finish:
            finish()

    def clip_grad_norm_(self, max_norm):
        try:
            return self.find("clip_grad_norm_")(max_norm)
        except NotOffered:
            norm = nn.utils.clip_grad_norm_(list(self.model.parameters()), max_norm)
            return full(norm)

    def step(self, batches):
        self.optimizer.zero_grad()
        self.backward(batches)
        self.optimizer.step()

    def whole(self):
        """Return the unsharded parameters, by name."""
        found = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        is_torchs = any(hasattr(parameter, "full_tensor") for parameter in found.values())
        if self.kind not in ("zero3", "fsdp") or is_torchs:
            return {name: full(parameter) for name, parameter in found.items()}
        state = self.find("full_state_dict" if self.kind == "fsdp" else "module_state_dict")()
        return {name: state[name] for name in found}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_device(plain, batches, loss=lambda model, batch: loss_of(model(batch))):
    """Add the gradients in rank order, then divide. batches[rank] are the rank's micro-batches."""
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


def do_nothing(trainer):
    pass


def trains_as_one_device(
    make,
    model="plain",
    optimizer="sgd",
    exact=False,
    micro=1,
    sync="last",
    start=0,
    before=do_nothing,
    after=do_nothing,
    **options,
):
    """Train for four steps, with other data on each rank in each step, and compare after each step.

    `before(trainer)` and `after(trainer)` are called around the optimizer's step. `trainer.plain`
    is the model on one device, `trainer.plain_optimizer` its optimizer.
    """
    ranks = dist.get_process_group_ranks(options.get("group", pool.group()))
    rank = dist.get_rank()
    dtype = torch.float32 if exact else torch.float64
    plain = make_model(model) if isinstance(model, str) else model()
    plain = plain.to(dtype)
    module = copy.deepcopy(plain)
    for parameter in module.parameters():
        parameter.data += start * rank  # rank 0's are those that count
    trainer = make(module, optimizer, **options)
    trainer.plain = plain
    trainer.plain_optimizer = OPTIMIZERS[optimizer](plain.parameters())
    for step in range(4):
        batches = {r: [make_batch(r, 10 * step + i, dtype) for i in range(micro)] for r in ranks}
        one_device(plain, batches.values())
        trainer.optimizer.zero_grad()
        trainer.backward(batches[rank], sync=sync)
        before(trainer)
        trainer.optimizer.step()
        trainer.plain_optimizer.step()
        after(trainer)
        compare(trainer, step + 1, exact)


def compare(trainer, step, exact):
    ours = trainer.whole()
    plain = dict(trainer.plain.named_parameters())
    check(ours.keys() == plain.keys(), f"parameters are {list(ours)}")
    for name, parameter in plain.items():
        same(ours.get(name), parameter, f"{name} after step {step}", exact)
        if trainer.kind == "ddp":
            grad = trainer.module.get_parameter(name).grad
            if grad is not None and parameter.grad is not None:
                same(grad, parameter.grad, f"gradient of {name} in step {step}", exact)


# ---- the claims


class Uses(nn.Module):
    """Never uses `nobody`. If `ranks_differ`, the data decide which of two layers a rank uses."""

    def __init__(self, ranks_differ):
        super().__init__()
        torch.manual_seed(1)  # on every rank
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.nobody = nn.Linear(2, 2)
        self.ranks_differ = ranks_differ

    def forward(self, x):
        uses_first = self.ranks_differ and x[0, 0] > 0
        layer = self.first if uses_first else self.second
        return self.last(layer(x))


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


def trains(name, sentence, worlds, kinds, **how):
    say(name, sentence, worlds, kinds, trains_as_one_device, **how)


trains(
    "mean_gradient",
    "A step of SGD moves the parameters by the mean of the ranks' gradients.",
    [2, 3],
    ALL,
)
trains("momentum", "SGD with momentum trains as on one device.", [3], ALL, optimizer="momentum")
trains("adamw", "AdamW trains as on one device.", [3], ALL, optimizer="adamw")
trains(
    "bitwise",
    "Two ranks train bitwise as one device does, in float32.",
    [2],
    ALL,
    optimizer="adamw",
    exact=True,
    about="property",
)
trains(
    "bitwise_at_four",
    "Four ranks train bitwise as one device does, because gradients are added in rank order.",
    [4],
    SHARDED,
    exact=True,
    about="property",
)
trains(
    "start_of_rank_0",
    "Ranks that were seeded differently start from the weights of rank 0.",
    [3],
    f"ddp {ZERO}",
    start=1,
)
trains("tied", "A parameter that two layers share stays one parameter.", [2], ALL, model="tied")
trains("frozen", "Frozen parameters do not change, and the others train.", [2], ALL, model="frozen")
trains(
    "odd_shapes",
    "Scalar, empty, strided and one-element parameters train.",
    [3],
    ALL,
    model="odd",
)
trains(
    "called_twice",
    "A layer that forward calls twice trains.",
    [2],
    ALL,
    model=partial(Twice, "plainly"),
)
trains(
    "checkpointed",
    "A layer that backward computes again trains.",
    [2],
    ALL,
    model=partial(Twice, "checkpointed"),
)
trains(
    "accumulation",
    "Gradients of all micro-batches count if all but the last run under no_sync.",
    [2, 3],
    ALL,
    micro=3,
)
trains(
    "accumulation_synchronised",
    "Gradients of all micro-batches count if each is synchronised.",
    [2],
    ALL,
    micro=3,
    sync="each",
)
UNUSED = {"optimizer": "adamw", "find_unused_parameters": True}
trains(
    "unused",
    "A parameter that no rank uses does not change, weight decay or not.",
    [2],
    ALL,
    model=partial(Uses, False),
    **UNUSED,
)
trains(
    "unused_on_one_rank",
    "A parameter that some ranks use gets the mean over all ranks, and no rank hangs.",
    [3],
    "ddp zero1 zero2",
    model=partial(Uses, True),
    **UNUSED,
)
trains(
    "evaluation",
    "An evaluation between backward and step, or after it, uses the weights of that moment.",
    [2],
    ALL,
    before=evaluate,
    after=evaluate,
)
trains(
    "clipping",
    "Clipping uses the norm of the whole gradient on every rank.",
    [3],
    SHARDED,
    before=clip,
)


@claim(ALL, 4)
def replicas(make):
    """All ranks hold the same bits after each step, in float32."""
    trainer = make(make_model("plain"), "adamw")
    for step in range(3):
        trainer.step([make_batch(pool.rank(), step)])
        flat = torch.cat([p.detach().flatten() for p in trainer.whole().values()])
        same_on_all(flat, f"parameters after step {step + 1}")


@claim(ALL, 4)
def groups_apart(make):
    """Two process groups train side by side and do not mix."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    side = dist.get_rank() % 2
    model = partial(make_model, "plain", seed=side)
    trains_as_one_device(make, model, group=groups[side])

"""The claims that --ddp, --zero1, --zero2, --zero3 and --fsdp share: training equals one device."""

import copy
import sys
from contextlib import contextmanager, nullcontext
from functools import partial

import environment
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
    precision,
    same,
    same_on_all,
    say,
    say_in_float64,
)

ZERO = "zero1 zero2 zero3"
SHARDED = f"{ZERO} fsdp"
ALL = f"ddp {SHARDED}"


class Trainer:
    """A module in training, by DDP, by a sharded optimizer or by fully_shard."""

    def __init__(self, kind, implementation, module, optimizer="sgd", group=None, **options):
        names = names_of(implementation)
        # PyTorch's ZeRO-1 steps on gradients that DDP has averaged. Ours averages them itself.
        self.averages = kind in ("zero2", "zero3") or (kind == "zero1" and "module" in names)
        if group and not {"process_group", "mesh"} & set(names):
            raise NotOffered("no argument process_group")
        self.kind = kind
        self.module = self.model = module  # the model is what is called in forward
        self.names = list(dict(module.named_parameters()))
        self.file = sys.modules[getattr(implementation, "func", implementation).__module__]
        self.units = []  # what fsdp wraps, but for the root

        where = {"process_group": group or dist.group.WORLD}
        make_optimizer = OPTIMIZERS[optimizer]
        if kind == "ddp":
            self.model = call(implementation, module, **where, **options)
        elif kind == "fsdp":
            self.model = self.shard(implementation, where, **options)
        elif not self.averages:
            self.model = nn.parallel.DistributedDataParallel(module, **where, **options)

        if kind in ("ddp", "fsdp"):
            self.optimizer = make_optimizer(self.model.parameters())
        else:
            trained = module if self.averages else module.parameters()
            arguments = trained, make_optimizer.func
            made = call(implementation, *arguments, needed=make_optimizer.keywords, **where)
            if not isinstance(made, tuple):
                made = getattr(made, "model", self.model), made
            self.model, self.optimizer = made

    def shard(self, implementation, where, mesh=None, **_):
        """Units are every second child. There are none if children are tied, or used by name."""
        if "process_group" not in names_of(implementation):
            group = where["process_group"]
            where = {"mesh": DeviceMesh.from_group(group, environment.DEVICE_TYPE)}
        if mesh:  # for hybrid sharding
            where = {"needed": {"mesh": mesh}}
        children = dict(self.module.named_children())
        units = list(children)[::2] if isinstance(self.module, nn.Sequential) else []
        for name in units:
            if list(children[name].parameters()):
                unit = call(implementation, children[name], **where)
                setattr(self.module, name, unit)
                self.units.append(unit)
        return call(implementation, self.module, **where)

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
        for batch in batches:
            is_synchronised = sync == "each" or batch is batches[-1]
            with nullcontext() if is_synchronised else self.no_sync():
                value = loss(self.model(batch))
                for owner in (self.model, self.optimizer):
                    if hasattr(owner, "backward"):
                        owner.backward(value)
                        break
                else:
                    value.backward()
            finish = getattr(self.model, "finish_gradient_synchronization", None)
            if finish and is_synchronised:
                finish()

    def clip_grad_norm_(self, max_norm):
        """Return the norm, or None if it is known in the step. DTensors and DDP rely on torch's."""
        parameters = list(self.model.parameters())
        averaged_by_ddp = self.kind == "zero1" and not self.averages
        if averaged_by_ddp or any(map(is_dtensor, parameters)):
            return full(nn.utils.clip_grad_norm_(parameters, max_norm))
        return self.find("clip_grad_norm_")(max_norm)

    def step(self, batches):
        self.optimizer.zero_grad()
        self.backward(batches)
        self.optimizer.step()

    def plain_names(self, tensors):
        """Without what wrappers add to the names, in front or between."""
        known = set(".".join(self.names).split("."))
        plain = {}
        for name, tensor in tensors.items():
            parts = [part for part in name.split(".") if part in known]
            plain[".".join(parts)] = tensor
        return plain

    def whole(self):
        """Return the unsharded parameters, by name."""
        found = self.plain_names(dict(self.model.named_parameters()))
        if self.kind not in ("zero3", "fsdp") or any(map(is_dtensor, found.values())):
            return {name: full(parameter) for name, parameter in found.items()}
        save = self.find("full_state_dict" if self.kind == "fsdp" else "module_state_dict")
        state = self.plain_names(save())
        return {name: state.get(name) for name in self.names}

    def gradients(self):
        """Return the whole gradients that it gives, by name."""
        parameters = self.plain_names(dict(self.model.named_parameters()))
        is_whole = self.kind == "ddp" or (self.kind == "zero1" and not self.averages)
        if is_whole or any(map(is_dtensor, parameters.values())):
            trained = {name: p for name, p in parameters.items() if p.grad is not None}
            return {name: full(parameter.grad) for name, parameter in trained.items()}
        try:
            return self.plain_names(self.find("full_gradients")())
        except NotOffered:
            return {}


def is_dtensor(tensor):
    return hasattr(tensor, "full_tensor")


def own_batch(step):
    return make_batch(pool.rank(), step)


def full(tensor):
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


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


def beside_one_device(make, model, optimizer, dtype, start=0, **options):
    """Return a trainer with `plain`, the model on one device, and its `plain_optimizer`.

    Ranks begin `start` times their number apart.
    """
    plain = make_model(model) if isinstance(model, str) else model()
    plain = plain.to(dtype)
    module = copy.deepcopy(plain)
    for parameter in module.parameters():
        parameter.data += start * dist.get_rank()  # rank 0's are those that count
    trainer = make(module, optimizer, **options)
    trainer.plain = plain
    make_optimizer = OPTIMIZERS.get(optimizer, optimizer)
    trainer.plain_optimizer = make_optimizer(plain.parameters())
    return trainer


def trains_as_one_device(
    make,
    model="plain",
    optimizer="sgd",
    exact=False,
    micro=1,
    sync="last",
    before=do_nothing,
    after=do_nothing,
    **options,
):
    """Compare each of four steps. before(trainer) and after(trainer) are called around step()."""
    dtype = torch.float32 if exact else precision()
    trainer = beside_one_device(make, model, optimizer, dtype, **options)
    ranks = dist.get_process_group_ranks(options.get("group", pool.group()))
    for step in range(4):
        steps = range(10 * step, 10 * step + micro)
        batches = {rank: [make_batch(rank, each, dtype) for each in steps] for rank in ranks}
        one_device(trainer.plain, batches.values())
        trainer.optimizer.zero_grad()
        trainer.backward(batches[dist.get_rank()], sync=sync)
        compare_gradients(trainer, f"in step {step + 1}", exact)
        before(trainer)
        trainer.optimizer.step()
        trainer.plain_optimizer.step()
        after(trainer)
        compare(trainer, f"after step {step + 1}", exact)


def compare_gradients(trainer, when, exact):
    ours = trainer.gradients()
    for name, plain in trainer.plain.named_parameters():
        if name in ours and plain.grad is not None:
            same(ours[name], plain.grad, f"gradient of {name} {when}", exact)


def compare(trainer, when, exact):
    ours = trainer.whole()
    for name, plain in trainer.plain.named_parameters():
        same(ours.get(name), plain, f"{name} {when}", exact)


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
    x = make_batch(0, 99, precision())
    with torch.no_grad():
        same(trainer.model(x), output_of_plain(trainer, x), "output of an evaluation")


def output_of_plain(trainer, x):
    return trainer.plain(x)


def clip(trainer):
    norm = nn.utils.clip_grad_norm_(trainer.plain.parameters(), 0.01)
    check(norm > 0.01, "nothing to clip")
    found = trainer.clip_grad_norm_(0.01)
    if found is not None:
        same(torch.as_tensor(found, dtype=norm.dtype), norm, "norm")


def trains(name, sentence, worlds, kinds, **how):
    say(name, sentence, worlds, kinds, trains_as_one_device, **how)


trains(
    "mean_gradient",
    "A step of SGD moves the parameters by the mean of the ranks' gradients.",
    [2, 3],
    ALL,
)
say_in_float64(ALL, "mean_gradient")
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
may_refuse = partial(trains, may_refuse=True)
may_refuse("tied", "A parameter that two layers share stays one parameter.", [2], ALL, model="tied")
may_refuse(
    "frozen", "Frozen parameters do not change, and the others train.", [2], ALL, model="frozen"
)
may_refuse(
    "odd_shapes",
    "Scalar, empty, strided and one-element parameters train.",
    [3],
    ALL,
    model="odd",
)
may_refuse(
    "called_twice",
    "A layer that forward calls twice trains.",
    [2],
    ALL,
    model=partial(Twice, "plainly"),
)
may_refuse(
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
may_refuse(
    "unused",
    "A parameter that no rank uses does not change, weight decay or not.",
    [2],
    ALL,
    model=partial(Uses, False),
    **UNUSED,
)
may_refuse(
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


def stay_replicas(trainer):
    for step in range(3):
        trainer.step([own_batch(step)])
        flat = torch.cat([p.detach().flatten() for p in trainer.whole().values()])
        same_on_all(flat, f"parameters after step {step + 1}")


@claim(ALL, 4)
def replicas(make):
    """All ranks hold the same bits after each step, in float32."""
    stay_replicas(make(make_model("plain"), "adamw"))


def trains_in_groups(make, make_module, **how):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    side = dist.get_rank() % 2
    model = partial(make_module, seed=side)
    trains_as_one_device(make, model, group=groups[side], **how)


@claim(ALL, 4)
def groups_apart(make):
    """Two process groups train side by side and do not mix."""
    trains_in_groups(make, partial(make_model, "plain"))


# ---- a loss over tokens, of which ranks and micro-batches have unequally many


def trains_on_tokens(make, tokens, padded=True):
    """tokens[rank][micro-batch] rows have a target. If padded, the rows after them are masked.

    The loss is summed over them, and divided by the number of all ranks and micro-batches. The
    implementation averages over N ranks, so a rank's loss is N times its share.
    """
    trainer = beside_one_device(make, "plain", "momentum", precision())
    own = tokens[dist.get_rank()]
    total = sum(map(sum, tokens))

    def loss_of_rank(output):
        squares = output[: next(counts)].square()
        return len(tokens) / total * squares.sum()

    for step in range(3):
        trainer.plain_optimizer.zero_grad()
        one_device_on_tokens(trainer.plain, tokens, step)
        counts = iter(own)
        sizes = [5] * len(own) if padded else own
        trainer.optimizer.zero_grad()
        trainer.backward(rows_with_targets(dist.get_rank(), step, sizes), loss_of_rank)
        compare_gradients(trainer, f"in step {step + 1}", exact=False)
        trainer.optimizer.step()
        trainer.plain_optimizer.step()
        compare(trainer, f"after step {step + 1}", exact=False)


def one_device_on_tokens(plain, tokens, step):
    """All rows in one batch."""
    rows = [each for r, n in enumerate(tokens) for each in rows_with_targets(r, step, n)]
    output = plain(torch.cat(rows))
    squares = output.square()
    (squares.sum() / sum(map(sum, tokens))).backward()


def rows_with_targets(rank, step, counts):
    """Return the first rows of each of a rank's micro-batches."""
    batches = [make_batch(rank, 10 * step + micro, precision()) for micro in range(len(counts))]
    return [batch[:count] for batch, count in zip(batches, counts, strict=True)]


on_tokens = partial(say, check=trains_on_tokens, kinds=ALL)
on_tokens(
    "unequal_tokens",
    "Ranks with 1, 3 and 5 tokens train as one device on all 9, if the loss is divided by 9 / 3.",
    [3],
    tokens=[[1], [3], [5]],
    padded=False,
)
on_tokens(
    "a_rank_without_tokens",
    "A rank whose tokens are all masked trains as the others do, and counts as a rank.",
    [3],
    tokens=[[1], [3], [0]],
)
on_tokens(
    "unequal_micro_batches",
    "Micro-batches with unequally many tokens train as one batch, if the loss is divided once.",
    [2],
    tokens=[[1, 0, 4], [2, 5, 0]],
)

"""An implementation of --train-step is called as function(model, optimizer, micro_batches).

It is one step of a trainer, called on every rank of the default group. `micro_batches` is a list
of this rank's (inputs, targets), and model(inputs) are logits (tokens, classes). The loss is the
mean cross entropy over the tokens of all ranks and all micro-batches; a target of -100 is masked.
Each call trains the same plain module, which is in train mode. A function that wraps it keeps the
wrapper. The claims about them pass max_norm=, scheduler=, which has a step() for each step of the
optimizer, and scaler=, a torch.amp.GradScaler. It may return the loss of the whole batch.
"""

import copy
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import chain

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shared import OPTIMIZERS, make_batch, make_model
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

import ddp
from claims.registry import (
    NotOffered,
    add_kind,
    call,
    check,
    precision,
    same,
    same_on_all,
    say,
    say_in_float64,
)

wrap = lru_cache(maxsize=1)(ddp.DistributedDataParallel)


def train_step(model, optimizer, micro_batches, max_norm=None, scheduler=None, scaler=None):
    """Ours: the lines of docs/training_loops.md for ddp."""
    model = wrap(model)
    scaler = scaler or GradScaler("cpu", enabled=False)
    count = sum((y != -100).sum() for _, y in micro_batches)
    dist.all_reduce(count)
    count = count.clamp(min=1)
    total = torch.zeros(())
    for number, (x, y) in enumerate(micro_batches, 1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            loss = F.cross_entropy(model(x), y, reduction="sum") / count
            scaler.scale(loss * dist.get_world_size()).backward()
        total = total + loss.detach()
    scaler.unscale_(optimizer)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    dist.all_reduce(total)
    return total


def make_step(implementation, model, optimizer, micro_batches, **options):
    return call(implementation, model, optimizer, micro_batches, needed=options)


add_kind(
    "train-step",
    called=__doc__,
    make=make_step,
    ours="claims.train_step:train_step",
)


def micro_batches_of(rank, step, tokens, padded):
    """Return (inputs, targets) for each number of tokens: 5 rows, if others are masked."""
    found = []
    for micro, count in enumerate(tokens):
        x = make_batch(rank, 10 * step + micro, precision())
        y = (torch.arange(5) + rank + step) % 3
        y[count:] = -100
        rows = 5 if padded else count
        found.append((x[:rows], y[:rows]))
    return found


class Side:
    """A model in training, with what its step gets: on one device, or by the implementation."""

    def __init__(self, model, optimizer, options):
        self.model = model
        self.optimizer = OPTIMIZERS[optimizer](model.parameters())
        self.options = {}
        for name, value in options.items():
            is_for_all = name == "max_norm"
            self.options[name] = value if is_for_all else value(self.optimizer)

    def step_on_one_device(self, batches):
        """On all rows at once."""
        x, y = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        loss = F.cross_entropy(self.model(x), y, reduction="sum") / (y != -100).sum().clamp(min=1)
        scaler = self.options.get("scaler") or GradScaler("cpu", enabled=False)
        self.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        if "max_norm" in self.options:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options["max_norm"])
            check(not norm <= self.options["max_norm"], "nothing to clip")
        scaler.step(self.optimizer)
        scaler.update()
        if "scheduler" in self.options:
            self.options["scheduler"].step()
        return loss.detach()


def do_nothing(model, plain):
    pass


def trains_as_one_device(
    make, tokens, optimizer="momentum", padded=True, spoil=None, between=do_nothing, **options
):
    """tokens[rank][micro-batch] rows have a target. In step `spoil` rank 1 has an infinite input.

    Return the losses that it returned, and those of one device.
    """
    plain = make_model("plain", precision())
    ours = Side(copy.deepcopy(plain), optimizer, options)
    theirs = Side(plain, optimizer, options)
    tokens = tokens[: pool.world_size()]
    losses = []
    for step in range(4):
        batches = [micro_batches_of(r, step, counts, padded) for r, counts in enumerate(tokens)]
        if step == spoil:
            batches[1][0][0][0] = torch.inf
        mine = batches[pool.rank()]
        loss = make(ours.model, ours.optimizer, mine, **ours.options)
        expected = theirs.step_on_one_device([*chain(*batches)])
        losses.append((loss, expected))
        for name, whole in plain.named_parameters():
            same(ours.model.get_parameter(name), whole, f"{name} after step {step + 1}")
        if "scaler" in options:
            scales = [side.options["scaler"].get_scale() for side in (ours, theirs)]
            check(scales[0] == scales[1], f"the scale is {scales[0]}, not {scales[1]}")
        between(ours.model, plain)
    flat = nn.utils.parameters_to_vector(ours.model.parameters())
    same_on_all(flat, "parameters")
    return losses


def evaluate_alone(model, plain):
    """On rank 0, in eval mode."""
    if pool.rank() == 0:
        x = make_batch(0, 99, precision())
        model.eval()
        with torch.no_grad():
            same(model(x), plain(x), "output of an evaluation")
        model.train()


def trains(name, sentence, worlds, check=trains_as_one_device, **how):
    say(name, sentence, worlds, "train-step", check, **how)


def scaler_for(optimizer):
    return GradScaler("cpu", init_scale=2.0**10)


trains(
    "equal_tokens",
    "Ranks with equally many tokens train as one device does on all of them.",
    [2, 3],
    tokens=[[5], [5], [5]],
)
say_in_float64("train-step", "equal_tokens")
trains(
    "adamw",
    "The same with AdamW.",
    [3],
    tokens=[[5], [5], [5]],
    optimizer="adamw",
)
trains(
    "unequal_tokens",
    "A token counts as much on a rank with few tokens as on one with many.",
    [3],
    tokens=[[1], [3], [5]],
)
trains(
    "a_rank_without_tokens",
    "A rank whose tokens are all masked trains as the others do.",
    [3],
    tokens=[[2], [5], [0]],
)
trains(
    "accumulation",
    "All micro-batches of a step count, as one batch.",
    [2, 3],
    tokens=[[5, 5, 5], [5, 5, 5], [5, 5, 5]],
)
trains(
    "unequal_micro_batches",
    "Micro-batches have unequally many tokens. One has none.",
    [2],
    tokens=[[1, 0, 4], [2, 5, 1]],
    optimizer="adamw",
)
trains(
    "last_short_batch",
    "The last micro-batch has fewer rows, and on one rank it has none.",
    [3],
    tokens=[[5, 5], [5, 2], [5, 0]],
    padded=False,
)
may_refuse = partial(trains, may_refuse=True)
may_refuse(
    "fewer_micro_batches",
    "At the end of the data a rank may have fewer micro-batches.",
    [2],
    tokens=[[5, 3], [4]],
    padded=False,
)
trains(
    "clipping",
    "max_norm= bounds the norm of the gradient of all ranks and micro-batches.",
    [3],
    tokens=[[5, 1], [3, 3], [1, 5]],
    max_norm=0.01,
)
trains(
    "schedulers",
    "The learning rate changes with the steps: not with micro-batches, and not with ranks.",
    [3],
    tokens=[[5, 1], [3, 3], [1, 5]],
    scheduler=partial(StepLR, step_size=2, gamma=0.5),
)
trains(
    "scaled",
    "With a scaler= gradients are unscaled before they are clipped.",
    [2],
    tokens=[[5, 1], [3, 3]],
    scaler=scaler_for,
    max_norm=0.01,
)
trains(
    "overflow",
    "If one rank's loss is infinite, no rank takes the step, and all halve the scale.",
    [3],
    tokens=[[5], [3], [1]],
    spoil=1,
    scaler=scaler_for,
)
trains(
    "evaluation",
    "Between steps the module has the weights of the moment, also for a rank that evaluates alone.",
    [2],
    tokens=[[5], [3]],
    between=evaluate_alone,
)


def stays_finite(make):
    """If no rank has a token, there is nothing to divide by."""
    model = make_model("plain", precision())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    before = copy.deepcopy(model)
    make(model, optimizer, micro_batches_of(pool.rank(), 0, [0, 0], padded=True))
    for name, parameter in before.named_parameters():
        same(model.get_parameter(name), parameter, f"{name} after a step without tokens")


def reports_the_loss_of_all(make, **how):
    for found, expected in trains_as_one_device(make, **how):
        if found is None:
            raise NotOffered("it returns no loss")
        loss = torch.as_tensor(found, dtype=expected.dtype).detach()
        same(loss.reshape(()), expected, "the loss that it returns")


trains(
    "no_tokens",
    "A step in which no rank has a token changes nothing, and is not NaN.",
    [2],
    stays_finite,
    about="property",
)
trains(
    "reported_loss",
    "What it returns is the loss of the whole batch, on all ranks.",
    [3],
    reports_the_loss_of_all,
    about="property",
    tokens=[[5, 1], [3, 3], [0, 5]],
)

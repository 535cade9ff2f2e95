"""Mistakes in a step of training, and the claim that catches each."""

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from wrong.common import summed


def count_of(batches):
    return sum((y != -100).sum() for _, y in batches)


def plain(model, optimizer, micro_batches, max_norm=None, scheduler=None, scaler=None, *, wrong=""):
    """No DDP: all-reduce the gradients before the step. `wrong` names a mistake."""
    micro_batches = prepare(model, optimizer, micro_batches, wrong)
    scale = scaler.scale(torch.ones(())).item() if scaler else 1.0
    total = backward(model, optimizer, micro_batches, scale, wrong)
    if wrong.startswith("schedules") and scheduler:
        again = len(micro_batches) if wrong == "schedules micro-batches" else dist.get_world_size()
        for _ in range(again - 1):
            scheduler.step()
    if wrong == "clips own" and max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    reduce_gradients(model, wrong)
    if wrong == "clips scaled" and max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    unscale(model, optimizer, micro_batches, scale, wrong)
    if max_norm is not None and not wrong.startswith("clips"):
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    whole = total if wrong == "skips alone" else summed(total)
    is_finite = whole.isfinite() or wrong in ("never skips", "divides by zero")
    if is_finite:
        optimizer.step()
    if scaler:
        scaler.update(scale if is_finite else scale / 2)
    if scheduler:
        scheduler.step()
    return total if wrong == "reports its own loss" else whole


def unscale(model, optimizer, micro_batches, scale, wrong):
    for parameter in model.parameters():
        parameter.grad /= scale
        if wrong == "decays in the gradient":
            parameter.grad += optimizer.param_groups[0]["weight_decay"] * parameter.detach()
        if wrong == "divides by zero":
            count = summed(count_of(micro_batches))
            parameter.grad *= count / count


def prepare(model, optimizer, micro_batches, wrong):
    if wrong != "keeps old gradients" or count_of(micro_batches):
        optimizer.zero_grad()
    if wrong == "evaluates an old copy":
        remember(model)
    return filled_up(micro_batches) if wrong == "repeats the first" else micro_batches


def remember(model):
    """In eval mode the module computes with the weights from before the step."""
    model._forward_hooks.clear()
    old = copy.deepcopy(model)

    def hook(module, args, output):
        return output if module.training else old(*args)

    model.register_forward_hook(hook)


def filled_up(micro_batches):
    """A rank with fewer micro-batches repeats its first one."""
    most = torch.tensor(len(micro_batches))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    missing = most.item() - len(micro_batches)
    return micro_batches + micro_batches[:1] * missing


def backward(model, optimizer, micro_batches, scale, wrong):
    """Return the sum of this rank's losses."""
    ranks = dist.get_world_size()
    count = summed(count_of(micro_batches)).clamp(min=1)
    if wrong == "own count":
        count = ranks * count_of(micro_batches).clamp(min=1)
    if wrong == "counts padding":
        count = summed(torch.tensor(sum(len(y) for _, y in micro_batches)))
    if wrong == "drops short batches":
        micro_batches = [batch for batch in micro_batches if len(batch[0]) == 5]
    total = torch.zeros(())
    for x, y in micro_batches:
        if wrong == "mean of means":
            count = ranks * len(micro_batches) * count_of([(x, y)]).clamp(min=1)
        if wrong == "last batch":
            optimizer.zero_grad()
        logits = model(x).float() if wrong == "in float32" else model(x)
        loss = F.cross_entropy(logits, y, reduction="sum") / count
        if wrong == "divides by micro-batches":
            loss = loss / len(micro_batches)
        (scale * loss).backward()
        total = total + loss.detach()
    return total


def reduce_gradients(model, wrong):
    for parameter in model.parameters():
        parameter.grad = summed(parameter.grad)
        if wrong == "averages":
            parameter.grad /= dist.get_world_size()


drops_short_batches = partial(plain, wrong="drops short batches")
own_count = partial(plain, wrong="own count")
counts_padding = partial(plain, wrong="counts padding")
mean_of_means = partial(plain, wrong="mean of means")
last_batch = partial(plain, wrong="last batch")
divides_by_micro_batches = partial(plain, wrong="divides by micro-batches")
schedules_micro_batches = partial(plain, wrong="schedules micro-batches")
schedules_ranks = partial(plain, wrong="schedules ranks")
clips_own = partial(plain, wrong="clips own")
clips_scaled = partial(plain, wrong="clips scaled")
skips_alone = partial(plain, wrong="skips alone")
never_skips = partial(plain, wrong="never skips")
averages = partial(plain, wrong="averages")
keeps_old_gradients = partial(plain, wrong="keeps old gradients")
evaluates_an_old_copy = partial(plain, wrong="evaluates an old copy")
repeats_the_first = partial(plain, wrong="repeats the first")
decays_in_the_gradient = partial(plain, wrong="decays in the gradient")
reports_its_own_loss = partial(plain, wrong="reports its own loss")
divides_by_zero = partial(plain, wrong="divides by zero")
in_float32 = partial(plain, wrong="in float32")

MISTAKES = {
    "train-step": {
        "drops_short_batches": "last_short_batch",
        "own_count": "unequal_tokens",
        "counts_padding": "unequal_tokens",
        "mean_of_means": "unequal_micro_batches",
        "last_batch": "accumulation",
        "divides_by_micro_batches": "accumulation",
        "schedules_micro_batches": "schedulers",
        "schedules_ranks": "schedulers",
        "clips_own": "clipping",
        "clips_scaled": "scaled",
        "skips_alone": "overflow",
        "never_skips": "overflow",
        "averages": "equal_tokens",
        "keeps_old_gradients": "a_rank_without_tokens",
        "evaluates_an_old_copy": "evaluation",
        "repeats_the_first": "fewer_micro_batches",
        "decays_in_the_gradient": "adamw",
        "reports_its_own_loss": "reported_loss",
        "divides_by_zero": "no_tokens",
        "in_float32": "float64",
    },
}
CAUSES = {
    "train-step": {
        "own_count": "mean_of_ranks",
        "counts_padding": "padding_in_the_mean",
        "mean_of_means": "mean_of_micro_batches",
        "last_batch": "trainer_keeps_the_last",
        "divides_by_micro_batches": "trainer_divides_by_micro_batches",
        "schedules_micro_batches": "scheduler_counts_micro_batches",
        "schedules_ranks": "scheduler_counts_ranks_first",
        "averages": "trainer_averages",
    },
}
RIGHT = {"train-step": {"plain": []}}

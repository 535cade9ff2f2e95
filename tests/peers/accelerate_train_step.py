"""accelerate==1.15.0: its guide's loop, in which micro-batches have unequally many tokens."""

from contextlib import nullcontext
from functools import cache

import torch.nn.functional as F
from accelerate import Accelerator


@cache
def prepared(*parts):
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(*parts)


def train_step(model, optimizer, micro_batches, max_norm=None, scheduler=None):
    parts = prepared(model, optimizer, *([scheduler] if scheduler else []))
    accelerator, model, optimizer, *schedulers = parts
    count = accelerator.reduce(sum((y != -100).sum() for _, y in micro_batches))
    for number, (x, y) in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else accelerator.no_sync(model):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            accelerator.backward(loss * accelerator.num_processes / count)
    if max_norm is not None:
        accelerator.clip_grad_norm_(model.parameters(), max_norm)
    for part in (optimizer, *schedulers):
        part.step()
    optimizer.zero_grad()


train_step.fresh = True

"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

With p stages, each rank holds 1/p of the model, but a stage must wait for the one before it. So the
batch is cut into m micro-batches: while rank 1 works on the first one, rank 0 works on the second.
A forward sends its output on. When the gradient of that output has come back, the backward sends
the gradient of the stage's input back.

A schedule is the order of a rank's forwards and backwards. Here p = 3 and m = 4. F2 is the forward
of micro-batch 2. B2 is its backward, which takes about two forwards:

    GPipe: all forwards, then all backwards         1F1B: each backward as soon as it can run
    rank 0  F0F1F2F3            B0..B1..B2..B3..    F0F1F2        B0..F3B1..  B2..  B3..
    rank 1    F0F1F2F3      B0..B1..B2..B3..          F0F1    B0..F2B1..F3B2..  B3..
    rank 2      F0F1F2F3B0..B1..B2..B3..                F0B0..F1B1..F2B2..F3B3..

The bubble is the blank share of all ranks' time. 1F1B has GPipe's bubble, but keeps activations of
at most p micro-batches. Three more schedules:

    naive              One micro-batch goes through all stages and back, then another.
    interleaved_1f1b   Each rank has v smaller stages: stage s is on rank s mod p. So filling the
                       pipeline takes 1/v of the time.
    zero_bubble        B is split in two. One half can wait, and run in the bubble (section 4).

A rank holds Ψ/p of Ψ parameters. A micro-batch has b samples of s tokens of h features. Per step,
an inner rank sends m outputs and m gradients of bsh elements each (interleaved: v times as many).
The first rank sends no gradients for the first stage, and the last no outputs of the last stage.

                       bubble              micro-batches kept on rank 0
    naive              1 - 1/p             1
    gpipe              (p-1)/(m+p-1)       m
    1f1b               (p-1)/(m+p-1)       min(p, m)
    interleaved_1f1b   (p-1)/(vm+p-1)      more than 1f1b
    zero_bubble        (p-1)/(3m+p-1)      min(p, m)

The last two formulas need m ≥ p. The last one also needs F and both halves of B to take equally
long.

Read section 1 for the idea (11 minutes), to section 3 for the technique (44), and the rest to use
it as a library (90). Sections 2 and 3 have 1F1B and interleaving. Section 4, zero bubble, is a
refinement.

Run:      torchrun --nproc-per-node 2 pipeline.py --schedule zero_bubble
          --idea trains with section 1 alone, which is GPipe
Papers:   GPipe, arXiv 1811.06965; interleaved 1F1B, 2104.04473; zero bubble, 2401.10241
Mirrors:  torch.distributed.pipelining, and its CSV files of schedules
Left out: tied parameters and clipping (see parallel_3d.py); other shapes in later steps; W for some
          layers (see can_wait())
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import collections
import copy
import graphlib
import itertools
import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: GPipe. All micro-batches go forward, then all go back. Each transfer waits.


def start_transfer(operation, tensor, peer, group):
    single = dist.P2POp(operation, tensor, group=group, group_peer=peer)
    return dist.batch_isend_irecv([single])[0]  # a bare isend builds a second NCCL communicator


def receive(like, peer, group, device):
    received = torch.empty_like(like)
    start_transfer(dist.irecv, received, peer, group).wait()
    return received.to(device)


def gpipe_step(stage, micro_batches, loss_fn, like, group=None):
    """Stages pass on tensors like `like`, which is on the CPU for gloo, and on the GPU for NCCL."""
    rank = dist.get_rank(group)
    last = dist.get_world_size(group) - 1
    saved = []  # (input, output) of each micro-batch; on the last rank (input, loss)
    for inputs, target in micro_batches:  # the same on all ranks
        x = receive(like, rank - 1, group, target.device) if rank > 0 else inputs.detach()
        y = stage(x.requires_grad_(rank > 0)).contiguous()
        if rank < last:
            start_transfer(dist.isend, y.detach().to(like), rank + 1, group).wait()
        else:
            y = loss_fn(y, target) / len(micro_batches)
        saved.append((x, y))
    for x, y in saved:
        y.backward(receive(like, rank + 1, group, y.device) if rank < last else None)
        if rank > 0:
            start_transfer(dist.isend, x.grad.to(like), rank - 1, group).wait()
    return torch.stack([y.detach() for _, y in saved]).sum() if rank == last else None


# --------------------------------------------------------------------------------------------------
# 2. Schedules. All have GPipe's actions, in another order.


class Action(NamedTuple):
    stage: int
    kind: str  # F: forward, B: backward. Section 4 splits B into I and W.
    micro_batch: int

    def __repr__(self):  # as in PyTorch: 2F0 is the forward of stage 2 on micro-batch 0
        return f"{self.stage}{self.kind}{self.micro_batch}"


# 1F1B begins with some forwards, the warmup. Then backwards and forwards take turns until only
# backwards are left. For example, the schedules of rank 0 of 3. "|" is the end of the warmup:
#
#   gpipe, m = 4        0F0 0F1 0F2 0F3 | 0B0 0B1 0B2 0B3
#   1f1b, m = 4         0F0 0F1 0F2 | 0B0 0F3 0B1 0B2 0B3
#   interleaved_1f1b,   0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 | 3B0 0F5 3B1 3F3 3B2 3F4 0B0 3F5 0B1 0B2
#   m = 6, v = 2        … 3B3 3B4 3B5 0B3 0B4 0B5
#
# Interleaved, this rank has stages 0 and 3. Micro-batches go in rounds of p or more, here 0 1 2 and
# 3 4 5.
# All stages of the rank run a round before the next round begins.


def schedule_of_rank(name, rank, p, m, v):
    """Return the list of a rank's actions, for p ranks, m micro-batches and v stages a rank."""
    stages = range(rank, p * v, p)
    # m // p rounds, but at least one. If p does not divide m, some have more than p micro-batches.
    rounds = [each.tolist() for each in torch.arange(m).tensor_split(max(1, m // p))]
    forwards = []
    backwards = []
    for micro_batches in rounds:
        forwards += [Action(stage, "F", i) for stage in stages for i in micro_batches]
        backwards += [Action(stage, "B", i) for stage in stages[::-1] for i in micro_batches]
    if name == "gpipe":
        return forwards + backwards
    if name == "naive":  # sorted() keeps the order of a micro-batch's actions
        return sorted(forwards + backwards, key=lambda action: action.micro_batch)
    # Now 1f1b, from which section 4 makes zero_bubble, and interleaved_1f1b.
    # The first backward is that of micro-batch 0 on the rank's last stage. Before it, the rank runs
    # - the first round on its other stages,
    # - micro-batch 0 on its last stage,
    # - one more forward for each later rank, because micro-batch 0 goes there and comes back.
    #   Interleaved, two more: so each message may travel for the time of one action.
    # For rank 0 above, these are 0 + 1 + 2, and 3 + 1 + 4 if interleaved.
    per_later_rank = 2 if name == "interleaved_1f1b" else 1
    warmup = (v - 1) * len(rounds[0]) + 1 + per_later_rank * (p - 1 - rank)
    turns = itertools.zip_longest(backwards, forwards[warmup:])
    return forwards[:warmup] + [action for turn in turns for action in turn if action]


# --------------------------------------------------------------------------------------------------
# 3. The pipeline runs any schedule of F and B. From step() on, methods come in the order in which
#    they run.
#
# F takes the inputs of its stage, and gives its outputs to F of the next stage. B takes the
# gradients of the outputs, and gives those of the inputs to B of the previous stage. A message is a
# dictionary of such tensors: {index of the input or output: tensor}. The life of the message from
# 0F0, on rank 0, to 1F0, on rank 1:
#
#   rank 0      run(0F0) gives it
#   all ranks   _transfer(): rank 0 copies it, and starts isend
#                            rank 1 allocates it, starts irecv, and puts it in its _inbox
#   rank 1      _take(1F0) waits for irecv
#   rank 1      run(1F0) takes it


def as_tensors(value):
    """Return what a stage takes or gives, a tensor or a tuple of tensors, as a tuple."""
    tensors = value if isinstance(value, tuple) else (value,)
    check_tensors(tensors)
    return tensors


def detached(tensor, device, copy=False):
    """Return the tensor on a device, without its graph. It still requires a gradient, if it did."""
    moved = tensor.detach().to(device, copy=copy)
    return moved.requires_grad_(tensor.requires_grad)


class BasicPipeline(nn.Module):
    """Runs this rank's stages in the order of any schedule of F and B.

    stages: a module, or the list of this rank's modules in stage order. A module returns a tensor,
        or a tuple of tensors: the arguments of the next stage.
    schedule: a name such as "1f1b", or a list of actions for each rank.
    num_microbatches: torch.chunk splits the batch along dimension 0.
    loss_fn(output, target): the mean loss of a micro-batch.
    """

    def __init__(self, stages, schedule, num_microbatches, loss_fn, process_group=None):
        super().__init__()
        if not isinstance(stages, (list, nn.ModuleList)):
            stages = [stages]
        stages = nn.ModuleList(stages)
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        # schedule has the list of each rank's actions. _takers lists the actions of all ranks, in
        # the order in which they end (section 6 predicts it). Each has the action that takes its
        # message, or None: {0F0: 1F0, …, 2F0: None, 2B0: 1B0, …}.
        self.schedule, self._takers = self._read_schedule(schedule, stages)
        ranks = enumerate(self.schedule)
        self._rank_of = {action.stage: rank for rank, actions in ranks for action in actions}
        self._last_stage = max(self._rank_of)
        numbers = sorted({action.stage for action in self.schedule[self._rank]})
        self.stages = nn.ModuleDict(zip(map(str, numbers), stages, strict=True))
        self._metadata = {}  # for _share_metadata()
        self._sends = collections.deque()  # (message, works to wait for), the oldest first
        # Gloo sends from the host's memory, NCCL from the GPU's.
        self.device, self._send_device = self._find_devices()

    def step(self, inputs=None, targets=None):
        """Forward and backward of a batch. Under torch.no_grad() only the forward.

        The rank of the first stage reads inputs, a tensor or a tuple of tensors. The rank of the
        last stage reads targets, a tensor, and returns the loss.
        """
        check_grad_mode(self._group, self._send_device)  # all ranks train, or none
        self._start(inputs, targets)
        # Ranks must start their transfers in one order, or NCCL hangs. So each rank walks through
        # the actions of all ranks, and runs its own. At another rank's action, _transfer() posts
        # the receive if the message is for this rank.
        for action, taker in self._takers.items():
            if action.kind != "F" and not torch.is_grad_enabled():
                continue
            message = {}
            if self._rank_of[action.stage] == self._rank:
                message = self.run(action, self._take(action))
            if taker:
                self._transfer(message, action, taker)
        self._wait_for_sends()
        return torch.stack(self._losses).sum() if self._losses else None

    def _start(self, inputs, targets):
        """Cut the batch into micro-batches. The first stage finds its inputs in the inbox."""
        self._inbox = {}  # action -> (the message that it takes, works to wait for)
        self._activations = {}  # (stage, micro-batch) -> (inputs, outputs) of F, for B
        self._losses = []  # what each micro-batch adds to the loss
        m = self.num_microbatches
        if "0" in self.stages:
            inputs = as_tensors(inputs)
            check_batch("inputs", inputs, m)
            chunks = [tensor.chunk(m) for tensor in inputs]
            for i, tensors in enumerate(zip(*chunks, strict=True)):
                self._inbox[Action(0, "F", i)] = (dict(enumerate(tensors)), [])
        if str(self._last_stage) in self.stages:
            (targets,) = as_tensors(targets)
            check_batch("targets", [targets], m)
            self._targets = targets.chunk(m)

    def _take(self, action):
        """Return the message that an action takes. Its tensors are leaves: backward stops there."""
        message, works = self._inbox.pop(action, ({}, []))  # B of the last stage takes nothing
        for work in works:
            work.wait()
        return {index: detached(tensor, self.device) for index, tensor in message.items()}

    def run(self, action, message):
        """Run an action on the message that it takes. Return the message that it gives."""
        stage, kind, i = action
        if kind == "F":
            return self._forward(stage, i, message)
        return self._backward(stage, i, message)

    def _forward(self, stage, i, inputs):
        output = self.stages[str(stage)](*inputs.values())
        if stage == self._last_stage:
            loss = self.loss_fn(output, self._targets[i].to(self.device))
            check_loss(loss)
            output = self._share_of_loss(loss, i)
            self._losses.append(output.detach())
        outputs = as_tensors(output)
        if torch.is_grad_enabled():
            self._activations[stage, i] = inputs, outputs
        return dict(enumerate(outputs))

    def _share_of_loss(self, loss, i):
        """Return what micro-batch i adds: its loss, weighted by its share of the samples."""
        num_samples = sum(map(len, self._targets))
        return loss * (len(self._targets[i]) / num_samples)

    def _backward(self, stage, i, gradients):
        inputs, outputs = self._activations.pop((stage, i))
        if stage == self._last_stage:
            gradients = {0: torch.ones_like(outputs[0])}  # of the loss
        # An output that the next stage did not use has no gradient.
        used = [outputs[index] for index in gradients]
        torch.autograd.backward(used, [*gradients.values()])
        return {index: x.grad for index, x in inputs.items() if x.grad is not None}

    def _transfer(self, message, action, taker):
        """Start to send an action's message to its taker's rank, or to receive it there."""
        source = self._rank_of[action.stage]
        destination = self._rank_of[taker.stage]
        if source == destination:  # nothing to send. Other ranks do not look into this entry.
            self._inbox[taker] = (message, [])
            return
        device = self._send_device
        # The next actions may change the tensors. A copy is dense: its memory has no gaps.
        copies = {index: detached(each, device, copy=True) for index, each in message.items()}
        # In the first step (of each grad mode), the source tells all ranks how to allocate such
        # tensors: their size, stride, dtype and requires_grad.
        metadata = self._share_metadata(taker, copies, source)
        if source == self._rank:
            works = self._start_all(dist.isend, copies, destination)
            self._sends.append((copies, works))
            self._wait_for_sends(at_most=4)  # copies take memory
        if destination == self._rank:
            empty = {
                index: torch.empty_strided(**how, device=device) for index, how in metadata.items()
            }
            works = self._start_all(dist.irecv, empty, source)
            self._inbox[taker] = (empty, works)

    def _start_all(self, operation, message, peer):
        """Call section 1's start_transfer() for each tensor. Return the works to wait for."""
        works = []
        for tensor in message.values():
            # Transfers want contiguous tensors, and a transposed one is not. But it is dense, so
            # its memory is a contiguous vector.
            vector = tensor.detach().as_strided([tensor.numel()], [1])
            works.append(start_transfer(operation, vector, peer, self._group))
        return works

    def _wait_for_sends(self, at_most=0):
        while len(self._sends) > at_most:
            _, works = self._sends.popleft()
            for work in works:
                work.wait()

    # _read_schedule() hands on to section 6, and the other two to section 5.

    def _read_schedule(self, schedule, stages):
        return read_schedule(self, schedule, stages)

    def _share_metadata(self, taker, message, source):
        return share_metadata(self, taker, message, source)

    def _find_devices(self):
        return find_devices(self.stages, self._group)


# --------------------------------------------------------------------------------------------------
# 4. Zero bubble: B in two parts. W computes the gradients of linear layers' weights, I all others.
#
# The previous rank waits only for I, so W can run in the bubble. With p = 3 and m = 4:
#
#   rank 0   F0F1F2    I0W0F3I1W1I2W2I3W3
#   rank 1     F0F1  I0F2I1W0F3I2W1I3W2W3
#   rank 2       F0I0F1I1F2I2W0F3I3W1W2W3


def split_backwards(actions, rank):
    """Split each B of 1F1B. Rank r runs W of a micro-batch after I of the r-th later one.

    So each rank keeps as many micro-batches as rank 0 of 1F1B does.
    """
    split = []
    waiting = []
    for action in actions:
        if action.kind == "F":
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > rank:
            split.append(waiting.pop(0))
    return split + waiting


class ZeroBubblePipeline(BasicPipeline):
    """Runs I and W, too. The arguments are those of BasicPipeline."""

    def _start(self, *batch):
        super()._start(*batch)
        # (stage, micro-batch) -> what I leaves to W. Micro-batches with a whole B are not in it.
        own = self.schedule[self._rank]
        self._left_to_w = {(stage, i): [] for stage, kind, i in own if kind == "W"}
        self._weights = set(self.parameters())  # W computes gradients of these only

    def run(self, action, message):
        stage, kind, i = action
        if kind == "W":
            return backward_for_weights(self._left_to_w.pop((stage, i)))
        with leave_weights_to_w(self._left_to_w.get((stage, i)), self._weights):
            return super().run(action, message)


linear = torch._C._nn.linear  # F.linear, unless another package has replaced it


@contextmanager
def leave_weights_to_w(left_to_w, weights):
    """In this context, the backward of torch's F.linear appends to `left_to_w` what W needs.

    It is around F. It is also around I, because an activation checkpoint runs the forward again
    there.
    """
    # Leave F.linear as it is if the micro-batch has a whole B, or if another package has replaced
    # F.linear, whose gradients may have another formula than W's.
    if left_to_w is None or F.linear is not linear:
        yield
        return
    if left_to_w:  # F and I begin with an empty list, so a backward has run in F
        raise RuntimeError("a stage ran a backward in its forward; use a schedule without W")
    F.linear = partial(split_linear, left_to_w, weights)
    try:
        yield
    finally:
        F.linear = linear


def split_linear(left_to_w, weights, input, weight, bias=None):
    """F.linear, but its backward leaves the gradient of the weight to W.

    The weight is detached, so backward computes the gradients of the input and of the bias only. A
    hook gets the gradient of y, and stores what W needs.
    """
    if not can_wait(input, weight, weights):  # for example, a hook needs the gradient in I
        return linear(input, weight, bias)
    rows = input.flatten(end_dim=-2)
    version = rows._version
    y = linear(rows, weight.detach(), bias)

    def leave_to_w(grad_y):
        if grad_y is not None:  # None: the loss does not depend on y
            check_unchanged(rows, version)
            left_to_w.append((weight, rows.detach(), grad_y))

    # On y, not on the view below: a view that a stage changes in place gets another grad_fn.
    y.register_hook(leave_to_w)
    return y.unflatten(0, input.shape[:-1])


def can_wait(x, weight, weights):
    """Return whether W can compute the gradient of `weight` in F.linear(x, weight).

    Under FSDP, and if the weight has hooks, it cannot, because these need the gradient in I. Then
    results are right, but the bubble is that of 1f1b. If a weight is also used where W is not
    possible (tied), its gradients are added in another order than on one device, so the last bits
    may differ. x stays in memory until W, even if an activation checkpoint would free it.
    """
    return (
        torch.is_grad_enabled()
        and x.requires_grad  # else y might have no graph for the hook
        and weight.requires_grad
        # Nothing may read the gradient before W adds it. A weight that is computed from a parameter
        # (weight_norm, FSDP), or that has a hook, needs its gradient in I. Those of ddp.py are
        # hooks of the node that adds to .grad, and run in W.
        and weight in weights
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        # W would round the gradients of a vector or a strided x differently.
        and x.dim() > 1
        and x.is_contiguous()
    )


def backward_for_weights(left_to_w):
    """W: add grad_yᵀ x to the .grad of the weight in y = x weightᵀ."""
    weights = [weight for weight, _, _ in left_to_w]
    # Under autocast, dtypes may differ. backward() casts to the weight's.
    gradients = [grad_y.T @ rows.to(grad_y.dtype) for _, rows, grad_y in left_to_w]
    # One call: it first adds up the gradients of a shared weight, as a plain backward does.
    torch.autograd.backward(weights, gradients)
    return {}  # the message that W gives


# --------------------------------------------------------------------------------------------------
# 5. Options: gradients of inputs, num_items and backward_context. Messages and devices.


class Pipeline(ZeroBubblePipeline):
    """Runs any schedule. The arguments are those of BasicPipeline, and:

    backward_context(stage, is_last): the context of a backward of `stage`, one of the modules.
        is_last: it is the stage's last backward in the step. If stages are FSDP units, give
        `lambda stage, is_last: nullcontext() if is_last else fsdp.no_sync(stage)`.

    num_items, in step(): if micro-batches have unequal numbers of unmasked tokens, the mean of
    their means is wrong. So let loss_fn return a sum, and give the number of unmasked tokens in the
    batch as num_items. The loss is the sum of all micro-batches divided by num_items:

        pipeline = Pipeline(stage, "1f1b", 4, partial(F.cross_entropy, reduction="sum"))
        loss = pipeline.step(inputs, targets, num_items=(targets != -100).sum())

    With data parallelism, count the tokens of all ranks. If they average gradients instead of
    adding them up, divide this count by the number of ranks.
    """

    def __init__(
        self, stages, schedule, num_microbatches, loss_fn, process_group=None, backward_context=None
    ):
        super().__init__(stages, schedule, num_microbatches, loss_fn, process_group)
        self.backward_context = backward_context

    def step(self, inputs=None, targets=None, num_items=None):
        """Forward and backward of a batch. Under torch.no_grad() only the forward.

        The rank of the first stage reads inputs, a tensor or a tuple of tensors. They get gradients
        if they need them. The rank of the last stage reads targets, a tensor, and num_items. It
        returns the loss.
        """
        self._num_items = num_items
        self._num_backwards = collections.Counter()  # stage -> how many have begun
        self._input_gradients = {}  # micro-batch -> what B of stage 0 gives
        loss = super().step(inputs, targets)
        if self._input_gradients:
            backward_inputs(as_tensors(inputs), self._input_gradients)
        return loss

    def _share_of_loss(self, loss, i):
        if self._num_items is None:
            return super()._share_of_loss(loss, i)
        return loss / self._num_items

    def _backward(self, stage, i, gradients):
        inputs, _ = self._activations[stage, i]
        context = nullcontext()
        self._num_backwards[stage] += 1
        if self.backward_context:
            is_last = self._num_backwards[stage] == self.num_microbatches
            context = self.backward_context(self.stages[str(stage)], is_last)
        with context:
            given = super()._backward(stage, i, drop_unused(gradients))
        if stage == 0:
            self._input_gradients[i] = given
        return fill_unused(given, inputs)


def backward_inputs(inputs, parts):
    """Give inputs that need gradients theirs. If they were computed, go back through that, too.

    parts: micro-batch -> {index of an input: gradient}
    """
    chunks = [tensor.chunk(len(parts)) for tensor in inputs]
    roots = []
    gradients = []
    for i, part in parts.items():
        for index, gradient in part.items():
            roots.append(chunks[index][i])
            gradients.append(gradient.to(inputs[index].device))
    torch.autograd.backward(roots, gradients)


USED = -1  # the index, in a message of gradients, of flags: which of the inputs were used


def fill_unused(gradients, inputs):
    """Return the message of a backward with zeros for inputs that were not used, and with flags.

    A stage may use an input for some micro-batches only, but the receiver has to know what comes.
    """
    needed = [index for index, x in inputs.items() if x.requires_grad]
    if len(needed) < 2:
        return gradients
    zeros = {index: torch.zeros_like(inputs[index]) for index in needed}
    flags = torch.tensor([index in gradients for index in needed])
    return zeros | gradients | {USED: flags}


def drop_unused(message):
    """Return a message without the gradients of inputs that were not used."""
    flags = message.pop(USED, None)
    if flags is None:
        return message
    used = flags.tolist()  # on a GPU, the host waits for it
    return dict(itertools.compress(message.items(), used))


def share_metadata(pipeline, taker, message, source):
    """Return how to allocate the tensors of a message: {index: arguments of empty_strided()}.

    In the first step of each grad mode, the source broadcasts this. All ranks keep it.
    """
    metadata = {
        index: {
            "size": tensor.shape,
            "stride": tensor.stride(),  # with others, kernels may round differently
            "dtype": tensor.dtype,
            "requires_grad": tensor.requires_grad,
        }
        for index, tensor in message.items()
    }
    key = torch.is_grad_enabled(), taker
    if key not in pipeline._metadata:
        shared = [metadata]
        dist.broadcast_object_list(shared, group_src=source, group=pipeline._group)
        pipeline._metadata[key] = shared[0]
    known = pipeline._metadata[key]
    if pipeline._rank == source:
        check_metadata(taker, metadata, known)
    return known


def find_devices(stages, group):
    """Return the device of this rank's parameters, and the one to send from.

    All ranks must send over the same backend. So a rank without parameters takes the type of device
    of the others: max() finds it, because "" < "cpu" < "cuda".
    """
    device = next((parameter.device for parameter in stages.parameters()), None)
    types = [None] * dist.get_world_size(group)
    dist.all_gather_object(types, device.type if device else "", group=group)
    device = device or torch.device(max(types) or "cpu")
    send_device = device_to_send_from(device, group)
    # All ranks must join the first call to an NCCL group. A transfer has only two.
    dist.all_reduce(torch.zeros(1, device=send_device), group=group)
    return device, send_device


def device_to_send_from(device, group):
    """Gloo sends from the host's memory, NCCL from the GPU's.

    dist.get_backend_config() names the backend for each type of device. dist.get_backend() is
    "undefined" after init_process_group() without a backend.
    """
    is_gloo = f"{device.type}:gloo" in dist.get_backend_config(group)
    return torch.device("cpu") if is_gloo else device


# --------------------------------------------------------------------------------------------------
# 6. Schedules: their names, what they cost, and PyTorch's CSV files.


SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def build_schedule(name, num_ranks, num_microbatches, stages_per_rank=1):
    """Return a list of actions, as strings, for each rank. Stage s is on rank s % num_ranks."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name not in SCHEDULES or min(p, m, v) < 1:
        raise ValueError(f"build_schedule{name, p, m, v}: name one of {SCHEDULES}, numbers > 0")
    schedule = []
    for rank in range(p):
        actions = schedule_of_rank(name, rank, p, m, v)
        if name == "zero_bubble":  # schedule_of_rank() gave those of 1f1b
            actions = split_backwards(actions, rank)
        schedule.append(list(map(str, actions)))
    return schedule


def read_schedule(pipeline, schedule, stages):
    """Return the actions of each rank, and {action: its taker, or None} in the order of time."""
    m = pipeline.num_microbatches
    group = pipeline._group
    is_name = isinstance(schedule, str)
    facts = [schedule, m, len(stages) if is_name else "any"]
    check_same_on_all_ranks("schedule, micro-batches and stages", facts, group)
    if is_name:
        schedule = build_schedule(schedule, dist.get_world_size(group), m, len(stages))
    schedule = list(map(parse, schedule))
    runs_w = isinstance(pipeline, ZeroBubblePipeline)
    check_schedule(schedule, ("FB", "FIW") if runs_w else ("FB",))
    check_stages(schedule, m, stages, group)
    takers = find_takers(schedule)
    ends = end_times(schedule, COST)
    return schedule, {action: takers.get(action) for action in sorted(ends, key=ends.get)}


def find_takers(schedule):
    """Return {action: the one that takes the message that it gives}."""
    find = {}  # (stage, is it F?, micro-batch) -> the action that takes the message
    for action in itertools.chain(*schedule):
        if action.kind != "W":  # W takes and gives nothing. I takes and gives what B does.
            find[action.stage, action.kind == "F", action.micro_batch] = action
    takers = {}
    for (stage, is_forward, i), action in find.items():
        name = stage + (1 if is_forward else -1), is_forward, i
        if name in find:
            takers[action] = find[name]
    return takers


def parse(cells):
    """Return a rank's actions: [Action(0, "F", 4), Action(7, "B", 0)] for ["0F4", None, "7B0"].

    Communication is left out. "(0F4;7B0)OVERLAP_F_B" becomes two actions.
    """
    text = " ".join(map(str, cells))
    found = re.findall(r"\b(\d+)([FBIW])(\d+)\b", text)
    return [Action(int(stage), kind, int(i)) for stage, kind, i in found]


COST = {"F": 1, "B": 2, "I": 1, "W": 1}  # time, in forwards


def end_times(schedule, cost):
    """Return {action: when it ends}, if each starts as soon as it can. Transfers take no time."""
    before = {}  # action -> its rank's previous action, and the giver of its message
    for actions in schedule:
        for previous, action in itertools.pairwise([None, *actions]):
            before[action] = [previous] if previous else []
    for action, taker in find_takers(schedule).items():
        before[taker].append(action)
    ends = {}
    try:
        for action in graphlib.TopologicalSorter(before).static_order():
            start = max((ends[each] for each in before[action]), default=0)
            ends[action] = start + cost[action.kind]
    except graphlib.CycleError as error:
        raise ValueError(f"the schedule deadlocks: {error}") from None
    return ends


class Simulation(NamedTuple):
    start: dict  # action, as a string -> time
    end: dict  # action, as a string -> time
    bubble_fraction: float  # the share of all ranks' time in which they wait
    peak_activations: list  # by rank: the most micro-batches from F to the end of B or W


def simulate(schedule, cost=COST):
    """Compute when each action starts and ends, if each starts as soon as it can.

    A rank keeps the order of its actions. Transfers take no time. Raises ValueError if the schedule
    is incomplete or deadlocks.
    """
    schedule = list(map(parse, schedule))
    check_schedule(schedule)
    cost = COST | cost
    ends = end_times(schedule, cost)
    start = {str(action): end - cost[action.kind] for action, end in ends.items()}
    end = {str(action): end for action, end in ends.items()}
    busy = sum(cost[action.kind] for action in ends)
    bubble_fraction = 1 - busy / (max(end.values()) * len(schedule))
    peaks = list(map(peak_alive, schedule))
    return Simulation(start, end, bubble_fraction, peaks)


def peak_alive(actions):
    """Return how many micro-batches are alive at most, from F to the end of B or W.

    A micro-batch counts once for each stage.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    changes = [change[action.kind] for action in actions]
    return max(itertools.accumulate(changes), default=0)


def schedule_to_csv(schedule, path):
    """Write a line per rank, which PyTorch's _load_csv(path, format="compute_only") reads."""
    lines = [",".join(map(str, parse(cells))) for cells in schedule]
    Path(path).write_text("\n".join(lines))


def schedule_from_csv(path):
    """Read what PyTorch's _dump_csv writes, in both of its formats."""
    text = Path(path).read_text()
    ranks = [parse([line]) for line in text.splitlines()]
    return [list(map(str, actions)) for actions in ranks]


# --------------------------------------------------------------------------------------------------
# 7. Checks.


def check_same_on_all_ranks(what, facts, process_group=None):
    """Raise ValueError on all ranks of the group unless they give the same `facts`, in order.

    Collectives of different sizes or dtypes abort the process or return garbage, so the ranks
    compare what they are about to communicate. What only one rank finds wrong is a fact, too.
    """
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group")
    mine = [f"{number}: {fact}" for number, fact in enumerate(facts)]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            here = sorted(set(theirs).difference(everyone[0]))
            there = sorted(set(everyone[0]).difference(theirs))
            raise ValueError(
                f"all ranks must have the same {what}: rank {rank} has {here}, rank 0 {there}"
            )


def check_schedule(schedule, allowed=("FB", "FIW")):
    """Raise ValueError unless all stages run all micro-batches, by actions of `allowed` kinds."""
    rank_of = {}
    kinds = collections.defaultdict(str)  # (stage, micro-batch) -> the kinds of its actions
    for rank, actions in enumerate(schedule):
        for stage, kind, i in actions:
            if rank_of.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on ranks {rank_of[stage]} and {rank}")
            kinds[stage, i] += kind
    m = len({i for _, i in kinds})
    stages = range(len(rank_of))
    for stage, i in itertools.product(stages, range(m)):
        if kinds[stage, i] not in allowed:
            raise ValueError(
                f"the schedule runs {kinds[stage, i] or 'nothing'} of stage {stage} for "
                f"micro-batch {i}; each stage from 0 on must run {' or '.join(allowed)} for each "
                "from 0 on (BasicPipeline only FB: use Pipeline)"
            )


def check_stages(schedule, num_microbatches, stages, group):
    """Raise ValueError on all ranks if the stages of one of them do not fit the schedule."""
    rank = dist.get_rank(group)
    scheduled = {stage for actions in schedule[rank : rank + 1] for stage, _, _ in actions}
    m = len({action.micro_batch for action in itertools.chain(*schedule)})
    ddp = nn.parallel.DistributedDataParallel
    num_ddp = sum(isinstance(module, ddp) for module in stages.modules())
    given = dist.get_world_size(group), num_microbatches, len(stages), num_ddp
    needed = len(schedule), m, len(scheduled), 0
    fault = "none"
    if given != needed:
        fault = (
            "(ranks, micro-batches, stages of this rank, those in PyTorch's DDP) are "
            f"{given}; the schedule needs {needed}. (DDP would average gradients of one "
            "micro-batch only: pass .module, and average after step().)"
        )
    check_same_on_all_ranks("fault", [fault], group)
    if fault != "none":
        raise ValueError(fault)


def check_grad_mode(group, device):
    """Raise ValueError if only some ranks run step() under torch.no_grad().

    Otherwise a gradient would stay unreceived, and be taken for one of the next step. On a GPU a
    rank that trains does not join, because its host would wait for the GPU. So if modes differ
    there, the ranks under no_grad() wait for it until the timeout.
    """
    is_training = torch.is_grad_enabled()
    if is_training and device.type == "cuda":
        return
    number = torch.tensor(int(is_training), device=device)
    dist.all_reduce(number, group=group)
    if number.item() not in (0, dist.get_world_size(group)):
        raise ValueError(f"only {number} ranks have gradients enabled; all or none must")


def check_tensors(tensors):
    for each in tensors:
        if not torch.is_tensor(each):
            raise ValueError(
                f"inputs, targets and outputs are tensors or tuples of them, not {type(each)}"
            )


def check_batch(name, tensors, number):
    shapes = [tuple(tensor.shape) for tensor in tensors]
    found = [len(tensor.chunk(number)) for tensor in tensors]
    if name == "targets" and torch.is_grad_enabled() and any(x.grad_fn for x in tensors):
        raise ValueError(
            "targets have a graph, which the backward of one micro-batch would free: detach() "
            "them. If they need gradients, call requires_grad_() on that, and go back from its "
            ".grad after step()"
        )
    if len({shape[:1] for shape in shapes}) != 1 or found[0] != number:
        raise ValueError(
            f"torch.chunk splits {name} of shapes {shapes} into {found} micro-batches, not "
            f"{number}. Dimension 0 must be the batch in all: expand() one of size 1; or move the "
            "batch there, and back in the stage. Or take another number of samples or micro-batches"
        )


def check_metadata(name, metadata, known):
    if metadata != known:
        raise ValueError(
            f"the message for {name} was {known} in the first step, not {metadata}; make a new "
            "Pipeline for other shapes, dtypes or frozen stages. (If a stage has only one input, "
            "it must use it for each micro-batch.)"
        )


def check_loss(loss):
    if loss.numel() != 1:  # backward would take the sum, without an error
        raise ValueError(
            f"loss_fn returned {tuple(loss.shape)}; return the mean, a scalar, or the sum if you "
            "give num_items"
        )


def check_unchanged(rows, version):
    if rows._version != version:  # autograd checks only what it saves itself
        raise RuntimeError(
            "a stage changed the input of a linear layer in place after the layer had used it; "
            "change a copy, or use a schedule without W"
        )


# --------------------------------------------------------------------------------------------------
# Demo.


FLAGS = {
    "--schedule": {"choices": SCHEDULES, "default": "1f1b", "help": "(--idea: gpipe)"},
    "--microbatches": {"type": int, "default": 4, "metavar": "M"},
    "--trace": {
        "metavar": "FILE",
        "help": "write the timeline as a Chrome trace in JSON, for ui.perfetto.dev",
    },
}


def main():
    demo = Demo(__doc__, FLAGS)
    name = "gpipe" if demo.args.idea else demo.args.schedule
    m = demo.args.microbatches
    v = 2 if name == "interleaved_1f1b" else 1
    num_stages = demo.ranks * v
    check_flags(demo, num_stages)
    # A loss times a power of 1/2 is exact.
    model = demo.start(f"pipeline {name}", bitwise=m & (m - 1) == 0, parts=m)
    stages = split(model, num_stages)[demo.rank :: demo.ranks]
    pipeline = TimedPipeline(stages, name, m, language_loss)  # --idea needs only its parameters
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    device = device_to_send_from(demo.device, None)
    like = model[0](demo.batch(0)[0].chunk(m)[0]).detach().to(device)  # what stages pass on

    def step(inputs, targets):
        optimizer.zero_grad()
        if demo.args.idea:
            micro_batches = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
            loss = gpipe_step(stages[0], micro_batches, language_loss, like)
        else:
            loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    # Each rank compares its own stages. In place of the others it has those of the plain model.
    compared = split(demo.model, num_stages)
    compared[demo.rank :: demo.ranks] = stages
    parameters = list(nn.ModuleList(compared).parameters())
    demo.train(step, lambda: ([parameter.grad for parameter in parameters], parameters))
    sent = (2 * v - 1) * m * like.nbytes if demo.ranks > 1 else 0
    formula = "(2v-1)m·bsh" if demo.ranks > 1 else "0"
    status = demo.report(held(pipeline.parameters(), optimizer), formula, sent)
    if not demo.args.idea:
        show_timelines(demo, pipeline)
    return status


def check_flags(demo, num_stages):
    m = demo.args.microbatches
    sequences = 8 * demo.ranks
    num_blocks = len(language_model()) - 3  # all but the embedding, the norm and the head
    if m < 1 or sequences % m:
        demo.stop(f"--microbatches {m} does not divide {sequences} sequences; take a divisor")
    if num_stages > num_blocks + 1:
        demo.stop(f"{num_stages} stages for {num_blocks} blocks; take at most {num_blocks + 1}")


class TimedPipeline(Pipeline):
    """Records (action, start, end) of each action of the last step, in seconds."""

    def step(self, inputs=None, targets=None):
        self.timeline = []
        self.began = self.clock()
        return super().step(inputs, targets)

    def run(self, action, tensors):
        start = self.clock() - self.began
        outputs = super().run(action, tensors)
        self.timeline.append((str(action), start, self.clock() - self.began))
        return outputs

    def clock(self):
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # not the streams that wait for other ranks
        return time.perf_counter()


def split(model, num_stages):
    """Split the demo's model into stages with about as many blocks each.

    The first stage also has the embedding, and the last one has the norm and the head.
    """
    num_blocks = len(model) - 3
    inner = [1 + num_blocks * stage // num_stages for stage in range(1, num_stages)]
    cuts = [0, *inner, len(model)]
    return [model[a:b] for a, b in itertools.pairwise(cuts)]


def show_timelines(demo, pipeline):
    """Show what simulate() predicts, and what each rank measures in one more step.

    A measured bubble a few points above the prediction is good. If it is far above, the stages are
    unequal, transfers are slow, or ranks share a processor.
    """
    dist.barrier()  # so that all ranks begin at about the same time
    pipeline.step(*demo.batch(0))  # in the last step, counting bytes took time
    measured = [None] * demo.ranks
    dist.all_gather_object(measured, pipeline.timeline)
    times = simulate(pipeline.schedule)
    predicted = [
        [(name, times.start[name], times.end[name]) for name in map(str, actions)]
        for actions in pipeline.schedule
    ]
    demo.show("|0F2-- is stage 0's forward on micro-batch 2. The text is cut if there is no room.")
    demo.show("F: forward, B: backward, I and W: its halves for input and weights, blank: bubble")
    draw(demo, "predicted, if B takes as long as two F", predicted)
    draw(demo, "measured", measured)
    if demo.args.trace and demo.rank == 0:
        Path(demo.args.trace).write_text(json.dumps({"traceEvents": trace_events(measured)}))


def draw(demo, title, rows, width=100):
    """rows: (action, start, end) of each rank."""
    total = max(end for row in rows for _, _, end in row)
    busy = sum(end - start for row in rows for _, start, end in row)
    demo.show(f"{title}: bubble {1 - busy / total / len(rows):.0%}")
    for rank, row in enumerate(rows):
        line = ""
        for action, start, end in row:
            left = round(start / total * width)
            right = round(end / total * width)
            box = f"|{action}".ljust(right - left, "-")
            line = line.ljust(left) + box[: right - left]
        demo.show(f"  rank {rank:<4} {line}")


def trace_events(rows):
    events = []
    for rank, row in enumerate(rows):
        for action, start, end in row:
            event = {"name": action, "ph": "X", "pid": 0, "tid": rank}  # times in microseconds
            events.append(event | {"ts": 1e6 * start, "dur": 1e6 * (end - start)})
    return events


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


class Demo:
    """Trains with a technique, trains the same model on one device, and compares the two."""

    def __init__(self, description, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dtypes = ["float64", "float32", "bfloat16"]
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.error = self.stop
        shared = {
            "--idea": {"action": "store_true", "help": "train with section 1 alone"},
            "--steps": {"type": int, "default": steps, "help": "of training"},
            "--seed": {"type": int, "default": 0, "help": "of the model and the batches"},
            "--device": {"choices": devices, "default": devices[-1]},
            "--dtype": {"choices": dtypes, "help": "(default: that of the claim)"},
            "--data": {"metavar": "FILE", "default": argparse.__file__, "help": "to train on"},
        }
        for flag, options in (shared | (flags or {})).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.steps = f"{self.args.steps} step{'s' * (self.args.steps > 1)}"
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        gpu = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        self.device = torch.device("cpu" if self.args.device == "cpu" else f"cuda:{gpu}")
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        """End with status 2. Every rank finds the same error, so one per machine prints it."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr, flush=True)
            # torchrun ends its own report with the message in this file.
            error = json.dumps({"message": f"error: {message}", "timestamp": time.time()})
            Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).write_text(error)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends
        os._exit(2)

    def show(self, line=""):
        if self.rank == 0:
            print(line, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Return a copy of the plain model. One device takes the batch in `parts`."""
        join_world(self.device)
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        dtype = "float64" if self.tolerance else "float32"
        if self.args.dtype not in (None, dtype, "float64"):
            self.tolerance = torch.inf  # claims nothing
        dtype = self.args.dtype or dtype
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        name += " idea" if self.args.idea else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        where = f"{self.device.type}/{dist.get_backend()}"
        size = sum(map(torch.numel, self.model.parameters())) / 1e6
        self.show(f"{name} · {ranks} · {where} · {size:.1f}M parameters in {dtype} · {self.steps}")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def train(self, step, whole):
        """Compare gradients and parameters, `whole()`, after each step(inputs, targets) -> loss."""
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = []  # the largest of each tensor, in each step
        for number in range(self.args.steps):
            batch = self.batch(number)
            start = self.now()
            is_last = number + 1 == self.args.steps
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            loss = torch.tensor([x for x in losses if x is not None], dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                self.differences.append((ours - theirs).abs().max().item())
            if number % -(-self.args.steps // 3) == 0:  # three lines in all
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss.item():.3f}")

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            losses.append(language_loss(self.model(x), y))
            losses[-1].backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_div_(gradients, self.parts)  # 3 parts would round differently before the sum
        self.optimizer.step()
        return [torch.stack(losses).mean().detach().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def report(self, held_here, formula, sent):
        """Print the result (docs/running.md). Return 1 if a rank differs."""
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        elif self.tolerance == torch.inf:
            verdict = f"differ by up to {largest:.0e}"
        plain = held(self.model.parameters(), self.optimizer)
        params, grads, state, *plain = (f"{size / 1e6:.1f}" for size in [*held_here, *plain])
        held_line = f"params {params} MB   grads {grads} MB   optimizer {state} MB"
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device loss, gradients and parameters {verdict} over {self.steps}")
        self.show(f"held/rank   {held_line}      (1 device: {' / '.join(plain)})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.head_dim = C // heads
        self.norm1 = nn.LayerNorm(C)
        self.norm2 = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)
        self.linear1 = nn.Linear(C, 4 * C)
        self.linear2 = nn.Linear(4 * C, C)

    def forward(self, x):  # (batch, time, C)
        q, k, v = map(self.split_heads, self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))

    def split_heads(self, x):  # (batch, time, C) to (batch, heads, time, head_dim)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def language_model(C=192, heads=6, layers=4, V=256):
    blocks = [Block(C, heads) for _ in range(layers)]
    # No position embedding: the causal mask alone tells positions apart.
    return nn.Sequential(nn.Embedding(V, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends. Collectives count as their ring algorithms send."""

    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_uneven = name == "alltoall_base_" and args[4]  # such exchanges do not count
        if name == "send":
            self.total += args[0][0].nbytes
        elif "c10d" in func.namespace and name != "recv_" and not is_uneven:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            N = dist.ProcessGroup.unbox(group).size()
            inputs = args[0] if args[1] is group else args[1]  # outputs may come first
            # How often the inputs go around the ring. An operator that is not named counts once.
            rounds = {"allreduce_": 2, "allgather_": N, "_allgather_base_": N}.get(name, 1)
            size = sum(tensor.nbytes for tensor in tree_leaves(inputs))
            self.total += rounds * size * (N - 1) / N
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def join_world(device):
    """Connect the ranks, unless they are connected: by NCCL if each has a GPU of its own."""
    if dist.is_initialized():
        return
    options = {"backend": "gloo", "timeout": timedelta(seconds=120)}
    world = dist.HashStore(), 0, 1  # without torchrun there is one rank
    if "RANK" in os.environ:
        world = next(dist.rendezvous("env://", timeout=options["timeout"]))
    store, rank, ranks = world
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A rank may see no GPU but its own, so only its UUID says whether another rank has it, too.
        store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(device).uuid))
        gpus = {store.get(f"gpu {number}") for number in range(ranks)}
        if len(gpus) == ranks or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            options |= {"backend": "nccl", "device_id": device}
            os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # torch 2.7 may hang
    dist.init_process_group(store=store, rank=rank, world_size=ranks, **options)


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

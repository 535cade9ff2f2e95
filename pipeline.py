"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

A model that is cut into p stages takes 1/p of the memory on each rank, but a stage must wait for
the one before it. So the batch is cut into m micro-batches: while rank 1 works on the first one,
rank 0 works on the second. In a step, each rank runs the forward of its stage on every micro-batch
and sends the output to the next rank. When the gradient of that output has come back, it runs the
backward and sends the gradient of its input to the previous rank.

A schedule is the order in which a rank does this. Here p = 3, m = 4, and time runs from left to
right. F2 is the forward of micro-batch 2. B2 is its backward, which takes about two forwards:

    GPipe: all forwards, then all backwards         1F1B: each backward as soon as it can run
    rank 0  F0F1F2F3            B0..B1..B2..B3..    F0F1F2        B0..F3B1..  B2..  B3..
    rank 1    F0F1F2F3      B0..B1..B2..B3..          F0F1    B0..F2B1..F3B2..  B3..
    rank 2      F0F1F2F3B0..B1..B2..B3..                F0B0..F1B1..F2B2..F3B3..

In the blanks the ranks wait. The bubble is the share of all ranks' time that is blank. 1F1B has the
same bubble as GPipe, but keeps the activations of at most p micro-batches instead of m. Three more
schedules:

    naive              A micro-batch goes forward and backward through all ranks before the next.
    interleaved_1f1b   Each rank has v smaller stages: stage s is on rank s mod p. A micro-batch
                       reaches the last rank v times as fast.
    zero_bubble        B is split into I and W. W computes the gradients of the weights of linear
                       layers, and I computes all others, such as that of the stage's input. The
                       previous rank waits only for I, so W can run in the bubble.

Cost per rank; Ψ parameters, bsh elements in the activations of a micro-batch:

                       parameters   bubble             micro-batches     elements sent by
                                                       kept on rank 0    an inner rank per step
    naive              Ψ/p          1 - 1/p            1                 2·m·bsh
    gpipe              Ψ/p          (p-1)/(m+p-1)      m                 2·m·bsh
    1f1b               Ψ/p          (p-1)/(m+p-1)      min(p, m)         2·m·bsh
    interleaved_1f1b   Ψ/p          (p-1)/(vm+p-1) *   more than 1f1b    2·v·m·bsh
    zero_bubble        Ψ/p          (p-1)/(3m+p-1) **  min(p, m)         2·m·bsh

    * if m ≥ p   ** if m ≥ p, and F, I and W take equally long

The first rank sends no gradients and the last no activations, so each of them sends m·bsh less.

Run:      torchrun --nproc-per-node 2 pipeline.py --schedule zero_bubble    (or: python pipeline.py)
Papers:   GPipe, arXiv 1811.06965; 1F1B and interleaved 1F1B, 2104.04473, section 2.2;
          zero bubble, 2401.10241, section 2 (its schedule ZB-H1)
Mirrors:  torch.distributed.pipelining, whose CSV files of schedules this file reads and writes
Left out: Tied parameters, data parallelism, clipping and means over unmasked tokens: see
          parallel_3d.py. step() returns neither the outputs of the last stage nor the gradients of
          the batch's inputs. If a schedule has I and W, its stages must not call
          torch.autograd.grad() or backward() themselves. The inputs of their linear layers stay in
          memory until W, also inside an activation checkpoint, and must not change in place.

The demo draws two timelines. simulate() predicts the first, and the ranks have measured the second.
If they say "bubble 20%" and "bubble 23%", the ranks waited for 23% of the step. The prediction
assumes equal stages, B = 2F and transfers that take no time. A measured bubble a few points above
the prediction is good. If it is far above, the stages are unequal, transfers are slow, or ranks
share a processor. More micro-batches or another schedule lower both numbers.
"""

import argparse
import collections
import copy
import inspect
import itertools
import json
import os
import re
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Imported now, because a later import would keep the process group alive in default arguments.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: GPipe with blocking sends.


def start_transfer(operation, tensor, peer, group):
    """Start one send or receive (`dist.isend` or `dist.irecv`). Return the work to wait for.

    Over NCCL, a bare isend would create a communicator for the two ranks in the middle of a step.
    A batch of transfers uses the communicator of the group. Each batch has one transfer here. With
    several, the sender and the receiver would have to form the same batches.
    """
    transfer = dist.P2POp(operation, tensor, group=group, group_peer=peer)
    return dist.batch_isend_irecv([transfer])[0]


def gpipe_step(stage, num_microbatches, loss_fn, inputs, targets, like, process_group=None):
    """Forward and backward of a batch. Return its mean loss on the last rank, None elsewhere.

    like: a tensor with the shape and dtype of what each stage but the first receives.
    """
    rank = dist.get_rank(process_group)
    last = dist.get_world_size(process_group) - 1
    sizes = (num_microbatches, -1)  # unflatten() raises an error if micro-batches are not equal
    micro_batches = zip(inputs.unflatten(0, sizes), targets.unflatten(0, sizes), strict=True)
    saved = []  # (input, output) of each micro-batch, from its forward to its backward
    for micro_input, target in micro_batches:
        x = micro_input
        if rank > 0:
            x = torch.empty_like(like, requires_grad=True)
            # detach() shares x's memory. Autograd does not see that the message is written there.
            start_transfer(dist.irecv, x.detach(), rank - 1, process_group).wait()
        y = stage(x)
        if rank < last:
            start_transfer(dist.isend, y.detach(), rank + 1, process_group).wait()
        else:
            y = loss_fn(y, target) / num_microbatches
        saved.append((x, y))
    for x, y in saved:
        gradient = torch.ones_like(y)  # on the last rank y is the loss, and its gradient is 1
        if rank < last:
            start_transfer(dist.irecv, gradient, rank + 1, process_group).wait()
        y.backward(gradient)
        if rank > 0:
            start_transfer(dist.isend, x.grad, rank - 1, process_group).wait()
    return sum(y.detach() for _, y in saved) if rank == last else None


# --------------------------------------------------------------------------------------------------
# 2. Schedules. A schedule is a list of actions for each rank. An action is a string of the stage,
#    the kind (F, B, I or W) and the micro-batch: "2F0" is the forward of stage 2 on micro-batch 0.

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def forwards_then_backwards(stages, micro_batches):
    """Return all forwards, then all backwards, of the micro-batches on a rank with these stages."""
    forwards = [f"{stage}F{i}" for stage in stages for i in micro_batches]
    backwards = [f"{stage}B{i}" for stage in reversed(stages) for i in micro_batches]
    return forwards + backwards


def one_forward_one_backward(actions, warmup):
    """Return `warmup` forwards, then forwards and backwards in turn, then the other backwards."""
    forwards = [action for action in actions if "F" in action]
    backwards = (action for action in actions if "B" in action)
    reordered = forwards[:warmup]
    for forward in forwards[warmup:]:
        reordered += [forward, next(backwards)]
    return [*reordered, *backwards]


def split_backwards(actions, delay):
    """Return zero bubble's actions: each B becomes an I, and its W runs `delay` backwards later."""
    split = []
    waiting = collections.deque()  # each W whose I is in `split`, but which is not there itself
    for action in actions:
        split.append(action.replace("B", "I"))
        if "B" in action:
            waiting.append(action.replace("B", "W"))
        if len(waiting) > delay:
            split.append(waiting.popleft())
    return [*split, *waiting]


def build_schedule(name, num_ranks, num_microbatches, stages_per_rank=1):
    """Return a list of actions for each rank. Stage s is on rank s % num_ranks."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name not in SCHEDULES or min(p, m, v) < 1:
        raise ValueError(
            f"no schedule {name!r} of {p} ranks, {m} micro-batches and {v} stages per rank: "
            f"each number must be at least 1, and the name one of {', '.join(SCHEDULES)}"
        )
    # A rank runs all forwards and backwards of a round of micro-batches, then those of the next. In
    # "naive" each micro-batch is a round, and in "gpipe" all of them are one. Otherwise a round has
    # about p: when rank 0 has run a stage on p, the first is ready for rank 0's next stage.
    num_rounds = {"naive": m, "gpipe": 1}.get(name, max(1, m // p))
    rounds = torch.arange(m).tensor_split(num_rounds)
    schedule = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        actions = []
        for micro_batches in rounds:
            actions += forwards_then_backwards(stages, micro_batches.tolist())
        if name not in ("naive", "gpipe"):
            # A rank waits for the next rank's backward, so it first runs one forward more than the
            # next rank. If stages are interleaved, it runs two more, as in Megatron-LM and PyTorch,
            # to leave time for transfers. Each stage before its last also runs a round of forwards.
            forwards_per_rank = 2 if name == "interleaved_1f1b" else 1
            warmup = forwards_per_rank * (p - 1 - rank) + (v - 1) * len(rounds[0])
            actions = one_forward_one_backward(actions, warmup)
        if name == "zero_bubble":
            # In 1F1B, rank r keeps the activations of p - r micro-batches. With r more waiting for
            # W, every rank keeps p.
            actions = split_backwards(actions, delay=rank)
        schedule.append(actions)
    return schedule


def parse(action):
    """Return the stage, the kind and the micro-batch: 2, "F" and 0 for "2F0"."""
    stage, kind, micro_batch = re.split("([FBIW])", action)
    return int(stage), kind, int(micro_batch)


def input_key(action):
    """Return the key of an action's input: "2F0" for "2F0", and "2B0" for "2B0", "2I0" and "2W0".

    B and I share a key, so that output_key() does not need to know which of them the schedule has.
    I takes the gradients, then leaves the input of W under the same key.
    """
    return re.sub("[IW]", "B", action)


def output_key(action, last_stage):
    """Return the input_key() of the action that takes the output: "3F0" for "2F0", "1B0" for "2B0".

    The last stage's forward gives its own backward the gradient to begin with. For the first
    stage's backward, return the key of a stage -1, which no rank has. For W, return None: it has no
    output, but adds to .grad.
    """
    stage, kind, i = parse(action)
    if kind == "W":
        return None
    if kind != "F":
        return f"{stage - 1}B{i}"
    if stage < last_stage:
        return f"{stage + 1}F{i}"
    return f"{stage}B{i}"


# --------------------------------------------------------------------------------------------------
# 3. What a schedule costs, without running it.

COST = {"F": 1, "B": 2, "I": 1, "W": 1}


class Simulation(NamedTuple):
    start: dict  # action -> time
    end: dict  # action -> time
    bubble_fraction: float  # the share of all ranks' time in which they wait
    peak_activations: list  # by rank: the most forwards that await their backward at one time


def simulate(schedule, cost=COST):
    """Compute when each action starts and ends, if each starts as soon as it can.

    A rank keeps the order of its actions. Transfers take no time. Raises ValueError if the schedule
    is incomplete or deadlocks.
    """
    schedule = compute_only(schedule)
    last_stage = max(rank_of_stages(schedule))
    cost = COST | cost
    start = {}
    end = {}
    # input_key -> the time since when the input is there
    available = {f"0F{i}": 0 for i in range(count_microbatches(schedule))}
    free_since = [0] * len(schedule)  # by rank: the end of its last action
    waiting = [collections.deque(actions) for actions in schedule]
    while any(waiting):
        ended_before = len(end)
        for rank, actions in enumerate(waiting):
            while actions and input_key(actions[0]) in available:
                action = actions.popleft()
                start[action] = max(free_since[rank], available[input_key(action)])
                end[action] = start[action] + cost[parse(action)[1]]
                free_since[rank] = end[action]
                available[output_key(action, last_stage)] = end[action]
        if len(end) == ended_before:
            stuck = [actions[0] for actions in waiting if actions]
            raise ValueError(f"the schedule deadlocks: {' and '.join(stuck)} would wait forever")
    busy = sum(end.values()) - sum(start.values())
    bubble_fraction = 1 - busy / (max(free_since) * len(schedule))
    return Simulation(start, end, bubble_fraction, [peak_alive(actions) for actions in schedule])


def peak_alive(actions):
    """Return how many micro-batches are alive at most, from F to the end of B or W.

    A micro-batch counts once for each stage.
    """
    changes = [1 if "F" in action else -1 for action in actions if "I" not in action]
    return max(itertools.accumulate(changes), default=0)


def count_microbatches(schedule):
    return sum(action.startswith("0F") for action in itertools.chain(*schedule))


def rank_of_stages(schedule):
    """Return {stage: rank}.

    Raise ValueError unless each forward is followed by B, or by I and W, on the stage's only rank.
    """
    rank_of = {}
    kinds = collections.defaultdict(str)  # (stage, micro-batch, rank) -> the kinds of its actions
    for rank, actions in enumerate(schedule):
        for stage, kind, i in map(parse, actions):
            rank_of[stage] = rank
            kinds[stage, i, rank] += kind
    for (stage, i, rank), done in kinds.items():
        if done not in ("FB", "FIW") or rank != rank_of[stage]:
            raise ValueError(
                f"rank {rank} runs {done} of stage {stage} for micro-batch {i}; it must run F B or "
                "F I W, and no other rank may run this stage"
            )
    return rank_of


# --------------------------------------------------------------------------------------------------
# 4. Transfers between ranks: in which order, and how.


def plan(schedule, rank):
    """Return (action, output key, source, destination) of each action that concerns the rank.

    The rank is the source, which runs the action, or the destination, which receives its output.
    The destination is None if no action takes the output.

    All ranks follow one order: actions by their simulated end, and each transfer right after its
    action. An action or a transfer waits only for those before it in this order. So the first one
    that has not ended can always run, and nothing deadlocks. NCCL needs such an order, because it
    runs a rank's transfers one by one, and a send ends only when its receiver takes it.
    """
    rank_of = rank_of_stages(schedule)
    last_stage = max(rank_of)
    end = simulate(schedule).end
    program = []
    for action in sorted(end, key=end.get):
        out_key = output_key(action, last_stage)
        source = rank_of[parse(action)[0]]
        destination = rank_of.get(parse(out_key)[0]) if out_key else None
        if rank in (source, destination):
            program.append((action, out_key, source, destination))
    return program


def meta_of(tensor):
    """Return the arguments with which torch.zeros allocates such a tensor on the receiver.

    Return None for None, which is the gradient of an output that the next stage does not use.
    """
    if tensor is None:
        return None
    return {"size": tensor.shape, "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}


class Transfers:
    """Sends the outputs of actions, and receives them as inputs of this rank's actions."""

    def __init__(self, group, device):
        # Gloo sends from the host's memory. dist.get_backend_config() names each device's backend.
        # dist.get_backend() is "undefined" after init_process_group() without a backend.
        if f"{device.type}:gloo" in dist.get_backend_config(group):
            device = torch.device("cpu")
        self.group = group
        self.device = device  # of the messages; the stages may be on another
        self.metadata = {}  # input_key -> meta_of() of each tensor, known to both ranks
        self.sends = collections.deque()  # (work, message), which must live until the work is over
        self.receives = {}  # input_key -> works to wait for before the tensors are used
        self.object_kwargs = {"group": group, "device": device}  # of send_object_list
        if "use_batch" in inspect.signature(dist.send_object_list).parameters:
            self.object_kwargs["use_batch"] = True  # start_transfer() says why

    def send(self, key, tensors, destination):
        """Start to send the tensors, and before them their metadata if this is the first time.

        After a failure `tensors` is empty. The receiver waits for messages all the same. It gets
        zeros of the known shapes, or empty metadata, after which no message follows.
        """
        if key not in self.metadata:
            self.metadata[key] = list(map(meta_of, tensors))
            dist.send_object_list([self.metadata[key]], group_dst=destination, **self.object_kwargs)
        tensors = tensors or self.new_tensors(key)
        for tensor in filter(torch.is_tensor, tensors):  # a gradient may be None
            message = tensor.detach().to(self.device).contiguous()
            work = start_transfer(dist.isend, message, destination, self.group)
            self.sends.append((work, message))
        # A message takes memory until it is received. A sender is rarely more than 4 ahead.
        self.wait_for_sends(at_most=4)

    def wait_for_sends(self, at_most=0):
        while len(self.sends) > at_most:
            work, _ = self.sends.popleft()
            work.wait()

    def receive(self, key, source):
        """Start to receive. Return the tensors, or an empty list after a failure."""
        if key not in self.metadata:
            received = [None]
            dist.recv_object_list(received, group_src=source, **self.object_kwargs)
            self.metadata[key] = received[0]
        tensors = self.new_tensors(key)
        self.receives[key] = [
            start_transfer(dist.irecv, tensor.detach(), source, self.group)
            for tensor in filter(torch.is_tensor, tensors)
        ]
        return tensors

    def new_tensors(self, key):
        """Return zeros of the shapes that the metadata gives, and None for None."""
        return [meta and torch.zeros(**meta, device=self.device) for meta in self.metadata[key]]


# --------------------------------------------------------------------------------------------------
# 5. The pipeline, which runs any schedule.


class Pipeline(nn.Module):
    """Runs this rank's stages, forward and backward, in the order that a schedule gives.

    stages: a module, or the list of this rank's modules in stage order. A stage returns a tensor or
        a tuple of tensors, which are the arguments of the next stage.
    schedule: a name for build_schedule, or a list of actions for each rank in PyTorch's notation.
    num_microbatches: torch.chunk splits the batch into that many along dimension 0.
    loss_fn(output, target): returns the mean loss of a micro-batch.
    """

    def __init__(self, stages, schedule, num_microbatches, loss_fn, process_group=None):
        super().__init__()
        stages = stages if isinstance(stages, (list, nn.ModuleList)) else [stages]
        self.schedule = agree_on_schedule(schedule, num_microbatches, len(stages), process_group)
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._program = plan(self.schedule, self._rank)
        rank_of = rank_of_stages(self.schedule)
        own = sorted(stage for stage, rank in rank_of.items() if rank == self._rank)
        self.stages = nn.ModuleDict(zip(map(str, own), stages, strict=True))
        ddp = nn.parallel.DistributedDataParallel
        has_ddp = any(isinstance(module, ddp) for module in self.modules())
        if any(gather(has_ddp, process_group)):
            raise ValueError(
                "PyTorch's DistributedDataParallel averages the gradients of one micro-batch only; "
                "pass its .module, and average the gradients after step()"
            )
        self._last_stage = max(rank_of)
        self.device = agree_on_device(self.parameters(), process_group)  # of the stages
        self._transfers = Transfers(process_group, self.device)
        # takes the place of F.linear during F and I, for these weights
        self._split_linear = partial(split_linear, set(self.parameters()))
        self._batch_meta = None  # of the last step, from which _start() sees what has changed
        self.timeline = []  # (action, start, end) of the last step, in seconds
        self.clock = time.perf_counter  # of the timeline: on a GPU this times launches only

    def step(self, inputs=None, targets=None):
        """Forward and backward of a batch. Under torch.no_grad() only the forward.

        inputs: a tensor or a tuple of tensors, which only the rank of the first stage reads.
        targets: a tensor, which only the rank of the last stage reads. That rank gets the mean loss
        back, and the others get None. Adds to .grad what a loop over the micro-batches on one
        device adds. An error on one rank is raised there, and as a RuntimeError on the others.
        """
        self._start(inputs, targets)
        for action, out_key, source, destination in self._program:
            if "F" not in action and not torch.is_grad_enabled():
                continue
            if source != self._rank:  # another rank runs the action and sends its output here
                self._inputs[out_key] = self._transfers.receive(out_key, source)
                continue
            self._run(action, out_key)  # its output is now in self._inputs[out_key]
            if destination not in (source, None):
                self._transfers.send(out_key, self._inputs.pop(out_key, []), destination)
        self._transfers.wait_for_sends()
        self._raise_or_count()
        return torch.stack(self._losses).sum() if self._losses else None

    def _start(self, inputs, targets):
        """Split the batch, and forget the metadata if any rank's inputs or parameters changed."""
        self._inputs = {}  # input_key -> the tensors that an action takes, computed or received
        self._graphs = {}  # (stage, micro-batch) -> inputs and outputs of its forward
        self._losses = []
        self._failure = None  # after an error: (exception, text for the other ranks)
        self.timeline = []
        try:
            self._split_batch(inputs, targets)
        except Exception as error:
            self._failure = error, f"rank {self._rank}: {error}"
        # All of batch_meta affects the shapes, dtypes and requires_grad of what the stages send.
        grad_enabled = torch.is_grad_enabled()
        tensors = itertools.chain(*self._inputs.values(), self.parameters())
        device_type = self.device.type
        autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        batch_meta = [grad_enabled, autocast, *map(meta_of, tensors)]
        changed = batch_meta != self._batch_meta
        self._batch_meta = batch_meta
        num_grad, num_changed = self._raise_or_count(grad_enabled, changed)
        if num_changed:
            self._transfers.metadata = {}
        ranks = len(self.schedule)
        if 0 < num_grad < ranks:
            raise ValueError(
                f"{num_grad} of {ranks} ranks have gradients enabled; all or none must"
            )
        self._began = self.clock()  # at about the same time on all ranks

    def _split_batch(self, inputs, targets):
        m = self.num_microbatches
        if "0" in self.stages:
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            split = [chunk_exactly("inputs", tensor, m) for tensor in inputs]
            for i, tensors in enumerate(zip(*split, strict=True)):
                self._inputs[f"0F{i}"] = tensors
        if str(self._last_stage) in self.stages:
            self._targets = chunk_exactly("targets", targets, m)
            self._num_targets = len(targets)

    def _run(self, action, out_key):
        """Run an action on its inputs, and keep its output as the input of the next action."""
        stage, kind, i = parse(action)
        in_key = input_key(action)
        inputs = self._inputs.pop(in_key, [])  # empty after a failure on any rank
        for work in self._transfers.receives.pop(in_key, ()):
            work.wait()
        if not inputs or self._failure:
            return  # step() still sends and receives, so that no rank hangs
        began = self.clock()
        if f"{stage}I{i}" in self.schedule[self._rank]:
            F.linear = self._split_linear  # section 7
        try:
            if kind == "W":
                backward_for_weights(*inputs)
            elif kind == "F":
                self._keep(out_key, self._forward(stage, i, inputs))
            else:
                self._keep(out_key, self._backward(stage, i, inputs))
                self._inputs[in_key] = [split_linear.deferred]  # for W, if the schedule has one
        except Exception as error:
            self._failure = error, f"rank {self._rank} failed in {action} with {error!r}"
        finally:
            F.linear = linear
            split_linear.deferred = None
        self.timeline.append((action, began - self._began, self.clock() - self._began))

    def _keep(self, out_key, outputs):
        """Keep the outputs of an action until this rank uses or sends them."""
        metadata = list(map(meta_of, outputs))
        # The receiver allocates what the first send's metadata says. Before it there is none.
        expected = self._transfers.metadata.get(out_key, metadata)
        if metadata != expected:
            raise RuntimeError(
                f"its output was {expected}, and is now {metadata}; it may only change when the "
                "inputs, the parameters or autocast change"
            )
        self._inputs[out_key] = outputs

    def _forward(self, stage, i, inputs):
        """Return what the next action takes: the outputs, or the gradient of the loss, 1."""
        inputs = [x.detach().to(self.device).requires_grad_(x.requires_grad) for x in inputs]
        output = self.stages[str(stage)](*inputs)
        if stage == self._last_stage:
            loss = self._weighted_loss(output, self._targets[i].to(self.device))
            outputs = (loss,)
            next_inputs = [torch.ones_like(loss)]
        else:
            outputs = next_inputs = output if isinstance(output, tuple) else (output,)
        if not outputs or not all(map(torch.is_tensor, outputs)):
            types = [type(output).__name__ for output in outputs]
            raise ValueError(f"the stage returned {types}; return a tensor or a tuple of tensors")
        if torch.is_grad_enabled():
            self._graphs[stage, i] = inputs, outputs
        return next_inputs

    def _weighted_loss(self, output, target):
        """Return the loss times the micro-batch's share of the batch. This alone scales it."""
        loss = self.loss_fn(output, target) * (len(target) / self._num_targets)
        if loss.numel() != 1:  # backward would take the sum, without an error
            raise ValueError(f"loss_fn returned {tuple(loss.shape)}; return the mean, a scalar")
        self._losses.append(loss.detach())
        return loss

    def _backward(self, stage, i, gradients):
        """Return the gradients of the stage's inputs, for B and I: None for an unused input."""
        inputs, outputs = self._graphs.pop((stage, i))
        pairs = zip(outputs, gradients, strict=True)
        used = [output for output, gradient in pairs if gradient is not None]
        gradients = [gradient.to(self.device) for gradient in gradients if gradient is not None]
        split_linear.deferred = []
        torch.autograd.backward(used, gradients)
        return [x.grad for x in inputs]

    def _raise_or_count(self, *flags):
        """Raise on every rank if one has failed. Return on how many ranks each flag is True.

        The host waits for the counts.
        """
        flags = [self._failure is not None, *flags]
        counts = torch.tensor(flags, dtype=torch.int64, device=self._transfers.device)
        dist.all_reduce(counts, group=self._group)
        num_failed, *counts = counts.tolist()
        if num_failed:
            self._batch_meta = None  # so that the next step begins without metadata
            error, text = self._failure or (None, None)
            texts = filter(None, gather(text, self._group))  # of the ranks that failed
            raise error or RuntimeError(next(texts))
        return counts


# --------------------------------------------------------------------------------------------------
# 6. What the constructor needs.


def gather(value, group):
    """Return the values of all ranks, in rank order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree_on_schedule(schedule, num_microbatches, num_stages, group):
    """Return the schedule as lists of actions. A wrong argument on one rank raises on all."""
    given = gather((schedule, num_microbatches, num_stages), group)
    actions = schedule
    if isinstance(schedule, str):
        actions = build_schedule(schedule, len(given), num_microbatches, num_stages)
    actions = compute_only(actions)
    stages_on = collections.Counter(rank_of_stages(actions).values())
    m = count_microbatches(actions)
    needed = [(schedule, m, stages_on[rank]) for rank in range(len(actions))]
    if given != needed:
        raise ValueError(
            f"the schedule needs {[each[1:] for each in needed]} (micro-batches, stages) by rank; "
            f"the ranks have {[each[1:] for each in given]}, or their schedules differ"
        )
    return actions


def agree_on_device(parameters, group):
    """Return the device of the parameters, or if there are none, the other ranks' device type.

    All ranks must send over the same backend, so a stage without parameters uses the GPU too.
    """
    device = next((parameter.device for parameter in parameters), None)
    types = filter(None, gather(device and device.type, group))
    return device or torch.device(next(types, "cpu"))


def chunk_exactly(name, tensor, number):
    """Return the micro-batches. Raise ValueError if torch.chunk returns another number of them."""
    if not torch.is_tensor(tensor):
        type_name = type(tensor).__name__
        raise ValueError(f"{name} must be a tensor on the rank that takes them, not {type_name}")
    chunks = tensor.chunk(number)
    if len(chunks) != number:
        raise ValueError(
            f"torch.chunk splits {len(tensor)} samples of {name} into {len(chunks)} micro-batches, "
            f"not into {number}; take another number of samples or of micro-batches"
        )
    return chunks


# --------------------------------------------------------------------------------------------------
# 7. Refinement: the backward of zero bubble, in two parts.

linear = F.linear


def split_linear(parameters, x, weight, bias=None):
    """F.linear, but its backward leaves the gradient of the weight to W.

    PyTorch's modules call F.linear. During F and I, this function takes its place on all threads,
    because activation checkpointing runs the forward again in I, on a thread of autograd.

    If the weight has another use, which is not split, I adds the gradient of that use, and W adds
    the others later. So the sum is not bitwise that of one device.
    """
    # I computes the gradient if something reads it before W runs: a hook, such as DDP's, or
    # weight_norm or FSDP, which compute the weight from a parameter.
    has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    can_wait = weight in parameters and not has_hooks
    needs_gradients = torch.is_grad_enabled() and weight.requires_grad and x.requires_grad
    # A vector or a strided x would be rounded differently below.
    if not (can_wait and needs_gradients and x.dim() > 1 and x.is_contiguous()):
        return linear(x, weight, bias)
    rows = x.flatten(end_dim=-2)
    version = rows._version  # how often x has been changed in place
    y = linear(rows, weight.detach(), bias)

    def leave_to_w(grad_y):
        if split_linear.deferred is None:
            raise RuntimeError("a stage ran a backward in its forward; use a schedule without W")
        if grad_y is not None:  # None: the loss does not depend on y
            split_linear.deferred.append((weight, rows.detach(), version, grad_y))

    # The hook is on y, not on its view: the stage may change the view in place.
    y.register_hook(leave_to_w)
    return y.unflatten(0, x.shape[:-1])


# In it the running I leaves to W the (weight, rows, version, grad_y) of each call.
split_linear.deferred = None


def backward_for_weights(deferred):
    """W: add grad_yᵀ x to the .grad of the weight in y = x weightᵀ."""
    weights = []
    gradients = []
    for weight, rows, version, grad_y in deferred:
        if rows._version != version:  # autograd checks only what it saves itself
            raise RuntimeError(
                "a stage changed the input of a linear layer in place after the layer had used it; "
                "change a copy, or use a schedule without W"
            )
        weights.append(weight)
        # Under autocast, y and its gradient may have another dtype than x.
        gradients.append(grad_y.T @ rows.to(grad_y.dtype))
    # backward() of a leaf adds to its .grad. If layers share a weight, one call for all adds up its
    # gradients first, as a plain backward does.
    torch.autograd.backward(weights, gradients)


# --------------------------------------------------------------------------------------------------
# 8. Refinement: PyTorch's notation and CSV files.


def compute_only(schedule):
    """Return a schedule in PyTorch's notation, without idle cells and communication.

    "(0F4;7B0)OVERLAP_F_B" becomes two actions.
    """
    rows = [" ".join(filter(None, cells)) for cells in schedule]
    return [re.findall(r"\b\d+[FBIW]\d+\b", row) for row in rows]


def schedule_to_csv(schedule, path):
    """Write a line per rank, which PyTorch's _load_csv(path, format="compute_only") reads."""
    lines = map(",".join, compute_only(schedule))
    Path(path).write_text("\n".join(lines))


def schedule_from_csv(path):
    """Read what PyTorch's _dump_csv writes, in both of its formats."""
    lines = Path(path).read_text().splitlines()
    return compute_only([line] for line in lines)


# --------------------------------------------------------------------------------------------------
# Demo.


FLAGS = {
    "--schedule": {"choices": SCHEDULES, "default": "1f1b"},
    "--microbatches": {"type": int, "default": 4, "metavar": "M"},
    "--trace": {
        "metavar": "FILE",
        "help": "write the timeline as a Chrome trace in JSON, for ui.perfetto.dev",
    },
}


def main():
    demo = Demo(FLAGS)
    name = demo.args.schedule
    m = demo.args.microbatches
    v = 2 if name == "interleaved_1f1b" else 1
    num_stages = demo.ranks * v
    sequences = 8 * demo.ranks
    num_blocks = len(language_model()) - 3  # all but the embedding, the norm and the head
    if m < 1 or sequences % m:
        demo.stop(f"--microbatches {m} does not divide {sequences} sequences; take a divisor")
    if num_stages > num_blocks + 1:
        demo.stop(f"{num_stages} stages for {num_blocks} blocks; take at most {num_blocks + 1}")
    # A loss times a power of 1/2 is exact.
    model = demo.start(f"pipeline {name}", bitwise=m & (m - 1) == 0, parts=m)
    stages = split(model, num_stages)[demo.rank :: demo.ranks]
    pipeline = Pipeline(stages, name, m, language_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    # Each rank compares its own stages. In place of the others it has those of the plain model.
    compared = split(demo.model, num_stages)
    compared[demo.rank :: demo.ranks] = stages
    parameters = list(nn.ModuleList(compared).parameters())
    demo.train(step, lambda: ([parameter.grad for parameter in parameters], parameters))
    bsh = sequences // m * 64 * 192  # 64 tokens in a sequence, hidden size 192
    sent = (2 * v - 1) * m * bsh * parameters[0].itemsize if demo.ranks > 1 else 0
    formula = "(2v-1)m·bsh" if demo.ranks > 1 else "0"
    status = demo.report(held(pipeline.parameters(), optimizer), formula, sent)
    # The timelines are of one more step. In the last one, counting bytes took time.
    if demo.device.type == "cuda":
        pipeline.clock = clock_after_kernels
    pipeline.step(*demo.batch(0))
    show_timelines(demo, pipeline)
    return status


def clock_after_kernels():
    torch.cuda.current_stream().synchronize()
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
    """Show what simulate() predicts, and what each rank has measured."""
    measured = gather(pipeline.timeline, None)
    times = simulate(pipeline.schedule)
    predicted = [
        [(action, times.start[action], times.end[action]) for action in actions]
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

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        purpose = __doc__.partition("\n")[0]
        parser = argparse.ArgumentParser(description=purpose, conflict_handler="resolve")
        parser.error = self.stop
        parser.add_argument("--idea", action="store_true", help="train with section 1 alone")
        parser.add_argument("--steps", type=int, default=steps, help="of training")
        parser.add_argument("--seed", type=int, default=0, help="of the model and the batches")
        parser.add_argument("--device", choices=devices, default=devices[-1])
        dtypes = ["float64", "float32", "bfloat16"]
        parser.add_argument("--dtype", choices=dtypes, help="(default: that of the claim)")
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="to train on")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.device, self.backend = choose_device(self.args.device)
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
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends
        os._exit(2)

    def show(self, line=""):
        if self.rank == 0:
            print(line, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`.

        Bitwise claims are tested in float32, others in float64, unless --dtype says otherwise.
        """
        join_world(self.device, self.backend)
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        dtype = "float64" if self.tolerance else "float32"
        if self.args.dtype not in (None, dtype, "float64"):
            self.tolerance = torch.inf  # claims nothing
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, getattr(torch, self.args.dtype or dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        name += " idea" if self.args.idea else ""
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        model = f"{self.device.type}/{dist.get_backend()} · {size:.1f}M parameters"
        self.show(f"{name} · {world} · {model} · {self.args.steps} steps")
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
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
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
            losses = [loss for loss in losses if loss is not None]
            loss = torch.tensor(losses, dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                if not torch.equal(ours, theirs):
                    self.differences.append((ours - theirs).abs().max().item())
            if number % -(-self.args.steps // 3) == 0:  # three lines in all
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss.item():.3f}")

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in parameters:
            parameter.grad /= self.parts  # after the sum: 3 parts would round differently before it
        self.optimizer.step()
        gradients = [parameter.grad for parameter in parameters]
        return [torch.stack(losses).mean().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def report(self, held_here, formula, sent):
        """Print the result (docs/printed_lines.md). Return 1 if a rank differs."""
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        elif self.tolerance == torch.inf:
            verdict = f"differ by up to {largest:.0e}"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain)
        held_line = f"params {params}   grads {grads}   optimizer {state}      (1 device: {plain})"
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   {held_line}")
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

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "reduce_": (1, 0), "gather_": (1, 1)}
    RING |= {"allgather_": (1, 0), "_allgather_base_": (1, 0), "recv_": (0, 0)}
    RING |= {"alltoall_base_": (1, 1), "_reduce_scatter_base_": (1, 1)}
    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_uneven = name == "alltoall_base_" and args[4]  # such exchanges do not count
        if name == "send":
            self.total += args[0][0].nbytes
        elif "c10d" in func.namespace and not is_uneven:
            rounds, payload = self.RING[name]  # KeyError: an unknown operator is not 0 bytes
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            N = dist.ProcessGroup.unbox(group).size()
            size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
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


def choose_device(name):
    """This rank's device, and the backend that it can use: NCCL wants a GPU for each local rank."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 or newer
    return device, "nccl" if enough or may_share else "gloo"


def join_world(device, backend):
    """Connect the ranks, unless they are connected. Without torchrun there is one."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    options = {} if "RANK" in os.environ else alone
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **options)


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

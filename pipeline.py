"""Pipeline: each rank holds a slice of the layers, and micro-batches flow through the ranks, forward and back.

The batch is cut into m micro-batches so that the p ranks, each with a stage, work at the same time. Below p = 3, m = 4,
time from left to right, F2 the forward and B2 the backward of micro-batch 2 (a backward takes about two forwards):

    GPipe, all forwards first                         1F1B, a backward as soon as there is one
    rank 0  F0F1F2F3            B0..B1..B2..B3..      F0F1F2        B0..F3B1..  B2..  B3..
    rank 1    F0F1F2F3      B0..B1..B2..B3..            F0F1    B0..F2B1..F3B2..  B3..
    rank 2      F0F1F2F3B0..B1..B2..B3..                  F0B0..F1B1..F2B2..F3B3..

Activations go to the next rank after each F, gradients of activations come back after each B. What is blank is the
bubble. 1F1B idles as long as GPipe, but keeps p micro-batches alive instead of m. With v stages per rank, stage s on
rank s mod p (interleaved 1F1B), the pipeline fills v times as fast. Zero bubble splits B into I, the gradient of the
stage's input, for which the rank before waits, and W, those of the weights, for which nobody does: W fills the bubble.

A schedule is data: for each rank a list of actions, stage · F, B, I or W · micro-batch, as in "2F0". One list is
simulated, drawn, tested and executed. Cost per rank; Ψ parameters, bsh the elements of a micro-batch's activations:

                       parameters   bubble, of all time     alive on rank 0     sent per step
    one device         Ψ            0                       1 micro-batch       0
    naive              Ψ/p          1 - 1/p                 1                   bsh per boundary, micro-batch and
    gpipe              Ψ/p          (p-1)/(m+p-1)           m                     direction: 2·m·bsh by a rank in the
    1f1b               Ψ/p          (p-1)/(m+p-1)           min(p, m)             middle, half by the first and last
    interleaved_1f1b   Ψ/p          (p-1)/(vm+p-1)          more than in 1f1b   v times as much (m ≥ p)
    zero_bubble        Ψ/p          (p-1)/(3m+p-1)          min(p, m)           as 1f1b (F = I = W, m ≥ p)

Run:      torchrun --nproc-per-node 2 pipeline.py --schedule zero_bubble     (python pipeline.py is a world of one)
Papers:   Huang et al. 2019, GPipe, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473, §2.2: 1F1B, interleaved;
          Qi et al. 2023, Zero Bubble, arXiv 2401.10241, §2: I, W and ZB-H1
Mirrors:  torch.distributed.pipelining, whose CSV files of schedules it reads and writes
Left out: skip connections past the next stage (send them through it), tracing a model into stages
"""

import argparse
import copy
import csv
import dataclasses
import functools
import graphlib
import hashlib
import inspect
import itertools
import json
import math
import os
import pickle
import re
import statistics
import string
import sys
import sysconfig
import time
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: GPipe with blocking sends.


def gpipe_step(stage, num_microbatches, loss_fn, inputs, targets, like, process_group=None):
    """Forward and backward of a batch; -> its mean loss on the last rank. A stage receives tensors such as `like`."""
    rank, p = dist.get_rank(process_group), dist.get_world_size(process_group)
    alive = []
    for i in range(num_microbatches):
        x = inputs.chunk(num_microbatches)[i] if rank == 0 else torch.empty_like(like)
        if rank > 0:
            dist.recv(x, group=process_group, group_src=rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < p - 1:
            dist.send(y.detach(), group=process_group, group_dst=rank + 1)
        else:
            y = loss_fn(y, targets.chunk(num_microbatches)[i]) / num_microbatches
        alive.append((x, y))
    for x, y in alive:
        gradient = torch.empty_like(y)
        if rank < p - 1:
            dist.recv(gradient, group=process_group, group_src=rank + 1)
        y.backward(gradient if rank < p - 1 else None)
        if rank > 0:
            dist.send(x.grad, group=process_group, group_dst=rank - 1)
    return sum(y.detach() for _, y in alive) if rank == p - 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# 2. Schedules are data.

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def build_schedule(name, num_ranks, num_microbatches, stages_per_rank=1):
    """For each rank its list of actions, "{stage}{F|B|I|W}{microbatch}"; stage s is on rank s % num_ranks.

    `name`: naive, gpipe, 1f1b, interleaved_1f1b (Narayanan et al. 2021, §2.2), zero_bubble (ZB-H1 of Qi et al. 2023).
    Any number of micro-batches works. ValueError: a number below 1, or an unknown name.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name not in SCHEDULES or min(p, m, v) < 1:
        problem = f"{name!r} with {p} ranks, {m} micro-batches and {v} stages per rank"
        raise ValueError(f"no schedule {problem}: each must be at least 1, the name one of {', '.join(SCHEDULES)}")
    # Micro-batches go in rounds: all of a round through the rank's first stage, then all through its next.
    num_rounds = {"naive": m, "gpipe": 1}.get(name, max(1, m // p))
    rounds = [range(m * k // num_rounds, m * (k + 1) // num_rounds) for k in range(num_rounds)]
    schedule = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forward = [(s, i) for r in rounds for s in stages for i in r]
        backward = [(s, i) for r in rounds for s in reversed(stages) for i in r]
        weights = iter([f"{s}W{i}" for s, i in backward] if name == "zero_bubble" else [])
        # So many forwards come before the first backward. Interleaved, a rank further from the end starts two earlier.
        ahead = (v - 1) * max(map(len, rounds)) + (2 if name == "interleaved_1f1b" else 1) * (p - 1 - rank)
        actions, done = [], 0
        for k, (s, i) in enumerate(backward):
            due = k + 1 + ahead
            if name in ("naive", "gpipe"):  # a whole round of forwards, a whole round of backwards
                due = k - k % (v * len(rounds[0])) + v * len(rounds[0])
            actions += [f"{s}F{i}" for s, i in forward[done:due]]
            actions.append(f"{s}{'I' if name == 'zero_bubble' else 'B'}{i}")
            done = due
            if k >= rank:  # rank r has r micro-batches fewer in flight than rank 0: so many W may wait, at its memory
                actions += itertools.islice(weights, 1)
        schedule.append([*actions, *weights])
    return schedule


class Simulation(NamedTuple):
    start: dict  # action -> time
    end: dict
    bubble_fraction: float  # idle time over all time, of all ranks together
    peak_activations: list  # for each rank, the most micro-batches, per stage, between F and B or W


def simulate(schedule, cost=COST):
    """When each action runs if a rank follows its list and an action waits for what it needs; transfers take no time.

    `cost`: time by kind ("F"), or by stage and kind ("2F"), which goes first.
    ValueError: an action is missing, repeated or misplaced, or the schedule deadlocks (with the cycle).
    """
    schedule = flat(schedule)
    check(schedule)
    start, end = run_times(schedule, COST | dict(cost))
    busy, total = sum(end.values()) - sum(start.values()), max(end.values()) * len(schedule)
    alive = [itertools.accumulate({"F": 1, "I": 0}.get(parse(a)[1], -1) for a in actions) for actions in schedule]
    return Simulation(start, end, 1 - busy / total, [max(n, default=0) for n in alive])


def run_times(schedule, cost=COST):
    """-> {action: start}, {action: end}, in an order in which all of them can run."""
    rank_of = {action: rank for rank, actions in enumerate(schedule) for action in actions}
    before = {action: [a for a in needs(action) if a in rank_of] for action in rank_of}
    for actions in schedule:
        for previous, action in itertools.pairwise(actions):
            before[action].append(previous)
    start, end = {}, {}
    try:
        for action in graphlib.TopologicalSorter(before).static_order():
            start[action] = max((end[a] for a in before[action]), default=0)
            end[action] = start[action] + cost.get(action.rstrip(string.digits), cost[parse(action)[1]])
    except graphlib.CycleError as error:
        cycle = [f"{action} (rank {rank_of[action]})" for action in reversed(error.args[1])]
        raise ValueError(f"the schedule deadlocks: {' waits for '.join(cycle)}") from None
    return start, end


def parse(action):
    """Of "2F0" -> 2, "F", 0."""
    stage, kind, microbatch = re.split("([FBIW])", action)
    return int(stage), kind, int(microbatch)


def needs(action):
    """The actions whose outputs it takes; of the next stage's B and I, the one that there is."""
    stage, kind, i = parse(action)
    backward = [f"{stage}F{i}", f"{stage + 1}B{i}", f"{stage + 1}I{i}"]
    return {"F": [f"{stage - 1}F{i}"], "W": [f"{stage}I{i}"]}.get(kind, backward)


def receiver(action):
    """The stage for which its output is: activations for the next, their gradients for the one before."""
    stage, kind, _ = parse(action)
    return {"F": stage + 1, "W": stage}.get(kind, stage - 1)


# ---------------------------------------------------------------------------------------------------------------------
# 3. One interpreter runs any of them.


def add_messages(schedule, rank_of):
    """For each rank its actions and, between them, lists of actions whose outputs it then sends or receives.

    Simulated time puts everything in one order, of which each rank runs its part: an action stands at its end, the
    messages at the ends of the actions that they come from. Nothing needs what stands later, so that even sends that
    wait for their receivers cannot deadlock; and ranks that send to each other do so at one time, in one batch. A
    receive is posted before the actions that run meanwhile, which hide it.
    """
    program = [{} for _ in schedule]  # of each rank: (time, 0) -> action, (time, 1) -> messages
    for action, end in run_times(schedule)[1].items():
        src, dst = rank_of[parse(action)[0]], rank_of.get(receiver(action))
        program[src][end, 0] = action
        for rank in {src, dst} if dst not in (None, src) else ():
            program[rank].setdefault((end, 1), []).append(action)
    return [[steps[when] for when in sorted(steps)] for steps in program]


class Batch:
    """What one step holds.

    `values` has what an action leaves for a stage, by (action, stage), until that stage takes it: activations for the
    next, their gradients for the one before, and for its own stage F leaves the graph and I what W will compute. The
    caller is both stage -1, whose outputs are the inputs, and the stage after the last, which gets the losses.
    """

    def __init__(self):
        self.values = {}
        self.sent = {}  # messages that may still be on their way, whose buffers must stay
        self.targets = self.weights = self.signatures = None  # lists, by micro-batch
        self.failure = None  # (action, error)


class Pipeline(nn.Module):
    """Runs this rank's stages, forward and backward, in the order that a schedule gives.

    Args:
        stages: a module, or the list of this rank's modules in stage order. A stage gets what the one before returned,
            tensors in nested tuples, lists and dicts: one argument, or several when its forward requires several.
        schedule: a name (build_schedule), or for each rank its list of actions, in PyTorch's notation.
        num_microbatches: the batch is cut into so many along dimension 0, as torch.chunk does.
        loss_fn: loss_fn(output, target) -> mean loss of a micro-batch.
        process_group: the ranks of this pipeline (None: the default group).
        weight: weight(target) -> how much a micro-batch counts in the batch's mean, such as its tokens that are not
            masked. By default its samples.
        tied: lists of names, "{stage}.{name in the stage}", of parameters that are one; the same on every rank. All
            take the first's values; step() leaves the sum of their gradients in each.
        seed: of dropout (microbatch_rng); by default rank 0's torch.initial_seed().

    DistributedDataParallel around a stage reduces in the stage's last backward (PyTorch's own: unless it is to find
    unused parameters).
    Raises ValueError, on all ranks, when what one of them is given cannot work, or differs.
    """

    def __init__(
        self, stages, schedule, num_microbatches, loss_fn, process_group=None, *, weight=None, tied=(), seed=None
    ):
        super().__init__()
        if dist.get_world_size(process_group) < 1:
            raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
        # Weak: a group that someone holds on to after destroy_process_group() may abort the process at its exit.
        self._process_group = weakref.ref(dist.group.WORLD if process_group is None else process_group)
        self._rank, self._peers = dist.get_rank(process_group), dist.get_process_group_ranks(self.process_group)
        self.num_microbatches, self.loss_fn = num_microbatches, loss_fn
        self.weight = weight or (lambda target: next((len(t) for t in tensors(target) if t.dim()), 1))
        self.steps = 0  # with the seed, what dropout depends on: restore it to resume
        self.losses = None  # of the last step's micro-batches, where the last stage is
        self.timeline = []  # of the last step: (action, start, end), in seconds of the host's clock
        self._formats, self._layout = {}, None  # of messages: see _message
        self._set_up(stages, schedule, tied, seed)
        forward = [[action for action in actions if "F" in action] for actions in self.schedule]
        self._programs = [add_messages(s, self._rank_of)[self._rank] for s in (forward, self.schedule)]

    process_group = property(lambda self: self._process_group())

    def step(self, inputs=None, targets=None):
        """Forward and backward of a batch; adds to .grad what a loop over its micro-batches on one device would.

        Args:
            inputs: of stage 0, where that is; ignored elsewhere.
            targets: of loss_fn, where the last stage is; ignored elsewhere.

        -> the mean loss where the last stage is, None elsewhere. Forward only under torch.no_grad().

        Raises on all ranks: ValueError when the batch cannot be cut; where a stage raised, the same, and RuntimeError
        with its text elsewhere; RuntimeError when a loss is not finite. Gradients are incomplete then.
        """
        batch = self._start(inputs, targets)
        for step in self._programs[torch.is_grad_enabled()]:
            self._exchange(batch, step) if isinstance(step, list) else self._run(batch, step)
        return self._finish(batch)

    def _run(self, batch, action):
        """Run an action on what those that it needs have left. After a failure only messages go on: no rank hangs."""
        stage, kind, _ = parse(action)
        given = [batch.values.pop((source, stage)) for source in needs(action) if (source, stage) in batch.values]
        given = [value.open(self.device) if isinstance(value, Message) else value for value in given]
        if batch.failure:
            return
        run = {"F": self._forward, "W": self._backward_weights}.get(kind, self._backward)
        began = time.perf_counter()
        try:
            with self._around(batch, action):
                run(batch, action, *given)
        except Exception as error:
            batch.failure = action, error
        self.timeline.append((action, began - batch.began, time.perf_counter() - batch.began))

    def _forward(self, batch, action, x):
        stage, _, i = parse(action)
        y = call(self.stages[str(stage)], x)
        if stage == self.num_stages - 1:
            y = self._loss(batch, stage, i, y)
        if torch.is_grad_enabled():
            # Caught as they come: .grad would have them in another layout, which may round otherwise further down
            wanted = [t for t in tensors(x) if t.requires_grad]
            caught = [None] * len(wanted)
            for k, leaf in enumerate(wanted):
                leaf.register_hook(functools.partial(caught.__setitem__, k))
            batch.values[action, stage] = caught, [t for t in tensors(y) if t.requires_grad]
        batch.values[action, stage + 1] = tree_map_only(torch.Tensor, snapshot, y)

    def _loss(self, batch, stage, i, output):
        if batch.targets is None:  # in evaluation
            return output
        if batch.weights[i]:
            loss = self.loss_fn(output, batch.targets[i])
        else:  # a mean over nothing would be NaN
            loss = sum(t.sum() for t in tensors(output)) * 0.0
        share = batch.weights[i] / sum(batch.weights)  # 1 / num_microbatches: the only place that scales
        batch.values[f"{stage + 1}B{i}", stage] = [torch.full_like(loss, share)] if loss.requires_grad else []
        return loss

    def _backward(self, batch, action, graph, gradients):
        stage, _, i = parse(action)
        caught, outputs = graph
        pairs = [(y, gradient) for y, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        if f"{stage}F{i}" in batch.sent:
            batch.sent.pop(f"{stage}F{i}").wait()
        batch.values[action, stage - 1] = caught

    def _backward_weights(self, batch, action, deferred):
        stage = parse(action)[0]
        module = self.stages[str(stage)]
        if action == self._last_backward[stage] and hasattr(module, "no_sync"):
            # PyTorch's DistributedDataParallel waits for all gradients: also for those that came in I
            late = {parameter for parameter, _ in deferred}
            early = [p for p in module.parameters() if p.grad is not None and p not in late]
            deferred += [(p, functools.partial(torch.zeros_like, p)) for p in early]
        backward_deferred(deferred)

    def _exchange(self, batch, actions):
        """Start to send and to receive outputs of actions, in one batch."""
        operations, messages = [], []
        for action in actions:
            stage, to = parse(action)[0], receiver(action)
            sending = str(stage) in self.stages
            peer = self._peers[self._rank_of[to if sending else stage]]
            message = self._message(batch, action, sending, peer)
            if sending:  # buffers stay until sent: activations to their backward, others to the next such message
                key = action if "F" in action and torch.is_grad_enabled() else action.rstrip(string.digits)
                if key in batch.sent:
                    batch.sent.pop(key).wait()
                batch.sent[key] = message
            else:
                batch.values[action, to] = message
            for data in message.data():
                operations.append(dist.P2POp(dist.isend if sending else dist.irecv, data, peer, self.process_group))
                messages.append(message)
        works = dist.batch_isend_irecv(operations) if operations else []
        for message, work in zip(messages, itertools.cycle(works), strict=False):  # NCCL has one for all
            message.works.append(work)

    # ---- 4. Ranks agree: on what they are given, on each batch, and that all have succeeded, or all raise.

    def _set_up(self, stages, schedule, tied, seed):
        """Take what this rank is given, if all ranks are given what fits."""
        mine = problem = None
        try:
            self._adopt(stages, schedule)
            mine = self.schedule, [list(names) for names in tied]
        except Exception as error:  # a TypeError, too: the others would wait for this rank
            problem = str(error)
        everyone = self._all_gather((problem, mine, torch.initial_seed() if seed is None else seed))
        for rank, (theirs, what, _) in enumerate(everyone):
            if theirs or what != everyone[0][1]:
                raise ValueError(theirs or f"rank {rank} has another schedule or tied than rank 0: {what}")
        self.seed = everyone[0][2]
        self._ties = [self._tie(names) for names in mine[1]]

    def _adopt(self, stages, schedule):
        stages = list(stages) if isinstance(stages, (list, tuple, nn.ModuleList)) else [stages]
        p, m = len(self._peers), self.num_microbatches
        if isinstance(schedule, str):
            schedule = build_schedule(schedule, p, m, len(stages))
        self.schedule = flat(schedule)
        self._rank_of, microbatches = check(self.schedule)
        run_times(self.schedule)
        mine = sorted(stage for stage, rank in self._rank_of.items() if rank == self._rank)
        if (len(self.schedule), microbatches, len(mine)) != (p, m, len(stages)):
            raise ValueError(
                f"rank {self._rank} of {p} has {len(stages)} stages and {m} micro-batches; the schedule is for "
                f"{len(self.schedule)} ranks, {len(mine)} stages here ({mine}) and {microbatches} micro-batches"
            )
        self.stages = nn.ModuleDict({str(index): stage for index, stage in zip(mine, stages, strict=True)})
        self.num_stages = len(self._rank_of)
        self._last_backward = {parse(action)[0]: action for action in self.schedule[self._rank] if "F" not in action}
        backend = dist.get_backend(self.process_group)
        here = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self.device = next((parameter.device for parameter in self.parameters()), here)
        self._wire = torch.device("cpu") if backend == "gloo" else self.device  # gloo sends from the host's memory

    def _start(self, inputs, targets):
        """Cut the batch, and tell all ranks what it is like."""
        batch, m, grad = Batch(), self.num_microbatches, torch.is_grad_enabled()
        problem, signatures = None, [0] * m
        try:
            if "0" in self.stages:
                parts = cut(inputs, m, "inputs")
                batch.values = {(f"-1F{i}", 0): x for i, x in enumerate(parts)}
                signatures = [digest((describe(x), grad)) for x in parts]
            if str(self.num_stages - 1) in self.stages and (grad or targets is not None):
                batch.targets = cut(targets, m, "targets")
                weights = [float(self.weight(target)) for target in batch.targets]
                if not sum(weights) > 0:
                    raise ValueError(f"the micro-batches' weights are {weights}; their sum must be positive")
                batch.weights = weights if len(set(weights)) > 1 else [1] * m  # equal: the plain mean, bitwise
        except Exception as error:  # also one of weight()
            problem = None, error
        layout = [(p.requires_grad, p.dtype) for p in self.parameters()]
        changed, self._layout = layout != self._layout, layout
        row = self._agree(problem, grad, not grad, changed, *signatures)
        some_grad, some_no_grad, changed, *batch.signatures = row
        if some_grad and some_no_grad:
            raise ValueError("all ranks must call step() under torch.no_grad(), or none")
        if changed:  # on any rank: messages may have changed on all
            self._formats.clear()
        for parameter in self._copies() if grad else ():
            parameter.grad = None
        self.timeline, batch.began = [], time.perf_counter()  # on all ranks at about one time
        return batch

    def _finish(self, batch):
        for message in batch.sent.values():
            message.wait()
        end = self.num_stages
        results = [batch.values.get((f"{end - 1}F{i}", end)) for i in range(self.num_microbatches)]
        if batch.targets is not None and not batch.failure:
            self.losses = [loss.detach() for loss in results]
            finite = torch.stack(self.losses).isfinite().tolist()
            if not all(finite):
                i = finite.index(False)
                error = RuntimeError(f"the loss of micro-batch {i} is {results[i].item()}")
                batch.failure = f"{end - 1}F{i}", error
        self._agree(batch.failure)
        if torch.is_grad_enabled():
            self.steps += 1
            self._sum_tied()
        if batch.targets is not None:
            weighted = (loss * weight for loss, weight in zip(self.losses, batch.weights, strict=True))
            return sum(weighted) / sum(batch.weights)
        return tree_map(join, *results) if str(end - 1) in self.stages else None

    def _agree(self, failure, *numbers):
        """-> the largest of each number over all ranks. All raise when one has a failure: (action, error)."""
        numbers = torch.tensor([failure is not None, *numbers], dtype=torch.int64, device=self._wire)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.process_group)
        failed, *numbers = numbers.tolist()
        if not failed:
            return numbers
        self._formats.clear()  # of what did not come
        failures = self._all_gather(failure and (failure[0], type(failure[1]).__name__, str(failure[1])))
        order = {None: 0.0} | run_times(self.schedule)[1]  # the first: others may follow from what did not come
        rank = min((r for r, theirs in enumerate(failures) if theirs), key=lambda r: order[failures[r][0]])
        if rank == self._rank:
            raise failure[1]
        action, kind, text = failures[rank]
        raise RuntimeError(f"rank {rank} failed in {action} with {kind}: {text}") if action else ValueError(text)

    def _all_gather(self, mine):
        everyone = [None] * len(self._peers)
        dist.all_gather_object(everyone, mine, group=self.process_group)
        return everyone

    # ---- 5. Refinements: evaluation, the form of messages, what surrounds an action, tied parameters, clipping.

    @torch.no_grad()
    def eval_step(self, inputs=None, targets=None):
        """Forward only; -> where the last stage is the mean loss, or without targets its outputs, concatenated."""
        return self.step(inputs, targets)

    def _message(self, batch, action, sending, peer):
        """The output of an action, on the wire.

        What it is like is sent before the first such message of a stage, for micro-batches of these shapes.
        """
        key = action.rstrip(string.digits), batch.signatures[parse(action)[2]]
        value = batch.values.pop((action, receiver(action)), None)
        form = describe(value)
        if key not in self._formats:
            try:
                pickle.dumps(form)
            except Exception as error:  # what else is in the output cannot travel
                batch.failure, form, value = batch.failure or (action, error), None, None
            box = [form]
            (dist.send_object_list if sending else dist.recv_object_list)(box, peer, self.process_group)
            self._formats[key] = box[0]
        known = self._formats[key]
        if value is not None and not fits(action, form, known):
            text = f"its output was {known} before, from inputs of the same shapes, and is now {form}"
            batch.failure, value = batch.failure or (action, RuntimeError(text)), None
        return Message(known, value, self._wire)

    @contextmanager
    def _around(self, batch, action):
        """Random numbers of the micro-batch's own, data parallelism in the last backward, and backward in two."""
        stage, kind, i = parse(action)
        module, mine, deferred = self.stages[str(stage)], self.schedule[self._rank], None
        if kind == "I":
            batch.values[action, stage] = deferred = []
        if action == self._last_backward[stage]:
            synchronise(module)
        with (
            microbatch_rng(self.seed, self.steps, i, stage, self.device) if kind == "F" else nullcontext(),
            getattr(module, "no_sync", nullcontext)() if kind == "F" else nullcontext(),
            split_backward(deferred) if f"{stage}I{i}" in mine else nullcontext(),
        ):
            yield

    def _tie(self, names):
        """Give the parameters of these names one value; -> the ranks of their owners, and those of this rank."""
        mine = {name: p for name, p in self.stages.named_parameters(remove_duplicate=False) if name in names}
        everyone = self._all_gather({name: str(describe(p.data)) for name, p in mine.items()})
        found = dict(itertools.chain.from_iterable(theirs.items() for theirs in everyone))
        if not names or set(found) != set(names) or len(set(found.values())) > 1:
            raise ValueError(f"tied parameters {names} must exist and be alike: {found}")
        ranks = list(dict.fromkeys(self._rank_of[int(name.partition(".")[0])] for name in names))
        mine = list(dict.fromkeys(mine[name] for name in names if name in mine))
        first = self._share(ranks, mine[0].data)[0] if mine else None
        for parameter in mine:
            parameter.data.copy_(first)
        return ranks, mine

    def _share(self, ranks, value):
        """-> the values of all `ranks`, of which this is one."""
        value = value.to(self._wire).contiguous()
        values = [value if rank == self._rank else torch.empty_like(value) for rank in ranks]
        operations = [
            dist.P2POp(do, tensor, self._peers[rank], self.process_group)
            for rank, received in zip(ranks, values, strict=True)
            for do, tensor in ((dist.isend, value), (dist.irecv, received))
            if rank != self._rank
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return [value.to(self.device) for value in values]

    def _copies(self):
        """The tied parameters of this rank but for each first one, which alone keeps its gradient from step to step."""
        return {p for ranks, mine in self._ties for p in mine[1 if self._rank == ranks[0] else 0 :]}

    def _sum_tied(self):
        for ranks, mine in self._ties:
            if mine:
                total = sum(torch.zeros_like(p) if p.grad is None else p.grad for p in mine)
                total = sum(self._share(ranks, total))
                for parameter in mine:
                    parameter.grad = total.clone() if parameter.requires_grad else None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients of all stages so that their total norm is at most `max_norm`; -> that norm, on all ranks.

        A tied parameter counts once.
        """
        held, copies = [p for p in self.parameters() if p.grad is not None and p.numel()], self._copies()
        norms = [torch.linalg.vector_norm(p.grad, norm_type, dtype=torch.float64) for p in held if p not in copies]
        norms = torch.stack([torch.zeros((), dtype=torch.float64, device=self.device), *norms])
        mine = torch.linalg.vector_norm(norms, norm_type).to(self._wire)
        everyone = [torch.empty_like(mine) for _ in self._peers]
        dist.all_gather(everyone, mine, group=self.process_group)
        total = torch.linalg.vector_norm(torch.stack(everyone), norm_type).to(self.device)
        for p in held:
            p.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).to(p.grad))
        return total


# ---------------------------------------------------------------------------------------------------------------------
# 6. Values between stages, and random numbers.


class Message:
    """A value between two ranks: what it is like, itself with its tensors on the wire, and transfers to wait for."""

    def __init__(self, format, value, wire):
        """`value`: None where it is received, and after a failure, when zeros are sent."""

        def place(like, leaf=None):
            if not isinstance(like, Form):
                return like
            if leaf is not None and leaf.stride() == like.stride:
                return leaf.detach().resolve_conj().resolve_neg().to(wire)  # what is a flag on a view cannot travel
            tensor = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=wire)
            return tensor.zero_() if leaf is None else tensor.copy_(leaf.detach())  # zero: a gradient missing this time

        self.format, self.works = format, []
        self.value = tree_map(place, format, *([] if value is None else [value]))

    def data(self):
        return [t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in tensors(self.value) if t.numel()]

    def wait(self):
        for work in self.works:
            work.wait()

    def open(self, device):
        def move(like, leaf):
            return leaf.to(device).requires_grad_(like.requires_grad) if isinstance(like, Form) else leaf

        self.wait()
        return tree_map(move, self.format, self.value)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a tensor is like."""

    shape: tuple
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple = dataclasses.field(repr=False)  # kept, since kernels may round otherwise on another layout


def describe(value):
    """The value with a Form in the place of each tensor."""

    def form(tensor):
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")  # as it will travel
        return Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, dense.stride())

    return tree_map_only(torch.Tensor, form, value)


def fits(action, format, known):
    """Zeros can stand for a gradient that is missing this time. Nothing else may change."""
    if "F" in action:
        return str(format) == str(known)
    return all(f is None or str(f) == str(k) for f, k in zip(format, known, strict=True))


def tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def snapshot(tensor):
    """Without its graph. Copied if it has none: it may be a buffer of the stage, which changes in the next forward."""
    detached = tensor.detach() if tensor.grad_fn is not None else tensor.detach().clone()
    return detached.requires_grad_(tensor.requires_grad)


def digest(value):
    """63 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


def call(module, x):
    """module(x); the items of x by themselves when forward requires several arguments."""
    if isinstance(x, (tuple, list, dict)):
        inner = module.module if hasattr(module, "no_sync") else module  # DistributedDataParallel's takes anything
        arguments = inspect.signature(inner.forward).parameters.values()
        if sum(a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) for a in arguments) > 1:
            return module(**x) if isinstance(x, dict) else module(*x)
    return module(x)


def cut(value, parts, name):
    """-> `parts` values, with all tensors cut along dimension 0 as torch.chunk does."""
    leaves, spec = tree_flatten(value)
    pieces = [t.chunk(parts) if isinstance(t, torch.Tensor) and t.dim() else (t,) * parts for t in leaves]
    if not tensors(value) or any(len(piece) != parts for piece in pieces):
        shapes = [tuple(t.shape) for t in tensors(value)]
        raise ValueError(
            f"{name} of shapes {shapes} are cut into {[len(p) for p in pieces if shapes]} parts by torch.chunk, "
            f"not into {parts}; pass a batch of a multiple of {parts} samples, or change num_microbatches"
        )
    return [tree_unflatten(list(part), spec) for part in zip(*pieces, strict=True)]


def join(*parts):
    """What cut() has cut: tensors along dimension 0; a list of scalars, and of what is not a tensor."""
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else list(parts)


@contextmanager
def microbatch_rng(seed, step, microbatch, stage, device=None):
    """Random numbers, such as dropout's, that depend on these numbers alone: not on rank or schedule.

    One device draws the same when it runs each stage of a micro-batch inside of this.
    """
    cuda, number = device is not None and device.type == "cuda", digest((seed, step, microbatch, stage))
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(number)  # torch.manual_seed: a millisecond, for devices that are not there
        if cuda:
            torch.cuda.manual_seed(number)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# 7. Data-parallel stages.


def synchronise(stage):
    """Let DistributedDataParallel, if it is around the stage, reduce in the backward that comes next.

    It goes by the forward before; those of the micro-batches ran in no_sync(). An empty forward outside counts as well.
    """
    if hasattr(stage, "no_sync"):
        module, stage.module = stage.module, nn.Identity()
        try:
            stage(torch.zeros((), requires_grad=True) * 1.0)
        finally:
            stage.module = module


# ---------------------------------------------------------------------------------------------------------------------
# 8. Backward in two: I leaves gradients of weights in a queue, and W computes them.

linear, queue = F.linear, None


def defer_gradient(parameter, compute):
    """For the backward of an autograd.Function that has weights: return this in place of compute(), their gradient."""
    if queue is None:
        return compute()
    queue.append((parameter, compute))
    return None


class SplitLinear(torch.autograd.Function):
    """F.linear, with the operations of PyTorch's own backward: the same gradients bitwise, though some come later."""

    @staticmethod
    def forward(ctx, anchor, x, parameters):
        # Autograd knows nothing of the parameters, whose hooks would run in I as well, and with the anchor of this node
        ctx.save_for_backward(x)
        ctx.parameters = parameters
        with torch.enable_grad():  # matmul goes another way where no gradient is wanted
            return linear(x.detach(), *parameters).detach()

    @staticmethod
    def backward(ctx, gradient):
        (x,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        rows, gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        deferred = [(weight, lambda: gradients.t() @ rows)]
        if bias is not None and bias.requires_grad:
            terms = gradients if x.is_contiguous() else gradient  # PyTorch flattens a contiguous x only
            deferred.append((bias, lambda: terms.sum_to_size(bias.shape)))
        if queue is None:  # a backward of the stage's own, of a loss inside of its forward
            backward_deferred(deferred)
        else:
            queue.extend(deferred)
        return None, (gradients @ weight).view(x.shape) if ctx.needs_input_grad[1] else None, None


def split_linear(x, weight, bias=None):
    held = [p for p in (weight, bias) if p is not None]
    # PyTorch computes otherwise with a frozen weight; the bias that may be left costs I next to nothing.
    usual = all(isinstance(p, nn.Parameter) for p in held) and weight.requires_grad and x.dim() > 1
    cast = torch.is_autocast_enabled(x.device.type) or has_torch_function((x, weight))  # a mode may do as autocast
    if not usual or cast or not torch.is_grad_enabled():
        return linear(x, weight, bias)
    return SplitLinear.apply(torch.empty((), requires_grad=True), x, (weight, bias))


@contextmanager
def split_backward(fill=None):
    """In here F.linear, which PyTorch's modules call, is split. Other weights get their gradients in I.

    For F, and for I, since a checkpoint computes forward there once more.
    """
    global queue
    before, queue, F.linear = (queue, F.linear), fill, split_linear
    try:
        yield
    finally:
        queue, F.linear = before


class Deferred(torch.autograd.Function):
    """Its backward computes a parameter's gradient, which autograd adds to .grad; hooks see nothing unusual."""

    @staticmethod
    def forward(ctx, parameter, compute):
        ctx.compute = compute
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.compute(), None


@torch.enable_grad()
def backward_deferred(deferred):
    """Add the gradients to .grad: [(parameter, compute), …] in the order in which a whole backward comes to them."""
    if deferred:  # autograd runs what was made last first
        torch.autograd.backward([Deferred.apply(*item) for item in reversed(deferred)])


# ---------------------------------------------------------------------------------------------------------------------
# 9. Schedules from elsewhere: complete, and in the form of PyTorch's files.


def check(schedule):
    """-> {stage: rank}, number of micro-batches. ValueError unless each has F and B, or F, I and W, on each stage."""
    count, rank_of = Counter(parse(action) for actions in schedule for action in actions), {}
    for rank, actions in enumerate(schedule):
        for stage in {parse(action)[0] for action in actions}:
            if rank_of.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on two ranks, {rank_of[stage]} and {rank}")
    num_microbatches = 1 + max((i for _, _, i in count), default=-1)
    for stage, i in itertools.product(range(1 + max(rank_of, default=0)), range(num_microbatches or 1)):
        kinds = "".join(kind * count[stage, kind, i] for kind in "FBIW")
        if kinds not in ("FB", "FIW"):
            raise ValueError(f"stage {stage}, micro-batch {i}: {kinds or 'nothing'} is done; it must be FB or FIW")
    return rank_of, num_microbatches


def flat(schedule):
    """As PyTorch writes schedules -> actions alone. Idle cells and communication go; "(0F4;7B0)OVERLAP_F_B" is two."""
    other = re.compile(r"[();]|OVERLAP_F_B|\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB])\d*")
    result = [other.sub(" ", " ".join(filter(None, cells))).split() for cells in schedule]
    for rank, actions in enumerate(result):
        for action in actions:
            if not re.fullmatch(r"\d+[FBIW]\d+", action):
                raise ValueError(f"rank {rank}: {action!r} is not stage, F, B, I or W, micro-batch, as in '2F0'")
    return result


def schedule_to_csv(schedule, path):
    """A line per rank, as PyTorch's _load_csv(path, format="compute_only") reads it."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(flat(schedule))


def schedule_from_csv(path):
    """Read what PyTorch's _dump_csv writes, in both of its formats."""
    with open(path, newline="") as file:
        return flat(csv.reader(file))


# ---------------------------------------------------------------------------------------------------------------------
# 10. Cutting a model into stages.


def split(layers, num_stages, cost=None):
    """A list of layers -> `num_stages` nn.Sequentials, cut so that the costliest costs least.

    `cost`: of each layer; by default its parameters.
    """
    layers = list(layers)
    if cost is None:
        cost = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if len(cost) != len(layers) or not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers with {len(cost)} costs cannot be {num_stages} stages of at least one")

    @functools.cache
    def best(stages, end):
        """-> cost of the costliest stage, and where to cut, when so many stages have the layers before `end`."""
        if stages == 1:
            return sum(cost[:end]), [0, end]
        cuts = ((b, *best(stages - 1, b)) for b in range(stages - 1, end))
        return min((max(costliest, sum(cost[b:end])), [*at, end]) for b, costliest, at in cuts)

    return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(best(num_stages, len(layers))[1])]


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


class PacedPipeline(Pipeline):
    """Each action takes at least its COST times `pace` seconds: a clean picture on cores that ranks share."""

    pace = 0.0

    @contextmanager
    def _around(self, batch, action):
        end = time.perf_counter() + COST[parse(action)[1]] * self.pace
        with super()._around(batch, action):
            yield
        time.sleep(max(0.0, end - time.perf_counter()))


def main():
    class PipelineDemo(Demo):
        """One device accumulates the micro-batches, each loss divided by their number, as the pipeline does."""

        parts = property(lambda self: self.args.microbatches, lambda self, value: None)

        def step_on_one_device(self, inputs, targets):
            self.optimizer.zero_grad()
            losses = []
            for part, part_targets in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
                losses.append(language_loss(self.model(part), part_targets))
                (losses[-1] / self.parts).backward()
            self.optimizer.step()
            return [loss.item() for loss in losses]

    demo = PipelineDemo(bitwise=sys.maxsize, add_arguments=add_arguments)
    args, m, p = demo.args, demo.parts, demo.ranks
    v = args.stages_per_rank or (2 if args.schedule == "interleaved_1f1b" else 1)
    if p * v > len(demo.model):
        demo.stop_if(f"{p} ranks with {v} stages each: the model has {len(demo.model)} layers; use fewer")
    plain, stages = split(demo.model, p * v), split(copy.deepcopy(demo.model), p * v)
    mine = range(demo.rank, p * v, p)
    pipeline = PacedPipeline([stages[stage] for stage in mine], args.schedule, m, language_loss)
    pipeline.pace = args.action_ms / 1e3
    del stages
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        pipeline.step(inputs, targets)
        optimizer.step()
        losses = torch.stack(pipeline.losses or [next(pipeline.parameters()).new_zeros(()).detach()] * m)
        dist.broadcast(losses, p - 1)
        return losses[demo.rank % m]

    def state():  # each rank compares the stages that it has
        held = [pipeline.stages[str(s)] if s in mine else plain[s] for s in range(p * v)]
        parameters = [parameter for stage in held for parameter in stage.parameters()]
        return [parameter.grad for parameter in parameters], parameters

    demo.train(step, state)
    bsh = demo.batch_size // m * demo.T * 192 * next(demo.model.parameters()).itemsize
    formula, sent = ("(2v-1)m·bsh", (2 * v - 1) * m * bsh) if p > 1 else ("0", 0)
    status = demo.report("pipeline", held(pipeline.parameters(), optimizer), formula, sent)
    measured = pipeline._all_gather(pipeline.timeline)
    durations = {}
    for action, start, end in itertools.chain(*measured):
        durations.setdefault(action.rstrip(string.digits), []).append(end - start)
    times = simulate(pipeline.schedule, {key: statistics.median(values) for key, values in durations.items()})
    predicted = [[(action, times.start[action], times.end[action]) for action in row] for row in pipeline.schedule]
    demo.show(draw(f"predicted   {args.schedule}, {m} micro-batches, from the time of each stage's actions", predicted))
    demo.show(draw("measured    in the last step", measured))
    if args.trace and demo.rank == 0:
        events = [
            {"name": action, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * (end - start), "pid": name, "tid": rank}
            for name, rows in (("measured", measured), ("predicted", predicted))
            for rank, row in enumerate(rows)
            for action, start, end in row
        ]
        Path(args.trace).write_text(json.dumps({"traceEvents": events}))
    demo.leave(status)


def add_arguments(parser):
    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text}: at least 1")
        return int(text)

    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=positive, default=4, metavar="M")
    parser.add_argument("--stages-per-rank", type=positive, metavar="V", help="default: 2 interleaved, 1 otherwise")
    parser.add_argument("--trace", metavar="FILE", help="write both timelines as Chrome trace JSON (ui.perfetto.dev)")
    parser.add_argument("--action-ms", type=float, default=0.0, help="F, I and W take at least so long, B twice that")


def draw(title, timelines, width=100):
    """One row per rank, one cell per action, in proportion to time; what is blank is the bubble."""
    actions = list(itertools.chain(*timelines))
    begin, end = min(start for _, start, _ in actions), max(end for *_, end in actions)
    bubble = 1 - sum(end - start for _, start, end in actions) / ((end - begin) * len(timelines))
    lines = [f"{title}: {1e3 * (end - begin):.0f} ms, bubble {bubble:.0%}"]
    for rank, row in enumerate(timelines):
        line = ""
        for action, *times in row:
            a, b = (round((t - begin) / (end - begin) * width) for t in times)
            line = line.ljust(a) + f"|{action}".ljust(b - a, "-")[: b - a]
        lines.append(f"  rank {rank:<4} {line}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model, in this world and on one device. The same text in every file.


class Embed(nn.Module):
    """(B, T) integers to (B, T, C): token plus position. B batch, T time, C channels, V vocabulary."""

    def __init__(self, V, T, C):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)

    def forward(self, tokens_BT):
        return self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """(B, T, C) to (B, T, C): causal self-attention and MLP, each after a norm and around a residual."""

    def __init__(self, C, heads):
        super().__init__(C, heads, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x_BTC):
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1], x_BTC.device, x_BTC.dtype)
        return super().forward(x_BTC, src_mask=mask, is_causal=True)


def language_model(C=192, heads=6, layers=4, T=64, V=256):
    """A causal transformer over bytes: (B, T) integers to (B, T, V) logits."""
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(Embed(V, T, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends: to single ranks, and in collectives by their ring algorithms."""

    # operator: (position of its payload, how often each byte goes around the ring)
    RING = {"allreduce_": (0, 2), "broadcast_": (0, 1), "_allgather_base_": (0, 1)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in self.RING:
            position, rounds = self.RING[name]
            N = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            self.total += rounds * (N - 1) / N * sum(tensor.nbytes for tensor in tree_leaves(args[position]))
        elif name == "send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(parameters, optimizer):
    """Bytes that parameters, gradients and optimizer state hold on this rank."""
    parameters = list(parameters)
    state = [tensor for tensor in tree_leaves(list(optimizer.state.values())) if isinstance(tensor, torch.Tensor)]
    return held_bytes(parameters), held_bytes([p.grad for p in parameters if p.grad is not None]), held_bytes(state)


class Demo:
    """Joins the world, trains a technique and the same model on one device side by side, compares, and prints.

    One device accumulates the batch in `parts` (None: one per rank). Up to `bitwise` ranks on the CPU the two must be
    bitwise equal in float32; else the demo runs in float64, and they must be within 1e-9.
    """

    T = 64  # tokens in a sequence

    def __init__(self, bitwise=0, parts=None, add_arguments=lambda parser: None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--steps", type=int, default=30)
        parser.add_argument("--batch-size", type=int, help="sequences per step, over all ranks (default: 8 per rank)")
        parser.add_argument("--data", metavar="FILE", help="text to train on (default: the standard library's source)")
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument("--seed", type=int, default=0)
        add_arguments(parser)
        self.args = parser.parse_args()
        self.join_world()
        self.parts = parts or self.ranks
        self.batch_size = 8 * self.ranks if self.args.batch_size is None else self.args.batch_size
        problem = self.read_text(self.args.data)
        if self.args.steps < 1:
            problem = f"--steps {self.args.steps}: at least 1"
        if self.batch_size < 1 or self.batch_size % self.parts:
            problem = f"--batch-size {self.batch_size}: must be a multiple of {self.parts}, to share it out evenly"
        if self.args.device == "cuda" and self.device.type == "cpu":
            problem = "--device cuda: torch sees no GPU"
        self.stop_if(problem)
        self.bitwise = self.ranks <= bitwise and self.device.type == "cpu"
        self.reset()

    def reset(self):
        """Make the model on one device anew, the same on every rank."""
        torch.manual_seed(self.args.seed)
        self.model = language_model(T=self.T).to(self.device, torch.float32 if self.bitwise else torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def join_world(self):
        """As torchrun says, or as a world of one."""
        # Imported after init_process_group (torch.optim does so), its default arguments would keep the group for ever:
        # destroy_process_group() would not end gloo's threads, which now and then abort the process at its exit.
        import torch.distributed.nn.functional

        gpus = torch.cuda.device_count() if self.args.device != "cpu" else 0
        self.device, backend = torch.device("cpu"), "gloo"
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            torch.cuda.set_device(self.device)
            backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"  # NCCL: a GPU each
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def read_text(self, path):
        files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            return f"--data {path}: {error.strerror}"
        if len(text) <= self.T:
            return f"--data {path}: {len(text)} bytes; one sequence and its targets take {self.T + 1}"
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return None

    def stop_if(self, problem):
        """When any rank has a problem, rank 0 prints it, and all ranks exit with status 2."""
        problems = [None] * self.ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.show(f"error: {next(filter(None, problems))}", file=sys.stderr)
            self.leave(2)

    def leave(self, status):
        dist.barrier()  # who leaves early breaks the others' connections
        dist.destroy_process_group()
        sys.exit(status)

    def show(self, text, **kwargs):
        if self.rank == 0:
            print(text, flush=True, **kwargs)

    def batch(self, step):
        """Inputs and targets of all ranks, (B, T) each."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + step)
        starts = torch.randint(len(self.text) - self.T, (self.batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(self.T + 1)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, inputs, targets):
        """Accumulate the gradients of the parts, in rank order; -> their losses."""
        self.optimizer.zero_grad()
        losses = []
        for part, part_targets in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(part), part_targets)
            loss.backward()
            losses.append(loss.item())
        for parameter in self.model.parameters():
            parameter.grad /= self.parts  # after the sum: before it, at 3 parts, rounds differently
        self.optimizer.step()
        return losses

    def train(self, step, state):
        """`step(inputs, targets)` trains on the global batch, -> the loss of this rank's part.
        `state()` -> gradients, parameters: whole, in the order of the plain model."""
        self.losses, self.times, self.times_one_device = [], [], []
        self.largest = dict.fromkeys(("loss", "gradient", "parameter"), 0.0)
        for number in range(self.args.steps):
            batch, sent = self.batch(number), SentBytes()
            start = time.perf_counter()
            with sent if number == 0 else nullcontext():  # counting takes time
                loss = step(*batch).item()
            self.times.append(time.perf_counter() - start)
            self.sent = sent.total or (self.sent if number else 0.0)
            start = time.perf_counter()
            losses = self.step_on_one_device(*batch)
            self.times_one_device.append(time.perf_counter() - start)
            self.losses.append(statistics.mean(losses))
            gradients, parameters = state()
            self.compare("loss", [loss], [losses[self.rank % self.parts]])
            self.compare("gradient", gradients, [parameter.grad for parameter in self.model.parameters()])
            self.compare("parameter", parameters, self.model.parameters())
            if sys.stderr.isatty():
                self.show(f"\rstep {number + 1}/{self.args.steps}\r", end="", file=sys.stderr)

    def compare(self, what, ours, plain):
        for a, b in zip(map(torch.as_tensor, ours), map(torch.as_tensor, plain), strict=True):
            difference = 0.0 if torch.equal(a, b) else (a - b).abs().max().item()
            self.largest[what] = max(self.largest[what], math.inf if math.isnan(difference) else difference)

    def report(self, name, held_here, formula, sent):
        """Print what every demo prints; -> the exit status, 1 when a rank differs from one device."""
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, self.largest)
        largest = {what: max(rank[what] for rank in everyone) for what in self.largest}
        tolerance = 0.0 if self.bitwise else 1e-9
        agree = max(largest.values()) <= tolerance
        verdict = ", ".join(f"max |Δ{what}| {difference:.1e}" for what, difference in largest.items())
        verdict += f", {'' if agree else 'NOT '}equal within {tolerance:g}{'' if self.bitwise else ' in float64'}"
        if not any(largest.values()):
            verdict = f"loss, gradients and parameters bitwise equal over {self.args.steps} steps"
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        size = f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f}M parameters"
        ms, ms_one_device = (1e3 * statistics.median(times) for times in (self.times, self.times_one_device))
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} · {self.device.type}/{dist.get_backend()}"
        self.show(f"{name} · {world} · {size} · {self.args.steps} steps")
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})")
        self.show(f"sent/rank   {self.sent / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {ms_one_device:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    main()

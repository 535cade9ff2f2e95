"""Pipeline: each rank holds a slice of the layers, and micro-batches flow through the ranks, forward and back.

The batch is cut into m micro-batches so that the p ranks, each with a stage, work at the same time. Below p = 3, m = 4,
time from left to right, F2 the forward and B2 the backward of micro-batch 2 (a backward takes about two forwards):

    GPipe, all forwards first                         1F1B, a backward as soon as there is one
    rank 0  F0F1F2F3            B0..B1..B2..B3..      F0F1F2        B0..F3B1..  B2..  B3..
    rank 1    F0F1F2F3      B0..B1..B2..B3..            F0F1    B0..F2B1..F3B2..  B3..
    rank 2      F0F1F2F3B0..B1..B2..B3..                  F0B0..F1B1..F2B2..F3B3..

Activations go to the next rank after each F, their gradients come back after each B. What is blank is the bubble. 1F1B
idles as long as GPipe, but keeps p micro-batches alive instead of m. With v stages per rank, stage s on rank s mod p
(interleaved 1F1B), the pipeline fills v times as fast. Zero bubble splits B into I, the gradient of the stage's input,
for which the rank before waits, and W, those of the weights, for which nobody does: W fills the bubble.

Cost per rank; Ψ parameters, bsh the elements of a micro-batch's activations:

                       parameters   bubble, of all time     alive on rank 0     sent per step
    naive              Ψ/p          1 - 1/p                 1 micro-batch       bsh per boundary, micro-batch and
    gpipe              Ψ/p          (p-1)/(m+p-1)           m                     direction: 2·m·bsh by a rank in the
    1f1b               Ψ/p          (p-1)/(m+p-1)           min(p, m)             middle, half by the first and last
    interleaved_1f1b   Ψ/p          (p-1)/(vm+p-1)          more than in 1f1b   v times as much (m ≥ p)
    zero_bubble        Ψ/p          (p-1)/(3m+p-1)          min(p, m)           as 1f1b (F = I = W, m ≥ p)

Run:      torchrun --nproc-per-node 2 pipeline.py --schedule zero_bubble     (python pipeline.py is a world of one)
Papers:   GPipe, arXiv 1811.06965; 1F1B and interleaved, 2104.04473, §2.2; zero bubble, 2401.10241, §2: ZB-H1
Mirrors:  torch.distributed.pipelining, whose CSV files of schedules it reads and writes
Left out: tied parameters, data parallelism, clipping (parallel_3d.py); gradients of inputs; W for layers not linear
"""

import argparse
import collections
import copy
import graphlib
import itertools
import json
import os
import pickle
import re
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: GPipe with blocking sends.


def start_transfer(operation, tensor, peer, group):
    """Start one dist.isend or dist.irecv. -> works to wait for

    Over NCCL a bare isend makes a communicator for each pair of ranks in the middle of a step; a batch takes the
    group's. On that one the transfers of a rank run one after another, in the order in which it starts them. Each is a
    batch of its own, and all ranks start them in one global order: the first that has not ended is the next one of its
    sender and of its receiver, so it can always run. A batch of several would have to be cut alike on both sides.
    """
    return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=peer)])


def transfer(operation, tensor, peer, group):
    """The same, and wait for it."""
    for work in start_transfer(operation, tensor, peer, group):
        work.wait()
    return tensor


def gpipe_step(stage, num_microbatches, loss_fn, inputs, targets, like, process_group=None):
    """Forward and backward of a batch; -> its mean loss on the last rank. A stage receives tensors such as `like`."""
    rank, last = dist.get_rank(process_group), dist.get_world_size(process_group) - 1
    alive = []
    for part, target in zip(
        inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True
    ):
        x = part if rank == 0 else torch.empty_like(like)
        if rank > 0:
            transfer(dist.irecv, x, rank - 1, process_group)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            transfer(dist.isend, y.detach(), rank + 1, process_group)
        else:
            y = loss_fn(y, target) / num_microbatches
        alive.append((x, y))
    for x, y in alive:
        gradient = torch.ones_like(y)
        if rank < last:
            transfer(dist.irecv, gradient, rank + 1, process_group)
        y.backward(gradient)
        if rank > 0:
            transfer(dist.isend, x.grad, rank - 1, process_group)
    return sum(y.detach() for _, y in alive) if rank == last else None


# ---------------------------------------------------------------------------------------------------------------------
# 2. A schedule is data: for each rank a list of actions, stage · F, B, I or W · micro-batch, as in "2F0".

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
COST = {"F": 1, "B": 2, "I": 1, "W": 1}
Simulation = collections.namedtuple("Simulation", "start end bubble_fraction peak_activations")


def build_schedule(name, num_ranks, num_microbatches, stages_per_rank=1):
    """For each rank its list of actions, for any number of micro-batches; stage s is on rank s % num_ranks."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name not in SCHEDULES or min(p, m, v) < 1:
        raise ValueError(
            f"{name!r} of {p} ranks, {m} micro-batches, {v} stages each; names: {', '.join(SCHEDULES)}"
        )
    # Micro-batches go in rounds: all of a round through the rank's first stage, then all through its next.
    num_rounds = {"naive": m, "gpipe": 1}.get(name, max(1, m // p))
    rounds = [range(m * k // num_rounds, m * (k + 1) // num_rounds) for k in range(num_rounds)]
    # How many forwards a rank is ahead of its backwards: the last rank must take a round through its v - 1 other stages
    # before its first backward. From then on forwards and backwards alternate. While rank r + 1 runs a forward and the
    # backward after it, for which rank r waits, r can run the next forward: so r is one further ahead than r + 1.
    # Interleaved it is two, as in Megatron-LM and PyTorch, which gives transfers the time of a forward and a backward.
    hop, kind = 2 if name == "interleaved_1f1b" else 1, "I" if name == "zero_bubble" else "B"
    block = {"naive": v, "gpipe": v * m}.get(
        name, 1
    )  # so many forwards, as many backwards: in these two a whole round
    schedule = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        ahead = (
            0
            if name in ("naive", "gpipe")
            else (v - 1) * max(map(len, rounds)) + hop * (p - 1 - rank)
        )
        forward = iter([f"{s}F{i}" for r in rounds for s in stages for i in r])
        backward = [f"{s}{kind}{i}" for r in rounds for s in reversed(stages) for i in r]
        weights = iter(
            [action.replace("I", "W") for action in backward] if name == "zero_bubble" else []
        )
        actions = list(itertools.islice(forward, ahead))
        for k in range(0, v * m, block):
            actions += [*itertools.islice(forward, block), *backward[k : k + block]]
            if (
                k >= rank
            ):  # rank r has r micro-batches fewer in flight than rank 0: so many W may wait, at its memory
                actions += itertools.islice(weights, 1)
        schedule.append([*actions, *weights])
    return schedule


def parse(action):
    """Of "2F0" -> 2, "F", 0."""
    stage, kind, i = re.split("([FBIW])", action)
    return int(stage), kind, int(i)


def taker(action):
    """What takes its output: (stage, kind, micro-batch), "B" standing for I as well."""
    stage, kind, i = parse(action)
    return {"F": (stage + 1, "F", i), "W": (None, None, None)}.get(kind, (stage - 1, "B", i))


def simulate(schedule, cost=COST):
    """When each action runs if a rank follows its list, an action waits for what it needs, and transfers take no time.

    -> start and end by action; the share of all ranks' time that is idle; for each rank the most micro-batches, of each
    stage, that are between F and B or W. ValueError: something is missing or done twice, or the schedule deadlocks.
    """
    schedule, cost, rank_of, done, before = (
        flat(schedule),
        COST | dict(cost),
        {},
        collections.defaultdict(str),
        {},
    )
    giver = {taker(action): action for action in itertools.chain(*schedule)}
    for rank, actions in enumerate(schedule):
        for previous, action in zip([None, *actions], actions, strict=False):
            stage, kind, i = parse(action)
            rank_of[stage], done[rank, stage, i] = rank, done[rank, stage, i] + kind
            own = {"F": None, "W": f"{stage}I{i}"}.get(kind, f"{stage}F{i}")
            other = giver.get((stage, "B" if kind == "I" else kind, i))
            before[action] = [need for need in (previous, own, other) if need]
    for stage, i in itertools.product(range(1 + max(rank_of)), range(1 + max(i for *_, i in done))):
        if "".join(sorted(kinds := done[rank_of.get(stage), stage, i])) not in ("BF", "FIW"):
            raise ValueError(
                f"of stage {stage}, micro-batch {i} '{kinds}' is done, not F and B, or F, I and W"
            )
    start, end = {}, {}
    try:
        for action in graphlib.TopologicalSorter(before).static_order():
            start[action] = max((end[need] for need in before[action]), default=0)
            end[action] = start[action] + cost[parse(action)[1]]
    except graphlib.CycleError as error:
        raise ValueError(
            f"the schedule deadlocks: {' waits for '.join(reversed(error.args[1]))}"
        ) from None
    busy, total = sum(end.values()) - sum(start.values()), max(end.values()) * len(schedule)
    alive = [
        itertools.accumulate({"F": 1, "I": 0}.get(parse(a)[1], -1) for a in actions)
        for actions in schedule
    ]
    return Simulation(start, end, 1 - busy / total, [max(n, default=0) for n in alive])


def flat(schedule):
    """As PyTorch writes schedules -> actions alone: no idle cells, no communication; "(0F4;7B0)OVERLAP_F_B" is two."""
    return [re.findall(r"\b\d+[FBIW]\d+\b", " ".join(filter(None, cells))) for cells in schedule]


def schedule_to_csv(schedule, path):
    """A line per rank, as PyTorch's _load_csv(path, format="compute_only") reads it."""
    Path(path).write_text("".join(",".join(actions) + "\n" for actions in flat(schedule)))


def schedule_from_csv(path):
    """Read what PyTorch's _dump_csv writes, in both of its formats."""
    return flat(line.split(",") for line in Path(path).read_text().splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# 3. What the interpreter is made of: what one must know of a tensor to receive it; and backward in two.

linear, form = F.linear, attrgetter("shape", "dtype", "requires_grad")


def split_linear(x, weight, bias=None):
    """Stands for F.linear, which PyTorch's modules call, while a schedule with I and W runs."""
    weights = [w for w in (weight, bias) if w is not None and w.requires_grad]
    if weights and torch.is_grad_enabled() and all(w.is_leaf for w in weights):
        return SplitLinear.apply(x, torch.empty(0, requires_grad=True), [weight, bias], weights)
    return linear(x, weight, bias)  # the gradient of a weight that is computed is needed in I


class SplitLinear(torch.autograd.Function):
    """A graph of its own, which I asks for the gradient of the input, and W, later, for those of the weights."""

    todo = []  # what the backward that runs now leaves to W: (output, its gradient, weights)

    @staticmethod
    def forward(
        ctx, x, anchor, parameters, weights
    ):  # in lists these are no inputs: their hooks would run in I, too
        ctx.x, ctx.weights = x.detach().requires_grad_(x.requires_grad), weights
        # Without the hooks of a checkpoint around it, which would compute everything again for I, and again for W
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            ctx.y = linear(ctx.x, *parameters)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        SplitLinear.todo.append((ctx.y, gradient, ctx.weights))
        wanted = ctx.needs_input_grad[0]
        return (
            torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)[0] if wanted else None,
            None,
            None,
            None,
        )


# ---------------------------------------------------------------------------------------------------------------------
# 4. One interpreter runs any schedule.


def wire_device(device, backend_config):
    """-> where messages between stages on `device` lie. Gloo sends from the host's memory.

    The name of the backend does not tell: it is "undefined" after init_process_group() without one.
    """
    return torch.device("cpu") if f"{device.type}:gloo" in backend_config else device


def now(device):
    """A moment: of the host's clock, or, because a GPU works after the host, an event in its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start, end):
    """Between two moments."""
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Pipeline(nn.Module):
    """Runs this rank's stages, forward and backward, in the order that a schedule gives.

    stages: a module, or this rank's list of them. What one returns, a tensor or a tuple, are the arguments of the next.
    schedule: a name (build_schedule), or for each rank its list of actions, in PyTorch's notation.
    num_microbatches: the batch is cut into so many along dimension 0, as torch.chunk does.
    loss_fn(output, target) -> a micro-batch's mean loss.
    weight(target) -> how much a micro-batch counts in the batch's: its samples, or its tokens not masked.
    """

    def __init__(
        self, stages, schedule, num_microbatches, loss_fn, process_group=None, *, weight=len
    ):
        super().__init__()
        self.process_group, self._rank = process_group, dist.get_rank(process_group)
        self.num_microbatches, self.loss_fn, self.weight = num_microbatches, loss_fn, weight
        stages = list(stages) if isinstance(stages, (list, nn.ModuleList)) else [stages]
        if isinstance(schedule, str):
            schedule = build_schedule(
                schedule, dist.get_world_size(process_group), num_microbatches, len(stages)
            )
        self.schedule = flat(schedule)
        given = [None] * dist.get_world_size(process_group)
        device = next((p.device for stage in stages for p in stage.parameters()), None)
        mine = (self.schedule, num_microbatches, len(stages)), device and device.type
        dist.all_gather_object(given, mine, group=process_group)
        given, device_types = zip(*given, strict=True)
        end, owned = (
            simulate(self.schedule).end,
            [sorted({parse(a)[0] for a in actions}) for actions in self.schedule],
        )
        m = 1 + max(parse(action)[2] for action in end)
        if list(given) != [(self.schedule, m, len(numbers)) for numbers in owned]:
            text = f"micro-batches and stages by rank are {[numbers for _, *numbers in given]}, or schedules differ"
            raise ValueError(
                f"{text}; the schedule needs {[(m, len(numbers)) for numbers in owned]}"
            )
        rank_of = {stage: rank for rank, numbers in enumerate(owned) for stage in numbers}
        self.stages, self._last = (
            nn.ModuleDict(zip(map(str, owned[self._rank]), stages, strict=True)),
            max(rank_of),
        )
        # Simulated time puts all actions in one order, an action at its end and the message with its output right after
        # it, and each rank does its part of that. What anything waits for stands before it: so the first thing not yet
        # done can always be done, even if sends wait for receivers (NCCL), and nothing deadlocks.
        self._linear = (
            split_linear if any("I" in action for action in self.schedule[self._rank]) else linear
        )
        steps = [
            (a, rank_of[parse(a)[0]], rank_of.get(taker(a)[0])) for a in sorted(end, key=end.get)
        ]
        self._program = [
            step for step in steps if self._rank in step
        ]  # action, its rank, that of who takes its output
        # A stage without parameters runs where the other ranks' stages do.
        self.device = device or torch.device(next(filter(None, device_types), "cpu"))
        self._wire = wire_device(self.device, dist.get_backend_config(process_group))
        self._batch, self._forms = (
            None,
            {},
        )  # what the last batch was like, and what it made the stages pass on

    def step(self, inputs=None, targets=None):
        """Forward and backward of a batch; adds to .grad what a loop over its micro-batches on one device would.

        `inputs`, a tensor or a tuple of tensors, are for stage 0, `targets`, a tensor, for loss_fn; ignored elsewhere.
        -> the mean loss where the last stage is, None elsewhere. Forward only under torch.no_grad().
        An error on one rank is raised there, and as a RuntimeError on all others. Gradients are incomplete then.
        """
        self._start(inputs, targets)
        for action, src, dst in self._program:
            if torch.is_grad_enabled() or "F" in action:
                if src == self._rank:
                    self._run(action)
                if dst not in (src, None):
                    self._message(action, src, dst)
        for transfer, _ in self._leaving:
            transfer.wait()
        if self._sum(self._failure is not None) != [0]:
            self._raise(RuntimeError)
        if str(self._last) not in self.stages:
            return None
        results = [self._values.pop((self._last + 1, "F", i)) for i in range(self.num_microbatches)]
        if targets is None:
            outputs = [torch.cat(parts) for parts in zip(*results, strict=True)]
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        return torch.stack([loss.detach() for (loss,) in results]).sum()

    @property
    def timeline(self):
        """(action, start, end) of the last step's, in seconds; on a GPU this waits for it."""
        return [
            (action, seconds(self._began, start), seconds(self._began, end))
            for action, start, end in self._timeline
        ]

    @torch.no_grad()
    def eval_step(self, inputs=None, targets=None):
        """Forward only; -> where the last stage is the mean loss, or without targets its outputs, concatenated."""
        return self.step(inputs, targets)

    def _start(self, inputs, targets):
        """Hear from all ranks whether the batch is right, and like the one before."""
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        grad, before, tensors = torch.is_grad_enabled(), self._batch, (*inputs, *self.parameters())
        self._batch = grad, [form(tensor) for tensor in tensors if torch.is_tensor(tensor)]
        self._arriving, self._leaving = (
            {},
            [],
        )  # transfers to wait for before that; transfers and their tensors, kept
        self._values, self._failure, self._timeline = {}, None, []
        try:
            self._cut(inputs, targets)
        except Exception as error:
            self._failure = error, f"rank {self._rank}: {error}"
        with_grad, changed, failed = self._sum(
            grad, self._batch != before, self._failure is not None
        )
        if with_grad not in (0, len(self.schedule)):
            raise ValueError(
                f"{with_grad} of {len(self.schedule)} ranks have gradients enabled; all or none must"
            )
        if failed:
            self._raise(ValueError)
        self._forms = {} if changed else self._forms
        self._began = now(self.device)  # on all ranks at about one time

    def _cut(self, inputs, targets):
        """Cut the batch into micro-batches: on the first stage's rank the inputs, on the last one's the targets."""
        m = self.num_microbatches
        if "0" in self.stages:
            parts = [self._chunks("inputs", x) for x in inputs]
            self._values = {(0, "F", i): [part[i] for part in parts] for i in range(m)}
        self._targets = None
        if str(self._last) in self.stages and (torch.is_grad_enabled() or targets is not None):
            self._targets = self._chunks("targets", targets)
            weights = [float(self.weight(target)) for target in self._targets]
            self._shares = [weight / sum(weights) for weight in weights]

    def _chunks(self, name, tensor):
        m = self.num_microbatches
        if not torch.is_tensor(tensor):
            raise ValueError(
                f"{name} must be a tensor on the rank that takes them, not {type(tensor).__name__}"
            )
        pieces = tensor.chunk(m)
        if len(pieces) != m:
            raise ValueError(
                f"torch.chunk cuts {len(tensor)} samples into {len(pieces)} micro-batches, not into {m}"
            )
        return pieces

    def _raise(self, elsewhere):
        """Raise this rank's failure, or tell that of another."""
        (error, text), texts, self._forms = (
            self._failure or (None, None),
            [None] * len(self.schedule),
            {},
        )
        dist.all_gather_object(texts, text, group=self.process_group)
        raise error or elsewhere(next(filter(None, texts)))

    def _run(self, action):
        """Run an action on what others have left for it."""
        stage, kind, i = parse(action)
        key = stage, "B" if kind == "I" else kind, i
        given = self._values.pop(key, None)
        for transfer in self._arriving.pop(key, ()):
            transfer.wait()
        if (
            given is None or self._failure
        ):  # here, or where it should come from: only messages go on
            return
        began, F.linear = now(self.device), self._linear
        try:
            (self._forward if kind == "F" else self._backward)(stage, kind, i, given)
        except Exception as error:
            self._failure = error, f"rank {self._rank} failed in {action} with {error!r}"
        finally:
            F.linear = linear
        self._timeline.append((action, began, now(self.device)))

    def _forward(self, stage, kind, i, x):
        x = [t.to(self.device).detach().requires_grad_(t.requires_grad) for t in x]
        y = self.stages[str(stage)](*x)
        who = f"stage {stage}"
        if stage == self._last and self._targets is not None:
            y = (
                self.loss_fn(y, self._targets[i].to(self.device)) * self._shares[i]
            )  # scaled only here
            who = "loss_fn"
        y = y if isinstance(y, tuple) else (y,)
        if not all(map(torch.is_tensor, y)):
            raise ValueError(
                f"{who} returned {', '.join(type(t).__name__ for t in y)}; a stage returns a tensor or a tuple of tensors"
            )
        if who == "loss_fn":
            self._values[stage, "B", i] = [torch.ones_like(y[0])]
        if torch.is_grad_enabled():
            self._values[stage, "graph", i] = x, [t for t in y if t.requires_grad]
        y = [t.detach().requires_grad_(t.requires_grad) for t in y]
        was, now = self._forms.get((stage + 1, "F", i)), [form(t) for t in y]
        if was not in (None, now):  # the receiver will expect what was
            raise RuntimeError(
                f"the output was {was} for inputs of the same shapes, and is now {now}"
            )
        self._values[stage + 1, "F", i] = y

    def _backward(self, stage, kind, i, given):
        if kind != "W":
            gradients = [g.to(self.device) for g in given]
            SplitLinear.todo = given = []
            x, y = self._values.pop((stage, "graph", i))
            torch.autograd.backward(y, gradients)
            SplitLinear.todo = []  # else it would keep this micro-batch's inputs until the next I
            leaves = [t for t in x if t.requires_grad]  # zeros for what the stage has not used
            self._values[stage - 1, "B", i] = [
                torch.zeros_like(t) if t.grad is None else t.grad for t in leaves
            ]
        if kind == "I":
            self._values[stage, "W", i] = given
        elif given:  # all at once: gradients of a weight used twice are added in the same order as in one backward
            outputs, gradients, weights = zip(*given, strict=True)
            torch.autograd.backward(
                outputs, gradients, inputs=list(dict.fromkeys(itertools.chain(*weights)))
            )

    def _message(self, action, src, dst):
        """Start to send, or to receive, the output of an action of rank `src`, where rank `dst` takes it."""
        taken, group, sending = taker(action), self.process_group, src == self._rank
        peer = dst if sending else src
        value = self._values.pop(taken, None)
        if (
            taken not in self._forms
        ):  # for a new kind of batch, what is passed on is preceded by what it is like
            if sending:  # None after a failure
                forms = None if value is None else [form(t) for t in value]
                self._forms[taken] = forms
                self._send_object(forms, peer)
            else:
                self._forms[taken] = self._recv_object(peer)
        if value is None:
            forms = self._forms[taken]
            value = [
                torch.zeros(s, dtype=d, device=self._wire, requires_grad=grad)
                for s, d, grad in forms or ()
            ]
        if sending:
            for t in [t.detach().to(self._wire).contiguous() for t in value]:
                self._leaving += [(work, t) for work in start_transfer(dist.isend, t, peer, group)]
            while len(self._leaving) > 4:  # a sender is seldom further ahead of its receiver
                self._leaving.pop(0)[0].wait()
        else:
            self._arriving[taken] = [
                work for t in value for work in start_transfer(dist.irecv, t.detach(), peer, group)
            ]
            self._values[taken] = None if self._forms[taken] is None else value

    def _send_object(self, obj, peer):
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]).to(self._wire), data.to(self._wire)):
            works = start_transfer(dist.isend, tensor, peer, self.process_group)
            self._leaving += [(work, tensor) for work in works]

    def _recv_object(self, peer):
        size = transfer(
            dist.irecv,
            torch.empty(1, dtype=torch.int64, device=self._wire),
            peer,
            self.process_group,
        )
        data = transfer(
            dist.irecv,
            torch.empty(size.item(), dtype=torch.uint8, device=self._wire),
            peer,
            self.process_group,
        )
        return pickle.loads(bytes(data.tolist()))

    def _sum(self, *numbers):
        sums = torch.tensor(numbers, dtype=torch.int64, device=self._wire)
        dist.all_reduce(sums, group=self.process_group)
        return sums.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    flags = {
        "--schedule": {"choices": SCHEDULES, "default": "1f1b"},
        "--microbatches": {"type": int, "default": 4, "metavar": "M"},
        "--trace": {
            "metavar": "FILE",
            "help": "write the last step as Chrome trace JSON (ui.perfetto.dev)",
        },
    }
    demo = Demo(flags)
    name, m, p, rank = demo.args.schedule, demo.args.microbatches, demo.ranks, demo.rank
    v, blocks, batch = 1 + (name == "interleaved_1f1b"), len(language_model()) - 3, 8 * p
    if m < 1 or batch % m or p * v > blocks + 1:
        demo.stop(
            f"{p} × {v} stages of {blocks} blocks; {m} micro-batches, which must divide {batch} sequences"
        )
    model = demo.start(
        f"pipeline {name}", bitwise=m & (m - 1) == 0, parts=m
    )  # losses times 1/4, say, are exact
    plain, stages = split(demo.model, p * v), split(model, p * v)[rank::p]
    plain[rank::p] = stages  # each rank compares the stages that it has
    parameters = list(nn.ModuleList(plain).parameters())
    pipeline = Pipeline(stages, name, m, language_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    demo.train(step, lambda: ([parameter.grad for parameter in parameters], parameters))
    sent = (
        ("(2v-1)m·bsh", (2 * v - 1) * batch * 64 * 192 * parameters[0].itemsize)
        if p > 1
        else ("0", 0)
    )
    status = demo.report(held(pipeline.parameters(), optimizer), *sent)
    show_timelines(demo, pipeline)
    return status


def split(
    model, num_stages
):  # blocks evenly; the embedding is with the first, norm and head with the last
    cuts = [
        0,
        *(1 + (len(model) - 3) * stage // num_stages for stage in range(1, num_stages)),
        len(model),
    ]
    return [model[a:b] for a, b in itertools.pairwise(cuts)]


def show_timelines(demo, pipeline, width=100):
    """The last step's, beside what simulate() predicts for it."""
    measured, times = [None] * demo.ranks, simulate(pipeline.schedule)
    dist.all_gather_object(measured, pipeline.timeline)
    predicted = [
        [(action, times.start[action], times.end[action]) for action in row]
        for row in pipeline.schedule
    ]
    demo.show(
        "|0F2-- is stage 0's forward of micro-batch 2, as long as it took (where that is short, cut off);"
    )
    demo.show(
        "F forward, B backward, or I and W, backward for input and weights; blank: the rank waits, the bubble"
    )
    for title, rows in ("predicted, where B is two F", predicted), ("measured", measured):
        total, busy, events = (
            max(row[-1][2] for row in rows),
            sum(e - s for _, s, e in itertools.chain(*rows)),
            [],
        )
        demo.show(f"{title}: bubble {1 - busy / total / len(rows):.0%}")
        for rank, row in enumerate(rows):
            line = ""
            for name, s, e in row:
                a, b = round(s / total * width), round(e / total * width)
                line = line.ljust(a) + f"|{name}".ljust(b - a, "-")[: b - a]
                events.append(
                    {
                        "name": name,
                        "ph": "X",
                        "pid": 0,
                        "tid": rank,
                        "ts": 1e6 * s,
                        "dur": 1e6 * (e - s),
                    }
                )
            demo.show(f"  rank {rank:<4} {line}")
    if demo.args.trace and demo.rank == 0:
        Path(demo.args.trace).write_text(json.dumps({"traceEvents": events}))


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


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
    """Adds up the bytes that this rank sends. A collective counts as its ring algorithm sends."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "_allgather_base_": (1, 0)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.total += self.sent_by(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent_by(self, operator, args):
        if operator in ("send", "recv_"):
            return args[0][0].nbytes if operator == "send" else 0
        rounds, payload = self.RING[operator]  # KeyError: an unknown operator is not 0 bytes
        handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(handle)
        if operator == "alltoall_base_" and args[4]:  # the rows that each rank gets
            rows = sum(args[4]) - args[4][group.rank()]
            return rows * args[payload][:1].nbytes
        size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return rounds * size * (group.size() - 1) / group.size()


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A storage that several of them share counts once."""
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
    """Initialize the default group: NCCL if all ranks on all machines can use it, else gloo."""
    timeout = timedelta(seconds=120)
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    else:  # without torchrun
        store, rank, ranks = dist.HashStore(), 0, 1
    store.set(f"backend/{rank}", backend)
    backends = {store.get(f"backend/{peer}") for peer in range(ranks)}
    backend = "nccl" if backends == {b"nccl"} else "gloo"
    options = {"store": store, "rank": rank, "world_size": ranks, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, **options)


class Demo:
    """Trains with a technique and, beside it, the same model on one device, and compares the two.

    If the technique claims to be bitwise equal, they train in float32, otherwise in float64.
    """

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error = self.stop
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--device", choices=devices, default=devices[-1])
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="a text")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")
        self.device, backend = choose_device(self.args.device)
        join_world(self.device, backend)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: every rank finds the same error

    def show(self, line="", end="\n"):
        if self.rank == 0:
            print(line, end=end, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`."""
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        torch.manual_seed(self.args.seed)
        dtype = torch.float64 if self.tolerance else torch.float32
        self.model = language_model().to(self.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        world += f" · {self.device.type}/{dist.get_backend()}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

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

    def train(self, step, whole):
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
        for number in range(self.args.steps):
            batch = self.batch(number)
            is_last = number + 1 == self.args.steps
            start = self.now()
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
            self.show_progress(number + 1)

    def show_progress(self, done):
        line = f"step {done}/{self.args.steps}   loss {self.losses[-1]:.3f}"
        if sys.stdout.isatty():
            self.show(line, end="\r")
        elif (done - 1) % -(-self.args.steps // 3) == 0:  # a log gets three lines
            self.show(line)

    def report(self, held_here, formula, sent):
        """Print what the README explains. Return the exit status: 1 if a rank found a difference."""
        differences = torch.tensor(self.differences, device=self.device)
        largest = differences.nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain_held = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain_held)
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        held_line = f"params {params}   grads {grads}   optimizer {state}"
        self.show(f"held/rank   {held_line}      (1 device: {plain})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

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
Left out: tied parameters, data parallelism around stages, clipping (parallel_3d.py); the gradient of inputs; layouts
          on the wire (all arrives contiguous); W for layers that are not linear
"""

import argparse
import collections
import copy
import functools
import graphlib
import itertools
import json
import os
import re
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
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
# 2. A schedule is data: for each rank a list of actions, stage · F, B, I or W · micro-batch, as in "2F0".
#    One list is simulated, drawn, tested and executed.

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def build_schedule(name, num_ranks, num_microbatches, stages_per_rank=1):
    """For each rank its list of actions, for any number of micro-batches; stage s is on rank s % num_ranks."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if name not in SCHEDULES or min(p, m, v) < 1:
        text = f"{p} ranks, {m} micro-batches and {v} stages per rank; names are {', '.join(SCHEDULES)}"
        raise ValueError(f"no schedule {name!r} with {text}")
    # Micro-batches go in rounds: all of a round through the rank's first stage, then all through its next.
    num_rounds = {"naive": m, "gpipe": 1}.get(name, max(1, m // p))
    rounds = [range(m * k // num_rounds, m * (k + 1) // num_rounds) for k in range(num_rounds)]
    # How many forwards a rank is ahead of its backwards: the last rank must take a round through its v - 1 other stages
    # before its first backward. From then on forwards and backwards alternate. While rank r + 1 runs a forward and the
    # backward after it, for which rank r waits, r can run the next forward: so r is one further ahead than r + 1.
    # Interleaved it is two, as in Megatron-LM and PyTorch: activations and gradients get the time of a forward and a
    # backward to arrive. (If transfers took no time, one would do: the same bubble, and fewer alive.)
    hop = 2 if name == "interleaved_1f1b" else 1
    schedule = []
    for rank in range(p):
        stages, ahead = range(rank, p * v, p), (v - 1) * max(map(len, rounds)) + hop * (p - 1 - rank)
        forward = [(s, i) for r in rounds for s in stages for i in r]
        backward = [(s, i) for r in rounds for s in reversed(stages) for i in r]
        weights = iter([f"{s}W{i}" for s, i in backward] if name == "zero_bubble" else [])
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


def parse(action):
    """Of "2F0" -> 2, "F", 0."""
    if not (match := re.fullmatch(r"(\d+)([FBIW])(\d+)", action)):
        raise ValueError(f"{action!r} is not stage, F, B, I or W, micro-batch, as in '2F0'")
    return int(match[1]), match[2], int(match[3])


def check(schedule):
    """-> {stage: rank}, number of micro-batches. ValueError unless each has F and B, or F, I and W, on each stage."""
    actions = [(rank, *parse(action)) for rank, row in enumerate(schedule) for action in row]
    rank_of, done = {stage: rank for rank, stage, *_ in actions}, collections.defaultdict(str)
    for rank, stage, kind, i in actions:
        done[rank, stage, i] += kind
    m = 1 + max((i for *_, i in actions), default=0)
    for stage, i in itertools.product(range(1 + max(rank_of, default=0)), range(m)):
        rank = rank_of.get(stage)
        if sorted(kinds := done[rank, stage, i]) not in (["B", "F"], ["F", "I", "W"]):
            text = f"stage {stage}, micro-batch {i}, rank {rank}: {kinds or 'nothing'} is done"
            raise ValueError(f"{text}; it must be F and B, or F, I and W")
    return rank_of, m


Simulation = collections.namedtuple("Simulation", "start end bubble_fraction peak_activations")


def simulate(schedule, cost=COST):
    """When each action runs if a rank follows its list and an action waits for what it needs; transfers take no time.

    `cost`: time by kind ("F"), or by stage and kind ("2F"), which goes first.
    -> start and end, by action; the share of all ranks' time that is idle; for each rank, the most micro-batches, of
    each stage, that are between F and B or W. ValueError: an action is missing or repeated, or there is a deadlock.
    """
    schedule, cost, before = flat(schedule), COST | dict(cost), {}
    rank_of, _ = check(schedule)
    for actions in schedule:
        for previous, action in zip([None, *actions], actions, strict=False):
            stage, kind, i = parse(action)
            backward = [f"{stage}F{i}", f"{stage + 1}B{i}", f"{stage + 1}I{i}"]  # of B and I there is one
            before[action] = [previous, *{"F": [f"{stage - 1}F{i}"], "W": [f"{stage}I{i}"]}.get(kind, backward)]
    before = {action: [need for need in needs if need in before] for action, needs in before.items()}
    start, end = {}, {}
    try:
        for action in graphlib.TopologicalSorter(before).static_order():
            stage, kind, _ = parse(action)
            start[action] = max((end[need] for need in before[action]), default=0)
            end[action] = start[action] + cost.get(f"{stage}{kind}", cost[kind])
    except graphlib.CycleError as error:
        cycle = [f"{action} (rank {rank_of[parse(action)[0]]})" for action in reversed(error.args[1])]
        raise ValueError(f"the schedule deadlocks: {' waits for '.join(cycle)}") from None
    busy, total = sum(end.values()) - sum(start.values()), max(end.values()) * len(schedule)
    alive = [itertools.accumulate({"F": 1, "I": 0}.get(parse(a)[1], -1) for a in actions) for actions in schedule]
    return Simulation(start, end, 1 - busy / total, [max(n, default=0) for n in alive])


def flat(schedule):
    """As PyTorch writes schedules -> actions alone. Idle cells and communication go; "(0F4;7B0)OVERLAP_F_B" is two."""
    other = re.compile(r"[();]|OVERLAP_F_B|\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB])\d*")
    return [other.sub(" ", " ".join(filter(None, cells))).split() for cells in schedule]


def schedule_to_csv(schedule, path):
    """A line per rank, as PyTorch's _load_csv(path, format="compute_only") reads it."""
    Path(path).write_text("".join(",".join(actions) + "\n" for actions in flat(schedule)))


def schedule_from_csv(path):
    """Read what PyTorch's _dump_csv writes, in both of its formats."""
    return flat(line.split(",") for line in Path(path).read_text().splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# 3. What the interpreter is made of: messages between actions, and backward in two.


def taker(action):
    """Who takes the output: (stage, kind, micro-batch), "B" standing for I as well."""
    stage, kind, i = parse(action)
    return {"F": (stage + 1, "F", i), "W": (stage, "W", i)}.get(kind, (stage - 1, "B", i))


def add_messages(schedule):
    """For each rank what it does, in order: [(method of Pipeline, action), …].

    Simulated time puts everything in one order, an action at its end and its message right after it, and each rank does
    its part of that. What anything waits for stands before it: so the first thing not yet done can always be done, even
    if sends wait for receivers (NCCL), and nothing deadlocks. A receive is posted before the actions that hide it.
    """
    programs, rank_of, end = [[] for _ in schedule], check(schedule)[0], simulate(schedule).end
    for action in sorted(end, key=end.get):
        src, dst = rank_of[parse(action)[0]], rank_of.get(taker(action)[0])
        programs[src].append(("_run", action))
        for rank in {src, dst} if dst not in (None, src) else ():
            programs[rank].append(("_message", action))
    return programs


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def like(tensors):
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]


def leaf(tensor):
    """The same memory, without the graph that it comes from."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def cut(tensor, parts):
    pieces = tensor.chunk(parts)
    if len(pieces) != parts:
        raise ValueError(f"torch.chunk cuts {len(tensor)} samples into {len(pieces)} micro-batches, not into {parts}")
    return pieces


linear = F.linear


def split_linear(x, weight, bias=None):
    """Stands for F.linear, which PyTorch's modules call, while a schedule with I and W runs."""
    trained = weight.requires_grad and weight.is_leaf and (bias is None or bias.is_leaf)
    if trained and torch.is_grad_enabled():
        return SplitLinear.apply(torch.empty((), requires_grad=True), x, (weight, bias))
    return linear(x, weight, bias)  # the gradient of a weight that is computed is needed in I


class SplitLinear(torch.autograd.Function):
    """F.linear as a small graph of its own: I asks it for the input's gradient, W, later, for those of the weights.

    These are no inputs of this node, which would run their hooks in I as well; the anchor makes autograd come here.
    """

    todo = []  # what the backward that runs now leaves to W: (output, its gradient, weights)

    @staticmethod
    def forward(ctx, anchor, x, weights):
        # Without the hooks of a checkpoint around it, which would compute everything again for I, and again for W
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.enable_grad(), keep:
            ctx.x = leaf(x)
            ctx.y, ctx.weights = linear(ctx.x, *weights), weights
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        SplitLinear.todo.append((ctx.y, gradient, [w for w in ctx.weights if w is not None and w.requires_grad]))
        wanted = ctx.needs_input_grad[1]
        return None, torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)[0] if wanted else None, None


def backward_weights(todo):
    if todo:  # all at once: gradients of a weight used twice are added in the same order as in one backward
        outputs, gradients, weights = zip(*todo, strict=True)
        torch.autograd.backward(outputs, gradients, inputs=list(dict.fromkeys(itertools.chain(*weights))))


# ---------------------------------------------------------------------------------------------------------------------
# 4. One interpreter runs any schedule.


class Pipeline(nn.Module):
    """Runs this rank's stages, forward and backward, in the order that a schedule gives.

    stages: a module, or the list of this rank's modules in stage order. Each is called with what the one before it
        returned: a tensor, or a tuple of tensors, which are then its arguments.
    schedule: a name (build_schedule), or for each rank its list of actions, in PyTorch's notation.
    num_microbatches: the batch is cut into so many along dimension 0, as torch.chunk does.
    loss_fn: loss_fn(output, target) -> mean loss of a micro-batch.
    weight: weight(target) -> how much a micro-batch counts in the batch's mean: its samples, or its tokens not masked.

    `timeline` is the last step's: (action, start, end) in seconds of the host's clock.
    """

    def __init__(self, stages, schedule, num_microbatches, loss_fn, process_group=None, *, weight=len):
        super().__init__()
        self.process_group, self._rank = process_group, dist.get_rank(process_group)
        if self._rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
        self.num_microbatches, self.loss_fn, self.weight = num_microbatches, loss_fn, weight
        stages = list(stages) if isinstance(stages, (list, tuple, nn.ModuleList)) else [stages]
        if isinstance(schedule, str):
            schedule = build_schedule(schedule, dist.get_world_size(process_group), num_microbatches, len(stages))
        self.schedule = flat(schedule)
        given = self._all_gather((self.schedule, num_microbatches, len(stages)))
        self._rank_of, m = check(self.schedule)
        counts = [list(self._rank_of.values()).count(rank) for rank in range(len(self.schedule))]
        if given != [(self.schedule, m, count) for count in counts]:
            text = f"given are {num_microbatches} and {[n for *_, n in given]}, or different schedules"
            raise ValueError(f"the schedule has {m} micro-batches and, by rank, {counts} stages; {text}")
        mine = [stage for stage, rank in sorted(self._rank_of.items()) if rank == self._rank]
        self.stages = nn.ModuleDict({str(index): stage for index, stage in zip(mine, stages, strict=True)})
        self._program, self._last = add_messages(self.schedule)[self._rank], max(self._rank_of)
        gloo = dist.get_backend(process_group) == "gloo"  # which sends from the host's memory
        self._wire = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
        self.device = next((parameter.device for parameter in self.parameters()), self._wire)
        self._batch, self._forms = None, {}  # what the last batch was like, and what it made the stages pass on

    def step(self, inputs=None, targets=None):
        """Forward and backward of a batch; adds to .grad what a loop over its micro-batches on one device would.

        `inputs`, a tensor or a tuple of tensors, are for stage 0, `targets`, a tensor, for loss_fn; ignored elsewhere.
        -> the mean loss where the last stage is, None elsewhere. Forward only under torch.no_grad().
        An error on one rank is raised there, and as a RuntimeError on all others. Gradients are incomplete then.
        """
        self._start(as_tuple(inputs), targets)
        if any("I" in action for action in self.schedule[self._rank]):
            F.linear = split_linear
        try:
            for do, action in self._program:
                if torch.is_grad_enabled() or "F" in action:
                    getattr(self, do)(action)
        finally:
            F.linear = linear
        return self._finish()

    @torch.no_grad()
    def eval_step(self, inputs=None, targets=None):
        """Forward only; -> where the last stage is the mean loss, or without targets its outputs, concatenated."""
        return self.step(inputs, targets)

    def _start(self, inputs, targets):
        """Hear from all ranks whether the batch is like the one before, and cut it."""
        m, grad = self.num_microbatches, torch.is_grad_enabled()
        self._values = {}  # by who takes it, (stage, kind, micro-batch): list of tensors; none after a failure
        self._arriving = {}  # the same: transfers to wait for before that
        self._leaving = []  # transfers and their tensors, both kept until they are over
        self._failure, self._targets, self.timeline = None, None, []
        before, self._batch = self._batch, (grad, like(filter(torch.is_tensor, inputs)), like(self.parameters()))
        with_grad, changed = self._sum(grad, self._batch != before)
        if changed:
            self._forms = {}
        if with_grad not in (0, len(self.schedule)):
            raise ValueError(f"{with_grad} of {len(self.schedule)} ranks have gradients enabled; all or none must")
        self._began = time.perf_counter()  # on all ranks at about one time
        try:
            if "0" in self.stages:
                parts = zip(*(cut(t, m) for t in inputs), strict=True)
                self._values = {(0, "F", i): x for i, x in enumerate(parts)}
            if str(self._last) in self.stages and (grad or targets is not None):
                self._targets = cut(targets, m)
                weights = [float(self.weight(target)) for target in self._targets]
                self._weights = [weight * m / sum(weights) for weight in weights]  # 1.0 if they are equal
        except Exception as error:  # messages go on, so that no rank hangs, and in the end all raise
            self._failure = "its batch", error

    def _run(self, action):
        """Run an action on what others have left for it."""
        stage, kind, i = parse(action)
        key = stage, "B" if kind == "I" else kind, i
        given = self._values.pop(key, None)
        for transfer in self._arriving.pop(key, ()):
            transfer.wait()
        if given is None or self._failure:  # here, or where it should come from: only messages go on
            return
        began = time.perf_counter() - self._began
        try:
            if kind == "F":
                self._forward(stage, i, given)
            elif kind == "W":
                backward_weights(given)
            else:
                self._backward(stage, kind, i, given)
        except Exception as error:
            self._failure = action, error
        self.timeline.append((action, began, time.perf_counter() - self._began))

    def _forward(self, stage, i, x):
        x = [leaf(t.to(self.device)) for t in x]
        y = self.stages[str(stage)](*x)
        if stage == self._last and self._targets is not None:
            y = self.loss_fn(y, self._targets[i])
            self._values[stage, "B", i] = [y.new_tensor(self._weights[i] / self.num_microbatches)]  # scaled only here
        y = as_tuple(y)
        if torch.is_grad_enabled():
            self._values[stage, "graph", i] = x, [t for t in y if t.requires_grad]
        y = [leaf(t) for t in y]
        if (before := self._forms.get((stage, i), like(y))) != like(y):  # and the receiver will expect `before`
            raise RuntimeError(f"the output was {before} for inputs of the same shapes, and is now {like(y)}")
        self._values[stage + 1, "F", i] = y

    def _backward(self, stage, kind, i, gradients):
        x, y = self._values.pop((stage, "graph", i))
        SplitLinear.todo = todo = []
        if y:
            torch.autograd.backward(y, [g.to(self.device) for g in gradients])
        if kind == "I":
            self._values[stage, "W", i] = todo
        else:
            backward_weights(todo)
        leaves = [t for t in x if t.requires_grad]  # zeros for what the stage has not used
        self._values[stage - 1, "B", i] = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]

    def _message(self, action):
        """Start to send, or to receive, the output of an action."""
        (stage, kind, i), taken, group = parse(action), taker(action), self.process_group
        src, dst = self._rank_of[stage], self._rank_of[taken[0]]
        edge, sending, value = (min(stage, taken[0]), i), src == self._rank, self._values.pop(taken, None)
        if edge not in self._forms:  # activations of a new kind of batch are preceded by what they are like
            box = [like(value or ())]  # nothing after a failure
            if sending:
                dist.send_object_list(box, group=group, group_dst=dst)
            else:
                dist.recv_object_list(box, group=group, group_src=src)
            self._forms[edge] = box[0]
        forms = self._forms[edge] if kind == "F" else [(s, d, False) for s, d, grad in self._forms[edge] if grad]
        if value is None:  # to be received, or after a failure
            value = [torch.zeros(s, dtype=d, device=self._wire, requires_grad=grad) for s, d, grad in forms]
        if sending:
            tensors = [t.detach().to(self._wire).contiguous() for t in value]
            self._leaving += [(dist.isend(t, group=group, group_dst=dst), t) for t in tensors]
            while len(self._leaving) > 4:  # a sender is seldom further ahead of its receiver
                self._leaving.pop(0)[0].wait()
        else:
            self._arriving[taken] = [dist.irecv(t.detach(), group=group, group_src=src) for t in value]
            self._values[taken] = value if self._forms[edge] else None

    def _finish(self):
        for transfer, _ in self._leaving:
            transfer.wait()
        if self._sum(self._failure is not None) != [0]:
            self._forms = {}
            action, error = self._failure or (None, None)
            text = f"rank {self._rank} failed in {action} with {type(error).__name__}: {error}"
            failures = self._all_gather(error and text)
            raise error or RuntimeError(next(filter(None, failures)))
        if str(self._last) not in self.stages:
            return None
        results = [self._values.pop((self._last + 1, "F", i)) for i in range(self.num_microbatches)]
        if self._targets is None:
            outputs = [torch.cat(parts) for parts in zip(*results, strict=True)]
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        losses = torch.stack([loss.detach() for (loss,) in results])
        return (losses * losses.new_tensor(self._weights)).mean()

    def _all_gather(self, mine):
        everyone = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(everyone, mine, group=self.process_group)
        return everyone

    def _sum(self, *numbers):
        sums = torch.tensor(numbers, dtype=torch.int64, device=self._wire)
        dist.all_reduce(sums, group=self.process_group)
        return sums.tolist()


def split(layers, num_stages):
    """A list of layers -> `num_stages` nn.Sequentials of about as many parameters each, and of at least one layer."""
    layers = list(layers)
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be {num_stages} stages")
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    ends, cuts = list(itertools.accumulate(sizes)), [0]
    for stage in range(1, num_stages):  # a layer goes where its middle is
        share = ends[-1] * stage / num_stages
        before = sum(end - size / 2 < share for end, size in zip(ends, sizes, strict=True))
        cuts.append(min(max(before, cuts[-1] + 1), len(layers) - num_stages + stage))
    return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise([*cuts, len(layers)])]


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    flags = {
        "--schedule": {"choices": SCHEDULES, "default": "1f1b"},
        "--microbatches": {"type": int, "default": 4, "metavar": "M"},
        "--trace": {"metavar": "FILE", "help": "write both timelines as Chrome trace JSON (ui.perfetto.dev)"},
    }
    demo = Demo(flags)
    name, m, p, rank = demo.args.schedule, demo.args.microbatches, demo.ranks, demo.rank
    v, layers, batch = 1 + (name == "interleaved_1f1b"), len(language_model()), 8 * p
    if m < 1 or batch % m or not 1 <= p * v <= layers:
        demo.stop(f"{p} × {v} stages of {layers} layers; {m} micro-batches, which must divide {batch} sequences")
    model = demo.start(f"pipeline {name}", bitwise=m & (m - 1) == 0, parts=m)  # losses times 1/4, say, are exact
    plain, stages = split(demo.model, p * v), split(model, p * v)[rank::p]
    pipeline = Pipeline(stages, name, m, language_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    def whole():  # each rank compares the stages that it has
        plain[rank::p] = stages
        parameters = list(nn.Sequential(*plain).parameters())
        return [parameter.grad for parameter in parameters], parameters

    demo.train(step, whole)
    mbsh = batch * 64 * 192 * next(demo.model.parameters()).itemsize  # bytes
    sent = ("(2v-1)m·bsh", (2 * v - 1) * mbsh) if p > 1 else ("0", 0)
    status = demo.report(held(pipeline.parameters(), optimizer), *sent)
    show_timelines(demo, pipeline)
    return status


def show_timelines(demo, pipeline, width=100):
    """The last step's, beside what simulate() predicts from the median time of each stage's actions."""
    measured, durations, events = pipeline._all_gather(pipeline.timeline), collections.defaultdict(list), []
    for action, start, end in itertools.chain(*measured):
        durations["{}{}".format(*parse(action))].append(end - start)
    times = simulate(pipeline.schedule, {key: statistics.median(values) for key, values in durations.items()})
    predicted = [[(action, times.start[action], times.end[action]) for action in row] for row in pipeline.schedule]
    demo.show("|0F2-- is stage 0's forward of micro-batch 2, as long as it took (where that is short, cut off);")
    demo.show("F forward, B backward, or I and W, backward for input and weights; blank: the rank waits, the bubble")
    for title, rows in ("predicted", predicted), ("measured", measured):
        begin, end = min(row[0][1] for row in rows), max(row[-1][2] for row in rows)
        busy = sum(end - start for _, start, end in itertools.chain(*rows))
        demo.show(f"{title}: {1e3 * (end - begin):.0f} ms, bubble {1 - busy / (end - begin) / len(rows):.0%}")
        for rank, row in enumerate(rows):
            line = ""
            for action, *span in row:
                a, b = (round((t - begin) / (end - begin) * width) for t in span)
                line = line.ljust(a) + f"|{action}".ljust(b - a, "-")[: b - a]
                event = {"name": action, "ph": "X", "ts": 1e6 * span[0], "dur": 1e6 * (span[1] - span[0])}
                events.append(event | {"pid": title, "tid": rank})
            demo.show(f"  rank {rank:<4} {line}")
    if demo.args.trace and demo.rank == 0:
        Path(demo.args.trace).write_text(json.dumps({"traceEvents": events}))


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, in this world and on one device. The same text in every file.


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.head_dim, self.norm1, self.norm2 = C // heads, nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.linear1, self.linear2 = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):  # (batch, time, C); q, k, v: (batch, heads, time, head_dim)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


def language_model(C=192, heads=6, layers=4, V=256):  # knows of positions what the causal mask tells
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(V, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends; those of collectives as their ring algorithms send them."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "_allgather_base_": (1, 0), "_reduce_scatter_base_": (1, 1)}
    RING = RING | {"alltoall_base_": (1, 1), "send": (1, 0), "recv_": (0, 0)}
    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            rounds, payload = self.RING[func.__name__.split(".")[0]]  # KeyError: what is not known is not 0 bytes
            N = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            times = 1 if func.__name__.startswith("send") else rounds * (N - 1) / N
            self.total += times * sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(parameters, optimizer):  # -> bytes of the storages behind parameters, gradients and optimizer state
    parameters, state = list(parameters), filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes([p.grad for p in parameters if p.grad is not None]), held_bytes(state)


class Demo:
    """Trains a technique and the same model on one device, step by step, and compares: in float64 where not bitwise."""

    def __init__(self, flags=None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error, devices = self.stop, ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="text to train on")
        parser.add_argument("--device", choices=devices, default=devices[-1])
        numbers = {"--steps": {"type": int, "default": 30}, "--seed": {"type": int, "default": 0}}
        for flag, options in {**numbers, **(flags or {})}.items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        try:
            text = Path(self.args.data).read_bytes()
        except OSError as error:
            self.stop(f"--data {self.args.data}: {error.strerror}")
        if self.args.steps < 1 or len(text) < 66:
            self.stop(f"--steps {self.args.steps} on {len(text)} bytes: at least 1 step, on 66 bytes")
        self.text, self.device = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.device(self.args.device)
        if gpus := torch.cuda.device_count() if self.args.device == "cuda" else 0:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"  # NCCL: one GPU a rank
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.show = functools.partial(print, flush=True) if self.rank == 0 else lambda *args, **kwargs: None
        self.part = lambda batch: batch.chunk(self.ranks)[self.rank]

    def stop(self, message):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(9)  # it is wrong on all ranks: the first says so, and torchrun ends the others
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    def start(self, name, bitwise=False, parts=None):  # -> a copy of the plain model, which takes `parts` of a batch
        self.parts, self.tolerance = parts or self.ranks, 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, torch.float64 if self.tolerance else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = f"{self.ranks} rank{'s' * (self.ranks > 1)} · {self.device.type}/{dist.get_backend()}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(self, number):  # -> inputs, targets of a step, (batch, time): 8 sequences of 64 bytes for each rank
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, *batch):  # -> [loss, *gradients, *parameters]
        losses, parameters = [], [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer.zero_grad()
        for inputs, targets in zip(*(tensor.chunk(self.parts) for tensor in batch), strict=True):
            losses.append(language_loss(self.model(inputs), targets))
            losses[-1].backward()
        for parameter in parameters:
            parameter.grad /= self.parts  # after the sum: before it, 3 parts would round differently
        self.optimizer.step()
        return [torch.stack(losses).mean().cpu(), *(parameter.grad for parameter in parameters), *parameters]

    def train(self, step, whole):  # step(inputs, targets) -> this rank's loss or None; whole() -> gradients, parameters
        self.losses, self.times, self.differences, terminal = [], [], [0.0], sys.stdout.isatty()
        for number in range(self.args.steps):
            batch, losses, start = self.batch(number), [None] * self.ranks, time.perf_counter()
            with SentBytes() if number == self.args.steps - 1 else nullcontext() as self.sent:  # it takes time
                loss = step(*batch)
            loss, middle = None if loss is None else loss.item(), time.perf_counter()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, time.perf_counter() - middle))
            dist.all_gather_object(losses, loss)
            loss = torch.tensor([loss for loss in losses if loss is not None], dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            pairs = zip([loss, *(tensor for kind in whole() for tensor in kind)], plain, strict=True)
            self.differences += [(a - b).abs().max().item() for a, b in pairs if not torch.equal(a, b)]
            if terminal or number % -(-self.args.steps // 3) == 0:
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss:.3f}", end="\r" if terminal else "\n")

    def report(self, held_here, formula, sent):  # -> the exit status: 1 where any rank differs from one device
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = bool(largest <= self.tolerance)
        words = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}" if largest else "bitwise equal"
        curve = torch.tensor(self.losses[:: -(-len(self.losses) // 30)]).nan_to_num()
        curve = (7 * (curve - curve.min()) / (curve.max() - curve.min()).clamp(min=1e-9)).round().int()
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        ms = [1e3 * statistics.median(times) for times in zip(*self.times, strict=True)]
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}   {''.join('▁▂▃▄▅▆▇█'[i] for i in curve)}")
        self.show(f"vs 1 device loss, gradients and parameters {words} over {self.args.steps} steps")
        self.show(f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})")
        self.show(f"sent/rank   {self.sent.total / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms[0]:.0f} ms per step      (1 device: {ms[1]:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # who leaves early breaks the others' connections
    dist.destroy_process_group()
    sys.exit(status)

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
Left out: tied parameters, data parallelism around stages, clipping (parallel_3d.py: an all-reduce after the step);
          the gradient of inputs; layouts on the wire (all arrives contiguous); W for layers that are not linear
"""

import collections
import csv
import functools
import graphlib
import itertools
import re
import string
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

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
    before = {}  # action: the one before it on its rank, and those whose outputs it takes
    for actions in schedule:
        for previous, action in zip([None, *actions], actions, strict=False):
            stage, kind, i = parse(action)
            backward = [f"{stage}F{i}", f"{stage + 1}B{i}", f"{stage + 1}I{i}"]  # of B and I there is one
            needs = {"F": [f"{stage - 1}F{i}"], "W": [f"{stage}I{i}"]}.get(kind, backward)
            before[action] = [a for a in (*needs, previous) if a in rank_of]
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


def check(schedule):
    """-> {stage: rank}, number of micro-batches. ValueError unless each has F and B, or F, I and W, on each stage."""
    kinds, rank_of = collections.defaultdict(list), {}
    for rank, actions in enumerate(schedule):
        for stage, kind, i in map(parse, actions):
            kinds[stage, i].append(kind)
            if rank_of.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on two ranks, {rank_of[stage]} and {rank}")
    m = 1 + max((i for _, i in kinds), default=0)
    for stage, i in itertools.product(range(1 + max(rank_of, default=0)), range(m)):
        done = "".join(sorted(kinds[stage, i], key="FBIW".index))
        if done not in ("FB", "FIW"):
            raise ValueError(f"stage {stage}, micro-batch {i}: {done or 'nothing'} is done; it must be FB or FIW")
    return rank_of, m


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
# 3. What the interpreter is made of: messages between actions, and backward in two.


def taker(action):
    """Who takes the output: (stage, kind, micro-batch), "B" standing for I as well."""
    stage, kind, i = parse(action)
    return {"F": (stage + 1, "F", i), "W": (stage, "W", i)}.get(kind, (stage - 1, "B", i))


def add_messages(schedule, rank_of):
    """For each rank what it does, in order: [(method of Pipeline, action), …].

    Simulated time puts everything in one order, an action at its end and its message right after it, and each rank does
    its part of that. What anything waits for stands before it: so the first thing not yet done can always be done, even
    if sends wait for receivers (NCCL), and nothing deadlocks. A receive is posted before the actions that hide it.
    """
    programs = [[] for _ in schedule]
    end = run_times(schedule)[1]
    for action in sorted(end, key=end.get):
        src, dst = rank_of[parse(action)[0]], rank_of.get(taker(action)[0])
        programs[src].append(("_run", action))
        for rank in {src, dst} if dst not in (None, src) else ():
            programs[rank].append(("_message", action))
    return programs


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def like(tensors):
    """What both sides must know of tensors before these travel."""
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]


def leaf(tensor):
    """The same memory, without the graph that it comes from."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def cut(tensor, parts):
    pieces = tensor.chunk(parts) if isinstance(tensor, torch.Tensor) else ()
    if len(pieces) != parts:
        given = f"shape {tuple(tensor.shape)}" if pieces else f"type {type(tensor).__name__}"
        raise ValueError(
            f"torch.chunk cuts a batch of {given} into {len(pieces)} micro-batches, not into {parts}; pass a tensor "
            f"of a multiple of {parts} samples, or change num_microbatches"
        )
    return pieces


# What autograd can start from without the tensor, whose memory is then free before W. (Torch 2.6 takes tensors only.)
root_of = torch.autograd.graph.get_gradient_edge if torch.__version__ >= (2, 7) else lambda tensor: tensor
linear = F.linear


class SplitLinear(torch.autograd.Function):
    """F.linear as a small graph of its own: I asks it for the input's gradient, W, later, for those of the weights.

    These are no inputs of this node, which would run their hooks in I as well; the anchor makes autograd come here.
    """

    @staticmethod
    def forward(ctx, anchor, x, weights, queue):
        # Without the hooks of a checkpoint around it, which would compute everything again for I, and again for W
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.enable_grad(), keep:
            ctx.x = leaf(x)
            y = linear(ctx.x, *weights)
        ctx.root, ctx.weights, ctx.queue = root_of(y), weights, queue
        return y.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.queue.append((ctx.root, gradient, [w for w in ctx.weights if w is not None and w.requires_grad]))
        wanted = ctx.needs_input_grad[1]
        dx = torch.autograd.grad(ctx.root, ctx.x, gradient, retain_graph=True)[0] if wanted else None
        return None, dx, None, None


@contextmanager
def split_linears(queue):
    """In here F.linear, which PyTorch's modules call, leaves in `queue` what W is to do (None: it does not).

    Other weights get their gradients in I. For F, and for I, since a checkpoint computes forward there once more.
    """

    def split(x, weight, bias=None):
        if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and (bias is None or bias.is_leaf):
            return SplitLinear.apply(torch.empty((), requires_grad=True), x, (weight, bias), queue)
        return before(x, weight, bias)

    before = F.linear
    F.linear = before if queue is None else split
    try:
        yield
    finally:
        F.linear = before


# ---------------------------------------------------------------------------------------------------------------------
# 4. One interpreter runs any schedule.


class Pipeline(nn.Module):
    """Runs this rank's stages, forward and backward, in the order that a schedule gives.

    Args:
        stages: a module, or the list of this rank's modules in stage order. Each is called with what the one before it
            returned: a tensor, or a tuple of tensors, which are then its arguments (as in PyTorch's pipelining).
        schedule: a name (build_schedule), or for each rank its list of actions, in PyTorch's notation.
        num_microbatches: the batch is cut into so many along dimension 0, as torch.chunk does.
        loss_fn: loss_fn(output, target) -> mean loss of a micro-batch.
        process_group: the ranks of this pipeline (None: the default group).
        weight: weight(target) -> how much a micro-batch counts in the batch's mean (by default its samples), such as
            its tokens that are not masked.

    `timeline` is the last step's: (action, start, end) in seconds of the host's clock.
    Raises ValueError, on all ranks, when stages and schedule do not fit, or differ.
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
        everyone = self._all_gather((self.schedule, num_microbatches, len(stages)))
        self._rank_of, m = check(self.schedule)
        counts = [list(self._rank_of.values()).count(rank) for rank in range(len(self.schedule))]
        if everyone != [(self.schedule, m, count) for count in counts]:
            raise ValueError(
                f"the schedule has {m} micro-batches and, by rank, {counts} stages; the ranks pass {num_microbatches} "
                f"micro-batches and {[n for *_, n in everyone]} stages, or different schedules"
            )
        mine = sorted(stage for stage, rank in self._rank_of.items() if rank == self._rank)
        self.stages = nn.ModuleDict({str(index): stage for index, stage in zip(mine, stages, strict=True)})
        self._last = len(self._rank_of) - 1
        gloo = dist.get_backend(process_group) == "gloo"  # which sends from the host's memory
        self._wire = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
        self.device = next((parameter.device for parameter in self.parameters()), self._wire)
        forward = [[action for action in actions if "F" in action] for actions in self.schedule]
        self._programs = [add_messages(s, self._rank_of)[self._rank] for s in (forward, self.schedule)]
        self._batch, self._forms = None, {}  # what the last batch was like, and, by action, what each F returned

    def step(self, inputs=None, targets=None):
        """Forward and backward of a batch; adds to .grad what a loop over its micro-batches on one device would.

        Args:
            inputs: a tensor or a tuple of tensors, of stage 0, where that is; ignored elsewhere.
            targets: a tensor, of loss_fn, where the last stage is; ignored elsewhere.

        -> the mean loss where the last stage is, None elsewhere. Forward only under torch.no_grad().

        An error on one rank is raised there, and with its text on all others. Gradients are incomplete then.
        """
        self._start(inputs, targets)
        for do, action in self._programs[torch.is_grad_enabled()]:
            getattr(self, do)(action)
        return self._finish()

    @torch.no_grad()
    def eval_step(self, inputs=None, targets=None):
        """Forward only; -> where the last stage is the mean loss, or without targets its outputs, concatenated."""
        return self.step(inputs, targets)

    def _start(self, inputs, targets):
        """Cut the batch, and hear from all ranks whether it is like the one before."""
        m, grad, self._failure, self._targets, self.timeline = (
            self.num_microbatches,
            torch.is_grad_enabled(),
            None,
            None,
            [],
        )
        self._values = {}  # by who takes it, (stage, kind, micro-batch): list of tensors
        self._arriving = {}  # the same: transfers to wait for before that
        self._leaving = collections.deque()  # transfers and their tensors, both kept until they are over
        tensors = [t for t in (*as_tuple(inputs), *self.parameters()) if isinstance(t, torch.Tensor)]
        before, self._batch = self._batch, (grad, like(tensors))
        with_grad, changed = self._sum(grad, self._batch != before)
        if with_grad not in (0, len(self.schedule)):
            raise ValueError(
                f"gradients are enabled on {with_grad} of {len(self.schedule)} ranks; it must be all or none"
            )
        if changed:
            self._forms.clear()
        self._began = time.perf_counter()  # on all ranks at about one time
        try:
            if "0" in self.stages:
                parts = zip(*(cut(t, m) for t in as_tuple(inputs)), strict=True)
                self._values = {(0, "F", i): part for i, part in enumerate(parts)}
            if str(self._last) in self.stages and (grad or targets is not None):
                self._targets = cut(targets, m)
                weights = [float(self.weight(target)) for target in self._targets]
                if not sum(weights) > 0:
                    raise ValueError(f"the micro-batches' weights are {weights}; their sum must be positive")
                self._weights = [w * m / sum(weights) for w in weights]  # 1 if they are equal
        except Exception as error:
            self._failure = time.time(), "its batch", error

    def _finish(self):
        for transfers, _ in self._leaving:
            for transfer in transfers:
                transfer.wait()
        self._raise_failure()
        if str(self._last) not in self.stages:
            return None
        results = [self._values.pop((self._last + 1, "F", i)) for i in range(self.num_microbatches)]
        if self._targets is None:
            outputs = [torch.cat(parts) for parts in zip(*results, strict=True)]
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        losses = torch.stack([loss.detach() for (loss,) in results])
        return (losses * losses.new_tensor(self._weights)).mean()

    def _run(self, action):
        """Run an action on what others have left for it. After a failure only messages go on, so that no rank hangs."""
        stage, kind, i = parse(action)
        key = stage, "B" if kind == "I" else kind, i
        given = self._values.pop(key, None)
        for transfer in self._arriving.pop(key, ()):
            transfer.wait()
        if self._failure:
            return
        began = time.perf_counter()
        try:
            {"F": self._forward, "W": self._backward_weights}.get(kind, self._backward)(stage, i, given)
        except Exception as error:
            self._failure = time.time(), action, error
        self.timeline.append((action, began - self._began, time.perf_counter() - self._began))

    def _forward(self, stage, i, x):
        x = [leaf(t.to(self.device)) for t in x]
        queue = [] if f"{stage}I{i}" in self.schedule[self._rank] else None
        with split_linears(queue):
            y = self.stages[str(stage)](*x)
        if stage == self._last and self._targets is not None:
            y = self._loss(y, i)
        y = as_tuple(y)
        if torch.is_grad_enabled():
            self._values[stage, "graph", i] = x, [t for t in y if t.requires_grad], queue
        self._values[stage + 1, "F", i] = [leaf(t) for t in y]

    def _loss(self, output, i):
        if self._weights[i]:
            loss = self.loss_fn(output, self._targets[i])
        else:  # a mean over nothing would be NaN
            loss = sum(t.sum() for t in as_tuple(output)) * 0.0
        share = self._weights[i] / self.num_microbatches  # the only place that scales
        self._values[self._last, "B", i] = [torch.full_like(loss, share)] if loss.requires_grad else []
        return loss

    def _backward(self, stage, i, gradients):
        x, y, queue = self._values.pop((stage, "graph", i))
        if y:
            with split_linears(queue):
                torch.autograd.backward(y, [g.to(self.device) for g in gradients])
        self._values[stage, "W", i] = queue
        if stage > 0:  # zeros for what the stage has not used
            leaves = [t for t in x if t.requires_grad]
            self._values[stage - 1, "B", i] = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]

    def _backward_weights(self, stage, i, queue):
        if queue:  # all at once: gradients of a weight used twice are added in the same order as in one backward
            roots, gradients, weights = zip(*queue, strict=True)
            torch.autograd.backward(roots, gradients, inputs=list(dict.fromkeys(itertools.chain(*weights))))

    def _message(self, action):
        """Start to send, or to receive, the output of an action."""
        (stage, kind, i), taken = parse(action), taker(action)
        sending, value = str(stage) in self.stages, self._values.pop(taken, None)
        peer = {"group_dst": self._rank_of[taken[0]]} if sending else {"group_src": self._rank_of[stage]}
        peer["group"] = self.process_group
        forward = action if kind == "F" else f"{stage - 1}F{i}"  # whose output's gradients these are
        if forward not in self._forms:  # activations of a new kind of batch are preceded by what they are like
            box = [like(value or ())]  # nothing after a failure
            (dist.send_object_list if sending else dist.recv_object_list)(box, **peer)
            self._forms[forward] = box[0]
        forms = [(*form, grad and kind == "F") for *form, grad in self._forms[forward] if grad or kind == "F"]
        if value is not None and like(value) != forms:
            text = f"the output was {forms} before, for a batch of the same shapes, and is now {like(value)}"
            self._failure, value = self._failure or (time.time(), action, RuntimeError(text)), None
        make = functools.partial(torch.zeros, device=self._wire)
        buffers = [make(shape, dtype=dtype, requires_grad=grad) for shape, dtype, grad in forms]
        if sending:
            tensors = [t.detach().to(self._wire).contiguous() for t in (buffers if value is None else value)]
            self._leaving.append(([dist.isend(t, **peer) for t in tensors], tensors))
            if len(self._leaving) > 4:  # a sender is seldom further ahead of its receiver
                for transfer in self._leaving.popleft()[0]:
                    transfer.wait()
        else:
            self._arriving[taken] = [dist.irecv(t.detach(), **peer) for t in buffers]
            self._values[taken] = buffers

    def _all_gather(self, mine):
        everyone = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(everyone, mine, group=self.process_group)
        return everyone

    def _sum(self, *numbers):
        """-> the sum of each number over all ranks."""
        sums = torch.tensor(numbers, dtype=torch.int64, device=self._wire)
        dist.all_reduce(sums, group=self.process_group)
        return sums.tolist()

    def _raise_failure(self):
        """Raise, on all ranks, what was the first failure on any: others may follow from what then did not come."""
        failure, self._failure = self._failure, None
        if self._sum(failure is not None) == [0]:
            return
        self._forms.clear()
        mine = failure and (failure[0], self._rank, failure[1], type(failure[2]).__name__, str(failure[2]))
        _, rank, action, kind, text = min(theirs for theirs in self._all_gather(mine) if theirs)
        if rank == self._rank:
            raise failure[2]
        text = f"rank {rank} failed in {action} with {kind}: {text}"
        raise ValueError(text) if kind == "ValueError" else RuntimeError(text)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Refinement: cutting a model into stages.


def split(layers, num_stages):
    """A list of layers -> `num_stages` nn.Sequentials, cut so that the largest has as few parameters as can be."""
    layers = list(layers)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be {num_stages} stages of at least one")

    @functools.cache
    def best(stages, end):
        """-> size of the largest stage, and where to cut, when so many stages have the layers before `end`."""
        if stages == 1:
            return sum(sizes[:end]), [0, end]
        cuts = ((b, *best(stages - 1, b)) for b in range(stages - 1, end))
        return min((max(largest, sum(sizes[b:end])), [*at, end]) for b, largest, at in cuts)

    return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(best(num_stages, len(layers))[1])]

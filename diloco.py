"""DiLoCo: training over a slow network, with one all-reduce every H steps instead of every step.

Each worker trains a copy of the model on its own data, with its own optimizer, such as AdamW. All
workers also keep the outer parameters, from which they started. After H steps, a worker sends its
pseudo-gradient: the outer parameters minus its own. The mean over workers is the gradient of an
outer SGD with Nesterov momentum. All workers make this outer step, and continue from the new outer
parameters. The state of AdamW stays with its worker and is never sent.

Streaming DiLoCo sends the model in P fragments, one after the other, so that less is sent at once.
A worker trains on for D steps while a fragment travels. Here H = 6, P = 2 and D = 2:

    step         1    2    3    4    5    6    7    8    9    10   11   12
    worker 0     ■    ■    ■    ■    ■    ■    ■    ■    ■    ■    ■    ■     its own data
    worker 1     ■    ■    ■    ■    ■    ■    ■    ■    ■    ■    ■    ■     its own data
    fragment 0             send ───▶ apply               send ───▶ apply
    fragment 1                            send ───▶ apply               send ───▶ …

    send         start the mean over workers of the pseudo-gradients, outer - own
    apply        outer = SGD step with that mean; own = mix · own + (1 - mix) · outer (D = 0: outer)

Cost per worker in elements, with Adam, for Ψ parameters on N workers. In fp32, the outer parameters
and their momentum take 8Ψ bytes. A message that travels takes 2Ψ/P elements besides.

              parameters   gradients   optimizer   outer   sent per step     sent at once
    DDP       Ψ            Ψ           2Ψ          0       2Ψ(N-1)/N         2Ψ(N-1)/N
    DiLoCo    Ψ            Ψ           2Ψ          2Ψ      2Ψ(N-1)/N / H     2Ψ(N-1)/N / P

compress="bf16" sends 50% of these bytes, compress="int8" 25.4%: 260 bytes for 256 numbers.

Read section 1 for the idea (6 minutes), to section 4 for the technique (21), and the rest to use it
as a library (33).

Run:      torchrun --nproc-per-node 2 diloco.py --fragments 2 --delay 2 --compress int8
          python diloco.py runs one worker
Papers:   Douillard et al. 2023, DiLoCo, arXiv 2311.08105; 2025, Streaming DiLoCo, 2501.18512
Mirrors:  torchft.local_sgd.DiLoCo, without its manager
Left out: workers that come and go during a run (torchft); messages of 4 bits; outer parameters in
          host memory; parameters that are unfrozen or added (an error) or moved after construction;
          optimizers over copies of the parameters, such as amp.py's masters
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import json
import os
import signal
import sys
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

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
# 1. The idea: after H steps of its own optimizer, each worker sends how far it went.


@torch.no_grad()
def outer_step(module, outer, outer_optimizer, process_group=None):
    """Move the `outer` parameters by the mean over workers, and continue from them.

    Before training, `outer` are copies of the parameters, the same on all workers.
    `outer_optimizer` is torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True).
    """
    N = dist.get_world_size(process_group)
    pairs = list(zip(outer, module.parameters(), strict=True))
    for outer_parameter, parameter in pairs:
        pseudo_gradient = (outer_parameter - parameter).contiguous()
        of_workers = [torch.empty_like(pseudo_gradient) for _ in range(N)]
        dist.all_gather(of_workers, pseudo_gradient, group=process_group)
        outer_parameter.grad = sum(of_workers) / N  # added in rank order
    outer_optimizer.step()
    for outer_parameter, parameter in pairs:
        parameter.copy_(outer_parameter)


# --------------------------------------------------------------------------------------------------
# 2. A message: the same mean, in fewer bytes, while the workers train on.

BLOCK = 256  # numbers in a row. In int8, a row has one scale


def encode(flat, compress):
    """Return the bytes to send, a row for each 256 numbers."""
    rows = flat.view(-1, BLOCK)
    if compress == "int8":
        largest = rows.abs().amax(dim=1, keepdim=True)
        scale = (largest / 127).float().clamp(min=1e-37)  # not 0. NaN stays NaN
        numbers = (rows / scale).round().to(torch.int8)
        return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], dim=1)
    if compress == "bf16":
        rows = rows.bfloat16()
    return rows.view(torch.uint8)


def decode(rows, dtype, compress):
    if compress == "int8":
        numbers = rows[:, :BLOCK].view(torch.int8)
        scale = rows[:, BLOCK:].view(torch.float32)
        return (numbers * scale).to(dtype).flatten()
    sent_dtype = torch.bfloat16 if compress == "bf16" else dtype
    return rows.view(sent_dtype).to(dtype).flatten()


class Message:
    """The pseudo-gradients of the parameters `names`, on their way to their mean over workers.

    The mean takes two collectives. First, each worker sends part r to worker r, which averages the
    parts. Then all-gather sends the averages to all. Training hides a collective only if a later
    step waits for it, so DiLoCo.step() starts the second in the middle of the delay. With a delay
    of 1, only the second is hidden. The sum is in rank order, so that one process that simulates
    the workers gets the same bits.
    """

    def __init__(self, names, step, mean=None):
        self.names = names
        self.step = step  # when it was sent
        self.mean = mean  # one flat tensor; None while it travels
        self.is_reduced = mean is not None  # whether the second half has started

    def reduce_scatter(self, flat, compress, process_group):
        """Start the first half: send part r of `flat` to worker r."""
        self.dtype = flat.dtype
        flat = flat.view(flat.real.dtype)  # two real numbers for a complex one
        self.sent_dtype = flat.dtype
        self.numel = flat.numel()
        self.compress = compress
        self.process_group = process_group
        self.N = dist.get_world_size(process_group)
        padded = F.pad(flat, (0, -self.numel % (BLOCK * self.N)))  # each worker gets whole rows
        # Kept until wait(), because the backend reads and writes them in the background.
        self.sent = encode(padded, compress)
        self.received = torch.empty_like(self.sent)
        self.work = dist.all_to_all_single(
            self.received, self.sent, group=process_group, async_op=True
        )

    def all_gather(self):
        """Start the second half: average the parts, and send the mean to every worker."""
        if self.is_reduced:
            return
        self.is_reduced = True
        self.work.wait()
        # Views of `received`: this worker's part from each worker, and then all averages.
        parts = list(self.received.chunk(self.N))
        total = sum(decode(part, self.sent_dtype, self.compress) for part in parts)
        # Rounded a second time. This worker, too, receives the rounded mean.
        self.sent = encode(total / self.N, self.compress)
        self.work = dist.all_gather(parts, self.sent, group=self.process_group, async_op=True)

    def wait(self):
        """Return the mean."""
        self.all_gather()
        if self.mean is None:
            self.work.wait()
            mean = decode(self.received, self.sent_dtype, self.compress)
            self.mean = mean[: self.numel].view(self.dtype)
        return self.mean


# --------------------------------------------------------------------------------------------------
# 3. The start: all workers have the same parameters, and the same fragments of them.


@torch.no_grad()
def copy_from_rank_0(module, process_group):
    for tensor in [*module.parameters(), *module.buffers()]:
        values = torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
        # As bytes, because gloo has no int16.
        sent = values.flatten().view(torch.uint8)
        dist.broadcast(sent, group=process_group, group_src=0)
        # After expand(), all elements along a dimension are one.
        elements = tuple(slice(None if stride else 1) for stride in tensor.stride())
        tensor[elements] = values[elements]


def trained_parameters(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def layers_of(module):
    """Return the parameters' names, a list for each layer: a member of a list, else a child."""
    layers = {}
    for name in trained_parameters(module):
        path = name.split(".")
        parent = module
        length = 1  # of the layer's name, in parts
        for depth, part in enumerate(path):
            if isinstance(parent, (nn.ModuleList, nn.Sequential)):
                length = depth + 1
                break
            parent = getattr(parent, part)
        layers.setdefault(tuple(path[:length]), []).append(name)
    return list(layers.values())


def split_layers(module, num_fragments):
    """Deal the layers out, the largest first, each to the fragment that is smallest so far.

    So equal layers are dealt out in turn. The paper calls this pattern strided.
    """
    fragments = [[] for _ in range(num_fragments)]

    def size_of(names):
        parameters = map(module.get_parameter, names)
        return sum(parameter.numel() for parameter in parameters)

    for names in sorted(layers_of(module), key=size_of, reverse=True):
        smallest = min(fragments, key=size_of)
        smallest += names
    return fragments


def outer_copy(parameter):
    """In fp32 or fp64, because an outer step may be smaller than a 16-bit rounding."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True)


# --------------------------------------------------------------------------------------------------
# 4. DiLoCo: which fragment is sent when, and what a worker does with the mean.


class DiLoCo:
    """Synchronizes workers that train copies of `module`. Call step() after each optimizer.step().

    Move `module` to its device first. All workers get the parameters and buffers of rank 0. Frozen
    parameters and buffers are never sent again. `optimizer` is the worker's own optimizer, or a
    list of them. The outer parameters are those with which its first step begins. If you load
    weights before it, load the same on all workers. What you write later counts as training.

    A fragment is sent every `sync_every` steps. The layers form `num_fragments` fragments, which
    are sent sync_every / num_fragments steps apart. The mean is applied `delay` steps later. Then
    the worker continues from mix · own + (1 - mix) · outer parameters. Without a delay, it
    continues from the outer parameters.

    Workers differ between two messages. So evaluate and publish the outer parameters, `.outer`.

    A NaN in one worker's pseudo-gradient is in the mean, too, so the same outer parameters become
    NaN on all workers in the same step. In int8 the 256 numbers of its row become NaN. No step is
    skipped, because the worker's own optimizer probably has NaN as well: load an earlier state.
    """

    def __init__(
        self,
        module,
        optimizer,
        sync_every=100,
        outer_lr=0.7,
        outer_momentum=0.9,
        num_fragments=1,
        delay=0,
        mix=0.5,
        compress=None,
        process_group=None,
    ):
        self.sync_every = sync_every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.num_fragments = num_fragments
        self.delay = delay
        self.mix = mix
        self.compress = compress
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        check_arguments(module, optimizers, vars(self), process_group)
        copy_from_rank_0(module, process_group)
        self.process_group = process_group
        self._module = module
        self._own = trained_parameters(module)
        self.fragments = split_layers(module, num_fragments)  # lists of names
        # {name: outer parameter}
        self.outer = {name: outer_copy(own) for name, own in self._own.items()}
        self._outer_optimizer = torch.optim.SGD(
            self.outer.values(), outer_lr, outer_momentum, nesterov=outer_momentum > 0
        )
        self._step = 0
        self._in_flight = []  # messages, in the order in which they were sent
        self._follow_until_start(optimizers)

    @torch.no_grad()
    def step(self):
        """Count a step. Then send, average and apply what is due."""
        check_trained(self)
        self._step += 1
        interval = self.sync_every // self.num_fragments
        if self._step % interval == 0:
            turn = self._step // interval - 1
            self._send(self.fragments[turn % self.num_fragments])
        for message in list(self._in_flight):
            age = self._step - message.step
            if age >= self.delay:
                self._apply(message)
            elif age >= self.delay // 2:
                message.all_gather()

    def _send(self, fragment):
        """Send how far this worker went, backwards. A message has one dtype."""
        names_of_dtype = {}
        for name in fragment:
            names_of_dtype.setdefault(self.outer[name].dtype, []).append(name)
        for names in names_of_dtype.values():
            flat = torch.cat([(self.outer[name] - self._own[name]).flatten() for name in names])
            message = Message(names, self._step)
            message.reduce_scatter(flat, self.compress, self.process_group)
            self._in_flight.append(message)

    def _apply(self, message):
        """Make the outer step of these parameters, and continue from the result."""
        self._in_flight.remove(message)
        outer = [self.outer[name] for name in message.names]
        parts = message.wait().split([tensor.numel() for tensor in outer])
        for tensor, part in zip(outer, parts, strict=True):
            tensor.grad = part.view_as(tensor).to(tensor.device)  # it may come from a file
        self._outer_optimizer.step()
        # To None. With gradients of 0, the momenta of the other fragments would move.
        self._outer_optimizer.zero_grad()
        for name in message.names:
            new = self.outer[name]
            own = self._own[name]
            if self.delay:
                new = torch.lerp(new, own.to(new.dtype), self.mix)
            own.copy_(new)

    # The library: see section 5.

    def _follow_until_start(self, optimizers):
        follow_until_start(self, optimizers)

    def state_dict(self):
        return state_dict(self)

    def load_state_dict(self, state):
        load_state_dict(self, state)


# --------------------------------------------------------------------------------------------------
# 5. The library: other writes to the parameters, checks, and states.


def follow_until_start(diloco, optimizers):
    """Until training starts, the outer parameters follow what other code writes to the module's."""
    # Weak, because a module is never freed if its hooks hold what holds it.
    follow = partial(copy_start, weakref.ref(diloco))
    diloco._start_hooks = []
    for child in diloco._module.modules():
        hook = child.register_load_state_dict_post_hook(follow)
        diloco._start_hooks.append(hook)
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has no hooks
        inner.register_step_pre_hook(follow)


@torch.no_grad()
def copy_start(reference, caller, *_):
    """Make the parameters the outer ones. `caller` is a module that has loaded, or an optimizer."""
    diloco = reference()
    if diloco is None or not diloco._start_hooks:
        return
    if diloco._step == 0:
        for name, outer in diloco.outer.items():
            outer.copy_(diloco._own[name])
    if not isinstance(caller, nn.Module):  # training starts
        while diloco._start_hooks:
            diloco._start_hooks.pop().remove()


def check_trained(diloco):
    """Raise RuntimeError if a parameter trains that is not sent."""
    known = set(diloco._own.values())
    for name, parameter in trained_parameters(diloco._module).items():
        if parameter not in known:
            raise RuntimeError(
                f"{name} was frozen or not there when DiLoCo was made: make DiLoCo again"
            )


def problem_of(module, optimizers, members, sync_every, num_fragments, delay, mix, compress, **_):
    """Return what is wrong with these arguments of DiLoCo, or None. `members` are ranks."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.layout != torch.strided:
            return f"{name} is sparse: make it dense"
    if min(sync_every, num_fragments) < 1 or sync_every % num_fragments:
        return f"{sync_every=} must be a positive multiple of {num_fragments=}"
    if not 0 <= delay < sync_every:
        return f"{delay=} must be from 0 to {sync_every - 1}, less than sync_every"
    if not 0 <= mix <= 1:
        return f"{mix=} must be from 0 to 1"
    if compress not in (None, "bf16", "int8"):
        return f"{compress=} must be None, 'bf16' or 'int8'"
    layers = layers_of(module)
    if len(layers) < num_fragments:
        return f"{num_fragments=} are more than the {len(layers)} layers that train"
    for name, parameter in trained_parameters(module).items():
        if 0 in parameter.stride() and parameter.numel() > 1:
            return f"{name} is expanded, so no optimizer can update it: clone() it"
    for child in module.modules():
        apart = set(members).intersection(getattr(child, "differ_between_ranks", ()))
        if len(apart) > 1:
            return f"ranks {sorted(apart)} hold different parts of a layer"
    own = set(module.parameters())
    for each in optimizers:
        for group in each.param_groups:
            if not own.issuperset(group["params"]):
                return "an optimizer has parameters that the module does not have"
    return None


def check_arguments(module, optimizers, options, process_group):
    """Raise ValueError on every worker if one has wrong arguments, or if workers differ."""
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    problem = problem_of(module, optimizers, members, **options)
    facts = [problem, options]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        facts.append(f"{name}: {[*tensor.shape]}, {tensor.dtype}, {tensor.requires_grad=}")
    check_same_on_all_ranks("model and options", facts, process_group)
    if problem:
        raise ValueError(problem)


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


def state_dict(diloco):
    """Return a copy of the state, the same on every worker. All workers must call this.

    It includes the means of the messages that travel. To resume exactly, each worker saves its own
    module and optimizer as well. Construct DiLoCo first. Then load the module, the optimizer, and
    this state.

    A worker that joins late loads state["outer"] into its module and this state into DiLoCo. That
    is: the outer parameters, their momentum, the number of steps, and the messages that travel. Its
    optimizer starts without a state.
    """
    in_flight = [(message.names, message.step, message.wait()) for message in diloco._in_flight]
    state = {
        "step": diloco._step,
        "outer": diloco.outer,
        "outer_optimizer": diloco._outer_optimizer.state_dict(),
        "in_flight": in_flight,
    }
    return copy.deepcopy(state)


def load_state_dict(diloco, state):
    state = copy.deepcopy(state)  # the optimizer would keep the tensors that it is given
    for name, tensor in diloco.outer.items():
        tensor.copy_(state["outer"][name].view_as(tensor))
    diloco._outer_optimizer.load_state_dict(state["outer_optimizer"])
    diloco._step = state["step"]
    for message in diloco._in_flight:
        message.wait()
    diloco._in_flight = [Message(*saved) for saved in state["in_flight"]]


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    flags = {
        "--sync-every": {"type": int, "metavar": "H", "help": "default 10, or --steps if fewer"},
        "--fragments": {"type": int, "metavar": "P", "default": 1, "help": "sent in turn"},
        "--delay": {"type": int, "metavar": "D", "default": 0, "help": "steps of a message's way"},
        "--compress": {"choices": ["bf16", "int8"], "help": "what is sent"},
    }
    demo = Demo(__doc__, flags, steps=50)
    options = {"num_fragments": demo.args.fragments, "delay": demo.args.delay}
    options |= {"compress": demo.args.compress, "mix": 0.5}
    if demo.args.idea and options != {"num_fragments": 1, "delay": 0, "compress": None, "mix": 0.5}:
        demo.stop("--idea has no --fragments, --delay and --compress")
    options["sync_every"] = demo.args.sync_every
    if options["sync_every"] is None:
        options["sync_every"] = min(10, demo.args.steps)
    if problem := problem_of(language_model(), [], [], **options):
        demo.stop(problem)
    return train(demo, options)


def train(demo, options):
    module = demo.start("diloco", bitwise=True)
    for_ddp = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    outer, outer_optimizer, synchronize = synchronizer(demo, module, optimizer, options)
    simulation = SimulatedWorkers(demo, options)
    demo.step_on_one_device = simulation.step
    demo.model = simulation.models[demo.rank]  # what a device that simulates one worker holds
    demo.optimizer = simulation.optimizers[demo.rank]
    sent_in_step = []

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(module(demo.part(inputs)), demo.part(targets))
        loss.backward()
        optimizer.step()
        with SentBytes() as sent:
            synchronize()
        sent_in_step.append(sent.total)
        return loss

    def whole():
        return [parameter.grad for parameter in module.parameters()], [*module.parameters(), *outer]

    demo.train(step, whole)
    H = options["sync_every"]
    N = demo.ranks
    demo.sent.total = sum(sent_in_step[-H:]) / H
    params, grads, state = held(module.parameters(), optimizer)
    state += sum(held(outer, outer_optimizer))
    formula = "Ψ(N-1)/H" if demo.args.idea else "2Ψ(N-1)/N/H"
    sent = bytes_of_message(outer, options) * (N - 1) / H * (1 if demo.args.idea else 2 / N)
    status = demo.report((params, grads, state), formula, sent)
    show_trade(demo, H, sent_in_step, *train_ddp(demo, for_ddp))
    return status


def synchronizer(demo, module, optimizer, options):
    """Return the outer parameters, their optimizer, and a function to call after each step."""
    if not demo.args.idea:
        diloco = DiLoCo(module, optimizer, **options)
        return list(diloco.outer.values()), diloco._outer_optimizer, diloco.step
    outer = list(outer_copies(module).values())
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    steps = 0

    def synchronize():
        nonlocal steps
        steps += 1
        if steps % options["sync_every"] == 0:
            outer_step(module, outer, outer_optimizer)

    return outer, outer_optimizer, synchronize


def outer_copies(module):
    copies = {}
    for name, parameter in module.named_parameters():
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        copies[name] = parameter.detach().to(dtype, copy=True)
    return copies


def bytes_of_message(outer, options):
    """The bytes of all pseudo-gradients. In int8, a scale of 4 bytes belongs to 256 numbers."""
    bytes_per_number = {None: outer[0].itemsize, "bf16": 2, "int8": 1 + 4 / BLOCK}
    return bytes_per_number[options["compress"]] * sum(tensor.numel() for tensor in outer)


class SimulatedWorkers:
    """One device that trains all workers, one after the other."""

    def __init__(self, demo, options):
        self.demo = demo
        self.options = options
        self.models = [copy.deepcopy(demo.model) for _ in range(demo.ranks)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in self.models]
        self.fragments = split_layers(demo.model, options["num_fragments"])
        self.outer = outer_copies(demo.model)
        outer = self.outer.values()
        self.outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
        self.number = 0  # of steps
        self.due = {}  # step: the fragment that is applied then, and its mean

    def step(self, inputs, targets):
        """Return the loss, the gradients and parameters of this worker, the outer parameters."""
        N = self.demo.ranks
        losses = []
        batches = zip(inputs.chunk(N), targets.chunk(N), strict=True)
        for model, optimizer, (x, y) in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss = language_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        self.number += 1
        self.synchronize()
        own = list(self.models[self.demo.rank].parameters())
        gradients = [parameter.grad for parameter in own]
        return [torch.stack(losses).mean().cpu(), *gradients, *own, *self.outer.values()]

    @torch.no_grad()
    def synchronize(self):
        H = self.options["sync_every"]
        P = self.options["num_fragments"]
        for p, names in enumerate(self.fragments):
            if self.number % H == (p + 1) * H // P % H:
                mean = sum(self.pseudo_gradient(model, names) for model in self.models)
                mean = self.rounded(mean / self.demo.ranks)
                self.due[self.number + self.options["delay"]] = names, mean
        if self.number in self.due:
            self.apply(*self.due.pop(self.number))

    def pseudo_gradient(self, model, names):
        differences = [self.outer[name] - model.get_parameter(name) for name in names]
        return self.rounded(torch.cat([difference.flatten() for difference in differences]))

    def rounded(self, flat):
        padded = F.pad(flat, (0, -len(flat) % BLOCK))
        rows = encode(padded, self.options["compress"])
        return decode(rows, flat.dtype, self.options["compress"])[: len(flat)]

    def apply(self, names, mean):
        parts = mean.split([self.outer[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            self.outer[name].grad = part.view_as(self.outer[name])
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        mix = self.options["mix"] if self.options["delay"] else 0.0
        for model in self.models:
            for name in names:
                own = model.get_parameter(name)
                outer = self.outer[name]
                own.copy_(torch.lerp(outer, own.to(outer.dtype), mix))


def train_ddp(demo, model):
    """Return the bytes that a rank sends in each step, and the losses of the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sent_in_step = []
    losses = []
    for number in range(demo.args.steps):
        inputs, targets = demo.batch(number)
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        with SentBytes() as sent:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.div_(demo.ranks))
        optimizer.step()
        sent_in_step.append(sent.total)
        mean = loss.detach() / demo.ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return sent_in_step, losses


def show_trade(demo, H, sent, sent_by_ddp, losses_of_ddp):
    """Print the loss over the bytes that a worker has sent, after every H steps."""
    demo.show(f"\nloss over MB sent by each worker      DDP             DiLoCo, H = {H}")
    for done in sorted({1, *range(H, demo.args.steps + 1, H)}):
        ddp = f"{sum(sent_by_ddp[:done]) / 1e6:9.1f} MB  {losses_of_ddp[done - 1]:.3f}"
        ours = f"{sum(sent[:done]) / 1e6:9.1f} MB  {demo.losses[done - 1]:.3f}"
        demo.show(f"  after step {done:3}          {ddp}    {ours}")


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

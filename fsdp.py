"""FSDP: each rank keeps 1/N of the parameters, and gathers the rest only while it needs them.

The model is cut into units: each call of `fully_shard` makes one. A unit's parameters are
all-gathered before its forward and freed after it, and again before and after its backward. Then
its gradients are reduce-scattered, and the optimizer updates the shard. For a unit with the
parameters w, which are cut into w₀ and w₁ for N = 2 ranks:

    forward   rank 0  w₀ ┐            ┌ w  compute  free w
                         ├ all-gather ┤
              rank 1  w₁ ┘            └ w  compute  free w

    backward  rank 0  w₀ ┐            ┌ w  compute g, free w    g ┐                ┌ ḡ₀  optimizer
                         ├ all-gather ┤                           ├ reduce-scatter ┤
              rank 1  w₁ ┘            └ w  compute g, free w    g ┘                └ ḡ₁  optimizer

ḡ is the mean of the g. While a unit computes, the next one is gathered, and in backward the
gradients of the previous one are reduced.

Hybrid sharding keeps R copies of each shard, on N·R ranks, and also all-reduces ḡ₀ over the R ranks
that have w₀. Gathers stay within N ranks, for example a node.

Read section 1 for the idea (12 minutes), to section 3 for the technique (49), and the rest to use
it as a library (104). Four classes do the work:

    ShardedParameter   where: the place of a parameter in a unit's buffer, and in this rank's shard
    ParameterGroup     how: a unit's trained, or frozen, parameters of one dtype, in one buffer
    Unit               when: hooks around the forward and the backward of a module
    Schedule           what the units of a model share: which of them runs, and which comes next

Cost per rank in elements, with Adam. The model has Ψ parameters. T of them are trained, and u are
in the largest unit. To get the peak, add a row with + to the row "between steps".

                                   parameters  gradients  optimizer   sent per step, times (N-1)/N
    DDP                                Ψ           T         2T       2T
    FSDP between steps                Ψ/N         T/N       2T/N
         reshard_after_forward=True   + 2u ¹     + 3u ²               2Ψ + T, so 3Ψ if all train
         reshard_after_forward=False  + Ψ        + 3u ²               Ψ + T

    ¹ this unit and the next
    ² u of this unit, and 2u of the previous one: a send and a receive buffer

Hybrid sharding sends 2T/N·(R-1)/R more, without that factor. Section 4 has exceptions.

Ranks add gradients in rank order. So training is bitwise equal to one device that takes the ranks'
parts of the batch in turn, and divides the sum of their gradients by N. With copies, all-reduce
chooses the order.

Run:      torchrun --nproc-per-node 2 fsdp.py     (--idea trains with section 1 alone)
          torchrun --nproc-per-node 4 fsdp.py --replicas 2
Paper:    Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, §3
Mirrors:  torch.distributed.fsdp.fully_shard (FSDP2), but with the flat buffers of FSDP1 (§3.2)
Left out: optimizers that need whole matrices (muon.py has one); recovery after an error in
          backward; units that only some ranks reach, or in another order; units that change their
          input in place; sparse and second-order gradients; hooks on parameters; a backward on
          another CUDA stream than its forward; loading a state dict that only rank 0 has
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

# torch 2.13 renamed all_gather_into_tensor, and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --------------------------------------------------------------------------------------------------
# 1. The idea: an all-gather whose gradient is a reduce-scatter, and a checkpoint around it.


class AllGather(torch.autograd.Function):
    """All-gather the shards of a parameter. Backward reduce-scatters the mean gradient."""

    @staticmethod
    def forward(ctx, shard, process_group):
        ctx.process_group = process_group
        full = shard.new_empty(dist.get_world_size(process_group) * len(shard))
        all_gather_single(full, shard, group=process_group)
        return full

    @staticmethod
    def backward(ctx, gradient):
        N = dist.get_world_size(ctx.process_group)
        received = torch.empty_like(gradient)
        # Each rank sends part r to rank r, which adds the parts in rank order, as one device does.
        # A reduce-scatter may use another order.
        dist.all_to_all_single(received, gradient, group=ctx.process_group)
        mean = sum(received.chunk(N)) / N
        return mean, None


def naive_fully_shard(module, process_group=None):
    """Replace the parameters of `module` by flat shards, and return a function to call."""
    N = dist.get_world_size(process_group)
    shapes = {}
    for name, parameter in module.named_parameters():
        shapes[name] = parameter.shape
        padded = F.pad(parameter.data.flatten(), (0, -parameter.numel() % N))
        parameter.data = padded.chunk(N)[dist.get_rank(process_group)].clone()

    def unshard_and_compute(*inputs):
        parameters = {}
        for name, shard in module.named_parameters():
            full = AllGather.apply(shard, process_group)
            parameters[name] = full[: shapes[name].numel()].view(shapes[name])
        return functional_call(module, parameters, inputs)

    # The checkpoint frees the full parameters after forward. Backward gathers them and computes the
    # forward again. Sections 2 and 3 avoid the second forward.
    return functools.partial(checkpoint, unshard_and_compute, use_reentrant=False)


# --------------------------------------------------------------------------------------------------
# 2. How a unit is gathered and reduced: its parameters are views of one flat buffer, which one
# all-gather fills. Autograd saves such views. We free the buffer's memory but keep the tensors, so
# the gather in backward fills what autograd has saved. A weight of 60 elements and a bias of 30:
#
#   unsharded    │ weight                     │ padding │ bias         │ padding │
#                0                            60        64             94        96
#   shard        │ rank 0              │ rank 1                                  │
#                0                     48                                        96

ALIGNMENT = 32  # in elements; at other addresses, matrix products may round differently


def round_up(size, multiple):
    return -(-size // multiple) * multiple


class ShardedParameter:
    """A parameter in two forms: `sharded` for the optimizer, `unsharded` to compute with.

    Both are nn.Parameters, and views of `shard` or `unsharded` of a ParameterGroup, the next class.
    The modules hold one of them at a time. `original` is the nn.Parameter that they held before.
    """

    def __init__(self, group, original, owners, start):
        self.group = group
        self.owners = owners  # [(module, attribute), …]: several if the parameter is tied
        self.shape = original.shape
        self.stride = torch.empty_like(original, device="meta").stride()  # of a dense copy
        self.start = start  # offset of its first element in group.unsharded
        # Its elements in the shard, if any. In rank 0's shard of 48, the weight above is at 0 to
        # 60: slice(0, 60), which Python ends at 48. In rank 1's it is at -48 to 12: slice(0, 12).
        start_in_shard = start - group.shard_start
        end_in_shard = start_in_shard + original.numel()
        self.slice = slice(max(start_in_shard, 0), max(end_in_shard, 0))
        self.sharded = nn.Parameter(self.part_of_shard(group.shard), original.requires_grad)
        # Backward's gather writes to the buffer after autograd has saved this view. In a plain
        # view, autograd would see the write, and report an error. A tensor from .data has the same
        # memory, but its own version counter.
        self.unsharded = nn.Parameter(self.view(group.unsharded).data, original.requires_grad)

    def view(self, flat):
        """Return its part of `flat`, which has the layout of `unsharded`."""
        return flat.as_strided(self.shape, self.stride, self.start)

    def part_of_shard(self, shard):
        """Return its part of `shard`, with as many dimensions as `shape`, but at least 1.

        Scripts often give weight decay only to parameters of two dimensions.
        """
        return shard[self.slice].view([1] * (len(self.shape) - 1) + [-1])

    def set_on_modules(self, form):  # self.sharded or self.unsharded
        for module, attribute in self.owners:
            module._parameters[attribute] = form


class ParameterGroup:
    """A unit's parameters of one dtype: their shards, buffers and gradients.

    All are trained, or all are frozen. Section 5 reduces nothing for frozen ones.
    """

    @torch.no_grad()
    def __init__(self, originals, settings, device):  # originals: {nn.Parameter: its owners}
        self.settings = settings  # of fully_shard: axes, divide_factor (mostly N), …
        self.process_group = settings.axes[0]  # of the ranks with the other shards
        N = dist.get_world_size(self.process_group)
        total = sum(round_up(p.numel(), ALIGNMENT) for p in originals)
        padded = round_up(max(total, 1), N * 8)  # NCCL is fastest if shards start at multiples of 8
        self.shard_size = padded // N  # in elements
        self.shard_start = dist.get_rank(self.process_group) * self.shard_size
        self.make_buffers(padded, next(iter(originals)).dtype, device)
        self.parameters = []  # ShardedParameters
        start = 0
        for original, owners in originals.items():
            self.parameters.append(ShardedParameter(self, original, owners, start))
            start += round_up(original.numel(), ALIGNMENT)
        self.unsharded.untyped_storage().resize_(0)
        self.is_gathered = False  # True from the start of a gather until `unsharded` is freed
        self.gather_handle = None  # of that gather
        self.clear_gradients()

    def make_buffers(self, padded, dtype, device):
        # Zeros for now. fully_shard() then copies the values of rank 0 into the shards of all.
        self.shard = torch.zeros(self.shard_size, dtype=dtype, device=device)
        self.unsharded = torch.empty(padded, dtype=dtype, device=device)
        self.reduce_dtype = dtype  # of gradients

    def clear_gradients(self):
        self.gradients = None  # this rank's, in the layout of `unsharded`
        self.received = None  # gradients of this rank's shard from all ranks, in rank order
        self.reduce_handle = None  # of the all-to-all that fills `received`

    def start_unshard(self):
        """Begin to gather the ranks' shards into `unsharded`, unless that has begun."""
        if self.is_gathered:
            return
        self.is_gathered = True
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        shard = self.shard.to(self.unsharded)  # in the dtype and on the device of `unsharded`
        self.gather_handle = all_gather_single(
            self.unsharded.view(torch.uint8),  # bytes, because NCCL does not know all dtypes
            shard.view(torch.uint8),
            group=self.process_group,
            async_op=True,
        )

    def finish_unshard(self):
        """Wait for the gather, and put the unsharded parameters on the modules."""
        self.gather_handle.wait()
        for parameter in self.parameters:
            parameter.set_on_modules(parameter.unsharded)

    def reshard(self, free):
        """Put the shards on the modules. Free `unsharded` if `free`."""
        if not self.is_gathered:
            return
        self.gather_handle.wait()  # it may still run
        for parameter in self.parameters:
            parameter.set_on_modules(parameter.sharded)
        if free:
            self.unsharded.untyped_storage().resize_(0)
            self.is_gathered = False
            self.gather_handle = None  # it holds buffers

    @torch.no_grad()
    def collect_gradients(self):
        """Add each .grad of this rank to `gradients`, and clear it."""
        if self.gradients is None:
            # The padding is sent, too, so it must hold zeros: NCCL can be told to check for NaN.
            self.gradients = torch.zeros_like(self.unsharded, dtype=self.reduce_dtype)
        for parameter in self.parameters:
            gradient = parameter.unsharded.grad
            if gradient is not None:
                parameter.view(self.gradients).add_(gradient)
                parameter.unsharded.grad = None

    def start_reduce(self):
        """Begin to send each rank its part of `gradients`."""
        self.received = torch.empty_like(self.gradients)
        self.reduce_handle = dist.all_to_all_single(
            self.received, self.gradients, group=self.process_group, async_op=True
        )

    @torch.no_grad()
    def finish_reduce(self):
        """Wait for the gradients, and add their mean to .grad of the shards."""
        if self.reduce_handle is None:
            return
        self.reduce_handle.wait()
        mean = (self.sum_over_ranks() / self.settings.divide_factor).to(self.shard)
        for parameter in self.parameters:
            gradient = parameter.part_of_shard(mean)
            sharded = parameter.sharded
            sharded.grad = gradient if sharded.grad is None else sharded.grad.add_(gradient)
        self.clear_gradients()

    def sum_over_ranks(self):
        return functools.reduce(torch.add, self.received.split(self.shard_size))


# --------------------------------------------------------------------------------------------------
# 3. When a unit is gathered and reduced. fully_shard makes ParameterGroups of the parameters of a
# module, a Unit of these groups, and a Schedule of all units. Methods of a Unit are hooks:
# pre_forward and post_forward of the module, and pre_backward of its outputs. pre_forward also
# passes the inputs through PostBackward, whose node is the last of the unit's that autograd runs in
# backward. It calls post_backward. Each unshard() records which unit it comes after. In the next
# step, the unshard() of that unit starts the gather early. Here is a later step of a model that
# calls the units 0, 1 and 2. The model itself is a unit, too. Its hooks are left out, because it
# has no parameters of its own here.
#
#                      waits for   frees     then starts     units in memory, or on their way
#    pre_forward 0     gather 0              gather 1        0 1
#    post_forward 0                unit 0                      1
#    pre_forward 1     gather 1              gather 2          1 2
#    post_forward 1                unit 1                        2
#    pre_forward 2     gather 2                                  2
#    post_forward 2                unit 2
#    pre_backward 2    gather 2              gather 1          1 2
#    post_backward 2               unit 2    reduce 2          1
#    pre_backward 1    gather 1              gather 0        0 1
#    post_backward 1   reduce 2    unit 1    reduce 1        0
#    pre_backward 0    gather 0                              0
#    post_backward 0   reduce 1    unit 0    reduce 0
#    end_backward      reduce 0
#
# Two gathers do not start early: gather 0, which comes first, and gather 2 in backward. The
# unshard() of pre_forward 2 would start that, but unit 2 is still gathered then.


class Schedule:
    """What the units of a model share. The methods of Unit write to it."""

    def __init__(self, units):
        self.units = units
        self.groups = [group for unit in units for group in unit.groups]
        for unit in units:
            unit.schedule = self  # inner modules are units already: this replaces theirs
        self.backward_is_running = False
        self.latest = None  # (unit, in_backward()) of the latest unshard(); None: none in this step
        self.next_unit = {}  # {(unit, in_backward()): the unit whose unshard() came after it}


def in_backward():
    """Return whether autograd is running. A forward that runs then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class PostBackward(torch.autograd.Function):
    """The identity, for an input of a unit. Its backward calls the unit's post_backward.

    This node may be ready before the gradients of the unit's weights are computed: a linear layer
    may compute the gradient of its input before that of its weight. But autograd first runs the
    ready nodes that accumulate .grad, and then the newest ready node. This one is older than all
    nodes of the unit, so it runs last.
    """

    @staticmethod
    def forward(ctx, unit, tensor):
        ctx.unit = unit
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        ctx.unit.post_backward()
        return None, gradient


class Unit:
    """The hooks of a module, in the order of a step. Each helper follows its first caller.

    From above: a group can start_unshard, finish_unshard, reshard, collect_gradients, start_reduce
    and finish_reduce. To finish is to wait.
    """

    def __init__(self, module, groups, settings):
        self.groups = groups  # ParameterGroups
        self.settings = settings  # of fully_shard: reshard_after_forward (mostly True), …
        self.schedule = None  # set by Schedule
        self.awaits_post_backward = False  # pre_backward has run, and post_backward has not
        module._fsdp_unit = self
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, always_call=True)  # also if forward raises

    def pre_forward(self, module, args, kwargs):
        """Unshard, and pass the inputs through PostBackward."""
        self.unshard()
        return tree_map_only(torch.Tensor, self.prepare_input, (args, kwargs))

    def prepare_input(self, tensor):
        return PostBackward.apply(self, tensor) if tensor.requires_grad else tensor

    def unshard(self):
        """Wait until this unit is unsharded, and begin to unshard the unit that comes next."""
        # Usually done already: the last line of the previous unit's unshard() starts it.
        self.start_unshard()
        for group in self.groups:
            group.finish_unshard()
        schedule = self.schedule
        # Record that this unit comes after the latest. If that is None, nobody reads the record.
        schedule.next_unit[schedule.latest] = self
        schedule.latest = (self, in_backward())
        if schedule.latest in schedule.next_unit:  # recorded in the step before
            schedule.next_unit[schedule.latest].start_unshard()

    def start_unshard(self):
        for group in self.groups:
            group.start_unshard()

    def post_forward(self, module, args, output):
        """Reshard. Register pre_backward to run when backward reaches an output."""
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(self.pre_backward)
        # After a recomputation the unit stays unsharded, because its backward follows. If there was
        # no backward after a forward, the next forward reshards what was left (section 5).
        if not in_backward():
            self.reshard(free=self.settings.reshard_after_forward)

    def reshard(self, free=True):
        for group in self.groups:
            group.reshard(free)

    def pre_backward(self, gradient):
        """Unshard. Each output calls this, but only the first call counts."""
        if self.awaits_post_backward:
            return
        self.awaits_post_backward = True
        if not self.schedule.backward_is_running:
            self.schedule.backward_is_running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self.unshard()

    def post_backward(self):
        """Reshard, and begin to reduce. Each input calls this, but only the first call counts."""
        if not self.awaits_post_backward:
            return
        self.awaits_post_backward = False
        # The previous unit's reduction ran during this unit's backward. Now it frees its buffers,
        # before this unit needs some.
        for group in self.schedule.groups:
            group.finish_reduce()
        self.reshard()
        for group in self.groups:
            group.collect_gradients()
            group.start_reduce()

    def end_backward(self):
        """End what all units have begun. Autograd calls this when backward is over."""
        schedule = self.schedule
        for unit in schedule.units:
            unit.post_backward()  # if no input needed a gradient, PostBackward did not call it
        for group in schedule.groups:
            group.finish_reduce()
        schedule.latest = None
        schedule.backward_is_running = False


# --------------------------------------------------------------------------------------------------
# 4. What users call, on all ranks: units and their policies, accumulation, clipping.
#
# - Freeze parameters and inject LoRA before fully_shard: gradients of frozen ones are not sent.
# - Parameters get the values of rank 0, after reset_parameters() if they are on the meta device.
#   They move to the GPU if the group has only NCCL. Buffers are neither moved nor synchronized.
# - Initialize parameters before fully_shard. On shards, most of nn.init is an error, but
#   nn.init.eye_ and .data.normal_() are silently wrong.
# - Only the forward of a unit sees whole parameters, and it must not write to them. If `self.pos`
#   is a unit, call `self.pos(x)`: outside, `self.pos.weight` is a shard. A backward through a shard
#   is an error. Without a backward, torch.norm(self.pos.weight) is silently that of the shard, and
#   backward(inputs=[self.pos.weight]) silently finds no gradient.
# - A unit returns tensors in lists, tuples, dicts or dataclasses. Backward from a tensor in another
#   object, such as a cache, is an error.
# - A matrix becomes a shard of shape (1, n), and n may be 0. The optimizer must be elementwise, as
#   Adam is. A gradient is None if no rank has one. If n is 0, it may be None anyway.
# - A unit that uses an input twice may add its gradients in another order than one device.
# - Use clip_grad_norm_ of this file and GradScaler of amp.py: PyTorch's are silently wrong.
#
# Exceptions to the table of costs:
# - Nothing overlaps the all-reduce of hybrid sharding.
# - A unit whose inputs need no gradient, such as an embedding, stays gathered until backward ends.
# - float16 gradients are added in float32, in a copy of u elements.
# - torch 2.6 and 2.7 hold more on a GPU without TORCH_NCCL_AVOID_RECORD_STREAMS=1.


class MixedPrecisionPolicy(NamedTuple):
    param_dtype: torch.dtype | None = None  # of unsharded parameters and inputs; None: no cast
    reduce_dtype: torch.dtype | None = None  # of gradients when they are added; None: param_dtype


class CPUOffloadPolicy:
    """Keep shards, .grad and optimizer state in host memory. The host waits for each copy."""


class Settings(NamedTuple):
    """What fully_shard makes of its arguments."""

    axes: list  # process groups: of the other shards, and of the copies
    reshard_after_forward: bool
    mp_policy: MixedPrecisionPolicy
    is_offloaded: bool
    divide_factor: float
    contexts: list  # "no_sync" and "keep_unsharded", while these are active


def fully_shard(
    module,
    *,
    mesh=None,  # of (shard) or (replicate, shard), instead of the groups
    process_group=None,
    replicate_group=None,  # of the ranks with copies of this rank's shard
    reshard_after_forward=True,  # False keeps parameters unsharded from forward to backward
    mp_policy=MixedPrecisionPolicy(),  # noqa: B008  a NamedTuple does not change
    offload_policy=None,
    gradient_divide_factor=None,  # None: the number of ranks; 1.0: add up the ranks' gradients
):
    """Make a unit of those parameters of `module` that are in no unit yet.

    Call it on the blocks, then on the whole model, and then make the optimizer.
    `module.parameters()` become this rank's shards. Backward adds the mean gradient to .grad.
    """
    axes = choose_axes(mesh, process_group, replicate_group)
    divide_factor = gradient_divide_factor or math.prod(map(dist.get_world_size, axes))
    settings = Settings(
        axes, reshard_after_forward, mp_policy, offload_policy is not None, divide_factor, []
    )
    check_module(module, mp_policy.param_dtype)
    check_kept_views(module)
    unit = LibraryUnit(module, make_groups(module, settings), settings)
    LibrarySchedule(units_of(module))
    refuse_other_uses(module, unit)
    return module


def units_of(module):
    return [m._fsdp_unit for m in module.modules() if hasattr(m, "_fsdp_unit")]


@contextmanager
def context(module, name):
    units = units_of(module)
    for unit in units:
        unit.reshard()  # it may hold the values that it had before the last step
        unit.settings.contexts.append(name)
    try:
        yield
    finally:
        for unit in units:
            unit.settings.contexts.remove(name)
            unit.reshard()


def no_sync(module):
    """Send nothing: add up whole gradients, T elements. The next backward outside sends them.

    Until then, .grad is NaN. zero_grad() also drops what is kept here, because it clears that NaN.
    We do not notice a write to .grad.data.
    """
    return context(module, "no_sync")


def keep_unsharded(module):
    """Gather each unit once for all forwards and backwards in here. Then call optimizer.step().

    This holds Ψ elements. m micro-batches send Ψ + mT, or Ψ + T with no_sync() for all but one.
    """
    return context(module, "keep_unsharded")


@torch.no_grad()
def clip_grad_norm_(module, max_norm, norm_type=2.0, *, counted=None, process_groups=()):
    """Scale the gradients so that their norm over all ranks is at most `max_norm`.

    Return the norm that they had before, in float64. `norm_type` is PyTorch's, such as `torch.inf`.
    If the model is split otherwise, too, give those `process_groups`. If several ranks of these
    groups hold the same parameter, counted(parameter) must be True on exactly one.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: give a positive number, or inf")
    norms = {}  # {process group: those of this rank's gradients}
    for name, sharded in module.named_parameters():
        group = sharded_parameter(name, sharded).group
        zero = group.unsharded.new_zeros((), dtype=torch.float64)
        own = norms.setdefault(group.process_group, [zero])
        if sharded.grad is not None and sharded.numel() and (counted is None or counted(sharded)):
            gradient = sharded.grad.abs()  # real, if it was complex
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            own.append(norm.to(zero.device))
    total = [norm_over_ranks(own, norm_type, group) for group, own in norms.items()]
    for process_group in process_groups:
        total = [norm_over_ranks(total, norm_type, process_group)]
    total_norm = torch.linalg.vector_norm(torch.stack(total), norm_type)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, total_norm)
    return total_norm


def norm_over_ranks(norms, norm_type, process_group):
    """Return the norm of all ranks' `norms`. An all-reduce by maximum could lose one rank's NaN."""
    own = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    gathered = own.new_empty(dist.get_world_size(process_group))
    all_gather_single(gathered, own.view(1), group=process_group)
    return torch.linalg.vector_norm(gathered, norm_type)


def sharded_parameter(name, sharded):
    """Return the ShardedParameter of a shard."""
    if not hasattr(sharded, "_sharded_parameter"):
        raise ValueError(f"{name} is in no unit; call fully_shard on the whole model, too")
    return sharded._sharded_parameter


# --------------------------------------------------------------------------------------------------
# 5. What options, accumulation, evaluation and missing gradients add to sections 2 and 3.


class LibraryGroup(ParameterGroup):
    """A ParameterGroup with the options of fully_shard.

    It finds the parameters that no rank has used, whose gradients are None, without another
    collective. A rank without a gradient sends -0.0 in all elements. A rank with one sends no -0.0,
    as it was added to 0.0, and 0.0 + -0.0 is 0.0. A sum is -0.0 only if all ranks sent -0.0.

    no_sync() hides the gradients that it keeps. .grad becomes NaN, so that zero_grad() has
    something to clear.
    """

    unused = ()  # parameters without a gradient on any rank
    marks = ()  # [(parameter, the NaN that is its .grad, the old .grad), …] if no_sync() keeps some

    def make_buffers(self, padded, dtype, device):
        super().make_buffers(padded, dtype, device)
        param_dtype, reduce_dtype = self.settings.mp_policy
        if dtype.is_floating_point:  # integers and complex numbers keep theirs
            self.unsharded = self.unsharded.to(param_dtype or dtype)
            self.reduce_dtype = reduce_dtype or self.unsharded.dtype
        if self.settings.is_offloaded and not self.shard.is_cpu:
            self.shard = self.shard.cpu().pin_memory()

    def clear_gradients(self):
        super().clear_gradients()
        self.collected = set()  # the parameters whose gradients are in `gradients`
        for parameter in self.unused:
            parameter.sharded.grad = None
        self.unused = []

    def start_unshard(self):
        check_shards(self)
        for parameter in self.parameters:  # it may be frozen since
            parameter.unsharded.requires_grad_(parameter.sharded.requires_grad)
        self.version = self.shard._version  # autograd's count of writes to the shard
        super().start_unshard()

    def reshard(self, free):
        for parameter in self.parameters:
            if parameter.unsharded._version:  # gathers count on `self.unsharded`
                raise RuntimeError(
                    f"forward wrote to {name_of(parameter)}, which is lost when the unit is "
                    "resharded; write to the shard, after optimizer.step()"
                )
        free = free or not torch.is_grad_enabled()  # then no backward follows
        super().reshard(free and "keep_unsharded" not in self.settings.contexts)

    def collect_gradients(self):
        self.drop_zeroed_gradients()
        if any(parameter.sharded.requires_grad for parameter in self.parameters):
            self.collected.update(p for p in self.parameters if p.unsharded.grad is not None)
            super().collect_gradients()

    def start_reduce(self):
        self.drop_zeroed_gradients()
        if "no_sync" in self.settings.contexts:
            self.mark_kept_gradients()
        elif self.gradients is not None and self.reduce_handle is None:
            for parameter in self.parameters:
                place = parameter.view(self.gradients)
                if parameter not in self.collected:
                    place.fill_(-0.0)
                elif self.reduce_dtype != self.unsharded.dtype:  # has rounded tiny ones to -0.0
                    place.add_(0.0)  # turns -0.0 into 0.0
            super().start_reduce()

    def sum_over_ranks(self):
        if self.received.dtype == torch.float16:
            self.received = self.received.float()  # a sum may exceed 65504, the limit of float16
        total = super().sum_over_ranks()
        for group in self.settings.axes[1:]:
            dist.all_reduce(total, group=group)
        for parameter in self.parameters:
            if parameter.sharded.grad is None and parameter not in self.collected:
                elements = total[parameter.slice].real  # a complex number has no sign bit
                if ((elements == 0) & elements.signbit()).all():
                    self.unused.append(parameter)
        return total

    def mark_kept_gradients(self):
        shards = [(parameter, parameter.sharded) for parameter in self.collected]
        self.marks = [(p, torch.full_like(shard, torch.nan), shard.grad) for p, shard in shards]
        for parameter, mark, _ in self.marks:
            parameter.sharded.grad = mark

    def drop_zeroed_gradients(self):
        """Forget what no_sync() kept for parameters whose .grad was cleared since."""
        for parameter, mark, sent_before in self.marks:
            gradient = parameter.sharded.grad
            if gradient is mark and mark._version == 0:  # the count of writes to it
                parameter.sharded.grad = sent_before
            elif gradient is not None and gradient.any():
                raise RuntimeError(
                    f"the gradient of {name_of(parameter)} changed while no_sync() keeps a part of "
                    "it; clip or unscale after the last backward"
                )
            else:
                self.collected.remove(parameter)
                parameter.view(self.gradients).zero_()
        self.marks = ()


class LibrarySchedule(Schedule):
    outermost = None  # during a forward, the unit that the user called: mostly the model

    def reshard_all(self):
        self.latest = None
        for unit in self.units:
            unit.reshard()


class LibraryUnit(Unit):
    """A Unit that may be called for evaluation, in autocast, and by a compiled module."""

    is_checked = False

    @torch.compiler.disable
    def pre_forward(self, module, args, kwargs):
        schedule = self.schedule
        if schedule.outermost is None and not in_backward():
            if schedule.backward_is_running:
                raise RuntimeError("an earlier backward raised an error; nothing is right after it")
            # A forward without a backward leaves units gathered, and the shards may have changed.
            schedule.reshard_all()
            if not self.is_checked:  # the first forward
                for name, parameter in module.named_parameters():
                    # Of those that were added after fully_shard, each rank would train its own.
                    sharded_parameter(name, parameter)
                self.is_checked = True
            schedule.outermost = self
        return super().pre_forward(module, args, kwargs)

    def prepare_input(self, tensor):
        if tensor.is_floating_point():
            tensor = tensor.to(dtype=self.settings.mp_policy.param_dtype)  # None: no cast
        return super().prepare_input(tensor)

    @torch.compiler.disable
    def post_forward(self, module, args, output):
        super().post_forward(module, args, list(tensors_in(output)))
        # Autocast would keep 16-bit copies of whole parameters, and use them in the next forward.
        torch.clear_autocast_cache()
        if self.schedule.outermost is self:
            self.schedule.outermost = None

    def end_backward(self):
        for unit in self.schedule.units:
            unit.post_backward()
        for group in self.schedule.groups:
            group.start_reduce()  # of what no_sync() kept, if this backward did not reach the unit
        super().end_backward()
        self.schedule.reshard_all()


# --------------------------------------------------------------------------------------------------
# 6. How a unit is made, and what is refused.


def choose_axes(mesh, process_group, replicate_group):
    """Return the process groups of the shards and of the copies."""
    axes = [process_group] if mesh is None else mesh.get_all_groups()[::-1]
    if replicate_group is not None:
        axes.append(replicate_group)
    # A reference to the default group keeps its threads alive.
    return [None if group is dist.group.WORLD else group for group in axes]


def check_module(module, param_dtype):
    if type(module).forward is nn.Module.forward:
        raise ValueError(f"{type(module).__name__} has no forward; shard its children")
    if hasattr(module, "_fsdp_unit"):
        raise ValueError(f"{type(module).__name__} is a unit already")
    for path, child in module.named_modules():
        name = f"{path or 'the unit'} ({type(child).__name__})"
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            raise ValueError(f"{name} has max_norm: each rank's forward would change other rows")
        weight = child._parameters.get("weight")
        statistics = child._buffers.get("running_mean")
        if weight is None or statistics is None or hasattr(weight, "_sharded_parameter"):
            continue
        if param_dtype not in (None, statistics.dtype):  # its kernels want parameters of its dtype
            raise ValueError(
                f"{name} has running statistics of {statistics.dtype}, but would get parameters of "
                f"{param_dtype}; first call fully_shard on it alone, without mp_policy"
            )


def make_groups(module, settings):
    """Make a ParameterGroup for each dtype of frozen and of trained parameters."""
    by_kind = find_parameters(module, settings)
    first = next(itertools.chain(*by_kind.values()), torch.empty(0))
    device = device_for(first.device, dist.get_backend_config(settings.axes[0]))
    module.apply(functools.partial(materialize, device))
    groups = []
    for originals in by_kind.values():
        group = LibraryGroup(originals, settings, device)
        fill_shard(group)
        for parameter, original in zip(group.parameters, originals, strict=True):
            refuse_uses_outside(parameter, original)
        groups.append(group)
    return groups


@torch.no_grad()
def fill_shard(group):
    """Broadcast the first rank's originals, and keep this rank's part."""
    whole = group.unsharded.new_zeros(len(group.unsharded), dtype=group.shard.dtype)
    for parameter in group.parameters:
        module, attribute = parameter.owners[0]
        # Not those of find_parameters(): materialize() may have replaced them.
        parameter.view(whole).copy_(module._parameters[attribute])
        parameter.set_on_modules(parameter.sharded)
    for axis in group.settings.axes:
        # After the last, all ranks have the values of the grid's first rank. Bytes, because NCCL
        # has no 16-bit integers.
        dist.broadcast(whole.view(torch.uint8), group=axis, group_src=0)
    group.shard.copy_(whole[group.shard_start :][: group.shard_size])


def find_parameters(module, settings):
    """Return {(dtype, requires_grad): {nn.Parameter: its owners}} of those that are in no unit."""
    by_kind = {}
    facts = [f"the arguments {settings[1:]}"]
    for path, parameter in module.named_parameters(remove_duplicate=False):
        known = getattr(parameter, "_sharded_parameter", None)
        if known is None:
            check_hooks(path, parameter)
            parent, _, attribute = path.rpartition(".")
            owner = module.get_submodule(parent)
            kind = (parameter.dtype, parameter.requires_grad)
            originals = by_kind.setdefault(kind, {})
            originals.setdefault(parameter, []).append((owner, attribute))
            facts.append(
                f"{path}: {tuple(parameter.shape)}, stride {parameter.stride()}, "
                f"{parameter.dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
                f"{part_of_split(owner)}{part_of_split(parameter)}"
            )
        elif known.sharded is not parameter:
            raise ValueError(f"{path} is tied to another unit's parameter; put both into one unit")
    check_same_on_grid(facts, settings.axes)
    return by_kind


def part_of_split(marked):
    ranks = getattr(marked, "differ_between_ranks", None)  # those that have the parts
    return f", part {ranks.index(dist.get_rank())} of a split parameter" if ranks else ""


def check_same_on_grid(facts, axes):
    """Raise ValueError on all ranks of the grid if one of them differs."""
    found = None
    for group in axes:
        try:
            check_same_on_all_ranks("model", facts, group)
        except ValueError as error:
            found = error
            facts = [*facts, "differ"]  # so that ranks along the next axis raise, too
    if found is not None:
        raise found


def check_kept_views(module):
    """Raise ValueError if a module keeps a view of a parameter: it would never see an update."""
    of_parameters = addresses(nn.Parameter, module.parameters())
    for path, child in module.named_modules():
        for name, kept in vars(child).items():
            if name != "_buffers" and of_parameters & addresses(torch.Tensor, tree_leaves(kept)):
                raise ValueError(
                    f"{path}.{name} is a view of a parameter, which would not see its updates: "
                    "make it in forward"
                )


def addresses(kind, values):
    """Return where the tensors of that type are in memory. Sparse tensors and others have none."""
    tensors = [x for x in values if type(x) is kind and x.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


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


def check_hooks(name, tensor, own=0):
    """`own` is the number of hooks that are ours."""
    if len(tensor._backward_hooks or ()) > own or tensor._post_accumulate_grad_hooks:
        raise ValueError(f"{name} has hooks, which backward would not call; remove them")


def device_for(device, backends):
    """Return the device that a unit computes on. `backends` is such as "cpu:gloo,cuda:nccl"."""
    if f"{device.type}:" in backends:
        return device
    return torch.device("cuda" if torch.cuda.is_available() and "cuda:nccl" in backends else "cpu")


def materialize(device, owner):
    """Initialize the tensors of one module, if they are on the meta device."""
    tensors = itertools.chain(owner.parameters(recurse=False), owner.buffers(recurse=False))
    if any(tensor.is_meta for tensor in tensors):
        owner.to_empty(device=device, recurse=False)
        owner.reset_parameters()


def refuse_other_uses(module, unit):
    """Register hooks that raise, and the one that cuts state dicts."""
    parameters = [parameter for group in unit.groups for parameter in group.parameters]
    for parameter in parameters:
        call_in_backward(functools.partial(check_backward, unit), parameter.unsharded)
    for owner in {owner for parameter in parameters for owner, _ in parameter.owners}:
        owner.register_forward_hook(functools.partial(watch_outputs, unit))
        owner.register_load_state_dict_pre_hook(cut_state_dict)
    module.register_state_dict_pre_hook(check_is_full_state_dict)
    module.__deepcopy__ = check_is_no_copy


def watch_outputs(unit, module, args, output):
    """Refuse a backward that would use freed memory or other values."""
    versions = [group.version for group in unit.groups]

    def check(*_):
        check_backward(unit)
        if versions != [group.version for group in unit.groups]:
            raise RuntimeError("shards changed between forward and backward; step afterwards")

    for tensor in tensors_in(output):
        tensor.grad_fn.register_prehook(check)  # runs after the hooks of the tensor


def check_backward(unit, *_):
    if not unit.awaits_post_backward:
        raise RuntimeError("backward reaches a unit through a tensor hidden in another object")
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: second-order gradients would need what is freed")


def call_in_backward(function, leaf):
    if leaf.is_floating_point() or leaf.is_complex():
        requires_grad = leaf.requires_grad
        leaf.requires_grad_().register_hook(function)  # it may be unfrozen later
        leaf.requires_grad_(requires_grad)


def check_shards(group):
    """Refuse shards that the user moved or replaced, or changed while they are gathered."""
    if group.is_gathered and group.version != group.shard._version:  # which misses writes to .data
        raise RuntimeError(
            "shards changed after the gather; leave keep_unsharded() first, or step after backward"
        )
    memory = group.shard.untyped_storage().data_ptr()
    for parameter in group.parameters:
        check_hooks(name_of(parameter), parameter.sharded, own=1)
        if not group.is_gathered:
            module, attribute = parameter.owners[0]
            sharded = module._parameters.get(attribute)
            if sharded is not parameter.sharded or sharded.untyped_storage().data_ptr() != memory:
                raise ValueError(
                    f"{name_of(parameter)} was moved or replaced; call .to() before fully_shard"
                )


def name_of(parameter):
    module, attribute = parameter.owners[0]
    return f"{type(module).__name__}.{attribute}"


# Methods of a shard that would give something else than those of the whole parameter. nn.init
# calls view_as, normal_ and uniform_. The shard stays an nn.Parameter, because torch.optim is
# slower with others.
NEED_THE_WHOLE = """sum mean norm std var max min expand_as view_as random_ exponential_ cauchy_
    log_normal_ geometric_ normal_ uniform_ bernoulli_"""


def refuse_uses_outside(parameter, original):
    """Raise if someone computes with the shard outside its unit, or with the original."""
    name = name_of(parameter)

    def refuse(*_, **__):
        raise RuntimeError(
            f"{name} is a shard: compute with it in the forward of its unit, and initialize it "
            "before fully_shard, or by load_full_state_dict; .data is the shard's own tensor"
        )

    for method in NEED_THE_WHOLE.split():
        setattr(parameter.sharded, method, refuse)
    call_in_backward(refuse, parameter.sharded)
    call_in_backward(refuse, original)
    parameter.sharded._sharded_parameter = parameter
    original._sharded_parameter = parameter
    if type(original) is nn.Parameter:
        original.__class__ = ReplacedParameter


class ReplacedParameter(nn.Parameter):
    """A whole parameter after fully_shard. A list that still has it would never see it change."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(
            "this parameter was replaced by fully_shard; take the one that the module has now, and "
            "make the optimizer after fully_shard"
        )


def check_is_no_copy(memo):
    """copy.deepcopy(module) calls this."""
    raise RuntimeError("a sharded model cannot be copied; copy it before fully_shard")


def tensors_in(output):
    """Yield the tensors that have a graph, also those in containers and dataclasses."""
    for leaf in tree_leaves(output):
        parts = []  # of a container that tree_leaves() does not know
        if torch.is_tensor(leaf) and leaf.grad_fn is not None:
            yield leaf
        elif isinstance(leaf, Mapping):
            parts = leaf.values()
        elif isinstance(leaf, (list, tuple)):
            parts = leaf
        elif dataclasses.is_dataclass(leaf):
            parts = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        yield from tensors_in(list(parts))


# --------------------------------------------------------------------------------------------------
# 7. State dicts of the whole model, and shards for checkpoint.py.


def gather_full(sharded, tensor):
    """Return the whole tensor, on the CPU. `tensor` is this rank's part, such as sharded.grad."""
    # A view would be sent with the whole storage behind it.
    tensor = tensor.detach().to("cpu", copy=True)
    if not hasattr(sharded, "_sharded_parameter"):
        return tensor  # of a buffer
    parameter = sharded._sharded_parameter
    process_group = parameter.group.process_group
    parts = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, tensor, group=process_group)
    return torch.cat(parts, dim=-1).as_strided(parameter.shape, parameter.stride)


def full_state_dict(module):
    """Return the state_dict() of the module without sharding, on every rank."""
    state_dict = module.state_dict(keep_vars=True)
    return {name: gather_full(tensor, tensor) for name, tensor in state_dict.items()}


def load_full_state_dict(module, state_dict):
    """Load what full_state_dict() or the plain module returned, on every rank."""
    module.load_state_dict(state_dict)


def cut_state_dict(module, state_dict, prefix, *_):
    """Cut the parameters in `state_dict`. load_state_dict() calls this."""
    for attribute, sharded in module._parameters.items():
        name = prefix + attribute
        full = state_dict.get(name)
        if full is None or not hasattr(sharded, "_sharded_parameter"):
            continue
        parameter = sharded._sharded_parameter
        if full.shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(parameter.shape)}, not {tuple(full.shape)}")
        state_dict[name] = shard_of(parameter, full)


def shard_of(parameter, full):
    """Return a copy of this rank's elements of `full`, a tensor of the parameter's shape."""
    group = parameter.group
    unsharded = full.new_empty(len(group.unsharded))
    parameter.view(unsharded).copy_(full)
    shard = unsharded[group.shard_start :][: group.shard_size]
    return parameter.part_of_shard(shard).clone()


def check_is_full_state_dict(module, prefix, keep_vars):
    """Only full_state_dict() sets keep_vars."""
    if not keep_vars:
        raise RuntimeError("the parameters are sharded: call full_state_dict(model) instead")


def shards(module, optimizer):
    """Yield (name, shape of the whole parameter, start, shard, its optimizer state).

    `start` is the offset in the flattened parameter. shard_pieces() of checkpoint.py takes these.
    Before you load, take a step with all gradients, so that the optimizer has its state.
    """
    for name, sharded in module.named_parameters():
        parameter = sharded_parameter(name, sharded)
        if not parameter.unsharded.is_contiguous():
            raise ValueError(f"{name} is not contiguous; a checkpoint would permute its elements")
        state = optimizer.state.get(sharded, {})
        if not sharded.numel() and parameter.shape.numel():
            # Adam's "step" is too small if only other ranks had gradients.
            state = {}
        start = max(parameter.group.shard_start - parameter.start, 0)
        yield name, parameter.shape, start, sharded, state


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    replicas = {"type": int, "default": 1, "help": "copies of the shards, on ranks / replicas each"}
    demo = Demo(__doc__, {"--replicas": replicas})
    R = demo.args.replicas
    if R < 1 or demo.ranks % R:
        demo.stop(f"--replicas {R}: give a divisor of {demo.ranks} ranks")
    if R > 1 and demo.args.idea:
        demo.stop(f"--idea --replicas {R}: the idea has one copy of each shard")
    model = demo.start("fsdp", bitwise=R == 1)
    N = demo.ranks // R
    mesh = dist.init_device_mesh(demo.device.type, (R, N)) if R > 1 else None
    forward, whole = shard_naively(demo, model) if demo.args.idea else shard(demo, model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(forward(demo.part(inputs)), demo.part(targets))
        loss.backward()
        optimizer.step()
        return loss

    demo.train(step, whole)
    psi = held_bytes(demo.model.parameters())
    sent = 3 * psi * (N - 1) / N
    formula = "3Ψ(N-1)/N"
    if R > 1:
        sent += 2 * psi / N * (R - 1) / R
        formula += " + 2Ψ/N·(R-1)/R"
    return demo.report(held(model.parameters(), optimizer), formula, sent)


def shard(demo, model, mesh):
    """Return what computes the output, and what returns the whole gradients and parameters."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def whole():
        gradients = [gather_full(sharded, sharded.grad) for sharded in model.parameters()]
        parameters = full_state_dict(model).values()
        return [[value.to(demo.device) for value in each] for each in (gradients, parameters)]

    return model, whole


def shard_naively(demo, model):
    functions = [naive_fully_shard(layer) for layer in model]

    def forward(x):
        for function in functions:
            x = function(x)
        return x

    def whole():
        gradients = []
        parameters = []
        for shard, plain in zip(model.parameters(), demo.model.parameters(), strict=True):
            for part, wholes in ((shard.grad, gradients), (shard, parameters)):
                wholes.append(AllGather.apply(part, None)[: plain.numel()].view_as(plain))
        return gradients, parameters

    return forward, whole


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

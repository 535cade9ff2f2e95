"""FSDP: each rank keeps 1/N of the parameters, and gathers the others' while it needs them.

The model is cut into units: each call of `fully_shard` makes one. In a step, a unit's parameters
are all-gathered before its forward and freed after it. They are gathered again before its backward
and freed after it. Then its gradients are reduce-scattered, and the optimizer updates the shard.
Here a unit with the parameters w, cut into w₀ and w₁ on N = 2 ranks:

    forward    rank 0   w₀ ┐            ┌ w   compute   free w
                           ├ all-gather ┤
               rank 1   w₁ ┘            └ w   compute   free w

    backward   rank 0   w₀ ┐            ┌ w   compute g   free w   g ┐              ┌ ḡ₀  optimizer
                           ├ all-gather ┤                            ├reduce-scatter┤
               rank 1   w₁ ┘            └ w   compute g   free w   g ┘              └ ḡ₁  optimizer

ḡ is the mean of the ranks' gradients g. While a unit computes, the next unit is gathered and the
gradients of the unit before it are reduced.

Cost per rank in elements, with Adam. Ψ parameters, T of them train, u are in the largest unit:

                                   parameters  gradients  optimizer   sent per step, times (N-1)/N
    DDP                                Ψ           T         2T       2T
    FSDP between steps                Ψ/N         T/N       2T/N
         in forward and backward     + 2u        + 3u                 2Ψ + T, so 3Ψ if all train
         reshard_after_forward=False  + Ψ        + 3u                 Ψ + T

2u: one unit computes while the next is gathered. 3u: a unit's gradients are computed while those of
another are sent and received. In float16 they take 2u more, because they are added in float32.
A unit whose inputs need no gradient, such as an embedding, stays gathered until backward ends.
Shards are padded to a multiple of 8 elements. A frozen unit that backward does not reach is
gathered once.

Run:      torchrun --nproc-per-node 2 fsdp.py          (python fsdp.py runs as one rank)
Papers:   Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, §3;
          Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §5.3
Mirrors:  torch.distributed.fsdp.fully_shard (FSDP2), with the flat buffers of FSDP1 (§3.2), into
          which a gather writes directly. FSDP2 shards the rows of each parameter: its shards keep
          their dimensions, but each gather and each reduction copies everything once more.
Left out: hybrid sharding over a mesh of two dimensions (see FSDP2); ranks that call other units, or
          in another order (FSDP2 needs the same); units that change their input in place, for
          example by a first layer ReLU(inplace=True); .to() after sharding; second-order gradients;
          loading a state dict that rank 0 alone has
"""

import argparse
import copy
import functools
import itertools
import os
import signal
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # an import after init_process_group keeps the group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

# --------------------------------------------------------------------------------------------------
# 1. The idea: an all-gather whose gradient is a reduce-scatter, and a checkpoint around it.


class AllGather(torch.autograd.Function):
    """Join all ranks' shards. The gradient of a shard is its part of the mean gradient."""

    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, shard, group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx, gradient):
        N = dist.get_world_size(ctx.group)
        received = torch.empty_like(gradient)
        # Each rank sends part r to rank r, which adds the parts in rank order.
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return sum(received.chunk(N)) / N, None


def forward_sharded(module, shards, *inputs, process_group=None):
    """`module(*inputs)` from `shards`, by name: this rank's 1/N of each parameter, padded."""

    def forward(*inputs):
        parameters = {}
        for name, parameter in module.named_parameters():
            full = AllGather.apply(shards[name], process_group)
            parameters[name] = full[: parameter.numel()].view(parameter.shape)
        return functional_call(module, parameters, inputs)

    # The checkpoint frees the full parameters after forward and gathers them again in backward.
    return checkpoint(forward, *inputs, use_reentrant=False)


# --------------------------------------------------------------------------------------------------
# 2. How parameters move: several at once, from one flat shard on each rank into one flat buffer.
# A group of a weight of 40 elements and a bias of 30 on two ranks, numbered in elements:
#
#   unsharded    │ weight           │ padding │ bias         │ padding │
#                0                  40        64             94        96
#   shard        │ rank 0                │ rank 1                      │
#                0                       48                            96
#
# Here rank 0 keeps the whole weight and rank 1 the whole bias. A weight of 60 would be cut at 48.

# torch 2.13 renames all_gather_into_tensor and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Where a parameter and a shard start: multiples of this many elements, of 2 bytes or more.
PARAMETER_ALIGNMENT = 32  # 64 bytes, or products with a matrix round differently
SHARD_ALIGNMENT = 8  # 16 bytes, or NCCL is slower


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def all_gather(output, shard, group):
    """Begin to fill `output` with all ranks' shards. Return handles to wait for.

    `shard` is this rank's part of `output` and is in place.
    """
    if not shard.is_cpu:
        return [all_gather_single(output, shard, group=group, async_op=True)]
    # gloo's own all-gather takes 1.7 times as long as these messages, and a step 1.12 times.
    messages = []
    for peer, part in enumerate(output.chunk(dist.get_world_size(group))):
        if peer != dist.get_rank(group):
            messages.append(dist.P2POp(dist.isend, shard, group=group, group_peer=peer))
            messages.append(dist.P2POp(dist.irecv, part, group=group, group_peer=peer))
    return dist.batch_isend_irecv(messages) if messages else []


class ShardedParameter:
    """A parameter in two forms: `sharded` for the optimizer, `unsharded` to compute with.

    Both are nn.Parameters that hold no memory of their own: `sharded` is a view of `group.shard`,
    `unsharded` of `group.unsharded`. The modules hold one of them at a time.
    """

    def __init__(self, group, parameter, owners, start):
        self.group = group  # the ParameterGroup that it moves with
        self.owners = owners  # [(module, attribute), …]; several if the parameter is tied
        module, attribute = owners[0]
        self.name = f"{type(module).__name__}.{attribute}"  # for errors
        self.shape = parameter.shape
        # Dimensions keep their order in memory: products of a transposed matrix round differently.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        self.start = start  # its first element in `group.unsharded`
        # Its elements in `group.shard`. A slice that ends after the shard is cut there. It is empty
        # if this rank has none of them.
        begin = start - group.rank * group.shard_size
        self.slice = slice(max(begin, 0), max(begin + parameter.numel(), 0))
        self.sharded = nn.Parameter(group.shard[self.slice], parameter.requires_grad)
        # .data has its own version counter. With the buffer's, autograd would take a gather for
        # a change of what it has saved.
        self.unsharded = nn.Parameter(self.view(group.unsharded).data)
        parameter._sharded_parameter = self  # for find_parameters(), if another unit is tied to it
        self.sharded._sharded_parameter = self

    def view(self, flat):
        """This parameter's part of `flat`, laid out as `group.unsharded`, in its own shape."""
        return flat.as_strided(self.shape, self.stride, self.start)

    def shard_of(self, full):
        """This rank's elements of `full`, which has the shape of the whole parameter."""
        if full.shape != self.shape:
            raise ValueError(f"{self.name} is {tuple(self.shape)}, not {tuple(full.shape)}")
        flat = full.new_empty(self.group.unsharded.shape)
        self.view(flat).copy_(full)
        return self.group.own_part(flat)[self.slice].clone()

    def held(self):
        """What the modules hold now."""
        module, attribute = self.owners[0]
        return module._parameters[attribute]

    def set_on_modules(self, parameter):
        """Have the modules hold `parameter`, which is `sharded` or `unsharded`."""
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter


class ParameterGroup:
    """Parameters that move together: their shards, their whole values and their gradients."""

    @torch.no_grad()
    def __init__(self, parameters, process_group, device, mp_policy, offload):
        dtype = next(iter(parameters)).dtype
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        param_dtype = mp_policy.param_dtype or dtype
        self.reduce_dtype = mp_policy.reduce_dtype or param_dtype
        sizes = [round_up(p.numel(), PARAMETER_ALIGNMENT) for p in parameters]
        *starts, end = itertools.accumulate(sizes, initial=0)
        padded = round_up(max(end, 1), self.world_size * SHARD_ALIGNMENT)
        self.shard_size = padded // self.world_size
        self.pin_memory = offload and device.type != "cpu"  # of shards and .grad, for faster copies
        self.shard = torch.empty(
            self.shard_size,
            dtype=dtype,  # of the optimizer and .grad
            device="cpu" if offload else device,
            pin_memory=self.pin_memory,
        )
        self.unsharded = torch.empty(padded, dtype=param_dtype, device=device)
        self.is_sharded = True  # `unsharded` has no memory, from the end of __init__ on
        self.gathering = []  # handles of the all-gather under way
        self.gradients = None  # this rank's, laid out as `unsharded`, until they have been sent
        self.collected = set()  # the parameters that have one in `gradients`
        self.received = None  # all ranks' gradients of this rank's shard, in rank order
        self.reducing = None  # handle of the reduction under way
        self.parameters = []
        for (parameter, owners), start in zip(parameters.items(), starts, strict=True):
            self.parameters.append(ShardedParameter(self, parameter, owners, start))
        self.unsharded.untyped_storage().resize_(0)
        self.take_values_of_rank_0()

    def take_values_of_rank_0(self):
        values = torch.zeros_like(self.unsharded, dtype=self.shard.dtype)
        for parameter in self.parameters:
            parameter.view(values).copy_(parameter.held())
        dist.broadcast(values, group=self.process_group, group_src=0)
        self.shard.copy_(self.own_part(values))
        self.use_shards()

    def own_part(self, flat):
        """This rank's part of `flat`, laid out as `unsharded`."""
        return flat.chunk(self.world_size)[self.rank]

    def use_shards(self):
        for parameter in self.parameters:
            parameter.set_on_modules(parameter.sharded)

    def unshard(self):
        """Begin to gather all ranks' shards."""
        if not self.is_sharded:
            return  # the gather has begun
        for parameter in self.parameters:
            storage = parameter.held().untyped_storage()
            if storage.data_ptr() != self.shard.untyped_storage().data_ptr():
                text = "was moved or replaced; call .to() before fully_shard"
                raise ValueError(f"{parameter.name} {text}")
        # The storage is resized, not replaced: autograd has saved views of it.
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        self.is_sharded = False
        own = self.own_part(self.unsharded)
        own.copy_(self.shard, non_blocking=True)
        self.gathering = all_gather(self.unsharded, own, self.process_group)

    def wait_for_gather(self):
        for work in self.gathering:
            work.wait()
        self.gathering = []

    def wait_for_unshard(self):
        """Wait until the parameters are whole, and have the modules hold them."""
        self.wait_for_gather()
        for parameter in self.parameters:
            parameter.unsharded.requires_grad_(parameter.sharded.requires_grad)  # users set that
            parameter.set_on_modules(parameter.unsharded)

    def reshard(self):
        """Free the unsharded parameters."""
        if not self.is_sharded:
            self.wait_for_gather()  # of a unit that was gathered ahead, and not called this time
            self.use_shards()
            self.unsharded.untyped_storage().resize_(0)
            self.is_sharded = True

    @torch.no_grad()
    def reduce(self, send):
        """Add .grad to `gradients`. If `send`, begin to send each rank its part of them.

        A rank that has no gradient for a parameter sends -0.0. A sum is -0.0 only if all terms are,
        so the sum tells whether any rank had one.
        """
        if self.gradients is None:
            if not any(parameter.sharded.requires_grad for parameter in self.parameters):
                return
            self.gradients = torch.empty_like(self.unsharded, dtype=self.reduce_dtype)
        for parameter in self.parameters:
            if parameter.unsharded.grad is not None:
                self.collect(parameter)
            elif send and parameter not in self.collected:
                parameter.view(self.gradients).fill_(-0.0)
        if send:
            self.received = torch.empty_like(self.gradients)
            self.reducing = dist.all_to_all_single(
                self.received, self.gradients, group=self.process_group, async_op=True
            )

    def collect(self, parameter):
        gradient = parameter.unsharded.grad
        total = parameter.view(self.gradients)
        # The first is added to 0.0, which makes a gradient of -0.0 a 0.0.
        before = total if parameter in self.collected else 0.0
        torch.add(gradient, before, out=total)
        self.collected.add(parameter)
        parameter.unsharded.grad = None

    @torch.no_grad()
    def wait_for_reduce(self):
        """Add this rank's part of the mean gradient to .grad of the shards."""
        if self.reducing is None:
            return
        self.reducing.wait()
        received = self.received
        if received.dtype == torch.float16:
            received = received.float()  # the sum of two float16 may be over their limit of 65504
        # Added in rank order, as one device adds the ranks' batches.
        total = functools.reduce(torch.add, received.chunk(self.world_size))
        # `collected` first, because is_used() makes the host wait for the GPU.
        used = [p for p in self.parameters if p in self.collected or is_used(total[p.slice])]
        self.forget_gradients()
        total /= self.world_size
        mean = total.to(self.shard.dtype)
        if self.pin_memory:
            pinned = torch.empty_like(mean, device="cpu", pin_memory=True)
            mean = pinned.copy_(mean, non_blocking=True)
        for parameter in used:
            if parameter.sharded.grad is None:
                parameter.sharded.grad = mean[parameter.slice]
            else:
                self.wait_for_copies()  # the host adds
                parameter.sharded.grad += mean[parameter.slice]

    def wait_for_copies(self):
        """Under offload from a GPU: after this, the host may read and write shards and .grad."""
        if self.pin_memory:
            torch.cuda.current_stream(self.unsharded.device).synchronize()

    def forget_gradients(self):
        self.gradients = None
        self.collected = set()
        self.received = None
        self.reducing = None

    def forget_backward(self):
        """Drop what a backward that raised has left."""
        if self.reducing is not None:
            self.reducing.wait()  # it uses the memory that is freed next
        self.forget_gradients()
        for parameter in self.parameters:
            parameter.unsharded.grad = None


def is_used(total):
    """Whether any rank had a gradient for these elements: not all of them are -0.0."""
    return not bool(((total == 0) & total.signbit()).all())


# --------------------------------------------------------------------------------------------------
# 3. When they move. A model of the units 0, 1 and 2. "unshard" and "reduce" only begin a move, and
# "wait" ends it:
#
#   forward    pre_forward 0       unshard 0, wait   unshard 1
#              post_forward 0      reshard 0
#              pre_forward 1       wait unshard 1    unshard 2
#              post_forward 1      reshard 1
#              …
#   backward   pre_backward 2      unshard 2, wait   unshard 1
#              post_backward 2     reshard 2         reduce 2
#              pre_backward 1      wait unshard 1    unshard 0
#              post_backward 1     wait reduce 2     reshard 1     reduce 1
#              pre_backward 0      wait unshard 0
#              finish_backward     wait reduce 1     reshard 0     reduce 0     wait reduce 0
#
# There is no post_backward 0, because the inputs of unit 0 need no gradient. The first pass records
# which unit comes next. Later passes unshard that unit early, as shown. All ranks make the same
# moves in the same order.


def in_backward():
    """Whether autograd is running. A forward in it is a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


class PostBackward(torch.autograd.Function):
    """The identity on an input of a unit. Its backward runs when that of the unit is over.

    Autograd runs the newest node first. This one is older than those of the unit's operations.
    """

    @staticmethod
    def forward(ctx, unit, tensor):
        ctx.unit = unit
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        if ctx.unit.needs_reduce:  # otherwise another input's was first
            ctx.unit.post_backward()
        return None, gradient


# What a unit may return, in lists, tuples or dicts. Other types may hide tensors from post_forward.
OUTPUT_TYPES = (torch.Tensor, torch.Size, int, float, complex, str, bytes, type(None))


class Unit:
    """A module that fully_shard was called on: its parameters, and the hooks that move them."""

    def __init__(self, groups, reshard_after_forward, input_dtype):
        self.groups = groups  # one for each dtype; the parameters that train apart from the frozen
        self.reshard_after_forward = reshard_after_forward
        self.input_dtype = input_dtype  # of floating-point inputs; None: they stay
        self.schedule = None  # the Schedule that all units of the model share
        self.sends = True  # False in no_sync()
        self.needs_reduce = False  # backward has reached it since its last reduction

    def pre_forward(self, module, args, kwargs):
        """Unshard. Cast the inputs, and pass them through PostBackward."""
        schedule = self.schedule
        # `outermost` is still this unit if its last forward raised.
        if not in_backward() and schedule.outermost in (None, self):
            schedule.reset()
            schedule.outermost = self
        schedule.unshard(self, "recomputation" if in_backward() else "forward")

        def prepare(tensor):
            if tensor.is_floating_point():
                tensor = tensor.to(dtype=self.input_dtype)
            return PostBackward.apply(self, tensor) if tensor.requires_grad else tensor

        return tree_map_only(torch.Tensor, prepare, (args, kwargs))

    def post_forward(self, module, args, output):
        """Reshard. Have pre_backward called when backward reaches an output."""
        for leaf in tree_leaves(output) if torch.is_grad_enabled() else ():
            if not isinstance(leaf, OUTPUT_TYPES):
                text = f"a unit returns a {type(leaf).__name__}"
                raise ValueError(f"{text}; return tensors in lists, tuples or dicts")
            if torch.is_tensor(leaf) and leaf.grad_fn:
                leaf.grad_fn.register_prehook(self.pre_backward)
        if not in_backward():  # otherwise the backward of this unit follows at once
            for group in self.groups:
                group.use_shards()  # users see shards, even while the unit stays unsharded
                if self.reshard_after_forward or not torch.is_grad_enabled():
                    group.reshard()
        if self.schedule.outermost is self:
            self.schedule.outermost = None
            self.schedule.wait_for_copies()  # the caller may write to the shards next

    def pre_backward(self, gradients):
        """Unshard."""
        self.schedule.start_backward()
        self.needs_reduce = True
        self.schedule.unshard(self, "backward")

    def post_backward(self):
        """Reshard and reduce."""
        self.schedule.wait_for_reduce()  # gradients have travelled while this unit computed
        for group in self.groups:
            group.reshard()
            group.reduce(self.sends)
        self.needs_reduce = not self.sends  # the next backward must send what no_sync() has kept

    def pre_state_dict(self, module, prefix, keep_vars):
        if not keep_vars:  # as full_state_dict() sets it, and users do not
            raise RuntimeError("the parameters are sharded: call full_state_dict(model) instead")
        self.schedule.reset()


class Schedule:
    """What the units of a model share: their order, and what happens when a backward ends."""

    def __init__(self, units):
        self.units = units  # the outermost first
        self.groups = [group for unit in units for group in unit.groups]
        self.outermost = None  # the unit whose forward is under way and calls the others
        # From start_backward to finish_backward: weak reference to the callback. Autograd holds the
        # callback, and drops it uncalled if backward raises.
        self.final_callback = None
        self.previous = None  # (unit, phase) that was unsharded last
        self.next_unit = {}  # {(unit, phase): the unit that came after it the last time}
        for unit in units:
            unit.schedule = self

    def unshard(self, unit, phase):
        """Wait until `unit` is unsharded, and begin to unshard the unit that comes next."""
        for group in unit.groups:
            group.unshard()
        for group in unit.groups:
            group.wait_for_unshard()
        if (unit, phase) in self.next_unit:
            for group in self.next_unit[unit, phase].groups:
                group.unshard()
        self.next_unit[self.previous] = unit
        self.previous = (unit, phase)

    def wait_for_reduce(self):
        for group in self.groups:
            group.wait_for_reduce()

    def wait_for_copies(self):
        for group in self.groups:
            group.wait_for_copies()

    def start_backward(self):
        """Have autograd call finish_backward when the backward that is running ends."""
        if self.final_callback and self.final_callback() is None:
            self.reset()  # an earlier backward raised
        if self.final_callback is None:
            callback = functools.partial(Schedule.finish_backward, self)
            self.final_callback = weakref.ref(callback)
            self.previous = None
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def finish_backward(self):
        """Reduce also the units that had no post_backward: their inputs need no gradient."""
        for unit in self.units:
            if unit.needs_reduce:
                unit.post_backward()
        self.wait_for_reduce()
        self.wait_for_copies()  # the optimizer reads .grad next
        self.final_callback = None  # this backward has not raised
        self.reset()

    def reset(self):
        """Bring all units to rest: sharded, nothing under way."""
        if self.final_callback:  # a backward began and did not end, so it raised
            for group in self.groups:
                group.forget_backward()
        for group in self.groups:
            group.reshard()
        self.outermost = None
        self.previous = None
        self.final_callback = None


# --------------------------------------------------------------------------------------------------
# 4. What users call, on all ranks: units and their policies, accumulation, clipping.


class MixedPrecisionPolicy(NamedTuple):
    param_dtype: torch.dtype | None = None  # to gather and compute, also of inputs; None: as it is
    reduce_dtype: torch.dtype | None = None  # to add gradients; None: param_dtype


class CPUOffloadPolicy:
    """Keep shards, .grad and optimizer state in host memory; shards and .grad pinned for a GPU."""


def fully_shard(
    module,
    *,
    mesh=None,
    process_group=None,
    reshard_after_forward=True,
    mp_policy=MixedPrecisionPolicy(),  # noqa: B008  a NamedTuple does not change
    offload_policy=None,
):
    """Make a unit of `module`'s parameters, without those of submodules that are units already.

    Call it on the blocks first and then on the whole model. Make the optimizer after that.
    `module.parameters()` are now this rank's shards: 1-D, under their old names, perhaps empty.
    After backward, .grad is this rank's part of the mean gradient, or None if no rank has one.
    Parameters start as rank 0 has them. Those on the meta device become real by reset_parameters()
    of their modules. Buffers stay each rank's own.
    A forward must call a unit: if `self.pos` is one, it finds a 1-D shard in `self.pos.weight[:T]`.
    Freeze parameters before this call, so that no gradients are sent for them.
    Use clip_grad_norm_ of this file and, for float16, GradScaler of amp.py: PyTorch's see only this
    rank's norm and this rank's overflow.
    mesh: a DeviceMesh of one dimension, instead of process_group.
    reshard_after_forward: False keeps parameters unsharded from forward to backward.
    """
    process_group = choose_group(mesh, process_group)
    inner = reset_units(module)
    check_module(module, inner, process_group)
    groups = make_groups(module, process_group, mp_policy, offload_policy is not None)
    unit = Unit(groups, reshard_after_forward, mp_policy.param_dtype)
    Schedule([unit, *inner])  # which the inner units now share, in place of their own
    module._fsdp_unit = unit
    module.register_forward_pre_hook(unit.pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(unit.post_forward)
    module.register_state_dict_pre_hook(unit.pre_state_dict)
    return module


def choose_group(mesh, process_group):
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has {mesh.ndim} dimensions; give one of them: mesh[name]")
        process_group = mesh.get_group()
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group; only its ranks may call")
    # A reference to the default group would keep its threads alive after it is destroyed.
    return None if process_group is dist.group.WORLD else process_group


def reset_units(module):
    """Bring the units in `module` to rest, and return them."""
    units = [m._fsdp_unit for m in module.modules() if hasattr(m, "_fsdp_unit")]
    for schedule in {unit.schedule for unit in units}:
        schedule.reset()
    return units


def check_module(module, inner, process_group):
    name = type(module).__name__
    if type(module).forward is nn.Module.forward:
        raise ValueError(f"{name} has no forward that could unshard it; shard its children")
    others = {group.process_group for unit in inner for group in unit.groups} - {process_group}
    if hasattr(module, "_fsdp_unit") or others:
        raise ValueError(f"{name} is a unit already, or has one over other ranks")


def make_groups(module, process_group, mp_policy, offload):
    """A group of the parameters that train and one of the frozen parameters, of each dtype."""
    parameters = find_parameters(module, process_group)
    first = next(iter(parameters), torch.empty(0))
    device = device_for(first.device, dist.get_backend_config(process_group))
    materialize(module, device)
    kinds = {}
    for parameter, owners in parameters.items():
        kind = parameter.dtype, parameter.requires_grad
        kinds.setdefault(kind, {})[parameter] = owners
    return [
        ParameterGroup(of_kind, process_group, device, mp_policy, offload)
        for of_kind in kinds.values()
    ]


def find_parameters(module, process_group):
    """{parameter: [(module, attribute), …]} of a unit to be. An error if ranks do not agree."""
    found = {}
    descriptions = set()
    for i, (path, parameter) in enumerate(module.named_parameters(remove_duplicate=False)):
        sharded_parameter = getattr(parameter, "_sharded_parameter", None)
        if sharded_parameter is None:
            owner, _, name = path.rpartition(".")
            found.setdefault(parameter, []).append((module.get_submodule(owner), name))
            shape = tuple(parameter.shape)
            descriptions.add(f"{i} {path}: {shape}, {parameter.dtype}, {parameter.requires_grad=}")
        elif sharded_parameter.sharded is not parameter:
            name = type(module).__name__
            raise ValueError(f"{path} of {name} is tied to another unit's; put both into one unit")
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, descriptions, group=process_group)
    if differ := set.union(*everyone) - set.intersection(*everyone):
        raise ValueError(f"ranks must hold the same model, but differ in {sorted(differ)}")
    return found


def device_for(device, backends):
    """Where a unit computes. `backends` are the group's, such as "cpu:gloo,cuda:nccl"."""
    if f"{device.type}:" in backends:
        return device
    # The parameters are on the meta device, or on the CPU and the group has NCCL alone.
    has_gpu = torch.cuda.is_available() and "cuda:nccl" in backends
    return torch.device("cuda" if has_gpu else "cpu")


def materialize(module, device):
    """Make what is on the meta device real, module by module."""
    # The iterators find the tensors that to_empty() has made real.
    for path, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            owner = module.get_submodule(path.rpartition(".")[0])
            if not hasattr(owner, "reset_parameters"):
                name = type(owner).__name__
                text = f"{path} is on the meta device, but {name} has no reset_parameters()"
                raise ValueError(f"{text}: add one that fills it, or make {name} on a real device")
            owner.to_empty(device=device, recurse=False)
            owner.reset_parameters()


@contextmanager
def no_sync(module):
    """A backward in here sends nothing. The next one outside adds the gradients of both."""
    units = reset_units(module)
    for unit in units:
        unit.sends = False
    try:
        yield
    finally:
        for unit in units:
            unit.sends = True


@torch.no_grad()
def clip_grad_norm_(module, max_norm):
    """Scale the gradients so that their norm over all ranks is at most `max_norm`. Return it."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "_sharded_parameter"):
            raise ValueError(f"{name}: in no unit, so its gradient is not reduced; shard the root")
    group = reset_units(module)[0].schedule.groups[0]
    total = torch.zeros((), dtype=torch.float64, device=group.shard.device)
    for parameter in module.parameters():
        if parameter.grad is not None:
            total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
    total = total.to(group.unsharded.device)
    dist.all_reduce(total, group=group.process_group)
    norm = total.sqrt()
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm.to(group.shard.dtype)


# --------------------------------------------------------------------------------------------------
# 5. State dicts of the whole model and of its optimizer, the same on every rank, in host memory.


def gather_full(sharded, state):
    """Join all ranks' `state` of a parameter: {key: a tensor like the shard, or a number}."""
    parameter = sharded._sharded_parameter
    states = [None] * parameter.group.world_size
    # A copy, because a view would be sent with the whole storage behind it.
    state = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), state)
    if parameter.shape.numel() and not sharded.numel():
        state = None  # a rank without elements may have made fewer optimizer steps
    dist.all_gather_object(states, state, group=parameter.group.process_group)
    states = [state for state in states if state]
    full = states[0] if states else {}
    for key, value in full.items():
        if torch.is_tensor(value) and value.dim():  # "step" has no dimensions
            flat = torch.cat([state[key] for state in states])
            full[key] = flat.as_strided(parameter.shape, parameter.stride)
    return full


@torch.no_grad()
def full_state_dict(module):
    """What the plain module's state_dict() would be."""
    full = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if hasattr(tensor, "_sharded_parameter"):
            full[name] = gather_full(tensor, {"value": tensor})["value"]
        else:
            full[name] = tensor.to("cpu", copy=True)
    return full


def load_full_state_dict(module, state_dict):
    """Load what full_state_dict(), or the plain module's state_dict(), returned on every rank."""
    state_dict = dict(state_dict)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in state_dict and hasattr(tensor, "_sharded_parameter"):
            state_dict[name] = tensor._sharded_parameter.shard_of(state_dict[name])
    module.load_state_dict(state_dict)


def shards_of(optimizer):
    return itertools.chain(*(group["params"] for group in optimizer.param_groups))


def full_optimizer_state_dict(module, optimizer):
    """What the plain optimizer's state_dict() would be, if it treats each element by itself."""
    state_dict = optimizer.state_dict()
    full = {}
    for i, sharded in enumerate(shards_of(optimizer)):
        if state := gather_full(sharded, state_dict["state"].get(i)):
            full[i] = state
    return {**state_dict, "state": full}


def load_full_optimizer_state_dict(module, optimizer, state_dict):
    """Load what full_optimizer_state_dict(), or the plain optimizer's state_dict(), returned."""
    state_dict = copy.deepcopy(state_dict)
    for i, sharded in enumerate(shards_of(optimizer)):
        parameter = sharded._sharded_parameter
        state = state_dict["state"].get(i, {})
        for key, value in state.items():
            # A step has the shape of a parameter without dimensions.
            if torch.is_tensor(value) and value.shape == parameter.shape and key != "step":
                state[key] = parameter.shard_of(value)
    optimizer.load_state_dict(state_dict)


def shards(module, optimizer):
    """Yield (name, whole shape, number of the shard's first element, shard, its optimizer state).

    checkpoint.shard_pieces() takes them. Elements are numbered in the order of memory.
    """
    for name, sharded in module.named_parameters():
        parameter = sharded._sharded_parameter
        group = parameter.group
        first = max(0, group.rank * group.shard_size - parameter.start)
        yield name, parameter.shape, first, sharded, optimizer.state.get(sharded, {})


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    model = demo.start("fsdp", bitwise=True)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        gradients = []
        for sharded in model.parameters():
            full = gather_full(sharded, {"gradient": sharded.grad})
            gradients.append(full["gradient"].to(demo.device))
        parameters = [value.to(demo.device) for value in full_state_dict(model).values()]
        return gradients, parameters

    demo.train(step, whole)
    psi = held_bytes(demo.model.parameters())
    sent = 3 * psi * (demo.ranks - 1) / demo.ranks
    status = demo.report(held(model.parameters(), optimizer), "3Ψ(N-1)/N", sent)
    groups = {}
    for i, layer in enumerate(model):
        groups[f"{i} {type(layer).__name__}"] = layer._fsdp_unit.groups[0]
    moves = record_moves(groups, lambda: step(*demo.batch(0)))
    demo.show(timeline(moves))
    return status


def record_moves(groups, step):
    """[(seconds, label, sign of what the group does from then on), …] of a step."""
    signs = {"unshard": "·", "wait_for_unshard": "F", "reshard": " "}
    signs |= {"reduce": "-", "wait_for_reduce": " "}
    moves = []

    def record(label, name, move, *arguments):
        group = groups[label]
        does_nothing = {
            "unshard": not group.is_sharded,
            "reshard": group.is_sharded,
            "wait_for_reduce": group.reducing is None,
        }
        if does_nothing.get(name):
            return
        seconds = time.perf_counter()
        move(*arguments)
        if name.startswith("wait"):
            seconds = time.perf_counter()
        sign = "B" if name == "wait_for_unshard" and in_backward() else signs[name]
        moves.append((seconds, label, sign))

    for label, group in groups.items():
        for name in signs:
            setattr(group, name, functools.partial(record, label, name, getattr(group, name)))
    step()
    return moves


def timeline(moves, width=100):
    """A line for each unit. Everything that a unit does takes at least one column."""
    start = moves[0][0]
    end = moves[-1][0]
    lines = {label: "" for _, label, _ in moves}
    doing = dict.fromkeys(lines, " ")
    for seconds, label, sign in moves:
        column = round(width * (seconds - start) / (end - start))
        at_least = 0 if doing[label] == " " else 1
        lines[label] += doing[label] * max(column - len(lines[label]), at_least)
        doing[label] = sign
    legend = "· gather, F forward, B backward, - reduce, each at least one column wide"
    title = f"\nunit         a step of {1e3 * (end - start):.0f} ms: {legend}"
    return "\n".join([title, *(f"{label:11}  {line}" for label, line in lines.items())])


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
        """Print the result (README, "What the lines mean"). Return 1 if a rank differs."""
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

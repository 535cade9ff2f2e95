"""ZeRO: data parallelism with optimizer state, gradients and parameters split over the ranks.

DDP keeps everything on each of N ranks. But an elementwise optimizer, such as Adam, can update any
part of the parameters alone. So each rank updates 1/N of them, and keeps only their optimizer
state.

            backward →  reduce-scatter gradients →  update own part →  all-gather parameters
    rank 0   g₀ ━━━━┯━━━━ ╲╱ ━━━━ sum of the left halves  ── AdamW ━━━━ ╲╱ ━━━━┯━━━━ p
    rank 1   g₁ ━━━━┷━━━━ ╱╲ ━━━━ sum of the right halves ── AdamW ━━━━ ╱╲ ━━━━┷━━━━ p

    Zero1 shards the optimizer state. step() reduces the gradients, updates, and gathers.
    Zero2 also shards the gradients. Backward reduces a bucket of gradients as soon as it is full.
    Zero3 also shards the parameters. It gathers a unit, such as a transformer block, before its
          forward and its backward, and frees it afterwards.

Read section 1 for the idea (12 minutes), to section 4 for the technique (52), and the rest to use
it as a library (86).

For Ψ parameters of 16 bits, with Adam and fp32 master weights, a rank holds these bytes, and sends
these elements, times (N-1)/N, in a step of m backwards. Sharded gradients are in fp32:

           parameters  gradients  optimizer  sent     sent with no_sync()
    DDP    2Ψ          2Ψ         12Ψ        2mΨ      2Ψ
    Zero1  2Ψ          2Ψ         12Ψ/N      2Ψ       2Ψ
    Zero2  2Ψ          4Ψ/N       12Ψ/N      (m+1)Ψ   2Ψ
    Zero3  0           4Ψ/N       12Ψ/N      3mΨ      (2m+1)Ψ

In no_sync(), gradients are whole. A bucket of gradients is held twice while it is reduced. step()
and clip_grad_norm_() also all-reduce a byte per parameter tensor and bucket.

Gradients are added in rank order and divided by N. So training without clipping is bitwise equal to
one device that does the same. Of two backwards a and b in a step on two ranks, Zero2 and Zero3 add
((a₀ + a₁) + b₀) + b₁. Zero1, and each class in no_sync(), adds (a₀ + b₀) + (a₁ + b₁).

Run:      torchrun --nproc-per-node 2 zero.py          (python zero.py runs as one rank)
          torchrun --nproc-per-node 2 zero.py --idea   trains with section 1
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §3, §5, §7; Ren et al. 2021,
          ZeRO-Offload, arXiv 2101.06840
Mirrors:  DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer; DeepSpeed
Left out: optimizers that need whole matrices (muon.py); Adafactor; groups added later; several
          devices per rank; the meta device and optimizers over shards (fsdp.py); NCCL's
          reduce-scatter, which adds in another order; training after an error. In Zero3: overlap of
          gathers (fsdp.py), and outputs that are the input changed in place, a view of a parameter,
          or in other objects than lists, tuples and dicts
"""

import argparse
import copy
import functools
import itertools
import json
import os
import signal
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
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

# torch 2.13 renames all_gather_into_tensor and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --------------------------------------------------------------------------------------------------
# 1. The idea: each rank keeps 1/N of every parameter, its shard, for an optimizer over the shards.


class ShardedParameter:
    """A parameter, and this rank's shard: row `rank` if the parameter is cut into N equal rows."""

    def __init__(self, parameter, process_group=None):
        self.parameter = parameter
        self.process_group = process_group
        self.N = dist.get_world_size(process_group)
        self.shard = self.rows(parameter)[dist.get_rank(process_group)].clone()

    def rows(self, tensor):
        flat = tensor.detach().reshape(-1)
        return F.pad(flat, (0, -flat.numel() % self.N)).view(self.N, -1)

    def reduce_scatter(self, _=None):  # hooks get an argument
        """Move the gradient to the shards: to each its row of the mean over ranks."""
        gradients = self.rows(self.parameter.grad)
        received = torch.empty_like(gradients)  # row r is from rank r
        dist.all_to_all_single(received, gradients, group=self.process_group)
        mean = sum(received) / self.N  # in rank order, unlike a reduce-scatter
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.parameter.grad = None

    def all_gather(self):
        """Fill the parameter with the shards of all ranks. Allocate it, if it is freed."""
        if not self.parameter.untyped_storage().size():
            self.parameter.untyped_storage().resize_(self.parameter.nbytes)
        flat = self.shard.new_empty(self.N * self.shard.numel())
        all_gather_single(flat, self.shard, group=self.process_group)
        values = flat[: self.parameter.numel()]
        # By .data: autograd must not see a change of what it saved for backward.
        self.parameter.data.copy_(values.view_as(self.parameter))

    def free(self, _=None):
        """Free the storage, which autograd's saved tensors share. all_gather() fills it again."""
        self.parameter.untyped_storage().resize_(0)


def step(sharded, optimizer):
    """A step of ZeRO-1 or ZeRO-2: reduce, update, gather. `optimizer` has the shards.

    All ranks must use the same parameters. Call optimizer.zero_grad() after the step.
    """
    for each in sharded:
        if each.parameter.grad is not None:  # in ZeRO-2, backward has reduced it
            each.reduce_scatter()
    optimizer.step()
    for each in sharded:
        each.all_gather()


def zero2_hooks(sharded):
    """Let backward reduce each gradient when it is complete."""
    for each in sharded:
        each.parameter.register_post_accumulate_grad_hook(each.reduce_scatter)


class Zero3Unit(nn.Module):
    """Runs `module`, whose parameters have memory only while its forward or backward runs.

    After optimizer.step() and optimizer.zero_grad(), the next forward gathers the new shards.
    """

    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        self.sharded = [ShardedParameter(p, process_group) for p in module.parameters()]
        zero2_hooks(self.sharded)
        for each in self.sharded:
            each.free()
            # Hooks run in order: this after reduce_scatter(). A frozen or unused parameter stays
            # whole.
            each.parameter.register_post_accumulate_grad_hook(each.free)

    def gather(self, _=None):
        for each in self.sharded:
            each.all_gather()

    def forward(self, x):
        self.gather()
        y = self.module(x)
        if y.requires_grad:
            y.register_hook(self.gather)  # the unit's backward begins with the gradient of y
        for each in self.sharded:
            each.free()
        return y


# --------------------------------------------------------------------------------------------------
# 2. ZeRO-1: the optimizer holds this rank's part of the parameters, in buckets.


class Bucket:
    """Parameters of one dtype, all trained or all frozen, in a flat tensor of N equal parts.

    For the parameters weight = ■■■ and bias = □ on two ranks:

                rank 0            rank 1
        flat    ■■■□              ■■■□                the parameters are views of it
        part    ■■                ■□                  a view of flat
        master  ■■                ■□                  the part; or a copy: fp32, offloaded, in Zero3
        slots   weight ■■         weight ■, bias □    segments of master for the optimizer
        grad    ■■                ■□                  gradients, added over the ranks
    """

    def __init__(self, parameters, process_group, offload, copy_part):
        self.parameters = parameters
        self.process_group = process_group
        self.N = dist.get_world_size(process_group)
        self.flat = flatten(parameters, self.N)  # this makes the parameters views of it
        self.part = self.flat.chunk(self.N)[dist.get_rank(process_group)]
        dtype = torch.float32 if self.flat.itemsize == 2 else self.flat.dtype
        self.master = self.part.to(offload or self.flat.device, dtype, copy=copy_part)
        self.slots = [Slot(parameter, self) for parameter in parameters]
        self.grad = None  # step() divides it by N
        self.reducing = None  # during an all-to-all: its handle, and its output
        self.freed = False  # True while Zero3 has freed the memory of `flat`

    def start_reduce(self):
        """Move the gradients out of .grad, and start to send part r of them to rank r."""
        gradients = torch.empty_like(self.flat)  # zeroing it would take 3% of a step
        for slot in self.slots:
            view = slot.view(gradients)
            if slot.parameter.grad is None:
                view.zero_()
            else:
                view.copy_(slot.parameter.grad.to_dense())  # nn.Embedding(sparse=True)
                slot.parameter.grad = None
                slot.has_gradient = True
        received = torch.empty_like(gradients)  # part r is from rank r
        handle = dist.all_to_all_single(
            received, gradients, group=self.process_group, async_op=True
        )
        self.reducing = handle, received

    def finish_reduce(self):
        """Add the gradients of all ranks to `grad`, in rank order."""
        handle, received = self.reducing
        self.reducing = None
        handle.wait()
        for part in received.chunk(self.N):  # torch.sum() adds more than 4 in another order
            if self.grad is None:
                self.grad = part.to(self.master.dtype)  # a sum in fp16 would overflow at 65504
            else:
                self.grad = self.grad + part  # not +=: a view of `received` would keep it alive

    def all_gather(self):
        """Fill `flat` with the masters of all ranks."""
        if not self.freed:  # Zero3's next forward gathers it
            self.part.copy_(self.master)
            all_gather_single(self.flat, self.part, group=self.process_group)


class Slot:
    """The place of one parameter in its bucket.

    Its segment is what lies in this rank's part, if anything. Comments are about rank 1 above.
    """

    def __init__(self, parameter, bucket):
        self.parameter = parameter
        self.has_gradient = False  # on any rank, in .grad or reduced already
        self.stride = parameter.stride()
        self.start = parameter.storage_offset()  # in `flat`: weight 0, bias 3
        first = self.start - bucket.part.storage_offset()  # in the part: weight -2, bias 1
        # A slice ends where the part ends.
        self.in_part = slice(max(0, first), max(0, first + parameter.numel()))
        self.segment = bucket.master[self.in_part]
        self.offset = max(0, -first)  # of the segment in the parameter: weight 2, bias 0

    def view(self, flat):
        """Return the parameter's elements of a tensor such as `flat`, in its shape."""
        return flat.as_strided(self.parameter.shape, self.stride, self.start)


def buckets_to_reduce(optimizer):
    """Return the buckets with a .grad on any rank. Set has_gradient of each slot.

    Ranks may use different parameters, but must issue the same collectives, and update the same
    segments. So they tell each other what they have.
    """
    slots = list(optimizer._slots.values())
    flags = [slot.has_gradient or slot.parameter.grad is not None for slot in slots]
    for bucket in optimizer._buckets:
        flags.append(any(parameter.grad is not None for parameter in bucket.parameters))
    flags = optimizer._buckets[0].flat.new_tensor(flags, dtype=torch.uint8)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=optimizer.process_group)
    flags = flags.tolist()  # the host waits for the device here
    for slot in slots:
        slot.has_gradient = bool(flags.pop(0))
    return [bucket for bucket, flag in zip(optimizer._buckets, flags, strict=True) if flag]


class Zero1(torch.optim.Optimizer):
    """Averages gradients over `process_group` and updates the parameters, each rank 1/N of them.

    Move `module` to its device first. make_buckets() explains the other arguments.

    It has the whole parameters and their options, for schedulers. Its inner optimizer has the
    segments and their state. Drop or clip gradients with this class: module.zero_grad() and torch's
    clip_grad_norm_() see only a rank's own.
    """

    _around = {}  # of Zero3, for make_buckets()
    _sync = True  # False in no_sync(), for Zero2 and Zero3

    def __init__(
        self,
        module,
        optimizer_class,
        process_group=None,
        offload=None,
        bucket_cap_mb=25,
        params=None,
        **optimizer_kwargs,
    ):
        # Only an instance knows the defaults, and the class behind a functools.partial.
        dummy = optimizer_class([torch.zeros(1)], **optimizer_kwargs)
        super().__init__(module.parameters() if params is None else params, dummy.defaults)
        self.module = module
        self.process_group = process_group
        # The last parameters come first, as in backward.
        self._buckets = make_buckets(self, type(dummy), offload, bucket_cap_mb * 2**20)
        self._slots = {slot.parameter: slot for bucket in self._buckets for slot in bucket.slots}
        self._optimizer = optimizer_class(segment_groups(self), **optimizer_kwargs)

    def step(self, closure=None):
        """Update this rank's segments, drop the gradients, and gather the parameters."""
        loss = closure and closure()
        check_step(self)
        adopt_user_writes(self)  # such as module.load_state_dict()
        buckets = self._reduce_gradients()
        for bucket in buckets:
            bucket.grad /= bucket.N  # once, as on one device
            grad = bucket.grad.to(bucket.master.device)
            for slot in bucket.slots:
                # Optimizers skip a parameter without a gradient, but not one with zeros.
                if slot.has_gradient:
                    slot.segment.grad = grad[slot.in_part]
        # Again, because schedulers change options. The state stays: its keys are the segments.
        self._optimizer.param_groups = segment_groups(self)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.zero_grad()
        for bucket in buckets:
            bucket.all_gather()
        return loss

    def _reduce_gradients(self):
        """Reduce what is still in .grad. Return the buckets that have gradients."""
        for bucket in buckets_to_reduce(self):  # the same on all ranks
            self._start_reduce(bucket)
        self._finish_reduce()
        return [bucket for bucket in self._buckets if bucket.grad is not None]

    def _start_reduce(self, bucket):
        self._finish_reduce()  # so only one bucket is held twice
        bucket.start_reduce()

    def _finish_reduce(self):
        for bucket in self._buckets:
            if bucket.reducing:
                bucket.finish_reduce()

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, in .grad and reduced."""
        super().zero_grad()
        for bucket in self._buckets:
            bucket.grad = None
            for slot in bucket.slots:
                slot.has_gradient = False

    @contextmanager
    def no_sync(self):
        """A context for all backwards of a step but the last. Gradients stay whole, in .grad."""
        before = self._sync
        self._sync = False
        try:
            yield
        finally:
            self._sync = before

    # The library. Section 6 says what these methods do; go on with section 3.

    def add_param_group(self, param_group):
        if hasattr(self, "_buckets"):
            raise ValueError("the buckets are made: give all parameter groups to the constructor")
        super().add_param_group(param_group)

    def clip_grad_norm_(self, max_norm, *, counted=None, process_groups=()):
        return clip_grad_norm_(self, max_norm, counted, process_groups)

    def unscale_(self, loss_scale):
        return unscale_(self, loss_scale)

    def state_dict(self):
        return whole_state_dict(self)

    def load_state_dict(self, state_dict):
        load_whole_state_dict(self, state_dict)

    def shards(self):
        return shards_of(self)

    def sync_parameters(self):
        for bucket in self._buckets:
            bucket.all_gather()


# --------------------------------------------------------------------------------------------------
# 3. ZeRO-2: backward reduces gradients, so that few are whole at a time.


class Zero2(Zero1):
    """Zero1 with sharded gradients. Backward reduces a bucket when it is full, and goes on.

    On every rank, each backward must begin at an output of the module, or reach a parameter.
    Otherwise ranks wait for each other.
    """

    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        self._in_backward = False
        self._to_reduce = []  # the buckets that the running backward has yet to reduce
        self._arrived = set()  # parameters whose gradients this backward has computed
        hook = WeakHook(self._post_accumulate_grad)
        for parameter in self._slots:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)
        module.register_forward_hook(WeakHook(self._post_forward), with_kwargs=True)

    def _post_accumulate_grad(self, parameter):
        """A hook. Backward has added to the .grad of `parameter`."""
        self._begin_backward()  # unless an output of the module has
        self._arrived.add(parameter)
        self._reduce_full()

    def _reduce_full(self):
        # Ranks may fill buckets in different orders, but must send them in one order.
        while self._to_reduce and self._arrived.issuperset(self._to_reduce[0].parameters):
            self._start_reduce(self._to_reduce.pop(0))

    def _post_backward(self):
        for bucket in self._to_reduce:  # other ranks' backwards may have filled and sent it
            self._start_reduce(bucket)
        self._finish_reduce()
        self._to_reduce = []
        self._arrived.clear()
        self._in_backward = False

    def _begin_backward(self, module=None, gradient=None):
        """A hook. Backward has reached an output of `module`, or begins with a parameter."""
        if self._in_backward:
            return
        self._in_backward = True
        if self._sync:
            self._to_reduce = [b for b in self._buckets if b.parameters[0].requires_grad]
        # When the backward that runs now ends. So outputs call this, too: a first gradient may come
        # in the inner backward of a reentrant checkpoint, which ends too early.
        torch.autograd.Variable._execution_engine.queue_callback(self._post_backward)

    def _post_forward(self, module, args, kwargs, output):
        """A hook. Let backward call _begin_backward(module) when it reaches an output."""
        hook_outputs((args, kwargs), output, functools.partial(self._begin_backward, module))


# --------------------------------------------------------------------------------------------------
# 4. ZeRO-3: parameters have memory only when they are needed.


def free(bucket):
    """Free the memory of `flat`, but keep the storage object.

    Tensors that autograd saved for backward share it, and unfree() fills it again. Until then, the
    parameters' .data is one NaN, expanded.
    """
    bucket.nan = torch.full((), torch.nan, device=bucket.flat.device).to(bucket.flat.dtype)
    for slot in bucket.slots:
        slot.parameter.data = bucket.nan.expand(slot.parameter.shape)
    bucket.flat.untyped_storage().resize_(0)
    bucket.freed = True


def unfree(bucket):
    """Allocate and gather `flat`."""
    check_is_here(bucket)
    bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
    bucket.freed = False
    for slot in bucket.slots:
        slot.parameter.data = slot.view(bucket.flat)
    bucket.all_gather()


def buckets_needed(optimizer):
    """Return {module: the buckets to gather for it}.

    The parameters of a bucket have the same units around them. Modules inside all of these need it:
    a block needs its own buckets, and those of the whole module.
    """
    around = optimizer._around
    needed = {}
    for child in optimizer.module.modules():
        needed[child] = [b for b in optimizer._buckets if around[b.parameters[0]] <= around[child]]
    return needed


class Zero3(Zero2):
    """Zero2 with sharded parameters, which are whole only while a unit that needs them runs.

    forward   gather unit 0, run it   free 0, gather 1, run 1   free 1, gather 2, run 2   free 2
    backward  gather unit 2, run it   reduce its gradients, free 2, gather 1, run 1       …

    `units` are modules inside of `module`; by default, the members of nn.Sequential and
    nn.ModuleList, such as transformer blocks. The whole module is a unit, too: its own parameters
    are whole until its forward or backward ends. A parameter belongs to the innermost unit that has
    all its uses. All ranks must run the same units in the same order. If they use different members
    of a list, such as experts, let the list be a unit.

    Freed parameters are NaN, and lose what is written to them. So call a unit instead of reading
    its weights. Initialize, load, copy or read parameters in full_parameters().
    """

    def __init__(self, module, *args, units=None, **kwargs):
        # {module or parameter: the units that have it inside, or are it}
        self._around = units_around(module, units)
        super().__init__(module, *args, **kwargs)
        self._needed = buckets_needed(self)  # {module: the buckets of the units around it}
        self._kept = []  # buckets that are whole when no unit runs: all in full_parameters()
        for child in module.modules():  # a module inside a unit may run alone
            child.register_forward_pre_hook(WeakHook(self._enter), prepend=True)
            if child is not module:  # Zero2.__init__ has hooked it, with the method below
                child.register_forward_hook(WeakHook(self._post_forward), with_kwargs=True)
        guard(module)  # against reading freed parameters
        self._unshard_only(self._kept)

    def _enter(self, module, args=None):
        """A hook. `module` is about to run forward, or has been reached by backward."""
        needed = self._needed[module]
        # A module inside a unit that runs already finds everything gathered.
        if any(bucket.freed for bucket in needed):
            self._unshard_only(needed)

    def _post_forward(self, module, args, kwargs, output):
        super()._post_forward(module, args, kwargs, output)
        if module is self.module and not self._in_backward:  # in backward, a checkpoint runs it
            self._unshard_only(self._kept)

    def _begin_backward(self, module=None, gradient=None):
        super()._begin_backward()
        if module is not None:
            self._enter(module)

    def _unshard_only(self, needed):
        """Gather these buckets, and free all others.

        Backward, too, is done with a unit when it enters another: it reverses the forward.
        """
        past = [b for b in self._buckets if not (b.freed or b in needed)]
        self._reduce_past(past)
        for bucket in past:
            free(bucket)
        for bucket in needed:
            if bucket.freed:
                unfree(bucket)

    def _reduce_past(self, past):
        """Reduce the units that backward leaves. Outside of a backward, _to_reduce is empty."""
        past = [bucket for bucket in past if bucket in self._to_reduce]
        # All buckets, because other ranks may have gradients in others. Or none, if no gradient has
        # arrived: a checkpoint around several units has only run these forward again.
        if any(self._arrived.intersection(bucket.parameters) for bucket in past):
            for bucket in past:
                self._to_reduce.remove(bucket)
                self._start_reduce(bucket)

    def _reduce_full(self):
        """Do nothing. Ranks leave a unit at the same time, but may fill it at different times."""

    def _post_backward(self):
        super()._post_backward()
        self._unshard_only(self._kept)

    # The library: see section 6.

    def full_parameters(self):
        return full_parameters(self)

    def module_state_dict(self):
        return module_state_dict(self)


# --------------------------------------------------------------------------------------------------
# 5. What the classes call: masters, memory, buckets, units and hooks.


def adopt_user_writes(optimizer):
    """Copy to the masters what the user wrote into the parameters since the last step.

    An element was written if it differs from its master, rounded to the parameters' dtype.
    """
    for bucket in optimizer._buckets:
        if bucket.master is not bucket.part and not bucket.freed:
            values = bucket.part.to(bucket.master.device)
            unchanged = bucket.master.to(values.dtype) == values
            bucket.master.copy_(torch.where(unchanged, bucket.master, values))


def parameters_of(optimizer):
    """Return the parameters of all groups, in the order of state dicts."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def segment_groups(optimizer):
    """Return the parameter groups with segments for parameters, for the inner optimizer."""
    groups = []
    for group in optimizer.param_groups:
        segments = [optimizer._slots[parameter].segment for parameter in group["params"]]
        groups.append({**group, "params": segments})
    return groups


def flatten(parameters, N):
    """Return a tensor with all parameters, which N divides. Make the parameters views of it.

    They begin at multiples of 64 bytes, as in PyTorch's own memory, and keep the strides of the
    plain model. Otherwise kernels are slower or round differently. Parts have multiples of 16
    bytes, for NCCL's speed.
    """
    first = parameters[0]
    numels = [round_up(parameter.numel(), 64 // first.itemsize) for parameter in parameters]
    total = max(1, sum(numels))  # no part is empty
    flat = first.new_zeros(round_up(total, N * 16 // first.itemsize))
    start = 0
    for parameter, numel in zip(parameters, numels, strict=True):
        stride = torch.empty_like(parameter, device="meta").stride()
        view = flat.as_strided(parameter.shape, stride, start)
        parameter.data = view.copy_(parameter.data)
        start += numel
    return flat


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def make_buckets(optimizer, optimizer_class, offload, cap_bytes):
    """Check the arguments, and put the parameters of rank 0 into buckets. Return these.

    Buffers of rank 0 are copied, too, but not synchronized afterwards. `params` are the parameters
    or groups to train. offload="cpu" keeps masters and optimizer state in host memory, and updates
    there. In Zero3, all parameters in a bucket are in the same units. The last ones come first, as
    in backward.
    """
    if dist.get_rank(optimizer.process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group")
    trained = set(parameters_of(optimizer))
    lists = []
    filling = {}  # kind: the list that has less than `cap_bytes`
    for parameter in reversed(list(optimizer.module.parameters())):
        if parameter in trained:
            around = optimizer._around.get(parameter)
            kind = (parameter.dtype, parameter.requires_grad, around)
            together = filling.setdefault(kind, [])
            together.append(parameter)
            if sum(p.nbytes for p in together) >= cap_bytes:
                lists.append(filling.pop(kind))
    lists += filling.values()
    group = optimizer.process_group
    same = same_parameters(optimizer.module, group)
    check_arguments(optimizer, optimizer_class, lists, same)
    for tensor in [*same, *optimizer.module.buffers()]:
        values = tensor.detach().reshape(-1)
        # As bytes, because gloo has no int16, and in torch 2.6 no complex numbers.
        dist.broadcast(values.view(torch.uint8), group=group, group_src=0)
        tensor.detach().copy_(values.view_as(tensor))
    copy_part = bool(optimizer._around)  # Zero3 frees parts, but not masters
    return [Bucket(parameters, group, offload, copy_part) for parameters in lists]


def units_around(module, units=None):
    """Return the set of units around each module and around each parameter inside `module`.

    A unit is around a parameter if it has all modules that share the parameter.
    """
    if units is None:
        lists = [m for m in module.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
        units = itertools.chain(*lists)
    around = {child: frozenset() for child in module.modules()}
    units = {module, *units}
    if not around.keys() >= units:
        raise ValueError("units has modules that are not inside the module")
    for unit in units:
        for child in unit.modules():
            around[child] |= {unit}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            around[parameter] = around[child] & around.get(parameter, around[child])
    return around


def hook_outputs(inputs, output, hook):
    """Let backward call `hook` when it reaches a tensor in `output`.

    An output that is also an input was made by another module, which has hooked it.
    """
    inputs = {id(leaf) for leaf in tree_leaves(inputs)}
    for leaf in tree_leaves(output):
        if getattr(leaf, "grad_fn", None) and id(leaf) not in inputs:
            leaf.register_hook(hook)


class WeakHook:
    """Calls a method of the optimizer, but does not keep it alive, as a module's hooks would."""

    def __init__(self, method):
        self.method = weakref.WeakMethod(method)

    @torch.compiler.disable
    def __call__(self, *args):
        method = self.method()
        if method:
            method(*args)

    def __deepcopy__(self, memo):  # copy.deepcopy(model) gets here
        if self.method():
            check_is_whole(self.method().__self__.module)
        return lambda *args: None  # the copy is not the optimizer's module


# --------------------------------------------------------------------------------------------------
# 6. The library: norms, whole parameters, state dicts and pieces of checkpoints.


def clip_grad_norm_(optimizer, max_norm, counted, process_groups):
    """Scale the averaged gradients to a norm of at most `max_norm`. Return their norm.

    `process_groups` are those over which the model is split. If several of their ranks hold a copy
    of a parameter, counted(parameter) must be True on one.
    """
    buckets = optimizer._reduce_gradients()
    gradients = [
        bucket.grad[slot.in_part]
        for bucket in buckets
        for slot in bucket.slots
        if counted is None or counted(slot.parameter)
    ]
    norm = nn.utils.get_total_norm(gradients).to(optimizer._buckets[0].flat.device)
    total = norm.double() ** 2
    for group in (optimizer.process_group, *process_groups):
        dist.all_reduce(total, group=group)
    norm = total.sqrt() / optimizer._buckets[0].N  # until step(), gradients are sums over ranks
    if max_norm < torch.inf:  # otherwise an infinite norm would turn all gradients into NaN
        for bucket in buckets:
            bucket.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def unscale_(optimizer, loss_scale):
    """Divide the gradients by `loss_scale`. Return 1.0 if any is inf or NaN, else 0.0."""
    norm = optimizer.clip_grad_norm_(torch.inf)  # clips nothing
    for bucket in optimizer._buckets:
        if bucket.grad is not None:
            bucket.grad /= loss_scale
    return 1.0 - norm.isfinite().float()


def module_state_dict(optimizer):
    """Return the whole state_dict of the module. Load it in full_parameters()."""
    with optimizer.full_parameters():
        return copy.deepcopy(optimizer.module.state_dict())


@contextmanager
def full_parameters(optimizer):
    """A context with whole parameters. The caller may write to them, alike on all ranks.

    Clone what is used after it, because its memory is freed then.
    """
    before = optimizer._kept
    optimizer._kept = optimizer._buckets
    optimizer._unshard_only(optimizer._kept)
    try:
        yield
    finally:
        optimizer._kept = before
        adopt_user_writes(optimizer)
        optimizer._unshard_only(optimizer._kept)


# These optimizers update each element on its own. Their state has one number for each element, but
# those in PER_TENSOR for the whole parameter.
ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax"}
ELEMENTWISE |= {"NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"}
PER_TENSOR = {"step", "mu_product", "eta", "mu"}


def whole_state_dict(optimizer):
    """Return the plain optimizer's state_dict, in host memory. All ranks must call this.

    The state of a 16-bit parameter also has its "master".
    """
    group = optimizer.process_group
    whole = torch.optim.Optimizer.state_dict(optimizer)  # without state
    for number, parameter in enumerate(parameters_of(optimizer)):
        slot = optimizer._slots[parameter]
        state = dict(optimizer._optimizer.state[slot.segment])
        if slot.segment.dtype != parameter.dtype:
            state["master"] = slot.segment
        for name, value in state.items():
            state[name] = value.cpu().clone()
            # All ranks have the same entries: step() gives empty segments a gradient, too.
            if name not in PER_TENSOR:
                segments = [None] * dist.get_world_size(group)
                dist.all_gather_object(segments, state[name], group=group)
                state[name] = torch.cat(segments).as_strided(parameter.shape, slot.stride)
        if state:
            whole["state"][number] = state
    return whole


def load_whole_state_dict(optimizer, state_dict):
    """Load the plain optimizer's state_dict, or one of this class at any number of ranks."""
    groups = {**state_dict, "state": {}}
    torch.optim.Optimizer.load_state_dict(optimizer, groups)  # checks them, too
    states = {}  # of segments, by the number of the parameter
    for number, parameter in enumerate(parameters_of(optimizer)):
        slot = optimizer._slots[parameter]
        state = copy.deepcopy(state_dict["state"].get(number, {}))
        for name in state.keys() - PER_TENSOR:
            whole = state[name]
            strided = whole.new_empty_strided(whole.shape, slot.stride).copy_(whole)
            segment = strided.as_strided(slot.segment.shape, (1,), slot.offset)
            state[name] = segment.clone()
        if "master" in state:
            slot.segment.copy_(state.pop("master"))
        states[number] = state
    optimizer._optimizer.load_state_dict({**state_dict, "state": states})


def shards_of(optimizer):
    """Yield (parameter, offset, segment, state): this rank's elements, from element `offset` on.

    After loading into segments, sync_parameters() writes all ranks' into the parameters.
    """
    for parameter, slot in optimizer._slots.items():
        shape = tuple(parameter.shape)
        if not torch.empty_strided(shape, slot.stride, device="meta").is_contiguous():
            raise ValueError(
                f"a checkpoint would permute a parameter of shape {shape}, which is not "
                "contiguous; save state_dict() instead"
            )
        state = optimizer._optimizer.state[slot.segment]
        yield parameter, slot.offset, slot.segment, state


# --------------------------------------------------------------------------------------------------
# 7. Checks.


def check_arguments(optimizer, optimizer_class, lists, same):
    """Check the arguments, and that all ranks have the same model, buckets and options."""
    module = optimizer.module
    if any(type(child).__name__ == "DistributedDataParallel" for child in module.modules()):
        raise ValueError("DistributedDataParallel averages as well: give its module, ddp.module")
    if not ELEMENTWISE & {parent.__name__ for parent in optimizer_class.__mro__}:
        name = optimizer_class.__name__
        raise ValueError(f"{name} may need whole parameters; use one of {ELEMENTWISE}, or muon.py")
    if not set(parameters_of(optimizer)).issubset(same):
        raise ValueError(
            "params must be in the module, without those of which ranks of process_group hold "
            "different values, such as experts"
        )
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    described = [[len(each) for each in lists], *groups]
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        described.append((name, x.shape, x.stride(), x.dtype, x.requires_grad))
    mine = {f"{number}: {each}" for number, each in enumerate(described)}
    everyone = [None] * dist.get_world_size(optimizer.process_group)
    dist.all_gather_object(everyone, mine, group=optimizer.process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != mine:
            raise ValueError(
                "ranks must have the same parameters (shape, strides, dtype, requires_grad), "
                f"buckets and options; rank {rank} has {theirs - mine}"
            )


def same_parameters(module, process_group):
    """Return the parameters of which all ranks of the group hold the same values.

    Split modules list the global ranks that differ. Two of them must be in the group.
    """
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    different = set()
    for child in module.modules():
        ranks = getattr(child, "differ_between_ranks", ())
        if len(set(members).intersection(ranks)) > 1:
            different.update(child.parameters())
    return [parameter for parameter in module.parameters() if parameter not in different]


def check_step(optimizer):
    if getattr(optimizer, "_in_backward", False):
        raise RuntimeError("a backward has raised an error: end all ranks, and start them again")
    for bucket in optimizer._buckets:
        check_is_here(bucket)


def check_is_here(bucket):
    values = bucket.nan if bucket.freed else bucket.flat
    place = values.untyped_storage().data_ptr()
    if any(p.untyped_storage().data_ptr() != place for p in bucket.parameters):
        raise RuntimeError(
            "parameters are no longer where they were: make the optimizer after module.to()"
        )


def guard(module):
    """Let `module` refuse to be saved or loaded, or to compute with NaN, while it is freed."""
    for child in module.modules():
        child.register_state_dict_pre_hook(check_is_whole)
        child.register_load_state_dict_pre_hook(check_is_whole)

    @torch.compiler.disable
    def check_output(module, args, output):
        if not is_freed(module):
            return
        handle.remove()  # look at the first output only, because the host waits for the device
        if any(torch.is_tensor(leaf) and leaf.isnan().any() for leaf in tree_leaves(output)):
            raise RuntimeError(
                "the first output has NaN, as freed parameters have: call self.pos(positions) "
                "instead of reading self.pos.weight, or give `units` a module around both"
            )

    handle = module.register_forward_hook(check_output)


def is_freed(module):
    # A freed parameter is an expanded NaN, without strides.
    return any(p.dim() and not any(p.stride()) for p in module.parameters())


def check_is_whole(module, *_):
    if is_freed(module):
        raise RuntimeError(
            "these parameters are sharded: save the optimizer's module_state_dict(), and load, "
            "copy or initialize them in `with optimizer.full_parameters():`"
        )


# --------------------------------------------------------------------------------------------------
# Demo.


STAGES = ((Zero1, 2), (Zero2, 2), (Zero3, 3))


def main():
    demo = Demo("Train with Zero1, then with Zero2, then with Zero3.")
    train_stage = train_idea if demo.args.idea else train_class
    status = 0
    for stage, passes in STAGES:
        status |= train_stage(demo, stage, passes)
        demo.show()
    return status


def train_class(demo, stage, passes):
    """Train with Zero1, Zero2 or Zero3, which sends `passes` times Ψ(N-1)/N elements in a step."""
    model = demo.start(stage.__name__, bitwise=True)
    optimizer = stage(model, torch.optim.AdamW, bucket_cap_mb=2, lr=1e-3)
    held_now = None
    gradients = []  # of this rank's parts, which step() averages and drops

    def step(inputs, targets):
        nonlocal held_now
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        held_now = held_by(optimizer)  # Zero1's gradients are still whole
        gradients[:] = [bucket.grad for bucket in optimizer._reduce_gradients()]
        optimizer.step()
        return loss

    demo.train(step, lambda: whole(optimizer, gradients))
    return demo.report(held_now, *cost(demo, passes))


def train_idea(demo, stage, passes):
    """Train with section 1. Shards are in addition to the parameters, except in ZeRO-3."""
    model = demo.start(stage.__name__, bitwise=True)
    if stage is Zero3:
        model = nn.Sequential(*[Zero3Unit(layer) for layer in model])
        sharded = [each for unit in model for each in unit.sharded]
    else:
        sharded = [ShardedParameter(parameter) for parameter in model.parameters()]
    if stage is Zero2:
        zero2_hooks(sharded)
    parameters = [each.parameter for each in sharded]
    shards = [each.shard for each in sharded]
    optimizer = torch.optim.AdamW(shards, lr=1e-3)
    held_now = None

    def train_step(inputs, targets):
        nonlocal held_now
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        held_now = held([*parameters, *shards], optimizer)
        if stage is Zero3:
            optimizer.step()
        else:
            step(sharded, optimizer)
        return loss

    def whole():
        gradients = [gathered(each, each.shard.grad) for each in sharded]
        return gradients, [gathered(each, each.shard) for each in sharded]

    demo.train(train_step, whole)
    return demo.report(held_now, *cost(demo, passes))


def gathered(sharded, shard):
    """Return the whole tensor that the ranks have shards of."""
    flat = shard.new_empty(sharded.N * shard.numel())
    all_gather_single(flat, shard)
    return flat[: sharded.parameter.numel()].view(sharded.parameter.shape)


def cost(demo, passes):
    sent = passes * held_bytes(demo.model.parameters()) * (demo.ranks - 1) / demo.ranks
    return f"{passes}Ψ(N-1)/N", sent


def whole(optimizer, parts):
    gradients = {}
    for bucket, part in zip(optimizer._buckets, parts, strict=True):
        flat = part.new_empty(bucket.flat.numel())
        all_gather_single(flat, part)
        for slot in bucket.slots:
            gradients[slot.parameter] = slot.view(flat)
    parameters = list(optimizer.module.parameters())
    with getattr(optimizer, "full_parameters", nullcontext)():
        copies = [parameter.clone() for parameter in parameters]
    return [gradients[parameter] for parameter in parameters], copies


def held_by(optimizer):
    """This rank's bytes of parameters, gradients, and optimizer state with master weights."""
    parameters = []
    gradients = []
    state = tree_leaves(list(optimizer._optimizer.state.values()))
    for bucket in optimizer._buckets:
        parameters.append(bucket.flat)
        gradients += [bucket.grad, *(parameter.grad for parameter in bucket.parameters)]
        is_parameter = bucket.master.dtype == bucket.flat.dtype
        (parameters if is_parameter else state).append(bucket.master)
    kinds = (parameters, gradients, state)
    return tuple(held_bytes(filter(torch.is_tensor, tensors)) for tensors in kinds)


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

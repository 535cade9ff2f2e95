"""ZeRO: data parallelism with optimizer state, gradients and parameters split over the ranks.

DDP keeps everything on each of N ranks. But an elementwise optimizer, such as Adam, updates each
element from its own gradient and state. So each rank updates 1/N of them, and keeps their state.

            backward →  reduce-scatter gradients →   update own shard →  all-gather parameters
    rank 0   g₀ ━━━━┯━━━━ ╲╱ ━━━━ mean of the left halves  ── AdamW ━━━━ ╲╱ ━━━━┯━━━━ p
    rank 1   g₁ ━━━━┷━━━━ ╱╲ ━━━━ mean of the right halves ── AdamW ━━━━ ╱╲ ━━━━┷━━━━ p

    Zero1 shards the optimizer state. step() reduces the gradients, updates, and gathers.
    Zero2 also shards the gradients. Backward reduces a bucket of gradients as soon as it is full.
    Zero3 also shards the parameters. It gathers a unit, such as a transformer block, before its
          forward and its backward, and frees it afterwards.

Read section 1 for the idea (14 minutes), to section 4 for the technique (61), and the rest to use
it as a library (99).

What a rank holds, and sends in a step of m backwards. There are Ψ parameters of 16 bits, with Adam
and fp32 master weights. Sharded gradients are in fp32. Zero3 keeps no 16-bit shard: it rounds the
masters when it gathers. A bucket of gradients is held twice while it is reduced. step() and
clip_grad_norm_() also all-reduce a byte per parameter tensor:

           held, in bytes:                   sent, in elements, times (N-1)/N:
           parameters  gradients  optimizer  plain    with no_sync()
    DDP    2Ψ          2Ψ         12Ψ        2mΨ      2Ψ
    Zero1  2Ψ          2Ψ         12Ψ/N      2Ψ       2Ψ
    Zero2  2Ψ          4Ψ/N       12Ψ/N      (m+1)Ψ   2Ψ
    Zero3  0           4Ψ/N       12Ψ/N      3mΨ      (2m+1)Ψ

Gradients are added in rank order and divided by N. So training without clipping is bitwise equal to
one device that adds the ranks' gradients in the same order. For two backwards a and b in a step on
two ranks, Zero2 and Zero3 add ((a₀ + a₁) + b₀) + b₁. Zero1, and each class in no_sync(), adds
(a₀ + b₀) + (a₁ + b₁).

Run:      torchrun --nproc-per-node 2 zero.py          (python zero.py runs as one rank)
          torchrun --nproc-per-node 2 zero.py --idea   trains with section 1
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §3, §5, §7; Ren et al. 2021,
          ZeRO-Offload, arXiv 2101.06840
Mirrors:  DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer; DeepSpeed
Left out: optimizers that need whole matrices (muon.py); Adafactor; groups added later; several
          devices per rank; the meta device and optimizers over shards (fsdp.py); NCCL's
          reduce-scatter, which adds in another order; nn.Embedding(max_norm=…); a backward under
          another CUDA stream than its forward; training after an error. In Zero3: overlap of
          gathers (fsdp.py), and outputs that are the input changed in place, or a view of a
          parameter
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import collections
import copy
import copyreg
import functools
import itertools
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Imported before init_process_group(): its functions have `group=group.WORLD` as a default, and
# would keep the group alive.
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
        padding = -flat.numel() % self.N
        return F.pad(flat, (0, padding)).view(self.N, -1)

    def reduce_scatter(self, _=None):  # hooks get an argument
        """Give each rank its row of the gradients' mean over ranks, in shard.grad."""
        gradients = self.rows(self.parameter.grad)
        received = torch.empty_like(gradients)  # row r is from rank r
        dist.all_to_all_single(received, gradients, group=self.process_group)
        mean = sum(received) / self.N  # in rank order, unlike a reduce-scatter
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.parameter.grad = None

    def all_gather(self):
        """Fill the parameter with the shards of all ranks."""
        flat = self.shard.new_empty(self.N * self.shard.numel())
        all_gather_single(flat, self.shard, group=self.process_group)
        values = flat[: self.parameter.numel()]
        # By .data: in backward, autograd must not see that ZeRO-3 changes what it saved.
        self.parameter.data.copy_(values.view_as(self.parameter))


def step(sharded, optimizer):
    """A step of ZeRO-1 or ZeRO-2: reduce, update, gather. `optimizer` has the shards.

    All ranks must use the same parameters. Call optimizer.zero_grad() after the step.
    """
    for each in sharded:
        if each.parameter.grad is not None:  # None in ZeRO-2: backward has reduced it
            each.reduce_scatter()
    optimizer.step()
    for each in sharded:
        each.all_gather()


def zero2_hooks(sharded):
    """Let backward reduce each gradient when it is complete."""
    for each in sharded:
        each.parameter.register_post_accumulate_grad_hook(each.reduce_scatter)


def free(parameter):
    """Free the storage. Tensors that autograd saved for backward share it."""
    parameter.untyped_storage().resize_(0)


class Zero3Unit(nn.Module):
    """Runs `module`, whose parameters have memory only while its forward or backward runs.

    Call optimizer.step() and optimizer.zero_grad(). The next forward gathers the new shards.
    """

    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        self.sharded = [ShardedParameter(p, process_group) for p in module.parameters()]
        zero2_hooks(self.sharded)
        for each in self.sharded:
            free(each.parameter)
            # This hook runs after reduce_scatter(). Backward leaves an unused parameter whole; the
            # end of the next forward frees it.
            each.parameter.register_post_accumulate_grad_hook(free)

    def gather(self, _=None):
        for each in self.sharded:
            each.parameter.untyped_storage().resize_(each.parameter.nbytes)  # allocates it
            each.all_gather()

    def forward(self, x):
        self.gather()
        y = self.module(x)
        if y.requires_grad:
            y.register_hook(self.gather)  # the unit's backward begins with the gradient of y
        for each in self.sharded:
            free(each.parameter)
        return y


# --------------------------------------------------------------------------------------------------
# 2. ZeRO-1: the optimizer holds this rank's shard of the parameters, in buckets.
#
# One collective for each parameter would be slow. So parameters of one dtype lie in a flat tensor,
# a bucket, which is cut into N equal shards. This is a bucket of weight = ■■■ and bias = □:
#
#             rank 0            rank 1
#     flat    ■■■□              ■■■□                the parameters are views of it
#     shard   ■■                ■□                  this rank's part, a view of flat
#     master  ■■                ■□                  the shard, or its copy in fp32: is updated
#     slots   weight ■■         weight ■, bias □    parameters' parts of master: slot.master
#     grad    ■■                ■□                  gradients, added over the ranks
#
# The picture leaves out padding.


def flatten_and_move(parameters, N):
    """Move the parameters into one flat tensor, which N divides. They become views of it.

    Each begins at a multiple of 64 bytes and keeps the strides of the plain model. Otherwise
    kernels are slower, or round differently. Shards have multiples of 16 bytes, for NCCL's speed.
    """
    first = parameters[0]
    numels = [round_up(parameter.numel(), 64 // first.itemsize) for parameter in parameters]
    total = max(1, sum(numels))  # no shard is empty, even if all parameters are
    flat = first.new_zeros(round_up(total, N * 16 // first.itemsize))
    start = 0
    for parameter, numel in zip(parameters, numels, strict=True):
        stride = torch.empty_like(parameter, device="meta").stride()  # of a dense copy
        view = flat.as_strided(parameter.shape, stride, start)
        parameter.data = view.copy_(parameter.data)
        start += numel
    return flat


def round_up(number, multiple):
    return -(-number // multiple) * multiple


class Slot:
    """The place of one parameter in its bucket. Comments have rank 1's numbers in the picture."""

    def __init__(self, parameter, bucket):
        self.parameter = parameter
        self.bucket = bucket
        self.stride = parameter.stride()
        self.start = parameter.storage_offset()  # in `flat`: weight 0, bias 3
        first = self.start - bucket.shard.storage_offset()  # in the shard: weight -2, bias 1
        end = first + parameter.numel()
        # weight 0 to 1, bias 1 to 2. Indexing stops at the shard's end, if `end` is beyond it.
        self.in_shard = slice(max(0, first), max(0, end))
        self.master = bucket.master[self.in_shard]  # this rank's elements, if any: ■ and □
        self.is_reduced = False  # whether a rank's gradient of it is, or will be, in bucket.grad

    def view(self, flat):
        """Return the parameter's elements of a tensor such as `flat`, in its shape."""
        return flat.as_strided(self.parameter.shape, self.stride, self.start)


class Bucket:
    """Parameters in a flat tensor. The picture above has its attributes."""

    def __init__(self, parameters, process_group, offload):
        self.parameters = parameters
        self.process_group = process_group
        self.N = dist.get_world_size(process_group)
        self.flat = flatten_and_move(parameters, self.N)
        self.shard = self.flat.chunk(self.N)[dist.get_rank(process_group)]
        self.master = self.make_master(offload)
        self.slots = [Slot(parameter, self) for parameter in parameters]
        self.grad = None  # the sum over ranks, until step() divides it by N
        self.on_the_way = None  # (handle, received) of the all-to-all that runs

    def make_master(self, offload):  # Zero3's buckets do more
        return master_of(self.shard, offload)  # a copy if the shard has 16 bits, or for the CPU

    def send_gradients(self):
        """Move the gradients out of .grad, and begin to send part r of them to rank r."""
        # No slot reads the padding, so it may be garbage. Zeros would take 3% of a step.
        gradients = torch.empty_like(self.flat)
        for slot in self.slots:
            view = slot.view(gradients)
            if slot.parameter.grad is None:
                view.zero_()
            else:
                view.copy_(slot.parameter.grad.to_dense())  # nn.Embedding(sparse=True)
                slot.parameter.grad = None
                slot.is_reduced = True
        received = torch.empty_like(gradients)  # part r is rank r's gradient of this rank's shard
        handle = dist.all_to_all_single(
            received, gradients, group=self.process_group, async_op=True
        )
        self.on_the_way = handle, received

    def add_received(self):
        """Add the gradients of all ranks to `grad`, in rank order."""
        handle, received = self.on_the_way
        self.on_the_way = None
        handle.wait()
        for part in received.chunk(self.N):  # torch.sum() adds more than 4 in another order
            if self.grad is None:
                self.grad = part.to(self.master.dtype)  # a sum in fp16 would overflow at 65504
            else:
                # Not +=: if to() has copied nothing, `grad` is a view of `received`, which it
                # would keep alive.
                self.grad = self.grad + part

    def all_gather(self):
        """Fill `flat` with the masters of all ranks."""
        self.shard.copy_(self.master)
        all_gather_single(self.flat, self.shard, group=self.process_group)


class Zero1(torch.optim.Optimizer):
    """Averages gradients over `process_group` and updates the parameters, each rank 1/N of them.

    module            has the parameters. Move it to its device first. Rank 0's parameters and
                      buffers are copied to all ranks. Later, buffers are not synchronized.
    optimizer_class   makes an elementwise optimizer, with **optimizer_kwargs
    process_group     the ranks; None: all
    offload           "cpu": masters and optimizer state are in host memory, and updated there
    bucket_cap_mb     a bucket is full at this size
    params            the parameters, or parameter groups, to train; None: all of the module

    Drop or clip gradients with this class: module.zero_grad() and torch's clip_grad_norm_() see
    only a rank's own. `param_groups` and `state` are those of the plain optimizer, but tensors in
    `state` are shards.
    """

    bucket_class = Bucket

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
        # The instance has the defaults, and the class if optimizer_class is a functools.partial.
        dummy = optimizer_class([torch.zeros(1)], **optimizer_kwargs)
        super().__init__(module.parameters() if params is None else params, dummy.defaults)
        self.module = module
        self.process_group = process_group
        # The parameters of each bucket. The last ones come first, as in backward.
        lists = self._bucket_lists(bucket_cap_mb * 2**20)
        check_arguments(self, type(dummy), lists)
        self._broadcast()  # rank 0's parameters and buffers
        self._buckets = [self.bucket_class(each, process_group, offload) for each in lists]
        self._slots = {slot.parameter: slot for bucket in self._buckets for slot in bucket.slots}
        # The plain optimizer. Its parameters are the slots' masters.
        self._inner = self._over_shards(optimizer_class, optimizer_kwargs)

    def step(self, closure=None):
        """Reduce the gradients, update this rank's shards, and gather the parameters."""
        loss = closure and closure()
        check_step(self)  # no backward has failed, and no parameter was moved
        self._pass_on()  # to _inner: what the user changed in parameters, options and state
        self._reduce_gradients()
        buckets = self._with_gradients()
        for bucket in buckets:
            bucket.grad /= bucket.N  # once, as on one device
            bucket.grad = bucket.grad.to(bucket.master.device)  # the CPU, if offloaded
            for slot in bucket.slots:
                if slot.is_reduced:
                    slot.master.grad = bucket.grad[slot.in_shard]  # of this rank's elements
        self._inner.step()
        self._inner.zero_grad()
        self.zero_grad()
        for bucket in buckets:
            bucket.all_gather()
        return loss

    def _reduce_gradients(self):
        """Reduce what is in .grad on any rank.

        Ranks may use different parameters, but must issue the same collectives, and update the same
        shards: optimizers skip a parameter without a gradient, but not one with zeros. So the ranks
        tell each other what they have.
        """
        slots = list(self._slots.values())
        # 0: this rank has no gradient. 1: it is reduced. 2: it is in .grad.
        here = [2 if slot.parameter.grad is not None else int(slot.is_reduced) for slot in slots]
        highest = self._buckets[0].flat.new_tensor(here, dtype=torch.uint8)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.process_group)
        to_reduce = []
        for slot, flag in zip(slots, highest.tolist(), strict=True):  # the host waits here
            slot.is_reduced = flag > 0  # also if only another rank has a gradient
            if flag == 2 and slot.bucket not in to_reduce:
                to_reduce.append(slot.bucket)
        for bucket in to_reduce:
            self._start_reduce(bucket)
        self._finish_reduce()

    def _start_reduce(self, bucket):
        self._finish_reduce()  # of the bucket before, so that only one is held twice
        bucket.send_gradients()

    def _finish_reduce(self):
        for bucket in self._buckets:
            if bucket.on_the_way:
                bucket.add_received()

    def _with_gradients(self):
        return [bucket for bucket in self._buckets if bucket.grad is not None]

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, in .grad and reduced. `set_to_none` is ignored: .grad is None."""
        super().zero_grad()
        for bucket in self._buckets:
            bucket.grad = None
            for slot in bucket.slots:
                slot.is_reduced = False

    # The library. Section 5 has what these methods call; go on with section 3.

    def _bucket_lists(self, cap_bytes):
        return bucket_lists(self, cap_bytes)

    def _broadcast(self):
        broadcast_from_rank_0(self)

    def _over_shards(self, optimizer_class, options):
        return inner_optimizer(self, optimizer_class, options)

    def _pass_on(self):
        pass_on(self)

    def no_sync(self):
        """A context for all backwards of a step but the last. Gradients stay whole, in .grad."""
        return nullcontext()  # in Zero1, backward never reduces

    def clip_grad_norm_(self, max_norm, norm_type=2.0, *, counted=None, process_groups=()):
        return clip_grad_norm_(self, max_norm, norm_type, counted, process_groups)

    def unscale_(self, loss_scale):
        return unscale_(self, loss_scale)

    def add_param_group(self, param_group):
        add_param_group(self, param_group)

    def state_dict(self):
        return whole_state_dict(self)

    def load_state_dict(self, state_dict):
        load_whole_state_dict(self, state_dict)

    def __getstate__(self):
        check_is_copied(self)

    def shards(self):
        return shards_of(self)

    def sync_parameters(self):
        for bucket in self._buckets:
            bucket.all_gather()


# --------------------------------------------------------------------------------------------------
# 3. ZeRO-2: backward reduces gradients, so that few are whole at a time.
#
# From section 2: self._start_reduce(bucket) begins to move the bucket's gradients from .grad to the
# shards. self._finish_reduce() waits for it. If backward calls them, step() finds .grad empty.


class Zero2(Zero1):
    """Zero1 with sharded gradients. Backward reduces a bucket when it is full, and goes on.

    Hooks call these methods, in order of time:

        _pre_backward            backward has reached an output of the module
        _post_accumulate_grad    a gradient is in .grad: its bucket is reduced, if that is full
        _post_backward           backward has ended: the other buckets are reduced

    On every rank, each backward must begin at an output of the module, or reach a parameter.
    Otherwise ranks wait for each other.
    """

    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        self._sync = True  # False in no_sync()
        self._in_backward = False
        self._to_reduce = []  # the buckets that the running backward has yet to reduce
        self._arrived = set()  # parameters whose gradients this backward has computed
        self._register_hooks()

    def _pre_backward(self, module):  # only Zero3 needs to know the module
        self._begin_backward()

    def _begin_backward(self):
        if self._in_backward:
            return
        self._in_backward = True
        self._to_reduce = list(filter(self._reduces, self._buckets))
        # The callback runs when the innermost backward ends. Inside a reentrant checkpoint, that
        # is a backward of its own, which ends too early. Hooks of parameters may run there. So
        # hooks of the module's outputs call this before them.
        torch.autograd.Variable._execution_engine.queue_callback(self._post_backward)

    def _reduces(self, bucket):
        # All parameters of a bucket have the same requires_grad: see bucket_lists().
        return self._sync and bucket.parameters[0].requires_grad

    def _post_accumulate_grad(self, parameter, *_):
        self._begin_backward()  # if backward has reached no output of the module
        self._arrived.add(parameter)
        # Ranks may fill buckets in different orders, but must send them in one order.
        while self._to_reduce and self._arrived.issuperset(self._to_reduce[0].parameters):
            self._start_reduce(self._to_reduce.pop(0))

    def _post_backward(self):
        for bucket in self._to_reduce:  # not full, but every rank must send every bucket
            self._start_reduce(bucket)
        self._finish_reduce()
        self._to_reduce = []
        self._arrived.clear()
        self._in_backward = False

    # The library: see section 5.

    def _register_hooks(self):
        register_hooks(self, [self.module])

    def no_sync(self):
        return no_sync(self)


# --------------------------------------------------------------------------------------------------
# 4. ZeRO-3: parameters have memory only when they are needed.
#
# From section 2: the parameters of a bucket are views of bucket.flat. bucket.all_gather() fills it
# from the masters, which the optimizer updates. Here these are copies, which stay if flat is freed.
#
# From section 3: _begin_backward() fills _to_reduce, the list of the buckets that the running
# backward has yet to reduce. _reduces(bucket) is False if the bucket is frozen, and in no_sync().


class FreeableBucket(Bucket):
    """A bucket whose `flat` has memory only between unfree() and free()."""

    is_freed = False

    def make_master(self, offload):
        return master_of(self.shard.clone(), offload)  # free() frees the shard

    def free(self):
        """Free the memory of `flat`, but keep the storage object.

        Tensors that autograd saved for backward share it, and unfree() fills it again.
        """
        self.is_freed = True
        self.refuse_use()
        self.flat.untyped_storage().resize_(0)

    def unfree(self):
        """Allocate and gather `flat`, if it is freed."""
        if self.is_freed:
            check_is_here(self)  # no parameter was moved
            self.is_freed = False
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self.allow_use()
            self.all_gather()

    def all_gather(self):
        if not self.is_freed:  # if it is, unfree() in the next forward gathers
            super().all_gather()

    # The library: from refuse_use() to allow_use(), parameters are NaN, and an error if used.

    def refuse_use(self):
        refuse_use(self)

    def allow_use(self):
        allow_use(self)


class Zero3(Zero2):
    """Zero2 with sharded parameters, which are whole only while a unit that needs them runs.

    `units` are modules inside of `module`; by default, the members of nn.Sequential and
    nn.ModuleList, such as transformer blocks. The whole module is a unit, too: of the parameters
    that are in no other. A bucket has parameters of one unit. Every module has hooks. It needs the
    buckets of all units that it is in. With the units 0, 1 and 2, and a parameter of the model
    itself, they do this in a step:

        called                  frees            gathers         reduces
        _pre_forward(model)                      the model's
        _pre_forward(0)                          0
        _pre_forward(1)         0                1
        _pre_forward(2)         1                2
        _post_forward()         2, the model's
        _pre_backward(2)                         the model's, 2
        _pre_backward(model)    (nothing, because it has the same output as 2, which comes first)
        _pre_backward(1)        2                1               2
        _pre_backward(0)        1                0               1
        _post_backward()        0, the model's                   0, the model's

    _unshard() frees and gathers. _reach() reduces the unit that backward has reached before.

    All ranks must run the same units in the same order, and their backwards must reach the same.
    find_units() says how a unit may skip its layers. A freed parameter refuses to be used. So call
    a unit instead of reading its weights. Initialize, load, copy or read parameters, and compute
    gradients of gradients, in full_parameters().
    """

    bucket_class = FreeableBucket

    def __init__(self, module, *args, units=None, **kwargs):
        # {parameter: the modules in its unit}, so that _bucket_lists() can keep units apart
        self._unit_of = self._find_units(module, units)
        super().__init__(module, *args, **kwargs)
        self._needs = self._find_needs()  # {module: the buckets of its unit and of those around it}
        self._reached = []  # what the unit needs where backward is now
        self._is_full = False  # True in full_parameters(): nothing is freed
        self._free_all_but([])

    def _pre_forward(self, module, *_):
        self._unshard(self._needs[module])

    def _post_forward(self, *_):
        # In backward, a checkpoint runs the forward again, and then needs the parameters.
        if not self._in_backward:
            self._free_all_but([])

    def _pre_backward(self, module):
        self._begin_backward()
        self._reach(self._needs[module])
        self._unshard(self._needs[module])

    def _unshard(self, needed):
        """Gather the buckets. Free all others: forward and backward are done with them."""
        # Inside a unit that runs, everything is gathered already.
        if any(bucket.is_freed for bucket in needed):
            self._free_all_but(needed)
            for bucket in needed:
                bucket.unfree()

    def _free_all_but(self, needed):
        for bucket in self._buckets:
            if not (self._is_full or bucket.is_freed or bucket in needed):
                bucket.free()

    def _reach(self, needed):
        """If backward has come from one unit to another, reduce the gradients of the first.

        In the table, _pre_backward(1) changes _reached from [model's, 2] to [model's, 1]: 2 is
        reduced. Do not wait for gradients instead: a rank may use none of the unit's parameters.
        And do not go by what is freed: a checkpoint's forward also frees other units.
        """
        if set(needed).issubset(self._reached):  # a module inside the unit, or around it
            return
        for bucket in self._reached:
            if bucket in self._to_reduce and bucket not in needed:
                self._to_reduce.remove(bucket)
                self._start_reduce(bucket)
        # A unit that ran twice in forward is reached twice. Its gradients come with the second
        # time, and the first time has sent zeros. So reduce it again.
        again = [b for b in needed if self._reduces(b) and b not in self._to_reduce]
        self._to_reduce += again
        self._reached = needed

    def _post_accumulate_grad(self, parameter, *_):
        # Unlike Zero2, do not reduce a full bucket. On one rank that might be before the next
        # gather, and on another after it. _reach() has one order on all ranks.
        self._begin_backward()
        check_gradient(self._slots[parameter])  # backward has read no freed parameter

    def _post_backward(self):
        super()._post_backward()  # reduces the last unit, and those that were not reached
        self._reached = []
        self._free_all_but([])

    # The library: see section 5.

    def _find_units(self, module, units):
        return find_units(module, units)

    def _find_needs(self):
        return find_needs(self)

    def _register_hooks(self):
        register_unit_hooks(self)

    def full_parameters(self):
        return full_parameters(self)

    def module_state_dict(self):
        return module_state_dict(self)


# --------------------------------------------------------------------------------------------------
# 5. The library: start, masters, hooks, norms, whole parameters, state dicts, checkpoints.


def bucket_lists(optimizer, cap_bytes):
    """Return lists of parameters, each of one kind, which become buckets."""
    trained = set(parameters_of(optimizer))
    unit_of = getattr(optimizer, "_unit_of", {})  # Zero3's
    lists = []
    filling = {}  # {kind: its list that has less than `cap_bytes`}
    for parameter in reversed([p for p in optimizer.module.parameters() if p in trained]):
        kind = (parameter.dtype, parameter.requires_grad, unit_of.get(parameter))
        together = filling.setdefault(kind, [])
        together.append(parameter)
        if sum(p.nbytes for p in together) >= cap_bytes:
            lists.append(filling.pop(kind))
    return [*lists, *filling.values()]


def parameters_of(optimizer):
    """Return the parameters of all groups, in the order of state dicts."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def broadcast_from_rank_0(optimizer):
    """Give all ranks rank 0's parameters and buffers."""
    group = optimizer.process_group
    for each in [*same_parameters(optimizer), *optimizer.module.buffers()]:
        # One element stands for all of an expanded dimension.
        ones = tuple(slice(None if stride else 1) for stride in each.stride())
        tensor = each.detach()[ones]
        values = tensor.new_empty(tensor.shape).copy_(tensor)  # dense, and not conjugated
        # As bytes, because gloo has no int16, and in torch 2.6 no complex numbers.
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
        tensor.copy_(values)


def same_parameters(optimizer):
    """Return the parameters of which all ranks of the group hold the same values.

    A module that is split over ranks, such as experts, lists those whose values differ. It matters
    if two of them are in the group.
    """
    members = dist.get_process_group_ranks(optimizer.process_group or dist.group.WORLD)
    different = set()
    for child in optimizer.module.modules():
        ranks = getattr(child, "differ_between_ranks", ())
        if len(set(members).intersection(ranks)) > 1:
            different.update(child.parameters())
    return [parameter for parameter in optimizer.module.parameters() if parameter not in different]


def master_of(shard, offload):
    """Return the shard itself, or a copy: in fp32 if it has 16 bits, and on another device."""
    dtype = torch.float32 if shard.itemsize == 2 else shard.dtype
    master = shard.to(offload or shard.device, dtype)
    if offload and shard.is_cuda:
        master = master.pin_memory()  # copies are faster
    return master


def inner_optimizer(optimizer, optimizer_class, options):
    """Return an optimizer_class that has the shards for parameters."""
    inner = optimizer_class(shard_groups(optimizer), **options)
    take_state(optimizer, inner)  # Adagrad's begins with some
    return inner


def shard_groups(optimizer):
    groups = []
    for group in optimizer.param_groups:
        shards = [optimizer._slots[parameter].master for parameter in group["params"]]
        groups.append({**group, "params": shards})
    return groups


def take_state(optimizer, inner):
    for parameter, slot in optimizer._slots.items():
        optimizer.state[parameter] = inner.state[slot.master]


def pass_on(optimizer):
    """Give the inner optimizer the user's values, the options, and the state.

    This is done in each step, because schedulers change options, and users reset state. The dicts
    of state are the same in both optimizers. Those of options are copies.
    """
    adopt_user_writes(optimizer)
    state = {slot.master: optimizer.state[p] for p, slot in optimizer._slots.items()}
    optimizer._inner.param_groups = shard_groups(optimizer)
    optimizer._inner.state = state


def add_param_group(optimizer, param_group):
    if hasattr(optimizer, "_buckets"):
        raise ValueError("the buckets are made: give all parameter groups to the constructor")
    torch.optim.Optimizer.add_param_group(optimizer, param_group)


def adopt_user_writes(optimizer):
    """Copy to the masters what the user wrote into the parameters since the last step.

    An element was written if it differs from its master, rounded to the parameters' dtype. Versions
    of tensors would take less time, but do not count writes to .data.
    """
    for bucket in optimizer._buckets:
        if bucket.master is not bucket.shard and memory_of(bucket) is bucket.flat:
            values = bucket.shard.to(bucket.master.device)
            unchanged = bucket.master.to(values.dtype) == values
            torch.where(unchanged, bucket.master, values, out=bucket.master)


def memory_of(bucket):
    """Return what the parameters are views of."""
    return bucket.nan if getattr(bucket, "is_freed", False) else bucket.flat


@contextmanager
def no_sync(optimizer):
    before = optimizer._sync
    optimizer._sync = False
    try:
        yield
    finally:
        optimizer._sync = before


class WeakHook:
    """Calls function(optimizer, …), but does not keep the optimizer alive, as a hook would."""

    def __init__(self, optimizer=None, function=None):
        self.optimizer = optimizer and weakref.ref(optimizer)
        self.function = function

    @torch.compiler.disable
    def __call__(self, *args):
        optimizer = self.optimizer and self.optimizer()
        if optimizer:
            self.function(optimizer, *args)

    def __reduce__(self):  # copy.deepcopy(model) and torch.save(model) call this
        return WeakHook, ()  # it has no optimizer: the copy is not the optimizer's module


def register_hooks(optimizer, modules):
    """Let backward call Zero2's methods. `modules` are those whose outputs call _pre_backward()."""
    optimizer._nodes = []  # autograd's, which add to .grad. If a node dies, its hooks die, too.
    arrived = WeakHook(optimizer, type(optimizer)._post_accumulate_grad)
    for parameter in [p for p in optimizer._slots if p.requires_grad]:
        # A hook on the node runs after all hooks on the parameter, such as the user's.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(functools.partial(arrived, parameter))
        optimizer._nodes.append(node)
    for module in modules:
        module.register_forward_hook(WeakHook(optimizer, hook_outputs), with_kwargs=True)


def register_unit_hooks(optimizer):
    """Let all modules call Zero3's methods, because one inside a unit may run alone."""
    modules = list(optimizer.module.modules())
    register_hooks(optimizer, modules)
    for module in modules:
        module.register_forward_pre_hook(WeakHook(optimizer, Zero3._pre_forward), prepend=True)
        module.register_load_state_dict_pre_hook(check_is_whole)
        module.register_forward_hook(check_output)
    optimizer.module.register_forward_hook(WeakHook(optimizer, Zero3._post_forward))


def hook_outputs(optimizer, module, args, kwargs, output):
    """Let backward call _pre_backward(module) when it reaches a tensor in the module's output.

    If an output is also an input, the module that made it has hooked it.
    """
    inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}

    def call(gradient):
        check_create_graph(optimizer)
        optimizer._pre_backward(module)

    for tensor in tensors_in(output):
        if id(tensor) not in inputs:
            tensor.register_hook(call)


def tensors_in(output):
    """Yield the tensors that have a graph, also those in containers and other objects."""
    waiting = [output]
    seen = set()  # ids, because objects may refer to each other
    for each in waiting:  # it grows
        if id(each) in seen or isinstance(each, (type, nn.Module)):
            continue
        seen.add(id(each))
        if torch.is_tensor(each):
            if each.grad_fn:
                yield each
            continue
        if isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple, set, collections.deque)):
            waiting.extend(each)
        # A container may have attributes, too. Those of a class with __slots__ are not in __dict__.
        waiting.extend(getattr(each, "__dict__", {}).values())
        slots = copyreg._slotnames(type(each))
        waiting.extend(getattr(each, name, None) for name in slots)


def clip_grad_norm_(optimizer, max_norm, norm_type, counted, process_groups):
    """Scale the averaged gradients to a norm of at most `max_norm`. Return their norm.

    A norm of 8 bytes is gathered from each rank, in every group.

    `norm_type` is 2 or another positive number, or inf. `process_groups` are those over which the
    model is split. If several of their ranks hold a copy of a parameter, counted(parameter) must be
    True on one.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: give a positive number or inf")
    optimizer._reduce_gradients()
    gradients = [
        slot.bucket.grad[slot.in_shard]
        for slot in optimizer._slots.values()
        if slot.is_reduced and slot.master.numel()
        if counted is None or counted(slot.parameter)
    ]
    norm = nn.utils.get_total_norm(gradients, norm_type)
    norm = norm.to(optimizer._buckets[0].flat.device, torch.float64)
    for group in (optimizer.process_group, *process_groups):
        norms = norm.new_empty(dist.get_world_size(group))
        all_gather_single(norms, norm.view(1), group=group)
        norm = torch.linalg.vector_norm(norms, norm_type)
    norm /= optimizer._buckets[0].N  # until step(), gradients are sums over ranks
    if max_norm < torch.inf:  # otherwise an infinite norm would turn all gradients into NaN
        for bucket in optimizer._with_gradients():
            bucket.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def unscale_(optimizer, loss_scale):
    """Divide the gradients by `loss_scale`. Return 1.0 if their norm is inf or NaN, else 0.0.

    The norm is that before the division, over all ranks. It is inf, too, if its squares overflow.
    """
    norm = optimizer.clip_grad_norm_(torch.inf)  # clips nothing
    for bucket in optimizer._with_gradients():
        bucket.grad /= loss_scale
    return 1.0 - norm.isfinite().float()


def find_units(module, units):
    """Return {parameter: its unit}, the smallest that contains every module that holds it.

    A unit is the set of the modules in it. All ranks must run the same units in the same order, and
    their backwards must reach the same. So

    - a unit that skips its layers on one rank returns x * 1, not x, and x must need a gradient:
      backward reaches a unit by an output that is not an input.
    - in a checkpoint without reentry, the last unit and what follows it save tensors on all ranks
      or on none: backward runs the checkpoint again when it needs the first of them.
    - if ranks use different experts, the block around the experts is the unit.

    If several units share a layer with parameters, its call gathers all of them. If a unit runs
    twice in a backward after no_sync(), its gradients are added as without no_sync().
    """
    if units is None:
        lists = [m for m in module.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
        units = itertools.chain(*lists)
    units = {module, *units}
    if not units.issubset(module.modules()):
        raise ValueError("units has modules that are not inside the module")
    insides = [frozenset(child.modules()) for child in module.modules() if child in units]
    insides.sort(key=len)
    users = collections.defaultdict(set)  # {parameter: the modules that hold it}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            users[parameter].add(child)
    return {p: next(each for each in insides if each >= used) for p, used in users.items()}


def find_needs(optimizer):
    """Return {module: the buckets of all units that it is in}.

    The outermost unit is first. If a unit returns an inner unit's output, the hook of the inner one
    is called first. On a rank where it changes that output, the hook of the outer one is. So either
    hook gathers both, in one order.
    """
    buckets_of = collections.defaultdict(list)  # by unit
    for bucket in optimizer._buckets:
        unit = optimizer._unit_of[bucket.parameters[0]]
        buckets_of[unit].append(bucket)
    outermost_first = sorted(buckets_of, key=len, reverse=True)
    needs = {}
    for child in optimizer.module.modules():
        units = [unit for unit in outermost_first if child in unit]
        are_nested = all(outer >= inner for outer, inner in itertools.pairwise(units))
        # An activation, say, that several units share needs nothing: it would gather them all.
        is_spared = not are_nested and not list(child.parameters())
        needs[child] = [] if is_spared else [b for unit in units for b in buckets_of[unit]]
    return needs


def module_state_dict(optimizer):
    """Return the whole state_dict of the module. Load it in full_parameters()."""
    with optimizer.full_parameters():
        return copy.deepcopy(optimizer.module.state_dict())


@contextmanager
def full_parameters(optimizer):
    """A context with whole parameters. The caller may write to them, alike on all ranks.

    Clone what is used after it, because its memory is freed then.
    """
    before = optimizer._is_full
    optimizer._is_full = True
    for bucket in optimizer._buckets:
        bucket.unfree()
    try:
        yield
    finally:
        optimizer._is_full = before
        adopt_user_writes(optimizer)
        optimizer._free_all_but([])


class FreedParameter(nn.Parameter):
    """The class of a parameter while it is freed."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        check_is_unused(function, out=(kwargs or {}).get("out"))  # raises if it writes
        result = super().__torch_function__(function, types, args, kwargs or {})
        check_is_unused(function, result)  # raises if it has read NaN
        return result


def refuse_use(bucket):
    """Let the .data of each parameter be one NaN, expanded to its shape."""
    bucket.nan = torch.full((), torch.nan, device=bucket.flat.device).to(bucket.flat.dtype)
    for slot in bucket.slots:
        slot.parameter.data = bucket.nan.expand(slot.parameter.shape)
        slot.parameter_class = type(slot.parameter)
        slot.parameter.__class__ = FreedParameter


def allow_use(bucket):
    """Let the parameters be views of `flat` again."""
    for slot in bucket.slots:
        slot.parameter.__class__ = slot.parameter_class
        slot.parameter.data = slot.view(bucket.flat)


# Elementwise optimizers' state has a number for each element, or these for the whole parameter.
PER_TENSOR = {"step", "mu_product", "eta", "mu"}


def whole_state_dict(optimizer):
    """Return the plain optimizer's state_dict, in host memory. All ranks must call this.

    The state of a 16-bit parameter also has its "master".
    """
    group = optimizer.process_group
    whole = torch.optim.Optimizer.state_dict(optimizer)
    whole["state"] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        slot = optimizer._slots[parameter]
        state = dict(optimizer.state[parameter])
        if slot.master.dtype != parameter.dtype:
            state["master"] = slot.master
        for name, value in state.items():
            state[name] = value.cpu().clone()
            # All ranks have the same entries: step() gives empty shards a gradient, too.
            if name not in PER_TENSOR:
                shards = [None] * dist.get_world_size(group)
                dist.all_gather_object(shards, state[name], group=group)
                state[name] = torch.cat(shards).as_strided(parameter.shape, slot.stride)
        if state:
            whole["state"][number] = state
    return whole


def load_whole_state_dict(optimizer, state_dict):
    """Load the plain optimizer's state_dict, or one of this class at any number of ranks."""
    groups = {**state_dict, "state": {}}
    torch.optim.Optimizer.load_state_dict(optimizer, groups)  # checks them, too
    states = {}  # of shards, by the number of the parameter
    for number, parameter in enumerate(parameters_of(optimizer)):
        slot = optimizer._slots[parameter]
        state = copy.deepcopy(state_dict["state"].get(number, {}))
        for name in state.keys() - PER_TENSOR:
            whole = state[name]
            strided = whole.new_empty_strided(whole.shape, slot.stride).copy_(whole)
            shard = strided.as_strided(slot.master.shape, (1,), offset_of(slot))
            state[name] = shard.clone()
        if "master" in state:
            slot.master.copy_(state.pop("master"))
        states[number] = state
    optimizer._inner.load_state_dict({**state_dict, "state": states})
    take_state(optimizer, optimizer._inner)


def shards_of(optimizer):
    """Yield (name, shape of the whole parameter, offset, shard, state) for each parameter.

    The shard has this rank's elements of the flattened parameter, from element `offset` on. After
    loading into shards, sync_parameters() writes all ranks' into the parameters.
    """
    for name, parameter in optimizer.module.named_parameters():
        if parameter in optimizer._slots:
            slot = optimizer._slots[parameter]
            shape = parameter.shape
            if not torch.empty_strided(shape, slot.stride, device="meta").is_contiguous():
                raise ValueError(
                    f"a checkpoint would permute {name} of shape {tuple(shape)}, which is not "
                    "contiguous; save state_dict() instead"
                )
            yield name, shape, offset_of(slot), slot.master, optimizer.state[parameter]


def offset_of(slot):
    """Return where this rank's shard begins in the flattened parameter."""
    return max(0, slot.bucket.shard.storage_offset() - slot.start)


# --------------------------------------------------------------------------------------------------
# 6. Checks.


# These update each element on its own.
ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax"}
ELEMENTWISE |= {"NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"}


def check_arguments(optimizer, optimizer_class, lists):
    """Check the arguments, and that all ranks have the same model, buckets and options."""
    module = optimizer.module
    name = optimizer_class.__name__
    if not ELEMENTWISE & {parent.__name__ for parent in optimizer_class.__mro__}:
        raise ValueError(f"{name} may need whole parameters; use one of {ELEMENTWISE}, or muon.py")
    for name, child in module.named_modules():
        if type(child).__name__ == "DistributedDataParallel":
            raise ValueError(f"{name or 'module'} averages, too: give its module, ddp.module")
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            raise ValueError(
                f"{name or 'module'} has max_norm={child.max_norm}, so forward writes to the "
                "weight, to other rows on each rank; scale the rows that forward returns instead"
            )
    check_kept_views(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, x in tensors:
        if x.layout != torch.strided:
            raise ValueError(f"{name} is sparse: register {name}.to_dense()")
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    kind = type(optimizer).__name__
    facts = [f"{kind}, buckets of {[len(each) for each in lists]} parameters", *groups]
    facts += [(name, x.shape, x.stride(), x.dtype, x.requires_grad) for name, x in tensors]
    check_same_on_all_ranks(
        "buckets, options and parameters (shape, strides, dtype, requires_grad)",
        facts,
        optimizer.process_group,
    )
    if not set(parameters_of(optimizer)).issubset(same_parameters(optimizer)):
        raise ValueError(
            "params must be in the module, without those of which ranks of process_group hold "
            "different values, such as experts"
        )


def check_kept_views(module):
    """Raise ValueError if a module keeps a view of a parameter: it would never see an update."""
    places = set(map(place_of, module.parameters())) - {None}
    for path, child in module.named_modules():
        for name, kept in vars(child).items():
            views = [x for x in tree_leaves(kept) if type(x) is torch.Tensor]
            if name != "_buffers" and places.intersection(map(place_of, views)):
                raise ValueError(
                    f"{path}.{name} is a view of a parameter, which would not see its updates: "
                    "make it in forward"
                )


def place_of(tensor):
    """Return the address of the tensor's memory, or None: sparse tensors and others have none."""
    is_plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() or None if is_plain else None


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


def check_is_copied(optimizer):
    raise TypeError(
        "a copied or pickled optimizer would lose its buckets: save state_dict(), or make a new "
        f"{type(optimizer).__name__} over the copied module"
    )


def check_step(optimizer):
    if getattr(optimizer, "_in_backward", False):
        raise RuntimeError("a backward has raised an error: end all ranks, and start them again")
    for bucket in optimizer._buckets:
        check_is_here(bucket)


def check_is_here(bucket):
    place = memory_of(bucket).untyped_storage().data_ptr()
    if any(p.untyped_storage().data_ptr() != place for p in bucket.parameters):
        raise RuntimeError(
            "parameters are no longer where they were: make the optimizer after module.to()"
        )


WHILE_WHOLE = "in `with optimizer.full_parameters():`; save optimizer.module_state_dict()"


def check_create_graph(optimizer):
    """Raise if Zero3's backward builds a graph, because that graph would use freed parameters."""
    if torch.is_grad_enabled() and not getattr(optimizer, "_is_full", True):
        raise RuntimeError(
            "Zero3 frees parameters that gradients of gradients need: run the forward and all "
            "backwards with create_graph=True in `with optimizer.full_parameters():`"
        )


def check_output(module, args, output):
    own = list(module.parameters(recurse=False))  # modules inside have hooks of their own
    if own and isinstance(output, Iterator) and torch.is_grad_enabled():
        raise TypeError(
            f"{type(module).__name__} returns an iterator, in which Zero3 cannot see the tensors "
            "backward will reach: return a list"
        )


def check_gradient(slot):
    """Raise if a gradient of a freed parameter is NaN: backward has read what is freed."""
    if slot.bucket.is_freed and slot.parameter.grad.sum().isnan():
        raise RuntimeError(
            "backward has read a sharded parameter, which is NaN now, because Zero3 could not see "
            "the tensor that its unit returns: return tensors in containers or in attributes"
        )


def check_is_whole(module, *_):
    if any(isinstance(parameter, FreedParameter) for parameter in module.parameters()):
        raise RuntimeError(f"load parameters {WHILE_WHOLE}")


def check_is_unused(function, result=None, out=None):
    """Raise if a function writes to a freed parameter, or has read NaN from it."""
    name = function.__name__
    writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    is_grad = function == torch.Tensor.grad.__get__
    made = [each for each in tree_leaves(result) if type(each) is torch.Tensor and not is_grad]
    if writes or out is not None or any(each.isnan().any() for each in made):
        raise RuntimeError(
            f"{name}() uses a sharded parameter, which is NaN and has no memory now: call "
            "self.pos(positions) instead of reading self.pos.weight, or give `units` a module "
            f"around both; initialize, read or copy parameters {WHILE_WHOLE}; call module.to() "
            "before the optimizer is made"
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
        optimizer._reduce_gradients()
        gradients[:] = [bucket.grad for bucket in optimizer._buckets]
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
    state = tree_leaves(list(optimizer._inner.state.values()))
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

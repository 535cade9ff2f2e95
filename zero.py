"""ZeRO: data-parallel training in which each rank keeps 1/N of the optimizer state, the gradients, the parameters.

DDP keeps N copies of everything. But an elementwise optimizer can update any part of the flat parameters alone, so the
all-reduce may be taken apart, at no extra cost, and each rank updates (and stores the state of) its own part only:

    DDP     backward ── all-reduce gradients ──────────────────────────── N same updates of everything
    ZeRO    backward ── reduce-scatter gradients ── update own 1/N part ── all-gather parameters

    rank 0   g₀ ━━━━┯━━━━ ╲╱ ━━━━ sum of the left halves  ── AdamW ━━━━ ╲╱ ━━━━┯━━━━ p
    rank 1   g₁ ━━━━┷━━━━ ╱╲ ━━━━ sum of the right halves ── AdamW ━━━━ ╱╲ ━━━━┷━━━━ p

    Zero1 shards optimizer state. Gradients wait whole in .grad until step(), which reduces, updates and gathers.
    Zero2 also gradients. A bucket is reduced as soon as backward has filled it, and its .grad are freed at once.
    Zero3 also parameters. A unit's are gathered before its forward and again before its backward, and freed after.

Per rank, bytes held for Ψ 16-bit parameters with Adam and its fp32 master weights (fp32 parameters: 4Ψ, 4Ψ, 8Ψ), and
elements sent, each times (N-1)/N:

              parameters  gradients  optimizer   sent per step               with m backwards per step
    DDP       2Ψ          2Ψ         12Ψ         2Ψ: all-reduce              2Ψ (no_sync)
    Zero1     2Ψ          2Ψ         12Ψ/N       2Ψ: reduce-scatter, gather  2Ψ
    Zero2     2Ψ          2Ψ/N       12Ψ/N       2Ψ: the same                (m+1)Ψ, or 2Ψ and whole gradients (no_sync)
    Zero3     2Ψ/N        2Ψ/N       12Ψ/N       3Ψ: one more gather         3mΨ

On top come two buckets in flight, with Zero3 two units, and one byte per parameter tensor sent. On gloo the owner adds
the ranks' parts in rank order. So what is trained equals, bit by bit and at every N, one device that adds up the ranks'
gradients in that order and then divides by N. NCCL's own reduce-scatter, faster there, adds in another order.

Run:      torchrun --nproc-per-node 2 zero.py          (python zero.py is a world of one)
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §3, §5, §7; Ren et al. 2021, ZeRO-Offload, 2101.06840
Mirrors:  DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer; DeepSpeed's stages 1, 2, 3
Left out: optimizers that need whole matrices (Adafactor, Muon), sparse gradients, loss scaling (amp.py), offload to
          disk or during backward (DeepSpeed), meta-device construction and shards under any optimizer (fsdp.py)
"""

import argparse
import copy
import functools
import itertools
import math
import os
import statistics
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
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
# 1. The idea: `optimizer` knows only this rank's part of the flat parameters. Call this after loss.backward().


def flat_shard(parameters, process_group=None):
    """This rank's 1/N, rounded up and padded with zeros, of all the elements of `parameters` side by side."""
    flat, N = torch.cat([p.detach().reshape(-1) for p in parameters]), dist.get_world_size(process_group)
    return F.pad(flat, (0, -flat.numel() % N)).chunk(N)[dist.get_rank(process_group)].clone()


@torch.no_grad()
def sharded_step(parameters, shard, optimizer, process_group=None):
    """One step of `optimizer` over [shard], where shard = flat_shard(parameters); all parameters are updated."""
    parameters, N = list(parameters), dist.get_world_size(process_group)
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    flat = F.pad(flat, (0, N * shard.numel() - flat.numel()))
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=process_group)  # part r of everyone's gradient goes to rank r,
    shard.grad = sum(received.chunk(N)) / N  # which adds them in rank order: a reduce-scatter
    optimizer.step()
    dist.all_gather(list(received.chunk(N)), shard, group=process_group)
    for parameter in parameters:
        value, received = received[: parameter.numel()], received[parameter.numel() :]
        parameter.copy_(value.view_as(parameter))


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real ones. First what they are made of: messages, and buckets of parameters.


def start_reduce_scatter(flat, group):
    """Send part r of `flat` to rank r. -> what to wait for, and parts whose sum (in 16 bits: mean) is this rank's."""
    N, rank = dist.get_world_size(group), dist.get_rank(group)
    if not is_gloo(flat.device, group):
        mine, kind = flat.new_empty(flat.numel() // N), dist.ReduceOp
        operation = kind.AVG if flat.itemsize < 4 else kind.SUM  # a sum of fp16 overflows at 65504
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return [reduce_scatter(mine, flat, operation, group=group, async_op=True)], [mine]
    if flat.is_cuda:  # from where gloo sends no messages
        received = torch.empty_like(flat)
        return [dist.all_to_all_single(received, flat, group=group, async_op=True)], received.chunk(N)
    received = [part if r == rank else torch.empty_like(part) for r, part in enumerate(flat.chunk(N))]
    return start_exchange(flat.chunk(N), received, group), received


def start_all_gather(whole, shard, group):
    """Fill `whole` with all ranks' shards in rank order. -> what to wait for"""
    if whole.is_cuda or not is_gloo(whole.device, group):
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [all_gather(whole, shard, group=group, async_op=True)]
    parts = whole.chunk(dist.get_world_size(group))
    parts[dist.get_rank(group)].copy_(shard)
    return start_exchange([shard] * len(parts), parts, group)


def start_exchange(sent, received, group):
    """Send sent[r] to each other rank r, and fill received[r] from it. gloo's collectives take up to twice as long."""
    N, rank, transfers = dist.get_world_size(group), dist.get_rank(group), []
    for distance in range(1, N):
        to, source = (rank + distance) % N, (rank - distance) % N
        transfers.append(dist.P2POp(dist.isend, sent[to], group=group, group_peer=to))
        transfers.append(dist.P2POp(dist.irecv, received[source], group=group, group_peer=source))
    return dist.batch_isend_irecv(transfers) if transfers else []


def is_gloo(device, group):
    """Whether it carries the tensors on `device`: a group may have another backend for another device."""
    return f"{device.type}:gloo" in dist.get_backend_config(group)


class Bucket:
    """Some parameters of one dtype side by side in `flat`, cut regardless of borders into N equal shards.

        parameters  │ weight               │pad│ bias │pad│ weight       │pad│    views of flat
        shards      │ rank 0                     │ rank 1                    │    `master`: in fp32, or offloaded
        segments    │ weight               │pad│ b│as│pad│ weight       │pad│    of it: what the optimizer updates

    Every parameter has a segment on every rank, mostly an empty one, so that all ranks have state of the same names.
    """

    def __init__(self, parameters, group, process_group, offload, sharded):
        first, self.N, rank = parameters[0].detach(), dist.get_world_size(process_group), dist.get_rank(process_group)
        self.parameters, self.group, self.process_group = parameters, group, process_group  # param_groups[group]
        align = 64 // first.itemsize  # as if allocated alone: elsewhere some kernels are slower or round otherwise
        self.offsets = [0, *itertools.accumulate(-(-p.numel() // align) * align for p in parameters)]
        size = max(1, -(-self.offsets.pop() // self.N))  # no message may be empty
        self.flat, self.begin = first.new_zeros(self.N * size), rank * size
        self.strides = [torch.empty_like(p, device="meta").stride() for p in parameters]  # kept, where without gaps
        self.views, self.placed, self.whole, self.gathering = self.views_into(self.flat), parameters, True, None
        for view, parameter in zip(self.views, parameters, strict=True):
            view.copy_(parameter)
        dist.broadcast(self.flat.view(torch.uint8), group=process_group, group_src=0)  # gloo lacks some dtypes
        self.place(self.views)
        self.own = self.flat[self.begin : self.begin + size]
        self.shard = self.own.clone() if sharded else self.own
        self.low = first.is_floating_point() and first.itemsize < 4
        self.master = self.shard.to(offload or first.device, torch.float32 if self.low else first.dtype)
        ends = [(start - self.begin, p.numel()) for start, p in zip(self.offsets, parameters, strict=True)]
        self.slices = [slice(min(max(low, 0), size), min(max(low + numel, 0), size)) for low, numel in ends]
        self.segments = [self.master[part] for part in self.slices]
        self.divisor = 1 if self.low else self.N  # what makes `grad` the mean
        self.forget()

    def forget(self):
        self.grad = self.reducing = None  # this rank's part of the sum over ranks and backwards; what is on its way
        self.used = [False] * len(self.parameters)  # which of them have a gradient

    def views_into(self, flat):
        layout = zip(self.parameters, self.strides, self.offsets, strict=True)
        return [flat.as_strided(p.shape, stride, offset) for p, stride, offset in layout]

    def segment_of(self, tensor, slot):
        """A copy of this rank's segment of what has the shape of parameter number `slot`."""
        flat = torch.empty(self.N * len(self.shard), dtype=self.master.dtype)
        self.views_into(flat)[slot].copy_(tensor)
        return flat[self.begin :][self.slices[slot]].to(self.master.device, copy=True)

    def place(self, tensors):
        """Make the parameters look into `tensors`, if they still look where they were made to look."""
        for parameter, before, tensor in zip(self.parameters, self.placed, tensors, strict=True):
            if parameter.data_ptr() != before.data_ptr():
                raise RuntimeError("parameters are no longer where they were: make the optimizer after module.to()")
            parameter.data = tensor
        self.placed = tensors

    def start_reduce(self):
        """Move the gradients out of .grad: what is there has not been reduced yet."""
        filled = torch.empty_like(self.flat)
        for slot, (parameter, view) in enumerate(zip(self.parameters, self.views_into(filled), strict=True)):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad, self.used[slot] = None, True
        self.reducing = (*start_reduce_scatter(filled, self.process_group), filled)  # in use until they have come

    def finish_reduce(self):
        """Add what comes to what is there, in rank order."""
        works, parts, _ = self.reducing
        for work in works:
            work.wait()
        if self.low:  # add up in fp32, divide after, round once
            parts = [functools.reduce(torch.add, parts[1:], parts[0].float()) / len(parts)]
        there = [] if self.grad is None else [self.grad]
        self.grad, self.reducing = functools.reduce(torch.add, [*there, *parts]).to(self.flat.dtype), None

    def update(self, optimizer):
        """A step of `optimizer`, over the segments, by the mean gradient. -> what to wait for, until all have it"""
        self.place(self.placed)
        mean = self.grad.to(self.master) / self.divisor
        for segment, part, used in zip(self.segments, self.slices, self.used, strict=True):
            segment.grad = mean[part] if used else None
        optimizer.step()
        optimizer.zero_grad()
        for segment, used in zip(self.segments, self.used, strict=True):
            if used and self.low:  # only now: Adam takes a state that is not empty for one with moments
                optimizer.state[segment]["master"] = segment
        return self.publish()

    def publish(self):
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        return start_all_gather(self.flat, self.shard, self.process_group) if self.whole else []

    # Zero3: `flat` has memory only between gather() and free(). Views of it that autograd saved for backward keep its
    # storage, so that is emptied, not replaced; filled again, it is what they saw.

    def gather(self, wait=True):
        if not self.whole and self.gathering is None:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self.gathering = start_all_gather(self.flat, self.shard, self.process_group)
        if self.gathering is not None and wait:
            for work in self.gathering:
                work.wait()
            self.place(self.views)
            self.whole, self.gathering = True, None

    def free(self):
        if self.whole or self.gathering is not None:
            self.gather()  # which may have been started in vain
            nothing = self.flat.new_full((), math.nan if self.flat.is_floating_point() else 0)
            self.place([nothing.expand(parameter.shape) for parameter in self.parameters])
            self.flat.untyped_storage().resize_(0)
            self.whole = False

    def adopt(self):
        """Take over what has been written to the whole parameters; the rest keeps its fp32 digits."""
        written = (self.own != self.shard).to(self.master.device)
        self.shard.copy_(self.own)
        self.master.copy_(torch.where(written, self.shard.to(self.master), self.master))


class Zero1(torch.optim.Optimizer):
    """Averages gradients over the ranks of `process_group` and steps; each rank holds 1/N of the optimizer state.

    Until step() moves them, gradients are each rank's own, in .grad: torch.nn.utils.clip_grad_norm_ would clip by each
    rank's own norm, so use clip_grad_norm_() of this class.

    Args:
        module: the model, not in DDP, and where it is to stay. Its parameters and buffers become those of rank 0.
        optimizer_class: one of ELEMENTWISE or derived from it; `kwargs` are its own.
        process_group: the ranks that share the work (None: the default group), all running the same program.
        offload: "cpu" keeps optimizer state and master weights in host memory, and updates there.
        bucket_cap_mb: a bucket closes once it holds this many MiB (not Zero3's, which are its units).
        params: parameter groups, where they are not all of module.parameters() with the same options.

    16-bit parameters have fp32 master weights, "master" in state_dict(). What is loaded into the model does not reach
    them: load before construction, or load the optimizer's state after it. Raises ValueError where an argument is
    unusable, or ranks hold different models. Source: Rajbhandari et al. 2020, §5.1; offload: Ren et al. 2021.
    """

    _owner = {}  # Zero3: parameter -> the unit that it is gathered for

    def __init__(
        self, module, optimizer_class, process_group=None, offload=None, bucket_cap_mb=25, *, params=None, **kwargs
    ):
        check_arguments(module, optimizer_class, process_group, offload, bucket_cap_mb)
        self.module, self.process_group, self._buckets = module, process_group, []
        self._in_flight = None  # the bucket whose gradients are on their way
        self._sync = True  # False inside no_sync()
        defaults = optimizer_class([torch.zeros(1)], **kwargs).defaults
        super().__init__(module.parameters() if params is None else params, defaults)
        self._shard(offload, bucket_cap_mb * 2**20)
        groups = [{**self.param_groups[bucket.group], "params": bucket.segments} for bucket in self._buckets]
        self._optimizer = optimizer_class(groups, **kwargs)

    @torch.no_grad()
    def _shard(self, offload, cap_bytes):
        """Lay the parameters into buckets, in the order in which backward fills them."""
        group_of = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        ordered = [parameter for parameter in self.module.parameters() if parameter in group_of]
        if len(ordered) < len(group_of):
            raise ValueError("params has parameters that are not among module.parameters(); give those only")
        check_same_on_all_ranks([*self.module.named_parameters(), *self.module.named_buffers()], self.process_group)
        for buffer in self.module.buffers():
            dist.broadcast(buffer, group=self.process_group, group_src=0)
        kinds = {p: (p.dtype, p.requires_grad, group_of[p], self._owner.get(p)) for p in ordered}
        if is_gloo(ordered[0].device, self.process_group):  # larger messages are no faster there, and leave the cache
            cap_bytes = min(cap_bytes, 4 * 2**20)
        for parameters in assign_buckets(ordered, kinds, math.inf if self._owner else cap_bytes):
            group = group_of[parameters[0]]
            self._buckets.append(Bucket(parameters, group, self.process_group, offload, sharded=bool(self._owner)))
            if self._owner:
                self._buckets[-1].free()

    def add_param_group(self, param_group):
        if self._buckets:
            raise ValueError("all parameters are sharded at construction: give their groups as params= there")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """Reduce what waits in .grad, update this rank's part, gather the others'. -> closure()"""
        with torch.enable_grad():
            loss = closure() if closure else None
        self._reduce_waiting()
        gathers = []
        for bucket in self._buckets:
            if any(bucket.used):
                # A scheduler may have set another lr in the group.
                self._optimizer.param_groups = [{**self.param_groups[bucket.group], "params": bucket.segments}]
                gathers += bucket.update(self._optimizer)
        for work in gathers:
            work.wait()
        return loss

    def _reduce_waiting(self):
        """Reduce what is in any rank's .grad. All ranks must send the same, so they agree on what that is first."""
        flags = [u if p.grad is None else 2 for b in self._buckets for p, u in zip(b.parameters, b.used, strict=True)]
        flags = self._buckets[0].flat.new_tensor(flags, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        flags = iter(flags.tolist())
        for bucket in self._buckets:
            agreed = [next(flags) for _ in bucket.parameters]
            if 2 in agreed:
                self._reduce(bucket)
            bucket.used = [flag > 0 for flag in agreed]
        self._reduce(None)

    def _reduce(self, bucket):
        """Send its gradients, after taking in those of the one before: at most two buckets' exist twice."""
        if self._in_flight:
            self._in_flight.finish_reduce()
        if bucket:
            bucket.start_reduce()
        self._in_flight = bucket

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, reduced or not, also those of a backward that raised."""
        super().zero_grad()
        self._in_backward = False
        self._reduce(None)
        for bucket in self._buckets:
            bucket.forget()

    @contextmanager
    def no_sync(self):
        """Gradients of a backward in here stay whole in .grad, until step(), or a backward outside, reduces them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # Refinements: the norm of gradients that no rank has whole; state dicts for any number of ranks.

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, *, counted=lambda parameter: True, process_groups=()):
        """Scale the mean gradients so that their norm, over all shards, is at most `max_norm`. -> that norm, everywhere

        Where other ranks hold other parts of the model (tensor or pipeline parallelism), `process_groups` are those
        over which the norm goes on, and `counted(parameter)` is false for what another rank there counts.
        """
        self._reduce_waiting()
        total = torch.zeros((), dtype=torch.float64, device=self._buckets[0].flat.device)
        buckets = [bucket for bucket in self._buckets if bucket.grad is not None]
        for bucket in buckets:
            for parameter, part in zip(bucket.parameters, bucket.slices, strict=True):
                if counted(parameter):
                    total += (bucket.grad[part].norm(dtype=torch.float64) / bucket.divisor).square()
        for group in (self.process_group, *process_groups):
            dist.all_reduce(total, group=group)
        total = total.sqrt()
        for bucket in buckets:
            bucket.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total.to(self._buckets[0].master.dtype)

    def state_dict(self):
        """What the plain optimizer over the same parameters would return, in host memory. All ranks must call this."""
        state, everyone = {}, [None] * dist.get_world_size(self.process_group)
        for bucket in self._buckets:
            entries = [self._optimizer.state.get(segment, {}) for segment in bucket.segments]
            mine = [{name: value.cpu().clone() for name, value in entry.items()} for entry in entries]
            dist.all_gather_object(everyone, mine, group=self.process_group)
            for parameter, stride, *entries in zip(bucket.parameters, bucket.strides, *everyone, strict=True):
                state[parameter] = entries[0]
                for name in entries[0].keys() - PER_TENSOR:
                    whole = torch.cat([entry[name] for entry in entries])
                    state[parameter][name] = whole.as_strided(parameter.shape, stride)
        self.state = {p: state[p] for group in self.param_groups for p in group["params"] if state[p]}
        try:
            return super().state_dict()  # packs it
        finally:
            self.state = {}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take over what state_dict() or the plain optimizer's returned, whatever the number of ranks was."""
        super().load_state_dict({**state_dict, "state": {}})  # checks and takes over the groups
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {p: state_dict["state"].get(number, {}) for p, number in zip(parameters, numbers, strict=True)}
        for bucket in self._buckets:
            for slot, (parameter, segment) in enumerate(zip(bucket.parameters, bucket.segments, strict=True)):
                entry = copy.deepcopy(state[parameter])
                for name in entry.keys() - PER_TENSOR:
                    entry[name] = bucket.segment_of(entry[name], slot)
                segment.copy_(entry.get("master", bucket.shard[bucket.slices[slot]]))
                entry.pop("master", None)
                self._optimizer.state[segment] = (
                    {**entry, "master": segment} if bucket.low and state[parameter] else entry
                )
            for work in bucket.publish():
                work.wait()


# The optimizers that treat each element by itself, and what they keep once for each tensor.
ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"}
PER_TENSOR = {"step", "mu_product", "eta", "mu"}


def weak(method):
    """A hook that keeps the optimizer neither alive nor in copies of the module."""
    method = weakref.WeakMethod(method)
    return lambda *args: method()(*args) if method() else None


class Zero2(Zero1):
    """Zero1 whose gradients are sharded too: backward reduces each bucket once it is full, and frees its .grad.

    After backward .grad is None: torch.nn.utils.clip_grad_norm_ would clip nothing, silently, and module.zero_grad()
    drop nothing; use clip_grad_norm_() and zero_grad() of this class. Several backwards before a step add up in the
    shard; inside no_sync(), whole and unsent, in .grad. Each backward must reach a parameter on every rank, not
    necessarily the same. Source: Rajbhandari et al. 2020, §5.2.
    """

    def __init__(self, *args, **kwargs):
        self._in_backward = False
        super().__init__(*args, **kwargs)
        for parameter in (p for bucket in self._buckets for p in bucket.parameters if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(weak(self._on_gradient))

    @torch.no_grad()
    def _on_gradient(self, parameter):
        """Autograd has added to the .grad of `parameter`."""
        self._start_backward()
        self._arrived.add(parameter)
        # Buckets leave by number, not as they fill: ranks that send them in different orders add the wrong tensors.
        while self._sync and self._unsent and self._arrived.issuperset(self._unsent[0].parameters):
            self._reduce(self._unsent.pop(0))

    def _start_backward(self):
        if not self._in_backward:
            self._in_backward, self._arrived = True, set()
            self._unsent = [bucket for bucket in self._buckets if any(p.requires_grad for p in bucket.parameters)]
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    @torch.no_grad()
    def _finish_backward(self):
        for bucket in self._unsent if self._sync else ():  # with parameters that this backward did not reach
            self._reduce(bucket)
        self._reduce(None)
        self._in_backward = False


class Zero3(Zero2):
    """Zero2 whose parameters are sharded too, and whole only while a unit that needs them runs.

    As with Zero2, use clip_grad_norm_() and zero_grad() of this class; and module_state_dict(): module.state_dict() is
    refused. A unit is a module without a list of modules in it, the largest such. What is in none, or in several, is
    whole as long as any of them. Outside of forward and backward of its unit a parameter has its shape, but reads NaN
    and cannot be written: see full_parameters(). All ranks must run the same modules in the same order.

        forward   unit 0: gather 0, start 1     unit 1: free 0, start 2     unit 2: free 1        end: free 2
        backward  unit 2: gather 2, start 1     unit 1: free 2, start 0     unit 0: free 1        end: free 0

    Source: Rajbhandari et al. 2020, §5.3, §7.2.2; prefetch: ZeRO-Infinity, arXiv 2104.07857, §6.2.
    """

    def __init__(self, module, *args, **kwargs):
        self._held = 0  # how many full_parameters() there are around
        self._last = None  # the (unit, in backward?) that was entered last
        self._next = {}  # the same -> the unit that was entered after it
        super().__init__(module, *args, **kwargs)
        owners = {bucket: self._owner[bucket.parameters[0]] for bucket in self._buckets}
        self._needed = {u: [b for b in owners if owners[b] in (u, module)] for u in {*self._unit_of.values()}}
        for part in self._unit_of:
            part.register_forward_pre_hook(weak(self._enter), prepend=True)
            part.register_forward_hook(weak(self._after_forward), with_kwargs=True)
            part.register_state_dict_pre_hook(weak(self._refuse_state_dict))

    def _shard(self, offload, cap_bytes):
        self._unit_of, self._owner = assign_units(self.module)
        super()._shard(offload, cap_bytes)

    @torch.no_grad()
    def _enter(self, module, _=None):
        """`module` runs, forward or backward: free what it does not need, gather what it does, start what is next."""
        unit, in_backward = self._unit_of.get(module), torch._C._current_graph_task_id() != -1
        if in_backward:  # in which checkpointed forwards run as well
            self._start_backward()
        needed = self._needed.get(unit, [])  # of a copy of the module, none
        if all(bucket.whole for bucket in needed):  # it is in the unit that was entered last, or around it
            return
        # Autograd runs nodes in the reverse order of their creation: no other unit is to run before this one is done.
        self._next[self._last], self._last = unit, (unit, in_backward)
        ahead = self._needed.get(self._next.get(self._last), [])
        for bucket in self._buckets:
            if bucket not in needed:
                bucket.free()
        for bucket in needed:
            bucket.gather(wait=False)
        for bucket in needed:
            bucket.gather()
        for bucket in ahead:
            bucket.gather(wait=False)

    def _after_forward(self, module, args, kwargs, output):
        inputs = tree_leaves((args, kwargs))
        for tensor in tree_leaves(output):
            # A tensor that was only handed through is the output of another unit: its gradient comes later.
            if torch.is_tensor(tensor) and tensor.grad_fn and not any(tensor is other for other in inputs):
                tensor.register_hook(functools.partial(weak(self._enter), module))
        if module is self.module and not self._in_backward:
            self._free_all()

    def _finish_backward(self):
        super()._finish_backward()
        self._free_all()

    def _free_all(self):
        for bucket in self._buckets if not self._held else ():
            bucket.free()
        self._last = None

    def _reduce_waiting(self):
        self._free_all()  # also what the forward of a part has left: it is about to change
        for bucket in self._buckets if self._held else ():
            bucket.adopt()
        super()._reduce_waiting()

    @contextmanager
    @torch.no_grad()  # not what it is around
    def full_parameters(self):
        """In here the module has whole parameters, and what is written to them, alike on all ranks, stays."""
        self._held += 1
        for bucket in self._buckets:
            bucket.gather()
        try:
            yield
        finally:
            self._held -= 1
            for bucket in self._buckets:
                bucket.adopt()
            self._free_all()

    def module_state_dict(self):
        """The module's, whole. Load one by `with optimizer.full_parameters(): module.load_state_dict(state_dict)`."""
        with self.full_parameters():
            return copy.deepcopy(self.module.state_dict())

    def _refuse_state_dict(self, module, *_):
        if module in self._unit_of and not self._held:
            raise RuntimeError("this module's parameters are sharded: call the optimizer's module_state_dict() instead")


# ---------------------------------------------------------------------------------------------------------------------
# 3. Which parameters go together; and what is checked before.


def assign_units(root):
    """-> {module: the unit that it is in}, {parameter: the unit that it is gathered for}"""
    unit_of, owner = {}, {}
    for module in root.modules():  # each after those around it
        lists = any(isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict) for part in module.modules())
        is_unit = module is not root and not lists and type(module).forward is not nn.Module.forward  # it is called
        for part in module.modules() if is_unit else [module]:
            unit_of.setdefault(part, module if is_unit else root)
    for module, unit in unit_of.items():
        for parameter in module.parameters(recurse=False):
            owner[parameter] = unit if owner.get(parameter, unit) is unit else root
    return unit_of, owner


def assign_buckets(tensors, kinds, cap_bytes):
    """Lists of tensors of one kind that close at `cap_bytes` or more, in the order in which backward fills them."""
    buckets, filling = [], {}
    for tensor in reversed(tensors):
        bucket = filling.get(kinds[tensor])
        if bucket is None or sum(t.nbytes for t in bucket) >= cap_bytes:
            bucket = filling[kinds[tensor]] = []
            buckets.append(bucket)
        bucket.insert(0, tensor)
    # A bucket is full when its first tensor, whose gradient comes last, has one.
    position = {tensor: number for number, tensor in enumerate(tensors)}
    return sorted(buckets, key=lambda bucket: -position[bucket[0]])


def check_arguments(module, optimizer_class, process_group, offload, bucket_cap_mb):
    name = getattr(optimizer_class, "__name__", optimizer_class)
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group; make the optimizer on its ranks only")
    if not isinstance(module, nn.Module) or "DistributedDataParallel" in {type(m).__name__ for m in module.modules()}:
        raise ValueError(f"module is a {type(module).__name__}; it must be the model, without DDP, which also averages")
    if not {parent.__name__ for parent in getattr(optimizer_class, "__mro__", ())} & ELEMENTWISE:
        raise ValueError(f"{name} may need whole parameters, and ZeRO gives it parts: use one of {sorted(ELEMENTWISE)}")
    if offload not in (None, "cpu") or not bucket_cap_mb > 0:
        raise ValueError(f"offload {offload!r} must be None or 'cpu', and bucket_cap_mb {bucket_cap_mb} positive")


def check_same_on_all_ranks(tensors, process_group):
    """Left alone, messages of two sizes abort the process, and those of two dtypes add garbage."""
    mine = [f"{name!r}: shape {tuple(t.shape)}, {t.dtype}, requires_grad={t.requires_grad}" for name, t in tensors]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if first != other:
                raise ValueError(f"ranks must hold the same model, but rank 0 has {first}; rank {rank} has {other}")


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo, status, rows = Demo(), 0, []
    N = demo.ranks
    for stage, passes, paper in ((Zero1, 2, 4 + 12 / N), (Zero2, 2, 2 + 14 / N), (Zero3, 3, 16 / N)):
        optimizer = stage(demo.start(stage.__name__, bitwise=True), torch.optim.AdamW, bucket_cap_mb=2, lr=1e-3)
        demo.train(functools.partial(step, demo, optimizer), functools.partial(whole, optimizer))
        size, holds = held_bytes(demo.model.parameters()), held_by(optimizer)
        status |= demo.report(holds, f"{passes}Ψ(N-1)/N", passes * size * (N - 1) / N)
        demo.show()
        low = stage(copy.deepcopy(demo.model).bfloat16(), torch.optim.AdamW, bucket_cap_mb=2)
        step(demo, low, *demo.batch(0))  # makes the state
        step(demo, low, *demo.batch(1), update=False)
        each = sum(held_by(low)) / sum(parameter.numel() for parameter in demo.model.parameters())
        ms = 1e3 * statistics.median(ours for ours, _ in demo.times)
        sizes = "".join(f"{n / 1e6:8.1f} MB" for n in (*holds, demo.sent.total))
        rows.append(f"{stage.__name__} {sizes} {ms:8.0f} ms {each:12.2f} (paper: {paper:.2f})")
    demo.show("stage      params       grads   optimizer   sent/step   time/step   bytes per parameter in 16 bits")
    demo.show("\n".join(rows))
    demo.show(
        "Of each rank: what it holds after a step, and sends in one. Last, what it holds before a step of the same"
    )
    demo.show(f"model in bf16 with AdamW, and 4 + 12/N, 2 + 14/N, 16/N (Rajbhandari et al., figure 1) at N = {N}.")
    return status


def step(demo, optimizer, inputs, targets, update=True):
    optimizer.zero_grad()
    loss = language_loss(optimizer.module(demo.part(inputs)), demo.part(targets))
    loss.backward()
    if update:
        optimizer.step()
    return loss


def whole(optimizer):  # -> gradients, parameters
    gradients = {}
    for bucket in optimizer._buckets:
        flat = torch.empty_like(bucket.flat)
        for work in start_all_gather(flat, bucket.grad, optimizer.process_group):
            work.wait()
        gradients.update(zip(bucket.parameters, bucket.views_into(flat / bucket.divisor), strict=True))
    with optimizer.full_parameters() if isinstance(optimizer, Zero3) else nullcontext():
        return [gradients[p] for p in optimizer.module.parameters()], [p.clone() for p in optimizer.module.parameters()]


def held_by(optimizer):
    """Bytes of parameters, gradients and optimizer state, master weights included, that this rank holds."""
    buckets = optimizer._buckets
    parameters = [bucket.flat for bucket in buckets] + [bucket.shard for bucket in buckets]
    gradients = [p.grad for bucket in buckets for p in bucket.parameters] + [bucket.grad for bucket in buckets]
    state = tree_leaves(list(optimizer._optimizer.state.values()))
    state += [bucket.master for bucket in buckets if bucket.master is not bucket.shard]
    return tuple(held_bytes(filter(torch.is_tensor, tensors)) for tensors in (parameters, gradients, state))


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

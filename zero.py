"""ZeRO: data parallelism with optimizer state, gradients and parameters split over the ranks.

DDP keeps a copy of everything on each of N ranks. But an elementwise optimizer, such as Adam, can
update any part of the parameters on its own. So each rank updates 1/N of the parameters, and keeps
the optimizer state of that part only.

In a step, every rank computes the gradients of its own batch. A reduce-scatter gives each rank the
sum of all ranks' gradients for its part. The rank updates its part, and an all-gather gives the
updated parameters to every rank. Together, the reduce-scatter and the all-gather send as much as
DDP's all-reduce.

            backward →  reduce-scatter gradients →  update own part →  all-gather parameters
    rank 0   g₀ ━━━━┯━━━━ ╲╱ ━━━━ sum of the left halves  ── AdamW ━━━━ ╲╱ ━━━━┯━━━━ p
    rank 1   g₁ ━━━━┷━━━━ ╱╲ ━━━━ sum of the right halves ── AdamW ━━━━ ╱╲ ━━━━┷━━━━ p

    Zero1 shards the optimizer state. step() reduces the gradients, updates, and gathers.
    Zero2 also shards the gradients. Backward reduces a bucket of gradients as soon as it is full.
    Zero3 also shards the parameters. It gathers a unit, such as a transformer block, before its
          forward and again before its backward, and frees it afterwards.

The table is for Ψ parameters of 16 bits, with Adam and fp32 master weights. Its first three columns
are the bytes that a rank holds. The others are the elements that it sends in a step of 1 or of m
backwards, times (N-1)/N.

           parameters  gradients  optimizer  sent, 1 backward                sent, m backwards
    DDP    2Ψ          2Ψ         12Ψ        2Ψ: all-reduce                  2Ψ in no_sync()
    Zero1  2Ψ          2Ψ         12Ψ/N      2Ψ: reduce-scatter, all-gather  2Ψ
    Zero2  2Ψ          2Ψ/N       12Ψ/N      2Ψ: the same                    (m+1)Ψ
    Zero3  2Ψ/N        2Ψ/N       12Ψ/N      3Ψ: one more all-gather         3mΨ

In fp32, DDP holds 4Ψ, 4Ψ and 8Ψ bytes. In no_sync(), Zero2 sends 2Ψ and Zero3 (2m+1)Ψ, but they
hold whole gradients. In addition to the table, a bucket of gradients is held twice while it is
reduced, and Zero3 holds the whole parameters of the unit that runs and of the next one. step() and
clip_grad_norm_() also all-reduce one byte for each parameter tensor.

Each rank adds the gradients of all ranks in rank order. So training without clipping is bitwise
equal to one device that adds up the ranks' gradients in that order and then divides by N.

Run:      torchrun --nproc-per-node 2 zero.py          (python zero.py runs as one rank)
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §3, §5, §7; Ren et al. 2021,
          ZeRO-Offload, arXiv 2101.06840
Mirrors:  DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer; DeepSpeed's
          stages 1, 2 and 3
Left out: optimizers that need whole matrices (Adafactor, Muon), closures, gradients that stay
          sparse, offload to disk (DeepSpeed), construction on the meta device and any optimizer
          over shards (fsdp.py), NCCL's own reduce-scatter, which adds in an order of its own; in
          Zero3, modules that return their input changed in place, or a view of a parameter
"""

import argparse
import copy
import functools
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

# Imported now, because a later import would keep the process group alive in default arguments.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: one flat tensor of all parameters, of which this rank updates 1/N.


def flatten(tensors, N):
    """Return all elements in one tensor, followed by zeros up to a multiple of N."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return F.pad(flat, (0, -flat.numel() % N))


def sharded_step(parameters, shard, optimizer, process_group=None):
    """Reduce, update and gather, after backward. `optimizer` holds one tensor, this rank's `shard`.

    Before the first step the shard must be flatten(parameters, N).chunk(N)[rank].clone().
    """
    parameters = list(parameters)
    N = dist.get_world_size(process_group)

    # Reduce-scatter: rank r receives part r of every rank's gradients, and adds them in rank order.
    gradients = flatten([parameter.grad for parameter in parameters], N)
    received = torch.empty_like(gradients)
    dist.all_to_all_single(received, gradients, group=process_group)
    shard.grad = sum(received.chunk(N)) / N

    optimizer.step()

    # All-gather: every rank receives all updated shards.
    flat = torch.empty_like(gradients)
    dist.all_gather(list(flat.chunk(N)), shard, group=process_group)
    nn.utils.vector_to_parameters(flat, parameters)


# --------------------------------------------------------------------------------------------------
# 2. Buckets: parameters that are reduced and gathered together.


# torch 2.13 renames all_gather_into_tensor and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def as_bytes(tensor):
    return tensor.view(torch.uint8)  # gloo has no int16, and in torch 2.6 no complex numbers


class Bucket:
    """Parameters of one dtype in one flat tensor, cut into N equal shards.

    For the parameters weight = [1 2 3 4 5] and bias = [6 7 8] on two ranks, without padding:

                rank 0             rank 1
        flat    1 2 3 4 5 6 7 8    1 2 3 4 5 6 7 8    all values; the parameters are views of it
        shard   1 2 3 4            5 6 7 8            this rank's part of flat
        grad    g₁ g₂ g₃ g₄        g₅ g₆ g₇ g₈        the shard's gradients, summed over ranks
        master  1 2 3 4            5 6 7 8            the shard itself; of 16-bit parameters a
                                                      copy in fp32; offloaded, in host memory
        slots   weight: 1 2 3 4    weight: 5          segments of master, one per parameter,
                bias:   -          bias:   6 7 8      which the optimizer updates

    Parameters are padded to multiples of 64 bytes, and shards to multiples of 16 bytes. The values
    in the padding do not matter.
    """

    def __init__(self, parameters, process_group, offload):
        first = parameters[0].data
        self.parameters = parameters
        self.process_group = process_group
        self.N = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)

        self.slots = []
        start = 0
        for parameter in parameters:
            self.slots.append(Slot(parameter, start))
            # As PyTorch does. At other addresses, kernels are slower or round differently.
            start = round_up(start + parameter.numel(), 64 // first.itemsize)
        # No shard is empty. NCCL is faster if messages are aligned to 16 bytes.
        size = round_up(max(1, start), self.N * 16 // first.itemsize)

        self.flat = first.new_zeros(size)
        for slot in self.slots:
            slot.attach(slot.view(self.flat).copy_(slot.parameter.data))
        self.own_part = self.flat.chunk(self.N)[self.rank]  # a view, this rank's part of flat
        self.shard = self.make_shard()

        self.is_16_bit = first.is_floating_point() and first.itemsize < 4
        dtype = torch.float32 if self.is_16_bit else first.dtype
        self.master = self.shard.to(offload or first.device, dtype)
        for slot in self.slots:
            slot.make_segment(self.master, self.rank * self.shard.numel())

        # The shard's gradients since zero_grad(): in 16 bits, means over ranks; otherwise sums over
        # ranks, which step() divides, like one device.
        self.grad = None
        self.divisor = 1 if self.is_16_bit else self.N  # grad / divisor is the mean over ranks
        self.received = None  # the parts of the gradients that this rank adds, in rank order
        self.reducing = None  # handle of the all-to-all that is running
        self.gathering = None  # handle of the all-gather that is running

    def make_shard(self):
        return self.own_part  # in Zero3, a copy

    def reduce_scatter(self):
        """Move the gradients out of .grad, and start to send part r of them to rank r."""
        gradients = torch.empty_like(self.flat)  # zeroing it would take 3% of a step
        for slot in self.slots:
            slot.check()
            view = slot.view(gradients)
            if slot.parameter.grad is None:
                view.zero_()
            else:
                view.copy_(slot.parameter.grad.to_dense())  # nn.Embedding(sparse=True)
                slot.parameter.grad = None
                slot.used = True
        # Each rank sends part r to rank r, which adds the parts in rank order. A reduce-scatter may
        # use another order.
        self.received = torch.empty_like(gradients)
        self.reducing = dist.all_to_all_single(
            as_bytes(self.received), as_bytes(gradients), group=self.process_group, async_op=True
        )

    def wait_for_reduce(self):
        """Add the gradients of all ranks to `grad`, in rank order."""
        if self.reducing is None:
            return
        self.reducing.wait()
        parts = list(self.received.chunk(self.N))
        self.received = None
        self.reducing = None
        if self.is_16_bit:
            # In fp32, because a sum in fp16 overflows at 65504 and rounds at each addition.
            parts = [sum(part.float() for part in parts) / self.N]
        if self.grad is not None:
            parts.insert(0, self.grad)  # the first term of the sum, as on one device
        # Not sum(), which would first add 0, in one more pass over the shard.
        self.grad = functools.reduce(torch.add, parts).to(self.flat.dtype)

    def all_gather(self):
        """Start to fill `flat` with the shards of all ranks."""
        self.gathering = all_gather_single(
            as_bytes(self.flat), as_bytes(self.own_part), group=self.process_group, async_op=True
        )

    def wait_for_gather(self):
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def adopt_writes(self):
        """Copy to `master` what the user wrote into the parameters since the last step.

        An element was written if it differs from its master in the parameters' dtype. The other
        elements of the master keep the digits that this dtype drops.
        """
        if self.master is not self.shard:
            values = self.shard.to(self.master.device)
            unchanged = self.master.to(values.dtype) == values
            self.master.copy_(torch.where(unchanged, self.master, values))


class Slot:
    """The place of one parameter in its bucket.

    This rank updates the parameter's segment, which is the part of it that lies in this rank's
    shard. The segment may be empty.
    """

    def __init__(self, parameter, start):
        self.parameter = parameter
        self.start = start  # the parameter's first element in the bucket
        # The strides of the plain model. With others, some kernels round differently.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        self.is_contiguous = parameter.is_contiguous()
        # Whether the bucket's `grad` has a gradient of this parameter: from this rank, and after
        # _reduce_gradients(), from any rank.
        self.used = False
        self.pointer = None  # the address of the parameter's data, see check()
        self.version = None  # Zero3: PyTorch's count of writes to the parameter when it was freed

    def make_segment(self, master, shard_start):
        """Find the segment in `master`. The shard begins at element `shard_start` of the bucket."""
        start = self.start - shard_start  # negative if the parameter begins before the shard
        size = self.parameter.numel()
        # The segment's place in the shard. Slicing cuts off the elements after the shard's end.
        self.in_shard = slice(max(0, start), max(0, start + size))
        self.segment = master[self.in_shard]
        self.offset = min(max(0, -start), size)  # of the segment in the parameter's memory

    def view(self, flat):
        """Return the parameter's part of `flat`, a whole bucket, in the parameter's shape."""
        return flat.as_strided(self.parameter.shape, self.stride, self.start)

    def attach(self, data):
        """Let the parameter use the memory of `data`."""
        self.parameter.data = data
        self.pointer = data.data_ptr()

    def check(self):
        """Raise an error if something else has moved the parameter's data."""
        if self.parameter.data_ptr() != self.pointer:
            raise RuntimeError(
                "parameters are no longer where they were: make the optimizer after module.to()"
            )

    def split(self, whole):
        """Return this rank's segment of `whole`, a tensor with the parameter's shape.

        load_state_dict() splits whole states, and state_dict() joins segments.
        """
        flat = whole.new_empty(whole.numel())
        flat.as_strided(whole.shape, self.stride).copy_(whole)
        return flat[self.offset :][: self.segment.numel()].clone()

    def join(self, segment, process_group):
        """Return a tensor with the parameter's shape, made of the segments of all ranks."""
        segments = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(segments, segment, group=process_group)
        return torch.cat(segments).as_strided(self.parameter.shape, self.stride)


def assign_buckets(parameters, kind_of, cap_bytes):
    """Return lists of parameters. A list has one kind, and is closed when it has `cap_bytes`.

    The lists are in the order in which backward computes gradients, from the last parameter on.
    """
    closed = []
    filling = {}  # kind: the list that is not closed
    for parameter in reversed(parameters):
        kind = kind_of(parameter)
        together = filling.setdefault(kind, [])
        together.append(parameter)
        if sum(p.nbytes for p in together) >= cap_bytes:
            closed.append(filling.pop(kind))
    return closed + list(filling.values())


# --------------------------------------------------------------------------------------------------
# 3. ZeRO-1: the optimizer holds this rank's segments of the parameters.


class Zero1(torch.optim.Optimizer):
    """Averages gradients over `process_group` and updates the parameters, each rank 1/N of them.

    Move `module` to its device first. All ranks get rank 0's parameters and buffers. `params` are
    the parameters to train, or parameter groups, as in torch.optim. With offload="cpu", optimizer
    state and master weights are in host memory, and the update runs there. A bucket is closed when
    it reaches `bucket_cap_mb` MiB. The other arguments go to `optimizer_class`.

    Use this class's clip_grad_norm_() and zero_grad(). torch.nn.utils.clip_grad_norm_ clips by the
    norm of each rank's own gradients. module.zero_grad() does not drop reduced gradients, and then
    the next step() raises an error. Buffers are not synchronized after construction.
    """

    _bucket_class = Bucket  # Zero3 has another

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
        # A dummy parameter, because only an instance knows the defaults.
        dummy = optimizer_class([torch.zeros(1)], **optimizer_kwargs)
        check_arguments(module, type(dummy), process_group)
        super().__init__(module.parameters() if params is None else params, dummy.defaults)
        self.module = module
        self.process_group = process_group
        # For each parameter, the index of its group. State dicts number parameters in this order.
        self._group_index = {}
        for index, group in enumerate(self.param_groups):
            self._group_index.update(dict.fromkeys(group["params"], index))
        check_parameters(module, self._group_index)
        copy_from_rank_0(module, process_group)
        parameters = [p for p in module.parameters() if p in self._group_index]
        lists = assign_buckets(parameters, self._kind, bucket_cap_mb * 2**20)
        # A bucket for each list. Zero2 reduces them in this order.
        self._buckets = [self._bucket_class(each, process_group, offload) for each in lists]
        self._slots = {slot.parameter: slot for bucket in self._buckets for slot in bucket.slots}
        self._optimizer = optimizer_class(self._segment_groups(), **optimizer_kwargs)
        self._sync = True  # False in no_sync()
        self._loss_scale = 1.0  # step() divides the gradients by it, see unscale_()
        self._stepped = False  # True from step() until zero_grad()
        self._mixed = False  # whether gradients were added to those of the last step

    def _kind(self, parameter):
        """Only parameters of one kind share a bucket."""
        return parameter.dtype, parameter.requires_grad, self._group_index[parameter]

    def _segment_groups(self):
        """Return self.param_groups with segments for parameters, for the inner optimizer."""
        return [self._with_segments(group, group["params"]) for group in self.param_groups]

    def _with_segments(self, group, parameters):
        """Return the options of `group` with the segments of these parameters."""
        return {**group, "params": [self._slots[parameter].segment for parameter in parameters]}

    def step(self):
        """Reduce the gradients that are still in .grad, update this rank's shards, gather all."""
        buckets = self._reduce_gradients()
        if self._mixed:
            raise RuntimeError(
                "gradients were added to those of the last step: call the optimizer's zero_grad() "
                "after each step; that of the module does not drop reduced gradients"
            )
        self._stepped = bool(buckets)
        for bucket in buckets:
            bucket.adopt_writes()
            mean = bucket.grad.to(bucket.master) / (bucket.divisor * self._loss_scale)
            for slot in bucket.slots:
                if slot.used:
                    slot.segment.grad = mean[slot.in_shard]
            # Update this bucket, which has one parameter group, while the one before is gathered.
            # Copy the group's options in each step, because schedulers change them.
            group = self.param_groups[self._group_index[bucket.parameters[0]]]
            self._optimizer.param_groups = [self._with_segments(group, bucket.parameters)]
            self._optimizer.step()
            self._optimizer.zero_grad()
            bucket.shard.copy_(bucket.master)
            bucket.all_gather()
        for bucket in self._buckets:
            bucket.wait_for_gather()

    def _reduce_gradients(self):
        """Reduce the buckets that have a .grad on any rank. Return those that have gradients.

        Ranks may use different parameters, but must issue the same collectives. So each rank sets a
        flag for each parameter, and all ranks act on the maximum of their flags:

            2   the parameter has a .grad, which is not reduced yet
            1   its gradient is reduced already, by clip_grad_norm_() or by Zero2's backward
            0   it has no gradient
        """
        slots = self._slots.values()
        own_flags = [2 if slot.parameter.grad is not None else int(slot.used) for slot in slots]
        maxima = self._buckets[0].flat.new_tensor(own_flags, dtype=torch.uint8)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.process_group)
        # tolist() makes the host wait for the device.
        flags = dict(zip(slots, maxima.tolist(), strict=True))
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.used = flags[slot] > 0
            if any(flags[slot] == 2 for slot in bucket.slots):
                self._start_reduce(bucket)
        self._finish_reduce()
        return [bucket for bucket in self._buckets if bucket.grad is not None]

    def _start_reduce(self, bucket):
        self._mixed |= self._stepped
        self._finish_reduce()  # one bucket at a time, because each holds its gradients twice
        bucket.reduce_scatter()

    def _finish_reduce(self):
        for bucket in self._buckets:
            bucket.wait_for_reduce()

    def add_param_group(self, param_group):
        if hasattr(self, "_buckets"):
            raise ValueError("the buckets are made: give all parameter groups to the constructor")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none=True):
        """Drop or zero all gradients, those in .grad and those already reduced."""
        super().zero_grad(set_to_none)
        self._finish_reduce()  # after a backward that raised
        self._loss_scale = 1.0
        self._stepped = False
        self._mixed = False
        for bucket in self._buckets:
            if set_to_none:
                bucket.grad = None
                for slot in bucket.slots:
                    slot.used = False
            elif bucket.grad is not None:
                bucket.grad.zero_()

    @contextmanager
    def no_sync(self):
        """A context in which backward leaves whole gradients in .grad.

        The next backward outside, or step(), reduces them.
        """
        before = self._sync
        self._sync = False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm, *, counted=None, process_groups=()):
        """Scale the averaged gradients to a joint norm of at most `max_norm`. Return their norm.

        With model parallelism, `process_groups` are the groups over which the model is split. If
        several of their ranks hold a copy of a parameter, counted(parameter) must be True on one.
        """
        buckets = self._reduce_gradients()
        total = self._buckets[0].flat.new_zeros((), dtype=torch.float64)
        for bucket in buckets:
            for slot in bucket.slots:
                if counted is None or counted(slot.parameter):
                    # abs() makes complex numbers real.
                    norm = bucket.grad[slot.in_shard].abs().norm(dtype=torch.float64)
                    total += (norm / (bucket.divisor * self._loss_scale)).square()
        for group in (self.process_group, *process_groups):
            dist.all_reduce(total, group=group)
        norm = total.sqrt()
        if max_norm < torch.inf:  # otherwise an infinite norm would turn all gradients into NaN
            for bucket in buckets:
                bucket.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def unscale_(self, loss_scale):
        """Let step() divide the gradients by `loss_scale`, in fp32, until zero_grad().

        amp.GradScaler calls this. Returns 1.0 if a gradient is inf or NaN, else 0.0.
        """
        self._loss_scale = loss_scale
        return 1.0 - self.clip_grad_norm_(torch.inf).isfinite().float()  # inf clips nothing

    def state_dict(self):
        """Return the plain optimizer's state_dict, in host memory. All ranks must call this.

        The state of a 16-bit parameter also has its "master". A name in PER_TENSOR, such as "step",
        has one number for the whole parameter. All other entries are joined.
        """
        states = {}
        for number, parameter in enumerate(self._group_index):
            slot = self._slots[parameter]
            state = dict(self._optimizer.state[slot.segment])
            if slot.segment.dtype != parameter.dtype:
                state["master"] = slot.segment
            for name, value in state.items():
                state[name] = value.cpu().clone()
                if name not in PER_TENSOR:
                    state[name] = slot.join(state[name], self.process_group)
            if state:
                states[number] = state
        return {**super().state_dict(), "state": states}

    def load_state_dict(self, state_dict):
        """Load the plain optimizer's state_dict, or one of this class at any number of ranks."""
        super().load_state_dict({**state_dict, "state": {}})  # checks and loads the groups
        states = {}  # by the parameter's number, the state of its segment on this rank
        for number, parameter in enumerate(self._group_index):
            slot = self._slots[parameter]
            state = copy.deepcopy(state_dict["state"].get(number, {}))
            for name in state.keys() - PER_TENSOR:
                state[name] = slot.split(state[name])
            if "master" in state:
                slot.segment.copy_(state.pop("master"))
            states[number] = state
        self._optimizer.param_groups = self._segment_groups()
        self._optimizer.load_state_dict({**state_dict, "state": states})

    def shards(self):
        """Yield (parameter, offset, segment, state) for each parameter, to save or load in pieces.

        The optimizer updates `segment`: this rank's elements of the flattened parameter, from
        element `offset` on. After writing to segments, call sync_parameters().
        """
        for parameter, slot in self._slots.items():
            if not slot.is_contiguous:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not contiguous, and a "
                    "checkpoint would permute its elements; save state_dict() instead"
                )
            yield parameter, slot.offset, slot.segment, self._optimizer.state[slot.segment]

    def sync_parameters(self):
        """Write the segments of all ranks into the parameters."""
        for bucket in self._buckets:
            bucket.wait_for_gather()  # peers may still be receiving this shard
            bucket.shard.copy_(bucket.master)
            bucket.all_gather()
            bucket.wait_for_gather()


# --------------------------------------------------------------------------------------------------
# 4. ZeRO-2: backward reduces gradients, so that only a few buckets of them are ever whole.


def weak_hook(method):
    """Return a hook that calls `method`, but does not keep the method's optimizer alive.

    A module keeps its hooks, which would keep the optimizer and its state. Hooks run outside of the
    code that torch.compile makes.
    """
    reference = weakref.WeakMethod(method)

    @torch.compiler.disable
    def hook(*args):
        if reference() is not None:
            reference()(*args)

    return hook


class Zero2(Zero1):
    """Zero1 with sharded gradients: backward reduces a bucket when it is full, and frees its .grad.

    After backward, torch.nn.utils.clip_grad_norm_ finds no .grad and silently clips nothing. Every
    backward must reach a parameter on every rank, or the ranks wait for each other.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._to_reduce = None  # list of buckets that the running backward has yet to reduce
        self._arrived = set()  # parameters whose gradients this backward has computed
        hook = weak_hook(self._post_accumulate_grad)
        for parameter in self._group_index:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)

    def _pre_backward(self):
        """Prepare for a backward. Every hook calls this, but only the first call does anything."""
        if self._to_reduce is not None:
            return
        self._to_reduce = []
        if self._sync:
            self._to_reduce = [b for b in self._buckets if b.parameters[0].requires_grad]
        self._arrived = set()
        torch.autograd.Variable._execution_engine.queue_callback(self._post_backward)

    def _post_accumulate_grad(self, parameter):
        """A hook. Backward calls it after adding to the .grad of `parameter`."""
        self._pre_backward()
        self._arrived.add(parameter)
        # A full bucket waits for those before it. Ranks may fill buckets in different orders. If
        # they also sent them in different orders, they would add up different buckets.
        while self._to_reduce and self._arrived.issuperset(self._to_reduce[0].parameters):
            self._start_reduce(self._to_reduce.pop(0))

    def _post_backward(self):
        for bucket in self._to_reduce:  # backward did not reach all of their parameters
            self._start_reduce(bucket)
        self._finish_reduce()
        self._to_reduce = None

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self._to_reduce = None  # after a backward that raised


# --------------------------------------------------------------------------------------------------
# 5. ZeRO-3: parameters have memory only while a unit that needs them runs.


class FreeableBucket(Bucket):
    """A bucket whose `flat` can be freed. So its `shard` has memory of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.freed = False
        self.nan = torch.full((), torch.nan).to(self.flat)  # the value of freed parameters

    def make_shard(self):
        return self.own_part.clone()

    def unshard(self):
        """Allocate freed parameters again, and start to gather them."""
        if self.freed:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            for slot in self.slots:
                slot.check()
                if slot.parameter._version != slot.version:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(slot.parameter.shape)} was written while it "
                        "was freed: write to it in `with optimizer.full_parameters():`"
                    )
                slot.attach(slot.view(self.flat))
            self.freed = False
            self.all_gather()

    def all_gather(self):
        # In step() the parameters are usually freed. Then the next forward gathers them.
        if not self.freed:
            self.own_part.copy_(self.shard)
            super().all_gather()

    def free(self):
        """Free the memory of `flat`. The tensor stays, because autograd has saved views of it."""
        if not self.freed:
            self.wait_for_gather()  # in case it was prefetched but did not run
            self.nan.fill_(torch.nan)  # all freed parameters share it, and one may be written to
            for slot in self.slots:
                slot.attach(self.nan.expand(slot.parameter.shape))
                slot.version = slot.parameter._version
            self.flat.untyped_storage().resize_(0)
            self.freed = True

    def adopt_writes(self):
        if not self.freed:
            self.wait_for_gather()  # peers may still be receiving this shard
            self.shard.copy_(self.own_part)
        super().adopt_writes()


class Zero3(Zero2):
    """Zero2 with sharded parameters, which are whole only while a unit that needs them runs.

    Units are the members of nn.Sequential and nn.ModuleList, such as transformer blocks, and the
    whole module. A parameter belongs to the innermost unit around it, and is whole while that unit
    runs. So a parameter outside of all lists is whole during an entire forward or backward. All
    ranks must run the same modules in the same order.

    Freed parameters are NaN. Writes outside of full_parameters() are lost or are errors. So call a
    unit instead of reading its weights from outside. Initialize parameters, load them, or compute
    with them in full_parameters(). Save module_state_dict() instead of module.state_dict().

    While a unit runs, the next one is already being gathered. It is the one that came next last
    time. "start 1" means to start to gather unit 1 without waiting:

    forward   unit 0: gather 0, start 1   unit 1: free 0, start 2   unit 2: free 1       end: free 2
    backward  unit 2: gather 2, start 1   unit 1: free 2, start 0   unit 0: free 1       end: free 0
    """

    _bucket_class = FreeableBucket

    def __init__(self, module, *args, **kwargs):
        # For each parameter, the units that it belongs to: several, if modules share it. Zero1's
        # constructor needs this in _kind().
        self._units = dict.fromkeys(module.parameters(), ())
        for child, unit in innermost_units(module).items():
            for parameter in child.parameters(recurse=False):
                self._units[parameter] += (unit,)
        super().__init__(module, *args, **kwargs)
        self._full_contexts = 0  # how many full_parameters() are open; nothing is freed in them
        self._entered = set()  # the parameters whose modules this backward has entered
        # For each module, the buckets that it needs: those of all units around it.
        self._needed = dict.fromkeys(module.modules(), ())
        for bucket in self._buckets:
            for unit in self._units[bucket.parameters[0]]:  # the same for the whole bucket
                for child in unit.modules():
                    self._needed[child] += (bucket,)
        # (buckets, whether in backward) of the unit that runs, or None.
        self._running = None
        # For each value of _running, the buckets that were needed after it, last time.
        self._next_needed = {}
        for child in module.modules():
            child.register_forward_pre_hook(weak_hook(self._enter), prepend=True)
            child.register_forward_hook(weak_hook(self._post_forward), with_kwargs=True)
            child.register_state_dict_pre_hook(weak_hook(self._refuse_state_dict))
            child.register_load_state_dict_pre_hook(weak_hook(self._refuse_state_dict))
        self._free_all()

    def _kind(self, parameter):
        return *super()._kind(parameter), self._units[parameter]

    def _post_forward(self, module, args, kwargs, output):
        """Make backward call _enter() when it reaches an output of the module."""
        # An output that is also an input was made by another module, which has hooked it.
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(output):
            if getattr(leaf, "grad_fn", None) and id(leaf) not in inputs:
                leaf.register_hook(functools.partial(self._enter, module))
        if module is self.module and not in_backward():
            self._free_all()

    def _enter(self, module, args_or_gradient):
        """A hook. It is called when `module` is about to run forward or backward."""
        needed = self._needed.get(module, ())  # a deep copy has this hook, but no buckets
        if in_backward():
            self._pre_backward()
            self._entered.update(p for bucket in needed for p in bucket.parameters)
        # A module inside a unit that runs already finds everything gathered.
        if any(bucket.freed or bucket.gathering for bucket in needed):
            self._unshard(needed)

    def _unshard(self, needed):
        """Gather the needed buckets, free all others, and start to gather those needed next."""
        self._next_needed[self._running] = needed
        self._running = (needed, in_backward())
        # Free the others, in backward too: autograd runs nodes in the reverse order of their
        # creation, so it has finished with a unit when it enters another.
        for bucket in self._buckets:
            if bucket in needed:
                bucket.unshard()
            else:
                bucket.free()
        for bucket in needed:
            bucket.wait_for_gather()
        for bucket in self._next_needed.get(self._running, ()):
            bucket.unshard()

    def _free_all(self):
        """Free the parameters at the end of a forward or backward."""
        self._running = None
        self._entered.clear()
        if not self._full_contexts:
            for bucket in self._buckets:
                bucket.free()

    def _post_accumulate_grad(self, parameter):
        self._pre_backward()
        if parameter not in self._entered and not self._full_contexts:
            names = {p: name for name, p in self.module.named_parameters()}
            raise RuntimeError(
                f"{names[parameter]} has a gradient, but backward did not come through its module. "
                "Zero3 gathers parameters when their module is called: call the module, "
                "as in self.pos(positions), instead of reading self.pos.weight. "
                "It must return tensors, or lists, tuples and dicts of them"
            )
        super()._post_accumulate_grad(parameter)

    def _post_backward(self):
        super()._post_backward()
        self._free_all()

    def _refuse_state_dict(self, module, *_):
        if module in self._needed and not self._full_contexts:
            raise RuntimeError(
                "these parameters are sharded: save the optimizer's module_state_dict(), and load "
                "in `with optimizer.full_parameters():`"
            )

    @contextmanager
    def full_parameters(self):
        """A context with whole parameters. The caller may write to them, alike on all ranks."""
        self._unshard(tuple(self._buckets))
        self._full_contexts += 1
        try:
            yield
        finally:
            self._full_contexts -= 1
            for bucket in self._buckets:
                bucket.adopt_writes()
            self._free_all()

    def module_state_dict(self):
        """Return the whole state_dict of the module.

        Load one with `with optimizer.full_parameters(): module.load_state_dict(state_dict)`.
        """
        with self.full_parameters():
            return copy.deepcopy(self.module.state_dict())


def in_backward():
    """Whether backward is running. It may be running the forward of a checkpointed module again."""
    return torch._C._current_graph_task_id() != -1


def innermost_units(module):
    """Return, for each module inside `module`, the innermost unit around it."""
    units = dict.fromkeys(module.modules(), module)
    for child in module.modules():  # an outer module comes before those inside it
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            for unit in child.children():
                units.update(dict.fromkeys(unit.modules(), unit))
    return units


# --------------------------------------------------------------------------------------------------
# 6. Checks in the constructor.

# These optimizers update each element on its own. Their state has one number for each element. The
# entries in PER_TENSOR, such as "step", are one number for the whole parameter.
ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax"}
ELEMENTWISE |= {"NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"}
PER_TENSOR = {"step", "mu_product", "eta", "mu"}


def check_arguments(module, optimizer_class, process_group):
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in process_group; make it on its ranks only"
        )
    if any(type(part).__name__ == "DistributedDataParallel" for part in module.modules()):
        raise ValueError(
            "DistributedDataParallel averages as well; give the model inside it, ddp.module"
        )
    if not ELEMENTWISE & {parent.__name__ for parent in optimizer_class.__mro__}:
        raise ValueError(
            f"{optimizer_class.__name__} may need whole parameters; use one of "
            f"{sorted(ELEMENTWISE)}"
        )


def check_parameters(module, trained):
    if not trained.keys() <= set(module.parameters()):
        raise ValueError("params has parameters that are not among module.parameters()")
    if trained.keys() & split_experts(module):
        raise ValueError(
            "ranks have different experts: give these an optimizer of their own, and give this one "
            "the other parameters as `params`"
        )


def split_experts(module):
    """Return the parameters that differ between ranks: experts split by expert_parallel.py."""
    experts = set()
    for child in module.modules():
        if getattr(child, "differ_between_ranks", False):
            experts.update(child.parameters())
    return experts


def copy_from_rank_0(module, process_group):
    """Copy rank 0's parameters and buffers to all ranks, if all have the same model."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    mine = [
        f"{name!r}: shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}, "
        f"requires_grad={x.requires_grad}"
        for name, x in tensors.items()
    ]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != mine:
            raise ValueError(
                f"ranks must hold the same model; rank {rank}'s differs in "
                f"{sorted({*mine} ^ {*theirs}) or 'the order of its parameters'}"
            )
    differ = split_experts(module)
    for name, tensor in tensors.items():
        if tensor in differ:
            continue
        if tensor.numel() > 1 and 0 in tensor.stride():
            raise ValueError(
                f"{name} is expanded: clone() it. If another Zero3 has freed it, make only one "
                "with parameter groups"
            )
        values = tensor.detach().reshape(-1)
        dist.broadcast(as_bytes(values), group=process_group, group_src=0)
        tensor.detach().copy_(values.view_as(tensor))


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    status = 0
    for stage, passes in ((Zero1, 2), (Zero2, 2), (Zero3, 3)):
        status |= train_stage(demo, stage, passes)
        demo.show()
    return status


def train_stage(demo, stage, passes):
    """Train with Zero1, Zero2 or Zero3, which sends `passes` times Ψ(N-1)/N elements in a step."""
    model = demo.start(stage.__name__, bitwise=True)
    optimizer = stage(model, torch.optim.AdamW, bucket_cap_mb=2, lr=1e-3)
    held_now = None

    def step(inputs, targets):
        nonlocal held_now
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        held_now = held_by(optimizer)  # Zero1's gradients are still whole
        optimizer.step()
        return loss

    demo.train(step, lambda: whole(optimizer))
    sent = passes * held_bytes(demo.model.parameters()) * (demo.ranks - 1) / demo.ranks
    return demo.report(held_now, f"{passes}Ψ(N-1)/N", sent)


def whole(optimizer):
    gradients = {}
    for bucket in optimizer._buckets:
        flat = torch.empty_like(bucket.flat)
        dist.all_gather(list(flat.chunk(bucket.N)), bucket.grad)
        mean = flat / bucket.divisor
        for slot in bucket.slots:
            gradients[slot.parameter] = slot.view(mean)
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
        parameters += [bucket.flat, bucket.shard]
        gradients += [bucket.grad, *(parameter.grad for parameter in bucket.parameters)]
        if bucket.master is not bucket.shard:
            state.append(bucket.master)
    kinds = (parameters, gradients, state)
    return tuple(held_bytes(filter(torch.is_tensor, tensors)) for tensors in kinds)


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


class Demo:
    """Trains with a technique, trains the same model on one device, and compares the two."""

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        purpose = __doc__.partition("\n")[0]
        parser = argparse.ArgumentParser(description=purpose, conflict_handler="resolve")
        parser.error = self.stop
        parser.add_argument("--idea", action="store_true", help="train with section 1 alone")
        parser.add_argument("--steps", type=int, default=steps, help="of training")
        parser.add_argument("--seed", type=int, default=0, help="of the model and the batches")
        parser.add_argument("--device", choices=devices, default=devices[-1])
        dtypes = ["float64", "float32", "bfloat16"]
        parser.add_argument("--dtype", choices=dtypes, help="(default: that of the claim)")
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="to train on")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.device, self.backend = choose_device(self.args.device)
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
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends
        os._exit(2)

    def show(self, line=""):
        if self.rank == 0:
            print(line, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`.

        Bitwise claims are tested in float32, others in float64, unless --dtype says otherwise.
        """
        join_world(self.device, self.backend)
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        dtype = "float64" if self.tolerance else "float32"
        if self.args.dtype not in (None, dtype, "float64"):
            self.tolerance = torch.inf  # claims nothing
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, getattr(torch, self.args.dtype or dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        name += " idea" if self.args.idea else ""
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        model = f"{self.device.type}/{dist.get_backend()} · {size:.1f}M parameters"
        self.show(f"{name} · {world} · {model} · {self.args.steps} steps")
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
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
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
            losses = [loss for loss in losses if loss is not None]
            loss = torch.tensor(losses, dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                if not torch.equal(ours, theirs):
                    self.differences.append((ours - theirs).abs().max().item())
            if number % -(-self.args.steps // 3) == 0:  # three lines in all
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss.item():.3f}")

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

    def report(self, held_here, formula, sent):
        """Print the result (docs/printed_lines.md). Return 1 if a rank differs."""
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        elif self.tolerance == torch.inf:
            verdict = f"differ by up to {largest:.0e}"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain)
        held_line = f"params {params}   grads {grads}   optimizer {state}      (1 device: {plain})"
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   {held_line}")
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

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "reduce_": (1, 0), "gather_": (1, 1)}
    RING |= {"allgather_": (1, 0), "_allgather_base_": (1, 0), "recv_": (0, 0)}
    RING |= {"alltoall_base_": (1, 1), "_reduce_scatter_base_": (1, 1)}
    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_uneven = name == "alltoall_base_" and args[4]  # such exchanges do not count
        if name == "send":
            self.total += args[0][0].nbytes
        elif "c10d" in func.namespace and not is_uneven:
            rounds, payload = self.RING[name]  # KeyError: an unknown operator is not 0 bytes
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            N = dist.ProcessGroup.unbox(group).size()
            size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
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
    """Connect the ranks, unless they are connected. Without torchrun there is one."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    options = {} if "RANK" in os.environ else alone
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **options)


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

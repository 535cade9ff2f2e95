"""ZeRO: data-parallel training in which each rank keeps 1/N of the optimizer state, the gradients, the parameters.

DDP keeps N copies of everything. But an elementwise optimizer can update any part of the flat parameters alone, so the
all-reduce may be taken apart, at no extra cost, and each rank updates (and stores the state of) its own part only:

    DDP     backward ── all-reduce gradients ──────────────────────────── N same updates of everything
    ZeRO    backward ── reduce-scatter gradients ── update own 1/N part ── all-gather parameters

    rank 0   g₀ ━━━━┯━━━━ ╲╱ ━━━━ sum of the left halves  ── AdamW ━━━━ ╲╱ ━━━━┯━━━━ p
    rank 1   g₁ ━━━━┷━━━━ ╱╲ ━━━━ sum of the right halves ── AdamW ━━━━ ╱╲ ━━━━┷━━━━ p

Three classes, each the one before with one more thing sharded:

    Zero1 optimizer state. Gradients wait whole in .grad until step(), which reduces, updates and gathers.
    Zero2 gradients. A bucket is reduced as soon as backward has filled it, and its .grad are freed at once.
    Zero3 parameters. A module's are gathered before its forward and again before its backward, and freed after each.

Bytes held, for Ψ 16-bit parameters with Adam and its fp32 master weights (for fp32 parameters: 4Ψ, 4Ψ, 8Ψ, no master);
and elements sent, per rank; in all that is sent a factor (N-1)/N is left out:

              parameters  gradients  optimizer   sent per step               with m backwards per step
    DDP       2Ψ          2Ψ         12Ψ         2Ψ: all-reduce              2Ψ (no_sync)
    Zero1     2Ψ          2Ψ         12Ψ/N       2Ψ: reduce-scatter, gather  2Ψ
    Zero2     2Ψ          2Ψ/N       12Ψ/N       2Ψ: the same                (m+1)Ψ, or 2Ψ and whole gradients (no_sync)
    Zero3     2Ψ/N        2Ψ/N       12Ψ/N       3Ψ: one more gather         3mΨ

On top come two buckets in flight, with Zero3 two modules, and one byte per parameter tensor sent. On gloo the reduce-
scatter is an all-to-all whose parts the owner adds in rank order. So what is trained equals, bit by bit and at every
N, one device that adds up the ranks' gradients in rank order and then divides by N. NCCL's own, faster there, adds in
another order.

Run:      torchrun --nproc-per-node 2 zero.py          (python zero.py is a world of one)
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §3, §5, §7; Ren et al. 2021, ZeRO-Offload, 2101.06840, §4;
          Rajbhandari et al. 2021, ZeRO-Infinity, 2104.07857, §5
Mirrors:  DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer; DeepSpeed's stages 1, 2, 3
Left out: parameters offloaded, loss scaling (amp.py), sparse gradients, second-order ones under Zero3. Sharded weights
          under any optimizer: fsdp.py
"""

import argparse
import copy
import dataclasses
import errno
import itertools
import math
import mmap
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import weakref
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from functools import partial, reduce
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import register_multi_grad_hook
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
    shards = [torch.empty_like(shard) for _ in range(N)]
    dist.all_gather(shards, shard, group=process_group)
    values = torch.cat(shards)[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value.view_as(parameter))


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real ones. Parameters live in flat buckets, and each bucket has an optimizer for this rank's part of it.


class Zero1(torch.optim.Optimizer):
    """Averages gradients over the ranks of `process_group` and steps; each rank holds 1/N of the optimizer state.

    Args:
        module: the model, or what any optimizer takes: parameters, or dicts of them (not Zero3: it needs the modules).
            Its buffers, and the parameters to be trained, are overwritten with those of the group's rank 0. Do not
            wrap it in DDP.
        optimizer_class: any elementwise optimizer; `optimizer_kwargs` are its arguments.
        process_group: the ranks that share the work (None: the default group).
        offload: "cpu" keeps optimizer state and master weights in host memory and updates there; a directory keeps
            them in a file there, which has no name and is mapped into memory.
        bucket_cap_mb: a bucket closes once it holds this many MiB; the largest module that Zero3 gathers at once.
        params: parameter groups, when they are not all of module.parameters() with the same options.

    16-bit parameters get fp32 master weights, in state_dict() as "master". Parameters may be overwritten between steps
    (not Zero3's: see full_parameters), and skip a step when no rank has a gradient for them. Modules on the meta device
    are made here, by their reset_parameters().

    Raises:
        ValueError: an argument is unusable, the optimizer needs whole parameters, or ranks hold different ones.
        OSError: the directory cannot be written, or lacks the room for the state. The model is as it was.

    Source: Rajbhandari et al. 2020, §5.1.
    """

    def __init__(
        self,
        module,
        optimizer_class,
        process_group=None,
        offload=None,
        bucket_cap_mb=25,
        *,
        params=None,
        **optimizer_kwargs,
    ):
        self.module = module if isinstance(module, nn.Module) else None
        # Weak: a group that someone holds on to after destroy_process_group() may abort the process at its exit.
        self._process_group = weakref.ref(dist.group.WORLD if process_group is None else process_group)
        self.N, self.rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        self.offload, self.bucket_cap_mb = offload, bucket_cap_mb
        self._make_optimizer = partial(optimizer_class, **optimizer_kwargs)
        self._buckets = []  # in the order in which backward fills them
        self._sync = True  # False inside no_sync()
        if params is None:
            params = module.parameters() if self.module else module
        problem = None
        try:
            super().__init__(params, self._make_optimizer([torch.zeros(4, 6)]).defaults)
        except Exception as error:  # on this rank perhaps alone: the others would wait for it
            problem = error
        verify_same_model([], self.process_group, problem)
        self._shard(range(len(self.param_groups)))
        if self.module:
            broadcast(list(self.module.buffers()), self.process_group)

    process_group = property(lambda self: self._process_group())

    @torch.no_grad()
    def step(self, closure=None):
        """Reduce what gradients are not reduced yet, update this rank's part, gather the others'. -> closure()"""
        with torch.enable_grad():
            loss = closure() if closure else None
        gathers = []
        for bucket in self._reduced():
            bucket.step(self.param_groups[bucket.group], self.state)
            gathers += self._publish(bucket)
            self._forget(bucket)
        for work in gathers:
            work.wait()
        return loss

    def _reduced(self):
        """Yield each bucket that has gradients when they are reduced, with those of the next one on their way."""
        # Which parameters have a gradient may differ between ranks, and what is sent must not: agree first.
        flags = [flag for bucket in self._buckets for flag in bucket.flags()]
        flags = torch.tensor(flags, dtype=torch.uint8, device=self._device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        flags = iter(flags.tolist())
        for bucket in self._buckets:
            agreed = [next(flags) for _ in bucket.parameters]
            bucket.used, bucket.waits = [flag > 0 for flag in agreed], Bucket.WAITS in agreed
        buckets = [bucket for bucket in self._buckets if any(bucket.used)]
        for bucket, ahead in itertools.zip_longest([None, *buckets], buckets):
            if ahead and ahead.waits:
                self._start_reduce(ahead)
            if bucket:
                bucket.finish_reduce()
                yield bucket

    def _start_reduce(self, bucket):
        bucket.grad_sum = None  # gradients stay in .grad, which has all that has been added
        bucket.start_reduce(self.process_group)

    def _publish(self, bucket):
        """Start to send the updated part to all; -> what to wait for."""
        return start_all_gather(bucket.flat, bucket.shard, self.process_group)

    def _forget(self, bucket):
        bucket.forget()  # .grad still has the gradients

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
            bucket.finish_reduce()  # of a backward that raised
            if set_to_none or bucket.grad_sum is None:
                bucket.forget()
            else:
                bucket.grad_sum.zero_()

    @contextmanager
    def no_sync(self):
        """Gradients of a backward in here stay whole in .grad, until step(), or a backward outside, reduces them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ---- Refinements. What others do with gradients that some rank has whole:

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm, norm_type=2.0, error_if_nonfinite=False, *, counted=lambda parameter: True, process_groups=()
    ):
        """Scale the mean gradients so that the norm of all of them together is at most `max_norm`; -> that norm.

        torch.nn.utils.clip_grad_norm_, for gradients that no rank has whole. All ranks get the identical number.

        Where other groups of ranks hold other parts of the model (tensor or pipeline parallelism), `process_groups` are
        those over which the norm goes on, and `counted(parameter)` is false where another rank there counts it.
        """
        if not float(norm_type) > 0:
            raise ValueError(f"norm_type is {norm_type}; it must be positive or inf, to be made up of those of parts")
        buckets = list(self._reduced())
        wide = reduce(torch.promote_types, [bucket.wide.to_real() for bucket in buckets], torch.float32)
        norms = [torch.zeros((), dtype=wide, device=self._device())]
        for bucket in buckets:
            for slot, here, segment in bucket.pieces:
                if segment.numel() and counted(bucket.parameters[slot]):
                    norm = torch.linalg.vector_norm(bucket.grad_sum[here], norm_type, dtype=bucket.wide)
                    norms.append(norm / bucket.divisor)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for group in (self.process_group, *process_groups):
            total = torch.linalg.vector_norm(gathered(total[None], group), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {total}, so they cannot be clipped")
        for bucket in buckets:
            bucket.scale_gradients((max_norm / (total + 1e-6)).clamp(max=1.0))
        for grad in (p.grad for bucket in buckets for p in bucket.parameters if p.grad is not None):
            grad.reduced_at = grad._version  # only now: gradients that are views of one tensor share its version
        return total

    @torch.no_grad()
    def full_gradients(self):
        """The whole mean gradient of each parameter (None: unused), gathered, to look at. All ranks must call it."""
        gradients = {}
        for bucket in self._reduced():
            views = bucket.views_into(gathered(bucket.grad_sum, self.process_group))
            for parameter, used, view in zip(bucket.parameters, bucket.used, views, strict=True):
                gradients[parameter] = view / bucket.divisor if used else None
            self._forget(bucket)
        return [gradients.get(parameter) for parameter in self._parameters()]

    # ---- Whole state in, whole state out: no file tells at how many ranks it was written.

    def state_dict(self):
        """What the plain optimizer over the same parameters would return, on every rank, which must all call this."""
        local, self.state = self.state, self._whole_state()
        try:
            return super().state_dict()  # packs self.state
        finally:
            self.state = local

    def _whole_state(self):
        state = {}
        for bucket in self._buckets:
            everyone = [None] * self.N
            dist.all_gather_object(everyone, bucket.state_here(), group=self.process_group)
            entries = {slot: entry for theirs, _ in everyone for slot, entry in theirs.items()}
            nothing = torch.zeros(bucket.size, dtype=bucket.wide)
            for key in {key for _, parts in everyone for key in parts}:
                whole = torch.cat([parts.get(key, nothing) for _, parts in everyone]).to(bucket.flat.device)
                for slot, view in enumerate(bucket.views_into(whole)):
                    if key in entries.get(slot, {}):
                        entries[slot][key] = view.clone()
            state.update({bucket.parameters[slot]: entry for slot, entry in entries.items()})
        return {parameter: state[parameter] for parameter in self._parameters() if parameter in state}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take over what state_dict() or the plain optimizer's returned, whatever the number of ranks was."""
        super().load_state_dict({**state_dict, "state": {}})  # checks and takes over the groups
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        entries = {p: state_dict["state"].get(n, {}) for p, n in zip(self._parameters(), numbers, strict=True)}
        for bucket in self._buckets:
            bucket.load_state(entries, self.param_groups[bucket.group], self.state)

    # ---- Set-up: check on all ranks, lay the parameters into buckets, make an optimizer for this rank's part of each.

    def add_param_group(self, param_group):
        """As any optimizer's. All ranks must add the same; parameters are overwritten with rank 0's."""
        super().add_param_group(param_group)
        if self._buckets:  # not in the constructor, which shards all groups at once
            try:
                self._shard([len(self.param_groups) - 1])
            except (ValueError, OSError):
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def _shard(self, groups):
        """Lay the parameters of these groups (by number) into buckets, after a check that leaves all as it is."""
        buckets, file, used, problem = [], None, 0, None
        try:
            buckets = self._plan(groups)
            if self.offload not in (None, "cpu"):
                file = map_file(self.offload, sum(bucket.state_bytes() for bucket in buckets))
        except (ValueError, OSError) as error:
            problem = error
        names = {p: name for name, p in self.module.named_parameters()} if self.module else {}
        named = [(names.get(p, f"parameter {number}"), p) for number, p in enumerate(self._parameters())]
        named += self.module.named_buffers() if self.module else []
        # A part of a bucket: of another size where ranks have other groups or another bucket_cap_mb.
        named += [(f"bucket of group {b.group}", torch.empty(b.size, device="meta")) for b in buckets]
        verify_same_model(named, self.process_group, problem)
        for bucket in reversed(buckets):  # in the order of the model: a random init draws in that order
            if self.module and dist.get_backend(self.process_group) != "fake":  # no data moves there, and none is made
                make(self.module, set(bucket.parameters), self._device())
            broadcast(bucket.parameters, self.process_group)
            self._attach(bucket)
            if self.offload is not None:
                bucket.file, bucket.begins_at = file, used
                used += bucket.state_bytes()
            bucket.make_optimizer(self._make_optimizer, self.param_groups[bucket.group], self.state)
        self._buckets += buckets

    def _plan(self, groups):
        """-> the new buckets, without memory, in the order in which backward fills them."""
        if not isinstance(self.offload, type(None) | str | os.PathLike):
            raise ValueError(f"offload is {self.offload!r}; it must be None, 'cpu' or a directory")
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive")
        for name, module in self.module.named_modules() if self.module else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ValueError("sparse gradients are not reduced; use nn.Embedding(..., sparse=False)")
            if is_unmade(module) and not reset_of(module):
                kind = type(module).__name__
                raise ValueError(f"{name!r} is on the meta device, but {kind} has no reset_parameters()")
        if any(p.untyped_storage().nbytes() < p.nbytes for g in groups for p in self.param_groups[g]["params"]):
            raise ValueError("parameters are views of less memory than they need: are they sharded by another Zero3?")
        order = [*(self.module.parameters() if self.module else ()), *self._parameters()]
        position, buckets = {p: number for number, p in reversed([*enumerate(order)])}, []
        for group in groups:
            keys = elementwise_state(self._make_optimizer, self.param_groups[group], self._device())
            for unit, cap_bytes in self._units(self.param_groups[group]["params"]):
                for positions in assign_buckets(unit, cap_bytes):
                    parameters = [unit[i] for i in reversed(positions)]
                    kind = Bucket if self.offload is None else OffloadedBucket
                    buckets.append(kind(group, parameters, keys, self.N, self.rank))
        # A bucket is full when its first parameter, whose gradient comes last, has one.
        return sorted(buckets, key=lambda bucket: -min(position[p] for p in bucket.parameters))

    def _units(self, parameters):
        """-> [(which of these parameters may share buckets, bytes at which a bucket closes)]"""
        cap = self.bucket_cap_mb * 2**20
        if is_gloo(self._device(), self.process_group):
            cap = min(cap, 4 * 2**20)  # larger messages are no faster there, and these stay in the cache
        return [(parameters, cap)]

    def _attach(self, bucket):
        bucket.allocate()

    def _parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _device(self):
        """Where parameters are, or are to be made."""
        device, nccl = self._parameters()[0].device, dist.get_backend(self.process_group) == "nccl"
        return device if device.type != "meta" else torch.device("cuda" if nccl else "cpu")


class Zero2(Zero1):
    """Zero1 whose gradients are sharded too: backward reduces each bucket once it is full, and frees its .grad.

    Several backwards before a step add up in the shard; inside no_sync(), whole and unsent in .grad. Gradients are not
    in .grad, so it takes the optimizer's zero_grad(), not the module's, to drop them. Each backward must reach a
    parameter on every rank, not necessarily the same. Source: Rajbhandari et al. 2020, §5.2.
    """

    def __init__(self, *args, **kwargs):
        self._in_backward = False
        self._bucket_of = {}  # parameter -> bucket
        super().__init__(*args, **kwargs)

    def _attach(self, bucket):
        super()._attach(bucket)
        for parameter in bucket.parameters:
            self._bucket_of[parameter] = bucket
            if parameter.is_floating_point():
                trainable = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen parameter takes no hook, but may be unfrozen later
                parameter.register_post_accumulate_grad_hook(weak(self._on_gradient))
                parameter.requires_grad_(trainable)

    @torch.no_grad()
    def _on_gradient(self, parameter):
        """Autograd has added to the .grad of `parameter`."""
        self._start_backward()
        self._ready.add(parameter)
        self._reduce_full()

    def _start_backward(self):
        if not self._in_backward:
            self._in_backward, self._ready = True, set()  # parameters that it is done with
            self._unsent, self._reducing = deque(self._buckets), None
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _reduce_full(self, all_ready=False):
        # Buckets leave by number, not as they fill: ranks that issue them in different orders add the wrong tensors.
        while self._sync and self._unsent:
            trainable = {parameter for parameter in self._unsent[0].parameters if parameter.requires_grad}
            if not all_ready and not trainable <= self._ready:
                break
            bucket = self._unsent.popleft()
            if trainable:
                if self._reducing:
                    self._reducing.finish_reduce()  # at most two whole gradients of a bucket exist at a time
                self._start_reduce(bucket)
                self._reducing = bucket

    def _start_reduce(self, bucket):
        bucket.start_reduce(self.process_group)
        for parameter in bucket.parameters:
            parameter.grad = None

    @torch.no_grad()
    def _finish_backward(self):
        self._reduce_full(all_ready=True)  # also what waits for parameters without a gradient
        if self._reducing:
            self._reducing.finish_reduce()
        self._in_backward = False

    def _forget(self, bucket):
        pass  # until zero_grad(), as a plain .grad would stay

    def zero_grad(self, set_to_none=True):
        self._in_backward = False  # it may have raised
        super().zero_grad(set_to_none)


class State(Enum):
    """Who holds a bucket of parameters: SHARDED: each rank its part; GATHERING: on its way; WHOLE: every rank, all."""

    SHARDED, GATHERING, WHOLE = range(3)


class Zero3(Zero2):
    """Zero2 whose parameters are sharded too, and whole only while a module that needs them runs.

    Gathered as one are the largest modules that hold no list of modules and at most bucket_cap_mb. While one runs, the
    next is gathered in the order seen before. All ranks must run the same modules in the same order, in backward too,
    and modules return tensors, or lists, tuples, dicts or dataclasses of them. Outside of forward and backward a
    parameter has its shape but reads NaN, and must not be written: see full_parameters(). A model too large for one
    rank is made on the meta device.

    Source: Rajbhandari et al. 2020, §5.3 and §7.2.2; prefetch and parameters that others read: 2021, §6.2 and §7.1.
    """

    def __init__(self, module, *args, **kwargs):
        if not isinstance(module, nn.Module):
            raise ValueError("Zero3 takes the module, to gather before its parts run; pass groups as params=[...]")
        self._needs = {}  # module -> the buckets that it runs on
        self._running = []  # for each module that is running, from the outside in, the buckets gathered for it
        self._next = {}  # ("forward" or "backward", bucket) -> the buckets that were gathered after it
        self._last = None  # the newest of its keys
        super().__init__(module, *args, **kwargs)

    def _before_forward(self, module, args, kwargs):
        held = self._enter(self._needs[module], "forward")
        self._running.append(held)
        if torch.is_grad_enabled() and any(not p.requires_grad for bucket in held for p in bucket.parameters):
            # No gradient tells that backward is done with a frozen parameter; those of the module's inputs do.
            inputs = [tensor for tensor in tensors_in([args, kwargs]) if tensor.grad_fn is not None]
            register_multi_grad_hook(inputs, lambda _: self._release(held, "backward"))

    def _after_forward(self, module, args, output):
        held = self._running.pop()
        handed = []  # what it returns a parameter of, or a view of one, is read in the module around it
        if held and self._running:
            tensors = [tensor for tensor in tensors_in(output) if tensor.layout is torch.strided]
            returned = {tensor.untyped_storage()._cdata for tensor in tensors}
            handed = [bucket for bucket in held if bucket.flat.untyped_storage()._cdata in returned]
            self._running[-1].extend(handed)
        if held and torch.is_grad_enabled():  # the module's backward begins with the gradient of an output
            outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            register_multi_grad_hook(outputs, lambda _: self._before_backward(held), mode="any")
        self._release([bucket for bucket in held if bucket not in handed], "forward")
        if not self._running and not self._in_backward:
            self._end_pass("forward")

    def _before_backward(self, buckets):
        self._start_backward()
        self._enter(buckets, "backward")

    def _on_gradient(self, parameter):
        super()._on_gradient(parameter)
        bucket = self._bucket_of[parameter]
        if self._ready.issuperset(bucket.parameters):
            self._release([bucket], "backward")

    def _finish_backward(self):
        super()._finish_backward()
        self._end_pass("backward")

    def _publish(self, bucket):
        return super()._publish(bucket) if bucket.state is State.WHOLE else []

    def _hold(self, buckets, holder):
        for bucket in buckets:
            bucket.start_gather(self.process_group)
        for bucket in buckets:
            bucket.finish_gather()
            bucket.holders.add(holder)

    def _release(self, buckets, holder):
        for bucket in buckets:
            bucket.holders.discard(holder)
            if not bucket.holders:
                bucket.finish_gather()  # it was gathered ahead for a module that did not run this time
                bucket.free()

    @contextmanager
    def full_parameters(self):
        """In here the module has whole parameters, and what is written to them, alike on all ranks, stays."""
        holder = object()
        self._hold(self._buckets, holder)
        try:
            yield
        finally:
            for bucket in self._buckets:
                bucket.adopt()
            self._release(self._buckets, holder)

    def module_state_dict(self):
        """The module's state dict with whole parameters, on every rank, which must all call this.

        To load one: `with optimizer.full_parameters(): module.load_state_dict(state_dict)`.
        """
        with self.full_parameters():
            state_dict = self.module.state_dict()
            state_dict.update((k, v.clone()) for k, v in state_dict.items() if isinstance(v, torch.Tensor))
        return state_dict

    def _refuse_state_dict(self, module, *_):
        buckets = [self._bucket_of[p] for p in module._parameters.values() if p in self._bucket_of]  # a copy has others
        if any(bucket.state is not State.WHOLE for bucket in buckets):
            raise RuntimeError("this module's parameters are sharded: call the optimizer's module_state_dict() instead")

    # ---- Refinements. Gather ahead, in the order seen the last time:

    def _enter(self, buckets, holder):
        """Hold those of `buckets` that this pass, "forward" or "backward", does not hold yet; -> those."""
        buckets = [bucket for bucket in buckets if holder not in bucket.holders]
        self._hold(buckets, holder)
        # A forward inside backward recomputes what a checkpoint dropped: what comes next then is not next in forward.
        if buckets and not (holder == "forward" and self._in_backward):
            self._next[self._last] = buckets
            self._last = (holder, buckets[0])
            for bucket in self._next.get(self._last, ()):
                bucket.start_gather(self.process_group)
        return buckets

    def _end_pass(self, holder):
        self._last = None
        self._release(self._buckets, holder)

    # ---- Parameters that a module reads which are not its own: nn.MultiheadAttention does, and shared weights.

    def _on_read(self, parameter):
        if self._running and parameter in self._bucket_of:
            self._running[-1].extend(self._enter([self._bucket_of[parameter]], "forward"))

    # ---- Set-up: units, and hooks on the modules that need them.

    def _units(self, parameters):
        self._unit_of, units = units_of(self.module, self.bucket_cap_mb * 2**20), defaultdict(list)
        if any(parameter not in self._unit_of for parameter in parameters):
            raise ValueError("Zero3 gathers parameters when their modules run: all must be parameters of its module")
        for parameter in parameters:
            units[self._unit_of[parameter]].append(parameter)
        return [(unit, math.inf) for unit in units.values()]

    def _attach(self, bucket):
        super()._attach(bucket)
        bucket.shard = bucket.own.clone()
        bucket.free()

    def _shard(self, groups):
        super()._shard(groups)
        needs = defaultdict(dict, {self.module: {}})
        for module in self.module.modules():
            for parameter in module._parameters.values():
                if parameter in self._bucket_of:
                    bucket = self._bucket_of[parameter]
                    needs[self._unit_of[parameter]][bucket] = needs[module][bucket] = True
        for module in needs.keys() - self._needs.keys():
            module.register_forward_pre_hook(weak(self._before_forward), with_kwargs=True, prepend=True)
            module.register_forward_hook(weak(self._after_forward), always_call=True)
            module._parameters = WatchedParameters(module._parameters)
            module._parameters.on_read = weak(self._on_read)
            module.register_state_dict_pre_hook(weak(self._refuse_state_dict))
        self._needs = needs


# ---------------------------------------------------------------------------------------------------------------------
# 3. What moves.


class Bucket:
    """Some parameters of one group and dtype side by side in `flat`, padded so that each rank owns an equal part."""

    WAITS = 2  # as a flag of a parameter: its .grad is not reduced yet; 1: it is, in grad_sum; 0: there is none

    def __init__(self, group, parameters, keys, N, rank):
        self.group, self.parameters, dtype = group, parameters, parameters[0].dtype  # the number of the group
        self.offsets, self.size = lay_out(parameters, N)
        self.N, self.begin = N, rank * self.size
        self.strides = [torch.empty_like(p, device="meta").stride() for p in parameters]  # kept where without gaps
        self.wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype  # the master weights'
        self.keys = keys if self.wide == dtype else [*keys, "master"]  # names of the state that is sharded
        # In 16 bits divide before the sum: N fp16 gradients overflow at 65504. Else after it, as one device.
        self.divisor_before, self.divisor = (1, N) if self.wide == dtype else (N, 1)
        self.grad_sum = None  # this rank's part of the gradients, added over ranks and backwards
        self.used = [False] * len(parameters)  # which parameters have a gradient in it
        self.reducing = self.gathering = None  # what to wait for, with the memory that it uses
        self.state, self.holders = State.WHOLE, set()  # Zero3's: why it is whole

    def allocate(self):
        first, end = self.parameters[0], self.begin + self.size
        self.flat = first.new_zeros(self.N * self.size)
        self.views = self.views_into(self.flat)
        self.own = self.shard = self.flat[self.begin : end]  # shard: what stays of it with Zero3
        self.pieces = overlaps(self.offsets, [p.numel() for p in self.parameters], self.begin, end)
        self.placeholder = first.new_full((), math.nan if first.is_floating_point() else 0)
        self.adopt()

    def views_into(self, flat):
        layout = zip(self.parameters, self.strides, self.offsets, strict=True)
        return [flat.as_strided(p.shape, stride, offset) for p, stride, offset in layout]

    # ---- Gradients

    def flags(self):
        for grad, used in zip((p.grad for p in self.parameters), self.used, strict=True):
            waits = grad is not None and (self.grad_sum is None or getattr(grad, "reduced_at", None) != grad._version)
            yield Bucket.WAITS if waits else int(used)

    def start_reduce(self, process_group):
        """Put the .grad side by side, and send each rank its part."""
        filled = self.flat.new_empty(self.flat.shape)
        for slot, view in enumerate(self.views_into(filled)):
            grad = self.parameters[slot].grad
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad / self.divisor_before if self.divisor_before > 1 else grad)
                self.used[slot], grad.reduced_at = True, grad._version
        self.reducing = (*start_reduce_scatter(filled, process_group), filled)

    def finish_reduce(self):
        """Add the ranks' parts to grad_sum, in rank order: the same sum wherever the parts come from."""
        if self.reducing:
            works, parts, _ = self.reducing
            for work in works:
                work.wait()
            first, *rest = parts if self.grad_sum is None else [self.grad_sum, *parts]
            self.grad_sum, self.reducing = sum(rest, first.to(self.wide)).to(self.flat.dtype), None
            self.grad_changed()

    def scale_gradients(self, factor):
        """Also those that a rank has whole (Zero1), which are reduced again once a backward has added to them."""
        self.grad_sum.mul_(factor)
        self.grad_changed()
        for grad in (p.grad for p in self.parameters if p.grad is not None):
            grad.mul_(factor)

    def grad_changed(self):
        """Where the update is on another device, its copy of grad_sum begins here."""

    def forget(self):
        self.grad_sum, self.used = None, [False] * len(self.parameters)

    # ---- Update

    def make_optimizer(self, make, group, state):
        self.make_master()
        self.pieces = [(slot, here, self.master[here]) for slot, here in self.pieces]
        self.segments = [segment for *_, segment in self.pieces]
        self.optimizer = make([{**group, "params": self.segments}])
        self.keep_state(state)

    def make_master(self):
        """The weights that the optimizer updates."""
        self.master = self.shard.to(self.wide)  # itself, where it has that dtype

    def step(self, group, state):
        """Update this rank's part by the mean gradient."""
        self.adopt()
        if self.master is not self.shard:
            current = self.shard.to(self.master.device)  # where somebody has overwritten it, so is the master
            same = self.master.to(current.dtype) == current
            self.master.copy_(torch.where(same, self.master, current))
        mean = self.grad_sum.to(self.wide)
        mean = mean / self.divisor if self.divisor > 1 else mean
        for slot, here, segment in self.pieces:
            segment.grad = mean[here] if self.used[slot] else None
        # A scheduler may have set another lr in the group.
        self.optimizer.param_groups[0].update({**group, "params": self.segments})
        if self.pieces:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.master is not self.shard:
            self.shard.copy_(self.master, non_blocking=True)
        self.keep_state(state)

    def keep_state(self, state):
        """Keep the optimizer's state in `state`, which all buckets share."""
        if self.optimizer.state is not state:
            state.update(self.optimizer.state)
            self.optimizer.state = state

    # ---- Parameters

    @torch.no_grad()
    def adopt(self):
        """Take over what the parameters hold now, perhaps in other memory, as after `parameter.data = ...`."""
        if self.state is State.WHOLE:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                    kinds = f"{view.dtype} on {view.device} to {parameter.dtype} on {parameter.device}"
                    raise RuntimeError(f"a parameter went from {kinds}; make the optimizer after module.to()")
                if parameter.data_ptr() != view.data_ptr() or view.is_meta:
                    view.copy_(parameter)
                    parameter.data = view
            if self.shard is not self.own:
                self.shard.copy_(self.own)

    def free(self):
        if self.state is State.WHOLE:
            # Views that autograd saved keep the storage, so it is emptied: gathered again, they see the same values.
            self.flat.untyped_storage().resize_(0)
            for parameter in self.parameters:
                parameter.data = self.placeholder.expand(parameter.shape)
            self.state = State.SHARDED

    @torch.no_grad()
    def start_gather(self, process_group):
        if self.state is State.SHARDED:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self.gathering = start_all_gather(self.flat, self.shard, process_group)
            self.state = State.GATHERING

    def finish_gather(self):
        if self.state is State.GATHERING:
            for work in self.gathering:
                work.wait()
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.data = view
            self.state = State.WHOLE

    # ---- State dicts

    def state_here(self):
        """-> {number of a parameter: {name: value, or None if it is sharded}}, {name: this rank's part of it}"""
        entries, parts = {}, {}
        for slot, here, segment in self.pieces:
            entry = dict(self.optimizer.state.get(segment, {}))
            # Without other state it is the parameter itself, and Adam takes a state that is not empty for a whole one.
            if "master" in self.keys and (entry or len(self.keys) == 1):
                entry["master"] = segment
            for key, value in entry.items():
                if has_shape(value, segment.shape):
                    parts.setdefault(key, torch.zeros(self.size, dtype=self.wide))[here], entry[key] = value, None
            if entry:
                entries[slot] = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in entry.items()}
        return entries, parts

    def load_state(self, whole, group, state):
        """Take this rank's part of {parameter: {name: whole value}}."""
        # Other options than ours were may have left other state. (The shape of a scalar's does not tell.)
        found = {k for p in self.parameters for k, v in whole[p].items() if p.dim() and has_shape(v, p.shape)}
        whole, mine, parts = [whole[parameter] for parameter in self.parameters], {}, {}
        for key in {*self.keys, "master", *found}:
            flat = torch.zeros(self.N * self.size, dtype=self.wide, device=self.master.device)
            for view, entry in zip(self.views_into(flat), whole, strict=True):
                view.copy_(entry.get(key, view))
            parts[key] = flat[self.begin : self.begin + self.size]
        for number, (slot, here, segment) in enumerate(self.pieces):
            # Copies: a view keeps the whole alive, and the optimizer counts steps in place.
            mine[number] = {
                k: parts[k][here].clone() if k in parts else copy.deepcopy(v) for k, v in whole[slot].items()
            }
            segment.copy_(mine[number].pop("master", segment))
        self.optimizer.load_state_dict({"state": mine, "param_groups": [{**group, "params": [*mine]}]})
        self.keep_state(state)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Offload.


class OffloadedBucket(Bucket):
    """Whose master weights and optimizer state are in host memory, or in a file that is mapped into it."""

    def state_bytes(self):
        """In whole pages, so that the kernel can let go of this bucket's alone."""
        return -(-len({*self.keys, "master"}) * self.size * self.wide.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE

    def make_master(self):
        self.master = self.shard.to("cpu", self.wide)
        if self.flat.is_cuda:
            self.master, self.stream = self.master.pin_memory(), torch.cuda.Stream(self.flat.device)
            self.host = torch.empty(self.shard.shape, dtype=self.flat.dtype, pin_memory=True)
        if self.file:
            names = dict.fromkeys(["master", *self.keys])
            state = torch.frombuffer(self.file, dtype=self.wide, count=len(names) * self.size, offset=self.begins_at)
            self.rows = dict(zip(names, state.split(self.size), strict=True))
            self.master = self.rows["master"].copy_(self.shard)

    def grad_changed(self):
        """From a GPU, copy the reduced gradient to the host, beside what the GPU is doing."""
        if self.flat.is_cuda:
            self.stream.wait_stream(torch.cuda.current_stream(self.flat.device))
            with torch.cuda.stream(self.stream):
                self.host.copy_(self.grad_sum, non_blocking=True)
            self.grad_sum.record_stream(self.stream)

    def step(self, group, state):
        on_device = self.grad_sum
        if self.flat.is_cuda:
            self.stream.synchronize()
            self.grad_sum = self.host
        super().step(group, state)
        self.grad_sum = on_device

    def keep_state(self, state):
        """Also move what the optimizer has made in memory to the file, and let go of the file's pages."""
        super().keep_state(state)
        if self.file:
            for _, here, segment in self.pieces:
                for key, row in self.rows.items():
                    value = state.get(segment, {}).get(key)
                    if value is not None and value.data_ptr() != row[here].data_ptr():
                        state[segment][key] = row[here].copy_(value)
            # They stay in the file, and are read from it again.
            self.file.madvise(mmap.MADV_DONTNEED, self.begins_at, self.state_bytes())


def map_file(directory, size):
    """-> memory in a new file of `size` bytes in `directory`: without a name, so that it is gone, whatever happens.

    One for all buckets: a process may open but so many.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if size > free:
            need = f"this rank's optimizer state takes {size} bytes and {free} are free"
            raise OSError(errno.ENOSPC, f"{need}; use another directory or more ranks")
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # macOS has none
                # Claim the blocks now: where a disk fills up under a mapped page, the kernel kills the process.
                os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise OSError(error.errno, f"offload={str(directory)!r}: {error.strerror}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the above.


def lay_out(parameters, N):
    """-> offsets of the parameters in their bucket, and the elements in each rank's part.

    They begin at multiples of 64 bytes, as if allocated alone: elsewhere some kernels are slower or round otherwise.
    """
    offsets, end = [], 0
    for parameter in parameters:
        step = 64 // parameter.itemsize
        offsets.append(-(-end // step) * step)
        end = offsets[-1] + parameter.numel()
    return offsets, max(1, -(-end // N))  # no collective may be empty


def overlaps(offsets, numels, begin, end):
    """Which parts of the tensors of these sizes at these offsets are in [begin, end).

    -> [(number of the tensor, where in [begin, end))]. An empty tensor is everywhere, so that an optimizer sees it.
    """
    found = []
    for number, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        low, high = max(offset, begin), min(offset + numel, end)
        if low < high:
            found.append((number, slice(low - begin, high - begin)))
        elif numel == 0:
            found.append((number, slice(0, 0)))
    return found


def elementwise_state(make_optimizer, options, device=None):
    """The names of what the optimizer keeps for each element, such as "exp_avg".

    Raises ValueError when it does not do to the parts of a matrix what it does to the whole, as ZeRO needs it to.
    """
    options = {**options, "lr": 0.1} if "lr" in options else options  # a warm-up begins with 0
    whole, reason = torch.linspace(-1, 1, 24, device=device).view(4, 6), None
    parts = [part.clone() for part in whole.flatten().split([5, 19])]
    on_whole = make_optimizer([{**options, "params": [whole]}])
    try:
        on_parts = make_optimizer([{**options, "params": parts}])
        for step in range(3):
            whole.grad = torch.sin(torch.arange(24.0, device=device) * (step + 1)).view(4, 6)
            parts[0].grad, parts[1].grad = (gradient.clone() for gradient in whole.grad.flatten().split([5, 19]))
            on_whole.step()
            on_parts.step()
        if torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-4, atol=1e-6):
            state = on_whole.state[whole].items()
            return [key for key, value in state if has_shape(value, whole.shape)]
    except Exception as error:
        reason = error
    raise ValueError(
        f"{type(on_whole).__name__} needs whole parameters, and ZeRO gives it parts: 24 numbers, as a 4 × 6 matrix "
        f"and as parts of 5 and 19, are updated differently{f' ({reason})' if reason else ''}. Use an elementwise "
        "optimizer, such as SGD, Adam or AdamW"
    ) from reason


def has_shape(value, shape):
    return isinstance(value, torch.Tensor) and value.shape == shape


def units_of(module, cap_bytes):
    """{parameter: the module that Zero3 gathers it for}: one that fits, or `module` itself if several such have it."""
    units = {}

    def visit(inner, around):
        if type(inner).forward is not nn.Module.forward:  # a list is never called, so nothing gathers it
            around = inner
        lists = any(isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict) for part in inner.modules())
        fits = not lists and sum(parameter.nbytes for parameter in inner.parameters()) <= cap_bytes
        whole = fits and inner is not module
        for parameter in inner.parameters(recurse=whole):
            units[parameter] = module if parameter in units else around
        for child in () if whole else inner.children():
            visit(child, around)

    visit(module, module)
    return units


def make(module, wanted, device):
    """Give those modules in it that are on the meta device, and have `wanted` parameters or none, initial values."""

    def visit(inner):
        own = {parameter for parameter in inner._parameters.values() if parameter is not None}
        if is_unmade(inner) and not (own and own.isdisjoint(wanted)):
            for parameter in own:
                if parameter.is_meta:  # the same object from here on, for those who have it
                    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                    torch.utils.swap_tensors(parameter, made)
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    inner._buffers[name] = torch.empty_like(buffer, device=device)
            reset_of(inner)()

    module.apply(visit)  # children first: the order in which constructors draw random numbers


def is_unmade(module):
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def reset_of(module):
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


class WatchedParameters(dict):
    """A module's parameters by name, which tells Zero3 of each that is read."""

    def __getitem__(self, name):
        self.on_read(super().__getitem__(name))
        return super().__getitem__(name)


def weak(method):
    """A hook that calls `method`, but does not keep its object alive: a discarded optimizer would go on reducing."""
    method = weakref.WeakMethod(method)
    return lambda *args: method()(*args) if method() else None


def gathered(part, process_group):
    """All ranks' parts, in rank order."""
    whole = part.new_empty(dist.get_world_size(process_group) * part.numel())
    for work in start_all_gather(whole, part, process_group):
        work.wait()
    return whole


def is_gloo(device, process_group):
    """Whether it carries the tensors on `device`: a group may have another backend for another device."""
    return f"{device.type}:gloo" in dist.get_backend_config(process_group)


def start_reduce_scatter(flat, process_group):
    """Send part r of `flat` to rank r. -> what to wait for, and the parts that add up to this rank's sum."""
    N, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if is_gloo(flat.device, process_group):  # its reduce-scatter is an all-reduce inside, in an order of its own
        if flat.is_cuda:
            received = torch.empty_like(flat)
            return [dist.all_to_all_single(received, flat, group=process_group, async_op=True)], received.chunk(N)
        received = [part if r == rank else torch.empty_like(part) for r, part in enumerate(flat.chunk(N))]
        return start_exchange(flat.chunk(N), received, process_group), received
    received = flat.new_empty(flat.numel() // N)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return [reduce_scatter(received, flat, group=process_group, async_op=True)], [received]


def start_all_gather(whole, shard, process_group):
    """Fill `whole` with all ranks' shards in rank order. -> what to wait for."""
    N, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if is_gloo(whole.device, process_group) and not whole.is_cuda:  # half the time of its all-gather
        parts = whole.chunk(N)
        if parts[rank].data_ptr() != shard.data_ptr():
            parts[rank].copy_(shard)
        return start_exchange([shard] * N, parts, process_group)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return [all_gather(whole, shard, group=process_group, async_op=True)]


def start_exchange(sent, received, process_group):
    """Send sent[r] to each other rank r, and fill received[r] from it. -> what to wait for."""
    N, rank, transfers = dist.get_world_size(process_group), dist.get_rank(process_group), []
    for distance in range(1, N):
        to, source = (rank + distance) % N, (rank - distance) % N
        peers = (dist.get_global_rank(process_group, r) for r in (to, source))
        transfers.append(dist.P2POp(dist.isend, sent[to], next(peers), process_group))
        transfers.append(dist.P2POp(dist.irecv, received[source], next(peers), process_group))
    return dist.batch_isend_irecv(transfers) if transfers else []


def assign_buckets(tensors, cap_bytes):
    """Positions in `tensors`, last first, in buckets of one dtype and device that close at `cap_bytes` or more."""
    buckets, filling = [], {}
    for position in reversed(range(len(tensors))):
        kind = (tensors[position].dtype, tensors[position].device)
        if kind not in filling:
            buckets.append([])
            filling[kind] = (buckets[-1], 0)
        bucket, size = filling[kind]
        bucket.append(position)
        filling[kind] = (bucket, size + tensors[position].nbytes)
        if filling[kind][1] >= cap_bytes:
            del filling[kind]
    return buckets


def broadcast(tensors, process_group, src=0):
    """Overwrite `tensors` with those of the group's rank `src`, about 25 MiB at a time."""
    src = dist.get_global_rank(process_group, src)
    tensors = [tensor.data for tensor in tensors]  # not a new version: a running graph may have saved the buffer
    for positions in assign_buckets(tensors, 25 * 2**20):
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        dist.broadcast(flat.view(torch.uint8), src, group=process_group)  # as bytes: gloo has no int16, no float8
        if dist.get_rank() != src:
            for i, values in zip(positions, flat.split([tensors[i].numel() for i in positions]), strict=True):
                tensors[i].copy_(values.view_as(tensors[i]))


def verify_same_model(named_states, process_group, problem=None):
    """On every rank, raise any rank's `problem`, or a ValueError where a state is not like rank 0's.

    Left alone, an all-reduce of two sizes aborts the process, and one of two dtypes adds garbage.
    """
    mine = [f"{n!r}: shape {tuple(s.shape)}, {s.dtype}, requires_grad={s.requires_grad}" for n, s in named_states]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, (problem, mine), group=process_group)
    for rank, (their_problem, theirs) in enumerate(everyone):
        if their_problem:
            raise their_problem
        for first, other in itertools.zip_longest(everyone[0][1], theirs, fillvalue="nothing more"):
            if first != other:
                raise ValueError(f"ranks must hold the same model, but rank 0 has {first}; rank {rank} has {other}")


def tensors_in(output):
    """The tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif dataclasses.is_dataclass(output):
        yield from tensors_in([getattr(output, field.name) for field in dataclasses.fields(output)])


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo(bitwise=2**20)  # at any number of ranks
    psi, N, status = held_bytes(demo.model.parameters()), demo.ranks, 0
    rows = ["stage   params    grads     optimizer   sent/step   time/step   bytes per parameter, bf16 with AdamW"]
    for stage, passes, paper in ((Zero1, 2, 4 + 12 / N), (Zero2, 2, 2 + 14 / N), (Zero3, 3, 16 / N)):
        demo.reset()
        model = copy.deepcopy(demo.model)
        optimizer = stage(model, torch.optim.AdamW, bucket_cap_mb=2, lr=1e-3)

        def step(inputs, targets, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = language_loss(model(inputs.chunk(demo.ranks)[demo.rank]), targets.chunk(demo.ranks)[demo.rank])
            loss.backward()
            optimizer.step()
            return loss

        def state(model=model, optimizer=optimizer):
            with optimizer.full_parameters() if isinstance(optimizer, Zero3) else nullcontext():
                return optimizer.full_gradients(), [parameter.detach().clone() for parameter in model.parameters()]

        demo.train(step, state)
        holds, formula = held_by(optimizer), f"{passes}Ψ(N-1)/N"
        status |= demo.report(stage.__name__.lower(), holds, formula, passes * psi * (N - 1) / N)
        demo.show("")
        row = "   ".join([stage.__name__, *(f"{n / 1e6:4.1f} MB" for n in holds), f"  {demo.sent / 1e6:5.1f} MB"])
        memory = f"{bytes_per_parameter(demo, stage):.2f} (paper, N = {N}: {paper:.2f})"
        rows.append(f"{row}    {1e3 * statistics.median(demo.times):5.0f} ms    {memory}")
    demo.show("\n".join(rows))
    demo.leave(status)


def held_by(optimizer):
    """Bytes of parameters, gradients and optimizer state, master weights included, that this rank holds."""
    buckets = optimizer._buckets
    shards = [bucket.flat for bucket in buckets] + [bucket.shard for bucket in buckets]
    masters = [bucket.master for bucket in buckets if bucket.master is not bucket.shard]
    gradients = [p.grad for p in optimizer._parameters()] + [bucket.grad_sum for bucket in buckets]
    state = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor)]
    return held_bytes(shards), held_bytes([g for g in gradients if g is not None]), held_bytes(masters + state)


def bytes_per_parameter(demo, stage):
    """Measured after a backward and a step of the demo's model in bf16."""
    model = copy.deepcopy(demo.model).bfloat16()
    optimizer = stage(model, torch.optim.AdamW, bucket_cap_mb=2, lr=1e-3)
    inputs, targets = (tokens.chunk(demo.ranks)[demo.rank] for tokens in demo.batch(0))
    language_loss(model(inputs), targets).backward()
    optimizer.step()
    return sum(held_by(optimizer)) / sum(parameter.numel() for parameter in demo.model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model, in this world and on one device. The same text in every file.


class Embed(nn.Module):
    """(B, T) integers to (B, T, C): token plus position. B batch, T time, C channels, V vocabulary."""

    def __init__(self, V, T, C):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)

    def forward(self, tokens_BT):
        return self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """(B, T, C) to (B, T, C): causal self-attention and MLP, each after a norm and around a residual."""

    def __init__(self, C, heads):
        super().__init__(C, heads, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x_BTC):
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1], x_BTC.device, x_BTC.dtype)
        return super().forward(x_BTC, src_mask=mask, is_causal=True)


def language_model(C=192, heads=6, layers=4, T=64, V=256):
    """A causal transformer over bytes: (B, T) integers to (B, T, V) logits."""
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(Embed(V, T, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends: to single ranks, and in collectives by their ring algorithms."""

    # operator: (position of its payload, how often each byte goes around the ring)
    RING = {"allreduce_": (0, 2), "broadcast_": (0, 1), "_allgather_base_": (0, 1)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in self.RING:
            position, rounds = self.RING[name]
            N = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            self.total += rounds * (N - 1) / N * sum(tensor.nbytes for tensor in tree_leaves(args[position]))
        elif name == "send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(parameters, optimizer):
    """Bytes that parameters, gradients and optimizer state hold on this rank."""
    parameters = list(parameters)
    state = [tensor for tensor in tree_leaves(list(optimizer.state.values())) if isinstance(tensor, torch.Tensor)]
    return held_bytes(parameters), held_bytes([p.grad for p in parameters if p.grad is not None]), held_bytes(state)


class Demo:
    """Joins the world, trains a technique and the same model on one device side by side, compares, and prints.

    One device accumulates the batch in `parts` (None: one per rank). Up to `bitwise` ranks on the CPU the two must be
    bitwise equal in float32; else the demo runs in float64, and they must be within 1e-9.
    """

    T = 64  # tokens in a sequence

    def __init__(self, bitwise=0, parts=None, add_arguments=lambda parser: None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--steps", type=int, default=30)
        parser.add_argument("--batch-size", type=int, help="sequences per step, over all ranks (default: 8 per rank)")
        parser.add_argument("--data", metavar="FILE", help="text to train on (default: the standard library's source)")
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument("--seed", type=int, default=0)
        add_arguments(parser)
        self.args = parser.parse_args()
        self.join_world()
        self.parts = parts or self.ranks
        self.batch_size = 8 * self.ranks if self.args.batch_size is None else self.args.batch_size
        problem = self.read_text(self.args.data)
        if self.args.steps < 1:
            problem = f"--steps {self.args.steps}: at least 1"
        if self.batch_size < 1 or self.batch_size % self.parts:
            problem = f"--batch-size {self.batch_size}: must be a multiple of {self.parts}, to share it out evenly"
        if self.args.device == "cuda" and self.device.type == "cpu":
            problem = "--device cuda: torch sees no GPU"
        self.stop_if(problem)
        self.bitwise = self.ranks <= bitwise and self.device.type == "cpu"
        self.reset()

    def reset(self):
        """Make the model on one device anew, the same on every rank."""
        torch.manual_seed(self.args.seed)
        self.model = language_model(T=self.T).to(self.device, torch.float32 if self.bitwise else torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def join_world(self):
        """As torchrun says, or as a world of one."""
        # Imported after init_process_group (torch.optim does so), its default arguments would keep the group for ever:
        # destroy_process_group() would not end gloo's threads, which now and then abort the process at its exit.
        import torch.distributed.nn.functional

        gpus = torch.cuda.device_count() if self.args.device != "cpu" else 0
        self.device, backend = torch.device("cpu"), "gloo"
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            torch.cuda.set_device(self.device)
            backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"  # NCCL: a GPU each
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def read_text(self, path):
        files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            return f"--data {path}: {error.strerror}"
        if len(text) <= self.T:
            return f"--data {path}: {len(text)} bytes; one sequence and its targets take {self.T + 1}"
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return None

    def stop_if(self, problem):
        """When any rank has a problem, rank 0 prints it, and all ranks exit with status 2."""
        problems = [None] * self.ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.show(f"error: {next(filter(None, problems))}", file=sys.stderr)
            self.leave(2)

    def leave(self, status):
        dist.barrier()  # who leaves early breaks the others' connections
        dist.destroy_process_group()
        sys.exit(status)

    def show(self, text, **kwargs):
        if self.rank == 0:
            print(text, flush=True, **kwargs)

    def batch(self, step):
        """Inputs and targets of all ranks, (B, T) each."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + step)
        starts = torch.randint(len(self.text) - self.T, (self.batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(self.T + 1)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, inputs, targets):
        """Accumulate the gradients of the parts, in rank order; -> their losses."""
        self.optimizer.zero_grad()
        losses = []
        for part, part_targets in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(part), part_targets)
            loss.backward()
            losses.append(loss.item())
        for parameter in self.model.parameters():
            parameter.grad /= self.parts  # after the sum: before it, at 3 parts, rounds differently
        self.optimizer.step()
        return losses

    def train(self, step, state):
        """`step(inputs, targets)` trains on the global batch, -> the loss of this rank's part.
        `state()` -> gradients, parameters: whole, in the order of the plain model."""
        self.losses, self.times, self.times_one_device = [], [], []
        self.largest = dict.fromkeys(("loss", "gradient", "parameter"), 0.0)
        for number in range(self.args.steps):
            batch, sent = self.batch(number), SentBytes()
            start = time.perf_counter()
            with sent if number == 0 else nullcontext():  # counting takes time
                loss = step(*batch).item()
            self.times.append(time.perf_counter() - start)
            self.sent = sent.total or (self.sent if number else 0.0)
            start = time.perf_counter()
            losses = self.step_on_one_device(*batch)
            self.times_one_device.append(time.perf_counter() - start)
            self.losses.append(statistics.mean(losses))
            gradients, parameters = state()
            self.compare("loss", [loss], [losses[self.rank % self.parts]])
            self.compare("gradient", gradients, [parameter.grad for parameter in self.model.parameters()])
            self.compare("parameter", parameters, self.model.parameters())
            if sys.stderr.isatty():
                self.show(f"\rstep {number + 1}/{self.args.steps}\r", end="", file=sys.stderr)

    def compare(self, what, ours, plain):
        for a, b in zip(map(torch.as_tensor, ours), map(torch.as_tensor, plain), strict=True):
            difference = 0.0 if torch.equal(a, b) else (a - b).abs().max().item()
            self.largest[what] = max(self.largest[what], math.inf if math.isnan(difference) else difference)

    def report(self, name, held_here, formula, sent):
        """Print what every demo prints; -> the exit status, 1 when a rank differs from one device."""
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, self.largest)
        largest = {what: max(rank[what] for rank in everyone) for what in self.largest}
        tolerance = 0.0 if self.bitwise else 1e-9
        agree = max(largest.values()) <= tolerance
        verdict = ", ".join(f"max |Δ{what}| {difference:.1e}" for what, difference in largest.items())
        verdict += f", {'' if agree else 'NOT '}equal within {tolerance:g}{'' if self.bitwise else ' in float64'}"
        if not any(largest.values()):
            verdict = f"loss, gradients and parameters bitwise equal over {self.args.steps} steps"
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        size = f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f}M parameters"
        ms, ms_one_device = (1e3 * statistics.median(times) for times in (self.times, self.times_one_device))
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} · {self.device.type}/{dist.get_backend()}"
        self.show(f"{name} · {world} · {size} · {self.args.steps} steps")
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})")
        self.show(f"sent/rank   {self.sent / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {ms_one_device:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    main()

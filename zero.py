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
Left out: parameters offloaded, loss scaling (amp.py), sparse gradients. Sharded weights under any optimizer: fsdp.py
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
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
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
            Parameters and buffers are overwritten with those of the group's rank 0. Do not wrap it in DDP.
        optimizer_class: any elementwise optimizer; `optimizer_kwargs` are its arguments.
        process_group: the ranks that share the work (None: the default group).
        offload: "cpu" keeps optimizer state and master weights in host memory and updates there; a directory keeps
            them in files there, mapped into memory.
        bucket_cap_mb: a bucket closes once it holds this many MiB; the largest module that Zero3 gathers at once.
        params: parameter groups, when they are not all of module.parameters() with the same options.

    16-bit parameters get fp32 master weights, which state_dict() has as "master". Parameters may be overwritten
    between steps (not Zero3's: see full_parameters). They skip a step when no rank has a gradient for them.

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
        self._make_optimizer = lambda params: optimizer_class(params, **optimizer_kwargs)
        self._buckets = []  # in the order in which backward fills them
        self._keys = []  # names of the state that is sharded
        if params is None:
            params = module.parameters() if self.module else module
        super().__init__(params, self._make_optimizer([torch.zeros(4, 6)]).defaults)
        self._shard(range(len(self.param_groups)))
        if self.module:
            broadcast(list(self.module.buffers()), self.process_group)

    process_group = property(lambda self: self._process_group())

    @torch.no_grad()
    def step(self, closure=None):
        """Reduce what gradients are not reduced yet, update this rank's part, gather the others'. -> closure()"""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathers = []
        for bucket in self._reduced():
            self._update(bucket)
            gathers += self._publish(bucket)
            self._forget_reduced(bucket)
        for work in gathers:
            work.wait()
        return loss

    def _reduced(self):
        """Yield each bucket that has gradients when they are reduced, with those of the next one on their way."""
        # Which parameters have a gradient may differ between ranks, and what is sent must not: agree first.
        flags = torch.tensor([flag for bucket in self._buckets for flag in bucket.flags()], dtype=torch.uint8)
        flags = flags.to(self._device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        flags, unreduced = iter(flags.tolist()), []
        for bucket in self._buckets:
            here = [next(flags) for _ in bucket.parameters]
            bucket.used = [flag > 0 for flag in here]
            if Bucket.UNREDUCED in here:
                unreduced.append(bucket)
        ahead = iter(unreduced)
        self._start_reduce(next(ahead, None))
        for bucket in self._buckets:
            if bucket in unreduced:
                self._start_reduce(next(ahead, None))
                self._finish_reduce(bucket)
            if any(bucket.used):
                yield bucket

    def _start_reduce(self, bucket):
        """Send each rank its part of this rank's gradients. They stay in .grad, and have all that has been added."""
        if bucket is not None:
            bucket.grad_sum = None
            bucket.fill(self.N)
            bucket.reducing = start_reduce_scatter(bucket.filled, self.process_group)

    def _finish_reduce(self, bucket):
        if bucket is not None and bucket.reducing:
            works, parts = bucket.reducing
            for work in works:
                work.wait()
            bucket.add(parts)
            bucket.reducing = bucket.filled = None

    def _forget_reduced(self, bucket):
        bucket.forget()  # .grad still has the gradients

    def _update(self, bucket):
        self._take_over(bucket)
        options = self._options(self.param_groups[bucket.group])
        bucket.optimizer.param_groups[0].update(options)  # a scheduler may have set another lr
        bucket.step(self.N)

    def _take_over(self, bucket):
        """Use what the parameters hold now, wherever that is."""
        bucket.adopt()

    def _publish(self, bucket):
        """Start to send the updated part to all; -> what to wait for."""
        return start_all_gather(bucket.flat, bucket.shard, self.process_group)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
            if set_to_none or bucket.grad_sum is None:
                bucket.forget()
            else:
                bucket.grad_sum.zero_()

    @contextmanager
    def no_sync(self):
        """Backwards in here only add to .grad, as those of Zero1 always do."""
        yield

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
            raise ValueError(f"norm_type is {norm_type}; it must be positive (padding has the norm 0) or inf")
        buckets = list(self._reduced())
        norms = [torch.zeros((), device=self._device(), dtype=self._buckets[0].master.dtype if self._buckets else None)]
        for bucket in buckets:
            mean = bucket.mean(self.N)
            for slot, begin, end, _ in bucket.pieces:
                if begin < end and counted(bucket.parameters[slot]):
                    norms.append(torch.linalg.vector_norm(mean[begin:end], norm_type).to(norms[0]))
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for group in (self.process_group, *process_groups):
            everyone = total.new_empty(dist.get_world_size(group))
            for work in start_all_gather(everyone, total[None], group):
                work.wait()
            total = torch.linalg.vector_norm(everyone, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {total}, so they cannot be clipped")
        for bucket in buckets:
            bucket.grad_sum.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).to(bucket.grad_sum.device))
            bucket.copy_to_host()
        return total

    @torch.no_grad()
    def full_gradients(self):
        """The whole mean gradient of each parameter (None: unused), gathered, to look at. All ranks must call it."""
        gradients = {}
        for bucket in self._reduced():
            whole = self._gather(bucket.mean(self.N))
            for p, used, view in zip(bucket.parameters, bucket.used, bucket.views_into(whole), strict=True):
                gradients[p] = view.to(p.dtype, copy=True) if used else None
            self._forget_reduced(bucket)
        return [gradients.get(p) for p in self._parameters()]

    # ---- Whole state in, whole state out: no file tells at how many ranks it was written.

    def state_dict(self):
        """What the plain optimizer over the same parameters would return, on every rank, which must all call this."""
        local, self.state = self.state, self._whole_state()
        try:
            return super().state_dict()  # packs self.state
        finally:
            self.state = local

    @torch.no_grad()
    def _whole_state(self):
        parameters = self._parameters()
        numbers = {p: number for number, p in enumerate(parameters)}
        # A rank has state of the parameters in its part. Exchange what there is: the dtype of what is sharded, and the
        # values of what is not (step counts).
        mine = {}
        for bucket in self._buckets:
            for (slot, *_), segment in zip(bucket.pieces, bucket.segments, strict=True):
                mine[numbers[bucket.parameters[slot]]] = {
                    key: value if not isinstance(value, torch.Tensor) else value.dtype if value.dim() else value.cpu()
                    for key, value in self._state_of(bucket, segment).items()
                }
        everyone = [None] * self.N
        dist.all_gather_object(everyone, mine, group=self.process_group)
        known = {number: entry for theirs in everyone for number, entry in theirs.items()}
        state = {p: known[number] for number, p in enumerate(parameters) if known.get(number)}
        for bucket in self._buckets:
            entries = [state.get(p, {}) for p in bucket.parameters]
            sharded = {key: v for entry in entries for key, v in entry.items() if isinstance(v, torch.dtype)}
            for key, dtype in sharded.items():
                part = torch.zeros_like(bucket.shard, dtype=dtype)
                for (_, begin, end, _), segment in zip(bucket.pieces, bucket.segments, strict=True):
                    part[begin:end] = self._state_of(bucket, segment).get(key, 0)
                whole = self._gather(part)
                for entry, view in zip(entries, bucket.views_into(whole), strict=True):
                    if key in entry:
                        entry[key] = view.clone()
        return state

    def _state_of(self, bucket, segment):
        state = self.state.get(segment, {})
        # Without other state it is the parameter itself; and Adam takes a state that is not empty for a complete one.
        master = {"master": segment} if bucket.low_precision and (state or not self._keys) else {}
        return {**state, **master}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take over what state_dict() or the plain optimizer's returned, whatever the number of ranks was."""
        super().load_state_dict({**state_dict, "state": {}})  # checks and takes over the groups
        parameters = self._parameters()
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        whole = {p: state_dict["state"].get(number, {}) for p, number in zip(parameters, ids, strict=True)}
        for bucket in self._buckets:
            entries = {}
            for number, piece in enumerate(bucket.pieces):
                p = bucket.parameters[piece[0]]
                entry = dict(whole[p])
                for key, value in entry.items():
                    if isinstance(value, torch.Tensor):
                        sharded = value.shape == p.shape and (value.dim() > 0 or key in (*self._keys, "master"))
                        entry[key] = bucket.cut(piece, value) if sharded else value.clone()
                master = entry.pop("master", None)
                if master is not None:
                    bucket.segments[number].copy_(master)
                if entry:
                    entries[number] = entry
            bucket.load_state(entries, self._options(self.param_groups[bucket.group]), self.state)

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
        plan, files, problem = [], [], None
        try:
            for group in groups:
                keys = elementwise_state(self._make_optimizer, self._options(self.param_groups[group]), self._device())
                self._keys = list(dict.fromkeys([*self._keys, *keys]))
            plan = self._plan(groups)
            if self.offload not in (None, "cpu"):
                elements = [(1 + len(self._keys)) * shard_size(parameters, self.N) for _, parameters in plan]
                items = [master_dtype(parameters[0].dtype).itemsize for _, parameters in plan]
                files = make_files(self.offload, [a * b for a, b in zip(elements, items, strict=True)])
        except (ValueError, OSError) as error:
            problem = error
        try:
            verify_same_model(self._named_parameters(), self.process_group, problem)
        except (ValueError, OSError):
            for file in files:
                file.remove()
            raise
        buckets = []
        for group, parameters in reversed(plan):  # in the order of the model: a random init draws in that order
            self._prepare(parameters)
            broadcast(parameters, self.process_group)
            bucket = Bucket(group, parameters, self.N, self.rank)
            self._attach(bucket)
            bucket.make_master(self.offload, files.pop() if files else None, self._keys)
            options = self._options(self.param_groups[group])
            bucket.optimizer = self._make_optimizer([{**options, "params": bucket.segments}])
            bucket.share_state(self.state)
            buckets.append(bucket)
        self._buckets += reversed(buckets)

    def _plan(self, groups):
        """-> [(number of the group, parameters)] of the new buckets, in the order in which backward fills them."""
        if not isinstance(self.offload, type(None) | str | os.PathLike):
            raise ValueError(f"offload is {self.offload!r}; it must be None, 'cpu' or a directory")
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive")
        if self.module and any(getattr(module, "sparse", False) for module in self.module.modules()):
            raise ValueError("sparse gradients are not reduced; use nn.Embedding(..., sparse=False)")
        if any(p.untyped_storage().nbytes() < p.nbytes for g in groups for p in self.param_groups[g]["params"]):
            raise ValueError("parameters are views of less memory than they need: are they sharded by another Zero3?")
        plan = [(g, part) for g in groups for part in self._parts(self.param_groups[g]["params"])]
        position = {p: number for number, p in enumerate(self.module.parameters() if self.module else ())}
        position = {**{p: number for number, p in enumerate(self._parameters())}, **position}
        # A bucket is full when its first parameter, whose gradient comes last, has one.
        return sorted(plan, key=lambda entry: -min(position[p] for p in entry[1]))

    def _parts(self, parameters):
        """Share the parameters of one group out to buckets."""
        cap = self.bucket_cap_mb * 2**20
        if dist.get_backend(self.process_group) == "gloo":
            cap = min(cap, 4 * 2**20)  # larger messages are no faster there, and these stay in the cache
        parts = assign_buckets(parameters, cap)
        return [[parameters[i] for i in reversed(positions)] for positions in parts]

    def _prepare(self, parameters):
        pass

    def _attach(self, bucket):
        """Make the parameters views into their bucket."""
        bucket.adopt()

    def _parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _named_parameters(self):
        names = {p: name for name, p in self.module.named_parameters()} if self.module else {}
        return [(names.get(p, f"parameter {number}"), p) for number, p in enumerate(self._parameters())]

    def _options(self, group):
        return {key: value for key, value in group.items() if key not in ("params", "param_names")}

    def _device(self):
        device = self._parameters()[0].device
        return torch.device("cpu") if device.type == "meta" else device

    def _gather(self, part):
        whole = part.new_empty(self.N * part.numel())
        for work in start_all_gather(whole, part, self.process_group):
            work.wait()
        return whole


class Zero2(Zero1):
    """Zero1 whose gradients are sharded too: backward reduces each bucket once it is full, and frees its .grad.

    Several backwards before a step add up in the shard; inside no_sync(), whole and unsent in .grad. Gradients are not
    in .grad, so it takes the optimizer's zero_grad(), not the module's, to drop them. Each backward must reach a
    parameter on every rank, not necessarily the same. Source: Rajbhandari et al. 2020, §5.2.
    """

    def __init__(self, *args, **kwargs):
        self._sync = True  # False inside no_sync()
        self._bucket_of = {}  # parameter -> bucket
        self._buckets = []
        self._start()
        super().__init__(*args, **kwargs)

    def _start(self):
        self._in_backward = False
        self._sent = 0  # buckets 0 to _sent - 1 are reduced or on their way
        self._reducing = None  # the last of them
        for bucket in self._buckets:
            bucket.ready.clear()

    def _attach(self, bucket):
        super()._attach(bucket)
        optimizer = weakref.ref(self)  # a strong reference would keep a discarded optimizer alive, and reducing
        for parameter in bucket.parameters:
            self._bucket_of[parameter] = bucket
            if parameter.is_floating_point():
                trainable = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen parameter takes no hook, but may be unfrozen later
                parameter.register_post_accumulate_grad_hook(lambda p: optimizer() and optimizer()._on_gradient(p))
                parameter.requires_grad_(trainable)

    @torch.no_grad()
    def _on_gradient(self, parameter):
        """Autograd has added to the .grad of `parameter`."""
        self._start_backward()
        self._bucket_of[parameter].ready.add(parameter)
        # Buckets leave by number, not as they fill: ranks that issue them in different orders add the wrong tensors.
        while self._sync and self._sent < len(self._buckets) and self._buckets[self._sent].full():
            self._reduce_next()

    def _start_backward(self):
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _reduce_next(self):
        bucket = self._buckets[self._sent]
        self._sent += 1
        if any(parameter.requires_grad for parameter in bucket.parameters):
            self._finish_reduce(self._reducing)  # at most two whole gradients of a bucket exist at a time
            self._start_reduce(bucket)
            self._reducing = bucket

    def _start_reduce(self, bucket):
        if bucket is not None:
            grad_sum = bucket.grad_sum
            super()._start_reduce(bucket)
            bucket.grad_sum = grad_sum  # of the backwards before
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.reduced.clear()

    def _forget_reduced(self, bucket):
        pass  # until zero_grad(), as a plain .grad would stay

    @torch.no_grad()
    def _finish_backward(self):
        """Send what waits for parameters without a gradient."""
        while self._sync and self._sent < len(self._buckets):
            self._reduce_next()
        self._finish_reduce(self._reducing)
        self._start()

    def zero_grad(self, set_to_none=True):
        if self._in_backward:  # it raised
            self._finish_reduce(self._reducing)
            self._start()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self):
        """Gradients of a backward in here stay whole in .grad, until a backward outside, or step(), reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before


class State(Enum):
    """Who holds a bucket of parameters: SHARDED: each rank its part; GATHERING: on its way; WHOLE: every rank, all."""

    SHARDED, GATHERING, WHOLE = range(3)


class Zero3(Zero2):
    """Zero2 whose parameters are sharded too, and whole only while a module that needs them runs.

    Gathered as one are the largest modules that hold no list of modules and at most bucket_cap_mb. While one runs, the
    next is gathered in the order seen before. All ranks must run the same modules in the same order, in backward too,
    and modules return tensors, or lists, tuples, dicts or dataclasses of them. Outside of forward and backward a
    parameter has its shape but reads NaN, and cannot be written: see full_parameters().

    A model too large for one rank is made on the meta device. Zero3 then makes one module's parameters at a time, by
    the reset_parameters() of each module that has some, and shards them.

    Source: Rajbhandari et al. 2020, §5.3 and §7.2.2; prefetch and parameters that others read: 2021, §6.2 and §7.1.
    """

    def __init__(self, module, *args, **kwargs):
        if not isinstance(module, nn.Module):
            raise ValueError("Zero3 takes the module, to gather before its parts run; pass groups as params=[...]")
        self._needs = {}  # module -> the buckets that it runs on
        self._running = []  # for each module that is running, from the outside in, the buckets gathered for it
        self._next = {"forward": {}, "backward": {}}  # bucket -> the buckets that were gathered after it
        self._last = {}  # "forward" or "backward" -> the bucket gathered last
        super().__init__(module, *args, **kwargs)

    def _before_forward(self, module, args, kwargs):
        needs = self._needs.get(module, ())
        held = self._hold([bucket for bucket in needs if "forward" not in bucket.holders], "forward")
        self._running.append(held)
        if torch.is_grad_enabled() and any(bucket.partly_frozen() for bucket in held):
            # No gradient tells that backward is done with a frozen parameter; that of the module's input does.
            inputs = [tensor for tensor in tensors_in([args, kwargs]) if tensor.grad_fn is not None]
            unfinished = set(range(len(inputs)))

            def finish(number):
                unfinished.discard(number)
                if not unfinished:
                    self._release(held, "backward")

            for number, tensor in enumerate(inputs):
                tensor.register_hook(lambda _, number=number: finish(number))

    def _after_forward(self, output):
        held = self._running.pop()
        if held and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # the module's backward begins at one of these
                    tensor.register_hook(lambda _: self._before_backward(held))
        self._release(held, "forward")
        if not self._running and not self._in_backward:
            self._end_pass("forward")

    def _on_read(self, parameter):
        """A running module reads a parameter, which need not be its own: nn.MultiheadAttention, weights shared."""
        bucket = self._bucket_of.get(parameter)
        if self._running and bucket is not None and "forward" not in bucket.holders:
            self._running[-1].extend(self._hold([bucket], "forward"))

    def _before_backward(self, buckets):
        self._start_backward()
        self._hold([bucket for bucket in buckets if "backward" not in bucket.holders], "backward")

    @torch.no_grad()
    def _on_gradient(self, parameter):
        super()._on_gradient(parameter)
        bucket = self._bucket_of[parameter]
        if bucket.full() and not bucket.partly_frozen():
            self._release([bucket], "backward")

    @torch.no_grad()
    def _finish_backward(self):
        super()._finish_backward()
        self._release(self._buckets, "backward")
        self._end_pass("backward")

    @torch.no_grad()
    def _hold(self, buckets, holder):
        """Make these buckets whole, and start to gather those that were asked for next the last time."""
        for bucket in buckets:
            self._start_gather(bucket)
        for bucket in buckets:
            self._finish_gather(bucket)
            bucket.holders.add(holder)
        # A forward inside backward recomputes what a checkpoint dropped: what comes next then is not next in forward.
        if buckets and holder in self._next and not (holder == "forward" and self._in_backward):
            if holder in self._last:
                self._next[holder][self._last[holder]] = buckets
            self._last[holder] = buckets[0]
            for bucket in self._next[holder].get(buckets[0], ()):
                self._start_gather(bucket)
        return buckets

    def _start_gather(self, bucket):
        if bucket.state is State.SHARDED:
            bucket.flat.untyped_storage().resize_(bucket.flat.numel() * bucket.flat.itemsize)
            bucket.gathering = start_all_gather(bucket.flat, bucket.shard, self.process_group)
            bucket.state = State.GATHERING

    def _finish_gather(self, bucket):
        if bucket.state is State.GATHERING:
            for work in bucket.gathering:
                work.wait()
            bucket.show()

    def _release(self, buckets, holder):
        for bucket in buckets:
            bucket.holders.discard(holder)
            if not bucket.holders and bucket.state is State.WHOLE:
                bucket.hide()

    def _end_pass(self, holder):
        self._last.pop(holder, None)
        for bucket in self._buckets:
            if not bucket.holders:  # gathered ahead for a module that did not run this time
                self._finish_gather(bucket)
        self._release(self._buckets, holder)

    @contextmanager
    def full_parameters(self):
        """In here the module has whole parameters, and what is written to them, alike on all ranks, stays."""
        holder = object()
        self._hold(self._buckets, holder)
        try:
            yield
        finally:
            with torch.no_grad():
                for bucket in self._buckets:
                    self._take_over(bucket)
            self._release(self._buckets, holder)

    @torch.no_grad()
    def module_state_dict(self):
        """The module's state dict with whole parameters, on every rank, which must all call this.

        To load one: `with optimizer.full_parameters(): module.load_state_dict(state_dict)`.
        """
        holder, whole = object(), {}
        for bucket in self._buckets:
            self._hold([bucket], holder)
            whole.update((p, p.detach().clone()) for p in bucket.parameters)
            self._release([bucket], holder)
        self._in_module_state_dict = True
        try:
            state_dict = self.module.state_dict(keep_vars=True)
        finally:
            self._in_module_state_dict = False
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor):
                state_dict[key] = whole.get(value, value.detach())
        return state_dict

    _in_module_state_dict = False

    def _refuse_state_dict(self):
        if not self._in_module_state_dict and any(bucket.state is not State.WHOLE for bucket in self._buckets):
            raise RuntimeError("this module's parameters are sharded: call the optimizer's module_state_dict() instead")

    def _take_over(self, bucket):
        if bucket.state is State.WHOLE:  # written to in full_parameters()
            super()._take_over(bucket)
            bucket.shard.copy_(bucket.own)

    def _publish(self, bucket):
        return super()._publish(bucket) if bucket.state is State.WHOLE else []

    # ---- Set-up: units, made and sharded one by one, and hooks on the modules that need them.

    def _parts(self, parameters):
        names = defaultdict(list)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names[parameter].append(name)
        if any(parameter not in names for parameter in parameters):
            raise ValueError("Zero3 gathers parameters when their modules run: all must be parameters of its module")
        for name, module in self.module.named_modules():
            if self._is_unmade(module) and not reset_of(module):
                raise ValueError(
                    f"{name!r} is on the meta device, but {type(module).__name__} has no reset_parameters()"
                )
        paths, units = unit_paths(self.module, self.bucket_cap_mb * 2**20), defaultdict(list)
        self._unit_of = {parameter: unit_around(of, paths) for parameter, of in names.items()}
        for parameter in parameters:
            units[self._unit_of[parameter]].append(parameter)
        return [
            [unit[i] for i in reversed(positions)]
            for unit in units.values()
            for positions in assign_buckets(unit, math.inf)
        ]

    def _is_unmade(self, module):
        tensors = [*module._parameters.values(), *module._buffers.values()]
        # On the backend "fake" no data moves, and none is made.
        return dist.get_backend(self.process_group) != "fake" and any(t is not None and t.is_meta for t in tensors)

    def _prepare(self, parameters):
        """Make the modules on the meta device that have these parameters, and those that have buffers only."""
        device, wanted = "cuda" if dist.get_backend(self.process_group) == "nccl" else "cpu", set(parameters)

        def make_wanted(module):
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            if self._is_unmade(module) and not (own and wanted.isdisjoint(own)):
                make(module, device)

        self.module.apply(make_wanted)  # children first: the order in which constructors draw random numbers

    def _attach(self, bucket):
        super()._attach(bucket)
        bucket.shard = bucket.own.clone()
        bucket.hide()

    def _shard(self, groups):
        super()._shard(groups)
        modules = dict(self.module.named_modules())
        needs = defaultdict(dict, {self.module: {}})
        for module in modules.values():
            for parameter in module._parameters.values():
                if parameter in self._bucket_of:
                    bucket = self._bucket_of[parameter]
                    needs[modules[self._unit_of[parameter]]][bucket] = needs[module][bucket] = True
        optimizer = weakref.ref(self)
        for module in needs.keys() - self._needs.keys():
            module.register_forward_pre_hook(
                lambda *call: optimizer() and optimizer()._before_forward(*call), with_kwargs=True, prepend=True
            )
            module.register_forward_hook(
                lambda *call: optimizer() and optimizer()._after_forward(call[-1]), always_call=True
            )
            module.__dict__["_parameters"] = WatchedParameters(module._parameters, optimizer)
        if not self._needs:
            self.module.register_state_dict_pre_hook(lambda *_: optimizer() and optimizer()._refuse_state_dict())
        self._needs = {module: list(buckets) for module, buckets in needs.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the above.


class WatchedParameters(dict):
    """A module's parameters by name, which tells Zero3 of each that is read."""

    def __init__(self, parameters, optimizer):
        super().__init__(parameters)
        self.optimizer = optimizer  # a weak reference

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        if (optimizer := self.optimizer()) is not None:
            optimizer._on_read(parameter)
        return parameter


class Bucket:
    """Some parameters of one group and dtype side by side in `flat`, padded so that each rank owns an equal part."""

    UNREDUCED = 2  # as a flag of a parameter: .grad waits; 1: its gradient is in grad_sum; 0: it has none

    def __init__(self, group, parameters, N, rank):
        self.group, self.parameters = group, parameters  # the number of the group
        size, first = shard_size(parameters, N), parameters[0]
        self.flat = torch.zeros(N * size, dtype=first.dtype, device=first.device)
        self.offsets, length = lay_out(parameters)
        self.has_gaps = length != self.flat.numel() or length != sum(p.numel() for p in parameters)
        self.strides = [torch.empty_like(p, device="meta").stride() for p in parameters]  # kept where without gaps
        self.views = self.views_into(self.flat)
        self.own = self.shard = self.flat[rank * size : (rank + 1) * size]  # shard: what stays of it with Zero3
        self.pieces = overlaps(self.offsets, [p.numel() for p in parameters], rank * size, (rank + 1) * size)
        self.low_precision = master_dtype(first.dtype) != first.dtype
        self.grad_sum = None  # this rank's part of the gradients, added over ranks and backwards
        self.reduced = {}  # parameter -> (its .grad, version) when that was reduced
        self.has_gradient = set()  # parameters with a gradient from this rank in grad_sum
        self.ready = set()  # parameters that the running backward is done with
        self.filled = self.reducing = None  # what is sent, and what to wait for
        self.state, self.holders, self.gathering = State.WHOLE, set(), None  # used by Zero3
        self.placeholder = torch.zeros((), dtype=first.dtype, device=first.device)
        if first.is_floating_point():
            self.placeholder.fill_(math.nan)

    def views_into(self, flat):
        layout = zip(self.parameters, self.strides, self.offsets, strict=True)
        return [flat.as_strided(p.shape, stride, offset) for p, stride, offset in layout]

    # ---- parameters

    def adopt(self):
        """Copy parameters that live elsewhere, as after `parameter.data = ...`, and make them views."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                kinds = f"{view.dtype} on {view.device} to {parameter.dtype} on {parameter.device}"
                raise RuntimeError(f"a parameter went from {kinds}; make the optimizer after module.to()")
            if parameter.data_ptr() != view.data_ptr() or view.is_meta:
                view.copy_(parameter)
                parameter.data = view

    def hide(self):
        # Views that autograd saved keep the storage, so it is emptied: gathered again, they see the same values.
        self.flat.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = self.placeholder.expand(parameter.shape)
        self.state = State.SHARDED

    def show(self):
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        self.state = State.WHOLE

    def partly_frozen(self):
        return not all(parameter.requires_grad for parameter in self.parameters)

    # ---- gradients

    def full(self):
        return all(parameter in self.ready or not parameter.requires_grad for parameter in self.parameters)

    def flags(self):
        for parameter in self.parameters:
            grad = parameter.grad
            seen, version = self.reduced.get(parameter, (None, 0))
            if grad is not None and not (grad is seen and grad._version == version):
                yield Bucket.UNREDUCED
            else:
                yield int(parameter in self.has_gradient)

    def fill(self, N):
        """Put the .grad side by side, in `filled`."""
        self.filled = (self.flat.new_zeros if self.has_gaps else self.flat.new_empty)(self.flat.numel())
        for parameter, view in zip(self.parameters, self.views_into(self.filled), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                # In 16 bits divide before the sum: N fp16 gradients overflow at 65504. Else after it, as one device.
                view.copy_(parameter.grad / N if self.low_precision else parameter.grad)
                self.has_gradient.add(parameter)
                self.reduced[parameter] = (parameter.grad, parameter.grad._version)

    def add(self, parts):
        """Add the ranks' parts to grad_sum, in rank order: the same sum wherever the parts come from."""
        wide = master_dtype(self.flat.dtype)
        first, *rest = parts if self.grad_sum is None else [self.grad_sum, *parts]
        total = first.to(wide) if rest else first.to(wide, copy=True)
        for number, part in enumerate(rest):
            total = total.add_(part) if number else total + part
        self.grad_sum = total.to(self.flat.dtype)
        self.copy_to_host()

    def mean(self, N, grad_sum=None):
        wide = (self.grad_sum if grad_sum is None else grad_sum).to(self.master.dtype)
        return wide if self.low_precision else wide / N

    def copy_to_host(self):
        """With offload from a GPU, start to copy the reduced gradient to the host, beside what the GPU is doing."""
        if self.host is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.flat.device))
            with torch.cuda.stream(self.stream):
                self.host.copy_(self.grad_sum, non_blocking=True)
            self.grad_sum.record_stream(self.stream)

    def forget(self):
        self.grad_sum = None
        self.has_gradient.clear()
        self.reduced.clear()

    # ---- optimizer

    def make_master(self, offload, file, keys):
        """The weights that the optimizer updates, each parameter's as a flat segment."""
        device = self.flat.device if offload is None or self.flat.is_meta else torch.device("cpu")
        dtype, gpu = master_dtype(self.flat.dtype), self.flat.is_cuda and device.type == "cpu"
        self.file, self.keys, self.rows = file, keys, None
        if file:
            self.rows = torch.frombuffer(file.memory, dtype=dtype).view(1 + len(keys), -1)
            self.master = self.rows[0].copy_(self.shard)
        elif (dtype, device) == (self.shard.dtype, self.shard.device):
            self.master = self.shard
        else:
            self.master = torch.empty(self.shard.shape, dtype=dtype, device=device, pin_memory=gpu).copy_(self.shard)
        self.segments = [self.master[begin:end] for _, begin, end, _ in self.pieces]
        self.host = torch.empty(self.shard.shape, dtype=self.shard.dtype, pin_memory=True) if gpu else None
        self.stream = torch.cuda.Stream(self.flat.device) if gpu else None

    def step(self, N):
        """Update this rank's part by the mean gradient."""
        if self.master is not self.shard:
            current = self.shard.to(self.master.device)  # where somebody has overwritten it, so is the master
            same = self.master.to(current.dtype) == current
            self.master.copy_(torch.where(same, self.master, current.to(self.master.dtype)))
        if self.host is not None:
            self.stream.synchronize()
        gradient = self.mean(N, self.host)
        for (slot, begin, end, _), segment in zip(self.pieces, self.segments, strict=True):
            segment.grad = gradient[begin:end] if self.used[slot] else None
        if self.segments:
            self.optimizer.step()
        for segment in self.segments:
            segment.grad = None
        if self.master is not self.shard:
            self.shard.copy_(self.master, non_blocking=True)
        self.store_state()

    def share_state(self, state):
        """Keep the optimizer's state in `state`, which all buckets share."""
        state.update(self.optimizer.state)
        self.optimizer.state = state
        self.store_state()

    def load_state(self, entries, options, state):
        groups = [{**options, "params": list(range(len(self.segments)))}]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        self.share_state(state)

    def cut(self, piece, value):
        """Of a parameter's whole `value`, this rank's piece."""
        slot, begin, end, start = piece
        flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
        flat.as_strided(value.shape, self.strides[slot]).copy_(value)
        return flat[start : start + end - begin].clone()

    def store_state(self):
        """Move state that the optimizer has made in memory to the file, and let go of the file's pages."""
        if not self.file:
            return
        for (_, begin, end, _), segment in zip(self.pieces, self.segments, strict=True):
            for key, row in zip(self.keys, self.rows[1:], strict=True):
                value = self.optimizer.state.get(segment, {}).get(key)
                if value is not None and value.data_ptr() != row[begin:end].data_ptr():
                    self.optimizer.state[segment][key] = row[begin:end].copy_(value)
        self.file.memory.madvise(mmap.MADV_DONTNEED)  # they stay in the file, and are read from it again


class MappedFile:
    """`memory`: `size` bytes of a new file in `directory`, which goes when this object does."""

    def __init__(self, directory, size):
        descriptor, path = tempfile.mkstemp(".bin", f"zero-rank{dist.get_rank()}-", directory)
        self.remove = weakref.finalize(self, Path(path).unlink, missing_ok=True)
        try:
            # Claim the blocks now: where a disk fills up under a mapped page, the kernel kills the process (SIGBUS).
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:  # macOS cannot
                os.ftruncate(descriptor, size)
            self.memory = mmap.mmap(descriptor, size)
        except OSError:
            self.remove()
            raise
        finally:
            os.close(descriptor)


def make_files(directory, sizes):
    """-> a MappedFile of each size, in bytes. Raises OSError, and leaves none, when that does not work."""
    files = []
    try:
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if sum(sizes) > free:
            need = f"this rank's optimizer state takes {sum(sizes)} bytes and {free} are free"
            raise OSError(errno.ENOSPC, f"{need}; use another directory or more ranks")
        for size in sizes:
            files.append(MappedFile(directory, size))
        return files
    except OSError as error:
        for file in files:
            file.remove()
        raise OSError(error.errno, f"offload={str(directory)!r}: {error.strerror}") from error


def lay_out(parameters):
    """-> offsets of the parameters in their bucket, and its length without padding.

    They begin at multiples of 64 bytes, as if allocated alone: elsewhere some kernels are slower or round otherwise.
    """
    offsets, end = [], 0
    for parameter in parameters:
        step = 64 // parameter.itemsize
        offsets.append(-(-end // step) * step)
        end = offsets[-1] + parameter.numel()
    return offsets, end


def shard_size(parameters, N):
    """Elements in each rank's part; at least one, since no collective may be empty."""
    return max(1, -(-lay_out(parameters)[1] // N))


def overlaps(offsets, numels, begin, end):
    """Which parts of the tensors of these sizes at these offsets are in [begin, end).

    -> [(number of the tensor, its first element there and the one after the last, counted from `begin`, and the first
    counted in the tensor)]. An empty tensor is everywhere, so that an optimizer sees it.
    """
    found = []
    for number, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        low, high = max(offset, begin), min(offset + numel, end)
        if low < high:
            found.append((number, low - begin, high - begin, low - offset))
        elif numel == 0:
            found.append((number, 0, 0, 0))
    return found


def master_dtype(dtype):
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def elementwise_state(make_optimizer, options, device=None):
    """The names of what the optimizer keeps for each element, such as "exp_avg".

    Raises ValueError when it does not do to the parts of a matrix what it does to the whole, as ZeRO needs it to.
    """
    options = {**options, "lr": 0.1} if "lr" in options else options  # a warm-up begins with 0
    whole = torch.linspace(-1, 1, 24, device=device).view(4, 6)
    parts = [part.clone() for part in whole.flatten().split([5, 19])]
    on_whole = make_optimizer([{**options, "params": [whole]}])
    try:
        on_parts = make_optimizer([{**options, "params": parts}])
        for step in range(3):
            whole.grad = torch.sin(torch.arange(24.0, device=device) * (step + 1)).view(4, 6)
            for part, gradient in zip(parts, whole.grad.flatten().split([5, 19]), strict=True):
                part.grad = gradient.clone()
            on_whole.step()
            on_parts.step()
        alike, reason = torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-4, atol=1e-6), None
    except Exception as error:
        alike, reason = False, error
    if not alike:
        because = f" ({reason})" if reason else ""
        raise ValueError(
            f"{type(on_whole).__name__} needs whole parameters, and ZeRO gives it parts of them: 24 numbers as a 4 × 6 "
            f"matrix, and as parts of 5 and 19, are updated differently{because}. Use an elementwise optimizer, such "
            "as SGD, Adam or AdamW"
        ) from reason
    state = on_whole.state[whole].items()
    return [key for key, value in state if isinstance(value, torch.Tensor) and value.shape == whole.shape]


def start_reduce_scatter(flat, process_group):
    """Send part r of `flat` to rank r. -> what to wait for, and the parts that add up to this rank's sum."""
    N, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if dist.get_backend(process_group) == "gloo":  # its reduce-scatter is an all-reduce inside, in an order of its own
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
    if dist.get_backend(process_group) == "gloo" and not whole.is_cuda:  # half the time of its all-gather
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


def unit_paths(module, cap_bytes):
    """Names of the modules that Zero3 gathers as one, and of those around them for what these have themselves."""
    paths = []

    def visit(path, module):
        lists = any(isinstance(inner, nn.Sequential | nn.ModuleList | nn.ModuleDict) for inner in module.modules())
        if not path or type(module).forward is not nn.Module.forward:  # a list is never called, so nothing gathers it
            paths.append(path)
        if not path or lists or sum(parameter.nbytes for parameter in module.parameters()) > cap_bytes:
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)

    visit("", module)
    return set(paths)


def unit_around(names, paths):
    """The innermost of `paths` around all `names` of a parameter: of one that is tied, a module around all its uses."""
    around = min((name.rpartition(".")[0] for name in names), key=len)
    while around not in paths or not all(f"{name}.".startswith(f"{around}." if around else "") for name in names):
        around = around.rpartition(".")[0]
    return around


def make(module, device):
    """Give a module that is on the meta device memory and initial values."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta:  # the same object from here on, for those who have it
            memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, memory)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
    reset_of(module)()


def reset_of(module):
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


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
    rows, status = [], 0
    for stage in (Zero1, Zero2, Zero3):
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
        psi, N, passes = held_bytes(demo.model.parameters()), demo.ranks, 3 if stage is Zero3 else 2
        holds = held_by(optimizer)
        status |= demo.report(stage.__name__.lower(), holds, f"{passes}Ψ(N-1)/N", passes * psi * (N - 1) / N)
        demo.show("")
        rows.append((stage, holds, demo.sent, 1e3 * statistics.median(demo.times)))
    demo.show("stage   params    grads     optimizer   sent/step   time/step   bytes per parameter, bf16 with AdamW")
    for (stage, holds, sent, ms), paper in zip(rows, (4 + 12 / N, 2 + 14 / N, 16 / N), strict=True):
        measured = bytes_per_parameter(demo, stage)
        held_mb = "   ".join(f"{n / 1e6:4.1f} MB" for n in holds)
        memory = f"{measured:.2f} (paper, N = {N}: {paper:.2f})"
        demo.show(f"{stage.__name__}   {held_mb}     {sent / 1e6:5.1f} MB    {ms:5.0f} ms    {memory}")
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

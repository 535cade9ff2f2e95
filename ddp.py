"""DDP: every rank holds the whole model, trains on its own part of the batch, and averages gradients with the others.

One step on N = 2 ranks:

    rank 0   batch 0 → forward → backward ─ g₀ ┐               ┌ (g₀ + g₁)/2 → optimizer step
                                               ├─ all-reduce ──┤
    rank 1   batch 1 → forward → backward ─ g₁ ┘               └ (g₀ + g₁)/2 → optimizer step

The loss is a mean over the batch, so the mean of the ranks' gradients is the gradient of the whole batch. All ranks
start with rank 0's weights and make the same updates, so the replicas stay bitwise equal and no weight travels again.

Backward produces the gradients of the last layers first. They are collected in that order into buckets, and a full
bucket is all-reduced while backward goes on with the layers below:

    backward     layer 4 │ layer 3 │ layer 2 │ layer 1 │ wait │ optimizer step
    all-reduce                     └── bucket 0 ──┘    └ bucket 1 ┘

Cost per rank in elements, with Adam; Ψ parameters (the bytes are these times the size of an element):

                          parameters   gradients   optimizer   sent per step
    one device                 Ψ           Ψ           2Ψ      0
    DDP                        Ψ           2Ψ          2Ψ      2Ψ(N-1)/N: a ring all-reduce of Ψ
    gradient_as_bucket_view    Ψ           Ψ           2Ψ      the same; .grad is a view into its bucket

Run:      torchrun --nproc-per-node 2 ddp.py          (python ddp.py is a world of one)
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, §3.2: buckets, overlap, no_sync, unused parameters
Mirrors:  torch.nn.parallel.DistributedDataParallel
Left out: static_graph, sparse gradients, SyncBatchNorm. Sharded optimizer state is zero.py, sharded weights fsdp.py
"""

import argparse
import copy
import dataclasses
import itertools
import math
import os
import statistics
import sys
import sysconfig
import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea. Call this between loss.backward() and optimizer.step().


def all_reduce_gradients(module, process_group=None):
    """Replace each gradient of `module` by its mean over the ranks of `process_group`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # unused on this rank only? All ranks must issue the same collectives
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size(process_group)
            mean = parameter.grad.contiguous()  # the all-reduce of a strided tensor changes only part of it
            dist.all_reduce(mean, group=process_group)
            parameter.grad.copy_(mean)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: the same mean, bucket by bucket, while backward is still running.


class DistributedDataParallel(nn.Module, Joinable):
    """Averages the gradients of `module` over the ranks of `process_group` during each backward.

    Args:
        module: the model. Its parameters and buffers are overwritten with those of the group's rank 0.
        process_group: the ranks that hold a replica (None: the default group).
        bucket_cap_mb: a bucket closes once it holds this many MiB of gradients.
        broadcast_buffers: overwrite buffers with rank 0's before each training forward.
        find_unused_parameters: a backward need not reach all parameters. One that no rank has used since the last
            reduction keeps its .grad: None, after zero_grad().
        gradient_as_bucket_view: .grad is a view into a bucket, which saves Ψ elements and a copy.
        device_ids: [gpu] moves the inputs of forward there; None leaves them where they are.
        output_device: the same gpu, or None.

    Raises:
        ValueError: an argument is unusable, or ranks hold different parameters or buffers (named, with the rank).
        RuntimeError: no parameter requires a gradient; or, from forward, the backwards since the last one did not reach
            all parameters (named) and find_unused_parameters is False.

    Freezing or unfreezing parameters between steps works when all ranks do it. Source: Li et al. 2020, §3.2, §4.
    """

    def __init__(
        self,
        module,
        process_group=None,
        bucket_cap_mb=25,
        broadcast_buffers=True,
        find_unused_parameters=False,
        gradient_as_bucket_view=False,
        *,
        device_ids=None,
        output_device=None,
    ):
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        if dist.get_world_size(process_group) < 1:
            raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
        # Weak: a group that someone holds on to after destroy_process_group() may abort the process at its exit.
        self._process_group = weakref.ref(dist.group.WORLD if process_group is None else process_group)
        self.bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.device_ids, self.output_device = device_ids, output_device
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        verify_same_model(self._agreed(), self.process_group, problem=self._find_problem())
        broadcast([state for _, state in self._named_states()], self.process_group)
        self._start()

    @property
    def process_group(self):
        return self._process_group()

    def _start(self):
        """What belongs to this process, not to the model: a copied or unpickled replica starts here as well."""
        self.require_backward_grad_sync = True  # False inside no_sync()
        self.require_forward_param_sync = True  # buffers travel only after a step that synchronised, as in PyTorch
        self._comm_hook = None
        self._armed = False  # does the running, or else the next, backward synchronise?
        self._in_backward = False
        self._unfinished = None  # what the previous backward left undone
        self._hooks, self._trainable, self._has_gradient = [], [], set()
        self._named_parameters = [(name, s) for name, s in self._named_states() if isinstance(s, nn.Parameter)]
        self._build_buckets()

    def _build_buckets(self):
        self._layout, before = self._current_layout(), {self._trainable[i][0] for i in self._has_gradient}
        self._trainable = [(name, parameter) for name, parameter in self._named_parameters if parameter.requires_grad]
        parameters = [parameter for _, parameter in self._trainable]
        assignment = assign_buckets(parameters, self.bucket_cap_mb * 2**20)
        self._buckets = [
            Bucket(number, number == len(assignment) - 1, positions, [parameters[i] for i in positions])
            for number, positions in enumerate(assignment)
        ]
        self._sent = 0  # buckets 0 to _sent - 1 are on their way
        # positions in _trainable that got a gradient since the last reduction
        self._has_gradient = {i for i, (name, _) in enumerate(self._trainable) if name in before}
        for hook in self._hooks:
            hook.remove()
        wrapper = weakref.ref(self)  # a strong reference would keep a discarded wrapper alive, and reducing
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number, slot=slot: wrapper() and wrapper()._on_gradient(number, slot)
            )
            for number, bucket in enumerate(self._buckets)
            for slot, parameter in enumerate(bucket.parameters())
        ]

    def forward(self, *args, **kwargs):
        if self.device_ids:
            args, kwargs = tree_map(self._move, (args, kwargs))
        if not torch.is_grad_enabled():  # local: one rank may evaluate alone
            return self.module(*args, **kwargs)
        self._before_forward()
        output = self.module(*args, **kwargs)
        if self.require_backward_grad_sync:
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # backward begins at one of these
                    tensor.register_hook(self._start_backward)
        return output

    def _before_forward(self):
        self._check_finished()
        if self._layout != self._current_layout():
            self._build_buckets()
        self._divisor, src = dist.get_world_size(self.process_group), 0
        sync_buffers = self.broadcast_buffers and self.training and self.require_forward_param_sync
        if self._join_config.enable:
            src = self._tell_joined_ranks(sync_buffers)
        if sync_buffers:
            broadcast(self._synced_buffers(), self.process_group, src)
        self._armed = self.require_forward_param_sync = self.require_backward_grad_sync

    def _start_backward(self, *_):
        self._armed = True
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    @torch.no_grad()
    def _on_gradient(self, number, slot):
        """Autograd has added to the .grad of parameter `slot` of bucket `number`."""
        bucket = self._buckets[number]
        self._has_gradient.add(bucket.positions[slot])
        if not self._armed:
            return  # no_sync: it stays in .grad, where the next synchronised backward adds to it
        self._start_backward()
        if bucket.work is not None:
            raise RuntimeError(
                f"{self._trainable[bucket.positions[slot]][0]!r} got a second gradient in one backward, after its "
                "bucket was sent. Checkpoints that share a parameter do that, unless they are use_reentrant=False"
            )
        self._fill(bucket, slot)
        if self.gradient_as_bucket_view:
            bucket.show(slot)  # now: what autograd has made is memory for the gradients that follow
        # Buckets leave by number, not as they fill: ranks that issue them in different orders add the wrong tensors.
        while self._sent < len(self._buckets) and self._buckets[self._sent].full():
            self._send(self._buckets[self._sent])

    def _fill(self, bucket, slot):
        # Divide before the sum: N fp16 gradients overflow at 65504. A communication hook divides for itself.
        bucket.fill(slot, scale=1.0 if self._comm_hook else 1.0 / self._divisor)

    def _send(self, bucket):
        self._sent = bucket.index() + 1
        if self._comm_hook:
            bucket.work = self._run_comm_hook(bucket)
        else:
            bucket.work = dist.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)

    @torch.no_grad()
    def _finish_backward(self):
        """Send what waits for unused parameters, wait for all buckets, and hand out the means."""
        self._in_backward = self._armed = False
        unused = set(range(len(self._trainable))) - self._has_gradient
        if not any(bucket.ready for bucket in self._buckets) and not self.find_unused_parameters:
            return  # torch.autograd.grad(): no .grad was touched
        self._unfinished = None if self.find_unused_parameters else unused
        if self._unfinished:
            return  # until the backward of another loss reaches the others; or else the next forward raises
        for bucket in self._buckets[self._sent :]:
            for slot in bucket.missing():
                bucket.set_aside(slot)
                self._fill(bucket, slot)
            self._send(bucket)
        unused_by_all = self._unused_by_all() if self.find_unused_parameters else ()
        for bucket in self._buckets[: self._sent]:
            bucket.wait()
            bucket.hand_out(self.gradient_as_bucket_view, unused_by_all)
        self._sent = 0
        self._has_gradient.clear()

    @contextmanager
    def no_sync(self):
        """Gradients of a forward in here stay on this rank, until a synchronised backward reduces the sum.

        As in PyTorch it is the forward that counts: one outside is reduced wherever its backward runs.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- 3. Refinements. Which parameters and buffers take part:

    def _named_states(self):
        return self._not_ignored(itertools.chain(self.module.named_parameters(), self.module.named_buffers()))

    def _synced_buffers(self):
        return [buffer for _, buffer in self._not_ignored(self.module.named_buffers())]

    def _not_ignored(self, named):
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())  # PyTorch's name for the exceptions
        return [(name, state) for name, state in named if name not in ignored]

    def _agreed(self):
        """What ranks must have in common: states, and what decides which elements lie side by side in a bucket."""
        states = self._named_states()
        parameters = [(name, state) for name, state in states if isinstance(state, nn.Parameter)]
        names = ("bucket_cap_mb", "find_unused_parameters", "broadcast_buffers")
        arguments = ", ".join(f"{name} {getattr(self, name)}" for name in names)
        return [*states, *((f"strides {p.stride()} of {n}", p) for n, p in parameters), (arguments, torch.empty(0))]

    def _current_layout(self):
        return [(parameter.requires_grad, parameter.dtype, parameter.device) for _, parameter in self._named_parameters]

    def _find_problem(self):
        parameters = [state for _, state in self._named_states() if isinstance(state, nn.Parameter)]
        if not any(parameter.requires_grad for parameter in parameters):
            return RuntimeError("DistributedDataParallel is not needed: no parameter requires a gradient")
        if not self.bucket_cap_mb > 0:
            return ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive")
        if self.device_ids and (len(self.device_ids) > 1 or self.device.type == "cpu"):
            return ValueError(f"device_ids is {self.device_ids} for a module on {self.device}; pass [gpu] or None")
        if self.output_device not in (None, *(self.device_ids or ())):
            return ValueError(f"output_device is {self.output_device}; outputs stay on {self.device_ids}")
        if any(getattr(module, "sparse", False) for module in self.module.modules()):
            return ValueError("sparse gradients are not reduced; use nn.Embedding(..., sparse=False)")
        return None

    def _move(self, item):
        return item.to(self.device, non_blocking=True) if isinstance(item, torch.Tensor) else item

    # ---- Unused parameters: their buckets are sent at the end of backward, with zeros, or what no_sync left in .grad.

    def _unused_by_all(self):
        """Positions of the parameters that no rank has used since the last reduction."""
        for bucket in self._buckets[: self._sent]:
            bucket.wait()  # a communication hook may still be issuing collectives
        used = torch.zeros(len(self._trainable), dtype=torch.int32, device=self.device)
        used[list(self._has_gradient)] = 1
        dist.all_reduce(used, group=self.process_group)
        return set((used == 0).nonzero().flatten().tolist())

    def _check_finished(self):
        if self._in_backward and any(bucket.ready for bucket in self._buckets):  # it raised in the middle
            self._unfinished = set(range(len(self._trainable))) - self._has_gradient
        self._in_backward = False
        if self._unfinished:
            names = ", ".join(self._trainable[position][0] for position in sorted(self._unfinished))
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one. Parameters that "
                f"did not receive grad for rank {dist.get_rank(self.process_group)}: {names}. Unless backward raised, "
                "allow for them by passing the keyword argument `find_unused_parameters=True`, and by making sure all "
                "`forward` function outputs participate in calculating loss."
            )

    # ---- Communication hooks: send something other than the gradients themselves.

    def register_comm_hook(self, state, hook):
        """Reduce each bucket by `hook(state, bucket) -> torch.futures.Future`. PyTorch's own hooks work unchanged.

        The bucket holds this rank's gradients, not yet divided by the number of ranks; the future's value replaces
        them. `state` is passed on. Raises TypeError when `hook` is not callable, RuntimeError when there is one.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, not {type(hook).__name__}")
        if self._comm_hook:
            raise RuntimeError("register_comm_hook can only be called once")
        self._comm_hook = (state, hook)

    def _run_comm_hook(self, bucket):
        # Its callbacks may issue collectives, at times that differ between ranks: one bucket after another.
        if bucket.index() > 0 and self._buckets[bucket.index() - 1].work:
            self._buckets[bucket.index() - 1].wait()
        state, hook = self._comm_hook
        return hook(state, bucket)

    # ---- Uneven inputs: a rank that has run out takes part in the others' collectives, with zeros.

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        """Context manager around a training loop in which ranks run out of batches at different times.

        Args:
            divide_by_initial_world_size: divide gradients by all ranks, so that every sample has the same weight;
                False divides by those that still have data.
            enable: False trusts that inputs are even and sends nothing extra.
            throw_on_early_termination: when one rank runs out, raise RuntimeError on all.

        In the end all ranks take over parameters and buffers from one that trained longest.
        """
        divide = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **divide)

    def join_hook(self, **kwargs):
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowDDP(self)

    join_device = property(lambda self: self.device)
    join_process_group = property(lambda self: self._process_group())

    def _tell_joined_ranks(self, sync_buffers):
        """Announce what this step will send; -> the rank whose buffers count, since rank 0 may have run out."""
        work = Join.notify_join_context(self)  # None when another Joinable of this context counts the ranks
        active = work.get_future().wait()[0].item() if work else self._divisor
        if not self._divide_by_initial_world_size:
            self._divisor = active
        return self._largest(dist.get_rank(self.process_group), self.require_backward_grad_sync, sync_buffers)[0]

    def _largest(self, *numbers):
        numbers = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.process_group)
        return numbers.tolist()

    # ---- deepcopy and pickle keep the model and the arguments, on the default group only, as PyTorch's do.

    def __getstate__(self):
        if self.process_group != dist.group.WORLD:
            raise RuntimeError("only a DistributedDataParallel on the default process group can be copied or pickled")
        left = ("_process_group", "_comm_hook", "_hooks", "_named_parameters", "_trainable", "_layout", "_buckets")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._process_group = weakref.ref(dist.group.WORLD)
        self._start()


DDP = DistributedDataParallel


class ShadowDDP(JoinHook):
    """What a rank does for the others between running out of inputs and the end of join()."""

    def __init__(self, ddp):
        self.ddp = ddp

    @torch.no_grad()
    def main_hook(self):
        ddp = self.ddp
        src, sync_gradients, sync_buffers = ddp._largest(-1, 0, 0)
        if sync_buffers:
            broadcast(ddp._synced_buffers(), ddp.process_group, src)
        ddp.require_forward_param_sync = bool(sync_gradients)
        if sync_gradients:
            for bucket in ddp._buckets:
                zeros = Bucket(bucket.index(), bucket.is_last(), bucket.positions, bucket.parameters())
                ddp._send(zeros)  # not the bucket itself: .grad may live in it
                zeros.wait()
            ddp._sent = 0
            if ddp.find_unused_parameters:
                ddp._unused_by_all()

    def post_hook(self, is_last_joiner):
        ddp = self.ddp
        (ddp._authoritative_rank,) = ddp._largest(dist.get_rank(ddp.process_group) if is_last_joiner else -1)
        states = [s for _, s in ddp._named_states() if ddp.broadcast_buffers or isinstance(s, nn.Parameter)]
        broadcast(states, ddp.process_group, ddp._authoritative_rank)
        ddp._join_config = ddp._join_config._replace(enable=False)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the above.


class Bucket:
    """Gradients of some parameters, side by side in one flat buffer; to a communication hook, a dist.GradBucket."""

    def __init__(self, index, is_last, positions, parameters):
        self.positions, self._index, self._is_last, self._parameters = positions, index, is_last, parameters
        self._flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters), requires_grad=False)
        self._views = views_into(self._flat, parameters)
        self.clear()

    def index(self):
        return self._index

    def is_last(self):
        return self._is_last

    def parameters(self):
        return list(self._parameters)

    def buffer(self):
        return self._buffer

    def set_buffer(self, buffer):
        self._buffer = buffer

    def gradients(self):
        return views_into(self._buffer, self._parameters)

    def clear(self):
        self._buffer = self._flat  # a hook may have set another
        self.ready = set()  # slots whose gradient is in the buffer
        self.work = None  # the collective in flight

    def full(self):
        return len(self.ready) == len(self._parameters)

    def missing(self):
        return set(range(len(self._parameters))) - self.ready

    def fill(self, slot, scale):
        gradient, view = self._parameters[slot].grad, self._views[slot]
        if gradient is None:
            view.zero_()
        else:
            torch.mul(gradient, scale, out=view)
        self.ready.add(slot)

    def show(self, slot):
        self._parameters[slot].grad = self._views[slot]

    def set_aside(self, slot):
        parameter = self._parameters[slot]
        if parameter.grad is self._views[slot]:  # it is to stay as it is if no rank has used the parameter
            parameter.grad = parameter.grad.clone()

    def wait(self):
        result = self.work.wait()  # True from a collective, the mean gradients from a communication hook
        if result is not True:
            result = result if isinstance(result, torch.Tensor) else result[0]
            if result.data_ptr() != self._flat.data_ptr():
                self._flat.copy_(result.view_as(self._flat))

    def hand_out(self, as_view, unused_by_all):
        for slot, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if self.positions[slot] in unused_by_all:
                continue
            if as_view:
                self.show(slot)
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)
        self.clear()


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


def views_into(flat, tensors):
    """Consecutive pieces of `flat` with the shapes of `tensors`, and with their strides where those leave no gaps."""
    views, offset = [], 0
    for tensor in tensors:
        views.append(flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), offset))
        offset += tensor.numel()
    return views


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
    demo = Demo(bitwise=2)
    model = DistributedDataParallel(copy.deepcopy(demo.model), bucket_cap_mb=2, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(inputs.chunk(demo.ranks)[demo.rank]), targets.chunk(demo.ranks)[demo.rank])
        loss.backward()
        optimizer.step()
        return loss

    demo.train(step, lambda: ([parameter.grad for parameter in model.parameters()], model.parameters()))
    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    status = demo.report("ddp", held(model.parameters(), optimizer), "2Ψ(N-1)/N", 2 * psi * (N - 1) / N)
    demo.show("buckets     " + ", ".join(f"{bucket.buffer().nbytes / 1e6:.1f} MB" for bucket in model._buckets))
    demo.leave(status)


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

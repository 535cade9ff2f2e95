"""DDP: every rank holds the whole model and trains it on its own part of the batch.

The replicas start equal. While backward runs, the ranks average their gradients. Then every rank
makes the same update, so the replicas stay equal.

Backward computes the gradients of the last layers first, and copies each one into a bucket. A full
bucket is all-reduced while backward computes the gradients of earlier layers. Two ranks:

    rank 0   forward → backward: layer 4 │ layer 3 │ layer 2 │ layer 1 │ wait │ optimizer step
                    all-reduce:                    └── bucket 0 ──┘    └ bucket 1 ┘
    rank 1   forward → backward: layer 4 │ layer 3 │ layer 2 │ layer 1 │ wait │ optimizer step

The loss is a mean over samples. If ranks hold equal shares of the batch, the mean of their
gradients is the gradient of the whole batch. With several micro-batches, each rank first adds up
its own gradients; then the ranks average the sums.

If ranks have unequal numbers of unmasked tokens, a rank's loss must be

    N · (sum over its tokens) / (number of tokens of all ranks and micro-batches)

with the factor N because averaging divides by N (docs/training_loops.md).

Cost per rank in elements, with Adam, for a model of Ψ parameters on N ranks:

                              parameters   gradients   optimizer   sent per step
    one device                Ψ            Ψ           2Ψ          0
    DDP                       Ψ            2Ψ          2Ψ          2Ψ(N-1)/N: a ring all-reduce of Ψ
    gradient_as_bucket_view   Ψ            Ψ           2Ψ          the same; .grad is a view

Read section 1 for the idea (9 minutes), to section 2 for the technique (25), and the rest to use
it as a library (46).

Run:      torchrun --nproc-per-node 2 ddp.py            (--idea trains with section 1 alone)
          python ddp.py runs one rank
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, section 3.2
Mirrors:  torch.nn.parallel.DistributedDataParallel
Left out: join() for uneven inputs; static_graph; backward(create_graph=True); gradients that stay
          sparse; parameters that are unfrozen, added or cast after construction
See also: zero.py shards the optimizer state, fsdp.py the parameters as well
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
import inspect
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Mapping
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
from torch.utils._pytree import tree_leaves, tree_map_only

# --------------------------------------------------------------------------------------------------
# 1. The idea: average the gradients after backward, or, which takes less time, during it.


def all_reduce_gradients(module, process_group=None):
    """Replace each gradient by its mean. Call it between backward and the optimizer's step."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            # Other ranks may have a gradient, and every rank must issue the same collectives.
            parameter.grad = torch.zeros_like(parameter)
        # Dense, because few backends reduce sparse gradients. Contiguous, because an all-reduce
        # ignores strides, and they may differ between ranks.
        gradient = parameter.grad.to_dense().contiguous()
        parameter.grad = gradient / dist.get_world_size(process_group)
        dist.all_reduce(parameter.grad, group=process_group)


def views_of(flat, tensors):
    """Return consecutive parts of `flat`, in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return list(map(torch.Tensor.view_as, parts, tensors))


class Bucket:
    """The gradients of some parameters in one flat buffer, which one all-reduce sends."""

    def __init__(self, parameters):
        numel = sum(map(torch.numel, parameters))
        self.flat = parameters[0].detach().new_empty(numel)
        views = views_of(self.flat, parameters)
        self.views = dict(zip(parameters, views, strict=True))  # {parameter: its part of `flat`}
        self.missing = set(parameters)  # those whose gradients are not in `flat` yet
        self.work = None  # handle of the all-reduce while it runs

    def fill(self, parameter, divisor):
        # Divide before the sum, because the sum of N fp16 gradients may exceed their limit, 65504.
        torch.mul(parameter.grad, 1 / divisor, out=self.views[parameter])
        self.missing.remove(parameter)

    def wait(self):
        """Wait for the all-reduce, and copy the means into .grad."""
        self.work.wait()
        for parameter, mean in self.views.items():
            parameter.grad.copy_(mean)  # does nothing if .grad is the view itself
        self.missing = set(self.views)
        self.work = None  # the handle would keep gloo's threads alive


def all_reduce_when_full(bucket, process_group=None):
    """All-reduce the bucket in each backward, as soon as backward has filled it.

    Call bucket.wait() between backward and the optimizer's step. Two conditions: (1) every backward
    reaches all parameters, (2) in an order that fills the buckets in the same order on all ranks.
    Section 2 lifts (2), and `find_unused_parameters` lifts (1).
    """

    def hook(parameter):
        bucket.fill(parameter, dist.get_world_size(process_group))
        if not bucket.missing:
            bucket.work = dist.all_reduce(bucket.flat, group=process_group, async_op=True)

    for parameter in bucket.views:
        parameter.register_post_accumulate_grad_hook(hook)


# --------------------------------------------------------------------------------------------------
# 2. The technique: buckets of about one size, all-reduced in the same order on every rank, whatever
#    the order in which backward computes the gradients.


def assign_buckets(tensors, cap_bytes):
    """Split `tensors`, from the last to the first, into lists of one dtype and device.

    A list that holds `cap_bytes` or more gets no further tensor.
    """
    buckets = []
    size = 0  # bytes in the last list
    kind_of_bucket = None  # dtype and device of the last list
    for tensor in reversed(list(tensors)):
        kind = tensor.dtype, tensor.device
        if kind != kind_of_bucket or size >= cap_bytes:
            buckets.append([])
            kind_of_bucket = kind
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


def broadcast(tensors, process_group):
    """Overwrite `tensors` with those of the group's rank 0, in messages of about 25 MiB."""
    for bucket in assign_buckets(tensors, 25 * 2**20):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        # As bytes, because gloo has no int16 and no float8.
        dist.broadcast(flat.view(torch.uint8), group=process_group, group_src=0)
        for tensor, values in zip(bucket, views_of(flat, bucket), strict=True):
            # copy_() increases the version of `tensor`, and backward raises an error if a graph has
            # saved it before. Then pass `tensor.data`, as forward() below does.
            tensor.detach().copy_(values)


class Replica(nn.Module):
    """This rank's copy of a module. Backward leaves the means of all ranks' gradients in .grad.

    Each forward comes just before its backward, which must reach all parameters.
    DistributedDataParallel, its subclass in section 3, lifts both conditions, and has PyTorch's
    other arguments and methods.
    """

    require_backward_grad_sync = True  # False inside no_sync()
    require_forward_param_sync = True  # whether the next forward broadcasts the buffers

    def __init__(self, module, process_group, bucket_cap_mb, broadcast_buffers, as_bucket_view):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.bucket_bytes_cap = bucket_cap_mb * 2**20
        self.broadcast_buffers = broadcast_buffers
        self.gradient_as_bucket_view = as_bucket_view
        self._divisor = dist.get_world_size(process_group)  # of the sum of all ranks' gradients
        broadcast(module.parameters(), process_group)
        broadcast(module.buffers() if broadcast_buffers else (), process_group)
        self._make_buckets()

    # Who calls what in a step, with two parameters a and b, each in a bucket of its own:
    #
    #     forward                               sets _will_average
    #     backward   _on_gradient(b) → _fill    bucket 0 is full: _send starts its all-reduce
    #                _on_gradient(a) → _fill    bucket 1 is full: the same, and it is the last
    #     its end    _finish_backward           waits for both, clears _will_average

    def _make_buckets(self):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._buckets = list(map(Bucket, assign_buckets(trained, self.bucket_bytes_cap)))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self._will_average = False  # if False, a backward leaves its gradients in .grad
        self._register_hooks()

    def _register_hooks(self):
        """Let autograd call _on_gradient(parameter) after it has added to parameter.grad."""
        # A weak reference: a graph that outlives this object must not keep the buckets.
        on_gradient = weakref.WeakMethod(self._on_gradient)

        def hook(parameter, *_):
            if call := on_gradient():
                call(parameter)

        # Autograd's nodes that add to .grad. They are kept in a list, because nothing else keeps
        # them and their hooks alive. These hooks run after all hooks of the parameter, so a user's
        # hook may change the gradient first.
        self._nodes = []
        for parameter in self._bucket_of:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_hook(functools.partial(hook, parameter))
            self._nodes.append(node)

    def forward(self, *inputs, **kwargs):
        if self.broadcast_buffers and self.require_forward_param_sync:
            # .data leaves the version as it is. Otherwise backward would raise an error if an
            # earlier graph saved the buffer.
            broadcast([buffer.data for buffer in self.module.buffers()], self.process_group)
        will_average = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = will_average  # only after one that averages, as PyTorch
        if will_average:
            check_ready(self)  # the last backward has ended, and the parameters are the same
            self._will_average = True
        return self.module(*inputs, **kwargs)

    def _on_gradient(self, parameter):
        if not self._will_average:
            return
        check_gradient(self, parameter)  # it is the first one, and no hook has used it
        self._fill(parameter)
        self._queue_finish()

    def _fill(self, parameter):
        """Copy parameter.grad into its bucket, and send the buckets that are full."""
        bucket = self._bucket_of[parameter]
        parameter.grad = parameter.grad.to_dense()  # does nothing unless the gradient is sparse
        bucket.fill(parameter, self._divisor)
        if self.gradient_as_bucket_view:
            parameter.grad = bucket.views[parameter]  # frees the tensor that autograd allocated
        # Ranks may fill buckets in different orders, so buckets are sent in the order of their
        # index. Otherwise an all-reduce would add different buckets.
        for next_bucket in self._buckets:
            if next_bucket.missing:
                break
            if not next_bucket.work:
                next_bucket.work = self._send(next_bucket)

    def _send(self, bucket):
        """Start the all-reduce of the bucket, and return its handle."""
        return dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)

    def _queue_finish(self):
        """After the last gradient, let autograd call _finish_backward at the end of backward."""
        if self._buckets[-1].work:  # it is sent after all others
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self):
        self._will_average = False
        for bucket in self._buckets:
            bucket.wait()


# --------------------------------------------------------------------------------------------------
# 3. The library: PyTorch's class, which also takes several forwards before their backwards,
#    unused parameters and communication hooks; checks.


class DistributedDataParallel(Replica):
    """torch.nn.parallel.DistributedDataParallel, with the same arguments in the same order.

    Every backward must reach all parameters, unless `find_unused_parameters` is set. Then a rank
    without a gradient for a parameter adds zeros. If no rank has one, .grad stays None.

    Forward returns tensors, also in containers, dataclasses or attributes of other objects.

    As in PyTorch, a forward broadcasts rank 0's buffers, unless the forward before it ran in
    no_sync() or without gradients. So a rank that evaluates alone must call `.module`, or it would
    wait for the others.

    A sparse gradient becomes dense. SGD and Adagrad accept that, but SparseAdam does not.
    """

    _comm_hook = None  # or (state, hook), which replaces the all-reduce
    # True if _finish_with_unused() runs at the end of this backward. It stays True if one raises.
    _finish_is_queued = False

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=True,
        init_sync=True,
        process_group=None,
        bucket_cap_mb=None,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        **others,
    ):
        unsupported = others | {  # {PyTorch's name of an argument: true if it is set}
            "dim": dim,
            "init_sync": not init_sync,
            "check_reduction": check_reduction,
            "output_device": output_device not in (None, *(device_ids or ())),
        }
        cap = bucket_cap_mb or 25
        # What ranks send depends on these.
        compared = [f"bucket_cap_mb={cap}", f"{broadcast_buffers=}", f"{find_unused_parameters=}"]
        check_arguments(module, process_group, others, unsupported, compared)
        super().__init__(module, process_group, cap, broadcast_buffers, gradient_as_bucket_view)
        self.device_ids = device_ids  # if given, inputs are moved to the device of the module
        self.find_unused_parameters = find_unused_parameters

    @contextmanager
    def no_sync(self):
        """A backward sends nothing if its forward ran in here. Gradients add up in .grad.

        After the next forward outside, backward adds to them and averages the sum. An earlier
        forward outside, whose backward has not run yet, makes the next backward average, too.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state, hook):
        """Call `hook(state, bucket)`, which returns a future of the mean, and do not all-reduce."""
        check_comm_hook(self)
        self._comm_hook = (state, hook)
        self._divisor = 1  # the hook divides by itself

    def forward(self, *inputs, **kwargs):
        if self.device_ids:
            device = self._buckets[0].flat.device
            inputs, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(device), (inputs, kwargs))
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:  # its backward averages
            hook_outputs(self, output)
        return output

    def _register_hooks(self):
        super()._register_hooks()
        # Each parameter's version before its hooks run, for check_gradient().
        versions = self._versions = {}

        def keep(parameter, *_):
            versions[parameter] = parameter._version

        for parameter, node in zip(self._bucket_of, self._nodes, strict=True):
            node.register_prehook(functools.partial(keep, parameter))

    def _send(self, bucket):
        if not self._comm_hook:
            return super()._send(bucket)
        # The hook of an earlier bucket may issue a second collective when its first has ended. Over
        # gloo, wait for that: the time differs between ranks, so collectives of two buckets could
        # mix. Over NCCL, futures are done as soon as their work is in a stream: this does not wait.
        for earlier in self._buckets[: self._buckets.index(bucket)]:
            if not earlier.work.done():
                earlier.work.wait()

        def copy(mean):
            # Return a tensor, so that wait() also waits for the copy on the GPU.
            return bucket.flat.copy_(mean.value().view_as(bucket.flat))

        state, hook = self._comm_hook
        return hook(state, GradBucket(self._buckets, bucket)).then(copy)

    def _queue_finish(self):
        if not self.find_unused_parameters:
            super()._queue_finish()
        elif not self._finish_is_queued:  # this backward may end after any gradient
            self._finish_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_with_unused)

    def _finish_with_unused(self):
        """Average the gradients at the end of a backward that may have missed parameters."""
        self._finish_is_queued = False
        trained = list(self._bucket_of)
        # For each parameter, 1 if it has a gradient on this rank, otherwise 0. Zeros are written on
        # the device, because the host would wait for a copy of a list.
        used = torch.ones(len(trained), device=self._buckets[0].flat.device)
        unused = [number for number, parameter in enumerate(trained) if parameter.grad is None]
        for number in unused:
            used[number].zero_()
            trained[number].grad = torch.zeros_like(trained[number])
        for parameter, bucket in self._bucket_of.items():
            if parameter in bucket.missing:  # this backward did not reach it
                self._fill(parameter)
        self._finish_backward()
        dist.all_reduce(used, group=self.process_group)
        num_ranks = used.tolist() if unused else []  # the host waits for the all-reduce
        for number in unused:
            if num_ranks[number] == 0:
                trained[number].grad = None

    def __getstate__(self):  # copies and pickles make buckets, nodes and hooks of their own
        return vars(self) | {"_buckets": None, "_bucket_of": None, "_nodes": None}

    def __setstate__(self, state):
        super().__setstate__(state)
        if not self._comm_hook:
            self._divisor = dist.get_world_size(self.process_group)  # a pickle may be of others
        self._make_buckets()


DDP = DistributedDataParallel


def hook_outputs(ddp, output):
    """Let each backward from `output` average, even if one of another forward has ended before.

    forward 1, forward 2   each sets _will_average
    backward 2             averages, and its end clears _will_average
    backward 1             pre_backward() sets it again, so this averages, too
    """
    ddp._finish_is_queued = False

    def pre_backward(_):  # a tensor's hook gets its gradient
        ddp._will_average = True
        # Queue the end here, because backward may reach no parameter on this rank. But not if
        # gradients are enabled, by create_graph=True: this is an inner backward, such as that of a
        # gradient penalty, and the outer one averages.
        if ddp.find_unused_parameters and not torch.is_grad_enabled():
            ddp._queue_finish()

    for tensor in tensors_in(output):
        tensor.register_hook(pre_backward)


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


class GradBucket:
    """The argument of a communication hook, with the methods of dist.GradBucket."""

    def __init__(self, buckets, bucket):
        self._buckets = buckets
        self._bucket = bucket
        self._buffer = bucket.flat

    def index(self):
        return self._buckets.index(self._bucket)

    def is_last(self):
        return self._bucket is self._buckets[-1]

    def parameters(self):
        return list(self._bucket.views)

    def buffer(self):
        return self._buffer

    def set_buffer(self, buffer):  # a hook may use another buffer, for example one in 16 bits
        self._buffer = buffer

    def gradients(self):
        return views_of(self._buffer, self.parameters())


def check_ready(ddp):
    """Raise RuntimeError if the last backward has not ended, or if parameters have changed."""
    missing = {parameter for bucket in ddp._buckets for parameter in bucket.missing}
    if len(missing) < len(ddp._bucket_of):
        names = [name for name, p in ddp.module.named_parameters() if p in missing]
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration: backward raised, or "
            f"did not reach {', '.join(names) or 'its end'}; try find_unused_parameters=True"
        )
    # torch.func.functional_call() may replace all parameters. Gradients of the replacements stay on
    # this rank, as in PyTorch.
    if ddp._bucket_of.keys().isdisjoint(ddp.module.parameters()):
        return
    for name, parameter in ddp.module.named_parameters():
        bucket = ddp._bucket_of.get(parameter)
        like = bucket and bucket.flat
        is_ready = bucket and (like.dtype, like.device) == (parameter.dtype, parameter.device)
        is_trained = parameter.requires_grad and isinstance(parameter, nn.Parameter)
        if is_trained and not is_ready:
            raise RuntimeError(
                f"{name} was frozen, not there, or of another dtype or device before: wrap the "
                "module again"
            )


def check_gradient(ddp, parameter):
    """Raise RuntimeError if the gradient is a second one, or if a hook has used it already."""
    versions = getattr(ddp, "_versions", {})  # Replica alone has none
    version = versions.get(parameter, parameter._version)
    if parameter.grad is None or parameter._version != version:
        raise RuntimeError(
            "a hook changed the parameter, or set .grad to None: until backward ends, .grad is the "
            "gradient of this rank alone, so step the optimizer after backward"
        )
    if parameter not in ddp._bucket_of[parameter].missing:
        raise RuntimeError(
            "Expected to mark a variable ready only once, but a parameter got two gradients: "
            "add the losses and call backward once"
        )


def check_comm_hook(ddp):
    """Raise RuntimeError if a hook would see gradients that are not on the GPU yet."""
    device = ddp._buckets[0].flat.device.type
    backends = dist.get_backend_config(ddp.process_group)  # such as "cpu:gloo,cuda:nccl"
    if device != "cpu" and f"{device}:gloo" in backends and torch.__version__ < "2.11":
        raise RuntimeError(
            "over gloo, communication hooks do not wait for the GPU before torch 2.11; use NCCL"
        )


def check_arguments(module, process_group, others, unsupported, compared):
    """Raise an error if an argument or the module is not supported: on all ranks, if on one.

    Raise TypeError, on this rank, for an argument that PyTorch's class does not have. `compared`
    has what must be the same on all ranks, as text.
    """
    inspect.signature(nn.parallel.DistributedDataParallel).bind(module, **others)
    set_names = [name for name, is_set in unsupported.items() if is_set]
    problems = [f"{name} is not supported by ddp.py; leave it out" for name in set_names]
    group = process_group or dist.group.WORLD
    members = dist.get_process_group_ranks(group) if dist.get_rank(group) >= 0 else ()
    for name, child in module.named_modules():
        # The ranks that hold different experts, or different slices.
        apart = set(members).intersection(getattr(child, "differ_between_ranks", ()))
        if len(apart) > 1:
            problems.append(f"ranks {sorted(apart)} hold different parameters of '{name}'")
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            problems.append(
                f"{name} {child}: forward shrinks rows, on each rank those of its own batch; leave "
                "max_norm out, and shrink the rows after the optimizer's step"
            )
    facts = list(compared)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        facts.append(f"{name}: {tuple(tensor.shape)}, {tensor.dtype}, {tensor.requires_grad=}")
        is_dense = tensor.layout == torch.strided
        if not is_dense or torch._debug_has_internal_overlap(tensor) == 1:
            problems.append(f"{name} is sparse or expanded: make it dense and contiguous")
    check_same_on_all_ranks("model and arguments", facts + problems, process_group)
    if problems:
        raise ValueError(problems[0])
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RuntimeError("module does not have any parameter that requires a gradient")


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


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo(__doc__)
    if demo.args.idea:
        return max(train_idea_after_backward(demo), train_idea_during_backward(demo))
    module = demo.start("ddp", bitwise=demo.ranks <= 2)
    model = DDP(module, bucket_cap_mb=2, gradient_as_bucket_view=True)
    status = train(demo, model)
    show_overlap(demo, model)
    return status


def train_idea_after_backward(demo):
    model = demo.start("ddp all_reduce_gradients", bitwise=demo.ranks <= 2)
    status = train(demo, model, lambda: all_reduce_gradients(model))
    demo.show()
    return status


def train_idea_during_backward(demo):
    model = demo.start("ddp all_reduce_when_full", bitwise=demo.ranks <= 2)
    buckets = [Bucket(list(layer.parameters())) for layer in model]
    for bucket in buckets:
        all_reduce_when_full(bucket)

    def wait():
        for bucket in buckets:
            bucket.wait()

    return train(demo, model, wait)


def train(demo, model, finish_backward=None):
    """Train `model`, print the result and return the exit status."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        logits = model(demo.part(inputs))
        loss = language_loss(logits, demo.part(targets))
        loss.backward()
        if finish_backward:
            finish_backward()
        optimizer.step()
        return loss

    def whole():  # the gradients and the parameters, to compare with one device
        return [parameter.grad for parameter in model.parameters()], model.parameters()

    demo.train(step, whole)
    psi = held_bytes(demo.model.parameters())
    sent = 2 * psi * (demo.ranks - 1) / demo.ranks
    return demo.report(held(model.parameters(), optimizer), "2Ψ(N-1)/N", sent)


def show_overlap(demo, model, width=80):
    """Run one more backward, and draw when the all-reduce of each bucket begins and ends."""
    sent = {}  # bucket: the time when its all-reduce began
    arrived = {}  # bucket: the time when its all-reduce ended
    send = model._send

    def timed_send(bucket):
        sent[bucket] = mark_time(demo.device)
        work = send(bucket)

        def on_arrival(_):
            arrived[bucket] = mark_time(demo.device)

        work.get_future().then(on_arrival)
        return work

    inputs, _ = demo.batch(0)
    model._send = timed_send
    loss = model(demo.part(inputs)).mean()
    start = mark_time(demo.device)
    loss.backward()
    end = mark_time(demo.device)
    model._send = send
    took = seconds(start, end)
    legend = "= gradients fill a bucket, ~ the bucket is all-reduced"
    demo.show(f"overlap     a backward of {1e3 * took:.0f} ms: {legend}")
    column = 0
    for bucket, time_sent in sent.items():
        leaves = round(width * seconds(start, time_sent) / took)
        returns = round(width * seconds(start, arrived[bucket]) / took)
        row = " " * column + "=" * (leaves - column) + "~" * (returns - leaves)
        demo.show(f"  {bucket.flat.nbytes / 1e6:.1f} MB    {row}")
        column = leaves


def mark_time(device):
    """The time now. On a GPU, an event that records when the current stream gets here."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start, end):
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


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

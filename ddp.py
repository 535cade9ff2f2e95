"""DDP: every rank holds the whole model and trains it on its own part of the batch.

In a step, each rank runs forward and backward on its part. While backward runs, the ranks average
their gradients. Then every rank makes the same update, so the replicas stay equal.

Backward computes the gradients of the last layers first, and copies each one into a bucket. A full
bucket is all-reduced while backward computes the gradients of earlier layers. Two ranks:

    rank 0   forward → backward: layer 4 │ layer 3 │ layer 2 │ layer 1 │ wait │ optimizer step
                    all-reduce:                    └── bucket 0 ──┘    └ bucket 1 ┘
    rank 1   forward → backward: layer 4 │ layer 3 │ layer 2 │ layer 1 │ wait │ optimizer step

The loss is a mean over samples. If ranks hold equal shares of the batch, the mean of their
gradients is the gradient of the whole batch. Parameters are broadcast once, at construction.

Cost per rank in elements, with Adam, for a model of Ψ parameters on N ranks:

                              parameters   gradients   optimizer   sent per step
    one device                Ψ            Ψ           2Ψ          0
    DDP                       Ψ            2Ψ          2Ψ          2Ψ(N-1)/N: a ring all-reduce of Ψ
    gradient_as_bucket_view   Ψ            Ψ           2Ψ          the same; .grad is a view

Run:      torchrun --nproc-per-node 2 ddp.py
          python ddp.py runs one rank
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, section 3.2
Mirrors:  torch.nn.parallel.DistributedDataParallel
Left out: join() for uneven inputs; static_graph; gradients of gradients; gradients that stay
          sparse; parameters that are unfrozen, added or cast after construction
See also: zero.py shards the optimizer state, fsdp.py the parameters as well
"""

import argparse
import copy
import functools
import inspect
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
from torch.utils._pytree import tree_leaves, tree_map_only

# --------------------------------------------------------------------------------------------------
# 1. The idea: average all gradients between loss.backward() and optimizer.step().


def all_reduce_gradients(module, process_group=None):
    """Replace each gradient of `module` by its mean over the ranks."""
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


# --------------------------------------------------------------------------------------------------
# 2. The real one: the same mean, bucket by bucket, while backward is still running.


def assign_buckets(tensors, cap_bytes):
    """Split `tensors`, from the last to the first, into lists of one dtype and device.

    A list that holds `cap_bytes` or more gets no further tensor.
    """
    buckets = []
    size = 0  # bytes in the last list
    kind_of_bucket = None  # dtype and device of the last list
    for tensor in reversed(tensors):
        kind = tensor.dtype, tensor.device
        if kind != kind_of_bucket or size >= cap_bytes:
            buckets.append([])
            kind_of_bucket = kind
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


def views_of(flat, tensors):
    """Return consecutive parts of `flat`, in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def broadcast(tensors, process_group):
    """Overwrite `tensors` with those of the group's rank 0, in messages of about 25 MiB."""
    for bucket in assign_buckets(list(tensors), 25 * 2**20):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        # As bytes, because gloo has no int16 and no float8.
        dist.broadcast(flat.view(torch.uint8), group=process_group, group_src=0)
        for tensor, values in zip(bucket, views_of(flat, bucket), strict=True):
            # Not .data: a write through it does not change the tensor's version, by which the
            # optimizer of amp.py sees that a weight was written.
            tensor.detach().copy_(values)


class Bucket:
    """The gradients of some parameters, in one flat buffer."""

    def __init__(self, index, parameters):
        self.index = index
        numel = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_zeros(numel, requires_grad=False)  # the buffer to all-reduce
        views = views_of(self.flat, parameters)
        self.views = dict(zip(parameters, views, strict=True))  # {parameter: its part of `flat`}
        self.missing = len(parameters)  # number of gradients that are not in `flat` yet
        self.work = None  # handle of the all-reduce while it runs


class BucketedDataParallel(nn.Module):
    """The core of DistributedDataParallel: `module`, with gradients averaged during backward."""

    def __init__(self, module, process_group, bucket_cap_mb, gradient_as_bucket_view):
        super().__init__()
        broadcast(module.parameters(), process_group)
        self.module = module
        self.process_group = process_group
        self.gradient_as_bucket_view = gradient_as_bucket_view
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        lists = assign_buckets(trained, bucket_cap_mb * 2**20)
        self._buckets = [Bucket(index, parameters) for index, parameters in enumerate(lists)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self._filled = set()  # parameters whose gradients are in their buckets
        self._divisor = dist.get_world_size(process_group)
        # "idle": hooks do nothing, and gradients stay in .grad. "expected": a forward has begun,
        # but not its backward. "running": backward has begun. Autograd will call _finish_backward
        # when it ends.
        self._state = "idle"
        self._register_hooks()

    def _register_hooks(self):
        # A weak reference, because parameters keep their hooks: `del model` must free the buckets.
        on_gradient = weakref.WeakMethod(self._on_gradient)

        def hook(parameter):
            if on_gradient() is not None:
                on_gradient()(parameter)

        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(hook)

    def __setstate__(self, state):  # copy.deepcopy() calls it, and does not copy hooks
        super().__setstate__(state)
        self._register_hooks()

    def forward(self, *inputs, **kwargs):
        if torch.is_grad_enabled():  # otherwise no backward will follow
            self._pre_forward()
        output = self.module(*inputs, **kwargs)
        # The outputs have hooks too, because on this rank backward may reach no parameter.
        if self._state == "expected":
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(self._start_backward)
        return output

    def _pre_forward(self):
        if self._filled:  # the last backward did not get to the end of _finish_backward
            missing = self._bucket_of.keys() - self._filled
            names = [name for name, p in self.module.named_parameters() if p in missing]
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration: backward raised, or "
                f"did not reach {', '.join(names)} on rank {dist.get_rank(self.process_group)}; "
                "try find_unused_parameters=True"
            )
        self._state = "expected"

    def _start_backward(self, _=None):  # a tensor's hook gets its gradient
        if self._state != "running":
            self._state = "running"
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish_backward)

    def _on_gradient(self, parameter):
        if self._state == "idle":
            return
        self._start_backward()
        if parameter in self._filled:
            raise RuntimeError(
                "Expected to mark a variable ready only once, but a parameter of shape "
                f"{tuple(parameter.shape)} got two gradients: add the losses and call backward once"
            )
        self._fill(parameter)

    def _fill(self, parameter):
        """Copy parameter.grad into its bucket, and send the buckets that are full."""
        bucket = self._bucket_of[parameter]
        view = bucket.views[parameter]
        parameter.grad = parameter.grad.to_dense()  # does nothing unless the gradient is sparse
        # Divide before the sum, because the sum of N fp16 gradients may exceed their limit, 65504.
        torch.mul(parameter.grad, 1 / self._divisor, out=view)
        if self.gradient_as_bucket_view:
            parameter.grad = view  # frees the tensor that autograd allocated
        self._filled.add(parameter)
        bucket.missing -= 1
        # Ranks may fill buckets in different orders, so buckets are sent in the order of their
        # index. Otherwise an all-reduce would add different buckets.
        for next_bucket in self._buckets:
            if next_bucket.missing:
                break
            if next_bucket.work is None:
                self._send(next_bucket)

    def _send(self, bucket):
        bucket.work = dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)

    def _finish_backward(self):
        """Wait for the all-reduces, and copy the means into .grad."""
        self._state = "idle"
        if len(self._filled) < len(self._bucket_of):
            return  # backward did not reach every parameter: the next forward raises an error
        for bucket in self._buckets:
            bucket.work.wait()
            for parameter, mean in bucket.views.items():
                parameter.grad.copy_(mean)  # does nothing if .grad is the view itself
            bucket.missing = len(bucket.views)
            bucket.work = None  # the handle would keep gloo's threads alive
        self._filled = set()


# --------------------------------------------------------------------------------------------------
# 3. Refinements: checks, buffers, gradient accumulation, unused parameters, communication hooks.


def verify_same_model(module, process_group):
    """Raise ValueError on all ranks if their models differ, RuntimeError if nothing is trained.

    An all-reduce of different sizes or dtypes would abort the process or return garbage.
    """
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in process_group; only its members can be replicas"
        )
    if any(getattr(child, "differ_between_ranks", False) for child in module.modules()):
        raise ValueError("ranks have different experts: call average_gradients(module) instead")
    found = set()
    for i, (name, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        shape = tuple(tensor.shape)
        found.add(f"{i} {name}: {shape}, {tensor.dtype}, {tensor.requires_grad=}")
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, found, group=process_group)
    if differ := set.union(*everyone) - set.intersection(*everyone):
        raise ValueError(f"ranks must hold the same model, but differ in {sorted(differ)}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter "
            "that requires a gradient"
        )


class GradBucket:
    """The argument of a communication hook: `bucket`, with the methods of dist.GradBucket."""

    def __init__(self, bucket, is_last):
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.flat

    def index(self):
        return self._bucket.index

    def is_last(self):
        return self._is_last

    def parameters(self):
        return list(self._bucket.views)

    def buffer(self):
        return self._buffer

    def set_buffer(self, buffer):  # a hook may use another buffer, for example one in 16 bits
        self._buffer = buffer

    def gradients(self):
        return views_of(self._buffer, self.parameters())


class DistributedDataParallel(BucketedDataParallel):
    """torch.nn.parallel.DistributedDataParallel, with the same arguments in the same order.

    Every backward must reach all parameters, unless `find_unused_parameters` is set. Then a rank
    without a gradient for a parameter adds zeros. If no rank has one, .grad stays None.

    As in PyTorch, rank 0's buffers are broadcast in the first forward and in each forward after one
    that averages gradients, even in an evaluation. So one rank alone must evaluate with `.module`,
    because it would wait for the others.

    A sparse gradient becomes dense. SGD and Adagrad accept that, but SparseAdam does not.
    """

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
        # Raises TypeError for an argument that PyTorch's class does not have.
        inspect.signature(nn.parallel.DistributedDataParallel).bind(module, **others)
        others["dim"] = dim
        others["output_device"] = output_device not in (None, *(device_ids or ()))
        others["init_sync=False"] = not init_sync
        others["check_reduction"] = check_reduction
        for name, is_set in others.items():
            if is_set:
                raise ValueError(f"{name} is not supported by ddp.py; leave it out")
        verify_same_model(module, process_group)
        super().__init__(module, process_group, bucket_cap_mb or 25, gradient_as_bucket_view)
        if broadcast_buffers:
            broadcast(module.buffers(), process_group)
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.device_ids = device_ids  # if given, inputs are moved to the device of the module
        self._hook = None  # set by register_comm_hook
        self.require_backward_grad_sync = True  # False inside no_sync()
        self.require_forward_param_sync = True  # False if the last forward will not average

    def forward(self, *inputs, **kwargs):
        if self.device_ids:
            device = self._buckets[0].flat.device
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(device), (inputs, kwargs)
            )
        if self.broadcast_buffers and self.require_forward_param_sync:
            # A write to .data keeps the version. If a graph has saved the buffer, another version
            # would make its backward raise an error.
            broadcast([buffer.data for buffer in self.module.buffers()], self.process_group)
        will_average = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = will_average
        return super().forward(*inputs, **kwargs)

    def _pre_forward(self):
        super()._pre_forward()
        for name, parameter in self.module.named_parameters():
            bucket = self._bucket_of.get(parameter)
            if not parameter.requires_grad:
                continue
            if bucket is None or bucket.flat.dtype != parameter.dtype:
                raise RuntimeError(
                    f"{name} was frozen, not there or of another dtype when "
                    "DistributedDataParallel was made: wrap the module again"
                )
        if not self.require_backward_grad_sync:
            self._state = "idle"  # instead of "expected"

    @contextmanager
    def no_sync(self):
        """A backward sends nothing if its forward ran in here. Gradients add up in .grad.

        After the next forward outside, backward adds to them and averages the sum.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _finish_backward(self):
        if not self.find_unused_parameters:
            super()._finish_backward()
            return
        unused = {}  # {parameter without a gradient on this rank: its element of `used`}
        # For each parameter, 1 if it has a gradient on this rank, otherwise 0. The zeros are
        # written on the device, because the host would wait for a copy of a list.
        used = torch.ones(len(self._bucket_of), device=self._buckets[0].flat.device)
        for flag, parameter in zip(used, self._bucket_of, strict=True):
            if parameter.grad is None:
                unused[parameter] = flag.zero_()
                parameter.grad = torch.zeros_like(parameter)
            if parameter not in self._filled:  # this backward did not reach it
                self._fill(parameter)
        super()._finish_backward()
        dist.all_reduce(used, group=self.process_group)
        for parameter, num_ranks in unused.items():
            if num_ranks == 0:  # the host waits for the all-reduce
                parameter.grad = None

    def register_comm_hook(self, state, hook):
        """Call `hook(state, bucket)`, which returns a future of the mean, and do not all-reduce."""
        self._hook = functools.partial(hook, state)
        self._divisor = 1  # because the hook divides

    def _send(self, bucket):
        if self._hook is None:
            super()._send(bucket)
            return
        if bucket.index > 0:
            # The hook of the previous bucket may issue a second collective when its first has
            # ended. That time differs between ranks, so collectives of two buckets could mix.
            self._buckets[bucket.index - 1].work.wait()
        future = self._hook(GradBucket(bucket, is_last=bucket is self._buckets[-1]))

        def copy(mean):
            # Return a tensor, so that wait() also waits for the copy on the GPU.
            return bucket.flat.copy_(mean.value().view_as(bucket.flat))

        bucket.work = future.then(copy)


DDP = DistributedDataParallel


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    module = demo.start("ddp", bitwise=demo.ranks <= 2)
    model = DDP(module, bucket_cap_mb=2, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        logits = model(demo.part(inputs))
        loss = language_loss(logits, demo.part(targets))
        loss.backward()
        optimizer.step()
        return loss

    def whole():  # the gradients and the parameters, to compare with one device
        return [parameter.grad for parameter in model.parameters()], model.parameters()

    demo.train(step, whole)
    psi = held_bytes(demo.model.parameters())
    sent = 2 * psi * (demo.ranks - 1) / demo.ranks
    status = demo.report(held(model.parameters(), optimizer), "2Ψ(N-1)/N", sent)
    show_overlap(demo, model)
    return status


def show_overlap(demo, model, width=80):
    """Run one more backward, and draw when the all-reduce of each bucket begins and ends."""
    sent = {}  # bucket: the time when its all-reduce began
    arrived = {}  # bucket: the time when its all-reduce ended
    send = model._send

    def timed_send(bucket):
        sent[bucket] = mark_time(demo.device)
        send(bucket)

        def on_arrival(_):
            arrived[bucket] = mark_time(demo.device)

        bucket.work.get_future().then(on_arrival)

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
        """Print the result (README, "What the lines mean"). Return 1 if a rank differs."""
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

"""DDP: every rank holds the whole model, trains on its own part of the batch, and averages gradients with the others.

One step on N = 2 ranks. Backward produces the gradients of the last layers first; they are collected in that order into
buckets, and a full bucket is all-reduced while backward goes on with the layers below:

    rank 0   batch 0 → forward → backward   layer 4 │ layer 3 │ layer 2 │ layer 1 │      │ optimizer step
                                 all-reduce                   └── bucket 0 ──┘    └ bucket 1 ┘
    rank 1   batch 1 → forward → backward   layer 4 │ layer 3 │ layer 2 │ layer 1 │ wait │ optimizer step

The loss is a mean over the batch, of which all ranks have as much, so the mean of their gradients is that of the whole
batch. All ranks start with rank 0's weights and make the same updates: replicas stay bitwise equal, no weight travels.

Cost per rank in elements, with Adam; Ψ parameters:

                               parameters   gradients   optimizer   sent per step
    one device                 Ψ            Ψ           2Ψ          0
    DDP                        Ψ            2Ψ          2Ψ          2Ψ(N-1)/N: a ring all-reduce of Ψ
    gradient_as_bucket_view    Ψ            Ψ           2Ψ          the same; .grad is a view into its bucket

Run:      torchrun --nproc-per-node 2 ddp.py          (python ddp.py is a world of one)
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, §3.2: buckets, overlap, no_sync, unused parameters
Mirrors:  torch.nn.parallel.DistributedDataParallel
Left out: uneven inputs (join), static_graph, sparse gradients, gradients of gradients, (un)freezing after construction.
          Sharded optimizer state is zero.py, sharded weights fsdp.py
"""

import argparse
import copy
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
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: call this between loss.backward() and optimizer.step(). Section 2 has the same result.


def all_reduce_gradients(module, process_group=None):
    """Replace each gradient of `module` by its mean over the ranks of `process_group`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if (
                parameter.grad is None
            ):  # unused on this rank only? All ranks must issue the same collectives
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size(process_group)
            mean = (
                parameter.grad.contiguous()
            )  # the all-reduce of a strided tensor changes only part of it
            dist.all_reduce(mean, group=process_group)
            parameter.grad.copy_(mean)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: the same mean, bucket by bucket, while backward is still running.


def assign_buckets(tensors, cap_bytes):
    """`tensors`, last first, in lists of one dtype and device; a new list begins once one holds `cap_bytes` or more."""
    buckets, size = [], cap_bytes
    for tensor in reversed(tensors):
        if size >= cap_bytes or (tensor.dtype, tensor.device) != (
            buckets[-1][0].dtype,
            buckets[-1][0].device,
        ):
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


class Bucket:
    """The gradients of some parameters, side by side in one flat buffer; to a communication hook, a dist.GradBucket."""

    def __init__(self, index, is_last, parameters):
        self.index, self.is_last, self.parameters = (
            lambda: index,
            lambda: is_last,
            lambda: list(parameters),
        )
        self.flat = parameters[0].new_zeros(
            sum(parameter.numel() for parameter in parameters), requires_grad=False
        )
        self.set_buffer(self.flat)
        self.views = dict(zip(parameters, self.gradients(), strict=True))
        self.missing = len(parameters)  # gradients that are not in the buffer yet

    def set_buffer(self, buffer):  # a communication hook may send another, in 16 bits for example
        pieces = buffer.split([parameter.numel() for parameter in self.parameters()])
        views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self.parameters(), strict=True)
        ]
        self.buffer, self.gradients = lambda: buffer, lambda: views


def broadcast(tensors, process_group):
    """Overwrite `tensors` with those of the group's rank 0, in messages of about 25 MiB."""
    for bucket in assign_buckets(tensors, 25 * 2**20):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.broadcast(
            flat.view(torch.uint8), group=process_group, group_src=0
        )  # bytes: gloo has no int16, no float8
        for tensor, values in zip(
            bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True
        ):
            # A new version of the tensor: fp32 masters that were made before see that it has changed.
            tensor.detach().copy_(values.view_as(tensor))


def verify_same_model(module, process_group):
    """Raise ValueError on all ranks where one holds other states than rank 0: their sum would abort, or be garbage."""
    states = [*module.named_parameters(), *module.named_buffers()]
    mine = [
        f"{name!r}: {tuple(s.shape)}, {s.dtype}, requires_grad={s.requires_grad}"
        for name, s in states
    ]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, [*mine, "nothing more"], group=process_group)
    for rank, theirs in enumerate(everyone):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first != other:
                raise ValueError(
                    f"ranks must hold the same model, but rank 0 has {first}; rank {rank} has {other}"
                )


class DistributedDataParallel(nn.Module):
    """Averages `module`'s gradients over the ranks of `process_group` during each backward; arguments as PyTorch's.

    Backward must reach all parameters; with find_unused_parameters, those that have no .grad on any rank keep None.
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
        bucket_cap_mb=25,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        **others,
    ):
        super().__init__()
        others |= {"dim": dim, "init_sync": init_sync, "check_reduction": check_reduction}
        theirs = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        for name, value in others.items():
            if name not in theirs or value != theirs[name].default:
                raise ValueError(f"{name}={value!r} is not supported by ddp.py; leave it out")
        if output_device is not None and [output_device] != device_ids:
            raise ValueError(
                f"output_device={output_device} is not supported by ddp.py; it must be the one of device_ids={device_ids}"
            )
        if (
            dist.get_rank(process_group) < 0
        ):  # its world size is -1 here, and dividing by that reverses gradients
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group; only its members can be replicas"
            )
        verify_same_model(module, process_group)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient"
            )
        broadcast([*module.parameters(), *module.buffers()], process_group)
        self.module, self.process_group = module, process_group
        self._device = (
            next(module.parameters()).device if device_ids else None
        )  # inputs are moved there
        self.broadcast_buffers, self.find_unused_parameters = (
            broadcast_buffers,
            find_unused_parameters,
        )
        self.gradient_as_bucket_view, self._hook = gradient_as_bucket_view, None
        self.require_backward_grad_sync = True  # False inside no_sync()
        self.require_forward_param_sync = (
            True  # the latest forward's; buffers do not travel between micro-batches
        )
        self._backward = "local"  # or "expected", a synchronised one; or "running", and _finish_backward is queued
        buckets = assign_buckets(
            [p for p in module.parameters() if p.requires_grad], (bucket_cap_mb or 25) * 2**20
        )
        self._buckets = [
            Bucket(index, index == len(buckets) - 1, bucket) for index, bucket in enumerate(buckets)
        ]
        self._flags = self._buckets[0].flat.new_tensor([0, 1]).unbind()
        self._bucket_of = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.views
        }
        self._waiting, self._filled = (
            list(self._buckets),
            set(),
        )  # buckets to send, in this order; parameters in theirs
        hook = weakref.WeakMethod(
            self._on_gradient
        )  # a strong one would keep a discarded wrapper, and its buckets
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: hook() and hook()(parameter)
            )

    def forward(self, *inputs, **kwargs):
        if self._device:
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self._device), (inputs, kwargs)
            )
        if not torch.is_grad_enabled():  # nothing is sent: one rank may evaluate alone
            return self.module(*inputs, **kwargs)
        if self._filled:
            missing = [
                name
                for name, p in self.module.named_parameters()
                if p in self._bucket_of.keys() - self._filled
            ]
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration: backward raised, or did not reach "
                f"{', '.join(missing)} on rank {dist.get_rank(self.process_group)}; try find_unused_parameters=True"
            )
        if self.broadcast_buffers and self.training and self.require_forward_param_sync:
            # .data: no new version, since a running graph may have saved the buffer for its backward.
            broadcast([buffer.data for buffer in self.module.buffers()], self.process_group)
        self.require_forward_param_sync = synchronised = self.require_backward_grad_sync
        self._backward = "expected" if synchronised else "local"
        output = self.module(*inputs, **kwargs)
        for tensor in (
            tree_leaves(output) if synchronised else ()
        ):  # backward begins here, and may reach no parameter
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._start_backward)
        return output

    def _start_backward(self, _=None):
        if self._backward != "running":
            self._backward = "running"
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _on_gradient(self, parameter):
        """Autograd has added to parameter.grad: copy it into its bucket, and send what is full."""
        if self._backward == "local":
            return  # no_sync: it stays in .grad, where the next synchronised backward adds to it
        self._start_backward()
        if parameter in self._filled:
            raise RuntimeError(
                f"Expected to mark a variable, {parameter.shape}, ready only once: add losses up first"
            )
        bucket = self._bucket_of[parameter]
        if (
            parameter.grad is None
        ):  # called by _finish_backward: unused here, but the other ranks wait for it
            parameter.grad = torch.zeros_like(parameter)
        # Divide before the sum: N fp16 gradients overflow at 65504. A communication hook divides for itself.
        divisor = 1 if self._hook else dist.get_world_size(self.process_group)
        torch.mul(parameter.grad, 1 / divisor, out=bucket.views[parameter])
        if self.gradient_as_bucket_view:
            parameter.grad = bucket.views[
                parameter
            ]  # now: it frees autograd's own tensor, for those still to come
        self._filled.add(parameter)
        bucket.missing -= 1
        # Buckets leave by number, not as they fill: ranks that issue them in different orders add the wrong tensors.
        while self._waiting and not self._waiting[0].missing:
            self._send(self._waiting.pop(0))

    def _send(self, bucket):
        if self._hook is None:
            bucket.work = dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)
        else:
            if (
                bucket.index() > 0
            ):  # the hook before may still issue collectives, at times that differ between ranks
                self._buckets[bucket.index() - 1].work.wait()
            bucket.set_buffer(bucket.flat)
            bucket.work = self._hook(bucket).then(
                lambda mean: bucket.flat.copy_(mean.value().view_as(bucket.flat))
            )

    def _finish_backward(self):
        """Wait for all buckets and hand out the means."""
        if self.find_unused_parameters:
            no, yes = self._flags  # on the device already: a list would be copied from the host
            has_grad = [parameter.grad is not None for parameter in self._bucket_of]
            used = torch.stack([yes if used_here else no for used_here in has_grad])
            for parameter in self._bucket_of.keys() - self._filled:
                self._on_gradient(parameter)
        self._backward = "local"
        if self._waiting:
            return  # the next forward raises
        for bucket in self._buckets:
            bucket.work.wait()
            for parameter, view in bucket.views.items():
                parameter.grad.copy_(view)  # does nothing where .grad is that view
            bucket.missing, bucket.work = (
                len(bucket.views),
                None,
            )  # who keeps it keeps gloo's threads
        self._waiting, self._filled = list(self._buckets), set()
        if self.find_unused_parameters:
            dist.all_reduce(used, group=self.process_group)
            if all(has_grad):
                return  # the host need not wait for the sums
            for parameter, ranks in zip(self._bucket_of, used.tolist(), strict=True):
                if ranks == 0:
                    parameter.grad = None

    @contextmanager
    def no_sync(self):
        """Gradients of forwards in here, wherever their backward runs, stay local until the next forward outside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state, hook):
        """Reduce each bucket by `hook(state, bucket)`, -> a future of the mean of its undivided gradients."""
        self._hook = lambda bucket: hook(state, bucket)


DDP = DistributedDataParallel


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    model = DDP(
        demo.start("ddp", bitwise=demo.ranks <= 2), bucket_cap_mb=2, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        optimizer.step()
        return loss

    demo.train(
        step, lambda: ([parameter.grad for parameter in model.parameters()], model.parameters())
    )
    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    status = demo.report(held(model.parameters(), optimizer), "2Ψ(N-1)/N", 2 * psi * (N - 1) / N)
    show_overlap(demo, model)
    return status


def show_overlap(demo, model, width=80):
    """When each bucket was full and left, and when its mean was there, measured in one more backward (on a CPU)."""
    sent, send = [], model._send

    def timed_send(bucket):
        left = time.perf_counter()
        send(bucket)
        sent.append((bucket, left, bucket.work.get_future().then(lambda _: time.perf_counter())))

    model._send = timed_send
    loss = model(demo.part(demo.batch(0)[0])).mean()
    begin = start = time.perf_counter()
    loss.backward()
    took = time.perf_counter() - start
    demo.show(
        f"overlap     a backward of {1e3 * took:.0f} ms: = a bucket fills and leaves, ~ its mean comes back"
    )
    for bucket, left, arrived in sent:
        a, b, c = (round(width * (at - start) / took) for at in (begin, left, arrived.wait()))
        demo.show(f"  {bucket.flat.nbytes / 1e6:.1f} MB    {' ' * a}{'=' * (b - a)}{'~' * (c - b)}")
        begin = left


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
    """The bytes of the storages behind `tensors`. A storage that several of them share counts once."""
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
        """Print what the README explains. Return the exit status: 1 if a rank found a difference."""
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

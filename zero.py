"""ZeRO: data-parallel training in which each rank keeps 1/N of the optimizer state, the gradients, the parameters.

DDP keeps N copies of everything. But an elementwise optimizer can update any part of the flat parameters alone, so the
all-reduce may be taken apart, at no extra cost, and each rank updates (and stores the state of) its own part only:

            backward ── reduce-scatter gradients ── update own part ── all-gather parameters
    rank 0   g₀ ━━━━┯━━━━ ╲╱ ━━━━ sum of the left halves  ── AdamW ━━━━ ╲╱ ━━━━┯━━━━ p
    rank 1   g₁ ━━━━┷━━━━ ╱╲ ━━━━ sum of the right halves ── AdamW ━━━━ ╱╲ ━━━━┷━━━━ p

    Zero1 shards optimizer state. Gradients wait whole in .grad until step(), which reduces, updates and gathers.
    Zero2 also gradients. A bucket is reduced as soon as backward has filled it, and its .grad are freed at once.
    Zero3 also parameters. A unit's are gathered before its forward and again before its backward, and freed after.

Bytes held per rank for Ψ 16-bit parameters with Adam and its fp32 masters (in fp32: 4Ψ, 4Ψ, 8Ψ), and elements sent,
each times (N-1)/N:

              parameters  gradients  optimizer   sent per step               with m backwards per step
    DDP       2Ψ          2Ψ         12Ψ         2Ψ: all-reduce              2Ψ (no_sync)
    Zero1     2Ψ          2Ψ         12Ψ/N       2Ψ: reduce-scatter, gather  2Ψ
    Zero2     2Ψ          2Ψ/N       12Ψ/N       2Ψ: the same                (m+1)Ψ, or 2Ψ and whole gradients (no_sync)
    Zero3     2Ψ/N        2Ψ/N       12Ψ/N       3Ψ: one more gather         3mΨ

Besides, a bucket in flight is held twice (Zero3: two units), and a byte sent per parameter tensor. On CPUs the owner
adds the ranks' parts in rank order: training equals, bit by bit at every N, one device that adds up the ranks'
gradients in that order, then divides by N. NCCL's own reduce-scatter, faster on GPUs, adds in another order.

Run:      torchrun --nproc-per-node 2 zero.py          (python zero.py is a world of one)
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §3, §5, §7; Ren et al. 2021, ZeRO-Offload, 2101.06840
Mirrors:  DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer; DeepSpeed's stages 1, 2, 3
Left out: optimizers that need whole matrices (Adafactor, Muon), closures, sparse gradients, loss scaling (amp.py),
          offload to disk (DeepSpeed), meta-device construction and shards under any optimizer (fsdp.py); in Zero3
          modules that return their input changed in place, or a view of a parameter
"""

import argparse
import copy
import functools
import itertools
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
from torch.utils._pytree import tree_leaves, tree_map

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: `optimizer` knows only this rank's part of the flat parameters. Call this after loss.backward().


def flatten(tensors, N):
    """All elements side by side, and zeros up to a multiple of N."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return F.pad(flat, (0, -flat.numel() % N))


@torch.no_grad()
def sharded_step(parameters, shard, optimizer, process_group=None):
    """One step of `optimizer` over [shard], which was flatten(parameters, N).chunk(N)[rank].clone() at first."""
    parameters, N = list(parameters), dist.get_world_size(process_group)
    gradients = flatten([parameter.grad for parameter in parameters], N)
    received = torch.empty_like(gradients)
    dist.all_to_all_single(
        received, gradients, group=process_group
    )  # part r of everyone's goes to rank r,
    shard.grad = sum(received.chunk(N)) / N  # which adds them in rank order: a reduce-scatter
    optimizer.step()
    rest = torch.empty_like(received)
    dist.all_gather(list(rest.chunk(N)), shard, group=process_group)
    for parameter in parameters:
        values, rest = rest.tensor_split([parameter.numel()])
        parameter.copy_(values.view_as(parameter))


# ---------------------------------------------------------------------------------------------------------------------
# 2. What the real ones are made of: messages, and buckets of parameters.

# torch 2.13 renames both, and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Bucket:
    """Some parameters of one dtype side by side in `flat`, cut regardless of borders into N equal shards.

    parameters  │ weight               │ bias     │ weight           │    views of flat
    shards      │ rank 0                     │ rank 1                 │    `master`: in fp32, or offloaded
    segments    │ weight               │ bia│s    │ weight           │    of it: what the optimizer updates
    """

    def __init__(self, parameters, group, units, process_group, offload):
        self.parameters, self.group, self.units = (
            parameters,
            group,
            units,
        )  # of param_groups, by number; Zero3's
        first, self.process_group = parameters[0].data, process_group
        self.N, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        align = (
            64 // first.itemsize
        )  # as if allocated alone: elsewhere some kernels are slower or round otherwise
        sizes = [-(-p.numel() // align) * align for p in parameters]
        *starts, end = itertools.accumulate(sizes, initial=0)
        size = max(1, -(-end // self.N))  # no message may be empty
        self.borders = [
            max(start - self.rank * size, 0) for start in starts[1:]
        ]  # between segments, in a shard
        self.flat = first.new_zeros(self.N * size)
        self.own = self.flat.chunk(self.N)[self.rank]
        self.whole = []  # the parameters, as views of `flat`
        for parameter, start in zip(parameters, starts, strict=True):
            stride = torch.empty_like(parameter, device="meta").stride()  # kept, where without gaps
            self.whole.append(self.flat.as_strided(parameter.shape, stride, start))
            parameter.data = self.whole[-1].copy_(parameter.data)
        self.shard = (
            self.own if units is None else self.own.clone()
        )  # what is sent: Zero3's outlives `flat`
        self.low = first.is_floating_point() and first.itemsize < 4
        self.master = self.shard.to(
            offload or first.device, torch.float32 if self.low else first.dtype
        )
        # A parameter has a segment on every rank, mostly an empty one, so that all have state of the same names.
        self.segments = self.master.tensor_split(self.borders)
        self.divisor = 1 if self.low else self.N  # what makes `grad` the mean
        self.grad, self.used = (
            0,
            set(),
        )  # this rank's part of the sum over ranks and backwards; whose gradients it has
        self.nothing = torch.full((), torch.nan).to(self.flat)  # what freed parameters read
        self.works, self.freed = (
            [],
            False,
        )  # what `flat` waits for until it is whole; Zero3: it has no memory

    def views(self, flat):  # as the parameters lie in self.flat
        return [
            flat.as_strided(view.shape, view.stride(), view.storage_offset()) for view in self.whole
        ]

    def exchange(self, sent, received):
        """Send sent[r] to each other rank r, and fill received[r] from it. -> what to wait for"""
        others = [r for r in range(self.N) if r != self.rank]
        works = [dist.isend(sent[r], group=self.process_group, group_dst=r) for r in others]
        return works + [
            dist.irecv(received[r], group=self.process_group, group_src=r) for r in others
        ]

    def start_reduce(self):
        """Move the gradients out of .grad, and send part r of them to rank r."""
        flat = torch.zeros_like(self.flat)
        for parameter, view, place in zip(
            self.parameters, self.whole, self.views(flat), strict=True
        ):
            if not self.freed and parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    "parameters are no longer where they were: make the optimizer after module.to()"
                )
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None
                self.used.add(parameter)
        if flat.is_cpu:  # gloo's own reduce-scatter adds in another order
            parts = flat.chunk(self.N)
            self.parts = [
                part if r == self.rank else torch.empty_like(part) for r, part in enumerate(parts)
            ]
            self.sent = self.exchange(parts, self.parts)
        else:
            if self.low:
                flat /= self.N  # before the sum, which in fp16 overflows at 65504
            self.parts = [torch.empty_like(self.shard)]
            self.sent = [
                reduce_scatter_single(*self.parts, flat, group=self.process_group, async_op=True)
            ]

    def finish_reduce(self):
        """Add to `grad` what has come, in rank order; 16 bits up in fp32, divided after, rounded once."""
        while self.sent:
            self.sent.pop().wait()
        if self.low:
            self.parts = [sum(part.float() for part in self.parts) / len(self.parts)]
        self.grad = sum(self.parts, self.grad).to(self.flat.dtype)
        self.parts = None

    def adopt(self):
        """Take over what was written to 16-bit or offloaded parameters; the masters of the rest keep their digits."""
        self.finish_gather()  # who waits for our shard must not see it change
        if not self.freed and self.master is not self.own:
            now = self.own.to(self.master.device)
            self.master.copy_(torch.where(now == self.master.to(now.dtype), self.master, now))
            self.shard.copy_(self.own)

    def start_gather(self):
        """Fill all ranks' `flat` with their shards in rank order."""
        if self.flat.is_cpu:  # gloo's own all-gather takes twice as long
            self.own.copy_(self.shard)
            self.works = self.exchange([self.shard] * self.N, self.flat.chunk(self.N))
        else:
            self.works = [
                all_gather_single(self.flat, self.shard, group=self.process_group, async_op=True)
            ]

    def finish_gather(self):
        while self.works:
            self.works.pop().wait()

    def gather(self):
        if self.freed:
            if any(
                (p.dtype, p.device) != (self.flat.dtype, self.flat.device) for p in self.parameters
            ):
                raise RuntimeError(
                    "parameters are no longer what they were: make the optimizer after module.to()"
                )
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            for parameter, view in zip(self.parameters, self.whole, strict=True):
                parameter.data = view
            self.freed = False
            self.start_gather()

    def free(self):
        """Zero3: empty the storage of `flat`, until gather(): views that autograd saved for backward look into it."""
        if not self.freed:
            self.finish_gather()  # it may have been started in vain
            for parameter in self.parameters:
                parameter.data = self.nothing.expand(parameter.shape)
            self.flat.untyped_storage().resize_(0)
            self.freed = True


def assign_buckets(kinds, cap_bytes):
    """Lists of parameters of one kind, closed at `cap_bytes` or more, in the order in which backward fills them."""
    closed, filling = [], {}
    for parameter, kind in reversed(kinds.items()):
        filling[kind] = [
            *filling.pop(kind, []),
            parameter,
        ]  # behind the others: it is the last to be filled
        if sum(p.nbytes for p in filling[kind]) >= cap_bytes:
            closed.append(filling.pop(kind))
    return closed + list(filling.values())


def start_alike(module, process_group):
    """Take over rank 0's values. ValueError where ranks hold other models: messages would abort, or add garbage."""
    named = [*module.named_parameters(), *module.named_buffers()]
    mine = [
        f"{name!r}: shape {tuple(t.shape)}, {t.dtype}, requires_grad={t.requires_grad}"
        for name, t in named
    ]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != mine:
            raise ValueError(
                f"ranks must hold the same model; rank {rank}'s differs in {sorted({*mine} ^ {*theirs})}"
            )
    for _, tensor in named:
        values = tensor.detach().reshape(-1)
        dist.broadcast(
            values.view(torch.uint8), group=process_group, group_src=0
        )  # bytes: gloo has no int16
        tensor.detach().copy_(values.view_as(tensor))


# ---------------------------------------------------------------------------------------------------------------------
# 3. The three stages, each the one before and one thing more.

# The optimizers that treat each element by itself, and what they keep once for each tensor.
ELEMENTWISE = {
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ASGD",
}
PER_TENSOR = {"step", "mu_product", "eta", "mu"}


class Zero1(torch.optim.Optimizer):
    """Averages gradients over `process_group` and steps; each rank holds 1/N of the optimizer state.

    Use clip_grad_norm_() and zero_grad() of this class: torch.nn.utils.clip_grad_norm_ would clip by each rank's own
    norm, and module.zero_grad() miss what step() has reduced. `module` is the model, where it is to stay; it becomes
    rank 0's. `params` are its parameter groups, all of them; `kw` go to `optimizer_class`. offload="cpu" keeps
    optimizer state and masters in host memory, and updates there. A bucket closes at `bucket_cap_mb` MiB, on CPUs at
    most 4. 16-bit parameters have fp32 masters, "master" in state_dict().
    """

    def __init__(
        self,
        module,
        optimizer_class,
        process_group=None,
        offload=None,
        bucket_cap_mb=25,
        params=None,
        **kw,
    ):
        if dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group; make the optimizer on its ranks only"
            )
        if any(type(part).__name__ == "DistributedDataParallel" for part in module.modules()):
            raise ValueError(
                "module is in DistributedDataParallel, which averages as well; pass the model without it"
            )
        if not ELEMENTWISE & {parent.__name__ for parent in optimizer_class.__mro__}:
            raise ValueError(
                f"{optimizer_class.__name__} may need whole parameters: use one of {sorted(ELEMENTWISE)}"
            )
        defaults = optimizer_class([torch.zeros(1)], **kw).defaults
        super().__init__(module.parameters() if params is None else params, defaults)
        self.module, self.process_group, self._sync = (
            module,
            process_group,
            True,
        )  # not inside no_sync()
        self._in_flight = self._unsent = (
            None  # the bucket whose gradients travel; Zero2, in backward: those to follow
        )
        self._group_of = group_of = {
            p: n for n, group in enumerate(self.param_groups) for p in group["params"]
        }
        units = getattr(
            self, "_units", {}
        )  # Zero3's: {parameter: the units that it is gathered for}
        kinds = {
            p: (p.dtype, p.requires_grad, group_of[p], units.get(p))
            for p in module.parameters()
            if p in group_of
        }
        if len(kinds) < len(group_of):
            raise ValueError(
                "params has parameters that are not among module.parameters(); give those only"
            )
        start_alike(module, process_group)
        if next(iter(kinds)).is_cpu:  # larger messages are no faster there, and leave the cache
            bucket_cap_mb = min(bucket_cap_mb, 4)
        lists = assign_buckets(kinds, torch.inf if units else bucket_cap_mb * 2**20)
        self._buckets = [Bucket(ps, *kinds[ps[0]][2:], process_group, offload) for ps in lists]
        groups = [
            {**self.param_groups[bucket.group], "params": bucket.segments}
            for bucket in self._buckets
        ]
        self._optimizer = optimizer_class(groups, **kw)
        self.add_param_group = None  # all parameters are in buckets by now

    def step(self):
        """Reduce what waits in .grad, update this rank's part, gather the others'."""
        self._reduce_waiting()
        for bucket in self._buckets:
            if bucket.used:
                bucket.adopt()
                means = (bucket.grad.to(bucket.master) / bucket.divisor).tensor_split(
                    bucket.borders
                )
                for parameter, segment, mean in zip(
                    bucket.parameters, bucket.segments, means, strict=True
                ):
                    segment.grad = mean if parameter in bucket.used else None
                # Each bucket by itself, so that its gather begins at once; a scheduler may have set another lr.
                self._optimizer.param_groups = [
                    {**self.param_groups[bucket.group], "params": bucket.segments}
                ]
                self._optimizer.step()
                self._optimizer.zero_grad()
                bucket.shard.copy_(bucket.master)
                if not bucket.freed:
                    bucket.start_gather()
        for bucket in self._buckets:
            bucket.finish_gather()

    def _reduce_waiting(self):
        """Reduce what is in any rank's .grad. First all agree where gradients are; 1: in bucket.grad, 2: in .grad."""
        flags = [
            int(p in b.used) if p.grad is None else 2 for b in self._buckets for p in b.parameters
        ]
        flags = self._buckets[0].flat.new_tensor(flags, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        flags = flags.cpu().split([len(bucket.parameters) for bucket in self._buckets])
        for bucket, of_bucket in zip(self._buckets, flags, strict=True):
            if 2 in of_bucket:
                self._reduce(bucket)
            bucket.used = set(itertools.compress(bucket.parameters, of_bucket))
        self._reduce(None)

    def _reduce(self, bucket):
        """Take in the gradients that were sent last, then send those of `bucket`, if any: only one's exist twice."""
        if self._in_flight:
            self._in_flight.finish_reduce()
        if bucket:
            bucket.start_reduce()
        self._in_flight = bucket

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, reduced or not, also those of a backward that raised."""
        super().zero_grad()
        self._reduce(None)
        self._unsent = None
        for bucket in self._buckets:
            bucket.grad, bucket.used = 0, set()
            bucket.divisor = 1 if bucket.low else bucket.N

    def unscale_(self, scale):
        """Divide the mean gradients by the scale of the loss. -> 1.0 if any of any rank is not finite, else 0.0

        With a scaler: scaler.record_found_inf(optimizer, optimizer.unscale_(scaler.get_scale())), then
        scaler.step(optimizer).
        """
        self._reduce_waiting()
        found = torch.zeros((), device=self._buckets[0].flat.device)
        for bucket in self._buckets:
            if bucket.used:
                bucket.divisor = scale * (1 if bucket.low else bucket.N)
                found = torch.maximum(found, (~bucket.grad.isfinite()).any().float())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.process_group)
        return found

    def shards(self):
        """Yield (parameter, number of its first element here, what the optimizer updates, its state) for each.

        Elements are counted as they lie in memory. After a write to what the optimizer updates: sync_parameters().
        """
        for bucket in self._buckets:
            begin = bucket.rank * bucket.own.numel()
            for parameter, view, segment in zip(
                bucket.parameters, bucket.whole, bucket.segments, strict=True
            ):
                start = min(max(0, begin - view.storage_offset()), parameter.numel())
                state = self._optimizer.state[segment]
                yield parameter, start, segment, state

    @torch.no_grad()
    def sync_parameters(self):
        """Write what the optimizer holds into the parameters of all ranks."""
        for bucket in self._buckets:
            bucket.finish_gather()
            bucket.shard.copy_(bucket.master)
            if not bucket.freed:
                bucket.start_gather()
                bucket.finish_gather()

    @contextmanager
    def no_sync(self):
        """Gradients of a backward in here stay whole in .grad, until step(), or a backward outside, reduces them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm, *, counted=lambda parameter: True, process_groups=()):
        """Scale the mean gradients to a norm of at most `max_norm`. -> what it was, of what is `counted` on any rank"""
        self._reduce_waiting()
        total = torch.zeros((), dtype=torch.float64, device=self._buckets[0].flat.device)
        buckets = [bucket for bucket in self._buckets if bucket.used]
        for bucket in buckets:
            for parameter, part in zip(
                bucket.parameters, bucket.grad.tensor_split(bucket.borders), strict=True
            ):
                if counted(parameter):
                    total += (part.norm(dtype=torch.float64) / bucket.divisor).square()
        for group in (self.process_group, *process_groups):  # those of model parallelism, too
            dist.all_reduce(total, group=group)
        total.sqrt_()
        for bucket in buckets:
            bucket.grad *= (max_norm / (total + 1e-6)).clamp(max=1.0)
        return total

    def state_dict(self):
        """What the plain optimizer over the same parameters would return, in host memory. All ranks must call this."""
        state, everyone = {}, [None] * dist.get_world_size(self.process_group)
        for bucket in self._buckets:
            mine = [
                {**self._optimizer.state[s], **({"master": s} if bucket.low else {})}
                for s in bucket.segments
            ]
            mine = tree_map(lambda tensor: tensor.cpu().clone(), mine)
            dist.all_gather_object(everyone, mine, group=self.process_group)
            for parameter, view, *entries in zip(
                bucket.parameters, bucket.whole, *everyone, strict=True
            ):
                state[parameter] = entries[0]
                for name in entries[0].keys() - PER_TENSOR:
                    flat = torch.cat([entry[name] for entry in entries])
                    state[parameter][name] = flat.as_strided(view.shape, view.stride())
        return {
            **super().state_dict(),
            "state": {n: state[p] for n, p in enumerate(self._group_of) if state[p]},
        }

    def load_state_dict(self, state_dict):
        """Take over what state_dict() or the plain optimizer's returned, whatever the number of ranks was."""
        super().load_state_dict({**state_dict, "state": {}})  # checks and takes over the groups
        state = {p: state_dict["state"].get(n, {}) for n, p in enumerate(self._group_of)}
        entries, groups = {}, []
        for bucket in self._buckets:
            flat = bucket.master.new_zeros(bucket.flat.numel())
            views, parts = (
                bucket.views(flat),
                flat.chunk(bucket.N)[bucket.rank].tensor_split(bucket.borders),
            )
            for parameter, segment, view, part in zip(
                bucket.parameters, bucket.segments, views, parts, strict=True
            ):
                entries[len(entries)] = entry = copy.deepcopy(state[parameter])
                for name in entry.keys() - PER_TENSOR:
                    view.copy_(entry[name])
                    entry[name] = part.clone()
                segment.copy_(entry.pop("master", segment))
            groups.append({**self.param_groups[bucket.group], "params": bucket.segments})
        self._optimizer.param_groups = groups
        numbers = iter(entries)
        saved = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
        # It moves "step" to the GPU if the optimizer is fused or capturable.
        self._optimizer.load_state_dict({"state": entries, "param_groups": saved})


class Zero2(Zero1):
    """Zero1 whose gradients are sharded too: backward reduces each bucket once it is full, and frees its .grad.

    After it torch.nn.utils.clip_grad_norm_ would find no .grad and clip nothing, silently: use clip_grad_norm_() and
    zero_grad() of this class. Each backward must reach at least one parameter on every rank.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        me = weakref.ref(self)  # hooks do not keep it alive
        for parameter in filter(lambda parameter: parameter.requires_grad, self._group_of):
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: me() and me()._on_gradient(parameter)
            )

    def _on_gradient(self, parameter):
        """Backward is running, and has added to the .grad of `parameter`, if one is given."""
        if self._unsent is None:
            self._entered = set()
            trained = [
                bucket
                for bucket in self._buckets
                if any(p.requires_grad for p in bucket.parameters)
            ]
            self._unsent, self._arrived = trained if self._sync else [], set()
            torch.autograd.Variable._execution_engine.queue_callback(
                self._finish_pass
            )  # as backward ends
        self._check_entered(parameter)
        self._arrived.add(parameter)
        # Buckets leave by number, not as they fill: ranks that send them in different orders add the wrong tensors.
        while self._unsent and self._arrived.issuperset(self._unsent[0].parameters):
            self._reduce(self._unsent.pop(0))

    def _check_entered(self, parameter):
        pass

    def _finish_pass(self):
        for bucket in self._unsent or ():  # those with parameters that this backward did not reach
            self._reduce(bucket)
        self._reduce(None)
        self._unsent = None


class Zero3(Zero2):
    """Zero2 whose parameters are sharded too, and whole only while a unit that needs them runs.

    A unit is a largest module without a list of modules in it; what is in none is whole all through a pass. All else
    reads NaN, so module.state_dict() is refused: use module_state_dict() and full_parameters(), and, as in Zero2,
    clip_grad_norm_() and zero_grad() of this class. All ranks must use the same modules and parameters, in one order.

        forward   unit 0: gather 0, start 1     unit 1: free 0, start 2     unit 2: free 1        end: free 2
        backward  unit 2: gather 2, start 1     unit 1: free 2, start 0     unit 0: free 1        end: free 0
    """

    def __init__(self, module, *args, **kwargs):
        inside = {unit: set(unit.parameters()) for unit in find_units(module)}
        self._units = {
            p: tuple(unit for unit in inside if p in inside[unit]) for p in module.parameters()
        }
        super().__init__(module, *args, **kwargs)
        self._held = 0  # how many full_parameters() there are around
        self._last, self._next = (
            None,
            {},
        )  # (what was entered last, in backward?): what was entered then, the last time
        self._needed, me = (
            {None: tuple(self._buckets)},
            weakref.ref(self),
        )  # module: the buckets it needs; None: all
        for unit in (module, *inside):
            needed = tuple(
                bucket for bucket in self._buckets if unit in bucket.units or not bucket.units
            )
            self._needed |= dict.fromkeys(unit.modules(), needed)
        for part in module.modules():
            part.register_forward_pre_hook(lambda part, _: me() and me()._enter(part), prepend=True)
            part.register_forward_hook(
                lambda *of: me() and me()._after_forward(*of), with_kwargs=True
            )
            part.register_state_dict_pre_hook(lambda part, *_: me() and me()._refuse(part))
        self._finish_pass()

    def _enter(self, module, _=None):
        """`module` runs, forward or backward: free what it does not need, gather what it does, start what is next."""
        needed, in_backward = self._needed.get(module, ()), torch._C._current_graph_task_id() != -1
        if in_backward:  # in which checkpointed forwards run as well
            self._on_gradient(None)  # so that _finish_pass runs as it ends
            self._entered.update(needed)
        if not any(
            bucket.freed or bucket.works for bucket in needed
        ):  # it is in what was entered last, or around it
            return
        self._next[self._last] = needed
        self._last = needed, in_backward
        # Autograd runs nodes in the reverse order of their creation: what is not needed now is not before this is done.
        for bucket in self._buckets:
            bucket.gather() if bucket in needed else bucket.free()
        for bucket in needed:
            bucket.finish_gather()
        for bucket in self._next.get(self._last, ()):
            bucket.gather()

    def _after_forward(self, module, args, kwargs, output):
        inputs = {id(tensor) for tensor in tree_leaves((args, kwargs))}
        for tensor in tree_leaves(output):
            if (
                torch.is_tensor(tensor) and tensor.grad_fn and id(tensor) not in inputs
            ):  # which are others' outputs
                tensor.register_hook(functools.partial(self._enter, module))
        if module is self.module and torch._C._current_graph_task_id() == -1:
            self._finish_pass()

    def _check_entered(self, parameter):
        """RuntimeError if the forward read `parameter` elsewhere than in its module, where it is NaN."""
        bucket = next((b for b in self._buckets if parameter in set(b.parameters)), None)
        if bucket is not None and bucket not in self._entered and not self._held:
            names = {p: name for name, p in self.module.named_parameters()}
            raise RuntimeError(
                f"{names[parameter]} has a gradient, but backward did not come through its module: "
                "Zero3 gathers parameters when their module is called. Call the module, as in "
                "self.pos(positions) instead of self.pos.weight[:T]. It must return its tensors "
                "alone or in lists, tuples and dicts"
            )

    def _finish_pass(self):
        super()._finish_pass()
        for bucket in self._buckets if not self._held else ():
            bucket.free()
        self._last = None

    def _refuse(self, module):
        if module in self._needed and not self._held:  # not in a copy of it
            raise RuntimeError(
                "these parameters are sharded: call the optimizer's module_state_dict() instead"
            )

    @contextmanager
    def full_parameters(self):
        """In here the module has whole parameters, and what is written to them, alike on all ranks, stays."""
        self._held += 1
        self._enter(None)
        try:
            yield
        finally:
            self._held -= 1
            for bucket in self._buckets:
                bucket.adopt()
            self._finish_pass()

    def module_state_dict(self):
        """The module's, whole. Load one by `with optimizer.full_parameters(): module.load_state_dict(state_dict)`."""
        with self.full_parameters():
            return copy.deepcopy(self.module.state_dict())


def find_units(module):
    """The largest modules inside `module` that have no list of modules (Sequential, or no forward) in them."""
    for child in module.children():
        lists = [
            m
            for m in child.modules()
            if isinstance(m, nn.Sequential) or type(m).forward is nn.Module.forward
        ]
        yield from find_units(child) if lists else [child]


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo, status = Demo(), 0
    for stage, passes in ((Zero1, 2), (Zero2, 2), (Zero3, 3)):
        optimizer = stage(
            demo.start(stage.__name__, bitwise=True), torch.optim.AdamW, bucket_cap_mb=2, lr=1e-3
        )

        def step(inputs, targets, optimizer=optimizer):
            optimizer.zero_grad()
            loss = language_loss(optimizer.module(demo.part(inputs)), demo.part(targets))
            loss.backward()
            optimizer.held = held_by(optimizer)  # at its most: Zero1's gradients are whole
            optimizer.step()
            return loss

        demo.train(step, functools.partial(whole, optimizer))
        sent = passes * held_bytes(demo.model.parameters()) * (demo.ranks - 1) / demo.ranks
        status |= demo.report(optimizer.held, f"{passes}Ψ(N-1)/N", sent)
        demo.show()
    return status


def whole(optimizer):  # -> gradients, parameters
    gradients, parameters = {}, list(optimizer.module.parameters())
    for bucket in optimizer._buckets:
        flat = torch.empty_like(bucket.flat)
        dist.all_gather(list(flat.chunk(bucket.N)), bucket.grad)
        gradients.update(zip(bucket.parameters, bucket.views(flat / bucket.divisor), strict=True))
    with getattr(optimizer, "full_parameters", nullcontext)():
        return [gradients[p] for p in parameters], [p.clone() for p in parameters]


def held_by(
    optimizer,
):  # -> bytes of parameters, gradients and optimizer state, master weights included, on this rank
    buckets, state = optimizer._buckets, tree_leaves(list(optimizer._optimizer.state.values()))
    parameters = [tensor for bucket in buckets for tensor in (bucket.flat, bucket.shard)]
    gradients = [p.grad for bucket in buckets for p in bucket.parameters] + [
        bucket.grad for bucket in buckets
    ]
    state += [bucket.master for bucket in buckets if bucket.master is not bucket.shard]
    return tuple(
        held_bytes(filter(torch.is_tensor, tensors)) for tensors in (parameters, gradients, state)
    )


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

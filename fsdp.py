"""FSDP: every rank keeps 1/N of each parameter, and gathers the rest of a block only while the block computes.

The model is cut into units: what one call of `fully_shard` covers. The life of a unit in one step, on N = 2 ranks:

               forward                                    backward
    rank 0   w₀ ┐            ┌ w₀w₁ compute ─ free   w₀ ┐            ┌ w₀w₁ compute ─ free ─ g ┐                ┌ ḡ₀
                ├ all-gather ┤                          ├ all-gather ┤                         ├ reduce-scatter ┤
    rank 1   w₁ ┘            └ w₀w₁ compute ─ free   w₁ ┘            └ w₀w₁ compute ─ free ─ g ┘                └ ḡ₁

ḡᵣ are rank r's rows of the mean gradient, which is all that its optimizer needs. Communication hides behind the units
next to it: the next unit is gathered while this one computes, and reduced while the one after it does.

    forward   gather 0 │ compute 0 │ compute 1 │ compute 2         backward   compute 2 │ compute 1 │ compute 0
                       └ gather 1 ┘└ gather 2 ┘                             └─ gather 1 ┘└ gather 0 ┘
                                                                                        └─ reduce 2 ┘└─ reduce 1 ┘

Cost per rank in elements, with Adam; Ψ parameters, u those of the largest unit:

                                  parameters   gradients   optimizer   sent per step
    DDP                               Ψ           2Ψ          2Ψ       2Ψ(N-1)/N
    FSDP, at rest                    Ψ/N         Ψ/N         2Ψ/N
          in forward, backward     + 2u         + 3u                   3Ψ(N-1)/N: two all-gathers, one reduce-scatter
          reshard_after_forward=False: + Ψ      + 3u                   2Ψ(N-1)/N: no all-gather in backward

In fp32 the first three sum to 16Ψ/N bytes at rest. 2u: the unit that computes and the one being gathered. 3u: the
gradient being made, and the one that travels with what arrives for it. (While the graph of an earlier forward is alive
as well, a backward may come to it, and keeps all units until it ends.)

Run:      torchrun --nproc-per-node 2 fsdp.py          (python fsdp.py is a world of one)
Paper:    Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, §3; Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §5.3
Mirrors:  torch.distributed.fsdp.fully_shard (FSDP2)
Left out: sharding along other dimensions, several dtypes or modules in a unit, resharding to a part of the group,
          second-order gradients. An optimizer that shards for itself is zero.py
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import math
import os
import statistics
import sys
import sysconfig
import time
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

# torch 2.13 renames both, and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: an all-gather whose gradient is a reduce-scatter, and nobody who keeps what was gathered.


class AllGather(torch.autograd.Function):
    """This rank's rows to all ranks' rows. Backward: the mean of the ranks' gradients, this rank's rows of it."""

    @staticmethod
    def forward(ctx, shard, process_group):
        ctx.process_group, ctx.N = process_group, dist.get_world_size(process_group)
        whole = shard.new_empty(ctx.N * shard.shape[0], *shard.shape[1:])
        all_gather_single(whole, shard.contiguous(), group=process_group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        parts = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(parts, gradient.contiguous(), group=ctx.process_group)
        return sum(parts.chunk(ctx.N)) / ctx.N, None  # in rank order


def forward_sharded(module, shards, *inputs, process_group=None):
    """`module(*inputs)` with the parameters {name: this rank's rows} in `shards`; the rows must divide by the ranks.

    The checkpoint forgets the whole parameters after forward, and gathers (and computes) again in backward.
    """

    def forward(*inputs):
        whole = {name: AllGather.apply(shard, process_group) for name, shard in shards.items()}
        return functional_call(module, whole, inputs)

    return checkpoint(forward, *inputs, use_reentrant=False)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: nothing is computed twice, one collective moves a whole unit, and it overlaps with the unit before.


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Shards and optimizer keep their dtype. None: no change.

    param_dtype: gather and compute in it; floating-point inputs of the unit are cast to it (cast_forward_inputs).
    reduce_dtype: add gradients in it (None: in param_dtype). output_dtype: cast the unit's outputs to it.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclasses.dataclass
class CPUOffloadPolicy:
    """Shards and gradients live in host memory, pinned (where there is a GPU) so that copies are asynchronous."""

    pin_memory: bool = True


def fully_shard(
    module,
    *,
    mesh=None,
    process_group=None,
    reshard_after_forward=True,
    mp_policy=MixedPrecisionPolicy(),
    offload_policy=None,
):
    """Make one unit of `module`'s parameters, without those of submodules that are units already; -> `module`.

    Call it on the blocks first, then on the whole model. From then on `module.parameters()` are this rank's shards,
    nn.Parameters under their old names: rows r·⌈rows/N⌉ to (r+1)·⌈rows/N⌉ of dimension 0, perhaps none. After
    backward their .grad are the same rows of the mean gradient, or None where no rank had one. The values are those
    of the group's rank 0.

    Args:
        mesh: one dimension shards; two are hybrid sharding: (replicate, shard).
        process_group: the ranks to shard over, instead of a mesh (None: the default group).
        reshard_after_forward: False keeps the gathered parameters until backward has used them; so long the module
            has them, too.
        mp_policy: MixedPrecisionPolicy, this file's or PyTorch's.
        offload_policy: CPUOffloadPolicy keeps shards, gradients and so the optimizer's state in host memory.

    Under one outermost unit, ranks may leave out units that others call, but must call them in one order. A module on
    the meta device stays there: see `materialize`.

    Raises:
        ValueError: an argument is unusable; ranks hold different parameters; a parameter is in two units (tied).
    """
    if mesh is not None and process_group is not None:
        raise ValueError("pass mesh or process_group, not both")
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions; it must have 1 (shard) or 2 (replicate, shard)")
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward is {reshard_after_forward!r}; it must be True or False")
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        raise ValueError(f"{type(module).__name__} has no forward that could gather its parameters; shard its children")
    if dist.get_world_size(process_group) < 1:
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    if unit_of(module):
        raise ValueError(f"this {type(module).__name__} is a unit already")
    shard_group, replicate_group = process_group or dist.group.WORLD, None
    if mesh is not None:
        shard_group = mesh.get_group(mesh.ndim - 1)
        replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    module._fsdp_unit = Unit(module, shard_group, replicate_group, reshard_after_forward, mp_policy, offload_policy)
    return module


class State(Enum):
    """Where a unit's parameters are."""

    SHARDED = "a 1/N in `flat`; the module's parameters are this rank's shards, views into it"
    GATHERING = "as SHARDED, and all ranks' shards are on their way into `received`"
    UNSHARDED = "as SHARDED, and the whole parameters have memory; the module has them once it has begun to run"


# On gloo, shards of so many bytes go from where they lie to where they are needed, each in a message of its own: that
# takes less time than to copy them into and out of the one that the unit's other parameters share.
ALONE = 2**19


class Unit:
    """The parameters that are gathered, freed and reduced together. The methods are its life, in order."""

    def __init__(self, module, shard_group, replicate_group, reshard_after_forward, mp_policy, offload_policy):
        self.module = module
        # Weak: a group that someone holds on to after destroy_process_group() may abort the process at its exit.
        self._groups = [weakref.ref(group) for group in (replicate_group, shard_group) if group]
        self.reshard_after_forward, self.mp_policy = reshard_after_forward, mp_policy
        self.offload = offload_policy if hasattr(offload_policy, "pin_memory") else None  # PyTorch has a neutral policy
        self.N, self.rank = shard_group.size(), shard_group.rank()
        self.name, self.order, self.state, self.sync = type(module).__name__, None, State.SHARDED, True
        originals = self.find_parameters()
        self.device = compute_device(originals, shard_group)
        self.gloo = f"{self.device.type}:gloo" in dist.get_backend_config(shard_group)
        self.wire = torch.device("cpu") if self.gloo else self.device  # gloo sends from host memory
        meta = bool(originals) and originals[0].is_meta
        shards = [p.cut(original) for p, original in zip(self.parameters, originals, strict=True)]
        self.allocate(shards, torch.device("meta") if meta else self.home())
        if not meta:
            self.set_values(originals)
        for _, submodule in own_modules(module):
            for buffer in submodule.buffers(recurse=False):
                buffer.data = buffer if buffer.is_meta else buffer.to(self.device)
        self.received, self.works, self.began = None, [], None
        self.calls = []  # running now
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, always_call=True)  # also when forward raises
        for owner in {owner for p in self.parameters for owner, _ in p.slots}:
            owner.register_state_dict_pre_hook(lambda *_: self.show_shards())
            owner.register_load_state_dict_pre_hook(lambda *_: self.show_shards())

    shard_group = property(lambda self: self._groups[-1]())
    groups = property(lambda self: [group() for group in self._groups])  # those of replicas first

    def pre_forward(self, module, args, kwargs):
        self.order = self.order or Order(self)
        self.calls.append(self.order.enter(self))  # gathers
        self.calls[-1].began = time.perf_counter()
        dtype = self.mp_policy.param_dtype
        if dtype and self.mp_policy.cast_forward_inputs:
            args, kwargs = cast(args, dtype), cast(kwargs, dtype)
        return args, kwargs

    def post_forward(self, module, args, output):
        if not self.calls:  # pre_forward raised
            self.order.caller = None if self.order.caller is self else self.order.caller
            return output
        call = self.calls.pop()
        self.order.log("forward", self, call.began)
        if torch.is_grad_enabled():
            # Hooks of tensors are lost when somebody changes a view of them in place; those of nodes stay.
            tensors = [t for t in tensors_in(output) if t.requires_grad]
            for node in {t.grad_fn for t in tensors} | {t._base.grad_fn for t in tensors if t._base is not None}:
                if node is not None:
                    node.register_prehook(lambda _: self.pre_backward(call))
        self.order.leave(self, call)
        return cast(output, self.mp_policy.output_dtype) if self.mp_policy.output_dtype else output

    def pre_backward(self, call):
        """Autograd is about to run through this call of the unit, as soon as this returns."""
        if self.order.enter_backward(self, call):  # gathers
            self.began = time.perf_counter()

    def post_backward(self):
        """All gradients of the whole parameters are there. -> generator: see `reduce`"""
        if self.began:
            self.order.log("backward", self, self.began)
            self.began = None
        if self.state is State.UNSHARDED:
            self.reshard()
        gradients = {p: self.take_gradient(p) for p in self.in_flat if p.shard.requires_grad or p.owed}
        for p, gradient in gradients.items():
            p.owed = not self.sync
            if p.owed and gradient is not None:
                p.kept = gradient.to(self.reduce_dtype())
        if not self.sync:
            return iter(())
        return self.reduce(gradients) if gradients else iter(())

    # ---- The moves between the states.

    @torch.no_grad()
    def gather(self):
        """Send this rank's shards to the others, and let theirs come."""
        assert self.state is State.SHARDED
        self.adopt_shards()
        if self.on_meta():
            names = ", ".join(p.name for p in self.parameters)
            raise RuntimeError(f"{self.name} is still on the meta device; call materialize(model) first ({names})")
        self.state, self.began_gather = State.GATHERING, time.perf_counter()
        self.sending = self.flat.to(self.wire, self.dtype)  # alive until wait()
        packed, *alone = self.sending.split([sum(p.chunk for p in self.packed), *(p.chunk for p in self.alone)])
        hold(self.gathered_alone)
        places = [p.landing if p.landing.is_contiguous() else packed.new_empty(self.N, p.chunk) for p in self.alone]
        self.received = [packed.new_empty(self.N, packed.numel()), *places]
        if self.gloo:  # its all-gather takes twice as long as sends and receives
            for mine, received in zip([packed, *alone], self.received, strict=True):
                self.works += start_exchange([mine] * self.N, received, self.shard_group)
        else:
            self.works = [all_gather_single(self.received[0].view(-1), packed, group=self.shard_group, async_op=True)]

    @torch.no_grad()
    def unshard(self):
        """Wait for the shards, and put the whole parameters together."""
        if self.state is State.SHARDED:
            self.gather()
        assert self.state is State.GATHERING
        hold(self.gathered_packed)
        for p, mine in zip(self.in_flat, self.sending.split([p.chunk for p in self.in_flat]), strict=True):
            p.land(mine[None], self.rank)  # while the others' are on their way
        for work in self.works:
            work.wait()
        self.order.log("gather", self, self.began_gather)
        packed, *alone = self.received
        packed = packed.split_with_sizes([p.chunk for p in self.packed], dim=1)
        for p, shards in zip(self.in_flat, [*packed, *alone], strict=True):
            if shards is not p.landing:
                p.land(shards[: self.rank], 0)
                p.land(shards[self.rank + 1 :], self.rank + 1)
        self.works, self.received, self.sending = [], None, None
        self.state = State.UNSHARDED
        for p in self.parameters:
            p.whole.requires_grad_(p.shard.requires_grad)

    def reshard(self):
        """Free the whole parameters; the module has the shards again."""
        assert self.state is State.UNSHARDED
        self.show_shards()
        free(self.gathered_packed, self.gathered_alone)
        self.state = State.SHARDED

    @torch.no_grad()
    def reduce(self, gradients):
        """Reduce-scatter. A generator that yields while something is on its way."""
        began, parameters, chunks = time.perf_counter(), list(gradients), [p.chunk for p in gradients]
        unused = {p for p, gradient in gradients.items() if gradient is None}
        buffers = self.rows_for_ranks(gradients)
        gradients.clear()
        if self.N == 1:
            total = buffers[0][0]
        elif self.gloo:
            buffers = [buffer.to(self.wire) for buffer in buffers]
            parts = [[b if r == self.rank else torch.empty_like(b) for r, b in enumerate(buffer)] for buffer in buffers]
            works = [start_exchange(*messages, self.shard_group) for messages in zip(buffers, parts, strict=True)]
            yield
            total = buffers[0].new_empty(sum(chunks))
            sums = total.split([buffer.shape[1] for buffer in buffers])
            for transfers, out, (first, second, *others) in zip(works, sums, parts, strict=True):
                for transfer in transfers:
                    transfer.wait()
                torch.add(first, second, out=out)  # in rank order, which gloo's reduce-scatter does not add in
                for other in others:
                    out.add_(other)
            del parts, first, second, others
        else:
            total = torch.empty_like(buffers[0][0])
            work = reduce_scatter_single(total, buffers[0].view(-1), group=self.shard_group, async_op=True)
            yield
            work.wait()
        del buffers
        for group in self.groups[:-1]:
            work = dist.all_reduce(total, group=group, async_op=True)
            yield
            work.wait()
        sums = zip(parameters, total.split(chunks), strict=True)
        nobody = {p for p, part in sums if p in unused and p.chunk and is_minus_zero(part[0].item())}
        if self.order.failed:
            return
        total /= self.divisors()[1]
        total = total.to(self.flat.device, self.flat.dtype)
        for p, part in zip(parameters, total.split(chunks), strict=True):
            if p not in nobody:
                mean = part[: p.shard.numel()].view(p.shard.shape)
                p.shard.grad = mean if p.shard.grad is None else p.shard.grad.add_(mean)
                for hook in (p.shard._post_accumulate_grad_hooks or {}).values():
                    hook(p.shard)
        self.order.log("reduce", self, began)

    def rows_for_ranks(self, gradients):
        """-> [(N, elements), …]: row r goes to rank r. One tensor for all packed gradients, one for each of the others.

        -0.0 is what changes no sum, -0.0 included. A parameter that this rank has not used sends nothing else, one that
        it has used starts with something else: so a sum that starts with -0.0 says that no rank has used it.
        """
        packed = [p for p in self.packed if p in gradients]
        buffer = torch.empty(self.N, sum(p.chunk for p in packed), dtype=self.reduce_dtype(), device=self.device)
        rows = dict(zip(packed, buffer.split_with_sizes([p.chunk for p in packed], dim=1), strict=True))
        for p, gradient in gradients.items():
            if p in rows:
                p.spread(gradient, rows[p])
            elif gradient is None:
                rows[p] = buffer.new_full((self.N, p.chunk), -0.0)
            else:
                rows[p] = gradient.to(buffer.dtype).reshape(self.N, p.chunk)
            if gradient is not None:
                if (before := self.divisors()[0]) > 1:
                    rows[p] /= before
                rows[p][:, :1] += 0.0
        return [buffer, *(rows[p] for p in self.alone if p in rows)]

    def divisors(self):
        """By what to divide before the sum, and after it. Before it, at 3 ranks, every term would be rounded."""
        ranks = math.prod(group.size() for group in self.groups)
        return (ranks, 1) if self.reduce_dtype() == torch.float16 else (1, ranks)  # sums of fp16 overflow at 65504

    # ---- What a unit is made of.

    def find_parameters(self):
        """Set `parameters`; -> the whole ones. They must be the same on all ranks, and in no other unit."""
        slots, problem = {}, None
        for path, module in own_modules(self.module):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                slots.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), module, name))
        for parameter, [(name, *_), *_] in slots.items():
            if other := getattr(parameter, "_fsdp_name", None):
                text = f"{name!r} of {self.name} is tied to {other}, another unit; one unit must have both"
                problem = problem or ValueError(text)
        if len(dtypes := {str(parameter.dtype) for parameter in slots}) > 1:
            text = f"{self.name} has parameters of {' and '.join(sorted(dtypes))}; make a unit for each dtype"
            problem = ValueError(text)
        named = [(name, parameter) for parameter, [(name, *_), *_] in slots.items()]
        for group in self.groups:
            try:
                verify_same_model(named, group, problem)
            except ValueError as error:
                problem = error  # the ranks of the next group must hear of it
        if problem:
            raise problem
        self.parameters = [ShardedParameter(p, slots[p], self.N, self.rank, self.name) for p in slots]
        return list(slots)

    @torch.inference_mode(False)
    def allocate(self, shards, home):
        """Keep copies of `shards` side by side in `flat`; make whole parameters, without memory for now."""
        if not shards:
            return
        dtype, align = shards[0].dtype, 64  # bytes: a product of matrices that start elsewhere may round differently
        self.dtype = (self.mp_policy.param_dtype if dtype.is_floating_point else None) or dtype
        direct = self.gloo and self.wire == self.device and self.N > 1
        fits = {p: direct and p.rows % self.N == 0 and p.chunk * self.dtype.itemsize >= ALONE for p in self.parameters}
        self.in_flat = sorted(self.parameters, key=fits.get)
        self.packed, self.alone = ([p for p in self.in_flat if fits[p] == alone] for alone in (False, True))
        pinned = self.offload and self.offload.pin_memory and home.type == "cpu" != self.device.type
        self.flat = torch.zeros(sum(p.chunk for p in self.in_flat), dtype=dtype, device=home, pin_memory=pinned)
        size = {p: -(-self.N * p.chunk * self.dtype.itemsize // align) * align // self.dtype.itemsize for p in fits}
        gathered, whole = [], []
        for part in (self.packed, self.alone):
            gathered.append(torch.empty(sum(size[p] for p in part), dtype=self.dtype, device=self.device))
            whole += gathered[-1].split([size[p] for p in part])
        self.gathered_packed, self.gathered_alone = gathered
        shards, mine = dict(zip(self.parameters, shards, strict=True)), self.flat.split([p.chunk for p in self.in_flat])
        for p, piece, place in zip(self.in_flat, mine, whole, strict=True):
            p.allocate(shards[p], piece, place)
        free(*gathered)

    def adopt_shards(self):
        """Take over what the module holds now: .to(), .to_empty() and load_state_dict(assign=True) replace shards."""
        shards = [p.get() for p in self.parameters]
        same = (self.flat.dtype, self.flat.device) if shards else ()  # shards without rows have no address
        if any(
            a is not p.shard or a.data_ptr() != p.address or (a.dtype, a.device) != same
            for a, p in zip(shards, self.parameters, strict=True)
        ):
            if len({shard.dtype for shard in shards}) > 1:
                dtypes = ", ".join(f"{p.name}: {a.dtype}" for a, p in zip(shards, self.parameters, strict=True))
                raise ValueError(f"{self.name} has parameters of several dtypes now ({dtypes}); a unit has one")
            if not self.offload:
                self.device = shards[0].device
            self.allocate(shards, shards[0].device)

    def on_meta(self):
        return bool(self.parameters) and self.flat.device.type == "meta"

    def home(self):
        """Where shards live."""
        return torch.device("cpu") if self.offload else self.device

    def settle(self):
        """Whatever was going on, SHARDED with the module's present shards."""
        self.order = self.order or Order(self)
        if self.state is State.GATHERING:
            self.unshard()
        if self.state is State.UNSHARDED:
            self.reshard()
        self.adopt_shards()

    def show_whole(self):
        for p in self.parameters:
            if p.get() is p.shard:  # nobody has replaced it
                p.put(p.whole)

    def show_shards(self):
        for p in self.parameters:
            if p.get() is p.whole:
                p.put(p.shard)

    def leave_meta_buffers(self):
        for _, module in own_modules(self.module):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self.device)

    def leave_meta(self, values=None):
        """Make real shards out of whole `values`, or without values."""
        self.leave_meta_buffers()
        if self.on_meta():
            for p in self.parameters:
                p.requires_grad = p.shard.requires_grad
            shards = [torch.empty_like(p.shard, device="cpu") for p in self.parameters]
            self.allocate(shards, self.home())
            if values:
                self.set_values(values)

    def set_values(self, values):
        for p, value in zip(self.parameters, values, strict=True):
            p.shard.data.copy_(p.cut(self.broadcast(value)))

    def broadcast(self, value):
        """The value that the first rank of the groups has."""
        value = value.detach().to(self.wire, copy=True).contiguous()
        for group in self.groups:
            dist.broadcast(value.view(-1).view(torch.uint8), dist.get_global_rank(group, 0), group=group)
        return value

    def everyone(self, mine):
        """What each rank of the groups passes, the first rank's first."""
        everyone = [mine]
        for group in self.groups:
            theirs = [None] * group.size()
            dist.all_gather_object(theirs, everyone, group=group)
            everyone = list(itertools.chain.from_iterable(theirs))
        return everyone

    @torch.no_grad()
    def all_rows(self, p, rows):
        """Whole, in host memory, from what each rank has of it."""
        mine = torch.zeros(p.chunk, dtype=rows.dtype, device=self.wire)
        mine[: rows.numel()] = rows.reshape(-1)
        everyone = mine.new_empty(self.N * p.chunk)
        as_bytes = (everyone.view(torch.uint8), mine.view(torch.uint8))  # gloo has no int16, no float8
        all_gather_single(*as_bytes, group=self.shard_group)
        whole = everyone[: p.shape.numel()].view(p.shape).cpu()
        return whole if whole.numel() == everyone.numel() else whole.clone()  # torch.save() would write the padding

    def reduce_dtype(self):
        return self.mp_policy.reduce_dtype or self.dtype

    def take_gradient(self, p):
        """What this rank has accumulated since the last reduction, or None."""
        gradient, p.whole.grad = p.whole.grad, None
        if p.kept is not None:  # by no_sync
            gradient, p.kept = p.kept if gradient is None else p.kept.add_(gradient), None
        return gradient

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"{self.name} is sharded: copy it before fully_shard, or save its full_state_dict()")


class ShardedParameter:
    """One parameter of a unit: its places in the module, `shard` (this rank's rows) and `whole` (all rows)."""

    def __init__(self, parameter, slots, N, rank, unit_name):
        self.slots, self.name = [(module, name) for _, module, name in slots], slots[0][0]
        self.owed, self.kept = False, None  # has there been a no_sync since the last reduction; its gradient
        self.label = parameter._fsdp_name = f"{self.name!r} of {unit_name}"  # who else has it is told this
        self.shape, self.requires_grad = parameter.shape, parameter.requires_grad
        rows, *self.row_shape = parameter.shape or (1,)  # a scalar is one row
        self.rows, self.N, self.rank = rows, N, rank
        self.rows_per_rank = -(-rows // N)
        self.chunk = self.rows_per_rank * math.prod(self.row_shape)  # elements that a rank sends: its rows and padding
        self.first = min(rank * self.rows_per_rank, rows)
        self.last = min(self.first + self.rows_per_rank, rows)
        # Whole parameters keep the order of their dimensions in memory: products round as they did.
        strides = torch.empty_like(parameter.detach().view(rows, *self.row_shape), device="meta").stride()
        self.dims = sorted(range(len(strides)), key=lambda d: -strides[d])

    def allocate(self, shard, piece, whole):
        with torch.no_grad():
            view = piece[: shard.numel()].view(shard.shape).data
            if not view.is_meta:
                view.copy_(shard)
        if isinstance(shard, nn.Parameter):  # the optimizer knows it
            self.shard = shard
            shard.data = view
        else:
            self.shard = nn.Parameter(view, requires_grad=self.requires_grad)
        self.shard._fsdp_name, self.address = self.label, self.shard.data_ptr()
        self.put(self.shard)
        padded = (self.N * self.rows_per_rank, *self.row_shape)
        whole = whole[: self.N * self.chunk].view([padded[d] for d in self.dims])
        whole = whole.permute([self.dims.index(d) for d in range(len(padded))])
        self.landing = whole.unflatten(0, (self.N, self.rows_per_rank))
        # .data: writing through `landing` later does not count as a change of what autograd has saved
        self.whole = nn.Parameter(whole[: self.rows].view(self.shape).data, requires_grad=self.requires_grad)

    def get(self):
        module, name = self.slots[0]
        return module._parameters[name]

    def put(self, parameter):
        for module, name in self.slots:
            module._parameters[name] = parameter

    def cut(self, whole):
        return whole.detach().view(self.rows, *self.row_shape)[self.first : self.last]

    def land(self, shards, first):
        """Put the shards of the ranks from `first` on, (ranks, chunk), into the whole parameter."""
        places = self.landing[first : first + len(shards)]
        places.copy_(shards.view(places.shape))

    def spread(self, gradient, section):
        """Write the rows of `gradient` into `section`, (N, chunk), where rank r gets row r; None writes -0.0."""
        if gradient is None:
            section.fill_(-0.0)
            return
        if self.chunk:
            rows = gradient.reshape(self.rows, *self.row_shape)
            full = self.rows // self.rows_per_rank  # ranks that get a whole chunk
            head, tail = rows.split([full * self.rows_per_rank, self.rows - full * self.rows_per_rank])
            head = head.unflatten(0, (full, self.rows_per_rank))
            section[:full].view(head.shape).copy_(head)
            if full < self.N:
                section[full:].zero_()
                section[full, : tail.numel()].view(tail.shape).copy_(tail)


# ---------------------------------------------------------------------------------------------------------------------
# 3. One order of collectives, the same on every rank. A rank that leaves a unit out lives its life in passing.


@dataclasses.dataclass(eq=False)
class Call:
    """One forward of a unit: `start` and `end` number the starts and ends of all calls."""

    unit: Unit
    start: float
    end: float = math.inf
    backward: int = 0  # the number of the backward that has reached it


class Order:
    """In which order the units under one outermost unit are gathered and reduced.

    Forward gathers them in the order of rank 0's first forward (before: as registered), backward in that order from
    its end, and reduces each unit once backward has gone past it. Ranks that disagreed would add the wrong tensors.
    """

    def __init__(self, outermost):
        self.outermost, self.units = outermost, units_in(outermost.module)
        for number, unit in enumerate(self.units):
            if unit.order and unit.order.outermost not in self.units:
                both = f"{outermost.name} and {unit.order.outermost.name}"
                raise RuntimeError(f"{unit.name} is in two outermost units, {both}; fully_shard a module that has both")
            unit.order, unit.number = self, number
        for name, module in outermost.module.named_modules():
            if unit := unit_of(module):
                unit.name = name or type(module).__name__
        self.set_order(list(tour(outermost.module)))
        self.training = torch.is_grad_enabled()
        self.recorded = []  # the first forward's starts and ends; None once all ranks know rank 0's
        self.events = None  # a list: log what happens, (what, unit's name, began, ended)
        self.clock = itertools.count()
        self.caller = None  # the unit whose forward is a pass: all calls of units within it belong to it
        self.script = deque()  # units that this pass has yet to gather
        self.calls = weakref.WeakSet()  # those whose graph is alive, and no backward has reached
        self.detached = []  # those without a graph: a checkpoint may compute it in backward
        self.tape = weakref.WeakSet()  # calls that this backward may still go through
        self.passed = set()  # units in the script of a forward since the last backward
        self.unreduced, self.reductions = [], []  # units; generators, see Unit.reduce
        self.backward = None  # a weak reference to what the running one calls in the end, dead once it has raised
        self.backwards = 0
        self.failed = False  # what is being reduced belongs to a backward that raised

    def set_order(self, events):
        self.tour = events
        for position, (unit, starts) in enumerate(events):
            if starts:
                unit.start = position
            else:
                unit.end = position
        self.forward_order = [unit for unit, starts in events if starts and unit.parameters]
        self.backward_order = [unit for unit, starts in reversed(events) if not starts and unit.parameters]

    # ---- Forward.

    def enter(self, unit):
        """Unshard `unit` for the call that begins; -> the call."""
        if in_autograd():  # a checkpoint computes again
            self.start_backward()
            calls = [call for call in self.tape if call.unit is unit]
            call = max(calls, key=lambda call: call.start) if calls else self.new_call(unit)
        else:
            if self.caller in (None, unit):
                self.start_forward(unit)
            call = self.new_call(unit)
        self.advance_to(unit)
        unit.show_whole()
        return call

    def new_call(self, unit):
        call = Call(unit, next(self.clock))
        if self.training:
            self.calls.add(call)
            self.tape.add(call)
            if not torch.is_grad_enabled():
                self.detached.append(call)
        if self.recorded is not None and (unit, True) not in self.recorded:
            self.recorded.append((unit, True))
        return call

    def start_forward(self, unit):
        self.reset()
        self.caller, self.training = unit, torch.is_grad_enabled()
        self.recorded = None if self.recorded is None else []
        self.script = deque(u for u in self.forward_order if unit.start <= u.start and u.end <= unit.end)
        if self.training:
            self.passed |= set(self.script)

    def leave(self, unit, call):
        """The call ends, or has raised."""
        if in_autograd():
            return
        call.end = next(self.clock)
        if self.recorded is not None and (unit, False) not in self.recorded:
            self.recorded.append((unit, False))
        if unit.state is State.UNSHARDED and not self.keeps(unit):
            unit.reshard()
        if unit is self.caller:
            self.advance_to(None)
            if self.recorded is not None and unit is self.outermost:
                self.agree()
            self.caller = None

    def keeps(self, unit):
        """Does `unit` stay unsharded for backward, on ranks that leave it out as well?"""
        return self.training and not unit.reshard_after_forward

    def agree(self):
        """Take over rank 0's order. What it has not called stays where it is registered."""
        recorded = self.outermost.everyone([(unit.number, starts) for unit, starts in self.recorded])[0]
        called = {self.units[number] for number, _ in recorded}
        recorded = iter([(self.units[number], starts) for number, starts in recorded])
        self.set_order([next(recorded) if event[0] in called else event for event in self.tour])
        self.recorded = None

    def advance_to(self, unit, reduce=False):
        """Gather the units whose turn it is before `unit`, in passing, then `unit`, and start the next. None: all."""
        if unit is None or unit in self.script:
            while self.script:
                current = self.script.popleft()
                if reduce:
                    self.reduce_after(current)
                current.unshard()
                if self.script:
                    self.script[0].gather()
                if current is unit:
                    return
                if not (self.is_pending(current) if self.backward else self.keeps(current)):
                    current.reshard()
        else:
            if reduce:
                self.reduce_after(unit)
            if unit.parameters and unit.state is not State.UNSHARDED:
                unit.unshard()  # called once more, or out of order: one more gather, on all ranks alike

    # ---- Backward.

    def start_backward(self):
        if self.backward:
            if self.backward():
                return
            self.reset()  # that one raised
        finish = functools.partial(Order.finish_backward, self)  # autograd alone holds it
        self.backward, self.backwards = weakref.ref(finish), self.backwards + 1
        units = [u for u in self.forward_order if u in self.passed or not self.passed]
        self.script = deque(u for u in self.backward_order if u in set(units) and u.state is State.SHARDED)
        self.unreduced, self.tape = units, weakref.WeakSet(self.calls)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def enter_backward(self, unit, call):
        """Unshard `unit` for backward through `call`, and reduce what is behind it; -> is this new?"""
        self.start_backward()
        if call.backward == self.backwards:
            return False
        call.backward = self.backwards
        # Autograd runs what was computed last first. What began after this call had ended is past.
        self.tape = weakref.WeakSet(other for other in self.tape if other.start < call.end)
        self.tape.add(call)
        self.advance_to(unit, reduce=True)
        unit.show_whole()  # a checkpoint inside the unit computes with them
        return True

    def is_pending(self, unit):
        return any(call.unit is unit for call in self.tape)

    def reduce_after(self, unit):
        """Reduce the units that come after `unit` in the order, last first, unless backward needs them once more."""
        while self.unreduced and self.unreduced[-1].start > unit.end and not self.is_pending(self.unreduced[-1]):
            self.reduce(self.unreduced.pop())

    def reduce(self, unit):
        self.proceed()  # first: it frees what the unit before has sent
        reduction = unit.post_backward()
        if next(reduction, "done") != "done":
            self.reductions.append(reduction)

    def proceed(self):
        self.reductions = [reduction for reduction in self.reductions if next(reduction, "done") != "done"]

    def finish_backward(self):
        self.tape.clear()
        self.advance_to(None, reduce=True)
        while self.unreduced:
            self.reduce(self.unreduced.pop())
        while self.reductions:
            self.proceed()
        late = [p.label for unit in self.units for p in unit.parameters if p.whole.grad is not None]
        self.reset()
        if late:
            raise RuntimeError(f"these got a gradient after their unit was reduced: {', '.join(late)}")

    def reset(self):
        """Finish what is on its way, and reshard all units. After an exception in backward its gradients are lost."""
        self.failed = True
        while self.reductions:
            self.proceed()
        self.failed = False
        for unit in self.units:
            if unit.state is State.GATHERING:
                unit.unshard()
            if unit.state is State.UNSHARDED:
                unit.reshard()
        if self.backward:
            for p in itertools.chain.from_iterable(unit.parameters for unit in self.units):
                p.whole.grad = None
            self.backward, self.unreduced, self.detached = None, [], []
            self.calls = weakref.WeakSet(call for call in self.calls if call.backward != self.backwards)
            self.passed.clear()
        self.script.clear()

    def log(self, what, unit, began):
        if self.events is not None and unit.parameters:
            self.events.append((what, unit.name, began, time.perf_counter()))


# ---------------------------------------------------------------------------------------------------------------------
# 4. Refinements. Accumulation and clipping:


@contextmanager
def no_sync(module):
    """A backward in here keeps whole gradients on this rank, and sends nothing; the first one outside adds them."""
    units = units_in(module)
    before = [unit.sync for unit in units]
    for unit in units:
        unit.sync = False
    try:
        yield
    finally:
        for unit, sync in zip(units, before, strict=True):
            unit.sync = sync


@torch.no_grad()
def clip_grad_norm_(module, max_norm, norm_type=2.0, error_if_nonfinite=False):
    """Scale all gradients so that their total norm, over all ranks' shards, is at most `max_norm`; -> that norm.

    All ranks must call it. RuntimeError on all of them when the norm is not finite and `error_if_nonfinite`, ValueError
    when a parameter that trains is in no unit.
    """
    norm_type, total = float(norm_type), 0.0
    infinite = norm_type == math.inf
    units = [unit for unit in all_units(module) if unit.parameters]
    sharded = {p.shard for unit in units for p in unit.parameters}
    if alone := [n for n, p in module.named_parameters() if p.requires_grad and p not in sharded]:
        raise ValueError(f"{', '.join(alone)}: in no unit, so no rank has the mean gradient; fully_shard the root, too")
    dtypes = (unit.flat.dtype.to_real() for unit in units)  # on all ranks; the squares of fp16 overflow soon
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    for group, unit in {unit.shard_group: unit for unit in units}.items():
        shards = [p.shard for u in units if u.shard_group is group for p in u.parameters]
        gradients = [s.grad.abs() if s.is_complex() else s.grad for s in shards if s.grad is not None and s.numel()]
        norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients]
        mine = torch.stack([norm.to(unit.wire, dtype) for norm in norms or [torch.zeros(())]])
        mine = mine.max() if infinite else mine.pow(norm_type).sum()
        dist.all_reduce(mine, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = max(total, mine) if infinite else total + mine
    total = total if infinite else total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}; they were not clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in itertools.chain.from_iterable(unit.parameters for unit in units):
        if p.shard.grad is not None:
            p.shard.grad.mul_(scale.to(p.shard.grad.device))
    return total


# ---- Whole state dicts, and models too large for one device. All ranks must call these.


@torch.no_grad()
def full_state_dict(module, *, rank0_only=False):
    """What the plain module's state_dict() would be, in host memory. `rank0_only`: {} on the other ranks.

    One parameter after the other is gathered, so no device ever holds the whole model.
    """
    units, whole = all_units(module), {}
    keep = not rank0_only or is_rank0(units)
    for unit in units:
        for p in unit.parameters:
            value = unit.all_rows(p, p.shard)
            whole |= {p.shard: value} if keep else {}
    state_dict = module.state_dict(keep_vars=True) if keep else {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            state_dict[name] = whole[value] if value in whole else value.detach().to("cpu", copy=True)
    return state_dict


@torch.no_grad()
def load_full_state_dict(module, state_dict):
    """Load whole tensors, as full_state_dict() or the plain module's state_dict() returned them at any world size.

    Either every rank passes them, or rank 0 does and the others pass {}: then they travel one by one. A module on the
    meta device becomes real. RuntimeError on all ranks where names or shapes do not match.
    """
    units = all_units(module)
    for unit in units:
        unit.leave_meta()
    owners = {p.shard: p for unit in units for p in unit.parameters}
    tensors = lambda d: {n: t for n, t in d.items() if isinstance(t, torch.Tensor) and not is_extra(n)}  # noqa: E731
    targets = tensors(module.state_dict(keep_vars=True))
    mine = {n: tuple(value.shape) for n, value in tensors(state_dict).items()}
    fits = {n: tuple(owners.get(target, target).shape) for n, target in targets.items()}
    wrong = [f"{n}: {mine.get(n, 'missing')}, not {fits.get(n)}" for n in mine | fits if mine.get(n) != fits.get(n)]
    everyone = units[0].everyone((bool(state_dict), wrong if state_dict else []))
    if not everyone[0][0]:
        everyone[0] = (False, ["rank 0 has none"])
    if problem := next((problem for _, problem in everyone if problem), None):
        raise RuntimeError(f"the state dict does not fit {type(module).__name__}: {'; '.join(problem)}")
    for n, target in targets.items():
        value = state_dict[n].detach() if state_dict else torch.empty(fits[n], dtype=target.dtype)
        if not all(has for has, _ in everyone):
            value = units[0].broadcast(value.to(target.dtype))
        target.copy_(owners[target].cut(value) if target in owners else value)
    extra = {n: value for n, value in state_dict.items() if is_extra(n)}
    for n, value in (extra if all(has for has, _ in everyone) else units[0].everyone(extra)[0]).items():
        module.get_submodule(n.rpartition(".")[0]).set_extra_state(value)


@torch.no_grad()
def full_optimizer_state_dict(module, optimizer, *, rank0_only=False):
    """What state_dict() of the plain optimizer would be, over the plain module's parameters in the same groups."""
    units = all_units(module)
    owners = {p.shard: (unit, p) for unit in units for p in unit.parameters}
    state_dict, whole = optimizer.state_dict(), {}
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    for position, state in state_dict["state"].items():
        shard, whole[position] = shards[position], {}
        for key, value in state.items():
            if shard in owners and isinstance(value, torch.Tensor) and value.shape == shard.shape:
                unit, p = owners[shard]
                whole[position][key] = unit.all_rows(p, value)
            else:
                whole[position][key] = copy.deepcopy(value)
    return {"state": whole, "param_groups": state_dict["param_groups"]} if not rank0_only or is_rank0(units) else {}


@torch.no_grad()
def load_full_optimizer_state_dict(module, optimizer, state_dict):
    """Load what full_optimizer_state_dict(), or the plain optimizer's state_dict(), returned at any world size.

    Either every rank passes it, or rank 0 does and the others pass {}.
    """
    units = all_units(module)
    owners = {p.shard: p for unit in units for p in unit.parameters}
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    travel = not all(units[0].everyone(bool(state_dict)))
    outline = (list(state_dict["state"]), state_dict["param_groups"]) if state_dict else None
    positions, groups = units[0].everyone(outline)[0]
    mine = {}
    for position in positions:
        state = state_dict["state"][position] if state_dict else None
        if travel:
            state = units[0].everyone(state if is_rank0(units) else None)[0]
        p, mine[position] = owners.get(shards[position]), {}
        for key, value in state.items():
            rows = p and isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step"
            mine[position][key] = p.cut(value).clone() if rows else copy.deepcopy(value)
    optimizer.load_state_dict({"state": mine, "param_groups": groups})


def reset_parameters(module):
    """The default `init_fn` of `materialize`."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset:
        reset()
    elif any(True for _ in module.parameters(recurse=False)):
        raise ValueError(f"{type(module).__name__} has no reset_parameters(); pass an init_fn to materialize")


@torch.no_grad()
def materialize(module, init_fn=reset_parameters):
    """Give a module that was built, and sharded, on the meta device its values; before an optimizer sees it.

    `init_fn` is called on every submodule, in the order of `module.apply`, so the values are bitwise those of
    module.to_empty(device=…).apply(init_fn) under the same seed. A unit is whole only while its own modules are
    visited, and cut then: of nested units, at most one on each level is whole. The values are those of rank 0.
    """

    def visit(module, unit):
        unit = unit_of(module) or unit
        cut = unit_of(module) and unit.on_meta()
        if unit_of(module):
            unit.leave_meta_buffers()
        if cut:
            for p in unit.parameters:
                whole = torch.empty_like(p.whole, dtype=p.shard.dtype)
                p.put(nn.Parameter(whole, requires_grad=p.shard.requires_grad))
        for child in module.children():
            visit(child, unit)
        init_fn(module)
        if cut:
            unit.leave_meta([p.get().detach() for p in unit.parameters])

    visit(module, None)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the above.


def unit_of(module):
    return module.__dict__.get("_fsdp_unit")


def units_in(module):
    """The units of `module` and its submodules, as registered."""
    return [unit for unit, starts in tour(module) if starts]


def all_units(module):
    """Those, SHARDED; ValueError where there is none, or `module` is only a part of one."""
    units = units_in(module)
    for unit in units:
        unit.settle()
    shards = {p.shard for unit in units for p in unit.parameters}
    parts = [p._fsdp_name for p in module.parameters() if hasattr(p, "_fsdp_name") and p not in shards]
    if parts:
        raise ValueError(
            f"this {type(module).__name__} is a part of a unit ({', '.join(parts)}); pass the unit's module"
        )
    if not units:
        raise ValueError(f"this {type(module).__name__} has no unit; call fully_shard first")
    return units


def is_extra(name):
    """Of a state dict: what a module's get_extra_state() has returned."""
    return name.rpartition(".")[2] == "_extra_state"


def tour(module):
    """[(unit, True where its module starts, False where it ends), …] around the tree of modules."""
    unit = unit_of(module)
    within = itertools.chain.from_iterable(tour(child) for child in module.children())
    return list(dict.fromkeys([(unit, True), *within, (unit, False)] if unit else within))


def own_modules(module, path=""):
    """(path, module) of `module` and its submodules, without those that are units."""
    yield path, module
    for name, child in module.named_children():
        if not unit_of(child):
            yield from own_modules(child, f"{path}.{name}".lstrip("."))


def is_rank0(units):
    return not any(group.rank() for group in units[0].groups)


def compute_device(parameters, process_group):
    """Where the parameters are; with NCCL, this process's GPU."""
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type in ("cpu", "meta"):
        nccl = dist.get_backend(process_group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return device


def in_autograd():
    """Are we in a backward? Then a forward is a checkpoint that computes again."""
    return torch._C._current_graph_task_id() != -1


def is_minus_zero(x):
    return x == 0 and math.copysign(1.0, x.real) < 0


def hold(*tensors):
    """Give them memory again. Their storages stay the same: what autograd has saved in forward are views into them."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.nbytes)


def free(*tensors):
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def cast(tree, dtype):
    """`tree` with its floating-point tensors in `dtype`."""
    change = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    return tree_map(change, tree)


def start_exchange(sent, received, process_group):
    """Send sent[r] to each other rank r, and fill received[r] from it. -> what to wait for."""
    N, rank, transfers = dist.get_world_size(process_group), dist.get_rank(process_group), []
    for distance in range(1, N):
        to, source = (rank + distance) % N, (rank - distance) % N
        peers = (dist.get_global_rank(process_group, r) for r in (to, source))
        transfers.append(dist.P2POp(dist.isend, sent[to], next(peers), process_group))
        transfers.append(dist.P2POp(dist.irecv, received[source], next(peers), process_group))
    return dist.batch_isend_irecv(transfers) if transfers else []


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
    demo = Demo(bitwise=sys.maxsize)
    model = copy.deepcopy(demo.model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    units = [unit for unit in units_in(model) if unit.parameters]
    owners = {p.shard: (unit, p) for unit in units for p in unit.parameters}

    def step(inputs, targets):
        events.clear()
        optimizer.zero_grad()
        loss = language_loss(model(inputs.chunk(demo.ranks)[demo.rank]), targets.chunk(demo.ranks)[demo.rank])
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        for tensors in ([shard.grad for shard in owners], owners):
            yield [u.all_rows(p, t).to(demo.device) for t, (u, p) in zip(tensors, owners.values(), strict=True)]

    unit_of(model).settle()
    events = units[0].order.events = []
    demo.train(step, whole)
    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    status = demo.report("fsdp", held(model.parameters(), optimizer), "3Ψ(N-1)/N", 3 * psi * (N - 1) / N)
    demo.show("\nunit      elements   padding     shard")
    for unit in units:
        elements, shard = sum(p.shape.numel() for p in unit.parameters), unit.flat.numel()
        demo.show(f"{unit.name:8}{elements:10,}{N * shard - elements:10,}{shard:10,}")
    demo.show(draw_timeline(events))
    demo.leave(status)


def draw_timeline(events, width=100):
    """A line per unit: when it is gathered (until waited for), computes, and is reduced (likewise)."""
    start, end = min(began for *_, began, _ in events), max(ended for *_, ended in events)
    column = lambda at: min(int(width * (at - start) / (end - start)), width - 1)  # noqa: E731
    lines = {name: [" "] * width for _, name, *_ in events}
    for what, name, began, ended in events:
        for i in range(column(began), column(ended) + 1):
            lines[name][i] = {"gather": "·", "forward": "F", "backward": "B", "reduce": "-"}[what]
    picture = [f"{name:8} {''.join(line)}" for name, line in lines.items()]
    title = f"unit     the last step, {1e3 * (end - start):.0f} ms: · gather, F forward, B backward, - reduce-scatter"
    return "\n".join(["", title, *picture])


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

"""FSDP: every rank keeps 1/N of the parameters, and gathers the rest of a block only while the block computes.

The model is cut into units: what one call of `fully_shard` covers. A unit's parameters lie end to end in one flat
buffer, cut into N equal pieces wherever the cuts fall. One step of a unit on N = 2 ranks:

               forward                                    backward
    rank 0   w₀ ┐            ┌ w₀w₁ compute ─ free   w₀ ┐            ┌ w₀w₁ compute ─ free ─ g ┐                ┌ ḡ₀
                ├ all-gather ┤                          ├ all-gather ┤                         ├ reduce-scatter ┤
    rank 1   w₁ ┘            └ w₀w₁ compute ─ free   w₁ ┘            └ w₀w₁ compute ─ free ─ g ┘                └ ḡ₁

ḡᵣ is rank r's piece of the mean gradient, which is all that its optimizer needs. Communication hides behind the units
next to it: the next unit is gathered while this one computes, and reduced while the one after it does.

Cost per rank in elements, with Adam; Ψ parameters, u those of the largest unit (each starts at a multiple of 64 bytes):

                                  parameters   gradients   optimizer   sent per step
    DDP                               Ψ           2Ψ          2Ψ       2Ψ(N-1)/N
    FSDP, at rest                    Ψ/N         Ψ/N         2Ψ/N
          in forward, backward     + 2u         + 3u                   3Ψ(N-1)/N: two all-gathers, one reduce-scatter
          reshard_after_forward=False: + Ψ      + 3u                   2Ψ(N-1)/N: no all-gather in backward

2u: the unit that computes and the one being gathered. 3u: the gradient being made, and the one that travels with what
arrives for it. At rest, in fp32, that is 16Ψ/N bytes.

Run:      torchrun --nproc-per-node 2 fsdp.py          (python fsdp.py is a world of one)
Paper:    Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, §3; Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §5.3
Mirrors:  torch.distributed.fsdp.fully_shard (FSDP2), on the flat buffer of FSDP1's FlatParameter (§3.2): what is gathered
          lands in place. FSDP2 cuts the rows of each parameter: shards keep their dimensions, and in return every
          gather is copied apart, every gradient copied together, and each parameter's rows are padded to N.
Left out: ranks that run different units, or in another order (PyTorch does not have that either); outputs that are no
          lists, tuples or dicts of tensors; loading from rank 0 alone; second-order gradients. A unit of which one
          parameter trains is reduced whole: give frozen ones their own. Units in reentrant checkpoints are reduced
          when backward ends. An optimizer that shards for itself is zero.py
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


def all_gather(whole, piece, group, tag=0):
    """Begin to fill `whole` with all ranks' pieces, in rank order. -> what to wait for before either is touched."""
    if not by_messages(whole, group):
        return [all_gather_single(whole, piece, group=group, async_op=True)]
    pieces = whole.view(dist.get_world_size(group), len(piece))
    pieces[dist.get_rank(group)] = piece
    return exchange([piece] * len(pieces), pieces, group, tag)


def reduce_scatter(whole, group, tag=0):
    """Begin to add all ranks' `whole`. -> what to wait for, and the terms of this rank's 1/N of the sum."""
    N, rank = dist.get_world_size(group), dist.get_rank(group)
    if not by_messages(whole, group):
        total = whole.new_empty(len(whole) // N)
        return [reduce_scatter_single(total, whole, group=group, async_op=True)], [total]
    parts = whole.view(N, len(whole) // N)
    terms = [mine if r == rank else torch.empty_like(mine) for r, mine in enumerate(parts)]
    return exchange(parts, terms, group, tag), terms  # in rank order, as one device adds them


def by_messages(tensor, group):
    """On gloo. Its own all-gather takes twice as long, and its reduce-scatter adds around a ring."""
    return tensor.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)


def exchange(sent, received, group, tag):
    """Send sent[r] to each other rank r, and fill received[r] from it."""
    N, rank, transfers = len(received), dist.get_rank(group), []
    for distance in range(1, N if received[0].numel() else 0):
        to, source = (rank + distance) % N, (rank - distance) % N
        peers = [dist.get_global_rank(group or dist.group.WORLD, r) for r in (to, source)]
        transfers.append(dist.P2POp(dist.isend, sent[to], peers[0], group, tag))
        transfers.append(dist.P2POp(dist.irecv, received[source], peers[1], group, tag))
    return dist.batch_isend_irecv(transfers) if transfers else []


def wait(works):
    for work in works:
        work.wait()


class AllGather(torch.autograd.Function):
    """This rank's piece to the whole. Backward: this rank's piece of the mean of the ranks' gradients."""

    @staticmethod
    def forward(ctx, piece, group):
        ctx.group, ctx.N = group, dist.get_world_size(group)
        whole = piece.new_empty(ctx.N * len(piece))
        wait(all_gather(whole, piece.detach(), group))
        return whole

    @staticmethod
    def backward(ctx, gradient):
        works, terms = reduce_scatter(gradient.contiguous(), ctx.group)
        wait(works)
        return sum(terms) / ctx.N, None


def forward_sharded(module, pieces, *inputs, process_group=None):
    """`module(*inputs)`, of whose parameters {name: this rank's 1/N of the elements, the last ones padded} are kept.

    The checkpoint forgets what was gathered after forward, and gathers (and computes) again in backward.
    """

    def forward(*inputs):
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        whole = {name: AllGather.apply(piece, process_group) for name, piece in pieces.items()}
        whole = {name: flat[: shapes[name].numel()].view(shapes[name]) for name, flat in whole.items()}
        return functional_call(module, whole, inputs)

    return checkpoint(forward, *inputs, use_reentrant=False)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: units, whose parameters are gathered, freed and reduced together. Nothing is computed twice.


def layout(sizes, align, N):
    """Parameters of so many elements, each at a multiple of `align`: -> their offsets, the elements of a piece."""
    offsets = list(itertools.accumulate((-(-size // align) * align for size in sizes), initial=0))
    return offsets[:-1], -(-(offsets[-2] + sizes[-1]) // N) if sizes else 0


class Place:
    """Where one parameter of a unit lies: in the module, in the flat buffer, and in this rank's piece of that."""

    def __init__(self, parameter, name, slots, offset, start, stop):
        self.name, self.slots = name, slots  # (module, attribute), several where it is tied
        self.shape, self.offset, numel = parameter.shape, offset, parameter.numel()
        # Dimensions keep their order in memory: products of transposed matrices round as they did.
        self.stride = torch.empty_like(parameter, device="meta").stride()
        first, last = (min(max(bound - offset, 0), numel) for bound in (start, stop))
        self.mine = slice(first, last)  # of its elements, those on this rank
        self.here = slice(first + offset - start, last + offset - start)  # of this rank's piece
        self.shard = self.whole = None  # nn.Parameters: what the optimizer has, what autograd has

    def cut(self, whole):
        """This rank's elements, 1-D, of a tensor like the whole parameter."""
        memory = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return memory.as_strided((whole.numel(),), (1,))[self.mine].clone()

    def view(self, flat):
        return flat.as_strided(self.shape, self.stride, self.offset)

    def join(self, pieces):
        """The whole parameter, from all ranks' elements."""
        return torch.cat(pieces).as_strided(self.shape, self.stride)

    def get(self):
        return self.slots[0][0]._parameters[self.slots[0][1]]

    def put(self, parameter):
        for module, attribute in self.slots:
            module._parameters[attribute] = parameter


class State(Enum):
    SHARDED = "`flat` has memory: this rank's piece, of which each shard is a view. The module shows shards"
    GATHERING = "`gathered` has memory, too, and all ranks' pieces are on their way into it"
    UNSHARDED = "`gathered` has arrived; each whole parameter is a view of it. The module shows them while it runs"


class Unit:
    """What moves together: gather, unshard, reshard, and in backward reduce, add_gradients. `Order` says when."""

    def __init__(self, module, groups, reshard_after_forward, mp_policy, offload_policy):
        self.name, self.groups, self.reshard_after_forward = type(module).__name__, groups, reshard_after_forward
        self.N, self.ranks = dist.get_world_size(groups[-1]), math.prod(map(dist.get_world_size, groups))
        found = find_parameters(module, groups)
        parameters = [parameter for parameter, _, _ in found]
        self.dtype = parameters[0].dtype if parameters else torch.float32
        self.param_dtype = (mp_policy.param_dtype if self.dtype.is_floating_point else None) or self.dtype
        self.reduce_dtype, self.cast_inputs_to = mp_policy.reduce_dtype or self.param_dtype, mp_policy.param_dtype
        self.device = compute_device(groups[-1])
        self.home = torch.device("cpu") if offload_policy else self.device
        self.pinned = bool(offload_policy and offload_policy.pin_memory and self.device.type == "cuda")
        # 64 bytes, as torch aligns what it allocates: products of matrices that start elsewhere may round differently.
        offsets, self.chunk = layout([p.numel() for p in parameters], 64 // self.param_dtype.itemsize, self.N)
        start = dist.get_rank(groups[-1]) * self.chunk
        self.places = [Place(*f, at, start, start + self.chunk) for f, at in zip(found, offsets, strict=True)]
        self.state, self.works, self.flat = State.SHARDED, [], None
        self.sync, self.kept = True, None  # False within no_sync; the gradient that it keeps
        self.calls = weakref.WeakSet()  # forwards whose graph is alive, and through which no backward has come
        if not any(parameter.is_meta for parameter in parameters):
            self.build(parameters)

    @torch.no_grad()
    def build(self, parameters):
        """Replace whole parameters, of which the first rank's count, by shards."""
        self.flat = torch.zeros(self.chunk, dtype=self.dtype, device=self.home, pin_memory=self.pinned)
        self.gathered = torch.empty(self.N * self.chunk, dtype=self.param_dtype, device=self.device)
        for place, whole in zip(self.places, parameters, strict=True):
            trains, whole = place.get().requires_grad, whole.detach().to(self.device, copy=True).contiguous()
            for group in self.groups:
                first = dist.get_global_rank(group or dist.group.WORLD, 0)
                dist.broadcast(whole.view(-1).view(torch.uint8), first, group=group)
            place.shard = nn.Parameter(self.flat[place.here], requires_grad=trains)
            place.shard.copy_(place.cut(whole))
            # .data: what lands in `gathered` later is no change of what autograd has saved
            place.whole = nn.Parameter(place.view(self.gathered).data, requires_grad=trains)
            place.shard._fsdp_unit = self
            place.put(place.shard)
        self.gathered.untyped_storage().resize_(0)

    @torch.no_grad()
    def gather(self):
        """Send this rank's piece to the others, and let theirs come."""
        assert self.state is State.SHARDED
        if self.flat is None:
            raise RuntimeError(f"{self.name} is still on the meta device; call materialize(model) first")
        memory = self.flat.untyped_storage().data_ptr()
        for place in self.places:
            if place.get() is not place.shard or place.shard.untyped_storage().data_ptr() != memory:
                raise ValueError(f"{place.name!r} of {self.name} was moved or replaced; call .to() before fully_shard")
        # The storage stays the same: what autograd has saved in forward are views of it.
        self.gathered.untyped_storage().resize_(self.gathered.nbytes)
        self.sending = self.flat.to(self.device, self.param_dtype, non_blocking=True)
        self.works = all_gather(self.gathered, self.sending, self.groups[-1], self.number)
        self.state = State.GATHERING

    def unshard(self):
        """Have the whole parameters."""
        if self.state is State.SHARDED:
            self.gather()
        wait(self.works)
        self.works, self.sending, self.state = [], None, State.UNSHARDED
        for place in self.places:
            place.whole.requires_grad_(place.shard.requires_grad)

    def reshard(self):
        """Free them."""
        if self.state is State.GATHERING:
            self.unshard()
        if self.state is State.UNSHARDED:
            self.gathered.untyped_storage().resize_(0)
        self.state = State.SHARDED

    @torch.no_grad()
    def reduce(self):
        """Begin to reduce what gradients there are. -> what add_gradients takes, or None where nothing was sent."""
        if self.kept is None and not any(place.shard.requires_grad for place in self.places):
            return None
        # -0.0 + x is x for all x: what no rank has used is still -0.0 after the sum. So used gradients have none.
        flat = torch.full((self.N * self.chunk,), -0.0, dtype=self.reduce_dtype, device=self.device)
        unused = [place for place in self.places if place.whole.grad is None]
        for place in self.places:
            if place.whole.grad is not None:
                torch.add(place.whole.grad, 0.0, out=place.view(flat))
                place.whole.grad = None
        flat, self.kept = flat if self.kept is None else flat.add_(self.kept), None
        if not self.sync:
            self.kept = flat
            return None
        if self.reduce_dtype == torch.float16:
            flat /= self.ranks  # before the sum, which overflows at 65504
        return self, *reduce_scatter(flat, self.groups[-1], self.number), unused

    @torch.no_grad()
    def add_gradients(self, works, terms, unused):
        """This rank's piece of the mean -> .grad of its shards; None stays where no rank has a gradient."""
        wait(works)
        total = functools.reduce(torch.add, terms)
        for group in self.groups[:-1]:
            dist.all_reduce(total, group=group)
        if self.reduce_dtype != torch.float16:
            total /= self.ranks  # after the sum, as one device: before it, at 3 ranks, every term would be rounded
        total = total.to(self.flat.device, self.dtype)
        for place in self.places:
            mean, shard = total[place.here], place.shard
            untouched = place in unused and ((mean[:1] == 0) & mean[:1].signbit()).all()
            if not untouched:
                shard.grad = mean if shard.grad is None else shard.grad.add_(mean)

    def show(self, what):
        for place in self.places:
            place.put(getattr(place, what))


# ---------------------------------------------------------------------------------------------------------------------
# 3. The order of the moves, the same on all ranks. Three blocks, units 0 1 2; "wait" is where communication must be over:
#
#   forward        gather 0, wait 0   gather 1   compute 0   free 0   wait 1   gather 2   compute 1   free 1   wait 2  …
#   backward       gather 2, wait 2   gather 1   compute 2
#     reaches 1    reduce 2, free 2   wait 1     gather 0   compute 1
#     reaches 0    wait for reduce 2, reduce 1, free 1   wait 0   compute 0
#     ends         wait for reduce 1, reduce 0, free 0   wait for reduce 0
#
# Blocks may nest or be called twice: when is 2 past? Autograd runs nodes in reverse order of creation. So once it reaches
# a call that had ended before the first call of unit 2 began, it is through with all of unit 2.

clock = itertools.count()


@dataclasses.dataclass(eq=False)
class Call:
    """One forward of a unit. The hooks in its graph hold it, so it lives as long."""

    unit: Unit
    start: int
    end: int
    backward: object = None  # the one that has reached it


class Order:
    """When the units under one outermost unit are gathered and reduced."""

    def __init__(self, units):
        self.units, self.outermost, self.backward = units, None, None
        self.script, self.started, self.ended = deque(), units, []  # to come; of the latest forward
        self.pending, self.reduction = [], None  # calls that backward has reached, of units not yet reduced
        for number, unit in enumerate(units):
            unit.order, unit.number = self, number

    def advance(self, unit):
        """Have `unit`, and begin to gather the next."""
        while unit in self.script and self.script.popleft() is not unit:
            pass
        unit.unshard()
        if self.script and self.script[0].state is State.SHARDED:
            self.script[0].gather()

    def before_forward(self, unit, args, kwargs):
        if in_autograd():  # a checkpoint computes again
            self.begin_backward()
            unit.unshard()
        else:
            if self.outermost in (None, unit):
                self.settle()
                self.outermost, self.script, self.started, self.ended = unit, deque(self.started), [], []
            self.started.append(unit)
            self.advance(unit)
        unit.show("whole")
        unit.start, dtype = next(clock), unit.cast_inputs_to
        cast = lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x  # noqa: E731
        return tree_map(cast, (args, kwargs)) if dtype else (args, kwargs)

    def after_forward(self, unit, output):
        unit.show("shard")
        nodes = {x.grad_fn for x in tree_leaves(output) if torch.is_tensor(x)} - {None}
        if nodes:
            call = Call(unit, unit.start, next(clock))
            unit.calls.add(call)
            self.ended.append(unit)
        for node in nodes:
            node.register_prehook(lambda _: unit.order.enter_backward(call))
        if not in_autograd() and (unit.reshard_after_forward or not nodes):
            unit.reshard()
        if unit is self.outermost:
            for other in self.units:
                if other.state is State.GATHERING:  # it was not called this time
                    other.reshard()
            self.outermost = None

    def begin_backward(self):
        if self.backward is not None and self.backward() is None:
            self.settle()  # that one raised
        if self.backward is None:
            end = functools.partial(Order.end_backward, self)  # autograd alone holds it
            self.backward, self.script = weakref.ref(end), deque(reversed(self.ended))
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def enter_backward(self, call):
        """Autograd is about to run through `call`."""
        self.begin_backward()
        if call.backward is self.backward:
            return  # through another of its outputs
        call.backward = self.backward
        call.unit.calls.add(call)
        for unit in dict.fromkeys(other.unit for other in self.pending):
            if min(other.start for other in unit.calls) > call.end:
                self.reduce(unit)
        self.pending.append(call)
        self.advance(call.unit)

    def reduce(self, unit):
        self.finish_reduction()  # of the unit before, which has travelled while this one computed
        self.pending = [call for call in self.pending if call.unit is not unit]
        unit.calls = weakref.WeakSet(call for call in unit.calls if call.backward is not self.backward)
        self.reduction = unit.reduce()
        unit.reshard()

    def finish_reduction(self):
        if self.reduction:
            unit, *sent = self.reduction
            unit.add_gradients(*sent)
        self.reduction = None

    def end_backward(self):
        left_out = [unit for unit in self.units if unit.kept is not None and unit.sync]  # what no_sync has kept
        for unit in dict.fromkeys([call.unit for call in self.pending] + left_out):
            self.reduce(unit)
        self.finish_reduction()
        self.backward = None
        self.settle()

    def settle(self):
        """All units SHARDED, nothing on its way; and of a backward that has raised nothing left."""
        wait(self.reduction[1] if self.reduction else [])
        for unit in self.units:
            unit.reshard()
            if self.backward is not None:
                unit.calls = weakref.WeakSet(call for call in unit.calls if call.backward is not self.backward)
                unit.kept = None
                for place in unit.places:
                    place.whole.grad = None
        self.outermost, self.backward, self.reduction, self.pending = None, None, None, []
        self.script.clear()


def in_autograd():
    """Does a backward run? Then a forward is a checkpoint's, which computes again."""
    return torch._C._current_graph_task_id() != -1


# ---------------------------------------------------------------------------------------------------------------------
# 4. What users call. Precision and offloading are policies of a unit.


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """param_dtype: gather and compute in it, and cast floating-point inputs to it. reduce_dtype: add gradients in it.

    None: the parameters' dtype; and param_dtype. Shards, .grad and optimizer keep the parameters' dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class CPUOffloadPolicy:
    """Shards, .grad and so the optimizer's state in host memory, pinned where there is a GPU."""

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

    Call it on the blocks first, then on the whole model; then make the optimizer. `module.parameters()` are from then
    on this rank's shards: 1-D nn.Parameters under their old names, the elements that lie in this rank's piece of the
    flat buffer, perhaps none. After backward their .grad are those of the mean gradient, or None where no rank has one.
    The values are those of the group's first rank; buffers stay each rank's own.

    torch.nn.utils.clip_grad_norm_ would take each rank's own norm: use clip_grad_norm_ of this file. To save, use
    full_state_dict. All ranks must run the same units in the same order.

    Args:
        mesh: one dimension shards; two are hybrid sharding: (replicate, shard).
        process_group: the ranks to shard over, instead of a mesh (None: the default group).
        reshard_after_forward: False keeps what was gathered until backward has used it.
        mp_policy, offload_policy: MixedPrecisionPolicy and CPUOffloadPolicy, this file's or PyTorch's.

    A module on the meta device stays there until `materialize` or `load_full_state_dict`.

    Raises:
        ValueError: an argument is unusable; ranks hold different parameters; a parameter is in two units (tied).
    """
    if mesh is not None and (process_group is not None or mesh.ndim > 2):
        raise ValueError(f"pass process_group, or a mesh of 1 or 2 dimensions; this mesh has {mesh.ndim}")
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward is {reshard_after_forward!r}; it must be True or False")
    if type(module).forward is nn.Module.forward:
        raise ValueError(f"{type(module).__name__} has no forward that could gather its parameters; shard its children")
    if dist.get_world_size(process_group) < 1:
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    groups = [process_group] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    groups = [None if group is dist.group.WORLD else group for group in groups]
    inner = [m._fsdp_unit for m in module.modules() if hasattr(m, "_fsdp_unit")]
    if hasattr(module, "_fsdp_unit") or any(unit.groups != groups for unit in inner):
        raise ValueError(f"{type(module).__name__} is a unit already, or has one over other ranks")
    offload_policy = offload_policy if hasattr(offload_policy, "pin_memory") else None  # PyTorch has a neutral one
    unit = Unit(module, groups, reshard_after_forward, mp_policy, offload_policy)
    module._fsdp_unit = unit
    Order([unit, *inner])
    for name, submodule in module.named_modules():
        if hasattr(submodule, "_fsdp_unit"):
            submodule._fsdp_unit.name = name or type(module).__name__
    before = lambda _, args, kwargs: unit.order.before_forward(unit, args, kwargs)  # noqa: E731
    after = lambda _, args, output: unit.order.after_forward(unit, output)  # noqa: E731
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)  # also when forward raises
    for owner in {owner for place in unit.places for owner, _ in place.slots}:
        owner.register_state_dict_pre_hook(refuse_state_dict)
        owner.register_load_state_dict_pre_hook(refuse_state_dict)
    return module


def refuse_state_dict(module, _, keep_vars, *load):
    if load or not keep_vars:  # with keep_vars: full_state_dict asks
        raise RuntimeError("this module's parameters are sharded: call full_state_dict or load_full_state_dict instead")


def compute_device(group=None):
    gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def find_parameters(module, groups):
    """-> (parameter, name, [(module, attribute), …]) of a unit to be. ValueError where they cannot be one."""
    taken = {m for inner in module.modules() if hasattr(inner, "_fsdp_unit") for m in inner.modules()}
    found, mine = {}, type(module).__name__
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and owner not in taken:
                entry = found.setdefault(parameter, (parameter, f"{path}.{attribute}".lstrip("."), []))
                entry[2].append((owner, attribute))
    for parameter, name, _ in found.values():
        if other := getattr(parameter, "_fsdp_unit", None):
            raise ValueError(f"{name!r} of {mine} is tied to {other.name}, another unit; one unit must have both")
    if len({parameter.dtype for parameter in found}) > 1:
        dtypes = sorted({str(parameter.dtype) for parameter in found})
        raise ValueError(f"{mine} has parameters of {' and '.join(dtypes)}; make a unit for each dtype")
    everyone = [[f"{n!r}: {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}" for p, n, _ in found.values()]]
    for group in groups:
        theirs = gather_objects(everyone, group)
        everyone = list(itertools.chain(*theirs))
    for rank, theirs in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if first != other:
                raise ValueError(f"ranks must hold the same model, but rank 0 has {first}; rank {rank} has {other}")
    return list(found.values())


def gather_objects(mine, group):
    theirs = [None] * dist.get_world_size(group)
    dist.all_gather_object(theirs, mine, group=group)
    return theirs


# ---------------------------------------------------------------------------------------------------------------------
# 5. Refinements: accumulation, clipping; whole state dicts, and models too large for one device, which all ranks call.


@contextmanager
def no_sync(module):
    """A backward in here keeps whole gradients on this rank, and sends nothing; the first one outside adds them."""
    units = units_of(module)
    for unit in units:
        unit.sync = False
    try:
        yield
    finally:
        for unit in units:
            unit.sync = True


@torch.no_grad()
def clip_grad_norm_(module, max_norm):
    """Scale all gradients so that their total 2-norm, over all ranks' shards, is at most `max_norm`. -> that norm."""
    if alone := [n for n, p in module.named_parameters() if p.requires_grad and not hasattr(p, "_fsdp_unit")]:
        raise ValueError(f"{', '.join(alone)}: in no unit, so no rank has the mean gradient; fully_shard the root, too")
    units, gradients = units_of(module), [p.grad for p in module.parameters() if p.grad is not None]
    # Of all units: a rank without gradients sends the same. Squares of fp16 overflow soon.
    dtype = functools.reduce(torch.promote_types, (unit.dtype for unit in units), torch.float32)
    total = torch.zeros((), dtype=dtype, device=units[0].device)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=dtype).to(total.device) ** 2
    dist.all_reduce(total, group=units[0].groups[-1])
    total = total.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).to(gradient.device))
    return total


@torch.no_grad()
def full_state_dict(module):
    """What the plain module's state_dict() would be, in host memory, on every rank."""
    places = places_of(module)
    state_dict = {n: t for n, t in module.state_dict(keep_vars=True).items() if torch.is_tensor(t)}
    join = lambda t: places[t].join(gather_objects(t.to("cpu", copy=True), t._fsdp_unit.groups[-1]))  # noqa: E731
    return {name: join(t) if t in places else t.to("cpu", copy=True) for name, t in state_dict.items()}


@torch.no_grad()
def load_full_state_dict(module, state_dict):
    """Load, on every rank, what full_state_dict() or the plain module's state_dict() returned at any world size.

    A module on the meta device becomes real. RuntimeError where names or shapes do not match.
    """
    places, ours = places_of(module), module.state_dict(keep_vars=True)
    shapes = {name: tuple(places.get(tensor, tensor).shape) for name, tensor in ours.items() if torch.is_tensor(tensor)}
    theirs = {name: tuple(tensor.shape) for name, tensor in state_dict.items() if torch.is_tensor(tensor)}
    if wrong := [f"{n}: {theirs.get(n)}, not {shapes.get(n)}" for n in shapes | theirs if shapes.get(n) != theirs.get(n)]:
        raise RuntimeError(f"the state dict does not fit {type(module).__name__}: {'; '.join(wrong)}")
    values = {places[ours[name]]: state_dict[name] for name in shapes if ours[name] in places}
    for unit in units_of(module):
        if unit.flat is None:
            unit.build([values[place] for place in unit.places])
    for name in shapes:
        owner, (path, _, attribute) = places.get(ours[name]), name.rpartition(".")
        if owner:
            owner.shard.copy_(owner.cut(state_dict[name]))
        elif ours[name].is_meta:
            module.get_submodule(path)._buffers[attribute] = state_dict[name].to(compute_device(), copy=True)
        else:
            ours[name].copy_(state_dict[name])


@torch.no_grad()
def full_optimizer_state_dict(module, optimizer):
    """What state_dict() of the plain optimizer would be, over the plain module's parameters in the same groups.

    Of an elementwise optimizer: another (Adafactor, LBFGS, Muon) does not do on shards what it does on wholes.
    """
    places, state_dict, whole = places_of(module), optimizer.state_dict(), {}
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    for i, shard in enumerate(shards):
        mine = copy.deepcopy(state_dict["state"].get(i))
        states = gather_objects(mine, shard._fsdp_unit.groups[-1]) if shard in places else [mine]
        states = [state for state in states if state]  # of a shard without elements, a rank may have none
        for key, value in states[0].items() if states else ():
            piece = shard in places and torch.is_tensor(value) and value.dim()
            whole.setdefault(i, {})[key] = places[shard].join([s[key].cpu() for s in states]) if piece else value
    return {"state": whole, "param_groups": state_dict["param_groups"]}


@torch.no_grad()
def load_full_optimizer_state_dict(module, optimizer, state_dict):
    """Load what full_optimizer_state_dict() or the plain optimizer's state_dict() returned at any world size."""
    places, mine = places_of(module), copy.deepcopy(state_dict["state"])
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    for i, state in mine.items():
        place = places.get(shards[i])
        for key, value in state.items():
            if place and torch.is_tensor(value) and value.shape == place.shape and key != "step":
                state[key] = place.cut(value)
    optimizer.load_state_dict({"state": mine, "param_groups": state_dict["param_groups"]})


@torch.no_grad()
def materialize(module):
    """Give a module that was built, and sharded, on the meta device its values; before an optimizer sees it.

    As module.to_empty(device=…).apply(lambda m: m.reset_parameters()), bitwise, under the first rank's seed; but units
    are cut as soon as their modules have been visited.
    """
    for child in module.children():
        materialize(child)
    if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        module.to_empty(device=compute_device(), recurse=False).reset_parameters()
    unit = getattr(module, "_fsdp_unit", None)
    if unit and unit.flat is None:
        unit.build([place.get() for place in unit.places])


def units_of(module):
    """The units that `module`'s parameters are in, with nothing on its way."""
    units = list(dict.fromkeys(p._fsdp_unit for p in module.parameters() if hasattr(p, "_fsdp_unit")))
    if not units:
        raise ValueError(f"this {type(module).__name__} has no unit; call fully_shard first")
    for order in {unit.order for unit in units}:
        order.settle()
    return units


def places_of(module):
    return {place.get(): place for unit in units_of(module) for place in unit.places}


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    model = demo.start("fsdp", bitwise=True)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moves = watch(units_of(model))

    def step(inputs, targets):
        moves.clear()
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        moves.append((time.perf_counter(), None, "loss"))
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        parameters = full_state_dict(model)
        shards = [shard.detach().clone() for shard in model.parameters()]
        ...

    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    demo.train(step, whole)
    return demo.report(held(model.parameters(), optimizer), "3Ψ(N-1)/N", 3 * psi * (N - 1) / N)

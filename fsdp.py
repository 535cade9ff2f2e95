"""FSDP: every rank keeps 1/N of the parameters, and gathers the rest of a block only while the block computes.

The model is cut into units: what one call of `fully_shard` covers. A unit's parameters lie end to end in one flat
buffer, cut into N equal pieces wherever the cuts fall. One step of a unit on N = 2 ranks:

               forward                                    backward
    rank 0   w₀ ┐            ┌ w₀w₁ compute ─ free   w₀ ┐            ┌ w₀w₁ compute ─ free ─ g ┐                ┌ ḡ₀
                ├ all-gather ┤                          ├ all-gather ┤                         ├ reduce-scatter ┤
    rank 1   w₁ ┘            └ w₀w₁ compute ─ free   w₁ ┘            └ w₀w₁ compute ─ free ─ g ┘                └ ḡ₁

ḡᵣ is rank r's piece of the mean gradient, which is all that its optimizer needs. Communication hides behind the units
next to it: the next unit is gathered while this one computes, and reduced while the one after it does.

Cost per rank in elements, with Adam; Ψ parameters, u those of the largest unit:

                                  parameters   gradients   optimizer   sent per step
    DDP                               Ψ           2Ψ          2Ψ       2Ψ(N-1)/N
    FSDP, at rest                    Ψ/N         Ψ/N         2Ψ/N
          in forward, backward     + 2u         + 3u                   3Ψ(N-1)/N: two all-gathers, one reduce-scatter
          reshard_after_forward=False: + Ψ      + 3u                   2Ψ(N-1)/N: no all-gather in backward

2u: the unit that computes and the one being gathered. 3u: the gradient being made, the one sent, and what arrives.

Run:      torchrun --nproc-per-node 2 fsdp.py          (python fsdp.py is a world of one)
Paper:    Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, §3; Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, §5.3
Mirrors:  torch.distributed.fsdp.fully_shard (FSDP2), on the flat buffer of FSDP1 (§3.2): a gather lands in place. FSDP2
          cuts the rows of each parameter: shards keep their dimensions, but all is copied apart and together again
Left out: ranks that run different units or in another order (as in PyTorch); outputs but tensors in lists, tuples and
          dicts; .to() after sharding; second-order gradients; loading from rank 0 alone
"""

import argparse
import copy
import functools
import itertools
import math
import os
import signal
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

# torch 2.13 renames both, and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: an all-gather whose gradient is a reduce-scatter, and nobody who keeps what was gathered.


class AllGather(torch.autograd.Function):
    """This rank's piece to the whole; its gradient, this rank's piece of the mean of all ranks'."""

    @staticmethod
    def forward(ctx, piece, group):
        ctx.group, pieces = (
            group,
            [torch.empty_like(piece) for _ in range(dist.get_world_size(group))],
        )
        dist.all_gather(pieces, piece, group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, gradient):
        received, N = torch.empty_like(gradient), dist.get_world_size(ctx.group)
        dist.all_to_all_single(
            received, gradient.contiguous(), group=ctx.group
        )  # part r of everyone's goes to rank r,
        return sum(
            received.chunk(N)
        ) / N, None  # which adds them in rank order, as one device would


def forward_sharded(module, pieces, *inputs, process_group=None):
    """`module(*inputs)` with the parameters {name: this rank's 1/N of the elements, the last ranks' padded}."""

    def forward(*inputs):
        whole = {name: AllGather.apply(piece, process_group) for name, piece in pieces.items()}
        whole = {
            name: whole[name][: p.numel()].view(p.shape) for name, p in module.named_parameters()
        }
        return functional_call(module, whole, inputs)

    return checkpoint(
        forward, *inputs, use_reentrant=False
    )  # forgets what was gathered, and gathers again in backward


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: units, whose parameters are gathered, freed and reduced together. Nothing is computed twice.


def exchange(works, sent, received, group):
    """Begin to send sent[r] to each other rank r, and to fill received[r] from it."""
    for r in range(len(received)):
        if r != dist.get_rank(group) and received[r].numel():
            works.append(dist.isend(sent[r], group=group, group_dst=r))
            works.append(dist.irecv(received[r], group=group, group_src=r))


def wait(works):
    while works:
        works[-1].wait()  # if it raises, `works` still says that memory is in use
        works.pop()


class Place:
    """A parameter of a unit. The optimizer knows of its `shard`; `whole` is in the module while it computes."""

    def __init__(self, unit, parameter, slots, offset):
        self.unit, self.slots = unit, slots  # [(module, attribute), …], several where it is tied
        # Dimensions keep their order in memory: products of transposed matrices round as they did.
        self.layout = parameter.shape, torch.empty_like(parameter, device="meta").stride(), offset
        whole = unit.gathered.as_strided(*self.layout)
        self.whole = nn.Parameter(
            whole.data
        )  # .data: gathering anew is no change of what autograd has saved
        start = offset - unit.rank * unit.chunk
        self.here = slice(max(start, 0), max(start + parameter.numel(), 0))  # in this rank's piece
        self.shard = nn.Parameter(unit.flat[self.here], parameter.requires_grad)
        parameter._place = self.shard._place = self

    def cut(self, whole):
        """This rank's elements, 1-D."""
        if whole.shape != self.whole.shape:
            raise ValueError(
                f"{self.slots[0][1]} is {tuple(self.whole.shape)}, not {tuple(whole.shape)}"
            )
        flat = whole.new_empty(self.unit.N * self.unit.chunk)
        flat.as_strided(*self.layout).copy_(whole)
        return flat.chunk(self.unit.N)[self.unit.rank][self.here].clone()


class Unit:
    """What moves together: gather, unshard, reshard, and in backward reduce, add_gradients. `Order` says when."""

    @torch.no_grad()
    def __init__(self, module, groups, reshard_after_forward, mp_policy, offload_policy):
        self.groups, self.group, nccl = groups, groups[-1], dist.get_backend(groups[-1]) == "nccl"
        self.N, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.ranks, self.reshard_after_forward = (
            math.prod(map(dist.get_world_size, groups)),
            reshard_after_forward,
        )
        found = find_parameters(module, groups)
        first = next(iter(found), torch.empty(0))
        self.device = torch.device("cuda" if nccl else "cpu" if first.is_meta else first.device)
        self.inputs_dtype, reduce_dtype = mp_policy or (None, None)
        self.dtype, self.param_dtype = first.dtype, self.inputs_dtype or first.dtype
        self.reduce_dtype = reduce_dtype or self.param_dtype
        # float16 is divided before the sum, which would be inf above 65504; others after it, and rounded as one device
        self.early = 1 / self.ranks if self.reduce_dtype == torch.float16 else 1
        # 64 bytes, as torch aligns what it allocates: products of matrices that start elsewhere may round differently.
        align = 64 // self.param_dtype.itemsize
        *offsets, end = itertools.accumulate(
            (-(-p.numel() // align) * align for p in found), initial=0
        )
        self.chunk = -(-end // self.N)
        home = torch.device("cpu") if offload_policy else self.device
        self.flat = torch.empty(
            self.chunk, dtype=self.dtype, device=home, pin_memory=home != self.device
        )
        self.gathered = torch.empty(self.N * self.chunk, dtype=self.param_dtype, device=self.device)
        self.places = [
            Place(self, *item, at) for item, at in zip(found.items(), offsets, strict=True)
        ]
        self.gathered.untyped_storage().resize_(0)
        self.works = None  # at rest; else what `gathered` waits for
        self.sync, self.kept = (
            True,
            None,
        )  # False within no_sync, and the gradients that it has kept
        self.sent, self.reached = (
            None,
            -1,
        )  # gradients on their way; when the call began that backward is in
        whole = torch.zeros(self.N * self.chunk, dtype=self.dtype, device=self.device)
        for place in self.places:
            owner, name = place.slots[0]
            if owner._parameters[name].is_meta:
                owner.to_empty(device=self.device, recurse=False).reset_parameters()
            whole.as_strided(*place.layout).copy_(owner._parameters[name])
        for group in groups:  # the first rank's count
            dist.broadcast(whole, group=group, group_src=0)
        self.flat.copy_(whole.chunk(self.N)[self.rank])
        self.show("shard")

    def gather(self):
        """Send this rank's piece to the others, and let theirs come."""
        for place in self.places:
            owner, name = place.slots[0]
            if (
                owner._parameters[name].untyped_storage().data_ptr()
                != self.flat.untyped_storage().data_ptr()
            ):
                raise ValueError(
                    f"{type(owner).__name__}.{name} was moved or replaced; call .to() before fully_shard"
                )
            place.whole.requires_grad_(place.shard.requires_grad)
        self.gathered.untyped_storage().resize_(
            self.gathered.nbytes
        )  # the same storage: autograd has saved views
        pieces, self.works = self.gathered.chunk(self.N), []
        mine = pieces[self.rank].copy_(self.flat, non_blocking=True)
        if mine.is_cpu:
            exchange(self.works, [mine] * self.N, pieces, self.group)
        else:
            self.works += [all_gather_single(self.gathered, mine, group=self.group, async_op=True)]

    def unshard(self):
        if self.works is None:
            self.gather()
        wait(self.works)
        self.show("whole")

    def reshard(self):
        if self.works is not None:
            self.show("shard")
            wait(self.works)
            self.gathered.untyped_storage().resize_(0)
            self.works = None

    def show(self, what):
        for place in self.places:
            for owner, name in place.slots:
                owner._parameters[name] = getattr(place, what)

    @torch.no_grad()
    def reduce(self):
        """Begin to add all ranks' gradients; within no_sync, keep this rank's."""
        if not any(place.shard.requires_grad for place in self.places):
            return
        if (
            self.kept is None
        ):  # -0.0: "no gradient". x + -0.0 is x for every x, so it stays where no rank has one
            self.kept = torch.full(
                (self.N * self.chunk,), -0.0, dtype=self.reduce_dtype, device=self.device
            )
        unused = [place for place in self.places if place.whole.grad is None]
        for place in self.places:
            if place.whole.grad is not None:
                self.kept.as_strided(*place.layout).add_(place.whole.grad, alpha=self.early).add_(
                    0.0
                )  # not -0.0
                place.whole.grad = None
        if not self.sync:
            return
        parts, works, terms = self.kept.chunk(self.N), [], []
        self.sent = works, terms, unused
        if self.kept.is_cpu:  # in rank order, as one device adds them
            terms += [
                part if r == self.rank else torch.empty_like(part) for r, part in enumerate(parts)
            ]
            exchange(works, parts, terms, self.group)
        else:
            terms += [torch.empty_like(parts[self.rank])]
            works += [reduce_scatter_single(terms[0], self.kept, group=self.group, async_op=True)]
        self.kept = None

    def add_gradients(self):
        """What reduce began: this rank's piece of the mean -> .grad of its shards; None where no rank has one."""
        works, terms, unused = self.sent
        wait(works)
        total = functools.reduce(torch.add, terms)
        for group in self.groups[:-1]:
            dist.all_reduce(total, group=group)
        nobodys = [p for p in unused if ((total[p.here] == 0) & total[p.here].signbit()).all()]
        total /= self.ranks * self.early
        total = total.to(self.flat.device, self.dtype)
        for place in self.places:
            if place not in nobodys:
                mean, shard = total[place.here], place.shard
                shard.grad = mean if shard.grad is None else shard.grad.add_(mean)
        self.sent = None


# ---------------------------------------------------------------------------------------------------------------------
# 3. The order of the moves, the same on all ranks. Three blocks, units 0 1 2; what begins travels until its wait:
#
#   forward        gather 0, wait 0   gather 1   compute 0   free 0   wait 1   gather 2   compute 1   free 1   wait 2 …
#   backward       gather 2, wait 2   gather 1   compute 2
#     reaches 1    free 2, reduce 2   wait 1     gather 0   compute 1
#     reaches 0    wait for reduce 2, free 1, reduce 1      wait 0   compute 0
#     ends         wait for reduce 1, free 0, reduce 0      wait for reduce 0
#
# Blocks nest, and are called in any order: when is 2 past? Autograd runs nodes in reverse order of creation. So once it
# reaches a call that had ended before this one of unit 2 began, it is past this one. If unit 2 had been called before,
# too, it is reached once more, and has gradients only then: autograd makes a gradient when it has all its terms.

clock = itertools.count()
running_backward = (
    torch._C._current_graph_task_id
)  # -1: none. In one, a forward is a checkpoint's that computes again


class Order:
    """When the units of a model are gathered and reduced."""

    def __init__(self, units):
        self.units, self.outermost, self.backward = (
            units,
            None,
            None,
        )  # whose call, which backward is under way
        self.latest, self.following = (
            None,
            {},
        )  # (unit, how it came up); {(unit, how): who came after it the last time}
        for number, unit in enumerate(units):
            unit.order, unit.number = self, number

    def begin(self, unit, inputs):
        """A call of `unit` begins; -> its inputs."""
        if running_backward() == -1 and self.outermost in (None, unit):
            self.settle()
            self.outermost = unit
        unit.start = next(clock)
        self.advance(unit, "called" if running_backward() == -1 else "called again")
        cast = lambda x: x.to(unit.inputs_dtype) if x.is_floating_point() else x  # noqa: E731
        return tree_map_only(torch.Tensor, cast, inputs) if unit.inputs_dtype else inputs

    def end(self, unit, output):
        for leaf in tree_leaves(output):
            if hasattr(leaf, "__dataclass_fields__"):  # in which nobody looks for tensors
                raise ValueError(
                    f"a unit returns a {type(leaf).__name__}; return tensors in lists, tuples or dicts"
                )
            if torch.is_tensor(leaf) and leaf.grad_fn:
                leaf.grad_fn.register_prehook(
                    functools.partial(self.reach, unit, unit.start, next(clock))
                )
        if running_backward() == -1:
            unit.show("shard")  # to an optimizer, even if they are whole
            if unit.reshard_after_forward or not torch.is_grad_enabled():
                unit.reshard()
        if unit is self.outermost:
            self.outermost = None

    def reach(self, unit, start, end, _):
        """Autograd is about to run through a call of `unit`."""
        if (
            self.backward and self.backward() is None
        ):  # autograd has dropped its callback: it raised
            self.settle()
        if self.backward is None:
            finish = functools.partial(self.settle, ended=True)
            self.backward, self.latest = weakref.ref(finish), None
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        self.reduce_past(end)
        unit.reached = start
        self.advance(unit, "reached")

    def advance(self, unit, how):
        """Have `unit`, and begin to gather the one that came after it the last time."""
        unit.unshard()
        following = self.following.get((unit, how))
        if following and following.works is None:
            following.gather()
        self.following[self.latest], self.latest = unit, (unit, how)

    def reduce_past(self, end):
        """Free and begin to reduce the units that are past, once backward is where a call ended at `end`."""
        for unit in self.units:
            if unit.reached > end:
                for other in self.units:
                    if other.sent:  # it has travelled while `unit` computed
                        other.add_gradients()
                unit.reshard()
                unit.reduce()
                unit.reached = (
                    -1 if unit.sync else 0
                )  # 0: until a backward outside no_sync ends, at the latest

    def settle(self, ended=False):
        """All units at rest. What is left of a backward that `ended` is reduced, of one that raised forgotten."""
        if ended:
            self.reduce_past(-1)
            self.backward = None
        for unit in self.units:
            unit.reshard()
            if self.backward:
                wait(unit.sent[0] if unit.sent else [])
                unit.sent, unit.kept, unit.reached = None, None, -1
                for place in unit.places:
                    place.whole.grad = None
            elif unit.sent:
                unit.add_gradients()
        self.outermost, self.latest, self.backward = None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# 4. What users call, on all ranks: units and their policies; accumulation, clipping, whole state dicts.


class MixedPrecisionPolicy(NamedTuple):
    param_dtype: torch.dtype | None = (
        None  # to gather and compute, and of inputs; None: the parameters'
    )
    reduce_dtype: torch.dtype | None = None  # to add gradients; None: param_dtype


class CPUOffloadPolicy:
    """Shards, .grad and so the optimizer's state in host memory, pinned where there is a GPU."""


def fully_shard(
    module,
    *,
    mesh=None,
    process_group=None,
    reshard_after_forward=True,
    mp_policy=None,
    offload_policy=None,
):
    """Make one unit of `module`'s parameters, without those of submodules that are units already; -> `module`.

    Call it on the blocks first, then on the whole model; then make the optimizer. `module.parameters()` are now this
    rank's shards: 1-D, under their old names, perhaps empty; after backward .grad are pieces of the mean gradient, None
    where no rank has one. Use clip_grad_norm_ of this file and, for fp16, amp.py's GradScaler: PyTorch's would see each
    rank's own norm, or its own inf. Parameters start as the first rank has them, or as reset_parameters() draws those
    on the meta device; buffers stay each rank's own.
    mesh, instead of process_group: the last dimension shards, one before it replicates (hybrid sharding).
    reshard_after_forward: False keeps what was gathered until backward has used it.
    """
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward that could gather its parameters; shard its children"
        )
    groups = [process_group] if mesh is None else mesh.get_all_groups()
    groups = [
        None if group is dist.group.WORLD else group for group in groups
    ]  # held, its threads outlive the world
    inner = units_of(module)
    if hasattr(module, "_fsdp_unit") or any(unit.groups != groups for unit in inner):
        raise ValueError(f"{type(module).__name__} is a unit already, or has one over other ranks")
    module._fsdp_unit = unit = Unit(
        module, groups, reshard_after_forward, mp_policy, offload_policy
    )
    Order([unit, *inner])

    def before_state_dict(module, prefix, keep_vars):
        if not keep_vars:  # with keep_vars: full_state_dict asks
            raise RuntimeError(
                "each rank has shards of these parameters: call full_state_dict(model) instead"
            )
        unit.order.settle()

    module.register_forward_pre_hook(
        lambda _, *both: unit.order.begin(unit, both), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(lambda _, inputs, output: unit.order.end(unit, output))
    module.register_state_dict_pre_hook(before_state_dict)
    return module


def find_parameters(module, groups):
    """-> {parameter: [(module, attribute), …]} of a unit to be, several where it is tied. The same on all ranks."""
    found, mine = {}, set()
    for i, (path, parameter) in enumerate(module.named_parameters(remove_duplicate=False)):
        place, (owner, _, name) = getattr(parameter, "_place", None), path.rpartition(".")
        if place is None:
            found.setdefault(parameter, []).append((module.get_submodule(owner), name))
            mine.add(
                f"{i} {path}: {tuple(parameter.shape)}, {parameter.dtype}, {parameter.requires_grad=}"
            )
        elif place.shard is not parameter:
            raise ValueError(
                f"{path} of {type(module).__name__} is tied to another unit's; one unit must have both"
            )
    if len(dtypes := {parameter.dtype for parameter in found}) > 1:
        raise ValueError(
            f"{type(module).__name__} has parameters of {dtypes}; make a unit for each dtype"
        )
    everyone = [mine]
    for group in groups:
        theirs = [None] * dist.get_world_size(group)
        dist.all_gather_object(theirs, everyone, group=group)
        everyone = list(itertools.chain(*theirs))
    if differ := set.union(*everyone) - set.intersection(*everyone):
        raise ValueError(f"ranks must hold the same model, but differ in {sorted(differ)}")
    return found


def units_of(module):
    """The units in `module`, all at rest."""
    units = [m._fsdp_unit for m in module.modules() if hasattr(m, "_fsdp_unit")]
    for unit in units:
        unit.order.settle()
    return units


@contextmanager
def no_sync(module):
    """A backward in here keeps whole gradients on this rank, and sends nothing; the first one outside adds them."""
    for unit in units_of(module):
        unit.sync = False
    try:
        yield
    finally:
        for unit in units_of(module):
            unit.sync = True


@torch.no_grad()
def clip_grad_norm_(module, max_norm):
    """Scale all gradients so that their total 2-norm, over all ranks' shards, is at most `max_norm`. -> that norm."""
    if alone := [
        n for n, p in module.named_parameters() if p.requires_grad and not hasattr(p, "_place")
    ]:
        raise ValueError(
            f"{', '.join(alone)}: in no unit, so no rank has the mean gradient; fully_shard the root, too"
        )
    unit = next(unit for unit in units_of(module) if unit.places)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients]
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=unit.flat.device)).to(
        unit.device
    )
    dist.all_reduce(total, group=unit.group)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, total.sqrt())
    return total.sqrt().to(unit.dtype)


def whole_of(shard, state):
    """From all ranks' {key: a piece like `shard`, or a number}: the same of the whole parameter, in host memory."""
    place, states = shard._place, [None] * shard._place.unit.N
    if not shard.numel() and place.whole.numel():
        state = None  # who has no elements may have made fewer steps
    state = tree_map_only(
        torch.Tensor, lambda x: x.to("cpu", copy=True), state
    )  # without the rest of a view
    dist.all_gather_object(states, state, group=place.unit.group)
    states = [state for state in states if state] or [{}]
    for key, value in states[0].items():
        if torch.is_tensor(value) and value.dim():
            states[0][key] = torch.cat([state[key] for state in states]).as_strided(
                *place.layout[:2]
            )
    return states[0]


@torch.no_grad()
def full_state_dict(module):
    """What the plain module's state_dict() would be, in host memory, on every rank."""
    state = module.state_dict(keep_vars=True)
    return {
        k: whole_of(t, {0: t})[0] if hasattr(t, "_place") else t.to("cpu", copy=True)
        for k, t in state.items()
    }


def load_full_state_dict(module, state_dict):
    """Load what full_state_dict() or the plain module's state_dict() returned at any world size. All ranks have it."""
    places = {
        name: getattr(t, "_place", None) for name, t in module.state_dict(keep_vars=True).items()
    }
    module.load_state_dict(
        {name: places[name].cut(t) if places.get(name) else t for name, t in state_dict.items()}
    )


def full_optimizer_state_dict(module, optimizer):
    """What the plain optimizer's state_dict() would be, if elementwise: Adafactor or Muon differ on shards anyway."""
    state_dict, shards = (
        optimizer.state_dict(),
        itertools.chain(*(group["params"] for group in optimizer.param_groups)),
    )
    whole = {i: whole_of(shard, state_dict["state"].get(i)) for i, shard in enumerate(shards)}
    return state_dict | {"state": {i: state for i, state in whole.items() if state}}


def load_full_optimizer_state_dict(module, optimizer, state_dict):
    """Load what full_optimizer_state_dict() or the plain optimizer's state_dict() returned at any world size."""
    state_dict = copy.deepcopy(state_dict)
    for i, shard in enumerate(
        itertools.chain(*(group["params"] for group in optimizer.param_groups))
    ):
        for key, value in state_dict["state"].get(i, {}).items():
            if torch.is_tensor(value) and value.shape == shard._place.whole.shape and key != "step":
                state_dict["state"][i][key] = shard._place.cut(value)
    optimizer.load_state_dict(state_dict)


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    model = demo.start("fsdp", bitwise=True)
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        gradients = [whole_of(shard, {0: shard.grad})[0] for shard in model.parameters()]
        return [
            [t.to(demo.device) for t in tensors]
            for tensors in (gradients, full_state_dict(model).values())
        ]

    demo.train(step, whole)
    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    status = demo.report(held(model.parameters(), optimizer), "3Ψ(N-1)/N", 3 * psi * (N - 1) / N)
    demo.show(timeline(units_of(model)[1:], lambda: step(*demo.batch(0))))
    return status


def timeline(units, step, width=100):
    """A line for each unit: what it is doing once it has made a move, in forward and in backward, during `step`."""
    signs_of = {
        "gather": "··",
        "unshard": "FB",
        "reshard": "  ",
        "reduce": "--",
        "add_gradients": "  ",
    }
    moves, lines = [], {unit.number: " " * width for unit in units}

    def noted(unit, move, signs):
        move()
        moves.append((time.perf_counter(), unit.number, signs[running_backward() != -1]))

    for unit, (name, signs) in itertools.product(units, signs_of.items()):
        setattr(unit, name, functools.partial(noted, unit, getattr(unit, name), signs))
    step()
    start, end = moves[0][0], moves[-1][0]
    for at, number, sign in moves:
        column = round(width * (at - start) / (end - start))
        lines[number] = lines[number][:column] + sign * (width - column)
    title = f"\nunit  a step of {1e3 * (end - start):.0f} ms: F forward, B backward, · gather and - reduce in flight"
    return "\n".join([title, *(f"{number:4}  {line}" for number, line in lines.items())])


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

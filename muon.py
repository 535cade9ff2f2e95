"""Muon with its work and its momenta split over the ranks, for data parallelism and for FSDP.

Muon makes the momentum of each weight matrix orthogonal before it becomes an update. That needs
whole matrices and many operations, and after DDP's all-reduce every rank would do all of it. Here,
only the owner of a matrix keeps its momentum and computes its update. In a step with N = 2 ranks,
rank 0 owns the matrix A and rank 1 owns B:

             gradients            owner of the matrix                  updates        every rank
    rank 0   A₀ B₀ ─┐ exchange ┌─ A₀ A₁ → mean → momentum → UVᵀ of A ─┐ exchange ┌─ update A and B
                    ├──────────┤                                      ├──────────┤
    rank 1   A₁ B₁ ─┘   fp32   └─ B₀ B₁ → mean → momentum → UVᵀ of B ─┘   bf16   └─ update A and B

All ranks own about the same work, as even as whole matrices allow. In the end, every rank updates
all matrices.

Cost per rank and step in bytes, for matrices of Ψ fp32 elements in all. To orthogonalize them takes
F operations: 5 · (4m²n + 2m³) for each m × n matrix, m ≤ n.

                        momentum   sent, times (N-1)/N                     operations
    DDP, torch's Muon   4Ψ         8Ψ: all-reduce                          F
    naive_step          4Ψ/N       8Ψ: gradients, parameters               F/N, in turn
    Muon                4Ψ/N       6Ψ: gradients 4Ψ, updates in bf16 2Ψ    F/N, at the same time
    ShardedMuon         4Ψ/N       4Ψ/N: momenta and updates in bf16       F/N, at the same time

Muon also all-reduces one byte per matrix. During step() it holds copies of gradients, 8Ψ, and then
of updates, 4Ψ. ShardedMuon sends its bytes in addition to FSDP's.

Muon is bitwise equal to torch.optim.Muon on one device that adds up the ranks' gradients in rank
order and then divides by N. In fp32, a stack of matrices (E, m, n) and ShardedMuon are so, too. In
16 bits, kernels round the end of a tensor differently, and a stack or a shard ends elsewhere.

Muon is for the matrices of hidden layers. Train embeddings, the head, norms and biases by AdamW:

    muon = Muon([p for p in blocks.parameters() if p.ndim == 2], lr=0.02)
    adamw = Zero1(model, torch.optim.AdamW, params=others)     # averages gradients, too
    adamw = torch.optim.AdamW(others)                          # instead, if `model` is in DDP

With expert_parallel.py, each rank has stacks (E, m, n) of its own experts. Call its
average_gradients(), and give them a Muon whose process_group has the ranks with the same experts,
or this rank alone.

Run:      torchrun --nproc-per-node 2 muon.py          (python muon.py runs as one rank)
Papers:   Jordan et al. 2024, Muon, kellerjordan.github.io/posts/muon; Liu et al. 2025, Muon is
          Scalable for LLM Training, arXiv 2502.16982
Mirrors:  torch.optim.Muon (torch 2.9 and newer)
Left out: complex matrices; convolutions; a stack with several owners; sparse gradients; closures;
          overlap of the exchange with backward; updates sent along a ring or tree, which many ranks
          need; 16-bit master weights (amp.py)

Read section 1 for the idea (9 minutes), to section 3 for the technique (26), and the rest to use
it as a library (48).
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import itertools
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
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
# 1. The idea: Muon's update of one matrix. Then the owner of a matrix gathers its gradients,
#    updates it, and broadcasts it. `options` is a parameter group of torch.optim.Muon.


def add_to_momentum(state, gradient, options):
    """Update the momentum in `state`. Return the matrix to orthogonalize."""
    momentum = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
    momentum.lerp_(gradient, 1 - options["momentum"])
    if options["nesterov"]:
        return gradient.lerp(momentum, options["momentum"])
    return momentum


def orthogonalize(matrix, options):
    """Return approximately UVᵀ of matrix = USVᵀ, in bfloat16, by the Newton-Schulz iteration.

    A step turns each singular value s into as + bs³ + cs⁵. Five steps bring it close to 1.
    """
    x = matrix.bfloat16()
    if x.size(0) > x.size(1):
        return orthogonalize(x.T, options).T  # because x @ x.T is then smaller
    x = x / x.norm().clamp(min=options["eps"])  # now no singular value is above 1
    a, b, c = options["ns_coefficients"]
    for _ in range(options["ns_steps"]):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x


def apply_update(parameter, update, shape, options):
    """Decay the parameter, and subtract the update. `shape` is that of the whole matrix."""
    lr = options["lr"]
    if torch.is_tensor(lr):
        lr = lr.squeeze()  # it may have one dimension
    rows, columns = shape[-2:]
    ratio = math.sqrt(max(1, rows / columns))
    if options["adjust_lr_fn"] == "match_rms_adamw":  # Liu et al., section 2.2
        ratio = 0.2 * math.sqrt(max(rows, columns))
    parameter.mul_(1 - lr * options["weight_decay"])
    parameter.add_(update, alpha=-lr * ratio)


@torch.no_grad()
def naive_step(parameters, state, options, process_group=None):
    """Update the matrices in turn. Each of N ranks owns every N-th. All of them need gradients.

    `state`, a defaultdict(dict), gets the momenta of the rank's own.
    """
    N = dist.get_world_size(process_group)
    for number, parameter in enumerate(parameters):
        owner = number % N
        is_mine = owner == dist.get_rank(process_group)
        gradients = None
        if is_mine:
            gradients = [torch.empty_like(parameter) for _ in range(N)]
        dist.gather(parameter.grad, gradients, group=process_group, group_dst=owner)
        if is_mine:
            direction = add_to_momentum(state[parameter], sum(gradients) / N, options)
            update = orthogonalize(direction, options)
            apply_update(parameter, update, parameter.shape, options)
        dist.broadcast(parameter.data, group=process_group, group_src=owner)


# --------------------------------------------------------------------------------------------------
# 2. Owners: each rank gets whole matrices, with an even share of the operations and the elements.


def operations(shape):
    """Return how many operations a step takes to orthogonalize a matrix: 4m²n + 2m³.

    A stack of E matrices (E, m, n), such as the weights of experts, takes E times as many.
    """
    m, n = sorted(shape[-2:])
    number = math.prod(shape[:-2])  # of matrices
    return number * (4 * m**2 * n + 2 * m**3)


def orthogonalize_each(matrices, options):
    """Orthogonalize a matrix, or each one of a stack."""
    if matrices.ndim == 2:
        return orthogonalize(matrices, options)
    return torch.stack([orthogonalize(matrix, options) for matrix in matrices])


def assign_owners(shapes, N):
    """Return, for each of N ranks, the list of matrices that it owns. `shapes` is {matrix: shape}.

    The largest matrix comes first, and each goes to the rank with the smallest load. A load is of
    operations and of elements: a matrix of (8, 2048) has as many elements as one of (128, 128), for
    1/24 of the operations.
    """
    total_work = sum(operations(shape) for shape in shapes.values())
    total_size = sum(math.prod(shape) for shape in shapes.values())

    def load_of(matrix):
        of_work = operations(shapes[matrix]) / total_work
        of_size = math.prod(shapes[matrix]) / total_size
        return 2 * of_work + of_size  # of_work twice: idle ranks cost more than memory

    loads = [0] * N
    owned = [[] for _ in range(N)]
    for matrix in sorted(shapes, key=load_of, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += load_of(matrix)
        owned[owner].append(matrix)
    return owned


# --------------------------------------------------------------------------------------------------
# 3. Muon: gradients travel to the owners, and updates travel back.


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon that averages gradients over `process_group`. Each rank does its share.

    All ranks begin with rank 0's parameters. A matrix is updated if any rank has a gradient for it.
    Ranks without one send zeros. step() does not change .grad. A parameter of shape (E, m, n) is a
    stack of E matrices, and has one owner. Leave out nn.Conv1d: its weight would be taken for a
    stack. To clip, call clip_grad_norm_() of this file: that of torch.nn.utils clips own gradients
    before their mean.

    `state` has only the momenta of own matrices. state_dict() has all, on every rank, in the form
    of torch.optim.Muon. An inf or NaN in a gradient spoils the momentum for good, as in
    torch.optim.Muon. GradScaler of amp.py skips such steps on all ranks.
    """

    _given = {}  # the shapes of ShardedMuon, in section 4, which overrides four methods

    def __init__(
        self,
        params,
        lr=1e-3,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        ns_coefficients=(3.4445, -4.7750, 2.0315),
        eps=1e-7,
        ns_steps=5,
        adjust_lr_fn=None,
        process_group=None,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.N = dist.get_world_size(process_group)
        self._find_options()
        self._shapes = {p: self._given.get(p, p.shape) for p in self._options}
        check_matrices(self)
        self._owned = assign_owners(self._shapes, self.N)
        self._start()

    def _find_options(self):
        # {parameter: its group}. Again in each step, because load_state_dict() replaces the groups.
        self._options = {p: group for group in self.param_groups for p in group["params"]}
        self._any_matrix = next(iter(self._options))

    def _start(self):
        # {parameter: number of its elements on each rank}. Ranks of ShardedMuon have only parts.
        self._numels = {p: [p.numel()] * self.N for p in self._options}
        for parameter in self._options:
            values = parameter.data.contiguous()
            dist.broadcast(values, group=self.process_group, group_src=0)
            parameter.data.copy_(values)

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            raise ValueError("step() takes no closure: call backward() before it")
        self._find_options()
        used = self._find_used()
        parts = self._send_to_owners(used)
        updates = self._compute_updates(parts)
        del parts  # frees the gradients before the updates travel
        self._apply_updates(used, updates)

    def _find_used(self):
        """Return `_owned`, but only those matrices that any rank has a gradient for."""
        flags = [parameter.grad is not None for parameter in self._options]
        flags = self._any_matrix.new_tensor(flags, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        flags = flags.tolist()  # the host waits for the device
        used = set(itertools.compress(self._options, flags))
        return [[parameter for parameter in own if parameter in used] for own in self._owned]

    def _send_to_owners(self, used):
        """Return {own matrix: what the ranks sent for it, in rank order}."""
        own = used[self.rank]
        outgoing = [[self._part_for_owner(p) for p in matrices] for matrices in used]
        numels = [[self._numels[p][rank] for p in own] for rank in range(self.N)]
        received = self._exchange(outgoing, numels)
        # `received` has rank 0's tensors for all of `own`, then rank 1's for all of `own`, …
        parts = {}  # they are whole gradients here, and parts of momenta in ShardedMuon
        for index, parameter in enumerate(own):
            parts[parameter] = received[index :: len(own)]
        return parts

    def _part_for_owner(self, parameter):
        if parameter.grad is None:  # but another rank has a gradient
            return torch.zeros_like(parameter)
        return parameter.grad

    def _exchange(self, outgoing, numels):
        """Send the tensors in outgoing[r] to rank r. Return those from rank 0, from rank 1, …

        They are flat. Those from rank r have numels[r] elements.
        """
        # An empty tensor comes first, because a rank that owns nothing has no update to send. It is
        # in bfloat16: with it, cat() leaves updates in bfloat16, and makes float16 gradients
        # float32.
        pieces = [self._any_matrix.new_empty(0, dtype=torch.bfloat16)]
        pieces += [tensor.reshape(-1) for tensor in itertools.chain(*outgoing)]
        flat = torch.cat(pieces)
        to_send = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        to_receive = [sum(each) for each in numels]
        received = flat.new_empty(sum(to_receive))
        dist.all_to_all_single(received, flat, to_receive, to_send, group=self.process_group)
        sizes = itertools.chain(*numels)
        return received.split(list(sizes))

    def _compute_updates(self, parts):
        """Return, for each rank, what to send to it of the updates of own matrices."""
        outgoing = [[] for _ in range(self.N)]
        for parameter, of_ranks in parts.items():
            matrix = self._join(parameter, of_ranks)
            update = orthogonalize_each(matrix, self._options[parameter])
            for rank, part in enumerate(self._parts_for_ranks(parameter, update)):
                outgoing[rank].append(part)
        return outgoing

    def _join(self, parameter, gradients):
        """Return what to orthogonalize: the momentum with the mean gradient."""
        mean = self._mean(parameter, gradients)
        return add_to_momentum(self.state[parameter], mean, self._options[parameter])

    def _mean(self, parameter, gradients):
        # A sum in 16 bits would round each time, and in float16 overflow at 65504.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        total = sum(gradient.to(dtype) for gradient in gradients)  # in rank order, as on one device
        mean = torch.empty_like(parameter)  # has its strides: kernels round differently for others
        return mean.copy_(total.div_(self.N).view(mean.shape))

    def _parts_for_ranks(self, parameter, update):
        return [update.contiguous()] * self.N  # otherwise _exchange() would make N copies

    def _apply_updates(self, used, updates):
        """Send the updates to all ranks, which apply them."""
        numels = [[p.numel() for p in matrices] for matrices in used]
        received = self._exchange(updates, numels)
        for parameter, flat in zip(itertools.chain(*used), received, strict=True):
            update = flat.view(parameter.shape)
            if parameter.ndim > 1 and parameter.size(-2) > parameter.size(-1):
                # orthogonalize() returned it transposed, and 16-bit kernels round by strides.
                update = update.mT.contiguous().mT
            options = self._options[parameter]
            apply_update(parameter, update, self._shapes[parameter], options)

    # The library: see section 5.

    def __getstate__(self):  # of copy.deepcopy() and pickle
        check_is_copied()

    def state_dict(self):
        return whole_state_dict(self)

    def load_state_dict(self, state_dict):
        load_whole_state_dict(self, state_dict)

    def add_param_group(self, param_group):
        add_param_group(self, param_group)


# --------------------------------------------------------------------------------------------------
# 4. The library: ShardedMuon. Each rank has a part of each matrix, of its mean gradient, and of its
# momentum.


def view_of(whole, shape, offset):
    """The box of a matrix, or of the flattened matrix if the box has one dimension."""
    view = whole.view(-1) if len(shape) == 1 else whole
    for dim, start in enumerate(offset):
        view = view.narrow(dim, start, shape[dim])
    return view


class ShardedMuon(Muon):
    """Muon for parameters of which each rank has a part, as after fully_shard() of fsdp.py.

    `shapes` is {parameter: shape of the whole matrix, or stack}. The parts, some perhaps empty,
    follow each other in the flattened matrix in the order of the ranks. A part's .grad is the same
    part of the mean gradient. Here, state_dict() is only this rank's part: save and load
    fsdp.shards().

        shapes = {name: p.shape for name, p in model.named_parameters()}    # before fully_shard()
        shapes = {p: shapes[name] for name, p in model.named_parameters()}  # after it
        optimizer = ShardedMuon([p for p in model[1].parameters() if p.ndim == 2], shapes)

    Parts that lie otherwise have `boxes`, {parameter: [(shape, offset), …]}, which follow each
    other in this rank's flattened part. An offset is one in the whole matrix. For a slice of
    tensor_parallel.py:

        boxes = tensor_parallel.boxes_of(layer, "weight", layer.weight.shape)
        shapes[layer.weight] = boxes[0].whole_shape
        boxes = {layer.weight: [(box.shape, box.offset) for box in boxes]}
    """

    def __init__(self, params, shapes, *args, boxes=None, **kwargs):
        self._given = shapes
        self._boxes = boxes or {}
        super().__init__(params, *args, **kwargs)

    def _start(self):
        """Broadcast nothing: parts differ between ranks. Find out which rank has what."""
        own = [(p.numel(), self._boxes.get(p)) for p in self._options]
        everyone = [None] * self.N
        dist.all_gather_object(everyone, own, group=self.process_group)
        self._numels = {}
        self._boxes = {}  # {parameter: the boxes of each rank}
        of_parameters = zip(*everyone, strict=True)
        for parameter, of_ranks in zip(self._options, of_parameters, strict=True):
            self._numels[parameter] = [numel for numel, _ in of_ranks]
            self._boxes[parameter] = []
            start = 0  # in the flattened matrix
            for numel, boxes in of_ranks:
                consecutive = [([numel], [start])]
                self._boxes[parameter].append(boxes or consecutive)
                start += numel
        check_parts(self)

    def _part_for_owner(self, parameter):
        gradient = super()._part_for_owner(parameter)
        momentum = add_to_momentum(self.state[parameter], gradient, self._options[parameter])
        return momentum.bfloat16()

    def _join(self, parameter, parts):
        whole = parts[0].new_empty(self._shapes[parameter])
        for boxes, part in zip(self._boxes[parameter], parts, strict=True):
            views = [view_of(whole, *box) for box in boxes]
            pieces = part.split([view.numel() for view in views])
            for view, piece in zip(views, pieces, strict=True):
                view.copy_(piece.view_as(view))
        return whole

    def _parts_for_ranks(self, parameter, update):
        whole = update.contiguous()
        outgoing = []
        for boxes in self._boxes[parameter]:
            pieces = [view_of(whole, *box).flatten() for box in boxes]
            outgoing.append(torch.cat(pieces))
        return outgoing

    state_dict = torch.optim.Optimizer.state_dict
    load_state_dict = torch.optim.Optimizer.load_state_dict


# --------------------------------------------------------------------------------------------------
# 5. The library: state dicts, clipping, and checks.


def whole_state_dict(optimizer):
    """Return the state_dict of torch.optim.Muon, with momenta in host memory, on every rank."""
    whole = torch.optim.Optimizer.state_dict(optimizer)
    own = tree_map_only(torch.Tensor, torch.Tensor.cpu, whole["state"])
    states = [own] * optimizer.N
    dist.all_gather_object(states, own, group=optimizer.process_group)
    entries = itertools.chain(*[state.items() for state in states])
    whole["state"] = dict(sorted(entries))
    return whole


def load_whole_state_dict(optimizer, state_dict):
    """Load the state_dict of torch.optim.Muon, or of Muon at any number of ranks."""
    # A copy, because step() changes momenta in place.
    torch.optim.Optimizer.load_state_dict(optimizer, copy.deepcopy(state_dict))
    own = optimizer._owned[optimizer.rank]
    for parameter in set(optimizer.state).difference(own):
        del optimizer.state[parameter]


def add_param_group(optimizer, param_group):
    if hasattr(optimizer, "_owned"):
        raise ValueError("the owners are chosen: give all parameter groups to the constructor")
    torch.optim.Optimizer.add_param_group(optimizer, param_group)


@torch.no_grad()
def clip_grad_norm_(optimizer, max_norm, norm_type=2.0):
    """Clip by the norm of the ranks' mean gradient of the optimizer's matrices, and return it.

    Call it before step(). It sends the gradients to the owners once more. All ranks multiply their
    own gradients by the same factor, and so their mean.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: give a positive number, or inf")
    if not isinstance(optimizer, Muon) or isinstance(optimizer, ShardedMuon):
        raise ValueError(
            f"{type(optimizer).__name__} gets mean gradients: use clip_grad_norm_ of fsdp.py if "
            "they are sharded, and otherwise PyTorch's"
        )
    dtypes = {parameter.dtype for parameter in optimizer._options}
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    parts = optimizer._send_to_owners(optimizer._find_used())
    norms = [optimizer._any_matrix.new_zeros((), dtype=dtype)]  # a rank may own nothing
    for parameter, gradients in parts.items():
        mean = optimizer._mean(parameter, gradients)
        norm = torch.linalg.vector_norm(mean, norm_type, dtype=dtype)
        norms.append(norm)
    own_norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    everyone = [torch.empty_like(own_norm) for _ in range(optimizer.N)]
    dist.all_gather(everyone, own_norm, group=optimizer.process_group)
    norm = torch.linalg.vector_norm(torch.stack(everyone), norm_type)
    torch.nn.utils.clip_grads_with_norm_(list(optimizer._options), max_norm, norm)
    return norm


def check_is_copied():
    raise TypeError(
        "Muon has a process group, so it cannot be copied: make one for the copied parameters, and "
        "load state_dict()"
    )


def check_matrices(optimizer):
    """Raise an error on all ranks if their matrices or options differ, or are not supported."""
    shapes = optimizer._shapes
    facts = [repr(optimizer)]  # has the options of all groups
    for parameter, shape in shapes.items():
        facts.append(f"{shape}, {parameter.dtype}, a part: {is_part(optimizer, parameter)}")
    check_same_on_all_ranks("matrices and options", facts, optimizer.process_group)
    for parameter, group in optimizer._options.items():
        shape = shapes[parameter]
        if len(shape) not in (2, 3):
            raise ValueError(f"Muon only supports 2D parameters, and stacks of them, not {shape}")
        if parameter.is_complex():
            raise RuntimeError("Muon does not support complex parameters")
        if is_part(optimizer, parameter):
            raise ValueError(
                f"the matrix of {shape} differs between ranks: {parameter.differ_between_ranks}; "
                "use ShardedMuon, or for experts a process_group of ranks with the same ones"
            )
        adjustment = group["adjust_lr_fn"]
        if adjustment not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn {adjustment} is not supported")
        # SGD refuses the same learning rates, momenta and decays as torch.optim.Muon.
        shared = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
        torch.optim.SGD([parameter], **shared)


def is_part(optimizer, parameter):
    """Whether this is a slice of a matrix, or a stack of which other ranks have other matrices."""
    # Set by tensor_parallel.py and expert_parallel.py: the ranks that hold other values of it.
    ranks = set(getattr(parameter, "differ_between_ranks", ()))
    if parameter.ndim == 3:
        group = optimizer.process_group or dist.group.WORLD
        ranks.intersection_update(dist.get_process_group_ranks(group))
    return len(ranks) > 1 and parameter not in optimizer._given


def check_parts(optimizer):
    """Raise ValueError unless the parts of all ranks make up each matrix."""
    for parameter, numels in optimizer._numels.items():
        shape = optimizer._shapes[parameter]
        boxes = itertools.chain(*optimizer._boxes[parameter])
        in_boxes = sum(math.prod(shape) for shape, _ in boxes)
        if not sum(numels) == in_boxes == math.prod(shape):
            raise ValueError(f"parts of {numels} elements, {in_boxes} in boxes, for {shape}")


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

KINDS = ("qkv", "proj", "linear1", "linear2")  # the matrices of a block


def main():
    demo = Demo(__doc__, steps=9)  # a step takes seconds on CPUs that have no bf16
    model = demo.start("muon", bitwise=True)
    matrices, others = split_parameters(model)
    # torch 2.9 and newer have it. Otherwise, compare with the class above on each rank alone.
    alone = [dist.new_group([rank]) for rank in range(demo.ranks)][demo.rank]
    plain_muon = getattr(torch.optim, "Muon", functools.partial(Muon, process_group=alone))
    plain_matrices, plain_others = split_parameters(demo.model)
    plain = plain_muon(plain_matrices, lr=0.02)
    demo.optimizer = Optimizers(plain, torch.optim.AdamW(plain_others, lr=1e-3))
    muon = NaiveMuon(matrices, plain) if demo.args.idea else CountedMuon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(others, lr=1e-3)

    def step(inputs, targets):
        model.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        muon.sent = 0  # bytes in this step
        muon.step()
        for parameter, mean in zip(others, mean_gradients(others), strict=True):
            parameter.grad = mean
        adamw.step()
        return loss

    def whole():
        means = dict(zip(matrices, mean_gradients(matrices), strict=True))
        parameters = list(model.parameters())
        return [means.get(parameter, parameter.grad) for parameter in parameters], parameters

    demo.train(step, whole)
    sent, formula = count_bytes(demo, muon, matrices, others)
    state = held(model.parameters(), Optimizers(muon, adamw))
    status = demo.report(state, formula, sent)
    show_owners(demo, muon, matrices)
    return status


def split_parameters(model):
    """Return the matrices of the blocks, and all other parameters."""
    matrices = [p for block in model[1:-2] for p in block.parameters() if p.ndim == 2]
    known = set(matrices)
    return matrices, [p for p in model.parameters() if p not in known]


class Optimizers:
    """Several optimizers in one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    @property
    def state(self):
        return {**self.optimizers[0].state, **self.optimizers[1].state}


class NaiveMuon:
    """Section 1, with the options of `plain`."""

    def __init__(self, matrices, plain):
        self.state = defaultdict(dict)
        self.step = functools.partial(naive_step, matrices, self.state, plain.param_groups[0])


class CountedMuon(Muon):
    """Muon that counts the bytes of its exchanges, which `demo.sent` does not."""

    def _exchange(self, outgoing, *args):
        for rank, tensors in enumerate(outgoing):
            if rank != self.rank:
                self.sent += sum(tensor.nbytes for tensor in tensors)
        return super()._exchange(outgoing, *args)


def mean_gradients(parameters):
    """Return the means of the ranks' gradients, added in rank order."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    mean = functools.reduce(torch.add, everyone) / len(everyone)
    parts = mean.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def count_bytes(demo, muon, matrices, others):
    """Make demo.sent the mean of the ranks. Return the bytes by the formula, and the formula."""
    total = torch.tensor(demo.sent.total + muon.sent, device=demo.device)
    dist.all_reduce(total)
    demo.sent.total = total.item() / demo.ranks
    N = demo.ranks
    b = matrices[0].element_size()
    update = b if demo.args.idea else 2
    psi, psi_others = (sum(p.numel() for p in each) for each in (matrices, others))
    sent = (b + update) * psi * (N - 1) / N + b * psi_others * (N - 1)
    return sent, f"{b + update}Ψ(N-1)/N + {b}Ψ'(N-1) bytes, Ψ' not in matrices"


def show_owners(demo, muon, matrices):
    """Print which rank owns which matrix, and its share of the operations and of the elements."""
    N = demo.ranks
    owned = [matrices[rank::N] for rank in range(N)] if demo.args.idea else muon._owned
    owners = {p: str(rank) for rank, each in enumerate(owned) for p in each}
    demo.show("\nOwner of     " + "  ".join(f"{kind:>7}" for kind in KINDS))
    for block in range(len(matrices) // len(KINDS)):
        own = matrices[block * len(KINDS) :][: len(KINDS)]
        demo.show(f"  block {block + 1}    " + "  ".join(f"{owners[p]:>7}" for p in own))
    work = [sum(operations(p.shape) for p in each) for each in owned]
    sizes = [sum(p.numel() for p in each) for each in owned]
    for rank in range(N):
        share = N * work[rank] / sum(work)
        bar = "▇" * round(20 * share)
        momentum = N * sizes[rank] / sum(sizes)
        demo.show(
            f"  rank {rank}  {bar} operations {share:.2f}, momentum {momentum:.2f} of the mean"
        )


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

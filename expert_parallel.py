"""Expert parallelism: a mixture of experts (MoE) whose experts are split over N ranks.

An MoE layer has E feed-forward networks, the experts, and a router, which sends each token to k of
them. So its parameters grow with E, but its operations per token do not. A rank sends a copy of its
token, called a row, to the rank of each chosen expert (all-to-all). That rank runs the expert, and
sends the result back. E = 4, N = 2 and k = 2:

              tokens        router               experts             combine
    rank 0    t0 t1  ───▶  t0: e0 e2  ──┐  ┌──▶  e0: t0 t3   ──┐  ┌──▶  w·e0(t0) + w·e2(t0), …
                           t1: e3 e1    │  │     e1: t1 t2     │  │
                                     all-to-all            all-to-all
    rank 1    t2 t3  ───▶  t2: e1 e3    │  │     e2: t0        │  │
                           t3: e0 e3  ──┘  └──▶  e3: t1 t2 t3 ─┘  └──▶  w·e1(t2) + w·e3(t2), …

All other parameters are replicated, as in data parallelism. W ranks train together, and each group
of N of them has all experts. The loss is the mean of all W ranks' losses. Many implementations get
the scale of the experts' gradients wrong:

    a replicated parameter   has the gradient of its rank's loss: average it over the W ranks
    an expert                has the sum of the gradients of N ranks' losses, because it gets their
                             rows: divide it by N, and average it over the W/N ranks that have the
                             same expert

Cost per rank, layer and step, in elements, for Ψe parameters of an expert, T tokens of a rank, and
the hidden size h. An optional capacity pads or cuts each expert's rows of a rank to C:

                      parameters   sent forward             sent backward
    one device        E·Ψe         0                        0
    expert parallel   (E/N)·Ψe     2kTh(N-1)/N on average   the same
    with capacity     (E/N)·Ψe     2ECh(N-1)/N              the same

A rank that sends a rows and b results to other ranks sends (a + b)h elements. Over routings, a and
b average kT(N-1)/N. Ranks also exchange 8E(N-1)/N bytes of counts, for which the host waits once.
Reading aux_loss or z_loss all-reduces 2E + 1 numbers.

Read section 1 for the idea (11 minutes), to section 3 for the technique (38), and the rest to use
it as a library (63).

Run:      torchrun --nproc-per-node 2 expert_parallel.py
Papers:   Lepikhin et al. 2020, GShard, arXiv 2006.16668; Fedus et al. 2021, Switch, 2101.03961;
          Jiang et al. 2024, Mixtral, 2401.04088; DeepSeek-V3, 2412.19437
Mirrors:  transformers' MixtralSparseMoeBlock, Megatron-LM's MoELayer
Left out: grouped matrix products (MegaBlocks), overlap of the exchange with computation (DeepEP),
          node-limited routing, tensor parallelism inside an expert, gradients of gradients
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import json
import math
import os
import signal
import sys
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: rows travel to the rank of their expert, and the results travel back.


class AllToAllRows(torch.autograd.Function):
    """Send `sent[i]` rows to rank i, and receive `received[i]` rows from it.

    Backward sends the gradients back. dist.all_to_all_single alone has no gradient.
    """

    @staticmethod
    def forward(ctx, rows, sent, received, process_group):
        ctx.way_back = (received, sent, process_group)
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=process_group)
        return output

    @staticmethod
    def backward(ctx, grad):
        return AllToAllRows.apply(grad, *ctx.way_back), None, None, None


def exchange_counts(counts, process_group):
    """Send an equal part of `counts` to each rank. Return the parts that the ranks sent here."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=process_group)
    return received


def count_choices(chosen, num_experts):
    """How often each expert was chosen. torch.bincount() would make the host wait."""
    flat = chosen.flatten()
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


def naive_moe(x, gate, expert, top_k=2, process_group=None):
    """A mixture of experts with one expert per rank: (tokens, hidden) to the same.

    All ranks have the same `gate`, an nn.Linear(hidden, ranks). Each has its own module `expert`.
    """
    weights, chosen = gate(x).softmax(-1).topk(top_k)
    if top_k > 1:  # a single weight would always be 1, without a gradient for the router
        weights = weights / weights.sum(-1, keepdim=True)
    owner = chosen.T.flatten()  # the rank of each row: all first choices, then all second choices
    order = owner.argsort(stable=True)  # the rows for rank 0 first, then those for rank 1, …
    counts = count_choices(owner, gate.out_features)
    sent = counts.tolist()
    received = exchange_counts(counts, process_group).tolist()
    rows = x.repeat(top_k, 1)[order]
    rows = AllToAllRows.apply(rows, sent, received, process_group)
    results = AllToAllRows.apply(expert(rows), received, sent, process_group)
    # order.argsort() is the inverse of `order`: results are in the order of the choices again.
    results = results[order.argsort()].view(top_k, *x.shape)
    return (results * weights.T[..., None]).sum(0)


def naive_average_gradients(replicated, experts, process_group=None):
    """Make the gradients those of the mean of all ranks' losses."""
    for parameter in replicated:
        dist.all_reduce(parameter.grad, group=process_group)
    # An expert's gradient is a sum over ranks already, because all ranks sent it rows.
    for parameter in [*replicated, *experts]:
        parameter.grad /= dist.get_world_size(process_group)


# --------------------------------------------------------------------------------------------------
# 2. The layer: several experts per rank.


class Experts(nn.Module):
    """E experts, or E/N after parallelize(). Names are those of the package transformers."""

    def __init__(self, num_experts, hidden, ffn_hidden):
        super().__init__()
        # After parallelize(), the process groups of this rank, a `Groups` of section 3. Its `axes`
        # begins with the N ranks that share the experts.
        self.groups = None
        # After parallelize(), the ranks that hold other experts. ddp.py, zero.py and fsdp.py refuse
        # to average over them.
        self.differ_between_ranks = []
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * ffn_hidden, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, ffn_hidden))
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5  # as nn.Linear's
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, rows, counts):
        """The first counts[0] of the rows are for expert 0, the next counts[1] for expert 1, …"""
        parts = rows.split(counts)
        results = []
        for part, gate_up, down in zip(parts, self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            hidden = F.silu(gate) * up
            results.append(F.linear(hidden, down))
        return torch.cat(results)


class Router(nn.Linear):
    """Computes in fp32 at least, because 16 bits would create ties."""

    def forward(self, tokens):
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        # Neither PyTorch's autocast nor that of amp.py may round.
        with torch.autocast(tokens.device.type, enabled=False), torch._C.DisableTorchFunction():
            return F.linear(tokens.to(dtype), self.weight.to(dtype))


class RoutedExperts(nn.Module):
    """A mixture of experts: (…, hidden) to the same. Each token goes to the best `top_k` experts.

    MoE, its subclass in section 4, has options: shared experts, a capacity, a balance.
    """

    norm_topk_prob = True  # divide the weights of a token by their sum (Mixtral)

    def __init__(self, hidden, ffn_hidden, num_experts, top_k):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} of {num_experts} experts; choose 1 to {num_experts}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = Router(hidden, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden, ffn_hidden)

    def forward(self, x, mask=None):  # MoE leaves masked tokens out of its balance
        tokens = x.reshape(-1, x.shape[-1])  # (tokens, hidden)
        weights, chosen = self.route(tokens, mask)
        slots, counts, num_slots = self.assign_slots(chosen)
        rows = tokens.new_zeros(num_slots + 1, tokens.shape[1])
        # slots[j, t] is the row of token t's choice j. The last row is for choices that a capacity
        # drops.
        rows[slots] = tokens  # broadcast over the k choices
        results = self.run_experts(rows[:-1], counts)
        results = F.pad(results, (0, 0, 0, 1))  # zeros for the last row
        output = (results[slots] * weights.T[..., None]).sum(0)  # over the choices
        return output.view_as(x)

    def route(self, tokens, mask=None):
        """Return the weights and the indices of each token's experts, both (tokens, k)."""
        logits = self.gate(tokens)
        # Router's are in fp32, but another module may be in its place.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probabilities = logits.softmax(-1)
        chosen = self.choose(logits, probabilities, mask)
        weights = probabilities.gather(1, chosen)
        if self.norm_topk_prob and self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(tokens.dtype), chosen

    def choose(self, logits, probabilities, mask):
        return probabilities.topk(self.top_k).indices

    def assign_slots(self, chosen):
        """Return (slots, counts, num_slots).

        `slots`, (k, tokens), is the place of each choice among the rows that the rank sends, which
        are sorted by expert. `counts` are the slots of each expert, and `num_slots` is their sum.
        """
        expert = chosen.T  # GShard's order: all first choices, then all second choices
        order = expert.flatten().argsort(stable=True)
        slots = order.argsort().view_as(expert)  # the inverse of that permutation
        return slots, count_choices(chosen, self.num_experts), slots.numel()

    def run_experts(self, rows, counts):
        """Return the results of the rows, in their order. A row's expert may be on any rank."""
        check_experts(self.experts)
        groups = self.experts.groups  # set by parallelize()
        if groups is None:
            return self.experts(rows, counts.tolist())
        group = groups.axes[0]  # the N = groups.size ranks that share the experts
        sent = counts.view(groups.size, -1)  # (to rank, its expert)
        received = exchange_counts(sent, group)  # (from rank, this rank's expert)
        # The host waits for the device here, and only here.
        sent_counts, received_counts = torch.stack([sent, received]).cpu()
        to_ranks = sent_counts.sum(1).tolist()
        from_ranks = received_counts.sum(1).tolist()
        rows = AllToAllRows.apply(rows, to_ranks, from_ranks, group)
        # Received rows are sorted by sender, then by expert.
        experts = torch.ones_like(received).cumsum(1).flatten()  # number of each count's expert
        of_rows = experts.repeat_interleave(received.flatten(), output_size=len(rows))
        order = of_rows.argsort(stable=True)
        results = self.experts(rows[order], received_counts.sum(0).tolist())
        by_sender = results[order.argsort()]
        # An expert adds up the gradients of N ranks' losses. So backward divides them by N on the
        # way into the expert. It multiplies by N on the way out, because a row needs the gradient
        # of its own rank's loss.
        divisor = groups.divisors[0]  # of this group: N, or 1 if the loss is a sum
        scale_in_backward(by_sender, 1 / divisor)
        scale_in_backward(rows, divisor)
        return AllToAllRows.apply(by_sender, from_ranks, to_ranks, group)


def scale_in_backward(tensor, factor):
    """Let backward multiply the gradient of `tensor` by `factor`."""

    def scale(gradient):
        check_no_second_derivative()
        return gradient * factor

    if tensor.requires_grad:
        tensor.register_hook(scale)


# --------------------------------------------------------------------------------------------------
# 3. Split the experts over ranks, and average gradients over all ranks.


class Groups:
    """The process groups of one rank. With an `edp_group`, all W ranks form a grid."""

    def __init__(self, process_group, edp_group, loss="mean"):
        self.axes = [process_group or dist.group.WORLD]  # the N ranks that share the experts
        if edp_group is not None:  # expert data parallel: the ranks that have the same experts
            self.axes.append(edp_group)
        check_groups(self.axes, loss)
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)  # N
        # What gradients are divided by, for each axis: its size, or 1 if the loss is a sum.
        self.divisors = [group.size() if loss == "mean" else 1 for group in self.axes]

    def __deepcopy__(self, memo):  # a ProcessGroup cannot be copied
        return self


def split_parameters(module, groups=None):
    """Return the names of split parameters, and their Groups. A layer may have several names."""
    names = []
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, Experts) and child.groups:
            check_same_groups(path, child.groups, groups)
            groups = child.groups  # these know whether the loss is a sum
            names += dict(child.named_parameters(path))
    return names, groups


def broadcast(tensor, groups):
    """Give all W ranks the values of the first one."""
    values = tensor.contiguous()
    # First over edp_group, if there is one: then rank 0 of every process_group has the same values.
    for group in reversed(groups.axes):
        dist.broadcast(values, group=group, group_src=0)
    # An expanded tensor has one element in memory for a dimension of stride 0. Write it once.
    elements = tuple(slice(None if stride else 1) for stride in tensor.stride())
    tensor[elements] = values[elements]


@torch.no_grad()
def parallelize(module, process_group=None, edp_group=None, loss="mean"):
    """Split the experts of every MoE in `module` over `process_group`, in place.

    As with DDP, all ranks begin with the parameters and buffers of the first one. Move `module` to
    its device first. From the meta device, call to_empty() and load_full_state_dict() after this.

    If several process groups train together, `edp_group` has the ranks with this rank's experts:
    one of each process group, with the same number in it. fsdp.py may shard the experts over it.

    Use loss="sum" if ranks have unequal numbers of unmasked tokens. Then each rank divides the sum
    over its tokens by the number of all ranks' unmasked tokens, and nothing here divides. Give each
    MoE the mask, too.
    """
    groups = Groups(process_group, edp_group, loss)
    layers = [layer for layer in module.modules() if isinstance(layer, RoutedExperts)]
    check_split(module, layers, groups)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:  # has no values
            broadcast(tensor, groups)
    for layer in layers:
        layer.experts.groups = groups
        layer.experts.differ_between_ranks = dist.get_process_group_ranks(groups.axes[0])
        for parameter in layer.experts.parameters():
            shards = parameter.chunk(groups.size)
            parameter.data = shards[groups.rank].clone()
            parameter.differ_between_ranks = layer.experts.differ_between_ranks
    return module


def average_gradients(module, process_group=None, edp_group=None):
    """Make every gradient that of the mean of the ranks' losses. Call this before optimizer.step().

    Averaging twice changes nothing. After parallelize(..., loss="sum") this adds up: call it once.
    If no rank used a parameter, its gradient becomes zeros, and AdamW decays it.
    """
    # The groups of the layers, from parallelize(), win: these are for a module without experts.
    split, groups = split_parameters(module, Groups(process_group, edp_group))
    replicated = []  # gradients
    of_experts = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # unused here; all ranks must call the same collectives
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = parameter.grad.to_dense()  # that of nn.Embedding(sparse=True)
        gradients = of_experts if name in split else replicated
        gradients.append(parameter.grad)
    axes = list(zip(groups.axes, groups.divisors, strict=True))
    average(replicated, axes)
    if len(axes) > 1:  # run_experts() has divided them by N, but not by the size of edp_group
        average(of_experts, axes[1:])


def average(gradients, axes):
    """Replace the gradients by their means over these groups, in few collectives."""
    for some in torch._utils._take_tensors(gradients, 2**25):  # of one dtype, up to 32 MiB
        flat = torch.cat([gradient.flatten() for gradient in some])
        for group, divisor in axes:
            flat /= divisor
            dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in some])
        for gradient, part in zip(some, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


# --------------------------------------------------------------------------------------------------
# 4. The library: shared experts, a capacity, and the balance of the experts.


class MoE(RoutedExperts):
    """A mixture of experts: (…, hidden) to the same. parallelize() splits the experts over ranks.

    top_k                experts per token; their probabilities weight their results
    norm_topk_prob       divide the weights of a token by their sum (Mixtral), unless top_k is 1
    num_shared_experts   experts that see every token (DeepSeekMoE), as one wide expert
    capacity_factor      an expert gets C = ceil(factor · top_k · tokens / E) rows from each rank
    bias_update_rate     balances the experts by a bias: call update_bias() once a step

    After a forward, aux_loss (Switch's, which is 1 if the experts are balanced) and z_loss
    (ST-MoE's, which keeps logits small) are those of all ranks' tokens. Add them to the loss, with
    a weight. They and the bias count only tokens whose `mask`, of the shape of x without hidden, is
    True or 1. The others go through the experts, too, and take slots of a capacity.
    """

    routing = None  # of the last forward: logits, how often experts were chosen, masked tokens
    total = None  # sums over all ranks, which balance_losses() keeps for a second call
    load = 0  # (E,), how often this rank chose each expert since update_bias()

    def __init__(
        self,
        hidden,
        ffn_hidden,
        num_experts,
        top_k=2,
        *,
        capacity_factor=None,
        num_shared_experts=0,
        norm_topk_prob=True,
        bias_update_rate=None,
    ):
        super().__init__(hidden, ffn_hidden, num_experts, top_k)
        check_capacity_factor(capacity_factor)
        self.capacity_factor = capacity_factor
        self.norm_topk_prob = norm_topk_prob
        self.bias_update_rate = bias_update_rate
        self.shared_experts = None
        if num_shared_experts:
            self.shared_experts = Experts(1, hidden, num_shared_experts * ffn_hidden)
        bias = torch.zeros(num_experts, dtype=torch.float32)  # only update_bias() changes it
        self.register_buffer("bias", bias, persistent=bias_update_rate is not None)

    def forward(self, x, mask=None):
        check_router_logits()  # an error if transformers should record this router's logits
        output = super().forward(x, mask)
        if self.shared_experts is not None:
            tokens = x.reshape(-1, x.shape[-1])
            shared = self.shared_experts(tokens, [len(tokens)])
            output = output + shared.view_as(x)
        return output

    def choose(self, logits, probabilities, mask):
        """Choose by the bias, too. Keep the choices for balance_losses() and update_bias()."""
        chosen = (probabilities + self.bias).topk(self.top_k).indices
        if mask is None:
            mask = torch.ones_like(chosen[:, 0])
        masked = mask.reshape(-1, 1) == 0
        # Masked tokens choose an expert that does not exist: this does not make the host wait.
        counted = chosen.masked_fill(masked, self.num_experts)
        counts = count_choices(counted, self.num_experts + 1)[:-1]
        self.routing = (logits, counts, masked)
        self.total = None
        if self.training:
            self.load = self.load + counts
        if logits.requires_grad:
            references = map(weakref.ref, (self, logits))
            logits.register_hook(partial(forget_graph, *references))
        return chosen

    def assign_slots(self, chosen):
        """With a capacity, each expert has C slots.

        An empty slot has zeros. Choices beyond C are dropped: they get one extra slot at the end. A
        token's other weights do not change.
        """
        slots, counts, num_slots = super().assign_slots(chosen)
        if self.capacity_factor is None:
            return slots, counts, num_slots
        first_slots = counts.cumsum(0) - counts
        expert = chosen.T
        position = slots - first_slots[expert]  # 0 for the expert's first choice
        # 1.1 is 11/10 here. In floating point, 1.1 · 100 / 10 is above 11.
        factor = Fraction(self.capacity_factor).limit_denominator(1_000_000)
        E = self.num_experts
        C = math.ceil(factor * num_slots / E)
        slots = torch.where(position < C, expert * C + position, E * C)
        return slots, torch.full_like(counts, C), E * C

    @property
    def aux_loss(self):
        return self.balance_losses()[0]

    @property
    def z_loss(self):
        return self.balance_losses()[1]

    @torch.enable_grad()  # the losses keep their gradient even if they are read under no_grad()
    def balance_losses(self):
        """Return aux_loss and z_loss of the last forward, for the unmasked tokens of all ranks.

        The first one that you read all-reduces both: read them on all ranks or on none. Under
        checkpoint(use_reentrant=True) they have no gradient.

        aux_loss = E Σ f P (Fedus et al., §2.2): f is an expert's share of all choices, and P is its
        mean probability. Only P has a gradient.
        """
        if self.routing is None:
            return None, None
        logits, counts, masked = self.routing
        E = self.num_experts
        probabilities = logits.softmax(-1).masked_fill(masked, 0)
        z = logits.logsumexp(-1, keepdim=True).square()
        z = z.masked_fill(masked, 0)
        # Over this rank's tokens.
        sums = torch.cat([counts, probabilities.sum(0), z.sum(0)])
        groups = self.experts.groups
        if self.total is None:
            self.total = sum_over_ranks(sums.detach().clone(), groups)
        # The total has no gradient. `own` is 0, and has the gradient of this rank's sums, times W,
        # which cancels the division in average_gradients().
        W = math.prod(groups.divisors) if groups else 1
        num_tokens = self.total[:E].sum().clamp(min=1) / self.top_k
        own = W * (sums - sums.detach())
        means = (self.total + own) / num_tokens
        f, P, z_loss = means.split([E, E, 1])
        aux_loss = E / self.top_k * (f * P).sum()
        return aux_loss, z_loss.squeeze()

    def update_bias(self):
        """Prefer experts with less than the mean load (DeepSeek-V3, §2.1.2)."""
        if self.bias_update_rate is None:
            raise ValueError("update_bias() needs a rate; give MoE a bias_update_rate")
        load = self.load + torch.zeros_like(self.bias)  # a tensor, even if no forward has counted
        load = sum_over_ranks(load, self.experts.groups)
        self.bias += self.bias_update_rate * (load.mean() - load).sign()
        self.load = 0

    def _apply(self, function, recurse=True):
        """Module.to() calls this. The bias stays in fp32, or updates would be lost."""
        bias = self.bias
        super()._apply(function, recurse)
        device = self.bias.device
        # On the meta device it has no values, and to_empty() gives it arbitrary ones.
        self.bias = torch.zeros_like(bias, device=device) if bias.is_meta else bias.to(device)
        return self

    def __getstate__(self):  # copy.deepcopy() cannot copy tensors with a graph
        return self.__dict__ | {"routing": None}


def forget_graph(layer_ref, logits_ref, grad):
    """In backward, keep the numbers that the losses need, but not the graph.

    It is a hook of the logits, so backward calls it with their gradient. A layer that holds its own
    graph is never freed, nor are the process groups in it.
    """
    layer = layer_ref()
    if layer is not None and layer.routing[0] is logits_ref():  # it had no other forward since
        logits, *others = layer.routing
        layer.routing = (logits.detach(), *others)


def sum_over_ranks(tensor, groups):
    axes = groups.axes if groups else []
    for group in axes:
        dist.all_reduce(tensor, group=group)
    return tensor


# --------------------------------------------------------------------------------------------------
# 5. The library: clipping, states, and what parallelize() refuses.


def clip_grad_norm_(module, max_norm, process_group=None, edp_group=None):
    """As torch.nn.utils.clip_grad_norm_, with the norm of the whole module. Return the norm.

    Call average_gradients() first: before it, ranks have different gradients, and the norm is
    wrong. The ranks of `edp_group` have the same experts, so the sum is over `process_group` alone.
    """
    split, groups = split_parameters(module, Groups(process_group, edp_group))
    squares = torch.zeros(())  # of all elements, added up
    for name, parameter in module.named_parameters():
        # Ranks that have no gradient add 0, of the same dtype and on the same kind of device.
        gradient = parameter.new_zeros(()) if parameter.grad is None else parameter.grad
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, dtype=dtype)
        copies = 1 if name in split else groups.size  # which the sum adds up
        squares = squares + norm**2 / copies
    dist.all_reduce(squares, group=process_group)
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


def full_state_dict(module, gradients=False):
    """Return a copy of the whole module's state dict, or of its gradients, on every rank."""
    parameters = module.named_parameters(remove_duplicate=False)
    tensors = {name: p.grad for name, p in parameters} if gradients else module.state_dict()
    tensors = copy.deepcopy(tensors)
    names, groups = split_parameters(module)
    for name in names:
        if tensors[name] is not None:  # the gradient of a frozen expert is None
            shard = tensors[name].contiguous()
            shards = [torch.empty_like(shard) for _ in range(groups.size)]
            dist.all_gather(shards, shard, group=groups.axes[0])
            tensors[name] = torch.cat(shards)
    return tensors


def load_full_state_dict(module, state_dict):
    """Load what full_state_dict() returned, at any number of ranks."""
    shards = dict(state_dict)
    names, groups = split_parameters(module)
    for name in names:
        shards[name] = state_dict[name].chunk(groups.size)[groups.rank]
    module.load_state_dict(shards)


def check_groups(groups, loss):
    if any(dist.get_rank(group) < 0 for group in groups):
        raise ValueError(
            f"rank {dist.get_rank()} is not in process_group, or not in edp_group; "
            "call this on the members of both"
        )
    if loss not in ("mean", "sum"):
        raise ValueError(f"loss={loss!r}; give mean or sum")


def check_same_groups(path, groups, asked):
    if asked and asked.axes != groups.axes:
        raise ValueError(
            f"the experts of {path} are split over other groups; pass the process_group and the "
            "edp_group that parallelize() got"
        )


def check_capacity_factor(factor):
    if factor is not None and not 1e-6 <= factor < math.inf:
        raise ValueError(f"capacity_factor={factor}: give a positive number, or None for no limit")


def check_experts(experts):
    if not hasattr(experts, "groups"):  # such as peft's ParamWrapper
        raise ValueError(
            f"{type(experts).__name__} is in place of the experts: adapters of the experts' "
            "parameters are not supported; leave out target_parameters"
        )


def check_no_second_derivative():
    """Raise RuntimeError under create_graph=True: an expert's would be N times too large."""
    if torch.is_grad_enabled():
        raise RuntimeError("gradients of gradients are left out; compute them on one rank")


def check_router_logits():
    """Raise ValueError if transformers' model should return the routers' logits.

    It records its own routers alone, and would fail later with an IndexError.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector and "router_logits" in (collector.get() or ()):
        raise ValueError(
            "transformers cannot record the router of MoE: leave out output_router_logits, and add "
            "the layer's aux_loss to the loss"
        )


def check_split(module, layers, groups):
    """Raise ValueError on all ranks if they disagree, or if the split would do damage."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    model = [f"{name}: {[*tensor.shape]}, {tensor.dtype}" for name, tensor in tensors]
    model += [f"MoE: {layer.top_k=}, {layer.capacity_factor=}" for layer in layers]
    for number, group in enumerate(groups.axes):
        # The ranks of an edp_group must have the same place in their process_groups.
        # In process_group, whose number is 0, their places differ.
        facts = [groups.divisors, groups.size, groups.rank * number, *model]
        what = "loss, size of process_group, in edp_group the same number in it, and model"
        check_same_on_all_ranks(what, facts, group)
    for layer in layers:
        if layer.num_experts % groups.size:
            raise ValueError(
                f"{layer.num_experts} experts do not divide by {groups.size} ranks; "
                "make process_group smaller, and use edp_group for more ranks"
            )
    for group in groups.axes:
        members = set(dist.get_process_group_ranks(group))
        for name, child in module.named_modules():
            differ = members.intersection(getattr(child, "differ_between_ranks", []))
            if len(differ) > 1:
                raise ValueError(
                    f"ranks {sorted(differ)} have different values in {name}, which a broadcast "
                    "would overwrite; call it on the MoE only"
                )


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


class NaiveMoE(MoE):
    """Has the parameters of the layer in section 2, and computes with section 1."""

    def forward(self, x):
        def expert(rows):
            return self.experts(rows, [len(rows)])

        return naive_moe(x.flatten(0, -2), self.gate, expert, self.top_k).view_as(x)


class ResidualMoE(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.norm = nn.LayerNorm(moe.gate.in_features)
        self.moe = moe
        self.chosen = None  # the experts of the last forward's tokens

    def forward(self, x):
        normed = self.norm(x)
        self.chosen = self.moe.gate(normed.detach()).topk(self.moe.top_k).indices
        return x + self.moe(normed)


def add_moe_layers(model, num_experts, layer_class=MoE):
    """The demo's language model with a mixture of experts after its second and its fourth block."""
    hidden = model[0].embedding_dim
    layers = list(model)
    for position in (5, 3):  # after blocks 4 and 2, because layers[0] is the embedding
        moe = layer_class(hidden, 2 * hidden, num_experts, top_k=min(2, num_experts))
        layers.insert(position, ResidualMoE(moe))
    return nn.Sequential(*layers).to(model[0].weight)


def residual_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, ResidualMoE)]


def main():
    demo = Demo(__doc__)
    num_experts = demo.ranks if demo.args.idea else 8
    if num_experts % demo.ranks:
        demo.stop(f"{num_experts} experts do not divide by {demo.ranks} ranks; use 1, 2, 4 or 8")
    model = demo.start("expert_parallel")
    demo.model = add_moe_layers(demo.model, num_experts)
    demo.optimizer = torch.optim.AdamW(demo.model.parameters(), lr=1e-3)
    model = add_moe_layers(model, num_experts, NaiveMoE if demo.args.idea else MoE)
    model.load_state_dict(demo.model.state_dict())
    parallelize(model)
    balanced = parallelize(copy.deepcopy(demo.model))
    before = rows_per_expert(demo, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = [name for name, _ in model.named_parameters()]

    def step(inputs, targets):
        with SentRows() as demo.sent_rows:
            return train_step(demo, model, optimizer, 0.0, inputs, targets)

    def whole():
        gradients = full_state_dict(model, gradients=True)
        parameters = full_state_dict(model)
        return [gradients[name] for name in names], [parameters[name] for name in names]

    demo.train(step, whole)
    demo.sent.total += demo.sent_rows.total
    sent = bytes_by_formula(demo, model)
    formula = "2Ψr(N-1)/N + Σ 2(a+b)h, Ψr replicated"
    status = demo.report(held(model.parameters(), optimizer), formula, sent)
    optimizer = torch.optim.AdamW(balanced.parameters(), lr=1e-3)
    for number in range(demo.args.steps):
        train_step(demo, balanced, optimizer, 0.1, *demo.batch(number))
    demo.show("\nRows per expert in the first MoE layer, summed over ranks. Ideal: all equal")
    show_rows(demo, "before training", before)
    show_rows(demo, "after training without a balance loss", rows_per_expert(demo, model))
    show_rows(demo, "after training with 0.1 · aux_loss", rows_per_expert(demo, balanced))
    return status


def train_step(demo, model, optimizer, balance, inputs, targets):
    optimizer.zero_grad()
    loss = language_loss(model(demo.part(inputs)), demo.part(targets))
    total = loss
    if balance:
        total = loss + balance * sum(layer.moe.aux_loss for layer in residual_layers(model))
    total.backward()
    if demo.args.idea and not balance:
        parameters = dict(model.named_parameters())
        experts = [parameters.pop(name) for name in list(parameters) if ".experts." in name]
        naive_average_gradients(parameters.values(), experts)
    else:
        average_gradients(model)
    optimizer.step()
    return loss


@torch.no_grad()
def rows_per_expert(demo, model):
    model(demo.part(demo.batch(0)[0]))
    layer = residual_layers(model)[0]
    counts = layer.chosen.flatten().bincount(minlength=layer.moe.num_experts)
    dist.all_reduce(counts)
    return counts.tolist()


def show_rows(demo, title, counts):
    demo.show(title)
    for expert, count in enumerate(counts):
        bar = "▇" * round(8 * len(counts) * count / sum(counts))
        demo.show(f"  expert {expert}  {count:5} {bar}")


class SentRows(TorchDispatchMode):
    """Adds up the bytes of the rows that this rank sends to others."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith("alltoall_base_") and args[4]:  # the rows for each rank
            rows = sum(args[4]) - args[4][dist.get_rank()]
            self.total += rows * args[1][:1].nbytes
        return func(*args, **(kwargs or {}))


def bytes_by_formula(demo, model):
    """What this rank sent in the last step. float64 and int64 have 8 bytes."""
    N = demo.ranks
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    psi_r = sum(size for name, size in sizes.items() if ".experts." not in name)
    elements = 2 * psi_r * (N - 1) / N  # for the replicated parameters' gradients
    for layer in residual_layers(model):
        E = layer.moe.num_experts
        owners = layer.chosen.flatten() // (E // N)
        sent = owners.bincount(minlength=N)  # rows to each rank
        received = exchange_counts(sent, dist.group.WORLD)
        a = (sent.sum() - sent[demo.rank]).item()  # rows to other ranks
        b = (received.sum() - received[demo.rank]).item()  # results to other ranks
        elements += 2 * (a + b) * layer.moe.gate.in_features
        elements += E * (N - 1) / N  # counts
    return 8 * elements


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

"""Wrong on purpose: how people get these techniques wrong, in a few lines each, and which claim says so.

Most of it shipped somewhere. What a mistake is made in, Plain…, is right, but for what its docstring says.
"""

import copy
import itertools
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import amp
import lora
from flash_attention import FlashAttention
from pipeline import build_schedule


def changed(right, **methods):
    return type(f"Changed{right.__name__}", (right,), methods)


def summed(tensor):
    dist.all_reduce(total := tensor.contiguous().clone())
    return total


def gathered(tensor):
    everyone = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


# ---- DistributedDataParallel


class PlainDDP(nn.Module):
    """Averages after backward, when finish_gradient_synchronization() is called: nothing overlaps."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.start()

    def start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, 0)

    def forward(self, *args):
        if torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        return self.module(*args)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                self.average(parameter)

    def average(self, parameter):
        if self.used(parameter):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = torch.empty_like(parameter).copy_(self.mean(gradient))

    def used(self, parameter):
        return summed(torch.tensor(parameter.grad is not None, dtype=torch.int)) > 0

    def mean(self, gradient):
        return summed(gradient / dist.get_world_size())


SumsGradients = changed(PlainDDP, mean=lambda self, gradient: summed(gradient))
DividesAfterTheSum = changed(
    PlainDDP, mean=lambda self, gradient: summed(gradient) / dist.get_world_size()
)
# A hook gets the parameter, and so the parameter it is that is reduced.
ReducesParameters = changed(
    PlainDDP, average=lambda self, parameter: parameter.data.copy_(self.mean(parameter.data))
)
StartsAnywhere = changed(PlainDDP, start=lambda self: None)
OwnBuffers = changed(PlainDDP, forward=lambda self, *args: self.module(*args))
# A rank without a gradient skips the collective; the others' meets the next parameter's.
LeavesOutUnused = changed(PlainDDP, used=lambda self, parameter: parameter.grad is not None)
# A gradient of zero is not no gradient: weight decay and momentum go on.
ZerosForUnused = changed(PlainDDP, used=lambda self, parameter: True)


class Unties(PlainDDP):
    """Copies layer by layer: a parameter of two layers becomes two."""

    def start(self):
        for name, layer in self.module.named_children():
            setattr(self.module, name, copy.deepcopy(layer))
        super().start()


class LastMicroBatchOnly(PlainDDP):
    """Averages what the synchronised backward adds; what no_sync has left in .grad stays each rank's own."""

    finish_gradient_synchronization, sync = None, True

    def start(self):
        super().start()
        for parameter in filter(
            lambda parameter: parameter.requires_grad, self.module.parameters()
        ):
            parameter.register_hook(
                lambda gradient, p=parameter: self.mean(gradient) if self.due(p) else gradient
            )

    def due(self, parameter):
        return self.sync

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


FirstMicroBatchOnly = changed(
    LastMicroBatchOnly, due=lambda self, parameter: parameter.grad is None
)
SendsUnderNoSync = changed(LastMicroBatchOnly, due=lambda self, parameter: True)


# ---- ZeRO-1, over gradients that are averaged already


class PlainZero1(torch.optim.Optimizer):
    """Each rank updates every N-th parameter and broadcasts it."""

    def __init__(self, parameters, optimizer_class, **arguments):
        self.parameters = list(parameters)
        self.mine = self.parameters[dist.get_rank() :: dist.get_world_size()] or self.parameters[:1]
        super().__init__(self.parameters, arguments)
        self.optimizer = self.make(optimizer_class, arguments)

    def make(self, optimizer_class, arguments):
        return optimizer_class(self.mine, **arguments)

    def tell(self):
        self.optimizer.param_groups[0].update(
            {k: v for k, v in self.param_groups[0].items() if k != "params"}
        )

    def step(self):
        self.tell()
        self.optimizer.step()
        for i, parameter in enumerate(self.parameters):
            self.send(parameter, i % dist.get_world_size())

    def send(self, parameter, src):
        dist.broadcast(parameter.data, src)


SavesItsOwnPart = changed(PlainZero1, state_dict=lambda self: self.optimizer.state_dict())
KeepsItsUpdates = changed(PlainZero1, send=lambda self, parameter, src: None)
# A scheduler changes the groups of the outer optimizer; nobody tells the inner one.
FixedLearningRate = changed(PlainZero1, tell=lambda self: None)
KeepsTheWholeState = changed(
    PlainZero1, make=lambda self, optimizer, options: optimizer(self.parameters, **options)
)


# ---- fully_shard


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece):
        return torch.cat(gathered(piece))

    @staticmethod
    def backward(ctx, gradient):
        return (
            summed(gradient).chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()
        )


SummingGather = changed(
    Gather, backward=lambda ctx, gradient: Gather.backward(ctx, gradient) * dist.get_world_size()
)


def shard(parameter, gather):
    flat, shape, N = parameter.detach().flatten(), parameter.shape, dist.get_world_size()
    piece = F.pad(flat, (0, -len(flat) % N)).chunk(N)[dist.get_rank()].clone()
    piece = nn.Parameter(piece, parameter.requires_grad)
    piece.whole = lambda: gather.apply(piece)[: shape.numel()].view(shape)
    return piece


def keeps_what_it_gathers(
    module, gather=Gather, start=lambda parameter: parameter, due=lambda: True
):
    """Right, and all that there is to FSDP, but for memory: autograd keeps what has been gathered until backward."""
    pieces, wholes = (
        {},
        {},
    )  # (a module, a parameter's name): what it holds outside of forward, and in forward
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not hasattr(parameter, "whole"):
                pieces[owner, name] = owner._parameters[name] = shard(start(parameter), gather)

    def gather_all(*_):
        if due():
            wholes.update({place: piece.whole() for place, piece in pieces.items()})
        hold(wholes)

    def hold(tensors):
        for (owner, name), tensor in tensors.items():
            owner._parameters[name] = tensor

    module.register_forward_pre_hook(gather_all)
    module.register_forward_hook(
        lambda *_: hold(pieces), always_call=True
    )  # a recomputation may end before its end
    return module


def full_state_dict(module):
    return {name: parameter.whole() for name, parameter in module.named_parameters()}


sums_shards = partial(keeps_what_it_gathers, gather=SummingGather)
# The weights that are given are thrown away.
initialises_again = partial(keeps_what_it_gathers, start=nn.init.uniform_)
# Gathers for training only: an evaluation after the step finds what forward had.
stale_in_evaluation = partial(keeps_what_it_gathers, due=torch.is_grad_enabled)
# nn.utils.clip_grad_norm_ over pieces: every rank divides by another norm.
clips_by_its_own_norm = keeps_what_it_gathers


def shards_nothing(module):
    return module


# ---- column and row linear


class Column(nn.Linear):
    """Computes its features right; its backward knows of no others."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features // dist.get_world_size(), bias)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# The sum's conjugate is the identity: every rank has the whole gradient of the output already.
SumBothWays = changed(Sum, backward=Sum.forward)


class Row(nn.Linear):
    """Right."""

    sum = Sum

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features // dist.get_world_size(), out_features, bias)

    def forward(self, x):
        return self.sum.apply(F.linear(x, self.weight)) + (0 if self.bias is None else self.bias)


AddsTheBiasOnEveryRank = changed(
    Row, forward=lambda self, x: Sum.apply(F.linear(x, self.weight, self.bias))
)
SumsGradientsToo = changed(Row, sum=SumBothWays)


# ---- pipeline schedules


def forgets_the_last_backward(p, m, v=1):
    return [actions[:-1] for actions in build_schedule("1f1b", p, m, v)]


def backward_before_forward(p, m, v=1):
    """The first rank begins with what should be its last."""
    first, *others = build_schedule("1f1b", p, m, v)
    return [[first[-1], *first[:-1]], *others]


def last_in_first_out(p, m, v=1):
    """GPipe's own order: right to rounding, but not bit by bit."""
    schedule = build_schedule("gpipe", p, m, v)
    return [
        [a for a in actions if "F" in a] + [a for a in actions if "B" in a][::-1]
        for actions in schedule
    ]


# ---- GradScaler


Scaler = amp.GradScaler
EachRankForItself = torch.amp.GradScaler  # leaves it to who has summed the gradients
NeverUnscales = changed(Scaler, step=lambda self, optimizer: optimizer.step())
StepsAnyway = changed(
    Scaler, step=lambda self, optimizer: (Scaler.step(self, optimizer), optimizer.step())
)
ForgetsItsCount = changed(
    Scaler, state_dict=lambda self: {**Scaler.state_dict(self), "_growth_tracker": 0}
)


# ---- LoRA


def starts_changed(model, r, lora_alpha, target_modules):
    """B is drawn at random, as A is."""
    model = lora.inject_lora(model, r, lora_alpha, target_modules=target_modules)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def trains_the_base_too(model, **options):
    return lora.inject_lora(model, **options).requires_grad_()


def forgets_alpha_over_r(model, r, lora_alpha, target_modules):
    return lora.inject_lora(model, r, lora_alpha=r, target_modules=target_modules)


# ---- attention


def plain_attention(
    q,
    k,
    v,
    causal=False,
    scale=None,
    *,
    offset=lambda S, Skv: Skv - S,
    largest=lambda scores: scores.amax(-1, keepdim=True),
    rescaled=torch.mul,
    least=1.0,
    share=lambda x, groups: x.repeat_interleave(groups, 1),
):
    """Online softmax over blocks of 64 keys; autograd keeps all of them."""
    k, v = (share(x, q.shape[1] // k.shape[1]) for x in (k, v))
    S, Skv = q.shape[2], k.shape[2]
    hidden = torch.ones(S, Skv, dtype=torch.bool).triu(offset(S, Skv) + 1) & causal
    m, l, O = torch.tensor(-1e300, dtype=torch.float64), torch.zeros(()), torch.zeros(())
    for k_j, v_j, hidden_j in zip(k.split(64, 2), v.split(64, 2), hidden.split(64, 1), strict=True):
        scores = q @ k_j.mT * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(hidden_j, -torch.inf)
        before, m = m, torch.maximum(m, largest(scores)).detach()
        P, correction = (scores - m).exp(), (before - m).exp()
        l, O = rescaled(l, correction) + P.sum(-1, keepdim=True), O * correction + P @ v_j
    return O / l.clamp(min=least)


# The running maximum scales O, but not the sum that is there already.
forgets_to_scale_the_sum = partial(plain_attention, rescaled=lambda sum, correction: sum)
# The first query sees the first key only, however many keys there are.
aligned_at_the_start = partial(plain_attention, offset=lambda S, Skv: 0)
# A query that sees nothing is 0/0.
divides_zero_by_zero = partial(plain_attention, least=0.0)
# e^score, of any score.
knows_no_maximum = partial(
    plain_attention, largest=lambda scores: torch.zeros_like(scores[..., :1])
)
# Query heads take the heads of keys in turns.
shares_heads_in_turns = partial(plain_attention, share=lambda x, groups: x.repeat(1, groups, 1, 1))


class DrawsItsMaskAnew(FlashAttention):
    @staticmethod
    def backward(ctx, gradient):
        causal, scale, dropout_p, seed, block_size = ctx.arguments
        ctx.arguments = causal, scale, dropout_p, seed + 1, block_size
        return FlashAttention.backward(ctx, gradient)


def draws_its_mask_anew(q, k, v, causal=False, dropout_p=0.0):
    return DrawsItsMaskAnew.apply(q, k, v, causal, None, dropout_p, torch.randint(2**62, ()), 64)


# ---- activation checkpointing


def plain_checkpoint(
    function, *args, grad_mode=torch.enable_grad, random=True, autocast=True, **kwargs
):
    """Right, but that it holds its inputs, runs to the end each time, and compares nothing."""
    state, again = (
        torch.get_rng_state(),
        torch.autocast("cpu", torch.bfloat16, torch.is_autocast_enabled("cpu")),
    )
    saved, numbers = [], itertools.count()

    def recompute(number):
        if not saved:
            with torch.random.fork_rng(), again if autocast else nullcontext(), grad_mode():
                if random:
                    torch.set_rng_state(state)
                with saved_tensors_hooks(
                    lambda tensor: saved.append(tensor.detach()), lambda tensor: tensor
                ):
                    function(*args, **kwargs)
        return saved[number]

    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with saved_tensors_hooks(lambda _: next(numbers), recompute):
        return function(*args, **kwargs)


def keeps_everything(function, *args, **kwargs):
    return function(*args, **kwargs)


draws_anew = partial(plain_checkpoint, random=False)
forgets_autocast = partial(plain_checkpoint, autocast=False)
recomputes_without_grad = partial(plain_checkpoint, grad_mode=torch.no_grad)


class OnlyInputs(torch.autograd.Function):
    """Asks for gradients of the inputs alone."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradient)


def without_parameters(function, *args):
    return OnlyInputs.apply(function, *args)


# ---- all-reduce


def plain_all_reduce(tensor):
    """Right: every rank adds up all of them in rank order."""
    first, *others = gathered(tensor)
    tensor.copy_(sum(others, first))


def own_first(tensor):
    """Each rank adds the others' to its own: replicas drift apart, by roundings."""
    everyone, rank = gathered(tensor), dist.get_rank()
    tensor.copy_(sum(everyone[:rank] + everyone[rank + 1 :], everyone[rank]))


def ring_off_by_one(tensor):
    """The second round begins where the first began, one part too early."""
    rank, N = dist.get_rank(), dist.get_world_size()
    parts = list(F.pad(tensor.flatten(), (0, -tensor.numel() % N)).chunk(N))
    for step in range(2 * (N - 1)) if tensor.numel() else ():
        first, incoming = rank - (step if step < N - 1 else step - 1), torch.empty_like(parts[0])
        sent = dist.isend(parts[first % N], (rank + 1) % N)
        dist.recv(incoming, (rank - 1) % N)
        sent.wait()
        parts[(first - 1) % N] = incoming + (parts[(first - 1) % N] if step < N - 1 else 0)
    tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


def never_folds_in(tensor):
    """As of recursive doubling among the first two of three ranks: the third takes the sum, and gives nothing."""
    everyone = gathered(tensor)
    tensor.copy_(sum(everyone[: 1 << (len(everyone).bit_length() - 1)]))


def leaves_before_it_is_sent(tensor):
    """Rank 0 hands the sum out, and returns while it is on its way."""
    dist.reduce(tensor, 0)
    if dist.get_rank() == 0:
        kept.extend(dist.isend(tensor, to) for to in range(1, dist.get_world_size()))
    else:
        time.sleep(0.2)  # so that it is not luck whether it is still on its way
        dist.recv(tensor, 0)


kept = []  # what is in flight: without its handle it might not arrive at all


def forgets_the_strides(tensor):
    """A contiguous copy is summed up, and the tensor stays as it was."""
    plain_all_reduce(tensor.contiguous())


def whole_world(tensor, process_group=None):
    plain_all_reduce(tensor)


# Of each kind: an implementation, and the claim that it is caught by.
CAUGHT = """
ddp               SumsGradients: mean_gradient, ReducesParameters: mean_gradient, DividesAfterTheSum: overflow
ddp               StartsAnywhere: start_of_rank_0, LeavesOutUnused: unused_on_one_rank, ZerosForUnused: unused
ddp               Unties: tied, OwnBuffers: buffers, LastMicroBatchOnly: accumulation
ddp               FirstMicroBatchOnly: accumulation, SendsUnderNoSync: no_sync_is_silent, PlainDDP: overlap
zero1             KeepsItsUpdates: mean_gradient, SavesItsOwnPart: whole_state_dict, FixedLearningRate: schedulers
zero1             KeepsTheWholeState: state_is_sharded
fsdp              sums_shards: mean_gradient, initialises_again: mean_gradient
fsdp              keeps_what_it_gathers: nothing_whole_is_kept, stale_in_evaluation: evaluation
fsdp              clips_by_its_own_norm: clipping, shards_nothing: parameters_are_shards
column-linear     Column: column
row-linear        AddsTheBiasOnEveryRank: row, SumsGradientsToo: row
pipeline-schedule forgets_the_last_backward: complete, backward_before_forward: no_deadlock
pipeline-schedule last_in_first_out: in_order
grad-scaler       EachRankForItself: shared_overflow, StepsAnyway: skipped
grad-scaler       NeverUnscales: scaled_and_unscaled, ForgetsItsCount: resumed
lora              starts_changed: unchanged_at_first, trains_the_base_too: base_stays
lora              forgets_alpha_over_r: dense_equivalent
attention         forgets_to_scale_the_sum: as_dense, aligned_at_the_start: causal_at_the_end
attention         divides_zero_by_zero: sees_nothing, shares_heads_in_turns: shared_heads
attention         knows_no_maximum: large_scores, draws_its_mask_anew: dropout, plain_attention: no_matrix_is_kept
checkpoint        draws_anew: random_numbers, forgets_autocast: autocast_again, recomputes_without_grad: recomputed
checkpoint        without_parameters: recomputed, keeps_everything: forgotten, plain_checkpoint: differs
all-reduce        ring_off_by_one: summed, never_folds_in: summed, own_first: same_bits
all-reduce        leaves_before_it_is_sent: reused, forgets_the_strides: strided, whole_world: all_reduces_apart
"""
MISTAKES = [
    (kind, *pair.split(": "))
    for kind, pairs in (line.split(maxsplit=1) for line in CAUGHT.strip().splitlines())
    for pair in pairs.split(", ")
]
RIGHT = {  # what the mistakes are made in, and the claims that it cannot hold
    ("ddp", "PlainDDP"): {"overlap", "different_models"},
    ("zero1", "PlainZero1"): {"whole_state_dict", "bitwise_at_four"},
    ("fsdp", "keeps_what_it_gathers"): {
        "nothing_whole_is_kept",
        "tied",
        "clipping",
        "bitwise_at_four",
    },
    ("row-linear", "Row"): set(),
    ("attention", "plain_attention"): {"no_matrix_is_kept"},
    ("checkpoint", "plain_checkpoint"): {"differs"},
    ("all-reduce", "plain_all_reduce"): set(),
}

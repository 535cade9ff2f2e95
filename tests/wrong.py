"""Wrong on purpose: how people get these techniques wrong, in a few lines each, and which claim says so.

Most of it shipped somewhere. What a mistake is made in, Plain…, is right, but for what its docstring says.
"""

import functools
import itertools
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

import amp
import lora
from flash_attention import FlashAttention, flash_backward
from pipeline import build_schedule

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
        used = torch.tensor(parameter.grad is not None, dtype=torch.int)
        dist.all_reduce(used)
        if used:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = torch.empty_like(parameter).copy_(self.mean(gradient))

    def mean(self, gradient):
        mean = gradient.contiguous() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean


class SumsGradients(PlainDDP):
    def mean(self, gradient):
        return super().mean(gradient) * dist.get_world_size()


class DividesAfterTheSum(PlainDDP):
    def mean(self, gradient):
        dist.all_reduce(total := gradient.contiguous().clone())
        return total / dist.get_world_size()


class ReducesParameters(PlainDDP):
    """A hook gets the parameter, and so the parameter it is that is reduced."""

    def average(self, parameter):
        parameter.data = self.mean(parameter.data)


class StartsAnywhere(PlainDDP):
    def start(self):
        pass


class LeavesOutUnused(PlainDDP):
    """A rank without a gradient skips the collective; the others' meets the next parameter's."""

    def average(self, parameter):
        if parameter.grad is not None:
            parameter.grad = torch.empty_like(parameter).copy_(self.mean(parameter.grad))


class ZerosForUnused(PlainDDP):
    """A gradient of zero is not no gradient: weight decay and momentum go on."""

    def average(self, parameter):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        super().average(parameter)


class Unties(PlainDDP):
    """Makes new parameters, one for each place that held one."""

    def start(self):
        for owner in self.module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        super().start()


class OwnBuffers(PlainDDP):
    def forward(self, *args):
        return self.module(*args)


class LastMicroBatchOnly(PlainDDP):
    """Averages what the synchronised backward adds; what no_sync has left in .grad stays each rank's own."""

    finish_gradient_synchronization, sync = None, True

    def start(self):
        super().start()
        for parameter in filter(lambda parameter: parameter.requires_grad, self.module.parameters()):
            parameter.register_hook(lambda gradient, p=parameter: self.mean(gradient) if self.due(p) else gradient)

    def due(self, parameter):
        return self.sync

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


class FirstMicroBatchOnly(LastMicroBatchOnly):
    def due(self, parameter):
        return parameter.grad is None


class SendsUnderNoSync(LastMicroBatchOnly):
    def due(self, parameter):
        return True


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

    def step(self):
        self.optimizer.param_groups[0].update({k: v for k, v in self.param_groups[0].items() if k != "params"})
        self.optimizer.step()
        for i, parameter in enumerate(self.parameters):
            self.send(parameter, i % dist.get_world_size())

    def send(self, parameter, src):
        dist.broadcast(parameter.data, src)


class SavesItsOwnPart(PlainZero1):
    def state_dict(self):
        return self.optimizer.state_dict()


class KeepsItsUpdates(PlainZero1):
    def send(self, parameter, src):
        pass


class FixedLearningRate(PlainZero1):
    """A scheduler changes the groups of the outer optimizer; nobody tells the inner one."""

    def step(self):
        self.optimizer.step()
        for i, parameter in enumerate(self.parameters):
            self.send(parameter, i % dist.get_world_size())


class KeepsTheWholeState(PlainZero1):
    def make(self, optimizer_class, arguments):
        return optimizer_class(self.parameters, **arguments)


# ---- fully_shard


class Gather(torch.autograd.Function):
    """Right, and all that there is to FSDP, but for memory: autograd keeps what has been gathered until backward."""

    @staticmethod
    def forward(ctx, piece):
        pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, piece)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.contiguous())
        return gradient.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


class SummingGather(Gather):
    @staticmethod
    def backward(ctx, gradient):
        return Gather.backward(ctx, gradient) * dist.get_world_size()


class Whole(nn.Module):
    gather, stale = Gather, False

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, piece):
        if not self.stale or torch.is_grad_enabled():
            self.gathered = self.gather.apply(piece)[: self.shape.numel()].view(self.shape)
        return self.gathered

    def right_inverse(self, whole):
        N = dist.get_world_size()
        flat = F.pad(whole.flatten(), (0, -whole.numel() % N))
        return flat.chunk(N)[dist.get_rank()].clone()


class StaleWhole(Whole):
    """Gathers for training only: an evaluation after the step finds what forward had."""

    stale = True


class SummedWhole(Whole):
    gather = SummingGather


def keeps_what_it_gathers(module, whole=Whole):
    for owner in list(module.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not isinstance(owner, parametrize.ParametrizationList):
                parametrize.register_parametrization(owner, name, whole(parameter.shape), unsafe=True)
    return module


def sums_shards(module):
    return keeps_what_it_gathers(module, whole=SummedWhole)


def stale_in_evaluation(module):
    return keeps_what_it_gathers(module, whole=StaleWhole)


def initialises_again(module):
    for child in module.modules():
        if hasattr(child, "reset_parameters") and not parametrize.is_parametrized(child):
            child.reset_parameters()
    return keeps_what_it_gathers(module)


def clips_by_its_own_norm(module):
    """nn.utils.clip_grad_norm_ over pieces: every rank divides by another norm."""
    return keeps_what_it_gathers(module)


def shards_nothing(module):
    return module


def full_state_dict(module):
    return {name: parameter(module, name) for name in names(module)}


def names(module):
    found = [name for name, _ in module.named_parameters()]
    return [name.replace("parametrizations.", "").removesuffix(".original") for name in found]


def parameter(module, name):
    owner, _, name = name.rpartition(".")
    return getattr(module.get_submodule(owner), name)


# ---- column and row linear


class Column(nn.Linear):
    """Computes its features right; its backward knows of no others."""

    def __init__(self, in_features, out_features, bias=True, *, gather_output=False):
        super().__init__(in_features, out_features // dist.get_world_size(), bias)
        self.gather_output = gather_output

    def forward(self, x):
        y = super().forward(x)
        if self.gather_output:
            y = self.gather(y)
        return y

    def gather(self, y):
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.detach())
        parts[dist.get_rank()] = y
        return torch.cat(parts, -1)


class Row(nn.Linear):
    """Right."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features // dist.get_world_size(), out_features, bias)

    def forward(self, x):
        return Sum.apply(F.linear(x, self.weight)) + (0 if self.bias is None else self.bias)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(total := x.clone())
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SumBothWays(Sum):
    """The sum's conjugate is the identity: every rank has the whole gradient of the output already."""

    @staticmethod
    def backward(ctx, gradient):
        return Sum.forward(ctx, gradient)


class AddsTheBiasOnEveryRank(Row):
    def forward(self, x):
        return Sum.apply(F.linear(x, self.weight, self.bias))


class SumsGradientsToo(Row):
    def forward(self, x):
        return SumBothWays.apply(F.linear(x, self.weight)) + (0 if self.bias is None else self.bias)


# ---- pipeline schedules


def forgets_the_last_backward(p, m, v=1):
    return [actions[:-1] for actions in build_schedule("1f1b", p, m, v)]


def backward_before_forward(p, m, v=1):
    """One forward too few before the first backward, on the first rank."""
    first, *others = build_schedule("1f1b", p, m, v)
    return [[*first[1:2], *first[:1], *first[2:]] if p == 1 else [first[-1], *first[:-1]], *others]


def last_in_first_out(p, m, v=1):
    """GPipe's own order: right to rounding, but not bit by bit."""
    schedule = build_schedule("gpipe", p, m, v)
    return [[a for a in actions if "F" in a] + [a for a in actions if "B" in a][::-1] for actions in schedule]


# ---- GradScaler


class EachRankForItself(amp.GradScaler):
    def unscale_(self, optimizer):
        initialized, dist.is_initialized = dist.is_initialized, lambda: False
        super().unscale_(optimizer)
        dist.is_initialized = initialized


class CountsOn(amp.GradScaler):
    """Good steps are counted, in a row or not."""

    def update(self, new_scale=None):
        before = getattr(self, "_state", {}).get("_growth_tracker", 0)
        super().update(new_scale)
        if self._state["_growth_tracker"] == 0 and before and new_scale is None and self._state["scale"] < 1024:
            self._state["_growth_tracker"] = before


class UnscalesTwice(amp.GradScaler):
    def step(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.get_scale()
        return super().step(optimizer)


class StepsAnyway(amp.GradScaler):
    def step(self, optimizer):
        super().step(optimizer)
        return optimizer.step()


class NeverUnscales(amp.GradScaler):
    def step(self, optimizer):
        return optimizer.step()


class ForgetsItsCount(amp.GradScaler):
    def state_dict(self):
        return {**super().state_dict(), "_growth_tracker": 0}


# ---- LoRA


def starts_changed(model, r, lora_alpha, target_modules):
    """B is drawn at random, as A is."""
    model = lora.inject_lora(model, r, lora_alpha, target_modules=target_modules)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def trains_the_base_too(model, r, lora_alpha, target_modules):
    return lora.inject_lora(model, r, lora_alpha, target_modules=target_modules).requires_grad_()


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
knows_no_maximum = partial(plain_attention, largest=lambda scores: torch.zeros_like(scores[..., :1]))
# Query heads take the heads of keys in turns.
shares_heads_in_turns = partial(plain_attention, share=lambda x, groups: x.repeat(1, groups, 1, 1))


class DrawsItsMaskAnew(FlashAttention):
    @staticmethod
    def backward(ctx, gradient):
        causal, scale, dropout_p, seed, block_size = ctx.arguments
        ctx.arguments = causal, scale, dropout_p, seed + 1, block_size
        return FlashAttention.backward(ctx, gradient)


class LacksD(FlashAttention):
    """dS = P ∘ dP: without rowsum(dO ∘ O), which softmax's sum to 1 costs."""

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, output, lse = ctx.saved_tensors
        gradients = flash_backward(gradient, q, k, v, torch.zeros_like(output), lse, *ctx.arguments)
        return *gradients, *[None] * len(ctx.arguments)


def draws_its_mask_anew(q, k, v, causal=False, dropout_p=0.0):
    return DrawsItsMaskAnew.apply(q, k, v, causal, None, dropout_p, torch.randint(2**62, ()), 64)


def lacks_d(q, k, v, causal=False):
    return LacksD.apply(q, k, v, causal, None, 0.0, None, 64)


# ---- activation checkpointing


def plain_checkpoint(function, *args, grad_mode=torch.enable_grad, random=True, autocast=True, **kwargs):
    """Right, but that it holds its inputs, runs to the end each time, and compares nothing."""
    state, again = torch.get_rng_state(), torch.autocast("cpu", torch.bfloat16, torch.is_autocast_enabled("cpu"))
    saved, numbers = [], itertools.count()

    def recompute(number):
        if not saved:
            with torch.random.fork_rng(), again if autocast else nullcontext(), grad_mode():
                if random:
                    torch.set_rng_state(state)
                with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda tensor: tensor):
                    function(*args, **kwargs)
        return saved[number]

    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with saved_tensors_hooks(lambda _: next(numbers), recompute):
        return function(*args, **kwargs)


def keeps_everything(function, *args, **kwargs):
    return function(*args, **kwargs)


draws_anew = functools.partial(plain_checkpoint, random=False)
forgets_autocast = functools.partial(plain_checkpoint, autocast=False)
recomputes_without_grad = functools.partial(plain_checkpoint, grad_mode=torch.no_grad)


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


class NaiveBackward(OnlyInputs):
    """What parameters get, they get in a backward of their own."""

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)
        return None, *[x.grad for x in inputs]


def without_parameters(function, *args):
    return OnlyInputs.apply(function, *args)


def naive_backward(function, *args):
    return NaiveBackward.apply(function, *args)


# ---- all-reduce


def send_and_receive(sent, to, received, source):
    works = [dist.isend(sent.contiguous(), to), dist.irecv(received, source)]
    for work in works:
        work.wait()


def plain_all_reduce(tensor):
    """Right: every rank sends its own to every other, and adds up all of them in rank order."""
    everyone = gathered(tensor)
    tensor.copy_(sum(everyone[1:], everyone[0]))


def gathered(tensor):
    rank, N, mine = dist.get_rank(), dist.get_world_size(), tensor.contiguous()
    everyone = [mine if r == rank else torch.empty_like(mine) for r in range(N)]
    for step in range(1, N):
        to, source = (rank + step) % N, (rank - step) % N
        if tensor.numel():
            send_and_receive(mine, to, everyone[source], source)
    return everyone


def own_first(tensor):
    """Each rank adds the others' to its own: replicas drift apart, by roundings."""
    everyone, rank = gathered(tensor), dist.get_rank()
    tensor.copy_(sum(everyone[:rank] + everyone[rank + 1 :], everyone[rank]))


def ring_off_by_one(tensor):
    """The second round begins where the first began, one part too early."""
    rank, N, parts = dist.get_rank(), dist.get_world_size(), list(tensor.contiguous().view(-1).split(1))
    parts = list(torch.cat([*parts, tensor.new_zeros(-tensor.numel() % N)]).chunk(N)) if tensor.numel() else []
    for step in range(2 * (N - 1)) if parts else ():
        first = rank - (step if step < N - 1 else step - 1)
        incoming = torch.empty_like(parts[0])
        send_and_receive(parts[first % N], (rank + 1) % N, incoming, (rank - 1) % N)
        parts[(first - 1) % N] = incoming + (parts[(first - 1) % N] if step < N - 1 else 0)
    if parts:
        tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


def never_folds_in(tensor, sends=True):
    """Recursive doubling by whom has a partner: the last of three ranks takes the sum, and gives nothing."""
    rank, N, x = dist.get_rank(), dist.get_world_size(), tensor.contiguous().view(-1)
    power = 1 << (N.bit_length() - 1)
    for step in range(power.bit_length() - 1 if x.numel() and rank < power else 0):
        incoming = torch.empty_like(x)
        send_and_receive(x, rank ^ 2**step, incoming, rank ^ 2**step)
        x.add_(incoming)
    if rank + power < N and x.numel():
        dist.send(x, rank + power)
    if rank >= power and x.numel():
        dist.recv(x, rank - power)
    tensor.copy_(x.view_as(tensor))


def leaves_before_it_is_sent(tensor):
    """Rank 0 hands the sum out, and returns while it is on its way."""
    rank, N, x = dist.get_rank(), dist.get_world_size(), tensor.contiguous().view(-1)
    if rank == 0:
        for source in range(1, N):
            dist.recv(incoming := torch.empty_like(x), source)
            x.add_(incoming)
        tensor.copy_(x.view_as(tensor))
        kept.append([dist.isend(x, to) for to in range(1, N)])
    else:
        dist.send(x, 0)
        time.sleep(0.2)  # so that it is not luck whether it is still on its way
        dist.recv(x, 0)
        tensor.copy_(x.view_as(tensor))


kept = []  # what is in flight: without its handle it might not arrive at all


def forgets_the_strides(tensor):
    """A contiguous copy is summed up, and the tensor stays as it was."""
    plain_all_reduce(tensor.contiguous())


def whole_world(tensor, process_group=None):
    plain_all_reduce(tensor)


class Mistake(NamedTuple):
    kind: str
    implementation: str
    caught_by: str


MISTAKES = [
    Mistake("ddp", "SumsGradients", "mean_gradient"),
    Mistake("ddp", "ReducesParameters", "mean_gradient"),
    Mistake("ddp", "DividesAfterTheSum", "overflow"),
    Mistake("ddp", "StartsAnywhere", "start_of_rank_0"),
    Mistake("ddp", "LeavesOutUnused", "unused_on_one_rank"),
    Mistake("ddp", "ZerosForUnused", "unused"),
    Mistake("ddp", "Unties", "tied"),
    Mistake("ddp", "OwnBuffers", "buffers"),
    Mistake("ddp", "LastMicroBatchOnly", "accumulation"),
    Mistake("ddp", "FirstMicroBatchOnly", "accumulation"),
    Mistake("ddp", "SendsUnderNoSync", "no_sync_is_silent"),
    Mistake("ddp", "PlainDDP", "overlap"),
    Mistake("zero1", "KeepsItsUpdates", "mean_gradient"),
    Mistake("zero1", "SavesItsOwnPart", "whole_state_dict"),
    Mistake("zero1", "FixedLearningRate", "schedulers"),
    Mistake("zero1", "KeepsTheWholeState", "state_is_sharded"),
    Mistake("fsdp", "sums_shards", "mean_gradient"),
    Mistake("fsdp", "initialises_again", "mean_gradient"),
    Mistake("fsdp", "keeps_what_it_gathers", "nothing_whole_is_kept"),
    Mistake("fsdp", "keeps_what_it_gathers", "tied"),
    Mistake("fsdp", "stale_in_evaluation", "evaluation"),
    Mistake("fsdp", "clips_by_its_own_norm", "clipping"),
    Mistake("fsdp", "shards_nothing", "parameters_are_shards"),
    Mistake("column-linear", "Column", "column"),
    Mistake("column-linear", "Column", "column_gathered"),
    Mistake("row-linear", "AddsTheBiasOnEveryRank", "row"),
    Mistake("row-linear", "SumsGradientsToo", "row"),
    Mistake("pipeline-schedule", "forgets_the_last_backward", "complete"),
    Mistake("pipeline-schedule", "backward_before_forward", "no_deadlock"),
    Mistake("pipeline-schedule", "last_in_first_out", "in_order"),
    Mistake("grad-scaler", "EachRankForItself", "shared_overflow"),
    Mistake("grad-scaler", "CountsOn", "grown"),
    Mistake("grad-scaler", "UnscalesTwice", "clipped"),
    Mistake("grad-scaler", "StepsAnyway", "skipped"),
    Mistake("grad-scaler", "NeverUnscales", "scaled_and_unscaled"),
    Mistake("grad-scaler", "ForgetsItsCount", "resumed"),
    Mistake("lora", "starts_changed", "unchanged_at_first"),
    Mistake("lora", "trains_the_base_too", "base_stays"),
    Mistake("lora", "trains_the_base_too", "r_times_d_plus_k"),
    Mistake("lora", "forgets_alpha_over_r", "dense_equivalent"),
    Mistake("attention", "forgets_to_scale_the_sum", "as_dense"),
    Mistake("attention", "lacks_d", "as_dense"),
    Mistake("attention", "lacks_d", "causal"),
    Mistake("attention", "aligned_at_the_start", "causal_at_the_end"),
    Mistake("attention", "divides_zero_by_zero", "sees_nothing"),
    Mistake("attention", "shares_heads_in_turns", "shared_heads"),
    Mistake("attention", "knows_no_maximum", "large_scores"),
    Mistake("attention", "draws_its_mask_anew", "dropout"),
    Mistake("attention", "plain_attention", "no_matrix_is_kept"),
    Mistake("checkpoint", "draws_anew", "random_numbers"),
    Mistake("checkpoint", "forgets_autocast", "autocast_again"),
    Mistake("checkpoint", "recomputes_without_grad", "recomputed"),
    Mistake("checkpoint", "without_parameters", "recomputed"),
    Mistake("checkpoint", "without_parameters", "closures"),
    Mistake("checkpoint", "naive_backward", "closures"),
    Mistake("checkpoint", "keeps_everything", "forgotten"),
    Mistake("checkpoint", "plain_checkpoint", "differs"),
    Mistake("all-reduce", "ring_off_by_one", "summed"),
    Mistake("all-reduce", "never_folds_in", "summed"),
    Mistake("all-reduce", "own_first", "same_bits"),
    Mistake("all-reduce", "leaves_before_it_is_sent", "reused"),
    Mistake("all-reduce", "forgets_the_strides", "strided"),
    Mistake("all-reduce", "whole_world", "all_reduces_apart"),
]
RIGHT = {  # what the mistakes are made in, and the claims that it cannot hold
    ("ddp", "PlainDDP"): {"overlap", "different_models", "sent_bytes"},
    ("zero1", "PlainZero1"): {"whole_state_dict", "bitwise_at_four"},
    ("fsdp", "keeps_what_it_gathers"): {"nothing_whole_is_kept", "tied", "clipping", "bitwise_at_four"},
    ("row-linear", "Row"): set(),
    ("attention", "plain_attention"): {"no_matrix_is_kept"},
    ("checkpoint", "plain_checkpoint"): {"differs"},
    ("all-reduce", "plain_all_reduce"): set(),
}

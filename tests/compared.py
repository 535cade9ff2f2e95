"""Small runs for test_compare.py: the one device, right ways to split it, and 40 planted mistakes.

A class is a run. Its base is what it is compared with, or what it gets wrong. `origin` of a mistake
is (kind, name) as patterns: where the mistake is.
"""

import contextlib

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import context_parallel as cp
import ddp
import expert_parallel as ep
import fsdp
import pipeline
import tensor_parallel as tp
import zero

V = 48  # words
T = 16  # tokens in a sequence
C = 32  # features


class Attention(nn.Module):
    heads = 4

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(C, C)
        self.k = nn.Linear(C, C)
        self.v = nn.Linear(C, C)
        self.proj = nn.Linear(C, C, bias=False)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def split_heads(self, x):
        return x.unflatten(-1, (-1, C // 4)).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.split_heads, (self.q(x), self.k(x), self.v(x)))
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Fused(Attention):
    def __init__(self):
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x):
        q, k, v = map(self.split_heads, self.qkv(x).chunk(3, -1))
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(C, 2 * C)
        self.inner = nn.Identity()
        self.down = nn.Linear(2 * C, C, bias=False)

    def forward(self, x):
        return self.down(self.inner(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norm1 = nn.LayerNorm(C)
        self.attention = attention()
        self.norm2 = nn.LayerNorm(C)
        self.mlp = mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, attention=Attention, mlp=MLP):
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.position = nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block(attention, mlp) for _ in range(2))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, V, bias=False)

    def forward(self, tokens, positions=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))

    def run(self, block, x):
        return block(x)


class OneDevice:
    """What is common to all runs. The methods that a run changes are small."""

    grid = {"dp": 2}
    attention = Attention
    mlp = MLP
    state = None
    rename = None
    smoothing = 0.0
    micro_batches = 1
    shards = False  # by PyTorch's fully_shard

    def __init__(self, dtype, autocast):
        torch.manual_seed(0)
        self.dtype = dtype
        self.autocast = autocast
        self.rank = pool.rank()
        self.ranks = pool.world_size()
        self.model = self.net = Net(self.attention, self.mlp).to(dtype)
        self.set_up()
        self.optimizer = self.make_optimizer()

    def set_up(self):
        pass

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def batch(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.randint(V, (8, T + 1), generator=generator)

    def losses(self, tokens):
        """One for each token."""
        logits = self.model(tokens[:, :-1])
        return self.cross_entropy(logits, tokens[:, 1:])

    def cross_entropy(self, logits, targets):
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            reduction="none",
            label_smoothing=self.smoothing,
        )
        return losses.view(targets.shape)

    def loss(self, tokens):
        return self.losses(tokens).mean()

    def backward(self, number, recording):
        for tokens in self.batch(number).chunk(self.micro_batches):
            with self.autocast():
                loss = self.loss(tokens) / self.micro_batches
            recording.see("loss", loss)
            loss.backward()

    def average(self):
        pass

    def update(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, number, recording):
        self.zero_grad()
        self.backward(number, recording)
        self.average()
        self.update()


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


PRECISIONS = {
    "fp32": (torch.float32, contextlib.nullcontext),
    "fp64": (torch.float64, contextlib.nullcontext),
    "bf16": (torch.float32, bf16),
    "pure bf16": (torch.bfloat16, contextlib.nullcontext),
}

# ---- right: data parallelism


class DataParallel(OneDevice):
    """By hand."""

    one = OneDevice

    def batch(self, number):
        return super().batch(number).chunk(self.ranks)[self.rank]

    def average(self):
        for parameter in self.model.parameters():
            self.average_gradient(parameter)

    def average_gradient(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.ranks


class OurDDP(DataParallel):
    def set_up(self):
        self.model = ddp.DistributedDataParallel(self.net)

    def average(self):
        pass


class TorchsDDP(OurDDP):
    def set_up(self):
        self.model = TorchDDP(self.net)


class Zero1(DataParallel):
    stage = zero.Zero1

    def make_optimizer(self):
        return self.stage(self.net, torch.optim.AdamW, lr=0.01)

    def average(self):
        pass


class Zero2(Zero1):
    stage = zero.Zero2


class Zero3(Zero1):
    stage = zero.Zero3

    def state(self):
        return self.optimizer.module_state_dict()


class OurFSDP(OurDDP):
    def set_up(self):
        for block in self.net.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard(self.net)


class TorchsFSDP(OurDDP):
    shards = True

    def set_up(self):
        mesh = DeviceMesh.from_group(pool.group(), "cpu")
        for block in self.net.blocks:
            torch_fully_shard(block, mesh=mesh)
        torch_fully_shard(self.net, mesh=mesh)


class Interleaved(DataParallel):
    """A sampler gives rank r every second sample."""

    def batch(self, number):
        return OneDevice.batch(self, number)[self.rank :: self.ranks]


class Accumulated(DataParallel):
    micro_batches = 2


class OneDeviceInMicroBatches(OneDevice):
    micro_batches = 4


class AccumulatedOnBoth(Accumulated):
    one = OneDeviceInMicroBatches


class LocalSum(DataParallel):
    """The loss is divided by the number of all ranks' tokens, and gradients are summed."""

    def loss(self, tokens):
        losses = self.losses(tokens)
        return losses.sum() / losses.numel() / self.ranks

    def average_gradient(self, parameter):
        dist.all_reduce(parameter.grad)


class Unequal(OneDevice):
    """Targets of -100 do not count. The ranks have unequal numbers of them."""

    def batch(self, number):
        tokens = super().batch(number)
        tokens[:2, 5:] = -100
        return tokens

    def losses(self, tokens):
        logits = self.model(tokens[:, :-1].clamp(min=0))
        return self.cross_entropy(logits, tokens[:, 1:])

    def loss(self, tokens):
        return self.losses(tokens).sum() / self.count(tokens)

    def count(self, tokens):
        return (tokens[:, 1:] != -100).sum()


class UnequalDataParallel(Unequal, DataParallel):
    one = Unequal

    def batch(self, number):
        return Unequal(self.dtype, self.autocast).batch(number).chunk(self.ranks)[self.rank]

    def count(self, tokens):
        count = super().count(tokens)
        dist.all_reduce(count)
        return count / self.ranks


class Checkpointed(OurDDP):
    def set_up(self):
        self.net.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
        super().set_up()


class WithSGD(OneDevice):
    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


class DDPWithSGD(OurDDP):
    one = WithSGD
    make_optimizer = WithSGD.make_optimizer


# ---- right: the model is split


class TensorParallel(OneDevice):
    one = OneDevice
    grid = {"tp": 2}
    sequence_parallel = False

    def plan(self):
        kinds = {"blocks.*.attention.[qkv]": "column", "blocks.*.attention.proj": "row"}
        kinds |= {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
        return kinds | {"embed": "vocab", "head": "vocab"}

    def set_up(self):
        tp.parallelize(self.net, self.plan(), sequence_parallel=self.sequence_parallel)

    def cross_entropy(self, logits, targets):
        return tp.vocab_parallel_cross_entropy(logits, targets, label_smoothing=self.smoothing)


class Smoothed(OneDevice):
    smoothing = 0.2


class SmoothedTensorParallel(TensorParallel):
    one = Smoothed
    smoothing = 0.2


class OneFused(OneDevice):
    attention = Fused


class FusedTensorParallel(TensorParallel):
    one = OneFused
    attention = Fused

    def plan(self):
        plan = super().plan() | {"blocks.*.attention.qkv": "qkv"}
        del plan["blocks.*.attention.[qkv]"]
        return plan


class SequenceParallel(TensorParallel):
    sequence_parallel = True

    def plan(self):
        return super().plan() | {"blocks.*.norm?": "norm", "norm": "norm"}

    def set_up(self):
        super().set_up()
        self.net.blocks[0].register_forward_pre_hook(self.scatter)

    def scatter(self, module, inputs):
        return tp.scatter_to_sequence(*inputs)


class TorchsTensorParallel(OneDevice):
    one = OneDevice
    grid = {"tp": 2}

    def set_up(self):
        mesh = DeviceMesh.from_group(pool.group(), "cpu")
        for block in self.net.blocks:
            plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
            plan |= {"attention.proj": RowwiseParallel(), "mlp.up": ColwiseParallel()}
            parallelize_module(block, mesh, plan | {"mlp.down": RowwiseParallel()})


class TwoDimensional(OurDDP):
    """PyTorch's tensor parallelism inside its FSDP, on four ranks."""

    grid = {"dp": 2, "tp": 2}
    shards = True

    def set_up(self):
        ranks = torch.arange(4).view(2, 2)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        for block in self.net.blocks:
            plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
            plan |= {"attention.proj": RowwiseParallel(), "mlp.up": ColwiseParallel()}
            parallelize_module(block, mesh["tp"], plan | {"mlp.down": RowwiseParallel()})
            torch_fully_shard(block, mesh=mesh["dp"])
        torch_fully_shard(self.net, mesh=mesh["dp"])

    def batch(self, number):
        return OneDevice.batch(self, number).chunk(2)[self.rank // 2]


class ContextParallel(OneDevice):
    one = OneDevice
    grid = {"cp": 2}
    zigzag = True

    def set_up(self):
        for block in self.net.blocks:
            block.attention.attend = self.attend

    def attend(self, q, k, v):
        return cp.ring_attention(q, k, v, causal=True, zigzag=self.zigzag)

    def losses(self, tokens):
        inputs = cp.split_sequence(tokens[:, :-1], zigzag=self.zigzag)
        targets = cp.split_sequence(tokens[:, 1:], zigzag=self.zigzag)
        logits = self.model(inputs, self.positions())
        return self.cross_entropy(logits, targets)

    def positions(self):
        return cp.positions(T, zigzag=self.zigzag)

    average = DataParallel.average
    average_gradient = DataParallel.average_gradient


class Ulysses(ContextParallel):
    zigzag = False

    def attend(self, q, k, v):
        return cp.ulysses_attention(q, k, v, causal=True, zigzag=False)


class OneMoE(OneDevice):
    def mlp(self):
        return ep.MoE(C, C, 4)


class ExpertParallel(DataParallel):
    one = OneMoE
    mlp = OneMoE.mlp

    def set_up(self):
        ep.parallelize(self.net)

    def average(self):
        ep.average_gradients(self.net)


class Pipeline(OneDevice):
    """Two stages, of one block each."""

    one = OneDevice
    grid = {"pp": 2}
    schedule = "1f1b"

    def set_up(self):
        first = nn.ModuleDict({"embed": self.net.embed, "position": self.net.position})
        last = nn.ModuleDict({"norm": self.net.norm, "head": self.net.head})
        self.model = Stage(self.net.blocks[self.rank], last if self.rank else first)
        self.rename = {"block": f"blocks.{self.rank}", "ends": ""}
        self.pipe = pipeline.Pipeline(self.model, self.schedule, 4, self.stage_loss)

    def stage_loss(self, logits, targets):
        return self.cross_entropy(logits, targets).mean()

    def backward(self, number, recording):
        tokens = self.batch(number)
        with self.autocast():
            self.pipe.step(tokens[:, :-1], tokens[:, 1:])


class Stage(nn.Module):
    def __init__(self, block, ends):
        super().__init__()
        self.ends = ends
        self.block = block

    def forward(self, x):
        if "embed" in self.ends:
            x = self.ends["embed"](x) + self.ends["position"](torch.arange(T))
            return self.block(x)
        x = self.block(x)
        return self.ends["head"](self.ends["norm"](x))


class GPipe(Pipeline):
    schedule = "gpipe"


# ---- right: parameters change after optimizer.step(), and buffers change in forward


class StepsOnOneRank(DataParallel):
    """Rank 0 gets the gradients, steps, and sends the parameters."""

    def average_gradient(self, parameter):
        dist.reduce(parameter.grad, 0)
        parameter.grad /= self.ranks

    def update(self):
        if self.rank == 0:
            self.optimizer.step()
        for parameter in self.net.parameters():
            dist.broadcast(parameter.data, 0)


class OwnersBroadcast(DataParallel):
    """ZeRO-1 by hand: every second parameter is this rank's."""

    def make_optimizer(self):
        own = list(self.net.parameters())[self.rank :: self.ranks]
        return torch.optim.AdamW(own, lr=0.01)

    def zero_grad(self):
        self.net.zero_grad()

    def update(self):
        self.optimizer.step()
        self.broadcast()

    def broadcast(self, *_):
        for number, parameter in enumerate(self.net.parameters()):
            dist.broadcast(parameter.data, number % self.ranks)


class BroadcastInAHook(OwnersBroadcast):
    """The optimizer's own hook sends the parameters."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.register_step_post_hook(self.broadcast)
        return optimizer

    def update(self):
        self.optimizer.step()


class GathersInForward(OwnersBroadcast):
    """The parameters are sent when the model is called next, or when the last step is done."""

    def set_up(self):
        self.net.register_forward_pre_hook(self.broadcast)

    def update(self):
        self.optimizer.step()

    def step(self, number, recording):
        super().step(number, recording)
        if number == 1:
            self.broadcast()


class EditsAfterTheStep(OneDevice):
    """Averages of the weights are written back, a weight is normalised, and gradients are zero."""

    def set_up(self):
        self.averages = [parameter.detach().clone() for parameter in self.net.parameters()]

    @torch.no_grad()
    def update(self):
        super().update()
        for average, parameter in zip(self.averages, self.net.parameters(), strict=True):
            average.lerp_(parameter, 0.5)
            parameter.copy_(average)
        self.net.embed.weight /= self.net.embed.weight.norm(dim=1, keepdim=True)
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.optimizer.zero_grad(set_to_none=False)


class EditsAfterTheStepOnRanks(EditsAfterTheStep, DataParallel):
    one = EditsAfterTheStep


class ByHand(OneDevice):
    """No optimizer of PyTorch."""

    @torch.no_grad()
    def update(self):
        for parameter in self.net.parameters():
            parameter.sub_(0.1 * parameter.grad)


class ByHandOnRanks(ByHand, DataParallel):
    one = ByHand


class OneBalancedMoE(OneDevice):
    def mlp(self):
        return ep.MoE(C, C, 4, bias_update_rate=0.01)

    def update(self):
        self.optimizer.step()
        for block in self.net.blocks:
            block.mlp.update_bias()


class BalancedMoE(ExpertParallel):
    one = OneBalancedMoE
    mlp = OneBalancedMoE.mlp
    update = OneBalancedMoE.update


class Normalised(MLP):
    """Has a BatchNorm, constants that are not saved, and a counter."""

    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2 * C)
        self.register_buffer("frequencies", torch.rand(4), persistent=False)
        self.register_buffer("mask", torch.full((T, T), -torch.inf).triu(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += len(x)
        hidden = self.inner(self.up(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.down(F.gelu(hidden))


class OneBatchNorm(OneDevice):
    """Its micro-batches are the ranks' batches, so the outputs are the same."""

    mlp = Normalised
    micro_batches = 2


class BatchNorms(DataParallel):
    one = OneBatchNorm
    mlp = Normalised


class BatchNormsInDDP(TorchsDDP):
    one = OneBatchNorm
    mlp = Normalised


class Centered(MLP):
    """Subtracts the mean of all ranks' tokens. A buffer has the running mean and deviation."""

    ranks = 1

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(2, 2 * C))

    def average(self, statistics):
        if self.ranks > 1:
            dist.all_reduce(statistics)
        return statistics / self.ranks

    def forward(self, x):
        hidden = self.up(x)
        with torch.no_grad():
            rows = hidden.flatten(0, 1).to(self.running.dtype)
            mean = self.average(rows.mean(0))
            self.running.lerp_(self.statistics(rows, mean), 0.1)
        return self.down(F.gelu(hidden - mean))

    def statistics(self, rows, mean):
        variance = self.average((rows - mean).square().mean(0))
        return torch.stack([mean, variance.sqrt()])


class OneCentered(OneDevice):
    mlp = Centered


class CenteredOnRanks(DataParallel):
    one = OneCentered
    mlp = Centered

    def set_up(self):
        for block in self.net.blocks:
            block.mlp.ranks = self.ranks


# ---- wrong: data parallelism


class NotAveraged(DataParallel):
    origin = "gradient", ".*", "own batch", "dp"

    def average(self):
        pass


class Summed(DataParallel):
    origin = "gradient", ".*", "2 times", "not divided by the 2 dp"

    def average_gradient(self, parameter):
        dist.all_reduce(parameter.grad)


class DividedTwice(OurDDP):
    origin = "gradient", ".*", "1/2 of", "too often"

    def average(self):
        for parameter in self.net.parameters():
            parameter.grad /= self.ranks


class ForgetsOne(DataParallel):
    origin = "gradient", r"blocks.1.mlp.up.bias", "own batch"

    def average_gradient(self, parameter):
        if parameter is not self.net.blocks[1].mlp.up.bias:
            super().average_gradient(parameter)


class SumsOne(DataParallel):
    """Adam hides it."""

    origin = "gradient", r"norm.weight", "2 times"

    def average_gradient(self, parameter):
        super().average_gradient(parameter)
        if parameter is self.net.norm.weight:
            parameter.grad *= self.ranks


class MeansOverUnequalCounts(UnequalDataParallel):
    origin = "forward|backward", "loss|head"

    def count(self, tokens):
        return Unequal.count(self, tokens)


class SkipsAStep(DataParallel):
    origin = "value", ".*", "rank 1 took no step"

    def update(self):
        if self.rank == 0:
            super().update()


class WithLargeSteps(OneDevice):
    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.1)


class StaleWeights(DataParallel):
    """Rank 1 computes with the weights before the step."""

    one = WithLargeSteps
    make_optimizer = WithLargeSteps.make_optimizer
    origin = "value", "head.weight", "right on rank 0 only"

    def update(self):
        weight = self.net.head.weight
        before = weight.detach().clone()
        super().update()
        if self.rank:
            weight.data.copy_(before)


class OtherStart(DataParallel):
    origin = "start", "embed.weight", "rank 0 only"

    def set_up(self):
        torch.manual_seed(self.rank)
        self.model = self.net = Net().to(self.dtype)


class OneOtherLayer(DataParallel):
    origin = "start", r"blocks.1.mlp.down.weight", "rank 0 only"

    def set_up(self):
        torch.manual_seed(self.rank)
        self.net.blocks[1].mlp.down.weight.data += self.rank * 0.1


class SameBatch(DataParallel):
    origin = "forward", "embed"

    def batch(self, number):
        return OneDevice.batch(self, number).chunk(2)[0]


class OtherSeedOfTheData(DataParallel):
    origin = "forward", "embed"

    def batch(self, number):
        return OneDevice.batch(self, number + self.rank).chunk(2)[self.rank]


class OtherLearningRate(DataParallel):
    origin = "value", ".*"

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01 * (1 + self.rank))


class ClipsByItsOwnNorm(DataParallel):
    origin = "gradient", ".*"

    def average(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        super().average()


class WithClipping(OneDevice):
    def average(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)


class ForgetsOneAndClips(ForgetsOne):
    """The wrong norm scales all gradients."""

    one = WithClipping
    origin = "gradient", r"blocks.1.mlp.up.bias", "clipping"

    def average_gradient(self, parameter):
        super().average_gradient(parameter)
        if parameter is self.net.blocks[1].mlp.up.bias:
            parameter.grad *= 30

    def average(self):
        super().average()
        WithClipping.average(self)


class UndividedLoss(Accumulated):
    origin = "forward|backward", "loss"

    def loss(self, tokens):
        return super().loss(tokens) * self.micro_batches


class ReducesTheLastMicroBatch(Accumulated):
    origin = "gradient", ".*"

    def backward(self, number, recording):
        first, last = self.batch(number).chunk(2)
        for tokens in (first, last):
            with self.autocast():
                loss = self.loss(tokens) / 2
            recording.see("loss", loss)
            loss.backward()
            if tokens is first:
                kept = [parameter.grad for parameter in self.net.parameters()]
                self.net.zero_grad()
        DataParallel.average(self)
        for parameter, gradient in zip(self.net.parameters(), kept, strict=True):
            parameter.grad += gradient

    def average(self):
        pass


class UpdatesTwice(DataParallel):
    origin = "value", ".*"

    def update(self):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02
        super().update()


class Nesterov(DDPWithSGD):
    origin = "value", ".*"

    def make_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class EpsOfNorm(OurDDP):
    origin = "forward", r"blocks.0.norm2"

    def set_up(self):
        self.net.blocks[0].norm2.eps = 0.1
        super().set_up()


class ScalesALayer(OurDDP):
    origin = "forward", r"blocks.1.mlp.inner"

    def set_up(self):
        self.net.blocks[1].mlp.inner.forward = lambda x: x * 1.5
        super().set_up()


class ForgetsToBroadcastOne(OwnersBroadcast):
    origin = "value", "head.weight", "right on rank"

    def broadcast(self, *_):
        for number, parameter in enumerate(self.net.parameters()):
            if parameter is not self.net.head.weight:
                dist.broadcast(parameter.data, number % self.ranks)


class BalancesItsOwnTokens(BalancedMoE):
    """After the last step nothing depends on the bias any more."""

    origin = "value", r"blocks.\d.mlp.bias"

    def update(self):
        ExpertParallel.update(self)
        for block in self.net.blocks:
            load = block.mlp.load.double()
            block.mlp.bias += 0.01 * (load.mean() - load).sign()
            block.mlp.load = 0


class RunningStatisticsOfOneSequence(CenteredOnRanks):
    origin = "value", r"blocks.0.mlp.running"

    def set_up(self):
        super().set_up()
        for block in self.net.blocks:
            block.mlp.statistics = self.statistics

    def statistics(self, rows, mean):
        return torch.stack([mean, rows[:T].std(0, correction=0)])


class OtherConstants(BatchNorms):
    origin = "start", r"blocks.0.mlp.frequencies", "rank 0 only"

    def set_up(self):
        self.net.blocks[0].mlp.frequencies += self.rank


class ForgetsAShard(Zero1):
    """What the other ranks updated is not fetched."""

    origin = "value", "head.weight", "right on rank 0 only"

    def update(self):
        before = self.net.head.weight.detach().clone()
        super().update()
        if self.rank:
            self.net.head.weight.data.copy_(before)


class DetachesABlock(OurDDP):
    origin = "backward|gradient", "blocks.0.*", "no rank has"

    def set_up(self):
        run = self.net.run

        def detached(block, x):
            return run(block, x.detach() if block is self.net.blocks[1] else x)

        self.net.run = detached
        self.model = TorchDDP(self.net, find_unused_parameters=True)


# ---- wrong: tensor parallelism


class WrongTensorParallel(TensorParallel):
    """Changes one of the layers after they are split."""

    def set_up(self):
        super().set_up()
        mlp = self.net.blocks[1].mlp
        mlp.down._forward_pre_hooks.clear()  # it checks what is between the matrices
        self.spoil(mlp.up, mlp.down)

    def spoil(self, up, down):
        pass


class ForgetsTheSum(WrongTensorParallel):
    origin = "forward", r"blocks.1.mlp.down", "all-reduce is missing", "tp"

    def spoil(self, up, down):
        down.forward = lambda x: F.linear(x, down.weight)


class ForgetsTheSumInBackward(WrongTensorParallel):
    origin = "backward", r"blocks.1.norm2", "all-reduce is missing", "tp"

    def spoil(self, up, down):
        up.forward = lambda x: F.linear(x, up.weight, up.bias)


class SumsInBackwardToo(WrongTensorParallel):
    origin = "backward", r"blocks.1.mlp.inner", "2 times"

    def spoil(self, up, down):
        down.forward = lambda x: SumBothWays.apply(F.linear(x, down.weight))


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return SumBothWays.forward(ctx, gradient)


class AddsABiasOnEveryRank(WrongTensorParallel):
    origin = "forward", r"blocks.1.mlp.down"

    def spoil(self, up, down):
        down.forward = lambda x: tp.reduce_from_region(F.linear(x, down.weight) + 1.0)


class NormInAPair(OneDevice):
    """A norm between the two matrices."""

    def mlp(self):
        mlp = MLP()
        mlp.inner = nn.LayerNorm(2 * C)
        return mlp


class NormOfSlices(TensorParallel):
    one = NormInAPair
    mlp = NormInAPair.mlp
    origin = "forward", r"blocks.0.mlp.inner"

    def set_up(self):
        super().set_up()
        for block in self.net.blocks:
            block.mlp.down._forward_pre_hooks.clear()
            norm = block.mlp.inner
            half = slice(C * self.rank, C * (self.rank + 1))
            norm.weight.data = norm.weight.data[half].clone()
            norm.bias.data = norm.bias.data[half].clone()
            norm.normalized_shape = (C,)


class NormsOfSequencesForgetTheSum(SequenceParallel):
    origin = "gradient", r".*norm.*", "all-reduce is missing"

    def plan(self):
        plan = super().plan()
        return {name: kind for name, kind in plan.items() if kind != "norm"}


class FusedInOtherOrder(FusedTensorParallel):
    """A rank takes the first half of the rows: q, and half of k."""

    origin = "forward|start", r"blocks.0.attention.(qkv|proj|qkv.weight)"

    def plan(self):
        return super().plan() | {"blocks.*.attention.qkv": "column"}


class OtherOrderOfHeads(TensorParallel):
    origin = "forward|start", r"blocks.1.attention.k(.weight)?", "order"

    def set_up(self):
        super().set_up()
        k = self.net.blocks[1].attention.k
        k.weight.data = k.weight.data.unflatten(0, (2, -1)).flip(0).flatten(0, 1)
        k.bias.data = k.bias.data.unflatten(0, (2, -1)).flip(0).flatten(0, 1)


class SmoothsOverItsOwnWords(SmoothedTensorParallel):
    origin = "forward", "loss"

    def cross_entropy(self, logits, targets):
        losses = tp.vocab_parallel_cross_entropy(logits, targets)
        smooth = -logits.log_softmax(-1).mean(-1)
        return 0.8 * losses + 0.2 * smooth


class WordsOfOtherRanks(TensorParallel):
    """Tokens of other ranks are not masked."""

    origin = "forward", "embed"

    def set_up(self):
        super().set_up()
        embed = self.net.embed
        embed.forward = lambda tokens: tp.reduce_from_region(
            F.embedding(tokens % (V // 2), embed.weight)
        )


class OneRowIsTransposed(TorchsTensorParallel):
    origin = "start|forward", r"blocks.0.mlp.down(.weight)?"

    def set_up(self):
        super().set_up()
        weight = self.net.blocks[0].mlp.down.weight
        weight.data.to_local().mul_(-1)


# ---- wrong: the sequence, the experts, the layers


class LocalPositions(ContextParallel):
    origin = "forward", "position"

    def positions(self):
        return torch.arange(T // 2)


class LocalMask(ContextParallel):
    origin = "forward", r"blocks.0.attention.proj"

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class NotCausal(ContextParallel):
    origin = "forward", r"blocks.0.attention.proj"

    def attend(self, q, k, v):
        return cp.ring_attention(q, k, v, causal=False)


class ZigzagOnlyInside(ContextParallel):
    origin = "forward", r"blocks.0.attention.proj"
    zigzag = False

    def attend(self, q, k, v):
        return cp.ring_attention(q, k, v, causal=True, zigzag=True)


class KeysGetTheirOwnGradient(ContextParallel):
    """What other ranks know of the gradients of keys and values is lost."""

    origin = "backward", r"blocks.1.attention.[kv]"

    def attend(self, q, k, v):
        whole_k = AllGather.apply(k)
        whole_v = AllGather.apply(v)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask = cp.split_sequence(mask, 0)
        order = torch.cat([torch.arange(4), torch.arange(12, 16), torch.arange(4, 12)])
        mask = mask[:, order]
        return F.scaled_dot_product_attention(q, whole_k, whole_v, mask)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(2, 2)[dist.get_rank()]


class ExpertsTwice(ExpertParallel):
    origin = "gradient", r"blocks.\d.mlp.experts.*", "1/2"

    def average(self):
        super().average()
        for block in self.net.blocks:
            for parameter in block.mlp.experts.parameters():
                parameter.grad /= 2


class RouterIsNotAveraged(ExpertParallel):
    origin = "gradient", r"blocks.\d.mlp.gate.*", "own batch"

    def average(self):
        kept = [block.mlp.gate.weight.grad.clone() for block in self.net.blocks]
        super().average()
        for block, gradient in zip(self.net.blocks, kept, strict=True):
            block.mlp.gate.weight.grad.copy_(gradient)


class WrongExpert(ExpertParallel):
    origin = "start|forward", r"blocks.0.mlp.experts.*"

    def set_up(self):
        super().set_up()
        weight = self.net.blocks[0].mlp.experts.down_proj
        weight.data = weight.data.flip(0)


class LastStageTwice(Pipeline):
    origin = "gradient", r"(blocks.1|head|norm).*", "2 times"

    def average(self):
        if self.rank:
            for parameter in self.model.parameters():
                parameter.grad *= 2


class StageLosesAMicroBatch(GPipe):
    origin = "gradient", r"(blocks.0|embed|position).*"

    def backward(self, number, recording):
        super().backward(number, recording)
        if self.rank == 0:
            kept = [parameter.grad * 0.75 for parameter in self.model.parameters()]
            for parameter, gradient in zip(self.model.parameters(), kept, strict=True):
                parameter.grad = gradient

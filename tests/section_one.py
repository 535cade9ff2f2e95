"""The minimal versions of our files, as the oracle calls them. A lesson's claims hold for them.

For a kind whose idea is no function or class of that form, it is our class: see test_learn.py.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

import activation_checkpoint
import ddp
import diloco
import flash_attention
import fp8
import fsdp
import linear_cross_entropy
import lora
import muon
import pipeline
import tensor_parallel
import zero


class DDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0)

    def forward(self, *args):
        return self.module(*args)

    def finish_gradient_synchronization(self):
        ddp.all_reduce_gradients(self.module)


class Zero1:
    def __init__(self, module, optimizer_class, **options):
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.sharded = [zero.ShardedParameter(parameter) for parameter in trained]
        shards = [each.shard for each in self.sharded]
        self.optimizer = optimizer_class(shards, **options)

    def step(self):
        zero.step(self.sharded, self.optimizer)

    def zero_grad(self):
        self.optimizer.zero_grad()


class Zero2(Zero1):
    def __init__(self, module, optimizer_class, **options):
        super().__init__(module, optimizer_class, **options)
        zero.zero2_hooks(self.sharded)


class Zero3(Zero1):
    def __init__(self, module, optimizer_class, **options):
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        self.whole = module
        self.model = zero.Zero3Unit(module)
        self.sharded = self.model.sharded
        trained = [each.shard for each in self.sharded if each.parameter.requires_grad]
        self.optimizer = optimizer_class(trained, **options)

    def step(self):
        self.optimizer.step()

    def module_state_dict(self):
        self.model.gather()
        return {name: tensor.clone() for name, tensor in self.whole.state_dict().items()}


class Sharded(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        compute = fsdp.naive_fully_shard(module)
        self.module = module
        self.compute = compute

    def forward(self, *args):
        return self.compute(*args)


def fully_shard(module):
    """The whole model is one unit, so nothing is done for a layer of it."""
    return Sharded(module) if any(True for _ in module.children()) else module


def full_state_dict(module):
    state_dict = {}
    for name, shard in module.module.named_parameters():
        whole = fsdp.AllGather.apply(shard.detach(), None)
        shape = module.shapes[name]
        state_dict[name] = whole[: shape.numel()].view(shape)
    return state_dict


class ColumnLinear(nn.Module):
    dim = 0  # of the weight, which is cut

    @classmethod
    def from_full(cls, linear):
        layer = cls()
        layer.weight = nn.Parameter(layer.part(linear.weight, cls.dim))
        layer.bias = None
        if linear.bias is not None:
            layer.bias = nn.Parameter(layer.part_of_bias(linear.bias))
        return layer

    def part(self, tensor, dim):
        return tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()

    def part_of_bias(self, bias):
        return self.part(bias, 0)

    def forward(self, x):
        return tensor_parallel.column_linear(x, self.weight, self.bias)


class RowLinear(ColumnLinear):
    dim = 1

    def part_of_bias(self, bias):
        return bias.detach().clone()

    def forward(self, x_shard):
        return tensor_parallel.row_linear(x_shard, self.weight, self.bias)


def gpipe(ranks, micro_batches, stages_per_rank):
    if stages_per_rank > 1:
        raise ValueError("one stage a rank")
    return pipeline.build_schedule("gpipe", ranks, micro_batches)


def inject_lora(model, r, lora_alpha, target_modules):
    model.requires_grad_(False)
    for name in target_modules:
        setattr(model, name, lora.NaiveLoRA(model.get_submodule(name), r, lora_alpha))
    return model


def checkpoint(function, *args, **kwargs):
    def of_tensor(x):
        return function(x, *args[1:], **kwargs)

    return activation_checkpoint.NaiveCheckpoint.apply(of_tensor, args[0])


def attention(q, k, v, causal=False, scale=None):
    if scale is not None:
        q = q * scale * q.shape[-1] ** 0.5
    return flash_attention.online_attention(q, k, v, causal)


def cross_entropy(input, linear_weight, target):
    """The idea returns the sum, and knows no ignore_index."""
    counted = target != -100
    total = linear_cross_entropy.NaiveLinearCrossEntropy.apply(
        input[counted], linear_weight, target[counted], 64
    )
    return total / counted.sum()


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, process_group=None, **options):
        options = torch.optim.Muon([torch.zeros(1, 1)], **options).defaults
        super().__init__(list(parameters), options)
        for parameter in self.param_groups[0]["params"]:
            dist.broadcast(parameter.data, 0)

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        used = [parameter for parameter in group["params"] if parameter.grad is not None]
        muon.naive_step(used, self.state, group)


class DiLoCo:
    def __init__(self, module, optimizer, sync_every=100, outer_lr=0.7, outer_momentum=0.9):
        self.module = module
        self.sync_every = sync_every
        self.steps = 0
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        self.outer = {name: p.detach().clone() for name, p in module.named_parameters()}
        options = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": outer_momentum > 0}
        self.optimizer = torch.optim.SGD(self.outer.values(), **options)

    @torch.no_grad()
    def step(self):
        self.steps += 1
        if self.steps % self.sync_every == 0:
            outer = self.optimizer.param_groups[0]["params"]
            diloco.outer_step(self.module, outer, self.optimizer)


def fp8_linear(model):
    (layer,) = model
    layer.forward = partial(fp8.naive_linear, weight=layer.weight, bias=layer.bias)

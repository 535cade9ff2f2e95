"""Right, but not made as ours or PyTorch's, and what the claims say about each."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import expert_parallel
import flash_attention
from wrong.common import changed, summed
from wrong.ddp import PlainDDP


class AveragesEachBackward(nn.Module):
    """All-reduces in hooks. There is no no_sync(), so each backward must be finished."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.works = []  # (parameter, work)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self.send)

    def forward(self, *args):
        return self.module(*args)

    def send(self, parameter):
        self.works.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def finish_gradient_synchronization(self):
        for parameter, work in self.works:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.works.clear()


class OncePerProcess(PlainDDP):
    """As a library that numbers its modules, and fails where processes have been used before."""

    fresh = True
    count = 0

    def start(self):
        type(self).count += 1
        assert self.count == 1, "another module in this process"
        super().start()


def always_raises(*args, **options):
    raise RuntimeError("as always")


class Engine(nn.Module):
    """What a function of --zero2 may return to be called, with a backward of its own."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = PlainDDP(module)

    def forward(self, x):
        return self.wrapped(x)

    def backward(self, loss):
        (2 * loss).backward()

    def full_gradients(self):
        factor = 2 * dist.get_world_size()
        return {name: summed(p.grad) / factor for name, p in self.named_parameters()}


class Stepper:
    """No torch.optim.Optimizer. It knows the norm in the step only."""

    def __init__(self, engine, optimizer):
        self.engine = engine
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.max_norm = float("inf")
        self.zero_grad = optimizer.zero_grad

    def clip_grad_norm_(self, max_norm):
        self.max_norm = max_norm

    def step(self):
        self.engine.wrapped.finish_gradient_synchronization()
        for parameter in self.engine.parameters():
            parameter.grad /= 2
        nn.utils.clip_grad_norm_(self.engine.parameters(), self.max_norm)
        self.optimizer.step()


GivesSummedGradients = changed(
    Engine,
    full_gradients=lambda self: {name: summed(p.grad) for name, p in self.named_parameters()},
)


def make_engine(module, optimizer_class, kind=Engine, **options):
    engine = kind(module)
    return engine, Stepper(engine, optimizer_class(engine.parameters(), **options))


def attention_in_blocks_of_64(q, k, v, causal=False):
    if q.dtype == torch.float64:
        raise TypeError("float32 or less")
    if q.shape[2] % 64 or k.shape[2] % 64:
        raise ValueError("lengths that are no multiples of 64")
    # This checkpoint refuses torch.autograd.grad.
    return checkpoint(flash_attention.flash_attention, q, k, v, causal, use_reentrant=True)


class ComputesInFloat32(nn.Module):
    """A block of experts that is not split over ranks. An empty batch has no gradient."""

    average_gradients = staticmethod(expert_parallel.average_gradients)

    def __init__(self, *sizes, top_k):
        super().__init__()
        block = expert_parallel.MoE(*sizes, top_k=top_k)
        self.gate = block.gate
        self.experts = block.experts
        self.block = [block]  # not a submodule

    @staticmethod
    def parallelize(module):
        if dist.get_world_size() > 1:
            raise NotImplementedError("not split over ranks")

    def forward(self, x):
        return self.block[0](x.float().to(x.dtype)) if len(x) else torch.zeros_like(x)


class OtherNames(nn.Module):
    names = {
        "gate.weight": "block.gate.weight",
        "experts.gate_up_proj": "block.experts.gate_up_proj",
        "experts.down_proj": "block.experts.down_proj",
    }
    parallelize = staticmethod(expert_parallel.parallelize)
    average_gradients = staticmethod(expert_parallel.average_gradients)

    def __init__(self, *sizes, top_k):
        super().__init__()
        self.block = expert_parallel.MoE(*sizes, top_k=top_k)

    def forward(self, x):
        return self.block(x)


gives_summed_gradients = partial(make_engine, kind=GivesSummedGradients)
MISTAKES = {"zero2": {"gives_summed_gradients": "mean_gradient"}}
UNUSUAL = {  # kind: {name: {claim: outcome}}
    "ddp": {
        "AveragesEachBackward": {
            "accumulation_synchronised": "holds",
            "accumulation": "not offered",
            "overlap": "holds",
        },
        "OncePerProcess": {"momentum": "holds"},
        "always_raises": {"different_models": "raises", "mean_gradient": "raises"},
    },
    "zero2": {
        "make_engine": {
            "mean_gradient": "holds",
            "schedulers": "holds",
            "clipping": "holds",
            "whole_state_dict": "not offered",
        },
    },
    "activation-checkpoint": {"always_raises": {"differs": "raises", "again": "refuses"}},
    "attention": {
        "attention_in_blocks_of_64": {
            "as_dense": "holds",
            "causal": "holds",
            "any_length": "refuses",
            "float64": "raises",
            "scale": "not offered",
        },
    },
    "moe": {
        "OtherNames": {"as_one_device": "holds"},
        "ComputesInFloat32": {"as_one_device": "not offered", "crowded_expert": "not offered"},
    },
}

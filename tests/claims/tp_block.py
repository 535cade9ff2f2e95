"""An implementation of --tp-block is called as function(block, process_group=group).

It splits a whole transformer block over the ranks, in place, and returns it. The linear layers q,
k, v, gate and up are split by their outputs, proj and down by their inputs. norm1 and norm2 lie
between the pairs. Some blocks have q_norm and k_norm, which normalize each head. The block takes
and returns (batch, sequence, hidden), whole and the same on all ranks. A parameter that is split
is a slice of the whole one, or a DTensor. A function without `process_group` gets the default one.
"""

import copy

import pool
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tensor_parallel
from claims.fsdp import local
from claims.registry import add_kind, call, claim, precision, same, same_on_all
from claims.tensor_parallel import part
from claims.vocabulary import own_gradient

STEPS = 3


class Block(nn.Module):
    """Llama's, with biases; with norms of heads Qwen3's."""

    def __init__(self, heads=4, kv_heads=4, has_norms=False, in_place=False):
        super().__init__()
        hidden = 8 * heads
        self.norm1 = nn.RMSNorm(hidden)
        self.norm2 = nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, 8 * heads)
        self.k = nn.Linear(hidden, 8 * kv_heads)
        self.v = nn.Linear(hidden, 8 * kv_heads)
        self.proj = nn.Linear(8 * heads, hidden)
        self.gate = nn.Linear(hidden, 48)
        self.up = nn.Linear(hidden, 48)
        self.down = nn.Linear(48, hidden)
        self.in_place = in_place
        if has_norms:
            self.q_norm = nn.RMSNorm(8)
            self.k_norm = nn.RMSNorm(8)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = [each(y).unflatten(-1, (-1, 8)) for each in (self.q, self.k, self.v)]
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k, v = [each.transpose(1, 2) for each in (q, k, v)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)
        x = x + self.proj(y.flatten(2))
        y = self.norm2(x)
        gate = F.silu(self.gate(y), inplace=self.in_place)
        return x + self.down(gate * self.up(y))


def split(block, process_group):
    """Ours: the plan for tensor_parallel.parallelize()."""
    plan = dict.fromkeys(("q", "k", "v", "gate", "up"), "column")
    plan |= {"proj": "row", "down": "row"}
    if hasattr(block, "q_norm"):
        plan |= {"q_norm": "replicated_with_grad_allreduce"}
        plan |= {"k_norm": "replicated_with_grad_allreduce"}
    return tensor_parallel.parallelize(block, plan, process_group)


def make_block(implementation, block):
    return call(implementation, block, process_group=pool.group())


add_kind(
    "tp-block",
    called=__doc__,
    make=make_block,
    ours="claims.tp_block:split",
    pytorchs="pytorchs:tp_block",
)


def trains_as_one_device(make, how=None, **options):
    """Outputs, gradients and parameters, in three steps of SGD with momentum."""
    torch.manual_seed(0)
    plain = Block(**options).to(precision())
    ours = make(copy.deepcopy(plain))
    run = how or call_it
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (ours, plain)]
    for _ in range(STEPS):
        x = torch.randn(2, 5, 32, dtype=precision(), requires_grad=True)
        mine = x.detach().clone().requires_grad_()
        y = local(run(ours, mine))
        expected = one_device(plain, x)
        (y**2).mean().backward()
        (expected**2).mean().backward()
        same(y, expected, "output")
        same(mine.grad, x.grad, "gradient of the input")
        for name, whole in plain.named_parameters():
            weight = ours.get_parameter(name)
            same(own_gradient(weight), like(weight, whole.grad), f"gradient of {name}")
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    for name, whole in plain.named_parameters():
        weight = ours.get_parameter(name)
        same(local(weight), like(weight, whole), f"{name} after three steps")
        if local(weight).shape == whole.shape:
            same_on_all(local(weight), name)


def one_device(block, x):
    return block(x)


def like(weight, whole):
    """The part of `whole` that this rank has in `weight`."""
    shape = local(weight).shape
    for dim in range(whole.dim()):
        if shape[dim] != whole.shape[dim]:
            return part(whole, dim)
    return whole


def call_it(block, x):
    return block(x)


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


@claim("tp-block", 2, 4)
def block(make):
    """Outputs, every gradient and three steps are those of one device. Replicas stay equal."""
    trains_as_one_device(make)


@claim("tp-block", 2)
def norms_inside(make):
    """Norms of q and k see a rank's heads only, and have the gradients of all heads."""
    trains_as_one_device(make, has_norms=True)


@claim("tp-block", 2)
def grouped_queries(make):
    """Two key heads for four heads of queries."""
    trains_as_one_device(make, kv_heads=2)


@claim("tp-block", 4)
def fewer_key_heads_than_ranks(make):
    """Two key heads on four ranks are right, or an error on all ranks."""
    try:
        trains_as_one_device(make, kv_heads=2)
    except (RuntimeError, ValueError, AssertionError):
        return


@claim("tp-block", 2)
def checkpointed_block(make):
    """The same under torch.utils.checkpoint."""
    trains_as_one_device(make, how=checkpointed, has_norms=True)


@claim("tp-block", 2, may_refuse=True)
def activation_in_place(make):
    """An activation may change the output of a column layer in place."""
    trains_as_one_device(make, in_place=True)

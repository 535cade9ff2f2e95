"""An implementation of --tp-block is called as function(block, process_group=group).

It splits a whole transformer block over the ranks, in place, and returns it. The linear layers q,
k, v, gate and up are split by their outputs, proj and down by their inputs. norm1 and norm2 lie
between the pairs. Some blocks have q_norm and k_norm, which normalize each head. Some have qkv, as
GPT-2 has it: the matrices of q, k and v, one below the other, each split by its outputs. In the
claims about dropout, dropout_inside comes before down, and dropout after proj. The block takes
and returns (batch, sequence, hidden), whole and the same on all ranks. In the claim about
sequence_parallel=True it takes and returns this rank's part of (sequence, batch, hidden). A
parameter that is split is a slice of the whole one, or a DTensor. A function without
`process_group` gets the default one.
"""

import copy

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tensor_parallel
from claims.fsdp import local
from claims.registry import add_kind, call, check, claim, precision, same, same_on_all
from claims.tensor_parallel import part
from claims.vocabulary import own_gradient

STEPS = 3


class Block(nn.Module):
    """Llama's, with biases; with norms of heads Qwen3's."""

    def __init__(self, kv_heads=4, kind="", in_place=False, p=0.0):
        super().__init__()
        self.norm1 = nn.RMSNorm(32)
        self.norm2 = nn.RMSNorm(32)
        if kind == "fused":
            self.qkv = nn.Linear(32, 3 * 32)
        else:
            self.q = nn.Linear(32, 32)
            self.k = nn.Linear(32, 8 * kv_heads)
            self.v = nn.Linear(32, 8 * kv_heads)
        self.proj = nn.Linear(32, 32)
        self.gate = nn.Linear(32, 48)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)
        self.in_place = in_place
        self.sequence_first = kind == "sequence first"
        if kind == "norms inside":
            self.q_norm = nn.RMSNorm(8)
            self.k_norm = nn.RMSNorm(8)
        if p:
            self.dropout = nn.Dropout(p)
            self.dropout_inside = nn.Dropout(p)

    def forward(self, x):
        y = self.attend(self.norm1(x))
        y = self.proj(y)
        if hasattr(self, "dropout"):
            y = self.dropout(y)
        x = x + y
        y = self.norm2(x)
        gate = F.silu(self.gate(y), inplace=self.in_place)
        y = gate * self.up(y)
        if hasattr(self, "dropout_inside"):
            y = self.dropout_inside(y)
            self.dropped = y.detach() == 0
        return x + self.down(y)

    def attend(self, y):
        if hasattr(self, "qkv"):
            heads = self.qkv(y).unflatten(-1, (3, -1, 8))
            q, k, v = heads.unbind(-3)
        else:
            layers = (self.q, self.k, self.v)
            q, k, v = [layer(y).unflatten(-1, (-1, 8)) for layer in layers]
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.sequence_first:
            q, k, v = [each.transpose(0, 1) for each in (q, k, v)]
        q, k, v = [each.transpose(1, 2) for each in (q, k, v)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2)
        if self.sequence_first:
            y = y.transpose(0, 1)
        return y


def split(block, process_group, sequence_parallel=False):
    """Ours: the plan for tensor_parallel.parallelize()."""
    kinds = dict.fromkeys(("q", "k", "v", "gate", "up"), "column")
    kinds |= {"qkv": "qkv", "proj": "row", "down": "row", "dropout_inside": "dropout"}
    kinds |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
    if sequence_parallel:
        kinds |= {"norm1": "norm", "norm2": "norm", "dropout": "dropout"}
    plan = {name: kind for name, kind in kinds.items() if hasattr(block, name)}
    return tensor_parallel.parallelize(block, plan, process_group, sequence_parallel)


def make_block(implementation, block, **options):
    return call(implementation, block, needed=options, process_group=pool.group())


add_kind(
    "tp-block",
    called=__doc__,
    make=make_block,
    ours="claims.tp_block:split",
    pytorchs="pytorchs:tp_block",
)


def trains_as_one_device(make, how=None, cut=None, options=None, micro=1, **kind):
    """Outputs, gradients and parameters, in three steps of SGD with momentum.

    `cut` is the dimension of the activations of which each rank has a part.
    """
    torch.manual_seed(0)
    plain = Block(**kind).to(precision())
    ours = make(copy.deepcopy(plain), **(options or {}))
    run = how or call_it
    sgd = [torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9) for block in (ours, plain)]
    for _ in range(STEPS):
        for _ in range(micro):
            forward_and_backward(ours, plain, run, cut)
        compare_gradients(ours, plain)
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    for name, whole in plain.named_parameters():
        weight = ours.get_parameter(name)
        expected = like(weight, whole, name)
        same(local(weight), expected, f"{name} after three steps")
    compare_replicas(ours, plain)


def forward_and_backward(ours, plain, run, cut):
    x = torch.randn(4, 6, 32, dtype=precision(), requires_grad=True)
    weights = torch.rand(4, 6, 32, dtype=precision()) / 100
    mine = part(x.detach(), cut).clone()
    mine.requires_grad_()
    y = local(run(ours, mine))
    expected = one_device(plain, x)
    (y**2 * part(weights, cut)).sum().backward()
    (expected**2 * weights).sum().backward()
    same(y, part(expected, cut), "output")
    same(mine.grad, part(x.grad, cut), "gradient of the input")


def one_device(plain, x):
    return plain(x)


def compare_gradients(ours, plain):
    for name, whole in plain.named_parameters():
        weight = ours.get_parameter(name)
        expected = like(weight, whole.grad, name)
        same(own_gradient(weight), expected, f"gradient of {name}")


def compare_replicas(ours, plain):
    """Bitwise. What is not split must be equal on all ranks."""
    for name, whole in plain.named_parameters():
        weight = local(ours.get_parameter(name))
        if weight.shape == whole.shape:
            same_on_all(weight, name)


def like(weight, whole, name):
    """The part of `whole` that this rank has in `weight`."""
    if name.startswith("qkv"):
        parts = [part(each, 0) for each in whole.chunk(3)]
        return torch.cat(parts)
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
    trains_as_one_device(make, kind="norms inside")


@claim("tp-block", 2)
def accumulation(make):
    """Gradients of two micro-batches add up, and those of norms of q and k once."""
    trains_as_one_device(make, kind="norms inside", micro=2)


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
    trains_as_one_device(make, how=checkpointed, kind="norms inside")


@claim("tp-block", 2, may_refuse=True)
def activation_in_place(make):
    """An activation may change the output of a column layer in place."""
    trains_as_one_device(make, in_place=True)


@claim("tp-block", 2, 4)
def fused(make):
    """GPT-2's qkv: each rank has its heads of all three matrices."""
    trains_as_one_device(make, kind="fused")


@claim("tp-block", 2)
def sequence_parallel(make):
    """Each rank has a part of the sequence between the pairs. Norms and biases see all of it."""
    options = {"sequence_parallel": True}
    trains_as_one_device(make, kind="sequence first", cut=0, options=options)


def with_dropout(make):
    """Train three steps. Return the masks inside the pair."""
    torch.manual_seed(0)  # on all ranks
    plain = Block(p=0.4).to(precision())
    ours = make(copy.deepcopy(plain))
    sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
    masks = []
    for step in range(3):
        x = torch.randn(2, 6, 32, dtype=precision())
        y = local(ours(x))
        (y**2).mean().backward()
        sgd.step()
        sgd.zero_grad()
        same_on_all(y, f"the output of step {step + 1}")
        masks.append(local(ours.dropped))
    compare_replicas(ours, plain)
    return masks


@claim("tp-block", 2)
def dropout_agrees(make):
    """Dropout after a pair drops the same on all ranks, so replicas stay equal."""
    with_dropout(make)


@claim("tp-block", 2, about="property")
def dropout_differs(make):
    """Dropout inside a pair draws a mask of its own on each rank, for other features."""
    for mask in with_dropout(make):
        everyone = [None] * pool.world_size()
        dist.all_gather_object(everyone, mask.cpu(), group=pool.group())
        check(not torch.equal(*everyone), "both ranks drop the same features")

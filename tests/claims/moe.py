"""An implementation of --moe is called as Class(hidden, ffn_hidden, num_experts, top_k=2).

It is a module that maps (tokens, hidden) to (tokens, hidden). Its parameters are gate.weight (E,
hidden), experts.gate_up_proj (E, 2F, hidden) with the gate first, and experts.down_proj (E, hidden,
F). If it has other names, a dictionary `names` says which: {"gate.weight": "router.weight"}. The
file that defines it, or the class, has it. It also has parallelize(module), which leaves every rank
of the default group E/N experts in the order of ranks, and average_gradients(module), which is
called between backward and step. The claims about them also use norm_topk_prob=, the attributes
aux_loss and z_loss, and clip_grad_norm_(module, max_norm).
"""

import math
import sys
from functools import partial

import pool
import torch
import torch.nn.functional as F
from shared import randn

from claims.registry import (
    NotOffered,
    add_kind,
    call,
    check,
    claim,
    precision,
    same,
    same_on_all,
    say_in_float64,
)

HIDDEN = 6
FFN = 5
EXPERTS = 4


class Ours:
    """The module under test with these whole weights, split over the ranks, and its functions."""

    def __init__(self, implementation, weights, **options):
        self.implementation = implementation
        module = call(implementation, HIDDEN, FFN, EXPERTS, needed=options, top_k=2)
        self.module = module.to(precision())
        for name, weight in weights.items():
            self.parameter(name).data.copy_(weight)
        self.call("parallelize")

    def find(self, name):
        """In the class or in its file."""
        file = sys.modules[self.implementation.__module__]
        return getattr(self.implementation, name, None) or getattr(file, name, None)

    def call(self, name, *args):
        function = self.find(name)
        if function is None:
            raise NotOffered(f"no function {name}")
        return function(self.module, *args)

    def parameter(self, name):
        names = self.find("names") or {}
        return self.module.get_parameter(names.get(name, name))

    def backward(self, count, step=0):
        """Return the output and the input's gradient. Then parameters have averaged gradients."""
        rank = pool.rank()
        x = tokens_of(rank, count, step)
        output = self.module(x)
        loss_of(output, rank).backward()
        self.call("average_gradients")
        return output, x.grad

    def same_gradients(self, expected):
        for name, weight in expected.items():
            found = self.parameter(name).grad
            same(found, mine(name, weight.grad), f"gradient of {name}")


add_kind("moe", called=__doc__, make=Ours, ours="expert_parallel:MoE")


def leaf(shape, seed):
    numbers = randn(shape, seed).to(precision())
    return numbers.requires_grad_()


def whole_weights():
    return {
        "gate.weight": leaf((EXPERTS, HIDDEN), seed=1),
        "experts.gate_up_proj": leaf((EXPERTS, 2 * FFN, HIDDEN), seed=2),
        "experts.down_proj": leaf((EXPERTS, HIDDEN, FFN), seed=3),
    }


def tokens_of(rank, count, step=0):
    return leaf((count, HIDDEN), seed=100 + 10 * step + rank)


def loss_of(output, rank):
    factors = leaf(output.shape, seed=50 + rank)
    return (output * factors).sum()


def mine(name, whole):
    """This rank's part of a whole weight."""
    is_split = name.startswith("experts.")
    return whole.chunk(pool.world_size())[pool.rank()] if is_split else whole


def plain_moe(x, weights, normalise=True, capacity=math.inf):
    """Every expert sees every token. All first choices come before all second ones."""
    gate, gate_ups, downs = weights.values()
    probabilities = (x @ gate.T).softmax(-1)
    values, chosen = probabilities.topk(2)
    if normalise:
        values = values / values.sum(-1, keepdim=True)
    is_for = F.one_hot(chosen.T.flatten(), EXPERTS)  # (choices, experts)
    place = (is_for.cumsum(0) * is_for).sum(1)  # among the expert's choices: 1 is the first
    kept = (place <= capacity).view(2, len(x)).T
    shares = torch.zeros_like(probabilities).scatter(1, chosen, values * kept)
    output = torch.zeros_like(x)
    for share, gate_up, down in zip(shares.T, gate_ups, downs, strict=True):
        gate, up = (x @ gate_up.T).chunk(2, -1)
        output = output + share[:, None] * (F.silu(gate) * up @ down.T)
    return output


def backward_on_one_device(weights, counts, plain=plain_moe, step=0):
    """That of the mean of the ranks' losses. Return the ranks' inputs and outputs."""
    N = pool.world_size()
    inputs = [tokens_of(rank, counts[rank], step) for rank in range(N)]
    outputs = [plain(x, weights) for x in inputs]
    for rank, output in enumerate(outputs):
        loss = loss_of(output, rank) / N
        loss.backward()
    return inputs, outputs


def computes_as_one_device(make, weights, counts, plain=plain_moe, **options):
    """`options` are those of the implementation under which it computes what `plain` does."""
    rank = pool.rank()
    inputs, outputs = backward_on_one_device(weights, counts, plain)
    ours = make(weights, **options)

    output, gradient = ours.backward(counts[rank])

    same(output, outputs[rank], "output")
    same(gradient, inputs[rank].grad * pool.world_size(), "gradient of the input")
    ours.same_gradients(weights)


@claim("moe", 1, 2, 4)
def as_one_device(make):
    """Outputs and all gradients are those of one device. A rank may have no tokens."""
    computes_as_one_device(make, whole_weights(), counts=[7, 3, 0, 5])
    if pool.world_size() > 1:
        computes_as_one_device(make, whole_weights(), counts=[0, 4, 4, 4])


say_in_float64("moe", "as_one_device")


@claim("moe", 1, 2)
def crowded_expert(make):
    """All tokens may choose the same two experts. Others have gradients of zero."""
    weights = whole_weights()
    gate = weights["gate.weight"].data
    gate.zero_()
    gate[1, 0] = 1e-3  # ties break alike: nearly equal probabilities
    gate[3, 1] = 1e-3
    computes_as_one_device(make, weights, counts=[6, 6])


@claim("moe", 2)
def without_renormalisation(make):
    """With norm_topk_prob=False the weights are the probabilities, which add up to less than 1."""
    plain = partial(plain_moe, normalise=False)
    computes_as_one_device(make, whole_weights(), [5, 4], plain, norm_topk_prob=False)


def train_as_one_device(make, optimizer_class, lr):
    weights = whole_weights()
    ours = make(weights)
    optimizers = [
        optimizer_class(weights.values(), lr=lr),
        optimizer_class(ours.module.parameters(), lr=lr),
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_on_one_device(weights, [4, 4, 4, 4], step=step)
        ours.backward(4, step)
        for optimizer in optimizers:
            optimizer.step()
    for name, weight in weights.items():
        same(ours.parameter(name), mine(name, weight), f"{name} after 3 steps")
    same_on_all(ours.parameter("gate.weight"), "gate.weight")


@claim("moe", 2, 4)
def trains(make):
    """Several steps of SGD and of AdamW end where one device ends. Replicas of the router agree."""
    train_as_one_device(make, torch.optim.SGD, lr=0.05)
    train_as_one_device(make, torch.optim.AdamW, lr=0.01)


@claim("moe", 1, 2, 4)
def balance_over_all_tokens(make):
    """aux_loss, Switch's, and z_loss are those of all ranks' tokens, and so are their gradients."""
    weights = whole_weights()
    gate = weights["gate.weight"]
    inputs = [tokens_of(rank, 3 + rank) for rank in range(pool.world_size())]
    logits = torch.cat(inputs) @ gate.T
    probabilities = logits.softmax(-1)
    chosen = F.one_hot(probabilities.topk(2).indices, EXPERTS).to(precision())
    aux_loss = EXPERTS * (chosen.mean((0, 1)) * probabilities.mean(0)).sum()
    z_loss = logits.logsumexp(-1).square().mean()
    (aux_loss + 3 * z_loss).backward()

    ours = make(weights)
    module = ours.module
    module(inputs[pool.rank()])
    if not hasattr(module, "z_loss"):
        raise NotOffered("no aux_loss and z_loss")
    (module.aux_loss + 3 * module.z_loss).backward()
    ours.call("average_gradients")

    same(module.aux_loss, aux_loss, "aux_loss")
    same(module.z_loss, z_loss, "z_loss")
    same(ours.parameter("gate.weight").grad, gate.grad, "gradient of gate.weight")


@claim("moe", 2, 4)
def whole_norm(make):
    """clip_grad_norm_ uses the whole model's norm: each rank's experts, and the router once."""
    weights = whole_weights()
    counts = [4, 2, 3, 1]
    backward_on_one_device(weights, counts)
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
    ours = make(weights)
    ours.backward(counts[pool.rank()])

    same(ours.call("clip_grad_norm_", 0.5), norm, "norm")
    ours.same_gradients(weights)


@claim("moe", 2, 4, about="property")
def experts_are_split(make):
    """A rank holds 1/N of the experts, parameters and gradients."""
    weights = whole_weights()
    ours = make(weights)
    ours.backward(4)
    for name, whole in weights.items():
        parameter = ours.parameter(name)
        elements = mine(name, whole).numel()
        held = parameter.untyped_storage().nbytes() // parameter.element_size()
        check(held == elements, f"{name} holds {held} elements, not {elements}")
        check(parameter.grad.numel() == elements, f"{name}.grad has {parameter.grad.numel()}")

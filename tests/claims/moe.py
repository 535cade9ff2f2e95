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
import torch.nn as nn
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
        self.function("parallelize")(self.module)

    def find(self, name):
        """In the class or in its file."""
        found = getattr(self.implementation, name, None)
        return found or getattr(sys.modules[self.implementation.__module__], name, None)

    def function(self, name):
        found = self.find(name)
        if found is None:
            raise NotOffered(f"no function {name}")
        return found

    def parameter(self, name):
        names = self.find("names") or {}
        return self.module.get_parameter(names.get(name, name))

    def backward(self, rank, count, step=0):
        """Return the output and the input's gradient. Then parameters have averaged gradients."""
        x = tokens_of(rank, count, step).requires_grad_()
        output = self.module(x)
        loss_of(output, rank).backward()
        self.function("average_gradients")(self.module)
        return output, x.grad

    def same_gradients(self, expected, what):
        for name, weight in expected.items():
            found = self.parameter(name).grad
            same(found, mine(name, weight.grad), f"{what} of {name}")


add_kind("moe", called=__doc__, make=Ours, ours="expert_parallel:MoE")


def numbers(shape, seed):
    return randn(shape, seed).to(precision())


def whole_weights():
    return {
        "gate.weight": numbers((EXPERTS, HIDDEN), seed=1),
        "experts.gate_up_proj": numbers((EXPERTS, 2 * FFN, HIDDEN), seed=2),
        "experts.down_proj": numbers((EXPERTS, HIDDEN, FFN), seed=3),
    }


def plain_moe(x, weights, normalise=True, capacity=math.inf):
    """One token after the other. First choices are before all second ones at taking places."""
    probabilities = (x @ weights["gate.weight"].T).softmax(-1)
    values, chosen = probabilities.topk(2)
    if normalise:
        values = values / values.sum(-1, keepdim=True)
    taken = [0] * EXPERTS
    outputs = list(torch.zeros_like(x))
    for choice in range(2):
        for position, token in enumerate(x):
            expert = chosen[position, choice].item()
            taken[expert] += 1
            if taken[expert] > capacity:
                continue
            projected = weights["experts.gate_up_proj"][expert] @ token
            gate, up = projected.chunk(2)
            hidden = F.silu(gate) * up
            result = weights["experts.down_proj"][expert] @ hidden
            outputs[position] = outputs[position] + values[position, choice] * result
    return torch.stack(outputs) if outputs else x


def tokens_of(rank, count, step=0):
    return numbers((count, HIDDEN), seed=100 + 10 * step + rank)


def mine(name, whole):
    """This rank's part of a whole weight."""
    if not name.startswith("experts."):
        return whole
    parts = whole.chunk(pool.world_size())
    return parts[pool.rank()]


def loss_of(output, rank):
    factors = numbers(output.shape, seed=50 + rank)
    return (output * factors).sum()


def gradients_of_one_device(weights, counts, plain=plain_moe):
    """Return the weights, with the gradients of all ranks' mean loss, and the ranks' inputs."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    inputs = [tokens_of(rank, count).requires_grad_() for rank, count in enumerate(counts)]
    losses = [loss_of(plain(x, leaves), rank) for rank, x in enumerate(inputs)]
    unused = 0 * sum(leaf.sum() for leaf in leaves.values())  # has a gradient without tokens, too
    (sum(losses) / len(losses) + unused).backward()
    return leaves, inputs


def computes_as_one_device(make, weights, counts, plain=plain_moe, **options):
    """`options` are those of the implementation under which it computes what `plain` does."""
    counts = counts[: pool.world_size()]
    rank = pool.rank()
    expected, inputs = gradients_of_one_device(weights, counts, plain)
    ours = make(weights, **options)

    output, gradient = ours.backward(rank, counts[rank])

    same(output, plain(inputs[rank], weights), "output")
    same(gradient, inputs[rank].grad * pool.world_size(), "gradient of the input")
    ours.same_gradients(expected, "gradient")


@claim("moe", 1, 2, 4)
def as_one_device(make):
    """Outputs and all gradients are those of a loop over tokens. A rank may have no tokens."""
    computes_as_one_device(make, whole_weights(), counts=[7, 3, 0, 5])
    if pool.world_size() > 1:
        computes_as_one_device(make, whole_weights(), counts=[0, 4, 4, 4])


say_in_float64("moe", "as_one_device")


@claim("moe", 1, 2)
def crowded_expert(make):
    """All tokens may choose the same two experts. Others have gradients of zero."""
    weights = whole_weights()
    weights["gate.weight"].zero_()
    weights["gate.weight"][1, 0] = 1e-3  # ties break alike: nearly equal probabilities
    weights["gate.weight"][3, 1] = 1e-3
    computes_as_one_device(make, weights, counts=[6, 6])


@claim("moe", 2)
def without_renormalisation(make):
    """With norm_topk_prob=False the weights are the probabilities, which add up to less than 1."""
    plain = partial(plain_moe, normalise=False)
    computes_as_one_device(make, whole_weights(), [5, 4], plain, norm_topk_prob=False)


def train_as_one_device(make, optimizer_class, **options):
    weights = {name: nn.Parameter(weight) for name, weight in whole_weights().items()}
    ours = make(whole_weights())
    plain_optimizer = optimizer_class(weights.values(), **options)
    optimizer = optimizer_class(ours.module.parameters(), **options)
    N = pool.world_size()
    for step in range(3):
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        for rank in range(N):
            output = plain_moe(tokens_of(rank, 4, step), weights)
            loss = loss_of(output, rank) / N
            loss.backward()
        ours.backward(pool.rank(), 4, step)
        plain_optimizer.step()
        optimizer.step()
    for name, weight in weights.items():
        expected = mine(name, weight.detach())
        same(ours.parameter(name).detach(), expected, f"{name} after 3 steps")
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
    rank = pool.rank()
    inputs = [tokens_of(each, 3 + each) for each in range(pool.world_size())]
    gate = weights["gate.weight"].clone().requires_grad_()
    logits = torch.cat(inputs) @ gate.T
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(2).indices.flatten()
    share = torch.bincount(chosen, minlength=EXPERTS).to(precision()) / len(chosen)
    aux_loss = EXPERTS * (share * probabilities.mean(0)).sum()
    z_loss = logits.logsumexp(-1).square().mean()
    (aux_loss + 3 * z_loss).backward()

    ours = make(weights)
    ours.module(inputs[rank])
    if not hasattr(ours.module, "aux_loss") or not hasattr(ours.module, "z_loss"):
        raise NotOffered("no aux_loss and z_loss")
    (ours.module.aux_loss + 3 * ours.module.z_loss).backward()
    ours.function("average_gradients")(ours.module)

    same(ours.module.aux_loss.detach(), aux_loss.detach(), "aux_loss")
    same(ours.module.z_loss.detach(), z_loss.detach(), "z_loss")
    same(ours.parameter("gate.weight").grad, gate.grad, "gradient of gate.weight")


@claim("moe", 2, 4)
def whole_norm(make):
    """clip_grad_norm_ uses the whole model's norm: each rank's experts, and the router once."""
    weights = whole_weights()
    counts = [4, 2, 3, 1][: pool.world_size()]
    expected, _ = gradients_of_one_device(weights, counts)
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), 0.5)
    ours = make(weights)
    clip = ours.function("clip_grad_norm_")
    ours.backward(pool.rank(), counts[pool.rank()])

    found = clip(ours.module, 0.5)

    same(found, norm, "norm")
    ours.same_gradients(expected, "clipped gradient")


@claim("moe", 2, 4, about="property")
def experts_are_split(make):
    """A rank holds 1/N of the experts, parameters and gradients."""
    ours = make(whole_weights())
    ours.backward(pool.rank(), 4)
    for name, whole in whole_weights().items():
        parameter = ours.parameter(name)
        elements = mine(name, whole).numel()
        held = parameter.untyped_storage().nbytes() // parameter.element_size()
        check(held == elements, f"{name} holds {held} elements, not {elements}")
        check(parameter.grad.numel() == elements, f"{name}.grad has {parameter.grad.numel()}")

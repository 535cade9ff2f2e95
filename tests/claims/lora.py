"""An implementation of --lora is called as function(model, r=, lora_alpha=, target_modules=).

It gets r=4, lora_alpha=16 and target_modules=["0", "2"], and returns the model. Its only
trainable parameters are A, (r, in_features), and B, (out_features, r), in this order, for each
layer that `target_modules` names.
"""

import copy

import torch
import torch.nn as nn
from shared import loss_of, make_batch, make_model

from claims.registry import add_kind, check, claim, precision, same, say_in_float64

ALPHA_OVER_R = 16 / 4


def make_lora(implementation, model):
    return implementation(model, r=4, lora_alpha=16, target_modules=["0", "2"])


add_kind(
    "lora",
    called=__doc__,
    make=make_lora,
    ours="lora:inject_lora",
    pytorchs="pytorchs:inject_lora",
)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@claim("lora", 1)
def unchanged_at_first(make):
    """Before the first step the output is bitwise that of the model, because B is zero."""
    model = make_model("plain")
    x = make_batch(0, 0)
    expected = model(x)
    adapted = make(model)
    same(adapted(x), expected, "output", exact=True)


@claim("lora", 1)
def dense_equivalent(make):
    """Outputs and the gradients of A and B are those of a model with the weights W + (α/r)BA."""
    plain = make_model("plain", precision())
    model = make(copy.deepcopy(plain))
    model.to(precision())
    for parameter in trained(model):
        nn.init.normal_(parameter)
    factors = [p.detach().clone().requires_grad_() for p in trained(model)]
    A0, B0, A2, B2 = factors
    dense = dict(plain.named_parameters())
    dense["0.weight"] = dense["0.weight"].detach() + ALPHA_OVER_R * B0 @ A0
    dense["2.weight"] = dense["2.weight"].detach() + ALPHA_OVER_R * B2 @ A2
    x = make_batch(0, 0, precision())

    output = model(x)
    expected = torch.func.functional_call(plain, dense, x)
    loss_of(output).backward()
    loss_of(expected).backward()

    same(output, expected, "output")
    for ours, factor in zip(trained(model), factors, strict=True):
        same(ours.grad, factor.grad, "gradient of A or B")


say_in_float64("lora", "dense_equivalent")


@claim("lora", 1)
def base_stays(make):
    """r(d + k) parameters of each adapted matrix train. The model's own do not change by a bit."""
    plain = make_model("plain")
    model = make(copy.deepcopy(plain))
    found = sum(parameter.numel() for parameter in trained(model))
    expected = 4 * (6 + 33) + 4 * (33 + 17)
    check(found == expected, f"{found} parameters train, not {expected}")

    optimizer = torch.optim.AdamW(trained(model), lr=0.1)
    for step in range(2):
        output = model(make_batch(0, step))
        loss_of(output).backward()
        optimizer.step()

    kept = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for name, parameter in plain.named_parameters():
        is_there = any(torch.equal(parameter, other) for other in kept)
        check(is_there, f"{name} has changed")

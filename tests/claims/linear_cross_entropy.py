"""An implementation of --linear-cross-entropy is called as f(input, linear_weight, target).

input is (tokens, H), linear_weight is (words, H) and target (tokens). The result is the mean loss
of the tokens whose target is not -100. The claims about them also pass reduction=, linear_bias=
and label_smoothing=, with PyTorch's meaning.
"""

from functools import partial

import torch
import torch.nn.functional as F
from shared import randn

from claims.attention import bytes_kept
from claims.registry import (
    add_kind,
    call,
    check,
    claim,
    precision,
    same,
    say,
    say_in_float64,
)


def linear_loss(implementation, *args, **options):
    return call(implementation, *args, needed=options)


add_kind(
    "linear-cross-entropy",
    called=__doc__,
    make=linear_loss,
    ours="linear_cross_entropy:linear_cross_entropy",
    pytorchs="pytorchs:chunked_linear_cross_entropy",
)


def plain_loss(x, weight, target, *, linear_bias=None, **options):
    logits = F.linear(x, weight, linear_bias)
    return F.cross_entropy(logits, target, **options)


def make_inputs(tokens=50, words=3000, scale=1.0):
    """Return x, weight, bias and target. Some targets are -100."""
    shapes = [(tokens, 8), (words, 8), (words,)]
    numbers = [randn(shape, seed) for seed, shape in enumerate(shapes)]
    target = torch.arange(tokens) * 137 % words
    target[::3] = -100
    return *(scale * x.to(precision()) for x in numbers), target


def loss_and_gradients(function, tensors, target, **options):
    """The third tensor is the bias, if there are three."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    bias = {"linear_bias": leaves[2]} if len(leaves) == 3 else {}
    x, weight = leaves[:2]
    loss = function(x, weight, target, **bias, **options)
    loss.sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


RESULTS = ["loss", "gradient of the input", "gradient of the weight", "gradient of the bias"]


def equals_plain(make, has_bias=False, scale=1.0, **options):
    x, weight, bias, target = make_inputs(scale=scale)
    tensors = [x, weight, bias] if has_bias else [x, weight]
    found = loss_and_gradients(make, tensors, target, **options)
    expected = loss_and_gradients(plain_loss, tensors, target, **options)
    for name, ours, plain in zip(RESULTS, found, expected, strict=False):
        same(ours, plain, name, coarser=scale)


def linear(name, sentence, **how):
    say(name, sentence, [1], "linear-cross-entropy", equals_plain, **how)


linear(
    "as_plain",
    "Loss and gradients are those of F.cross_entropy(F.linear(input, weight), target). A target of "
    "-100 does not count.",
)
say_in_float64("linear-cross-entropy", "as_plain")
linear("sum", "So they are with reduction='sum'.", reduction="sum")
linear("each_token", "So they are with reduction='none'.", reduction="none", may_refuse=True)
linear("bias", "So they are with a bias.", has_bias=True)
linear("label_smoothing", "So they are with smoothed labels.", label_smoothing=0.1)
linear("large_logits", "Logits of hundreds do not overflow.", scale=10.0)


@claim("linear-cross-entropy", 1)
def all_ignored(make):
    """If no token counts, the mean loss is NaN, and all gradients are zero."""
    x, weight, _, target = make_inputs()
    nothing = torch.full_like(target, -100)
    loss, *gradients = loss_and_gradients(make, [x, weight], nothing)
    check(loss.isnan().item(), f"the loss is {loss.item()}, not NaN")
    for name, gradient in zip(RESULTS[1:], gradients, strict=False):
        same(gradient, torch.zeros_like(gradient), name, exact=True)


def errors_in_bf16(function, cast):
    x, weight, _, target = make_inputs()
    narrow = [x.to(cast), weight.to(cast)]
    wide = [tensor.double() for tensor in narrow]
    exact = loss_and_gradients(plain_loss, wide, target)
    found = loss_and_gradients(function, narrow, target)
    pairs = zip(found, exact, strict=True)
    differences = [a.double() - b for a, b in pairs]
    return [difference.norm().item() for difference in differences]


def compare_errors(make, plain, cast):
    ours = errors_in_bf16(make, cast)
    theirs = errors_in_bf16(plain, cast)
    for name, error, bound in zip(RESULTS, ours, theirs, strict=False):
        rounding = 1e-3 if name == "loss" else 0.0
        holds = error <= 2 * bound + rounding
        check(holds, f"the error of the {name} is {error:.1e}, and the plain one {bound:.1e}")


@claim("linear-cross-entropy", 1, about="property")
def bf16(make):
    """In bf16, errors are at most twice those of the plain loss."""
    compare_errors(make, plain_loss, torch.bfloat16)


@claim("linear-cross-entropy", 1, about="property")
def autocast(make):
    """So they are under torch.autocast, whose context ends before backward."""

    def under_autocast(function, *args, **options):
        with torch.autocast(args[0].device.type, torch.bfloat16):
            return function(*args, **options)

    ours = partial(under_autocast, make)
    compare_errors(ours, partial(under_autocast, plain_loss), torch.float32)


@claim("linear-cross-entropy", 1, about="property")
def no_logits_are_kept(make):
    """What is kept for backward is smaller than the logits."""
    x, weight, _, target = make_inputs(tokens=512)

    def loss(x, weight, _):
        return make(x, weight, target)

    inputs = x.nbytes + weight.nbytes
    kept = bytes_kept(loss, x, weight, x) - inputs
    logits = len(x) * len(weight) * x.itemsize
    check(kept < logits / 4, f"{kept} bytes are kept, and the logits have {logits}")

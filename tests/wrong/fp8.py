"""Mistakes in products of 8-bit numbers, and the claim that catches each."""

from functools import partial

import torch

import fp8


def product(a, a_scale, b, b_scale):
    return a.float() @ b.float() * (a_scale * b_scale)


class Product(torch.autograd.Function):
    """x Wᵀ, with the steps that mistakes change."""

    @staticmethod
    def forward(ctx, x, weight, steps):
        to_fp8 = steps.get("to_fp8", fp8.to_fp8)
        multiply = steps.get("multiply", product)
        x8, x_scale = to_fp8(x, steps.get("dtype", fp8.E4M3))
        weight8, weight_scale = to_fp8(weight, fp8.E4M3)
        ctx.operands = x8, x_scale, weight8, weight_scale
        ctx.steps = steps
        return multiply(x8, x_scale, weight8.t(), weight_scale)

    @staticmethod
    def backward(ctx, dy):
        x8, x_scale, weight8, weight_scale = ctx.operands
        weight_scale = ctx.steps.get("weight_scale", weight_scale)
        to_fp8 = ctx.steps.get("to_fp8", fp8.to_fp8)
        dy8, dy_scale = to_fp8(dy, fp8.E5M2)
        if "dy_scale" in ctx.steps:
            dy_scale = ctx.steps["dy_scale"]
            dy8 = (dy / dy_scale).to(fp8.E5M2)
        dx = product(dy8, dy_scale, weight8, weight_scale)
        dw = product(dy8.t(), dy_scale, x8, x_scale)
        return dx, dw, None


def by_steps(model, **steps):
    (layer,) = model

    def forward(x):
        y = Product.apply(x.flatten(0, -2), layer.weight, steps)
        y = y.view(*x.shape[:-1], -1)
        if layer.bias is None or "no_bias" in steps:
            return y
        return y + layer.bias

    layer.forward = forward


def without_scale(x, dtype):
    return x.to(dtype), 1.0


def saturated(x, dtype):
    """An inf becomes the largest number."""
    largest = torch.finfo(dtype).max
    _, scale = fp8.to_fp8(x.nan_to_num(0.0, 1.0, -1.0), dtype)
    values = x.nan_to_num() / scale
    return values.clamp(-largest, largest).to(dtype), scale


def scale_of_exact_range(x, dtype):
    """Right: the largest number becomes the largest of the format."""
    largest = x.abs().max()
    scale = largest.clamp_min(1e-30) / torch.finfo(dtype).max
    return (x / scale + 0 * scale).to(dtype), scale


def scale_may_be_zero(x, dtype):
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def rounded_down(x, dtype):
    """OCP's rule: the exponent of the largest number. What lies above the range saturates."""
    _, scale = fp8.to_fp8(x, dtype)
    largest = torch.finfo(dtype).max
    values = x / scale * 4
    return values.clamp(-largest, largest).to(dtype), scale / 4


def summed_in_16_bits(a, a_scale, b, b_scale):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for left, right in zip(a.split(1, 1), b.split(1, 0), strict=True):
        total += left.bfloat16() @ right.bfloat16()
    return total.float() * (a_scale * b_scale)


right = by_steps
never_scales = partial(by_steps, to_fp8=without_scale)
saturates = partial(by_steps, to_fp8=saturated)
divides_by_zero = partial(by_steps, to_fp8=scale_may_be_zero)
rounds_scales_down = partial(by_steps, to_fp8=rounded_down)
forwards_in_e5m2 = partial(by_steps, dtype=fp8.E5M2)
sums_in_16_bits = partial(by_steps, multiply=summed_in_16_bits)
forgets_a_scale_in_backward = partial(by_steps, weight_scale=1.0)
scales_gradients_by_one = partial(by_steps, dy_scale=1.0)
loses_the_bias = partial(by_steps, no_bias=True)
scales_to_the_end = partial(by_steps, to_fp8=scale_of_exact_range)
rowwise = partial(fp8.convert, recipe="rowwise")
deepseek = partial(fp8.convert, recipe="deepseek")
mxfp8 = partial(fp8.convert, recipe="mxfp8")


def stays_in_32_bits(model):
    return model


MISTAKES = {
    "fp8-linear": {
        "never_scales": "sizes_are_scaled",
        "saturates": "not_finite",
        "divides_by_zero": "zeros",
        "rounds_scales_down": "outliers",
        "forwards_in_e5m2": "one_term",
        "sums_in_16_bits": "long_sums",
        "forgets_a_scale_in_backward": "sizes_are_scaled",
        "scales_gradients_by_one": "tiny_gradients",
        "loses_the_bias": "bias",
    },
}
RIGHT = {
    "fp8-linear": {
        "right": [],
        "scales_to_the_end": [],
        "rowwise": [],
        "deepseek": [],
        "mxfp8": [],
        "stays_in_32_bits": ["rounds", "keeps_a_byte"],
    },
}

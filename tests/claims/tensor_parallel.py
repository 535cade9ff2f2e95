"""An implementation of --column-linear or --row-linear is called as class.from_full(an nn.Linear).

A class without `from_full` is called as class(in_features, out_features, bias), and gets this
rank's slice of the weight and the bias afterwards. Both get `process_group=` if they have such
a name, and Megatron's options gather_output=, input_is_parallel= and sequence_parallel= in the
claims about these. The layer has `weight` and `bias` with this rank's slices. With
sequence_parallel=, a row layer's bias may have a gradient whose sum over the ranks is the whole.
"""

import copy

import pool
import torch
import torch.distributed as dist
import torch.nn as nn

from claims.fsdp import local
from claims.registry import add_kind, call, precision, same, say, say_in_float64


def make_linear(implementation, linear, dim, **options):
    """The rank's slice is one of rows of the weight (dim 0), or of columns (dim 1)."""
    group = pool.group()
    if hasattr(implementation, "from_full"):
        return call(implementation.from_full, linear, needed=options, process_group=group)
    has_bias = linear.bias is not None
    sizes = (linear.in_features, linear.out_features, has_bias)
    layer = call(implementation, *sizes, needed=options, process_group=group)
    layer.to(linear.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(part(linear.weight, dim))
        if has_bias:
            layer.bias.copy_(part_of_bias(linear.bias, dim))
    return layer


def part(tensor, dim):
    return tensor if dim is None else tensor.chunk(pool.world_size(), dim)[pool.rank()]


def part_of_bias(bias, dim):
    return part(bias, 0) if dim == 0 else bias


for kind, ours, pytorchs in [
    ("column-linear", "tensor_parallel:ColumnParallelLinear", "pytorchs:Column"),
    ("row-linear", "tensor_parallel:RowParallelLinear", "pytorchs:Row"),
]:
    add_kind(kind, called=__doc__, make=make_linear, ours=ours, pytorchs=pytorchs)


def linear_equals_one_device(make, dim, input_cut=None, output_cut=None, bias=True, **options):
    """In two passes, whose gradients add up. A cut is the dimension that is split, or None."""
    torch.manual_seed(0)
    linear = nn.Linear(12, 24, bias).to(precision())
    layer = make(copy.deepcopy(linear), dim, **options)
    for _ in range(2):
        x = torch.randn(12, 2, 12, dtype=precision())
        weight = torch.randn(12, 2, 24, dtype=precision())
        mine = part(x, input_cut).clone().requires_grad_()
        x.requires_grad_()

        output = local(layer(mine))
        expected = one_device(linear, x)
        (output * part(weight, output_cut)).sum().backward()
        (expected * weight).sum().backward()

        same(output, part(expected, output_cut), "output")
        same(mine.grad, part(x.grad, input_cut), "gradient of the input")
        same(local(layer.weight.grad), part(linear.weight.grad, dim), "gradient of the weight")
        if bias:
            ours = local(layer.bias.grad)
            if dim == 1 and output_cut == 0:
                ours = whole_of(ours, linear.bias.grad)
            same(ours, part_of_bias(linear.bias.grad, dim), "gradient of the bias")


def one_device(linear, x):
    return linear(x)


def whole_of(gradient, expected):
    """The gradient, or the sum over the ranks if that is what comes nearer."""
    total = gradient.clone()
    dist.all_reduce(total, group=pool.group())
    return min(gradient, total, key=lambda each: (each - expected).abs().max())


def column(name, sentence, worlds, **how):
    say(name, sentence, worlds, "column-linear", linear_equals_one_device, dim=0, **how)


def row(name, sentence, worlds, **how):
    say(name, sentence, worlds, "row-linear", linear_equals_one_device, dim=1, **how)


column(
    "column",
    "Each rank has its part of the output. The input's gradient is the sum of all parts'.",
    [2, 4],
    output_cut=-1,
)
say_in_float64("column-linear", "column")
column("column_without_bias", "The same holds without a bias.", [3], bias=False, output_cut=-1)
column(
    "column_gathered",
    "With gather_output every rank has the whole output, and gradients are not N times too large.",
    [3],
    gather_output=True,
)
column(
    "column_sequence",
    "With sequence_parallel the input's rows are gathered and its gradient's rows are scattered.",
    [2],
    input_cut=0,
    output_cut=-1,
    sequence_parallel=True,
)
row(
    "row",
    "The output is the sum of the ranks' products. The bias is added once.",
    [2, 4],
    input_cut=-1,
)
say_in_float64("row-linear", "row")
row("row_without_bias", "The same holds without a bias.", [3], bias=False, input_cut=-1)
row(
    "row_of_a_whole_input",
    "With input_is_parallel=False each rank takes its part of a whole input.",
    [3],
    input_is_parallel=False,
)
row(
    "row_sequence",
    "With sequence_parallel the output's rows are scattered, and the input's gradient is whole.",
    [2],
    input_cut=-1,
    output_cut=0,
    sequence_parallel=True,
)

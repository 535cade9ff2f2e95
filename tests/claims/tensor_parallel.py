"""An implementation of --column-linear or --row-linear is called as class.from_full(an nn.Linear).

A class without `from_full` is called as class(in_features, out_features, bias), and gets this rank's
slice of the weight afterwards. Both also get `process_group=`, if they have such a name, and the options
gather_output=, input_is_parallel= and sequence_parallel= of Megatron's layers in claims about these.
"""

import copy
from functools import partial

import pool
import torch
import torch.nn as nn

from claims.registry import (
    add_kind,
    call,
    same,
    say,
)


def make_linear(implementation, linear, dim, **options):
    """-> the parallel layer with this rank's slice of an nn.Linear: rows of the weight (dim 0), or columns (dim 1)."""
    if hasattr(implementation, "from_full"):
        return call(implementation.from_full, linear, needed=options, process_group=pool.group())
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    layer = call(implementation, *sizes, needed=options, process_group=pool.group()).to(
        linear.weight.dtype
    )
    with torch.no_grad():
        layer.weight.copy_(part(linear.weight, dim))
        if linear.bias is not None:
            layer.bias.copy_(part(linear.bias, 0 if dim == 0 else None))
    return layer


add_kind(
    "column-linear",
    called=__doc__,
    make=make_linear,
    ours="tensor_parallel:ColumnParallelLinear",
    pytorchs="pytorchs:Column",
)
add_kind(
    "row-linear",
    called=__doc__,
    make=make_linear,
    ours="tensor_parallel:RowParallelLinear",
    pytorchs="pytorchs:Row",
)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part(tensor, dim):
    return tensor if dim is None else tensor.chunk(pool.world_size(), dim)[pool.rank()]


def linear_equals_one_device(make, dim, input_cut=None, output_cut=None, bias=True, **options):
    """Output, the input's gradient and the weights', twice (they accumulate): each rank's part, or the whole."""
    torch.manual_seed(0)
    linear = nn.Linear(12, 24, bias).double()
    layer = make(copy.deepcopy(linear), dim, **options)
    for _ in range(2):
        x, weight = torch.randn(12, 2, 12).double(), torch.randn(12, 2, 24).double()
        ours, x = part(x, input_cut).clone().requires_grad_(), x.requires_grad_()
        output, expected = local(layer(ours)), linear(x)
        same(output, part(expected, output_cut), "output")
        (output * part(weight, output_cut)).sum().backward()
        (expected * weight).sum().backward()
        same(ours.grad, part(x.grad, input_cut), "gradient of the input")
        same(local(layer.weight.grad), part(linear.weight.grad, dim), "gradient of the weight")
        if bias and layer.bias.grad is not None:
            same(
                local(layer.bias.grad),
                part(linear.bias.grad, 0 if dim == 0 else None),
                "gradient of the bias",
            )


column = partial(say, kinds="column-linear", check=linear_equals_one_device, dim=0)
row = partial(say, kinds="row-linear", check=linear_equals_one_device, dim=1)
column(
    "column",
    "Each rank has its part of the output; the input's gradient is all parts' sum.",
    [2, 4],
    output_cut=-1,
)
column("column_without_bias", "Without a bias it is the same.", [3], bias=False, output_cut=-1)
column(
    "column_gathered",
    "With gather_output all have all of it, and gradients not N times.",
    [3],
    gather_output=True,
)
how = {"input_cut": 0, "output_cut": -1, "sequence_parallel": True}
column(
    "column_sequence",
    "With sequence_parallel the input's rows are gathered, its gradient's scattered.",
    [2],
    **how,
)
row(
    "row",
    "The ranks' products, of parts of the input, are summed; the bias is added once.",
    [2, 4],
    input_cut=-1,
)
row("row_without_bias", "Without a bias it is the same.", [3], bias=False, input_cut=-1)
row(
    "row_of_a_whole_input",
    "With input_is_parallel=False each takes its part of it.",
    [3],
    input_is_parallel=False,
)
sentence = "With sequence_parallel the output's rows are scattered; the bias has all its gradient."
row("row_sequence", sentence, [2], input_cut=-1, output_cut=0, sequence_parallel=True)

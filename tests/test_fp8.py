"""fp8.py against products of the dequantized operands, one device, and training in fp32."""

import argparse
import copy
import functools
from functools import partial
from pathlib import Path

import claims
import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import registry
from claims.training import Trainer, trains_as_one_device
from shared import Collectives, make_model, randn

import activation_checkpoint
import amp
import fp8

F32 = torch.float32
F64 = torch.float64
BF16 = torch.bfloat16
INF = float("inf")
NAN = float("nan")
FORMATS = [fp8.E4M3, fp8.E5M2]
IS_OLD = torch.__version__ < "2.7"
bitwise = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def within(ours, expected, bound=1e-12):
    """Of the largest element."""
    error = (ours - expected).abs().max()
    assert error <= bound * expected.abs().max()


each_recipe = pytest.mark.parametrize("recipe", fp8.RECIPES)


def wide(shape, seed=0, dtype=F32):
    """Numbers whose columns and rows differ by up to 2³⁰, so that small ones underflow."""
    R, C = shape
    rows = torch.linspace(0, 20, R).round()
    columns = torch.linspace(0, 10, C).round()
    exponents = rows.view(R, 1) + columns
    x = randn(shape, seed) * 2**exponents
    return x.to(dtype)


def bits(quantized):
    return quantized.values.view(torch.uint8), quantized.scale


def make_layer(recipe, outputs=6, inputs=5, dtype=F32, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    return fp8.convert(layer, recipe)


def results(layer, x, dy):
    """Return y and the gradients of x and of the weight."""
    x = x.clone().requires_grad_()
    y = layer(x)
    leaves = x, layer.weight
    gradients = torch.autograd.grad(y, leaves, dy)
    return y, *gradients


# ---- numbers


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_scale_is_the_smallest_power_of_two_with_which_the_largest_fits(
    dtype,
):
    largest = torch.finfo(dtype).max
    for exponent in range(-100, 100):
        amax = torch.tensor(largest * 2.0**exponent)
        _, scale = fp8.to_fp8(amax, dtype)
        assert scale == 2.0**exponent
        more = torch.nextafter(amax, torch.tensor(INF))
        _, scale = fp8.to_fp8(more, dtype)
        assert scale == 2.0 ** (exponent + 1)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@each_recipe
def test_each_element_is_within_half_a_unit_in_the_last_place(recipe, dtype):
    relative = 2**-4  # 3 bits of mantissa
    if dtype == fp8.E5M2:
        relative = 2**-3
    info = torch.finfo(dtype)
    absolute = info.tiny * relative  # half of the smallest number
    block, *_ = fp8.RECIPES[recipe]
    x = wide((70, 200))
    quantized = fp8.quantize(x, block, dtype)
    scale = fp8.scale_of_elements(quantized.scale, x.shape, block)
    error = (fp8.dequantize(quantized) - x).abs()
    bound = torch.maximum(relative * x.abs(), absolute * scale)
    assert (error <= bound).all()
    assert error.max() > 0


BLOCKS = {
    "tensorwise": (1, 1),
    "rowwise": (300, 1),
    "deepseek": (300, 2),
    "mxfp8": (300, 7),
}


@each_recipe
def test_each_block_has_the_scale_of_its_largest_number(recipe):
    """The last blocks are smaller than the others."""
    block, *_ = fp8.RECIPES[recipe]
    x = wide((300, 200))
    scale = fp8.quantize(x, block).scale
    assert tuple(scale.shape) == BLOCKS[recipe]
    height = block[0] or 300
    width = block[1] or 200
    for row, rows in enumerate(x.split(height)):
        for column, numbers in enumerate(rows.split(width, 1)):
            _, expected = fp8.to_fp8(numbers)
            assert scale[row, column] == expected


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_inf_and_nan_reach_the_result(bad, dtype):
    """In their block. A cast to 8 bits alone would make 448 of an inf."""
    x = torch.ones(3, 300)
    x[1, 200] = bad
    quantized = fp8.quantize(x, (1, 128), dtype)
    wrong = fp8.dequantize(quantized).isnan()
    assert wrong[1, 128:256].all()
    assert wrong.sum() == 128
    y = fp8.naive_linear(x, torch.ones(2, 300))
    assert y.isnan().all()


@each_recipe
def test_zeros_stay_zeros_and_tiny_and_huge_numbers_stay_finite(recipe):
    block, *_ = fp8.RECIPES[recipe]
    for number in (0.0, 1e-45, 1e-38, 3e38):
        x = torch.full((2, 3), number)
        quantized = fp8.quantize(x, block)
        back = fp8.dequantize(quantized)
        smallest = 2**-126 * 2**-9
        torch.testing.assert_close(back, x, rtol=2**-4, atol=smallest)


# ---- products


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@each_recipe
def test_a_kernel_multiplies_as_the_dequantized_matrices(recipe, dtype, monkeypatch):
    block, weight_block, dy_dtype = fp8.RECIPES[recipe]
    a = randn((40, 70))
    b = randn((30, 70), seed=1)
    a = fp8.quantize(a, block, dy_dtype)
    b = fp8.quantize(b, weight_block)
    y = fp8.multiply(a, b, dtype)
    right = fp8.dequantize(b, F64)
    exact = fp8.dequantize(a, F64) @ right.t()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=1e-5)
    monkeypatch.setattr(fp8, "kernel_runs", lambda *_: False)
    bitwise(y, fp8.multiply(a, b, dtype))


def test_this_cpu_has_kernels_for_scales_of_tensors_and_rows():
    if not hasattr(torch, "_scaled_mm") or torch.__version__ < "2.13":
        pytest.skip("torch has them since 2.13")
    for recipe, (block, *_) in fp8.RECIPES.items():
        runs = fp8.kernel_runs("cpu", block, fp8.E4M3, fp8.E4M3, BF16)
        assert runs == (recipe in ("tensorwise", "rowwise"))


@each_recipe
def test_products_are_within_the_bounds_of_the_formats(recipe):
    """Element by element: of the sum of the magnitudes, and what underflows."""
    layer = make_layer(recipe, 48, 200, bias=False)
    x = randn((70, 200), dtype=F32)
    dy = randn((70, 48), seed=1, dtype=F32)
    weight = layer.weight.detach()
    y, dx, dw = results(layer, x, dy)
    of_dy = 2**-3 + 2**-8
    if recipe == "tensorwise":
        of_dy = 3 * 2**-4 + 2**-7
    products = [
        (y, x, weight.t(), 2**-3 + 2**-8),
        (dx, dy, weight, of_dy),
        (dw, dy.t(), x, of_dy),
    ]
    for ours, a, b, bound in products:
        error = (ours - a @ b).abs()
        magnitude = a.abs() @ b.abs()
        largest = a.abs().max() * b.abs().max()
        underflow = 2**-17 * len(b) * largest
        assert (error <= bound * magnitude + underflow).all()
        assert error.max() > 0


def test_a_tensorwise_layer_is_bitwise_the_idea():
    layer = make_layer("tensorwise")
    x = randn((2, 3, 5), dtype=F32)
    dy = randn((2, 3, 6), dtype=F32)
    ours = results(layer, x, dy)
    layer.forward = partial(fp8.naive_linear, weight=layer.weight, bias=layer.bias)
    bitwise(ours, results(layer, x, dy))


@each_recipe
def test_each_product_has_scales_along_the_numbers_that_it_sums(recipe):
    block, weight_block, dy_dtype = fp8.RECIPES[recipe]
    layer = make_layer(recipe, 48, 200, F64, bias=False)
    x = wide((70, 200), dtype=F64)
    dy = wide((70, 48), seed=1, dtype=F64)

    def product(a, block_a, b, block_b, dtype=fp8.E4M3):
        """Of a and bᵀ, rounded."""
        a = fp8.quantize(a, block_a, dtype)
        b = fp8.quantize(b, block_b)
        right = fp8.dequantize(b, F64)
        return fp8.dequantize(a, F64) @ right.t()

    weight = layer.weight.detach()
    y, dx, dw = results(layer, x, dy)
    expected = product(x, block, weight, weight_block)
    within(y, expected)
    expected = product(dy, block, weight.t(), weight_block, dy_dtype)
    within(dx, expected)
    expected = product(dy.t(), block, x.t(), block, dy_dtype)
    within(dw, expected)


# ---- the layer


@each_recipe
def test_a_layer_keeps_a_byte_for_each_element_of_its_input(recipe):
    layer = make_layer(recipe, 48, 64, bias=False)
    saved = []
    x = randn((70, 64), dtype=F32)
    hooks = saved.append, lambda tensor: tensor
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        layer(x)
    weight, values, scale = saved
    assert values.nbytes == 70 * 64
    assert weight.data_ptr() == layer.weight.data_ptr()
    assert scale.numel() <= -(-70 // 32) * 64


SHAPES = [
    (5,),
    (1, 5),
    (2, 3, 5),
    (2, 0, 5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_recipe
def test_inputs_of_any_shape(recipe, shape):
    if 0 in shape and IS_OLD:
        pytest.skip("torch 2.6 pads no tensor without elements")
    layer = make_layer(recipe)
    x = randn(shape, dtype=F32)
    dy = torch.ones(*shape[:-1], 6)
    y, dx, dw = results(layer, x, dy)
    assert y.shape == dy.shape
    assert dx.shape == shape
    assert torch.isfinite(dw).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F64], ids=str)
def test_outputs_and_gradients_have_the_dtypes_of_nn_linear(dtype):
    layer = make_layer("rowwise", dtype=dtype)
    x = randn((3, 5))
    dy = torch.ones(3, 6, dtype=dtype)
    for each in results(layer, x.to(dtype), dy):
        assert each.dtype == dtype


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_under_autocast_the_output_has_its_dtype_and_sums_stay_in_32_bits(
    recipe,
):
    layer = make_layer(recipe, bias=False)
    x = randn((3, 5), dtype=F32)
    dy = torch.ones(3, 6)
    expected = results(layer, x, dy)
    with amp.autocast(BF16):
        ours = results(layer, x, dy)
    bitwise(ours, expected)
    with torch.autocast("cpu", BF16):
        y, *gradients = results(layer, x, dy.bfloat16())
    bitwise(y, expected[0].bfloat16())
    bitwise(tuple(gradients), expected[1:])


def test_a_gradient_of_a_gradient_is_an_error():
    layer = make_layer("tensorwise")
    x = randn((3, 5), dtype=F32).requires_grad_()
    loss = layer(x).square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_convert_keeps_parameters_hooks_and_names_and_takes_a_filter():
    model = make_model("plain")
    parameters = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))

    def is_chosen(module, name):
        return name != "2" and module.out_features > 3

    fp8.convert(model, "rowwise", is_chosen)
    classes = [type(layer) for layer in model[::2]]
    assert classes == [fp8.Float8Linear, nn.Linear, nn.Linear]
    for name, parameter in model.named_parameters():
        assert parameters[name] is parameter
    bitwise(model.state_dict(), state)
    model(torch.ones(2, 6))
    assert calls == ["hook"]


@pytest.mark.skipif(IS_OLD, reason="torch 2.6 does not compile DisableTorchFunction")
@each_recipe
def test_compiled_checkpointed_and_repeated_it_is_bitwise_the_same(recipe):
    layer = make_layer(recipe, 48, 64)
    x = randn((7, 64), dtype=F32)
    dy = randn((7, 48), dtype=F32)
    expected = results(layer, x, dy)
    again = copy.deepcopy(layer)
    again.forward = partial(activation_checkpoint.checkpoint, again.forward)
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
    for each in (layer, again, compiled):
        bitwise(results(each, x, dy), expected)


@pytest.fixture(scope="module")
def trained():
    """Return train(recipe): the loss after 60 steps on Python's argparse."""
    text = Path(argparse.__file__).read_bytes()
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @functools.cache
    def train(recipe):
        torch.manual_seed(0)
        model = fp8.language_model(C=64, heads=2, layers=1)
        if recipe:
            fp8.convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            starts = torch.randint(len(text) - 32, (8, 1))
            window = text[starts + torch.arange(33)].long()
            optimizer.zero_grad()
            logits = model(window[:, :-1])
            loss = fp8.language_loss(logits, window[:, 1:])
            loss.backward()
            optimizer.step()
        return loss.item()

    return train


@each_recipe
def test_a_language_model_trains_as_in_fp32_to_one_percent(recipe, trained):
    assert trained(recipe) == pytest.approx(trained(None), rel=0.01)
    assert trained(recipe) != trained(None)


# ---- several ranks


def part(tensor, dim):
    """Return this rank's part, if the dimension is split."""
    if dim is None:
        return tensor
    parts = tensor.chunk(pool.world_size(), dim)
    return parts[pool.rank()]


@pytest.mark.parametrize("dim", [0, 1])
@each_recipe
@pool.on(2, 3, 4)
def test_shards_and_their_gather_are_bitwise_those_of_one_device(recipe, dim):
    N = pool.world_size()
    for block in fp8.RECIPES[recipe][:2]:
        x = wide((128 * N, 128 * N))
        expected = fp8.quantize(x, block)
        mine = part(x, dim)
        shard = fp8.quantize(mine, block, fp8.E4M3, dim, pool.group())
        values, scale = bits(expected)
        if block[dim]:
            scale = part(scale, dim)
        values = part(values, dim)
        bitwise(bits(shard), (values, scale))
        whole = fp8.all_gather(shard, dim, pool.group())
        bitwise(bits(whole), bits(expected))


@pytest.mark.parametrize("bad", [INF, NAN])
@pool.on(2)
def test_inf_and_nan_of_one_rank_reach_all(bad):
    x = torch.ones(2, 2)
    if pool.rank() == 1:
        x[0, 0] = bad
    shard = fp8.quantize(x, split=0, process_group=pool.group())
    back = fp8.dequantize(shard)
    assert back.isnan().all()


def layer_and_data(recipe, split, dtype):
    """A layer on one device and split, and x and dy of all, on one device."""
    N = pool.world_size()
    size = 128 * N if recipe == "deepseek" else 32 * N
    layer = make_layer(recipe, size, size, dtype)
    weight = wide((size, size), seed=3, dtype=dtype)
    layer.weight.data = weight * 2.0**-20
    ours = copy.deepcopy(layer)
    fp8.parallelize(ours, split, pool.group())
    x = wide((6 * N, size), seed=1, dtype=dtype)
    dy = wide((6 * N, size), seed=2, dtype=dtype)
    return layer, ours, x, dy


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@each_recipe
@pool.on(2, 3)
def test_a_sharded_layer_is_bitwise_one_device_that_adds_in_the_order_of_ranks(recipe, dtype):
    N = pool.world_size()
    layer, ours, x, dy = layer_and_data(recipe, "shard", dtype)
    of_ranks = []
    parts = zip(x.chunk(N), dy.chunk(N), strict=True)
    for x_part, dy_part in parts:
        of_ranks.append(results(layer, x_part, dy_part))
    y, dx, _ = of_ranks[pool.rank()]
    dw = of_ranks[0][2]
    for *_, other in of_ranks[1:]:
        dw = dw + other
    x = part(x, 0)
    dy = part(dy, 0)
    found = results(ours, x, dy)
    expected = y, dx, part(dw, 0)
    bitwise(found, expected)


DIMS = {
    "column": (None, 1, 0),
    "row": (1, None, 1),
}  # that is split: of x, of y, of the weight


@pytest.mark.parametrize("split", DIMS)
@each_recipe
@pool.on(2, 3)
def test_column_and_row_layers_compute_as_one_device(recipe, split):
    layer, ours, x, dy = layer_and_data(recipe, split, F64)
    of_x, of_y, of_weight = DIMS[split]
    y, dx, dw = results(layer, x, dy)
    x = part(x, of_x)
    dy = part(dy, of_y)
    found = results(ours, x, dy)
    expected = (
        part(y, of_y),
        part(dx, of_x),
        part(dw, of_weight),
    )
    for each, one_device in zip(found, expected, strict=True):
        within(each, one_device, 1e-13)
    if recipe == "tensorwise":  # sums of products of e4m3 are exact in float64
        bitwise(found[0], expected[0])


@each_recipe
@pool.on(2)
def test_a_sharded_layer_gathers_a_byte_per_weight_twice(recipe):
    _, ours, x, dy = layer_and_data(recipe, "shard", F32)
    with Collectives() as seen:
        results(ours, part(x, 0), part(dy, 0))
    sizes = [size for name, size in seen.calls if name == "allgather_"]
    weight = ours.weight.numel() * 2
    assert sorted(sizes)[-2:] == [weight] * 2
    assert sum(sizes) <= 2 * weight * (1 + 4 / 32)
    assert seen.bytes_of("alltoall_base_") == 4 * weight


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ddp", "ddp:DistributedDataParallel"),
        ("ddp", claims.KINDS["ddp"].pytorchs),
        ("zero2", claims.KINDS["zero2"].ours),
        ("zero3", claims.KINDS["zero3"].ours),
        ("fsdp", claims.KINDS["fsdp"].ours),
        pytest.param(
            "fsdp",
            claims.KINDS["fsdp"].pytorchs,
            marks=pytest.mark.skipif(IS_OLD, reason="torch 2.6 has no streams of CPUs"),
        ),
    ],
)
@pool.on(2)
def test_it_trains_bitwise_as_one_device_under_data_parallelism(kind, name):
    make = partial(Trainer, kind, claims.resolve(name))

    def converted():
        return fp8.convert(make_model("plain"), "rowwise")

    registry._problems.clear()
    with claims.default_group(pool.group()):
        trains_as_one_device(make, converted, "adamw", True)
    assert not registry._problems


# ---- misuse


@pytest.mark.parametrize(
    ("recipe", "split", "message"),
    [
        ("deepseek", "column", "192 outputs .* 2 ranks .* 128"),
        ("mxfp8", "row", "80 inputs .* 2 ranks .* 32"),
        ("tensorwise", "rows", "'shard', 'column' or 'row'"),
    ],
    ids=["deepseek", "mxfp8", "an unknown split"],
)
@pool.on(2)
def test_what_cannot_be_split_is_an_error(recipe, split, message):
    layer = make_layer(recipe, 192, 80)
    with pytest.raises(ValueError, match=message):
        fp8.parallelize(layer, split, pool.group())


@pool.on(2)
def test_a_layer_that_differs_between_ranks_is_an_error():
    recipe = ["tensorwise", "rowwise"][pool.rank()]
    layer = make_layer(recipe)
    with pytest.raises(ValueError, match="all ranks must have the same layer"):
        fp8.parallelize(layer, "shard", pool.group())


@pool.on(2)
def test_a_rank_outside_of_the_group_is_an_error():
    groups = [dist.new_group([rank]) for rank in (1, 0)]
    other = groups[pool.rank()]
    layer = make_layer("tensorwise")
    with pytest.raises(ValueError, match="not in process_group"):
        fp8.parallelize(layer, "shard", other)


def test_other_misuse_is_named():
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="'fp4' must be one of tensorwise"):
        fp8.convert(nn.Linear(2, 2), "fp4")
    with pytest.raises(ValueError, match="call convert"):
        fp8.parallelize(nn.Linear(2, 2), "shard")
    with pytest.raises(ValueError, match="multiple of 128"):
        fp8.quantize(x, (1, 128), split=1)

"""flash_attention.py: what tests/claims leaves open. Blocks of any size, the kernels, and the cost.

The kernels run on a CPU under Triton's interpreter, in a process that has imported Triton with
TRITON_INTERPRET=1, and under --device cuda on the GPU.
"""

import importlib.util
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import environment
import pool
import pytest
import torch
import torch.multiprocessing as mp
from claims import attention
from claims.attention import bytes_kept, dense_attention, output_and_gradients
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import amp
import flash_attention as flash

on_cpu = pytest.mark.cpu


def make_inputs(S=7, Skv=7, batch=2, heads=2, shared=2, *sizes, dtype=torch.float64):
    """Return q, k, v and a gradient of the output, strided as a projection's output in a model."""
    inputs = attention.make_inputs(S, Skv, batch, heads, shared, *sizes)
    projections = [x.to(dtype).transpose(1, 2).contiguous() for x in inputs]
    return [x.transpose(1, 2) for x in projections]


def assert_all_close(found, expected, tolerance=1e-12):
    expected = [x.to(found[0].dtype) for x in expected]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 9])
def test_the_idea_equals_dense_attention_in_blocks_of_any_size(block_size, causal):
    inputs = make_inputs()
    options = {"causal": causal, "block_size": block_size}
    found = output_and_gradients(flash.online_attention, *inputs, **options)
    assert_all_close(found, output_and_gradients(dense_attention, *inputs, causal=causal))


# ---- the loop

few = st.integers(0, 3)
some = st.integers(0, 40)


@on_cpu
@given(some, some, few, few, few, few, some, st.booleans())
def test_any_sizes_in_blocks_of_any(S, Skv, batch, group, shared, size, block_size, causal):
    """`group` + 1 heads of queries share a head of keys."""
    heads = (group + 1) * (shared + 1)
    inputs = make_inputs(S, Skv, batch, heads, shared + 1, size, 3)
    options = {"causal": causal, "scale": -2.0}
    expected = output_and_gradients(dense_attention, *inputs, **options)
    ours = partial(flash.flash_attention, block_size=block_size + 1)
    for each in (ours, flash.naive_attention):
        assert_all_close(output_and_gradients(each, *inputs, **options), expected)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = filter(torch.is_tensor, tree_leaves(result))
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


in_blocks_of_7 = partial(flash.flash_attention, block_size=7)


@on_cpu
def test_no_tensor_is_larger_than_the_inputs():
    inputs = make_inputs(100, 100)
    with Largest() as largest:
        output_and_gradients(in_blocks_of_7, *inputs)
    assert largest.elements == inputs[0].numel()


@on_cpu
def test_the_inputs_the_output_and_a_number_for_each_query_are_kept():
    q, k, v, output = make_inputs(26, 33)
    lse = output[..., 0]
    expected = sum(8 * x.numel() for x in (q, k, v, output, lse))
    assert bytes_kept(in_blocks_of_7, q, k, v) == expected


@on_cpu
@pytest.mark.parametrize("causal", [False, True])
def test_operations_are_those_of_the_keys_that_a_block_sees(causal):
    """14D for each query, and each key that the last query of its block sees."""
    inputs = make_inputs(20, 30)
    with FlopCounterMode(display=False) as flops:
        output_and_gradients(in_blocks_of_7, *inputs, causal=causal)
    pairs = 20 * 30
    if causal:
        pairs = 7 * (10 + 7) + 7 * (10 + 14) + 6 * 30
    assert flops.get_total_flops() == 2 * 2 * pairs * 14 * 8


@on_cpu
def test_dropout_differs_from_block_to_block_and_from_call_to_call():
    """With the identity as v, the output is the weights that are left."""
    q, k, v, _ = make_inputs(64, 64, 2, 2, 2, 64)
    identity = torch.eye(64, dtype=q.dtype).expand_as(v)
    masks = set()
    for _ in range(2):
        left = flash.flash_attention(q, k, identity, dropout_p=0.3, block_size=16) != 0
        for rows in left.split(16, 2):
            masks |= {str(block.tolist()) for block in rows.split(16, 3)}
    assert len(masks) == 2 * 4 * 4


@on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_summed_in_32(dtype):
    """The error is that of rounding the results."""
    inputs = make_inputs(500, 500, dtype=dtype)
    wide = [x.double() for x in inputs]
    found = output_and_gradients(flash.flash_attention, *inputs, causal=True)
    exact = output_and_gradients(dense_attention, *wide, causal=True)
    for ours, plain in zip(found, exact, strict=True):
        assert (ours - plain).norm() <= torch.finfo(dtype).eps * plain.norm()
        assert ours.dtype == dtype
    _, lse = flash.flash_forward(*inputs[:3])
    assert lse.dtype == torch.float32


@on_cpu
@pytest.mark.parametrize("autocast", [amp.autocast, partial(torch.autocast, "cpu")])
def test_autocast_does_not_reach_inside(autocast):
    inputs = make_inputs(40, 40, dtype=torch.float32)
    expected = output_and_gradients(flash.flash_attention, *inputs)
    with autocast(dtype=torch.bfloat16):
        found = output_and_gradients(flash.flash_attention, *inputs)
    assert_all_close(found, expected, tolerance=0)


@on_cpu
def test_gradients_of_gradients_are_refused():
    q, k, v, _ = make_inputs()
    output = flash.flash_attention(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(output.sum(), q, create_graph=True)


# ---- the loop and the kernels

needs_triton = pytest.mark.skipif(flash.triton is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def on_kernels():
    """Return a function that runs a body where kernels can run."""
    if environment.DEVICE_TYPE == "cuda":
        yield lambda body, *args: pool.run(1, body, *args)[0]
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        executor = ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"))
        executor.submit(os.getpid).result(60)  # it starts now

    def run(body, *args):
        try:
            return executor.submit(body, *args).result(60)
        except Exception as error:
            if "only 0-dimensional arrays can be converted" in str(error):  # in Triton 3.2
                pytest.skip(f"Triton {flash.triton.__version__} interprets with numpy < 2.4 only")
            raise

    with executor:
        yield run


BOTH = pytest.mark.parametrize(
    "how",
    [
        ("torch", torch.float64, 1e-12),
        pytest.param(("triton", torch.float32, 2e-6), marks=needs_triton),
    ],
    ids=["torch", "triton"],
)


def body_parts_merge(S, cut, causal, kernel, dtype, tolerance):
    """Of 10 keys, the first `cut`, which all queries see, and the others, aligned at the end."""
    q, k, v, grad = make_inputs(S, 10, dtype=dtype)
    first_k, second_k = k.split([cut, 10 - cut], 2)
    first_v, second_v = v.split([cut, 10 - cut], 2)
    forward = partial(flash.flash_forward, q, kernel=kernel)
    backward = partial(flash.flash_backward, grad, q, kernel=kernel)

    first = forward(first_k, first_v)
    second = forward(second_k, second_v, causal)
    merged = flash.merge(*first, *second)
    gradients = [
        backward(first_k, first_v, *merged),
        backward(second_k, second_v, *merged, causal),
    ]

    dq, dk, dv = zip(*gradients, strict=True)
    found = [merged[0], sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)]
    whole = output_and_gradients(dense_attention, q, k, v, grad, causal=causal)
    assert_all_close(found, whole, tolerance)


@BOTH
@pytest.mark.parametrize(
    ("S", "cut", "causal"),
    [(9, 10, False), (4, 6, True), (12, 0, True)],
    ids=["no second part", "causal", "queries that see nothing"],
)
def test_parts_of_the_keys_merge_into_the_whole(S, cut, causal, how, on_kernels):
    on_kernels(body_parts_merge, S, cut, causal, *how)


# ---- the kernels


SIZES = {  # S, Skv, heads of queries and of keys, D, causal, scale
    "no query": (0, 5, 2, 2, 8, True, None),
    "no key": (5, 0, 2, 2, 8, False, None),
    "more keys": (65, 130, 2, 1, 40, True, 0.0),
    "more queries": (130, 65, 1, 1, 128, True, -0.1),
    "shared heads": (70, 70, 4, 2, 16, False, 1),
    "large scores": (64, 192, 2, 2, 8, False, 100),
}
DTYPES = [torch.float32, torch.float16]
if environment.DEVICE_TYPE == "cuda":
    DTYPES.append(torch.bfloat16)  # for which the interpreter is wrong


def body_any_sizes(dtype, S, Skv, heads, shared, D, causal, scale):
    inputs = make_inputs(S, Skv, 2, heads, shared, D, dtype=dtype)
    inputs[2] = inputs[2].mT.contiguous().mT  # the kernels need rows that are contiguous
    wide = [x.double() for x in inputs]
    options = {"causal": causal, "scale": scale}
    ours = partial(flash.flash_attention, kernel="triton")
    found = output_and_gradients(ours, *inputs, **options)
    expected = output_and_gradients(dense_attention, *wide, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    assert {x.dtype for x in found} == {dtype}
    assert_all_close([x.double() for x in found], expected, tolerance * max(1, scale or 1))
    if environment.DEVICE_TYPE == "cuda":
        again = output_and_gradients(ours, *inputs, **options)
        assert_all_close(again, found, tolerance=0)


@needs_triton
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_any_sizes_and_scales(name, dtype, on_kernels):
    on_kernels(body_any_sizes, dtype, *SIZES[name])


@on_cpu
@needs_triton
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", flash.BLOCKS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_for_an_h100_and_fit_into_the_shared_memory_of_smaller_gpus(
    kernel, D, tmp_path, monkeypatch
):
    """This needs no GPU. Products are those of Hopper's tensor cores."""
    from triton.backends import compiler
    from triton.compiler import ASTSource

    if hasattr(compiler, "AttrsDescriptor"):
        pytest.skip(f"Triton {flash.triton.__version__} is told otherwise what is aligned")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, step, num_warps, num_stages = flash.BLOCKS[kernel][D]
    names = kernel.arg_names
    constants = dict(zip(names[-5:], (True, D, D, block, step), strict=True))
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys(names[: names.index("q_b")], "*bf16")
    types |= {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names) - 5)}
    source = ASTSource(kernel, {name: types[name] for name in names}, constants, aligned)

    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = flash.triton.compile(source, compiler.GPUTarget("cuda", 90, 32), options)

    assert compiled.metadata.shared <= 99 * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"]


@needs_triton
@pytest.mark.skipif(environment.DEVICE_TYPE == "cpu", reason="needs --device cuda")
@pool.on(1)
def test_on_a_gpu_the_kernels_run_if_they_can():
    q = torch.ones(2, 2, 7, 8)
    assert flash.runs_kernels(None, q, q, None)
    assert not flash.runs_kernels(None, q.double(), q.double(), None)


@on_cpu
def test_without_triton_the_loop_runs_and_the_kernels_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # import raises ModuleNotFoundError
    spec = importlib.util.spec_from_file_location("without_triton", flash.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    q, k, v, _ = make_inputs()
    output = without.flash_attention(q, k, v)
    assert torch.equal(output, flash.flash_attention(q, k, v))
    with pytest.raises(ValueError, match="pip install triton"):
        without.flash_attention(q, k, v, kernel="triton")


X = torch.ones(2, 2, 7, 4)
WRONG = {
    "3 heads, .* the 2 heads": {"q": torch.ones(2, 3, 7, 4)},
    r"q \(1, 2, 7, 4\)": {"q": X[:1]},
    "v torch.float64": {"v": X.double()},
    r"dropout_p=1\.0": {"dropout_p": 1.0},
    "causal must be True or False": {"causal": None},  # PyTorch's fourth argument is a mask
    "block_size=0": {"block_size": 0},
    "kernel='cuda'": {"kernel": "cuda"},
}
OBSTACLES = {
    "no torch.float64": dict.fromkeys("qkv", X.double()),
    "no dropout": {"dropout_p": 0.5},
    "head size of at most 128": dict.fromkeys("qkv", torch.ones(1, 1, 7, 136)),
    "one head size": {"v": torch.ones(2, 2, 7, 8)},
}


@on_cpu
@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_an_error_with_the_numbers(words):
    arguments = dict.fromkeys("qkv", X) | WRONG[words]
    with pytest.raises(ValueError, match=words):
        flash.flash_attention(**arguments)


@on_cpu
@needs_triton
@pytest.mark.parametrize("words", OBSTACLES)
def test_what_the_kernels_cannot_do_is_an_error_that_says_so(words, monkeypatch):
    arguments = dict.fromkeys("qkv", X) | OBSTACLES[words]
    with pytest.raises(ValueError, match="q is on cpu"):
        flash.flash_attention(**arguments, kernel="triton")
    monkeypatch.setattr(flash, "INTERPRETED", True)
    with pytest.raises(ValueError, match=words):
        flash.flash_attention(**arguments, kernel="triton")

"""flash_attention.py: what tests/claims leaves open. Blocks of any size, the kernels, and the cost.

The kernels run on a CPU under Triton's interpreter, in a process that has imported Triton with
TRITON_INTERPRET=1, and under --device cuda on the GPU.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace

import environment
import pool
import pytest
import torch
import torch.multiprocessing as mp
from claims import attention
from claims.attention import (
    bytes_kept,
    dense_attention,
    each_alone,
    make_documents,
    output_and_gradients,
)
from hypothesis import given
from hypothesis import strategies as st
from shared import Watch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import amp
import flash_attention as flash

on_cpu = pytest.mark.cpu
X = torch.ones(2, 2, 7, 4)


def make_inputs(S=7, Skv=7, batch=2, heads=2, shared=2, *sizes, dtype=torch.float64):
    """Return q, k, v and a gradient of the output, strided as a projection's output in a model."""
    inputs = attention.make_inputs(S, Skv, batch, heads, shared, *sizes)
    projections = [x.to(dtype).transpose(1, 2).contiguous() for x in inputs]
    return [x.transpose(1, 2) for x in projections]


def assert_all_close(found, expected, tolerance=1e-12):
    expected = [x.to(found[0].dtype) for x in expected]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_idea_equals_dense_attention():
    inputs = make_inputs()
    ours = partial(flash.online_attention, block_size=3)
    for causal in (False, True):
        found = output_and_gradients(ours, *inputs, causal=causal)
        expected = output_and_gradients(dense_attention, *inputs, causal=causal)
        assert_all_close(found, expected)


# ---- the loop

few = st.integers(0, 3)
some = st.integers(0, 40)


@on_cpu
@given(
    S=some,
    Skv=some,
    batch=few,
    group=few,
    shared=few,
    size=few,
    block_size=some,
    causal=st.booleans(),
)
def test_any_sizes_in_blocks_of_any(S, Skv, batch, group, shared, size, block_size, causal):
    """`group` + 1 heads of queries share a head of keys."""
    heads = (group + 1) * (shared + 1)
    inputs = make_inputs(S, Skv, batch, heads, shared + 1, size, 3)
    options = {"causal": causal, "scale": -2.0}
    expected = output_and_gradients(dense_attention, *inputs, **options)
    ours = partial(flash.flash_attention, block_size=block_size + 1)
    for each in (ours, flash.naive_attention):
        found = output_and_gradients(each, *inputs, **options)
        assert_all_close(found, expected)


def test_a_scale_for_each_channel_or_key_is_an_error():
    q, k, v, _ = make_inputs()
    with pytest.raises(ValueError, match="last dimension"):
        flash.flash_attention(q, k, v, scale=torch.ones(q.shape[-1]))


@on_cpu
@pytest.mark.parametrize("shape", [(), (2, 1, 1)], ids=["one scale", "one for each head"])
@pytest.mark.parametrize("attention", [flash.flash_attention, flash.naive_attention])
def test_a_scale_that_trains_gets_its_gradient(attention, shape):
    q, k, v, grad = make_inputs()
    scale = torch.full(shape, 0.7, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, scale)]
    ours = attention(q, k, v, True, scale)
    scaled = q * scale
    plain = dense_attention(scaled, k, v, True, 1.0)
    found = torch.autograd.grad(ours, leaves, grad)
    expected = torch.autograd.grad(plain, leaves, grad)
    assert_all_close(found, expected)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self.elements = max(self.elements, tensor.numel())
        return result


in_blocks_of_7 = partial(flash.flash_attention, block_size=7)


@on_cpu
def test_no_tensor_is_larger_than_the_inputs_and_lse_is_kept_besides_them_and_the_output():
    inputs = make_inputs(100, 100)
    with Largest() as largest:
        output_and_gradients(in_blocks_of_7, *inputs)
    assert largest.elements == inputs[0].numel()
    lse = inputs[0][..., 0]
    expected = sum(8 * x.numel() for x in (*inputs, lse))
    assert bytes_kept(in_blocks_of_7, *inputs[:3]) == expected


@on_cpu
def test_operations_are_those_of_the_keys_that_a_block_sees():
    """14D for each query, and each key that the last query of its block sees."""
    inputs = make_inputs(20, 30)
    with FlopCounterMode(display=False) as flops:
        output_and_gradients(in_blocks_of_7, *inputs, causal=True)
    pairs = 7 * (10 + 7) + 7 * (10 + 14) + 6 * 30
    assert flops.get_total_flops() == 2 * 2 * pairs * 14 * 8


number = st.integers(0, 2)


@on_cpu
@given(
    ids=st.lists(
        st.tuples(number, number),
        min_size=1,
        max_size=20,
    ),
    shared=st.integers(1, 2),
    causal=st.booleans(),
)
def test_any_documents_are_computed_as_alone(ids, shared, causal):
    documents = torch.tensor(ids).mT  # two sequences
    S = len(ids)
    inputs = make_inputs(S, S, 2, 2, shared, 4, 3)
    expected = each_alone(documents, *inputs, causal=causal)
    for attend in (in_blocks_of_7, flash.naive_attention):
        found = output_and_gradients(attend, *inputs, causal=causal, documents=documents)
        assert_all_close(found, expected)


@on_cpu
def test_backward_writes_no_zeros_for_the_rest_of_a_sequence():
    """That of a slice does, for each document. That of a split does not."""
    *inputs, grad = make_inputs(20, 20)
    leaves = [x.requires_grad_() for x in inputs]
    ids = torch.arange(20).expand(2, 20) // 4
    output = flash.flash_attention(*leaves, documents=ids)
    with Watch(lambda: None) as operators:
        torch.autograd.grad(output, leaves, grad)
    names = {name for name, _ in operators.seen}
    assert "aten::cat" in names
    assert not names & {"aten::slice_backward", "aten::select_backward"}


@on_cpu
@pytest.mark.parametrize(("B", "S"), [(0, 3), (2, 0)], ids=["no sequence", "no token"])
def test_documents_may_be_none_at_all(B, S):
    ids = torch.zeros(B, S, dtype=torch.long)
    q = torch.ones(B, 2, S, 4)
    for attend in (flash.flash_attention, flash.naive_attention):
        assert attend(q, q, q, documents=ids).shape == q.shape


@on_cpu
def test_a_document_costs_its_own_square():
    inputs = make_inputs(21, 21)
    first = [1] * 9 + [0] * 5 + [1] * 7
    second = [0] * 20 + [3]
    ids = torch.tensor([first, second])
    with FlopCounterMode(display=False) as flops:
        output_and_gradients(flash.flash_attention, *inputs, documents=ids)
    pairs = 9**2 + 5**2 + 7**2 + 20**2 + 1
    assert flops.get_total_flops() == pairs * 2 * 14 * 8


@on_cpu
def test_dropout_differs_between_documents():
    q, k, *_ = make_inputs(32, 32, 1, 1, 1, 32)
    v = torch.eye(32, dtype=q.dtype).expand_as(q)  # so the output is the weights that are left
    ids = torch.arange(32)[None] // 16
    output = flash.flash_attention(q, k, v, dropout_p=0.3, documents=ids)
    kept = output[0, 0] != 0
    first = kept[:16, :16]
    second = kept[16:, 16:]
    assert not torch.equal(first, second)


@on_cpu
def test_dropout_differs_from_from_block_to_block_and_from_call_to_call():
    q, k, *_ = make_inputs(64, 64, 1, 1, 1, 64)
    v = torch.eye(64, dtype=q.dtype).expand_as(q)  # so the output is the weights that are left
    masks = set()
    for _ in range(2):
        output = flash.flash_attention(q, k, v, dropout_p=0.3, block_size=16)
        for rows in output[0, 0].split(16):
            for block in rows.split(16, 1):
                mask = block != 0
                masks.add(str(mask.tolist()))
    assert len(masks) == 2 * 4 * 4


@on_cpu
def test_16_bits_are_summed_in_32_also_under_autocast():
    """The error is that of rounding the results."""
    inputs = make_inputs(500, 500, dtype=torch.bfloat16)
    wide = [x.double() for x in inputs]
    with amp.autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        found = output_and_gradients(flash.flash_attention, *inputs, causal=True)
    exact = output_and_gradients(dense_attention, *wide, causal=True)
    for ours, plain in zip(found, exact, strict=True):
        error = (ours - plain).norm()
        assert error <= torch.finfo(torch.bfloat16).eps * plain.norm()
        assert ours.dtype == torch.bfloat16


@on_cpu
def test_gradients_of_gradients_are_refused():
    q, k, v, _ = make_inputs()
    output = flash.flash_attention(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(output, q, output, create_graph=True)


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


def body_parts_merge(
    S,
    cut,
    kernel,
    dtype,
    tolerance,
):
    """Of 10 keys, the first `cut`, which all queries see, and the others, aligned at the end."""
    q, k, v, grad = make_inputs(S, 10, dtype=dtype)
    first = [x[:, :, :cut] for x in (k, v)]
    second = [x[:, :, cut:] for x in (k, v)]
    forward = partial(flash.flash_forward, q, kernel=kernel)
    backward = partial(flash.flash_backward, grad, q, kernel=kernel)

    merged = flash.merge(*forward(*first), *forward(*second, causal=True))
    first_dq, *first_gradients = backward(*first, *merged)
    second_dq, *second_gradients = backward(*second, *merged, causal=True)

    both = zip(first_gradients, second_gradients, strict=True)
    found = [merged[0], first_dq + second_dq]
    found += [torch.cat(pair, 2) for pair in both]
    whole = output_and_gradients(dense_attention, q, k, v, grad, causal=True)
    assert_all_close(found, whole, tolerance)


NOTHING_SEEN = {  # number of queries, size of the first part
    "by the first query in the second part": (4, 7),
    "by the first queries": (12, 0),
}


@needs_triton
@pytest.mark.parametrize("where", NOTHING_SEEN)
def test_parts_of_the_keys_merge_into_the_whole(where, on_kernels):
    S, cut = NOTHING_SEEN[where]
    body_parts_merge(S, cut, "torch", torch.float64, 1e-12)
    on_kernels(body_parts_merge, S, cut, "triton", torch.float32, 2e-6)


# ---- the kernels

SIZES = {  # S, Skv, batch, heads of queries and of keys, D; then causal, scale
    "no key": ((5, 0, 2, 2, 2, 8), False, None),
    "more keys": ((65, 130, 2, 2, 1, 40), True, 0.0),
    "more queries": ((130, 65, 1, 1, 1, 128), True, -0.1),
    "shared heads": ((70, 70, 1, 4, 2, 16), False, 1),
    "large scores": ((64, 192, 1, 2, 2, 8), False, 100),
}


def body_any_sizes(sizes, causal, scale, dtype):
    inputs = make_inputs(*sizes, dtype=dtype)
    inputs[2] = inputs[2].mT.contiguous().mT  # the kernels need rows that are contiguous
    wide = [x.double() for x in inputs]
    options = {"causal": causal, "scale": scale}
    ours = partial(flash.flash_attention, kernel="triton")
    found = output_and_gradients(ours, *inputs, **options)
    expected = output_and_gradients(dense_attention, *wide, **options)
    tolerance = 1e-5
    if dtype == torch.float16:
        tolerance = 8 * torch.finfo(dtype).eps
    assert {x.dtype for x in found} == {dtype}
    found = [x.double() for x in found]
    assert_all_close(found, expected, tolerance * max(1, scale or 1))


@needs_triton
@pytest.mark.parametrize("name", SIZES)
def test_kernels_with_any_sizes_and_scales(name, on_kernels):
    dtype = torch.float16 if name == "more keys" else torch.float32
    on_kernels(body_any_sizes, *SIZES[name], dtype)


def body_documents(causal):
    ids = make_documents(70)
    inputs = make_inputs(70, 70, 2, 4, 2, dtype=torch.float32)
    wide = [x.double() for x in inputs]
    ours = partial(flash.flash_attention, kernel="triton", documents=ids)
    found = output_and_gradients(ours, *inputs, causal=causal)
    expected = each_alone(ids, *wide, causal=causal)
    assert_all_close(found, expected, 1e-5)


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_compute_documents_as_alone(causal, on_kernels):
    on_kernels(body_documents, causal)


def source_of(kernel, block, step):
    """The kernel for causal attention in bf16, with heads of size 128."""
    from triton.compiler import ASTSource

    names = kernel.arg_names
    values = (True, 128, 128, block, step)
    constants = dict(zip(names[-5:], values, strict=True))
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys(names[: names.index("q_b")], "*bf16")
    types |= {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i in range(len(names) - 5)}
    return ASTSource(kernel, types, constants, attributes)


@on_cpu
@needs_triton
@pytest.mark.parametrize("kernel", flash.BLOCKS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_for_an_h100_and_fit_into_the_shared_memory_of_smaller_gpus(
    kernel,
    tmp_path,
    monkeypatch,
):
    """This needs no GPU. Products are those of Hopper's tensor cores."""
    from triton.backends import compiler

    if hasattr(compiler, "AttrsDescriptor"):
        pytest.skip(f"Triton {flash.triton.__version__} is told otherwise what is aligned")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, step, num_warps, num_stages = flash.BLOCKS[kernel][128]
    compiled = flash.triton.compile(
        source_of(kernel, block, step),
        compiler.GPUTarget("cuda", 90, 32),
        {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )
    assert compiled.metadata.shared <= 99 * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"]


@needs_triton
@pytest.mark.skipif(environment.DEVICE_TYPE == "cpu", reason="needs --device cuda")
@pool.on(1)
def test_on_a_gpu_the_kernels_run():
    q = X.cuda()
    assert flash.runs_kernels(None, q, q, None)


@on_cpu
@needs_triton
@pytest.mark.parametrize("lacks", ["CUDA", "a C compiler"])
def test_the_loop_runs_where_the_kernels_cannot(lacks, monkeypatch):
    q = SimpleNamespace(
        is_cuda=True,
        device="cuda",
        dtype=torch.float32,
        shape=X.shape,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "COMPILER", "gcc")
    assert flash.runs_kernels(None, q, q, None)
    if lacks == "CUDA":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.setattr(flash, "COMPILER", None)
    assert not flash.runs_kernels(None, q, q, None)


REFUSED = {
    "3 heads, .* the 2 heads": {"q": torch.ones(2, 3, 7, 4)},
    r"q \(1, 2, 7, 4\)": {"q": X[:1]},
    "causal must be True or False": {"causal": None},  # PyTorch's fourth argument is a mask
    "block_size=-1": {"block_size": -1},
    "one integer for each": {"documents": torch.ones(2, 6, dtype=torch.long)},
    "gets no gradient": {"dropout_p": torch.tensor(0.5, requires_grad=True)},
    "no dropout": {"dropout_p": 0.5, "kernel": "triton"},
    "head size": {"v": torch.ones(2, 2, 7, 8), "kernel": "triton"},
}


@on_cpu
@needs_triton
@pytest.mark.parametrize("words", REFUSED)
def test_what_would_be_silently_wrong_is_an_error(words, monkeypatch):
    monkeypatch.setattr(flash, "INTERPRETED", True)
    arguments = dict.fromkeys("qkv", X) | REFUSED[words]
    with pytest.raises(ValueError, match=words):
        flash.flash_attention(**arguments)

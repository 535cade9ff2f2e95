"""flash_attention.py: what tests/claims leaves open. Blocks of any size, the kernels, and the cost.

The kernels run on a CPU under Triton's interpreter, in a process that has imported Triton with
TRITON_INTERPRET=1, and under --device cuda on the GPU.
"""

import importlib.util
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace

import environment
import pool
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from claims import registry
from claims.attention import attend, dense_weights
from hypothesis import example, given
from hypothesis import strategies as st
from shared import assert_equal, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import flash_attention as flash


def make_inputs(S=7, Skv=7, B=2, H=2, Hkv=2, D=4, D_v=None, dtype=torch.float64):
    """-> q, k, v and a gradient of the output, strided as a projection's output is in a model"""
    D_v = D_v or D
    shapes = [(B, S, H, D), (B, Skv, Hkv, D), (B, Skv, Hkv, D_v), (B, S, H, D_v)]
    tensors = [randn(shape, seed=S + i).to(dtype) for i, shape in enumerate(shapes)]
    return [tensor.transpose(1, 2) for tensor in tensors]


def output_and_gradients(attention, q, k, v, grad_output):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def dense(q, k, v, causal=False, scale=None, mask=1.0):
    groups = q.shape[1] // k.shape[1]
    weights = dense_weights(q, k.repeat_interleave(groups, 1), causal, scale)
    return (weights * mask) @ v.repeat_interleave(groups, 1)


def assert_all_equal(ours, theirs, exact=False):
    for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert_equal(a, b, exact, name)


# ---- the loop


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(result)):
            self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.mark.cpu
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1)]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([(1, 1), (4, 4), (3, 5)]),
    st.integers(1, 50),
    st.booleans(),
    st.sampled_from([None, 0.3, -2.0]),
)
@example(0, (2, 2), 9, 4, (4, 4), 5, True, None)
@example(2, (6, 2), 26, 33, (3, 5), 7, True, 0.3)
def test_dense_attention_of_any_sizes_in_blocks_of_any(
    B, heads, S, Skv, sizes, block_size, causal, scale
):
    """No tensor of queries times keys is made. Kept are q, k, v, the output and a number per query.
    4d + 10d operations are for each query, and each key that the last query of its block sees."""
    H, Hkv = heads
    D, D_v = sizes
    inputs = make_inputs(S, Skv, B, H, Hkv, D, D_v)
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    ours = partial(flash.flash_attention, causal=causal, scale=scale, block_size=block_size)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, Largest() as largest, FlopCounterMode(display=False) as flops:
        found = output_and_gradients(ours, *inputs)

    expected = output_and_gradients(partial(dense, causal=causal, scale=scale), *inputs)
    naive = partial(flash.naive_attention, causal=causal, scale=scale)
    assert_all_equal(found, expected)
    assert_all_equal(output_and_gradients(naive, *inputs), expected)
    block = max(B, 1) * H * min(block_size, S) * min(block_size, Skv)
    repeated = B * H * Skv * max(sizes)  # keys, for each head of queries
    assert largest.elements <= max(block, repeated, 1, *(x.numel() for x in inputs))
    assert sum(saved) == sum(x.numel() for x in inputs) + B * H * S
    pairs = 0
    for start in range(max(0, S - Skv) if causal else 0, S, block_size):
        stop = min(start + block_size, S)
        pairs += (stop - start) * (Skv - S + stop if causal else Skv)
    assert flops.get_total_flops() == B * H * pairs * (8 * D + 6 * D_v)


@pytest.mark.cpu
def test_dropout_masks_each_block_differently_and_backward_as_forward():
    """With the identity as v, the output is the weights that are left."""
    q, k, v, grad_output = make_inputs(S=64, Skv=64, D=64)
    dropping = partial(flash.flash_attention, causal=True, dropout_p=0.3, block_size=16)
    torch.manual_seed(1)
    left = dropping(q, k, torch.eye(64, dtype=q.dtype).expand_as(v))
    mask = (left != 0).double() / 0.7

    torch.manual_seed(1)
    found = output_and_gradients(dropping, q, k, v, grad_output)

    assert_all_equal(
        found, output_and_gradients(partial(dense, causal=True, mask=mask), q, k, v, grad_output)
    )
    seen = dense_weights(q, k, causal=True) > 0
    assert abs((left != 0)[seen].double().mean() - 0.7) < 0.025  # a standard deviation is 0.005
    lower = mask[:, :, 16:, :48].unflatten(3, (3, 16)).unflatten(2, (3, 16))  # seen by block rows
    blocks = [lower[:, :, i, :, j] for i in range(3) for j in range(i + 1)]
    assert not any(torch.equal(a, b) for n, a in enumerate(blocks) for b in blocks[:n])
    assert not torch.equal(left, dropping(q, k, torch.eye(64, dtype=q.dtype).expand_as(v)))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_worse_than_pytorchs(dtype):
    """Errors against float64, of the same rounded inputs. lse stays in fp32."""
    inputs = make_inputs(S=500, Skv=500, D=32, dtype=dtype)
    exact = output_and_gradients(partial(dense, causal=True), *(x.double() for x in inputs))

    ours = output_and_gradients(partial(flash.flash_attention, causal=True), *inputs)

    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    theirs = output_and_gradients(sdpa, *inputs)
    for a, b, plain in zip(ours, theirs, exact, strict=True):
        assert a.dtype == dtype
        mine, pytorchs = ((x.double() - plain).norm() / plain.norm() for x in (a, b))
        assert mine <= min(1.01 * pytorchs, torch.finfo(dtype).eps)
    assert flash.flash_forward(*inputs[:3])[1].dtype == torch.float32


@pytest.mark.cpu
def test_autocast_does_not_reach_inside_and_a_checkpoint_draws_the_mask_again():
    attention = partial(flash.flash_attention, dropout_p=0.5)
    checkpointed = partial(torch.utils.checkpoint.checkpoint, attention, use_reentrant=False)
    inputs = make_inputs(S=40, Skv=40, dtype=torch.float32)
    results = []
    for run in (attention, checkpointed):
        for autocast in (False, True):
            torch.manual_seed(2)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results.append(output_and_gradients(run, *inputs))
    for result in results:
        assert_all_equal(result, results[0], exact=True)


@pytest.mark.cpu
def test_gradients_of_gradients_are_refused():
    q, k, v, _ = (x.requires_grad_() for x in make_inputs())
    loss = flash.flash_attention(q, k, v).square().sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# ---- parts of the keys


def check_parts_merge(S, cut, causal, kernel, dtype, tolerance):
    """Of 10 keys, the first `cut`, which all queries see, and the others, aligned at the end."""
    q, k, v, grad_output = make_inputs(S=S, Skv=10, dtype=dtype)
    forward = partial(flash.flash_forward, kernel=kernel)
    backward = partial(flash.flash_backward, kernel=kernel)
    parts = [(k[:, :, :cut], v[:, :, :cut], False), (k[:, :, cut:], v[:, :, cut:], causal)]

    merged = flash.merge(*forward(q, *parts[0]), *forward(q, *parts[1]))
    first, second = (
        backward(grad_output, q, k_part, v_part, *merged, causal=part_causal)
        for k_part, v_part, part_causal in parts
    )

    whole = flash.flash_forward(q, k, v, causal, kernel="torch")
    expected = flash.flash_backward(grad_output, q, k, v, *whole, causal, kernel="torch")
    dk, dv = (torch.cat(pair, 2) for pair in zip(first[1:], second[1:], strict=True))
    ours = [*merged, first[0] + second[0], dk, dv]
    torch.testing.assert_close(ours, [*whole, *expected], rtol=0, atol=tolerance)


PARTS = [(9, 5, False), (9, 10, False), (4, 6, True), (12, 0, True)]


@pytest.mark.cpu
@pytest.mark.parametrize(("S", "cut", "causal"), PARTS)
def test_parts_of_the_keys_merge_into_the_whole_and_have_their_gradients(S, cut, causal):
    check_parts_merge(S, cut, causal, "torch", torch.float64, 1e-12)


# ---- the kernels

needs_triton = pytest.mark.skipif(flash.triton is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def on_kernels():
    """-> a function that runs a body where kernels can run"""
    if environment.DEVICE_TYPE == "cuda":
        yield lambda body, *args: pool.run(1, body, *args)[0]
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        executor = ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"))
        executor.submit(os.getpid).result(60)  # it starts now
    with executor:
        yield lambda body, *args: executor.submit(body, *args).result(60)


def kernels_in_fp32(q, k, v, causal=False, scale=None):
    """For claims, which are in float64. The kernels do not have it."""
    q, k, v = (x.float() for x in (q, k, v))
    return flash.flash_attention(q, k, v, causal, scale, kernel="triton").double()


def body_claim(name):
    registry._problems.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "TOLERANCE", 1e-3 if name == "large_scores" else 1e-5)
        registry.CLAIMS["attention", name].check(partial(attend, kernels_in_fp32))
    return registry._problems


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLAIMS = [name for kind, name in registry.CLAIMS if kind == "attention" and name != "dropout"]
if environment.DEVICE_TYPE == "cpu":
    DTYPES.remove(torch.bfloat16)  # for which the interpreter is wrong
    CLAIMS = ["large_scores"]  # all of them take a minute in the interpreter


@needs_triton
@pytest.mark.parametrize("name", CLAIMS)
def test_the_claims_hold_for_the_kernels_in_fp32(name, on_kernels):
    assert on_kernels(body_claim, name) == []


def body_any_sizes(sizes, causal, scale, dtype, tolerance):
    inputs = make_inputs(*sizes, dtype=dtype)
    ours = partial(flash.flash_attention, causal=causal, scale=scale, kernel="triton")
    found = output_and_gradients(ours, *inputs)
    plain = partial(dense, causal=causal, scale=scale)
    expected = output_and_gradients(plain, *(x.double() for x in inputs))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    if environment.DEVICE_TYPE == "cuda":
        assert_all_equal(output_and_gradients(ours, *inputs), found, exact=True)


@needs_triton
@pytest.mark.parametrize(
    ("sizes", "causal", "scale"),  # S, Skv, B, H, Hkv, D
    [
        ((0, 5, 1, 2, 2, 8), True, None),
        ((5, 0, 1, 2, 2, 8), False, None),
        ((65, 130, 1, 2, 1, 40), True, 0.0),
        ((130, 65, 1, 1, 1, 128), True, -0.1),
        ((70, 70, 2, 4, 2, 16), False, 1),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_any_sizes_and_scales(sizes, causal, scale, dtype, on_kernels):
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    on_kernels(body_any_sizes, sizes, causal, scale, dtype, tolerance)


@needs_triton
@pytest.mark.parametrize(("S", "cut", "causal"), PARTS)
def test_parts_of_the_keys_merge_in_the_kernels(S, cut, causal, on_kernels):
    on_kernels(check_parts_merge, S, cut, causal, "triton", torch.float32, 2e-6)


@pytest.mark.cpu
@needs_triton
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", flash.BLOCKS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_for_an_h100_and_fit_into_the_shared_memory_of_smaller_gpus(
    kernel, D, tmp_path, monkeypatch
):
    """This needs no GPU. Products are those of Hopper's tensor cores."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, step, num_warps, num_stages = flash.BLOCKS[kernel][D]
    names = kernel.arg_names
    last = dict(zip(names[-5:], (True, D, D, block, step), strict=True))
    types = dict.fromkeys(names, "i32") | dict.fromkeys(names[: names.index("q_b")], "*bf16")
    types |= {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"} | dict.fromkeys(last, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in last}
    source = ASTSource(kernel, {name: types[name] for name in names}, last, aligned)

    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = flash.triton.compile(source, GPUTarget("cuda", 90, 32), options)

    assert compiled.metadata.shared <= 99 * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"]


def a_cuda_tensor(dtype=torch.bfloat16, D=64):
    return SimpleNamespace(is_cuda=True, device="cuda:0", dtype=dtype, shape=(1, 1, 8, D))


@pytest.mark.cpu
@needs_triton
def test_on_a_gpu_the_kernels_run_if_they_can(monkeypatch):
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = a_cuda_tensor()
    float64 = a_cuda_tensor(torch.float64)
    large = a_cuda_tensor(D=136)

    assert flash.runs_kernels(None, q, q, None)
    assert not flash.runs_kernels("torch", q, q, None)
    assert not flash.runs_kernels(None, q, q, dropout="any")
    assert not flash.runs_kernels(None, float64, float64, None)
    assert not flash.runs_kernels(None, q, a_cuda_tensor(D=32), None)
    with pytest.raises(ValueError, match="at most 128, q has 136 and v has 136; split"):
        flash.runs_kernels("triton", large, large, None)
    capability = (7, 5)
    assert not flash.runs_kernels(None, q, q, None)


@pytest.mark.cpu
def test_without_triton_the_loop_runs_and_the_kernels_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # import raises ModuleNotFoundError
    spec = importlib.util.spec_from_file_location("without_triton", flash.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    q, k, v, _ = make_inputs()

    assert torch.equal(without.flash_attention(q, k, v), flash.flash_attention(q, k, v))
    with pytest.raises(ValueError, match="Triton is missing; pip install triton, or use kernel="):
        without.flash_attention(q, k, v, kernel="triton")


# ---- wrong use

WRONG = [
    ({"q": torch.ones(2, 3, 7, 4)}, "3 heads of queries are no multiple of 2 heads of keys"),
    ({"q": torch.ones(2, 2, 7, 5)}, r"q \(2, 2, 7, 5\), k \(2, 2, 7, 4\)"),
    ({"q": torch.ones(1, 2, 7, 4)}, r"q \(1, 2, 7, 4\), k \(2, 2, 7, 4\)"),
    ({"v": torch.ones(2, 2, 6, 4)}, r"k \(2, 2, 7, 4\), v \(2, 2, 6, 4\)"),
    ({"q": torch.ones(2, 7, 4)}, r"q \(2, 7, 4\).* must be \(B, H, S, D\)"),
    ({"v": torch.ones(2, 2, 7, 4).double()}, r"q torch.float32, k torch.float32, v torch.float64"),
    ({"dropout_p": 1.0}, r"dropout_p=1.0.* in \[0, 1\)"),
    ({"dropout_p": -0.1}, r"dropout_p=-0.1.* in \[0, 1\)"),
    ({"block_size": 0}, "block_size=0.* at least 1"),
    ({"kernel": "cuda"}, """kernel='cuda': must be "triton", "torch" or None"""),
    ({"kernel": "triton"}, 'q is on cpu; use a GPU, or .* or use kernel="torch"|install triton'),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_does_not_fit_is_an_error_with_the_numbers(wrong, message):
    arguments = {**dict.fromkeys("qkv", torch.ones(2, 2, 7, 4)), **wrong}
    with pytest.raises((ValueError, ImportError), match=message):
        flash.flash_attention(**arguments)

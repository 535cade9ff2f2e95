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
from claims.attention import attend, dense_attention, queries_and_keys
from hypothesis import example, given
from hypothesis import strategies as st
from shared import assert_equal, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import activation_checkpoint
import amp
import flash_attention as flash


def make_inputs(S=7, Skv=7, dtype=torch.float64, **sizes):
    """Return q, k, v and a gradient of the output, strided as a projection's output in a model."""
    q, k, v = queries_and_keys(S, Skv, **sizes)
    grad_output = randn((*q.shape[:3], v.shape[3]), seed=9)
    tensors = [x.detach().to(dtype) for x in (q, k, v, grad_output)]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def output_and_gradients(attention, q, k, v, grad_output, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def assert_all_equal(ours, theirs, exact=False):
    for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert_equal(a, b, exact, name)


# ---- the idea


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 7, 9])
def test_the_idea_equals_naive_attention_in_blocks_of_any_size(block_size, causal):
    inputs = make_inputs()
    idea = partial(flash.online_attention, block_size=block_size)

    found = output_and_gradients(idea, *inputs, causal=causal)

    expected = output_and_gradients(flash.naive_attention, *inputs, causal=causal)
    assert_all_equal(found, expected)


# ---- the loop


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if torch.is_tensor(x)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.cpu
@given(
    B=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1)]),
    S=st.integers(0, 40),
    Skv=st.integers(0, 40),
    head_sizes=st.sampled_from([(1, 1), (4, 4), (3, 5), (0, 2)]),
    block_size=st.integers(1, 50),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -2.0]),
)
@example(0, (2, 2), 9, 4, (4, 4), 5, True, None)
@example(2, (6, 2), 26, 33, (3, 5), 7, True, 0.3)
@example(1, (1, 1), 2, 3, (0, 2), 2, True, None)
def test_any_sizes_in_blocks_of_any(B, heads, S, Skv, head_sizes, block_size, causal, scale):
    """No tensor of queries times keys is made. Kept are q, k, v, the output and a number per query.
    4d + 10d operations are for each query, and each key that the last query of its block sees."""
    H, Hkv = heads
    D, D_v = head_sizes
    inputs = make_inputs(S, Skv, batch=B, heads=H, shared=Hkv, size=D, size_v=D_v)
    options = {"causal": causal, "scale": scale}
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    ours = partial(flash.flash_attention, block_size=block_size)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, Largest() as largest, FlopCounterMode(display=False) as flops:
        found = output_and_gradients(ours, *inputs, **options)

    expected = output_and_gradients(dense_attention, *inputs, **options)
    assert_all_equal(found, expected)
    assert_all_equal(output_and_gradients(flash.naive_attention, *inputs, **options), expected)
    block = max(B, 1) * H * min(block_size, S) * min(block_size, Skv)
    repeated = B * H * Skv * max(head_sizes)  # keys, for each head of queries
    assert largest.elements <= max(block, repeated, 1, *(x.numel() for x in inputs))
    assert sum(saved) == sum(x.numel() for x in inputs) + B * H * S
    pairs = 0
    for start in range(0, S, block_size):
        stop = min(start + block_size, S)
        pairs += (stop - start) * max(0, Skv - S + stop if causal else Skv)
    assert flops.get_total_flops() == B * H * pairs * (8 * D + 6 * D_v)


@pytest.mark.cpu
def test_dropout_differs_from_block_to_block_and_from_call_to_call():
    """With the identity as v, the output is the weights that are left."""
    q, k, v, _ = make_inputs(S=64, Skv=64, size=64)
    identity = torch.eye(64, dtype=q.dtype).expand_as(v)
    dropping = partial(flash.flash_attention, dropout_p=0.3, block_size=16)

    left, again = (dropping(q, k, identity) != 0 for _ in range(2))

    blocks = left.unflatten(3, (4, 16)).unflatten(2, (4, 16)).movedim(4, 3).flatten(2, 3).unbind(2)
    assert not any(torch.equal(a, b) for n, a in enumerate(blocks) for b in blocks[:n])
    assert not torch.equal(left, again)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_no_worse_than_pytorchs(dtype):
    """Errors against float64, of the same rounded inputs. lse stays in fp32."""
    inputs = make_inputs(S=500, Skv=500, size=32, dtype=dtype)
    wide = [x.double() for x in inputs]

    ours = output_and_gradients(flash.flash_attention, *inputs, causal=True)

    theirs = output_and_gradients(F.scaled_dot_product_attention, *inputs, is_causal=True)
    exact = output_and_gradients(dense_attention, *wide, causal=True)
    for a, b, plain in zip(ours, theirs, exact, strict=True):
        assert a.dtype == dtype
        mine, pytorchs = ((x.double() - plain).norm() / plain.norm() for x in (a, b))
        assert mine <= min(1.01 * pytorchs, torch.finfo(dtype).eps)
    assert flash.flash_forward(*inputs[:3])[1].dtype == torch.float32


@pytest.mark.cpu
@pytest.mark.parametrize("autocast", [amp.autocast, partial(torch.autocast, "cpu")])
def test_autocast_does_not_reach_inside_and_a_checkpoint_draws_the_mask_again(autocast):
    attention = partial(flash.flash_attention, dropout_p=0.5)
    checkpointed = partial(activation_checkpoint.checkpoint, attention)
    inputs = make_inputs(S=40, Skv=40, dtype=torch.float32)
    results = []
    for run, enabled in [(attention, False), (attention, True), (checkpointed, True)]:
        torch.manual_seed(2)
        with autocast(dtype=torch.bfloat16, enabled=enabled):
            results.append(output_and_gradients(run, *inputs))
    for result in results:
        assert_all_equal(result, results[0], exact=True)


@pytest.mark.cpu
def test_gradients_of_gradients_are_refused():
    q, k, v = queries_and_keys(7, 7)
    loss = flash.flash_attention(q, k, v).sum()
    with pytest.raises(RuntimeError, match="gradients of gradients are left out"):
        torch.autograd.grad(loss, q, create_graph=True)


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


def body_parts_merge(S, cut, causal, kernel, dtype, tolerance):
    """Of 10 keys, the first `cut`, which all queries see, and the others, aligned at the end."""
    q, k, v, grad_output = make_inputs(S=S, Skv=10, dtype=dtype)
    parts = [(k[:, :, :cut], v[:, :, :cut], False), (k[:, :, cut:], v[:, :, cut:], causal)]

    first, second = (flash.flash_forward(q, *part, kernel=kernel) for part in parts)
    merged = flash.merge(*first, *second)
    (dq_a, dk_a, dv_a), (dq_b, dk_b, dv_b) = (
        flash.flash_backward(grad_output, q, *part[:2], *merged, part[2], kernel=kernel)
        for part in parts
    )

    whole = flash.flash_forward(q, k, v, causal, kernel="torch")
    expected = flash.flash_backward(grad_output, q, k, v, *whole, causal, kernel="torch")
    ours = [*merged, dq_a + dq_b, torch.cat([dk_a, dk_b], 2), torch.cat([dv_a, dv_b], 2)]
    torch.testing.assert_close(ours, [*whole, *expected], rtol=0, atol=tolerance)


def body_scores_of_minus_inf(kernel, dtype, tolerance):
    """The last column of q and k makes them: for all keys of query 0, and for the first 200 keys.

    The others are as if these did not exist, and these have zeros."""
    q, k, v, grad_output = make_inputs(S=32, Skv=300, dtype=dtype)
    seen = (q[:, :, 1:, :-1], k[:, :, 200:, :-1], v[:, :, 200:], grad_output[:, :, 1:])
    expected = output_and_gradients(dense_attention, *seen, scale=0.3)
    q[..., -1] = 1.0
    q[:, :, 0, -1] = torch.inf
    k[..., -1] = -1.0
    k[:, :, :200, -1] = -torch.inf

    attention = partial(flash.flash_attention, scale=0.3, kernel=kernel)
    found = output_and_gradients(attention, q, k, v, grad_output)

    for ours, theirs, hidden in zip(found, expected, (1, 1, 200, 200), strict=True):
        whole = F.pad(theirs, (0, 0, hidden, 0))
        torch.testing.assert_close(ours[..., : whole.shape[3]], whole, rtol=0, atol=tolerance)


BOTH = pytest.mark.parametrize(
    "how",
    [
        ("torch", torch.float64, 1e-12),
        pytest.param(("triton", torch.float32, 2e-6), marks=needs_triton),
    ],
    ids=["torch", "triton"],
)


@BOTH
@pytest.mark.parametrize("parts", [(9, 10, False), (4, 6, True), (12, 0, True)])
def test_parts_of_the_keys_merge_into_the_whole_and_have_their_gradients(parts, how, on_kernels):
    on_kernels(body_parts_merge, *parts, *how)


@BOTH
def test_scores_of_minus_inf_hide_keys(how, on_kernels):
    on_kernels(body_scores_of_minus_inf, *how)


# ---- the kernels


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


def body_any_sizes(sizes, heads, causal, scale, dtype):
    S, Skv, D = sizes
    H, Hkv = heads
    inputs = make_inputs(S, Skv, dtype, heads=H, shared=Hkv, size=D)
    inputs[2] = inputs[2].mT.contiguous().mT  # the kernels need rows that are contiguous
    options = {"causal": causal, "scale": scale}
    ours = partial(flash.flash_attention, kernel="triton")
    found = output_and_gradients(ours, *inputs, **options)
    wide = [x.double() for x in inputs]
    expected = output_and_gradients(dense_attention, *wide, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    if environment.DEVICE_TYPE == "cuda":
        again = output_and_gradients(ours, *inputs, **options)
        assert_all_equal(again, found, exact=True)


@needs_triton
@pytest.mark.parametrize(
    ("sizes", "heads", "causal", "scale"),  # sizes: S, Skv, D
    [
        ((0, 5, 8), (2, 2), True, None),
        ((5, 0, 8), (2, 2), False, None),
        ((65, 130, 40), (2, 1), True, 0.0),
        ((130, 65, 128), (1, 1), True, -0.1),
        ((70, 70, 16), (4, 2), False, 1),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_any_sizes_and_scales(sizes, heads, causal, scale, dtype, on_kernels):
    on_kernels(body_any_sizes, sizes, heads, causal, scale, dtype)


@pytest.mark.cpu
@needs_triton
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", flash.BLOCKS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_for_an_h100_and_fit_into_the_shared_memory_of_smaller_gpus(
    kernel, D, tmp_path, monkeypatch
):
    """This needs no GPU. Products are those of Hopper's tensor cores."""
    from triton.backends import compiler
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, step, num_warps, num_stages = flash.BLOCKS[kernel][D]
    names = kernel.arg_names
    last = dict(zip(names[-5:], (True, D, D, block, step), strict=True))
    types = dict.fromkeys(names, "i32") | dict.fromkeys(names[: names.index("q_b")], "*bf16")
    types |= {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"} | dict.fromkeys(last, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in last}
    if hasattr(compiler, "AttrsDescriptor"):  # in Triton 3.2
        positions = {"tt.divisibility": [i for (i,) in aligned]}
        aligned = compiler.AttrsDescriptor.from_dict(
            {"arg_properties": positions, "cls": "AttrsDescriptor"}
        )
    source = ASTSource(kernel, {name: types[name] for name in names}, last, aligned)

    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = flash.triton.compile(source, compiler.GPUTarget("cuda", 90, 32), options)

    assert compiled.metadata.shared <= 99 * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"]


def on_gpu(dtype=torch.bfloat16, D=64, B=1):
    return SimpleNamespace(is_cuda=True, device="cuda:0", dtype=dtype, shape=(B, 1, 8, D))


RUNS = [  # kernel=, q, v, dropout, the GPU's capability, and whether the kernels run
    (None, on_gpu(), on_gpu(), None, (8, 0), True),
    ("torch", on_gpu(), on_gpu(), None, (8, 0), False),
    (None, on_gpu(), on_gpu(), "any", (8, 0), False),
    (None, on_gpu(torch.float64), on_gpu(torch.float64), None, (8, 0), False),
    (None, on_gpu(), on_gpu(D=32), None, (8, 0), False),
    (None, on_gpu(D=128), on_gpu(D=128), None, (8, 0), True),
    (None, on_gpu(D=136), on_gpu(D=136), None, (8, 0), False),
    (None, on_gpu(B=65536), on_gpu(B=65536), None, (8, 0), False),
    (None, on_gpu(), on_gpu(), None, (7, 5), False),
]


@pytest.mark.cpu
@needs_triton
@pytest.mark.parametrize(("kernel", "q", "v", "dropout", "capability", "runs"), RUNS)
def test_on_a_gpu_the_kernels_run_if_they_can(kernel, q, v, dropout, capability, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert flash.runs_kernels(kernel, q, v, dropout) == runs


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
    ({"q": torch.ones(2, 3, 7, 4)}, "q has 3 heads, which is not a multiple of the 2 heads"),
    ({"q": torch.ones(2, 2, 7, 5)}, r"q \(2, 2, 7, 5\), k \(2, 2, 7, 4\)"),
    ({"q": torch.ones(1, 2, 7, 4)}, r"q \(1, 2, 7, 4\), k \(2, 2, 7, 4\)"),
    ({"v": torch.ones(2, 2, 6, 4)}, r"k \(2, 2, 7, 4\), v \(2, 2, 6, 4\)"),
    ({"q": torch.ones(2, 7, 4)}, r"q \(2, 7, 4\).* must be \(B, H, S, D\)"),
    ({"v": torch.ones(2, 2, 7, 4).double()}, r"q torch.float32, k torch.float32, v torch.float64"),
    ({"dropout_p": 1.0}, r"dropout_p=1.0.* in \[0, 1\)"),
    ({"dropout_p": -0.1}, r"dropout_p=-0.1.* in \[0, 1\)"),
    ({"causal": None}, "causal must be True or False"),  # PyTorch's fourth argument is a mask
    ({"block_size": 0}, "block_size=0.* at least 1"),
    ({"kernel": "cuda"}, """kernel='cuda': must be "triton", "torch" or None"""),
    ({"kernel": "triton"}, 'q is on cpu; use a GPU, or .* or use kernel="torch"|install triton'),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_does_not_fit_is_an_error_with_the_numbers(wrong, message):
    arguments = {**dict.fromkeys("qkv", torch.ones(2, 2, 7, 4)), **wrong}
    with pytest.raises(ValueError, match=message):
        flash.flash_attention(**arguments)

"""flash_attention.py: what tests/claims leaves open. Blocks of any size, the kernels, and the cost.

The kernels run on a CPU under Triton's interpreter, in a process that has imported Triton with
TRITON_INTERPRET=1, and under --device cuda on the GPU.
"""

import importlib.util
import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import environment
import pool
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from claims import registry
from claims.attention import attend, dense_attention, queries_and_keys
from hypothesis import given
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
    inputs = []
    for x in (q, k, v, grad_output):
        projection = x.detach().to(dtype).transpose(1, 2).contiguous()
        inputs.append(projection.transpose(1, 2))
    return inputs


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

sizes_of_tensors = st.fixed_dictionaries(
    {
        "S": st.integers(0, 40),
        "Skv": st.integers(0, 40),
        "batch": st.integers(0, 2),
        "shared": st.integers(1, 2),
        "size": st.integers(0, 4),
        "size_v": st.integers(1, 5),
    }
)


@pytest.mark.cpu
@given(sizes_of_tensors, st.integers(1, 3), st.integers(1, 50), st.booleans())
def test_any_sizes_in_blocks_of_any(sizes, group, block_size, causal):
    """`group` heads of queries share a head of keys."""
    inputs = make_inputs(**sizes, heads=group * sizes["shared"])
    options = {"causal": causal, "scale": -2.0}
    ours = partial(flash.flash_attention, block_size=block_size)
    expected = output_and_gradients(dense_attention, *inputs, **options)
    naive = output_and_gradients(flash.naive_attention, *inputs, **options)
    assert_all_equal(output_and_gradients(ours, *inputs, **options), expected)
    assert_all_equal(naive, expected)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


in_blocks_of_7 = partial(flash.flash_attention, block_size=7)


@pytest.mark.cpu
def test_no_tensor_is_larger_than_the_inputs():
    inputs = make_inputs(S=100, Skv=100)
    with Largest() as largest:
        output_and_gradients(in_blocks_of_7, *inputs)
    assert largest.elements == inputs[0].numel()


@pytest.mark.cpu
def test_the_inputs_the_output_and_a_number_for_each_query_are_kept():
    q, k, v = queries_and_keys(26, 33)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor)
    with hooks:
        output = in_blocks_of_7(q, k, v)
    numels = [x.numel() for x in kept]
    inputs = q.numel() + k.numel() + v.numel()
    assert sum(numels) == inputs + output.numel() + output[..., 0].numel()


@pytest.mark.cpu
@pytest.mark.parametrize("causal", [False, True])
def test_operations_are_those_of_the_keys_that_a_block_sees(causal):
    """14D for each query, and each key that the last query of its block sees."""
    inputs = make_inputs(S=20, Skv=30, size=4)
    with FlopCounterMode(display=False) as flops:
        output_and_gradients(in_blocks_of_7, *inputs, causal=causal)
    pairs = 20 * 30
    if causal:
        pairs = 7 * (10 + 7) + 7 * (10 + 14) + 6 * 30
    assert flops.get_total_flops() == 2 * 2 * pairs * 14 * 4


@pytest.mark.cpu
def test_dropout_differs_from_block_to_block_and_from_call_to_call():
    """With the identity as v, the output is the weights that are left."""
    q, k, v, _ = make_inputs(S=64, Skv=64, size=64)
    identity = torch.eye(64, dtype=q.dtype).expand_as(v)
    dropping = partial(flash.flash_attention, q, k, identity, dropout_p=0.3, block_size=16)
    left = dropping() != 0
    again = dropping() != 0
    assert not torch.equal(left, again)
    blocks = [block for rows in left.split(16, 2) for block in rows.split(16, 3)]
    for a, b in itertools.combinations(blocks, 2):
        assert not torch.equal(a, b)


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
        error = (a - plain).norm() / plain.norm()
        pytorchs = (b - plain).norm() / plain.norm()
        assert error <= min(1.01 * pytorchs, torch.finfo(dtype).eps)
        assert a.dtype == dtype
    _, lse = flash.flash_forward(*inputs[:3])
    assert lse.dtype == torch.float32


@pytest.mark.cpu
@pytest.mark.parametrize(
    "autocast",
    [amp.autocast, partial(torch.autocast, "cpu")],
)
def test_autocast_does_not_reach_inside(autocast):
    inputs = make_inputs(S=40, Skv=40, dtype=torch.float32)
    expected = output_and_gradients(flash.flash_attention, *inputs)
    with autocast(dtype=torch.bfloat16):
        found = output_and_gradients(flash.flash_attention, *inputs)
    assert_all_equal(found, expected, exact=True)


@pytest.mark.cpu
def test_a_checkpoint_draws_the_mask_of_dropout_again():
    attention = partial(flash.flash_attention, dropout_p=0.5)
    inputs = make_inputs(S=40, Skv=40)
    results = []
    for run in (attention, partial(activation_checkpoint.checkpoint, attention)):
        torch.manual_seed(2)
        results.append(output_and_gradients(run, *inputs))
    assert_all_equal(*results, exact=True)


@pytest.mark.cpu
def test_gradients_of_gradients_are_refused():
    q, k, v = queries_and_keys(7, 7)
    loss = flash.flash_attention(q, k, v).sum()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
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
    first = (k[:, :, :cut], v[:, :, :cut])
    second = (k[:, :, cut:], v[:, :, cut:])
    forward = partial(flash.flash_forward, q, kernel=kernel)
    backward = partial(flash.flash_backward, grad_output, q, kernel=kernel)

    merged = flash.merge(*forward(*first), *forward(*second, causal))
    dq_a, dk_a, dv_a = backward(*first, *merged)
    dq_b, dk_b, dv_b = backward(*second, *merged, causal)

    whole = flash.flash_forward(q, k, v, causal, kernel="torch")
    expected = flash.flash_backward(grad_output, q, k, v, *whole, causal, kernel="torch")
    dk = torch.cat([dk_a, dk_b], 2)
    dv = torch.cat([dv_a, dv_b], 2)
    ours = [*merged, dq_a + dq_b, dk, dv]
    torch.testing.assert_close(ours, [*whole, *expected], rtol=0, atol=tolerance)


def body_scores_of_minus_inf(kernel, dtype, tolerance):
    """The last column of q and k hides all keys from query 0, and the first 200 from all.

    The others are as if these did not exist, and these have zeros."""
    q, k, v, grad_output = make_inputs(S=32, Skv=300, dtype=dtype)
    seen = [
        q[:, :, 1:, :-1],
        k[:, :, 200:, :-1],
        v[:, :, 200:],
        grad_output[:, :, 1:],
    ]
    expected = output_and_gradients(dense_attention, *seen, scale=0.3)
    q[..., -1] = 1.0
    q[:, :, 0, -1] = torch.inf
    k[..., -1] = -1.0
    k[:, :, :200, -1] = -torch.inf

    attention = partial(flash.flash_attention, scale=0.3, kernel=kernel)
    found = output_and_gradients(attention, q, k, v, grad_output)

    for ours, theirs, hidden in zip(found, expected, (1, 1, 200, 200), strict=True):
        visible = ours[:, :, hidden:, : theirs.shape[3]]
        torch.testing.assert_close(visible, theirs, rtol=0, atol=tolerance)
        assert (ours[:, :, :hidden, : theirs.shape[3]] == 0).all()


BOTH = pytest.mark.parametrize(
    "how",
    [
        ("torch", torch.float64, 1e-12),
        pytest.param(("triton", torch.float32, 2e-6), marks=needs_triton),
    ],
    ids=["torch", "triton"],
)


@BOTH
@pytest.mark.parametrize(
    ("S", "cut", "causal"),
    [
        (9, 10, False),
        (4, 6, True),
        (12, 0, True),
    ],
)
def test_parts_of_the_keys_merge_into_the_whole(S, cut, causal, how, on_kernels):
    on_kernels(body_parts_merge, S, cut, causal, *how)


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


def body_any_sizes(S, Skv, D, heads, causal, scale, dtype):
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


SIZES = {  # S, Skv, D, heads of queries and of keys, causal, scale
    "no query": (0, 5, 8, (2, 2), True, None),
    "no key": (5, 0, 8, (2, 2), False, None),
    "more keys": (65, 130, 40, (2, 1), True, 0.0),
    "more queries": (130, 65, 128, (1, 1), True, -0.1),
    "shared heads": (70, 70, 16, (4, 2), False, 1),
}


@needs_triton
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_any_sizes_and_scales(name, dtype, on_kernels):
    on_kernels(body_any_sizes, *SIZES[name], dtype)


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


def body_refused(words, dtype=torch.float32, dropout_p=0.0, **sizes):
    q, k, v, _ = make_inputs(1, 1, dtype, **sizes)
    with pytest.raises(ValueError, match=words):
        flash.flash_attention(q, k, v, dropout_p=dropout_p, kernel="triton")


OBSTACLES = {
    "float64": {"dtype": torch.float64},
    "dropout": {"dropout_p": 0.5},
    "head size of at most 128": {"size": 136, "batch": 1},
    "one head size": {"size": 8, "size_v": 4},
    "65535": {"batch": 65536, "size": 1},
}


@needs_triton
@pytest.mark.parametrize("words", OBSTACLES)
def test_what_the_kernels_cannot_do_is_an_error_that_says_so(words, on_kernels):
    arguments = OBSTACLES[words]
    on_kernels(partial(body_refused, words, **arguments))


@needs_triton
@pytest.mark.skipif(environment.DEVICE_TYPE == "cpu", reason="needs --device cuda")
@pool.on(1)
def test_on_a_gpu_the_kernels_run_if_they_can():
    q, _, v, _ = make_inputs(dtype=torch.float16)
    assert flash.runs_kernels(None, q, v, None)
    assert not flash.runs_kernels("torch", q, v, None)
    assert not flash.runs_kernels(None, q.double(), v.double(), None)


@pytest.mark.cpu
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


# ---- wrong use

WRONG = {
    "3 heads, .* the 2 heads": {"q": torch.ones(2, 3, 7, 4)},
    r"q \(2, 2, 7, 5\)": {"q": torch.ones(2, 2, 7, 5)},
    r"q \(1, 2, 7, 4\)": {"q": torch.ones(1, 2, 7, 4)},
    r"v \(2, 2, 6, 4\)": {"v": torch.ones(2, 2, 6, 4)},
    r"q \(2, 7, 4\)": {"q": torch.ones(2, 7, 4)},
    "v torch.float64": {"v": torch.ones(2, 2, 7, 4).double()},
    r"dropout_p=1\.0": {"dropout_p": 1.0},
    r"dropout_p=-0\.1": {"dropout_p": -0.1},
    "causal must be True or False": {"causal": None},  # PyTorch's fourth argument is a mask
    "block_size=0": {"block_size": 0},
    "kernel='cuda'": {"kernel": "cuda"},
    "q is on cpu|install triton": {"kernel": "triton"},
}


@pytest.mark.cpu
@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_an_error_with_the_numbers(message):
    arguments = dict.fromkeys("qkv", torch.ones(2, 2, 7, 4))
    arguments |= WRONG[message]
    with pytest.raises(ValueError, match=message):
        flash.flash_attention(**arguments)

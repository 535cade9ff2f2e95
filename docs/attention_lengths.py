"""Print the memory, time and errors of flash_attention.py, and of PyTorch's attention.

Run:  python docs/attention_lengths.py [--device cuda]
"""

import functools
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from flash_attention import Demo, flash_attention, held_bytes, naive_attention, runs_kernels


def main():
    demo = Demo(__doc__)
    status = compare_errors(demo)
    compare_lengths(demo)
    return status


def compare_errors(demo):
    """Print the errors of the default kernel and of PyTorch's. Return 1 if ours are above twice."""
    torch.manual_seed(demo.args.seed)
    status = 0
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(2, 4, 300, 64, device=demo.device, dtype=dtype) for _ in range(3)]
        exact = output_and_gradients(naive_attention, [x.double() for x in inputs])
        ours = largest_error(output_and_gradients(flash_attention, inputs), exact)
        theirs = largest_error(output_and_gradients(torch_attention, inputs), exact)
        ran = "kernels" if runs_kernels(None, inputs[0], inputs[2], dropout=None) else "loop"
        status |= ours > 2 * theirs
        verdict = "at most twice" if ours <= 2 * theirs else "MORE THAN twice"
        ran += f", {dtype}".replace("torch.", "")
        demo.show(f"error       {ran}: {ours:.1e}, {verdict} PyTorch's {theirs:.1e}")
    return status


def output_and_gradients(attention, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attention(*inputs, causal=True)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


def largest_error(found, exact):
    """Relative to the largest element of the output or of the gradient."""
    pairs = zip(found, exact, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def compare_lengths(demo):
    """Print for growing s which bytes each way keeps, and how long it takes, on one device."""
    on_gpu = demo.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lengths = [256, 512, 1024, 2048, 4096]
    if on_gpu:
        lengths += [8192, 16384]
    ways = {"naive": naive_attention, "loop": functools.partial(flash_attention, kernel="torch")}
    x = torch.empty(1, 1, 1, 64, device=demo.device, dtype=dtype)
    if runs_kernels(None, x, x, dropout=None):
        ways["kernels"] = flash_attention
    ways["PyTorch"] = torch_attention
    demo.show("One causal head of size 64 with s queries and keys: memory kept for backward,")
    demo.show(f"and time of forward and backward, in {dtype}".replace("torch.", ""))
    demo.show(f"{'s':>6}" + "".join(f"{name:>22}" for name in ways))
    for s in lengths:
        inputs = [torch.randn(1, 1, s, 64, device=demo.device, dtype=dtype) for _ in range(3)]
        repeats = 3 if on_gpu or s < 2048 else 1
        row = [
            min(measure(attention, inputs) for _ in range(repeats)) for attention in ways.values()
        ]
        demo.show(f"{s:6}" + "".join(f"{kept / 1e6:9.1f} MB {ms:7.2f} ms" for kept, ms in row))
    theirs = row[-1][1]
    ratios = [f"{name} {ms / theirs:.1f}" for name, (_, ms) in zip(ways, row, strict=True)]
    demo.show(f"time at s = {s}, relative to PyTorch's: {', '.join(ratios[:-1])}")


def torch_attention(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def measure(attention, inputs):
    """Return the bytes kept for backward (q, k, v included), and the ms of forward and backward."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    saved = []

    def keep(x):
        saved.append(x)
        return x

    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = attention(*inputs, causal=True)
    gradients = torch.autograd.grad(output.sum(), inputs)
    gradients[0].sum().item()  # waits until the GPU has finished
    return held_bytes(saved), 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())

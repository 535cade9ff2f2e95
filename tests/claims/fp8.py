"""An implementation of --fp8-linear is called as function(model), as torchao's conversion is.

The model is nn.Sequential(nn.Linear(…)) in float32. The function returns it, or a new model, or
None if it has changed the model in place. After that, the products of forward and backward multiply
8-bit numbers: e4m3, or e5m2 for the gradient of the output. A product is right if each element is
within the rounding of its format. That is relative to the sum of the magnitudes of its terms.
"""

import torch
import torch.nn as nn
from shared import randn

from claims.registry import add_kind, check, claim, same, say


def convert(implementation, model):
    converted = implementation(model)
    return model if converted is None else converted


add_kind(
    "fp8-linear",
    called=__doc__,
    make=convert,
    ours="fp8:convert",
)

E4M3 = 2**-3 + 2**-8  # two numbers with 3 bits of mantissa
E5M2 = 3 * 2**-4 + 2**-7  # one with 3 bits, one with 2
SMALLEST = 2**-17  # what rounds to zero, of the largest number that has the same scale


def normal(shape, seed, size=1.0):
    return size * randn(shape, seed, torch.float32)


def linear(make, outputs, inputs, size=1.0, bias=False):
    """Return a converted layer, its weight and its bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    weight = normal((outputs, inputs), 1, size)
    layer.weight.data = weight.clone()
    model = nn.Sequential(layer)
    return make(model), weight, layer.bias


def gradient_of_weight(model):
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.grad is not None:
            return parameter.grad
    return torch.zeros(0)


def close(ours, a, b, bound, what):
    """Compare with a @ b, element by element."""
    a = a.double()
    b = b.double()
    expected = a @ b
    if ours.shape != expected.shape:
        check(False, f"{what} is {tuple(ours.shape)}")
        return
    a = a.abs()
    b = b.abs()
    lost = b.sum(0) * a.max() + a.sum(1, True) * b.max()
    limit = bound * (a @ b) + SMALLEST * lost
    error = (ours - expected).abs()
    check((error <= limit).all(), f"an element of {what} is off by {error.max():.1e}")


def forward_and_backward(make, shape=(70, 200), outputs=48, sizes=(1, 1, 1)):
    """x, the weight and the gradient of y have normal elements of these sizes."""
    *rows, inputs = shape
    size_of_x, size_of_weight, size_of_dy = sizes
    model, weight, _ = linear(make, outputs, inputs, size_of_weight)
    x = normal(shape, 2, size_of_x)
    dy = normal((*rows, outputs), 3, size_of_dy)

    x.requires_grad_()
    y = model(x)
    y.backward(dy)

    dx = x.grad.flatten(0, -2)
    dw = gradient_of_weight(model)
    x = x.detach().flatten(0, -2)
    y = y.detach().flatten(0, -2)
    dy = dy.flatten(0, -2)
    close(y, x, weight.t(), E4M3, "y")
    close(dx, dy, weight, E5M2, "the gradient of x")
    close(dw, dy.t(), x, E5M2, "the gradient of the weight")


def of_products(name, sentence, **how):
    say(name, sentence, [1], "fp8-linear", forward_and_backward, **how)


of_products("products", "Each element of y, dx and dW is within the rounding of 8 bits.")
of_products("one_term", "So is a product that sums one term.", shape=(70, 1))
of_products(
    "odd_sizes",
    "So are those of sizes that 16 does not divide.",
    shape=(2, 3, 7),
    outputs=5,
)
of_products(
    "sizes_are_scaled",
    "Large inputs and small weights use the range.",
    sizes=(2**30, 2**-20, 1),
)
of_products("tiny_gradients", "So do small gradients.", sizes=(1, 1, 2**-30))


@claim("fp8-linear", 1)
def outliers(make):
    """One number that is 2¹² times as large as others costs them precision, but nothing else."""
    model, weight, _ = linear(make, 5, 64)
    x = normal((9, 64), 2)
    x[4, 7] = 2.0**12
    y = model(x)
    close(y.detach(), x, weight.t(), E4M3, "y")


@claim("fp8-linear", 1)
def zeros(make):
    """Inputs that are all zero give zeros, and gradients that are all zero, too."""
    model, _, _ = linear(make, 5, 7)
    x = torch.zeros(3, 7, requires_grad=True)
    y = model(x)
    y.backward(torch.zeros(3, 5))
    same(y.detach(), torch.zeros(3, 5), "y", exact=True)
    same(x.grad, torch.zeros(3, 7), "gradient", exact=True)


@claim("fp8-linear", 1)
def not_finite(make):
    """An inf or NaN in x is not finite in y, so that a GradScaler or a check sees it."""
    for bad in (float("inf"), float("nan")):
        model, _, _ = linear(make, 5, 7)
        x = torch.ones(3, 7)
        x[1, 2] = bad
        y = model(x)[1]
        is_finite = y.isfinite()
        check(not is_finite.any(), f"y is {y.tolist()} after an x of {bad}")


@claim("fp8-linear", 1)
def long_sums(make):
    """A sum of 4096 ones is 4096: it is not in 16 bits."""
    model, _, _ = linear(make, 1, 4096)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    x = torch.ones(1, 4096)
    y = model(x).item()
    check(abs(y - 4096) < 1, f"it is {y}")


@claim("fp8-linear", 1)
def bias(make):
    """The bias is added, and has the sum of the gradients of y."""
    model, _, offset = linear(make, 5, 7, bias=True)
    expected = offset.detach().clone()
    x = torch.zeros(3, 7)
    y = model(x)
    same(y[1], expected, "y of zeros", exact=True)
    dy = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    y.backward(dy.expand(3, 5))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            same(parameter.grad, 3 * dy, "gradient of the bias", exact=True)


@claim("fp8-linear", 1, about="property")
def rounds(make):
    """It multiplies 8-bit numbers: what does not fit is rounded."""
    model, weight, _ = linear(make, 48, 64)
    x = normal((16, 64), 2)
    y = model(x)
    error = (y - x @ weight.t()).abs().max()
    check(error > 1e-3, f"y is off by {error:.1e}, as in 16 bits or more")


@claim("fp8-linear", 1, about="property")
def keeps_a_byte(make):
    """Besides parameters it keeps a byte for each element of x until backward, and scales."""
    model, _, _ = linear(make, 64, 64)
    of_parameters = set()
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        of_parameters.add(storage.data_ptr())
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept.append(tensor.nbytes)
        return tensor

    x = normal((1024, 64), 2)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    limit = 1024 * 64 * 5 / 4 + 64 * 64
    check(sum(kept) <= limit, f"it keeps {sum(kept)} bytes of {x.numel()} elements")


@claim("fp8-linear", 1, about="property")
def same_parameters(make):
    """Parameters stay the same tensors under the same names, so the optimizer need not change."""
    model = nn.Sequential(nn.Linear(7, 5))
    before = dict(model.named_parameters())
    converted = make(model)
    after = dict(converted.named_parameters())
    check(before.keys() == after.keys(), f"the names are {[*after]}")
    for name, parameter in before.items():
        check(after.get(name) is parameter, f"{name} is another tensor")

"""AMP: compute in 16 bits, train weights kept in 32, and scale the loss so that small gradients survive.

One step in fp16; in bf16 the same without the scale S:

    fp32 master weights ── cast down ──→ fp16 weights → forward → loss · S → backward → fp16 gradients · S
            ↑                                                                                 │
      optimizer step ←── clip ←── finite on all ranks? ←── cast up, divide by S ←── all-reduce
                                       │ no: skip the step, S ← S/2
                                       └ yes, 2000 times in a row: S ← 2S

fp16 in place of fp32 fails in three ways, each with its remedy:

    an update of less than half a unit in the last place of its weight is lost       → fp32 master weights
    a gradient below 2⁻²⁵ rounds to zero, and keeps few of its bits below 2⁻¹⁴       → loss scaling
    a sum, norm or exponential overflows at 65504, or loses its small terms          → those in fp32: autocast

bf16 has the exponents of fp32 and needs no scaling, but with 8 bits of precision it needs the masters even more.

Bytes per parameter that stay allocated, with Adam; Ψ parameters, N ranks:

                                 weights   gradients   masters   Adam   sum   bytes sent per step
    fp32                            4          4          -       4+4    16   4Ψ·2(N-1)/N: an all-reduce of gradients
    fp16, bf16                      2          2          4       4+4    16   2Ψ·2(N-1)/N, and 4·2(N-1)/N by a scaler
    bf16, stochastic rounding       2          2          -       4+4    12   2Ψ·2(N-1)/N

step() needs 4 more for the gradients in fp32. What halves is activations, traffic and the time of matrix products.

Run:      torchrun --nproc-per-node 2 amp.py          (python amp.py is a world of one)
Paper:    Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740; in fp8: 2022, arXiv 2209.05433
Mirrors:  torch.amp.GradScaler, torch.autocast, Megatron's mixed-precision optimizer, Transformer Engine's fp8 recipe
Left out: MixedPrecisionOptimizer with sparse gradients or closures (LBFGS); fused optimizers that unscale themselves
"""

import argparse
import copy
import math
import os
import statistics
import sys
import sysconfig
import threading
import time
import warnings
import weakref
from contextlib import ContextDecorator, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: scale the loss, cast gradients up, update fp32 masters, or skip the step, and round the masters.


def mixed_precision_step(model, masters, optimizer, loss_of, scale):
    """One step of an fp16 `model` whose fp32 `masters` the `optimizer` updates; -> the loss scale of the next step."""
    (loss_of(model) * scale).backward()  # of a loss in fp32. Backward is linear, so this scales every gradient
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad = weight.grad.float() / scale
        weight.grad = None
    if not all(master.grad.isfinite().all() for master in masters):
        return scale / 2
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(model.parameters(), masters, strict=True):
            weight.copy_(master)
    return scale


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one, around any optimizer: 16 bits in the model, 32 in the optimizer.


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Turns the weights that `optimizer` holds into copies, in `dtype`, of fp32 masters, which it holds from then on.

        optimizer = MixedPrecisionOptimizer(AdamW(model.parameters()), torch.float16, GradScaler("cuda"))
        optimizer.scale(loss).backward()       # reduce gradients over ranks before what follows
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    Any optimizer will do, and learning rate schedulers work on either. Buffers, and weights that it does not hold, are
    for the caller to convert: model.to(dtype), afterwards. `scaler`, ours or PyTorch's, is for this optimizer alone:
    step() also updates it. Without one a rank skips a step where a gradient of its own is not finite.
    `stochastic_rounding`, of bf16, does without masters (section 4); else values written into the model through
    weight.data go unseen: write under no_grad.
    """

    def __init__(self, optimizer, dtype, scaler=None, *, stochastic_rounding=False):
        if not dtype.is_floating_point or (stochastic_rounding and dtype != torch.bfloat16):
            raise ValueError(f"dtype {dtype}: torch.float16 or torch.bfloat16; for stochastic_rounding the latter")
        self.optimizer, self.dtype, self.scaler = optimizer, dtype, scaler or GradScaler(enabled=False)
        self.stochastic_rounding, self._roundings = stochastic_rounding, 0
        self._masters = {}  # of the weights in the model
        self._found_inf = None  # from unscale_() to the end of the step: is a gradient not finite?
        state = optimizer.state_dict()
        for group in optimizer.param_groups:
            self._take_over(group)
        optimizer.load_state_dict(state)  # is the masters' now, and in their dtype
        self._write_weights()

    def __getattr__(self, name):  # param_groups, state, defaults, hooks: those of the optimizer
        if name == "optimizer":  # a copy has none, as Optimizer copies its own attributes alone
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def scale(self, loss):
        return self.scaler.scale(loss)

    @torch.no_grad()
    def unscale_(self):
        """Cast the gradients up, into the masters' .grad, and divide by the scale; step() does it where you do not."""
        if self._found_inf is not None:
            return
        self._read_weights()
        graded = {master: weight.grad for weight, master in self._masters.items() if weight.grad is not None}
        gradients, device = list(graded.values()), next(iter(self._masters)).device
        # A scaler looks at the masters' gradients. Without one look at these: half the bytes.
        found_inf = not self.scaler.is_enabled() and unscale_gradients(gradients, 1.0, device)
        for master in graded:
            master.grad = torch.empty_like(master)
        if graded:
            torch._foreach_copy_([master.grad for master in graded], gradients)  # few kernels for many tensors
        self.scaler.unscale_(self.optimizer)
        self._found_inf = found_inf

    def clip_grad_norm_(self, max_norm):
        """Clip the unscaled gradients to a joint norm of `max_norm`; -> their norm before, in fp32."""
        self.unscale_()
        return nn.utils.clip_grad_norm_(self._masters.values(), max_norm)

    def step(self):
        """Update the masters, unless a gradient is not finite, and round them into the model."""
        self.unscale_()
        try:
            if not self._found_inf:
                self.scaler.step(self.optimizer)
            self._write_weights()
        finally:
            self._end_step()

    def _end_step(self):
        self._found_inf = None
        for master in self._masters.values():
            master.grad = None  # 4 bytes per parameter that nobody needs before the next step
        try:
            self.scaler.update()
        except AssertionError:  # no rank had a gradient: forget the step, keep the scale
            self.scaler.update(self.scaler.get_scale())

    def zero_grad(self, set_to_none=True):
        if self._found_inf is not None:  # clipped, and then not stepped
            self._end_step()
        for weight in self._masters:
            weight.grad = None if set_to_none or weight.grad is None else weight.grad.detach().zero_()

    # ---- Between the model and the masters.

    def _take_over(self, group):
        weights = group["params"]
        if any(weight in self._masters or not weight.is_floating_point() for weight in weights):
            raise ValueError("some parameters appear in more than one parameter group, or are not of floating point")
        for number, weight in enumerate(weights):
            master = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True).requires_grad_()
            self._masters[weight] = group["params"][number] = master
            weight.data = weight.data.to(self.dtype)

    @torch.no_grad()
    def _write_weights(self):
        if self.stochastic_rounding:
            self._roundings += 1
            round_away(self._masters, self._roundings)
        else:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))
        self._versions = [(weight._version, weight.data_ptr()) for weight in self._masters]

    def _read_weights(self):
        """Masters take over what somebody else has written into the model since the last step, as load_state_dict()."""
        for (weight, master), version in zip(self._masters.items(), self._versions, strict=True):
            if self.stochastic_rounding:
                master.data = weight.data.to(master.dtype)
            elif (weight._version, weight.data_ptr()) != version:  # where the two still agree, the master has more bits
                master.data = torch.where(master.data.to(self.dtype) == weight.data, master.data, weight.data)

    # ---- State, and more weights.

    def state_dict(self):
        """The optimizer's own, and besides "master_weights", "scaler", "roundings": loading it resumes bit for bit."""
        self._read_weights()
        masters = [master.detach() for master in self._masters.values()]
        ours = {"master_weights": masters, "scaler": self.scaler.state_dict(), "roundings": self._roundings}
        return self.optimizer.state_dict() | ours

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take over a state_dict() of this class. Raises ValueError where the master weights have other shapes."""
        masters = state_dict["master_weights"]
        ours, theirs = ([tuple(weight.shape) for weight in some] for some in (self._masters, masters))
        if ours != theirs:
            raise ValueError(f"master weights of shapes {theirs} do not fit a model with {ours}")
        self.optimizer.load_state_dict(state_dict)
        self.scaler.load_state_dict(state_dict["scaler"])
        self._read_weights()
        torch._foreach_copy_(list(self._masters.values()), masters)
        self._write_weights()
        self._roundings = state_dict["roundings"]

    def add_param_group(self, param_group):
        self._read_weights()
        self.optimizer.add_param_group(param_group)
        self._take_over(self.param_groups[-1])
        self._write_weights()


# ---------------------------------------------------------------------------------------------------------------------
# 3. The scale: the largest that does not overflow, found by trying.


class GradScaler:
    """Scales losses, unscales gradients, and skips a step in which one of them, on any rank, is not finite.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)     # only to clip, or to look at the gradients
        scaler.step(optimizer)
        scaler.update()                # once, after the steps of all optimizers

    Arguments, defaults, methods, state and types of errors are those of torch.amp.GradScaler. Besides, `process_group`
    holds the ranks that skip together (None: the default group, where there is one): all unscale or step the same
    optimizers in the same order, with gradients or without, and each time all-reduce 4 bytes. With one it cannot be
    pickled; its state_dict() can.
    """

    def __init__(
        self,
        device="cuda",
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        *,
        process_group=None,
    ):
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is enabled, but CUDA is not available. Disabling.", stacklevel=2)
            enabled = False
        if enabled and not backoff_factor < 1.0 < growth_factor:
            raise AssertionError(f"growth_factor {growth_factor} must be > 1, backoff_factor {backoff_factor} < 1")
        if process_group is not None and dist.get_world_size(process_group) < 1:
            raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
        self._device, self._enabled, self._has_scaled = device, enabled, False
        scale = torch.tensor(init_scale, dtype=torch.float32).item()
        self._state = {"scale": scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
        self._state |= {"growth_interval": growth_interval, "_growth_tracker": 0}  # good steps in a row
        self._found = {}  # since the last update: optimizer -> 0, no gradient on any rank; 1, all finite; 2, not all
        self._stepped = set()
        # Weak: a group that someone holds on to after destroy_process_group() may abort the process at its exit.
        self._process_group = process_group and weakref.ref(process_group)

    def scale(self, outputs):
        """`outputs` times the scale: a tensor, or tensors in nested lists, tuples or other iterables."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._has_scaled = True
            # By a tensor, not a number: an fp16 loss times an fp32 scale is fp32, and does not overflow.
            return outputs * torch.full((), self._state["scale"], dtype=torch.float32, device=outputs.device)
        if not hasattr(outputs, "__iter__"):
            raise ValueError(f"outputs must be a tensor or an iterable of tensors, not {type(outputs).__name__}")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer):
        """Divide the gradients of `optimizer` by the scale, in place, and find out whether all ranks' are finite."""
        if not self._enabled:
            return
        group = self._peers()
        if optimizer in self._found:
            raise RuntimeError("unscale_() or step() has already been called on this optimizer since the last update()")
        gradients = [p.grad for options in optimizer.param_groups for p in options["params"] if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients: the optimizer must hold weights in fp32")
        found = unscale_gradients(gradients, self._state["scale"], self._device) + (len(gradients) > 0)
        if group:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        self._found[optimizer] = found

    def _peers(self):
        """-> the group whose ranks skip together; None for one rank alone, which must have called scale()."""
        group = (self._process_group and self._process_group()) or dist.group.WORLD  # None: nobody has set one up
        alone = group is None or dist.get_world_size(group) == 1
        if alone and not self._has_scaled:  # of several ranks, one that computes no loss has none to scale
            raise AssertionError("Attempted unscale_, step or update before scaler.scale(loss)")
        return None if alone else group

    def step(self, optimizer, *args, **kwargs):
        """-> optimizer.step(*args, **kwargs); or None, and no step, where a gradient is not finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not supported if GradScaler is enabled")
        if optimizer in self._stepped:
            raise RuntimeError("step() has already been called since the last update()")
        if optimizer not in self._found:
            self.unscale_(optimizer)
        found = self._found[optimizer].item()  # waits for the device
        if found == 0:
            raise AssertionError("No inf checks were recorded for this optimizer: it has no gradients")
        self._stepped.add(optimizer)
        return optimizer.step(*args, **kwargs) if found == 1 else None

    def update(self, new_scale=None):
        """Set the scale to `new_scale`, or adapt it to what was found since the last update."""
        if not self._enabled:
            return
        state = self._state
        if new_scale is not None:
            self._peers()
            new_scale = torch.as_tensor(new_scale, dtype=torch.float32)
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(f"new_scale is {new_scale}; it must be one number, and need no gradient")
            state["scale"] = new_scale.item()
        else:
            found = max((found.item() for found in self._found.values()), default=0)
            if found == 0:
                raise AssertionError("No inf checks were recorded prior to update")
            factor = 1.0
            state["_growth_tracker"] += 1
            if found == 2:
                factor, state["_growth_tracker"] = state["backoff_factor"], 0
            elif state["_growth_tracker"] == state["growth_interval"]:
                factor, state["_growth_tracker"] = state["growth_factor"], 0
            scale = torch.tensor(state["scale"] * factor, dtype=torch.float32).item()
            state["scale"] = scale if math.isfinite(scale) else state["scale"]
        self._found, self._stepped = {}, set()

    def get_scale(self):
        return self._state["scale"] if self._enabled else 1.0

    def is_enabled(self):
        return self._enabled

    def _accessors(key):
        return lambda self: self._state[key], lambda self, value: self._state.update({key: value})

    get_growth_factor, set_growth_factor = _accessors("growth_factor")
    get_backoff_factor, set_backoff_factor = _accessors("backoff_factor")
    get_growth_interval, set_growth_interval = _accessors("growth_interval")

    def state_dict(self):
        return dict(self._state) if self._enabled else {}

    def load_state_dict(self, state_dict):
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("The source state dict is empty, possibly that of a disabled GradScaler")
        self._state = {key: state_dict[key] for key in self._state}

    def __getstate__(self):
        if self._found:
            raise AssertionError("A GradScaler may only be pickled before unscale_() and step(), or after update()")
        return self.__dict__


def unscale_gradients(gradients, scale, device):
    """Divide `gradients` by `scale`, in place. -> on `device`, 1.0 where one of them is not finite, else 0.0."""
    alike, found_inf = {}, torch.zeros((), dtype=torch.float32, device=device)
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        alike.setdefault((values.device, values.dtype), []).append(values)
    for (place, _), group in alike.items():
        found_here = torch.zeros((), dtype=torch.float32, device=place)
        inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device=place)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_here, inverse)  # one pass for both
        found_inf = torch.maximum(found_inf, found_here.to(device))
    return found_inf


# ---------------------------------------------------------------------------------------------------------------------
# 4. bf16 without masters: each update is made in fp32, and rounded at random such that its expectation is exact.


def round_away(masters, step):
    """Round masters into their weights, on all ranks alike, and keep none until the next step makes new ones."""
    for number, (weight, master) in enumerate(masters.items()):
        # A seed of its own, without which ranks would draw differently and end with different weights.
        generator = torch.Generator(weight.device).manual_seed(1_000_003 * step + number)
        weight.copy_(stochastic_round(master, generator))
        master.data = master.data.new_empty(0)


def stochastic_round(values, generator=None):
    """fp32 to bf16: to either neighbour, with the probabilities that make the expectation exact.

    bf16 is the upper half of fp32. A random number added to the lower half carries into the upper with the probability
    that the lower stands for. What exceeds the largest bf16 becomes it. Zamirai et al. 2020, arXiv 2010.06192, §4.
    """
    largest = torch.finfo(torch.bfloat16).max
    bits = values.float().clamp(-largest, largest).view(torch.int32)
    noise = torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = (bits + noise).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Or fp32 weights, and operations that cast their inputs to what suits them.

# Names in torch, torch.Tensor and torch.nn.functional, without the prefixes special_ and linalg_.
LISTS = {
    "low": """matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addr addbmm baddbmm chain_matmul multi_dot vecdot
        matrix_power einsum linear prelu convolution _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh
        rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""",
    "fp32": """acos asin cosh erfinv exp exp2 expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt sinh tan
        softplus softmax softmin log_softmax gumbel_softmax logsumexp layer_norm native_layer_norm rms_norm group_norm
        normalize sum nansum prod cumsum cumprod mean nanmean var std var_mean std_mean norm vector_norm matrix_norm
        frobenius_norm nuclear_norm renorm dist cdist pdist pairwise_distance cosine_similarity cross_entropy kl_div
        binary_cross_entropy binary_cross_entropy_with_logits interpolate upsample""",  # and what ends in _loss
    "common": "addcdiv addcmul atan2 bilinear cross dot vdot inner grid_sample index_put scatter_add tensordot",
}
KIND = {name: kind for kind, names in LISTS.items() for name in names.split()}
CASTABLE = {torch.float32, torch.float16, torch.bfloat16}


class autocast(ContextDecorator, TorchFunctionMode):
    """A region, or decorated function, in which each operation casts its floating-point inputs (never float64).

        with autocast(torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()                # the gradient of a cast is a cast, so those of fp32 weights are fp32

    `dtype`, torch.bfloat16 or torch.float16, is for matrix products and convolutions; reductions, norms, losses and
    exponentials get fp32; the rest, and what is in place or has out=, gets what it is given. A region that is not
    `enabled` leaves all alone. `cache_enabled`: a weight is cast once in the outermost region, not once per use.

    Unlike torch.autocast's,
    - the lists are those for CUDA on all devices (its own for the CPU keep sums, softmax and layer_norm in 16 bits, and
      compute tensordot and inner so), and those that Python calls: attention, LSTM and GRU as a whole, compositions
      (normalize, cross_entropy), and binary_cross_entropy, which it refuses; mean, var, std, exp2 and nansum are in
      fp32 too;
    - no cast is reused that was made under no_grad where a gradient is needed, or of a weight that has changed since.
      Through .data, as under fsdp.py and zero.py, it changes unseen: leave the region between steps, as with torch's;
    - the recomputation of a checkpoint is outside: give it context_fn=lambda: (nullcontext(), autocast(dtype)).
    """

    regions = threading.local()  # of a thread: .entered, innermost last, and .casts of weights, until it has left all

    def __init__(self, dtype, enabled=True, cache_enabled=True):
        super().__init__()
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"autocast to {dtype}: it must be torch.bfloat16 or torch.float16")
        self.dtype, self.enabled, self.cache_enabled = dtype, enabled, cache_enabled

    def __enter__(self):
        if not getattr(self.regions, "entered", None):
            self.regions.entered, self.regions.casts = [], {}
        self.regions.entered.append(self)
        self._let_torch_know()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.regions.entered.pop()
        self._let_torch_know()
        if not self.regions.entered:
            self.regions.casts.clear()

    def _let_torch_know(self):
        """nn.LSTM takes an input of another dtype than its weights' where torch casts for a device: one nobody has."""
        torch.set_autocast_enabled("ipu", bool(self.regions.entered) and self.regions.entered[-1].enabled)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.enabled and self.regions.entered[-1] is self and kwargs.get("out") is None:
            name = getattr(func, "__name__", "").removeprefix("special_").removeprefix("linalg_")
            kind = KIND.get(name, "fp32" if name.endswith("_loss") else None)
            if kind is not None:
                dtypes = {getattr(value, "dtype", None) for value in tree_leaves((args, kwargs))} & CASTABLE
                common = torch.float32 if len(dtypes) > 1 else next(iter(dtypes), None)
                dtype = {"low": self.dtype, "fp32": torch.float32, "common": common}[kind]
                args, kwargs = tree_map(lambda value: self._cast(value, dtype), (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, value, dtype):
        if getattr(value, "dtype", None) not in CASTABLE - {dtype}:
            return value
        if not (self.cache_enabled and value.is_leaf and value.requires_grad and not value.is_inference()):
            return value.to(dtype)  # not a weight
        key = value, dtype, torch.is_grad_enabled()
        version, cast = self.regions.casts.get(key, (None, None))
        if version != value._version:
            cast = value.to(dtype)
            self.regions.casts[key] = value._version, cast
        return cast


# ---------------------------------------------------------------------------------------------------------------------
# 6. Eight bits, emulated: the factors that fp8 hardware would multiply, multiplied in the dtype of the input.


class Fp8Linear(nn.Module):
    """`linear`, whose parameters it shares, with fp8 factors in its products: y = x₈W₈ᵀ, dx = dy₈W₈, dW = dy₈ᵀx₈.

    x and W are E4M3 (to 448, 3 bits of mantissa), dy is E5M2 (to 57344, 2 bits). Delayed scaling, Transformer Engine's
    recipe: the scale of a tensor comes from its largest absolute values in the last `history` training steps, since
    that of this step would take a pass of its own; the recomputation of a checkpoint counts as one more. Numerics
    only: it runs no faster. Micikevicius et al. 2022, §3.
    """

    def __init__(self, linear, history=16):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        amaxes = torch.zeros(3, history, dtype=torch.float32, device=linear.weight.device)
        self.register_buffer("amaxes", amaxes)  # of x, W and dy

    def forward(self, x):
        y = F.linear(self._round(x, 0, torch.float8_e4m3fn), self._round(self.weight, 1, torch.float8_e4m3fn))
        if y.requires_grad:
            y.register_hook(lambda dy: self._round(dy, 2, torch.float8_e5m2))
        return y if self.bias is None else y + self.bias

    def _round(self, x, which, dtype):
        with torch.no_grad():
            rounded = round_to_fp8(x, dtype, self.amaxes[which].amax())
            if self.training:
                amax = x.abs().amax()
                self.amaxes[which] = self.amaxes[which].roll(1)
                self.amaxes[which, 0] = torch.where(amax.isfinite(), amax, 0)
        return rounded + (x - x.detach())  # exactly `rounded`, whose gradient is passed on to x as it is


def round_to_fp8(x, dtype, amax):
    """x in the precision of `dtype`, by the largest power of two that fits `amax`; what exceeds the range saturates."""
    largest = torch.finfo(dtype).max
    scale = torch.where(amax > 0, torch.exp2((largest / amax.float()).log2().floor().clamp(max=126)), 1.0)
    rounded = (x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale
    return torch.where(x.isfinite(), rounded.to(x.dtype), x)  # GradScaler must see an overflow


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo(bitwise=2)
    model, scaler = copy.deepcopy(demo.model), GradScaler(demo.device.type, growth_interval=demo.args.steps + 1)
    # First with copies of the masters' own dtype. Scales are powers of two, so nothing is rounded, and no bit differs.
    optimizer, dtype = torch.optim.AdamW(model.parameters(), lr=1e-3), next(model.parameters()).dtype
    optimizer = MixedPrecisionOptimizer(optimizer, dtype, scaler)
    step = data_parallel_step(demo, model, optimizer)
    demo.train(step, lambda: ([p.grad / scaler.get_scale() for p in model.parameters()], model.parameters()))
    params, grads, state = held(model.parameters(), optimizer)
    state += held_bytes(optimizer.param_groups[0]["params"])
    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    status = demo.report("amp", (params, grads, state), "2(Ψ+4)(N-1)/N", 2 * (psi + 4) * (N - 1) / N)
    demo.leave(max(status, show_precisions(demo)))


def data_parallel_step(demo, model, optimizer, divisor=1):
    """-> a function that trains on this rank's part of a batch; the loss is divided by `divisor`."""

    def step(inputs, targets):
        optimizer.zero_grad()
        logits = model(inputs.chunk(demo.ranks)[demo.rank])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = language_loss(logits, targets.chunk(demo.ranks)[demo.rank])
        getattr(optimizer, "scale", lambda loss: loss)(loss / divisor).backward()
        for parameter in model.parameters():
            parameter.grad /= demo.ranks  # before the sum, which could overflow
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss.detach()

    return step


def show_precisions(demo, divisor=1024, band=0.02):
    """Train a smaller model in several ways; -> 1 when one that should follow fp32 ends off by more than `band`.

    The loss is divided as if each batch were one of 1024 that make up a step: AdamW ignores a factor, fp16 does not.
    """
    ways = {  # arguments of MixedPrecisionOptimizer, where there is one
        "fp32": {},
        "fp16 (is to fail)": {"dtype": torch.float16},
        "fp16, scaled": {"dtype": torch.float16, "scaler": GradScaler(demo.device.type)},
        "bf16": {"dtype": torch.bfloat16},
        "bf16, stochastic": {"dtype": torch.bfloat16, "stochastic_rounding": True},
        "bf16, autocast": {},
    }
    demo.show("\nprecision           loss" + 44 * " " + "at the end     step   bytes per parameter")
    status, plain = 0, None
    for name, arguments in ways.items():
        torch.manual_seed(demo.args.seed)
        model = language_model(C=64, heads=2, layers=2, T=demo.T).to(demo.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if arguments:
            optimizer = MixedPrecisionOptimizer(optimizer, **arguments)
        if "autocast" in name:
            model.forward = autocast(torch.bfloat16)(model.forward)
        step, start = data_parallel_step(demo, model, optimizer, divisor), time.perf_counter()
        losses = torch.stack([step(*demo.batch(number)) for number in range(demo.args.steps)]) / demo.ranks
        dist.all_reduce(losses)
        ms, plain = 1e3 * (time.perf_counter() - start) / demo.args.steps, losses if plain is None else plain
        end = losses[-5:].mean().item()
        off = end / plain[-5:].mean().item() - 1
        status = max(status, not (abs(off) <= band or "fail" in name))
        heights = (losses - plain.min()) / (plain.max() - plain.min())
        heights = heights.nan_to_num(1).clamp(0, 1).mul(7).round().int()[:: -(-demo.args.steps // 30)]
        curve = "".join("▁▂▃▄▅▆▇█"[height] for height in heights)
        params, grads, moments = held(model.parameters(), optimizer)
        masters = held_bytes(set(optimizer.param_groups[0]["params"]) - set(model.parameters()))
        psi = sum(parameter.numel() for parameter in model.parameters())
        sizes = [size / psi for size in (params, grads, masters, moments / 2, moments / 2)]
        table = " + ".join(f"{size:.0f}" for size in sizes)
        loss = f"{curve:30} {losses[0]:.3f} → {end:.3f}"
        demo.show(f"{name:19} {loss} {off:+12.1%} {ms:5.0f} ms   {sum(sizes):.0f} = {table}")
    return status


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model, in this world and on one device. The same text in every file.


class Embed(nn.Module):
    """(B, T) integers to (B, T, C): token plus position. B batch, T time, C channels, V vocabulary."""

    def __init__(self, V, T, C):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)

    def forward(self, tokens_BT):
        return self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """(B, T, C) to (B, T, C): causal self-attention and MLP, each after a norm and around a residual."""

    def __init__(self, C, heads):
        super().__init__(C, heads, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x_BTC):
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1], x_BTC.device, x_BTC.dtype)
        return super().forward(x_BTC, src_mask=mask, is_causal=True)


def language_model(C=192, heads=6, layers=4, T=64, V=256):
    """A causal transformer over bytes: (B, T) integers to (B, T, V) logits."""
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(Embed(V, T, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends: to single ranks, and in collectives by their ring algorithms."""

    # operator: (position of its payload, how often each byte goes around the ring)
    RING = {"allreduce_": (0, 2), "broadcast_": (0, 1), "_allgather_base_": (0, 1)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in self.RING:
            position, rounds = self.RING[name]
            N = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            self.total += rounds * (N - 1) / N * sum(tensor.nbytes for tensor in tree_leaves(args[position]))
        elif name == "send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(parameters, optimizer):
    """Bytes that parameters, gradients and optimizer state hold on this rank."""
    parameters = list(parameters)
    state = [tensor for tensor in tree_leaves(list(optimizer.state.values())) if isinstance(tensor, torch.Tensor)]
    return held_bytes(parameters), held_bytes([p.grad for p in parameters if p.grad is not None]), held_bytes(state)


class Demo:
    """Joins the world, trains a technique and the same model on one device side by side, compares, and prints.

    One device accumulates the batch in `parts` (None: one per rank). Up to `bitwise` ranks on the CPU the two must be
    bitwise equal in float32; else the demo runs in float64, and they must be within 1e-9.
    """

    T = 64  # tokens in a sequence

    def __init__(self, bitwise=0, parts=None, add_arguments=lambda parser: None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--steps", type=int, default=30)
        parser.add_argument("--batch-size", type=int, help="sequences per step, over all ranks (default: 8 per rank)")
        parser.add_argument("--data", metavar="FILE", help="text to train on (default: the standard library's source)")
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument("--seed", type=int, default=0)
        add_arguments(parser)
        self.args = parser.parse_args()
        self.join_world()
        self.parts = parts or self.ranks
        self.batch_size = 8 * self.ranks if self.args.batch_size is None else self.args.batch_size
        problem = self.read_text(self.args.data)
        if self.args.steps < 1:
            problem = f"--steps {self.args.steps}: at least 1"
        if self.batch_size < 1 or self.batch_size % self.parts:
            problem = f"--batch-size {self.batch_size}: must be a multiple of {self.parts}, to share it out evenly"
        if self.args.device == "cuda" and self.device.type == "cpu":
            problem = "--device cuda: torch sees no GPU"
        self.stop_if(problem)
        self.bitwise = self.ranks <= bitwise and self.device.type == "cpu"
        self.reset()

    def reset(self):
        """Make the model on one device anew, the same on every rank."""
        torch.manual_seed(self.args.seed)
        self.model = language_model(T=self.T).to(self.device, torch.float32 if self.bitwise else torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def join_world(self):
        """As torchrun says, or as a world of one."""
        # Imported after init_process_group (torch.optim does so), its default arguments would keep the group for ever:
        # destroy_process_group() would not end gloo's threads, which now and then abort the process at its exit.
        import torch.distributed.nn.functional

        gpus = torch.cuda.device_count() if self.args.device != "cpu" else 0
        self.device, backend = torch.device("cpu"), "gloo"
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            torch.cuda.set_device(self.device)
            backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"  # NCCL: a GPU each
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def read_text(self, path):
        files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            return f"--data {path}: {error.strerror}"
        if len(text) <= self.T:
            return f"--data {path}: {len(text)} bytes; one sequence and its targets take {self.T + 1}"
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return None

    def stop_if(self, problem):
        """When any rank has a problem, rank 0 prints it, and all ranks exit with status 2."""
        problems = [None] * self.ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.show(f"error: {next(filter(None, problems))}", file=sys.stderr)
            self.leave(2)

    def leave(self, status):
        dist.barrier()  # who leaves early breaks the others' connections
        dist.destroy_process_group()
        sys.exit(status)

    def show(self, text, **kwargs):
        if self.rank == 0:
            print(text, flush=True, **kwargs)

    def batch(self, step):
        """Inputs and targets of all ranks, (B, T) each."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + step)
        starts = torch.randint(len(self.text) - self.T, (self.batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(self.T + 1)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, inputs, targets):
        """Accumulate the gradients of the parts, in rank order; -> their losses."""
        self.optimizer.zero_grad()
        losses = []
        for part, part_targets in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(part), part_targets)
            loss.backward()
            losses.append(loss.item())
        for parameter in self.model.parameters():
            parameter.grad /= self.parts  # after the sum: before it, at 3 parts, rounds differently
        self.optimizer.step()
        return losses

    def train(self, step, state):
        """`step(inputs, targets)` trains on the global batch, -> the loss of this rank's part.
        `state()` -> gradients, parameters: whole, in the order of the plain model."""
        self.losses, self.times, self.times_one_device = [], [], []
        self.largest = dict.fromkeys(("loss", "gradient", "parameter"), 0.0)
        for number in range(self.args.steps):
            batch, sent = self.batch(number), SentBytes()
            start = time.perf_counter()
            with sent if number == 0 else nullcontext():  # counting takes time
                loss = step(*batch).item()
            self.times.append(time.perf_counter() - start)
            self.sent = sent.total or (self.sent if number else 0.0)
            start = time.perf_counter()
            losses = self.step_on_one_device(*batch)
            self.times_one_device.append(time.perf_counter() - start)
            self.losses.append(statistics.mean(losses))
            gradients, parameters = state()
            self.compare("loss", [loss], [losses[self.rank % self.parts]])
            self.compare("gradient", gradients, [parameter.grad for parameter in self.model.parameters()])
            self.compare("parameter", parameters, self.model.parameters())
            if sys.stderr.isatty():
                self.show(f"\rstep {number + 1}/{self.args.steps}\r", end="", file=sys.stderr)

    def compare(self, what, ours, plain):
        for a, b in zip(map(torch.as_tensor, ours), map(torch.as_tensor, plain), strict=True):
            difference = 0.0 if torch.equal(a, b) else (a - b).abs().max().item()
            self.largest[what] = max(self.largest[what], math.inf if math.isnan(difference) else difference)

    def report(self, name, held_here, formula, sent):
        """Print what every demo prints; -> the exit status, 1 when a rank differs from one device."""
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, self.largest)
        largest = {what: max(rank[what] for rank in everyone) for what in self.largest}
        tolerance = 0.0 if self.bitwise else 1e-9
        agree = max(largest.values()) <= tolerance
        verdict = ", ".join(f"max |Δ{what}| {difference:.1e}" for what, difference in largest.items())
        verdict += f", {'' if agree else 'NOT '}equal within {tolerance:g}{'' if self.bitwise else ' in float64'}"
        if not any(largest.values()):
            verdict = f"loss, gradients and parameters bitwise equal over {self.args.steps} steps"
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        size = f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f}M parameters"
        ms, ms_one_device = (1e3 * statistics.median(times) for times in (self.times, self.times_one_device))
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} · {self.device.type}/{dist.get_backend()}"
        self.show(f"{name} · {world} · {size} · {self.args.steps} steps")
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})")
        self.show(f"sent/rank   {self.sent / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {ms_one_device:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    main()

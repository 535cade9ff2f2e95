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
    fp16, bf16                      2          2          4       4+4    16   2Ψ·2(N-1)/N, and 8·2(N-1)/N by a scaler
    bf16, stochastic rounding       2          2          -       4+4    12   2Ψ·2(N-1)/N

step() needs 4 more for the gradients in fp32. What halves is activations, traffic and the time of matrix products.

Run:      torchrun --nproc-per-node 2 amp.py          (python amp.py is a world of one)
Paper:    Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740; in fp8: 2022, arXiv 2209.05433
Mirrors:  torch.amp.GradScaler, torch.autocast, Megatron's mixed-precision optimizer, Transformer Engine's fp8 recipe
Left out: MixedPrecisionOptimizer with sparse gradients or LBFGS; fused optimizers that unscale by themselves
"""

import argparse
import copy
import functools
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
from functools import partialmethod
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
    """One step of `model`, in fp16, whose weights in fp32 are the `masters` that `optimizer` updates.

    `loss_of(model)` -> the loss in fp32; `scale` is the loss scale; -> the scale for the next step.
    """
    (loss_of(model) * scale).backward()  # backward is linear, so this scales every gradient
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
# 2. The scale: the largest that does not overflow, found by trying.


class GradScaler:
    """Scales losses, unscales gradients, and skips a step in which one of them, on any rank, is not finite.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)     # only to clip, or to look at the gradients
        scaler.step(optimizer)
        scaler.update()                # once, after the steps of all optimizers

    Arguments, defaults, methods, state and types of errors are those of torch.amp.GradScaler. Besides, `process_group`
    holds the ranks that skip together (None: the default group, where there is one): all unscale or step the same
    optimizers in the same order, with gradients or without, and each time all-reduce 8 bytes.
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
        self._state = {"scale": torch.tensor(init_scale, dtype=torch.float32).item(), "growth_factor": growth_factor}
        self._state |= {"backoff_factor": backoff_factor, "growth_interval": growth_interval}
        self._state["_growth_tracker"] = 0  # good steps in a row
        self._found = {}  # since the last update, on the device: optimizer -> [a gradient is not finite, there is one]
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
        group = self._shared_with()
        if group is None and not self._has_scaled:  # of several ranks, one that computes no loss has none to scale
            raise AssertionError(
                "Attempted unscale_ or step, but no loss was scaled: call scaler.scale(loss) before it"
            )
        if optimizer in self._found:
            raise RuntimeError(
                "unscale_() has already been called, or step(), on this optimizer since the last update()"
            )
        gradients = [p.grad for options in optimizer.param_groups for p in options["params"] if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients: the optimizer must hold weights in fp32")
        found_inf = unscale_gradients(gradients, self._state["scale"], self._device)
        self._found[optimizer] = torch.stack([found_inf, torch.full_like(found_inf, len(gradients) > 0)])
        if group is not None:
            dist.all_reduce(self._found[optimizer], op=dist.ReduceOp.MAX, group=group)

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
        found_inf, any_gradient = self._found[optimizer].tolist()  # waits for the device
        if not any_gradient:
            raise AssertionError("No inf checks were recorded for this optimizer: it has no gradients")
        result = None if found_inf else optimizer.step(*args, **kwargs)
        self._stepped.add(optimizer)
        return result

    def update(self, new_scale=None):
        """Set the scale to `new_scale`, or adapt it to what was found since the last update."""
        if not self._enabled:
            return
        state, found = self._state, [found.tolist() for found in self._found.values()]
        if new_scale is None:
            if not any(any_gradient for _, any_gradient in found):
                raise AssertionError("No inf checks were recorded prior to update")
            new_scale = state["scale"]
            state["_growth_tracker"] += 1
            if any(found_inf for found_inf, _ in found):
                new_scale, state["_growth_tracker"] = new_scale * state["backoff_factor"], 0
            elif state["_growth_tracker"] == state["growth_interval"]:
                new_scale, state["_growth_tracker"] = new_scale * state["growth_factor"], 0
        new_scale = torch.as_tensor(new_scale, dtype=torch.float32).item()
        state["scale"] = new_scale if math.isfinite(new_scale) else state["scale"]
        self._found, self._stepped = {}, set()

    def _shared_with(self):
        """The process group, or None where there is nobody else."""
        group = self._process_group and self._process_group()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return None if group is None or dist.get_world_size(group) == 1 else group

    def get_scale(self):
        return self._state["scale"] if self._enabled else 1.0

    def is_enabled(self):
        return self._enabled

    def _get(self, key):
        return self._state[key]

    def _set(self, key, value):
        self._state[key] = value

    get_growth_factor, set_growth_factor = partialmethod(_get, "growth_factor"), partialmethod(_set, "growth_factor")
    get_backoff_factor, set_backoff_factor = (
        partialmethod(_get, "backoff_factor"),
        partialmethod(_set, "backoff_factor"),
    )
    get_growth_interval, set_growth_interval = (partialmethod(f, "growth_interval") for f in (_get, _set))

    def state_dict(self):
        return dict(self._state) if self._enabled else {}

    def load_state_dict(self, state_dict):
        if self._enabled and not state_dict:
            raise RuntimeError("The source state dict is empty, possibly that of a disabled GradScaler")
        self._state.update(state_dict if self._enabled else {})

    def __getstate__(self):
        if self._found:
            raise AssertionError("A GradScaler may only be pickled before unscale_() and step(), or after update()")
        return self.__dict__


def unscale_gradients(gradients, scale, device):
    """Divide `gradients` by `scale`, in place. -> on `device`, 1.0 where one of them is not finite, else 0.0."""
    alike, found_inf = {}, torch.zeros((), device=device)
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        alike.setdefault((values.device, values.dtype), []).append(values)
    for (place, _), group in alike.items():
        found_here, inverse = torch.zeros((), device=place), torch.full((), 1.0 / scale, device=place)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_here, inverse)  # one pass for both
        found_inf = torch.maximum(found_inf, found_here.to(device))
    return found_inf


# ---------------------------------------------------------------------------------------------------------------------
# 3. The weights: 16 bits in the model, 32 in the optimizer.


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Turns the weights that `optimizer` holds into copies, in `dtype`, of fp32 masters, which it holds from then on.

        optimizer = MixedPrecisionOptimizer(AdamW(model.parameters()), torch.float16, GradScaler("cuda"))
        optimizer.scale(loss).backward()       # reduce gradients over ranks before what follows
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    Args:
        optimizer: any; its groups and state go on, so learning rate schedulers work on it and on this. What it does
            not hold, as buffers and frozen weights, is for the caller to convert: model.to(dtype), afterwards.
        dtype: of the model's weights and gradients.
        scaler: a GradScaler (or PyTorch's) for this optimizer alone; step() also updates it. Without one a rank skips
            a step where a gradient of its own is not finite.
        stochastic_rounding: bf16 without masters: the update is made in fp32, and rounded up or down at random, on
            all ranks alike, such that its expectation is exact.

    Raises ValueError where dtype, stochastic_rounding and the weights do not go together.
    """

    def __init__(self, optimizer, dtype, scaler=None, *, stochastic_rounding=False):
        if stochastic_rounding and dtype != torch.bfloat16:
            raise ValueError(f"stochastic_rounding is from 32 bits to the 16 of torch.bfloat16, not to {dtype}")
        self.optimizer, self.dtype, self.scaler = optimizer, dtype, scaler
        self.stochastic_rounding, self._roundings = stochastic_rounding, 0
        self._masters, self._versions = {}, []  # weight in the model: its master
        self._unscaled = False
        self._take_over(optimizer.param_groups)

    def __getattr__(self, name):  # param_groups, state, defaults, hooks: those of the optimizer
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @torch.no_grad()
    def _take_over(self, groups):
        weights = [weight for group in groups for weight in group["params"]]
        if any(weight in self._masters for weight in weights):
            raise ValueError("some parameters appear in more than one parameter group")
        dtypes = {self.dtype, *(weight.dtype for weight in weights)}
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"weights and their copies must be of floating point, not {', '.join(map(str, dtypes))}")
        for weight in weights:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            master = weight.detach().to(dtype, copy=True).requires_grad_(weight.requires_grad)
            self._masters[weight] = master
            if state := self.optimizer.state.pop(weight, {}):
                self.optimizer.state[master] = {key: s.to(dtype) if castable(s) else s for key, s in state.items()}
            gradient, weight.grad = weight.grad, None
            weight.data = weight.data.to(self.dtype)
            weight.grad = None if gradient is None else gradient.to(self.dtype)
        for group in groups:
            group["params"] = [self._masters[weight] for weight in group["params"]]
        self._round_masters()

    def scale(self, loss):
        return loss if self.scaler is None else self.scaler.scale(loss)

    @torch.no_grad()
    def unscale_(self):
        """Cast the gradients up, into the masters' .grad, and divide by the scale; step() does it where you do not."""
        if self._unscaled:
            return
        self._follow_weights()
        graded = [(weight.grad, master) for weight, master in self._masters.items() if weight.grad is not None]
        for _, master in graded:
            master.grad = torch.empty_like(master)
        copy_all([master.grad for _, master in graded], [gradient for gradient, _ in graded])
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        else:
            self._found_inf = unscale_gradients(
                [master.grad for _, master in graded], 1.0, next(iter(self._masters)).device
            )
        self._unscaled = True

    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """Clip the unscaled gradients to a joint norm of `max_norm`; -> their norm before, in fp32."""
        self.unscale_()
        return nn.utils.clip_grad_norm_(self._masters.values(), max_norm, norm_type, error_if_nonfinite)

    @torch.no_grad()
    def step(self, closure=None):
        """Update the masters, unless a gradient is not finite, and round them into the model. -> closure()"""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()  # which calls self.scale(loss).backward()
        self.unscale_()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
        elif not self._found_inf:
            self.optimizer.step()
        self._round_masters()
        self._end_step()
        return loss

    def zero_grad(self, set_to_none=True):
        if self._unscaled:  # clipped, and then not stepped
            self._end_step()
        for weight in self._masters:
            weight.grad = None if set_to_none or weight.grad is None else weight.grad.detach().zero_()

    def _end_step(self):
        self._unscaled = False
        if self.scaler is not None:
            self.scaler.update()
        for master in self._masters.values():
            master.grad = None  # 4 bytes per parameter that nobody needs before the next step

    def _follow_weights(self):
        """Masters take over what somebody else has written into the model since the last step, as load_state_dict()."""
        for (weight, master), version in zip(self._masters.items(), self._versions, strict=True):
            if self.stochastic_rounding:
                master.data = weight.data.to(master.dtype)
            elif weight._version != version:  # where the two still agree, the master has more bits
                master.data = torch.where(master.data.to(self.dtype) == weight.data, master.data, weight.data)

    def _round_masters(self):
        if self.stochastic_rounding:
            self._roundings += 1
            for number, (weight, master) in enumerate(self._masters.items()):
                # A seed of its own, without which ranks would draw differently and end with different weights.
                generator = torch.Generator(weight.device).manual_seed(1_000_003 * self._roundings + number)
                weight.copy_(stochastic_round(master, generator))
                master.data = master.data.new_empty(0)  # until the next step
        else:
            copy_all(list(self._masters), list(self._masters.values()))
        self._versions = [weight._version for weight in self._masters]

    # ---- State, and more weights.

    def state_dict(self):
        """The optimizer's own, and besides "master_weights" and "scaler": loading it resumes bit for bit."""
        self._follow_weights()
        masters = {} if self.stochastic_rounding else {"master_weights": list(self._masters.values())}
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return self.optimizer.state_dict() | masters | scaler | {"roundings": self._roundings}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take over a state_dict() of this class, or a plain optimizer's: then the masters stay.

        Raises ValueError where the master weights have other shapes.
        """
        masters = [] if self.stochastic_rounding else state_dict.get("master_weights", [])
        ours, theirs = ([tuple(master.shape) for master in some] for some in (self._masters, masters))
        if masters and ours != theirs:
            raise ValueError(f"master weights of shapes {theirs} do not fit a model with {ours}")
        self.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        self._roundings = state_dict.get("roundings", 0)
        if masters:
            copy_all(list(self._masters.values()), masters)
            self._round_masters()

    def add_param_group(self, param_group):
        self.optimizer.add_param_group(param_group)
        self._take_over(self.param_groups[-1:])


def copy_all(targets, sources):
    if targets:
        torch._foreach_copy_(targets, sources)  # few kernels for many tensors


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
# 4. Or fp32 weights, and operations that cast their inputs to what suits them.

# Names in torch, torch.Tensor and torch.nn.functional, without the prefixes special_ and linalg_.
LISTS = {
    "low": """matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addr addbmm baddbmm chain_matmul multi_dot vecdot
        einsum linear prelu convolution _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""",
    "fp32": """acos asin cosh erfinv exp exp2 expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt sinh tan
        softplus softmax softmin log_softmax gumbel_softmax logsumexp layer_norm native_layer_norm rms_norm group_norm
        normalize sum nansum prod cumsum cumprod mean nanmean var std var_mean std_mean norm vector_norm matrix_norm
        frobenius_norm nuclear_norm renorm dist cdist pdist pairwise_distance cosine_similarity cross_entropy kl_div
        binary_cross_entropy binary_cross_entropy_with_logits interpolate upsample""",  # and what ends in _loss
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put scatter_add tensordot",
}
KIND = {name: kind for kind, names in LISTS.items() for name in names.split()}


class Regions(threading.local):
    """Of one thread: the regions that it is in, innermost last, and casts of weights until it leaves the outermost."""

    def __init__(self):
        self.entered, self.casts = [], {}


class autocast(ContextDecorator, TorchFunctionMode):
    """A region, or decorated function, in which each operation casts its floating-point inputs (never float64).

        with autocast(torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()                # the gradient of a cast is a cast, so those of fp32 weights are fp32

    Args:
        dtype: torch.bfloat16 or torch.float16, for matrix products and convolutions. Reductions, norms, losses and
            exponentials get fp32; what is in neither list gets what it is given, and promotes as ever.
        enabled: False leaves operations alone, also within an enabled region.
        cache_enabled: cast a weight once in the outermost region, not once per use.

    Operations in place or with out= are left alone, as by torch.autocast. Unlike it,
    - the lists are torch's for CUDA on all devices: for the CPU it keeps sums, softmax and layer_norm in 16 bits;
    - what counts is the operation that Python calls: attention, LSTM and GRU are cast as a whole, and compositions
      (normalize, cross_entropy) are in the lists themselves, as is binary_cross_entropy, which torch refuses on CUDA;
    - mean, var, std, exp2 and nansum are in fp32 too;
    - no cast is reused that was made under no_grad where a gradient is needed, or of a weight that has changed since;
    - the recomputation of a checkpoint is outside: give it context_fn=lambda: (nullcontext(), autocast(dtype)).
    """

    regions = Regions()

    def __init__(self, dtype, enabled=True, cache_enabled=True):
        super().__init__()
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"autocast to {dtype}: it must be torch.bfloat16 or torch.float16")
        self.dtype, self.enabled, self.cache_enabled = dtype, enabled, cache_enabled

    def __enter__(self):
        self.regions.entered.append(self)
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.regions.entered.pop()
        if not self.regions.entered:
            self.regions.casts.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.enabled and self.regions.entered[-1:] == [self] and kwargs.get("out") is None:
            name = getattr(func, "__name__", "").removeprefix("special_").removeprefix("linalg_")
            kind = KIND.get(name, "fp32" if name.endswith("_loss") else None)
            if kind is not None:
                dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if castable(value)}
                widest = functools.reduce(torch.promote_types, dtypes, torch.bfloat16)
                dtype = {"low": self.dtype, "fp32": torch.float32, "widest": widest}[kind]
                args, kwargs = tree_map(lambda value: self._cast(value, dtype), (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, value, dtype):
        if not castable(value) or value.dtype == dtype:
            return value
        is_weight = value.is_leaf and value.requires_grad and not value.is_inference()
        if not (is_weight and self.cache_enabled and dtype == self.dtype):
            return value.to(dtype)
        key = id(value), dtype, torch.is_grad_enabled()
        weight, version, cast = self.regions.casts.get(key, (lambda: None, None, None))
        if weight() is not value or version != value._version:
            cast = value.to(dtype)
            self.regions.casts[key] = weakref.ref(value), value._version, cast
        return cast


def castable(value):
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Eight bits, emulated: the factors that fp8 hardware would multiply, multiplied in the dtype of the input.


class Fp8Linear(nn.Module):
    """`linear`, whose parameters it shares, with fp8 factors in its products: y = x₈W₈ᵀ, dx = dy₈W₈, dW = dy₈ᵀx₈.

    x and W are E4M3 (to 448, 3 bits of mantissa), dy is E5M2 (to 57344, 2 bits). Delayed scaling, Transformer Engine's
    recipe: the scale of a tensor comes from its largest absolute values in the last `history` training steps, since
    that of this step would take a pass of its own. Numerics only: it runs no faster. Micikevicius et al. 2022, §3.
    """

    def __init__(self, linear, history=16):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("amaxes", torch.zeros(3, history, device=linear.weight.device))  # of x, W and dy

    def forward(self, x):
        x8 = Rounded.apply(x, self._round, 0, torch.float8_e4m3fn)
        w8 = Rounded.apply(self.weight, self._round, 1, torch.float8_e4m3fn)
        y = F.linear(x8, w8)
        if y.requires_grad:
            y.register_hook(lambda dy: self._round(dy, 2, torch.float8_e5m2))
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def _round(self, x, which, dtype):
        rounded = round_to_fp8(x, dtype, self.amaxes[which].amax())
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
        if self.training:
            self.amaxes[which] = self.amaxes[which].roll(1)
            self.amaxes[which, 0] = torch.where(amax.isfinite(), amax, 0)
        return rounded


class Rounded(torch.autograd.Function):
    """`rounding(x, *args)`, whose gradient is passed on to x as it is."""

    @staticmethod
    def forward(ctx, x, rounding, *args):
        return rounding(x, *args)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None


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
    psi, N = held_bytes(demo.model.parameters()), demo.ranks
    now = (params, grads, state + held_bytes(optimizer.param_groups[0]["params"]))
    status = demo.report("amp", now, "2(Ψ+8)(N-1)/N", 2 * (psi + 8) * (N - 1) / N)
    demo.leave(max(status, show_precisions(demo)))


def data_parallel_step(demo, model, optimizer, region=None, divisor=1):
    """-> a function that trains on this rank's part of a batch; the loss is divided by `divisor`."""

    def step(inputs, targets):
        optimizer.zero_grad()
        with region or nullcontext():
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
    fp16, bf16, mixed = torch.float16, torch.bfloat16, MixedPrecisionOptimizer
    ways = {  # what makes of the optimizer another one; a trailing * marks what is expected to fail
        "fp32": lambda optimizer: optimizer,
        "fp16 alone *": lambda optimizer: optimizer,
        "fp16, masters *": lambda optimizer: mixed(optimizer, fp16),
        "fp16, masters, scaler": lambda optimizer: mixed(optimizer, fp16, GradScaler(demo.device.type)),
        "bf16, masters": lambda optimizer: mixed(optimizer, bf16),
        "bf16, stochastic": lambda optimizer: mixed(optimizer, bf16, stochastic_rounding=True),
        "bf16, autocast": lambda optimizer: optimizer,
        "fp8 products, bf16": lambda optimizer: mixed(optimizer, bf16),
    }
    demo.show("\nprecision (* to fail)   loss             at the end     zero gradients   step    bytes per parameter")
    status, plain = 0, None
    for name, wrap in ways.items():
        torch.manual_seed(demo.args.seed)
        model = language_model(C=64, heads=2, layers=2, T=demo.T).to(demo.device)
        model.to(fp16 if "alone" in name else torch.float32)
        for block in model[1:-2] if "fp8" in name else ():
            block.linear1, block.linear2 = Fp8Linear(block.linear1), Fp8Linear(block.linear2)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=3e-3))
        step = data_parallel_step(demo, model, optimizer, autocast(bf16) if "autocast" in name else None, divisor)
        losses, times = [], []
        for number in range(demo.args.steps):
            start = time.perf_counter()
            losses.append(step(*demo.batch(number)))
            times.append(time.perf_counter() - start)
        losses = torch.stack(losses) / demo.ranks
        dist.all_reduce(losses)
        plain = losses if plain is None else plain
        end, zeros = losses[-5:].mean().item(), [(p.grad == 0).float().mean().item() for p in model.parameters()]
        off = end / plain[-5:].mean().item() - 1
        settled = demo.args.steps >= 20  # before that, fp8 lags by the steps in which its scales had no history
        status = max(status, settled and not (abs(off) <= band or "*" in name))
        curve = sparkline(losses.tolist(), plain.min().item(), plain.max().item())
        demo.show(
            f"{name:23} {curve}  {end:5.3f} {off:+7.1%}   {statistics.mean(zeros):7.0%}       "
            f"{1e3 * statistics.median(times):5.0f} ms   {bytes_by_kind(model, optimizer)}"
        )
    return status


def sparkline(values, low, high):
    """About 15 of the values as bars between `low` and `high`; × where one is not finite."""
    heights = [(v - low) / max(high - low, 1e-9) for v in values[:: -(-len(values) // 15)]]
    return "".join("▁▂▃▄▅▆▇█"[round(7 * min(max(h, 0), 1))] if math.isfinite(h) else "×" for h in heights)


def bytes_by_kind(model, optimizer):
    """What stays allocated: weights, gradients, masters, Adam's two moments."""
    weights, held_by = list(model.parameters()), optimizer.param_groups[0]["params"]
    masters = [] if held_by[0] is weights[0] else held_by
    moments = ([state[moment] for state in optimizer.state.values()] for moment in ("exp_avg", "exp_avg_sq"))
    each = [held_bytes(kind) for kind in (weights, [weight.grad for weight in weights], masters, *moments)]
    each = [size / sum(weight.numel() for weight in weights) for size in each]
    return f"{sum(each):.0f} = " + " + ".join(f"{size:.0f}" for size in each)


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

"""AMP: compute in 16 bits, which is fast, without losing small updates and small gradients.

    fp32 masters ── round ──→ 16-bit weights → forward → loss · scale → backward → 16-bit gradients
         ↑                                                                                │
    optimizer step ←── clip ←── finite on all ranks? ←── fp32, divide by scale ←── all-reduce
                                   │ no: skip the step, halve the scale
                                   └ yes, 2000 times in a row: double the scale

Three things fail in 16 bits. Each has its remedy:

    an update below half a unit in the last place of its weight is lost           → fp32 masters
    an fp16 gradient below 2⁻¹⁴ loses bits, and one up to 2⁻²⁵ becomes zero       → loss scaling
    a sum, norm or exponential overflows at 65504 (fp16), or loses small terms    → autocast

MixedPrecisionOptimizer is for the first two. autocast is for the third, and also for the first,
because its weights stay in fp32; with fp16, add a GradScaler for the second. bf16 needs no scale,
because it has the range of fp32.

Bytes per parameter with Adam, for Ψ parameters on N ranks:

                              weights   gradients   masters   Adam   sum   bytes sent per step
    fp32, or under autocast   4         4           -         4+4    16    4Ψ · 2(N-1)/N: gradients
    MixedPrecisionOptimizer   2         2           4         4+4    16    2Ψ · 2(N-1)/N

step() takes 4 more bytes per parameter while it runs, for fp32 gradients. A GradScaler also sends
one number per step.

Read section 1 for the idea (7 minutes), to section 4 for the technique (31), and the rest to use it
as a library (46).

Run:      torchrun --nproc-per-node 2 amp.py            (--idea trains with section 1 alone)
          python amp.py runs one rank
Paper:    Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740
Mirrors:  torch.amp.GradScaler, torch.autocast, Megatron's optimizer with float16 parameters
Left out: fp8; bf16 without masters (arXiv 2010.06192); closures; an optimizer with gradients on
          several devices; autocast of recurrent layers, its cache of cast weights, and
          torch.utils.checkpoint inside it
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import json
import os
import signal
import sys
import time
from contextlib import ContextDecorator, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

# --------------------------------------------------------------------------------------------------
# 1. The idea: scale the loss and keep fp32 masters; or keep fp32 weights and cast the inputs.


def mixed_precision_step(loss, scale, model, masters, optimizer):
    """Make a step with fp16 weights in `model`, and their fp32 `masters` in `optimizer`.

    `loss` is in fp32. With several ranks, hooks must average each gradient in backward, as the
    demo's average_in_backward() makes them do. Then an inf on one rank is an inf on all. Return the
    scale for the next step. Only section 2 lets it grow.
    """
    (loss * scale).backward()  # backward is linear: every gradient is scaled
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad = weight.grad.to(master.dtype) / scale
        weight.grad = None
    if not all(master.grad.isfinite().all() for master in masters):
        return scale / 2
    optimizer.step()
    for weight, master in zip(model.parameters(), masters, strict=True):
        weight.data.copy_(master)
    return scale


def autocast_linear(layer, dtype):
    """Make an nn.Linear compute in `dtype`. Autograd casts its gradients back to fp32."""

    def forward(x):
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return F.linear(x.to(dtype), layer.weight.to(dtype), bias).to(x.dtype)

    layer.forward = forward


# --------------------------------------------------------------------------------------------------
# 2. The scale: the largest that does not overflow, found by trial.

# An optimizer's found_inf is 1 if a gradient is inf or NaN, 0 if all are finite, and -1 if this
# rank has no gradient. Ranks take the maximum, so -1 stays only if no rank has one.
NO_GRADIENT = -1.0


class LossScaler:
    """Scales losses. An inf or NaN on one rank of `process_group` skips the step on all.

    Each iteration: scale(loss).backward(); average the gradients; unscale_(optimizer), if you clip
    them; step(optimizer); update(). All ranks must step their optimizers in the same order.

    GradScaler, its subclass in section 5, has PyTorch's other methods.
    """

    def __init__(
        self,
        device="cuda",  # as in PyTorch's signature. Not used: it scales on any device
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        process_group=None,
    ):
        if enabled:
            check_factors(growth_factor, backoff_factor, init_scale)
        self._state = {  # PyTorch's state dict
            "scale": 1.0,  # stays so if disabled; otherwise update() below sets init_scale
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "_growth_tracker": 0,  # steps in a row without inf or NaN
        }
        self._enabled = enabled
        self._process_group = process_group
        self._found_inf = {}  # {optimizer: found_inf}, since update()
        self._stepped = set()  # optimizers whose step() was called since update()
        self.update(init_scale)

    def get_scale(self):
        return self._state["scale"]

    def scale(self, outputs):
        """Multiply a tensor, or the tensors in lists and tuples, by the scale."""
        if not self._enabled:
            return outputs
        # A tensor in fp32, so that its product with a loss in fp16 is in fp32. fp16 has no 2¹⁶.
        scale = torch.tensor(self.get_scale())
        return tree_map(lambda output: output * scale, outputs)

    def unscale_(self, optimizer):
        """Divide the gradients by the scale, and find out if they are finite on all ranks."""
        if not self._enabled:
            return
        check_unscale(self, optimizer)
        found_inf = unscale_grads(optimizer, self.get_scale())
        if dist.is_initialized():
            backends = dist.get_backend_config(self._process_group)  # such as "cuda:nccl"
            if found_inf.device.type not in backends:  # such as CPU gradients, and NCCL alone
                found_inf = found_inf.to(backends.partition(":")[0])
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._process_group)
        self._found_inf[optimizer] = found_inf.item()  # waits: the host must know whether to step

    def step(self, optimizer, *args, **kwargs):
        """Return optimizer.step(*args, **kwargs), or None if a gradient is inf or NaN."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer not in self._found_inf:
            self.unscale_(optimizer)
        check_step(self, optimizer, [*args, *kwargs.values()])  # also refuses NO_GRADIENT
        self._stepped.add(optimizer)
        return None if self._found_inf[optimizer] else optimizer.step(*args, **kwargs)

    def update(self, new_scale=None):
        """Set the scale to `new_scale`, or adapt it to every found_inf since the last update()."""
        if not self._enabled:
            return
        state = self._state
        if new_scale is None:
            found_inf = max(self._found_inf.values(), default=NO_GRADIENT)
            if found_inf == NO_GRADIENT:
                raise AssertionError("No inf checks were recorded prior to update")
            new_scale = state["scale"]
            state["_growth_tracker"] += 1
            if found_inf:
                new_scale *= state["backoff_factor"]
                state["_growth_tracker"] = 0
            elif state["_growth_tracker"] >= state["growth_interval"]:
                new_scale *= state["growth_factor"]
                state["_growth_tracker"] = 0
        in_fp32 = torch.as_tensor(new_scale, dtype=torch.float32)  # PyTorch keeps it in fp32
        if in_fp32.isfinite():  # a scale that overflows does not grow
            state["scale"] = in_fp32.item()
        self._found_inf.clear()
        self._stepped.clear()


def unscale_grads(optimizer, scale):
    """Divide the optimizer's gradients by `scale`. Return found_inf of this rank."""
    if hasattr(optimizer, "unscale_"):  # Zero1 to Zero3: gradients are not in .grad
        return optimizer.unscale_(scale)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [real_elements(p.grad) for p in parameters if p.grad is not None]
    value = 0.0 if gradients else NO_GRADIENT
    found_inf = torch.full((), value, dtype=torch.float32, device=parameters[0].device)
    inverse = torch.full_like(found_inf, 1.0 / scale)
    # Multiplies by `inverse`, and sets `found_inf` to 1 if an element is inf or NaN.
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)
    return found_inf


def real_elements(gradient):
    """Return a view of the gradient's stored elements, and of a complex one's real numbers."""
    if gradient.dtype == torch.float16:
        raise ValueError(
            "Attempting to unscale FP16 gradients: the optimizer must hold weights in fp32"
        )
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


# --------------------------------------------------------------------------------------------------
# 3. 16-bit weights in the model, fp32 masters in the optimizer.


class MasterWeights:
    """Casts the model's weights to `dtype`. `optimizer` updates an fp32 master of each weight.

    One iteration, and who calls what:

        scale(loss).backward()      then average the gradients
        clip_grad_norm_(max_norm)   if wanted → unscale_
        step()                      → unscale_, which returns at once if clip_grad_norm_() called it
                                    → scaler.step → optimizer.step, if all gradients are finite
                                    → scaler.update, write_model_params, optimizer.zero_grad
        model.zero_grad()           the gradients in 16 bits, which step() leaves

    MixedPrecisionOptimizer, its subclass in section 5, also does without a scaler.
    """

    def __init__(self, optimizer, dtype, scaler):
        self.optimizer = optimizer
        self.scaler = scaler
        self._weights = []  # the model's parameters, in `dtype`
        self._masters = []  # an fp32 copy of each weight, in the same order
        self._unscaled = None  # (gradient, version) of each weight, from unscale_() to step()
        state = optimizer.state_dict()
        for group in optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                wide = torch.promote_types(weight.dtype, torch.float32)  # float64 stays
                master = weight.detach().to(wide, copy=True)
                if weight.is_floating_point():  # complex weights keep their dtype
                    weight.data = weight.data.to(dtype)
                self._weights.append(weight)
                self._masters.append(master)
                group["params"][i] = master
        # The state was that of the weights. Now it is that of the masters, with momenta in fp32.
        optimizer.load_state_dict(state)

    def scale(self, outputs):
        return self.scaler.scale(outputs)

    @torch.no_grad()
    def unscale_(self):
        """Copy the gradients to the masters, and divide them by the scale: once in a step."""
        # PyTorch counts the writes to a tensor in _version.
        current = [(w.grad, getattr(w.grad, "_version", None)) for w in self._weights]
        if self._unscaled:  # clip_grad_norm_() or the caller has called this
            check_no_backward_since(self._unscaled, current)
            return
        self._unscaled = current
        gradients = []
        copies = []
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None:
                gradients.append(weight.grad.to_dense())
                master.grad = torch.empty_like(gradients[-1], dtype=master.dtype)
                copies.append(master.grad)
        if copies:
            torch._foreach_copy_(copies, gradients)  # few kernels for all weights
        self.scaler.unscale_(self.optimizer)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients down to a total norm of `max_norm`; return the norm they had."""
        self.unscale_()
        return nn.utils.clip_grad_norm_(self._masters, max_norm, norm_type)

    def step(self):
        """Update the masters, unless a gradient is inf or NaN, and round them into the model."""
        self.unscale_()
        self._step_if_finite()
        self.scaler.update()
        self.write_model_params()
        self.optimizer.zero_grad()  # frees the fp32 gradients
        self._unscaled = None

    def _step_if_finite(self):
        self.scaler.step(self.optimizer)

    @torch.no_grad()
    def write_model_params(self):
        """Round the masters into the model. Call it after you have written to the masters."""
        torch._foreach_copy_(self._weights, self._masters)


# --------------------------------------------------------------------------------------------------
# 4. Another way: the weights stay in fp32, and autocast casts the inputs of each operation.


class autocast(ContextDecorator, TorchFunctionMode):
    """A context manager or decorator. In it, operations cast their inputs, except those in float64.

    Matrix products and convolutions compute in `dtype`; reductions, norms, losses and exponentials
    in fp32, as in PyTorch's autocast for CUDA. Call backward outside. Other threads do not see it,
    so under DataParallel decorate the module's forward.
    """

    def __init__(self, dtype, enabled=True):
        if not isinstance(dtype, torch.dtype):  # PyTorch's first argument is a device type
            raise TypeError(f"autocast({dtype!r}): give a dtype instead, such as torch.bfloat16")
        self.dtype = dtype
        self.enabled = enabled

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.enabled:
            check_no_checkpoint()  # torch.utils.checkpoint would recompute without this mode
        if name in LOW_PRECISION:  # this and the other two lists end section 5
            dtype = self.dtype
        elif name in FP32 or name.endswith("_loss") or promotes(name, (args, kwargs)):
            dtype = torch.float32
        else:
            return func(*args, **kwargs)

        def cast(tensor):
            is_castable = tensor.is_floating_point() and tensor.dtype != torch.float64
            return tensor.to(dtype) if is_castable else tensor

        if self.enabled and kwargs.get("out") is None:  # PyTorch too leaves calls with out= alone
            check_can_cast(name)
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        # Hides the call from an outer autocast, even if this one is disabled.
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)


def promotes(name, inputs):
    """Return whether to cast all inputs to fp32, because at least one of them is in fp32."""
    if name not in PROMOTE:
        return False
    return torch.float32 in [getattr(value, "dtype", None) for value in tree_leaves(inputs)]


# --------------------------------------------------------------------------------------------------
# 5. The library: PyTorch's other methods, weights that others write, checks, the lists of autocast.


class GradScaler(LossScaler):
    """torch.amp.GradScaler, with `process_group`."""

    def is_enabled(self):
        return self._enabled

    def get_growth_factor(self):
        return self._state["growth_factor"]

    def set_growth_factor(self, new_factor):
        self._state["growth_factor"] = new_factor

    def get_backoff_factor(self):
        return self._state["backoff_factor"]

    def set_backoff_factor(self, new_factor):
        self._state["backoff_factor"] = new_factor

    def get_growth_interval(self):
        return self._state["growth_interval"]

    def set_growth_interval(self, new_interval):
        self._state["growth_interval"] = new_interval

    def record_found_inf(self, optimizer, found_inf):
        """Replaces unscale_(). `found_inf` must be the same on all ranks."""
        self._found_inf[optimizer] = found_inf

    def state_dict(self):
        return dict(self._state) if self._enabled else {}

    def load_state_dict(self, state_dict):
        if self._enabled:
            if not state_dict:
                raise RuntimeError("this state dict is empty: it is that of a disabled GradScaler")
            self._state = {name: state_dict[name] for name in self._state}


class MixedPrecisionOptimizer(MasterWeights, torch.optim.Optimizer):
    """MasterWeights as an optimizer of PyTorch.

    Without a scaler, a rank checks only its own gradients. If the ranks hold parts of one model,
    give a scaler, even in bf16, so that all skip the same steps. With fused=True and no scaler, the
    optimizer's kernel itself skips the step, so the host does not wait for the GPU. Frozen
    parameters and buffers keep their dtype: cast them yourself. Complex parameters keep theirs. A
    model with batch norms needs autocast, because batch norm refuses 16-bit weights with its fp32
    statistics.
    """

    _is_new = True  # until write_model_params()

    def __init__(self, optimizer, dtype, scaler=None):
        check_has_no_masters(optimizer)
        # torch.optim.Optimizer.__init__() is not called: __getattr__() hands on the optimizer's own
        # param_groups, state and hooks.
        super().__init__(optimizer, dtype, scaler or GradScaler(enabled=False))
        self._note_written_weights()

    def _note_written_weights(self):  # so that later writes, by others, show
        self._versions = [weight._version for weight in self._weights]

    @torch.no_grad()
    def _adopt_written_weights(self):
        """Copy to its master each weight that was written since write_model_params().

        Otherwise step() would undo what other code, such as model.load_state_dict(), writes. A
        write to weight.data raises an error in the first step(), and later none notices it: call
        reload_model_params() after it.
        """
        all_weights = zip(self._weights, self._masters, self._versions, strict=True)
        for weight, master, version in all_weights:
            if weight._version != version:  # PyTorch counts writes, but not those to .data
                if self._is_new:
                    # DDP has broadcast rank 0's 16-bit weights. All masters, even rank 0's, become
                    # these, or ranks would differ.
                    master.copy_(weight)
                else:
                    # Where a state dict has not changed a weight, its master keeps its lower bits.
                    is_same = master.to(weight.dtype) == weight
                    master.copy_(torch.where(is_same, master, weight))
            elif self._is_new:  # only the first step looks for this, because it takes time
                check_not_written_through_data(weight, master)

    def step(self, closure=None):
        if closure is not None:
            raise ValueError("MixedPrecisionOptimizer.step() takes no closure")
        self._adopt_written_weights()
        super().step()

    def _step_if_finite(self):
        if self.scaler.is_enabled():
            super()._step_if_finite()
            return
        gradients = [master.grad for master in self._masters if master.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.numel()]  # [] has no maximum
        # The largest element. A sum of squares would overflow for finite elements.
        is_finite = nn.utils.get_total_norm(gradients, torch.inf).isfinite()
        if self.defaults.get("fused"):  # its kernels read found_inf, and then change nothing
            self.optimizer.found_inf = 1.0 - is_finite.float()
            self.optimizer.step()
            del self.optimizer.found_inf
        elif is_finite:
            self.optimizer.step()

    def write_model_params(self):
        super().write_model_params()
        self._note_written_weights()
        self._is_new = False

    def __getstate__(self):  # for copy and pickle
        raise TypeError(
            "MixedPrecisionOptimizer cannot be copied or pickled: copy the model, make another one "
            "over the copy, and give it this one's state_dict()"
        )

    def __getattr__(self, name):
        # self.optimizer would recurse while it is not set.
        return getattr(self.__dict__["optimizer"], name)

    def zero_grad(self, set_to_none=True):
        for weight in self._weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()
        self.optimizer.zero_grad()  # if unscale_() was called, but not step()
        self._unscaled = None

    def add_param_group(self, param_group):
        raise ValueError("give all parameter groups to the optimizer before it is wrapped")

    def state_dict(self):
        """Return the optimizer's state dict, with "master_weights" and "scaler" added."""
        self._adopt_written_weights()
        ours = {"master_weights": self._masters, "scaler": self.scaler.state_dict()}
        return self.optimizer.state_dict() | ours

    def load_state_dict(self, state_dict):
        self.scaler.load_state_dict(state_dict["scaler"])  # first, because it may raise an error
        self.optimizer.load_state_dict(state_dict)
        torch._foreach_copy_(self._masters, state_dict["master_weights"])
        self.write_model_params()

    @torch.no_grad()
    def reload_model_params(self):
        """Copy the model's weights to the masters. Call it on all ranks, or they will differ."""
        torch._foreach_copy_(self._masters, self._weights)


def check_factors(growth_factor, backoff_factor, init_scale):
    if not (growth_factor > 1.0 and backoff_factor < 1.0 and 0.0 < init_scale < torch.inf):
        raise AssertionError(  # as in PyTorch
            f"{growth_factor=} must be > 1.0, {backoff_factor=} < 1.0, and {init_scale=} positive"
        )


def check_unscale(scaler, optimizer):
    """Raise an error if gradients would be divided by the scale twice, or by nearly zero."""
    if scaler.get_scale() < 2.0**-127:  # 1 / scale is inf in fp32
        raise RuntimeError(
            f"the loss scale has fallen to {scaler.get_scale():.0e}: gradients were inf or NaN in "
            "step after step at any scale, so look for the first NaN in the data and the model"
        )
    if optimizer in scaler._found_inf:
        raise RuntimeError(
            "unscale_() or step() has been called on this optimizer since the last update()"
        )
    if isinstance(optimizer, MixedPrecisionOptimizer):
        raise ValueError(
            "MixedPrecisionOptimizer uses its scaler itself: give it scaler=, and call the "
            "optimizer's scale() and step() instead of the scaler's"
        )


def check_step(scaler, optimizer, arguments):
    if optimizer in scaler._stepped or any(map(callable, arguments)):
        raise RuntimeError("step() takes no closure, and only one call before each update()")
    if scaler._found_inf[optimizer] == NO_GRADIENT:
        raise AssertionError("No inf checks were recorded for this optimizer: no rank has a .grad")


def check_has_no_masters(optimizer):
    if hasattr(optimizer, "no_sync"):  # Zero1 to Zero3
        raise ValueError(
            f"{type(optimizer).__name__} has fp32 masters itself: give it a model in 16 bits"
        )


def check_no_backward_since(unscaled, current):
    """Raise an error if a gradient was written or replaced since this step's first unscale_().

    Both are lists of (gradient, version). The version of a new tensor may be the same. A write to
    .grad.data, or by dist.all_reduce(), is not noticed.
    """
    for (old, old_version), (new, version) in zip(unscaled, current, strict=True):
        if new is not old or version != old_version:
            raise RuntimeError(
                "backward ran, or a .grad was replaced, after clip_grad_norm_() or unscale_(): "
                "call every backward first. To drop the gradients instead of a step, call this "
                "optimizer's zero_grad() and, with a scaler, scaler.update()"
            )


def check_not_written_through_data(weight, master):
    if not torch.equal(master.to(weight.dtype), weight):
        raise RuntimeError(
            "the model's weights were written through .data after MixedPrecisionOptimizer "
            "was made; make it afterwards, or call reload_model_params() on all ranks"
        )


def check_can_cast(name):
    if name == "binary_cross_entropy":  # its gradient overflows fp16. PyTorch refuses it, too
        raise RuntimeError(
            "binary_cross_entropy and BCELoss are unsafe under autocast: leave out the sigmoid, "
            "and use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
        )


def check_no_checkpoint():
    """Raise an error in torch.utils.checkpoint's add_device_types(), which reads tensor.device."""
    if sys._getframe(2).f_code.co_name == "add_device_types":
        raise RuntimeError(
            "torch.utils.checkpoint would compute a second time without amp.autocast: use "
            "activation_checkpoint.checkpoint, or enter autocast in the checkpointed function"
        )


# PyTorch's lists for CUDA (ATen/autocast_mode.h), by the names that Python has for the operations.
# Functions that call these are listed too, because a mode does not see the calls that they make.
LOW_PRECISION = """matmul __matmul__ __rmatmul__ linalg_matmul mm mv bmm addmm addmv addbmm baddbmm
    addr chain_matmul linalg_multi_dot linalg_vecdot einsum linear prelu convolution _convolution
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention multi_head_attention_forward"""
# These, and functions whose names end in _loss. PyTorch's list does not have mean, var and std.
FP32 = """acos arccos asin arcsin cosh sinh tan erfinv exp expm1 log log10 log2 log1p reciprocal
    rsqrt pow __pow__ __rpow__ __rdiv__ special_erfinv special_expm1 special_log1p softplus
    softmax log_softmax logsumexp special_softmax special_log_softmax special_logsumexp softmin
    gumbel_softmax layer_norm native_layer_norm rms_norm group_norm local_response_norm normalize
    norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm
    lp_pool1d lp_pool2d lp_pool3d sum prod cumsum cumprod mean var std dist cdist pdist
    pairwise_distance cosine_similarity cross_entropy linear_cross_entropy nll_loss2d kl_div
    binary_cross_entropy binary_cross_entropy_with_logits interpolate upsample upsample_nearest
    upsample_bilinear
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
PROMOTE = """addcdiv addcmul atan2 arctan2 bilinear cross linalg_cross dot vdot inner
    grid_sampler grid_sample index_put tensordot scatter_add"""
# From here on, these are sets of names.
LOW_PRECISION = set(LOW_PRECISION.split())
FP32 = set(FP32.split())
PROMOTE = set(PROMOTE.split())


# --------------------------------------------------------------------------------------------------
# Demo.

FORMATS = {  # name: dtype of the weights, what to expect
    "fp32": (torch.float32, "16 bytes per parameter: weight 4, gradient 4, Adam 8"),
    "fp16, no scaling": (torch.float16, "trains badly: most gradients are below 2⁻²⁵ and become 0"),
    "fp16": (torch.float16, "as fp32, because the loss is scaled"),
    "bf16": (torch.bfloat16, "needs no scale. 16 bytes: 2 + 2, fp32 master 4, Adam 8"),
    "bf16, autocast": (torch.float32, "weights and gradients in fp32, activations in fp32 or bf16"),
}


def main():
    demo = Demo(__doc__)
    model = demo.start("amp", bitwise=demo.ranks <= 2)  # more ranks add in another order
    average_in_backward(demo, model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The only error of 16 bits is rounding. So with "16-bit" weights in the masters' own dtype, and
    # a scale that is a power of two, no bit may differ.
    dtype = next(model.parameters()).dtype
    if demo.args.idea:
        return train_idea(demo, model, adamw, dtype)
    # The scale never grows, because whole() divides by it after the step.
    scaler = GradScaler(demo.device.type, growth_interval=2**31)
    optimizer = MixedPrecisionOptimizer(adamw, dtype, scaler)

    def whole():
        gradients = [parameter.grad / scaler.get_scale() for parameter in model.parameters()]
        return gradients, model.parameters()

    demo.train(functools.partial(train_step, demo, model, optimizer, scaler), whole)
    status = report(demo, model, optimizer)
    demo.show()
    compare_formats(demo)
    return status


def train_idea(demo, model, optimizer, dtype):
    """Train with section 1. As in main(), `dtype` is that of the masters."""
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["params"] = masters
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            autocast_linear(layer, dtype)

    def step(inputs, targets):
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        mixed_precision_step(loss, 2.0**16, model, masters, optimizer)
        return loss

    demo.train(step, lambda: ([master.grad for master in masters], model.parameters()))
    return report(demo, model, optimizer)


def report(demo, model, optimizer):
    weights, gradients, adam = held(model.parameters(), optimizer)
    dtype = next(model.parameters()).dtype
    masters = held_bytes(optimizer.param_groups[0]["params"])
    sent = 2 * weights * (1 - 1 / demo.ranks)
    formula = f"2·{dtype.itemsize}Ψ(N-1)/N"
    status = demo.report((weights, gradients, masters + adam), formula, sent)
    demo.show(
        f"            (here in {dtype}; 16-bit params, grads and traffic take 2 bytes per element)"
    )
    return status


def average_in_backward(demo, model):
    """Make backward average each gradient over the ranks, as DDP does."""

    def hook(parameter):
        parameter.grad /= demo.ranks  # before the sum, which could overflow
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def compare_formats(demo):
    """Train a smaller model in each format, on the loss divided by 1024."""
    demo.show("16 bits halve activations and traffic and, if the hardware supports them, time.")
    demo.show("Weights, gradients and optimizer state still take 16 bytes per parameter.")
    demo.show("Here the loss is divided by 1024, so that gradients are too small for fp16.")
    demo.show("2 layers of 64      loss vs fp32     time")
    losses = {}
    for name, (dtype, comment) in FORMATS.items():
        torch.manual_seed(demo.args.seed)
        model = language_model(C=64, heads=2, layers=2).to(demo.device)
        average_in_backward(demo, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scaler = GradScaler(demo.device.type, enabled=name == "fp16")
        if dtype != torch.float32:
            optimizer = MixedPrecisionOptimizer(optimizer, dtype, scaler)
        if "autocast" in name:
            model.forward = autocast(torch.bfloat16)(model.forward)
        start = demo.now()
        for number in range(demo.args.steps):
            inputs, targets = demo.batch(number)
            loss = train_step(demo, model, optimizer, scaler, inputs, targets, divisor=1024)
        ms = 1e3 * (demo.now() - start) / demo.args.steps
        losses[name] = loss.item()
        change = losses[name] / losses["fp32"] - 1
        demo.show(f"{name:18}{losses[name]:6.3f}  {change:+6.1%} {ms:5.0f} ms   {comment}")


def train_step(demo, model, optimizer, scaler, inputs, targets, divisor=1):
    optimizer.zero_grad()
    logits = model(demo.part(inputs))
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    loss = language_loss(logits, demo.part(targets))
    scaler.scale(loss / divisor).backward()  # as optimizer.scale()
    optimizer.step()
    return loss.detach()


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


class Demo:
    """Trains with a technique, trains the same model on one device, and compares the two."""

    def __init__(self, description, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dtypes = ["float64", "float32", "bfloat16"]
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.error = self.stop
        shared = {
            "--idea": {"action": "store_true", "help": "train with section 1 alone"},
            "--steps": {"type": int, "default": steps, "help": "of training"},
            "--seed": {"type": int, "default": 0, "help": "of the model and the batches"},
            "--device": {"choices": devices, "default": devices[-1]},
            "--dtype": {"choices": dtypes, "help": "(default: that of the claim)"},
            "--data": {"metavar": "FILE", "default": argparse.__file__, "help": "to train on"},
        }
        for flag, options in (shared | (flags or {})).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.steps = f"{self.args.steps} step{'s' * (self.args.steps > 1)}"
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        gpu = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        self.device = torch.device("cpu" if self.args.device == "cpu" else f"cuda:{gpu}")
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        """End with status 2. Every rank finds the same error, so one per machine prints it."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr, flush=True)
            # torchrun ends its own report with the message in this file.
            error = json.dumps({"message": f"error: {message}", "timestamp": time.time()})
            Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).write_text(error)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends
        os._exit(2)

    def show(self, line=""):
        if self.rank == 0:
            print(line, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Return a copy of the plain model. One device takes the batch in `parts`."""
        join_world(self.device)
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        dtype = "float64" if self.tolerance else "float32"
        if self.args.dtype not in (None, dtype, "float64"):
            self.tolerance = torch.inf  # claims nothing
        dtype = self.args.dtype or dtype
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        name += " idea" if self.args.idea else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        where = f"{self.device.type}/{dist.get_backend()}"
        size = sum(map(torch.numel, self.model.parameters())) / 1e6
        self.show(f"{name} · {ranks} · {where} · {size:.1f}M parameters in {dtype} · {self.steps}")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def train(self, step, whole):
        """Compare gradients and parameters, `whole()`, after each step(inputs, targets) -> loss."""
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = []  # the largest of each tensor, in each step
        for number in range(self.args.steps):
            batch = self.batch(number)
            start = self.now()
            is_last = number + 1 == self.args.steps
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            loss = torch.tensor([x for x in losses if x is not None], dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                self.differences.append((ours - theirs).abs().max().item())
            if number % -(-self.args.steps // 3) == 0:  # three lines in all
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss.item():.3f}")

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            losses.append(language_loss(self.model(x), y))
            losses[-1].backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_div_(gradients, self.parts)  # 3 parts would round differently before the sum
        self.optimizer.step()
        return [torch.stack(losses).mean().detach().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def report(self, held_here, formula, sent):
        """Print the result (docs/running.md). Return 1 if a rank differs."""
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        elif self.tolerance == torch.inf:
            verdict = f"differ by up to {largest:.0e}"
        plain = held(self.model.parameters(), self.optimizer)
        params, grads, state, *plain = (f"{size / 1e6:.1f}" for size in [*held_here, *plain])
        held_line = f"params {params} MB   grads {grads} MB   optimizer {state} MB"
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device loss, gradients and parameters {verdict} over {self.steps}")
        self.show(f"held/rank   {held_line}      (1 device: {' / '.join(plain)})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.head_dim = C // heads
        self.norm1 = nn.LayerNorm(C)
        self.norm2 = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)
        self.linear1 = nn.Linear(C, 4 * C)
        self.linear2 = nn.Linear(4 * C, C)

    def forward(self, x):  # (batch, time, C)
        q, k, v = map(self.split_heads, self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))

    def split_heads(self, x):  # (batch, time, C) to (batch, heads, time, head_dim)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def language_model(C=192, heads=6, layers=4, V=256):
    blocks = [Block(C, heads) for _ in range(layers)]
    # No position embedding: the causal mask alone tells positions apart.
    return nn.Sequential(nn.Embedding(V, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends. Collectives count as their ring algorithms send."""

    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_uneven = name == "alltoall_base_" and args[4]  # such exchanges do not count
        if name == "send":
            self.total += args[0][0].nbytes
        elif "c10d" in func.namespace and name != "recv_" and not is_uneven:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            N = dist.ProcessGroup.unbox(group).size()
            inputs = args[0] if args[1] is group else args[1]  # outputs may come first
            # How often the inputs go around the ring. An operator that is not named counts once.
            rounds = {"allreduce_": 2, "allgather_": N, "_allgather_base_": N}.get(name, 1)
            size = sum(tensor.nbytes for tensor in tree_leaves(inputs))
            self.total += rounds * size * (N - 1) / N
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def join_world(device):
    """Connect the ranks, unless they are connected: by NCCL if each has a GPU of its own."""
    if dist.is_initialized():
        return
    options = {"backend": "gloo", "timeout": timedelta(seconds=120)}
    world = dist.HashStore(), 0, 1  # without torchrun there is one rank
    if "RANK" in os.environ:
        world = next(dist.rendezvous("env://", timeout=options["timeout"]))
    store, rank, ranks = world
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A rank may see no GPU but its own, so only its UUID says whether another rank has it, too.
        store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(device).uuid))
        gpus = {store.get(f"gpu {number}") for number in range(ranks)}
        if len(gpus) == ranks or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            options |= {"backend": "nccl", "device_id": device}
            os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # torch 2.7 may hang
    dist.init_process_group(store=store, rank=rank, world_size=ranks, **options)


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

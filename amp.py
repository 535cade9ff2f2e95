"""AMP: compute in 16 bits, keep the weights that train in 32, and scale the loss so that small gradients survive.

One step in fp16; in bf16 the same without the scale S:

    fp32 master weights ── round ──→ 16-bit weights → forward → loss · S → backward → 16-bit gradients · S
            ↑                                                                                 │
      optimizer step ←── clip ←── finite on all ranks? ←── cast up, divide by S ←── all-reduce
                                       │ no: skip the step, S ← S/2
                                       └ yes, 2000 times in a row: S ← 2S

Three things fail in 16 bits, the second in fp16 alone, as bf16 has the exponents of fp32. Each has its remedy:

    an update of less than half a unit in the last place of its weight is lost     → fp32 master weights
    a gradient of at most 2⁻²⁵ rounds to zero, and has few bits below 2⁻¹⁴         → loss scaling
    a sum, norm or exponential overflows at 65504, or loses its small terms        → those in fp32: autocast

Bytes per parameter, with Adam (Ψ parameters, N ranks); step() takes 4 more, for the gradients in fp32:

                               weights   gradients   masters   Adam   sum   bytes sent per step
    fp32, or under autocast       4          4          -       4+4    16   4Ψ·2(N-1)/N: an all-reduce of gradients
    MixedPrecisionOptimizer       2          2          4       4+4    16   2Ψ·2(N-1)/N, and 4·2(N-1)/N by a scaler

Run:      torchrun --nproc-per-node 2 amp.py          (python amp.py is a world of one)
Paper:    Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740
Mirrors:  torch.amp.GradScaler, torch.autocast, Megatron's mixed-precision optimizer
Left out: fp8, bf16 without masters (arXiv 2010.06192), closures, autocast of recurrent layers
"""

import argparse
import copy
import functools
import os
import signal
import sys
import time
from contextlib import ContextDecorator, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: scale the loss, cast gradients up, update fp32 masters, or skip the step, and round the masters.


def mixed_precision_step(model, masters, optimizer, loss_of, scale):
    """One step of an fp16 `model` whose fp32 `masters` the `optimizer` updates; -> the next scale, which only falls."""
    (
        loss_of(model) * scale
    ).backward()  # of a loss in fp32. Backward is linear, so this scales every gradient
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad = weight.grad.float() / scale
        weight.grad = None
    if not all(master.grad.isfinite().all() for master in masters):
        return scale / 2
    optimizer.step()
    for weight, master in zip(model.parameters(), masters, strict=True):
        weight.data.copy_(master)
    return scale


# ---------------------------------------------------------------------------------------------------------------------
# 2. The scale: the largest that does not overflow, found by trying.


NO_GRADIENT = (
    -1.0
)  # below finite (0) and inf or NaN (1), so that MAX over ranks keeps it only if all have none


def device_to_reduce_on(device, process_group):
    """`device`, or one that the group's backend can reduce on: NCCL takes no tensor on the CPU."""
    backends = dist.get_backend_config(process_group).split(",")  # "cpu:gloo", "cuda:nccl"
    kinds = [backend.partition(":")[0] for backend in backends]
    return device if device.type in kinds else torch.device(kinds[0])


class GradScaler:
    """torch.amp.GradScaler, with its arguments, state and exceptions; one rank's inf or NaN skips the step on all.

    scale(loss).backward(); reduce the gradients over ranks; unscale_(optimizer), to clip; step(optimizer); update().
    All ranks of `process_group` (None: the default group, if any) unscale or step the same optimizers in one order.
    Without CUDA it scales all the same, where torch's with device="cuda" disables itself.
    """

    def __init__(
        self,
        device="cuda",
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        process_group=None,
    ):
        self._enabled, self._process_group = enabled, process_group
        self._state = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        self._state |= {
            "growth_interval": growth_interval,
            "_growth_tracker": 0,
        }  # good steps in a row
        self.update(init_scale)

    def scale(self, outputs):
        """`outputs` times the scale: a tensor, or tensors in nested lists and tuples."""
        if not self._enabled:
            return outputs
        scale = torch.tensor(
            self._state["scale"], dtype=torch.float32
        )  # as a tensor it makes an fp16 loss fp32
        return tree_map(lambda output: output * scale, outputs)

    def unscale_(self, optimizer):
        """Divide the gradients of `optimizer` by the scale, in place, and find out whether all ranks' are finite."""
        if not self._enabled:
            return
        if optimizer in self._found:
            raise RuntimeError(
                "unscale_() or step() has already been called on this optimizer since the last update()"
            )
        if hasattr(optimizer, "unscale_"):  # zero.py's, whose gradients are not in .grad
            found = optimizer.unscale_(self._state["scale"])
        else:
            found = self._unscale_grad(optimizer)
        if dist.is_initialized():
            found = found.to(device_to_reduce_on(found.device, self._process_group))
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._process_group)
        self._found[optimizer] = found

    def _unscale_grad(self, optimizer):
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                "Attempting to unscale FP16 gradients: the optimizer must hold weights in fp32"
            )
        # Parameters are on one kind of device on all ranks; gradients may be missing on some.
        device = optimizer.param_groups[0]["params"][0].device
        found = torch.zeros((), dtype=torch.float32, device=device)
        if gradients:
            inverse = torch.full_like(found, 1.0 / self._state["scale"])
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        else:
            found.fill_(NO_GRADIENT)
        return found

    def record_found_inf(self, optimizer, found_inf):
        """Record whether a gradient is inf or NaN, the same on all ranks, instead of unscale_().

        For gradients that the caller divides by get_scale() itself.
        """
        if self._enabled:
            self._found[optimizer] = torch.as_tensor(found_inf, dtype=torch.float32)

    def step(self, optimizer, *args, **kwargs):
        """-> optimizer.step(*args, **kwargs); or None, and no step, where a gradient is not finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or optimizer in self._stepped:
            raise RuntimeError(
                "step() takes no closure, and update() has to follow before it is called again"
            )
        if optimizer not in self._found:
            self.unscale_(optimizer)
        found = self._found[optimizer].item()
        if found == NO_GRADIENT:  # on any rank, so all ranks raise
            raise AssertionError(
                "No inf checks were recorded for this optimizer: no rank has a .grad to unscale. Call backward first. "
                f"If {type(optimizer).__name__} keeps gradients elsewhere, train in bf16 without a scaler"
            )
        self._stepped.add(optimizer)
        return None if found else optimizer.step(*args, **kwargs)

    def update(self, new_scale=None):
        """Set the scale to `new_scale`, or adapt it to what was found since the last update."""
        if not self._enabled:
            return
        if new_scale is None:
            if not self._found:
                raise AssertionError("No inf checks were recorded prior to update")
            new_scale, good_steps = self._state["scale"], self._state["_growth_tracker"] + 1
            if any(found > 0 for found in self._found.values()):
                new_scale, good_steps = new_scale * self._state["backoff_factor"], 0
            elif good_steps == self._state["growth_interval"]:
                new_scale, good_steps = new_scale * self._state["growth_factor"], 0
            self._state["_growth_tracker"] = good_steps
        new_scale = torch.tensor(float(new_scale), dtype=torch.float32)
        if new_scale.isfinite():
            self._state["scale"] = new_scale.item()
        self._found, self._stepped = {}, set()  # of each optimizer, until the next update

    def get_scale(self):
        return self._state["scale"] if self._enabled else 1.0

    def is_enabled(self):
        return self._enabled

    def state_dict(self):
        return dict(self._state) if self._enabled else {}

    def load_state_dict(self, state_dict):
        if self._enabled:
            self._state = {key: state_dict[key] for key in self._state}


# ---------------------------------------------------------------------------------------------------------------------
# 3. The real one, around any optimizer: 16 bits in the model, 32 in the optimizer.


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Turns the weights that `optimizer` holds into copies, in `dtype`, of fp32 masters, which it holds from then on.

    scale(loss).backward(); reduce the gradients over ranks; clip_grad_norm_(1.0); step(), which updates `scaler`, too.
    Without one, a rank skips the step where its own gradients' norm is not finite; ranks that hold parts of one model,
    as in tensor or pipeline parallelism, need one to agree on that, in bf16 too. What is loaded into the model counts.
    """

    def __init__(self, optimizer, dtype, scaler=None):
        if hasattr(optimizer, "no_sync"):  # zero.py's
            raise ValueError(
                f"{type(optimizer).__name__} has fp32 masters of its own: give it a model in {dtype}"
            )
        self.optimizer, self.dtype, self.scaler = (
            optimizer,
            dtype,
            scaler or GradScaler(enabled=False),
        )
        self.scale, self._masters, state = self.scaler.scale, {}, optimizer.state_dict()
        for group in optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                wide = torch.promote_types(weight.dtype, torch.float32)
                group["params"][i] = self._masters[weight] = weight.detach().to(wide, copy=True)
                weight.data = weight.data.to(dtype)
        # The moments of the weights are now those of the masters, in the masters' dtype.
        optimizer.load_state_dict(state)
        self.write_model_params()
        self._as_constructed = (
            True  # no step, no load_state_dict: the masters are the model's weights
        )

    def __getattr__(self, name):  # param_groups, state, defaults, hooks: those of the optimizer
        return getattr(self.__dict__["optimizer"], name)

    @torch.no_grad()
    def write_model_params(self):
        """Round the masters into the model's weights, after the caller has written to the masters, for example."""
        torch._foreach_copy_(list(self._masters), list(self._masters.values()))
        self._versions = [weight._version for weight in self._masters]
        self._as_constructed = False

    @torch.no_grad()
    def reload_model_params(self):
        """Make the masters equal to the model's weights. All ranks of a replicated model must call it."""
        torch._foreach_copy_(list(self._masters.values()), list(self._masters))
        self._versions = [weight._version for weight in self._masters]

    @torch.no_grad()
    def _adopt_written_weights(self):
        """Take into the masters what other code has written to the weights: DDP's broadcast, load_state_dict."""
        for (weight, master), version in zip(self._masters.items(), self._versions, strict=True):
            if weight._version == version:
                continue
            if (
                self._as_constructed
            ):  # the source of a broadcast must drop the bits that nobody received
                master.copy_(weight)
            else:  # a weight that was written back as it was keeps its master's bits
                master.copy_(torch.where(master.to(self.dtype) == weight, master, weight))

    def _check_masters(self):
        """Raise RuntimeError if the weights were written through .data, which leaves their versions as they were."""
        for weight, master in self._masters.items():
            if not torch.equal(master.to(self.dtype), weight):
                raise RuntimeError(
                    "the model's weights were written through .data after MixedPrecisionOptimizer was made; "
                    "make it afterwards, or call its reload_model_params() on all ranks"
                )

    def unscale_(self):
        """Cast the gradients up, into the masters' .grad, and divide by the scale; step() does it where you do not."""
        if any(master.grad is not None for master in self._masters.values()):
            return  # it is done
        for weight, master in self._masters.items():
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype, copy=True)
        self.scaler.unscale_(self.optimizer)

    def clip_grad_norm_(self, max_norm):
        """Clip the unscaled gradients to a joint norm of `max_norm`; -> their norm before, in fp32."""
        self.unscale_()
        return nn.utils.clip_grad_norm_(self._masters.values(), max_norm)

    def step(self):
        """Update the masters, unless a gradient is not finite, and round them into the model."""
        self._adopt_written_weights()
        if self._as_constructed:
            self._check_masters()
        self.unscale_()
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if self.scaler.is_enabled() or nn.utils.get_total_norm(gradients).isfinite():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.write_model_params()
        self.optimizer.zero_grad()  # 4 bytes per parameter that nobody needs before the next step

    def zero_grad(self, set_to_none=True):
        for weight in self._masters:
            weight.grad = None if set_to_none or weight.grad is None else weight.grad.zero_()
        self.optimizer.zero_grad()  # unscaled, and then not stepped

    def state_dict(self):
        """The optimizer's own, and besides "master_weights" and "scaler": loading it resumes bit for bit."""
        self._adopt_written_weights()
        masters = list(self._masters.values())
        return self.optimizer.state_dict() | {
            "master_weights": masters,
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        self.scaler.load_state_dict(state_dict["scaler"])
        torch._foreach_copy_(list(self._masters.values()), state_dict["master_weights"])
        self.write_model_params()


# ---------------------------------------------------------------------------------------------------------------------
# 4. Or fp32 weights, and operations that cast their inputs to what suits them.

# The core of torch.autocast's lists for CUDA, as Python calls them. What ends in _loss is in fp32 as well.
LOW = """matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv baddbmm einsum linear conv1d conv2d conv3d prelu
    conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention multi_head_attention_forward"""
FP32 = """exp expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt softplus softmax softmin log_softmax
    logsumexp layer_norm rms_norm group_norm normalize sum prod cumsum cumprod mean var std norm linalg_norm
    linalg_vector_norm dist cdist cosine_similarity cross_entropy kl_div binary_cross_entropy_with_logits"""
LOW, FP32 = set(LOW.split()), set(FP32.split())


class autocast(ContextDecorator, TorchFunctionMode):
    """A region, or decorated function, in which each operation casts its floating-point inputs (never float64).

    Matrix products and convolutions get `dtype`; reductions, norms, losses and exponentials fp32, also on a CPU, where
    torch leaves some as they are. A weight is cast once in a region. Run backward outside: it casts back itself.
    """

    def __init__(self, dtype, enabled=True):
        self.dtype, self.enabled, self._casts = dtype, enabled, {}

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._casts.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in LOW and name not in FP32 and not name.endswith("_loss"):
            return func(*args, **kwargs)
        if self.enabled and kwargs.get("out") is None:
            cast = functools.partial(self._cast, self.dtype if name in LOW else torch.float32)
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        with torch._C.DisableTorchFunction():  # else a region around this one would cast as well
            return func(*args, **kwargs)

    def _cast(self, dtype, tensor):
        if tensor.dtype not in {torch.float32, torch.float16, torch.bfloat16} - {dtype}:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):  # not a weight
            return tensor.to(dtype)
        key = tensor, tensor._version, dtype, torch.is_grad_enabled()
        if key not in self._casts:
            self._casts[key] = tensor.to(dtype)
        return self._casts[key]


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    model = demo.start("amp", bitwise=demo.ranks <= 2)
    # Rounding is all that 16 bits change: in the masters' own dtype, scaled by a power of two, no bit may differ.
    dtype, scaler = next(model.parameters()).dtype, GradScaler(demo.device.type, growth_factor=1.0)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), dtype, scaler
    )
    step = functools.partial(train_step, demo, model, optimizer)
    demo.train(
        step,
        lambda: ([p.grad / scaler.get_scale() for p in model.parameters()], model.parameters()),
    )
    weights, gradients, adam = held(model.parameters(), optimizer)
    states, formula = (
        adam + held_bytes(optimizer.param_groups[0]["params"]),
        2 * weights * (1 - 1 / demo.ranks),
    )
    status = demo.report((weights, gradients, states), f"2·{dtype.itemsize}Ψ(N-1)/N", formula)
    demo.show(
        f"(Compared in {dtype}, masters and all. In 16 bits params, grads and what is sent are 2 bytes each.)\n"
    )
    ways = {
        "fp32": (
            torch.float32,
            "what the others are to reach. 16 bytes per parameter: 4 + 4, and 8 of Adam",
        ),
        "fp16, no scaling": (
            torch.float16,
            "is to fail: of this loss, / 1024, most gradients are below 2⁻²⁵, zero",
        ),
        "fp16": (torch.float16, "the same loss, scaled"),
        "bf16": (torch.bfloat16, "no scale needed. 16 bytes: 2 + 2, 4 of the master, 8 of Adam"),
        "bf16, autocast": (torch.float32, "weights and gradients in fp32, activations in both"),
    }
    demo.show(
        "16 bits halve activations, traffic and, on hardware for it, time, but not the 16 bytes per parameter."
    )
    demo.show("C = 64, 2 layers    loss vs fp32     time")
    losses = {}
    for name, (dtype, why) in ways.items():
        torch.manual_seed(demo.args.seed)
        model, start = language_model(C=64, heads=2, layers=2).to(demo.device), time.perf_counter()
        scaler = GradScaler(demo.device.type, enabled=name == "fp16")
        optimizer = MixedPrecisionOptimizer(
            torch.optim.AdamW(model.parameters(), lr=3e-3), dtype, scaler
        )
        if "autocast" in name:
            model.forward = autocast(torch.bfloat16)(model.forward)
        for number in range(demo.args.steps):
            losses[name] = train_step(
                demo, model, optimizer, *demo.batch(number), divisor=1024
            ).item()
        ms = 1e3 * (time.perf_counter() - start) / demo.args.steps
        demo.show(
            f"{name:18}{losses[name]:6.3f}  {losses[name] / losses['fp32'] - 1:+6.1%} {ms:5.0f} ms   {why}"
        )
    return status


def train_step(demo, model, optimizer, inputs, targets, divisor=1):
    optimizer.zero_grad()
    logits = model(demo.part(inputs))
    loss = language_loss(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), demo.part(targets)
    )
    optimizer.scale(loss / divisor).backward()
    for parameter in model.parameters():
        parameter.grad /= demo.ranks  # before the sum, which could overflow
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return loss.detach()


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


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
    """Adds up the bytes that this rank sends. A collective counts as its ring algorithm sends."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "_allgather_base_": (1, 0)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.total += self.sent_by(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent_by(self, operator, args):
        if operator in ("send", "recv_"):
            return args[0][0].nbytes if operator == "send" else 0
        rounds, payload = self.RING[operator]  # KeyError: an unknown operator is not 0 bytes
        handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(handle)
        if operator == "alltoall_base_" and args[4]:  # the rows that each rank gets
            rows = sum(args[4]) - args[4][group.rank()]
            return rows * args[payload][:1].nbytes
        size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return rounds * size * (group.size() - 1) / group.size()


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A storage that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def choose_device(name):
    """This rank's device, and the backend that it can use: NCCL wants a GPU for each local rank."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 or newer
    return device, "nccl" if enough or may_share else "gloo"


def join_world(device, backend):
    """Initialize the default group: NCCL if all ranks on all machines can use it, else gloo."""
    timeout = timedelta(seconds=120)
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    else:  # without torchrun
        store, rank, ranks = dist.HashStore(), 0, 1
    store.set(f"backend/{rank}", backend)
    backends = {store.get(f"backend/{peer}") for peer in range(ranks)}
    backend = "nccl" if backends == {b"nccl"} else "gloo"
    options = {"store": store, "rank": rank, "world_size": ranks, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, **options)


class Demo:
    """Trains with a technique and, beside it, the same model on one device, and compares the two.

    If the technique claims to be bitwise equal, they train in float32, otherwise in float64.
    """

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error = self.stop
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--device", choices=devices, default=devices[-1])
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="a text")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")
        self.device, backend = choose_device(self.args.device)
        join_world(self.device, backend)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: every rank finds the same error

    def show(self, line="", end="\n"):
        if self.rank == 0:
            print(line, end=end, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`."""
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        torch.manual_seed(self.args.seed)
        dtype = torch.float64 if self.tolerance else torch.float32
        self.model = language_model().to(self.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        world += f" · {self.device.type}/{dist.get_backend()}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in parameters:
            parameter.grad /= self.parts  # after the sum: 3 parts would round differently before it
        self.optimizer.step()
        gradients = [parameter.grad for parameter in parameters]
        return [torch.stack(losses).mean().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def train(self, step, whole):
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
        for number in range(self.args.steps):
            batch = self.batch(number)
            is_last = number + 1 == self.args.steps
            start = self.now()
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            losses = [loss for loss in losses if loss is not None]
            loss = torch.tensor(losses, dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                if not torch.equal(ours, theirs):
                    self.differences.append((ours - theirs).abs().max().item())
            self.show_progress(number + 1)

    def show_progress(self, done):
        line = f"step {done}/{self.args.steps}   loss {self.losses[-1]:.3f}"
        if sys.stdout.isatty():
            self.show(line, end="\r")
        elif (done - 1) % -(-self.args.steps // 3) == 0:  # a log gets three lines
            self.show(line)

    def report(self, held_here, formula, sent):
        """Print what the README explains. Return the exit status: 1 if a rank found a difference."""
        differences = torch.tensor(self.differences, device=self.device)
        largest = differences.nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain_held = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain_held)
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        held_line = f"params {params}   grads {grads}   optimizer {state}"
        self.show(f"held/rank   {held_line}      (1 device: {plain})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)

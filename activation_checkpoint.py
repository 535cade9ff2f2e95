"""Activation checkpointing: free the activations inside a layer, and recompute them in backward.

Three layers turn x0 into x1, x2 and x3. Backward needs the activations inside them, i1 … i3:

    forward    x0 ─ i1 ─ x1 ─ i2 ─ x2 ─ i3 ─ x3 ─ loss    x0, x1, x2 are kept; i1, i2, i3 are freed
    backward                       x2 ─ i3                recompute layer 3 from x2; then free i3
                         x1 ─ i2                          recompute layer 2 from x1; then free i2
               x0 ─ i1                                    recompute layer 1 from x0; then free i1

The table is for l transformer layers in 16 bits, with Ψ parameters, a heads and hidden size h. The
input is b sequences of s tokens. Operations are per token, and only those of products with weights:
2Ψ in forward, 4Ψ in backward.

    checkpointed                         bytes kept for backward                 operations
    nothing                              l·sbh(34 + 5as/h)                       6Ψ
    the core of attention                l·34sbh                                 6Ψ + its forward
    all but linear layers, by a policy   l·20sbh                                 6Ψ + its forward
    each layer                           l·2sbh, in backward plus one layer's i  8Ψ: forward twice
    k segments, but not the last         (k-1)·2sbh + l/k·sbh(34 + 5as/h)        8Ψ - 2Ψ/k
    nothing, in offload_to_cpu()         l·sbh(34 + 5as/h) and weights, on host  6Ψ

Collectives inside a checkpointed function run again in backward.

Read section 1 for the idea (8 minutes), to section 2 for the technique (31), and the rest to use
it as a library (43).

Run:      torchrun --nproc-per-node 2 activation_checkpoint.py    (--idea: section 1 alone)
          python activation_checkpoint.py runs one rank
Papers:   Chen et al. 2016, arXiv 1604.06174: √l segments; Korthikanti et al. 2022, 2205.05198,
          sections 4 and 5: the bytes
Mirrors:  torch.utils.checkpoint (use_reentrant=False, selective), torch.autograd.graph.save_on_cpu
Left out: torch.compile. Functions that use several GPUs. Buffers that forward updates, such as
          BatchNorm's: the second run updates them again. Writes through .data into what autograd
          has saved. Random numbers in threads that share a generator, as on a CPU under
          data_parallel.py
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# --------------------------------------------------------------------------------------------------
# 1. The idea, for a function of one tensor that requires a gradient. Parameters are not inputs of
#    the node, so only .backward() gives them gradients, not torch.autograd.grad. And there are no
#    gradients of gradients.


def random_states():
    """Return (generator, state) for the CPU and for the current GPU."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, generator.get_state()) for generator in generators]


def set_random_states(states):
    for generator, state in states:
        generator.set_state(state)


class NaiveCheckpoint(torch.autograd.Function):
    """NaiveCheckpoint.apply(function, x) -> function(x)"""

    @staticmethod
    def forward(ctx, function, x):  # autograd is off in here and saves nothing
        ctx.function = function
        ctx.random_states = random_states()
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        states = random_states()
        set_random_states(ctx.random_states)  # dropout draws the same numbers as in forward
        with torch.enable_grad():
            y = ctx.function(x)
        set_random_states(states)
        torch.autograd.backward(y, gradient)
        return None, x.grad


# --------------------------------------------------------------------------------------------------
# 2. The technique. Autograd records the function as usual, so all gradients are computed as usual.
#    But a hook gives autograd a number to save instead of each tensor. The second run saves the
#    same tensors in the same order, so a tensor has the same number in both. For two tensors a, b:
#
#    forward    pack(a) → 0, pack(b) → 1          autograd saves 0 and 1; a and b are freed
#    backward   unpack(1) → recompute()           runs the function again:
#                   pack_again(a)                 keeps a as number 0
#                   pack_again(b)                 keeps b as number 1, the last: the run ends here
#               unpack(0)                         a is there


def checkpoint(function, *args, preserve_rng_state=True, policy=None, **kwargs):
    """Return function(*args, **kwargs) without keeping activations. Gradients are bitwise the same.

    Backward runs the function a second time, with the random numbers (of the CPU and the current
    GPU), torch.autocast and amp.py's autocast of the first run. Nothing else that the function
    depends on may change.
    preserve_rng_state: if False, the second run draws other random numbers.
    policy(operator, *args, **kwargs): called for each ATen operator inside the function, except
        views, casts and changes in place. If it returns True, the operator's output is kept and not
        recomputed (section 3), unless that output is later changed in place or passed to a
        collective.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    segment = Segment(function, (args, kwargs), preserve_rng_state)
    with saved_tensors_hooks(segment.pack, segment.unpack), segment.keeping(policy):
        return function(*args, **kwargs)


class SaveInput(torch.autograd.Function):
    """A node of the graph that only exists to save an input as autograd saves tensors.

    With a plain reference, a change in place would be silent: autograd raises an error for saved
    tensors only. And inside another checkpoint, the input would not be freed: the outer
    checkpoint's hook applies to saved tensors only.
    """

    @staticmethod
    def forward(ctx, dummy, tensor):
        ctx.save_for_backward(tensor)
        return dummy


def save_input(tensor):
    """Return an empty tensor, whose grad_fn has saved `tensor`."""
    # The empty tensor makes a node even if `tensor` needs no gradient.
    return SaveInput.apply(torch.empty(0, requires_grad=True), tensor)


def saved_input(saved):
    """The inverse of save_input."""
    return saved.grad_fn.saved_tensors[0]


class Segment:
    """One call of a checkpointed function. recompute() repeats it."""

    def __init__(self, function, inputs, preserve_rng_state):
        self.function = function
        self.saved_inputs = tree_map_only(torch.Tensor, save_input, inputs)  # (args, kwargs)
        self.random_states = random_states() if preserve_rng_state else []  # when forward began
        device_types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self.autocasts = [  # contexts that restore the state of torch.autocast
            torch.autocast(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each))
            for each in device_types
        ]
        self.modes = _get_current_function_mode_stack()  # such as amp.py's autocast
        self.kinds = []  # shape, dtype and device of each tensor that forward saved
        self.saved = []  # for may_fill(), of each: the operator that saved it, requires_grad
        self.recomputed = {}  # number -> tensor of the second run, until backward uses it
        self.kept = {}  # the outputs that the policy keeps

    def pack(self, tensor):
        """Autograd calls this with each tensor that it would save. It saves the number instead."""
        self.kinds.append(kind_of(tensor))
        self.saved.append((current_operator(), tensor.requires_grad))
        return len(self.kinds) - 1

    def unpack(self, number):
        """Autograd calls this when backward needs the tensor."""
        if number not in self.recomputed:  # the first one of this backward
            self.recompute()
        return self.recomputed.pop(number)

    def recompute(self):
        """Run the function as in forward, until it has saved as many tensors as then."""
        self.recomputed = {}
        self.end = self.number_of_the_end()  # of the saved tensor that ends the second run
        args, kwargs = tree_map_only(torch.Tensor, saved_input, self.saved_inputs)
        active = _get_current_function_mode_stack()
        contexts = [torch.enable_grad(), *self.autocasts]
        contexts += [mode for mode in self.modes if mode not in active]
        contexts.append(self.keeping())  # operators whose output was kept return it and do not run
        # The lambda, the unpack hook, is needed only for a backward inside the function.
        contexts.append(saved_tensors_hooks(self.pack_again, lambda tensor: tensor))
        states = random_states()
        set_random_states(self.random_states)
        try:
            with suppress(Complete), ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                self.function(*args, **kwargs)
            check_saves_the_same(self)
        except BaseException:
            self.recomputed = {}  # frees memory, and another backward must not use them
            raise
        finally:
            set_random_states(states)

    def pack_again(self, tensor):
        """The pack hook of the second run. It collects the tensors for `unpack`."""
        tensor = tensor.detach()  # otherwise a grad_fn that saves it makes a reference cycle
        number = len(self.recomputed)
        if number < len(self.kinds):
            self.recomputed[number] = tensor
        if number >= self.end:  # greater if the function has caught Complete
            raise Complete
        return tensor

    # The library's part. Sections 3 and 4 have the functions.

    def keeping(self, policy=None):  # in forward by the policy, in the second run what is kept
        return Keep(policy, self.kept) if policy or self.kept else nullcontext()

    def number_of_the_end(self):
        # One more than forward saved, if the last operator fills afterwards what it has saved
        # (RReLU): the second run may not stop inside it.
        return len(self.kinds) - (0 if may_fill(self.saved) else 1)


class Complete(BaseException):
    """Ends the second run. It is not an Exception, because the function might catch those."""


def kind_of(tensor):
    return tensor.shape, tensor.dtype, tensor.device


def current_operator():
    """Return a number that is the same for all tensors that one operator saves."""
    return torch._C._autograd._get_sequence_nr()


# --------------------------------------------------------------------------------------------------
# 3. The library: selective checkpointing keeps outputs that take long to compute and are small.


class Keep(TorchDispatchMode):
    """A mode that sees each operator.

    In forward, it puts the outputs that the policy chooses into `kept`. In the second run, `policy`
    is None. An operator whose output is in `kept` does not run: the mode returns that output.
    """

    def __init__(self, policy, kept):
        super().__init__()
        self.policy = policy
        # (operator, count of its calls) -> outputs, their versions, the random states after it
        self.kept = kept
        self.calls = Counter()  # operator -> its calls so far

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._unsafe_view.default:  # a part of matmul
            with shared_versions():  # otherwise a change in place of the view would go unnoticed
                return args[0].view(args[1])
        if func.namespace == "c10d" or writes_silently(func):
            self.forget(args)
            return func(*args, **kwargs)
        # Views and changes in place always run. So do casts, because autocast casts a weight once:
        # forward may skip a cast that the second run makes.
        if shares_memory(func) or func is torch.ops.aten._to_copy.default:
            return func(*args, **kwargs)
        self.calls[func] += 1
        call = func, self.calls[func]
        if call in self.kept:
            outputs, versions, states = self.kept[call]
            if versions == versions_of(outputs):  # else it was changed in place: compute it again
                set_random_states(states)  # as the call left them, for the next dropout
                return detached(outputs)
        outputs = func(*args, **kwargs)
        if self.policy and self.policy(func, *args, **kwargs):
            self.kept[call] = detached(outputs), versions_of(outputs), random_states()
        return outputs

    def forget(self, arguments):
        """Keep no argument of an operator that writes into one without a new version."""
        written = storages_of(arguments)
        for call, (outputs, *_) in list(self.kept.items()):
            if written & storages_of(outputs):
                del self.kept[call]  # the second run computes it


def storages_of(values):
    tensors = filter(torch.is_tensor, tree_leaves(values))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def versions_of(outputs):
    return [tensor._version for tensor in filter(torch.is_tensor, tree_leaves(outputs))]


def detached(outputs):
    """Return the outputs without a graph, which refers to `kept`: neither would ever be freed.

    They share the outputs' version counters, which count changes in place.
    """
    with shared_versions():
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def shared_versions():
    """A context in which views share version counters. A dispatch mode excludes this key."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


@functools.cache
def writes_silently(operator):
    """Return whether it, or an operator after it, changes an argument without a new version.

    _foreach_add_ does not return what it changes. unsafe_split returns views that have versions of
    their own, and GRUs and LSTMs write to these.
    """
    is_split = operator.overloadpacket._qualified_op_name.startswith("aten::unsafe_split")
    return is_split or (operator._schema.is_mutable and not shares_memory(operator))


@functools.cache
def shares_memory(operator):
    """Return whether an output is a view of an input, or an input that is changed in place."""
    return any(output.alias_info for output in operator._schema.returns)


# --------------------------------------------------------------------------------------------------
# 4. The library: several layers at a time; checks; host memory instead of a second run.


def checkpoint_sequential(layers, segments, x):
    """Run x through l layers in k segments of about the same length, 1 ≤ k ≤ l.

    The last segment is not checkpointed, because backward starts there. If each layer saves one
    tensor, k - 1 + l/k tensors are kept. Their number is smallest for k = √l (Chen et al., section
    4.1). A transformer layer saves many times the size of its input, so k = l is usually better.
    """
    if segments < 1:
        raise ValueError(f"segments={segments} of {len(layers)} layers; give 1 to {len(layers)}")
    starts = [len(layers) * i // segments for i in range(segments)]
    for start, end in itertools.pairwise(starts):
        x = checkpoint(run_layers, layers[start:end], x)
    return run_layers(layers[starts[-1] :], x)


def run_layers(layers, x):
    for each in layers:
        x = each(x)
    return x


def check_saves_the_same(segment):
    kinds = [kind_of(tensor) for tensor in segment.recomputed.values()]
    if kinds != segment.kinds:
        raise RuntimeError(
            f"checkpoint: {segment.function} saves other tensors for backward in the second run, "
            f"{kinds}, than in forward, {segment.kinds}"
        )


def may_fill(saved):
    """Return whether the last operator may write into a tensor that autograd has saved already.

    Autograd saves inputs before the operator runs. RReLU then fills one of them, its noise. Sign of
    such an operator: it saves one tensor with requires_grad and one without.
    """
    last = saved[-1][0]
    return {True, False} == {
        requires_grad for operator, requires_grad, *_ in saved if operator == last
    }


@contextmanager
def offload_to_cpu():
    """A context that keeps the tensors saved for backward in host memory, weights included.

    Copies from and to a GPU are asynchronous, but for sparse tensors.
    """
    saved = []  # by the last operator: (its number, requires_grad, the tensor, its version, copy)

    def pack(tensor):
        operator = current_operator()
        if saved and saved[0][0] != operator:
            copy_again()
        # A CPU tensor is copied too, because it may be changed in place before backward.
        host = copy_to_host(tensor)
        saved.append((operator, tensor.requires_grad, tensor, tensor._version, host))
        return host, tensor.device

    def unpack(packed):
        copy_again()
        host, device = packed
        return host.to(device, non_blocking=True)

    def copy_again():  # what the operator may have filled, now that it has run
        is_filled = saved and may_fill(saved)
        for _, requires_grad, tensor, version, host in saved:
            # A new version is a change in place by the caller, after the operator.
            if is_filled and not requires_grad and tensor._version == version:
                host.copy_(tensor, non_blocking=True)
        saved.clear()

    with saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            copy_again()


def copy_to_host(tensor):
    if tensor.layout != torch.strided:  # sparse: it has no strides, and cannot be pinned
        return tensor.to("cpu", copy=True)
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    if host.stride() != tensor.stride():  # from other strides, the copy would not be asynchronous
        tensor = tensor.clone()
    return host.copy_(tensor, non_blocking=True)


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo(__doc__)
    model = demo.start("activation_checkpoint", bitwise=demo.ranks <= 2)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        if demo.args.idea:
            logits = run_naively(model, demo.part(inputs))
        else:
            logits = checkpoint_sequential(model, len(model), demo.part(inputs))
        loss = language_loss(logits, demo.part(targets))
        loss.backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= demo.ranks
        optimizer.step()
        return loss

    demo.train(step, lambda: ([parameter.grad for parameter in parameters], parameters))
    sent = 2 * held_bytes(parameters) * (demo.ranks - 1) / demo.ranks
    return demo.report(held(parameters, optimizer), "2Ψ(N-1)/N", sent)


def run_naively(model, tokens):
    x = model[0](tokens)  # the embedding, whose input has no gradient
    for layer in model[1:]:
        x = NaiveCheckpoint.apply(layer, x)
    return x


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

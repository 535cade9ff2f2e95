"""compare: where does a run on N ranks first leave the run on one device?

A script records the run on one device, and the script with ranks records the same steps. Recorded
are the output of each module, the gradient with respect to it, the gradients of the parameters when
the optimizer steps, and the parameters and buffers before the next forward. Then every tensor of
the one device is sought in the ranks' tensors. The first one that is not there is the origin:

    one device    embed → attn.qkv → attn.proj ──────→ norm → loss
                    │        │           │               │
    rank 0, 1     same    cat 2     tp sum (!)       wrong (follows)

Here proj was to add up what the ranks have, and did not. `same` and `cat 2` are layouts: how the
ranks' tensors make up the one device's. They are found, not declared. A sum is no error if
something later puts it right.

Rounding is measured. A third run, on one device again, changes each tensor at a module's boundary
by one unit in its last place, forward and backward. How far that moves a tensor is the unit of its
errors. Up to 8 units are rounding: correct runs stay below 2 in most cases.

    with record("runs/one", model) as recording:       # "runs/eight" in the script with ranks
        loss = loss_fn(model(inputs), targets)
        recording.see("loss", loss)                    # any tensor may be shown so
        loss.backward()
        optimizer.step()
    with record("runs/noise", model, noise=1):         # the same steps on one device, from anew

    python compare.py runs/one runs/eight --noise runs/noise --grid dp=2,tp=4

The grid says how ranks are arranged: neighbouring ranks differ in the last axis. The batch, the
seeds and the start must be those of the one device; dropout must be 0.

Cost: recording copies each tensor to host memory, which takes the bytes of all activations, and
three times those of the parameters for each step. compare reads tensor by tensor. A tensor costs
some passes over its numbers for each layout that has its shape.

Read section 1 for the idea (10 minutes), to section 7 for the technique (35), and the rest to use
it as a library (60).

Run:      torchrun --nproc-per-node 2 compare.py     plants a mistake in a small model and finds it
          python compare.py                          the same; --idea finds it with section 1 alone
          python compare.py ONE MANY [--noise DIR] [--grid dp=2,tp=2] [--rename old=new]
Paper:    Song et al. 2025, TTrace, arXiv 2506.09280, compares with one device, too
See also: docs/compare.md has three examples; the test suite judges a class, and this a whole script
Left out: modules under torch.compile; gradients of activations inside reentrant checkpoints;
          FSDP1's flat parameters; outputs of integers; outputs of a module that in one step
          differ in more than their first dimension
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import functools
import itertools
import math
import os
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_flatten, tree_unflatten

# --------------------------------------------------------------------------------------------------
# 1. The idea: record the outputs of all modules in both runs, and find the first that differs.


def outputs_of(model, run):
    """Call run(). Return {name of a module: its output}, in the order of the calls."""
    outputs = {}
    handles = []

    def note(name, module, args, output):
        outputs[name] = output.detach().clone()

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(functools.partial(note, name)))
    run()
    for handle in handles:
        handle.remove()
    return outputs


def naive_layout(whole, parts, tolerance):
    """Return how the ranks' tensors make up the one device's, or "wrong"."""

    def is_near(tensor):
        return (tensor - whole).norm() <= tolerance * whole.norm()

    if any(part.shape != whole.shape for part in parts):
        return "another shape"  # such as a slice of the features, which section 3 compares
    if all(map(is_near, parts)):
        return "same"
    if is_near(sum(parts)):
        return "sum"
    return "wrong"


def first_difference(one, ranks, tolerance=1e-5):
    """Return (name of a module, what is wrong with its output), or None. `ranks` has all ranks'.

    A sum is no error if the next output is right: then something in between has added the parts.
    """
    found = None
    for name, whole in one.items():
        layout = naive_layout(whole, [outputs[name] for outputs in ranks], tolerance)
        if layout == "wrong":
            return found or (name, layout)
        if layout == "sum":
            found = (name, "the sum over the ranks is right: an all-reduce is missing")
        if layout == "same":
            found = None
    return found


# --------------------------------------------------------------------------------------------------
# 2. Record: hooks note tensors, and change nothing that the training computes.

# A tensor is one of five kinds, which come in this order in a step. "start" and "value" are what
# parameters and buffers hold at the beginning, and after a step.
KINDS = ["start", "forward", "backward", "gradient", "value"]
OF_PARAMETERS = {"start", "gradient", "value"}


@contextmanager
def record(directory, model, rename=None, state=None, noise=0):
    """Record one or a few training steps of `model` in a file of this rank in `directory`.

    `rename`: {prefix: what replaces it}, or a function, for the names of modules and parameters.
    `state`: a function that returns whole parameters by name, for a model that has shards only.
    `noise`: a seed. Then rounding errors are added; for a run on one device.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(directory) / f"rank{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # if the run fails, the old one does not speak for it
    recording = Recording(model, rename, state, noise)
    handles = recording.add_hooks()
    try:
        recording.note_values("start")
        yield recording
        recording.finish()
    finally:
        for handle in handles:
            handle.remove()
    torch.save(recording.page(), path)


class Recording:
    """What `record` gives. `see(name, tensor)` notes a tensor that is no module's output.

    What runs in a step, in order of time:

        before_forward    if a step was taken: begin_step, which first notes the values that it left
        on_output, see    each output, and each tensor that is shown; later, when backward reaches
                          it, the gradient with respect to it
        before_step       the parameters' gradients
        after_step        with `state`: the values

    A script may broadcast parameters after optimizer.step(), or write averages back. So values are
    noted as late as possible.
    """

    def __init__(self, model, rename, state, noise):
        self.model = model
        self.renamed = functools.partial(renamed, rename=rename)
        self.state = state
        self.generator = torch.Generator().manual_seed(noise) if noise else None
        self.tensors = defaultdict(dict)  # {(step, kind, name): {number of the call: tensor}}
        self.uses = {}  # keys: (step, name of an output, name of one that it was computed from)
        self.step = 0
        self.has_stepped = False  # an optimizer has begun to, since this step began
        self.ever_stepped = False
        self.depth = 0  # of steps of optimizers inside steps of optimizers
        self.calls = Counter()  # {name: calls in this step}
        self.noted = {}  # {node of autograd: name of the output that it computed}, in this step
        self.first_numbers = self.read_first_numbers()

    def add_hooks(self):
        handles = [
            optimizers.register_optimizer_step_pre_hook(self.before_step),
            optimizers.register_optimizer_step_post_hook(self.after_step),
        ]
        # A list of stages is not called itself, but its members are.
        is_list = type(self.model).forward is nn.Module.forward
        for module in self.model.children() if is_list else [self.model]:
            handles.append(module.register_forward_pre_hook(self.before_forward))
        # Two modules may have one name if one wraps the other. The inner one comes later.
        modules = {self.renamed(name): module for name, module in self.model.named_modules()}
        for name, module in modules.items():
            hook = functools.partial(self.on_output, name)
            handles.append(module.register_forward_hook(hook))
        return handles

    def note(self, kind, name, tensor, call=0):
        copy = local(tensor).to_dense().to("cpu", copy=True)
        self.tensors[self.step, kind, name][call] = copy

    def note_all(self, kind, named):
        for name, tensor in named.items():
            # A sharded parameter may be freed. Then `state` knows its value.
            if tensor is not None and tensor.is_floating_point() and tensor.numel():
                self.note(kind, self.renamed(name), tensor)

    def note_values(self, kind):
        parameters = self.state() if self.state else dict(self.model.named_parameters())
        self.note_all(kind, parameters | dict(self.model.named_buffers()))

    def read_first_numbers(self):
        """Return a few numbers of each parameter, which tell whether a step was taken."""
        numbers = {}  # {(name, shape): numbers}; the shape is another one if this is a shard
        if self.state:  # it knows what the parameters are, and they may be nothing
            return numbers
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                tensor = local(parameter)
                numbers[name, tensor.shape] = tensor.flatten()[:8].tolist()
        return numbers

    def before_forward(self, *_):
        """The hook of the whole model's forward.

        Parameters may change without a step of PyTorch's optimizers, such as on a rank that gets
        them from others.
        """
        if is_recomputed():
            return
        now = self.read_first_numbers()
        is_changed = any(now.get(key, old) != old for key, old in self.first_numbers.items())
        if self.has_stepped or is_changed:
            self.begin_step()

    def begin_step(self):
        if not self.state:
            self.note_values("value")
        self.step += 1
        self.has_stepped = False
        self.calls.clear()
        self.noted.clear()  # it would keep the graph alive
        self.first_numbers = self.read_first_numbers()

    def on_output(self, name, module, args, output):
        """The hook of a module's forward. The noise run replaces the output."""
        if is_recomputed():
            return output
        leaves, structure = tree_flatten(output)
        number = 0
        for index, leaf in enumerate(leaves):
            if not torch.is_tensor(leaf) or not leaf.is_floating_point():
                continue
            if self.generator and leaf.grad_fn not in self.noted:
                leaves[index] = Shake.apply(leaf, self.generator)
            self.see(f"{name}[{number}]" if number else name, leaves[index])
            number += 1
        return tree_unflatten(leaves, structure) if self.generator else output

    def see(self, name, tensor):
        """Note `tensor`, and the gradient with respect to it."""
        if self.has_stepped:
            self.begin_step()
        call = self.calls[name]
        self.calls[name] += 1
        self.note("forward", name, tensor, call)
        node = tensor.grad_fn
        # A container returns the output of its last part. The gradient of a tensor is the total
        # of all its uses, so it is noted once, under the name of the module that computed it.
        known = self.noted.get(node)
        inputs = [known] if known else self.inputs_of(node)
        for used in inputs:
            self.uses[self.step, name, used] = True
        if node is None or known:
            return
        self.noted[node] = name
        tensor.register_hook(lambda gradient: self.note("backward", name, gradient, call))

    def inputs_of(self, node):
        """Return the noted outputs from which autograd's `node` was computed."""
        names = []
        seen = {None}
        nodes = [node] if node else []
        while nodes:
            for parent, _ in nodes.pop().next_functions:
                if parent in self.noted:
                    names.append(self.noted[parent])
                elif parent not in seen:
                    seen.add(parent)
                    nodes.append(parent)
        return names

    def before_step(self, *_):
        """The hook of all optimizers: ours and others call another optimizer inside."""
        self.depth += 1
        if not self.has_stepped:
            self.note_gradients()
        self.has_stepped = True
        self.ever_stepped = True

    def note_gradients(self):
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.note_all("gradient", dict(reversed(gradients.items())))  # as backward goes

    def after_step(self, *_):
        self.depth -= 1
        if self.state and not self.depth:  # it may communicate. Here all ranks are at one place
            self.note_values("value")

    def finish(self):
        if not self.has_stepped:
            self.note_gradients()  # the optimizer is not PyTorch's, or on another rank
        self.note_values("value")

    def page(self):
        """Return lists, dicts and tensors, which torch.load reads with weights_only=True."""
        tensors = {}
        for key, by_call in self.tensors.items():
            tensors[key] = [by_call[call] for call in sorted(by_call)]
        classes = {}  # of the modules, and of those that buffers belong to
        for name, module in self.model.named_modules():
            for each in (name, *dict(module.named_buffers(name, recurse=False))):
                classes[self.renamed(each)] = type(module).__name__
        return {
            "tensors": tensors,
            "uses": list(self.uses),
            "classes": classes,
            "has_stepped": self.ever_stepped,
            "random": random_parts(self.model),
        }


WRAPPERS = {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def renamed(name, rename=None):
    """Drop the wrappers' parts of a name. The first rule of {old: new} that fits replaces a prefix.

    `rename` may be a function, too.
    """
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    if callable(rename):
        return rename(name)
    for old, new in (rename or {}).items():
        rest = name.removeprefix(old)
        if name.startswith(old) and rest[:1] in ".[":  # so is ""
            return (new + rest).lstrip(".")
    return name


def local(tensor):
    """Return the tensor without its history; of a DTensor, the part that this rank has."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_recomputed():
    """A checkpoint calls modules again during backward."""
    return torch._C._current_graph_task_id() != -1


class Shake(torch.autograd.Function):
    """Multiply each number by 1 ± eps in forward, and its gradient in backward."""

    @staticmethod
    def forward(ctx, x, generator):
        ctx.generator = generator
        return shaken(x, generator)

    @staticmethod
    def backward(ctx, gradient):
        return shaken(gradient, ctx.generator), None


def shaken(x, generator):
    signs = 2 * torch.randint(2, x.shape, generator=generator) - 1
    factors = 1 + eps_of(x) * signs.double()
    return x * factors.to(x.device, x.dtype)


def random_parts(model):
    """Return the parts of the model that compute something else on other ranks."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            is_dropout = "dropout" in key or (key == "p" and "Dropout" in type(module).__name__)
            is_on = module.training if is_dropout else "capacity_factor" in key
            if is_on and isinstance(value, int | float) and value > 0:
                found.append(f"{name}.{key} = {value}")
    return found


# --------------------------------------------------------------------------------------------------
# 3. Compare: each tensor of the one device is sought in the ranks' tensors, in order of execution.


class CannotCompare(ValueError):
    """The runs do not say whether they agree. The text says what to change."""


def compare(one, many, grid=None, noise=(), rename=None):
    """Compare the recordings in the directories `one` and `many`. Return a Comparison.

    `grid`: {axis: number of ranks} or "dp=2,tp=2"; neighbouring ranks differ in the last axis.
    `noise`: directories of runs on one device with record(noise=…). `rename`: {old: new}.
    """
    noise = [noise] if isinstance(noise, str | Path) else noise
    runs = Runs([one, many, *noise], grid, rename)
    check_recordings(runs)
    comparison = Comparison(runs)
    check_noise(comparison)
    check_is_alive(runs.one["tensors"])
    check_is_comparable(comparison)
    check_is_explained(comparison)
    return comparison


class Comparison:
    """`results`, one for each tensor of the one device, and `origin`: a Result, or None."""

    def __init__(self, runs):
        self.runs = runs
        self.rounding = Rounding(runs)
        self.starts = {}  # {name of a parameter: its layout}
        self.factors = {}  # {step: by what its gradients of activations are scaled}
        self.results = [self.result_of(key) for key in runs.keys_in_order()]
        self.origin = origin_of(self)

    def result_of(self, key):
        """Compare one tensor, or all that a module gave in a step, with what the ranks have."""
        result = Result(*key)
        one, parts, noises = self.runs.read(key)
        found = []  # (Fit, Sample)
        for sample in samples_of(one, parts, noises, self.runs.axes):
            fit = self.best_fit(key, sample)
            if fit:
                found.append((fit, sample))
        if found:
            self.judge(result, *min(found, key=error_of))
        elif parts:
            result.note = f"{shapes_of(one)} on one device, {[*map(shapes_of, parts.values())]}"
        if result.kind == "gradient" and not parts:
            is_lost = self.runs.has_gradients and one[0].any()
            result.state = "wrong" if is_lost else "skipped"  # sharded optimizers have no .grad
            result.note = "no rank has a gradient"
        return result

    def best_fit(self, key, sample):
        step, sample.kind, name = key
        self.rounding.measure(key, sample)
        if sample.kind == "backward" and step in self.factors and sample.whole.numel() > 1:
            sample.factor = self.factors[step]
        is_permuted = "all" in self.starts.get(name, ())
        sample.may_be_permuted = is_permuted or sample.kind not in ("gradient", "value")
        if name in self.runs.one["classes"] and sample.kind in ("start", "value"):
            sample.kind = "buffer"
        return sample.best_fit()

    def judge(self, result, fit, sample):
        """Say what state the tensor is in, and why if it is wrong."""
        ways = set(fit.layout.values())
        is_one_number = sample.whole.numel() == 1
        result.layout = ", ".join(f"{axis} {how}" for axis, how in fit.layout.items())
        result.error = fit.error
        result.scale = fit.scale
        is_wrong = fit.error > LIMIT or (result.kind == "gradient" and fit.scale != 1.0)
        if result.kind == "start":
            self.starts[result.name] = fit.layout
        if result.kind == "backward" and not is_one_number and not is_wrong:
            result.scale /= self.factors.setdefault(result.step, fit.scale)
            is_wrong = exact(1.01 * fit.scale) != fit.scale
        is_added = "all" in fit.layout or {"sum", "mean"} & ways
        if {"cat 0", "order 0"} <= ways and result.kind in ("forward", "backward"):
            is_added = False  # samples or tokens, of which each rank has others
        if is_wrong:
            is_of_batch = sample.kind == "buffer" and self.runs.is_of_batch(result.name)
            result.state = "skipped" if is_of_batch else "wrong"
            result.right_on = self.runs.ranks_at(sample.right_places())
            result.note = diagnosis(result, fit, sample, self.runs)
        elif result.scale != 1.0:
            result.state = "scaled"
            result.note = scale_in_words(result.scale, self.runs.axes)
        elif is_added and ("sum" in ways or not is_one_number):
            result.state = "unfinished"
            result.note = unfinished_in_words(fit.layout)
        else:
            result.state = "right"


def shapes_of(calls):
    return " + ".join(str(tuple(tensor.shape)) for tensor in calls[:4])


def error_of(pair):
    return pair[0].error


@dataclass
class Result:
    """What became of one tensor. It is unfinished if it is right but for a sum or an order."""

    step: int
    kind: str  # one of KINDS
    name: str
    layout: str = ""
    note: str = ""
    state: str = "missing"  # or right, unfinished, scaled, wrong, skipped
    error: float = 0.0  # in units of rounding
    scale: float = 1.0  # of the ranks' tensor, over the one device's
    right_on: list = ()  # the ranks that have the right one, if others have not

    @property
    def key(self):
        return self.step, self.kind, self.name


class Runs:
    """The files of the one device, of the ranks, and of the noise runs."""

    def __init__(self, directories, grid, rename):
        self.directories = directories
        self.rename = rename
        self.open()
        self.axes = axes_of(grid) or {"ranks": len(self.ranks)}  # {name: size}
        coordinates = [range(size) for size in self.axes.values()]
        self.places = list(itertools.product(*coordinates))  # of the ranks
        self.has_stepped = any(page["has_stepped"] for page in self.ranks)
        kinds = {kind for page in self.ranks for _, kind, _ in page["tensors"]}
        self.has_gradients = "gradient" in kinds

    def open(self):
        """Open the files anew: what has been read of one takes memory until it is closed."""
        pages = [pages_of(directory, self.rename) for directory in self.directories]
        self.ones, self.ranks, *noises = pages
        self.one = self.ones[0]
        self.noises = [page for pages in noises for page in pages]
        self.unread = 2**27  # bytes of one device, until the files are opened again

    def keys_in_order(self):
        def place(key):
            return key[0], KINDS.index(key[1])

        return sorted(self.one["tensors"], key=place)

    def read(self, key):
        """Return the calls of the one device, {place: calls} of ranks, and those of noise runs."""
        one = self.one["tensors"][key]
        self.unread -= sum(tensor.nbytes for tensor in one)
        if self.unread < 0:
            self.open()
        parts = {}
        for place, page in zip(self.places, self.ranks, strict=True):
            # A rank that only receives parameters has a gradient that nobody uses.
            is_used = page["has_stepped"] >= self.has_stepped or key[1] != "gradient"
            if key in page["tensors"] and is_used:
                parts[place] = page["tensors"][key]
        noises = [page["tensors"].get(key, ()) for page in self.noises]
        return one, parts, [calls for calls in noises if len(calls) == len(one)]

    def ranks_at(self, places):
        """Return the ranks at places, which may have the number of a micro-batch as well."""
        number = len(self.axes)
        return sorted({self.places.index(place[:number]) for place in places})

    def is_of_batch(self, buffer):
        """Return whether each rank has, in this buffer, the statistics of its own batch."""
        owners = [page["classes"].get(buffer, "") for page in self.ranks]
        return any("BatchNorm" in owner for owner in owners)


def pages_of(directory, rename):
    """Return the recording of each rank. Their tensors stay in the files until they are read."""
    pages = []
    new = functools.partial(renamed, rename=rename)
    paths = Path(directory).glob("rank*.pt")
    for path in sorted(paths, key=lambda path: int(path.stem[4:])):
        page = torch.load(path, mmap=True, weights_only=True)
        tensors = {}
        for (step, kind, name), calls in page["tensors"].items():
            tensors[step, kind, new(name)] = calls
        uses = []
        for step, user, used in page["uses"]:
            uses.append((step, new(user), new(used)))
        classes = {new(name): owner for name, owner in page["classes"].items()}
        page |= {"tensors": tensors, "uses": uses, "classes": classes}
        pages.append(page)
    if not pages:
        raise CannotCompare(f"there is no rank0.pt of record() in {directory}")
    return pages


def axes_of(grid):
    """Return {axis: number of ranks} of a grid such as "dp=2,tp=2"."""
    if isinstance(grid, str):
        words = grid.replace(" ", "").split(",")
        grid = dict(word.split("=") for word in words)
    return {axis: int(size) for axis, size in (grid or {}).items()}


MICRO = "micro-batches"  # the name of their axis


def samples_of(one, parts, noises, axes):
    """Yield Samples of all calls of a module together. Micro-batches are one more axis."""
    count = max(map(len, (one, *parts.values())))
    if count > 1:
        axes = axes | {MICRO: count}
    all_calls = {}  # {place, and the number of the call if there are several: tensor}
    for place, calls in parts.items():
        for call, tensor in enumerate(calls):
            all_calls[(*place, call)[: len(axes)]] = tensor
    shapes = {tensor.shape[1:] for tensor in one}
    joins = (torch.cat,) if one[0].dim() else (sum, mean)
    for join in joins if len(shapes) == 1 else ():
        of_noise = [join(calls) for calls in noises]
        yield Sample(join(one), all_calls, of_noise, axes)


def mean(tensors):
    return sum(tensors) / len(tensors)


# --------------------------------------------------------------------------------------------------
# 4. Rounding: how far a tensor may be off, as the noise runs have measured it.

LIMIT = 8.0  # units. Correct runs have errors of 1 or 2, and the smallest mistakes in bf16 of 20
FEW = 16  # numbers, of which noise may move none by chance


class Rounding:
    def __init__(self, runs):
        self.runs = runs
        self.shares = []  # how far noise moves the outputs of the first step, over their size
        self.flips = []  # keys of outputs of which noise moves a few rows altogether
        self.loose = {}  # {name of a parameter: where its gradient has been only rounding}
        tensors = runs.one["tensors"].items()
        outputs = [calls[0] for (_, kind, _), calls in tensors if kind == "forward"]
        self.coarsest = max(map(eps_of, outputs), default=0.0)  # eps of their dtypes

    def measure(self, key, sample):
        """Make the sample float64. Set its unit of rounding, and what an error is a part of."""
        step, kind, name = key
        eps = max(map(eps_of, [sample.whole, *sample.parts.values()]))
        sample.parts = {place: tensor.double() for place, tensor in sample.parts.items()}
        sample.whole = whole = sample.whole.double()
        if whole.isnan().any():
            raise CannotCompare(f"the run on one device has NaN: {key}")
        finite = whole.masked_fill(whole.isinf(), 0.0)
        update = self.update_of(key, whole)
        sample.size = norm(finite if update is None else update)
        moved = self.noise_of(key, whole, sample.noises)
        unit = moved + eps * sample.size
        if kind in ("start", "value"):
            unit += eps * finite.abs().max().item()  # one number may be rounded otherwise
        coarse = self.coarsest * sample.size / 8
        if whole.numel() < FEW:
            unit += coarse
        if kind == "gradient":
            is_loose = whole.abs() <= 2 * (moved + coarse) / math.sqrt(whole.numel())
            self.loose[name] = is_loose | self.loose.get(name, False)
        if update is not None and name in self.loose:
            # Adam takes a whole step in the direction of the gradient's sign, in later steps, too.
            # A wrong sign is twice the update.
            unit += 2 * norm(update[self.loose[name]]) / LIMIT
        if kind == "forward" and step == 0:
            self.shares.append(moved / (sample.size or 1.0))
        sample.unit = unit or 1e-300

    def update_of(self, key, whole):
        """Return by how much a step has changed this value; None if it is none, or is new."""
        step, kind, name = key
        tensors = self.runs.one["tensors"]
        before = tensors.get((step - 1, kind, name)) or tensors.get((0, "start", name))
        if kind != "value" or not before or before[0].shape != whole.shape:
            return None
        return difference(whole, before[0].double())

    def noise_of(self, key, whole, noises):
        """Return how far the noise runs have moved a tensor."""
        alike = [noise.double() for noise in noises if noise.shape == whole.shape]
        distances = [difference(noise, whole) for noise in alike]
        if key[1] == "forward":
            is_lost = len(alike) < len(noises)
            if is_lost or any(is_flip(each, whole) for each in distances):
                self.flips.append(key)
        return max(map(norm, distances), default=0.0)


def eps_of(tensor):
    return torch.finfo(tensor.dtype).eps


def difference(a, b):
    change = a - b
    if not change.sum().isfinite():
        change.masked_fill_(a == b, 0.0)  # infinities, in masks
    return change


def norm(tensor):
    return tensor.norm().item()


def is_flip(distance, whole):
    """Return whether noise moves a few rows altogether: tokens that go to another expert."""
    if whole.dim() < 2 or not whole.numel():
        return False
    sizes = whole.norm(dim=-1).clamp(min=1e-300)
    moved = distance.norm(dim=-1) / sizes
    return moved.max().item() > max(0.02, 100 * moved.median().item())


# --------------------------------------------------------------------------------------------------
# 5. Layouts: how the ranks' tensors make up the one device's. For each axis of the grid, one of
#
#        same      every rank has it            sum, mean   of what the ranks have
#        cat d     joined in dimension d        flat        joined as vectors, the rest cut off
#        parts d   joined in dimension d, after each rank's tensor was cut: first all first pieces,
#                  then all second ones (q, k, v in one matrix; in a zigzag these backward)
#
#    `order d` is a layout after which dimension d is permuted.


class Fit(NamedTuple):
    error: float  # in units of rounding
    layout: dict  # {axis: how}
    scale: float  # of the ranks' tensor, over the one device's
    tensor: torch.Tensor  # what the ranks' tensors make up


@dataclass
class Sample:
    """A tensor of the one device, and what the ranks and the noise runs have of it."""

    whole: torch.Tensor
    parts: dict  # {coordinates on the grid: tensor}
    noises: list
    axes: dict  # {name: size}
    kind: str = ""  # one of KINDS, or "buffer"
    unit: float = 0.0  # of rounding
    size: float = 0.0  # of what an error is a part of: for a value, the size of its update
    factor: float = 1.0  # of activations' gradients in this step
    may_be_permuted: bool = False

    def best_fit(self):
        """Return the best fit within rounding, or of all; None if none has the shape.

        Of the fits within one unit, the first: what is zero but for rounding has every layout.
        """
        fits = []
        for fit in self.fits():
            fits.append(fit)
            if fit.error <= 1 and fit.scale == self.factor:
                return fit
        best = min(fits, key=self.rank_of, default=None)
        if best and best.error > LIMIT and self.may_be_permuted:
            best = min([best, *self.orders(fits)], key=self.rank_of)
        return best

    def rank_of(self, fit):
        return fit.error > LIMIT, fit.scale != self.factor, fit.error

    def fits(self):
        """Yield a Fit for each way to join the parts, and one for each scale that fits better."""
        for layout, tensor in joins(self.parts, self.axes, self.whole, self.kind):
            if tensor.shape != self.whole.shape:
                continue
            fit = self.fit(layout, tensor, self.factor)
            yield fit
            if fit.error > LIMIT and self.kind in ("backward", "gradient"):
                yield self.fit(layout, tensor, self.scale_of(tensor))

    def fit(self, layout, tensor, scale):
        error = norm(difference(tensor / scale, self.whole)) / self.unit
        return Fit(error if math.isfinite(error) else math.inf, layout, scale, tensor)

    def right_places(self):
        """Return where the tensor is the one device's, if not everywhere."""
        right = []
        for place, tensor in self.parts.items():
            is_whole = tensor.shape == self.whole.shape
            if is_whole and self.fit({}, tensor, self.factor).error <= LIMIT:
                right.append(place)
        return right if len(right) < len(self.parts) else []

    def scale_of(self, tensor):
        scale = norm(tensor) / self.size if self.size else 0.0
        return exact(scale) if 0 < scale < math.inf else self.factor

    def orders(self, fits):
        """Yield the fits after a permutation of one dimension, which keeps the norm."""
        for fit in fits:
            ways = set(fit.layout.values())
            tensor = fit.tensor / fit.scale
            change = norm(tensor) - norm(self.whole)
            if {"sum", "mean"} & ways or not abs(change) <= LIMIT * self.unit:
                continue
            for dim, length in enumerate(self.whole.shape):
                # "parts" has the rows of "cat" in another order.
                if f"parts {dim}" not in ways and 1 < length <= 2048:
                    rows = reordered(tensor, self.whole, dim)
                    layout = fit.layout | {"all": f"order {dim}"}
                    yield self.fit(layout, rows * fit.scale, fit.scale)


def exact(scale):
    """Return the power of 2, the whole number, or the fraction of one, that is near `scale`."""
    power = 2.0 ** round(math.log2(scale))
    for near in (power, round(scale) if scale > 1 else 1 / round(1 / scale)):
        if abs(scale / near - 1) < 0.02:
            return near
    return scale


def joins(parts, axes, whole, kind):
    """Yield (layout, tensor) for each way to join `parts`, which is {coordinates: tensor}.

    A layout is {name of an axis: how}. Axes may be joined in any order.
    """
    if not parts:
        return
    if not axes:
        yield {}, parts[()]
        return
    for number, axis in enumerate(axes):
        groups = groups_along(parts, number)
        others = {name: size for name, size in axes.items() if name != axis}
        first = next(iter(groups.values()))
        for how, join in ways_to_join(first, whole, kind, others.values()):
            if number and how in ("same", "sum", "mean"):
                continue  # after the axes before this one they give the same
            try:
                joined = {rest: join(group) for rest, group in groups.items()}
            except RuntimeError:  # the shapes do not fit
                continue
            for layout, tensor in joins(joined, others, whole, kind):
                yield {axis: how} | layout, tensor


def groups_along(parts, number):
    """Return {other coordinates: the tensors along axis `number`, in order}."""
    groups = {}
    for coordinates in sorted(parts):
        others = coordinates[:number] + coordinates[number + 1 :]
        groups.setdefault(others, []).append(parts[coordinates])
    return groups


def ways_to_join(group, whole, kind, sizes):
    """Yield (how, function that joins the tensors along an axis). `sizes` of the other axes."""
    first = group[0]
    if all(tensor.shape == first.shape for tensor in group):
        yield "same", same
        is_replica = whole.numel() > 1 and all(torch.equal(first, each) for each in group)
        if not is_replica and kind not in ("start", "value"):
            yield "sum", sum
            if kind in ("gradient", "buffer") or whole.numel() == 1:
                yield "mean", mean
    if len(group) > 1:
        for dim in range(min(first.dim(), whole.dim())):
            yield from ways_to_put_together(group, dim, whole.shape[dim])
    if kind in OF_PARAMETERS:
        for shape in slices_of(whole.shape, sizes):
            yield "flat", functools.partial(flatten, shape=shape)


def same(group):
    """Return the first tensor. Where others differ from it, it is made wrong."""
    first, *others = group
    for tensor in others:
        first = first + 2 * difference(tensor, first).abs()
    return first


# How each tensor is cut, as ratios of lengths: not at all; gate and up; both ends of a zigzag, of
# which the second ones are joined backward; q, k and v, of which q may have more heads.
CUTS = [(1,), (1, 1), (1, -1), *((heads, 1, 1) for heads in range(1, 9))]


def ways_to_put_together(group, dim, length):
    """Yield the ways to join the tensors in dimension `dim`, which alone may differ."""
    if sum(tensor.shape[dim] for tensor in group) > length:
        return
    for cut in CUTS:
        how = "cat" if cut == (1,) else "parts"
        yield f"{how} {dim}", functools.partial(in_pieces, dim=dim, cut=cut)


def in_pieces(group, dim, cut):
    """Join first pieces, then second pieces, and so on; backward those with a negative length."""
    lengths = [abs(length) for length in cut]
    rows = []
    for tensor in group:
        unit = tensor.shape[dim] // sum(lengths)
        rows.append(tensor.split([unit * length for length in lengths], dim))
    pieces = []
    for length, column in zip(cut, zip(*rows, strict=True), strict=True):
        pieces += column if length > 0 else reversed(column)
    return torch.cat(pieces, dim)


def slices_of(shape, sizes):
    """Return `shape`, and the shapes of its slices if an axis of one of the sizes cuts it."""
    slices = [shape]
    for dim, length in enumerate(shape):
        for size in sizes:
            slices.append(shape[:dim] + (length // size,) + shape[dim + 1 :])
    return slices


def flatten(group, shape):
    """Join vectors, and cut off what only fills up the last ones."""
    flat = torch.cat([tensor.flatten() for tensor in group])
    numbers = math.prod(shape)
    if flat.numel() - numbers >= max(len(group), group[0].numel()):
        raise RuntimeError("more than padding")
    return flat[:numbers].view(shape)


def reordered(tensor, whole, dim):
    """Return `tensor` with its slices along `dim` in the order of the nearest of whole's."""
    rows = tensor.unsqueeze(-1).movedim(dim, 0).flatten(1)
    wanted = whole.unsqueeze(-1).movedim(dim, 0).flatten(1)
    # Distances cost less in a projection to 16 numbers. The sines of squares are as random numbers.
    numbers = torch.arange(16 * rows.shape[1], dtype=rows.dtype)
    projection = numbers.square().sin().view(-1, 16)
    nearest = torch.cdist(wanted @ projection, rows @ projection).argmin(1)
    return tensor.index_select(dim, nearest)


# --------------------------------------------------------------------------------------------------
# 6. The origin: the first tensor that leaves rounding although all it was computed from had not.


def origin_of(comparison):
    """Return the first result that is wrong, or what it follows from; None if none is wrong."""
    results = comparison.results
    wrong = [result for result in results if result.state == "wrong"]
    if not wrong:
        return None
    result = wrong[0]
    # A rank that took fewer steps seems to call a module twice in one.
    late = []
    for rank, page in enumerate(comparison.runs.ranks):
        last, *_ = max(page["tensors"])
        if last < results[-1].step:
            late.append(rank)
    if late and result.kind == "forward":
        note = f"{ranks_in_words(late)} took no step of the optimizer"
        return Result(result.step, "value", results[0].name, note=note, state="wrong")
    if result.kind == "gradient":
        result = origin_of_scales(result, comparison)
    by_key = {each.key: each for each in results}
    while cause := cause_of(result, by_key, comparison.runs.one["uses"]):
        result = cause
    return result


def origin_of_scales(result, comparison):
    """Return the loss or the gradient that has scaled the others; or `result`, a wrong gradient."""
    of_step = [each for each in comparison.results if each.step == result.step]
    gradients = [each for each in of_step if each.kind == "gradient"]
    # A few gradients are zero but for rounding, and so are right with every scale.
    common = sorted(each.scale for each in gradients)[len(gradients) // 2]
    if exact(1.01 * common) != common:
        # If one gradient is wrong, so is their norm, and clipping scales all of them.
        for each in gradients:
            if each.state == "wrong" and abs(each.scale / common - 1) > 0.02:
                each.note += f"; clipping makes most others {times(common)} the right ones"
                return each
    # If ranks have the mean over their part of the batch, activations' gradients are scaled so.
    expected = [1.0]
    for size in comparison.runs.axes.values():
        expected += [each * size for each in expected]
    is_of_loss = comparison.factors.get(result.step, 1.0) not in expected
    if not is_of_loss or result.error > LIMIT or result.scale != common:
        return result
    loss = next(each for each in of_step if each.kind == "backward")  # backward's first
    loss.state = "wrong"
    words = f"{times(common)} the right ones"
    loss.note = f"all gradients are {words}, from the loss on: divide it by {common:.4g}"
    return loss


def cause_of(result, by_key, uses):
    """Return an unfinished or scaled result that this one follows from, or None."""
    for key in sources_of(result, uses):
        source = by_key.get(key)
        if source is None:
            continue
        if source.state == "scaled" and result.kind == "backward":
            return source
        # Each rank's part of a sum is right, unless its own source was to be added up.
        is_part = result.kind == "gradient" and result.state == "unfinished"
        if source.state == "unfinished" and (not is_part or source.layout == result.layout):
            return source
    return None


def sources_of(result, uses):
    """Return the keys of what the result was computed from."""
    step, kind, name = result.key
    names = []
    if kind == "forward":
        names = [used for of, user, used in uses if (of, user) == (step, name)]
    elif kind == "backward":
        names = [user for of, user, used in uses if (of, used) == (step, name)]
    elif kind == "gradient":
        kind = "backward"
        names = [name.rpartition(".")[0]]
    elif kind == "value" and not result.right_on:
        kind = "gradient"
        names = [name]
    return [(step, kind, source) for source in names]


# --------------------------------------------------------------------------------------------------
# 7. Words: what is wrong with a tensor, with the evidence.


def diagnosis(result, fit, sample, runs):
    """Return in words how the tensor is wrong, with the evidence."""
    parts = sample.parts.items()
    bad = [place for place, tensor in parts if not tensor.isfinite().all()]
    if bad and sample.whole.isfinite().all():
        return f"NaN or infinite numbers on {ranks_in_words(runs.ranks_at(bad))}"
    if fit.error <= LIMIT:
        return scale_in_words(fit.scale / sample.factor, runs.axes)
    if result.right_on:
        return f"right on {ranks_in_words(result.right_on)} only"
    share = fit.error * sample.unit / (sample.size or 1.0)
    of = "update" if result.kind == "value" else "size"
    return f"wrong by {share:.2g} of its {of}"


def ranks_in_words(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def times(scale):
    return f"1/{1 / scale:.4g} of" if scale < 1 else f"{scale:.4g} times"


def scale_in_words(scale, axes):
    words = f"{times(scale)} the right one"
    number = max(scale, 1 / scale)
    names = " or ".join(axis for axis, size in axes.items() if size == number)
    if not names:
        return words
    how = "not divided" if scale > 1 else "divided once too often"
    return f"{words}: {how} by the {number:.0f} {names} ranks"


def unfinished_in_words(layout):
    """Return what is missing, if nothing later does it."""
    if "all" in layout:
        dim = layout["all"].removeprefix("order ")
        return f"the right numbers in another order along dimension {dim}"
    axes = " and ".join(axis for axis, how in layout.items() if how in ("sum", "mean"))
    if "mean" in layout.values():
        return f"each rank has the gradient of its own batch: average it over the {axes} ranks"
    return f"the sum over the {axes} ranks is right: an all-reduce is missing"


# --------------------------------------------------------------------------------------------------
# 8. The library: refusals.


def check_recordings(runs):
    if len(runs.ones) > 1:
        raise CannotCompare(f"ONE has {len(runs.ones)} ranks: record it on one device, on one rank")
    if len(runs.places) != len(runs.ranks):
        raise CannotCompare(f"the grid {runs.axes} is not of {len(runs.ranks)} ranks, as MANY is")


def check_noise(comparison):
    """Raise unless the noise run does what the other one does, but for rounding."""
    shares = sorted(comparison.rounding.shares)
    if not comparison.runs.noises or not shares:
        return
    if not shares[-1]:
        raise CannotCompare("the noise run has changed nothing: record it with noise=1")
    middle = shares[len(shares) // 2]
    if middle > 0.1:
        raise CannotCompare(
            f"the noise run differs by {middle:.2g}, which is more than rounding: it must have the "
            "start, the batches and the seeds of the run on one device, and a dropout of 0"
        )


def check_is_alive(tensors):
    """Two runs that compute nothing agree, and say nothing."""
    trained = []
    for key, calls in tensors.items():
        if key[1] == "gradient" and calls[0].any():
            trained.append(key)
    if not trained:
        raise CannotCompare("on one device there are no gradients, or all are zero")
    for step, _, name in trained:
        start = tensors[0, "start", name][0]
        if not torch.equal(start, tensors[step, "value", name][0]):
            return
    raise CannotCompare("on one device no parameter changes: record a step of the optimizer")


def check_is_comparable(comparison):
    """A few tensors have no counterpart, such as those of containers. Many are a mistake."""
    states = []
    for each in comparison.results:
        if each.state == "wrong":
            break  # what follows a mistake may have other shapes
        # Buffers may be of one rank only. Reentrant checkpoints have no gradients of activations.
        is_buffer = each.kind != "forward" and each.name in comparison.runs.one["classes"]
        if each.kind != "backward" and not is_buffer:
            states.append(each)
    missing = []
    for each in states:
        if each.state == "missing":
            shapes = each.note or "no such name on the ranks"
            missing.append(f"step {each.step} {each.kind} {each.name}: {shapes}")
    if len(missing) > max(1, 0.05 * len(states)):
        raise CannotCompare(
            f"{len(missing)} of {len(states)} tensors of the one device have no counterpart in the "
            f"other run by name and shape, such as {missing[:3]}. If names differ, use rename; if "
            "these are shards, state or grid. If the numbers of rows differ, rows are lost, or go "
            "to another module than on one device"
        )


def check_is_explained(comparison):
    """A difference that the runs must have, or may have, is not a mistake."""
    origin = comparison.origin
    if origin is None:
        return
    where = f"step {origin.step} {origin.kind} {origin.name}: {origin.note}"
    random = sorted({part for page in comparison.runs.ranks for part in page["random"]})
    if random:
        raise CannotCompare(
            f"ranks draw other numbers, or drop other tokens, than one device. Set dropout to 0, "
            f"and a capacity to None: {random[:3]}. The first difference: {where}"
        )
    if not comparison.runs.noises:
        raise CannotCompare(
            f"without --noise it is not known whether a difference is rounding. Record the run on "
            f"one device once more, with noise=1. The first difference is in {where}"
        )
    flips = [key for key in comparison.rounding.flips if key[0] <= origin.step]
    if flips:
        raise CannotCompare(
            f"rounding alone sends tokens to other experts, in step {flips[0][0]} {flips[0][2]}: "
            f"take another seed, or float64. The first difference is in {where}"
        )


# --------------------------------------------------------------------------------------------------
# Demo, and the command line. A model is split over ranks as in tensor_parallel.py. One layer
# forgets its all-reduce.

PLANTED = "layers.1.down"


class Sum(torch.autograd.Function):
    """Add up over the ranks in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        ctx.in_backward = in_backward
        return all_reduced(x) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduced(gradient) if ctx.in_backward else gradient, None, None


def all_reduced(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


class Down(nn.Linear):
    adds_up = False

    def forward(self, x):
        return Sum.apply(super().forward(x), self.adds_up, False)


class MLP(nn.Module):
    """On N ranks each has 1/N of the hidden features."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = Down(64, 32, bias=False)

    def split(self, rank, ranks):
        features = slice(64 // ranks * rank, 64 // ranks * (rank + 1))
        for parameter in (self.up.weight, self.up.bias):
            parameter.data = parameter.data[features].clone()
        self.down.weight.data = self.down.weight.data[:, features].clone()
        self.down.adds_up = True

    def forward(self, x):
        hidden = Sum.apply(self.norm(x), False, self.down.adds_up)
        return x + self.down(self.up(hidden).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model, directory, noise=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
    with record(directory, model, noise=noise) as recording:
        for _ in range(2):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            recording.see("loss", loss)
            loss.backward()
            optimizer.step()


def split_model(rank, ranks):
    model = Model()
    for layer in model.layers:
        layer.split(rank, ranks)
    model.get_submodule(PLANTED).adds_up = False
    return model


def demo(rank, ranks, folder, is_idea):
    """Return 0 on rank 0 if the planted mistake is found there, and on other ranks."""
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model = split_model(rank, ranks)
    if is_idea:
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
        mine = outputs_of(model, lambda: model(tokens))
        everyone = [None] * ranks
        dist.all_gather_object(everyone, mine)
    else:
        train(model, f"{folder}/ranks")
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        return 0
    print(
        f"compare{' idea' * is_idea} · {ranks} ranks · cpu/gloo · {PLANTED} forgets its all-reduce"
    )
    plain = Model()
    if is_idea:
        one = outputs_of(plain, lambda: plain(tokens))
        name, words = first_difference(one, everyone)
        lines = [f"> {name}: {words}"]
    else:
        train(plain, f"{folder}/one")
        train(Model(), f"{folder}/noise", noise=1)
        grid = {"tp": ranks}
        comparison = compare(f"{folder}/one", f"{folder}/ranks", grid, f"{folder}/noise")
        name = comparison.origin.name
        lines = report(comparison)
    print("\n".join(lines))
    print(f"planted     {PLANTED}{'' if name == PLANTED else ', NOT'} found")
    return 0 if name == PLANTED else 1


def spawned(rank, ranks, folder, is_idea):
    if demo(rank, ranks, folder, is_idea):
        sys.exit(1)


NAMES = ["start", "activations", "their gradients", "gradients", "parameters after a step"]


def report(comparison, followers=4):
    """Return the lines that the command prints."""
    results = comparison.results
    lines = []
    for kind, name in zip(KINDS, NAMES, strict=True):
        compared = [
            each
            for each in results
            if each.kind == kind and each.state not in ("missing", "skipped")
        ]
        right = [each for each in compared if each.state in ("right", "unfinished")]
        largest = max((each.error for each in right), default=0.0)
        line = f"{name:24} {len(right):4} of {len(compared):4} agree"
        lines.append(f"{line}, within {largest:.1f} units of rounding" if right else line)
    local = [
        each.name
        for each in results
        if each.kind == "value"
        and each.name in comparison.runs.one["classes"]
        and each.state in ("unfinished", "skipped")
    ]
    for name in dict.fromkeys(local):
        lines.append(f"buffer {name}: not compared, each rank has that of its own batch")
    origin = comparison.origin
    if origin is None:
        return [*lines, "AGREE."]
    lines.append("DIFFER. The origin, and what follows:")
    lines.append("> " + line_of(origin, comparison.runs.one["classes"]))
    wrong = [each for each in results if each.state == "wrong" and each.key != origin.key]
    lines += ["  " + line_of(each, comparison.runs.one["classes"]) for each in wrong[:followers]]
    if len(wrong) > followers:
        lines.append(f"  and {len(wrong) - followers} more")
    return lines


def line_of(result, classes):
    kind = classes.get(result.name.partition("[")[0])
    name = f"{result.name or 'the model'} ({kind})" if kind else result.name
    return f"step {result.step}  {result.kind:8}  {name:42}  {result.note}"


def compare_directories():
    """The command. The exit status is 0 if the runs agree, 1 if they differ, and 2 if unknown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("one", metavar="ONE", help="directory of the run on one device")
    parser.add_argument("many", metavar="MANY", help="directory of the run on ranks")
    parser.add_argument("--noise", metavar="DIR", action="append", default=[])
    parser.add_argument("--grid", help="such as dp=2,tp=2; the last axis has neighbouring ranks")
    parser.add_argument("--rename", metavar="OLD=NEW", action="append", default=[])
    parser.add_argument("--followers", type=int, default=4, help="how many to show")
    args = parser.parse_args()
    rename = dict(rule.split("=", 1) for rule in args.rename)
    try:
        comparison = compare(args.one, args.many, args.grid, args.noise, rename)
    except ValueError as error:
        print(f"CANNOT COMPARE. {error}")
        return 2
    print("\n".join(report(comparison, args.followers)))
    return 1 if comparison.origin else 0


def main():
    if not set(sys.argv[1:]) <= {"--idea"}:
        return compare_directories()
    is_idea = "--idea" in sys.argv
    if "RANK" not in os.environ:  # without torchrun
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(spawned, (2, folder, is_idea), nprocs=2)
        return 0
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    folder = Path(tempfile.gettempdir()) / f"compare-{os.environ['MASTER_PORT']}-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    return demo(rank, ranks, folder, is_idea)


if __name__ == "__main__":
    sys.exit(main())

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
    with record("runs/noise", model, noise=1):         # the same steps on one device once more

    python compare.py runs/one runs/eight --noise runs/noise --grid dp=2,tp=4

The grid says how ranks are arranged: neighbouring ranks differ in the last axis. The batch, the
seeds and the start must be those of the one device; dropout must be 0.

Cost: recording copies each tensor to host memory, which takes the bytes of all activations, and
three times those of the parameters for each step. compare reads tensor by tensor. A tensor costs
some passes over its numbers for each layout that has its shape.

Read section 1 for the idea (10 minutes), to section 7 for the technique (55), and the rest to use
it as a library (75).

Run:      torchrun --nproc-per-node 2 compare.py     plants a mistake in a small model and finds it
          python compare.py                          the same; --idea finds it with section 1 alone
          python compare.py ONE MANY [--noise DIR] [--grid dp=2,tp=2] [--rename old=new]
Paper:    Song et al. 2025, TTrace, arXiv 2506.09280, compares with one device, too
See also: docs/compare.md has three examples; the test suite checks a class, and this a whole script
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
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

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
            found = found or (name, "the sum over the ranks is right: an all-reduce is missing")
        if layout == "same":
            found = None
    return found


# --------------------------------------------------------------------------------------------------
# 2. Record: hooks note tensors, and change nothing that the training computes.

KINDS = [  # of tensors, which come in this order in a step
    "start",  # of the recording: what parameters and buffers hold
    "forward",  # the output of a module, or what see() was shown
    "backward",  # the gradient with respect to it
    "gradient",  # of a parameter, when the optimizer steps
    "value",  # what parameters and buffers hold after the step
]


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
    handles = list(recording.add_hooks())
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
        self.uses = defaultdict(dict)  # {name of an output: names of those it was computed from}
        self.step = 0
        self.has_stepped = False  # an optimizer has begun to, since this step began
        self.ever_stepped = False
        self.depth = 0  # of steps of optimizers inside steps of optimizers
        self.noted = {}  # {node of autograd: name of the output that it computed}, in this step
        self.first_numbers = self.read_first_numbers()

    def add_hooks(self):
        yield optimizers.register_optimizer_step_pre_hook(self.before_step)
        yield optimizers.register_optimizer_step_post_hook(self.after_step)
        # A list of stages is not called itself, but its members are.
        for module in self.model if isinstance(self.model, nn.ModuleList) else [self.model]:
            yield module.register_forward_pre_hook(self.before_forward)
        # Two modules may have one name if one wraps the other. The inner one comes later.
        modules = {self.renamed(name): module for name, module in self.model.named_modules()}
        for name, module in modules.items():
            yield module.register_forward_hook(functools.partial(self.on_output, name))

    def note(self, kind, name, tensor, call=0):
        copy = local(tensor).to_dense().to("cpu", copy=True)
        self.tensors[self.step, kind, name][call] = copy

    def note_all(self, kind, named):
        for name, tensor in named.items():
            # A sharded parameter may be freed. Then `state` knows its value.
            if tensor is not None and tensor.is_floating_point() and tensor.numel():
                self.note(kind, self.renamed(name), tensor)

    def note_values(self, kind):
        values = self.state or self.model.named_parameters
        self.note_all(kind, dict(values()) | dict(self.model.named_buffers()))

    def read_first_numbers(self):
        """Return a few numbers of each parameter, which tell whether a step was taken."""
        numbers = {}  # {(name, shape): numbers}; the shape is another one if this is a shard
        for name, parameter in self.model.named_parameters():
            # With `state`, parameters may be nothing.
            if parameter.requires_grad and not self.state:
                tensor = local(parameter)
                numbers[name, tensor.shape] = tensor.flatten()[:8].tolist()
        return numbers

    def before_forward(self, *_):
        """The hook of the whole model's forward.

        Parameters may change without a step of PyTorch's optimizers, such as on a rank that gets
        them from others.
        """
        old = self.first_numbers
        new = self.read_first_numbers()
        if self.has_stepped or old | new != new | old:  # with other numbers for the same key
            self.begin_step()

    def begin_step(self):
        if not self.state:
            self.note_values("value")
        self.step += 1
        self.has_stepped = False
        self.noted.clear()  # it would keep the graph alive
        self.first_numbers = self.read_first_numbers()

    def on_output(self, name, module, args, output):
        """The hook of a module's forward. The noise run replaces the output."""
        if is_recomputed():
            return output
        leaves, structure = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if torch.is_tensor(leaf) and leaf.is_floating_point():
                if self.generator and leaf.grad_fn not in self.noted:
                    # leaf * noise would be kept for backward, and a checkpoint counts what is kept.
                    leaves[index] = leaf.clone()
                    leaves[index].data.mul_(noise_like(leaf, self.generator))
                self.see(f"{name}[{index}]" if index else name, leaves[index])
        return tree_unflatten(leaves, structure) if self.generator else output

    def see(self, name, tensor):
        """Note `tensor`, and the gradient with respect to it."""
        if self.has_stepped:
            self.begin_step()
        call = len(self.tensors[self.step, "forward", name])
        self.note("forward", name, tensor, call)
        node = tensor.grad_fn
        self.uses[name] |= self.inputs_of(node)
        # A container returns the output of its last part. The gradient of a tensor is the total
        # of all its uses, so it is noted once, under the name of the module that computed it.
        if node and node not in self.noted:
            self.noted[node] = name
            tensor.register_hook(functools.partial(self.on_gradient, name, call))

    def on_gradient(self, name, call, gradient):
        self.note("backward", name, gradient, call)
        return gradient * noise_like(gradient, self.generator) if self.generator else None

    def inputs_of(self, node):
        """Return {name: True} of the noted outputs from which autograd's `node` was computed."""
        names = {}
        seen = {None}
        nodes = [node]
        while nodes:
            node = nodes.pop()
            if node in self.noted:
                names[self.noted[node]] = True
            elif node not in seen:
                seen.add(node)
                nodes += [parent for parent, _ in node.next_functions]
        return names

    def before_step(self, *_):
        """The hook of all optimizers: ours and others call another optimizer inside."""
        self.depth += 1
        self.note_gradients()
        self.has_stepped = True
        self.ever_stepped = True

    def note_gradients(self):
        if not self.has_stepped:
            backward = reversed(list(self.model.named_parameters()))
            self.note_all("gradient", {name: parameter.grad for name, parameter in backward})

    def after_step(self, *_):
        self.depth -= 1
        if self.state and not self.depth:  # it may communicate. Here all ranks are at one place
            self.note_values("value")

    def finish(self):
        self.note_gradients()  # if the optimizer is not PyTorch's, or on another rank
        self.note_values("value")

    def page(self):
        """Return dicts, lists and tensors, which torch.load reads with weights_only=True."""
        tensors = {}
        for key, by_call in self.tensors.items():
            tensors[key] = [by_call[call] for call in sorted(by_call)]
        classes = {}  # of the modules, and of those that buffers belong to
        for name, module in self.model.named_modules():
            for each in (name, *dict(module.named_buffers(name, recurse=False))):
                classes[self.renamed(each)] = type(module).__name__
        return {
            "tensors": tensors,
            "uses": dict(self.uses),
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


def noise_like(x, generator):
    """Return factors of 1 ± eps."""
    signs = 2 * torch.randint(2, x.shape, generator=generator) - 1
    return 1 + eps_of(x) * signs.to(x)


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
    if isinstance(noise, str | Path):
        noise = [noise]
    runs = Runs([one, many, *noise], grid, rename)
    check_recordings(runs)
    comparison = Comparison(runs)
    check_noise(comparison)
    check_is_alive(comparison.alive)
    check_is_comparable(comparison.results)
    check_is_explained(comparison)
    return comparison


class Comparison:
    """`results`, one for each tensor of the one device, and `origin`: a Result, or None."""

    def __init__(self, runs):
        self.runs = runs
        self.permuted = set()  # names of parameters that start in another order
        # {step: by what its gradients of activations are scaled}: from judge(), for section 6
        self.factors = {}
        self.alive = set()  # kinds of which some tensor is not zero; values, if one has changed
        self.shares = []  # how far noise moves the outputs of the first step, over their size
        self.flips = []  # keys of outputs of which noise moves a few rows altogether
        # {name of a parameter: the share of its gradient that may be rounding}: from measure(), for
        # the parameter's value
        self.doubts = {}
        self.coarsest = 0.0  # eps of the dtypes until now
        keys = sorted(runs.one["tensors"], key=lambda key: (key[0], KINDS.index(key[1])))
        self.results = [self.result_of(*key) for key in keys]
        self.origin = origin_of(self)

    def result_of(self, step, kind, name):
        """Compare one tensor, or all that a module gave in a step, with what the ranks have."""
        result = Result(step, kind, name)
        one, parts, noises = self.runs.read(result.key)
        if kind in ("start", "value"):
            result.owner = self.runs.one["classes"].get(name, "")
        axes = self.runs.axes | {"micro-batches": 1}  # how many there are is not yet known
        may_be_permuted = name in self.permuted or kind not in ("gradient", "value")
        if result.owner:  # `classes` has modules and buffers, but no parameters
            kind = "buffer"
        # All calls of a module are compared together.
        ways = (torch.cat,) if one[0].dim() else (sum, mean)
        shapes = {tensor.shape[1:] for tensor in one}
        fits = []
        for join in ways if len(shapes) == 1 else ():
            whole = join(one)
            sample = Sample(kind, whole, parts, [*map(join, noises)], axes, may_be_permuted)
            self.measure(result.key, sample)
            if kind == "backward" and whole.numel() > 1:
                sample.factor = self.factors.get(step, 1.0)
            if parts:
                fits += sample.best_fit()
        if fits:
            self.judge(result, min(fits, key=lambda fit: fit.error))
        elif parts:
            result.note = f"{shapes_of(one)} on one device, {shapes_of(parts.values())} on ranks"
        elif kind == "gradient":
            is_lost = "gradient" in self.runs.kinds and one[0].any()
            result.state = "wrong" if is_lost else "skipped"  # sharded optimizers have no .grad
            result.note = "no rank has a gradient"
        return result

    def measure(self, key, sample):
        """Make the sample float64. Set its unit of rounding, and what an error is a part of."""
        step, kind, name = key
        eps = max(map(eps_of, [sample.whole, *sample.parts.values()]))
        sample.parts = {place: tensor.double() for place, tensor in sample.parts.items()}
        sample.whole = whole = sample.whole.double()
        if whole.isnan().any():
            raise CannotCompare(f"the run on one device has NaN: {key}")
        infinite = whole.isinf()  # in masks
        finite = whole.masked_fill(infinite, 0.0)
        change = finite
        one = self.runs.one["tensors"]
        before = one.get((step - 1, kind, name)) or one.get((0, "start", name))
        if kind == "value" and before and before[0].shape == whole.shape:
            change = difference(whole, before[0].double()).masked_fill(infinite, 0.0)
        sample.size = norm(change)
        if sample.size:
            self.alive.add(sample.kind)
        moved = self.noise_of(key, sample)
        self.coarsest = max(self.coarsest, eps)
        coarse = self.coarsest * sample.size / 8
        root = math.sqrt(whole.numel() or 1)
        # Noise may move none of a few numbers, by chance. LIMIT times coarse / root is one eps.
        unit = moved + eps * sample.size + coarse / root
        if kind == "gradient":
            # At most 2: a gradient with the other sign changes the update by twice its size.
            doubt = 2 * (moved + coarse) / root / (whole.abs() + 1e-300)
            doubt = doubt.maximum(self.doubts.get(name, doubt)).clamp(max=2.0)
            self.doubts[name] = doubt.bfloat16()  # as they stay in memory
        if kind == "value":
            unit += eps * finite.abs().max().item()  # one number may be rounded otherwise
            # Adam's update has about the same size for small gradients, and in later steps, too. So
            # where a gradient may be only rounding, its whole update may be.
            sample.slack = change.abs() * self.doubts.get(name, 0.0)
        sample.unit = unit or 1e-300

    def noise_of(self, key, sample):
        """Return how far the noise runs have moved a tensor."""
        distances = []
        for noise in sample.noises:
            if noise.shape == sample.whole.shape:
                distances.append(difference(noise.double(), sample.whole))
        moved = max(map(norm, distances), default=0.0)
        if sample.kind == "forward":
            is_lost = len(distances) < len(sample.noises)
            if is_lost or any(is_flip(each, sample.whole) for each in distances):
                self.flips.append(key)
            if not key[0]:  # in the first step
                self.shares.append(moved / (sample.size or 1.0))
        return moved

    def judge(self, result, fit):
        """Say what state the tensor is in, and why if it is wrong."""
        is_one_number = fit.sample.whole.numel() == 1
        result.layout = ", ".join(f"{axis} {how}" for axis, how in fit.layout.items())
        result.error = fit.error
        result.scale = fit.scale
        is_wrong = fit.error > LIMIT or (result.kind == "gradient" and fit.scale != 1.0)
        if "all" in fit.layout:  # orders() has sorted the rows of the joined tensor
            self.permuted.add(result.name)
        if result.kind == "backward" and not is_one_number and not is_wrong:
            result.scale /= self.factors.setdefault(result.step, fit.scale)
            is_wrong = exact(1.001 * fit.scale) != fit.scale  # it is no exact scale
        result.note = unfinished_in_words(fit.layout, is_one_number)
        result.state = "unfinished" if result.note else "right"
        if is_wrong:
            # Each rank has the statistics of its own batch.
            result.state = "skipped" if "BatchNorm" in result.owner else "wrong"
            result.right_on = self.runs.ranks_at(fit.sample.right_places())
            result.note = diagnosis(result, fit, self.runs)
        elif result.scale != 1.0:
            result.state = "scaled"
            result.note = scale_in_words(result.scale, self.runs.axes)


def shapes_of(tensors):
    return {tuple(tensor.shape) for tensor in tensors}


@dataclass
class Result:
    """What became of one tensor. It is unfinished if it is right but for a sum or an order."""

    step: int
    kind: str  # one of KINDS
    name: str
    layout: str = ""
    note: str = "no such name on the ranks"
    state: str = "missing"  # or right, unfinished, scaled, wrong, skipped
    error: float = 0.0  # in units of rounding
    scale: float = 1.0  # of the ranks' tensor, over the one device's
    right_on: list = ()  # the ranks that have the right one, if others have not
    owner: str = ""  # of a buffer: the class of its module

    @property
    def key(self):
        return self.step, self.kind, self.name


class Runs:
    """The files of the one device, of the ranks, and of the noise runs."""

    def __init__(self, directories, grid, rename):
        self.directories = directories
        self.renamed = functools.partial(renamed, rename=rename)
        self.open()
        if isinstance(grid, str):
            grid = dict(axis.split("=") for axis in grid.split(","))
        grid = grid or {"ranks": len(self.ranks)}
        self.axes = {axis: int(size) for axis, size in grid.items()}
        self.places = list(itertools.product(*map(range, self.axes.values())))  # of the ranks
        self.has_stepped = any(page["has_stepped"] for page in self.ranks)
        self.kinds = {kind for page in self.ranks for _, kind, _ in page["tensors"]}

    def open(self):
        """Open the files anew: what has been read of one takes memory until it is closed."""
        self.ones, self.ranks, *noises = map(pages_of, self.directories)
        self.one = self.ones[0]
        self.noises = [page for pages in noises for page in pages]
        for page in self.ranks:
            tensors = page["tensors"].items()
            page["tensors"] = {(*key, self.renamed(name)): calls for (*key, name), calls in tensors}
        self.unread = 2**27  # bytes of one device, until the files are opened again

    def read(self, key):
        """Return calls of the one device, {(*place, number of the call): call}, those of noise."""
        one = self.one["tensors"][key]
        self.unread -= sum(tensor.nbytes for tensor in one)
        if self.unread < 0:
            self.open()
        parts = {}
        new_key = (*key[:2], self.renamed(key[2]))
        for place, page in zip(self.places, self.ranks, strict=True):
            if key[1] == "gradient" and page["has_stepped"] < self.has_stepped:
                continue  # the rank only receives parameters, and nobody uses its gradients
            for call, tensor in enumerate(page["tensors"].get(new_key, ())):
                parts[(*place, call)] = tensor
        noises = [page["tensors"][key] for page in self.noises if key in page["tensors"]]
        return one, parts, noises

    def ranks_at(self, places):
        """Return the ranks at places, which have the number of a micro-batch as well."""
        return sorted({self.places.index(place[:-1]) for place in places})


def pages_of(directory):
    """Return the recording of each rank. Their tensors stay in the files until they are read."""
    paths = sorted(Path(directory).glob("rank*.pt"), key=lambda path: int(path.stem[4:]))
    pages = [torch.load(path, mmap=True, weights_only=True) for path in paths]
    if not pages:
        raise CannotCompare(f"there is no rank0.pt of record() in {directory}")
    return pages


def mean(tensors):
    return sum(tensors) / len(tensors)


# --------------------------------------------------------------------------------------------------
# 4. Rounding: what is needed to measure it.

LIMIT = 8.0  # units. Correct runs have errors of 1 or 2, and the smallest mistakes in bf16 of 20


def eps_of(tensor):
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def difference(a, b):
    change = a - b
    if not change.sum().isfinite():
        change.masked_fill_(a == b, 0.0)  # infinities, in masks
    return change


def norm(tensor):
    return tensor.norm().item()


def is_flip(distance, whole):
    """Return whether noise moves a few rows altogether: tokens that go to another expert."""
    moved = distance.norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-300)
    return moved.numel() and moved.max() > max(0.02, 100 * moved.median())


# --------------------------------------------------------------------------------------------------
# 5. Layouts: how the ranks' tensors make up the one device's. For each axis of the grid, one of
#
#        same      every rank has it            sum, mean   of what the ranks have
#        cat d     joined in dimension d        flat        joined as vectors, the rest cut off
#        parts d   joined in dimension d, after each rank's tensor was cut: first all first pieces,
#                  then all second ones (q, k, v in one matrix; in a zigzag these backward):
#                  [q0 k0 v0] and [q1 k1 v1] make up [q0 q1 k0 k1 v0 v1]
#
#    `order d` is a layout after which dimension d is permuted.


@dataclass
class Fit:
    error: float  # in units of rounding
    layout: dict  # {axis: how}; the axis of an order is "all"
    scale: float  # of the ranks' tensor, over the one device's
    tensor: torch.Tensor  # what the ranks' tensors make up
    sample: "Sample"


@dataclass
class Sample:
    """A tensor of the one device, and what the ranks and the noise runs have of it."""

    kind: str  # one of KINDS, or "buffer"
    whole: torch.Tensor
    parts: dict  # {(*coordinates on the grid, number of the micro-batch): tensor}
    noises: list
    axes: dict  # {name: size}
    may_be_permuted: bool
    unit: float = 0.0  # of rounding
    slack: float = 0.0  # or a tensor: the errors of each number that do not count
    size: float = 0.0  # of what an error is a part of: for a value, the size of its update
    factor: float = 1.0  # of activations' gradients in this step

    def best_fit(self):
        """Return [the best fit], or [] if none has the shape.

        Of the fits within one unit, it is the first: what is zero but for rounding has every
        layout.
        """
        fits = []
        for fit in itertools.chain(self.fits(), self.orders(fits)):
            fits.append(fit)
            if fit.error <= 1 and fit.scale == self.factor:
                return [fit]
        return sorted(fits, key=self.rank_of)[:1]

    def rank_of(self, fit):
        return (
            fit.error > LIMIT,
            fit.scale != self.factor,
            "all" in fit.layout,  # two rows that are equal can be taken for one another
            fit.error,
        )

    def fits(self):
        """Yield a Fit for each way to join the parts, and one for each scale that fits better."""
        for layout, tensor in joins(self.parts, self.axes, self.whole, self.kind):
            if tensor.shape != self.whole.shape:
                continue
            fit = self.fit(layout, tensor, self.factor)
            yield fit
            if fit.error > LIMIT and self.kind in ("backward", "gradient"):
                scale = norm(tensor) / (self.size or 1.0)
                yield self.fit(layout, tensor, exact(scale))

    def orders(self, fits):
        """Yield fits after a permutation of one dimension, which keeps the norm.

        Layouts of one norm are permutations of one another, so the first is enough.
        """
        for fit in list(fits) if self.may_be_permuted else ():
            change = norm(fit.tensor) / fit.scale - norm(self.whole)
            if abs(change) <= LIMIT * self.unit:
                for dim, length in enumerate(self.whole.shape):
                    if 1 < length <= 2048:
                        rows = reordered(fit.tensor, self.whole * fit.scale, dim)
                        yield self.fit(fit.layout | {"all": f"order {dim}"}, rows, fit.scale)
                return

    def fit(self, layout, tensor, scale):
        distance = difference(tensor / scale, self.whole)
        if self.kind == "value":
            distance = (distance.abs() - self.slack).clamp(min=0.0)
        error = norm(distance) / self.unit
        return Fit(min(math.inf, error), layout, scale, tensor, self)  # NaN becomes infinite

    def right_places(self):
        """Return where the tensor is the one device's, if not everywhere."""
        right = []
        for place, tensor in self.parts.items():
            is_whole = tensor.shape == self.whole.shape
            if is_whole and self.fit({}, tensor, self.factor).error <= LIMIT:
                right.append(place)
        return right if len(right) < len(self.parts) else []


def exact(scale):
    """Return the power of 2, the whole number, or the fraction of one, that is near `scale`."""
    if not 0 < scale < math.inf:
        return 1.0
    power = 2.0 ** round(math.log2(scale))
    for near in (power, round(scale) if scale > 1 else 1 / round(1 / scale)):
        if abs(scale / near - 1) < 0.02:
            return near
    return scale


def joins(parts, axes, whole, kind):
    """Yield (layout, tensor) for each way to join `parts`, which is {coordinates: tensor}.

    A layout is {name of an axis: how}. Axes may be joined in any order.
    """
    if not axes:
        yield {}, parts[()]
    for number, axis in enumerate(axes):
        others = dict(axes)
        del others[axis]
        groups = defaultdict(list)  # {other coordinates: the tensors along the axis}
        for place, tensor in parts.items():
            groups[place[:number] + place[number + 1 :]].append(tensor)
        group, *_ = groups.values()
        for how, join in ways_to_join(group, whole, kind, others):
            if number and how in ("same", "sum", "mean"):
                continue  # after the axes before this one they give the same
            try:
                joined = {rest: join(group) for rest, group in groups.items()}
            except RuntimeError:  # the shapes do not fit
                continue
            here = {axis: how} if len(group) > 1 else {}
            for layout, tensor in joins(joined, others, whole, kind):
                yield here | layout, tensor


def ways_to_join(group, whole, kind, others):
    """Yield (how, function that joins the tensors along an axis). `others` are the other axes."""
    first = group[0]
    is_activation = kind in ("forward", "backward")
    if all(tensor.shape == first.shape for tensor in group):
        yield "same", same
        is_replica = whole.numel() > 1 and all(torch.equal(first, each) for each in group)
        if not is_replica and kind not in ("start", "value"):
            yield "sum", sum
            if not is_activation or whole.numel() == 1:
                yield "mean", mean
    for dim, length in enumerate(whole.shape[: first.dim()]):
        if len(group) > 1 and sum(tensor.shape[dim] for tensor in group) <= length:
            for cut in CUTS:
                how = "cat" if cut == (1,) else "parts"
                yield f"{how} {dim}", functools.partial(in_pieces, dim=dim, cut=cut)
    if not is_activation and "micro-batches" in others:  # parameters have one, which is last
        for shape in slices_of(whole.shape, others.values()):
            yield "flat", functools.partial(flatten, shape=shape)


def same(group):
    """Return the first tensor. Where others differ from it, it is made wrong."""
    first, *others = group
    for tensor in others:
        first = first + 2 * difference(tensor, first).abs()
    return first


CUTS = [  # how each tensor is cut, as ratios of lengths
    (1,),  # not at all
    (1, 1),  # gate and up
    (1, -1),  # both ends of a zigzag, of which the second ones are joined backward
    *((heads, 1, 1) for heads in range(1, 9)),  # q, k and v, of which q may have more heads
]


def in_pieces(group, dim, cut):
    """Join first pieces, then second pieces, and so on; backward those with a negative length."""
    number = sum(map(abs, cut))
    # If a length does not divide, a rest is lost, so that the shape does not fit.
    rows = [list(tensor.split(tensor.shape[dim] // number, dim)) for tensor in group]
    pieces = []
    for length in cut:
        for row in rows if length > 0 else reversed(rows):
            pieces += row[: abs(length)]
            del row[: abs(length)]
    return torch.cat(pieces, dim)


def slices_of(shape, sizes):
    """Yield `shape`, and the shapes of its slices if an axis of one of the sizes cuts it."""
    yield shape
    for dim in range(len(shape)):
        for size in sizes:
            part = list(shape)
            part[dim] //= size
            yield part


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
    pages = enumerate(comparison.runs.ranks)
    late = [rank for rank, page in pages if max(page["tensors"])[0] < results[-1].step]
    if late and result.kind == "forward":
        note = f"{ranks_in_words(late)} took no step of the optimizer"
        return Result(result.step, "value", results[0].name, note=note, state="wrong")
    if result.kind == "gradient":
        result = origin_of_scales(result, comparison)
    while cause := cause_of(result, results, comparison.runs.one["uses"]):
        result = cause
    return result


def origin_of_scales(result, comparison):
    """Return the loss or the gradient that has scaled the others; or `result`, a wrong gradient."""
    of_step = [each for each in comparison.results if each.step == result.step]
    gradients = [each for each in of_step if each.kind == "gradient"]
    # A few gradients are zero but for rounding, and so are right with every scale.
    common = median_high(each.scale for each in gradients)
    if exact(1.001 * common) != common:  # it is no exact scale
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
    if not is_of_loss or result.scale != common:
        return result
    loss = next(each for each in of_step if each.kind == "backward")  # backward's first
    loss.state = "wrong"
    loss.note = (
        f"all gradients are {times(common)} the right ones, from the loss on: "
        f"divide it by {common:.4g}"
    )
    return loss


def cause_of(result, results, uses):
    """Return an unfinished or scaled result that this one follows from, or None."""
    step, kind, name = result.key
    names = {
        "forward": uses.get(name, ()),
        "backward": [user for user, used in uses.items() if name in used],
        "gradient": [name.rpartition(".")[0]],
        "value": [] if result.right_on else [name],
    }
    before = {"gradient": "backward", "value": "gradient"}.get(kind, kind)
    keys = [(step, before, source) for source in names.get(kind, ())]
    # Each rank's part of a sum is right, unless its own source was to be added up.
    is_part = kind == "gradient" and result.state == "unfinished"
    for source in results[: results.index(result)]:
        is_sum = source.state == "unfinished" and (not is_part or source.layout == result.layout)
        is_scaled = source.state == "scaled" and kind == "backward"
        if source.key in keys and (is_sum or is_scaled):
            return source
    return None


# --------------------------------------------------------------------------------------------------
# 7. Words: what is wrong with a tensor, with the evidence.


def diagnosis(result, fit, runs):
    """Return in words how the tensor is wrong, with the evidence."""
    sample = fit.sample
    bad = [place for place, tensor in sample.parts.items() if not tensor.isfinite().all()]
    if bad and fit.error == math.inf:
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


def unfinished_in_words(layout, is_one_number):
    """Return what is missing, if nothing later does it; "" if nothing is."""
    ways = set(layout.values())
    axes = " and ".join(axis for axis, how in layout.items() if how in ("sum", "mean"))
    if "mean" in ways and not is_one_number:
        return f"each rank has the gradient of its own batch: average it over the {axes} ranks"
    if "sum" in ways:
        return f"the sum over the {axes} ranks is right: an all-reduce is missing"
    # Samples or tokens, of which each rank has others, may be in any order.
    if "all" in layout and not {"cat 0", "order 0"} <= ways:
        dim = layout["all"].removeprefix("order ")
        return f"the right numbers in another order along dimension {dim}"
    return ""


# --------------------------------------------------------------------------------------------------
# 8. The library: refusals.


def check_recordings(runs):
    if len(runs.ones) > 1:
        raise CannotCompare(f"ONE has {len(runs.ones)} ranks: record it on one device, on one rank")
    if len(runs.places) != len(runs.ranks):
        raise CannotCompare(f"the grid {runs.axes} is not of {len(runs.ranks)} ranks, as MANY is")


def check_noise(comparison):
    """Raise unless the noise run does what the other one does, but for rounding."""
    shares = comparison.shares
    if not comparison.runs.noises or not shares:
        return
    if not any(shares):
        raise CannotCompare("the noise run has changed nothing: record it with noise=1")
    middle = median_high(shares)
    if middle > 0.1:
        raise CannotCompare(
            f"the noise run differs by {middle:.2g}, which is more than rounding: it must have the "
            "start, the batches and the seeds of the run on one device, and a dropout of 0"
        )


def check_is_alive(kinds):
    """Two runs that compute nothing agree, and say nothing."""
    if "gradient" not in kinds:
        raise CannotCompare("on one device there are no gradients, or all are zero")
    if "value" not in kinds:
        raise CannotCompare("on one device no parameter changes: record a step of the optimizer")


def check_is_comparable(results):
    """A few tensors have no counterpart, such as those of containers. Many are a mistake."""
    # What follows a mistake may have other shapes.
    before = list(itertools.takewhile(lambda each: each.state != "wrong", results))
    # Buffers may be of one rank only. Reentrant checkpoints have no gradients of activations.
    states = [each for each in before if each.kind != "backward" and not each.owner]
    missing = [each for each in states if each.state == "missing"]
    if len(missing) > max(1, 0.05 * len(states)):
        words = [f"step {each.step} {each.kind} {each.name}: {each.note}" for each in missing[:3]]
        raise CannotCompare(
            f"{len(missing)} of {len(states)} tensors of the one device have no counterpart in the "
            f"other run by name and shape, such as {words}. If names differ, use rename; if "
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
    for step, _, name in comparison.flips:
        if step <= origin.step:
            raise CannotCompare(
                f"rounding alone sends tokens to other experts, in step {step} {name}: take "
                f"another seed, or float64. The first difference is in {where}"
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
        if each.kind == "value" and each.owner and each.state in ("unfinished", "skipped")
    ]
    for name in dict.fromkeys(local):
        lines.append(f"buffer {name}: not compared, each rank has that of its own batch")
    origin = comparison.origin
    if origin is None:
        return [*lines, "AGREE."]
    lines.append("DIFFER. The origin, and what follows:")
    classes = comparison.runs.one["classes"]
    lines.append("> " + line_of(origin, classes))
    wrong = [each for each in results if each.state == "wrong" and each.key != origin.key]
    lines += ["  " + line_of(each, classes) for each in wrong[:followers]]
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

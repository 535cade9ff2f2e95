"""compare: where does a run on N ranks first leave the run on one device?

A script records the run on one device, and the script with ranks records the same steps. Recorded
are the output of each module, the gradient with respect to it, the gradients of the parameters when
the optimizer steps, and the parameters after the step. Then every tensor of the one device is
sought in the ranks' tensors. The first one that is not there is the origin:

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

Read section 1 for the idea (10 minutes), to section 5 for the technique (35), and the rest to use
it as a library (60).

Run:      torchrun --nproc-per-node 2 compare.py     plants a mistake in a small model and finds it
          python compare.py                          the same; --idea finds it with section 1 alone
          python compare.py ONE MANY [--noise DIR] [--grid dp=2,tp=2] [--rename old=new]
Paper:    Song et al. 2025, TTrace, arXiv 2506.09280, compares with one device, too
See also: docs/compare.md has three examples; the test suite judges a class, and this a whole script
Left out: modules under torch.compile; gradients of activations inside reentrant checkpoints;
          FSDP1's flat parameters; outputs of integers
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import functools
import itertools
import math
import operator
import os
import sys
import tempfile
from collections import Counter
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
    unfinished = None  # the module whose outputs were still to be added
    for name, whole in one.items():
        layout = naive_layout(whole, [outputs[name] for outputs in ranks], tolerance)
        if layout == "wrong" and not unfinished:
            return name, "wrong"
        if layout == "wrong":
            break
        if layout != "another shape":
            unfinished = name if layout == "sum" else None
    if unfinished:
        return unfinished, "the sum over the ranks is right: an all-reduce is missing"
    return None


# --------------------------------------------------------------------------------------------------
# 2. Record: hooks note tensors, and change nothing that the training computes.

# A tensor is one of five kinds. They come in this order in a step.
KINDS = ["start", "forward", "backward", "gradient", "value"]
OF_PARAMETERS = {"start", "gradient", "value"}
WRAPPERS = {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def renamed(name, rename=None):
    """Drop the wrappers' parts of a name. The first rule of {old: new} that fits replaces a prefix.

    `rename` may be a function, too.
    """
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    if callable(rename):
        return rename(name)
    for old, new in (rename or {}).items():
        if name.startswith(old) and name[len(old) : len(old) + 1] in ("", ".", "["):
            return (new + name[len(old) :]).lstrip(".")
    return name


def copy_of(tensor):
    """Return a dense copy in host memory. That of a DTensor is the part that this rank has."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.to_dense().to("cpu", copy=True)


class Shake(torch.autograd.Function):
    """Multiply each number by 1 ± eps in forward, and its gradient in backward."""

    @staticmethod
    def forward(ctx, x, generator):
        ctx.generator = generator
        return x * Shake.factors(x, generator)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Shake.factors(gradient, ctx.generator), None

    @staticmethod
    def factors(x, generator):
        signs = 2 * torch.randint(2, x.shape, generator=generator) - 1
        eps = torch.finfo(x.dtype).eps
        return (1 + eps * signs.double()).to(x.device, x.dtype)


class Recording:
    """What `record` gives. `see(name, tensor)` notes a tensor that is no module's output."""

    def __init__(self, model, rename, state, noise):
        self.model = model
        self.rename = rename
        self.state = state or self.own_parameters
        self.generator = None  # of the noise
        if noise:
            self.generator = torch.Generator().manual_seed(noise)
        self.tensors = {}  # {(step, kind, name): {number of the call: tensor}}
        self.parents = {}  # {(step, name): names of the outputs that this one was computed from}
        self.step = 0
        self.has_stepped = False  # the optimizer has. The next forward begins a new step
        self.depth = 0  # of steps of optimizers inside steps of optimizers
        self.calls = Counter()  # {(step, name): calls of a module}
        self.noted = {}  # {node of autograd: name of the output that it computed}, in this step

    def own_parameters(self):
        return dict(self.model.named_parameters())

    def note(self, kind, name, tensor, call=0):
        self.tensors.setdefault((self.step, kind, name), {})[call] = copy_of(tensor)

    def note_parameters(self, kind, named):
        for name, tensor in named.items():
            # A sharded parameter may be freed. Then `state` knows its value.
            if tensor is not None and tensor.numel():
                self.note(kind, renamed(name, self.rename), tensor)

    def see(self, name, tensor):
        """Note `tensor`, and the gradient with respect to it."""
        if self.has_stepped:
            self.step += 1
            self.has_stepped = False
        call = self.calls[self.step, name]
        self.calls[self.step, name] += 1
        self.note("forward", name, tensor, call)
        node = tensor.grad_fn
        # A container returns the output of its last part. The gradient of a tensor is the total
        # of all its uses, so it is noted once, under the name of the module that computed it.
        known = self.noted.get(node)
        inputs = [known] if known else self.inputs_of(node)
        self.parents.setdefault((self.step, name), inputs)
        if node is None or known:
            return
        self.noted[node] = name
        tensor.register_hook(lambda gradient: self.note("backward", name, gradient, call))

    def inputs_of(self, node):
        """Return the noted outputs from which autograd's `node` was computed."""
        names = []
        seen = set()
        nodes = [node] if node else []
        while nodes:
            for parent, _ in nodes.pop().next_functions:
                if parent in self.noted:
                    names.append(self.noted[parent])
                elif parent is not None and parent not in seen:
                    seen.add(parent)
                    nodes.append(parent)
        return list(dict.fromkeys(names))

    def on_output(self, name, module, args, output):
        """The hook of a module's forward. The noise run replaces the output."""
        # A checkpoint calls modules again during backward.
        if torch._C._current_graph_task_id() != -1:
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

    def before_step(self, *_):
        """The hook of all optimizers: ours and others call another optimizer inside."""
        self.depth += 1
        if self.depth == 1:
            self.note_gradients()

    def note_gradients(self):
        if not any(step == self.step and kind == "gradient" for step, kind, _ in self.tensors):
            gradients = {name: p.grad for name, p in self.own_parameters().items()}
            self.note_parameters("gradient", gradients)

    def after_step(self, *_):
        self.depth -= 1
        if self.depth == 0:
            self.note_parameters("value", self.state())  # those of a step's last optimizer remain
            self.has_stepped = True
            self.noted.clear()  # it would keep the graph alive

    def save(self, path):
        """Write lists, dicts and tensors, which torch.load reads with weights_only=True."""
        if not self.has_stepped:
            self.note_gradients()  # an optimizer that is not PyTorch's, or none
            self.note_parameters("value", self.state())
        calls = {
            key: [by_call[n] for n in sorted(by_call)] for key, by_call in self.tensors.items()
        }
        classes = {renamed(n, self.rename): type(m).__name__ for n, m in self.model.named_modules()}
        page = {"tensors": calls, "parents": self.parents, "classes": classes}
        torch.save(page | {"random": random_parts(self.model)}, path)


def random_parts(model):
    """Return the parts of the model that compute something else on other ranks."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            is_dropout = "dropout" in key or (key == "p" and "Dropout" in type(module).__name__)
            is_on = module.training if is_dropout else key == "capacity_factor"
            if is_on and isinstance(value, int | float) and value > 0:
                found.append(f"{name}.{key} = {value}")
    return found


@contextmanager
def record(directory, model, rename=None, state=None, noise=0):
    """Record one or a few training steps of `model` in a file of this rank in `directory`.

    `rename`: {prefix: what replaces it}, or a function, for the names of modules and parameters.
    `state`: a function that returns whole parameters by name, for a model that has shards only.
    `noise`: a seed. Then rounding errors are added; for a run on one device.
    """
    recording = Recording(model, rename, state, noise)
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(directory) / f"rank{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    # Two modules may have one name if one wraps the other. The inner one comes later.
    modules = {renamed(name, rename): module for name, module in model.named_modules()}
    before = optimizers.register_optimizer_step_pre_hook(recording.before_step)
    after = optimizers.register_optimizer_step_post_hook(recording.after_step)
    handles = [before, after]
    for name, module in modules.items():
        hook = functools.partial(recording.on_output, name)
        handles.append(module.register_forward_hook(hook))
    try:
        recording.note_parameters("start", recording.state())
        yield recording
        recording.save(path)
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------------------------------------
# 3. Layouts: how the ranks' tensors make up the one device's. For each axis of the grid, one of
#
#        same      every rank has it            sum, mean   of what the ranks have
#        cat d     joined in dimension d        flat        joined as vectors, the rest cut off
#        parts d   joined in dimension d, after each rank's tensor was cut: first all first pieces,
#                  then all second ones (q, k, v in one matrix; in a zigzag these backward)
#
#    Micro-batches are one more axis. `order d` is a layout after which dimension d is permuted.


def in_pieces(group, dim, pieces, backward):
    """Join first pieces, then second pieces, and so on."""
    rows = [tensor.chunk(pieces, dim) for tensor in group]
    joined = []
    for index in range(pieces):
        column = [row[index] for row in rows]
        joined += column[::-1] if backward and index else column
    return torch.cat(joined, dim)


def flatten(group, shape):
    """Join vectors, and cut off what only fills up the last ones."""
    flat = torch.cat([tensor.reshape(-1) for tensor in group])
    rest = flat.numel() - math.prod(shape)
    if not 0 <= rest < max(len(group), group[0].numel()):
        raise RuntimeError(f"{flat.numel()} numbers are not those of {shape}")
    return flat[: math.prod(shape)].view(shape)


def mean(group):
    return sum(group) / len(group)


CUTS = [(1, False), (2, False), (3, False), (2, True)]  # pieces of each rank; second ones backward


def ways_to_join(group, whole, kind, sizes):
    """Yield (how, function that joins the tensors along an axis). `sizes` of the other axes."""
    shapes = {tensor.shape for tensor in group}
    if len(shapes) == 1:
        yield "same", operator.itemgetter(0)
    is_replica = whole.numel() > 1 and all(torch.equal(group[0], each) for each in group)
    if len(shapes) == 1 and not is_replica and kind not in ("start", "value"):
        yield "sum", sum
        if kind == "gradient" or whole.numel() == 1:
            yield "mean", mean
    for dim in range(min(group[0].dim(), whole.dim())):
        # Parts may differ in this dimension alone.
        others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        lengths = [tensor.shape[dim] for tensor in group]
        if len(others) > 1 or len(group) == 1 or sum(lengths) > whole.shape[dim]:
            continue
        for pieces, backward in CUTS:
            if all(length % pieces == 0 for length in lengths):
                how = "cat" if pieces == 1 else "parts"
                options = {"dim": dim, "pieces": pieces, "backward": backward}
                yield f"{how} {dim}", functools.partial(in_pieces, **options)
    if kind in OF_PARAMETERS:
        for shape in slices_of(whole.shape, sizes):
            yield "flat", functools.partial(flatten, shape=shape)


def slices_of(shape, sizes):
    """Return `shape`, and the shapes of its slices if an axis of one of the sizes cuts it."""
    slices = [shape]
    for dim, length in enumerate(shape):
        for size in sizes:
            if size > 1 and length % size == 0:
                slices.append(shape[:dim] + (length // size,) + shape[dim + 1 :])
    return slices


def groups_along(parts, number):
    """Return {other coordinates: the tensors along axis `number`, in order}."""
    groups = {}
    for coordinates in sorted(parts):
        others = coordinates[:number] + coordinates[number + 1 :]
        groups.setdefault(others, []).append(parts[coordinates])
    return groups


def spread_of(groups):
    """Return by how much tensors differ that should be the same."""
    pairs = ((group[0], tensor) for group in groups.values() for tensor in group[1:])
    return max((norm(difference(a, b)) for a, b in pairs), default=0.0)


def joins(parts, axes, whole, kind):
    """Yield (layout, tensor, spread) for each way to join `parts`, {coordinates: tensor}.

    `axes` is {name: size}. A layout is {name of an axis: how}, the spread what "same" ignores.
    """
    if not axes:
        yield {}, parts[()], 0.0
        return
    for number, axis in enumerate(axes):
        groups = groups_along(parts, number)
        others = {name: size for name, size in axes.items() if name != axis}
        group = next(iter(groups.values()))
        for how, join in ways_to_join(group, whole, kind, others.values()):
            # The order of the axes matters only for parts that are put one after the other.
            if number and how in ("same", "sum", "mean"):
                continue
            try:
                joined = {rest: join(group) for rest, group in groups.items()}
            except RuntimeError:  # the shapes of another group do not fit
                continue
            spread = spread_of(groups) if how == "same" else 0.0
            for layout, tensor, more in joins(joined, others, whole, kind):
                yield {axis: how} | layout, tensor, max(spread, more)


def reordered(tensor, whole, dim):
    """Return `tensor` with its slices along `dim` in the order of the nearest of whole's."""
    length = whole.shape[dim]
    rows = tensor.movedim(dim, 0).reshape(length, -1)
    wanted = whole.movedim(dim, 0).reshape(length, -1)
    if rows.shape[1] > 16:  # distances in a random projection cost less
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(rows.shape[1], 16, generator=generator, dtype=rows.dtype)
        rows = rows @ projection
        wanted = wanted @ projection
    return tensor.index_select(dim, torch.cdist(wanted, rows).argmin(1))


# --------------------------------------------------------------------------------------------------
# 4. Rounding: which layout fits, and how well, in units of what the noise run has measured.

LIMIT = 8.0  # units. Correct runs have errors of 1 or 2, and the smallest mistakes in bf16 of 20
FEW = 16  # numbers, of which noise may move none by chance


def difference(a, b):
    change = a - b
    if not change.sum().isfinite():
        change.masked_fill_(a == b, 0.0)  # infinities, in masks
    return change


def norm(tensor):
    return tensor.norm().item()


class Fit(NamedTuple):
    error: float  # in units of rounding
    layout: dict  # {axis: how}
    scale: float = 1.0  # of the ranks' tensor, over the one device's
    tensor: torch.Tensor = None  # what the ranks' tensors make up
    spread: float = 0.0  # between tensors that should be the same


@dataclass
class Problem:
    """A tensor of the one device, what the ranks have of it, and what rounding may do to it."""

    kind: str
    whole: torch.Tensor  # of float64, as all others
    parts: dict  # {coordinates on the grid: tensor}
    axes: dict  # {name: size}
    unit: float
    size: float  # of what an error is a part of: for a value, the size of its update
    factor: float = None  # of activations' gradients, or None if not known
    may_be_permuted: bool = True

    def fits(self):
        """Yield a Fit for each way to join the parts, and one for each scale that fits better."""
        factor = self.factor or 1.0
        for layout, tensor, spread in joins(self.parts, self.axes, self.whole, self.kind):
            if tensor.shape != self.whole.shape:
                continue
            fit = self.fit(layout, tensor, spread, factor)
            yield fit
            if fit.error > LIMIT and self.kind in ("backward", "gradient"):
                scale = self.exact(self.scale_of(tensor))
                if 0 < scale < math.inf:
                    yield self.fit(layout, tensor, spread, scale)

    def fit(self, layout, tensor, spread, scale):
        error = norm(difference(tensor / scale, self.whole)) / self.unit
        error = max(error, spread / scale / self.unit) if math.isfinite(error) else math.inf
        return Fit(error, layout, scale, tensor, spread)

    def scale_of(self, tensor):
        """Return tensor / whole, in the direction of whole."""
        square = self.whole.square().sum()
        return ((tensor * self.whole).sum() / square).item() if square else 0.0

    def exact(self, scale):
        """Return a product of the sizes of axes, or a power of 2, if `scale` is near one."""
        sizes = [2.0 ** round(math.log2(scale))] if 0 < scale < math.inf else []
        for size in (1.0, *self.axes.values()):
            sizes += [size, 1 / size, *(each * size for each in sizes)]
        return next((size for size in sizes if abs(scale / size - 1) < 0.02), scale)

    def best_fit(self):
        """Return the best fit within rounding, or of all; None if none has the shape.

        Of the fits within one unit, the first: what is zero but for rounding has every layout.
        """
        fits = []
        for fit in self.fits():
            fits.append(fit)
            if fit.error <= 1 and fit.scale == (self.factor or 1.0):
                break
        if not fits:
            return None
        best = min(fits, key=self.rank_of)
        if best.error > LIMIT and self.may_be_permuted:
            best = min([best, *self.orders(fits)], key=self.rank_of)
        return best

    def rank_of(self, fit):
        error = max(fit.error, 1.0)
        is_scaled = fit.scale != (self.factor or 1.0)
        return error > LIMIT, is_scaled, error

    def orders(self, fits):
        """Yield the fits after a permutation of one dimension."""
        for fit in fits:
            is_added = {"sum", "mean"} & set(fit.layout.values())
            if is_added or fit.scale != (self.factor or 1.0):
                continue
            scales = {fit.scale}
            if self.kind == "backward" and self.size:
                scales.add(self.exact(norm(fit.tensor) / self.size))
            for dim, scale in itertools.product(range(self.whole.dim()), scales):
                if 1 < self.whole.shape[dim] <= 2048 and 0 < scale < math.inf:
                    tensor = scale * reordered(fit.tensor / scale, self.whole, dim)
                    layout = fit.layout | {"all": f"order {dim}"}
                    yield self.fit(layout, tensor, fit.spread, scale)


# --------------------------------------------------------------------------------------------------
# 5. Compare: the origin is the first tensor that leaves rounding although all that it was computed
#    from had not.

MICRO = "micro-batches"


class CannotCompare(ValueError):
    """The runs do not say whether they agree. The text says what to change."""


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
    share: float = 0.0  # the error over the size of the one device's tensor
    scale: float = 1.0  # of the ranks' tensor, over the one device's

    @property
    def key(self):
        return self.step, self.kind, self.name


def as_rows(tensor, others):
    """Join the dimensions before the last: some models flatten batch and sequence."""
    dims = {other.dim() for other in others} | {tensor.dim()}
    return tensor.flatten(0, -2) if len(dims) > 1 and min(dims) > 1 else tensor


def is_flip(distance, whole):
    """Return whether noise moves a few rows altogether: tokens that go to another expert."""
    if whole.dim() < 2 or not whole.numel():
        return False
    moved = distance.norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-300)
    return moved.max().item() > max(0.02, 100 * moved.median().item())


def ranks_as_words(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def times(scale):
    return f"1/{1 / scale:.4g} of" if scale < 1 else f"{scale:.4g} times"


def unfinished_as_words(layout):
    """Return what is missing, if nothing later does it."""
    if "all" in layout:
        dim = layout["all"].removeprefix("order ")
        return f"the right numbers in another order along dimension {dim}"
    axes = " and ".join(axis for axis, how in layout.items() if how in ("sum", "mean"))
    if "mean" in layout.values():
        return f"each rank has the gradient of its own batch: average it over the {axes} ranks"
    return f"the sum over the {axes} ranks is right: an all-reduce is missing"


class Comparison:
    """`results`, one for each tensor of the one device, and `origin`: a Result, or None."""

    def __init__(self, load, axes):
        self.load = load  # function that opens the files of the one device, the ranks and the noise
        self.axes = axes
        self.places = list(itertools.product(*map(range, axes.values())))  # of ranks on the grid
        self.starts = {}  # {name of a parameter: its layout}
        self.values = {}  # {name of a parameter: key of its last value}
        self.loose = {}  # {name of a parameter: where its gradient has been only rounding}
        self.factors = {}  # {step: Result that says by what the activations' gradients are scaled}
        self.flips = []  # tensors of which rounding changes a few rows altogether
        self.results = []
        self.open_files()
        self.kinds = {kind for page in self.ranks for _, kind, _ in page["tensors"]}
        tensors = self.one["tensors"].items()
        epsilons = [
            torch.finfo(calls[0].dtype).eps for key, calls in tensors if key[1] == "forward"
        ]
        self.coarsest = max(epsilons, default=0.0)
        for key in self.keys():
            self.results.append(self.result_of(key))
            self.unread -= sum(tensor.nbytes for tensor in self.one["tensors"][key])
            if self.unread < 0:
                self.open_files()
        self.by_key = {result.key: result for result in self.results}
        self.origin = self.find_origin()

    def open_files(self):
        """Open them anew: what has been read of a file takes memory until it is closed."""
        (self.one,), self.ranks, self.noises = self.load()
        self.unread = 2**27  # bytes of one device

    def keys(self):
        """Return the keys in order of execution: gradients of the last parameters come first."""
        numbers = {key: number for number, key in enumerate(self.one["tensors"])}
        signs = {"gradient": -1}

        def place(key):
            return key[0], KINDS.index(key[1]), signs.get(key[1], 1) * numbers[key]

        return sorted(numbers, key=place)

    def result_of(self, key):
        """Compare one tensor, or all that a module gave in a step, with what the ranks have."""
        step, kind, name = key
        result = Result(step, kind, name)
        found = [page["tensors"].get(key) for page in self.ranks]
        parts = {place: calls for place, calls in zip(self.places, found, strict=True) if calls}
        pairs = []  # the worst (Problem, Fit) for each way to pair calls
        for problems in self.problems(key, parts) if parts else ():
            fits = [problem.best_fit() for problem in problems]
            if None not in fits:
                worst = max(range(len(fits)), key=lambda index: fits[index].error)
                pairs.append((problems[worst], fits[worst]))
        if pairs:
            self.judge(result, *min(pairs, key=lambda pair: pair[1].error))
        # Sharded optimizers have no .grad at all.
        is_lost = kind == "gradient" and not parts and kind in self.kinds
        if is_lost and self.one["tensors"][key][0].any():
            result.state = "wrong"
            result.note = "no rank has a gradient"
        if kind in ("start", "value"):
            self.values[name] = key
        return result

    def problems(self, key, parts):
        """Yield the ways to pair calls: one by one, or all together, which are micro-batches."""
        one = self.one["tensors"][key]
        noises = [page["tensors"].get(key, ()) for page in self.noises]
        noises = [calls for calls in noises if len(calls) == len(one)]
        counts = {len(calls) for calls in (one, *parts.values())}
        if len(counts) == 1:
            problems = []
            for call, whole in enumerate(one):
                of_call = {place: calls[call] for place, calls in parts.items()}
                of_noise = [calls[call] for calls in noises]
                problems.append(self.problem(key, whole, of_call, of_noise, self.axes))
            yield problems
        if counts == {1} or len({tensor.shape[1:] for tensor in one}) > 1:
            return
        all_calls = {}  # {(*place, number of the call): tensor}
        for place, calls in parts.items():
            all_calls |= {(*place, call): tensor for call, tensor in enumerate(calls)}
        axes = self.axes | {MICRO: max(map(len, parts.values()))}
        for join in (torch.cat,) if one[0].dim() else (sum, mean):
            yield [self.problem(key, join(one), all_calls, list(map(join, noises)), axes)]

    def problem(self, key, whole, parts, noises, axes):
        step, kind, name = key
        before = self.values.get(name) if kind == "value" else None
        before = before and self.one["tensors"][before][0].double()
        eps = max(torch.finfo(t.dtype).eps for t in (whole, *parts.values()))
        whole, *noises = (tensor.double() for tensor in (whole, *noises))
        finite = whole.masked_fill(whole.isinf(), 0.0)
        size = norm(finite) if before is None else norm(whole - before)
        unit = self.noise_of(key, whole, noises) + eps * size * (kind != "start")
        if kind in ("start", "value") and whole.numel():
            unit += eps * finite.abs().max().item()  # one number may be rounded otherwise
        if whole.numel() < FEW:
            unit += self.coarsest * size / 8
        if before is not None:
            unit += self.loose_part(step, name, whole - before)
        factor = self.factors.get(step) if kind == "backward" else None
        scale = factor.scale if factor and whole.numel() > 1 else None
        rows = as_rows(whole, parts.values())
        parts = {place: as_rows(tensor.double(), [rows]) for place, tensor in parts.items()}
        is_permuted = "all" in self.starts.get(name, {})
        may_be = whole.dim() > 0 and (kind in ("start", "forward", "backward") or is_permuted)
        return Problem(kind, rows, parts, axes, unit or 1e-300, size, scale, may_be)

    def noise_of(self, key, whole, noises):
        """Return how far the noise runs have moved a tensor."""
        moved = [noise for noise in noises if noise.shape == whole.shape]
        distances = [difference(noise, whole) for noise in moved]
        if key[1] == "forward":
            is_lost = len(moved) < len(noises)
            if is_lost or any(is_flip(distance, whole) for distance in distances):
                self.flips.append(key)
        return max(map(norm, distances), default=0.0)

    def loose_part(self, step, name, update):
        """Return the size of the update where the gradient is nothing but rounding.

        Adam takes a whole step in the direction of its sign. It does so in later steps, too.
        """
        key = (step, "gradient", name)
        if key not in self.one["tensors"]:
            return 0.0
        gradient, *noises = (page["tensors"][key][0].double() for page in [self.one, *self.noises])
        noise = self.noise_of(key, gradient, noises) + self.coarsest / 8 * norm(gradient)
        is_loose = gradient.abs() <= 2 * noise / math.sqrt(gradient.numel())
        self.loose[name] = is_loose | self.loose.get(name, False)
        return 2 * norm(update[self.loose[name]]) / LIMIT  # a wrong sign is twice the update

    def judge(self, result, problem, fit):
        """Say what state the tensor is in, and why if it is wrong."""
        ways = set(fit.layout.values())
        if result.kind == "start":
            self.starts[result.name] = fit.layout
        result.layout = ", ".join(f"{axis} {how}" for axis, how in fit.layout.items())
        result.error = fit.error
        result.scale = fit.scale
        result.share = fit.error * problem.unit / problem.size if problem.size else math.inf
        is_wrong = fit.error > LIMIT or (result.kind == "gradient" and fit.scale != 1.0)
        relative = 1.0  # as the experts' gradients may not be, until they are averaged
        if result.kind == "backward" and problem.whole.numel() > 1 and not is_wrong:
            relative = fit.scale / self.factors.setdefault(result.step, result).scale
            is_wrong = problem.exact(fit.scale * 1.01) != fit.scale
        is_added = "all" in fit.layout or {"sum", "mean"} & ways
        if {"cat 0", "order 0"} <= ways and result.kind not in OF_PARAMETERS:
            is_added = False  # samples or tokens, of which each rank has others
        if is_wrong:
            result.state = "wrong"
            result.note = self.diagnosis(result, problem, fit)
        elif relative != 1.0:
            result.state = "scaled"
            result.note = self.scale_as_words(relative)
        elif is_added and (problem.whole.numel() > 1 or "sum" in ways):
            result.state = "unfinished"
            result.note = unfinished_as_words(fit.layout)
        else:
            result.state = "right"

    def diagnosis(self, result, problem, fit):
        """Return in words how the tensor is wrong, with the evidence."""
        factor = problem.factor or 1.0
        if bad := [place for place, tensor in problem.parts.items() if tensor.isnan().any()]:
            return f"NaN on {self.ranks_at(bad)}"
        if problem.whole.isfinite().all() and not fit.tensor.isfinite().all():
            return "infinite numbers"
        if fit.error <= LIMIT:
            return self.scale_as_words(fit.scale / factor)
        right = []
        for place, tensor in problem.parts.items():
            is_whole = tensor.shape == problem.whole.shape
            if is_whole and problem.fit({}, tensor, 0.0, factor).error <= LIMIT:
                right.append(place)
        if right:
            return f"right on {self.ranks_at(right)} only"
        of = "update" if result.kind == "value" else "size"
        return f"wrong by {result.share:.2g} of its {of}"

    def ranks_at(self, places):
        """`places` may have the number of a micro-batch as well."""
        ranks = {self.places.index(place[: len(self.axes)]) for place in places}
        return ranks_as_words(sorted(ranks))

    def scale_as_words(self, scale):
        words = f"{times(scale)} the right one"
        for axis, size in self.axes.items():
            if scale == size > 1:
                return f"{words}: not divided by the {size} {axis} ranks"
            if scale * size == 1 < size:
                return f"{words}: divided by the {size} {axis} ranks once too often"
        return words

    def find_origin(self):
        """Return the first result that is wrong, or what it follows from and was not finished."""
        late = self.left_out()
        for result in self.results:
            if late and result.step >= late.step:
                return late
            is_scaled = result.state == "scaled" and not self.is_put_right(result)
            if result.state == "wrong" or is_scaled:
                result.state = "wrong"
                origin = self.loss_before(result) or result
                while earlier := self.unfinished_before(origin):
                    origin = earlier
                return origin
        return None

    def left_out(self):
        """Return a Result for the first step in which some ranks take no step; or None.

        Such a rank seems to call its modules twice: a step ends when the optimizer has stepped.
        """
        lasts = [max(step for step, _, _ in page["tensors"]) for page in (self.one, *self.ranks)]
        late = [rank for rank, last in enumerate(lasts[1:]) if last < lasts[0]]
        for key in self.keys() if late else ():
            counts = {len(page["tensors"][key]) for page in self.ranks if key in page["tensors"]}
            if key[1] == "forward" and len(counts) > 1:
                name = next(iter(self.starts))
                note = f"{ranks_as_words(late)} took no step of the optimizer"
                return Result(key[0], "value", name, "", note, "wrong")
        return None

    def of(self, step, kind, names):
        found = [self.by_key.get((step, kind, name)) for name in names]
        return [result for result in found if result]

    def is_put_right(self, scaled):
        """Return whether backward goes on with gradients of the right scale."""
        names = self.one["parents"].get((scaled.step, scaled.name), ())
        for result in self.of(scaled.step, "backward", names):
            if result.state == "right" or (result.state == "scaled" and self.is_put_right(result)):
                return True
        return False

    def unfinished_before(self, result):
        """Return an unfinished result from which this one was computed, or None."""
        step, kind, name = result.key
        parents = self.one["parents"]
        children = [n for (s, n), names in parents.items() if s == step and name in names]
        owner = name.rpartition(".")[0]
        sources = {
            "start": [],
            "forward": self.of(step, kind, parents.get((step, name), ())),
            "backward": self.of(step, kind, children),
            "gradient": self.of(step, "backward", [owner]),
            "value": self.of(step, "gradient", [name]),
        }
        found = [each for each in sources[kind] if each.key != result.key]
        if kind == "gradient" and result.state == "unfinished":
            # Each rank's part of a sum is right, unless its own source was to be added up.
            found = [each for each in found if each.layout == result.layout]
        return next((each for each in found if each.state == "unfinished"), None)

    def loss_before(self, result):
        """Return a Result for the loss, if it scales all gradients and what they come from."""
        factor = self.factors.get(result.step)
        if result.kind != "gradient" or factor is None or result.error > LIMIT:
            return None
        of_step = [each for each in self.results if each.step == result.step]
        gradients = [each for each in of_step if each.kind == "gradient"]
        scaled = [each for each in gradients if each.scale == result.scale]
        # If each rank has the mean over its part of the batch, gradients are scaled so.
        expected = [1.0]
        for axis, size in self.axes.items():
            expected += [each * size for each in expected if f"{axis} " in factor.layout]
        # A few gradients are zero but for rounding, and so are right with every scale.
        if len(scaled) < 0.8 * len(gradients) or factor.scale in expected:
            return None
        name = [each.name for each in of_step if each.kind == "forward"][-1]
        words = f"{times(result.scale)} the right ones"
        note = f"all gradients are {words}, from the loss on: divide it by {result.scale:.4g}"
        return Result(result.step, "backward", name, factor.layout, note, "wrong")


def compare(one, many, grid=None, noise=(), rename=None):
    """Compare the recordings in the directories `one` and `many`. Return a Comparison.

    `grid`: {axis: number of ranks} or "dp=2,tp=2"; neighbouring ranks differ in the last axis.
    `noise`: directories of runs on one device with record(noise=…). `rename`: {old: new}.
    """
    noise = [noise] if isinstance(noise, str | Path) else noise

    def load():
        noises = [page for directory in noise for page in pages_of(directory, rename)]
        return pages_of(one, rename), pages_of(many, rename), noises

    axes = axes_of(grid) or {"ranks": len(pages_of(many, rename))}
    check_recordings(*load(), axes)
    comparison = Comparison(load, axes)
    check_is_alive(comparison)
    check_is_comparable(comparison)
    check_is_explained(comparison)
    return comparison


def pages_of(directory, rename):
    """Return the recording of each rank. Their tensors stay in the files until they are read."""
    pages = []
    for path in sorted(Path(directory).glob("rank*.pt"), key=lambda path: int(path.stem[4:])):
        page = torch.load(path, mmap=True, weights_only=True)
        tensors = {}
        for (step, kind, name), calls in page["tensors"].items():
            tensors[step, kind, renamed(name, rename)] = calls
        parents = {}
        for (step, name), names in page["parents"].items():
            parents[step, renamed(name, rename)] = [renamed(each, rename) for each in names]
        pages.append(page | {"tensors": tensors, "parents": parents})
    return pages


def axes_of(grid):
    """Return {axis: number of ranks} of a grid such as "dp=2,tp=2"."""
    if isinstance(grid, str):
        grid = dict(word.split("=") for word in grid.replace(" ", "").split(","))
    return {axis: int(size) for axis, size in (grid or {}).items()}


# --------------------------------------------------------------------------------------------------
# 6. The library: refusals.


def check_recordings(ones, ranks, noises, axes):
    if not ones or not ranks:
        raise CannotCompare("there is no file rank0.pt: give the directories of record()")
    if len(ones) > 1:
        raise CannotCompare(f"ONE has {len(ones)} ranks: record the run on one device, on one rank")
    if math.prod(axes.values()) != len(ranks):
        raise CannotCompare(f"the grid {axes} is not of {len(ranks)} ranks, which MANY has")
    for page in noises:
        check_noise(ones[0]["tensors"], page["tensors"])


def check_noise(one, noise):
    """Raise unless the noise run does what the other one does, but for rounding."""
    shares = []
    for key, calls in one.items():
        if key[:2] == (0, "forward") and key in noise and calls[0].shape == noise[key][0].shape:
            whole = calls[0].double()
            moved = norm(difference(noise[key][0].double(), whole))
            shares.append(moved / (norm(whole) or 1.0))
    if not any(shares):
        raise CannotCompare("the noise run has changed nothing: record it with noise=1")
    middle = sorted(shares)[len(shares) // 2]
    if middle > 0.1:
        raise CannotCompare(
            f"the noise run differs by {middle:.2g}, which is more than rounding: it must have the "
            "start, the batches and the seeds of the run on one device, and a dropout of 0"
        )


def check_is_alive(comparison):
    """Two runs that compute nothing agree, and say nothing."""
    one = comparison.one["tensors"]
    for key, calls in one.items():
        if any(tensor.isnan().any() for tensor in calls):
            raise CannotCompare(f"the run on one device has NaN: {key}")
    if not any(calls[0].any() for key, calls in one.items() if key[1] == "gradient"):
        raise CannotCompare("on one device there are no gradients, or all are zero")
    starts = {key[2]: calls[0] for key, calls in one.items() if key[1] == "start"}
    values = {key[2]: calls[0] for key, calls in one.items() if key[1] == "value"}
    if all(torch.equal(starts[name], values[name]) for name in starts.keys() & values.keys()):
        raise CannotCompare("on one device no parameter changes: record a step of the optimizer")


def check_is_comparable(comparison):
    """A few tensors have no counterpart, such as those of containers. Many are a mistake."""
    results = comparison.results
    # Sharded optimizers have no .grad, and reentrant checkpoints no gradients of activations.
    kinds = {each.kind for each in results if each.state != "missing"} - {"backward"}
    if comparison.origin:  # what follows a mistake may have other shapes
        results = [each for each in results if each.step < max(1, comparison.origin.step)]
    if comparison.origin in results:
        results = results[: results.index(comparison.origin)]
    wanted = [each for each in results if each.kind in kinds]
    missing = [f"step {e.step} {e.kind} {e.name}" for e in wanted if e.state == "missing"]
    if not {"start", "value"} <= kinds or len(missing) > max(1, 0.05 * len(wanted)):
        raise CannotCompare(
            f"{len(missing)} of {len(wanted)} tensors of the one device have no counterpart in the "
            f"other run by name and shape, such as {missing[:3]}; use rename, state= or grid"
        )


def check_is_explained(comparison):
    """A difference that the runs must have, or may have, is not a mistake."""
    origin = comparison.origin
    if origin is None:
        return
    where = f"step {origin.step} {origin.kind} {origin.name}: {origin.note}"
    random = sorted({part for page in comparison.ranks for part in page["random"]})
    if random:
        raise CannotCompare(
            f"ranks draw other numbers, or drop other tokens, than one device. Set dropout to 0, "
            f"and a capacity to None: {random[:3]}. The first difference: {where}"
        )
    if not comparison.noises:
        raise CannotCompare(
            f"without --noise it is not known whether a difference is rounding. Record the run on "
            f"one device once more, with noise=1. The first difference is in {where}"
        )
    if flips := [key for key in comparison.flips if key[0] <= origin.step]:
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
    origin = comparison.origin
    if origin is None:
        return [*lines, "AGREE."]
    lines.append("DIFFER. The origin, and what follows:")
    lines.append("> " + line_of(origin, comparison.one["classes"]))
    wrong = [each for each in results if each.state == "wrong" and each.key != origin.key]
    lines += ["  " + line_of(each, comparison.one["classes"]) for each in wrong[:followers]]
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

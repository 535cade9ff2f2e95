"""An implementation of --checkpoint is a class with two functions, called on all ranks of the mesh:

    save(directory, model, optimizer, extra, mesh)
    load(directory, model, optimizer, mesh) -> extra

`directory` is shared, and later saves go into it, too. The mesh that loads may be another one. The
model then has other values, and the optimizer, AdamW over model.parameters(), has a state. `extra`
is a dictionary: the state of a scheduler, of a generator, and the position in the data. load()
fills the model and the optimizer from the latest save. The default group is that of the mesh.
"""

import math
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import cache

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.lr_scheduler import MultiStepLR

import checkpoint
from claims.meshes import MODEL, build, in_whole, make_mesh, place_along, shard, whole_tensors
from claims.registry import add_kind, check, claim, default_group, same, say


class Checkpoint:
    """Ours: checkpoint.py's, with a Piece for each tensor of the model and of AdamW."""

    @staticmethod
    def save(directory, model, optimizer, extra, mesh):
        options = [without_params(group) for group in optimizer.param_groups]
        pieces = pieces_of(model, optimizer, mesh)
        checkpoint.save(directory, pieces, {"options": options, "extra": extra})

    @staticmethod
    def load(directory, model, optimizer, mesh):
        found = checkpoint.load(directory, pieces_of(model, optimizer, mesh))
        for group, saved in zip(optimizer.param_groups, found["options"], strict=True):
            group.update(saved)
        return found["extra"]


def without_params(group):
    return {name: value for name, value in group.items() if name != "params"}


def pieces_of(model, optimizer, mesh):
    pieces = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        offset = [0] * parameter.dim()
        for along, dim in parameter.split.items():
            place, size = place_along(mesh, along)
            rows = math.ceil(parameter.whole[dim] / size)
            offset[dim] = min(rows * place, parameter.whole[dim])
        tensors = {"weight": parameter.detach(), **optimizer.state[parameter]}
        for kind, tensor in tensors.items():
            piece = checkpoint.Piece(tensor, list(parameter.whole), offset)
            is_scalar = tensor.dim() == 0  # the step
            pieces[f"{kind}/{in_whole(model, name)}"] = tensor if is_scalar else piece
    return pieces


def functions_of(implementation):
    return implementation


add_kind(
    "checkpoint",
    called=__doc__ + MODEL,
    make=functions_of,
    ours="claims.checkpoint:Checkpoint",
    pytorchs="pytorchs:Checkpoint",
)


@contextmanager
def shared_directory():
    """The same on all ranks, and removed at the end."""
    paths = [tempfile.mkdtemp() if pool.rank() == 0 else None]
    dist.broadcast_object_list(paths, group=pool.group(), group_src=0)
    try:
        yield paths[0]
        dist.barrier(pool.group())
    finally:
        if pool.rank() == 0:
            shutil.rmtree(paths[0], ignore_errors=True)


class Run:
    """A model in training, on a mesh or, without one, whole on one device."""

    def __init__(self, seed, mesh=None, tied=False):
        whole = whole_tensors(seed, tied)
        self.mesh = mesh
        self.tied = tied
        if mesh:
            self.model = build(mesh, whole, tied)
            named = self.model.named_parameters()
            self.parameters = {in_whole(self.model, name): p for name, p in named}
        else:
            whole = {name: tensor for name, tensor in whole.items() if not tied or name != "head"}
            self.parameters = {name: nn.Parameter(tensor) for name, tensor in whole.items()}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.01)
        self.scheduler = MultiStepLR(self.optimizer, [2, 4], gamma=0.5)

    def steps(self, *numbers):
        for number in numbers:
            gradients = whole_tensors(10 + number, self.tied)
            for name, parameter in self.parameters.items():
                gradient = gradients[name]
                if self.mesh:
                    gradient = shard(gradient, parameter.split, self.mesh)
                parameter.grad = gradient
            self.optimizer.step()
            self.scheduler.step()

    def compare(self, plain, when):
        for name, parameter in self.parameters.items():
            like = plain.parameters["embedding" if self.tied and name == "head" else name]
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                found = self.optimizer.state[parameter][kind]
                expected = plain.optimizer.state[like][kind]
                if kind != "step":
                    expected = shard(expected, parameter.split, self.mesh)
                same(found, expected, f"{kind} of {name} {when}")
            same(parameter, shard(like, parameter.split, self.mesh), f"{name} {when}")
        rates = [side.optimizer.param_groups[0]["lr"] for side in (self, plain)]
        check(rates[0] == rates[1], f"the learning rate is {rates[0]}, not {rates[1]} {when}")


@contextmanager
def ranks_of(sizes):
    """Yield the mesh on its ranks, which are the default group inside. Yield None on others."""
    number = math.prod(sizes.values())
    group = pool.group()
    if number < pool.world_size():
        group = dist.new_group(range(number))
    if pool.rank() >= number:
        yield None
    else:
        with default_group(group):
            yield make_mesh(**sizes)
    dist.barrier(pool.group())


def goes_on(make, before, after, tied=False):
    """Two steps on one mesh, a save and a load, and two steps on the other."""
    functions = make()
    plain = Run(1, tied=tied)
    plain.steps(0, 1)
    with shared_directory() as directory:
        with ranks_of(before) as mesh:
            if mesh:
                run = Run(1, mesh, tied)
                run.steps(0, 1)
                extra = {"scheduler": run.scheduler.state_dict()}
                functions.save(directory, run.model, run.optimizer, extra, mesh)
        with ranks_of(after) as mesh:
            if mesh:
                run = Run(2, mesh, tied)
                run.steps(5)  # creates the state
                extra = functions.load(directory, run.model, run.optimizer, mesh)
                run.scheduler.load_state_dict(extra["scheduler"])
                run.compare(plain, "after the load")
                run.steps(2, 3)
                plain.steps(2, 3)
                run.compare(plain, "two steps after the load")


def moves(name, sentence, before, after, **how):
    say(name, sentence, [4], "checkpoint", goes_on, before=before, after=after, **how)


moves("tensor_ranks", "Saved on 2 tensor-parallel ranks, loaded on 4.", {"tp": 2}, {"tp": 4})
moves("fewer_tensor_ranks", "Saved on 4, loaded on 3, with unequal shards.", {"tp": 4}, {"tp": 3})
moves("shards", "Saved on 4 ranks of FSDP, loaded on 3, some with none.", {"fsdp": 4}, {"fsdp": 3})
moves("replicas", "Saved on 4 replicas, loaded on 2.", {"dp": 4}, {"dp": 2})
moves("stages", "Saved on 2 stages, loaded on 4: each has its own layers.", {"pp": 2}, {"pp": 4})
moves("fewer_stages", "Saved on 4 stages, loaded on 3.", {"pp": 4}, {"pp": 3})
moves("experts", "Experts on two stages, loaded without.", {"pp": 2, "ep": 2}, {"ep": 4})
moves(
    "grids",
    "Saved on stages × tensor-parallel ranks, loaded on FSDP's × tensor-parallel ones.",
    {"pp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2},
)
moves("one_rank", "Saved on a grid, loaded on one rank.", {"fsdp": 2, "tp": 2}, {"tp": 1})
moves(
    "tied",
    "A tied parameter of one rank is on the first and on the last of three stages.",
    {"pp": 1},
    {"pp": 3},
    tied=True,
)
moves(
    "tied_stages",
    "A tied parameter of two stages is one parameter on one rank.",
    {"pp": 2},
    {"pp": 1},
    tied=True,
)


@claim("checkpoint", 2)
def extra(make):
    """Scheduler, generator and position come back with their types: integer keys, tuples."""
    functions = make()
    with shared_directory() as directory:
        mesh = make_mesh(fsdp=2)
        run = Run(1, mesh)
        run.steps(0)
        saved = {
            "generator": torch.get_rng_state(),
            "position": {"epoch": 3, "shards": {0: 7, 1: (2, 5)}, "name": "data"},
            "scheduler": {"milestones": {2: 1, 4: 1}, "last_epoch": 1},
        }
        functions.save(directory, run.model, run.optimizer, saved, mesh)
        expected = torch.rand(3)
        found = functions.load(directory, run.model, run.optimizer, mesh)
        for name in ("position", "scheduler"):
            check(found[name] == saved[name], f"{name} is {found[name]}, not {saved[name]}")
        torch.set_rng_state(found["generator"])
        same(torch.rand(3), expected, "random numbers after the load", exact=True)


@claim("checkpoint", 2)
def latest(make):
    """Of three saves the last one is loaded."""
    functions = make()
    with shared_directory() as directory:
        mesh = make_mesh(fsdp=2)
        run = Run(1, mesh)
        for number in range(3):
            run.steps(number)
            functions.save(directory, run.model, run.optimizer, {"step": number}, mesh)
        plain = Run(1)
        plain.steps(0, 1, 2)
        run.steps(3)
        found = functions.load(directory, run.model, run.optimizer, mesh)
        check(found["step"] == 2, f"the save of step {found['step']} is loaded, not of step 2")
        run.scheduler = plain.scheduler
        run.compare(plain, "after the load")


@claim("checkpoint", 2, about="property")
def another_model(make):
    """To load a model with another shape is an error."""
    functions = make()
    with shared_directory() as directory:
        mesh = make_mesh(dp=2)
        run = Run(1, mesh)
        run.steps(0)
        functions.save(directory, run.model, run.optimizer, {}, mesh)
        norm = run.model.layers[0].norm
        state = run.optimizer.state[norm]
        for tensor in (norm, state["exp_avg"], state["exp_avg_sq"]):
            tensor.data = torch.zeros(7, dtype=norm.dtype)
        norm.whole = norm.shape
        _, error = result_or_error(functions.load, directory, run.model, run.optimizer, mesh)
        check(error, "a norm of 6 elements loads into one of 7")


def result_or_error(function, *args):
    try:
        return function(*args), None
    except (KeyboardInterrupt, SystemExit, NotImplementedError):
        raise
    except BaseException as error:  # DCP's CheckpointException is no Exception
        return None, error


class Killed(BaseException):
    pass


class Files:
    """Raises Killed in the operation on files in `directory` that is number `last`, and later."""

    def __init__(self):
        self.directory = None  # nothing is watched
        sys.addaudithook(self.see)  # for the life of the process

    @contextmanager
    def killed_at(self, directory, last):
        self.left = last
        self.directory = directory
        try:
            yield
        finally:
            self.directory = None

    def see(self, event, args):
        if self.directory is None or not event.startswith(("open", "os.", "shutil.")):
            return
        paths = [os.fspath(arg) for arg in args if isinstance(arg, (str, os.PathLike))]
        if not any(str(path).startswith(self.directory) for path in paths):
            return
        self.left -= 1
        if self.left == 0 and event == "open" and "w" in str(args[1]):
            directory, self.directory = self.directory, None
            open(paths[0], "wb").close()  # it was killed before it wrote
            self.directory = directory
        if self.left <= 0:
            raise Killed


the_files = cache(Files)


def saves_until_killed(functions, run, directory, mesh, last):
    """Return whether the save was killed in operation number `last`."""
    files = the_files()
    try:
        with files.killed_at(directory, last):
            functions.save(directory, run.model, run.optimizer, {"step": 1}, mesh)
    except BaseException:
        if files.left > 0:
            raise
        return True
    return False


@claim("checkpoint", 1)
def killed(make):
    """A save that is killed at any moment leaves the previous one, or is complete."""
    functions = make()
    mesh = make_mesh(fsdp=1)
    plain = [Run(1), Run(1)]
    plain[0].steps(0)
    plain[1].steps(0, 1)
    last = 0
    was_killed = True
    while was_killed:
        last += 1
        with shared_directory() as directory:
            run = Run(1, mesh)
            run.steps(0)
            functions.save(directory, run.model, run.optimizer, {"step": 0}, mesh)
            run.steps(1)
            was_killed = saves_until_killed(functions, run, directory, mesh, last)
            args = (directory, run.model, run.optimizer, mesh)
            found, error = result_or_error(functions.load, *args)
            if error:
                check(False, f"killed in operation {last} on files, nothing loads: {error}")
                return
            run.compare(plain[found["step"]], f"after a save killed in operation {last}")
    check(last > 1, "the save does not open a file")

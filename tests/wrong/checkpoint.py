"""Mistakes in checkpoints, and the claim that catches each."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from claims.checkpoint import pieces_of
from claims.meshes import LAYERS, in_whole, place_along

from wrong.common import changed


class Plain:
    """Gathers all pieces. Rank 0 writes one file, and renames it."""

    name_of = staticmethod(in_whole)
    kinds = ("weight", "exp_avg", "exp_avg_sq", "step")
    is_atomic = True
    keeps_options = True
    keeps_copies = True  # of a tied parameter, under both names
    checks = True

    @classmethod
    def pieces(cls, model, optimizer, mesh):
        whole = {in_whole(model, name): cls.name_of(model, name) for name, _ in named(model)}
        kept = {cls.name_of(model, name) for name, _ in model.named_parameters()}
        found = {}
        for key, piece in pieces_of(model, optimizer, mesh).items():
            kind, _, name = key.partition("/")
            if kind in cls.kinds and (cls.keeps_copies or whole[name] in kept):
                found[f"{kind}/{whole[name]}"] = piece
        return found

    @classmethod
    def save(cls, directory, model, optimizer, extra, mesh):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, cls.pieces(model, optimizer, mesh))
        wholes = {}
        for pieces in everyone:
            for name, piece in pieces.items():
                wholes.setdefault(name, torch.empty(cls.shape(piece), dtype=torch.float64))
                cls.part(wholes[name], piece).copy_(cls.tensor(piece))
        rate = optimizer.param_groups[0]["lr"]
        if dist.get_rank() == 0:
            path = Path(directory, "tmp" if cls.is_atomic else "state")
            with open(path, "wb") as file:
                torch.save((wholes, rate, cls.pack(extra)), file)
            if cls.is_atomic:
                os.replace(path, Path(directory, "state"))
        dist.barrier()

    @classmethod
    def load(cls, directory, model, optimizer, mesh):
        wholes, rate, extra = torch.load(Path(directory, "state"))
        for name, piece in cls.pieces(model, optimizer, mesh).items():
            if name in wholes and cls.checks:
                assert wholes[name].shape == cls.shape(piece), f"another shape of {name}"
            if name in wholes and wholes[name].shape == cls.shape(piece):
                cls.tensor(piece).copy_(cls.part(wholes[name], piece))
        if cls.keeps_options:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return cls.unpack(extra)

    @staticmethod
    def shape(piece):
        return torch.Size(piece.shape)

    @staticmethod
    def tensor(piece):
        return piece if isinstance(piece, torch.Tensor) else piece.tensor

    @classmethod
    def part(cls, whole, piece):
        offset = getattr(piece, "offset", [])
        for dim, first in enumerate(offset):
            whole = whole.narrow(dim, first, piece.tensor.shape[dim])
        return whole

    @staticmethod
    def pack(extra):
        return extra

    unpack = pack


def named(model):
    return model.named_parameters(remove_duplicate=False)


def own_name(model, name):
    """A stage's first layer is number 0."""
    return name


def without_generator(extra):
    """JSON makes strings of integer keys, and lists of tuples."""
    tensors = {name: value for name, value in extra.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in extra.items() if name not in tensors}
    return tensors, json.dumps(others)


def from_json(packed):
    tensors, text = packed
    return {**tensors, **json.loads(text)}


class EqualStages(Plain):
    """Takes all stages for equally large, as those of the mesh that saved."""

    @classmethod
    def pieces(cls, model, optimizer, mesh):
        stage, stages = place_along(mesh, "pp")

        def name_of(model, name):
            first, _, rest = name.partition(".")
            if first != "layers":
                return name
            number, _, rest = rest.partition(".")
            return f"layers.{int(number) + LAYERS // stages * stage}.{rest}"

        made = changed(cls, name_of=staticmethod(name_of))
        return super(EqualStages, made).pieces(model, optimizer, mesh)


class MovesPieces(Plain):
    """Changes where the pieces lie."""

    @classmethod
    def pieces(cls, model, optimizer, mesh):
        found = super().pieces(model, optimizer, mesh)
        for name, parameter in named(model):
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                piece = found[f"{kind}/{in_whole(model, name)}"]
                offset = cls.moved(piece.offset, parameter, mesh)
                found[f"{kind}/{in_whole(model, name)}"] = piece._replace(offset=offset)
        return found


class EqualRows(MovesPieces):
    @staticmethod
    def moved(offset, parameter, mesh):
        offset = list(offset)
        for along, dim in parameter.split.items():
            place, size = place_along(mesh, along)
            offset[dim] = parameter.whole[dim] // size * place
        return offset


class OneCut(MovesPieces):
    """A parameter that two dimensions of the mesh cut is taken for one that the first one cuts."""

    @staticmethod
    def moved(offset, parameter, mesh):
        first = [*parameter.split.values()][:1]
        return [place if dim in first else 0 for dim, place in enumerate(offset)]


class OwnExperts(MovesPieces):
    """Each rank's first expert is number 0."""

    @staticmethod
    def moved(offset, parameter, mesh):
        experts = parameter.split.get("ep")
        return [0 if dim == experts else place for dim, place in enumerate(offset)]


class SavesTheHead(Plain):
    """Several stages save a tied parameter as the head. One rank looks for the embedding."""

    keeps_copies = False

    @classmethod
    def pieces(cls, model, optimizer, mesh):
        found = super().pieces(model, optimizer, mesh)
        is_left_out = model.is_tied and place_along(mesh, "pp")[1] > 1
        return {
            name: piece
            for name, piece in found.items()
            if not (is_left_out and name.endswith("/embedding"))
        }


class KeepsTheFirst(Plain):
    """A file that is there is not written again."""

    @classmethod
    def save(cls, directory, *args):
        if not Path(directory, "state").exists():
            super().save(directory, *args)


class OnlyRankZero(Plain):
    """Saves the shards of one rank."""

    ranks = 2  # which save

    @classmethod
    def pieces(cls, model, optimizer, mesh):
        found = super().pieces(model, optimizer, mesh)
        is_saving = dist.get_world_size() == cls.ranks
        return found if dist.get_rank() == 0 or not is_saving else {}


OnlyRankZeroOfFour = changed(OnlyRankZero, ranks=4)
OwnNames = changed(Plain, name_of=staticmethod(own_name))
ForgetsMoments = changed(Plain, kinds=("weight",))
ForgetsSteps = changed(Plain, kinds=("weight", "exp_avg", "exp_avg_sq"))
InPlace = changed(Plain, is_atomic=False)
ForgetsOptions = changed(Plain, keeps_options=False)
OneNameOfTied = changed(Plain, keeps_copies=False)
SkipsOtherShapes = changed(Plain, checks=False)
AsJson = changed(Plain, pack=staticmethod(without_generator), unpack=staticmethod(from_json))

MISTAKES = {
    "checkpoint": {
        "OwnNames": "fewer_stages",
        "EqualStages": "stages",
        "EqualRows": "fewer_tensor_ranks",
        "OneCut": "grids",
        "OwnExperts": "experts",
        "OnlyRankZeroOfFour": "one_rank",
        "SavesTheHead": "tied_stages",
        "ForgetsMoments": "tensor_ranks",
        "ForgetsSteps": "replicas",
        "ForgetsOptions": "shards",
        "OneNameOfTied": "tied",
        "OnlyRankZero": "tensor_ranks",
        "KeepsTheFirst": "latest",
        "AsJson": "extra",
        "InPlace": "killed",
        "SkipsOtherShapes": "another_model",
    },
}
RIGHT = {"checkpoint": {"Plain": []}}

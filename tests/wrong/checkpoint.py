"""Mistakes in checkpoints, and the claim that catches each."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from claims.checkpoint import pieces_of
from claims.meshes import in_whole

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


class KeepsTheFirst(Plain):
    """A file that is there is not written again."""

    @classmethod
    def save(cls, directory, *args):
        if not Path(directory, "state").exists():
            super().save(directory, *args)


class OnlyRankZero(Plain):
    """Saves the shards of one rank."""

    @classmethod
    def pieces(cls, model, optimizer, mesh):
        found = super().pieces(model, optimizer, mesh)
        is_saving = dist.get_world_size() == 2
        return found if dist.get_rank() == 0 or not is_saving else {}


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

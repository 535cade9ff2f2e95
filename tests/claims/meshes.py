"""A model that is split over a mesh, for claims about what lies between the classes.

MODEL says what an implementation gets to know about it.
"""

import environment
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import randn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from claims.registry import precision

MODEL = """
`mesh` is a DeviceMesh of some of the dimensions "dp", "fsdp", "pp", "ep" and "tp". `model` is
this rank's stage: it has `layers`, of which the first is number `model.first` of the whole model;
the first stage has `embedding`, and the last has `head`. Its parameters are this rank's shards,
and they have three attributes:

    whole    the shape of the whole parameter
    split    {a dimension of the mesh: the dimension of the tensor that it cuts by torch.chunk}
    stages   the ranks along "pp" that have the parameter. A tied one is on the first and the last

Along the other dimensions of the mesh, ranks have the same values. `model.is_tied` on all stages:
the embedding of the first one is the head of the last one.
"""
LAYERS = 6
LAYER = {  # {parameter: its shape and its `split`}
    "column": ((12, 6), {"tp": 0, "fsdp": 1}),
    "norm": ((6,), {"fsdp": 0}),
    "experts": ((4, 3, 2), {"ep": 0, "fsdp": 1}),
}
ENDS = {name: ((8, 6), {"tp": 0, "fsdp": 1}) for name in ("embedding", "head")}


def make_mesh(**sizes):
    """Of the running claim's ranks."""
    names = tuple(sizes)
    if len(names) == 1:
        group = dist.group.WORLD
        return DeviceMesh.from_group(group, environment.DEVICE_TYPE, mesh_dim_names=names)
    shape = tuple(sizes.values())
    return init_device_mesh(environment.DEVICE_TYPE, shape, mesh_dim_names=names)


def place_along(mesh, name):
    """Return this rank's number along a dimension of the mesh, and how many there are."""
    if name not in mesh.mesh_dim_names:
        return 0, 1
    dim = mesh.mesh_dim_names.index(name)
    return mesh.get_coordinate()[dim], mesh.size(dim)


def whole_tensors(seed, tied=False):
    """Return {name in the whole model: tensor}. Tied ones are one tensor."""
    shapes = {name: shape for name, (shape, _) in ENDS.items()}
    for number in range(LAYERS):
        shapes |= {f"layers.{number}.{name}": shape for name, (shape, _) in LAYER.items()}
    whole = {}
    for number, (name, shape) in enumerate(shapes.items()):
        whole[name] = randn(shape, 100 * seed + number).to(precision())
    if tied:
        whole["head"] = whole["embedding"]
    return whole


def shard(whole, split, mesh):
    """This rank's part of a whole tensor."""
    for name, dim in split.items():
        place, size = place_along(mesh, name)
        parts = whole.chunk(size, dim)
        whole = parts[place] if place < len(parts) else whole.narrow(dim, 0, 0)
    return whole.clone()


def build(mesh, whole, tied=False):
    """This rank's stage of the model with these values."""
    stage, stages = place_along(mesh, "pp")
    ends = sorted({0, stages - 1})

    def parameter(name, split, stages):
        made = nn.Parameter(shard(whole[name], split, mesh))
        made.split = {dim: cut for dim, cut in split.items() if dim in mesh.mesh_dim_names}
        made.stages = stages
        made.whole = whole[name].shape
        return made

    model = nn.Module()
    model.layers = nn.ModuleList()
    numbers = torch.arange(LAYERS, device="cpu").tensor_split(stages)[stage].tolist()
    model.first = numbers[0]
    model.is_tied = tied
    for number in numbers:
        layer = nn.Module()
        for name, (_, split) in LAYER.items():
            made = parameter(f"layers.{number}.{name}", split, [stage])
            layer.register_parameter(name, made)
        model.layers.append(layer)
    for name, end in zip(ENDS, (0, stages - 1), strict=True):
        if stage == end:
            made = parameter(name, ENDS[name][1], ends if tied else [end])
            model.register_parameter(name, made)
    if tied and stages == 1:
        model.head = model.embedding
    return model


def in_whole(model, name):
    """The name of a parameter of this stage in the whole model."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return name
    number, _, rest = rest.partition(".")
    return f"layers.{int(number) + model.first}.{rest}"


def is_first(parameter, mesh):
    """Of the ranks that have the same shard, is this the first one?"""
    stage, _ = place_along(mesh, "pp")
    others = [name for name in mesh.mesh_dim_names if name != "pp" and name not in parameter.split]
    places = [place_along(mesh, name)[0] for name in others]
    return stage == parameter.stages[0] and not any(places)


# ---- for adapters of libraries


def group_along(mesh, names):
    """The group of ranks that differ along some of these dimensions."""
    names = [name for name in names if name in mesh.mesh_dim_names]
    if not names:
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return mesh.get_group(names[0]) if len(names) < mesh.ndim else dist.group.WORLD


def as_dtensors(parameter, mesh):
    """The parameter and its gradient. They share memory with the originals."""
    cuts = [parameter.split.get(name) for name in mesh.mesh_dim_names]
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    made = nn.Parameter(DTensor.from_local(parameter.data, mesh, placements, run_check=False))
    if parameter.grad is not None:
        made.grad = DTensor.from_local(parameter.grad, mesh, placements, run_check=False)
    return made

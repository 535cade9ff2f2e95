"""An implementation of --clip-grad-norm is called as function(model, max_norm, mesh).

It clips the gradients of a model that is split over a mesh of ranks, in place, and returns the norm
of the whole model's gradient. Ranks with the same parameters have the same gradients already. The
claim about another norm passes norm_type=.
"""

from types import SimpleNamespace

import pool
import torch
import torch.distributed as dist
import torch.nn as nn

import parallel_5d
import tensor_parallel
from claims.meshes import MODEL, build, in_whole, is_first, make_mesh, shard, whole_tensors
from claims.registry import add_kind, call, check, claim, same, same_on_all, say, say_in_float64
from claims.training import full


def clip(model, max_norm, mesh, norm_type=2.0):
    """Ours: tensor_parallel's over a single group, and that of parallel_5d's trainer."""
    parameters = list(model.parameters())
    if mesh.mesh_dim_names == ("tp",):
        for parameter in parameters:
            if parameter.split:
                parameter.differ_between_ranks = list(range(mesh.size()))
        return tensor_parallel.clip_grad_norm_(model, max_norm, mesh.get_group(), norm_type)
    again = [parameter for parameter in parameters if not is_first(parameter, mesh)]
    # A rank of the trainer counts what is split. It leaves `whole` to the first rank of tp.
    grid = SimpleNamespace(tp_rank=1, model_group=dist.group.WORLD)
    device = pool.device()
    trainer = SimpleNamespace(whole=again, parameters=parameters, grid=grid, device=device)
    return parallel_5d.Trainer.clip_grad_norm_(trainer, max_norm)


def make_clip(implementation, model, max_norm, mesh, **options):
    return call(implementation, model, max_norm, mesh, needed=options)


add_kind(
    "clip-grad-norm",
    called=__doc__ + MODEL,
    make=make_clip,
    ours="claims.clip_grad_norm:clip",
    pytorchs="pytorchs:clip_grad_norm",
)


def with_gradients(mesh, tied=False, scale=1.0, without=()):
    """Return this rank's model, and {name: whole parameter}. Both have gradients.

    `without`: names of the whole model, or parts of names, that have none.
    """
    gradients = whole_tensors(seed=1, tied=tied)
    values = whole_tensors(seed=2, tied=tied)
    whole = {}
    for name, value in values.items():
        whole[name] = nn.Parameter(value)
        if not any(part in name for part in without):
            whole[name].grad = scale * gradients[name]
    if tied:
        whole["head"] = whole["embedding"]
    model = build(mesh, values, tied)
    for name, parameter in model.named_parameters():
        gradient = whole[in_whole(model, name)].grad
        if gradient is not None:
            parameter.grad = shard(gradient, parameter.split, mesh)
    return model, whole


def clips_as_one_device(make, sizes, max_norm=0.5, options=None, **how):
    mesh = make_mesh(**sizes)
    model, whole = with_gradients(mesh, **how)
    options = options or {}
    norm = one_device(model, set(whole.values()), mesh, max_norm, options)

    found = make(model, max_norm, mesh, **options)

    same(number(found, norm), norm, "norm")
    same_on_all(number(found, norm), "the norm")
    for own_name, parameter in model.named_parameters():
        name = in_whole(model, own_name)
        gradient = whole[name].grad
        if gradient is not None:
            expected = shard(gradient, parameter.split, mesh)
            same(parameter.grad, expected, f"gradient of {name}")


def one_device(model, parameters, mesh, max_norm, options):
    return nn.utils.clip_grad_norm_(parameters, max_norm, **options)


def number(found, like):
    found = full(torch.as_tensor(found)).detach()
    return found.reshape(()).to(like.dtype)


def clips(name, sentence, may_refuse=False, world=4, **how):
    say(name, sentence, [world], "clip-grad-norm", clips_as_one_device, "result", may_refuse, **how)


clips(
    "tensor_ranks",
    "Over tensor-parallel ranks, shards count each, and replicated parameters once.",
    sizes={"tp": 4},
)
say_in_float64("clip-grad-norm", "tensor_ranks")
clips(
    "data_parallel_ranks",
    "Replicas count once.",
    world=3,
    sizes={"dp": 3},
)
clips(
    "stages",
    "Every stage's parameters count.",
    world=3,
    sizes={"pp": 3},
)
clips(
    "tied",
    "A parameter that the first and the last stage share counts once.",
    world=3,
    sizes={"pp": 3},
    tied=True,
)
clips(
    "experts",
    "Every rank's experts count, those of their replicas do not, and the other parameters once.",
    sizes={"dp": 2, "ep": 2},
)
clips(
    "shards",
    "Over FSDP's ranks, every shard counts. A rank may have an empty one.",
    sizes={"fsdp": 4},
)
clips(
    "shards_of_tensor_ranks",
    "FSDP × tensor parallelism: a norm is sharded over one, and replicated over the other.",
    sizes={"fsdp": 2, "tp": 2},
)
clips(
    "stages_of_tensor_ranks",
    "Pipeline × tensor parallelism.",
    sizes={"pp": 2, "tp": 2},
)
clips(
    "experts_on_stages",
    "Pipeline × expert parallelism.",
    sizes={"pp": 2, "ep": 2},
)
clips(
    "small_gradients",
    "Gradients whose norm is below max_norm do not change.",
    sizes={"fsdp": 2, "tp": 2},
    scale=1e-3,
)
clips(
    "some_without_gradients",
    "Parameters without a gradient do not count. One stage has none at all.",
    sizes={"pp": 2, "tp": 2},
    without=["layers.0.", "layers.1.", "layers.2.", "embedding"],
)
clips(
    "no_gradients",
    "If no parameter has a gradient, the norm is zero.",
    world=2,
    sizes={"tp": 2},
    without=[""],
)
clips(
    "largest_element",
    "With norm_type=inf the norm is the largest element of all ranks.",
    sizes={"tp": 4},
    options={"norm_type": torch.inf},
)


def finds_on_all_ranks(make, sizes, value):
    mesh = make_mesh(**sizes)
    model, _ = with_gradients(mesh)
    if mesh.get_rank() == 1:
        model.layers[0].column.grad[0, 0] = value
    norm = number(make(model, 0.5, mesh), torch.zeros((), dtype=torch.float64))
    what = f"the norm is {norm} on rank {mesh.get_rank()}, and rank 1 has a gradient of {value}"
    check(not norm.isfinite() and (norm == value or value != value), what)


@claim("clip-grad-norm", 4)
def nan_on_one_rank(make):
    """A NaN on one rank makes the norm NaN, or infinite, on all ranks."""
    finds_on_all_ranks(make, {"tp": 4}, torch.nan)
    finds_on_all_ranks(make, {"pp": 2, "tp": 2}, torch.nan)


@claim("clip-grad-norm", 4)
def infinite_on_one_rank(make):
    """An infinite gradient on one rank makes the norm infinite on all ranks."""
    finds_on_all_ranks(make, {"tp": 4}, torch.inf)
    finds_on_all_ranks(make, {"pp": 2, "tp": 2}, torch.inf)

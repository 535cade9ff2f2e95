"""Mistakes in the norm of a model that is split over a mesh, and the claim that catches each."""

from functools import partial

import torch
import torch.distributed as dist
from claims.meshes import is_first, place_along


def plain(model, max_norm, mesh, counts=is_first, wrong=""):
    """Count each element once, on the first rank that has it. `wrong` names a mistake."""
    total = torch.zeros((), dtype=torch.float64)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        if parameter.grad is not None and counts(parameter, mesh):
            total += parameter.grad.double().square().sum()
    if wrong == "sum of norms":
        total = total.sqrt()
    if wrong == "hides NaN":
        total = total.nan_to_num(posinf=torch.inf)
    if wrong != "own norm":
        dist.all_reduce(total)
    norm = total if wrong == "sum of norms" else total.sqrt()
    factor = max_norm / (norm + 1e-6)
    if wrong != "scales up":
        factor = factor.clamp(max=1.0)
    if wrong != "only the norm":
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
    return norm


def everything(parameter, mesh):
    return True


def is_split(parameter, mesh):
    """Leaves out what all ranks have."""
    others = [name for name in mesh.mesh_dim_names if name in ("dp", "tp", "ep")]
    return is_first(parameter, mesh) and (set(others) <= parameter.split.keys())


def on_each_stage(parameter, mesh):
    """The first of those on its stage. A tied parameter is on two."""
    others = [name for name in mesh.mesh_dim_names if name != "pp" and name not in parameter.split]
    return not any(place_along(mesh, name)[0] for name in others)


def of_the_first_stage(parameter, mesh):
    return is_first(parameter, mesh) and place_along(mesh, "pp")[0] == 0


def own_experts(parameter, mesh):
    return is_first(parameter, mesh) and not (
        "ep" in parameter.split and place_along(mesh, "ep")[0] > 0
    )


def replicated_shards(parameter, mesh):
    """Takes what tensor parallelism does not split for whole, though FSDP does."""
    on_first = place_along(mesh, "tp")[0] == 0 and place_along(mesh, "fsdp")[0] == 0
    return is_first(parameter, mesh) and ("tp" in parameter.split or on_first)


counts_replicas = partial(plain, counts=everything)
leaves_out_replicated = partial(plain, counts=is_split)
counts_tied_twice = partial(plain, counts=on_each_stage)
forgets_stages = partial(plain, counts=of_the_first_stage)
forgets_other_experts = partial(plain, counts=own_experts)
takes_shards_for_whole = partial(plain, counts=replicated_shards)
own_norm = partial(plain, wrong="own norm")
sum_of_norms = partial(plain, wrong="sum of norms")
hides_nan = partial(plain, wrong="hides NaN")
scales_up = partial(plain, wrong="scales up")
only_the_norm = partial(plain, wrong="only the norm")

MISTAKES = {
    "clip-grad-norm": {
        "own_norm": "tensor_ranks",
        "counts_replicas": "data_parallel_ranks",
        "leaves_out_replicated": "tensor_ranks",
        "counts_tied_twice": "tied",
        "forgets_stages": "stages",
        "forgets_other_experts": "experts",
        "takes_shards_for_whole": "shards_of_tensor_ranks",
        "sum_of_norms": "stages_of_tensor_ranks",
        "hides_nan": "nan_on_one_rank",
        "scales_up": "small_gradients",
        "only_the_norm": "shards",
    },
}
RIGHT = {"clip-grad-norm": {"plain": []}}

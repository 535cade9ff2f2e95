"""Mistakes in the norm of a model that is split over a mesh, and the claim that catches each."""

from functools import partial

import torch
import torch.distributed as dist
from claims.meshes import is_first, place_along


def plain(model, max_norm, mesh, norm_type=2.0, counts=is_first, wrong=""):
    """Count each element once, on the first rank that has it. `wrong` names a mistake."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    counted = [p.grad for p in model.parameters() if p.grad is not None and counts(p, mesh)]
    if wrong == "in float32":
        counted = [gradient.float() for gradient in counted]
    norm = norm_of(counted, norm_type, wrong)
    if wrong == "divides by the norm":
        norm = norm * norm / norm
    if wrong == "skips a rank without gradients" and not gradients:
        return torch.zeros(())
    factor = max_norm / (norm + 1e-6)
    if wrong != "scales up":
        factor = factor.clamp(max=1.0)
    if wrong != "only the norm":
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
    return norm


def norm_of(gradients, norm_type, wrong):
    total = torch.zeros((), dtype=torch.float64)
    if norm_type == torch.inf:
        for gradient in gradients:
            total = torch.maximum(total, gradient.abs().max())
        is_sum = wrong == "sums the largest"
        dist.all_reduce(total, dist.ReduceOp.SUM if is_sum else dist.ReduceOp.MAX)
        return total
    for gradient in gradients:
        total += gradient.square().sum()
    if wrong == "sum of norms":
        total = total.sqrt()
    if wrong == "hides NaN":
        total = total.nan_to_num(posinf=torch.inf)
    if wrong == "hides infinity":
        total = total.nan_to_num(nan=torch.nan, posinf=0.0)
    if wrong != "own norm":
        dist.all_reduce(total)
    return total if wrong == "sum of norms" else total.sqrt()


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


def experts_of_the_first_stage(parameter, mesh):
    is_later = place_along(mesh, "pp")[0] > 0
    return is_first(parameter, mesh) and not ("ep" in parameter.split and is_later)


def replicated_shards(parameter, mesh):
    """Takes what tensor parallelism does not split for whole, though FSDP does."""
    on_first = place_along(mesh, "tp")[0] == 0 and place_along(mesh, "fsdp")[0] == 0
    return is_first(parameter, mesh) and ("tp" in parameter.split or on_first)


counts_replicas = partial(plain, counts=everything)
leaves_out_replicated = partial(plain, counts=is_split)
counts_tied_twice = partial(plain, counts=on_each_stage)
forgets_stages = partial(plain, counts=of_the_first_stage)
forgets_other_experts = partial(plain, counts=own_experts)
forgets_experts_of_stages = partial(plain, counts=experts_of_the_first_stage)
takes_shards_for_whole = partial(plain, counts=replicated_shards)
own_norm = partial(plain, counts=everything, wrong="own norm")
sum_of_norms = partial(plain, wrong="sum of norms")
hides_nan = partial(plain, wrong="hides NaN")
hides_infinity = partial(plain, wrong="hides infinity")
sums_the_largest = partial(plain, wrong="sums the largest")
divides_by_the_norm = partial(plain, wrong="divides by the norm")
skips_without_gradients = partial(plain, wrong="skips a rank without gradients")
in_float32 = partial(plain, wrong="in float32")
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
        "hides_infinity": "infinite_on_one_rank",
        "sums_the_largest": "largest_element",
        "divides_by_the_norm": "no_gradients",
        "skips_without_gradients": "some_without_gradients",
        "forgets_experts_of_stages": "experts_on_stages",
        "in_float32": "float64",
        "scales_up": "small_gradients",
        "only_the_norm": "shards",
    },
}
CAUSES = {
    "clip-grad-norm": {
        "own_norm": "own_norm",
        "counts_replicas": "copies_count",
        "leaves_out_replicated": "replicated_left_out",
        "counts_tied_twice": "tied_counts_twice",
        "forgets_stages": "other_stages_left_out",
        "forgets_other_experts": "other_experts_left_out",
    },
}
RIGHT = {"clip-grad-norm": {"plain": []}}

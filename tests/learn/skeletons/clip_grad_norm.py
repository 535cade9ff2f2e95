"""Clipping on a mesh: every rank divides its gradients by the norm of the whole model's gradient.

    norm = √(Σ over the ranks that hold different elements of their own Σ g²)
    if norm > max_norm: gradients × max_norm / (norm + 1e-6)

An element that several ranks hold counts once: along a dimension of the mesh, add up only what is
split along it, or what only one rank of it counts. A tied weight is on two stages. You need:
torch.distributed.all_reduce(tensor, group=mesh.get_group("tp")), mesh.get_local_rank("tp").
"""

import torch


def my_clip_grad_norm(model, max_norm, mesh):
    """Clip in place. Return the whole norm, the same number on all ranks.

    parameter.split is {a dimension of the mesh: the dimension of the tensor that it cuts}, and
    parameter.stages has the ranks along "pp" that hold the parameter.
    """
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

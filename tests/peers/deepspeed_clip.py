"""deepspeed==0.19.8: clip_grad_norm_, with which its engine clips float32 gradients."""

from types import SimpleNamespace

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups


def clip_grad_norm(model, max_norm, mesh, norm_type=2.0):
    """`mpu` says what PipelineModule's says: the ranks of one replica, and their numbers."""
    if "fsdp" in mesh.mesh_dim_names:
        raise NotImplementedError("its ZeRO optimizers clip themselves")
    deepspeed.init_distributed("gloo")
    names = [name for name in ("pp", "tp") if name in mesh.mesh_dim_names]
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    of_replica = dist.group.WORLD if names else alone
    of_data = alone if names else dist.group.WORLD
    if "ep" in mesh.mesh_dim_names and names:
        of_replica = mesh.get_group("pp")
        of_data = mesh.get_group("ep")
    mpu = SimpleNamespace(get_model_parallel_group=lambda: of_replica)
    mpu.get_model_parallel_rank = of_replica.rank
    mpu.get_data_parallel_group = lambda: of_data
    groups.mpu = mpu
    for parameter in model.parameters():
        parameter.model_parallel = "tp" in parameter.split
    return clip_grad_norm_(model.parameters(), max_norm, norm_type, mpu)


clip_grad_norm.fresh = True

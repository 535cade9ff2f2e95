"""transformers==5.24.0: Qwen3's tp_plan, under the block's names, and a style for a fused qkv."""

from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    PackedColwiseParallel,
    apply_tensor_parallelism,
)

ALL_PARALLEL_STYLES.register("packed_qkv", PackedColwiseParallel(split_factor=3))
PLAN = dict.fromkeys(("q", "k", "v", "gate", "up"), "colwise")
PLAN |= {"proj": "rowwise", "down": "rowwise", "qkv": "packed_qkv"}
PLAN |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")


def tp_block(block, process_group):
    mesh = DeviceMesh.from_group(process_group, "cpu", mesh_dim_names=("tp",))
    plan = {}
    for name, style in PLAN.items():
        if hasattr(block, name):
            layer = block.get_submodule(name)
            plan |= {f"{name}.{part}": style for part, _ in layer.named_parameters()}
            plan[name] = style  # parameters first, as from_pretrained() expands a plan
    return apply_tensor_parallelism(block, mesh, plan)

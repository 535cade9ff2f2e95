"""torchtitan==0.3.0: its clip_grad_norm_, on DTensors."""

from claims.meshes import as_dtensors
from torchtitan.distributed.utils import clip_grad_norm_


def clip_grad_norm(model, max_norm, mesh, norm_type=2.0):
    names = tuple(name for name in mesh.mesh_dim_names if name != "pp")
    options = {"norm_type": norm_type, "ep_enabled": "ep" in names}
    if "pp" in mesh.mesh_dim_names:
        options["pp_mesh"] = mesh["pp"]
        if model.is_tied:
            raise NotImplementedError("no parameters that two stages share")
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters):
        if names:
            inside = mesh[names]
            if "ep" in names and "ep" not in parameter.split:  # experts have a mesh of their own
                inside = inside._flatten("dense")
            parameters[number] = as_dtensors(parameter, inside)
    return clip_grad_norm_(parameters, max_norm, **options)

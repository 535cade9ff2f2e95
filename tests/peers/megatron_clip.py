"""megatron-core==0.16.1: the norm of its optimizers. OnCPU lets CPUs stand in for its GPUs."""

import torch
from claims.meshes import as_dtensors, group_along, place_along
from megatron.core.optimizer import OptimizerConfig, optimizer


class OnCPU(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: "cpu" if key == "device" else each for key, each in (kwargs or {}).items()}
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


def clip_grad_norm(model, max_norm, mesh):
    parts = {"tp": [], "ep": []}  # dense parameters, and experts
    for plain in model.parameters():
        parameter = as_dtensors(plain, mesh["fsdp"]) if "fsdp" in plain.split else plain
        parameter.tensor_model_parallel = "tp" in plain.split
        parameter.shared = plain.stages[0] != place_along(mesh, "pp")[0]
        parts["ep" if "ep" in plain.split else "tp"].append(parameter)
    with OnCPU():
        chain = [optimizer_of(own, mesh, along) for along, own in parts.items() if own]
        norm = optimizer.ChainedOptimizer(chain).get_grad_norm()
        optimizer.clip_grad_by_total_norm_fp32([*parts["tp"], *parts["ep"]], max_norm, norm)
    return norm


def optimizer_of(parameters, mesh, along):
    found = optimizer.FP32Optimizer(torch.optim.SGD(parameters), OptimizerConfig(), None)
    found.tp_group = group_along(mesh, ["tp"])
    found.grad_stats_parallel_group = group_along(mesh, ["pp", along])
    return found

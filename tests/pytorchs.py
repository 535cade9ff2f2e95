"""Implementations of PyTorch, peft and torchft, in the form in which tests/claims call a kind."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import environment
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from claims.meshes import in_whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import pipeline


def make_schedule(name, p, m, v=1):
    stage = SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None, is_last=0)
    # torch 2.6 reads this
    stage.stage_index_to_group_rank = {number: number % p for number in range(p * v)}
    return getattr(schedules, name)([stage] * v, m)


def order_of(schedule, p):
    """Return our list of actions for each rank."""
    ranks = [filter(None, schedule.pipeline_order[rank]) for rank in range(p)]
    return [list(map(str, pipeline.parse(actions))) for actions in ranks]


def build_schedule(name, p, m, v=1):
    return order_of(make_schedule(name, p, m, v), p)


build_schedule.names = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
)


def styled(linear, style, process_group):
    mesh = DeviceMesh.from_group(process_group, environment.DEVICE_TYPE)
    return parallelize_module(linear, mesh, style)


class Column:
    @staticmethod
    def from_full(linear, *, gather_output=False, sequence_parallel=False, process_group):
        style = ColwiseParallel(
            input_layouts=Shard(0) if sequence_parallel else Replicate(),
            output_layouts=Replicate() if gather_output else Shard(-1),
        )
        return styled(linear, style, process_group)


class Row:
    @staticmethod
    def from_full(linear, *, input_is_parallel=True, sequence_parallel=False, process_group):
        style = RowwiseParallel(
            input_layouts=Shard(-1) if input_is_parallel else Replicate(),
            output_layouts=Shard(0) if sequence_parallel else Replicate(),
        )
        return styled(linear, style, process_group)


class Embedding:
    @staticmethod
    def from_full(embedding, *, process_group):
        whole = Replicate()
        style = RowwiseParallel(input_layouts=whole, output_layouts=whole)
        return styled(embedding, style, process_group)


def tp_block(block, process_group, sequence_parallel=False):
    """As torchtitan splits Qwen3: the norms of q and k get heads, dimension 2, that are split."""
    if hasattr(block, "qkv"):
        raise NotImplementedError("no plan for a layer that stacks q, k and v")
    mesh = DeviceMesh.from_group(process_group, environment.DEVICE_TYPE)
    between = Shard(0) if sequence_parallel else Replicate()
    columns = ("q", "k", "v", "gate", "up")
    plan = {name: ColwiseParallel(input_layouts=between) for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("proj", "down")}
    if hasattr(block, "q_norm"):
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"q_norm": norm, "k_norm": norm}
    if sequence_parallel:
        norm = SequenceParallel(sequence_dim=0, use_local_output=True)
        plan |= {"norm1": norm, "norm2": norm}
    return parallelize_module(block, mesh, plan)


class LossParallel(torch.autograd.Function):
    """Its backward must run inside loss_parallel(), too."""

    @staticmethod
    def forward(ctx, logits_shard, target, size, mesh, options):
        shard = logits_shard.detach().requires_grad_()
        with torch.enable_grad(), loss_parallel():
            shape = torch.Size([*shard.shape[:-1], size])
            stride = torch.empty(shape, device="meta").stride()
            logits = DTensor.from_local(
                shard, mesh, [Shard(shard.dim() - 1)], shape=shape, stride=stride
            )
            target_of_all = DTensor.from_local(target.flatten(), mesh, [Replicate()])
            logits = logits.flatten(0, -2)
            loss = F.cross_entropy(logits, target_of_all, reduction="none", **options)
        ctx.inside = (shard, loss)
        return loss.full_tensor().detach().view(target.shape)

    @staticmethod
    def backward(ctx, gradient):
        shard, loss = ctx.inside
        with loss_parallel():
            loss.backward(DTensor.from_local(gradient.flatten(), loss.device_mesh, [Replicate()]))
        return shard.grad, None, None, None, None


def vocab_cross_entropy(
    logits_shard, target, label_smoothing=0.0, vocab_size=None, *, process_group
):
    mesh = DeviceMesh.from_group(process_group, environment.DEVICE_TYPE)
    columns = logits_shard.shape[-1]
    size = vocab_size or columns * process_group.size()
    words = max(size - columns * process_group.rank(), 0)
    options = {"label_smoothing": label_smoothing}
    return LossParallel.apply(logits_shard[..., :words], target, size, mesh, options)


def chunked_linear_cross_entropy(input, linear_weight, target, **options):
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise NotImplementedError(f"torch {torch.__version__} has no linear_cross_entropy")
    chunks = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(input, linear_weight, target, options=chunks, **options)


def placements_of(parameter, mesh):
    """A dimension of the mesh either splits the parameter or has it whole on each rank."""
    cuts = [parameter.split.get(name) for name in mesh.mesh_dim_names]
    return [Replicate() if cut is None else Shard(cut) for cut in cuts]


def clip_grad_norm(model, max_norm, mesh, norm_type=2.0):
    """On DTensors. Over pipeline stages, norms add up as in torchtitan 0.2, which ties nothing."""
    if model.is_tied and "pp" in mesh.mesh_dim_names:
        raise NotImplementedError("no parameters that two stages share")
    names = [name for name in mesh.mesh_dim_names if name != "pp"]
    inside = mesh[tuple(names)] if names else None
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None and inside is not None:
            placements = placements_of(parameter, inside)
            gradient = DTensor.from_local(parameter.grad, inside, placements, run_check=False)
            gradients.append(gradient)
        elif parameter.grad is not None:
            gradients.append(parameter.grad)
    norm = get_total_norm(gradients, norm_type)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if "pp" in mesh.mesh_dim_names:
        norm = norm.double() ** norm_type  # float32 on a stage without gradients
        dist.all_reduce(norm, group=mesh.get_group("pp"))
        norm = norm ** (1 / norm_type)
    clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


class Checkpoint:
    """DCP's, each in a folder of its own: the latest one that is complete counts."""

    @staticmethod
    def tensors(model, optimizer, mesh):
        names = tuple(name for name in mesh.mesh_dim_names if name != "pp")
        found = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            whole = torch.empty(parameter.whole, device="meta")
            size = {"shape": whole.shape, "stride": whole.stride()}
            for kind, tensor in {"weight": parameter.data, **optimizer.state[parameter]}.items():
                key = f"{kind}/{in_whole(model, name)}"
                found[key] = tensor
                if names and tensor.dim():
                    placements = placements_of(parameter, mesh[names])
                    found[key] = DTensor.from_local(tensor, mesh[names], placements, **size)
        return found

    @staticmethod
    def folders(directory):
        """Return the names of complete ones. The metadata are written last."""
        found = Path(directory).glob("*/.metadata")
        return sorted(path.parent.name for path in found)

    @classmethod
    def save(cls, directory, model, optimizer, extra, mesh):
        tensors = cls.tensors(model, optimizer, mesh)
        options = [{**group, "params": None} for group in optimizer.param_groups]
        number = len(cls.folders(directory))
        rest = pickle.dumps((options, extra))
        dcp.save({**tensors, "extra": rest}, checkpoint_id=Path(directory, str(number)))

    @classmethod
    def load(cls, directory, model, optimizer, mesh):
        state = {**cls.tensors(model, optimizer, mesh), "extra": b""}
        dcp.load(state, checkpoint_id=Path(directory, cls.folders(directory)[-1]))
        options, extra = pickle.loads(state["extra"])
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            group.update({**saved, "params": group["params"]})
        return extra


def inject_lora(model, r, lora_alpha, target_modules):
    import peft

    config = peft.LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules)
    return peft.get_peft_model(model, config)


class SteadyManager:
    """What torchft's DiLoCo asks of its manager, if no worker ever leaves."""

    _use_async_quorum = False

    def __init__(self, process_group):
        self.process_group = process_group
        self.step = 0

    def current_step(self):
        return self.step

    def should_commit(self):
        self.step += 1
        return True

    def allreduce(self, tensor, should_quantize=False):
        dist.all_reduce(tensor, group=self.process_group)
        tensor /= self.process_group.size()
        return SimpleNamespace(wait=lambda: None)

    def do_nothing(self, *_):
        pass

    start_quorum = allow_state_dict_read = disallow_state_dict_read = do_nothing
    register_state_dict_fn = do_nothing


class DiLoCo:
    """torchft's. It has a delay of its own, which ends where ours begins."""

    def __init__(
        self,
        module,
        optimizer,
        sync_every,
        outer_lr,
        outer_momentum,
        num_fragments=1,
        *,
        process_group,
    ):
        from torchft import local_sgd

        for tensor in module.state_dict().values():  # as its manager does at the start
            dist.broadcast(tensor, group=process_group, group_src=0)
        parts = [module] if num_fragments == 1 else [module[:-1], module[-1:]]
        self.fragments = [[name for name, _ in part.named_parameters()] for part in parts]
        options = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": outer_momentum > 0}
        outer_optimizers = [torch.optim.SGD(part.parameters(), **options) for part in parts]
        manager = SteadyManager(process_group)
        inside = local_sgd.DiLoCo(manager, parts, optimizer, outer_optimizers, sync_every)
        inside.__enter__()  # its hooks run in the optimizer's step

    def step(self):
        pass

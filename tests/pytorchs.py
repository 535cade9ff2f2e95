"""PyTorch's implementations, and peft's, in the form in which tests/claims call a kind."""

from types import SimpleNamespace

import environment
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipeline


def make_schedule(name, p, m, v=1):
    stage = SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None, is_last=0)
    # torch 2.6 reads this
    stage.stage_index_to_group_rank = {number: number % p for number in range(p * v)}
    return getattr(schedules, name)([stage] * v, m)


def order_of(schedule, p):
    """Return our list of actions for each rank."""
    ranks = [filter(None, schedule.pipeline_order[rank]) for rank in range(p)]
    return pipeline.compute_only([[str(action) for action in actions] for actions in ranks])


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


def inject_lora(model, r, lora_alpha, target_modules):
    import peft

    config = peft.LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules)
    return peft.get_peft_model(model, config)

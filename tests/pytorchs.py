"""PyTorch's own, and peft's, in the form in which tests/claims calls a kind, where they have another."""

from types import SimpleNamespace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipeline


def make_schedule(name, p, m, v=1):
    stage = SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None, is_last=0)
    stage.stage_index_to_group_rank = {
        number: number % p for number in range(p * v)
    }  # torch 2.6 reads it
    return getattr(schedules, name)([stage] * v, m)


def order_of(schedule, p):
    return pipeline.compute_only(
        [[str(action) for action in schedule.pipeline_order[rank] if action] for rank in range(p)]
    )


def build_schedule(name, p, m, v=1):
    return order_of(make_schedule(name, p, m, v), p)


build_schedule.names = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
)


def styled(linear, style, process_group):
    return parallelize_module(linear, DeviceMesh.from_group(process_group, "cpu"), style)


class Column:
    @staticmethod
    def from_full(linear, *, gather_output=False, sequence_parallel=False, process_group):
        there, back = (
            (Shard(0) if sequence_parallel else Replicate()),
            (Replicate() if gather_output else Shard(-1)),
        )
        return styled(
            linear, ColwiseParallel(input_layouts=there, output_layouts=back), process_group
        )


class Row:
    @staticmethod
    def from_full(linear, *, input_is_parallel=True, sequence_parallel=False, process_group):
        there, back = (
            (Shard(-1) if input_is_parallel else Replicate()),
            (Shard(0) if sequence_parallel else Replicate()),
        )
        return styled(
            linear, RowwiseParallel(input_layouts=there, output_layouts=back), process_group
        )


def inject_lora(model, r, lora_alpha, target_modules):
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules)
    )

"""megatron-core==0.16.1: its column and row layers. Two lines make them allocate on CPUs."""

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

torch.cuda.current_device = "cpu".__str__
parallel_state._set_global_memory_buffer()


class FirstOfTwo:
    def __init__(self, in_features, out_features, bias, process_group, **options):
        config = ModelParallelConfig(
            use_cpu_initialization=True,
            perform_initialization=False,
            sequence_parallel=options.pop("sequence_parallel", False),
            tensor_model_parallel_size=process_group.size(),
        )
        options |= {"config": config, "init_method": None, "skip_bias_add": False}
        super().__init__(in_features, out_features, bias=bias, tp_group=process_group, **options)

    def forward(self, x):
        return super().forward(x)[0]  # the second is a bias that is added later


class column_linear(FirstOfTwo, ColumnParallelLinear):
    pass


class row_linear(FirstOfTwo, RowParallelLinear):
    def __init__(self, *sizes, input_is_parallel=True, **options):
        super().__init__(*sizes, input_is_parallel=input_is_parallel, **options)

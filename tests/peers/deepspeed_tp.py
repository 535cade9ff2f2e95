"""deepspeed==0.19.8: AutoTP, with a partition_config for the names of the block."""

import deepspeed

COLUMN = {"patterns": [r"(q|k|v|gate|up)\."], "partition_type": "column"}
STACK = {"patterns": [r"qkv\."], "partition_type": "column", "shape": [3, -1]}
ROW = {"patterns": [r"(proj|down)\."], "partition_type": "row"}
NORM = {"patterns": [r"(q|k)_norm\."], "partition_type": "skip", "grad_allreduce": True}


def tp_block(block, process_group):
    deepspeed.init_distributed("gloo")
    deepspeed.module_inject.layers.set_autotp_mode(training=True)
    specs = {"use_default_specs": False, "layer_specs": [COLUMN, STACK, ROW, NORM]}
    splits = {"autotp_size": process_group.size(), "partition_config": specs}
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": splits}
    engine, *_ = deepspeed.initialize(model=block, config=config)
    return engine.module


tp_block.fresh = True

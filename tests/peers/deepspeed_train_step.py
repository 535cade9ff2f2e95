"""deepspeed==0.19.8: a step of its engine, without ZeRO."""

from functools import cache

import deepspeed
import torch.nn.functional as F


@cache
def engine_for(model, optimizer, max_norm, scheduler):
    config = {"train_micro_batch_size_per_gpu": 5, "gradient_clipping": max_norm}
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    return deepspeed.initialize(config=config, **parts)[0]


def train_step(model, optimizer, micro_batches, max_norm=0.0, scheduler=None):
    engine = engine_for(model, optimizer, max_norm, scheduler)
    count = sum((y != -100).sum() for _, y in micro_batches)
    deepspeed.comm.all_reduce(count)
    for number, (x, y) in enumerate(micro_batches, 1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        loss = F.cross_entropy(engine(x), y, reduction="sum") / count.clamp(min=1)
        engine.backward(loss * deepspeed.comm.get_world_size(), scale_wrt_gas=False)
        engine.step()


train_step.fresh = True

"""accelerate==1.15.0: its prepare()."""

from accelerate import Accelerator, DistributedDataParallelKwargs


def ddp(module, find_unused_parameters=False, bucket_cap_mb=25, broadcast_buffers=True):
    arguments = DistributedDataParallelKwargs(
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
        broadcast_buffers=broadcast_buffers,
    )
    return Accelerator(cpu=True, kwargs_handlers=[arguments]).prepare(module)


ddp.fresh = True  # Accelerator's state is one for each process

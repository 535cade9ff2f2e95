"""fairscale==0.4.13: OSS after PyTorch's DDP, and ShardedDataParallel with OSS."""

from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS


def zero1(parameters, optimizer_class, process_group=None, **arguments):
    return OSS(parameters, optimizer_class, group=process_group, **arguments)


def zero2(module, optimizer_class, process_group=None, **arguments):
    parameters = module.parameters()
    optimizer = OSS(parameters, optimizer_class, group=process_group, **arguments)
    optimizer.model = ShardedDataParallel(module, optimizer, process_group=process_group)
    optimizer.zero_grad = optimizer.model.zero_grad  # zeros buckets in place
    optimizer.clip_grad_norm_ = optimizer.clip_grad_norm
    return optimizer

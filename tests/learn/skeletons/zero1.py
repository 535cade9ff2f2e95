"""ZeRO-1: each rank keeps the optimizer's state of 1/N of the parameters, and updates these.

    optimizer state per rank: 2Ψ/N instead of 2Ψ (Adam)

DistributedDataParallel has averaged the gradients already. After the update of its own share, each
rank sends the new values to the others. You need:
torch.distributed.broadcast(tensor, src), get_rank(), get_world_size().
"""

import torch


class MyZero1(torch.optim.Optimizer):
    def __init__(self, parameters, optimizer_class, **options):
        parameters = list(parameters)
        super().__init__(parameters, options)
        # Decide which rank owns which parameter. Every rank must decide the same.
        # Make an optimizer_class of the parameters that this rank owns. It may own none.

    def step(self):
        # Take the step of the own parameters. Then send them, and receive the others'.
        # A scheduler changes self.param_groups[0]["lr"] between steps.
        pass

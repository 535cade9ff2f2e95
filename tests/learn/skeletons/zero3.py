"""ZeRO-3: as ZeRO-2, and each rank keeps only the values of the parameters that it owns.

    held per rank: (Ψ + Ψ + 2Ψ)/N. Sent: 3Ψ(N-1)/N, because parameters are gathered twice

Before a layer runs, forward and backward, its parameters are gathered. Afterwards they are freed.
Start with all of them at the first forward hook, and then go layer by layer. You need:
torch.distributed.all_gather_into_tensor, reduce_scatter_tensor, register_forward_pre_hook.
"""

import torch


class MyZero3(torch.optim.Optimizer):
    def __init__(self, module, optimizer_class, **options):
        self.module = module
        # Give all ranks the parameters of rank 0. Cut each, flat and padded, into N shards.
        super().__init__(module.parameters(), options)
        # Make an optimizer_class of this rank's shards. Register hooks that gather and free.

    def step(self):
        # Reduce-scatter the mean of the gradients to the shards, and take the step.
        pass

    def module_state_dict(self):
        """Return the whole parameters by name, on every rank."""
        return self.module.state_dict()

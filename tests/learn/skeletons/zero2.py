"""ZeRO-2: as ZeRO-1, and each rank keeps only the gradients of the parameters that it owns.

    gradients per rank: Ψ/N instead of Ψ. Sent: the same 2Ψ(N-1)/N, by reduce-scatter and all-gather

There is no DistributedDataParallel: this class averages the gradients. You need:
torch.distributed.reduce(tensor, dst) or reduce_scatter_tensor, broadcast(tensor, src).
"""

import torch


class MyZero2(torch.optim.Optimizer):
    def __init__(self, module, optimizer_class, **options):
        self.module = module
        # Give all ranks the parameters of rank 0.
        super().__init__(module.parameters(), options)
        # Decide which rank owns which parameter, and make an optimizer of the own ones.

    def step(self):
        # Average each gradient onto its owner, and drop it everywhere else.
        # Take the step of the own parameters. Then send them, and receive the others'.
        pass

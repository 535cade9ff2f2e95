"""Data parallelism: each rank computes the gradients of its own batch, and all take the mean.

    gradient = (gradient of rank 0 + … + gradient of rank N-1) / N

So that replicas stay equal, they must begin equal. You need:
torch.distributed.broadcast(tensor, src), all_reduce(tensor), get_world_size().
"""

import torch.nn as nn


class MyDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        # Give all ranks the parameters and buffers of rank 0.

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        """Called after every backward. Average the gradient of every parameter that trains."""
        # Every rank must issue the same collectives, even if it has no gradient for a parameter.

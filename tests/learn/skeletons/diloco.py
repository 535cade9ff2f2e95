"""DiLoCo: each worker trains alone for H steps. Then they average how far they went.

    Δ = mean over workers of (outer parameters - own parameters)
    outer ← outer - outer_lr · Nesterov momentum of Δ;  own ← outer

The inner optimizer's state stays on the worker. You need:
torch.distributed.all_reduce(tensor), broadcast(tensor, src), torch.optim.SGD(nesterov=True).
"""


class MyDiLoCo:
    def __init__(self, module, optimizer, sync_every=100, outer_lr=0.7, outer_momentum=0.9):
        self.module = module
        self.sync_every = sync_every
        # Give all workers the parameters of rank 0. Keep a copy of them: the outer parameters.
        self.outer = {name: p.detach().clone() for name, p in module.named_parameters()}

    def step(self):
        """Called after each step of the inner optimizer."""
        # Every sync_every steps: take the outer step.

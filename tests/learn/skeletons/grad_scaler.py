"""A gradient scaler: in fp16, small gradients become 0. Scale the loss up, and gradients down.

    step: if all gradients are finite on all ranks, divide by the scale and step; else skip
    update: after an overflow scale × 0.5; after growth_interval good steps scale × 2

If one rank alone skips, the replicas diverge. You need: torch.isfinite,
torch.distributed.all_reduce(tensor, op=dist.ReduceOp.MAX), optimizer.param_groups.
"""


class MyGradScaler:
    def __init__(self, init_scale=65536.0, growth_interval=2000):
        self.scale_now = init_scale
        self.growth_interval = growth_interval

    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

    def get_scale(self):
        return self.scale_now

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass

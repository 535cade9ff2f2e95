"""deepspeed==0.19.8: its engine. On CPUs it needs DS_ACCELERATOR=cpu DS_BUILD_OPS=0."""

from contextlib import nullcontext

import deepspeed


class zero1:
    stage = 1
    fresh = True  # the engine numbers modules in each process
    no_sync = nullcontext  # gradients are sent in step(), not in backward()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config |= {"gradient_clipping": 0.0, "managed_gradient_accumulation": False}

    def __init__(self, module, optimizer_class, **arguments):
        optimizer = optimizer_class(module.parameters(), **arguments)
        config = self.config | {"zero_optimization": {"stage": self.stage}}
        self.model, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.zero_grad = self.model.zero_grad
        self.step = self.model.step
        self.param_groups = self.model.optimizer.param_groups

    def clip_grad_norm_(self, max_norm):
        self.model.optimizer.clip_grad = max_norm  # step() clips

    def module_state_dict(self):
        parameters = dict(self.model.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: p.detach().clone() for name, p in parameters.items()}


class zero2(zero1):
    stage = 2


class zero3(zero1):
    stage = 3

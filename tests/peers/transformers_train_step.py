"""transformers==5.24.0: a step of its Trainer, whose loss is divided by the tokens of all ranks."""

import tempfile

import torch.nn.functional as F
from torch.optim.lr_scheduler import ConstantLR
from transformers import Trainer, TrainingArguments


class Steps(Trainer):
    def get_train_dataloader(self):
        return self.train_dataset  # this rank's micro-batches


def mean_loss(logits, labels, num_items_in_batch):
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def train_step(model, optimizer, micro_batches, max_norm=0.0, scheduler=None):
    batches = [{"input": x, "labels": y} for x, y in micro_batches]
    off = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
    off |= {"disable_tqdm": True, "use_cpu": True, "max_grad_norm": max_norm}
    steps = {"max_steps": 1, "gradient_accumulation_steps": len(batches)}
    arguments = TrainingArguments(tempfile.mkdtemp(), **steps, **off)
    parts = (optimizer, scheduler or ConstantLR(optimizer, 1.0))
    options = {"train_dataset": batches, "compute_loss_func": mean_loss, "optimizers": parts}
    return Steps(model, arguments, **options).train().training_loss


train_step.fresh = True

"""Which device and backend are chosen, and what a GPU would feel. Nothing here needs one."""

import os

import pool
import pytest
import torch
import torch.nn as nn
from claims import KINDS, default_group, resolve
from claims.verdicts import judge
from shared import fake_world_on_meta, loss_of, make_batch, make_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensor_parallel

pytestmark = pytest.mark.cpu

# ---- which device and backend


def test_the_suite_hides_the_gpus_from_itself_and_its_children():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert pool.run(1, os.getenv, "CUDA_VISIBLE_DEVICES") == [""]


def test_a_claim_that_needs_a_larger_world_is_not_run(monkeypatch):
    monkeypatch.setattr(pool, "planned", lambda: ("nccl", 2))

    verdict = judge("ddp", "momentum", KINDS["ddp"].ours)

    assert verdict == ("not run", "needs 3 ranks; nccl has 2 here")


# ---- a step does not wait for the device


class VocabParallel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(16, 8), nn.Linear(8, 16))
        tensor_parallel.parallelize(self, {"0": "vocab", "1": "column"})

    def forward(self, x):
        tokens = x.abs().long()
        logits = super().forward(tokens)
        return tensor_parallel.vocab_parallel_cross_entropy(logits, tokens)


def build(kind):
    """Return a model, and an optimizer whose step reads no tensor (AdamW's reads its count)."""
    if kind == "tensor_parallel":
        model = VocabParallel()
        return model, torch.optim.SGD(model.parameters(), 0.1)
    trainer = KINDS[kind].make(resolve(KINDS[kind].ours), make_model("plain"), "momentum")
    return trainer.model, trainer.optimizer


class OnTheHost(TorchDispatchMode):
    """Notes operators for which the host waits for a GPU, or that touch another device."""

    WAITS = {
        "aten::_local_scalar_dense",  # item(), float(tensor), if tensor
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::lift_fresh",  # torch.tensor([1, 2])
    }

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if torch.is_tensor(each)]
        if func._schema.name in self.WAITS or {t.device.type for t in tensors} - {self.device}:
            self.seen.append(func._schema.name)
        return result


class MethodsThatRead(TorchFunctionMode):
    """Notes calls that are no operator on a CPU."""

    METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.METHODS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def seen_in_a_step(model, optimizer, device):
    for step in range(3):  # the first may set something up
        batch = make_batch(0, step).to(device)
        with OnTheHost(device) as host, MethodsThatRead(host.seen):
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()
    return host.seen


def body_seen_in_a_step(kind):
    with default_group(pool.group()):
        return seen_in_a_step(*build(kind), "cpu")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_reads_no_tensor_on_the_host(kind):
    """tensor_parallel does so on a CPU only, to name a token outside the vocabulary: see below."""
    assert pool.run(2, body_seen_in_a_step, kind) == [[], []]


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_a_step_of_zero_reads_a_flag_of_each_parameter_once(kind):
    """The host must know which parameters the ranks have used, to issue the same collectives."""
    flags = ["aten::lift_fresh", "tolist"]

    assert pool.run(2, body_seen_in_a_step, kind) == [flags, flags]


@pytest.mark.parametrize("kind", ["ddp", "tensor_parallel"])
def test_a_step_copies_nothing_from_the_host(kind):
    """The meta device stands for a GPU. It has no data and no send, as zero and fsdp need."""
    with fake_world_on_meta(2, rank=0):
        model, optimizer = build(kind)
        assert seen_in_a_step(model, optimizer, "meta") == []


class Mistake(nn.Linear):
    def __init__(self, change):
        super().__init__(6, 3)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


MISTAKES = {
    "aten::_local_scalar_dense": lambda y: y if y.sum() > 0 else -y,
    "tolist": lambda y: y * y.sum().tolist(),
    "aten::lift_fresh": lambda y: y * torch.tensor([2.0]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen(name):
    model = Mistake(MISTAKES[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    assert name in seen_in_a_step(model, optimizer, "cpu")

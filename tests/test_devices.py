"""Which device and backend are chosen, and what a GPU would feel. Nothing here needs one."""

import os
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import KINDS, default_group, resolve
from claims.verdicts import judge
from shared import fake_world_on_meta, loss_of, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ddp
import tensor_parallel

pytestmark = pytest.mark.cpu


def test_the_suite_hides_the_gpus_from_itself_and_its_children():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert pool.run(1, os.getenv, "CUDA_VISIBLE_DEVICES") == [""]


def test_a_claim_that_needs_a_larger_world_is_not_run(monkeypatch):
    monkeypatch.setattr(pool, "planned", lambda: ("nccl", 2))

    verdict = judge("ddp", "momentum", KINDS["ddp"].ours)

    assert verdict == ("not run", "needs 3 ranks; nccl has 2 here")


# ---- which backend the demos take


GPU = SimpleNamespace(uuid="GPU-a")


def backend_of_rank_0(monkeypatch, others, **environ):
    """Return what join_world() gives init_process_group() if the other ranks have these GPUs."""
    store = dist.HashStore()
    for rank, uuid in enumerate(others, start=1):
        store.set(f"gpu {rank}", uuid)
    world = store, 0, 1 + len(others)
    given = {}
    for name, value in {"RANK": "0", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([world]))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", given.update)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    ddp.join_world(torch.device("cuda", 0))
    return given["backend"]


def test_ranks_with_a_gpu_each_use_nccl_even_if_each_sees_only_its_own(monkeypatch):
    """As under torchrun --virtual-local-rank and srun --gpus-per-task=1."""
    one = {"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}

    assert backend_of_rank_0(monkeypatch, ["GPU-b", "GPU-c"], **one) == "nccl"


def test_two_ranks_on_one_gpu_use_gloo_unless_nccl_may_share_it(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert backend_of_rank_0(monkeypatch, ["GPU-b", "GPU-a"]) == "gloo"

    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert backend_of_rank_0(monkeypatch, ["GPU-b", "GPU-a"], **shared) == "nccl"


def test_nccl_runs_in_its_blocking_mode_unless_the_user_says_otherwise(monkeypatch):
    name = "TORCH_NCCL_USE_COMM_NONBLOCKING"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    backend_of_rank_0(monkeypatch, [])
    assert os.environ[name] == "0"

    backend_of_rank_0(monkeypatch, [], **{name: "1"})
    assert os.environ[name] == "1"


# ---- a step does not wait for the device


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
        tensors = filter(torch.is_tensor, tree_leaves((args, kwargs, result)))
        others = {tensor.device.type for tensor in tensors} - {self.device}
        if func._schema.name in self.WAITS or others:
            self.seen.append(func._schema.name)
        return result


def seen_in_a_step(kind, device):
    """With an optimizer whose step reads no tensor. (AdamW's reads its count.)"""
    ours = resolve(KINDS[kind].ours)
    trainer = KINDS[kind].make(ours, make_model("plain"), "momentum")
    for step in range(3):  # the first may set something up
        batch = make_batch(0, step).to(device)
        with OnTheHost(device) as host:
            trainer.optimizer.zero_grad()
            loss = loss_of(trainer.model(batch))
            loss.backward()
            trainer.optimizer.step()
    return host.seen


def body_seen_in_a_step(kind):
    with default_group(pool.group()):
        return seen_in_a_step(kind, "cpu")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_a_step_reads_no_tensor_on_the_host(kind):
    """Zero reads a flag of each parameter: which of them the ranks have used, to send the same.

    It does so by tolist(), which is no operator on a CPU.
    """
    flags = ["aten::lift_fresh"] if kind.startswith("zero") else []

    assert pool.run(2, body_seen_in_a_step, kind) == [flags, flags]


def test_a_step_of_ddp_copies_nothing_from_the_host():
    """The meta device stands for a GPU. It has no data and no send, as zero and fsdp need."""
    with fake_world_on_meta(2, rank=0):
        assert seen_in_a_step("ddp", "meta") == []


def test_the_loss_over_a_split_vocabulary_copies_nothing_from_the_host():
    with fake_world_on_meta(2, rank=0):
        embedding = tensor_parallel.VocabParallelEmbedding.from_full(nn.Embedding(16, 8))
        head = tensor_parallel.ColumnParallelLinear.from_full(nn.Linear(8, 16))
        tokens = torch.zeros(5, dtype=torch.long)
        with OnTheHost("meta") as host:
            logits = head(embedding(tokens))
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits, tokens)
            loss.sum().backward()
    assert host.seen == []


MISTAKES = {
    "aten::_local_scalar_dense": lambda y: y if y.sum() > 0 else -y,
    "aten::lift_fresh": lambda y: y * torch.tensor([2.0]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen(name):
    with OnTheHost("cpu") as host:
        MISTAKES[name](torch.ones(3))
    assert name in host.seen

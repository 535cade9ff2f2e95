"""docs/training_loops.md, "Ranks with unequal token counts": its lines train as one device does.

Three ranks have 1, 3 and 0 unmasked tokens, in two micro-batches. One device takes the mean over
all tokens of the whole batch.
"""

import copy
import importlib
import re
from functools import partial
from importlib.util import find_spec
from unittest import mock

import claims
import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from launch import ROOT
from shared import assert_equal

import amp
import context_parallel
import ddp
import diloco
import expert_parallel
import flash_attention
import fsdp
import lora
import muon
import pipeline
import tensor_parallel
import zero

PAGE = (ROOT / "docs/training_loops.md").read_text()
SECTION = PAGE.partition("## Ranks with unequal token counts")[2].partition("\n## ")[0]
COUNT, TRANSFORMERS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
COUNT, MICRO_BATCHES = COUNT.split("for x, y in batches:\n")


def row_of(technique):
    """Return what the table says: the code that makes it, that of each micro-batch, and the end."""
    (row,) = re.findall(rf"^\| {technique}\b.*\|(.*)\|(.*)\|(.*)\|$", SECTION, re.MULTILINE)
    return ["\n".join(re.findall("`(.*?)`", cell)) for cell in row]


ALONE = mock.Mock()  # in the place of torch.distributed: no other rank has other tokens
VOCABULARY = 7
UNMASKED = {  # (rank, micro-batch): positions
    (0, 0): [4],
    (1, 0): [0],
    (1, 1): [2, 5],
}


def texts(rank, number, step, length=6):
    """Tokens (1, length) and the next tokens, of which few are unmasked."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=generator)
    targets = torch.full((1, length), -100)
    unmasked = UNMASKED.get((rank, number), [])
    targets[:, unmasked] = tokens[:, 1:][:, unmasked]
    return tokens[:, :-1], targets


def texts_of(ranks, step):
    return [texts(rank, number, step) for rank in ranks for number in range(2)]


def make_model(middle=None):
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, 6)
    middle = middle() if middle else nn.Linear(6, 6)
    head = nn.Linear(6, VOCABULARY)
    model = nn.Sequential(
        embedding,
        middle,
        nn.Tanh(),
        head,
    )
    return model.double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sum_of_losses(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def step_on_one_device(plain, optimizer, batches):
    """Step along the gradient of the mean over all unmasked tokens."""
    optimizer.zero_grad()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()


class Run:
    """A model in `names`, which the lines of the page train."""

    def __init__(self, technique, model, **names):
        self.make, self.backward, self.then = row_of(technique)
        self.module = model
        self.names = {"model": model, "torch": torch, "F": F, "dist": dist, **names}
        self.names["ranks"] = pool.world_size()

    def step(self, batches):
        names = self.names
        names["batches"] = batches
        if self.make:
            exec(self.make, names)
            self.make = re.sub("(?m)^(?!here|batches).*", "", self.make)  # once
        names.setdefault("optimizer", sgd(names["model"]))
        names["optimizer"].zero_grad()
        exec(COUNT, names)
        for x, y in names["batches"] if self.backward else []:
            names.update(x=x, y=y)
            logits, _, loss = MICRO_BATCHES.partition("loss = ")
            exec(logits.strip(), names)
            if not self.backward.startswith("loss ="):
                exec(f"loss = {loss}", names)
            exec(self.backward, names)
        exec(self.then, names)
        if "scaler" in names:
            names["scaler"].step(names["optimizer"])
            names["scaler"].update()
        else:
            names["optimizer"].step()


def own_texts(step):
    return texts_of([pool.rank()], step)


def all_texts(step):
    return texts_of(range(pool.world_size()), step)


def trains_as_one_device(run, plain, values, batches=own_texts, plain_optimizer=None, whole=None):
    """Train three steps. `values()` returns our parameters."""
    plain_optimizer = plain_optimizer or sgd(plain)
    with claims.default_group(pool.group()):
        for step in range(3):
            run.step(batches(step))
            step_on_one_device(plain, plain_optimizer, (whole or all_texts)(step))
            for ours, theirs in zip(values(), plain.parameters(), strict=True):
                assert_equal(ours, theirs, exact=False)


@pool.on(3)
def test_ddp():
    model = make_model()
    run = Run("ddp", model, DistributedDataParallel=ddp.DistributedDataParallel)
    trains_as_one_device(run, make_model(), model.parameters)


@pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero2, zero.Zero3])
@pool.on(3)
def test_zero(stage):
    model = make_model()
    run = Run("Zero1, Zero2, Zero3", model, Zero2=stage)

    def values():
        is_freed = stage is zero.Zero3
        state = run.names["optimizer"].module_state_dict() if is_freed else model.state_dict()
        return state.values()

    trains_as_one_device(run, make_model(), values)


@pool.on(3)
def test_fsdp():
    model = make_model()
    run = Run("fsdp", model, fully_shard=fsdp.fully_shard)
    trains_as_one_device(run, make_model(), lambda: fsdp.full_state_dict(model).values())


@pool.on(3)
def test_tensor_parallel():
    """All ranks have all texts, so the count is not all-reduced over them."""
    model = make_model()
    plan = {"0": "vocab", "3": "vocab"}
    run = Run("tensor_parallel", model, plan=plan, parallelize=tensor_parallel.parallelize)
    name = "vocab_parallel_cross_entropy"
    run.names[name] = getattr(tensor_parallel, name)
    run.names["dist"] = ALONE

    def values():
        return tensor_parallel.full_state_dict(model).values()

    trains_as_one_device(run, make_model(), values, batches=all_texts)


@pool.on(3)
def test_pipeline():
    layers = [slice(0, 1), slice(1, 3), slice(3, 4)][pool.rank()]
    stage = make_model()[layers]
    plain = make_model()
    plain_optimizer = sgd(plain)
    run = Run("pipeline", stage, stage=stage, sum_of_losses=sum_of_losses)
    run.names["Pipeline"] = pipeline.Pipeline
    run.names["dist"] = ALONE
    with claims.default_group(pool.group()):
        for step in range(3):
            batches = all_texts(step)
            run.names["inputs"] = torch.cat([x for x, _ in batches])
            run.names["targets"] = torch.cat([y for _, y in batches])
            run.step(batches)
            step_on_one_device(plain, plain_optimizer, batches)
            for ours, theirs in zip(stage.parameters(), plain[layers].parameters(), strict=True):
                assert_equal(ours, theirs, exact=False)


class Attention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.attention = attention

    def forward(self, x):  # (batch, time, 6)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.attention(q, k, v, causal=True).squeeze(1)


def long_texts(step):
    """Of 12 tokens. Rank 0 has positions 0, 1, 10, 11; rank 1 has 2, 3, 8, 9; rank 2 the rest."""
    batches = []
    for number, unmasked in enumerate([[0, 2], [3, 8]]):
        tokens, targets = texts(0, number, step, length=12)
        targets[:] = -100
        targets[:, unmasked] = tokens[:, unmasked]
        batches.append((tokens, targets))
    return batches


@pool.on(3)
def test_context_parallel():
    model = make_model(partial(Attention, context_parallel.ring_attention))
    plain = make_model(partial(Attention, flash_attention.naive_attention))
    run = Run(
        "context_parallel",
        model,
        DistributedDataParallel=ddp.DistributedDataParallel,
        positions=context_parallel.positions,
    )
    trains_as_one_device(run, plain, model.parameters, batches=long_texts, whole=long_texts)


@pool.on(3)
def test_expert_parallel():
    model = make_model(partial(expert_parallel.MoE, 6, 8, 6))
    plain = copy.deepcopy(model)
    run = Run("expert_parallel", model, expert_parallel=expert_parallel)

    def values():
        return expert_parallel.full_state_dict(model).values()

    trains_as_one_device(run, plain, values)


@pool.on(3)
def test_amp():
    model = make_model()
    scaler = amp.GradScaler("cpu", init_scale=1024.0)
    names = {"DistributedDataParallel": ddp.DistributedDataParallel, "scaler": scaler}
    trains_as_one_device(Run("amp", model, **names), make_model(), model.parameters)


@pool.on(3)
def test_lora():
    plain = make_model()
    model = copy.deepcopy(plain)
    torch.manual_seed(1)
    lora.inject_lora(plain, target_modules=["1", "3"])
    torch.manual_seed(1)
    names = {"DistributedDataParallel": ddp.DistributedDataParallel}
    names["inject_lora"] = lora.inject_lora
    trains_as_one_device(Run("lora", model, **names), plain, model.parameters)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pool.on(3)
def test_muon():
    model = make_model()
    plain = make_model()
    run = Run("muon", model, Muon=muon.Muon, matrices=[model[1].weight])
    theirs = torch.optim.Muon([plain[1].weight], lr=0.1)
    trains_as_one_device(run, plain, model.parameters, plain_optimizer=theirs)


@pool.on(3)
def test_diloco_that_exchanges_every_step():
    model = make_model()
    run = Run("diloco", model, DiLoCo=diloco.DiLoCo, optimizer=sgd(model))
    step = run.step

    def step_and_exchange(batches):
        step(batches)
        run.names["diloco"].step()

    run.step = step_and_exchange
    trains_as_one_device(run, make_model(), model.parameters)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pool.on(3)
def test_labels_of_transformers_are_counted_after_the_shift():
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    plain = transformers.GPT2LMHeadModel(config).double()
    module = copy.deepcopy(plain)
    batches = []
    for x, y in own_texts(0):
        labels = F.pad(y, (1, 0), value=3)  # a first label that the model's shift drops
        batches.append((F.pad(x, (1, 0), value=3), labels))
    with claims.default_group(pool.group()):
        model = ddp.DistributedDataParallel(module)
        names = {"model": model, "dist": dist, "ranks": 3, "batches": batches}
        exec(TRANSFORMERS, names)
    inputs, targets = (torch.cat(parts) for parts in zip(*all_texts(0), strict=True))
    logits = plain(F.pad(inputs, (1, 0), value=3)).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        # transformers computes the loss in fp32.
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)

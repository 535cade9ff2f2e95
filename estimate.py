"""Estimate the memory, traffic and time that a training run needs, and find plans that fit.

Each result is a sum of named parts. Each part has its equation, and its docstring names the paper.
A GPU that trains Ψ parameters in mixed precision with Adam holds, in bytes:

                                     made smaller by
    parameters   2Ψ  ████            zero3, tensor and pipeline parallelism, QLoRA (4 bits)
    gradients    2Ψ  ████            zero2, LoRA (only A and B have gradients)
    optimizer   12Ψ  ████████████    zero1, offload, LoRA: fp32 weights and both moments of Adam
    activations  sbh (34 + 5as/h)    a smaller micro-batch, recomputation, flash attention,
                 in each layer       tensor and context parallelism
    logits       14sbV               a smaller micro-batch, a vocabulary split over tp, or chunks
                                     of words (linear_cross_entropy.py), 8sb bytes for each word

The first three are the model states. A micro-batch has b sequences of s tokens. The model has l
layers, hidden size h, a attention heads, and V tokens in its vocabulary. Below, t is the number of
tensor-parallel GPUs. With N data-parallel GPUs and m micro-batches per step:

                     states per GPU              elements sent per GPU and step, × (N-1)/N
    ddp              16Ψ                         2Ψ
    zero1            4Ψ + 12Ψ/N                  2Ψ
    zero2            2Ψ + 14Ψ/N                  (m+1)Ψ
    zero2+offload    2Ψ                          (m+1)Ψ, and to host memory and back
    zero3, FSDP      16Ψ/N + gathered units      3mΨ
    zero3+offload    2Ψ/N + gathered units       3mΨ, and to host memory and back

The bytes follow from equations. Tests compare them with the papers' tables and with what the demos
of this project measure. The seconds are only approximate. They assume that the hardware achieves
the given speeds. A GPU typically achieves 40% of its advertised speed. Use the seconds to rank
plans, unless the plans are only a few percent apart.

Run:      python estimate.py --parameters 7e9 --gpus 8 --memory 80
          (without flags: the demos' model, beside what the demos measured)
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054; Ren et al. 2021, Offload, 2101.06840;
          Narayanan et al. 2021, 2104.04473; Korthikanti et al. 2022, 2205.05198;
          Chowdhery et al. 2022, PaLM, 2204.02311; Dettmers et al. 2023, QLoRA, 2305.14314;
          Liu et al. 2023, Ring Attention, 2310.01889; Douillard et al. 2025, 2501.18512
Mirrors:  DeepSpeed's estimate_zero2_model_states_mem_needs and …zero3…, for the model states
Left out: messages of experts; slow products of small matrices; data, evaluation, checkpoints
"""

# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///

import argparse
import bisect
import itertools
import json
import math
import os
import signal
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import NamedTuple

# --------------------------------------------------------------------------------------------------
# 1. The model states: ZeRO's three equations (Rajbhandari et al. 2020, sections 3 and 5).

# The ZeRO stage of each technique. From stage 1 on, data-parallel ranks split the optimizer state.
# From stage 2 on, they split gradients as well, and in stage 3 parameters as well. FSDP is stage 3.
# LoRA and QLoRA are assumed to run with it.
STAGES = {
    "ddp": 0,
    "zero1": 1,
    "zero2": 2,
    "zero2+offload": 2,
    "zero3": 3,
    "zero3+offload": 3,
    "lora": 3,
    "qlora": 3,
}
TECHNIQUES = tuple(STAGES)[:6]  # simplest first. LoRA and QLoRA do not train all parameters


def model_states(parameters, ranks, technique, mixed=True):
    """Return (parameters, gradients, optimizer), the bytes on each of `ranks` data-parallel GPUs.

    Mixed precision takes 2 + 2 + 12 bytes per parameter: 16-bit parameters, 16-bit gradients, and
    fp32 parameters with both moments of Adam. fp32 takes 4 + 4 + 8. Offload keeps gradients and
    optimizer state in host memory (ZeRO-Offload, section 3). The offload of zero.py differs: a rank
    keeps its shard of the gradients on the GPU. The units that zero3 gathers are not included, but
    footprint() adds them.
    """
    if technique not in TECHNIQUES or ranks < 1 or not 0 < parameters < math.inf:
        raise ValueError(
            f"{parameters=} and {ranks=} must be positive, and {technique=} one of {TECHNIQUES}"
        )
    weights = (2 if mixed else 4) * parameters
    gradients = weights
    optimizer = (12 if mixed else 8) * parameters
    if STAGES[technique] >= 1:
        optimizer /= ranks
    if STAGES[technique] >= 2:
        gradients /= ranks
    if STAGES[technique] >= 3:
        weights /= ranks
    if "offload" in technique:
        return weights, 0.0, 0.0
    return weights, gradients, optimizer


# --------------------------------------------------------------------------------------------------
# 2. The model: its parameters, and the bytes that depend on the batch.


@dataclass(frozen=True)
class GPT:
    """A GPT-2: learned positions, biases, MLPs of 4h, and a head that shares the embedding.

    `given` is the true number of parameters, if it differs from the number that follows from the
    sizes. In a mixture of experts, each block has `experts` MLPs and a router, and each token uses
    `top_k` of the MLPs. `ffn` is the hidden size of an MLP, divided by h.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    given: float | None = None
    experts: int = 1
    top_k: int = 1
    ffn: float = 4.0

    def __post_init__(self):
        sizes = (self.layers, self.hidden, self.heads, self.vocab, self.sequence, self.top_k)
        if min(sizes) < 1 or self.hidden % self.heads or self.top_k > self.experts:
            raise ValueError(
                f"{self}: sizes must be positive, the hidden size a multiple of the heads, "
                "and top_k at most the number of experts"
            )

    def scaled(self, count):
        """Scale a count that follows from the sizes, so that all parameters add up to `given`."""
        if self.given is None:
            return count
        from_sizes = replace(self, given=None)
        return self.given * (count / from_sizes.parameters())

    def block(self, tp=1, ep=1):
        """12h² + 13h: qkv 3h² + 3h, projection h² + h, norms 4h, MLP 8h² + 5h (with ffn = 4).

        With E experts there are E/ep MLPs and a router of hE. tp splits everything but the norms,
        the router, and the biases of row-parallel layers.
        """
        h = self.hidden
        qkv = (3 * h**2 + 3 * h) / tp
        projection = h**2 / tp + h
        norms = 4 * h
        mlp = self.ffn * (2 * h**2 + h) / tp + h
        mlps = mlp * self.experts / ep
        if self.experts > 1:
            mlps += h * self.experts
        return qkv + projection + norms + mlps

    def parameters(self, tp=1, pp=1, ep=1):
        """Vh + sh + l(12h² + 13h) + 2h. With pp, those of the first stage, which are the most."""
        h = self.hidden
        embedding = math.ceil(self.vocab / tp) * h
        positions = self.sequence * h
        blocks = math.ceil(self.layers / pp) * self.block(tp, ep)
        last_norm = 2 * h if pp == 1 else 0
        return self.scaled(embedding + positions + blocks + last_norm)

    def active_parameters(self):
        """The number of parameters that one token uses: those of a model with top_k experts."""
        active = replace(self, experts=self.top_k, given=None)
        return self.scaled(active.parameters())


MODELS = {
    "gpt2-345m": GPT(24, 1024, 16, 50257, 1024),
    "gpt3-175b": GPT(96, 12288, 96, 51200, 2048),
}


def gpt_of(parameters, sequence=2048, vocab=50257, experts=1, top_k=1):
    """A GPT with this many parameters and a common shape: l layers, l heads of size 128.

    Up to 16 experts are whole MLPs of 4h, as in Mixtral. More experts are smaller, so that the
    top_k that a token uses have 4h together, as in DeepSeek-V3 and Qwen3. A layer has about
    h²(4 + 2·ffn·experts) parameters, with h = 128l. This equation gives l, which is rounded to a
    multiple of 8.
    """
    ffn = 4 if experts <= 16 else 4 / top_k
    exact = (parameters / (128**2 * (4 + 2 * ffn * experts))) ** (1 / 3)
    layers = max(8, 8 * round(exact / 8))
    return GPT(
        layers,
        128 * layers,
        layers,
        vocab,
        sequence,
        given=parameters,
        experts=experts,
        top_k=top_k,
        ffn=ffn,
    )


def lora_states(model, ranks=1, r=8, quantize=False):
    """Model states with LoRA, or with QLoRA if `quantize`. FSDP splits all of them over `ranks`.

    A matrix of d × k gets r(d + k) trained elements. These are 4hr for qkv and 2hr for the
    projection, and (1 + ffn)hr for each of the two matrices of an MLP. QLoRA quantizes the matrices
    to NF4, which takes 4.127 bits with its scales (Dettmers et al. 2023, section 3). All else has
    16 bits.
    """
    h = model.hidden
    trained = model.layers * h * r * (6 + 2 * (1 + model.ffn) * model.experts)
    matrices = model.scaled(model.layers * h**2 * (4 + 2 * model.ffn * model.experts))
    frozen = 2 * model.parameters()
    if quantize:
        frozen -= (2 - 4.127 / 8) * matrices
    weights = frozen + 2 * trained
    return weights / ranks, 2 * trained / ranks, 12 * trained / ranks


def activations(
    model,
    micro_batch,
    tp=1,
    sequence_parallel=False,
    recompute="none",
    flash=False,
    element=2,
    masks=True,
):
    """Bytes that a tp rank keeps for the backward of one micro-batch (Korthikanti et al., table 2).

    recompute="full" keeps only the input of each layer. "selective" keeps all but the attention
    scores, and so does `flash` attention. `element` is the bytes per activation. `masks` is False
    if there is no dropout.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"{recompute=} must be none, selective or full")
    if micro_batch < 1 or tp < 1 or model.heads % tp:
        raise ValueError(f"{micro_batch=} must be positive; {tp=} must divide {model.heads} heads")
    sbh = model.sequence * micro_batch * model.hidden
    if recompute == "full":
        return model.layers * element * sbh
    # the inputs of both norms, of qkv and of the MLP; two dropout masks of a byte per element
    replicated = (4 * element + 2 * masks) * sbh
    if sequence_parallel:
        replicated /= tp
    # q, k, v, the projection's input; in each MLP the inputs of GELU and the second matrix
    split = (4 + 2 * model.ffn * model.top_k) * element * sbh
    # the output of softmax, and the output and mask of dropout: 5as²b bytes
    bytes_per_score = element * (1 + masks) + masks
    scores = model.heads * model.sequence**2 * micro_batch * bytes_per_score
    if flash or recompute == "selective":
        scores = 0
    return model.layers * (replicated + (split + scores) / tp)


def logits(model, micro_batch, tp=1, element=2, chunk_size=None):
    """14sbV/t bytes at the peak, in the backward of the loss.

    A logit takes 2 bytes in 16 bits, and its log-softmax takes 4 in fp32. The gradients of the
    log-softmax and of the logit are in fp32 and take 4 each. linear_cross_entropy.py holds those of
    `chunk_size` words only, twice in fp32.
    """
    if chunk_size:
        return 8 * model.sequence * micro_batch * chunk_size
    return (element + 12) * model.sequence * micro_batch * model.vocab / tp


# --------------------------------------------------------------------------------------------------
# 3. Traffic: the bytes that a rank sends. To reduce-scatter or all-gather n elements over N ranks,
# each rank sends n(N-1)/N elements. We call this one pass. An all-reduce is two passes.


def data_parallel_traffic(parameters, dp, technique="ddp", micro_batches=1, element=2, fp8=False):
    """Bytes per step, for passes over Ψ `parameters` (ZeRO, section 7).

    ddp and zero1 reduce once and gather once. zero2 reduces m times and gathers once. zero3 reduces
    m times and gathers 2m times. LoRA gathers the frozen parameters 2m times. Its gradients are too
    small to count. With fp8.py, zero3 gathers 8 bits: each gather is half a pass.
    """
    m = micro_batches
    passes_by_stage = (2, 2, m + 1, 3 * m)
    passes = passes_by_stage[STAGES[technique]]
    if "lora" in technique or (fp8 and "zero3" in technique):
        passes = 2 * m
    return passes * parameters * element * (dp - 1) / dp


def muon_costs(matrices, ranks, sharded=False, element=4):
    """Return the bytes of momentum that a rank holds, and those that it sends per step (muon.py).

    `matrices` is their number of elements. Muon sends gradients, and updates in bf16. Over FSDP's
    shards, momenta and updates travel in bf16, and FSDP's own messages are not included.
    """
    momentum = element * matrices / ranks
    sent = 4 * matrices / ranks if sharded else (element + 2) * matrices
    return momentum, sent * (ranks - 1) / ranks


# Bytes for each number that diloco.py sends. In int8, 256 numbers share a scale of 4 bytes.
SENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}


def diloco_costs(parameters, workers, sync_every, fragments=1, compress="fp32"):
    """Return (bytes that a worker holds besides, sends per step on average, sends at once).

    The outer parameters and their momentum take 8Ψ in fp32. Every H steps, P fragments are
    all-reduced, one after the other (Douillard et al. 2025).
    """
    sent = 2 * parameters * SENT_BYTES[compress] * (workers - 1) / workers
    return 8 * parameters, sent / sync_every, sent / fragments


def tensor_parallel_traffic(
    tokens,
    hidden,
    tp,
    blocks,
    embedding=1,
    head=1,
    element=2,
    sequence_parallel=False,
    recompute="none",
):
    """Bytes per micro-batch of bs `tokens`, on a rank with this many blocks, embeddings and heads.

    A block has 4 all-reduces of bsh elements, so it sends 8bsh(t-1)/t (Narayanan et al., section
    3.2). It has 2 more if its forward is computed again. Embedding and head have one each. The loss
    all-reduces 3 fp32 numbers per token.

    With sequence parallelism, column-parallel layers gather their inputs again in backward. The
    gradients of norms and of row-parallel biases are all-reduced: 6h in a block, 2h in the head.
    """
    passes = 12 if recompute == "full" else 8
    ends = embedding + head
    elements = (passes * blocks + 2 * ends) * tokens * hidden
    if sequence_parallel:
        elements += (2 * blocks + ends) * tokens * hidden
        elements += (12 * blocks + 4 * head) * hidden
    loss = 6 * head * tokens * max(4, element)
    return (elements * element + loss) * (tp - 1) / tp


def pipeline_traffic(tokens, hidden, neighbours, micro_batches, tied=0, element=2):
    """Bytes per step: bsh elements to each neighbour stage for each micro-batch of bs `tokens`.

    The first and the last stage also all-reduce the gradient of the embedding, which has `tied`
    elements. With two ranks, each sends every element once.
    """
    return (micro_batches * neighbours * tokens * hidden + tied) * element


def context_parallel_traffic(tokens, hidden, cp, layers, element=2, recompute="none"):
    """Bytes per micro-batch with `tokens` on this rank (ring attention, Liu et al. 2023).

    Keys and values are sent cp-1 times in forward. Backward sends them as often, together with
    their gradients, which are in fp32.
    """
    forwards = 2 if recompute == "full" else 1
    keys_and_values = 2 * element * (forwards + 1)
    gradients = 2 * max(4, element)
    size = keys_and_values + gradients
    return layers * size * tokens * hidden * (cp - 1)


# --------------------------------------------------------------------------------------------------
# 4. Batch and time.


def global_batch(micro_batch, accumulation, data_parallel):
    """Sequences per step. tp, pp and cp ranks compute different parts of the *same* sequences.

    So the common formula "accumulation × nodes × GPUs per node × micro-batch" is right only if
    every GPU is a data-parallel rank. For example, parallel_3d.py --tp 2 --pp 2 on 4 ranks has the
    same batch as one device.
    """
    return micro_batch * accumulation * data_parallel


def steps(samples, epochs, global_batch):
    """The number of optimizer steps. The last step may have a smaller batch."""
    return math.ceil(samples * epochs / global_batch)


def training_time(model, tokens, gpus, flops_per_gpu, recompute="none"):
    """Seconds for T tokens on n GPUs of X FLOP/s: 6ΨT/(nX), or 8ΨT/(nX) with full recomputation.

    This is the rule of thumb of Narayanan et al., section 5.1. It neglects attention's products QKᵀ
    and PV, which flops_per_token() adds.
    """
    operations = (8 if recompute == "full" else 6) * model.active_parameters()
    return operations * tokens / (gpus * flops_per_gpu)


PEAKS = {"A100": 312, "H100": 989, "H200": 989}  # dense TFLOP/s in 16 bits, by NVIDIA


def peak_of(device_name):
    """Return the peak of the GPU in TFLOP/s, or None if it is not known."""
    return next((PEAKS[gpu] for gpu in PEAKS if gpu in device_name), None)


def flops_per_token(model, recompute="none", frozen=False, fp8=False):
    """6Ψ + 12lhs (PaLM, appendix B), or 4Ψ + 12lhs if the matrices are frozen, as with LoRA.

    Forward takes 2Ψ for the matrices and 4hs per layer for attention. Backward takes twice as much,
    or 2Ψ for frozen matrices. recompute="selective" repeats the attention, "full" all of forward.
    With fp8, products with matrices count half: GPUs do them at twice the rate of 16 bits.
    """
    matrices = (1 if fp8 else 2) * model.active_parameters()
    attention = 4 * model.layers * model.hidden * model.sequence
    again = {"none": 0, "selective": attention, "full": matrices + attention}
    passes = 2 if frozen else 3
    return passes * matrices + 3 * attention + again[recompute]


# --------------------------------------------------------------------------------------------------
# 5. A plan: how to use the GPUs, and what it costs.


@dataclass(frozen=True)
class Machine:
    """The cluster, and the speeds that it achieves. The defaults are from Narayanan et al."""

    gpus_per_node: int = 8
    flops_per_gpu: float = 140e12  # floating-point operations per second
    intra: float = 300e9  # bytes per second that a GPU sends within its node
    inter: float = 25e9  # bytes per second that a GPU sends to other nodes
    host: float = 25e9  # bytes per second between a GPU and host memory


PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "working")


@dataclass(frozen=True)
class Plan:
    """A grid of dp × tp × pp × cp ranks, and how it trains. advise() adds `parts` and `times`."""

    dp: int = 1  # data-parallel ranks
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline stages
    technique: str = "ddp"  # one of TECHNIQUES, "lora" or "qlora"
    micro_batch: int = 1  # sequences
    accumulation: int = 1  # micro-batches per step
    recompute: str = "none"
    sequence_parallel: bool = False
    flash: bool = True
    element: int = 2  # bytes of a parameter, a gradient or an activation
    cp: int = 1  # context-parallel ranks
    ep: int = 1  # expert-parallel ranks, which are also data-parallel
    copies: int = 1  # of each shard (hybrid sharding)
    fp8: bool = False  # linear layers multiply 8-bit numbers, and zero3 gathers these (fp8.py)
    parts: dict = field(default_factory=dict)  # bytes per GPU, by name
    times: dict = field(default_factory=dict)  # seconds per step, by name

    @property
    def stage(self):
        return STAGES[self.technique]

    @property
    def replicas(self):
        """The number of ranks with the same parameters. ZeRO splits the states over them."""
        return self.dp * self.cp

    @property
    def shards(self):
        return self.replicas // self.copies

    @property
    def memory(self):
        return sum(self.parts.values())

    @property
    def seconds(self):
        return sum(self.times.values())


def states_of(model, plan):
    """Return (parameters, gradients, optimizer), bytes on the fullest rank."""
    ranks = plan.shards
    if "lora" in plan.technique:
        return lora_states(model, ranks, quantize=plan.technique == "qlora")
    mixed = plan.element == 2
    with_all_experts = model.parameters(plan.tp, plan.pp)
    with_own_experts = model.parameters(plan.tp, plan.pp, plan.ep)
    # If ZeRO splits a state, the rank has 1/N of the state of all experts: expert parallelism gives
    # it E/ep experts, which ZeRO then splits over N/ep ranks. If ZeRO does not split the state, the
    # rank has all of the state of its own E/ep experts. The smaller number is the right one.
    split = model_states(with_all_experts, ranks, plan.technique, mixed)
    unsplit = model_states(with_own_experts, 1, "ddp", mixed)
    return list(map(min, split, unsplit))


def footprint(model, plan):
    """Return {part: bytes} of the fullest rank."""
    sequence = math.ceil(model.sequence / plan.cp)
    local = replace(model, sequence=sequence)
    flash = plan.flash or plan.cp > 1  # ring attention keeps no scores either
    inputs = (local, plan.micro_batch, plan.tp, plan.sequence_parallel)
    kept = activations(*inputs, plan.recompute, flash, plan.element)
    kept *= math.ceil(model.layers / plan.pp) / model.layers
    at_head = logits(local, plan.micro_batch, plan.tp, plan.element)
    # With 1F1B the first stage keeps min(pp, m) micro-batches. The last stage keeps one micro-batch
    # and its logits. The fuller one counts.
    first_stage = kept * min(plan.pp, plan.accumulation)
    if first_stage > kept + at_head:
        kept = first_stage
        at_head = 0.0
    working = 0.0
    if plan.recompute == "full":  # one layer at a time is computed again
        all_layers = activations(*inputs, "none", flash, plan.element)
        working += all_layers / model.layers
    if plan.replicas > 1 and plan.stage == 3:
        # fsdp.py gathers the parameters of two units at a time, and holds the gradients of three if
        # they are trained.
        embedding = model.vocab * model.hidden / plan.tp
        unit = max(model.block(plan.tp, plan.ep), embedding)
        units = 2 if "lora" in plan.technique else 5
        working += units * plan.element * unit
    parts = (*states_of(model, plan), kept, at_head, working)
    return dict(zip(PARTS, parts, strict=True))


def traffic(model, plan):
    """Return {axis: bytes per step} of the rank that sends most, without the experts' messages."""
    t = plan.tp
    m = plan.accumulation
    h = model.hidden
    layers = math.ceil(model.layers / plan.pp)
    tokens = plan.micro_batch * model.sequence / plan.cp
    how = {"element": plan.element, "recompute": plan.recompute}
    split = plan.sequence_parallel
    # Along tp, the last stage sends most: it has the head. It has the embedding only if pp is 1.
    tp = tensor_parallel_traffic(
        tokens, h, t, layers, embedding=plan.pp == 1, sequence_parallel=split, **how
    )
    cp = context_parallel_traffic(tokens, h / t, plan.cp, layers, **how)
    between_stages = tokens / t if split else tokens
    pp = 0.0
    if plan.pp > 1:  # the first and the last stage
        tied = math.ceil(model.vocab / t) * h
        pp = pipeline_traffic(between_stages, h, 1, m, tied, plan.element)
    if plan.pp > 2:  # a stage in the middle
        middle = pipeline_traffic(between_stages, h, 2, m, 0, plan.element)
        pp = max(pp, middle)
    held = model.parameters(t, plan.pp, plan.ep)
    dp = data_parallel_traffic(held, plan.shards, plan.technique, m, plan.element, plan.fp8)
    # Hybrid sharding also all-reduces each gradient of a shard over its copies.
    copies = m * data_parallel_traffic(held / plan.shards, plan.copies, element=plan.element)
    return {"tp": m * tp, "cp": m * cp, "pp": pp, "dp": dp, "copies": copies}


def step_times(model, plan, machine):
    """Return {part: seconds of a step}. "dp" is only the time that computation does not hide.

    A stage idles for (pp-1)/m of its computing time (Narayanan et al., section 2.2). Rank numbers
    vary fastest along tp, then cp, dp and pp, as in parallel_3d.py, which has no cp. A group on
    several nodes sends at the speed of the network, `inter`.
    """
    gpus = plan.replicas * plan.tp * plan.pp
    sequences = global_batch(plan.micro_batch, plan.accumulation, plan.dp)
    operations = flops_per_token(model, plan.recompute, "lora" in plan.technique, plan.fp8)
    compute = operations * sequences * model.sequence / (gpus * machine.flops_per_gpu)
    times = {"compute": compute}
    width = {  # how many consecutive ranks contain a group
        "tp": plan.tp,
        "cp": plan.tp * plan.cp,
        "dp": plan.tp * plan.shards,
        "copies": plan.tp * plan.replicas,
        "pp": gpus,
    }
    for axis, sent in traffic(model, plan).items():
        is_in_node = width[axis] <= machine.gpus_per_node
        times[axis] = sent / (machine.intra if is_in_node else machine.inter)
    busy = compute + times["tp"] + times["cp"]
    times["bubble"] = busy * (plan.pp - 1) / plan.accumulation
    times["dp"] = max(0.0, times["dp"] + times.pop("copies") - time_to_hide(plan, compute))
    if "offload" in plan.technique:
        # 32 bytes per parameter: the gradient goes to the host and the parameter comes back, 2 + 2.
        # Adam on the host reads the gradient, the fp32 parameter and both moments, 2 + 12. It
        # writes the 16-bit parameter, the fp32 parameter and both moments, 2 + 12.
        shard = model.parameters(plan.tp, plan.pp) / plan.replicas
        times["host"] = 32 * shard / machine.host
    return times


def time_to_hide(plan, compute):
    """Seconds of computation that can hide the messages of data-parallel ranks.

    Backward is 2/3 of the computation. zero3 communicates in forward and backward, zero2 in
    backward, and the others in the backward of the last micro-batch.
    """
    if plan.stage == 3:
        return compute
    backward = 2 / 3 * compute
    return backward if plan.stage == 2 else backward / plan.accumulation


# --------------------------------------------------------------------------------------------------
# 6. Advice: the techniques in the order in which to try them; then every plan that fits.

USABLE = 0.94  # the rest of a GPU's memory is for the CUDA context and fragmentation


class Rule(NamedTuple):
    technique: str
    when: str  # the condition under which to try it
    change: dict  # new values for fields of the plan
    keeps: bool = True  # whether the rules below build on the change


def rules(model, gpus, micro_batch, gpus_per_node=8):
    """Return the rules to try, in this order, if the memory is too small."""
    tp = math.gcd(gpus, gpus_per_node, model.heads)
    pp = math.gcd(gpus, model.layers)
    cp = math.gcd(gpus, gpus_per_node)
    ep = math.gcd(gpus, model.experts)
    accumulated = {"micro_batch": 1, "accumulation": micro_batch}
    tensor = {"tp": tp, "dp": gpus // tp, "sequence_parallel": tp > 1}
    # dp is smaller, so the same batch takes more micro-batches. 1F1B keeps up to pp of them.
    pipeline = {"pp": pp, "dp": gpus // pp, "accumulation": micro_batch * pp}
    context = {"cp": cp, "dp": gpus // cp}
    return [
        Rule("16 bits, fp32 masters", "always, on a GPU", {"element": 2}),
        Rule("flash attention", "always, on a GPU", {"flash": True}),
        Rule("micro-batch 1, accumulated", "activations do not fit", accumulated),
        Rule("zero1", "the optimizer does not fit", {"technique": "zero1"}),
        Rule("zero2", "gradients do not fit", {"technique": "zero2"}),
        Rule("zero2+offload", "the host has memory", {"technique": "zero2+offload"}, False),
        Rule("zero3, FSDP", "parameters do not fit", {"technique": "zero3"}),
        Rule("full recomputation", "activations do not fit", {"recompute": "full"}),
        Rule("LoRA, r = 8", "fine-tuning is enough", {"technique": "lora"}, False),
        Rule("QLoRA, r = 8", "LoRA's frozen weights do not fit", {"technique": "qlora"}, False),
        Rule(f"tensor parallel, {tp}", "a layer does not fit", tensor, False),
        Rule(f"pipeline parallel, {pp}", "the network is slow", pipeline, False),
        Rule(f"context parallel, {cp}", "a sequence does not fit", context, False),
        Rule(f"expert parallel, {ep}", "experts do not fit", {"ep": ep}, False),
    ]


def savings(model, gpus, micro_batch, gpus_per_node=8):
    """Return [(rule, bytes that it saves, bytes then held)] for all rules that change the plan."""
    plan = Plan(dp=gpus, micro_batch=micro_batch, flash=False, element=4)
    held = sum(footprint(model, plan).values())
    rows = [(Rule(f"ddp in fp32, micro-batch {micro_batch}", "it fits", {}), 0.0, held)]
    for rule in rules(model, gpus, micro_batch, gpus_per_node):
        changed = replace(plan, **rule.change)
        if changed == plan:
            continue  # such as tensor parallelism over 1 rank
        then = sum(footprint(model, changed).values())
        rows.append((rule, held - then, then))
        if rule.keeps:
            plan = changed
            held = then
    return rows


def divisors(n, most):
    """The divisors of n up to `most`."""
    return [k for k in range(1, most + 1) if n % k == 0]


def grids(model, gpus):
    """Yield (dp, tp, pp, cp) for every grid of `gpus` that can train the model."""
    tps = divisors(math.gcd(gpus, model.heads), model.heads)
    pps = divisors(gpus, model.layers)
    cps = divisors(gpus, 128)  # 128 only limits the search
    for tp, pp, cp in itertools.product(tps, pps, cps):
        dp, left = divmod(gpus, tp * pp * cp)
        can_cut = cp == 1 or model.sequence % (2 * cp) == 0  # zigzag needs 2cp equal chunks
        if left == 0 and can_cut:
            yield dp, tp, pp, cp


def plans_to_try(model, gpus, techniques, gpus_per_node):
    """Yield a Plan for each grid, technique and recomputation. Its batch is not chosen yet.

    Hybrid sharding splits the parameters over the ranks of a node.
    """
    for dp, tp, pp, cp in grids(model, gpus):
        nodes, left = divmod(dp * cp * tp, gpus_per_node)
        sequence_parallel = tp > 1 and model.sequence % tp == 0
        for technique in techniques:
            if dp * cp == 1 and technique not in ("ddp", "zero2+offload", "lora", "qlora"):
                continue  # there is nothing to split
            if tp * pp > 1 and "lora" in technique:
                continue  # lora_states() does not know tp and pp
            for recompute in ("none", "full"):
                plan = Plan(dp, tp, pp, technique, 1, 1, recompute, sequence_parallel, cp=cp)
                yield plan
                if technique == "zero3" and nodes > 1 and left == gpus_per_node % tp == 0:
                    yield replace(plan, copies=nodes)


def fastest(model, plan, memory, batch, machine):
    """Return the plan with the micro-batch that fits and is fastest, or None if none fits.

    If several are equally fast by our equations, min() returns the first, which is the largest. In
    practice it is faster, because its matrix products are larger.
    """
    fitting = []
    for micro_batch in range(64, 0, -1):
        accumulation, left = divmod(batch, plan.dp * micro_batch)
        if left == 0:
            sized = replace(plan, micro_batch=micro_batch, accumulation=accumulation)
            sized = replace(sized, parts=footprint(model, sized))
            if sized.memory <= USABLE * memory:
                fitting.append(replace(sized, times=step_times(model, sized, machine)))
    return min(fitting, key=lambda plan: plan.seconds, default=None)


def advise(model, gpus, memory, batch=None, fp8=False, **speeds):
    """Return [Plan], fastest first, for `gpus` of `memory` bytes. `speeds` are fields of Machine.

    `batch` is the number of sequences per step, by default about 512. All plans use flash
    attention, so selective recomputation would save nothing and is not tried. LoRA and QLoRA are
    tried if no plan fits without offload.
    """
    if memory < 1e4 or gpus < 1:
        raise ValueError(f"{gpus=} must be positive, and {memory=} in bytes: 80e9 for 80 GB")
    batch = batch or gpus * math.ceil(512 / gpus)
    machine = Machine(**speeds)

    def fitting_plans(techniques):
        tried = plans_to_try(model, gpus, techniques, machine.gpus_per_node)
        plans = [fastest(model, replace(p, fp8=fp8), memory, batch, machine) for p in tried]
        return [plan for plan in plans if plan is not None]

    plans = fitting_plans(TECHNIQUES)
    if all("offload" in plan.technique for plan in plans):
        plans += fitting_plans(("lora", "qlora"))

    def speed_then_simplicity(plan):
        technique = list(STAGES).index(plan.technique)
        return plan.seconds, technique, plan.tp * plan.pp * plan.cp

    return sorted(plans, key=speed_then_simplicity)


# --------------------------------------------------------------------------------------------------
# Demo.

DEMO = GPT(4, 192, 6, 256, 64, given=1878144)  # the demos' language_model(), which trains in fp32
# Bytes on each of the 2 ranks of a demo: parameters, gradients, optimizer, sent per step.
MEASURED = {
    "ddp": (7512576, 7512576, 15025360, 7512576),
    "Zero1": (7512576, 7512576, 7512784, 7512628),
    "Zero2": (7512576, 3756288, 7512784, 7512628),
    "Zero3": (3756288, 3756288, 7512784, 11268916),
    "fsdp": (3756288, 3756288, 7512784, 11268864),
}
FLAGS = {  # type and help, with units
    "gpus": (int, "number of GPUs (default 8)"),
    "memory": (float, "memory of each GPU, in GB of 1e9 bytes (default 80)"),
    "sequence": (int, "tokens per sequence (default: the model's)"),
    "experts": (int, "experts per block, for a mixture of experts (default 1)"),
    "top-k": (int, "experts that each token uses (default 1)"),
    "tokens": (float, "tokens to train on (default 300e9)"),
    "batch": (int, "sequences per step, on all GPUs together (default about 512)"),
}
SPEEDS = {  # the fields of Machine
    "gpus_per_node": "number of GPUs in a node",
    "flops_per_gpu": "floating-point operations per second of a GPU",
    "intra": "bytes per second that a GPU sends within its node",
    "inter": "bytes per second that a GPU sends to other nodes",
    "host": "bytes per second between a GPU and host memory",
}
LEGEND = """
params, grads      parameters and gradients, 2 bytes per parameter each
optimizer          fp32 parameters and both moments of Adam, 12 bytes per parameter
= states           the model states: the sum of these three
activations        what forward keeps for backward; in the first table for a micro-batch of one
                   sequence, with flash attention
logits             the head's output and its gradients, while the loss is computed
working            the units that zero3, lora and qlora have gathered, their gradients, and the
                   layer that full recomputation repeats
room for           the largest micro-batch that fits. The longest sequence in tokens, and the
                   largest model in M parameters (millions), with a micro-batch of one sequence.
saves, then held   memory that the technique saves on each GPU, and memory that a GPU then holds.
                   Each line builds on the lines above it, except on those in parentheses.
dp × tp × pp × cp  data-, tensor-, pipeline- and context-parallel ranks. ZeRO splits over dp · cp.
technique          zero3, 8 ×: hybrid sharding, over the GPUs of a node, with 8 copies of the shards
recompute          full: layers keep only their inputs, and forward is computed again in backward
micro-batch × m    sequences that a rank computes at once, and the number of micro-batches per step
memory, step       what the fullest GPU holds, and the seconds per step, which are the sum of:
                   compute; messages along tp, cp and pp; messages along dp that computation does
                   not hide; bubble (pipeline stages wait for each other); host (ZeRO-Offload)
two sites          each trains as the first plan, and they exchange gradients (ddp) or, every H
                   steps, pseudo-gradients (diloco.py) in P fragments with a delay of D steps
outer              bytes of diloco's outer parameters and their momentum, for all of the model
sent per step      bytes that a site sends on average, and what it sends at once
Ψ, T, n, X         parameters, tokens, GPUs, floating-point operations per second of each GPU
GB, MB             1e9 and 1e6 bytes"""


def size(n):
    return f"{n / 1e9:,.2f} GB" if abs(n) >= 1e9 else f"{n / 1e6:,.1f} MB"


def compare():
    """Print estimates beside the demos' measurements. Return the largest relative difference."""
    worst = 0.0
    for name, measured in MEASURED.items():
        technique = name.lower().replace("fsdp", "zero3")
        psi = DEMO.parameters()
        states = model_states(psi, 2, technique, mixed=False)
        estimates = (*states, data_parallel_traffic(psi, 2, technique, element=4))
        for estimated, found in zip(estimates, measured, strict=True):
            worst = max(worst, abs(estimated / found - 1))
        params, grads, state, sent = (f"{n / 1e6:.1f}" for n in estimates)
        *held_in_demo, sent_in_demo = (f"{n / 1e6:.1f}" for n in measured)
        held = f"params {params} MB   grads {grads} MB   optimizer {state} MB"
        print(f"held/rank   {held}      ({name} measured {' / '.join(held_in_demo)})")
        print(f"sent/rank   {sent} MB per step      (measured {sent_in_demo})")
    print(f"vs measured {'' if worst < 0.01 else 'NOT '}within 1%: {worst:.3%}\n")
    return worst


def room(model, technique, gpus, memory):
    """Return the largest micro-batch, sequence and model (in millions) that fit with dp alone."""

    def is_full(model, micro_batch=1):
        plan = Plan(gpus, technique=technique, micro_batch=micro_batch)
        return sum(footprint(model, plan).values()) > USABLE * memory

    def is_full_with_sequence(n):
        return is_full(replace(model, sequence=n))

    def is_full_with_millions(n):
        shape = (model.sequence, model.vocab, model.experts, model.top_k)
        return is_full(gpt_of(1e6 * n, *shape))

    # The numbers start at 1, so the index of the first that does not fit is the last that fits.
    numbers = range(1, 2**40)
    tests = (partial(is_full, model), is_full_with_sequence, is_full_with_millions)
    return [bisect.bisect_left(numbers, True, key=test) for test in tests]


GIGABIT = 125e6  # bytes per second
SITES = {  # two sites that are connected by 1 Gbit/s: (compress, sync_every, fragments, delay)
    "ddp in bf16": ("bf16", 1, 1, 0),
    "diloco, H = 100": ("fp32", 100, 1, 0),
    "diloco, H = 100, int8": ("int8", 100, 1, 0),
    "diloco, H = 100, int8, P = 4, D = 5": ("int8", 100, 4, 5),
}


def time_between_sites(compute, bandwidth, costs, sync_every, fragments=1, delay=0):
    """Seconds per step, if a step of a site takes `compute`, and diloco_costs() gave `costs`.

    A site waits for the part of a message that `delay` steps do not hide. On average, the network
    must keep up. DDP is the case sync_every=1, if no message is hidden.
    """
    _, average, at_once = costs
    wait = max(0.0, at_once / bandwidth - delay * compute)
    return max(compute + wait * fragments / sync_every, average / bandwidth)


def between_two_sites(parameters, plan):
    """Return {name: (bytes held besides, sent per step, sent at once, seconds per step)}."""
    rows = {}
    for name, (compress, sync_every, fragments, delay) in SITES.items():
        costs = diloco_costs(parameters, 2, sync_every, fragments, compress)
        when = (sync_every, fragments, delay)
        seconds = time_between_sites(plan.seconds, GIGABIT, costs, *when)
        held = costs[0] if sync_every > 1 else 0
        rows[name] = (held, *costs[1:], seconds)
    return rows


def show_sites(sites):
    titles = ("outer", "sent per step", "at once", "step")
    print(f"\n{'two sites, 1 Gbit/s':36}", *(f"{title:>14}" for title in titles))
    for name, (*sizes, seconds) in sites.items():
        print(f"{name:36}", *(f"{size(n):>14}" for n in sizes), f"{seconds:>12.3g} s")


def show(techniques, saved, plans):
    """Print three tables: memory of each technique, memory that the rules save, and plans."""
    titles = ("params", "grads", "optimizer", "= states", "activations", "logits", "working")
    room_titles = ("micro-batch", "sequence", "M parameters")
    print("a GPU holds   ", *(f"{title:>12}" for title in titles), end="   room for:")
    print("".join(f"{title:>14}" for title in room_titles))
    for name, row in techniques.items():
        *states, kept, at_head, working = row["parts"].values()
        cells = (*states, sum(states), kept, at_head, working)
        limits = "".join(f"{n:>14,}" for n in row["room"])
        print(f"{name:14}", *(f"{size(n):>12}" for n in cells), " " * 11, limits)
    print(f"\n{'to save memory, in this order':31}{'if':40}{'saves':>12}  {'then held':>12}")
    for rule, saves, held in saved:
        name = rule.technique if rule.keeps else f"({rule.technique})"
        print(f"{name:31}{rule.when:40}{size(saves):>12}  {size(held):>12}")
    print("\ndp × tp × pp × cp  technique      recompute  micro-batch × m     memory  step")
    for p in plans[:8]:
        grid = f"{p.dp} × {p.tp} × {p.pp} × {p.cp}"
        batch = f"{p.micro_batch} × {p.accumulation}"
        technique = p.technique if p.copies == 1 else f"{p.technique}, {p.copies} ×"
        row = f"{grid:18} {technique:14} {p.recompute:10} {batch:15} {size(p.memory):>10}"
        shares = []
        for seconds, name in sorted(((n, name) for name, n in p.times.items()), reverse=True):
            if seconds > p.seconds / 200:
                shares.append(f"{name} {seconds / p.seconds:.0%}")
        print(f"{row}  {p.seconds:.3g} s: {', '.join(shares)}")
    if not plans:
        print("No plan fits. Use more GPUs, more memory, a smaller batch or shorter sequences.")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}\n")


def parse_arguments():
    """Return {name: value} of the flags on the command line."""
    parser = Parser(description=__doc__.partition("\n")[0], argument_default=argparse.SUPPRESS)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", choices=MODELS, help="(default: the model of the demos)")
    model.add_argument("--parameters", type=float, help="number of parameters, such as 7e9")
    for name, (kind, description) in FLAGS.items():
        parser.add_argument(f"--{name}", type=kind, help=description)
    for speed in fields(Machine):
        default = f"{speed.default:g}".replace("e+", "e")
        description = f"{SPEEDS[speed.name]} (default {default})"
        flag = f"--{speed.name.replace('_', '-')}"
        parser.add_argument(flag, type=speed.type, help=description)
    fp8 = "linear layers multiply 8-bit numbers, with fp8.py (flops-per-gpu is of 16 bits)"
    parser.add_argument("--fp8", action="store_true", help=fp8)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    flags = vars(parser.parse_args())
    for name, value in flags.items():
        if type(value) in (int, float) and not 1e-4 <= value < 1e18:
            parser.error(f"--{name.replace('_', '-')} {value}: must be from 1e-4 to 1e18")
    return flags


def model_of(flags):
    names = ("sequence", "experts", "top_k")
    given = {name: flags[name] for name in names if name in flags}
    if "parameters" in flags:
        return gpt_of(flags["parameters"], **given)
    model = MODELS[flags["model"]] if "model" in flags else DEMO
    return replace(model, **given)


def report(flags):
    """Print the tables, or JSON. Return the exit status, 1 if an estimate is over 1% off."""
    model = model_of(flags)
    psi = model.parameters()
    gpus = flags.get("gpus", 2 if model == DEMO else 8)
    memory = flags.get("memory", 80.0)
    tokens = flags.get("tokens", 300e9)
    speeds = {speed.name: flags[speed.name] for speed in fields(Machine) if speed.name in flags}
    machine = Machine(**speeds)
    plans = advise(model, gpus, 1e9 * memory, flags.get("batch"), "fp8" in flags, **speeds)
    saved = savings(model, gpus, max(1, 512 // gpus), machine.gpus_per_node)
    techniques = {}
    for name in STAGES:
        parts = footprint(model, Plan(gpus, technique=name))
        techniques[name] = {"parts": parts, "room": room(model, name, gpus, 1e9 * memory)}
    days = []
    for recompute in ("none", "full"):
        seconds = training_time(model, tokens, gpus, machine.flops_per_gpu, recompute)
        days.append(seconds / 86400)
    if "json" in flags:
        page = {"model": asdict(model), "parameters": psi, "gpus": gpus, "days": days}
        page |= {"techniques": techniques, "savings": saved, "plans": []}
        for plan in plans:
            bound = max(plan.times, key=plan.times.get)  # the part of the step that takes longest
            sums = {"memory": plan.memory, "seconds": plan.seconds, "bound": bound}
            page["plans"].append(asdict(plan) | sums)
        page["sites"] = between_two_sites(psi, plans[0]) if plans else {}
        print(json.dumps(page))
        return 0
    world = f"{gpus} rank{'s' * (gpus > 1)} · {psi / 1e6:,.1f}M parameters"
    shape = f"{model.layers} layers of {model.hidden}, sequences of {model.sequence}"
    print(f"estimate · {world} · {shape}, {gpus} × {memory:g} GB\n")
    worst = compare() if (model, gpus) == (DEMO, 2) else 0.0
    show(techniques, saved, plans)
    if plans:
        show_sites(between_two_sites(psi, plans[0]))
    print(f"\n{tokens / 1e9:,g}e9 tokens take 6ΨT/(nX) = {days[0]:,.1f} days", end="")
    print(f", or 8ΨT/(nX) = {days[1]:,.1f} days with full recomputation")
    print(LEGEND)
    return int(worst > 0.01)


def main():
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun only the first rank prints
    try:
        return report(parse_arguments())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if `head` closes the pipe
    sys.exit(main())

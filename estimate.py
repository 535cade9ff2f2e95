"""Estimate: what training a model needs in memory, traffic and time before it starts, and which technique fits it.

What a GPU holds while it trains Ψ parameters in mixed precision with Adam, and what makes each part smaller:

    parameters   2Ψ  ████            zero3 · tensor and pipeline parallel · QLoRA: 4 bits
    gradients    2Ψ  ████            zero2 · LoRA: of A and B only
    optimizer   12Ψ  ████████████    zero1 · offload to the host · LoRA       (fp32 weights, both moments of Adam)
    activations      sbh (34 + 5as/h) in each layer: micro-batch · recomputation · flash attention · tensor parallel
    logits           14sbV at their peak: micro-batch · a vocabulary that is split

    states per GPU, N of them                    sent per GPU and step with m micro-batches, elements times (N-1)/N
    ddp              16Ψ                         2Ψ
    zero1            4Ψ + 12Ψ/N                  2Ψ
    zero2            2Ψ + 14Ψ/N                  (m+1)Ψ
    zero2+offload    2Ψ                          (m+1)Ψ, and to host memory and back
    zero3, FSDP      16Ψ/N, units at work        3mΨ
    zero3+offload    2Ψ/N, units at work         3mΨ, and the same

Bytes are derived, and tested against papers' tables and what is measured here. Seconds are a model, of speeds that are
given (those achieved: 40% of what is sold); it ranks plans, though not those a few percent apart.

Run:      python estimate.py --parameters 7e9 --gpus 8 --memory 80   (no flags: the demos' model, beside them)
Papers:   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054; Ren et al. 2021, ZeRO-Offload, 2101.06840; Narayanan et al.
          2021, 2104.04473; Korthikanti et al. 2022, 2205.05198; Chowdhery et al. 2022, PaLM, 2204.02311
Mirrors:  deepspeed.runtime.zero's estimate_zero2_model_states_mem_needs and …zero3…, for the states
Left out: experts, context parallelism; small products, which run slower; data, evaluation, checkpoints
"""

import argparse
import bisect
import inspect
import itertools
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial

# ---------------------------------------------------------------------------------------------------------------------
# 1. The formulas: memory, then batch and time.

TECHNIQUES = (
    "ddp",
    "zero1",
    "zero2",
    "zero2+offload",
    "zero3",
    "zero3+offload",
)  # the simplest first


@dataclass(frozen=True)
class GPT:
    """A GPT-2: learned positions, biases, MLPs of 4h, tied embedding; `given` parameters if known otherwise."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    given: float | None = None

    def __post_init__(self):
        if (
            min(self.layers, self.hidden, self.heads, self.vocab, self.sequence) < 1
            or self.hidden % self.heads
        ):
            raise ValueError(
                f"{self}: sizes must be positive, and the hidden size a multiple of the heads"
            )

    def block(self, tp=1):
        """12h² + 13h: qkv 3h² + 3h, projection h² + h, MLP 8h² + 5h, norms 4h. Norms and row biases are not split."""
        return (12 * self.hidden**2 + 7 * self.hidden) / tp + 6 * self.hidden

    def parameters(self, tp=1, pp=1):
        """Vh + s·h + l(12h² + 13h) + 2h; cut tp × pp ways those of the rank with most, on the first stage."""
        rows = -(-self.vocab // tp) + self.sequence + 2 * (pp == 1)
        count = rows * self.hidden + -(-self.layers // pp) * self.block(tp)
        return (
            count
            if self.given is None
            else self.given * (count / replace(self, given=None).parameters())
        )


MODELS = {"gpt2-345m": GPT(24, 1024, 16, 50257, 1024), "gpt3-175b": GPT(96, 12288, 96, 51200, 2048)}


def gpt_of(parameters, sequence=2048, vocab=50257):
    """A GPT of that many parameters in a usual shape: heads of 128, as many as layers, so 12 · 128² · l³."""
    layers = max(8, 8 * round((parameters / (12 * 128**2)) ** (1 / 3) / 8))
    return GPT(layers, 128 * layers, layers, vocab, sequence, given=parameters)


def model_states(parameters, ranks, technique, mixed=True):
    """-> bytes of parameters, gradients, optimizer on each of `ranks` data-parallel GPUs (ZeRO, §3 and §5), with Adam.

    Mixed precision: 2 + 2 bytes, and 12 of fp32 weights and moments; else 4 + 4 + 8 in fp32: 16 in any case. Offload
    moves gradients as well (ZeRO-Offload §3; zero.py's keeps its shard of them, 2Ψ/N). Not in here: what zero3 gathers
    for a moment; gradients copied to buckets, 2Ψ more in DDP without gradient_as_bucket_view.
    """
    if technique not in TECHNIQUES or ranks < 1 or not 0 < parameters < math.inf:
        raise ValueError(
            f"{parameters=}, {ranks=} must be positive, {technique=} one of {', '.join(TECHNIQUES)}"
        )
    stage, sizes = (
        int(technique[4]) if technique.startswith("zero") else 0,
        (2, 2, 12) if mixed else (4, 4, 8),
    )
    held = [
        parameters * size / (ranks if stage >= since else 1)
        for size, since in zip(sizes, (3, 2, 1), strict=True)
    ]
    return (held[0], 0.0, 0.0) if technique.endswith("offload") else tuple(held)


def lora_states(model, ranks=1, r=8, quantize=False):
    """The same with LoRA, r(d + k) trained for each matrix d × k, 16hr in a block; `quantize`: QLoRA. FSDP cuts all."""
    psi, trained = model.parameters(), 16 * model.hidden * r * model.layers
    matrices = 12 * model.layers * model.hidden**2 * psi / replace(model, given=None).parameters()
    # NF4 and its scales are 4.127 bits (Dettmers et al. 2023, §3); embeddings and norms stay in 16
    frozen = 2 * psi - (2 - 4.127 / 8) * matrices * quantize
    return (frozen + 2 * trained) / ranks, 2 * trained / ranks, 12 * trained / ranks


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
    """Bytes of all layers for one micro-batch, on each of tp ranks (Korthikanti et al. 2022, table 2).

    sbh elements: 4, inputs of norms and first matrices, which all ranks have unless the sequence is split; and q, k, v,
    inputs of projection, GELU, last matrix, 3 + 1 + 4 + 4, which are split. Two masks of sbh bytes. Scores, as²b each:
    softmax, after dropout, mask. "full" keeps a layer's input, "selective" all but scores, as does flash attention.
    """
    if (
        recompute not in ("none", "selective", "full")
        or micro_batch < 1
        or tp < 1
        or model.heads % tp
    ):
        raise ValueError(
            f"{recompute=}: none, selective or full; {micro_batch=}; {tp=} must divide {model.heads} heads"
        )
    sbh = model.sequence * micro_batch * model.hidden
    if recompute == "full":
        return model.layers * element * sbh
    shared = sbh * (4 * element + 2 * masks) / (tp if sequence_parallel else 1)
    scores = model.heads * model.sequence**2 * micro_batch * (element * (1 + masks) + masks)
    return model.layers * (
        shared + (12 * element * sbh + (0 if flash or recompute == "selective" else scores)) / tp
    )


def logits(model, micro_batch, tp=1, element=2):
    """Bytes at the peak, in the loss's backward: logits 2sbV/t; in fp32 their log-softmax 4, both gradients 4 + 4."""
    return (element + 12) * model.sequence * micro_batch * model.vocab / tp


def global_batch(micro_batch, accumulation, data_parallel):
    """Sequences per step. Ranks along tensor and pipeline axes compute other parts of the *same* sequences.

    So accumulation × nodes × GPUs per node × micro-batch, often read, is true only where all GPUs are data-parallel:
    parallel_3d.py --tp 2 --pp 2 has on 4 ranks the batch, and the loss, of one device.
    """
    return micro_batch * accumulation * data_parallel


def steps(samples, epochs, global_batch):
    """Of the optimizer; the last one may have a smaller batch."""
    return math.ceil(samples * epochs / global_batch)


def training_time(model, tokens, gpus, flops_per_gpu, recompute="none"):
    """Seconds: 6ΨT/(nX), 2 operations a parameter in forward, 4 in backward; recomputing all 8ΨT/(nX) (Narayanan)."""
    return (8 if recompute == "full" else 6) * model.parameters() * tokens / (gpus * flops_per_gpu)


def flops_per_token(model, recompute="none"):
    """6Ψ + 12lhs (PaLM, appendix B): scores, and values weighted by them, are 4hs a layer in forward, 8 in backward."""
    # "selective" does the 4hs once more, 0.9% of GPT-3's operations; Korthikanti et al. have 2.7%
    psi, scores = model.parameters(), 4 * model.layers * model.hidden * model.sequence
    return (
        6 * psi + 3 * scores + {"none": 0, "selective": scores, "full": 2 * psi + scores}[recompute]
    )


# ---------------------------------------------------------------------------------------------------------------------
# 2. A plan, what it costs, which is best, and what to try in which order.


@dataclass(frozen=True)
class Plan:
    """A dp × tp × pp grid and how it trains; from `advise` with bytes per GPU, `parts`, seconds per step, `times`."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    technique: str = "ddp"  # or lora, qlora
    micro_batch: int = 1
    accumulation: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    flash: bool = True
    element: int = 2  # bytes
    parts: dict = field(default_factory=dict)
    times: dict = field(default_factory=dict)

    memory = property(lambda self: sum(self.parts.values()))
    seconds = property(lambda self: sum(self.times.values()))
    bound = property(lambda self: max(self.times, key=self.times.get))  # what takes longest


def footprint(model, plan):
    """-> {part: bytes} of the fullest rank; `working`: the layer computed again, zero3's units (2u + 3u: fsdp.py)."""
    lora, shapes = (
        "lora" in plan.technique,
        (model, plan.micro_batch, plan.tp, plan.sequence_parallel),
    )
    states = lora_states(model, plan.dp, quantize=plan.technique == "qlora") if lora else None
    states = states or model_states(
        model.parameters(plan.tp, plan.pp), plan.dp, plan.technique, plan.element == 2
    )
    kept = activations(*shapes, plan.recompute, flash=plan.flash, element=plan.element)
    kept *= -(-model.layers // plan.pp) / model.layers
    last = (kept, logits(model, plan.micro_batch, plan.tp, plan.element))
    # 1F1B: the first stage has min(pp, m) micro-batches at once, the last has one, and logits
    held, head = max(last, (kept * min(plan.pp, plan.accumulation), 0.0), key=sum)
    working = (
        (plan.recompute == "full")
        * activations(*shapes, flash=plan.flash, element=plan.element)
        / model.layers
    )
    if plan.dp > 1 and (lora or plan.technique.startswith("zero3")):
        unit = max(model.block(plan.tp), model.vocab * model.hidden / plan.tp)
        working += (2 if lora else 5) * plan.element * unit  # frozen units have no gradients
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "working")
    return dict(zip(names, (*states, held, head, working), strict=True))


def traffic(model, plan):
    """-> {axis: bytes per step} of the rank that sends most: parallel_3d.py's; full recomputation repeats forward's."""
    bs, h, t, m, blocks = (
        plan.micro_batch * model.sequence,
        model.hidden,
        plan.tp,
        plan.accumulation,
        model.layers,
    )
    blocks, ends, size = -(-blocks // plan.pp), 2 if plan.pp == 1 else 1, plan.element
    tp = (
        blocks * (12 if plan.recompute == "full" else 8) + 2 * ends
    ) * bs * h * size + 6 * bs * max(4, size)
    if (
        plan.sequence_parallel
    ):  # inputs are gathered again in backward; gradients of norms and row biases are summed
        tp += ((2 * blocks + ends) * bs * h + (12 * blocks + 4) * h) * size
    hop = m * bs * h / (t if plan.sequence_parallel else 1)
    tied = -(-model.vocab // t) * h  # its gradient, between first and last stage
    pp = max(hop + tied, 2 * hop * (plan.pp > 2)) * size if plan.pp > 1 else 0.0
    passes = {"ddp": 2, "zero1": 2, "zero2": m + 1, "zero3": 3 * m}[plan.technique.split("+")[0]]
    dp = passes * model.parameters(t, plan.pp) * size * (plan.dp - 1) / plan.dp
    return {"tp": m * tp * (t - 1) / t, "pp": pp, "dp": dp}


def step_times(model, plan, gpus_per_node, flops_per_gpu, intra, inter, host):
    """-> {what: seconds of a step}; of data-parallel traffic, what does not hide behind computation.

    Once per step it can hide behind the backward of a micro-batch, zero2's behind that of all, zero3's behind forward
    too. Ranks are numbered as in parallel_3d.py, along tp, dp, pp; a group wider than a node is as slow as the network.
    The pipeline idles for (pp-1)/m of its work (Narayanan et al. 2021, §2.2).
    """
    gpus, sent = plan.dp * plan.tp * plan.pp, traffic(model, plan)
    tokens = global_batch(plan.micro_batch, plan.accumulation, plan.dp) * model.sequence
    compute = flops_per_token(model, plan.recompute) * tokens / (gpus * flops_per_gpu)
    wide = {"tp": plan.tp, "dp": plan.tp * plan.dp, "pp": gpus}
    wire = {axis: sent[axis] / (intra if wide[axis] <= gpus_per_node else inter) for axis in sent}
    hides = {"zero3": compute, "zero2": compute * 2 / 3}.get(
        plan.technique[:5], compute * 2 / 3 / plan.accumulation
    )
    # 32 bytes a parameter: gradient down and parameter up, 2 + 2; Adam reads and writes 2 + 12 each
    adam = (
        32 * model.parameters(plan.tp, plan.pp) / plan.dp / host
        if plan.technique.endswith("offload")
        else 0.0
    )
    fill = (compute + wire["tp"]) * (plan.pp - 1) / plan.accumulation
    times = {"compute": compute, "tensor": wire["tp"], "pipeline": wire["pp"], "bubble": fill}
    return times | {"data": max(0.0, wire["dp"] - hides), "host": adam}


def advise(
    model,
    gpus,
    memory,
    batch=None,
    gpus_per_node=8,
    flops_per_gpu=140e12,
    intra=300e9,
    inter=25e9,
    host=25e9,
):
    """-> [Plan], fastest first, for all `gpus`, in 94% of `memory` bytes: the CUDA context and fragments have the rest.

    `batch`: sequences per step, about 512. Bytes per second and GPU within a node, between nodes, to host memory: those
    of Narayanan et al., eight A100 and eight ports of 200 Gbit/s. With flash attention, so "selective" saves nothing.
    """
    if memory < 1e4 or gpus < 1:
        raise ValueError(f"{gpus} GPUs of {memory} bytes; 80 GB are 80e9")
    batch, plans = batch or gpus * -(-512 // gpus), {}
    sizes = [tp for tp in range(1, model.heads + 1) if model.heads % tp == 0 == gpus % tp]
    grids = [(tp, pp) for tp in sizes for pp in range(1, model.layers + 1) if gpus // tp % pp == 0]
    for key in itertools.product(grids, TECHNIQUES, ("none", "full")):
        (tp, pp), technique, recompute = key
        dp, split = gpus // tp // pp, tp > 1 and model.sequence % tp == 0  # along the sequence too
        if dp == 1 and technique not in ("ddp", "zero2+offload"):
            continue
        for b in (b for b in range(1, 65) if batch % (dp * b) == 0):
            plan = Plan(dp, tp, pp, technique, b, batch // dp // b, recompute, split)
            plan = replace(plan, parts=footprint(model, plan))
            if plan.memory <= 0.94 * memory:
                plan = replace(
                    plan,
                    times=step_times(model, plan, gpus_per_node, flops_per_gpu, intra, inter, host),
                )
                # of equals the largest micro-batch: its products run faster
                plans[key] = min(plan, plans.get(key, plan), key=lambda plan: plan.seconds)
    return sorted(
        plans.values(), key=lambda p: (p.seconds, TECHNIQUES.index(p.technique), p.tp * p.pp)
    )


def savings(model, gpus, micro_batch, gpus_per_node=8):
    """What to try, in this order -> [(name, bytes that it saves, bytes then held, whether later lines build on it)]."""
    tp = max(
        n for n in range(1, min(gpus_per_node, model.heads) + 1) if model.heads % n == 0 == gpus % n
    )
    pp = max(n for n in range(1, min(gpus_per_node, model.layers) + 1) if gpus % n == 0)
    tries = [
        ("16 bits, masters of 32", {"element": 2}, True),
        ("flash attention", {"flash": True}, True),
        (
            f"micro-batch 1, {micro_batch} accumulated",
            {"micro_batch": 1, "accumulation": micro_batch},
            True,
        ),
        ("half the context", {}, False),
        *((name, {"technique": name}, not name.endswith("offload")) for name in TECHNIQUES[1:5]),
        ("full recomputation", {"recompute": "full"}, True),
        ("LoRA, r = 8, weights sharded", {"technique": "lora"}, False),
        ("QLoRA, weights sharded", {"technique": "qlora"}, False),
        (
            f"tensor parallel, {tp} ranks",
            {"tp": tp, "dp": gpus // tp, "sequence_parallel": tp > 1},
            False,
        ),
        (
            f"pipeline parallel, {pp} stages",
            {"pp": pp, "dp": gpus // pp, "accumulation": micro_batch * pp},
            False,
        ),
    ]
    now, held, rows = Plan(dp=gpus, micro_batch=micro_batch, flash=False, element=4), math.nan, []
    for name, change, keep in [("fp32, data-parallel", {}, True), *tries]:
        shape = replace(model, sequence=-(-model.sequence // 2)) if "context" in name else model
        then = sum(footprint(shape, replace(now, **change)).values())
        rows.append((name, held - then if rows else 0.0, then, keep))
        now, held = (replace(now, **change), then) if keep else (now, held)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The page.

DEMO = GPT(
    4, 192, 6, 256, 64, given=1878144
)  # language_model() of the demos, which they train in fp32
MEASURED = {  # bytes on each of 2 ranks by ddp.py, zero.py, fsdp.py: parameters, gradients, optimizer; sent in a step
    "ddp": (7512576, 7512576, 15025360, 7512576),
    "Zero1": (7512576, 7512576, 7512784, 7512628),
    "Zero2": (7512576, 3756288, 7512784, 7512628),
    "Zero3": (3756288, 3756288, 7512784, 11268916),
    "fsdp": (3756288, 3756288, 7512784, 11268864),
}


def size(n):
    return f"{n / 1e9:,.1f} GB" if abs(n) >= 1e9 else f"{n / 1e6:,.1f} MB"


def table(*rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    print()


def compare():
    """Print what the formulas say of the demos, beside what these measured. -> the largest relative difference"""
    worst = 0.0
    for name, measured in MEASURED.items():
        technique = name.lower().replace("fsdp", "zero3")
        estimates = model_states(DEMO.parameters(), 2, technique, mixed=False)
        estimates += (traffic(DEMO, Plan(dp=2, technique=technique, element=4))["dp"],)
        worst = max(
            worst,
            *(abs(ours / theirs - 1) for ours, theirs in zip(estimates, measured, strict=True)),
        )
        params, grads, state, sent, *theirs = (f"{n / 1e6:.1f}" for n in (*estimates, *measured))
        print(
            f"held/rank   params {params} MB   grads {grads} MB   optimizer {state} MB",
            end="      ",
        )
        print(
            f"({name} measured {' / '.join(theirs[:3])})\nsent/rank   {sent} MB per step      (measured {theirs[3]})"
        )
    print(f"vs measured {'' if worst < 0.01 else 'NOT '}within 1%: {worst:.3%}\n")
    return worst


def room(model, technique, gpus, memory):
    """-> bytes for one sequence, data-parallel; the largest micro-batch, sequence, model that `memory` suffices for."""

    def full(model, b=1):
        return (
            sum(footprint(model, Plan(gpus, technique=technique, micro_batch=b)).values())
            > 0.94 * memory
        )

    most = partial(bisect.bisect_left, range(1, 2**40), True)  # the largest number that is not full
    room = {"micro_batch": most(key=lambda n: full(model, n))}
    room["sequence"] = most(key=lambda n: full(replace(model, sequence=n)))
    room["parameters"] = 10**6 * most(
        key=lambda n: full(gpt_of(1e6 * n, model.sequence, model.vocab))
    )
    return {"parts": footprint(model, Plan(gpus, technique=technique)), "room": room}


def show(techniques, saved, plans):
    head = ("a GPU holds", "params", "grads", "optimizer", "activations", "logits", "working")
    rows = [(*head, "room for: micro-batch", "or sequence", "or parameters")]
    for name, row in techniques.items():
        rows.append(
            (name, *map(size, row["parts"].values()), *map("{:,}".format, row["room"].values()))
        )
    table(*rows)
    rows = [
        (name if keep else f"({name})", size(saves), size(held))
        for name, saves, held, keep in saved
    ]
    table(("to save memory, in this order", "saves", "then held"), *rows)
    rows = [
        (
            "dp × tp × pp",
            "technique",
            "recompute",
            "micro-batch × accumulated",
            "memory",
            "step",
            "of which",
        )
    ]
    for p in plans[:8]:
        most = sorted(
            ((t / p.seconds, what) for what, t in p.times.items() if t > p.seconds / 200),
            reverse=True,
        )
        costs = (
            size(p.memory),
            f"{p.seconds:.3g} s",
            ", ".join(f"{what} {part:.0%}" for part, what in most),
        )
        grid, batch = f"{p.dp} × {p.tp} × {p.pp}", f"{p.micro_batch} × {p.accumulation}"
        rows.append((grid, p.technique, p.recompute, batch, *costs))
    table(*rows) if plans else print(
        "no plan fits: it takes more GPUs or memory, a smaller batch, shorter sequences\n"
    )


def main():
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun the first rank says it
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error, add = lambda message: parser.exit(2, f"error: {message}\n"), parser.add_argument
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--model", choices=MODELS)
    one.add_argument("--parameters", type=float, help="such as 7e9, of a usual shape")
    add("--gpus", type=int, help="in all; default 8")
    add("--memory", type=float, default=80.0, help="GB of each GPU; default 80")
    add("--sequence", type=int, help="tokens")
    add("--tokens", type=float, default=300e9, help="to train on; default 300e9")
    add("--json", action="store_true", help="for programs")
    machine = list(inspect.signature(advise).parameters.values())[3:]
    for each in machine:
        words = f"default {each.default or 'about 512'}"
        add(
            f"--{each.name.replace('_', '-')}",
            type=type(each.default or 0),
            default=each.default,
            help=words,
        )
    a = parser.parse_args()
    for name, value in vars(a).items():
        if type(value) in (int, float) and not 1e-4 <= value < 1e18:
            parser.error(f"--{name.replace('_', '-')} {value}: it must be from 1e-4 to 1e18")
    model = MODELS[a.model] if a.model else gpt_of(a.parameters) if a.parameters else DEMO
    model, gpus = (
        replace(model, sequence=a.sequence or model.sequence),
        a.gpus or (2 if model == DEMO else 8),
    )
    plans = advise(
        model, gpus, 1e9 * a.memory, **{each.name: getattr(a, each.name) for each in machine}
    )
    saved = savings(model, gpus, max(1, 512 // gpus), a.gpus_per_node)
    techniques = {
        name: room(model, name, gpus, 1e9 * a.memory) for name in (*TECHNIQUES, "lora", "qlora")
    }
    days = [
        training_time(model, a.tokens, gpus, a.flops_per_gpu, r) / 86400 for r in ("none", "full")
    ]
    if a.json:
        answer = {
            "model": asdict(model),
            "parameters": model.parameters(),
            "gpus": gpus,
            "days": days,
        }
        plans = [
            asdict(p) | {"memory": p.memory, "seconds": p.seconds, "bound": p.bound} for p in plans
        ]
        print(json.dumps(answer | {"techniques": techniques, "savings": saved, "plans": plans}))
        return 0
    shape = f"{model.layers} layers of {model.hidden}, sequences of {model.sequence}, {gpus} × {a.memory:g} GB"
    print(
        f"estimate · {gpus} rank{'s' * (gpus > 1)} · {model.parameters() / 1e6:,.1f}M parameters · {shape}\n"
    )
    worst = compare() if (model, gpus) == (DEMO, 2) else 0.0
    show(techniques, saved, plans)
    print(
        f"{a.tokens:.3g} tokens take 6ΨT/(nX) = {days[0]:,.1f} days; with full recomputation 8ΨT/(nX) = {days[1]:,.1f}"
    )
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())

"""The causes of what split layers, losses, attention, experts, collectives and DiLoCo get wrong."""

from functools import partial
from typing import NamedTuple

import pool
import torch
import torch.distributed as dist
import torch.nn.functional as F

from claims import (
    all_reduce,
    attention,
    clip_grad_norm,
    diloco,
    moe,
    registry,
    train_step,
    vocabulary,
)
from claims.causes import looks_like
from claims.meshes import is_first, place_along

LINEAR = "column-linear row-linear"


# ---- what `same` compares, mended


def mending(*files, mend):
    """mend(ours, plain, what) is what the implementation would give without the mistake."""

    def same(ours, plain, what, *arguments, **options):
        ours = mend(ours, plain, what)
        registry.same(ours, plain, what, *arguments, **options)

    return {f"{file}.same": same for file in files}


def scaled(factor, *names):
    """A mend: multiply what is called so by factor(N)."""

    def mend(ours, plain, what):
        is_meant = ours is not None and what.startswith(names)
        return ours * factor(pool.world_size()) if is_meant else ours

    return mend


def added_up(*names):
    """A mend: replace what is called so by its sum over the ranks."""

    def mend(ours, plain, what):
        return total_of(ours) if what.startswith(names) and ours is not None else ours

    return mend


def total_of(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total, group=pool.group())
    return total


def ignore(*_, **__):
    pass


GRADIENTS_IN = {  # kind: the file of its claims
    "column-linear": "tensor_parallel",
    "row-linear": "tensor_parallel",
    "vocab-cross-entropy": "vocabulary",
    "vocab-embedding": "vocabulary",
}


@looks_like(
    " ".join(GRADIENTS_IN),
    "column column_without_bias column_gathered row row_without_bias loss embedding",
    "Every gradient is {}: backward sums over the ranks what each rank has whole already.",
    factor=lambda N: N,
)
def gradients_times_n():
    divided = scaled(lambda N: 1 / N, "gradient")

    def mend(ours, plain, what):
        mended = divided(ours, plain, what)
        if what == "gradient of the bias" and ours is not None:  # it may be added after the sum
            return min(mended, ours, key=lambda each: (each - plain).abs().max())
        return mended

    return mending("tensor_parallel", "vocabulary", mend=mend)


# ---- linear layers and blocks


@looks_like(
    "column-linear",
    "column column_without_bias",
    "Each rank has its own gradient of the input, and their sum is the right one: backward does "
    "not add it up over the ranks.",
)
def input_gradient_not_summed():
    return mending("tensor_parallel", mend=added_up("gradient of the input"))


@looks_like(
    "row-linear",
    "row",
    "The output has the bias N times, and is right but for that: each rank adds it before the sum.",
)
def bias_on_every_rank():
    def one_device(linear, x):
        output = linear(x)
        more = pool.world_size() - 1
        return output if linear.bias is None else output + more * linear.bias.detach()

    def mend(ours, plain, what):
        return plain if what == "gradient of the bias" else ours  # once or N times

    replaces = {"tensor_parallel.one_device": one_device}
    return replaces | mending("tensor_parallel", mend=mend)


@looks_like(
    "row-linear",
    "row_without_bias",
    "Each rank has its own output, and their sum is the right one: the ranks' products are not "
    "added up.",
)
def output_not_summed():
    return mending("tensor_parallel", mend=added_up("output"))


def in_one_step(mend):
    """Of tp-block, without the weights after it."""

    def same(ours, plain, what, *arguments, **options):
        if "after" not in what:
            registry.same(mend(ours, plain, what), plain, what, *arguments, **options)

    return {"tp_block.STEPS": 1, "tp_block.same": same, "tp_block.same_on_all": ignore}


@looks_like(
    "tp-block",
    "norms_inside",
    "Each rank has the gradient of its own heads in q_norm and k_norm, and their sum is the right "
    "one: it is not added up over the ranks.",
)
def norms_not_summed():
    return in_one_step(added_up("gradient of q_norm", "gradient of k_norm"))


@looks_like(
    "tp-block",
    "block",
    "The output has the biases of proj and down N times, and is right but for that: each rank adds "
    "them before the sum.",
)
def biases_on_every_rank():
    def add_more(layer, _, output):
        more = pool.world_size() - 1
        return output + more * layer.bias.detach()

    def one_device(block, x):
        hooks = [layer.register_forward_hook(add_more) for layer in (block.proj, block.down)]
        output = block(x)
        for hook in hooks:
            hook.remove()
        return output

    def mend(ours, plain, what):
        is_once_or_n_times = what in ("gradient of proj.bias", "gradient of down.bias")
        return plain if is_once_or_n_times else ours

    return in_one_step(mend) | {"tp_block.one_device": one_device}


@looks_like(
    "tp-block",
    "block",
    "Outputs are right. Each rank has its own gradient of norm2.weight, and their sum is the right "
    "one: the gradients of the inputs of gate and up are not added up over the ranks.",
)
def column_inputs_not_summed():
    sum_of = added_up("gradient of norm2")

    def mend(ours, plain, what):
        is_evidence = what == "output" or what.startswith("gradient of norm2")
        return sum_of(ours, plain, what) if is_evidence else plain

    return in_one_step(mend)


# ---- the norm over a mesh


def counting(counts, is_own=False):
    """The norm of what counts(parameter, mesh) on each rank."""

    def one_device(model, parameters, mesh, max_norm, options):
        total = torch.zeros((), dtype=registry.precision())
        for parameter in model.parameters():
            if parameter.grad is not None and counts(parameter, mesh):
                total += parameter.grad.square().sum()
        norm = (total if is_own else total_of(total)).sqrt()
        clip_grad_norm.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    replaces = {"clip_grad_norm.one_device": one_device}
    return replaces | ({"clip_grad_norm.same_on_all": ignore} if is_own else {})


CLIP = "clip-grad-norm"
OVER_ONE = "tensor_ranks data_parallel_ranks stages experts shards"


@looks_like(
    CLIP,
    "data_parallel_ranks tensor_ranks experts shards_of_tensor_ranks stages_of_tensor_ranks",
    "The norm counts a parameter on each rank that has a copy of it. Count it on one of them.",
)
def copies_count():
    return counting(lambda parameter, mesh: True)


@looks_like(
    CLIP,
    OVER_ONE,
    "Each rank clips by the norm of its own gradients: add up the squares over the ranks first.",
)
def own_norm():
    return counting(lambda parameter, mesh: True, is_own=True)


@looks_like(
    CLIP,
    "tensor_ranks",
    "The norm leaves out the parameters that all tensor-parallel ranks have.",
)
def replicated_left_out():
    return counting(lambda parameter, mesh: "tp" in parameter.split)


@looks_like(
    CLIP,
    "tied",
    "The norm counts a parameter that two stages share on both. Count it on the first.",
)
def tied_counts_twice():
    return counting(lambda parameter, mesh: True)


@looks_like(
    CLIP,
    "stages stages_of_tensor_ranks",
    "The norm is that of the first stage: other stages' parameters are left out.",
)
def other_stages_left_out():
    def counts(parameter, mesh):
        return is_first(parameter, mesh) and place_along(mesh, "pp")[0] == 0

    return counting(counts)


@looks_like(
    CLIP,
    "experts experts_on_stages",
    "The norm leaves out the experts of all ranks but the first along ep.",
)
def other_experts_left_out():
    def counts(parameter, mesh):
        is_elsewhere = "ep" in parameter.split and place_along(mesh, "ep")[0] > 0
        return is_first(parameter, mesh) and not is_elsewhere

    return counting(counts)


# ---- the vocabulary


LOSSES = "vocab-cross-entropy"


def with_loss(function, mend=None):
    replaces = {"vocabulary.plain_loss": function, "vocabulary.same_on_all": ignore}
    return replaces | (mending("vocabulary", mend=mend) if mend else {})


@looks_like(
    LOSSES,
    "label_smoothing",
    "The loss without smoothing is right. Smoothing takes the mean over this rank's words alone, "
    "not over the words of all ranks.",
)
def local_vocabulary():
    def plain_loss(logits, target, smoothing):
        own = logits.chunk(pool.world_size(), -1)[pool.rank()]
        right = vocabulary.F.cross_entropy(logits.movedim(-1, 1), target, reduction="none")
        lse = logits.logsumexp(-1)
        return (1 - smoothing) * right + smoothing * (lse - largest_aware_mean(own))

    return with_loss(plain_loss)


def largest_aware_mean(logits):
    return logits.mean(-1)


@looks_like(
    LOSSES,
    "label_smoothing",
    "The smoothing is V/(V-1) times PyTorch's: it is that of Megatron, which gives the target none "
    "of it.",
)
def megatrons_smoothing():
    right = vocabulary.plain_loss

    def plain_loss(logits, target, smoothing):
        V = logits.shape[-1]
        return right(logits, target, smoothing * V / (V - 1))

    return with_loss(plain_loss)


@looks_like(
    LOSSES,
    "padding",
    "The losses are those of a softmax over all columns, those from vocab_size on too: the padding "
    "counts.",
)
def padding_counts():
    right = vocabulary.plain_loss

    def plain_loss(logits, target, smoothing):
        missing = -logits.shape[-1] % pool.world_size()
        filled = F.pad(logits, (0, missing), value=50.0)  # as the claim fills them
        return right(filled, target, smoothing)

    def mend(ours, plain, what):
        return ours if what == "loss" else plain  # that of the padding is not zero

    return with_loss(plain_loss, mend)


@looks_like(
    LOSSES,
    "ignored",
    "Ignored tokens have a loss and a gradient, and those of all other tokens are right: a target "
    "of -100 counts.",
)
def ignored_tokens_count():
    def mend(ours, plain, what):
        if ours is None or ours.shape != plain.shape:
            return ours
        return ours.where(plain != 0, 0.0)

    return with_loss(vocabulary.plain_loss, mend)


@looks_like(
    LOSSES,
    "loss",
    "The losses are those of logits minus the largest of each rank: before the sum of exponentials "
    "all ranks must subtract the same maximum, that of all ranks.",
)
def own_maximum():
    right = vocabulary.plain_loss

    def plain_loss(logits, target, smoothing):
        parts = logits.chunk(pool.world_size(), -1)
        shifted = [part - part.detach().amax(-1, keepdim=True) for part in parts]
        return right(torch.cat(shifted, -1), target, smoothing)

    return with_loss(plain_loss)


def finite_alone(ours, plain, what):
    """A mend: what is not finite does not count."""
    if ours is None or ours.shape != plain.shape:
        return ours
    return ours.where(ours.isfinite(), plain)


@looks_like(
    LOSSES,
    "large_logits",
    "All that is wrong is inf or NaN: exp() overflows. Subtract the largest logit first.",
)
def overflows():
    return mending("vocabulary", mend=finite_alone) | {"vocabulary.same_on_all": ignore}


@looks_like(
    LOSSES,
    "all_ignored",
    "What is wrong is NaN, and only if all tokens are ignored: 0/0, the mean over no token.",
)
def mean_of_nothing():
    return mending("vocabulary", mend=finite_alone) | {"vocabulary.same_on_all": ignore}


EMBEDDING = "vocab-embedding"


@looks_like(
    EMBEDDING,
    "embedding",
    "The output has the first row of each rank that does not have the token: rows of tokens that "
    "are elsewhere must become zero before the sum.",
)
def first_rows_added():
    def look_up(plain, tokens):
        output = plain(tokens)
        rows = -(-len(plain.weight) // pool.world_size())
        for rank in range(pool.world_size()):
            is_elsewhere = (tokens // rows != rank).unsqueeze(-1)
            output = output + is_elsewhere * plain.weight[rank * rows]
        return output

    return {"vocabulary.look_up": look_up}


@looks_like(
    EMBEDDING,
    "padding_idx",
    "The row of padding_idx trains as every other row: padding_idx is not passed on.",
)
def padding_idx_trains():
    def look_up(plain, tokens):
        return F.embedding(tokens, plain.weight)

    return {"vocabulary.look_up": look_up}


# ---- attention


SPLIT = "ring-attention ulysses-attention"
ATTENTIONS = f"attention {SPLIT}"


def with_dense(function):
    """What dense_attention computes with a mistake."""
    return {"attention.dense_attention": function, "context_parallel.dense_attention": function}


def dense(q, k, v, causal=False, scale=None, hidden=None, share=None):
    """Dense attention with another mask, or other heads."""
    G = q.shape[1] // k.shape[1]
    share = share or partial(torch.repeat_interleave, repeats=G, dim=1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = q @ share(k).mT * scale
    if causal:
        hidden = hidden or attention_hidden
        scores = scores.masked_fill(hidden(*scores.shape[2:]), -torch.inf)
    return scores.softmax(-1) @ share(v)


def attention_hidden(S, Skv):
    return torch.ones(S, Skv, dtype=torch.bool).triu(1 + Skv - S)


@looks_like(
    ATTENTIONS,
    "shared_heads",
    "Heads of queries take the heads of keys in turns, 0 1 0 1. Consecutive heads share one, 0 0 "
    "1 1.",
)
def heads_in_turns():
    def wrong(q, k, v, causal=False, scale=None):
        G = q.shape[1] // k.shape[1]
        return dense(q, k, v, causal, scale, share=lambda x: x.repeat(1, G, 1, 1))

    return with_dense(wrong)


class FirstOnly(torch.autograd.Function):
    """Copies of each head, of which only the first gives a gradient."""

    @staticmethod
    def forward(ctx, x, G):
        ctx.G = G
        return x.repeat_interleave(G, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, :: ctx.G], None


@looks_like(
    ATTENTIONS,
    "shared_heads",
    "The gradients of k and v are those of the first head of queries alone: they must add up over "
    "all heads that share a head of keys.",
)
def gradient_of_one_sharing_head():
    def wrong(q, k, v, causal=False, scale=None):
        G = q.shape[1] // k.shape[1]
        return dense(q, k, v, causal, scale, share=lambda x: FirstOnly.apply(x, G))

    return with_dense(wrong)


@looks_like(
    ATTENTIONS,
    "scale",
    "Results are those of the scale 1/√D: the given scale is not used.",
)
def scale_not_used():
    right = attention.dense_attention

    def wrong(*arguments, scale=None, **options):
        return right(*arguments, **options)

    return with_dense(wrong)


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def without_scale_in_backward(which):
    right = attention.dense_attention

    def wrong(q, k, v, *arguments, scale=None, **options):
        factor = 1 / (q.shape[3] ** -0.5 if scale is None else scale)
        inputs = {"q": q, "k": k}
        inputs[which] = ScaleGradient.apply(inputs[which], factor)
        return right(*inputs.values(), v, *arguments, scale=scale, **options)

    return with_dense(wrong)


@looks_like(
    ATTENTIONS,
    "as_dense as_one_device causal scale",
    "The gradient of q is right but for the factor scale, which is missing in backward.",
)
def scale_missing_in_gradient_of_q():
    return without_scale_in_backward("q")


@looks_like(
    ATTENTIONS,
    "as_dense as_one_device causal scale",
    "The gradient of k is right but for the factor scale, which is missing in backward.",
)
def scale_missing_in_gradient_of_k():
    return without_scale_in_backward("k")


@looks_like(
    SPLIT,
    "causal",
    "Each block of keys is masked as if it were this rank's own: the mask takes the positions in "
    "the block for those in the whole sequence.",
)
def local_positions():
    def hidden(S, Skv):
        tokens = S // pool.world_size()
        place = torch.arange(S) % tokens
        return place > place[:, None]

    def wrong(q, k, v, causal=False, scale=None):
        return dense(q, k, v, causal, scale, hidden)

    return with_dense(wrong)


@looks_like(
    ATTENTIONS,
    "causal",
    "Results are those without a mask: causal is not used.",
)
def not_masked():
    def wrong(q, k, v, causal=False, scale=None):
        return dense(q, k, v, False, scale)

    return with_dense(wrong)


def with_order_of_ranks(restored):
    right = attention.dense_attention

    def wrong(q, k, v, *arguments, **options):
        N = pool.world_size()
        chunks = torch.arange(q.shape[2]).chunk(2 * N)
        order = torch.cat([torch.cat([chunks[r], chunks[2 * N - 1 - r]]) for r in range(N)])
        inputs = [x[:, :, order] for x in (q, k, v)]
        output = right(*inputs, *arguments, **options)
        return output[:, :, order.argsort()] if restored else output

    return with_dense(wrong)


@looks_like(
    "ulysses-attention",
    "zigzag",
    "Results are those of the ranks' tokens one after the other, although with zigzag rank r has "
    "the chunks r and 2N-1-r: their order is not restored before the mask.",
)
def order_of_ranks():
    return with_order_of_ranks(restored=True)


@looks_like(
    "ulysses-attention",
    "zigzag",
    "The ranks' tokens are taken one after the other, and the output as if it were in the order of "
    "the sequence: with zigzag rank r has the chunks r and 2N-1-r.",
)
def order_of_ranks_before():
    return with_order_of_ranks(restored=False)


@looks_like(
    ATTENTIONS,
    "documents",
    "Two documents of the same number see each other although another lies between: 1 0 1 are "
    "three documents.",
)
def equal_numbers_merged():
    def each_alone(ids, q, k, v, grad, causal=False):
        def masked(q, k, v):
            differ = (ids[:, :, None] != ids[:, None, :])[:, None]
            later = attention_hidden(q.shape[2], k.shape[2]) & causal
            G = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(G, 1).mT * q.shape[3] ** -0.5
            weights = scores.masked_fill(differ | later, -torch.inf).softmax(-1)
            return weights @ v.repeat_interleave(G, 1)

        return attention.output_and_gradients(masked, q, k, v, grad)

    return {"attention.each_alone": each_alone, "context_parallel.each_alone": each_alone}


# ---- experts


def with_plain_moe(wrong):
    """`wrong` in place of plain_moe."""
    right = moe.backward_on_one_device

    def backward_on_one_device(weights, counts, plain=moe.plain_moe, step=0):
        return right(weights, counts, wrong if plain is moe.plain_moe else plain, step)

    return {"moe.backward_on_one_device": backward_on_one_device}


@looks_like(
    "moe",
    "as_one_device",
    "The gradients of the experts are {}, and all others are right: an expert has the tokens of "
    "all ranks, so its gradient must be divided by their number.",
    factor=lambda N: N,
)
def experts_times_n():
    return mending("moe", mend=scaled(lambda N: 1 / N, "gradient of experts"))


@looks_like(
    "moe",
    "as_one_device",
    "Each rank has its own gradient of gate.weight, and their mean is the right one: the router's "
    "gradient is not averaged.",
)
def router_not_averaged():
    sum_of = added_up("gradient of gate")
    mean_of = scaled(lambda N: 1 / N, "gradient of gate")

    def mend(ours, plain, what):
        return mean_of(sum_of(ours, plain, what), plain, what)

    return mending("moe", mend=mend)


@looks_like(
    "moe",
    "as_one_device",
    "Results are those of probabilities that are not divided by the sum of the top k: this is "
    "norm_topk_prob=False.",
)
def not_renormalised():
    return with_plain_moe(partial(moe.plain_moe, normalise=False))


def other_moe(x, weights, weigh, detach=False):
    """plain_moe, where weigh(probabilities of the chosen) weighs experts, and x may be detached."""
    gate, gate_ups, downs = weights.values()
    probabilities = (x @ gate.T).softmax(-1)
    values, chosen = probabilities.topk(2)
    shares = torch.zeros_like(probabilities).scatter(1, chosen, weigh(values))
    rows = x.detach() if detach else x
    output = torch.zeros_like(x)
    for share, gate_up, down in zip(shares.T, gate_ups, downs, strict=True):
        first, up = (rows @ gate_up.T).chunk(2, -1)
        output = output + share[:, None] * (F.silu(first) * up @ down.T)
    return output


@looks_like(
    "moe",
    "as_one_device",
    "Results are the sum of the chosen experts' outputs: the router's weights are not multiplied.",
)
def not_weighted():
    def wrong(x, weights):
        return other_moe(x, weights, lambda values: torch.ones_like(values) + 0 * values)

    return with_plain_moe(wrong)


@looks_like(
    "moe",
    "as_one_device",
    "Outputs and the experts' gradients are right. The input's gradient lacks what comes through "
    "the experts: the exchange of rows has no backward.",
)
def exchange_without_gradient():
    def normalised(values):
        return values / values.sum(-1, keepdim=True)

    return with_plain_moe(partial(other_moe, weigh=normalised, detach=True))


# ---- collectives


def subset_sums(shape, dtype):
    """Return {names of ranks: the sum of their numbers}."""
    sums = {}
    N = pool.world_size()
    for bits in range(1, 2**N):
        ranks = [rank for rank in range(N) if bits >> rank & 1]
        sums[tuple(ranks)] = all_reduce.total_of(shape, dtype, ranks)
    return sums


@looks_like(
    "all-reduce",
    "summed",
    "Some elements are the sum over all ranks, and the others over some ranks only: parts of the "
    "tensor miss a step.",
)
def sums_of_some_ranks():
    def mend(ours, plain, what):
        if not plain.numel() or ours.shape != plain.shape:
            return ours
        mended = ours.clone()
        for total in subset_sums(plain.shape, plain.dtype).values():
            mended = torch.where((ours - total).abs() < 1e-9, plain, mended)
        return mended

    return mending("all_reduce", mend=mend)


@looks_like("all-reduce", "summed", "Every rank has the mean: {}.", factor=lambda N: 1 / N)
def mean_not_sum():
    return mending("all_reduce", mend=scaled(lambda N: N, "the sum"))


@looks_like(
    "all-reduce",
    "summed",
    "Every rank's tensor is as it was before: nothing is added, or not in place.",
)
def tensor_unchanged():
    def total(shape, dtype=None, ranks=None):
        return all_reduce.numbers_of(pool.rank(), shape, dtype)

    return {"all_reduce.total_of": total}


tensor_unchanged_if_strided = looks_like(
    "all-reduce",
    "strided",
    "A strided tensor is as it was before: a contiguous copy of it has the sum.",
)


@tensor_unchanged_if_strided
def strided_copy():
    return tensor_unchanged()


@looks_like(
    "all-reduce",
    "all_reduces_apart",
    "Each group has the sum over all ranks of the default group: the group is not used.",
)
def whole_world():
    right = all_reduce.total_of

    def total(shape, dtype=None, ranks=None):
        return right(shape, dtype)

    return {"all_reduce.total_of": total}


# ---- the others


@looks_like(
    "grad-scaler",
    "scaled_and_unscaled",
    "The weights move 65536 times as far as they should, which is the scale: gradients are not "
    "unscaled before the step.",
)
def never_unscaled():
    def same(ours, plain, what, exact=False, coarser=1):
        moved = (ours.detach().double() - 1) / 2.0**16
        is_near = torch.allclose(moved, plain.double() - 1, 1e-3, 1e-6)
        registry.check(is_near, what)

    return {"amp.same": same}


@looks_like(
    "lora",
    "dense_equivalent",
    "Results are those of W + BA: BA is not multiplied by lora_alpha/r, 4 here.",
)
def alpha_over_r_forgotten():
    return {"lora.ALPHA_OVER_R": 1.0}


@looks_like(
    "activation-checkpoint",
    "recomputed",
    "The gradients of the layers' parameters are None, and all others are right: only the "
    "gradients of the arguments are computed.",
)
def parameters_without_gradients():
    def mend(ours, plain, what):
        return plain if ours is None else ours

    return mending("activation_checkpoint", mend=mend)


def with_workers(**methods):
    """DiLoCo's workers on one device, with other methods."""
    return {"diloco.Workers": type("WrongWorkers", (diloco.Workers,), methods)}


def with_options(change):
    def __init__(self, worker, module, ranks):
        diloco_workers.__init__(self, worker, module, ranks)
        self.options = change(self.options)
        lr = self.options["outer_lr"]
        momentum = self.options["outer_momentum"]
        self.outer_optimizer = torch.optim.SGD(
            self.outer.values(), lr, momentum, nesterov=momentum > 0
        )

    return with_workers(__init__=__init__)


diloco_workers = diloco.Workers


@looks_like(
    "diloco",
    "outer_step",
    "The outer step goes the other way: the pseudo-gradient is outer minus own parameters, and has "
    "the opposite sign here.",
)
def outer_step_backwards():
    def mean(self, names):
        return {name: -each for name, each in diloco_workers.mean(self, names).items()}

    return with_workers(mean=mean)


@looks_like(
    "diloco",
    "outer_step",
    "All workers continue from the mean of their parameters: outer_lr and outer_momentum are not "
    "used.",
)
def mean_of_parameters():
    return with_options(lambda options: {**options, "outer_lr": 1.0, "outer_momentum": 0.0})


@looks_like(
    "diloco",
    "inner_state",
    "Every outer step resets the state of the inner optimizer.",
)
def inner_state_reset():
    def apply(self, means):
        diloco_workers.apply(self, means)
        if means:
            for optimizer in self.optimizers.values():
                optimizer.state.clear()

    return with_workers(apply=apply)


@looks_like(
    "diloco",
    "fragments",
    "With each fragment that is applied, the momenta of the others move as well: their outer "
    "gradients are zero, not None.",
)
def all_momenta_move():
    def apply(self, means):
        if means:
            for tensor in self.outer.values():
                tensor.grad = torch.zeros_like(tensor)
        diloco_workers.apply(self, means)

    return with_workers(apply=apply)


@looks_like(
    "diloco",
    "several_in_flight",
    "With a delay, workers go on from (1 - mix) · own + mix · outer: mix is the share of the own "
    "parameters.",
)
def mixed_the_other_way():
    return with_options(lambda options: {**options, "mix": 1 - options["mix"]})


# ---- a step of a trainer


class Weighed(train_step.Side):
    """Weighs the tokens of each micro-batch, and knows neither scaler nor norm."""

    def step_on_one_device(self, batches):
        N = pool.world_size()
        counts = [int((y != -100).sum()) for _, y in batches]
        M = len(batches) // N
        self.optimizer.zero_grad()
        for index, (x, y) in enumerate(batches):
            own = counts[M * (index // M) : M * (index // M + 1)]
            part = Part(index // M, index % M, N, M, counts[index], sum(own), sum(counts))
            loss = F.cross_entropy(self.model(x), y, reduction="sum")
            (self.weigh(part) * loss).backward()
        self.optimizer.step()
        return torch.zeros(())


class Part(NamedTuple):
    """The micro-batch m of M on rank r of N: its tokens, those of the rank, those of all."""

    r: int
    m: int
    N: int
    M: int
    tokens: int
    of_rank: int
    of_all: int


def weighing(weigh):
    side = type("WrongSide", (Weighed,), {"weigh": staticmethod(weigh)})
    return {"train_step.Side": side, "train_step.same_on_all": ignore}


EQUAL = "equal_tokens"


@looks_like(
    "train-step",
    EQUAL,
    "Every gradient is {}: the loss is divided by the tokens of all ranks, and then gradients are "
    "averaged over the ranks, too. Multiply the loss by their number, or add up.",
    factor=lambda N: 1 / N,
)
def trainer_averages():
    return weighing(lambda part: 1 / (part.N * part.of_all))


@looks_like(
    "train-step",
    EQUAL,
    "Every gradient is {}: the ranks' mean gradients are summed, not averaged.",
    factor=lambda N: N,
)
def trainer_sums():
    return weighing(lambda part: part.N / part.of_all)


@looks_like(
    "train-step",
    EQUAL,
    "Each rank trains on its own tokens: gradients are not reduced over the ranks.",
)
def trainer_does_not_reduce():
    return weighing(lambda part: (part.r == pool.rank()) / max(1, part.of_rank))


@looks_like(
    "train-step",
    "unequal_tokens a_rank_without_tokens unequal_micro_batches",
    "Each rank divides by the number of its own tokens, and these means are averaged: divide by "
    "the number of the tokens of all ranks.",
    variants="mean_of_micro_batches",
)
def mean_of_ranks():
    return weighing(lambda part: 1 / (part.N * max(1, part.of_rank)))


@looks_like(
    "train-step",
    "unequal_micro_batches",
    "Each micro-batch is divided by the number of its own tokens, and these means are averaged: "
    "divide by the number of the tokens of all ranks and micro-batches.",
)
def mean_of_micro_batches():
    return weighing(lambda part: 1 / (part.N * part.M * max(1, part.tokens)))


@looks_like(
    "train-step",
    "unequal_tokens a_rank_without_tokens unequal_micro_batches",
    "The loss is divided by the number of all rows, also of those that are masked: the padding "
    "counts.",
)
def padding_in_the_mean():
    rows = 5  # of each micro-batch
    return weighing(lambda part: 1 / (part.N * part.M * rows))


@looks_like("train-step", "accumulation", "Only the last micro-batch counts: the others are lost.")
def trainer_keeps_the_last():
    return weighing(lambda part: (part.m == part.M - 1) / part.of_all)


@looks_like(
    "train-step",
    "accumulation",
    "Every gradient is 1/3 of the right one with 3 micro-batches: the loss is divided by the "
    "number of all tokens, and by the number of micro-batches as well.",
)
def trainer_divides_by_micro_batches():
    return weighing(lambda part: 1 / (part.M * part.of_all))


@looks_like(
    "train-step",
    "accumulation",
    "Every gradient is 3.000 times the right one with 3 micro-batches: each is a mean, and they "
    "are summed.",
)
def trainer_sums_micro_batches():
    return weighing(lambda part: part.M / part.of_all)


def scheduling(times, first=0):
    """The scheduler steps `times` in all, `first` of them before the optimizer."""

    class Side(train_step.Side):
        def step_on_one_device(self, batches):
            for _ in range(first):
                self.options["scheduler"].step()
            loss = super().step_on_one_device(batches)
            for _ in range(times(len(batches)) - 1 - first):
                self.options["scheduler"].step()
            return loss

    return {"train_step.Side": Side}


@looks_like(
    "train-step",
    "schedulers",
    "The scheduler steps once for each micro-batch: it must step once for each step of the "
    "optimizer.",
)
def scheduler_counts_micro_batches():
    return scheduling(lambda batches: batches // pool.world_size())


COUNTS_RANKS = (
    "The scheduler steps 3 times on 3 ranks: it must step once for each step of the optimizer."
)


@looks_like("train-step", "schedulers", COUNTS_RANKS)
def scheduler_counts_ranks():
    return scheduling(lambda batches: 3)


@looks_like("train-step", "schedulers", COUNTS_RANKS)
def scheduler_counts_ranks_first():
    return scheduling(lambda batches: 3, first=2)

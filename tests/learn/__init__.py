"""The lessons of `onefile-parallel learn`: write it yourself, and the oracle says what lacks.

A lesson is a kind of implementation. Its skeleton, in skeletons/, is what a learner begins with.
Its claims are those about results that a minimal implementation holds, in the order to try them.
"""

from pathlib import Path
from typing import NamedTuple

SKELETONS = Path(__file__).parent / "skeletons"


class Lesson(NamedTuple):
    name: str  # of the function or class in the skeleton
    ours: str  # where our minimal version stands: "file.py section: name"
    claims: str  # separated by spaces


TRAINING = "mean_gradient momentum adamw"
LESSONS = {  # in the order in which to read
    "all-reduce": Lesson(
        "my_all_reduce",
        "collectives.py, section 1: naive_all_reduce",
        "summed integers same_bits reused strided",
    ),
    "ddp": Lesson(
        "MyDDP",
        "ddp.py, section 1: all_reduce_gradients",
        f"{TRAINING} start_of_rank_0 frozen tied odd_shapes called_twice replicas",
    ),
    "zero1": Lesson(
        "MyZero1",
        "zero.py, section 1: ShardedParameter and step",
        f"{TRAINING} tied frozen odd_shapes replicas",
    ),
    "zero2": Lesson(
        "MyZero2",
        "zero.py, section 1: zero2_hooks",
        f"{TRAINING} start_of_rank_0 tied frozen odd_shapes replicas",
    ),
    "zero3": Lesson(
        "MyZero3",
        "zero.py, section 1: Zero3Unit",
        f"{TRAINING} start_of_rank_0 odd_shapes replicas",
    ),
    "fsdp": Lesson(
        "my_fully_shard",
        "fsdp.py, section 1: naive_fully_shard",
        f"{TRAINING} frozen odd_shapes replicas",
    ),
    "column-linear": Lesson(
        "MyColumnLinear",
        "tensor_parallel.py, section 1: column_linear",
        "column column_without_bias",
    ),
    "row-linear": Lesson(
        "MyRowLinear", "tensor_parallel.py, section 1: row_linear", "row row_without_bias"
    ),
    "vocab-embedding": Lesson(
        "MyVocabEmbedding",
        "tensor_parallel.py: VocabParallelEmbedding",
        "embedding embedding_with_padding padding_idx",
    ),
    "vocab-cross-entropy": Lesson(
        "my_vocab_cross_entropy",
        "tensor_parallel.py: vocab_parallel_cross_entropy",
        "loss large_logits ignored all_ignored",
    ),
    "tp-block": Lesson(
        "my_tp_block",
        "tensor_parallel.py, section 1: parallel_mlp; parallelize() splits a block",
        "block norms_inside grouped_queries",
    ),
    "pipeline-schedule": Lesson(
        "my_schedule",
        "pipeline.py, section 1: gpipe_step; section 2 has it as a list",
        "complete no_deadlock gradients",
    ),
    "grad-scaler": Lesson(
        "MyGradScaler",
        "amp.py, section 1: mixed_precision_step",
        "scaled_and_unscaled skipped grown resumed",
    ),
    "fp8-linear": Lesson(
        "my_fp8_linear",
        "fp8.py, section 1: naive_linear",
        "products sizes_are_scaled one_term tiny_gradients zeros not_finite bias",
    ),
    "lora": Lesson(
        "my_lora",
        "lora.py, section 1: NaiveLoRA",
        "unchanged_at_first dense_equivalent base_stays",
    ),
    "activation-checkpoint": Lesson(
        "my_checkpoint",
        "activation_checkpoint.py, section 1: NaiveCheckpoint",
        "forgotten recomputed random_numbers",
    ),
    "attention": Lesson(
        "my_attention",
        "flash_attention.py, section 1: online_attention",
        "as_dense causal scale large_scores",
    ),
    "linear-cross-entropy": Lesson(
        "my_linear_cross_entropy",
        "linear_cross_entropy.py, section 1: NaiveLinearCrossEntropy",
        "as_plain large_logits",
    ),
    "ring-attention": Lesson(
        "my_ring_attention",
        "context_parallel.py, section 1: naive_ring_attention",
        "as_one_device causal shared_heads large_scores two_layers",
    ),
    "ulysses-attention": Lesson(
        "my_ulysses_attention",
        "context_parallel.py: ulysses_attention",
        "as_one_device causal large_scores two_layers",
    ),
    "moe": Lesson(
        "MyMoE",
        "expert_parallel.py, section 1: naive_moe and naive_average_gradients",
        "as_one_device crowded_expert trains",
    ),
    "muon": Lesson(
        "MyMuon", "muon.py, section 1: naive_step", "mean_gradient small_gradients replicas"
    ),
    "diloco": Lesson(
        "MyDiLoCo",
        "diloco.py, section 1: outer_step",
        "outer_step inner_state tied odd_shapes replicas",
    ),
    "train-step": Lesson(
        "my_train_step",
        "ddp.py, section 1: all_reduce_gradients; docs/training_loops.md has the lines",
        "equal_tokens adamw unequal_tokens a_rank_without_tokens accumulation",
    ),
    "clip-grad-norm": Lesson(
        "my_clip_grad_norm",
        "tensor_parallel.py: clip_grad_norm_",
        "tensor_ranks data_parallel_ranks stages tied no_gradients",
    ),
}

HINTS = {  # {claim: what to look at if it does not hold}
    "products": "Multiply the 8-bit numbers, cast back, and then by both scales, in backward too.",
    "sizes_are_scaled": "Divide by the smallest scale with which the largest number fits.",
    "one_term": "The forward is e4m3. Only dy may be e5m2.",
    "tiny_gradients": "dy has a scale of its own, from its own largest number.",
    "zeros": "If the largest number is 0, the scale must not be.",
    "not_finite": "A cast makes the largest number of an inf. Let the scale become NaN.",
    "bias": "Add the bias to y. It has the sum of dy over all rows.",
    "summed": "Print what each rank has after one round. Each part must visit every rank once.",
    "integers": "Do not convert: the sum of integers is exact.",
    "same_bits": "All ranks must add in the same order: add once, and send the result around.",
    "reused": "Wait for every message before you return. The caller overwrites the tensor.",
    "strided": "Send a contiguous copy, and write the result back into the tensor.",
    "mean_gradient": "Is every gradient summed over all ranks, and divided by N once?",
    "momentum": "The optimizer's state must see the mean, in each step.",
    "adamw": "AdamW hides a factor in the gradient, but not a wrong decay or a wrong step count.",
    "start_of_rank_0": "Ranks begin with other values. Broadcast those of rank 0 at construction.",
    "frozen": "A parameter that does not require a gradient has none. It must not move.",
    "tied": "Two modules may share a parameter. It must be averaged, or updated, once.",
    "odd_shapes": "Scalars, a size that N does not divide, and fewer elements than ranks.",
    "called_twice": "The module may be called twice before one backward.",
    "replicas": "After three steps all ranks must have the same bits.",
    "column": "The gradient of x: each rank has only what its own features contribute.",
    "column_without_bias": "linear.bias may be None.",
    "row": "Outputs add up. Add the bias once, after the sum.",
    "row_without_bias": "linear.bias may be None.",
    "embedding": "A token of another rank gives zeros here. The sum over ranks gives the rest.",
    "embedding_with_padding": "Round a rank's rows up. The last rank has rows that no token uses.",
    "padding_idx": "padding_idx has no gradient. Which rank has it, and in which of its rows?",
    "loss": "Sum e^z over all ranks. One rank has the target's logit, the others add 0.",
    "large_logits": "Subtract the largest logit of all ranks before e^z.",
    "ignored": "-100 is no row of any rank. The loss there is 0, and so is its gradient.",
    "all_ignored": "Nothing is divided here: the loss of each token is 0.",
    "block": "Count the all-reduces: two in forward, two in backward, none inside a pair.",
    "norms_inside": "q_norm sees this rank's heads only: add its gradients up over the ranks.",
    "grouped_queries": "Cut k and v by their own number of heads.",
    "complete": "Every stage runs F and B of every micro-batch, once.",
    "no_deadlock": "Can every rank go on at every moment? Follow the first micro-batch by hand.",
    "gradients": "B of a stage comes after its F, and after B of the next stage.",
    "scaled_and_unscaled": "Multiply the loss, and divide every .grad before the step.",
    "skipped": "One inf or NaN in any gradient: take no step, and halve the scale in update().",
    "grown": "After growth_interval good steps in a row the scale doubles. A skip begins anew.",
    "resumed": "state_dict() needs the scale and the number of good steps.",
    "unchanged_at_first": "B is zero at first.",
    "dense_equivalent": "W + lora_alpha / r · B A is the same layer.",
    "base_stays": "W and its bias do not train, and keep their values.",
    "forgotten": "Nothing of forward may stay alive but the inputs, until backward.",
    "recomputed": "Forward must not save activations. Backward calls the function a second time.",
    "random_numbers": "Restore the generator's state before the second call, and yours after it.",
    "as_dense": "Divide by l at the end, not in each block.",
    "causal": "Which is the global position of the first query, and of the first key, of a block?",
    "scale": "The default is 1 / √D.",
    "large_scores": "Subtract the running maximum, and correct l and o when it grows.",
    "as_one_device": "Every query must see the keys of every rank, once.",
    "shared_heads": "q has more heads than k: repeat each key head for its group of queries.",
    "two_layers": "The gradients of k and v must come back to the rank that owns them.",
    "crowded_expert": "An expert may get all tokens, or none.",
    "trains": "Experts' gradients are sums over all ranks: divide them by N, and send nothing.",
    "small_gradients": "Muon's update has the same size whatever the gradient's.",
    "outer_step": "Δ is outer - own, and its mean over workers goes into SGD as the gradient.",
    "inner_state": "The inner optimizer keeps its moments through an outer step.",
    "as_plain": "Divide by the number of tokens whose target is not -100.",
    "equal_tokens": "Every rank must end with the sum of all ranks' gradients, divided once.",
    "unequal_tokens": "Divide by the number of tokens of all ranks, not of this rank.",
    "a_rank_without_tokens": "A rank without tokens adds zeros, but it takes part.",
    "accumulation": "Count the tokens of all micro-batches before the first backward.",
    "tensor_ranks": "Add up the squares of what is split over tp. Count the rest on one rank.",
    "data_parallel_ranks": "Data-parallel ranks hold the same gradients: do not add them up.",
    "stages": "Stages hold other layers: add up their squares.",
    "no_gradients": "The norm is 0, and every rank takes part in the all-reduce.",
}

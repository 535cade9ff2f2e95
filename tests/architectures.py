"""Train small models of many architectures with each technique, and print a table of how far their
parameters end from those of one device. Architectures with equal results share a row. The table is
in hugging_face.md.

Run:  torchrun --nproc-per-node 2 tests/architectures.py [architecture …]

The models have random weights. They take three steps of SGD in float32. One device adds up the
gradients of the ranks' batches in rank order, and divides by their number. Under tensor_parallel
all ranks have the batch of rank 0.
"""

import argparse
import copy
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ddp import DistributedDataParallel
from fsdp import full_state_dict, fully_shard
from tensor_parallel import full_state_dict as join_slices
from tensor_parallel import parallelize, vocab_parallel_cross_entropy
from zero import Zero1, Zero2, Zero3

STEPS = 3
LR = 0.1
VOCAB = 128
LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
ENCODER = {**LAYERS, "num_attention_heads": 4}
LLAMA = {**ENCODER, "vocab_size": VOCAB, "num_key_value_heads": 2, "pad_token_id": 0}
QWEN3 = {**LLAMA, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
PICTURES = {"image_size": 16, "patch_size": 8}
STAGES = {"depths": [2, 2], "hidden_sizes": [16, 32], "num_labels": 10}
WHISPER = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WHISPER |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


# --------------------------------------------------------------------------------------------------
# The architectures: a class of transformers, its configuration, and what its batches are made of.


class TorchTransformer(nn.Transformer):
    """PyTorch's own encoder and decoder."""

    def forward(self, pixel_values, labels):
        vectors = pixel_values.flatten(1).view(-1, 24, 32)
        return {"loss": super().forward(vectors, vectors.flip(0)).square().mean()}


ARCHITECTURES = {
    "GPT-2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB}),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "tied Llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", QWEN3),
    "Gemma2": ("Gemma2ForCausalLM", {**QWEN3, "sliding_window": 8}),
    "Mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**QWEN3, **EXPERTS}),
    "Mamba": ("MambaForCausalLM", {**LAYERS, "vocab_size": VOCAB, "state_size": 4}),
    "BERT": ("BertForMaskedLM", {**ENCODER, "vocab_size": VOCAB}),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "Whisper": ("WhisperForConditionalGeneration", {**WHISPER, "vocab_size": VOCAB}),
    "CLIP": (
        "CLIPModel",
        {
            "text_config": {**ENCODER, "vocab_size": VOCAB, "eos_token_id": 2},
            "vision_config": {**ENCODER, **PICTURES},
            "projection_dim": 16,
        },
    ),
    "ViT": ("ViTForImageClassification", {**ENCODER, **PICTURES, "num_labels": 10}),
    "ResNet": ("ResNetForImageClassification", {**STAGES, "embedding_size": 16}),
    "ConvNeXt": ("ConvNextForImageClassification", {**STAGES, "num_stages": 2}),
    "nn.Transformer": (TorchTransformer, {}),
}


def make_model(name):
    """Return the same model on every rank, in training mode, so with dropout."""
    model_class, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    if model_class is TorchTransformer:
        return TorchTransformer(32, 4, 2, 2, dim_feedforward=64)
    model_class = getattr(transformers, model_class)
    return model_class(model_class.config_class(**options)).train()


def make_batch(model, rank, step):
    """Return the arguments of forward. The generator of random numbers is left at a known place."""
    torch.manual_seed(1000 * step + rank)
    tokens = torch.randint(3, VOCAB, (2, 16))
    pictures = torch.randn(2, 3, 16, 16)
    if isinstance(model, transformers.CLIPModel):
        return {"input_ids": tokens, "pixel_values": pictures, "return_loss": True}
    if isinstance(model, transformers.WhisperForConditionalGeneration):
        return {"input_features": torch.randn(2, 8, 32), "labels": tokens}
    if getattr(model, "main_input_name", "pixel_values") == "pixel_values":
        return {"pixel_values": pictures, "labels": torch.randint(10, (2,))}
    return {"input_ids": tokens, "labels": tokens}


# --------------------------------------------------------------------------------------------------
# The techniques: each function takes a model, and returns the model to call, the optimizer, and a
# function that returns the whole state dict.


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def ddp(model):
    return DistributedDataParallel(model), sgd(model), model.state_dict


def zero1(model):
    return model, Zero1(model, torch.optim.SGD, lr=LR), model.state_dict


def zero2(model):
    return model, Zero2(model, torch.optim.SGD, lr=LR), model.state_dict


def zero3(model):
    optimizer = Zero3(model, torch.optim.SGD, lr=LR)
    return model, optimizer, optimizer.module_state_dict


def fsdp(model):
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    return model, sgd(model), lambda: full_state_dict(model)


def blocks_of(module):
    """Return the members of the outermost lists of modules."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in blocks_of(child)]


PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.[qkv]_proj": "column",
    "model.layers.*.o_proj": "row",
    "model.layers.*.gate_proj": "column",
    "model.layers.*.up_proj": "column",
    "model.layers.*.down_proj": "row",
    "lm_head": "vocab",
}
NORMS = {"model.layers.*.[qk]_norm": "replicated_with_grad_allreduce"}
PLANS = {"Llama": PLAN, "tied Llama": PLAN, "Qwen2": PLAN, "Qwen3": PLAN | NORMS}


def tensor_parallel(model, plan):
    parallelize(model, plan)

    def call(input_ids, labels):
        logits = model(input_ids).logits  # this rank's part of the vocabulary
        return {"loss": vocab_parallel_cross_entropy(logits[:, :-1], labels[:, 1:]).mean()}

    return call, sgd(model), lambda: join_slices(model)


TECHNIQUES = [ddp, zero1, zero2, zero3, fsdp]
HEADS = ["DDP", "Zero1", "Zero2", "Zero3", "fsdp", "tensor_parallel"]


# --------------------------------------------------------------------------------------------------
# The comparison.


def train(name, technique, *plan):
    """Return the parameters after training with the technique, as a state dict."""
    model = make_model(name)
    plain = copy.deepcopy(model)  # for the types of its batches, because DDP wraps the model
    call, optimizer, whole = technique(model, *plan)
    rank = 0 if plan else dist.get_rank()
    for step in range(STEPS):
        batch = make_batch(plain, rank, step)
        optimizer.zero_grad()
        call(**batch)["loss"].backward()
        optimizer.step()
    return whole()


def train_on_one_device(name, parts):
    """Return the model, trained on the batches of `parts` ranks."""
    model = make_model(name)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(parts):
            batch = make_batch(model, rank, step)
            model(**batch)["loss"].backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= parts
        optimizer.step()
    return model


def compare(name, expected, technique, *plan):
    """Return what all ranks saw: "bitwise", the largest difference, or the error."""
    try:
        found = train(name, technique, *plan)
        named = expected.named_parameters()
        differences = [(found[key] - parameter).abs().max() for key, parameter in named]
        largest = torch.stack(differences).max()  # NaN if one is
        seen = (largest.nan_to_num(torch.inf).item(), "")
    except Exception as error:
        seen = (float("inf"), f"{type(error).__name__}: {error}".split("\n")[0])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    difference, message = max(everyone)
    return message or (f"{difference:.0e}" if difference else "bitwise")


def results_of(name):
    """Return a result for each of HEADS."""
    expected = train_on_one_device(name, dist.get_world_size())
    results = [compare(name, expected, technique) for technique in TECHNIQUES]
    if name not in PLANS:
        return *results, "–"
    expected = train_on_one_device(name, 1)
    return *results, compare(name, expected, tensor_parallel, PLANS[name])


def show(*words, file=None):
    if dist.get_rank() == 0:
        print(*words, file=file, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("architecture", nargs="*", help=f"of {list(ARCHITECTURES)}; default all")
    names = parser.parse_args().architecture or ARCHITECTURES
    if unknown := set(names) - ARCHITECTURES.keys():
        parser.error(f"unknown: {sorted(unknown)}")
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("MASTER_PORT", "29500")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rows = {}  # results: the names of the architectures that have them
    for name in names:
        show(f"{name} …", file=sys.stderr)
        rows.setdefault(results_of(name), []).append(name)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    show(f"{versions}, {dist.get_world_size()} ranks, {STEPS} steps of SGD in float32\n")
    show("|", " | ".join(["", *HEADS]), "|")
    show("|---" * (1 + len(HEADS)) + "|")
    for results, group in rows.items():
        show("|", " | ".join([", ".join(group), *results]), "|")
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

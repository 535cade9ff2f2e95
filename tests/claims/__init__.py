"""The oracle: the claims that hold for a right implementation.

The file of each kind says at its top how an implementation of that kind is called.
`./run_all.sh tests --ddp package.module:Name` or `--ddp path/to/file.py:Name` tries another class.
"""

import importlib

from claims.registry import CLAIMS, KINDS, default_group, resolve, run

FILES = [  # in the order of the README's table
    "ddp",
    "zero",
    "fsdp",
    "tensor_parallel",
    "vocabulary",
    "tp_block",
    "clip_grad_norm",
    "train_step",
    "checkpoint",
    "linear_cross_entropy",
    "pipeline",
    "amp",
    "fp8",
    "lora",
    "activation_checkpoint",
    "attention",
    "context_parallel",
    "all_reduce",
    "moe",
    "moe_mesh",
    "diloco",
    "muon",
]
CAUSES_OF = ["causes_of_training", "causes_of_layers"]  # which need the claims' files
for _file in [*FILES, *CAUSES_OF]:
    importlib.import_module(f"claims.{_file}")

__all__ = ["CLAIMS", "KINDS", "default_group", "resolve", "run"]

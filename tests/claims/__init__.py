"""The oracle: what is true of a right implementation. One file for each kind, which says at its top how
an implementation of that kind is called.

`./run_all.sh tests --ddp package.module:Name`, or `--ddp path/to/file.py:Name`, tries another class.
"""

import importlib

from claims.registry import CLAIMS, KINDS, default_group, resolve, run

FILES = [  # in the order of the README's table
    "ddp",
    "zero",
    "fsdp",
    "tensor_parallel",
    "pipeline",
    "amp",
    "lora",
    "activation_checkpoint",
    "attention",
    "all_reduce",
]
for _file in FILES:
    importlib.import_module(f"claims.{_file}")

OURS = {name: kind.ours for name, kind in KINDS.items()}
PYTORCHS = {name: kind.pytorchs for name, kind in KINDS.items() if kind.pytorchs}

__all__ = ["CLAIMS", "KINDS", "OURS", "PYTORCHS", "default_group", "resolve", "run"]

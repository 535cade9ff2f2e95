"""Wrong on purpose: common mistakes, each in a few lines, and the claim that catches it.

Most of them shipped somewhere. A class or function named Plain… is right; the mistakes are made in it.
"""

import importlib

FILES = [
    "ddp",
    "zero",
    "fsdp",
    "tensor_parallel",
    "pipeline",
    "amp",
    "lora",
    "attention",
    "activation_checkpoint",
    "all_reduce",
]

MISTAKES = []  # (kind, specification of the implementation, claim that does not hold for it)
RIGHT = []  # (kind, specification of the implementation, claims that do not hold for it)
for _file in FILES:
    _module = importlib.import_module(f"wrong.{_file}")
    for _kind, _claims in _module.MISTAKES.items():
        MISTAKES += [(_kind, f"wrong.{_file}:{name}", claim) for name, claim in _claims.items()]
    for _kind, _claims in getattr(_module, "RIGHT", {}).items():
        RIGHT += [(_kind, f"wrong.{_file}:{name}", claims) for name, claims in _claims.items()]

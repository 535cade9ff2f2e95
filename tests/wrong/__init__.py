"""Wrong on purpose: common mistakes, each in a few lines, and the claim that catches each.

Most of them shipped somewhere. The implementations in RIGHT are right. Mistakes are made in
them, and the claims listed with them say what they lack. UNUSUAL ones are right as well.
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
    "activation_checkpoint",
    "attention",
    "context_parallel",
    "all_reduce",
    "moe",
    "diloco",
    "muon",
    "unusual",
]

MISTAKES = []  # (kind, "wrong.file:name", the claim that does not hold)
RIGHT = []  # (kind, "wrong.file:name", the claims that do not hold)
UNUSUAL = []  # (kind, "wrong.file:name", claim, outcome)
for _file in FILES:
    _module = importlib.import_module(f"wrong.{_file}")
    for _kind, _claims in _module.MISTAKES.items():
        MISTAKES += [(_kind, f"wrong.{_file}:{name}", claim) for name, claim in _claims.items()]
    for _kind, _claims in getattr(_module, "RIGHT", {}).items():
        RIGHT += [(_kind, f"wrong.{_file}:{name}", claims) for name, claims in _claims.items()]
    for _kind, _names in getattr(_module, "UNUSUAL", {}).items():
        for _name, _claims in _names.items():
            UNUSUAL += [(_kind, f"wrong.{_file}:{_name}", *each) for each in _claims.items()]

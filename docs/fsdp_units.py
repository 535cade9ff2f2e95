"""Print what each unit of fsdp.py does in a step. pictures.py runs this and draws fsdp.svg.

Run:  torchrun --nproc-per-node 2 docs/fsdp_units.py
"""

import functools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import fsdp


def main():
    demo = fsdp.Demo(__doc__, steps=3)
    model = demo.start("fsdp", bitwise=True)
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number):
        inputs, targets = demo.batch(number)
        optimizer.zero_grad()
        fsdp.language_loss(model(demo.part(inputs)), demo.part(targets)).backward()
        optimizer.step()

    for number in range(demo.args.steps):  # the first step records the order of the units
        step(number)
    groups = {}
    for i, layer in enumerate(model):
        groups[f"{i} {type(layer).__name__}"] = layer._fsdp_unit.groups[0]
    moves = record_moves(groups, lambda: step(demo.args.steps))
    demo.show(timeline(moves))


def record_moves(groups, step):
    """Run a step. Return [(seconds, label, sign), …].

    From that time on, the group of that label does what the sign stands for.
    """
    signs = {"start_unshard": "·", "finish_unshard": "F", "reshard": " "}
    signs |= {"start_reduce": "-", "finish_reduce": " "}
    moves = []

    def record(label, name, move, *args):
        group = groups[label]
        does_nothing = {
            "start_unshard": group.is_gathered,
            "reshard": not group.is_gathered,
            "finish_reduce": group.reduce_handle is None,
        }
        if does_nothing.get(name):
            return
        seconds = time.perf_counter()
        move(*args)
        if name.startswith("finish"):
            seconds = time.perf_counter()
        sign = "B" if name == "finish_unshard" and fsdp.in_backward() else signs[name]
        moves.append((seconds, label, sign))

    for label, group in groups.items():
        for name in signs:
            setattr(group, name, functools.partial(record, label, name, getattr(group, name)))
    step()
    return moves


def timeline(moves, width=100):
    """Draw a line for each unit. Each thing that a unit does gets at least one column."""
    start = moves[0][0]
    end = moves[-1][0]
    lines = {label: "" for _, label, _ in moves}
    doing = dict.fromkeys(lines, " ")
    for seconds, label, sign in moves:
        column = round(width * (seconds - start) / (end - start))
        # In columns. A group that does nothing needs none.
        at_least = 0 if doing[label] == " " else 1
        lines[label] += doing[label] * max(column - len(lines[label]), at_least)
        doing[label] = sign
    legend = "· gather, F forward, B backward, - reduce, each at least one column wide"
    title = f"\nunit         a step of {1e3 * (end - start):.0f} ms: {legend}"
    return "\n".join([title, *(f"{label:11}  {line}" for label, line in lines.items())])


if __name__ == "__main__":
    main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()

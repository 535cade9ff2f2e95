"""parallel_5d.py on eight ranks, with mistakes planted on each axis, and what compare.py names.

    OMP_NUM_THREADS=1 timeout 900 torchrun --standalone --nproc-per-node 8 tests/compare_grid.py

It takes some minutes on two cores. The exit status is 1 if a mistake is not named where it is, or
if a right run differs.
"""

import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_parallel_5d import make_args, make_batch

sys.path.insert(0, str(Path(__file__).parent.parent))

import compare
import parallel_5d as five
import tensor_parallel as tp

WITH_CP = {"pp": 2, "cp": 2, "tp": 2, "ep": 2}  # FSDP is over cp
WITH_DP = {"pp": 2, "tp": 2, "ep": 2}
STEPS = 2


class Right(five.Trainer):
    flags = WITH_CP
    grid = "pp=2,cp=2,tp=2"
    planted = "nothing"
    dtype = torch.float32
    origin = None

    def __init__(self):
        args = make_args(clip_grad=0.0, **self.flags)  # clipping would scale all gradients
        super().__init__(five.MODELS[args.model], args, torch.device("cpu"), self.dtype)
        self.plant()

    def plant(self):
        pass

    def layers(self):
        """Return {number: layer} of this rank."""
        return {name: layer for stage in self.stages for name, layer in stage.named_children()}


class RightInDouble(Right):
    dtype = torch.float64


class RightWithDP(Right):
    flags = WITH_DP
    grid = "pp=2,dp=2,tp=2"


class AveragesAUnit(RightWithDP):
    planted = "dp: FSDP averages the gradients of block 2, which are to be summed"
    origin = "gradient", r"2\.(norm|attention).*", "1/2 of", "dp", "once too often"

    def build_layer(self, number):
        self.number = number
        return super().build_layer(number)

    def fsdp_options(self, group):
        options = super().fsdp_options(group)
        if self.number == 2 and group is self.grid.fsdp_group:
            options["gradient_divide_factor"] = 2.0
        return options


class SameSequences(RightWithDP):
    planted = "dp: all ranks read the first half of the batch"
    origin = "forward", "0.word"

    def step(self, inputs, targets):
        self.grid.shard_rank = 0
        return super().step(inputs, targets)


class SendsAPartOfASum(Right):
    planted = "tp: the projection of block 1 sends its slice without the sum"
    origin = "forward", "1.attention.proj"

    def plant(self):
        if "1" in self.layers():
            proj = self.layers()["1"].attention.proj
            group = self.grid.tp_group
            proj.forward = lambda x: tp.scatter_to_sequence(F.linear(x, proj.weight), group)


class ForgetsTheNorms(Right):
    planted = "tp: the gradients of norms and routers are not summed"
    origin = "gradient", ".*(norm|gate).*", "sum over the", "tp", "all-reduce is missing"

    def reduce_whole(self):
        pass


class OwnKeysOnly(Right):
    planted = "cp: a rank attends to its own keys only"
    origin = "forward", "1.attention.proj"

    def step(self, inputs, targets):
        ring = five.ring_attention
        five.ring_attention = self.attend
        result = super().step(inputs, targets)
        five.ring_attention = ring
        return result

    def attend(self, q, k, v, **_):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class PositionsFromZero(Right):
    planted = "cp: positions begin at 0 on each rank"
    origin = "forward", "1.attention.proj"

    def step(self, inputs, targets):
        split = five.context_parallel.split_sequence
        five.context_parallel.split_sequence = self.split_sequence
        self.split = split
        result = super().step(inputs, targets)
        five.context_parallel.split_sequence = split
        return result

    def split_sequence(self, x, dim, group):
        part = self.split(x, dim, group)
        is_position = torch.equal(x[0], torch.arange(x.shape[1]))
        return torch.arange(part.shape[1])[None] if is_position else part


class RowsInOtherOrder(Right):
    planted = "ep: the rows of the experts come back in another order, in block 3"
    origin = "forward", r"3\.mlp.*"

    def plant(self):
        if "3" in self.layers():
            experts = self.layers()["3"].mlp.experts
            experts.register_forward_hook(lambda module, args, output: output.roll(1, 0))


class HalvesExperts(Right):
    planted = "ep: the gradients of block 4's experts are divided by the ranks once more"
    origin = "gradient", r"4\.mlp\.experts.*", "1/2 of"

    def reduce_whole(self):
        super().reduce_whole()
        if "4" in self.layers():
            for parameter in self.layers()["4"].mlp.experts.parameters():
                parameter.grad /= 2


class FirstMicroBatchAgain(Right):
    planted = "pp: the second stage computes with the first micro-batch each time"
    origin = "forward", r"3\.norm1"

    def plant(self):
        if self.grid.pp_rank:
            self.stages[0].register_forward_pre_hook(self.repeat)

    def step(self, inputs, targets):
        self.first = None
        return super().step(inputs, targets)

    def repeat(self, stage, args):
        self.first = args[0].detach() if self.first is None else self.first
        return (args[0] * 0 + self.first,)


class SendsGradientsTwice(Right):
    planted = "pp: the gradient that goes to the first stage is doubled"
    origin = "backward", "2", "2 times"

    def plant(self):
        if self.grid.pp_rank:
            self.stages[0].register_forward_pre_hook(self.double)

    def double(self, stage, args):
        x = args[0].view_as(args[0])
        x.register_hook(lambda gradient: 2 * gradient)
        return (x,)


RUNS = [value for value in vars().values() if isinstance(value, type) and issubclass(value, Right)]


def train_on_ranks(trainer, directory):
    def rename(name):
        return name.partition(".")[2] or "stage"  # without the number of the stage on this rank

    with compare.record(directory, trainer.stages, rename):
        for number in range(STEPS):
            trainer.step(*make_batch(trainer.args, number))


def train_on_one_device(args, dtype, directory, noise):
    """As parallel_5d.train_on_one_device() does."""
    model = five.plain_model(five.MODELS[args.model], args.seed).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with compare.record(directory, model, noise=noise):
        for number in range(STEPS):
            inputs, targets = make_batch(args, number)
            optimizer.zero_grad()
            weight = 1 / five.count_tokens(targets)
            m = args.microbatches
            for x, y in zip(inputs.chunk(m), targets.chunk(m), strict=True):
                losses = F.cross_entropy(
                    model(x).flatten(0, 1),
                    y.T.flatten(),
                    ignore_index=five.IGNORE,
                    reduction="sum",
                )
                aux_loss = sum(block.mlp.aux_loss for block in model[1:-1])
                (losses * weight + args.aux_weight / m * aux_loss).backward()
            optimizer.step()


def compare_run(run, folder):
    """Return whether the origin is what was planted, on rank 0. Print both."""
    torch.manual_seed(0)
    trainer = run()
    train_on_ranks(trainer, folder / run.__name__)
    dist.barrier()
    if dist.get_rank():
        return True
    for name, noise in (("one", 0), ("noise", 1)):
        train_on_one_device(trainer.args, run.dtype, folder / name, noise)
    try:
        found = compare.compare(
            folder / "one", folder / run.__name__, run.grid, folder / "noise"
        ).origin
    except compare.CannotCompare as error:
        print(f"| {run.planted} | CANNOT COMPARE. {error} |", flush=True)
        return False
    print(f"| {run.planted} | {in_words(found)} |", flush=True)
    if found is None or run.origin is None:
        return found is run.origin
    kind, name, *words = run.origin
    is_there = found.kind == kind and re.fullmatch(name, found.name)
    return bool(is_there) and all(word in found.note for word in words)


def in_words(origin):
    if origin is None:
        return "agree"
    return f"step {origin.step} {origin.kind} `{origin.name}`: {origin.note}"


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    names = sys.argv[1:]
    runs = [run for run in RUNS if not names or run.__name__ in names]
    missed = [run.__name__ for run in runs if not compare_run(run, Path(folder[0]))]
    dist.barrier()
    dist.destroy_process_group()
    if missed:
        print(f"not named: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

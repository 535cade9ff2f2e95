"""parallel_3d.py: every grid trains as one device does, and sends and holds what the formulas say."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time

import pool
import pytest
import torch
import torch.distributed as dist
from launch import ROOT, TORCHRUN, descendants, launch

import ddp
import parallel_3d
import tensor_parallel
import zero
from parallel_3d import MODELS, Grid, Trainer, arguments, plain_model, train_on_one_device

FILE = ROOT / "parallel_3d.py"
GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # (tp, pp) of 4 ranks
TINY = MODELS["gpt2-tiny"]


def batches(args, steps=5, masked=0.0):
    """Global batches, with targets of -100 where masked: more of them in the first sequences than in the last."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(TINY.V, (args.global_batch_size, args.sequence_length + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        chance = masked * torch.linspace(1.5, 0.1, args.global_batch_size)[:, None]
        targets[torch.rand(targets.shape, generator=generator) < chance] = -100
        yield inputs, targets


def options(*flags, dtype="float64"):
    sizes = [
        "--sequence-length",
        "8",
        "--global-batch-size",
        "8",
        "--warmup",
        "2",
        "--lr",
        "0.01",
        "--clip-grad",
        "0.5",
    ]
    return arguments([*sizes, "--dtype", dtype, *flags])


def whole_layers(trainer):
    """{number of a layer of the plain model: its whole state}, of this rank's layers."""
    mine = range(trainer.grid.at["pp"], trainer.num_stages, trainer.grid.pp)
    for stage, layers in zip(mine, trainer.stages, strict=True):
        numbers = parallel_3d.layers_of_stage(trainer.config, stage, trainer.num_stages)
        for number, layer in zip(numbers, layers, strict=True):
            yield number, tensor_parallel.full_state_dict(layer)


def body_equal(tp, pp, flags, masked):
    """Losses, gradient norms and parameters of one device, up to the order of sums."""
    torch.manual_seed(0)
    args = options(*flags)
    trainer = Trainer(TINY, Grid(tp, pp), args)
    plain = train_on_one_device(TINY, args, batches(args, masked=masked))
    for (inputs, targets), (loss, norm, model) in zip(batches(args, masked=masked), plain, strict=True):
        before = trainer.schedule.get_last_lr()
        ours = trainer.step(inputs, targets)
        assert ours == pytest.approx((loss, norm), rel=1e-11), (ours, loss, norm)
        assert before != trainer.schedule.get_last_lr() or before[0] == args.lr
        for number, state in whole_layers(trainer):
            expected = model[number].state_dict()
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert value.shape == expected[name].shape
                largest = (value - expected[name]).abs().max().item()
                assert largest < 1e-11, (number, name, largest)
    agree_on_replicas(trainer)


def agree_on_replicas(trainer):
    """What several ranks hold is bitwise the same on all."""
    for axis in ("tp", "dp"):
        for parameter in trainer.parameters:
            if axis == "tp" and getattr(parameter, "tensor_parallel", None) is not None:
                continue
            everyone = [torch.empty_like(parameter) for _ in range(getattr(trainer.grid, axis))]
            dist.all_gather(everyone, parameter.detach(), group=trainer.grid.group(axis))
            assert all(torch.equal(everyone[0], other) for other in everyone)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equal_to_one_device(grid):
    pool.run(4, body_equal, *grid, [], 0.0)


SGD = ["--optimizer", "SGD", "--lr", "0.5"]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_zero_sequence_parallelism_and_masked_targets(grid):
    """The loss is the mean over the tokens of the global batch, wherever they are."""
    pool.run(4, body_equal, *grid, ["--zero1", "--sequence-parallel", *SGD], 0.4)


@pytest.mark.parametrize("flags", [SGD, ["--zero1", "--clip-grad", "0"], ["--sequence-parallel"]], ids=" ".join)
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_one_at_a_time(grid, flags):
    pool.run(4, body_equal, *grid, flags, 0.4)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("grid", [(2, 2), (1, 4)], ids=str)
def test_schedules(grid, schedule):
    pool.run(4, body_equal, *grid, ["--schedule", schedule, "--sequence-parallel"], 0.0)


@pytest.mark.parametrize("grid", [(2, 2), (1, 2)], ids=str)
def test_interleaved_stages(grid):
    flags = ["--schedule", "interleaved_1f1b", "--stages-per-rank", "2"]
    pool.run(4, body_equal, *grid, [*flags, "--zero1", "--sequence-parallel"], 0.0)
    pool.run(4, body_equal, *grid, flags, 0.0)


def body_skipped(flags, dtype):
    """One rank's slice of a weight overflows: no rank takes the step, and all take the next."""
    args = options(*flags, "--clip-grad", "1", dtype=dtype)
    trainer = Trainer(TINY, Grid(2, 2), args)
    for number, batch in enumerate(batches(args, steps=3)):
        before = [parameter.detach().clone() for parameter in trainer.parameters]
        if number == 1 and pool.rank() == 3:
            weight = trainer.stages[0][0].linear1.weight
            hook = weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        _, norm = trainer.step(*batch)
        if number == 1 and pool.rank() == 3:
            hook.remove()
        same = [torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True)]
        assert math.isfinite(norm) == (number != 1)
        assert all(same) if number == 1 else not any(same[:2]), number
    assert all(parameter.isfinite().all() for parameter in trainer.parameters)


@pytest.mark.parametrize(("flags", "dtype"), [([], "float64"), (["--zero1"], "float32"), ([], "bfloat16")], ids=str)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(flags, dtype):
    pool.run(4, body_skipped, flags, dtype)


def body_grid(tp, pp):
    grid, rank = Grid(tp, pp), pool.rank()
    dp = 4 // (tp * pp)
    assert (grid.at["pp"] * dp + grid.at["dp"]) * tp + grid.at["tp"] == rank
    assert dist.get_process_group_ranks(grid.group("tp")) == list(range(rank // tp * tp, rank // tp * tp + tp))
    assert grid.sum(rank, "tp", "dp", "pp") == 6
    return grid.at


def test_rank_order():
    """Megatron's: tensor innermost, then data, then pipeline."""
    for tp, pp in GRIDS:
        at = pool.run(4, body_grid, tp, pp)
        assert [place["tp"] for place in at] == [rank % tp for rank in range(4)]
        assert [place["pp"] for place in at] == [rank // (4 // pp) for rank in range(4)]


def body_wrong(flags, message):
    args = options(*flags)
    with pytest.raises(ValueError, match=message):
        Trainer(TINY, Grid(args.tp, args.pp), args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 3", "--tp 3 × --pp 1 = 3 ranks must divide the world of 4"),
        ("--global-batch-size 12 --micro-batch-size 5", "multiple of --micro-batch-size 5 × 4 data-parallel ranks"),
        ("--global-batch-size 2", "--global-batch-size 2 must be a multiple of --micro-batch-size 2 × 4"),
        ("--pp 4 --stages-per-rank 2", "8 stages on 4 ranks; the model has 4 blocks"),
        ("--tp 2 --stages-per-rank 2", "2 stages on 1 ranks"),
        ("--sequence-length 129", "--sequence-length 129; the model has 128 positions"),
        ("--zero1 --dtype float16", "use --dtype bfloat16"),
    ],
)
def test_wrong_arguments(flags, message):
    pool.run(4, body_wrong, flags.split(), message)


def body_costs(tp, pp, flags):
    args = options(*flags)
    trainer = Trainer(TINY, Grid(tp, pp), args)
    for number, batch in enumerate(batches(args, steps=2)):
        sent = parallel_3d.SentByAxis(trainer.grid)
        with sent:
            trainer.step(*batch)
        if number:  # in the first step ranks tell each other shapes
            for axis, expected in parallel_3d.sent_by_formula(trainer).items():
                # numbers on which ranks agree: sizes and flags, tokens, losses and norms, flags of ZeRO
                assert 0 <= sent.by_axis[axis] - expected < 2000, (axis, sent.by_axis, expected)
    psi = sum(parameter.numel() for parameter in trainer.parameters)
    held = zero.held_by(trainer.optimizer) if args.zero1 else ddp.held(trainer.parameters, trainer.optimizer)
    state = 2 * 8 * psi / (trainer.grid.dp if args.zero1 else 1)
    assert held[0] == pytest.approx(8 * psi, rel=0.01)
    assert state <= held[2] < 1.02 * state + 2000  # the paddings of its buckets, and the counts of steps
    padded = -(-TINY.V // (128 * tp)) * 128 * tp
    counted = sum(parameter.numel() for parameter in trainer.parameters if trainer.counts(parameter))
    assert trainer.grid.sum(counted, "tp", "pp") == TINY.parameters() + (padded - TINY.V) * TINY.h


@pytest.mark.parametrize("flags", ["", "--sequence-parallel --schedule gpipe --micro-batch-size 1 --zero1"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sent_and_held_bytes(grid, flags):
    pool.run(4, body_costs, *grid, flags.split())


def body_dropout(tp, pp, flags):
    """On each axis: ranks that hold the same stay the same; pipelines that see other data draw other masks."""
    args = options("--dropout", "0.3", *flags)
    results = []
    for _ in range(2):
        trainer = Trainer(TINY, Grid(tp, pp), args)
        half = next(batches(args))[0][: args.global_batch_size // trainer.grid.dp]
        batch = half.repeat(trainer.grid.dp, 1)  # every pipeline gets the same
        results.append(trainer.step(batch, batch.roll(-1, 1)))
        agree_on_replicas(trainer)
        if trainer.pipeline.losses is not None:
            losses = torch.stack(trainer.pipeline.losses)
            everyone = [torch.empty_like(losses) for _ in range(trainer.grid.dp)]
            dist.all_gather(everyone, losses, group=trainer.grid.group("dp"))
            for a, b in itertools.combinations(everyone, 2):
                assert (a - b).abs().min() > 1e-4
    assert results[0] == results[1]  # bitwise from run to run


@pytest.mark.parametrize("flags", [[], ["--sequence-parallel", "--zero1"]], ids=str)
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2), (1, 2)], ids=str)
def test_dropout(grid, flags):
    pool.run(4, body_dropout, *grid, flags)


def body_low_precision(tp, pp, flags, dtype):
    losses = {}
    for kind in ("float32", dtype):
        args = options(*flags, dtype=kind) if kind == dtype else options(dtype=kind)
        trainer = Trainer(TINY, Grid(tp, pp), args)
        losses[kind] = [trainer.step(*batch) for batch in batches(args, steps=4)]
        agree_on_replicas(trainer)
    roundoff = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    for (loss, _), (expected, _) in zip(losses[dtype], losses["float32"], strict=True):
        assert loss != expected
        assert abs(loss - expected) < 4 * roundoff * expected
    norm, expected = losses[dtype][0][1], losses["float32"][0][1]  # later ones are of other weights
    assert abs(norm - expected) < 4 * roundoff * expected


@pytest.mark.parametrize(("flags", "dtype"), [([], "bfloat16"), (["--zero1"], "bfloat16"), ([], "float16")], ids=str)
def test_low_precision(flags, dtype):
    """Within a few units of roundoff of float32."""
    pool.run(4, body_low_precision, 2, 1, flags, dtype)
    pool.run(4, body_low_precision, 1, 2, flags, dtype)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("124m", 124_439_808), ("345m", 354_823_168), ("774m", 774_030_080), ("1.5b", 1_557_611_200)],
)
def test_number_of_parameters(name, parameters):
    config = MODELS[f"gpt2-{name}"]
    with torch.device("meta"):
        model = plain_model(config)
    assert sum(p.numel() for p in model.parameters()) == parameters == config.parameters()


def run(*flags, ranks=4, cwd=ROOT, **keywords):
    return launch([*TORCHRUN, "--nproc-per-node", ranks, FILE, "--steps", 3, *flags], cwd, **keywords)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_grids_of_fewer_ranks(ranks):
    done = run("--compare", "--dtype", "float64", "--global-batch-size", 12, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    verdicts = re.findall(r"max \|Δloss\| (\S+), max \|Δgrad_norm\| (\S+), equal", done.stdout)
    assert len(verdicts) == {1: 1, 2: 3, 3: 2}[ranks]  # 4 heads are not split over 3 ranks
    assert all(float(difference) < 1e-11 for verdict in verdicts for difference in verdict)


def test_grid_of_8_ranks(tmp_path):
    """2 × 2 × 2, on cores that they share; and what the metrics say."""
    flags = ["--tp", 2, "--pp", 2, "--dtype", "float64", "--sequence-parallel", "--zero1", "--metrics", tmp_path / "m"]
    done = run(*flags, ranks=8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"grid +tp 2 × pp 2 × dp 2", done.stdout)
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line.keys() >= {"step", "loss", "grad_norm", "lr", "tokens_per_second"} for line in lines)
    assert re.search(rf"loss +{lines[0]['loss']:.3f} → {lines[-1]['loss']:.3f}", done.stdout)


def test_progress_in_a_log(tmp_path):
    done = run("--model", "gpt2-tiny", "--dropout", "0.1", ranks=2)  # with dropout there is nothing to compare with
    assert re.findall(r"^step (\d)/3  loss \d\.\d+  grad norm \S+  lr \S+  \S+ tokens/s$", done.stdout, re.M) == [
        "1",
        "2",
        "3",
    ]
    assert "vs 1 device not compared" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", 3), "must divide"),
        (("--steps", 0), "--steps 0: at least 1"),
        (("--clip-grad", -1), "--clip-grad -1.0; it must be positive"),
        (("--micro-batch-size", 0), "multiple of --micro-batch-size 0"),
    ],
)
def test_wrong_command_lines(flags, message):
    done = run(*flags, ranks=2)
    assert done.returncode != 0
    assert len(re.findall(message, done.stderr)) == 1


@pytest.mark.parametrize("whom", ["a rank", "torchrun"])
def test_killed_in_the_middle(whom, tmp_path):
    """A rank that dies ends the others; a torchrun that is told to stop ends all."""
    mark = {"KILLED_BY_TEST": str(tmp_path)}
    command = [*TORCHRUN, "--nproc-per-node", "4", FILE, "--tp", "2", "--pp", "2", "--steps", "100000"]
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1", **mark, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    name = f"KILLED_BY_TEST={tmp_path}"
    try:
        end = time.monotonic() + 60
        while len(descendants(name)) < 5 and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(8)  # in the middle of training
        ranks = [pid for pid in descendants(name) if pid != process.pid]
        assert len(ranks) == 4
        os.kill(ranks[2] if whom == "a rank" else process.pid, signal.SIGKILL if whom == "a rank" else signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode != 0, errors
        end = time.monotonic() + 10
        while descendants(name) and time.monotonic() < end:
            time.sleep(0.2)
        assert not descendants(name)
    finally:
        for pid in descendants(name):
            os.kill(pid, signal.SIGKILL)


def ip(*arguments):
    return subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True, check=False)


def two_machines():
    """Two network namespaces, joined by a cable, with an address each. -> their names; why there are none"""
    if not shutil.which("ip"):
        return None, "needs the command ip (iproute2)"
    names = [f"p3d{os.getpid()}{side}" for side in "ab"]
    commands = [["netns", "add", name] for name in names]
    commands += [
        ["link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]]
    ]
    for i, name in enumerate(names):
        commands += [["-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "cable"]]
        commands += [["-n", name, "link", "set", device, "up"] for device in ("cable", "lo")]
    for command in commands:
        if (done := ip(*command)).returncode:
            for name in names:
                ip("netns", "del", name)
            return None, f"may not make network namespaces: ip {' '.join(command)}: {done.stderr.strip()}"
    return names, None


def test_two_machines():
    """Two ranks on each of two machines that reach each other by their addresses alone."""
    names, problem = two_machines()
    if problem:
        pytest.skip(problem)
    try:
        processes = []
        for i, name in enumerate(names):
            command = ["ip", "netns", "exec", name, *TORCHRUN[:-1], "--nnodes", "2", "--nproc-per-node", "2"]
            command += [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "10.77.0.1:29500",
                "--local-addr",
                f"10.77.0.{i + 1}",
            ]
            command += ["--rdzv-conf", f"is_host={i == 0}"]  # their names do not resolve to these addresses
            command += [str(FILE), "--tp", "2", "--pp", "2", "--dtype", "float64", "--steps", "3"]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
            processes.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert "equal within 1e-09" in "".join(output for output, _ in outputs)
        count = ip("netns", "exec", names[0], "cat", "/sys/class/net/cable/statistics/tx_bytes").stdout
        assert int(count) > 3 * 8 * 16 * 64 * 64  # activations of 3 steps
    finally:
        for process in processes:
            process.kill()
        for name in names:
            ip("netns", "del", name)

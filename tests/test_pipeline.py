"""pipeline.py against micro-batch accumulation on one device. More is in claims/pipeline.py."""

import collections
import copy
import gc
import inspect
import weakref
from contextlib import nullcontext
from functools import partial

import pool
import pytest
import pytorchs
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import Collectives, assert_equal, assert_same_parameters, randn
from torch.distributed.pipelining import schedules as theirs
from torch.utils.checkpoint import checkpoint

import ddp
import fsdp
import pipeline
from pipeline import SCHEDULES, Pipeline, build_schedule, simulate

# torch >= 2.7. Down the ranks and up again: two stages meet on the last rank, and the first and the
# last are on rank 0.
V_SHAPED = [n for n in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") if hasattr(theirs, n)]
dump_csv = inspect.signature(theirs.ScheduleInterleaved1F1B._dump_csv)

# ---- schedules, without a process

ranks = st.integers(1, 8)
micro_batches = st.integers(1, 16)
stages_per_rank = st.integers(1, 4)
forwards_per_backward = st.integers(1, 5)


@given(ranks, micro_batches, forwards_per_backward)
def test_naive_gpipe_and_1f1b_have_the_bubbles_and_peaks_of_the_docstring(p, m, b):
    gpipes_bubble = (p - 1) / (m + p - 1)
    expected = {
        "naive": (1 - 1 / p, [1] * p),
        "gpipe": (gpipes_bubble, [m] * p),
        "1f1b": (gpipes_bubble, [min(p - rank, m) for rank in range(p)]),
    }
    for name, (bubble, peaks) in expected.items():
        times = simulate(build_schedule(name, p, m), {"F": 1, "B": b})
        assert times.bubble_fraction == pytest.approx(bubble)
        assert times.peak_activations == peaks


@given(ranks, micro_batches)
def test_zero_bubble_has_a_third_of_the_bubble_at_the_memory_of_1f1b(p, m):
    times = simulate(build_schedule("zero_bubble", p, m))
    assert times.peak_activations == [min(p, m)] * p
    if m >= p:
        expected = (p - 1) / (3 * m + p - 1)
        assert times.bubble_fraction == pytest.approx(expected)


@given(ranks, st.integers(1, 5), stages_per_rank, forwards_per_backward)
def test_interleaved_stages_divide_the_bubble(p, rounds, v, b):
    m = rounds * p
    schedule = build_schedule("interleaved_1f1b", p, m, v)
    times = simulate(schedule, {"F": 1, "B": b})
    expected = (p - 1) / (v * m + p - 1)
    assert times.bubble_fraction == pytest.approx(expected)


@given(ranks, micro_batches, stages_per_rank)
def test_interleaved_and_zero_bubble_are_pytorchs_action_by_action(p, m, v):
    if m % max(1, m // p) == 0:  # PyTorch refuses others
        interleaved = pytorchs.build_schedule("ScheduleInterleaved1F1B", p, m, v)
        zero_bubble = pytorchs.build_schedule("ScheduleInterleavedZeroBubble", p, m)
        assert build_schedule("interleaved_1f1b", p, m, v) == interleaved
        assert build_schedule("zero_bubble", p, m) == zero_bubble


@pytest.mark.skipif("format" not in dump_csv.parameters, reason="this torch has one format only")
@pytest.mark.parametrize("name", [*V_SHAPED, "ScheduleInterleaved1F1B"])
def test_csv_files_are_pytorchs(name, tmp_path):
    schedule = pytorchs.make_schedule(name, 4, 8, 2)
    expected = pytorchs.order_of(schedule, 4)
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(tmp_path / form, format=form)
        assert pipeline.schedule_from_csv(tmp_path / form) == expected

    pipeline.schedule_to_csv(expected, tmp_path / "ours")
    schedule.pipeline_order = {}
    schedule._load_csv(tmp_path / "ours")
    assert pytorchs.order_of(schedule, 4) == expected


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        pytest.param(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "0B0 and 1F1", id="each waits"),
        pytest.param(["1F0 1B0"], "1F0 would", id="no first stage"),
        pytest.param(["0F0 0W0 0I0"], "FWI", id="W before I"),
        pytest.param(["0B0 0F0"], "BF", id="backward before forward"),
        pytest.param(["0F0 0B0 0W0"], "FBW", id="W after a whole backward"),
        pytest.param(["0F0"], "runs F of", id="no backward"),
        pytest.param(["0F0 0B0", "0F1 0B1"], "rank 0 runs FB", id="one stage on two ranks"),
    ],
)
def test_an_impossible_schedule_is_an_error(schedule, words):
    with pytest.raises(ValueError, match=words):
        simulate([actions.split() for actions in schedule])


# ---- stages


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Tuples(nn.Module):
    """Returns a tuple: integers, what needs no gradient, and what the next stage does not use."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.ignored = nn.Linear(6, 6)

    def forward(self, x, mask=None, rows=None, skip=0.0, unused=None):
        if mask is None:
            mask = x > 0
            rows = torch.arange(len(x) - 1, -1, -1)
        y = self.layer(x) + skip
        ignored = self.ignored(torch.cat([x, x]))
        return y[rows] * mask, mask, rows, torch.tanh(x), ignored[::2]


class Linears(nn.Module):
    """Linear layers in every situation that W must tell apart."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.no_weight = nn.Linear(6, 6)
        self.no_weight.weight.requires_grad_(False)
        self.no_bias = nn.Linear(6, 6)
        self.no_bias.bias.requires_grad_(False)
        self.strided = nn.Linear(6, 6)
        self.vector = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.layer = Layer()
        self.no_gradient = nn.Linear(6, 6)
        self.hooked = nn.Linear(6, 6)

    def forward(self, x):
        if not self.hooked.weight._backward_hooks:  # a copy of the module does not have it
            self.hooked.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        y = self.frozen(self.hooked(x))
        y = y + self.strided(y.mT.contiguous().mT)
        mean = y.flatten(end_dim=-2).mean(0)
        y = torch.relu_(self.twice(y)) + self.twice(y + self.vector(mean))
        with torch.autocast(pool.device().type, torch.bfloat16):
            for linear in (self.no_weight, self.no_bias, self.normed):
                y = y + torch.tanh(linear(y))
            y = checkpoint(self.layer, y, use_reentrant=False)
        return y.float() + NoGradient.apply(self.no_gradient(y.float()))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


class Transposed(nn.Linear):
    """Its output is dense, but not contiguous. The next layer rounds differently on a copy."""

    def __init__(self):
        super().__init__(33, 33)

    def forward(self, x):
        return super().forward(x.mT).mT


# ---- results


def make_batch(step, rows, *shape):
    """Inputs and targets."""
    return randn((2, rows, *(shape or (6,))), step, torch.float32)


def loss_fn(output, target):
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def accumulate(stages, inputs, targets, m):
    """One device, plainly: each micro-batch's loss counts by its samples. Return the mean."""
    losses = []
    for x, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        y = x
        for stage in stages:
            y = stage(*y) if isinstance(y, tuple) else stage(y)
        loss = loss_fn(y, target) * (len(target) / len(targets))
        if torch.is_grad_enabled():
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


class Run:
    """This rank's part of a pipeline, and all of its stages on one device."""

    def __init__(self, make, schedule, m, v=1, wrap=copy.copy):
        p = pool.world_size()
        build = build_schedule if schedule in SCHEDULES else pytorchs.build_schedule
        schedule = build(schedule, p, m, v)
        torch.manual_seed(1)
        self.m = m
        self.plain = nn.ModuleList(make() for _ in range(p * v))
        actions = pipeline.parse(schedule[pool.rank()])
        self.own = sorted({action.stage for action in actions})
        self.stages = nn.ModuleList()
        for number in self.own:
            stage = copy.deepcopy(self.plain[number])
            self.stages.append(wrap(stage))
        self.ours = Pipeline(self.stages, schedule, m, loss_fn, pool.group())

    def step(self, inputs, targets):
        """Ranks see only what they need. Losses are the same."""
        is_last = len(self.plain) - 1 in self.own
        inputs_here = inputs if 0 in self.own else None
        loss = self.ours.step(inputs_here, targets if is_last else None)
        expected = accumulate(self.plain, inputs, targets, self.m)
        assert_equal(loss, expected if is_last else None, exact=True)

    def assert_same(self):
        for stage, number in zip(self.stages, self.own, strict=True):
            assert_same_parameters(stage, self.plain[number], exact=True)


def train(run):
    """The last micro-batch has a row less."""
    parameters = [*run.stages.parameters(), *run.plain.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(3):
        run.step(*make_batch(step, 2 * run.m - 1, 5, 6))
        optimizer.step()
        run.assert_same()


@pytest.mark.parametrize("name", [*SCHEDULES, *V_SHAPED])
@pool.on(1, 3)
def test_two_stages_on_each_rank_train_as_one_device(name):
    train(Run(Layer, name, m=7, v=2))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble"])
@pool.on(3)
def test_stages_that_return_tuples_train_as_one_device(name):
    train(Run(Tuples, name, m=3, v=2))


@pool.on(1, 3)
def test_linear_layers_of_all_kinds_train_as_one_device_with_w():
    train(Run(Linears, "zero_bubble", m=3))
    assert F.linear is pipeline.linear


@pool.on(2)
def test_under_no_grad_a_step_is_a_forward_of_any_batch():
    run = Run(Layer, "zero_bubble", 4)
    run.step(*make_batch(0, 8))
    with torch.no_grad():
        run.step(*make_batch(1, 12))
    run.step(*make_batch(2, 8))
    run.assert_same()


@pool.on(2)
def test_activations_keep_their_strides():
    run = Run(Transposed, "1f1b", 4)
    for step in range(3):
        run.step(*make_batch(step, 8, 33, 33))
    run.assert_same()


@pool.on(1)
def test_a_batch_may_be_a_tuple_of_tensors():
    torch.manual_seed(0)
    stage = nn.Bilinear(6, 6, 6)
    inputs, targets = make_batch(0, 8)
    ours = Pipeline(stage, "1f1b", 4, F.mse_loss, pool.group())
    loss = ours.step((inputs, inputs), targets)
    expected = F.mse_loss(stage(inputs, inputs), targets)
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [1, 4])
@pool.on(1, 2, 3)
def test_the_idea_trains_as_one_device(name, m):
    torch.manual_seed(1)
    last = pool.world_size() - 1
    plain = nn.ModuleList(Layer() for _ in range(last + 1))
    stage = copy.deepcopy(plain[pool.rank()])
    for step in range(2):
        inputs, targets = make_batch(step, 2 * m)
        chunks = zip(inputs.chunk(m), targets.chunk(m), strict=True)
        group = pool.group()
        loss = pipeline.blocking_step(name, stage, list(chunks), F.mse_loss, inputs[:2], group)
        expected = accumulate(plain, inputs, targets, m)
        assert_equal(loss, expected if pool.rank() == last else None, exact=True)
    assert_same_parameters(stage, plain[pool.rank()], exact=True)


# ---- memory and messages


def count_alive(modules):
    """Count the inputs of the modules that are alive, and note each new count."""
    alive = collections.Counter()
    counts = []

    def count(module, inputs):
        alive["now"] += 1
        counts.append(alive["now"])
        weakref.finalize(inputs[0].untyped_storage(), alive.subtract, ["now"])

    for module in modules:
        module.register_forward_pre_hook(count)
    return alive, counts


@pytest.mark.parametrize(("name", "v"), [*((name, 2) for name in SCHEDULES), ("1f1b", 1)])
@pool.on(3)
def test_as_many_activations_are_alive_as_simulated_and_none_after_a_step(name, v):
    run = Run(Layer, name, 7, v)
    # the input of a stage's last layer, which its backward needs
    alive, counts = count_alive([stage.down for stage in run.stages])
    gc.disable()  # freed by reference counts alone
    for step in range(2):
        run.step(*make_batch(step, 14))
        assert alive["now"] == 0
    peaks = simulate(run.ours.schedule).peak_activations
    assert max(counts) == peaks[pool.rank()]
    counts.clear()
    with torch.no_grad():
        run.step(*make_batch(2, 14))
    assert max(counts) == 1
    gc.enable()


@pool.on(3)
def test_at_most_four_messages_wait_to_be_received_and_none_after_a_step():
    run = Run(Layer, "gpipe", 7)
    waiting = []

    def note(*_):
        waiting.append(len(run.ours._sends))

    run.stages[0].register_forward_pre_hook(note)
    run.step(*make_batch(0, 14))
    assert max(waiting) <= 4
    assert not run.ours._sends


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", *V_SHAPED])
@pool.on(3)
def test_each_boundary_sends_activations_once_and_gradients_if_needed(name, frozen):
    run = Run(Layer, name, 7, 2)
    run.plain[:frozen].requires_grad_(False)
    for stage, number in zip(run.stages, run.own, strict=True):
        stage.requires_grad_(number >= frozen)
    run.step(*make_batch(0, 14))  # ranks tell each other shapes
    inputs, targets = make_batch(1, 14)
    with Collectives() as seen:
        run.step(inputs, targets)

    run.assert_same()
    rank_of = pipeline.rank_of_stages(run.ours.schedule)
    sends = 0
    for stage in range(5):
        if rank_of[stage] != rank_of[stage + 1]:
            sends += rank_of[stage] == pool.rank()
            sends += rank_of[stage + 1] == pool.rank() and stage >= frozen
    sum_of_modes = 8
    sent = sum(size for name, size in seen.calls if name != "recv_")
    assert sent == sends * inputs.nbytes + sum_of_modes


# ---- W, and gradients that are synchronised


def note_actions(ours):
    """Return a list that grows by the kind of each action that runs."""
    kinds = []
    run = ours.run

    def run_and_note(action, tensors):
        kinds.append(action.kind)
        return run(action, tensors)

    ours.run = run_and_note
    return kinds


@pool.on(1, 3)
def test_w_computes_the_gradients_of_linear_layers_weights_and_nothing_else():
    run = Run(Layer, "zero_bubble", 4)
    kinds = note_actions(run.ours)
    reached = collections.Counter()
    nodes = []  # which add to .grad
    for name, parameter in run.stages[0].named_parameters():

        def count(inputs, outputs, name=name):
            reached[kinds[-1], name] += 1

        view = parameter.view_as(parameter)
        nodes.append(view.grad_fn.next_functions[0][0])
        nodes[-1].register_hook(count)
    run.step(*make_batch(0, 8))
    expected = {("I", name): 4 for name in ("norm.weight", "norm.bias", "up.bias")}
    expected |= {("W", name): 4 for name in ("up.weight", "down.weight")}
    assert reached == expected


def group_of_one():
    groups = [dist.new_group([rank]) for rank in range(pool.world_size())]
    return groups[pool.rank()]


@pytest.mark.parametrize("wrap", [ddp.DistributedDataParallel, fsdp.fully_shard])
@pool.on(2)
def test_i_computes_the_gradients_that_data_parallelism_reduces(wrap):
    """Else W adds to a gradient that is not read any more, or that has been averaged."""
    group = group_of_one()
    run = Run(Layer, "zero_bubble", 4, wrap=partial(wrap, process_group=group))
    plain = run.plain[pool.rank()]
    for step in range(2):
        run.step(*make_batch(step, 8))
    for ours, parameter in zip(run.stages.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.flatten(), parameter.grad.flatten())  # FSDP's are flat


@pytest.mark.parametrize("backward", ["B", "IW"])
@pool.on(1)
def test_backward_context_knows_a_stages_last_backward(backward):
    """It is the last one in the schedule, whichever micro-batch that is of."""
    schedule = ["0F0", "1F0", "0F1", "1F1"]
    for start in ("1{}1", "1{}0", "0{}1", "0{}0"):
        schedule += [start.format(kind) for kind in backward]
    calls = []

    def context(stage, is_last):
        calls.append((stage, is_last))
        return nullcontext()

    stages = [Layer(), Layer()]
    ours = Pipeline(stages, [schedule], 2, F.mse_loss, pool.group(), backward_context=context)
    ours.step(*make_batch(0, 4))
    assert calls == [(stages[1], False), (stages[1], True), (stages[0], False), (stages[0], True)]


# ---- errors


def use(stage, inputs=None, targets=None, loss_fn=F.mse_loss):
    """Run a step on one rank."""
    batch = make_batch(0, 8)
    ours = Pipeline(stage, "zero_bubble", 4, loss_fn, pool.group())
    ours.step(batch[0] if inputs is None else inputs, batch[1] if targets is None else targets)


class Returns(nn.Linear):
    def __init__(self, value):
        super().__init__(6, 6)
        self.value = value

    def forward(self, x):
        return self.value


class RunsBackward(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class ChangesInput(nn.Linear):
    def forward(self, x):
        x = 2 * x
        y = super().forward(x)
        x.add_(y.detach())
        return y


@pytest.mark.parametrize("value", [{}, (), None], ids=str)
@pool.on(1)
def test_a_stage_that_returns_no_tensor_is_an_error(value):
    with pytest.raises(ValueError, match="tensors"):
        use([Returns(value), nn.Linear(6, 6)])


@pytest.mark.parametrize("what", ["inputs", "targets"])
@pool.on(1)
def test_a_batch_that_is_no_tensor_is_an_error(what):
    with pytest.raises(ValueError, match=r"not .*str"):
        use(nn.Linear(6, 6), **{what: "text"})


@pool.on(1)
def test_samples_that_torch_chunk_cannot_split_are_an_error():
    with pytest.raises(ValueError, match="into 3 micro-batches, not 4"):
        use(nn.Linear(6, 6), inputs=torch.ones(5, 6))


@pool.on(1)
def test_a_loss_that_is_not_a_scalar_is_an_error():
    with pytest.raises(ValueError, match=r"\(2, 6\).*mean"):
        use(nn.Linear(6, 6), loss_fn=nn.MSELoss(reduction="none"))


@pytest.mark.parametrize(
    ("make", "words"), [(RunsBackward, "backward"), (ChangesInput, "in place")]
)
@pool.on(1)
def test_what_w_cannot_compute_is_an_error(make, words):
    with pytest.raises(RuntimeError, match=words):
        use([nn.Linear(6, 6), make(6, 6)])


@pytest.mark.parametrize("what", ["shape", "dtype", "requires_grad"])
@pool.on(2)
def test_messages_that_change_after_the_first_step_are_an_error(what):
    inputs, targets = make_batch(0, 8)
    stage = nn.Linear(6, 6)
    ours = Pipeline(stage, "1f1b", 4, F.mse_loss, pool.group())
    ours.step(inputs, targets)
    if pool.rank() == 1:  # it would wait for the messages
        pipeline.agree_on_grad_mode(pool.group(), pool.device())
        return
    if what == "shape":
        inputs = inputs[:, None]
    elif what == "dtype":
        inputs = inputs.double()
        stage.double()
    else:
        stage.requires_grad_(False)
    with pytest.raises(ValueError, match=what):
        ours.step(inputs, targets)


@pool.on(2)
def test_no_grad_on_some_ranks_is_an_error_on_all():
    ours = Pipeline(nn.Linear(6, 6), "1f1b", 4, F.mse_loss, pool.group())
    batch = make_batch(0, 8)
    error = pytest.raises(ValueError, match="only 1 ranks")
    with torch.set_grad_enabled(pool.rank() == 0), error:
        ours.step(*batch)


LISTS = build_schedule("1f1b", 2, 4)
FROM_ONE = [["0F1", "0F2", "0B1", "0B2"], ["1F1", "1B1", "1F2", "1B2"]]


@pytest.mark.parametrize(
    ("stages", "schedules", "words"),
    [
        pytest.param([0, 0], ["1f1b", "1f1b"], "0 stages", id="no stages"),
        pytest.param([0, 1], ["1f1b", "1f1b"], "", id="no stages on one rank"),
        pytest.param([1, 2], [LISTS, LISTS], r"\(4, 2, 0\)", id="too many stages"),
        pytest.param([1, 1], ["gpipe", "1f1b"], "one schedule", id="another schedule"),
        pytest.param([1, 1], ["2f2b", "2f2b"], "naive, gpipe, 1f1b", id="unknown schedule"),
        pytest.param([1, 1], ["2f2b", "1f1b"], "", id="unknown schedule on one rank"),
        pytest.param([1, 1], [LISTS * 2, LISTS * 2], "", id="a schedule for more ranks"),
        pytest.param([1, 1], [FROM_ONE, FROM_ONE], r"\[1, 2\]", id="micro-batches 1 and 2"),
    ],
)
@pool.on(2)
def test_wrong_arguments_are_an_error_on_every_rank(stages, schedules, words):
    rank = pool.rank()
    layers = [nn.Linear(6, 6) for _ in range(stages[rank])]
    with pytest.raises(ValueError, match=words):
        Pipeline(layers, schedules[rank], 4, F.mse_loss, pool.group())


@pool.on(2)
def test_pytorchs_data_parallelism_on_one_rank_is_refused_on_all():
    """It averages the gradients of one micro-batch only."""
    stage = nn.Linear(6, 6)
    group = group_of_one()
    if pool.rank() == 0:
        stage = nn.parallel.DistributedDataParallel(stage, process_group=group)
    with pytest.raises(ValueError, match=r"pass \.module"):
        Pipeline([nn.Sequential(stage)], "1f1b", 4, F.mse_loss, pool.group())


# ---- devices


@pytest.mark.cpu
@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo"])
@pool.on(2)
def test_the_name_of_the_backend_does_not_matter(backend):
    group = dist.new_group(range(2), backend=backend)
    assert dist.get_backend(group) != "gloo"
    ours = Pipeline(nn.Linear(6, 6), "1f1b", 4, F.mse_loss, group)
    loss = ours.step(*make_batch(0, 8))
    assert (loss is None) == (pool.rank() == 0)


@pytest.mark.parametrize("with_parameters", [[0], [1], []], ids=["rank 0", "rank 1", "none"])
@pool.on(2)
def test_a_stage_without_parameters_is_on_the_other_stages_type_of_device(with_parameters):
    """Otherwise it would send from the CPU, and the other ranks would receive over NCCL."""
    stage = nn.Tanh()
    if pool.rank() in with_parameters:
        stage = nn.Linear(6, 6, device="meta")
    ours = Pipeline(stage, "1f1b", 4, F.mse_loss, pool.group())
    assert ours.device.type == ("meta" if with_parameters else "cpu")


@pytest.mark.parametrize(("backend", "sends_from"), [("gloo", "cpu"), ("nccl", "meta")])
@pool.on(1)
def test_gloo_alone_sends_from_the_hosts_memory(backend, sends_from):
    stage = nn.Linear(6, 6, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda _: f"cpu:gloo,meta:{backend}")
        ours = Pipeline(stage, "gpipe", 2, F.mse_loss, pool.group())
    assert ours._wire.type == sends_from


@pool.on(1)
def test_inputs_and_targets_are_moved_to_the_stages_device():
    seen = []

    def loss_fn(output, target):
        seen.append((output.device.type, target.device.type))
        return F.mse_loss(output, target)

    ours = Pipeline(nn.Linear(6, 6, device="meta"), "gpipe", 2, loss_fn, pool.group())
    ours._wire = torch.device("cpu")  # gloo has no tensors on meta
    ours.step(*make_batch(0, 8))
    assert seen == [("meta", "meta")] * 2

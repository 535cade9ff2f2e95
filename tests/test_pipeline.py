"""pipeline.py against micro-batch accumulation on one device. More is in claims/pipeline.py."""

import collections
import copy
import gc
import inspect
import weakref
from contextlib import nullcontext

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


@given(ranks, st.integers(1, 5), stages_per_rank)
def test_bubbles_and_peaks_are_those_of_the_docstring(p, rounds, v):
    m = rounds * p
    later = p - 1
    naives = later / p
    gpipes = later / (m + later)
    interleaved = later / (v * m + later)
    zero = later / (3 * m + later)
    expected = {  # stages per rank, bubble, activations on rank 0
        "naive": (1, naives, 1),
        "gpipe": (1, gpipes, m),
        "1f1b": (1, gpipes, p),
        "zero_bubble": (1, zero, p),
        "interleaved_1f1b": (v, interleaved, None),
    }
    for name, (stages, bubble, peak) in expected.items():
        schedule = build_schedule(name, p, m, stages)
        times = simulate(schedule)
        assert times.bubble_fraction == pytest.approx(bubble)
        assert peak in (times.peak_activations[0], None)


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


@pytest.mark.parametrize(("name", "m"), [("2f2b", 4), ("1f1b", 0)])
def test_an_unknown_name_or_no_micro_batch_is_an_error(name, m):
    with pytest.raises(ValueError, match="name one of"):
        build_schedule(name, 2, m)


IMPOSSIBLE = {  # why: the ranks' actions
    "deadlocks: .*0B0.*1F1": ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
    "nothing of stage 0": ["1F0 1B0"],
    "nothing of stage 1 .* 1;": ["0F0 0F1 0B0 0B1", "1F0 1B0"],
    "runs BF": ["0B0 0F0"],
    "runs FWI": ["0F0 0W0 0I0"],
    "ranks 0 and 1": ["0F0 0B0", "0F1 0B1"],
}


@pytest.mark.parametrize("why", IMPOSSIBLE)
def test_an_impossible_schedule_is_an_error(why):
    schedule = [actions.split() for actions in IMPOSSIBLE[why]]
    with pytest.raises(ValueError, match=why):
        simulate(schedule)


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
    """Returns integers, what needs no gradient, what the next stage ignores, and other strides."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()
        self.ignored = nn.Linear(6, 6)

    def forward(self, x, mask=None, rows=None, skip=None, unused=None):
        if mask is None:
            mask = x > 0
            rows = torch.arange(len(x) - 1, -1, -1)
            skip = x
        y = self.layer(x)
        if not skip.is_contiguous():
            y = y + skip
        ignored = self.ignored(torch.cat([x, x]))
        strided = torch.tanh(x).mT.contiguous().mT
        return y[rows] * mask, mask, rows, strided, ignored[::2]


class Linears(nn.Module):
    """Linear layers in every situation that W must tell apart."""

    def __init__(self):
        super().__init__()
        names = "frozen", "strided", "vector", "twice", "normed", "no_gradient", "hooked", "named"
        for name in names:
            self.add_module(name, nn.Linear(6, 6))
        self.frozen.weight.requires_grad_(False)
        nn.utils.parametrizations.weight_norm(self.normed)
        self.layer = Layer()

    def forward(self, x):
        if not self.hooked.weight._backward_hooks:  # a copy of the module does not have it
            self.hooked.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        y = self.hooked(x)
        y = F.linear(input=y, weight=self.named.weight, bias=self.named.bias)
        y = y + self.strided(y.mT.contiguous().mT)
        mean = y.flatten(end_dim=-2).mean(0)
        once = torch.relu_(self.twice(y))
        y = once + self.twice(y + self.vector(mean))
        with torch.autocast(pool.device().type, torch.bfloat16):
            y = y + torch.tanh(self.frozen(y))
            y = y + torch.tanh(self.normed(y))
            y = checkpoint(self.layer, y, use_reentrant=False).float()
        return y + NoGradient.apply(self.no_gradient(y))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


# ---- results


def make_pipeline(stages, schedule="1f1b", loss_fn=F.mse_loss, m=4):
    return Pipeline(stages, schedule, m, loss_fn, pool.group())


def make_batch(step, rows, *shape):
    """Inputs and targets."""
    return randn((2, rows, *shape, 6), step, torch.float32)


def loss_fn(output, target):
    first = pipeline.as_tensors(output)[0]
    return F.mse_loss(first, target)


def in_micro_batches(batch, m):
    chunks = [tensor.chunk(m) for tensor in batch]
    return list(zip(*chunks, strict=True))


def accumulate(stages, inputs, targets, m):
    """One device, plainly: each micro-batch's loss counts by its samples. Return the mean."""
    losses = []
    num_samples = len(targets)
    for *arguments, target in in_micro_batches((*inputs, targets), m):
        y = arguments
        for stage in stages:
            y = pipeline.as_tensors(stage(*y))
        share = len(target) / num_samples
        loss = loss_fn(y, target) * share
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def copy_of(tensor):
    copied = tensor.detach().clone()
    return copied.requires_grad_(tensor.requires_grad)


class Run:
    """This rank's part of a pipeline, and all of its stages on one device."""

    def __init__(self, make, name, m, v=1, wrap=copy.copy):
        p = pool.world_size()
        build = build_schedule if name in SCHEDULES else pytorchs.build_schedule
        schedule = build(name, p, m, v)
        torch.manual_seed(1)
        self.m = m
        self.plain = nn.ModuleList(make() for _ in range(p * v))
        actions = pipeline.parse(schedule[pool.rank()])
        self.own = sorted({action.stage for action in actions})
        self.has_last = p * v - 1 in self.own
        stages = [self.plain[number] for number in self.own]
        self.stages = nn.ModuleList(map(wrap, copy.deepcopy(stages)))
        self.ours = make_pipeline(self.stages, schedule, loss_fn, m)

    def step(self, *batch):
        """Ranks see only what they need. Inputs that need gradients get those of one device."""
        *inputs, targets = batch
        plain = [copy_of(tensor) for tensor in inputs]
        inputs_here = tuple(inputs) if 0 in self.own else None
        targets_here = targets if self.has_last else None
        loss = self.ours.step(inputs_here, targets_here)
        self.compare(loss, plain, targets)
        if 0 in self.own:
            for ours, expected in zip(inputs, plain, strict=True):
                assert_equal(ours.grad, expected.grad, exact=True)

    def compare(self, loss, inputs, targets):
        expected = accumulate(self.plain, inputs, targets, self.m)
        assert_equal(loss, expected if self.has_last else None, exact=True)
        for stage, number in zip(self.stages, self.own, strict=True):
            assert_same_parameters(stage, self.plain[number], exact=True)


CASES = [
    *[(Layer, name) for name in (*SCHEDULES, *V_SHAPED)],
    (Tuples, "interleaved_1f1b"),
    (Tuples, "zero_bubble"),
    (Linears, "zero_bubble"),
]


@pytest.mark.parametrize(("make", "name"), CASES)
@pool.on(1, 3)
def test_any_schedule_trains_as_one_device(make, name):
    """The last micro-batch has a row less. After a step, another batch goes forward only."""
    run = Run(make, name, 6, v=2)
    both = nn.ModuleList([run.stages, run.plain])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    for step in range(3):
        run.step(*make_batch(step, 11, 5))
        optimizer.step()
        with torch.no_grad():
            run.ours.step(*make_batch(step, 18, 5))
    assert F.linear is pipeline.linear


CLASSES = {
    **dict.fromkeys(["naive", "gpipe", "1f1b", "interleaved_1f1b"], pipeline.BasicPipeline),
    "zero_bubble": pipeline.ZeroBubblePipeline,
}


@pytest.mark.parametrize("name", CLASSES)
@pool.on(1, 3)
def test_the_technique_alone_trains_as_one_device(name):
    run = make_run(Layer, name, 6)
    run.ours = CLASSES[name](run.stages, name, 6, loss_fn, pool.group())
    for step in range(2):
        inputs, targets = make_batch(step, 11)
        loss = run.ours.step(inputs, targets)
        run.compare(loss, [inputs], targets)


@pool.on(1, 3)
def test_the_idea_trains_as_one_device():
    run = Run(Layer, "gpipe", 4)
    for step in range(2):
        inputs, targets = make_batch(step, 8)
        micro_batches = in_micro_batches((inputs, targets), 4)
        like, _ = micro_batches[0]
        stage = run.stages[0]
        loss = pipeline.gpipe_step(stage, micro_batches, loss_fn, like, pool.group())
        run.compare(loss, [inputs], targets)


class Prompted(Layer):
    def forward(self, x, prompt=None, unused=None):
        return super().forward(x if prompt is None else x + prompt)


def make_run(make, name, m):
    return Run(make, name, m, v=2 if name == "interleaved_1f1b" else 1)


@pytest.mark.parametrize("name", SCHEDULES)
@pool.on(1, 3)
def test_inputs_get_their_gradients_and_so_does_what_computed_them(name):
    run = make_run(Prompted, name, 6)
    encoder = nn.Linear(6, 6)
    for step in range(2):
        encoder.zero_grad()
        rows, targets = make_batch(step, 11, 5)
        x = rows.clone().requires_grad_()
        unused = rows.clone().requires_grad_()
        prompt = encoder(rows)
        prompt.retain_grad()
        run.step(x, prompt, unused, targets)
        if 0 in run.own:
            again = encoder(rows)
            expected = torch.autograd.grad(again, encoder.weight, prompt.grad)
            assert_equal(encoder.weight.grad, *expected, exact=True)
            assert unused.grad is None


class Sometimes(Layer):
    """Uses its second input for some micro-batches only."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(6, 6)

    def forward(self, x, extra=None):
        if extra is not None and x.sum() > 0:
            x = x + extra
        return super().forward(x), self.extra(x)


@pytest.mark.parametrize("name", SCHEDULES)
@pool.on(1, 3)
def test_an_input_that_only_some_micro_batches_use_has_the_gradient_of_those(name):
    """If none does, its layer has no gradient, as on one device, and weight decay leaves it."""
    run = make_run(Sometimes, name, 2)
    both = nn.ModuleList([run.stages, run.plain])
    parameters = both.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
    for step in range(8):
        inputs, targets = make_batch(step, 4)
        x = inputs.requires_grad_()
        extra = targets.clone().requires_grad_()
        run.step(x, extra, targets)
        optimizer.step()
        optimizer.zero_grad()


# ---- micro-batches with unequal numbers of tokens


def sum_over_tokens(output, target):
    return F.cross_entropy(output, target, reduction="sum")


def mean_over_tokens(output, target):
    count = (target != -100).sum()
    return sum_over_tokens(output, target) / count.clamp(min=1)


def train_on_unequal_numbers_of_tokens(name, loss_fn, num_items):
    """Micro-batches have 1, 3 and 0 tokens. Compare with the mean over tokens on one device."""
    run = make_run(Layer, name, 3)
    run.stages.double()
    run.plain.double()
    run.ours.loss_fn = loss_fn
    targets = torch.full([9], -100)
    targets[1] = 5
    targets[3:6] = torch.arange(3)
    for step in range(2):
        inputs = randn((9, 6), step)
        loss = run.ours.step(inputs, targets, num_items)
        output = nn.Sequential(*run.plain)(inputs)
        expected = F.cross_entropy(output, targets)
        expected.backward()
        mean = expected.detach() if run.has_last else None
        assert_equal(loss, mean, exact=False)
        pairs = zip(run.stages, run.own, strict=True)
        for stage, number in pairs:
            assert_same_parameters(stage, run.plain[number], exact=False)


@pytest.mark.parametrize("name", SCHEDULES)
@pool.on(1, 3)
def test_with_num_items_all_tokens_of_a_batch_count_alike(name):
    train_on_unequal_numbers_of_tokens(name, sum_over_tokens, num_items=4)


@pool.on(3)
def test_num_items_may_be_a_tensor():
    train_on_unequal_numbers_of_tokens("1f1b", sum_over_tokens, torch.tensor(4))


@pool.on(2)
def test_data_parallel_ranks_count_the_tokens_of_all():
    """They average gradients, so each divides by half of the tokens."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    plain = Layer().double()
    stage = copy.deepcopy(plain)
    inputs = randn((8, 6))
    targets = torch.full([8], -100)
    targets[2:5] = torch.arange(3)  # rank 0 has two of them, rank 1 has one
    loss = F.cross_entropy(plain(inputs), targets)
    loss.backward()

    ours = Pipeline(stage, "1f1b", 2, sum_over_tokens, alone)
    my_inputs = inputs.chunk(2)[pool.rank()]
    my_targets = targets.chunk(2)[pool.rank()]
    ours.step(my_inputs, my_targets, num_items=3 / 2)
    ddp.all_reduce_gradients(stage, pool.group())
    assert_same_parameters(stage, plain, exact=False)


@pool.on(1, 3)
def test_a_mean_of_means_over_unequal_numbers_of_tokens_is_noticed():
    with pytest.raises(AssertionError, match="not close"):
        train_on_unequal_numbers_of_tokens("1f1b", mean_over_tokens, None)


# ---- memory and messages


@pytest.mark.parametrize("name", SCHEDULES)
@pool.on(3)
def test_as_many_activations_are_alive_as_simulated_and_at_most_four_sent_messages(name):
    run = Run(Layer, name, 7, v=2)
    alive = collections.Counter()
    counts = []

    def count(module, inputs):
        alive["now"] += 1
        counts.append(alive["now"])
        weakref.finalize(inputs[0].untyped_storage(), alive.subtract, ["now"])
        assert len(run.ours._sends) <= 4

    for stage in run.stages:
        stage.down.register_forward_pre_hook(count)  # backward needs its input
    gc.disable()  # freed by reference counts alone
    for step in range(2):
        run.step(*make_batch(step, 14))
        assert alive["now"] == 0
        assert not run.ours._sends
    gc.enable()
    peaks = simulate(run.ours.schedule).peak_activations
    assert max(counts) == peaks[pool.rank()]


@pool.on(3)
def test_each_boundary_sends_activations_once_and_gradients_if_needed():
    run = Run(Layer, "1f1b", 7)
    run.stages[0].requires_grad_(pool.rank() > 0)
    run.ours.step(*make_batch(0, 14))  # ranks tell each other shapes
    batch = make_batch(1, 14)
    with Collectives() as seen:
        run.ours.step(*batch)
    sent = sum(size for name, size in seen.calls if name != "recv_")
    sum_of_modes = 8
    # Ranks 0 and 1 send activations, and rank 2 gradients, because the first stage is frozen.
    assert sent == batch[0].nbytes + sum_of_modes


# ---- W, and gradients that are synchronised


@pool.on(1)
def test_w_computes_the_gradients_of_linear_layers_weights_and_i_the_others():
    stage = Layer()
    ours = make_pipeline(stage, "zero_bubble", m=1)
    found = {}  # after an action: does the weight have a gradient, and the bias?
    run = ours.run

    def run_and_look(action, message):
        outputs = run(action, message)
        found[action.kind] = [each.grad is not None for each in stage.up.parameters()]
        return outputs

    ours.run = run_and_look
    ours.step(*make_batch(0, 8))
    assert found == {
        "F": [False, False],
        "I": [False, True],
        "W": [True, True],
    }


@pool.on(1)
def test_another_packages_linear_is_used_and_kept():
    """W would compute other gradients than, for example, those of a linear in fp8."""

    def doubled(x, weight, bias=None):
        return 2 * pipeline.linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", doubled)
        run = Run(Layer, "zero_bubble", 4)
        for step in range(2):
            run.step(*make_batch(step, 8))
            assert F.linear is doubled


def test_linear_is_restored_after_an_error_and_in_nested_contexts():
    def fail():
        with pipeline.leave_weights_to_w([], set()):
            outer = F.linear
            with pipeline.leave_weights_to_w([], set()):
                pass
            assert F.linear is outer
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert F.linear is pipeline.linear


@pool.on(2)
def test_ddp_averages_the_gradients_of_w():
    """Two pipelines of one rank each. One micro-batch: DDP averages in each backward."""
    stage = Layer()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    replica = ddp.DistributedDataParallel(copy.deepcopy(stage), process_group=pool.group())
    schedule = build_schedule("zero_bubble", 1, 1)
    Pipeline(replica, schedule, 1, loss_fn, alone).step(*make_batch(pool.rank(), 4))

    inputs, targets = make_batch(pool.rank(), 4)
    loss_fn(stage(inputs), targets).backward()
    ddp.all_reduce_gradients(stage, pool.group())
    assert_same_parameters(replica.module, stage, exact=True)


@pool.on(1)
def test_backward_context_knows_a_stages_last_backward():
    """It is the last one in the schedule, whichever micro-batch that is of."""
    schedule = ["0F0", "1F0", "0F1", "1F1", "1B1", "1I0", "1W0", "0I1", "0W1", "0B0"]
    stages = [Layer(), Layer()]
    calls = []

    def context(stage, is_last):
        calls.append((stages.index(stage), is_last))
        return nullcontext()

    ours = Pipeline(stages, [schedule], 2, loss_fn, pool.group(), context)
    ours.step(*make_batch(0, 4))
    expected = [(1, False), (1, True), (0, False), (0, True)]
    assert calls == expected


# ---- errors


class RunsBackward(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        loss = y.sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]


class ChangesInput(nn.Linear):
    def forward(self, x):
        x = 2 * x
        y = super().forward(x)
        x.add_(y.detach())
        return y


NOT_FOR_W = {RunsBackward: "backward", ChangesInput: "in place"}


@pytest.mark.parametrize("make", NOT_FOR_W)
@pool.on(1)
def test_what_w_cannot_compute_is_an_error(make):
    first = nn.Linear(6, 6)
    second = make(6, 6)
    ours = make_pipeline([first, second], "zero_bubble")
    with pytest.raises(RuntimeError, match=NOT_FOR_W[make]):
        ours.step(*make_batch(0, 8))


@pool.on(2)
def test_a_schedule_with_w_is_an_error_in_the_class_without():
    with pytest.raises(ValueError, match="use Pipeline"):
        pipeline.BasicPipeline(Layer(), "zero_bubble", 4, F.mse_loss, pool.group())


MISUSE = {  # samples, the loss
    r"into \[3\] micro-batches, not 4": (5, F.mse_loss),
    "return the mean": (8, nn.MSELoss(reduction="none")),
    "inputs, .* not .*NoneType": (0, F.mse_loss),
}


@pytest.mark.parametrize("words", MISUSE)
@pool.on(1)
def test_a_wrong_batch_or_loss_is_an_error(words):
    rows, loss_fn = MISUSE[words]
    ours = make_pipeline(nn.Linear(6, 6), "1f1b", loss_fn)
    batch = make_batch(0, rows) if rows else ()
    with pytest.raises(ValueError, match=words):
        ours.step(*batch)


@pool.on(1)
def test_targets_in_a_list_are_an_error():
    ours = make_pipeline(nn.Linear(6, 6))
    x, targets = make_batch(0, 8)
    with pytest.raises(ValueError, match=r"targets .* not .*list"):
        ours.step(x, [targets])


@pool.on(1)
def test_targets_with_a_graph_are_an_error_and_leaves_get_gradients():
    ours = make_pipeline(nn.Linear(6, 6), "1f1b", F.mse_loss)
    x, targets = make_batch(0, 8)
    leaf = targets.requires_grad_()
    ours.step(x, leaf)
    assert leaf.grad.any()
    with pytest.raises(ValueError, match="targets have a graph"):
        ours.step(x, 2 * leaf)


OTHER_SHAPES = {
    "one row": (1, 6),
    "the batch in dimension 1": (3, 8, 6),
    "four rows": (4, 6),
}


@pytest.mark.parametrize("why", OTHER_SHAPES)
@pool.on(1)
def test_an_input_without_the_batch_in_dimension_0_is_an_error(why):
    """Such as position ids for all samples. Four micro-batches would silently take a row each."""
    ours = make_pipeline(Prompted())
    x, targets = make_batch(0, 8)
    other = torch.zeros(OTHER_SHAPES[why])
    with pytest.raises(ValueError, match="Dimension 0 must be the batch"):
        ours.step((x, other), targets)


@pool.on(2)
def test_messages_that_change_after_the_first_step_are_an_error():
    ours = make_pipeline(Layer())
    ours.step(*make_batch(0, 8))
    if pool.rank() == 1:  # it would wait for the messages
        pipeline.check_grad_mode(pool.group(), pool.device())
        return
    with pytest.raises(ValueError, match="in the first step"):
        ours.step(*make_batch(1, 12))


@pool.on(2)
def test_no_grad_on_some_ranks_is_an_error_on_all():
    ours = make_pipeline(Layer())
    error = pytest.raises(ValueError, match="only 1 ranks")
    with torch.set_grad_enabled(pool.rank() == 0), error:
        ours.step(*make_batch(0, 8))


LISTS = build_schedule("1f1b", 2, 4)
THREE = build_schedule("1f1b", 2, 3)
ALONE = build_schedule("1f1b", 1, 4)
WRONG = {  # stages on ranks 0 and 1, their schedules, words of the error
    "too many stages on one rank": ([1, 2], [LISTS, LISTS], r"\(2, 4, 2, 0\)"),
    "other schedules": ([1, 1], ["gpipe", "1f1b"], "same schedule"),
    "an unknown schedule on one rank": ([1, 1], ["gpipe", "2f2b"], "same schedule"),
    "a list and a name": ([1, 1], [LISTS, "1f1b"], "same schedule"),
    "stages of a name": ([1, 2], ["1f1b", "1f1b"], "stages"),
    "a schedule for one rank": ([1, 1], [ALONE, ALONE], r"\(2, 4, 1, 0\)"),
    "a schedule of 3 micro-batches": ([1, 1], [THREE, THREE], r"\(2, 3"),
}


@pytest.mark.parametrize("why", WRONG)
@pool.on(2)
def test_wrong_arguments_are_an_error_on_every_rank(why):
    stages, schedules, words = WRONG[why]
    rank = pool.rank()
    layers = [Layer() for _ in range(stages[rank])]
    with pytest.raises(ValueError, match=words):
        make_pipeline(layers, schedules[rank])


@pool.on(1)
def test_a_rank_outside_of_the_group_is_told():
    with pytest.raises(ValueError, match="not in process_group"):
        Pipeline(Layer(), "1f1b", 4, F.mse_loss, dist.GroupMember.NON_GROUP_MEMBER)


@pool.on(1)
def test_pytorchs_data_parallelism_is_refused():
    """It averages the gradients of one micro-batch only."""
    stage = nn.parallel.DistributedDataParallel(Layer(), process_group=pool.group())
    with pytest.raises(ValueError, match=r"pass \.module"):
        make_pipeline(nn.Sequential(stage))


# ---- GPUs, for which the meta device stands


@pool.on(2)
def test_a_stage_without_parameters_is_on_the_other_stages_type_of_device():
    """Otherwise it would send from the CPU, and the other ranks would receive over NCCL.

    The first call to an NCCL group makes a communicator, for which all ranks wait.
    """
    stage = nn.Tanh()
    if pool.rank() == 1:
        stage = nn.Linear(6, 6, device="meta")
    devices = []

    def all_reduce(tensor, group):
        devices.append(tensor.device.type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        ours = make_pipeline(stage)
    assert ours.device.type == "meta"
    assert devices == ["meta"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda")],
)
def test_tensors_are_sent_from_where_the_backend_of_their_device_can_read_them(
    config, expected, monkeypatch
):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    device = pipeline.device_to_send_from(torch.device("cuda"), None)
    assert device.type == expected
    assert pipeline.device_to_send_from(torch.device("cpu"), None).type == "cpu"


def test_the_idea_sends_from_the_device_of_like(monkeypatch):
    """Gloo cannot read the memory of a GPU, so `like` is on the CPU then."""
    transfers = []

    class Done:
        def wait(self):
            pass

    def start_transfer(operation, tensor, peer, group):
        transfers.append((operation.__name__, peer, tensor.device.type))
        return Done()

    def to(tensor, other):  # torch refuses to copy from the meta device
        device = other.device if torch.is_tensor(other) else other
        return torch.zeros_like(tensor, device=device)

    monkeypatch.setattr(pipeline, "start_transfer", start_transfer)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    micro_batches = in_micro_batches(make_batch(0, 2), 2)
    like = torch.zeros(1, 6, device="meta")
    pipeline.gpipe_step(nn.Linear(6, 6), micro_batches, loss_fn, like)
    forward = [("irecv", 0, "meta"), ("isend", 2, "meta")]
    backward = [("irecv", 2, "meta"), ("isend", 0, "meta")]
    assert transfers == 2 * forward + 2 * backward

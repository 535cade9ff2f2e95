"""zero.py against one device, bit by bit. tests/claims has what holds for any such optimizer."""

import contextlib
import copy
import gc
import math
import weakref
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import (
    HOW,
    Blocks,
    Collectives,
    Outer,
    Reader,
    Watch,
    batch_loss,
    fake_world,
    loss_of,
    make_batch,
    make_model,
)

import zero

STAGES = (zero.Zero1, zero.Zero2, zero.Zero3)
each_stage = pytest.mark.parametrize("stage", STAGES)
whole_and_freed = pytest.mark.parametrize("stage", [zero.Zero1, zero.Zero3])


def assert_bitwise(ours, theirs):
    """Compare whole structures."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def whole(optimizer):
    """A context with whole parameters, which only Zero3 has not always."""
    return getattr(optimizer, "full_parameters", contextlib.nullcontext)()


def sgd(stage, model, **options):
    return stage(model, torch.optim.SGD, pool.group(), lr=0.1, **options)


def plain_model(dtype=torch.float32):
    return make_model("plain", dtype)


def backward(model, step=0, loss=batch_loss):
    here = loss(model, pool.rank(), step)
    here.backward()


def backward_on_one_device(plain, rounds, loss=batch_loss, dtype=None):
    """Leave the mean over ranks in .grad of `plain`, the masters of a model in `dtype`.

    In each round every rank adds up the gradients of these steps before they are reduced.
    """
    plain.zero_grad()
    for steps in rounds:
        for rank in range(pool.world_size()):
            model = copy.deepcopy(plain).to(dtype)
            model.zero_grad()
            for step in steps:
                loss(model, rank, step).backward()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                if q.grad is not None:
                    p.grad = q.grad.to(p.dtype) + (0 if p.grad is None else p.grad)
    for p in plain.parameters():
        if p.grad is not None:
            p.grad /= pool.world_size()


def assert_equal_to_one_device(ours, plain):
    with whole(ours):
        for p, q in zip(ours.module.parameters(), plain.parameters(), strict=True):
            assert_bitwise(p, q.to(p.dtype))


def make_pair(stage, model, name="AdamW", groups=nn.Module.parameters, offload=None, **options):
    """Return our optimizer, and that of one device over `plain`, an equal model."""
    plain = copy.deepcopy(model)
    if next(model.parameters()).itemsize == 2:
        plain.float()
    optimizer_class = getattr(torch.optim, name)
    how = {"params": groups(model), "offload": offload, "bucket_cap_mb": 1e-3}
    ours = stage(model, optimizer_class, pool.group(), **how, **options)
    return ours, optimizer_class(groups(plain), **options), plain


def train(stage, model, name="AdamW", loss=batch_loss, **options):
    """Train ours and one device for three steps. After each they are equal."""
    dtype = next(model.parameters()).dtype
    ours, theirs, plain = make_pair(stage, model, name, **options)
    for step in range(3):
        backward(model, step, loss)
        ours.step()  # drops the gradients
        backward_on_one_device(plain, [[step]], loss, dtype if dtype.itemsize == 2 else None)
        theirs.step()
        assert_equal_to_one_device(ours, plain)
    return ours, theirs, plain


# ---- The idea


def make_idea(stage, model):
    """Return the model to train and its sharded parameters."""
    if stage is zero.Zero3:
        model = nn.Sequential(*[zero.Zero3Unit(layer, pool.group()) for layer in model])
        return model, [each for unit in model for each in unit.sharded]
    sharded = [zero.ShardedParameter(p, pool.group()) for p in model.parameters()]
    if stage is zero.Zero2:
        zero.zero2_hooks(sharded)
    return model, sharded


@each_stage
@pool.on(3)
def test_the_idea_trains_as_one_device(stage):
    plain = plain_model()
    model, sharded = make_idea(stage, plain_model())
    ours = torch.optim.AdamW([each.shard for each in sharded])
    theirs = torch.optim.AdamW(plain.parameters())
    for step in range(3):
        ours.zero_grad()
        x = make_batch(pool.rank(), step)
        loss = loss_of(model(x))
        loss.backward()
        assert all((each.shard.grad is None) == (stage is zero.Zero1) for each in sharded)
        assert (zero.held_bytes(model.parameters()) == 0) == (stage is zero.Zero3)
        zero.step(sharded, ours)
        backward_on_one_device(plain, [[step]])
        theirs.step()
        for each, parameter in zip(sharded, plain.parameters(), strict=True):
            assert_bitwise(each.parameter, parameter)


@pool.on(2)
def test_the_idea_of_zero2_adds_up_backwards():
    model = plain_model()
    sharded = zero.ShardedParameter(model[4].bias, pool.group())
    zero.zero2_hooks([sharded])
    backward(model)
    once = sharded.shard.grad

    backward(model)

    assert_bitwise(sharded.shard.grad, 2 * once)


# ---- Training


class Words(nn.Module):
    """Calls its embedding, and reads the embedding's weight. Blocks share a weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x):
        hidden = F.linear(self.embed(x.argmax(1)).tanh(), self.embed.weight)
        return F.linear(self.blocks(hidden), self.embed.weight)


@pytest.mark.parametrize(
    "make",
    [Words, Outer, partial(make_model, "mixed")],
    ids=["a weight tied over units", "a checkpoint around units", "two dtypes"],
)
@pool.on(3)
def test_zero3_trains_as_one_device(make):
    train(zero.Zero3, make())


@pytest.mark.parametrize("name", sorted(zero.ELEMENTWISE))
@pool.on(3)
def test_the_state_of_an_optimizer_is_that_of_one_device(name):
    ours, theirs, _ = train(zero.Zero1, plain_model(), name, lr=0.01)
    assert_bitwise(ours.state_dict(), theirs.state_dict())


@pool.on(2)
def test_a_compiled_model_trains_as_on_one_device():
    def loss(model, rank, step):
        model.compile(backend="eager", disable=model is not ours)
        return batch_loss(model, rank, step)

    ours = plain_model()
    train(zero.Zero3, ours, loss=loss)


@pool.on(2)
def test_sparse_gradients_are_made_dense():
    def loss(model, rank, step):
        model.sparse = model is ours
        tokens = make_batch(rank, step).argmax(1)
        output = model(tokens)
        return output.square().sum()

    ours = nn.Embedding(6, 4)
    train(zero.Zero1, ours, "SGD", loss)


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors[1:], "weight_decay": 0.9, "lr": 0.05}]


@whole_and_freed
@pool.on(3)
def test_groups_have_options_of_their_own_and_a_parameter_may_be_in_none(stage):
    train(stage, plain_model(), groups=two_groups)


@each_stage
@pool.on(3)
def test_micro_batches_are_added_in_the_order_of_the_docstring(stage):
    model = plain_model()
    ours, theirs, plain = make_pair(stage, model)
    with ours.no_sync():
        with ours.no_sync():
            backward(model, 0)
        backward(model, 1)
    backward(model, 2)
    backward(model, 3)
    ours.step()
    rounds = [[0, 1, 2, 3]] if stage is zero.Zero1 else [[0, 1, 2], [3]]
    backward_on_one_device(plain, rounds)
    theirs.step()
    assert_equal_to_one_device(ours, plain)


def body_continues(stage, saved, numels, name):
    """Go on from `saved`, the parameters and the optimizer's state. Return what to go on from."""
    torch.manual_seed(1)
    model = Reader(numels)
    ours, theirs, plain = make_pair(stage, model, name, lr=0.01)
    if saved:
        with whole(ours):
            model.load_state_dict(saved[0])
        plain.load_state_dict(saved[0])
        ours.load_state_dict(saved[1])
        theirs.load_state_dict(copy.deepcopy(saved[1]))
    for step in range(0, 6, 2):
        ours.zero_grad()
        with ours.no_sync():
            backward(model, step, Reader.__call__)
            backward(model, step + 1, Reader.__call__)
        ours.step()
        backward_on_one_device(plain, [[step, step + 1]], Reader.__call__)
        theirs.step()
        assert_equal_to_one_device(ours, plain)
    assert_bitwise(ours.state_dict(), theirs.state_dict())
    return copy.deepcopy((plain.state_dict(), theirs.state_dict()))


@settings(max_examples=6)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(STAGES)), min_size=2, max_size=2),
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=7),
    name=st.sampled_from(["SGD", "AdamW"]),
)
def test_ranks_use_any_parameters_and_other_worlds_continue(worlds, numels, name):
    saved = None
    for world_size, stage in worlds:
        saved = pool.run(world_size, body_continues, stage, saved, numels, name)[0]


# ---- Masters


def large_loss(model, rank, step):
    """The sum of three ranks' fp16 gradients is beyond 65504."""
    x = make_batch(rank, step, torch.float16)
    output = model(x)
    return 16000 * output.square().sum()


def assert_masters_equal(ours, plain):
    state = ours.state_dict()["state"]
    masters = [state[number]["master"] for number in range(len(state))]
    assert_bitwise(masters, [parameter.detach() for parameter in plain.parameters()])


@pytest.mark.parametrize("offload", [None, "cpu"])
@whole_and_freed
@pool.on(3)
def test_16_bit_gradients_are_added_in_fp32_and_update_fp32_masters(stage, offload):
    model = plain_model(torch.float16)
    ours, _, plain = train(stage, model, "Adam", large_loss, lr=0.01, offload=offload)
    assert_masters_equal(ours, plain)


@pool.on(2)
def test_a_write_to_a_16_bit_parameter_reaches_its_master_and_the_rest_keeps_its_digits():
    model = plain_model(torch.bfloat16)
    ours, _, plain = train(zero.Zero1, model)
    for module in (model, plain):
        module[0].bias.data[:5] = 0.125
    ours.param_groups[0]["lr"] = 0.0
    backward(model)
    ours.step()
    assert_masters_equal(ours, plain)


@pool.on(2)
def test_a_loaded_state_restores_masters():
    ours, _, plain = train(zero.Zero1, plain_model(torch.bfloat16))
    state = ours.state_dict()
    for _, _, segment, _ in ours.shards():
        segment.add_(1)
    ours.load_state_dict(state)
    assert_masters_equal(ours, plain)


@whole_and_freed
@pool.on(2)
def test_what_is_written_to_segments_reaches_the_parameters(stage):
    optimizer = sgd(stage, plain_model())
    for _, _, segment, _ in optimizer.shards():
        segment.fill_(7)
    optimizer.sync_parameters()
    with whole(optimizer):
        assert all(parameter.eq(7).all() for parameter in optimizer.module.parameters())


# ---- Norms


@pool.on(2)
def test_the_norm_of_an_overflow_is_inf_and_not_nan():
    model = plain_model()
    optimizer = sgd(zero.Zero2, model)
    model[4].bias.register_hook(lambda gradient: gradient + math.inf)
    backward(model)
    assert optimizer.clip_grad_norm_(math.inf).isinf()
    assert optimizer.clip_grad_norm_(math.inf).isinf()


@each_stage
@pool.on(3)
def test_a_backward_after_clipping_adds_to_the_mean(stage):
    model = plain_model(torch.float64)
    plain = plain_model(torch.float64)
    optimizer = sgd(stage, model)
    backward(model, 0)
    optimizer.clip_grad_norm_(math.inf)
    backward(model, 1)
    norm = optimizer.clip_grad_norm_(math.inf)
    backward_on_one_device(plain, [[0], [1]])
    expected = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    assert norm.item() == pytest.approx(expected.item())


# ---- Costs


class Costs:
    """Eight layers of two parameters in a world of N ranks, which moves no data."""

    def __init__(self, stage, N, dtype=torch.float32):
        gc.freeze()
        self.before = live_bytes()
        self.x = torch.randn(4, 64, dtype=dtype)
        layers = [nn.Linear(64, 64, dtype=dtype) for _ in range(8)]
        self.model = nn.Sequential(*layers)
        self.optimizer = stage(self.model, torch.optim.AdamW, bucket_cap_mb=0.01)
        self.psi = sum(bucket.flat.nbytes for bucket in self.optimizer._buckets)
        self.share = (N - 1) / N

    def backward(self):
        loss = loss_of(self.model(self.x))
        loss.backward()

    def live(self):
        return live_bytes() - self.before - self.x.nbytes

    def whole(self):
        """Bytes of whole parameters."""
        return zero.held_bytes(bucket.flat for bucket in self.optimizer._buckets)


def live_bytes():
    """Bytes of the distinct storages of all tensors made since gc.freeze()."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture(params=[2, 3, 64])
def N(request):
    yield request.param
    gc.unfreeze()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_stage
def test_bytes_held_are_those_of_the_docstring(stage, N, dtype):
    with fake_world(N, rank=N // 2):
        costs = Costs(stage, N, dtype)
        costs.backward()
        costs.optimizer.step()
        costs.backward()
        held = costs.live()
    psi = costs.psi  # 16-bit masters and sums are in fp32, and Zero3 gathers from the masters
    is_low = dtype == torch.bfloat16
    state = psi * (6 if is_low else 2) / N
    parameters = psi
    gradients = psi * (2 if is_low else 1) / N
    if stage is zero.Zero1:
        gradients = sum(p.nbytes for p in costs.model.parameters())
    if stage is zero.Zero3:
        parameters = 0 if is_low else psi / N
    assert 0 <= held - parameters - gradients - state <= 600


@pytest.mark.parametrize(
    ("stage", "one_backward", "two", "two_of_which_one_in_no_sync"),
    [(zero.Zero1, 2, 2, 2), (zero.Zero2, 2, 3, 2), (zero.Zero3, 3, 6, 5)],
)
def test_bytes_sent_are_those_of_the_docstring(
    stage, N, one_backward, two, two_of_which_one_in_no_sync
):
    def sent(backwards, no_sync=contextlib.nullcontext):
        with zero.SentBytes() as sent:
            with no_sync():
                for _ in range(backwards - 1):
                    costs.backward()
            costs.backward()
            costs.optimizer.step()
        flags = 2 * 16 * costs.share  # a byte per tensor
        return (sent.total - flags) / (costs.psi * costs.share)

    with fake_world(N, rank=0):
        costs = Costs(stage, N)
        assert sent(1) == pytest.approx(one_backward)
        assert sent(2) == pytest.approx(two)
        assert sent(2, costs.optimizer.no_sync) == pytest.approx(two_of_which_one_in_no_sync)


def test_zero2_reduces_and_frees_gradients_in_backward(N):
    with fake_world(N, rank=0):
        costs = Costs(zero.Zero2, N)
        parameters = list(costs.model.parameters())
        with Watch(lambda: sum(p.grad is not None for p in parameters)) as watch:
            costs.backward()
    names = [name for name, _ in watch.seen]
    first = names.index("c10d::alltoall_base_")
    assert names[:first].count("aten::mm") <= 4
    assert max(gradients for _, gradients in watch.seen) == 2  # those of one layer


def test_zero3_holds_one_unit_in_forward_and_backward(N):
    with fake_world(N, rank=0):
        costs = Costs(zero.Zero3, N)
        with Watch(costs.whole) as watch:
            y = costs.model(costs.x)
            assert costs.whole() == 0
            loss_of(y).backward()
        assert costs.whole() == 0
    assert max(whole for _, whole in watch.seen) == costs.psi / 8


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stage", [zero.Zero2, zero.Zero3])
@pool.on(2)
def test_each_bucket_is_reduced_once_in_a_backward(stage, how):
    model = Blocks(4)
    optimizer = sgd(stage, model, bucket_cap_mb=1e-4)
    x = make_batch(pool.rank(), 0).requires_grad_()
    loss = loss_of(model(x, how=HOW[how]))
    with Collectives() as seen:
        loss.backward()
    names = [name for name, _ in seen.calls]
    assert names.count("alltoall_base_") == len(optimizer._buckets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_parameters_and_parts_are_aligned(dtype):
    """Parameters to 64 bytes, as torch allocates them; parts to 16 bytes, as NCCL wants them."""
    model = plain_model(dtype)
    with fake_world(3, rank=1):
        bucket = zero.Bucket(list(model.parameters()), None)
    assert all(slot.start * dtype.itemsize % 64 == 0 for slot in bucket.slots)
    assert bucket.part.nbytes % 16 == 0


@pool.on(1)
def test_an_optimizer_that_is_gone_leaves_an_ordinary_model():
    model = plain_model()
    optimizer = sgd(zero.Zero2, model)
    gone = weakref.ref(optimizer)
    copied = copy.deepcopy(model)
    del optimizer
    gc.collect()
    assert gone() is None
    for each in (model, copied):
        backward(each)  # reduces nothing
        assert all(parameter.grad is not None for parameter in each.parameters())


# ---- Zero3


@pool.on(3)
def test_ranks_may_use_different_members_of_a_list_that_is_a_unit():
    def loss(model, rank, step):
        x = model[0](make_batch(rank, step))
        x = model[1](x.tanh(), which=range(rank + 1))
        return loss_of(model[2](x))

    model = nn.Sequential(nn.Linear(6, 6), Blocks(3), nn.Linear(3, 3))
    train(partial(zero.Zero3, units=list(model)), model, loss=loss)


@pool.on(2)
def test_a_module_inside_a_unit_runs_alone_and_a_step_updates_what_it_gathered():
    model = Blocks(3)
    ours, theirs, plain = make_pair(zero.Zero3, model)
    x = make_batch(0, 0)
    backward(model)
    backward_on_one_device(plain, [[0]])
    assert_bitwise(model[0].one(x), plain[0].one(x))  # stays whole until another unit runs
    ours.step()
    theirs.step()
    assert_bitwise(model[0].one(x), plain[0].one(x))


@pool.on(2)
def test_in_full_parameters_the_model_is_an_ordinary_one():
    model = plain_model()
    optimizer = sgd(zero.Zero3, model)
    with optimizer.full_parameters():
        nn.init.ones_(model[0].bias)
        with optimizer.full_parameters():
            copied = copy.deepcopy(model)
        backward(model)
        optimizer.step()
        stepped = copy.deepcopy(model.state_dict())
    assert model[0].weight.isnan().all()
    assert copied[0].bias.eq(1).all()
    assert_bitwise(optimizer.module_state_dict(), stepped)


@pytest.mark.parametrize(
    "use",
    [nn.Module.state_dict, partial(nn.Module.load_state_dict, state_dict={}), copy.deepcopy],
    ids=["state_dict", "load_state_dict", "deepcopy"],
)
@pool.on(1)
def test_freed_parameters_are_neither_saved_nor_loaded_nor_copied(use):
    model = plain_model()
    optimizer = sgd(zero.Zero3, model)
    with pytest.raises(RuntimeError, match="full_parameters"):
        use(model)
    assert optimizer.module is model


@pool.on(2)
def test_the_first_forward_says_that_a_freed_parameter_was_read():
    """Words reads the weight of its embedding, which is a unit here."""
    model = Words()
    optimizer = sgd(zero.Zero3, model, units=[model.embed, model.blocks])
    x = make_batch(0, 0)
    with optimizer.full_parameters():  # in which it may be read
        output = model(x)
    assert output.isfinite().all()
    with pytest.raises(RuntimeError, match="NaN"):
        model(x)


@pool.on(1)
def test_units_must_be_inside_the_module():
    with pytest.raises(ValueError, match="units"):
        sgd(zero.Zero3, plain_model(), units=[nn.Linear(2, 2)])


# ---- Split layers


@pool.on(2)
def test_split_layers_keep_their_values_beside_what_is_trained():
    model = plain_model()
    model[4].differ_between_ranks = [0, 1]
    model[4].bias.data.fill_(pool.rank())
    optimizer = sgd(zero.Zero1, model, params=model[:4].parameters())
    backward(model)
    optimizer.step()
    assert model[4].bias.eq(pool.rank()).all()
    assert model[4].bias.grad is not None


@pool.on(2)
def test_a_group_with_two_ranks_that_differ_is_refused():
    model = plain_model()
    model[0].differ_between_ranks = [0, 1, 7]
    with pytest.raises(ValueError, match="different values"):
        sgd(zero.Zero1, model)


@pool.on(2)
def test_a_group_with_one_rank_of_those_that_differ_is_trained():
    """As the data-parallel group of a tensor-parallel model is."""
    model = plain_model()
    model[0].differ_between_ranks = [0, 7]
    train(zero.Zero1, model)


# ---- Wrong use


@pool.on(2)
def test_models_that_differ_between_ranks_are_refused():
    with pytest.raises(ValueError, match="shape"):
        sgd(zero.Zero1, nn.Linear(6, 4 + pool.rank()))


@pytest.mark.parametrize("name", ["weight_decay", "bucket_cap_mb"])
@pool.on(2)
def test_options_that_differ_between_ranks_are_refused(name):
    value = (1e-4, 20)[pool.rank()]
    with pytest.raises(ValueError, match=f"rank {1 - pool.rank()} has"):
        sgd(zero.Zero1, plain_model(), **{name: value})


@pool.on(2)
def test_a_model_in_ddp_is_refused():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=pool.group())
    with pytest.raises(ValueError, match=r"ddp\.module"):
        sgd(zero.Zero1, model)


@pool.on(1)
def test_parameters_of_another_module_are_refused():
    with pytest.raises(ValueError, match="among"):
        sgd(zero.Zero1, plain_model(), params=plain_model().parameters())


@pool.on(1)
def test_an_optimizer_that_needs_whole_matrices_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        zero.Zero1(nn.Linear(2, 2), torch.optim.LBFGS, pool.group())


@pool.on(1)
def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="process_group"):
        zero.Zero1(nn.Linear(2, 2), torch.optim.SGD, dist.GroupMember.NON_GROUP_MEMBER)


@pool.on(1)
def test_a_closure_is_an_error():
    with pytest.raises(ValueError, match="closure"):
        sgd(zero.Zero1, plain_model()).step(lambda: 0.0)


@pool.on(1)
def test_a_step_after_a_backward_that_raised_is_an_error():
    model = plain_model()
    optimizer = sgd(zero.Zero2, model)
    model[0].bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    with pytest.raises(RuntimeError, match="backward"):
        optimizer.step()


@pool.on(1)
def test_a_group_cannot_be_added():
    optimizer = sgd(zero.Zero1, plain_model())
    with pytest.raises(ValueError, match="constructor"):
        optimizer.add_param_group({"params": [torch.ones(3)]})


@pool.on(1)
def test_pieces_of_a_permuted_parameter_are_refused():
    optimizer = sgd(zero.Zero1, make_model("odd"))
    with pytest.raises(ValueError, match=r"\(6, 5\)"):
        list(optimizer.shards())


@whole_and_freed
@pool.on(1)
def test_parameters_that_moved_are_an_error(stage):
    model = plain_model()
    optimizer = sgd(stage, model)
    model.double()
    with pytest.raises(RuntimeError, match=r"module\.to"):
        optimizer.step(backward(model))

"""expert_parallel.py beyond its claims: the idea, grids, capacity, balance, states, costs."""

import copy
import math
from functools import partial

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import default_group, registry
from claims.moe import Ours, computes_as_one_device, plain_moe, whole_weights
from shared import Collectives, assert_equal, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp
import ddp
import expert_parallel as ep
import fsdp
import zero

H = 6  # hidden size
F = 5  # hidden size of an expert


def make_model(dtype=torch.float64, num_experts=4, **options):
    """Two layers with a linear layer between them, the same on every rank."""
    torch.manual_seed(3)
    first = ep.MoE(H, F, num_experts, **options)
    last = ep.MoE(H, F, num_experts, **options)
    model = nn.Sequential(first, nn.Linear(H, H), last)
    return model.to(dtype)


def split(model, **options):
    """A copy with its experts split over the ranks of the test."""
    return ep.parallelize(copy.deepcopy(model), pool.group(), **options)


def tokens_of(rank, count=5):
    return randn((count, H), seed=100 + rank)


def own_tokens(count=5):
    return tokens_of(pool.rank(), count)


def loss_of(model, rank):
    output = model(tokens_of(rank))
    return output.square().sum()


def plain_backward(plain):
    """One device: the gradients of the mean of the ranks' losses."""
    N = pool.world_size()
    for rank in range(N):
        loss = loss_of(plain, rank) / N
        loss.backward()


def backward(model):
    loss_of(model, pool.rank()).backward()
    ep.average_gradients(model, pool.group())


def assert_same_gradients(model, plain):
    gradients = ep.full_state_dict(model, gradients=True)
    for name, parameter in plain.named_parameters():
        assert_equal(gradients[name], parameter.grad, False, name)


def assert_same_state(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def groups_of(lists):
    group, _ = dist.new_subgroups_by_enumeration(lists)
    return group


def grid():
    """Ranks 0 and 1 split the experts, and so do 2 and 3. Ranks 0 and 2 have the same ones."""
    return groups_of([[0, 1], [2, 3]]), groups_of([[0, 2], [1, 3]])


# ---- the idea


@pytest.mark.parametrize("top_k", [1, 2])
@pool.on(2, 4)
def test_the_idea_is_bitwise_the_layer_with_one_expert_per_rank(top_k):
    plain = make_model(num_experts=pool.world_size(), top_k=top_k)[0]
    ours = split(plain)
    naive = split(plain)
    x = own_tokens()

    def expert(rows):
        return naive.experts(rows, [len(rows)])

    expected = ours(x)
    expected.square().sum().backward()
    ep.average_gradients(ours, pool.group())
    found = ep.naive_moe(x, naive.gate, expert, top_k, pool.group())
    found.square().sum().backward()
    ep.naive_average_gradients([naive.gate.weight], naive.experts.parameters(), pool.group())

    assert torch.equal(found, expected)
    for a, b in zip(naive.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# ---- balance losses


@pool.on(2)
def test_a_balance_loss_is_reduced_once_and_only_if_it_is_read():
    layer = split(make_model()[0])
    with Collectives() as forward:
        layer(own_tokens())
    with Collectives() as reading, torch.no_grad():
        values = [layer.aux_loss, layer.z_loss, layer.aux_loss]
    assert {name for name, _ in forward.calls} == {"alltoall_base_"}
    assert reading.calls == [("allreduce_", 8 * (2 * 4 + 1))]
    assert all(value.requires_grad for value in values)


@pool.on(2)
def test_after_its_backward_a_layer_keeps_the_losses_without_a_graph():
    layer = split(make_model()[0])
    first = layer(own_tokens()).sum()
    second = layer(own_tokens()).sum()
    first.backward()
    aux_loss = layer.aux_loss  # that of the second forward
    assert aux_loss.requires_grad
    second.backward()
    assert torch.equal(layer.aux_loss, aux_loss)
    assert not layer.aux_loss.requires_grad
    assert not layer.z_loss.requires_grad


@pool.on(2)
def test_without_tokens_on_any_rank_the_balance_losses_are_zero():
    layer = split(make_model()[0])
    layer(own_tokens(0))
    assert layer.aux_loss == layer.z_loss == 0


# ---- grids of expert-parallel and data-parallel ranks


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pool.on(4)
def test_a_grid_trains_as_one_device(loss):
    """With "sum", each rank divides its loss itself."""
    groups = grid()
    plain = make_model(num_experts=2)
    model = ep.parallelize(copy.deepcopy(plain), *groups, loss=loss)
    output = plain(torch.cat([tokens_of(rank) for rank in range(4)]))
    plain_loss = output.square().sum() / 4 + plain[0].aux_loss + plain[2].z_loss
    plain_loss.backward()

    ours = loss_of(model, pool.rank())
    ours = ours / 4 if loss == "sum" else ours
    (ours + model[0].aux_loss + model[2].z_loss).backward()
    ep.average_gradients(model, *groups)
    norm = ep.clip_grad_norm_(model, 0.1, *groups)

    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False)
    assert_same_gradients(model, plain)


@pool.on(4)
def test_all_ranks_of_a_crossed_grid_begin_with_the_weights_of_rank_0():
    """The process group of ranks 0 and 3 is the first for rank 0, and the second for rank 3."""
    process_group = groups_of([[0, 3], [1, 2]])
    edp_group = groups_of([[0, 1], [2, 3]])
    model = make_model()
    nn.init.constant_(model[1].weight, pool.rank())
    ep.parallelize(model, process_group, edp_group)
    assert not model[1].weight.any()


@pytest.mark.parametrize("order", [[], [0], [1, 0]], ids=["no groups", "no edp_group", "swapped"])
@pool.on(4)
def test_other_groups_than_those_of_the_experts_are_an_error(order):
    groups = grid()
    model = ep.parallelize(make_model(), *groups)
    others = [groups[i] for i in order]
    with pytest.raises(ValueError, match="that parallelize"):
        ep.average_gradients(model, *others)
    with pytest.raises(ValueError, match="that parallelize"):
        ep.clip_grad_norm_(model, 1.0, *others)


@pool.on(4)
def test_an_edp_group_with_other_experts_is_an_error():
    diagonal = groups_of([[0, 3], [1, 2]])
    with pytest.raises(ValueError, match="same number"):
        ep.parallelize(make_model(), grid()[0], diagonal)


@pool.on(2)
def test_a_rank_that_sums_while_another_averages_is_an_error():
    with pytest.raises(ValueError, match="same loss"):
        split(make_model(), loss=["mean", "sum"][pool.rank()])


@pool.on(3)
def test_a_rank_outside_the_groups_is_an_error():
    pair = dist.new_group([0, 1])
    if pool.rank() == 2:
        with pytest.raises(ValueError, match="rank 2 is not in process_group"):
            ep.parallelize(make_model(), pair)
        with pytest.raises(ValueError, match="edp_group"):
            ep.average_gradients(make_model(), pool.group(), pair)


@pool.on(3)
def test_numbers_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="4 experts do not divide by 3 ranks"):
        split(make_model())
    with pytest.raises(ValueError, match="loss='avg'"):
        split(make_model(), loss="avg")
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=f"top_k={top_k} of 4"):
            ep.MoE(H, F, 4, top_k)


# ---- with other techniques


@pool.on(2)
def test_weights_that_differ_between_ranks_are_not_overwritten():
    block = nn.Sequential(nn.Linear(H, H), make_model()[0])
    block[0].differ_between_ranks = [0, 1]  # as tensor_parallel.py marks what it splits
    with pytest.raises(ValueError, match="call it on the MoE only"):
        ep.parallelize(block, pool.group())
    ep.parallelize(block[1], pool.group())
    with pytest.raises(ValueError, match="different values in experts"):
        ep.parallelize(block[1], pool.group())


DATA_PARALLEL = {
    "ddp": lambda model, group: ddp.DistributedDataParallel(model, process_group=group),
    "zero": lambda model, group: zero.Zero1(model, torch.optim.SGD, group),
    "fsdp": lambda model, group: fsdp.fully_shard(model, process_group=group),
}


@pytest.mark.parametrize("name", DATA_PARALLEL)
@pool.on(2)
def test_data_parallelism_refuses_split_experts_and_their_copies(name):
    model = split(make_model())
    for each in (copy.deepcopy(model), model):
        with pytest.raises(ValueError, match="expert"):
            DATA_PARALLEL[name](each, pool.group())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pool.on(2)
def test_under_activation_checkpoints(use_reentrant):
    plain = make_model()
    plain_backward(plain)
    model = split(plain)
    x = own_tokens().requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    x.square().sum().backward()
    ep.average_gradients(model, pool.group())
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("autocast", [amp.autocast, torch.autocast])
@pool.on(1)
def test_autocast_does_not_reach_the_router(autocast):
    options = {"dtype": torch.bfloat16}
    if autocast is torch.autocast:
        options["device_type"] = pool.device().type
    layer = make_model(torch.float32)[0]
    x = tokens_of(0).float()
    weights, chosen = layer.route(x)
    with autocast(**options):
        within = layer.route(x)
    assert torch.equal(weights, within[0])
    assert torch.equal(chosen, within[1])


# ---- capacity, shared experts, the bias


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pool.on(1, 2, 4)
def test_capacity_drops_in_gshards_order(factor):
    def plain(x, weights):
        capacity = math.ceil(factor * 2 * len(x) / 4)
        return plain_moe(x, weights, capacity=capacity)

    registry._problems.clear()
    make = partial(Ours, ep.MoE)
    with default_group(pool.group()):
        computes_as_one_device(make, whole_weights(), [7, 4, 0, 7], plain, capacity_factor=factor)
    assert not registry._problems


@pool.on(1, 2)
def test_shared_experts_see_every_token():
    layer = split(make_model(num_shared_experts=2)[0])
    x = own_tokens()
    output = layer(x)
    shared = layer.shared_experts(x, [len(x)])
    layer.shared_experts = None
    assert shared.shape == x.shape
    assert_equal(output, layer(x) + shared, False)


@pool.on(1, 2)
def test_the_bias_moves_towards_a_balance():
    layer = split(make_model(bias_update_rate=0.25)[0])
    layer.update_bias()  # without a load nothing changes
    assert not layer.bias.any()
    loads = torch.zeros(4)
    for rank in range(pool.world_size()):
        _, chosen = layer.route(tokens_of(rank, 32))
        loads += chosen.flatten().bincount(minlength=4)
    layer(own_tokens(32))
    layer.eval()(own_tokens(8))  # is not counted

    layer.update_bias()

    expected = 0.25 * (loads.mean() - loads).sign()
    assert torch.equal(layer.bias, expected)
    layer.update_bias()  # the load begins at 0 again
    assert torch.equal(layer.bias, expected)


@pool.on(1)
def test_the_bias_changes_the_choice_but_not_the_weights():
    layer = make_model(bias_update_rate=0.25)[0]
    layer.bias += torch.tensor([0.0, 1.0, 0.0, 1.0])
    x = tokens_of(0)
    weights, chosen = layer.route(x)
    picked = layer.gate(x).softmax(-1).gather(1, chosen)
    assert set(chosen.flatten().tolist()) == {1, 3}
    assert_equal(weights, picked / picked.sum(-1, keepdim=True), False)


@pool.on(1)
def test_the_bias_stays_in_fp32_and_is_saved():
    layer = ep.MoE(H, F, 4, bias_update_rate=0.25)
    layer.bias += 0.001
    expected = layer.bias.clone()
    layer.bfloat16()
    assert torch.equal(layer.bias, expected)
    assert "bias" in layer.state_dict()
    assert "bias" not in ep.MoE(H, F, 4).state_dict()


def test_an_update_of_the_bias_needs_a_rate():
    with pytest.raises(ValueError, match="bias_update_rate"):
        ep.MoE(H, F, 4).update_bias()


# ---- gradients and states


@pool.on(2)
def test_averaging_twice_changes_nothing():
    plain = make_model()
    plain_backward(plain)
    model = split(plain)
    backward(model)
    ep.average_gradients(model, pool.group())
    assert_same_gradients(model, plain)


@pool.on(2)
def test_a_parameter_that_no_rank_used_has_a_gradient_of_zeros():
    model = split(make_model())
    model[2](own_tokens()).sum().backward()
    ep.average_gradients(model, pool.group())
    assert not model[1].weight.grad.any()


@pool.on(2)
def test_after_a_forward_a_layer_can_be_copied():
    layer = split(make_model()[0])
    x = own_tokens()
    output = layer(x)
    average = copy.deepcopy(layer)
    assert average.aux_loss is None
    assert torch.equal(average(x), output)


@pool.on(2)
def test_a_model_may_begin_on_the_meta_device():
    plain = make_model()
    plain_backward(plain)
    with torch.device("meta"):
        model = make_model(torch.bfloat16)
    ep.parallelize(model, pool.group())
    model = model.double().to_empty(device=pool.device())
    ep.load_full_state_dict(model, plain.state_dict())
    backward(model)
    assert_same_gradients(model, plain)
    assert model[0].bias.dtype == torch.float32


@pytest.mark.parametrize("gradients", [False, True])
@pool.on(2)
def test_a_whole_state_does_not_change_with_the_model(gradients):
    model = split(make_model())
    backward(model)
    state = ep.full_state_dict(model, gradients)
    before = copy.deepcopy(state)
    for parameter in model.parameters():
        parameter.data += 1
        parameter.grad += 1
    assert_same_state(state, before)


@pool.on(2)
def test_a_layer_with_two_names_has_a_whole_state():
    plain = make_model()[:2].append(nn.Identity())
    plain[2] = plain[0]
    plain_backward(plain)
    model = split(plain)
    backward(model)
    assert_same_gradients(model, plain)
    assert_same_state(ep.full_state_dict(model), plain.state_dict())


@pool.on(2)
def test_frozen_experts_have_no_gradient_in_the_whole_state():
    model = split(make_model())
    model[0].experts.requires_grad_(False)
    backward(model)
    gradients = ep.full_state_dict(model, gradients=True)
    assert gradients["0.experts.down_proj"] is None
    assert gradients["2.experts.down_proj"].shape == (4, H, F)


@pool.on(4)
def test_a_state_of_two_ranks_loads_on_four():
    plain = make_model()
    state = plain.state_dict()
    pair = dist.new_group([0, 1])
    if pool.rank() < 2:
        state = ep.full_state_dict(ep.parallelize(copy.deepcopy(plain), pair))
    on_four = split(make_model())
    for parameter in on_four.parameters():
        parameter.data.zero_()
    ep.load_full_state_dict(on_four, state)
    assert on_four[0].experts.gate_up_proj.shape == (1, 2 * F, H)
    assert_same_state(ep.full_state_dict(on_four), plain.state_dict())


@pool.on(2)
def test_bf16_is_as_close_as_on_one_device():
    plain = make_model(torch.bfloat16)
    exact = make_model()
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    model = split(plain)
    x = own_tokens(50).bfloat16()
    expected = exact(x.double())
    error = (model(x) - expected).abs().max()
    assert error <= (plain(x) - expected).abs().max()
    assert error < 0.05
    assert model[0].aux_loss.dtype == torch.float32


# ---- costs


class SentRows(Collectives):
    """`rows`: how many leave this rank in the exchanges of rows."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::alltoall_base_" and args[4]:
            self.rows += sum(args[4]) - args[4][pool.rank()]
        return super().__torch_dispatch__(func, types, args, kwargs)


def rows_sent(**options):
    """Return a layer on one device, and how many rows this rank sent in forward and backward."""
    plain = make_model(**options)[0]
    x = own_tokens(8).requires_grad_()
    with SentRows() as sent:
        split(plain)(x).sum().backward()
    return plain, sent.rows


@pool.on(1, 2, 4)
def test_without_a_capacity_only_rows_for_other_ranks_are_sent():
    rank = pool.rank()
    plain, sent = rows_sent()
    owners = []
    for each in range(pool.world_size()):
        _, chosen = plain.route(tokens_of(each, 8))
        owners.append(chosen * pool.world_size() // 4)
    stay = (owners[rank] == rank).sum()
    leave = 2 * 8 - stay
    arrive = (torch.stack(owners) == rank).sum() - stay
    assert sent == 2 * (leave + arrive)


@pool.on(1, 2, 4)
def test_with_a_capacity_the_slots_of_other_ranks_experts_are_sent():
    N = pool.world_size()
    _, sent = rows_sent(capacity_factor=1.5)
    capacity = math.ceil(1.5 * 2 * 8 / 4)
    assert sent == 4 * 4 * capacity * (N - 1) / N


class HostReads(TorchDispatchMode):
    """Counts operators whose results the host must see: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_sized = torch.Tag.dynamic_output_shape in func.tags and "output_size" not in kwargs
        is_index = func is torch.ops.aten.index.Tensor  # by integers, which have a known size
        is_read = torch.Tag.data_dependent_output in func.tags
        self.count += is_read or (is_sized and not is_index)
        return func(*args, **kwargs)


@pytest.mark.cpu
@pytest.mark.parametrize("capacity_factor", [None, 1.5])
@pool.on(2)
def test_the_host_waits_for_the_device_once(capacity_factor):
    layer = split(make_model(capacity_factor=capacity_factor)[0])
    x = own_tokens().requires_grad_()
    copies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or tensor)
        with HostReads() as reads:
            layer(x).sum().backward()
    assert reads.count == 0
    assert len(copies) == 1

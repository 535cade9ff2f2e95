"""expert_parallel.py beyond its claims: the idea, grids, capacity, balance, states, costs."""

import copy
import importlib
import math
from functools import partial
from importlib.util import find_spec

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims import default_group, registry
from claims.moe import Ours, computes_as_one_device, plain_moe, whole_weights
from shared import Collectives, assert_equal, randn
from torch.utils.checkpoint import checkpoint

import amp
import expert_parallel as ep
import lora

H = 6  # hidden size


def make_model(dtype=torch.float64, num_experts=4, **options):
    """Two layers with a linear layer between them, the same on every rank."""
    torch.manual_seed(3)
    first = ep.MoE(H, 5, num_experts, **options)
    last = ep.MoE(H, 5, num_experts, **options)
    model = nn.Sequential(first, nn.Linear(H, H), last)
    return model.to(dtype)


def split(model):
    """A copy with its experts split over the ranks of the test."""
    return ep.parallelize(copy.deepcopy(model), pool.group())


def split_layer(**options):
    return split(make_model(**options))[0]


def own_tokens(count=5, rank=None):
    rank = pool.rank() if rank is None else rank
    return randn((count, H), seed=100 + rank)


def loss_of(model):
    """Of this rank's tokens."""
    output = model(own_tokens())
    return output.square().sum()


def plain_loss_of(plain):
    """The mean of all ranks' losses."""
    N = pool.world_size()
    inputs = [own_tokens(rank=rank) for rank in range(N)]
    output = plain(torch.cat(inputs))
    return output.square().sum() / N


def assert_same_gradients(gradients, plain):
    for name, parameter in plain.named_parameters():
        assert_equal(gradients[name], parameter.grad, False, name)


def groups_of(lists):
    group, _ = dist.new_subgroups_by_enumeration(lists)
    return group


def grid():
    """Ranks 0 and 1 split the experts, and so do 2 and 3. Ranks 0 and 2 have the same ones."""
    process_group = groups_of([[0, 1], [2, 3]])
    edp_group = groups_of([[0, 2], [1, 3]])
    return process_group, edp_group


@pytest.mark.parametrize("top_k", [1, 2])
@pool.on(2, 4)
def test_the_idea_is_bitwise_the_layer_with_one_expert_per_rank(top_k):
    group = pool.group()
    ours = split_layer(num_experts=pool.world_size(), top_k=top_k)
    naive = copy.deepcopy(ours)
    naive.__class__ = ep.NaiveMoE
    with default_group(group):
        losses = [loss_of(ours), loss_of(naive)]
        sum(losses).backward()
    ep.average_gradients(ours, group)
    ep.naive_average_gradients([naive.gate.weight], naive.experts.parameters(), group)
    assert losses[0] == losses[1]
    for a, b in zip(naive.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# ---- grids of expert-parallel and data-parallel ranks


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pool.on(4)
def test_a_grid_trains_as_one_device(loss):
    """With "sum", each rank divides its loss itself."""
    groups = grid()
    plain = make_model(num_experts=2)
    model = ep.parallelize(copy.deepcopy(plain), *groups, loss=loss)
    plain_total = plain_loss_of(plain) + plain[0].aux_loss + plain[2].z_loss
    plain_total.backward()
    divisor = 4 if loss == "sum" else 1
    total = loss_of(model) / divisor
    total = total + model[0].aux_loss + model[2].z_loss
    total.backward()
    ep.average_gradients(model, *groups)
    norm = ep.clip_grad_norm_(model, 0.1, *groups)
    assert_equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), False)
    assert_same_gradients(ep.full_state_dict(model, gradients=True), plain)


@pool.on(4)
def test_all_ranks_of_a_crossed_grid_begin_with_the_weights_of_rank_0():
    """The process group of ranks 0 and 3 is the first for rank 0, and the second for rank 3."""
    process_group = groups_of([[0, 3], [1, 2]])
    edp_group = groups_of([[0, 1], [2, 3]])
    model = make_model()
    nn.init.constant_(model[1].weight, pool.rank())
    ep.parallelize(model, process_group, edp_group)
    assert not model[1].weight.any()
    ep.average_gradients(model, process_group, edp_group)
    assert not model[1].weight.grad.any()  # no rank used it


@pool.on(4)
def test_groups_that_do_not_fit_are_an_error():
    refused = partial(pytest.raises, ValueError)
    first, second = grid()
    diagonal = groups_of([[0, 3], [1, 2]])
    pair = dist.new_group([0, 1])
    model = make_model()
    with refused(match="same number"):  # an edp_group with other experts
        ep.parallelize(model, first, diagonal)
    with refused(match="same loss"):
        loss = "mean" if pool.rank() % 2 else "sum"
        ep.parallelize(model, first, loss=loss)
    if pool.rank() > 1:
        with refused(match="is not in process_group"):
            ep.average_gradients(model, first, pair)
    ep.parallelize(model, first, second)
    with refused(match="that parallelize"):
        ep.average_gradients(model, second, first)


@pytest.mark.parametrize("name", ["num_experts", "top_k", "capacity_factor"])
@pool.on(2)
def test_models_that_differ_are_an_error_on_all_ranks(name):
    value = {"num_experts": 3, "top_k": 1, "capacity_factor": 1.0}[name] + pool.rank()
    model = make_model(**{name: value})  # 3 experts do not divide by 2 ranks either
    with pytest.raises(ValueError, match="number in it, and model"):
        ep.parallelize(model, pool.group())


@pool.on(2)
def test_parameters_and_buffers_of_any_layout_begin_with_those_of_rank_0():
    """Convolutions in channels_last, expanded buffers, and a transposed row."""
    model = nn.Sequential(
        nn.Conv2d(8, 4, 1),
        nn.Conv2d(4, 4, 3, groups=4),
        make_model(),
    )
    model.to(memory_format=torch.channels_last)
    counts = torch.arange(3) + pool.rank()
    model.register_buffer("counts", counts.expand(2, 3))
    row = randn((1, 5), seed=pool.rank())
    transposed = nn.Parameter(row.T)
    model.register_parameter("row", transposed)
    ep.parallelize(model, pool.group())
    assert model.counts.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(model.row, randn((1, 5)).T)


# ---- with other techniques


@pool.on(2)
def test_weights_that_differ_between_ranks_are_not_overwritten():
    block = nn.Sequential(nn.Linear(H, H), make_model())
    block[0].differ_between_ranks = [0, 1]  # as tensor_parallel.py marks what it splits
    with pytest.raises(ValueError, match="call it on the MoE only"):
        ep.parallelize(block, pool.group())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pool.on(2)
def test_experts_train_under_activation_checkpoints(use_reentrant):
    plain = make_model()
    plain_loss_of(plain).backward()
    model = split(plain)
    x = own_tokens().requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    x.square().sum().backward()
    ep.average_gradients(model, pool.group())
    assert_same_gradients(ep.full_state_dict(model, gradients=True), plain)


@pytest.mark.parametrize("autocast", ["amp.py", "torch"])
@pool.on(1)
def test_the_router_of_a_16_bit_layer_computes_in_fp32(autocast):
    layer = split_layer(dtype=torch.bfloat16)
    x = own_tokens().bfloat16()
    context = amp.autocast(torch.bfloat16)
    if autocast == "torch":
        context = torch.autocast(x.device.type, torch.bfloat16)
    with context:
        weights, chosen = layer.route(x)
    in_fp32, expected = layer.float().route(x.float())
    assert torch.equal(chosen, expected)
    assert torch.equal(weights, in_fp32.bfloat16())


@pool.on(1)
def test_a_hook_on_the_router_decides():
    layer = split_layer(top_k=1)
    x = own_tokens()
    logits = layer.gate(x)  # (tokens, experts)
    layer.gate.register_forward_hook(lambda gate, inputs, output: -output)
    _, chosen = layer.route(x)
    assert torch.equal(chosen[:, 0], logits.argmin(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_of_peft_on_the_router_trains(dtype):
    peft = pytest.importorskip("peft")
    model = make_model(dtype)
    x = own_tokens(rank=0).to(dtype)
    before = model(x)
    config = peft.LoraConfig(
        target_modules=["0.gate"],
        r=2,
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, config)
    after = adapted(x)
    assert not torch.equal(after, before)
    after.square().sum().backward()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2  # A and B
    assert all(p.grad.any() for p in trained)


def test_an_adapter_of_peft_on_the_experts_is_an_error():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=[],
        target_parameters=["0.experts.down_proj"],
        r=2,
    )
    adapted = peft.get_peft_model(make_model().float(), config)
    with pytest.raises(ValueError, match="leave out target_parameters"):
        adapted(own_tokens(rank=0).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_of_lora_py_on_the_router_trains(dtype):
    model = make_model().to(dtype)
    lora.inject_lora(model, target_modules=["gate"])
    output = model(own_tokens(rank=0).to(dtype))
    output.square().sum().backward()
    assert model[0].gate.lora_B.grad.any()
    assert not model[0].aux_loss.requires_grad  # the graph is gone


def test_a_router_of_one_expert_per_token_has_a_gradient():
    """Its weight is the probability, as Switch's."""
    layer = make_model(top_k=1)[0]
    x = own_tokens(rank=0)
    weights, chosen = layer.route(x)
    probabilities = layer.gate(x).softmax(-1)
    assert_equal(weights, probabilities.gather(1, chosen), False)
    layer(x).square().sum().backward()
    assert layer.gate.weight.grad.any()


def test_experts_begin_as_linear_layers_do():
    """Uniform within 1/√(inputs)."""
    torch.manual_seed(0)
    experts = ep.Experts(8, 16, 4)
    bounds = {experts.gate_up_proj: 1 / 4, experts.down_proj: 1 / 2}
    for weight, bound in bounds.items():
        largest = weight.abs().max()
        assert 0.95 * bound < largest <= bound


# ---- capacity, shared experts, balance


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pool.on(1, 4)
def test_capacity_drops_in_gshards_order(factor):
    def plain(x, weights):
        capacity = math.ceil(factor * 2 * len(x) / 4)
        return plain_moe(x, weights, capacity=capacity)

    registry._problems.clear()
    make = partial(Ours, ep.MoE)
    with default_group(pool.group()):
        computes_as_one_device(
            make,
            whole_weights(),
            [7, 4, 0, 7],
            plain,
            capacity_factor=factor,
        )
    assert not registry._problems


@pytest.mark.parametrize("denominator", [3, 10, 16, 100])
def test_capacity_is_the_fraction_of_the_decimal_rounded_up(denominator):
    """In floating point, 1.1 · 100 / 10 is above 11."""
    layer = ep.MoE(1, 1, 10, top_k=1)
    for numerator in range(1, 3 * denominator, 1 + denominator // 16):
        layer.capacity_factor = numerator / denominator
        for tokens in range(0, 300, 7):
            chosen = torch.zeros(tokens, 1, dtype=torch.long)
            _, counts, _ = layer.assign_slots(chosen)
            assert counts[0] == -(-numerator * tokens // (10 * denominator))


@pytest.mark.parametrize("factor", [-1, 0, math.inf, math.nan])
def test_a_capacity_factor_that_is_no_positive_number_is_an_error(factor):
    with pytest.raises(ValueError, match=f"capacity_factor={factor}"):
        ep.MoE(H, 5, 4, capacity_factor=factor)


@pool.on(2)
def test_shared_experts_see_every_token():
    layer = split_layer(num_shared_experts=2)
    x = own_tokens()
    output = layer(x)
    shared = layer.shared_experts(x, [len(x)])
    layer.shared_experts = None
    assert_equal(output, layer(x) + shared, False)


@pool.on(2)
def test_an_input_may_be_a_single_token():
    layer = split_layer()
    tokens = own_tokens()
    assert_equal(layer(tokens[2]), layer(tokens)[2], False)


@pool.on(2)
def test_gradients_of_gradients_are_an_error():
    """Those of experts would be as many times too large as there are ranks."""
    x = own_tokens().requires_grad_()
    loss = split_layer()(x).square().sum()
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(loss, x, create_graph=True)


@pool.on(2)
def test_a_balance_loss_is_reduced_once_and_only_if_it_is_read():
    layer = split_layer()
    with Collectives() as forward:
        loss_of(layer)
    with Collectives() as reading, torch.no_grad():
        values = [layer.aux_loss, layer.z_loss, layer.aux_loss]
    assert {name for name, _ in forward.calls} == {"alltoall_base_"}
    assert reading.calls == [("allreduce_", 8 * (2 * 4 + 1))]
    assert all(value.requires_grad for value in values)


UNMASKED = [3, 1, 0]  # of five tokens, by rank


def unmasked():
    numbers = torch.arange(5)
    return numbers < UNMASKED[pool.rank()]


def all_unmasked():
    parts = []
    for rank in range(pool.world_size()):
        tokens = own_tokens(rank=rank)
        parts.append(tokens[: UNMASKED[rank]])
    return torch.cat(parts)


@pool.on(2, 3)
def test_balance_losses_count_unmasked_tokens_of_all_ranks():
    """The bias does not count masked ones, either."""
    plain = make_model(num_experts=6, bias_update_rate=0.25)[0]
    layer = split(plain)
    plain(all_unmasked())
    tokens = own_tokens().view(1, 5, H)
    mask = unmasked()
    layer(tokens, mask.long())
    losses = [(each.aux_loss, each.z_loss) for each in (layer, plain)]
    for ours, theirs in zip(*losses, strict=True):
        assert_equal(ours, theirs, False)
    for aux_loss, z_loss in losses:
        (aux_loss + z_loss).backward()
    ep.average_gradients(layer, pool.group())
    assert_equal(layer.gate.weight.grad, plain.gate.weight.grad, False)
    for each in (plain, layer):
        each.update_bias()
    assert torch.equal(layer.bias, plain.bias)


@pool.on(3)
def test_ranks_with_unequal_numbers_of_tokens_train_as_one_device():
    """With loss="sum", each rank divides its sum by the number of all ranks' unmasked tokens."""
    plain = make_model(num_experts=6)
    model = ep.parallelize(copy.deepcopy(plain), pool.group(), loss="sum")
    output = plain(all_unmasked())
    total = output.square().sum() / 4 + plain[0].aux_loss
    total.backward()
    hidden = model[0](own_tokens(), unmasked())
    output = model[1:](hidden)[unmasked()]
    total = output.square().sum() / 4 + model[0].aux_loss
    total.backward()
    ep.average_gradients(model, pool.group())
    assert_same_gradients(ep.full_state_dict(model, gradients=True), plain)


@pool.on(2)
def test_after_its_backward_a_layer_keeps_the_losses_without_a_graph():
    layer = split_layer()
    first = loss_of(layer)
    second = loss_of(layer)
    first.backward()
    assert layer.aux_loss.requires_grad  # that of the second forward
    second.backward()
    assert not layer.aux_loss.requires_grad
    copy.deepcopy(layer)
    layer(own_tokens(0))
    assert layer.aux_loss == layer.z_loss == 0


@pool.on(1, 2)
def test_the_bias_moves_towards_a_balance():
    layer = split_layer(bias_update_rate=0.25)
    loads = torch.zeros(4)
    for rank in range(pool.world_size()):
        _, chosen = layer.route(own_tokens(32, rank))
        loads += chosen.flatten().bincount(minlength=4)
    layer(own_tokens(32))
    layer.eval()(own_tokens(8))  # is not counted
    expected = 0.25 * (loads.mean() - loads).sign()
    for _ in range(2):  # then the load begins at 0 again
        layer.update_bias()
        assert torch.equal(layer.bias, expected)


@pool.on(1)
def test_the_bias_changes_the_choice_but_not_the_weights():
    layer = split_layer(bias_update_rate=0.25)
    layer.bias += torch.tensor([0.0, 1.0, 0.0, 1.0])
    x = own_tokens()
    weights, chosen = layer.route(x)
    assert set(chosen.flatten().tolist()) == {1, 3}
    logits = layer.gate(x).gather(1, chosen)
    assert_equal(weights, logits.softmax(-1), False)


def test_the_bias_stays_in_fp32_and_is_saved_if_it_is_used():
    layer = ep.MoE(H, 5, 4, bias_update_rate=0.25)
    layer.bias += 0.001
    expected = layer.bias.clone()
    layer.bfloat16()
    assert torch.equal(layer.state_dict()["bias"], expected)
    assert "bias" not in ep.MoE(H, 5, 4).state_dict()


# ---- gradients and states


@pool.on(2)
def test_whole_gradients_and_states_of_a_layer_with_two_names_and_a_frozen_one():
    plain = make_model()
    plain.append(plain[0])
    plain[2].experts.requires_grad_(False)
    plain_loss_of(plain).backward()
    model = split(plain)
    loss_of(model).backward()
    weight = model[1].weight
    weight.grad = weight.grad.t().contiguous().t()  # a gradient may be strided
    for _ in range(2):  # the second time changes nothing
        ep.average_gradients(model, pool.group())

    gradients = ep.full_state_dict(model, gradients=True)
    state = ep.full_state_dict(model)

    for parameter in model.parameters():  # the copies do not change with the model
        parameter.data.zero_()
        parameter.grad = None
    assert_same_gradients(gradients, plain)
    expected = plain.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pool.on(2, 4)
def test_a_model_may_begin_on_the_meta_device_and_load_a_whole_state():
    plain = make_model()
    with torch.device("meta"):
        model = make_model(torch.bfloat16)
    ep.parallelize(model, pool.group())
    model = model.double().to_empty(device=pool.device())
    ep.load_full_state_dict(model, plain.state_dict())
    assert_equal(loss_of(model), loss_of(plain), False)
    assert model[0].bias.dtype == torch.float32


@pool.on(2)
def test_a_rank_without_gradients_adds_zeros_to_the_norm():
    model = split(make_model())
    if pool.rank() == 0:
        output = model[1](own_tokens())
        output.sum().backward()
    norm = ep.clip_grad_norm_(model, 1.0, pool.group())
    everyone = [torch.zeros_like(norm), torch.zeros_like(norm)]
    dist.all_gather(everyone, norm, group=pool.group())
    assert norm.dtype == torch.float64
    assert everyone[0] == everyone[1] > 0


@pool.on(2)
def test_sparse_gradients_are_averaged():
    embedding = nn.Embedding(8, H, sparse=True, dtype=torch.float64)
    model = split(nn.Sequential(embedding, make_model()))
    word = pool.rank() + 1
    output = model(torch.tensor([word]))
    output.sum().backward()
    own = model[0].weight.grad.to_dense()[word]
    ep.average_gradients(model, pool.group())
    assert_equal(model[0].weight.grad[word], own / 2, False)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pool.on(1)
def test_transformers_cannot_record_the_router():
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": H, "intermediate_size": 5, "num_local_experts": 4, "vocab_size": 9}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, **heads)
    model = transformers.MixtralForCausalLM(config)
    model.model.layers[0].mlp = ep.MoE(H, 5, 4)
    tokens = torch.arange(5)[None]
    with pytest.raises(ValueError, match="leave out output_router_logits"):
        model(tokens, labels=tokens, output_router_logits=True)
    model(tokens, labels=tokens)


# ---- costs


@pool.on(2)
def test_gradients_are_averaged_in_few_collectives():
    """One for the gradients of a dtype that are on all ranks, up to 32 MB."""
    model = make_model(torch.float32)
    for _ in range(2):
        large = nn.Linear(2**11, 2**11, bias=False)  # 16 MB
        model.insert(0, large)
    for _ in range(20):
        small = nn.Linear(H, H)
        model.insert(0, small)
    model[0].bfloat16()
    ep.parallelize(model, pool.group())
    with Collectives() as seen:
        ep.average_gradients(model, pool.group())
    assert len(seen.calls) == 3


@pool.on(1, 2, 4)
def test_with_a_capacity_the_slots_of_other_ranks_experts_are_sent():
    N = pool.world_size()
    layer = split_layer(capacity_factor=1.5)
    x = own_tokens(8).requires_grad_()
    with ep.SentRows() as sent:
        layer(x).sum().backward()
    capacity = math.ceil(1.5 * 2 * 8 / 4)
    rows = 4 * 4 * capacity * (N - 1) / N
    assert sent.total == rows * x[0].nbytes

"""muon.py: what the claims of --muon do not say. Equal is bitwise, to torch.optim.Muon."""

import copy
import math
from collections import defaultdict
from unittest import mock

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from claims.muon import Matrices
from shared import Collectives, fake_world, loss_of, make_batch, randn

import amp
import checkpoint
import fsdp
import muon
import zero
from muon import Muon, ShardedMuon

needs_torch_2_9 = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is in torch 2.9 and newer"
)
OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


def plain_muon(parameters, **options):
    return torch.optim.Muon(parameters, **OPTIONS | options)


def our_muon(parameters, **options):
    return Muon(parameters, process_group=pool.group(), **OPTIONS | options)


def random_matrices(*shapes, dtype=torch.float32):
    return [nn.Parameter(randn(shape, seed).to(dtype)) for seed, shape in enumerate(shapes)]


def set_gradients(ours, plain, step=0):
    """Give each rank's matrices a gradient of its own, and the plain ones their mean."""
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        gradients = []
        for rank in range(pool.world_size()):
            seed = 1000 * step + 100 * rank + number
            gradient = randn(tuple(theirs.shape), seed).to(theirs.dtype)
            gradients.append(torch.empty_like(theirs).copy_(gradient))
        mine.grad = gradients[pool.rank()]
        # In 16 bits, the sum is in float32 and is rounded once.
        wide = torch.promote_types(theirs.dtype, torch.float32)
        total = gradients[0].to(wide)
        for gradient in gradients[1:]:
            total = total + gradient.to(wide)
        theirs.grad = torch.empty_like(theirs).copy_(total / len(gradients))


def copies_of(parameters):
    return [nn.Parameter(parameter.detach().clone()) for parameter in parameters]


def assert_all_equal(ours, plain):
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def train_both(ours, plain, optimizer, plain_optimizer, steps=3, start=0):
    for step in range(start, start + steps):
        set_gradients(ours, plain, step)
        optimizer.step()
        plain_optimizer.step()
        assert_all_equal(ours, plain)


# ---- the idea


@needs_torch_2_9
@pool.on(2, 3)
def test_the_naive_step_is_bitwise_that_of_one_device():
    plain = random_matrices((6, 33), (33, 6), (17, 17), (5, 8))
    ours = copies_of(plain)
    plain_optimizer = plain_muon(plain)
    options = plain_optimizer.param_groups[0]
    state = defaultdict(dict)
    for step in range(3):
        set_gradients(ours, plain, step)
        muon.naive_step(ours, state, options, pool.group())
        plain_optimizer.step()
    assert_all_equal(ours, plain)
    assert len(state) == len(ours[pool.rank() :: pool.world_size()])


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30)], ids=str)
def test_an_orthogonal_matrix_has_singular_values_near_1(shape):
    options = Muon.__init__.__defaults__
    options = {"ns_coefficients": options[4], "eps": options[5], "ns_steps": options[6]}
    matrix = 1000 * randn(shape)
    values = torch.linalg.svdvals(muon.orthogonalize(matrix, options).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


# ---- owners


GPT = [(576, 192), (192, 192), (768, 192), (192, 768)] * 4
LLAMA = ([(256, 256)] * 2 + [(64, 256)] * 2 + [(896, 256)] * 2 + [(256, 896)]) * 8
THIN = [(8, 2048)] * 12 + [(128, 128)] * 24


def owned_by(shapes, N):
    work = {number: muon.operations(shape, 5) for number, shape in enumerate(shapes)}
    sizes = {number: math.prod(shape) for number, shape in enumerate(shapes)}
    return muon.assign_owners(work, sizes, N), work, sizes


@pytest.mark.parametrize("N", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("shapes", [GPT, LLAMA, THIN], ids=["gpt", "llama", "thin"])
def test_ranks_own_even_shares_of_work_and_momentum(shapes, N):
    owned, work, sizes = owned_by(shapes, N)
    for costs, most in ((work, 1.15), (sizes, 1.25)):
        shares = [sum(costs[number] for number in own) for own in owned]
        assert max(shares) <= most * sum(shares) / N


def test_every_matrix_has_one_owner_also_if_there_are_more_ranks():
    owned, _, _ = owned_by(GPT, 100)
    assert sorted(owned) == [[]] * (100 - len(GPT)) + [[number] for number in range(len(GPT))]


def test_work_is_that_of_the_matrix_products():
    """X Xᵀ, its square, and the product with X take 2m²n + 2m³ + 2m²n operations."""
    assert muon.operations((100, 30), 5) == 5 * (4 * 30**2 * 100 + 2 * 30**3)


# ---- equal to one device


@needs_torch_2_9
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pool.on(1, 3)
def test_other_dtypes_are_bitwise_those_of_one_device(dtype, nesterov):
    plain = random_matrices((7, 33), (33, 7), (19, 19), dtype=dtype)
    ours = copies_of(plain)
    # Without Nesterov, torch 2.13 normalizes a bfloat16 momentum in place (pytorch#194664).
    theirs = torch.optim._muon._zeropower_via_newtonschulz

    def corrected(matrix, *args):
        return theirs(matrix.clone(), *args)

    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", corrected):
        optimizer = our_muon(ours, nesterov=nesterov)
        train_both(ours, plain, optimizer, plain_muon(plain, nesterov=nesterov))


@needs_torch_2_9
@pool.on(3)
def test_matrices_of_several_dtypes_and_strides_share_an_optimizer():
    plain = random_matrices((6, 9), (9, 6)) + random_matrices((5, 33), dtype=torch.bfloat16)
    plain.append(nn.Parameter(randn((31, 8)).float().T))
    ours = copies_of(plain)
    train_both(ours, plain, our_muon(ours), plain_muon(plain))


@needs_torch_2_9
@pool.on(2)
def test_groups_have_their_own_options():
    plain = random_matrices((6, 9), (9, 6), (5, 33))
    ours = copies_of(plain)
    rest = {"lr": 0.3, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
    groups = [[{"params": p[:1]}, {"params": p[1:], **rest}] for p in (ours, plain)]
    train_both(ours, plain, our_muon(groups[0]), plain_muon(groups[1]))


@needs_torch_2_9
@pool.on(2)
def test_the_learning_rate_may_be_a_tensor():
    plain = random_matrices((6, 9), (9, 6))
    ours = copies_of(plain)
    lr = torch.tensor(0.1)
    train_both(ours, plain, our_muon(ours, lr=lr), plain_muon(plain, lr=lr.clone()))


@needs_torch_2_9
@pool.on(3)
def test_a_rank_that_owns_nothing_takes_part():
    plain = random_matrices((6, 9))
    ours = copies_of(plain)
    train_both(ours, plain, our_muon(ours), plain_muon(plain))


@pool.on(2)
def test_sums_of_float16_gradients_do_not_overflow():
    (ours,) = random_matrices((4, 6), dtype=torch.float16)
    optimizer = our_muon([ours])
    ours.grad = torch.full_like(ours, 60_000)
    optimizer.step()
    assert ours.isfinite().all()


@pool.on(2)
def test_a_sparse_gradient_counts_as_a_dense_one():
    dense = nn.Embedding(9, 4)
    sparse = nn.Embedding(9, 4, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    for layer in (dense, sparse):
        optimizer = our_muon(layer.parameters())
        layer(torch.tensor([pool.rank(), 5])).square().sum().backward()
        optimizer.step()
    assert torch.equal(dense.weight, sparse.weight)


@pool.on(2)
def test_step_leaves_gradients_as_they_are():
    (ours,) = random_matrices((4, 6))
    optimizer = our_muon([ours])
    ours.grad = randn((4, 6), pool.rank()).float()
    before = ours.grad.clone()
    optimizer.step(None)
    assert torch.equal(ours.grad, before)


@pool.on(2)
def test_without_gradients_nothing_changes():
    (ours,) = random_matrices((4, 6))
    optimizer = our_muon([ours])
    before = ours.detach().clone()
    optimizer.step()
    assert torch.equal(ours, before)
    assert not optimizer.state


@pool.on(2)
def test_grad_scaler_skips_the_step_on_all_ranks_if_one_overflows():
    (ours,) = random_matrices((4, 6))
    optimizer = our_muon([ours])
    scaler = amp.GradScaler(process_group=pool.group())
    before = ours.detach().clone()
    ours.grad = torch.full_like(ours, torch.inf if pool.rank() else 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(ours, before)
    assert not optimizer.state


@needs_torch_2_9
@pytest.mark.parametrize("others_by", ["zero", "ddp"])
@pool.on(2)
def test_other_parameters_have_an_optimizer_of_their_own(others_by):
    """As the docstring shows. At two ranks, DDP's means are bitwise those of rank order."""
    plain = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 9))
    module = copy.deepcopy(plain)
    model = module
    optimizers = [our_muon([module[1].weight])]
    others = [p for p in module.parameters() if p is not module[1].weight]
    if others_by == "zero":
        group = pool.group()
        optimizers.append(zero.Zero1(module, torch.optim.AdamW, group, params=others))
    else:
        model = nn.parallel.DistributedDataParallel(module, process_group=pool.group())
        optimizers.append(torch.optim.AdamW(others))
    plain_others = [p for p in plain.parameters() if p is not plain[1].weight]
    plains = [plain_muon([plain[1].weight]), torch.optim.AdamW(plain_others)]
    for step in range(3):
        batches = [torch.tensor([step, 3 + rank]) for rank in range(2)]
        plain.zero_grad()
        for batch in batches:
            loss_of(plain(batch)).backward()
        for parameter in plain.parameters():
            parameter.grad /= 2
        module.zero_grad()
        loss_of(model(batches[pool.rank()])).backward()
        for optimizer in [*optimizers, *plains]:
            optimizer.step()
        optimizers[1].zero_grad()
    assert_all_equal(module.parameters(), plain.parameters())


# ---- state


@needs_torch_2_9
@pool.on(3)
def test_torchs_class_loads_our_state_and_goes_on():
    plain = random_matrices((6, 9), (9, 6), (5, 33))
    ours = copies_of(plain)
    optimizer = our_muon(ours)
    train_both(ours, plain, optimizer, plain_muon(plain))
    loaded = plain_muon(plain, lr=9.0)
    loaded.load_state_dict(optimizer.state_dict())
    train_both(ours, plain, optimizer, loaded, start=3)


@needs_torch_2_9
@pool.on(3)
def test_training_goes_on_at_another_number_of_ranks():
    """From torch's state, of one rank, which stays as it is."""
    plain = random_matrices((6, 9), (9, 6), (5, 33))
    ours = copies_of(plain)
    plain_optimizer = plain_muon(plain)
    set_gradients(ours, plain)
    plain_optimizer.step()
    saved = copy.deepcopy(plain_optimizer.state_dict())
    before = copy.deepcopy(saved["state"])
    ours = copies_of(plain)
    optimizer = our_muon(ours, lr=9.0)
    optimizer.load_state_dict(saved)
    train_both(ours, plain, optimizer, plain_optimizer, start=1)
    for number, state in before.items():
        assert torch.equal(saved["state"][number]["momentum_buffer"], state["momentum_buffer"])


@pool.on(3)
def test_a_rank_loads_only_the_momenta_of_its_own_matrices():
    matrices = random_matrices((6, 9), (9, 6), (7, 8))
    optimizer = our_muon(matrices)
    for number, matrix in enumerate(matrices):
        matrix.grad = torch.full_like(matrix, 1.0 + number)
    optimizer.step()
    own = set(optimizer.state)
    assert len(own) == 1
    loaded = our_muon(matrices)
    loaded.load_state_dict(optimizer.state_dict())
    assert set(loaded.state) == own


# ---- what is sent


class Sent(Collectives):
    """Also adds up the bytes that go to other ranks in exchanges of uneven parts."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base" in func.__name__:
            counts = list(args[4])
            counts[self.rank] = 0
            self.bytes += sum(counts) * args[1].element_size()
        return super().__torch_dispatch__(func, types, args, kwargs)


def step_of_a_fake_rank(N, rank, shapes):
    with fake_world(N, rank):
        matrices = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = Muon(matrices)
        for matrix in matrices:
            matrix.grad = torch.ones_like(matrix)
        with Sent(rank) as sent:
            optimizer.step()
        elements = sum(state["momentum_buffer"].numel() for state in optimizer.state.values())
    return sent, elements


@pytest.mark.cpu
@pytest.mark.parametrize("N", [2, 5, 16])
def test_six_bytes_are_sent_and_four_held_for_each_element(N):
    shapes = [(12, 8), (8, 8), (8, 32), (30, 8)] * 8
    psi = sum(map(math.prod, shapes))
    ranks = [step_of_a_fake_rank(N, rank, shapes) for rank in range(N)]
    assert sum(sent.bytes for sent, _ in ranks) == 6 * psi * (N - 1)
    assert sum(elements for _, elements in ranks) == psi
    assert max(elements for _, elements in ranks) <= 1.25 * psi / N
    assert {len(sent.calls) for sent, _ in ranks} == {3}


@pytest.mark.cpu
def test_one_of_1024_ranks_sends_its_update_to_all():
    size = 12 * 8
    sent, elements = step_of_a_fake_rank(1024, 7, [(12, 8)] * 10)
    assert sent.bytes == 9 * 4 * size + 1023 * 2 * size
    assert elements == size


@pool.on(2)
def test_unused_matrices_do_not_travel():
    used, unused = random_matrices((4, 6), (40, 60))
    optimizer = our_muon([used, unused])
    used.grad = torch.ones_like(used)
    with Sent(pool.rank()) as sent:
        optimizer.step()
    assert sent.bytes <= 4 * used.numel()


# ---- ShardedMuon


def shard(model):
    """Return the sharded model, and {parameter: shape of the whole matrix}."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for layer in model.children():
        fsdp.fully_shard(layer, process_group=pool.group())
    fsdp.fully_shard(model, process_group=pool.group())
    return model, {p: shapes[name] for name, p in model.named_parameters()}


def sharded_muon(model, shapes):
    return ShardedMuon(model.parameters(), shapes, process_group=pool.group(), **OPTIONS)


def train_sharded(model, optimizer, steps, plain=None, plain_optimizer=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(make_batch(pool.rank(), step))).backward()
        optimizer.step()
        if plain:
            plain.zero_grad()
            for rank in range(pool.world_size()):
                loss_of(plain(make_batch(rank, step))).backward()
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.grad /= pool.world_size()
            plain_optimizer.step()
            full = fsdp.full_state_dict(model)
            assert_all_equal(full.values(), plain.state_dict().values())


@needs_torch_2_9
@pool.on(1, 2, 3, 4)
def test_sharded_matrices_train_bitwise_as_on_one_device():
    """On four ranks, one has an empty part of some matrices."""
    plain = Matrices()
    model, shapes = shard(copy.deepcopy(plain))
    optimizer = sharded_muon(model, shapes)
    train_sharded(model, optimizer, range(3), plain, plain_muon(plain.parameters()))
    for parameter, state in optimizer.state.items():
        assert state["momentum_buffer"].shape == parameter.shape


@needs_torch_2_9
@pool.on(2)
def test_parts_may_be_rows_of_any_number():
    (plain,) = random_matrices((9, 4))
    part = nn.Parameter(plain.detach()[:7] if pool.rank() == 0 else plain.detach()[7:])
    optimizer = sharded_muon(nn.ParameterList([part]), {part: plain.shape})
    plain_optimizer = plain_muon([plain])
    for step in range(2):
        plain.grad = randn((9, 4), step).float()
        part.grad = plain.grad[:7] if pool.rank() == 0 else plain.grad[7:]
        optimizer.step()
        plain_optimizer.step()
    assert torch.equal(part, plain[:7] if pool.rank() == 0 else plain[7:])


@pool.on(2)
def test_a_part_without_elements_may_have_no_gradient():
    part = nn.Parameter(randn((1, 12 if pool.rank() else 0)).float())
    optimizer = sharded_muon(nn.ParameterList([part]), {part: (3, 4)})
    before = part.detach().clone()
    if pool.rank():
        part.grad = torch.ones_like(part)
    optimizer.step()
    assert pool.rank() == 0 or not torch.equal(part, before)


def save_or_load(function, model, optimizer, folder):
    pieces = checkpoint.shard_pieces(fsdp.shards(model, optimizer))
    pieces = {name: piece for name, piece in pieces.items() if "nobody" not in name}
    function(folder, pieces, process_group=pool.group())


def train_and_save(folder):
    model, shapes = shard(Matrices())
    optimizer = sharded_muon(model, shapes)
    train_sharded(model, optimizer, range(2))
    save_or_load(checkpoint.save, model, optimizer, folder)
    return fsdp.full_state_dict(model)


def load_and_compare(folder, expected):
    model, shapes = shard(Matrices(seed=2))
    optimizer = sharded_muon(model, shapes)
    train_sharded(model, optimizer, range(1))  # so that there are momenta to load into
    save_or_load(checkpoint.load, model, optimizer, folder)
    full = fsdp.full_state_dict(model)
    assert torch.equal(full["square.weight"], expected["square.weight"])
    momentum = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            buffer = optimizer.state[parameter]["momentum_buffer"]
            momentum[name] = fsdp.gather_full(parameter, buffer)
    return momentum


def test_momenta_of_shards_are_saved_and_loaded_at_another_number_of_ranks(tmp_path):
    expected = pool.run(2, train_and_save, tmp_path)[0]
    of_two = pool.run(2, load_and_compare, tmp_path, expected)[0]
    of_three = pool.run(3, load_and_compare, tmp_path, expected)[0]
    for name, momentum in of_two.items():
        assert torch.equal(momentum, of_three[name])


@pool.on(4)
def test_shards_send_a_quarter_of_what_matrices_send():
    """4Ψ/N bytes from each rank, times (N - 1) / N: momenta and updates in bfloat16."""
    part = nn.Parameter(torch.ones(1, 64))
    optimizer = sharded_muon(nn.ParameterList([part]), {part: (16, 16)})
    part.grad = torch.ones_like(part)
    with Sent(pool.rank()) as sent:
        optimizer.step()
    everyone = [None] * 4
    dist.all_gather_object(everyone, sent.bytes, group=pool.group())
    assert sum(everyone) == 4 * 256 * 3 / 4


# ---- errors, on all ranks


def one_on_rank_1(value, other):
    return other if pool.rank() == 1 else value


@pytest.mark.parametrize("what", ["shape", "dimensions", "dtype", "order", "number", "options"])
@pool.on(3)
def test_ranks_with_other_matrices_or_options_are_an_error_on_all(what):
    """Rank 1 is the one that differs."""
    mine = random_matrices((4, 6), (6, 4))
    others = {
        "shape": random_matrices((4, 6), (6, 5)),
        "dimensions": random_matrices((4, 6), (24,)),
        "dtype": random_matrices((4, 6), (6, 4), dtype=torch.float64),
        "order": mine[::-1],
        "number": mine[:1],
    }
    lr = one_on_rank_1(0.1, -0.1) if what == "options" else 0.1
    matrices = one_on_rank_1(mine, others.get(what, mine))
    with pytest.raises(ValueError, match="rank"):
        our_muon(matrices, lr=lr)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"lr": torch.ones(2)}, {"momentum": -1.0}, {"weight_decay": -1.0}]
    + [{"adjust_lr_fn": "x"}],
    ids=str,
)
@pool.on(1)
def test_options_that_torchs_class_refuses_are_a_value_error(options):
    with pytest.raises(ValueError, match=r"1-element|nvalid|not supported"):
        our_muon(random_matrices((4, 6)), **options)


@pool.on(1)
def test_vectors_and_complex_matrices_are_refused_as_by_torchs_class():
    with pytest.raises(ValueError, match="2D"):
        our_muon(random_matrices((4,)))
    with pytest.raises(RuntimeError, match="complex"):
        our_muon(random_matrices((4, 6), dtype=torch.complex64))


@pool.on(1)
def test_a_closure_is_an_error():
    with pytest.raises(ValueError, match="closure"):
        our_muon(random_matrices((4, 6))).step(lambda: 0.0)


@pool.on(1)
def test_a_group_that_comes_later_is_an_error():
    optimizer = our_muon(random_matrices((4, 6)))
    with pytest.raises(ValueError, match="constructor"):
        optimizer.add_param_group({"params": random_matrices((6, 4))})


@pool.on(2)
def test_a_rank_outside_of_the_group_gets_an_error():
    group = dist.new_group([0])
    if pool.rank() == 1:
        with pytest.raises(ValueError, match="rank 1"):
            Muon(random_matrices((4, 6)), process_group=group)


@pool.on(3)
def test_matrices_that_differ_between_two_ranks_of_the_group_are_an_error():
    (matrix,) = random_matrices((4, 6))
    matrix.differ_between_ranks = [1, 2]
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        our_muon([matrix])
    matrix.differ_between_ranks = [1, 7]
    our_muon([matrix])


@pool.on(2)
def test_shapes_that_do_not_fit_the_parts_are_an_error():
    part = nn.Parameter(torch.ones(1, 6))
    parts = nn.ParameterList([part])
    with pytest.raises(ValueError, match=r"\(6, 6\) elements"):
        sharded_muon(parts, {part: (3, 5)})
    with pytest.raises(ValueError, match="2D"):
        sharded_muon(parts, {})

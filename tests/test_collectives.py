"""collectives.py: each all-reduce by the oracle; orders of addition; its kin; messages, bytes, and what they take."""

import functools
import itertools

import claims
import pool
import pytest
import torch
import torch.distributed as dist
from claims import numbers_of
from torch.testing._internal.distributed.fake_pg import FakeStore

import collectives
from collectives import (
    SentBytes,
    all_to_all,
    naive_all_reduce,
    predict,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_broadcast,
)

ALL_REDUCES = [naive_all_reduce, tree_all_reduce, ring_all_reduce, recursive_doubling_all_reduce]
every_all_reduce = pytest.mark.parametrize("all_reduce", ALL_REDUCES, ids=lambda f: f.__name__)


@pytest.mark.parametrize("name", ["naive", "tree", "recursive_doubling"])
def test_what_the_oracle_claims_of_the_ring_holds_for_all(name):
    for (kind, claim), (_, sentence, _, worlds) in claims.CLAIMS.items():
        for N in worlds if kind == "all-reduce" else ():
            answers = pool.run(N, claims.run, kind, claim, f"collectives:{name}_all_reduce")
            assert answers == [""] * N, sentence


# ---- orders of addition


def in_order(x, order):
    """The sum of the ranks' x in `order`, a number or a pair of orders."""
    return x[order] if isinstance(order, int) else in_order(x, order[0]) + in_order(x, order[1])


def one_by_one(*ranks):
    return functools.reduce(lambda a, b: (a, b), ranks)


ORDERS = {  # of each all-reduce on 2, 3, 4 ranks
    naive_all_reduce: [(0, 1), ((0, 1), 2), (((0, 1), 2), 3)],
    tree_all_reduce: [(0, 1), ((0, 1), 2), ((0, 1), (2, 3))],
    recursive_doubling_all_reduce: [(0, 1), ((0, 2), 1), ((0, 1), (2, 3))],
}


def body_sum(all_reduce, values):
    mine = values[pool.rank()].clone()
    assert all_reduce(mine, pool.group()) is None
    return mine


@every_all_reduce
@pytest.mark.parametrize("N", [2, 3, 4])
def test_numbers_are_added_in_the_order_that_the_docstring_says(all_reduce, N):
    """Bitwise, in float32, where 30% of the sums have other bits in another order."""
    values = torch.stack([numbers_of(r, (1001,), torch.float32) for r in range(N)])
    if all_reduce is ring_all_reduce:  # part p: from p + 1 on, p last
        orders = [one_by_one(*((p + 1 + i) % N for i in range(N))) for p in range(N)]
        expected = torch.cat([in_order(x, o) for x, o in zip(values.tensor_split(N, 1), orders, strict=True)])
    else:
        expected = in_order(values, ORDERS[all_reduce][N - 2])
    for total in pool.run(N, body_sum, all_reduce, values):
        assert torch.equal(total, expected)
    assert N == 2 or all_reduce is naive_all_reduce or N == 3 or not torch.equal(expected, sum(values))


def test_the_docstrings_example():
    """1e8, 1 and -1e8 in each of three elements."""
    values = torch.tensor([[1e8] * 3, [1.0] * 3, [-1e8] * 3])
    assert [total.tolist() for total in pool.run(3, body_sum, ring_all_reduce, values)] == [[0, 1, 0]] * 3


@every_all_reduce
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_dtypes_that_add(all_reduce, dtype):
    """A leaf that wants gradients as well. At two ranks the sum is x0 + x1, rounded or wrapped around as torch's."""
    values = torch.stack([numbers_of(r, (7, 5), torch.float32).mul(90).to(dtype) for r in range(2)])
    if dtype.is_floating_point:
        values = torch.nn.Parameter(values)
    for total in pool.run(2, body_leaf, all_reduce, values):
        assert torch.equal(total, (values[0] + values[1]).detach())


def body_leaf(all_reduce, values):
    mine = values[pool.rank()].detach().clone().requires_grad_(values.requires_grad)
    all_reduce(mine, pool.group())
    return mine.detach()


# ---- the ring in chunks


def body_chunks(size):
    results = []
    for chunks in (1, 2, 3, 8):
        results.append(numbers_of(pool.rank(), (size,), torch.float32))
        ring_all_reduce(results[-1], pool.group(), chunks=chunks)
    return results


@pytest.mark.parametrize(("N", "size"), [(1, 5), (2, 10_007), (3, 10_007), (4, 10_007), (4, 5), (4, 1)])
def test_chunks_change_no_bit(N, size):
    """Nor hang, where there are more of them than elements."""
    everyone = list(itertools.chain(*pool.run(N, body_chunks, size)))
    assert all(torch.equal(everyone[0], result) for result in everyone)


class Watched:
    def __init__(self, log, number):
        self.log, self.number = log, number
        log.append(f"start {number}")

    def wait(self):
        self.log.append(f"wait {self.number}")


def test_a_chunk_travels_while_another_is_added(fake, monkeypatch):
    """By the order of issue: with two chunks there is always one under way when another is waited for."""
    fake(4, 1)
    log, numbers = [], itertools.count()
    monkeypatch.setattr(collectives, "start", lambda *args, **kwargs: [Watched(log, next(numbers))])
    ring_all_reduce(torch.zeros(64), chunks=2)
    starts = [
        "start 0",
        "start 1",
        *(f"{what} {i + 2 * (what == 'start')}" for i in range(10) for what in ("wait", "start")),
    ]
    assert log == [*starts, "wait 10", "wait 11"]


# ---- the others, against torch's


KIN = [ring_reduce_scatter, ring_all_gather, all_to_all, functools.partial(tree_broadcast, src=0)]


def body_kin(ranks, dtype, shape, strided):
    """In a group of these ranks of the world, in this order."""
    group = dist.new_group(ranks)
    if pool.rank() not in ranks:
        for function in (*ALL_REDUCES, *KIN):
            with pytest.raises(ValueError, match=r"only its members may|is not registered"):
                function(torch.zeros(4), process_group=group)
        return
    N, rank = len(ranks), dist.get_rank(group)
    values = [numbers_of(r, shape, dtype) for r in range(N)]
    mine = values[rank].t().contiguous().t() if strided else values[rank].clone()
    for src in range(N):
        tree_broadcast(copy := mine.clone(), dist.get_global_rank(group, src), group)
        assert torch.equal(copy, values[src])
    assert torch.equal(ring_all_gather(mine, group), torch.cat([torch.atleast_1d(value) for value in values]))
    part = ring_reduce_scatter(mine, group)
    torch.testing.assert_close(part, torch.atleast_1d(sum(values)).tensor_split(N)[rank])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view that keeps the whole
    if shape and shape[0] % N == 0:
        assert torch.equal(all_to_all(mine, group), torch.cat([value.chunk(N)[rank] for value in values]))
    else:
        with pytest.raises(ValueError, match=rf"must divide by {N} ranks along dimension 0; pad it"):
            all_to_all(mine, group)
    assert torch.equal(mine, values[rank])


CASES = [
    ([0, 1, 2, 3], torch.int64, (12,), False),
    ([0, 1, 2, 3], torch.float64, (8, 6), True),
    ([0, 1, 2, 3], torch.int32, (5, 3), True),
    ([0, 1, 2, 3], torch.int64, (2, 3, 2), False),
    ([0, 1, 2, 3], torch.int64, (0, 3), False),
    ([0, 1, 2, 3], torch.int16, (), False),
    ([0, 1, 2], torch.float32, (3,), False),
    ([3, 1], torch.int64, (4, 3), True),
    ([1, 0, 3], torch.int64, (6, 5), False),
    ([2], torch.int64, (3,), False),
]


@pytest.mark.parametrize(("ranks", "dtype", "shape", "strided"), CASES, ids=str)
def test_broadcast_gather_scatter_and_all_to_all(ranks, dtype, shape, strided):
    """In groups in any order, and what they take stays as it was; outside the group each raises a ValueError."""
    pool.run(4, body_kin, ranks, dtype, shape, strided)


def body_torchs():
    N, group, mine = pool.world_size(), pool.group(), numbers_of(pool.rank(), (12, 5))
    theirs, ours = torch.empty_like(mine), mine.clone()
    dist.all_to_all_single(theirs, mine, group=group)
    assert torch.equal(all_to_all(mine, group), theirs)
    everyone = [torch.empty_like(mine) for _ in range(N)]
    dist.all_gather(everyone, mine, group=group)
    assert torch.equal(ring_all_gather(mine, group), torch.cat(everyone))
    part = torch.empty(12 // N, 5, dtype=mine.dtype)
    dist.reduce_scatter(part, list(mine.chunk(N)), group=group)
    torch.testing.assert_close(ring_reduce_scatter(mine, group), part, rtol=0, atol=1e-12)
    dist.broadcast(theirs.copy_(mine), 1, group=group)
    tree_broadcast(ours, 1, group)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("N", [2, 3, 4])
def test_they_do_what_torchs_do(N):
    pool.run(N, body_torchs)


# ---- messages and bytes


@pytest.fixture
def fake():
    def be(N, rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)

    yield be
    dist.destroy_process_group()


SENT = {  # bytes by the rank that sends most, of n: the docstring's table
    naive_all_reduce: lambda n, N: n * (N - 1),
    tree_all_reduce: lambda n, N: n * (N - 1).bit_length(),
    ring_all_reduce: lambda n, N: 2 * n * (N - 1) / N,
    recursive_doubling_all_reduce: lambda n, N: n * (N - 1).bit_length(),
    ring_reduce_scatter: lambda n, N: n * (N - 1) / N,
    ring_all_gather: lambda n, N: n * (N - 1) / N,
    all_to_all: lambda n, N: n * (N - 1) / N,
    tree_broadcast: lambda n, N: n * (N - 1).bit_length(),
}


def call(function, N, group=None):  # -> n
    x = torch.zeros(12 * N // (N if function is ring_all_gather else 1))
    function(x, *([0] if function is tree_broadcast else []), process_group=group)
    return 12 * N * x.element_size()


def body_sent(function):
    with SentBytes() as sent:
        n = call(function, pool.world_size(), pool.group())
    return sent.total, SENT[function](n, pool.world_size())


@pytest.mark.parametrize("function", SENT, ids=lambda f: f.__name__)
def test_bytes_sent(function, fake):
    """By the busiest rank as the docstring's table says; on 2 to 4 ranks, and up to 1024 that move nothing."""
    for N in (1, 2, 3, 4):
        sent, expected = zip(*pool.run(N, body_sent, function), strict=True)
        assert max(sent) == expected[0]
    for N in (8, 64, 1000, 1024):
        totals = []
        for rank in (0, 1, N - 1):
            fake(N, rank)
            with SentBytes() as sent:
                n = call(function, N)
            totals.append(sent.total)
        assert max(totals) == SENT[function](n, N)


def simulate(programs, alpha, beta):
    """-> seconds, when each rank r goes through its exchanges programs[r], of [to, from, bytes], one after another."""

    @functools.cache
    def end(rank, i):
        """Of its i-th exchange, whose messages leave when both their ranks are there."""
        done = [0.0]
        for side in (0, 1) if i >= 0 else ():
            peer = programs[rank][i][side]
            if peer is not None:  # its k-th message to that peer is the peer's k-th from here
                k = [program[side] for program in programs[rank][:i]].count(peer)
                j = [j for j, program in enumerate(programs[peer]) if program[1 - side] == rank][k]
                done.append(max(end(rank, i - 1), end(peer, j - 1)) + alpha + beta * programs[rank][i][2])
        return max(done)

    return max(end(rank, len(program) - 1) for rank, program in enumerate(programs))


@pytest.mark.parametrize("function", SENT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_predict_is_what_the_messages_take(function, N, fake, monkeypatch):
    """Each rank's messages, as the function issues them, played by the α–β model."""
    programs = []
    for rank in range(N):
        fake(N, rank)
        programs.append([])

        def start(group, send=None, receive=None, program=programs[-1]):
            program.append((send and send[1], receive and receive[1], (send or receive)[0].nbytes))
            return []

        monkeypatch.setattr(collectives, "start", start)
        n = call(function, N)
    for alpha, beta in ((1.0, 0.0), (0.0, 1.0), (2.0, 0.5)):
        seconds = predict(function, N, n, alpha, 1 / beta if beta else float("inf"))
        assert simulate(programs, alpha, beta) == pytest.approx(seconds)


def test_predict():
    """The crossing of ring and recursive doubling at 4 ranks; names, short and long; what there is not."""
    alpha, bandwidth = 1e-4, 1e9
    for factor, faster in ((7.9, "recursive_doubling"), (8.1, "ring")):
        costs = {
            name: predict(name, 4, factor * alpha * bandwidth, alpha, bandwidth)
            for name in ("ring", "recursive_doubling")
        }
        assert min(costs, key=costs.get) == faster
    assert (
        predict("ring_all_reduce", 3, 9, 1, 1)
        == predict("ring", 3, 9, 1, 1)
        == predict(ring_all_reduce, 3, 9, 1, 1)
        == 16
    )
    for name, ranks in (("star", 4), ("ring", 0)):
        with pytest.raises(ValueError, match=f"{name} on {ranks} ranks: .* recursive_doubling, ring"):
            predict(name, ranks, 1, 1, 1)

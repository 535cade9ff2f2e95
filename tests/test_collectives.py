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

import collectives as c

ALL_REDUCES = [c.naive_all_reduce, c.tree_all_reduce, c.ring_all_reduce, c.recursive_doubling_all_reduce]
broadcast = functools.partial(c.tree_broadcast, src=0)
broadcast.__name__ = "tree_broadcast"
KIN = [c.ring_reduce_scatter, c.ring_all_gather, c.all_to_all, broadcast]
NAMES = {"ids": lambda value: getattr(value, "__name__", None)}


@pytest.mark.parametrize("name", ["naive", "tree", "recursive_doubling"])
def test_what_the_oracle_claims_of_the_ring_holds_for_all(name):
    for (kind, claim), (_, sentence, _, worlds) in claims.CLAIMS.items():
        for N in worlds if kind == "all-reduce" else ():
            answers = pool.run(N, claims.run, kind, claim, f"collectives:{name}_all_reduce")
            assert answers == [""] * N, sentence


# ---- all-reduce: orders of addition, dtypes, chunks


def body_sum(all_reduce, values):
    mine = values[pool.rank()].detach().clone().requires_grad_(values.requires_grad)
    assert all_reduce(mine, pool.group()) is None
    return mine.detach()


def in_order(x, order):
    """The sum of the ranks' x in `order`, a number or a pair of orders."""
    return x[order] if isinstance(order, int) else in_order(x, order[0]) + in_order(x, order[1])


ORDERS = {  # of each all-reduce on 2, 3, 4 ranks
    "naive": [(0, 1), ((0, 1), 2), (((0, 1), 2), 3)],
    "tree": [(0, 1), ((0, 1), 2), ((0, 1), (2, 3))],
    "recursive_doubling": [(0, 1), ((0, 2), 1), ((0, 1), (2, 3))],
}


@pytest.mark.parametrize("all_reduce", ALL_REDUCES, **NAMES)
@pytest.mark.parametrize("N", [2, 3, 4])
def test_numbers_are_added_in_the_order_that_the_docstring_says(all_reduce, N):
    """Bitwise, in float32, where in another order 30% of the sums have other bits."""
    values = torch.stack([numbers_of(r, (1001,), torch.float32) for r in range(N)])
    if all_reduce is c.ring_all_reduce:  # part p: from p + 1 on, p last
        orders = [[(p + 1 + i) % N for i in range(N)] for p in range(N)]
        parts = zip(values.tensor_split(N, 1), orders, strict=True)
        expected = torch.cat([functools.reduce(torch.add, x[order]) for x, order in parts])
    else:
        expected = in_order(values, ORDERS[all_reduce.__name__.removesuffix("_all_reduce")][N - 2])
    assert all(torch.equal(total, expected) for total in pool.run(N, body_sum, all_reduce, values))


def test_the_docstrings_example():
    values = torch.tensor([[1e8] * 3, [1.0] * 3, [-1e8] * 3])
    assert [total.tolist() for total in pool.run(3, body_sum, c.ring_all_reduce, values)] == [[0, 1, 0]] * 3


@pytest.mark.parametrize("all_reduce", ALL_REDUCES, **NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_dtypes_that_add(all_reduce, dtype):
    """At two ranks it is x0 + x1, rounded or wrapped around as torch's; also of leaves that want gradients."""
    values = numbers_of(0, (2, 7, 5), torch.float32).mul(90).to(dtype).requires_grad_(dtype.is_floating_point)
    assert all(torch.equal(total, values[0] + values[1]) for total in pool.run(2, body_sum, all_reduce, values))


@pytest.mark.parametrize(("N", "size"), [(1, 5), (2, 10_007), (3, 10_007), (4, 5), (4, 1)])
def test_chunks_change_no_bit(N, size):
    """Also where they are more than elements."""
    values = numbers_of(0, (N, size), torch.float32)
    rings = [functools.partial(c.ring_all_reduce, chunks=chunks) for chunks in (1, 2, 3, 8)]
    results = list(itertools.chain(*(pool.run(N, body_sum, ring, values) for ring in rings)))
    assert all(torch.equal(results[0], result) for result in results)


@pytest.fixture
def fake():
    def be(N, rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=N)

    yield be
    dist.destroy_process_group()


def test_a_chunk_travels_while_another_is_added(fake, monkeypatch):
    """By the order of issue: of two chunks one is always under way when another is waited for, and added."""

    class Work:
        def __init__(self, *_, **__):
            log.append(("start", self))

        def wait(self):
            log.append(("wait", self))

    fake(4, 1)
    log = []
    monkeypatch.setattr(c, "start", lambda *args, **kwargs: [Work()])
    c.ring_all_reduce(torch.zeros(64), chunks=2)
    works = [work for what, work in log if what == "start"]
    expected = [("start", works[0])]
    for work, following in itertools.zip_longest(works, works[1:]):
        expected += [("start", following), ("wait", work)] if following else [("wait", work)]
    assert len(works) == 12
    assert log == expected


# ---- the others


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
        c.tree_broadcast(copy := mine.clone(), dist.get_global_rank(group, src), group)
        assert torch.equal(copy, values[src])
    assert torch.equal(c.ring_all_gather(mine, group), torch.cat([torch.atleast_1d(value) for value in values]))
    part = c.ring_reduce_scatter(mine, group)
    torch.testing.assert_close(part, torch.atleast_1d(sum(values)).tensor_split(N)[rank])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view that keeps the whole
    if shape and shape[0] % N == 0:
        assert torch.equal(c.all_to_all(mine, group), torch.cat([value.chunk(N)[rank] for value in values]))
    else:
        with pytest.raises(ValueError, match=rf"must divide by {N} ranks along dimension 0; pad it"):
            c.all_to_all(mine, group)
    assert torch.equal(mine, values[rank])


CASES = [
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
    theirs, everyone = torch.empty_like(mine), [torch.empty_like(mine) for _ in range(N)]
    dist.all_to_all_single(theirs, mine, group=group)
    assert torch.equal(c.all_to_all(mine, group), theirs)
    dist.all_gather(everyone, mine, group=group)
    assert torch.equal(c.ring_all_gather(mine, group), torch.cat(everyone))
    dist.all_reduce(theirs.copy_(mine), group=group)  # and cut: gloo has no reduce-scatter before torch 2.8
    part = theirs.chunk(N)[pool.rank()]
    torch.testing.assert_close(c.ring_reduce_scatter(mine, group), part, rtol=0, atol=1e-12)
    dist.broadcast(theirs.copy_(mine), 1, group=group)
    c.tree_broadcast(mine, 1, group)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("N", [2, 3, 4])
def test_they_do_what_torchs_do(N):
    pool.run(N, body_torchs)


# ---- messages and bytes

SENT = {  # by the rank that sends most: as a multiple of n bytes
    **dict.fromkeys(["naive_all_reduce"], lambda N: N - 1),
    **dict.fromkeys(
        ["tree_all_reduce", "recursive_doubling_all_reduce", "tree_broadcast"], lambda N: (N - 1).bit_length()
    ),
    "ring_all_reduce": lambda N: 2 * (N - 1) / N,
    **dict.fromkeys(["ring_reduce_scatter", "ring_all_gather", "all_to_all"], lambda N: (N - 1) / N),
}
every_function = pytest.mark.parametrize("function", [*ALL_REDUCES, *KIN], **NAMES)


def body_sent(function, N):  # -> bytes sent, and those of the tensor
    tensor = torch.zeros(12 if function is c.ring_all_gather else 12 * N)
    with c.SentBytes() as sent:
        function(tensor, process_group=pool.group() if pool._current else None)
    return sent.total, 12 * N * 4


@every_function
def test_bytes_sent(function, fake):
    """As the docstring's table says, on 2 to 4 ranks, and on up to 1024 that move nothing."""
    for N in (1, 2, 3, 4, 8, 64, 1000, 1024):
        if N <= 4:
            found = pool.run(N, body_sent, function, N)
        else:
            found = [(fake(N, rank), body_sent(function, N))[1] for rank in (0, 1, N - 1)]
        assert max(sent for sent, _ in found) == SENT[function.__name__](N) * found[0][1]


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


@every_function
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_predict_is_what_the_messages_take(function, N, fake, monkeypatch):
    """Each rank's messages, as the function issues them, played by the α–β model."""
    programs = [[] for _ in range(N)]

    def start(group, send=None, receive=None):
        programs[dist.get_rank()].append((send and send[1], receive and receive[1], (send or receive)[0].nbytes))
        return []

    monkeypatch.setattr(c, "start", start)
    for rank in range(N):
        fake(N, rank)
        _, n = body_sent(function, N)
    for alpha, beta in ((1.0, 0.0), (2.0, 0.5)):
        seconds = c.predict(function.__name__, N, n, alpha, 1 / beta if beta else float("inf"))
        assert simulate(programs, alpha, beta) == pytest.approx(seconds)


def test_predict():
    """Ring and recursive doubling cross at 8α/β bytes on 4 ranks; names, short and long; what there is not."""
    for factor, faster in ((7.9, "recursive_doubling"), (8.1, "ring")):
        costs = {name: c.predict(name, 4, factor * 1e-4 * 1e9, 1e-4, 1e9) for name in ("ring", "recursive_doubling")}
        assert min(costs, key=costs.get) == faster
    assert {c.predict(name, 3, 9, 1, 1) for name in ("ring", "ring_all_reduce", c.ring_all_reduce)} == {16}
    for name, ranks in (("star", 4), ("ring", 0)):
        with pytest.raises(ValueError, match=rf"{name} on {ranks} ranks: .* recursive_doubling, ring"):
            c.predict(name, ranks, 1, 1, 1)

"""collectives.py: sums, their orders of addition, the bytes and messages of each algorithm."""

import functools
import itertools
import types

import pool
import pytest
import torch
import torch.distributed as dist
from claims.all_reduce import numbers_of
from claims.verdicts import judge, names_of_claims
from shared import fake_world

import collectives as c

ORDERS = {  # in which the numbers of 1, 2, 3, 4 ranks are added
    c.naive_all_reduce: [0, (0, 1), ((0, 1), 2), (((0, 1), 2), 3)],
    c.tree_all_reduce: [0, (0, 1), ((0, 1), 2), ((0, 1), (2, 3))],
    c.recursive_doubling_all_reduce: [0, (0, 1), ((0, 2), 1), ((0, 1), (2, 3))],
}
broadcast = functools.partial(c.tree_broadcast, src=0)
broadcast.__name__ = "tree_broadcast"
SENT = {  # by the rank that sends most, in multiples of the tensor's bytes
    c.naive_all_reduce: lambda N: N - 1,
    c.tree_all_reduce: lambda N: (N - 1).bit_length(),
    c.recursive_doubling_all_reduce: lambda N: (N - 1).bit_length(),
    c.ring_all_reduce: lambda N: 2 * (N - 1) / N,
    broadcast: lambda N: (N - 1).bit_length(),
    c.ring_reduce_scatter: lambda N: (N - 1) / N,
    c.ring_all_gather: lambda N: (N - 1) / N,
    c.all_to_all: lambda N: (N - 1) / N,
}


@pytest.mark.parametrize("function", ORDERS, ids=lambda function: function.__name__)
def test_what_the_oracle_claims_of_the_ring_holds_for_all(function):
    """But of the two with 16 MB one, once: all three wait for their messages in the same place."""
    skipped = ["large"] if function is c.naive_all_reduce else ["large", "reused"]
    for claim in names_of_claims("all-reduce"):
        if claim not in skipped:
            verdict = judge("all-reduce", claim, f"collectives:{function.__name__}")
            assert verdict.outcome == "holds", (claim, verdict)


def in_order(x, order):
    """The sum of the ranks' x in `order`, a number or a pair of orders."""
    return x[order] if isinstance(order, int) else in_order(x, order[0]) + in_order(x, order[1])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool], ids=str
)
@pool.on(1, 2, 3, 4)
def test_numbers_are_added_in_the_order_that_the_docstring_says(dtype):
    """Bitwise: in another order 30% of the sums would have other bits.

    Also for leaves that require gradients, and for more chunks than elements.
    """
    N, everyone = pool.world_size(), range(pool.world_size())
    for size in (1001, 5, 1):
        values = [numbers_of(r, (size,), torch.float32).mul(90).to(dtype) for r in everyone]
        parts = enumerate(zip(*(value.tensor_split(N) for value in values), strict=True))
        ring = torch.cat(
            [
                functools.reduce(torch.add, [part[(p + 1 + i) % N] for i in everyone])
                for p, part in parts
            ]
        )
        expected = {
            all_reduce: in_order(values, orders[N - 1]) for all_reduce, orders in ORDERS.items()
        }
        expected |= {
            functools.partial(c.ring_all_reduce, chunks=chunks): ring for chunks in (1, 2, 3, 8)
        }
        for all_reduce, total in expected.items():
            mine = values[pool.rank()].clone().requires_grad_(dtype.is_floating_point)
            assert all_reduce(mine, pool.group()) is None
            assert torch.equal(mine, total), all_reduce


@pool.on(3)
def test_the_docstrings_example():
    c.ring_all_reduce(mine := torch.full((3,), [1e8, 1.0, -1e8][pool.rank()]), pool.group())
    assert mine.tolist() == [0, 1, 0]


def test_a_chunk_travels_while_another_is_added(monkeypatch):
    """One chunk is always in flight while another is waited for and added."""
    log = []
    numbers = itertools.count()

    def start(*_, **__):
        number = next(numbers)
        log.append(("start", number))
        return [types.SimpleNamespace(wait=lambda: log.append(("wait", number)))]

    monkeypatch.setattr(c, "start", start)
    with fake_world(4, 1):
        c.ring_all_reduce(torch.zeros(64), chunks=2)
    expected = [("start", 0)]
    for i in range(1, 6):  # 3 steps of 2 chunks
        expected += [("start", i), ("wait", i - 1)]
    expected.append(("wait", 5))
    for i in range(6, 9):  # the all-gather adds nothing, so its parts are whole
        expected += [("start", i), ("wait", i)]
    assert log == expected


CASES = [  # members, dtype, shape, strided?
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
@pool.on(4)
def test_broadcast_gather_scatter_and_all_to_all(ranks, dtype, shape, strided):
    """Groups in any order of ranks. Inputs do not change. A rank outside raises a ValueError."""
    group = dist.new_group(ranks)
    if pool.rank() not in ranks:
        for function in SENT:
            with pytest.raises(ValueError, match=r"only its members may|is not registered"):
                function(torch.zeros(4), process_group=group)
        return
    N, rank = len(ranks), dist.get_rank(group)
    values = [numbers_of(r, shape, dtype) for r in range(N)]
    mine = values[rank].t().contiguous().t() if strided else values[rank].clone()
    for src in range(N):
        c.tree_broadcast(copy := mine.clone(), dist.get_global_rank(group, src), group)
        assert torch.equal(copy, values[src])
    assert torch.equal(
        c.ring_all_gather(mine, group), torch.cat([torch.atleast_1d(value) for value in values])
    )
    part = c.ring_reduce_scatter(mine, group)
    torch.testing.assert_close(part, torch.atleast_1d(sum(values)).tensor_split(N)[rank])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view that keeps the whole
    if shape and shape[0] % N == 0:
        assert torch.equal(
            c.all_to_all(mine, group), torch.cat([value.chunk(N)[rank] for value in values])
        )
    else:
        with pytest.raises(
            ValueError, match=rf"must divide by {N} ranks along dimension 0; pad it"
        ):
            c.all_to_all(mine, group)
    assert torch.equal(mine, values[rank])


def simulate(programs, alpha, beta):
    """The ranks' seconds; programs[r] lists the exchanges of rank r as [to, from, bytes]."""

    @functools.cache
    def end(rank, i):
        """Of its i-th exchange, whose messages leave when both their ranks are there."""
        done = [0.0]
        for side in (0, 1) if i >= 0 else ():
            peer = programs[rank][i][side]
            if peer is not None:  # its k-th message to that peer is the peer's k-th from here
                k = [program[side] for program in programs[rank][:i]].count(peer)
                j = [j for j, program in enumerate(programs[peer]) if program[1 - side] == rank][k]
                done.append(
                    max(end(rank, i - 1), end(peer, j - 1)) + alpha + beta * programs[rank][i][2]
                )
        return max(done)

    return max(end(rank, len(program) - 1) for rank, program in programs.items())


@pytest.mark.parametrize("function", SENT, ids=lambda function: function.__name__)
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 8, 13, 1024])
def test_messages_have_the_bytes_of_the_docstring_and_take_as_long_as_predicted(
    function, N, monkeypatch
):
    """Record each rank's messages in a world that moves no data, and play them by the α–β model."""
    programs, sent, real_start = {}, {}, c.start

    def start(group, send=None, receive=None):
        programs[dist.get_rank()].append(
            (send and send[1], receive and receive[1], (send or receive)[0].nbytes)
        )
        return real_start(group, send, receive)

    monkeypatch.setattr(c, "start", start)
    for rank in range(N) if N < 1024 else (0, 1, N - 1):
        programs[rank] = []
        with fake_world(N, rank), c.SentBytes() as sent[rank]:
            function(torch.zeros(12 if function is c.ring_all_gather else 12 * N))
    assert max(each.total for each in sent.values()) == pytest.approx(
        SENT[function](N) * 12 * N * 4
    )
    for alpha, beta in ((1.0, 0.0), (2.0, 0.5)) if N < 1024 else ():
        seconds = c.predict(
            function.__name__, N, 12 * N * 4, alpha, 1 / beta if beta else float("inf")
        )
        assert simulate(programs, alpha, beta) == pytest.approx(seconds)


def test_predict():
    """Ring and recursive doubling cross at 8α/β bytes on 4 ranks. An unknown name is an error."""
    for factor, faster in ((7.9, "recursive_doubling"), (8.1, "ring")):
        costs = {
            name: c.predict(name, 4, factor * 1e-4 * 1e9, 1e-4, 1e9)
            for name in ("ring", "recursive_doubling")
        }
        assert min(costs, key=costs.get) == faster
    assert {
        c.predict(name, 3, 9, 1, 1) for name in ("ring", "ring_all_reduce", c.ring_all_reduce)
    } == {16}
    for name, ranks in (("star", 4), ("ring", 0)):
        with pytest.raises(
            ValueError, match=rf"{name} on {ranks} ranks: .* recursive_doubling, ring"
        ):
            c.predict(name, ranks, 1, 1, 1)

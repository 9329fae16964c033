"""The pool: survivors of successive batches run full stages, and everybody is answered once."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.engines import Numbers, numbered, policy
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import exits_taken
from offramp.running.pool import Left, Pool, Ticket


class Fickle(Ticket):
    """Cancelled from the second time on that anybody asks, as if by another thread meanwhile."""

    asked = -1

    @property  # type: ignore[override]
    def cancelled(self) -> bool:
        self.asked += 1
        return self.asked > 0

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        pass


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_a_pool_gives_what_a_batch_gives(batch: int, ahead: int) -> None:
    logits = np.random.default_rng(3).normal(size=(3, 60, 5)).astype(np.float32) * 3
    sure = Predictions.of(logits, np.zeros(60, np.int64)).confidences
    thresholds = tuple(float(np.median(own)) for own in sure[:-1])
    pool = Pool(Numbers(sure, ahead), policy(*thresholds), batch, wait_s=60.0, guesses=True)
    found = []
    for begin in range(0, 60, 7):
        rows = np.arange(begin, min(begin + 7, 60))
        pool.add(numbered(60)[rows], [Ticket(int(i), 3) for i in rows])
        while pool.ready():
            found += pool.work()
    while pool.waiting:
        found += pool.work(flush=True)
    assert sorted(left.ticket.key for left in found) == list(range(60))
    exits = exits_taken(sure, thresholds)
    assert all(left.exit == exits[left.ticket.key] and not left.forced for left in found)
    assert all(left.label == 10 * left.exit + left.ticket.key for left in found)
    assert all([g[0] for g in left.ticket.guesses] == [10 * k + left.ticket.key for k in range(1, left.exit + 1)]
               for left in found)  # fmt: skip


def test_a_stage_is_under_way_while_the_host_decides_about_another() -> None:
    """A stream whose batches are no larger than the pool's: every stage but the last is judged behind another."""
    sure = np.tile(np.array([[1.0, 0.0], [1.0, 1.0]]), (1, 40))  # every second one leaves at once
    engine = Numbers(sure, ahead=1)
    pool, under_way = Pool(engine, policy(0.5), 8, wait_s=60.0), []
    judge = engine.judge
    engine.judge = lambda k, logits: (under_way.append(len(pool.running)), judge(k, logits))[1]  # type: ignore
    for begin in range(0, 80, 8):
        pool.add(numbered(80)[begin : begin + 8], [Ticket(i, 2) for i in range(8)])
        while pool.ready():
            pool.work()
    while pool.waiting:
        pool.work(flush=True)
    assert len(under_way) > 12 and sum(under_way) >= len(under_way) - 2


def test_a_few_do_not_run_beside_a_full_batch() -> None:
    """They wait for those who come back from it, and run with them."""
    engine = Numbers(np.zeros((2, 12)), ahead=1)
    pool = Pool(engine, policy(0.5), 8, wait_s=60.0)
    pool.add(numbered(12)[:8], [Ticket(i, 2) for i in range(8)])
    assert pool.work(flush=True) == []
    pool.add(numbered(12)[8:], [Ticket(i, 2) for i in range(8, 12)])
    found = pool.work(flush=True)
    assert engine.ran == [(1, 8)] and not pool.running
    while pool.waiting:
        found += pool.work(flush=True)
    assert engine.ran == [(1, 8), (2, 8), (1, 4), (2, 4)] and len(found) == 12


def test_pools_that_share_an_engine_leave_each_other_alone() -> None:
    sure = np.zeros((2, 24))
    engine = Numbers(sure, ahead=1)
    one, other = (Pool(engine, policy(0.5), 4, wait_s=60.0) for _ in range(2))
    found: list[Left] = []
    for begin in range(0, 24, 8):
        for pool, at in ((one, begin), (other, begin + 4)):
            pool.add(numbered(24)[at : at + 4], [Ticket(i, 2) for i in range(at, at + 4)])
            found += pool.work()
    assert one.running and not other.running  # which judges each stage at once
    for pool in (other, one):
        while pool.waiting:
            found += pool.work(flush=True)
    assert sorted((left.ticket.key, left.label) for left in found) == [(i, 20 + i) for i in range(24)]


def test_a_stage_that_fails_leaves_the_one_under_way_alone() -> None:
    sure = np.zeros((1, 12))
    engine = Numbers(sure, ahead=1)
    pool, run = Pool(engine, policy(), 4, wait_s=60.0), engine.run
    pool.add(numbered(12)[:4], [Ticket(i, 1) for i in range(4)])
    assert pool.work() == [] and pool.waiting == 4
    engine.run = lambda k, state: 1 / 0  # type: ignore
    pool.add(numbered(12)[4:8], [Ticket(i, 1) for i in range(4, 8)])
    with pytest.raises(ZeroDivisionError):
        pool.work()
    engine.run = run  # type: ignore
    pool.add(numbered(12)[8:], [Ticket(i, 1) for i in range(8, 12)])
    found = pool.work() + pool.work()
    assert [(left.ticket.key, left.label) for left in found] == [(i, 10 + i) for i in (*range(4), *range(8, 12))]


def test_late_stages_run_full_batches() -> None:
    sure = np.zeros((2, 64))
    sure[0, ::2] = 1  # every second one leaves
    engine = Numbers(sure)
    pool = Pool(engine, policy(0.5), 8, wait_s=60.0)
    for begin in range(0, 64, 8):
        pool.add(numbered(64)[begin : begin + 8], [Ticket(i, 2) for i in range(8)])
        while pool.ready():
            pool.work()
    assert {size for _, size in engine.ran} == {8} and pool.waiting == 0


def test_nobody_waits_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("offramp.running.pool.time.perf_counter", lambda: now[0])
    pool = Pool(Numbers(np.zeros((2, 4))), policy(0.5), 8, wait_s=0.5)
    pool.add(numbered(2), [Ticket(i, 2) for i in range(2)])
    assert not pool.ready() and pool.work() == []
    now[0] = 0.6
    assert pool.ready() and pool.work() == [] and pool.waiting == 2  # both go on to stage 2
    assert not pool.ready()
    now[0] = 1.2
    assert len(pool.work()) == 2


def test_tickets_have_their_own_limits_and_can_be_cancelled() -> None:
    engine = Numbers(np.zeros((3, 4)))
    pool = Pool(engine, policy(0.5, 0.5), 8, wait_s=0.0)
    tickets = [Ticket(0, 1), Ticket(1, 3, deadline=0.0), Ticket(2, 2), Ticket(3, 3)]
    pool.add(numbered(4), tickets)
    first = pool.work()
    assert [(left.ticket.key, left.exit, left.forced) for left in first] == [(0, 1, True), (1, 1, True)]
    tickets[3].cancelled = True
    second = pool.work()
    assert [(left.ticket.key, left.exit, left.forced) for left in second] == [(2, 2, True)]
    assert pool.waiting == 0 and engine.ran == [(1, 4), (2, 1)]


def test_a_cancellation_in_the_middle_spoils_nothing() -> None:
    pool = Pool(Numbers(np.ones((2, 4))), policy(0.5), 8, wait_s=60.0)
    pool.add(numbered(4), [Ticket(0, 2), Fickle(1, 2), Ticket(2, 2), Ticket(3, 2)])
    assert [(left.ticket.key, left.label) for left in pool.work(flush=True)] == [(i, 10 + i) for i in range(4)]


def test_the_cancelled_take_no_place_in_a_batch() -> None:
    engine = Numbers(np.ones((2, 12)))
    pool = Pool(engine, policy(0.5), 4, wait_s=60.0)
    tickets = [Ticket(i, 2) for i in range(12)]
    for i in (1, 2, 5):
        tickets[i].cancelled = True
    pool.add(numbered(12)[:7], tickets[:7])
    pool.add(numbered(12)[7:], tickets[7:])
    left = [one for _ in range(3) for one in pool.work(flush=True)]
    assert [one.ticket.key for one in left] == [0, 3, 4, 6, 7, 8, 9, 10, 11] and pool.waiting == 0
    assert all(one.label == 10 + one.ticket.key for one in left) and engine.ran == [(1, 4), (1, 4), (1, 1)]

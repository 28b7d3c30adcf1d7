"""Renewing a lease during a read: when, until when, and what a refusal does."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import numpy as np

from kvpool.blocks.tier import Tier
from kvpool.client.node.grants import ReadLease
from kvpool.client.node.lease_keepalive import LeaseKeepalive
from kvpool.errors import LeaseExpired
from tests.support import waiting

until = partial(waiting.until, timeout_s=10.0)

MARGIN_S = 0.01


def a_lease(ttl_s: float) -> ReadLease:
    nothing = np.empty(0, dtype=np.int64)
    return ReadLease(1, 1, nothing, nothing, (Tier.DRAM,), time.monotonic() + ttl_s, "")


class Server:
    """A node that grants `ttl_s` at most, or refuses, or does not answer while `is_silent`."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.asked: list[float] = []  # ttls
        self.is_refusing = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def renew(self, lease: ReadLease, ttl_s: float, _timeout_s: float) -> None:
        asked = time.monotonic()
        self.asked.append(ttl_s)
        await self.answers.wait()
        if self.is_refusing or asked >= lease.deadline:
            raise LeaseExpired("over")
        lease.deadline = max(lease.deadline, asked + min(ttl_s, self.ttl_s))


async def test_a_lease_is_renewed_at_a_third_of_its_life_while_the_read_may_last() -> None:
    server, lease = Server(1.2), a_lease(1.2)
    started = time.monotonic()
    first_end = lease.deadline
    keepalive = LeaseKeepalive(lease, started + 1.5, MARGIN_S, server.renew)
    await until(lambda: bool(server.asked))
    assert 0.3 < time.monotonic() - started < 1.2
    assert server.asked[0] < 2.5  # the time left for the read, plus one second
    await until(lambda: lease.deadline > started + 1.5 + MARGIN_S)
    await until(lambda: keepalive._task is not None and keepalive._task.done())
    assert lease.deadline > first_end
    assert len(server.asked) < 20
    await keepalive.end()


async def test_a_lease_that_outlasts_the_read_is_never_renewed() -> None:
    server, lease = Server(10.0), a_lease(10.0)
    keepalive = LeaseKeepalive(lease, time.monotonic() + 1.0, MARGIN_S, server.renew)
    assert keepalive._timer is None
    await keepalive.end()
    assert not server.asked


async def test_nothing_is_asked_once_the_read_is_over() -> None:
    server, lease = Server(0.05), a_lease(0.05)
    keepalive = LeaseKeepalive(lease, time.monotonic() + 10.0, MARGIN_S, server.renew)
    await keepalive.end()
    await asyncio.sleep(0.1)  # six times the pause before the first would have been asked for
    assert not server.asked


async def test_a_refusal_ends_the_renewing_and_leaves_the_deadline() -> None:
    server, lease = Server(0.1), a_lease(0.1)
    server.is_refusing = True
    end = lease.deadline
    keepalive = LeaseKeepalive(lease, time.monotonic() + 10.0, MARGIN_S, server.renew)
    await until(lambda: keepalive._task is not None and keepalive._task.done())
    assert (lease.deadline, len(server.asked)) == (end, 1)
    await keepalive.end()


async def test_a_reply_under_way_is_waited_for_if_the_lease_ends_without_it() -> None:
    server, lease = Server(5.0), a_lease(0.6)
    server.answers.clear()
    keepalive = LeaseKeepalive(lease, time.monotonic() + 10.0, MARGIN_S, server.renew)
    await until(lambda: time.monotonic() > lease.deadline)
    asyncio.get_running_loop().call_later(0.05, server.answers.set)
    await keepalive.end()
    assert lease.deadline > time.monotonic() + 1.0  # asked in time, and granted


async def test_an_answer_that_does_not_come_costs_the_deadline_and_no_more() -> None:
    server, lease = Server(5.0), a_lease(0.6)
    server.answers.clear()
    keepalive = LeaseKeepalive(lease, time.monotonic() + 0.9, MARGIN_S, server.renew)
    await until(lambda: time.monotonic() > lease.deadline)
    started = time.monotonic()
    await keepalive.end()
    assert time.monotonic() - started < 4.0
    assert lease.deadline < time.monotonic()

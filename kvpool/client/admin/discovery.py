"""Which namespaces and blocks a pool has, and whose blocks an engine can read although its own layout is another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvpool.blocks.hashing import pack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import plan_read
from kvpool.client.node.deadlines import time_left
from kvpool.errors import CannotReshard, LayoutMismatch, UnknownNamespace
from kvpool.wire import FailoverClient
from kvpool.wire import messages as m

if TYPE_CHECKING:
    from kvpool.client.async_pool import AsyncPool

PAGE = 1000
AT_ONCE = 64  # questions to one node


async def known_namespaces(conductor: FailoverClient, deadline: float) -> list[Namespace]:
    """All namespaces that a conductor knows, oldest first."""
    known: list[Namespace] = []
    while True:
        reply: m.NamespacesReply = await conductor.call(
            m.Namespaces(len(known), PAGE), time_left(deadline)
        )
        known += reply.namespaces
        if len(reply.namespaces) < PAGE:
            return known


async def standing(
    pool: AsyncPool, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> list[bool]:
    """See `AsyncPool.standing`; `deadline` in monotonic seconds."""
    if not hashes:
        return []
    if not pool.has_conductor:
        return await _standing_at_one(pool, namespace, hashes, deadline)
    request = m.CountCopies(namespace.namespace_id, pack_hashes(hashes))
    try:
        reply: m.CopyCounts = await pool.ask_conductor(request, timeout_s=time_left(deadline))
    except UnknownNamespace:
        await pool.register(namespace, timeout_s=time_left(deadline))
        reply = await pool.ask_conductor(request, timeout_s=time_left(deadline))
    is_fresh = pool.recent_writes.remembered(namespace.namespace_id, hashes, time.monotonic())
    return [count > 0 or fresh for count, fresh in zip(reply.copies, is_fresh, strict=True)]


async def _standing_at_one(
    pool: AsyncPool, namespace: Namespace, hashes: Sequence[bytes], deadline: float
) -> list[bool]:
    found: list[bool] = []
    for start in range(0, len(hashes), AT_ONCE):
        run = hashes[start : start + AT_ONCE]
        replies = await asyncio.gather(
            *(pool.lookup(namespace, [one], timeout_s=time_left(deadline)) for one in run)
        )
        found += [reply.found > 0 for reply in replies]
    return found


def readable(namespaces: Iterable[Namespace], reader: Namespace) -> list[Namespace]:
    """Those whose blocks an engine of `reader` can read, cheapest first."""
    costs = ((read_cost(other, reader), other) for other in namespaces)
    found = [(cost, other) for cost, other in costs if cost is not None]
    return [other for _, other in sorted(found, key=lambda pair: pair[0])]


def read_cost(stored: Namespace, reader: Namespace) -> tuple[bool, int] | None:
    """What a block of `stored` costs a rank of `reader`: whether it reads less than whole parts (which cannot be
    verified everywhere), and how many pieces; None when it cannot use them at all.
    """
    if msgspec.structs.replace(stored, layout=reader.layout) != reader:
        return None
    try:
        plan = plan_read(stored.layout, reader.layout, 0)
    except (LayoutMismatch, CannotReshard):
        return None
    return not plan.is_whole, len(plan.lengths)

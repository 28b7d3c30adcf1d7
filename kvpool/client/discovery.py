"""Which namespaces of a pool hold blocks that an engine can read although its own layout is another."""

from __future__ import annotations

import msgspec

from kvpool.client.deadlines import time_left
from kvpool.errors import CannotReshard, LayoutMismatch
from kvpool.layout import Namespace
from kvpool.resharding import plan_read
from kvpool.wire import WireClient
from kvpool.wire import messages as m

PAGE = 1000


async def compatible_namespaces(
    conductor: WireClient, namespace: Namespace, deadline: float
) -> list[Namespace]:
    """See `AsyncPool.compatible_namespaces`."""
    found: list[tuple[tuple[bool, int], Namespace]] = []
    offset = 0
    while True:
        reply: m.NamespacesReply = await conductor.call(
            m.Namespaces(offset, PAGE), time_left(deadline)
        )
        for other in reply.namespaces:
            cost = read_cost(other, namespace)
            if cost is not None:
                found.append((cost, other))
        if len(reply.namespaces) < PAGE:
            return [other for _, other in sorted(found, key=lambda pair: pair[0])]
        offset += PAGE


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

"""Which namespaces a pool knows, and whose blocks an engine can read although its own layout is another."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvpool.client.deadlines import time_left
from kvpool.errors import CannotReshard, LayoutMismatch
from kvpool.layout import Namespace
from kvpool.resharding import plan_read
from kvpool.wire import FailoverClient
from kvpool.wire import messages as m

PAGE = 1000


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

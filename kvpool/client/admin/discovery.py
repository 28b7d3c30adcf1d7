"""Which namespaces a pool knows, and which of them an engine with another layout can read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvpool.blocks.layout import Namespace
from kvpool.blocks.resharding import plan_read
from kvpool.client.node.deadlines import time_left
from kvpool.client.node.directory import NodeDirectory
from kvpool.errors import CannotReshard, LayoutMismatch
from kvpool.wire import messages as m

PAGE = 1000  # namespaces per call


async def known_namespaces(directory: NodeDirectory, deadline: float) -> list[Namespace]:
    """All namespaces that the conductor knows, oldest first.

    Raises:
        ConfigError: this client speaks to a single node.
    """
    known: list[Namespace] = []
    while True:
        reply: m.NamespacesReply = await directory.ask_conductor(
            m.Namespaces(len(known), PAGE), time_left(deadline)
        )
        known += reply.namespaces
        if len(reply.namespaces) < PAGE:
            return known


def readable(namespaces: Iterable[Namespace], reader: Namespace) -> list[Namespace]:
    """The namespaces whose blocks an engine of `reader` can read, cheapest first."""
    costs = ((read_cost(other, reader), other) for other in namespaces)
    found = [(cost, other) for cost, other in costs if cost is not None]
    return [other for _, other in sorted(found, key=lambda pair: pair[0])]


def read_cost(stored: Namespace, reader: Namespace) -> tuple[bool, int] | None:
    """What one block of `stored` costs a rank of `reader`; None if the rank cannot use it.

    Returns:
        Whether the rank reads pieces of parts, which not every transport can verify; and the number
        of pieces.
    """
    if msgspec.structs.replace(stored, layout=reader.layout) != reader:
        return None
    try:
        plan = plan_read(stored.layout, reader.layout, 0)
    except (LayoutMismatch, CannotReshard):
        return None
    return not plan.is_whole, len(plan.lengths)

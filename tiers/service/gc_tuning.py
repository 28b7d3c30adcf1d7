"""Keeps Python's cyclic collector from stopping a node for seconds.

A full collection looks at every object that may be part of a cycle: 50 ms for 16,000 blocks,
    seconds for a million. Python starts one whenever a quarter of the objects is new. The store's
    objects are freed by reference counts, so objects that survived a moment are frozen
    (`gc.freeze`), and later collections skip them. A frozen cycle is never freed: objects that come
    and go in a node must not form cycles.
"""

from __future__ import annotations

import asyncio
import gc

EVERY_S = 0.5  # a collection looks at the new objects: ~5 ms at 30,000 blocks a second


def freeze_survivors() -> None:
    """Collect the garbage, and exclude the remaining objects from later collections."""
    gc.collect()
    gc.freeze()


async def keep_collections_short() -> None:
    """Freeze new objects now and then, until cancelled."""
    while True:
        freeze_survivors()
        await asyncio.sleep(EVERY_S)

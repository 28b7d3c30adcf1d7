"""The client: `Pool` (blocking) and `AsyncPool` (asyncio)."""

from kvpool.client.async_pool import AsyncPool, PinnedBlocks, PutResult
from kvpool.client.copies import PrefetchResult, ReplicateResult
from kvpool.client.pool import Pool
from kvpool.client.reading import GetResult

__all__ = [
    "AsyncPool",
    "GetResult",
    "PinnedBlocks",
    "Pool",
    "PrefetchResult",
    "PutResult",
    "ReplicateResult",
]

"""The client: `Pool` (blocking) and `AsyncPool` (asyncio)."""

from kvpool.client.async_pool import AsyncPool
from kvpool.client.buffers import BlockSpans
from kvpool.client.copies import PrefetchResult, ReplicateResult
from kvpool.client.pinning import PinnedBlocks
from kvpool.client.pool import Pool
from kvpool.client.reading import GetResult
from kvpool.client.writing import PutResult

__all__ = [
    "AsyncPool",
    "BlockSpans",
    "GetResult",
    "PinnedBlocks",
    "Pool",
    "PrefetchResult",
    "PutResult",
    "ReplicateResult",
]

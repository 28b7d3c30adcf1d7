"""The client: `Pool` (blocking) and `AsyncPool` (asyncio)."""

from kvpool.client.admin.replication import PrefetchResult, ReplicateResult
from kvpool.client.async_pool import AsyncPool
from kvpool.client.data.buffers import BlockSpans
from kvpool.client.data.pinning import PinnedBlocks
from kvpool.client.data.reading import GetResult
from kvpool.client.data.writing import PutResult
from kvpool.client.pool import Pool

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

"""The client: `Pool` (blocking) and `AsyncPool` (asyncio)."""

from kvpool.client.async_pool import AsyncPool, GetResult, PinnedBlocks, PutResult
from kvpool.client.pool import Pool

__all__ = ["AsyncPool", "GetResult", "PinnedBlocks", "Pool", "PutResult"]

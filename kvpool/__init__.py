"""kvpool: a KV-cache pool for LLM serving. This package has what engines and users import.

from kvpool import Layout, Namespace, Pool, hash_chain
"""

from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Layout, Namespace
from kvpool.blocks.resharding import TensorParallelRank
from kvpool.blocks.tier import Tier
from kvpool.client import AsyncPool, Pool
from kvpool.errors import KvpoolError
from kvpool.wire.credentials import Credentials

__version__ = "0.1.0"
__all__ = [
    "AsyncPool",
    "Credentials",
    "KvpoolError",
    "Layout",
    "Namespace",
    "Pool",
    "TensorParallelRank",
    "Tier",
    "__version__",
    "hash_chain",
]

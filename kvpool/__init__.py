"""kvpool: a KV-cache pool for LLM serving. What engines and users import.

from kvpool import Layout, Namespace, Pool, hash_chain
"""

from kvpool.client import AsyncPool, Pool
from kvpool.credentials import Credentials
from kvpool.errors import KvpoolError
from kvpool.hashing import hash_chain
from kvpool.layout import Layout, Namespace
from kvpool.resharding import TensorParallelRank

__version__ = "0.1.0"
__all__ = [
    "AsyncPool",
    "Credentials",
    "KvpoolError",
    "Layout",
    "Namespace",
    "Pool",
    "TensorParallelRank",
    "__version__",
    "hash_chain",
]

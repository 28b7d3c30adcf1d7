"""kvpool for SGLang: `KVPoolStorage`, a dynamic storage backend of HiCache (docs/sglang.md).

The backend is imported on first use, so that its settings can be read without SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.engines.sglang.storage import KVPoolStorage

__all__ = ["KVPoolStorage"]


def __getattr__(name: str) -> Any:
    if name != "KVPoolStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.engines.sglang.storage import KVPoolStorage

    return KVPoolStorage

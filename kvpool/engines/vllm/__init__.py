"""kvpool for vLLM: `KVPoolConnector`, for `--kv-transfer-config` (docs/vllm.md).

The connector is imported on first use, so that settings and metric names can be read without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.engines.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVPoolConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.engines.vllm.version import require_supported

    require_supported()
    from kvpool.engines.vllm.connector import KVPoolConnector

    return KVPoolConnector

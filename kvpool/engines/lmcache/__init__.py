"""LMCache backends: an L2 adapter (multi-process server) and a remote connector (in-process).

LMCache's configuration names this module. Each backend imports its part of LMCache only when it is
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.engines.lmcache.connector import KVPoolConnectorAdapter
    from kvpool.engines.lmcache.l2_adapter import KVPoolL2Adapter
    from kvpool.engines.lmcache.l2_config import KVPoolL2AdapterConfig

__all__ = ["KVPoolConnectorAdapter", "KVPoolL2Adapter", "KVPoolL2AdapterConfig"]

_MODULES = {
    "KVPoolConnectorAdapter": "connector",
    "KVPoolL2Adapter": "l2_adapter",
    "KVPoolL2AdapterConfig": "l2_config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

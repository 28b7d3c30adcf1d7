"""Convert wire structs to JSON values with field names, for people and for HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpool.blocks.tier import Tier


def named(value: Any) -> Any:
    """An array-like struct as a dict of its fields, recursively; bytes as hex, tiers by name."""
    if isinstance(value, msgspec.Struct):
        return {name: named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (list, tuple)):
        return [named(item) for item in value]
    if isinstance(value, dict):
        return {named(key): named(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Tier):
        return str(value)
    return value

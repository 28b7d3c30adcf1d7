"""Pool names of the multi-process server's keys, which do not contain their objects' layout.

A lookup gets the layouts, and a memory object has one; unlock and delete get only the key. So this
remembers the layouts seen for each model and object group: a handful each. Not thread-safe.
"""

from __future__ import annotations

from typing import Any

from kvpool.engines.lmcache.keys import Item, Keyspace, ObjectLayout


class ObjectNames:
    """Names `ObjectKey`s under the layouts seen so far."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self._layouts: dict[tuple[str, int], dict[ObjectLayout, None]] = {}  # in order of first use

    def item(self, key: Any, layout: ObjectLayout) -> Item:
        """The item of a key whose object has `layout`. Raises as `Keyspace.space`."""
        item = self._keys.server_item(key, layout)
        self._layouts.setdefault((key.model_name, key.object_group_id), {}).setdefault(layout)
        return item

    def last_layout(self, key: Any) -> ObjectLayout | None:
        """The newest layout of the key's model and group, for callers that give none."""
        known = self._layouts.get((key.model_name, key.object_group_id))
        return next(reversed(known)) if known else None

    def all_of(self, key: Any) -> list[Item]:
        """The key's items under every layout seen for its model and group."""
        layouts = self._layouts.get((key.model_name, key.object_group_id), ())
        return [self._keys.server_item(key, layout) for layout in layouts]

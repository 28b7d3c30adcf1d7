"""The objects that this server stored or loaded, with their full keys, for listing and usage.

The pool knows objects by hashes, which do not give a key back. The table is bounded: a forgotten
object is missing from lists, but stays in the pool. Threads may share it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvpool.engines.lmcache.keys import Item


class Entry(NamedTuple):
    """One object: LMCache's key, its name in the pool, and its size."""

    number: int  # ascending in order of addition; the cursor of a page
    key: Any
    item: Item
    size_bytes: int
    added_at: float  # monotonic seconds


class ObjectTable:
    """At most `limit` entries, by ident; forgets the oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._last = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, entries: Iterable[tuple[Any, Item, int]], now: float
    ) -> tuple[list[Entry], list[Entry]]:
        """Add (key, item, size) triples.

        Returns the new entries, and the entries forgotten for them.
        """
        new: list[Entry] = []
        old: list[Entry] = []
        with self._lock:
            for key, item, size_bytes in entries:
                if item.ident not in self._entries:
                    self._last += 1
                    entry = Entry(self._last, key, item, size_bytes, now)
                    self._entries[item.ident] = entry
                    new.append(entry)
            while len(self._entries) > self._limit:
                old.append(self._entries.popitem(last=False)[1])
        return new, old

    def remove(self, items: Iterable[Item], added_before: float = float("inf")) -> list[Entry]:
        """Forget entries added before `added_before`. Returns the entries removed."""
        removed: list[Entry] = []
        with self._lock:
            for item in items:
                entry = self._entries.get(item.ident)
                if entry is not None and entry.added_at < added_before:
                    removed.append(self._entries.pop(item.ident))
        return removed

    def page(self, after: int, count: int, model: str | None) -> Sequence[Entry]:
        """Up to `count` entries with numbers above `after`, in order; only of `model` if given."""
        page: list[Entry] = []
        with self._lock:
            for entry in self._entries.values():
                if entry.number > after and model in (None, entry.key.model_name):
                    page.append(entry)
                    if len(page) == count:
                        break
        return page

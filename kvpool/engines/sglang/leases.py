"""Leases from a look-up to the load that follows it. Bounded; callers pass the time.

SGLang looks up a chain, agrees with its other ranks on the length, finds room, and loads in
batches; or gives up without saying so. So a lease ends when all its pages were loaded, or when its
time is up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.client import PinnedBlocks


@dataclass(slots=True, eq=False)
class _Held:
    pinned: PinnedBlocks
    asked: tuple[bytes, ...]
    deadline: float
    left: set[bytes] = field(default_factory=set)  # pages not loaded yet and in no later lease


class LoadLeases:
    """Pages held for loads to come. Threads may share it.

    Args:
        release: ends a lease without waiting.
        lease_s: how long each lease is held.
        max_pages: most pages held at once.
    """

    def __init__(
        self, release: Callable[[PinnedBlocks], None], lease_s: float, max_pages: int
    ) -> None:
        self._release = release
        self._lease_s = lease_s
        self._max_pages = max_pages
        self._lock = threading.Lock()
        self._held: OrderedDict[int, _Held] = OrderedDict()  # oldest first
        self._by_page: dict[bytes, _Held] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def hold(self, asked: Sequence[bytes], pinned: PinnedBlocks, now: float) -> None:
        """Hold the lease on the pages found of `asked`.

        It replaces earlier leases of the same pages.
        """
        if not pinned.found:
            self._release(pinned)
            return
        with self._lock:
            held = _Held(pinned, tuple(asked), min(now + self._lease_s, pinned.deadline))
            for page in asked[: pinned.found]:
                self._drop_page(page)
                self._by_page[page] = held
                held.left.add(page)
            self._held[id(held)] = held
            while len(self._by_page) > self._max_pages:
                self._end(next(iter(self._held.values())))

    def holds(self, asked: Sequence[bytes], now: float) -> bool:
        """Whether one lease of exactly `asked` holds all of them, with half of its time left."""
        with self._lock:
            held = self._by_page.get(asked[0]) if asked else None
            return (
                held is not None
                and held.asked == tuple(asked)
                and len(held.left) == len(asked)
                and held.deadline - now > self._lease_s / 2
            )

    def loaded(self, pages: Sequence[bytes]) -> None:
        """Stop holding pages after a load of them, whether or not it succeeded."""
        with self._lock:
            for page in pages:
                self._drop_page(page)

    def expire(self, now: float) -> None:
        """End the leases whose time is up."""
        with self._lock:
            for held in [h for h in self._held.values() if h.deadline <= now]:
                self._end(held)

    def clear(self) -> None:
        """End all leases."""
        with self._lock:
            for held in list(self._held.values()):
                self._end(held)

    def _drop_page(self, page: bytes) -> None:
        held = self._by_page.pop(page, None)
        if held is not None:
            held.left.discard(page)
            if not held.left:
                self._end(held)

    def _end(self, held: _Held) -> None:
        if self._held.pop(id(held), None) is None:
            return
        for page in held.left:
            del self._by_page[page]
        held.left.clear()
        self._release(held.pinned)

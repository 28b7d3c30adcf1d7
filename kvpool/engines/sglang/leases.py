"""Leases from a look-up to the load that follows it, which may never come. Bounded; `now` is given.

SGLang looks up a chain, agrees with its other ranks on the length, finds room, and loads batch by batch; or gives
up, of which nobody is told. So a lease ends when all its pages were loaded, or after its time.
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
    left: set[bytes] = field(default_factory=set)  # not loaded yet, and held by no later lease


class LoadLeases:
    """Pages held for loads to come; safe to share between threads.

    Args:
        release: gives a lease back; must not wait.
        lease_s: how long each is held.
        max_pages: held at once.
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
        """Keep what was found of `asked`; earlier leases of the same pages are not needed any more."""
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
        """Whether all of `asked` are held by one lease of this very question, with half of its time left."""
        with self._lock:
            held = self._by_page.get(asked[0]) if asked else None
            return (
                held is not None
                and held.asked == tuple(asked)
                and len(held.left) == len(asked)
                and held.deadline - now > self._lease_s / 2
            )

    def loaded(self, pages: Sequence[bytes]) -> None:
        """These were loaded, or tried to be: nobody waits for them any more."""
        with self._lock:
            for page in pages:
                self._drop_page(page)

    def expire(self, now: float) -> None:
        """Let go what nobody has come for."""
        with self._lock:
            for held in [h for h in self._held.values() if h.deadline <= now]:
                self._end(held)

    def clear(self) -> None:
        """Let everything go."""
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

"""The pool blocks that one engine holds in its own memory, updated from its KV events. Pure.

Engines name pages by hashes of their own, but their events include the tokens, from which the
pool's prefix hashes are computed. A block may span several pages, or a page several blocks. Pages
with an unknown parent and pages above the memory bound count as absent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.kv_events.events import KvEvent, PageHash, PagesCleared, PagesRemoved, PagesStored
from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Namespace


class _Page:
    __slots__ = ("blocks", "digest", "parent", "tail")

    def __init__(self, parent: PageHash | None, digest: bytes | None, tail: np.ndarray) -> None:
        self.parent = parent
        self.digest = digest  # prefix hash of the last whole block up to the page's end
        self.tail = tail  # tokens after that block, fewer than a block's
        self.blocks: list[bytes] = []  # blocks of which the page holds a part


class EngineBlocks:
    """The pool blocks that one engine holds completely.

    Args:
        namespace: of the engine's model.
        max_pages: maximum number of pages. Further pages are ignored; `overflowed` counts them.
    """

    def __init__(self, namespace: Namespace, max_pages: int = 1_000_000) -> None:
        self.unknown_parents = 0
        self.overflowed = 0
        self._namespace = namespace
        self._max_pages = max_pages
        self._pages: dict[PageHash, _Page] = {}
        self._present: set[bytes] = set()

    def __len__(self) -> int:
        """The number of complete pool blocks."""
        return len(self._present)

    @property
    def pages(self) -> int:
        """The number of known pages."""
        return len(self._pages)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """The number of leading blocks of a chain that the engine has."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._present:
                break
            count += 1
        return count

    def apply(self, event: KvEvent) -> None:
        """Apply one event."""
        if isinstance(event, PagesCleared):
            self.clear()
        elif isinstance(event, PagesRemoved):
            for page_hash in event.pages:
                self._remove(page_hash)
        else:
            self._store(event)

    def clear(self) -> None:
        """Drop all pages and blocks."""
        self._pages.clear()
        self._present.clear()

    def _store(self, event: PagesStored) -> None:
        before = event.parent
        tokens = np.array(event.token_ids, dtype=np.uint32)
        for index, page_hash in enumerate(event.pages):
            start = index * event.page_tokens
            if not self._add(page_hash, before, tokens[start : start + event.page_tokens]):
                return
            before = page_hash

    def _add(self, page_hash: PageHash, before: PageHash | None, tokens: np.ndarray) -> bool:
        """Add one page; return False if the pages after it must be ignored."""
        if page_hash in self._pages:
            return True
        parent = self._pages.get(before) if before is not None else None
        if before is not None and parent is None:
            self.unknown_parents += 1
            return False
        if len(self._pages) >= self._max_pages:
            self.overflowed += 1
            return False
        pending = tokens if parent is None else np.concatenate((parent.tail, tokens))
        whole = hash_chain(
            self._namespace, pending, parent=parent.digest if parent is not None else None
        )
        step = self._namespace.layout.block_tokens
        digest = whole[-1] if whole else parent.digest if parent is not None else None
        page = self._pages[page_hash] = _Page(before, digest, pending[len(whole) * step :])
        page.blocks = list(whole)
        if whole and parent is not None and len(parent.tail):
            self._share(before, whole[0], len(parent.tail), len(tokens))
        self._present.update(whole)
        return True

    def _share(self, page_hash: PageHash | None, block: bytes, tokens: int, page: int) -> None:
        """Add a block to each earlier page with a part of it, so that their removal removes it."""
        while tokens > 0 and page_hash is not None:
            known = self._pages.get(page_hash)
            if known is None:
                return
            known.blocks.append(block)
            tokens -= page
            page_hash = known.parent

    def _remove(self, page_hash: PageHash) -> None:
        page = self._pages.pop(page_hash, None)
        if page is not None:
            self._present.difference_update(page.blocks)

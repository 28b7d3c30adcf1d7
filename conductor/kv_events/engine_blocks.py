"""What one engine instance holds in its own memory, as pool blocks: kept up from its KV events. Pure.

Engines name pages by hashes of their own, but say which tokens they cover; from these our prefix hashes follow. A
pool block may span several pages, or a page several blocks. Whatever is in doubt counts as absent: an event whose
parent is unknown, or anything past the memory bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.kv_events.events import Cleared, KvEvent, PageHash, Removed, Stored
from kvpool.blocks.hashing import hash_chain
from kvpool.blocks.layout import Namespace


class _Page:
    __slots__ = ("blocks", "digest", "parent", "tail")

    def __init__(self, parent: PageHash | None, digest: bytes | None, tail: np.ndarray) -> None:
        self.parent = parent
        self.digest = (
            digest  # our hash of the last whole block at the page's end; None: not one yet
        )
        self.tail = tail  # tokens after it, fewer than a block's
        self.blocks: list[bytes] = []  # that the page has a share in, whole or not


class EngineBlocks:
    """The pool blocks that stand whole in one engine.

    Args:
        namespace: of the engine's model.
        max_pages: bound of the memory; further pages are not learned (and counted).
    """

    def __init__(self, namespace: Namespace, max_pages: int = 1_000_000) -> None:
        self.unknown_parents = 0
        self.overflowed = 0
        self._namespace = namespace
        self._max_pages = max_pages
        self._pages: dict[PageHash, _Page] = {}
        self._present: set[bytes] = set()

    def __len__(self) -> int:
        """Whole pool blocks there."""
        return len(self._present)

    @property
    def pages(self) -> int:
        """Pages known."""
        return len(self._pages)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the engine has."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._present:
                break
            count += 1
        return count

    def apply(self, event: KvEvent) -> None:
        """Learn from one event."""
        if isinstance(event, Cleared):
            self.clear()
        elif isinstance(event, Removed):
            for page_hash in event.pages:
                self._remove(page_hash)
        else:
            self._store(event)

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self._present.clear()

    def _store(self, event: Stored) -> None:
        before = event.parent
        tokens = np.array(event.token_ids, dtype=np.uint32)
        for index, page_hash in enumerate(event.pages):
            start = index * event.page_tokens
            if not self._add(page_hash, before, tokens[start : start + event.page_tokens]):
                return
            before = page_hash

    def _add(self, page_hash: PageHash, before: PageHash | None, tokens: np.ndarray) -> bool:
        """Take in one page; False when what follows it cannot be placed."""
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
        """Note at each page that begins a block that its removal ends the block."""
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

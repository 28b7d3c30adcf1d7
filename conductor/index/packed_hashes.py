"""Hashes of one holding, packed closely: a set costs 27 to 53 bytes a hash, this costs 9.

It keeps no order and does not know what it contains: the caller tells apart what is in it. Removing only
notes the hash; the notes are worked off chunk by chunk, by `tidy`. Full chunks are tuples: Python's cyclic collector
looks at one of hashes once and never again, at a list in each full collection (30 ms a million hashes).
"""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 4096
MIN_NOTES = 1024

Chunk = list[bytes] | tuple[bytes, ...]


class PackedHashes:
    """A bag of hashes, each at most once as long as the caller keeps to the rules of `add` and `remove`."""

    __slots__ = ("_chunks", "_count", "_gone", "_leaving", "_next", "_untidy")

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []  # the last one may be open, a list
        self._count = 0
        self._gone: set[bytes] = set()  # removed, and still in a chunk
        self._leaving: set[bytes] = (
            set()
        )  # the same, of which chunks before `_untidy` are being freed
        self._next = 0  # the chunk to be tidied next
        self._untidy = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        """What is in it, for tests. O(size)."""
        for number, chunk in enumerate(self._chunks):
            left = self._gone | self._leaving if number < self._untidy else self._gone
            yield from (block_hash for block_hash in chunk if block_hash not in left)

    def add(self, block_hash: bytes) -> None:
        """Add a hash that is not in it."""
        self._count += 1
        if block_hash in self._gone:
            self._gone.remove(block_hash)
            return
        chunks = self._chunks
        # While chunks are tidied, what is added again must not be taken for what was removed before.
        last = chunks[-1] if chunks else ()
        if isinstance(last, tuple) or len(last) >= CHUNK or len(chunks) == self._untidy:
            if chunks:
                chunks[-1] = tuple(last)
            last = []
            chunks.append(last)
        last.append(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Remove a hash that is in it."""
        self._count -= 1
        self._gone.add(block_hash)

    @property
    def is_untidy(self) -> bool:
        """Whether `tidy` has something to do: an eighth of it or more has been removed."""
        return bool(self._leaving) or len(self._gone) > max(MIN_NOTES, self._count // 8)

    def tidy(self) -> int:
        """Free what was removed from one chunk; returns how many hashes that looked at."""
        if not self._leaving:
            self._leaving, self._gone = self._gone, set()
            self._next, self._untidy = 0, len(self._chunks)
        if self._next < self._untidy:
            chunk = self._chunks[self._next]
            leaving = self._leaving
            self._chunks[self._next] = tuple([h for h in chunk if h not in leaving])
            self._next += 1
            if self._next < self._untidy:
                return len(chunk)
        # Full circle: chunks that have become small are joined, which costs a pointer each.
        self._leaving, self._untidy = set(), 0
        self._join()
        return CHUNK

    def pop_some(self, most: int) -> list[bytes]:
        """Take out up to `most` hashes, removed ones that were still noted among them."""
        taken: list[bytes] = []
        while self._chunks and len(taken) < most:
            last = self._chunks[-1]
            room = most - len(taken)
            taken += last[-room:]
            left = last[:-room]
            if left:
                self._chunks[-1] = left
            else:
                self._chunks.pop()
        if not self._chunks:
            self._count = 0
            self._gone, self._leaving = set(), set()
        return taken

    @property
    def is_exhausted(self) -> bool:
        """Whether `pop_some` has nothing more to give."""
        return not self._chunks

    def _join(self) -> None:
        joined: list[Chunk] = []
        for chunk in self._chunks:
            if joined and len(joined[-1]) + len(chunk) <= CHUNK:
                joined[-1] = (*joined[-1], *chunk)
            elif chunk:
                joined.append(chunk)
        self._chunks = joined

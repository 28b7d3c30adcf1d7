"""A compact bag of the hashes of one holding: 9 bytes per hash, where a set takes 27 to 53.

It keeps no order and has no membership test; the caller knows which hashes are in it. `remove` only
notes the hash, and `tidy` frees noted hashes chunk by chunk. Full chunks are tuples, because
Python's cyclic collector visits a tuple of hashes once, and a list in each full collection (30 ms
per million hashes).
"""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 4096
MIN_NOTES = 1024

Chunk = list[bytes] | tuple[bytes, ...]


class PackedHashes:
    """A bag of hashes.

    Each is in it at most once if the caller obeys the rules of `add` and `remove`.
    """

    __slots__ = ("_chunks", "_count", "_gone", "_leaving", "_next", "_untidy")

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []  # the last one may be open, a list
        self._count = 0
        self._gone: set[bytes] = set()  # removed, and still in a chunk
        self._leaving: set[bytes] = set()  # removed before the present round of `tidy`
        self._next = 0  # chunk that `tidy` visits next
        self._untidy = 0  # number of chunks in the present round

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        """The hashes, for tests. O(size)."""
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
        # A hash that is added again during a round must not go into a chunk of that round: it would
        # be freed.
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
        """Whether `tidy` should run: an eighth or more of the hashes were removed."""
        return bool(self._leaving) or len(self._gone) > max(MIN_NOTES, self._count // 8)

    def tidy(self) -> int:
        """Free the removed hashes of one chunk; return how many hashes were visited."""
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
        # The round is over: join chunks that became small, at the cost of a pointer per hash.
        self._leaving, self._untidy = set(), 0
        self._join()
        return CHUNK

    def pop_some(self, most: int) -> list[bytes]:
        """Take out up to `most` hashes. They may include removed ones that `tidy` has not freed."""
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
        """Whether `pop_some` has taken everything."""
        return not self._chunks

    def _join(self) -> None:
        joined: list[Chunk] = []
        for chunk in self._chunks:
            if joined and len(joined[-1]) + len(chunk) <= CHUNK:
                joined[-1] = (*joined[-1], *chunk)
            elif chunk:
                joined.append(chunk)
        self._chunks = joined

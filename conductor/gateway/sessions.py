"""Which chain of blocks each conversation or agent had last, by the key that its requests carry. Soft state.

Bounded in sessions, in blocks and in age; the one that rested longest goes first. It is a memory of hashes,
no promise that the blocks still stand anywhere. Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.blocks.hashing import pack_hashes, unpack_hashes
from kvpool.errors import InvalidArgument


@dataclass(slots=True, frozen=True)
class _Session:
    hashes: bytes  # packed: 16 bytes a block
    seen_at: float

    @property
    def blocks(self) -> int:
        return len(self.hashes) // 16


class Sessions:
    """Chains by namespace and key; of one key, tenants and models know nothing of each other's.

    Args:
        ttl_s: how long a session that rests is remembered.
        max_sessions, max_blocks: bounds over all of them.

    Raises:
        InvalidArgument: a bound is not positive.
    """

    def __init__(
        self, ttl_s: float = 3600.0, max_sessions: int = 10_000, max_blocks: int = 2_000_000
    ) -> None:
        if min(ttl_s, max_sessions, max_blocks) <= 0:
            raise InvalidArgument("bounds of sessions must be positive")
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._sessions: OrderedDict[tuple[bytes, str], _Session] = OrderedDict()
        self._blocks = 0

    def note(self, namespace_id: bytes, key: str, hashes: Sequence[bytes], now: float) -> None:
        """A request with this key was served; its chain replaces the one before. No key, no session."""
        if not key:
            return
        self._drop((namespace_id, key))
        if hashes and len(hashes) <= self._max_blocks:
            self._sessions[namespace_id, key] = _Session(pack_hashes(hashes), now)
            self._blocks += len(hashes)
        while self._sessions:
            oldest, session = next(iter(self._sessions.items()))
            is_over = len(self) > self._max_sessions or self._blocks > self._max_blocks
            if not is_over and now - session.seen_at < self._ttl_s:
                break
            self._drop(oldest)

    def get(self, namespace_id: bytes, key: str, now: float) -> list[bytes]:
        """The chain of its last request; empty when there is none, or it is too long ago."""
        session = self._sessions.get((namespace_id, key))
        if session is None or now - session.seen_at >= self._ttl_s:
            return []
        return unpack_hashes(session.hashes)

    @property
    def blocks(self) -> int:
        """Blocks remembered, over all sessions."""
        return self._blocks

    def __len__(self) -> int:
        return len(self._sessions)

    def _drop(self, which: tuple[bytes, str]) -> None:
        session = self._sessions.pop(which, None)
        if session is not None:
            self._blocks -= session.blocks

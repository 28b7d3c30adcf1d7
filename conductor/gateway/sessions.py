"""The last chain of blocks of each conversation, by the key in its requests.

Pure; `now` is monotonic seconds.

The table is soft state, bounded in sessions, blocks and age; the session idle longest is dropped
first. It holds hashes only: the blocks themselves may be gone.
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
    """Chains by namespace and key, so that equal keys of two tenants or models stay apart.

    Args:
        ttl_s: time after which an idle session is dropped.
        max_sessions, max_blocks: bounds over all sessions.

    Raises:
        InvalidArgument: a bound is not positive.
    """

    def __init__(
        self, ttl_s: float = 3600.0, max_sessions: int = 10_000, max_blocks: int = 2_000_000
    ) -> None:
        if min(ttl_s, max_sessions, max_blocks) <= 0:
            raise InvalidArgument("ttl_s, max_sessions and max_blocks must be positive")
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._sessions: OrderedDict[tuple[bytes, str], _Session] = OrderedDict()
        self._blocks = 0

    def record(self, namespace_id: bytes, key: str, hashes: Sequence[bytes], now: float) -> None:
        """Replace the session's chain by that of a request that is being served.

        An empty key is no session.
        """
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
        """The chain of the session's last request; empty if there is none or it is too old."""
        session = self._sessions.get((namespace_id, key))
        if session is None or now - session.seen_at >= self._ttl_s:
            return []
        return unpack_hashes(session.hashes)

    @property
    def blocks(self) -> int:
        """The number of blocks over all sessions."""
        return self._blocks

    def __len__(self) -> int:
        return len(self._sessions)

    def _drop(self, which: tuple[bytes, str]) -> None:
        session = self._sessions.pop(which, None)
        if session is not None:
            self._blocks -= session.blocks

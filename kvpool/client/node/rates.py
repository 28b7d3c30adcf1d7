"""How fast bytes move between this process and one node, as measured. No clock of its own."""

from __future__ import annotations

FORGET = 0.95  # what an operation leaves of those before it
MIN_BYTES = 64 << 10  # less says how long a call takes, not how fast bytes go


class TransferRate:
    """One direction. Written by threads; a lost update costs one observation."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def note(self, size_bytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        self.total_bytes += size_bytes
        if size_bytes >= MIN_BYTES and seconds > 0:
            self._bytes = FORGET * self._bytes + size_bytes
            self._seconds = FORGET * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        """Of the last few operations; 0 while unknown."""
        return self._bytes / self._seconds if self._seconds else 0.0

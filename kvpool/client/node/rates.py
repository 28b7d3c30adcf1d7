"""Measured transfer speed between this process and one node. It takes no clock of its own."""

from __future__ import annotations

DECAY = 0.95  # weight that earlier operations keep when one is added
MIN_BYTES = 64 << 10  # a smaller transfer measures the duration of a call, not the speed of bytes


class TransferRate:
    """Speed in one direction.

    Threads write it without a lock; a lost update costs one observation.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def record(self, size_bytes: int, seconds: float) -> None:
        """Record that a transfer of `size_bytes` took `seconds`."""
        self.total_bytes += size_bytes
        if size_bytes >= MIN_BYTES and seconds > 0:
            self._bytes = DECAY * self._bytes + size_bytes
            self._seconds = DECAY * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second over the last few operations; 0 while unknown."""
        return self._bytes / self._seconds if self._seconds else 0.0

"""What is known of one request while a worker serves it: the phases' times, and where its tokens came from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.wire import messages as m
from workers.engine import SequenceState


@dataclass(slots=True)
class Progress:
    """Filled in step by step; times in seconds."""

    phases: dict[str, float] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    pool_tokens: int = 0
    local_tokens: int = 0
    verified_blocks: int = 0
    fallback_reason: str = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started

    def report(self, finish_reason: str, sequence: SequenceState) -> m.GenerateReply:
        """What ends a stream, or goes along with its first token."""
        return m.GenerateReply(
            finish_reason,
            self.pool_tokens,
            self.local_tokens,
            sequence.computed_tokens,
            self.fallback_reason,
            self.phases,
            self.bytes_read,
            self.verified_blocks,
            self.bytes_written,
        )

"""What is known of one request while a worker serves it: the phases' times, and where its tokens came from."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.blocks.tier import Tier
from kvpool.wire import messages as m
from workers.engine.contract import SequenceState


@dataclass(slots=True)
class Progress:
    """Filled in step by step; times in seconds."""

    phases: dict[str, float] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    pool_tokens: int = 0
    local_tokens: int = 0
    verified_blocks: int = 0
    tiers: tuple[Tier, ...] = ()  # one a block read: where it stood
    fallback_reason: str = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add to phase `name`."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    def tokens_by_tier(self, block_tokens: int) -> dict[str, int]:
        """The tokens reused, by where they stood: a tier of the pool, or the engine itself."""
        if self.local_tokens:
            return {"engine": self.local_tokens}
        tokens: Counter[str] = Counter()
        for index, tier in enumerate(self.tiers):
            tokens[str(tier)] += min(block_tokens, self.pool_tokens - index * block_tokens)
        return {tier: count for tier, count in tokens.items() if count > 0}

    def report(
        self, finish_reason: str, sequence: SequenceState, block_tokens: int
    ) -> m.GenerateReply:
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
            self.tokens_by_tier(block_tokens),
        )

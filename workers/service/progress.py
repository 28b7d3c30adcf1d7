"""One request on a worker: the time of each phase, and where its tokens came from."""

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
    tiers: tuple[Tier, ...] = ()  # for each block read, the tier that held it
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
        """Reused tokens by source: a tier of the pool, or "engine"."""
        if self.local_tokens:
            return {"engine": self.local_tokens}
        tokens: Counter[str] = Counter()
        for index, tier in enumerate(self.tiers):
            tokens[str(tier)] += min(block_tokens, self.pool_tokens - index * block_tokens)
        return {tier: count for tier, count in tokens.items() if count > 0}

    def report(
        self, finish_reason: str, sequence: SequenceState, block_tokens: int
    ) -> m.GenerateReply:
        """The message that ends a stream; an early one comes with the first token."""
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

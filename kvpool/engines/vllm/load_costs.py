"""Predicts whether to load or to recompute, from speeds measured while serving.

Callers pass the times.
"""

from __future__ import annotations

from kvpool.smoothing import smoothed

# Steps with fewer tokens measure decoding, and loads of fewer bytes measure the call.
MIN_STEP_TOKENS = 64
MIN_LOAD_BYTES = 1 << 20


class LoadCosts:
    """The speeds of computing and of loading, smoothed.

    Args:
        tokens_per_s: speed of computing; 0: measure it.
    """

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self._is_set = tokens_per_s > 0
        self.tokens_per_s = tokens_per_s
        self.bytes_per_s = 0.0

    def record_step(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` took `seconds` from its scheduling to its output."""
        if not self._is_set and tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.tokens_per_s = smoothed(self.tokens_per_s, tokens / seconds)

    def record_load(self, size: int, seconds: float) -> None:
        """Record that a load of `size` bytes took `seconds`."""
        if size >= MIN_LOAD_BYTES and seconds > 0:
            self.bytes_per_s = smoothed(self.bytes_per_s, size / seconds)

    def worth_s(self, tokens: int, size: int, limit_s: float) -> float:
        """The longest wait before a load that is still faster than computing.

        Args:
            tokens, size: what the load brings, in tokens and bytes.
            limit_s: upper bound of the result; the result while a speed is unknown.

        Returns:
            Seconds. 0 or less if computing is faster than the load itself.
        """
        if not self.tokens_per_s:
            return limit_s
        load_s = size / self.bytes_per_s if self.bytes_per_s else 0.0
        return min(limit_s, tokens / self.tokens_per_s - load_s)

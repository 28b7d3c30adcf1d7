"""Load or recompute: what computing tokens and loading bytes takes here, as measured while serving.

Pure: times are arguments.
"""

from __future__ import annotations

from kvpool.smoothing import smoothed

# Steps with fewer tokens say what decoding takes, and loads of fewer bytes what a call takes.
MIN_STEP_TOKENS = 64
MIN_LOAD_BYTES = 1 << 20


class LoadCosts:
    """Both rates, smoothed.

    Args:
        tokens_per_s: what is set; 0: measured.
    """

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self._is_set = tokens_per_s > 0
        self.tokens_per_s = tokens_per_s
        self.bytes_per_s = 0.0

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` and took so long from its scheduling to its output."""
        if not self._is_set and tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.tokens_per_s = smoothed(self.tokens_per_s, tokens / seconds)

    def note_load(self, size: int, seconds: float) -> None:
        """A load of `size` bytes took so long."""
        if size >= MIN_LOAD_BYTES and seconds > 0:
            self.bytes_per_s = smoothed(self.bytes_per_s, size / seconds)

    def worth_s(self, tokens: int, size: int, limit_s: float) -> float:
        """How long a request may wait before its load begins, so that it still beats computing.

        Args:
            tokens, size: that the load would bring.
            limit_s: at most; also what is allowed while a rate is not known.

        Returns:
            Seconds; 0 or less: computing is as fast as the load alone.
        """
        if not self.tokens_per_s:
            return limit_s
        load_s = size / self.bytes_per_s if self.bytes_per_s else 0.0
        return min(limit_s, tokens / self.tokens_per_s - load_s)

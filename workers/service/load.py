"""A worker's load and measured speed, which each heartbeat reports to the scheduler."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.errors import Overloaded
from kvpool.smoothing import smoothed
from kvpool.wire import messages as m


@dataclass(slots=True)
class Rates:
    """Speeds measured on this worker, exponentially smoothed; 0 until known."""

    prefill_tokens_per_s: float = 0.0
    tpot_s: float = 0.0
    fetch_bytes_per_s: float = 0.0

    def update(self, name: str, value: float) -> None:
        """Take one more measurement into account."""
        setattr(self, name, smoothed(getattr(self, name), value))


@dataclass(slots=True, eq=False)
class RequestLoad:
    """What one running request demands of the engine now."""

    queued_prefill_tokens: int
    is_decoding: bool = False
    context_tokens: int = 0  # while it decodes

    def prefill_ended(self) -> None:
        """The whole prompt is computed."""
        self.queued_prefill_tokens = 0

    def decode_began(self, context_tokens: int) -> None:
        """Decoding began with so many tokens of context; each call of `decoded` adds one."""
        self.is_decoding = True
        self.context_tokens = context_tokens

    def decoded(self) -> None:
        """Count one more token of context."""
        self.context_tokens += 1


class Load:
    """The running requests.

    Args:
        max_concurrent: the most that may run at once; more are refused.
        counters: counts "requests" and "refused".
    """

    def __init__(self, max_concurrent: int, counters: Counter[str]) -> None:
        self.rates = Rates()
        self._counters = counters
        self._max_concurrent = max_concurrent
        self._admitted: set[RequestLoad] = set()

    @contextlib.contextmanager
    def admitted(self, prompt_tokens: int) -> Iterator[RequestLoad]:
        """Count a request while the block runs.

        Raises:
            Overloaded: too many requests are running.
        """
        if len(self._admitted) >= self._max_concurrent:
            self._counters["refused"] += 1
            raise Overloaded(
                f"this worker already runs {len(self._admitted)} requests", retry_after_s=1.0
            )
        self._counters["requests"] += 1
        request_load = RequestLoad(prompt_tokens)
        self._admitted.add(request_load)
        try:
            yield request_load
        finally:
            self._admitted.discard(request_load)

    def report(self) -> m.WorkerLoad:
        """The load, for a heartbeat."""
        decoding = [each for each in self._admitted if each.is_decoding]
        return m.WorkerLoad(
            len(self._admitted),
            sum(each.queued_prefill_tokens for each in self._admitted),
            len(decoding),
            sum(each.context_tokens for each in decoding),
            self.rates.prefill_tokens_per_s,
            self.rates.tpot_s,
            self.rates.fetch_bytes_per_s,
            self._max_concurrent,
        )

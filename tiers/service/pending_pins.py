"""Pins of runs that stand in part on a slow tier only: wait for their promotion, or say at once that it takes too long.

The disk may be slower than computing the blocks again, so the caller says how long a hit may take. What is
predicted to take longer is declined before anything is moved; the blocks before it are leased.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import messages as m
from tiers.service.migrator import Migrator
from tiers.store.store import Cold, PinResult, Store

PROMOTING = "promoting"  # the store's reason for a pin that needs moves first
PROMOTION_TIMEOUT_S = 5.0  # for callers who do not say how long they can wait
DISK_FAILED = "disk_failed"
UNKNOWN_S = -1.0
PROBE_BLOCKS = 4  # promoted to learn the speed of a disk that nobody has read from yet
PROBE_AFTER_S = 10.0  # without a read; else a disk found slow once would be declined for ever


@dataclass(slots=True, frozen=True)
class WaitLimit:
    """How long a caller waits. `reason`: why what takes longer than `until` (monotonic seconds) is declined."""

    until: float
    reason: str  # "" when nothing is declined beforehand

    @classmethod
    def of(cls, request: m.Pin, now: float) -> WaitLimit:
        """What a request says.

        Raises:
            InvalidArgument: a time is negative or no number.
        """
        cost_s, time_s = request.max_wait_s, request.timeout_s
        if not (cost_s >= 0 and time_s >= 0):
            raise InvalidArgument(f"max_wait_s={cost_s}, timeout_s={time_s}", hint="0 is no limit")
        if cost_s and (cost_s <= time_s or not time_s):
            return cls(now + cost_s, m.DECLINED_COST)
        if time_s:
            return cls(now + time_s, m.DECLINED_DEADLINE)
        return cls(now + PROMOTION_TIMEOUT_S, "")


@dataclass(slots=True, frozen=True)
class TimedPin:
    """A pin's result, with what the wait was predicted to be (-1: unknown) and what it was, in seconds."""

    result: PinResult
    wait_s: float
    waited_s: float


@dataclass(slots=True, frozen=True)
class _PendingPin:
    request: m.Pin
    hashes: list[bytes]
    client_id: str
    limit: WaitLimit
    started: float
    wait_s: float
    tiers: list[Tier]  # where the leading blocks stood when it was asked


class PendingPins:
    """Answers pins for which the store alone says "promoting".

    Args:
        counters: where misses are counted, by reason.
    """

    def __init__(
        self,
        store: Store,
        migrator: Migrator,
        counters: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._migrator = migrator
        self._counters = counters
        self._clock = clock

    def pin(
        self, request: m.Pin, hashes: list[bytes], client_id: str
    ) -> TimedPin | Callable[[], Awaitable[TimedPin]]:
        """Answers at once where nothing is to be waited for, be it that the rest is declined.

        Else what must be read has been begun, and what is returned waits for it.

        Raises:
            InvalidArgument: see `WaitLimit.of`.
        """
        now = self._clock()
        limit = WaitLimit.of(request, now)
        tiers = self._store.lookup(request.namespace_id, hashes)
        wait_s = self.disk_wait_s(request.namespace_id, hashes, tiers)
        pending = _PendingPin(request, hashes, client_id, limit, now, wait_s, tiers)
        # Begun now: the client may be gone before the coroutine has its first turn, or any.
        return self._advance(pending) or partial(self._wait, pending)

    def ready(self, request: m.Pin, hashes: list[bytes], client_id: str, reason: str) -> PinResult:
        """Lease what leads the run and stands in DRAM; `reason` is why the rest of it does not come."""
        result = self._lease(request, hashes, client_id, "lease")
        if result.miss_reason != PROMOTING:
            return result
        self._counters[f"miss:{reason}"] += 1
        return replace(result, miss_reason=reason)

    def disk_wait_s(
        self, namespace_id: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier]
    ) -> float:
        """Seconds until the leading run can be read; 0 if none of it is on NVMe alone, -1 while unknown.

        Args:
            tiers: where each block of the run is, from `Store.lookup`.
        """
        if Tier.NVME not in tiers:
            return 0.0
        waits = self._migrator.disk_waits(namespace_id, hashes, tiers)
        return waits[-1] if waits else UNKNOWN_S

    # ------------------------------------------------------------ within

    async def _wait(self, pending: _PendingPin) -> TimedPin:
        # Any number of rounds: others promote the same run, or evict of it, beside this pin.
        request = pending.request
        while (left_s := pending.limit.until - self._clock()) > 0:
            await self._migrator.wait_for_run(request.namespace_id, pending.hashes, left_s)
            answer = self._advance(pending)
            if answer is not None:
                return answer
        reason = PROMOTING
        if pending.limit.reason == m.DECLINED_COST:
            reason = pending.limit.reason  # dearer than predicted, or nothing could be predicted
        return self._timed(pending, self.ready(request, pending.hashes, pending.client_id, reason))

    def _advance(self, pending: _PendingPin) -> TimedPin | None:
        """Lease the run as far as it is worth waiting for, or begin what that still needs."""
        request, hashes, reason = pending.request, pending.hashes, pending.limit.reason
        tiers = self._store.lookup(request.namespace_id, hashes)
        if Tier.NVME in tiers and not self._migrator.can_promote:
            count, reason = tiers.index(Tier.NVME), DISK_FAILED
        else:
            count = self._worthwhile(pending, tiers)
            if count == len(tiers):
                count = len(hashes)  # the store says why the rest is not here
        result = self._lease(request, hashes[:count], pending.client_id)
        if result.miss_reason == PROMOTING:
            self._migrator.begin(result.promote)
            return None
        if result.found == count < len(hashes):
            if reason != DISK_FAILED:
                self._probe_if_idle(request.namespace_id, hashes[: count + 1])
            result = self._declined(result, len(hashes), reason)
        return self._timed(pending, result)

    def _worthwhile(self, pending: _PendingPin, tiers: Sequence[Tier]) -> int:
        """How many leading blocks can be read within the caller's limit, as far as is known."""
        limit = pending.limit
        if not limit.reason:
            return len(tiers)
        waits = self._migrator.disk_waits(pending.request.namespace_id, pending.hashes, tiers)
        if waits is None:
            return min(len(tiers), tiers.index(Tier.NVME) + PROBE_BLOCKS)
        left_s = max(0.0, limit.until - self._clock())
        return bisect.bisect_right(waits, left_s)

    def _probe_if_idle(self, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """Read one declined block all the same, now and then: the disk may be faster by now."""
        now = self._clock()
        if (
            self._migrator.queued_read_bytes
            or self._migrator.read_speed.idle_s(now) < PROBE_AFTER_S
        ):
            return
        moves, _ = self._store.promote(namespace_id, hashes, now)
        self._migrator.begin(moves)
        self._counters["disk_probes"] += 1

    def _lease(
        self,
        request: m.Pin,
        hashes: Sequence[bytes],
        client_id: str,
        cold: Cold = "promote",
    ) -> PinResult:
        return self._store.pin(
            request.namespace_id,
            hashes,
            client_id,
            request.ttl_s,
            self._clock(),
            request.parts or None,
            request.tier_preference,
            cold=cold,
        )

    def _declined(self, result: PinResult, asked: int, reason: str) -> PinResult:
        self._counters["misses"] += asked - result.found
        self._counters[f"miss:{reason}"] += 1
        return replace(result, miss_reason=reason)

    def _timed(self, pending: _PendingPin, result: PinResult) -> TimedPin:
        before = pending.tiers
        if Tier.NVME in before:  # it was found there, wherever it stands by now
            found = [
                Tier.NVME if b == Tier.NVME else t
                for b, t in zip(before, result.tiers, strict=False)
            ]
            result = replace(result, tiers=found + result.tiers[len(found) :])
        return TimedPin(result, pending.wait_s, self._clock() - pending.started)

"""Pins of runs with blocks on NVMe alone: wait for their promotion, or decline what takes too long.

The disk may be slower than computing the blocks again, so the caller says how long a hit may take.
Blocks that are predicted to take longer are declined before anything is moved; the blocks before
them are leased.
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
from tiers.store.store import PROMOTING, PinResult, Store

PROMOTION_TIMEOUT_S = 5.0  # for callers who do not say how long they can wait
DISK_FAILED = "disk_failed"
UNKNOWN_S = -1.0
PROBE_BLOCKS = 4  # promoted to measure a disk that was not read yet
PROBE_AFTER_S = 10.0  # without a read; else one slow measurement would decline the disk for ever


@dataclass(slots=True, frozen=True)
class WaitLimit:
    """How long a caller waits."""

    until: float  # monotonic seconds
    reason: str  # why blocks that take longer are declined; "": none are declined beforehand

    @classmethod
    def of(cls, request: m.Pin, now: float) -> WaitLimit:
        """The limit in a request.

        Raises:
            InvalidArgument: a time is negative or not a number.
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
    """A pin's result with its predicted and its measured wait."""

    result: PinResult
    wait_s: float  # -1: unknown
    waited_s: float


@dataclass(slots=True, frozen=True)
class _PendingPin:
    request: m.Pin
    hashes: list[bytes]
    client_id: str
    limit: WaitLimit
    started: float
    wait_s: float
    tiers: list[Tier]  # of the leading blocks when the request came


class PendingPins:
    """Serves pins for which the store's result is "promoting".

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
        """Returns the result at once if nothing must be waited for.

        Otherwise the promotions have begun, and the returned callable waits for them.

        Raises:
            InvalidArgument: a time in the request is negative or not a number.
        """
        now = self._clock()
        limit = WaitLimit.of(request, now)
        tiers = self._store.lookup(request.namespace_id, hashes)
        wait_s = self.disk_wait_s(request.namespace_id, hashes, tiers)
        pending = _PendingPin(request, hashes, client_id, limit, now, wait_s, tiers)
        # Promotions begin now: the client may leave before the coroutine first runs.
        return self._advance(pending) or partial(self._wait, pending)

    def ready(self, request: m.Pin, hashes: list[bytes], client_id: str, reason: str) -> PinResult:
        """Lease the leading blocks that are in DRAM; `reason` says why the others are missing."""
        result = self._lease(self._store.pin_until_cold, request, hashes, client_id)
        if result.miss_reason != PROMOTING:
            return result
        self._counters[f"miss:{reason}"] += 1
        return replace(result, miss_reason=reason)

    def disk_wait_s(
        self, namespace_id: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier]
    ) -> float:
        """Seconds until the leading run can be read.

        Args:
            tiers: the tier of each block of the run, from `Store.lookup`.

        Returns:
            0 if no block is on NVMe alone; -1 while the disk's speed is unknown.
        """
        if Tier.NVME not in tiers:
            return 0.0
        waits = self._migrator.disk_waits(namespace_id, hashes, tiers)
        return waits[-1] if waits else UNKNOWN_S

    # ------------------------------------------------------------ within

    async def _wait(self, pending: _PendingPin) -> TimedPin:
        # Any number of rounds: other requests promote or evict blocks of the run meanwhile.
        request = pending.request
        while (left_s := pending.limit.until - self._clock()) > 0:
            await self._migrator.wait_for_run(request.namespace_id, pending.hashes, left_s)
            answer = self._advance(pending)
            if answer is not None:
                return answer
        reason = PROMOTING
        if pending.limit.reason == m.DECLINED_COST:
            reason = pending.limit.reason  # slower than predicted, or no prediction was possible
        return self._timed(pending, self.ready(request, pending.hashes, pending.client_id, reason))

    def _advance(self, pending: _PendingPin) -> TimedPin | None:
        """Lease the part of the run that is worth waiting for, or begin its promotions."""
        request, hashes, reason = pending.request, pending.hashes, pending.limit.reason
        tiers = self._store.lookup(request.namespace_id, hashes)
        if Tier.NVME in tiers and not self._migrator.can_promote:
            count, reason = tiers.index(Tier.NVME), DISK_FAILED
        else:
            count = self._worthwhile(pending, tiers)
            if count == len(tiers):
                count = len(hashes)  # so that the store gives the reason of the miss
        result = self._lease(self._store.pin, request, hashes[:count], pending.client_id)
        if result.miss_reason == PROMOTING:
            self._migrator.begin(result.promote)
            return None
        if result.found == count < len(hashes):
            if reason != DISK_FAILED:
                self._probe_if_idle(request.namespace_id, hashes[: count + 1])
            result = self._declined(result, len(hashes), reason)
        return self._timed(pending, result)

    def _worthwhile(self, pending: _PendingPin, tiers: Sequence[Tier]) -> int:
        """How many leading blocks can be read within the caller's limit."""
        limit = pending.limit
        if not limit.reason:
            return len(tiers)
        waits = self._migrator.disk_waits(pending.request.namespace_id, pending.hashes, tiers)
        if waits is None:
            return min(len(tiers), tiers.index(Tier.NVME) + PROBE_BLOCKS)
        left_s = max(0.0, limit.until - self._clock())
        return bisect.bisect_right(waits, left_s)

    def _probe_if_idle(self, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """Now and then read one declined block anyway: the disk may have become faster."""
        now = self._clock()
        if (
            self._migrator.queued_read_bytes
            or self._migrator.read_speed.idle_s(now) < PROBE_AFTER_S
        ):
            return
        migrations, _ = self._store.promote(namespace_id, hashes, now)
        self._migrator.begin(migrations)
        self._counters["disk_probes"] += 1

    def _lease(
        self,
        pin: Callable[..., PinResult],
        request: m.Pin,
        hashes: Sequence[bytes],
        client_id: str,
    ) -> PinResult:
        """Pin with one of the store's verbs."""
        return pin(
            request.namespace_id,
            hashes,
            client_id,
            request.ttl_s,
            self._clock(),
            request.parts or None,
            request.tier_preference,
        )

    def _declined(self, result: PinResult, asked: int, reason: str) -> PinResult:
        self._counters["misses"] += asked - result.found
        self._counters[f"miss:{reason}"] += 1
        return replace(result, miss_reason=reason)

    def _timed(self, pending: _PendingPin, result: PinResult) -> TimedPin:
        before = pending.tiers
        if Tier.NVME in before:  # report the tiers from before the promotion
            found = [
                Tier.NVME if b == Tier.NVME else t
                for b, t in zip(before, result.tiers, strict=False)
            ]
            result = replace(result, tiers=found + result.tiers[len(found) :])
        return TimedPin(result, pending.wait_s, self._clock() - pending.started)

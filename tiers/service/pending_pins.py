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
from tiers.service.migrator import Mover
from tiers.store.store import Cold, PinResult, Store

PROMOTING = "promoting"  # the store's reason for a pin that needs moves first
PROMOTION_TIMEOUT_S = 5.0  # for callers who do not say how long they can wait
DISK_FAILED = "disk_failed"
UNKNOWN_S = -1.0
PROBE_BLOCKS = 4  # promoted to learn the speed of a disk that nobody has read from yet
PROBE_AFTER_S = 10.0  # without a read; else a disk found slow once would be declined for ever


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a caller waits. `reason`: why what takes longer than `until` (monotonic seconds) is declined."""

    until: float
    reason: str  # "" when nothing is declined beforehand

    @classmethod
    def of(cls, request: m.Pin, now: float) -> Patience:
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
class ColdAnswer:
    """A pin's result, with what the wait was predicted to be (-1: unknown) and what it was, in seconds."""

    result: PinResult
    wait_s: float
    waited_s: float


@dataclass(slots=True, frozen=True)
class _Call:
    request: m.Pin
    hashes: list[bytes]
    client_id: str
    patience: Patience
    began: float
    wait_s: float
    tiers: list[Tier]  # where the leading blocks stood when it was asked


class ColdPins:
    """Answers pins for which the store alone says "promoting".

    Args:
        counters: where misses are counted, by reason.
    """

    def __init__(
        self,
        store: Store,
        mover: Mover,
        counters: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._mover = mover
        self._counters = counters
        self._clock = clock

    def pin(
        self, request: m.Pin, hashes: list[bytes], client_id: str
    ) -> ColdAnswer | Callable[[], Awaitable[ColdAnswer]]:
        """Answers at once where nothing is to be waited for, be it that the rest is declined.

        Else what must be read has been begun, and what is returned waits for it.

        Raises:
            InvalidArgument: see `Patience.of`.
        """
        now = self._clock()
        patience = Patience.of(request, now)
        tiers = self._store.lookup(request.namespace_id, hashes)
        wait_s = self._wait_of(request.namespace_id, hashes, tiers)
        call = _Call(request, hashes, client_id, patience, now, wait_s, tiers)
        # Begun now: the client may be gone before the coroutine has its first turn, or any.
        return self._advance(call) or partial(self._wait, call)

    def ready(self, request: m.Pin, hashes: list[bytes], client_id: str, reason: str) -> PinResult:
        """Lease what leads the run and stands in DRAM; `reason` is why the rest of it does not come."""
        result = self._lease(request, hashes, client_id, "lease")
        if result.miss_reason != PROMOTING:
            return result
        self._counters[f"miss:{reason}"] += 1
        return replace(result, miss_reason=reason)

    def wait_s(self, namespace_id: bytes, hashes: Sequence[bytes]) -> float:
        """Until all that leads the run could be read; 0 when it stands in DRAM, -1 while unknown.

        Raises:
            UnknownNamespace, InvalidArgument: too many hashes.
        """
        return self._wait_of(namespace_id, hashes, self._store.lookup(namespace_id, hashes))

    # ------------------------------------------------------------ within

    def _wait_of(
        self, namespace_id: bytes, hashes: Sequence[bytes], tiers: Sequence[Tier]
    ) -> float:
        if Tier.NVME not in tiers:
            return 0.0
        waits = self._mover.waits(namespace_id, hashes, tiers)
        return waits[-1] if waits else UNKNOWN_S

    async def _wait(self, call: _Call) -> ColdAnswer:
        # Any number of rounds: others promote the same run, or evict of it, beside this call.
        request = call.request
        while (left_s := call.patience.until - self._clock()) > 0:
            await self._mover.wait_for_run(request.namespace_id, call.hashes, left_s)
            answer = self._advance(call)
            if answer is not None:
                return answer
        reason = PROMOTING
        if call.patience.reason == m.DECLINED_COST:
            reason = call.patience.reason  # dearer than predicted, or nothing could be predicted
        return self._answer(call, self.ready(request, call.hashes, call.client_id, reason))

    def _advance(self, call: _Call) -> ColdAnswer | None:
        """Lease the run as far as it is worth waiting for, or begin what that still needs."""
        request, hashes, reason = call.request, call.hashes, call.patience.reason
        tiers = self._store.lookup(request.namespace_id, hashes)
        if Tier.NVME in tiers and not self._mover.can_promote:
            count, reason = tiers.index(Tier.NVME), DISK_FAILED
        else:
            count = self._worthwhile(call, tiers)
            if count == len(tiers):
                count = len(hashes)  # the store says why the rest is not here
        result = self._lease(request, hashes[:count], call.client_id)
        if result.miss_reason == PROMOTING:
            self._mover.begin(result.promote)
            return None
        if result.found == count < len(hashes):
            if reason != DISK_FAILED:
                self._probe_if_idle(request.namespace_id, hashes[: count + 1])
            result = self._declined(result, len(hashes), reason)
        return self._answer(call, result)

    def _worthwhile(self, call: _Call, tiers: Sequence[Tier]) -> int:
        """How many leading blocks can be read within the caller's patience, as far as is known."""
        patience = call.patience
        if not patience.reason:
            return len(tiers)
        waits = self._mover.waits(call.request.namespace_id, call.hashes, tiers)
        if waits is None:
            return min(len(tiers), tiers.index(Tier.NVME) + PROBE_BLOCKS)
        left_s = max(0.0, patience.until - self._clock())
        return bisect.bisect_right(waits, left_s)

    def _probe_if_idle(self, namespace_id: bytes, hashes: Sequence[bytes]) -> None:
        """Read one declined block all the same, now and then: the disk may be faster by now."""
        now = self._clock()
        if self._mover.queued_read_bytes or self._mover.read_speed.idle_s(now) < PROBE_AFTER_S:
            return
        moves, _ = self._store.promote(namespace_id, hashes, now)
        self._mover.begin(moves)
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

    def _answer(self, call: _Call, result: PinResult) -> ColdAnswer:
        before = call.tiers
        if Tier.NVME in before:  # it was found there, wherever it stands by now
            found = [
                Tier.NVME if b == Tier.NVME else t
                for b, t in zip(before, result.tiers, strict=False)
            ]
            result = replace(result, tiers=found + result.tiers[len(found) :])
        return ColdAnswer(result, call.wait_s, self._clock() - call.began)

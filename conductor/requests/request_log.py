"""The last requests with their decisions and measured outcomes, for `kvpool explain`.

`now` is monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from conductor.requests.miss_reasons import Miss
from conductor.scheduling.decision import Decision
from kvpool.bounded import BoundedDict


@dataclass(slots=True, frozen=True)
class RequestOutcome:
    """What was measured of a request, beside what was predicted."""

    status: str  # "ok", "failed", "cancelled", "refused"
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    output_tokens: int = 0
    pool_tokens: int = 0
    computed_tokens: int = 0
    fallback_reason: str = ""
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    misses: tuple[Miss, ...] = ()  # why blocks were not reused
    ttft_error_ratio: float = 0.0  # predicted over measured; 0 when there is nothing to compare
    tpot_error_ratio: float = 0.0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)  # reused for the prompt


@dataclass(slots=True)
class RequestRecord:
    """A decision, when it was taken, whose request it was, and its outcome once known.

    `found_blocks`: leading blocks of the prompt that the pool had then.
    """

    decision: Decision
    decided_at: float
    outcome: RequestOutcome | None = None
    tenant: str = ""
    at_unix_s: float = 0.0
    namespace: str = ""
    priority: str = ""
    routing: str = ""
    found_blocks: int = 0
    block_tokens: int = 0


class RequestLog:
    """The last `capacity` decisions, for `kvpool explain`.

    Raises:
        InvalidArgument: the capacity is not positive.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._records: BoundedDict[str, RequestRecord] = BoundedDict(capacity)

    def decided(self, decision: Decision, now: float, tenant: str = "") -> RequestRecord:
        """Remember a decision; a second one for the same request replaces the first."""
        record = RequestRecord(decision, now, tenant=tenant)
        self._records[decision.request_id] = record
        return record

    def ended(self, request_id: str, outcome: RequestOutcome) -> RequestRecord | None:
        """Add what was measured. None when the record was already dropped."""
        record = self._records.get(request_id)
        if record is not None:
            record.outcome = outcome
        return record

    def get(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def recent(self, count: int, tenant: str | None = None) -> list[RequestRecord]:
        """The last `count` records, newest first; of one tenant, or of all."""
        newest = reversed(self._records.values())
        return list(islice((r for r in newest if tenant in (None, r.tenant)), max(0, count)))

    def __len__(self) -> int:
        return len(self._records)

"""The requests that this conductor has sent to workers and that have not finished.

The gateway adds and ends them; the scheduler reads them, because workers report their load with a
delay. `now` is monotonic seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from conductor.scheduling.decision import Decision


@dataclass(slots=True)
class _Assignment:
    decode: str
    prefills_on: str
    assigned_at: float
    prefill_end: float  # predicted, or measured once `is_prefilled`
    decode_end: float  # predicted
    work_s: float
    prompt_tokens: int
    context_tokens: float  # mean over its decode
    is_prefilled: bool = False


class _Decoding:
    """Counts the sequences that decode on one worker at any time.

    One lookup per candidate, not one scan.
    """

    __slots__ = ("_begins", "_context_begun", "_context_ended", "_ends")

    def __init__(self, requests: Iterable[_Assignment]) -> None:
        found = list(requests)
        begins = sorted((r.prefill_end, r.context_tokens) for r in found)
        ends = sorted((r.decode_end, r.context_tokens) for r in found)
        self._begins = [when for when, _ in begins]
        self._ends = [when for when, _ in ends]
        self._context_begun = list(accumulate((tokens for _, tokens in begins), initial=0.0))
        self._context_ended = list(accumulate((tokens for _, tokens in ends), initial=0.0))

    def at(self, when: float, now: float) -> tuple[int, float]:
        """Sequences and their context at `when`.

        They began by then and did not end between `now` and then.
        A sequence that ended had also begun, so the two counts can be subtracted.
        """
        begun = bisect_right(self._begins, when)
        past, ended = bisect_right(self._ends, now), bisect_right(self._ends, when)
        context = self._context_begun[begun]
        context -= self._context_ended[ended] - self._context_ended[past]
        return begun - (ended - past), context


class InFlight:
    """Requests that this conductor has sent and that have not finished."""

    def __init__(self) -> None:
        self._requests: dict[str, _Assignment] = {}
        # Dicts serve as ordered sets, so that sums do not depend on the hashes of strings.
        self._decodes: dict[str, dict[str, None]] = {}
        self._prefills: dict[str, dict[str, None]] = {}  # unfinished prefills, by worker
        self._decoding: dict[str, _Decoding] = {}  # a cache, dropped on change
        self._last_order: dict[str, int] = {}
        self._orders = 0

    def assigned(self, decision: Decision, now: float) -> None:
        """Record that a decision is being carried out. A refusal is ignored.

        A second assignment of a request, after a failure, replaces the first one.
        """
        decode, prefills_on = decision.decode, decision.prefills_on
        if decision.is_refused or decode is None or prefills_on is None:
            return
        self.finished(decision.request_id)
        self._orders += 1
        end = now + decision.ttft_s
        self._requests[decision.request_id] = _Assignment(
            decode=decode,
            prefills_on=prefills_on,
            assigned_at=now,
            prefill_end=end,
            decode_end=end + decision.output_tokens * decision.tpot_s,
            work_s=decision.work_s,
            prompt_tokens=decision.prompt_tokens,
            context_tokens=decision.prompt_tokens + decision.output_tokens / 2,
        )
        self._decodes.setdefault(decode, {})[decision.request_id] = None
        self._prefills.setdefault(prefills_on, {})[decision.request_id] = None
        self._decoding.pop(decode, None)
        for worker_id in {decode, prefills_on}:
            self._last_order[worker_id] = self._orders

    def prefilled(self, request_id: str, now: float) -> None:
        """Record that a prefill has ended: the request decodes from now on."""
        request = self._requests.get(request_id)
        if request is not None and not request.is_prefilled:
            request.decode_end += now - request.prefill_end
            request.prefill_end = now
            request.is_prefilled = True
            self._decoding.pop(request.decode, None)
            _discard(self._prefills, request.prefills_on, request_id)

    def finished(self, request_id: str) -> None:
        """Record that a request has ended, in whatever way. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._decoding.pop(request.decode, None)
        _discard(self._decodes, request.decode, request_id)
        _discard(self._prefills, request.prefills_on, request_id)

    def expire(self, older_than: float) -> list[str]:
        """Drop the requests assigned before `older_than` that did not end; return their ids."""
        old = [r for r, a in self._requests.items() if a.assigned_at < older_than]
        for request_id in old:
            self.finished(request_id)
        return old

    def forget_worker(self, worker_id: str) -> None:
        """Drop the rotation order of a worker that has left."""
        self._last_order.pop(worker_id, None)

    def backlog_s(self, worker_id: str, now: float, since: float = float("-inf")) -> float:
        """Seconds of prefill left on the worker for the requests assigned after `since`.

        A prefill whose predicted end has passed counts nothing; the worker's own report is more
        accurate.
        """
        total = 0.0
        for request in self._on(self._prefills, worker_id):
            if request.assigned_at > since:
                total += min(request.work_s, max(0.0, request.prefill_end - now))
        return total

    def decoding(self, worker_id: str, when: float, now: float) -> tuple[int, float]:
        """Sequences that will decode on the worker at `when` (>= now), and their tokens of KV.

        A sequence whose predicted end lies before `now` has not finished yet, and still counts.
        """
        if worker_id not in self._decodes:
            return 0, 0.0
        known = self._decoding.get(worker_id)
        if known is None:
            known = self._decoding[worker_id] = _Decoding(self._on(self._decodes, worker_id))
        return known.at(when, now)

    def outstanding(self, worker_id: str) -> int:
        """Requests that the worker still has to prefill or to decode."""
        elsewhere = sum(1 for r in self._on(self._prefills, worker_id) if r.decode != worker_id)
        return len(self._decodes.get(worker_id, ())) + elsewhere

    def prefill_tokens(self, worker_id: str) -> int:
        """Prompt tokens, including reused ones, of the unfinished prefills on the worker."""
        return sum(r.prompt_tokens for r in self._on(self._prefills, worker_id))

    def last_assigned(self, worker_id: str) -> int:
        """A number that grows with each assignment; 0 if the worker never got a request.

        Used to rotate among equals.
        """
        return self._last_order.get(worker_id, 0)

    def __len__(self) -> int:
        return len(self._requests)

    def _on(self, table: Mapping[str, Iterable[str]], worker_id: str) -> list[_Assignment]:
        return [self._requests[request] for request in table.get(worker_id, ())]


def _discard(table: dict[str, dict[str, None]], worker_id: str, request_id: str) -> None:
    requests = table.get(worker_id)
    if requests is not None:
        requests.pop(request_id, None)
        if not requests:
            del table[worker_id]

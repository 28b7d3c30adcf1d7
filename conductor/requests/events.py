"""What happens to a request, and what is to be done about it: the language of `RequestLifecycle`.

Plain values. A runner feeds events and carries out actions: the gateway over connections, the
simulator over its virtual network. `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conductor.index.contract import Found
from conductor.requests.reports import DecodeReport, PrefillReport
from conductor.requests.request import Plan
from conductor.scheduling.decision import Decision
from kvpool.blocks.records import Segment
from kvpool.errors import KvpoolError

# ------------------------------------------------------------ events


@dataclass(slots=True, frozen=True)
class Admitted:
    """The request has a slot and a plan."""

    plan: Plan


@dataclass(slots=True, frozen=True)
class Refused:
    """Admission refused the request."""

    decision: Decision


@dataclass(slots=True, frozen=True)
class Scheduled:
    """The answer to `Schedule`; its plan may be a refusal."""

    plan: Plan


@dataclass(slots=True, frozen=True)
class Reserved:
    """The node's answer to `Reserve`.

    Args:
        grant: what the prefill worker needs to write; None if no block has to be written.
        granted, existing: indices of the chain's blocks that are granted, and that exist already.
    """

    grant: Any
    granted: Sequence[int]
    existing: Sequence[int]


@dataclass(slots=True, frozen=True)
class Prefilled:
    """The prefill worker has computed the prompt."""

    reply: PrefillReport


@dataclass(slots=True, frozen=True)
class LookedUp:
    """The answer to `LookUp`."""

    found: Found


@dataclass(slots=True, frozen=True)
class Failed:
    """The call under way failed: scheduling, a reservation, a prefill, a look-up or a decode."""

    error: KvpoolError


@dataclass(slots=True, frozen=True)
class Tokens:
    """Tokens arrived. `item` is the worker's message, which is passed on as it is."""

    token_ids: Sequence[int]
    item: Any
    so_far: DecodeReport | None = None  # the worker's report until now


@dataclass(slots=True, frozen=True)
class Decoded:
    """The decode worker has ended its stream with a report; None: without one."""

    reply: DecodeReport | None


@dataclass(slots=True, frozen=True)
class Completed:
    """The response is complete before the worker's stream ended: a stop string was found."""


@dataclass(slots=True, frozen=True)
class ClientLeft:
    """Nobody waits for the response any more."""


@dataclass(slots=True, frozen=True)
class Tick:
    """The time of the last `WaitUntil` has come."""


Event = (
    Admitted
    | Refused
    | Scheduled
    | Reserved
    | Prefilled
    | LookedUp
    | Failed
    | Tokens
    | Decoded
    | Completed
    | ClientLeft
    | Tick
)

# ------------------------------------------------------------ actions
#
# `Schedule`, `LookUp`, `Reserve`, `SendPrefill` and `SendGenerate` are calls: each is answered by
# one of the events above, or by `Failed`. At most one call is under way. The others end at once.


@dataclass(slots=True, frozen=True)
class Schedule:
    """Decide again after a failure.

    Args:
        excluded: workers that must not decode.
        last: a plan of a moment ago, whose look-up is used again; None: look the chain up.
    """

    excluded: frozenset[str]
    last: Plan | None


@dataclass(slots=True, frozen=True)
class LookUp:
    """Look the chain up again."""


@dataclass(slots=True, frozen=True)
class Reserve:
    """Reserve slots at `node_id` for the blocks from `start` on, which `writer_id` will write."""

    node_id: str
    writer_id: str
    start: int
    within_s: float


@dataclass(slots=True, frozen=True)
class SendPrefill:
    """Have `worker_id` compute the prompt: read `reuse`, write into `grant`."""

    worker_id: str
    reuse: tuple[Segment, ...]
    grant: Any
    within_s: float


@dataclass(slots=True, frozen=True)
class SendGenerate:
    """Have `worker_id` decode after the prompt and the tokens that the client has.

    Args:
        segments: the blocks that it should read.
        max_tokens: to generate.
        first_within_s: longest wait for the first token.
    """

    worker_id: str
    segments: tuple[Segment, ...]
    max_tokens: int
    first_within_s: float


@dataclass(slots=True, frozen=True)
class Cancel:
    """Give up the call under way. Its answer must not be fed."""


@dataclass(slots=True, frozen=True)
class AbortReservation:
    """Give a reservation back. The writer may still write, unless it `has_stopped`."""

    node_id: str
    grant: Any
    has_stopped: bool


@dataclass(slots=True, frozen=True)
class Emit:
    """Pass tokens on to the client."""

    item: Any


@dataclass(slots=True, frozen=True)
class Assign:
    """Count the request on the workers of its decision, for the scheduler."""

    decision: Decision


@dataclass(slots=True, frozen=True)
class MarkPrefilled:
    """The request decodes from now on, for the scheduler."""


@dataclass(slots=True, frozen=True)
class Unassign:
    """Do not count the request on any worker."""


@dataclass(slots=True, frozen=True)
class Replicate:
    """Copy the hot blocks that the decision names, in the background."""

    decision: Decision


@dataclass(slots=True, frozen=True)
class Promote:
    """Move blocks of the plan from disk into memory before they are read."""

    plan: Plan


@dataclass(slots=True, frozen=True)
class Observe:
    """Give a worker's measurements to the cost model."""

    worker_id: str
    reply: PrefillReport | DecodeReport


@dataclass(slots=True, frozen=True)
class ReportMiss:
    """Do not plan reads of this block from this node for a while: one has failed."""

    node_id: str
    block: int


@dataclass(slots=True, frozen=True)
class Count:
    """Count a thing that happened, by the name of its counter."""

    name: str


@dataclass(slots=True, frozen=True)
class FellBack:
    """Count and log a fallback. `error` is None if the worker itself fell back."""

    reason: str
    worker_id: str
    error: KvpoolError | None


@dataclass(slots=True, frozen=True)
class RecordSlo:
    """Count once whether prefill and decode met the request's objectives."""

    is_ttft_met: bool
    is_tpot_met: bool


@dataclass(slots=True, frozen=True)
class WaitUntil:
    """Feed a `Tick` at `at`. It replaces the time of an earlier one; None: no tick."""

    at: float | None


@dataclass(slots=True, frozen=True)
class Finish:
    """The request has ended: free its slot. Nothing follows.

    Args:
        status: "ok", "failed", "cancelled" or "refused".
        error: of a failed request.
    """

    status: str
    error: KvpoolError | None = None


Call = Schedule | LookUp | Reserve | SendPrefill | SendGenerate
CALLS = (Schedule, LookUp, Reserve, SendPrefill, SendGenerate)
Action = (
    Call
    | Cancel
    | AbortReservation
    | Emit
    | Assign
    | MarkPrefilled
    | Unassign
    | Replicate
    | Promote
    | Observe
    | ReportMiss
    | Count
    | FellBack
    | RecordSlo
    | WaitUntil
    | Finish
)

"""What is fixed about a request when it arrives, and the plan that a decision makes for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conductor.index.contract import Found
from conductor.index.segments import cut
from conductor.requests.admission_queue import Priority
from conductor.routing.rules import RoutingChoice
from conductor.scheduling.decision import Decision
from kvpool.blocks.records import Segment

Pool = Literal["on", "off", "local"]


@dataclass(slots=True, frozen=True)
class Objectives:
    """What a request should meet, in seconds; 0 means no objective."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


def objectives(*sources: tuple[float | None, float | None]) -> Objectives:
    """The objectives of a request: of TTFT and TPOT, the first that is not None.

    Args:
        sources: in order of rank: the request, the routing rules, its tenant, the configuration.
    """
    ttft_s = next((ttft_s for ttft_s, _ in sources if ttft_s is not None), 0.0)
    tpot_s = next((tpot_s for _, tpot_s in sources if tpot_s is not None), 0.0)
    return Objectives(ttft_s, tpot_s)


@dataclass(slots=True, frozen=True)
class Request:
    """One request. Times are monotonic seconds.

    Args:
        received_at: when its first byte arrived; TTFT and the deadline count from here.
        tokenized_at: when its prompt was known as tokens.
        pool: "on", "off" (use no pool), "local" (the engine's own cache only).
        mode: "local" or "disaggregated" if the request asks for it; "" lets rules and cost choose.
        pin_decode: the worker that must decode, until it fails.
        key: of the user or conversation.
    """

    request_id: str
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    max_tokens: int
    received_at: float
    deadline: float
    tokenized_at: float
    objectives: Objectives = Objectives()
    priority: Priority = "normal"
    pool: Pool = "on"
    mode: str = ""
    pin_decode: str | None = None
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    key: str = ""

    @property
    def blocks(self) -> int:
        """The number of blocks that the prompt fills."""
        return self.prompt_tokens // self.block_tokens

    @property
    def reusable_blocks(self) -> int:
        """The number of blocks that can be reused: the last token is always computed."""
        return (self.prompt_tokens - 1) // self.block_tokens


@dataclass(slots=True, frozen=True)
class Plan:
    """A decision, and what it was made on. The blocks that it names are read from this look-up.

    Args:
        found: the look-up; None if the pool is not used.
        found_blocks: leading blocks that the pool had.
        looked_up_at: monotonic seconds.
        choice: what the routing rules chose when the request arrived; None if there are none.
        prefill_host, decode_host: hosts of the chosen workers.
        stores_itself: the prefill worker is an engine server, whose connector reserves and commits.
        has_other: another live worker could decode instead.
    """

    decision: Decision
    found: Found | None = None
    found_blocks: int = 0
    looked_up_at: float = 0.0
    choice: RoutingChoice | None = None
    prefill_host: str = ""
    decode_host: str = ""
    stores_itself: bool = False
    has_other: bool = False

    @property
    def routing(self) -> str:
        """The routing rule that applied, as "rule:reason"."""
        return f"{self.choice.rule}:{self.choice.reason}" if self.choice is not None else ""

    def near(self, limit: int) -> list[Segment]:
        """The leading blocks up to `limit`, as the decode worker reads them best."""
        return cut(self.found.segments(self.decode_host), limit) if self.found is not None else []

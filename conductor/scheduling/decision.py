"""What the scheduler decided for a request: `Decision`, and each `Candidate` that it compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["disaggregated", "local", "refused"]


@dataclass(slots=True, frozen=True)
class Candidate:
    """One way to serve the request, with every part of its predicted TTFT in seconds.

    `prefill` is None if the decode worker prefills. `rejected` says why the candidate may not be
    chosen: "ttft_slo", "tpot_slo", "no_room" (no space in the pool) or "no_kv_room" (no space in
    the engine). It is "" if the candidate may be chosen.
    """

    mode: Mode
    prefill: str | None
    decode: str
    reuse_blocks: int
    ttft_s: float
    tpot_s: float  # predicted for the moment at which this prefill ends
    queue_s: float = 0.0  # before the prefill starts
    fetch_s: float = 0.0  # reading the reused blocks to where the prefill runs
    prefill_s: float = 0.0  # computing the rest
    send_s: float = 0.0  # the part of the transfer that does not overlap with the prefill
    load_s: float = 0.0  # the decode worker waits in its own queue and reads the blocks
    tail_s: float = 0.0  # the decode worker computes the tokens that do not fill a block
    rejected: str = ""
    stalls_s: float = 0.0  # total delay of the sequences that decode where this request computes

    @property
    def work_s(self) -> float:
        """How long the request occupies the worker that prefills."""
        return self.fetch_s + self.prefill_s + self.send_s


@dataclass(slots=True, frozen=True)
class PrefixReplication:
    """A copy to make between two nodes: blocks [start, start + count) of the request's chain."""

    source: str
    target: str
    start: int
    count: int


@dataclass(slots=True, frozen=True)
class Decision:
    """What the scheduler decided for one request.

    `reason` says why the request was refused, or why this mode was chosen. `retry_after_s` says
    when a refused caller may try again. `target_node` is the node on which to reserve the blocks
    that are still to be computed; it is set only if another worker prefills. `replicate` are copies
    worth making in the background, because the prefix is far from the worker. This request does not
    wait for them.
    """

    request_id: str
    mode: Mode
    prefill: str | None
    decode: str | None
    reuse_blocks: int
    target_node: str | None
    ttft_s: float
    tpot_s: float
    reason: str
    candidates: tuple[Candidate, ...] = ()
    retry_after_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    work_s: float = 0.0
    strategy: str = ""
    replicate: tuple[PrefixReplication, ...] = ()

    @property
    def is_refused(self) -> bool:
        return self.mode == "refused"

    @property
    def prefills_on(self) -> str | None:
        """The worker that computes the prompt. Under local prefill this is the decode worker."""
        return self.prefill if self.prefill is not None else self.decode

"""What the scheduler decided for a request: `Decision`, and each `Candidate` that it compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["disaggregated", "local", "refused"]


@dataclass(slots=True, frozen=True)
class Candidate:
    """One way to serve the request, with every part of its predicted TTFT in seconds.

    `prefill` is None for local prefill on the decode worker. `rejected` says why it may not be chosen
    ("" when it may): "ttft_slo", "tpot_slo", "no_room", "no_kv_room".
    """

    mode: Mode
    prefill: str | None
    decode: str
    reuse_blocks: int
    ttft_s: float
    tpot_s: float  # predicted for when this prefill ends
    queue_s: float = 0.0  # before the prefill starts
    fetch_s: float = 0.0  # reading the reused blocks to where the prefill runs
    prefill_s: float = 0.0  # computing the rest
    send_s: float = (
        0.0  # what the prefill does not hide: the last layer, or what a slow link lags behind
    )
    load_s: float = 0.0  # the decode worker reads the blocks, waiting for its own queue included
    tail_s: float = 0.0  # the decode worker computes what fills no block
    rejected: str = ""
    stalls_s: float = 0.0  # what those lose, together, who decode where this one computes

    @property
    def work_s(self) -> float:
        """How long it occupies the worker that prefills."""
        return self.fetch_s + self.prefill_s + self.send_s


@dataclass(slots=True, frozen=True)
class PrefixReplication:
    """Blocks [start, start + count) of the request's chain, to be copied between two nodes."""

    source: str
    target: str
    start: int
    count: int


@dataclass(slots=True, frozen=True)
class Decision:
    """The outcome of scheduling. Refused: `reason` says why, and `retry_after_s` when to come back.

    `reason` of a decision that serves says why this mode was chosen. `target_node` is where to reserve the
    blocks still to be computed (disaggregated only). `replicate`: copies worth making in the background,
    because the prefix stands where the work does not; this request does not wait for them.
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
        """The worker that computes the prompt: the decode worker itself when local."""
        return self.prefill if self.prefill is not None else self.decode

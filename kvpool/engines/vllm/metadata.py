"""What the two sides of the connector tell each other, through vLLM. Plain values.

vLLM carries them between its own processes in its own way (pickle); nothing of the sort comes from a peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpool.engines.vllm.identity import LayoutFacts
from kvpool.transports.copy import Int64Array
from kvpool.wire import messages as m


@dataclass(slots=True, frozen=True)
class LoadJob:
    """Blocks of one request to be read into its pages.

    Args:
        hashes: of the blocks, in order.
        segments: which nodes hold them; starts count from the first of `hashes`.
        pages: of all these blocks, in order.
        skip_pages: so many leading ones are vLLM's already (shared with other requests) and not written.
        is_layerwise: the step that brings this job computes with it: each layer waits for its own.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    segments: tuple[m.Segment, ...]
    pages: Int64Array
    skip_pages: int = 0
    is_layerwise: bool = False


@dataclass(slots=True, frozen=True)
class SaveJob:
    """Blocks of one request that are final after this step; vLLM keeps their pages until all ranks are done.

    Args:
        parent: hash of the block before the first; b"" at the start of a chain.
        pages: of all blocks, in order.
    """

    job_id: int
    request_id: str
    hashes: tuple[bytes, ...]
    parent: bytes
    pages: Int64Array


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """What the workers have to do in one step.

    Args:
        namespace_id: which the scheduler derived from what the ranks told; each rank compares its own.
        is_idle: nothing is computed in this step.
        waits_for_lookup: some request waits for the pool to answer.
    """

    namespace_id: bytes = b""
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    is_idle: bool = False
    waits_for_lookup: bool = False


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What one rank tells the scheduler when its KV cache is registered."""

    facts: LayoutFacts


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks have done since the last step.

    Args:
        ended_saves: by job, how many ranks no longer need its pages.
        dropped_saves: jobs of which some rank stored not all; they may be tried again.
        ended_loads: requests whose load is over, well or not.
        failed_loads: those of which some rank could not read all.
        loaded_bytes, load_s: of loads that succeeded, and what they took.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    dropped_saves: set[int] = field(default_factory=set)
    ended_loads: set[str] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    loaded_bytes: int = 0
    load_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both ranks' reports as one."""
        assert isinstance(other, WorkerReport)
        ended = dict(self.ended_saves)
        for job_id, count in other.ended_saves.items():
            ended[job_id] = ended.get(job_id, 0) + count
        return WorkerReport(
            ended,
            self.dropped_saves | other.dropped_saves,
            self.ended_loads | other.ended_loads,
            self.failed_loads | other.failed_loads,
            self.loaded_bytes + other.loaded_bytes,
            max(self.load_s, other.load_s),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.ended_saves or self.ended_loads or self.failed_loads)


def pages_of(page_ids: Any, first: int, last: int) -> Int64Array:
    """Pages [first, last) of a request's table."""
    return np.asarray(page_ids[first:last], dtype=np.int64)

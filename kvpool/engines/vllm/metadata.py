"""The messages between the two sides of the connector, which vLLM carries. Plain values.

vLLM pickles them between its own processes. Nothing pickled comes from a peer.
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
    """Blocks of one request to read into its pages.

    Args:
        hashes: hashes of the blocks, in order.
        segments: the nodes that hold them; starts count from the first of `hashes`.
        pages: pages of all these blocks, in order.
        skip_pages: how many leading pages vLLM has already, which must not be written: other
            requests may share them.
        is_layerwise: the step of this job computes with the blocks; each layer waits until it is
            read.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    segments: tuple[m.Segment, ...]
    pages: Int64Array
    skip_pages: int = 0
    is_layerwise: bool = False


@dataclass(slots=True, frozen=True)
class SaveJob:
    """Blocks of one request that are final after this step. vLLM keeps their pages until all ranks
    are done.

    Args:
        parent: hash of the block before the first; b"" at the start of a chain.
        pages: pages of all blocks, in order.
    """

    job_id: int
    request_id: str
    hashes: tuple[bytes, ...]
    parent: bytes
    pages: Int64Array


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """The workers' jobs in one step.

    Args:
        namespace_id: the scheduler's namespace; each rank compares it with its own.
        is_idle: the step computes nothing.
        waits_for_lookup: some request waits for a look-up.
    """

    namespace_id: bytes = b""
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    is_idle: bool = False
    waits_for_lookup: bool = False


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """A rank's message to the scheduler after its KV cache was registered."""

    facts: LayoutFacts


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks have done since the last step.

    Args:
        ended_saves: by job, how many ranks no longer need its pages.
        dropped_saves: jobs that some rank did not store completely; the scheduler may try them
            again.
        ended_loads: requests whose load has ended, successfully or not.
        failed_loads: requests whose load failed on some rank.
        loaded_bytes, load_s: bytes and seconds of the loads that succeeded.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    dropped_saves: set[int] = field(default_factory=set)
    ended_loads: set[str] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    loaded_bytes: int = 0
    load_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The reports of several ranks as one."""
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
        """Whether the report has no content."""
        return not (self.ended_saves or self.ended_loads or self.failed_loads)


def pages_of(page_ids: Any, first: int, last: int) -> Int64Array:
    """Pages [first, last) of a request's page table."""
    return np.asarray(page_ids[first:last], dtype=np.int64)

"""The blocks in the engines' own memory, from one KV-event feed per worker that publishes events.

Soft state.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import structlog

from conductor.kv_events.engine_blocks import EngineBlocks
from conductor.kv_events.subscriber import KvEventSubscriber
from kvpool.wire import messages as m

log = structlog.get_logger(__name__)

MAX_PAGES = 1_000_000  # per engine; about 0.4 GB


class EngineFeeds:
    """The feeds of all workers that are members.

    Args:
        max_pages: maximum number of pages per engine.
    """

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self.counters: Counter[str] = Counter()
        self._max_pages = max_pages
        self._feeds: dict[
            str, tuple[m.WorkerDescriptor, KvEventSubscriber, asyncio.Task[None]]
        ] = {}

    def follow(self, workers: Sequence[m.WorkerDescriptor]) -> None:
        """Run a feed for each of these workers that publishes events, and stop all others.

        Needs a running loop.
        """
        wanted = {worker.worker_id: worker for worker in workers if worker.kv_events}
        for worker_id, (known, _, task) in list(self._feeds.items()):
            if wanted.get(worker_id) != known or task.done():
                task.cancel()
                del self._feeds[worker_id]
        for worker_id, worker in wanted.items():
            if worker_id not in self._feeds:
                blocks = EngineBlocks(worker.namespace, self._max_pages)
                feed = KvEventSubscriber(
                    worker_id, worker.kv_events, worker.kv_replay, blocks, self.counters
                )
                task = asyncio.create_task(feed.run(), name=f"kv-events {worker_id}")
                task.add_done_callback(_log_failure)
                self._feeds[worker_id] = (worker, feed, task)

    def leading(self, namespace_id: bytes, hashes: Sequence[bytes]) -> dict[str, int]:
        """Worker id -> number of leading blocks in that engine, for workers that have any."""
        found = {}
        for worker_id, (worker, feed, _) in self._feeds.items():
            if worker.namespace.namespace_id == namespace_id:
                count = feed.blocks.leading(hashes)
                if count:
                    found[worker_id] = count
        return found

    def stats(self) -> dict[str, float]:
        """Counters and sizes, for stats and metrics."""
        numbers = {name: float(value) for name, value in self.counters.items()}
        numbers["kv_events:engines"] = float(len(self._feeds))
        numbers["kv_events:blocks"] = float(sum(len(f.blocks) for _, f, _ in self._feeds.values()))
        numbers["kv_events:overflowed"] = float(
            sum(f.blocks.overflowed for _, f, _ in self._feeds.values())
        )
        return numbers

    async def close(self) -> None:
        """Stop all feeds."""
        tasks = [task for _, _, task in self._feeds.values()]
        self._feeds.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a KV-event feed failed", feed=task.get_name(), error=str(task.exception()))

"""Subscribes to one engine's KV events over ZMQ, updates its `EngineBlocks`, and repairs gaps.

A message has three frames: topic, sequence number (8 bytes, big-endian) and payload. The publisher
keeps the last messages for replay over a ROUTER socket: it receives a number, sends all messages
from that number on, and ends with number -1. A gap is repaired by a replay. Without one, all blocks
of the engine are dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from conductor.kv_events.engine_blocks import EngineBlocks
from conductor.kv_events.events import MAX_BATCH_BYTES, EventBatch, parse_batch
from kvpool.errors import ProtocolError

log = structlog.get_logger(__name__)

REPLAY_TIMEOUT_S = 2.0  # between two messages of a replay
HIGH_WATER = 10_000  # messages queued here; ZMQ drops more, which shows as a gap
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KvEventSubscriber:
    """Follows one engine.

    Args:
        name: the engine's name in the log.
        endpoint: where the engine publishes, e.g. "tcp://10.0.0.5:5557".
        replay_endpoint: where it replays; "" if it does not.
        blocks: updated from the events.
        counters: shared with other feeds.
        topic: topic of the subscription.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        replay_endpoint: str,
        blocks: EngineBlocks,
        counters: Counter[str],
        *,
        topic: str = "",
    ) -> None:
        self.blocks = blocks
        self.is_synchronised = False  # the events up to now have no gap
        self._name = name
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._counters = counters
        self._topic = topic.encode()
        self._last = -1  # last sequence number that was applied
        self._last_ts = float("-inf")
        self._was_lost = True  # the connection is new, so the publisher may be another

    async def run(self) -> None:
        """Follow until cancelled."""
        context = zmq.asyncio.Context()
        try:
            subscriber = context.socket(zmq.SUB)
            subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            subscriber.set_hwm(HIGH_WATER)
            subscriber.setsockopt(zmq.SUBSCRIBE, self._topic)
            monitor = subscriber.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            subscriber.connect(self._endpoint)
            watch = asyncio.create_task(self._watch(monitor))
            try:
                while True:
                    await self._message(context, await subscriber.recv_multipart())
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                subscriber.disable_monitor()
        finally:
            context.destroy(linger=0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                log.warning("the connection for an engine's KV events broke", engine=self._name)
                self._counters["kv_events:disconnects"] += 1
                self._forget()

    async def _message(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._counters["kv_events:bad"] += 1
            return
        sequence = int.from_bytes(frames[1], "big")
        batch = self._parsed(frames[2])
        if batch is None:
            self._forget()  # its events are lost
            return
        if sequence <= self._last and not self._was_lost:
            if batch.ts <= self._last_ts:
                return  # applied by a replay
            self._counters["kv_events:restarts"] += 1
            self._forget()
        if self._was_lost or sequence > self._last + 1:
            await self._heal(context, sequence)
        if sequence > self._last:
            self._apply(sequence, batch)

    async def _heal(self, context: zmq.asyncio.Context, until: int) -> None:
        """Apply the messages before `until` by a replay, or drop all blocks."""
        first = 0 if self._was_lost else self._last + 1
        if not self._was_lost:
            self._counters["kv_events:gaps"] += 1
        self._was_lost = False
        replayed = await self._replay(context, first) if until > first else []
        reached = first - 1
        for sequence, payload in replayed:
            batch = self._parsed(payload)
            if sequence != reached + 1 or batch is None:
                # Older messages are not replayed any more, or one is unreadable: start from
                # nothing.
                self.blocks.clear()
            reached = sequence
            if batch is not None:
                self._apply(sequence, batch)
        if reached < until - 1:
            self._counters["kv_events:lost"] += 1
            self.blocks.clear()
            self._last = until - 1
            log.warning("a gap in an engine's KV events remains", engine=self._name, until=until)
        self.is_synchronised = True

    async def _replay(self, context: zmq.asyncio.Context, first: int) -> list[tuple[int, bytes]]:
        """The messages from number `first` on; none if the publisher does not reply."""
        if not self._replay_endpoint:
            return []
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        messages: list[tuple[int, bytes]] = []
        try:
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await dealer.recv_multipart()
                if len(frames) < 2 or frames[1] == END_OF_REPLAY:
                    break
                messages.append((int.from_bytes(frames[1], "big"), frames[-1]))
            self._counters["kv_events:replays"] += 1
        except TimeoutError:
            self._counters["kv_events:replay_timeouts"] += 1
            return []
        finally:
            dealer.close(linger=0)
        return messages

    def _apply(self, sequence: int, batch: EventBatch) -> None:
        self._last, self._last_ts = sequence, batch.ts
        self._counters["kv_events:applied"] += len(batch.events)
        self._counters["kv_events:ignored"] += batch.ignored
        for event in batch.events:
            self.blocks.apply(event)

    def _parsed(self, payload: bytes) -> EventBatch | None:
        try:
            return parse_batch(payload)
        except ProtocolError as error:
            self._counters["kv_events:bad"] += 1
            log.warning("unreadable KV events", engine=self._name, error=str(error))
            return None

    def _forget(self) -> None:
        self.blocks.clear()
        self._last = -1
        self._was_lost = True
        self.is_synchronised = False

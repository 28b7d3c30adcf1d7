"""Sends each layer of a prefill to the pool as soon as it is final, while the next one computes.

Only the last layer's transfer is exposed. Slots were reserved before the prefill began; the blocks
become visible together, at commit, with a checksum over the bytes that were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from typing import Any

import numpy as np
import structlog
import xxhash

from kvpool.blocks.layout import Layout
from kvpool.client.node.grants import WriteReservation
from kvpool.client.node.node_link import NodeLink
from kvpool.errors import DeadlineExceeded, KvpoolError, TransferFailed
from kvpool.transports import Pieces
from kvpool.wire import messages as m
from workers.engine.contract import LayerChunk

log = structlog.get_logger(__name__)

RENEW_TTL_S = 30.0


class LayerSender:
    """Writes the layers of one prefill into reserved slots of one node.

    Args:
        link: the node.
        reservation: the slots that it granted.
        indices: the blocks of the chain that these slots are for, in order.
        timeout_s: for the whole prefill.
    """

    def __init__(
        self,
        link: NodeLink,
        reservation: WriteReservation,
        indices: np.ndarray,
        layout: Layout,
        timeout_s: float,
    ) -> None:
        self.bytes_written = 0
        self.transfer_s = 0.0  # spent in transfers, mostly while the engine computes
        self._link = link
        self._reservation = reservation
        self._layout = layout
        self._row_of = {int(block): row for row, block in enumerate(indices)}
        self._sums = [xxhash.xxh3_64() for _ in indices]
        self._layers_sent = np.zeros(len(indices), dtype=np.int64)
        self._deadline = time.monotonic() + timeout_s
        self._chunks: queue.SimpleQueue[LayerChunk | None] = queue.SimpleQueue()
        self._error: KvpoolError | None = None
        self._ending: asyncio.Future[None] | None = None
        self._may_write_until = reservation.deadline
        self._thread = threading.Thread(target=self._send_all, name="kvpool-sender", daemon=True)
        self._thread.start()
        self._renewal = asyncio.create_task(self._renew())

    def on_layer(self, chunk: LayerChunk) -> None:
        """Queue a layer from the engine; returns at once. A sender that has failed drops it."""
        if self._error is None:
            self._chunks.put(chunk)

    async def commit(self) -> int:
        """Wait for the last layer, then make the blocks visible; returns how many.

        Raises:
            KvpoolError: nothing became visible; the reservation was given back.
        """
        await self._end()
        try:
            if self._error is not None:
                raise self._error
            whole = np.flatnonzero(self._layers_sent == self._layout.layers)
            sums = np.array([self._sums[row].intdigest() for row in whole], dtype=np.uint64)
            if not len(whole):
                raise TransferFailed("the engine computed none of the reserved blocks")
            visible = await self._link.commit(
                self._reservation.reservation_id,
                sums,
                indices=[] if len(whole) == len(self._sums) else whole.tolist(),
                timeout_s=max(0.1, self._deadline - time.monotonic()),
            )
        except KvpoolError:
            await self._give_back()
            raise
        if len(whole) < len(self._sums):
            await self._give_back()
        return visible

    async def abort(self) -> None:
        """Stop sending and give the slots back."""
        await self._end()
        await self._give_back()

    async def _end(self) -> None:
        """Accept no more layers and wait for the thread. All callers, also cancelled ones, wait for one end."""
        if self._ending is None:
            self._renewal.cancel()
            self._chunks.put(None)
            self._ending = asyncio.ensure_future(asyncio.to_thread(self._thread.join))
        await asyncio.shield(self._ending)

    async def _give_back(self) -> None:
        # A thread that still writes, or a transfer past its deadline, may write into the slots
        # later: then the node must quarantine them (invariant 2).
        has_stopped = not self._thread.is_alive() and not isinstance(self._error, DeadlineExceeded)
        with contextlib.suppress(KvpoolError):
            await self._link.abort(
                self._reservation.reservation_id, writer_stopped=has_stopped, timeout_s=1.0
            )

    async def _renew(self) -> None:
        """Keep the reservation while the engine computes."""
        left = self._reservation.deadline - time.monotonic()
        while True:
            await asyncio.sleep(max(0.05, left / 3))
            asked = time.monotonic()
            request = m.RenewReservation(self._reservation.reservation_id, RENEW_TTL_S)
            try:
                reply: m.RenewReply = await self._link.wire.call(request, max(0.1, left / 3))
            except KvpoolError as error:
                # The reservation may end before the last write, and the node may reuse the slots:
                # stop.
                if self._error is None:
                    self._error = TransferFailed(f"the reservation could not be renewed: {error}")
                return
            self._may_write_until = asked + reply.ttl_s
            left = self._may_write_until - time.monotonic()

    def _send_all(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            if self._error is not None:
                continue
            started = time.monotonic()
            try:
                self._send(chunk)
            except KvpoolError as error:
                self._error = error
                log.warning("sending a layer failed", layer=chunk.layer, error=str(error))
            self.transfer_s += time.monotonic() - started

    def _send(self, chunk: LayerChunk) -> None:
        layer_bytes = self._layout.layer_bytes
        wanted = [
            (i, self._row_of[chunk.first_block + i])
            for i in range(len(chunk.blocks))
            if chunk.first_block + i in self._row_of
        ]
        if not wanted:
            return
        rows = np.array([i for i, _ in wanted], dtype=np.int64)
        targets = np.array([row for _, row in wanted], dtype=np.int64)
        base = int(chunk.blocks.ctypes.data)
        places = self._reservation.places[targets].copy()
        places[:, 1] += chunk.layer * layer_bytes
        lengths = np.full(len(rows), layer_bytes, dtype=np.int64)
        pieces = Pieces(base + rows * layer_bytes, places, lengths, chunk.blocks)
        timeout_s = min(self._deadline, self._may_write_until) - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineExceeded("no time left to send the layers")
        self._link.transports.dram.write(self._link.node, pieces, timeout_s)
        for i, slot in wanted:
            if self._layers_sent[slot] != chunk.layer:
                raise TransferFailed("layers came out of order; their checksum would be wrong")
            self._sums[slot].update(chunk.blocks[i].data)
            self._layers_sent[slot] += 1
        self.bytes_written += len(rows) * layer_bytes


def moved(sender: LayerSender | None, link: NodeLink | None) -> dict[str, Any]:
    """Bytes that a sender wrote, by transport."""
    if sender is None or link is None or not sender.bytes_written:
        return {}
    return {link.transports.dram.name: sender.bytes_written}

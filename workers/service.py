"""What a worker does with a request: read what the pool has, compute the rest, send or stream.

Whatever the pool does (a node gone, a lease over, a checksum that fails), the worker computes what it did
not get: a request is never lost, and never answered from wrong KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from kvpool.client import AsyncPool, GetResult
from kvpool.client.node_link import reservation_of
from kvpool.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvpoolError,
    Overloaded,
    UnknownNamespace,
)
from kvpool.hashing import unpack_hashes
from kvpool.layout import Namespace
from kvpool.wire import Final, WireServer
from kvpool.wire import messages as m
from workers.engine import Engine, SequenceState
from workers.engine_thread import EngineThread
from workers.local_prefix import LocalPrefixCache
from workers.sender import LayerSender, moved

log = structlog.get_logger(__name__)

STORE_TIMEOUT_S = 10.0
WARM_UP_TOKENS = 512
SMOOTHING = 0.3


@dataclass(slots=True)
class Rates:
    """Speeds measured on this worker, exponentially smoothed; 0 until known."""

    prefill_tokens_per_s: float = 0.0
    tpot_s: float = 0.0
    fetch_bytes_per_s: float = 0.0

    def update(self, name: str, value: float) -> None:
        """Take one more measurement into account."""
        old = getattr(self, name)
        setattr(self, name, value if not old else old + SMOOTHING * (value - old))


@dataclass(slots=True)
class _Progress:
    """What is known of one request so far."""

    phases: dict[str, float] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    pool_tokens: int = 0
    local_tokens: int = 0
    verified_blocks: int = 0
    fallback_reason: str = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Any:
        """Add the wall time of the block to phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started


class WorkerService:
    """Prefill and decode around one engine.

    Args:
        namespace: of this engine's blocks; a request for another is refused.
        local_cache: the engine's own prefix cache, used only by requests that ask for it.
        max_concurrent: more requests at once are refused as overload.
        on_phase: told of every phase measured, for metrics.
    """

    def __init__(
        self,
        engine: Engine,
        namespace: Namespace,
        pool: AsyncPool,
        local_cache: LocalPrefixCache,
        *,
        max_concurrent: int,
        on_phase: Callable[[str, float], None] = lambda _name, _seconds: None,
    ) -> None:
        self.rates = Rates()
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._namespace = namespace
        self._pool = pool
        self._local_cache = local_cache
        self._thread = EngineThread()
        self._max_concurrent = max_concurrent
        self._on_phase = on_phase
        self._running = 0
        self._queued_prefill_tokens = 0
        self._storing: set[asyncio.Task[None]] = set()
        self._decoding: dict[int, int] = {}  # by id of the request: tokens of context

    def expose(self, server: WireServer) -> None:
        """Register the handlers with a wire server."""
        server.handle(m.Prefill, lambda request, _session: self.prefill(request))
        server.handle(m.Generate, lambda request, _session: self.generate(request))

    def load(self) -> m.WorkerLoad:
        """What the scheduler should know of this worker now."""
        return m.WorkerLoad(
            self._running,
            self._queued_prefill_tokens,
            len(self._decoding),
            sum(self._decoding.values()),
            self.rates.prefill_tokens_per_s,
            self.rates.tpot_s,
            self.rates.fetch_bytes_per_s,
        )

    async def warm_up(self, tokens: int = WARM_UP_TOKENS) -> None:
        """Run the engine once on a prompt that nobody asked, so that no request pays for first use."""
        prompt = np.ones(min(tokens, self._engine.max_model_tokens - 2), dtype=np.int64)

        def work() -> None:
            sequence = self._engine.start(prompt, 1)
            try:
                self._engine.prefill(sequence, lambda _chunk: None)
                self._engine.decode(sequence, self._engine.next_token(sequence, m.Sampling(1)))
            finally:
                self._engine.close(sequence)

        await self._thread.run(work)

    def close(self) -> None:
        """Stop the engine's thread."""
        self._thread.close()

    # ------------------------------------------------------------ requests

    async def prefill(self, request: m.Prefill) -> m.PrefillReply:
        """Compute a prompt's KV and write the granted blocks, layer by layer.

        Raises:
            UnknownNamespace: the request is for another model, layout or tenant.
            Overloaded: too many requests at once.
            EngineFailed, TransferFailed, DeadlineExceeded: nothing of the grant became visible.
        """
        tokens, hashes = self._checked(request.namespace_id, request.token_ids, request.hashes)
        deadline = time.monotonic() + request.deadline_s
        progress = _Progress()
        with self._admitted(len(tokens)):
            sender: LayerSender | None = None
            link = None
            sequence = None
            try:
                if request.grant is not None:
                    link = self._pool.link_to(request.grant.node)
                    sender = LayerSender(
                        link,
                        reservation_of(request.grant.reservation, time.monotonic()),
                        np.frombuffer(request.grant.indices, dtype="<u4"),
                        self._engine.layout,
                        request.deadline_s,
                    )
                blocks = await self._read(request, hashes, deadline, progress)
                sequence = await self._start(tokens, 0, progress)
                await self._compute(sequence, blocks, sender, progress)
                committed = 0
                if sender is not None:
                    with progress.phase("kv_cache_transfer_exposed_time"):
                        committed = await sender.commit()
                    progress.phases["kv_cache_send_time"] = sender.transfer_s
            except BaseException:
                if sender is not None:
                    await sender.abort()
                raise
            finally:
                if sequence is not None:
                    await self._thread.run(self._engine.close, sequence)
        self._publish(progress)
        return m.PrefillReply(
            progress.pool_tokens,
            sequence.computed_tokens,
            committed,
            progress.phases,
            progress.bytes_read,
            moved(sender, link),
        )

    async def generate(self, request: m.Generate) -> AsyncIterator[Any]:
        """Stream the tokens that follow a prompt; ends with a `GenerateReply`.

        Raises: as `prefill`.
        """
        tokens, hashes = self._checked(request.namespace_id, request.token_ids, request.hashes)
        deadline = time.monotonic() + request.deadline_s
        progress = _Progress()
        with self._admitted(len(tokens)):
            sequence = None
            try:
                blocks, sender, link = await self._prefix(
                    request, tokens, hashes, deadline, progress
                )
                try:
                    sequence = await self._start(tokens, request.sampling.max_tokens, progress)
                    await self._compute(sequence, blocks, sender, progress)
                except BaseException:
                    if sender is not None:
                        await sender.abort()
                    raise
                stored = None
                if sender is not None:
                    # Goes on when the reader of the stream leaves: the blocks are worth keeping.
                    stored = asyncio.create_task(
                        self._store(sender, link, progress, request.request_id)
                    )
                    self._storing.add(stored)
                    stored.add_done_callback(self._storing.discard)
                if request.local_prefix:
                    await self._keep_locally(sequence, hashes)
                self._decoding[id(request)] = len(tokens)
                reason, is_first = "length", True
                async for token, is_last in self._tokens(request, sequence, progress, deadline):
                    if is_last:
                        reason = "stop"
                    elif is_first:
                        yield m.GenerateChunk([token], _report("", progress, sequence))
                        is_first = False
                    else:
                        yield m.GenerateChunk([token])
                if stored is not None:
                    await stored
            finally:
                self._decoding.pop(id(request), None)
                if sequence is not None:
                    await self._thread.run(self._engine.close, sequence)
        self._publish(progress)
        yield Final(_report(reason, progress, sequence))

    # ------------------------------------------------------------ steps

    def _checked(
        self, namespace_id: bytes, token_ids: bytes, packed: bytes
    ) -> tuple[np.ndarray, list[bytes]]:
        if namespace_id != self._namespace.namespace_id:
            raise UnknownNamespace(
                f"this worker serves {self._namespace.name}, the request names another namespace",
                hint="model, revision, layout, tenant and salt must be the same everywhere",
            )
        if len(token_ids) % 4:
            raise InvalidArgument("token ids must be packed as 32-bit integers")
        tokens = np.frombuffer(token_ids, dtype="<u4").astype(np.int64)
        hashes = unpack_hashes(packed)
        if len(hashes) > len(tokens) // self._namespace.layout.block_tokens:
            raise InvalidArgument(f"{len(hashes)} hashes for {len(tokens)} tokens are too many")
        return tokens, hashes

    @contextlib.contextmanager
    def _admitted(self, tokens: int) -> Any:
        if self._running >= self._max_concurrent:
            self.counters["refused"] += 1
            raise Overloaded(f"{self._running} requests are in work here", retry_after_s=1.0)
        self._running += 1
        self._queued_prefill_tokens += tokens
        self.counters["requests"] += 1
        try:
            yield
        finally:
            self._running -= 1
            self._queued_prefill_tokens -= tokens

    async def _prefix(
        self,
        request: m.Generate,
        tokens: np.ndarray,
        hashes: list[bytes],
        deadline: float,
        progress: _Progress,
    ) -> tuple[np.ndarray | None, LayerSender | None, Any]:
        """Blocks to load, and where to store those that must be computed."""
        if request.local_prefix:
            limit = request.local_prefix_tokens // self._namespace.layout.block_tokens
            found = self._local_cache.match(hashes[: limit or len(hashes)])
            if found is not None:
                # A copy: the cache's memory may move while the engine works for somebody else.
                progress.local_tokens = len(found) * self._namespace.layout.block_tokens
                return found.copy(), None, None
            return None, None, None
        if not request.use_pool:
            return None, None, None
        blocks = await self._read(request, hashes, deadline, progress)
        sender, link = None, None
        if request.store:
            have = len(blocks) if blocks is not None else 0
            sender, link = await self._reserve_here(request.nodes, hashes, have, deadline)
        return blocks, sender, link

    async def _read(
        self,
        request: m.Prefill | m.Generate,
        hashes: Sequence[bytes],
        deadline: float,
        progress: _Progress,
    ) -> np.ndarray | None:
        """The leading blocks that the pool holds, verified; None when there are none to be had.

        What would come later than it could be computed is declined.
        """
        segments = request.segments
        count = sum(segment.count for segment in segments)
        if not count:
            return None
        for node in request.nodes:
            self._pool.link_to(node)
        layout = self._namespace.layout
        blocks = np.empty((count, layout.part_bytes), dtype=np.uint8)
        started = time.monotonic()
        with progress.phase("kv_cache_transfer_time"):
            try:
                result = await self._pool.get(
                    self._namespace,
                    hashes[:count],
                    blocks,
                    segments=segments,
                    is_disposable=True,
                    max_wait_s=request.max_wait_s,
                    timeout_s=max(0.05, (deadline - time.monotonic()) / 2),
                )
            except KvpoolError as error:
                result = GetResult(0, (), {}, 0, error.code)
        if result.waited_s:
            progress.phases["kv_cache_promotion_time"] = result.waited_s
        progress.bytes_read = result.bytes_moved
        progress.verified_blocks = result.verified
        progress.pool_tokens = result.found * layout.block_tokens
        if result.found < count:
            progress.fallback_reason = f"pool_read:{result.miss_reason}"
            kind = "miss" if result.miss_reason in m.DECLINED else "fallback"
            self.counters[f"{kind}:{result.miss_reason}"] += 1
            log.warning(
                "read less than planned",
                request_id=request.request_id,
                found=result.found,
                planned=count,
                reason=result.miss_reason,
            )
        if not result.found:
            return None
        self.rates.update(
            "fetch_bytes_per_s",
            result.found * layout.part_bytes / max(1e-6, time.monotonic() - started),
        )
        return blocks[: result.found]

    async def _start(
        self, tokens: np.ndarray, max_new_tokens: int, progress: _Progress
    ) -> SequenceState:
        asked = time.monotonic()
        sequence = await self._thread.run(self._engine.start, tokens, max_new_tokens)
        progress.phases["request_queue_wait"] = time.monotonic() - asked
        return sequence

    async def _compute(
        self,
        sequence: SequenceState,
        blocks: np.ndarray | None,
        sender: LayerSender | None,
        progress: _Progress,
    ) -> None:
        """Load what was read, compute the rest of the prompt."""

        def work() -> None:
            if blocks is not None and len(blocks):
                with progress.phase("kv_cache_unpack_time"):
                    self._engine.load_prefix(sequence, blocks)
            with progress.phase("prefill_compute_time"):
                self._engine.prefill(sequence, sender.on_layer if sender else None)

        await self._thread.run(work)
        # What was reused, not merely read: of a prompt that is all there, the last token is computed.
        if progress.local_tokens:
            progress.local_tokens = sequence.loaded_tokens
        else:
            progress.pool_tokens = sequence.loaded_tokens
        if sequence.computed_tokens >= self._namespace.layout.block_tokens:
            self.rates.update(
                "prefill_tokens_per_s",
                sequence.computed_tokens / progress.phases["prefill_compute_time"],
            )

    async def _tokens(
        self, request: m.Generate, sequence: SequenceState, progress: _Progress, deadline: float
    ) -> AsyncIterator[tuple[int, bool]]:
        """Tokens as they are drawn; (token, True) ends the text and is not part of it.

        Raises:
            DeadlineExceeded: the text is not complete, though nobody asked for it to be shorter.
        """
        sampling = request.sampling
        count = 0
        started = time.monotonic()
        while count < sampling.max_tokens:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{count} of {sampling.max_tokens} tokens came in time")
            token = await self._thread.run(self._engine.next_token, sequence, sampling)
            if token in self._engine.eos_token_ids and not sampling.ignore_eos:
                yield token, True
                return
            if not count:
                progress.phases["first_token_emit_time"] = time.monotonic() - started
                started = time.monotonic()
            count += 1
            yield token, False
            if count < sampling.max_tokens:
                await self._thread.run(self._engine.decode, sequence, token)
                self._decoding[id(request)] += 1
                per_token = (time.monotonic() - started) / count
                progress.phases["per_token_decode_time"] = per_token
                self.rates.update("tpot_s", per_token)

    async def _reserve_here(
        self,
        nodes: Sequence[m.NodeDescriptor],
        hashes: list[bytes],
        have: int,
        deadline: float,
    ) -> tuple[LayerSender | None, Any]:
        """Slots on this host's node for the blocks that will be computed here, if there is room."""
        here = [node for node in nodes if node.host == self._pool.host_label] or list(nodes)
        wanted = hashes[have:]
        if not here or not wanted:
            return None, None
        timeout_s = min(1.0, max(0.05, deadline - time.monotonic()))
        try:
            link = self._pool.link_to(here[0])
            reservation = await link.reserve(
                self._namespace,
                wanted,
                parent=hashes[have - 1] if have else b"",
                part=0,
                ttl_s=STORE_TIMEOUT_S + 20.0,
                timeout_s=timeout_s,
                writer_id=self._pool.client_id,
            )
        except KvpoolError as error:
            self.counters[f"store_declined:{error.code}"] += 1
            return None, None
        if not reservation.granted:
            return None, None
        indices = np.array(reservation.granted) + have
        left = max(1.0, deadline - time.monotonic())
        return LayerSender(link, reservation, indices, self._engine.layout, left), link

    async def _store(
        self, sender: LayerSender, link: Any, progress: _Progress, request_id: str
    ) -> None:
        """Commit what was computed here; a failure costs reuse later, not this request."""
        try:
            await sender.commit()
            progress.bytes_written = moved(sender, link)
        except KvpoolError as error:
            self.counters[f"store_failed:{error.code}"] += 1
            log.warning(
                "blocks computed here were not stored", request_id=request_id, error=str(error)
            )

    async def _keep_locally(self, sequence: SequenceState, hashes: list[bytes]) -> None:
        def work() -> None:
            blocks = self._engine.export_blocks(sequence, 0, len(hashes))
            self._local_cache.insert(hashes, blocks)

        await self._thread.run(work)

    def _publish(self, progress: _Progress) -> None:
        for name, seconds in progress.phases.items():
            self._on_phase(name, seconds)
        for transport, count in progress.bytes_read.items():
            self.counters[f"bytes_read:{transport}"] += count


def _report(reason: str, progress: _Progress, sequence: SequenceState) -> m.GenerateReply:
    return m.GenerateReply(
        reason,
        progress.pool_tokens,
        progress.local_tokens,
        sequence.computed_tokens,
        progress.fallback_reason,
        progress.phases,
        progress.bytes_read,
        progress.verified_blocks,
        progress.bytes_written,
    )

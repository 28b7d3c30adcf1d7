"""Serves requests on a worker: reads what the pool has, computes the rest, and sends KV or streams tokens.

If the pool fails (a node is gone, a lease has ended, a checksum differs), the worker computes what
it did not get: no request is lost, and none is answered from wrong KV.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from kvpool.blocks.hashing import unpack_hashes
from kvpool.blocks.layout import Namespace
from kvpool.client import AsyncPool
from kvpool.client.node.grants import reservation_from_reply
from kvpool.errors import (
    DeadlineExceeded,
    InvalidArgument,
    UnknownNamespace,
)
from kvpool.wire import Final
from kvpool.wire import messages as m
from kvpool.wire.server import Handler
from workers.engine.contract import Engine, SequenceState
from workers.engine.engine_thread import EngineThread
from workers.engine.prefix_cache import LocalPrefixCache
from workers.service.layer_sender import LayerSender, moved
from workers.service.load import Load, RequestLoad
from workers.service.pool_blocks import PoolBlocks
from workers.service.progress import Progress

WARM_UP_TOKENS = 512


class WorkerService:
    """Prefill and decode around one engine.

    Args:
        namespace: of this engine's blocks; requests for another namespace are refused.
        local_cache: the engine's own prefix cache, used only by requests that ask for it.
        max_concurrent: the most requests that may run at once; more are refused.
        on_phase: called with each measured phase, for metrics.
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
        self.counters: Counter[str] = Counter()
        self.load = Load(max_concurrent, self.counters)
        self._engine = engine
        self._namespace = namespace
        self._pool = pool
        self._local_cache = local_cache
        self._thread = EngineThread()
        self._on_phase = on_phase
        self._blocks = PoolBlocks(pool, namespace, self.load.rates, self.counters)
        self._storing: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[type[m.Message], Handler]:
        """What a worker answers over the wire."""
        return {
            m.Prefill: lambda request, _session: self.prefill(request),
            m.Generate: lambda request, _session: self.generate(request),
        }

    async def warm_up(self, tokens: int = WARM_UP_TOKENS) -> None:
        """Run the engine once on a prompt of its own, so that no request pays for the first use."""
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
            Overloaded: too many requests are running.
            EngineFailed, TransferFailed, DeadlineExceeded: no granted block became visible.
        """
        tokens, hashes = self._checked(request.namespace_id, request.token_ids, request.hashes)
        received = time.monotonic()
        deadline = received + request.deadline_s
        progress = Progress()
        with self.load.admitted(len(tokens)) as request_load:
            sender: LayerSender | None = None
            link = None
            sequence = None
            try:
                if request.grant is not None:
                    link = self._pool.directory.link_to(request.grant.node)
                    sender = LayerSender(
                        link,
                        reservation_from_reply(
                            request.grant.reservation, received - request.grant.age_s
                        ),
                        np.frombuffer(request.grant.indices, dtype="<u4"),
                        self._engine.layout,
                        request.deadline_s,
                    )
                blocks = await self._blocks.read(request, hashes, deadline, progress)
                sequence = await self._start(tokens, 0, progress)
                await self._compute(sequence, blocks, sender, progress)
                request_load.prefill_ended()
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
            progress.fallback_reason,
            progress.tokens_by_tier(self._namespace.layout.block_tokens),
        )

    async def generate(self, request: m.Generate) -> AsyncIterator[Any]:
        """Stream the tokens that follow a prompt; ends with a `GenerateReply`.

        Raises: as `prefill`.
        """
        tokens, hashes = self._checked(request.namespace_id, request.token_ids, request.hashes)
        deadline = time.monotonic() + request.deadline_s
        progress = Progress()
        with self.load.admitted(len(tokens)) as request_load:
            sequence = None
            try:
                blocks, sender, link = await self._prefix(
                    request, tokens, hashes, deadline, progress
                )
                try:
                    sequence = await self._start(tokens, request.sampling.max_tokens, progress)
                    await self._compute(sequence, blocks, sender, progress)
                    request_load.prefill_ended()
                except BaseException:
                    if sender is not None:
                        await sender.abort()
                    raise
                stored = None
                if sender is not None:
                    # Continues when the client leaves: the blocks are worth keeping.
                    stored = asyncio.create_task(
                        self._blocks.store(sender, link, progress, request.request_id)
                    )
                    self._storing.add(stored)
                    stored.add_done_callback(self._storing.discard)
                if request.local_prefix:
                    await self._keep_locally(sequence, hashes)
                request_load.decode_began(len(tokens))
                reason, is_first = "length", True
                async for token, is_last in self._tokens(
                    request, sequence, request_load, progress, deadline
                ):
                    if is_last:
                        reason = "stop"
                    elif is_first:
                        yield m.GenerateChunk([token], self._report("", sequence, progress))
                        is_first = False
                    else:
                        yield m.GenerateChunk([token])
                if stored is not None:
                    await stored
            finally:
                if sequence is not None:
                    await self._thread.run(self._engine.close, sequence)
        self._publish(progress)
        yield Final(self._report(reason, sequence, progress))

    def _report(
        self, finish_reason: str, sequence: SequenceState, progress: Progress
    ) -> m.GenerateReply:
        return progress.report(finish_reason, sequence, self._namespace.layout.block_tokens)

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

    async def _prefix(
        self,
        request: m.Generate,
        tokens: np.ndarray,
        hashes: list[bytes],
        deadline: float,
        progress: Progress,
    ) -> tuple[np.ndarray | None, LayerSender | None, Any]:
        """Blocks to load, and where to store those that must be computed."""
        if request.local_prefix:
            limit = request.local_prefix_tokens // self._namespace.layout.block_tokens
            found = self._local_cache.match(hashes[: limit or len(hashes)])
            if found is not None:
                # Copied, because the cache may reuse its memory while the engine serves others.
                progress.local_tokens = len(found) * self._namespace.layout.block_tokens
                return found.copy(), None, None
            return None, None, None
        if not request.use_pool:
            return None, None, None
        blocks = await self._blocks.read(request, hashes, deadline, progress)
        sender, link = None, None
        if request.store:
            have = len(blocks) if blocks is not None else 0
            sender, link = await self._blocks.reserve(request.nodes, hashes, have, deadline)
        return blocks, sender, link

    async def _start(
        self, tokens: np.ndarray, max_new_tokens: int, progress: Progress
    ) -> SequenceState:
        with progress.phase("request_queue_wait"):
            return await self._thread.run(self._engine.start, tokens, max_new_tokens)

    async def _compute(
        self,
        sequence: SequenceState,
        blocks: np.ndarray | None,
        sender: LayerSender | None,
        progress: Progress,
    ) -> None:
        """Load the blocks that were read and compute the rest of the prompt."""
        asked = time.monotonic()

        def work() -> None:
            progress.add("request_queue_wait", time.monotonic() - asked)
            if blocks is not None and len(blocks):
                with progress.phase("kv_cache_unpack_time"):
                    self._engine.load_prefix(sequence, blocks)
            with progress.phase("prefill_compute_time"):
                self._engine.prefill(sequence, sender.on_layer if sender else None)
            packed_s = sequence.seconds.get("pack", 0.0)
            if packed_s:
                progress.add("kv_cache_pack_time", packed_s)
                progress.add("prefill_compute_time", -packed_s)  # which included it

        await self._thread.run(work)
        # Reused tokens, not read ones: if the whole prompt was found, its last token is still
        # computed.
        if progress.local_tokens:
            progress.local_tokens = sequence.loaded_tokens
        else:
            progress.pool_tokens = sequence.loaded_tokens
        if sequence.computed_tokens >= self._namespace.layout.block_tokens:
            self.load.rates.update(
                "prefill_tokens_per_s",
                sequence.computed_tokens / progress.phases["prefill_compute_time"],
            )

    async def _tokens(
        self,
        request: m.Generate,
        sequence: SequenceState,
        request_load: RequestLoad,
        progress: Progress,
        deadline: float,
    ) -> AsyncIterator[tuple[int, bool]]:
        """Tokens as they are drawn; (token, True) ends the text and is not part of it.

        Raises:
            DeadlineExceeded: the deadline passed before the text was complete.
        """
        sampling = request.sampling
        count = 0
        started = time.monotonic()
        began = [started]

        def draw() -> int:
            began[0] = time.monotonic()
            return self._engine.next_token(sequence, sampling)

        while count < sampling.max_tokens:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the deadline passed after {count} of {sampling.max_tokens} tokens"
                )
            token = await self._thread.run(draw)
            if token in self._engine.eos_token_ids and not sampling.ignore_eos:
                yield token, True
                return
            if not count:
                progress.phases["decode_queue_wait"] = began[0] - started
                progress.phases["first_token_emit_time"] = time.monotonic() - began[0]
                started = time.monotonic()
            count += 1
            yield token, False
            if count < sampling.max_tokens:
                await self._thread.run(self._engine.decode, sequence, token)
                request_load.decoded()
                per_token = (time.monotonic() - started) / count
                progress.phases["per_token_decode_time"] = per_token
                self.load.rates.update("tpot_s", per_token)

    async def _keep_locally(self, sequence: SequenceState, hashes: list[bytes]) -> None:
        def work() -> None:
            blocks = self._engine.export_blocks(sequence, 0, len(hashes))
            self._local_cache.insert(hashes, blocks)

        await self._thread.run(work)

    def _publish(self, progress: Progress) -> None:
        for name, seconds in progress.phases.items():
            self._on_phase(name, seconds)
        for transport, count in progress.bytes_read.items():
            self.counters[f"bytes_read:{transport}"] += count

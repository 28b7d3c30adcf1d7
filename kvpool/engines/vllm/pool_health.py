"""Whether the pool can be reached, learned from every call and from checks in the background.

While it cannot be reached, nothing waits for it: look-ups are misses and saves are dropped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, wait

import structlog

from kvpool.blocks.layout import Namespace
from kvpool.client.async_pool import AsyncPool
from kvpool.client.pool import Pool
from kvpool.engines.vllm.settings import VllmSettings
from kvpool.errors import REFUSALS, HashMismatch, KvpoolError, LayoutMismatch

log = structlog.get_logger(__name__)

LOOK_S = 2.0  # between two checks of a reachable pool
CALL_TIMEOUT_S = 2.0
WRONG = (LayoutMismatch, HashMismatch, *REFUSALS)  # trying again does not help


class PoolHealth:
    """Watches the connection to one pool, and registers the namespace there.

    Args:
        settings: the pool's address, this host's label, and the back-off after a failure.
    """

    def __init__(self, pool: Pool, settings: VllmSettings, namespace: Namespace) -> None:
        self.is_well = True  # until a call fails
        self.home = ""  # id of the node on this host
        self.refusal: KvpoolError | None = None  # set if the pool refuses this namespace
        self._name = settings.node or settings.conductor
        self._host_label = settings.host_label
        self._backoff_s = (settings.backoff_s, settings.max_backoff_s)
        self._namespace = namespace
        self._pool = pool
        self._has_conductor = not settings.node  # a single node does not list namespaces
        self._node_count = 0  # nodes in the last check
        self._watching: Future[None] | None = None

    def start(self, timeout_s: float) -> None:
        """Connect to the pool.

        If it does not answer within `timeout_s`, continue without it and keep trying.

        Raises:
            LayoutMismatch, HashMismatch: the pool has the model in another layout, or computes
                other hashes.
            Unauthenticated, Forbidden: the pool rejects the token.
        """
        try:
            self._pool.submit(self._look).result(timeout_s)
        except WRONG:
            raise
        except (KvpoolError, TimeoutError) as error:
            self.failed(error)
        else:
            with contextlib.suppress(KvpoolError, TimeoutError):  # only log lines
                self._pool.submit(self._log_obstacles).result(CALL_TIMEOUT_S)
        self._watching = self._pool.submit(self._watch)
        self._watching.add_done_callback(self._ended)

    def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()
            wait([self._watching], CALL_TIMEOUT_S)

    def answered(self) -> None:
        """Record that the pool answered a call."""
        if not self.is_well and self.refusal is None:
            self.is_well = True
            log.info("the pool answers again", pool=self._name)

    def failed(self, error: BaseException) -> None:
        """Record that the pool did not answer a call."""
        if self.is_well:
            self.is_well = False
            log.warning(
                "the pool cannot be reached: serving without it, trying again",
                pool=self._name,
                error=str(error) or type(error).__name__,
            )

    async def _log_obstacles(self, pool: AsyncPool) -> None:
        """Log what would otherwise prevent hits without a message."""
        if not self._node_count:
            log.warning(
                "the pool has no node: nothing is kept until one joins"
                " (kvpool node --conductor ADDRESS)",
                pool=self._name,
            )
        if not self._has_conductor:
            return
        for other in await pool.namespaces(timeout_s=CALL_TIMEOUT_S):
            if differing := differences(self._namespace, other):
                log.info(
                    "the pool knows this model in another configuration: no KV is shared with it",
                    namespace_id=other.namespace_id.hex()[:12],
                    differs=differing,
                )

    async def _look(self, pool: AsyncPool) -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await pool.register(self._namespace, timeout_s=CALL_TIMEOUT_S)
            await pool.connect(timeout_s=CALL_TIMEOUT_S)
            nodes = await pool.nodes(timeout_s=CALL_TIMEOUT_S)
        here = [
            info.descriptor.node_id
            for info in nodes
            if info.state == "live" and info.descriptor.host == self._host_label
        ]
        self.home = here[0] if here else ""
        self._node_count = len(nodes)

    def _ended(self, watching: Future[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            # A defect in kvpool: nothing would notice that the pool is gone or back.
            self.is_well = False
            log.error("the pool is no longer watched: serving without it", exc_info=error)

    async def _watch(self, pool: AsyncPool) -> None:
        first_s, longest_s = self._backoff_s
        pause_s = first_s
        while True:
            await asyncio.sleep(LOOK_S if self.is_well else pause_s)
            try:
                await self._look(pool)
            except WRONG as error:
                self.is_well = False
                self.refusal = error
                log.error("the pool refuses this engine: serving without it", error=str(error))
                return
            except (KvpoolError, TimeoutError) as error:
                if not self.is_well:
                    pause_s = min(longest_s, 2 * pause_s)
                self.failed(error)
            else:
                pause_s = first_s
                self.answered()


def differences(mine: Namespace, other: Namespace) -> str:
    """How two configurations of one model and tenant differ; "" if they do not.

    Salts are secret and not compared.
    """
    if (mine.model, mine.tenant) != (other.model, other.tenant):
        return ""
    (weights, _, way), (other_weights, _, other_way) = (
        space.revision.partition("+") for space in (mine, other)
    )
    differing = [
        f"{name}: {theirs} there, {ours} here"
        for name, ours, theirs in (
            ("revision", weights[:12], other_weights[:12]),
            ("hash_algorithm", mine.hash_algorithm, other.hash_algorithm),
            *(
                (name, getattr(mine.layout, name), getattr(other.layout, name))
                for name in ("dtype", "block_tokens", "tp_size", "order")
            ),
        )
        if ours != theirs
    ]
    if not differing and way != other_way:
        differing.append("vLLM's options")
    return "; ".join(differing)

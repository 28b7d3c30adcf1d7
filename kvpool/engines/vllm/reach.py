"""Whether the pool can be reached: learned from every call, and looked at in the background.

While it cannot, nobody waits for it: look-ups count as misses and saves are dropped at once, until the pool
answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError

import structlog

from kvpool.client.async_pool import AsyncPool
from kvpool.client.pool import Pool
from kvpool.errors import REFUSALS, HashMismatch, KvpoolError, LayoutMismatch
from kvpool.layout import Namespace

log = structlog.get_logger(__name__)

LOOK_S = 2.0  # between two looks
RETRY_S = 0.5
CALL_TIMEOUT_S = 2.0
WRONG = (LayoutMismatch, HashMismatch, *REFUSALS)  # trying again does not help


class Reach:
    """Looks after the connection to one pool, and registers the namespace there.

    Args:
        name: of the pool, for log lines.
        host_label: of this host; its node is asked first.
    """

    def __init__(self, pool: Pool, name: str, host_label: str, namespace: Namespace) -> None:
        self.is_well = True  # until something fails
        self.home = ""  # id of this host's node
        self.refusal: KvpoolError | None = None  # the pool will not have this namespace
        self._name = name
        self._host_label = host_label
        self._namespace = namespace
        self._pool = pool

    def start(self, timeout_s: float) -> None:
        """Meet the pool; after `timeout_s` go on without it, and keep trying.

        Raises:
            LayoutMismatch, HashMismatch: model, revision, tenant and salt stand there under another layout.
            Unauthenticated, Forbidden: it does not take our token.
        """
        try:
            self._pool.submit(self._look).result(timeout_s)
        except WRONG:
            raise
        except (KvpoolError, TimeoutError) as error:
            self.failed(error)
        self._future = self._pool.submit(self._watch)

    def close(self) -> None:
        """Look no more."""
        self._future.cancel()
        with contextlib.suppress(CancelledError, TimeoutError):
            self._future.result(CALL_TIMEOUT_S)

    def answered(self) -> None:
        """A call was answered."""
        if not self.is_well and self.refusal is None:
            self.is_well = True
            log.info("the pool answers again", pool=self._name)

    def failed(self, error: BaseException) -> None:
        """A call was not answered."""
        if self.is_well:
            self.is_well = False
            log.warning(
                "the pool cannot be reached: serving without it, trying again",
                pool=self._name,
                error=str(error) or type(error).__name__,
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

    async def _watch(self, pool: AsyncPool) -> None:
        while True:
            await asyncio.sleep(LOOK_S if self.is_well else RETRY_S)
            try:
                await self._look(pool)
            except WRONG as error:
                self.is_well = False
                self.refusal = error
                log.error("the pool refuses this engine: serving without it", error=str(error))
                return
            except (KvpoolError, TimeoutError) as error:
                self.failed(error)
            else:
                self.answered()

"""The node as the target of one-sided NIXL transfers: registers the arenas and makes progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from kvpool.transports.nixl_agent import NixlAgent, NixlUnavailable
from tiers.memory.arena import Arena
from tiers.memory.hbm_arena import DeviceArena

log = structlog.get_logger(__name__)

BUSY_PAUSE_S = 0.00005  # while a lease or reservation is young: bytes are moving
HELD_PAUSE_S = 0.0005  # while one is older
BUSY_FOR_S = 0.05
UPDATE_TIMEOUT_S = 30.0  # on RDMA the pages of a large arena are pinned one by one
IDLE_PAUSE_S = 0.01  # at most 1 % of a core; a peer's first contact waits as long


class NixlTarget:
    """Registers arenas with an agent that runs in a separate thread.

    Args:
        agent_name: unique per node and epoch.
        is_busy: whether transfers may be running.
        lasting: arenas that are never deregistered.


    Raises:
        NixlUnavailable: NIXL cannot be used in this process.
    """

    def __init__(
        self,
        agent_name: str,
        arenas: Sequence[Arena],
        is_busy: Callable[[], bool],
        *,
        loopback_only: bool,
        lasting: Sequence[DeviceArena] = (),
    ) -> None:
        self.agent_name = agent_name
        self.metadata = b""
        self.ucx: tuple[str, ...] = ()  # transports and devices (`kvpool.transports.ucx`)
        self._arenas = arenas
        self._lasting = lasting
        self._update = threading.Lock()  # one at a time
        self._is_updated = threading.Event()
        self._registered: dict[int, Any] = {}  # NIXL's handles, by arena id
        self._is_busy = is_busy
        self._loopback_only = loopback_only
        self._wake = threading.Event()
        self._is_stopped = False
        self._woken_at = 0.0
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool-nixl-target", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def is_alive(self) -> bool:
        """Whether the progress thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            agent = NixlAgent(self.agent_name, loopback_only=self._loopback_only)
            self.ucx = agent.ucx
            self._register(agent)
        except Exception as error:  # noqa: BLE001 - handed to the thread that made us
            self._error = error
            return
        finally:
            self._ready.set()
        while not self._is_stopped:
            if self._update.locked() and not self._is_updated.is_set():
                self._register_again(agent)
            agent.progress()
            if time.monotonic() - self._woken_at < BUSY_FOR_S:
                time.sleep(BUSY_PAUSE_S)
            elif self._is_busy():
                time.sleep(HELD_PAUSE_S)
            elif self._wake.wait(IDLE_PAUSE_S):
                self._wake.clear()

    def _register(self, agent: NixlAgent) -> None:
        wanted: list[Arena | DeviceArena] = [*self._arenas, *self._lasting]
        arenas = {arena.arena_id: arena for arena in wanted}
        for arena_id in self._registered.keys() - arenas.keys():
            agent.deregister(self._registered.pop(arena_id))
        for arena_id in arenas.keys() - self._registered.keys():
            arena = arenas[arena_id]
            self._registered[arena_id] = agent.register(
                arena.base, arena.size_bytes, arena.kind, arena.device_id
            )
        self.metadata = agent.metadata()

    def _register_again(self, agent: NixlAgent) -> None:
        try:
            self._register(agent)
        except Exception as error:  # noqa: BLE001 - handed to the thread that asked
            self._error = error
        finally:
            self._is_updated.set()

    def update(self, arenas: Sequence[Arena]) -> None:
        """Register new arenas and deregister removed ones; other transfers go on.

        Blocks for up to 10 ms, and longer while RDMA pins the pages.

        Raises:
            NixlUnavailable: NIXL refused, or its thread makes no progress.
        """
        with self._update:
            self._arenas, self._error = arenas, None
            self._is_updated.clear()
            self._wake.set()
            is_done = self._is_updated.wait(UPDATE_TIMEOUT_S)
            self._is_updated.set()
            if self._error is not None or not is_done:
                raise NixlUnavailable(
                    f"arenas cannot be registered: {self._error or 'no progress'}"
                )

    def wake(self) -> None:
        """Make progress at once: a new lease or reservation was granted (needed over TCP)."""
        self._woken_at = time.monotonic()
        self._wake.set()

    def close(self) -> None:
        """Stop the thread; peers see the agent as gone."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join(timeout=5)

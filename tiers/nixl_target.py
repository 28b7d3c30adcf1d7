"""The node as the target of one-sided NIXL transfers: registers the arenas, makes progress. Decides nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from kvpool.transports.nixl_agent import NixlAgent
from tiers.arena import Arena

log = structlog.get_logger(__name__)

BUSY_PAUSE_S = 0.00005  # while a lease or reservation is young: somebody is moving bytes now
HELD_PAUSE_S = 0.0005  # while one is held for longer
BUSY_FOR_S = 0.05
IDLE_PAUSE_S = 0.01  # 1 % of a core or less, and the first contact of a peer waits no longer


class NixlTarget:
    """Registers arenas with an agent that lives on a thread of its own.

    Args:
        agent_name: unique per node and epoch.
        is_busy: whether transfers may be under way now.

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
    ) -> None:
        self.agent_name = agent_name
        self.metadata = b""
        self._arenas = arenas
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
        """Whether progress is still being made."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            agent = NixlAgent(self.agent_name, loopback_only=self._loopback_only)
            for arena in self._arenas:
                agent.register(arena.base, arena.size_bytes)
            self.metadata = agent.metadata()
        except Exception as error:  # noqa: BLE001 - handed to the thread that made us
            self._error = error
            return
        finally:
            self._ready.set()
        while not self._is_stopped:
            agent.progress()
            if time.monotonic() - self._woken_at < BUSY_FOR_S:
                time.sleep(BUSY_PAUSE_S)
            elif self._is_busy():
                time.sleep(HELD_PAUSE_S)
            elif self._wake.wait(IDLE_PAUSE_S):
                self._wake.clear()

    def wake(self) -> None:
        """A lease or reservation was just given: over TCP its transfers need our progress at once."""
        self._woken_at = time.monotonic()
        self._wake.set()

    def close(self) -> None:
        """Stop making progress; peers see the agent as gone."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join(timeout=5)

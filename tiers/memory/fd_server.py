"""Hands the file descriptors of a node's arenas to local clients, over a Unix socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec
import structlog

from kvpool.errors import KvpoolError
from kvpool.transports.shm import ArenaHandout, ArenaRequest
from kvpool.wire.server import remove_stale_socket
from tiers.memory.arena import Arena

log = structlog.get_logger(__name__)

ASK_TIMEOUT_S = 1.0
MAX_REQUEST_BYTES = 4096


class FdServer:
    """Sends the arenas' file descriptors to processes of the same user, over a Unix socket.

    Args:
        check: raises a `KvpoolError` for a token that does not allow it.
    """

    def __init__(
        self,
        path: str,
        node_id: str,
        epoch: int,
        arenas: Sequence[Arena],
        check: Callable[[str], object] = lambda _token: None,
    ) -> None:
        self._check = check
        remove_stale_socket(path)
        self.path = path
        self._node_id = node_id
        self._epoch = epoch
        self._lock = threading.Lock()  # no arena is closed while its descriptor is sent
        self.offer(arenas)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="kvpool-arenas", daemon=True)
        self._thread.start()

    def offer(self, arenas: Sequence[Arena]) -> None:
        """Send these from now on. When this returns, the others may be closed."""
        handout = ArenaHandout(
            self._node_id,
            self._epoch,
            [arena.arena_id for arena in arenas],
            [arena.size_bytes for arena in arenas],
        )
        with self._lock:
            self._fds = [arena.fd for arena in arenas]
            self._handout = msgspec.msgpack.encode(handout)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with link:
                try:
                    link.settimeout(ASK_TIMEOUT_S)
                    asked = msgspec.msgpack.decode(link.recv(MAX_REQUEST_BYTES), type=ArenaRequest)
                    self._check(asked.token)
                    with self._lock:
                        socket.send_fds(link, [self._handout], self._fds)
                except OSError as error:
                    log.warning("a client left before it got the memory", error=str(error))
                except (msgspec.DecodeError, KvpoolError) as error:
                    log.warning("a client was refused the memory", error=str(error))

    def close(self) -> None:
        """Stop, and remove the socket."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=2)
        if os.path.exists(self.path):
            os.unlink(self.path)

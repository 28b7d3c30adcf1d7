"""Creates NIXL agents: the environment, loading the native libraries, and memory registration.

Measured with NIXL 1.5.1 (docs/measurements.md): a progress thread spins a whole core from Python,
so there is none; two threads must not share an agent; names of agents contain the epoch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any

from kvpool.errors import KvpoolError
from kvpool.transports import ucx

_preload_lock = threading.Lock()
_preloaded = False


class NixlUnavailable(KvpoolError):
    """NIXL cannot be used in this process."""

    code = "nixl_unavailable"


def prepare_environment(loopback_only: bool) -> None:
    """Set the variables that UCX reads when it is loaded. Variables that the user set stay.

    Args:
        loopback_only: keep UCX off every interface but `lo`. By default it binds all of them.
    """
    defaults = {
        "UCX_LOG_LEVEL": "error",
        "NIXL_LOG_LEVEL": "ERROR",  # INFO writes to stdout
        # TCP reads reach 3.0 to 5.3 GB/s with 1 MiB segments, 1.1 without.
        "UCX_TCP_TX_SEG_SIZE": "1m",
        "UCX_TCP_RX_SEG_SIZE": "1m",
    }
    if loopback_only:
        defaults["UCX_NET_DEVICES"] = "lo"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def load_nixl() -> Any:
    """Load the `nixl._api` module.

    If libibverbs is installed, a process that loaded NIXL's UCX dies of SIGSEGV in the C library's
    exit handlers, because the wheel bundles its own libnl-route. Loading the system's libnl-route
    first avoids it.

    Raises:
        NixlUnavailable: the package or its native libraries cannot be loaded.
    """
    global _preloaded
    with _preload_lock:
        if not _preloaded:
            with contextlib.suppress(OSError):
                ctypes.CDLL("libnl-route-3.so.200")  # not RTLD_GLOBAL: that crashes again
            _preloaded = True
    try:
        import nixl._api as api
    except ModuleNotFoundError as error:
        raise NixlUnavailable(
            f"NIXL is not installed ({error})", hint="pip install 'kvpool[nixl]'"
        ) from error
    except (ImportError, OSError) as error:
        raise NixlUnavailable(
            f"NIXL cannot be loaded: {error}", hint="see `kvpool doctor`"
        ) from error
    return api


class NixlAgent:
    """One NIXL agent with the UCX backend. Call it from one thread only.

    Args:
        name: unique in the pool and per start (node or client id plus epoch).
        loopback_only: keep UCX off every interface but `lo`.
    """

    def __init__(self, name: str, *, loopback_only: bool = True) -> None:
        prepare_environment(loopback_only)
        api = load_nixl()
        self.name = name
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"]
            )
            self.raw: Any = api.nixl_agent(name, config)
        except Exception as error:  # native errors come as several unrelated types
            raise NixlUnavailable(f"cannot make a NIXL agent: {error}") from error
        self.ucx = ucx.available()

    def register(
        self, address: int, size_bytes: int, kind: str = "dram", device_id: int = 0
    ) -> Any:
        """Register memory; returns the handle for `deregister`.

        Args:
            kind: "dram", or "vram" for memory of the device `device_id`.
        """
        return self.raw.register_memory([(address, size_bytes, device_id, "")], kind.upper())

    def deregister(self, handle: Any) -> None:
        """Undo `register`. This revokes nothing: reads under way continue."""
        self.raw.deregister_memory(handle)

    def metadata(self) -> bytes:
        """The bytes that a peer needs to reach this agent's registered memory."""
        return bytes(self.raw.get_agent_metadata())

    def progress(self) -> None:
        """Let UCX make progress.

        The target of one-sided operations must, on first contact and over TCP.
        """
        self.raw.get_new_notifs()

"""The transports that UCX has on this host, read from the library that NIXL has loaded.

NIXL does not say which transport UCX chose, but UCX uses the best one that both sides have, and
`ucp_context_print_info` lists what it has. This module creates a context for the list and frees it
at once (8 ms on a host without RDMA).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import structlog

from kvpool.errors import ConfigError

log = structlog.get_logger(__name__)

# Verbs: reliable, dynamic and unreliable connections, EFA, and GPU-initiated.
_RDMA = re.compile(r"(rc|dc|ud|srd|gga)(_|/|$)")
_WITHIN_HOST = re.compile(r"(cma|knem|xpmem|posix|sysv)/")
_RESOURCE = re.compile(r"^#\s+resource \d+\s+:.*-- (\S+)\s*$", re.MULTILINE)
_LIBRARY = re.compile(r"(/\S*/libucp[^/\s]*\.so\S*)")
_FEATURES, _RMA = 1, 2  # UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_RMA


class RdmaRequired(ConfigError):
    """RDMA is required, and UCX has none. Nothing falls back to TCP."""

    code = "rdma_required"


class _Params(ctypes.Structure):
    """`ucp_params_t`.

    UCX reads only the fields in the mask; `rest` is space for the fields of any version.
    """

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("rest", ctypes.c_byte * 1024),
    )


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """UCX's transports in this process as "transport/device", e.g. "tcp/eth0", "cma/memory".

    Call it after NIXL has loaded UCX. Empty, with a warning in the log, if UCX cannot be read.
    """
    try:
        path = _LIBRARY.search(Path("/proc/self/maps").read_text())
        if path is None:
            return ()
        return tuple(_RESOURCE.findall(_described(ctypes.CDLL(path[1]))))
    except (OSError, AttributeError) as error:
        log.warning("cannot read UCX's transports", error=str(error))
        return ()


def is_rdma(resource: str) -> bool:
    """Whether a resource from `available` uses RDMA."""
    return _RDMA.match(resource) is not None


def fabric(ours: Iterable[str], theirs: Iterable[str], *, is_same_host: bool) -> str:
    """What carries bytes between two processes: "rdma", "host" or "tcp"; "" if unknown.

    A peer that lists no transports is assumed to have the same as this process.
    """
    here, there = list(ours), list(theirs)
    there = there or here
    if is_same_host and any(_WITHIN_HOST.match(name) for name in here):
        return "host"
    if any(map(is_rdma, here)) and any(map(is_rdma, there)):
        return "rdma"
    return "tcp" if any(name.startswith("tcp/") for name in here) else ""


def require_rdma(resources: Iterable[str], what: str) -> None:
    """Check that some resource is RDMA.

    Raises:
        RdmaRequired: none is. The error lists the resources and the UCX variables that may limit
            them.
    """
    named = list(resources)
    if any(map(is_rdma, named)):
        return
    limits = [
        f"{name}={os.environ[name]}"
        for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_MODULES")
        if name in os.environ
    ]
    raise RdmaRequired(
        f"{what}.require_rdma is set, and UCX has no RDMA here: {', '.join(named) or 'nothing'}"
        + (f", under {', '.join(limits)}" if limits else ""),
        hint="see `kvpool doctor`; a process that binds to 127.0.0.1 uses no other device",
    )


def _described(ucp: ctypes.CDLL) -> str:
    """The text that `ucp_context_print_info` writes; empty if no context can be created."""
    pointer = ctypes.c_void_p
    for name, arguments in (
        ("ucp_init_version", (ctypes.c_uint, ctypes.c_uint, pointer, pointer, pointer)),
        ("ucp_context_print_info", (pointer, pointer)),
        ("ucp_cleanup", (pointer,)),
    ):
        getattr(ucp, name).argtypes = arguments
    ucp.ucp_context_print_info.restype = ucp.ucp_cleanup.restype = None
    libc = ctypes.CDLL(None)
    libc.open_memstream.argtypes, libc.open_memstream.restype = (pointer, pointer), pointer
    libc.fclose.argtypes = libc.free.argtypes = (pointer,)
    libc.free.restype = None
    version = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, version))
    context = pointer()
    params = _Params(field_mask=_FEATURES, features=_RMA)
    major, minor = version[0], version[1]
    if ucp.ucp_init_version(major, minor, ctypes.byref(params), None, ctypes.byref(context)):
        return ""
    text, size = pointer(), ctypes.c_size_t()
    try:
        stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
        if not stream:
            return ""
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        return ctypes.string_at(text, size.value).decode("utf-8", "replace") if text else ""
    finally:
        ucp.ucp_cleanup(context)
        libc.free(text)

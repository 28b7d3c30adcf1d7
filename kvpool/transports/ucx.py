"""Which of its transports UCX has here: asked of the library that NIXL has loaded, under the same environment.

NIXL does not say what UCX chose. But UCX takes the best that both sides have, and what it has it tells in
`ucp_context_print_info`; a context of our own is made for that, and at once given back (8 ms on a host without RDMA).
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

# One-sided verbs of every kind: reliable, dynamic and unreliable connections, EFA's, GPU-initiated ones.
_RDMA = re.compile(r"(rc|dc|ud|srd|gga)(_|/|$)")
_WITHIN_HOST = re.compile(r"(cma|knem|xpmem|posix|sysv)/")
_RESOURCE = re.compile(r"^#\s+resource \d+\s+:.*-- (\S+)\s*$", re.MULTILINE)
_LIBRARY = re.compile(r"(/\S*/libucp[^/\s]*\.so\S*)")
_FEATURES, _RMA = 1, 2  # UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_RMA


class RdmaRequired(ConfigError):
    """RDMA is asked for, and there is none; nothing falls back to TCP."""

    code = "rdma_required"


class _Params(ctypes.Structure):
    """`ucp_params_t`: only the fields that the mask names are read; the rest is room for those of any version."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("rest", ctypes.c_byte * 1024),
    )


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """What UCX has in this process, as "transport/device", for example "rc_mlx5/mlx5_0:1", "tcp/eth0", "cma/memory".

    Call it once NIXL's UCX is loaded. Empty where UCX cannot be asked, which is logged.
    """
    try:
        path = _LIBRARY.search(Path("/proc/self/maps").read_text())
        if path is None:
            return ()
        return tuple(_RESOURCE.findall(_described(ctypes.CDLL(path[1]))))
    except (OSError, AttributeError) as error:
        log.warning("UCX cannot be asked for its transports", error=str(error))
        return ()


def is_rdma(resource: str) -> bool:
    """Whether a resource, as `available` names it, moves bytes by RDMA."""
    return _RDMA.match(resource) is not None


def fabric(ours: Iterable[str], theirs: Iterable[str], *, is_same_host: bool) -> str:
    """By what bytes go between two processes: "rdma", "host" (shared memory, CMA), "tcp", or "" when unknown.

    A peer that tells nothing (an older one) is taken to have what we have.
    """
    here, there = list(ours), list(theirs)
    there = there or here
    if is_same_host and any(_WITHIN_HOST.match(name) for name in here):
        return "host"
    if any(map(is_rdma, here)) and any(map(is_rdma, there)):
        return "rdma"
    return "tcp" if any(name.startswith("tcp/") for name in here) else ""


def require_rdma(resources: Iterable[str], what: str) -> None:
    """Refuse to go on without RDMA.

    Raises:
        RdmaRequired: none of the resources is; says what there is, and why it might be.
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
        hint="see `kvpool doctor`; what binds to 127.0.0.1 alone is kept off every other device",
    )


def _described(ucp: ctypes.CDLL) -> str:
    """What `ucp_context_print_info` writes; empty when no context can be made."""
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

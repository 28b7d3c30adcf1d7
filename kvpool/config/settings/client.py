"""The settings of the client: an engine, a script or the command line."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field

from kvpool.config.settings.types import DEFAULT_CONDUCTOR, Addresses, CallerConfig, Seconds


class ClientConfig(CallerConfig):
    """How an engine, a script or the command line talks to the pool."""

    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR, description="wire address of one or of several, as in node.conductor"
    )
    conductor_http: Addresses = Field(
        "127.0.0.1:7801", description="HTTP address of one or of several, for `kvpool explain`"
    )
    host_label: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    transport: Literal["auto", "shm", "nixl"] = "auto"
    require_rdma: bool = Field(
        False, description="nodes on other hosts are reached by RDMA or not at all, never by TCP"
    )
    timeout_s: Seconds = 30.0
    verify_checksums: bool = Field(True, description="check every DRAM read, too (invariant 5)")

"""The settings of the client: an engine, a script or the command line."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field

from kvpool.config.settings.types import (
    DEFAULT_CONDUCTOR,
    Addresses,
    CallerConfig,
    HostLabel,
    Seconds,
)


class ClientConfig(CallerConfig):
    """How a worker, a script or the command line talks to the pool."""

    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR,
        description='wire address of the conductor, or of several, as "a:7800,b:7800"',
    )
    conductor_http: Addresses = Field(
        "127.0.0.1:7801",
        description="HTTP address of the conductor, or of several, for `kvpool explain`",
    )
    host_label: HostLabel = Field(default_factory=socket.gethostname)
    transport: Literal["auto", "shm", "nixl"] = Field(
        "auto",
        description="auto: shared memory to nodes on this host, NIXL to others; shm, nixl: that "
        "one only",
    )
    require_rdma: bool = Field(
        False, description="reach nodes on other hosts by RDMA only, never by TCP"
    )
    timeout_s: Seconds = Field(30.0, description="seconds that one call may take")
    verify_checksums: bool = Field(
        True, description="check the checksum of every block read from DRAM"
    )

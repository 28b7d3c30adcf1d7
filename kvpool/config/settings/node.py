"""The settings of a pool node."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kvpool.config.settings.types import (
    DEFAULT_CONDUCTOR,
    GIB,
    KIB,
    MIB,
    TIB,
    Bytes,
    EvictionPolicy,
    Fraction,
    NumaNodes,
    OptionalAddresses,
    OptionalPath,
    OptionalText,
    Paths,
    Port,
    Quotas,
    Seconds,
    ServerConfig,
    Transports,
)


class NodeConfig(ServerConfig):
    """A pool node: the memory and disk it lends, and the bounds of its promises."""

    node_id: OptionalText = Field(
        None, max_length=128, description="None: kept with the data, else a fresh UUID"
    )
    host_label: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=128,
        description="processes with the same label share memory",
    )
    wire_port: Port = 7810
    http_port: Port = 7811
    grpc_port: Port = 7812
    conductor: OptionalAddresses = Field(
        DEFAULT_CONDUCTOR,
        description='its wire address, or those of several, as in "a:7800,b:7800": the node reports to '
        "the first that answers; None: stand alone",
    )
    dram_bytes: Bytes = Field(2 * GIB, ge=MIB, le=64 * TIB)
    arenas: int = Field(
        1,
        ge=1,
        le=64,
        description="pieces of DRAM; a whole one is what can be given back at run time",
    )
    hugepages: Literal["auto", "off", "thp", "2m", "1g"] = Field(
        "auto", description="auto: transparent ones if they can be had; 2m, 1g: reserved ones"
    )
    numa_nodes: NumaNodes = Field(
        (), description="arenas take their memory from these in turn; empty: from wherever"
    )
    slab_bytes: Bytes = Field(64 * MIB, ge=64 * KIB, le=16 * GIB)
    hbm_bytes: Bytes = Field(0, ge=0, le=64 * TIB, description="device memory to lend; 0: none")
    hbm_device: str = Field(
        "cuda:0", min_length=1, description='whose memory; "cpu" stands in for one, to try it out'
    )
    nvme_directory: OptionalPath = Field(None, description="the NVMe tier's, on one device")
    nvme_directories: Paths = Field(
        (), max_length=64, description="instead: one on each device, which share blocks evenly"
    )
    nvme_bytes: Bytes = Field(0, ge=0, le=1024 * TIB, description="on all devices together")
    nvme_dtype: Literal["as_is", "fp8"] = Field(
        "as_is", description="fp8: 16 and 32 bit floats go to NVMe as e4m3, which loses precision"
    )
    data_dir: OptionalPath = Field(None, description="what survives a restart; None: nothing does")
    runtime_dir: OptionalPath = Field(None, description="sockets; None: a temporary one")
    tenant: str = Field(
        "", max_length=512, description="lend everything to this tenant alone; needs tokens_path"
    )
    isolated_dram_bytes: Bytes = Field(
        256 * MIB,
        ge=0,
        le=64 * TIB,
        description="DRAM that each isolated tenant gets here beside dram_bytes, in a process of its own; 0: none",
    )
    transports: Transports = ("shm", "nixl")
    require_rdma: bool = Field(
        False, description="do not start where UCX has no RDMA, and copy from nobody over TCP"
    )
    lease_s: Seconds = Field(30.0, description="longest lease that is granted")
    reservation_s: Seconds = Field(60.0, description="longest reservation that is granted")
    grace_s: Seconds = Field(2.0, description="wait beyond a lease's deadline (invariant 3)")
    quarantine_s: Seconds = Field(60.0, description="longest that any transfer may last (inv. 2)")
    high_watermark: Fraction = Field(0.95, description="share of a tier at which eviction starts")
    low_watermark: Fraction = Field(0.85, description="share of a tier at which eviction stops")
    hbm_high_watermark: Fraction = Field(
        0.9, description="share of HBM at which its cold blocks are copied down to DRAM"
    )
    hbm_low_watermark: Fraction = Field(0.7, description="share of HBM down to which they are")
    eviction: EvictionPolicy = Field(
        "prefix-lru", description="order in which DRAM and HBM are evicted"
    )
    nvme_eviction: EvictionPolicy = Field("prefix-lru", description="the same for NVMe")
    retention_share: float = Field(
        0.5, ge=0, le=1, description="share of a tier that protected blocks may have"
    )
    quotas: Quotas = Field(
        {},
        description="by tenant or namespace id (hex): guaranteed share of each tier, or size of DRAM",
    )
    write_through: bool = Field(True, description="write to NVMe at commit, not at eviction")
    drain_on_stop: bool = Field(
        False, description="on SIGTERM, first move blocks that stand nowhere else to other nodes"
    )
    drain_s: Seconds = Field(30.0, description="longest that draining on stop may take")
    max_prefetch_blocks: int = Field(
        1024, ge=1, le=1_000_000, description="prefetches waiting at once; more are declined"
    )
    fsync: Literal["always", "interval", "never"] = "interval"
    fsync_interval_s: Seconds = 1.0
    uses_interval_s: Seconds = Field(
        30.0, description="how often NVMe notes in which order its blocks were used, for a restart"
    )
    max_frame_bytes: Bytes = Field(64 * MIB, ge=64 * KIB, le=2 * GIB)

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The directories of the NVMe tier, one a device."""
        return self.nvme_directories or ((self.nvme_directory,) if self.nvme_directory else ())

    @property
    def arena_count(self) -> int:
        """Arenas to begin with: one for each NUMA node at least."""
        return max(self.arenas, len(self.numa_nodes))

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.slab_bytes % (4 * KIB):
            raise ValueError(f"slab_bytes {self.slab_bytes} is not a multiple of 4096")
        if self.dram_bytes < self.slab_bytes:
            raise ValueError(
                f"dram_bytes {self.dram_bytes} is less than one slab of {self.slab_bytes}"
            )
        if self.dram_bytes // self.arena_count < self.slab_bytes:
            raise ValueError(
                f"dram_bytes {self.dram_bytes} in {self.arena_count} arenas is less than "
                f"one slab of {self.slab_bytes} in each"
            )
        if self.require_rdma and "nixl" not in self.transports:
            raise ValueError("require_rdma needs the transport nixl, which is not among transports")
        if self.nvme_directory and self.nvme_directories:
            raise ValueError(
                "nvme_directory and nvme_directories are both set: name all in the list"
            )
        if len(set(self.nvme_directories)) < len(self.nvme_directories):
            raise ValueError("nvme_directories names one twice")
        if bool(self.nvme_bytes) != bool(self.nvme_paths):
            raise ValueError(
                "nvme_bytes and nvme_directory (or nvme_directories) are set together or not at all"
            )
        if self.nvme_paths and self.nvme_bytes // len(self.nvme_paths) < self.slab_bytes:
            raise ValueError(
                f"nvme_bytes {self.nvme_bytes} on {len(self.nvme_paths)} devices is less than "
                f"one slab of {self.slab_bytes} on each"
            )
        if 0 < self.hbm_bytes < self.slab_bytes:
            raise ValueError(
                f"hbm_bytes {self.hbm_bytes} is less than one slab of {self.slab_bytes}"
            )
        for prefix in ("", "hbm_"):
            low = getattr(self, f"{prefix}low_watermark")
            high = getattr(self, f"{prefix}high_watermark")
            if low >= high:
                raise ValueError(
                    f"{prefix}low_watermark {low:g} must lie below {prefix}high_watermark {high:g}"
                )
        return self

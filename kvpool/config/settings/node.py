"""The settings of a pool node."""

from __future__ import annotations

import socket
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
    HostLabel,
    NumaNodes,
    OptionalAddresses,
    OptionalPath,
    OptionalText,
    Paths,
    Port,
    Quotas,
    Seconds,
    Section,
    ServerConfig,
    Transports,
)


class NodeAdvanced(Section):
    """What few installations change: memory layout, times, watermarks and limits."""

    arenas: int = Field(
        1, ge=1, le=64, description="pieces of DRAM; a shrinking node gives back whole ones"
    )
    numa_nodes: NumaNodes = Field(
        (), description="NUMA nodes that arenas take memory from, in turn; empty: any"
    )
    slab_bytes: Bytes = Field(
        64 * MIB, ge=64 * KIB, le=16 * GIB, description="memory given to one slot size at a time"
    )
    hbm_device: str = Field(
        "cuda:0",
        min_length=1,
        description='device that lends node.hbm_bytes; "cpu" imitates one, for trials',
    )
    nvme_dtype: Literal["as_is", "fp8"] = Field(
        "as_is", description="fp8: store 16 and 32 bit floats on NVMe as e4m3, with less precision"
    )
    runtime_dir: OptionalPath = Field(
        None, description="directory of sockets; none: a temporary one"
    )
    isolated_dram_bytes: Bytes = Field(
        256 * MIB,
        ge=0,
        le=64 * TIB,
        description="DRAM for each isolated tenant, in a process of its own, beside "
        "node.dram_bytes; "
        "0: start none",
    )
    lease_s: Seconds = Field(30.0, description="longest lease that the node grants, in seconds")
    reservation_s: Seconds = Field(
        60.0, description="longest reservation that the node grants, in seconds"
    )
    grace_s: Seconds = Field(
        2.0, description="seconds that blocks stay in place after a lease's deadline"
    )
    quarantine_s: Seconds = Field(
        60.0,
        description="seconds that slots of an expired reservation stay unused; longer than any "
        "transfer",
    )
    high_watermark: Fraction = Field(
        0.95,
        description="share of DRAM in use at which cold blocks are written to NVMe, if "
        "write_through is false",
    )
    low_watermark: Fraction = Field(
        0.85, description="share of DRAM that these writes make free to evict down to"
    )
    hbm_high_watermark: Fraction = Field(
        0.9, description="share of HBM in use at which cold blocks are copied to DRAM"
    )
    hbm_low_watermark: Fraction = Field(
        0.7, description="share of HBM that these copies make free to evict down to"
    )
    nvme_eviction: EvictionPolicy = Field("prefix-lru", description="eviction policy of NVMe")
    retention_share: float = Field(
        0.5, ge=0, le=1, description="largest share of a tier that protected blocks may take"
    )
    write_through: bool = Field(
        True, description="write blocks to NVMe soon after commit; false: when DRAM is nearly full"
    )
    drain_s: Seconds = Field(30.0, description="longest time for node.drain_on_stop, in seconds")
    max_prefetch_blocks: int = Field(
        1024, ge=1, le=1_000_000, description="blocks that may wait for prefetch; more are declined"
    )
    fsync: Literal["always", "interval", "never"] = Field(
        "interval", description="when data on NVMe is flushed to the device"
    )
    fsync_interval_s: Seconds = Field(
        1.0, description="seconds between flushes, for fsync interval"
    )
    access_checkpoint_s: Seconds = Field(
        30.0, description="seconds between records of the order in which NVMe blocks were used"
    )
    max_frame_bytes: Bytes = Field(
        64 * MIB, ge=64 * KIB, le=2 * GIB, description="largest message on the wire and in gRPC"
    )

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if self.slab_bytes % (4 * KIB):
            raise ValueError(f"slab_bytes {self.slab_bytes} is not a multiple of 4096")
        for prefix in ("", "hbm_"):
            low = getattr(self, f"{prefix}low_watermark")
            high = getattr(self, f"{prefix}high_watermark")
            if low >= high:
                raise ValueError(
                    f"{prefix}low_watermark {low:g} must be below {prefix}high_watermark {high:g}"
                )
        return self


class NodeConfig(ServerConfig):
    """A pool node: where it listens, and the memory and disk that it lends."""

    node_id: OptionalText = Field(
        None,
        max_length=128,
        description="its name in the pool; none: a UUID, kept in node.data_dir if that is set",
    )
    host_label: HostLabel = Field(default_factory=socket.gethostname)
    wire_port: Port = Field(7810, description="port of the wire protocol; 0: any free port")
    http_port: Port = Field(7811, description="port of HTTP; 0: any free port")
    grpc_port: Port = Field(7812, description="port of gRPC; 0: any free port")
    conductor: OptionalAddresses = Field(
        DEFAULT_CONDUCTOR,
        description='wire address of the conductor, or of several, as "a:7800,b:7800": the node '
        "reports "
        "to the first that answers; none: run alone",
    )
    dram_bytes: Bytes = Field(2 * GIB, ge=MIB, le=64 * TIB, description="DRAM to lend")
    hugepages: Literal["auto", "off", "thp", "2m", "1g"] = Field(
        "auto",
        description="auto: transparent huge pages if possible; thp: require them; 2m, 1g: "
        "reserved pages",
    )
    hbm_bytes: Bytes = Field(0, ge=0, le=64 * TIB, description="device memory to lend; 0: none")
    nvme_directories: Paths = Field(
        (),
        max_length=64,
        description='directories of the NVMe tier, one on each device, as "/a,/b"; empty: no NVMe',
    )
    nvme_bytes: Bytes = Field(
        0, ge=0, le=1024 * TIB, description="NVMe to lend, on all devices together"
    )
    data_dir: OptionalPath = Field(
        None, description="directory of what survives a restart; none: nothing does"
    )
    tenant: str = Field(
        "", max_length=512, description="lend to this tenant only; needs node.tokens_path"
    )
    transports: Transports = Field(
        ("shm", "nixl"), description="how clients move blocks: shm (same host), nixl (all)"
    )
    require_rdma: bool = Field(
        False, description="do not start without RDMA, and never copy over TCP"
    )
    eviction: EvictionPolicy = Field("prefix-lru", description="eviction policy of DRAM and HBM")
    quotas: Quotas = Field(
        {},
        description="guaranteed share of each tier, or size of DRAM, by tenant or namespace id: "
        '"acme=0.25,bolt=2GiB"',
    )
    drain_on_stop: bool = Field(
        False, description="on SIGTERM, first move blocks that are nowhere else to other nodes"
    )
    advanced: NodeAdvanced = Field(default_factory=NodeAdvanced)

    @property
    def arena_count(self) -> int:
        """Arenas to begin with: one for each NUMA node at least."""
        return max(self.advanced.arenas, len(self.advanced.numa_nodes))

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        slab_bytes = self.advanced.slab_bytes
        if self.dram_bytes < slab_bytes:
            raise ValueError(f"dram_bytes {self.dram_bytes} is less than one slab of {slab_bytes}")
        if self.dram_bytes // self.arena_count < slab_bytes:
            raise ValueError(
                f"dram_bytes {self.dram_bytes} in {self.arena_count} arenas is less than "
                f"one slab of {slab_bytes} in each"
            )
        if self.require_rdma and "nixl" not in self.transports:
            raise ValueError("require_rdma needs the transport nixl, which is not among transports")
        if len(set(self.nvme_directories)) < len(self.nvme_directories):
            raise ValueError("nvme_directories names one twice")
        if bool(self.nvme_bytes) != bool(self.nvme_directories):
            raise ValueError("nvme_bytes and nvme_directories are set together or not at all")
        if self.nvme_bytes and self.nvme_bytes // len(self.nvme_directories) < slab_bytes:
            raise ValueError(
                f"nvme_bytes {self.nvme_bytes} on {len(self.nvme_directories)} devices is less "
                f"than one slab of {slab_bytes} on each"
            )
        if 0 < self.hbm_bytes < slab_bytes:
            raise ValueError(f"hbm_bytes {self.hbm_bytes} is less than one slab of {slab_bytes}")
        return self

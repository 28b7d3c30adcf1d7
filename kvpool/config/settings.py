"""The settings of every process as typed, frozen values: names, units, defaults and bounds.

No file or environment is read here; `kvpool.config.loader` finds the values and builds these from them. Sizes
accept text such as "2GiB"; everything binds to 127.0.0.1 unless told otherwise.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from kvpool.config.engine_server import EngineServer

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNITS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: object) -> int:
    """A size in bytes from a whole number or a text with a unit.

    "64MiB", "64M" and "64m" are binary, "64MB" is decimal. Raises `ValueError` (which pydantic turns
    into a report about the field) for anything else, fractions of a byte included.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError('not a size: write a whole number of bytes, or "512MiB", "2GiB", "1.5TB"')
    size = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if size != int(size):
        raise ValueError(f"{value} is not a whole number of bytes")
    return int(size)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; `ValueError` when it is neither."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: an IPv6 address stands in brackets, as in [::1]:7800")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def _none_from_text(value: object) -> object:
    """Environment and flags carry only text; an empty one, "none" or "null" unsets a setting."""
    return (
        None if isinstance(value, str) and value.strip().lower() in ("", "none", "null") else value
    )


def _addresses(value: object) -> object:
    value = _none_from_text(value)
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        addresses = [address.strip() for address in value.split(",")]
        for address in addresses:
            split_address(address)
        value = ",".join(addresses)
    return value


def _path(value: object) -> object:
    value = _none_from_text(value)
    return Path(value).expanduser() if isinstance(value, str) else value


def _list_from_text(value: object) -> object:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.strip("[]").split(",") if item.strip())
    return value


def _paths(value: object) -> object:
    value = _list_from_text("" if _none_from_text(value) is None else value)
    return tuple(map(_path, value)) if isinstance(value, (list, tuple)) else value


EVICTION_POLICIES = (
    "prefix-lru",
    "lru",
    "lfu",
    "fifo",
    "s3fifo",
    "gdsf",
    "arc",
)  # of tiers.policies


STRATEGIES = (  # of conductor.scheduling.strategies
    "kv-centric",
    "cache-aware",
    "least-loaded",
    "round-robin",
    "random",
    "dynamo",
    "sglang",
)


def _one_of(kind: str, names: tuple[str, ...]) -> Callable[[object], object]:
    """A check that a text is one of `names`, which tells the nearest of them."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in names:
            near = get_close_matches(value, names, n=1)
            hint = f"did you mean {near[0]}? It must be" if near else "it must be"
            raise ValueError(f"unknown {kind}; {hint} one of {', '.join(names)}")
        return value

    return check


def _quota(value: object) -> float | int:
    """A share of each tier ("0.25", "25%", any number up to 1), or a size of DRAM ("2GiB")."""
    if isinstance(value, str) and value.strip().endswith("%"):
        value = float(value.strip()[:-1]) / 100
    elif isinstance(value, str) and re.fullmatch(r"\s*[01]?\.\d+\s*|\s*1\s*", value):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    size = parse_bytes(value)
    if size < 1:
        raise ValueError("a quota is a share in (0, 1] or a size")
    return size


def _quotas(value: object) -> object:
    if isinstance(value, str):  # "tenant=0.25,other=2GiB"
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        value = {owner.strip(): quota for owner, _, quota in pairs}
    if not isinstance(value, dict):
        return value
    quotas = {owner: _quota(quota) for owner, quota in value.items()}
    if not all(quotas):
        raise ValueError("a quota needs the tenant or namespace id that it is for")
    if sum(quota for quota in quotas.values() if isinstance(quota, float)) > 1 + 1e-9:
        raise ValueError("quotas add up to more than the whole tier")
    return quotas


def _priorities(value: object) -> object:
    if isinstance(value, str):  # "tenant=high,other=low"
        pairs = [item.partition("=") for item in value.strip("{}").split(",") if item.strip()]
        return {tenant.strip(): priority.strip() for tenant, _, priority in pairs}
    return value


def _engines(value: object) -> object:
    value = [] if _none_from_text(value) is None else value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"engines as text are a JSON list: {error}") from None
    return tuple(value) if isinstance(value, list) else value


def _each_once(engines: tuple[EngineServer, ...]) -> tuple[EngineServer, ...]:
    ids = [engine.worker_id for engine in engines]
    if len(set(ids)) < len(ids):
        raise ValueError("an engine server is named twice")
    return engines


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Port = Annotated[int, Field(ge=0, le=65_535)]  # 0: any free port
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Priority = Literal["low", "normal", "high"]
Priorities = Annotated[dict[str, Priority], BeforeValidator(_priorities)]
Credit = Annotated[float, Field(ge=0, le=10)]
Addresses = Annotated[str, BeforeValidator(_addresses)]  # one or several, with commas
OptionalAddresses = Annotated[str | None, BeforeValidator(_addresses)]
OptionalText = Annotated[str | None, BeforeValidator(_none_from_text)]
OptionalPath = Annotated[Path | None, BeforeValidator(_path)]
Strategy = Annotated[str, BeforeValidator(_one_of("scheduling strategy", STRATEGIES))]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_paths)]
EvictionPolicy = Annotated[str, BeforeValidator(_one_of("eviction policy", EVICTION_POLICIES))]
Quotas = Annotated[dict[str, float | int], BeforeValidator(_quotas)]
Transport = Literal["shm", "nixl"]
Engines = Annotated[
    tuple[EngineServer, ...],
    BeforeValidator(_engines),
    AfterValidator(_each_once),
    Field(max_length=1024),
]
NumaNode = Annotated[int, Field(ge=0, le=1023)]
NumaNodes = Annotated[tuple[NumaNode, ...], BeforeValidator(_list_from_text), Field(max_length=64)]
Transports = Annotated[tuple[Transport, ...], BeforeValidator(_list_from_text), Field(min_length=1)]

DEFAULT_CONDUCTOR = "127.0.0.1:7800"


class Section(BaseModel):
    """Base of all sections: frozen, and without a place for unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class CallerConfig(Section):
    """What a process shows to those that it calls."""

    token: SecretStr = Field(SecretStr(""), description="shown to the servers that it calls")
    tls_ca: OptionalPath = Field(
        None, description="PEM file of CAs; set, calls are encrypted and servers' names checked"
    )
    tls_cert: OptionalPath = Field(None, description="PEM file of its own certificate")
    tls_key: OptionalPath = Field(None, description="PEM file of that certificate's key")

    @model_validator(mode="after")
    def _certificate_has_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are set together or not at all")
        return self


class ServerConfig(CallerConfig):
    """What every process that listens has. Its certificate serves both its callers and those it calls."""

    host: str = Field("127.0.0.1", min_length=1, description="address to bind")
    tokens_path: OptionalPath = Field(
        None, description="YAML file of the tokens that are accepted; None: nobody is asked for one"
    )
    tls_client_ca: OptionalPath = Field(
        None, description="PEM file of CAs; set, callers need a certificate of one (mTLS)"
    )
    allow_insecure: bool = Field(
        False, description="listen beyond 127.0.0.1 without tokens: only on a trusted network"
    )
    advertise_host: OptionalText = Field(
        None, description="address that peers use; None: host, or the machine's name for 0.0.0.0"
    )

    @property
    def announced_host(self) -> str:
        """What peers are told: a wildcard is no address, so the machine's name stands in for it."""
        if self.advertise_host is not None:
            return self.advertise_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host

    @model_validator(mode="after")
    def _clients_meet_tls(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {n: p for n, p in vars(self).items() if n.endswith("_port") and p}
        if len(set(ports.values())) < len(ports):
            listed = ", ".join(f"{name}={port}" for name, port in ports.items())
            raise ValueError(f"each service needs a port of its own: {listed}")
        return self


class ConductorConfig(ServerConfig):
    """The control plane: where it listens, when it gives members up, what it promises and refuses."""

    wire_port: Port = 7800
    http_port: Port = 7801
    grpc_port: Port = 7802
    model_path: OptionalPath = Field(
        None, description="directory of the tokenizer; None: prompts must be token ids"
    )
    heartbeat_s: Seconds = 1.0
    suspect_after_s: Seconds = Field(3.0, description="silence before a member gets no new work")
    dead_after_s: Seconds = Field(10.0, description="silence before its blocks are forgotten")
    slo_ttft_s: Seconds = 30.0
    slo_tpot_s: Seconds = 1.0
    profile: OptionalPath = Field(
        None,
        description="YAML or JSON that predictions start from (`kvpool worker profile`); None: a small "
        "model on a CPU. Measurements correct it either way",
    )
    strategy: Strategy = Field("kv-centric", description="how workers are chosen")
    admission: Literal["none", "arrival", "predicted"] = Field(
        "predicted",
        description="refuse early by objectives: never, by the load of now, by that predicted for later",
    )
    strategy_seed: int = Field(0, description="of the strategies that draw lots")
    balancing_threshold: float = Field(
        1.5,
        ge=0,
        description="kv-centric: copy a prefix toward a worker when the pool has more than this many "
        "times what stands near it; 0: never",
    )
    stall_weight: float = Field(
        0.1,
        ge=0,
        le=1000,
        description="kv-centric: of a second that a sequence which decodes stands still for a prefill "
        "beside it, against a second of the request; 0 disregards others, more prefills elsewhere",
    )
    replications_at_once: int = Field(
        2, ge=0, le=1024, description="background copies of hot prefixes under way; 0: none"
    )
    prefetch: bool = Field(
        True, description="move blocks off disks and toward a worker before it reads them"
    )
    session_ttl_s: Seconds = Field(
        3600.0, description="how long the blocks of a conversation's last request are remembered"
    )
    max_sessions: int = Field(10_000, ge=1, le=10_000_000, description="conversations remembered")
    dynamo_temperature: float = Field(
        0.0, ge=0, le=1000, description="dynamo: 0 takes the cheapest worker, more spreads requests"
    )
    dynamo_prefill_scale: float = Field(
        1.0, ge=0, le=1000, description="dynamo: weight of prefill against blocks in use by decodes"
    )
    dynamo_engine_credit: Credit = Field(1.0, description="dynamo: of a block in the engine")
    dynamo_host_credit: Credit = Field(0.75, description="dynamo: of one in memory of the host")
    dynamo_remote_credit: Credit = Field(0.5, description="dynamo: of one on another host")
    dynamo_disk_credit: Credit = Field(0.25, description="dynamo: of one on a disk")
    sglang_imbalance_requests: int = Field(
        32, ge=0, description="sglang: queues differ by more than this, and ..."
    )
    sglang_imbalance_ratio: float = Field(
        1.1, ge=1, le=1000, description="... the longest is more than this many times the shortest"
    )
    min_remote_prefill_tokens: int = Field(
        192, ge=0, description="shorter prompts (after reuse) are prefilled by the decode worker"
    )
    move_roles: bool = Field(
        False, description="move workers between prefill and decode by measured SLO violations"
    )
    roles_window_s: Seconds = Field(30.0, description="outcomes older than this count no more")
    roles_hold_s: Seconds = Field(5.0, description="how long a breach lasts before a worker moves")
    roles_cooldown_s: Seconds = Field(30.0, description="after a move, before the next")
    roles_min_requests: int = Field(10, ge=1, description="fewer in the window say nothing")
    policy_path: OptionalPath = Field(
        None, description="YAML file of the routing policy, read again when it changes"
    )
    engines: Engines = Field(
        (),
        description="OpenAI-compatible engine servers (vLLM, SGLang) that serve beside kvpool's workers",
    )
    engine_check_s: Seconds = Field(1.0, description="between two looks at each of them")
    always_reuse: bool = Field(
        False,
        description="read what the pool has even where recomputation is predicted to be faster",
    )
    request_timeout_s: Seconds = 120.0
    prefill_timeout_s: Seconds = Field(
        60.0, description="longest wait for a remote prefill before the decode worker does it"
    )
    first_token_timeout_s: Seconds = Field(
        60.0, description="longest wait for a decode worker's first token before another is tried"
    )
    max_active_requests: int = Field(
        256, ge=1, le=1_000_000, description="requests in work at once; more wait"
    )
    max_queued_requests: int = Field(
        256,
        ge=0,
        le=100_000,
        description="requests that wait because they cannot start now but in time; 0: none does",
    )
    max_queue_wait_s: Seconds = Field(
        30.0, description="longest wait there; slo_ttft_s, less the predicted TTFT, bounds it, too"
    )
    default_priority: Priority = Field(
        "normal", description="class of requests that name none: low, normal or high"
    )
    tenant_priorities: Priorities = Field(
        {},
        description="class by tenant: the default of its requests, and the highest they may have",
    )
    max_body_bytes: Bytes = Field(8 * MIB, ge=KIB, le=GIB)
    max_prompt_tokens: int = Field(131_072, ge=1, le=16_777_216)
    max_output_tokens: int = Field(16_384, ge=1, le=1_048_576)
    remembered_blocks: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 30,
        description="blocks whose last news is kept (8 bytes each), to give every miss a reason",
    )
    max_index_blocks: int = Field(4_000_000, ge=1_000, description="bound of the index's memory")
    index: Literal["memory", "redis"] = Field(
        "memory",
        description="redis: index, members and namespaces live in Redis or Valkey, so that several "
        "conductors serve one pool and any may die",
    )
    pool: str = Field(
        "default",
        pattern=r"[A-Za-z0-9_.-]{1,64}",
        description="conductors of one name and one Redis share a pool",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss:// (TLS) or unix://; of Sentinels or Cluster nodes several, with "
        "commas; no password in it, see redis_password",
    )
    redis_mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    redis_sentinel_name: str = Field("mymaster", description="what the Sentinels call the server")
    redis_username: OptionalText = None
    redis_password: SecretStr = SecretStr("")
    redis_timeout_s: Seconds = Field(
        0.5,
        description="longest wait for Redis; after one in vain the conductor goes on without it",
    )

    @model_validator(mode="after")
    def _no_password_in_url(self) -> Self:
        for url in self.redis_url.split(","):
            authority = url.partition("://")[2].partition("/")[0]
            if ":" in authority.rpartition("@")[0]:
                raise ValueError("redis_url holds a password: put it into redis_password")
        return self

    @model_validator(mode="after")
    def _silence_grows(self) -> Self:
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError(
                "heartbeat_s < suspect_after_s < dead_after_s must hold, got "
                f"{self.heartbeat_s:g}, {self.suspect_after_s:g}, {self.dead_after_s:g}"
            )
        return self


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
    protected_share: float = Field(
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


class WorkerConfig(ServerConfig):
    """A prefill or decode worker around one engine, and whose blocks it makes."""

    worker_id: OptionalText = Field(None, max_length=128, description="None: a fresh UUID")
    role: Literal["prefill", "decode", "both"] = "both"
    engine: Literal["transformers", "fake"] = Field(
        "transformers", description="fake: sleeps instead of computing, to try out scheduling"
    )
    model: OptionalText = Field(None, description="directory or GGUF file; needed to start")
    model_name: OptionalText = Field(
        None, description="name that users ask for; None: from the model"
    )
    device: str = Field("cpu", min_length=1)
    threads: int = Field(
        0, ge=0, le=4096, description="CPU threads of the engine; 0: its own choice"
    )
    host_label: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    wire_port: Port = 7820
    http_port: Port = 7821
    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR, description="wire address of one or of several, as in node.conductor"
    )
    may_change_role: bool = Field(
        True, description="the conductor may have it prefill instead of decode, and back"
    )
    kv_events: str = Field(
        "", max_length=512, description="where its engine publishes KV events, as tcp://host:5557"
    )
    kv_replay: str = Field(
        "", max_length=512, description="where it replays them, as tcp://host:5558"
    )
    max_concurrent: int = Field(4, ge=1, le=4096)
    max_model_tokens: int = Field(8192, ge=16, le=16_777_216)
    block_tokens: int = Field(64, ge=1, le=65_536)
    local_cache_tokens: int = Field(
        0, ge=0, description="capacity of the engine's own prefix cache; 0: none"
    )
    tenant: str = Field("", max_length=512)
    salt: SecretStr = Field(SecretStr(""), description="separates users; mixed into every hash")
    hash_algorithm: Literal["xxh3-128", "sha256"] = "xxh3-128"


class FakeEngineConfig(Section):
    """What a worker with `worker.engine=fake` pretends: how long things take, and how large its KV is."""

    prefill_base_s: float = Field(5e-3, ge=0, le=60)
    prefill_token_s: float = Field(2e-5, ge=0, le=1, description="per new token")
    prefill_attention_s: float = Field(
        2e-10, ge=0, le=1, description="per pair of a new token and one that it attends to"
    )
    tpot_base_s: float = Field(0.02, ge=0, le=60)
    tpot_context_s: float = Field(1e-8, ge=0, le=1, description="per token of KV in the batch")
    tpot_sequence_s: float = Field(5e-4, ge=0, le=60, description="per sequence of the batch")
    layers: int = Field(2, ge=1, le=1024)
    bytes_per_token: int = Field(512, ge=16, le=MIB, description="of KV, over all layers")

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.bytes_per_token % (8 * self.layers):
            raise ValueError("bytes_per_token must be a multiple of 8 x layers")
        return self


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


class LogConfig(Section):
    """What is logged, and how it is written (always to stderr)."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class Settings(Section):
    """All sections; a process uses those of its role."""

    conductor: ConductorConfig = Field(default_factory=ConductorConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    fake_engine: FakeEngineConfig = Field(default_factory=FakeEngineConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)
    log: LogConfig = Field(default_factory=LogConfig)


def shown(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings as plain JSON values, for people: a secret that is set reads `***`."""
    plain: dict[str, dict[str, Any]] = settings.model_dump(mode="json")
    for name, section in settings:
        for key, value in section:
            if isinstance(value, SecretStr):
                plain[name][key] = "***" if value.get_secret_value() else ""
    return plain

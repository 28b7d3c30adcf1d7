"""The types of settings (sizes, addresses, lists, choices), and the settings of all servers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

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
    """Read a size in bytes from a whole number or a text with a unit.

    "64MiB", "64M" and "64m" are binary, "64MB" is decimal. Raises `ValueError` for anything else,
    and for fractions of a byte.
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
    """Split "host:port" or "[v6]:port". Raises `ValueError` if it is neither."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address in brackets, as in [::1]:7800")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def _none_from_text(value: object) -> object:
    """None for an empty text, "none" and "null", as the environment and flags write it."""
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
    """Make a check that a text is one of `names`. Its error suggests the nearest name."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in names:
            near = get_close_matches(value, names, n=1)
            hint = f"did you mean {near[0]}? It must be" if near else "it must be"
            raise ValueError(f"unknown {kind}; {hint} one of {', '.join(names)}")
        return value

    return check


def _quota(value: object) -> float | int:
    """Read a share of each tier ("0.25", "25%", any number up to 1), or a size of DRAM ("2GiB")."""
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


def _objectives(value: object) -> object:
    if isinstance(value, str):  # "tenant=0.5/0.05,other=2": TTFT/TPOT in seconds
        pairs = [item.partition("=") for item in value.strip("{}").split(",") if item.strip()]
        value = {tenant.strip(): objective for tenant, _, objective in pairs}
    return value


class Objective(BaseModel):
    """A tenant's objectives in seconds; None where it has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_s: Annotated[float, Field(ge=0, le=86_400)] | None = None
    tpot_s: Annotated[float, Field(ge=0, le=86_400)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, str):  # "0.5/0.05"
            ttft_s, _, tpot_s = (part.strip() for part in value.partition("/"))
            return {"ttft_s": ttft_s or None, "tpot_s": tpot_s or None}
        return value


def _engines(value: object) -> object:
    value = [] if _none_from_text(value) is None else value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"write engines as a JSON list: {error}") from None
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
Objectives = Annotated[dict[str, Objective], BeforeValidator(_objectives)]
OptionalSeconds = Annotated[Seconds | None, BeforeValidator(_none_from_text)]
Credit = Annotated[float, Field(ge=0, le=10)]
Addresses = Annotated[str, BeforeValidator(_addresses)]  # one or several, with commas
OptionalAddresses = Annotated[str | None, BeforeValidator(_addresses)]
OptionalText = Annotated[str | None, BeforeValidator(_none_from_text)]
OptionalPath = Annotated[Path | None, BeforeValidator(_path)]
Strategy = Annotated[
    str,
    BeforeValidator(_one_of("scheduling strategy", STRATEGIES)),
    Field(json_schema_extra={"enum": list(STRATEGIES)}),
]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_paths)]
EvictionPolicy = Annotated[
    str,
    BeforeValidator(_one_of("eviction policy", EVICTION_POLICIES)),
    Field(json_schema_extra={"enum": list(EVICTION_POLICIES)}),
]
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

HostLabel = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        description="name of this machine; processes with the same label share memory",
    ),
]

DEFAULT_CONDUCTOR = "127.0.0.1:7800"


class Section(BaseModel):
    """Base of all sections. A section is frozen and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class CallerConfig(Section):
    """The settings of a process that calls servers."""

    token: SecretStr = Field(
        SecretStr(""), description="token to send to the servers that it calls"
    )
    tls_ca: OptionalPath = Field(
        None, description="PEM file of CAs; if set, calls use TLS and check the servers' names"
    )
    tls_cert: OptionalPath = Field(None, description="PEM file of its own certificate")
    tls_key: OptionalPath = Field(None, description="PEM file of the key of tls_cert")

    @model_validator(mode="after")
    def _certificate_has_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are set together or not at all")
        return self


class ServerConfig(CallerConfig):
    """The settings of a process that listens.

    It shows `tls_cert` to its callers and to those it calls.
    """

    host: str = Field("127.0.0.1", min_length=1, description="address to bind")
    tokens_path: OptionalPath = Field(
        None, description="YAML file of the tokens that it accepts; none: it asks for no token"
    )
    tls_client_ca: OptionalPath = Field(
        None, description="PEM file of CAs; if set, callers need a certificate of one (mTLS)"
    )
    allow_insecure: bool = Field(
        False, description="listen beyond 127.0.0.1 without tokens; for a trusted network only"
    )
    advertise_host: OptionalText = Field(
        None, description="address that peers use; none: host, or for 0.0.0.0 the machine's name"
    )

    @property
    def announced_host(self) -> str:
        """The address for peers: `advertise_host`, else `host`, else the machine's name."""
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

"""The settings of every process as typed, frozen values: names, units, defaults and bounds.

No file or environment is read here; `kvpool.config.loader` finds the values and builds these from them. Sizes
accept text such as "2GiB"; everything binds to 127.0.0.1 unless told otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SecretStr

from kvpool.config.settings.client import ClientConfig
from kvpool.config.settings.conductor import ConductorConfig
from kvpool.config.settings.node import NodeConfig
from kvpool.config.settings.types import (
    DEFAULT_CONDUCTOR,
    EVICTION_POLICIES,
    GIB,
    MIB,
    STRATEGIES,
    Addresses,
    Bytes,
    CallerConfig,
    OptionalPath,
    OptionalText,
    Seconds,
    Section,
    ServerConfig,
    parse_bytes,
    split_address,
)
from kvpool.config.settings.worker import FakeEngineConfig, WorkerConfig

__all__ = [
    "DEFAULT_CONDUCTOR",
    "EVICTION_POLICIES",
    "GIB",
    "MIB",
    "STRATEGIES",
    "Addresses",
    "Bytes",
    "CallerConfig",
    "ClientConfig",
    "ConductorConfig",
    "FakeEngineConfig",
    "LogConfig",
    "NodeConfig",
    "OptionalPath",
    "OptionalText",
    "Seconds",
    "Section",
    "ServerConfig",
    "Settings",
    "WorkerConfig",
    "parse_bytes",
    "shown",
    "split_address",
]


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

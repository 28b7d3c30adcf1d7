"""The settings of every process: names, descriptions, defaults and bounds.

`kvpool.config.loader` reads the values from files, the environment and flags.
`kvpool.config.reference` writes docs/settings.md from the descriptions. What few installations
change is in `SECTION.advanced`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, Literal, NamedTuple

from pydantic import Field, SecretStr
from pydantic.fields import FieldInfo

from kvpool.config.settings.client import ClientConfig
from kvpool.config.settings.conductor import ConductorAdvanced, ConductorConfig
from kvpool.config.settings.node import NodeAdvanced, NodeConfig
from kvpool.config.settings.types import (
    DEFAULT_CONDUCTOR,
    EVICTION_POLICIES,
    GIB,
    MIB,
    STRATEGIES,
    Addresses,
    Bytes,
    CallerConfig,
    Objective,
    Objectives,
    OptionalPath,
    OptionalSeconds,
    OptionalText,
    Seconds,
    Section,
    ServerConfig,
    parse_bytes,
    split_address,
)
from kvpool.config.settings.worker import FakeEngineConfig, WorkerAdvanced, WorkerConfig

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
    "ConductorAdvanced",
    "ConductorConfig",
    "FakeEngineConfig",
    "LogConfig",
    "NodeAdvanced",
    "NodeConfig",
    "Objective",
    "Objectives",
    "OptionalPath",
    "OptionalSeconds",
    "OptionalText",
    "Seconds",
    "Section",
    "ServerConfig",
    "Setting",
    "Settings",
    "WorkerAdvanced",
    "WorkerConfig",
    "each_setting",
    "parse_bytes",
    "shown",
    "split_address",
]


class LogConfig(Section):
    """What is logged to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least important messages that are logged"
    )
    format: Literal["console", "json"] = Field("console", description="how a message is written")


class Settings(Section):
    """All sections; a process uses those of its role."""

    conductor: ConductorConfig = Field(default_factory=ConductorConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    fake_engine: FakeEngineConfig = Field(default_factory=FakeEngineConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)
    log: LogConfig = Field(default_factory=LogConfig)


class Setting(NamedTuple):
    """One key with its value and its declaration."""

    key: str  # dotted, as in "node.advanced.lease_s"
    value: Any
    field: FieldInfo


def each_setting(config: Section, section: str = "") -> Iterator[Setting]:
    """Every setting in `config`, those of nested sections too.

    Args:
        section: dotted name of `config`, which begins every key.
    """
    for name, field in type(config).model_fields.items():
        key, value = f"{section}.{name}" if section else name, getattr(config, name)
        if isinstance(value, Section):
            yield from each_setting(value, key)
        else:
            yield Setting(key, value, field)


def shown(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings as plain JSON values, for people. A secret that is set reads `***`."""
    plain: dict[str, dict[str, Any]] = settings.model_dump(mode="json")
    for key, value, _ in each_setting(settings):
        if isinstance(value, SecretStr):
            *sections, name = key.split(".")
            content: dict[str, Any] = reduce(getitem, sections, plain)
            content[name] = "***" if value.get_secret_value() else ""
    return plain

"""What every engine's backend can be told: where the pool is, and how to speak to it. Values only.

Engines hand such settings over as a plain mapping (vLLM's extra config, SGLang's, LMCache's adapter parameters).
An unknown key is an error that names the nearest known one, never ignored.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, model_validator

from kvpool.blocks.layout import HashAlgorithm
from kvpool.client import AsyncPool, Pool
from kvpool.config.settings import DEFAULT_CONDUCTOR, Addresses, CallerConfig, OptionalText, Seconds
from kvpool.errors import ConfigError, brief, did_you_mean
from kvpool.wire.credentials import credentials_of


class EngineSettings(CallerConfig):
    """What all engines share; each adds its own by inheriting."""

    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR, description="wire address of one or of several, as in node.conductor"
    )
    node: OptionalText = Field(
        None, description="wire address of one node; set, no conductor is asked"
    )
    host_label: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    transport: Literal["auto", "shm", "nixl"] = "auto"
    require_rdma: bool = Field(
        False, description="nodes on other hosts are reached by RDMA or not at all, never by TCP"
    )
    verify_checksums: bool = Field(True, description="check every DRAM read, too (invariant 5)")
    tenant: str = Field("", max_length=512, description="whose blocks they are, as in the token")
    salt: SecretStr = Field(
        SecretStr(""), description="engines with different ones never find each other's blocks"
    )
    hash_algorithm: HashAlgorithm = Field(
        "xxh3-128", description="sha256 where users might craft collisions"
    )
    backoff_s: Seconds = Field(
        0.5, description="after the pool proved unreachable all is a miss for so long; doubles"
    )
    max_backoff_s: Seconds = Field(15.0, description="longest such time")

    @model_validator(mode="after")
    def _backoff_is_ordered(self) -> Self:
        if self.backoff_s > self.max_backoff_s:
            raise ValueError("backoff_s is longer than max_backoff_s")
        return self

    def pool_arguments(self, timeout_s: float) -> dict[str, Any]:
        """Keyword arguments of `Pool` and `AsyncPool`.

        Raises:
            ConfigError: a file of TLS cannot be used.
        """
        return {
            "conductor": None if self.node else self.conductor,
            "node": self.node,
            "host_label": self.host_label,
            "transport": self.transport,
            "timeout_s": timeout_s,
            "verify_checksums": self.verify_checksums,
            "credentials": credentials_of(self),
            "require_rdma": self.require_rdma,
        }

    def open_pool(self, timeout_s: float) -> Pool:
        """A blocking client of the pool; connects when it is first used. Raises as `pool_arguments`."""
        return Pool(**self.pool_arguments(timeout_s))

    def open_async_pool(self, timeout_s: float) -> AsyncPool:
        """The same for asyncio: call it on the loop that shall use it."""
        return AsyncPool(**self.pool_arguments(timeout_s))


S = TypeVar("S", bound=EngineSettings)


def read_settings(kind: type[S], given: Mapping[str, Any], source: str) -> S:
    """Settings from what an engine handed over.

    Args:
        source: where it stood, for messages, e.g. "kv_connector_extra_config".

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), or a value cannot be accepted. Values
            of secrets are not quoted.
    """
    known = list(kind.model_fields)
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{source}: unknown setting {brief(key)!r}", hint=did_you_mean(key, known)
            )
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            key = ".".join(map(str, item["loc"])) or "together"
            problems.append(f"{key}: {item['msg'].removeprefix('Value error, ')}")
        raise ConfigError(f"{source}: {'; '.join(problems)}") from None

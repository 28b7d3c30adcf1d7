"""The settings that all engine backends share: where the pool is, and how to talk to it.

Engines pass settings as a plain mapping (vLLM's and SGLang's extra config, LMCache's adapter
parameters). An unknown key is an error that names the nearest known key.
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
    """Settings of every engine backend. Each backend inherits them and adds its own."""

    conductor: Addresses = Field(
        DEFAULT_CONDUCTOR, description="wire address of a conductor, or several separated by commas"
    )
    node: OptionalText = Field(None, description="wire address of one node, instead of a conductor")
    host_label: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=128,
        description="label of this machine; shared memory is used with nodes of the same label",
    )
    transport: Literal["auto", "shm", "nixl"] = Field(
        "auto", description="auto; shm or nixl to allow only that one"
    )
    require_rdma: bool = Field(
        False, description="reach nodes on other hosts by RDMA only, never by TCP"
    )
    verify_checksums: bool = Field(True, description="verify checksums of DRAM reads, too")
    tenant: str = Field("", max_length=512, description="owner of the blocks, as in the token")
    salt: SecretStr = Field(
        SecretStr(""), description="engines with different salts never find each other's blocks"
    )
    hash_algorithm: HashAlgorithm = Field(
        "xxh3-128", description="sha256 if users might craft collisions"
    )
    backoff_s: Seconds = Field(0.5, description="pause after the pool did not answer; it doubles")
    max_backoff_s: Seconds = Field(15.0, description="longest such pause")

    @model_validator(mode="after")
    def _backoff_is_ordered(self) -> Self:
        if self.backoff_s > self.max_backoff_s:
            raise ValueError("backoff_s is longer than max_backoff_s")
        return self

    def pool_arguments(self, timeout_s: float) -> dict[str, Any]:
        """Keyword arguments of `Pool` and `AsyncPool`.

        Raises:
            ConfigError: a TLS file cannot be used.
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
        """A blocking client of the pool. It connects on first use. Raises as `pool_arguments`."""
        return Pool(**self.pool_arguments(timeout_s))

    def open_async_pool(self, timeout_s: float) -> AsyncPool:
        """The same for asyncio. Call it on the loop that uses the client."""
        return AsyncPool(**self.pool_arguments(timeout_s))


S = TypeVar("S", bound=EngineSettings)


def read_settings(kind: type[S], given: Mapping[str, Any], source: str) -> S:
    """Check the settings that an engine passed.

    Args:
        source: where the settings come from, for messages, e.g. "kv_connector_extra_config".

    Raises:
        ConfigError: a key is unknown (the error names the nearest known key), or a value is
            invalid. The error does not quote secrets.
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

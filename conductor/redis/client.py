"""The connection to Redis or Valkey: one server, Sentinels, or a Cluster.

Every call has a deadline.
After a failure, calls fail at once without being sent until a probe succeeds, so that a Redis that
is down or slow does not delay requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog
from redis import asyncio as aioredis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisClusterException, RedisError

from conductor.redis.scripts import Script
from kvpool.errors import ConfigError, Unavailable

log = structlog.get_logger(__name__)

RedisMode = Literal["standalone", "sentinel", "cluster"]
MAX_CONNECTIONS = 64


@dataclass(slots=True, frozen=True)
class RedisTarget:
    """Which Redis to use.

    `url` may list several Sentinels or Cluster nodes, separated by commas.
    """

    url: str
    mode: RedisMode = "standalone"
    sentinel_name: str = "mymaster"
    username: str | None = None
    password: str | None = None


class RedisClient:
    """Runs scripts and commands, each within `timeout_s`.

    Args:
        timeout_s: longest time of a call, including the time to connect.

    Raises:
        ConfigError: the URL is not valid.
    """

    def __init__(self, target: RedisTarget, *, timeout_s: float = 0.5) -> None:
        self.timeout_s = timeout_s
        self.failures = 0
        self.down_since: float | None = None  # monotonic seconds
        self.why_down = ""
        self._target = target
        self._client: Any = _client(target, timeout_s)

    @property
    def is_up(self) -> bool:
        """Whether Redis replied to the last call."""
        return self.down_since is None

    async def run(self, script: Script, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """Run a script and return its result.

        Raises:
            Unavailable: Redis is down, or did not reply in time.
        """
        try:
            return await self.command("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self.command("EVAL", script.source, len(keys), *keys, *args)

    async def command(self, name: str, *args: Any) -> Any:
        """Run a command and return its result. Raises as `run`."""
        if self.down_since is not None:
            raise Unavailable(f"Redis is down: {self.why_down}")
        return await self._call(name, *args)

    async def probe(self) -> bool:
        """Try a Redis that is down; return whether this probe found it up again."""
        if self.down_since is None:
            return False
        try:
            await self._call("PING")
        except Unavailable:
            return False
        log.warning("Redis is up again", after_s=round(time.monotonic() - self.down_since, 1))
        self.down_since, self.why_down = None, ""
        return True

    async def identity(self) -> str:
        """The replication id of the stored data. It changes with a restart or a failover.

        Raises:
            Unavailable: Redis is down, or did not reply in time.
        """
        if self._target.mode != "cluster":
            info = await self.command("INFO", "replication")
            return str(info["master_replid"])
        nodes = await self._call("INFO", "replication", target_nodes=RedisCluster.PRIMARIES)
        return ",".join(sorted(str(info["master_replid"]) for info in nodes.values()))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._client.execute_command(name, *args, **options)
        except NoScriptError:
            raise
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            self._failed(str(error) or f"no reply within {self.timeout_s:g} s")
            raise Unavailable(
                f"Redis did not reply: {self.why_down}", hint="check conductor.redis_url"
            ) from error

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self.why_down = reason
        if self.down_since is None:
            self.down_since = time.monotonic()
            log.error("Redis is down; continuing with local state", reason=reason)


def _client(target: RedisTarget, timeout_s: float) -> Any:
    # A connection that a restart broke fails only when it is used, so try once more on a new one.
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "username": target.username,
        "password": target.password,
    }
    urls = [url.strip() for url in target.url.split(",") if url.strip()]
    try:
        parts = [urlsplit(url) for url in urls]
        if target.mode == "standalone":
            [url] = urls
            return aioredis.Redis.from_url(
                url, retry=retry, max_connections=MAX_CONNECTIONS, **options
            )
        hosts = [(part.hostname or "127.0.0.1", part.port or 6379) for part in parts]
    except ValueError as error:
        raise ConfigError(f"conductor.redis_url {target.url!r}: {error}") from error
    if parts[0].scheme == "rediss":
        options["ssl"] = True
    if target.mode == "sentinel":
        sentinel = Sentinel(hosts, **options)  # type: ignore[no-untyped-call]
        return sentinel.master_for(target.sentinel_name, retry=retry)
    nodes = [aioredis.cluster.ClusterNode(host, port) for host, port in hosts]
    return RedisCluster(startup_nodes=nodes, retry=retry, require_full_coverage=False, **options)

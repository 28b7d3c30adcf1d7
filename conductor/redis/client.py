"""The connection to Redis or Valkey: one server, Sentinels, or a Cluster; a deadline on every call.

After a failure calls fail at once, without being sent, until a probe is answered again: a Redis that is
gone or slow must cost each request nothing. What is stored there is not this module's business.
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
    """Which Redis. `url`: of Sentinels or Cluster nodes there may be several, with commas."""

    url: str
    mode: RedisMode = "standalone"
    sentinel_name: str = "mymaster"
    username: str | None = None
    password: str | None = None


class RedisClient:
    """Runs scripts and commands, each within `timeout_s`.

    Args:
        timeout_s: longest that a call may take, connecting included.
        probe_s: how often a Redis that does not answer is tried again; `probe` is to be called as often.

    Raises:
        ConfigError: the URL cannot be understood.
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
        """Whether the last call was answered."""
        return self.down_since is None

    async def run(self, script: Script, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """What the script returned.

        Raises:
            Unavailable: it did not answer in time, or is down.
        """
        try:
            return await self.command("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self.command("EVAL", script.source, len(keys), *keys, *args)

    async def command(self, name: str, *args: Any) -> Any:
        """What the command returned. Raises: as `run`."""
        if self.down_since is not None:
            raise Unavailable(f"Redis is down: {self.why_down}")
        return await self._call(name, *args)

    async def probe(self) -> bool:
        """Try a Redis that is down; True when it answers again, by this probe."""
        if self.down_since is None:
            return False
        try:
            await self._call("PING")
        except Unavailable:
            return False
        log.warning("Redis answers again", after_s=round(time.monotonic() - self.down_since, 1))
        self.down_since, self.why_down = None, ""
        return True

    async def identity(self) -> str:
        """Names the history of what is stored: another after a restart or a failover.

        Raises:
            Unavailable: as `run`.
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
            self._failed(str(error) or f"no answer within {self.timeout_s:g} s")
            raise Unavailable(
                f"Redis did not answer: {self.why_down}", hint="see conductor.redis_url"
            ) from error

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self.why_down = reason
        if self.down_since is None:
            self.down_since = time.monotonic()
            log.error("Redis is down, going on from what is held here", reason=reason)


def _client(target: RedisTarget, timeout_s: float) -> Any:
    # A connection that a restart broke is only noticed in use: one more try, on a new one.
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

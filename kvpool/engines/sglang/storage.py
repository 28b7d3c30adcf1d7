"""`KVPoolStorage`: HiCache's storage backend on a pool (docs/sglang.md).

An exception or None would end SGLang's I/O threads. So every call here returns a value within its
deadline, and every failure is a miss, counted and logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvpool.blocks.hashing import MAX_HASHES
from kvpool.engines.sglang.hits import Wanted, combined_hits
from kvpool.engines.sglang.host_pages import is_logical
from kvpool.engines.sglang.identity import identify
from kvpool.engines.sglang.leases import LoadLeases
from kvpool.engines.sglang.metrics import BackendMetrics
from kvpool.engines.sglang.page_spaces import PageSpace, check_supported, page_space
from kvpool.engines.sglang.settings import SOURCE, SGLangSettings
from kvpool.engines.shared.circuit_breaker import CircuitBreaker, says_pool_is_down
from kvpool.engines.shared.settings import read_settings
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    HashMismatch,
    KvpoolError,
    LayoutMismatch,
    NoRoom,
    Unavailable,
    WrongByteCount,
)

log = logging.getLogger("kvpool.sglang")
T = TypeVar("T")

KV = PoolName.KV.value


class KVPoolStorage(HiCacheStorage):
    """Pages of SGLang's host pools in a kvpool.

    A page is a block, and a tensor-parallel rank's share of it is a part. A page is a hit once all
    ranks have stored it, so all ranks find the same pages. Side pools of hybrid models have their
    own namespaces.

    Args:
        storage_config: SGLang's configuration, with kvpool's settings in `extra_config`.
        kwargs: unused; SGLang passes a dict as the second argument.

    Raises:
        ConfigError: a setting is wrong, or this instance is not supported. The pool need not be
            reachable.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._settings = read_settings(SGLangSettings, storage_config.extra_config or {}, SOURCE)
        check_supported(storage_config, self._settings)
        self._config = storage_config
        self._identity = identify(self._settings, storage_config)
        self._metrics = BackendMetrics(storage_config.tp_rank)
        self._reads, self._writes = (
            CircuitBreaker(self._settings.backoff_s, self._settings.max_backoff_s) for _ in range(2)
        )
        self._spaces: dict[str, PageSpace] = {}
        self._logical: set[str] = set()  # pools without memory
        self._is_closed = False
        self._warned_of_prefix_keys = False
        self._pool = self._settings.open_pool(self._settings.load_timeout_s)
        self._leases = LoadLeases(
            self._pool.release, self._settings.lease_s, self._settings.max_leased_pages
        )

    # ------------------------------------------------------------ host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register SGLang's main host pool. Raises ConfigError: its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register the main pool or a side pool by name. Raises as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, _text(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Register the namespaces with the pool. If it cannot be reached, SGLang starts without it.

        Raises:
            LayoutMismatch: the pool has the model in another layout, and `on_mismatch` is "refuse".
            HashMismatch: the pool computes other hashes than this process.
        """
        for space in self._spaces.values():
            try:
                self._pool.register(space.namespace, timeout_s=self._settings.lookup_timeout_s)
            except (LayoutMismatch, HashMismatch):
                raise
            except KvpoolError as error:
                self._unreached(self._reads, "start", error)
                log.warning("kvpool: SGLang starts without the pool: %s", error)
                return
            log.info(
                "kvpool: pages of %s go to namespace %s, %d bytes each of %d part(s)",
                space.name,
                space.namespace.name,
                space.namespace.layout.part_bytes,
                space.namespace.layout.tp_size,
            )

    def _register(self, host_pool: Any, name: str) -> None:
        known = self._spaces.get(name)
        if known is not None and known.pages.pool is host_pool:
            return
        if is_logical(host_pool):
            self._logical.add(name)
            return
        space = page_space(host_pool, name, self._config, self._settings, self._identity)
        self._spaces[name] = space
        self._logical.discard(name)
        for tensor in space.pages.memory:
            if tensor.is_contiguous():
                self._pool.register_memory(tensor)

    # ------------------------------------------------------------ looking up

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many leading pages the pool has. Leases them for the load that follows."""

        def look_up() -> int:
            found = self._hold_leading(self._space(KV), keys)
            self._metrics.pages("lookup", KV, hit=found, miss=len(keys) - found)
            return found

        return self._guarded("lookup", self._reads, 0, look_up)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many leading pages all pools can restore. Leases the pages that this takes."""

        def look_up() -> PoolTransferResult:
            wanted = Wanted.by(pool_transfers or [])
            is_anchor = KV in self._logical
            kv_found = len(keys) if is_anchor else self._hold_leading(self._space(KV), keys)
            self._metrics.pages("lookup", KV, hit=kv_found, miss=len(keys) - kv_found)
            found = combined_hits(
                keys, kv_found, wanted, self._hold_leading_of, self._hold_all_of, self._resident_of
            )
            for name, count in found.by_pool.items():
                if name != KV:
                    self._metrics.pages("lookup", name, hit=count, miss=kv_found - count)
            return PoolTransferResult(found.pages, found.by_pool, found.restorable)

        return self._guarded("lookup", self._reads, PoolTransferResult(0, {}, []), look_up)

    def exists(self, key: str) -> bool:
        """Whether the pool has one page."""
        return self.batch_exists([key]) == 1

    def _hold_leading_of(self, name: str, keys: Sequence[str]) -> int:
        return self._hold_leading(self._space(name), keys)

    def _hold_all_of(self, name: str, keys: Sequence[str]) -> bool:
        return self._hold_leading(self._space(name), keys) == len(keys)

    def _resident_of(self, name: str, keys: Sequence[str]) -> list[bool]:
        space = self._space(name)
        timeout_s = self._settings.lookup_timeout_s
        return self._pool.exists(space.namespace, space.hashes(keys), timeout_s=timeout_s)

    def _hold_leading(self, space: PageSpace, keys: Sequence[str]) -> int:
        """Lease the leading pages that the pool has. Returns how many."""
        hashes = space.hashes(keys[:MAX_HASHES])
        if not hashes:
            return 0
        now = time.monotonic()
        self._leases.expire(now)
        if self._leases.holds(hashes, now):
            return len(hashes)
        deadline = now + self._settings.lookup_timeout_s
        # If a node is gone, the first attempt fails, and the second one leaves the node out.
        for patience_s in (self._settings.lookup_timeout_s / 2, None):
            try:
                pinned = self._pool.pin(
                    space.namespace,
                    hashes,
                    ttl_s=self._settings.lease_s,
                    part=space.part,
                    timeout_s=patience_s or max(0.001, deadline - time.monotonic()),
                )
            except (Unavailable, DeadlineExceeded):
                if patience_s is None:
                    raise
            else:
                break
        self._leases.hold(hashes, pinned, time.monotonic())
        return pinned.found

    # ------------------------------------------------------------ loading and storing

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the main host pool. Pages after the first miss are misses, too."""
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the main host pool.

        Pages that the pool has or receives count as stored.
        """
        return self._store(KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """`batch_get_v1` for several pools."""
        return {t.name: self._load(_text(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """`batch_set_v1` for several pools."""
        return {
            t.name: self._store(_text(t.name), t.keys or [], t.host_indices, extra_info)
            for t in transfers
        }

    def _load(
        self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        if name in self._logical:
            return [True] * len(keys)

        def load() -> list[bool]:
            space = self._space(name)
            hashes = space.hashes(keys)
            try:
                started = time.monotonic()
                # Not `is_disposable`: SGLang reuses the memory of a missing page at once, and a
                # transfer that was given up may still arrive.
                result = self._pool.get(
                    space.namespace,
                    hashes,
                    space.pages.spans(len(keys), _needed(host_indices, name)),
                    part=space.part,
                    timeout_s=self._settings.load_timeout_s,
                )
                took_s = time.monotonic() - started
            finally:
                self._leases.loaded(hashes)
            found = result.found
            self._metrics.pages("load", name, hit=found, miss=len(keys) - found)
            self._metrics.moved("load", name, found, space.pages.page_bytes, took_s)
            if found < len(keys):
                text = f"{len(keys) - found} of {len(keys)} pages of {name}: {result.miss_reason}"
                self._metrics.trouble("load", result.miss_reason, text)
            return [True] * found + [False] * (len(keys) - found)

        return self._guarded("load", self._reads, [False] * len(keys), load) if keys else []

    def _store(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        if name in self._logical:
            return [True] * len(keys)

        def store() -> list[bool]:
            space = self._space(name)
            if not space.is_writer:
                return [True] * len(keys)  # another rank stores the same bytes
            started = time.monotonic()
            try:
                result = self._pool.put(
                    space.namespace,
                    space.hashes(keys),
                    space.pages.spans(len(keys), _needed(host_indices, name)),
                    parent=self._parent(space, extra_info),
                    part=space.part,
                    timeout_s=self._settings.store_timeout_s,
                )
            except NoRoom as error:
                self._metrics.pages("store", name, rejected=len(keys))
                self._metrics.trouble("store", error.code, str(error))
                return [False] * len(keys)
            took_s = time.monotonic() - started
            kept = len(keys) - result.rejected  # the rejected pages are the last ones
            self._metrics.pages(
                "store",
                name,
                stored=result.stored,
                existing=result.existing + result.in_progress,
                rejected=result.rejected,
            )
            self._metrics.moved("store", name, result.stored, space.pages.page_bytes, took_s)
            if result.rejected:
                text = f"no room for {result.rejected} of {len(keys)} pages of {name}"
                self._metrics.trouble("store", NoRoom.code, text)
            return [True] * kept + [False] * result.rejected

        return self._guarded("store", self._writes, [False] * len(keys), store) if keys else []

    def _parent(self, space: PageSpace, extra_info: HiCacheStorageExtraInfo | None) -> bytes:
        """The page before the first, so that suffixes are evicted first.

        Empty if SGLang does not say.
        """
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if prefix:
            return space.hashes(prefix[-1:])[0]
        if prefix is None and not self._warned_of_prefix_keys:
            self._warned_of_prefix_keys = True
            log.warning(
                "kvpool: SGLang does not say which page comes before the stored ones: set"
                " hicache_storage_pass_prefix_keys to true, so that the pool evicts suffixes first"
            )
        return b""

    # ------------------------------------------------------------ the interface before v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Always a miss: `interface_v1` selects `batch_get_v1` instead."""
        return self.batch_get([key])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Always misses, as `get`."""
        self._metrics.trouble("load", "old_interface", "SGLang does not use interface_v1")
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores nothing: `interface_v1` selects `batch_set_v1` instead."""
        return self.batch_set([key])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores nothing: `interface_v1` selects `batch_set_v1` instead."""
        self._metrics.trouble("store", "old_interface", "SGLang does not use interface_v1")
        return False

    # ------------------------------------------------------------ administration

    def clear(self) -> bool:
        """Ends this instance's leases.

        The pool is not cleared, because other instances use it, too.
        """
        log.warning("kvpool: the pool is not cleared, because other instances use it, too")
        self._leases.clear()
        return False

    def get_stats(self) -> Any:
        """Pages and bandwidths for SGLang's own metrics; None if it does not collect them."""
        return self._metrics.for_sglang() if self._config.enable_storage_metrics else None

    def close(self) -> None:
        """End all leases and close the client.

        Later calls are misses; a second call does nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._leases.clear()
            self._pool.close()

    def _space(self, name: str) -> PageSpace:
        space = self._spaces.get(name)
        if space is None:
            raise ConfigError(f"SGLang has registered no host pool {name!r}")
        return space

    def _guarded(
        self, operation: str, breaker: CircuitBreaker, miss: T, call: Callable[[], T]
    ) -> T:
        """The result of `call`; `miss` if the pool is down or `call` fails."""
        started = time.monotonic()
        if self._is_closed or not breaker.may_ask(started):
            self._metrics.trouble(operation, "pool_down", "the pool did not answer recently")
            return miss
        try:
            result = call()
        except WrongByteCount as error:
            self._metrics.trouble(operation, error.code, str(error), defect=error)
            return miss
        except KvpoolError as error:
            is_unwanted = isinstance(error, (LayoutMismatch, HashMismatch))
            if is_unwanted or says_pool_is_down(error):
                self._unreached(breaker, operation, error)
            else:
                self._metrics.trouble(operation, error.code, str(error))
            return miss
        except Exception as error:  # noqa: BLE001 - any exception would end SGLang's thread
            self._metrics.trouble(operation, "defect", repr(error), defect=error)
            return miss
        finally:
            self._metrics.took(operation, time.monotonic() - started)
        if breaker.answered():
            self._metrics.reachable(True)
            log.warning("kvpool: the pool answers again")
        return result

    def _unreached(self, breaker: CircuitBreaker, operation: str, error: KvpoolError) -> None:
        breaker.failed(time.monotonic())
        self._metrics.reachable(False)
        self._metrics.trouble(operation, error.code, str(error))


def _text(name: Any) -> str:
    """A pool's name as text: SGLang passes members of an enumeration, or text."""
    return str(getattr(name, "value", name))


def _needed(host_indices: torch.Tensor | None, name: str) -> torch.Tensor:
    if host_indices is None:
        raise WrongByteCount(f"a transfer of {name!r} without host_indices")
    return host_indices

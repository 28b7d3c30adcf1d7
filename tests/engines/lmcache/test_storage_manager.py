"""LMCache's storage manager, L1, controllers and plugin loader over a real pool."""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache import server_side as s
from tests.support.process_cluster import Cluster, wait_until


def test_chunks_evicted_from_l1_come_back_from_the_pool(cluster: Cluster) -> None:
    prompt = s.keys(1, 40)
    with s.storage_manager(s.parameters(cluster)) as manager:
        s.put_in_l1(manager, prompt)
        s.wait_stored(manager, 40)
        assert s.prefetch(manager, [prompt]).l1_hit_count == 40
        manager.finish_read_prefetched(prompt)
        assert manager.delete_l1_keys(prompt) == (40, 0)
        result = s.prefetch(manager, [prompt])
        assert (result.l1_hit_count, result.l2_hit_count) == (0, 40)
        s.read_back(manager, prompt, result)


def test_one_servers_chunks_are_anothers_hits(cluster: Cluster) -> None:
    prompt = s.keys(2, 24)
    longer = [*prompt, *s.keys(3, 8)]
    with s.storage_manager(s.parameters(cluster)) as first:
        s.put_in_l1(first, prompt)
        s.wait_stored(first, 24)
    with s.storage_manager(s.parameters(cluster)) as second:
        [(_, adapter)] = second.l2_adapters()
        wait_until(lambda: len(find(adapter, prompt)) == 24, "the index knows all")
        result = s.prefetch(second, [longer])
        assert [row.count_leading_ones() for row in result.hit_cells] == [24]
        assert result.l2_hit_count == 24
        s.read_back(second, prompt, result)
    wait_until(
        lambda: cluster.is_settled("n0"), "no lease is left, and all memory is accounted for"
    )


def test_two_ranks_hit_only_as_far_as_both_have_it(cluster: Cluster) -> None:
    ranks = [ObjectKey.ComputeKVRank(2, rank, 2, rank) for rank in range(2)]
    rows = [s.keys(4, 12, kv_rank=rank) for rank in ranks]
    with s.storage_manager(s.parameters(cluster)) as manager:
        s.put_in_l1(manager, rows[0])
        s.put_in_l1(manager, rows[1][:7])
        s.wait_stored(manager, 19)
        manager.delete_l1_keys([*rows[0], *rows[1]])
        [(_, adapter)] = manager.l2_adapters()
        wait_until(lambda: len(find(adapter, rows[1][:7])) == 7, "the index knows all")
        result = s.prefetch(manager, rows)
        assert [row.count_leading_ones() for row in result.hit_cells] == [7, 7]
        s.read_back(manager, [*rows[0][:7], *rows[1][:7]], result)
    wait_until(lambda: cluster.is_settled("n0"), "what the plan dropped was unlocked, too")


def test_what_lmcache_evicts_from_a_full_l1_is_loaded_from_the_pool(cluster: Cluster) -> None:
    prompts = [s.keys(100 + n, 16) for n in range(5)]
    with s.storage_manager(s.parameters(cluster), l1_bytes=5 * 16 * s.CHUNK_BYTES) as manager:
        for prompt in prompts:
            s.put_in_l1(manager, prompt)
        s.wait_stored(manager, 5 * 16)
        used = 5 * 16 * s.CHUNK_BYTES
        wait_until(lambda: l1_bytes(manager) <= used - 16 * s.CHUNK_BYTES, "L1 has made room")
        result = s.prefetch(manager, [prompts[0]])
        assert result.l2_hit_count > 0
        assert result.l1_hit_count + result.l2_hit_count == 16
        s.read_back(manager, prompts[0], result)


def l1_bytes(manager: StorageManager) -> int:
    """In use."""
    return int(manager.report_status()["l1_manager"]["memory_used_bytes"])


def find(adapter: Any, keys: list[ObjectKey]) -> list[ObjectKey]:
    """Those that a lookup finds; nothing stays locked."""
    task = adapter.submit_lookup_and_lock_task(keys, {0: s.LAYOUT})
    bits = wait_until(lambda: adapter.query_lookup_and_lock_result(task), "a result")
    found = [key for i, key in enumerate(keys) if bits.test(i)]
    adapter.submit_unlock(found)
    return found

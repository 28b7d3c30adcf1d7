"""LMCache's own storage manager, its L1, its controllers and its plugin loader, over a real pool."""

from __future__ import annotations

from tests.engines.lmcache import server_side as s
from tests.integration.cluster import Cluster


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

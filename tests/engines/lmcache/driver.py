"""What LMCache's controllers do with an L2 adapter, with LMCache's own memory objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator

from kvpool.engines.lmcache import KVPoolL2Adapter
from tests.engines.lmcache import server_side as s
from tests.support.process_cluster import Cluster, wait_until

GROUPS = {0: s.LAYOUT}


class Driver:
    """Submits, waits for the signal, and takes the result."""

    def __init__(self, adapter: KVPoolL2Adapter, allocator: HostMemoryAllocator) -> None:
        self.adapter = adapter
        self.allocator = allocator

    def memory(self, count: int, layout: MemoryLayoutDesc = s.LAYOUT) -> list[Any]:
        made = [self.allocator.allocate(layout.shapes, layout.dtypes) for _ in range(count)]
        assert all(m is not None for m in made)
        return made

    def try_store(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = s.LAYOUT) -> Any:
        """Store and wait for the end, whatever it is."""
        objects = self.memory(len(keys), layout)
        for key, memory in zip(keys, objects, strict=True):
            s.bytes_of(memory)[:] = s.content(key, memory.get_size())
        task = self.adapter.submit_store_task(list(keys), objects)
        assert s.wait_signal(self.adapter.get_store_event_fd()) == 1
        results = self.adapter.pop_completed_store_tasks()
        assert list(results) == [task]
        for memory in objects:
            memory.ref_count_down()
        return results[task]

    def store(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = s.LAYOUT) -> Any:
        """Store, and wait until it can be looked up."""
        result = self.try_store(keys, layout)
        self.wait_known(keys, layout)
        return result

    def wait_known(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = s.LAYOUT) -> None:
        """The pool's index hears of what was stored a little later."""
        groups = dict.fromkeys((0, 1), layout)

        def is_known() -> bool:
            bits = self.lookup(keys, groups)
            self.adapter.submit_unlock([k for k, found in zip(keys, bits, strict=True) if found])
            return all(bits)

        wait_until(is_known, "what was stored is found")

    def wait_known_to_others(
        self, cluster: Cluster, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = s.LAYOUT
    ) -> None:
        """As `wait_known`, by an adapter that stored nothing and so depends on the index."""
        with s.adapter(s.parameters(cluster)) as other:
            Driver(other, self.allocator).wait_known(keys, layout)

    def lookup(
        self, keys: Sequence[ObjectKey], groups: dict[int, MemoryLayoutDesc] | None = None
    ) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), groups or GROUPS)
        assert s.wait_signal(self.adapter.get_lookup_and_lock_event_fd()) == 1
        return self._bits(self.adapter.query_lookup_and_lock_result(task), len(keys))

    def load(
        self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = s.LAYOUT
    ) -> tuple[list[bool], list[Any]]:
        objects = self.memory(len(keys), layout)
        for memory in objects:
            s.bytes_of(memory)[:] = 0
        task = self.adapter.submit_load_task(list(keys), objects)
        assert s.wait_signal(self.adapter.get_load_event_fd()) == 1
        return self._bits(self.adapter.query_load_result(task), len(keys)), objects

    def assert_loads(self, keys: Sequence[ObjectKey]) -> None:
        bits, objects = self.load(keys)
        assert bits == [True] * len(keys)
        for key, memory in zip(keys, objects, strict=True):
            assert np.array_equal(s.bytes_of(memory), s.content(key))
            memory.ref_count_down()

    @staticmethod
    def _bits(bitmap: Any, count: int) -> list[bool]:
        assert bitmap is not None
        return [bool(bitmap.test(i)) for i in range(count)]

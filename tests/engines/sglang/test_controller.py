"""The backend under SGLang's own cache controller, with its queries and I/O threads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from kvpool.engines.sglang import KVPoolStorage
from tests.engines.sglang.real import HEAD_DIM, HEADS, LAYERS, PAGE, mha_pool, page_bytes
from tests.support.process_cluster import wait_until

ONE_RANK = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_dcp_size": 1,
    "attn_dcp_rank": 0,
}
TOKENS = list(range(5 * PAGE))


class _Allocator:
    """What the controller wants of SGLang's allocator: the device's pool, here one on the CPU."""

    def __init__(self) -> None:
        self._pool = MHATokenToKVPool(
            size=64,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )

    def get_kvcache(self) -> Any:
        return self._pool


def _page_hashes(tokens: Sequence[int], prior: str | None, page_size: int) -> list[str]:
    """Replaces SGLang's own, which it compiles on first use: half a minute, with a C++ compiler."""
    hashes = []
    for start in range(0, len(tokens), page_size):
        page = torch.tensor(tokens[start : start + page_size]).numpy().tobytes()
        prior = hashlib.sha256((prior or "").encode() + page).hexdigest()
        hashes.append(prior)
    return hashes


@pytest.fixture
def controller(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[cache_controller.HiCacheController]:
    monkeypatch.setattr(cache_controller, "get_storage_hash_str", _page_hashes)
    host = mha_pool("page_first", pages=32)
    with get_parallel().override(**ONE_RANK):
        made = cache_controller.HiCacheController(
            _Allocator(), host, PAGE, None, threading.Event(), io_backend="direct"
        )
        made.attach_storage_backend(
            "dynamic",
            prefetch_threshold=PAGE,
            model_name="tests/model",
            storage_backend_extra_config=dict(settings),
        )
        yield made
        made.detach_storage_backend()
    assert made.storage_backend is None


def backed_up(controller: Any, tokens: Sequence[int], hashes: list[str]) -> torch.Tensor:
    slots: torch.Tensor = controller.mem_pool_host.alloc(len(tokens))
    controller.write_storage(slots, tokens, hash_value=hashes, prefix_keys=[])
    done = controller.ack_backup_queue.get(timeout=10)
    assert done.completed_tokens == len(tokens)
    return slots


def query(controller: Any, tokens: Sequence[int]) -> Any:
    controller.prefetch("request", tokens, None, [])
    return controller.prefetch_hit_queue.get(timeout=10)


def prefetched(controller: Any, operation: Any) -> int:
    """Let the I/O threads load what was found; returns how many tokens came."""
    operation.host_indices = controller.mem_pool_host.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    completed = 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=10)
        completed = ack.completed_tokens if ack.completed_tokens is not None else completed
        if ack.completed_req:
            return completed


def test_what_the_controller_backs_up_it_prefetches_again(controller: Any) -> None:
    assert isinstance(controller.storage_backend, KVPoolStorage)
    assert controller.page_get_func == controller._page_get_zero_copy
    assert query(controller, TOKENS).storage_hit_count == 0
    hashes = _page_hashes(TOKENS, None, PAGE)
    source = backed_up(controller, TOKENS[: 4 * PAGE], hashes[:4])
    wait_until(lambda: query(controller, TOKENS).storage_hit_count == 4 * PAGE, "it is found")

    operation = query(controller, TOKENS)
    assert operation.hash_value == hashes[:4]
    assert prefetched(controller, operation) == 4 * PAGE
    host = controller.mem_pool_host
    for i in range(0, 4 * PAGE, PAGE):
        target, origin = int(operation.host_indices[i]) // PAGE, int(source[i]) // PAGE
        assert target != origin
        assert page_bytes(host, target) == page_bytes(host, origin)


def test_its_threads_outlive_a_pool_that_is_lost(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = _page_hashes(TOKENS, None, PAGE)
    backed_up(controller, TOKENS, hashes)
    wait_until(lambda: query(controller, TOKENS).storage_hit_count == len(TOKENS), "it is found")
    operation = query(controller, TOKENS)
    controller.storage_backend._pool.close()  # between look-up and load
    assert prefetched(controller, operation) == 0
    assert query(controller, TOKENS).storage_hit_count == 0
    slots: torch.Tensor = controller.mem_pool_host.alloc(PAGE)
    controller.write_storage(slots, TOKENS[:PAGE], hash_value=hashes[:1], prefix_keys=[])
    assert controller.ack_backup_queue.get(timeout=10).completed_tokens == 0
    threads = (controller.prefetch_thread, controller.prefetch_io_aux_thread)
    assert all(t.is_alive() for t in (*threads, controller.backup_thread))

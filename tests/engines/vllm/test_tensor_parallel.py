"""Two ranks: each moves its own part, and a block counts when both parts are in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.engines.vllm.metadata import Handshake
from kvpool.errors import LayoutMismatch
from tests.engines.vllm.harness import Engine, expected_output
from tests.engines.vllm.test_serving import PROMPT, gate, has_no_leases
from tests.support.process_cluster import Cluster

MakeEngine = Callable[..., Engine]
EXPECTED = expected_output(PROMPT, 4, ranks=2)


def test_each_rank_reads_what_its_like_has_written(engine: MakeEngine, cluster: Cluster) -> None:
    first, second = engine(ranks=2), engine(ranks=2)
    assert first.run("a", PROMPT) == EXPECTED
    assert first.totals["blocks_stored"] == 2 * 4
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["loaded_tokens"] == 256
    assert second.computed_tokens == 300 - 256 + 3
    has_no_leases(cluster)


def test_a_block_without_all_parts_is_a_miss(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.engines.vllm.saver import Saver

    first, second = engine(ranks=2), engine(ranks=2)
    original = Saver._save

    def only_rank_0(self: Saver, *arguments: object) -> bool:
        return self._part == 0 and original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Saver, "_save", only_rank_0)
    first.run("a", PROMPT)
    assert second.run("a", PROMPT) == EXPECTED
    assert second.totals["misses"] == 1
    assert second.totals.get("loads", 0) == 0


def test_pages_are_held_until_both_ranks_are_done(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.engines.vllm.saver import Saver

    one = engine(ranks=2, pages=40)
    original = Saver._save
    hold, held = gate(monkeypatch, Saver, "_save")
    slow = Saver._save

    def save(self: Saver, *arguments: object) -> bool:
        chosen = slow if self._part else original
        return chosen(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Saver, "_save", save)
    one.add("a", PROMPT, 1)
    while not one.outputs["a"]:
        one.step()
    assert held.wait(30)
    for _ in range(20):
        one.step()
    pool = one.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 39 - 16
    hold.set()
    one.drain()
    assert pool.get_num_free_blocks() == 39


def test_one_ranks_failed_load_is_computed_again_by_all(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.engines.vllm.loader import Loader

    first, second = engine(ranks=2), engine(ranks=2)
    first.run("a", PROMPT)
    original = Loader._load
    monkeypatch.setattr(
        Loader, "_load", lambda self, *rest: min(original(self, *rest), 1 if self._part else 4)
    )
    assert second.run("a", PROMPT) == EXPECTED
    assert second.computed_tokens == 300 - 64 + 3


def test_ranks_that_disagree_are_refused_at_start(engine: MakeEngine) -> None:
    one = engine(ranks=2)
    mine = one.workers[0].get_handshake_metadata()
    assert isinstance(mine, Handshake)
    import msgspec

    other = Handshake(msgspec.structs.replace(mine.facts, page_tokens=32))
    with pytest.raises(LayoutMismatch, match="rank 1"):
        one.connector.set_xfer_handshake_metadata({0: mine, 1: other})

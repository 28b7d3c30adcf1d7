"""Hot prefixes: which blocks are hot, and that a node is asked to copy them."""

from __future__ import annotations

import pytest

from conductor.index.memory import complete
from conductor.scheduling.hot_blocks import HotBlocks
from kvpool.blocks.hashing import hash_chain, pack_hashes
from kvpool.blocks.tier import Tier
from kvpool.errors import InvalidArgument
from kvpool.wire import WireServer
from kvpool.wire import messages as m
from tests.support.scripted import NAMESPACE, Conductor, ScriptedWorker, conductor
from tests.support.waiting import until

RUN = [bytes([number]) * 16 for number in range(6)]


def test_a_block_is_hot_after_two_requests_and_only_hot_blocks_are_copied() -> None:
    hot = HotBlocks()
    assert hot.requested("n", RUN[:4], 0.0) == (0, 0)
    assert hot.requested("other", RUN[:4], 0.0) == (0, 0)
    assert hot.requested("n", [*RUN[:3], b"x" * 16], 0.0) == (0, 3)


def test_blocks_copied_lately_rest_and_the_copy_continues_behind_them() -> None:
    hot = HotBlocks(rest_s=60.0)
    hot.requested("n", RUN, 0.0)
    hot.copying("n", RUN[:2], 0.0)
    assert hot.requested("n", RUN, 1.0) == (2, 4)
    hot.copying("n", RUN[2:], 1.0)
    assert hot.requested("n", RUN, 2.0)[1] == 0
    assert hot.requested("n", RUN, 60.5) == (0, 6)


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    hot = HotBlocks(capacity=3)
    hot.requested("n", RUN[:1], 0.0)
    hot.requested("n", RUN[1:4], 0.0)
    assert len(hot) == 3
    assert hot.requested("n", RUN[:1], 0.0) == (0, 0)
    with pytest.raises(InvalidArgument):
        HotBlocks(0)


async def test_the_second_request_that_reads_from_afar_has_its_prefix_copied() -> None:
    worker = ScriptedWorker("w")
    async with conductor(worker, replications_at_once=1) as running:
        far, _ = await _join(running, "far", "elsewhere")
        near, asked = await _join(running, "near", "h")
        hashes = hash_chain(NAMESPACE, [65] * 10)
        stored = m.BlockEvent("stored", NAMESPACE.namespace_id, pack_hashes(hashes), Tier.DRAM)
        complete(
            running.cluster.node_reports.events(m.NodeEvents("far", 1, 1, [stored], True, True))
        )
        await running.ask()
        assert "replications:asked" not in running.counters
        await running.ask()
        await until(lambda: running.counters.get("replicated_blocks") == 2, "the copy is made")
        await running.ask()
        assert running.counters["replications:asked"] == 1
        await far.close()
        await near.close()
    [request] = asked
    assert request.hashes == pack_hashes(hashes)
    assert (request.parent, request.source.node_id) == (b"", "far")


async def test_no_copy_is_asked_for_when_none_are_allowed() -> None:
    async with conductor(ScriptedWorker("w"), replications_at_once=0) as running:
        far, _ = await _join(running, "far", "elsewhere")
        near, asked = await _join(running, "near", "h")
        hashes = pack_hashes(hash_chain(NAMESPACE, [65] * 10))
        stored = m.BlockEvent("stored", NAMESPACE.namespace_id, hashes, Tier.DRAM)
        complete(
            running.cluster.node_reports.events(m.NodeEvents("far", 1, 1, [stored], True, True))
        )
        for _ in range(3):
            await running.ask()
        assert not asked
        assert "replications:declined" not in running.counters
        await far.close()
        await near.close()


async def _join(
    running: Conductor, node_id: str, host: str
) -> tuple[WireServer, list[m.Replicate]]:
    """A node that reports every requested copy as done."""
    wire = WireServer("node", node_id, 1)
    asked: list[m.Replicate] = []

    def replicate(request: m.Replicate) -> m.ReplicateReply:
        asked.append(request)
        return m.ReplicateReply(len(request.hashes) // 16, 0, 0, "", {})

    wire.handle(m.RegisterNamespace, lambda _r, _s: m.NamespaceReply(NAMESPACE.namespace_id))
    wire.handle(m.Replicate, lambda request, _s: replicate(request))
    port = await wire.listen("127.0.0.1", 0)
    descriptor = m.NodeDescriptor(node_id, 1, host, f"127.0.0.1:{port}")
    complete(running.cluster.node_reports.join(m.NodeJoin(descriptor, [])))
    return wire, asked
